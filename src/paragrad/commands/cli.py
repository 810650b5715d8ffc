"""The commands of the command line; no logic.

A command imports what it alone needs inside its function. Importing torch takes two seconds;
`simulate` is done in less.
"""

from __future__ import annotations

import atexit
import codecs
import gc
import io
import itertools
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paragrad.commands.exit_codes import replace_unencodable, use_exit_codes
from paragrad.commands.options import (
    RENAMED_OPTIONS,
    AllowOption,
    BackendOption,
    BatchOption,
    CheckOption,
    DataOption,
    DeviceOption,
    EpochsOption,
    InjectFaultOption,
    JobArgument,
    JsonOption,
    ListenOption,
    LoadersOption,
    MachineOption,
    NoiseScaleOption,
    PaceOption,
    RunsOption,
    ScaleLrOption,
    SeedOption,
    SetOption,
    SkipFirstStepCheckOption,
    SkipScheduleCheckOption,
    SlowOption,
    StrategyOption,
    TimeoutOption,
    UntilOption,
    WarmUpOption,
)
from paragrad.errors import Interrupted, Refused
from paragrad.executors.machine import load_machine
from paragrad.planner.simulation import parse_bytes, parse_slow_rank
from paragrad.planner.simulation import simulate_exchange as simulated
from paragrad.report import simulation_report
from paragrad.report.progress import ProgressDisplay
from paragrad.runtime.launcher_env import count_cores
from paragrad.strategies.compressors import find_compressor
from paragrad.strategies.registry import refuse_unreadable_strategies
from paragrad.strategies.registry import strategy as read_strategy
from paragrad.version import __version__

if TYPE_CHECKING:
    from paragrad.jobs.job import Job

DEFAULT_STRATEGIES = (
    "serial; data(2); data(2, reduce=native); data(2, reduce=ring); data(2, reduce=ring_async); "
    "data(2, reduce=tree); data(2, reduce=butterfly)"
)

# groups of commands in --help
START = "Start with these"
HOSTS = "On several hosts"
COSTS = "What it costs"
LISTS = "What there is"

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"paragrad {__version__}")
        raise typer.Exit


@app.callback()
def handle_global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train one plain PyTorch model on many workers, and see that it was the same training."""


@app.command("new", rich_help_panel=START)
def run_new(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write: NAME.py.")],
) -> None:
    """Write a job file with comments, to start from."""
    from paragrad.commands.new_job import write_job_file

    with use_exit_codes():
        write_job_file(path)
        print(f"{path} is written; train it on two workers:")
        print(f"paragrad train {shlex.quote(str(path))} --strategy 'data(2)'")


@app.command("train", rich_help_panel=START)
def run_train(
    job: JobArgument,
    strategy: StrategyOption = "serial",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print shares, steps and resolved choices; train nothing."),
    ] = False,
    overlap: Annotated[bool, typer.Option(help="Exchange gradients while backward runs.")] = True,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="After the training, compare 20 steps with serial in float64.",
        ),
    ] = False,
    check: CheckOption = "1%",
    save: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Write a checkpoint every so many steps.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="best", help="Keep the checkpoint of the best test to the end."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Go on from a run's last checkpoint, or from RUN/checkpoint-N."
        ),
    ] = None,
    timeout: TimeoutOption = None,
    listen: ListenOption = None,
    allow: AllowOption = None,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write TensorBoard event files into the run's folder."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for Perfetto: what every rank did when."),
    ] = None,
    until: UntilOption = None,
    runs: RunsOption = Path("runs"),
    data: DataOption = None,
    device: DeviceOption = "cpu",
    backend: BackendOption = "auto",
    machine: MachineOption = None,
    loaders: LoadersOption = 0,
    slow: SlowOption = None,
    pace: PaceOption = None,
    batch: Annotated[
        str | None,
        typer.Option(help="The global batch size, in place of the job's; fit: by --memory."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What a rank may hold, with --batch fit.")
    ] = None,
    scale_lr: ScaleLrOption = None,
    warm_up: WarmUpOption = None,
    noise_scale: NoiseScaleOption = None,
    epochs: EpochsOption = None,
    seed: SeedOption = None,
    set_: SetOption = None,
    inject_fault: InjectFaultOption = None,
    skip_schedule_check: SkipScheduleCheckOption = False,
    skip_first_step_check: SkipFirstStepCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train JOB under one strategy. Ctrl-C or SIGTERM saves a checkpoint and ends it."""
    from paragrad.commands.train import train as trained
    from paragrad.report import summaries
    from paragrad.runtime.rendezvous import get_launched_rank
    from paragrad.trainer.settings import Settings
    from paragrad.validation.validate import validate_run

    with use_exit_codes():
        refuse_unreadable_strategies(strategy)
        chosen = _load_typed_job(
            job, set_, batch=batch, epochs=epochs, seed=seed, scale_lr=scale_lr, warm_up=warm_up
        )
        settings: dict[str, Any] = {
            "data": data,
            "device": device,
            "backend": backend,
            "overlap": overlap,
            "loaders": loaders,
            "save": save,
            "keep": keep,
            "resume": resume,
            "until": until,
            "tensorboard": tensorboard,
            "trace": trace,
            "inject_fault": inject_fault,
            "skip_schedule_check": skip_schedule_check,
            "skip_first_step_check": skip_first_step_check,
            "check": check,
            "machine": machine,
            "memory": memory,
            "slow": ",".join(slow) if slow else None,
            "pace": pace,
            "listen": listen,
            "allow": allow,
            "noise_scale": noise_scale,
            **({} if timeout is None else {"timeout": timeout}),
        }
        if dry_run:
            summaries.print_dry_run(validate_run(chosen, strategy, Settings(**settings)), as_json)
            raise typer.Exit
        try:
            with ProgressDisplay(Console(stderr=True)) as shown:
                run = trained(
                    chosen,
                    strategy,
                    runs=runs,
                    verify=verify,
                    progress=shown.track_run(strategy),
                    **settings,
                )
        except Interrupted as error:
            summaries.print_resume_hint(error.folder, sys.argv)
            raise
        if get_launched_rank() == 0:
            summaries.print_run(run, as_json, sys.argv)


@app.command("join", rich_help_panel=HOSTS)
def run_join(
    address: Annotated[
        str,
        typer.Argument(
            help="The address of a training that listens (train --listen): tcp://HOST:PORT."
        ),
    ],
    job: JobArgument,
    server_key: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The public key of the training: training.key of its folder."
        ),
    ],
    key: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The key of this host, made if there is none: ME.key_secret."
        ),
    ],
    threads: Annotated[
        int | None,
        typer.Option(help="The threads of this worker; without it, the cores of this host."),
    ] = None,
    timeout: TimeoutOption = None,
    data: DataOption = None,
    device: DeviceOption = "cpu",
    batch: BatchOption = None,
    scale_lr: ScaleLrOption = None,
    warm_up: WarmUpOption = None,
    seed: SeedOption = None,
    set_: SetOption = None,
) -> None:
    """Join a running training of the same JOB as one more worker. Ctrl-C leaves it."""
    from paragrad.commands.join_training import join_training as joined

    with use_exit_codes():
        number, done = joined(
            address,
            _load_typed_job(job, set_, batch=batch, seed=seed, scale_lr=scale_lr, warm_up=warm_up),
            server_key=server_key,
            key=key,
            threads=threads,
            data=data,
            device=device,
            **({} if timeout is None else {"timeout": timeout}),
        )
        print(
            f"worker {number}: "
            + (
                ", ".join(f"{what} {count}" for what, count in done.items())
                or "nothing was left to do"
            )
        )


@app.command("compare", rich_help_panel=START)
def run_compare(
    job: JobArgument,
    strategies: Annotated[
        str, typer.Option(help="The strategies, with ; between them.")
    ] = DEFAULT_STRATEGIES,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="COUNT", help="Train each strategy with so many seeds, for mean and spread."
        ),
    ] = 1,
    rounding_baseline: Annotated[
        bool,
        typer.Option(
            "--rounding-baseline", help="Also train serial with every batch in reverse order."
        ),
    ] = False,
    until: UntilOption = None,
    runs: RunsOption = Path("runs"),
    data: DataOption = None,
    device: DeviceOption = "cpu",
    backend: BackendOption = "auto",
    machine: MachineOption = None,
    loaders: LoadersOption = 0,
    slow: SlowOption = None,
    pace: PaceOption = None,
    batch: BatchOption = None,
    scale_lr: ScaleLrOption = None,
    warm_up: WarmUpOption = None,
    noise_scale: NoiseScaleOption = None,
    epochs: EpochsOption = None,
    seed: SeedOption = None,
    set_: SetOption = None,
    inject_fault: InjectFaultOption = None,
    skip_schedule_check: SkipScheduleCheckOption = False,
    skip_first_step_check: SkipFirstStepCheckOption = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Finish a comparison that ended early.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train JOB under several strategies, print one table, and draw page.html with its charts."""
    from paragrad.commands.compare import compare as compared
    from paragrad.report import summaries
    from paragrad.report.comparison_table import Table

    with use_exit_codes():
        refuse_unreadable_strategies(strategies)
        chosen = _load_typed_job(
            job, set_, batch=batch, epochs=epochs, seed=seed, scale_lr=scale_lr, warm_up=warm_up
        )
        interrupted: Interrupted | None = None
        with ProgressDisplay(Console(stderr=True)) as shown:
            try:
                result = compared(
                    chosen,
                    strategies,
                    runs=runs,
                    seeds=seeds,
                    rounding_baseline=rounding_baseline,
                    until=until,
                    data=data,
                    device=device,
                    backend=backend,
                    machine=machine,
                    loaders=loaders,
                    inject_fault=inject_fault,
                    skip_schedule_check=skip_schedule_check,
                    skip_first_step_check=skip_first_step_check,
                    resume=resume,
                    pace=pace,
                    slow=",".join(slow) if slow else None,
                    noise_scale=noise_scale,
                    progress=shown.track_run,
                    command=shlex.join(["paragrad", *sys.argv[1:]]),
                )
            except Interrupted as error:
                interrupted = error
                result = Table(error.folder)
        summaries.print_comparison(result, as_json, sys.argv, str(data) if data else None)
        if interrupted:
            raise interrupted
        if result.failed and result.ending["status"] != "stopped":
            raise typer.Exit(1)


@app.command("verify", rich_help_panel=START)
def run_verify(
    job: JobArgument,
    strategy: StrategyOption,
    runs: RunsOption = Path("runs"),
    data: DataOption = None,
    device: DeviceOption = "cpu",
    backend: BackendOption = "auto",
    batch: BatchOption = None,
    scale_lr: ScaleLrOption = None,
    warm_up: WarmUpOption = None,
    seed: SeedOption = None,
    set_: SetOption = None,
    inject_fault: InjectFaultOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a strategy against serial: 20 steps in float64, tensor by tensor, and a certificate."""
    from paragrad.commands.verify import verify as verified
    from paragrad.report import summaries

    with use_exit_codes():
        refuse_unreadable_strategies(strategy)
        chosen = _load_typed_job(
            job, set_, batch=batch, seed=seed, scale_lr=scale_lr, warm_up=warm_up
        )
        with ProgressDisplay(Console(stderr=True)) as shown:
            certificate = verified(
                chosen,
                strategy,
                runs=runs,
                data=data,
                device=device,
                backend=backend,
                inject_fault=inject_fault,
                progress=shown.track_run(f"verify {strategy}"),
            )
        summaries.print_certificate(certificate, as_json)
        if not certificate.same:
            raise typer.Exit(1)


JobFileOption = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="JOB",
        help="A job file that defines an all-reduce or a strategy of your own.",
    ),
]


@app.command("draw", rich_help_panel=START)
def run_draw(
    strategy: Annotated[
        str,
        typer.Argument(
            help="A strategy, such as 'data(4, reduce=ring)', or several, with ; between them."
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Draw the parts of this job, or an all-reduce that its file defines.",
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Draw the bytes that are alive, with --job.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a space-time diagram.")
    ] = None,
    data: DataOption = None,
    batch: BatchOption = None,
    set_: SetOption = None,
) -> None:
    """Draw what the ranks of a strategy do and send each other.

    With --job also the parts of its model, or the memory that they hold.
    """
    from paragrad.commands.draw import draw_strategies as drawn
    from paragrad.commands.memory import draw_memory

    with use_exit_codes():
        refuse_unreadable_strategies(strategy)
        with Console(stderr=True).status("drawing"):
            chosen = _load_typed_job(job, set_, batch=batch) if job else None
            if memory and chosen is None:
                raise Refused(
                    "--memory draws the bytes of a model's activations; give the job with --job JOB"
                )
            text = (
                draw_memory(strategy, chosen, svg, data)
                if memory and chosen
                else drawn(strategy, chosen, svg, data)
            )
        print(text)


@app.command("work", rich_help_panel=COSTS)
def run_work(
    job: JobArgument,
    data: DataOption = None,
    batch: BatchOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count work, depth and bytes of every layer of JOB in one step, with the parallelism."""
    from paragrad.commands.count_work import profile_job
    from paragrad.report.work_report import print_profile as show_work

    with use_exit_codes():
        show_work(profile_job(_load_typed_job(job, set_, batch=batch), data), as_json)


@app.command("simulate", rich_help_panel=COSTS)
def run_simulate(
    strategy: Annotated[
        str, typer.Argument(help="The strategy, such as 'data(4096, reduce=ring)'.")
    ],
    size: Annotated[
        str,
        typer.Option("--bytes", metavar="N", help="The size of the vector: 4096, 64KiB, 100MB."),
    ],
    machine: MachineOption = None,
    job: JobFileOption = None,
    link: Annotated[
        str | None, typer.Option(help="The link of the machine file: gloo or shm.")
    ] = None,
    inside: Annotated[
        str | None, typer.Option(help="The link among the ranks of a host, if it is another one.")
    ] = None,
    per_link: Annotated[
        int, typer.Option("--ranks-per-link", min=1, help="How many ranks share one link.")
    ] = 1,
    per_core: Annotated[
        int, typer.Option("--ranks-per-core", min=1, help="How many ranks share a core.")
    ] = 1,
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=FACTOR", help="Make a rank so many times slower."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write every message as a span.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the cost of one exchange of a strategy, also on thousands of ranks.

    By a clock and by formula, with the lower bounds.
    """
    with use_exit_codes():
        if job:
            _load_typed_job(job)
        if (compressor := find_compressor(chosen := read_strategy(strategy))) is not None:
            from paragrad.commands.compression_break_even import price_compression

            if inside or slow or timeline or per_link > 1 or per_core > 1:
                raise Refused(
                    f"{chosen} is priced by a formula, in which every rank has its own link and no "
                    "link is slow; leave out --inside, --slow, --timeline, --ranks-per-link and "
                    "--ranks-per-core"
                )
            simulation_report.print_compression_cost(
                price_compression(
                    chosen,
                    compressor,
                    parse_bytes(size),
                    load_machine(machine, count_cores()),
                    link,
                ),
                as_json,
            )
            return
        with ProgressDisplay(Console(stderr=True), transient=True) as shown:
            show = shown.track_run(f"simulate {strategy}", "message")
            result = simulated(
                chosen,
                parse_bytes(size),
                load_machine(machine, count_cores()),
                link=link,
                inside=inside,
                ranks_per_link=per_link,
                ranks_per_core=per_core,
                slow=tuple(map(parse_slow_rank, slow or ())),
                spans=timeline is not None,
                progress=lambda done, of: show({"step": done, "steps": of}),
            )
        simulation_report.print_simulation(result, as_json)
        if timeline is not None:
            simulation_report.write_timeline(result, timeline)


@app.command("measure", rich_help_panel=COSTS)
def run_measure(
    output: Annotated[Path, typer.Option(metavar="FILE", help="The machine file to write.")] = Path(
        "machine.json"
    ),
    backend: Annotated[
        str, typer.Option(help="The backend to measure: shm, gloo, or both.")
    ] = "both",
    interface: Annotated[
        str | None, typer.Option(help="The network interface of gloo; on one host, loopback.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: alpha, beta, gamma of its links, its memory and its arithmetic.

    Under torchrun it measures the link between hosts.
    """
    from paragrad.planner.link_measurement import measure_machine as measured

    with use_exit_codes():
        with Console(stderr=True).status("measuring"):
            measured_machine = measured(backend, interface)
        if measured_machine is not None:  # only rank 0 has the machine
            simulation_report.write_machine_file(measured_machine, output, as_json)


@app.command("jobs", rich_help_panel=LISTS)
def run_jobs(as_json: JsonOption = False) -> None:
    """List the built-in jobs."""
    from paragrad.jobs.find_job import JOBS
    from paragrad.report import summaries

    with use_exit_codes():
        summaries.print_jobs(JOBS, as_json)


@app.command("strategies", rich_help_panel=LISTS)
def run_strategies(job: JobFileOption = None, as_json: JsonOption = False) -> None:
    """List the strategies and algorithms, each with its source.

    With --job also those of its file.
    """
    from paragrad.report import summaries

    with use_exit_codes():
        if job:
            _load_typed_job(job)
        summaries.print_strategies(as_json)


def _load_typed_job(name: str, settings: list[str] | None = None, **changes: Any) -> Job:
    from paragrad.jobs.find_job import build_requested_job

    return build_requested_job(name, settings or [], **changes)


def run_command_line() -> None:
    """Run the command.

    Characters that the terminal cannot encode are replaced. All output is flushed.
    """
    codecs.register_error("spelled", replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spelled")
    # without this, the last garbage collection searches all of torch: half a second
    atexit.register(gc.freeze)
    for word in itertools.takewhile(lambda word: word != "--", sys.argv[1:]):
        option = word.partition("=")[0]
        if option in RENAMED_OPTIONS:
            print(f"paragrad: {option} is now called {RENAMED_OPTIONS[option]}", file=sys.stderr)
            sys.exit(2)
    if strategy_hint := _explain_positional_strategy(sys.argv[1:]):
        print(f"paragrad: {strategy_hint}", file=sys.stderr)
        sys.exit(2)
    app()


def _explain_positional_strategy(words: list[str]) -> str | None:
    """Explain where a strategy belongs if one stands behind the job; otherwise return None."""
    option = {"train": "--strategy", "verify": "--strategy", "compare": "--strategies"}.get(
        words[0] if words else ""
    )
    if not option or any(word.partition("=")[0] == option for word in words):
        return None
    for before, word in itertools.pairwise(words[1:]):
        if re.fullmatch(r"[\w*; ]+\(.*\).*", word) and not before.startswith("-"):
            return f"a strategy is given by {option}, such as {option} {shlex.quote(word)}"
    return None
