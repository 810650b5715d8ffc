"""Times for the ring-versus-tree experiment (ring_vs_tree.py): exchanges and steps on one host, on
limited links, and predicted by the clock.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from statistics import median
from types import SimpleNamespace
from typing import Any

from common import Bench, measure_in_turn
from hosts import hosts
from workers import MPIRUN, Stopwatch, Workers, serve

from paragrad.errors import Refused
from paragrad.executors.clock import time_schedule
from paragrad.executors.machine import Cluster, Link
from paragrad.executors.uniform_clock import time_collective
from paragrad.planner.cost_formulas import predict_exchange_seconds as closed_form
from paragrad.strategies.data import Data
from paragrad.strategies.registry import strategy

WIDTHS = (16, 64, 256, 1024, 4096)
WIDTH = 256  # the width at which the number of ranks varies
STEPPED = (16, 256, 4096)  # widths whose whole steps are timed
OURS = (
    "tree",
    "butterfly",
    "halving(segments=4)",
    "ring",
    "ring(blocking=true)",
    "ring_async(segments=2)",
    "two_level",
)
STEPS = ("tree", "ring", "native")  # series whose whole steps are timed
RANKS = (2, 4, 8, 16)  # on one host
HOSTS = ((8, 1), (4, 2), (2, 4), (2, 1), (4, 1), (16, 1))  # (hosts, ranks per host)
MEGABITS = 100
SLOW = 40
FAR = (32, 64, 128, 256, 512, 1024)  # hosts of the clock's predictions
BATCH = 128


def count_gradient_bytes(width: int) -> int:
    """Return the bytes of the gradients of mnist-mlp."""
    return 4 * (401_930 + 523 * width)


def choose_group_size(ranks: int) -> int:
    """Return the group size of two_level if every rank has its own link: the square root of the
    number of ranks, or the power of two below it.
    """
    return 2 ** ((ranks.bit_length() - 1) // 2)


def find_algorithm(series: str, inner: int = 1) -> Any:
    """Return the algorithm of a series. inner: the number of ranks in a group of two_level."""
    chosen = strategy(
        f"data(8, reduce={f'two_level(group={inner})' if series == 'two_level' else series})"
    )
    assert isinstance(chosen, Data)
    return chosen.reduce


def measure_host(bench: Bench, _: dict[str, Any]) -> dict[str, Any]:
    """Measure on one host, whose cores all ranks share."""
    found: dict[str, Any] = {"points": [], "steps": [], "clusters": []}
    for ranks in RANKS:
        with ExitStack() as stack:
            mpi = None
            if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
                mpi = stack.enter_context(closing(Workers(__file__, "mpi", ranks, MPIRUN)))
            workers = stack.enter_context(closing(Workers(__file__, "gloo", ranks)))
            cluster = workers.ask(("cluster", 1))[0]
            widths = WIDTHS if ranks == 4 else (WIDTH,)
            facts = {"where": "host", "ranks": ranks, "group": 1}
            found["clusters"].append({**facts, **asdict(cluster)})
            found["points"] += time_exchanges(
                bench, workers, widths, cluster, bench.rounds(15, 1), mpi=mpi, **facts
            )
            found["steps"] += time_steps(bench, workers, widths, bench.rounds(5, 1), **facts)
    return found


@contextmanager
def launch_on_links(
    bench: Bench, count: int, group: int, megabits: float, found: dict[str, Any]
) -> Iterator[tuple[Workers, Cluster]]:
    """Start ranks on hosts with limited links, and yield them with their measured cluster.

    At the end, add the figures about packets that were dropped or out of order.
    """
    with hosts(count, megabits=megabits) as machines:

        def start(words: list[str]) -> Callable[[], object]:
            programs = machines.torchrun(words, ranks=group)
            return lambda: machines.wait_for(programs)

        with closing(Workers(__file__, "gloo", count * group, start)) as workers:
            cluster = workers.ask(("cluster", group))[0]
            yield workers, cluster
            faults = machines.faults()
            found["clusters"].append(
                {"ranks": count * group, "group": group, **asdict(cluster), **faults}
            )
            for name, fault in faults.items():
                bench.figure(
                    f"{name}, {count} hosts of {group} at {megabits:g} Mbit/s", fault, at_most=0
                )


def measure_links(bench: Bench, _: dict[str, Any]) -> dict[str, Any]:
    """Measure on hosts with limited links, with one or more ranks per host."""
    found: dict[str, Any] = {"points": [], "steps": [], "clusters": []}
    for count, group in HOSTS:
        with launch_on_links(bench, count, group, MEGABITS, found) as (workers, cluster):
            widths = WIDTHS if (count, group) == HOSTS[0] else (WIDTH,)
            facts = {"where": "links", "ranks": count * group, "group": group}
            found["points"] += time_exchanges(
                bench, workers, widths, cluster, bench.rounds(5, 1), **facts
            )
            found["steps"] += time_steps(bench, workers, widths, bench.rounds(3, 1), **facts)
    return found


def measure_slow_links(bench: Bench, _: dict[str, Any]) -> dict[str, Any]:
    """Measure on 16 hosts with slower links, so that the cores of the machine have more time for
    each byte.
    """
    count, group = HOSTS[-1]
    found: dict[str, Any] = {"clusters": [], "megabits": SLOW}
    with launch_on_links(bench, count, group, SLOW, found) as (workers, cluster):
        facts = {"where": "slow", "ranks": count * group, "group": group}
        found["points"] = list(
            time_exchanges(bench, workers, (WIDTH,), cluster, bench.rounds(5, 1), **facts)
        )
    return found


def predict_times(bench: Bench, found: dict[str, Any]) -> dict[str, Any]:
    """Predict the times on more hosts, by the clock and by closed form. The link is the one that
    `links` measured on 8 hosts.
    """
    if "links" not in found:
        raise Refused(
            "part `clock` needs the link that part `links` measures: give --only links clock"
        )
    count, group = HOSTS[0]
    told = next(
        each
        for each in found["links"]["clusters"]
        if (each["ranks"], each["group"]) == (count * group, group)
    )
    cluster = Cluster(
        Link(**{**told["link"], "points": tuple(map(tuple, told["link"]["points"]))}), told["gamma"]
    )
    points = []
    size = count_gradient_bytes(WIDTH)
    for ranks in FAR[:2] if bench.quick else FAR:
        for series in OURS:
            algorithm = find_algorithm(series, choose_group_size(ranks))
            # this ring on more ranks has two million messages, all different, so it is left out
            played = series != "ring(blocking=true)" or ranks <= 128
            points.append(
                {
                    "where": "links",
                    "ranks": ranks,
                    "group": 1,
                    "width": WIDTH,
                    "bytes": size,
                    "series": series,
                    "inner": choose_group_size(ranks),
                    "form": predict_by_formula(algorithm, ranks, size, cluster),
                    "clock": time_collective(algorithm, ranks, size // 4, cluster).seconds
                    if played
                    else None,
                }
            )
            print(f"{ranks} ranks: {series} {points[-1]['clock']}", file=sys.stderr, flush=True)
    return {"points": points}


def time_exchanges(
    bench: Bench,
    workers: Workers,
    widths: tuple[int, ...],
    cluster: Cluster,
    rounds: int,
    mpi: Workers | None = None,
    **facts: Any,
) -> Iterator[dict[str, Any]]:
    """Yield the times of every series at some widths: measured, by the clock, by closed form."""
    ranks = facts["ranks"]
    group = facts["group"]
    inner = group if group > 1 else choose_group_size(ranks)
    algorithms = {
        name: find_algorithm(name, inner)
        for name in OURS
        if name != "two_level" or 1 < inner < ranks
    }
    for width in widths:
        size = count_gradient_bytes(width)

        def measure_series(name: str, size: int = size) -> float:
            if name == "OpenMPI" and mpi is not None:
                return max(mpi.ask(size))
            return max(workers.ask(("exchange", str(algorithms.get(name, name)), size)))

        series = [*algorithms, "native", *(["OpenMPI"] if mpi is not None else [])]
        for name, taken in measure_in_turn(
            {name: (lambda name=name: measure_series(name)) for name in series}, rounds
        ).items():
            algorithm = algorithms.get(name)
            clock = (
                time_schedule(algorithm, ranks, size // 4, cluster).seconds if algorithm else None
            )
            print(
                f"{ranks} ranks, {group} per link, {size / 1e6:.3g} MB, {name}: "
                f"{median(taken):.4g} s"
                + (f", clock {clock / median(taken) - 1:+.0%}" if clock else ""),
                file=sys.stderr,
            )
            yield {
                **facts,
                "width": width,
                "bytes": size,
                "series": name,
                "inner": inner,
                "measured": taken,
                "clock": clock,
                "form": predict_by_formula(algorithm, ranks, size, cluster) if algorithm else None,
            }


def predict_by_formula(algorithm: Any, ranks: int, size: int, cluster: Cluster) -> float | None:
    """Return the time of the textbook's formula, which has only alpha, beta and gamma.

    Return None if there is no formula, as for ranks that share a link.
    """
    if cluster.group > 1:
        return None
    link = Link(
        cluster.link.alpha + cluster.link.latency + 2 * cluster.link.overhead, cluster.link.beta
    )
    try:
        return closed_form(algorithm, ranks, size // 4, Cluster(link, cluster.gamma))
    except LookupError:
        return None


def time_steps(
    bench: Bench, workers: Workers, widths: tuple[int, ...], rounds: int, **facts: Any
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of whole training steps, and of steps without an exchange."""
    for width in sorted({*widths} & {*STEPPED}):
        names = ["none", *STEPS]
        times = measure_in_turn(
            {
                name: (lambda name=name, width=width: max(workers.ask(("step", name, width))))
                for name in names
            },
            rounds,
        )
        for name in names:
            yield {
                **facts,
                "width": width,
                "bytes": count_gradient_bytes(width),
                "series": name,
                "measured": times[name],
            }


# ---- in a rank -------------------------------------------------------------------------------
def run_mpi_worker(address: str) -> None:
    """Time OpenMPI's own all-reduce in the same way as the others."""
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    watch = Stopwatch(SimpleNamespace(barrier=world.Barrier, broadcast_object=world.bcast))

    def time_exchange(size: int) -> float:
        vector = numpy.zeros(size // 4, dtype=numpy.float32)
        result = numpy.empty(size // 4, dtype=numpy.float32)
        return watch.seconds(size, lambda: world.Allreduce(vector, result))

    serve(address, time_exchange)


def run_worker(address: str) -> None:
    import os

    import torch
    import torch.distributed as dist
    from torch.utils.data import TensorDataset

    import paragrad as pg
    from paragrad.executors.transport import run_all_reduce
    from paragrad.planner.link_measurement import measure_addition, measure_link
    from paragrad.runtime.rendezvous import join_launched_world

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def time_exchange(name: str, size: int) -> float:
        vector = torch.zeros(size // 4)
        if name == "native":
            return watch.seconds((name, size), lambda: dist.all_reduce(vector))
        algorithm = find_algorithm(name)
        return watch.seconds((name, size), lambda: run_all_reduce(algorithm, vector, world))

    def measure_cluster(group: int) -> Cluster:
        """Measure the links between hosts and inside a host, as rank 0 sees them. All ranks are on
        one machine and share its cores.
        """
        found = Cluster(
            measure_link(world, peer=group)[0],
            measure_addition(),
            measure_link(world)[0] if group > 1 else None,
            group,
            sharing=world.size,
            cores=os.cpu_count() or 1,
        )
        return world.broadcast_object(found)  # type: ignore[no-any-return]

    def time_step(name: str, width: int) -> float:
        """Return the median of the steps after the first one. All ranks begin a step together."""
        job = pg.job("mnist-mlp", width=width)
        model = job.build_model()
        taken = []
        samples = TensorDataset(torch.rand(4 * BATCH, 1, 28, 28), torch.randint(10, (4 * BATCH,)))
        optimizer = job.optimizer(model.parameters())
        if name == "none":
            share = BATCH // dist.get_world_size()
            for _ in range(4):
                images, labels = samples[:share]
                dist.barrier()
                start = time.perf_counter()
                optimizer.zero_grad()
                job.loss(model(images), labels).backward()
                optimizer.step()
                taken.append(time.perf_counter() - start)
            return sorted(taken[1:])[1]
        strategy = f"data({dist.get_world_size()}, reduce={name})"
        with pg.parallelize(model, job.loss, optimizer, strategy, backend="gloo") as trainer:
            for images, labels in trainer.batches(samples, BATCH, 0):
                dist.barrier()
                start = time.perf_counter()
                trainer.step(images, labels)
                taken.append(time.perf_counter() - start)
        return sorted(taken[1:])[1]

    with join_launched_world("gloo") as world:
        watch = Stopwatch(world)
        serve(
            address,
            lambda order: {
                "cluster": measure_cluster,
                "exchange": time_exchange,
                "step": time_step,
            }[order[0]](*order[1:]),
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    {"gloo": run_worker, "mpi": run_mpi_worker}[sys.argv[2]](sys.argv[3])
