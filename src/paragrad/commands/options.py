"""Options that several commands of the command line have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paragrad.schedules.fault_injection import FAULTS

# options with another name until version 0.1 -> their names now
RENAMED_OPTIONS = {
    "--sabotage": "--inject-fault",
    "--unproved": "--skip-schedule-check",
    "--unchecked": "--skip-first-step-check",
    "--twin": "--rounding-baseline",
}

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="A built-in job, path/file.py[:name], or module:name.")
]
StrategyOption = Annotated[str, typer.Option(help="How to train, such as 'data(2, reduce=ring)'.")]
RunsOption = Annotated[
    Path, typer.Option(help="The folder for records of runs: some 250 bytes a step and rank.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(envvar="PARAGRAD_DATA", help="The folder from which jobs read their data."),
]
DeviceOption = Annotated[str, typer.Option(help="Where the tensors are: cpu or cuda.")]
BackendOption = Annotated[
    str, typer.Option(help="What carries messages between ranks: auto, shm, gloo or nccl.")
]
LoadersOption = Annotated[int, typer.Option(help="How many processes per rank load samples ahead.")]
UntilOption = Annotated[
    str | None,
    typer.Option(
        metavar="METRIC=VALUE",
        help="Stop after the epoch whose test reaches this, such as accuracy=97.5.",
    ),
]
BatchOption = Annotated[
    int | None, typer.Option(help="The global batch size, in place of the job's.")
]
ScaleLrOption = Annotated[
    str | None,
    typer.Option(
        "--scale-lr",
        metavar="RULE",
        help="Scale the learning rate with --batch, from the job's own batch: linear or sqrt.",
    ),
]
WarmUpOption = Annotated[
    float | None,
    typer.Option(
        "--warm-up", metavar="EPOCHS", help="Reach the rate of --scale-lr over so many epochs."
    ),
]
NoiseScaleOption = Annotated[
    int | None,
    typer.Option(
        "--noise-scale",
        metavar="STEPS",
        help="Measure the gradient noise scale every so many steps.",
    ),
]
EpochsOption = Annotated[
    int | None, typer.Option(help="The number of epochs, in place of the job's.")
]
SeedOption = Annotated[int | None, typer.Option(help="The seed, in place of the job's.")]
MachineOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A machine file, which `paragrad measure` writes."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set an argument of a built-in job."),
]
InjectFaultOption = Annotated[
    str | None, typer.Option(help=f"Plant a fault in the exchange: {', '.join(FAULTS)}.")
]
SkipFirstStepCheckOption = Annotated[
    bool,
    typer.Option(
        "--skip-first-step-check",
        help="Compare no step with one worker's, and train even if steps differ.",
    ),
]
CheckOption = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Compare steps with one worker's in this part of the run's time: 1% or 0.01. A step "
        "that differs ends the run. 100%: every step; 0: no step.",
    ),
]
SkipScheduleCheckOption = Annotated[
    bool,
    typer.Option("--skip-schedule-check", help="Do not prove the schedule before the ranks start."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]
SlowOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK=FACTOR",
        help="Let a rank wait on purpose: 1=3x; random:0.2=3x: each in a fifth of its steps.",
    ),
]
PaceOption = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="The least time of a step over an equal share."),
]
ListenOption = Annotated[
    str | None,
    typer.Option(metavar="HOST[:PORT]", help="Let workers join at this address from other hosts."),
]
AllowOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="The folder of the public keys of workers that may join, with --listen.",
    ),
]
TimeoutOption = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="How long a rank waits for another one.")
]
