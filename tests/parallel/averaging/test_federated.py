"""federated: clients train on their own samples in rounds, and their weights are averaged."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import (
    IMAGES,
    IN_ROUNDS,
    JOBS,
    VECTORS,
    Clamped,
    make_adam,
    make_batch_norm_cnn,
    make_job,
    make_mlp,
    make_step_lr,
    resolve_text,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import paragrad as pg
from paragrad.datasets.clients import ClientRounds, ClientTurn
from paragrad.launch import Launcher
from paragrad.loops.rounds import RoundTraining
from paragrad.loops.synchronous import train_rank
from paragrad.record.record import Record, read_lines
from paragrad.report import summaries
from paragrad.runtime.world import World
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import ValidatedRun, validate_run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("warm_ranks"),
    pytest.mark.filterwarnings("ignore:.* clients takes part in a round"),
]

State = dict[str, Tensor]
plain = functools.partial(torch.optim.SGD, lr=0.1)
heavy = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_vectors_job(**changes: Any) -> pg.Job:
    return make_job("vectors", make_mlp, VECTORS).replace(
        **{"epochs": 3, "dtype": torch.float64, "optimizer": heavy, "batch": 4, **changes}
    )


def train_and_read(made: pg.Job, text: str, folder: Path, **more: Any) -> tuple[State, Record]:
    run = pg.train(made, text, runs=folder, **more)
    return dict(run.model().state_dict()), Record(run.folder)


def is_close(one: State, other: State, within: float = 1e-10) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name].double(), other[name].double(), rtol=0, atol=within)
        for name in one
    )


def plan_rounds(made: pg.Job, text: str) -> ClientRounds:
    found = validate_run(made, text).rounds
    assert found is not None
    return found


def drop_clients(rounds: ClientRounds, *lost: int) -> ClientRounds:
    """Return the same rounds without these clients."""

    class Left(ClientRounds):
        def plan_turns(self, number: int) -> list[ClientTurn]:
            return [part for part in super().plan_turns(number) if part.client not in lost]

    return Left(
        rounds.clients,
        rounds.order,
        1,
        rounds.clients_per_round,
        rounds.passes,
        rounds.epochs,
        rounds.requested_rounds,
    )


# ---- it is federated averaging ---------------------------------------------------------------
def train_plainly(made: pg.Job, rounds: ClientRounds) -> State:
    """Train by federated averaging as McMahan et al. write it, in a loop of plain torch.

    The rounds say which clients train, on which samples, and in which order.
    """
    model = made.build_model()
    for number in range(rounds.count):
        begun = {name: each.clone() for name, each in model.state_dict().items()}
        ended = []
        counts = []
        for part in rounds.plan_turns(number):
            model.load_state_dict(begun)
            optimizer = made.optimizer(model.parameters())
            for piece in rounds.iterate_client_batches(part, number):
                inputs, target = (each[piece.indices] for each in made.train.tensors)
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs.double()), target).backward()
                if made.clip_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), made.clip_norm)
                optimizer.step()
            ended.append({name: each.clone() for name, each in model.state_dict().items()})
            counts.append(len(rounds.clients[part.client]))
        model.load_state_dict(
            {
                name: sum(count * each[name] for count, each in zip(counts, ended, strict=True))
                / sum(counts)
                for name in begun
            }
        )
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("federated(2, clients=4, fraction=0.5, local_epochs=2, rounds=5)", {}),
        (
            "federated(1, clients=3, fraction=1.0, rounds=3, reduce=native)",
            {"optimizer": make_adam, "clip_norm": 0.05},
        ),
        ("federated(3, clients=5, fraction=0.6, rounds=4, split=dirichlet(0.3), reduce=ring)", {}),
        ("federated(2, clients=9, fraction=0.1, rounds=4, reduce=tree)", {"batch": 3}),
    ],
)
def test_federated_averaging_equals_its_formula(
    tmp_path: Path, text: str, changes: dict[str, Any]
) -> None:
    """With 29 samples, clients have unequal numbers of samples.

    With a fraction of 0.1 of 9 clients, each round has one client, so a worker has nothing to do.
    """
    made = make_vectors_job(**changes)
    found, _ = train_and_read(made, text, tmp_path)
    rounds = plan_rounds(made, text)
    assert len({len(samples) for samples in rounds.clients}) == 2
    assert is_close(found, train_plainly(made, rounds), 1e-12)


def test_one_client_with_all_samples_is_serial(tmp_path: Path) -> None:
    """This holds for plain SGD, which has no state that a round resets, and also with dropout."""
    made = JOBS["dropout"].replace(dtype=torch.float64, optimizer=plain, epochs=3)
    serial, _ = train_and_read(made, "serial", tmp_path / "serial")
    found, record = train_and_read(made, "federated(1, clients=1)", tmp_path / "federated")
    assert is_close(found, serial, 1e-12)
    assert len(record.select_lines("epoch")) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_nonlinear_hook_sees_the_gradient_of_a_client_batch(tmp_path: Path, workers: int) -> None:
    """Earlier, with two workers, a hook that clips saw the sum over the batch.

    So the training was different from that with one worker.
    """
    made = make_vectors_job(model=Clamped)
    text = f"federated({workers}, clients=3, fraction=1.0, rounds=2)"
    found, _ = train_and_read(made, text, tmp_path)
    assert is_close(found, train_plainly(made, plan_rounds(made, text)), 1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        "mlp, adam, clipped, scheduled",
        "cnn with batch norm, activated, dropout",
        "lstm, tied, loss as a pair",
        "dicts, padded, transformed",
        "frozen and unused",
        "dropout, recomputed",
    ],
)
def test_number_of_workers_does_not_matter(tmp_path: Path, name: str) -> None:
    made = JOBS[name].replace(dtype=torch.float64, batch=4, epochs=2)
    options = "clients=5, fraction=0.6, local_epochs=2, rounds=3"
    one, *others = (
        train_and_read(made, f"federated({workers}, {options})", tmp_path / str(workers))[0]
        for workers in (1, 2, 3)
    )
    assert all(is_close(one, other) for other in others)
    begun = made.build_model().state_dict()
    assert not is_close(one, dict(begun), 1e-3)


# ---- what is sent ----------------------------------------------------------------------------
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "start_transfers",
    "all_gather_into",
    "reduce_scatter_into",
    "copy_from",
    "broadcast_object",
    "gather_objects",
)


def record_collectives(
    world: World, checked: ValidatedRun, folder: Path, origin: float
) -> list[tuple[str, int]]:
    """Return (name, bytes of its tensors) of each collective that this rank calls in its rounds."""
    heard: list[tuple[str, int]] = []

    class Heard(RoundTraining):
        def train_segment(self, segment: int) -> bool:
            with patch_collectives():
                return super().train_segment(segment)

        def end_segment(self, segment: int, start_time: float) -> bool:
            with patch_collectives():
                return super().end_segment(segment, start_time)

    @contextlib.contextmanager
    def patch_collectives() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in COLLECTIVES:
                patch.setattr(World, name, record_calls(name, getattr(World, name)))
            yield

    def record_calls(name: str, function: Any) -> Any:
        def call(own: World, *given: Any) -> Any:
            heard.append((name, sum(each.nbytes for each in given if isinstance(each, Tensor))))
            return function(own, *given)

        return call

    train_rank(world, checked, folder, origin, loop_class=Heard)
    return heard


@pytest.mark.parametrize("reduce", ["star", "ring", "native"])
def test_only_weights_and_counts_are_sent(pool: Launcher, tmp_path: Path, reduce: str) -> None:
    """In a round, ranks send only weights and counts; a test adds up two numbers.

    The bytes in the record equal the closed form of each all-reduce. The collectives that each rank
    calls say the same.
    """
    made = make_vectors_job(test=VECTORS)
    checked = validate_run(
        made, f"federated(3, clients=6, fraction=0.5, rounds=2, reduce={reduce})"
    )
    heard = checked.run_on_ranks(pool, record_collectives, checked, tmp_path, 0.0)
    counts = 8 * (1 + 3)
    weights = 8 * sum(each.numel() for each in make_mlp().parameters())
    for rank in range(3):
        lines = [line for path in [tmp_path / f"rank-{rank}.jsonl"] for line in read_lines(path)]
        assert all(line["sent"] == {} for line in lines if line["kind"] == "step")
        for sent in (line["sent"] for line in lines if line["kind"] == "epoch"):
            assert list(sent) == ["counts", "weights", "tests"]
            for kind, whole in (("counts", counts), ("weights", weights)):
                found = sent[kind]["bytes"]
                if reduce == "star":
                    assert found == (2 * whole if rank == 0 else whole)
                # parts of a ring have whole elements: of four elements, three parts have 2, 1 and 1
                else:
                    assert abs(found - 4 / 3 * whole) <= 2 * 8
                assert sent[kind]["computed"] == (reduce == "native")
            assert sent["tests"] == {"bytes": round(4 / 3 * 16), "computed": True}
        one = [("all_reduce", counts), ("all_reduce", weights)] if reduce == "native" else []
        assert heard[rank] == [*one, ("all_reduce", 16)] * 2


# ---- lost clients ----------------------------------------------------------------------------
class Poisoned(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The vectors, some of which raise an error or are infinite.

    In the main process, which checks the job, all of them are valid.
    """

    def __init__(self, raising: list[int], infinite: list[int]) -> None:
        self.raising = raising
        self.infinite = infinite
        self.door = os.getpid()

    def __len__(self) -> int:
        return len(VECTORS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        vector, target = VECTORS[index]
        if index in self.raising and os.getpid() != self.door:
            raise OSError("this file is gone")
        return (
            vector * torch.inf if index in self.infinite and os.getpid() != self.door else vector,
            target,
        )


@pytest.mark.parametrize("workers", [1, 3])
def test_mean_is_over_the_clients_that_returned(tmp_path: Path, workers: int) -> None:
    text = f"federated({workers}, clients=5, fraction=1.0, rounds=3)"
    rounds = plan_rounds(make_vectors_job(), text)
    poisoned = Poisoned([int(rounds.clients[1][2])], [int(rounds.clients[4][4])])
    found, record = train_and_read(make_vectors_job(train=poisoned), text, tmp_path)
    others = [0, 2, 3]
    clients = [each for client, each in enumerate(rounds.clients) if client in others]
    assert sum(map(len, clients)) < 29
    assert is_close(found, train_plainly(make_vectors_job(), drop_clients(rounds, 1, 4)), 1e-12)
    assert [line["lost"] for line in record.select_lines("epoch")] == [[1, 4]] * 3
    events = [
        line
        for rank in range(workers)
        for line in record.select_lines("event", rank)
        if line["name"] == "lost"
    ]
    assert sorted((line["numbers"]["round"], line["numbers"]["client"]) for line in events) == [
        (number, client) for number in range(3) for client in (1, 4)
    ]
    said = {line["numbers"]["client"]: line["message"] for line in events}
    assert "this file is gone" in said[1]
    assert "not finite" in said[4]
    assert record.sample_count.missed > 0
    assert record.sample_count.twice == 0


def test_lost_clients_are_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier, workers wrote lost clients into their records, but the run did not report them."""
    text = "federated(3, clients=5, fraction=1.0, rounds=2)"
    rounds = plan_rounds(make_vectors_job(), text)
    poisoned = Poisoned([int(rounds.clients[1][2])], [int(rounds.clients[4][4])])
    run = pg.train(make_vectors_job(train=poisoned), text, runs=tmp_path)
    assert [told.partition(":")[0] for told in run.event_messages] == [
        f"client {client} in round {number}" for number in (0, 1) for client in (1, 4)
    ]
    assert run.to_json()["events"] == run.event_messages
    summaries.print_run(run, False)
    assert (
        f"what happened: {run.event_messages[0]}; and 3 more, in the record"
        in capsys.readouterr().out
    )


def test_round_without_clients_is_in_the_summary_once(tmp_path: Path) -> None:
    text = "federated(2, clients=4, fraction=0.1, rounds=6)"  # one client a round
    poor = plan_rounds(make_vectors_job(), text).choose_clients(1)[0]
    samples = list(map(int, plan_rounds(make_vectors_job(), text).clients[poor]))
    run = pg.train(make_vectors_job(train=Poisoned(samples, [])), text, runs=tmp_path)
    assert [told for told in run.event_messages if "round 1: no client came back" in told] == [
        "round 1: no client came back; the weights do not change"
    ]


class Stuck(Poisoned):
    """The vectors, some of which are never loaded, except in the main process."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.raising and os.getpid() != self.door:
            threading.Event().wait()
        return VECTORS[index]


@pytest.mark.sample(2)
@pytest.mark.parametrize("loaders", [0, 1])
def test_missing_sample_loses_the_client_and_not_the_run(tmp_path: Path, loaders: int) -> None:
    """The worker stops waiting for the sample after 2 s, and loses only this client.

    Earlier, it waited for the sample for 4 s, as long as the others waited for the worker. It was
    chance which of them gave up first.
    """
    text = "federated(2, clients=5, fraction=1.0, rounds=1)"
    rounds = plan_rounds(make_vectors_job(), text)
    stuck = Stuck([int(rounds.clients[3][1])], [])
    found, record = train_and_read(
        make_vectors_job(train=stuck), text, tmp_path, timeout=4.0, loaders=loaders
    )
    assert [line["lost"] for line in record.select_lines("epoch")] == [[3]]
    (said,) = [
        line["message"]
        for rank in range(2)
        for line in record.select_lines("event", rank)
        if line["name"] == "lost"
    ]
    assert f"sample {stuck.raising[0]} of the dataset was not loaded within 2 s" in said
    assert is_close(found, train_plainly(make_vectors_job(), drop_clients(rounds, 3)), 1e-12)


class Disconnected(nn.Module):
    """A model whose forward raises a connection error if the batch contains a marked vector.

    In the main process, the forward is always valid.
    """

    def __init__(self, door: int, marked: list[int]) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)
        self.marked = marked
        self.door = door

    def forward(self, x: Tensor) -> Tensor:
        if (
            os.getpid() != self.door
            and torch.isin(x[:, 0], VECTORS.tensors[0][self.marked, 0].to(x)).any()
        ):
            raise RuntimeError("connection reset by peer")
        return self.out(x)  # type: ignore[no-any-return]


def test_broken_connection_of_a_client_loses_only_that_client(tmp_path: Path) -> None:
    """Earlier, the worker took this error for one of its own connections.

    It closed its connections to the other workers, which then failed too.
    """
    text = "federated(2, clients=5, fraction=1.0, rounds=2)"
    rounds = plan_rounds(make_vectors_job(), text)
    made = make_vectors_job(
        model=functools.partial(Disconnected, os.getpid(), [int(rounds.clients[4][0])])
    )
    found, record = train_and_read(made, text, tmp_path, backend="gloo")
    assert [line["lost"] for line in record.select_lines("epoch")] == [[4], [4]]
    assert is_close(found, train_plainly(made, drop_clients(rounds, 4)), 1e-12)


class Resizing(nn.Module):
    """A model that resizes a buffer if the batch contains a marked vector."""

    def __init__(self, size: int, marked: list[int]) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)
        self.size = size
        self.marked = marked
        self.register_buffer("places", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        if torch.isin(x[:, 0], VECTORS.tensors[0][self.marked, 0].to(x)).any():
            self.places = self.places.new_ones(self.size)
        return self.out(x) + self.places.mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [7, 1])
def test_lost_client_adds_nothing_to_the_mean(tmp_path: Path, size: int) -> None:
    """Earlier, the weights of such a client were added to the sum before its buffer was.

    A buffer of seven elements could not be added to one of five. So the client was lost, but its
    weights were in the mean. A buffer of one element was added to all five.
    """
    text = "federated(2, clients=5, fraction=1.0, rounds=2)"
    rounds = plan_rounds(make_vectors_job(), text)
    made = make_vectors_job(model=functools.partial(Resizing, size, [int(rounds.clients[3][0])]))
    found, record = train_and_read(made, text, tmp_path)
    assert [line["lost"] for line in record.select_lines("epoch")] == [[3], [3]]
    assert is_close(found, train_plainly(made, drop_clients(rounds, 3)), 1e-12)
    said = [
        line["message"]
        for rank in range(2)
        for line in record.select_lines("event", rank)
        if line["name"] == "lost"
    ]
    assert all(
        f"tensor places: a forward changed its shape from (5,) to ({size},)" in each
        for each in said
    )


def test_round_without_clients_keeps_weights_and_may_end_run(
    tmp_path: Path,
) -> None:
    text = "federated(2, clients=4, fraction=0.1, rounds=6)"  # one client a round
    rounds = plan_rounds(make_vectors_job(), text)
    turns = [rounds.choose_clients(number)[0] for number in range(6)]
    poor = turns[1]
    assert any(each != poor for each in turns)
    found, record = train_and_read(
        make_vectors_job(train=Poisoned(list(map(int, rounds.clients[poor])), [])), text, tmp_path
    )

    class Left(ClientRounds):
        def plan_turns(self, number: int) -> list[ClientTurn]:
            return [part for part in super().plan_turns(number) if part.client != poor]

        @property
        def count(self) -> int:
            return 6

    begun = train_plainly_with_empty_rounds(
        make_vectors_job(), Left(rounds.clients, rounds.order, 1, 1, 1, 3, 6)
    )
    assert is_close(found, begun, 1e-12)
    assert [
        line["numbers"]["round"]
        for line in record.select_lines("event")
        if line["name"] == "nobody"
    ] == [number for number, turn in enumerate(turns) if turn == poor]
    with pytest.raises(
        pg.RankFailed, match=r"no client of any round came back.*loss is not finite"
    ):
        train_and_read(make_vectors_job(train=Poisoned([], list(range(29)))), text, tmp_path)
    with pytest.raises(pg.RankFailed, match="this file is gone"):
        train_and_read(make_vectors_job(train=Poisoned(list(range(29)), [])), text, tmp_path)


def train_plainly_with_empty_rounds(made: pg.Job, rounds: ClientRounds) -> State:
    """Return the same average, where a round without clients keeps the weights."""

    class Some(ClientRounds):
        def plan_turns(self, number: int) -> list[ClientTurn]:
            return rounds.plan_turns(there[number])

        @property
        def count(self) -> int:
            return len(there)

        def iterate_client_batches(self, turn: ClientTurn, number: int) -> Any:
            return rounds.iterate_client_batches(turn, there[number])

    there = [number for number in range(rounds.count) if rounds.plan_turns(number)]
    return train_plainly(
        made,
        Some(
            rounds.clients,
            rounds.order,
            1,
            rounds.clients_per_round,
            rounds.passes,
            rounds.epochs,
            rounds.requested_rounds,
        ),
    )


# ---- other state of a model ------------------------------------------------------------------
class Keeping(nn.Module):
    """A model that counts its forwards in a buffer and in Python, and sets flags.

    A frozen copy follows the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)
        self.follows = nn.Linear(10, 4).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("large", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("constants", torch.arange(1.0, 50.0).reciprocal())
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(x) + self.follows(x)
        if self.training:
            self.forwards += 1
            self.count += 1
            self.large |= out.detach().mean(0) > 0.3
            with torch.no_grad():
                self.follows.weight.lerp_(self.out.weight, 0.1)
        return out * (1 + 0.1 * self.forwards)  # type: ignore[no-any-return]


def test_integers_become_the_nearest_mean_and_python_resets(tmp_path: Path) -> None:
    """Earlier, the Python counter of a client went on in the next client on its worker.

    So the result depended on the number of workers.
    """
    made = make_vectors_job(
        model=Keeping, train=torch.utils.data.Subset(VECTORS, range(28)), batch=3
    )
    text = "clients=3, fraction=1.0, rounds=2"
    one, *others = (
        train_and_read(made, f"federated({workers}, {text})", tmp_path / str(workers))[0]
        for workers in (1, 2, 3)
    )
    assert all(is_close(one, other) for other in others)
    # clients of 10, 9 and 9 samples have 4, 3 and 3 batches of 3 in each of two rounds; their mean,
    # weighted by samples, is 3.36
    assert int(one["count"]) == 3 + 3
    assert torch.equal(one["constants"], Keeping().constants.double())


class Centred(nn.Module):
    """A loss whose centre follows the outputs, as in DINO. It also counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.seen = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(output - self.center, target)
        with torch.no_grad():
            self.center.mul_(0.5).add_(0.5 * output.mean(0))
        self.seen += 1
        return loss


def train_centred_plainly(made: pg.Job, rounds: ClientRounds) -> State:
    """Train with this loss by federated averaging, in plain torch."""
    model = made.build_model()
    center = torch.zeros(4, dtype=torch.float64)
    for number in range(rounds.count):
        begun = {name: each.clone() for name, each in model.state_dict().items()}
        ended = []
        counts = []
        for part in rounds.plan_turns(number):
            model.load_state_dict(begun)
            loss = Centred().double()
            optimizer = made.optimizer(model.parameters())
            loss.center.copy_(center)
            for piece in rounds.iterate_client_batches(part, number):
                inputs, target = (each[piece.indices] for each in made.train.tensors)
                optimizer.zero_grad()
                loss(model(inputs.double()), target).backward()
                optimizer.step()
            ended.append(
                {
                    **{name: each.clone() for name, each in model.state_dict().items()},
                    "the center": loss.center,
                }
            )
            counts.append(len(rounds.clients[part.client]))
        means = {
            name: sum(count * each[name] for count, each in zip(counts, ended, strict=True))
            / sum(counts)
            for name in ended[0]
        }
        center = means.pop("the center")
        model.load_state_dict(means)
    return dict(model.state_dict())


@pytest.mark.parametrize("workers", [1, 2])
def test_loss_buffers_are_averaged(tmp_path: Path, workers: int) -> None:
    """Earlier, the loss had its initial buffers for every client of every round, without a report.

    Its Python state is still the initial one for each client, and the record reports it.
    """
    made = make_vectors_job(loss=Centred())
    text = f"federated({workers}, clients=3, fraction=1.0, rounds=3)"
    found, record = train_and_read(made, text, tmp_path)
    assert is_close(found, train_centred_plainly(made, plan_rounds(made, text)), 1e-12)
    (said,) = [line for line in record.select_lines("choice") if line["what"] == "kept in Python"]
    assert said["because"] == "forwards change it, and it has no mean: loss.seen"


class Anchored(torch.optim.SGD):
    """An SGD that keeps the weights with which it begins, and pulls towards them.

    So a client stays near the weights of its round (FedProx, Li et al. 2020).
    """

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.anchors = [
            (each, each.detach().clone()) for group in self.param_groups for each in group["params"]
        ]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each, anchor in self.anchors:
            each.grad.add_(each.detach() - anchor)
        super().step()


def test_optimizer_may_keep_the_initial_weights_of_a_client(tmp_path: Path) -> None:
    """Earlier, the optimizer was made before the weights were restored.

    So it kept the weights of the client before.
    """
    made = make_vectors_job(optimizer=Anchored)
    text = "clients=5, fraction=0.6, rounds=3, local_epochs=2"
    one, *others = (
        train_and_read(made, f"federated({workers}, {text})", tmp_path / str(workers))[0]
        for workers in (1, 3)
    )
    assert all(is_close(one, other) for other in others)


def test_batch_norm_statistics_are_averaged(tmp_path: Path) -> None:
    made = make_job("normed", make_batch_norm_cnn, IMAGES, dtype=torch.float64, epochs=2)
    one, two = (
        train_and_read(
            made, f"federated({workers}, clients=3, fraction=1.0)", tmp_path / str(workers)
        )[0]
        for workers in (1, 2)
    )
    assert is_close(one, two)
    assert int(one["1.num_batches_tracked"]) == 2


# ---- schedule, goal, checkpoints -------------------------------------------------------------
def make_digits_job(**changes: Any) -> pg.Job:
    return pg.job("digits").replace(**{"epochs": 2, "dtype": torch.float64, **changes})


def test_scheduler_advances_by_samples_between_rounds(tmp_path: Path) -> None:
    """The rate is halved after every two serial steps.

    An epoch of 29 samples has 8 serial steps, and a round of half of the clients has 4.
    """
    made = make_vectors_job(scheduler=make_step_lr, scheduler_every="step", epochs=2)
    _, record = train_and_read(made, "federated(2, clients=4, fraction=0.5)", tmp_path)
    rates = [
        sorted(
            {
                line["lr"]
                for rank in range(2)
                for line in record.select_lines("step", rank)
                if line["epoch"] == number
            }
        )
        for number in range(4)
    ]
    assert rates == [[0.1], [0.025], [0.00625], [0.0015625]]


def make_warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 8)


def test_round_with_zero_learning_rate_is_reported(tmp_path: Path) -> None:
    """In a warm-up from 0, serial makes one step with a rate of 0, but clients a whole round."""
    run = pg.train(
        make_vectors_job(scheduler=make_warm_up, scheduler_every="step", epochs=1),
        "federated(2, clients=4, fraction=0.5)",
        runs=tmp_path,
    )
    assert run.event_messages == [
        "round 0: the rate is 0 in the whole round, so its clients learn nothing; let the warm-up "
        "begin above 0"
    ]


def test_resumed_scheduler_is_moved_to_the_round_boundary(
    tmp_path: Path,
) -> None:
    """A run that was saved after 7 serial steps continues with the round that begins after 8.

    Earlier, the scheduler never made its eighth step, so all later rates were one step late.
    """
    made = make_vectors_job(scheduler=make_step_lr, scheduler_every="step", epochs=2)
    _, saved = train_and_read(made, "serial", tmp_path, save=7, limit=7)
    _, record = train_and_read(
        made, "federated(2, clients=4, fraction=0.5)", tmp_path, resume=saved.folder
    )
    rates = [
        sorted(
            {
                line["lr"]
                for rank in range(2)
                for line in record.select_lines("step", rank)
                if line["epoch"] == number
            }
        )
        for number in (2, 3)
    ]
    assert rates == [[0.00625], [0.0015625]]


def test_round_is_evaluated_and_ends_at_the_goal(tmp_path: Path) -> None:
    text = "federated(2, clients=10, fraction=0.5, local_epochs=2)"
    _, record = train_and_read(make_digits_job(epochs=40), text, tmp_path, until="accuracy=60")
    tests = [line["test"]["value"] for line in record.select_lines("epoch")]
    assert tests[-1] >= 60 > max(tests[:-1], default=0)
    assert len(tests) < 40


def test_resume_between_rounds_is_bit_equal(tmp_path: Path) -> None:
    made = make_digits_job(scheduler=make_step_lr, scheduler_every="step")
    text = "federated({}, clients=9, fraction=0.34, rounds={})"
    whole, full = train_and_read(made, text.format(2, 6), tmp_path)
    _, first = train_and_read(made, text.format(2, 4), tmp_path, save=5)
    resumed, rest = train_and_read(made, text.format(2, 6), tmp_path, resume=first.folder)
    assert [line["epoch"] for line in rest.select_lines("epoch")] == [4, 5]
    assert is_close(whole, resumed, 0.0)
    assert [line["test"] for line in rest.select_lines("epoch")] == [
        line["test"] for line in full.select_lines("epoch")[4:]
    ]
    assert rest.sample_count.missed == rest.sample_count.twice == 0
    other, _ = train_and_read(made, text.format(3, 6), tmp_path, resume=first.folder)
    assert is_close(whole, other)


def test_rounds_shorter_than_a_serial_step_are_saved(tmp_path: Path) -> None:
    """Checkpoints are named by serial steps, and several rounds can have the same number of them.

    Earlier, only the first of these rounds was saved, so the last one was lost. On resume,
    validation said that no rounds were left.
    """
    made = make_vectors_job()
    text = "federated(2, clients=20, fraction=0.05, rounds={})"
    assert [
        plan_rounds(made, text.format(9)).count_serial_steps(number) for number in (4, 5, 6, 7)
    ] == [
        1,
        2,
        2,
        2,
    ]
    whole, _ = train_and_read(made, text.format(7), tmp_path)
    _, first = train_and_read(made, text.format(6), tmp_path, save=1)
    assert sorted(path.name for path in first.folder.glob("checkpoint-*")) == [
        "checkpoint-00000001",
        "checkpoint-00000002",
    ]
    resumed, rest = train_and_read(made, text.format(7), tmp_path, resume=first.folder)
    assert [line["epoch"] for line in rest.select_lines("epoch")] == [6]
    assert is_close(whole, resumed, 0.0)


def test_validation_counts_rounds_and_names_the_option(tmp_path: Path) -> None:
    """Earlier, the message asked for more epochs, which do not count if rounds are given."""
    made = make_vectors_job()
    text = "federated(2, clients=4, fraction=0.5{})"
    _, first = train_and_read(made, text.format(", rounds=4"), tmp_path, save=1)
    with pytest.raises(
        pg.Refused, match=r"has finished 4 rounds, and job vectors has only 2; give more rounds=$"
    ):
        validate_run(made, text.format(", rounds=2"), Settings(resume=first.folder))
    with pytest.warns(
        UserWarning,
        match=r"all 4 rounds are finished; nothing is left to train \(to continue, give more "
        r"rounds=\)",
    ):
        validate_run(made, text.format(", rounds=4"), Settings(resume=first.folder))
    with pytest.raises(
        pg.Refused, match="has finished 4 rounds, and job vectors has only 2; give more --epochs"
    ):
        validate_run(made.replace(epochs=1), text.format(""), Settings(resume=first.folder))


def test_checkpoints_resume_to_and_from_other_strategies(tmp_path: Path) -> None:
    """A checkpoint has serial names, and the step that serial reaches after as many samples."""
    # an epoch has 23 steps
    made = make_digits_job(epochs=1)
    text = "federated(2, clients=4, fraction=0.5)"
    _, first = train_and_read(made, text, tmp_path, save=1, limit=11)
    assert [path.name for path in first.folder.glob("checkpoint-*")] == ["checkpoint-00000011"]
    for other in ("serial", "data(2)"):
        _, record = train_and_read(made, other, tmp_path, resume=first.folder)
        assert len(record.group_step_lines()) == 12
        assert record.sample_count.epochs == 0  # the beginning of the epoch is unknown
        _, theirs = train_and_read(made, other, tmp_path, save=7, limit=14)
        _, record = train_and_read(made, text, tmp_path, resume=theirs.folder)
        # the second round begins after 11 steps
        assert [line["epoch"] for line in record.select_lines("epoch")] == []
    longer = made.replace(epochs=2)
    _, record = train_and_read(longer, text, tmp_path, resume=theirs.folder)
    assert [line["epoch"] for line in record.select_lines("epoch")] == [2, 3]
    left = [
        line for line in record.select_lines("choice") if line["what"] in ("checkpoint", "rounds")
    ]
    assert [line["picked"] for line in left] == ["without the optimizer's state", "from round 2 on"]


def test_step_limit_counts_serial_steps_after_a_resume(tmp_path: Path) -> None:
    """Earlier, the limit was compared with the number of client batches.

    The first round has 12 of them, and is as long as 11 serial steps.
    """
    made = make_digits_job(epochs=2)
    text = "federated(2, clients=4, fraction=0.5)"
    assert (
        plan_rounds(made, text).round_starts[1],
        plan_rounds(made, text).count_serial_steps(1),
    ) == (
        12,
        11,
    )
    _, first = train_and_read(made, text, tmp_path, save=1, limit=11)
    for limit, rounds in ((11, []), (12, [1])):
        _, record = train_and_read(made, text, tmp_path, resume=first.folder, limit=limit)
        assert [line["epoch"] for line in record.select_lines("epoch")] == rounds


def train_and_stop(world: World, checked: ValidatedRun, folder: Path, origin: float) -> str:
    if world.rank == 1:
        world.stop.set()
    try:
        return train_rank(world, checked, folder, origin, loop_class=RoundTraining)
    finally:
        world.stop.clear()


def test_stop_request_is_handled_at_a_round_boundary(pool: Launcher, tmp_path: Path) -> None:
    checked = validate_run(make_vectors_job(), "federated(2, clients=4, fraction=1.0)")
    assert checked.run_on_ranks(pool, train_and_stop, checked, tmp_path, 0.0) == ["stopped"] * 2
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000008"]
    _, record = train_and_read(
        make_vectors_job(), "federated(2, clients=4, fraction=1.0)", tmp_path, resume=tmp_path
    )
    assert [line["epoch"] for line in record.select_lines("epoch")] == [1, 2]


# ---- refusals, the record, and comparisons with serial ---------------------------------------
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("federated(2, fraction=0)", "a number above 0, at most 1"),
        ("federated(2, clients=0)", "a whole number from 1"),
        ("federated(2, rounds=0)", "a whole number from 1"),
        ("federated(2, local_epochs=-1)", "a whole number from 1"),
        ("federated(2, split=dirichlet(0))", "a number above 0"),
        ("federated(4, clients=3)", "give at most 3 worker(s), or more clients"),
        ("federated(2) * tensor(2)", "a worker trains one whole client at a time"),
        ("fedavg(2)", "here it is federated(2, clients=100, fraction=0.1)"),
    ],
)
def test_invalid_input_is_refused_with_the_repair(text: str, says: str) -> None:
    with pytest.raises(pg.Refused) as caught:
        resolve_text(text)
    assert says in str(caught.value)


class Wrapped(nn.Linear):
    """A linear layer whose weight is two tensors in one, like a quantized weight."""

    def __init__(self) -> None:
        super().__init__(10, 4)
        self.weight = nn.Parameter(TwoTensor(self.weight.detach(), self.weight.detach().clone()))


def test_hidden_tensors_are_refused() -> None:
    """Earlier, such tensors were not restored before a client.

    So the client continued from the client before it on its worker.
    """
    with pytest.raises(
        pg.Refused, match=r"weight is a TwoTensor, .*; make it a plain tensor, or train"
    ):
        validate_run(make_vectors_job(model=Wrapped), "federated(2, clients=3)")


def test_job_that_clients_cannot_divide_is_refused() -> None:
    for made, text, says in (
        (make_vectors_job(), "federated(2, clients=30)", "give at most clients=29"),
        (
            make_vectors_job(
                train=torch.utils.data.TensorDataset(VECTORS.tensors[0], torch.randn(29, 4)),
                loss=functional.mse_loss,
            ),
            "federated(2, clients=3, split=dirichlet)",
            "give split=even",
        ),
        (
            make_job("normed", make_batch_norm_cnn, IMAGES, batch=9),
            "federated(2, clients=3)",
            "client 0 has 10 sample(s) in batches of 9",
        ),
    ):
        with pytest.raises(pg.Refused, match=re.escape(says)):
            validate_run(made, text)
    with pytest.raises(pg.Refused, match="leave out --verify"):
        pg.train(make_vectors_job(), "federated(2, clients=3)", verify=True)
    model = make_mlp()
    with (
        pytest.raises(pg.Refused, match="in a loop of your own paragrad cannot choose"),
        pg.parallelize(
            model, functional.cross_entropy, plain(model.parameters()), "federated(1, clients=3)"
        ),
    ):
        pass


def test_record_has_every_step_of_every_client(tmp_path: Path) -> None:
    text = "federated(2, clients=4, fraction=0.5, local_epochs=2, rounds=3)"
    _, record = train_and_read(make_vectors_job(), text, tmp_path)
    rounds = plan_rounds(make_vectors_job(), text)
    assert record.rounds == rounds.summary
    assert len(record.losses) == record.planned_steps == rounds.round_starts[-1]
    assert [lines[0]["step"] for lines in record.group_step_lines()] == list(
        range(rounds.round_starts[-1])
    )
    assert [line["clients"] for line in record.select_lines("epoch")] == [
        rounds.choose_clients(number) for number in range(3)
    ]
    assert record.count_passed_samples(1) == rounds.count_positions(0) + rounds.count_positions(1)
    samples = record.count_passed_samples(2)
    assert str(record.sample_count) == (
        f"{samples} of the {samples} samples that clients had to train on in 3 round(s), 0 twice, "
        "0 missed"
    )
    assert record.sent_per_step["weights"]["bytes"] == round(3 * 8 * 244 / rounds.round_starts[-1])
    # the optimizer of a client, which does not exist any more
    assert record.memory["optimizer"] == 8 * 244


def test_comparison_judges_federated_by_its_test_score(tmp_path: Path) -> None:
    """A step of a client is not a serial step, so there is no difference and no speed-up.

    Nothing is reported as missing.
    """
    found = pg.compare(
        make_digits_job(epochs=20),
        "serial; federated(2, clients=10, fraction=1.0, local_epochs=2)",
        runs=tmp_path,
        until="accuracy=50",
    )
    row = found.rows[1]
    assert found.ending["status"] == "finished"
    assert found.missing == []
    assert row.difference is None is row.speed_up
    assert row.test is not None
    assert row.test >= 50
    assert row.reached[0] is not None
    assert row.reached[0].samples == row.reached[0].epochs * 2 * 1437
    assert (found.folder / "page.html").exists()


@pytest.mark.parametrize("text", IN_ROUNDS)
def test_verify_reports_nothing_to_compare(tmp_path: Path, text: str) -> None:
    found = pg.verify(make_vectors_job(), text, runs=tmp_path)
    assert not found.same
    assert found.difference is None
    assert found.failure is not None
    assert "clients train apart for a round" in found.failure
