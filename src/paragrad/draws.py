"""Random draws that do not depend on the layout: a function of (seed, step, call, sample, block, element).

Every sample draws the same numbers whichever rank, share or micro-batch it is in, so what a model draws under `data(4)` is
what it draws under `serial`. For the time of a step torch's random kernels themselves are replaced (`Keyed`): that sees
dropout wherever it is (inside attention, an LSTM, a function imported by name), DropPath, noise, and what gradient
checkpointing recomputes in backward, and costs other operations nothing.

Which dimension of a drawn tensor the samples are is seen, not guessed (`seen`): the model runs on two samples and on three;
the dimension that grew, by so many blocks (the heads of an attention), is theirs. Where none grew the draw is common to all
samples (a mask of a weight), so to all ranks. A draw of which two dimensions grew, or calls in another order, depend on the
layout, and a strategy with such a model is not exact.

The hash is MurmurHash3's 32-bit finaliser (Appleby 2011, public domain), in wrapping int32 arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from paragrad.datasets.loading import generator_states, seed_generators
from paragrad.errors import StepFailed

CHUNK = 1 << 16                 # numbers hashed at a time: they stay in the cache
KEPT = 1 << 22                  # elements of a sample up to which their hashes are kept for the next call
BITS = {torch.bfloat16: 8, torch.float16: 11}       # of a uniform number, so that rounding never makes it 1; otherwise 24


# ---- numbers ---------------------------------------------------------------------------------------------------------------
def mixed(h: Tensor) -> Tensor:
    """The finaliser, in place."""
    shifted = h >> 16
    h ^= shifted.bitwise_and_(0xFFFF)
    h *= -2048144789            # 0x85ebca6b
    torch.bitwise_right_shift(h, 13, out=shifted)
    h ^= shifted.bitwise_and_(0x7FFFF)
    h *= -1028477387            # 0xc2b2ae35
    torch.bitwise_right_shift(h, 16, out=shifted)
    h ^= shifted.bitwise_and_(0xFFFF)
    return h


def elements(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A hash of every place in a sample's part of a drawn tensor, by its coordinates: padding moves none."""
    kept = functools.reduce(lambda a, b: a * b, shape, 1) <= KEPT
    return (_elements if kept else _elements.__wrapped__)(shape, device)


@functools.lru_cache(maxsize=16)
def _elements(shape: tuple[int, ...], device: torch.device) -> Tensor:
    h = torch.zeros(1, dtype=torch.int32, device=device)
    for length in shape:
        place = torch.arange(length, dtype=torch.int32, device=device) * -1640531527 + 0x5BD1E995       # 2^32 / golden ratio
        h = mixed((h.unsqueeze(-1) ^ place).view(-1))
    return h


def rows(key: int, positions: list[int], blocks: int, device: torch.device) -> Tensor:
    """(samples * blocks,): a hash of every sample and block of a draw."""
    h = mixed(torch.tensor(positions, dtype=torch.int32, device=device) * -1640531527 + key)
    if blocks == 1:
        return h
    return mixed((h.view(-1, 1) ^ (torch.arange(blocks, dtype=torch.int32, device=device) * -2048144789 + 1)).view(-1))


GENERATORS = ("torch", "numpy", "random")
Asked = TypeVar("Asked", bound="Drawing")
Distribution = Callable[[Tensor, torch.dtype], Tensor]          # hashes (int32), type of the result -> numbers


def uniform(h: Tensor, dtype: torch.dtype) -> Tensor:
    """[0, 1), the same numbers in float32 and float64."""
    bits = BITS.get(dtype, 24)
    return (h >> (32 - bits)).bitwise_and_((1 << bits) - 1).to(dtype if dtype.is_floating_point else torch.float32) * 2.0**-bits


def inside(h: Tensor) -> Tensor:
    """(0, 1) in float64, for distributions that are turned from it."""
    return (h.double() + (2.0**31 + 0.5)) * 2.0**-32


def below(p: float) -> Distribution:
    """True with probability p."""
    if p >= 1.0:
        return lambda h, dtype: torch.ones_like(h, dtype=torch.bool)
    return lambda h, dtype: h < round(p * 2**32) - 2**31


def between(low: int, high: int) -> Distribution:
    """Whole numbers from low, below high."""
    width = high - low
    if width <= 2**31:
        return lambda h, dtype: ((h.long() + 2**31) * width >> 32) + low
    return lambda h, dtype: ((h.long() + 2**31 << 31) + (mixed(h ^ 0x3C6EF372).long() + 2**31)) % width + low


# ---- who draws what --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Draw:
    """A random call of a model's forward. dim: where its samples are, None: common to all samples."""
    name: str
    dims: int
    dim: int | None
    rest: tuple[int, ...]           # the other dimensions, as they were seen


@dataclass(frozen=True)
class Draws:
    """All random calls of a model's forward, as `seen`. by_layout: what makes them depend on the layout, or None.

    others: generators (torch, numpy, random) that other draws moved, which are common to all samples.
    """
    calls: tuple[Draw, ...] = ()
    by_layout: str | None = None
    others: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.calls or self.others or self.by_layout)

    def __or__(self, other: Draws) -> Draws:
        """What two parts of a batch draw."""
        return Draws(tuple(dict.fromkeys(self.calls + other.calls)), self.by_layout or other.by_layout,
                     tuple(dict.fromkeys(self.others + other.others)))


class Drawing:
    """Asked by the replaced kernels: `hashed` numbers for a tensor of some shape."""

    def numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        """Fill a tensor."""
        raise NotImplementedError

    def own(self, name: str) -> None:
        """A call brought a generator of its own."""


class Recording(Drawing):
    """Notes every call, and gives every sample the same numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.owners: set[str] = set()

    def numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        self.calls.append((name, tuple(tensor.shape)))
        _filled(tensor, None, rows(len(self.calls), [0], 1, tensor.device), distribution)
        return tensor

    def own(self, name: str) -> None:
        self.owners.add(name)


class Keyed(Drawing):
    """Keys every draw by the places in the global batch of the samples in this forward (`positions`).

    Gradient checkpointing runs parts of the forward again in backward, and restores torch's generator for it: every call draws
    one number there, and a number that was drawn before is the same call again.
    strict: a draw that was not `seen` so ends the step; otherwise (on one worker) it is common to all samples.
    """

    def __init__(self, draws: Draws, seed: int, step: int, positions: list[int], strict: bool = True) -> None:
        self.draws, self.seed, self.step, self.positions, self.strict = draws, seed, step, positions or [0], strict
        self.calls: dict[int, int] = {}         # number drawn -> which call it is

    def numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        if not tensor.numel():
            return tensor
        call = self.calls.setdefault(_drawn(), len(self.calls))
        key = random.Random(f"{self.seed} {self.step} {call}").getrandbits(31)
        dim, blocks = self._place(name, tuple(tensor.shape), call)
        positions = [0] if dim is None else self.positions
        _filled(tensor, dim, rows(key, positions, blocks, tensor.device), distribution)
        return tensor

    def _place(self, name: str, shape: tuple[int, ...], call: int) -> tuple[int | None, int]:
        """(sample dimension, blocks) of this call: of all that were seen the one that fits, by its order where several do."""
        samples = len(self.positions)
        fits = [draw for draw in self.draws.calls if draw.name == name and draw.dims == len(shape) and (
            draw.rest == shape if draw.dim is None else shape[draw.dim] % samples == 0)]
        dims = {draw.dim for draw in fits}
        if len(dims) > 1:
            here = self.draws.calls[call] if call < len(self.draws.calls) else None
            alike = {draw.dim for draw in fits if draw.dim is None or draw.rest == _without(shape, draw.dim)}
            dims = {here.dim} if here in fits else alike if len(alike) == 1 else dims
        if len(dims) == 1:
            dim = dims.pop()
            return dim, 1 if dim is None else shape[dim] // samples
        if self.strict:
            raise StepFailed(f"{name} draws a tensor of shape {shape} for {samples} samples, not as in the first step: which "
                             "numbers are whose is not known, so it would be another training than on one worker")
        return None, 1


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1:]


def _filled(tensor: Tensor, dim: int | None, row: Tensor, distribution: Distribution) -> None:
    """Numbers by the hashes of (row, element), chunk by chunk."""
    shape = tuple(tensor.shape)
    element = elements(shape if dim is None else _without(shape, dim), tensor.device)
    into = tensor if tensor.is_contiguous() and not dim else torch.empty(
        len(row), *_without(shape, dim or 0), dtype=tensor.dtype, device=tensor.device) if dim is not None else torch.empty(
        shape, dtype=tensor.dtype, device=tensor.device)
    at_once = max(1, CHUNK // element.numel())
    for some, out in zip(row.view(-1, 1).split(at_once), into.view(len(row), -1).split(at_once), strict=True):
        out.copy_(distribution(mixed(some ^ element), tensor.dtype))
    if into is not tensor:
        tensor.copy_(into.movedim(0, dim) if dim else into)


# ---- torch's random kernels --------------------------------------------------------------------------------------------------
def _bernoulli_by_tensor(draw: Drawing, name: str, tensor: Tensor, p: Tensor) -> Tensor:
    numbers = torch.empty_like(tensor, dtype=torch.promote_types(p.dtype, torch.float32))
    return tensor.copy_(draw.numbers(name, numbers, uniform) < p)


def _normal_by_tensor(draw: Drawing, name: str, mean: Any, deviation: Any) -> Tensor:
    like = torch.broadcast_tensors(*(each for each in (mean, deviation) if isinstance(each, Tensor)))[0]
    return draw.numbers(name, torch.empty_like(like), _normal(0.0, 1.0)) * deviation + mean


def _normal(mean: float, deviation: float) -> Distribution:
    return lambda h, dtype: torch.special.ndtri(inside(h)) * deviation + mean


def _random(draw: Drawing, name: str, tensor: Tensor, low: int = 0, high: int | None = None) -> Tensor:
    if high is None:
        kind = tensor.dtype
        most = 2 ** {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(kind, 24) if kind.is_floating_point else (
            1 if kind == torch.bool else torch.iinfo(kind).max)
        high = most + 1
    return draw.numbers(name, tensor, between(low, high))


def _multinomial(draw: Drawing, name: str, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    """With replacement by the inverse of the distribution, otherwise the largest of weight / exponential (Efraimidis 2006)."""
    if replacement:
        total = weights.double().cumsum(-1)
        places = draw.numbers(name, weights.new_empty(*weights.shape[:-1], count, dtype=torch.float64), uniform)
        return torch.searchsorted(total, places * total[..., -1:], right=True).clamp_(max=weights.shape[-1] - 1)
    keys = draw.numbers(name, torch.empty_like(weights, dtype=torch.float64), lambda h, dtype: -torch.log(inside(h)))
    return (weights / keys).topk(count, -1).indices


def _permutation(draw: Drawing, name: str, count: int, out: Tensor) -> Tensor:
    return out.resize_(count).copy_(draw.numbers(name, torch.empty(count, dtype=torch.int64, device=out.device),
                                                 between(0, 2**62)).argsort())


def _rrelu(draw: Drawing, name: str, x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3,
           training: bool = False) -> Tensor:
    if training:
        slope = draw.numbers(name, torch.empty_like(x), lambda h, dtype: uniform(h, dtype) * (upper - lower) + lower)
        noise.copy_(torch.where(x <= 0, slope, 1.0))
        return x * noise
    return torch.where(x <= 0, x * (lower + upper) / 2, x)


def _fused_dropout(draw: Drawing, name: str, x: Tensor, p: float, training: bool | None) -> tuple[Tensor, Tensor]:
    if training is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = draw.numbers(name, torch.empty_like(x, dtype=torch.bool), below(1.0 - p))
    return x * kept / (1.0 - p) if p < 1.0 else x * 0, kept


def _into(make: Callable[..., Distribution]) -> Callable[..., Tensor]:
    """A kernel that fills its tensor by a distribution of the other arguments."""
    return lambda draw, name, tensor, *arguments: draw.numbers(name, tensor, make(*arguments))


KERNELS: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": _into(lambda p=0.5: below(p)),
    "bernoulli_.Tensor": _bernoulli_by_tensor,
    "uniform_": _into(lambda low=0.0, high=1.0: lambda h, dtype: uniform(h, dtype) * (high - low) + low),
    "normal_": _into(lambda mean=0.0, deviation=1.0: _normal(mean, deviation)),
    "exponential_": _into(lambda rate=1.0: lambda h, dtype: -torch.log(inside(h)) / rate),
    "cauchy_": _into(lambda median=0.0, width=1.0: lambda h, dtype: torch.tan((inside(h) - 0.5) * torch.pi) * width + median),
    "log_normal_": _into(lambda mean=1.0, deviation=2.0: lambda h, dtype: _normal(mean, deviation)(h, dtype).exp()),
    "geometric_": _into(lambda p: lambda h, dtype: (torch.log(inside(h)) / torch.log1p(torch.tensor(-p).double())).ceil()),
    "random_": _random, "random_.from": _random,
    "random_.to": lambda draw, name, tensor, high: _random(draw, name, tensor, 0, high),
    "normal.Tensor_float": lambda draw, name, mean, deviation=1.0: _normal_by_tensor(draw, name, mean, deviation),
    "normal.float_Tensor": _normal_by_tensor, "normal.Tensor_Tensor": _normal_by_tensor,
    "multinomial": _multinomial, "randperm.generator_out": _permutation,
    "rrelu_with_noise": _rrelu, "native_dropout": _fused_dropout,
}

_drawing: Drawing | None = None             # of the whole process: backward recomputes on a thread of autograd's


@functools.cache
def _replaced() -> list[Any]:
    """Replace torch's random kernels, once: where nothing is `_drawing` they do what they did. Keeps what holds them there."""
    libraries = []
    for device in ("CPU", *(["CUDA"] if torch.cuda.is_available() else [])):
        library = torch.library.Library("aten", "IMPL")
        for name, sampler in KERNELS.items():
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():      # no such kernel on this device
                warnings.simplefilter("ignore")                                     # that a kernel is replaced is meant
                original = torch.library.get_kernel(f"aten::{name}", device)
                library.impl(name, _kernel(name, sampler, original), device, with_keyset=True)
        libraries.append(library)
    return libraries


def _kernel(name: str, sampler: Callable[..., Any], original: Any) -> Callable[..., Any]:
    operator, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, operator), overload or "default")._schema
    takes_generator = any(argument.name == "generator" for argument in schema.arguments)

    def kernel(keys: Any, *arguments: Any, generator: Any = None, **more: Any) -> Any:
        if _drawing is not None and generator is None:
            return sampler(_drawing, operator.rstrip("_"), *arguments, **more)
        if _drawing is not None:
            _drawing.own(operator)
        if takes_generator:
            more["generator"] = generator
        return original.call_boxed(keys, *arguments, **more)
    return kernel


@functools.cache
def _original_random() -> tuple[Any, Any, Tensor]:
    kernel = torch.library.get_kernel("aten::random_.to", "CPU")
    return kernel, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), torch.empty(1, dtype=torch.int64)


def _drawn() -> int:
    """A number from torch's own generator."""
    kernel, keys, place = _original_random()
    return int(kernel.call_boxed(keys, place, 2**62))


@contextlib.contextmanager
def drawing(by: Asked) -> Iterator[Asked]:
    """Around forward and backward: random kernels ask `by`."""
    global _drawing
    _original_random()
    _replaced()
    before, _drawing = _drawing, by
    try:
        yield by
    finally:
        _drawing = before


@contextlib.contextmanager
def keyed(draws: Draws, seed: int, step: int, positions: list[int], strict: bool = False) -> Iterator[None]:
    """Around forward and backward of some samples: what they draw is keyed (`Keyed`), if they draw. Draws from other
    generators, which are common to all samples, begin alike in every forward of a step, on every rank."""
    if not draws:
        yield
        return
    if draws.others:
        seed_generators(f"forward {seed} {step}")
    with drawing(Keyed(draws, seed, step, positions, strict)):
        yield


# ---- what a forward draws ----------------------------------------------------------------------------------------------------
def seen(forward: Callable[[int], object]) -> Draws:
    """What forward(samples) draws, run on two samples and on three."""
    recordings, moved = [], []
    for samples in (2, 3):
        seed_generators("what a model draws")
        before = generator_states()
        with drawing(Recording()) as recording:
            forward(samples)
        recordings.append(recording)
        moved.append({name: state for name, state in generator_states().items() if state != before[name]})
    two, three = (recording.calls for recording in recordings)
    if not (two or three or moved[0] or moved[1] or recordings[0].owners):
        return Draws()
    wrong = [f"{name} by a generator of its own" for name in sorted(recordings[0].owners)]
    wrong += [f"draws from {name}, which differ with the number of samples" for name in GENERATORS
              if moved[0].get(name) != moved[1].get(name)]
    if [name for name, _ in two] != [name for name, _ in three]:
        wrong.append("other random calls where there are more samples")
        return Draws((), "; ".join(wrong))
    calls = []
    for (name, shape), (_, larger) in zip(two, three, strict=True):
        call = _call(name, shape, larger)
        if isinstance(call, str):
            wrong.append(call)
        else:
            calls.append(call)
    return Draws(tuple(calls), "; ".join(dict.fromkeys(wrong)) or None, tuple(name for name in GENERATORS if name in moved[0]))


def _call(name: str, two: tuple[int, ...], three: tuple[int, ...]) -> Draw | str:
    grown = [dim for dim, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) != len(three) or len(grown) > 1:
        return f"{name} of shape {two} for two samples and {three} for three, which is no number of its own for each"
    if not grown:
        return Draw(name, len(two), None, two)
    dim = grown[0]
    blocks, rest = divmod(two[dim], 2)
    if name == "randperm" or rest or three[dim] != 3 * blocks:
        return f"{name} of shape {two} for two samples and {three} for three, which mixes samples"
    return Draw(name, len(two), dim, _without(two, dim))
