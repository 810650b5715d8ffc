"""Packing and unpacking of sequences where the packed values are unknown.

`pack_padded_sequence` makes a tensor whose shape depends on the values of the lengths. Lengths that
are computed from the inputs alone are known on every rank. So the shape is known too, and the
values stay unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten

PACK, UNPACK = "_pack_padded_sequence", "_pad_packed_sequence"


def find_packed_sequences(tree: Any) -> list[PackedSequence]:
    """Find the packed sequences in a tree.

    Args:
        tree: The tree.
    """
    leaves, _ = tree_flatten(tree, is_leaf=lambda each: isinstance(each, PackedSequence))
    return [each for each in leaves if isinstance(each, PackedSequence)]


def is_packing(func: Any) -> bool:
    """Return whether a function of torch packs or unpacks sequences.

    Args:
        func: The function.
    """
    return getattr(func, "__name__", "") in (PACK, UNPACK)


def run_packing(func: Any, data: Tensor, lengths: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Pack or unpack sequences without values.

    Args:
        func: torch's function.
        data: The sequences [samples, steps, ...] or [steps, samples, ...], or the packed values
            [elements, ...], without values.
        lengths: The lengths of the sequences, or the samples of each step, with values.
        rest: The other arguments of the function.

    Returns:
        (the result without values, the samples of each step or the lengths, with values).
    """
    is_pack = func.__name__ == PACK
    known = torch.zeros((*data.shape[: 2 if is_pack else 1], 1))
    result, sizes = func(known, lengths, *rest)
    width = data.shape[2:] if is_pack else data.shape[1:]
    flat = data.reshape(-1, *width).sum(0)
    return flat.expand(*result.shape[:-1], *width).clone(), sizes
