"""Random draws that do not depend on the layout: a function of (seed, step, call, sample,
block, element).

Every sample draws the same numbers whichever rank, share or micro-batch it is in, so what a
model draws under `data(4)` is what it draws under `serial`. For the time of a step torch's
random kernels themselves are replaced (`Keyed`): that sees dropout wherever it is (inside
attention, an LSTM, a function imported by name), DropPath, noise, and what gradient
checkpointing recomputes in backward, and costs other operations nothing.

Which dimension of a drawn tensor the samples are is seen, not guessed (`seen`): the model runs
on two samples and on three; the dimension that grew, by so many blocks (the heads of an
attention), is theirs. Where none grew the draw is common to all samples (a mask of a weight),
so to all ranks. A draw of which two dimensions grew, or calls in another order, depend on the
layout, and a strategy with such a model is not exact.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.rng.hashing import Distribution, drop_dim, fill_from_hashes, hash_rows
from paragrad.engine.rng.random_kernels import (
    DrawSource,
    draw_torch_number,
    get_draw_box,
    use_draw_source,
)
from paragrad.errors import StepFailed
from paragrad.runtime.generators import (
    fingerprint_generators,
    seed_generators,
    use_seeded_generators,
)

GENERATOR_NAMES = ("torch", "numpy", "random")
TEST_STEP = -1  # in place of a step


@dataclass(frozen=True)
class Draw:
    """A random call of a model's forward. dim: where its samples are, None: common to all
    samples.
    """

    name: str
    dim_count: int
    dim: int | None
    other_sizes: tuple[int, ...]  # the other dimensions, as they were seen


@dataclass(frozen=True)
class Draws:
    """All random calls of a model's forward, as `seen`. by_layout: what makes them depend on
    the layout, or None.

    others: generators (torch, numpy, random) that other draws moved, which are common to all
    samples;  serial: of every call of a part of the model, which of these it is (None: the
    model is whole).
    """

    calls: tuple[Draw, ...] = ()
    layout_dependence: str | None = None
    other_generators: tuple[str, ...] = ()
    serial_calls: tuple[int, ...] | None = None
    # found in steps
    sample_dims: dict[Any, tuple[int | None, int]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __bool__(self) -> bool:
        return bool(self.calls or self.other_generators or self.layout_dependence)

    def __or__(self, other: Draws) -> Draws:
        """What two parts of a batch draw: equal calls of one part stay, for a call is also
        known by its place among them.
        """
        lacking = (call for call in other.calls if call not in self.calls)
        return Draws(
            (*self.calls, *dict.fromkeys(lacking)),
            self.layout_dependence or other.layout_dependence,
            tuple(dict.fromkeys(self.other_generators + other.other_generators)),
        )


class DrawRecorder(DrawSource):
    """Notes every call, and gives every sample the same numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.own_generators: set[str] = set()

    def draw_numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        self.calls.append((name, tuple(tensor.shape)))
        fill_from_hashes(
            tensor, None, hash_rows(len(self.calls), (0,), 1, tensor.device), distribution
        )
        return tensor

    def record_own_generator(self, name: str) -> None:
        self.own_generators.add(name)


# of each number that torch's generator gave, which random call of a forward it is
CallNumbers = dict[int, int]


class KeyedDraws(DrawSource):
    """Keys every draw by the places in the global batch of the samples in this forward
    (`positions`).

    Gradient checkpointing runs parts of the forward again in backward, and restores torch's
    generator for it: every call draws one number there, and a number that was drawn before is
    the same call again. strict: a draw that was not `seen` so ends the step; otherwise it is
    the samples' where its first dimension can be theirs; first: which of this rank's calls the
    first one here is;  calls: of each number drawn which call it is, where backward comes by
    itself.
    """

    # calls that no forward of a part was seen to make are numbered from here
    UNSEEN_CALL_OFFSET = 2**20

    def __init__(
        self,
        draws: Draws,
        seed: int,
        step: int,
        positions: list[int],
        strict: bool = True,
        first_call: int = 0,
        call_numbers: CallNumbers | None = None,
    ) -> None:
        self.draws = draws
        self.seed = seed
        self.step = step
        self.positions = tuple(positions) or (0,)
        self.strict = strict
        self.first_call = first_call
        self.call_numbers: CallNumbers = {} if call_numbers is None else call_numbers

    def skip_call(self) -> None:
        self._number_call()

    def _number_call(self) -> int:
        """Which call of this rank's it is."""
        return self.call_numbers.setdefault(
            draw_torch_number(), self.first_call + len(self.call_numbers)
        )

    def draw_numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        call = self._find_serial_call(self._number_call(), name)
        if not tensor.numel():
            return tensor
        key = (
            int.from_bytes(
                hashlib.blake2b(f"{self.seed} {self.step} {call}".encode(), digest_size=4).digest()
            )
            >> 1
        )
        here = {
            at: each
            for at, each in get_draw_box().items()
            if at < tensor.dim() and tensor.shape[at] == sum(map(len, each[1]))
        }
        shape = tuple(here[at][0] if at in here else size for at, size in enumerate(tensor.shape))
        known = name, shape, len(self.positions), call
        if known not in self.draws.sample_dims:
            self.draws.sample_dims[known] = self._find_sample_dim(name, shape, call)
        dim, blocks = self.draws.sample_dims[known]
        row = hash_rows(key, (0,) if dim is None else self.positions, blocks, tensor.device)
        if dim in here:
            row = torch.cat([row[each.start : each.stop] for each in here[dim][1]])
        fill_from_hashes(
            tensor, dim, row, distribution, {at: places for at, (_, places) in here.items()}
        )
        return tensor

    def _find_serial_call(self, call: int, name: str) -> int:
        """The number that a call has in the whole model."""
        if self.draws.serial_calls is None:
            return call
        if call < len(self.draws.serial_calls):
            return self.draws.serial_calls[call]
        if self.strict:
            raise StepFailed(
                f"{name} draws once more than this part of the model is said to: which call of the "
                f"whole model "
                "that is, is not known; name all of them, in their order, in Share(draws=)"
            )
        return self.UNSEEN_CALL_OFFSET + call

    def _find_sample_dim(
        self, name: str, shape: tuple[int, ...], call: int
    ) -> tuple[int | None, int]:
        """(sample dimension, blocks) of this call: of all that were seen the one that fits, by
        its order where several do.
        """
        samples = len(self.positions)
        fits = [
            draw
            for draw in self.draws.calls
            if draw.name == name
            and draw.dim_count == len(shape)
            and (draw.other_sizes == shape if draw.dim is None else shape[draw.dim] % samples == 0)
        ]
        dims = {draw.dim for draw in fits}
        if len(dims) > 1:
            here = self.draws.calls[call] if call < len(self.draws.calls) else None
            alike = {
                draw.dim
                for draw in fits
                if draw.dim is None or draw.other_sizes == drop_dim(shape, draw.dim)
            }
            dims = {here.dim} if here in fits else alike if len(alike) == 1 else dims
        if len(dims) == 1:
            dim = dims.pop()
            return dim, 1 if dim is None else shape[dim] // samples
        if self.strict:
            raise StepFailed(
                f"{name} draws a tensor of shape {shape} for {samples} samples, not as in the "
                f"first step: which "
                "numbers are whose is not known, so it would be another training than on one worker"
            )
        return (0, shape[0] // samples) if shape and shape[0] % samples == 0 else (None, 1)


@contextlib.contextmanager
def key_draws(
    draws: Draws,
    seed: int,
    step: int,
    positions: list[int],
    always: bool = False,
    strict: bool = True,
    first_call: int = 0,
    call_numbers: CallNumbers | None = None,
) -> Iterator[None]:
    """Around forward and backward of some samples: what they draw is keyed (`Keyed`), if they
    draw, or always; then strictly, unless all ranks see the same samples. Draws from other
    generators, which are common to all samples, begin alike in every forward of a step, on
    every rank.
    """
    if not draws and not always:
        yield
        return
    if draws.other_generators:
        seed_generators(f"forward {seed} {step}")
    with use_draw_source(
        KeyedDraws(draws, seed, step, positions, always and strict, first_call, call_numbers)
    ):
        yield


@contextlib.contextmanager
def key_test_draws(
    draws: Draws, seed: int, places: list[int], first_call: int = 0
) -> Iterator[None]:
    """Around a forward in a test: what it draws (dropout that stays on, noise) is keyed by the
    samples' places in the dataset. So every rank draws its part of the same numbers, and every
    test of a training the same. What comes from numpy and random is the same on all ranks that
    test these samples together. first: as Keyed has it.
    """
    with (
        use_seeded_generators(f"test {seed} {places[0]}"),
        use_draw_source(
            KeyedDraws(draws, seed, TEST_STEP, places, strict=False, first_call=first_call)
        ),
    ):
        yield


@contextlib.contextmanager
def check_seen_draws(draws: Draws, is_inspected: bool) -> Iterator[None]:
    """Around passes, where they are looked at: numpy's and Python's generators move if they
    were seen to, and are seeded in every forward then. Raises StepFailed where they do so all
    the same.
    """
    before = fingerprint_generators() if is_inspected and not draws.other_generators else {}
    yield
    now = fingerprint_generators() if before else {}
    if moved := [name for name in before if name != "torch" and now[name] != before[name]]:
        raise StepFailed(
            f"the model or its loss draws from {moved[0]}, and did not when it was looked at: "
            f"ranks that have a "
            "sample together would each draw numbers of their own; draw by torch, or in every "
            "step, or train it "
            "with data(n)"
        )


# ---- what a forward draws --------------------------------------------------------------------
def inspect_draws(forward: Callable[[int], object]) -> Draws:
    """What forward(samples) draws, run on two samples and on three."""
    recordings = []
    moved = []
    for samples in (2, 3):
        seed_generators("what a model draws")
        before = fingerprint_generators()
        with use_draw_source(DrawRecorder()) as recording:
            forward(samples)
        recordings.append(recording)
        moved.append(
            {
                name: state
                for name, state in fingerprint_generators().items()
                if state != before[name]
            }
        )
    two, three = (recording.calls for recording in recordings)
    if not (two or three or moved[0] or moved[1] or recordings[0].own_generators):
        return Draws()
    wrong = [f"{name} by a generator of its own" for name in sorted(recordings[0].own_generators)]
    wrong += [
        f"draws from {name}, which differ with the number of samples"
        for name in GENERATOR_NAMES
        if moved[0].get(name) != moved[1].get(name)
    ]
    if [name for name, _ in two] != [name for name, _ in three]:
        wrong.append("other random calls where there are more samples")
        return Draws((), "; ".join(wrong))
    calls = []
    for (name, shape), (_, larger) in zip(two, three, strict=True):
        call = _infer_draw(name, shape, larger)
        if isinstance(call, str):
            wrong.append(call)
        else:
            calls.append(call)
    return Draws(
        tuple(calls),
        "; ".join(dict.fromkeys(wrong)) or None,
        tuple(name for name in GENERATOR_NAMES if name in moved[0]),
    )


def _infer_draw(name: str, two: tuple[int, ...], three: tuple[int, ...]) -> Draw | str:
    grown = [dim for dim, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) != len(three) or len(grown) > 1:
        return (
            f"{name} of shape {two} for two samples and {three} for three, which is no number "
            f"of its own for each"
        )
    if not grown:
        return Draw(name, len(two), None, two)
    dim = grown[0]
    blocks, rest = divmod(two[dim], 2)
    if name == "randperm" or rest or three[dim] != 3 * blocks:
        return f"{name} of shape {two} for two samples and {three} for three, which mixes samples"
    return Draw(name, len(two), dim, drop_dim(two, dim))
