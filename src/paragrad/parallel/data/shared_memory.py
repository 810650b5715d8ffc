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
from paragrad.engine.layout import Held, State, hand_over, state_together
from paragrad.engine.optimizer.modes import has_modes, in_eval_mode, set_mode
from paragrad.engine.optimizer.update_probe import clip_factor, updates_by
from paragrad.engine.optimizer.update_slices import FOREACH, Stretch, slices, updated
from paragrad.parallel.data.host_memory import HostMemory
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.shm.region import aligned
from paragrad.strategies.strategy import ALL, ELEMENT, KINDS

LARGE = 2**16  # bytes from which a gradient moves in backward
BLOCK = 2**18  # bytes that are added up at once


class SharedMemory(Exchange):
    """The exchange of `data(n, state=shared_memory)`. Collective: all ranks make it
    together.
    """

    def __init__(self, replica: Replica, world: World, log: Log) -> None:
        super().__init__(replica)
        module = replica.module
        optimizer = replica.optimizer
        self.world = world
        self.log = log
        self.sharing = world.size
        self.step, self.stepping = 0, False
        trained = {
            name: parameter
            for name, parameter in module.model.named_parameters()
            if parameter.requires_grad
        }
        self.names = list(trained)
        self.parameters = list(trained.values())
        # here, where every rank has parameters of its own, once for all steps
        set_mode(optimizer, "train")
        kind = updates_by(optimizer, known=type(optimizer) in FOREACH)
        kind = KINDS[int(world.all_reduced(torch.tensor(float(KINDS.index(kind))), "MAX"))]
        self.stretches, because = slices(
            optimizer, kind, [each.numel() for each in self.parameters], world.size
        )
        log.choice("slices", type(optimizer).__name__, because)
        self.memory = HostMemory(world, list(module.model.parameters()), self.parameters)
        self._share()
        self.row = [
            self.memory.gradient(world.rank, index) for index in range(len(self.parameters))
        ]
        self.mean = [self.memory.gradient(0, index) for index in range(len(self.parameters))]
        self.sums = [
            [self.memory.stretch(rank, *block) for rank in range(world.size)]
            for block in self._blocks()
        ]
        self.read = sum(rows[0].numel() * rows[0].element_size() for rows in self.sums) * (
            world.size - 1
        )
        # gradients move into this rank's row of the region, and are nowhere else
        self.largest = 0
        self.cut = kind == ELEMENT
        self.updates = kind != ALL or world.rank == 0
        self.own = [
            (stretch, self._stretch(self.parameters, stretch), self._stretch(self.mean, stretch))
            for stretch in self.stretches[world.rank]
        ]
        if self.cut:
            hand_over(
                optimizer,
                {
                    self.parameters[stretch.index]: [(self._held(stretch), place)]
                    for stretch, place, _ in self.own
                },
            )
        self.used = [False] * len(self.parameters)  # in this step, by this rank
        self.anyone = bytes(len(self.parameters))  # in the last step, by any rank
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._mover(index))
            for index, parameter in enumerate(self.parameters)
            if parameter.numel() * parameter.element_size() >= LARGE
        ]

    def _share(self) -> None:
        """Rank 0's values become everybody's, in one place."""
        parameters = list(self.summed.model.parameters())
        if self.world.rank == 0:
            torch._foreach_copy_(
                self.memory.shared, [parameter.detach() for parameter in parameters]
            )
        self._barrier("sharing the parameters")
        for parameter, place in zip(parameters, self.memory.shared, strict=True):
            parameter.data = place

    def _stretch(self, tensors: list[Any], stretch: Stretch) -> Tensor:
        """A flat stretch where the optimizer updates by element, otherwise the tensor
        itself.
        """
        tensor: Tensor = tensors[stretch.index]
        return tensor.detach().view(-1)[stretch.start : stretch.stop] if self.cut else tensor

    def _held(self, stretch: Stretch) -> Held:
        return Held(
            self.names[stretch.index],
            tuple(self.parameters[stretch.index].shape),
            range(stretch.start, stretch.stop) if self.cut else None,
        )

    def _blocks(self) -> Iterator[tuple[torch.dtype, int, int]]:
        """(type, start, stop in bytes of the row): this rank's slice, in stretches that stay in
        the cache until divided.
        """
        for dtype, first, last in self._runs():
            for start in range(first, last, BLOCK):
                yield dtype, start, min(start + BLOCK, last)

    def _runs(self) -> list[tuple[torch.dtype, int, int]]:
        """The stretches of a row that make up this rank's slice, over the bounds of
        parameters.
        """
        runs: list[tuple[torch.dtype, int, int]] = []
        for stretch in self.stretches[self.world.rank]:
            parameter = self.parameters[stretch.index]
            place = self.memory.places[stretch.index]
            size = parameter.element_size()
            start = place + stretch.start * size
            stop = place + stretch.stop * size
            if runs and runs[-1][0] == parameter.dtype and aligned(runs[-1][2]) == start:
                # what lies between is zero in every row
                runs[-1] = (parameter.dtype, runs[-1][1], stop)
            else:
                runs.append((parameter.dtype, start, stop))
        return runs

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        self.sent = {}
        self.used = [False] * len(self.parameters)
        self.refuse_refrozen()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def _mover(self, index: int) -> Callable[[Tensor], None]:
        row = self.row[index]

        def move(parameter: Tensor) -> None:
            if not self.stepping:  # one worker's step, beside
                return
            assert parameter.grad is not None
            if self.used[index]:  # a later micro-batch
                row.add_(parameter.grad)
            else:
                row.copy_(parameter.grad)
                self.used[index] = True
            parameter.grad = None

        return move

    def finish(self, weight: float, loss: float) -> None:
        rows = []
        gradients = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                rows.append(self.row[index])
                gradients.append(parameter.grad)
                parameter.grad = None
                self.used[index] = True
            elif not self.used[index] and self.anyone[index]:
                # of the last gradient, or in row 0 of the mean
                self.row[index].zero_()
        if rows:
            torch._foreach_copy_(rows, gradients)
        self.memory.used(self.world.rank)[:] = bytes(self.used)
        self.memory.count(self.world.rank, weight, loss, float(self.stop), self.doubt)
        self._meet("adding up gradients")

    def counted(self) -> list[float]:
        return [
            sum(numbers)
            for numbers in zip(*map(self.memory.counts, range(self.world.size)), strict=True)
        ]

    def average(self, weight: float) -> None:
        start = self.log.now()
        for mean, *others in self.sums:
            for row in others:
                mean.add_(row)
            mean.div_(weight)
        self.count("gradients", self.read, computed=False)
        self.log.add_span("reduce", "receive", start, bytes=self.read)
        anyone = bytes(map(max, *map(self.memory.used, range(self.world.size))))
        if anyone != self.anyone or not self.cut:
            for stretch, place, gradient in self.own:
                place.grad = gradient if anyone[stretch.index] else None
        self.anyone = anyone

    def averaged(self) -> dict[str, Tensor | None]:
        self._barrier("averaging gradients")
        return self.gradients()

    def update(self) -> None:
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        if self.updates:
            updated(self.optimizer)
        else:
            # schedulers want to know
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._meet("updating parameters")
        self.step += 1

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if not has_modes(self.optimizer):
            yield
            return
        self._barrier("going to eval mode")
        with (
            in_eval_mode(self.optimizer, [place for _, place, _ in self.own])
            if self.updates
            else nullcontext()
        ):
            self._barrier("reading parameters in eval mode")
            yield
            self._barrier("going back from eval mode")
        self._barrier("reading parameters in training mode")

    def _clip(self, most: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, over all slices."""
        self.memory.norms[self.world.rank] = sum(
            float(
                torch.linalg.vector_norm(mean, dtype=torch.promote_types(mean.dtype, torch.float32))
            )
            ** 2
            for mean, *_ in self.sums
        )
        self._meet("taking the norm of gradients")
        norm = float(self.memory.norms.sum().sqrt())
        for mean, *_ in self.sums:
            mean.mul_(clip_factor(norm, most))

    def _barrier(self, doing: str) -> None:
        self.memory.barrier(lambda: f"{doing}, step {self.step}")

    def _meet(self, doing: str) -> None:
        """A barrier that is in every step."""
        with self.log.detail(doing, "wait"):
            self._barrier(doing)

    # ---- what others look at -----------------------------------------------------------------
    def gradients(self) -> dict[str, Tensor | None]:
        """Until any rank begins the next step."""
        found: dict[str, Tensor | None] = dict.fromkeys(
            name for name, _ in self.summed.model.named_parameters()
        )
        found.update(
            {
                name: self.mean[index].clone()
                for index, name in enumerate(self.names)
                if self.anyone[index]
            }
        )
        return found

    def state(self) -> State:
        """Empty on the other ranks."""
        mine = [
            (self._held(stretch), self.optimizer.state.get(place, {}))
            for stretch, place, _ in self.own
        ]
        return state_together(each for parts in self.world.collected(mine) for each in parts)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.memory.forget()
