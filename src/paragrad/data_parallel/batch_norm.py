"""Batch norm over all ranks: the statistics of one micro-batch as a whole, as one worker would take them.

Every rank tells (count, mean, M2) of its part; they are merged in rank order (Chan, Golub, LeVeque 1979), so all ranks get
the same statistics, to the bit, however unequal the parts. A rank whose part is empty (it runs one sample with weight 0)
counts nothing, and nothing flows back through that sample. torch's SyncBatchNorm does this for equal parts on GPUs only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from paragrad.world import World


@dataclass
class Part:
    """The part of the present micro-batch that this rank runs; the trainer keeps it up to date."""
    samples: int = 0            # 0: one sample runs, and counts for nothing


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def make_whole(model: nn.Module, world: World, part: Part, count: Callable[[int], None]) -> None:
    """Let every batch norm of a model take the statistics of all ranks; count(bytes) is told what is gathered."""
    for norm in batch_norms(model):
        norm.forward = Whole(norm, world, part, count)          # type: ignore[method-assign]


def make_own(model: nn.Module, part: Part) -> None:
    """Each rank its own statistics (not the serial training); an empty part is normalised and changes nothing."""
    for norm in batch_norms(model):
        norm.forward = Own(norm, part)                          # type: ignore[method-assign]


@dataclass
class Own:
    """A batch norm's forward that leaves an empty part out of the statistics."""
    norm: _BatchNorm
    part: Part

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if norm.training and self.part.samples == 0 and norm.running_mean is not None:
            return functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
        return type(norm).forward(norm, x)


@dataclass
class Whole:
    """A batch norm's forward over the ranks of a world."""
    norm: _BatchNorm
    world: World
    part: Part
    count: Callable[[int], None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        return Whole(copy.deepcopy(self.norm, memo), self.world, self.part, self.count)

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training:
            return type(norm).forward(norm, x)
        number, mean, m2 = merged(self.gathered(_moments(x.detach(), counted=self.part.samples > 0)))
        if number == 1:                 # over all ranks: what torch says to a batch of one
            raise ValueError("Expected more than 1 value per channel when training, got 1 over all ranks")
        if norm.track_running_stats and norm.running_mean is not None:
            self.update_running(number, mean, m2)
        inverse = (m2 / number + norm.eps).rsqrt()
        wide = x.to(torch.promote_types(x.dtype, torch.float32))        # bfloat16 under autocast: computed as torch does
        normal = Normalise.apply(wide, norm.weight, norm.bias, mean.to(wide.dtype), inverse.to(wide.dtype), number, self)
        return normal.to(x.dtype)

    def update_running(self, number: float, mean: Tensor, m2: Tensor) -> None:
        norm = self.norm
        norm.num_batches_tracked.add_(1)                        # type: ignore[union-attr]
        rate = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum   # type: ignore[arg-type]
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), rate)                     # type: ignore[union-attr]
        norm.running_var.lerp_((m2 / max(number - 1, 1)).to(norm.running_var.dtype), rate)  # type: ignore[union-attr]

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        self.count(tensor.numel() * tensor.element_size())
        return self.world.gathered(tensor)


def _moments(x: Tensor, counted: bool) -> Tensor:
    """[count, mean of each channel, M2 of each channel] in float64."""
    channels = x.shape[1]
    if not counted:
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    values = x.double().transpose(0, 1).reshape(channels, -1)
    variance, mean = torch.var_mean(values, dim=1, correction=0)
    number = values.shape[1]
    return torch.cat([mean.new_tensor([float(number)]), mean, variance * number])


def merged(moments: list[Tensor]) -> tuple[float, Tensor, Tensor]:
    """(count, mean, M2) of all parts together, merged in rank order."""
    channels = (moments[0].numel() - 1) // 2
    number, mean, m2 = 0.0, moments[0].new_zeros(channels), moments[0].new_zeros(channels)
    for part in moments:
        more = float(part[0])
        if more == 0:
            continue
        difference = part[1:1 + channels] - mean
        mean = mean + difference * (more / (number + more))
        m2 = m2 + part[1 + channels:] + difference**2 * (number * more / (number + more))
        number += more
    return number, mean, m2


class Normalise(torch.autograd.Function):
    """(x - mean) * inverse * weight + bias, where mean and inverse depend on the x of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor,
                number: float, whole: Whole) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse)
        ctx.number, ctx.whole, ctx.shape, ctx.empty = number, whole, shape, whole.part.samples == 0
        result = normal if weight is None else normal * weight.view(shape)
        return result if bias is None else result + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        normal, weight, inverse = ctx.saved_tensors
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        for_bias, for_weight = gradient.sum(dims), (gradient * normal).sum(dims)
        for_x = None
        if ctx.needs_input_grad[0]:
            # d loss / d x: the direct part, less what flows through mean and variance, which all ranks' x share
            scale = inverse if weight is None else inverse * weight
            sums = torch.stack(ctx.whole.gathered(torch.stack([for_bias, for_weight]).double())).sum(0) / ctx.number
            through_mean, through_variance = (part.to(gradient.dtype).view(ctx.shape) for part in sums)
            if ctx.empty:
                for_x = torch.zeros_like(gradient)
            else:
                for_x = (gradient - through_mean - normal * through_variance) * scale.view(ctx.shape)
        needs = ctx.needs_input_grad
        return (for_x, for_weight if needs[1] else None, for_bias if needs[2] else None, None, None, None, None)
