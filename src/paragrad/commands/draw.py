"""draw: what the ranks of a strategy do and send, and the stages of a partitioned model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from paragrad.datasets.loading import convert_batch, separate_target
from paragrad.errors import Refused, StepFailed
from paragrad.jobs.job import CPU, Job, open_dataset
from paragrad.parallel.pipeline.stage_summary import StageSummary, summarize_stages
from paragrad.parallel.registry import describe_model_layers, has_layer_descriptions
from paragrad.report.schedule_drawing import draw_schedule as drawn
from paragrad.runtime.generators import keep_generators
from paragrad.strategies.pipeline import PartitionedStrategy
from paragrad.strategies.registry import find_schedule_use, parse_strategies, resolve_strategy
from paragrad.strategies.shares import split_micro_batches
from paragrad.strategies.strategy import Environment, Strategy, list_factors
from paragrad.validation.inspect_job import inspect_job

Result = TypeVar("Result")


def draw_strategies(
    text: str, job: Job | None = None, svg: Path | None = None, data: Path | None = None
) -> str:
    """Draw strategies, one below the other.

    Args:
        text: the strategies, separated by ;.

        job: the job with the model that is drawn in parts; None without it.

        svg: a file for a space-time diagram of one strategy.

        data: folder of data for jobs that read files.

    Raises:
        Refused: a strategy cannot be drawn.
    """
    requested = parse_strategies(text)
    if svg and len(requested) > 1:
        raise Refused(f"--svg {svg} takes one picture; give one strategy")
    drawings = []
    for each in requested:
        lines = draw_layers(job, each, data) if job else []
        if lines and not each.plan_schedules():
            drawings.append("\n".join(lines))
            continue
        resolved, plan = find_schedule_use(each, "draw")
        drawings.append(
            "\n".join(
                [
                    *lines,
                    *([""] if lines else []),
                    drawn(plan, list_model_parts(job, resolved, data) if job else (), svg),
                ]
            )
        )
    return "\n\n".join(drawings)


def draw_layers(job: Job, requested: Strategy, data: Path | None = None) -> list[str]:
    """Describe layer by layer what a strategy does with a job's model.

    The description is of a micro-batch of a full batch.

    Args:
        job: the job.
        requested: the strategy as it is written.
        data: folder of data for jobs that read files.

    Returns:
        The lines; none if the strategy describes no layers.
    """
    if not has_layer_descriptions(requested):
        return []
    chosen = resolve_strategy(requested, Environment())
    return _apply_to_model(
        job,
        chosen,
        data,
        lambda model, inputs, samples: [
            f"{chosen}, {chosen.size} ranks",
            *describe_model_layers(chosen, model, inputs, samples),
        ],
    )


def list_model_parts(job: Job, chosen: Strategy, data: Path | None = None) -> list[StageSummary]:
    """List the parts into which a resolved strategy partitions a job's model.

    The parts are of a micro-batch of a full batch.

    Args:
        job: the job.
        chosen: the resolved strategy.
        data: folder of data for jobs that read files.

    Returns:
        The parts; none if the strategy does not partition the model.

    Raises:
        Refused: with the repair.
    """
    if not (
        partitioning := [
            factor for factor in list_factors(chosen) if isinstance(factor, PartitionedStrategy)
        ]
    ):
        return []
    return _apply_to_model(
        job, chosen, data, lambda model, inputs, _: summarize_stages(partitioning[0], model, inputs)
    )


def _apply_to_model(
    job: Job, chosen: Strategy, data: Path | None, function: Callable[[nn.Module, Any, int], Result]
) -> Result:
    """Call function(model, inputs of a micro-batch, number of its samples).

    Raises Refused with the repair.
    """
    with keep_generators():
        inspection = inspect_job(job, data)
        job = inspection.prepare_job(job)
        micro_batches = split_micro_batches(inspection.order.get_batch(0), chosen.division)
        # the part of a small share may be empty
        first = next(part for part in micro_batches[0] if part)
        samples = job.make_samples(open_dataset(job.train, data))[
            0, inspection.order.get_indices(0, first)
        ]
        inputs, _ = convert_batch(separate_target(samples), CPU, job.parameter_dtype)
        try:
            with torch.autocast("cpu", job.autocast, enabled=job.autocast is not None):
                return function(job.build_model(), inputs, len(first))
        except StepFailed as error:
            raise Refused(f"job {job.name}, {chosen}: {error}") from error
