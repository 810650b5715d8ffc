"""What the ranks of a strategy hold in memory: foretold and drawn, and counted in one step."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.launch import Launcher
from paragrad.loops.synchronous import train_rank
from paragrad.record.record import Record
from paragrad.report.memory_drawing import RankMemory, draw_memory_text
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.strategies.registry import parse_strategies
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.settings import Settings
from paragrad.validation.activation_forecast import forecast_activations
from paragrad.validation.validate import ValidatedRun, validate_run

# of which a step is made to count: more processes are not started for a drawing
MAX_COUNTED_RANKS = 16


def draw_memory(text: str, job: Job, svg: Path | None = None, data: Path | None = None) -> str:
    """Strategies, one below the other. svg: a file for the picture of one. Raises Refused."""
    if get_launched_size() is not None:
        raise Refused(
            "draw --memory starts its own ranks and cannot run under a launcher; call it with "
            "plain python"
        )
    asked = parse_strategies(text)
    if svg and len(asked) > 1:
        raise Refused(f"--svg {svg} takes one picture; give one strategy")
    return "\n\n".join(_draw_strategy_memory(job, each, svg, data) for each in asked)


def _draw_strategy_memory(
    job: Job, requested: Strategy, svg: Path | None, data: Path | None
) -> str:
    checked = validate_run(job, requested, Settings(data=data))
    found = forecast_activations(checked.job, checked.resolved, checked.inspection, data)
    counted: list[dict[str, int]] = []
    if found.strategy.size <= MAX_COUNTED_RANKS:
        checked = validate_run(job, found.strategy, Settings(data=data), checked.inspection)
        with Launcher(checked.size) as ranks:
            counted = measure_step_memory(ranks, checked)
    ranks_of = [
        RankMemory(
            found.first_rank + rank,
            found.list_moments(rank),
            found.compute_test_peak(rank),
            counted[found.first_rank + rank] if counted else None,
        )
        for rank in range(found.ranks)
    ]
    sizes = sorted(set(found.micro_batch_sizes), reverse=True)
    title = (
        f"{found.strategy}: bytes that a replica's ranks hold of activations and messages, task by "
        f"task; a step of "
        f"{len(found.micro_batch_sizes)} "
        f"micro-batch{'es' if len(found.micro_batch_sizes) > 1 else ''} of "
        f"{' or '.join(map(str, sizes))} samples"
    )
    return draw_memory_text(title, ranks_of, svg)


def measure_step_memory(launcher: Launcher, validated_run: ValidatedRun) -> list[dict[str, int]]:
    """What each rank held in a training of one step, by kind, as its record says. Raises
    RankFailed.
    """
    limited = replace(
        validated_run,
        settings=replace(
            validated_run.settings,
            limit=1,
            skip_first_step_check=True,
            save=None,
            resume=None,
            trace=None,
            until=None,
            tensorboard=False,
        ),
        resume_checkpoint=None,
        trial_result=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        limited.run_on_ranks(launcher, train_rank, limited, Path(folder), time.monotonic())
        record = Record(Path(folder))
        return [_read_rank_memory(record, rank) for rank in range(len(record.ranks))]


def _read_rank_memory(record: Record, rank: int) -> dict[str, int]:
    lines: list[dict[str, Any]] = record.select_lines("memory", rank)
    return {kind: held for kind, held in lines[-1].items() if kind != "kind"} if lines else {}
