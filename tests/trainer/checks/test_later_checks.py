"""Steps are checked during the whole run: a fault that begins later ends it with a message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality_table import VECTORS, draw_integers, draw_numbers, make_job, make_momentum_sgd
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.engine.exchange import Exchange
from paragrad.launch.launcher import Launcher
from paragrad.parallel.data import fully_sharded, shared_memory
from paragrad.runtime.world import World

# imported, so that their classes can be changed
EXCHANGES = (fully_sharded, shared_memory)
PLANTED: list[str] = []
pytestmark = [pytest.mark.processes]

STRATEGIES = (
    "data(2, reduce=ring)",
    "data(2, state=shared_memory)",
    "data(2, state=fully_sharded)",
    "pipeline(2, micro=2)",
    "tensor(2)",
    "server(2)",
)
LONG = TensorDataset(draw_numbers(240, 10, seed=1), draw_integers(4, 240, seed=2))


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---- models and optimizers of users whose training changes later -------------------------------
class Embedded(nn.Module):
    """A model that divides the gradient of a token by how often the token is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, scale_grad_by_freq=True)
        self.out = nn.Linear(18, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens).flatten(1))


def make_tokens() -> TensorDataset:
    """Return tokens; only the first batch of 12, in the order of seed 5, repeats no token."""
    tokens = draw_integers(9, 48, 3, seed=1)
    order = (
        pg.job("digits").replace(batch=12, seed=5).make_order(range(48)).get_indices(0, range(12))
    )
    tokens[order] = torch.arange(36).view(12, 3)
    return TensorDataset(tokens, draw_integers(4, 48, seed=2))


class Balanced(nn.Module):
    """A model whose bias of experts moves by the sign of the load of the batch.

    DeepSeek-V3 (2412.19437) does so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(10, 4)
        self.experts = nn.Linear(10, 16)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        chosen = (scores + self.bias).argmax(1)
        if self.training:
            self.calls += 1  # type: ignore[operator]
            if self.calls > 1:
                load = functional.one_hot(chosen, 4).sum(0).to(x.dtype)
                self.bias += 0.05 * (load.mean() - load).sign()  # type: ignore[operator]
        weights = scores.softmax(1).gather(1, chosen[:, None])
        return self.experts(x).view(-1, 4, 4)[torch.arange(len(x)), chosen] * weights


class Overflowing(nn.Module):
    """A model whose experts take the first samples of a batch, up to a capacity.

    The capacity shrinks from the sixth call on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(10, 2)
        self.out = nn.Linear(10, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1  # type: ignore[operator]
        capacity = len(x) if self.calls < 6 else max(1, len(x) // 4)
        chosen = functional.one_hot(self.gate(x).argmax(1), 2)
        kept = (chosen.cumsum(0) <= capacity) & (chosen > 0)
        return self.out(x) * kept.any(1, keepdim=True)


class LateClip:
    """A hook that clips from its 12th call on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: Tensor) -> Tensor | None:
        self.calls += 1
        return gradient.clamp(-1e-4, 1e-4) if self.calls > 11 else None


def build_clipped() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].weight.register_hook(LateClip())
    return model


LATE_MODELS: dict[str, pg.Job] = {
    "frequencies of tokens": make_job("frequencies", Embedded, make_tokens()),
    "bias of experts": make_job("experts", Balanced, VECTORS),
    "capacity of experts": make_job("capacity", Overflowing, LONG),
    "a hook that clips later": make_job("clips", build_clipped, LONG),
}


@pytest.mark.sample(3)
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("strategy", ["data(2, reduce=ring)", "data(2, state=shared_memory)"])
@pytest.mark.parametrize("name", LATE_MODELS)
def test_models_that_depend_on_the_batch_later_are_named(
    name: str, strategy: str, tmp_path: Path
) -> None:
    """Earlier, only the loss was compared after step 0.

    So these models trained differently from one worker, without a message.
    """
    with pytest.raises(pg.RankFailed, match=r"not one worker's training|not equal bit for bit"):
        pg.train(LATE_MODELS[name], strategy, runs=tmp_path)


# ---- faults of an exchange, from a step on -----------------------------------------------------
def plant_fault(
    change: Callable[[Exchange], None], method: str, first: int, alone: int | None
) -> None:
    """Change every exchange of this process, or of rank `alone`, after some steps.

    After its first `first` steps, the exchange also calls `change`.
    """
    depth = 0
    for kind in list_classes(Exchange):
        original = vars(kind).get(method)
        if original is None:
            continue

        def call_and_change(self: Any, *arguments: Any, original: Any = original) -> Any:
            nonlocal depth
            depth += 1
            result = original(self, *arguments)
            depth -= 1
            if not depth:  # not where a subclass calls its base
                steps = vars(self)["fault_steps"] = vars(self).get("fault_steps", 0) + 1
                if steps > first and alone in (None, get_rank()):
                    change(self)
            return result

        setattr(kind, method, call_and_change)


def list_classes(kind: type) -> list[type]:
    return [kind, *(each for inner in kind.__subclasses__() for each in list_classes(inner))]


def scale_update(exchange: Exchange) -> None:
    with torch.no_grad():
        for parameter in exchange.optimizer.param_groups[0]["params"][:1]:
            parameter.mul_(1.001)


def scale_momentum(exchange: Exchange) -> None:
    for values in exchange.optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                value.mul_(0.9)


def build_faulty(
    change: Callable[[Exchange], None], method: str, first: int, alone: int | None
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        # once in a process: the reference builds a model too
        if dist.is_initialized() and not PLANTED:
            PLANTED.append(method)
            plant_fault(change, method, first, alone)
        return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))

    return build


@pytest.mark.sample(4)
@pytest.mark.parametrize("strategy", STRATEGIES[:5])
@pytest.mark.parametrize("change", [scale_update, scale_momentum])
def test_updates_that_go_wrong_later_are_named(
    change: Callable[[Exchange], None], strategy: str, tmp_path: Path
) -> None:
    """Earlier, nothing was compared after the gradients of step 0."""
    job = make_job("faulty", build_faulty(change, "update", 25, None), LONG)
    with pytest.raises(
        pg.RankFailed, match=r"update differs|bit for bit|hold copies of it"
    ) as caught:
        pg.train(job, strategy, runs=tmp_path, check="30%")
    assert caught.value.step is not None
    assert caught.value.step >= 25
    assert "was compared last, and was equal" in caught.value.message


@pytest.mark.parametrize("alone", [0, 1])
def test_an_update_of_one_replica_is_named(alone: int, tmp_path: Path) -> None:
    job = make_job("faulty", build_faulty(scale_update, "update", 10, alone), LONG)
    with pytest.raises(pg.RankFailed, match=r"update differs|bit for bit|hold copies of it"):
        pg.train(job, "data(2, reduce=ring)", runs=tmp_path)


def test_a_miss_names_the_checkpoint_before_it(tmp_path: Path) -> None:
    job = make_job("faulty", build_faulty(scale_update, "update", 25, None), LONG)
    with pytest.raises(
        pg.RankFailed, match=r"checkpoint-00000020; continue from it with"
    ) as caught:
        pg.train(job, "data(2, reduce=ring)", runs=tmp_path, save=10)
    assert caught.value.step == 29  # the last step before a checkpoint is compared
    assert "Step 19 was compared last" in caught.value.message


# ---- right runs --------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_right_runs_compare_steps_to_the_end(strategy: str, tmp_path: Path) -> None:
    job = make_job(
        "right",
        lambda: nn.Sequential(
            nn.Linear(10, 8),
            nn.BatchNorm1d(8),
            nn.LayerNorm(8),
            nn.Dropout(0.1),
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        ),
        LONG,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        clip_norm=0.5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        scheduler_every="step",
    )
    run = pg.train(job, strategy, runs=tmp_path, check="20%")
    steps = [event["numbers"]["step"] for event in run.select_lines("event")]
    assert steps[:5] == [0, 1, 3, 7, 15]
    assert steps[-1] == 39
    assert all(
        event["message"].endswith("and so is its update") for event in run.select_lines("event")
    )
    assert run.to_json()["compared_steps"] == len(steps)


def test_no_share_no_check(tmp_path: Path) -> None:
    job = make_job("faulty", build_faulty(scale_update, "update", 0, None), LONG)
    run = pg.train(job, "data(2, reduce=ring)", runs=tmp_path, check=0)
    assert list(run.select_lines("event")) == []
    assert run.to_json()["compared_steps"] == 0


@pytest.mark.parametrize("share", [True, "200%", "much", -0.1])
def test_shares_of_the_time_are_validated(share: Any, tmp_path: Path) -> None:
    job = make_job("right", lambda: nn.Linear(10, 4), VECTORS, optimizer=make_momentum_sgd)
    with pytest.raises(pg.Refused, match="share of the run's time"):
        pg.train(job, "data(2)", runs=tmp_path, check=share)


@pytest.mark.usefixtures("warm_ranks")
def test_optimizer_copies_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    class Remembering(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.memory = object()

    job = make_job("odd", lambda: nn.Linear(10, 4), VECTORS, optimizer=Remembering)
    run = pg.train(job, "data(2, reduce=ring)", runs=tmp_path)
    messages = [event["message"] for event in run.select_lines("event")]
    assert all("not compared (Remembering keeps memory in an attribute)" in m for m in messages)


def test_verify_compares_late_steps(tmp_path: Path) -> None:
    """Earlier, verify compared the first twenty steps only, and a fault from step 25 on passed."""
    job = make_job("faulty", build_faulty(scale_update, "update", 25, None), LONG)
    certificate = pg.verify(job, "data(2, reduce=ring)", runs=tmp_path)
    assert not certificate.same
    assert certificate.first is not None
    assert certificate.first[1] >= 25


@pytest.mark.sample(3)
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_verify_of_late_steps_goes_on_from_the_state(strategy: str, tmp_path: Path) -> None:
    job = make_job(
        "right",
        lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 4)),
        LONG,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
        scheduler_every="step",
    )
    certificate = pg.verify(job, strategy, runs=tmp_path)
    assert certificate.same
    assert certificate.value < 1e-13


# ---- what rank 0 needs of other ranks, to make one worker's step ---------------------------------
class Counting(nn.Module):
    """A model that counts its calls in Python; its output depends on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 0.01 * self.calls)


class Unfreezing(nn.Sequential):
    """A model that trains its first layer from the tenth call on."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
        self[0].requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        if self.calls == 10:
            self[0].requires_grad_(True)
        return super().forward(x)  # type: ignore[no-any-return]


class Moving(nn.Module):
    """A loss that keeps in a buffer how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        return functional.cross_entropy(output, target) * (1 + 0.01 * self.calls)


@pytest.mark.parametrize(
    ("model", "loss", "strategy"),
    [
        (Counting, functional.cross_entropy, "data(2, state=fully_sharded)"),
        (Counting, functional.cross_entropy, "data(2, state=shared_memory)"),
        (Unfreezing, functional.cross_entropy, "tensor(2)"),
        (Unfreezing.__base__, Moving(), "tensor(2)"),
    ],
)
def test_state_of_other_ranks_is_no_difference(
    model: Any, loss: Any, strategy: str, tmp_path: Path
) -> None:
    """The reference step uses the state of the model and the loss on other ranks.

    Earlier, rank 0 compared with the model as it was at the beginning, so four correct runs failed.
    """
    build = build_plain if model is nn.Sequential else model
    job = make_job("keeping", build, LONG, loss=loss)
    run = pg.train(job, strategy, runs=tmp_path, check="100%")
    assert run.compared_steps == len(run.losses) > 20


@pytest.mark.parametrize("strategy", ["place(2)", "pipeline(2, micro=1)"])
def test_the_loss_of_another_rank_is_no_difference(strategy: str, tmp_path: Path) -> None:
    """The last rank has the loss, and the state that the loss keeps."""
    job = make_job("moving", build_plain, LONG, loss=Moving())
    assert pg.train(job, strategy, runs=tmp_path).compared_steps > 5


def build_plain() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))


class Dropping(nn.Module):
    """A model that leaves out layers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                x = x + torch.relu(layer(x))
        return self.last(x)


def test_a_cut_model_that_leaves_out_layers_is_refused_in_words(tmp_path: Path) -> None:
    """Earlier, there was only a ValueError: the lengths of two lists were unequal."""
    with pytest.raises((pg.Refused, pg.RankFailed), match=r"runs other operations|another path"):
        pg.train(make_job("dropping", Dropping, LONG), "pipeline(2)", runs=tmp_path)


# ---- what a check leaves as it was ------------------------------------------------------------
class Weighing(nn.Module):
    """A loss that the loop changes in place, and that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0]
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        scale = self.weights[0] * (1 + 0.01 * self.calls)
        return functional.cross_entropy(output, target) * scale


def train_weighed(world: World, strategy: str) -> tuple[list[float], float, bool]:
    """Return (losses, weight in the loss, whether the loss still has its own list)."""
    torch.manual_seed(3)
    model = build_plain().double()
    loss = Weighing()
    weights = loss.weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with pg.parallelize(model, loss, optimizer, strategy, check="100%") as trainer:
        for inputs, target in trainer.batches(LONG, 12, 0):
            losses.append(trainer.step(inputs.double(), target).loss)
            weights[0] *= 1.01
    return losses, loss.weights[0], loss.weights is weights


@pytest.mark.parametrize("strategy", ["tensor(2)", "data(2, reduce=ring)"])
def test_a_loss_that_changes_stays_its_own(pool: Launcher, strategy: str) -> None:
    """A check leaves the objects of the loss in place.

    Earlier, it gave rank 0 copies of the objects that the loss holds. It also compared with a loss
    that was one step ahead.
    """
    losses, weight, _ = train_weighed(World(), "serial")
    for ours, ours_weight, is_same in pool.run(train_weighed, strategy, size=2):
        assert ours == pytest.approx(losses, rel=1e-9)
        assert (ours_weight, is_same) == (weight, True)


class InPlace(nn.Sequential):
    """A model that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5))  # type: ignore[no-any-return]


def train_other_batches(world: World, strategy: str) -> float:
    """Train with changed inputs: `step` does not get the values that `batches` returned."""
    torch.manual_seed(3)
    model = InPlace(nn.Linear(10, 300), nn.Tanh(), nn.Linear(300, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(
        model, functional.cross_entropy, optimizer, strategy, check="100%"
    ) as trainer:
        for inputs, target in trainer.batches(LONG, 24, 0):
            loss = trainer.step(inputs * 1.5, target).loss
    return loss


def test_a_changed_batch_is_compared_as_it_was(pool: Launcher) -> None:
    serial = train_other_batches(World(), "serial")
    for loss in pool.run(train_other_batches, "data(2, reduce=ring)", size=2):
        assert loss == pytest.approx(serial, rel=1e-5)
