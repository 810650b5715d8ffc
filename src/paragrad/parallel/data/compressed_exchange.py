"""Gradients are compressed before they are exchanged.

Each rank compresses its part of the *mean* gradient: its sum, divided by the weight of the samples
of all ranks. The ranks share these weights first. If sums were compressed, the residual of a full
batch would count too much in a shorter batch (a third more, for example). So compression starts
after the forward passes, when the weights are known. All of it happens after backward, in
`average`, which also does the one division by the weight.

Each tensor is compressed by itself, and its residual is stored under its name. So only the rounding
of its sum depends on which tensors travel together. In a partitioned model, the copies of a
tensor are made equal (`engine/tensor_copies.py`) before they are used.

Payloads that can be added travel along the all-reduce. Other payloads are gathered on every rank,
and every rank adds them in the order of ranks, so all ranks apply the same bits. If that would take
more bytes than the dense vectors, the decompressed payloads travel as dense vectors. Weight, loss,
stop requests and small tensors are never compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paragrad.engine.exchange import CHECKPOINT_TRAFFIC, ExchangeOptions, Replica
from paragrad.engine.layout import OptimizerState, copy_to_host
from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.engine.tensor_copies import TensorCopies
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

CODEC_MEMORY = "memory"  # name of codec memories in a checkpoint
# kind of the bytes of weight, loss, stop requests and flags of used parameters
TOTALS = "totals"


class CompressedExchange(VectorSumExchange):
    """Gives every rank all mean gradients after `average`, as far as they were sent.

    Args:
        strategy: The resolved strategy, with a compressor.

        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

        feedback: Error feedback of the compression. None: that of the compressor.

    Attributes:
        compressor: The compressor as the strategy names it.

        step: Number of the step.

        fault_factor: The number of ranks if the fault mean_twice is injected, otherwise 1.

        trained: The trained parameters by name.

        compression: Compresses and sums the large tensors.

        small_names: Names of parameters that are sent as they are.

        copies: Tensors of a partitioned model that several ranks hold.

        buckets: Names of the large parameters of each bucket, the last parameters first.

        byte_kinds: For each sent bucket of this step, the kind under which its bytes are counted.

        totals: Weight, loss, stop requests and doubtful weight, summed over ranks.

        used_names: Names of parameters that have a gradient on some rank in this step.

        small_residuals: Restored residuals of tensors that are small now.
    """

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
        # an injected fault
        self.fault_factor = world.size if options.inject_fault == "mean_twice" else 1
        self.trained = {
            name: each
            for name, each in self.loss_module.model.named_parameters()
            if each.requires_grad
        }
        serial_names = {
            name: str((spec.name, spec.where)) for name, spec in self.layout.specs.items()
        }
        self.compression = CompressedReduce(
            strategy.compress,
            world,
            self._start_counted_sum,
            feedback=feedback,
            seed=replica.seed,
            log=log,
            count_bytes=lambda kind, sent: self.count_bytes(kind, sent, computed=True),
            get_serial_name=lambda name: serial_names.get(name, name),
        )
        large = [
            name for name, each in self.trained.items() if strategy.compress.compresses(each.shape)
        ][::-1]
        self.small_names = set(self.trained) - set(large)
        names = {each: name for name, each in self.trained.items()}
        self.copies = TensorCopies(self.layout, self.loss_module.model)
        self.buckets = [
            [names[each] for each in bucket]
            for bucket in split_into_buckets(self.trained[name] for name in large)
        ]
        self._restore_feedback(replica.restored_tensors)

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.refuse_refrozen()
        self.sent_buckets = []
        self.byte_kinds = list[str]()

    def finish(self, weight: float, loss: float) -> None:
        sums = self._share_used_names(
            [weight, loss, float(self.stop_requested), self.doubtful_weight]
        )
        self.totals = [self.fault_factor * sums[0], self.fault_factor * sums[1], *sums[2:]]

    def _share_used_names(self, numbers: Sequence[float] = ()) -> list[float]:
        """Find out which parameters have a gradient on any rank. Collective.

        Other numbers of the ranks travel in the same message; their sums are returned.
        """
        used_flags = [float(each.grad is not None) for each in self.trained.values()]
        device = next(iter(self.trained.values())).device if self.trained else None
        with self.log.record_detail("wait for totals", "wait"):
            sums = self._start_counted_sum(
                torch.tensor([*numbers, *used_flags], dtype=torch.float64, device=device), TOTALS
            )().tolist()
        self.used_names = {
            name for name, number in zip(self.trained, sums[len(numbers) :], strict=True) if number
        }
        return sums[: len(numbers)]  # type: ignore[no-any-return]

    def reduce_totals(self) -> list[float]:
        return self.totals

    def average(self, weight: float) -> None:
        """Compute the mean gradients from the compressed parts of all ranks.

        Args:
            weight: The weight of the samples of all ranks.
        """
        self.compression.replace_compressor(self.compressor.adapt_to_epoch(self.epoch))
        scale = self._compute_scale(1.0 / weight)
        # since `finish`, owners have added the gradients of their copies
        if self.layout.is_partitioned:
            self._share_used_names()
        shared = self.copies.list_copied_names()
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
        """Yield the mean gradients over all ranks, as flat tensors by name, as they arrive."""
        small = self._start_small_sums(scale)
        for bucket in [
            self.compression.begin(self._select_gradients(bucket), scale, self.step)
            for bucket in self.buckets
        ]:
            yield self.compression.finish(bucket)
        yield small()

    def _compute_scale(self, scale: float) -> float:
        """Return the factor by which the sums of this rank count in the mean."""
        return scale

    def _select_gradients(self, names: list[str]) -> dict[str, Tensor]:
        """Return the gradients of those parameters that have one on some rank."""
        return {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name in names
            if name in self.used_names
            for each in [self.trained[name]]
        }

    def _start_small_sums(self, scale: float) -> Callable[[], dict[str, Tensor]]:
        """Start the sums of the uncompressed gradients; return a function that waits for them."""
        gradients = self._select_gradients(
            [name for name in reversed(self.trained) if name in self.small_names]
        )
        parts = {name: flatten_real(each) * scale for name, each in gradients.items()}
        for name in [*parts.keys() & self.small_residuals.keys()]:
            parts[name] += self.small_residuals.pop(name)
        buckets = split_into_buckets(parts.values())
        waits = [self._start_counted_sum(torch.cat(bucket), DENSE_BYTES) for bucket in buckets]

        def wait_for_sums() -> dict[str, Tensor]:
            sums = [
                piece
                for bucket, wait in zip(buckets, waits, strict=True)
                for piece in wait().split([each.numel() for each in bucket])
            ]
            return dict(zip(gradients, sums, strict=True))

        return wait_for_sums

    def _set_gradients(self, means: dict[str, Tensor]) -> None:
        for name, mean in means.items():
            self.trained[name].grad = reshape_and_cast_like(mean, self.trained[name])

    def _start_counted_sum(self, vector: Tensor, kind: str) -> Callable[[], Tensor]:
        """Start a sum and count its bytes under a kind."""
        self.byte_kinds.append(kind)
        return self._start_sum(vector)

    def _record_bucket(self, bucket: Bucket, start: float, traffic: Traffic) -> None:
        self.kind = self.byte_kinds[bucket.number]
        super()._record_bucket(bucket, start, traffic)

    # ---- checkpoints -------------------------------------------------------------------------
    def _restore_feedback(self, restored: OptimizerState) -> None:
        """Load residuals from a checkpoint of any number of ranks."""
        feedback = self.compression.feedback
        rank = self.world.rank
        size = self.world.size
        restored_keys = {
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
            | restored_keys,
        )
        self.compression.memories = {
            name: values[CODEC_MEMORY]
            for name, values in restored.items()
            if CODEC_MEMORY in values
        }
        # residuals of tensors that are small now, but were not small when the checkpoint was saved
        self.small_residuals: dict[str, Tensor] = {}
        for what, values in feedback.collect_residuals().items():
            for name, each in self.trained.items():
                if (residual := load_residual(restored, name, what, rank, size)) is not None:
                    if name not in self.small_names:
                        values[name] = flatten_real(residual).to(
                            each.device, get_accumulation_dtype(flatten_real(each.detach()).dtype)
                        )
                    elif what == RESIDUAL:
                        self.small_residuals[name] = flatten_real(residual).to(
                            flatten_real(each.detach())
                        )

    def collect_saved_tensors(self) -> OptimizerState:
        """Return the residuals of every rank and the memories of codecs.

        Collective: all ranks call it together.

        Returns:
            Tensors by parameter name and key. Residuals have the shape of the parameter in real
            numbers.
        """
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
        saved: OptimizerState = {}
        for rank, residuals in enumerate(self.world.gather_objects(own)):
            for what, values in residuals.items():
                for name, each in values.items():
                    saved.setdefault(name, {})[make_residual_key(what, rank)] = each.view(
                        self._get_real_shape(name)
                    )
        memories = {
            name: codec.memory
            for name, codec in self.compression.codecs.items()
            if codec.memory is not None
        }
        for name, memory in {**self.compression.memories, **memories}.items():
            if not self._is_tensor_shard(name):
                saved.setdefault(name, {})[CODEC_MEMORY] = memory
        return saved

    def _collect_own_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the residuals of this rank.

        They include restored residuals of small tensors that no gradient was added to yet.
        """
        residuals = self.compression.feedback.collect_residuals()
        return {**residuals, RESIDUAL: {**residuals.get(RESIDUAL, {}), **self.small_residuals}}

    def _is_tensor_shard(self, name: str) -> bool:
        """Return whether a name belongs to a shard of a tensor that a checkpoint holds whole."""
        return name in self.layout.specs and self.layout.specs[name].where is not None

    def _get_real_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter in real numbers."""
        parameter = self.trained[name]
        return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
