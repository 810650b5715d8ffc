"""tensor: the same training as serial's, with the neurons of each layer over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from equality import BRIEF, JOBS, WIDE, resolved

import paragrad as pg
from paragrad.verbs.lockstep import STEPS, difference
from paragrad.world.launching import Ranks

pytestmark = pytest.mark.usefixtures("warm")


def found(pool: Ranks, row: str, job: pg.Job, steps: int = STEPS) -> Any:
    chosen = resolved(row)
    answers = pool.run(partial(difference, steps=steps), job, chosen, size=chosen.size)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("row", "column"), WIDE)
def test_it_is_the_same_training(pool: Ranks, row: str, column: str) -> None:
    assert found(pool, row, JOBS[column], BRIEF).value <= 1e-10
