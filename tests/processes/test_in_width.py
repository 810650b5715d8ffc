"""tensor, spatial, integrated, branch: the same training as serial's, with the neurons of each layer over ranks, or the pixels,
or branches."""

from __future__ import annotations

import pytest
from equality import BRIEF, JOBS, OF_BRANCHES, OF_IMAGES, OF_PIECES, WIDE, WITH_BRANCHES, found

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
