"""Options that several verbs of the command line have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paragrad.schedules.fault_injection import SABOTAGES

JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="a built-in job, path/file.py[:name], or module:name")
]
Strategy = Annotated[str, typer.Option(help="such as 'data(2, reduce=ring)'")]
Runs = Annotated[
    Path, typer.Option(help="folder for the record of runs: some 250 bytes a step and rank")
]
Data = Annotated[
    Path | None,
    typer.Option(envvar="PARAGRAD_DATA", help="folder of data, for jobs that read files"),
]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Backend = Annotated[str, typer.Option(help="auto, shm, gloo or nccl")]
Loaders = Annotated[int, typer.Option(help="processes per rank that load samples ahead")]
Until = Annotated[
    str | None,
    typer.Option(
        metavar="METRIC=VALUE", help="stop after the epoch that reaches it: accuracy=97.5"
    ),
]
Batch = Annotated[int | None, typer.Option(help="global batch size, instead of the job's")]
ScaleLr = Annotated[
    str | None,
    typer.Option(
        "--scale-lr",
        metavar="RULE",
        help="linear or sqrt: the learning rate grows with --batch, from the job's own",
    ),
]
WarmUp = Annotated[
    float | None, typer.Option("--warm-up", metavar="EPOCHS", help="in which --scale-lr gets there")
]
NoiseScale = Annotated[
    int | None,
    typer.Option(
        "--noise-scale",
        metavar="STEPS",
        help="measure the gradient noise scale every so many steps",
    ),
]
Epochs = Annotated[int | None, typer.Option(help="epochs, instead of the job's")]
Seed = Annotated[int | None, typer.Option(help="seed, instead of the job's")]
Machine = Annotated[
    Path | None, typer.Option(metavar="FILE", help="what `paragrad measure` wrote of a machine")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="an argument of a built-in job"),
]
Sabotage = Annotated[
    str | None, typer.Option(help=f"plant a bug in the exchange: {', '.join(SABOTAGES)}")
]
Unchecked = Annotated[
    bool, typer.Option("--unchecked", help="do not compare the first step with one worker's")
]
Unproved = Annotated[
    bool, typer.Option("--unproved", help="do not prove the schedule before the ranks start")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK=FACTOR",
        help="a rank that waits on purpose: 1=3x; random:0.2=3x: every one in a fifth of its steps",
    ),
]
Pace = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="that a step of an equal share takes at least"),
]
Listen = Annotated[
    str | None, typer.Option(metavar="HOST[:PORT]", help="where workers may join from other hosts")
]
Allow = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="of their public keys, with --listen")
]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="that a rank waits for another")
]
