"""Evaluate a metric over a dataset. The ranks divide the samples: each counts once, no padding.

Which samples are collated together, and which rank evaluates them: `evaluation_batches.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paragrad.datasets.loading import Samples, clone_batch, convert_batch, separate_target
from paragrad.engine.layout import Layout, check_loss_ranks
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.errors import StepFailed, describe_error
from paragrad.jobs.loss import LossModule, call_model
from paragrad.strategies.shares import Division, count_largest_micro_batch
from paragrad.trainer.evaluation_batches import (
    MAX_EVALUATION_BATCH,
    EvaluationPlan,
    iterate_evaluation_batches,
)
from paragrad.trainer.setup import Setup

Metric = Callable[[Any, Any], tuple[Any, Any]]  # f(output, target) -> (sum, weight)
Returned = TypeVar("Returned")


def evaluate_dataset(
    setup: Setup,
    samples: Samples,
    metric: Metric | None,
    dtype: torch.dtype | None,
    loaders: int = 0,
    test_batch: int = MAX_EVALUATION_BATCH,
    batch_with_gradients: int = MAX_EVALUATION_BATCH,
    part: tuple[int, int] | None = None,
) -> dict[str, float]:
    """Evaluate the metric, or the loss if there is no metric, over all samples and ranks.

    Collective. The evaluation runs without gradients, with two exceptions. It runs with them if the
    first batch fails without them: the model may take gradients itself (forces). A partitioned
    model of that kind is refused during validation. It also runs with them if the weight of the
    loss is read off its graph.

    Args:
        setup: What strategy and model are resolved to.

        samples: The samples to evaluate.

        metric: f(output, target) -> (sum, weight), or None for the loss.

        dtype: The type to which real inputs are converted, or None.

        loaders: The number of processes that load ahead.

        test_batch: Samples that are collated together (`evaluation_batches.choose_test_batch`).

        batch_with_gradients: Samples at once where gradients are needed, the same on all ranks of a
            replica.

        part: (index, count) of this rank's part of the samples; the default is its place in the
            world.

    Returns:
        {"value", "weight"}: the mean and the weight it is over.
    """
    world, module, passes = setup.samples_world, setup.module, setup.passes
    total = 0.0
    weight = 0.0
    gradients = metric is None and module.uses_graph_divisor
    outputs = passes.compute_outputs if passes else make_whole_model_outputs(module)
    which, parts = part or (world.rank, world.size)
    plan = EvaluationPlan(
        len(samples),
        test_batch,
        batch_with_gradients if gradients else MAX_EVALUATION_BATCH,
        which,
        parts,
    )
    batches = iterate_evaluation_batches(samples, plan, loaders)
    score = functools.partial(score_batches, module, outputs, metric)
    concurrent = count_concurrent_batches(module, metric, passes.batches_in_flight) if passes else 1
    is_first = True
    while group := list(itertools.islice(batches, concurrent)):
        places = [positions for positions, _ in group]
        given = [separate_target(convert_batch(each, world.device, dtype)) for _, each in group]
        kept = clone_batch(given) if is_first else None
        is_first = False
        try:
            batch_sums = score(given, places, gradients)
        except RuntimeError:
            # The other ranks of a replica would not repeat the batch.
            if kept is None or setup.layout.is_partitioned:
                raise
            gradients = True
            batch_sums = score(kept, places, gradients)
        total = total + batch_sums[0]
        weight = weight + batch_sums[1]
        world.stop.beat()
    sums = world.all_reduce(torch.tensor([total, weight], dtype=torch.float64))
    total, weight = share_output_sums(setup.layout, sums.tolist())
    return {"value": total / weight if weight else math.nan, "weight": weight}


def share_output_sums(layout: Layout, sums: Sequence[float]) -> Sequence[float]:
    """Share the (sum, weight) of the rank that has the output with all ranks of its replica.

    Collective.

    Args:
        layout: The layout of the partitioned model.
        sums: This rank's (sum, weight).

    Raises:
        StepFailed: If no rank has the output.
    """
    rank_sums = layout.share_numbers(sums)
    check_loss_ranks([weight for _, weight in rank_sums], layout.output_rank_count)
    output_sums = rank_sums[0]
    if layout.is_partitioned and not output_sums[1]:
        raise StepFailed(
            "the rank that has the output gives none in a test: output(inputs) of the passes is "
            "None there"
        )
    return output_sums


def choose_evaluation_batch(batch: int, division: Division, share: int) -> int:
    """Return the number of samples that a rank evaluates at once in a test with gradients.

    It is at most the number in a training step, so that a test holds no larger graph.

    Args:
        batch: The size of the global batch, or 0 before the first step.

        division: The division of a global batch among the replicas.

        share: The index of the rank's share.
    """
    return (
        min(MAX_EVALUATION_BATCH, count_largest_micro_batch(batch, division, share))
        if batch
        else MAX_EVALUATION_BATCH
    )


def count_concurrent_batches(module: LossModule, metric: Metric | None, in_flight: int) -> int:
    """Return the number of batches that are evaluated concurrently.

    It is 1 if the loss is weighed by its graph, because each batch then keeps its own graph.

    Args:
        module: Model and loss.
        metric: The metric, or None for the loss.
        in_flight: The number of batches that the passes can run concurrently.
    """
    return 1 if metric is None and module.uses_graph_divisor else in_flight


def make_whole_model_outputs(
    module: LossModule,
) -> Callable[[list[Any], list[list[int]]], list[Any]]:
    """Return a function that computes outputs with the whole model, in the form of passes."""
    return lambda batches, _: [call_model(module.model, inputs) for inputs in batches]


def score_batches(
    module: LossModule,
    outputs: Callable[[list[Any], list[list[int]]], list[Any]],
    metric: Metric | None,
    batches: list[tuple[Any, Any]],
    places: list[list[int]],
    with_gradients: bool,
) -> tuple[float, float]:
    """Sum the metric, or the loss, over some batches.

    Args:
        module: Model and loss.

        outputs: Computes the outputs of several batches.

        metric: f(output, target) -> (sum, weight), or None for the loss.

        batches: (inputs, target) of each batch.

        places: The places of each batch's samples in the dataset.

        with_gradients: Whether gradients are enabled.

    Returns:
        (sum, weight); zeros if the outputs are on other ranks.
    """
    total = 0.0
    weight = 0.0
    with torch.set_grad_enabled(with_gradients):
        results = outputs([inputs for inputs, _ in batches], places)
        for output, (_, target), batch_places in zip(results, batches, places, strict=True):
            if output is None:
                continue
            if metric is None:
                pair: Any = module.compute_loss_sum(output, target, len(batch_places))
            else:
                pair = metric(output.detach() if isinstance(output, Tensor) else output, target)
            numbers = [float(each.detach() if isinstance(each, Tensor) else each) for each in pair]
            total = total + numbers[0]
            weight = weight + numbers[1]
    return total, weight


def refuse_gradient_loss(module: LossModule, inputs: Any, target: Any, samples: int) -> None:
    """Refuse a loss that needs gradients in a test.

    A partitioned model has no gradients in a test, unless the weight of the loss is read off them.

    Args:
        module: Model and loss.
        inputs: The inputs of a small batch.
        target: The target of that batch.
        samples: The number of samples of that batch.

    Raises:
        StepFailed: If the loss fails in eval mode without gradients.
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
                "the loss, in a test (eval mode, without gradients), raised "
                f"{describe_error(error)}; give a metric, or train it with data(n)"
            ) from error


def call_without_gradients(function: Callable[[], Returned]) -> Returned:
    """Call a function without gradients, and again with them if that fails.

    A model may take gradients itself, for forces or penalties.
    """
    try:
        with torch.no_grad():
            return function()
    except RuntimeError:
        with torch.enable_grad():
            return function()
