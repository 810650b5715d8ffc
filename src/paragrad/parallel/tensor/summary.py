"""What a split in width is, layer by layer: what each rank holds, and what travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from paragrad.parallel.sharding.partition import DimPartition
from paragrad.parallel.tensor.sharding_plan import FORWARD_TRANSFERS, ShardingPlan


@dataclass(frozen=True)
class LayerSummary:
    """A module with parameters of its own, or with messages. how: its parameters and buffers,
    and how each is divided; numbers: in its parameters, here: those that the fullest rank has;
    forward, backward: what travels in each, and bytes that a rank sends for it.
    """

    name: str
    divisions: str
    elements: int
    local_elements: int
    forward: str
    backward: str


def summarize_layers(plan: ShardingPlan) -> list[LayerSummary]:
    """In the order of a forward; first those without messages, in the order of their
    definition.
    """
    tensors: dict[str, list[str]] = {}
    for name in (*plan.shapes,):
        tensors.setdefault(name.rpartition(".")[0], []).append(name)
    places = dict.fromkeys(note.module for note in plan.transfers)
    order = dict.fromkeys([*tensors, *places])
    return [_summarize_layer(plan, name, tensors.get(name, [])) for name in order]


def _summarize_layer(plan: ShardingPlan, module: str, names: list[str]) -> LayerSummary:
    shapes = [plan.shapes[name] for name in names]
    told = [f"{name.rpartition('.')[2]} {describe_division(plan, name)}" for name in names]
    travels = []
    for forward in (True, False):
        notes = [
            note
            for note in plan.transfers
            if note.module == module and (note.kind in FORWARD_TRANSFERS) is forward
        ]
        kinds = dict.fromkeys(note.kind for note in notes)
        travels.append(f"{', '.join(kinds)} {sum(note.bytes for note in notes):,}" if notes else "")
    here = sum(plan.count_elements(name, 0) for name in names)
    return LayerSummary(module, "; ".join(told), sum(map(prod, shapes)), here, *travels)


def describe_division(plan: ShardingPlan, name: str) -> str:
    """How a tensor is divided, in words."""
    shape = plan.shapes[name]
    if name not in plan.sharded_tensors:
        return f"whole{shape if len(shape) > 1 else ''}" + (
            f" ({plan.whole_reasons[name]})" if name in plan.whole_reasons else ""
        )
    _, blocks = plan.sharded_tensors[name]
    ranks = [DimPartition(blocks, plan.ranks).compute_length(rank) for rank in range(plan.ranks)]
    what = plan.roles.get(name, "inputs" if len(shape) > 1 else "elements")
    several = f" of each of {len(blocks)} blocks" if len(blocks) > 1 else ""
    counts = (
        " + ".join(str(each // len(blocks)) for each in ranks)
        if several
        else " + ".join(map(str, ranks))
    )
    return f"{what} {counts}{several}"


def format_sharding_table(plan: ShardingPlan, samples: int) -> list[str]:
    """As a table in text."""
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
        f"travels "
        f"between ranks, and the bytes that each sends, for {samples} samples",
    ]


def format_fetch_table(plan: ShardingPlan, samples: int) -> list[str]:
    """Of layers that are given pieces of images, as a table in text."""
    found = [each for each in summarize_layers(plan) if each.forward or each.backward]
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
            for each in found
        ),
    ]
    return [
        *align_columns(rows),
        "fetched: rows that come to a rank from others; forward and backward: what travels between "
        "ranks, "
        f"and the bytes that the fullest rank sends, for {samples} samples",
    ]


def align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
