"""What a split in width is, layer by layer: what each rank holds, and what travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from paragrad.parallel.sharding.partition import Pieces
from paragrad.parallel.tensor.sharding_plan import FORWARD, Plan


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own, or with messages. how: its parameters and buffers,
    and how each is divided; numbers: in its parameters, here: those that the fullest rank has;
    forward, backward: what travels in each, and bytes that a rank sends for it.
    """

    name: str
    how: str
    numbers: int
    here: int
    forward: str
    backward: str


def layers(plan: Plan) -> list[Layer]:
    """In the order of a forward; first those without messages, in the order of their
    definition.
    """
    tensors: dict[str, list[str]] = {}
    for name in (*plan.shapes,):
        tensors.setdefault(name.rpartition(".")[0], []).append(name)
    places = dict.fromkeys(note.at for note in plan.notes)
    order = dict.fromkeys([*tensors, *places])
    return [_layer(plan, name, tensors.get(name, [])) for name in order]


def _layer(plan: Plan, module: str, names: list[str]) -> Layer:
    shapes = [plan.shapes[name] for name in names]
    told = [f"{name.rpartition('.')[2]} {divided(plan, name)}" for name in names]
    travels = []
    for forward in (True, False):
        notes = [
            note for note in plan.notes if note.at == module and (note.what in FORWARD) is forward
        ]
        kinds = dict.fromkeys(note.what for note in notes)
        travels.append(f"{', '.join(kinds)} {sum(note.bytes for note in notes):,}" if notes else "")
    here = sum(plan.numbers(name, 0) for name in names)
    return Layer(module, "; ".join(told), sum(map(prod, shapes)), here, *travels)


def divided(plan: Plan, name: str) -> str:
    """How a tensor is divided, in words."""
    shape = plan.shapes[name]
    if name not in plan.divided:
        return f"whole{shape if len(shape) > 1 else ''}" + (
            f" ({plan.why[name]})" if name in plan.why else ""
        )
    _, blocks = plan.divided[name]
    ranks = [Pieces(blocks, plan.ranks).length(rank) for rank in range(plan.ranks)]
    what = plan.roles.get(name, "inputs" if len(shape) > 1 else "elements")
    several = f" of each of {len(blocks)} blocks" if len(blocks) > 1 else ""
    counts = (
        " + ".join(str(each // len(blocks)) for each in ranks)
        if several
        else " + ".join(map(str, ranks))
    )
    return f"{what} {counts}{several}"


def told(plan: Plan, samples: int) -> list[str]:
    """As a table in text."""
    rows = [
        ("layer", "numbers", "on a rank", "how", "forward", "backward"),
        *(
            (
                each.name or "the model",
                f"{each.numbers:,}",
                f"{each.here:,}",
                each.how,
                each.forward,
                each.backward,
            )
            for each in layers(plan)
        ),
    ]
    split = sum(prod(plan.shapes[name]) for name in plan.divided)
    total = sum(map(prod, plan.shapes.values()))
    return [
        *table(rows),
        f"{split / max(total, 1):.1%} of {total:,} numbers are divided; forward and backward: what "
        f"travels "
        f"between ranks, and the bytes that each sends, for {samples} samples",
    ]


def fetching(plan: Plan, samples: int) -> list[str]:
    """Of layers that are given pieces of images, as a table in text."""
    found = [each for each in layers(plan) if each.forward or each.backward]
    rows = [
        ("layer", "fetched by each rank", "forward", "backward"),
        *(
            (
                each.name or "the model",
                "; ".join(
                    note.detail for note in plan.notes if note.at == each.name and note.detail
                ),
                each.forward,
                each.backward,
            )
            for each in found
        ),
    ]
    return [
        *table(rows),
        "fetched: rows that come to a rank from others; forward and backward: what travels between "
        "ranks, "
        f"and the bytes that the fullest rank sends, for {samples} samples",
    ]


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
