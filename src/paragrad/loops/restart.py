"""A worker that goes on where others were, with whom the servers are left
(`loops/failure_recovery.py`).

The model is what the servers have, and the learning rate that of their step. Who was there
before may have been ended between a step and the line of its record: then that line is written
now, of what the servers know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from paragrad.datasets.sample_order import SampleOrder
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.worker_exchange import WorkerExchange
from paragrad.record.record import read_lines
from paragrad.trainer.batch import make_rank_batch
from paragrad.trainer.first_step.setup import set_up_exchange
from paragrad.trainer.trainer import Trainer


def resume_from_servers(
    trainer: Trainer, order: SampleOrder, folder: Path, endpoints: ServerEndpoints
) -> None:
    """Before the first step here. order: of the samples;  folder: of the run."""
    assert endpoints.step is not None
    with use_temporary_exchange(trainer):
        assert isinstance(trainer.exchange, WorkerExchange)
        trainer.exchange.adopt_server_state()
    # schedulers want to know
    trainer.optimizer._opt_called = True  # type: ignore[attr-defined]
    rate = get_learning_rate(trainer)
    for step in range(trainer.steps, endpoints.step if trainer.scheduler is not None else 0):
        rate = get_learning_rate(trainer)
        trainer.draw_alike("schedule", step, trainer.scheduler.step)
    trainer.steps = endpoints.step
    lines = read_lines(folder / f"rank-{trainer.world.rank}.jsonl", spans=False)
    if (
        endpoints.last
        and max((line["step"] for line in lines if line["kind"] == "step"), default=-1)
        < endpoints.step - 1
    ):
        epoch, step = divmod(endpoints.step - 1, order.steps)
        batch = make_rank_batch(
            order, epoch, order.get_batch(step), trainer.division, trainer.replicas, trainer.reverse
        )
        weight, loss = endpoints.last[trainer.replicas[0]]
        trainer.log.write_step(
            endpoints.step - 1,
            trainer.log.now(),
            epoch=epoch,
            loss=[loss, weight],
            order=batch.recorded_range,
            lr=rate,
            sent={},
        )


@contextlib.contextmanager
def use_temporary_exchange(trainer: Trainer) -> Iterator[None]:
    """With an exchange where no step was made here: for what the servers have, a test, a
    checkpoint. The first step looks at the model before it makes its own, so this one goes
    again. Collective.
    """
    if trainer.exchange_options.endpoints is None or trainer.exchange is not None:
        yield
        return
    found = set_up_exchange(trainer, False, None)
    try:
        yield
    finally:
        found.close()
        trainer.exchange = None
        trainer.passes = None


def get_learning_rate(trainer: Trainer) -> float:
    return float(trainer.optimizer.param_groups[0]["lr"])
