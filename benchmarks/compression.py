"""The cost of compression: every compressor on a million numbers, with error feedback, compared
with a copy of the numbers; and communication hooks under DDP.

    python benchmarks/compression.py --check --page

| figure | bar |
|---|---|
| compress and extract of top_k(0.01), over `copy_` | at most 8 |
| the same over `torch.topk` of the magnitudes | at most 1/3 |
| forward and backward of DDP with power_sgd(1), over torch's own PowerSGD hook of rank 1 | at most 1 |

The compressors run in one process with one thread. A gradient is added to the residual, and the sum
is compressed. The part that is sent is subtracted from the residual, and the payload is extracted
into zeros. Under DDP there are two ranks over gloo with one thread each, a linear layer of 1,000 by
1,000, and batches of 8.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from common import Bench, measure_in_turn, ratios
from pages import DOCS, FIGURES, fill_block, format_milliseconds, table
from workers import Workers, serve_backwards

SIDE = 1000
TEXTS = (
    "bf16",
    "fp16",
    "int8",
    "one_bit",
    "threshold(2.6)",
    "top_k(0.01)",
    "top_k(0.001)",
    "power_sgd(1)",
    "power_sgd(4)",
    "dgc(0.01)",
    "dgc(0.001)",
)
COPY = "copy_"
SORTED = "torch.topk"
OWN = "DDP's own"
TORCHS = "torch's PowerSGD"
# torch's hook -> the compressor of paragrad that is compared with it
THEIRS = {"torch's bf16": "bf16", "torch's fp16": "fp16", TORCHS: "power_sgd(1)"}
HOOKS = (OWN, *(name for pair in THEIRS.items() for name in pair), "top_k(0.01)")
REPEATS = 20
SIZES = (4, 16, 64)  # ranks


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--page", action="store_true", help="write the table of docs/techniques/compression.md"
    )


def main() -> None:
    bench = Bench(__doc__, add_options)
    costs = measure_in_turn(make_measures(), bench.rounds(15, 5))
    workers = Workers(__file__, "gloo", 2)
    hooks = measure_in_turn(
        {name: (lambda name=name: max(workers.ask(name))) for name in HOOKS}, bench.rounds(30, 8)
    )
    workers.close()
    bench.measured |= {"compress and extract [s]": costs, "forward and backward [s]": hooks}
    bench.figure("top_k(0.01) over copy_", ratios(costs["top_k(0.01)"], costs[COPY]), at_most=8.0)
    bench.figure(
        "top_k(0.01) over torch.topk", ratios(costs["top_k(0.01)"], costs[SORTED]), at_most=1 / 3
    )
    for theirs, ours in THEIRS.items():
        bench.figure(
            f"{ours} under DDP over torch's",
            ratios(hooks[ours], hooks[theirs]),
            at_most=1.0 if theirs == TORCHS else None,
        )
    for name in TEXTS:
        bench.figure(
            f"{name}, GB of gradients a second",
            [4e-9 * SIDE**2 / seconds for seconds in costs[name]],
        )
    if bench.options.page:
        write_page(bench, costs, hooks)
    bench.finish()


def write_page(bench: Bench, costs: dict[str, list[float]], hooks: dict[str, list[float]]) -> None:
    bench.keep(FIGURES / "compression.json")
    rows = [
        (
            f"`{name}`",
            format_milliseconds(median(each)),
            f"{4e-9 * SIDE**2 / median(each):.2f}",
            f"{median(ratios(each, costs[COPY])):.1f}",
        )
        for name, each in costs.items()
    ]
    under = [
        (
            f"`{name}`" if name in TEXTS else name,
            format_milliseconds(median(each)),
            f"{median(ratios(each, hooks[OWN])):.2f}",
        )
        for name, each in hooks.items()
    ]
    path = DOCS / "techniques" / "compression.md"
    text = fill_block(path.read_text(), "costs", table(("", "ms", "GB/s", "over `copy_`"), rows))
    text = fill_block(
        text,
        "pays",
        table(
            ("", *(f"{size} ranks" for size in SIZES)),
            [
                (f"`{name}`", *find_break_even(name))
                for name in TEXTS
                if not name.startswith("threshold")
            ],
        ),
    )
    path.write_text(fill_block(text, "hooks", table(("hook", "ms", "over DDP's own"), under)))


def find_break_even(text: str) -> list[str]:
    """Return the bandwidths below which a compressor saves time, for vectors of 100 MB."""
    from paragrad.commands.compression_break_even import measure_compression_cost, price_compression
    from paragrad.executors.machine import ASSUMED_MACHINE
    from paragrad.strategies.compressors import find_compressor
    from paragrad.strategies.registry import strategy

    size = 100_000_000
    told = []
    every = [strategy(f"data({ranks}, compress={text})") for ranks in SIZES]
    compressor = find_compressor(every[0])
    assert compressor is not None
    costs = measure_compression_cost(compressor, size)
    for chosen in every:
        found = price_compression(chosen, compressor, size, ASSUMED_MACHINE, costs=costs)
        gigabits = 8 * found.bandwidth / 1e9
        told.append(
            "never"
            if not gigabits or found.sends_whole_vectors
            else f"{gigabits:.{0 if gigabits > 10 else 1}f} Gbit/s"
        )
    return told


# ---- in this process -------------------------------------------------------------------------
def make_measures() -> dict[str, Callable[[], float]]:
    import torch

    from paragrad.parallel.compression.cost import make_codec_steps
    from paragrad.strategies.registry import strategy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gradient = torch.randn(SIDE, SIDE)
    other = torch.empty(SIDE, SIDE)

    def make_cost_step(text: str) -> Callable[[], Any]:
        compress, extract = make_codec_steps(
            strategy(f"data(2, compress={text})").compress, (SIDE, SIDE)
        )
        return lambda: (compress(), extract(torch.zeros(SIDE**2)))

    steps: dict[str, Callable[[], Any]] = {name: make_cost_step(name) for name in TEXTS}
    steps[COPY] = lambda: other.copy_(gradient)
    steps[SORTED] = lambda: gradient.view(-1).abs().topk(SIDE**2 // 100, sorted=False)
    return {name: (lambda step=step: time_step(step)) for name, step in steps.items()}


def time_step(step: Callable[[], Any]) -> float:
    """Return the seconds of a step: the median of several steps in a row."""
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return median(found)


# ---- in a rank -------------------------------------------------------------------------------
def run_worker(address: str) -> None:
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    import paragrad as pg

    # DDP refuses a hook of the name bf16_compress_hook here, so this one has another name
    def compress_bfloat16(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(state, bucket)

    def build_model(name: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(SIDE, SIDE, bias=False))
        if name == TORCHS:
            model.register_comm_hook(
                PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
                powerSGD_hook,
            )
        elif name in THEIRS:
            model.register_comm_hook(
                None,
                compress_bfloat16 if THEIRS[name] == "bf16" else default_hooks.fp16_compress_hook,
            )
        elif name != OWN:
            model.register_comm_hook(*pg.hook(name))
        return model

    def make_loss() -> Callable[[nn.Module], torch.Tensor]:
        inputs = torch.randn(8, SIDE)
        return lambda model: model(inputs).square().mean()

    serve_backwards(address, lambda: {name: build_model(name) for name in HOOKS}, make_loss)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(sys.argv[3])
    else:
        main()
