"""The stages of a model on one rank: their parameters and buffers, under their own names."""

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
    """Assume which stages use each tensor, also if no use was seen.

    A later forward may use such a parameter in any stage. A buffer, which only one rank changes,
    goes with the buffer that was defined before it.

    Args:
        model: The model.
        uses: The stages that were seen to use each tensor.
        stage_count: Number of stages.

    Returns:
        The stages that use each tensor.
    """
    buffer_uses: dict[str, tuple[int, ...]] = {}
    neighbour_uses: tuple[int, ...] = (0,)
    for name, _ in model.named_buffers():
        neighbour_uses = uses.get(name, neighbour_uses)
        buffer_uses[name] = neighbour_uses
    all_stages = tuple(range(stage_count))
    return {
        **{name: uses.get(name, all_stages) for name, _ in model.named_parameters()},
        **buffer_uses,
    }


class StageModule(nn.Module):
    """The stages of one rank.

    Its parameters and buffers are those of the whole model that these stages use, by the same
    names. Everything else of the model is present without values.

    Attributes:
        stage_forward: Runs the forward of a stage.
        first_trained: The first of all stages with a parameter to train.
        draw_ranges: Which of this rank's random calls belong to each stage.
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
        """List the model itself, because its forward runs, and the modules inside of it.

        Args:
            memo: As in torch.nn.Module.
            prefix: As in torch.nn.Module.
            remove_duplicate: As in torch.nn.Module.

        Returns:
            (name, module) of each.
        """
        return self.stage_forward.model.named_modules(memo, prefix, remove_duplicate)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The mode of the model itself."""
        return self.stage_forward.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the assignment that nn.Module.__init__ makes."""

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode of the model itself."""
        self.stage_forward.model.train(mode)
        return self


def keep_stage_tensors(
    stage_forward: StageForward, uses: Mapping[str, tuple[int, ...]], axis: World
) -> dict[str, ShardSpec]:
    """Keep the tensors of this rank's stages; all others lose their values.

    Tied weights: a parameter that stages on several ranks use is kept on each of these ranks. Its
    `gradient_worlds` name the ranks, and `Layout.sum_shared_gradients` sums its gradients.
    Collective over the axis.

    Args:
        stage_forward: The model.
        uses: The stages that use each tensor.
        axis: The ranks.

    Returns:
        The specs of this rank's tensors, by name.
    """
    model = stage_forward.model
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    specs: dict[str, ShardSpec] = {}
    shared_worlds: dict[tuple[int, ...], World | None] = {}  # the ranks that share parameters
    for name, tensor in named_tensors:
        owners = tuple(sorted({stage % axis.size for stage in uses[name]}))
        is_shared = len(owners) > 1 and isinstance(tensor, nn.Parameter)
        if is_shared and owners not in shared_worlds:
            shared_worlds[owners] = axis.split_ranks([list(owners)])
        if axis.rank in owners:
            world = shared_worlds[owners] if is_shared else None
            specs[name] = ShardSpec(
                name,
                tuple(tensor.shape),
                is_primary=owners[0] == axis.rank,
                gradient_worlds=() if world is None else (world,),
            )
    own_ids = {id(tensor) for name, tensor in named_tensors if name in specs}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and id(tensor) not in own_ids:
                    del tensors[name]
                    setattr(module, name, stage_forward.make_remote_tensor(module, name, tensor))
    return specs


def shard_stages(
    model: nn.Module, partition: StagePartition, own_stages: Sequence[int], axis: World
) -> ModelShard:
    """Leave this rank's stages of a model, which loses the rest. Collective over the axis.

    Args:
        model: The model, which is changed.
        partition: Where it is cut.
        own_stages: The stages of this rank.
        axis: The ranks.

    Returns:
        This rank's shard of the model.
    """
    flow = StageForward(model, partition.watched_stages, partition.fixed_outputs, own_stages)
    uses = assume_uses(model, partition.tensor_uses, len(partition.stages))
    first_trained = min(
        (
            stage
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            for stage in uses[name]
        ),
        default=flow.last_stage + 1,
    )
    specs = keep_stage_tensors(flow, uses, axis)
    starts = itertools.accumulate(
        (len(partition.draw_calls[stage]) for stage in own_stages), initial=0
    )
    draw_ranges = {
        stage: range(start, start + len(partition.draw_calls[stage]))
        for stage, start in zip(own_stages, starts, strict=False)
    }
    return ModelShard(
        StageModule(flow, first_trained, draw_ranges),
        specs,
        has_output=flow.last_stage in own_stages,
        draw_calls=tuple(call for stage in own_stages for call in partition.draw_calls[stage]),
    )
