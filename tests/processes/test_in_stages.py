"""place and pipeline: the same training as serial's, with the parts of models that are cut anywhere."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import JOBS, MODULES, TOO_FEW, VECTORS, covering_parts, parts_cells, resolved
from equality import job as make_job
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paragrad as pg
from paragrad.techniques.model_parallel.flow import SHAPES, Flow
from paragrad.verbs.lockstep import difference
from paragrad.world.launching import Ranks


def found(pool: Ranks, row: str, job: pg.Job) -> Any:
    chosen = resolved(row)
    answers = pool.run(difference, job, chosen, size=chosen.size)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.parametrize(("row", "column"), [
    pytest.param(*cell, marks=() if cell in covering_parts() else pytest.mark.table) for cell in parts_cells()])
def test_it_is_the_same_training(pool: Ranks, row: str, column: str) -> None:
    assert found(pool, row, JOBS[column]).value <= 1e-10


@pytest.mark.parametrize(("row", "column"), [each for each in TOO_FEW if each[0] in ("place(3)", "place(2)")
                                            and each[1] != "frozen and unused"])
def test_a_model_of_too_few_modules(pool: Ranks, row: str, column: str) -> None:
    with pytest.raises(pg.RankFailed, match=f"the model calls {MODULES[column]} module.* parts are wanted; give fewer workers"):
        found(pool, row, JOBS[column])


# ---- odd models --------------------------------------------------------------------------------------------------------------
class Skipping(nn.Module):
    """A parameter of its own, skips over several layers, a buffer written in place, a value of an early layer in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = self.layers[0](x) * self.scale
        for layer in self.layers[1:]:
            hidden = hidden + torch.tanh(layer(hidden))
        marked = torch.zeros_like(x)
        marked[:, 1:] = first[:, 1:]
        hidden += marked * self.scale
        return self.out(hidden) + first.mean(1, keepdim=True)


class Shared(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.layer(x))
        return self.out(x)


class Checkpointed(nn.Module):
    """Checkpoints by itself, across what may be a cut, in both ways that torch has."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(nn.Linear(10, 10) for _ in range(4)), reentrant
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(lambda h: self.layers[2](torch.tanh(self.layers[1](h))), x, use_reentrant=self.reentrant)
        return self.out(self.layers[3](x))


class Nested(nn.Module):
    """Units that take and give dicts, tuples and None."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 10)

        def forward(self, state: dict[str, Any], bias: Tensor | None = None) -> tuple[dict[str, Any], None]:
            hidden = torch.tanh(self.layer(state["hidden"]))
            return {"hidden": hidden if bias is None else hidden + bias, "seen": (*state["seen"], hidden)}, None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inner() for _ in range(3))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": x, "seen": ()}
        for number, layer in enumerate(self.layers):
            state, _ = layer(state, bias=x if number == 2 else None)
        return self.out(sum(state["seen"]))


class Sometimes(nn.Module):
    """Another way through the model for other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.second = (nn.Linear(10, 10) for _ in range(3))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, large = torch.tanh(self.first(x)), x[:, :1] > 1.5
        if large.any():
            hidden = hidden + large * self.rare(hidden)
        return self.out(torch.tanh(self.second(hidden)))


ODD = {"skipping": Skipping, "shared": Shared, "checkpointed": lambda: Checkpointed(False),
       "checkpointed, reentrant": lambda: Checkpointed(True), "nested": Nested, "sometimes": Sometimes}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("row", ["place(2)", "place(3)", pytest.param("pipeline(2, micro=3)", marks=pytest.mark.table),
                                 pytest.param("pipeline(3, micro=2, schedule=zero_bubble)", marks=pytest.mark.table),
                                 "pipeline(3, micro=2, recompute=true)"])
def test_models_of_odd_ways(pool: Ranks, name: str, row: str) -> None:
    assert found(pool, row, make_job(name, ODD[name], VECTORS)).value <= 1e-10


class Deciding(nn.Module):
    """Looks at a value that only one part has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(10, 10) for _ in range(3)), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.abs().max() > 100:
                break
        return self.out(x)


class Counting(nn.Module):
    """A module of which nobody knows what it gives without running it."""

    class Kept(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.sum(1) > 0]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept, self.out = nn.Linear(10, 10), self.Kept(), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(hidden) + self.kept(hidden).mean()


class Forces(nn.Module):
    """Takes gradients in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.out(torch.tanh(self.first(x)))
        return out - torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum(1, keepdim=True)


@pytest.mark.parametrize(("model", "told"), [
    (Forces, "raised RuntimeError: element 0 of tensors does not require grad.* that takes gradients itself is not cut"),
    (Deciding, "raised DataDependentOutputException: .*test_in_stages.py:.*let Python look at values of the inputs alone"),
    (Counting, "raised DynamicOutputShapeException: .*test_in_stages.py:.*and modules at none that decide a shape")])
def test_a_way_that_depends_on_hidden_values_is_refused_at_the_door(model: type[nn.Module], told: str, tmp_path: Path) -> None:
    with pytest.raises(pg.Refused, match=told):
        pg.train(make_job("deciding", model, VECTORS), "place(2)", runs=tmp_path)


def test_a_cut_that_was_asked_for(tmp_path: Path) -> None:
    run = pg.train(JOBS["cnn"], "pipeline(2, micro=2, cut=[4, 1])", runs=tmp_path)
    assert [(line["what"], line["picked"]) for line in run.of("choice") if line["what"] == "cut"] == [("cut", "0 to 3 | 4")]
    with pytest.raises(pg.Refused, match=r"cut=\[1, 1\] is 2 part\(s\) of 2 modules together, and there are 2 of 5"):
        pg.train(JOBS["cnn"], "pipeline(2, micro=2, cut=[1, 1])", runs=tmp_path)


class Blocks(nn.Module):
    """Modules in a list, which is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.h = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(4))
        self.out, self.unused = nn.Linear(10, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.trunk.h:
            x = x + block(x)
        return self.out(x)


@pytest.mark.parametrize(("cut", "picked"), [
    ("[trunk.h.1]", "trunk.h.0.0 to trunk.h.0.1 | trunk.h.1.0 to out"),
    ("[h.3]", "trunk.h.0.0 to trunk.h.2.1 | trunk.h.3.0 to out"),
    ("[h.2.1]", "trunk.h.0.0 to trunk.h.2.0 | trunk.h.2.1 to out")])
def test_a_cut_by_names(cut: str, picked: str, tmp_path: Path) -> None:
    run = pg.train(make_job("blocks", Blocks, VECTORS), f"place(2, cut={cut})", runs=tmp_path)
    assert [line["picked"] for line in run.of("choice") if line["what"] == "cut"] == [picked]
    assert "are one worker's" in (run.first_step or "")


@pytest.mark.parametrize(("strategy", "told"), [
    ("place(2, cut=[h.9])", "cut: no module 'h.9'; known: .*trunk.h.3"),
    ("place(2, cut=[unused])", r"cut=\[unused\]: unused is not called in a forward; cut at one of trunk.h.0.1"),
    ("place(2, cut=[trunk])", "2 parts that are not empty need 1"),
    ("place(2, cut=[h.0])", "2 parts that are not empty need 1"),
    ("place(3, cut=[h.2, h.1])", "3 parts that are not empty need 2 in the order in which they are called"),
    ("place(3, cut=[h.2])", "3 parts that are not empty need 2"),
    ("place(2, cut=[1, h.2])", r"takes a list of whole numbers from 1, such as \[3, 1\] or a list of names"),
    (pg.Place(2, cut=["0"]), "cut names 0, which may be trunk.h.0.*give the whole name")])
def test_names_that_cut_nothing(strategy: str | pg.Place, told: str, tmp_path: Path) -> None:
    with pytest.raises(pg.Refused, match=told):
        pg.train(make_job("blocks", Blocks, VECTORS), strategy, runs=tmp_path)


class Asking(nn.Module):
    """Asks for the shape of what an earlier part made, and goes ways that depend on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        early = torch.tanh(self.first(x))
        large = x * (x > 0.5)
        hidden = early.clone() if large.sum() > 2.0 else early              # the same values, by other operations
        hidden = self.second(hidden) + hidden
        if bool((x[:, 0] > 0).any()):
            hidden = hidden.clone() + 0.0 * early
        hidden = torch.relu(self.third(hidden))
        return self.out(hidden) * (early.size(0) / len(x)) * (early.dim() / 2)


@pytest.mark.parametrize("cut", ["[second]", "[third]", "[out]"])
def test_ways_that_depend_on_the_inputs(pool: Ranks, cut: str) -> None:
    """A shape that was asked for across a cut ended in a KeyError, and a plan was made anew for every micro-batch of a model
    that looks at its inputs, as masks of transformers do."""
    job = make_job("asking", Asking, VECTORS)
    assert found(pool, f"pipeline(2, micro=4, cut={cut})", job).value <= 1e-10


def test_plans_are_kept_by_what_is_read() -> None:
    model = Asking()
    flow = Flow(model, [[("first", 0), ("second", 0)], [("third", 0), ("out", 0)]])
    small, large = torch.zeros(3, 10), torch.ones(3, 10)
    plans = [flow.planned(each) for each in (small, large, small - 0.1, large * 2, torch.ones(4, 10))]
    assert plans[0] is plans[2] is not plans[1]
    assert plans[1] is plans[3] is not plans[4]
    mixed = torch.cat([-torch.ones(3, 1), large[:, 1:]], 1)             # the second question alone is answered otherwise
    assert flow.planned(mixed) is not plans[1]
    for number in range(SHAPES + 3):
        flow.planned(torch.zeros(5 + number, 10))
    assert len(flow.plans) == SHAPES


class Noisy(nn.Module):
    """Draws of the inputs alone, which every rank makes whose Python comes by, and others between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.third = nn.Linear(10, 10), nn.Linear(10, 4)
        self.second = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        early = torch.rand_like(x)
        hidden = nn.functional.dropout(torch.tanh(self.first(x * early)), 0.2)
        late = 1 + 0.1 * torch.randn(x.shape, dtype=x.dtype)
        hidden = nn.functional.dropout(self.second(hidden), 0.1) * late
        return self.third(hidden * (torch.rand([], dtype=x.dtype) + early))


@pytest.mark.parametrize("strategy", [
    "place(2, cut=[second])", "pipeline(2, micro=3, cut=[third])", "place(3)", "pipeline(3, micro=2, recompute=true)"])
def test_draws_of_the_inputs_alone(pool: Ranks, strategy: str) -> None:
    """They were counted as those of the part in which they come, and the ranks after it made them too: a failure."""
    assert found(pool, strategy, make_job("noisy", Noisy, VECTORS)).value <= 1e-10


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(10, 10), nn.Linear(10, 4)
        self.out.register_forward_pre_hook(fails_on_rank_1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


def fails_on_rank_1(_: nn.Module, inputs: tuple[Tensor]) -> None:
    running = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
    if running and any(each.name == "compute" for each in traceback.extract_stack()):
        raise RuntimeError("no such luck")


def test_a_part_that_fails_tells_its_own_story(tmp_path: Path) -> None:
    """It was taken for a failure of the exchange, and who waited for it was told of first."""
    with pytest.raises(pg.RankFailed, match=r"rank 1, step 0: .*no such luck"):
        pg.train(make_job("failing", Failing, VECTORS), "place(2)", runs=tmp_path, unchecked=True)
