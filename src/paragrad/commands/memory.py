"""The memory that the ranks of a strategy hold: predicted and drawn, and counted in one step."""

from __future__ import annotations

import tempfile
import time
import warnings
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

# ranks up to which a step is run to count memory; a drawing starts no more processes
MAX_COUNTED_RANKS = 16


def draw_memory(text: str, job: Job, svg: Path | None = None, data: Path | None = None) -> str:
    """Draw the memory of strategies, one below the other.

    Args:
        text: the strategies, separated by ;.
        job: the job.
        svg: a file for the picture of one strategy.
        data: folder of data for jobs that read files.

    Raises:
        Refused: a strategy cannot be drawn.
    """
    if get_launched_size() is not None:
        raise Refused(
            "draw --memory starts its own ranks and cannot run under a launcher; call it with "
            "plain python"
        )
    requested = parse_strategies(text)
    if svg and len(requested) > 1:
        raise Refused(f"--svg {svg} takes one picture; give one strategy")
    return "\n\n".join(_draw_strategy_memory(job, each, svg, data) for each in requested)


def _draw_strategy_memory(
    job: Job, requested: Strategy, svg: Path | None, data: Path | None
) -> str:
    validated_run = validate_run(job, requested, Settings(data=data))
    forecast = forecast_activations(
        validated_run.job, validated_run.resolved, validated_run.inspection, data
    )
    counted_bytes: list[dict[str, int]] = []
    if forecast.strategy.size <= MAX_COUNTED_RANKS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # they were given above
            validated_run = validate_run(
                job, forecast.strategy, Settings(data=data), validated_run.inspection
            )
        with Launcher(validated_run.size) as launcher:
            counted_bytes = measure_step_memory(launcher, validated_run)
    lifetimes = [
        RankMemory(
            forecast.first_rank + rank,
            forecast.list_moments(rank),
            forecast.compute_test_peak(rank),
            counted_bytes[forecast.first_rank + rank] if counted_bytes else None,
        )
        for rank in range(forecast.ranks)
    ]
    sizes = sorted(set(forecast.micro_batch_sizes), reverse=True)
    title = (
        f"{forecast.strategy}: bytes that a replica's ranks hold of activations and messages, task "
        f"by task; a step of {len(forecast.micro_batch_sizes)} "
        f"micro-batch{'es' if len(forecast.micro_batch_sizes) > 1 else ''} of "
        f"{' or '.join(map(str, sizes))} samples"
    )
    return draw_memory_text(title, lifetimes, svg)


def measure_step_memory(launcher: Launcher, validated_run: ValidatedRun) -> list[dict[str, int]]:
    """Measure the bytes that each rank held in a training of one step, by kind, from its record.

    Args:
        launcher: starts the ranks.
        validated_run: the run.

    Raises:
        RankFailed: a rank failed.
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
    return {kind: size for kind, size in lines[-1].items() if kind != "kind"} if lines else {}
