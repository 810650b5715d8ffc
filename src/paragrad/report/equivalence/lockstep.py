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

from paragrad.datasets.loading import Dataset, separate_target
from paragrad.errors import StepFailed
from paragrad.jobs.job import Job, open_dataset
from paragrad.report.certificate import EXACT_BOUND, Difference
from paragrad.report.equivalence.batch_selection import list_first_batches, select_compared_batches
from paragrad.report.equivalence.deviation import (
    FLOOR,
    Deviation,
    NamedTensors,
    find_largest_value,
    list_tensor_deviations,
    measure_buffer_deviations,
    measure_deviations,
)
from paragrad.report.equivalence.reference import (
    WHOLE_BATCH_LOSS,
    SerialReference,
    choose_reference_dtype,
)
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.first_step.setup import dismiss_run_servers, run_parameter_server
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer

COMPARED_STEPS = 20
COARSE_MODEL = "in float64 it differs, and there the model computes in a coarser type inside"
FEW_EPS = 8  # eps: rounding that is never asked about, and the bound in float32
BASELINE_FACTOR = 4  # times the twin's: another way of rounding
# and how their tensors are named
GRADIENT_PREFIX = "gradient of "
PARAMETER_PREFIX = ""
KINDS = (GRADIENT_PREFIX, PARAMETER_PREFIX)


def compare_with_serial(
    world: World,
    job: Job,
    strategy: Strategy,
    settings: Settings | None = None,
    *,
    steps: int = COMPARED_STEPS,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Difference:
    """Train `steps` steps of a resolved strategy beside serial, in float64 where the job can.
    Collective; every rank gets the answer.

    report: told {"step", "steps", "difference"} after every step, on rank 0.
    """
    settings = settings or Settings()
    strategy = strategy.verifiable
    train = open_dataset(job.train, settings.folder)
    order = job.make_order(len(train))
    known = None
    if world.rank == 0:
        known = (
            select_compared_batches(job.make_samples(train), order, steps, strategy.division),
            *choose_reference_dtype(job, train, list_first_batches(order, 1)[0], world.device),
        )
    places, dtype, why = world.broadcast_object(known)
    for kind, because in ((dtype, why), (torch.float32, COARSE_MODEL)):
        comparison = None
        for comparison in _step_together(
            world, job.replace(dtype=kind), strategy, settings, train, places
        ):
            comparison.compare_step()
            if report is not None:
                report(
                    {
                        "step": comparison.reference.serial.steps,
                        "steps": steps,
                        "difference": comparison.worst.value,
                    }
                )
        found, coarsest = world.broadcast_object(
            comparison
            and (
                replace(comparison.worst, why=because, reference=str(comparison.reference)),
                comparison.reference.serial.coarsest_eps,
            )
        )
        if found.first is None or kind != torch.float64 or coarsest <= torch.finfo(kind).eps:
            break
    return found  # type: ignore[no-any-return]


def measure_distances(
    world: World, job: Job, strategy: Strategy, settings: Settings, steps: int
) -> list[float]:
    """The difference of the parameters from serial's after every step, in the job's own type.
    Collective.
    """
    values: list[float] = []
    strategy = strategy.verifiable
    train = open_dataset(job.train, settings.folder)
    places = list_first_batches(job.make_order(len(train)), steps)
    for comparison in _step_together(
        world, job, strategy, settings, train, places, check_sameness=False
    ):
        serial = comparison.reference.serial.parameters
        values.append(
            max(
                list_tensor_deviations(
                    {name: comparison.state[name] for name in serial}, serial
                ).values()
            )
        )
    found: list[float] = world.broadcast_object(values)
    return found


def _step_together(
    world: World,
    job: Job,
    strategy: Strategy,
    settings: Settings,
    train: Dataset,
    places: list[tuple[int, range]],
    check_sameness: bool = True,
) -> Iterator[TensorComparison]:
    """Rank 0's comparison after every step that strategy and reference made; on the other ranks
    nothing.

    same: whether it is the same training is asked: with a rounding twin, and of all replicas.
    """
    trainer = Trainer.build_for_job(world, job, strategy, settings, skip_first_step_check=True)
    order = job.make_order(len(train))
    comparison = None
    trainer.batch_size = min(order.batch, order.samples)
    if world.rank == 0:
        comparison = TensorComparison(
            trainer,
            SerialReference(
                world.device, job, strategy, train, places, rounding_baseline=check_sameness
            ),
        )
    try:
        if trainer.is_server:
            run_parameter_server(trainer)
            return
        for fetched in trainer.iterate_batches_at(train, order, places, settings.loaders):
            trainer.step(*separate_target(fetched))
            if comparison is not None and comparison.reference.serial.steps == 0:
                _refuse_shared_gradients(comparison.reference)
            if check_sameness and strategy.guarantees.replicas_equal:
                check_replicas(trainer)
            # of a cut model by all ranks together
            made = trainer.gradients(), trainer.state()
            if comparison is not None:
                comparison.gradients, comparison.state = made
                comparison.reference.step()
                yield comparison
            trainer.world.barrier()  # shared gradients are looked at until here
        dismiss_run_servers(trainer)
    finally:
        trainer.close()


def _refuse_shared_gradients(reference: SerialReference) -> None:
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


class TensorComparison:
    """The largest difference so far of a trainer's gradients, parameters and buffers from the
    reference's.

    In a model with batch norm, a bias before it has a gradient of exactly zero, of which only
    rounding noise is computed: a gradient is noise where it is below 1e3 eps of the step's
    largest on both sides, and two such tensors are equal. Where the optimizer moreover divides
    by a gradient's own size, the noise is scaled up to whole updates (which reach the running
    statistics, not the loss): parameters are compared only where gradients stayed above that,
    and the running statistics, known by name, not at all.
    """

    def __init__(self, trainer: Trainer, reference: SerialReference) -> None:
        self.trainer = trainer
        self.reference = reference
        self.gradients: NamedTensors = {}  # of the trainer, after a step
        self.state: Mapping[str, Tensor] = {}
        serial = reference.serial
        self.eps = torch.finfo(serial.dtype).eps
        self.worst = Difference(
            0.0,
            dtype=str(serial.dtype).removeprefix("torch."),
            bound=EXACT_BOUND if serial.dtype == torch.float64 else FEW_EPS * self.eps,
        )
        self.rounding: dict[str, float] = {}  # the twin's largest by kind, until now
        self.noise = 0.0 if reference.norm_statistics is None else 1e3 * self.eps
        self.masks: dict[str, Tensor] | None = None
        if self.noise and not isinstance(serial.optimizer, torch.optim.SGD):
            self.masks = {
                name: torch.ones_like(tensor, dtype=torch.bool)
                for name, tensor in serial.parameters.items()
            }

    def compare_step(self) -> None:
        """Compare after all made the same step."""
        serial = self.reference.serial
        twin = self.reference.rounding_baseline
        assert twin is not None
        if self.reference.loss_deviation is not None:
            self._record_deviation(
                WHOLE_BATCH_LOSS,
                Deviation(self.reference.loss_deviation, self.reference.loss_deviation),
                self.noise,
            )
        expected = serial.gradients()
        self._compare_kind(
            GRADIENT_PREFIX,
            measure_deviations(self.gradients, expected, self.noise),
            measure_deviations(twin.gradients(), expected, self.noise),
        )
        self._narrow_masks(expected)
        ours = self.state
        theirs = serial.state()
        twins = twin.state()
        seen = self._select_comparable(theirs)
        self._compare_kind(
            PARAMETER_PREFIX,
            measure_deviations(self._select_comparable(ours), seen),
            measure_deviations(self._select_comparable(twins), seen),
        )
        floor = FLOOR * find_largest_value(serial.parameters)
        buffers = {
            name: theirs[name]
            for name in ours
            if name not in serial.parameters and not self._is_excused(name)
        }
        moved = measure_buffer_deviations(twins, buffers, floor)
        for name, found in measure_buffer_deviations(ours, buffers, floor).items():
            self._compare_kind("", {name: found}, {name: moved[name]}, pool=name)

    def _compare_kind(
        self,
        prefix: str,
        deviations: Mapping[str, Deviation],
        baseline: Mapping[str, Deviation],
        pool: str | None = None,
    ) -> None:
        """One kind of tensors of this step, and the same of the twin. Every buffer is a kind of
        its own, beside what rounding does to gradients and parameters.
        """
        pool = prefix if pool is None else pool
        rounding = max(
            [self.rounding.get(pool, 0.0), *(each.per_kind for each in baseline.values())]
        )
        self.rounding[pool] = rounding
        if pool not in KINDS:
            rounding = max(rounding, *(self.rounding[kind] for kind in KINDS))
        for name, each in baseline.items():
            told = {
                **self.worst.twins,
                prefix + name: max(each.per_tensor, self.worst.twins.get(prefix + name, 0.0)),
            }
            self.worst = replace(self.worst, twins=told, twin=max(self.worst.twin, each.per_tensor))
        allowed = self._compute_allowance(rounding)
        for name, each in deviations.items():
            self._record_deviation(prefix + name, each, allowed)

    def _compute_allowance(self, rounding: float) -> float:
        """What rounding may do where it does so much to the twin. Both are magnified by a
        product over layers and steps of which each sees factors of its own; so the larger it
        is, the more the two products scatter (seen: 98 times).
        """
        allowed = max(
            FEW_EPS * self.eps, BASELINE_FACTOR * rounding * max(1.0, rounding / self.eps) ** 0.25
        )
        if allowed < 1.0:
            return allowed
        if self.worst.chaotic is None:
            self.worst = replace(self.worst, chaotic=self.reference.serial.steps - 1)
        # another way altogether: it says no more
        return rounding if math.isinf(rounding) else sys.float_info.max

    def _record_deviation(self, name: str, deviation: Deviation, allowed: float) -> None:
        worst = self.worst
        step = self.reference.serial.steps - 1
        tensors = {**worst.tensors, name: max(deviation.per_tensor, worst.tensors.get(name, 0.0))}
        if deviation.per_tensor > worst.value:
            worst = replace(worst, value=deviation.per_tensor, tensor=name, step=step)
        if deviation.per_tensor > worst.bound and worst.first is None:
            missed = deviation.per_kind > allowed
            worst = replace(
                worst,
                first=(name, step) if missed else None,
                allowed=allowed if missed else max(worst.allowed, allowed),
            )
        self.worst = replace(worst, tensors=tensors)

    def _is_excused(self, name: str) -> bool:
        return self.masks is not None and name in (self.reference.norm_statistics or ())

    def _narrow_masks(self, gradients: NamedTensors) -> None:
        if self.masks is None:
            return
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        largest = find_largest_value(present)
        for name, gradient in present.items():
            self.masks[name] &= gradient.abs() > self.noise * largest

    def _select_comparable(self, state: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """The parameters that can be compared."""
        if self.masks is None:
            return {name: state[name] for name in self.reference.serial.parameters}
        return {name: state[name][mask] for name, mask in self.masks.items() if mask.any()}


def check_replicas(trainer: Trainer) -> None:
    """All ranks that hold the same hold the same bits, or StepFailed names the first tensor
    that differs. Collective.
    """
    if unequal := trainer.shard_layout.find_unequal_copies(
        trainer.get_local_tensors(), trainer.world
    ):
        first, other, tensor = unequal
        raise StepFailed(
            f"the replicas of rank {first} and rank {other} are not equal bit for bit",
            step=trainer.steps - 1,
            tensor=tensor,
            differs=True,
        )
