"""What a rank holds of a model that is split, where its modules find that, and what goes around
forwards and backwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from paragrad.engine.layout import Held
from paragrad.errors import StepFailed
from paragrad.parallel.sharding.autograd_collectives import Line
from paragrad.parallel.sharding.partition import Pieces
from paragrad.parallel.sharding.sharded_tensor import Divided, whole
from paragrad.parallel.tensor.function_patches import asked, members
from paragrad.parallel.tensor.sharding_plan import Plan
from paragrad.parallel.tensor.single_rank_tensor import Lone, shown


def divide(
    model: nn.Module, plan: Plan, line: Line, first: bool
) -> tuple[dict[str, Held], dict[int, Divided]]:
    """Leave this rank's pieces of a model's parameters: (what is held, what its modules find,
    by the ids of that). first: what is whole counts here.
    """
    held = dict[str, Held]()
    names = {id(tensor): name for name, tensor in reversed(_tensors(model))}
    pieces: dict[int, tuple[Tensor, Divided]] = {}
    for name, tensor in _tensors(model):  # of what other cuts left
        if names[id(tensor)] == name:
            if name not in plan.divided:
                held[name] = Held(name, tuple(tensor.shape), counts=first)
                continue
            dim, cut = plan.cut(name, line)
            local = line.piece(tensor.detach(), dim, cut.pieces).clone()
            if isinstance(tensor, nn.Parameter):
                local = nn.Parameter(local, requires_grad=tensor.requires_grad)
            pieces[id(tensor)] = local, Divided(local, {dim: cut}, name)
            held[name] = Held(
                name, tuple(tensor.shape), _boxes(tensor, dim, cut.pieces, line.rank), dim
            )
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for own, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) in pieces:
                    # a forward finds the divided one, in the module's own attributes; who asks
                    # for parameters, the piece
                    tensors[own], module.__dict__[own] = pieces[id(tensor)]
    return held, {id(local): each for local, each in pieces.values()}


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _boxes(tensor: Tensor, dim: int, pieces: Pieces, rank: int) -> tuple[tuple[slice, ...], ...]:
    before = tuple(slice(0, size) for size in tensor.shape[:dim])
    return tuple((*before, slice(each.start, each.stop)) for each in pieces.ranges(rank))


class Split:
    """Around passes of a model whose modules find divided tensors where their parameters were.
    pieces: these, by the ids of what ranks hold;  absent: where others hold one (a module's
    parameters or buffers, its name there, what stands for it), for who asks a module for all of
    them.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        lines: Sequence[Line],
        pieces: Mapping[int, Tensor],
        absent: Sequence[tuple[dict[str, Any], str, Tensor]] = (),
    ) -> None:
        self.name = name
        self.lines = lines
        self.pieces = pieces
        self.absent = absent
        self.sent = 0
        self.buffers = [
            (module._buffers, own, each)
            for module in model.modules()
            for own, each in module._buffers.items()
        ]

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        for line in self.lines:
            line.sent = 0
        for tensors, own, local in self.absent:
            tensors[own] = local
        try:
            with asked(), members(self.pieces):
                yield
                self._settle()
        finally:
            for tensors, own, _ in self.absent:
                tensors[own] = None
            for line in self.lines:
                line.let_go()
            self.sent = sum(line.sent for line in self.lines)

    def _settle(self) -> None:
        """What a forward assigned to a buffer is whole on every rank."""
        for tensors, own, before in self.buffers:
            if (now := tensors.get(own)) is before:
                continue
            # changed in place, and assigned to itself; before is None where it is another
            # rank's
            if now is self.pieces.get(id(before)) or (
                before is None and isinstance(now, Lone) and now.standing
            ):
                tensors[own] = before
            else:
                if id(before) in self.pieces:
                    raise StepFailed(
                        f"a forward makes the buffer {own} anew, of which ranks have pieces, and "
                        f"did not when "
                        "the model was looked at; change it in place (self.name.copy_(...))",
                        tensor=own,
                    )
                tensors[own] = shown(now) if isinstance(now, Lone) else whole(now)
