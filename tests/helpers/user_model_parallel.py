"""A user's strategies that divide the model, outside the library.

One divides the columns of linear layers, the other makes consecutive stages. They are small, and
show that the extension points support a divided model. They cover parts of tensors, tensors on one
rank only, and tensors that several ranks own. They also cover random calls, a loss on one rank
only, and products with `data`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paragrad as pg
from paragrad.engine.passes import LossSums
from paragrad.runtime.mesh import Axis
from paragrad.runtime.world import World
from paragrad.schedules.actions import split_evenly


def make_replicated_specs(model: nn.Module, axis: World) -> dict[str, pg.ShardSpec]:
    """Return the specs of a model that is replicated over the axis; the first copy is primary."""
    return {
        name: pg.ShardSpec(name, tuple(tensor.shape), is_primary=axis.rank == 0)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


# ---- columns: a part of the neurons of every linear layer ------------------------------------
class Columns(pg.Strategy):
    """Divides the output features of linear layers over ranks (column-parallel, Megatron-LM)."""

    workers: int = pg.option(pg.Integer())

    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (Axis("columns", self.workers, "model"),)

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        specs = {
            name: pg.ShardSpec(name, tuple(tensor.shape), is_primary=axis.rank == 0)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        uses = [id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False)]
        for name, module in list(model.named_modules()):
            # tied weights stay whole
            if isinstance(module, nn.Linear) and uses.count(id(module.weight)) == 1:
                rows = split_evenly(module.out_features, axis.size)
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, ColumnLinear(module, rows, axis))
                for part, tensor in module.named_parameters():
                    box = (slice(rows[axis.rank].start, rows[axis.rank].stop),)
                    specs[f"{name}.{part}"] = pg.ShardSpec(
                        f"{name}.{part}", tuple(tensor.shape), (box,)
                    )
        return pg.ModelShard(model, specs)


class ColumnLinear(nn.Module):
    def __init__(self, whole: nn.Linear, rows: list[range], axis: World) -> None:
        super().__init__()
        mine = slice(rows[axis.rank].start, rows[axis.rank].stop)
        self.weight = _take_rows(whole.weight, mine)
        self.bias = None if whole.bias is None else _take_rows(whole.bias, mine)
        self.rows = rows
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return Gathered.apply(
            nn.functional.linear(Copied.apply(x, self.axis), self.weight, self.bias),
            self.rows,
            self.axis,
        )


def _take_rows(whole: nn.Parameter, mine: slice) -> nn.Parameter:
    return nn.Parameter(whole.detach()[mine].clone(), requires_grad=whole.requires_grad)


class Copied(torch.autograd.Function):
    """Passes x on unchanged on all ranks; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: World) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.axis.all_reduce(gradients[0]), None


class Gathered(torch.autograd.Function):
    """Concatenates the features of all ranks; backward keeps this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, rows: list[range], axis: World) -> Tensor:
        ctx.own = rows[axis.rank]
        wide = mine.new_zeros(*mine.shape[:-1], max(map(len, rows)))
        wide[..., : mine.shape[-1]] = mine
        return torch.cat(
            [each[..., : len(row)] for each, row in zip(axis.all_gather(wide), rows, strict=True)],
            -1,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][..., ctx.own.start : ctx.own.stop], None, None


TYPES = torch.float32, torch.float64, torch.bfloat16


# ---- stages: consecutive parts of a Sequential, one after the other --------------------------
class Stages(pg.Strategy):
    """Puts consecutive modules on consecutive ranks, and runs one micro-batch at a time.

    If several stages use a parameter, all of them own it.
    """

    workers: int = pg.option(pg.Integer(2))
    micro: int = pg.option(pg.Integer(), default=1)
    schedules_micro_batches = True

    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (Axis("stages", self.workers, "model"),)

    @property
    def division(self) -> Any:
        return super().division.__class__((1,), self.micro)

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        children = list(model.named_children())
        stages = [
            children[part.start : part.stop] for part in split_evenly(len(children), axis.size)
        ]
        calls = iter(itertools.count())
        draws = [
            [
                next(calls)
                for _, child in stage
                for module in child.modules()
                if isinstance(module, nn.Dropout)
            ]
            for stage in stages
        ]
        names = [
            {name for name, tensor in _list_tensors(nn.Sequential(OrderedDict(stage)))}
            for stage in stages
        ]
        first = {id(tensor): name for name, tensor in reversed(_list_tensors(model))}
        owners: dict[str, list[int]] = {}
        for name, tensor in _list_tensors(model):
            stage = next(number for number, each in enumerate(names) if name in each)
            if stage not in owners.setdefault(first[id(tensor)], []):
                owners[first[id(tensor)]].append(stage)
        worlds = {
            name: axis.split_ranks([ranks]) for name, ranks in owners.items() if len(ranks) > 1
        }
        mine = nn.Sequential(OrderedDict(stages[axis.rank]))
        held = {}
        for name, tensor in [*mine.named_parameters(), *mine.named_buffers()]:
            serial = first[id(tensor)]
            world = worlds.get(serial)
            held[name] = pg.ShardSpec(
                serial,
                tuple(tensor.shape),
                is_primary=owners[serial][0] == axis.rank,
                gradient_worlds=() if world is None else (world,),
            )
        return pg.ModelShard(
            mine, held, has_output=axis.rank == axis.size - 1, draw_calls=tuple(draws[axis.rank])
        )

    def make_passes(self, within: Any, exchange: pg.Exchange) -> Any:
        return OneAfterAnother(within, exchange)


def _list_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


class OneAfterAnother(pg.Passes):
    """Passes that run forward from the first stage to the last, and backward in reverse."""

    def __init__(self, host: Any, exchange: pg.Exchange) -> None:
        super().__init__(host, exchange)
        self.line: World = host.world.select_axes("stages")
        self.first = self.line.rank == 0
        self.last = self.line.rank == self.line.size - 1

    def compute_gradients(self, micros: Any, count: int) -> LossSums:
        own = LossSums()
        for micro, inputs, target in micros:
            samples = len(micro.positions)
            self.host.batch_norm.samples = samples
            with self.host.key_draws(micro), self.host.batch_norm:
                x = self._receive_input(inputs)
                with self.host.use_autocast():
                    out = self.host.module.model(x if self.first else x.requires_grad_())
                    if self.last:
                        share, weight = self.host.module.compute_share(out, target, samples)
                if self.last:
                    share.backward()
                    own = LossSums(own.loss + float(share.detach()), own.weight + weight)
                else:
                    self._send(out, 1)
                    out.backward(self._receive(1))
                if not self.first:
                    self._send(x.grad, -1)
        for parameter in self.host.module.model.parameters():
            self.exchange.mark_ready(parameter)
        return own

    def compute_output(self, inputs: Any) -> Any:
        out = self.host.module.model(self._receive_input(inputs))
        if self.last:
            return out
        self._send(out, 1)
        return None

    def _receive_input(self, inputs: Any) -> Any:
        return inputs if self.first else self._receive(-1)

    def _send(self, tensor: Tensor, step: int) -> None:
        shape = torch.tensor(
            [TYPES.index(tensor.dtype), tensor.dim(), *tensor.shape] + [0] * (6 - tensor.dim())
        )
        for each in (shape, tensor.detach().contiguous()):
            dist.send(each, group=self.line.group, group_dst=self.line.rank + step)
        self.exchange.count_bytes("activations", tensor.nbytes, computed=False)

    def _receive(self, step: int) -> Tensor:
        shape = torch.zeros(8, dtype=torch.int64)
        dist.recv(shape, group=self.line.group, group_src=self.line.rank + step)
        kind, count, *sizes = shape.tolist()
        tensor = torch.zeros(sizes[:count], dtype=TYPES[kind])
        dist.recv(tensor, group=self.line.group, group_src=self.line.rank + step)
        return tensor
