"""Clients of federated training: their samples, the clients of each round, and each client's order.

Everything follows from the labels of the samples, the seed, the round and the client. Nothing
depends on the number of workers.
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

LABEL_KEYS = ("labels", "label")  # keys of the class in a sample that is a dict
INTEGER_KINDS = "iub"  # numpy's `dtype.kind` of whole numbers
LABELS_PER_READ = 1000  # samples that are read in one group


@dataclass(frozen=True)
class ClientTurn:
    """The work of one client in one round.

    Attributes:
        client: The number of the client.

        first_position: The client's first position in the order of the round.

        first_step: The number of the client's first step.

        steps: The number of steps that the client makes.
    """

    client: int
    first_position: int
    first_step: int
    steps: int


@dataclass(frozen=True)
class ClientBatch:
    """One batch of a client.

    Attributes:
        epoch: The client's epoch, counted over all rounds; random numbers of its samples follow it.

        positions: The positions of the batch in the order of the round.

        indices: The indices of its samples in the dataset.
    """

    epoch: int
    positions: range
    indices: list[int]


@dataclass(frozen=True, eq=False)
class ClientRounds:
    """The rounds of a federated training.

    Attributes:
        clients: For each client the indices of its samples, in ascending order.

        order: Batch size, seed and number of samples of the training.

        workers: The number of workers.

        clients_per_round: The number of clients that take part in a round.

        passes: How often a client passes over its samples in a round.

        epochs: The epochs of the job.

        requested_rounds: The number of rounds, or None: as many as `epochs` of all samples amount
            to.
    """

    clients: tuple[Any, ...]
    order: SampleOrder
    workers: int
    clients_per_round: int
    passes: int
    epochs: int
    requested_rounds: int | None = None

    # ---- numbers of rounds and steps -----------------------------------------------------------
    @property
    def default_count(self) -> int:
        """The number of rounds that pass over as many samples as the epochs do.

        Clients of average size are assumed.
        """
        return -(-self.epochs * len(self.clients) // (self.clients_per_round * self.passes))

    @property
    def count(self) -> int:
        """The number of rounds of the training."""
        return self.default_count if self.requested_rounds is None else self.requested_rounds

    def count_serial_steps(self, rounds: int) -> int:
        """Count the steps in which serial training passes over as many samples as the rounds do.

        Clients of average size are assumed.

        Args:
            rounds: The number of rounds.

        Returns:
            The number of steps of serial training.
        """
        steps = (
            rounds * self.clients_per_round * self.passes * self.order.steps // len(self.clients)
        )
        return min(steps, self.epochs * self.order.steps) if rounds <= self.default_count else steps

    def count_finished_rounds(self, steps: int) -> int:
        """Count the rounds that correspond to a number of serial steps.

        Args:
            steps: The number of steps of serial training.

        Returns:
            The number of rounds.
        """
        return next(
            (rounds for rounds in range(self.count) if self.count_serial_steps(rounds) >= steps),
            self.count,
        )

    def match_checkpoint(self, steps: int, recorded_rounds: int | None) -> int | None:
        """Return the finished rounds of a checkpoint, if it belongs to these rounds.

        Args:
            steps: The step of the checkpoint, counted in steps of serial training.
            recorded_rounds: The number of rounds that the checkpoint gives.

        Returns:
            The number of rounds, or None if the checkpoint is of other rounds.
        """
        return (
            recorded_rounds
            if recorded_rounds is not None and self.count_serial_steps(recorded_rounds) == steps
            else None
        )

    def count_client_steps(self, client: int) -> int:
        """Count the steps of a client in a round.

        Args:
            client: The number of the client.

        Returns:
            The number of steps.
        """
        return self.passes * -(-len(self.clients[client]) // self.order.batch)

    @cached_property
    def client_steps(self) -> list[int]:
        """The steps of each client in a round."""
        return list(map(self.count_client_steps, range(len(self.clients))))

    @cached_property
    def round_starts(self) -> Sequence[int]:
        """The number of the first step of each round, and then the number of all steps.

        The steps of a round's clients follow one another.
        """
        if not self.has_varying_steps:
            steps_per_round = sum(self.client_steps[: self.clients_per_round])
            return range(0, steps_per_round * self.count + 1, steps_per_round)
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
        """Whether the number of steps of a round depends on the clients that take part."""
        return self.clients_per_round < len(self.clients) and len(set(self.client_steps)) > 1

    @property
    def summary(self) -> dict[str, int]:
        """The numbers that a record and a dry run contain."""
        return {
            "count": self.count,
            "clients": len(self.clients),
            "taking": self.clients_per_round,
            "passes": self.passes,
            "steps": self.round_starts[-1],
        }

    def __str__(self) -> str:
        """The rounds as a phrase for people."""
        return f"{self.count}, with {self.clients_per_round} of {len(self.clients)} clients in each"

    # ---- clients of a round -------------------------------------------------------------------
    def choose_clients(self, number: int) -> list[int]:
        """Choose the clients that take part in a round.

        Args:
            number: The number of the round.

        Returns:
            The numbers of the clients, in ascending order.
        """
        if self.clients_per_round == len(self.clients):
            return list(range(self.clients_per_round))
        shuffled = shuffle_indices(len(self.clients), f"clients {self.order.seed} {number}")[
            : self.clients_per_round
        ]
        return sorted(shuffled.tolist())

    @cached_property
    def client_workers(self) -> list[int]:
        """The worker of each client, the same in all rounds.

        The largest client is assigned first. Each client goes to the worker with the fewest samples
        at that time.
        """
        sizes = [len(samples) for samples in self.clients]
        loads = [(0, worker) for worker in range(self.workers)]
        workers = [0] * len(sizes)
        for client in sorted(range(len(sizes)), key=lambda client: (-sizes[client], client)):
            load, worker = loads[0]
            heapq.heapreplace(loads, (load + sizes[client], worker))
            workers[client] = worker
        return workers

    def plan_turns(self, number: int) -> list[ClientTurn]:
        """List the work of each client of a round.

        Args:
            number: The number of the round.

        Returns:
            One entry for each client that takes part.
        """
        turns = list[ClientTurn]()
        first = 0
        step = self.round_starts[number]
        for client in self.choose_clients(number):
            turns.append(ClientTurn(client, first, step, self.count_client_steps(client)))
            first = first + self.passes * len(self.clients[client])
            step = step + self.count_client_steps(client)
        return turns

    def count_positions(self, number: int) -> int:
        """Count the positions in the order of a round.

        These are the samples of its clients, counted as often as the clients pass over them.

        Args:
            number: The number of the round.

        Returns:
            The number of positions.
        """
        return self.passes * sum(
            len(self.clients[client]) for client in self.choose_clients(number)
        )

    # ---- order of samples ---------------------------------------------------------------------
    def iterate_client_batches(self, turn: ClientTurn, number: int) -> Iterator[ClientBatch]:
        """Iterate over the batches of a client in a round.

        The samples of client 0 are shuffled as in serial training. A training with one client
        therefore equals serial.

        Args:
            turn: The work of the client in this round.
            number: The number of the round.

        Yields:
            The batches, in order.
        """
        client_indices = self.clients[turn.client]
        first = turn.first_position
        for epoch in range(number * self.passes, (number + 1) * self.passes):
            suffix = f" of client {turn.client}" if turn.client else ""
            shuffled = client_indices[
                shuffle_indices(len(client_indices), f"order {self.order.seed} {epoch}{suffix}")
            ].tolist()
            for start in range(0, len(shuffled), self.order.batch):
                batch = shuffled[start : start + self.order.batch]
                yield ClientBatch(epoch, range(first + start, first + start + len(batch)), batch)
            first += len(shuffled)


# ---- samples of a client ---------------------------------------------------------------------
def assign_samples(
    samples: int, clients: int, seed: int, labels: Any = None, alpha: float | None = None
) -> tuple[Any, ...]:
    """Assign each sample to one client.

    The sizes of any two clients differ by at most one sample.

    Args:
        samples: The number of samples.

        clients: The number of clients.

        seed: The seed of the assignment.

        labels: The class of each sample; needed if alpha is given.

        alpha: None assigns samples at random. Otherwise each client draws its mix of classes from a
            Dirichlet distribution around the mix of all samples, with concentration alpha. A class
            that has no samples left is replaced by others (Hsu, Qi & Brown 2019, arXiv 1909.06335).

    Returns:
        For each client the indices of its samples, in ascending order.
    """
    order = shuffle_indices(samples, f"samples of clients {seed}")
    sizes = [samples // clients + (client < samples % clients) for client in range(clients)]
    if alpha is None:
        return tuple(
            numpy.sort(indices) for indices in numpy.split(order, numpy.cumsum(sizes)[:-1])
        )
    classes, class_numbers = numpy.unique(labels[order], return_inverse=True)
    # for each class its samples, in the order of `order`
    remaining = [order[class_numbers == number] for number in range(len(classes))]
    shares = numpy.bincount(class_numbers) / samples
    random = make_random_state(f"classes of clients {seed}")
    assigned = []
    for size in sizes:
        mix = draw_dirichlet(random, alpha * shares)
        chosen = list[Any]()
        while size:
            available = numpy.array([len(each) for each in remaining])
            mix = numpy.where(available > 0, mix, 0.0)
            # if no sample of the drawn classes is left, take from all classes by what is left
            mix = mix / mix.sum() if mix.sum() > 0 else available / available.sum()
            for number, count in enumerate(numpy.minimum(random.multinomial(size, mix), available)):
                chosen.append(remaining[number][:count])
                remaining[number] = remaining[number][count:]
                size = size - int(count)
        assigned.append(numpy.sort(numpy.concatenate(chosen)))
    return tuple(assigned)


def draw_dirichlet(random: Any, alphas: Any) -> Any:
    """Draw from a Dirichlet distribution, computed with logarithms.

    With small alphas, the gamma numbers themselves would all be 0.

    Args:
        random: The RandomState to draw from.
        alphas: The concentrations.

    Returns:
        The shares; they add up to 1.
    """
    gammas = (
        numpy.log(random.standard_gamma(alphas + 1))
        + numpy.log(1.0 - random.random_sample(len(alphas))) / alphas
    )
    mix = numpy.exp(gammas - gammas.max())
    return mix / mix.sum()


def read_labels(dataset: Any, requested: str, indices: Any = None) -> Any:
    """Read the classes of samples.

    They are taken from `targets` of the dataset, if it has them; otherwise the samples are read one
    by one.

    Args:
        dataset: The dataset.
        requested: The strategy as written, for messages.
        indices: The samples to read, or None for all.

    Returns:
        An array of whole numbers.

    Raises:
        Refused: A target is not a class.
    """
    indices = numpy.arange(len(dataset)) if indices is None else indices
    # samples outside of the subset belong to no client
    if type(dataset).__getitem__ is Subset.__getitem__:
        return read_labels(
            dataset.dataset, requested, numpy.asarray(dataset.indices, dtype=numpy.int64)[indices]
        )
    if (targets := _read_target_array(dataset)) is not None:
        return targets[indices]
    with keep_generators():
        return numpy.array(
            [
                label
                for start in range(0, len(indices), LABELS_PER_READ)
                for label in _read_targets(
                    dataset, indices[start : start + LABELS_PER_READ].tolist(), requested
                )
            ]
        )


def _read_target_array(dataset: Any) -> Any:
    """The targets that a dataset stores together, or None if they are not a class per sample."""
    is_pair_dataset = (
        type(dataset).__getitem__ is TensorDataset.__getitem__ and len(dataset.tensors) == 2
    )
    # numpy raises on rows of unequal length
    with contextlib.suppress(TypeError, ValueError):
        targets = _convert_to_array(
            dataset.tensors[1] if is_pair_dataset else getattr(dataset, "targets", None)
        )
        if targets.shape == (len(dataset),) and targets.dtype.kind in INTEGER_KINDS:
            return targets
    return None


def _convert_to_array(value: Any) -> Any:
    return numpy.asarray(value.cpu() if isinstance(value, Tensor) else value)


def _read_targets(dataset: Any, indices: list[int], requested: str) -> list[int]:
    """The classes of some samples, read from the samples themselves."""
    try:
        is_batch_dataset = getattr(dataset, "whole_batches", False)
        samples = (
            ((None, each) for each in _convert_to_array(dataset[indices][1]))
            if is_batch_dataset
            else map(dataset.__getitem__, indices)
        )
        return list(map(_read_class, samples))
    except Exception as error:
        raise Refused(
            f"{requested} divides samples by their class, which cannot be read for samples "
            f"{indices[0]} to {indices[-1]}: {describe_error(error)}; give split=even, or targets "
            "that are classes"
        ) from error


def _read_class(sample: Any) -> int:
    """The class of one sample: its second element, or an entry of a dict named in LABEL_KEYS."""
    target = (
        sample[1]
        if not isinstance(sample, Mapping)
        else next((sample[name] for name in LABEL_KEYS if name in sample), None)
    )
    value = _convert_to_array(target)
    if value.size != 1 or value.dtype.kind not in INTEGER_KINDS:
        if isinstance(sample, Mapping) and target is None:
            raise ValueError(
                f"a sample is a dict without {' or '.join(map(repr, LABEL_KEYS))}, so it has no "
                "class"
            )
        raise ValueError(
            f"a target is {value.size} value(s) of type {value.dtype}, not one whole number"
        )
    return int(value.reshape(-1)[0])
