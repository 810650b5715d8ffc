"""A feed of one rank's batches for a training loop.

The feed also checks that `step` receives the batch that was given last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import tee
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from paragrad.datasets.loader_processes import load_batches
from paragrad.datasets.loading import Samples, convert_batch, list_batch_tensors
from paragrad.errors import StepFailed
from paragrad.record.step_log import StepLog
from paragrad.trainer.batch import Batch


class BatchFeed:
    """Yields batches one after the other. A step takes each batch once, before the next one.

    Attributes:
        log: The log in which loading is recorded.

        device: The device to which batches are moved.

        dtype: The type to which real tensors are converted, or None.

        pending_batch: The batch that was given last, until a step takes it.

        loaded_batch: The tensors of the batch that was given last.

        samples: The source of the samples.

        load_start: The time at which the last batch began to load, in seconds of the log's clock.

        untaken_tensors: Tensors that were given and that no step took.
    """

    def __init__(self, log: StepLog, device: torch.device, dtype: torch.dtype | None) -> None:
        self.log = log
        self.device = device
        self.dtype = dtype
        self.pending_batch: Batch | None = None
        self.loaded_batch: Any = None
        self.samples: Samples | None = None
        self.load_start = 0.0
        self.untaken_tensors = WeakTensorKeyDictionary()

    def iterate_batches(
        self, samples: Samples, batches: Iterable[Batch], loaders: int
    ) -> Iterator[Any]:
        """Yield the loaded samples of each batch.

        At most as many batches as are loaded ahead are made before they are needed.

        Args:
            samples: The source of the samples.
            batches: The batches to load, in order.
            loaders: The number of processes that load ahead.
        """
        self.samples = samples
        batches, ahead = tee(batches)
        data = load_batches(
            samples,
            (
                (
                    batch.epoch if batch.draw_epoch is None else batch.draw_epoch,
                    batch.sample_indices,
                    batch.places,
                )
                for batch in ahead
            ),
            loaders,
        )
        for batch in batches:
            self.load_start = self.log.now()
            with self.log.record_span("load", "data"):
                loaded = convert_batch(next(data), self.device, self.dtype)
            self.pending_batch = batch
            self.loaded_batch = loaded
            yield loaded
            # No step took this batch: the loop skipped it, or something loads ahead.
            if self.pending_batch is batch:
                self.untaken_tensors.update(dict.fromkeys(list_batch_tensors(loaded)))

    def repeat_batch(self, samples: Samples | None, loaded_batch: Any) -> None:
        """Take over a batch that another feed gave.

        Args:
            samples: The source of the samples.
            loaded_batch: The tensors of the batch, or None if `step` received other ones.
        """
        self.samples = samples
        self.loaded_batch = loaded_batch

    def take_batch(self, inputs: Any, target: Any) -> Batch:
        """Return the batch that was given last, once.

        Args:
            inputs: The inputs that the step received.
            target: The target that the step received.

        Raises:
            StepFailed: If no batch is pending, or if the step received an earlier batch.
        """
        batch, self.pending_batch = self.pending_batch, None
        if batch is None:
            raise StepFailed(
                "step wants what trainer.batches(...) gave last, once; loop over trainer.batches "
                "and call step in it"
            )
        if len(self.untaken_tensors) and any(
            tensor in self.untaken_tensors for tensor in list_batch_tensors([inputs, target])
        ):
            raise StepFailed(
                "step got an earlier batch than the one trainer.batches gave last: something "
                "looks ahead, which would mix shares; loop over trainer.batches itself (loaders=1 "
                "loads ahead)"
            )
        return batch
