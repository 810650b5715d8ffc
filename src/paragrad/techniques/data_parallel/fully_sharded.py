"""Data parallelism in which every rank holds a part of all parameters, gradients and optimizer state: torch's FSDP2.

The division is ours, once, by the global weight: FSDP2 divides by 1.0 and sums (`set_force_sum_reduction_for_comms`; without
it a factor of 1.0 is played as PREMUL_SUM in float32). Each parameter is cut along its first dimension, so what a rank holds is
a flat range of it; the optimizer holds these ranges as plain tensors, as in shared memory.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from paragrad.errors import StepFailed
from paragrad.record.log import Log
from paragrad.techniques.data_parallel.groups import groups
from paragrad.techniques.exchange import Exchange, Replica
from paragrad.techniques.layout import Held, Layout, State, hand_over, hollow
from paragrad.techniques.slices import FOREACH
from paragrad.techniques.updating import ELEMENT, KINDS, updates_by
from paragrad.world.world import World


class FullySharded(Exchange):
    """The exchange of `data(n, state=fully_sharded)`. Collective: all ranks make it together."""
    collective = True

    def __init__(self, replica: Replica, world: World, log: Log) -> None:
        super().__init__(replica)
        self.world = world
        kind = updates_by(self.optimizer, known=type(self.optimizer) in FOREACH)
        kind = KINDS[int(world.all_reduced(torch.tensor(float(KINDS.index(kind))), "MAX"))]
        if kind != ELEMENT:
            raise StepFailed(f"{type(self.optimizer).__name__} does not update element by element (tried on a small copy), and "
                             "state=fully_sharded gives it parts of tensors; use one that does, such as Adam, or leave out the "
                             "state")
        whole = replica.module.model
        assert replica.forward is not None
        told = world.collected(groups(whole, replica.forward))
        names = world.agreed([name for name in told[0] if all(name in each for each in told)] if told else None)
        log.choice("groups", str(len(names) + 1), "modules whose parameters are used in their own calls alone, and the rest")
        before = dict(whole.named_parameters())
        self.hollow = hollow(whole)
        shapes = {name: tuple(each.shape) for name, each in before.items()}
        if replica.kept:
            self.summed = self.module = replica.module.around(copy.deepcopy(whole))
        self.model: Any = self.summed.model
        mesh = DeviceMesh.from_group(world.group, world.device.type)
        for module in [*map(self.model.get_submodule, names), self.model]:
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.model.set_reduce_scatter_unused_params(True)
        self.sharded = dict(self.model.named_parameters())
        self._hold(before, shapes)

    def _hold(self, before: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        held, self.parts = {}, {}
        for name, parameter in self.sharded.items():
            local, rows = parameter.to_local().detach(), -(-shapes[name][0] // self.world.size)
            inner = before[name].numel() // shapes[name][0]
            start = min(rows * self.world.rank, shapes[name][0]) * inner
            held[name] = Held(name, shapes[name], range(start, start + local.numel()))
            if local.numel():
                self.parts[name] = local.view(-1)
        self.shards = Layout(self.world, held, list(shapes))
        self.every = list(self.parts.values())      # type: ignore[arg-type]
        hand_over(self.optimizer, {before[name]: [(held[name], part)] for name, part in self.parts.items()})

    # ---- in a step -----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        for parameter in self.sharded.values():
            parameter.grad = None

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield

    def finish(self, weight: float, loss: float) -> None:
        numbers = torch.tensor([weight, loss, float(self.stop), self.doubt], dtype=torch.float64)
        self.told = self.world.all_reduced(numbers).tolist()
        for name, part in self.parts.items():
            gradient = self.sharded[name].grad
            part.grad = None if gradient is None else gradient.to_local().reshape(-1)

    def counted(self) -> list[float]:
        return self.told

    def update(self) -> None:
        if self.clip_norm is not None:
            self.shards.clip(self.parts, self.clip_norm)
        self.optimizer.step()

    # ---- what others look at -------------------------------------------------------------------------------------------
    def whole(self) -> dict[str, Tensor]:
        return {name: each for name, each in self.shards.whole(self.parts).items() if each is not None}

    def gradients(self) -> dict[str, Tensor | None]:
        return self.shards.whole({name: part.grad for name, part in self.parts.items()})

    def state(self) -> State:
        return self.shards.state({name: self.optimizer.state.get(part, {}) for name, part in self.parts.items()})
