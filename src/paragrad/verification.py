"""Is it the same training? A strategy's gradients and parameters beside serial's, step by step, from the same start.

Difference of a tensor = max|a - b| / max(max|b|, 1e-6 x the largest of its kind (gradients, parameters) in that step);
of a run: the largest over tensors and steps, with the tensor's name. Rank 0 runs the reference in lockstep: serial with the
same micro-batches (each the union of all ranks' parts). The replicas must be equal to the bit, or that is the difference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paragrad.datasets.loading import parted
from paragrad.datasets.order import Order
from paragrad.errors import StepFailed
from paragrad.job import Job, opened
from paragrad.settings import Settings
from paragrad.strategy import Serial, Strategy
from paragrad.trainer import Trainer
from paragrad.world import World

STEPS = 20
BOUND = 1e-10           # of an exact strategy in float64
UNEQUAL = "are not equal bit for bit"       # said of replicas; by it a difference is told from a run that failed


@dataclass(frozen=True)
class Difference:
    """The largest difference, the tensor and the step where it is; the largest of every tensor; who left the bound first."""
    value: float
    tensor: str | None = None
    step: int | None = None
    tensors: dict[str, float] = field(default_factory=dict, compare=False)
    first: tuple[str, int] | None = None            # (tensor, step) of the first difference above BOUND

    def __str__(self) -> str:
        return f"{self.value:.1e}" + (f" at {self.tensor}, step {self.step}" if self.tensor else "")


def difference(world: World, job: Job, strategy: Strategy, settings: Settings | None = None, *, steps: int = STEPS,
               dtype: torch.dtype = torch.float64, report: Callable[[dict[str, Any]], None] | None = None) -> Difference:
    """Train `steps` steps of a resolved strategy beside serial. Collective; every rank gets the answer.

    report: told {"step", "steps", "difference"} after every step, on rank 0.
    """
    comparison = None
    for comparison in _lockstep(world, job.replace(dtype=dtype), strategy, settings or Settings(), steps):
        comparison.take()
        if report is not None:
            report({"step": comparison.reference.steps, "steps": steps, "difference": comparison.worst.value})
    found: Difference = world.agreed(comparison and comparison.worst)
    return found


def distances(world: World, job: Job, strategy: Strategy, settings: Settings, steps: int) -> list[float]:
    """The difference of the parameters from serial's after every step, in the job's own type. Collective."""
    values: list[float] = []
    for comparison in _lockstep(world, job, strategy, settings, steps, replicas=False):
        ours, theirs = comparison.trainer.parameters, comparison.reference.parameters
        values.append(max(differences(ours, theirs).values()))
    found: list[float] = world.agreed(values)
    return found


def _lockstep(world: World, job: Job, strategy: Strategy, settings: Settings, steps: int,
              replicas: bool = True) -> Iterator[Comparison]:
    """Rank 0's comparison after every step that strategy and reference made; on the other ranks nothing."""
    train = opened(job.train, settings.folder)
    trainer = Trainer.of_job(world, job, strategy, overlap=settings.overlap, sabotage=settings.sabotage,
                             reverse=settings.reverse, machine=settings.known_machine, unchecked=True)
    comparison, data = None, None
    places = first_batches(job.order(len(train)), steps)
    if world.rank == 0:
        alone = World(device=world.device)
        comparison = Comparison(trainer, Trainer.of_job(alone, job, Serial(), like=strategy))
        data = comparison.reference.batches_at(train, job.order(len(train)), places)
    try:
        for fetched in trainer.batches_at(train, job.order(len(train)), places, settings.loaders):
            trainer.step(*parted(fetched))
            if comparison is not None and comparison.reference.steps == 0:
                _check_apart(comparison.reference)
            if replicas:
                check_replicas(world, trainer)
            if comparison is not None and data is not None:
                comparison.reference.step(*parted(next(data)))
                yield comparison
            world.barrier()                     # shared gradients are looked at until here
    finally:
        trainer.close()


def _check_apart(reference: Trainer) -> None:
    """The strategy's step left nothing in the reference's model. Raises StepFailed."""
    if any(parameter.grad is not None for parameter in reference.model.parameters()):
        raise StepFailed("the loss reads the model from outside, and of two models in one process it reads the one built "
                         "last, so that nothing can be compared; let the model return what its loss needs of it, such as "
                         "(output, penalty)")


def first_batches(order: Order, steps: int) -> list[tuple[int, range]]:
    """(epoch, batch) of the steps that are compared: the first ones, and for the last the epoch's last, short batch."""
    per_epoch = list(order.batches())
    chosen = [(step // len(per_epoch), per_epoch[step % len(per_epoch)]) for step in range(steps)]
    if steps < len(per_epoch):
        chosen[-1] = (0, per_epoch[-1])
    return chosen


class Comparison:
    """The largest difference so far of a trainer's gradients, parameters and buffers from the reference's.

    In a model with batch norm, a bias before it has a gradient of exactly zero, of which only rounding noise is computed:
    a gradient is noise where it is below 1e3 eps of the step's largest on both sides, and two such tensors are equal.
    Where the optimizer moreover divides by a gradient's own size, the noise is scaled up to whole updates (which reach
    the running mean, not the loss), so parameters are compared only where gradients stayed above that, and no buffers.
    """

    def __init__(self, trainer: Trainer, reference: Trainer) -> None:
        self.trainer, self.reference = trainer, reference
        self.worst = Difference(0.0)
        self.noise = 0.0
        self.masks: dict[str, Tensor] | None = None

    def take(self) -> None:
        """Compare after both made the same step."""
        reference = self.reference
        if not self.noise and reference.batch_norm.computed:
            self.noise = 1e3 * torch.finfo(reference.dtype).eps
            if not isinstance(reference.optimizer, torch.optim.SGD):
                self.masks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in reference.parameters.items()}
        gradients, expected = self.trainer.gradients(), self.reference.gradients()
        self._kind("gradient of ", gradients, expected, self.noise)
        self._narrow(expected)
        ours, theirs = self.trainer.state(), self.reference.state()
        self._kind("", self._seen(ours), self._seen({name: theirs[name] for name in ours}))

    def _kind(self, kind: str, ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None],
              noise: float = 0.0) -> None:
        step = self.reference.steps - 1
        for name, value in differences(ours, theirs, noise).items():
            tensors = {**self.worst.tensors, kind + name: max(value, self.worst.tensors.get(kind + name, 0.0))}
            first = self.worst.first or ((kind + name, step) if value > BOUND else None)
            place = (value, kind + name, step) if value > self.worst.value else (
                self.worst.value, self.worst.tensor, self.worst.step)
            self.worst = Difference(*place, tensors, first)

    def _narrow(self, gradients: Mapping[str, Tensor | None]) -> None:
        if self.masks is None:
            return
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        largest = max(float(gradient.abs().max()) for gradient in present.values())
        for name, gradient in present.items():
            self.masks[name] &= gradient.abs() > self.noise * largest

    def _seen(self, state: dict[str, Tensor]) -> dict[str, Tensor | None]:
        if self.masks is None:
            return dict(state)
        return {name: state[name][mask] for name, mask in self.masks.items() if mask.any()}


def differences(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None],
                noise: float = 0.0) -> dict[str, float]:
    """The difference of every tensor of a kind; infinite where one side has none, or is not finite.

    noise: the share of the largest of the kind below which both sides count as zero.
    """
    largest = max((_most(tensor) for tensor in theirs.values() if tensor is not None), default=0.0)
    return {name: _difference(ours[name], reference, 1e-6 * largest, noise * largest)
            for name, reference in theirs.items()}


def _difference(ours: Tensor | None, reference: Tensor | None, floor: float, noise: float) -> float:
    if ours is None or reference is None:
        return 0.0 if ours is reference else math.inf
    if torch.equal(ours, reference):
        return 0.0
    if not (torch.isfinite(ours).all() and torch.isfinite(reference).all()):
        return math.inf
    if max(_most(ours), _most(reference)) < noise:
        return 0.0
    scale = max(_most(reference), floor)
    return _most(ours.detach() - reference.detach()) / scale if scale else math.inf


def _most(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def check_replicas(world: World, trainer: Trainer) -> None:
    """All ranks hold the same bits, or StepFailed names the first tensor that differs. Collective."""
    state = trainer.state()
    digests = [hashlib.sha256(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()).digest()
               for tensor in state.values()]
    mine = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(len(digests), -1)
    for rank, theirs in enumerate(world.gathered(mine)):
        unequal = (mine != theirs).any(dim=1)
        if unequal.any():
            raise StepFailed(f"the replicas of rank {world.rank} and rank {rank} {UNEQUAL}",
                             step=trainer.steps - 1, tensor=list(state)[int(unequal.nonzero()[0])])
