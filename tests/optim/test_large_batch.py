"""Training with a larger batch: scaled learning rates, LARS and LAMB, and the noise scale.

Scaled rates follow the job's own schedule after a warm-up. LARS and LAMB equal the formulas of
their papers. The gradient noise scale is measured on problems whose noise scale is known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import VECTORS, draw_numbers, make_job, observe_steps, resolve_text
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.launch import Launcher
from paragrad.optim import Lamb, Lars, Scaled
from paragrad.record.noise_scale import estimate_step_noise, track_noise_scale
from paragrad.record.record import Record
from paragrad.report import summaries
from paragrad.strategies.shares import split_micro_batches
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

State = dict[str, Tensor]
plain = functools.partial(torch.optim.SGD, lr=0.1)
STEPS = 20


# ---- rates -----------------------------------------------------------------------------------
def list_rates(
    make: Callable[[torch.optim.Optimizer], Any], steps: int, lr: float = 0.1
) -> list[float]:
    """Return the learning rate of each step in a loop of plain torch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_warm_up_rises_linearly_to_the_scaled_rate() -> None:
    found = list_rates(lambda optimizer: Scaled(optimizer, 8.0, 4), 7)
    assert found == pytest.approx([0.1 * each for each in (1, 2.75, 4.5, 6.25, 8, 8, 8)])
    assert list_rates(lambda optimizer: Scaled(optimizer, 0.5), 3) == pytest.approx([0.05] * 3)


OWN: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "by factors": functools.partial(schedulers.ExponentialLR, gamma=0.9),
    "by steps": functools.partial(schedulers.StepLR, step_size=6, gamma=0.5),
    "closed": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "of its own rates": functools.partial(schedulers.OneCycleLR, max_lr=2.0, total_steps=48),
    "cosine": functools.partial(schedulers.CosineAnnealingLR, T_max=30),
    "two": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.ConstantLR(optimizer, 0.5, 8), schedulers.ExponentialLR(optimizer, 0.8)],
        [8],
    ),
}


# torch gives this warning itself, for one of its schedulers
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("own", OWN)
def test_scaled_schedule_keeps_its_place_in_an_epoch(own: str) -> None:
    """At the end of an epoch, the scheduler has made the 12 steps of the original batch.

    This holds for a batch four times as large (3 steps), and also for a smaller one.
    """
    serial = list_rates(OWN[own], 36)
    for steps in (3, 5, 24):
        found = list_rates(
            lambda optimizer, steps=steps: Scaled(
                optimizer, 3.0, 0, OWN[own](optimizer), 12, steps
            ),
            3 * steps,
        )
        assert found == pytest.approx(
            [3.0 * serial[step * 12 // steps] for step in range(3 * steps)]
        ), steps


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("own", OWN)
def test_schedule_resumes_from_its_state(own: str) -> None:
    def make_scaled() -> tuple[torch.optim.Optimizer, Scaled]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, Scaled(optimizer, 4.0, 5, OWN[own](optimizer), 12, 4)

    optimizer, scheduler = make_scaled()
    for step in range(9):
        if step == 3:
            later, again = make_scaled()
            later.load_state_dict(optimizer.state_dict())
            again.load_state_dict(scheduler.state_dict())
        optimizer.step()
        scheduler.step()
    for _ in range(6):
        later.step()
        again.step()
    assert later.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert again.get_last_lr() == scheduler.get_last_lr()


def test_job_stores_its_original_batch_size() -> None:
    made = make_job("vectors", lambda: nn.Linear(10, 4), VECTORS).replace(batch=12, optimizer=plain)
    assert made.replace(batch=24).replace(batch=48).own_batch == 12
    assert made.replace(epochs=3).own_batch is None
    # the new optimizer is meant for the batch of 24
    assert made.replace(batch=24).replace(optimizer=plain).own_batch is None
    large = made.replace(batch=24, scale_lr="linear").replace(batch=29)
    checked = validate_run(large, "serial")
    assert checked.inspection.rate_scaling is not None
    assert checked.inspection.rate_scaling.startswith(f"{29 / 12:.4g} times the job's own")
    optimizer = checked.job.optimizer(nn.Linear(10, 4).parameters())
    assert checked.job.scheduler is not None
    checked.job.scheduler(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 29 / 12)
    assert validate_run(checked.job, "serial").inspection.rate_scaling is None  # no second scaling


def test_invalid_scheduler_is_refused() -> None:
    made = make_job("vectors", lambda: nn.Linear(10, 4), VECTORS).replace(batch=12, optimizer=plain)
    for wrong, message in (
        (schedulers.ReduceLROnPlateau, "needs a metric"),
        (lambda optimizer: 3, "is a int"),
    ):
        with pytest.raises(pg.Refused, match=message):
            validate_run(
                made.replace(scheduler=wrong).replace(batch=24, scale_lr="linear"), "serial"
            )


@pytest.mark.parametrize("text", ["serial", "data(2)", "server(2, servers=2)"])
def test_large_batch_training_equals_plain_torch(text: str, tmp_path: Path) -> None:
    """The losses equal those of an unscaled job with the expected rates as its own schedule."""
    made = make_job(
        "vectors", lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)), VECTORS
    ).replace(
        batch=4,
        epochs=4,
        dtype=torch.float64,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        scheduler=functools.partial(schedulers.ExponentialLR, gamma=0.95),
        scheduler_every="step",
    )
    run = pg.train(made.replace(batch=12, scale_lr="linear", warm_up=2), text, runs=tmp_path)
    lines = Record(run.folder).select_lines("step")
    expected = [0.05 * 0.95 ** (step * 8 // 3) * (1 + 2 * min(1, step / 6)) for step in range(12)]
    assert [line["lr"] for line in lines] == pytest.approx(expected)
    said = [line for line in Record(run.folder).choices if line["what"] == "learning rate"]
    assert [line["picked"] for line in said] == ["3 times the job's own"]
    plainly = made.replace(
        batch=12,
        scheduler=lambda optimizer: schedulers.LambdaLR(
            optimizer, lambda step: [*expected, 0.0][step] / 0.05
        ),
    )
    other = pg.train(plainly, "serial", runs=tmp_path)
    assert run.losses == pytest.approx(other.losses, rel=1e-9)


@pytest.mark.parametrize("text", ["data(2)", "data(2, state=replicated)"])
def test_large_batch_run_resumes_from_a_checkpoint(text: str, tmp_path: Path) -> None:
    made = make_job(
        "vectors", lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)), VECTORS
    ).replace(
        batch=4,
        epochs=4,
        dtype=torch.float64,
        optimizer=plain,
        scheduler=functools.partial(schedulers.StepLR, step_size=7),
        scheduler_every="step",
    )
    large = made.replace(batch=12, scale_lr="sqrt", warm_up=1.5)
    whole = pg.train(large, text, runs=tmp_path)
    half = pg.train(large, text, runs=tmp_path, limit=5, save=5)
    rest = pg.train(large, text, runs=tmp_path, resume=half.folder)
    assert whole.losses[5:] == rest.losses
    with pytest.raises(pg.Refused, match="scheduler"):
        pg.train(large.replace(warm_up=2), text, runs=tmp_path, resume=half.folder)


# ---- LARS and LAMB ---------------------------------------------------------------------------
def step_lars(
    weights: list[list[float]],
    gradients: list[list[float]],
    kept: list[list[float]],
    lr: float,
    before: float | None,
    momentum: float,
    decay: float,
    trust: float,
) -> None:
    """Make a step of Algorithm 1 of arXiv 1708.03888, number by number.

    If the learning rate has changed, apply the correction of Goyal.
    """
    for w, g, v in zip(weights, gradients, kept, strict=True):
        length = math.sqrt(sum(each * each for each in w))
        slope = math.sqrt(sum(each * each for each in g))
        local = trust * length / (slope + decay * length) if length and slope else 1.0
        for place in range(len(w)):
            corrected = v[place] * (lr / before if before else 1.0)
            v[place] = momentum * corrected + lr * local * (g[place] + decay * w[place])
        for place in range(len(w)):
            w[place] -= v[place]


def step_lamb(
    weights: list[list[float]],
    gradients: list[list[float]],
    means: list[list[float]],
    squares: list[list[float]],
    step: int,
    lr: float,
    first: float,
    second: float,
    eps: float,
    decay: float,
) -> None:
    """Make a step of Algorithm 2 of arXiv 1904.00962, number by number."""
    for w, g, m, v in zip(weights, gradients, means, squares, strict=True):
        move = []
        for place in range(len(w)):
            m[place] = first * m[place] + (1 - first) * g[place]
            v[place] = second * v[place] + (1 - second) * g[place] ** 2
            mean = m[place] / (1 - first**step)
            square = v[place] / (1 - second**step)
            move.append(mean / (math.sqrt(square) + eps) + decay * w[place])
        length = math.sqrt(sum(each * each for each in w))
        far = math.sqrt(sum(each * each for each in move))
        ratio = length / far if length and far else 1.0
        for place in range(len(w)):
            w[place] -= lr * ratio * move[place]


def make_parameters() -> tuple[list[nn.Parameter], list[list[float]]]:
    """Return three parameters: a matrix, a vector, and a vector of zeros; and their values."""
    made = [
        nn.Parameter(draw_numbers(3, 4, seed=1).double()),
        nn.Parameter(draw_numbers(5, seed=2).double()),
        nn.Parameter(torch.zeros(2, dtype=torch.float64)),
    ]
    return made, [each.detach().flatten().tolist() for each in made]


def set_gradients(parameters: list[nn.Parameter], step: int) -> list[list[float]]:
    """Set and return the gradients of a step; in every third step, the last one is zero."""
    for place, each in enumerate(parameters):
        each.grad = draw_numbers(*each.shape, seed=100 * step + place).double() * (
            0.0 if place == 2 and step % 3 == 0 else 1.0
        )
    return [each.grad.flatten().tolist() for each in parameters if each.grad is not None]


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("changing", [False, True])
def test_lars_equals_its_formula(changing: bool, decay: float) -> None:
    parameters, weights = make_parameters()
    optimizer = Lars(parameters, lr=0.5, momentum=0.9, weight_decay=decay, trust=0.02)
    kept = [[0.0] * len(each) for each in weights]
    before = None
    for step in range(STEPS):
        lr = 0.5 / (1 + step) if changing else 0.5
        optimizer.param_groups[0]["lr"] = lr
        step_lars(weights, set_gradients(parameters, step), kept, lr, before, 0.9, decay, 0.02)
        optimizer.step()
        before = lr
    for parameter, wanted in zip(parameters, weights, strict=True):
        assert torch.allclose(
            parameter.flatten(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb_equals_its_formula(decay: float) -> None:
    parameters, weights = make_parameters()
    optimizer = Lamb(parameters, lr=0.05, betas=(0.9, 0.99), weight_decay=decay)
    means, squares = ([[0.0] * len(each) for each in weights] for _ in range(2))
    for step in range(STEPS):
        step_lamb(
            weights,
            set_gradients(parameters, step),
            means,
            squares,
            step + 1,
            0.05,
            0.9,
            0.99,
            1e-6,
            decay,
        )
        optimizer.step()
    for parameter, wanted in zip(parameters, weights, strict=True):
        assert torch.allclose(
            parameter.flatten(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )


def test_excluded_groups_are_updated_by_sgd_and_adam() -> None:
    for ours, theirs in (
        (Lars, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)),
        (Lamb, functools.partial(torch.optim.AdamW, lr=0.1, eps=1e-6, weight_decay=0.01)),
    ):
        (one, _), (other, _) = make_parameters(), make_parameters()
        pair = ours(one, lr=0.1, weight_decay=0.01, adapted=False), theirs(other)
        for step in range(STEPS):
            set_gradients(one, step)
            set_gradients(other, step)
            for each in pair:
                each.step()
        for parameter, wanted in zip(one, other, strict=True):
            assert torch.allclose(parameter, wanted, rtol=1e-10, atol=1e-12), ours


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda held: Lars(held, lr=-1), "lr must be"),
        (lambda held: Lars(held, lr=1, trust=math.inf), "trust must be"),
        (lambda held: Lamb(held, betas=(0.9, 1.0)), "betas must be"),
        (lambda held: Lamb(held, eps=-1), "eps must be"),
    ],
)
def test_invalid_optimizer_arguments_are_refused(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.zeros(1))])


LAYERED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lars": lambda held: Lars(held, lr=0.5, weight_decay=1e-3, trust=0.02),
    "lamb": lambda held: Lamb(held, lr=0.02, weight_decay=0.01),
}


def copy_weights(trainer: Trainer) -> State:
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "text", ["data(2, state=replicated)", "data(2)", "data(3, state=shared_memory)"]
)
@pytest.mark.parametrize("name", LAYERED)
def test_layerwise_norms_are_of_whole_tensors(pool: Launcher, name: str, text: str) -> None:
    """LARS and LAMB use norms of whole tensors; in shared memory, one rank updates each tensor."""
    made = make_job(
        "vectors", lambda: nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 4)), VECTORS
    ).replace(dtype=torch.float64, epochs=8, optimizer=LAYERED[name])
    chosen = resolve_text(text)
    serial = pool.run(observe_steps, made, resolve_text("serial"), STEPS, copy_weights, size=1)[0]
    for found in pool.run(observe_steps, made, chosen, STEPS, copy_weights, size=chosen.size):
        for step in range(STEPS):
            for tensor, wanted in serial[step].items():
                assert torch.allclose(found[step][tensor], wanted, rtol=1e-10, atol=1e-12), (
                    step,
                    tensor,
                )


def test_servers_that_divide_tensors_refuse_them() -> None:
    made = make_job("vectors", lambda: nn.Linear(10, 4), VECTORS).replace(optimizer=LAYERED["lars"])
    with pytest.raises(pg.Refused, match="Lars does not update element by element"):
        validate_run(made, "server(2, servers=2)")


# ---- the noise scale -------------------------------------------------------------------------
def make_regression(samples: int = 8192) -> tuple[pg.Job, float]:
    """Return a linear regression whose parameters never change, and its noise scale.

    The noise scale is computed from the gradients of all samples.
    """
    inputs = draw_numbers(samples, 6, seed=3).double()
    targets = (inputs @ draw_numbers(6, 1, seed=4).double()) + 3 * draw_numbers(
        samples, 1, seed=5
    ).double()
    each = -inputs * targets  # of the loss (w x - y)^2 / 2 at w = 0
    mean = each.mean(0)
    scale = float(each.var(0, correction=0).sum() / (mean @ mean))
    made = pg.Job(
        name="line",
        model=make_zero_linear,
        loss=compute_half_square,
        train=TensorDataset(inputs, targets),
        batch=64,
        epochs=8,
        optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        dtype=torch.float64,
    )
    return made, scale


def make_zero_linear() -> nn.Module:
    model = nn.Linear(6, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def compute_half_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean() / 2


@pytest.mark.parametrize(
    "text",
    [
        "data(2, shares=[3, 1])",
        "serial(micro=4)",
        pytest.param("data(4)", marks=pytest.mark.table),
        pytest.param("data(3, micro=2)", marks=pytest.mark.table),
    ],
)
def test_noise_scale_of_a_known_problem(text: str, tmp_path: Path) -> None:
    """The estimate after 1,000 steps with fixed parameters is right within 20 %.

    This bound comes from the issue for which the estimate was written.
    """
    made, scale = make_regression()
    run = pg.train(made, text, runs=tmp_path, noise_scale=1, limit=1000)
    steps = Record(run.folder).group_step_lines()
    assert len(steps) == 1000
    *_, last = track_noise_scale(steps)
    assert last.count == 1000
    assert last.scale == pytest.approx(scale, rel=0.2)


@pytest.mark.parametrize(
    "text",
    [
        "data(2, state=replicated)",
        "data(2, state=shared_memory)",
        "data(2, reduce=native)",
        "data(2, reduce=ring, micro=2)",
        "serial(micro=3)",
    ],
)
def test_noise_scale_norms_equal_plain_torch(text: str, tmp_path: Path) -> None:
    """Every rank records two squared norms, also for a short last batch.

    One is of its gradient after the first micro-batch, before the exchange. The other is of the
    mean gradient.
    """
    made, _ = make_regression(samples=100)
    made = made.replace(batch=32, epochs=1)
    run = pg.train(made, text, runs=tmp_path, noise_scale=3)
    order = made.make_order(range(100))
    division = pg.strategy(text).division
    data: Any = made.train
    for step, lines in enumerate(Record(run.folder).group_step_lines()):
        if step % 3:
            assert [line["noise"] for line in lines] == [None] * len(lines)
            continue
        firsts = split_micro_batches(order.get_batch(step), division)[0]
        for line, first in zip(lines, firsts, strict=True):
            square, weight, whole = line["noise"]

            def compute_gradient(places: range) -> Tensor:
                inputs, targets = data[order.get_indices(0, places)]
                return (-inputs * targets).mean(0)

            assert weight == len(first)
            assert square == pytest.approx(float(compute_gradient(first).square().sum()), rel=1e-9)
            assert whole == pytest.approx(
                float(compute_gradient(order.get_batch(step)).square().sum()), rel=1e-9
            )


def test_unequal_shares_use_the_harmonic_mean() -> None:
    """The result is computed by hand: b = 2 / (1/1 + 1/3) = 1.5, B = 4, (9 + 3) / 2 = 6 and 3.5."""
    lines = [
        {"noise": [9.0, 1.0, 3.5], "loss": [0.0, 1.0]},
        {"noise": [3.0, 3.0, 3.5], "loss": [0.0, 3.0]},
    ]
    found = estimate_step_noise(lines)
    assert found is not None
    assert found == pytest.approx((2.5 / (1 / 1.5 - 1 / 4), (4 * 3.5 - 1.5 * 6) / 2.5, 4))
    # one part only, so there is no estimate
    assert estimate_step_noise([{"noise": [9.0, 4.0, 3.5], "loss": [0.0, 4.0]}]) is None
    assert estimate_step_noise([{"noise": None, "loss": [0.0, 4.0]}]) is None


def test_noise_scale_of_tokens_is_compared_with_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier, the noise scale in tokens was printed next to the batch in sequences.

    So a batch that was 64 times larger than the useful one was called too small.
    """
    made = pg.Job(
        name="tokens",
        model=lambda: nn.Linear(10, 10),
        loss=lambda output, target: ((output - target).square().sum(), output.numel()),
        optimizer=plain,
        train=TensorDataset(draw_numbers(64, 10, seed=1), draw_numbers(64, 10, seed=2)),
        batch=16,
        epochs=1,
    )
    run = pg.train(made, "data(2)", runs=tmp_path, noise_scale=1)
    assert run.noise is not None
    assert run.noise.batch == 160
    summaries.print_run(run, False)
    assert "this batch is 160" in capsys.readouterr().out
    assert (
        pg.train(
            made.replace(epochs=2),
            "data(2)",
            runs=tmp_path,
            noise_scale=1,
            resume=pg.train(
                made.replace(epochs=2), "data(2)", runs=tmp_path, noise_scale=1, limit=4, save=4
            ).folder,
        ).noise.count
        == 8
    )  # type: ignore[union-attr]


def test_lamb_refuses_complex_numbers() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="complex"):
        Lamb([parameter]).step()


def test_noise_scale_is_printed_and_on_the_page(tmp_path: Path) -> None:
    made, _ = make_regression(samples=256)
    with pytest.warns(
        UserWarning, match="the noise scale is not measured under serial: no rank there"
    ):
        table = pg.compare(made.replace(epochs=4), "serial; data(2)", runs=tmp_path, noise_scale=1)
    page = (table.folder / "page.html").read_text()
    assert "Gradient noise scale" in page
    assert "the largest that is useful" in page
    run = pg.train(made.replace(epochs=4), "data(2)", runs=tmp_path, noise_scale=1)
    assert run.noise is not None
    assert run.to_json()["noise"]["count"] == 16
    assert pg.train(made, "data(2)", runs=tmp_path, limit=2).to_json()["noise"] is None


def test_negative_noise_scale_is_refused() -> None:
    with pytest.raises(pg.Refused, match="noise_scale must be a whole number"):
        Settings(noise_scale=-1).check_settings()
