"""The data at the door of a model: which of its inputs are divided, along which dimensions, and
this rank's pieces.
"""

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
    """What a dimension is, and over how many ranks it is divided."""

    name: str
    ranks: int


@dataclass(frozen=True)
class InputSharding:
    """By dimension, how inputs are divided. dense: the same ranks have the neurons of fully
    connected layers.
    """

    dims: Mapping[int, InputAxis]
    dense: bool = False


def find_images(inputs: Any) -> list[Tensor]:
    """Those of the inputs that are images, or volumes."""
    return [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and _is_image(each)]


def _is_image(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() in (4, 5)


def has_samples_first(inputs: Any) -> bool:
    """Have all inputs as many first elements?"""
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
    """The inputs with this rank's pieces: of images, or, by samples, of all that have as many.
    What is too small is whole.
    """
    by_samples = SAMPLES in groups and has_samples_first(inputs)

    def piece(tensor: Tensor) -> Tensor:
        if not (by_samples if SAMPLES in groups else _is_image(tensor)):
            return tensor
        cuts = dict[int, Sharding]()
        local = tensor
        for dim, line in groups.items():
            if tensor.shape[dim] >= line.size:
                cuts[dim] = Sharding(partition_evenly(tensor.shape[dim], line.size), line)
                local = line.take_piece(local, dim, cuts[dim].partition)
        # a view: the batch is there as long as the step is
        return wrap_local(local, cuts)

    return tree_map_only(Tensor, piece, inputs) if groups else inputs
