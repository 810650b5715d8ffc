"""The verbs of the command line; no logic."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paragrad.comparison import compare as compared
from paragrad.errors import RankFailed, Refused
from paragrad.job import Job
from paragrad.jobs import JOBS, find
from paragrad.report import listing, table
from paragrad.report.progress import Shown
from paragrad.strategy import strategy as read_strategy
from paragrad.training import admitted
from paragrad.training import train as trained
from paragrad.world import launched_rank, launched_size

DIGITS = "serial; data(2, reduce=native); data(2, reduce=ring); data(2, reduce=ring_async); data(2, reduce=tree); " \
         "data(2, reduce=butterfly)"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Train one plain PyTorch model on many workers, and see that it was the same training.")

JobName = Annotated[str, typer.Argument(metavar="JOB", help="a built-in job, path/file.py, or module:attribute")]
Runs = Annotated[Path, typer.Option(help="folder for the record of runs")]
Data = Annotated[Path | None, typer.Option(envvar="PARAGRAD_DATA", help="folder of data, for jobs that read files")]
Batch = Annotated[int | None, typer.Option(help="global batch size, instead of the job's")]
Epochs = Annotated[int | None, typer.Option(help="epochs, instead of the job's")]
Seed = Annotated[int | None, typer.Option(help="seed, instead of the job's")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="an argument of a built-in job")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


@app.command()
def train(job: JobName, strategy: Annotated[str, typer.Option(help="such as 'data(2, reduce=ring)'")] = "serial",
          dry_run: Annotated[bool, typer.Option("--dry-run", help="print shares, steps and resolved choices")] = False,
          overlap: Annotated[bool, typer.Option(help="exchange gradients while backward runs")] = True,
          check: Annotated[bool, typer.Option(help="also compare with serial: float64, 20 steps")] = True,
          runs: Runs = Path("runs"), data: Data = None, batch: Batch = None, epochs: Epochs = None, seed: Seed = None,
          set_: Set = None, as_json: Json = False) -> None:
    """Train JOB under one strategy."""
    with answering():
        chosen = _job(job, set_, batch, epochs, seed)
        checked = admitted(chosen, strategy, data)
        if dry_run:
            listing.dry_run(checked, as_json)
            raise typer.Exit
        with Shown(Console(stderr=True)) as shown:
            run = trained(chosen, strategy, runs=runs, data=data, overlap=overlap, check=check and launched_size() is None,
                          progress=shown.run(strategy))
        if launched_rank() == 0:
            listing.run(run, as_json)


@app.command()
def compare(job: JobName, strategies: Annotated[str, typer.Option(help="separated by ;")] = DIGITS, runs: Runs = Path("runs"),
            data: Data = None, batch: Batch = None, epochs: Epochs = None, seed: Seed = None, set_: Set = None,
            as_json: Json = False) -> None:
    """Train JOB under several strategies and print one table."""
    with answering():
        chosen = _job(job, set_, batch, epochs, seed)
        with Shown(Console(stderr=True)) as shown:
            result = compared(chosen, strategies, runs=runs, data=data, progress=shown.run)
        if as_json:
            print(json.dumps(result.as_json(), indent=1))
        else:
            table.show(result, Console())
        if result.failed:
            raise typer.Exit(1)


@app.command()
def draw(strategy: Annotated[str, typer.Argument(help="such as 'data(4, reduce=ring)'")]) -> None:
    """Draw what the ranks of a strategy send each other."""
    with answering():
        listing.draw(read_strategy(strategy))


@app.command()
def jobs(as_json: Json = False) -> None:
    """List the built-in jobs."""
    with answering():
        listing.jobs(JOBS, as_json)


@app.command()
def strategies(as_json: Json = False) -> None:
    """List the strategies and algorithms, each with its source."""
    with answering():
        listing.strategies(as_json)


def _job(name: str, settings: list[str] | None, batch: int | None, epochs: int | None, seed: int | None) -> Job:
    pairs = [setting.partition("=") for setting in settings or []]
    for name_, sign, _ in pairs:
        if not sign:
            raise Refused(f"--set {name_}: write --set name=value")
    changes = {key: value for key, value in (("batch", batch), ("epochs", epochs), ("seed", seed)) if value is not None}
    return find(name, {name_: value for name_, _, value in pairs}).replace(**changes)


@contextmanager
def answering() -> Iterator[None]:
    """Exit codes: 0 done, 1 a run failed, 2 refused, 130 stopped; the message last."""
    try:
        yield
    except Refused as error:
        print(f"paragrad: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RankFailed as error:
        print(f"{error.traceback}\nparagrad: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("paragrad: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:                     # the reader of a pipe has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    app()
