"""Messages between two ranks of one host: over gloo, and over shm.

    # both ranks on this machine, one thread each
    python benchmarks/messages.py --check
    # the same, written into docs/techniques/shm.md
    python benchmarks/messages.py --check --page

| figure | bar |
|---|---|
| one way, gloo's time / shm's, 1 to 64 KB | at least 2 |
| ... 256 KB to 4 MB | at least 4 |
| ... 16 MB | at least 2.5 |
| step of mnist-mlp under data(2, reduce=ring), its time over gloo / over shm | at least 1.5 |

One way is half of a ping-pong of `send` and `recv`. These figures have no bar. They measure what a
pipeline does with messages:

- Both ranks send and receive at the same time.
- Eight messages are sent each way at the same time.
- A rank receives a message some time after it was sent.
- Messages go both ways during work of some milliseconds; the figure is the time over the time of
  the work alone.
- A step runs under pipeline(2).

Worlds of both kinds keep running. They are measured in turn, in an order of its own for each round.
The time of the slower rank counts. A figure is the median over rounds of the ratio within a round.
The steps are those of whole trainings on random images, timed by their records.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import KB, MB, Bench, format_size, measure_in_turn, ratios
from pages import DOCS, FIGURES, fill_block, table
from torch import Tensor
from torch.utils.data import TensorDataset
from trainings import make_training_measure
from workers import Workers, serve

import paragrad as pg
from paragrad.launch import Launcher
from paragrad.trainer.settings import Settings

SIZES = tuple(KB << shift for shift in range(0, 15, 2))  # 1 KB to 16 MB
BARS = {size: 2.0 if size <= 64 * KB else 4.0 if size <= 4 * MB else 2.5 for size in SIZES}
# sizes of the messages of a pipeline
SOME = (64 * KB, MB)
KINDS = ("gloo", "shm")
AT_ONCE = 8  # messages each way
BESIDE = "beside work"
# products of 256 x 256 matrices: the work during which messages are sent, about 5 ms
PRODUCTS = 10
STRATEGIES = {"data(2, reduce=ring)": 1.5, "pipeline(2, micro=4)": None}
PAGE = DOCS / "techniques" / "shm.md"
RESULTS = FIGURES / "messages.json"


def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        run_worker(*bench.options.worker)
        return
    if bench.options.page and (bench.quick or bench.options.rounds or bench.options.json):
        sys.exit("the page shows all parts, measured in full: with --page, give only --check")
    measure_messages(bench)
    measure_steps(bench)
    if bench.options.page:
        bench.keep(RESULTS)
        PAGE.write_text(fill_block(PAGE.read_text(), "messages", build_tables(bench)))
    bench.finish()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/techniques/shm.md, and its figures",
    )


# ---- between two ranks -----------------------------------------------------------------------
def measure_messages(bench: Bench) -> None:
    worlds = {kind: Workers(__file__, kind, 2) for kind in KINDS}
    for pattern, sizes in {**dict.fromkeys(PATTERNS, SOME), "one way": SIZES}.items():
        for size in sizes:
            measures = {kind: make_measure(worlds[kind], pattern, size) for kind in KINDS}
            if pattern == BESIDE:
                measures["alone"] = make_measure(worlds["shm"], pattern, 0)
            found = measure_in_turn(
                {
                    f"{kind}, {pattern}, {format_size(size)} [us]": each
                    for kind, each in measures.items()
                },
                bench.rounds(21, quick=5),
            )
            bench.measured |= found
            report(bench, pattern, size, dict(zip(measures, found.values(), strict=True)))
    for world in worlds.values():
        world.close()


def report(bench: Bench, pattern: str, size: int, times: dict[str, list[float]]) -> None:
    for kind in KINDS:
        if pattern == BESIDE:
            bench.figure(
                f"{pattern}, {kind} / work alone, {format_size(size)}",
                ratios(times[kind], times["alone"]),
            )
        elif kind != "gloo":
            bar = BARS[size] if pattern == "one way" else None
            bench.figure(
                f"{pattern}, gloo / {kind}, {format_size(size)}",
                ratios(times["gloo"], times[kind]),
                at_least=bar,
            )


def make_measure(world: Workers, pattern: str, size: int) -> Callable[[], float]:
    """Return a function that measures the median time of a pattern in microseconds. The slower rank
    counts.
    """
    return lambda: 1e6 * max(world.ask((pattern, size)))


# ---- steps -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class MnistMlp:
    """A setting with random images, which need no download."""

    steps: int = 100

    def job(self) -> pg.Job:
        images = torch.randn(4096, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        return pg.job("mnist-mlp").replace(
            train=TensorDataset(images, torch.arange(4096) % 10), test=None, epochs=1000
        )


def measure_steps(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder, Launcher(2) as ranks:
        for strategy, bar in STRATEGIES.items():
            found = measure_in_turn(
                {
                    f"{backend}, {strategy} [ms]": make_training_measure(
                        ranks,
                        strategy,
                        MnistMlp(),
                        Path(folder, backend),
                        Settings(backend=backend, skip_first_step_check=True),
                    )
                    for backend in ("gloo", "shm")
                },
                bench.rounds(11, quick=3),
            )
            bench.measured |= found
            bench.figure(
                f"step of mnist-mlp under {strategy}, gloo / shm",
                ratios(*found.values()),
                at_least=bar,
            )


# ---- the page --------------------------------------------------------------------------------
def build_tables(bench: Bench) -> str:
    def format_figure(name: str) -> str:
        return f"{bench.figures[name]['value']:.2f}"

    one_way = table(
        ["one way", *map(format_size, SIZES)],
        [
            [
                "gloo's time / shm's",
                *(format_figure(f"one way, gloo / shm, {format_size(size)}") for size in SIZES),
            ]
        ],
    )
    patterns = [pattern for pattern in PATTERNS if pattern not in ("one way", BESIDE)]
    others = table(
        ["gloo's time / shm's", *map(format_size, SOME)],
        [
            [
                pattern,
                *(format_figure(f"{pattern}, gloo / shm, {format_size(size)}") for size in SOME),
            ]
            for pattern in patterns
        ],
    )
    beside = table(
        ["work and messages both ways / work alone", *map(format_size, SOME)],
        [
            [
                kind,
                *(
                    format_figure(f"{BESIDE}, {kind} / work alone, {format_size(size)}")
                    for size in SOME
                ),
            ]
            for kind in KINDS
        ],
    )
    each = [
        f"{strategy} {format_figure(f'step of mnist-mlp under {strategy}, gloo / shm')}"
        for strategy in STRATEGIES
    ]
    return (
        f"{one_way}\n\n{others}\n\n{beside}\n\nA step of mnist-mlp, its time over gloo / over shm: "
        f"{', '.join(each)}."
    )


# ---- in a rank -------------------------------------------------------------------------------
Play = Callable[[], float]  # runs a pattern once and returns its seconds


def prepare_one_way(rank: int, size: int) -> Play:
    message = torch.ones(size // 4)
    times = max(1, min(20, MB // size))

    def play() -> float:
        start = time.perf_counter()
        for _ in range(times):
            if rank == 0:
                dist.send(message, 1)
            dist.recv(message, 1 - rank)
            if rank == 1:
                dist.send(message, 0)
        return (time.perf_counter() - start) / times / 2

    return play


def prepare_both_ways(rank: int, size: int, at_once: int = 1) -> Play:
    mine = torch.ones(at_once, size // 4)
    taken = torch.empty(at_once, size // 4)

    def play() -> float:
        start = time.perf_counter()
        for work in start_exchange(rank, mine, taken):
            work.wait()
        return (time.perf_counter() - start) / at_once

    return play


def start_exchange(rank: int, mine: Tensor, taken: Tensor) -> list[Any]:
    """Start to send every row to the other rank, and to receive its rows."""
    receives = [dist.irecv(each, 1 - rank) for each in taken]
    return [*receives, *(dist.isend(each, 1 - rank) for each in mine)]


def prepare_late(rank: int, size: int) -> Play:
    """Rank 1 receives a message some time after it was sent; its waiting time is measured."""
    message = torch.ones(size // 4)
    work = make_work()

    def play() -> float:
        if rank == 0:
            dist.send(message, 1)
            return 0.0
        work()
        start = time.perf_counter()
        dist.recv(message, 0)
        return time.perf_counter() - start

    return play


def prepare_beside_work(rank: int, size: int) -> Play:
    """Messages go both ways during some work. If `size` is 0, there are no messages."""
    mine = torch.ones(1, size // 4)
    taken = torch.empty(1, size // 4)
    work = make_work()

    def play() -> float:
        start = time.perf_counter()
        works = start_exchange(rank, mine, taken) if size else []
        work()
        for each in works:
            each.wait()
        return time.perf_counter() - start

    return play


def make_work() -> Callable[[], object]:
    matrix = torch.eye(256)
    return lambda: [matrix @ matrix for _ in range(PRODUCTS)]


PATTERNS: dict[str, Callable[[int, int], Play]] = {
    "one way": prepare_one_way,
    "both ways": prepare_both_ways,
    f"{AT_ONCE} at once": lambda rank, size: prepare_both_ways(rank, size, AT_ONCE),
    "asked for late": prepare_late,
    BESIDE: prepare_beside_work,
}


def run_worker(kind: str, address: str) -> None:
    import paragrad.backends  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(kind)
    rank = dist.get_rank()

    def measure_median(order: tuple[str, int]) -> float:
        pattern, size = order
        play = PATTERNS[pattern](rank, size)
        taken = []
        for _ in range(max(7, min(50, 16 * MB // max(size, KB))) + 2):
            dist.barrier()
            taken.append(play())
        dist.barrier()
        return statistics.median(taken[2:])

    serve(address, measure_median)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
