"""The feed: one rank's parts of batches as they are given to a loop, and what `step` may take
of them.
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
    """Gives batches one after the other, each to be taken once, before the next one.

    batch: what was given last and not taken;  fetched: its tensors;  samples: where they are
    from;  began: when it began to load.
    """

    def __init__(self, log: StepLog, device: torch.device, dtype: torch.dtype | None) -> None:
        self.log = log
        self.device = device
        self.dtype = dtype
        self.pending_batch: Batch | None = None
        self.loaded_batch: Any = None
        self.samples: Samples | None = None
        self.load_start = 0.0
        # tensors that were given, and that no step took
        self.untaken_tensors = WeakTensorKeyDictionary()

    def iterate_batches(
        self, samples: Samples, batches: Iterable[Batch], loaders: int
    ) -> Iterator[Any]:
        """What each batch is of, loaded; loaders: processes that load ahead. No more batches
        are made than that.
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
                fetched = convert_batch(next(data), self.device, self.dtype)
            self.pending_batch = batch
            self.loaded_batch = fetched
            yield fetched
            # no step took it: it was skipped, or something looks ahead
            if self.pending_batch is batch:
                self.untaken_tensors.update(dict.fromkeys(list_batch_tensors(fetched)))

    def take_batch(self, inputs: Any, target: Any) -> Batch:
        """The batch that was given last, once. Raises StepFailed."""
        batch, self.pending_batch = self.pending_batch, None
        if batch is None:
            raise StepFailed(
                "step wants what trainer.batches(...) gave last, once; loop over trainer.batches "
                "and call "
                "step in it"
            )
        if len(self.untaken_tensors) and any(
            tensor in self.untaken_tensors for tensor in list_batch_tensors([inputs, target])
        ):
            raise StepFailed(
                "step got an earlier batch than the one trainer.batches gave last: something looks "
                "ahead, "
                "which would mix shares; loop over trainer.batches itself (loaders=1 loads ahead)"
            )
        return batch
