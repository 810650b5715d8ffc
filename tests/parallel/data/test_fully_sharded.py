"""data(n, state=fully_sharded): memory, sent bytes, units, tests of the model, and refusals.

The equality table compares its training with serial. test_checkpoint.py tests saving and resuming.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from equality_table import (
    JOBS,
    VECTORS,
    TiedLstm,
    draw_integers,
    draw_numbers,
    make_adam,
    make_job,
    make_mlp,
    resolve_text,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import TensorDataset
from unusual_optimizers import Averaging, Langevin, NormedSgd

from paragrad import Job, RankFailed, Refused, parallelize, train
from paragrad.datasets.loading import separate_target
from paragrad.launch import Launcher
from paragrad.parallel.data.fsdp_units import find_fsdp_units, select_common_units
from paragrad.report.equivalence.lockstep import compare_with_serial
from paragrad.runtime.world import World
from paragrad.strategies.registry import strategy
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.trainer import Trainer

pytestmark = pytest.mark.processes

BOUND = 1e-10
WIDTH = 128
LAYERS = 8
LAYER = 4 * WIDTH * (WIDTH + 1)  # bytes of one layer
WIDE = TensorDataset(draw_numbers(32, WIDTH, seed=1), draw_numbers(32, WIDTH, seed=2))


def make_eight_equal_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


EIGHT = make_job(
    "eight equal layers",
    make_eight_equal_layers,
    WIDE,
    loss=nn.functional.mse_loss,
    optimizer=make_adam,
    batch=8,
)


# ---- memory and bytes ------------------------------------------------------------------------
def count_live_bytes() -> int:
    """Return the bytes of all tensors of this process that have values, each storage once.

    Gradients that no Python variable refers to are counted too.
    """
    gc.collect()
    found: dict[int, int] = {}
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    for tensor in [
        *tensors,
        *(each.grad for each in tensors if each.is_leaf and each.grad is not None),
    ]:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def measure_memory_and_traffic(world: World, chosen: Strategy) -> tuple[int, dict[str, Any]]:
    """Return (bytes that a training holds after two steps, bytes sent in the second step)."""
    before = count_live_bytes()
    trainer = Trainer.build_for_job(world, EIGHT, chosen)
    try:
        batches = trainer.batches(EIGHT.train, EIGHT.batch, epoch=0)
        for _ in range(2):
            trainer.step(*separate_target(next(batches)))
        batches.close()  # type: ignore[attr-defined]
        trainer.training.feed.adopt_batch(None, None)
        assert trainer.training.setup.exchange is not None
        return count_live_bytes() - before, trainer.training.setup.exchange.sent_bytes
    finally:
        trainer.close()


@pytest.mark.story
def test_rank_holds_its_shard_of_parameters_and_state(pool: Launcher) -> None:
    """With Adam, a rank holds its shards of parameters, gradients and two tensors of state.

    Every live tensor of a rank is counted, also a tensor that was kept by mistake.
    """
    serial, _ = measure_memory_and_traffic(World(), Serial(threads=1))
    assert 4 * LAYERS * LAYER <= serial <= 4.2 * LAYERS * LAYER
    ranks = pool.run(
        measure_memory_and_traffic, resolve_text("data(4, state=fully_sharded)"), size=4
    )
    assert max(held for held, _ in ranks) <= 0.45 * serial
    # every layer is gathered for forward and for backward, and its gradient is summed once
    for _, sent in ranks:
        assert sent["parameters"] == {"bytes": 2 * LAYERS * LAYER // 4 * 3, "computed": True}
        assert sent["gradients"] == {"bytes": LAYERS * LAYER // 4 * 3, "computed": True}


@pytest.mark.story
def test_first_step_is_checked_and_memory_is_recorded(tmp_path: Path) -> None:
    run = train(
        EIGHT.replace(test=WIDE, metric=None), "data(2, state=fully_sharded)", runs=tmp_path
    )
    # later steps are checked too; the whole model is gathered for them
    checked = [line["message"] for line in run.select_lines("event") if line["name"] == "checked"]
    assert len(checked) > 1
    assert set(checked) == {
        "loss, weight, 16 gradients, 0 buffers of this step are one worker's, and so is its update"
    }
    choices = {line["what"]: line for line in run.select_lines("choice")}
    assert choices["groups"]["picked"] == "9"
    assert choices["groups"]["because"].startswith("0; 1; 2; 3; 4; 5; 6; 7; the rest")
    for line in run.select_lines("memory"):
        assert (line["parameters"], line["gradients"]) == (LAYERS * LAYER // 2, LAYERS * LAYER // 2)
        assert LAYERS * LAYER <= line["optimizer"] <= LAYERS * LAYER + 100
    serial = train(EIGHT.replace(test=WIDE, metric=None), "serial", runs=tmp_path)
    assert run.test == pytest.approx(serial.test, rel=1e-5)
    assert run.losses == pytest.approx(serial.losses, rel=1e-5)
    for name, value in serial.model().state_dict().items():
        torch.testing.assert_close(run.model().state_dict()[name], value, rtol=1e-2, atol=1e-3)


# ---- units -----------------------------------------------------------------------------------
class Penalised(nn.Module):
    """A model that uses the first layer's weight outside of its call, in a penalty.

    It calls its second layer twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.out(torch.tanh(hidden)) + self.first.weight.square().sum()


def find_units(model: nn.Module, example: Tensor) -> list[str]:
    return find_fsdp_units(model, lambda without_autocast=False: model(example))


def test_fsdp_units_are_modules_with_private_parameters() -> None:
    assert find_units(make_eight_equal_layers(), torch.zeros(2, WIDTH)) == [
        str(each) for each in range(LAYERS)
    ]
    assert find_units(Penalised(), torch.zeros(2, 10)) == ["out"]
    # the weights are tied; a transposed output is a view
    assert find_units(TiedLstm(), torch.zeros(2, 7, dtype=torch.long)) == []
    assert find_units(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))),
        torch.zeros(2, 4),
    ) == ["0", "1.1"]
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)) for _ in range(4)]
    assert find_units(nn.Sequential(*blocks), torch.zeros(2, 8)) == [
        f"{each}.{layer}" for each in range(4) for layer in (1, 2)
    ]
    assert select_common_units([["a", "b"], ["b", "c"]]) == ["b"]
    assert select_common_units([["a", "b"], ["b", "a"]]) == []


ODD: dict[str, Callable[[], nn.Module]] = {"penalised": Penalised}


class Odd(nn.Module):
    """A model with a scalar, an empty, a complex, a transposed and an unused parameter.

    One parameter has fewer rows than there are ranks. The output is a view of a complex tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.across = nn.Parameter(torch.randn(10, 4).t())
        self.token = nn.Parameter(torch.randn(1, 10))
        self.never = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (nn.functional.linear(x + self.token, self.across) * self.turn).real


ODD["odd parameters"] = Odd


class SavedHead(nn.Module):
    """A model like PEFT's modules_to_save: a tied head is kept but not called; its copy is trained.

    Earlier, the unit that held the tied weight broke the tie, so a KeyError of that weight was
    raised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 4, bias=False)
        self.outer = nn.Linear(4, 10, bias=False)
        self.kept = nn.Linear(10, 4, bias=False)
        self.kept.weight = self.inner.weight
        self.copied = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.copied(torch.tanh(self.outer(self.inner(x))))  # type: ignore[no-any-return]


ODD["a tied weight whose copy is trained"] = SavedHead


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ODD)
def test_unusual_models_equal_serial(pool: Launcher, name: str) -> None:
    found = pool.run(
        compare_with_serial,
        make_job(name, ODD[name], VECTORS, clip_norm=0.5),
        resolve_text("data(3, state=fully_sharded)"),
        size=3,
    )
    assert found[0].value <= BOUND


@pytest.mark.parametrize(
    "column", ["dropout, recomputed", pytest.param("frozen and unused", marks=pytest.mark.table)]
)
def test_fully_sharded_over_gloo_equals_serial(pool: Launcher, column: str) -> None:
    found = pool.run(
        compare_with_serial,
        JOBS[column],
        resolve_text("data(2, state=fully_sharded)"),
        size=2,
        backend="gloo",
    )
    assert found[0].value <= BOUND


def train_without_forced_sum(world: World) -> None:
    with mock.patch.object(FSDPModule, "set_force_sum_reduction_for_comms"):
        trainer = Trainer.build_for_job(
            world, JOBS["mlp"], resolve_text("data(2, state=fully_sharded)")
        )
        trainer.step(*separate_target(next(trainer.batches(JOBS["mlp"].train, 12, epoch=0))))


# ---- evaluation, and optimizers with modes ---------------------------------------------------
def evaluate_between_steps(world: World, chosen: Strategy, made: Job) -> list[float]:
    """Return the losses of tests before, between and after steps.

    The test has 515 samples; one of two ranks has 2 batches, and the other has 3.
    """
    data = TensorDataset(draw_numbers(515, 10, seed=8), draw_integers(4, 515, seed=9))
    trainer = Trainer.build_for_job(world, made, chosen)
    try:
        found = [trainer.evaluate(data)]
        for fetched in trainer.batches(made.train, made.batch, epoch=0):
            trainer.step(*separate_target(fetched))
            # with one sample, one rank has no batch
            found += [trainer.evaluate(data), trainer.evaluate(TensorDataset(*data[:1]))]
        return found
    finally:
        trainer.close()


@pytest.mark.parametrize(
    "optimizer",
    [make_adam, lambda parameters: Averaging(parameters, lr=0.1)],
    ids=["adam", "averaging"],
)
def test_evaluation_with_unequal_batch_counts_per_rank(pool: Launcher, optimizer: Any) -> None:
    made = make_job("tested", make_mlp, VECTORS, optimizer=optimizer, dtype=torch.float64)
    expected = evaluate_between_steps(World(), Serial(threads=1), made)
    for found in pool.run(
        evaluate_between_steps, resolve_text("data(2, state=fully_sharded)"), made, size=2
    ):
        assert found == pytest.approx(expected, rel=1e-10)


# ---- refusals, and errors that end a step ----------------------------------------------------
class Deciding(nn.Module):
    """A model in which a Python attribute decides which layers it calls, and what it uses."""

    way = "all"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.way == "without" else torch.tanh(self.layer(x))
        hidden = (
            self.layer(hidden)
            if self.way == "twice"
            else hidden.detach()
            if self.way == "detached"
            else hidden
        )
        return hidden[:, :4] if self.way == "short" else self.out(hidden)


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(10, 4)
        self.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


STOPPED: dict[str, tuple[Job, str]] = {
    "an optimizer of whole tensors": (
        make_job(
            "normed", make_mlp, VECTORS, optimizer=lambda parameters: NormedSgd(parameters, lr=0.1)
        ),
        r"NormedSgd does not update element by element \(tried on a small copy\), and "
        r"state=fully_sharded gives it parts",
    ),
    "an optimizer that draws": (
        make_job(
            "langevin", make_mlp, VECTORS, optimizer=lambda parameters: Langevin(parameters, lr=0.1)
        ),
        "Langevin does not update element by element",
    ),
    "a hook": (
        make_job("hooked", Hooked, VECTORS),
        "tensor weight: state=fully_sharded puts parts in its place, and it has a hook",
    ),
}


@pytest.mark.parametrize("what", STOPPED)
def test_unshardable_model_is_refused_in_one_sentence(tmp_path: Path, what: str) -> None:
    made, message = STOPPED[what]
    with pytest.raises(RankFailed, match=message):
        train(made, "data(2, state=fully_sharded)", runs=tmp_path, skip_first_step_check=True)


def train_on_unequal_paths(world: World, chosen: Strategy, way: str) -> None:
    """Train; from step 1 on, the model of rank 1 takes another path."""
    made = make_job("deciding", Deciding, VECTORS)
    trainer = Trainer.build_for_job(world, made, chosen)
    try:
        for fetched in trainer.batches(made.train, made.batch, epoch=0):
            trainer.step(*separate_target(fetched))
            if world.rank == 1:
                trainer.model.way = way
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("way", "wanted", "told"),
    [
        ("without", "gather layer", "gather out"),
        ("detached", "reduce-scatter out", "reduce-scatter layer"),
        *(
            pytest.param(way, "gather out", "gather layer", marks=pytest.mark.story)
            for way in ("short", "twice")
        ),
    ],
)
def test_rank_with_another_control_flow_ends_the_step(
    pool: Launcher, way: str, wanted: str, told: str
) -> None:
    """If a rank takes another path, the step ends with one clear error.

    Parameters are gathered from all ranks when a module is called, and half of the ranks do not
    call it. No rank waits for ever, and gradients that do not belong together are not summed.
    """
    with pytest.raises(
        RankFailed, match=f'rank 1, step 1.*in step 0 this was "{wanted}", and now it is "{told}"'
    ):
        pool.run(train_on_unequal_paths, resolve_text("data(2, state=fully_sharded)"), way, size=2)


def test_fsdp_division_needs_sum_as_reduction(pool: Launcher) -> None:
    """In float32, FSDP2 divides by 1.0 with the reduction PREMUL_SUM, unless it is told to sum.

    No CPU backend has that reduction.
    """
    with pytest.raises(RankFailed, match=r"(?i)premul"):
        pool.run(train_without_forced_sum, size=2)


def test_invalid_fully_sharded_options_are_refused() -> None:
    with pytest.raises(
        Refused,
        match=r"gathers the parameters of a module when all of it is called.* leave out the state",
    ):
        strategy("data(2, state=fully_sharded) * pipeline(2)")
    model = make_mlp()
    with (
        pytest.raises(Refused, match="leave out state=fully_sharded, or make it a Job"),
        parallelize(
            model,
            nn.functional.cross_entropy,
            torch.optim.SGD(model.parameters(), lr=0.1),
            strategy="data(1, state=fully_sharded)",
        ),
    ):
        pass


class Renormed(nn.Module):
    """A model with an embedding of bounded norms.

    The forward shortens rows when training has made them too long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, max_norm=1.0)
        self.out = nn.Linear(8, 4)
        nn.init.normal_(self.table.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1))


@pytest.mark.parametrize("state", ["fully_sharded", "shared_memory"])
def test_parameter_written_by_a_later_forward(state: str, tmp_path: Path) -> None:
    """A forward that changes a parameter in a later step ends the run.

    In step 0 no row is too long. Earlier, later steps were not checked. The change was lost, or
    every rank made it at the same time.
    """
    renormed = make_job(
        "renormed",
        Renormed,
        TensorDataset(draw_integers(11, 29, 7, seed=5), draw_integers(4, 29, seed=2)),
    )
    with pytest.raises(
        RankFailed,
        match=r"table\.weight: the forward changes a parameter.*change it in the optimizer's step",
    ):
        train(renormed, f"data(2, state={state})", runs=tmp_path)


class Sloped(nn.Module):
    """A model whose forward computes a gradient by its inputs, as potentials of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.inner(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum(1, keepdim=True)  # type: ignore[no-any-return]


def test_fsdp_unit_without_autocast(tmp_path: Path) -> None:
    """Units are found with autocast and without it.

    Under autocast, the inner backward uses copies of the weights. Earlier, the rehearsal without
    autocast failed, because the weights of a unit were already freed.
    """
    run = train(
        make_job("sloped", Sloped, VECTORS, dtype=torch.bfloat16),
        "data(2, state=fully_sharded)",
        runs=tmp_path,
        limit=2,
    )
    assert "are one worker's" in (run.first_step or "")
