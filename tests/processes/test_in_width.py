"""tensor, spatial, integrated, branch: the same training as serial's, with the neurons of each layer over ranks, or the pixels,
or branches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from equality import (
    BRIEF,
    JOBS,
    OF_BRANCHES,
    OF_IMAGES,
    OF_PIECES,
    VECTORS,
    WIDE,
    WITH_BRANCHES,
    found,
    job,
)
from torch import Tensor, nn

import paragrad as pg
from paragrad.verbs.lockstep import STEPS
from paragrad.world.launching import Ranks

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """A sample's, or those of the whole table."""
    return STEPS if request.node.get_closest_marker("table") else BRIEF


@pytest.mark.sample(9)
@pytest.mark.parametrize(("row", "column"), WIDE)
def test_it_is_the_same_training(pool: Ranks, row: str, column: str, steps: int) -> None:
    assert found(pool, row, JOBS[column], steps).value <= 1e-10


@pytest.mark.sample(6)
@pytest.mark.parametrize(("row", "column"), OF_PIECES)
def test_images_in_pieces_are_the_same_training(pool: Ranks, row: str, column: str, steps: int) -> None:
    assert found(pool, row, {**JOBS, **OF_IMAGES}[column], steps).value <= 1e-10


@pytest.mark.sample(4)
@pytest.mark.parametrize(("row", "column"), OF_BRANCHES)
def test_branches_are_the_same_training(pool: Ranks, row: str, column: str, steps: int) -> None:
    assert found(pool, row, WITH_BRANCHES[column], steps).value <= 1e-10


# ---- odd models --------------------------------------------------------------------------------------------------------------
class Centred(nn.Module):
    """A running mean as users write it: the buffer is another tensor after each forward."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def centred() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), Centred(16), nn.Tanh(), nn.Linear(16, 4), Centred(4))


@pytest.mark.parametrize("row", ["tensor(2)", "tensor(3, pairs=false)", "place(2) * tensor(2)",
                                 "pipeline(2, micro=1, recompute=true) * tensor(2)"])
def test_a_buffer_that_a_forward_makes_anew(pool: Ranks, row: str) -> None:
    """It is whole on every rank: pieces that stand for what was there at first would be found in every step."""
    assert found(pool, row, job("centred", centred, VECTORS), BRIEF).value <= 1e-10


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers, self.out = nn.ModuleList([centred(), centred()]), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([tower(x) for tower in self.towers], 1))          # type: ignore[no-any-return]


def test_a_buffer_of_a_branch_that_a_forward_makes_anew(pool: Ranks) -> None:
    with pytest.raises(pg.RankFailed, match=r"makes the buffer towers\..* anew, which is in a branch; change it in place"):
        found(pool, "branch(2)", job("centred towers", Towers, VECTORS), BRIEF)


class Counting(nn.Module):
    """The same in place: an augmented assignment gives a module's buffer to itself."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean *= 0.9
            self.mean += 0.1 * x.detach().mean(0)
            self.count += 1
        return x - self.mean


class CountingTowers(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(10, 4), Counting(4), nn.Tanh()) for _ in range(2)])


@pytest.mark.parametrize(("row", "model"), [
    ("tensor(2)", lambda: nn.Sequential(nn.Linear(10, 16), Counting(16), nn.Tanh(), nn.Linear(16, 4))),
    ("branch(2)", CountingTowers)], ids=["tensor", "branch"])
def test_a_buffer_that_a_forward_changes_in_place(pool: Ranks, row: str, model: Callable[[], nn.Module]) -> None:
    assert found(pool, row, job("counting", model, VECTORS), BRIEF).value <= 1e-10
