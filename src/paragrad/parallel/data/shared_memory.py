"""Data parallelism of ranks that share memory.

Parameters and optimizer state are on the host once. In a step every rank writes its gradients into
a row of its own. After a barrier every rank adds *its slice* of all rows and divides it by the
global weight. Then it updates that slice of the parameters, with that slice of the optimizer state.
After another barrier all ranks have the new parameters. With clipping there is a third barrier, for
the norm.

So the exchange reads every gradient once. The update, which data parallelism usually repeats on
every rank, is done once, in parallel. Between hosts, ZeRO does it in this way (Rajbhandari et al.
2020, arXiv 1910.02054).

* A large gradient moves into the row as soon as backward has computed it, and is freed. Small
  gradients move in one operation at the end.
* The sum, and then the mean, is in row 0 until the next step begins. Each rank writes its own slice
  of it.
* The optimizer is the user's own object. Its parameter groups hold the ranges of the slice instead
  of the parameters, so schedulers and settings of groups still work.
  `engine/optimizer/update_probe.py` finds out how the update may be divided.
* A parameter for which no rank had a gradient in a step has none, as in `serial`. So every rank
  shares which parameters it used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.exchange import Exchange, Replica
from paragrad.engine.layout import (
    OptimizerState,
    ShardSpec,
    assemble_optimizer_state,
    install_shards,
)
from paragrad.engine.optimizer.modes import has_modes, set_optimizer_mode, use_optimizer_eval_mode
from paragrad.engine.optimizer.update_probe import agree_on_granularity, compute_clip_factor
from paragrad.engine.optimizer.update_slices import (
    ParameterRange,
    assign_slices,
    step_with_fast_kernels,
)
from paragrad.parallel.data.host_memory import HostMemory
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.shm.region import align_to_cache_line
from paragrad.strategies.strategy import PER_ELEMENT, WHOLE_MODEL

LARGE_GRADIENT_BYTES = 2**16  # bytes from which a gradient moves during backward
BLOCK_BYTES = 2**18  # bytes that are added at once
STATE_PART_BYTES = 2**24  # bytes of parameters whose optimizer state is gathered at once


class SharedMemoryExchange(Exchange):
    """The exchange of `data(n, state=shared_memory)`.

    The constructor is collective: all ranks make the exchange together.

    Args:
        replica: What this rank holds of the training.

        world: The world of the workers, which are on one host.

        log: The step log that receives spans and choices.

    Attributes:
        world: The world of the workers.

        log: The step log.

        step: Number of the step, counted from the start of this run.

        is_stepping: Whether a micro-batch of a step is running.

        trained_names: Names of the trained parameters.

        trained_parameters: The trained parameters.

        rank_ranges: For each rank, the ranges of parameters that it updates.

        host_memory: The shared region.

        gradient_row: Places of the gradients in the row of this rank, by parameter.

        mean_gradients: Places of the mean gradients in row 0, by parameter.

        row_blocks: For each block of the slice of this rank, its part of all rows.

        read_bytes: Bytes that this rank reads from the rows of other ranks in a step.

        is_element_wise: Whether the optimizer updates element by element.

        runs_optimizer: Whether this rank runs the optimizer.

        own_slice: For each range of this rank, (range, place of the values, place of the gradient).

        used_flags: For each parameter, whether this rank had a gradient in this step.

        any_rank_used: For each parameter, whether any rank had a gradient in the last step.

        hooks: The hooks that move large gradients during backward.
    """

    def __init__(self, replica: Replica, world: World, log: StepLog) -> None:
        super().__init__(replica)
        module = replica.module
        optimizer = replica.optimizer
        self.world = world
        self.log = log
        self.sharing_ranks = world.size
        self.step, self.is_stepping = 0, False
        trained = {
            name: parameter
            for name, parameter in module.model.named_parameters()
            if parameter.requires_grad
        }
        self.trained_names = list(trained)
        self.trained_parameters = list(trained.values())
        # once for all steps, while every rank still has its own parameters
        set_optimizer_mode(optimizer, "train")
        granularity = agree_on_granularity(optimizer, world)
        self.rank_ranges, reason = assign_slices(
            optimizer, granularity, [each.numel() for each in self.trained_parameters], world.size
        )
        log.write_choice("slices", type(optimizer).__name__, reason)
        self.host_memory = HostMemory(
            world, list(module.model.parameters()), self.trained_parameters
        )
        self._share_parameters()
        self.gradient_row = [
            self.host_memory.get_gradient(world.rank, index)
            for index in range(len(self.trained_parameters))
        ]
        self.mean_gradients = [
            self.host_memory.get_gradient(0, index) for index in range(len(self.trained_parameters))
        ]
        self.row_blocks = [
            [self.host_memory.get_row_range(rank, *block) for rank in range(world.size)]
            for block in self._list_blocks()
        ]
        self.read_bytes = sum(
            rows[0].numel() * rows[0].element_size() for rows in self.row_blocks
        ) * (world.size - 1)
        # gradients move into the row of this rank, so no other memory holds them
        self.peak_bytes = 0
        self.is_element_wise = granularity == PER_ELEMENT
        self.runs_optimizer = granularity != WHOLE_MODEL or world.rank == 0
        self.own_slice = [
            (
                element_range,
                self._view_range(self.trained_parameters, element_range),
                self._view_range(self.mean_gradients, element_range),
            )
            for element_range in self.rank_ranges[world.rank]
        ]
        if self.is_element_wise:
            install_shards(
                optimizer,
                {
                    self.trained_parameters[element_range.index]: [
                        (self._make_shard_spec(element_range), place)
                    ]
                    for element_range, place, _ in self.own_slice
                },
            )
        self.used_flags = [False] * len(self.trained_parameters)
        self.any_rank_used = bytes(len(self.trained_parameters))
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_move_hook(index))
            for index, parameter in enumerate(self.trained_parameters)
            if parameter.numel() * parameter.element_size() >= LARGE_GRADIENT_BYTES
        ]

    def _share_parameters(self) -> None:
        """Move the parameters into the shared region, with the values of rank 0."""
        parameters = list(self.loss_module.model.parameters())
        if self.world.rank == 0:
            torch._foreach_copy_(
                self.host_memory.shared_parameters, [parameter.detach() for parameter in parameters]
            )
        self._wait_at_barrier("sharing the parameters")
        for parameter, place in zip(parameters, self.host_memory.shared_parameters, strict=True):
            parameter.data = place

    def _view_range(self, tensors: list[Any], stretch: ParameterRange) -> Tensor:
        """Return a flat range if the optimizer updates by element, otherwise the tensor itself."""
        tensor: Tensor = tensors[stretch.index]
        return (
            tensor.detach().view(-1)[stretch.start : stretch.stop]
            if self.is_element_wise
            else tensor
        )

    def _make_shard_spec(self, stretch: ParameterRange) -> ShardSpec:
        return ShardSpec(
            self.trained_names[stretch.index],
            tuple(self.trained_parameters[stretch.index].shape),
            range(stretch.start, stretch.stop) if self.is_element_wise else None,
        )

    def _list_blocks(self) -> Iterator[tuple[torch.dtype, int, int]]:
        """Yield (dtype, start, stop) of the blocks of the slice of this rank, in bytes of the row.

        A block stays in the cache until it is divided.
        """
        for dtype, first, last in self._list_row_ranges():
            for start in range(first, last, BLOCK_BYTES):
                yield dtype, start, min(start + BLOCK_BYTES, last)

    def _list_row_ranges(self) -> list[tuple[torch.dtype, int, int]]:
        """Return the ranges of a row that make up the slice of this rank.

        Ranges of neighbouring parameters are joined.
        """
        row_ranges: list[tuple[torch.dtype, int, int]] = []
        for element_range in self.rank_ranges[self.world.rank]:
            parameter = self.trained_parameters[element_range.index]
            offset = self.host_memory.row_offsets[element_range.index]
            size = parameter.element_size()
            start = offset + element_range.start * size
            stop = offset + element_range.stop * size
            if (
                row_ranges
                and row_ranges[-1][0] == parameter.dtype
                and align_to_cache_line(row_ranges[-1][2]) == start
            ):
                # the padding between the two is zero in every row
                row_ranges[-1] = (parameter.dtype, row_ranges[-1][1], stop)
            else:
                row_ranges.append((parameter.dtype, start, stop))
        return row_ranges

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        self.sent_bytes = {}
        self.used_flags = [False] * len(self.trained_parameters)
        self.refuse_refrozen()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def _make_move_hook(self, index: int) -> Callable[[Tensor], None]:
        row = self.gradient_row[index]

        def move(parameter: Tensor) -> None:
            if not self.is_stepping:  # this is the reference step of one worker
                return
            assert parameter.grad is not None
            if self.used_flags[index]:  # this is a later micro-batch
                row.add_(parameter.grad)
            else:
                row.copy_(parameter.grad)
                self.used_flags[index] = True
            parameter.grad = None

        return move

    def finish(self, weight: float, loss: float) -> None:
        rows = []
        gradients = []
        for index, parameter in enumerate(self.trained_parameters):
            if parameter.grad is not None:
                rows.append(self.gradient_row[index])
                gradients.append(parameter.grad)
                parameter.grad = None
                self.used_flags[index] = True
            elif not self.used_flags[index] and self.any_rank_used[index]:
                # the row still has the gradient of the last step, or in row 0 the mean
                self.gradient_row[index].zero_()
        if rows:
            torch._foreach_copy_(rows, gradients)
        self.host_memory.get_used_flags(self.world.rank)[:] = bytes(self.used_flags)
        self.host_memory.write_totals(
            self.world.rank, weight, loss, float(self.stop_requested), self.doubtful_weight
        )
        self._wait_in_step("adding up gradients")

    def reduce_totals(self) -> list[float]:
        return [
            sum(numbers)
            for numbers in zip(
                *map(self.host_memory.read_totals, range(self.world.size)), strict=True
            )
        ]

    def average(self, weight: float) -> None:
        start = self.log.now()
        for mean, *others in self.row_blocks:
            for row in others:
                mean.add_(row)
            mean.div_(weight)
        self.count_bytes("gradients", self.read_bytes, computed=False)
        self.log.add_span("reduce", "receive", start, bytes=self.read_bytes)
        used_by_any = bytes(map(max, *map(self.host_memory.get_used_flags, range(self.world.size))))
        if used_by_any != self.any_rank_used or not self.is_element_wise:
            for element_range, place, gradient in self.own_slice:
                place.grad = gradient if used_by_any[element_range.index] else None
        self.any_rank_used = used_by_any

    def gather_mean_gradients(self) -> dict[str, Tensor | None]:
        self._wait_at_barrier("averaging gradients")
        return self._list_mean_gradients()

    def update(self) -> None:
        if self.clip_norm is not None:
            self._clip_gradients(self.clip_norm)
        if self.runs_optimizer:
            step_with_fast_kernels(self.optimizer)
        else:
            # schedulers check this flag to see that the optimizer stepped
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._wait_in_step("updating parameters")
        self.step += 1

    def skip_update(self) -> None:
        super().skip_update()
        self._wait_in_step("skipping an update")
        self.step += 1

    @contextmanager
    def use_evaluation_weights(self) -> Iterator[None]:
        if not has_modes(self.optimizer):
            yield
            return
        self._wait_at_barrier("going to eval mode")
        with (
            use_optimizer_eval_mode(self.optimizer, [place for _, place, _ in self.own_slice])
            if self.runs_optimizer
            else nullcontext()
        ):
            self._wait_at_barrier("reading parameters in eval mode")
            yield
            self._wait_at_barrier("going back from eval mode")
        self._wait_at_barrier("reading parameters in training mode")

    def _clip_gradients(self, max_norm: float) -> None:
        """Clip the mean gradients as torch.nn.utils.clip_grad_norm_ does, over all slices."""
        self.host_memory.norms[self.world.rank] = sum(
            float(
                torch.linalg.vector_norm(mean, dtype=torch.promote_types(mean.dtype, torch.float32))
            )
            ** 2
            for mean, *_ in self.row_blocks
        )
        self._wait_in_step("taking the norm of gradients")
        norm = float(self.host_memory.norms.sum().sqrt())
        for mean, *_ in self.row_blocks:
            mean.mul_(compute_clip_factor(norm, max_norm))

    def _wait_at_barrier(self, action: str) -> None:
        self.host_memory.wait_for_ranks(lambda: f"{action}, step {self.step}")

    def _wait_in_step(self, action: str) -> None:
        """Wait at a barrier of every step, and record the time."""
        with self.log.record_detail(action, "wait"):
            self._wait_at_barrier(action)

    # ---- inspection and checkpoints ----------------------------------------------------------
    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Return the mean gradients. They are valid until any rank begins the next step."""
        return {
            name: None if each is None else each.clone()
            for name, each in self._list_mean_gradients().items()
        }

    def _list_mean_gradients(self) -> dict[str, Tensor | None]:
        """Return the mean gradients in the memory that all ranks share."""
        gradients: dict[str, Tensor | None] = dict.fromkeys(
            name for name, _ in self.loss_module.model.named_parameters()
        )
        gradients.update(
            {
                name: self.mean_gradients[index]
                for index, name in enumerate(self.trained_names)
                if self.any_rank_used[index]
            }
        )
        return gradients

    def gather_optimizer_state(self) -> OptimizerState:
        """Return the optimizer state of all ranks on rank 0, and an empty state on the others.
        Collective.
        """
        gathered: OptimizerState = {}
        for _, state in self.iterate_optimizer_state():
            gathered.update(state)
        return gathered

    def iterate_optimizer_state(self) -> Iterator[tuple[list[str], OptimizerState]]:
        for indices in _group_by_bytes(self.trained_parameters):
            own_states = [
                (self._make_shard_spec(element_range), self.optimizer.state.get(place, {}))
                for element_range, place, _ in self.own_slice
                if element_range.index in indices
            ]
            yield (
                [self.trained_names[index] for index in indices],
                assemble_optimizer_state(
                    each for parts in self.world.gather_objects(own_states) for each in parts
                ),
            )

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.host_memory.forget_peers()


def _group_by_bytes(parameters: Sequence[Tensor]) -> list[range]:
    """Group successive parameters, by index; a group of several has at most STATE_PART_BYTES."""
    groups = list[range]()
    start, size = 0, 0
    for index, each in enumerate(parameters):
        if index > start and size + each.nbytes > STATE_PART_BYTES:
            groups.append(range(start, index))
            start, size = index, 0
        size += each.nbytes
    return [*groups, range(start, len(parameters))]
