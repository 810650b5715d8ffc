"""State besides weights: what replicas and clients average, and what the record reports of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import (
    IMAGES,
    VECTORS,
    make_batch_norm_cnn,
    make_job,
    make_mlp,
    observe_steps,
    resolve_text,
)
from torch import Tensor, nn
from torch.nn import functional

import paragrad as pg
from paragrad.engine.optimizer.optimizer_state import load_parameter_state
from paragrad.launch import Launcher
from paragrad.parallel.averaging.averageable_state import average_state, round_to_type
from paragrad.record.record import Record
from paragrad.runtime.world import World
from paragrad.trainer.trainer import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

State = dict[str, Tensor]
plain = functools.partial(torch.optim.SGD, lr=0.1)


def make_vectors_job(**changes: Any) -> pg.Job:
    return make_job("vectors", make_mlp, VECTORS).replace(
        **{"epochs": 3, "dtype": torch.float64, "optimizer": plain, **changes}
    )


def observe_ranks(
    pool: Launcher, made: pg.Job, text: str, steps: int, look: Callable[[Trainer], Any]
) -> list[list[Any]]:
    return pool.run(
        observe_steps, made, resolve_text(text), steps, look, size=resolve_text(text).size
    )


def copy_tensors(tensors: Any) -> State:
    return {name: each.detach().clone() for name, each in dict(tensors).items()}


def copy_all_state(trainer: Trainer) -> State:
    """Return all state of this rank, also the buffers of the loss."""
    loss = trainer.training.setup.module.state_owner
    beside = loss.named_buffers("the loss") if isinstance(loss, nn.Module) else ()
    return copy_tensors([*trainer.model.state_dict().items(), *beside])


def is_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- caches are not averaged -----------------------------------------------------------------
def compute_angle_cosines(first: int, last: int) -> Tensor:
    return torch.arange(first, last, dtype=torch.float64).cos()


class Computing(nn.Module):
    """A model that scales its input by the mean of a table of angles.

    The length of the table depends on the values of the batch, so it differs between workers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.get_table(10 + int(100 * x.abs().sum()) % 30).mean().to(x))

    def get_table(self, length: int) -> Tensor:
        return compute_angle_cosines(0, length)


class Filling(Computing):
    """Keeps the table in a buffer of fixed size. A Python number says how much of it is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(40, dtype=torch.float64), persistent=False)
        self.filled = 0

    def get_table(self, length: int) -> Tensor:
        if length > self.filled:
            self.kept[self.filled : length] = compute_angle_cosines(self.filled, length)
            self.filled = length
        return self.kept[:length]


class Growing(Computing):
    """Keeps the table in a buffer that grows, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", compute_angle_cosines(0, 1), persistent=False)

    def get_table(self, length: int) -> Tensor:
        if length > len(self.kept):
            self.register_buffer("kept", compute_angle_cosines(0, length), persistent=False)
        return self.kept[:length]


@pytest.mark.parametrize("model", [Filling, Growing])
@pytest.mark.parametrize("text", ["local(2, every=1)", "local(3, every=2, outer=nesterov)"])
def test_cache_outside_of_state_dict_is_per_replica(
    pool: Launcher, model: type[Computing], text: str
) -> None:
    """Each replica keeps its own cache, which is not averaged.

    Earlier, an entry that only one of two replicas had filled became half of its value. The number
    in Python said that it was filled. A buffer that grows ended the run, because its length differs
    between ranks.
    """
    with_cache, without = (
        observe_ranks(
            pool,
            make_vectors_job(model=each),
            text,
            6,
            lambda trainer: copy_tensors(trainer.model.state_dict()),
        )
        for each in (model, Computing)
    )
    assert all(
        is_equal(one, other)
        for rank, others in zip(with_cache, without, strict=True)
        for one, other in zip(rank, others, strict=True)
    )


@pytest.mark.parametrize("model", [Filling, Growing])
def test_clients_begin_with_the_cache_of_their_round(
    tmp_path: Path, model: type[Computing]
) -> None:
    """Each client begins a round with the same cache.

    Earlier, a client was lost if its cache had another length than at the beginning of the round.
    Otherwise the mean of the caches was kept.
    """
    text = "federated(2, clients=4, fraction=1.0, rounds=3)"
    with_cache, without = (
        pg.train(make_vectors_job(model=each, batch=4), text, runs=tmp_path)
        for each in (model, Computing)
    )
    assert is_equal(
        copy_tensors(with_cache.model().state_dict()), copy_tensors(without.model().state_dict())
    )
    assert not any(line["lost"] for line in Record(with_cache.folder).select_lines("epoch"))


# ---- averaged state --------------------------------------------------------------------------
class Keeping(nn.Module):
    """A model that counts its inputs in an integer, a flag, a queue and a Python number.

    It also has a cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("large", torch.zeros(10, dtype=torch.bool))
        self.register_buffer("queue", torch.zeros(2, 10))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += int(10 * x.abs().sum())
            self.large |= (x.detach() > 1.5).any(0)
            self.queue = torch.stack([self.queue[1], x.detach().mean(0).to(self.queue)])
            self.cache += x.detach().sum()
            self.seen += float(x.sum())
        return self.out(x)  # type: ignore[no-any-return]


class Centred(nn.Module):
    """A loss with a buffer that follows the mean output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(output - self.center, target)
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.center.mul_(0.5).add_(0.5 * output.mean(0))
        return loss


def make_buffers_job(**changes: Any) -> pg.Job:
    return make_vectors_job(
        model=Keeping, loss=Centred(), train=torch.utils.data.Subset(VECTORS, range(24)), **changes
    )


@pytest.mark.parametrize(
    "text", ["local(3, every=2)", "local(2, every=2, outer=elastic)", "local(2, every=2, after=2)"]
)
def test_averaged_replicas_agree_in_all_averaged_state(pool: Launcher, text: str) -> None:
    """Averages include integers, flags and the buffers of a loss.

    Earlier, each replica kept its own. A test then added up the results of n different models.
    """
    ranks = observe_ranks(pool, make_buffers_job(), text, 4, copy_all_state)
    size = resolve_text(text).size
    names = ("count", "large", "queue", "the loss.center")
    for name in names:
        assert all(torch.equal(rank[3][name], ranks[0][3][name]) for rank in ranks), name
        assert any(
            not torch.equal(rank[step][name], ranks[0][step][name])
            for rank in ranks
            for step in (0, 2)
        ), name
    if "after" not in text:
        alone = observe_ranks(
            pool, make_buffers_job(), f"local({size}, every=end)", 2, copy_all_state
        )
        for name in ("count", "large"):  # replicas have equal numbers of samples
            mean = sum(rank[1][name].double() for rank in alone) / size
            assert torch.equal(ranks[0][1][name], round_to_type(mean, ranks[0][1][name].dtype))


def copy_evaluation_state(trainer: Trainer) -> State:
    with trainer.use_evaluation_weights():
        return copy_all_state(trainer)


def test_evaluation_sees_one_model_and_one_loss(pool: Launcher) -> None:
    """In a test between averages, all ranks use one model; then each has its own state again."""
    tested = observe_ranks(pool, make_buffers_job(), "local(3, every=3)", 2, copy_evaluation_state)
    assert all(is_equal(rank[1], tested[0][1]) for rank in tested)
    undisturbed = observe_ranks(pool, make_buffers_job(), "local(3, every=3)", 3, copy_all_state)
    both = pool.run(evaluate_each_step, make_buffers_job(), size=3)
    assert all(is_equal(one, other[2]) for one, other in zip(both, undisturbed, strict=True))


def evaluate_each_step(world: World, made: pg.Job) -> State:
    found: list[State] = []

    def look(trainer: Trainer) -> None:
        copy_evaluation_state(trainer)
        found.append(copy_all_state(trainer))

    observe_steps(world, made, resolve_text("local(3, every=3)"), 3, look)
    return found[-1]


def train_in_user_loop(world: World) -> State:
    model = Keeping()
    loss = Centred()
    with pg.parallelize(model, loss, plain(model.parameters()), "local(2, every=5)") as trainer:
        for inputs, target in trainer.batches(VECTORS, 12, 0):
            trainer.step(inputs, target)
    return copy_tensors([*model.state_dict().items(), *loss.named_buffers("the loss")])


def test_all_ranks_have_one_model_after_a_user_loop(pool: Launcher) -> None:
    one, other = pool.run(train_in_user_loop, size=2)
    assert is_equal(one, other)
    assert one["count"] > 0


def test_integers_become_the_nearest_mean() -> None:
    assert round_to_type(torch.tensor([2.4, 2.6, -1.7]), torch.int64).tolist() == [2, 3, -2]
    assert round_to_type(torch.tensor([0.4, 0.5]), torch.bool).tolist() == [False, True]
    assert round_to_type(torch.tensor([0.4]), torch.float64).dtype == torch.float64


def make_norm_model_with_buffers() -> nn.Module:
    return nn.Sequential(Keeping(), nn.BatchNorm1d(4), nn.Linear(4, 4))


@pytest.mark.parametrize(
    "text", ["local(2, every=2)", "federated(2, clients=4, fraction=1.0, rounds=2)"]
)
def test_averaged_state_is_reported_once(tmp_path: Path, text: str) -> None:
    """A queue and the vectors of a spectral norm are averaged, although their means may be useless.

    So the record tells the user once.
    """
    run = pg.train(
        make_vectors_job(model=make_norm_model_with_buffers, loss=Centred(), test=VECTORS),
        text,
        runs=tmp_path,
    )
    for rank in range(2):
        said = [
            line
            for line in Record(run.folder).select_lines("choice", rank)
            if line["what"] in ("averaged too", "kept in Python")
        ]
        assert [line["picked"] for line in said if line["what"] == "averaged too"] == [
            "0.count, 0.large, 0.queue, ..."
        ]
        assert all(
            "persistent=False" in line["because"] for line in said if line["what"] == "averaged too"
        )
        (kept,) = [line for line in said if line["what"] == "kept in Python"]
        assert kept["because"].endswith("0.seen")
        assert kept["picked"].startswith(
            "each worker's own" if "local" in text else "as at the beginning"
        )


@pytest.mark.parametrize(
    "text", ["local(2, every=2)", "local(2, every=2) * tensor(2)", "local(2, every=2) * place(2)"]
)
def test_batch_norm_statistics_are_not_reported(tmp_path: Path, text: str) -> None:
    """If the model is cut, attributes also hold buffers. They are not reported either."""
    run = pg.train(make_job("normed", make_batch_norm_cnn, IMAGES, epochs=2), text, runs=tmp_path)
    for rank in range(resolve_text(text).size):
        said = [
            line
            for line in Record(run.folder).select_lines("choice", rank)
            if line["what"] in ("averaged too", "kept in Python")
        ]
        assert [line["because"] for line in said] == []


# ---- optimizers' states ----------------------------------------------------------------------
def test_quantized_state_and_its_scales_stay_per_replica() -> None:
    """Earlier, 8-bit Adam had the codes of one replica together with the mean scale of all."""
    told = [
        (
            1.0,
            {
                "a": {
                    "codes": torch.tensor([7, 9], dtype=torch.uint8),
                    "scale": torch.tensor([1.0]),
                    "step": 4,
                },
                "b": {"m": torch.tensor([1.0])},
            },
        ),
        (
            3.0,
            {
                "a": {
                    "codes": torch.tensor([1, 2], dtype=torch.uint8),
                    "scale": torch.tensor([3.0]),
                    "step": 4,
                },
                "b": {"m": torch.tensor([5.0])},
            },
        ),
    ]
    for order in (told, told[::-1]):
        found = average_state(order)
        assert found["a"] == order[0][1]["a"]
        assert found["b"]["m"].tolist() == [4.0]


class Viewing(torch.optim.SGD):
    """An SGD that keeps the states of all parameters in one flat tensor, as views of it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        if not self.state:
            flat = torch.zeros(sum(each.numel() for each in parameters), dtype=torch.float64)
            for each, piece in zip(
                parameters, flat.split([each.numel() for each in parameters]), strict=True
            ):
                self.state[each]["m"] = piece.view_as(each)
        for each in parameters:
            self.state[each]["m"].mul_(0.9).add_(each.grad)
            each.data.sub_(0.1 * self.state[each]["m"])


def measure_sent_states(world: World) -> tuple[int, int]:
    """Return the bytes of the storages of all sent state tensors, and those of the tensors."""
    sent: list[Tensor] = []

    @contextmanager
    def record_gathered_tensors() -> Iterator[None]:
        collected = World.gather_objects
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                World,
                "gather_objects",
                lambda own, value: (
                    sent.extend(each for values in value[1].values() for each in values.values()),
                    collected(own, value),
                )[1],
            )
            yield

    def look(trainer: Trainer) -> None:
        assert trainer.training.setup.exchange is not None
        with record_gathered_tensors():
            trainer.training.setup.exchange.gather_optimizer_state()

    observe_steps(
        world,
        make_vectors_job(optimizer=functools.partial(Viewing, lr=0.1)),
        resolve_text("local(2, every=2)"),
        1,
        look,
    )
    assert all(each.device.type == "cpu" for each in sent)
    return sum(each.untyped_storage().nbytes() for each in sent), sum(each.nbytes for each in sent)


def test_state_is_sent_through_the_host_without_its_storage(
    pool: Launcher,
) -> None:
    """Earlier, tensors were sent as they were and came back on the GPUs of their senders.

    The sum of two of them then failed.
    """
    for stored, told in pool.run(measure_sent_states, size=2):
        assert stored == told


def test_received_state_keeps_its_device() -> None:
    """The step of a fused Adam is a tensor without dimensions on the GPU.

    Earlier, a received step stayed on the host.
    """
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    here: dict[str, Any] = {"step": torch.tensor(3.0), "m": torch.ones(2), "seen": 4}
    for capturable, before, where in (
        (False, {}, "cpu"),
        (True, {}, "meta"),
        (False, {"step": torch.zeros((), device="meta")}, "meta"),
    ):
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.param_groups[0]["capturable"] = capturable
        optimizer.state[parameter].update(before)
        load_parameter_state(optimizer, parameter, here)
        found = optimizer.state[parameter]
        assert (found["step"].device.type, found["m"].device.type, found["seen"]) == (
            where,
            "meta",
            4,
        )


class Counting(torch.optim.SGD):
    """An SGD that counts its steps under its own name in the state, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["k"] = self.state.get("k", torch.zeros(())) + 1  # type: ignore[index]
        return super().step(closure)


class Adapting(torch.optim.SGD):
    """An SGD with a number in its group that follows the gradients, as Prodigy has."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        group = self.param_groups[0]
        group["d"] = group.get("d", 1.0) + float(group["params"][0].grad.abs().sum())
        return super().step(closure)


def train_counting_optimizer(world: World, text: str) -> tuple[float, list[float]]:
    model = make_mlp()
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    with pg.parallelize(model, functional.cross_entropy, optimizer, text) as trainer:
        for inputs, target in trainer.batches(VECTORS, 12, 0):
            trainer.step(inputs, target)
    return float(optimizer.state["k"]), [
        float(optimizer.state[each]["momentum_buffer"].sum()) for each in model.parameters()
    ]


@pytest.mark.parametrize("text", ["local(2, every=2)", "local(2, every=2) * place(2)", "data(2)"])
def test_optimizer_attributes_outside_of_state_are_kept(text: str) -> None:
    """Earlier, the count was taken for the state of a parameter.

    This raised a KeyError after the last step of a loop. If the model was cut, the count was lost.
    """
    with Launcher(4) as four:
        found = four.run(train_counting_optimizer, text, size=resolve_text(text).size)
    assert all(each == found[0] for each in found)
    assert found[0][0] == 3


@pytest.mark.parametrize("text", ["serial", "local(2, every=2)"])
def test_state_that_cannot_be_saved_is_named(tmp_path: Path, text: str) -> None:
    """Earlier, the message was only: KeyError: 'k'."""
    made = make_vectors_job(optimizer=functools.partial(Counting, lr=0.1))
    with pytest.raises(
        pg.RankFailed,
        match=r"Counting keeps k beside the states.*in a parameter's state or in a group",
    ):
        pg.train(made, text, runs=tmp_path, save=2)


def test_different_optimizer_settings_are_reported(tmp_path: Path) -> None:
    """A checkpoint has one copy of the optimizer's settings, that of the first worker.

    If workers differ, the first one's settings are as good as another's, and the record reports it.
    """
    run = pg.train(
        make_vectors_job(optimizer=functools.partial(Adapting, lr=0.1)),
        "local(2, every=2)",
        runs=tmp_path,
        save=3,
    )
    (said,) = [
        line
        for line in run.select_lines("choice")
        if line["what"] == "optimizer" and "settings" in line["picked"]
    ]
    assert "one of each: d (" in said["because"]
    run = pg.train(make_vectors_job(), "local(2, every=2)", runs=tmp_path, save=3)
    assert not [
        line
        for line in run.select_lines("choice")
        if line["what"] == "optimizer" and "settings" in line["picked"]
    ]


# ---- bytes of saving -------------------------------------------------------------------------
def test_bytes_of_saving_are_recorded_apart(tmp_path: Path) -> None:
    """The record has the bytes of each checkpoint in a line of its own.

    Earlier, they counted as bytes of a test. For a checkpoint in the middle of an epoch, no line
    had them. Optimizer states, which are as long as the weights, were not counted.
    """
    made = make_vectors_job(
        test=VECTORS, optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    run = pg.train(made, "local(2, every=4, reduce=ring)", runs=tmp_path, save=2)
    weights = 8 * sum(each.numel() for each in make_mlp().parameters())
    for rank in range(2):
        lines = Record(run.folder).select_lines("checkpoint", rank)
        assert [line["step"] for line in lines] == [2, 4, 6, 8, 9]
        sent = [line["sent"]["checkpoints"]["bytes"] for line in lines]
        # the replicas have just averaged, so they send only a few numbers and states
        numbers = sent[3] - rank * weights
        assert 0 < numbers < 100
        assert sent[0] == sent[2] == sent[4] == numbers + weights + rank * weights
        assert [set(line["sent"]) for line in Record(run.folder).select_lines("epoch", rank)] == [
            {"tests"}
        ] * 3


# ---- learning rates --------------------------------------------------------------------------
def train_with_rate_by_loss(world: World, by_test: bool) -> float:
    """Train with a learning rate that follows the loss of each step, or of each test."""
    model = make_mlp()
    optimizer = plain(model.parameters())
    with pg.parallelize(model, functional.cross_entropy, optimizer, "local(2, every=2)") as trainer:
        for inputs, target in trainer.batches(VECTORS, 12, 0):
            loss = trainer.step(inputs, target).loss
            optimizer.param_groups[0]["lr"] = 0.1 * (trainer.evaluate(VECTORS) if by_test else loss)
    return float(optimizer.param_groups[0]["lr"])


def test_learning_rates_by_local_loss_are_reported() -> None:
    """A rate by the loss of a step is right under data(n), but not under local.

    Earlier, replicas went on with different rates for ever, and nothing was reported.
    """
    with Launcher(2) as two:
        one, other = two.run(train_with_rate_by_loss, True, size=2)
        assert one == other != 0.1
        with pytest.raises(
            pg.RankFailed,
            match=r"the optimizer's group 0 is 0\.\d+ on rank 0 and 0\.\d+ on rank 1.*evaluate",
        ):
            two.run(train_with_rate_by_loss, False, size=2)
