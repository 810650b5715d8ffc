"""DDP's own all-reduce compared with those of paragrad as a communication hook: one forward and
backward of two ranks over gloo, one thread each.

    python benchmarks/ddp_hook.py --json docs/figures/ddp_hook.json

The model is a perceptron of 784-512-256-10 (2.1 MB of gradients), with batches of 64 per rank. All
models stay in the same two processes. They are measured in turn, in an order of its own for each
round. The slowest rank counts. A figure is the median over rounds of the ratio within a round.
There are no bars.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from common import Bench, measure_in_turn, ratios
from workers import Workers, serve_backwards

OWN = "DDP's own"
NAMES = (OWN, "native", "ring", "ring_async", "halving", "tree")
BATCH = 64


def main() -> None:
    bench = Bench(__doc__)
    workers = Workers(__file__, "gloo", 2)
    times = measure_in_turn(
        {name: (lambda name=name: max(workers.ask(name))) for name in NAMES}, bench.rounds(50, 10)
    )
    workers.close()
    bench.measured["forward and backward [s]"] = times
    for name in NAMES:
        bench.figure(f"{name}, seconds", times[name])
        if name != OWN:
            bench.figure(f"{name} over {OWN}", ratios(times[name], times[OWN]))
    bench.finish()


# ---- in a rank -------------------------------------------------------------------------------
def run_worker(address: str) -> None:
    import torch
    from torch import nn

    import paragrad as pg

    def build_model(name: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(
                nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
            )
        )
        if name != OWN:
            model.register_comm_hook(*pg.hook(name))
        return model

    def make_loss() -> Callable[[nn.Module], torch.Tensor]:
        inputs = torch.randn(BATCH, 784)
        targets = torch.randint(10, (BATCH,))
        return lambda model: nn.functional.cross_entropy(model(inputs), targets)

    serve_backwards(address, lambda: {name: build_model(name) for name in NAMES}, make_loss)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(sys.argv[3])
    else:
        main()
