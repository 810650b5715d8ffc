"""Replicas of a model in one process that are averaged along a schedule. They show what an exchange
does to training, without a network.

The parameters of all replicas are the rows of one matrix. A schedule is interpreted on the rows,
and its messages contain the same values as between ranks. Gradients or weights are averaged. Bugs
can be planted, to show what they cost and which check finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector

from paragrad.datasets.mnist import MnistImages
from paragrad.executors.interpreter import interpret_schedule
from paragrad.executors.proof import prove_schedule
from paragrad.jobs.job import Job
from paragrad.schedules.actions import (
    Collective,
    Compute,
    Recv,
    ScheduleError,
    Send,
    Slot,
    expand_slot,
    split_evenly,
)
from paragrad.schedules.fault_injection import inject_fault

REST = "rest left out"
REUSED = "buffer reused"
TWICE = "mean twice"
STARTS = "no common start"
BUGS = {
    REST: "the last n mod p elements are in no chunk: never exchanged",
    REUSED: "one buffer for all sends, filled again before the message in it has gone",
    TWICE: "the exchange divides by p, and its caller again",
    STARTS: "every replica begins with weights of its own",
}


class Numbers:
    """The vectors of all ranks, one row per rank, on which a schedule is interpreted."""

    def __init__(self, rows: np.ndarray, parts: int) -> None:
        self.rows = rows
        self.parts = split_evenly(rows.shape[1], parts)

    def view_slot(self, rank: int, slot: Slot) -> np.ndarray:
        parts = expand_slot(slot)
        return self.rows[rank, self.parts[parts[0]].start : self.parts[parts[-1]].stop]

    def read(self, rank: int, send: Send) -> np.ndarray:
        return self.view_slot(rank, send.slot).copy()

    def write(self, rank: int, recv: Recv, payload: np.ndarray) -> None:
        mine = self.view_slot(rank, recv.slot)
        if recv.add:
            mine += payload
        else:
            mine[:] = payload

    def compute(self, rank: int, action: Compute) -> None:
        raise AssertionError(f"an exchange only adds, but this one has {action}")


class ReusedBuffer(Numbers):
    """The bug of the reused buffer. Each rank sends from one buffer, and fills it again although
    its last message may not be received yet.
    """

    def __init__(self, rows: np.ndarray, parts: int) -> None:
        super().__init__(rows, parts)
        self.buffers = np.empty_like(rows)

    def read(self, rank: int, send: Send) -> np.ndarray:
        piece = self.view_slot(rank, send.slot)
        buffer = self.buffers[rank, : len(piece)]
        buffer[:] = piece
        return buffer


def average(rows: Tensor, schedule: Collective, bug: str | None = None) -> None:
    """Replace every row by the mean of all rows."""
    size, length = rows.shape
    reach = length - length % size if bug == REST else length
    reached = rows[:, :reach]
    interpret_schedule(
        schedule.program,
        size,
        (ReusedBuffer if bug == REUSED else Numbers)(reached.numpy(), schedule.parts(size)),
    )
    reached /= size * size if bug == TWICE else size


@dataclass
class Training:
    """The settings of a training of replicas. batch: samples of each replica in a step."""

    job: Job
    count: int
    schedule: Collective
    averaged: Literal["gradients", "weights"] = "gradients"
    every: Literal["batch", "epoch"] = "batch"
    batch: int = 16
    bug: str | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32


class Replicas:
    """All replicas of a job's model under its optimizer."""

    def __init__(self, how: Training) -> None:
        self.how = how
        self.model = self._build_model(how.seed)
        starts = [
            self._build_model(how.seed + (rank if how.bug == STARTS else 0))
            for rank in range(how.count)
        ]
        self.rows = nn.Parameter(
            torch.stack([parameters_to_vector(each.parameters()).detach() for each in starts])
        )
        self.optimizer = how.job.optimizer([self.rows])
        self.gradients = vmap(grad(partial(compute_loss, self.model, how.job)))

    def _build_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.how.job.model().to(self.how.dtype)

    def step(self, images: Tensor, labels: Tensor, last: bool) -> None:
        """Make one step.

        images: [replicas, batch, ...].
        last: whether the step is the last one of its epoch.
        """
        how = self.how
        self.rows.grad = self.gradients(self.rows.detach(), images.to(how.dtype), labels)
        if how.averaged == "gradients":
            average(self.rows.grad, how.schedule, how.bug)
        self.optimizer.step()
        if how.averaged == "weights" and (last or how.every == "batch"):
            average(self.rows.detach(), how.schedule, how.bug)

    def measure_accuracy(self, dataset: MnistImages, rank: int = 0) -> float:
        """Return the accuracy of a replica on a data set, in per cent."""
        with torch.no_grad():
            images, labels = dataset[torch.arange(len(dataset))]
            found = functional_call(
                self.model,
                name_parameters(self.model, self.rows[rank]),
                (images.to(self.how.dtype),),
            )
        return 100 * float((found.argmax(1) == labels).float().mean())

    def has_equal_rows(self) -> bool:
        return bool((self.rows == self.rows[0]).all())


def name_parameters(model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a model as views of a vector, by name."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    return {
        name: piece.view_as(parameter)
        for (name, parameter), piece in zip(
            model.named_parameters(), vector.split(sizes), strict=True
        )
    }


def compute_loss(model: nn.Module, job: Job, vector: Tensor, images: Tensor, labels: Tensor) -> Any:
    return job.loss(functional_call(model, name_parameters(model, vector), (images,)), labels)


def draw_batches(
    dataset: MnistImages, how: Training, epochs: int
) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
    """Yield shuffled global batches as (epoch, images [replicas, batch, ...], labels, whether the
    batch is the last one of its epoch). Incomplete batches are left out.
    """
    generator = torch.Generator().manual_seed(how.seed)
    together = how.count * how.batch
    for epoch in range(epochs):
        order = torch.randperm(len(dataset), generator=generator)
        many = len(order) // together
        for number in range(many):
            images, labels = dataset[order[number * together : (number + 1) * together]]
            yield (
                epoch,
                images.unflatten(0, (how.count, how.batch)),
                labels.unflatten(0, (how.count, how.batch)),
                number == many - 1,
            )


def train_replicas(
    how: Training,
    train: MnistImages,
    test: MnistImages,
    epochs: int,
    told: Callable[[int, float], None],
) -> dict[str, Any]:
    """Train, and return the accuracy of replica 0 after every epoch, and whether all replicas are
    equal at the end.

    told: a function that is called with (epoch, accuracy) after every epoch.
    """
    replicas = Replicas(how)
    accuracies = []
    for epoch, images, labels, last in draw_batches(train, how, epochs):
        replicas.step(images, labels, last)
        if last:
            accuracies.append(replicas.measure_accuracy(test))
            told(epoch, accuracies[-1])
    return {"accuracies": accuracies, "equal": replicas.has_equal_rows()}


def measure_serial_difference(how: Training, train: MnistImages, steps: int = 20) -> float:
    """Return the largest difference of a replica's parameters from serial's, over the largest
    parameter, after some steps in float64.

    `paragrad verify` uses the same number. Serial is one replica that computes the whole batch.
    """
    ours = Replicas(Training(**{**vars(how), "dtype": torch.float64}))
    alone = Replicas(
        Training(
            how.job,
            1,
            how.schedule,
            batch=how.batch * how.count,
            seed=how.seed,
            dtype=torch.float64,
        )
    )
    for _, (_, images, labels, _) in zip(
        range(steps), draw_batches(train, how, steps), strict=False
    ):
        ours.step(images, labels, last=False)
        alone.step(images.flatten(0, 1)[None], labels.flatten(0, 1)[None], last=False)
    return float((ours.rows - alone.rows).detach().abs().max() / alone.rows.detach().abs().max())


def run_checks(how: Training, train: MnistImages) -> dict[str, Any]:
    """Run the checks that can find a bug, and return their results.

    proof: the error of the schedule's proof, or None. Of the bugs, only "mean twice" can be planted
    in a schedule.
    sum: the largest error of a mean of whole numbers.
    serial: the difference from serial, if gradients are averaged.
    """
    planted = "mean_twice" if how.bug == TWICE else None
    rows = torch.randint(
        -1000, 1000, (how.count, 10 * how.count + 7), generator=torch.Generator().manual_seed(1)
    ).double()
    expected = rows.mean(0)
    average(rows, how.schedule, how.bug)
    try:
        prove_schedule(inject_fault(how.schedule, planted), how.count, rows.shape[1])
        proof = None
    except ScheduleError as error:
        proof = str(error)
    return {
        "proof": proof,
        "sum": float((rows - expected).abs().max()),
        "serial": measure_serial_difference(how, train) if how.averaged == "gradients" else None,
    }


# ---- rounding --------------------------------------------------------------------------------
def measure_rounding(
    job: Job, train: MnistImages, count: int, schedules: dict[str, Collective], batch: int
) -> dict[str, dict[str, float]]:
    """Return the rounding errors of the mean gradients of one batch, compared with float64.

    The errors are in units in the last place: the median and the 99.9 % quantile. The third number
    is the largest error over the largest gradient. They are computed for serial, for serial with
    the batch in reverse order, and for `count` replicas with each schedule.
    """

    def compute_gradients(how: Training, images: Tensor, labels: Tensor) -> Tensor:
        replicas = Replicas(how)
        return replicas.gradients(replicas.rows.detach(), images.to(how.dtype), labels)

    images, labels = train[torch.arange(batch * count)]
    any_schedule = next(iter(schedules.values()))
    exact = compute_gradients(
        Training(job, 1, any_schedule, dtype=torch.float64), images[None], labels[None]
    )[0]
    alone = Training(job, 1, any_schedule)
    found = {
        "serial": compute_gradients(alone, images[None], labels[None])[0],
        "serial, batch in reverse order": compute_gradients(
            alone, images.flip(0)[None], labels.flip(0)[None]
        )[0],
    }
    cut = (count, batch)
    shares = compute_gradients(
        Training(job, count, any_schedule), images.unflatten(0, cut), labels.unflatten(0, cut)
    )
    for name, schedule in schedules.items():
        rows = shares.clone()
        average(rows, schedule)
        found[name] = rows[0]
    last = np.spacing(exact.abs().float().numpy())
    errors = {name: np.abs(each.double().numpy() - exact.numpy()) for name, each in found.items()}
    return {
        name: {
            "median": float(np.median(error / last)),
            "most": float(np.quantile(error / last, 0.999)),
            "relative": float(error.max() / exact.abs().max()),
        }
        for name, error in errors.items()
    }
