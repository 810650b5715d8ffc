"""A training in rounds: in each some clients train, each over its own samples on its own
worker, and the workers meet.

A round is what the record calls an epoch. A step is a batch of one client; steps are numbered
as if the clients of a round came one after the other, and what is drawn in one goes by that
number, so it does not matter how many workers there are. What goes on between rounds
(scheduler, checkpoints) counts by the steps that serial makes over as many samples.
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
from paragrad.loops.synchronous import TrainingLoop, count_state_bytes
from paragrad.parallel.averaging.federated import FederatedExchange
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.round_counts import CLIENT_LOST, IDLE_ROUND, NO_CLIENT_RETURNED
from paragrad.runtime.generators import use_seeded_generators
from paragrad.runtime.stragglers import explain_timeout
from paragrad.strategies.shares import MicroBatch
from paragrad.trainer.batch import Batch
from paragrad.trainer.checkpoint.checkpoint_files import SavedCheckpoint
from paragrad.trainer.first_step.setup import prepare_step

ZERO_RATE = (
    "the rate is 0, and stays so in a round: its clients train for nothing; let the "
    "warm-up begin above 0"
)
# of the seconds that workers wait for each other: a sample that is late loses its client, not
# the run
LOADING_PATIENCE = 0.5
ALL_CLIENTS_LOST = "no client of any round came back; of the last one that was lost: {}"


class RoundTraining(TrainingLoop):
    """The loop over rounds, on one rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rounds = self.validated_run.rounds
        job = self.validated_run.job
        trainer = self.trainer
        assert rounds is not None
        self.rounds: ClientRounds = rounds
        self.epochs = rounds.count
        self.steps = rounds.round_starts[-1]
        self.finished_rounds = 0
        # which goes on between rounds
        self.scheduler = trainer.scheduler
        trainer.scheduler = None
        self.samples = Samples(
            self.train_dataset, job.seed, job.collate, LOADING_PATIENCE * trainer.world.timeout
        )
        # did a client come back?  why one of this worker's did not
        self.has_returned_client = False
        self.failure_cause = ""

    @property
    def exchange(self) -> FederatedExchange:
        assert isinstance(self.trainer.exchange, FederatedExchange)
        return self.trainer.exchange

    @property
    def progress(self) -> int:
        """Rounds: one may be shorter than a step of serial, by which a checkpoint is called."""
        return self.finished_rounds

    @property
    def serial_steps(self) -> int:
        """Of the rounds that are made."""
        return self.rounds.count_serial_steps(self.finished_rounds)

    def find_start(self, saved: SavedCheckpoint | None) -> tuple[int, int]:
        if saved is not None:
            self.finished_rounds = self._find_finished_rounds(saved)
            self.has_returned_client = self.finished_rounds > 0
            self.saved_progress = self.finished_rounds
            # another strategy's may be of a step before
            self._advance_scheduler(saved.step, self.serial_steps)
        self.trainer.steps = self.rounds.round_starts[self.finished_rounds]
        if self.finished_rounds < self.rounds.count:
            self._set_up_exchange()
        return self.finished_rounds, 0

    def _find_finished_rounds(self, saved: SavedCheckpoint) -> int:
        """The rounds behind a checkpoint: its own, or, of one made otherwise, as many as come
        to its steps.
        """
        rounds = self.rounds.match_checkpoint(saved.step, saved.state.get("rounds"))
        if rounds is not None:
            return rounds
        found = self.rounds.count_finished_rounds(saved.step)
        self.trainer.log.write_choice(
            "rounds",
            f"from round {found} on",
            "the first that begins after as many samples as "
            f"{saved.step} steps of serial pass over",
        )
        return found

    def resume_from_checkpoint(self, saved: SavedCheckpoint) -> None:
        self.trainer.scheduler = self.scheduler
        super().resume_from_checkpoint(saved)
        self.trainer.scheduler = None
        if self.trainer.optimizer.state:
            self.trainer.optimizer.state.clear()
            self.trainer.log.write_choice(
                "checkpoint", "without the optimizer's state", "every client's optimizer is fresh"
            )

    def finish_resumed_epoch(self, epoch: int) -> bool:
        """A checkpoint of another strategy is of no round's end."""
        saved = self.validated_run.resume_checkpoint
        return saved is not None and "rounds" in saved.state and super().finish_resumed_epoch(epoch)

    def _set_up_exchange(self) -> None:
        """Look at the model, on a batch of this worker's first client, and make the exchange.
        Collective.
        """
        try:
            inputs, target = separate_target(self._find_first_batch())
            prepare_step(self.trainer, self.trainer.feed.take_batch(inputs, target), inputs, target)
        except Exception as error:
            raise self.trainer.report_failure(error) from error

    def _find_first_batch(self) -> Any:
        """Of one that has one: of this worker's clients, or where none can be read of
        another's.
        """
        own = self.trainer.samples_world.rank
        failed = StepFailed("there are no clients")
        for client in sorted(
            range(len(self.rounds.clients)),
            key=lambda client: self.rounds.client_workers[client] != own,
        ):
            try:
                part = ClientTurn(
                    client, 0, self.trainer.steps, self.rounds.count_client_steps(client)
                )
                with contextlib.closing(
                    self._load_client_batches(part, self.finished_rounds)
                ) as batches:
                    return next(batches)
            except Exception as error:
                failed = StepFailed.wrap_error(error)
        raise failed

    # ---- a round -----------------------------------------------------------------------------
    def train_epoch(self, epoch: int, start: int) -> bool:
        trainer = self.trainer
        exchange = self.exchange
        rounds = self.rounds
        parts = rounds.plan_turns(epoch)
        exchange.begin_round(len(parts))
        if self.scheduler is not None and not any(
            float(group["lr"]) for group in exchange.central_optimizer.param_groups
        ):
            trainer.log.write_event(IDLE_ROUND, f"round {epoch}: {ZERO_RATE}", round=epoch)
        for place, part in enumerate(parts):
            if rounds.client_workers[part.client] == trainer.samples_world.rank:
                try:
                    self._train_client(part, epoch)
                    exchange.end_client(place, len(rounds.clients[part.client]))
                except Exception as error:
                    self._record_lost_client(place, part, epoch, error)
        trainer.optimizer = exchange.central_optimizer
        trainer.steps = rounds.round_starts[epoch + 1]
        exchange.stop_requested = trainer.world.stop.is_set()
        try:
            with explain_timeout(f"clients of round {epoch} train on other workers"):
                counts = exchange.average_clients()
            self._advance_scheduler(
                rounds.count_serial_steps(epoch), rounds.count_serial_steps(epoch + 1)
            )
        except Exception as error:
            raise trainer.report_failure(error) from error
        trainer.log.write_failed_step(trainer.steps - 1)  # its spans: they are of no step
        self._record_round(parts, counts, epoch)
        return True

    def _train_client(self, turn: ClientTurn, round_number: int) -> None:
        trainer = self.trainer
        exchange = self.exchange
        trainer.steps = turn.first_step
        with use_seeded_generators(f"client {trainer.seed} {round_number} {turn.client}"):
            exchange.begin_client()
            # which may keep where it begins
            exchange.optimizer = self._make_client_optimizer(exchange.central_optimizer)
            trainer.optimizer = exchange.optimizer
            rate = trainer.optimizer.param_groups[0]["lr"]
            with contextlib.closing(self._load_client_batches(turn, round_number)) as batches:
                for fetched in batches:
                    result = trainer.step(*separate_target(fetched))
                    self.write_scalars(trainer.steps, loss=result.loss, lr=rate)
                    self.report_step(round_number, result.loss)
        self.peak_optimizer_bytes = max(
            self.peak_optimizer_bytes, count_state_bytes(trainer.optimizer)
        )

    def _make_client_optimizer(self, central: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer as the job makes it, with this round's rates where a scheduler sets
        them.
        """
        found = self.validated_run.job.optimizer(self.trainer.model.parameters())
        if self.scheduler is None:
            return found
        for group, rates in zip(found.param_groups, central.param_groups, strict=True):
            group.update(
                copy.deepcopy({name: value for name, value in rates.items() if name != "params"})
            )
        return found

    def _load_client_batches(self, turn: ClientTurn, round_number: int) -> Generator[Any]:
        batches = (
            Batch(
                round_number,
                piece.positions,
                piece.indices,
                [MicroBatch(list(piece.positions), list(range(len(piece.positions))))],
                piece.epoch,
            )
            for piece in self.rounds.iterate_client_batches(turn, round_number)
        )
        yield from self.trainer.feed.iterate_batches(
            self.samples, batches, self.validated_run.settings.loaders
        )

    def _record_lost_client(
        self, place: int, turn: ClientTurn, round_number: int, error: Exception
    ) -> None:
        self.exchange.drop_client(place)
        self.failure_cause = (
            f"client {turn.client} in round {round_number}: {describe_error(error)}"
        )
        self.trainer.log.write_event(
            CLIENT_LOST,
            f"{self.failure_cause}; the round's mean is over the others",
            round=round_number,
            client=turn.client,
        )

    def _record_round(
        self, turns: list[ClientTurn], counts: list[float], round_number: int
    ) -> None:
        lost = [part.client for part, count in zip(turns, counts, strict=True) if count < 0]
        self.has_returned_client |= len(lost) < len(turns)
        if len(lost) == len(turns):
            self.trainer.log.write_event(
                NO_CLIENT_RETURNED,
                f"round {round_number}: no client came back; the weights stay",
                round=round_number,
            )
        self.epoch_fields = {
            "clients": [part.client for part in turns],
            "samples": [len(self.rounds.clients[part.client]) for part in turns],
            "lost": lost,
        }
        self.finished_rounds = round_number + 1

    def _advance_scheduler(self, begin: int, end: int) -> None:
        """The scheduler's steps, by those of serial."""
        if self.scheduler is None:
            return
        for step in range(begin, end):
            # schedulers want to know
            self.trainer.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.trainer.draw_alike("schedule", step, self.scheduler.step)

    # ---- between rounds ----------------------------------------------------------------------
    def end_epoch(self, epoch: int, start_time: float) -> bool:
        save = self.validated_run.settings.save
        over = super().end_epoch(epoch, start_time) or self.status == "stopped"
        if (
            not over
            and save
            and self.serial_steps // save
            > self.rounds.count_serial_steps(self.finished_rounds - 1) // save
        ):
            self.save_progress()
        last = over or self.finished_rounds == self.rounds.count or self.has_reached_limit
        # which all know, and each of its own clients why
        if last and not self.has_returned_client:
            causes = self.trainer.world.broadcast_object(
                self.trainer.world.gather_objects(self.failure_cause)
            )
            raise self.trainer.report_failure(
                StepFailed(ALL_CLIENTS_LOST.format(next(filter(None, causes))))
            )
        return last

    def get_sent_counts(self, what: str) -> dict[str, Any]:
        """Of the meeting, with what a test adds up; to save, nothing is."""
        exchange = self.trainer.exchange
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
        """As the meeting told; without one, nobody."""
        return self.trainer.exchange is not None and self.exchange.stop_requests > 0

    def save_progress(self) -> None:
        """Of the rounds behind it, under the step that serial would have come to."""
        own = self.trainer.steps
        self.trainer.steps = self.serial_steps
        self.trainer.scheduler = self.scheduler
        self.checkpoint_fields = {"rounds": self.finished_rounds}
        try:
            super().save_progress()
        finally:
            self.trainer.steps = own
            self.trainer.scheduler = None
