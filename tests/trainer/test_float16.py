"""float16 by autocast, with a loss scale: one scale for all ranks, as torch's GradScaler has."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import JOBS, VECTORS, make_job, make_mlp
from torch import Tensor, nn

import paragrad as pg
from paragrad.engine.loss_scale import LossScale
from paragrad.record.record import Record
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes

LARGE = 300.0  # factor of a loss whose gradients overflow in float16, in the first steps


def compute_large_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) * LARGE


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def make_float16_job(**changes: Any) -> pg.Job:
    made = make_job("vectors", make_mlp, VECTORS).replace(
        dtype=torch.float16,
        batch=8,
        epochs=3,
        loss=compute_large_loss,
        optimizer=lambda each: torch.optim.SGD(each, lr=1e-3, momentum=0.9),
        scheduler=decay,
        scheduler_every="step",
        clip_norm=0.5 * LARGE,
    )
    return made.replace(**changes)


def train_plainly(made: pg.Job) -> tuple[list[float], nn.Module, list[float]]:
    """Train with a plain loop and torch's GradScaler.

    Returns losses, model, and the scale before each step and at the end.
    """
    model = made.build_model()
    optimizer = made.optimizer(model.parameters())
    scheduler = made.scheduler(optimizer) if made.scheduler else None
    order, samples = made.make_order(made.train), made.make_samples(made.train)
    scaler = torch.amp.GradScaler("cpu")
    losses, scales = [], []
    for epoch in range(made.epochs):
        for positions in order.list_batches():
            inputs, target = samples[epoch, order.get_indices(epoch, positions)]
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = made.loss(model(inputs.float()), target)
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if made.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), made.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            losses.append(float(loss.detach()))
    return losses, model, [*scales, scaler.get_scale()]


def list_skipped(run: Record) -> list[tuple[float, float]]:
    """Return (step, new scale) of each skipped step."""
    return [
        (line["numbers"]["step"], line["numbers"]["scale"])
        for line in run.select_lines("event")
        if line["name"] == "overflow"
    ]


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_serial_is_a_plain_loop_with_a_grad_scaler(tmp_path: Path) -> None:
    """Both are equal bit for bit, with skipped steps, clipping, a scheduler, and after a resume."""
    made = make_float16_job()
    losses, model, scales = train_plainly(made)
    run = pg.train(made, "serial", runs=tmp_path)
    assert run.losses == losses
    skipped = [
        (step, after)
        for step, (before, after) in enumerate(itertools.pairwise(scales))
        if after < before
    ]
    assert len(skipped) > 2
    assert list_skipped(run) == skipped
    assert run.to_json()["skipped_steps"] == len(skipped)
    half = pg.train(made, "serial", runs=tmp_path, limit=2, save=2)
    rest = pg.train(made, "serial", runs=tmp_path, resume=half.folder)
    assert half.losses + rest.losses == losses
    for one in (run, rest):
        assert all(map(torch.equal, one.model().parameters(), model.parameters()))


@pytest.mark.parametrize(
    ("strategy", "reference"),
    [
        ("data(2, reduce=ring)", "serial(micro=2)"),
        *(
            pytest.param(*each, marks=pytest.mark.table)
            for each in (
                ("pipeline(2)", "serial(micro=8)"),
                ("data(2, state=shared_memory)", "serial(micro=2)"),
                ("data(2, state=fully_sharded)", "serial(micro=2)"),
                ("data(3, shares=[2, 1, 1], micro=2)", "serial(micro=4)"),
                ("tensor(2)", "serial"),
                ("place(2)", "serial"),
                ("data(2) * tensor(2)", "serial(micro=2)"),
            )
        ),
    ],
)
def test_all_ranks_skip_the_same_steps(strategy: str, reference: str, tmp_path: Path) -> None:
    """Whether a step overflows depends on the parts of the batch: serial skips step 6 too.

    Its gradient is 102,480 there. One sum over the whole batch or over a half exceeds 65,504, and
    none over a quarter does. So the reference of a strategy has parts of the same size.
    """
    made = make_float16_job()
    serial = pg.train(made, reference, runs=tmp_path)
    run = pg.train(made, strategy, runs=tmp_path)
    assert list_skipped(run) == list_skipped(serial)
    assert run.losses == pytest.approx(serial.losses, rel=5e-3)
    assert run.compared_steps > 2


def compute_mean_output(output: Tensor, target: Tensor) -> Tensor:
    return output.float().mean()


def test_comparison_names_the_step_that_overflows_in_whole_batches_only(tmp_path: Path) -> None:
    """Each of eight samples has the gradient 8,192 at the first loss scale, 65,536.

    Their sum exceeds 65,504, the largest number of float16; that of four does not. Earlier, the
    losses differed by a learning rate, and no line said why.
    """
    ones = torch.utils.data.TensorDataset(torch.ones(16, 1), torch.zeros(16))
    made = make_float16_job(
        model=lambda: nn.Linear(1, 1),
        train=ones,
        test=None,
        loss=compute_mean_output,
        metric=None,
        scheduler=None,
        scheduler_every=None,
        clip_norm=None,
        epochs=1,
    )
    skipped = {"serial": [(0, 2.0**15)], "serial(micro=2)": [], "data(2)": []}
    table = pg.compare(made, list(skipped), runs=tmp_path)
    for row, (strategy, expected) in zip(table.rows, skipped.items(), strict=True):
        assert (row.strategy, row.failure) == (strategy, None)
        assert list_skipped(Record(table.folder / row.runs[0])) == expected
        assert row.to_json()["overflowed_steps"] == (tuple(int(step) for step, _ in expected),)
    assert "serial(micro=2); data(2): not the training of serial from step 0 on" in str(table)


@pytest.mark.table
@pytest.mark.parametrize("name", ["cnn with batch norm", "mlp, adam, clipped, scheduled"])
@pytest.mark.parametrize("strategy", ["data(2, reduce=ring)", "tensor(2)", "pipeline(2, micro=2)"])
def test_other_models_train_in_float16(name: str, strategy: str, tmp_path: Path) -> None:
    made = JOBS[name].replace(dtype=torch.float16, epochs=1)
    serial = pg.train(made, "serial", runs=tmp_path)
    run = pg.train(made, strategy, runs=tmp_path)
    assert run.losses == pytest.approx(serial.losses, rel=2e-2)


def compute_float16_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that autocast leaves in float16; multiplied by the loss scale, it is infinite."""
    return -torch.log_softmax(output, -1)[torch.arange(len(target)), target].mean()


@pytest.mark.parametrize(
    "strategy", ["serial", pytest.param("data(2, reduce=ring)", marks=pytest.mark.table)]
)
def test_loss_in_float16_trains_on(strategy: str, tmp_path: Path) -> None:
    """Earlier, such a loss ended serial, but not other strategies.

    The largest number of float16 is 65,504.
    """
    made = make_float16_job(
        loss=compute_float16_loss, clip_norm=None, scheduler=None, scheduler_every=None
    )
    losses, _, scales = train_plainly(made)
    run = pg.train(made, strategy, runs=tmp_path)
    assert scales[:2] == [2.0**16, 2.0**15]
    if strategy == "serial":
        assert list_skipped(run) == [(0, 2.0**15)]
        assert run.losses == losses
    else:  # half of the loss does not overflow
        assert run.losses[0] == pytest.approx(losses[0], rel=5e-3)
        assert run.skipped_steps == 0


@pytest.mark.parametrize(
    ("strategy", "reference"),
    [
        ("pipeline(2)", "serial(micro=8)"),
        pytest.param("data(3, state=shared_memory)", "serial(micro=3)", marks=pytest.mark.table),
    ],
)
def test_rank_without_gradients_has_no_overflow(
    strategy: str, reference: str, tmp_path: Path
) -> None:
    """torch cannot compute the norm of an empty list of tensors."""
    made = make_float16_job(
        model=lambda: nn.Sequential(nn.Linear(10, 4), nn.Tanh()), clip_norm=None
    )
    serial = pg.train(made, reference, runs=tmp_path)
    run = pg.train(made, strategy, runs=tmp_path)
    assert list_skipped(run) == list_skipped(serial)
    assert run.losses == pytest.approx(serial.losses, rel=5e-3)


def test_scale_grows_after_good_steps() -> None:
    ours, theirs = LossScale(growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(20):
        overflowed = step in (4, 11, 12)
        parameter.grad = torch.tensor([float("inf") if overflowed else 1.0])
        theirs.scale(torch.zeros(1))
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed)
        assert ours.value == theirs.get_scale()


def test_own_loop_has_a_loss_scale() -> None:
    made = make_float16_job(scheduler=None, scheduler_every=None, clip_norm=None)
    losses, plain, _ = train_plainly(made)
    model = made.build_model()
    optimizer = made.optimizer(model.parameters())
    found = []
    with pg.parallelize(
        model,
        compute_large_loss,
        optimizer,
        strategy="serial",
        seed=made.seed,
        autocast=torch.float16,
    ) as trainer:
        for epoch in range(made.epochs):
            for inputs, target in trainer.batches(VECTORS, made.batch, epoch):
                found.append(trainer.step(inputs, target).loss)
    assert found == losses
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.table
def test_gradient_that_is_never_finite_is_named(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) + (0 * output.float().sum()).sqrt()

    made = make_float16_job(
        loss=loss, scheduler=None, scheduler_every=None, clip_norm=None, epochs=20
    )
    with pytest.raises(pg.RankFailed, match="not finite at the least loss scale either"):
        pg.train(made, "data(2)", runs=tmp_path, skip_first_step_check=True)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("server(2)", "servers update before"),
        ("local(2, every=2)", "workers step by themselves"),
        ("federated(2, clients=4)", "workers step by themselves"),
        ("data(2, compress=int8)", "what a compressor keeps"),
    ],
)
def test_strategies_without_one_scale_are_refused(strategy: str, reason: str) -> None:
    with pytest.raises(pg.Refused, match=f"one loss scale for all ranks, and {reason}"):
        validate_run(make_float16_job(), strategy)
