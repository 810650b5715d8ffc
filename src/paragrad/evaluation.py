"""A metric over a dataset, divided over the ranks: every sample once, no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paragrad.datasets.loading import Samples, brought, called, loaded, parted
from paragrad.loss import Summed
from paragrad.schedules.actions import evenly
from paragrad.world import World

BATCH = 256             # samples that are evaluated at once

Metric = Callable[[Any, Any], tuple[Any, Any]]          # f(output, target) -> (sum, weight)


@torch.no_grad()
def evaluated(world: World, module: Summed, samples: Samples, metric: Metric | None, dtype: torch.dtype,
              loaders: int = 0) -> dict[str, float]:
    """{"value", "weight"} of the metric (or, without one, the loss) over all samples and ranks. Collective."""
    total, weight = 0.0, 0.0
    mine = evenly(len(samples), world.size)[world.rank]
    batches = [list(mine[start:start + BATCH]) for start in range(0, len(mine), BATCH)]
    for indices, fetched in zip(batches, loaded(samples, [(0, indices) for indices in batches], loaders), strict=True):
        inputs, target = parted(brought(fetched, world.device, dtype))
        output = called(module.model, inputs)
        pair = metric(output, target) if metric else module.pair(output, target, len(indices))
        total, weight = total + float(pair[0]), weight + float(pair[1])
    sums = world.all_reduced(torch.tensor([total, weight], dtype=torch.float64))
    return {"value": float(sums[0] / sums[1]), "weight": float(sums[1])}


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
