"""Batch norm over all ranks: the statistics of one micro-batch as a whole, as one worker would
take them.

What is computed is replaced, not modules: while a micro-batch runs, `torch.batch_norm` is ours,
to which every batch norm comes down (nn.BatchNorm*, subclasses with a forward of their own,
torch.nn.functional.batch_norm, also imported by name). In training every rank tells (count,
mean, M2) of its part; they are merged in rank order (Chan, Golub, LeVeque 1979), so all ranks
get the same statistics, to the bit, however unequal the parts. A rank whose part is empty (it
runs one sample with weight 0) counts nothing, and nothing flows back through that sample.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from paragrad.errors import StepFailed
from paragrad.runtime.world import World

TORCH_BATCH_NORM: Callable[..., Tensor] = torch.batch_norm
TORCH_INSTANCE_NORM: Callable[..., Tensor] = torch.instance_norm
TORCH_VERIFY_BATCH_SIZE: Callable[..., None] = functional._verify_batch_size  # type: ignore[attr-defined]
TOO_FEW_VALUES = "Expected more than 1 value per channel when training"  # torch's sentence
_sample_part_worlds: tuple[World, ...] = ()
SINGLE_SAMPLE_REPAIR = (
    "a micro-batch of one sample has no variance: give fewer micro-batches, or another batch size"
)


@contextmanager
def combine_sample_parts(worlds: tuple[World, ...]) -> Iterator[None]:
    """Around a batch norm of a part of each sample: the ranks along these lines have the
    others.
    """
    global _sample_part_worlds
    before = _sample_part_worlds
    _sample_part_worlds = worlds
    try:
        yield
    finally:
        _sample_part_worlds = before


class BatchNorm:
    """A context manager around forward and backward (where checkpoints run forwards again) of a
    micro-batch.

    In a world of one, and with `own`, each rank takes its own statistics (with more than one
    rank, not the serial training); count(bytes, ranks) is told what is gathered otherwise, and
    among how many. computed: a batch norm was computed in training.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        count_bytes: Callable[[int, int], None],
        local_statistics: bool = False,
        samples: int = 0,
    ) -> None:
        self.world = world
        self.model = model
        self.count_bytes = count_bytes
        # of the present micro-batch on this rank; 0: one runs, and counts for nothing
        self.samples = samples
        self.local_statistics = local_statistics
        self.is_local = local_statistics or world.size == 1
        self.waited_seconds = 0.0  # seconds for what others tell
        self.is_probing = False
        self.has_computed = False
        # by torch.compile, whose graphs do not come here again
        self.is_compiled = False
        # the running statistics that batch norms in training were called with
        self.running_statistics = WeakTensorKeyDictionary()
        # which calls of a micro-batch take statistics inside of samples or weights
        self.per_sample_calls: set[int] = set()
        self.call_index = 0
        self.saved_functions: list[tuple[Any, ...]] = []

    def __enter__(self) -> BatchNorm:
        self.saved_functions.append(
            (
                torch.batch_norm,
                torch.instance_norm,
                functional._verify_batch_size,  # type: ignore
                nn.SyncBatchNorm.forward,
            )
        )
        self.call_index = 0
        # SyncBatchNorm refuses the CPU
        self._replace_functions(
            self.batch_norm, instance_norm, self._verify_part_size, _BatchNorm.forward
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._replace_functions(*self.saved_functions.pop())

    def _replace_functions(
        self, batch_norm: Any, instance_norm: Any, verify: Any, forward: Any
    ) -> None:
        torch.batch_norm = batch_norm
        torch.instance_norm = instance_norm
        functional._verify_batch_size = verify  # type: ignore[attr-defined]
        nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign]

    @contextmanager
    def use_probe_mode(self) -> Iterator[None]:
        """For a look at the model, on this rank alone: no rank is asked, and a part of one
        sample is no error.
        """
        self.is_probing, before = True, self.is_probing
        try:
            with self:
                yield
        finally:
            self.is_probing = before

    def adopt_per_sample_calls(self, per_sample_calls: set[int]) -> None:
        """After a look: the calls that ask no other rank, as all saw. Raises StepFailed where a
        compiler would bake them in.
        """
        if not self.is_local and (self.is_compiled or _has_compiled_batch_norm(self.model)):
            raise StepFailed(
                "batch norm in a compiled model would take each rank's own statistics; train the "
                "model without "
                "torch.compile, or compile parts of it that have no batch norm"
            )
        self.per_sample_calls = per_sample_calls

    @property
    def normalized_buffers(self) -> set[str]:
        """The names of the running statistics that a batch norm in training changed."""
        return {
            name
            for name, buffer in self.model.named_buffers(remove_duplicate=False)
            if buffer in self.running_statistics
        }

    @cached_property
    def gather_world(self) -> World:
        """Made by the first batch norm in training, which all ranks run together."""
        return self.world.duplicate()

    def _verify_part_size(self, size: Any) -> None:
        """A part of one sample is no error: over all ranks there are more."""
        if self.is_local and self.samples and not self.is_probing:
            try:
                TORCH_VERIFY_BATCH_SIZE(size)
            except ValueError as error:
                raise ValueError(f"{error}; {SINGLE_SAMPLE_REPAIR}") from None

    def batch_norm(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        """As torch.batch_norm."""
        given = input, weight, bias, running_mean, running_var
        # of a tensor that has a word of its own in torch's functions
        if has_torch_function(given):
            return handle_torch_function(
                TORCH_BATCH_NORM, given, *given, training, momentum, eps, cudnn_enabled
            )  # type: ignore

        def plain(training: bool) -> Tensor:
            return apply_norm_contiguously(
                TORCH_BATCH_NORM,
                1 in (input.shape[0], *input.shape[2:]),
                input,
                weight,
                bias,
                running_mean,
                running_var,
                training,
                momentum,
                eps,
                cudnn_enabled,
            )

        if not training:
            return plain(False)
        self.is_compiled |= torch.compiler.is_compiling()
        if isinstance(input, FakeTensor):  # for its shape: it is no call of this rank's
            return TORCH_BATCH_NORM(
                input,
                weight,
                bias,
                input.new_zeros(input.shape[1]),
                input.new_ones(input.shape[1]),
                False,
                momentum,
                eps,
                cudnn_enabled,
            )
        self.has_computed = True
        self.running_statistics.update(
            {tensor: None for tensor in (running_mean, running_var) if tensor is not None}
        )
        number = self.call_index
        self.call_index = self.call_index + 1
        inside = self.samples > 1 and not _sample_part_worlds and _is_per_sample(input, weight)
        if self.is_probing:
            self.per_sample_calls |= {number} if inside else set()
        elif self.is_local and (self.local_statistics or not _sample_part_worlds):
            if self.samples == 0 and running_mean is not None:
                return plain(False)  # an empty part changes no statistics
        elif number not in self.per_sample_calls:
            if inside:
                raise ValueError(
                    "a batch norm inside of samples came where the first step had one over the "
                    "batch; let the "
                    "model call its batch norms in the same order in every step"
                )
            return self._normalize_globally(
                input, weight, bias, running_mean, running_var, momentum, eps, plain
            )
        return plain(True)

    def _normalize_globally(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        plain: Callable[[bool], Tensor],
    ) -> Tensor:
        gather = functools.partial(self.gather_rows, worlds=_sample_part_worlds)
        number, mean, m2 = merge_moments(
            gather(_compute_moments(x.detach(), has_samples=self.samples > 0))
        )
        if number == 0:  # the part of every rank is empty
            return plain(running_mean is None)
        if number == 1:
            raise ValueError(f"{TOO_FEW_VALUES}, got 1 over all ranks; {SINGLE_SAMPLE_REPAIR}")
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((m2 / (number - 1)).to(running_var.dtype), momentum)
        inverse = (m2 / number + eps).rsqrt()
        # bfloat16 under autocast: computed as torch does
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = GlobalNormalize.apply(
            wide,
            weight,
            bias,
            mean.to(wide.dtype),
            inverse.to(wide.dtype),
            number,
            gather,
            self.samples == 0,
        )
        return normal.to(x.dtype)

    def gather_rows(self, tensor: Tensor, worlds: tuple[World, ...] = ()) -> list[Tensor]:
        """What all ranks have, along each of the worlds and then over all replicas."""
        begun = time.perf_counter()
        for world in worlds:
            self.count_bytes(tensor.nbytes, world.size)
            tensor = torch.stack(world.all_gather(tensor))
        if not self.is_local:
            self.count_bytes(tensor.nbytes, self.gather_world.size)
            tensor = torch.stack(self.gather_world.all_gather(tensor))
        self.waited_seconds += time.perf_counter() - begun
        return (
            list(tensor.reshape(-1, tensor.shape[-1])) if worlds or not self.is_local else [tensor]
        )


def _has_compiled_batch_norm(model: nn.Module) -> bool:
    """Is there a batch norm in training under what torch.compile made? Its graph may be there
    already, and is not made anew.
    """
    made = [
        module
        for module in model.modules()
        if type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    ]
    return any(
        isinstance(inner, _BatchNorm) and inner.training
        for module in made
        for inner in module.modules()
    )


def _is_per_sample(x: Tensor, weight: Tensor | None) -> bool:
    """Of a part of several samples: are the statistics not over its samples?

    So instance norms are written with batch_norm (samples x channels as channels), and the
    standardisation of a weight.
    """
    return x.shape[0] == 1 and not isinstance(weight, nn.Parameter)


def apply_norm_contiguously(
    norm: Callable[..., Tensor], ambiguous: bool, x: Tensor, *rest: Any
) -> Tensor:
    """A norm of torch. ambiguous: the images or volumes can be taken for both of torch's
    layouts, as a batch, a height or a width of 1 makes them. Its backward on the CPU (2.13)
    takes the gradient for one and the input for the other, and is wrong, unless both are
    contiguous.
    """
    if not ambiguous or x.dim() not in (4, 5) or x.device.type != "cpu":
        return norm(x, *rest)
    out = norm(x.contiguous(), *rest)
    if out.requires_grad:
        out.register_hook(Tensor.contiguous)
    return out


def instance_norm(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """As torch.instance_norm, which is a batch norm of one image with samples x channels."""
    if has_torch_function(given := (x, *rest)):
        result: Tensor = handle_torch_function(TORCH_INSTANCE_NORM, given, *given, **named)
        return result
    return apply_norm_contiguously(
        lambda given, *rest: TORCH_INSTANCE_NORM(given, *rest, **named), True, x, *rest
    )


def _compute_moments(x: Tensor, has_samples: bool) -> Tensor:
    """[count, mean of each channel, M2 of each channel] in float64."""
    channels = x.shape[1]
    if not has_samples:
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    values = x.double().transpose(0, 1).reshape(channels, -1)
    variance, mean = torch.var_mean(values, dim=1, correction=0)
    number = values.shape[1]
    return torch.cat([mean.new_tensor([float(number)]), mean, variance * number])


def merge_moments(moments: list[Tensor]) -> tuple[float, Tensor, Tensor]:
    """(count, mean, M2) of all parts together, merged in rank order."""
    channels = (moments[0].numel() - 1) // 2
    number = 0.0
    mean = moments[0].new_zeros(channels)
    m2 = moments[0].new_zeros(channels)
    for part in moments:
        more = float(part[0])
        if more == 0:
            continue
        difference = part[1 : 1 + channels] - mean
        mean = mean + difference * (more / (number + more))
        m2 = m2 + part[1 + channels :] + difference**2 * (number * more / (number + more))
        number += more
    return number, mean, m2


class GlobalNormalize(torch.autograd.Function):
    """(x - mean) * inverse * weight + bias, where mean and inverse depend on the x of all
    ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        number: float,
        gather: Callable[[Tensor], list[Tensor]],
        empty: bool,
    ) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse)
        ctx.number = number
        ctx.gather = gather
        ctx.shape = shape
        ctx.empty = empty
        result = normal if weight is None else normal * weight.view(shape)
        return result if bias is None else result + bias.view(shape)

    @staticmethod
    @once_differentiable  # what is gathered has no gradient
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        normal, weight, inverse = ctx.saved_tensors
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        for_bias = gradient.sum(dims)
        for_weight = (gradient * normal).sum(dims)
        for_x = None
        if ctx.needs_input_grad[0]:
            # d loss / d x: the direct part, less what flows through mean and variance, which
            # all ranks' x share
            scale = inverse if weight is None else inverse * weight
            sums = (
                torch.stack(ctx.gather(torch.cat([for_bias, for_weight]).double())).sum(0)
                / ctx.number
            )
            through_mean, through_variance = (
                part.to(gradient.dtype).view(ctx.shape) for part in sums.chunk(2)
            )
            if ctx.empty:
                for_x = torch.zeros_like(gradient)
            else:
                for_x = (gradient - through_mean - normal * through_variance) * scale.view(
                    ctx.shape
                )
        needs = ctx.needs_input_grad
        return (
            for_x,
            for_weight if needs[1] else None,
            for_bias if needs[2] else None,
            None,
            None,
            None,
            None,
            None,
        )
