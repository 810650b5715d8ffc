"""A run as a trace in Chrome's format, which Perfetto (https://ui.perfetto.dev) opens.

Each rank is a process with three threads: its steps, its tasks within them, and the buckets that
are summed at the same time. An arrow shows each message.

Format: "Trace Event Format", Chromium. Complete events (ph X) are in microseconds; flow events are
s and f; names are metadata (M).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.record.record import Line, Record

Event = dict[str, Any]
# threads of a rank
STEPS = 0
TASKS = 1
BUCKETS = 2
THREADS = {STEPS: "steps", TASKS: "tasks", BUCKETS: "exchange"}


def check_trace_path(path: Path) -> None:
    """Refuse a path where no trace can be written, by trying it.

    Args:
        path: The path of the trace.

    Raises:
        Refused: The file cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        (partial := _make_partial_path(path)).open("a").close()
        partial.unlink(missing_ok=True)  # under a launcher, all ranks try this
    except OSError as error:
        raise Refused(
            f"--trace {path}: {error.strerror}; give a file in a folder that exists and can be "
            "written"
        ) from None


def write_trace(record: Record, path: Path) -> None:
    """Write the trace of a run, completely or not at all.

    Args:
        record: The record of the run, read with its spans.
        path: The file to write.

    Raises:
        OSError: The file cannot be written; the error has its name.
    """
    partial = _make_partial_path(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            header = {
                name: record.header.get(name) for name in ("id", "strategy", "resolved", "backend")
            }
            file.write(
                f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(header)}, "traceEvents": ['
            )
            for number, event in enumerate(make_trace_events(record)):
                file.write(f"{',' if number else ''}\n{json.dumps(event, allow_nan=False)}")
            file.write("\n]}\n")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _make_partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def make_trace_events(record: Record) -> Iterator[Event]:
    """Make all events of a trace.

    Args:
        record: The record of the run, read with its spans.

    Yields:
        The events; `ts` is in microseconds since the start of the run.
    """
    arrows: dict[str, int] = {}
    for rank, lines in enumerate(record.ranks):
        host = next((f" on {line['host']}" for line in lines if line["kind"] == "cpu"), "")
        yield _make_metadata_event("process_name", rank, f"rank {rank}{host}")
        yield {**_make_metadata_event("process_sort_index", rank, ""), "args": {"sort_index": rank}}
        threads = set()
        for event in _make_rank_events(rank, lines, arrows):
            if event["tid"] not in threads:
                threads.add(event["tid"])
                yield _make_metadata_event("thread_name", rank, THREADS[event["tid"]], event["tid"])
            yield event


def _make_metadata_event(what: str, rank: int, name: str, thread: int = STEPS) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _make_rank_events(rank: int, lines: Iterable[Line], arrows: dict[str, int]) -> Iterator[Event]:
    """The events of one rank.

    The spans of a step come before its line. Those of a failed step have no line.
    """
    spans: list[Line] = []
    for line in lines:
        if line["kind"] == "span":
            spans.append(line)
        elif line["kind"] == "step":
            yield _make_slice_event(
                rank, STEPS, {**line, "name": f"step {line['step']}", "lane": "step"}
            )
            yield from _make_step_events(rank, spans, arrows)
            spans = []
        elif line["kind"] == "epoch":
            yield _make_slice_event(
                rank, STEPS, {**line, "name": f"epoch {line['epoch']}", "lane": "epoch"}
            )
    yield from _make_step_events(rank, spans, arrows)


def _make_step_events(rank: int, spans: list[Line], arrows: dict[str, int]) -> Iterator[Event]:
    tasks, buckets = separate_buckets(spans)
    for span in nest_spans(tasks):
        yield (event := _make_slice_event(rank, TASKS, span))
        yield from _make_flow_event(rank, event, arrows)
    for bucket, parts in buckets:
        yield _make_slice_event(rank, BUCKETS, bucket, **parts)


def separate_buckets(
    spans: Iterable[Line],
) -> tuple[list[Line], list[tuple[Line, dict[str, float]]]]:
    """Separate the tasks of a rank from its buckets, which another thread sums.

    Args:
        spans: The spans of one step.

    Returns:
        The tasks, and the buckets. A bucket is its whole span and the seconds of its parts by lane;
        for parts the record has durations, but no start times.
    """
    tasks: list[Line] = []
    buckets: list[tuple[Line, dict[str, float]]] = []
    for span in spans:
        if not span["name"].startswith("reduce "):
            tasks.append(span)
        elif span["lane"] == "send":
            buckets.append((span, {}))
        elif buckets:
            buckets[-1][1][f"seconds in {span['lane']}"] = span["seconds"]
    return tasks, buckets


def nest_spans(spans: Iterable[Line]) -> Iterator[Line]:
    """Make spans that follow one another or lie within one another.

    Recorded times are rounded to microseconds, and slices of a thread must not cross.

    Args:
        spans: The spans of one thread.

    Yields:
        The spans, in order of their start.
    """
    # the ends of the spans that may contain the next one
    open_: list[float] = []
    for span in sorted(spans, key=lambda span: (span["start"], -span["seconds"])):
        start = span["start"]
        end = span["start"] + span["seconds"]
        while open_ and open_[-1] <= start:
            open_.pop()
        if open_ and end > open_[-1]:
            crossed = open_[-1] - start
            if crossed < end - open_[-1]:  # most of it lies after the enclosing span
                start = open_.pop()
            else:
                end = open_[-1]
        open_.append(end)
        yield {**span, "start": start, "seconds": max(0.0, end - start)}


def _make_slice_event(rank: int, thread: int, line: Line, **more: Any) -> Event:
    details = {name: line[name] for name in ("step", "bytes") if line.get(name) is not None}
    return {
        "ph": "X",
        "name": line["name"],
        "cat": line["lane"],
        "pid": rank,
        "tid": thread,
        "ts": round(1e6 * line["start"], 3),
        "dur": round(1e6 * line["seconds"], 3),
        "args": {**details, **more},
    }


def _make_flow_event(rank: int, event: Event, arrows: dict[str, int]) -> Iterator[Event]:
    """One end of an arrow, from the posting of a message to its arrival; both have the same id."""
    side, (peer, _, slot) = event["name"][:1], event["name"][1:].partition(":")
    if (side, event["cat"]) not in ((">", "send"), ("<", "receive")):
        return
    way = f"{rank} {peer}" if side == ">" else f"{peer} {rank}"
    number = arrows.setdefault(f"{event['args']['step']} {way} {slot}", len(arrows))
    end = {"ph": "s"} if side == ">" else {"ph": "f", "bp": "e"}
    yield {
        **end,
        "name": slot,
        "cat": "message",
        "id": number,
        "pid": rank,
        "tid": TASKS,
        "ts": event["ts"] if side == ">" else event["ts"] + event["dur"],
    }
