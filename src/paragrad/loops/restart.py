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

from paragrad.datasets.sample_order import Order
from paragrad.parallel.server.endpoints import Meeting
from paragrad.parallel.server.worker_exchange import Asking
from paragrad.record.record import lines_of
from paragrad.trainer.batch import batch_of
from paragrad.trainer.first_step.setup import wire
from paragrad.trainer.trainer import Trainer


def taken_up(trainer: Trainer, order: Order, folder: Path, meeting: Meeting) -> None:
    """Before the first step here. order: of the samples;  folder: of the run."""
    assert meeting.step is not None
    with wired_meanwhile(trainer):
        assert isinstance(trainer.exchange, Asking)
        trainer.exchange.take_over()
    # schedulers want to know
    trainer.optimizer._opt_called = True  # type: ignore[attr-defined]
    rate = rate_of(trainer)
    for step in range(trainer.steps, meeting.step if trainer.scheduler is not None else 0):
        rate = rate_of(trainer)
        trainer.alike("schedule", step, trainer.scheduler.step)
    trainer.steps = meeting.step
    lines = lines_of(folder / f"rank-{trainer.world.rank}.jsonl", spans=False)
    if (
        meeting.last
        and max((line["step"] for line in lines if line["kind"] == "step"), default=-1)
        < meeting.step - 1
    ):
        epoch, step = divmod(meeting.step - 1, order.steps)
        batch = batch_of(
            order, epoch, order.at(step), trainer.division, trainer.replicas, trainer.reverse
        )
        weight, loss = meeting.last[trainer.replicas[0]]
        trainer.log.step(
            meeting.step - 1,
            trainer.log.now(),
            epoch=epoch,
            loss=[loss, weight],
            order=batch.recorded,
            lr=rate,
            sent={},
        )


@contextlib.contextmanager
def wired_meanwhile(trainer: Trainer) -> Iterator[None]:
    """With an exchange where no step was made here: for what the servers have, a test, a
    checkpoint. The first step looks at the model before it makes its own, so this one goes
    again. Collective.
    """
    if trainer.how.meeting is None or trainer.exchange is not None:
        yield
        return
    found = wire(trainer, False, None)
    try:
        yield
    finally:
        found.close()
        trainer.exchange = None
        trainer.passes = None


def rate_of(trainer: Trainer) -> float:
    return float(trainer.optimizer.param_groups[0]["lr"])
