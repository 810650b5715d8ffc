"""For every row of the zoo, serial trains as a plain PyTorch loop does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from all_rows import LIBRARY_WARNINGS, ROWS, build_job
from zoo_rows import Row

from paragrad.datasets.loading import separate_target
from paragrad.errors import StepFailed
from paragrad.jobs.job import open_dataset
from paragrad.report.equivalence.batch_selection import list_first_batches
from paragrad.report.equivalence.plain_loop import PlainLoop
from paragrad.runtime.generators import keep_generators, seed_everything
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.trainer.trainer import Trainer

pytestmark = [pytest.mark.zoo, *LIBRARY_WARNINGS]

STEPS = 20
# rows whose bits differ from a plain loop's, and why
EXCEPTIONS: dict[str, str] = {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[] if place % 18 == 0 else pytest.mark.table)
        for place, row in enumerate(ROWS)
    ],
)
def test_serial_is_the_plain_loop(row: Row, dtype: torch.dtype) -> None:
    """20 steps from the same start, with the same batches and the same keyed draws."""
    made = build_job(row).replace(dtype=dtype)
    if not hasattr(made.train, "__len__") and not callable(made.train):
        pytest.skip("every strategy refuses a dataset without a length")
    dataset = open_dataset(made.train, None)
    order = made.make_order(dataset)
    places = list_first_batches(order, STEPS)
    torch.set_num_threads(1)
    try:
        trainer = Trainer.build_for_job(World(), made, Serial())
    except StepFailed as error:
        pytest.skip(f"serial refuses it: {error.message}")
    loop = None
    try:
        for number, fetched in enumerate(trainer.iterate_batches_at(dataset, order, places)):
            # both loops must make the same draws outside of torch's keyed functions
            with keep_generators():
                seed_everything(number)
                result = trainer.step(*separate_target(fetched))
            if loop is None:
                draws = trainer.training.setup.draws
                loop = PlainLoop(made, dataset, places, torch.device("cpu"), draws)
            with keep_generators():
                seed_everything(number)
                assert result.loss == loop.step()
    except StepFailed as error:
        pytest.skip(f"serial refuses it: {error.message}")
    assert loop is not None
    ours = trainer.state()
    unequal = [name for name, each in loop.state().items() if not torch.equal(ours[name], each)]
    assert unequal == [] or row.name in EXCEPTIONS
