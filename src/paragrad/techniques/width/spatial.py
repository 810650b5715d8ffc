"""spatial: every image over ranks, by rows and columns; each fetches of its neighbours what its outputs see."""

from __future__ import annotations

from typing import Any

from torch import nn

from paragrad.errors import StepFailed
from paragrad.strategies.spatial import Spatial
from paragrad.techniques.cut import Share
from paragrad.techniques.width import account
from paragrad.techniques.width.domain import COLUMNS, ROWS, Along, Domain, entering, images
from paragrad.techniques.width.pairs import Line
from paragrad.techniques.width.planning import Plan, planned
from paragrad.techniques.width.tensor import Split, divide
from paragrad.world.world import World


def check(strategy: Spatial, model: nn.Module, example: Any, tested: bool) -> None:
    """Can the model be split so? Raises StepFailed with the repair."""
    look(strategy, model, example)


def look(strategy: Spatial, model: nn.Module, example: Any) -> Plan:
    """What the layers of a model do with images in pieces."""
    domain = domain_of(strategy)
    if not (found := images(example)):
        raise StepFailed("spatial divides images, numbers of (samples, channels, rows, columns), and the inputs of the model "
                         "are none; train it with data(n) or tensor(n)")
    for dim, along in domain.dims.items():
        if (most := min(each.shape[dim] for each in found)) < along.ranks:
            given = f"{most}" if dim == ROWS else f"{strategy.rows}, columns={most}"
            raise StepFailed(f"images of {most} {along.name} cannot be divided over {along.ranks} ranks; give at most "
                             f"spatial({given})")
    plan = planned(model, example, strategy.workers, domain)
    if not any(note.what in ("fetched", "statistics") for note in plan.notes):
        raise StepFailed("no layer of the model works on rows of images: none is a convolution, or pools; train it with "
                         "data(n) or tensor(n)")
    return plan


def domain_of(strategy: Spatial) -> Domain:
    dims = {ROWS: Along("rows", strategy.rows), COLUMNS: Along("columns", strategy.columns)}
    return Domain({dim: each for dim, each in dims.items() if each.ranks > 1 or dim == ROWS}, strategy.dense == "tensor")


def told(strategy: Spatial, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """What a model's layers do, one by one. inputs: of so many samples."""
    return account.fetching(look(strategy, model, inputs), samples)


def share(strategy: Spatial, model: nn.Module, example: Any, axis: World, plan: Plan) -> Share:
    """All of the model, which is given pieces of images. Collective over the axis."""
    lines = {dim: Line(axis.along(each.name), name=each.name) for dim, each in domain_of(strategy).dims.items()}
    held, pieces = divide(model, plan, lines[ROWS], axis.rank == 0)
    model.register_forward_pre_hook(lambda _, args, kwargs: entering((args, kwargs), lines), prepend=True, with_kwargs=True)
    return Share(model, held, around=(Split("spatial", list(lines.values()), pieces),))
