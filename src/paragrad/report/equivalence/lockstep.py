"""Is it the same training? A strategy's gradients, parameters and buffers beside serial's, step
by step, from the same start.

Rank 0 runs the reference and its rounding twin in lockstep (`reference.py`), over the batches
that tell most (`picking.py`). The difference of a run is the largest over tensors and steps,
with the tensor's name (`differing.py`). A tensor is another one where it differs by more than
the bound *and*, by the largest of its kind, by more than 4 times what the twin has shown until
then: rounding that a model magnifies is no fault, and nobody can hide behind chaos that begins
later. The replicas must be equal to the bit, or that is the difference.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paragrad.datasets.loading import Dataset, parted
from paragrad.errors import StepFailed
from paragrad.jobs.job import Job, opened
from paragrad.report.certificate import BOUND, Difference
from paragrad.report.equivalence.batch_selection import first_batches, telling_batches
from paragrad.report.equivalence.deviation import (
    FLOOR,
    Apart,
    Tensors,
    apart,
    differences,
    each_apart,
    most,
)
from paragrad.report.equivalence.reference import WHOLE, Reference, precision
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.first_step.setup import dismiss, serve
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer

STEPS = 20
INSIDE = "in float64 it differs, and there the model computes in a coarser type inside"
FEW = 8  # eps: rounding that is never asked about, and the bound in float32
TWINS = 4  # times the twin's: another way of rounding
# and how their tensors are named
GRADIENT = "gradient of "
PARAMETER = ""
KINDS = (GRADIENT, PARAMETER)


def difference(
    world: World,
    job: Job,
    strategy: Strategy,
    settings: Settings | None = None,
    *,
    steps: int = STEPS,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Difference:
    """Train `steps` steps of a resolved strategy beside serial, in float64 where the job can.
    Collective; every rank gets the answer.

    report: told {"step", "steps", "difference"} after every step, on rank 0.
    """
    settings = settings or Settings()
    strategy = strategy.verified
    train = opened(job.train, settings.folder)
    order = job.order(len(train))
    known = None
    if world.rank == 0:
        known = (
            telling_batches(job.samples(train), order, steps, strategy.division),
            *precision(job, train, first_batches(order, 1)[0], world.device),
        )
    places, dtype, why = world.agreed(known)
    for kind, because in ((dtype, why), (torch.float32, INSIDE)):
        comparison = None
        for comparison in _lockstep(
            world, job.replace(dtype=kind), strategy, settings, train, places
        ):
            comparison.take()
            if report is not None:
                report(
                    {
                        "step": comparison.reference.serial.steps,
                        "steps": steps,
                        "difference": comparison.worst.value,
                    }
                )
        found, coarsest = world.agreed(
            comparison
            and (
                replace(comparison.worst, why=because, reference=str(comparison.reference)),
                comparison.reference.serial.coarsest,
            )
        )
        if found.first is None or kind != torch.float64 or coarsest <= torch.finfo(kind).eps:
            break
    return found  # type: ignore[no-any-return]


def distances(
    world: World, job: Job, strategy: Strategy, settings: Settings, steps: int
) -> list[float]:
    """The difference of the parameters from serial's after every step, in the job's own type.
    Collective.
    """
    values: list[float] = []
    strategy = strategy.verified
    train = opened(job.train, settings.folder)
    places = first_batches(job.order(len(train)), steps)
    for comparison in _lockstep(world, job, strategy, settings, train, places, same=False):
        serial = comparison.reference.serial.parameters
        values.append(
            max(differences({name: comparison.state[name] for name in serial}, serial).values())
        )
    found: list[float] = world.agreed(values)
    return found


def _lockstep(
    world: World,
    job: Job,
    strategy: Strategy,
    settings: Settings,
    train: Dataset,
    places: list[tuple[int, range]],
    same: bool = True,
) -> Iterator[Comparison]:
    """Rank 0's comparison after every step that strategy and reference made; on the other ranks
    nothing.

    same: whether it is the same training is asked: with a rounding twin, and of all replicas.
    """
    trainer = Trainer.of_job(world, job, strategy, settings, unchecked=True)
    order = job.order(len(train))
    comparison = None
    trainer.batch_size = min(order.batch, order.samples)
    if world.rank == 0:
        comparison = Comparison(
            trainer, Reference(world.device, job, strategy, train, places, twin=same)
        )
    try:
        if trainer.serves:
            serve(trainer)
            return
        for fetched in trainer.batches_at(train, order, places, settings.loaders):
            trainer.step(*parted(fetched))
            if comparison is not None and comparison.reference.serial.steps == 0:
                _check_apart(comparison.reference)
            if same and strategy.promise.replicas_equal:
                check_replicas(trainer)
            # of a cut model by all ranks together
            made = trainer.gradients(), trainer.state()
            if comparison is not None:
                comparison.gradients, comparison.state = made
                comparison.reference.step()
                yield comparison
            trainer.world.barrier()  # shared gradients are looked at until here
        dismiss(trainer)
    finally:
        trainer.close()


def _check_apart(reference: Reference) -> None:
    """The strategy's step left nothing in the reference's models. Raises StepFailed."""
    if any(
        parameter.grad is not None
        for trainer in reference.trainers
        for parameter in trainer.model.parameters()
    ):
        raise StepFailed(
            "the loss reads the model from outside, and of two models in one process it reads the "
            "one built "
            "last, so that nothing can be compared; let the model return what its loss needs of "
            "it, such as "
            "(output, penalty)"
        )


class Comparison:
    """The largest difference so far of a trainer's gradients, parameters and buffers from the
    reference's.

    In a model with batch norm, a bias before it has a gradient of exactly zero, of which only
    rounding noise is computed: a gradient is noise where it is below 1e3 eps of the step's
    largest on both sides, and two such tensors are equal. Where the optimizer moreover divides
    by a gradient's own size, the noise is scaled up to whole updates (which reach the running
    statistics, not the loss): parameters are compared only where gradients stayed above that,
    and the running statistics, known by name, not at all.
    """

    def __init__(self, trainer: Trainer, reference: Reference) -> None:
        self.trainer = trainer
        self.reference = reference
        self.gradients: Tensors = {}  # of the trainer, after a step
        self.state: Mapping[str, Tensor] = {}
        serial = reference.serial
        self.eps = torch.finfo(serial.dtype).eps
        self.worst = Difference(
            0.0,
            dtype=str(serial.dtype).removeprefix("torch."),
            bound=BOUND if serial.dtype == torch.float64 else FEW * self.eps,
        )
        self.rounding: dict[str, float] = {}  # the twin's largest by kind, until now
        self.noise = 0.0 if reference.normed is None else 1e3 * self.eps
        self.masks: dict[str, Tensor] | None = None
        if self.noise and not isinstance(serial.optimizer, torch.optim.SGD):
            self.masks = {
                name: torch.ones_like(tensor, dtype=torch.bool)
                for name, tensor in serial.parameters.items()
            }

    def take(self) -> None:
        """Compare after all made the same step."""
        serial = self.reference.serial
        twin = self.reference.twin
        assert twin is not None
        if self.reference.apart is not None:
            self._note(WHOLE, Apart(self.reference.apart, self.reference.apart), self.noise)
        expected = serial.gradients()
        self._kind(
            GRADIENT,
            apart(self.gradients, expected, self.noise),
            apart(twin.gradients(), expected, self.noise),
        )
        self._narrow(expected)
        ours = self.state
        theirs = serial.state()
        twins = twin.state()
        seen = self._seen(theirs)
        self._kind(PARAMETER, apart(self._seen(ours), seen), apart(self._seen(twins), seen))
        floor = FLOOR * most(serial.parameters)
        buffers = {
            name: theirs[name]
            for name in ours
            if name not in serial.parameters and not self._excused(name)
        }
        moved = each_apart(twins, buffers, floor)
        for name, found in each_apart(ours, buffers, floor).items():
            self._kind("", {name: found}, {name: moved[name]}, pool=name)

    def _kind(
        self,
        prefix: str,
        found: Mapping[str, Apart],
        twins: Mapping[str, Apart],
        pool: str | None = None,
    ) -> None:
        """One kind of tensors of this step, and the same of the twin. Every buffer is a kind of
        its own, beside what rounding does to gradients and parameters.
        """
        pool = prefix if pool is None else pool
        rounding = max([self.rounding.get(pool, 0.0), *(each.pooled for each in twins.values())])
        self.rounding[pool] = rounding
        if pool not in KINDS:
            rounding = max(rounding, *(self.rounding[kind] for kind in KINDS))
        for name, each in twins.items():
            told = {
                **self.worst.twins,
                prefix + name: max(each.own, self.worst.twins.get(prefix + name, 0.0)),
            }
            self.worst = replace(self.worst, twins=told, twin=max(self.worst.twin, each.own))
        allowed = self._allowed(rounding)
        for name, each in found.items():
            self._note(prefix + name, each, allowed)

    def _allowed(self, rounding: float) -> float:
        """What rounding may do where it does so much to the twin. Both are magnified by a
        product over layers and steps of which each sees factors of its own; so the larger it
        is, the more the two products scatter (seen: 98 times).
        """
        allowed = max(FEW * self.eps, TWINS * rounding * max(1.0, rounding / self.eps) ** 0.25)
        if allowed < 1.0:
            return allowed
        if self.worst.chaotic is None:
            self.worst = replace(self.worst, chaotic=self.reference.serial.steps - 1)
        # another way altogether: it says no more
        return rounding if math.isinf(rounding) else sys.float_info.max

    def _note(self, name: str, found: Apart, allowed: float) -> None:
        worst = self.worst
        step = self.reference.serial.steps - 1
        tensors = {**worst.tensors, name: max(found.own, worst.tensors.get(name, 0.0))}
        if found.own > worst.value:
            worst = replace(worst, value=found.own, tensor=name, step=step)
        if found.own > worst.bound and worst.first is None:
            missed = found.pooled > allowed
            worst = replace(
                worst,
                first=(name, step) if missed else None,
                allowed=allowed if missed else max(worst.allowed, allowed),
            )
        self.worst = replace(worst, tensors=tensors)

    def _excused(self, name: str) -> bool:
        return self.masks is not None and name in (self.reference.normed or ())

    def _narrow(self, gradients: Tensors) -> None:
        if self.masks is None:
            return
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        largest = most(present)
        for name, gradient in present.items():
            self.masks[name] &= gradient.abs() > self.noise * largest

    def _seen(self, state: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """The parameters that can be compared."""
        if self.masks is None:
            return {name: state[name] for name in self.reference.serial.parameters}
        return {name: state[name][mask] for name, mask in self.masks.items() if mask.any()}


def check_replicas(trainer: Trainer) -> None:
    """All ranks that hold the same hold the same bits, or StepFailed names the first tensor
    that differs. Collective.
    """
    if unequal := trainer.held.unequal(trainer.local(), trainer.world):
        first, other, tensor = unequal
        raise StepFailed(
            f"the replicas of rank {first} and rank {other} are not equal bit for bit",
            step=trainer.steps - 1,
            tensor=tensor,
            differs=True,
        )
