"""Serial is plain PyTorch: a user's own loop trains the same, bit for bit.

Earlier, backward ran on the sum of the losses, and the mean was taken after it. So hooks and
optimizers in backward saw gradients that were too large by the number of samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import IMAGES, JOBS, VECTORS, make_job
from torch import Tensor, nn

import paragrad as pg
from paragrad.datasets.loading import separate_target
from paragrad.engine.rng.draws import Draws
from paragrad.jobs.job import open_dataset
from paragrad.jobs.loss import call_model
from paragrad.report.equivalence.batch_selection import list_first_batches
from paragrad.report.equivalence.plain_loop import PlainLoop
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.trainer.trainer import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

STEPS = 20
DTYPES = (torch.float32, torch.float64)


def iterate_batches(job: pg.Job, steps: int) -> Iterator[tuple[Any, Any]]:
    dataset = open_dataset(job.train, None)
    samples = job.make_samples(dataset)
    order = job.make_order(dataset)
    for epoch, positions in list_first_batches(order, steps):
        indices = order.get_indices(epoch, positions)
        inputs, target = separate_target(samples[epoch, indices, list(range(len(indices)))])
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            inputs = inputs.to(job.dtype)
        yield inputs, target


def train_plainly(job: pg.Job, steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Train with the loop that a user writes without this library."""
    model = job.build_model()
    optimizer = job.optimizer(model.parameters())
    losses = []
    for inputs, target in iterate_batches(job, steps):
        optimizer.zero_grad()
        loss = job.loss(call_model(model, inputs), target)
        loss.backward()
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: each.detach() for name, each in model.state_dict().items()}, losses


def train_serially(job: pg.Job, steps: int = STEPS) -> tuple[dict[str, Tensor], list[float], Draws]:
    trainer = Trainer.build_for_job(World(), job, Serial())
    dataset = open_dataset(job.train, None)
    order = job.make_order(dataset)
    places = list_first_batches(order, steps)
    losses = [
        trainer.step(*separate_target(fetched)).loss
        for fetched in trainer.iterate_batches_at(dataset, order, places)
    ]
    return trainer.state(), losses, trainer.training.setup.draws


def assert_bit_equal(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert [name for name, each in plain.items() if not torch.equal(ours[name], each)] == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_serial_is_the_plain_loop(name: str, dtype: torch.dtype) -> None:
    """PlainLoop is verify's reference; it shares the order, the collate and the keyed draws."""
    job = JOBS[name].replace(dtype=dtype)
    ours, losses, draws = train_serially(job)
    dataset = open_dataset(job.train, None)
    places = list_first_batches(job.make_order(dataset), STEPS)
    loop = PlainLoop(job, dataset, places, torch.device("cpu"), draws)
    assert losses == [loop.step() for _ in range(STEPS)]
    assert_bit_equal(ours, loop.state())


BUILT_IN = {
    "digits": {},
    "inception-digits": {},
    "mnist-mlp": {},
    "mnist-cnn": {"norm": "batch"},
    "mnist-resnet": {},
    "shakespeare-lstm": {"hidden": 32, "length": 32},
    "shakespeare-gpt": {"layers": 2, "width": 32, "heads": 2, "context": 32},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "digits" else pytest.mark.table) for name in BUILT_IN],
)
def test_built_in_jobs_are_plain(
    name: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    folder = None if "digits" in name else request.getfixturevalue("data")
    job = pg.job(name, **BUILT_IN[name]).replace(dtype=dtype, test=None)
    dataset = open_dataset(job.train, folder)
    job = job.replace(train=dataset)
    ours, losses, draws = train_serially(job)
    places = list_first_batches(job.make_order(dataset), STEPS)
    loop = PlainLoop(job, dataset, places, torch.device("cpu"), draws)
    assert losses == [loop.step() for _ in range(STEPS)]
    assert_bit_equal(ours, loop.state())


# ---- hooks -----------------------------------------------------------------------------------
class Counted:
    """A hook that calls a function with each gradient, after a number of calls."""

    def __init__(self, function: Callable[[Any], Any], first: int) -> None:
        self.function = function
        self.first = first
        self.calls = 0

    def __call__(self, gradient: Any) -> Any:
        self.calls += 1
        return self.function(gradient) if self.calls > self.first else None


class Watched(nn.Module):
    """A model that sums squared gradients of a weight, and clips the gradient of an activation."""

    def __init__(self, clip: float) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.second = nn.Linear(16, 4)
        self.clip = clip
        self.register_buffer("squares", torch.zeros(16, 10))
        self.first.weight.register_post_accumulate_grad_hook(self.keep)

    def keep(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.squares.add_(weight.grad**2)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.clip and x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-self.clip, self.clip))
        return self.second(x)


def hook_tensor(function: Callable[[Tensor], Tensor]) -> Callable[[int], nn.Module]:
    def build(first: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
        for parameter in model.parameters():
            parameter.register_hook(Counted(function, first))
        return model

    return build


def change_gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = function(parameter.grad)

    return change


def hook_accumulation(function: Callable[[Tensor], None]) -> Callable[[int], nn.Module]:
    def build(first: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(Counted(function, first))
        return model

    return build


def step_in_backward(first: int) -> nn.Module:
    """Return a model with optimizers in backward: a parameter's own optimizer steps in a hook."""
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 4))
    for parameter in model[:3].parameters():
        own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def step(parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(Counted(step, first))
    return model


def hook_modules(before: bool) -> Callable[[int], nn.Module]:
    def build(first: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
        clip = Counted(lambda pair: tuple(each.clamp(-1e-3, 1e-3) for each in pair), first)
        if before:
            model[1].register_full_backward_pre_hook(lambda module, outputs: clip(outputs))
        else:
            model[1].register_full_backward_hook(lambda module, inputs, outputs: clip(inputs))
        return model

    return build


def divide_by_norm(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1.0)


HOOKED: dict[str, Callable[[int], nn.Module]] = {
    "tensor, linear": hook_tensor(lambda gradient: 0.5 * gradient),
    "tensor, clips": hook_tensor(lambda gradient: gradient.clamp(-1e-3, 1e-3)),
    "tensor, by its norm": hook_tensor(divide_by_norm),
    "post-accumulate, linear": hook_accumulation(change_gradient(lambda each: 0.5 * each)),
    "post-accumulate, clips": hook_accumulation(
        change_gradient(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    ),
    "optimizer in backward": step_in_backward,
    "backward of a module, clips": hook_modules(before=False),
    "before backward of a module, clips": hook_modules(before=True),
    "activation, clips; squares are kept": lambda first: Watched(0.0 if first else 1e-3),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 11])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_see_the_gradient_of_the_mean(name: str, first: int, dtype: torch.dtype) -> None:
    """Earlier, an optimizer in backward was off by 18.6, and squared gradients by 143 times."""
    job = make_job("hooked", lambda: HOOKED[name](first), VECTORS, dtype=dtype)
    ours, losses, _ = train_serially(job)
    plain, plain_losses = train_plainly(job)
    assert losses == plain_losses
    assert_bit_equal(ours, plain)


@pytest.mark.parametrize("name", ["optimizer in backward", "tensor, clips"])
def test_hooks_of_a_model_with_batch_norm_run_once(name: str) -> None:
    """Serial runs no additional pass on the trained model, because hooks would count it."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(128, 10), nn.BatchNorm1d(10), HOOKED[name](11))

    job = make_job("hooked", build, IMAGES)
    ours, losses, _ = train_serially(job)
    plain, plain_losses = train_plainly(job)
    assert losses == plain_losses
    assert_bit_equal(ours, plain)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_in_a_loop_of_ones_own(name: str) -> None:
    job = make_job("hooked", lambda: HOOKED[name](3), VECTORS)
    model = job.build_model()
    optimizer = job.optimizer(model.parameters())
    with pg.parallelize(model, job.loss, optimizer, "serial(threads=1)", seed=job.seed) as trainer:
        for epoch in range(2):
            for inputs, target in trainer.batches(VECTORS, job.batch, epoch):
                trainer.step(inputs, target)
        steps = trainer.steps
    plain, _ = train_plainly(job, steps)
    assert_bit_equal(dict(model.state_dict()), plain)


# ---- where the batch is split ------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "strategy",
    [
        "data(2, reduce=ring)",
        "data(2, state=shared_memory)",
        "serial(micro=2)",
        "server(2)",
        "server(1)",
        "data(2, state=fully_sharded)",
        "pipeline(2, micro=2)",
        "place(2)",
        "tensor(2)",
    ],
)
def test_optimizers_in_backward_are_refused_by_name(strategy: str, tmp_path: Path) -> None:
    """The optimizer of a hook is refused if it cannot step as in serial.

    It would step with the gradient of a part, or the copy of another rank would stay unchanged.
    """
    job = make_job("hooked", lambda: step_in_backward(0), VECTORS)
    with pytest.raises(pg.RankFailed, match=r"a backward changes it|it has a hook") as caught:
        pg.train(job, strategy, runs=tmp_path)
    assert caught.value.step == 0
    assert caught.value.tensor == "0.weight, 0.bias, 2.weight"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("tensor, linear", "data(2, reduce=ring)"),
        ("tensor, linear", "serial(micro=3)"),
        ("tensor, linear", "server(2)"),
        ("post-accumulate, linear", "data(2, reduce=ring)"),
        ("post-accumulate, linear", "server(2)"),
    ],
)
def test_linear_hooks_are_equal_where_the_batch_is_split(
    name: str, strategy: str, tmp_path: Path
) -> None:
    job = make_job("hooked", lambda: HOOKED[name](0), VECTORS)
    assert pg.verify(job, strategy, runs=tmp_path).same


def test_hooks_on_accumulated_gradients_are_refused_in_micro_batches(tmp_path: Path) -> None:
    """A post-accumulate hook changes the sum of all micro-batches so far again and again."""
    job = make_job("hooked", lambda: HOOKED["post-accumulate, linear"](0), VECTORS)
    with pytest.raises(pg.RankFailed, match="the gradient is off"):
        pg.train(job, "serial(micro=3)", runs=tmp_path)


@pytest.mark.sample(4)
@pytest.mark.parametrize("strategy", ["data(2, reduce=ring)", "serial(micro=3)", "server(2)"])
@pytest.mark.parametrize("name", ["tensor, clips", "post-accumulate, clips", "tensor, by its norm"])
def test_hooks_that_clip_end_the_run_by_name(name: str, strategy: str, tmp_path: Path) -> None:
    job = make_job("hooked", lambda: HOOKED[name](0), VECTORS)
    with pytest.raises(pg.RankFailed, match="the gradient is off"):
        pg.train(job, strategy, runs=tmp_path)


class HalvedBackward(torch.overrides.TorchFunctionMode):
    """Begins each `Tensor.backward` with a half."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is Tensor.backward:
            return function(arguments[0], torch.full_like(arguments[0], 0.5))
        return function(*arguments, **(keywords or {}))


def test_mode_that_replaces_backward_is_used() -> None:
    """A mode of torch functions sees `Tensor.backward` in a plain loop, and here too."""
    weights = []
    for is_halved in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(10, 4)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = nn.functional.cross_entropy
        with pg.parallelize(model, loss, optimizer, "serial(threads=1)") as trainer:
            inputs, targets = next(trainer.batches(VECTORS, batch=12, epoch=0))
            with HalvedBackward() if is_halved else contextlib.nullcontext():
                trainer.step(inputs, targets)
        weights.append(model.weight.detach() - before)
    assert torch.allclose(weights[1], weights[0] / 2, rtol=1e-4, atol=1e-6)
