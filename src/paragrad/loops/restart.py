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
from paragrad.engine.optimizer.optimizer_state import get_learning_rate
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.worker_exchange import WorkerExchange
from paragrad.record.record import read_lines
from paragrad.trainer.batch import make_rank_batch
from paragrad.trainer.exchange_setup import close_exchange, set_up_exchange
from paragrad.trainer.training import Training


def resume_from_servers(
    training: Training, order: SampleOrder, folder: Path, endpoints: ServerEndpoints
) -> None:
    """Resume a training from its servers, before the first step of this worker.

    Args:
        training: The training of this worker.

        order: The order of the samples.

        folder: The folder of the run.

        endpoints: The endpoints of the servers, with the step that they reached.
    """
    assert endpoints.step is not None
    state = training.state
    with use_temporary_exchange(training):
        assert isinstance(training.exchange, WorkerExchange)
        training.exchange.adopt_server_state()
    state.allow_early_scheduling()
    rate = get_learning_rate(state.optimizer)
    for step in range(state.steps, endpoints.step if state.scheduler is not None else 0):
        rate = get_learning_rate(state.optimizer)
        training.draw_alike("schedule", step, state.scheduler.step)
    state.move_to(endpoints.step)
    lines = read_lines(folder / f"rank-{training.world.rank}.jsonl", spans=False)
    if (
        endpoints.last
        and max((line["step"] for line in lines if line["kind"] == "step"), default=-1)
        < endpoints.step - 1
    ):
        epoch, step = divmod(endpoints.step - 1, order.steps)
        batch = make_rank_batch(
            order,
            epoch,
            order.get_batch(step),
            state.division,
            state.replicas,
            training.options.reverse,
        )
        weight, loss = endpoints.last[state.replicas[0]]
        divisor = training.choose_divisor(batch) or weight or 1.0
        training.log.write_step(
            endpoints.step - 1,
            training.log.now(),
            epoch=epoch,
            loss=[loss * divisor, weight],
            order=batch.recorded_ranges,
            lr=rate,
            sent={},
        )


@contextlib.contextmanager
def use_temporary_exchange(training: Training) -> Iterator[None]:
    """Use an exchange before the first step: for the servers' state, a test, or a checkpoint.

    Collective. The first step probes the model before it builds its own exchange, so this one is
    closed again. Without servers, or after a first step, nothing is done.

    Args:
        training: The training of this worker.
    """
    if training.options.exchange_options.endpoints is None or training.setup.exchange is not None:
        yield
        return
    set_up_exchange(training)
    try:
        yield
    finally:
        close_exchange(training)
