"""What a rank keeps of a model that is cut: its parts' parameters and buffers, under their own
names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from paragrad.engine.layout import Held
from paragrad.engine.model_shard import Share
from paragrad.parallel.pipeline.balance import Cut
from paragrad.parallel.tracing.stage_forward import Flow
from paragrad.runtime.world import World


def supposed(
    model: nn.Module, uses: Mapping[str, tuple[int, ...]], parts: int
) -> dict[str, tuple[int, ...]]:
    """The parts that use each tensor. Where nobody was seen to, a later forward may, in any of
    them; but a buffer, which only one rank changes, as what was defined before it.
    """
    found: dict[str, tuple[int, ...]] = {}
    near: tuple[int, ...] = (0,)
    for name, _ in model.named_buffers():
        near = uses.get(name, near)
        found[name] = near
    every = tuple(range(parts))
    return {**{name: uses.get(name, every) for name, _ in model.named_parameters()}, **found}


class Part(nn.Module):
    """Some parts of a model: its parameters and buffers are those of the whole one, by the same
    names, that they use.

    Everything else of the model is there without values. trained: the first part of all with a
    parameter to train; draws: which of this rank's random calls are those of each part.
    """

    flow: Flow
    trained: int
    draws: Mapping[int, range]

    def __init__(self, flow: Flow, trained: int, draws: Mapping[int, range]) -> None:
        super().__init__()
        self.__dict__.update(
            flow=flow,
            trained=trained,
            draws=draws,
            _modules=flow.model._modules,
            _parameters=flow.model._parameters,
            _buffers=flow.model._buffers,
        )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The model itself, whose forward is run, and those inside of it."""
        return self.flow.model.named_modules(memo, prefix, remove_duplicate)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The mode of the model itself."""
        return self.flow.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Of nn.Module as it begins."""

    def train(self, mode: bool = True) -> Part:
        self.flow.model.train(mode)
        return self


def kept(flow: Flow, uses: Mapping[str, tuple[int, ...]], axis: World) -> dict[str, Held]:
    """Which tensors of the model a rank's parts hold; of the others it loses the values.
    Collective over the axis.
    """
    model = flow.model
    named = [*model.named_parameters(), *model.named_buffers()]
    held: dict[str, Held] = {}
    worlds: dict[tuple[int, ...], World | None] = {}  # of those who share tensors
    for name, tensor in named:
        owners = tuple(sorted({part % axis.size for part in uses[name]}))
        shared = len(owners) > 1 and isinstance(tensor, nn.Parameter)
        if shared and owners not in worlds:
            worlds[owners] = axis.among([list(owners)])
        if axis.rank in owners:
            world = worlds[owners] if shared else None
            held[name] = Held(
                name,
                tuple(tensor.shape),
                counts=owners[0] == axis.rank,
                owners=() if world is None else (world,),
            )
    ours = {id(tensor) for name, tensor in named if name in held}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) not in ours:
                    del tensors[name]
                    setattr(module, name, flow.emptied(module, name, tensor))
    return held


def share_of(model: nn.Module, cut: Cut, mine: Sequence[int], axis: World) -> Share:
    """What a rank holds of a model, which loses the rest. Collective over the axis."""
    flow = Flow(model, cut.watched, cut.standing, mine)
    uses = supposed(model, cut.uses, len(cut.parts))
    trained = min(
        (
            part
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            for part in uses[name]
        ),
        default=flow.last + 1,
    )
    held = kept(flow, uses, axis)
    starts = itertools.accumulate((len(cut.draws[part]) for part in mine), initial=0)
    draws = {
        part: range(start, start + len(cut.draws[part]))
        for part, start in zip(mine, starts, strict=False)
    }
    return Share(
        Part(flow, trained, draws),
        held,
        gives=flow.last in mine,
        draws=tuple(call for part in mine for call in cut.draws[part]),
    )
