"""Restart a worker of a recovered training, of which the servers survived.

See `loops.failure_recovery`. The model and the learning rate are those of the servers' step. The
previous worker may have ended between a step and its record line. That line is then written from
what the servers know.
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
    """Resume a training from its servers, before the first step of this worker.

    Args:
        trainer: The trainer of this worker.

        order: The order of the samples.

        folder: The folder of the run.

        endpoints: The endpoints of the servers, with the step that they reached.
    """
    assert endpoints.step is not None
    with use_temporary_exchange(trainer):
        assert isinstance(trainer.exchange, WorkerExchange)
        trainer.exchange.adopt_server_state()
    # Schedulers warn if the optimizer has made no step.
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
    """Use an exchange before the first step: for the servers' state, a test, or a checkpoint.

    Collective. The first step probes the model before it builds its own exchange, so this one is
    closed again. Without servers, or after a first step, nothing is done.

    Args:
        trainer: The trainer of this worker.
    """
    if trainer.exchange_options.endpoints is None or trainer.exchange is not None:
        yield
        return
    exchange = set_up_exchange(trainer, False, None)
    try:
        yield
    finally:
        exchange.close()
        trainer.exchange = None
        trainer.passes = None


def get_learning_rate(trainer: Trainer) -> float:
    """Return the learning rate of the first group."""
    return float(trainer.optimizer.param_groups[0]["lr"])
