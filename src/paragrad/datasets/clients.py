"""Clients of a federated training: which samples each has, whose turn a round is, and in which
order a client goes through its own. All of it follows from the samples' labels, the seed, the
round and the client, never from the number of workers.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from paragrad.datasets.sample_order import SampleOrder, make_random_state, shuffle_indices
from paragrad.errors import Refused, describe_error
from paragrad.runtime.generators import keep_generators

LABEL_KEYS = ("labels", "label")  # of the class, in a sample that is a dict
INTEGER_KINDS = "iub"  # numpy's kinds of whole numbers
LABELS_PER_READ = 1000  # samples whose class is read together


@dataclass(frozen=True)
class ClientTurn:
    """What a client does in a round. first: its first place in the round's order;  step: the
    number of its first step;  steps: how many it makes.
    """

    client: int
    first_position: int
    first_step: int
    steps: int


@dataclass(frozen=True)
class ClientBatch:
    """A batch of a client. epoch: of the client, counted over all rounds, by which its samples
    are drawn;  whole: its places in the round's order;  samples: their numbers in the
    dataset.
    """

    epoch: int
    positions: range
    indices: list[int]


@dataclass(frozen=True, eq=False)
class ClientRounds:
    """The rounds of a training. clients: of each the numbers of its samples, ascending;
    taking: how many take part in a round; passes: a client's over its samples in a round;
    asked: so many rounds, or None: as many as `epochs` of all samples are.
    """

    clients: tuple[Any, ...]
    order: SampleOrder
    workers: int
    clients_per_round: int
    passes: int
    epochs: int
    requested_rounds: int | None = None

    # ---- how many ----------------------------------------------------------------------------
    @property
    def default_count(self) -> int:
        """So many rounds pass over as many samples as the epochs do, of clients of average
        size.
        """
        return -(-self.epochs * len(self.clients) // (self.clients_per_round * self.passes))

    @property
    def count(self) -> int:
        return self.default_count if self.requested_rounds is None else self.requested_rounds

    def count_serial_steps(self, rounds: int) -> int:
        """The steps that serial makes over as many samples as so many rounds pass over, of
        clients of average size.
        """
        steps = (
            rounds * self.clients_per_round * self.passes * self.order.steps // len(self.clients)
        )
        return min(steps, self.epochs * self.order.steps) if rounds <= self.default_count else steps

    def count_finished_rounds(self, steps: int) -> int:
        """The rounds behind so many steps of serial."""
        return next(
            (rounds for rounds in range(self.count) if self.count_serial_steps(rounds) >= steps),
            self.count,
        )

    def match_checkpoint(self, steps: int, recorded_rounds: int | None) -> int | None:
        """The rounds behind a checkpoint of so many steps, as it tells them; None where it is
        not of these rounds.
        """
        return (
            recorded_rounds
            if recorded_rounds is not None and self.count_serial_steps(recorded_rounds) == steps
            else None
        )

    def count_client_steps(self, client: int) -> int:
        """The steps of a client in a round."""
        return self.passes * -(-len(self.clients[client]) // self.order.batch)

    @cached_property
    def client_steps(self) -> list[int]:
        return list(map(self.count_client_steps, range(len(self.clients))))

    @cached_property
    def round_starts(self) -> Sequence[int]:
        """The number of every round's first step, and behind them the number of all steps:
        those of its clients, one after the other.
        """
        if not self.has_varying_steps:
            each = sum(self.client_steps[: self.clients_per_round])
            return range(0, each * self.count + 1, each)
        return list(
            accumulate(
                (
                    sum(self.client_steps[client] for client in self.choose_clients(number))
                    for number in range(self.count)
                ),
                initial=0,
            )
        )

    @property
    def has_varying_steps(self) -> bool:
        """Does it depend on who takes part how many steps a round has?"""
        return self.clients_per_round < len(self.clients) and len(set(self.client_steps)) > 1

    @property
    def summary(self) -> dict[str, int]:
        """As a record and a dry run tell it."""
        return {
            "count": self.count,
            "clients": len(self.clients),
            "taking": self.clients_per_round,
            "passes": self.passes,
            "steps": self.round_starts[-1],
        }

    def __str__(self) -> str:
        """As people read it."""
        return f"{self.count}, with {self.clients_per_round} of {len(self.clients)} clients in each"

    # ---- who ---------------------------------------------------------------------------------
    def choose_clients(self, number: int) -> list[int]:
        """The clients that take part in a round, ascending."""
        if self.clients_per_round == len(self.clients):
            return list(range(self.clients_per_round))
        found = shuffle_indices(len(self.clients), f"clients {self.order.seed} {number}")[
            : self.clients_per_round
        ]
        return sorted(found.tolist())

    @cached_property
    def client_workers(self) -> list[int]:
        """Of every client its worker, for all rounds: the largest client first, each to who has
        the fewest samples by then.
        """
        sizes = [len(samples) for samples in self.clients]
        loads = [(0, worker) for worker in range(self.workers)]
        found = [0] * len(sizes)
        for client in sorted(range(len(sizes)), key=lambda client: (-sizes[client], client)):
            load, worker = loads[0]
            heapq.heapreplace(loads, (load + sizes[client], worker))
            found[client] = worker
        return found

    def plan_turns(self, number: int) -> list[ClientTurn]:
        """What the clients of a round do."""
        found = list[ClientTurn]()
        first = 0
        step = self.round_starts[number]
        for client in self.choose_clients(number):
            found.append(ClientTurn(client, first, step, self.count_client_steps(client)))
            first = first + self.passes * len(self.clients[client])
            step = step + self.count_client_steps(client)
        return found

    def count_positions(self, number: int) -> int:
        """How many places the order of a round has: its clients' samples, as often as they pass
        over them.
        """
        return self.passes * sum(
            len(self.clients[client]) for client in self.choose_clients(number)
        )

    # ---- in which order ----------------------------------------------------------------------
    def iterate_client_batches(self, turn: ClientTurn, number: int) -> Iterator[ClientBatch]:
        """A client's batches in a round. Those of the first client are in the dataset's own
        order: alone, it is serial.
        """
        own = self.clients[turn.client]
        first = turn.first_position
        for epoch in range(number * self.passes, (number + 1) * self.passes):
            whose = f" of client {turn.client}" if turn.client else ""
            samples = own[
                shuffle_indices(len(own), f"order {self.order.seed} {epoch}{whose}")
            ].tolist()
            for start in range(0, len(samples), self.order.batch):
                some = samples[start : start + self.order.batch]
                yield ClientBatch(epoch, range(first + start, first + start + len(some)), some)
            first += len(samples)


# ---- which samples ---------------------------------------------------------------------------
def assign_samples(
    samples: int, clients: int, seed: int, labels: Any = None, alpha: float | None = None
) -> tuple[Any, ...]:
    """Of every client the numbers of its samples, ascending; each sample has one client, and no
    client has more than one sample more than another.

    alpha: None: by chance; otherwise each client draws its mix of classes from a Dirichlet
    distribution around that of all, of concentration alpha, and takes its samples by it as long
    as there are some (Hsu, Qi & Brown 2019, arXiv 1909.06335).
    """
    order = shuffle_indices(samples, f"samples of clients {seed}")
    sizes = [samples // clients + (client < samples % clients) for client in range(clients)]
    if alpha is None:
        return tuple(numpy.sort(part) for part in numpy.split(order, numpy.cumsum(sizes)[:-1]))
    classes, of = numpy.unique(labels[order], return_inverse=True)
    # of every class, in that order
    left = [order[of == number] for number in range(len(classes))]
    shares = numpy.bincount(of) / samples
    random = make_random_state(f"classes of clients {seed}")
    found = []
    for size in sizes:
        mix = draw_dirichlet(random, alpha * shares)
        own = list[Any]()
        while size:
            there = numpy.array([len(each) for each in left])
            mix = numpy.where(there > 0, mix, 0.0)
            # what it wants is gone
            mix = mix / mix.sum() if mix.sum() > 0 else there / there.sum()
            for number, count in enumerate(numpy.minimum(random.multinomial(size, mix), there)):
                own.append(left[number][:count])
                left[number] = left[number][count:]
                size = size - int(count)
        found.append(numpy.sort(numpy.concatenate(own)))
    return tuple(found)


def draw_dirichlet(random: Any, alphas: Any) -> Any:
    """A draw of a Dirichlet distribution, by logarithms: of small alphas the gamma numbers
    themselves would all be 0.
    """
    gammas = (
        numpy.log(random.standard_gamma(alphas + 1))
        + numpy.log(1.0 - random.random_sample(len(alphas))) / alphas
    )
    mix = numpy.exp(gammas - gammas.max())
    return mix / mix.sum()


def read_labels(dataset: Any, requested: str, indices: Any = None) -> Any:
    """The class of every sample, or of those numbers, as an array of whole numbers: as the
    dataset has them in `targets`, or read sample by sample. Raises Refused where a target is
    none.
    """
    indices = numpy.arange(len(dataset)) if indices is None else indices
    # samples outside of it are nobody's
    if type(dataset).__getitem__ is Subset.__getitem__:
        return read_labels(
            dataset.dataset, requested, numpy.asarray(dataset.indices, dtype=numpy.int64)[indices]
        )
    if (found := _read_target_array(dataset)) is not None:
        return found[indices]
    with keep_generators():
        return numpy.array(
            [
                each
                for start in range(0, len(indices), LABELS_PER_READ)
                for each in _read_targets(
                    dataset, indices[start : start + LABELS_PER_READ].tolist(), requested
                )
            ]
        )


def _read_target_array(dataset: Any) -> Any:
    """The targets that a dataset has together, as an array; None where they are no whole
    numbers, one a sample.
    """
    pairs = type(dataset).__getitem__ is TensorDataset.__getitem__ and len(dataset.tensors) == 2
    # rows of unequal length are no array
    with contextlib.suppress(TypeError, ValueError):
        found = _convert_to_array(
            dataset.tensors[1] if pairs else getattr(dataset, "targets", None)
        )
        if found.shape == (len(dataset),) and found.dtype.kind in INTEGER_KINDS:
            return found
    return None


def _convert_to_array(value: Any) -> Any:
    return numpy.asarray(value.cpu() if isinstance(value, Tensor) else value)


def _read_targets(dataset: Any, indices: list[int], requested: str) -> list[int]:
    try:
        whole = getattr(dataset, "whole_batches", False)
        samples = (
            ((None, each) for each in _convert_to_array(dataset[indices][1]))
            if whole
            else map(dataset.__getitem__, indices)
        )
        return list(map(_read_class, samples))
    except Exception as error:
        raise Refused(
            f"{requested} divides samples by their class, and of samples {indices[0]} to "
            f"{indices[-1]} "
            f"it could not be "
            f"read: {describe_error(error)}; give split=even, or targets that are classes"
        ) from error


def _read_class(sample: Any) -> int:
    target = (
        sample[1]
        if not isinstance(sample, Mapping)
        else next((sample[name] for name in LABEL_KEYS if name in sample), None)
    )
    found = _convert_to_array(target)
    if found.size != 1 or found.dtype.kind not in INTEGER_KINDS:
        if isinstance(sample, Mapping) and target is None:
            raise ValueError(
                f"a sample is a dict without {' or '.join(map(repr, LABEL_KEYS))}, where its class "
                f"is "
                f"looked for"
            )
        raise ValueError(
            f"a target is {found.size} value(s) of type {found.dtype}, and no whole number"
        )
    return int(found.reshape(-1)[0])
