"""The passes: forward and backward of the micro-batches of one rank, in an order of the technique.

Gradient accumulation: the gradients of all micro-batches are added up before one update.

A trainer has exactly one `Passes` object.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paragrad.datasets.loading import list_batch_tensors
from paragrad.engine.activation_meter import ActivationMeter
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import NO_CONTEXT, Exchange, UnchangedParameters
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.model_shard import PassContext
from paragrad.engine.probe import find_nonfinite_tensor
from paragrad.engine.rng.draws import CallNumbers, Draws, key_test_draws
from paragrad.engine.unwrap import WrappedTensor, unwrap
from paragrad.errors import Refused, StepFailed
from paragrad.jobs.loss import LossModule, backpropagate_share, call_model, read_share
from paragrad.notation.choices import find_renamed_member
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.shares import MicroBatch

# activations are counted in so many steps: this costs some microseconds for each saved tensor
COUNTED_STEPS = 2
CHANGED_IN_BACKWARD = (
    "a backward changes it (an optimizer in a hook, perhaps), but its gradient is that of a "
    "part of the batch, or other ranks have the parameter too; change it in the optimizer's step, "
    "or train with serial"
)


class LossSums(NamedTuple):
    """Sums over the micro-batches of this rank.

    Attributes:
        loss: Sum of what backward ran on: of the shares in the mean loss.
        weight: Sum of the weights.
        divisor: As `LossModule.divisor` in the passes of the step. The training sets it.
        scale: As `LossModule.scale`, likewise.
    """

    loss: float = 0.0
    weight: float = 0.0
    divisor: float | None = None
    scale: float = 1.0

    @property
    def used_divisor(self) -> float:
        """By what the passes divided, the loss scale included."""
        return (self.divisor or self.weight or 1.0) / self.scale


class PassesHost(Protocol):
    """What a trainer offers to its passes.

    Attributes:
        log: The record of this rank.

        noise: Measures gradient norms around backward passes.

        rehearsing: The step will be undone after it was compared.
    """

    log: StepLog
    noise: GradientNorms
    rehearsing: bool

    @property
    def world(self) -> World:
        """All ranks of the training."""
        ...

    @property
    def watched_parameters(self) -> Mapping[str, Tensor]:
        """The parameters that no backward pass may change, by name."""
        ...

    @property
    def module(self) -> LossModule:
        """The model and the loss."""
        ...

    @property
    def batch_norm(self) -> BatchNorm:
        """The batch norm over all ranks."""
        ...

    @property
    def draws(self) -> Draws:
        """All random calls of a forward pass."""
        ...

    @property
    def seed(self) -> int:
        """The seed of the job."""
        ...

    def use_autocast(self) -> AbstractContextManager[Any]:
        """Return the context of autocast, if the job uses it."""
        ...

    def key_draws(
        self, micro: MicroBatch, first_call: int = 0, call_numbers: CallNumbers | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which draws depend on the place of each sample in the global batch.

        Args:
            micro: The micro-batch.
            first_call: As in `draws.KeyedDraws`.
            call_numbers: As in `draws.KeyedDraws`.
        """
        ...


# members that had another name until version 0.1, and the names that they have now
RENAMED_PASSES_MEMBERS = {
    "gradients": "compute_gradients",
    "output": "compute_output",
    "outputs": "compute_outputs",
    "changed": "invalidate_plans",
    "numbers": "collect_python_numbers",
    "in_flight": "batches_in_flight",
}


class Passes(ABC):
    """From a batch to gradients: all forward and backward passes of a step.

    They run between `begin` and `finish` of the exchange.

    Args:
        host: The trainer.

        exchange: The exchange of this rank.

    Attributes:
        activation_meter: Counts what is kept for backward, in the steps that are counted; otherwise
            None.

        peak_bytes: The most bytes kept at once in the counted steps so far.

        is_timed: Whether forward passes are timed.

        forward_seconds: Wall-clock seconds in whole forward passes since `start_timing`, without
            waits for other ranks, in total.

        forward_cpu_seconds: CPU seconds in whole forward passes since `start_timing`, in total.

        batches_in_flight: How many batches `compute_outputs` accepts at once.

        leaves_factor: As in `LossModule`. Passes that set it keep `LossModule.share_factor`, and
            call `read_share` and `backpropagate_share` with it.
    """

    activation_meter: ActivationMeter | None = None
    peak_bytes = 0
    is_timed = False
    forward_seconds = 0.0
    forward_cpu_seconds = 0.0
    leaves_factor = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if problem := find_renamed_member(cls, RENAMED_PASSES_MEMBERS):
            raise Refused(problem)

    def __init__(self, host: PassesHost, exchange: Exchange) -> None:
        self.host = host
        self.exchange = exchange

    @abstractmethod
    def compute_gradients(
        self, micros: Iterable[tuple[MicroBatch, Any, Any]], count: int
    ) -> LossSums:
        """Run all micro-batches of a step forward and backward.

        Args:
            micros: (micro-batch, inputs, target) triples.
            count: Number of micro-batches.

        Returns:
            The sums of the losses on this rank; zeros if the rank has no loss.

        Raises:
            StepFailed: A value is not finite; the error names the tensor.
        """

    def compute_output(self, inputs: Any) -> Any:
        """Compute the output of the model in eval mode.

        Collective over the ranks that hold one replica.

        Args:
            inputs: The inputs of a batch.

        Returns:
            The output, or None if it is on other ranks.
        """
        return tree_map_only(WrappedTensor, unwrap, call_model(self.host.module.model, inputs))

    def start_timing(self) -> None:
        """Time forward passes from here on."""
        self.is_timed = True

    def close(self) -> None:  # noqa: B027         # most hold nothing
        """Release what the passes hold of the model, at the end of the training."""

    def invalidate_plans(self) -> None:  # noqa: B027         # most conclude nothing
        """Forget conclusions from Python attributes of the model, because the user has set some."""

    def collect_python_numbers(self) -> dict[tuple[str, str], Any]:
        """Return numbers that Python code of the model keeps, and that all ranks must keep equal.

        Returns:
            The numbers by (name of the owner, name of the attribute).
        """
        return {}

    @contextlib.contextmanager
    def count_activations(self, model: nn.Module) -> Iterator[None]:
        """Count what is kept for backward during a step.

        Args:
            model: The model; its tensors are not counted.
        """
        meter = ActivationMeter([*model.parameters(), *model.buffers()])
        self.activation_meter = meter
        try:
            yield
        finally:
            self.activation_meter = None
            self.peak_bytes = max(self.peak_bytes, meter.peak_bytes)

    batches_in_flight = 1

    def compute_outputs(self, batches: list[Any], places: list[list[int]]) -> list[Any]:
        """Compute the outputs of several batches, as `compute_output` does.

        Args:
            batches: The inputs of each batch.
            places: For each batch, the places of its samples in the dataset.

        Returns:
            One output for each batch.
        """
        outputs = []
        for inputs, batch_places in zip(batches, places, strict=True):
            with key_test_draws(self.host.draws, self.host.seed, batch_places):
                outputs.append(self.compute_output(inputs))
        return outputs


@contextlib.contextmanager
def enter_pass_contexts(
    contexts: Iterable[PassContext], count_bytes: Callable[..., None] | None = None
) -> Iterator[None]:
    """Enter all contexts around passes, and count what they sent.

    Args:
        contexts: The contexts of the techniques.
        count_bytes: Called as count_bytes(name, bytes, computed=True) for each context at the end;
            None: do not count.
    """
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each.enter_passes())
        yield
    for each in contexts if count_bytes else ():
        count_bytes(each.name, each.sent_bytes, computed=True)  # type: ignore[misc]


def enter_contexts(contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return one context for several, which are entered in order; most steps have none or one.

    Args:
        contexts: The contexts.
    """
    if not contexts:
        return NO_CONTEXT
    return contexts[0] if len(contexts) == 1 else _enter_all(contexts)


@contextlib.contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def refuse_changed_in_backward(
    parameters: Mapping[str, Tensor],
) -> AbstractContextManager[None]:
    """Refuse a backward pass that changes a parameter, as an optimizer in a hook does.

    Args:
        parameters: The parameters that no backward may change, by name.

    Returns:
        The context around the backward pass.

    Raises:
        StepFailed: A backward pass has changed one of them; raised at the end of the context.
    """
    return UnchangedParameters(parameters, CHANGED_IN_BACKWARD) if parameters else NO_CONTEXT


def run_passes(
    passes: Passes, micros: Iterator[tuple[MicroBatch, Any, Any]], count: int
) -> LossSums:
    """Run the passes of a step and check their result.

    Args:
        passes: Any passes, also those of the user.
        micros: (micro-batch, inputs, target) triples.
        count: Number of micro-batches.

    Returns:
        The sums of the losses on this rank.

    Raises:
        StepFailed: The result is not a `LossSums`, a micro-batch was left out, or the loss or its
            weight is not finite.
    """
    sums = passes.compute_gradients(micros, count)
    if not isinstance(sums, LossSums):
        raise StepFailed(
            f"compute_gradients() of {type(passes).__name__} gives a {type(sums).__name__}; give "
            "paragrad.LossSums(loss, weight)"
        )
    if next(micros, None) is not None:
        raise StepFailed(
            f"compute_gradients() of {type(passes).__name__} leaves out some of the {count} "
            "micro-batches of this step; take all"
        )
    if not math.isfinite(sums.loss):
        raise StepFailed("the loss is not finite", tensor="loss")
    if not math.isfinite(sums.weight):
        raise StepFailed("the weight of the loss is not finite", tensor="loss")
    return sums


class SequentialPasses(Passes):
    """Runs the forward and backward passes of each micro-batch in turn, as one worker does."""

    def __init__(self, host: PassesHost, exchange: Exchange) -> None:
        super().__init__(host, exchange)
        self.leaves_factor = type(self) is SequentialPasses  # a subclass may run its own backward

    def compute_gradients(
        self, micros: Iterable[tuple[MicroBatch, Any, Any]], count: int
    ) -> LossSums:
        """Run each micro-batch forward and backward.

        Args:
            micros: (micro-batch, inputs, target) triples.
            count: Number of micro-batches.

        Returns:
            The sums of the losses on this rank.
        """
        loss, weight = 0.0, 0.0
        for number, (micro, inputs, target) in enumerate(micros):
            micro_loss, micro_weight = self._run_micro_batch(micro, inputs, target, number, count)
            loss, weight = loss + micro_loss, weight + micro_weight
        return LossSums(loss, weight)

    def _run_micro_batch(
        self, micro: MicroBatch, inputs: Any, target: Any, number: int, count: int
    ) -> tuple[float, float]:
        """Run a micro-batch forward and backward, and return its share of the loss and weight."""
        host, exchange, log = self.host, self.exchange, self.host.log
        module = exchange.module
        # A call of nn.Module takes microseconds. FSDP2 and exchanges may put hooks on our module.
        is_bare = module is host.module and not (
            module._forward_pre_hooks
            or module._forward_hooks
            or module._backward_pre_hooks
            or module._backward_hooks
            or module._compiled_call_impl is not None
        )
        run_module = host.module.forward if is_bare else module
        samples = len(micro.positions)
        host.batch_norm.start_micro_batch(samples)
        with exchange.micro_batch(number == count - 1), host.key_draws(micro), host.batch_norm:
            started = time.monotonic()
            try:
                # most steps have no contexts, and an empty one takes microseconds
                if contexts := self._list_forward_contexts(inputs, target):
                    with enter_contexts(contexts):
                        value, weight = run_module(inputs, target, samples)
                else:
                    value, weight = run_module(inputs, target, samples)
            finally:
                if log.is_recorded:
                    log.end_span(f"F{number}", "compute", started)
            factor = host.module.share_factor
            share = read_share(value, factor)
            if not math.isfinite(share):
                with host.batch_norm.use_probe_mode():
                    raise StepFailed(
                        "the loss is not finite",
                        tensor="loss"
                        if exchange.shard_layout is not None
                        # the search runs a forward pass on this rank alone
                        else find_nonfinite_tensor(host.module.model, inputs, target),
                    )
            started = time.monotonic()
            try:
                if contexts := self._list_backward_contexts(number, weight):
                    with enter_contexts(contexts):
                        backpropagate_share(value, factor)
                else:
                    backpropagate_share(value, factor)
            finally:
                if log.is_recorded:
                    log.end_span(f"B{number}", "compute", started)
        return share, weight

    def _list_forward_contexts(self, inputs: Any, target: Any) -> list[AbstractContextManager[Any]]:
        contexts: list[AbstractContextManager[Any]] = []
        if self.is_timed:
            contexts.append(self.time_forward())
        if (autocast := self.host.use_autocast()) is not NO_CONTEXT:
            contexts.append(autocast)
        if self.activation_meter is not None:
            contexts.append(self.track_activations(inputs, target))
        return contexts

    def _list_backward_contexts(
        self, number: int, weight: float
    ) -> list[AbstractContextManager[Any]]:
        host = self.host
        contexts: list[AbstractContextManager[Any]] = []
        if host.noise.is_measured:
            contexts.append(host.noise.measure_backward(number, weight, host.module.divisor))
        if host.watched_parameters:
            contexts.append(refuse_changed_in_backward(host.watched_parameters))
        return contexts

    @contextlib.contextmanager
    def time_forward(self) -> Iterator[None]:
        """Add the time of a forward pass to the sums. A GPU is waited for at the end."""
        batch_norm = self.host.batch_norm
        waited_before = batch_norm.waited_seconds
        cpu_started = time.thread_time()
        started = time.perf_counter()
        yield
        if self.host.world.device.type == "cuda":
            torch.cuda.current_stream(self.host.world.device).synchronize()
        waited = batch_norm.waited_seconds - waited_before
        self.forward_seconds += time.perf_counter() - started - waited
        self.forward_cpu_seconds += time.thread_time() - cpu_started

    def track_activations(self, *batch: Any) -> AbstractContextManager[Any]:
        """Return the context around a forward pass that counts what is saved for backward.

        Args:
            *batch: The tensors of the batch, which are not counted.
        """
        if self.activation_meter is None:
            return NO_CONTEXT
        self.activation_meter.exclude_tensors(list_batch_tensors(list(batch)))
        return self.activation_meter.count_saved_tensors()
