"""federated: clients with samples of their own train in rounds, and their weights are averaged."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import IMAGES, JOBS, VECTORS, adam, job, mlp, normed_cnn, resolved, stepped
from torch import Tensor, nn
from torch.nn import functional

import paragrad as pg
from paragrad.datasets.clients import Rounds
from paragrad.record.record import Record
from paragrad.training.admission import admitted

pytestmark = pytest.mark.usefixtures("warm")

State = dict[str, Tensor]
plain = functools.partial(torch.optim.SGD, lr=0.1)
heavy = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def vectors(**changes: Any) -> pg.Job:
    return job("vectors", mlp, VECTORS).replace(**{"epochs": 3, "dtype": torch.float64, "optimizer": heavy, "batch": 4, **changes})


def trained(made: pg.Job, text: str, folder: Path, **more: Any) -> tuple[State, Record]:
    run = pg.train(made, text, runs=folder, **more)
    return dict(run.model().state_dict()), Record(run.folder)


def close(one: State, other: State, within: float = 1e-10) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name].double(), other[name].double(), rtol=0, atol=within) for name in one)


def rounds_of(made: pg.Job, text: str) -> Rounds:
    found = admitted(made, text).rounds
    assert found is not None
    return found


# ---- it is federated averaging -----------------------------------------------------------------------------------------------
def averaged(made: pg.Job, rounds: Rounds) -> State:
    """As McMahan et al. write it, in a loop of plain torch. Which samples, whose turn and which order are the rounds'."""
    model = made.built_model()
    for number in range(rounds.count):
        begun = {name: each.clone() for name, each in model.state_dict().items()}
        ended, counts = [], []
        for part in rounds.parts(number):
            model.load_state_dict(begun)
            optimizer = made.optimizer(model.parameters())
            for piece in rounds.pieces(part, number):
                inputs, target = (each[piece.samples] for each in made.train.tensors)
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs.double()), target).backward()
                if made.clip_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), made.clip_norm)
                optimizer.step()
            ended.append({name: each.clone() for name, each in model.state_dict().items()})
            counts.append(len(rounds.clients[part.client]))
        model.load_state_dict({name: sum(count * each[name] for count, each in zip(counts, ended, strict=True)) / sum(counts)
                               for name in begun})
    return dict(model.state_dict())


@pytest.mark.parametrize(("text", "changes"), [
    ("federated(2, clients=4, fraction=0.5, local_epochs=2, rounds=5)", {}),
    ("federated(1, clients=3, fraction=1.0, rounds=3, reduce=native)", {"optimizer": adam, "clip_norm": 0.05}),
    ("federated(3, clients=5, fraction=0.6, rounds=4, split=dirichlet(0.3), reduce=ring)", {}),
    ("federated(2, clients=9, fraction=0.1, rounds=4, reduce=tree)", {"batch": 3})])
def test_it_is_federated_averaging_written_out(tmp_path: Path, text: str, changes: dict[str, Any]) -> None:
    """29 samples: clients have unequal numbers of them. With a fraction of 0.1 of 9 clients it is one a round, so a worker has
    nothing to do."""
    made = vectors(**changes)
    found, _ = trained(made, text, tmp_path)
    rounds = rounds_of(made, text)
    assert len({len(samples) for samples in rounds.clients}) == 2
    assert close(found, averaged(made, rounds), 1e-12)


def test_one_client_with_all_samples_is_serial(tmp_path: Path) -> None:
    """Of plain SGD, which has no state to begin afresh; dropout too."""
    made = JOBS["dropout"].replace(dtype=torch.float64, optimizer=plain, epochs=3)
    serial, _ = trained(made, "serial", tmp_path / "serial")
    found, record = trained(made, "federated(1, clients=1)", tmp_path / "federated")
    assert close(found, serial, 1e-12)
    assert len(record.of("epoch")) == 3


@pytest.mark.parametrize("name", ["mlp, adam, clipped, scheduled", "cnn with batch norm, activated, dropout", "lstm, tied, loss as a pair",
                                  "dicts, padded, transformed", "frozen and unused", "dropout, recomputed"])
def test_it_does_not_matter_how_many_workers_there_are(tmp_path: Path, name: str) -> None:
    made = JOBS[name].replace(dtype=torch.float64, batch=4, epochs=2)
    options = "clients=5, fraction=0.6, local_epochs=2, rounds=3"
    one, *others = (trained(made, f"federated({workers}, {options})", tmp_path / str(workers))[0] for workers in (1, 2, 3))
    assert all(close(one, other) for other in others)
    begun = made.built_model().state_dict()
    assert not close(one, dict(begun), 1e-3)
