"""Times for the ring-versus-tree experiment (ring_vs_tree.py): exchanges and steps, on one host, on limited links, by clock."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from common import Bench, alternated
from hosts import hosts
from workers import MPIRUN, Workers, serve

from paragrad.planner.machine import Cluster, Link
from paragrad.planner.price import seconds as closed_form
from paragrad.players.clock import timed
from paragrad.players.rounds import simulated
from paragrad.strategy import Data, strategy

WIDTHS = (16, 64, 256, 1024, 4096)
WIDTH = 256                                     # where ranks vary
STEPPED = (16, 256, 4096)                       # widths whose whole steps are timed
OURS = ("tree", "butterfly", "halving(segments=4)", "ring", "ring(blocking=true)", "ring_async(segments=2)", "two_level")
STEPS = ("tree", "ring", "native")              # series whose whole steps are timed
RANKS = (2, 4, 8, 16)                           # of one host
HOSTS = ((8, 1), (4, 2), (2, 4), (2, 1), (4, 1), (16, 1))       # hosts and their ranks
FAR = (32, 64, 128, 256, 512, 1024)             # hosts by the clock
MEGABITS = 100
BATCH = 128


def bytes_of(width: int) -> int:
    """Of the gradients of mnist-mlp."""
    return 4 * (401_930 + 523 * width)


def schedule(series: str, group: int = 2) -> Any:
    chosen = strategy(f"data(8, reduce={f'two_level(group={group})' if series == 'two_level' else series})")
    assert isinstance(chosen, Data)
    return chosen.reduce


def host(bench: Bench, _: dict[str, Any]) -> dict[str, Any]:
    """One host: ranks share its cores."""
    points, steps = [], []
    for ranks in RANKS:
        with ExitStack() as stack:
            mpi = None
            if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
                mpi = stack.enter_context(closing(Workers(str(Path(__file__).parent / "all_reduce.py"), "mpi", ranks, MPIRUN)))
            workers = stack.enter_context(closing(Workers(__file__, "gloo", ranks)))
            told = workers.ask(("machine",))[0]
            facts = {"where": "host", "ranks": ranks, "group": 1}
            cluster = Cluster(told.links["gloo"], told.gamma, sharing=ranks, cores=told.cores)
            widths = WIDTHS if ranks == 4 else (WIDTH,)
            points += exchanged(bench, workers, widths, cluster, mpi=mpi, **facts)
            steps += stepped(bench, workers, widths, **facts)
    return {"points": points, "steps": steps, "link": asdict(told.links["gloo"]), "gamma": told.gamma}


def links(bench: Bench, _: dict[str, Any]) -> dict[str, Any]:
    """Hosts on limited links, of one rank or more."""
    points, steps, link = [], [], None
    for count, group in HOSTS:
        ranks = count * group
        with hosts(count, megabits=MEGABITS) as cluster:
            def start(words: list[str], cluster: Any = cluster, group: int = group) -> Callable[[], object]:
                programs = cluster.torchrun(words, ranks=group)
                return lambda: cluster.finished(programs)
            with closing(Workers(__file__, "gloo", ranks, start)) as workers:
                told = workers.ask(("machine",))[0]
                here = told.links["gloo"]
                link = link or here                     # the first is of hosts of one rank
                known = Cluster(link, told.gamma, inside=here if group > 1 else None, group=group, sharing=ranks,
                                cores=told.cores)
                widths = WIDTHS if (count, group) == HOSTS[0] else (WIDTH,)
                facts = {"where": "links", "ranks": ranks, "group": group}
                points += exchanged(bench, workers, widths, known, **facts)
                steps += stepped(bench, workers, widths, **facts)
    assert link is not None
    return {"points": points, "steps": steps, "link": asdict(link), "gamma": told.gamma}


def clock(bench: Bench, found: dict[str, Any]) -> dict[str, Any]:
    """More hosts than there are: by the clock and by closed form, from the link that `links` measured."""
    told = found["links"]
    link = Link(**{**told["link"], "points": tuple(map(tuple, told["link"]["points"]))})
    cluster = Cluster(link, told["gamma"])
    points = []
    for ranks in FAR[:2] if bench.quick else FAR:
        for series in OURS:
            group = 2 ** (ranks.bit_length() // 2)
            algorithm = schedule(series, group)
            played = series != "ring(blocking=true)" or ranks <= 128       # two million messages, and none like another
            size = bytes_of(WIDTH)
            points.append({"where": "links", "ranks": ranks, "group": 1, "width": WIDTH, "bytes": size, "series": series,
                           "clock": simulated(algorithm, ranks, size // 4, cluster).seconds if played else None,
                           "form": formed(algorithm, ranks, size, cluster)})
            print(f"{ranks} ranks: {series} {points[-1]['clock']}", file=sys.stderr, flush=True)
    return {"points": points}


def exchanged(bench: Bench, workers: Workers, widths: tuple[int, ...], cluster: Cluster, mpi: Workers | None = None,
              **facts: Any) -> Iterator[dict[str, Any]]:
    """Every series at some widths: measured, by the clock, and by closed form."""
    ranks, group = facts["ranks"], facts["group"]
    inner = group if group > 1 else 2
    for width in widths:
        size = bytes_of(width)
        series = [name for name in (*OURS, "native") if name != "two_level" or ranks > inner]

        def seconds(name: str, size: int = size) -> float:
            if name == "OpenMPI" and mpi is not None:
                return median(max(end - start for start, end in each) for each in zip(*mpi.ask((size, 3)), strict=True))
            return max(workers.ask(("exchange", str(schedule(name, inner)) if name != "native" else name, size)))
        measures: dict[str, Callable[[], float]] = {name: (lambda name=name: seconds(name)) for name in series}  # type: ignore[misc]
        if mpi is not None:
            measures["OpenMPI"] = lambda: seconds("OpenMPI")
        times = alternated(measures, bench.rounds(3, 1))
        for name, taken in times.items():
            algorithm = schedule(name, inner) if name in OURS else None
            yield {**facts, "width": width, "bytes": size, "series": name, "measured": taken,
                   "clock": timed(algorithm, ranks, size // 4, cluster).seconds if algorithm else None,
                   "form": formed(algorithm, ranks, size, cluster) if algorithm else None}


def formed(algorithm: Any, ranks: int, size: int, cluster: Cluster) -> float | None:
    """The textbook's time: alpha, beta and gamma alone. None where it has none, as where ranks share a link."""
    if cluster.group > 1:
        return None
    link = Link(cluster.link.alpha + cluster.link.latency + 2 * cluster.link.overhead, cluster.link.beta)
    try:
        return closed_form(algorithm, ranks, size // 4, Cluster(link, cluster.gamma))
    except LookupError:
        return None


def stepped(bench: Bench, workers: Workers, widths: tuple[int, ...], **facts: Any) -> Iterator[dict[str, Any]]:
    """Seconds of whole training steps, and of steps without any exchange."""
    for width in sorted({*widths} & {*STEPPED}):
        names = ["none", *STEPS]
        times = alternated({name: (lambda name=name, width=width: max(workers.ask(("step", name, width)))) for name in names},
                           bench.rounds(3, 1))
        for name in names:
            yield {**facts, "width": width, "bytes": bytes_of(width), "series": name, "measured": times[name]}


# ---- in a rank ---------------------------------------------------------------------------------------------------------
def worker(address: str) -> None:
    import os

    import torch
    import torch.distributed as dist
    from torch.utils.data import TensorDataset

    import paragrad as pg
    from paragrad.planner.measuring import links_of, machine_with
    from paragrad.players.wire import all_reduce
    from paragrad.world import joined_from_environment
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def exchange(name: str, size: int) -> float:
        vector = torch.zeros(size // 4)
        with joined_from_environment("gloo") as world:
            world.barrier()
            start = time.perf_counter()
            if name == "native":
                dist.all_reduce(vector)
            else:
                all_reduce(schedule(name), vector, world)
            return time.perf_counter() - start

    def step(name: str, width: int) -> float:
        """The median of some steps after the first, each from the same moment on all ranks."""
        job = pg.job("mnist-mlp", width=width)
        model, taken = job.built_model(), []
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

    def answer(order: tuple[Any, ...]) -> Any:
        if order[0] == "machine":
            with joined_from_environment("gloo") as world:
                found = machine_with([links_of(world)])
                return replace(world.agreed(found), cores=os.cpu_count() or 1)          # hosts share them here
        return {"exchange": exchange, "step": step}[order[0]](*order[1:])
    serve(address, answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(sys.argv[3])
