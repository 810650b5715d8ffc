"""What the mean in a loss divided by: read off autograd's graph, which holds it.

A loss of the user's kind (a function around cross_entropy, the `output.loss` of a Hugging Face
model, a masked mean) is a mean over something: samples, tokens that are not ignored, elements.
To add up over shares and micro-batches it must be split into a sum and what that was divided
by. The tensor that the loss returned leads there, whatever code made it: its last nodes are a
mean, a sum divided by something, or one of torch's losses with reduction="mean", times
constants. Nothing is watched while the model runs, and nothing is guessed; a loss whose graph
says something else (several means of unequal divisors, own autograd functions, scripted code)
is untraced.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# nodes that hand on one number unchanged, or times a constant, or the sum of ranks that have a
# part of it (pairs.py, lone.py)
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
# their mean is over rows, not over elements
ROW_MEAN_LOSSES = ("MultiMarginLoss", "MultilabelMarginLoss")
MAX_GRAPH_DEPTH = 200  # nodes from the loss on after which nobody has a mean

DivisorTrace = tuple[str, Any] | None  # ("mean", divisor), ("sum", None), or untraced


def find_loss_divisor(loss: Tensor) -> float | None:
    """What the mean in a loss (a tensor without dimensions, with its graph) divided by; None
    where it is untraced.
    """
    try:
        found = _trace_divisor(loss.grad_fn, MAX_GRAPH_DEPTH, [])
    except RuntimeError:  # what a node saved is freed, or comes from a recomputation
        return None
    if found is None or found[0] != "mean":
        return None
    value = float(found[1])
    return value if value >= 0 else None


def make_zero_loss(total: Tensor) -> Tensor:
    """0 for a total of no weight, such as a mean over no label: its gradient is 0 too, where
    0/0 would be no number.
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
    """Is something lost with a mean of no weight? Where all classes of a share weigh 0, the
    smoothed part of a cross-entropy is a sum divided by that 0, beside the part of the
    targets.
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
            # it is told without its sign
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
    """The logarithms of a softmax among a node's first inputs."""
    found = []
    for _ in range(length):
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
        found += [node] if node is not None and node.name().startswith("LogSoftmax") else []
    return found


class _ZeroLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor) -> Tensor:
        return torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0])


def _trace_divisor(node: Any, depth: int, divisions: list[Any]) -> DivisorTrace:
    """What a node divided by; its divisions are noted."""
    if node is None or depth == 0:
        return None
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    behind = [each for each, _ in node.next_functions if each is not None]
    if hasattr(node, "_saved_reduction"):
        divisions.append(node)
        return {1: ("mean", _read_loss_divisor(name, node)), 2: ("sum", None)}.get(
            node._saved_reduction
        )
    if name == "Mean":
        divisions.append(node)
        return "mean", node._saved_self_sym_numel
    if name in SUM_NODES:
        return "sum", None
    if name == "Div":
        divisions.append(node)
        inner = _trace_divisor(behind[0], depth - 1, divisions) if len(behind) == 1 else None
        return (
            ("mean", node._saved_other)
            if inner == ("sum", None)
            else _scale_divisor(inner, node._saved_other)
        )
    if name in ("Add", "Sub"):
        return _combine_terms([_trace_divisor(each, depth - 1, divisions) for each in behind])
    if name in PASS_THROUGH_NODES and len(behind) == 1:
        inner = _trace_divisor(behind[0], depth - 1, divisions)
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
    """Of a mean divided by more: a tensor is of this batch, as in (losses * mask).mean() /
    mask.mean(); constants cancel.
    """
    if inner is None or inner[0] != "mean" or _is_constant(by):
        return inner
    return ("mean", inner[1] * by) if bool(torch.isfinite(by).all()) else None


def _is_constant(factor: Any) -> bool:
    """Is it a number of Python's? Autograd keeps those as tensors, which do not count where
    types are promoted.
    """
    if not isinstance(factor, Tensor) or factor.dim():
        return not isinstance(factor, Tensor)
    small = torch.zeros(
        (), dtype=torch.float16 if factor.is_floating_point() else torch.int8, device=factor.device
    )
    return torch.result_type(factor, small) == small.dtype


def _read_loss_divisor(name: str, node: Any) -> Any:
    # cross-entropy: what is not ignored, by class weights
    if hasattr(node, "_saved_total_weight"):
        return node._saved_total_weight
    values = node._saved_self
    return (len(values) if values.dim() > 1 else 1) if name in ROW_MEAN_LOSSES else values.numel()


def _combine_terms(terms: list[DivisorTrace]) -> DivisorTrace:
    """Of a sum of terms: the divisor of its means where they have one in common; a term without
    any, such as a weight penalty, is as good in every share.
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
