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

from paragrad.datasets.loading import call_model, list_batch_tensors
from paragrad.engine.activation_meter import ActivationMeter
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import Exchange
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.probe import find_nonfinite_tensor
from paragrad.engine.rng.draws import CallNumbers, Draws, key_test_draws
from paragrad.engine.unwrap import WrappedTensor, unwrap
from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.shares import MicroBatch

# steps of a training in which activations are counted: some microseconds for each that is kept
COUNTED_STEPS = 2


class LossSums(NamedTuple):
    """This rank's own sums over its micro-batches. scale: what gradients were multiplied by
    already.
    """

    loss: float = 0.0
    weight: float = 0.0
    scale: float = 1.0


class PassesHost(Protocol):
    """What a trainer offers to its passes. casting: autocast, if any;  keyed: draws by a
    sample's place in the global batch (first, calls: as draws.Keyed has them);  draws: all of
    them;  noise: over backwards;  rehearsing: the step is put back when it was compared.
    """

    world: World
    module: LossModule
    batch_norm: BatchNorm
    draws: Draws
    seed: int
    log: StepLog
    noise: GradientNorms
    rehearsing: bool

    def use_autocast(self) -> AbstractContextManager[Any]: ...

    def key_draws(
        self, micro: MicroBatch, first_call: int = 0, call_numbers: CallNumbers | None = None
    ) -> AbstractContextManager[Any]: ...


class Passes(ABC):
    """From a batch to gradients: all forwards and backwards of a step, between `begin` and
    `finish` of the exchange.

    alive: counts what is kept for backwards, in the steps in which that is counted;  most:
    bytes at once, in those so far; forward, on_core: seconds in whole forwards, by the clock
    without waits for others, and by the core; in all.
    """

    activation_meter: ActivationMeter | None = None
    peak_bytes = 0
    forward_seconds = 0.0
    forward_cpu_seconds = 0.0

    def __init__(self, host: PassesHost, exchange: Exchange) -> None:
        self.host = host
        self.exchange = exchange

    @abstractmethod
    def compute_gradients(
        self, micros: Iterable[tuple[MicroBatch, Any, Any]], count: int
    ) -> LossSums:
        """Of `count` micro-batches (micro, inputs, target); sums are of this rank's own losses,
        zeros where it has none. Raises StepFailed with the tensor.
        """

    def compute_output(self, inputs: Any) -> Any:
        """Of the model in eval mode; None where it is on other ranks. Collective of those that
        hold one replica.
        """
        return tree_map_only(WrappedTensor, unwrap, call_model(self.host.module.model, inputs))

    def close(self) -> None:  # noqa: B027         # most hold nothing
        """The training has ended: let go of what the passes hold of the model."""

    def invalidate_plans(self) -> None:  # noqa: B027         # most conclude nothing
        """Python attributes of the model were set by its user: what was concluded from them is
        to be found out again.
        """

    def collect_python_numbers(self) -> dict[tuple[str, str], Any]:
        """Numbers that the model's Python keeps alike on all ranks, by who has them and the
        attribute.
        """
        return {}

    batches_in_flight = 1  # batches that `outputs` may be given at once

    def compute_outputs(self, batches: list[Any], places: list[list[int]]) -> list[Any]:
        """The same of several batches of inputs. places: of each batch's samples, in the
        dataset.
        """
        found = []
        for inputs, own in zip(batches, places, strict=True):
            with key_test_draws(self.host.draws, self.host.seed, own):
                found.append(self.compute_output(inputs))
        return found


@contextlib.contextmanager
def count_activations(passes: Passes, model: nn.Module | None) -> Iterator[None]:
    """Around a step in which what is kept is counted, the tensors of the model left out; None:
    in this one it is not.
    """
    if model is None:
        yield
        return
    passes.activation_meter = ActivationMeter([*model.parameters(), *model.buffers()])
    alive = passes.activation_meter
    try:
        yield
    finally:
        passes.activation_meter, passes.peak_bytes = None, max(passes.peak_bytes, alive.peak_bytes)


def run_passes(
    passes: Passes, micros: Iterator[tuple[MicroBatch, Any, Any]], count: int
) -> LossSums:
    """What passes, anybody's, make of a step."""
    own = passes.compute_gradients(micros, count)
    if not isinstance(own, LossSums):
        raise StepFailed(
            f"compute_gradients() of {type(passes).__name__} gives a {type(own).__name__}; give "
            f"paragrad.LossSums(loss, "
            "weight)"
        )
    if next(micros, None) is not None:
        raise StepFailed(
            f"compute_gradients() of {type(passes).__name__} leaves out some of the {count} "
            f"micro-batches "
            f"of this step; "
            "take all"
        )
    if not math.isfinite(own.loss):
        raise StepFailed("the loss is not finite", tensor="loss")
    return own


class SequentialPasses(Passes):
    """A forward and a backward of each micro-batch in turn, as one worker makes them."""

    def compute_gradients(
        self, micros: Iterable[tuple[MicroBatch, Any, Any]], count: int
    ) -> LossSums:
        own = LossSums()
        for number, (micro, inputs, target) in enumerate(micros):
            more = self._run_micro_batch(micro, inputs, target, number, count)
            own = LossSums(own.loss + more.loss, own.weight + more.weight, more.scale)
        return own

    def _run_micro_batch(
        self, micro: MicroBatch, inputs: Any, target: Any, number: int, count: int
    ) -> LossSums:
        within, exchange, summed = self.host, self.exchange, self.host.module
        samples = len(micro.positions)
        within.batch_norm.samples = samples
        last = number == count - 1
        with exchange.micro_batch(last), within.key_draws(micro), within.batch_norm:
            begun = time.perf_counter()
            on_core = time.thread_time()
            waited = within.batch_norm.waited_seconds
            with (
                within.log.record_span(f"F{number}", "compute"),
                within.use_autocast(),
                self.track_activations(inputs, target),
            ):
                total, weight = exchange.module(inputs, target, samples)
            value = float(total.detach())
            self.forward_seconds += (
                time.perf_counter() - begun - (within.batch_norm.waited_seconds - waited)
            )
            self.forward_cpu_seconds += time.thread_time() - on_core
            if not math.isfinite(value):
                with within.batch_norm.use_probe_mode():
                    raise StepFailed(
                        "the loss is not finite",
                        tensor="loss"
                        if exchange.shard_layout is not None
                        # which is a forward of one rank
                        else find_nonfinite_tensor(summed.model, inputs, target),
                    )
            # what is not linear in a gradient (a hook that clips) sees on one worker that of
            # the mean, as without this library
            alone = count == 1 and (within.world.size == 1 or exchange.steps_alone)
            scale = 1.0 / weight if alone and weight and not summed.is_linear else 1.0
            with (
                within.log.record_span(f"B{number}", "compute"),
                within.noise.measure_backward(number, weight * scale),
            ):
                total.backward(None if scale == 1.0 else total.new_tensor(scale))
        return LossSums(value, weight, scale)

    def track_activations(self, *batch: Any) -> AbstractContextManager[Any]:
        """Around the forward of a batch."""
        if self.activation_meter is None:
            return contextlib.nullcontext()
        self.activation_meter.exclude_tensors(list_batch_tensors(list(batch)))
        return self.activation_meter.count_saved_tensors()
