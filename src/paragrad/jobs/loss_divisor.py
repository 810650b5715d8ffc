"""Finds what the mean in a loss divided by, in the graph of autograd.

A user's loss is often a mean: a function around cross_entropy, the `output.loss` of a Hugging Face
model, a masked mean. It is a mean over samples, tokens that are not ignored, or elements. To add up
over shares and micro-batches, it must be separated into a sum and its divisor.

The graph of the returned tensor shows the divisor, whatever code computed the loss. Its last nodes
are a mean, a sum divided by something, or a torch loss with reduction="mean", times constants. The
model runs unobserved, and nothing is guessed. If the graph shows something else, the divisor is not
found. Examples are several means with different divisors, custom autograd functions and scripted
code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# nodes that pass one number on: unchanged, times a constant, or as the sum of the parts of several
# ranks (autograd_collectives.py, single_rank_tensor.py)
PASS_THROUGH_NODES = (
    "Neg",
    "ToCopy",
    "Clone",
    "View",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Reshape",
    "Permute",
    "Where",
    "Mul",
    "Expand",
    "AsStrided",
    "Select",
    "NanToNum",
    "AxisReduce",
    "ValueBroadcast",
)
SUM_NODES = ("Sum", "Nansum", "Dot", "Vdot", "Mv", "Mm", "Bmm")
# losses with a mean over rows, not over elements
ROW_MEAN_LOSSES = ("MultiMarginLoss", "MultilabelMarginLoss")
MAX_GRAPH_DEPTH = 200  # nodes from the loss on; a mean is never deeper

DivisorTrace = tuple[str, Any] | None  # ("mean", divisor), ("sum", None), or untraced


def find_loss_divisor(loss: Tensor) -> float | None:
    """Find what the mean in a loss divided by.

    Args:
        loss: A tensor without dimensions, with its graph.

    Returns:
        The divisor, or None if the graph does not show it.
    """
    try:
        traced = _trace_divisor(loss.grad_fn, MAX_GRAPH_DEPTH, [])
    except RuntimeError:  # the saved values are freed, or come from a recomputation
        return None
    if traced is None or traced[0] != "mean":
        return None
    value = float(traced[1])
    return value if value >= 0 else None


def make_zero_loss(total: Tensor) -> Tensor:
    """Replace a total without weight, such as a mean over no label, by 0.

    The gradient is 0 too, where 0/0 would give NaN.

    Args:
        total: The loss, with its graph.

    Returns:
        A zero that is connected to the graph of the total.
    """
    divisions: list[Any] = []
    _trace_divisor(total.grad_fn, MAX_GRAPH_DEPTH, divisions)
    for node in divisions:
        node.register_hook(
            lambda inputs, outputs: tuple(
                None if gradient is None else torch.zeros_like(gradient) for gradient in inputs
            )
        )
    return _ZeroLoss.apply(total)  # type: ignore[no-any-return]


def has_zero_weight(total: Tensor) -> bool:
    """Tell whether a mean without weight loses a part of the loss.

    If all classes of a share weigh 0, the smoothed part of a cross-entropy is a sum divided by that
    0. It stands next to the part of the targets.

    Args:
        total: The loss, with its graph.

    Returns:
        Whether a part is lost.
    """
    divisions: list[Any] = []
    _trace_divisor(total.grad_fn, MAX_GRAPH_DEPTH, divisions)
    by_zero = [
        node
        for node in divisions
        if isinstance(getattr(node, "_saved_other", None), Tensor) and not node._saved_other.any()
    ]
    for node in divisions:
        if hasattr(node, "_saved_total_weight"):
            # the index is stored as an unsigned number
            ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63
            scores = _find_softmax_inputs(node, 3)
            if (node._saved_target != ignored).any() and any(
                each is other
                for division in by_zero
                for each in _find_softmax_inputs(division, 9)
                for other in scores
            ):
                return True
    return False


def _find_softmax_inputs(node: Any, length: int) -> list[Any]:
    """The log-softmax nodes among the first inputs of a node, up to a number of nodes."""
    nodes = []
    for _ in range(length):
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
        nodes += [node] if node is not None and node.name().startswith("LogSoftmax") else []
    return nodes


class _ZeroLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor) -> Tensor:
        return torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0])


def _trace_divisor(node: Any, depth: int, divisions: list[Any]) -> DivisorTrace:
    """Trace what a node divided by, and collect its division nodes in `divisions`."""
    if node is None or depth == 0:
        return None
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        divisions.append(node)
        if reduction == 1:
            return "mean", _read_loss_divisor(name, node)
        return ("sum", None) if reduction == 2 else None
    inputs = [each for each, _ in node.next_functions if each is not None]
    if name == "Mean":
        divisions.append(node)
        return "mean", node._saved_self_sym_numel
    if name in SUM_NODES:
        return "sum", None
    if name == "Div":
        divisions.append(node)
        inner = _trace_divisor(inputs[0], depth - 1, divisions) if len(inputs) == 1 else None
        return (
            ("mean", node._saved_other)
            if inner == ("sum", None)
            else _scale_divisor(inner, node._saved_other)
        )
    if name in ("Add", "Sub"):
        return _combine_terms([_trace_divisor(each, depth - 1, divisions) for each in inputs])
    if name in PASS_THROUGH_NODES and len(inputs) == 1:
        inner = _trace_divisor(inputs[0], depth - 1, divisions)
        if name == "Mul":
            saved = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
            return functools.reduce(
                _scale_divisor,
                [
                    each.reciprocal()
                    for each in saved
                    if each is not None and not _is_constant(each)
                ],
                inner,
            )
        return inner
    return None


def _scale_divisor(inner: DivisorTrace, by: Any) -> DivisorTrace:
    """The divisor of a mean that is divided once more.

    Only tensors that depend on the batch change it, as in (losses * mask).mean() / mask.mean().
    Constants cancel.
    """
    if inner is None or inner[0] != "mean" or _is_constant(by):
        return inner
    return ("mean", inner[1] * by) if bool(torch.isfinite(by).all()) else None


def _is_constant(factor: Any) -> bool:
    """Whether a factor is a Python number.

    Autograd stores such numbers as tensors that do not take part in type promotion.
    """
    if not isinstance(factor, Tensor) or factor.dim():
        return not isinstance(factor, Tensor)
    small = torch.zeros(
        (), dtype=torch.float16 if factor.is_floating_point() else torch.int8, device=factor.device
    )
    return torch.result_type(factor, small) == small.dtype


def _read_loss_divisor(name: str, node: Any) -> Any:
    # cross-entropy: the targets that are not ignored, by class weights
    if hasattr(node, "_saved_total_weight"):
        return node._saved_total_weight
    values = node._saved_self
    return (len(values) if values.dim() > 1 else 1) if name in ROW_MEAN_LOSSES else values.numel()


def _combine_terms(terms: list[DivisorTrace]) -> DivisorTrace:
    """The divisor of a sum of terms, if its means share one.

    A term without a mean, such as a weight penalty, is equal in each share.
    """
    divisors = [term[1] for term in terms if term is not None and term[0] == "mean"]
    if not divisors:
        return ("sum", None) if terms and all(term is not None for term in terms) else None
    first, *others = map(float, divisors)
    return (
        ("mean", divisors[0])
        if all(abs(first - other) <= 1e-6 * abs(first) for other in others)
        else None
    )
