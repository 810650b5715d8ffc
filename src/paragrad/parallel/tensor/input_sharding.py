"""How the inputs of a model are divided, and this rank's pieces of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from paragrad.parallel.sharding.autograd_collectives import AxisGroup
from paragrad.parallel.sharding.partition import partition_evenly
from paragrad.parallel.sharding.sharded_tensor import Sharding, wrap_local

# dimensions of images: (samples, channels, rows, columns), also of volumes
SAMPLES = 0
ROWS = 2
COLUMNS = 3


class InputAxis(NamedTuple):
    """What a dimension of the inputs is, and over how many ranks it is divided.

    Attributes:
        name: Such as "rows".
        ranks: Number of ranks.
    """

    name: str
    ranks: int


@dataclass(frozen=True)
class InputSharding:
    """How inputs are divided.

    Attributes:
        dims: The divided dimensions.
        dense: Whether the same ranks also divide the neurons of fully connected layers.
    """

    dims: Mapping[int, InputAxis]
    dense: bool = False


def find_images(inputs: Any) -> list[Tensor]:
    """Return the inputs that are images or volumes: floating point, with 4 or 5 dimensions."""
    return [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and _is_image(each)]


def _is_image(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() in (4, 5)


def has_samples_first(inputs: Any) -> bool:
    """Return whether all inputs have the same first dimension."""
    return (
        len(
            {
                each.shape[0] if each.dim() else 0
                for each in tree_leaves(inputs)
                if isinstance(each, Tensor)
            }
        )
        == 1
    )


def shard_inputs(inputs: Any, groups: Mapping[int, AxisGroup]) -> Any:
    """Divide the inputs of a model.

    Images are divided; along samples, all inputs are divided that have them as their first
    dimension. A dimension that is smaller than its number of ranks stays whole.

    Args:
        inputs: The inputs, in a tree.
        groups: The ranks of each divided dimension.

    Returns:
        The inputs with this rank's pieces.
    """
    divides_samples = SAMPLES in groups and has_samples_first(inputs)

    def shard(tensor: Tensor) -> Tensor:
        if not (divides_samples if SAMPLES in groups else _is_image(tensor)):
            return tensor
        shardings = dict[int, Sharding]()
        local = tensor
        for dim, group in groups.items():
            if tensor.shape[dim] >= group.size:
                shardings[dim] = Sharding(partition_evenly(tensor.shape[dim], group.size), group)
                local = group.take_piece(local, dim, shardings[dim].partition)
        # The piece is a view: the batch exists as long as the step.
        return wrap_local(local, shardings)

    return tree_map_only(Tensor, shard, inputs) if groups else inputs
