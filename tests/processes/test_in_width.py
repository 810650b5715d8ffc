"""tensor, spatial, integrated, branch: the same training as serial's, with the neurons of each layer over ranks, or the pixels,
or branches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality import (
    BRIEF,
    IMAGES,
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
from torch.nn import functional
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.training.admission import admitted
from paragrad.training.settings import Settings
from paragrad.verbs.lockstep import STEPS
from paragrad.verbs.train import run
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


class Dreaming(nn.Module):
    """What a user's model draws in a test too: dropout that stays on, noise on hidden values, noise that a training has not."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.3)
        if not self.training:
            x = x + 0.1 * torch.randn(len(x), *x.shape[1:], dtype=x.dtype)
        return x


class Lasting(nn.Module):
    """Dropout as it is left on to see how sure a model is."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3)


def dreaming() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), Dreaming(), nn.Linear(16, 9), nn.Dropout(0.2), Dreaming(),
                         nn.Linear(9, 4))


def lasting() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), Lasting(), nn.Tanh(), nn.Linear(16, 9), Lasting(), nn.Linear(9, 4))


def dreaming_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Dreaming(), nn.ReLU(), nn.Conv2d(4, 4, 3), Dreaming(), nn.Flatten(),
                         nn.Linear(144, 4))


class DreamingTowers(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(10, 4), Dreaming(), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.1)


def surprise(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return functional.cross_entropy(output, target, reduction="sum"), len(target)


@pytest.mark.parametrize(("model", "data", "rows"), [
    (dreaming, VECTORS, ["data(2)", "data(3, micro=2)", "tensor(2)", "tensor(3, pairs=false)", "data(2) * tensor(2)",
                         "data(2, state=fully_sharded)", "data(2, dense=tensor)"]),
    (lasting, VECTORS, ["place(2)", "pipeline(2, micro=2, schedule=interleaved(2))", "pipeline(2, micro=2) * tensor(2)",
                        "data(2) * place(3)"]),
    (dreaming_images, IMAGES, ["spatial(2)", "spatial(2, columns=2)", "spatial(2, dense=tensor)"]),
    (DreamingTowers, VECTORS, ["branch(2)", "data(2) * branch(2)"])], ids=["vectors", "parts", "images", "branches"])
def test_draws_of_a_test_are_those_of_serials(pool: Ranks, tmp_path: Path, model: Callable[[], nn.Module], data: TensorDataset,
                                              rows: list[str]) -> None:
    """Every rank of a layer drew by itself, so what ranks held of one value did not belong together, and a test said so to
    nobody."""
    made = job("dreaming", model, data, test=data, metric=surprise, dtype=torch.float64)
    for at in range(len(rows) + 1):
        (tmp_path / str(at)).mkdir()
    serial, *others = [run(pool, admitted(made, text, Settings()), tmp_path / str(at)).test
                       for at, text in enumerate(["serial", *rows])]
    assert others == pytest.approx([serial] * len(rows), rel=1e-12)
