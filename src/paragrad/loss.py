"""The loss as (sum, weight): the form in which it adds up over micro-batches and ranks.

A user's loss is the mean over the samples of a batch, or a pair f(output, target) -> (sum, weight). The weight of a mean
is its number of samples; cross-entropy and nll leave out targets equal to ignore_index and weigh by class, so theirs is
counted from the targets.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paragrad.datasets.loading import brought, called, copied, cut

Loss = Callable[[Any, Any], Any]


def loss_in(loss: Loss, device: torch.device, dtype: torch.dtype) -> Loss:
    """The loss, its own tensors (class weights) on a device and in dtype where it is a module or a partial that shows them."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).to(device, dtype)
    if isinstance(loss, functools.partial):
        keywords = {name: brought(value, device, dtype) for name, value in loss.keywords.items()}
        return functools.partial(loss.func, *loss.args, **keywords)
    return loss


def summed(loss: Loss, output: Any, target: Any, samples: int) -> tuple[Tensor, float]:
    """The sum of the loss over `samples` samples, and its weight (samples or tokens)."""
    value = loss(output, target)
    if isinstance(value, tuple):
        total, weight = value
        return total, float(weight)
    weight = counted(loss, target, samples)
    if weight == 0:                             # all targets ignored: the mean is 0/0, the sum is 0
        return (output * 0).sum(), 0.0
    return value.to(torch.promote_types(value.dtype, torch.float32)) * weight, weight


def counted(loss: Loss, target: Any, samples: int) -> float:
    """The weight of a mean: what it divides by."""
    ignoring = _cross_entropy(loss)
    if ignoring is None or not isinstance(target, Tensor) or target.is_floating_point():
        return float(samples)
    ignore_index, class_weight = ignoring
    kept = target != ignore_index
    return float(kept.sum() if class_weight is None else class_weight[target[kept]].sum())


def _cross_entropy(loss: Loss) -> tuple[int, Tensor | None] | None:
    """(ignore_index, class weights) where the loss is a cross-entropy of torch, else None."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.ignore_index, loss.weight
    keywords: dict[str, Any] = {}
    if isinstance(loss, functools.partial):
        keywords, loss = loss.keywords, loss.func
    if loss in (functional.cross_entropy, functional.nll_loss):
        return keywords.get("ignore_index", -100), keywords.get("weight")
    return None


class Summed(nn.Module):
    """Model and loss as one module: inputs, target -> the summed loss, and its weight."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = (loss,)                    # in a tuple: a loss that is a module is not part of the model

    @property
    def loss(self) -> Loss:
        return self._loss[0]

    def forward(self, inputs: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        """The sum over the first `samples` (0: everything weighs nothing) and its local weight."""
        total, weight = self.pair(called(self.model, inputs), target, max(samples, 1))
        return (total, weight) if samples else (total * 0, 0.0)

    def pair(self, output: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        """The loss of an output as (sum, weight)."""
        return summed(self.loss, output, target, samples)


@torch.no_grad()
def wrong_with(loss: Loss, model: nn.Module, inputs: Any, target: Any, samples: int) -> str | None:
    """What is wrong with a loss, seen on a batch through a model in eval mode, or None; inputs and target stay as they are."""
    output = called(model, copied(inputs))
    middle = samples // 2
    if middle == 0:
        return check_adds_up(loss, (output, target), [(output, target, samples)])
    parts = [slice(0, middle), slice(middle, samples)]
    try:
        if isinstance(output, Tensor) and output.dim() and len(output) == samples:
            outputs = [output[part] for part in parts]
        else:                                       # its first dimension is not the batch: ask the model again
            outputs = [called(model, cut(copied(inputs), part, samples)) for part in parts]
        targets = [cut(target, part, samples) for part in parts]
    except ValueError:
        return None                                 # a batch that cannot be cut: micro-batches will say so
    halves = [(half, each, len(range(samples)[part])) for half, each, part in zip(outputs, targets, parts, strict=True)]
    return check_adds_up(loss, (output, target), halves)


def check_adds_up(loss: Loss, whole: tuple[Any, Any], halves: list[tuple[Any, Any, int]]) -> str | None:
    """What is wrong with a loss, seen on a batch (output, target) and its halves (output, target, samples), or None.

    A mean must equal the weighted mean of its halves; a pair must equal the sum of their pairs.
    """
    value = loss(*whole)
    if isinstance(value, tuple):
        if len(value) != 2:
            return f"the loss returned {len(value)} values; return the mean over samples, or a pair (sum, weight)"
        value, weight = value
    else:
        weight = None
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value).__name__)
        return f"the loss returned {shape}; return one number: the mean over samples, or a pair (sum, weight)"
    parts = [summed(loss, *half) for half in halves]
    total, weights = sum(float(part[0]) for part in parts), sum(part[1] for part in parts)
    expected = total if weight is not None else total / weights if weights else float(value)
    if not torch.isfinite(torch.tensor([float(value), expected])).all():
        return None                             # not finite is a matter of the run, which names rank, step and tensor
    if _close(float(value), expected) and (weight is None or _close(float(weight), weights)):
        return None
    if weight is not None:
        return (f"the pair (sum, weight) does not add up: ({float(value):.6g}, {float(weight):.6g}) over a batch, "
                f"({total:.6g}, {weights:.6g}) over its two halves; return plain sums")
    means = [float(loss(*half[:2])) for half in halves]
    if _close(float(value), sum(means)):
        return ("the loss is a bare sum over the batch; return the mean (reduction='mean'), "
                "or the pair (sum, number of samples)")
    return (f"the loss is no mean over samples: {float(value):.6g} over a batch, {expected:.6g} from its two halves "
            "weighted by samples; return the pair (sum, weight) with the weight it divides by")


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * max(abs(a), abs(b), 1e-6)
