"""A training in rounds: in each round, some clients train, and their weights are averaged.

Each client trains over its own samples, on its own worker.

A round is an epoch in the record. A step is a batch of one client. Steps are numbered as if the
clients of a round trained one after the other. Random draws are keyed by that number, so the
number of workers does not matter. What happens between rounds (scheduler, checkpoints) counts in
steps that serial makes over as many samples.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator
from typing import Any

import torch

from paragrad.datasets.clients import ClientRounds, ClientTurn
from paragrad.datasets.loading import Samples, separate_target
from paragrad.engine.exchange import TEST_TRAFFIC
from paragrad.errors import StepFailed, describe_error
from paragrad.jobs.callback import StepReport
from paragrad.loops.callback_runner import CallbackFailed
from paragrad.loops.synchronous import TrainingLoop, count_state_bytes
from paragrad.parallel.averaging.federated import FederatedExchange
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.round_counts import CLIENT_LOST, IDLE_ROUND, NO_CLIENT_RETURNED
from paragrad.runtime.generators import use_seeded_generators
from paragrad.runtime.stragglers import explain_timeout
from paragrad.strategies.shares import MicroBatch
from paragrad.trainer.batch import Batch
from paragrad.trainer.checkpoint.checkpoint_files import SavedCheckpoint
from paragrad.trainer.step_observer import StepResult

ZERO_RATE = (
    "the rate is 0 in the whole round, so its clients learn nothing; let the warm-up begin above 0"
)
# fraction of the timeout for other workers: a sample that is late then costs its client, and not
# the run
LOADING_PATIENCE = 0.5
ALL_CLIENTS_LOST = "no client of any round came back; the last failure: {}"


class RoundTraining(TrainingLoop):
    """The loop over rounds on one rank.

    Attributes:
        rounds: The rounds.

        finished_rounds: The number of finished rounds.

        scheduler: The scheduler, which is stepped between rounds.

        samples: The source of the training samples.

        has_returned_client: Whether any client finished its training.

        failure_cause: Why the last lost client of this worker was lost.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rounds = self.validated_run.rounds
        job = self.validated_run.job
        assert rounds is not None
        self.rounds: ClientRounds = rounds
        self.epochs = rounds.count
        self.steps = rounds.round_starts[-1]
        self.finished_rounds = 0
        self.scheduler = self.training.state.scheduler
        self.training.state.leave_scheduler_to_loop()
        self.samples = Samples(
            self.train_dataset, job.seed, job.collate, LOADING_PATIENCE * self.trainer.world.timeout
        )
        self.has_returned_client = False
        self.failure_cause = ""

    @property
    def exchange(self) -> FederatedExchange:
        """The exchange of the clients' weights."""
        assert isinstance(self.training.exchange, FederatedExchange)
        return self.training.exchange

    @property
    def progress(self) -> int:
        """The number of finished rounds.

        It is finer than the name of a checkpoint, because a round may be shorter than a step of
        serial.
        """
        return self.finished_rounds

    @property
    def serial_steps(self) -> int:
        """The steps of serial over the samples of the finished rounds."""
        return self.rounds.count_serial_steps(self.finished_rounds)

    def find_start(self, saved: SavedCheckpoint | None) -> tuple[int, int]:
        if saved is not None:
            self.finished_rounds = self._find_finished_rounds(saved)
            self.has_returned_client = self.finished_rounds > 0
            self.saved_progress = self.finished_rounds
            # A checkpoint of another strategy may be of an earlier step.
            self._advance_scheduler(saved.step, self.serial_steps)
        self.training.state.move_to(self.rounds.round_starts[self.finished_rounds])
        if self.finished_rounds < self.rounds.count:
            # The model is probed on a batch of this worker's first client.
            self.trainer.prepare_without_step(*separate_target(self._find_first_batch()))
        return self.finished_rounds, 0

    def _find_finished_rounds(self, saved: SavedCheckpoint) -> int:
        """Return the number of rounds that a checkpoint completed.

        For a checkpoint of another strategy, it is the number of rounds that cover its steps.
        """
        rounds = self.rounds.match_checkpoint(saved.step, saved.state.get("rounds"))
        if rounds is not None:
            return rounds
        finished = self.rounds.count_finished_rounds(saved.step)
        self.training.log.write_choice(
            "rounds",
            f"from round {finished} on",
            f"the first round after the samples of {saved.step} steps of serial",
        )
        return finished

    def resume_from_checkpoint(self, saved: SavedCheckpoint) -> None:
        super().resume_from_checkpoint(saved)
        if self.trainer.optimizer.state:
            self.trainer.optimizer.state.clear()
            self.training.log.write_choice(
                "checkpoint", "without the optimizer's state", "every client makes a new optimizer"
            )

    def finish_resumed_epoch(self, epoch: int) -> bool:
        """Finish the last round of a checkpoint, if it is at the end of a round.

        A checkpoint of another strategy is not.
        """
        saved = self.validated_run.resume_checkpoint
        return saved is not None and "rounds" in saved.state and super().finish_resumed_epoch(epoch)

    def _find_first_batch(self) -> Any:
        """Return the first batch that can be read, of this worker's clients if possible."""
        own_worker = self.training.setup.samples_world.rank
        failure = StepFailed("there are no clients")
        for client in sorted(
            range(len(self.rounds.clients)),
            key=lambda client: self.rounds.client_workers[client] != own_worker,
        ):
            try:
                turn = ClientTurn(
                    client, 0, self.trainer.steps, self.rounds.count_client_steps(client)
                )
                with contextlib.closing(
                    self._load_client_batches(turn, self.finished_rounds)
                ) as batches:
                    return next(batches)
            except Exception as error:
                failure = StepFailed.wrap_error(error)
        raise failure

    # ---- a round -----------------------------------------------------------------------------
    def train_segment(self, segment: int) -> bool:
        """Train the clients of a round on their workers, and average their weights.

        Args:
            segment: The round.

        Returns:
            True: a stop is looked for when the round has ended.
        """
        training = self.training
        exchange = self.exchange
        rounds = self.rounds
        turns = rounds.plan_turns(segment)
        exchange.begin_round(len(turns))
        if self.scheduler is not None and not any(
            float(group["lr"]) for group in exchange.central_optimizer.param_groups
        ):
            training.log.write_event(IDLE_ROUND, f"round {segment}: {ZERO_RATE}", round=segment)
        for place, turn in enumerate(turns):
            if rounds.client_workers[turn.client] == training.setup.samples_world.rank:
                try:
                    self._train_client(turn, segment)
                    exchange.end_client(place, len(rounds.clients[turn.client]))
                except CallbackFailed:
                    raise
                except Exception as error:
                    self._record_lost_client(place, turn, segment, error)
        training.state.use_optimizer(exchange.central_optimizer)
        training.state.move_to(rounds.round_starts[segment + 1])
        exchange.request_stop(training.world.stop.is_requested)
        try:
            with explain_timeout(f"clients of round {segment} train on other workers"):
                counts = exchange.average_clients()
            self._advance_scheduler(
                rounds.count_serial_steps(segment), rounds.count_serial_steps(segment + 1)
            )
        except Exception as error:
            raise training.report_failure(error) from error
        # The spans recorded since then belong to no step.
        training.log.write_failed_step(training.state.steps - 1)
        self._record_round(turns, counts, segment)
        return True

    def _train_client(self, turn: ClientTurn, round_number: int) -> None:
        training = self.training
        exchange = self.exchange
        training.state.move_to(turn.first_step)
        with use_seeded_generators(f"client {training.seed} {round_number} {turn.client}"):
            exchange.begin_client()
            # An optimizer may keep the weights with which it begins.
            optimizer = self._make_client_optimizer(exchange.central_optimizer)
            exchange.use_optimizer(optimizer)
            training.state.use_optimizer(optimizer)
            with contextlib.closing(self._load_client_batches(turn, round_number)) as batches:
                self.train_batches(round_number, batches)
        self.peak_optimizer_bytes = max(self.peak_optimizer_bytes, count_state_bytes(optimizer))

    def end_step(self, segment: int, result: StepResult, rate: float) -> bool:
        """Report the step of a client.

        Args:
            segment: The round.
            result: The result of the step.
            rate: The learning rate before the step.

        Returns:
            True: a client trains to the end of its samples.
        """
        self.write_scalars(self.trainer.steps, loss=result.loss, lr=rate)
        self.report_step(segment, result.loss)
        if self.callbacks.observe_step(StepReport(self.trainer.steps, segment, result.loss, rate)):
            # all workers see it at the end of the round
            self.trainer.world.stop.set()
        return True

    def _make_client_optimizer(self, central: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Build the job's optimizer, with the rates of this round if a scheduler sets them."""
        optimizer = self.validated_run.job.optimizer(self.trainer.model.parameters())
        if self.scheduler is None:
            return optimizer
        for group, rates in zip(optimizer.param_groups, central.param_groups, strict=True):
            group.update(
                copy.deepcopy({name: value for name, value in rates.items() if name != "params"})
            )
        return optimizer

    def _load_client_batches(self, turn: ClientTurn, round_number: int) -> Generator[Any]:
        batches = (
            Batch(
                round_number,
                client_batch.positions,
                client_batch.indices,
                [MicroBatch(client_batch.positions, range(len(client_batch.positions)))],
                client_batch.epoch,
            )
            for client_batch in self.rounds.iterate_client_batches(turn, round_number)
        )
        yield from self.training.feed.iterate_batches(
            self.samples, batches, self.validated_run.settings.loaders
        )

    def _record_lost_client(
        self, place: int, turn: ClientTurn, round_number: int, error: Exception
    ) -> None:
        self.exchange.drop_client(place)
        self.failure_cause = (
            f"client {turn.client} in round {round_number}: {describe_error(error)}"
        )
        self.training.log.write_event(
            CLIENT_LOST,
            f"{self.failure_cause}; the round's mean is over the other clients",
            round=round_number,
            client=turn.client,
        )

    def _record_round(
        self, turns: list[ClientTurn], counts: list[float], round_number: int
    ) -> None:
        lost = [turn.client for turn, count in zip(turns, counts, strict=True) if count < 0]
        self.has_returned_client |= len(lost) < len(turns)
        if len(lost) == len(turns):
            self.training.log.write_event(
                NO_CLIENT_RETURNED,
                f"round {round_number}: no client came back; the weights do not change",
                round=round_number,
            )
        self.epoch_fields = {
            "clients": [turn.client for turn in turns],
            "samples": [len(self.rounds.clients[turn.client]) for turn in turns],
            "lost": lost,
        }
        self.finished_rounds = round_number + 1

    def _advance_scheduler(self, begin: int, end: int) -> None:
        """Step the scheduler once for each step of serial."""
        if self.scheduler is None:
            return
        for step in range(begin, end):
            self.training.state.allow_early_scheduling()
            self.training.draw_alike("schedule", step, self.scheduler.step)

    # ---- between rounds ----------------------------------------------------------------------
    def end_segment(self, segment: int, start_time: float) -> bool:
        interval = self.validated_run.settings.save
        is_over = super().end_segment(segment, start_time) or self.status == "stopped"
        if (
            not is_over
            and interval
            and self.serial_steps // interval
            > self.rounds.count_serial_steps(self.finished_rounds - 1) // interval
        ):
            self.save_progress()
        is_last = is_over or self.finished_rounds == self.rounds.count or self.has_reached_limit
        # Every rank knows that no client returned, and the cause for its own clients.
        if is_last and not self.has_returned_client:
            causes = self.trainer.world.broadcast_object(
                self.trainer.world.gather_objects(self.failure_cause)
            )
            raise self.training.report_failure(
                StepFailed(ALL_CLIENTS_LOST.format(next(filter(None, causes))))
            )
        return is_last

    def get_sent_counts(self, what: str) -> dict[str, Any]:
        """Return what the averaging and the test sent; a checkpoint sends nothing."""
        exchange = self.training.setup.exchange
        if exchange is None or what != TEST_TRAFFIC:
            return {}
        if self.test_dataset is not None and self.trainer.world.size > 1:
            exchange.count_bytes(
                TEST_TRAFFIC,
                count_collective_bytes("all_reduce", 2 * 8, self.trainer.world.size),
                computed=True,
            )
        return dict(exchange.sent_bytes)

    def is_stop_requested(self) -> bool:
        """Return whether a stop was requested at the last averaging."""
        return self.training.setup.exchange is not None and self.exchange.stop_requests > 0

    def save_progress(self) -> None:
        """Save a checkpoint of the finished rounds under the corresponding step of serial."""
        client_steps = self.trainer.steps
        self.training.state.move_to(self.serial_steps)
        self.checkpoint_fields = {"rounds": self.finished_rounds}
        try:
            super().save_progress()
        finally:
            self.training.state.move_to(client_steps)
