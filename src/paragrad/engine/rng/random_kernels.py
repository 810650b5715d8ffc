"""Replacements of torch's random kernels.

For the time of a step, a `DrawSource` provides the numbers. Each replacement calls
`DrawSource.draw_numbers`, which fills a tensor from a distribution. The original kernel runs if no
source is in use, or if a call brings its own generator.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.compiled_modules import exclude_from_compile
from paragrad.engine.rng.hashing import (
    Distribution,
    make_bernoulli,
    make_uniform_integers,
    map_to_open_interval,
    map_to_uniform,
)


class DrawSource(abc.ABC):
    """Provides the numbers that the replaced kernels draw."""

    @abc.abstractmethod
    def draw_numbers(self, name: str, tensor: Tensor, distribution: Distribution) -> Tensor:
        """Fill a tensor with random numbers.

        Args:
            name: Name of the kernel.
            tensor: The tensor to fill.
            distribution: The distribution of the numbers.

        Returns:
            The tensor.
        """

    def skip_call(self) -> None:
        """Count a call that another rank makes.

        Later calls then have the same index on both ranks.
        """
        draw_torch_number()

    def record_own_generator(self, name: str) -> None:  # noqa: B027 -- most ignore it
        """Record that a call brought its own generator.

        Args:
            name: Name of the kernel.
        """


def _draw_bernoulli(source: DrawSource, name: str, tensor: Tensor, p: Tensor) -> Tensor:
    numbers = torch.empty_like(tensor, dtype=torch.promote_types(p.dtype, torch.float32))
    return tensor.copy_(source.draw_numbers(name, numbers, map_to_uniform) < p)


def _draw_normal(source: DrawSource, name: str, mean: Any, deviation: Any) -> Tensor:
    like = torch.broadcast_tensors(
        *(each for each in (mean, deviation) if isinstance(each, Tensor))
    )[0]
    return (
        source.draw_numbers(name, torch.empty_like(like), _make_normal(0.0, 1.0)) * deviation + mean
    )


def _make_normal(mean: float, deviation: float) -> Distribution:
    return lambda h, dtype: torch.special.ndtri(map_to_open_interval(h)) * deviation + mean


def _draw_integers(
    source: DrawSource, name: str, tensor: Tensor, low: int = 0, high: int | None = None
) -> Tensor:
    if high is None:
        dtype = tensor.dtype
        largest = (
            2 ** {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
            if dtype.is_floating_point
            else (1 if dtype == torch.bool else torch.iinfo(dtype).max)
        )
        high = largest + 1
    return source.draw_numbers(name, tensor, make_uniform_integers(low, high))


def _draw_multinomial(
    source: DrawSource, name: str, weights: Tensor, count: int, replacement: bool = False
) -> Tensor:
    """Draw indices by their weights.

    With replacement, the inverse of the distribution function is used. Otherwise the indices with
    the largest weight / exponential are chosen (Efraimidis 2006).
    """
    if replacement:
        total = weights.double().cumsum(-1)
        places = source.draw_numbers(
            name, weights.new_empty(*weights.shape[:-1], count, dtype=torch.float64), map_to_uniform
        )
        return torch.searchsorted(total, places * total[..., -1:], right=True).clamp_(
            max=weights.shape[-1] - 1
        )
    keys = source.draw_numbers(
        name,
        torch.empty_like(weights, dtype=torch.float64),
        lambda h, dtype: -torch.log(map_to_open_interval(h)),
    )
    return (weights / keys).topk(count, -1).indices


def _draw_permutation(source: DrawSource, name: str, count: int, out: Tensor) -> Tensor:
    return out.resize_(count).copy_(
        source.draw_numbers(
            name,
            torch.empty(count, dtype=torch.int64, device=out.device),
            make_uniform_integers(0, 2**62),
        ).argsort()
    )


def _apply_rrelu(
    source: DrawSource,
    name: str,
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
) -> Tensor:
    if training:
        slope = source.draw_numbers(
            name,
            torch.empty_like(x),
            lambda h, dtype: map_to_uniform(h, dtype) * (upper - lower) + lower,
        )
        noise.copy_(torch.where(x <= 0, slope, 1.0))
        return x * noise
    return torch.where(x <= 0, x * (lower + upper) / 2, x)


def _apply_dropout(
    source: DrawSource, name: str, x: Tensor, p: float, training: bool | None
) -> tuple[Tensor, Tensor]:
    if training is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    # Compiled code calls this kernel where the same code calls bernoulli_ without torch.compile.
    kept = source.draw_numbers(
        "bernoulli", torch.empty_like(x, dtype=torch.bool), make_bernoulli(1.0 - p)
    )
    return x * kept / (1.0 - p) if p < 1.0 else x * 0, kept


def _make_fill_kernel(make_distribution: Callable[..., Distribution]) -> Callable[..., Tensor]:
    """Return a kernel that fills its tensor from a distribution of its other arguments."""
    return lambda source, name, tensor, *arguments: source.draw_numbers(
        name, tensor, make_distribution(*arguments)
    )


RANDOM_KERNELS: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": _make_fill_kernel(lambda p=0.5: make_bernoulli(p)),
    "bernoulli_.Tensor": _draw_bernoulli,
    "uniform_": _make_fill_kernel(
        lambda low=0.0, high=1.0: lambda h, dtype: map_to_uniform(h, dtype) * (high - low) + low
    ),
    "normal_": _make_fill_kernel(lambda mean=0.0, deviation=1.0: _make_normal(mean, deviation)),
    "exponential_": _make_fill_kernel(
        lambda rate=1.0: lambda h, dtype: -torch.log(map_to_open_interval(h)) / rate
    ),
    "cauchy_": _make_fill_kernel(
        lambda median=0.0, width=1.0: (
            lambda h, dtype: torch.tan((map_to_open_interval(h) - 0.5) * torch.pi) * width + median
        )
    ),
    "log_normal_": _make_fill_kernel(
        lambda mean=1.0, deviation=2.0: (
            lambda h, dtype: _make_normal(mean, deviation)(h, dtype).exp()
        )
    ),
    "geometric_": _make_fill_kernel(
        lambda p: (
            lambda h, dtype: (
                torch.log(map_to_open_interval(h)) / torch.log1p(torch.tensor(-p).double())
            ).ceil()
        )
    ),
    "random_": _draw_integers,
    "random_.from": _draw_integers,
    "random_.to": lambda draw, name, tensor, high: _draw_integers(draw, name, tensor, 0, high),
    "normal.Tensor_float": lambda draw, name, mean, deviation=1.0: _draw_normal(
        draw, name, mean, deviation
    ),
    "normal.float_Tensor": _draw_normal,
    "normal.Tensor_Tensor": _draw_normal,
    "multinomial": _draw_multinomial,
    "randperm.generator_out": _draw_permutation,
    "rrelu_with_noise": _apply_rrelu,
    "native_dropout": _apply_dropout,
}

# The sources in use, the innermost one last. For the whole process, not for a thread: backward
# recomputes on a thread of autograd.
DRAW_SOURCES: list[DrawSource] = []
_call_count = 0  # how often a kernel was called
# for a dimension of a tensor: its size in the whole tensor, and which elements are here
DrawBox = dict[int, tuple[int, tuple[range, ...]]]
_draw_box: DrawBox = {}


@functools.cache
def replace_kernels() -> list[Any]:
    """Replace torch's random kernels, once per process.

    If no draw source is in use, the replacements call the original kernels. Returns the libraries,
    which must be kept alive.
    """
    libraries = []
    for device in ("CPU", *(["CUDA"] if torch.cuda.is_available() else [])):
        library = torch.library.Library("aten", "IMPL")
        for name, sampler in RANDOM_KERNELS.items():
            # a device may lack a kernel
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                # torch warns about a replaced kernel, which is the purpose here
                warnings.simplefilter("ignore")
                original = torch.library.get_kernel(f"aten::{name}", device)
                library.impl(name, _wrap_kernel(name, sampler, original), device, with_keyset=True)
        libraries.append(library)
    return libraries


def _wrap_kernel(name: str, sampler: Callable[..., Any], original: Any) -> Callable[..., Any]:
    operator, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, operator), overload or "default")._schema
    takes_generator = any(argument.name == "generator" for argument in schema.arguments)

    def kernel(keys: Any, *arguments: Any, generator: Any = None, **options: Any) -> Any:
        global _call_count
        _call_count += 1
        # read once: another thread may end the use of a source meanwhile
        source = next(iter(DRAW_SOURCES[-1:]), None)
        if source is not None and generator is None:
            return sampler(source, operator.rstrip("_"), *arguments, **options)
        if source is not None:
            source.record_own_generator(operator)
        if takes_generator:
            options["generator"] = generator
        return original.call_boxed(keys, *arguments, **options)

    # in compiled code, a graph of this function would contain the numbers of one call
    return exclude_from_compile(kernel)


@functools.cache
def get_torch_random() -> tuple[Any, Any, Tensor]:
    """Return the kernel that draws from torch's own generator, its keys, and a place for a number.

    The first call must come before `replace_kernels`.
    """
    kernel = torch.library.get_kernel("aten::random_.to", "CPU")
    return (
        kernel,
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
        torch.empty(1, dtype=torch.int64),
    )


def draw_torch_number() -> int:
    """Draw a number from torch's own generator."""
    kernel, keys, place = get_torch_random()
    return int(kernel.call_boxed(keys, place, 2**62))


def count_random_calls() -> int:
    """Return how many random calls this process has made since the kernels were replaced.

    The first call of this function replaces them.
    """
    replace_kernels()
    return _call_count


@contextlib.contextmanager
def use_draw_box(box: DrawBox) -> Iterator[None]:
    """Draw the numbers that the whole tensor has at this place, for a function of a part of it.

    Args:
        box: For each divided dimension, its whole size and which elements are here.
    """
    global _draw_box
    previous = _draw_box
    _draw_box = box
    try:
        yield
    finally:
        _draw_box = previous


def get_draw_box() -> DrawBox:
    """Return the box of the tensor that is being drawn."""
    return _draw_box
