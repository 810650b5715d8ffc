"""How many bytes ranks send for each layer of a network, for each way to divide its layers. And
which way is the fastest between two hosts.

    # simulated hosts of this machine, connected by 100 Mbit/s (needs root and iproute2)
    python benchmarks/layers.py --check
    # the same, written into docs/results/layers.md
    python benchmarks/layers.py --check --page

| figure | bar |
|---|---|
| bytes that a rank sends for a layer, off the closed form's: every scheme | 0 |
| bytes in a step beside those of the closed forms, counted: every scheme | at most 512: the loss and its weight |
| bytes of pairs (tensor), over those of one split for all layers | at most 0.99 |

The network is similar to AlexNet, for images of 32 x 32: five convolutions and three fully
connected layers. The loss is the hinge loss, for which the scores of each sample are gathered.
Training uses float32, SGD and 64 samples.

The closed forms of Gholami et al. 2018 (arXiv 1712.04432) are used for four schemes: data; one
split of all layers by neurons (`pairs=false`); rows of images; and a grid of data and one split.
Those for pairs and for dense=tensor are our own. Times have no bar. They are those of a step of a
whole training on two hosts, read from its record.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Bench, compute_step_milliseconds, measure_in_turn
from hosts import Cluster, hosts
from pages import DOCS, FIGURES, fill_block, format_milliseconds, table
from torch import Tensor, nn

import paragrad as pg
from paragrad.commands.train import train
from paragrad.parallel.spatial import spatial
from paragrad.parallel.tensor import tensor
from paragrad.parallel.tensor.input_sharding import SAMPLES, InputAxis, InputSharding
from paragrad.parallel.tensor.sharding_plan import ShardingPlan, plan_sharding
from paragrad.record.record import Record
from paragrad.strategies.registry import strategy

# NUMBER: bytes of one number (float32)
BATCH = 64
SIZE = 32
CLASSES = 100
BATCHES = 8
NUMBER = 4
CHANNELS = (3, 64, 192, 256, 192, 128)
KERNELS = (5, 5, 3, 3, 3)
POOLED = (0, 1, 4)
NEURONS = (1024, 1024, CLASSES)
PAGE = DOCS / "results" / "layers.md"
RESULTS = FIGURES / "layers.json"


class Network(nn.Module):
    """A network whose layers are named conv1 to conv5 and full6 to full8."""

    def __init__(self) -> None:
        super().__init__()
        for number, (into, out, kernel) in enumerate(
            zip(CHANNELS, CHANNELS[1:], KERNELS, strict=False)
        ):
            self.add_module(f"conv{number + 1}", nn.Conv2d(into, out, kernel, padding=kernel // 2))
        wide = CHANNELS[-1] * (SIZE >> len(POOLED)) ** 2
        for number, (into, out) in enumerate(zip((wide, *NEURONS), NEURONS, strict=False)):
            self.add_module(f"full{number + 6}", nn.Linear(into, out))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.children()):
            if isinstance(layer, nn.Linear):
                x = x.flatten(1)
            x = layer(x)
            if number + 1 < len(list(self.children())):
                x = x.relu()
            if number in POOLED:
                x = nn.functional.max_pool2d(x, 2)
        return x


def make_data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return (
        torch.randn(BATCHES * BATCH, CHANNELS[0], SIZE, SIZE, generator=draw),
        torch.randint(CLASSES, (BATCHES * BATCH,), generator=draw),
    )


def make_job() -> pg.Job:
    return pg.Job(
        name="benchmark",
        model=Network,
        loss=nn.functional.multi_margin_loss,
        epochs=1000,
        batch=BATCH,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train=lambda folder: torch.utils.data.TensorDataset(*make_data()),
    )


# ---- the closed forms ------------------------------------------------------------------------
@dataclass(frozen=True)
class Layer:
    """The sizes of a layer, each as a count of numbers.

    weights: in all its parameters.
    given, made: in the input and in the output, for one sample.
    halo: in the rows of one neighbouring rank that the outputs depend on, for one sample.
    """

    name: str
    weights: int
    given: int
    made: int
    halo: int

    @property
    def is_fully_connected(self) -> bool:
        return self.name.startswith("full")


def list_layers() -> list[Layer]:
    """Return the layers of the network, computed from its shapes alone."""
    found = []
    model = Network()
    side = SIZE
    for number, (name, each) in enumerate(model.named_children()):
        weights = sum(parameter.numel() for parameter in each.parameters())
        if isinstance(each, nn.Conv2d):
            given = each.in_channels * side**2
            made = each.out_channels * side**2
            found.append(
                Layer(
                    name, weights, given, made, each.in_channels * side * (each.kernel_size[0] // 2)
                )
            )
            side //= 2 if number in POOLED else 1
        elif isinstance(each, nn.Linear):
            found.append(Layer(name, weights, each.in_features, each.out_features, 0))
    return found


def find_first_fully_connected(every: Sequence[Layer]) -> int:
    return next(number for number, layer in enumerate(every) if layer.is_fully_connected)


def count_sum_bytes(numbers: float, ranks: int) -> float:
    """Return the bytes that a rank sends to sum so many numbers over ranks."""
    return 2 * (ranks - 1) / ranks * numbers * NUMBER


def count_gather_bytes(numbers: float, ranks: int) -> float:
    return (ranks - 1) / ranks * numbers * NUMBER


# from (all layers, the index of one, samples, ranks) to the bytes that a rank sends for the layer
Form = Callable[[list[Layer], int, int, int], float]


def count_data_bytes(every: list[Layer], at: int, samples: int, ranks: int) -> float:
    """Data parallelism: the gradients of the weights are summed over ranks."""
    return count_sum_bytes(every[at].weights, ranks)


def count_output_bytes(every: list[Layer], at: int, samples: int, ranks: int) -> float:
    """One split for all layers: inputs are gathered, and their gradients are summed.

    (The scores after the last layer are gathered too; `Scheme.count_step_bytes` adds them.)
    """
    given = samples * every[at].given
    return count_gather_bytes(given, ranks) + count_sum_bytes(given, ranks) if at else 0


def count_pair_bytes(
    every: list[Layer], at: int, samples: int, ranks: int, first: int = 0
) -> float:
    """Pairs: one layer is divided by outputs, and the gradients of its inputs are summed. The next
    layer is divided by inputs, and its outputs are summed.

    first: a layer that is divided by outputs.
    """
    if (at - first) % 2:
        return count_sum_bytes(samples * every[at].made, ranks)
    return count_sum_bytes(samples * every[at].given, ranks) if at else 0


def count_row_bytes(every: list[Layer], at: int, samples: int, ranks: int) -> float:
    """Rows of images: each rank fetches rows, sends their gradients back, and gradients of weights
    are summed.

    Every rank computes the same fully connected layers. The inputs of the first of them are
    gathered.
    """
    each = every[at]
    if each.is_fully_connected:
        return (
            0
            if every[at - 1].is_fully_connected
            else count_gather_bytes(samples * each.given, ranks)
        )
    return samples * each.halo * NUMBER * (2 if at else 1) + count_sum_bytes(each.weights, ranks)


def count_sample_then_neuron_bytes(every: list[Layer], at: int, samples: int, ranks: int) -> float:
    each = every[at]
    first = find_first_fully_connected(every)
    if not each.is_fully_connected:
        return count_data_bytes(every, at, samples, ranks)
    return count_pair_bytes(every, at, samples, ranks, first) + (
        count_gather_bytes(samples * each.given, ranks) if at == first else 0
    )


def count_row_then_neuron_bytes(every: list[Layer], at: int, samples: int, ranks: int) -> float:
    first = find_first_fully_connected(every)
    return (
        count_pair_bytes(every, at, samples, ranks, first + 1)
        if at >= first
        else count_row_bytes(every, at, samples, ranks)
    )


@dataclass(frozen=True)
class Scheme:
    """A way to divide the layers.

    form: the closed form of the bytes that a rank sends for a layer.
    scores: whether the scores are gathered after the last layer, for the loss.
    plan: returns the plan of the technique for the layers.
    replicas, ranks: the number of replicas, and of ranks per replica.
    """

    name: str
    strategy: str
    form: Form
    scores: bool
    plan: Callable[[nn.Module, Tensor], ShardingPlan]
    replicas: int = 1
    ranks: int = 2

    def count_replica_bytes(self, layer: Layer) -> float:
        """Return the bytes for the gradients of a rank's weights, which replicas of a grid sum."""
        return (
            count_sum_bytes(layer.weights / self.ranks, self.replicas) if self.replicas > 1 else 0
        )

    def count_inner_bytes(self, every: list[Layer]) -> dict[str, float]:
        """Return the bytes for each layer, without those that replicas exchange."""
        return {
            each.name: self.form(every, at, BATCH // self.replicas, self.ranks)
            for at, each in enumerate(every)
        }

    def count_layer_bytes(self, every: list[Layer]) -> dict[str, float]:
        """Return the bytes for each layer."""
        found = self.count_inner_bytes(every)
        return {each.name: found[each.name] + self.count_replica_bytes(each) for each in every}

    def count_step_bytes(self, every: list[Layer]) -> float:
        """Return the bytes of a step."""
        return sum(self.count_layer_bytes(every).values()) + (
            count_gather_bytes(BATCH // self.replicas * CLASSES, self.ranks) if self.scores else 0
        )


def make_planner(technique: Any, text: str) -> Callable[[nn.Module, Tensor], ShardingPlan]:
    return lambda model, images: technique.inspect_model(strategy(text), model, images)


SCHEMES = [
    Scheme(
        "data",
        "data(2, reduce=ring)",
        count_data_bytes,
        False,
        lambda model, images: plan_sharding(
            model, images, 2, InputSharding({SAMPLES: InputAxis("samples", 2)})
        ),
    ),
    Scheme(
        "tensor, one split",
        "tensor(2, pairs=false)",
        count_output_bytes,
        True,
        make_planner(tensor, "tensor(2, pairs=false)"),
    ),
    Scheme(
        "tensor, pairs", "tensor(2)", count_pair_bytes, False, make_planner(tensor, "tensor(2)")
    ),
    Scheme("spatial", "spatial(2)", count_row_bytes, False, make_planner(spatial, "spatial(2)")),
    Scheme(
        "data, then neurons",
        "data(2, dense=tensor)",
        count_sample_then_neuron_bytes,
        True,
        make_planner(spatial, "data(2, dense=tensor)"),
    ),
    Scheme(
        "spatial, then neurons",
        "spatial(2, dense=tensor)",
        count_row_then_neuron_bytes,
        False,
        make_planner(spatial, "spatial(2, dense=tensor)"),
    ),
    Scheme(
        "data x one split, 4 ranks",
        "data(2, reduce=ring) * tensor(2, pairs=false)",
        count_output_bytes,
        True,
        make_planner(tensor, "tensor(2, pairs=false)"),
        replicas=2,
    ),
]


# ---- what is measured ------------------------------------------------------------------------
def main() -> None:
    bench = Bench(__doc__, add_options)
    if bench.options.worker:
        run_worker(*bench.options.worker)
        return
    every = list_layers()
    compare_bytes(bench, every)
    with hosts(2, megabits=100) as cluster, tempfile.TemporaryDirectory() as folder:
        measures = {
            each.name: partial(measure_step, cluster, each, Path(folder))
            for each in SCHEMES
            if each.replicas == 1
        }
        found = measure_in_turn(measures, bench.rounds(3, quick=1))
    bench.measured["ms per step"] = found
    for name, times in found.items():
        bench.figure(f"milliseconds of a step, {name}", times)
    if bench.options.page:
        bench.keep(RESULTS)
        PAGE.write_text(fill_block(PAGE.read_text(), "layers", build_table(bench, every)))
    bench.finish()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--page",
        action="store_true",
        help="write the table of docs/results/layers.md, and its figures",
    )


def compare_bytes(bench: Bench, every: list[Layer]) -> None:
    """Compare the closed forms with the plans, layer by layer, and with records of two steps."""
    bench.measured["bytes"] = {each.name: each.count_layer_bytes(every) for each in SCHEMES}
    for each in SCHEMES:
        plan = each.plan(Network(), make_data()[0][: BATCH // each.replicas])
        closed = each.count_inner_bytes(every)
        said = {
            layer.name: sum(
                note.bytes for note in plan.transfers if is_transfer_of(note.module, layer, every)
            )
            for layer in every
        }
        bench.measured.setdefault("planned", {})[each.name] = said
        bench.figure(
            f"bytes of a layer, off the closed form's, {each.name}",
            max(abs(said[name] - closed[name]) for name in closed),
            at_most=0,
        )
        with tempfile.TemporaryDirectory() as folder:
            record = Record(train(make_job(), each.strategy, runs=folder, limit=2).folder)
            sent = {name: kind["bytes"] for name, kind in record.sent_per_step.items()}
        bench.measured.setdefault("sent", {})[each.name] = sent
        bench.figure(
            f"bytes in a step beside those of the closed forms, {each.name}",
            sum(sent.values()) - each.count_step_bytes(every),
            at_least=0,
            at_most=512,
        )
    one, pairs = (
        bench.measured["sent"][f"tensor, {kind}"]["tensor"] for kind in ("one split", "pairs")
    )
    bench.figure(
        "bytes of pairs, over those of one split for all layers", pairs / one, at_most=0.99
    )


def is_transfer_of(at: str, layer: Layer, every: Sequence[Layer]) -> bool:
    """Return whether a transfer belongs to a layer. A transfer between layers belongs to the first
    fully connected one.
    """
    return at == layer.name or (not at and layer == every[find_first_fully_connected(every)])


def measure_step(cluster: Cluster, scheme: Scheme, folder: Path) -> float:
    """Train on all hosts, and return the milliseconds of a step."""
    place = tempfile.mkdtemp(dir=folder)
    cluster.run([str(Path(__file__).resolve()), "--worker", scheme.strategy, place], timeout=300)
    (run,) = Path(place).iterdir()
    return compute_step_milliseconds(
        [line["start"] for line in Record(run).select_lines("step", 0)]
    )


def run_worker(strategy: str, folder: str) -> None:
    train(make_job(), strategy, runs=folder, limit=BATCHES)


def build_table(bench: Bench, every: list[Layer]) -> str:
    """Return the table of the page: kilobytes and times. The smallest value of each layer, and the
    shortest time, are bold.
    """
    closed = {each.name: each.count_layer_bytes(every) for each in SCHEMES if each.replicas == 1}
    rows = []
    for layer in every:
        least = min(found[layer.name] for found in closed.values())
        rows.append(
            [
                layer.name,
                *(
                    f"**{size}**" if found[layer.name] == least else size
                    for found in closed.values()
                    for size in [f"{found[layer.name] / 1000:,.0f}"]
                ),
            ]
        )
    rows.append(
        [
            "the step",
            *(
                f"{each.count_step_bytes(every) / 1000:,.0f}"
                for each in SCHEMES
                if each.replicas == 1
            ),
        ]
    )
    times = {name: median(found) for name, found in bench.measured["ms per step"].items()}
    best = min(times.values())
    rows.append(
        [
            "measured [ms]",
            *(
                f"**{format_milliseconds(each / 1000)}**"
                if each == best
                else format_milliseconds(each / 1000)
                for each in times.values()
            ),
        ]
    )
    return table(["kilobytes that a rank sends", *closed], rows)


if __name__ == "__main__":
    main()
