"""The cost of `reproducible=true`: exchanges of 4 ranks on one host, with and without it, over gloo
and over shm.

| figure                                                  | bar  |
|---------------------------------------------------------|------|
| time with it over time without, by backend and size      | none |

With it, ranks send twice as many bytes and make one more small all-reduce. Every number is
converted to an integer and back.
"""

from __future__ import annotations

import sys
import time

from common import KB, MB, Bench, measure_in_turn, ratios
from workers import Workers, serve

SIZES = {"4 KB": 4 * KB, "64 KB": 64 * KB, "1 MB": MB, "16 MB": 16 * MB}
REPEATS = {4 * KB: 50, 64 * KB: 20, MB: 5, 16 * MB: 1}


def main() -> None:
    bench = Bench(__doc__)
    for backend in ("gloo", "shm"):
        workers = Workers(__file__, backend, 4)
        for name, size in SIZES.items():

            def time_exchange(reproducible: bool, size: int = size) -> float:
                # safe: this is called before the loop starts the next workers
                return max(workers.ask((size, reproducible)))  # noqa: B023

            times = measure_in_turn(
                {"without": lambda: time_exchange(False), "with": lambda: time_exchange(True)},
                bench.rounds(7, 2),
            )
            bench.measured[f"{backend}, {name} [s]"] = times
            bench.figure(
                f"reproducible over plain, ring, 4 ranks, {backend}, {name}",
                ratios(times["with"], times["without"]),
            )
        workers.close()
    bench.finish()


def run_worker(backend: str, address: str) -> None:
    import torch

    from paragrad.executors.transport import run_all_reduce
    from paragrad.parallel.data.reproducible_sum import reproducible_all_reduce
    from paragrad.runtime.rendezvous import join_launched_world
    from paragrad.schedules.ring import Ring

    torch.set_num_threads(1)
    with join_launched_world(backend) as world:

        def time_repeats(order: tuple[int, bool]) -> float:
            size, reproducible = order
            exchange = reproducible_all_reduce if reproducible else run_all_reduce
            vector = torch.rand(size // 4, generator=torch.Generator().manual_seed(world.rank))
            exchange(Ring(), vector, world)
            world.barrier()
            start = time.perf_counter()
            for _ in range(REPEATS[size]):
                exchange(Ring(), vector, world)
            return (time.perf_counter() - start) / REPEATS[size]

        serve(address, time_repeats)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(*sys.argv[2:4])
    else:
        main()
