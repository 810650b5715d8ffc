"""From indices to tensors: samples of any shape, drawn by (seed, epoch, index), loaded here or
by other processes (`ahead.py`).

A sample is a pair (input, target) or a dict; inputs and targets may be nested (tuples, lists,
dicts of tensors). A batch that is a dict is its own target: the model gets its entries by name,
the loss the whole of it. A named tuple (a PackedSequence too) is one argument of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torch.utils.data._utils import worker

from paragrad.errors import Refused, StepFailed, describe_error
from paragrad.runtime.generators import fingerprint_generators, keep_generators, seed_generators
from paragrad.runtime.timeout import limit_time
from paragrad.runtime.world import DEFAULT_TIMEOUT

# map-style: __len__ and __getitem__(index) -> (input, target) or {name: value}
Dataset = Any
Collate = Callable[[list[Any]], Any]
PROBE_SAMPLES = 5  # samples by which a collate is looked at
SHARE_HINT = (
    "; if it drops samples, let it keep them with targets that do not count, or leave them out of "
    "the dataset; if it "
    "wants the whole batch, give it that: collate=paragrad.WholeBatch(collate)"
)


@dataclass(frozen=True)
class WholeBatch:
    """A collate that is given the whole global batch on every rank, which then takes its part
    of the result.

    For one that draws at random (masking, mixing samples), puts samples in an order of its own
    (by length), or pads so that the loss counts padding: what it makes of a share alone is not
    that share of what it makes of the batch. It costs loading every sample on every rank.
    """

    collate: Collate

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples)


@dataclass(frozen=True)
class Samples:
    """A dataset whose transforms draw the same numbers for a sample, whoever loads it:
    samples[epoch, indices] -> a batch; samples[epoch, indices, places]: what stands at these
    places of the batch.

    Before each sample the generators of torch, numpy and random are seeded by (seed, epoch,
    index); what `collate` draws follows the batch's first sample. Afterwards they are as they
    were. A plain TensorDataset draws nothing and gives its batch at once; so does a dataset
    with `whole_batches = True`, unless there is a `collate`.
    """

    dataset: Dataset
    seed: int = 0
    collate: Collate | None = None
    sample_timeout: float = DEFAULT_TIMEOUT  # seconds that a sample may take

    def __post_init__(self) -> None:
        refuse_loader(self.dataset, "the dataset")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, list[int]] | tuple[int, list[int], list[int]]) -> Any:
        epoch, indices, *places = key
        if not places:
            return self._collate_samples(epoch, indices, len(indices))
        if isinstance(self.collate, WholeBatch):
            return slice_batch(
                self._collate_samples(epoch, indices, len(indices)), places[0], len(indices)
            )
        return self._collate_samples(epoch, [indices[place] for place in places[0]], len(indices))

    def _collate_samples(self, epoch: int, indices: list[int], batch: int) -> Any:
        dataset = self.dataset
        if self.collate is None and type(dataset).__getitem__ is TensorDataset.__getitem__:
            # torch.tensor of a list, and indexing by one, take far longer
            places = torch.from_numpy(numpy.array(indices))
            return tuple(tensor.index_select(0, places) for tensor in dataset.tensors)
        if self.collate is None and getattr(dataset, "whole_batches", False):
            with limit_time(
                self.sample_timeout * len(indices),
                f"samples {indices[0]}, ... of the dataset were not there",
            ):
                return dataset[indices]
        with keep_generators():
            drawn = self.draw_samples(epoch, indices)
            if self.collate is None:
                with use_private_memory():
                    return default_collate(drawn)
            try:
                with use_private_memory():
                    return self.collate(drawn)
            except Exception as error:
                raise StepFailed(
                    f"collate raised {type(error).__name__}: {error} (it was given {len(indices)} "
                    f"of the batch's "
                    f"{batch} samples)" + (SHARE_HINT if len(indices) < batch else "")
                ) from error

    def draw_samples(self, epoch: int, indices: list[int]) -> list[Any]:
        """Samples as `collate` is given them, the generators as it finds them."""
        found = []
        for index in indices:
            seed_generators(f"sample {self.seed} {epoch} {index}")
            with limit_time(self.sample_timeout, f"sample {index} of the dataset was not there"):
                found.append(self._read_sample(index))
        seed_generators(f"collate {self.seed} {epoch} {indices[0]}")
        return found

    def _read_sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except StepFailed:
            raise
        except Exception as error:
            raise StepFailed(
                f"sample {index} of the dataset raised {describe_error(error)}"
            ) from error


@contextlib.contextmanager
def use_private_memory() -> Iterator[None]:
    """Meanwhile default_collate makes batches in memory of this process, not in /dev/shm, as it
    does where it sees a loader.
    """
    before = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = before


def explain_whole_batch(samples: Samples, batch: int) -> str | None:
    """Why collate must be given whole batches, or None; seen on a few samples from all over the
    dataset, at most a batch.

    Where it puts samples in an order of its own, a row of a share, or a sample that stands in
    for an empty part, is not the one it is taken for. What cannot be collated or cut says
    nothing here; the training says what is wrong with it.
    """
    if samples.collate is None or isinstance(samples.collate, WholeBatch):
        return None
    count = min(len(samples), batch, PROBE_SAMPLES)
    # neighbours are often of one length
    indices = [len(samples) * number // count for number in range(count)]
    try:
        with keep_generators():
            drawn = samples.draw_samples(0, indices)
            before = fingerprint_generators()
            forwards = samples.collate(drawn)
            if fingerprint_generators() != before:
                return "it draws at random"
            backwards = slice_batch(
                samples.collate(samples.draw_samples(0, indices[::-1])),
                list(range(count))[::-1],
                count,
            )
            if is_same_batch(forwards, backwards) or not is_same_batch(
                forwards, samples.collate(samples.draw_samples(0, indices))
            ):
                return None  # or it never makes the same of the same
            # another dimension, by chance?
            slice_batch(
                samples.collate(samples.draw_samples(0, indices[:-1])), slice(0, 1), count - 1
            )
    except Exception:
        return None
    return "it puts samples in an order of its own"


def wrap_collate_if_needed(samples: Samples, batch: int) -> Samples:
    """The same; where its collate must be given whole batches of that size, with one that
    is.
    """
    return (
        replace(samples, collate=WholeBatch(samples.collate))
        if samples.collate and explain_whole_batch(samples, batch)
        else samples
    )


def refuse_loader(dataset: Any, what: str) -> None:
    """Refuse a DataLoader or a stream where a dataset is wanted: a rank draws its own share of
    every batch.
    """
    if isinstance(dataset, DataLoader):
        raise Refused(
            f"{what} is a DataLoader, which makes batches of its own; give the dataset itself, the "
            f"global batch size "
            f"as batch={dataset.batch_size or '...'}, and what the loader has as collate_fn as "
            f"collate="
        )
    by_place = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not by_place):
        raise Refused(
            f"{what} is a stream ({type(dataset).__name__}): no rank can take its share of a batch "
            f"from the middle "
            "of it; give a map-style dataset, with __len__ and __getitem__(index). Where the "
            "samples fit into "
            "memory, list(stream) is one; otherwise let __getitem__ read sample `index` from where "
            "the stream reads"
        )


def separate_target(batch: Any) -> tuple[Any, Any]:
    """(inputs, target) of a batch; a dict is both."""
    if isinstance(batch, Mapping):
        return dict(batch), dict(batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise Refused(
        f"a sample of a dataset must be a pair (input, target) or a dict, got "
        f"{type(batch).__name__}"
    )


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """model(inputs): a dict by name, a tuple or list in its order; a named tuple is one
    argument.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return (
        model(*inputs)
        if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields")
        else model(inputs)
    )


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """value with function(leaf) for every leaf: a tensor, a PackedSequence, a sequence of plain
    values (such as texts), or any other value.
    """
    if isinstance(value, PackedSequence):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_leaves(function, each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, each) for each in value))
    if isinstance(value, tuple | list) and any(
        isinstance(each, Tensor | Mapping | tuple | list) for each in value
    ):
        return type(value)(map_leaves(function, each) for each in value)
    return function(value)


def list_batch_tensors(value: Any) -> list[Tensor]:
    """The tensors of a batch."""
    found: list[Tensor] = []

    def note(leaf: Any) -> None:
        leaf = leaf.data if isinstance(leaf, PackedSequence) else leaf
        found.extend([leaf] if isinstance(leaf, Tensor) else [])

    map_leaves(note, value)
    return found


def is_same_batch(one: Any, other: Any) -> bool:
    """Do two batches hold the same, of all that is by sample? A NaN is one everywhere."""
    both: tuple[list[Any], list[Any]] = ([], [])
    for found, value in zip(both, (one, other), strict=True):
        map_leaves(found.append, value)
    return len(both[0]) == len(both[1]) and all(map(_is_same_leaf, *both))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and (
            not one.dim() or bool(((one == other) | ((one != one) & (other != other))).all())
        )
    return not isinstance(one, tuple | list) or bool(one == other)


def clone_batch(value: Any) -> Any:
    """value with its tensors cloned: a model may change its inputs in place. What it holds
    twice stays one tensor: a loss may differentiate by an input that is also in its target.
    """
    clones: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=leaf.data.clone())
        return clones.setdefault(id(leaf), leaf.clone()) if isinstance(leaf, Tensor) else leaf

    return map_leaves(copy, value)


def convert_batch(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """value on a device (None: where it is), its floating point numbers in dtype, complex ones
    in its precision; dtype None: as they are.
    """

    def bring(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf.to(device, choose_dtype(leaf.data, dtype))
        return leaf.to(device, choose_dtype(leaf, dtype)) if isinstance(leaf, Tensor) else leaf

    return map_leaves(bring, value)


def choose_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """A tensor's type when real numbers are brought to dtype and complex ones to its precision;
    None: as it is.
    """
    if dtype is None or not (tensor.is_complex() or tensor.is_floating_point()):
        return tensor.dtype
    return dtype.to_complex() if tensor.is_complex() else dtype


def slice_batch(value: Any, rows: slice | list[int], samples: int) -> Any:
    """A part of a batch of so many samples, or what stands at some places of it: of every
    tensor, along its first dimension, and of sequences of plain values.

    Raises ValueError where a tensor's first dimension is not the samples; one without
    dimensions is every sample's. What value holds twice stays one tensor.
    """
    pieces: dict[int, Tensor] = {}

    def cut_leaf(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            raise ValueError(
                "a PackedSequence cannot be cut into micro-batches; let collate give padded "
                "sequences and their "
                "lengths, and the model pack them (pack_padded_sequence), or train with micro=1"
            )
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise ValueError(
                "a NestedTensor cannot be cut into micro-batches; let collate give padded tensors "
                "and their "
                "lengths, or train with micro=1"
            )
        if isinstance(leaf, tuple | list) and len(leaf) == samples:
            return (
                leaf[rows]
                if isinstance(rows, slice)
                else type(leaf)([leaf[place] for place in rows])
            )
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if str(leaf.layout).startswith("torch.sparse"):
            raise ValueError(
                "a sparse tensor cannot be cut into micro-batches; let the model make it sparse, "
                "or train with "
                "micro=1"
            )
        if len(leaf) != samples:
            raise ValueError(
                f"a batch of {samples} samples holds a tensor of shape {tuple(leaf.shape)}, which "
                f"cannot be cut "
                "into micro-batches; let the samples be its first dimension, or train with micro=1"
            )
        return pieces.setdefault(id(leaf), leaf[rows])

    return map_leaves(cut_leaf, value)
