"""A training whose workers come and go, from this side: processes are started, and started
anew; the office hands out samples.

All of it is one loop in the launching process, which waits for whatever comes first: a question
to the office, a word of a process, or its end. A worker that dies is replaced, and of one that
is silent for too long the ticket is somebody else's; a server that dies is started again from
its last snapshot. What any of them raises ends the run, as under every strategy.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from paragrad.errors import StepFailed
from paragrad.launch import Ranks
from paragrad.launch.process_pool import DIED, FAILED, Crew
from paragrad.loops.join_coordinator import Guests, place_of, write_step
from paragrad.loops.queue_worker import LONGEST, rank_of
from paragrad.loops.synchronous import Progress
from paragrad.parallel.server.curve_keys import SECRET, Address, Keys, write_public
from paragrad.parallel.server.endpoints import Meeting
from paragrad.parallel.server.join_endpoint import read_place
from paragrad.parallel.server.request_handler import AGAIN as APPLIED_BEFORE
from paragrad.parallel.server.sockets import Listening
from paragrad.parallel.server.work_queue import KEEP, TEST, TRAIN, Office, Ticket
from paragrad.parallel.server.worker_exchange import dismissed
from paragrad.record.record import Recorder, lines_of
from paragrad.record.tensorboard import events
from paragrad.runtime.stop_signals import Request
from paragrad.validation.validate import Admitted

LOOK = 0.2  # seconds after which somebody looks whether a worker is late
FAREWELL = 30.0  # seconds at most for processes to end in, when all is saved
# times as many processes as there are may be started anew while no batch more is done
ANEW = 5


def run_handed_out(
    ranks: Ranks,
    checked: Admitted,
    folder: Path,
    record: Recorder,
    asked: Request,
    progress: Progress | None,
) -> str:
    """Train; how it ended: "finished" or "stopped". Raises RankFailed."""
    with (
        contextlib.ExitStack() as at_last,
        Crew(ranks, checked.threads, checked.settings.device, checked.settings.timeout) as crew,
    ):
        run = Run(checked, folder, record, crew, asked, progress)
        at_last.callback(run.write_unrecorded)  # when nobody writes any more
        return run.run()


class Run:
    """One training."""

    def __init__(
        self,
        checked: Admitted,
        folder: Path,
        record: Recorder,
        crew: Crew,
        asked: Request,
        progress: Progress | None,
    ) -> None:
        strategy: Any = checked.resolved
        self.strategy = strategy
        self.checked = checked
        self.folder = folder
        self.record = record
        self.crew = crew
        self.asked = asked
        self.progress = progress
        listen = checked.settings.listen
        allow = checked.settings.allow
        self.meeting = Meeting(
            secrets.randbits(63),
            str(crew.folder),
            self.strategy.servers,
            place=read_place("--listen", listen) if listen else None,
        )
        self.order = checked.facts.order
        self.shares = self.strategy.shares
        self.office = Office(
            self.meeting.job,
            self.strategy.bound,
            self.strategy.wanted if self.strategy.waits else None,
            checked.settings.timeout,
            self.heard,
        )
        self.office.made = checked.saved.step if checked.saved else 0
        self.count = self.strategy.size  # the next number of a process
        entrance = self.meeting.entrance(None, Path(allow)) if allow else None
        if entrance is not None:
            self.office.guests = Guests(
                checked,
                folder,
                record,
                self.meeting,
                entrance.allowed,
                self.next_number,
                self.event,
            )
        self.listening = Listening(LONGEST, None, Keys.made(), self.meeting.office, entrance)
        self.address = entrance.address if entrance is not None else None
        # started anew: in all, and since so many shares were done
        self.anew = 0
        self.in_vain = 0
        self.furthest = 0
        # number of a process -> which server it is
        self.servers: dict[int, int] = {}
        self.tickets = (checked.saved.step if checked.saved else 0) * self.shares
        self.tested = {"sum": 0.0, "weight": 0.0}
        self.seconds = min(checked.settings.timeout, FAREWELL)
        self.loss = 0.0
        self.done = 0
        self.told = -1.0
        self.shown = 0
        # of which servers had the share; who had it
        self.doubtful: list[tuple[Ticket, dict[str, Any], list[int]]] = []
        # of the training: steps that were given out, in all
        self.step = self.office.made
        self.kept = {("checkpoint", self.step)} if checked.saved else set[tuple[str, int]]()
        self.show: Callable[..., None] = lambda step, **values: None
        self.overdue: dict[int, float] = {}  # since when workers are late

    def run(self) -> str:
        try:
            for number in range(self.strategy.size):
                server = number - self.strategy.workers if self.strategy.serves(number) else None
                self.start(number, server)
            if self.address is not None:
                self.say_where(self.address)
            with events(self.folder if self.checked.settings.tensorboard else None) as self.show:
                status = self.epochs()
            self.office.ended = True
            self.close()
        finally:
            self.listening.close()
        self.record.write("handed_out", refused=self.office.refused, anew=self.anew)
        return status

    def next_number(self) -> int:
        """Of one more process."""
        self.count += 1
        return self.count - 1

    def say_where(self, address: Address) -> None:
        """How others join: in the record, and to whoever started it."""
        assert address.key is not None
        key = self.folder / "office.key"
        write_public(address.key, key)
        said = f"others join by: paragrad join {address.at} JOB --server-key {key} --key ME{SECRET}"
        self.event("open", said)
        print(f"paragrad: {said}", file=sys.stderr, flush=True)

    def start(self, number: int, server: int | None) -> None:
        if server is not None:
            self.servers[number] = server
        self.crew.start(
            number,
            rank_of,
            self.checked,
            self.folder,
            self.record.origin,
            self.meeting.of(number, server),
        )

    # ---- what is to be done ------------------------------------------------------------------
    def epochs(self) -> str:
        """As `Training.run` has it: a test after each, checkpoints, and how the training
        ended.
        """
        checked, save = self.checked, self.checked.settings.save
        first, start = divmod(self.step, self.order.steps)
        # a run that was stopped with an epoch's last step made no test of it
        over = self.enough or (first > 0 and not start and self.ended(first - 1))
        for epoch in range(first, checked.job.epochs) if not over else ():
            begun = self.record.now()
            if not self.train(epoch, start if epoch == first else 0) or self.end_epoch(
                epoch, begun
            ):
                break
        status = "stopped" if self.asked.is_set() else "finished"
        if save or status == "stopped":
            self.keep("checkpoint")
        if status == "finished":
            self.keep("model")
        return status

    @property
    def enough(self) -> bool:
        """Are as many steps made as were asked for?"""
        return self.checked.settings.enough(self.step)

    def train(self, epoch: int, start: int) -> bool:
        """The epoch's batches from there on, share by share. False where the run ends before
        the epoch's test, with a whole batch.
        """
        save = self.checked.settings.save
        end = (epoch + 1) * self.order.steps
        self.step = epoch * self.order.steps + start
        while self.step < end and not self.asked.is_set() and not self.enough:
            samples = len(self.order.at(self.step % self.order.steps))
            # numbers follow each other: servers remember where from
            for share in range(min(self.shares, samples)):
                self.office.give([Ticket(TRAIN, self.tickets, epoch, self.step, share)])
                self.tickets += 1
            self.step += 1
            # somebody can always be given something
            while len(self.office.left) >= 3 * self.shares:
                self.look(epoch)
            if save and self.step % save == 0:
                self.idle(epoch)  # what is kept is of whole steps
                self.keep("checkpoint")
        self.idle(epoch)
        return not self.asked.is_set() and not self.enough

    def end_epoch(self, epoch: int, begun: float) -> bool:
        """The test after an epoch; True where the goal is reached."""
        test = self.test(epoch)
        self.record.write(
            "epoch",
            epoch=epoch,
            test=test,
            start=round(begun, 6),
            seconds=round(self.record.now() - begun, 6),
        )
        if test is not None:
            self.show(self.step, **{f"test {self.checked.job.metric_name}": test["value"]})
        return self.checked.settings.reached(test)

    def ended(self, epoch: int) -> bool:
        """Going on from the last step of an epoch: its test, unless the run that was saved made
        it; True where the goal is reached.
        """
        line = self.checked.saved and self.checked.saved.tested(epoch)
        if not line:
            return self.end_epoch(epoch, self.record.now())
        return self.checked.settings.reached(line["test"])

    def keep(self, what: str) -> None:
        """Once of a step."""
        if (what, self.step) not in self.kept:
            self.kept.add((what, self.step))
            self.do([Ticket(KEEP, step=self.step, keep=what)])

    def test(self, epoch: int) -> dict[str, float] | None:
        if self.checked.job.test is None:
            return None
        self.tested = {"sum": 0.0, "weight": 0.0}
        parts = min(self.strategy.workers, self.checked.facts.test_samples)
        self.do([Ticket(TEST, epoch=epoch, part=part, parts=parts) for part in range(parts)])
        weight = self.tested["weight"]
        return {"value": self.tested["sum"] / weight if weight else float("nan"), "weight": weight}

    def do(self, tickets: list[Ticket]) -> None:
        self.office.give(tickets)
        self.idle(None)

    def idle(self, epoch: int | None) -> None:
        """Wait until all is done that was given."""
        while not self.office.idle:
            self.look(epoch)

    def heard(self, number: int, ticket: Ticket, said: dict[str, Any]) -> None:
        if ticket.what == TEST:
            self.tested = {name: self.tested[name] + said.get(name, 0.0) for name in self.tested}
        elif ticket.what == TRAIN:
            self.done, self.loss = self.done + 1, said.get("loss", self.loss)
            if ticket.share == 0:  # one of those that make a batch
                self.show(
                    ticket.step + 1, **{name: said[name] for name in ("loss", "lr") if name in said}
                )
            if said.get("became") == APPLIED_BEFORE:
                self.doubtful.append(
                    (ticket, said, [*self.office.begun_again.get(ticket.number, ()), number])
                )

    # ---- what comes --------------------------------------------------------------------------
    def look(self, epoch: int | None) -> None:
        """Wait for what comes first, and do what it asks for."""
        poller = zmq.Poller()
        for socket in self.listening.waiting:
            poller.register(socket, zmq.POLLIN)
        whose = self.crew.descriptors
        for descriptor in whose:
            poller.register(descriptor, zmq.POLLIN)
        self.office.hand_out(self.listening)
        ready = dict(poller.poll(int(1000 * LOOK)))
        while (frames := self.listening.take(0)) is not None:
            self.office.taken(self.listening, frames)
        self.office.hand_out(self.listening)
        for number in filter(None, map(self.office.gone, self.listening.left())):
            if not self.office.ended:
                self.event(
                    "gone",
                    f"worker {number}, which joined, is not reached any more; others get what it "
                    f"was at",
                    rank=number,
                )
        for number in {whose[each] for each in ready if each in whose}:
            self.word_of(number)
        for number in self.office.late():
            self.event(
                "late",
                f"worker {number} was at its samples for longer than {self.office.limit:g} s; "
                f"others get "
                "them",
                rank=number,
            )
            self.overdue[number] = time.monotonic()
        self.end_overdue()
        self.tell(epoch)

    def word_of(self, number: int) -> None:
        """A process said something, or is gone. Raises RankFailed."""
        what, value = self.crew.heard(number)
        if what == FAILED:
            raise value
        if what != DIED:
            return
        self.anew = self.anew + 1
        self.in_vain = self.in_vain + 1
        if self.done >= self.furthest + self.shares:
            self.furthest = self.done
            self.in_vain = 0
        if self.in_vain > ANEW * self.strategy.size:
            raise value
        server = self.servers.get(number)
        if server is None:
            self.office.lost(number)
            if not self.office.ended:
                another = self.next_number()
                self.event("replaced", f"{value}; worker {another} is there for it", rank=number)
                self.start(another, None)
        else:
            self.event(
                "again",
                f"{value}; server {server} is started again from its last snapshot",
                rank=number,
            )
            self.office.anew()
            self.start(number, server)

    def end_overdue(self) -> None:
        """Where those who are left are too few to make a step, and nobody who is late came back
        within the limit once more, others come for them.
        """
        self.overdue = {
            number: since
            for number, since in self.overdue.items()
            if number in self.crew.members and number not in self.office.members
        }
        if not self.strategy.waits or len(self.office.members) >= self.strategy.wanted:
            return
        for number in [
            each
            for each, since in self.overdue.items()
            if time.monotonic() - since > self.office.limit
        ]:
            self.crew.members[number].signal(signal.SIGKILL)
            del self.overdue[number]

    def write_unrecorded(self) -> None:
        """The lines of shares that servers had when who came with them asked: whoever had
        brought them first may have died, or left, before it wrote one.
        """

        @functools.cache
        def written(number: int) -> set[tuple[int, ...]]:
            lines = lines_of(self.folder / f"rank-{number}.jsonl", spans=False)
            return {(line["step"], *line["order"]) for line in lines if line["kind"] == "step"}

        for ticket, said, who in self.doubtful:
            place = (ticket.step, *place_of(self.checked, ticket))
            if not any(place in written(number) for number in who):
                write_step(self.folder, self.record.origin, who[0], self.checked, ticket, said)

    def event(self, name: str, message: str, **numbers: float) -> None:
        self.record.write("event", name=name, numbers=numbers, message=message)

    def tell(self, epoch: int | None) -> None:
        now = self.record.now()
        step = self.done // self.shares
        steps = self.checked.job.epochs * self.order.steps
        if self.progress is None or epoch is None or step in (0, self.shown):
            return
        if now - self.told > 0.1 or step == steps:
            self.told = now
            self.shown = step
            self.progress({"epoch": epoch, "step": step, "steps": steps, "loss": self.loss})

    # ---- its end -----------------------------------------------------------------------------
    def close(self) -> None:
        """Workers end, then servers; who does not in time is left to be killed."""
        workers = [number for number in self.crew.members if number not in self.servers]
        self.until(workers)
        # one that is gone by now has told all that it had to tell
        with contextlib.suppress(StepFailed):
            dismissed(self.meeting, self.seconds)
        self.until(list(self.servers))

    def until(self, numbers: list[int]) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and any(number in self.crew.members for number in numbers):
            self.look(None)
