"""Models that torch.compile has compiled train as they do without it, or are refused by name.

The backend `aot_eager` traces forward and backward as the default one does, and needs no C++
compiler.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.engine.compiled_modules import is_compiled
from paragrad.engine.rng.draws import COMPILED_DRAWS, CompiledDraws

pytestmark = pytest.mark.processes

BACKEND = "aot_eager"
GENERATOR = torch.Generator().manual_seed(0)
VECTORS = TensorDataset(
    torch.randn(24, 8, generator=GENERATOR), torch.randint(4, (24,), generator=GENERATOR)
)
IMAGES = TensorDataset(
    torch.randn(24, 1, 8, 8, generator=GENERATOR), torch.randint(4, (24,), generator=GENERATOR)
)


class Block(nn.Module):
    """A layer with a forward of its own; torch.compile skips modules of torch itself."""

    def __init__(self, inputs: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.layer(x)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(8, 16, 0.2), Block(16, 16), Block(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.dense = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.conv(x).relu().flatten(1))


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(8, 4), Block(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def compile_outside() -> nn.Module:
    return torch.compile(Mlp(), backend=BACKEND)


def compile_in_place() -> nn.Module:
    model = Mlp()
    model.compile(backend=BACKEND)
    return model


def compile_blocks() -> nn.Module:
    model = Mlp()
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model


def make_job(model: Callable[[], nn.Module], train: TensorDataset = VECTORS) -> pg.Job:
    return pg.Job(
        name="compiled",
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=train,
        batch=8,
        epochs=1,
        dtype=torch.float64,
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (compile_outside, "data(2)"),
        (compile_outside, "data(2, state=fully_sharded)"),
        (compile_outside, "data(2, state=replicated, reduce=ring)"),
        (compile_outside, "data(2, micro=3)"),
        (compile_outside, "server(2)"),
        (compile_outside, "local(2, every=2)"),
        (compile_in_place, "data(2)"),
        (compile_in_place, "data(2, state=fully_sharded)"),
        (compile_blocks, "pipeline(2, micro=2)"),
        (compile_blocks, "place(2)"),
        (compile_blocks, "data(2)"),
    ],
)
@pytest.mark.usefixtures("warm_ranks")
def test_compiled_model_trains_as_it_is_written(
    model: Callable[[], nn.Module], text: str, tmp_path: Path
) -> None:
    """The blocks have dropout, of which each sample draws the same numbers on every rank.

    Earlier, compiled code drew inside its own kernels, the inspection of a model compiled graphs of
    its own hooks, and a second backward through one graph was refused by torch.
    """
    compiled = pg.train(make_job(model), text, runs=tmp_path)
    plain = pg.train(make_job(Mlp), text, runs=tmp_path)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (make, text)
        for make in (compile_outside, compile_in_place)
        for text in ("place(2)", "pipeline(2, micro=2)")
    ],
)
def test_compiled_model_is_not_cut(
    model: Callable[[], nn.Module], text: str, tmp_path: Path
) -> None:
    """Earlier, the reason for a model compiled in place was how its modules exchange tensors."""
    with pytest.raises(
        pg.Refused, match=r"torch.compile made the model one graph.*compile its layers, each by"
    ):
        pg.train(make_job(model), text, runs=tmp_path)


@pytest.mark.parametrize(
    ("model", "train", "text"),
    [(Mlp, VECTORS, "tensor(2)"), (ConvNet, IMAGES, "spatial(2)"), (Fork, VECTORS, "branch(2)")],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_compiled_code_computes_with_no_divided_tensor(
    model: Callable[[], nn.Module], train: TensorDataset, text: str, tmp_path: Path
) -> None:
    with pytest.raises(
        pg.Refused, match=r"the model is compiled, .*train it without torch.compile"
    ):
        pg.train(
            make_job(lambda: torch.compile(model(), backend=BACKEND), train), text, runs=tmp_path
        )


class CountingBackend:
    """The backend of the tests, which counts graphs and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1
        compiled = aot_eager(graph, inputs)

        def run_graph(*arguments: object) -> object:
            self.calls += 1
            return compiled(*arguments)

        return run_graph


def train_loop(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(model, nn.functional.cross_entropy, optimizer, "serial") as trainer:
        return [trainer.step(*batch).loss for batch in trainer.batches(VECTORS, 8, 0)]


def test_steps_run_one_compiled_graph() -> None:
    """The inspection of the model compiles nothing, and each step calls the graph once.

    Earlier, the inspection ran batches of two and of three samples, so that the graph of the steps
    was compiled for any size. It also compiled paragrad's own functions, up to torch's limit.
    """
    torch.manual_seed(0)
    model = Mlp()
    plain = train_loop(model)
    torch.manual_seed(0)
    backend = CountingBackend()
    model = torch.compile(Mlp(), backend=backend)
    assert is_compiled(model)
    assert train_loop(model) == pytest.approx(plain, rel=1e-6)
    assert (backend.graphs, backend.calls) == (1, 3)


@pytest.mark.story
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, at its import
def test_default_backend_draws_the_numbers_of_the_step() -> None:
    """The default backend calls torch's random kernels, though it has faster ones of its own."""
    if shutil.which("g++") is None:
        pytest.skip("the default backend of torch.compile needs a C++ compiler, and g++ is missing")
    open_before = COMPILED_DRAWS.trainings
    torch.manual_seed(0)
    plain = train_loop(Mlp())
    torch.manual_seed(0)
    assert train_loop(torch.compile(Mlp())) == pytest.approx(plain, rel=1e-6)
    from torch._inductor import config

    # a test before this one may have left a training open
    assert COMPILED_DRAWS.trainings == open_before
    assert config.fallback_random is (open_before > 0)


def test_a_training_left_open_does_not_hide_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first training began before torch.compile was imported, and was never closed.

    A second one then found a training open, and left torch.compile's own draws on.
    """
    name = "torch._inductor.config"
    monkeypatch.delitem(sys.modules, name, raising=False)
    draws = CompiledDraws()
    draws.open()
    config: Any = SimpleNamespace(fallback_random=False)
    monkeypatch.setitem(sys.modules, name, config)
    draws.open()
    assert config.fallback_random is True
    draws.close()
    assert config.fallback_random is True
    draws.close()
    assert config.fallback_random is False
