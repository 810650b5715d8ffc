"""A metric over a dataset, divided over the ranks: every sample once, no padding"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paragrad.datasets.loader_processes import load_batches
from paragrad.datasets.loading import (
    Samples,
    call_model,
    clone_batch,
    convert_batch,
    separate_target,
)
from paragrad.engine.layout import Layout
from paragrad.engine.passes import Passes
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.errors import StepFailed, describe_error
from paragrad.jobs.loss import LossModule
from paragrad.runtime.world import World
from paragrad.schedules.actions import split_evenly
from paragrad.strategies.shares import Division, count_largest_micro_batch
from paragrad.trainer.model_partition import check_loss_ranks

EVALUATION_BATCH = 256  # samples that are evaluated at once, at most

Metric = Callable[[Any, Any], tuple[Any, Any]]  # f(output, target) -> (sum, weight)
Returned = TypeVar("Returned")


def evaluate_dataset(
    world: World,
    module: LossModule,
    passes: Passes | None,
    layout: Layout,
    samples: Samples,
    metric: Metric | None,
    dtype: torch.dtype | None,
    loaders: int = 0,
    batch_with_gradients: int = EVALUATION_BATCH,
    part: tuple[int, int] | None = None,
) -> dict[str, float]:
    """{"value", "weight"} of the metric (or, without one, the loss) over all samples and ranks.
    Collective.

    passes: None before the first step;  most: samples at once where there are gradients, the
    same on all ranks of a replica; part: (which, of how many) is this rank's, otherwise by its
    place in the world.

    Without gradients; with them if the first batch fails without, as a model does that takes
    some itself (forces; one that is cut was refused then), and where the weight of a loss is
    read off its graph.
    """
    total = 0.0
    weight = 0.0
    gradients = metric is None and module.uses_graph_divisor
    outputs = passes.compute_outputs if passes else make_whole_model_outputs(module)
    which, parts = part or (world.rank, world.size)
    batch_with_gradients = batch_with_gradients if gradients else EVALUATION_BATCH
    mine = split_evenly(len(samples), parts)[which]
    batches = [
        list(mine[start : start + batch_with_gradients])
        for start in range(0, len(mine), batch_with_gradients)
    ]
    fetched = load_batches(samples, ((0, indices) for indices in batches), loaders)
    score = functools.partial(score_batches, module, outputs, metric)
    together = count_concurrent_batches(module, metric, passes.batches_in_flight) if passes else 1
    for start in range(0, len(batches), together):
        places = batches[start : start + together]
        given = [
            separate_target(convert_batch(each, world.device, dtype))
            for each in itertools.islice(fetched, together)
        ]
        kept = clone_batch(given) if start == 0 else None
        try:
            more = score(given, places, gradients)
        except RuntimeError:
            # the other ranks of a replica would not try again
            if kept is None or layout.is_partitioned:
                raise
            gradients = True
            more = score(kept, places, gradients)
        total = total + more[0]
        weight = weight + more[1]
    sums = world.all_reduce(torch.tensor([total, weight], dtype=torch.float64))
    total, weight = share_output_sums(layout, sums.tolist())
    return {"value": total / weight if weight else math.nan, "weight": weight}


def share_output_sums(layout: Layout, sums: Sequence[float]) -> Sequence[float]:
    """(sum, weight) of the rank that has the output, on all of a replica. Collective. Raises
    StepFailed where none has it.
    """
    every = layout.share_numbers(sums)
    check_loss_ranks([weight for _, weight in every], layout.output_rank_count)
    found = every[0]
    if layout.is_partitioned and not found[1]:
        raise StepFailed(
            "the rank that has the output gives none in a test: output(inputs) of the passes is "
            "None there"
        )
    return found


def choose_evaluation_batch(batch: int, division: Division, share: int) -> int:
    """Samples of which a rank with that share runs the model at once in a test with gradients:
    no more than in a step of a global batch of that size, so that no test holds a larger graph;
    0: no step was asked for yet.
    """
    return (
        min(EVALUATION_BATCH, count_largest_micro_batch(batch, division, share))
        if batch
        else EVALUATION_BATCH
    )


def count_concurrent_batches(module: LossModule, metric: Metric | None, in_flight: int) -> int:
    """Batches that are evaluated at a time: of one whose loss is weighed by its graph each has
    its graph.
    """
    return 1 if metric is None and module.uses_graph_divisor else in_flight


def make_whole_model_outputs(
    module: LossModule,
) -> Callable[[list[Any], list[list[int]]], list[Any]]:
    """Outputs of the whole model, as passes have them."""
    return lambda batches, _: [call_model(module.model, inputs) for inputs in batches]


def score_batches(
    module: LossModule,
    outputs: Callable[[list[Any], list[list[int]]], list[Any]],
    metric: Metric | None,
    batches: list[tuple[Any, Any]],
    places: list[list[int]],
    with_gradients: bool,
) -> tuple[float, float]:
    """(sum, weight) of some batches (inputs, target) of samples at these places; zeros where
    their output is on other ranks.
    """
    total = 0.0
    weight = 0.0
    with torch.set_grad_enabled(with_gradients):
        found = outputs([inputs for inputs, _ in batches], places)
        for given, (_, target), own in zip(found, batches, places, strict=True):
            if given is None:
                continue
            if metric is None:
                pair: Any = module.compute_loss_sum(given, target, len(own))
            else:
                pair = metric(given.detach() if isinstance(given, Tensor) else given, target)
            more = [float(each.detach() if isinstance(each, Tensor) else each) for each in pair]
            total = total + more[0]
            weight = weight + more[1]
    return total, weight


def refuse_gradient_loss(module: LossModule, inputs: Any, target: Any, samples: int) -> None:
    """Raises StepFailed where the loss of a test wants gradients, of which there are none in
    one of a model that is cut, unless its weight is read off them.
    """
    with preserve_all_state(module), use_model_eval_mode(module.model):
        try:
            score_batches(
                module,
                make_whole_model_outputs(module),
                None,
                [clone_batch((inputs, target))],
                [list(range(samples))],
                False,
            )
        except Exception as error:
            raise StepFailed(
                f"the loss, in a test (eval mode, without gradients), raised "
                f"{describe_error(error)}; give a "
                f"metric, or "
                "train it with data(n)"
            ) from error


def call_without_gradients(function: Callable[[], Returned]) -> Returned:
    """function(), without gradients; again with them where it fails: a model may take some
    itself (forces, penalties).
    """
    try:
        with torch.no_grad():
            return function()
    except RuntimeError:
        with torch.enable_grad():
            return function()
