"""Local SGD: weights are averaged instead of gradients, and not in every step (`local`).

Every replica steps by the gradients of its own share. It has an optimizer of its own and keeps its
state. At regular intervals the replicas share their position and their sample counts. The mean of
their weights travels along an all-reduce; each replica counts by its samples since the last
averaging. `outer_optimizer.py` defines the weights with which they continue.

Forward passes may change other values on some replica, such as running statistics or frozen
parameters that follow others. These become their mean, if they have one (`averageable_state.py`).
Before a test, in a checkpoint and at the end, the model has the effective weights of the run.
Training continues with the weights of each replica. If a replica has no sample that counts in a
step, nothing is updated in it.

With `compress`, each replica sends how far it moved since the last averaging, compressed. The mean
of weights is the common position of the last averaging plus the sum of these moves. That position
is stored for this purpose. Tests and checkpoints use the exact mean.

Nothing is sent between averagings. The loss of a step is that of this rank. A stop request reaches
all ranks in the step of the next averaging. At a test it reaches them in the step after the test.
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
from paragrad.engine.state.preserve_state import ModuleSnapshot, list_replaced_parameters
from paragrad.engine.state.values import get_accumulation_dtype, is_same_value
from paragrad.engine.tensor_copies import TensorCopies
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

OUTER_MOMENTUM = "outer momentum"  # its name in a checkpoint
WEIGHTS = "weights"  # kind of the bytes of an averaging
# In the status of a rank: the first numbers must be equal on all ranks, and the header ends before
# the learning rates.
POSITION_NUMBERS = 2
HEADER_NUMBERS = 4
OUT_OF_STEP_MESSAGE = (
    "rank {} {}, and rank {} {}: replicas make the same steps, tests and checkpoints. End a loop "
    "by a value that is the same on all ranks (trainer.evaluate, result.stop), not by the loss of "
    "a step, which differs"
)
OTHER_SIZE_MESSAGE = (
    "it has {} numbers on rank {} and {} on rank {}, and replicas average what forwards change; "
    + ONE_SHAPE_HINT
)
OTHER_RATE_MESSAGE = (
    "the rate of the optimizer's group {} is {} on rank {} and {} on rank {}, and replicas need "
    "the same; set it by a value that is the same on all ranks (trainer.evaluate), not by the loss "
    "of a step, which differs"
)


def make_exchange(
    strategy: Local, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
) -> Exchange:
    """Make the exchange of `local`.

    Collective: all ranks call it together.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

    Returns:
        The exchange of this rank.
    """
    return AveragingExchange(strategy, replica, world, log, options)


class AveragingExchange(GradientBucketExchange):
    """Averages weights over replicas.

    In the first `after` steps gradients are summed, as in `data`. After that, weights are averaged.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

    Attributes:
        strategy: The resolved strategy.

        world: The world of the workers.

        step: Number of the step.

        copies: Tensors of a partitioned model that several ranks hold.

        fault_factor: The number of ranks if the fault mean_twice is injected, otherwise 1.

        initial_parameters: The parameters at the start, by name.

        names: Names of the trained parameters.

        outer_optimizer: Defines the weights with which replicas continue after an averaging.

        notes: Notes on averaged values.

        python_snapshot: The Python state at the start, until its changes are noted; then None.

        compression: Compresses the moves of replicas, or None.

        is_settled: Whether all replicas have adopted the effective weights for good.

        last_values: Untrained values at the last averaging.

        local_steps: Steps without a sum of gradients since the last averaging.

        weight_since_average: The weight of all steps of this replica since the last averaging.

        common_weights: With compression, the weights of all replicas at the last averaging.

        totals: Weight, loss, stop requests and doubtful weight of the last step.
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
        self.copies = TensorCopies(self.layout, self.loss_module.model)
        # an injected fault
        self.fault_factor = world.size if options.inject_fault == "mean_twice" else 1
        self.initial_parameters = dict(self.loss_module.model.named_parameters())
        self.names = [name for name, each in self.initial_parameters.items() if each.requires_grad]
        self.outer_optimizer: OuterOptimizer = build_outer_optimizer(
            strategy, self._list_weights(), self._read_outer_momentum(replica.restored_tensors)
        )
        self.saved_names = (OUTER_MOMENTUM,) if self.outer_optimizer.momentum else ()
        self.notes = AveragingNotes(log)
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
        self.is_settled = False

    def _read_outer_momentum(self, restored: OptimizerState) -> list[Tensor]:
        """Read the outer momentum from a checkpoint: for all weights, or for none."""
        momentum = [
            restored[name][OUTER_MOMENTUM]
            for name in self.names
            if OUTER_MOMENTUM in restored.get(name, {})
        ]
        if momentum and len(momentum) != len(self.names):
            raise StepFailed(
                f"the checkpoint has an outer momentum of {len(momentum)} of {len(self.names)} "
                "parameters; train the same parameters, or continue with another outer"
            )
        return momentum

    def _list_weights(self) -> list[Tensor]:
        """Return the current tensors of the trained parameters.

        They are looked up each time, because an optimizer may replace the tensors of parameters.
        """
        named = dict(self.loss_module.model.named_parameters())
        return [named[name].detach() for name in self.names]

    def _collect_untrained(self) -> dict[str, Tensor]:
        """Return the untrained values: buffers and frozen parameters.

        They are looked up each time, because a forward pass may replace a buffer.
        """
        trained = set(self.names)
        return {
            name: each
            for name, each in collect_averageable(self.loss_module).items()
            if name not in trained
        }

    def _start_local_phase(self) -> None:
        """Record the state of the replicas, which are equal now."""
        self.last_values = {
            name: each.detach().clone() for name, each in self._collect_untrained().items()
        }
        self.local_steps = 0
        self.weight_since_average = 0.0
        self.common_weights: Sequence[Tensor] = ()
        if self.compression:
            self.common_weights = self.outer_optimizer.centre or [
                each.to(get_accumulation_dtype(each.dtype), copy=True)
                for each in self._list_weights()
            ]
        retained = {
            id(each): each
            for each in (
                *self.last_values.values(),
                *self.outer_optimizer.centre,
                *self.outer_optimizer.momentum,
                *self.common_weights,
            )
        }
        self.retained_bytes = sum(each.nbytes for each in retained.values())

    # ---- in a step ---------------------------------------------------------------------------
    @property
    def is_synchronous(self) -> bool:
        """Whether gradients are summed in this step."""
        return self.step < self.strategy.after

    @property
    def steps_alone(self) -> bool:  # type: ignore[override]
        """Whether this rank updates with the gradient of its own share only."""
        return not self.is_synchronous

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
            # in a step with an averaging all ranks learn of the request
            stop_count = (
                self.stop_requested
                if self.strategy.is_averaging_step(self.step)
                else self.stop_requests
            )
            self.totals = [weight, loss, float(stop_count), self.doubtful_weight]

    def refuse_zero_weight(self) -> None:
        if self.is_synchronous:
            super().refuse_zero_weight()  # no sample counts on any rank

    def update(self) -> None:
        if self.weight or self.is_synchronous:
            super().update()
        else:
            # schedulers check this flag to see that the optimizer stepped
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.local_steps = self.local_steps + (not self.is_synchronous)
        self.weight_since_average = self.weight_since_average + self.weight
        if self.strategy.is_averaging_step(self.step):
            self._average_replicas()
        self.step += 1

    def _average_replicas(self) -> None:
        """Average the replicas and continue with the result. Collective."""
        with self.log.record_detail("meeting", "wait"):
            weights, others = self._average_values(WEIGHTS)
        if weights is not None:
            self.outer_optimizer.update_replica(self._list_weights(), [*weights.values()])
        elif not self.local_steps:
            self.outer_optimizer.start_local_phase(self._list_weights())
        current = self._collect_untrained()
        for name, mean in others.items():
            current[name].detach().copy_(round_to_type(mean, current[name].dtype))
        self._sync_copies(
            {
                **dict(zip(self.names, self._list_weights(), strict=True)),
                **{name: current[name] for name in others},
            }
        )
        self._start_local_phase()

    def _sync_copies(self, tensors: dict[str, Tensor]) -> None:
        """Make the copies on the ranks of a partitioned replica equal.

        Tensors of a loss have no copies; they are on the rank that holds the loss.
        """
        self.copies.synchronize_copies(
            {name: each for name, each in tensors.items() if name in self.layout.specs}
        )

    def _average_values(
        self, kind: str, force: bool = False
    ) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        """Return the means of weights and of changed untrained values over replicas. Collective.

        Replicas count by their samples since the last averaging. The means of weights are None if
        all replicas still have equal weights, unless `force` is set.
        """
        self.kind = kind
        others = self._collect_untrained()
        counts, changed = self._share_status(kind, others)
        samples = sum(counts)
        counts_samples = samples > 0 and not self.outer_optimizer.counts_equally
        share, total = (
            (self.weight_since_average, samples)
            if counts_samples
            else (1.0, float(self.world.size))
        )
        needs_average = force or bool(self.local_steps and samples)
        # a part of the model may have no weights at all
        weights = dict(zip(self.names, self._list_weights(), strict=True)) if needs_average else {}
        changed_values = {
            name: others[name]
            .detach()
            .to(self.world.device, get_accumulation_dtype(others[name].dtype))
            for name in changed
        }
        if self.compression and kind == WEIGHTS:
            means = self._average_compressed(weights, share / (total * self.fault_factor))
            means |= self._sum_tensors(changed_values, share, total * self.fault_factor)
        else:
            means = self._sum_tensors(
                {**weights, **changed_values}, share, total * self.fault_factor
            )
        return {name: means[name] for name in weights} if needs_average else None, {
            name: means[name] for name in changed_values
        }

    def _average_compressed(self, weights: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Return the means of weights, computed from compressed moves. Collective.

        A move is the difference from the common weights of the last averaging. The moves of small
        tensors are not compressed.
        """
        assert self.compression is not None
        common = dict(zip(self.names, self.common_weights, strict=True))
        moves = {name: each - common[name] for name, each in weights.items()}
        large = {
            each: name
            for name, each in moves.items()
            if self.compression.compressor.compresses(each.shape)
        }
        self.sent_buckets = []
        started = [
            self.compression.begin({large[each]: each for each in bucket}, scale, self.step)
            for bucket in split_into_buckets(large)
        ]
        mean_moves = {
            name: reshape_and_cast_like(each, common[name])
            for bucket in started
            for name, each in self.compression.finish(bucket).items()
        }
        mean_moves |= self._sum_tensors(
            {name: each for name, each in moves.items() if name not in mean_moves}, scale
        )
        return {name: common[name] + each for name, each in mean_moves.items()}

    def _share_status(self, kind: str, others: dict[str, Tensor]) -> tuple[list[float], list[str]]:
        """Share the status of all replicas. Collective.

        All replicas also learn of stop requests. If replicas are not at the same position, all of
        them raise StepFailed.

        Returns:
            The weight of each replica since the last averaging, and the names of untrained values
            that any replica changed.
        """
        has_changed = [
            name not in self.last_values or not is_same_value(each, self.last_values[name])
            for name, each in others.items()
        ]
        sizes = [
            (each.numel() + 1) * (1 if flag else -1)
            for each, flag in zip(others.values(), has_changed, strict=True)
        ]
        rates = [float(group.get("lr") or 0.0) for group in self.optimizer.param_groups]
        own_status = torch.tensor(
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
            kind,
            count_collective_bytes("all_gather", own_status.nbytes, self.world.size),
            computed=True,
        )
        with explain_independent_steps():
            statuses = [each.tolist() for each in self.world.all_gather(own_status)]
        self._refuse_out_of_step(statuses, len(rates), [*others])
        self.stop_requests = sum(each[POSITION_NUMBERS + 1] for each in statuses)
        changed_flags = [
            max(each) > 0
            for each in zip(
                *(each[HEADER_NUMBERS + len(rates) :] for each in statuses), strict=True
            )
        ]
        changed = [name for name, has_any in zip(others, changed_flags, strict=True) if has_any]
        self.notes.note_averages(changed)
        if self.weight_since_average and self.python_snapshot is not None:
            self.notes.note_python_state(
                self.python_snapshot.python_state, "each worker's own", self.layout.serial_names
            )
            self.python_snapshot = None
        return [each[POSITION_NUMBERS] for each in statuses], changed

    def _refuse_out_of_step(
        self, statuses: list[list[float]], rate_count: int, names: list[str]
    ) -> None:
        """Refuse replicas that differ in position, learning rates or sizes of values.

        All replicas raise StepFailed together.
        """
        first = statuses[0]
        global_ranks = self.world.global_ranks
        for rank, status in enumerate(statuses):
            if status[:POSITION_NUMBERS] != first[:POSITION_NUMBERS]:
                raise StepFailed(
                    OUT_OF_STEP_MESSAGE.format(
                        *(
                            part
                            for number in (0, rank)
                            for part in (
                                global_ranks[number],
                                ("tests, saves or ends" if statuses[number][1] else "averages")
                                + f" in step {int(statuses[number][0])}",
                            )
                        )
                    )
                )
            for number, (other_value, first_value) in enumerate(
                zip(
                    status[HEADER_NUMBERS : HEADER_NUMBERS + rate_count],
                    first[HEADER_NUMBERS : HEADER_NUMBERS + rate_count],
                    strict=True,
                )
            ):
                if other_value != first_value:
                    raise StepFailed(
                        OTHER_RATE_MESSAGE.format(
                            number, first_value, global_ranks[0], other_value, global_ranks[rank]
                        )
                    )
            for name, other_value, first_value in zip(
                names,
                status[HEADER_NUMBERS + rate_count :],
                first[HEADER_NUMBERS + rate_count :],
                strict=True,
            ):
                if abs(other_value) != abs(first_value):
                    raise StepFailed(
                        OTHER_SIZE_MESSAGE.format(
                            abs(int(first_value)) - 1,
                            global_ranks[0],
                            abs(int(other_value)) - 1,
                            global_ranks[rank],
                        ),
                        tensor=name,
                    )

    # ---- inspection and checkpoints ----------------------------------------------------------
    def _compute_effective_values(self, kind: str, force: bool = False) -> dict[Tensor, Tensor]:
        """Return the effective value of every tensor that differs on this replica. Collective."""
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
            # no replica has the weights of the centre
            values = dict(zip(self.names, self.outer_optimizer.centre, strict=True))
        self._sync_copies(effective := {**(values or {}), **others})
        current = {**dict(self.loss_module.model.named_parameters()), **self._collect_untrained()}
        return {current[name]: value for name, value in effective.items()}

    @contextlib.contextmanager
    def _use_effective_values(self, kind: str, force: bool = False) -> Iterator[None]:
        """Give the tensors their effective values during the context. Collective."""
        effective = {} if self.is_settled else self._compute_effective_values(kind, force)
        original = {tensor: tensor.data for tensor in effective}
        for tensor, value in effective.items():
            # a copy, because a view of a bucket could not be saved
            tensor.data = round_to_type(value, tensor.dtype).to(tensor.device, copy=True)
        try:
            yield
        finally:
            for tensor, data in original.items():
                tensor.data = data

    def use_effective_weights(self) -> contextlib.AbstractContextManager[None]:
        return self._use_effective_values(CHECKPOINT_TRAFFIC)

    @contextlib.contextmanager
    def use_evaluation_weights(self) -> Iterator[None]:
        """Return a context in which the model has the effective weights for a test.

        An optimizer with modes turns equal weights into different ones on each replica, by its own
        state. So the weights are always averaged in that case.
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
        """Return the mean of the optimizer states of those replicas that have one. Collective."""
        if self.is_settled:
            return super().gather_optimizer_state()
        own_state = {
            name: {what: copy_to_host(value) for what, value in values.items()}
            for name, values in super().gather_optimizer_state().items()
        }
        if self.world.rank:
            self.count_bytes(
                CHECKPOINT_TRAFFIC,
                sum(
                    value.nbytes
                    for values in own_state.values()
                    for value in values.values()
                    if isinstance(value, Tensor)
                ),
                computed=True,
            )
        reports = self.world.gather_objects(
            (self.weight_since_average, own_state, collect_group_numbers(self.optimizer))
        )
        self.notes.note_optimizer_groups([groups for *_, groups in reports])
        return average_state([each[:2] for each in reports])

    def collect_saved_tensors(self) -> OptimizerState:
        momentum = self.outer_optimizer.momentum
        return (
            {name: {OUTER_MOMENTUM: each} for name, each in zip(self.names, momentum, strict=True)}
            if momentum
            else {}
        )
