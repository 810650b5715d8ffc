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

from paragrad.engine.exchange import CHECKPOINTS, How, Replica
from paragrad.engine.layout import State, on_host
from paragrad.engine.replica_check import Copies
from paragrad.engine.state.values import wide
from paragrad.executors.transport import Traffic
from paragrad.parallel.compression.compressed_reduce import DENSE, Compression
from paragrad.parallel.compression.feedback import (
    RESIDUAL,
    Nothing,
    in_place,
    key_of,
    real,
    shaped,
    shared_out,
)
from paragrad.parallel.data.bucket_queue import Bucket
from paragrad.parallel.data.bucketing import Sending, buckets_of
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.data import Data

MEMORY = "memory"  # by which name a checkpoint has what codecs go on from
# bytes of weight, loss, the wish to stop, and which parameters have a gradient
TOLD = "told"


class Compressed(Sending):
    """Every rank has all mean gradients after `average`, as far as they were sent."""

    def __init__(
        self,
        strategy: Data,
        replica: Replica,
        world: World,
        log: Log,
        how: How,
        feedback: Nothing | None = None,
    ) -> None:
        super().__init__(replica, world, log, how, strategy.reduce)
        assert isinstance(strategy.compress, Compressor)
        self.compressor = strategy.compress
        log.choice(
            "overlap",
            "off",
            "gradients are compressed after backward, when the weight of all samples is known",
        )
        self.step = replica.steps
        self.twice = world.size if how.sabotage == "mean_twice" else 1  # planted
        self.trained = {
            name: each for name, each in self.summed.model.named_parameters() if each.requires_grad
        }
        known = {name: str((held.name, held.where)) for name, held in self.layout.held.items()}
        self.compression = Compression(
            strategy.compress,
            world,
            self._sum,
            feedback=feedback,
            seed=replica.seed,
            log=log,
            count=lambda kind, sent: self.count(kind, sent, computed=True),
            known=lambda name: known.get(name, name),
        )
        large = [
            name for name, each in self.trained.items() if strategy.compress.compresses(each.shape)
        ][::-1]
        self.small = set(self.trained) - set(large)
        names = {each: name for name, each in self.trained.items()}
        self.copies = Copies(self.layout, self.summed.model)
        self.buckets = [
            [names[each] for each in bucket]
            for bucket in buckets_of(self.trained[name] for name in large)
        ]
        self._restore(replica.restored)

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.refuse_refrozen()
        # of what is summed in this step, in the order of buckets
        self.sending = []
        self.kinds = list[str]()

    def finish(self, weight: float, loss: float) -> None:
        sums = self._know_used([weight, loss, float(self.stop), self.doubt])
        self.told = [self.twice * sums[0], self.twice * sums[1], *sums[2:]]

    def _know_used(self, numbers: Sequence[float] = ()) -> list[float]:
        """Which parameters have a gradient on any rank; the sums of other numbers of theirs in
        the same message.
        """
        there = [float(each.grad is not None) for each in self.trained.values()]
        device = next(iter(self.trained.values())).device if self.trained else None
        with self.log.detail("told", "wait"):
            sums = self._sum(
                torch.tensor([*numbers, *there], dtype=torch.float64, device=device), TOLD
            )().tolist()
        self.used = {
            name for name, number in zip(self.trained, sums[len(numbers) :], strict=True) if number
        }
        return sums[: len(numbers)]  # type: ignore[no-any-return]

    def counted(self) -> list[float]:
        return self.told

    def average(self, weight: float) -> None:
        """By every rank's part of it, compressed."""
        self.compression.become(self.compressor.in_epoch(self.epoch))
        scale = self._scaled(1.0 / weight)
        if self.layout.cut:  # owners have added up theirs since
            self._know_used()
        shared = self.copies.names()
        copies = dict[str, Tensor]()
        for means in self._means(scale):
            copies |= {name: means.pop(name) for name in means.keys() & shared}
            self._take(means)
        self.copies.alike(
            {name: in_place(each, self.trained[name]) for name, each in copies.items()}
        )
        self._take(copies)
        self.largest = max(self.largest, self.compression.feedback.nbytes)
        self.step += 1

    def _means(self, scale: float) -> Iterator[dict[str, Tensor]]:
        """Of all ranks, flat, as they come."""
        small = self._begun(scale)
        for bucket in [
            self.compression.begin(self._gradients(bucket), scale, self.step)
            for bucket in self.buckets
        ]:
            yield self.compression.finish(bucket)
        yield small()

    def _scaled(self, scale: float) -> float:
        """By what this rank's sums count, in the mean."""
        return scale

    def _gradients(self, names: list[str]) -> dict[str, Tensor]:
        """Of those of which some rank has one."""
        return {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name in names
            if name in self.used
            for each in [self.trained[name]]
        }

    def _begun(self, scale: float) -> Callable[[], dict[str, Tensor]]:
        """The sums of what is sent as it is, begun; waits for them."""
        gradients = self._gradients([name for name in reversed(self.trained) if name in self.small])
        parts = {name: real(each) * scale for name, each in gradients.items()}
        for name in [*parts.keys() & self.owed.keys()]:
            parts[name] += self.owed.pop(name)
        buckets = buckets_of(parts.values())
        waits = [self._sum(torch.cat(bucket), DENSE) for bucket in buckets]

        def waited() -> dict[str, Tensor]:
            found = [
                piece
                for bucket, wait in zip(buckets, waits, strict=True)
                for piece in wait().split([each.numel() for each in bucket])
            ]
            return dict(zip(gradients, found, strict=True))

        return waited

    def _take(self, means: dict[str, Tensor]) -> None:
        for name, mean in means.items():
            self.trained[name].grad = shaped(mean, self.trained[name])

    def _sum(self, vector: Tensor, kind: str) -> Callable[[], Tensor]:
        """The same as bytes of a kind."""
        self.kinds.append(kind)
        return self._send(vector)

    def _played(self, bucket: Bucket, start: float, traffic: Traffic) -> None:
        self.kind = self.kinds[bucket.number]
        super()._played(bucket, start, traffic)

    # ---- what is kept ------------------------------------------------------------------------
    def _restore(self, restored: State) -> None:
        """What was not sent, of any number of ranks."""
        feedback = self.compression.feedback
        rank = self.world.rank
        size = self.world.size
        ours = {
            key
            for values in restored.values()
            for key in values
            if key.rpartition(" of ")[0] in feedback.names
        }
        self.keeps = (
            MEMORY,
            *{key_of(what, each) for what in feedback.names for each in range(size)} | ours,
        )
        self.compression.memories = {
            name: values[MEMORY] for name, values in restored.items() if MEMORY in values
        }
        # of small tensors, which were not small where it was kept
        self.owed: dict[str, Tensor] = {}
        for what, values in feedback.kept().items():
            for name, each in self.trained.items():
                if (found := shared_out(restored, name, what, rank, size)) is not None:
                    if name not in self.small:
                        values[name] = real(found).to(each.device, wide(real(each.detach()).dtype))
                    elif what == RESIDUAL:
                        self.owed[name] = real(found).to(real(each.detach()))

    def kept(self) -> State:
        """Of every rank."""
        own = {
            what: {name: on_host(each) for name, each in values.items()}
            for what, values in self._own().items()
        }
        if self.world.rank:
            self.count(
                CHECKPOINTS,
                sum(each.nbytes for values in own.values() for each in values.values()),
                computed=True,
            )
        found: State = {}
        for rank, theirs in enumerate(self.world.collected(own)):
            for what, values in theirs.items():
                for name, each in values.items():
                    found.setdefault(name, {})[key_of(what, rank)] = each.view(self._shape(name))
        made = {
            name: codec.memory
            for name, codec in self.compression.codecs.items()
            if codec.memory is not None
        }
        for name, memory in {**self.compression.memories, **made}.items():
            if not self._divided(name):
                found.setdefault(name, {})[MEMORY] = memory
        return found

    def _own(self) -> dict[str, dict[str, Tensor]]:
        """Of this rank, also what no gradient has come to since it was restored."""
        found = self.compression.feedback.kept()
        return {**found, RESIDUAL: {**found.get(RESIDUAL, {}), **self.owed}}

    def _divided(self, name: str) -> bool:
        """Is it a piece of a tensor, of which a checkpoint has the whole?"""
        return name in self.layout.held and self.layout.held[name].where is not None

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter in real numbers."""
        parameter = self.trained[name]
        return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
