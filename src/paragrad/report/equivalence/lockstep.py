"""Compare a strategy's gradients, parameters and buffers with serial's, step by step.

Both start from the same state. Rank 0 runs the reference and its rounding baseline in lockstep
(`reference.py`), over the batches that show most (`batch_selection.py`). The difference of a run is
the largest over tensors and steps, with the name of the tensor (`deviation.py`).

A tensor counts as different if two conditions hold. It differs by more than the bound. And, by the
largest of its kind, it differs by more than 4 times what the baseline has shown until then.
Rounding that a model magnifies is therefore no fault. A fault cannot hide behind chaos that begins
later, either.

The replicas must be equal bit for bit. If they are not, that is the difference.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paragrad.datasets.loading import Dataset, Samples, separate_target
from paragrad.datasets.sample_order import SampleOrder
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
from paragrad.report.equivalence.plain_loop import GatheredState
from paragrad.report.equivalence.reference import (
    WHOLE_BATCH_LOSS,
    SerialReference,
    choose_reference_dtype,
)
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.server_rank import dismiss_run_servers, run_parameter_server
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer

COMPARED_STEPS = 20
# so many of the compared steps are made after some that are not compared
LATE_STEPS = 5
SKIPPED_STEPS = 25
COARSE_MODEL = "in float64 the training differs, because the model itself uses a coarser type"
# a deviation of so many eps is always allowed, and is the bound in float32
FEW_EPS = 8
# how much more than the baseline another way of rounding may deviate
BASELINE_FACTOR = 4
# prefixes of tensor names
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
    """Train some steps of a resolved strategy, and compare each with serial. Collective.

    The comparison is in float64 if the job can. Every rank gets the result.

    Args:
        world: the ranks.

        job: the job.

        strategy: the resolved strategy.

        settings: the settings; None for the defaults.

        steps: number of steps.

        report: receives {"step", "steps", "difference"} after every step, on rank 0.
    """
    settings = settings or Settings()
    strategy = strategy.verifiable
    train = open_dataset(job.train, settings.folder)
    order = job.make_order(train)
    selection = None
    if world.rank == 0:
        selection = (
            select_places(
                job.make_samples(train),
                order,
                steps,
                strategy.division,
                # a schedule may end with the steps of the job
                has_late_steps=job.scheduler is None
                or job.epochs * order.steps >= steps + SKIPPED_STEPS,
            ),
            *choose_reference_dtype(job, train, list_first_batches(order, 1)[0], world.device),
        )
    (places, skipped), dtype, reason = world.broadcast_object(selection)
    for kind, current_reason in ((dtype, reason), (torch.float32, COARSE_MODEL)):
        comparison = None
        compared = 0
        for comparison in _step_together(
            world, job.replace(dtype=kind), strategy, settings, train, places, skipped
        ):
            comparison.compare_step()
            if report is not None:
                compared += 1
                report(
                    {
                        "step": compared,
                        "steps": steps,
                        "difference": comparison.worst.value,
                    }
                )
        difference, coarsest = world.broadcast_object(
            comparison
            and (
                replace(comparison.worst, why=current_reason, reference=str(comparison.reference)),
                comparison.reference.coarsest_eps,
            )
        )
        if difference.first is None or kind != torch.float64 or coarsest <= torch.finfo(kind).eps:
            break
    return difference  # type: ignore[no-any-return]


def measure_distances(
    world: World,
    job: Job,
    strategy: Strategy,
    settings: Settings,
    steps: int,
    *,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[float]:
    """Measure how far the parameters are from serial's after every step, in the job's own dtype.

    Collective.

    Args:
        world: the ranks.
        job: the job.
        strategy: the resolved strategy.
        settings: the settings.
        steps: number of steps.
        report: receives {"step", "steps", "difference"} after every step, on rank 0.
    """
    values: list[float] = []
    strategy = strategy.verifiable
    train = open_dataset(job.train, settings.folder)
    places = list_first_batches(job.make_order(train), steps)
    for comparison in _step_together(
        world, job, strategy, settings, train, places, check_sameness=False
    ):
        serial = comparison.reference.serial.parameters()
        values.append(
            max(
                list_tensor_deviations(
                    {name: comparison.state[name] for name in serial}, serial
                ).values()
            )
        )
        if report is not None:
            report({"step": len(values), "steps": steps, "difference": values[-1]})
    distances: list[float] = world.broadcast_object(values)
    return distances


def _step_together(
    world: World,
    job: Job,
    strategy: Strategy,
    settings: Settings,
    train: Dataset,
    places: list[tuple[int, range]],
    skipped: range = range(0),
    check_sameness: bool = True,
) -> Iterator[TensorComparison]:
    """Yield rank 0's comparison after each step of strategy and reference; other ranks yield none.

    Args:
        world: the ranks.

        job: the job.

        strategy: the resolved strategy.

        settings: the settings.

        train: the dataset.

        places: (epoch, batch) of each step.

        skipped: the steps that the strategy makes alone. After them the reference goes on from the
            strategy's state.

        check_sameness: whether to run a rounding baseline and to compare all replicas.
    """
    trainer = Trainer.build_for_job(world, job, strategy, settings, skip_first_step_check=True)
    order = job.make_order(train)
    comparison = None
    trainer.training.state.use_batch_size(min(order.batch, order.samples))
    if world.rank == 0:
        comparison = TensorComparison(
            trainer,
            SerialReference(
                world.device, job, strategy, train, places, rounding_baseline=check_sameness
            ),
        )
    try:
        if trainer.is_server:
            run_parameter_server(trainer.training)
            return
        for fetched in trainer.iterate_batches_at(train, order, places, settings.loaders):
            if skipped and trainer.steps == skipped.stop:
                # servers cannot send what an optimizer keeps beside its state and its groups
                adopts = trainer.world.broadcast_object(
                    comparison is not None and comparison.reference.serial.can_adopt
                )
                state = gather_training_state(trainer) if adopts else None
                if comparison is not None:
                    comparison.catch_up(state, trainer.steps)
            trainer.step(*separate_target(fetched))
            if trainer.steps - 1 in skipped:
                continue
            if comparison is not None and comparison.reference.serial.steps == 0:
                _refuse_shared_gradients(comparison.reference)
            if check_sameness and strategy.guarantees.replicas_equal:
                check_replicas(trainer)
            # all ranks together, because the model may be partitioned
            step_tensors = trainer.gradients(), trainer.state()
            if comparison is not None:
                comparison.take_tensors(*step_tensors)
                comparison.reference.step()
                yield comparison
            trainer.world.barrier()  # other ranks read shared gradients until here
        dismiss_run_servers(trainer.training)
    finally:
        trainer.close()


def select_places(
    samples: Samples,
    order: SampleOrder,
    steps: int,
    division: Division,
    has_late_steps: bool = True,
) -> tuple[list[tuple[int, range]], range]:
    """Select (epoch, batch) of each step, and the steps that are not compared.

    In a comparison of `COMPARED_STEPS` or more, the last `LATE_STEPS` come after `SKIPPED_STEPS`
    that are not compared: a fault may begin late. These repeat batches that were compared.

    Args:
        samples: the samples.
        order: the order of the samples.
        steps: number of compared steps.
        division: how a batch is divided among ranks and micro-batches.
        has_late_steps: whether steps may be skipped.
    """
    compared = select_compared_batches(samples, order, steps, division)
    if steps < COMPARED_STEPS or not has_late_steps:
        return compared, range(0)
    early, late = compared[:-LATE_STEPS], compared[-LATE_STEPS:]
    repeated = list(itertools.islice(itertools.cycle(early), SKIPPED_STEPS))
    return early + repeated + late, range(len(early), len(early) + SKIPPED_STEPS)


def gather_training_state(trainer: Trainer) -> GatheredState:
    """Gather what another training needs to go on from here, on rank 0. Collective.

    Args:
        trainer: the strategy's trainer.
    """
    # under servers, gathering also brings the numbers of the groups that steps change
    optimizer_state = trainer.training.setup.gather_optimizer_state()
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in trainer.optimizer.param_groups
    ]
    return GatheredState(trainer.state(), optimizer_state, groups, trainer.steps)


def _refuse_shared_gradients(reference: SerialReference) -> None:
    """Raise StepFailed if the strategy's step left gradients in the reference's models."""
    if any(
        parameter.grad is not None
        for loop in reference.loops
        for parameter in loop.model.parameters()
    ):
        raise StepFailed(
            "the loss reads the model from outside; of two models in one process it reads the one "
            "built last, so they cannot be compared; let the model return what its loss needs, "
            "such as (output, penalty)"
        )


class TensorComparison:
    """The largest difference so far of a trainer's tensors from the reference's.

    The tensors are gradients, parameters and buffers.

    In a model with batch norm, a bias before it has a gradient of exactly zero, of which only
    rounding noise is computed. A gradient is noise if it is below 1e3 eps of the step's largest on
    both sides. Two such tensors are equal.

    If the optimizer also divides by a gradient's own size, the noise is scaled up to whole updates.
    These reach the running statistics, not the loss. Parameters are then compared only where
    gradients stayed above the noise. The running statistics, known by name, are not compared.

    Attributes:
        trainer: the strategy's trainer.

        reference: serial and its rounding baseline.

        gradients: the trainer's gradients after a step.

        state: the trainer's parameters and buffers after a step.

        eps: machine epsilon of the serial trainer's dtype.

        worst: the largest difference so far.

        rounding: the largest deviation of the rounding baseline so far, by kind.

        largest_gradient: the largest number in a gradient of the reference so far.

        noise: the share of a step's largest gradient below which a gradient is noise.

        masks: the elements of each parameter that can be compared; None for all.
    """

    def __init__(self, trainer: Trainer, reference: SerialReference) -> None:
        self.trainer = trainer
        self.reference = reference
        self.gradients: NamedTensors = {}
        self.state: Mapping[str, Tensor] = {}
        serial = reference.serial
        dtype = serial.job.parameter_dtype
        self.eps = torch.finfo(dtype).eps
        self.worst = Difference(
            0.0,
            dtype=str(dtype).removeprefix("torch."),
            bound=EXACT_BOUND if dtype == torch.float64 else FEW_EPS * self.eps,
        )
        self.rounding: dict[str, float] = {}
        self.largest_gradient = 0.0
        self.noise = 0.0 if reference.norm_statistics is None else 1e3 * self.eps
        self.masks: dict[str, Tensor] | None = None
        if self.noise and not isinstance(serial.optimizer, torch.optim.SGD):
            self.masks = {
                name: torch.ones_like(tensor, dtype=torch.bool)
                for name, tensor in serial.parameters().items()
            }

    def take_tensors(self, gradients: NamedTensors, state: Mapping[str, Tensor]) -> None:
        """Take over the tensors of the strategy's step.

        Args:
            gradients: the trainer's gradients after the step.
            state: the trainer's parameters and buffers after the step.
        """
        self.gradients = gradients
        self.state = state

    def catch_up(self, state: GatheredState | None, steps: int) -> None:
        """Let the reference go on from the strategy's state, and measure rounding anew.

        Args:
            state: the strategy's state; None if the optimizer keeps more than its state and its
                groups. The reference then makes the steps in between.
            steps: number of steps that the strategy has made.
        """
        if state is None:
            while self.reference.serial.steps < steps:
                self.reference.step()
            return
        for loop in self.reference.loops:
            loop.adopt_training(state)
        self.rounding = {}
        if self.masks is not None:
            self.masks = {name: torch.ones_like(each) for name, each in self.masks.items()}

    def compare_step(self) -> None:
        """Compare after all have made the same step."""
        serial = self.reference.serial
        baseline = self.reference.rounding_baseline
        assert baseline is not None
        if serial.loss_deviation is not None:
            self._record_deviation(
                WHOLE_BATCH_LOSS,
                Deviation(serial.loss_deviation, serial.loss_deviation),
                self.noise,
            )
        expected = serial.gradients()
        # Near the end, gradients are differences of numbers near 1, such as the probability of a
        # class and 1. Their rounding stays that of these numbers.
        self.largest_gradient = max(self.largest_gradient, find_largest_value(expected))
        deviations, rounding = (
            measure_deviations(each, expected, self.noise, self.largest_gradient)
            for each in (self.gradients, baseline.gradients())
        )
        self._compare_kind(GRADIENT_PREFIX, deviations, rounding)
        self._narrow_masks(expected)
        state = self.state
        serial_state = serial.state()
        baseline_state = baseline.state()
        comparable = self._select_comparable(serial_state)
        self._compare_kind(
            PARAMETER_PREFIX,
            measure_deviations(self._select_comparable(state), comparable),
            measure_deviations(self._select_comparable(baseline_state), comparable),
        )
        parameters = serial.parameters()
        floor = FLOOR * find_largest_value(parameters)
        buffers = {
            name: serial_state[name]
            for name in state
            if name not in parameters and not self._is_excused(name)
        }
        baseline_deviations = measure_buffer_deviations(baseline_state, buffers, floor)
        for name, deviation in measure_buffer_deviations(state, buffers, floor).items():
            self._compare_kind("", {name: deviation}, {name: baseline_deviations[name]}, pool=name)

    def _compare_kind(
        self,
        prefix: str,
        deviations: Mapping[str, Deviation],
        baseline: Mapping[str, Deviation],
        pool: str | None = None,
    ) -> None:
        """Compare one kind of tensors of this step, and record what rounding does to the baseline.

        Every buffer is a kind of its own. Rounding of gradients and parameters applies to it, too.
        """
        pool = prefix if pool is None else pool
        rounding = max(
            [self.rounding.get(pool, 0.0), *(each.per_kind for each in baseline.values())]
        )
        self.rounding[pool] = rounding
        if pool not in KINDS:
            rounding = max(rounding, *(self.rounding[kind] for kind in KINDS))
        for name, each in baseline.items():
            twins = {
                **self.worst.twins,
                prefix + name: max(each.per_tensor, self.worst.twins.get(prefix + name, 0.0)),
            }
            self.worst = replace(
                self.worst, twins=twins, twin=max(self.worst.twin, each.per_tensor)
            )
        allowed = self._compute_allowance(rounding)
        for name, each in deviations.items():
            self._record_deviation(prefix + name, each, allowed)

    def _compute_allowance(self, rounding: float) -> float:
        """The deviation that is allowed if the baseline has this much rounding.

        Both are magnified by a product over layers and steps, each with factors of its own. So the
        larger the rounding, the more the two products scatter (observed: 98 times).
        """
        allowed = max(
            FEW_EPS * self.eps, BASELINE_FACTOR * rounding * max(1.0, rounding / self.eps) ** 0.25
        )
        if allowed < 1.0:
            return allowed
        if self.worst.chaotic is None:
            self.worst = replace(self.worst, chaotic=self.reference.serial.steps - 1)
        # a baseline that deviates so far allows every finite deviation
        return rounding if math.isinf(rounding) else sys.float_info.max

    def _record_deviation(self, name: str, deviation: Deviation, allowed: float) -> None:
        worst = self.worst
        step = self.reference.serial.steps - 1
        tensors = {**worst.tensors, name: max(deviation.per_tensor, worst.tensors.get(name, 0.0))}
        if deviation.per_tensor > worst.value:
            worst = replace(worst, value=deviation.per_tensor, tensor=name, step=step)
        if deviation.per_tensor > worst.bound and worst.first is None:
            exceeds = deviation.per_kind > allowed
            worst = replace(
                worst,
                first=(name, step) if exceeds else None,
                allowed=allowed if exceeds else max(worst.allowed, allowed),
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
        """Select the parameters that can be compared."""
        if self.masks is None:
            return {name: state[name] for name in self.reference.serial.parameters()}
        return {name: state[name][mask] for name, mask in self.masks.items() if mask.any()}


def check_replicas(trainer: Trainer) -> None:
    """Check that all ranks with the same tensors hold the same bits. Collective.

    Args:
        trainer: the strategy's trainer.

    Raises:
        StepFailed: names the first tensor that differs.
    """
    if unequal := trainer.training.setup.shard_layout.find_unequal_copies(
        trainer.get_local_tensors(), trainer.world
    ):
        first, other, tensor = unequal
        raise StepFailed(
            f"the replicas of rank {first} and rank {other} are not equal bit for bit",
            step=trainer.steps - 1,
            tensor=tensor,
            differs=True,
        )
