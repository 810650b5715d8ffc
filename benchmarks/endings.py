"""Random endings of runs. Checks the message, the exit code and what is left behind.

    python benchmarks/endings.py --check --seed 1               # 60 endings, about ten minutes
    python benchmarks/endings.py --endings 0 --signals 40       # signals to runs that hang
    python benchmarks/endings.py --endings 0 --servers 20       # deaths of workers and servers
    python benchmarks/endings.py --seed 1 --only 17             # one ending of an earlier run

| endings | what is drawn |
|---|---|
| refusal | a row of docs/reference/refused.md |
| fault | an exception in a part of the job, a nan or a wrong shape, after some steps |
| kill | SIGKILL of a rank or of the launcher; SIGTERM or SIGINT, once or twice, at any moment |
| signal | SIGTERM or SIGINT to a run that hangs in a forward, a collective, a loader, or C code |
| servers | SIGKILL of a worker or a server under torchrun, or of processes started by hand |

Each ending must print one message, without frames of paragrad, and give the right exit code. It
must leave no process, no entry of /dev/shm, no temporary folder and no half-written file. After
a signal to the launcher, and after a death under torchrun, every process must be gone within 10 s.

| figure | bar |
|---|---|
| bad endings of each kind | at most 0 |
| seconds from a signal, or a death, to the end of the last process, the largest | at most 10 |
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections import Counter

from common import Bench
from endings_run import END, Plan, run_plan
from refused_rows import read_rows

KINDS = ("refusal", "fault", "kill")
STRATEGIES = (
    "serial",
    "data(2)",
    "data(2, state=fully_sharded)",
    "pipeline(2, micro=2)",
    "tensor(2)",
    "server(2)",
    "server(2, sync=asp)",
    "local(2, every=2)",
)
# what fails -> a text that must be printed
FAULTS = {
    **{
        what: f"planted fault in {what}"
        for what in ("model", "loss", "dataset", "collate", "metric", "callback", "scheduler")
    },
    "nan": "the loss is not finite",
    "shape": "shape",
}
KILLS = (
    ("rank", ("SIGKILL",)),
    ("launcher", ("SIGKILL",)),
    ("SIGTERM", ("SIGTERM",)),
    ("SIGTERM", ("SIGTERM", "SIGTERM")),
    ("SIGINT", ("SIGINT",)),
    ("SIGINT", ("SIGINT", "SIGINT")),
)
STANDS = ("forward", "collective", "loader", "ignore", "product", "count")
SERVERS = ("server(2)", "server(3, servers=2)", "server(2, sync=asp)")
FIRST_MOMENT = 0.5  # seconds in which Python starts and no program can handle a signal


def draw_ending(seed: int, number: int) -> Plan:
    """Draw a refusal, a planted fault or a kill."""
    draw = random.Random(f"{seed} ending {number}")
    kind = KINDS[number % len(KINDS)]
    if kind == "refusal":
        command, message = draw.choice(read_rows())
        return Plan(number, kind, command, expected=message)
    turn = number // len(KINDS) + seed
    # 8 strategies and 9 faults: 72 turns contain every pair of them
    strategy = STRATEGIES[turn % len(STRATEGIES)] if kind == "fault" else draw.choice(STRATEGIES)
    loaders = 0 if "asp" in strategy else draw.choice((0, 0, 1))
    if kind == "fault":
        what, expected = list(FAULTS.items())[turn % len(FAULTS)]
        step = draw.randrange(1, 40)
        return Plan(number, kind, what, strategy, expected, step=step, loaders=loaders)
    what, signals = KILLS[turn % len(KILLS)]
    step = draw.choice((0, draw.randrange(1, 40)))
    return Plan(
        number,
        kind,
        what,
        strategy,
        step=step,
        delay=draw.uniform(0.0, 2.0) if step else draw.uniform(FIRST_MOMENT, 8.0),
        signals=signals,
        gap=draw.uniform(0.02, 1.0),
        target=draw.randrange(4),
        loaders=loaders,
    )


def draw_signal(seed: int, number: int) -> Plan:
    """Draw a signal to a run that stands still."""
    draw = random.Random(f"{seed} signal {number}")
    stand = STANDS[number % len(STANDS)]
    strategy = draw.choice(STRATEGIES[stand == "collective" :])  # serial has no collective
    what = draw.choice(("SIGTERM", "SIGINT"))
    return Plan(
        number,
        "signal",
        what,
        strategy,
        step=draw.randrange(1, 40),
        delay=draw.uniform(0.0, 3.0),
        signals=(what,),
        stand=stand,
        loaders=draw.choice((0, 1)) if stand == "loader" and "asp" not in strategy else 0,
    )


def draw_servers(seed: int, number: int) -> Plan:
    """Draw the death of a worker or of a server that no launcher of paragrad started."""
    draw = random.Random(f"{seed} servers {number}")
    return Plan(
        number,
        "servers",
        "rank",
        SERVERS[number % len(SERVERS)],
        step=draw.randrange(1, 40),
        delay=draw.uniform(0.0, 2.0),
        target=draw.randrange(60),
        by_hand=draw.random() < 0.5,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--endings", type=int, default=60, help="number of refusals, faults and kills"
    )
    parser.add_argument(
        "--signals", type=int, default=0, help="number of signals to runs that stand still"
    )
    parser.add_argument(
        "--servers", type=int, default=0, help="number of deaths of workers and servers"
    )
    parser.add_argument(
        "--seed", type=int, help="seed of the random choices (default: a random one)"
    )
    parser.add_argument(
        "--only", type=int, metavar="NUMBER", help="run only the ending with this number"
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    # a shell lets background jobs ignore SIGINT, and commands inherit this; a handler of this
    # program is not inherited, so commands get the default
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends all started processes
    options = bench.options
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed: {seed}", file=sys.stderr)
    plans = [
        draw(seed, number)
        for draw, count in (
            (draw_ending, options.endings),
            (draw_signal, options.signals),
            (draw_servers, options.servers),
        )
        for number in range(count)
        if options.only in (None, number)
    ]
    endings = []
    for done, plan in enumerate(plans, 1):
        ending = run_plan(plan)
        endings.append(ending)
        line = f"{plan.kind} {plan.number}, {plan.what}, {plan.strategy}, {plan.stand}: {ending}"
        print(f"{done} of {len(plans)}: {line}", file=sys.stderr, flush=True)
        if ending.wrong:
            print(f"BAD: seed {seed}, {line}; {plan}", flush=True)
    bench.measured = {"seed": seed, "endings": [ending.to_json() for ending in endings]}
    bad = Counter(ending.plan.kind for ending in endings if ending.wrong)
    for kind, count in Counter(plan.kind for plan in plans).items():
        bench.figure(f"endings, {kind}", count)
        bench.figure(f"bad endings, {kind}", bad[kind], at_most=0)
        seconds = [ending.seconds for ending in endings if ending.plan.kind == kind]
        if kind in ("signal", "servers"):
            bench.figure(f"seconds to the end, the largest, {kind}", max(seconds), at_most=END)
    bench.finish()


if __name__ == "__main__":
    main()
