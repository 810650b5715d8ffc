"""DDP's own all-reduce beside ours under a hook: one forward and backward, all in turns in one run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/ddp_hook.py
"""

from __future__ import annotations

import time
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn

import paragrad as pg

NAMES = ("DDP's own", "native", "ring", "ring_async", "halving", "tree")
WARM, ROUNDS = 10, 50


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)))
    if name != NAMES[0]:
        model.register_comm_hook(*pg.hook(name))
    return model


def main() -> None:
    """Print a row of docs/hook.md for each."""
    dist.init_process_group("gloo")
    models: dict[str, nn.Module] = {name: made(name) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    torch.manual_seed(dist.get_rank())
    inputs, targets = torch.randn(64, 784), torch.randint(10, (64,))
    for _ in range(WARM + ROUNDS):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            seconds[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        middle = {name: median(each[WARM:]) for name, each in seconds.items()}
        for name, each in seconds.items():
            low, _, high = quantiles(each[WARM:], n=4)
            print(f"| {name} | {1e3 * middle[name]:.2f} ms | {1e3 * low:.2f} to {1e3 * high:.2f} ms | "
                  f"{middle[name] / middle[NAMES[0]]:.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
