"""Work and depth of models, compared with torch's flop counter and with a published table.

They are also compared with a graph that the test follows itself. Functions that are not counted
are named.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as drawn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from paragrad import Job
from paragrad import job as built_in
from paragrad.commands.cli import app
from paragrad.commands.count_work import profile_job
from paragrad.errors import Refused
from paragrad.jobs.loss import LossModule
from paragrad.planner import layer_costs, sequence_costs
from paragrad.planner.profile import count_model_calls, disable_fused_kernels

pytestmark = pytest.mark.pure


class Before(nn.Module):
    """A model with a parameter before a layer, so that the layer's inputs need a gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        found = self.layer(*(each * self.scale for each in inputs))
        return found[0] if isinstance(found, tuple) else found


class First(nn.Module):
    """A model that begins with the layer, so that the layer's inputs need no gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        found = self.layer(*inputs)
        return found[0] if isinstance(found, tuple) else found


class Packed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(nn.utils.rnn.pack_padded_sequence(inputs, [7, 3, 2], batch_first=True))[
            0
        ].data


class Own(nn.Module):
    """A user's layer that calls known functions: a matrix product, attention, an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        heads = (functional.relu(inputs) @ self.weight).view(3, 7, 2, 4).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def make_sequence(*, length: int = 7) -> Tensor:
    return torch.randn(3, length, 6)


# (layer, its inputs)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (torch.randn(4, 6),)),
    "linear of three dimensions, without bias": (
        lambda: nn.Linear(6, 5, bias=False),
        (make_sequence(),),
    ),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, dilation=2), (torch.randn(3, 6, 11),)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=1), (torch.randn(3, 4, 9, 8),)),
    "conv2d in groups": (
        lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"),
        (torch.randn(3, 4, 9, 8),),
    ),
    "conv2d by channel": (
        lambda: nn.Conv2d(4, 4, 3, groups=4, stride=2),
        (torch.randn(3, 4, 9, 8),),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), (torch.randn(3, 2, 4, 5, 6),)),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
        (torch.randn(3, 4, 5, 6),),
    ),
    "rnn": (lambda: nn.RNN(6, 5, nonlinearity="relu"), (make_sequence(),)),
    "gru": (lambda: nn.GRU(6, 5, num_layers=3, batch_first=True), (make_sequence(),)),
    "lstm": (lambda: nn.LSTM(6, 5, batch_first=True), (make_sequence(),)),
    "lstm of both directions": (
        lambda: nn.LSTM(6, 5, 2, bidirectional=True, bias=False),
        (make_sequence(),),
    ),
    "lstm with projection": (
        lambda: nn.LSTM(6, 5, 2, proj_size=3, dropout=0.5),
        (make_sequence(),),
    ),
    "lstm of a packed sequence": (lambda: Packed(nn.LSTM(6, 5, 2)), (make_sequence(),)),
    "attention": (
        lambda: Twice(nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.1)),
        (make_sequence(),),
    ),
    "attention to another sequence": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True, kdim=6, vdim=4),
        (make_sequence(), make_sequence(length=5), torch.randn(3, 5, 4)),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 16, batch_first=True), (make_sequence(),)),
    "own": (Own, (make_sequence(),)),
}


class Twice(nn.Module):
    """A model that gives its input to attention as query, key and value (self-attention)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs, inputs, inputs)


def count_products(
    model: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[tuple[int, int], tuple[int, int], list[str]]:
    """Return (forward, backward) flops of paragrad and of torch, and what was not counted."""

    def loss(output: Tensor, target: Any) -> tuple[Tensor, int]:
        return output.square().sum(), 1

    with disable_fused_kernels() as counter:
        model.train()(*inputs)
    calls, torchs, missed = count_model_calls(LossModule(model, loss), inputs, None, 1)
    forward = counter.get_total_flops()
    backward = torchs - counter.get_total_flops()
    ours = (
        sum(each.output.products for each in calls),
        sum(each.input_gradient.products + each.weight_gradient.products for each in calls),
    )
    return ours, (forward, backward), missed


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("around", "trained"),
    [(Before, True), (First, True), (Before, False)],
    ids=["all gradients", "of the weights", "of the inputs"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_matrix_product_flops_equal_the_torch_counter(
    name: str, around: type, trained: bool
) -> None:
    """Forward and backward are compared, with and without gradients of inputs and weights."""
    make, inputs = LAYERS[name]
    model = around(make())
    for parameter in model.layer.parameters():
        parameter.requires_grad_(trained)
    ours, torchs, missed = count_products(model, inputs)
    assert ours == torchs
    assert min(ours) > 0
    assert missed == []


def test_recurrent_cells_called_step_by_step() -> None:
    """If the user's own loop calls a cell, its state comes from the step before.

    So the state needs a gradient.
    """

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(6, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            state = None
            for step in inputs.unbind(1):
                state = self.cell(step, state)
            assert state is not None
            return state[0]

    ours, torchs, missed = count_products(Loop(), (make_sequence(),))
    assert ours == torchs
    assert missed == []


def test_torch_counts_grouped_kernels_as_one() -> None:
    """Torch's count is wrong for grouped convolutions, so paragrad corrects it.

    The gradient of a kernel with 2 groups costs as much as the forward, but torch counts twice
    that. If this test fails, torch has repaired its count; then remove the correction.
    """
    layer = nn.Conv2d(4, 6, 3, groups=2)
    image = torch.randn(2, 4, 5, 5)
    with FlopCounterMode(display=False) as forward:
        output = layer(image)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


IMAGE = {"samples": 4, "inputs": 8, "outputs": 16, "image": (64, 64), "kernel": (4, 4)}


def convolution(**changes: Any) -> layer_costs.PassCosts:
    found = {**IMAGE, **changes}
    image = found["image"]
    kernel = found["kernel"]
    result = tuple(size - width + 1 for size, width in zip(image, kernel, strict=True))
    if "result" in changes:
        result = found["result"]
    return layer_costs.Convolution(
        found["samples"], found["inputs"], found["outputs"], image, result, kernel, (1, 1), (1, 1)
    ).count_passes(bias=False)


def linear(**changes: int) -> layer_costs.PassCosts:
    found = {"samples": 4, "inputs": 8, "outputs": 16, **changes}
    return layer_costs.count_linear(found["samples"], found["inputs"], found["outputs"], bias=False)


def norm(*, samples: int = 64, channels: int = 8) -> layer_costs.PassCosts:
    return layer_costs.count_normalization(samples * channels * 16, samples * 16, channels)


def pool(*, window: int = 4) -> layer_costs.PassCosts:
    return layer_costs.count_pooling(64, 64 * window, window, 1, average=False)


# The published table: (layer, sizes before, the size that is doubled, how much deeper the
# output, the gradient of the inputs and the gradient of the weights become).
PUBLISHED: list[
    tuple[
        Callable[..., layer_costs.PassCosts], dict[str, Any], dict[str, Any], tuple[int, int, int]
    ]
] = [
    (linear, {}, {"inputs": 16}, (1, 0, 0)),
    (linear, {}, {"outputs": 32}, (0, 1, 0)),
    (linear, {}, {"samples": 8}, (0, 0, 1)),
    (convolution, {}, {"inputs": 16}, (1, 0, 0)),
    (convolution, {}, {"outputs": 32}, (0, 1, 0)),
    (convolution, {}, {"samples": 8}, (0, 0, 1)),
    (convolution, {"result": (64, 64)}, {"image": (128, 64), "result": (128, 64)}, (0, 0, 1)),
    (convolution, {"result": (64, 64)}, {"image": (64, 128), "result": (64, 128)}, (0, 0, 1)),
    (convolution, {"result": (64, 64)}, {"kernel": (8, 4), "result": (64, 64)}, (1, 1, 0)),
    (convolution, {"result": (64, 64)}, {"kernel": (4, 8), "result": (64, 64)}, (1, 1, 0)),
    (pool, {}, {"window": 8}, (1, 0, 0)),
    # a norm computes two sums, one after the other
    (norm, {}, {"samples": 128}, (2, 1, 1)),
    (norm, {}, {"channels": 16}, (0, 0, 0)),
    (lambda elements=64: layer_costs.count_activation(elements), {}, {"elements": 128}, (0, 0, 0)),
]


@pytest.mark.parametrize(("layer", "before", "change", "deeper"), PUBLISHED)
def test_depth_grows_as_published(
    layer: Callable[..., layer_costs.PassCosts],
    before: dict[str, Any],
    change: dict[str, Any],
    deeper: tuple[int, int, int],
) -> None:
    one = layer(**before)
    two = layer(**change)
    assert tuple(more.depth - less.depth for less, more in zip(one, two, strict=True)) == deeper


def test_work_grows_as_published() -> None:
    for change in ("samples", "inputs", "outputs"):
        for make in (linear, convolution):
            start = {"samples": 4, "inputs": 8, "outputs": 16}[change]
            for less, more in zip(make(), make(**{change: 2 * start}), strict=True):
                assert more.work == 2 * less.work
    assert {each.work for each in convolution()} == {2 * 4 * 16 * 8 * 61 * 61 * 16}
    assert [each.work for each in linear()] == [2 * 4 * 8 * 16] * 3


@pytest.mark.parametrize("inputs", [1, 2, 3, 63, 64, 65, 784])
def test_the_depth_of_a_fully_connected_layer(inputs: int) -> None:
    """The depth is one product and a tree of additions; a bias is one more leaf of the tree."""
    rounds = len(bin(inputs - 1)) - 2 if inputs > 1 else 0
    assert layer_costs.count_linear(4, inputs, 5, bias=False)[0].depth == 1 + rounds
    assert layer_costs.count_linear(4, inputs, 5)[0].depth == 1 + len(bin(inputs)) - 2


@given(drawn.integers(1, 300))
def test_depth_of_a_sum_is_a_binary_tree(terms: int) -> None:
    left = terms
    rounds = 0
    while left > 1:
        left = -(-left // 2)
        rounds = rounds + 1
    assert layer_costs.compute_sum_depth(terms) == rounds


def compute_longest_chain(found: sequence_costs.RecurrentLayers) -> int:
    """Return the length of the longest chain to the last outputs, computed cell by cell."""
    gates_of_state = 1 + layer_costs.compute_sum_depth(found.hidden + 1)
    tail = found.cell.forward

    @functools.cache
    def compute_ready_time(layer: int, direction: int, step: int) -> int:
        wide = found.inputs if layer == 0 else found.hidden * found.directions
        below = (
            0
            if layer == 0
            else max(
                compute_ready_time(
                    layer - 1, each, found.steps - 1 - step if each != direction else step
                )
                for each in range(found.directions)
            )
        )
        before = compute_ready_time(layer, direction, step - 1) if step else 0
        return (
            max(below + 1 + layer_costs.compute_sum_depth(wide + 1), before + gates_of_state) + tail
        )

    return max(
        compute_ready_time(found.layers - 1, direction, found.steps - 1)
        for direction in range(found.directions)
    )


@given(
    drawn.sampled_from(sorted(sequence_costs.CELLS)),
    drawn.integers(1, 9),
    drawn.integers(1, 40),
    drawn.integers(1, 40),
    drawn.integers(1, 4),
)
def test_the_depth_of_a_recurrent_layer_is_that_of_its_graph(
    cell: str, steps: int, inputs: int, hidden: int, count: int
) -> None:
    found = sequence_costs.RecurrentLayers(
        sequence_costs.CELLS[cell], 3 * steps, 3, steps, inputs, hidden, count
    )
    assert found.count_passes()[0].depth == compute_longest_chain(found)


@pytest.mark.parametrize("directions", [1, 2])
def test_the_depth_of_a_recurrent_layer_grows_with_the_sequence(directions: int) -> None:
    """The depth grows linearly with the number of steps.

    With two directions, every layer waits for the whole layer below.
    """
    depths = [
        [
            each.depth
            for each in sequence_costs.RecurrentLayers(
                sequence_costs.CELLS["lstm"], 8 * steps, 8, steps, 16, 32, 3, directions
            ).count_passes()
        ]
        for steps in (100, 200, 300)
    ]
    for less, more, most in zip(*depths, strict=True):
        # the gradient of the weights is a sum over all tokens, which is a tree
        assert abs((most - more) - (more - less)) <= 1
    step = 1 + 6 + 6
    assert depths[1][0] - depths[0][0] == 100 * step * (1 if directions == 1 else 3)


def test_work_and_depth_of_digits_by_hand() -> None:
    """The model of digits has 64 -> 64 -> 10 features, and the batch is 64.

    The depth of the forward is 8 + 1 + 8. The backward takes 5 + 1 to the first layer, whose
    weights need 7 more.
    """
    found = profile_job(built_in("digits"))
    first, relu, second = found.layers
    assert [each.kind for each in found.layers] == [
        "fully connected",
        "activation",
        "fully connected",
    ]
    assert (first.output.work, relu.output.work, second.output.work) == (
        2 * 64**3,
        64**2,
        2 * 64 * 64 * 10,
    )
    # the images need no gradient
    assert first.input_gradient == layer_costs.NO_COST
    assert first.weight_gradient.work == 2 * 64**3 + 64 * 64
    assert second.input_gradient.bytes == 4 * (64 * 10 + 64 * 64 + 64 * 10 + 10)
    assert found.depth == 17 + 13
    assert found.parallelism == found.work / 30
    assert found.compute_step_bounds(1) == (found.work, found.work + 30)
    assert found.compute_step_bounds(10**9) == (30, 30)


@given(drawn.integers(1, 10**9), drawn.integers(1, 10**4), drawn.integers(1, 10**6))
def test_speedup_bounds_are_ordered(work: int, depth: int, processors: int) -> None:
    least, most = layer_costs.compute_parallel_bounds(work, depth, processors)
    assert max(work / processors, depth) <= least <= most
    assert most <= work / processors + depth


@pytest.mark.table
def test_built_in_jobs(data: Path) -> None:
    for name in (
        "digits",
        "inception-digits",
        "mnist-mlp",
        "mnist-cnn",
        "mnist-resnet",
        "shakespeare-lstm",
        "shakespeare-gpt",
    ):
        found = profile_job(built_in(name), data)
        assert found.not_counted == ()
        assert found.products == found.torch_products > 0
        assert found.parallelism > 10_000  # as the published table says


POINTS = TensorDataset(
    torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
)


def make_points_job(model: Callable[[], Any], **changes: Any) -> Job:
    return Job(
        model=model,
        loss=functional.cross_entropy,
        train=POINTS,
        batch=16,
        epochs=1,
        name="mine",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ).replace(**changes)


def test_functions_count_as_modules_do() -> None:
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 6))
            self.second = nn.Linear(8, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = functional.relu(functional.linear(inputs, self.first))
            return functional.linear(self.second(hidden).sigmoid(), torch.eye(3))

    modules = profile_job(
        make_points_job(
            lambda: nn.Sequential(
                nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3), nn.Sigmoid()
            )
        )
    )
    functions = profile_job(make_points_job(Functions))
    known = [(each.kind, each.output) for each in modules.layers]
    assert [(each.kind, each.output) for each in functions.layers][1:] == known[1:]
    assert functions.layers[0].name == "model (Functions)"
    assert functions.layers[0].calls == 2
    assert functions.products == functions.torch_products
    assert functions.not_counted == ()


def test_unknown_function_is_named() -> None:
    """The profile names what it cannot count.

    Here these are unknown functions, a parameter that no call uses, and a user's own backward.
    """

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, inputs: Tensor) -> Tensor:
            return inputs * 2

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.unused = nn.Parameter(torch.randn(3))

        def forward(self, inputs: Tensor) -> Tensor:
            return Doubled.apply(torch.einsum("ni,ij->nj", inputs, self.weight).cumsum(1).cumsum(1))

    found = profile_job(make_points_job(lambda: nn.Sequential(Odd(), nn.Linear(6, 3))))
    assert found.not_counted == (
        "0 (Odd): einsum",
        "0 (Odd): cumsum, 2 times",
        "0.unused: no call with this parameter was seen",
        "DoubledBackward: the backward of a function of its own",
    )
    # the missing products are those of einsum: its forward, and the gradient of its weights
    assert found.torch_products - found.products == 2 * (2 * 16 * 6 * 6)


def test_profiling_leaves_the_model_unchanged() -> None:
    """The model is unchanged, also if the build function returns an existing model.

    The random states of torch, numpy and Python are unchanged too.
    """
    held = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 3)
    ).eval()
    before = {name: value.clone() for name, value in held.state_dict().items()}
    points = POINTS.tensors[0].clone()
    states = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    found = profile_job(make_points_job(lambda: held))
    assert {each.kind for each in found.layers} == {
        "fully connected",
        "batch norm",
        "activation",
        "dropout",
    }
    assert all(torch.equal(value, before[name]) for name, value in held.state_dict().items())
    assert not any(
        module.training or module._forward_hooks or module._forward_pre_hooks
        for module in held.modules()
    )
    assert all(parameter.grad is None for parameter in held.parameters())
    assert torch.equal(POINTS.tensors[0], points)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (numpy.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def test_types_and_batches() -> None:
    """Twice the batch is twice the work, and float64 is twice the bytes; autocast is counted."""
    small, large = (
        profile_job(make_points_job(lambda: nn.Linear(6, 3), batch=batch)) for batch in (16, 32)
    )
    assert large.work == 2 * small.work
    double = profile_job(make_points_job(lambda: nn.Linear(6, 3), dtype=torch.float64))
    assert double.layers[0].output.bytes == 2 * small.layers[0].output.bytes
    assert (
        profile_job(make_points_job(lambda: nn.Linear(6, 3), dtype=torch.bfloat16)).products
        == small.products
    )


def test_invalid_profile_is_refused_with_the_repair() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("not today")
            return self.linear(inputs)

    with pytest.raises(
        Refused, match="job mine: one batch through the model raised RuntimeError: not today"
    ):
        profile_job(make_points_job(Sometimes))
    with pytest.raises(Refused, match=r"a job is a paragrad.Job; got str"):
        profile_job("digits")  # type: ignore[arg-type]
    with pytest.raises(Refused, match="model must be a function that builds the model"):
        profile_job(make_points_job(nn.Linear(6, 3)))


def test_work_command() -> None:
    shown = CliRunner().invoke(app, ["work", "digits", "--set", "width=32", "--batch", "16"])
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    rows = [line.split("\t") for line in lines if "\t" in line]
    assert rows[0] == [
        "0 (Linear)",
        "fully connected",
        "output",
        f"{2 * 16 * 64 * 32:,}",
        "8",
        "8,192",
        f"{4 * (16 * 64 + 64 * 32 + 32 + 16 * 32):,}",
    ]
    assert [row[2] for row in rows] == [
        "output",
        "weight gradient",
        "output",
        "input gradient",
        "output",
        "input gradient",
        "weight gradient",
    ]
    facts = dict(line.split(": ", 1) for line in lines if "\t" not in line)
    assert facts["matrix products"].endswith("the layers above explain all of them")
    found = json.loads(
        CliRunner()
        .invoke(app, ["work", "digits", "--set", "width=32", "--batch", "16", "--json"])
        .stdout
    )
    assert facts["work W"] == f"{found['work']:,} operations"
    assert facts["time of 1 processor(s)"].startswith(f"{found['work']:,} to ")
    assert found["bounds"][-1]["at_least"] == found["depth"]
    assert (found["job"], found["batch"], found["not_counted"]) == ("digits", 16, [])
    assert [layer["name"] for layer in found["layers"]] == ["0 (Linear)", "1 (ReLU)", "2 (Linear)"]
