"""Random draws that do not depend on the layout.

A draw is a function of (seed, step, call, sample, block, element). Every sample draws the same
numbers in any rank, share or micro-batch. So a model draws under `data(4)` what it draws under
`serial`.

For the time of a step, torch's random kernels themselves are replaced (`KeyedDraws`). This covers
dropout everywhere (inside attention, an LSTM, a function imported by name), DropPath and noise. It
also covers what gradient checkpointing recomputes in backward. Other operations cost nothing more.

The dimension of the samples in a drawn tensor is measured, not guessed (`inspect_draws`): the model
runs on two samples and on three. The dimension that grew by some number of blocks (the heads of an
attention) belongs to the samples. If no dimension grew, the draw is common to all samples and ranks
(a mask of a weight). If two dimensions grew, or the order of the calls changed, the draws depend on
the layout. A strategy with such a model is not exact.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from paragrad.engine.rng.hashing import Distribution, drop_dim, fill_from_hashes, hash_rows
from paragrad.engine.rng.random_kernels import (
    DRAW_SOURCES,
    DrawSource,
    draw_torch_number,
    get_draw_box,
    get_torch_random,
    replace_kernels,
)
from paragrad.errors import StepFailed
from paragrad.runtime.generators import (
    fingerprint_generators,
    seed_generators,
    use_seeded_generators,
)

DrawSourceType = TypeVar("DrawSourceType", bound=DrawSource)
GENERATOR_NAMES = ("torch", "numpy", "random")
TEST_STEP = -1  # used as the number of the step in a test


@dataclass(frozen=True)
class Draw:
    """A random call in the forward pass of a model.

    Attributes:
        name: Name of the kernel.

        dim_count: Number of dimensions of the drawn tensor.

        dim: Dimension of the samples; None: the draw is common to all samples.

        other_sizes: Sizes of the other dimensions, as measured.
    """

    name: str
    dim_count: int
    dim: int | None
    other_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Draws:
    """All random calls in the forward pass of a model, as `inspect_draws` found them.

    Attributes:
        calls: The calls in their order.

        layout_dependence: Why the draws depend on the layout, or None.

        other_generators: Generators (torch, numpy, random) that other draws moved; these draws are
            common to all samples.

        serial_calls: For each call of a part of the model, its index among the calls of the whole
            model. None: the model is whole.

        sample_dims: A cache, filled in steps: the sample dimension and the blocks of each call.
    """

    calls: tuple[Draw, ...] = ()
    layout_dependence: str | None = None
    other_generators: tuple[str, ...] = ()
    serial_calls: tuple[int, ...] | None = None
    sample_dims: dict[Any, tuple[int | None, int]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __bool__(self) -> bool:
        return bool(self.calls or self.other_generators or self.layout_dependence)

    def __or__(self, other: Draws) -> Draws:
        """Combine the draws of two parts of a batch.

        Equal calls within one part are all kept, because a call is also identified by its place
        among them.
        """
        missing = (call for call in other.calls if call not in self.calls)
        return Draws(
            (*self.calls, *dict.fromkeys(missing)),
            self.layout_dependence or other.layout_dependence,
            tuple(dict.fromkeys(self.other_generators + other.other_generators)),
        )


class DrawRecorder(DrawSource):
    """Records every call, and gives every sample the same numbers.

    Attributes:
        calls: (name, shape) of each call.
        own_generators: Kernels that were called with their own generator.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.own_generators: set[str] = set()

    def draw_numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        """Record the call and fill the tensor.

        Args:
            name: Name of the kernel.
            tensor: The tensor to fill.
            distribution: The distribution of the numbers.

        Returns:
            The tensor.
        """
        self.calls.append((name, tuple(tensor.shape)))
        fill_from_hashes(
            tensor, None, hash_rows(len(self.calls), (0,), 1, tensor.device), distribution
        )
        return tensor

    def record_own_generator(self, name: str) -> None:
        """Record a call that brought its own generator.

        Args:
            name: Name of the kernel.
        """
        self.own_generators.add(name)


# for each number drawn from torch's generator: the index of the random call in a forward pass
CallNumbers = dict[int, int]


class KeyedDraws(DrawSource):
    """Draws numbers that depend on the places of the samples in the global batch.

    Gradient checkpointing runs parts of the forward pass again in backward, and restores torch's
    generator for it. Every call draws one number from that generator. If this number was drawn
    before, the call is the same one again.

    Args:
        draws: The known random calls of a forward pass.

        seed: The seed of the job.

        step: Number of the step, or `TEST_STEP`.

        positions: Places of the samples of this forward pass in the global batch.

        strict: A draw that does not fit the known calls raises StepFailed. Otherwise its first
            dimension belongs to the samples if its size allows it.

        first_call: Index of the first call here among the calls of this rank.

        call_numbers: For each number drawn from torch's generator, the index of its call. Pass it
            if backward runs in a context of its own.

        has_all_samples: Whether the whole global batch is here. A draw that does not fit is then
            the same as on one worker, although it is not known which numbers are whose.
    """

    # calls that are not in `Draws.serial_calls` are numbered from here
    UNSEEN_CALL_OFFSET = 2**20

    def __init__(
        self,
        draws: Draws,
        seed: int,
        step: int,
        positions: Sequence[int],
        strict: bool = True,
        first_call: int = 0,
        call_numbers: CallNumbers | None = None,
        has_all_samples: bool = False,
    ) -> None:
        self.draws = draws
        self.seed = seed
        self.step = step
        self._given_positions = positions
        self.strict = strict
        self.has_all_samples = has_all_samples
        self.first_call = first_call
        self.call_numbers: CallNumbers = {} if call_numbers is None else call_numbers

    def move_to(self, positions: Sequence[int], first_call: int, call_numbers: CallNumbers) -> None:
        """Go on with other samples of the step, or with another pass of the same ones.

        Args:
            positions: As the argument of the class.
            first_call: Likewise.
            call_numbers: Likewise.
        """
        self._given_positions = positions
        self.__dict__.pop("positions", None)
        self.first_call = first_call
        self.call_numbers = call_numbers

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Places of the samples in the global batch; made at the first draw."""
        return tuple(self._given_positions) or (0,)

    def skip_call(self) -> None:
        """Count a call that another rank makes."""
        self._number_call()

    def _number_call(self) -> int:
        """Return the index of this call on this rank."""
        return self.call_numbers.setdefault(
            draw_torch_number(), self.first_call + len(self.call_numbers)
        )

    def draw_numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        """Fill a tensor with the numbers of this call for the samples that are here.

        Args:
            name: Name of the kernel.
            tensor: The tensor to fill.
            distribution: The distribution of the numbers.

        Returns:
            The tensor.

        Raises:
            StepFailed: The draw does not fit the known calls, and `strict` is set. Or a CUDA graph
                is recorded, which would repeat the numbers of this step.
        """
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise StepFailed(
                f"{name} draws while a CUDA graph is recorded, which would draw the same numbers "
                "in every step; use torch.compile without mode='reduce-overhead'"
            )
        call = self._find_serial_call(self._number_call(), name)
        if not tensor.numel():
            return tensor
        key = (
            int.from_bytes(
                hashlib.blake2b(f"{self.seed} {self.step} {call}".encode(), digest_size=4).digest()
            )
            >> 1
        )
        divided = {
            at: each
            for at, each in get_draw_box().items()
            if at < tensor.dim() and tensor.shape[at] == sum(map(len, each[1]))
        }
        shape = tuple(
            divided[at][0] if at in divided else size for at, size in enumerate(tensor.shape)
        )
        cache_key = name, shape, len(self.positions), call
        if cache_key not in self.draws.sample_dims:
            self.draws.sample_dims[cache_key] = self._find_sample_dim(name, shape, call)
        dim, blocks = self.draws.sample_dims[cache_key]
        row_hashes = hash_rows(key, (0,) if dim is None else self.positions, blocks, tensor.device)
        if dim in divided:
            row_hashes = torch.cat([row_hashes[each.start : each.stop] for each in divided[dim][1]])
        fill_from_hashes(
            tensor,
            dim,
            row_hashes,
            distribution,
            {at: places for at, (_, places) in divided.items()},
        )
        return tensor

    def _find_serial_call(self, call: int, name: str) -> int:
        """Return the index of a call among the calls of the whole model."""
        if self.draws.serial_calls is None:
            return call
        if call < len(self.draws.serial_calls):
            return self.draws.serial_calls[call]
        if self.strict:
            raise StepFailed(
                f"{name} draws more often than ModelShard(draw_calls=) says for this part of "
                "the model; name there all its calls, by their numbers in the whole "
                "model, in their order"
            )
        return self.UNSEEN_CALL_OFFSET + call

    def _find_sample_dim(
        self, name: str, shape: tuple[int, ...], call: int
    ) -> tuple[int | None, int]:
        """Return (sample dimension, blocks) of this call.

        The known call that fits decides; if several fit, their order decides.
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
            known_call = self.draws.calls[call] if call < len(self.draws.calls) else None
            exact_dims = {
                draw.dim
                for draw in fits
                if draw.dim is None or draw.other_sizes == drop_dim(shape, draw.dim)
            }
            dims = (
                {known_call.dim}
                if known_call in fits
                else exact_dims
                if len(exact_dims) == 1
                else dims
            )
        if len(dims) == 1:
            dim = dims.pop()
            return dim, 1 if dim is None else shape[dim] // samples
        if self.strict and not self.has_all_samples:
            raise StepFailed(
                f"{name} draws a tensor of shape {shape} for {samples} samples, not as in the "
                "first step: paragrad cannot give each sample its numbers, so it is not the "
                "same training as on one worker"
            )
        return (0, shape[0] // samples) if shape and shape[0] % samples == 0 else (None, 1)


class DrawSourceUse(Generic[DrawSourceType]):
    """Uses a source of numbers while this context is active. Every step enters one.

    Args:
        source: The source.
        seed_text: The text that seeds the other generators at the entry; empty: they go on.
    """

    __slots__ = ("depth", "seed_text", "source")

    def __init__(self, source: DrawSourceType, seed_text: str = "") -> None:
        self.source = source
        self.seed_text = seed_text

    def __enter__(self) -> DrawSourceType:
        if self.seed_text:
            seed_generators(self.seed_text)
        self.depth = len(DRAW_SOURCES)
        DRAW_SOURCES.append(self.source)
        return self.source

    def __exit__(self, *error: object) -> None:
        del DRAW_SOURCES[self.depth :]


def use_draw_source(
    source: DrawSourceType, seed_text: str = ""
) -> AbstractContextManager[DrawSourceType]:
    """Use a source of numbers for the random kernels, around forward and backward passes.

    Args:
        source: The source.
        seed_text: As in `DrawSourceUse`.

    Returns:
        A context manager that gives the source.
    """
    get_torch_random()
    replace_kernels()
    return DrawSourceUse(source, seed_text)


class ConstantDraws(DrawSource):
    """Gives the same number for every draw, to see what a model does without chance.

    Args:
        number: The number; whole numbers are drawn as 1.
    """

    def __init__(self, number: float) -> None:
        self.number = number

    def draw_numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        """Fill the tensor with the number.

        Args:
            name: Name of the kernel.
            tensor: The tensor.
            distribution: The distribution of the numbers.

        Returns:
            The tensor.
        """
        return tensor.fill_(self.number if tensor.is_floating_point() else 1)


class _CallCounter(DrawSource):
    """Counts how often numbers are drawn."""

    count = 0

    def draw_numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        """Count the call, and leave the tensor unchanged.

        Args:
            name: Name of the kernel.
            tensor: The tensor.
            distribution: The distribution of the numbers.

        Returns:
            The tensor.
        """
        self.count += 1
        return tensor


def skip_random_calls(call: Callable[[], object]) -> None:
    """Count the random calls that another rank makes.

    Args:
        call: Makes the same draws, here with other tensors.
    """
    if DRAW_SOURCES:
        with use_draw_source(_CallCounter()) as counter:
            call()
        for _ in range(counter.count):
            DRAW_SOURCES[-1].skip_call()


def key_draws(
    draws: Draws,
    seed: int,
    step: int,
    positions: Sequence[int],
    always: bool = False,
    strict: bool = True,
    first_call: int = 0,
    call_numbers: CallNumbers | None = None,
    has_all_samples: bool = False,
) -> AbstractContextManager[Any]:
    """Key the draws in the forward and backward passes of some samples (`KeyedDraws`).

    Draws from other generators are common to all samples. They start from the same state in every
    forward pass of a step, on every rank.

    Args:
        draws: The known random calls. If there are none, nothing is keyed.

        seed: The seed of the job.

        step: Number of the step.

        positions: Places of the samples in the global batch.

        always: Key the draws even if no random calls are known.

        strict: With `always`, refuse draws that do not fit. False if all ranks see the same
            samples.

        first_call: As in `KeyedDraws`.

        call_numbers: As in `KeyedDraws`.

        has_all_samples: As in `KeyedDraws`.
    """
    if not always and not draws:
        return contextlib.nullcontext()
    return use_draw_source(
        KeyedDraws(
            draws,
            seed,
            step,
            positions,
            always and strict,
            first_call,
            call_numbers,
            has_all_samples,
        ),
        f"forward {seed} {step}" if draws.other_generators else "",
    )


@contextlib.contextmanager
def key_test_draws(
    draws: Draws, seed: int, places: Sequence[int], first_call: int = 0
) -> Iterator[None]:
    """Key the draws in the forward pass of a test by the places of the samples in the dataset.

    A model may draw in a test (dropout that stays on, noise). Every rank draws its part of the same
    numbers, and every test of a training draws the same numbers. Draws from numpy and random are
    the same on all ranks that test these samples together.

    Args:
        draws: The known random calls.
        seed: The seed of the job.
        places: Places of the samples in the dataset.
        first_call: As in `KeyedDraws`.
    """
    with (
        use_seeded_generators(f"test {seed} {places[0]}"),
        use_draw_source(
            KeyedDraws(draws, seed, TEST_STEP, places, strict=False, first_call=first_call)
        ),
    ):
        yield


@contextlib.contextmanager
def check_seen_draws(draws: Draws) -> Iterator[None]:
    """Check that generators of numpy and Python do not move, unless they were known to.

    If they are known to move, they are seeded in every forward pass.

    Args:
        draws: The known random calls.

    Raises:
        StepFailed: A generator moved that did not move when the model was inspected.
    """
    states_before = {} if draws.other_generators else fingerprint_generators()
    yield
    states_after = fingerprint_generators() if states_before else {}
    if moved := [
        name
        for name in states_before
        if name != "torch" and states_after[name] != states_before[name]
    ]:
        raise StepFailed(
            f"the model or its loss draws from {moved[0]}, and did not when it was looked at: "
            "ranks that share a sample would draw different numbers; draw by "
            "torch, or in every step, or train it with data(n)"
        )


class CompiledDraws:
    """How code that torch.compile compiles draws random numbers in this process.

    While a training is open, it calls torch's random kernels, whose numbers `KeyedDraws` provides.
    Otherwise it draws inside its own kernels, where nothing can replace the numbers.

    Attributes:
        trainings: The number of open trainings.
        before: What was set before the first of them that found torch.compile in use, or None.
    """

    def __init__(self) -> None:
        self.trainings = 0
        self.before: bool | None = None

    def open(self) -> None:
        """Begin a training."""
        self.trainings += 1
        # a training before this one, perhaps never closed, may have begun without torch.compile
        config: Any = sys.modules.get("torch._inductor.config")
        if config is not None and self.before is None:
            self.before = config.fallback_random
            config.fallback_random = True

    def close(self) -> None:
        """End a training."""
        self.trainings -= 1
        if not self.trainings and self.before is not None:
            sys.modules["torch._inductor.config"].fallback_random = self.before  # type: ignore
            self.before = None


COMPILED_DRAWS = CompiledDraws()


class ReplicatedDraws:
    """Runs functions that must draw the same random numbers on all ranks, and as one worker does.

    An example is an optimizer step, which every rank runs itself. The generators start from (seed,
    step). If the first call with a name draws nothing, later calls with that name cost nothing.

    Args:
        seed: The seed of the job.
        device: Device of the parameters.

    Attributes:
        seed: The seed of the job.
        cuda_generator: The generator of the device, or None on the CPU.
        has_draws: For each name, whether its first call drew numbers.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.cuda_generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        )
        self.has_draws: dict[str, bool] = {}

    def __call__(self, name: str, step: int, function: Callable[[], Any]) -> None:
        if not self.has_draws.get(name, True):
            function()
            return
        with use_seeded_generators(f"{name} {self.seed} {step}"), self._seed_cuda_generator():
            states_before = self._read_generator_states()
            function()
            self.has_draws.setdefault(name, self._read_generator_states() != states_before)

    @contextlib.contextmanager
    def _seed_cuda_generator(self) -> Iterator[None]:
        """Seed the generator of the device like torch's CPU generator; restore it afterwards."""
        saved_state = self.cuda_generator and self.cuda_generator.get_state()
        if self.cuda_generator is not None:
            self.cuda_generator.manual_seed(torch.default_generator.initial_seed())
        try:
            yield
        finally:
            if self.cuda_generator is not None:
                self.cuda_generator.set_state(saved_state)

    def _read_generator_states(self) -> Any:
        return (
            fingerprint_generators(),
            self.cuda_generator and self.cuda_generator.get_state().numpy().tobytes(),
        )


# ---- find the draws of a forward pass --------------------------------------------------------
def inspect_draws(forward: Callable[[int], object]) -> Draws:
    """Find the draws of a forward pass, from a run on two samples and one on three.

    Args:
        forward: forward(samples) runs the model on so many samples.

    Returns:
        The random calls, and why they depend on the layout if they do.
    """
    recordings = []
    moved_states = []
    for samples in (2, 3):
        seed_generators("what a model draws")
        states_before = fingerprint_generators()
        with use_draw_source(DrawRecorder()) as recording:
            forward(samples)
        recordings.append(recording)
        moved_states.append(
            {
                name: state
                for name, state in fingerprint_generators().items()
                if state != states_before[name]
            }
        )
    two, three = (recording.calls for recording in recordings)
    if not (two or three or moved_states[0] or moved_states[1] or recordings[0].own_generators):
        return Draws()
    reasons = [f"{name} by a generator of its own" for name in sorted(recordings[0].own_generators)]
    reasons += [
        f"draws from {name}, which differ with the number of samples"
        for name in GENERATOR_NAMES
        if moved_states[0].get(name) != moved_states[1].get(name)
    ]
    if [name for name, _ in two] != [name for name, _ in three]:
        reasons.append("other random calls where there are more samples")
        return Draws((), "; ".join(reasons))
    calls = []
    for (name, shape), (_, larger) in zip(two, three, strict=True):
        call = _infer_draw(name, shape, larger)
        if isinstance(call, str):
            reasons.append(call)
        else:
            calls.append(call)
    return Draws(
        tuple(calls),
        "; ".join(dict.fromkeys(reasons)) or None,
        tuple(name for name in GENERATOR_NAMES if name in moved_states[0]),
    )


def _infer_draw(name: str, two: tuple[int, ...], three: tuple[int, ...]) -> Draw | str:
    """Compare the shapes for two and three samples; return the draw, or why it is not exact."""
    grown = [dim for dim, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) != len(three) or len(grown) > 1:
        return (
            f"{name} of shape {two} for two samples and {three} for three, which does not give "
            "each sample its own number"
        )
    if not grown:
        return Draw(name, len(two), None, two)
    dim = grown[0]
    blocks, rest = divmod(two[dim], 2)
    if name == "randperm" or rest or three[dim] != 3 * blocks:
        return f"{name} of shape {two} for two samples and {three} for three, which mixes samples"
    return Draw(name, len(two), dim, drop_dim(two, dim))
