"""tensor: the same training as serial's, with the neurons of each layer over ranks."""

from __future__ import annotations

import pytest
from equality import BRIEF, JOBS, WIDE, found

from paragrad.world.launching import Ranks

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.sample(12)
@pytest.mark.parametrize(("row", "column"), WIDE)
def test_it_is_the_same_training(pool: Ranks, row: str, column: str) -> None:
    assert found(pool, row, JOBS[column], BRIEF).value <= 1e-10
