"""A metric over a dataset, divided over the ranks: every sample once, no padding"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import Samples, brought, copied, loaded, parted
from paragrad.errors import StepFailed
from paragrad.jobs.loss import Summed
from paragrad.schedules.actions import evenly
from paragrad.techniques.layout import Layout
from paragrad.world.world import World

BATCH = 256             # samples that are evaluated at once

Metric = Callable[[Any, Any], tuple[Any, Any]]          # f(output, target) -> (sum, weight)
Found = TypeVar("Found")


def evaluated(world: World, module: Summed, output: Callable[[Any], Any], layout: Layout, samples: Samples,
              metric: Metric | None, dtype: torch.dtype | None, loaders: int = 0) -> dict[str, float]:
    """{"value", "weight"} of the metric (or, without one, the loss) over all samples and ranks. Collective.

    output: of inputs, None where it is on other ranks.

    Without gradients; with them if the first batch fails without, as a model does that takes some itself (forces), where
    the weight of a loss is read off its graph, and where the model is cut.
    """
    total, weight, gradients = 0.0, 0.0, (metric is None and module.by_graph) or layout.cut
    mine = evenly(len(samples), world.size)[world.rank]
    batches = [mine[start:start + BATCH] for start in range(0, len(mine), BATCH)]
    for number, fetched in enumerate(loaded(samples, ((0, list(indices)) for indices in batches), loaders)):
        batch = parted(brought(fetched, world.device, dtype))
        kept = copied(batch) if number == 0 else None
        try:
            more = _scored(module, output, metric, batch, len(batches[number]), gradients)
        except RuntimeError:
            if kept is None or layout.cut:              # the other ranks of a replica would not try again
                raise
            gradients = True
            more = _scored(module, output, metric, kept, len(batches[number]), gradients)
        total, weight = total + more[0], weight + more[1]
    sums = world.all_reduced(torch.tensor([total, weight], dtype=torch.float64))
    total, weight = layout.told(sums.tolist())[0]
    if layout.cut and not weight:
        raise StepFailed("the rank that has the output gives none in a test: output(inputs) of the passes is None there")
    return {"value": total / weight if weight else math.nan, "weight": weight}


def _scored(module: Summed, output: Callable[[Any], Any], metric: Metric | None, batch: tuple[Any, Any], samples: int,
            gradients: bool) -> tuple[float, float]:
    """(sum, weight) of a batch (inputs, target); zeros where its output is on other ranks."""
    inputs, target = batch
    with torch.set_grad_enabled(gradients):
        given = output(inputs)
        if given is None:
            return 0.0, 0.0
        if metric is None:
            pair: Any = module.pair(given, target, samples)
        else:
            pair = metric(given.detach() if isinstance(given, Tensor) else given, target)
    total, weight = (float(each.detach() if isinstance(each, Tensor) else each) for each in pair)
    return total, weight


def without_gradients(function: Callable[[], Found]) -> Found:
    """function(), without gradients; again with them where it fails: a model may take some itself (forces, penalties)."""
    try:
        with torch.no_grad():
            return function()
    except RuntimeError:
        with torch.enable_grad():
            return function()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards every module is in the mode it was in (a frozen batch norm stays frozen)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
