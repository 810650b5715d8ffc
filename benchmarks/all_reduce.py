"""All-reduce of float32 vectors on one host: paragrad's shm backend, gloo, OpenMPI, and the limit
of the memory.

The limit is measured without any synchronisation. All ranks at the same time copy n bytes in, add p
slices of n/p, and copy n bytes out.

Each rank measures its own time, and the slowest rank counts. But shm and the limit are compared by
the time from the start of the first rank to the end of the last one. The reason: if ranks share
cores and nothing synchronises them, a rank may finish before another one begins.

| figure | bar |
|---|---|
| shm over gloo (time of gloo / time of shm), 2 ranks, 1 to 16 KB | at least 20 |
| ... 256 KB and 1 MB | at least 6 |
| ... 4 MB | at least 3 |
| ... 64 MB | at least 1.3 |
| shm over gloo, 4 ranks, 1 to 16 KB | at least 8 |
| ... 256 KB | at least 5 |
| ... 4 MB | at least 1.5 |
| shm's time / OpenMPI's, geometric mean over 1 to 64 MB | at most 1 |
| shm's time / the limit's, 4 MB | at most 2 |

Worlds of all four kinds keep running and are measured in turn. A figure is the median over rounds
of the ratio within a round. Below 1 MB, a round takes a quarter of a second and times vary most.
Therefore there are three times as many rounds for these sizes.

torchrun starts gloo and shm. OpenMPI needs `mpirun` and mpi4py. Without them, its figures are left
out, and the program says so.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable

from common import KB, MB, Bench, format_size, measure_in_turn, ratios
from workers import MPIRUN, Workers, serve

SIZES = (KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
GLOO_BARS = {
    2: {KB: 20, 4 * KB: 20, 16 * KB: 20, 256 * KB: 6, MB: 6, 4 * MB: 3, 64 * MB: 1.3},
    4: {KB: 8, 4 * KB: 8, 16 * KB: 8, 256 * KB: 5, 4 * MB: 1.5},
}
LARGE = (MB, 4 * MB, 16 * MB, 64 * MB)


def main() -> None:
    bench = Bench(__doc__, lambda parser: parser.add_argument("--worker", nargs=2))
    if bench.options.worker:
        run_worker(*bench.options.worker)
        return
    rounds = bench.rounds(7, quick=2)
    for ranks in (2, 4):
        worlds = {kind: Workers(__file__, kind, ranks) for kind in ("shm", "gloo", "limit")}
        if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
            worlds["mpi"] = Workers(__file__, "mpi", ranks, MPIRUN)
        else:
            print(
                "OpenMPI is left out: it needs mpirun (make system) and mpi4py (pip install "
                "mpi4py)",
                file=sys.stderr,
            )
        times = {}
        for size in SIZES:
            measures = {kind: make_measure(world, size) for kind, world in worlds.items()}
            measures |= {
                f"{kind}, first to last": make_measure(worlds[kind], size, whole=True)
                for kind in ("shm", "limit")
            }
            found = measure_in_turn(
                {
                    f"{name}, {ranks} ranks, {format_size(size)} [us]": each
                    for name, each in measures.items()
                },
                rounds * (3 if size < MB else 1),
            )
            times[size] = dict(zip(measures, found.values(), strict=True))
        for world in worlds.values():
            world.close()
        report(bench, ranks, times)
    bench.finish()


def make_measure(world: Workers, size: int, whole: bool = False) -> Callable[[], float]:
    """Return a function that measures the median time of an all-reduce in microseconds.

    It is the time of the slowest rank. If `whole`, it is the time from the start of the first rank
    to the end of the last one.
    """

    def time_all_reduce() -> float:
        # for each rank: (start, end) of each repeat
        ranks = world.ask((size, max(5, min(300, 25 * MB // size))))
        if whole:
            return 1e6 * statistics.median(
                max(end for _, end in each) - min(start for start, _ in each)
                for each in zip(*ranks, strict=True)
            )
        return 1e6 * max(statistics.median(end - start for start, end in times) for times in ranks)

    return time_all_reduce


def report(bench: Bench, ranks: int, times: dict[int, dict[str, list[float]]]) -> None:
    bench.measured[f"{ranks} ranks [us]"] = {
        format_size(size): found for size, found in times.items()
    }
    for size, found in times.items():
        bench.figure(
            f"gloo / shm, {ranks} ranks, {format_size(size)}",
            ratios(found["gloo"], found["shm"]),
            at_least=GLOO_BARS[ranks].get(size),
        )
    if "mpi" in times[MB]:
        each = [ratios(times[size]["shm"], times[size]["mpi"]) for size in LARGE]
        bench.figure(
            f"shm / OpenMPI, {ranks} ranks, geometric mean of 1 to 64 MB",
            [math.prod(row) ** (1 / len(row)) for row in zip(*each, strict=True)],
            at_most=1.0,
        )
    bench.figure(
        f"shm / limit, {ranks} ranks, 4 MB",
        ratios(times[4 * MB]["shm, first to last"], times[4 * MB]["limit, first to last"]),
        at_most=2.0,
    )


# ---- in a rank -------------------------------------------------------------------------------
def run_worker(kind: str, address: str) -> None:
    prepare, leave = {"mpi": prepare_mpi, "limit": prepare_limit}.get(
        kind, lambda: prepare_torch(kind)
    )()

    def time_repeats(order: tuple[int, int]) -> list[tuple[float, float]]:
        size, repeats = order
        barrier, play = prepare(size)
        taken = []
        for _ in range(repeats + 3):
            barrier()
            start = time.perf_counter()
            play()
            taken.append((start, time.perf_counter()))
        barrier()
        return taken[3:]

    serve(address, time_repeats)
    leave()


Prepared = tuple[
    Callable[[int], tuple[Callable[[], object], Callable[[], object]]], Callable[[], object]
]


def prepare_torch(kind: str) -> Prepared:
    import torch
    import torch.distributed as dist

    import paragrad.backends  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(kind)

    def prepare(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
        vector = torch.ones(size // 4)
        return dist.barrier, lambda: dist.all_reduce(vector)

    return prepare, dist.destroy_process_group


def prepare_limit() -> Prepared:
    """Prepare the copies and additions of the limit. The shm backend provides the memory, and the
    barrier between measurements.
    """
    import torch
    import torch.distributed as dist

    import paragrad.backends  # noqa: F401
    from paragrad.shm.region import CreatedRegion, open_region

    torch.set_num_threads(1)
    dist.init_process_group("shm")
    rank = dist.get_rank()
    ranks = dist.get_world_size()

    def prepare(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
        own = CreatedRegion(64 + (ranks + 1) * size) if rank == 0 else None
        told = [own.address if own else ""]
        dist.broadcast_object_list(told, src=0)
        region = own or open_region(told[0])
        dist.barrier()
        count = size // 4
        shared = region.bytes[64:].view(torch.float32).view(ranks + 1, count)
        vector = torch.ones(count)
        result = shared[ranks]
        piece = slice(count * rank // ranks, count * (rank + 1) // ranks)

        def play() -> None:
            shared[rank].copy_(vector)
            torch.add(shared[0, piece], shared[1, piece], out=result[piece])
            for other in range(2, ranks):
                result[piece].add_(shared[other, piece])
            vector.copy_(result)

        return dist.barrier, play

    return prepare, dist.destroy_process_group


def prepare_mpi() -> Prepared:
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def prepare(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
        vector = numpy.ones(size // 4, dtype=numpy.float32)
        out = numpy.empty(size // 4, dtype=numpy.float32)
        return world.Barrier, lambda: world.Allreduce(vector, out)

    return prepare, lambda: None


if __name__ == "__main__":
    main()
