"""Clients of federated training: their samples, their rounds, and their order of samples."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from paragrad.datasets.clients import (
    ClientRounds,
    assign_samples,
    draw_dirichlet,
    make_random_state,
    read_labels,
)
from paragrad.datasets.sample_order import SampleOrder, permute_samples
from paragrad.errors import Refused
from paragrad.strategies.federated import Federated

pytestmark = pytest.mark.pure

LABELS = numpy.arange(600) % 10


def make_rounds(samples: int = 29, clients: int = 5, **changes: object) -> ClientRounds:
    given = {"workers": 2, "clients_per_round": 2, "passes": 2, "epochs": 3}
    return ClientRounds(
        assign_samples(samples, clients, 7), SampleOrder(samples, 4, 7), **{**given, **changes}
    )


@given(
    st.integers(1, 200),
    st.integers(1, 20),
    st.integers(0, 9),
    st.sampled_from([None, 1e-4, 0.1, 1.0, 1e5]),
)
def test_every_sample_has_one_client(
    samples: int, clients: int, seed: int, alpha: float | None
) -> None:
    clients = min(clients, samples)
    found = assign_samples(samples, clients, seed, numpy.arange(samples) % 7, alpha)
    sizes = [len(each) for each in found]
    assert sorted(numpy.concatenate(found).tolist()) == list(range(samples))
    assert max(sizes) - min(sizes) <= 1
    assert all((numpy.diff(each) > 0).all() for each in found)
    again = assign_samples(samples, clients, seed, numpy.arange(samples) % 7, alpha)
    assert all(map(numpy.array_equal, found, again))


def count_classes(alpha: float | None) -> float:
    """Count the classes that make up at least a tenth of a client's samples.

    Return the mean over the clients. There are ten classes.
    """
    found = assign_samples(600, 10, 3, LABELS, alpha)
    return float(
        numpy.mean([(numpy.bincount(LABELS[each], minlength=10) > 5).sum() for each in found])
    )


def test_a_small_alpha_leaves_a_client_few_classes() -> None:
    assert count_classes(0.01) < 2.5 < count_classes(1.0) < count_classes(1e5)
    assert count_classes(None) > 5
    assert (
        assign_samples(600, 10, 3, LABELS, 1.0)[0].tolist()
        != assign_samples(600, 10, 4, LABELS, 1.0)[0].tolist()
    )


def test_class_mix_with_underflow_is_drawn() -> None:
    """A mix of classes is drawn also if all gamma numbers underflow.

    For alpha = 1e-5 all ten gamma numbers are 0. Divided by their sum, they are NaN.
    """
    random = make_random_state("a test")
    for _ in range(50):
        mix = draw_dirichlet(random, numpy.full(10, 1e-5))
        assert mix.sum() == pytest.approx(1.0)
    means = numpy.mean(
        [draw_dirichlet(random, numpy.array([2.0, 6.0])) for _ in range(4000)], axis=0
    )
    assert means == pytest.approx([0.25, 0.75], abs=0.01)


def test_fraction_selects_at_least_one_client() -> None:
    found = make_rounds()
    assert Federated(2, clients=5, fraction=0.4).clients_per_round == found.clients_per_round == 2
    assert all(len(set(found.choose_clients(number))) == 2 for number in range(20))
    assert {client for number in range(20) for client in found.choose_clients(number)} == set(
        range(5)
    )
    assert [found.choose_clients(number) for number in range(5)] == [
        make_rounds(workers=1).choose_clients(number) for number in range(5)
    ]
    assert Federated(2, clients=5, fraction=1e-9).clients_per_round == 1
    taking = Federated(2, clients=5, fraction=1.0).clients_per_round
    assert make_rounds(clients_per_round=taking).choose_clients(3) == [0, 1, 2, 3, 4]


def test_rounds_cover_the_epochs() -> None:
    # 2 of 5 clients take their samples twice: a round is 4/5 of an epoch, which has 8 steps
    found = make_rounds()
    assert found.count == 4
    assert [found.count_serial_steps(number) for number in range(5)] == [0, 6, 12, 19, 24]
    assert [found.count_finished_rounds(step) for step in (0, 1, 6, 7, 24)] == [0, 1, 1, 2, 4]
    assert make_rounds(epochs=0).count == 0
    longer = make_rounds(requested_rounds=10)
    assert longer.count == 10
    assert longer.count_serial_steps(10) == 64


def test_rows_and_steps_of_a_round_follow_client_order() -> None:
    found = make_rounds()
    for number in range(found.count):
        parts = found.plan_turns(number)
        pieces = [piece for part in parts for piece in found.iterate_client_batches(part, number)]
        assert [place for piece in pieces for place in piece.positions] == list(
            range(found.count_positions(number))
        )
        assert [part.first_step for part in parts] == [
            found.round_starts[number] + sum(each.steps for each in parts[:place])
            for place in range(len(parts))
        ]
        assert (
            sum(part.steps for part in parts)
            == len(pieces)
            == found.round_starts[number + 1] - found.round_starts[number]
        )
        for part in parts:
            own = list(found.iterate_client_batches(part, number))
            samples = [sample for piece in own for sample in piece.indices]
            assert sorted(samples) == sorted(found.clients[part.client].tolist() * 2)
            assert [piece.epoch for piece in own] == sorted(piece.epoch for piece in own)
            assert {piece.epoch for piece in own} == {2 * number, 2 * number + 1}


def test_single_client_has_the_dataset_order() -> None:
    found = make_rounds(clients=1, workers=1, clients_per_round=1, passes=1)
    for number in range(3):
        (part,) = found.plan_turns(number)
        assert [
            sample
            for piece in found.iterate_client_batches(part, number)
            for sample in piece.indices
        ] == permute_samples(29, 7, number).tolist()


def test_clients_are_assigned_evenly_and_stably() -> None:
    found = make_rounds(samples=103, clients=10, workers=3, clients_per_round=4)
    loads = [
        sum(
            len(samples)
            for samples, own in zip(found.clients, found.client_workers, strict=True)
            if own == worker
        )
        for worker in range(3)
    ]
    assert max(loads) - min(loads) <= 11
    assert set(make_rounds(clients=3, workers=3).client_workers) == {0, 1, 2}


class Named(list[dict[str, int]]):
    """A dataset whose samples are dicts."""


class WithTargets:
    """A dataset with `targets`, whose samples must not be read only to find their classes."""

    targets = (1, 0, 1)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> object:
        raise AssertionError


class Ragged(WithTargets):
    """A dataset whose targets are lists of boxes."""

    targets = ((1, 2), (3, 4), (5,))  # type: ignore[assignment]

    def __getitem__(self, index: int) -> object:
        return 0.5, self.targets[index] if index else 7


class Turned(Subset[object]):
    """A subset that changes the classes of its samples."""

    def __getitem__(self, index: int) -> object:
        x, target = super().__getitem__(index)  # type: ignore[misc]
        return x, 9 - target

    def __getitems__(self, indices: list[int]) -> list[object]:
        return [self[index] for index in indices]


def test_classes_are_those_of_present_samples() -> None:
    """Classes are read from the samples that the dataset contains.

    Earlier, numpy's error about rows of unequal length ended the validation. For a Subset, all
    samples of the whole dataset were read, and each needed a class. If a subclass of Subset
    changed its samples, their classes were ignored.
    """
    with pytest.raises(
        Refused, match="which cannot be read for samples 0 to 2: ValueError: a target is 2 value"
    ):
        read_labels(Ragged(), "x")
    assert read_labels(Subset(Ragged(), [0]), "x").tolist() == [7]
    pairs = TensorDataset(torch.zeros(4, 2), torch.tensor([3, 1, 3, 0]))
    assert read_labels(Turned(pairs, [3, 1]), "x").tolist() == [9, 8]
    assert read_labels(Subset(Turned(pairs, [3, 1, 2]), [2, 0]), "x").tolist() == [6, 9]
    assert read_labels(Subset(Subset(pairs, [3, 1, 2]), [2, 0]), "x").tolist() == [3, 0]


def test_labels_are_found_or_refused() -> None:
    pairs = TensorDataset(torch.zeros(4, 2), torch.tensor([3, 1, 3, 0]))
    assert read_labels(pairs, "x").tolist() == [3, 1, 3, 0]
    assert read_labels(Subset(pairs, [3, 1]), "x").tolist() == [0, 1]
    assert read_labels([(0.5, torch.tensor([2])), (0.5, 1)], "x").tolist() == [2, 1]
    assert read_labels(Named([{"labels": 4}, {"labels": 2}]), "x").tolist() == [4, 2]
    assert read_labels(WithTargets(), "x").tolist() == [1, 0, 1]
    for wrong in (
        TensorDataset(torch.zeros(4, 2), torch.zeros(4)),
        TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2).long()),
        [(0, 0.5)],
        [(0, [1, 2])],
        Named([{"other": 4}]),
        [3],
    ):
        with pytest.raises(Refused, match="give split=even"):
            read_labels(wrong, "federated(2, split=dirichlet)")
