"""A synchronous training whose servers keep all there is to keep, so that any process of it may
die, and none of it is lost.

Workers are ranks of one world, as under `data`, and servers processes beside it. When a worker
dies, or waits for another in vain, all workers are ended; the servers say where they stand,
what one has made the others make too, and workers begin the next step in a new world. When a
server dies, everything goes back to the last step of which all servers have a snapshot, the
record too: the same steps are made again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from dataclasses import replace
from pathlib import Path

from paragrad.errors import RankFailed, StepFailed
from paragrad.launch import Ranks
from paragrad.launch.launcher import GRACE
from paragrad.launch.process_pool import DIED, DONE, FAILED, SAID, Crew
from paragrad.loops.queue_worker import LONGEST, rank_of
from paragrad.loops.synchronous import Progress, train_rank
from paragrad.parallel.server.client import Calling
from paragrad.parallel.server.curve_keys import Keys
from paragrad.parallel.server.endpoints import Meeting
from paragrad.parallel.server.message_header import Header, Kind
from paragrad.parallel.server.snapshot import common
from paragrad.parallel.server.worker_exchange import dismissed
from paragrad.record.record import Recorder, cut_torn
from paragrad.runtime.stop_signals import Request
from paragrad.runtime.stragglers import in_vain
from paragrad.trainer.checkpoint.checkpoint_files import folders, remove_partial, step_of
from paragrad.validation.validate import Admitted

LOOK = 0.2  # seconds after which somebody looks whether the run is to stop
AGAIN = 10  # times that workers may begin again without a step more
# seconds for a server to say where it stands: it may be writing a snapshot
ANSWER = 30.0


def run_recovering(
    ranks: Ranks,
    checked: Admitted,
    folder: Path,
    record: Recorder,
    asked: Request,
    progress: Progress | None,
) -> str:
    """Train; how it ended: "finished" or "stopped". Raises RankFailed."""
    with Crew(ranks, checked.threads, checked.settings.device, checked.settings.timeout) as crew:
        return Run(checked, folder, record, crew, asked, progress).run()


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
        self.checked = checked
        self.folder = folder
        self.record = record
        self.crew = crew
        self.asked = asked
        self.progress = progress
        size = checked.size
        servers = checked.resolved.servers
        # by number
        self.workers = range(size - servers)
        self.servers = range(size - servers, size)
        self.meeting = Meeting(secrets.randbits(63), str(crew.folder), servers)
        self.statuses: dict[int, str] = {}
        self.troubles: list[tuple[str, RankFailed]] = []  # who died or failed, of late
        self.until = 0.0
        self.stopping = False
        # of workers; begun again since the furthest step was reached
        self.worlds = 0
        self.again = 0
        self.furthest = 0
        self.raised: RankFailed | None = None  # by a rank of itself, since then
        # when the first worker came to its end
        self.ending = 0.0
        self.seconds = min(checked.settings.timeout, ANSWER)

    def run(self) -> str:
        self.serve()
        self.work()
        while len(self.statuses) < len(self.workers):
            self.look()
        self.close()
        return self.statuses[0]

    def serve(self) -> None:
        for number in self.servers:
            self.crew.start(
                number,
                rank_of,
                self.checked,
                self.folder,
                self.record.origin,
                self.meeting.of(number, number - len(self.workers)),
            )

    def work(self) -> None:
        store = self.crew.folder / f"workers-{self.worlds}"
        self.worlds = self.worlds + 1
        self.statuses = {}
        self.stopping = False
        self.ending = 0.0
        for number in self.workers:
            self.crew.start(
                number,
                train_rank,
                self.checked,
                self.folder,
                self.record.origin,
                self.meeting.of(number),
                size=len(self.workers),
                store=store,
                backend=self.checked.backend,
            )

    def close(self) -> None:
        """Servers end, which write into the record; who does not in time is left to be killed.
        All is saved by now.
        """
        with contextlib.suppress(StepFailed):
            dismissed(self.meeting, self.seconds)
        until = time.monotonic() + self.seconds
        while self.crew.members and time.monotonic() < until:
            for number in self.crew.ready(LOOK):
                self.crew.heard(number)

    # ---- what comes --------------------------------------------------------------------------
    def look(self) -> None:
        """Wait for what comes first, and do what it asks for. Raises RankFailed."""
        if self.asked.is_set() and not self.stopping:
            self.crew.ask_to_stop(number for number in self.workers if number in self.crew.members)
            self.stopping = True
        for number in self.crew.ready(LOOK):
            what, value = self.crew.heard(number)
            if what == DONE and number in self.workers:
                self.statuses[number] = value
                self.ending = self.ending or time.monotonic()
            elif what == SAID and self.progress:
                self.progress(value)
            elif what in (DIED, FAILED):
                self.until = self.until or time.monotonic() + GRACE
                self.troubles.append((what, value))
        if (
            self.ending
            and time.monotonic() - self.ending > self.checked.settings.timeout
            and not self.troubles
        ):
            late = next(number for number in self.workers if number not in self.statuses)
            self.troubles.append(
                (DIED, RankFailed("it does not come to its end, as the others have", rank=late))
            )
        # until then the cause may show
        if self.troubles and time.monotonic() > self.until:
            self.begin_again(self.cause())
            self.troubles = []
            self.until = 0.0

    def cause(self) -> RankFailed:
        """For which workers are to begin again: a death, before what others say who met it; or
        that somebody waited in vain. Raises what a rank has raised of itself.
        """
        deaths = [value for what, value in self.troubles if what == DIED]
        raised = [
            value for what, value in self.troubles if what == FAILED and not in_vain(value.message)
        ]
        self.raised = raised[0] if raised else self.raised
        if raised and not deaths:
            raise raised[0]
        return deaths[0] if deaths else self.troubles[0][1]

    def begin_again(self, trouble: RankFailed) -> None:
        self.again += 1
        if self.again > AGAIN:
            raise self.raised or trouble
        self.crew.kill(number for number in self.workers if number in self.crew.members)
        remove_partial(self.folder)
        step, last = self.stand(trouble)
        if step > self.furthest:
            self.furthest = step
            self.again = 0
            self.raised = None
        self.meeting = replace(self.meeting, step=step, last=last)
        self.work()

    def stand(self, trouble: RankFailed) -> tuple[int, tuple[tuple[float, float], ...]]:
        """As `halted`; everything goes back where a server is gone, again where one that was
        started for it is. Raises RankFailed.
        """
        because = ""
        until = time.monotonic() + max(self.checked.settings.timeout, ANSWER)
        for _ in range(1 + AGAIN):
            try:
                if because:
                    self.go_back(trouble, because)
                    self.there(until)
                step, last = self.halted()
            except StepFailed as error:
                because = str(error)
                continue
            if because:
                rewind(self.folder, len(self.workers), step)
            else:
                self.event("again", f"{trouble}; all workers begin again with step {step}", step)
            return step, last
        raise trouble.saying(f"{trouble.message}; and {because}")

    def there(self, until: float) -> None:
        """Wait for servers that were started: they read a snapshot, and write one, for as long
        as it takes. Raises StepFailed where one is gone by then, or does not come; RankFailed:
        what one raises.
        """
        while True:
            self.refuse_gone()
            with contextlib.closing(
                Calling(self.meeting.addresses, LONGEST, Keys.made(), 5 * LOOK)
            ) as calling:
                try:
                    look = Header(Kind.LOOK, self.meeting.job)
                    list(calling.asked((server, look, ()) for server in range(len(self.servers))))
                    return
                except StepFailed:
                    if time.monotonic() > until:
                        raise

    def refuse_gone(self) -> None:
        for number in self.crew.ready(0):
            what, value = self.crew.heard(number)
            if what == FAILED:
                raise value
        if gone := [
            number - len(self.workers) for number in self.servers if number not in self.crew.members
        ]:
            raise StepFailed(f"server(s) {', '.join(map(str, gone))} are gone")

    def halted(self) -> tuple[int, tuple[tuple[float, float], ...]]:
        """(the step, (weight, loss) of every share of the one before) where all servers stand,
        without workers. Raises StepFailed where one is gone.
        """
        self.refuse_gone()
        before = self.meeting
        self.meeting = replace(self.meeting, job=secrets.randbits(63))
        with contextlib.closing(
            Calling(self.meeting.addresses, LONGEST, Keys.made(), self.seconds)
        ) as calling:
            halt = Header(Kind.HALT, before.job, version=self.meeting.job)
            told = {
                server: json.loads(bytes(rest[0]))
                for server, _, rest in calling.asked(
                    (server, halt, ()) for server in range(before.servers)
                )
            }
            first = max(told.values(), key=lambda each: each["updates"])
            questions = (
                (
                    server,
                    Header(
                        Kind.RESUME,
                        self.meeting.job,
                        numbers=(float(each["updates"] < first["updates"]), *first["made"]),
                    ),
                    (),
                )
                for server, each in told.items()
            )
            stand = {header.version for _, header, _ in calling.asked(questions)}
        if stand != {first["updates"]}:
            raise StepFailed(f"servers stand at steps {sorted(stand)}")
        return first["updates"], tuple((weight, loss) for weight, loss in first["shares"])

    def go_back(self, trouble: RankFailed, because: str) -> None:
        """Servers begin with the last step of which all of them have a snapshot."""
        self.crew.kill(number for number in self.servers if number in self.crew.members)
        step = common(self.crew.folder, len(self.servers))
        if step is None:  # before the first one
            step = self.checked.saved.step if self.checked.saved else 0
        self.meeting = replace(self.meeting, job=secrets.randbits(63), step=step)
        self.event("back", f"{trouble}: {because}; everything goes back to step {step}", step)
        self.serve()

    def event(self, name: str, message: str, step: int) -> None:
        self.record.write("event", name=name, numbers={"step": step}, message=message)


def rewind(folder: Path, workers: int, step: int) -> None:
    """A run's record, and its checkpoints, are as they were before that step."""
    for number in range(workers):
        path = folder / f"rank-{number}.jsonl"
        kept = 0
        cut_torn(path)
        for text in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            if (
                text.startswith((b'{"kind":"step"', b'{"kind":"spans"'))
                and json.loads(text)["step"] >= step
            ):
                os.truncate(path, kept)
                break
            kept += len(text)
    for later in folders(folder):
        if step_of(later) > step:
            shutil.rmtree(later)
