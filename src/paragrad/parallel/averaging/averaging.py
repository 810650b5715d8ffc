"""Weights are exchanged in place of gradients, and not in every step (`local`).

Every replica steps by the gradients of its own share, with an optimizer of its own, whose state
it keeps. Every so many steps the replicas meet: they tell each other where they are and what
they have seen, and the mean of their weights, each counted by its samples since they met last,
travels along an all-reduce; `outer.py` says what they go on from. What else forwards changed on
any of them (running statistics, frozen parameters that follow others) becomes its mean, where
it has one (`means.py`). Before a test, in a checkpoint and at the end the model is what the run
stands for; training goes on from what each has. Of a replica without a sample that counts in a
step nothing is updated in it.

With `compress` the mean of weights is where all were together last, and the sum of how far each
moved from there, compressed, for which this place is kept. Tests and checkpoints are of the
mean itself.

Nothing at all is sent between meetings: the loss of a step is this rank's, and that somebody
was asked to stop all hear when they meet, in that step, or when they test, in the one after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paragrad.engine.exchange import (
    CHECKPOINT_TRAFFIC,
    TEST_TRAFFIC,
    Exchange,
    ExchangeOptions,
    Replica,
)
from paragrad.engine.layout import OptimizerState, copy_to_host
from paragrad.engine.optimizer.modes import has_modes
from paragrad.engine.optimizer.optimizer_state import load_parameter_state
from paragrad.engine.replica_check import DuplicateTensors
from paragrad.engine.state.preserve_state import ModuleSnapshot, list_replaced_parameters
from paragrad.engine.state.values import get_accumulation_dtype, is_same_value
from paragrad.errors import StepFailed
from paragrad.parallel.averaging.averageable_state import (
    ONE_SHAPE_HINT,
    REPLACED_MESSAGE,
    AveragingNotes,
    average_state,
    collect_averageable,
    collect_group_numbers,
    round_to_type,
)
from paragrad.parallel.averaging.outer_optimizer import OuterOptimizer, build_outer_optimizer
from paragrad.parallel.compression.compressed_reduce import CompressedReduce
from paragrad.parallel.compression.feedback import reshape_and_cast_like
from paragrad.parallel.data.bucketing import GradientBucketExchange, split_into_buckets
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.step_log import StepLog
from paragrad.runtime.stragglers import explain_independent_steps
from paragrad.runtime.world import World
from paragrad.strategies.local import Local

OUTER_MOMENTUM = "outer momentum"  # by which name a checkpoint holds it
WEIGHTS = "weights"  # bytes of meetings
# of what a rank tells: by so many numbers it must be where the others are; before rates
POSITION_NUMBERS = 2
HEADER_NUMBERS = 4
OUT_OF_STEP_MESSAGE = (
    "rank {} {}, and rank {} {}: replicas make the same steps, tests and checkpoints. A loop ends "
    "on all ranks by what "
    "all know (trainer.evaluate, result.stop), not by the loss of a step, which is each rank's own"
)
OTHER_SIZE_MESSAGE = (
    "it has {} numbers on rank {} and {} on rank {}, and replicas average what forwards change; "
    + ONE_SHAPE_HINT
)
OTHER_RATE_MESSAGE = (
    "the rate of the optimizer's group {} is {} on rank {} and {} on rank {}, and replicas step by "
    "the same; set it by "
    "what all know (trainer.evaluate), not by the loss of a step, which is each rank's own"
)


def make_exchange(
    strategy: Local, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
) -> Exchange:
    """The exchange of `local`. Collective."""
    return AveragingExchange(strategy, replica, world, log, options)


class AveragingExchange(GradientBucketExchange):
    """In the first `after` steps gradients are summed, as under `data`; from then on weights
    are averaged.
    """

    def __init__(
        self,
        strategy: Local,
        replica: Replica,
        world: World,
        log: StepLog,
        options: ExchangeOptions,
    ) -> None:
        super().__init__(replica, world, log, options, strategy.reduce)
        self.strategy = strategy
        self.world = world
        self.step = replica.completed_steps
        self.copies = DuplicateTensors(self.layout, self.loss_module.model)
        self.fault_factor = world.size if options.inject_fault == "mean_twice" else 1  # planted
        self.initial_parameters = dict(self.loss_module.model.named_parameters())
        self.names = [name for name, each in self.initial_parameters.items() if each.requires_grad]
        self.outer_optimizer: OuterOptimizer = build_outer_optimizer(
            strategy, self._list_weights(), self._read_outer_momentum(replica.restored_tensors)
        )
        self.saved_names = (OUTER_MOMENTUM,) if self.outer_optimizer.momentum else ()
        self.notes = AveragingNotes(log)
        # until it is told what forwards change in Python
        self.python_snapshot: ModuleSnapshot | None = ModuleSnapshot(self.loss_module)
        self.compression = (
            None
            if strategy.compress is None
            else CompressedReduce(
                strategy.compress,
                world,
                lambda vector, kind: self._start_sum(vector),
                seed=replica.seed,
                log=log,
                count_bytes=lambda kind, sent: self.count_bytes(WEIGHTS, sent, computed=True),
            )
        )
        self._start_local_phase()
        # all replicas are what it stands for, for good
        self.is_settled = False

    def _read_outer_momentum(self, restored: OptimizerState) -> list[Tensor]:
        """The outer momentum of a checkpoint, of all weights or of none."""
        found = [
            restored[name][OUTER_MOMENTUM]
            for name in self.names
            if OUTER_MOMENTUM in restored.get(name, {})
        ]
        if found and len(found) != len(self.names):
            raise StepFailed(
                f"the checkpoint has an outer momentum of {len(found)} of {len(self.names)} "
                f"parameters; train "
                "what was trained, or go on under another outer"
            )
        return found

    def _list_weights(self) -> list[Tensor]:
        """What is trained, as it is now: an optimizer may have put other tensors into the
        parameters.
        """
        named = dict(self.loss_module.model.named_parameters())
        return [named[name].detach() for name in self.names]

    def _collect_untrained(self) -> dict[str, Tensor]:
        """Values that are not trained: buffers, which forwards may also make anew, and frozen
        parameters.
        """
        trained = set(self.names)
        return {
            name: each
            for name, each in collect_averageable(self.loss_module).items()
            if name not in trained
        }

    def _start_local_phase(self) -> None:
        """Replicas are together now."""
        self.last_values = {
            name: each.detach().clone() for name, each in self._collect_untrained().items()
        }
        # steps alone since then; the weight of all steps since
        self.local_steps = 0
        self.weight_since_average = 0.0
        self.common_weights: Sequence[Tensor] = ()  # where they are now
        if self.compression:
            self.common_weights = self.outer_optimizer.centre or [
                each.to(get_accumulation_dtype(each.dtype), copy=True)
                for each in self._list_weights()
            ]
        held = {
            id(each): each
            for each in (
                *self.last_values.values(),
                *self.outer_optimizer.centre,
                *self.outer_optimizer.momentum,
                *self.common_weights,
            )
        }
        self.retained_bytes = sum(each.nbytes for each in held.values())

    # ---- in a step ---------------------------------------------------------------------------
    @property
    def is_synchronous(self) -> bool:
        """Are gradients summed in this step?"""
        return self.step < self.strategy.after

    @property
    def steps_alone(self) -> bool:  # type: ignore[override]
        return not self.is_synchronous and not self.layout.is_partitioned

    def begin(self) -> None:
        super().begin()
        self.kind = "gradients"
        self.refuse_refrozen()

    def mark_ready(self, parameter: torch.nn.Parameter) -> None:
        if self.is_synchronous:
            super().mark_ready(parameter)

    def finish(self, weight: float, loss: float) -> None:
        if names := list_replaced_parameters(self.loss_module.model, self.initial_parameters):
            raise StepFailed(REPLACED_MESSAGE, tensor=", ".join(names))
        if self.is_synchronous:
            super().finish(weight, loss)
        else:
            # in this step all hear
            asked = (
                self.stop_requested
                if self.strategy.is_averaging_step(self.step)
                else self.stop_requests
            )
            self.totals = [weight, loss, float(asked), self.doubtful_weight]

    def refuse_zero_weight(self) -> None:
        if self.is_synchronous:
            super().refuse_zero_weight()  # on no rank

    def update(self) -> None:
        if self.weight or self.is_synchronous:
            super().update()
        else:
            # schedulers want to know
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.local_steps = self.local_steps + (not self.is_synchronous)
        self.weight_since_average = self.weight_since_average + self.weight
        if self.strategy.is_averaging_step(self.step):
            self._average_replicas()
        self.step += 1

    def _average_replicas(self) -> None:
        with self.log.record_detail("meeting", "wait"):
            weights, others = self._average_values(WEIGHTS)
        if weights is not None:
            self.outer_optimizer.update_replica(self._list_weights(), [*weights.values()])
        elif not self.local_steps:
            self.outer_optimizer.start_local_phase(self._list_weights())
        now = self._collect_untrained()
        for name, mean in others.items():
            now[name].detach().copy_(round_to_type(mean, now[name].dtype))
        self._sync_copies(
            {
                **dict(zip(self.names, self._list_weights(), strict=True)),
                **{name: now[name] for name in others},
            }
        )
        self._start_local_phase()

    def _sync_copies(self, tensors: dict[str, Tensor]) -> None:
        """Copies of a replica's ranks, of a model that is cut. What a loss keeps is of the rank
        that has it.
        """
        self.copies.synchronize_copies(
            {name: each for name, each in tensors.items() if name in self.layout.specs}
        )

    def _average_values(
        self, kind: str, force: bool = False
    ) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        """The means over replicas, by their samples since they met, of all weights (None where
        these are still equal, unless anyway), and of other values that any of them changed.
        Collective.
        """
        self.kind = kind
        others = self._collect_untrained()
        counts, changed = self._share_status(kind, others)
        samples = sum(counts)
        by_samples = samples > 0 and not self.outer_optimizer.counts_equally
        share, total = (
            (self.weight_since_average, samples) if by_samples else (1.0, float(self.world.size))
        )
        averaged = force or bool(self.local_steps and samples)
        # a part may have none at all
        weights = dict(zip(self.names, self._list_weights(), strict=True)) if averaged else {}
        beside = {
            name: others[name]
            .detach()
            .to(self.world.device, get_accumulation_dtype(others[name].dtype))
            for name in changed
        }
        if self.compression and kind == WEIGHTS:
            means = self._average_compressed(weights, share / (total * self.fault_factor))
            means |= self._sum_tensors(beside, share, total * self.fault_factor)
        else:
            means = self._sum_tensors({**weights, **beside}, share, total * self.fault_factor)
        return {name: means[name] for name in weights} if averaged else None, {
            name: means[name] for name in beside
        }

    def _average_compressed(self, weights: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """The means of weights, by what each replica sends of its way from where all were; of
        small ones, by themselves. Collective.
        """
        assert self.compression is not None
        common = dict(zip(self.names, self.common_weights, strict=True))
        moved = {name: each - common[name] for name, each in weights.items()}
        large = {
            each: name
            for name, each in moved.items()
            if self.compression.compressor.compresses(each.shape)
        }
        self.sent_buckets = []
        begun = [
            self.compression.begin({large[each]: each for each in bucket}, scale, self.step)
            for bucket in split_into_buckets(large)
        ]
        found = {
            name: reshape_and_cast_like(each, common[name])
            for bucket in begun
            for name, each in self.compression.finish(bucket).items()
        }
        found |= self._sum_tensors(
            {name: each for name, each in moved.items() if name not in found}, scale
        )
        return {name: common[name] + each for name, each in found.items()}

    def _share_status(self, kind: str, others: dict[str, Tensor]) -> tuple[list[float], list[str]]:
        """(samples of each replica since they met, names of what else any of them changed); of
        the wish to stop all hear. Collective. Raises StepFailed, on all of them, where they are
        not at one place.
        """
        moved = [
            name not in self.last_values or not is_same_value(each, self.last_values[name])
            for name, each in others.items()
        ]
        sizes = [
            (each.numel() + 1) * (1 if flag else -1)
            for each, flag in zip(others.values(), moved, strict=True)
        ]
        rates = [float(group.get("lr") or 0.0) for group in self.optimizer.param_groups]
        own = torch.tensor(
            [
                self.step,
                kind != WEIGHTS,
                self.weight_since_average,
                float(self.stop_requested),
                *rates,
                *sizes,
            ],
            dtype=torch.float64,
        )
        self.count_bytes(
            kind, count_collective_bytes("all_gather", own.nbytes, self.world.size), computed=True
        )
        with explain_independent_steps():
            told = [each.tolist() for each in self.world.all_gather(own)]
        self._refuse_out_of_step(told, len(rates), [*others])
        self.stop_requests = sum(each[POSITION_NUMBERS + 1] for each in told)
        there = [
            max(each) > 0
            for each in zip(*(each[HEADER_NUMBERS + len(rates) :] for each in told), strict=True)
        ]
        changed = [name for name, any_ in zip(others, there, strict=True) if any_]
        self.notes.note_averages(changed)
        if self.weight_since_average and self.python_snapshot is not None:
            self.notes.note_python_state(
                self.python_snapshot.python_state, "each worker's own", self.layout.serial_names
            )
            self.python_snapshot = None
        return [each[POSITION_NUMBERS] for each in told], changed

    def _refuse_out_of_step(
        self, statuses: list[list[float]], rate_count: int, names: list[str]
    ) -> None:
        """Replicas that meet are at the same place, step by the same rates, and have values of
        the same sizes. Raises StepFailed, on all of them.
        """
        first = statuses[0]
        known = self.world.global_ranks
        for rank, each in enumerate(statuses):
            if each[:POSITION_NUMBERS] != first[:POSITION_NUMBERS]:
                raise StepFailed(
                    OUT_OF_STEP_MESSAGE.format(
                        *(
                            part
                            for number in (0, rank)
                            for part in (
                                known[number],
                                ("tests, saves or ends" if statuses[number][1] else "averages")
                                + f" in step {int(statuses[number][0])}",
                            )
                        )
                    )
                )
            for number, (mine, theirs) in enumerate(
                zip(
                    each[HEADER_NUMBERS : HEADER_NUMBERS + rate_count],
                    first[HEADER_NUMBERS : HEADER_NUMBERS + rate_count],
                    strict=True,
                )
            ):
                if mine != theirs:
                    raise StepFailed(
                        OTHER_RATE_MESSAGE.format(number, theirs, known[0], mine, known[rank])
                    )
            for name, mine, theirs in zip(
                names,
                each[HEADER_NUMBERS + rate_count :],
                first[HEADER_NUMBERS + rate_count :],
                strict=True,
            ):
                if abs(mine) != abs(theirs):
                    raise StepFailed(
                        OTHER_SIZE_MESSAGE.format(
                            abs(int(theirs)) - 1, known[0], abs(int(mine)) - 1, known[rank]
                        ),
                        tensor=name,
                    )

    # ---- what others look at -----------------------------------------------------------------
    def _compute_effective_values(self, kind: str, force: bool = False) -> dict[Tensor, Tensor]:
        """What the run stands for, of every tensor that this replica has otherwise.
        Collective.
        """
        self.sent_bytes = {}
        weights, others = self._average_values(kind, force)
        values = weights
        if weights is not None:
            values = dict(
                zip(
                    weights,
                    self.outer_optimizer.compute_effective_weights([*weights.values()]),
                    strict=True,
                )
            )
        elif self.outer_optimizer.counts_equally and not self.is_synchronous:
            # which nobody became
            values = dict(zip(self.names, self.outer_optimizer.centre, strict=True))
        self._sync_copies(found := {**(values or {}), **others})
        now = {**dict(self.loss_module.model.named_parameters()), **self._collect_untrained()}
        return {now[name]: value for name, value in found.items()}

    @contextlib.contextmanager
    def _use_effective_values(self, kind: str, force: bool = False) -> Iterator[None]:
        found = {} if self.is_settled else self._compute_effective_values(kind, force)
        before = {tensor: tensor.data for tensor in found}
        for tensor, value in found.items():
            # of a bucket, which nobody could save
            tensor.data = round_to_type(value, tensor.dtype).to(tensor.device, copy=True)
        try:
            yield
        finally:
            for tensor, own in before.items():
                tensor.data = own

    def use_effective_weights(self) -> contextlib.AbstractContextManager[None]:
        return self._use_effective_values(CHECKPOINT_TRAFFIC)

    @contextlib.contextmanager
    def use_evaluation_weights(self) -> Iterator[None]:
        """An optimizer with modes makes of equal weights others on each replica, by its own
        state.
        """
        with (
            super().use_evaluation_weights(),
            self._use_effective_values(TEST_TRAFFIC, force=has_modes(self.optimizer)),
        ):
            yield

    def adopt_effective_weights(self) -> None:
        for tensor, value in self._compute_effective_values(CHECKPOINT_TRAFFIC).items():
            tensor.detach().copy_(round_to_type(value, tensor.dtype))
        named = dict(self.loss_module.model.named_parameters())
        for name, state in self.world.broadcast_object(self.gather_optimizer_state()).items():
            load_parameter_state(self.optimizer, named[name], state)
        self.is_settled = True

    def gather_optimizer_state(self) -> OptimizerState:
        """The mean over the replicas that have some."""
        if self.is_settled:
            return super().gather_optimizer_state()
        own = {
            name: {what: copy_to_host(value) for what, value in values.items()}
            for name, values in super().gather_optimizer_state().items()
        }
        if self.world.rank:
            self.count_bytes(
                CHECKPOINT_TRAFFIC,
                sum(
                    value.nbytes
                    for values in own.values()
                    for value in values.values()
                    if isinstance(value, Tensor)
                ),
                computed=True,
            )
        told = self.world.gather_objects(
            (self.weight_since_average, own, collect_group_numbers(self.optimizer))
        )
        self.notes.note_optimizer_groups([groups for *_, groups in told])
        return average_state([each[:2] for each in told])

    def collect_saved_tensors(self) -> OptimizerState:
        momentum = self.outer_optimizer.momentum
        return (
            {name: {OUTER_MOMENTUM: each} for name, each in zip(self.names, momentum, strict=True)}
            if momentum
            else {}
        )
