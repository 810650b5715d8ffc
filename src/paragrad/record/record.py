"""The record: one folder per run, JSON lines, each process appends to its own file; nothing
derivable is stored.

| kind       | fields                                                                             |
|------------|------------------------------------------------------------------------------------|
| run        | schema, id, date, job {name, arguments, batch, epochs, metric, unit, samples,      |
|            | parameters, dtype}, strategy, resolved, exact, hands_out, seed, workers, servers,  |
|            | backend, device, threads, prediction, reverse, machine {cpu, cores, load, torch,   |
|            | python, paragrad}, resumed {run, step} or null, settings (those that are not the   |
|            | default), rounds {count, clients, taking, passes, steps} or null                   |
| step       | epoch, step, start, seconds, loss [sum, weight], order [first, stop], sent {kind:  |
|            | {bytes, computed}}, lr; noise [|g|^2 of the first micro-batch, what it weighs,     |
|            | |g|^2 of the mean of all] or null, where measured                                  |
| epoch      | epoch, test {value, weight} or null, start, seconds; sent, where ranks exchange    |
|            | something for a test; of a round sent in it, clients [those that took part],       |
|            | samples [of each], lost [those that did not come back]                             |
| checkpoint | step, sent: of one for which ranks exchange something                              |
| span       | step, name, lane (compute, send, receive, wait, update, data), start, seconds,     |
|            | bytes, peer                                                                        |
| choice     | what, bytes, picked, because                                                       |
| memory     | parameters, gradients, optimizer, activations (with messages between parts),       |
|            | exchange, resident (bytes)                                                         |
| cpu        | host; seconds of the training; own: CPU seconds of this rank; all: of everybody on |
|            | its cores, null where the system does not say; switched: how often its core was    |
|            | given to another thread, whoever's                                                 |
| event      | name, numbers                                                                      |
| server     | number (of a server), parameters (bytes it has), received, sent (bytes), updates,  |
|            | samples (applied), lost {updates, samples}, staleness {updates late: pushes},      |
|            | refused {why: messages}                                                            |
| handed_out | refused (by who hands out samples, as above), anew (processes that were started    |
|            | anew)                                                                              |
| end        | status (finished, failed, stopped, interrupted), seconds, error {rank, step,       |
|            | tensor, message} or null; of a comparison: error a text or null                    |
| difference | baseline, run, value, tensor                                                       |
| comparison | rows [[run, by seed], by strategy], strategies, until, seeds, command, baselines   |
|            | [run], identity (what must be equal to go on with it): the first line of           |
|            | compare.jsonl                                                                      |
| distance   | baseline, run, values (of the parameters, after every step, in the job's own type) |

`start` counts seconds from the run's beginning on the host's monotonic clock; where ranks are
on several hosts, whose clocks differ, from the end of a barrier, which they leave within a
message of each other. `sent` is the payload handed to the wire; `computed` marks bytes that
come from the closed form because a backend's own collective moved them. The span of an exchange
(lane send) is the whole of it; those of the same name in wait, receive and compute are its
parts: blocked until the first message came, blocked for the others, and the rest. Of some steps
(DETAILED; with --trace, of all) spans also say what a rank did between its tasks, named as its
schedule names it: `>1:x1.0` in lane send, the posting of that message; in lane wait, blocked
until it was gone; `<0:x1.0` in lane receive, blocked until it was there. A step that failed has
its spans up to there, and no line of its own. Of a worker that joined from elsewhere there are
its steps alone, which end when it says so. What is as in the step before is not written again,
and `lines_of` puts it back: fields of a step; and the spans of a step are one line {kind:
spans, step, start, spans [[name, lane, bytes], ...], micros [start, length, ...]}, microseconds
after `start` and in the order of `spans`, which is left out where it is the step before's. A
step costs some 250 bytes on every rank. Where clients train in rounds an epoch is a round, a
step a client's batch, and `order` that of all clients of the round. `date` is when the run
began, UTC. `unit` is what the test's value is in (% or nothing). `resident` is the most that
the process ever held, also in runs that it served before. `load` is the mean number of busy or
waiting threads of the host in the minute before the run, null where the system does not say.
Without an `end` line the run died.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from paragrad.errors import Refused, add_file_name
from paragrad.record.round_counts import (
    count_client_samples,
    count_round_samples,
    summarize_round_bytes,
)
from paragrad.record.sample_count import SampleCount, count_epoch_samples
from paragrad.record.step_times import list_joint_seconds, list_slowest_seconds

# 1 wrote every field of every step, and a line for every span; it is read as well
RECORD_SCHEMA = 2
Line = dict[str, Any]
# steps, as this run counts them: told in detail; not the first, which warm up
DETAILED_STEPS = range(2, 12)


# json.dumps would make an encoder for every line
encode_json = json.JSONEncoder(separators=(",", ":")).encode


class Recorder:
    """Appends lines to a file, each whole and at once, so that it survives the end of its
    process.
    """

    def __init__(self, path: Path, origin: float | None = None, exclusive: bool = False) -> None:
        """alone: Refused where another process holds the file so, before anything in it is
        touched. The lock goes with it.
        """
        self.origin = time.monotonic() if origin is None else origin
        self.file = path.open("a", encoding="utf-8")
        if exclusive:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.file.close()
                raise Refused(
                    f"{path} is still being written to; let the command that does so end, or stop "
                    f"it"
                ) from None
            except OSError:  # a file system without locks
                pass
        truncate_torn_line(path)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # a full disk was told of when it was written to
        with contextlib.suppress(OSError):
            self.file.close()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.origin

    def write_line(self, kind: str, **fields: Any) -> None:
        self.write_encoded([encode_json({"kind": kind, **fields})])

    def write_encoded(self, lines: list[str]) -> None:
        """Lines that are encoded already, in one go. Raises OSError with the file's name."""
        with add_file_name(self.file.name):
            self.file.write("\n".join(lines) + "\n")
            self.file.flush()


def truncate_torn_line(path: Path) -> None:
    """Cut off a last line that its writer could not end (a full disk, a kill): what is appended
    behind it could not be read.
    """
    if not path.is_file() or not (size := path.stat().st_size):
        return
    with path.open("rb") as file:  # mostly it is whole, and may be long
        file.seek(size - 1)
        torn = file.read() != b"\n"
    if torn:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def create_run_folder(parent: Path, name: str) -> Path:
    """A fresh folder below parent; Refused where it cannot be made."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for count in range(1000):
        folder = parent / (f"{stamp}-{name}" + (f"-{count}" if count else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():
                raise Refused(
                    f"cannot write runs to {parent}: it is not a folder; give another with --runs"
                ) from None
            continue
        except OSError as error:
            raise Refused(
                f"cannot write runs to {parent}: {error.strerror}; give another folder with --runs"
            ) from None
        return folder
    raise Refused(f"{parent} is full of runs of this second; give another folder with --runs")


def read_lines(path: Path, spans: bool = True) -> Iterator[Line]:
    """The lines of a file, as the table above has them; a last one that was cut off by the end
    of its process is left out.
    """
    before: Line = {}  # the step before
    named: list[Any] = []  # its spans
    for line in _read_stored_lines(path, spans):
        if line["kind"] == "step":
            line = {**before, **line}
            before = line
        if line["kind"] == "spans":
            named = line.get("spans", named)
            yield from _expand_spans(line, named)
        else:
            yield line


def _read_stored_lines(path: Path, spans: bool) -> Iterator[Line]:
    """The lines as they are stored. spans: with those of spans, which are most of a file."""
    if path.is_file():  # a FIFO would be waited for
        for text in path.read_text(encoding="utf-8").splitlines():
            if not spans and text.startswith('{"kind":"span'):
                continue
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                return


def _expand_spans(line: Line, named: list[Any]) -> list[Line]:
    """A line for each span of a step, by when they began."""
    micros = iter(line["micros"])
    found = [
        {
            "kind": "span",
            "step": line["step"],
            "name": name,
            "lane": lane,
            "start": round(line["start"] + 1e-6 * start, 6),
            "seconds": round(1e-6 * seconds, 6),
            "bytes": sent,
            "peer": None,
        }
        for (name, lane, sent), start, seconds in zip(named, micros, micros, strict=True)
    ]
    return sorted(found, key=lambda span: span["start"])


class Record:
    """What a run's folder says, read back. spans: with them, which are half of it. Raises
    Refused: of a later version.
    """

    def __init__(self, folder: Path, spans: bool = True) -> None:
        self.folder = folder
        self.run_lines = list(read_lines(folder / "run.jsonl"))
        own = self.run_lines
        self.header: Line = next((line for line in own if line["kind"] == "run"), {})
        if self.header.get("schema", RECORD_SCHEMA) > RECORD_SCHEMA:
            raise Refused(
                f"{folder} is a record of version {self.header['schema']}, this paragrad reads "
                f"versions up to "
                f"{RECORD_SCHEMA}; read it with "
                f"paragrad "
                f"{dict(self.header.get('machine') or {}).get('paragrad', 'of its time')}, which "
                f"wrote it"
            )
        self.end: Line | None = next((line for line in own if line["kind"] == "end"), None)
        files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
        self.ranks: list[list[Line]] = [list(read_lines(path, spans)) for path in files]
        self.difference: Line | None = next(
            (line for line in own if line["kind"] == "difference"), None
        )
        self.epochs = [line for line in own if line["kind"] == "epoch"]
        self.choices = [line for line in own if line["kind"] == "choice"]

    @property
    def finished(self) -> bool:
        return self.end is not None and self.end["status"] == "finished"

    def select_lines(self, kind: str, rank: int = 0) -> list[Line]:
        """Of a rank; epochs, where no rank leads, are told by the run itself."""
        if kind == "epoch" and self.epochs:
            return self.epochs
        return (
            [line for line in self.ranks[rank] if line["kind"] == kind]
            if rank < len(self.ranks)
            else []
        )

    @property
    def has_independent_workers(self) -> bool:
        """Workers step by themselves."""
        return bool(self.rounds or self.header.get("hands_out"))

    @property
    def rounds(self) -> Line | None:
        """What the header says of them, where clients train in rounds."""
        return self.header.get("rounds")

    def count_passed_samples(self, epoch: int) -> int:
        """The samples of the epochs up to that one; of rounds those in here."""
        lines = (line for line in self.select_lines("epoch") if line["epoch"] <= epoch)
        return (
            count_client_samples(lines, self.rounds["passes"])
            if self.rounds
            else (epoch + 1) * int(self.header["job"]["samples"])
        )

    def group_step_lines(self) -> list[list[Line]]:
        """For each step that every worker finished, the line of every worker; or those of its
        shares, where they are handed out (of a batch with fewer samples, fewer), or of its
        client.
        """
        found: dict[int, list[Line]] = {}
        for lines in self.ranks:
            for line in lines:
                if line["kind"] == "step":
                    found.setdefault(line["step"], []).append(line)
        job = self.header.get("job", {})
        workers = self.header.get("workers") or len(self.ranks)
        samples = job.get("samples", workers)
        batch = job.get("batch", workers)
        last = samples % batch or batch
        steps = -(-samples // batch)
        return [
            lines
            for step, lines in sorted(found.items())
            if self.rounds or len(lines) >= min(workers, last if (step + 1) % steps == 0 else batch)
        ]

    @property
    def losses(self) -> list[float]:
        """The mean loss of every global batch: sums over ranks, divided once; 0 where nothing
        of one counted.
        """
        return [
            sum(line["loss"][0] for line in lines) / (sum(line["loss"][1] for line in lines) or 1.0)
            for lines in self.group_step_lines()
        ]

    @property
    def test(self) -> float | None:
        """The test metric after the last epoch that has one."""
        values = [line["test"]["value"] for line in self.select_lines("epoch") if line["test"]]
        return values[-1] if values else None

    def list_step_seconds(self, first: int) -> list[float]:
        """Of the steps from that one on, counted in this run, of the rank whose median is the
        slowest, or where workers step apart of all together; of all steps where there are no
        more than that.
        """
        if self.has_independent_workers:
            return list_joint_seconds(
                (steps := self.group_step_lines())[first:] or steps,
                None if self.rounds else len(self.ranks),
            )
        return list_slowest_seconds(
            [
                lines[first:] or lines
                for rank in range(len(self.ranks))
                if (lines := self.select_lines("step", rank))
            ]
        )

    @property
    def seconds_per_step(self) -> float | None:
        """The median step of the slowest rank, or of all together."""
        # the first one warms up
        return median(seconds) if (seconds := self.list_step_seconds(1)) else None

    @property
    def sent_per_step(self) -> dict[str, Line]:
        """Bytes by kind of the rank and step that sent most: {kind: {bytes, computed}}. What is
        not sent in every step is spread over all of them.
        """
        most: dict[str, Line] = {}
        steps = self.group_step_lines()
        times = Counter[str]()
        if self.rounds and steps:
            return summarize_round_bytes(
                [self.select_lines("epoch", rank) for rank in range(len(self.ranks))], len(steps)
            )
        for lines in steps:
            times.update({kind for line in lines for kind in line["sent"]})
            for line in lines:
                for kind, sent in line["sent"].items():
                    if sent["bytes"] >= most.get(kind, sent)["bytes"]:
                        most[kind] = sent
        return {
            kind: sent
            if times[kind] == len(steps)
            else sent | {"bytes": round(sent["bytes"] * times[kind] / len(steps))}
            for kind, sent in most.items()
        }

    @property
    def cpu(self) -> list[Line]:
        """Who kept the cores busy, as every rank that came to the end of its training told it
        (`record.cpu`).
        """
        return [line for rank in range(len(self.ranks)) for line in self.select_lines("cpu", rank)]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind, each of the rank that holds most of it; empty where no rank came to
        the end of its training.
        """
        most: dict[str, int] = {}
        for rank in range(len(self.ranks)):
            for line in self.select_lines("memory", rank):
                most |= {
                    kind: max(held, most.get(kind, 0))
                    for kind, held in line.items()
                    if kind != "kind"
                }
        return most

    @property
    def fullest(self) -> dict[str, int]:
        """Bytes by kind of the rank that holds most of all kinds together; what its process
        held beside them left out.
        """
        every = [
            {kind: held for kind, held in line.items() if kind not in ("kind", "resident")}
            for rank in range(len(self.ranks))
            for line in self.select_lines("memory", rank)
        ]
        return max(every, key=lambda held: sum(held.values()), default={})

    @property
    def planned_steps(self) -> int:
        """How many steps all epochs of its job have."""
        job = self.header["job"]
        return (
            int(self.rounds["steps"])
            if self.rounds
            else int(job["epochs"] * -(-job["samples"] // job["batch"]))
        )

    def collect_step_lines(self) -> list[Line]:
        """The step lines of all ranks; of a resumed run, after those that led to its
        checkpoint.
        """
        resumed = self.header.get("resumed")
        before = list[Line]()
        # of other epochs
        if resumed and not self.rounds and not (earlier := Record(Path(resumed["run"]))).rounds:
            before = [
                line for line in earlier.collect_step_lines() if line["step"] < resumed["step"]
            ]
        return before + [line for lines in self.ranks for line in lines if line["kind"] == "step"]

    @property
    def sample_count(self) -> SampleCount:
        """Count every sample of every finished epoch, by the positions in the order that the
        ranks recorded.
        """
        used: dict[int, list[Line]] = {}
        for line in self.collect_step_lines():
            used.setdefault(line["epoch"], []).append(line)
        if self.rounds:
            return count_round_samples(self.select_lines("epoch"), used, self.rounds["passes"])
        return count_epoch_samples(
            (line["epoch"] for line in self.select_lines("epoch")),
            used,
            self.header["job"]["samples"],
        )
