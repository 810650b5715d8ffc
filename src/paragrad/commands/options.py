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
    str, typer.Argument(metavar="JOB", help="a built-in job, path/file.py[:name], or module:name")
]
StrategyOption = Annotated[str, typer.Option(help="such as 'data(2, reduce=ring)'")]
RunsOption = Annotated[
    Path, typer.Option(help="folder for the record of runs: some 250 bytes a step and rank")
]
DataOption = Annotated[
    Path | None,
    typer.Option(envvar="PARAGRAD_DATA", help="folder of data, for jobs that read files"),
]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda")]
BackendOption = Annotated[str, typer.Option(help="auto, shm, gloo or nccl")]
LoadersOption = Annotated[int, typer.Option(help="processes per rank that load samples ahead")]
UntilOption = Annotated[
    str | None,
    typer.Option(
        metavar="METRIC=VALUE", help="stop after the epoch that reaches it: accuracy=97.5"
    ),
]
BatchOption = Annotated[int | None, typer.Option(help="global batch size, instead of the job's")]
ScaleLrOption = Annotated[
    str | None,
    typer.Option(
        "--scale-lr",
        metavar="RULE",
        help="linear or sqrt: the learning rate grows with --batch, from the job's own",
    ),
]
WarmUpOption = Annotated[
    float | None, typer.Option("--warm-up", metavar="EPOCHS", help="in which --scale-lr gets there")
]
NoiseScaleOption = Annotated[
    int | None,
    typer.Option(
        "--noise-scale",
        metavar="STEPS",
        help="measure the gradient noise scale every so many steps",
    ),
]
EpochsOption = Annotated[int | None, typer.Option(help="epochs, instead of the job's")]
SeedOption = Annotated[int | None, typer.Option(help="seed, instead of the job's")]
MachineOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="what `paragrad measure` wrote of a machine")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="an argument of a built-in job"),
]
InjectFaultOption = Annotated[
    str | None, typer.Option(help=f"plant a bug in the exchange: {', '.join(FAULTS)}")
]
SkipFirstStepCheckOption = Annotated[
    bool,
    typer.Option(
        "--skip-first-step-check", help="compare no step with one worker's, and train what differs"
    ),
]
CheckOption = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="part of the run's time in which steps are compared with one worker's, such as 1% or "
        "0.01; a step that differs ends the run; 100%: every step; 0: none, not even the first",
    ),
]
SkipScheduleCheckOption = Annotated[
    bool,
    typer.Option("--skip-schedule-check", help="do not prove the schedule before the ranks start"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
SlowOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK=FACTOR",
        help="a rank that waits on purpose: 1=3x; random:0.2=3x: every one in a fifth of its steps",
    ),
]
PaceOption = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="that a step of an equal share takes at least"),
]
ListenOption = Annotated[
    str | None, typer.Option(metavar="HOST[:PORT]", help="where workers may join from other hosts")
]
AllowOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="of their public keys, with --listen")
]
TimeoutOption = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="that a rank waits for another")
]
