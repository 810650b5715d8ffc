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

from paragrad.datasets.clients import Part, Rounds
from paragrad.datasets.loading import Samples, parted
from paragrad.engine.exchange import TESTS
from paragrad.errors import StepFailed, told
from paragrad.loops.synchronous import Training, state_bytes
from paragrad.parallel.averaging.federated import Federating
from paragrad.planner.cost_formulas import computed_bytes
from paragrad.record.round_counts import IDLE, LOST, NOBODY
from paragrad.runtime.generators import generators_seeded
from paragrad.runtime.stragglers import meanwhile
from paragrad.strategies.shares import Micro
from paragrad.trainer.batch import Batch
from paragrad.trainer.checkpoint.checkpoint_files import Saved
from paragrad.trainer.first_step.setup import before

FOR_NOTHING = (
    "the rate is 0, and stays so in a round: its clients train for nothing; let the "
    "warm-up begin above 0"
)
# of the seconds that workers wait for each other: a sample that is late loses its client, not
# the run
PATIENCE = 0.5
NONE = "no client of any round came back; of the last one that was lost: {}"


class InRounds(Training):
    """The loop over rounds, on one rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rounds = self.checked.rounds
        job = self.checked.job
        trainer = self.trainer
        assert rounds is not None
        self.rounds: Rounds = rounds
        self.epochs = rounds.count
        self.steps = rounds.begins[-1]
        self.made = 0
        # which goes on between rounds
        self.scheduler = trainer.scheduler
        trainer.scheduler = None
        self.samples = Samples(self.train, job.seed, job.collate, PATIENCE * trainer.world.timeout)
        # did a client come back?  why one of this worker's did not
        self.back = False
        self.cause = ""

    @property
    def exchange(self) -> Federating:
        assert isinstance(self.trainer.exchange, Federating)
        return self.trainer.exchange

    @property
    def place(self) -> int:
        """Rounds: one may be shorter than a step of serial, by which a checkpoint is called."""
        return self.made

    @property
    def passed(self) -> int:
        """Of the rounds that are made."""
        return self.rounds.passed(self.made)

    def begin(self, saved: Saved | None) -> tuple[int, int]:
        if saved is not None:
            self.made = self._made(saved)
            self.back = self.made > 0
            self.saved_at = self.made
            # another strategy's may be of a step before
            self._schedule(saved.step, self.passed)
        self.trainer.steps = self.rounds.begins[self.made]
        if self.made < self.rounds.count:
            self._wire()
        return self.made, 0

    def _made(self, saved: Saved) -> int:
        """The rounds behind a checkpoint: its own, or, of one made otherwise, as many as come
        to its steps.
        """
        rounds = self.rounds.own(saved.step, saved.state.get("rounds"))
        if rounds is not None:
            return rounds
        found = self.rounds.made(saved.step)
        self.trainer.log.choice(
            "rounds",
            f"from round {found} on",
            "the first that begins after as many samples as "
            f"{saved.step} steps of serial pass over",
        )
        return found

    def load(self, saved: Saved) -> None:
        self.trainer.scheduler = self.scheduler
        super().load(saved)
        self.trainer.scheduler = None
        if self.trainer.optimizer.state:
            self.trainer.optimizer.state.clear()
            self.trainer.log.choice(
                "checkpoint", "without the optimizer's state", "every client's optimizer is fresh"
            )

    def ended(self, epoch: int) -> bool:
        """A checkpoint of another strategy is of no round's end."""
        saved = self.checked.saved
        return saved is not None and "rounds" in saved.state and super().ended(epoch)

    def _wire(self) -> None:
        """Look at the model, on a batch of this worker's first client, and make the exchange.
        Collective.
        """
        try:
            inputs, target = parted(self._first_batch())
            before(self.trainer, self.trainer.feed.taken(inputs, target), inputs, target)
        except Exception as error:
            raise self.trainer.failed(error) from error

    def _first_batch(self) -> Any:
        """Of one that has one: of this worker's clients, or where none can be read of
        another's.
        """
        own = self.trainer.replicated.rank
        failed = StepFailed("there are no clients")
        for client in sorted(
            range(len(self.rounds.clients)), key=lambda client: self.rounds.worker[client] != own
        ):
            try:
                part = Part(client, 0, self.trainer.steps, self.rounds.length(client))
                with contextlib.closing(self._batches(part, self.made)) as batches:
                    return next(batches)
            except Exception as error:
                failed = StepFailed.of(error)
        raise failed

    # ---- a round -----------------------------------------------------------------------------
    def epoch(self, epoch: int, start: int) -> bool:
        trainer = self.trainer
        exchange = self.exchange
        rounds = self.rounds
        parts = rounds.parts(epoch)
        exchange.begin_round(len(parts))
        if self.scheduler is not None and not any(
            float(group["lr"]) for group in exchange.central.param_groups
        ):
            trainer.log.event(IDLE, f"round {epoch}: {FOR_NOTHING}", round=epoch)
        for place, part in enumerate(parts):
            if rounds.worker[part.client] == trainer.replicated.rank:
                try:
                    self._trained(part, epoch)
                    exchange.ended(place, len(rounds.clients[part.client]))
                except Exception as error:
                    self._lost(place, part, epoch, error)
        trainer.optimizer = exchange.central
        trainer.steps = rounds.begins[epoch + 1]
        exchange.stop = trainer.world.stop.is_set()
        try:
            with meanwhile(f"clients of round {epoch} train on other workers"):
                counts = exchange.meet()
            self._schedule(rounds.passed(epoch), rounds.passed(epoch + 1))
        except Exception as error:
            raise trainer.failed(error) from error
        trainer.log.failed(trainer.steps - 1)  # its spans: they are of no step
        self._told(parts, counts, epoch)
        return True

    def _trained(self, part: Part, number: int) -> None:
        trainer = self.trainer
        exchange = self.exchange
        trainer.steps = part.step
        with generators_seeded(f"client {trainer.seed} {number} {part.client}"):
            exchange.begun()
            # which may keep where it begins
            exchange.optimizer = self._fresh(exchange.central)
            trainer.optimizer = exchange.optimizer
            rate = trainer.optimizer.param_groups[0]["lr"]
            with contextlib.closing(self._batches(part, number)) as batches:
                for fetched in batches:
                    result = trainer.step(*parted(fetched))
                    self.show(trainer.steps, loss=result.loss, lr=rate)
                    self.tell(number, result.loss)
        self.held = max(self.held, state_bytes(trainer.optimizer))

    def _fresh(self, central: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer as the job makes it, with this round's rates where a scheduler sets
        them.
        """
        found = self.checked.job.optimizer(self.trainer.model.parameters())
        if self.scheduler is None:
            return found
        for group, rates in zip(found.param_groups, central.param_groups, strict=True):
            group.update(
                copy.deepcopy({name: value for name, value in rates.items() if name != "params"})
            )
        return found

    def _batches(self, part: Part, number: int) -> Generator[Any]:
        batches = (
            Batch(
                number,
                piece.whole,
                piece.samples,
                [Micro(list(piece.whole), list(range(len(piece.whole))))],
                piece.epoch,
            )
            for piece in self.rounds.pieces(part, number)
        )
        yield from self.trainer.feed.give(self.samples, batches, self.checked.settings.loaders)

    def _lost(self, place: int, part: Part, number: int, error: Exception) -> None:
        self.exchange.lost(place)
        self.cause = f"client {part.client} in round {number}: {told(error)}"
        self.trainer.log.event(
            LOST,
            f"{self.cause}; the round's mean is over the others",
            round=number,
            client=part.client,
        )

    def _told(self, parts: list[Part], counts: list[float], number: int) -> None:
        lost = [part.client for part, count in zip(parts, counts, strict=True) if count < 0]
        self.back |= len(lost) < len(parts)
        if len(lost) == len(parts):
            self.trainer.log.event(
                NOBODY, f"round {number}: no client came back; the weights stay", round=number
            )
        self.line = {
            "clients": [part.client for part in parts],
            "samples": [len(self.rounds.clients[part.client]) for part in parts],
            "lost": lost,
        }
        self.made = number + 1

    def _schedule(self, begin: int, end: int) -> None:
        """The scheduler's steps, by those of serial."""
        if self.scheduler is None:
            return
        for step in range(begin, end):
            # schedulers want to know
            self.trainer.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.trainer.alike("schedule", step, self.scheduler.step)

    # ---- between rounds ----------------------------------------------------------------------
    def end_epoch(self, epoch: int, begun: float) -> bool:
        save = self.checked.settings.save
        over = super().end_epoch(epoch, begun) or self.status == "stopped"
        if not over and save and self.passed // save > self.rounds.passed(self.made - 1) // save:
            self.save()
        last = over or self.made == self.rounds.count or self.enough
        # which all know, and each of its own clients why
        if last and not self.back:
            causes = self.trainer.world.agreed(self.trainer.world.collected(self.cause))
            raise self.trainer.failed(StepFailed(NONE.format(next(filter(None, causes)))))
        return last

    def sent(self, what: str) -> dict[str, Any]:
        """Of the meeting, with what a test adds up; to save, nothing is."""
        exchange = self.trainer.exchange
        if exchange is None or what != TESTS:
            return {}
        if self.test is not None and self.trainer.world.size > 1:
            exchange.count(
                TESTS, computed_bytes("all_reduce", 2 * 8, self.trainer.world.size), computed=True
            )
        return dict(exchange.sent)

    def asked(self) -> bool:
        """As the meeting told; without one, nobody."""
        return self.trainer.exchange is not None and self.exchange.asked > 0

    def save(self) -> None:
        """Of the rounds behind it, under the step that serial would have come to."""
        own = self.trainer.steps
        self.trainer.steps = self.passed
        self.trainer.scheduler = self.scheduler
        self.beside = {"rounds": self.made}
        try:
            super().save()
        finally:
            self.trainer.steps = own
            self.trainer.scheduler = None
