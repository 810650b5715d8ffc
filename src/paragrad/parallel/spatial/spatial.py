"""spatial: every image over ranks, by rows and columns; each fetches of its neighbours what its
outputs see.

And what has the neurons of fully connected layers on the same ranks (dense=tensor), of spatial
and of data: there every rank is given the whole batch, of which it takes its samples
(Krizhevsky 2014, arXiv 1404.5997; Gholami et al. 2018, 1712.04432).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from paragrad.engine.model_shard import Share
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import Line
from paragrad.parallel.tensor import summary
from paragrad.parallel.tensor.input_sharding import (
    COLUMNS,
    ROWS,
    SAMPLES,
    Along,
    Domain,
    entering,
    images,
    samples_first,
)
from paragrad.parallel.tensor.shard_module import Split, divide
from paragrad.parallel.tensor.sharding_plan import Plan, planned
from paragrad.runtime.world import World
from paragrad.strategies.data import Data
from paragrad.strategies.spatial import Spatial


def check(strategy: Spatial | Data, model: nn.Module, example: Any, tested: bool) -> None:
    """Can the model be split so? Raises StepFailed with the repair."""
    look(strategy, model, example, tested)


def look(strategy: Spatial | Data, model: nn.Module, example: Any, tested: bool = False) -> Plan:
    """What the layers of a model do with pieces."""
    domain = domain_of(strategy)
    if isinstance(strategy, Spatial):
        refuse_images(strategy, domain, example)
    elif not samples_first(example):
        raise StepFailed(
            "the inputs of the model have not all samples as their first dimension, so which part "
            "of them a rank "
            "has is not known; leave out dense=tensor"
        )
    plan = planned(model, example, strategy.size, domain, tested=tested)
    if isinstance(strategy, Spatial) and not any(
        note.what in ("fetched", "statistics") for note in plan.notes
    ):
        raise StepFailed(
            "no layer of the model works on rows of images: none is a convolution, or pools; train "
            "it with "
            "data(n) or tensor(n)"
        )
    if domain.dense and not plan.divided:
        raise StepFailed(
            f"no fully connected layer of the model can be split over {strategy.size} ranks; leave "
            f"out "
            "dense=tensor"
        )
    return plan


def refuse_images(strategy: Spatial, domain: Domain, example: Any) -> None:
    if not (found := images(example)):
        raise StepFailed(
            "spatial divides images, numbers of (samples, channels, rows, columns), and the inputs "
            "of the model "
            "are none; train it with data(n) or tensor(n)"
        )
    for dim, along in domain.dims.items():
        if (most := min(each.shape[dim] for each in found)) < along.ranks:
            given = f"{most}" if dim == ROWS else f"{strategy.rows}, columns={most}"
            repair = (
                f"give at most spatial({given})"
                if given != "1"
                else "train it with data(n) or tensor(n)"
            )
            raise StepFailed(
                f"images of {most} {along.name} cannot be divided over {along.ranks} ranks; "
                f"{repair}"
            )


def domain_of(strategy: Spatial | Data) -> Domain:
    if isinstance(strategy, Data):
        return Domain({SAMPLES: Along("samples", strategy.size)}, dense=True)
    dims = {ROWS: Along("rows", strategy.rows), COLUMNS: Along("columns", strategy.columns)}
    return Domain(
        {dim: each for dim, each in dims.items() if each.ranks > 1 or dim == ROWS},
        strategy.dense == "tensor",
    )


def told(strategy: Spatial | Data, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """What a model's layers do, one by one. inputs: of so many samples."""
    return summary.fetching(look(strategy, model, inputs), samples)


def share(
    strategy: Spatial | Data, model: nn.Module, example: Any, axis: World, plan: Plan
) -> Share:
    """All of the model, but for the neurons of others, which is given pieces of its inputs.
    Collective over the axis.
    """
    domain = domain_of(strategy)
    worlds = [axis.along(each.name) for each in axis.axes] if len(domain.dims) > 1 else [axis]
    lines = {
        dim: Line(world, plan.manner._replace(data=each.name, dense=domain.dense))
        for (dim, each), world in zip(domain.dims.items(), worlds, strict=True)
    }
    held, pieces = divide(model, plan, next(iter(lines.values())), axis.rank == 0)
    # beside replicas, whose buckets are exchanged while backward runs, gradients are summed
    # where a layer makes them
    whole_ones = [each for each in model.parameters() if axis.everybody and id(each) not in pieces]

    def begun(_: nn.Module, args: Any, kwargs: Any) -> Any:
        copies: list[Tensor] = whole_ones
        for line in lines.values():
            copies = line.copied_early(copies)
        return entering((args, kwargs), lines)

    model.register_forward_pre_hook(begun, prepend=True, with_kwargs=True)
    return Share(model, held, around=(Split(strategy.name, model, list(lines.values()), pieces),))
