"""Torch's random kernels, replaced: for the time of a step whoever is `drawing` says what they
draw.

Each is a function of `Drawing.numbers`, which fills a tensor by a distribution. Where nothing
is drawing, and where a call brings a generator of its own, they do what they did.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from paragrad.engine.rng.hashing import Distribution, below, between, inside, uniform

Asked = TypeVar("Asked", bound="Drawing")


class Drawing(abc.ABC):
    """Asked by the replaced kernels what a call draws; name: the kernel's."""

    @abc.abstractmethod
    def numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        """Fill a tensor."""

    def skipped(self) -> None:
        """Another rank makes a call: what comes after it is the same one here as there."""
        drawn()

    def own(self, name: str) -> None:  # noqa: B027 -- most do not ask
        """A call brought a generator of its own."""


def _bernoulli_by_tensor(draw: Drawing, name: str, tensor: Tensor, p: Tensor) -> Tensor:
    numbers = torch.empty_like(tensor, dtype=torch.promote_types(p.dtype, torch.float32))
    return tensor.copy_(draw.numbers(name, numbers, uniform) < p)


def _normal_by_tensor(draw: Drawing, name: str, mean: Any, deviation: Any) -> Tensor:
    like = torch.broadcast_tensors(
        *(each for each in (mean, deviation) if isinstance(each, Tensor))
    )[0]
    return draw.numbers(name, torch.empty_like(like), _normal(0.0, 1.0)) * deviation + mean


def _normal(mean: float, deviation: float) -> Distribution:
    return lambda h, dtype: torch.special.ndtri(inside(h)) * deviation + mean


def _random(
    draw: Drawing, name: str, tensor: Tensor, low: int = 0, high: int | None = None
) -> Tensor:
    if high is None:
        kind = tensor.dtype
        most = (
            2 ** {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(kind, 24)
            if kind.is_floating_point
            else (1 if kind == torch.bool else torch.iinfo(kind).max)
        )
        high = most + 1
    return draw.numbers(name, tensor, between(low, high))


def _multinomial(
    draw: Drawing, name: str, weights: Tensor, count: int, replacement: bool = False
) -> Tensor:
    """With replacement by the inverse of the distribution, otherwise the largest of weight /
    exponential (Efraimidis 2006).
    """
    if replacement:
        total = weights.double().cumsum(-1)
        places = draw.numbers(
            name, weights.new_empty(*weights.shape[:-1], count, dtype=torch.float64), uniform
        )
        return torch.searchsorted(total, places * total[..., -1:], right=True).clamp_(
            max=weights.shape[-1] - 1
        )
    keys = draw.numbers(
        name, torch.empty_like(weights, dtype=torch.float64), lambda h, dtype: -torch.log(inside(h))
    )
    return (weights / keys).topk(count, -1).indices


def _permutation(draw: Drawing, name: str, count: int, out: Tensor) -> Tensor:
    return out.resize_(count).copy_(
        draw.numbers(
            name, torch.empty(count, dtype=torch.int64, device=out.device), between(0, 2**62)
        ).argsort()
    )


def _rrelu(
    draw: Drawing,
    name: str,
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
) -> Tensor:
    if training:
        slope = draw.numbers(
            name, torch.empty_like(x), lambda h, dtype: uniform(h, dtype) * (upper - lower) + lower
        )
        noise.copy_(torch.where(x <= 0, slope, 1.0))
        return x * noise
    return torch.where(x <= 0, x * (lower + upper) / 2, x)


def _fused_dropout(
    draw: Drawing, name: str, x: Tensor, p: float, training: bool | None
) -> tuple[Tensor, Tensor]:
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
    "uniform_": _into(
        lambda low=0.0, high=1.0: lambda h, dtype: uniform(h, dtype) * (high - low) + low
    ),
    "normal_": _into(lambda mean=0.0, deviation=1.0: _normal(mean, deviation)),
    "exponential_": _into(lambda rate=1.0: lambda h, dtype: -torch.log(inside(h)) / rate),
    "cauchy_": _into(
        lambda median=0.0, width=1.0: (
            lambda h, dtype: torch.tan((inside(h) - 0.5) * torch.pi) * width + median
        )
    ),
    "log_normal_": _into(
        lambda mean=1.0, deviation=2.0: lambda h, dtype: _normal(mean, deviation)(h, dtype).exp()
    ),
    "geometric_": _into(
        lambda p: (
            lambda h, dtype: (torch.log(inside(h)) / torch.log1p(torch.tensor(-p).double())).ceil()
        )
    ),
    "random_": _random,
    "random_.from": _random,
    "random_.to": lambda draw, name, tensor, high: _random(draw, name, tensor, 0, high),
    "normal.Tensor_float": lambda draw, name, mean, deviation=1.0: _normal_by_tensor(
        draw, name, mean, deviation
    ),
    "normal.float_Tensor": _normal_by_tensor,
    "normal.Tensor_Tensor": _normal_by_tensor,
    "multinomial": _multinomial,
    "randperm.generator_out": _permutation,
    "rrelu_with_noise": _rrelu,
    "native_dropout": _fused_dropout,
}

# of the whole process: backward recomputes on a thread of autograd's
_drawing: Drawing | None = None
_asked = 0  # times that a kernel was called
# of a tensor's dimension: its size in the whole, and what is here of it
Box = dict[int, tuple[int, tuple[range, ...]]]
_box: Box = {}


@functools.cache
def _replaced() -> list[Any]:
    """Replace torch's random kernels, once: where nothing is `_drawing` they do what they did.
    Keeps what holds them there.
    """
    libraries = []
    for device in ("CPU", *(["CUDA"] if torch.cuda.is_available() else [])):
        library = torch.library.Library("aten", "IMPL")
        for name, sampler in KERNELS.items():
            # no such kernel on this device
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                # that a kernel is replaced is meant
                warnings.simplefilter("ignore")
                original = torch.library.get_kernel(f"aten::{name}", device)
                library.impl(name, _kernel(name, sampler, original), device, with_keyset=True)
        libraries.append(library)
    return libraries


def _kernel(name: str, sampler: Callable[..., Any], original: Any) -> Callable[..., Any]:
    operator, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, operator), overload or "default")._schema
    takes_generator = any(argument.name == "generator" for argument in schema.arguments)

    def kernel(keys: Any, *arguments: Any, generator: Any = None, **more: Any) -> Any:
        global _asked
        _asked += 1
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
    return (
        kernel,
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
        torch.empty(1, dtype=torch.int64),
    )


def drawn() -> int:
    """A number from torch's own generator."""
    kernel, keys, place = _original_random()
    return int(kernel.call_boxed(keys, place, 2**62))


class _Counted(Drawing):
    """How often is drawn."""

    count = 0

    def numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        self.count += 1
        return tensor


def calls() -> int:
    """How many random calls this process has made, from the first time that this was asked."""
    _replaced()
    return _asked


def skipped(call: Callable[[], object]) -> None:
    """A call that another rank makes, here with other tensors: as often as it draws, that
    counts.
    """
    if _drawing is not None:
        with drawing(_Counted()) as counted:
            call()
        for _ in range(counted.count):
            _drawing.skipped()


@contextlib.contextmanager
def boxed(box: Box) -> Iterator[None]:
    """Around a random function of a part of a tensor: what it draws are the numbers that the
    whole one has there.
    """
    global _box
    before = _box
    _box = box
    try:
        yield
    finally:
        _box = before


def box() -> Box:
    return _box


@contextlib.contextmanager
def drawing(by: Asked) -> Iterator[Asked]:
    """Around forward and backward: random kernels ask `by`."""
    global _drawing
    _original_random()
    _replaced()
    before = _drawing
    _drawing = by
    try:
        yield by
    finally:
        _drawing = before
