"""What a comparison's page says in words: what was compared and when, what the columns mean,
how each row was run.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from paragrad.jobs.find_job import JOBS
from paragrad.record.record import Line, Record
from paragrad.report.comparison_table import cells, columns_of, held
from paragrad.report.results import TWIN, Results, Row
from paragrad.version import __version__


def made(table: Results) -> str:
    """When, and by what."""
    dates = sorted(
        record.header["date"] for record in table.records.values() if "date" in record.header
    )
    # none in version 1
    when = [f"{datetime.fromisoformat(dates[0]):%-d %B %Y, %H:%M} UTC"] if dates else []
    return ", ".join([*when, f"paragrad {_version(table)}"])


def _version(table: Results) -> str:
    return str(table.machine.get("paragrad", __version__))


def lead_of(table: Results) -> str:
    """What was compared, and how far from serial it came out, in a few sentences."""
    seeds = table.asked["seeds"]
    words = [
        f"{count(table)}{' and the rounding twin' if _twin(table) else ''}, "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}{' each' if len(table.rows) > 1 else ''}."
    ]
    named = columns_of(table).index("difference")
    checked = [row for row in table.rows if row.difference is not None and not row.reference]
    if checked:
        worst = max(checked, key=lambda row: row.difference or 0.0)
        words.append(
            f"Largest difference from serial, over 20 steps in float64: "
            f"{cells(table, worst)[named]}, "
            f"by {worst.strategy}."
        )
    failed = [row.strategy for row in table.rows if row.failure]
    if failed:
        words.append(f"Failed: {', '.join(failed)}.")
    return " ".join(words)


def _twin(table: Results) -> bool:
    return any(row.strategy == TWIN for row in table.rows)


def count(table: Results) -> str:
    """How many strategies, the twin not counted."""
    count = len(table.rows) - _twin(table)
    return "1 strategy" if count == 1 else f"{count} strategies"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def definitions(table: Results) -> list[tuple[str, str]]:
    """What the columns mean: (column, meaning)."""
    several = any(row.seeds > 1 for row in table.rows)
    told = {
        f"test {table.metric}": "the metric on the test set after the last epoch"
        + (f"; mean ± standard deviation over {table.asked['seeds']} seeds" if several else ""),
        "ms/step": "median milliseconds per step of the slowest rank, or where workers step by "
        "themselves (asp, ssp, backup "
        "workers, clients) of all together; without the first step, which warms up"
        + ("; median over seeds" if several else "")
        + "; the charts over seconds take it for every step",
        "speed-up": f"milliseconds per step of serial with all {table.machine['cores']} threads, "
        f"divided by the strategy's",
        "over 1 thread": "the same, against serial with one thread",
        "sent/rank/step": "bytes of payload a rank hands to the wire in a step, by kind; of the "
        "rank and step that sent most",
        "memory": "bytes of parameters, gradients, optimizer state, activations (counted) and "
        "exchange, of the rank that holds "
        "most",
        "difference": "from serial, in float64 over 20 steps: the largest difference of any tensor "
        "(gradients, parameters, "
        "buffers), relative to the largest value in that tensor",
        "where largest": "the tensor with that difference",
        "parameters": "the first digits of a digest of the trained parameters: equal digests, "
        "equal bits",
    }
    if table.until:
        told = {
            f"seconds, epochs, samples to {table.until}": "to the end of the first epoch whose "
            "test reached the goal; seconds: its "
            "steps, each taking the ms/step; where "
            "workers step by themselves, by the clock (an epoch of clients is a round)"
            + ("; means over seeds" if several else ""),
            **told,
        }
    return list(told.items())


def ran(table: Results, row: Row) -> Line:
    """What a strategy was resolved to, on what it ran, and what was picked for it and why."""
    records = [table.records[run] for run in row.runs if run in table.records]
    header = records[0].header
    workers = header["workers"]
    threads = header["threads"]
    on = (
        f"{_many(workers, 'worker')}, {_many(threads, 'thread')}{' each' if workers > 1 else ''}"
        + f", on {header['device']}"
        + (f", over {header['backend']}" if header["backend"] else "")
    )
    picked = [*records[0].choices, *records[0].of("choice")]
    # that is of its process
    of_run = {kind: number for kind, number in row.memory.items() if kind != "resident"}
    return {
        "strategy": row.strategy,
        "resolved": row.resolved,
        "on": on,
        "choices": picked,
        "failure": row.failure,
        "memory": held(of_run),
        "seeds": ", ".join(str(record.header["seed"]) for record in records),
    }


def facts(table: Results) -> list[tuple[str, str]]:
    """Job, machine and versions: (name, value)."""
    job = table.header["job"]
    machine = table.machine
    given = ", ".join(f"{name}={value!r}" for name, value in job["arguments"].items())
    seeds = sorted(
        {
            record.header["seed"]
            for row in table.rows
            for run in row.runs
            if (record := table.records.get(run)) is not None
        }
    )
    return [
        ("job", f"{job['name']}({given})" if given else job["name"]),
        ("global batch", f"{job['batch']:,}"),
        ("epochs", f"{job['epochs']:,}" + (f", or until {table.until}" if table.until else "")),
        ("training samples", f"{job['samples']:,}"),
        ("trained parameters", f"{job['parameters']:,}"),
        ("number type", job["dtype"]),
        ("seeds", ", ".join(map(str, seeds))),
        ("machine", f"{machine['cores']} cores, {machine['cpu']}"),
        (
            "versions",
            f"torch {machine['torch']}, Python {machine['python']}, paragrad {_version(table)}",
        ),
    ]


def call(table: Results) -> str:
    """The Python call that made the comparison, where no command did."""
    header = table.header
    asked = table.asked
    job = header["job"]
    changes = {
        "batch": job["batch"],
        "epochs": job["epochs"],
        **({"seed": header["seed"]} if header["seed"] else {}),
    }
    if job["name"] in JOBS and job["arguments"]:
        dtype = "" if job["dtype"] == "float32" else f", dtype=torch.{job['dtype']}"
        words = "".join(f", {name}={value!r}" for name, value in job["arguments"].items())
        made = (
            f"paragrad.job({job['name']!r}{words}).replace("
            + ", ".join(f"{name}={value!r}" for name, value in changes.items())
            + dtype
            + ")"
        )
    else:
        made = "job"
    rows = [row for row in table.rows if row.strategy != TWIN]
    chosen = "; ".join(row.strategy for row in rows)
    more = {"seeds": asked["seeds"]} if asked["seeds"] > 1 else {}
    settings: dict[str, Any] = {
        **more,
        **({"twin": True} if _twin(table) else {}),
        **({"until": asked["until"]} if asked["until"] else {}),
        **({"device": header["device"]} if header["device"] != "cpu" else {}),
    }
    words = "".join(f", {name}={value!r}" for name, value in settings.items())
    return f"paragrad.compare({made}, {chosen!r}{words})"


def ends(table: Results) -> list[str]:
    """Why lines are shorter than the job's epochs: a sentence for those that ended alike."""
    found: dict[str, list[str]] = {}
    for row in table.rows:
        runs = [table.records[run] for run in row.runs if run in table.records]
        shortest = min(runs, key=lambda record: len(record.steps()), default=None)
        if shortest is not None and (made := len(shortest.steps())) < shortest.steps_planned:
            of = f" (seed {shortest.header['seed']})" if len(runs) > 1 else ""
            how = f"at step {made:,} of {shortest.steps_planned:,}: {_why(shortest, table.until)}."
            found.setdefault(how, []).append(row.strategy + of)
    return [
        f"{'All lines' if len(names) == len(table.rows) > 1 else ' and '.join(names)} "
        f"end{'s' if len(names) == 1 else ''} {how}"
        for how, names in found.items()
    ]


def _why(record: Record, until: str | None) -> str:
    end = record.end or {"status": "died", "error": None}
    settings = record.header.get("settings", {})
    if end["status"] == "finished":
        return (
            "so many steps were asked for" if "limit" in settings else f"the test reached {until}"
        )
    return {
        "stopped": "asked to stop (SIGTERM)",
        "interrupted": "interrupted (Ctrl-C)",
        "died": "killed, for its record has no end",
        "failed": f"failed: {end['error'] and end['error']['message']}",
    }[end["status"]]
