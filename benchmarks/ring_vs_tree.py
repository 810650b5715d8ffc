"""The ring-versus-tree experiment: run time and accuracy of mnist-mlp over message size and over ranks.

    python benchmarks/ring_vs_tree.py               # everything, about forty minutes; writes docs/ring-vs-tree.md and its plots
    python benchmarks/ring_vs_tree.py --only links  # one part; the page keeps the figures of the others

| part     | what                                                                                                        |
|----------|-------------------------------------------------------------------------------------------------------------|
| host     | 2 to 16 ranks on this host over gloo: 1 to 8 on a core (of two); exchanges and whole steps                   |
| links    | 2 to 16 hosts whose links carry 100 Mbit/s; 8 ranks, 1, 2 and 4 of them on a link (root, iproute2)           |
| clock    | the same exchanges on 32 to 1,024 hosts, by the clock                                                        |
| accuracy | trained at 2, 4 and 8 ranks over gloo and alone, three seeds; over the width                                 |
| weights  | as the original did: 80 replicas, sigmoid, 20 epochs, weights averaged after every batch or every epoch      |
| bugs     | planted bugs: what they cost, what finds them                                                                |
| rounding | mean gradients by each algorithm, in units in the last place                                                 |

| figure                                                                  | bar           |
|-------------------------------------------------------------------------|---------------|
| different final parameters at 2 ranks, over algorithms, per seed         | at most 1     |
| accuracy at 4 and 8 ranks less serial's mean, the farthest, in points    | at most 0.25  |
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import ring_vs_tree_page as page
from common import Bench, alternated, machine
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
SERIES = ("tree", "butterfly", "halving(segments=4)", "ring", "ring(blocking=true)", "ring_async(segments=2)", "two_level", "native")
STEPS = ("tree", "ring", "native")              # series whose whole steps are timed
RANKS, HOSTS, FAR = (2, 4, 8, 16), ((8, 1), (4, 2), (2, 4), (2, 1), (4, 1), (16, 1)), (32, 64, 128, 256, 512, 1024)
MEGABITS = 100
BATCH = 128
RESULTS = Path(__file__).parent.parent / "docs" / "figures" / "ring_vs_tree.json"


def bytes_of(width: int) -> int:
    """Of the gradients of mnist-mlp."""
    return 4 * (401_930 + 523 * width)


def schedule(series: str, group: int = 2) -> Any:
    chosen = strategy(f"data(8, reduce={f'two_level(group={group})' if series == 'two_level' else series})")
    assert isinstance(chosen, Data)
    return chosen.reduce


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=PARTS, nargs="+", help="some parts; the page keeps the others' figures")
        parser.add_argument("--data", type=Path, help="the folder with MNIST (default: $PARAGRAD_DATA, or it is downloaded)")
    bench = Bench(__doc__, options)
    found = json.loads(RESULTS.read_text()) if bench.options.only and RESULTS.exists() else {}
    for name in bench.options.only or PARTS:
        print(f"--- {name}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        found[name] = PARTS[name](bench)
        found[name]["machine"], found[name]["minutes"] = machine(), (time.monotonic() - begun) / 60
        if not bench.quick:
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if "accuracy" in found:
        page.accuracy_figures(bench, found["accuracy"])
    if not bench.quick and set(found) == set(PARTS):
        page.write(found)
    bench.finish()


# ---- exchanges and steps, measured -------------------------------------------------------------------------------------
def host(bench: Bench) -> dict[str, Any]:
    """One host: ranks share its cores."""
    points, steps = [], []
    for ranks in RANKS:
        with ExitStack() as stack:
            mpi = None
            if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
                mpi = stack.enter_context(closing(Workers(str(Path(__file__).parent / "all_reduce.py"), "mpi", ranks, MPIRUN)))
            workers = stack.enter_context(closing(Workers(__file__, "gloo", ranks)))
            told = workers.ask(("machine",))[0]
            cluster = Cluster(told.links["gloo"], told.gamma, sharing=ranks, cores=told.cores)
            widths = WIDTHS if ranks == 4 else (WIDTH,)
            points += exchanged(bench, workers, widths, cluster, mpi=mpi, where="host", ranks=ranks, group=1)
            steps += stepped(bench, workers, [width for width in widths if width in STEPPED], where="host", ranks=ranks, group=1)
    return {"points": points, "steps": steps, "link": asdict(told.links["gloo"]), "gamma": told.gamma}


def links(bench: Bench) -> dict[str, Any]:
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
                known = Cluster(link, told.gamma, inside=here if group > 1 else None, group=group, sharing=ranks, cores=told.cores)
                widths = WIDTHS if (count, group) == HOSTS[0] else (WIDTH,)
                points += exchanged(bench, workers, widths, known, where="links", ranks=ranks, group=group)
                steps += stepped(bench, workers, [width for width in widths if width in STEPPED], where="links", ranks=ranks,
                                 group=group)
    assert link is not None
    return {"points": points, "steps": steps, "link": asdict(link), "gamma": told.gamma}


def clock(bench: Bench) -> dict[str, Any]:
    """More hosts than there are: by the clock and by closed form, from the link that was measured."""
    told = json.loads(RESULTS.read_text())["links"]
    cluster = Cluster(Link(**told["link"]), told["gamma"])
    points = []
    for ranks in FAR[:2] if bench.quick else FAR:
        for series in SERIES[:-1]:
            group = 2 ** (ranks.bit_length() // 2)
            algorithm = schedule(series, group)
            played = series != "ring(blocking=true)" or ranks <= 128       # two million messages, and none like another
            points.append({"where": "links", "ranks": ranks, "group": 1, "width": WIDTH, "bytes": bytes_of(WIDTH), "series": series,
                           "clock": simulated(algorithm, ranks, bytes_of(WIDTH) // 4, cluster).seconds if played else None,
                           "form": formed(algorithm, ranks, bytes_of(WIDTH), cluster)})
            print(f"{ranks} ranks: {series} {points[-1]['clock']}", file=sys.stderr, flush=True)
    return {"points": points}


def exchanged(bench: Bench, workers: Workers, widths: tuple[int, ...], cluster: Cluster, mpi: Workers | None = None,
              **facts: Any) -> Iterator[dict[str, Any]]:
    """Every series at some widths: measured, by the clock, and by closed form."""
    ranks, group = facts["ranks"], facts["group"]
    inner = group if group > 1 else 2
    for width in widths:
        size = bytes_of(width)
        series = [name for name in SERIES if name != "two_level" or ranks > inner]

        def seconds(name: str, size: int = size) -> float:
            if name == "OpenMPI" and mpi is not None:
                return median(max(end - start for start, end in each) for each in zip(*mpi.ask((size, 3)), strict=True))
            return max(workers.ask(("exchange", str(schedule(name, inner)) if name != "native" else name, size)))
        measures: dict[str, Callable[[], float]] = {name: (lambda name=name: seconds(name)) for name in series}  # type: ignore[misc]
        if mpi is not None:
            measures["OpenMPI"] = lambda: seconds("OpenMPI")
        times = alternated(measures, bench.rounds(3, 1))
        for name, taken in times.items():
            algorithm = schedule(name, inner) if name in SERIES[:-1] else None
            yield {**facts, "width": width, "bytes": size, "series": name, "measured": taken,
                   "clock": timed(algorithm, ranks, size // 4, cluster).seconds if algorithm else None,
                   "form": formed(algorithm, ranks, size, cluster) if algorithm else None}


def formed(algorithm: Any, ranks: int, size: int, cluster: Cluster) -> float | None:
    """The textbook's time: alpha, beta and gamma alone."""
    link = Link(cluster.link.alpha + cluster.link.latency + 2 * cluster.link.overhead, cluster.link.beta)
    try:
        return closed_form(algorithm, ranks, size // 4, Cluster(link, cluster.gamma))
    except LookupError:
        return None


def stepped(bench: Bench, workers: Workers, widths: list[int], **facts: Any) -> Iterator[dict[str, Any]]:
    """Seconds of whole training steps, and of steps without any exchange."""
    for width in widths:
        names = ["none", *STEPS]
        times = alternated({name: (lambda name=name, width=width: max(workers.ask(("step", name, width)))) for name in names},
                           bench.rounds(3, 1))
        for name in names:
            yield {**facts, "width": width, "bytes": bytes_of(width), "series": name, "measured": times[name]}


@contextmanager
def closing(workers: Workers) -> Iterator[Workers]:
    try:
        yield workers
    finally:
        workers.close()


# ---- training ----------------------------------------------------------------------------------------------------------
ALGORITHMS = ("tree", "butterfly", "halving", "ring", "ring_async")


def accuracy(bench: Bench) -> dict[str, Any]:
    """Trained over gloo and alone, three seeds."""
    import paragrad as pg
    epochs, seeds = (1, 1) if bench.quick else (3, 3)

    def compared(width: int, listed: list[str]) -> list[dict[str, Any]]:
        job = pg.job("mnist-mlp").replace(epochs=epochs) if width == WIDTH else pg.job("mnist-mlp", width=width).replace(epochs=epochs)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            table = pg.compare(job, listed, runs=folder, seeds=seeds, twin=width == WIDTH, data=bench.options.data, backend="gloo")
            print(table, file=sys.stderr, flush=True)
            return [{"strategy": row.strategy, "width": width, "mean": row.test, "spread": row.spread, "digests": row.digests,
                     "tests": [table.records[name].test for name in row.runs], "difference": row.difference,
                     "seconds_per_step": row.seconds_per_step} for row in table.rows]
    ranks = (2,) if bench.quick else (2, 4, 8)
    rows = compared(WIDTH, ["serial", *(f"data({count}, reduce={name})" for count in ranks for name in ALGORITHMS)])
    for width in () if bench.quick else (16, 1024):
        rows += compared(width, ["serial", "data(4, reduce=tree)", "data(4, reduce=ring)"])
    return {"rows": rows, "epochs": epochs, "seeds": seeds}


def weights(bench: Bench) -> dict[str, Any]:
    """80 replicas whose weights are averaged, in one process."""
    import paragrad as pg
    from replicas import Training, trained
    job = pg.job("mnist-mlp", width=64, activation="sigmoid")
    count, epochs, batch = (8, 1, 500) if bench.quick else (80, 20, 50)
    found = {}
    for every in ("batch", "epoch"):
        for name in ("tree", "ring"):
            how = Training(job, count, schedule(name), "weights", every, batch)     # type: ignore[arg-type]
            found[f"{name}, every {every}"] = trained(how, *data_of(bench, job), epochs, told(f"{name}, every {every}"))
    alone = Training(job, 1, schedule("ring"), batch=count * batch)
    found["serial, the same batches"] = trained(alone, *data_of(bench, job), epochs, told("serial"))
    return {"found": found, "replicas": count, "epochs": epochs, "batch": batch}


def bugs(bench: Bench) -> dict[str, Any]:
    """Every planted bug in both kinds of averaging, beside the same without."""
    import paragrad as pg
    from replicas import BUGS, Training, checks, trained
    rows = []
    for averaged, count, epochs, batch, activation in (("gradients", 8, 3, 16, "relu"), ("weights", 80, 20, 50, "sigmoid")):
        job = pg.job("mnist-mlp", width=64, activation=activation)
        for bug in (None, *BUGS):
            how = Training(job, count, schedule("ring"), averaged, "batch" if averaged == "gradients" else "epoch", batch, bug)  # type: ignore[arg-type]
            data = data_of(bench, job)
            found = trained(how, *data, 1 if bench.quick else epochs, told(f"{averaged}, {bug}"))
            rows.append({"averaged": averaged, "replicas": count, "bug": bug, **found, "checks": checks(how, data[0])})
    return {"rows": rows}


def roundings(bench: Bench) -> dict[str, Any]:
    """Of one batch of BATCH samples for each replica's share, by every algorithm."""
    import paragrad as pg
    from replicas import rounding
    job = pg.job("mnist-mlp")
    names = ("star", "tree", "butterfly", "halving", "ring")
    return {"of": {str(count): rounding(job, data_of(bench, job)[0], count, {name: schedule(name) for name in names}, 960 // count)
                   for count in (2, 8, 80)}}


def data_of(bench: Bench, job: Any) -> tuple[Any, Any]:
    return job.train(bench.options.data), job.test(bench.options.data)


def told(name: str) -> Callable[[int, float], None]:
    return lambda epoch, accuracy: print(f"{name}: epoch {epoch + 1}, {accuracy:.2f} %", file=sys.stderr, flush=True)


PARTS = {"host": host, "links": links, "clock": clock, "accuracy": accuracy, "weights": weights, "bugs": bugs, "rounding": roundings}


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
        if name == "none":
            optimizer, share = job.optimizer(model.parameters()), BATCH // dist.get_world_size()
            for _ in range(4):
                images, labels = samples[:share]
                dist.barrier()
                start = time.perf_counter()
                optimizer.zero_grad()
                job.loss(model(images), labels).backward()
                optimizer.step()
                taken.append(time.perf_counter() - start)
            return sorted(taken[1:])[1]
        with pg.parallelize(model, job.loss, job.optimizer(model.parameters()), f"data(reduce={name})", backend="gloo") as trainer:
            for images, labels in trainer.batches(samples, BATCH, 0):
                dist.barrier()
                start = time.perf_counter()
                trainer.step(images, labels)
                taken.append(time.perf_counter() - start)
        return sorted(taken[1:])[1]

    def answer(order: tuple[Any, ...]) -> Any:
        if order[0] == "machine":
            with joined_from_environment("gloo") as world:
                return replace(world.agreed(machine_with([links_of(world)])), cores=os.cpu_count() or 1)    # hosts share them here
        return {"exchange": exchange, "step": step}[order[0]](*order[1:])
    serve(address, answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[3])
    else:
        main()
