"""Batches that other processes load ahead, passed on in memory without a name (memfd).

torch creates an entry in /dev/shm for each tensor and removes it a moment later. A loader that is
killed in between leaves the entry behind. Where /dev/shm is small, as in containers, it soon fills
up.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch.utils.data import DataLoader

from paragrad.datasets.loading import Samples
from paragrad.errors import StepFailed
from paragrad.launch.launcher_folder import use_clearable_tempdir
from paragrad.launch.tensorless_pickle import dump_tensorless, load_tensorless
from paragrad.runtime.stop_signals import make_worker_init
from paragrad.shm.region import (
    TOKEN_BYTES,
    CreatedRegion,
    SharedRegion,
    compute_offsets,
    explain_unavailable_shm,
)

BUS_ERROR = "Bus error"
LOADER_REPAIR = "start fewer loaders, or smaller batches"


def load_batches(samples: Samples, keys: Iterable[Any], loaders: int = 0) -> Iterator[Any]:
    """Iterate over samples[key] for each key, in order.

    Args:
        samples: The dataset to read from.
        keys: The keys of the batches.
        loaders: The number of processes that load ahead; 0 loads in this process.

    Returns:
        An iterator over the batches.
    """
    if loaders == 0:
        return samples.load_in_turn(keys)
    use_clearable_tempdir()
    return _load_in_processes(samples, keys, loaders)


def _load_in_processes(samples: Samples, keys: Iterable[Any], loaders: int) -> Iterator[Any]:
    # DataLoader draws a seed: a generator of its own leaves the global one unchanged
    generator = torch.Generator()
    try:
        for batch in DataLoader(
            TransferredSamples(samples),
            batch_size=None,
            sampler=keys,
            num_workers=loaders,  # type: ignore
            collate_fn=_return_unchanged,
            generator=generator,
            worker_init_fn=make_worker_init(),
        ):
            if isinstance(batch, StepFailed):
                raise batch
            yield batch
    except StepFailed:
        raise
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise StepFailed(
            "/dev/shm is full, and loaders need room there for semaphores; make room there, or "
            "load without loaders (leave out --loaders)"
        ) from error
    except RuntimeError as error:
        if BUS_ERROR not in str(error):
            raise
        raise StepFailed(
            "a bus error ended a loader: a file that the dataset maps into memory became shorter, "
            "or /dev/shm is full; load without loaders (leave out --loaders)"
        ) from error


@dataclass(frozen=True)
class TransferredSamples:
    """Samples for a loader process.

    An error in the loader is returned as a value, because DataLoader would wrap it in two
    tracebacks.

    Attributes:
        samples: The dataset to read from.
    """

    samples: Samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Any) -> Any:
        try:
            batch = self.samples[key]
            return batch if explain_unavailable_shm() else SharedBatch(batch)
        except StepFailed as error:
            return error


class SharedBatch:
    """A batch with its tensors in shared memory; unpickling it in another process gives the batch.

    Attributes:
        pickle_text: The batch as a pickle without the contents of its tensors.
        sizes: The size of each storage, in bytes.
        region: The memory that holds the storages.
    """

    def __init__(self, batch: Any) -> None:
        self.pickle_text, storages = dump_tensorless(batch, [], compact_views=True)
        self.sizes = [storage.nbytes() for storage in storages]
        *places, end = compute_offsets(TOKEN_BYTES, self.sizes)
        try:
            self.region = CreatedRegion(end, repair=LOADER_REPAIR)
        except RuntimeError as error:
            raise StepFailed(f"a loader hands over a batch: {error}") from error
        for place, size, storage in zip(places, self.sizes, storages, strict=True):
            self.region.bytes[place : place + size].copy_(
                torch.empty(0, dtype=torch.uint8).set_(storage)
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _map_shared_batch, (
            DupFd(self.region.descriptor),
            self.region.size,
            self.sizes,
            self.pickle_text,
        )

    def __del__(self) -> None:
        if hasattr(self, "region"):
            self.region.close_descriptor()


def _map_shared_batch(duplicate: Any, size: int, sizes: Sequence[int], text: bytes) -> Any:
    descriptor = duplicate.detach()
    try:
        region = SharedRegion(descriptor, size)
    finally:
        os.close(descriptor)
    return load_tensorless(
        text,
        [
            region.make_storage(*each)
            for each in zip(compute_offsets(TOKEN_BYTES, sizes), sizes, strict=False)
        ],
    )


def _return_unchanged(batch: Any) -> Any:
    return batch
