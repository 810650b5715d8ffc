"""draw: what the ranks of a strategy do and send each other, and the parts of a model that it
cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from paragrad.datasets.loading import brought, parted
from paragrad.errors import Refused, StepFailed
from paragrad.jobs.job import CPU, Job, opened
from paragrad.parallel.pipeline.stage_summary import Piece, pieces
from paragrad.parallel.registry import telling, told_of
from paragrad.report.schedule_drawing import draw as drawn
from paragrad.runtime.generators import generators_kept
from paragrad.strategies.pipeline import InParts
from paragrad.strategies.registry import plan_of, resolve, strategies
from paragrad.strategies.shares import micro_batches
from paragrad.strategies.strategy import Here, Strategy, factors_of
from paragrad.validation.inspect_job import examined

Found = TypeVar("Found")


def draw(
    text: str, job: Job | None = None, svg: Path | None = None, data: Path | None = None
) -> str:
    """Strategies, one below the other. job: with the parts of its model;  svg: a file for a
    space-time diagram of one. Raises Refused.
    """
    asked = strategies(text)
    if svg and len(asked) > 1:
        raise Refused(f"--svg {svg} takes one picture; give one strategy")
    found = []
    for each in asked:
        lines = layers(job, each, data) if job else []
        if lines and not each.plans():
            found.append("\n".join(lines))
            continue
        resolved, plan = plan_of(each, "draw")
        found.append(
            "\n".join(
                [
                    *lines,
                    *([""] if lines else []),
                    drawn(plan, parts(job, resolved, data) if job else (), svg),
                ]
            )
        )
    return "\n\n".join(found)


def layers(job: Job, asked: Strategy, data: Path | None = None) -> list[str]:
    """Layer by layer what a strategy does with a job's model, of a micro-batch of a full batch;
    nothing of others.
    """
    if not telling(asked):
        return []
    chosen = resolve(asked, Here())
    return _of_model(
        job,
        chosen,
        data,
        lambda model, inputs, samples: [
            f"{chosen}, {chosen.size} ranks",
            *told_of(chosen, model, inputs, samples),
        ],
    )


def parts(job: Job, chosen: Strategy, data: Path | None = None) -> list[Piece]:
    """The parts into which a resolved strategy cuts a job's model, for a micro-batch of a full
    batch; none where it cuts none.

    data: folder for jobs that read files. Raises Refused with the repair.
    """
    if not (cutting := [factor for factor in factors_of(chosen) if isinstance(factor, InParts)]):
        return []
    return _of_model(job, chosen, data, lambda model, inputs, _: pieces(cutting[0], model, inputs))


def _of_model(
    job: Job, chosen: Strategy, data: Path | None, function: Callable[[nn.Module, Any, int], Found]
) -> Found:
    """function(model, inputs of a micro-batch, its samples). Raises Refused with the repair."""
    with generators_kept():
        facts = examined(job, data)
        job = facts.ready(job)
        first = micro_batches(facts.order.at(0), chosen.division)[0][0]
        samples = job.samples(opened(job.train, data))[0, facts.order.indices(0, first)]
        inputs, _ = brought(parted(samples), CPU, job.parameter_dtype)
        try:
            with torch.autocast("cpu", job.autocast, enabled=job.autocast is not None):
                return function(job.built_model(), inputs, len(first))
        except StepFailed as error:
            raise Refused(f"job {job.name}, {chosen}: {error}") from error
