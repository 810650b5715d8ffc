"""The passes: forward and backward of one rank's micro-batches, in an order of their own. A
trainer has exactly one.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.utils._pytree import tree_map_only

from paragrad.datasets.loading import called, tensors_of
from paragrad.engine.activation_meter import Alive
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import Exchange
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.probe import first_not_finite
from paragrad.engine.rng.draws import Calls, Draws, in_test
from paragrad.engine.unwrap import WrappedTensor, unwrap
from paragrad.errors import StepFailed
from paragrad.jobs.loss import Summed
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.shares import Micro

# steps of a training in which activations are counted: some microseconds for each that is kept
COUNTED = 2


class Sums(NamedTuple):
    """This rank's own sums over its micro-batches. scale: what gradients were multiplied by
    already.
    """

    loss: float = 0.0
    weight: float = 0.0
    scale: float = 1.0


class Within(Protocol):
    """What a trainer offers to its passes. casting: autocast, if any;  keyed: draws by a
    sample's place in the global batch (first, calls: as draws.Keyed has them);  draws: all of
    them;  noise: over backwards;  rehearsing: the step is put back when it was compared.
    """

    world: World
    module: Summed
    batch_norm: BatchNorm
    draws: Draws
    seed: int
    log: Log
    noise: GradientNorms
    rehearsing: bool

    def casting(self) -> AbstractContextManager[Any]: ...

    def keyed(
        self, micro: Micro, first: int = 0, calls: Calls | None = None
    ) -> AbstractContextManager[Any]: ...


class Passes(ABC):
    """From a batch to gradients: all forwards and backwards of a step, between `begin` and
    `finish` of the exchange.

    alive: counts what is kept for backwards, in the steps in which that is counted;  most:
    bytes at once, in those so far; forward, on_core: seconds in whole forwards, by the clock
    without waits for others, and by the core; in all.
    """

    alive: Alive | None = None
    most = 0
    forward = 0.0
    on_core = 0.0

    def __init__(self, within: Within, exchange: Exchange) -> None:
        self.within = within
        self.exchange = exchange

    @abstractmethod
    def gradients(self, micros: Iterable[tuple[Micro, Any, Any]], count: int) -> Sums:
        """Of `count` micro-batches (micro, inputs, target); sums are of this rank's own losses,
        zeros where it has none. Raises StepFailed with the tensor.
        """

    def output(self, inputs: Any) -> Any:
        """Of the model in eval mode; None where it is on other ranks. Collective of those that
        hold one replica.
        """
        return tree_map_only(WrappedTensor, unwrap, called(self.within.module.model, inputs))

    def close(self) -> None:  # noqa: B027         # most hold nothing
        """The training has ended: let go of what the passes hold of the model."""

    def changed(self) -> None:  # noqa: B027         # most conclude nothing
        """Python attributes of the model were set by its user: what was concluded from them is
        to be found out again.
        """

    def numbers(self) -> dict[tuple[str, str], Any]:
        """Numbers that the model's Python keeps alike on all ranks, by who has them and the
        attribute.
        """
        return {}

    in_flight = 1  # batches that `outputs` may be given at once

    def outputs(self, batches: list[Any], places: list[list[int]]) -> list[Any]:
        """The same of several batches of inputs. places: of each batch's samples, in the
        dataset.
        """
        found = []
        for inputs, own in zip(batches, places, strict=True):
            with in_test(self.within.draws, self.within.seed, own):
                found.append(self.output(inputs))
        return found


@contextlib.contextmanager
def counting(passes: Passes, model: nn.Module | None) -> Iterator[None]:
    """Around a step in which what is kept is counted, the tensors of the model left out; None:
    in this one it is not.
    """
    if model is None:
        yield
        return
    passes.alive = Alive([*model.parameters(), *model.buffers()])
    alive = passes.alive
    try:
        yield
    finally:
        passes.alive, passes.most = None, max(passes.most, alive.most)


def sums_of(passes: Passes, micros: Iterator[tuple[Micro, Any, Any]], count: int) -> Sums:
    """What passes, anybody's, make of a step."""
    own = passes.gradients(micros, count)
    if not isinstance(own, Sums):
        raise StepFailed(
            f"gradients() of {type(passes).__name__} gives a {type(own).__name__}; give "
            f"paragrad.Sums(loss, "
            "weight)"
        )
    if next(micros, None) is not None:
        raise StepFailed(
            f"gradients() of {type(passes).__name__} leaves out some of the {count} micro-batches "
            f"of this step; "
            "take all"
        )
    if not math.isfinite(own.loss):
        raise StepFailed("the loss is not finite", tensor="loss")
    return own


class OneByOne(Passes):
    """A forward and a backward of each micro-batch in turn, as one worker makes them."""

    def gradients(self, micros: Iterable[tuple[Micro, Any, Any]], count: int) -> Sums:
        own = Sums()
        for number, (micro, inputs, target) in enumerate(micros):
            more = self._forward_backward(micro, inputs, target, number, count)
            own = Sums(own.loss + more.loss, own.weight + more.weight, more.scale)
        return own

    def _forward_backward(
        self, micro: Micro, inputs: Any, target: Any, number: int, count: int
    ) -> Sums:
        within, exchange, summed = self.within, self.exchange, self.within.module
        samples = len(micro.positions)
        within.batch_norm.samples = samples
        last = number == count - 1
        with exchange.micro_batch(last), within.keyed(micro), within.batch_norm:
            begun = time.perf_counter()
            on_core = time.thread_time()
            waited = within.batch_norm.waited
            with (
                within.log.span(f"F{number}", "compute"),
                within.casting(),
                self.noted(inputs, target),
            ):
                total, weight = exchange.module(inputs, target, samples)
            value = float(total.detach())
            self.forward += time.perf_counter() - begun - (within.batch_norm.waited - waited)
            self.on_core += time.thread_time() - on_core
            if not math.isfinite(value):
                with within.batch_norm.looking():
                    raise StepFailed(
                        "the loss is not finite",
                        tensor="loss"
                        if exchange.shards is not None
                        # which is a forward of one rank
                        else first_not_finite(summed.model, inputs, target),
                    )
            # what is not linear in a gradient (a hook that clips) sees on one worker that of
            # the mean, as without this library
            alone = count == 1 and (within.world.size == 1 or exchange.apart)
            scale = 1.0 / weight if alone and weight and not summed.linear else 1.0
            with (
                within.log.span(f"B{number}", "compute"),
                within.noise.over(number, weight * scale),
            ):
                total.backward(None if scale == 1.0 else total.new_tensor(scale))
        return Sums(value, weight, scale)

    def noted(self, *batch: Any) -> AbstractContextManager[Any]:
        """Around the forward of a batch."""
        if self.alive is None:
            return contextlib.nullcontext()
        self.alive.beside(tensors_of(list(batch)))
        return self.alive.noting()
