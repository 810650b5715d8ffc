"""The texts of a comparison's page: what was compared, what columns mean, how rows were run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from paragrad.jobs.find_job import JOBS
from paragrad.loops.plain_pytorch import PLAIN_PYTORCH
from paragrad.record.record import ENDED_EARLY, Line, Record
from paragrad.report.comparison_table import (
    format_cells,
    format_memory_kinds,
    list_columns,
    list_other_baselines,
)
from paragrad.report.results import ROUNDING_BASELINE, ComparisonResults, ComparisonRow
from paragrad.version import __version__


def describe_creation(table: ComparisonResults) -> str:
    """Describe when the comparison was made, and by which version.

    Args:
        table: The comparison.

    Returns:
        The text.
    """
    dates = sorted(
        record.header["date"] for record in table.records.values() if "date" in record.header
    )
    # records of version 1 have no date
    when = [f"{datetime.fromisoformat(dates[0]):%-d %B %Y, %H:%M} UTC"] if dates else []
    return ", ".join([*when, f"paragrad {_get_paragrad_version(table)}"])


def _get_paragrad_version(table: ComparisonResults) -> str:
    return str(table.machine.get("paragrad", __version__))


def write_lead(table: ComparisonResults) -> str:
    """Write the first sentences of the page: what was compared, and the largest difference.

    Args:
        table: The comparison.

    Returns:
        The text.
    """
    seeds = table.comparison_line["seeds"]
    sentences = [
        f"{count_strategies(table)}"
        f"{' and the rounding baseline' if _has_rounding_baseline(table) else ''}, "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}{' each' if len(table.rows) > 1 else ''}."
    ]
    difference_column = list_columns(table).index("difference")
    compared_rows = [row for row in table.rows if row.difference is not None and not row.reference]
    if compared_rows:
        worst = max(compared_rows, key=lambda row: row.difference or 0.0)
        sentences.append(
            f"Largest difference from {worst.baseline} over 20 steps in float64: "
            f"{format_cells(table, worst)[difference_column]}, under {worst.strategy}."
        )
    failed = [row.strategy for row in table.rows if row.failure]
    if failed:
        sentences.append(f"Failed: {', '.join(failed)}.")
    return " ".join(sentences)


def _has_rounding_baseline(table: ComparisonResults) -> bool:
    return any(row.strategy == ROUNDING_BASELINE for row in table.rows)


def count_strategies(table: ComparisonResults) -> str:
    """Count the strategies without the rounding baseline, as text.

    Args:
        table: The comparison.

    Returns:
        Such as `2 strategies`.
    """
    count = len(table.rows) - _has_rounding_baseline(table)
    return "1 strategy" if count == 1 else f"{count} strategies"


def _name_speed_baseline(table: ComparisonResults) -> str:
    return "serial" if table.plain_time is None else f"a {PLAIN_PYTORCH}"


def _format_count(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def define_columns(table: ComparisonResults) -> list[tuple[str, str]]:
    """Explain the columns of the table.

    Args:
        table: The comparison.

    Returns:
        (column, meaning).
    """
    has_several_seeds = any(row.seeds > 1 for row in table.rows)
    meanings = {
        f"test {table.metric}": "the metric on the test set after the last epoch"
        + (
            f"; mean ± standard deviation over {table.comparison_line['seeds']} seeds"
            if has_several_seeds
            else ""
        ),
        "ms/step": "median milliseconds of a step, of the slowest rank, without the first step; if "
        "workers step independently (asp, ssp, backup workers, clients), of all workers together"
        + ("; median over seeds" if has_several_seeds else "")
        + "; the charts over seconds use this value for every step",
        "speed-up": f"milliseconds per step of {_name_speed_baseline(table)} with all "
        f"{table.machine['cores']} threads, divided by the strategy's",
        "over 1 thread": "the same, compared with serial with one thread",
        "sent/rank/step": "bytes of payload that a rank sends in a step, by kind; of the rank "
        "and step that sent most",
        "memory": "bytes of parameters, gradients, optimizer state, activations (counted) and "
        "exchange, of the rank that holds most",
        "difference": "from serial, in float64 over 20 steps: the largest difference of any tensor "
        "(gradients, parameters, buffers), relative to the largest value in that tensor"
        + "".join(f"; {each}" for each in list_other_baselines(table)),
        "where largest": "the tensor with that difference",
        "parameters": "the first digits of a digest of the trained parameters; equal digests "
        "mean equal bits",
    }
    if table.until:
        meanings = {
            f"seconds, epochs, samples to {table.until}": "until the end of the first epoch with a "
            "test that reached the goal; seconds: the number of steps times ms/step, or the "
            "measured time if workers step independently; an epoch of clients is a round"
            + ("; means over seeds" if has_several_seeds else ""),
            **meanings,
        }
    return list(meanings.items())


def describe_row_runs(table: ComparisonResults, row: ComparisonRow) -> Line:
    """Describe how the runs of a row were made.

    Args:
        table: The comparison.
        row: The row.

    Returns:
        The resolved strategy, workers and device, automatic choices with their reasons, failure,
        memory and seeds.
    """
    records = [table.records[run] for run in row.runs if run in table.records]
    header = records[0].header
    workers = header["workers"]
    threads = header["threads"]
    resources = (
        f"{_format_count(workers, 'worker')}, "
        f"{_format_count(threads, 'thread')}{' each' if workers > 1 else ''}"
        + f", on {header['device']}"
        + (f", over {header['backend']}" if header["backend"] else "")
    )
    choices = [*records[0].choices, *records[0].select_lines("choice")]
    # `resident` belongs to the process, not to the run
    training_memory = {kind: number for kind, number in row.memory.items() if kind != "resident"}
    return {
        "strategy": row.strategy,
        "resolved": row.resolved,
        "on": resources,
        "choices": choices,
        "failure": row.failure,
        "memory": format_memory_kinds(training_memory),
        "seeds": ", ".join(str(record.header["seed"]) for record in records),
    }


def list_job_facts(table: ComparisonResults) -> list[tuple[str, str]]:
    """List the facts about job, machine and versions.

    Args:
        table: The comparison.

    Returns:
        (name, value).
    """
    job = table.header["job"]
    machine = table.machine
    arguments = ", ".join(f"{name}={value!r}" for name, value in job["arguments"].items())
    seeds = sorted(
        {
            record.header["seed"]
            for row in table.rows
            for run in row.runs
            if (record := table.records.get(run)) is not None
        }
    )
    return [
        ("job", f"{job['name']}({arguments})" if arguments else job["name"]),
        ("global batch", f"{job['batch']:,}"),
        ("epochs", f"{job['epochs']:,}" + (f", or until {table.until}" if table.until else "")),
        ("training samples", f"{job['samples']:,}"),
        ("trained parameters", f"{job['parameters']:,}"),
        ("number type", job["dtype"]),
        ("seeds", ", ".join(map(str, seeds))),
        ("machine", f"{machine['cores']} cores, {machine['cpu']}"),
        (
            "versions",
            f"torch {machine['torch']}, Python {machine['python']}, paragrad "
            f"{_get_paragrad_version(table)}",
        ),
    ]


def format_compare_call(table: ComparisonResults) -> str:
    """Format the Python call that made the comparison, if no command did.

    Args:
        table: The comparison.

    Returns:
        The call.
    """
    header = table.header
    request = table.comparison_line
    job = header["job"]
    changes = {
        "batch": job["batch"],
        "epochs": job["epochs"],
        **({"seed": header["seed"]} if header["seed"] else {}),
    }
    if job["name"] in JOBS and job["arguments"]:
        dtype = "" if job["dtype"] == "float32" else f", dtype=torch.{job['dtype']}"
        words = "".join(f", {name}={value!r}" for name, value in job["arguments"].items())
        job_call = (
            f"paragrad.job({job['name']!r}{words}).replace("
            + ", ".join(f"{name}={value!r}" for name, value in changes.items())
            + dtype
            + ")"
        )
    else:
        job_call = "job"
    rows = [row for row in table.rows if row.strategy != ROUNDING_BASELINE]
    chosen = "; ".join(row.strategy for row in rows)
    seeds_argument = {"seeds": request["seeds"]} if request["seeds"] > 1 else {}
    settings: dict[str, Any] = {
        **seeds_argument,
        **({"rounding_baseline": True} if _has_rounding_baseline(table) else {}),
        **({"until": request["until"]} if request["until"] else {}),
        **({"device": header["device"]} if header["device"] != "cpu" else {}),
    }
    words = "".join(f", {name}={value!r}" for name, value in settings.items())
    return f"paragrad.compare({job_call}, {chosen!r}{words})"


def describe_early_ends(table: ComparisonResults) -> list[str]:
    """Describe why lines end before the job's epochs do; equal reasons share a sentence.

    Args:
        table: The comparison.

    Returns:
        The sentences.
    """
    names_by_reason: dict[str, list[str]] = {}
    for row in table.rows:
        runs = [table.records[run] for run in row.runs if run in table.records]
        shortest = min(runs, key=lambda record: len(record.group_step_lines()), default=None)
        if (
            shortest is not None
            and (steps := len(shortest.group_step_lines())) < shortest.planned_steps
        ):
            suffix = f" (seed {shortest.header['seed']})" if len(runs) > 1 else ""
            reason = (
                f"at step {steps:,} of {shortest.planned_steps:,}: "
                f"{_explain_end(shortest, table.until)}."
            )
            names_by_reason.setdefault(reason, []).append(row.strategy + suffix)
    return [
        f"{'All lines' if len(names) == len(table.rows) > 1 else ' and '.join(names)} "
        f"end{'s' if len(names) == 1 else ''} {reason}"
        for reason, names in names_by_reason.items()
    ]


def _explain_end(record: Record, until: str | None) -> str:
    end = record.end or {"status": "died", "error": None}
    settings = record.header.get("settings", {})
    if end["status"] == "finished":
        events = [*record.select_lines("event"), *record.run_lines]
        for line in events:
            if line["kind"] == "event" and line["name"] == ENDED_EARLY:
                return str(line["message"])
        return (
            "the run was limited to this number of steps"
            if "limit" in settings
            else f"the test reached {until}"
        )
    return {
        "stopped": "asked to stop (SIGTERM)",
        "interrupted": "interrupted (Ctrl-C)",
        "died": "killed (its record has no end)",
        "failed": f"failed: {end['error'] and end['error']['message']}",
    }[end["status"]]
