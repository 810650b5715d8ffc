"""Training with place and pipeline equals serial training, wherever the model is cut."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import (
    BRIEF,
    JOBS,
    MODULES,
    TOO_FEW,
    VECTORS,
    draw_integers,
    draw_numbers,
    list_parts_cells,
    make_job,
    make_mlp,
    measure_difference,
    resolve_text,
    select_covering_parts,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from unusual_pipeline_models import ODD, SeenSamples, Shared

import paragrad as pg
from paragrad.datasets.loading import separate_target
from paragrad.engine.exchange import ExchangeOptions, Replica
from paragrad.jobs.loss import LossModule
from paragrad.launch import Launcher
from paragrad.parallel.data.bucketing import GradientBucketExchange
from paragrad.parallel.pipeline import balance
from paragrad.parallel.tracing.cut_points import find_cut_points
from paragrad.parallel.tracing.stage_forward import MAX_INPUT_SHAPES, StageForward
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.data import Native
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.trainer import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]


@pytest.mark.parametrize(("row", "column"), sorted(select_covering_parts()))
def test_covering_sample_equals_serial(pool: Launcher, row: str, column: str) -> None:
    assert measure_difference(pool, row, JOBS[column], BRIEF).value <= 1e-10


@pytest.mark.table
@pytest.mark.parametrize(("row", "column"), list_parts_cells())
def test_pipeline_training_equals_serial(pool: Launcher, row: str, column: str) -> None:
    assert measure_difference(pool, row, JOBS[column]).value <= 1e-10


@pytest.mark.parametrize(
    ("row", "column"),
    [
        each
        for each in TOO_FEW
        if each[0] in ("place(3)", "place(2)") and each[1] != "frozen and unused"
    ],
)
def test_model_with_too_few_modules_is_refused(pool: Launcher, row: str, column: str) -> None:
    with pytest.raises(
        pg.RankFailed,
        match=f"the model calls {MODULES[column]} module.* parts are wanted; give fewer workers",
    ):
        measure_difference(pool, row, JOBS[column])


# ---- unusual models --------------------------------------------------------------------------
WAYS = (
    "place(2)",
    "pipeline(3, micro=2, recompute=true)",
    "place(3)",
    "pipeline(2, micro=3)",
    "pipeline(3, micro=2, schedule=zero_bubble)",
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(
            name,
            row,
            marks={(0, 0): (), (2, 1): pytest.mark.story}.get((place % 4, turn), pytest.mark.table),
        )
        for place, name in enumerate(ODD)
        for turn, row in enumerate(WAYS)
    ],
)
def test_unusual_models_equal_serial(pool: Launcher, name: str, row: str) -> None:
    assert measure_difference(pool, row, make_job(name, ODD[name], VECTORS)).value <= 1e-10


class Seen(nn.Linear):
    """A linear layer that keeps its output in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x)
        return torch.tanh(self.seen)


class Looking(nn.Module):
    """A model that reads an attribute of a module of an earlier stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Seen(10, 10)
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        return self.out(hidden + self.first.seen)


@pytest.mark.parametrize("cut", ["second", "out"])
def test_tensor_hidden_from_its_stage_is_refused_at_start(cut: str, tmp_path: Path) -> None:
    """A tensor in an attribute of a module of another stage is refused at start.

    Earlier, the stage that holds the tensor could also use it. Then the other ranks failed when a
    batch had another shape.
    """
    with pytest.raises(
        pg.Refused,
        match=r"in an attribute of a module, so a rank does not see .* or train it with data",
    ):
        pg.train(make_job("looking", Looking, VECTORS), f"place(2, cut=[{cut}])", runs=tmp_path)


NET = make_mlp()


def return_net() -> nn.Module:
    return NET


def compute_penalised_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) + 1e-3 * NET[0].weight.square().sum()


def test_loss_that_reads_parameters_of_another_rank(tmp_path: Path) -> None:
    """A loss that reads a parameter of another rank is refused.

    Earlier, one rank of a host built the model, and the loss of the other ranks read a model of
    their own. The penalty had no gradient. The reference step ran on a copy, so it had none either.
    """
    job = make_job("penalised", return_net, VECTORS, loss=compute_penalised_loss)
    for strategy in ("place(2)", "data(2, state=fully_sharded)"):
        with pytest.raises(
            pg.Refused,
            match=r"the loss reads the parameter 0.weight .* from outside, .* \(output, penalty\)",
        ):
            pg.train(job, strategy, runs=tmp_path, skip_first_step_check=True)


class Viewing(nn.Module):
    """A model with a view of a parameter in an attribute; in serial it follows every update."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.table = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) + x @ self.table)


def test_view_of_a_parameter_is_refused_at_start(tmp_path: Path) -> None:
    """Earlier, the view kept the first values from the second step on, without an error."""
    for strategy in ("place(2)", "data(2, state=fully_sharded)"):
        with pytest.raises(
            pg.Refused,
            match=r"the attribute table of the model is a view of the parameter first\.weight",
        ):
            pg.train(make_job("viewing", Viewing, VECTORS), strategy, runs=tmp_path)


class Slope(nn.SiLU):
    """An activation that changes its input in place; applied twice, it gives another result."""

    def __init__(self) -> None:
        super().__init__(inplace=True)


def test_recompute_reads_the_original_input(pool: Launcher) -> None:
    job = make_job(
        "in place",
        lambda: nn.Sequential(
            nn.Linear(10, 10), Slope(), nn.Linear(10, 8), Slope(), nn.Linear(8, 4)
        ),
        VECTORS,
    )
    assert (
        measure_difference(
            pool, "pipeline(2, micro=3, schedule=gpipe, recompute=true, cut=[3, 2])", job
        ).value
        <= 1e-10
    )


@pytest.mark.story
def test_layer_called_twice_with_several_replicas(pool: Launcher) -> None:
    """Under zero_bubble, a bucket waits for all gradients of a layer that is called twice.

    Earlier, the bucket was sent after the first of these gradients.
    """
    job = make_job("shared", Shared, VECTORS)
    assert (
        measure_difference(
            pool, "data(2) * pipeline(2, micro=2, schedule=zero_bubble, cut=[3, 1])", job
        ).value
        <= 1e-10
    )


class Lazy(nn.Module):
    """A model that creates a buffer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1.5, 10, dtype=hidden.dtype)
        return self.out(torch.tanh(self.second(hidden * self.mask)) + hidden)


def train_two_steps(world: World, job: pg.Job, chosen: Strategy) -> list[float]:
    trainer = Trainer.build_for_job(world, job, chosen, skip_first_step_check=True)
    batches = trainer.batches(job.train, job.batch, epoch=0)
    found = [trainer.step(*separate_target(next(batches))).loss for _ in range(2)]
    trainer.close()
    return found


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("place(2, cut=[second])", marks=pytest.mark.story),
        "pipeline(2, micro=2, cut=[out])",
    ],
)
def test_buffer_created_by_the_first_forward(pool: Launcher, row: str) -> None:
    """A buffer that the first forward creates does not stop the training.

    Earlier, positions were counted once with the buffer and once without it, so the second step
    failed. The whole model still cannot be gathered, because the buffer did not exist when it was
    divided.
    """
    job = make_job("lazy", Lazy, VECTORS)
    assert len(pool.run(train_two_steps, job, resolve_text(row), size=2)[0]) == 2
    with pytest.raises(
        pg.RankFailed,
        match=r"tensor mask: it did not exist when the model was divided, .* in the constructor",
    ):
        measure_difference(pool, row, job)


def test_plain_sequential_runs_without_tracing() -> None:
    """A Sequential runs without tracing if it calls only the units of its stages.

    It must have no hook and no forward of its own.
    """

    def is_straight(model: nn.Module, parts: int = 2) -> bool:
        names = [
            (name, 0)
            for name, each in model.named_modules()
            if name and not isinstance(each, nn.Sequential)
        ]
        half = len(names) // parts
        return (
            StageForward(model, [names[:half], names[half:]])
            .find_plan(torch.zeros(3, 10))
            .sequential_stages
            is not None
        )

    assert is_straight(make_mlp())
    assert is_straight(nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Tanh()), nn.Linear(10, 4)))
    hooked = make_mlp()
    own = make_mlp()
    shared = nn.Linear(10, 10)
    hooked[1].register_forward_hook(lambda *arguments: None)
    own.forward = lambda x: nn.Sequential.forward(own, x) * 2  # type: ignore[method-assign]
    assert not is_straight(hooked)
    assert not is_straight(own)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    assert (
        StageForward(model, [[("0", 0), ("1", 0)], [("0", 1)]])
        .find_plan(torch.zeros(3, 10))
        .sequential_stages
        is None
    )


class Stacked(nn.Module):
    """A model whose blocks get the input too, and may read its values.

    Before its first module, a block scales its input and draws random numbers.
    """

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.h = nn.ModuleList(Stacked.Block(looks) for _ in range(4))
        self.out = nn.Linear(10, 4)

    class Block(nn.Module):
        def __init__(self, looks: bool) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(10))
            self.looks = looks
            self.inner = nn.Linear(10, 10)
            self.act = nn.Tanh()

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            x = self.inner(x * self.scale * (torch.rand(len(x), 1) < 0.9))
            made = self.act(x * (torch.rand(len(x), 1) < 0.9)) + 0.1 * given
            return (
                torch.where(given > 1.0, 1.5 * made, made)
                if self.looks and bool((given > 1.0).any())
                else made
            )

    def forward(self, x: Tensor) -> Tensor:
        given = x
        for block in self.h:
            x = block(x, given)
        return self.out(x)


def test_stages_run_the_largest_possible_modules() -> None:
    """A stage runs the largest possible modules as its units.

    Earlier, every operation between the small modules of a transformer's blocks was traced. A
    pipeline was slower than place.
    """

    def list_watched_stages(model: nn.Module, at: str) -> list[list[str]]:
        found = balance.partition_into_stages(model, torch.randn(6, 10), 2, (at,))
        assert [name for name, _ in found.stages[0]][:2] == ["h.0.inner", "h.0.act"]
        return [[name for name, _ in part] for part in found.watched_stages]

    assert list_watched_stages(Stacked(), "h.2") == [["h.0", "h.1"], ["h.2", "h.3", "out"]]
    assert list_watched_stages(Stacked(), "h.2.act") == [
        ["h.0", "h.1", "h.2.inner"],
        ["h.2.act", "h.3", "out"],
    ]
    seen = Stacked()
    seen.h[0].inner.register_forward_hook(lambda *arguments: None)  # type: ignore[union-attr]
    assert list_watched_stages(seen, "h.2") == [
        ["h.0.inner", "h.0.act", "h.1"],
        ["h.2", "h.3", "out"],
    ]
    fine = [f"h.{block}.{name}" for block in range(4) for name in ("inner", "act")]
    assert list_watched_stages(Stacked(looks=True), "h.2") == [fine[:4], [*fine[4:], "out"]]


def test_stage_boundaries_prefer_module_boundaries() -> None:
    """A stage boundary between blocks is preferred to one inside of a block.

    Earlier, a cut inside of a block was chosen to save a hundredth of the time. Then all ranks
    traced every operation of the block.
    """
    model = Stacked()
    x = torch.randn(6, 10)
    found = balance.count_opened_modules(find_cut_points(model, x, 2))
    assert found == [0, 2, 1, 2, 1, 2, 1, 2, 1]
    little = [10, 10, 10, 10, 5, 12, 10, 10, 10]
    much = [10, 10, 10, 10, 10, 30, 10, 10, 10]
    assert (
        balance.balance_stages(little, 2)
        == balance.balance_stages(much, 2)
        == [range(5), range(5, 9)]
    )
    assert balance.balance_stages(little, 2, found) == [range(4), range(4, 9)]
    assert balance.balance_stages(much, 2, found) == [range(5), range(5, 9)]


class NormedTwice(nn.Module):
    """A model that calls one batch norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return self.out(self.norm(torch.tanh(self.second(x))))


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ("place(2)", "serial"),
        ("pipeline(2, micro=2)", "serial(micro=2)"),
        ("place(3)", "serial"),
    ],
)
def test_both_calls_of_a_batch_norm_lie_in_one_stage(
    row: str, reference: str, tmp_path: Path
) -> None:
    """Earlier, each rank changed its own copy of the statistics; the first-step check failed."""
    data = TensorDataset(draw_numbers(36, 10, seed=1), draw_integers(4, 36, seed=2))
    job = make_job("twice", NormedTwice, data, dtype=torch.float64)
    run, serial = (
        pg.train(job, each, runs=tmp_path).model().state_dict() for each in (row, reference)
    )
    for name, value in serial.items():
        torch.testing.assert_close(run[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("place(2, cut=[second])", "between two calls that change buffers of norm"),
        (
            "place(4)",
            "4 parts are wanted, and 3 can be made: several calls change buffers of norm",
        ),
    ],
)
def test_cut_between_two_calls_of_a_batch_norm_is_refused(
    strategy: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(pg.Refused, match=message):
        pg.train(make_job("twice", NormedTwice, VECTORS), strategy, runs=tmp_path)


class SharedPositions(nn.Module):
    """A model whose layers share one module with a buffer.

    Each call of that module fills the buffer with the same values, or counts calls in it.
    """

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.positions = CountedPositions(change)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.positions(torch.tanh(layer(x)))
        return self.out(x)


class CountedPositions(nn.Module):
    seen: Tensor

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("seen", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "fill":
            self.seen.copy_(torch.linspace(0.0, 1.0, 10))
        elif self.change == "count":
            self.seen.add_(1.0)
        else:
            self.seen = self.seen + 1.0
        return x + self.seen


class OutsideOfUnits(CountedPositions):
    """A module that changes its buffer between the calls of its layers, which are units."""

    def __init__(self, change: str) -> None:
        super().__init__(change)
        self.inner = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


@pytest.mark.parametrize("change", ["count", "new"])
def test_buffers_changed_between_units_keep_calls_together(change: str) -> None:
    """Calls that change one buffer between units are kept in one stage.

    Earlier, only changes inside of units were seen. The model was cut between the calls, and only
    by chance the first step refused that.
    """
    model = SharedPositions(change)
    model.positions = OutsideOfUnits(change)
    stages = balance.partition_into_stages(model, draw_numbers(6, 10, seed=1), 2).stages
    calling = [any(name.startswith("positions") for name, _ in stage) for stage in stages]
    assert not all(calling)


@pytest.mark.parametrize(("change", "is_even"), [("fill", True), ("count", False), ("new", False)])
def test_only_buffers_that_several_calls_change_keep_calls_together(
    change: str, is_even: bool
) -> None:
    """Earlier, a cache that each call fills with the same values kept all layers in one stage."""
    model = SharedPositions(change)
    stages = balance.partition_into_stages(model, draw_numbers(6, 10, seed=1), 2).stages
    calling = [any(name == "positions" for name, _ in stage) for stage in stages]
    assert all(calling) == is_even


@pytest.mark.sample(3)
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("strategy", ["place(2, cut=[h.2])", "pipeline(2, micro=3, cut=[h.2.act])"])
def test_parameter_used_before_the_first_module_of_a_block(
    pool: Launcher, strategy: str, looks: bool
) -> None:
    """A block may use a parameter before it calls its first module.

    Earlier, the parameter was assigned to the stage before the block when the model was cut. When
    the model ran, the block's own stage used it. So one rank held it, and another rank needed it.
    """
    job = make_job("stacked", lambda: Stacked(looks), VECTORS)
    assert measure_difference(pool, strategy, job).value <= 1e-10


def test_mean_over_tokens_is_weighed_with_recompute(pool: Launcher) -> None:
    """The weight of a mean over tokens is found with recompute.

    The weight is read from the graph of the loss. With recompute, the first forward of the last
    stage has no graph. Earlier, every mean was treated as a mean over samples.
    """

    def compute_one_hot_error(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, nn.functional.one_hot(target, 4).to(output.dtype))

    job = make_job("regression", make_mlp, VECTORS, loss=compute_one_hot_error)
    assert (
        measure_difference(pool, "pipeline(2, micro=3, schedule=gpipe, recompute=true)", job).value
        <= 1e-10
    )


def test_plan_for_one_sample_keeps_global_batch_norm(pool: Launcher) -> None:
    """A plan for a share of one sample keeps batch norm global.

    Earlier, a forward without values took batch norms of other stages for norms of a single sample.
    From then on, one replica did not exchange their statistics, and the other replica waited for
    them.
    """

    def make_conv_batch_norm_net() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 5)),
            nn.Conv2d(1, 3, 2),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            nn.Conv2d(3, 3, 1),
            nn.BatchNorm2d(3),
            nn.Flatten(),
            nn.Linear(12, 4),
        )

    inputs, targets = VECTORS[:15]
    job = make_job("normed", make_conv_batch_norm_net, TensorDataset(inputs, targets), batch=12)
    assert measure_difference(pool, "data(2) * place(2, cut=[4, 4])", job).value <= 1e-10


class Dropping(nn.Module):
    """A model with layer drop as it is often written: Python branches on a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                x = torch.tanh(layer(x))
        return self.out(x)


def test_branch_decided_by_a_random_number(tmp_path: Path) -> None:
    """A branch on a random number is refused.

    Earlier, the plan used other random numbers than the training. The run ended in a KeyError, or
    left out a layer.
    """
    with pytest.raises(
        (pg.Refused, pg.RankFailed), match=r"another path here.*depends on a random number"
    ):
        pg.train(make_job("dropping", Dropping, VECTORS), "place(2)", runs=tmp_path)


@pytest.mark.story
def test_pipeline_over_gloo_equals_serial(tmp_path: Path) -> None:
    for strategy in ("pipeline(2, micro=4)", "pipeline(2, micro=4, schedule=interleaved)"):
        run = pg.train(
            JOBS["deep, adam, dropout, clipped"], strategy, runs=tmp_path, backend="gloo"
        )
        assert "are one worker's" in (run.first_step or "")


@pytest.mark.parametrize("row", ["place(2)", "place(2, cut=[out])"])
def test_buffer_that_is_replaced(pool: Launcher, row: str) -> None:
    """A buffer that a forward replaces keeps its values.

    Earlier, the forward that finds the crossing tensors left a tensor without values in its place.
    The first comparison of the buffer then failed inside torch.
    """
    job = make_job("seen", SeenSamples, VECTORS)
    assert measure_difference(pool, row, job).value <= 1e-10


def test_modules_without_work_are_split_if_needed(pool: Launcher) -> None:
    """A Sequential that computes no matrix product is opened if more stages are requested.

    Earlier, only two units were found, so three stages were refused.
    """
    job = make_job(
        "light",
        lambda: nn.Sequential(nn.Sequential(nn.Tanh(), nn.LayerNorm(10)), nn.Linear(10, 4)),
        VECTORS,
    )
    assert measure_difference(pool, "place(3)", job).value <= 1e-10


def make_batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


# batches of 12; the last batch has 6 samples
POINTS = TensorDataset(draw_numbers(30, 10, seed=1), draw_integers(4, 30, seed=2))


@pytest.mark.story
def test_batch_norm_over_one_sample_per_replica(pool: Launcher) -> None:
    """Batch norm works if each replica has one sample, because all ranks together have two.

    Earlier, torch raised ZeroDivisionError in the forward without values. It divided by the number
    of values minus one.
    """
    assert (
        measure_difference(
            pool, "data(2) * pipeline(2, micro=3)", make_job("normed", make_batch_norm_net, POINTS)
        ).value
        <= 1e-10
    )


@pytest.mark.parametrize("strategy", ["pipeline(2, micro=4)", "serial(micro=4)"])
def test_batch_norm_over_one_sample_is_refused_at_start(strategy: str, tmp_path: Path) -> None:
    """Earlier, the error came after two steps, and in a pipeline it was a ZeroDivisionError."""
    with pytest.raises(
        pg.Refused,
        match=r"cannot train on one sample .* out of a batch of 6; give micro of at most 3",
    ):
        pg.train(make_job("normed", make_batch_norm_net, POINTS), strategy, runs=tmp_path)


class Halved(torch.optim.SGD):
    """An optimizer that halves the gradients in its own step, as a hook could do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        super().step()


def make_halving_sgd(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def halve(*_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return optimizer


@pytest.mark.story
def test_optimizer_with_a_hook(pool: Launcher, tmp_path: Path) -> None:
    """The refusal of an optimizer with a hook names the hook.

    Earlier, the message said that the optimizer needs all parameters together. It did not say that
    the hook is the cause.
    """
    with pytest.raises(
        pg.RankFailed,
        match=r"SGD has the hook halve, .* in the step\(\) of an optimizer of your own",
    ):
        pg.train(JOBS["mlp"].replace(optimizer=make_halving_sgd), "place(2)", runs=tmp_path)
    job = JOBS["mlp"].replace(optimizer=lambda parameters: Halved(parameters, lr=0.1))
    assert measure_difference(pool, "place(2)", job).value <= 1e-10


class Deciding(nn.Module):
    """A model whose Python branches on a value that only one stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.abs().max() > 100:
                break
        return self.out(x)


class Counting(nn.Module):
    """A model with a module whose output shape depends on values."""

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
    """A model that computes gradients in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.out(torch.tanh(self.first(x)))
        return out - torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            Forces,
            "raised RuntimeError: element 0 of tensors does not require grad.* that takes "
            "gradients itself is not cut",
        ),
        (
            Deciding,
            "raised DataDependentOutputException: .*pipeline_training.py:.*let Python look "
            "only at values of the inputs",
        ),
        (
            Counting,
            "raised DynamicOutputShapeException: .*pipeline_training.py:.*and modules at no "
            "value that decides a shape",
        ),
    ],
)
def test_control_flow_on_hidden_values_is_refused_at_start(
    model: type[nn.Module], told: str, tmp_path: Path
) -> None:
    with pytest.raises(pg.Refused, match=told):
        pg.train(make_job("deciding", model, VECTORS), "place(2)", runs=tmp_path)


def test_requested_stage_boundary_is_used(tmp_path: Path) -> None:
    run = pg.train(JOBS["cnn"], "pipeline(2, micro=2, cut=[4, 1])", runs=tmp_path)
    assert [
        (line["what"], line["picked"])
        for line in run.select_lines("choice")
        if line["what"] == "cut"
    ] == [("cut", "0 to 3 | 4")]
    with pytest.raises(
        pg.Refused,
        match=r"cut=\[1, 1\] is 2 part\(s\) of 2 modules together, and the model needs 2 of 5",
    ):
        pg.train(JOBS["cnn"], "pipeline(2, micro=2, cut=[1, 1])", runs=tmp_path)


class Blocks(nn.Module):
    """A model with modules in a list; the list itself is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.h = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(10, 4)
        self.unused = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.trunk.h:
            x = x + block(x)
        return self.out(x)


@pytest.mark.parametrize(
    ("cut", "picked"),
    [
        pytest.param(
            "[trunk.h.1]",
            "trunk.h.0.0 to trunk.h.0.1 | trunk.h.1.0 to out",
            marks=pytest.mark.story,
        ),
        pytest.param(
            "[h.3]", "trunk.h.0.0 to trunk.h.2.1 | trunk.h.3.0 to out", marks=pytest.mark.story
        ),
        ("[h.2.1]", "trunk.h.0.0 to trunk.h.2.0 | trunk.h.2.1 to out"),
    ],
)
def test_stage_boundaries_by_module_names(cut: str, picked: str, tmp_path: Path) -> None:
    run = pg.train(make_job("blocks", Blocks, VECTORS), f"place(2, cut={cut})", runs=tmp_path)
    assert [line["picked"] for line in run.select_lines("choice") if line["what"] == "cut"] == [
        picked
    ]
    assert "are one worker's" in (run.first_step or "")


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ("place(2, cut=[h.9])", "cut: no module 'h.9'; known: .*trunk.h.3"),
        (
            "place(2, cut=[unused])",
            r"cut=\[unused\]: unused is not called in a forward; cut at one of trunk.h.0.1",
        ),
        ("place(2, cut=[trunk])", "2 parts that are not empty need 1"),
        ("place(2, cut=[h.0])", "2 parts that are not empty need 1"),
        (
            "place(3, cut=[h.2, h.1])",
            "3 parts that are not empty need 2 in the order in which they are called",
        ),
        ("place(3, cut=[h.2])", "3 parts that are not empty need 2"),
        (
            "place(2, cut=[1, h.2])",
            r"takes a list of whole numbers from 1, such as \[3, 1\] or a list of names",
        ),
        (pg.Place(2, cut=["0"]), "cut names 0, which may be trunk.h.0.*give the whole name"),
    ],
)
def test_unsuitable_boundary_names_are_refused(
    strategy: str | pg.Place, told: str, tmp_path: Path
) -> None:
    with pytest.raises(pg.Refused, match=told):
        pg.train(make_job("blocks", Blocks, VECTORS), strategy, runs=tmp_path)


class Asking(nn.Module):
    """A model that reads the shape of an earlier stage's output, and branches on its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.third = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        early = torch.tanh(self.first(x))
        large = x * (x > 0.5)
        # the same values from other operations
        hidden = early.clone() if large.sum() > 2.0 else early
        hidden = self.second(hidden) + hidden
        if bool((x[:, 0] > 0).any()):
            hidden = hidden.clone() + 0.0 * early
        hidden = torch.relu(self.third(hidden))
        return self.out(hidden) * (early.size(0) / len(x)) * (early.dim() / 2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("cut", ["[second]", "[third]", "[out]"])
def test_control_flow_that_depends_on_inputs(pool: Launcher, cut: str) -> None:
    """A model may branch on its inputs, and read shapes of an earlier stage's outputs.

    Earlier, to read a shape across a cut raised KeyError. If a model read values of its inputs, as
    masks of transformers do, a new plan was made for every micro-batch.
    """
    job = make_job("asking", Asking, VECTORS)
    assert measure_difference(pool, f"pipeline(2, micro=4, cut={cut})", job).value <= 1e-10


def test_plans_are_cached_by_the_values_read() -> None:
    model = Asking()
    flow = StageForward(model, [[("first", 0), ("second", 0)], [("third", 0), ("out", 0)]])
    small = torch.zeros(3, 10)
    large = torch.ones(3, 10)
    plans = [
        flow.find_plan(each) for each in (small, large, small - 0.1, large * 2, torch.ones(4, 10))
    ]
    assert plans[0] is plans[2] is not plans[1]
    assert plans[1] is plans[3] is not plans[4]
    # only the second condition has another result
    mixed = torch.cat([-torch.ones(3, 1), large[:, 1:]], 1)
    assert flow.find_plan(mixed) is not plans[1]
    for number in range(MAX_INPUT_SHAPES + 3):
        flow.find_plan(torch.zeros(5 + number, 10))
    assert len(flow.plans) == MAX_INPUT_SHAPES


class Noisy(nn.Module):
    """A model with random draws that depend on the inputs only, and other draws between them.

    A draw of the first kind is made by every rank whose Python reaches it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.third = nn.Linear(10, 4)
        self.second = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        early = torch.rand_like(x)
        hidden = nn.functional.dropout(torch.tanh(self.first(x * early)), 0.2)
        late = 1 + 0.1 * torch.randn(x.shape, dtype=x.dtype)
        hidden = nn.functional.dropout(self.second(hidden), 0.1) * late
        return self.third(hidden * (torch.rand([], dtype=x.dtype) + early))


@pytest.mark.parametrize(
    "strategy",
    [
        *(
            pytest.param(each, marks=pytest.mark.table)
            for each in ("place(2, cut=[second])", "pipeline(2, micro=3, cut=[third])", "place(3)")
        ),
        "pipeline(3, micro=2, recompute=true)",
    ],
)
def test_draws_that_depend_on_inputs_only(pool: Launcher, strategy: str) -> None:
    """Draws that depend on the inputs only are made by several ranks.

    Earlier, each was counted as a draw of one stage. The ranks after that stage made it too, and
    the run failed.
    """
    assert measure_difference(pool, strategy, make_job("noisy", Noisy, VECTORS)).value <= 1e-10


class NowAndThen(nn.Module):
    """A model whose first dropout is left out in a batch of 5.

    So the position of the second dropout among all draws of the model depends on the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.third = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if len(x) != 5:
            hidden = nn.functional.dropout(hidden, 0.4)
        hidden = torch.tanh(self.second(hidden))
        return self.third(nn.functional.dropout(hidden, 0.4))


def test_stage_with_conditional_draws(tmp_path: Path) -> None:
    """A stage that draws random numbers only under a condition is refused.

    Earlier, draws of the next stage were treated as earlier draws of the model. Results differed by
    a few per cent, without an error.
    """
    with pytest.raises(
        pg.RankFailed,
        match=r"part 0 of the model draws random numbers 0 time\(s\), and when it was cut 1",
    ):
        pg.train(
            make_job("now and then", NowAndThen, VECTORS), "place(2, cut=[second])", runs=tmp_path
        )


class InTwoCheckpoints(nn.Module):
    """A model that calls one layer in two reentrant checkpoints.

    The backward of the second one ends before that of the first begins. Each adds to the gradient
    of the same weight.
    """

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(lambda h: torch.tanh(self.layer(h)), x, use_reentrant=True)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 4), self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_gradient_summed_from_two_messages(tmp_path: Path) -> None:
    """A gradient to which backward adds a second time is refused, unless overlap is off.

    Earlier, the gradient was sent after the first addition. The run then said that the strategy's
    step differs from one worker's.
    """
    job = make_job("in two", InTwoCheckpoints, VECTORS)
    strategy = "data(2) * pipeline(2, micro=2, cut=[second])"
    with pytest.raises(
        pg.RankFailed,
        match=r"second.layer.weight: backward adds to its gradient again.*use_reentrant=False",
    ):
        pg.train(job, strategy, runs=tmp_path)
    assert "are one worker's" in (
        pg.train(job, strategy, runs=tmp_path, overlap=False).first_step or ""
    )


class OwnMode(nn.Module):
    """A model whose own forward reads `self.training`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        return self.second(hidden) * (2.0 if self.training else 1.0)


@pytest.mark.parametrize(
    "strategy", ["place(2)", pytest.param("pipeline(2, micro=3)", marks=pytest.mark.table)]
)
def test_evaluation_leaves_the_model_in_training_mode(strategy: str, tmp_path: Path) -> None:
    """A test puts the outermost module back into training mode.

    Earlier, it stayed in eval mode after the first test, so its dropout stopped. If it draws no
    random numbers itself, no error was reported.
    """
    job = make_job("own mode", OwnMode, VECTORS, test=VECTORS, epochs=3, dtype=torch.float64)
    reference = pg.train(job, runs=tmp_path)
    run = pg.train(job, strategy, runs=tmp_path)
    assert [run.test, *run.losses] == pytest.approx([reference.test, *reference.losses], rel=1e-10)


class Detached(nn.Module):
    """A model that detaches the output of an early layer, always or only in a batch of 5."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.aside = nn.Linear(10, 4)
        self.second = nn.Linear(10, 4)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        aside = self.aside(x)
        return self.second(hidden) + (aside.detach() if self.always or len(x) == 5 else aside)


def make_decaying_adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)  # type: ignore[arg-type]


@pytest.mark.parametrize("always", [False, True])
def test_missing_gradient_in_serial_is_missing_in_a_pipeline(pool: Launcher, always: bool) -> None:
    """A parameter without a gradient in serial has no gradient in a pipeline.

    Earlier, the next stage sent zeros as its gradient. The optimizer's weight decay then made the
    parameter smaller.
    """
    job = make_job("detached", lambda: Detached(always), VECTORS, optimizer=make_decaying_adamw)
    assert measure_difference(pool, "place(2, cut=[second])", job).value <= 1e-10


class Mapped(nn.Module):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(10))

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda each: torch.tanh(nn.functional.linear(each, self.weight)))(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(10, 10), self.Inner(), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(torch.tanh(self.first(x))))


def test_split_backward_and_torch_func(pool: Launcher) -> None:
    """zero_bubble works for a model that uses torch.vmap.

    torch accepts no autograd function like paragrad's under vmap. Earlier, step 0 failed with
    torch's own message.
    """
    job = make_job("mapped", Mapped, VECTORS)
    assert (
        measure_difference(pool, "pipeline(2, micro=2, schedule=zero_bubble)", job).value <= 1e-10
    )


def make_spectral_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 10),
        nn.Tanh(),
        torch.nn.utils.spectral_norm(nn.Linear(10, 10)),
        nn.Linear(10, 4),
    )


def test_weight_rebuilt_by_a_hook(pool: Launcher) -> None:
    """Earlier, torch's own view of a weight was refused, although each forward replaces it."""
    assert (
        measure_difference(
            pool, "place(2)", make_job("spectral", make_spectral_norm_net, VECTORS)
        ).value
        <= 1e-10
    )


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.out.register_forward_pre_hook(fail_on_rank_1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


def fail_on_rank_1(_: nn.Module, inputs: tuple[Tensor]) -> None:
    running = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
    if running and any(
        frame.f_code.co_name == "run_action" for frame, _ in traceback.walk_stack(None)
    ):
        raise RuntimeError("no such luck")


def test_failing_stage_reports_its_own_error(tmp_path: Path) -> None:
    """A failing stage is reported with its rank, its step and its own error.

    Earlier, it was reported as a failure of the exchange, and the waiting rank was named first.
    """
    with pytest.raises(pg.RankFailed, match=r"rank 1, step 0: .*no such luck"):
        pg.train(
            make_job("failing", Failing, VECTORS),
            "place(2)",
            runs=tmp_path,
            skip_first_step_check=True,
        )


def test_split_backward_gives_the_same_bits(tmp_path: Path) -> None:
    """zero_bubble gives the same gradients as one_f_one_b, bit for bit.

    The record says which share of the parameters can compute weight gradients later. A norm's
    cannot.
    """
    job = JOBS["deep, adam, dropout, clipped"]
    runs = {
        name: pg.train(job, f"pipeline(2, micro=3, schedule={name}, cut=[5, 5])", runs=tmp_path)
        for name in ("one_f_one_b", "zero_bubble")
    }
    plain, halves = (run.model().state_dict() for run in runs.values())
    assert all(torch.equal(plain[name], halves[name]) for name in plain)
    told = [
        line["picked"]
        for line in runs["zero_bubble"].select_lines("choice")
        if line["what"] == "weights' part"
    ]
    assert told == ["92% of the parameters"]


def sum_in_buckets(world: World) -> tuple[list[bool], list[float]]:
    """Return whether each gradient is a part of the sent bucket, and the sums.

    The model has two layers; one parameter has no gradient.
    """
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    exchange = GradientBucketExchange(
        Replica(
            LossModule(model, nn.functional.cross_entropy), torch.optim.SGD(model.parameters())
        ),
        world,
        StepLog(None),
        ExchangeOptions(),
        Native(),
    )
    try:
        exchange.begin()
        *used, unused = model.parameters()
        for number, parameter in enumerate(used):
            parameter.grad = torch.full_like(parameter, 10.0**number * (1 + world.rank))
        for parameter in reversed([*used, unused]):
            exchange.mark_ready(parameter)
        (bucket,) = exchange.sent_buckets
        travels = [
            parameter.grad.untyped_storage().data_ptr()
            == bucket.vector.untyped_storage().data_ptr()
            for parameter in used
            if parameter.grad is not None
        ]
        exchange.finish(1.0, 0.5)
        assert unused.grad is None
        return travels, [
            float(parameter.grad.mean()) for parameter in used if parameter.grad is not None
        ]
    finally:
        exchange.close()


def test_gradients_live_in_the_exchange_buckets(pool: Launcher) -> None:
    """Gradients are views of the exchange buckets.

    Earlier, they had memory of their own, and all buckets existed until the next step. The memory
    was twice what the record said.
    """
    assert pool.run(sum_in_buckets, size=2) == [([True] * 3, [3.0, 30.0, 300.0])] * 2


def test_warning_names_the_micro_batches_of_batch_norm(tmp_path: Path) -> None:
    """Earlier, a user compared the run with serial, and no message said why the two differ."""
    data = TensorDataset(draw_numbers(36, 10, seed=1), draw_integers(4, 36, seed=2))
    with pytest.warns(UserWarning, match=r"the training of serial\(micro=2\), which may"):
        pg.train(
            make_job("twice", NormedTwice, data), "pipeline(2, micro=2)", runs=tmp_path, limit=1
        )


SEQUENCES = TensorDataset(draw_integers(11, 29, 7, seed=5), draw_integers(4, 29, seed=2))


class Packed(nn.Module):
    """A model with recurrent layers over packed sequences."""

    def __init__(self, dropout: float, lengths_by: str = "inputs") -> None:
        super().__init__()
        self.raw = nn.GRU(1, 8, batch_first=True)
        self.embed = nn.Embedding(11, 8)
        self.drop = nn.Dropout(dropout)
        self.first = nn.LSTM(8, 12, num_layers=2, dropout=dropout, batch_first=True)
        self.second = nn.GRU(12, 8, batch_first=True)
        self.third = nn.RNN(8, 8, batch_first=True)
        self.out = nn.Linear(16, 4)
        self.lengths_by = lengths_by

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.drop(self.embed(x))
        lengths = (x > 4).sum(1).clamp(min=1)
        if self.lengths_by == "model":
            lengths = (embedded.sum(-1) > 0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(embedded, lengths.cpu(), True, enforce_sorted=False)
        packed = packed._replace(data=self.drop(packed.data))
        packed, _ = self.first(packed)
        packed, state = self.second(packed)
        output, lengths = pad_packed_sequence(packed, True, total_length=x.shape[1])
        packed = pack_padded_sequence(output, lengths, True, enforce_sorted=False)
        packed, _ = self.third(packed)
        output, _ = pad_packed_sequence(packed, True, total_length=x.shape[1])
        values = x.to(output.dtype)[:, :, None]
        _, raw = self.raw(pack_padded_sequence(values, lengths.cpu(), True, enforce_sorted=False))
        return self.out(torch.cat([output.mean(1), state[-1] + raw[-1]], 1))


@pytest.mark.parametrize(
    ("row", "dropout"),
    [
        ("place(2)", 0.3),
        ("place(3)", 0.3),
        ("pipeline(2, micro=2)", 0.0),
        ("data(2) * place(2)", 0.0),
    ],
)
@pytest.mark.sample(4)
@pytest.mark.story
def test_packed_sequences_equal_serial(pool: Launcher, row: str, dropout: float) -> None:
    """Packed sequences work in stages, also with dropout.

    Earlier, packing failed in every forward without values, and dropout on packed values was
    refused.
    """
    job = make_job("packed", functools.partial(Packed, dropout), SEQUENCES)
    assert measure_difference(pool, row, job).value <= 1e-10


def test_lengths_that_the_model_makes_are_refused(tmp_path: Path) -> None:
    job = make_job("made", functools.partial(Packed, 0.0, "model"), SEQUENCES)
    with pytest.raises(pg.Refused, match="the model makes the lengths by which it packs"):
        pg.train(job, "place(2)", runs=tmp_path)
