"""All-reduces on a cluster: is the measured time the one that the clock predicted, and does
`reduce=auto` find the fastest algorithm?

    # 8 hosts at 100 Mbit/s on this machine (needs root and iproute2), then one host
    python benchmarks/cluster.py --check
    # the same, written into docs/results/all_reduce.md
    python benchmarks/cluster.py --check --page

Every host is a set of namespaces (`hosts.py`) with one rank. First the program measures the link
as `paragrad measure` does, and writes a machine file. The clock predicts the time of every
algorithm from this file.

Then these run in turn: every algorithm that auto may choose, a ring that waits for its receivers,
and gloo's own all-reduce. There are eight rounds for 1 MB and more over the links, otherwise
fifteen.

The times of short exchanges scatter. In fifteen rounds, two measurements of the same algorithm
can differ by a factor of 1.2. Therefore, for short exchanges, auto and all algorithms near the best
run in forty more rounds. Only these rounds are compared.

| figure                                                                            | bar              |
|-----------------------------------------------------------------------------------|------------------|
| error of the clock, 1, 4, 16 MB, all algorithms: median; worst                    | 0.10; 0.35       |
| of all times there, the part inside the foretold intervals                        | at least 0.8     |
| bandwidth over gloo's own: ring at 4 and 16 MB; at 1 MB                           | at least 0.95; 0.85 |
| bandwidth over gloo's own: halving in segments at 4 and 16 MB                     | at least 0.90    |
| time of tree over ring at 16 MB, over the formulas' ratio                         | 0.85 to 1.15     |
| gloo's own over the best of ours, 1 KB and 64 KB                                  | at least 1.5     |
| auto over the best: worst from 256 KB on, where it is slower by a sign test       | at most 1.10     |
| auto over the best: sizes below where it is slower by a sign test                 | at most 0        |
| auto over the best: geometric mean                                                | at most 1.05     |
| packets dropped; packets out of order                                             | at most 0        |

The figures of auto are also measured for 4 ranks of one host over gloo.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import KB, MB, Bench, format_size, measure_in_turn, ratios
from hosts import hosts
from pages import DOCS, FIGURES, fill_block, format_milliseconds, table
from workers import Stopwatch, Workers, serve

from paragrad.executors.clock import time_schedule
from paragrad.executors.machine import Cluster, Machine, read_machine_file
from paragrad.planner.algorithm_choice import (
    AlgorithmChooser,
    is_slower_by_sign_test,
    list_candidates,
)
from paragrad.planner.cost_formulas import predict_exchange_seconds as closed_form
from paragrad.planner.prediction_interval import predict_interval
from paragrad.strategies.data import Data, Native
from paragrad.strategies.registry import strategy

RANKS_OF_ONE_HOST = 4
ENOUGH = 5  # with fewer rounds, a sign test has no result
SHORT = 0.1  # seconds; a shorter exchange is measured again
# an algorithm is near the best if its time is below NEAR times the best; it runs AGAIN more rounds
NEAR = 1.25
AGAIN = 40
PAGE = DOCS / "results" / "all_reduce.md"
RESULTS = FIGURES / "cluster.json"
NAMES = {"native": "gloo's own", "auto": "`auto`"}
FORETOLD = (MB, 4 * MB, 16 * MB)
SMALL = (KB, 4 * KB, 16 * KB, 64 * KB)
SIZES = (*SMALL, 256 * KB, *FORETOLD)
Times = dict[int, dict[str, list[float]]]  # seconds by size and algorithm, of every round
Picks = dict[int, str]  # the algorithm that auto chose, by size


def parse_algorithm(text: str) -> Any:
    chosen = strategy(f"data(8, reduce={text})")
    assert isinstance(chosen, Data)
    return chosen.reduce


def main() -> None:
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--hosts", type=int, default=8)
        parser.add_argument("--megabits", type=int, default=100)
        parser.add_argument(
            "--only", choices=("cluster", "one host"), help="measure only this part"
        )
        parser.add_argument(
            "--page",
            action="store_true",
            help="write the tables of docs/results/all_reduce.md, and their figures",
        )

    bench = Bench(__doc__, add_options)
    count = bench.options.hosts
    megabits = bench.options.megabits
    if bench.options.page and (
        bench.quick
        or bench.options.only
        or bench.options.rounds
        or bench.options.json
        or (count, megabits) != (8, 100)
    ):
        sys.exit(
            "the page shows 8 hosts at 100 Mbit/s and one host, measured in full: with --page, give "
            "only --check"
        )
    if bench.options.only != "one host":
        with hosts(count, megabits=megabits) as cluster:

            def start(words: list[str]) -> Callable[[], object]:
                programs = cluster.torchrun(words)
                return lambda: cluster.wait_for(programs)

            measure_cluster(bench, Workers(__file__, "gloo", count, start), count)
            for name, fault in cluster.faults().items():
                bench.figure(name, fault, at_most=0)
    if bench.options.only != "cluster":
        workers = Workers(__file__, "gloo", RANKS_OF_ONE_HOST)
        _, near, picked = measure_sizes(
            bench, workers, "one host", list_algorithms(RANKS_OF_ONE_HOST), lambda size: 15
        )
        workers.close()
        compare_auto(bench, near, picked, f"one host, {RANKS_OF_ONE_HOST} ranks")
    if bench.options.page:
        bench.keep(RESULTS)
        write_tables(json.loads(RESULTS.read_text()))
    bench.finish()


def write_tables(found: dict[str, Any]) -> None:
    """Write the tables of the page: medians of all rounds in milliseconds, and the figures with
    their bars.
    """
    text = PAGE.read_text()
    for where, title in (("cluster", "8 hosts [ms]"), ("one host", "4 ranks, one host [ms]")):
        sizes = found["measured"][f"{where} [s]"]
        rows = [
            [
                NAMES.get(name, name),
                *(format_milliseconds(median(times[name])) for times in sizes.values()),
            ]
            for name in next(iter(sizes.values()))
        ]
        text = fill_block(text, where, table([title, *sizes], rows))
    rows = [
        [
            name,
            f"{each['value']:.3g}",
            " to ".join(f"{each[end]:.3g}" for end in ("lowest", "highest")),
            format_bar(each),
        ]
        for name, each in found["figures"].items()
    ]
    PAGE.write_text(
        fill_block(text, "figures", table(["figure", "median", "of all rounds", "goal"], rows))
    )


def format_bar(figure: dict[str, Any]) -> str:
    """Return the bar of a figure as text."""
    return ", ".join(
        f"{words} {figure[key]:g}"
        for key, words in (("at_least", "at least"), ("at_most", "at most"))
        if figure[key] is not None
    )


def list_algorithms(count: int) -> list[str]:
    """Return all algorithms that auto may choose, and the ring that waits for its receivers."""
    return [*map(str, list_candidates(count)), "ring(blocking=true)"]


def measure_cluster(bench: Bench, workers: Workers, count: int) -> None:
    machine = write_and_read_machine(workers.ask(("measure",))[0])
    link = machine.select_link("gloo")
    bench.measured["link"] = {
        "alpha": link.alpha,
        "beta": link.beta,
        "latency": link.latency,
        "overhead": link.overhead,
        "work": link.work,
        "points": link.points,
        "disturbed": link.disturbed and link.disturbed.points,
        "gamma": machine.gamma,
        "errors": machine.errors,
    }
    found, near, picked = measure_sizes(
        bench, workers, "cluster", list_algorithms(count), lambda size: 8 if size >= MB else 15
    )
    workers.close()
    compare_predictions(bench, found, machine, count)
    for size in FORETOLD:
        rates = found[size]
        bench.figure(
            f"ring's bandwidth over gloo's own, {format_size(size)}",
            ratios(rates["native"], rates["ring"]),
            at_least=0.85 if size == MB else 0.95,
        )
        bench.figure(
            f"halving's bandwidth over gloo's own, {format_size(size)}",
            ratios(rates["native"], rates["halving(segments=4)"]),
            at_least=None if size == MB else 0.9,
        )
    textbook = Cluster(link, machine.gamma)
    expected = closed_form(parse_algorithm("tree"), count, 4 * MB, textbook) / closed_form(
        parse_algorithm("ring"), count, 4 * MB, textbook
    )
    bench.figure(
        "tree over ring at 16 MB, over the formulas' ratio",
        [ratio / expected for ratio in ratios(found[16 * MB]["tree"], found[16 * MB]["ring"])],
        at_most=1.15,
        at_least=0.85,
    )
    for size in (KB, 64 * KB):
        best = min(list_algorithms(count), key=lambda name: median(found[size][name]))
        bench.figure(
            f"gloo's own over {best}, {format_size(size)}",
            ratios(found[size]["native"], found[size][best]),
            at_least=1.5,
        )
    compare_auto(bench, near, picked, "cluster")


def write_and_read_machine(told: Any) -> Machine:
    """Write the measurements of rank 0 to a machine file, and return the machine that is read from
    this file.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        path = Path(folder) / "machine.json"
        told.write(path)
        return read_machine_file(path, told.cores)[0]


def measure_sizes(
    bench: Bench, workers: Workers, where: str, names: list[str], rounds: Callable[[int], int]
) -> tuple[Times, Times, Picks]:
    """Measure all sizes, and return (all times, times near the best, choices of auto).

    All times are those of every algorithm, of gloo's own and of auto, in seconds of the slowest
    rank. Times near the best are those that the comparison with auto uses.
    rounds: gives the number of rounds for a size.
    """
    found = {}
    near = {}
    picks = {}
    for size in SIZES:
        picks[size], why = workers.ask(("pick", size))[0]
        bench.measured[f"auto, {where}, {format_size(size)}"] = {
            "picked": picks[size],
            "because": why,
        }
        print(f"{format_size(size)}: auto {picks[size]}, {why}", file=sys.stderr, flush=True)

        def time_algorithm(name: str, size: int = size) -> float:
            return max(workers.ask(("time", name, size)))

        measures = {
            name: (lambda name=name: time_algorithm(name)) for name in (*names, "native", "auto")
        }
        times = measure_in_turn(measures, bench.rounds(rounds(size), 2))
        found[size] = times
        near[size] = times
        # without auto, which by chance may be faster than all algorithms
        best = min(median(times[name]) for name in measures if name != "auto")
        if best < SHORT:
            near[size] = measure_in_turn(
                {
                    name: measure
                    for name, measure in measures.items()
                    if name == "auto" or median(times[name]) <= NEAR * best
                },
                bench.rounds(AGAIN, 2),
            )
    bench.measured[f"{where} [s]"] = {format_size(size): times for size, times in found.items()}
    bench.measured[f"{where}, near the best [s]"] = {
        format_size(size): times for size, times in near.items()
    }
    return found, near, picks


def compare_predictions(bench: Bench, found: Times, machine: Machine, count: int) -> None:
    """Compare the clock's prediction for every algorithm with the measured time."""
    cluster = Cluster(
        machine.select_link("gloo"), machine.gamma, sharing=count, cores=machine.cores
    )
    errors = {}
    inside = []
    for size in FORETOLD:
        for name in list_algorithms(count):

            def predict_seconds(links: Cluster, name: str = name, size: int = size) -> float:
                return time_schedule(parse_algorithm(name), count, size // 4, links).seconds

            clock = predict_seconds(cluster)
            taken = median(found[size][name])
            low, high = predict_interval(clock, cluster, predict_seconds) or (clock, clock)
            errors[f"{name}, {format_size(size)}"] = clock / taken - 1
            inside += [low <= seconds <= high for seconds in found[size][name]]
            print(
                f"{name}, {format_size(size)}: clock {clock:.4g} s ({low:.4g} to {high:.4g}), measured "
                f"{taken:.4g} s, {clock / taken - 1:+.1%}"
            )
    worst = max(errors, key=lambda name: abs(errors[name]))
    bench.measured["error of the clock"] = errors
    bench.figure("error of the clock, median", median(map(abs, errors.values())), at_most=0.1)
    bench.figure(
        "times inside the foretold intervals, part", sum(inside) / len(inside), at_least=0.8
    )
    bench.figure(f"error of the clock, worst ({worst})", abs(errors[worst]), at_most=0.35)


def compare_auto(bench: Bench, found: Times, picked: Picks, where: str) -> None:
    """Compare auto with the fastest algorithm."""
    over = []
    slower_large = [1.0]
    slower_small = 0
    for size, times in found.items():
        best = min((name for name in times if name != "auto"), key=lambda name: median(times[name]))
        pairs = ratios(times["auto"], times[best])
        bench.figure(f"auto ({picked[size]}) over {best}, {where}, {format_size(size)}", pairs)
        over.append(median(pairs))
        # if auto chose the best algorithm, a difference of the two samples is chance
        if picked[size] != best and is_slower_by_sign_test(pairs):
            if size >= 256 * KB:
                slower_large.append(median(pairs))
            else:
                slower_small += 1
    bench.figure(
        f"auto over the best, {where}: geometric mean",
        math.prod(over) ** (1 / len(over)),
        at_most=1.05,
    )
    bench.figure(f"auto over the best, {where}: worst median of all sizes", max(over))
    if min(len(times["auto"]) for times in found.values()) >= ENOUGH:
        bench.figure(
            f"auto over the best, {where}: worst from 256 KB on where slower by a sign test",
            max(slower_large),
            at_most=1.1,
        )
        bench.figure(
            f"auto over the best, {where}: sizes below 256 KB where slower by a sign test",
            slower_small,
            at_most=0,
        )


# ---- in a rank -------------------------------------------------------------------------------
def run_worker(address: str) -> None:
    import os

    import torch
    import torch.distributed as dist

    from paragrad.executors.transport import run_all_reduce
    from paragrad.planner.link_measurement import build_machine, measure_backend_link
    from paragrad.runtime.rendezvous import join_launched_world

    torch.set_num_threads(1)
    with join_launched_world("gloo") as world:

        def play(algorithm: Any, vector: torch.Tensor) -> None:
            if isinstance(algorithm, Native):
                dist.all_reduce(vector, group=world.group)
            else:
                run_all_reduce(algorithm, vector, world)

        # all simulated hosts share the cores of this machine
        machine = replace(
            world.broadcast_object(build_machine([measure_backend_link(world)])),
            cores=os.cpu_count() or 1,
        )
        chooser = AlgorithmChooser(
            world,
            Native(),
            play,
            cluster=Cluster(
                machine.select_link("gloo"), machine.gamma, sharing=world.size, cores=machine.cores
            ),
            link_source=machine.measured,
        )
        algorithms: dict[str, Any] = {"native": Native()}
        watch = Stopwatch(world)

        def answer(order: tuple[Any, ...]) -> Any:
            if order[0] == "measure":
                return machine
            vector = torch.zeros(order[-1] // 4)
            if order[0] == "pick":
                chooser.choose_algorithm(vector)
                pick = chooser.choices[vector.numel(), vector.dtype]
                return str(pick.algorithm), pick.because
            name = order[1]
            algorithms.setdefault(name, None if name == "auto" else parse_algorithm(name))
            algorithm = algorithms[name] or chooser.choose_algorithm(vector)
            return watch.seconds(order, lambda: play(algorithm, vector))

        serve(address, answer)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(sys.argv[3])
    else:
        main()
