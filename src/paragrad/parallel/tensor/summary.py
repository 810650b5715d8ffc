"""A summary of a sharding plan: what each rank holds of each layer, and what travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from paragrad.parallel.sharding.partition import DimPartition
from paragrad.parallel.tensor.sharding_plan import FORWARD_TRANSFERS, ShardingPlan


@dataclass(frozen=True)
class LayerSummary:
    """A module that has parameters of its own, or transfers.

    Attributes:
        name: Name of the module.

        divisions: How each of its parameters and buffers is divided, in words.

        elements: Number of elements of its parameters and buffers.

        local_elements: How many of them rank 0 holds, which holds most.

        forward: Transfers in the forward, and bytes that a rank sends for them.

        backward: The same for the backward.
    """

    name: str
    divisions: str
    elements: int
    local_elements: int
    forward: str
    backward: str


def summarize_layers(plan: ShardingPlan) -> list[LayerSummary]:
    """Summarize the layers of a plan.

    Args:
        plan: The plan.

    Returns:
        One entry for each module: those with parameters in the order of their definition, then
        others with transfers in the order of a forward.
    """
    tensors: dict[str, list[str]] = {}
    for name in (*plan.shapes,):
        tensors.setdefault(name.rpartition(".")[0], []).append(name)
    modules_with_transfers = dict.fromkeys(note.module for note in plan.transfers)
    order = dict.fromkeys([*tensors, *modules_with_transfers])
    return [_summarize_layer(plan, name, tensors.get(name, [])) for name in order]


def _summarize_layer(plan: ShardingPlan, module: str, names: list[str]) -> LayerSummary:
    shapes = [plan.shapes[name] for name in names]
    divisions = [f"{name.rpartition('.')[2]} {describe_division(plan, name)}" for name in names]
    travels = []
    for forward in (True, False):
        notes = [
            note
            for note in plan.transfers
            if note.module == module and (note.kind in FORWARD_TRANSFERS) is forward
        ]
        kinds = dict.fromkeys(note.kind for note in notes)
        travels.append(f"{', '.join(kinds)} {sum(note.bytes for note in notes):,}" if notes else "")
    local_elements = sum(plan.count_elements(name, 0) for name in names)
    return LayerSummary(
        module, "; ".join(divisions), sum(map(prod, shapes)), local_elements, *travels
    )


def describe_division(plan: ShardingPlan, name: str) -> str:
    """Describe in words how a tensor is divided."""
    shape = plan.shapes[name]
    if name not in plan.sharded_tensors:
        return f"whole{shape if len(shape) > 1 else ''}" + (
            f" ({plan.whole_reasons[name]})" if name in plan.whole_reasons else ""
        )
    _, blocks = plan.sharded_tensors[name]
    lengths = [DimPartition(blocks, plan.ranks).compute_length(rank) for rank in range(plan.ranks)]
    role = plan.roles.get(name, "inputs" if len(shape) > 1 else "elements")
    block_suffix = f" of each of {len(blocks)} blocks" if len(blocks) > 1 else ""
    counts = (
        " + ".join(str(each // len(blocks)) for each in lengths)
        if block_suffix
        else " + ".join(map(str, lengths))
    )
    return f"{role} {counts}{block_suffix}"


def format_sharding_table(plan: ShardingPlan, samples: int) -> list[str]:
    """Format the layers of a plan as a table.

    Args:
        plan: The plan.
        samples: Number of samples for which the plan was made.

    Returns:
        The lines of the table.
    """
    rows = [
        ("layer", "numbers", "on a rank", "how", "forward", "backward"),
        *(
            (
                each.name or "the model",
                f"{each.elements:,}",
                f"{each.local_elements:,}",
                each.divisions,
                each.forward,
                each.backward,
            )
            for each in summarize_layers(plan)
        ),
    ]
    split = sum(prod(plan.shapes[name]) for name in plan.sharded_tensors)
    total = sum(map(prod, plan.shapes.values()))
    return [
        *align_columns(rows),
        f"{split / max(total, 1):.1%} of {total:,} numbers are divided; forward and backward: what "
        f"travels between ranks, and the bytes that each sends, for {samples} samples",
    ]


def format_fetch_table(plan: ShardingPlan, samples: int) -> list[str]:
    """Format the transfers of layers that get pieces of images as a table.

    Args:
        plan: The plan.
        samples: Number of samples for which the plan was made.

    Returns:
        The lines of the table.
    """
    layers = [each for each in summarize_layers(plan) if each.forward or each.backward]
    rows = [
        ("layer", "fetched by each rank", "forward", "backward"),
        *(
            (
                each.name or "the model",
                "; ".join(
                    note.detail
                    for note in plan.transfers
                    if note.module == each.name and note.detail
                ),
                each.forward,
                each.backward,
            )
            for each in layers
        ),
    ]
    return [
        *align_columns(rows),
        "fetched: rows that come to a rank from others; forward and backward: what travels "
        f"between ranks, and the bytes that the fullest rank sends, for {samples} samples",
    ]


def align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pad the cells of a table to columns; returns its lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
