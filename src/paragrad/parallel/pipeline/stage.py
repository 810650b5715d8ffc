"""What a rank keeps of a model that is cut: its parts' parameters and buffers, under their own
names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from paragrad.engine.layout import ShardSpec
from paragrad.engine.model_shard import ModelShard
from paragrad.parallel.pipeline.balance import StagePartition
from paragrad.parallel.tracing.stage_forward import StageForward
from paragrad.runtime.world import World


def assume_uses(
    model: nn.Module, uses: Mapping[str, tuple[int, ...]], stage_count: int
) -> dict[str, tuple[int, ...]]:
    """The parts that use each tensor. Where nobody was seen to, a later forward may, in any of
    them; but a buffer, which only one rank changes, as what was defined before it.
    """
    found: dict[str, tuple[int, ...]] = {}
    near: tuple[int, ...] = (0,)
    for name, _ in model.named_buffers():
        near = uses.get(name, near)
        found[name] = near
    every = tuple(range(stage_count))
    return {**{name: uses.get(name, every) for name, _ in model.named_parameters()}, **found}


class StageModule(nn.Module):
    """Some parts of a model: its parameters and buffers are those of the whole one, by the same
    names, that they use.

    Everything else of the model is there without values. trained: the first part of all with a
    parameter to train; draws: which of this rank's random calls are those of each part.
    """

    stage_forward: StageForward
    first_trained: int
    draw_ranges: Mapping[int, range]

    def __init__(
        self, stage_forward: StageForward, first_trained: int, draw_ranges: Mapping[int, range]
    ) -> None:
        super().__init__()
        self.__dict__.update(
            stage_forward=stage_forward,
            first_trained=first_trained,
            draw_ranges=draw_ranges,
            _modules=stage_forward.model._modules,
            _parameters=stage_forward.model._parameters,
            _buffers=stage_forward.model._buffers,
        )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The model itself, whose forward is run, and those inside of it."""
        return self.stage_forward.model.named_modules(memo, prefix, remove_duplicate)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The mode of the model itself."""
        return self.stage_forward.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Of nn.Module as it begins."""

    def train(self, mode: bool = True) -> StageModule:
        self.stage_forward.model.train(mode)
        return self


def keep_stage_tensors(
    stage_forward: StageForward, uses: Mapping[str, tuple[int, ...]], axis: World
) -> dict[str, ShardSpec]:
    """Which tensors of the model a rank's parts hold; of the others it loses the values.
    Collective over the axis.
    """
    model = stage_forward.model
    named = [*model.named_parameters(), *model.named_buffers()]
    held: dict[str, ShardSpec] = {}
    worlds: dict[tuple[int, ...], World | None] = {}  # of those who share tensors
    for name, tensor in named:
        owners = tuple(sorted({part % axis.size for part in uses[name]}))
        shared = len(owners) > 1 and isinstance(tensor, nn.Parameter)
        if shared and owners not in worlds:
            worlds[owners] = axis.split_ranks([list(owners)])
        if axis.rank in owners:
            world = worlds[owners] if shared else None
            held[name] = ShardSpec(
                name,
                tuple(tensor.shape),
                is_primary=owners[0] == axis.rank,
                gradient_worlds=() if world is None else (world,),
            )
    ours = {id(tensor) for name, tensor in named if name in held}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) not in ours:
                    del tensors[name]
                    setattr(module, name, stage_forward.make_remote_tensor(module, name, tensor))
    return held


def shard_stages(
    model: nn.Module, partition: StagePartition, own_stages: Sequence[int], axis: World
) -> ModelShard:
    """What a rank holds of a model, which loses the rest. Collective over the axis."""
    flow = StageForward(model, partition.watched_stages, partition.fixed_outputs, own_stages)
    uses = assume_uses(model, partition.tensor_uses, len(partition.stages))
    trained = min(
        (
            part
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            for part in uses[name]
        ),
        default=flow.last_stage + 1,
    )
    held = keep_stage_tensors(flow, uses, axis)
    starts = itertools.accumulate(
        (len(partition.draw_calls[part]) for part in own_stages), initial=0
    )
    draws = {
        part: range(start, start + len(partition.draw_calls[part]))
        for part, start in zip(own_stages, starts, strict=False)
    }
    return ModelShard(
        StageModule(flow, trained, draws),
        held,
        has_output=flow.last_stage in own_stages,
        draw_calls=tuple(call for part in own_stages for call in partition.draw_calls[part]),
    )
