"""The update check finds updates that differ from one worker's, and accepts correct ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import VECTORS, make_job, make_mlp, make_momentum_sgd
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import paragrad as pg
from paragrad.launch import Launcher
from paragrad.runtime.world import World
from paragrad.trainer.checks.update_check import (
    UpdateCheck,
    copy_whole_optimizer,
    explain_no_copy,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def make_start(dtype: torch.dtype) -> Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(0)).to(dtype)


def make_check(dtype: torch.dtype) -> UpdateCheck:
    """Return the check of one worker's SGD step on random numbers, with a learning rate of 0.1."""
    before = make_start(dtype)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(40, generator=generator).to(dtype)
    after = before - 0.1 * gradient
    momentum = {"momentum_buffer": gradient}
    changes = {"w": float((after - before).abs().max())}
    changes["momentum_buffer of w"] = float(gradient.abs().max())
    return UpdateCheck({"w": after}, {"w": momentum}, changes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.0, -1.0, 0.5, 10.0])
def test_other_updates_are_found_in_every_type(dtype: torch.dtype, factor: float) -> None:
    """Earlier, 32 times the change was allowed in bfloat16, so a missing update passed as equal."""
    check = make_check(dtype)
    before, after = make_start(dtype), check.parameters["w"]
    found = check.find_gap({"w": before + factor * (after - before)}, check.state)
    assert found is not None
    assert found[1].tensor == "w"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_of_an_update_is_equal(dtype: torch.dtype) -> None:
    check = make_check(dtype)
    eps = torch.finfo(dtype).eps
    assert check.find_gap(check.parameters, check.state) is None
    assert check.find_gap({"w": check.parameters["w"] * (1 + eps)}, check.state) is None


def test_other_states_are_found() -> None:
    check = make_check(torch.float32)
    for state in ({"momentum_buffer": torch.zeros(40)}, {}):
        found = check.find_gap(check.parameters, {"w": state})
        assert found is not None
        assert found[1].tensor == "momentum_buffer of w"


def test_a_copied_optimizer_steps_as_the_original() -> None:
    model, other = make_mlp(), make_mlp()
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    names = [[name for name, _ in model.named_parameters()]]
    for _ in range(3):
        functional.cross_entropy(model(VECTORS.tensors[0]), VECTORS.tensors[1]).backward()
        optimizer.step()
    parameters = dict(other.named_parameters())
    with torch.no_grad():
        for name, each in model.named_parameters():
            parameters[name].copy_(each)
            parameters[name].grad = each.grad.clone()  # type: ignore[union-attr]
    state = {
        name: copy.deepcopy(dict(optimizer.state[each])) for name, each in model.named_parameters()
    }
    assert explain_no_copy(optimizer, names) is None
    copied = copy_whole_optimizer(optimizer, names, parameters, state)
    optimizer.step()
    copied.step()
    for name, each in model.named_parameters():
        assert torch.equal(parameters[name], each)


class Norming(torch.optim.SGD):
    """An optimizer that keeps the norm of all gradients together; it steps on one rank alone."""

    last_norm: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [each.grad for group in self.param_groups for each in group["params"]]
        self.last_norm = torch.stack([each.norm() for each in gradients]).norm()
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(0.1 * each.grad / (1 + self.last_norm))


def test_ranks_agree_on_an_update_that_is_not_compared(tmp_path: Path) -> None:
    """All ranks know that the update is not compared.

    Earlier, only rank 0 had the reason. It left a collective in which the other ranks waited.
    """
    job = make_job(
        "norming", make_mlp, VECTORS, optimizer=lambda parameters: Norming(parameters, lr=0.1)
    )
    run = pg.train(job, "data(2, state=shared_memory)", runs=tmp_path)
    *_, last = run.select_lines("event")
    assert (
        "its update was not compared (Norming keeps last_norm in an attribute)" in last["message"]
    )
    assert run.to_json()["compared_updates"] < run.to_json()["compared_steps"]


def test_no_check_trains_the_same_bits(tmp_path: Path) -> None:
    """Earlier, a share of 0 also switched off operations that are no comparison."""
    job = make_job("mlp", make_mlp, VECTORS, optimizer=make_momentum_sgd)
    weights: list[dict[str, Tensor]] = []
    for share in (0, "1%"):
        run = pg.train(job, "data(2, reduce=ring)", runs=tmp_path, check=share)
        weights.append(load_file(run.folder / "model.safetensors"))
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


# ---- loops of users -----------------------------------------------------------------------------
class Scaled(nn.Module):
    """A model with factors in a tuple, which the loop changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.second = nn.Linear(8, 4)
        self.scales = (1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x) * self.scales[0])) * self.scales[1]


def train_changed(world: World, strategy: str, change: str) -> int:
    """Run a loop that changes model or optimizer after two steps; return the number of steps."""
    torch.manual_seed(1)
    model = Scaled()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
    if change == "second key":
        optimizer.param_groups[0]["fast"] = list(model.first.parameters())
    with pg.parallelize(
        model, functional.cross_entropy, optimizer, strategy, check="100%"
    ) as trainer:
        for inputs, target in trainer.batches(VECTORS, 4, 0):
            if trainer.steps == 2 and change == "tuple":
                model.scales = (0.5, 2.0)
            if trainer.steps == 2 and change == "more parameters":
                optimizer.param_groups[0]["params"].extend(model.second.parameters())
            trainer.step(inputs, target)
        return trainer.steps


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        ("pipeline(2, micro=2)", "tuple"),
        ("tensor(2)", "tuple"),
        ("data(2, reduce=ring)", "tuple"),
        ("data(2, reduce=ring)", "more parameters"),
        ("data(2, reduce=ring)", "second key"),
    ],
)
def test_right_loops_are_not_refused(pool: Launcher, strategy: str, change: str) -> None:
    """Earlier, the reference step used the tuple and the parameter groups of the first step."""
    assert pool.run(train_changed, strategy, change, size=2) == [8, 8]
