"""From indices to tensors: samples of any shape, drawn by (seed, epoch, index).

Samples are loaded in this process or by others (`loader_processes.py`). A sample is a pair (input,
target) or a dict. Inputs and targets may be nested tuples, lists and dicts of tensors. A batch that
is a dict is its own target: the model gets its entries by name, and the loss gets the whole dict. A
named tuple, such as a PackedSequence, is one argument of the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from paragrad.datasets.sampler import Indices, RepeatedIndex
from paragrad.datasets.stream import Stream, hide_loader_process, is_stream
from paragrad.errors import Refused, StepFailed, describe_error
from paragrad.runtime.generators import fingerprint_generators, keep_generators, seed_generators
from paragrad.runtime.timeout import limit_time
from paragrad.runtime.world import DEFAULT_TIMEOUT

# map-style: __len__ and __getitem__(index) -> (input, target) or {name: value}
Dataset = Any
Collate = Callable[[list[Any]], Any]
# (epoch, indices), or (epoch, indices, places)
SampleKey = tuple[int, Indices] | tuple[int, Indices, Sequence[int]]
PROBE_SAMPLES = 5  # samples that test a collate
# small batches of a TensorDataset are selected together, up to so many and up to so many bytes
JOINT_BATCHES = 16
JOINT_BYTES = 2**18
# fewer are selected one by one, since joint batches are selected once more at the end
FEWEST_JOINT_BATCHES = 4
# the C function: numpy and torch take five times as long
compare_memory = ctypes.CDLL(None).memcmp
compare_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
# torch's memory begins at a multiple of so many bytes, and results can depend on that
ALIGNMENT = 64
SHARE_HINT = (
    "; if it drops samples, let it keep them with targets that do not count, or leave them out of "
    "the dataset; if it needs the whole batch, write collate=paragrad.WholeBatch(collate)"
)


@dataclass(frozen=True)
class WholeBatch:
    """A collate function that gets the whole global batch on each rank.

    Each rank then takes its share of the result. Use it for a collate that draws random numbers
    (masking, mixing samples) or sorts samples (by length). Use it also for one that pads so that
    the loss counts the padding. For these, collating a share does not give the share of the
    collated batch. The cost: each rank loads all samples of the batch.

    Attributes:
        collate: The function, from a list of samples to a batch.

    Examples:
        >>> import paragrad as pg
        >>> from torch.utils.data import default_collate
        >>> job = pg.job("digits").replace(collate=pg.WholeBatch(default_collate))
    """

    collate: Collate

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples)


@dataclass(frozen=True)
class Samples:
    """A dataset with seeded transforms: they draw the same numbers for a sample on any rank.

    samples[epoch, indices] is a batch; samples[epoch, indices, places] is its rows at these places.
    Indices are a list or an array; a dataset is asked for plain integers.
    Before each sample, the generators of torch, numpy and random are seeded by (seed, epoch,
    index). Random numbers of `collate` follow the first sample of the batch. Afterwards the
    generators are restored. A plain TensorDataset draws nothing and returns its batch at once. So
    does a dataset with `whole_batches = True`, unless there is a `collate`.
    `load_in_turn` selects small batches of a TensorDataset together, since each selection costs
    more than the copies it makes.

    Attributes:
        dataset: A map-style dataset, or a Stream.
        seed: The seed of the job.
        collate: The function from samples to a batch; None means torch's own.
        sample_timeout: Seconds that a sample may take.
    """

    dataset: Dataset
    seed: int = 0
    collate: Collate | None = None
    sample_timeout: float = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        refuse_loader(self.dataset, "the dataset")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey) -> Any:
        epoch, indices, *places = key
        if isinstance(indices, numpy.ndarray) and not self.is_tensor_dataset:
            indices = indices.tolist()
        if isinstance(self.dataset, Stream):
            self.dataset.read_batch(self.seed, epoch, indices, self.sample_timeout)
        if not places:
            return self._collate_samples(epoch, indices, len(indices))
        if isinstance(self.collate, WholeBatch):
            return slice_batch(
                self._collate_samples(epoch, indices, len(indices)), list(places[0]), len(indices)
            )
        return self._collate_samples(epoch, _select_indices(indices, places[0]), len(indices))

    @cached_property
    def is_tensor_dataset(self) -> bool:
        """Whether a batch is selected from tensors at once."""
        return self.collate is None and type(self.dataset).__getitem__ is TensorDataset.__getitem__

    def load_in_turn(self, keys: Iterable[SampleKey]) -> Iterator[Any]:
        """Yield the batch of each key.

        Small batches of a TensorDataset are selected together (`JOINT_BATCHES`, `JOINT_BYTES`). A
        change of the dataset that torch counts is seen in the next batch. These batches have one
        storage: what a loop does to the storage itself concerns them all.

        Args:
            keys: The keys.

        Raises:
            StepFailed: The dataset has changed within an epoch in another way.
        """
        keys = iter(keys)
        if not self.is_tensor_dataset:
            for key in keys:
                yield self[key]
            return
        first = next(keys, None)
        while first is not None:
            count = _count_joint_batches(self.dataset.tensors, len(first[-1]))
            group, held = _take_group(first, keys, count)
            yield from self._load_group(group) if len(group) > 1 else (self[first],)
            first = next(keys, None) if held is None else held

    def _load_group(self, group: list[SampleKey]) -> Iterator[Any]:
        """Yield the batches of keys that may be selected together."""
        indices = [_select_indices(*key[1:]) for key in group]
        number = 0
        while number < len(group):
            tensors = tuple(self.dataset.tensors)
            is_joint = not number or _count_joint_batches(tensors, len(indices[0])) > 1
            joint = _select_batches(tensors, indices[number:]) if is_joint else None
            if joint is None:
                yield self[group[number]]
                number += 1
                continue
            while True:
                number += 1
                if number == len(group):
                    joint.refuse_uncounted_change()
                yield joint.batches.pop()
                # the loop may have changed the dataset
                if number == len(group) or joint.state != _read_state(self.dataset.tensors):
                    break

    def _collate_samples(self, epoch: int, indices: Any, batch: int) -> Any:
        dataset = self.dataset
        if self.is_tensor_dataset:
            places = _convert_indices(indices)
            return tuple([tensor.index_select(0, places) for tensor in dataset.tensors])
        if self.collate is None and getattr(dataset, "whole_batches", False):
            with limit_time(
                self.sample_timeout * len(indices),
                f"samples {indices[0]}, ... of the dataset were not loaded",
            ):
                return dataset[indices]
        with keep_generators():
            drawn = self.draw_samples(epoch, indices)
            if self.collate is None:
                with hide_loader_process():
                    return default_collate(drawn)
            try:
                with hide_loader_process():
                    return self.collate(drawn)
            except Exception as error:
                raise StepFailed(
                    f"collate raised {type(error).__name__}: {error} (it was given {len(indices)} "
                    f"of the batch's "
                    f"{batch} samples)" + (SHARE_HINT if len(indices) < batch else "")
                ) from error

    def draw_samples(self, epoch: int, indices: list[int]) -> list[Any]:
        """Read samples, and leave the generators seeded for `collate`.

        Args:
            epoch: The epoch.
            indices: The samples to read.

        Returns:
            The samples, in the form that `collate` gets.
        """
        drawn = []
        for index in indices:
            repeated = f" {index.occurrence}" if isinstance(index, RepeatedIndex) else ""
            seed_generators(f"sample {self.seed} {epoch} {index}{repeated}")
            with limit_time(self.sample_timeout, f"sample {index} of the dataset was not loaded"):
                drawn.append(self._read_sample(index))
        seed_generators(f"collate {self.seed} {epoch} {indices[0]}")
        return drawn

    def _read_sample(self, index: int) -> Any:
        dataset = self.dataset
        try:
            return dataset.take_sample(index) if isinstance(dataset, Stream) else dataset[index]
        except StepFailed:
            raise
        except Exception as error:
            raise StepFailed(
                f"sample {index} of the dataset raised {describe_error(error)}"
            ) from error


def _convert_indices(indices: Indices) -> Tensor:
    """Convert indices; torch.tensor of a list, and indexing by a list, take far longer."""
    return torch.from_numpy(numpy.asarray(indices))


def _count_joint_batches(tensors: Sequence[Tensor], samples: int) -> int:
    """Return how many batches of so many samples are selected together, at least one.

    The batches then lie in one memory. Each begins where memory of its own could begin, since the
    results of a multiplication can depend on that. Tensors in memory of others, such as an array of
    numpy or another process, may change without a new version.
    """
    if not all(
        _is_rowwise(each, len(tensors[0]))
        and not each.requires_grad
        and not (each.is_inference() or each.is_shared() or each.is_conj() or each.is_neg())
        and each.untyped_storage().resizable()
        for each in tensors
    ):
        return 1
    sizes = [samples * each[:1].nbytes for each in tensors]
    if not all(size and size % ALIGNMENT == 0 for size in sizes):
        return 1
    count = min(JOINT_BYTES // sum(sizes), JOINT_BATCHES)
    return count if count >= FEWEST_JOINT_BATCHES else 1


def _take_group(
    first: SampleKey, keys: Iterator[SampleKey], count: int
) -> tuple[list[SampleKey], SampleKey | None]:
    """Take up to `count` keys of one epoch, with equally many samples.

    Returns:
        (the keys, a key that was read and belongs to the next group).
    """
    group = [first]
    while len(group) < count and (key := next(keys, None)) is not None:
        if key[0] != first[0] or len(key[-1]) != len(first[-1]):
            return group, key
        group.append(key)
    return group, None


class JointBatches:
    """Batches of a TensorDataset that are selected together. To autograd, each is its own tensor.

    They lie backwards in one memory: what enlarges a batch in place overwrites only batches that
    were used before.

    Attributes:
        tensors: The tensors of the dataset. They are kept, so that no other tensors get their ids.

        state: The state of these tensors (`_read_state`).

        places: The indices of all samples.

        copies: The rows, of which the loop sees none.

        batches: The batches; the last one is the next.
    """

    def __init__(self, tensors: tuple[Tensor, ...], indices: Sequence[Indices]) -> None:
        """Select the batches.

        Args:
            tensors: The tensors of the dataset.
            indices: The indices of each batch, equally many.
        """
        self.tensors = tensors
        self.state = _read_state(tensors)
        self.places = _convert_indices(numpy.concatenate(indices[::-1]))
        with torch.inference_mode(False):
            rows = [each.index_select(0, self.places) for each in tensors]
            self.copies = [each.clone() for each in rows]
            sizes = [len(each) for each in indices]
            self.batches = list(
                zip(*[each.unsafe_split_with_sizes(sizes) for each in rows], strict=True)
            )

    def refuse_uncounted_change(self) -> None:
        """Refuse a change of the dataset that torch has not counted.

        Raises:
            StepFailed: Rows of the dataset are no longer what was selected.
        """
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            rows = tensor.index_select(0, self.places)
            if compare_memory(rows.data_ptr(), copy.data_ptr(), copy.nbytes):
                raise StepFailed(
                    "the tensors of the dataset changed in the middle of an epoch, in a way that "
                    "torch does not count (an array of numpy, .data, a fused optimizer), and the "
                    f"last {len(self.places) // len(self.batches[0][0])} batches may be older; "
                    "change them by operations of torch, or read samples in a dataset with a "
                    "__getitem__ of its own"
                )


def _read_state(tensors: Sequence[Tensor]) -> list[tuple[int, int, int, bool]] | None:
    """Return what shows that tensors were replaced, or changed in a way that torch counts.

    Returns:
        None if torch counts no changes of one of them.
    """
    try:
        return [(id(each), each.data_ptr(), each._version, each.requires_grad) for each in tensors]
    except RuntimeError:  # of inference mode
        return None


def _select_batches(tensors: tuple[Tensor, ...], indices: Sequence[Indices]) -> JointBatches | None:
    """Select several batches together; None if the dataset has not all of their samples."""
    try:
        return JointBatches(tensors, indices)
    except IndexError:  # the dataset is shorter now, and may be longer when a batch is due
        return None


def _select_indices(indices: Indices, places: Sequence[int] | None = None) -> Indices:
    """Return the indices at some places; of a range, by slicing."""
    if places is None:
        return indices
    if isinstance(places, range) and places.step == 1 and places.stop <= len(indices):
        return indices[places.start : places.stop]
    if isinstance(indices, numpy.ndarray):
        return indices[list(places)]
    return [indices[place] for place in places]


def explain_whole_batch(samples: Samples, batch: int) -> str | None:
    """Explain why collate must get whole batches, or return None.

    A few samples from all over the dataset are collated, at most one batch. If collate sorts
    samples, a row of a share may belong to another sample than expected. If samples cannot be
    collated or sliced, the result is None; the training reports the error.

    Args:
        samples: The dataset with its collate.
        batch: The global batch size.

    Returns:
        The reason as text, or None.
    """
    if samples.collate is None or isinstance(samples.collate, WholeBatch):
        return None
    count = min(len(samples), batch, PROBE_SAMPLES)
    # spread over the dataset, because neighbours often have the same length
    indices = [len(samples) * number // count for number in range(count)]
    try:
        if isinstance(samples.dataset, Stream):
            indices = list(range(count))
            samples.dataset.read_batch(samples.seed, 0, indices, samples.sample_timeout)
        with keep_generators():
            drawn = samples.draw_samples(0, indices)
            states = fingerprint_generators()
            forwards = samples.collate(drawn)
            if fingerprint_generators() != states:
                return "it draws at random"
            backwards = slice_batch(
                samples.collate(samples.draw_samples(0, indices[::-1])),
                list(range(count))[::-1],
                count,
            )
            if is_same_batch(forwards, backwards) or not is_same_batch(
                forwards, samples.collate(samples.draw_samples(0, indices))
            ):
                return None  # or collate gives different results for equal samples
            # raises if the first dimension equals the number of samples by chance only
            slice_batch(
                samples.collate(samples.draw_samples(0, indices[:-1])), slice(0, 1), count - 1
            )
    except Exception:
        return None
    return "it changes the order of the samples"


def wrap_collate_if_needed(samples: Samples, batch: int) -> Samples:
    """Wrap collate in WholeBatch, if it must get whole batches.

    Args:
        samples: The dataset with its collate.
        batch: The global batch size.

    Returns:
        The same samples, or a copy with the wrapped collate.
    """
    return (
        replace(samples, collate=WholeBatch(samples.collate))
        if samples.collate and explain_whole_batch(samples, batch)
        else samples
    )


def refuse_loader(dataset: Any, what: str) -> None:
    """Refuse a DataLoader, and a stream that is no `Stream`.

    Args:
        dataset: The object given as dataset.
        what: What it is called in the message.

    Raises:
        Refused: It is a DataLoader or a stream.
    """
    if isinstance(dataset, DataLoader):
        raise Refused(
            f"{what} is a DataLoader, which makes batches of its own; give the dataset itself, the "
            f"global batch size as batch={dataset.batch_size or '...'}, "
            f"{'its sampler as sampler=, ' if _draws_samples(dataset) else ''}and its collate_fn "
            "as collate="
        )
    if is_stream(dataset):
        raise Refused(
            f"{what} gives samples one after the other only ({type(dataset).__name__}); give "
            "paragrad.Stream(..., length=N), with N samples in an epoch, or list(...) if they fit "
            "into memory"
        )


def _draws_samples(loader: DataLoader[Any]) -> bool:
    """Return whether a loader has a sampler that does not take each sample once."""
    if is_stream(loader.dataset):
        return False
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, RandomSampler):
        return sampler.replacement or sampler.num_samples != len(sampler.data_source)
    return not isinstance(sampler, SequentialSampler | DistributedSampler)


def separate_target(batch: Any) -> tuple[Any, Any]:
    """Separate a batch into inputs and target; a dict is both.

    Args:
        batch: The batch.

    Returns:
        (inputs, target).

    Raises:
        Refused: The batch is neither a pair nor a dict.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        return dict(batch), dict(batch)
    raise Refused(
        "a sample of a dataset must be a pair (input, target) or a dict, got "
        f"{type(batch).__name__}"
    )


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each leaf of a nested value.

    A leaf is a tensor, a PackedSequence, a sequence of plain values (such as texts), or any other
    value.

    Args:
        function: The function.
        value: Nested tuples, lists and dicts.

    Returns:
        The same structure with the results.
    """
    if type(value) is Tensor or isinstance(value, PackedSequence):
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
    """List the tensors of a batch.

    Args:
        value: Nested tuples, lists and dicts.

    Returns:
        The tensors, in order.
    """
    tensors: list[Tensor] = []

    def add_leaf(leaf: Any) -> None:
        leaf = leaf.data if isinstance(leaf, PackedSequence) else leaf
        tensors.extend([leaf] if isinstance(leaf, Tensor) else [])

    map_leaves(add_leaf, value)
    return tensors


def is_same_batch(one: Any, other: Any) -> bool:
    """Compare two batches in everything that is stored per sample; NaN equals NaN.

    Args:
        one: A batch.
        other: Another batch.

    Returns:
        Whether they are equal.
    """
    leaves: tuple[list[Any], list[Any]] = ([], [])
    for leaf_list, value in zip(leaves, (one, other), strict=True):
        map_leaves(leaf_list.append, value)
    return len(leaves[0]) == len(leaves[1]) and all(map(_is_same_leaf, *leaves))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and (
            not one.dim() or bool(((one == other) | ((one != one) & (other != other))).all())
        )
    return not isinstance(one, tuple | list) or bool(one == other)


def clone_batch(value: Any) -> Any:
    """Copy a value with its tensors cloned, because a model may change its inputs in place.

    A tensor that occurs twice stays one tensor. A loss may differentiate by an input that is also
    in its target.

    Args:
        value: Nested tuples, lists and dicts.

    Returns:
        The copy.
    """
    clones: dict[int, Tensor] = {}

    def clone_leaf(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=leaf.data.clone())
        return clones.setdefault(id(leaf), leaf.clone()) if isinstance(leaf, Tensor) else leaf

    return map_leaves(clone_leaf, value)


def convert_batch(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Move a value to a device and convert its floating point numbers.

    Args:
        value: Nested tuples, lists and dicts.
        device: The device; None leaves tensors where they are.
        dtype: The type of real numbers; complex ones get its precision. None leaves types as they
            are.

    Returns:
        The converted value; the value itself if nothing is to be converted.
    """
    # the batch of most steps is a pair of tensors that fit
    if type(value) is tuple and len(value) == 2:
        inputs, target = value
        if _fits(inputs, device, dtype) and _fits(target, device, dtype):
            return value

    def convert_leaf(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf.to(device, choose_dtype(leaf.data, dtype))
        return leaf.to(device, choose_dtype(leaf, dtype)) if isinstance(leaf, Tensor) else leaf

    return map_leaves(convert_leaf, value)


def _fits(leaf: Any, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    """Return whether a leaf is a plain tensor that is not converted."""
    return (
        type(leaf) is Tensor
        and (device is None or leaf.device == device)
        and (choose_dtype(leaf, dtype) is leaf.dtype)
    )


def choose_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Choose the type of a tensor when real numbers are converted to dtype.

    Args:
        tensor: The tensor.
        dtype: The type of real numbers; complex ones get its precision. None leaves the type as it
            is.

    Returns:
        The type.
    """
    if dtype is None or not (tensor.is_complex() or tensor.is_floating_point()):
        return tensor.dtype
    return dtype.to_complex() if tensor.is_complex() else dtype


def _is_rowwise(leaf: Any, samples: int) -> bool:
    """Return whether a leaf is a plain tensor with a row for each sample."""
    return (
        type(leaf) is Tensor
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and leaf.ndim > 0
        and leaf.shape[0] == samples
    )


def slice_batch(value: Any, rows: slice | list[int], samples: int) -> Any:
    """Take some rows of a batch: of each tensor, and of sequences of plain values.

    A tensor that occurs twice stays one tensor.

    Args:
        value: The batch, nested tuples, lists and dicts.
        rows: The rows, as a slice or as a list.
        samples: The number of samples of the batch.

    Returns:
        The rows. A tensor without dimensions belongs to each sample and is returned whole.

    Raises:
        ValueError: The first dimension of a tensor is not the samples.
    """
    # the batch of most steps is a pair of plain tensors
    if type(value) is tuple and len(value) == 2 and value[0] is not value[1]:
        inputs, target = value
        if _is_rowwise(inputs, samples) and _is_rowwise(target, samples):
            return inputs[rows], target[rows]
    sliced: dict[int, Tensor] = {}

    def slice_leaf(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            raise ValueError(
                "a PackedSequence cannot be cut into micro-batches; let collate give padded "
                "sequences and their lengths, and the model pack them (pack_padded_sequence), or "
                "train with micro=1"
            )
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise ValueError(
                "a NestedTensor cannot be cut into micro-batches; let collate give padded tensors "
                "and their lengths, or train with micro=1"
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
                "or train with micro=1"
            )
        if len(leaf) != samples:
            raise ValueError(
                f"a batch of {samples} samples holds a tensor of shape {tuple(leaf.shape)}, which "
                "cannot be cut into micro-batches; let the samples be its first dimension, or "
                "train with micro=1"
            )
        return sliced.setdefault(id(leaf), leaf[rows])

    return map_leaves(slice_leaf, value)
