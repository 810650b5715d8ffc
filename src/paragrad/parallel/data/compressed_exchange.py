"""Gradients are compressed before they are exchanged.

What is compressed is a rank's part of the *mean* gradient: its sum, over the weight of all
ranks' samples, which they tell each other first. Were sums compressed, what waits of a full
batch would count a third more in a short one. So nothing is compressed before the forwards are
over, and all is after backward, in `average`: the one division is here too.

A tensor is compressed by itself, and what is kept of it goes by its name, so nothing depends on
which tensors travel together, but how its sum is rounded: of a model that is cut, copies become
alike (`copies.py`) before they are taken. Payloads that add up travel along the all-reduce; of
others every rank is given all, and adds them up in the order of ranks: all apply the same bits.
Where that would be more bytes than the dense vectors, what the payloads stand for travels as
dense vectors. Weight, loss and the wish to stop are never compressed, nor are small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paragrad.engine.exchange import CHECKPOINT_TRAFFIC, ExchangeOptions, Replica
from paragrad.engine.layout import OptimizerState, copy_to_host
from paragrad.engine.replica_check import DuplicateTensors
from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.executors.transport import Traffic
from paragrad.parallel.compression.compressed_reduce import DENSE_BYTES, CompressedReduce
from paragrad.parallel.compression.feedback import (
    RESIDUAL,
    NoFeedback,
    flatten_real,
    load_residual,
    make_residual_key,
    reshape_and_cast_like,
    reshape_like,
)
from paragrad.parallel.data.bucket_queue import Bucket
from paragrad.parallel.data.bucketing import VectorSumExchange, split_into_buckets
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.data import Data

CODEC_MEMORY = "memory"  # by which name a checkpoint has what codecs go on from
# bytes of weight, loss, the wish to stop, and which parameters have a gradient
TOTALS = "told"


class CompressedExchange(VectorSumExchange):
    """Every rank has all mean gradients after `average`, as far as they were sent."""

    def __init__(
        self,
        strategy: Data,
        replica: Replica,
        world: World,
        log: StepLog,
        options: ExchangeOptions,
        feedback: NoFeedback | None = None,
    ) -> None:
        super().__init__(replica, world, log, options, strategy.reduce)
        assert isinstance(strategy.compress, Compressor)
        self.compressor = strategy.compress
        log.write_choice(
            "overlap",
            "off",
            "gradients are compressed after backward, when the weight of all samples is known",
        )
        self.step = replica.completed_steps
        self.fault_factor = world.size if options.inject_fault == "mean_twice" else 1  # planted
        self.trained = {
            name: each
            for name, each in self.loss_module.model.named_parameters()
            if each.requires_grad
        }
        known = {name: str((held.name, held.where)) for name, held in self.layout.specs.items()}
        self.compression = CompressedReduce(
            strategy.compress,
            world,
            self._start_counted_sum,
            feedback=feedback,
            seed=replica.seed,
            log=log,
            count_bytes=lambda kind, sent: self.count_bytes(kind, sent, computed=True),
            get_serial_name=lambda name: known.get(name, name),
        )
        large = [
            name for name, each in self.trained.items() if strategy.compress.compresses(each.shape)
        ][::-1]
        self.small_names = set(self.trained) - set(large)
        names = {each: name for name, each in self.trained.items()}
        self.copies = DuplicateTensors(self.layout, self.loss_module.model)
        self.buckets = [
            [names[each] for each in bucket]
            for bucket in split_into_buckets(self.trained[name] for name in large)
        ]
        self._restore_feedback(replica.restored_tensors)

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.refuse_refrozen()
        # of what is summed in this step, in the order of buckets
        self.sent_buckets = []
        self.byte_kinds = list[str]()

    def finish(self, weight: float, loss: float) -> None:
        sums = self._share_used_names(
            [weight, loss, float(self.stop_requested), self.doubtful_weight]
        )
        self.totals = [self.fault_factor * sums[0], self.fault_factor * sums[1], *sums[2:]]

    def _share_used_names(self, numbers: Sequence[float] = ()) -> list[float]:
        """Which parameters have a gradient on any rank; the sums of other numbers of theirs in
        the same message.
        """
        there = [float(each.grad is not None) for each in self.trained.values()]
        device = next(iter(self.trained.values())).device if self.trained else None
        with self.log.record_detail("told", "wait"):
            sums = self._start_counted_sum(
                torch.tensor([*numbers, *there], dtype=torch.float64, device=device), TOTALS
            )().tolist()
        self.used_names = {
            name for name, number in zip(self.trained, sums[len(numbers) :], strict=True) if number
        }
        return sums[: len(numbers)]  # type: ignore[no-any-return]

    def reduce_totals(self) -> list[float]:
        return self.totals

    def average(self, weight: float) -> None:
        """By every rank's part of it, compressed."""
        self.compression.replace_compressor(self.compressor.adapt_to_epoch(self.epoch))
        scale = self._compute_scale(1.0 / weight)
        if self.layout.is_partitioned:  # owners have added up theirs since
            self._share_used_names()
        shared = self.copies.list_duplicate_names()
        copies = dict[str, Tensor]()
        for means in self._compute_means(scale):
            copies |= {name: means.pop(name) for name in means.keys() & shared}
            self._set_gradients(means)
        self.copies.synchronize_copies(
            {name: reshape_like(each, self.trained[name]) for name, each in copies.items()}
        )
        self._set_gradients(copies)
        self.peak_bytes = max(self.peak_bytes, self.compression.feedback.nbytes)
        self.step += 1

    def _compute_means(self, scale: float) -> Iterator[dict[str, Tensor]]:
        """Of all ranks, flat, as they come."""
        small = self._start_small_sums(scale)
        for bucket in [
            self.compression.begin(self._select_gradients(bucket), scale, self.step)
            for bucket in self.buckets
        ]:
            yield self.compression.finish(bucket)
        yield small()

    def _compute_scale(self, scale: float) -> float:
        """By what this rank's sums count, in the mean."""
        return scale

    def _select_gradients(self, names: list[str]) -> dict[str, Tensor]:
        """Of those of which some rank has one."""
        return {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name in names
            if name in self.used_names
            for each in [self.trained[name]]
        }

    def _start_small_sums(self, scale: float) -> Callable[[], dict[str, Tensor]]:
        """The sums of what is sent as it is, begun; waits for them."""
        gradients = self._select_gradients(
            [name for name in reversed(self.trained) if name in self.small_names]
        )
        parts = {name: flatten_real(each) * scale for name, each in gradients.items()}
        for name in [*parts.keys() & self.small_residuals.keys()]:
            parts[name] += self.small_residuals.pop(name)
        buckets = split_into_buckets(parts.values())
        waits = [self._start_counted_sum(torch.cat(bucket), DENSE_BYTES) for bucket in buckets]

        def waited() -> dict[str, Tensor]:
            found = [
                piece
                for bucket, wait in zip(buckets, waits, strict=True)
                for piece in wait().split([each.numel() for each in bucket])
            ]
            return dict(zip(gradients, found, strict=True))

        return waited

    def _set_gradients(self, means: dict[str, Tensor]) -> None:
        for name, mean in means.items():
            self.trained[name].grad = reshape_and_cast_like(mean, self.trained[name])

    def _start_counted_sum(self, vector: Tensor, kind: str) -> Callable[[], Tensor]:
        """The same as bytes of a kind."""
        self.byte_kinds.append(kind)
        return self._start_sum(vector)

    def _record_bucket(self, bucket: Bucket, start: float, traffic: Traffic) -> None:
        self.kind = self.byte_kinds[bucket.number]
        super()._record_bucket(bucket, start, traffic)

    # ---- what is kept ------------------------------------------------------------------------
    def _restore_feedback(self, restored: OptimizerState) -> None:
        """What was not sent, of any number of ranks."""
        feedback = self.compression.feedback
        rank = self.world.rank
        size = self.world.size
        ours = {
            key
            for values in restored.values()
            for key in values
            if key.rpartition(" of ")[0] in feedback.saved_names
        }
        self.saved_names = (
            CODEC_MEMORY,
            *{
                make_residual_key(what, each)
                for what in feedback.saved_names
                for each in range(size)
            }
            | ours,
        )
        self.compression.memories = {
            name: values[CODEC_MEMORY]
            for name, values in restored.items()
            if CODEC_MEMORY in values
        }
        # of small tensors, which were not small where it was kept
        self.small_residuals: dict[str, Tensor] = {}
        for what, values in feedback.collect_residuals().items():
            for name, each in self.trained.items():
                if (found := load_residual(restored, name, what, rank, size)) is not None:
                    if name not in self.small_names:
                        values[name] = flatten_real(found).to(
                            each.device, get_accumulation_dtype(flatten_real(each.detach()).dtype)
                        )
                    elif what == RESIDUAL:
                        self.small_residuals[name] = flatten_real(found).to(
                            flatten_real(each.detach())
                        )

    def collect_saved_tensors(self) -> OptimizerState:
        """Of every rank."""
        own = {
            what: {name: copy_to_host(each) for name, each in values.items()}
            for what, values in self._collect_own_state().items()
        }
        if self.world.rank:
            self.count_bytes(
                CHECKPOINT_TRAFFIC,
                sum(each.nbytes for values in own.values() for each in values.values()),
                computed=True,
            )
        found: OptimizerState = {}
        for rank, theirs in enumerate(self.world.gather_objects(own)):
            for what, values in theirs.items():
                for name, each in values.items():
                    found.setdefault(name, {})[make_residual_key(what, rank)] = each.view(
                        self._get_real_shape(name)
                    )
        made = {
            name: codec.memory
            for name, codec in self.compression.codecs.items()
            if codec.memory is not None
        }
        for name, memory in {**self.compression.memories, **made}.items():
            if not self._is_tensor_shard(name):
                found.setdefault(name, {})[CODEC_MEMORY] = memory
        return found

    def _collect_own_state(self) -> dict[str, dict[str, Tensor]]:
        """Of this rank, also what no gradient has come to since it was restored."""
        found = self.compression.feedback.collect_residuals()
        return {**found, RESIDUAL: {**found.get(RESIDUAL, {}), **self.small_residuals}}

    def _is_tensor_shard(self, name: str) -> bool:
        """Is it a piece of a tensor, of which a checkpoint has the whole?"""
        return name in self.layout.specs and self.layout.specs[name].where is not None

    def _get_real_shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter in real numbers."""
        parameter = self.trained[name]
        return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
