"""What commands print: summaries of runs, dry runs, certificates, lists of jobs and strategies."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from paragrad.record.record import Record
from paragrad.report.certificate import Certificate
from paragrad.report.comparison_table import (
    COMPUTED_NOTE,
    Table,
    format_memory_kinds,
    format_sent_bytes,
    print_table,
)
from paragrad.report.printing import print_facts, print_rows
from paragrad.report.run import Run, format_test_value
from paragrad.report.timing import measure_step_time
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.registry import Strategy, collect_all_reduces
from paragrad.strategies.shares import Division, split_micro_batches
from paragrad.trainer.checkpoint.checkpoint_files import list_checkpoint_folders, read_folder_step
from paragrad.validation.validate import ValidatedRun


def print_run(
    finished: Run, as_json: bool, typed: Sequence[str] = ("paragrad", "train", "JOB")
) -> None:
    """Print the summary of a run.

    Args:
        finished: The run.
        as_json: Whether to print JSON.
        typed: The command that made it, program first, as in sys.argv.
    """
    resume_command = (
        format_resume_command(typed, finished.folder, finished.header["settings"].get("data"))
        if finished.stopped
        else None
    )
    values = {**finished.to_json(), "go_on_with": resume_command}
    if as_json:
        print(json.dumps(values))
    else:
        print_facts(
            (name, value)
            for name, value in _describe_run(finished, values).items()
            if value is not None
        )


def _describe_run(finished: Run, found: Mapping[str, Any]) -> dict[str, Any]:
    """A run as facts for people; each number has its meaning and its unit."""
    seconds = found["seconds_per_step"]
    sent_bytes = format_sent_bytes(found["sent"])
    unit = finished.header["job"].get("unit", "")
    step_time = measure_step_time([finished])
    return {
        "strategy": found["strategy"],
        "resolved": found["resolved"],
        **{each["what"]: f"{each['picked']}: {each['because']}" for each in finished.choices},
        "of the checkpoint": "; ".join(
            f"{each['picked']}: {each['because']}"
            for each in finished.select_lines("choice")
            if each["what"] == "checkpoint"
        )
        or None,
        f"test {found['metric']}": None
        if found["test"] is None
        else f"{format_test_value(found['test'], unit)} {unit}".strip(),
        "best test": finished.best
        and f"{format_test_value(finished.best.value, unit)} {unit}".strip()
        + f" after epoch {finished.best.epoch + 1}: {finished.best.folder}",
        "loss of the last step (mean over its samples)": None
        if found["loss"] is None
        else f"{found['loss']:.4f}",
        f"time per step ({_describe_step_time(finished)})": None
        if seconds is None
        else f"{1e3 * seconds:.2f} ms",
        "other programs": f"kept {step_time.load.others:.1f} of {step_time.load.cores} cores "
        f"busy; do not trust the time per step"
        if step_time and step_time.load and step_time.crowded
        else None,
        "bytes sent per rank and step": sent_bytes
        + (f" (*: {COMPUTED_NOTE})" if "*" in sent_bytes else ""),
        "memory of a rank (the most that any holds)": format_memory_kinds(found["memory"]) or None,
        "sample count": str(finished.sample_count),
        "first step": found["first_step"],
        "compared with one worker": _describe_compared_steps(found),
        "what happened": summarize_events(found["events"]),
        "steps without an update": f"{found['skipped_steps']:,}: a gradient overflowed in float16"
        if found["skipped_steps"]
        else None,
        "gradient noise scale": describe_noise_scale(finished),
        f"difference from {found['baseline']} (relative, float64, 20 steps)": found["difference"]
        and f"{found['difference']:.1e}",
        "where largest": found["tensor"],
        "stopped": found["stopped_at"] and f"at step {found['stopped_at']}",
        "continue with": found["go_on_with"],
        "record": found["folder"],
        "trace": found["trace"] and f"{found['trace']}; open it at https://ui.perfetto.dev",
    }


def _describe_compared_steps(found: Mapping[str, Any]) -> str | None:
    steps, updates = found["compared_steps"], found["compared_updates"]
    if not steps:
        return None
    text = f"{steps:,} of {found['steps']:,} steps were compared: all the same"
    return text if updates == steps else f"{text} ({steps - updates:,} without their update)"


def describe_noise_scale(run: Run) -> str | None:
    """Describe the gradient noise scale, if the run measured it.

    Args:
        run: The run.

    Returns:
        The text, or None.
    """
    if not run.header["settings"].get("noise_scale"):
        return None
    if run.noise is None:
        return "not measured: no step had the gradients of a part and of the whole batch"
    if run.noise.scale is None:
        lost = (
            "the noise is too small compared with the gradient"
            if run.noise.trace < 0
            else "the gradient is too small compared with its noise"
        )
        return f"unknown: {lost} after {run.noise.count} measurements; measure more steps"
    return (
        f"{run.noise.scale:.4g}: a larger batch is hardly useful, and this batch is "
        f"{run.noise.batch:.4g} (in what the loss counts; smoothed over {run.noise.count} "
        "measurements)"
    )


def _describe_step_time(run: Record) -> str:
    if run.rounds:
        return "a batch of a client: median, of all workers together"
    return (
        "a batch of shares: median, of all workers together"
        if run.has_independent_workers
        else "median of the slowest rank"
    )


def summarize_events(events: Sequence[str]) -> str | None:
    """Show the first event, and how many more there are.

    Args:
        events: The messages.

    Returns:
        The text, or None without events.
    """
    return (
        None
        if not events
        else events[0] + (f"; and {len(events) - 1} more, in the record" if events[1:] else "")
    )


def print_comparison(found: Table, as_json: bool, typed: Sequence[str], data: str | None) -> None:
    """Print the table of a comparison, and how to finish it if it ended early.

    Args:
        found: The comparison.
        as_json: Whether to print JSON.
        typed: The command that made it, program first, as in sys.argv.
        data: The data folder, or None.
    """
    if found.records and as_json:
        print(json.dumps(found.to_json(), indent=1))
    elif found.records:
        print_table(found, Console())
    if found.ending["status"] != "finished" and found.missing:
        print(
            f"finish it with: {format_resume_command(typed, found.folder, data)}", file=sys.stderr
        )


def print_resume_hint(folder: Path, typed: Sequence[str]) -> None:
    """Print how to continue a run that was saved before Ctrl-C.

    Args:
        folder: The folder of the run.
        typed: The command that made it, program first, as in sys.argv.
    """
    if saved := list_checkpoint_folders(folder):
        data = Record(folder, spans=False).header.get("settings", {}).get("data")
        print(
            f"saved at step {read_folder_step(saved[0])}; continue with: "
            f"{format_resume_command(typed, folder, data)}",
            file=sys.stderr,
        )


def format_resume_command(typed: Sequence[str], folder: Path, data: str | None) -> str:
    """Format the command that continues a run or a comparison: the typed one with --resume.

    Args:
        typed: The command as typed, program first, as in sys.argv.
        folder: The folder to continue.
        data: The data folder, or None.

    Returns:
        The command for a shell.
    """
    program, *words = typed
    remaining = iter(words)
    kept_words = []
    for word in remaining:
        if word == "--resume":
            next(remaining, None)
        elif not word.startswith("--resume="):
            kept_words.append(word)
    if data and not any(word.split("=")[0] == "--data" for word in kept_words):
        # the folder may come from the environment, which another shell may not have
        kept_words += ["--data", data]
    return shlex.join([*format_program_call(program), *kept_words, "--resume", str(folder)])


def format_program_call(program: str) -> list[str]:
    """Format how to call the program in sys.argv[0], by its name if the shell finds it.

    Args:
        program: The first entry of sys.argv.

    Returns:
        The words of the call.
    """
    # `python -m paragrad`, called directly or by a launcher
    if Path(program).name == "__main__.py":
        return [
            "python" if shutil.which("python") == sys.executable else sys.executable,
            "-m",
            "paragrad",
        ]
    return [
        Path(program).name
        if shutil.which(Path(program).name) == str(Path(program).absolute())
        else program
    ]


def print_certificate(found: Certificate, as_json: bool) -> None:
    """Print the difference of each tensor, the first difference beyond its bound, and the verdict.

    Args:
        found: The certificate.
        as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
        return
    print_rows(
        ("tensor", "difference", "rounding baseline"),
        [
            (name, f"{value:.1e}", f"{found.twins[name]:.1e}" if name in found.twins else "-")
            for name, value in found.tensors.items()
        ],
    )
    facts: dict[str, Any] = {
        "job": f"{found.job} ({found.digest[:12]})",
        "strategy": found.resolved,
        "injected fault": found.sabotage,
        "steps": found.steps,
        "failure": found.failure,
    }
    if found.first:
        facts["first difference"] = f"tensor {found.first[0]}, step {found.first[1]}"
    if found.difference is not None:
        facts["largest difference"] = f"{found.difference:.1e}" + (
            f" at {found.tensor}" if found.tensor else ""
        )
        facts["largest difference of the rounding baseline"] = f"{found.twin:.1e}"
    facts["chaotic"] = (
        found.chaotic
        and f"from step {found.chaotic} on, rounding decides the result, so steps are not compared"
    )
    facts["not in float64"], facts["cause"] = found.why, found.cause
    is_within_rounding = (
        found.same and found.difference is not None and found.difference > found.bound
    )
    reason = (
        f"beyond {found.bound:.0e}, but no more than rounding causes"
        if is_within_rounding
        else f"bound {found.bound:.0e}"
    )
    facts[f"same training as {found.reference}"] = (
        f"{'yes' if found.same else 'NO'} ({reason}, {found.dtype})"
    )
    facts["certificate"] = found.folder / "certificate.json"
    print_facts((name, value) for name, value in facts.items() if value is not None)


def print_dry_run(checked: ValidatedRun, as_json: bool) -> None:
    """Print what a run would do: shares, steps, resolved choices.

    Args:
        checked: The validated run.
        as_json: Whether to print JSON.
    """
    order = checked.inspection.order
    job = checked.job
    rounds = checked.rounds
    division = checked.resolved.division
    first = order.get_batch(0)
    last = order.get_batch(order.steps - 1)
    values: dict[str, Any] = {
        "job": job.name,
        "strategy": str(checked.requested),
        "resolved": str(checked.resolved),
        "workers": checked.size - checked.resolved.servers,
        "servers": checked.resolved.servers,
        "threads": checked.threads,
        "samples": order.samples,
        "batch": job.batch,
        "steps_per_epoch": order.steps,
        "epochs": job.epochs,
        "steps": rounds.round_starts[-1] if rounds else order.steps * job.epochs,
        "rounds": rounds and rounds.summary,
        "shares": _count_share_samples(first, division),
        "last_shares": _count_share_samples(last, division),
    }
    if as_json:
        print(json.dumps(values))
        return
    labels = {"threads": "threads per rank", "last_shares": "shares of the short last batch"}
    shown = values | {
        "strategy": None,
        "servers": values["servers"] or None,
        "rounds": rounds and str(rounds),
    }
    if rounds:  # with rounds, a batch belongs to one client and is not divided
        shown |= {"shares": None, "last_shares": None}
    elif values["shares"] == values["last_shares"]:
        shown["last_shares"] = None
    print_facts(
        (labels.get(name, name.replace("_", " ")), value)
        for name, value in shown.items()
        if value is not None
    )


def _count_share_samples(batch: range, division: Division) -> list[list[int]]:
    """For each rank, the number of samples in each of its micro-batches."""
    shares = split_micro_batches(batch, division)
    return [[len(piece[rank]) for piece in shares] for rank in range(len(division.shares))]


def print_jobs(known: dict[str, Callable[..., Any]], as_json: bool) -> None:
    """Print all built-in jobs: name, arguments, and one line of description.

    Args:
        known: The functions that create them, by name.
        as_json: Whether to print JSON.
    """
    rows = [
        (
            name,
            {
                argument.name: argument.default
                for argument in inspect.signature(make).parameters.values()
            },
            _get_first_doc_line(make),
        )
        for name, make in known.items()
    ]
    if as_json:
        print(
            json.dumps(
                [dict(zip(("job", "arguments", "what"), row, strict=True)) for row in rows],
                indent=1,
                default=str,
            )
        )
    else:
        print_rows(
            ("job", "arguments", "what it trains"),
            [
                (
                    name,
                    ", ".join(f"{argument}={value}" for argument, value in arguments.items()),
                    what,
                )
                for name, arguments, what in rows
            ],
        )


def print_strategies(as_json: bool) -> None:
    """Print all strategies, all-reduces and compressors: name, and one line with the source.

    Args:
        as_json: Whether to print JSON.
    """
    rows = [
        (kind, cls.name, _get_first_doc_line(cls))
        for kind, classes in (
            ("strategy", Strategy.members),
            ("reduce", collect_all_reduces()),
            ("compress", Compressor.members),
        )
        for cls in classes.values()
    ]
    if as_json:
        print(
            json.dumps(
                [dict(zip(("kind", "name", "what"), row, strict=True)) for row in rows], indent=1
            )
        )
    else:
        print_rows(("kind", "name", "what it is, and its source"), rows)


def _get_first_doc_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").splitlines()[0]
