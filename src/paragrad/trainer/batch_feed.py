"""The feed: one rank's parts of batches as they are given to a loop, and what `step` may take
of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import tee
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from paragrad.datasets.loader_processes import loaded
from paragrad.datasets.loading import Samples, brought, tensors_of
from paragrad.errors import StepFailed
from paragrad.record.step_log import Log
from paragrad.trainer.batch import Batch


class Feed:
    """Gives batches one after the other, each to be taken once, before the next one.

    batch: what was given last and not taken;  fetched: its tensors;  samples: where they are
    from;  began: when it began to load.
    """

    def __init__(self, log: Log, device: torch.device, dtype: torch.dtype | None) -> None:
        self.log = log
        self.device = device
        self.dtype = dtype
        self.batch: Batch | None = None
        self.fetched: Any = None
        self.samples: Samples | None = None
        self.began = 0.0
        # tensors that were given, and that no step took
        self.passed_over = WeakTensorKeyDictionary()

    def give(self, samples: Samples, batches: Iterable[Batch], loaders: int) -> Iterator[Any]:
        """What each batch is of, loaded; loaders: processes that load ahead. No more batches
        are made than that.
        """
        self.samples = samples
        batches, ahead = tee(batches)
        data = loaded(
            samples,
            (
                (batch.epoch if batch.drawn is None else batch.drawn, batch.indices, batch.places)
                for batch in ahead
            ),
            loaders,
        )
        for batch in batches:
            self.began = self.log.now()
            with self.log.span("load", "data"):
                fetched = brought(next(data), self.device, self.dtype)
            self.batch = batch
            self.fetched = fetched
            yield fetched
            # no step took it: it was skipped, or something looks ahead
            if self.batch is batch:
                self.passed_over.update(dict.fromkeys(tensors_of(fetched)))

    def taken(self, inputs: Any, target: Any) -> Batch:
        """The batch that was given last, once. Raises StepFailed."""
        batch, self.batch = self.batch, None
        if batch is None:
            raise StepFailed(
                "step wants what trainer.batches(...) gave last, once; loop over trainer.batches "
                "and call "
                "step in it"
            )
        if len(self.passed_over) and any(
            tensor in self.passed_over for tensor in tensors_of([inputs, target])
        ):
            raise StepFailed(
                "step got an earlier batch than the one trainer.batches gave last: something looks "
                "ahead, "
                "which would mix shares; loop over trainer.batches itself (loaders=1 loads ahead)"
            )
        return batch
