"""Batch norm over all ranks: the statistics of a whole micro-batch, as one worker computes them.

The functions of torch are replaced, not the modules. While a micro-batch runs, `torch.batch_norm`
is the function of this module. Every batch norm calls it: nn.BatchNorm*, subclasses with their own
forward, and torch.nn.functional.batch_norm (also if imported by name).

In training, every rank shares (count, mean, M2: the sum of squared deviations from the mean) of its
part. The parts are merged in rank order (Chan, Golub, LeVeque 1979). So all ranks get the same
statistics, bit for bit, even if their parts have unequal sizes. A rank with an empty part runs one
sample with weight 0. That rank counts nothing, and no gradient flows back through its sample.
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

from paragrad.engine.compiled_modules import is_compiled
from paragrad.errors import StepFailed
from paragrad.runtime.world import World

TORCH_BATCH_NORM: Callable[..., Tensor] = torch.batch_norm
TORCH_INSTANCE_NORM: Callable[..., Tensor] = torch.instance_norm
TORCH_VERIFY_BATCH_SIZE: Callable[..., None] = vars(functional)["_verify_batch_size"]
TOO_FEW_VALUES = "Expected more than 1 value per channel when training"  # as torch words it
_sample_part_worlds: tuple[World, ...] = ()
_open_contexts = 0  # how many contexts of BatchNorm are open in this process
SINGLE_SAMPLE_REPAIR = (
    "a micro-batch of one sample has no variance: give fewer micro-batches, or another batch size"
)


@functools.cache
def replace_sync_forward() -> None:
    """Let SyncBatchNorm act as any batch norm in the contexts of BatchNorm, once per process.

    torch's own forward refuses CPU tensors. A change of the class in every step would take
    microseconds.
    """
    original = nn.SyncBatchNorm.forward

    def forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        return _BatchNorm.forward(self, input) if _open_contexts else original(self, input)

    nn.SyncBatchNorm.forward = forward


@contextmanager
def combine_sample_parts(worlds: tuple[World, ...]) -> Iterator[None]:
    """Combine the parts of each sample in the statistics, while this context is active.

    Each rank holds a part of every sample; the ranks of these worlds hold the other parts.

    Args:
        worlds: For each divided axis, the ranks along it that hold the other parts.
    """
    global _sample_part_worlds
    previous = _sample_part_worlds
    _sample_part_worlds = worlds
    try:
        yield
    finally:
        _sample_part_worlds = previous


class BatchNorm:
    """Context manager that makes batch norm use the statistics of all ranks.

    It surrounds the forward and backward passes of a micro-batch. Backward is included because
    gradient checkpointing runs forward passes there.

    In a world of one rank, and with `local_statistics`, each rank uses its own statistics. With
    more than one rank, local statistics train differently from serial.

    Args:
        world: All ranks that hold a share of the batch.

        model: The model; its buffers are the running statistics.

        count_bytes: Called as count_bytes(bytes, ranks) for each gather, with its size and the
            number of ranks.

        local_statistics: Each rank uses the statistics of its own share.

        samples: Samples of the present micro-batch on this rank. 0: one sample runs with weight 0.

    Attributes:
        is_local: The statistics are those of this rank only.

        waited_seconds: Seconds spent in gathers.

        is_probing: The model is being inspected on this rank only.

        has_computed: A batch norm has run in training mode.

        is_compiled: torch.compile has traced a batch norm. Its graphs do not call this class again.

        samples: As the argument.

        running_statistics: The running statistics that batch norms in training mode received.

        per_sample_calls: Calls that normalize each sample, or a weight, by itself, as indices of
            the calls in a micro-batch. Ranks exchange nothing for them.

        call_index: Index of the next batch norm call in this micro-batch.

        saved_functions: The functions of torch to restore, one entry for each nested use.
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
        self.samples = samples
        self.local_statistics = local_statistics
        self.is_local = local_statistics or world.size == 1
        self.waited_seconds = 0.0
        self.is_probing = False
        self.has_computed = False
        self.is_compiled = False
        self.running_statistics = WeakTensorKeyDictionary()
        self.per_sample_calls: set[int] = set()
        self.call_index = 0
        self.saved_functions: list[tuple[Any, ...]] = []

    def __enter__(self) -> BatchNorm:
        global _open_contexts
        replace_sync_forward()
        _open_contexts += 1
        self.saved_functions.append(
            (
                torch.batch_norm,
                torch.instance_norm,
                functional._verify_batch_size,  # type: ignore
            )
        )
        self.call_index = 0
        torch.batch_norm = self.batch_norm
        torch.instance_norm = instance_norm
        functional._verify_batch_size = self._verify_part_size  # type: ignore[attr-defined]
        return self

    def __exit__(self, *error: Any) -> None:
        global _open_contexts
        _open_contexts -= 1
        batch_norm, instance_norm, verify = self.saved_functions.pop()
        torch.batch_norm = batch_norm
        torch.instance_norm = instance_norm
        functional._verify_batch_size = verify  # type: ignore[attr-defined]

    def start_micro_batch(self, samples: int) -> None:
        """Set the number of samples of the present micro-batch, and count its calls from 0.

        Args:
            samples: Samples of the micro-batch on this rank.
        """
        self.samples = samples
        self.call_index = 0

    def adopt_model(self, model: nn.Module) -> None:
        """Use the buffers of another model, such as a part of the one before.

        Args:
            model: The model.
        """
        self.model = model

    @contextmanager
    def use_probe_mode(self, records_calls: bool = False) -> Iterator[None]:
        """Enter the context to inspect the model on this rank only.

        No statistics are gathered, and a part of one sample is not an error.

        Args:
            records_calls: Whether calls that normalize each sample by itself are added to
                `per_sample_calls`. All ranks must then agree on them (`adopt_per_sample_calls`).
        """
        self.is_probing, was_probing = True, self.is_probing
        calls = set(self.per_sample_calls)
        try:
            with self:
                yield
        finally:
            self.is_probing = was_probing
            if not records_calls:
                self.per_sample_calls = calls

    def adopt_per_sample_calls(self, per_sample_calls: set[int]) -> None:
        """Use the calls that all ranks found to need no statistics of other ranks.

        Call it after the model was inspected.

        Args:
            per_sample_calls: Indices of these calls in a micro-batch.

        Raises:
            StepFailed: The model is compiled, so its graphs would contain the statistics of each
                rank alone.
        """
        if not self.is_local and (self.is_compiled or _has_compiled_batch_norm(self.model)):
            raise StepFailed(
                "batch norm in a compiled model would take each rank's own statistics; train the "
                "model without torch.compile, or compile parts of it that have no batch norm"
            )
        self.per_sample_calls = per_sample_calls

    @property
    def normalized_buffers(self) -> set[str]:
        """Names of the running statistics that a batch norm in training mode changed."""
        return {
            name
            for name, buffer in self.model.named_buffers(remove_duplicate=False)
            if buffer in self.running_statistics
        }

    @cached_property
    def gather_world(self) -> World:
        """A duplicate of the world, used for the gathers.

        The first batch norm in training mode creates it; all ranks run that call together.
        """
        return self.world.duplicate()

    def _verify_part_size(self, size: Any) -> None:
        """Accept a part of one sample if there are more samples on other ranks."""
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
        """Replace torch.batch_norm; the arguments are those of torch.batch_norm.

        Args:
            input: Shape (samples, channels, ...).

            weight: Scale of each channel, or None.

            bias: Offset of each channel, or None.

            running_mean: Running mean of each channel, updated in training; or None.

            running_var: Running variance of each channel, updated in training; or None.

            training: Whether to use the statistics of the batch.

            momentum: Weight of the new statistics in the running statistics.

            eps: Added to the variance.

            cudnn_enabled: Passed to torch.

        Returns:
            The normalized input.

        Raises:
            ValueError: The batch norms run in another order than in the first step, or all ranks
                together have one value for each channel.
        """
        tensors = input, weight, bias, running_mean, running_var
        # a tensor subclass handles the call with its own __torch_function__
        if has_torch_function(tensors):
            return handle_torch_function(
                TORCH_BATCH_NORM, tensors, *tensors, training, momentum, eps, cudnn_enabled
            )

        def run_torch(training: bool) -> Tensor:
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
            return run_torch(False)
        self.is_compiled |= torch.compiler.is_compiling()
        # only the shape is computed: this does not count as a call
        if isinstance(input, FakeTensor):
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
        index = self.call_index
        self.call_index = self.call_index + 1
        per_sample = self.samples > 1 and not _sample_part_worlds and _is_per_sample(input, weight)
        # the model is being inspected on this rank only
        if self.is_probing:
            self.per_sample_calls |= {index} if per_sample else set()
            return run_torch(True)
        # the statistics of this rank are enough; an empty part changes no running statistics
        if self.is_local and (self.local_statistics or not _sample_part_worlds):
            is_empty = self.samples == 0 and running_mean is not None
            return run_torch(not is_empty)
        # each sample, or a weight, is normalized by itself
        if index in self.per_sample_calls:
            return run_torch(True)
        if per_sample:
            raise ValueError(
                "the model calls a batch norm inside of samples where the first step called one "
                "over the batch; let the model call its batch norms in the same order in every step"
            )
        # the statistics of all ranks
        return self._normalize_globally(
            input, weight, bias, running_mean, running_var, momentum, eps, run_torch
        )

    def _normalize_globally(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        run_torch: Callable[[bool], Tensor],
    ) -> Tensor:
        """Normalize with the statistics of all ranks.

        `run_torch(training)` runs the norm of torch.
        """
        gather = functools.partial(self.gather_rows, worlds=_sample_part_worlds)
        count, mean, m2 = merge_moments(
            gather(_compute_moments(x.detach(), has_samples=self.samples > 0))
        )
        # The part of every rank is empty. Its stand-in sample changes no running statistics: they
        # normalize it, or its own statistics if there are none.
        if count == 0:
            return run_torch(running_mean is None)
        if count == 1:
            raise ValueError(f"{TOO_FEW_VALUES}, got 1 over all ranks; {SINGLE_SAMPLE_REPAIR}")
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((m2 / (count - 1)).to(running_var.dtype), momentum)
        inverse = (m2 / count + eps).rsqrt()
        # bfloat16 under autocast: torch also computes in float32
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = GlobalNormalize.apply(
            wide,
            weight,
            bias,
            mean.to(wide.dtype),
            inverse.to(wide.dtype),
            count,
            gather,
            self.samples == 0,
        )
        return normal.to(x.dtype)

    def gather_rows(self, tensor: Tensor, worlds: tuple[World, ...] = ()) -> list[Tensor]:
        """Gather a vector from all ranks: along each of the given worlds, then over all replicas.

        Args:
            tensor: The vector of this rank.
            worlds: Worlds of ranks that hold parts of the same samples.

        Returns:
            One vector for each rank, in rank order.
        """
        started = time.perf_counter()
        for world in worlds:
            self.count_bytes(tensor.nbytes, world.size)
            tensor = torch.stack(world.all_gather(tensor))
        if not self.is_local:
            self.count_bytes(tensor.nbytes, self.gather_world.size)
            tensor = torch.stack(self.gather_world.all_gather(tensor))
        self.waited_seconds += time.perf_counter() - started
        return (
            list(tensor.reshape(-1, tensor.shape[-1])) if worlds or not self.is_local else [tensor]
        )


def _has_compiled_batch_norm(model: nn.Module) -> bool:
    """Return whether a module made by torch.compile contains a batch norm in training mode.

    Its graph may exist already, and is not compiled again.
    """
    return any(
        isinstance(inner, _BatchNorm) and inner.training
        for module in filter(is_compiled, model.modules())
        for inner in module.modules()
    )


def _is_per_sample(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether a call on a part with several samples normalizes each sample by itself.

    Some code uses batch_norm for instance norm (samples x channels as channels). Other code
    normalizes a weight with it, which has no samples; this counts too.
    """
    return x.shape[0] == 1 and not isinstance(weight, nn.Parameter)


def apply_norm_contiguously(
    norm: Callable[..., Tensor], ambiguous: bool, x: Tensor, *rest: Any
) -> Tensor:
    """Apply a norm of torch so that its backward pass on the CPU is correct.

    If the batch, height or width of images or volumes is 1, both memory layouts of torch fit the
    strides. The backward pass on the CPU (torch 2.13) then assumes one layout for the gradient and
    the other for the input. Its result is wrong unless both are contiguous.

    Args:
        norm: The norm function, called as norm(x, *rest).
        ambiguous: Whether both layouts fit the strides of x.
        x: The input.
        *rest: The other arguments of the norm.

    Returns:
        The output of the norm.
    """
    if not ambiguous or x.dim() not in (4, 5) or x.device.type != "cpu":
        return norm(x, *rest)
    out = norm(x.contiguous(), *rest)
    if out.requires_grad:
        out.register_hook(Tensor.contiguous)
    return out


def instance_norm(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Replace torch.instance_norm, which is a batch norm of one image with samples x channels.

    Args:
        x: The input.
        *rest: The other positional arguments of torch.instance_norm.
        **named: The keyword arguments of torch.instance_norm.

    Returns:
        The normalized input.
    """
    if has_torch_function(tensors := (x, *rest)):
        result: Tensor = handle_torch_function(TORCH_INSTANCE_NORM, tensors, *tensors, **named)
        return result
    return apply_norm_contiguously(
        lambda tensors, *rest: TORCH_INSTANCE_NORM(tensors, *rest, **named), True, x, *rest
    )


def _compute_moments(x: Tensor, has_samples: bool) -> Tensor:
    """Return [count, mean of each channel, M2 of each channel] in float64."""
    channels = x.shape[1]
    if not has_samples:
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    values = x.double().transpose(0, 1).reshape(channels, -1)
    variance, mean = torch.var_mean(values, dim=1, correction=0)
    count = values.shape[1]
    return torch.cat([mean.new_tensor([float(count)]), mean, variance * count])


def merge_moments(moments: list[Tensor]) -> tuple[float, Tensor, Tensor]:
    """Merge the moments of all parts in rank order.

    Args:
        moments: For each part [count, mean of each channel, M2 of each channel].

    Returns:
        (count, mean, M2) of all parts together.
    """
    channels = (moments[0].numel() - 1) // 2
    count = 0.0
    mean = moments[0].new_zeros(channels)
    m2 = moments[0].new_zeros(channels)
    for part in moments:
        part_count = float(part[0])
        if part_count == 0:
            continue
        difference = part[1 : 1 + channels] - mean
        mean = mean + difference * (part_count / (count + part_count))
        m2 = m2 + part[1 + channels :] + difference**2 * (count * part_count / (count + part_count))
        count += part_count
    return count, mean, m2


class GlobalNormalize(torch.autograd.Function):
    """(x - mean) * inverse * weight + bias, where mean and inverse depend on the x of all ranks."""

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
        """Normalize x.

        Args:
            ctx: The autograd context.

            x: The input of this rank.

            weight: Scale of each channel, or None.

            bias: Offset of each channel, or None.

            mean: Mean of each channel over all ranks.

            inverse: 1 / sqrt(variance + eps) of each channel.

            number: Number of values for each channel over all ranks.

            gather: Gathers a vector from all ranks.

            empty: The part of this rank is empty.

        Returns:
            The normalized input.
        """
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
    @once_differentiable  # gathered tensors have no gradient
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`.

        Args:
            ctx: The autograd context.
            *gradients: The gradient of the output.
        """
        (gradient,) = gradients
        normal, weight, inverse = ctx.saved_tensors
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        bias_gradient = gradient.sum(dims)
        weight_gradient = (gradient * normal).sum(dims)
        input_gradient = None
        if ctx.needs_input_grad[0]:
            # d loss / d x: the direct part, minus the parts through mean and variance, which
            # depend on the x of all ranks
            scale = inverse if weight is None else inverse * weight
            sums = (
                torch.stack(ctx.gather(torch.cat([bias_gradient, weight_gradient]).double())).sum(0)
                / ctx.number
            )
            through_mean, through_variance = (
                part.to(gradient.dtype).view(ctx.shape) for part in sums.chunk(2)
            )
            if ctx.empty:
                input_gradient = torch.zeros_like(gradient)
            else:
                input_gradient = (gradient - through_mean - normal * through_variance) * scale.view(
                    ctx.shape
                )
        needs = ctx.needs_input_grad
        return (
            input_gradient,
            weight_gradient if needs[1] else None,
            bias_gradient if needs[2] else None,
            None,
            None,
            None,
            None,
            None,
        )
