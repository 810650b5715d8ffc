"""A stream of samples as a dataset, such as an IterableDataset or shards of a webdataset.

Each rank reads the whole stream in its own order, and keeps the samples of the current batch. So
the order is that of one worker, and a rank takes its share of each batch as of any dataset.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker

from paragrad.errors import Refused, StepFailed, describe_error
from paragrad.runtime.generators import (
    capture_generators,
    keep_generators,
    restore_generators,
    seed_generators,
)
from paragrad.runtime.launcher_env import hide_rank_variables
from paragrad.runtime.single_group import act_alone
from paragrad.runtime.timeout import limit_time
from paragrad.runtime.world import DEFAULT_TIMEOUT

# an iterable that can be read again from its beginning, or f(epoch) -> iterator
StreamSource: TypeAlias = Iterable[Any] | Callable[[int], Iterable[Any]]
COMPARED_SAMPLES = 8  # samples of the first batch that are read twice before a run


class Stream:
    """A stream of samples as the dataset of a job: an epoch is its first `length` samples.

    Each epoch reads the stream from its beginning, as a DataLoader does. Before that, the
    generators of torch, numpy and random are seeded by (seed, epoch), and a method `set_epoch` of
    the stream gets the epoch. The order of samples is the order of the stream; nothing is shuffled.

    Each rank reads all samples, and drops those of other ranks. A resumed run reads the samples
    before its first batch and drops them. So let the stream give what is cheap to read, such as
    undecoded bytes. Decode them in `transform`: a rank calls it for its own samples only.

    Args:
        source: An IterableDataset, another iterable that can be read again from its beginning, or a
            function f(epoch) -> iterator.
        length: The number of samples of an epoch. None: len(source). A stream without end needs it.
        transform: f(sample) -> sample, or None. It may draw random numbers, which are seeded by
            (seed, epoch, index), as those of a dataset are.

    Raises:
        Refused: The source is no such stream, or has no length.

    Examples:
        >>> import itertools, paragrad as pg, torch
        >>> def read(epoch):
        ...     for number in itertools.count():
        ...         yield torch.tensor([float(number)]), torch.tensor([2.0 * number])
        >>> stream = pg.Stream(read, length=100)
        >>> len(stream)
        100
    """

    def __init__(
        self,
        source: StreamSource,
        length: int | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        _refuse_source(source)
        if length is None:
            length = _read_length(source)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise Refused(f"Stream: length must be a whole number from 1, got {length!r}")
        self.source = source
        self.length = length
        self.transform = transform
        self._is_checked = False
        self._cursor: _Cursor | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Return a sample of the first epoch, by reading the stream up to it."""
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of a stream of {self.length}")
        with keep_generators():
            self.read_batch(0, 0, [index])
            return self.take_sample(index)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the iterator: a copy reads the stream from its beginning."""
        return {**self.__dict__, "_cursor": None}

    def read_batch(
        self, seed: int, epoch: int, indices: Sequence[int], timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Read on to the end of a batch, and drop the samples before it.

        Args:
            seed: The seed of the job.
            epoch: The epoch.
            indices: The indices of all samples of the batch.
            timeout: Seconds that a sample may take.

        Raises:
            StepFailed: The stream raised an error, or it ended.
        """
        first, last = min(indices), max(indices)
        # a forked process shares the offsets of open files with its parent
        position = (os.getpid(), seed, epoch)
        with keep_generators(), act_alone(), hide_loader_process(), hide_rank_variables():
            cursor = self._cursor
            if cursor is None or cursor.position != position or first < cursor.first_kept:
                self._cursor = None
                cursor = self._begin_epoch(position)
            else:
                restore_generators(cursor.generators)
            # after an error the stream is read from its beginning
            self._cursor = None
            cursor.drop_before(first)
            while cursor.next_index <= last:
                message = f"sample {cursor.next_index} of the stream was not loaded"
                with limit_time(timeout, message):
                    cursor.read_next(self.length)
            cursor.keep_generators()
            self._cursor = cursor

    def take_sample(self, index: int) -> Any:
        """Return a sample of the batch that was read last, transformed.

        Args:
            index: The index of the sample in the epoch.
        """
        sample = self._get_kept(index)
        return sample if self.transform is None else self.transform(sample)

    def refuse_changing_samples(self, seed: int, count: int) -> None:
        """Refuse a stream that gives other samples when it is read again from its beginning.

        Args:
            seed: The seed of the job.
            count: The number of samples of a batch.

        Raises:
            Refused: It gives other samples, raises an error, or ends.
        """
        if self._is_checked:
            return
        indices = range(min(count, self.length, COMPARED_SAMPLES))
        reads = []
        try:
            for _ in range(2):
                self._cursor = None
                self.read_batch(seed, 0, indices)
                reads.append([self._get_kept(index) for index in indices])
        except StepFailed as error:
            raise Refused(str(error)) from error
        for index, (one, other) in enumerate(zip(*reads, strict=True)):
            if not _is_same_value(one, other):
                raise Refused(
                    f"the stream gives another sample {index} when it is read again from its "
                    "beginning, as each rank reads it: it continues where it stopped, or has its "
                    "own random generator; give Stream a function f(epoch) that starts again, and "
                    "let it draw by torch, numpy.random or random themselves, which are seeded "
                    "for each epoch"
                )
        self._is_checked = True

    def _get_kept(self, index: int) -> Any:
        assert self._cursor is not None
        return self._cursor.kept[index - self._cursor.first_kept]

    def _begin_epoch(self, position: tuple[int, int, int]) -> _Cursor:
        _, seed, epoch = position
        seed_generators(f"stream {seed} {epoch}")
        source: Any = self.source
        try:
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            return _Cursor(iter(source(epoch) if _is_function(source) else source), position)
        except StepFailed:
            raise
        except Exception as error:
            raise StepFailed(
                f"the stream raised {describe_error(error)} when epoch {epoch} began"
            ) from error


class _Cursor:
    """A place in a stream: the iterator, and the samples that are kept.

    Args:
        iterator: The stream, from its beginning.
        position: (process, seed, epoch) that the iterator belongs to.

    Attributes:
        position: As the argument.
        kept: The samples of the current batch.
        first_kept: The index of the first of them.
        next_index: The index of the next sample that the iterator gives.
        generators: The states of the generators after the last sample.
    """

    def __init__(self, iterator: Iterator[Any], position: tuple[int, int, int]) -> None:
        self._iterator = iterator
        self.position = position
        self.kept: list[Any] = []
        self.first_kept = 0
        self.next_index = 0
        self.generators = capture_generators()

    def drop_before(self, first: int) -> None:
        """Drop the samples before an index, also those that are read from here on."""
        del self.kept[: first - self.first_kept]
        self.first_kept = first

    def keep_generators(self) -> None:
        """Keep the states of the generators for the next sample."""
        self.generators = capture_generators()

    def read_next(self, length: int) -> None:
        """Read a sample, and keep it if it is not before the kept ones."""
        index, epoch = self.next_index, self.position[2]
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise StepFailed(
                f"the stream ended after {index} samples of epoch {epoch}, and its length is "
                f"{length}; give length={index or 1}, or let the stream give more"
            ) from None
        except StepFailed:
            raise
        except Exception as error:
            raise StepFailed(
                f"the stream raised {describe_error(error)} at sample {index} of epoch {epoch}"
            ) from error
        if index >= self.first_kept:
            self.kept.append(sample)
        self.next_index += 1


@contextlib.contextmanager
def hide_loader_process() -> Iterator[None]:
    """Let torch's functions act as in the main process, in a process that loads ahead too.

    In a loader process, default_collate would put batches into /dev/shm, and a stream that asks
    `get_worker_info` would give the part of this process only.
    """
    worker_info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = worker_info


def is_stream(dataset: Any) -> bool:
    """Whether an object gives samples one after the other only.

    Args:
        dataset: The object.
    """
    has_places = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_places)


def refuse_sampled_stream(dataset: Any) -> None:
    """Refuse a stream beside a sampler.

    Args:
        dataset: The dataset.

    Raises:
        Refused: The dataset is a stream.
    """
    if isinstance(dataset, Stream):
        raise Refused(
            "a stream gives its samples in its own order, so it takes no sampler; leave the "
            "sampler out, or let the stream choose its samples"
        )


def _is_function(source: Any) -> bool:
    return callable(source) and not hasattr(source, "__iter__")


def _refuse_source(source: Any) -> None:
    if isinstance(source, DataLoader):
        raise Refused(
            "Stream got a DataLoader, which makes batches; give it the dataset of the loader"
        )
    if isinstance(source, Iterator):
        raise Refused(
            f"Stream got an iterator ({type(source).__name__}), which can be read once; give a "
            "function f(epoch) that returns a new one"
        )
    if not is_stream(source) and not _is_function(source):
        raise Refused(
            f"Stream got a {type(source).__name__}; give an IterableDataset or a function f(epoch) "
            "that returns an iterator; a dataset with __len__ and __getitem__ needs no Stream"
        )
    if _is_function(source):
        try:
            inspect.signature(source).bind(0)
        except TypeError as error:
            raise Refused(f"Stream: the function must take the epoch: {error}") from error
        except ValueError:  # no signature is known
            pass


def _read_length(source: Any) -> int:
    try:
        return len(source)
    except TypeError as error:
        raise Refused(
            f"Stream: {type(source).__name__} has no length; give length=, the number of samples "
            "of an epoch"
        ) from error


def _is_same_value(one: Any, other: Any) -> bool:
    """Compare two samples; NaN equals NaN. What cannot be compared counts as equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        one, other = (
            each.to_dense() if each.layout != torch.strided else each for each in (one, other)
        )
        return one.shape == other.shape and bool(
            ((one == other) | ((one != one) & (other != other))).all()
        )
    if isinstance(one, numpy.ndarray):
        return numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _is_same_value(value, other[name]) for name, value in one.items()
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_is_same_value, one, other))
    if isinstance(one, float | numpy.floating):
        return bool(one == other or (one != one and other != other))
    if isinstance(one, str | bytes | int | complex | set | numpy.generic):
        return bool(one == other)
    try:
        return pickle.dumps(one) == pickle.dumps(other)
    except Exception:
        return True
