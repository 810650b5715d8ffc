"""Data parallelism of ranks that share memory: parameters, and the optimizer's state, are on
the host once.

In a step every rank puts its gradients into a row of its own; a barrier; every rank adds up
*its slice* of all rows, divides it by the global weight and updates that slice of the
parameters with that slice of the optimizer's state; another barrier, and the parameters are new
for everybody. With clipping there is a third, for the norm. So the exchange is one reading of
every gradient, and the update, which data parallelism usually repeats on every rank, is done
once, in parallel (as ZeRO does it between hosts: Rajbhandari et al. 2020, arXiv 1910.02054).

* A large gradient moves into the row as soon as backward has it, and is freed; small ones in
one operation at the end.
* The sum, and then the mean, lies in row 0 (each rank writes its own slice there), until the
next step begins.
* The optimizer is the user's own object: its parameter groups hold the slice's stretches
instead of the parameters, so
  schedulers and settings by group go on working. `updating.py` tries how it may be cut.
* Parameters of which no rank had a gradient in a step have none, as in serial: every rank says
which it used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from paragrad.engine.optimizer.update_probe import compute_clip_factor, find_update_granularity
from paragrad.engine.optimizer.update_slices import (
    FOREACH_OPTIMIZERS,
    ParameterRange,
    assign_slices,
    step_with_fast_kernels,
)
from paragrad.parallel.data.host_memory import HostMemory
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.shm.region import align_to_cache_line
from paragrad.strategies.strategy import PER_ELEMENT, UPDATE_GRANULARITIES, WHOLE_MODEL

LARGE_GRADIENT_BYTES = 2**16  # bytes from which a gradient moves in backward
BLOCK_BYTES = 2**18  # bytes that are added up at once


class SharedMemoryExchange(Exchange):
    """The exchange of `data(n, state=shared_memory)`. Collective: all ranks make it
    together.
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
        # here, where every rank has parameters of its own, once for all steps
        set_optimizer_mode(optimizer, "train")
        kind = find_update_granularity(
            optimizer, known_elementwise=type(optimizer) in FOREACH_OPTIMIZERS
        )
        kind = UPDATE_GRANULARITIES[
            int(world.all_reduce(torch.tensor(float(UPDATE_GRANULARITIES.index(kind))), "MAX"))
        ]
        self.rank_ranges, because = assign_slices(
            optimizer, kind, [each.numel() for each in self.trained_parameters], world.size
        )
        log.write_choice("slices", type(optimizer).__name__, because)
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
        # gradients move into this rank's row of the region, and are nowhere else
        self.peak_bytes = 0
        self.is_element_wise = kind == PER_ELEMENT
        self.runs_optimizer = kind != WHOLE_MODEL or world.rank == 0
        self.own_slice = [
            (
                stretch,
                self._view_range(self.trained_parameters, stretch),
                self._view_range(self.mean_gradients, stretch),
            )
            for stretch in self.rank_ranges[world.rank]
        ]
        if self.is_element_wise:
            install_shards(
                optimizer,
                {
                    self.trained_parameters[stretch.index]: [
                        (self._make_shard_spec(stretch), place)
                    ]
                    for stretch, place, _ in self.own_slice
                },
            )
        self.used_flags = [False] * len(self.trained_parameters)  # in this step, by this rank
        self.any_rank_used = bytes(len(self.trained_parameters))  # in the last step, by any rank
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_move_hook(index))
            for index, parameter in enumerate(self.trained_parameters)
            if parameter.numel() * parameter.element_size() >= LARGE_GRADIENT_BYTES
        ]

    def _share_parameters(self) -> None:
        """Rank 0's values become everybody's, in one place."""
        parameters = list(self.loss_module.model.parameters())
        if self.world.rank == 0:
            torch._foreach_copy_(
                self.host_memory.shared_parameters, [parameter.detach() for parameter in parameters]
            )
        self._wait_at_barrier("sharing the parameters")
        for parameter, place in zip(parameters, self.host_memory.shared_parameters, strict=True):
            parameter.data = place

    def _view_range(self, tensors: list[Any], stretch: ParameterRange) -> Tensor:
        """A flat stretch where the optimizer updates by element, otherwise the tensor
        itself.
        """
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
        """(type, start, stop in bytes of the row): this rank's slice, in stretches that stay in
        the cache until divided.
        """
        for dtype, first, last in self._list_row_ranges():
            for start in range(first, last, BLOCK_BYTES):
                yield dtype, start, min(start + BLOCK_BYTES, last)

    def _list_row_ranges(self) -> list[tuple[torch.dtype, int, int]]:
        """The stretches of a row that make up this rank's slice, over the bounds of
        parameters.
        """
        runs: list[tuple[torch.dtype, int, int]] = []
        for stretch in self.rank_ranges[self.world.rank]:
            parameter = self.trained_parameters[stretch.index]
            place = self.host_memory.row_offsets[stretch.index]
            size = parameter.element_size()
            start = place + stretch.start * size
            stop = place + stretch.stop * size
            if (
                runs
                and runs[-1][0] == parameter.dtype
                and align_to_cache_line(runs[-1][2]) == start
            ):
                # what lies between is zero in every row
                runs[-1] = (parameter.dtype, runs[-1][1], stop)
            else:
                runs.append((parameter.dtype, start, stop))
        return runs

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
            if not self.is_stepping:  # one worker's step, beside
                return
            assert parameter.grad is not None
            if self.used_flags[index]:  # a later micro-batch
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
                # of the last gradient, or in row 0 of the mean
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
        anyone = bytes(map(max, *map(self.host_memory.get_used_flags, range(self.world.size))))
        if anyone != self.any_rank_used or not self.is_element_wise:
            for stretch, place, gradient in self.own_slice:
                place.grad = gradient if anyone[stretch.index] else None
        self.any_rank_used = anyone

    def gather_mean_gradients(self) -> dict[str, Tensor | None]:
        self._wait_at_barrier("averaging gradients")
        return self.gather_gradients()

    def update(self) -> None:
        if self.clip_norm is not None:
            self._clip_gradients(self.clip_norm)
        if self.runs_optimizer:
            step_with_fast_kernels(self.optimizer)
        else:
            # schedulers want to know
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._wait_in_step("updating parameters")
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
        """As torch.nn.utils.clip_grad_norm_, over all slices."""
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
        """A barrier that is in every step."""
        with self.log.record_detail(action, "wait"):
            self._wait_at_barrier(action)

    # ---- what others look at -----------------------------------------------------------------
    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Until any rank begins the next step."""
        found: dict[str, Tensor | None] = dict.fromkeys(
            name for name, _ in self.loss_module.model.named_parameters()
        )
        found.update(
            {
                name: self.mean_gradients[index].clone()
                for index, name in enumerate(self.trained_names)
                if self.any_rank_used[index]
            }
        )
        return found

    def gather_optimizer_state(self) -> OptimizerState:
        """Empty on the other ranks."""
        mine = [
            (self._make_shard_spec(stretch), self.optimizer.state.get(place, {}))
            for stretch, place, _ in self.own_slice
        ]
        return assemble_optimizer_state(
            each for parts in self.world.gather_objects(mine) for each in parts
        )

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.host_memory.forget_peers()
