"""Unusual models under averaging, which earlier trained wrongly or failed without a message.

Their values or objects change from call to call, their forwards replace parameters, or their
tensors are not dense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import VECTORS, make_job
from torch import Tensor, nn
from torch.utils.data import Dataset

import paragrad as pg
from paragrad.datasets.clients import ClientRounds, assign_samples
from paragrad.datasets.sample_order import SampleOrder
from paragrad.record.record import Record
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]
LOCAL = "local(2, every=3)"
FEDERATED = "federated(2, clients=6, fraction=0.7)"


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_linear() -> nn.Module:
    return nn.Linear(10, 4)


def make_vectors_job(model: Any, optimizer: Any = make_sgd, **changes: Any) -> pg.Job:
    return make_job("found", model, VECTORS).replace(
        optimizer=optimizer, dtype=torch.float64, batch=4, **changes
    )


# ---- parameters that forwards replace --------------------------------------------------------
class Tied(nn.Module):
    """Ties its weights in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(10, 10)
        self.other = nn.Linear(10, 10)
        self.last = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.other.weight = self.one.weight
        return self.last(self.other(torch.tanh(self.one(x))))  # type: ignore[no-any-return]


class Made(nn.Linear):
    """Makes a parameter in its first forward."""

    def __init__(self) -> None:
        super().__init__(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.zeros(4, dtype=x.dtype))
        return super().forward(x) + self.late


class Swapped(nn.Linear):
    """Replaces its weight by another parameter in its second training forward."""

    def __init__(self) -> None:
        super().__init__(10, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls == 2:
            self.weight = nn.Parameter(self.weight.detach() * 2)
        return super().forward(x)


@pytest.mark.parametrize("text", [LOCAL, FEDERATED])
@pytest.mark.parametrize(("model", "name"), [(Tied, "other.weight"), (Made, "late")])
def test_replaced_parameter_is_found_at_start(model: Any, name: str, text: str) -> None:
    """Earlier, the first average raised a KeyError.

    Under federated, a parameter that a forward made was trained on some workers only.
    """
    with pytest.raises(pg.Refused, match=f"replaces, ties or makes {name}; do that in __init__"):
        validate_run(make_vectors_job(model), text)


@pytest.mark.parametrize("text", [LOCAL, "federated(2, clients=5, fraction=0.7)"])
def test_late_replacement_of_a_parameter_is_found(text: str, tmp_path: Path) -> None:
    """Earlier, the replacement was neither undone nor reported.

    So the training was different with each number of workers.
    """
    with pytest.raises(
        pg.RankFailed, match="tensor weight: a forward put another parameter in its place"
    ):
        pg.train(make_vectors_job(Swapped), text, runs=tmp_path)


# ---- jobs that change from call to call ------------------------------------------------------
class Outside:
    """A counter in a list, and another in the class. Neither is restored between clients."""

    every = 0

    def __init__(self) -> None:
        self.calls = [0]


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(10, 4)
        self.beside = Outside()

    def forward(self, x: Tensor) -> Tensor:
        self.beside.calls[0] += 1
        return super().forward(x) * (1 + 0.1 * self.beside.calls[0])


class Globally(nn.Linear):
    def __init__(self) -> None:
        super().__init__(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        Outside.every += 1
        return super().forward(x) * (1 + 0.1 * Outside.every)


class Turning(Dataset):
    """A dataset whose samples change with each read."""

    read = 0

    def __len__(self) -> int:
        return len(VECTORS)

    def __getitem__(self, index: int) -> Any:
        type(self).read += 1
        sample, target = VECTORS[index]
        return sample * (1 + 0.1 * self.read), target


def collate_drifting(samples: list[Any]) -> Any:
    Outside.every += 1
    inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
    return inputs * (1 + 0.1 * Outside.every), targets


def make_hooked_sgd(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    for each in every:
        each.register_hook(lambda gradient: 0.5 * gradient)
    return make_sgd(every)


ONCE: list[torch.optim.Optimizer] = []


def return_same_sgd(parameters: Any) -> torch.optim.Optimizer:
    if not ONCE:
        ONCE.append(make_sgd(list(parameters)))
    return ONCE[0]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (make_vectors_job(Counting), "the loss of the same samples is another number each time"),
        (make_vectors_job(Globally), "the loss of the same samples is another number each time"),
        (make_vectors_job(make_linear, train=Turning()), "train gives other values each time"),
        (
            make_vectors_job(make_linear, collate=collate_drifting),
            "train gives other values each time",
        ),
        (
            make_vectors_job(make_linear, make_hooked_sgd),
            "registers hooks on parameters, which stay there",
        ),
        (make_vectors_job(make_linear, return_same_sgd), "the same object each time it is called"),
    ],
    ids=["a list", "a global", "a dataset", "a collate", "hooks", "the same optimizer"],
)
def test_unrestorable_client_state_is_refused(made: pg.Job, says: str) -> None:
    """Earlier, such state went silently from one client to the next one on the same worker.

    So the training was different with each number of workers.
    """
    with pytest.raises(pg.Refused, match=says):
        validate_run(made, FEDERATED)


def test_hooks_of_the_model_are_accepted(tmp_path: Path) -> None:
    def make_halved_gradient_model() -> nn.Module:
        model = make_linear()
        for each in model.parameters():
            each.register_hook(lambda gradient: 0.5 * gradient)
        return model

    one, two = (
        pg.train(
            make_vectors_job(make_halved_gradient_model),
            f"federated({workers}, clients=6, fraction=0.7)",
            runs=tmp_path,
        )
        for workers in (1, 2)
    )
    assert torch.allclose(one.model().weight, two.model().weight, rtol=1e-12)


# ---- tensors ---------------------------------------------------------------------------------
class Empty(nn.Linear):
    """A linear layer whose first parameter has no elements. Earlier, it had no bucket."""

    def __init__(self) -> None:
        super().__init__(10, 4)
        weight = self.weight
        bias = self.bias
        del self.weight, self.bias
        self.none = nn.Parameter(torch.empty(0))
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


@pytest.mark.parametrize("text", [LOCAL, FEDERATED, "data(2)"])
def test_parameter_without_elements(text: str, tmp_path: Path) -> None:
    run = pg.train(make_vectors_job(Empty), text, runs=tmp_path)
    assert run.finished
    assert run.model().state_dict()["none"].shape == (0,)


class Graph(nn.Linear):
    """A linear layer with a sparse matrix, such as the neighbours in a graph.

    The matrix is a buffer or a plain attribute.
    """

    def __init__(self, buffer: bool) -> None:
        super().__init__(10, 4)
        near = torch.eye(10).to_sparse()
        self.register_buffer("near", near) if buffer else setattr(self, "near", near)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((self.near.to(x.dtype) @ x.t()).t())


@pytest.mark.parametrize("text", ["serial", FEDERATED])
def test_sparse_tensor(text: str, tmp_path: Path) -> None:
    """A sparse buffer is refused with its name; a sparse attribute is accepted.

    Earlier, validation compared the buffer by an operation that exists for dense tensors only. The
    message did not name the problem.
    """
    with pytest.raises(
        pg.Refused, match="near is sparse, and no file of a trained model holds that"
    ):
        validate_run(make_vectors_job(lambda: Graph(True)), text)
    assert pg.train(make_vectors_job(lambda: Graph(False)), text, runs=tmp_path).finished


def test_nondeterministic_model_construction_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        pg.Refused, match=r"model.safetensors does not fit the model as job found builds it"
    ):
        pg.train(make_vectors_job(Made), "serial", runs=tmp_path).model()


# ---- rounds ----------------------------------------------------------------------------------
def test_number_of_rounds_is_computed_without_drawing() -> None:
    """Earlier, validation drew the clients of all rounds, which took minutes without a message."""
    found = ClientRounds(assign_samples(100, 20, 7), SampleOrder(100, 4, 7), 2, 3, 1, 1, 10**9)
    assert not found.has_varying_steps
    assert (found.round_starts[10**6], found.round_starts[-1]) == (6 * 10**6, 6 * 10**9)
    assert [found.round_starts[number] for number in range(4)] == [
        sum(
            found.count_client_steps(client)
            for before in range(number)
            for client in found.choose_clients(before)
        )
        for number in range(4)
    ]
    with pytest.raises(pg.Refused, match=r"has 30,000 rounds; .*; give at most rounds=20000"):
        validate_run(
            make_vectors_job(make_linear), "federated(2, clients=6, fraction=0.7, rounds=30000)"
        )


def test_fraction_that_leaves_workers_idle_is_reported(tmp_path: Path) -> None:
    says = (
        "1 of 6 clients takes part in a round, which keeps at most 1 of 2 workers busy, and "
        "nothing is averaged; give fewer"
    )
    with pytest.warns(
        UserWarning, match=f"{says} workers, or a larger fraction, such as fraction=0.333"
    ):
        run = pg.train(
            make_vectors_job(make_linear), "federated(2, clients=6, rounds=2)", runs=tmp_path
        )
    told = [
        line["picked"]
        for line in Record(run.folder).select_lines("choice", 0) + run.choices
        if line["what"] == "rounds"
    ]
    assert told == ["2, with 1 of 6 clients in each"]
