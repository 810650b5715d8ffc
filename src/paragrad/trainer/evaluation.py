"""A metric over a dataset, divided over the ranks: every sample once, no padding"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paragrad.datasets.loader_processes import loaded
from paragrad.datasets.loading import Samples, brought, called, copied, parted
from paragrad.engine.layout import Layout
from paragrad.engine.passes import Passes
from paragrad.engine.probe import evaluating
from paragrad.engine.state.preserve_state import untouched
from paragrad.errors import StepFailed, told
from paragrad.jobs.loss import Summed
from paragrad.runtime.world import World
from paragrad.schedules.actions import evenly
from paragrad.strategies.shares import Division, largest
from paragrad.trainer.model_partition import check_given

BATCH = 256  # samples that are evaluated at once, at most

Metric = Callable[[Any, Any], tuple[Any, Any]]  # f(output, target) -> (sum, weight)
Found = TypeVar("Found")


def evaluated(
    world: World,
    module: Summed,
    passes: Passes | None,
    layout: Layout,
    samples: Samples,
    metric: Metric | None,
    dtype: torch.dtype | None,
    loaders: int = 0,
    most: int = BATCH,
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
    gradients = metric is None and module.by_graph
    outputs = passes.outputs if passes else alone(module)
    which, parts = part or (world.rank, world.size)
    most = most if gradients else BATCH
    mine = evenly(len(samples), parts)[which]
    batches = [list(mine[start : start + most]) for start in range(0, len(mine), most)]
    fetched = loaded(samples, ((0, indices) for indices in batches), loaders)
    score = functools.partial(scored, module, outputs, metric)
    together = at_a_time(module, metric, passes.in_flight) if passes else 1
    for start in range(0, len(batches), together):
        places = batches[start : start + together]
        given = [
            parted(brought(each, world.device, dtype))
            for each in itertools.islice(fetched, together)
        ]
        kept = copied(given) if start == 0 else None
        try:
            more = score(given, places, gradients)
        except RuntimeError:
            # the other ranks of a replica would not try again
            if kept is None or layout.cut:
                raise
            gradients = True
            more = score(kept, places, gradients)
        total = total + more[0]
        weight = weight + more[1]
    sums = world.all_reduced(torch.tensor([total, weight], dtype=torch.float64))
    total, weight = averaged(layout, sums.tolist())
    return {"value": total / weight if weight else math.nan, "weight": weight}


def averaged(layout: Layout, sums: Sequence[float]) -> Sequence[float]:
    """(sum, weight) of the rank that has the output, on all of a replica. Collective. Raises
    StepFailed where none has it.
    """
    every = layout.told(sums)
    check_given([weight for _, weight in every], layout.givers)
    found = every[0]
    if layout.cut and not found[1]:
        raise StepFailed(
            "the rank that has the output gives none in a test: output(inputs) of the passes is "
            "None there"
        )
    return found


def at_once(batch: int, division: Division, share: int) -> int:
    """Samples of which a rank with that share runs the model at once in a test with gradients:
    no more than in a step of a global batch of that size, so that no test holds a larger graph;
    0: no step was asked for yet.
    """
    return min(BATCH, largest(batch, division, share)) if batch else BATCH


def at_a_time(module: Summed, metric: Metric | None, in_flight: int) -> int:
    """Batches that are evaluated at a time: of one whose loss is weighed by its graph each has
    its graph.
    """
    return 1 if metric is None and module.by_graph else in_flight


def alone(module: Summed) -> Callable[[list[Any], list[list[int]]], list[Any]]:
    """Outputs of the whole model, as passes have them."""
    return lambda batches, _: [called(module.model, inputs) for inputs in batches]


def scored(
    module: Summed,
    outputs: Callable[[list[Any], list[list[int]]], list[Any]],
    metric: Metric | None,
    batches: list[tuple[Any, Any]],
    places: list[list[int]],
    gradients: bool,
) -> tuple[float, float]:
    """(sum, weight) of some batches (inputs, target) of samples at these places; zeros where
    their output is on other ranks.
    """
    total = 0.0
    weight = 0.0
    with torch.set_grad_enabled(gradients):
        found = outputs([inputs for inputs, _ in batches], places)
        for given, (_, target), own in zip(found, batches, places, strict=True):
            if given is None:
                continue
            if metric is None:
                pair: Any = module.pair(given, target, len(own))
            else:
                pair = metric(given.detach() if isinstance(given, Tensor) else given, target)
            more = [float(each.detach() if isinstance(each, Tensor) else each) for each in pair]
            total = total + more[0]
            weight = weight + more[1]
    return total, weight


def refuse_gradients(module: Summed, inputs: Any, target: Any, samples: int) -> None:
    """Raises StepFailed where the loss of a test wants gradients, of which there are none in
    one of a model that is cut, unless its weight is read off them.
    """
    with untouched(module), evaluating(module.model):
        try:
            scored(
                module,
                alone(module),
                None,
                [copied((inputs, target))],
                [list(range(samples))],
                False,
            )
        except Exception as error:
            raise StepFailed(
                f"the loss, in a test (eval mode, without gradients), raised {told(error)}; give a "
                f"metric, or "
                "train it with data(n)"
            ) from error


def without_gradients(function: Callable[[], Found]) -> Found:
    """function(), without gradients; again with them where it fails: a model may take some
    itself (forces, penalties).
    """
    try:
        with torch.no_grad():
            return function()
    except RuntimeError:
        with torch.enable_grad():
            return function()
