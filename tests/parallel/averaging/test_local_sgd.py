"""local: each worker makes its own steps, and weights are averaged every few steps."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import (
    IMAGES,
    LOOSER,
    TEXT,
    VECTORS,
    Clamped,
    TiedLstm,
    make_batch_norm_cnn,
    make_job,
    make_mlp,
    observe_steps,
    resolve_text,
)
from safetensors.torch import load_file
from torch import Tensor, nn

import paragrad as pg
from paragrad.datasets.loading import separate_target
from paragrad.engine.optimizer.update_probe import has_weight_copies
from paragrad.launch import Launcher
from paragrad.loops.synchronous import train_rank
from paragrad.parallel.averaging.averageable_state import average_state
from paragrad.record.record import Record
from paragrad.report.equivalence.lockstep import measure_distances
from paragrad.runtime import stragglers
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

State = dict[str, Tensor]
plain = functools.partial(torch.optim.SGD, lr=0.1)
heavy = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 7  # an epoch has 3 steps, the last of them with 5 samples


def make_vectors_job(**changes: Any) -> pg.Job:
    return make_job("vectors", make_mlp, VECTORS).replace(
        **{"epochs": 4, "dtype": torch.float64, "optimizer": plain, **changes}
    )


def copy_tensors(tensors: Mapping[str, Tensor]) -> State:
    return {name: each.detach().clone() for name, each in tensors.items()}


def copy_states(trainer: Trainer) -> tuple[State, State]:
    """Return (the state of the whole run, the state of this rank)."""
    return copy_tensors(trainer.state()), copy_tensors(trainer.model.state_dict())


def copy_run_state(trainer: Trainer) -> State:
    return copy_tensors(trainer.state())


def observe_states(
    world: World, made: pg.Job, chosen: Strategy, steps: int
) -> list[tuple[State, State]]:
    """Return both states before the first step and after each step."""
    begun = copy_tensors(made.build_model_to_train().state_dict())
    return [(begun, begun), *observe_steps(world, made, chosen, steps, copy_states)]


def observe_states_on_ranks(
    pool: Launcher, made: pg.Job, text: str, steps: int = STEPS
) -> list[list[tuple[State, State]]]:
    chosen = resolve_text(text)
    return pool.run(observe_states, made, chosen, steps, size=chosen.size)


def is_close(one: State, other: State, within: float = 1e-10) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=within) for name in one)


# ---- equal to serial, where possible ---------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "text",
    [
        "local(3, every=1)",
        "local(3, every=1, reduce=ring)",
        "local(2, every=1, reduce=tree)",
        "local(4, every=1)",
        "local(2, every=1) * tensor(2)",
        "local(2, every=1) * pipeline(2)",
        "local(3, after=99)",
        "local(1)",
        "local(2, every=1, outer=nesterov(lr=1, momentum=0))",
        "local(2, every=1, outer=elastic(pull=0.5)) * place(2)",
    ],
)
def test_averaging_after_every_sgd_step_is_serial(pool: Launcher, text: str) -> None:
    """The mean is weighted by samples: of the last batch of 5, four workers have 2, 1, 1 and 1.

    Under elastic with a pull of 1/2 on two replicas, the centre is their mean. The replicas
    themselves do not become equal to it.
    """
    chosen = resolve_text(text)
    found = pool.run(
        measure_distances,
        make_vectors_job(optimizer=functools.partial(plain, weight_decay=0.01)),
        chosen,
        Settings(),
        STEPS,
        size=chosen.size,
    )[0]
    assert max(found[:1] if "elastic" in text else found) < 1e-10


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", LOOSER)
def test_momentum_differs_and_the_deviation_is_reported(
    pool: Launcher, tmp_path: Path, text: str
) -> None:
    chosen = resolve_text(text)
    found = pool.run(
        measure_distances,
        make_vectors_job(optimizer=heavy),
        chosen,
        Settings(),
        6,
        size=chosen.size,
    )[0]
    assert all(1e-6 < distance < 1.0 for distance in found[4:])
    assert not pg.verify(make_vectors_job(optimizer=heavy), text, runs=tmp_path).same


def test_replicas_differ_between_averagings_and_agree_after(pool: Launcher) -> None:
    ranks = observe_states_on_ranks(pool, make_vectors_job(), "local(3, every=3)")
    for step in range(1, STEPS + 1):
        stands = [rank[step][0] for rank in ranks]
        owns = [rank[step][1] for rank in ranks]
        assert all(is_close(each, stands[0], 0.0) for each in stands)
        assert all(is_close(each, owns[0], 0.0) for each in owns) == (step % 3 == 0)
        mean = {
            name: sum(own[name] * weight for own, weight in zip(owns, (4, 4, 4), strict=True)) / 12
            for name in owns[0]
        }
        # before the short batch, all replicas have equal numbers of samples
        if step < 3:
            assert is_close(stands[0], mean)  # type: ignore[arg-type]


def make_wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 220), nn.Tanh(), nn.Linear(220, 4))


LARGE = "0.weight"  # 2,200 numbers; int8 sends the smaller tensors as they are


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "text",
    [
        "local(3, every=3, compress={})",
        "local(2, every=3, compress={}, outer=nesterov)",
        "local(2, every=3, compress={}, outer=elastic)",
        "local(2, every=3, compress={}, reduce=ring)",
        "local(2, every=3, compress={}, after=3)",
    ],
)
@pytest.mark.parametrize("compressor", ["int8", "bf16", "fp16"])
def test_weight_changes_may_be_compressed(pool: Launcher, text: str, compressor: str) -> None:
    """Until the first average, compressed training equals exact training.

    Then the mean differs by the rounding of the weight changes, which for bfloat16 is a 256th of
    them. Replicas are bit-equal, except under elastic.
    """
    if "reduce" in text and compressor == "int8":
        with pytest.raises(pg.Refused, match="local: an all-reduce cannot add what int8 sends"):
            pg.strategy(text.format(compressor))
        return
    made = make_vectors_job(model=make_wide_mlp)
    found, exact = (
        observe_states_on_ranks(pool, made, text.format(each), steps=6)
        for each in (compressor, "none")
    )
    met = 6 if "after" in text else 3
    for step in range(met):
        assert is_close(found[0][step][1], exact[0][step][1], 1e-12)
    together = exact[0][met - 3][1] if met == 6 else exact[0][0][1]
    moved = (
        max(float((rank[met - 1][1][LARGE] - together[LARGE]).abs().max()) for rank in exact) * 2
    )
    off = (found[0][met][0][LARGE] - exact[0][met][0][LARGE]).abs()
    assert 0 < float(off.max()) <= moved * (3 / 127 if compressor == "int8" else 3 / 256)
    if "elastic" not in text:
        assert all(is_close(rank[met][1], found[0][met][1], 0.0) for rank in found)
        small = [name for name in exact[0][0][1] if name != LARGE and compressor == "int8"]
        assert all(
            torch.allclose(found[0][met][1][name], exact[0][met][1][name], rtol=0, atol=1e-12)
            for name in small
        )


def test_compressed_averaging_sends_less_and_evaluates_the_mean(tmp_path: Path) -> None:
    made = make_vectors_job(model=make_wide_mlp, test=VECTORS)
    whole, less = (
        pg.train(made, text, runs=tmp_path, limit=3)
        for text in ("local(2, every=3)", "local(2, every=3, compress=int8)")
    )
    bytes_of = [
        sum(
            line["sent"].get("weights", {"bytes": 0})["bytes"]
            for line in Record(run.folder).select_lines("step", 0)
        )
        for run in (whole, less)
    ]
    small = 8 * (220 + 4 * 220 + 4)
    assert bytes_of[1] - small < (bytes_of[0] - small) / 4
    between = [
        pg.train(made, text, runs=tmp_path)
        for text in ("local(2, every=9)", "local(2, every=9, compress=int8)")
    ]
    assert between[0].losses[:9] == between[1].losses[:9]
    assert between[0].losses[9:] != between[1].losses[9:]
    assert (
        between[0].select_lines("epoch")[1]["test"] == between[1].select_lines("epoch")[1]["test"]
    )


@pytest.mark.parametrize(
    "compressor", ["top_k(0.1)", "one_bit", "power_sgd(1)", "dgc(0.1)", "threshold(1)"]
)
def test_error_feedback_is_for_gradients(compressor: str) -> None:
    with pytest.raises(pg.Refused, match="compress by int8, bf16 or fp16"):
        pg.strategy(f"local(2, compress={compressor})")


def test_synchronous_first_steps_equal_data(pool: Launcher) -> None:
    """Post-local SGD: the first steps equal data(n). Replicas then share the momentum's state."""
    local, data = (
        observe_states_on_ranks(pool, make_vectors_job(optimizer=heavy), text)
        for text in ("local(2, every=2, after=3)", "data(2)")
    )
    assert all(is_close(local[0][step][1], data[0][step][1], 1e-12) for step in range(4))
    assert not is_close(local[0][4][1], local[1][4][1])
    assert is_close(local[0][5][1], local[1][5][1], 0.0)


def is_equal_to_plain_loop(world: World, made: pg.Job) -> bool:
    """Return whether an epoch of this replica equals a loop of plain torch over the same shares."""
    trainer = Trainer.build_for_job(world, made, resolve_text("local(2, every=end)"))
    model = made.build_model_to_train()
    optimizer = made.optimizer(model.parameters())
    try:
        for fetched in trainer.batches(made.train, made.batch, 0):
            inputs, target = separate_target(fetched)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            trainer.step(inputs, target)
        return is_close(
            copy_tensors(trainer.model.state_dict()), copy_tensors(model.state_dict()), 1e-12
        )
    finally:
        trainer.close()


def test_nonlinear_hook_sees_the_gradient_of_its_share(pool: Launcher) -> None:
    """A hook sees the mean over the replica's share, by which the replica steps.

    Earlier, a hook that clips saw the sum over the share.
    """
    assert pool.run(is_equal_to_plain_loop, make_vectors_job(model=Clamped), size=2) == [True, True]


# ---- compared with other implementations -----------------------------------------------------
def train_by_torch(world: World, made: pg.Job, steps: int, every: int, after: int) -> State:
    """Train by torch's own post-local SGD over the same shares.

    In the first steps, gradients are averaged here, in the place of torch's hook.
    """
    with warnings.catch_warnings(action="ignore"):  # torch warns about torch.jit
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer
    model = made.build_model_to_train()
    averager = PeriodicModelAverager(period=every, warmup_steps=after + every - 1)
    optimizer = PostLocalSGDOptimizer(made.optimizer(model.parameters()), averager)
    # only its batches are used
    trainer = Trainer.build_for_job(world, made, resolve_text("local(2, every=end)"))
    try:
        batches = (
            fetched
            for epoch in range(made.epochs)
            for fetched in trainer.batches(made.train, made.batch, epoch)
        )
        for step, fetched in zip(range(steps), batches, strict=False):
            trainer.training.feed.take_batch(*separate_target(fetched))
            inputs, target = separate_target(fetched)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            if step < after:
                for parameter in model.parameters():
                    parameter.grad = world.all_reduce(parameter.grad) / world.size
            optimizer.step()
    finally:
        trainer.close()
    return {name: each.detach() for name, each in model.named_parameters()}


def test_local_sgd_equals_torch_post_local_sgd(pool: Launcher) -> None:
    """torch weights all replicas equally, so batches are even here.

    torch averages after the first step from `warmup_steps` on. paragrad averages only after `every`
    local steps.
    """
    made = make_vectors_job(optimizer=heavy, train=torch.utils.data.Subset(VECTORS, range(24)))
    for after, every in ((0, 3), (2, 2)):
        theirs = pool.run(train_by_torch, made, 7, every, after, size=2, backend="gloo")
        ours = [
            rank[-1][1]
            for rank in observe_states_on_ranks(
                pool, made, f"local(2, every={every}, after={after})", 7
            )
        ]
        assert all(is_close(other, mine, 1e-12) for mine, other in zip(ours, theirs, strict=True))
        assert not is_close(theirs[0], theirs[1])


def test_outer_step_equals_torch_nesterov_sgd(pool: Launcher) -> None:
    """In DiLoCo, the gradient of an outer step is the centre minus the mean of the replicas."""
    ranks = observe_states_on_ranks(
        pool, make_vectors_job(), "local(2, every=2, outer=nesterov(lr=0.5, momentum=0.8))", 6
    )
    begun = ranks[0][0][1]
    centre = {name: nn.Parameter(each.clone()) for name, each in begun.items()}
    outer = torch.optim.SGD(centre.values(), lr=0.5, momentum=0.8, nesterov=True)
    for meeting in (2, 4, 6):
        # the mean just before the average, of replicas that begin at the centre and make two local
        # steps
        means = pool.run(
            average_two_steps_from,
            make_vectors_job(),
            {name: each.detach() for name, each in centre.items()},
            meeting - 2,
            size=2,
        )[0]
        for name, parameter in centre.items():
            parameter.grad = parameter.detach() - means[name]
        outer.step()
        assert is_close(
            ranks[1][meeting][1], {name: each.detach() for name, each in centre.items()}
        )


def average_two_steps_from(world: World, made: pg.Job, begun: State, first: int) -> State:
    """Return the mean of two replicas, weighted by samples, after two local steps from `begun`."""
    trainer = Trainer.build_for_job(world, made, resolve_text("local(2, every=end)"))
    trainer.model.load_state_dict(begun)
    try:
        order = made.make_order(made.train)
        places = [
            (step // order.steps, list(order.list_batches())[step % order.steps])
            for step in (first, first + 1)
        ]
        for fetched in trainer.iterate_batches_at(made.train, order, places):
            trainer.step(*separate_target(fetched))
        return trainer.state()
    finally:
        trainer.close()


def copy_outer_momentum(trainer: Trainer) -> tuple[State, State, State]:
    """Return (the weights of a checkpoint, its outer momentum, the weights of this rank)."""
    with trainer.use_effective_weights():
        assert trainer.training.setup.exchange is not None
        kept = {
            name: values["outer momentum"]
            for name, values in trainer.training.setup.exchange.collect_saved_tensors().items()
        }
        stood = copy_tensors(trainer.model.state_dict())
    return stood, copy_tensors(kept), copy_tensors(trainer.model.state_dict())


def test_outer_step_covers_a_whole_round(pool: Launcher) -> None:
    """A run can be tested or stopped between two averages.

    Earlier, after one step of a round, the state of the run already contained a whole outer step
    with all its momentum. It was far beyond the mean.
    """
    ranks = pool.run(
        observe_steps,
        make_vectors_job(),
        resolve_text("local(2, every=3, outer=nesterov)"),
        5,
        copy_outer_momentum,
        size=2,
    )
    met = ranks[0][2]
    assert is_close(met[0], met[2], 0.0)
    for step in (3, 4):  # of 12 samples each
        stood, momentum, _ = ranks[1][step]
        mean = {name: (ranks[0][step][2][name] + ranks[1][step][2][name]) / 2 for name in stood}
        assert is_close(stood, mean)
        assert is_close(momentum, met[1], 0.0)
        assert any(each.any() for each in momentum.values())


def test_elastic_averaging_equals_the_published_formula(pool: Launcher) -> None:
    ranks = observe_states_on_ranks(
        pool,
        make_vectors_job(train=torch.utils.data.Subset(VECTORS, range(24))),
        "local(2, every=1, outer=elastic)",
        1,
    )
    centre = ranks[0][0][1]
    free = [
        each[1][1]
        for each in observe_states_on_ranks(
            pool,
            make_vectors_job(train=torch.utils.data.Subset(VECTORS, range(24))),
            "local(2, every=end)",
            1,
        )
    ]
    for own, stepped in zip((rank[1][1] for rank in ranks), free, strict=True):
        assert is_close(
            own,
            {name: each - 0.45 * (each - centre[name]) for name, each in stepped.items()},
            1e-12,
        )


# ---- other state of a model ------------------------------------------------------------------
def test_running_statistics_are_averaged_and_constants_kept(pool: Launcher) -> None:
    """Constants are not averaged: a mean over three replicas can differ in the last bit."""
    made = make_job(
        "normed", make_cnn_with_constants, IMAGES, dtype=torch.float64, optimizer=plain, epochs=3
    )
    ranks = observe_states_on_ranks(pool, made, "local(3, every=2)", 4)
    for step in (2, 4):
        assert all(is_close(rank[step][1], ranks[0][step][1], 0.0) for rank in ranks)
    apart = [rank[3][1]["1.running_mean"] for rank in ranks]
    assert not torch.equal(apart[0], apart[1])
    assert torch.equal(ranks[2][4][1]["constants"], ranks[2][0][1]["constants"])


def make_cnn_with_constants() -> nn.Module:
    model = make_batch_norm_cnn()
    model.register_buffer("constants", torch.arange(1, 50, dtype=torch.float64).reciprocal())
    return model


def test_replica_without_samples_skips_the_step(pool: Launcher) -> None:
    """The last batch has one sample, for the first of three workers. The others make no step.

    Momentum alone would move their weights.
    """
    made = make_vectors_job(train=torch.utils.data.Subset(VECTORS, range(25)), optimizer=heavy)
    ranks = observe_states_on_ranks(pool, made, "local(3, every=end)", 3)
    assert not is_close(ranks[0][3][1], ranks[0][2][1])
    for rank in ranks[1:]:
        assert is_close(rank[3][1], rank[2][1], 0.0)
    weights = (4 + 4 + 1, 8, 8)
    mean = {
        name: sum(weight * rank[3][1][name] for weight, rank in zip(weights, ranks, strict=True))
        / 25
        for name in ranks[0][3][1]
    }
    assert is_close(ranks[1][3][0], mean)  # type: ignore[arg-type]


def test_no_replica_updates_without_counted_targets(pool: Launcher) -> None:
    """A batch whose targets are all ignored is an error under data(n).

    Under local, no replica makes an update, and the training continues.
    """
    data = torch.utils.data.TensorDataset(
        TEXT.tensors[0][:24], TEXT.tensors[1][:24].clone().fill_(-100)
    )
    ranks = observe_states_on_ranks(
        pool, make_job("nothing", TiedLstm, data, dtype=torch.float64), "local(2, every=2)", 4
    )
    assert all(is_close(rank[step][1], rank[0][1], 0.0) for rank in ranks for step in range(5))


def test_batch_without_counted_targets_has_losses_recorded(tmp_path: Path) -> None:
    """Earlier, reading the losses divided by the weight of the batch, which is 0."""
    data = torch.utils.data.TensorDataset(
        TEXT.tensors[0][:24], TEXT.tensors[1][:24].clone().fill_(-100)
    )
    run = pg.train(
        make_job("nothing", TiedLstm, data),
        "local(2, every=2)",
        runs=tmp_path,
        skip_first_step_check=True,
    )
    assert run.losses == [0.0] * 4


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "text",
    [
        "local(2, every=2) * tensor(2)",
        # one micro-batch: several would give a replica other samples than its share of the whole
        # batch
        "local(2, every=2, outer=nesterov) * pipeline(2, micro=1)",
        "local(2, every=2, outer=elastic) * place(2)",
        "local(2, every=2) * place(2, cut=[3, 1])",
        "local(2, every=2, outer=nesterov) * place(2, cut=[3, 1])",
    ],
)
def test_divided_model_is_averaged_by_stage(pool: Launcher, text: str) -> None:
    """Divided replicas train like replicas on one rank each.

    The last of four modules has no parameters, and can be a stage of its own. Earlier, the rank of
    that stage took no part when the other ranks made their copies equal.
    """
    made = make_vectors_job(optimizer=heavy, model=lambda: nn.Sequential(*make_mlp(), nn.Tanh()))
    cut, whole = (
        pool.run(observe_steps, made, chosen, 6, copy_run_state, size=chosen.size)[0]
        for chosen in map(resolve_text, (text, text.partition(" *")[0]))
    )
    assert all(is_close(one, other) for one, other in zip(cut, whole, strict=True))


class Momentous(nn.Module):
    """A model with a frozen copy that follows the weights, and a buffer that forwards replace."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(10, 4)
        self.teacher = nn.Linear(10, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mine, own in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    mine.lerp_(own, 0.1)
            self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        return self.student(x) + self.teacher(x) + self.seen.sum()  # type: ignore[no-any-return]


def test_derived_and_recreated_buffers_are_averaged(
    pool: Launcher,
) -> None:
    """Earlier, each rank kept its own values, and the values of the first rank were saved."""
    ranks = observe_states_on_ranks(pool, make_vectors_job(model=Momentous), "local(3, every=3)", 6)
    for step in (3, 6):
        assert all(is_close(rank[step][1], ranks[0][step][1], 0.0) for rank in ranks)
    assert all(is_close(rank[5][0], ranks[0][5][0], 0.0) for rank in ranks)
    for name in ("teacher.weight", "seen"):
        owns = [rank[2][1][name] for rank in ranks]
        assert not torch.equal(owns[0], owns[1])
        assert torch.allclose(ranks[1][2][0][name], sum(owns) / 3)  # type: ignore[arg-type]


class Following(nn.Module):
    """A model with a buffer whose shape follows the share of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x[:, 0].detach().clone()
        return self.out(x)  # type: ignore[no-any-return]


def test_buffer_with_different_shapes_is_named(pool: Launcher) -> None:
    """Earlier, the transport only said that messages did not match."""
    with (
        Launcher(2) as two,
        pytest.raises(pg.RankFailed, match="it has 3 numbers on rank 0 and 2 on rank 1") as caught,
    ):
        two.run(
            observe_states,
            make_vectors_job(model=Following, batch=5),
            resolve_text("local(2, every=1)"),
            1,
            size=2,
        )
    assert caught.value.tensor == "last"


class Replacing(torch.optim.SGD):
    """An SGD that puts new tensors into the parameters, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


def test_optimizer_may_replace_parameter_storage(pool: Launcher) -> None:
    """Earlier, the memory that the parameters had before was averaged."""
    made = make_vectors_job(optimizer=functools.partial(Replacing, lr=0.1))
    assert (
        max(
            pool.run(
                measure_distances,
                made,
                resolve_text("local(2, every=1)"),
                Settings(),
                STEPS,
                size=2,
            )[0]
        )
        < 1e-10
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128])
def test_weights_of_any_real_or_complex_type(pool: Launcher, dtype: torch.dtype) -> None:
    if dtype.is_complex:
        data = torch.utils.data.TensorDataset(
            VECTORS.tensors[0].to(dtype), VECTORS.tensors[0].to(dtype)
        )
        made = make_vectors_job(
            model=lambda: nn.Linear(10, 10, dtype=dtype), loss=compute_squared_error, train=data
        )
    else:
        made = make_vectors_job(dtype=dtype)
    ranks = observe_states_on_ranks(pool, made, "local(2, every=2, outer=nesterov)", 4)
    assert all(is_close(rank[4][1], ranks[0][4][1], 0.0) for rank in ranks)
    assert not is_close(ranks[0][3][1], ranks[1][3][1], 0.0)


def compute_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


def test_elastic_replicas_share_a_center_without_counted_data(pool: Launcher) -> None:
    """Earlier, each replica took its own weights for the mean.

    From then on, each had a centre of its own.
    """
    targets = TEXT.tensors[1][:24].clone()
    # no target of the first batch counts
    targets[torch.tensor(make_vectors_job().make_order(range(24)).get_indices(0, range(12)))] = -100
    data = torch.utils.data.TensorDataset(TEXT.tensors[0][:24], targets)
    ranks = observe_states_on_ranks(
        pool,
        make_job("nothing", TiedLstm, data, dtype=torch.float64),
        "local(2, every=1, outer=elastic)",
        4,
    )
    for step in range(1, 5):
        assert is_close(ranks[0][step][0], ranks[1][step][0], 0.0)


def test_three_elastic_averagings_equal_the_formula(pool: Launcher) -> None:
    """The centre follows c += a sum (x_i - c).

    The number of samples does not matter: replicas have 4, 4 and 4, and later 2, 2 and 1.
    """
    a = 0.9 / 3
    ranks = observe_states_on_ranks(pool, make_vectors_job(), "local(3, every=1, outer=elastic)", 4)
    begun = ranks[0][0][1]
    centre = begun
    owns = [begun] * 3
    for step in range(1, 5):
        freed = pool.run(train_one_step_from, make_vectors_job(), owns, step - 1, size=3)
        mean = {name: sum(each[name] for each in freed) / 3 for name in begun}
        owns = [
            {name: each - a * (each - centre[name]) for name, each in free.items()}
            for free in freed
        ]
        centre = {name: each + a * 3 * (mean[name] - each) for name, each in centre.items()}
        assert all(is_close(rank[step][1], own) for rank, own in zip(ranks, owns, strict=True))
        assert all(is_close(rank[step][0], centre) for rank in ranks)


def train_one_step_from(world: World, made: pg.Job, begun: list[State], step: int) -> State:
    """Return a replica's own weights after this step, from the given weights."""
    trainer = Trainer.build_for_job(world, made, resolve_text("local(3, every=end)"))
    trainer.model.load_state_dict(begun[world.rank])
    try:
        order = made.make_order(made.train)
        place = (step // order.steps, list(order.list_batches())[step % order.steps])
        for fetched in trainer.iterate_batches_at(made.train, order, [place]):
            trainer.step(*separate_target(fetched))
        return copy_tensors(trainer.model.state_dict())
    finally:
        trainer.close()


def find_unequal_copies(trainer: Trainer) -> Any:
    """Return the copies that differ between the ranks of a replica."""
    return trainer.training.setup.layout.find_unequal_copies(
        {**trainer.training.setup.parameters, **dict(trainer.model.named_buffers())}
    )


def make_odd_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 15),
        nn.LayerNorm(15),
        nn.Tanh(),
        nn.Linear(15, 9),
        nn.LayerNorm(9),
        nn.Linear(9, 4),
    )


@pytest.mark.parametrize("reduce", ["native", "ring"])
def test_copies_inside_a_replica_stay_bit_equal(pool: Launcher, reduce: str) -> None:
    """Copies of a tensor are at different places of the buckets on each rank.

    Earlier, three numbers were summed in different orders, so copies differed in the last bit.
    """
    with Launcher(6) as six:
        chosen = resolve_text(f"local(3, every=1, reduce={reduce}) * tensor(2)")
        assert (
            six.run(
                observe_steps,
                make_vectors_job(model=make_odd_mlp),
                chosen,
                9,
                find_unequal_copies,
                size=6,
                timeout=60,
            )
            == [[None] * 9] * 6
        )


def train_schedule_free(world: World, every: int) -> State:
    """Return the weights that a test uses on this rank, right after an average or not."""
    schedulefree = pytest.importorskip("schedulefree")
    made = make_vectors_job(optimizer=functools.partial(schedulefree.SGDScheduleFree, lr=0.1))
    trainer = Trainer.build_for_job(world, made, resolve_text(f"local(2, every={every})"))
    try:
        for fetched in trainer.batches(made.train, made.batch, 0):
            trainer.step(*separate_target(fetched))
        with trainer.use_evaluation_weights():
            return copy_tensors(dict(trainer.model.named_parameters()))
    finally:
        trainer.close()


@pytest.mark.parametrize("every", [2, 3])
def test_optimizer_with_modes_is_evaluated_as_one_model(pool: Launcher, every: int) -> None:
    """Earlier, each rank made another model from equal weights, by its own optimizer state.

    A test then added up the results of two models.
    """
    pytest.importorskip("schedulefree")
    tested = pool.run(train_schedule_free, every, size=2)
    assert is_close(tested[0], tested[1], 0.0)


# ---- runs ------------------------------------------------------------------------------------
def make_tested_job(**changes: Any) -> pg.Job:
    tested = {"epochs": 4, "test": VECTORS, "metric": pg.accuracy, "optimizer": plain}
    return make_job("images", make_mlp, VECTORS).replace(**{**tested, **changes})


def test_averaging_and_evaluation_bytes_are_recorded_apart(
    tmp_path: Path,
) -> None:
    run = pg.train(make_tested_job(), "local(4, every=4)", runs=tmp_path)
    record = Record(run.folder)
    parameters = 10 * 16 + 16 + 16 * 4 + 4
    sent = [line["sent"] for line in record.select_lines("step", 0)]
    assert [bool(each) for each in sent] == [False, False, False, True] * 3
    epochs = record.select_lines("epoch", 0)
    assert [set(line["sent"]) for line in epochs] == [{"tests"}] * 4
    assert epochs[3]["sent"]["tests"]["bytes"] < 200  # replicas have just averaged
    whole = sent[3]["weights"]["bytes"]
    assert whole == epochs[0]["sent"]["tests"]["bytes"]
    assert 1.5 * 4 * parameters < whole <= 1.5 * 4 * parameters + 200
    assert run.sent_per_step["weights"]["bytes"] == round(whole / 4)


def test_evaluation_does_not_change_the_training(tmp_path: Path) -> None:
    """A training with a test after every epoch is bit-equal to one without tests."""
    tested, not_tested = (
        pg.train(make_tested_job(**changes), "local(3, every=5, outer=nesterov)", runs=tmp_path)
        for changes in ({}, {"test": None, "metric": None})
    )
    assert tested.losses == not_tested.losses
    assert is_close(tested.model().state_dict(), not_tested.model().state_dict(), 0.0)


def test_saved_model_is_the_final_mean(tmp_path: Path, pool: Launcher) -> None:
    """In ParallelSGD, replicas are averaged only at the end.

    Before, each one is a serial training on its own shares.
    """
    made = make_vectors_job(epochs=2)
    run = pg.train(made, "local(2, every=end)", runs=tmp_path)
    assert not any(line["sent"] for line in Record(run.folder).select_lines("step", 0))
    ranks = observe_states_on_ranks(pool, made, "local(2, every=end)", 6)
    weights = [
        sum(line["loss"][1] for line in Record(run.folder).select_lines("step", rank))
        for rank in range(2)
    ]
    assert sum(weights) == 2 * len(VECTORS)
    mean = {
        name: sum(weight * rank[6][1][name] for weight, rank in zip(weights, ranks, strict=True))
        / sum(weights)
        for name in ranks[0][6][1]
    }
    assert is_close(run.model().state_dict(), mean)  # type: ignore[arg-type]


def test_optimizer_states_are_averaged() -> None:
    """The mean is weighted by the samples of each replica. A step counter stays a plain number."""
    told = [
        (1.0, {"a": {"m": torch.tensor([1.0, 0.0]), "z": torch.tensor([2j]), "step": 3}}),
        (
            3.0,
            {
                "a": {"m": torch.tensor([5.0, 4.0]), "z": torch.tensor([6j]), "step": 3},
                "b": {"m": torch.ones(1)},
            },
        ),
    ]
    found = average_state(told)
    assert found["a"]["m"].tolist() == [4.0, 3.0]
    assert found["a"]["z"].tolist() == [5j]
    assert found["a"]["step"] == 3
    assert found["b"]["m"].tolist() == [1.0]
    assert average_state([(0.0, each) for _, each in told])["a"]["m"].tolist() == [3.0, 2.0]


def test_planted_weight_division_is_detected(tmp_path: Path) -> None:
    """The fault also divides the weight twice. Earlier, that hid the fault."""
    whole, planted = (
        pg.train(make_vectors_job(), "local(2, every=1, reduce=ring)", runs=tmp_path, **more)
        for more in ({}, {"inject_fault": "mean_twice", "skip_schedule_check": True})
    )
    assert whole.losses != planted.losses


@pytest.mark.parametrize("outer", ["mean", "nesterov", "elastic"])
def test_checkpoints_resume_under_other_strategies(tmp_path: Path, outer: str) -> None:
    """A checkpoint has serial names and the mean of the optimizer states.

    State that only this strategy has is left out on resume, and the record names it.
    """
    made = make_tested_job(optimizer=functools.partial(torch.optim.Adam, lr=0.01))
    text = f"local(2, every=2, outer={outer})"
    first = pg.train(made.replace(epochs=2), text, runs=tmp_path, save=3)
    folder = first.folder / "checkpoint-00000006"
    saved = load_file(folder / "optimizer.safetensors")
    assert set(saved) == {
        f"{name}/{what}"
        for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        for what in ("step", "exp_avg", "exp_avg_sq")
    }
    assert (folder / "strategy.safetensors").exists() == (outer == "nesterov")
    for other in (
        "data(2)",
        "serial",
        text,
        "local(2, every=3, outer=nesterov(lr=0.5))",
        "local(2)",
    ):
        run = pg.train(made, other, runs=tmp_path, resume=first.folder)
        assert len(run.losses) == 6
        left = [
            line
            for line in run.select_lines("choice")
            if line["what"] == "checkpoint" and line["picked"].startswith("without")
        ]
        assert bool(left) == (outer == "nesterov" and "nesterov" not in other)
        assert all(line["picked"] == "without outer momentum" for line in left)


def test_damaged_or_missing_strategy_file_is_found(tmp_path: Path) -> None:
    made = make_tested_job(epochs=2)
    first = pg.train(made, "local(2, every=2, outer=nesterov)", runs=tmp_path, save=3)
    (first.folder / "checkpoint-00000006" / "strategy.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"strategy\.safetensors"):
        run = pg.train(
            made, "local(2, every=2, outer=nesterov)", runs=tmp_path, resume=first.folder
        )
    assert len(run.losses) == 3


def test_outer_momentum_is_saved(tmp_path: Path) -> None:
    """If a run is saved at an average, the outer steps continue as in an uninterrupted run.

    Plain SGD has no state that differs between replicas.
    """
    made = make_vectors_job(epochs=4)
    text = "local(2, every=3, outer=nesterov)"
    whole = pg.train(made, text, runs=tmp_path)
    first = pg.train(made.replace(epochs=2), text, runs=tmp_path, save=6)
    resumed = pg.train(made, text, runs=tmp_path, resume=first.folder)
    assert is_close(whole.model().state_dict(), resumed.model().state_dict())


# ---- a user's own loop -----------------------------------------------------------------------
def train_in_user_loop(world: World, text: str, stopped: int) -> tuple[list[bool], State, State]:
    model = make_mlp()
    optimizer = plain(model.parameters())
    stops = []
    with pg.parallelize(model, nn.functional.cross_entropy, optimizer, text) as trainer:
        for epoch in range(3):
            for inputs, target in trainer.batches(VECTORS, 12, epoch):
                stops.append(trainer.step(inputs, target).stop)
                if world.rank == stopped and len(stops) == 1:
                    world.stop.set()
                    trainer.world.stop.set()
        world.stop.clear()
        trainer.world.stop.clear()
        stood = {name: each.clone() for name, each in trainer.state().items()}
    return stops, stood, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    "text", ["local(2, every=3)", "local(2, every=3) * place(2)", "local(2, every=3) * tensor(2)"]
)
def test_final_model_is_the_mean(pool: Launcher, text: str) -> None:
    """Ranks learn of a stop request when they average, and all stop there.

    Earlier, they reported it one step later, in the next round.
    """
    size = resolve_text(text).size
    found = pool.run(train_in_user_loop, text, size - 1, size=size)
    assert [each[0] for each in found] == [[False] * 2 + [True] * 7] * size
    for _, stood, model in found:
        assert is_close(stood, model, 0.0)
        assert is_close(model, found[0][2], 0.0)


def leave_loop_early(world: World) -> None:
    """Run a loop that rank 0 leaves early, as by the loss of a step.

    That loss differs between ranks.
    """
    model = make_mlp()
    with pg.parallelize(
        model, nn.functional.cross_entropy, plain(model.parameters()), "local(2, every=3)"
    ) as trainer:
        for epoch in range(3):
            for inputs, target in trainer.batches(VECTORS, 12, epoch):
                trainer.step(inputs, target)
                if trainer.steps == 4 and not world.rank:
                    return


def test_ranks_that_end_at_different_steps_are_reported(pool: Launcher) -> None:
    """Earlier, the last exchange of one rank matched an average of the other rank.

    Both went on with the mean of two different steps.
    """
    says = (
        r"rank 0 tests, saves or ends in step 4, and rank 1 averages in step 5.*End a loop by "
        r"a value that is the same on all ranks"
    )
    with Launcher(2) as two, pytest.raises(pg.RankFailed, match=says):
        two.run(leave_loop_early, size=2, timeout=20)


def change_freezing_late(world: World, freeze: bool) -> None:
    model = make_mlp()
    model[0].requires_grad_(freeze)
    with pg.parallelize(
        model, nn.functional.cross_entropy, plain(model.parameters()), "local(2, every=3)"
    ) as trainer:
        for inputs, target in trainer.batches(VECTORS, 12, 0):
            trainer.step(inputs, target)
            model[0].requires_grad_(not freeze)


@pytest.mark.parametrize("freeze", [True, False])
def test_late_freezing_and_unfreezing_is_reported(freeze: bool) -> None:
    """Earlier, late freezing moved the mean of each weight to the place of the weight before it.

    A weight that was unfrozen late was never averaged.
    """
    with (
        Launcher(2) as two,
        pytest.raises(pg.RankFailed, match="frozen or unfrozen after step 0") as caught,
    ):
        two.run(change_freezing_late, freeze, size=2)
    assert caught.value.tensor == "0.weight, 0.bias"


def get_final_optimizer_states(world: World, text: str) -> dict[str, State]:
    model = make_mlp()
    optimizer = heavy(model.parameters())
    with pg.parallelize(model, nn.functional.cross_entropy, optimizer, text) as trainer:
        for inputs, target in trainer.batches(VECTORS, 12, 0):
            trainer.step(inputs, target)
    return {name: optimizer.state[each] for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    "text", ["local(2, every=2)", "local(2, every=2) * tensor(2)", "local(2, every=2) * place(2)"]
)
def test_final_optimizer_state_is_averaged_on_every_rank(pool: Launcher, text: str) -> None:
    """Earlier, if the model was cut, only the first replica had an optimizer state at the end."""
    found = pool.run(get_final_optimizer_states, text, size=resolve_text(text).size)
    assert set(found[0]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for rank in found:
        for name, state in found[0].items():
            assert torch.equal(rank[name]["momentum_buffer"], state["momentum_buffer"])


def train_and_stop(world: World, checked: Any, folder: Path, origin: float) -> str:
    world.stop.set()
    try:
        return train_rank(world, checked, folder, origin)
    finally:
        world.stop.clear()


def test_stop_request_is_handled_after_an_epoch(pool: Launcher, tmp_path: Path) -> None:
    """Earlier, under every=end and without a test, all epochs were trained before the stop."""
    checked = validate_run(make_vectors_job(), "local(2, every=end)")
    assert checked.run_on_ranks(pool, train_and_stop, checked, tmp_path, 0.0) == ["stopped"] * 2
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000003"]


@pytest.mark.parametrize(
    "text", ["local(2, every=2, outer=nesterov)", "local(2, every=2) * place(2)"]
)
def test_stop_request_during_averaging_is_handled_there(
    pool: Launcher, tmp_path: Path, text: str
) -> None:
    """Earlier, the run was saved one step into the next round, where replicas differ."""
    checked = validate_run(make_vectors_job(), text)
    assert (
        checked.run_on_ranks(pool, train_and_stop, checked, tmp_path, 0.0)
        == ["stopped"] * checked.resolved.size
    )
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000002"]


# ---- refused ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("local(2, every=0)", "a whole number from 1"),
        ("local(2, every=never)", "end"),
        ("local(2, after=-1)", "a whole number from 0"),
        ("local(2, outer=nesterov(momentum=1))", "give it a momentum below 1"),
        ("local(2, outer=nesterov(lr=0))", "a number above 0"),
        ("local(2, outer=nesterov(lr=1e400))", "a number above 0"),
        ("local(2, outer=elastic(pull=2))", "at most 1"),
        ("local(2, every=end, outer=elastic)", "let them meet, such as every=16"),
        ("local(2, every=end, outer=nesterov) * place(2)", "leave out outer"),
        ("local(4, outer=elastic(pull=0.4))", "(then it is 0.9 over the number of workers)"),
        ("local(2) * local(2)", "leftmost"),
        ("local(2, reduce=rong)", "did you mean ring?"),
        ("diloco(4)", "local(2, every=500, outer=nesterov)"),
    ],
)
def test_invalid_input_is_refused_with_the_repair(text: str, says: str) -> None:
    with pytest.raises(pg.Refused) as caught:
        resolve_text(text)
    assert says in str(caught.value)


def test_more_workers_than_samples_are_refused() -> None:
    with pytest.raises(pg.Refused, match="give a batch of at least 13"):
        pg.train(make_vectors_job(), "local(13)")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "local(2, every=13, outer=elastic)",
            "replicas first meet after step 13, and elastic steps where they meet; give every of "
            "at most 12, or leave out outer",
        ),
        (
            "local(2, every=5, after=8, outer=nesterov) * place(2)",
            "first meet after step 13, and nesterov .* every of at most 4",
        ),
    ],
)
def test_outer_optimizer_that_never_steps_is_refused(text: str, says: str) -> None:
    """Earlier, the outer optimizer made only one step, at the end of the run.

    With elastic, the saved weights contained a tenth of the initial weights. With nesterov, the
    whole run moved the weights a third too far.
    """
    with pytest.raises(pg.Refused, match=rf"job vectors makes 12 step\(s\), and .*{says}"):
        validate_run(make_vectors_job(), text)
    validate_run(make_vectors_job(epochs=5), text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "local(2, every=13)",
            "first meet after step 13, so their weights are averaged once, at the end, as by "
            "every=end; give every of at most 12",
        ),
        ("local(2, every=5, after=8) * place(2)", "as by every=end; give every of at most 4"),
        (
            "local(2, every=2, after=12)",
            r"all of them synchronous: it is data\(n\) with batch_norm=share; give after of less "
            r"than",
        ),
        ("local(2, every=end, after=13)", "all of them synchronous"),
        ("local(2, every=2, after=12, outer=nesterov)", "all of them synchronous"),
    ],
)
def test_never_or_always_averaging_is_reported_at_start(text: str, says: str) -> None:
    with pytest.warns(UserWarning, match=rf"job vectors makes 12 step\(s\), .*{says}"):
        validate_run(make_vectors_job(), text)
    validate_run(make_vectors_job(epochs=5), text)


@pytest.mark.parametrize(
    "text",
    [
        "local(2, every=12, outer=nesterov)",
        "local(2, every=4, after=8)",
        "local(2, every=end)",
        "local(2, every=end, after=11)",
    ],
)
def test_suitable_intervals_are_not_reported(text: str) -> None:
    validate_run(make_vectors_job(), text)
    validate_run(make_vectors_job(epochs=0), text)


class Masters(torch.optim.SGD):
    """Updates copies of the weights in a finer type, and copies them into the parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault(
                "master", parameter.detach().to(torch.float64, copy=True)
            )
            master.sub_(0.1 * parameter.grad)
            parameter.data.copy_(master)


class SlowWeights(torch.optim.SGD):
    """An SGD with slow weights (Lookahead).

    Every five steps, the slow weights move by 0.8 of the difference to the weights, which then
    become equal to them.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            slow = state.setdefault("slow", parameter.detach().clone())
            state["count"] = state.get("count", 0) + 1
            if state["count"] % 5 == 0:
                parameter.data.copy_(slow.lerp_(parameter.detach(), 0.8))


class Decaying(torch.optim.SGD):
    """An optimizer that shrinks the weights by 5 % in every step.

    It then steps by the sign of an averaged gradient, in proportion to the norm of the weights.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            mean.lerp_(parameter.grad, 0.1)
            parameter.data.mul_(0.95).sub_(0.01 * parameter.data.norm() * mean.sign())


def has_copies(kind: Any, dtype: torch.dtype = torch.float32, **more: Any) -> bool:
    return has_weight_copies(
        kind(nn.Sequential(*make_mlp(), nn.BatchNorm1d(4)).to(dtype).parameters(), lr=0.1, **more)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_with_weight_copies_is_detected(dtype: torch.dtype) -> None:
    assert has_copies(Masters, dtype)
    assert has_copies(SlowWeights, dtype)
    assert not has_copies(Decaying, dtype)
    assert not has_copies(Replacing, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "ASGD",
        "Rprop",
        "Adafactor",
    ],
)
def test_torch_optimizers_keep_no_weight_copies(name: str) -> None:
    assert not has_copies(getattr(torch.optim, name))


@pytest.mark.parametrize("kind", [Masters, SlowWeights])
@pytest.mark.parametrize("text", ["local(2)", "local(2, every=2, outer=elastic) * place(2)"])
def test_optimizer_that_undoes_averaging_is_refused(kind: Any, text: str) -> None:
    """Averages are written into the parameters.

    Earlier, the next step of this optimizer wrote its own copies over them.
    """
    says = f"{kind.__name__} continues from its own copies of the weights .* data\\(n\\)"
    made = make_vectors_job(optimizer=functools.partial(kind, lr=0.1))
    with pytest.raises(pg.Refused, match=says):
        validate_run(made, text)
    with (
        pytest.raises(pg.Refused, match=says),
        pg.parallelize(
            model := make_mlp(),
            nn.functional.cross_entropy,
            kind(model.parameters(), lr=0.1),
            "local(1)",
        ),
    ):
        pass
    validate_run(made, "data(2)")


class Moded(torch.optim.SGD):
    """An SGD that has some weights for training and others for tests."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize("outer", ["nesterov", "elastic"])
def test_optimizer_with_modes_and_a_center_is_refused_at_start(outer: str) -> None:
    """Earlier, all ranks failed in step 0."""
    says = (
        rf"Moded has weights for training and others for tests, and {outer} has a "
        rf"centre of one kind only"
    )
    made = make_vectors_job(optimizer=functools.partial(Moded, lr=0.1))
    text = f"local(1, outer={outer})"
    with pytest.raises(pg.Refused, match=says):
        validate_run(made, text)
    with (
        pytest.raises(pg.Refused, match=says),
        pg.parallelize(
            model := make_mlp(),
            nn.functional.cross_entropy,
            Moded(model.parameters(), lr=0.1),
            text,
        ),
    ):
        pass
    validate_run(made, "local(2)")


# ---- waiting ---------------------------------------------------------------------------------
def wait_in_second_step(world: World) -> None:
    """Keep rank 1 in its second step until rank 0 has given up waiting for it."""
    made = make_vectors_job()
    trainer = Trainer.build_for_job(world, made, resolve_text("local(2, every=2)"))
    try:
        for number, fetched in enumerate(trainer.batches(made.train, made.batch, 0)):
            if number == 1 and world.rank:
                world.store.get("given up")
                return
            trainer.step(*separate_target(fetched))
    finally:
        trainer.close()
        world.store.set("given up", "")


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_long_wait_for_a_slow_replica_has_a_repair(backend: str) -> None:
    """One second per step on one rank, and two on another, is a wait of 500 s after 500 steps.

    Earlier, the collective ended by its timeout, and the message did not say what to change.
    """
    says = (
        "meanwhile others make steps of their own: if that .*give a longer --timeout, or let "
        "them meet more often"
    )
    with Launcher(2) as two, pytest.raises(pg.RankFailed, match=says):
        two.run(wait_in_second_step, size=2, timeout=2.0, backend=backend)


@pytest.mark.parametrize(
    ("text", "after"), [("local(1)", math.inf), ("data(1)", stragglers.SLOW_STEP_SECONDS)]
)
def test_straggler_warning_follows_the_averaging_interval(text: str, after: float) -> None:
    """Earlier, the warning said that a slow replica was still loading or gone."""
    trainer = Trainer.build_for_job(World(), make_vectors_job(), resolve_text(text))
    assert trainer.training.monitor.slow_after == after
    trainer.close()


# ---- the record ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "overlap", "told"),
    [
        ("local(2, every=2)", True, []),
        ("local(2, every=2, after=2)", True, []),
        ("data(2) * tensor(2)", True, []),
        ("local(2, every=2) * pipeline(2, micro=2)", True, []),
        ("data(2) * pipeline(2, micro=2)", True, ["on"]),
        ("local(2, every=2, after=2) * pipeline(2, micro=2)", False, ["off"]),
    ],
)
def test_record_says_if_gradients_overlap(
    tmp_path: Path, text: str, overlap: bool, told: list[str]
) -> None:
    """Earlier, `local` reported overlap too, although nothing is sent in a step."""
    run = pg.train(make_vectors_job(epochs=2), text, runs=tmp_path, overlap=overlap)
    assert [
        line["picked"]
        for line in Record(run.folder).select_lines("choice", 0)
        if line["what"] == "overlap"
    ] == told
