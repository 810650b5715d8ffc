"""Trainer: one rank's model, and the step that reads like the sentence

    batch -> loss -> gradients -> exchange -> update
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.data_parallel.all_reduce import Exchange, computed_bytes
from paragrad.data_parallel.batch_norm import Part, batch_norms, make_own, make_whole
from paragrad.dropout import Keyed
from paragrad.errors import StepFailed
from paragrad.job import Job, fetched, opened, seed_everything
from paragrad.loss import Summed
from paragrad.probe import first_not_finite, probed
from paragrad.record import Line, Recorder
from paragrad.schedules.actions import evenly
from paragrad.shares import micro_batches
from paragrad.strategy import Data, Strategy, share_weights
from paragrad.world import World


@dataclass(frozen=True)
class Result:
    """A step's outcome on this rank: the sum of its losses and their weight; the global weight."""
    loss: float
    weight: float
    global_weight: float


class Alone:
    """The exchange of a world of one: nothing."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.sent, self.largest = module, dict[str, Any](), 0

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Trainer:
    """One rank of a resolved strategy. `record`: where steps and spans go, or None.

    like: compute what one worker must to be compared with that strategy (the union of all ranks' parts, micro-batch by
    micro-batch); reverse: each micro-batch in reverse order (the rounding twin).
    """

    def __init__(self, world: World, job: Job, strategy: Strategy, data: Path | None = None, *,
                 record: Recorder | None = None, overlap: bool = True, like: Strategy | None = None,
                 reverse: bool = False) -> None:
        self.world, self.job, self.strategy, self.recorder, self.overlap = world, job, strategy, record, overlap
        self.reverse = reverse
        self.shares, self.micro, self.parts = _split(world, like or strategy, everything=like is not None)
        self.train = opened(job.train, data)
        self.test = None if job.test is None else opened(job.test, data)
        self.order = job.order(len(self.train))
        self.model = job.built_model()
        self.parameters = dict(self.model.named_parameters())
        self.module = Summed(self.model, job.built_loss())
        self.optimizer = job.optimizer(self.model.parameters())
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        self.part = Part()
        self.exchange: Alone | Exchange | None = None
        self.spans: list[Line] = []
        self.steps = 0
        self.activations = 0
        self.has_dropout = False
        if world.size > 1 and batch_norms(self.model):
            self._join_batch_norms(strategy)
        seed_everything(job.seed + 1 + world.rank)          # what is drawn from here on differs by rank

    def _join_batch_norms(self, strategy: Strategy) -> None:
        assert isinstance(strategy, Data)
        if strategy.batch_norm == "share":
            make_own(self.model, self.part)
        else:
            make_whole(self.model, self.world.twin(), self.part, self._count_batch_norm)

    def _count_batch_norm(self, payload: int) -> None:
        if isinstance(self.exchange, Exchange):
            self.exchange.count("batch_norm", computed_bytes("all_gather", payload, self.world.size), computed=True)

    # ---- the step ------------------------------------------------------------------------------------------------
    def step(self, epoch: int, batch: range) -> Result:
        """Train on one global batch, given as positions in the epoch's order. Raises StepFailed with step and tensor."""
        start = self.now()
        try:
            pieces = micro_batches(batch, self.shares, self.micro)          # [micro][rank] -> positions
            if self.exchange is None:
                self.exchange = self._prepared(epoch, batch, pieces[0])
            self.optimizer.zero_grad()
            self.module.counter.grad = None
            loss, weight = 0.0, 0.0
            for number, piece in enumerate(pieces):
                more = self._forward_backward(epoch, batch, piece, number, last=number == len(pieces) - 1)
                loss, weight = loss + more[0], weight + more[1]
            self.exchange.finish()
            global_weight = self._update()
        except Exception as error:
            raise self._failed(error) from error
        mine = [position for piece in pieces for position in self._positions(piece)]
        self._record(epoch, start, loss, weight, mine)
        self.steps += 1
        return Result(loss, weight, global_weight)

    def _forward_backward(self, epoch: int, batch: range, piece: list[range], number: int, last: bool) -> tuple[float, float]:
        with self.span(f"load {number}", "data"):
            inputs, target, samples = self._load(epoch, batch, piece)
        assert self.exchange is not None
        self.part.samples = samples
        with self.exchange.micro_batch(last):
            with self.span(f"F{number}", "compute"), self._dropout(batch, piece):
                total, weight = self.exchange.module(inputs, target, samples)
            value = float(total.detach())
            if not math.isfinite(value):
                raise StepFailed("the loss is not finite", tensor=first_not_finite(self.model, inputs, target))
            with self.span(f"B{number}", "compute"):
                total.backward()
        return value, weight

    def _update(self) -> float:
        """The one division by the global weight, then clipping, the optimizer and the scheduler: as serial."""
        with self.span("update", "update"):
            assert self.module.counter.grad is not None
            weight = float(self.module.counter.grad)
            if weight == 0:
                raise StepFailed("no sample of this batch counts: its weight is 0")
            gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
            torch._foreach_div_(gradients, weight)
            if self.job.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.parameters.values(), self.job.clip_norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return weight

    def _dropout(self, batch: range, piece: list[range]) -> contextlib.AbstractContextManager[Any]:
        """Around a forward: masks keyed by each sample's place in the global batch, if the model has dropout at all."""
        if not self.has_dropout:
            return contextlib.nullcontext()
        return Keyed(self.job.seed, self.steps, [position - batch.start for position in self._positions(piece)])

    def _positions(self, piece: list[range]) -> list[int]:
        """The places in the epoch's order of the samples of a micro-batch that this rank runs."""
        positions = list(chain(*(piece[rank] for rank in self.parts)))
        return positions[::-1] if self.reverse else positions

    def _load(self, epoch: int, batch: range, piece: list[range]) -> tuple[Any, Any, int]:
        """This rank's part of a micro-batch: inputs, target, number of samples; one sample and 0 where it is empty."""
        positions = self._positions(piece)
        order = self.order.indices(epoch, batch)
        indices = [order[position - batch.start] for position in positions] or order[:1]
        inputs, target = fetched(self.train, indices, self.job.dtype)
        return inputs, target, len(positions)

    # ---- what others look at -------------------------------------------------------------------------------------------
    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter as the last update used it (mean, clipped)."""
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """Parameters, and buffers unless the strategy lets them differ by rank."""
        buffers = dict(self.model.named_buffers()) if self.strategy.exact else {}
        return {**{name: parameter.detach() for name, parameter in self.parameters.items()}, **buffers}

    # ---- before the first step ---------------------------------------------------------------------------------------
    def _prepared(self, epoch: int, batch: range, piece: list[range]) -> Alone | Exchange:
        """Look at one backward of a copy: which parameters go unused, and the bytes of activations. Then wire up."""
        inputs, target, samples = self._load(epoch, batch, piece)
        self.part.samples = samples
        found = probed(self.module, inputs, target, samples)
        self.activations, self.has_dropout = found.activations, found.dropout
        if found.other_draws and self.world.size > 1 and self.recorder:
            self.recorder.write("choice", what="random", bytes=None, picked="by rank", because=(
                f"{', '.join(found.other_draws)} draw(s) by the layout: not the numbers of serial"))
        if self.world.size == 1:
            return Alone(self.module)
        some_unused = bool(self.world.all_reduced(torch.tensor([float(found.some_unused)]), "MAX"))
        assert isinstance(self.strategy, Data)
        return Exchange(self.module, self.world, self.strategy.reduce, some_unused=some_unused, overlap=self.overlap,
                        clock=self.now, span=self.add_span)

    # ---- evaluation ----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def evaluate(self) -> dict[str, float] | None:
        """The metric over the test set (or, without a metric, the loss), every sample once, over all ranks."""
        if self.test is None:
            return None
        self.model.eval()
        total, weight = 0.0, 0.0
        mine = evenly(len(self.test), self.world.size)[self.world.rank]
        for start in range(mine.start, mine.stop, 256):
            indices = list(range(start, min(start + 256, mine.stop)))
            inputs, target = fetched(self.test, indices, self.job.dtype)
            output = self.model(inputs)
            pair = self.job.metric(output, target) if self.job.metric else self.module.pair(output, target, len(indices))
            total, weight = total + float(pair[0]), weight + float(pair[1])
        self.model.train()
        sums = self.world.all_reduced(torch.tensor([total, weight], dtype=torch.float64))
        return {"value": float(sums[0] / sums[1]), "weight": float(sums[1])}

    # ---- record --------------------------------------------------------------------------------------------------------
    def now(self) -> float:
        return self.recorder.now() if self.recorder else 0.0

    @contextlib.contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        start = self.now()
        yield
        self.add_span(name, lane, start)

    def add_span(self, name: str, lane: str, start: float, bytes: int | None = None) -> None:
        if self.recorder:
            self.spans.append({"kind": "span", "step": self.steps, "name": name, "lane": lane, "start": round(start, 6),
                               "seconds": round(self.now() - start, 6), "bytes": bytes, "peer": None})

    def _record(self, epoch: int, start: float, loss: float, weight: float, mine: list[int]) -> None:
        if not self.recorder:
            return
        assert self.exchange is not None
        spans, self.spans = self.spans, []
        line = {"kind": "step", "epoch": epoch, "step": self.steps, "start": round(start, 6),
                "seconds": round(self.now() - start, 6), "loss": [loss, weight],
                "order": [mine[0], mine[-1] + 1] if mine else [0, 0], "sent": dict(self.exchange.sent),
                "lr": self.optimizer.param_groups[0]["lr"]}
        self.recorder.write_all([*spans, line])

    def record_memory(self) -> None:
        """Bytes that this rank holds."""
        if not self.recorder:
            return
        state = [value for group in self.optimizer.state.values() for value in group.values() if isinstance(value, Tensor)]
        self.recorder.write(
            "memory", parameters=_bytes(self.parameters.values()), optimizer=_bytes(state),
            gradients=_bytes(each for each in self.parameters.values() if each.requires_grad),
            activations=self.activations, exchange=self.exchange.largest if self.exchange else 0,
            resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    # ---- failure -------------------------------------------------------------------------------------------------------
    def _failed(self, error: Exception) -> StepFailed:
        message = str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
        return StepFailed(message, step=self.steps, tensor=getattr(error, "tensor", None))

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.close()


def _split(world: World, strategy: Strategy, everything: bool) -> tuple[list[int], int, list[int]]:
    """(shares of the ranks, micro-batches, whose parts this rank runs)."""
    weights, micro = share_weights(strategy)
    return weights, micro, list(range(len(weights))) if everything else [world.rank]


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
