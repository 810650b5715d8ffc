"""The result of a training of kill.py, over a run and the runs that it resumes: every loss, every
final parameter, and the count of samples (audit).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from paragrad.record.record import Record


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    losses: all losses that were recorded for a step; a repeated step has several.
    audited: whether every epoch used every sample exactly once.
    resumed: the step from which the training continued, or None.
    """

    losses: dict[int, list[float]]
    parameters: dict[str, Tensor]
    audited: bool
    resumed: int | None = None

    def difference(self, other: TrainingResult) -> float:
        """Return the largest difference of losses and parameters.

        It is infinite if a step or a parameter is missing or is not a number.
        """
        if (
            self.losses.keys() != other.losses.keys()
            or self.parameters.keys() != other.parameters.keys()
        ):
            return math.inf
        found = [
            abs(loss - each)
            for step, told in self.losses.items()
            for loss in told
            for each in other.losses[step]
        ]
        found += [
            float((value - other.parameters[name]).abs().max())
            for name, value in self.parameters.items()
        ]
        return math.inf if any(map(math.isnan, found)) else max(found)


def read_run(folder: Path) -> TrainingResult:
    """Return the result of a run, together with the runs that it resumes."""
    record = Record(folder)
    lines, audit, epochs, samples = (
        record.collect_step_lines(),
        record.sample_count,
        *map(record.header["job"].get, ("epochs", "samples")),
    )
    used = Counter(
        (line["epoch"], position)
        for line in lines
        for positions in line["order"]
        for position in range(*positions)
    )
    once = dict.fromkeys(
        ((epoch, position) for epoch in range(epochs) for position in range(samples)), 1
    )
    sums: dict[int, list[list[float]]] = {}
    for line in lines:
        sums.setdefault(line["step"], []).append(line["loss"])
    losses = {
        step: [sum(loss for loss, _ in each) / sum(weight for _, weight in each)]
        for step, each in sums.items()
    }
    audited = (
        used == once
        and audit.epochs > 0
        and audit.seen == samples
        and audit.twice == audit.missed == 0
    )
    resumed = (record.header["resumed"] or {}).get("step")
    return TrainingResult(losses, load_file(folder / "model.safetensors"), audited, resumed)


def read_loop(folder: Path) -> TrainingResult:
    """Return the result of a loop of one's own, such as kill_loop.py.

    Its only record is the file of losses. The losses of all steps are there in order, except for
    the steps that a restart repeated.
    """
    words = [line.split() for line in (folder / "losses").read_text().splitlines()]
    told = [(int(step), float(loss)) for step, loss in words if step != "resumed"]
    losses: dict[int, list[float]] = {}
    for step, loss in told:
        losses.setdefault(step, []).append(loss)
    resumed = [int(step) for word, step in words if word == "resumed"]
    return TrainingResult(
        losses,
        load_file(folder / "model.safetensors"),
        is_consecutive([step for step, _ in told]),
        resumed[-1] if resumed else None,
    )


def is_consecutive(steps: Iterable[int]) -> bool:
    """Return whether the steps are 0, 1, 2, ... without a gap. Steps may be repeated."""
    next_ = 0
    for step in steps:
        if step > next_:
            return False
        next_ = step + 1
    return True
