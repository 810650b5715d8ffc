"""Trainings that are ended from outside. Do all processes end? Does one message name the process
that died? Does the resumed training equal an undisturbed one?

    # 300 endings, about an hour; endings on a full disk need root
    python benchmarks/kill.py --check
    # 8 endings of each kind
    python benchmarks/kill.py --rounds 8
    # one kind, with the moments of an earlier run, which printed its seed
    python benchmarks/kill.py --only stop --seed 7

| endings  | how many | how                                                                                             |
|----------|----------|-------------------------------------------------------------------------------------------------|
| rank     | 96       | SIGKILL of each rank in turn, of 2 and 4 ranks: before, inside and between collectives          |
| server   | 30       | SIGKILL of the fork server, in the same places                                                  |
| launcher | 30       | SIGKILL of the launcher, in the same places                                                     |
| all      | 30       | SIGKILL of every process at once, in the same places                                            |
| saving   | 54       | SIGKILL of one of these while a checkpoint is half-written: before each of its files, before    |
|          |          | its renaming, before an older one is removed, and at a random moment                            |
| stop     | 20       | SIGSTOP of a rank; the other ranks wait for `--timeout 5`                                       |
| restart  | 20       | SIGKILL of a rank of a user's loop under `torchrun --max-restarts 1`, also while it saves       |
| disk     | 20       | a disk that becomes full, while a checkpoint or a record is written                             |

Half of the trainings load their samples in 1 or 2 processes per rank. If a checkpoint was written,
`--resume` continues from it to the end, with 2 or 4 ranks. The result is compared with an
undisturbed training. That training has the number of ranks of the killed one.

| figure                                                                                   | bar         |
|------------------------------------------------------------------------------------------|-------------|
| endings                                                                                  | at least 300 |
| seconds until every process is gone, the longest: SIGKILL and a full disk                | at most 5   |
| seconds until every process is gone, the longest: SIGSTOP (the bound of 5 s, and 5 s)    | at most 10  |
| restarts that did not come to their end by themselves                                    | at most 0   |
| endings that did not name what died, in one message                                      | at most 0   |
| trainings that could not go on; steps lost beyond the last checkpoint                    | at most 0   |
| difference from an undisturbed training, the largest: every loss, every final parameter  | at most 1e-10 |
| audits incomplete: a sample of an epoch missed or used twice                             | at most 0   |
| processes left; entries of /dev/shm left; temporary folders left                         | at most 0   |

The trainings are `python -m paragrad train kill_job.py`. This job halts a rank at the place where
it is killed. For a killed launcher there is no message, only its exit code by SIGKILL. If all
processes are killed, the next start removes their remains.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
from dataclasses import asdict, replace
from statistics import median

from common import Bench
from kill_ending import (
    BOUND,
    GONE,
    SAME,
    Ending,
    Kill,
    can_mount,
    make_workspace,
    run_ending,
    train_to_end,
)
from kill_result import TrainingResult
from pages import table

COUNT = {
    "rank": 96,
    "server": 30,
    "launcher": 30,
    "all": 30,
    "saving": 54,
    "stop": 20,
    "restart": 20,
    "disk": 20,
}
QUICK = dict.fromkeys(COUNT, 1) | {"rank": 3, "saving": 2, "disk": 2}
PLACES = ("inside", "between", "before")
WRITING = ("SHA256SUMS", "moment", "optimizer.safetensors", "state.json", "renaming", "removing")
# kind -> places
KINDS = dict.fromkeys(COUNT, PLACES) | {
    "saving": WRITING,
    "stop": ("moment", "between", "before"),
    "disk": ("disk",),
    "restart": ("between", *WRITING, "inside", "before"),
}
LAYOUTS = ((2, 1), (4, 2), (2, 0), (4, 3), (4, 0), (4, 1))  # (ranks, the one to kill)
WHO = ("rank", "server", "launcher", "all")


def draw_kill(kind: str, number: int, seed: int) -> Kill:
    """Return the ending of a kind with a given number.

    Places, numbers of ranks and the rank to kill are used in turn. The other settings are random.
    """
    chance = random.Random(f"{seed} {kind} {number}")
    places = KINDS[kind]
    place = places[number % len(places)]
    turn = number // len(places)
    ranks, rank = LAYOUTS[(turn if len(places) < len(LAYOUTS) else turn + number) % len(LAYOUTS)]
    who = {
        "saving": WHO[(number + turn) % len(WHO)],
        "stop": "rank",
        "restart": "rank",
        "disk": "nobody",
    }.get(kind, kind)
    each = place in ("moment", "disk")  # a checkpoint after each step
    return Kill(
        kind,
        who,
        place,
        ranks,
        rank,
        again=ranks if kind == "restart" else chance.choice((2, 4)),
        step=chance.randrange(12, 50),
        loaders=chance.choice((0, 0, 1, 2)),
        save=1 if each else 4,
        delay=chance.uniform(0.0, 0.05) if place == "moment" else 0.0,
        spare=chance.randrange(chance.choice((8_000, 200_000))) if kind == "disk" else 0,
    )


class Expected:
    """The results of undisturbed trainings. Each training runs once, when it is first needed."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.made: dict[tuple[int, bool], TrainingResult] = {}

    def __call__(self, kill: Kill) -> TrainingResult:
        key = kill.ranks, kill.kind == "restart"
        if key not in self.made:
            with make_workspace(self.backend) as here:
                self.made[key] = train_to_end(replace(kill, loaders=0), here, "runs")
        return self.made[key]


def main() -> None:
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--backend", default="auto", help="backend of the ranks")
        parser.add_argument("--only", choices=tuple(COUNT), help="run only this kind of ending")
        parser.add_argument(
            "--seed", type=int, help="seed of the random choices (default: a random one)"
        )

    bench = Bench(__doc__, add_options)
    # sys.exit runs the cleanups, which end all processes that this program started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    count = dict(QUICK if bench.quick else COUNT)
    part = bench.quick or bench.options.rounds or bench.options.only
    if bench.options.rounds:
        count = dict.fromkeys(count, bench.options.rounds)
    if bench.options.only:
        count = {bench.options.only: count[bench.options.only]}
    if "disk" in count and not can_mount():
        print(
            f"left out: {count.pop('disk')} endings on a full disk: only root can mount it",
            file=sys.stderr,
        )
    seed = (
        bench.options.seed
        if bench.options.seed is not None
        else random.SystemRandom().randrange(10**6)
    )
    print(f"seed: {seed}", file=sys.stderr)
    kills = [
        draw_kill(kind, number, seed) for kind, each in count.items() for number in range(each)
    ]
    random.Random(seed).shuffle(kills)
    expected = Expected(bench.options.backend)
    endings = []
    for number, kill in enumerate(kills):
        endings.append(run_ending(kill, bench.options.backend, expected))
        print(
            f"{number + 1} of {len(kills)}: {describe_ending(endings[-1])}",
            file=sys.stderr,
            flush=True,
        )
    bench.measured = {
        "seed": seed,
        "endings": [{**asdict(ending), "named": ending.has_right_message} for ending in endings],
    }
    add_figures(bench, endings, None if part else sum(COUNT.values()))
    print(
        table(
            [
                "ending",
                "how many",
                "seconds until all are gone: median",
                "longest",
                "resumed",
                "largest difference",
            ],
            [
                format_row(kind, [ending for ending in endings if ending.kill.kind == kind])
                for kind in count
            ],
        )
    )
    bench.finish()


def describe_ending(ending: Ending) -> str:
    """Return a line of progress, or all details of an ending that is wrong."""
    if not ending.is_good:
        return f"BAD ENDING: {ending}"
    kill = ending.kill
    what = (
        f"disk, {kill.spare} bytes left"
        if kill.kind == "disk"
        else f"{kill.kind}, of {kill.who}, {kill.place}"
    )
    resumed = (
        "no checkpoint"
        if ending.resumed is None
        else f"resumed from step {ending.resumed} with {kill.again} ranks"
    )
    same = "" if ending.difference is None else f", difference {ending.difference:.1e}"
    return (
        f"{what}; rank {kill.rank} of {kill.ranks}, {kill.loaders} loaders: all ended after "
        f"{ending.seconds:.2f} s; {'restarted' if kill.kind == 'restart' else resumed}{same}"
    )


def format_row(kind: str, endings: list[Ending]) -> list[str]:
    """Return a row of the table that is printed at the end."""
    times = [ending.seconds for ending in endings]
    same = [ending.difference for ending in endings if ending.difference is not None]
    return [
        kind,
        str(len(endings)),
        f"{median(times):.2f}",
        f"{max(times):.2f}",
        str(len(same)),
        f"{max(same):.1e}" if same else "-",
    ]


def add_figures(bench: Bench, endings: list[Ending], wanted: int | None) -> None:
    """Add the figures with their bars. wanted: the number of endings that must have run."""
    bench.figure("endings", len(endings), at_least=wanted)
    for kind in COUNT:
        if times := [ending.seconds for ending in endings if ending.kill.kind == kind]:
            bench.figure(f"seconds until all are gone, {kind}", times)
    quick = [ending.seconds for ending in endings if ending.kill.kind not in ("stop", "restart")]
    stopped = [ending.seconds for ending in endings if ending.kill.kind == "stop"]
    for what, times, bar in (
        ("SIGKILL and a full disk", quick, GONE),
        ("SIGSTOP", stopped, BOUND + GONE),
    ):
        if times:
            bench.figure(
                f"seconds until all are gone, the longest: {what}", max(times), at_most=bar
            )
    same = [ending.difference for ending in endings if ending.difference is not None]
    bench.figure(
        "restarts that did not come to their end",
        sum(ending.kill.kind == "restart" and not ending.has_right_message for ending in endings),
        at_most=0,
    )
    bench.figure(
        "endings that did not name what died",
        sum(not ending.has_right_message for ending in endings),
        at_most=0,
    )
    bench.figure(
        "trainings that could not go on", sum(bool(ending.wrong) for ending in endings), at_most=0
    )
    bench.figure(
        "steps lost beyond the last checkpoint",
        sum(ending.lost_steps for ending in endings),
        at_most=0,
    )
    bench.figure(
        "difference from an undisturbed training, the largest",
        max(same, default=math.inf),
        at_most=SAME,
    )
    bench.figure("audits incomplete", sum(ending.audited is False for ending in endings), at_most=0)
    bench.figure("processes left", sum(len(ending.processes) for ending in endings), at_most=0)
    bench.figure(
        "entries of /dev/shm left", sum(len(ending.shared) for ending in endings), at_most=0
    )
    bench.figure(
        "temporary folders left", sum(len(ending.temporary) for ending in endings), at_most=0
    )


if __name__ == "__main__":
    main()
