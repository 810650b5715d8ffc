"""Trainings of one job that differ in one thing (arms), with several seeds, and the results in
their records.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import differences, read_commit

import paragrad as pg

SPREAD = (
    "\n\nMean ± standard deviation over seeds; of differences, which are taken seed by seed, the "
    "standard error."
)
# from a seed to the job and its strategy
Arm = Callable[[int], tuple[pg.Job, str]]


def train_arms(
    arms: Mapping[Any, Arm],
    seeds: int,
    read: Callable[[pg.Run], dict[str, Any]],
    so_far: Path | None = None,
    *,
    data: str | None,
    **settings: Any,
) -> dict[Any, list[dict[str, Any]]]:
    """Train every arm with every seed, and return what `read` returns for each run.

    For a run that failed, its message is returned instead. The folder of a run is deleted at
    once, because it may be large.
    so_far: a file with the results of earlier runs. These are not repeated; new runs are added,
    with their commits.
    """
    found: dict[Any, list[dict[str, Any]]] = {name: [] for name in arms}
    lines = map(json.loads, so_far.read_text().splitlines() if so_far and so_far.exists() else ())
    made: dict[str, dict[str, Any]] = {line["run"]: line["found"] for line in lines}
    for seed in range(seeds):
        for name, arm in arms.items():
            job, text = arm(seed)
            rule = f"batch {job.batch}, {job.scale_lr}, {job.warm_up}"
            run = (
                f"{job.name} {dict(job.arguments)}, {text}, seed {seed}, epochs {job.epochs}, "
                f"{rule}, {settings}"
            )
            if run not in made:
                made[run] = {
                    **train_once(job.replace(seed=seed), text, read, data=data, **settings),
                    "commit": read_commit(),
                }
                if so_far and "failed" not in made[run]:
                    with so_far.open("a") as file:
                        file.write(json.dumps({"run": run, "found": made[run]}) + "\n")
            found[name].append(made[run])
            words = ", ".join(
                f"{what} {value:.5g}" if isinstance(value, float) else f"{what}: {value}"
                for what, value in made[run].items()
                if isinstance(value, float | str)
            )
            print(f"seed {seed}: {name}: {words}", file=sys.stderr, flush=True)
    return found


def train_once(
    job: pg.Job, text: str, read: Callable[[pg.Run], dict[str, Any]], **settings: Any
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = pg.train(job, text, runs=folder, **settings)
        except pg.RankFailed as error:
            return {"failed": str(error)}
        if run.stopped:  # by a request to stop, so the whole experiment ends
            sys.exit(143)
        return read(run)


def select_values(found: Mapping[Any, list[dict[str, Any]]], name: Any, what: str) -> list[float]:
    """Return one number for every seed of an arm; nan for a run that failed."""
    return [each.get(what, math.nan) for each in found[name]]


def format_mean(values: list[float], digits: int = 2) -> str:
    """Return mean and standard deviation as the text of a table cell."""
    if any(map(math.isnan, values)):
        return "failed"
    return f"{mean(values):.{digits}f}" + (
        f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    )


def compute_mean_difference(one: list[float], other: list[float]) -> tuple[float, float]:
    """Return the mean of the differences of equal seeds, and its standard error.

    With equal seeds, both trainings have the same initial weights and the same order of samples.
    """
    found = differences(one, other)
    return mean(found), stdev(found) / len(found) ** 0.5 if len(found) > 1 else math.nan


def format_mean_difference(one: list[float], other: list[float]) -> str:
    """Return the result of `compute_mean_difference` as the text of a table cell."""
    return "{:+.2f} ± {:.2f}".format(*compute_mean_difference(one, other))
