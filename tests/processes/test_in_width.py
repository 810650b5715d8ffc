"""tensor, spatial, integrated, branch: the same training as serial's, with the neurons of each layer over ranks, or the pixels,
or branches."""

from __future__ import annotations

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
    resolved,
)
from torch import Tensor, nn

import paragrad as pg
from paragrad.datasets.loading import parted
from paragrad.training.trainer import Trainer
from paragrad.verbs.lockstep import STEPS
from paragrad.world.generators import generators_seeded
from paragrad.world.launching import Ranks
from paragrad.world.world import World

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


@pytest.mark.parametrize("row", ["tensor(2)", "tensor(3, pairs=false)", "place(2) * tensor(2)"])
def test_a_buffer_that_a_forward_makes_anew(pool: Ranks, row: str) -> None:
    """Modules found their piece of what it was at first, in every step; the first one's proof saw nothing."""
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


class Noisy(nn.Module):
    """Noise in tests too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + torch.rand(x.shape[-1], dtype=x.dtype))              # type: ignore[no-any-return]


def in_a_test(world: World, text: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    outputs: list[Tensor] = []

    def kept(output: Tensor, target: Tensor) -> tuple[float, float]:
        outputs.append(output)
        return 0.0, len(output)
    trainer = Trainer.of_job(world, job("noisy", Noisy, VECTORS), resolved(text))
    trainer.step(*parted(next(trainer.batches(VECTORS, 12, epoch=0))))
    trainer.evaluate(VECTORS, kept)
    state = trainer.state()
    trainer.close()
    return outputs, dict(state)


@pytest.mark.parametrize("row", ["tensor(2)", "tensor(3)"])
def test_ranks_draw_alike_in_a_test(pool: Ranks, row: str) -> None:
    """Each added noise of its own to what all have, and made its neurons of that."""
    (output,), state = pool.run(in_a_test, row, size=resolved(row).size)[0]
    model = Noisy()
    model.load_state_dict(state)
    with generators_seeded("test 0"), torch.no_grad():
        assert torch.allclose(output, model.eval()(VECTORS.tensors[0]), atol=1e-6)
