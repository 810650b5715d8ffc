"""The record of a run: a folder of JSON lines, with one file for each process.

Each process appends to its own file. Nothing is stored that can be computed from other lines.

| kind       | fields                                                                             |
|------------|------------------------------------------------------------------------------------|
| run        | schema, id, date, job {name, arguments, batch, epochs, metric, unit, samples,      |
|            | sampler, parameters, dtype}, strategy, resolved, exact, hands_out, seed, workers,  |
|            | servers,                                                                           |
|            | backend, device, threads, prediction, reverse, machine {cpu, cores, load, torch,   |
|            | python, paragrad}, resumed {run, step} or null, settings (those that are not the   |
|            | default), rounds {count, clients, taking, passes, steps} or null                   |
| step       | epoch, step, start, seconds, loss [sum, weight], order [[first, stop], ...], sent  |
|            | {kind: {bytes, computed}}, lr; noise [|g|^2 of the first micro-batch, its weight,  |
|            | |g|^2 of the mean of all] or null, where measured                                  |
| epoch      | epoch, test {value, weight} or null, start, seconds; sent, where ranks exchange    |
|            | something for a test; of a round sent in it, clients [those that took part],       |
|            | samples [of each], lost [those that did not come back]                             |
| checkpoint | step, sent: of one for which ranks exchange something                              |
| span       | step, name, lane (compute, send, receive, wait, update, data), start, seconds,     |
|            | bytes, peer                                                                        |
| choice     | what, bytes, picked, because                                                       |
| memory     | parameters, gradients, optimizer, activations (with messages between stages),      |
|            | exchange, resident (bytes)                                                         |
| cpu        | host; seconds of the training; own: CPU seconds of this rank; all: of all          |
|            | processes on its cores, null where the system does not say; switched: how often    |
|            | its core was given to another thread of any process                                |
| event      | name, numbers                                                                      |
| server     | number (of a server), parameters (bytes it has), received, sent (bytes), updates,  |
|            | samples (applied), lost {updates, samples}, staleness {updates late: pushes},      |
|            | refused {why: messages}                                                            |
| handed_out | refused (by the queue of samples, as above), anew (processes that were started     |
|            | again)                                                                             |
| end        | status (finished, failed, stopped, interrupted), seconds, error {rank, step,       |
|            | tensor, message} or null; of a comparison: error a text or null                    |
| difference | baseline, run, value, tensor                                                       |
| comparison | rows [[run, by seed], by strategy], strategies, until, seeds, command, baselines   |
|            | [run], identity (what must be equal to continue it): the first line of             |
|            | compare.jsonl                                                                      |
| distance   | baseline, run, values (of the parameters, after every step, in the job's own type) |

Times: `start` is in seconds since the start of the run, on the host's monotonic clock. If ranks are
on several hosts with different clocks, the run starts at the end of a barrier. Ranks leave it
within the time of one message. `date` is the start of the run in UTC.

Bytes: `sent` is the payload handed to the backend. `computed` marks bytes that come from the closed
form, because a collective of the backend moved them. `resident` is the most that the process ever
held, also in earlier runs that it served.

Spans: The span of an exchange (lane send) covers the whole exchange. Spans of the same name in the
lanes wait, receive and compute are its parts. In order: blocked until the first message came,
blocked for the others, and the rest. In some steps (DETAILED_STEPS; with --trace, all) spans also
show what a rank did between its tasks, with the names of its schedule. `>1:x1.0` in lane send is
the posting of that message; in lane wait, the rank was blocked until it was gone. `<0:x1.0` in lane
receive means that the rank was blocked until it arrived. A step that failed has its spans up to the
failure, and no line of its own.

Samples: `order` is the ranges of positions in the order of the epoch that this rank computed. A
rank has one range, or one for each micro-batch of the step. Ranges that meet are written as one. A
rank whose samples another rank records has none.

Compression: Values that equal those of the previous step are not written, and `read_lines` restores
them. This concerns the fields of a step, and the spans of a step. Spans are stored as one line
{kind: spans, step, start, spans [[name, lane, bytes], ...], micros [start, length, ...]}. `micros`
are microseconds after `start`, in the order of `spans`. `spans` is left out if it equals that of
the previous step. A step costs about 250 bytes on each rank.

Waiting: The lines of steps are in the file within a second (STEP_DELAY). Any other line, and a
checkpoint, write those that wait before it. So does the end of the process, unless it is killed or
ends at once, because its launcher is gone. A worker that others can replace writes each step at
once, because its samples count after its death.

Other rules: If `compare` times a plain PyTorch loop, that is the `strategy` and `resolved` of the
run. It has step and cpu lines only, and the weight of its loss is 1. Of a worker that joined from
elsewhere, only the steps are recorded; they end when the worker reports it. If clients train in
rounds, an epoch is a round and a step is a batch of one client. `order` is then the order of all
clients of the round. `unit` is the unit of the test value (% or empty). `load` is the mean number
of busy or waiting threads of the host in the minute before the run, or null if unknown. A record
without an `end` line belongs to a run that died.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
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

# Earlier versions can be read too. Version 1 wrote all fields of each step, and a line for each
# span. Versions 1 and 2 wrote `order` as one range [first, stop].
RECORD_SCHEMA = 3
Line = dict[str, Any]
EARLIER_KINDS = {"told": "totals"}  # kinds of bytes in earlier records, and their names now
ENDED_EARLY = "ended early"  # the event of a run that a callback ended
# Seconds that the lines of steps wait, so that each is in its file within a second.
STEP_DELAY = 0.4
# steps that are written in detail, as this run counts them; the first two warm up
DETAILED_STEPS = range(2, 12)


# json.dumps would create an encoder for each line
encode_json = json.JSONEncoder(separators=(",", ":")).encode


class Recorder:
    """Appends lines to a file, each as a whole, so that they survive the process.

    `write_line` writes at once. Lines of `write_later` wait for at most twice `delay`: until the
    next line after `delay`, or until a thread writes them. Any other line, `flush`, and the end
    write them too. They are encoded when they are written, because many at a time take a third of
    the time.

    Attributes:
        origin: The start of the run on the monotonic clock, in seconds.

        file: The open file.

        delay: As the argument.

        pending: What encodes the lines that wait, in their order.

        last_write: The time of the last write, on the monotonic clock.

        lock: Held while lines are written.

        ended: Is set when the file is closed.

        error: The error of the thread, until it is raised; or None.
    """

    def __init__(
        self,
        path: Path,
        origin: float | None = None,
        exclusive: bool = False,
        delay: float = 0.0,
    ) -> None:
        """Open the file.

        Args:
            path: The file.

            origin: The start of the run on the monotonic clock; None means now.

            exclusive: Lock the file until this process ends.

            delay: The seconds that lines of `write_later` wait; 0: they are written at once.

        Raises:
            Refused: Another process has locked the file. Nothing in the file is changed.
        """
        self.origin = time.monotonic() if origin is None else origin
        self.file = path.open("a", encoding="utf-8")
        if exclusive:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.file.close()
                raise Refused(
                    f"{path} is still being written to; wait until the command that writes it "
                    "ends, or stop it"
                ) from None
            except OSError:  # a file system without locks
                pass
        truncate_torn_line(path)
        self.delay = delay
        self.pending: deque[Callable[[], list[str]]] = deque()
        self.last_write = time.monotonic()
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.error: Exception | None = None
        if delay:
            threading.Thread(
                target=self._write_overdue, name="paragrad-record", daemon=True
            ).start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        with self.lock:
            try:
                if self.pending or self.error is not None:
                    self.flush()
            except Exception:
                if error is None:  # otherwise the error of the block comes first
                    raise
            finally:
                # a full disk was reported when the line was written
                with contextlib.suppress(OSError):
                    self.file.close()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self.origin

    def write_line(self, kind: str, **fields: Any) -> None:
        """Write one line.

        Args:
            kind: The kind of the line.
            **fields: Its other fields.
        """
        self.write_encoded([encode_json({"kind": kind, **fields})])

    def write_encoded(self, lines: list[str]) -> None:
        """Write encoded lines in one call, after those that wait.

        Args:
            lines: The lines.

        Raises:
            OSError: The file cannot be written; the error has its name.
        """
        with self.lock:
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            waiting: list[str] = []
            while self.pending:
                waiting += self.pending.popleft()()
            self.last_write = time.monotonic()
            with add_file_name(self.file.name):
                self.file.write("\n".join([*waiting, *lines, ""]))
                self.file.flush()

    def write_later(self, encode: Callable[[], list[str]]) -> None:
        """Write lines soon.

        Args:
            encode: Returns the lines; it is called when they are written, in their order.

        Raises:
            OSError: The file cannot be written, now or a moment ago; the error has its name.
        """
        self.pending.append(encode)
        if self.error is not None or time.monotonic() - self.last_write >= self.delay:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait.

        Raises:
            OSError: As in `write_encoded`.
        """
        self.write_encoded([])

    def _write_overdue(self) -> None:
        """Write lines after which no other line comes for some time."""
        while not self.ended.wait(self.delay):
            if self.pending and time.monotonic() - self.last_write >= self.delay:
                with self.lock:
                    if self.ended.is_set():
                        return
                    try:
                        self.flush()
                    except Exception as error:
                        self.error = error  # for the next line


def truncate_torn_line(path: Path) -> None:
    """Remove a last line that was not written completely (full disk, killed process).

    Anything appended to it could not be read.

    Args:
        path: The file.
    """
    if not path.is_file() or not (size := path.stat().st_size):
        return
    with path.open("rb") as file:  # the last line is usually complete, and the file may be long
        file.seek(size - 1)
        torn = file.read() != b"\n"
    if torn:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def create_run_folder(parent: Path, name: str) -> Path:
    """Create a new folder for a run.

    Args:
        parent: The folder of all runs.
        name: The last part of the new folder's name, after the time.

    Returns:
        The folder.

    Raises:
        Refused: It cannot be created.
    """
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
    raise Refused(f"{parent} has too many runs of this second; give another folder with --runs")


def read_lines(path: Path, spans: bool = True) -> Iterator[Line]:
    """Read the lines of a file, as the table above describes them.

    A last line that was not written completely is left out.

    Args:
        path: The file.
        spans: Whether to read spans.

    Yields:
        The lines.
    """
    last_step: Line = {}
    span_names: list[Any] = []
    for line in _read_stored_lines(path, spans):
        if line["kind"] == "step":
            line = _convert_order({**last_step, **line})
            last_step = line
        if line["kind"] == "spans":
            span_names = line.get("spans", span_names)
            yield from _expand_spans(line, span_names)
        else:
            yield line


def _convert_order(line: Line) -> Line:
    """A step line with its `order` as a list of ranges; earlier versions wrote one range."""
    order = line.get("order")
    if not order or isinstance(order[0], list):
        return line
    return {**line, "order": [order] if order[0] < order[1] else []}


def _read_stored_lines(path: Path, spans: bool) -> Iterator[Line]:
    """The lines as they are stored, optionally without those of spans, which are most of a file."""
    if path.is_file():  # opening a FIFO would block
        for text in path.read_text(encoding="utf-8").splitlines():
            if not spans and text.startswith('{"kind":"span'):
                continue
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                return


def _expand_spans(line: Line, named: list[Any]) -> list[Line]:
    """A line for each span of a step, in order of their start."""
    micros = iter(line["micros"])
    lines = [
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
    return sorted(lines, key=lambda span: span["start"])


class Record:
    """The record of a run, read from its folder.

    Attributes:
        folder: The folder.

        run_lines: The lines of the run itself (run.jsonl).

        header: The first line of the run.

        end: The line of its end, or None.

        ranks: The lines of each rank.

        difference: The line of its difference from serial, or None.

        epochs: The epochs that the run itself wrote.

        choices: The choices that the run itself wrote.
    """

    def __init__(self, folder: Path, spans: bool = True) -> None:
        """Read the record.

        Args:
            folder: The folder of the run.
            spans: Whether to read spans, which are half of a record.

        Raises:
            Refused: A later version of paragrad wrote the record.
        """
        self.folder = folder
        self.run_lines = list(read_lines(folder / "run.jsonl"))
        lines = self.run_lines
        self.header: Line = next((line for line in lines if line["kind"] == "run"), {})
        if self.header.get("schema", RECORD_SCHEMA) > RECORD_SCHEMA:
            raise Refused(
                f"{folder} is a record of version {self.header['schema']}, but this paragrad reads "
                f"versions up to {RECORD_SCHEMA}; read it with paragrad "
                f"{dict(self.header.get('machine') or {}).get('paragrad', 'of its time')}, which "
                "wrote it"
            )
        self.end: Line | None = next((line for line in lines if line["kind"] == "end"), None)
        files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
        self.ranks: list[list[Line]] = [list(read_lines(path, spans)) for path in files]
        self.difference: Line | None = next(
            (line for line in lines if line["kind"] == "difference"), None
        )
        self.epochs = [line for line in lines if line["kind"] == "epoch"]
        self.choices = [line for line in lines if line["kind"] == "choice"]

    @property
    def finished(self) -> bool:
        """Whether the run ended normally."""
        return self.end is not None and self.end["status"] == "finished"

    def select_lines(self, kind: str, rank: int = 0) -> list[Line]:
        """Return the lines of a kind.

        If no rank is the first (workers step independently), epochs are lines of the run itself.

        Args:
            kind: The kind.
            rank: The rank that wrote them.

        Returns:
            The lines.
        """
        if kind == "epoch" and self.epochs:
            return self.epochs
        return (
            [line for line in self.ranks[rank] if line["kind"] == kind]
            if rank < len(self.ranks)
            else []
        )

    @property
    def has_independent_workers(self) -> bool:
        """Whether workers step independently of each other."""
        return bool(self.rounds or self.header.get("hands_out"))

    @property
    def rounds(self) -> Line | None:
        """The header's entry about rounds, if clients train in rounds."""
        return self.header.get("rounds")

    def count_passed_samples(self, epoch: int) -> int:
        """Count the samples of all epochs up to one; with rounds, those of this run only.

        Args:
            epoch: The last epoch.

        Returns:
            The number of samples.
        """
        lines = (line for line in self.select_lines("epoch") if line["epoch"] <= epoch)
        return (
            count_client_samples(lines, self.rounds["passes"])
            if self.rounds
            else (epoch + 1) * int(self.header["job"]["samples"])
        )

    def group_step_lines(self) -> list[list[Line]]:
        """Group the step lines of all ranks by step, for steps that each worker finished.

        If shares are handed out by a queue, a group has a line for each share; a batch with few
        samples has fewer shares. With rounds, a group has the line of a client.

        Returns:
            For each step its lines.
        """
        by_step: dict[int, list[Line]] = {}
        for lines in self.ranks:
            for line in lines:
                if line["kind"] == "step":
                    by_step.setdefault(line["step"], []).append(line)
        job = self.header.get("job", {})
        workers = self.header.get("workers") or len(self.ranks)
        samples = job.get("samples", workers)
        batch = job.get("batch", workers)
        last = samples % batch or batch
        steps = -(-samples // batch)
        return [
            lines
            for step, lines in sorted(by_step.items())
            if self.rounds or len(lines) >= min(workers, last if (step + 1) % steps == 0 else batch)
        ]

    @property
    def losses(self) -> list[float]:
        """The mean loss of each global batch: summed over ranks, divided once; 0 without weight."""
        return [
            sum(line["loss"][0] for line in lines) / (sum(line["loss"][1] for line in lines) or 1.0)
            for lines in self.group_step_lines()
        ]

    @property
    def overflowed_steps(self) -> tuple[int, ...]:
        """The steps without an update, because a gradient overflowed in float16."""
        return tuple(
            int(line["numbers"]["step"])
            for line in self.select_lines("event")
            if line["name"] == "overflow"
        )

    @property
    def test(self) -> float | None:
        """The test metric after the last epoch with a test."""
        values = [line["test"]["value"] for line in self.select_lines("epoch") if line["test"]]
        return values[-1] if values else None

    def list_step_seconds(self, first: int) -> list[float]:
        """List the durations of steps.

        They are those of the slowest rank, by median. If workers step independently, they are those
        of all workers together.

        Args:
            first: The first step to include, counted in this run. If there are no more steps than
                that, all are included.

        Returns:
            The seconds of each step.
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
        """The median step of the slowest rank, or of all workers together."""
        # the first step warms up
        return median(seconds) if (seconds := self.list_step_seconds(1)) else None

    @property
    def sent_per_step(self) -> dict[str, Line]:
        """Bytes by kind, of the rank and step that sent most: {kind: {bytes, computed}}.

        Bytes that are not sent in each step are averaged over all steps.
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
            EARLIER_KINDS.get(kind, kind): sent
            if times[kind] == len(steps)
            else sent | {"bytes": round(sent["bytes"] * times[kind] / len(steps))}
            for kind, sent in most.items()
        }

    @property
    def cpu(self) -> list[Line]:
        """The CPU use of each rank that reached the end of its training (`record.cpu_load`)."""
        return [line for rank in range(len(self.ranks)) for line in self.select_lines("cpu", rank)]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind, each of the rank with most of it; empty if no rank reached its end."""
        most: dict[str, int] = {}
        for rank in range(len(self.ranks)):
            for line in self.select_lines("memory", rank):
                most |= {
                    kind: max(size, most.get(kind, 0))
                    for kind, size in line.items()
                    if kind != "kind"
                }
        return most

    @property
    def fullest(self) -> dict[str, int]:
        """Bytes by kind of the rank with the largest sum.

        What its process holds in addition (`resident`) is left out.
        """
        ranks = [
            {
                kind: kinds_held
                for kind, kinds_held in line.items()
                if kind not in ("kind", "resident")
            }
            for rank in range(len(self.ranks))
            for line in self.select_lines("memory", rank)
        ]
        return max(ranks, key=lambda kinds_held: sum(kinds_held.values()), default={})

    @property
    def planned_steps(self) -> int:
        """The number of steps in all epochs of the job."""
        job = self.header["job"]
        return (
            int(self.rounds["steps"])
            if self.rounds
            else int(job["epochs"] * -(-job["samples"] // job["batch"]))
        )

    def collect_step_lines(self) -> list[Line]:
        """Collect the step lines of all ranks.

        A resumed run starts with the lines of the earlier run, up to the checkpoint.

        Returns:
            The lines.
        """
        resumed = self.header.get("resumed")
        earlier_lines = list[Line]()
        # epochs of rounds are different epochs
        if resumed and not self.rounds and not (earlier := Record(Path(resumed["run"]))).rounds:
            earlier_lines = [
                line for line in earlier.collect_step_lines() if line["step"] < resumed["step"]
            ]
        return earlier_lines + [
            line for lines in self.ranks for line in lines if line["kind"] == "step"
        ]

    @property
    def sample_count(self) -> SampleCount:
        """How often each sample was used in the finished epochs.

        The positions that the ranks recorded are counted.
        """
        by_epoch: dict[int, list[Line]] = {}
        for line in self.collect_step_lines():
            by_epoch.setdefault(line["epoch"], []).append(line)
        if self.rounds:
            return count_round_samples(self.select_lines("epoch"), by_epoch, self.rounds["passes"])
        return count_epoch_samples(
            (line["epoch"] for line in self.select_lines("epoch")),
            by_epoch,
            self.header["job"]["samples"],
            self.header["job"].get("sampler", False),
        )
