"""The exchange: from the gradients of each rank to the same update on all ranks.

Most techniques replace this stage of the training step. In every step the trainer calls, in this
order:

    begin()
    micro_batch()           around the forward and backward of `module`, for each micro-batch
    finish()
    reduce_totals()
    average()
    update()

Between `average` and `update`, `gather_mean_gradients` may be called.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from paragrad.engine.layout import Layout, OptimizerState
from paragrad.engine.optimizer.modes import (
    has_modes,
    set_optimizer_mode,
    use_optimizer_eval_mode,
)
from paragrad.errors import Refused, StepFailed
from paragrad.executors.machine import Machine
from paragrad.jobs.loss import LossModule
from paragrad.notation.choices import find_renamed_member
from paragrad.strategies.strategy import Strategy

NO_CONTEXT = contextlib.nullcontext()
# names under which the bytes of a test and of a checkpoint are counted
TEST_TRAFFIC = "tests"
CHECKPOINT_TRAFFIC = "checkpoints"
SHARED_PARAMETER_CHANGED = (
    "the forward changes a parameter, which every rank would do, but the ranks share it; train "
    "with state=replicated, if the change does not depend on samples, or with serial, or change it "
    "in the optimizer's step"
)
UNCARRIED_PARAMETER_CHANGED = (
    "a forward changes it, besides gradients and buffers, and a divided model does not carry that "
    "from part to part; fill it before the training if the first forward does so, or train it with "
    "data(n)"
)


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of an exchange that do not depend on the technique.

    Attributes:
        overlap: Exchange gradients while backward runs.

        machine: Known links of the machine, used by `auto`.

        inject_fault: Name of a fault to inject, or None.

        endpoints: Where the servers are, in a training that workers can join and leave; otherwise
            None.
    """

    overlap: bool = True
    machine: Machine | None = None
    inject_fault: str | None = None
    endpoints: Any = None

    def is_server(self, strategy: Strategy, rank: int) -> bool:
        """Return whether a rank is a server.

        Args:
            strategy: The strategy of the training.
            rank: The rank to ask about. With endpoints, the answer is for this process.
        """
        return (
            strategy.is_server(rank)
            if self.endpoints is None
            else self.endpoints.server is not None
        )


@dataclass(frozen=True)
class Replica:
    """What this rank holds of a training.

    Attributes:
        module: The model (or its part on this rank) and the loss. Its forward pass gives a
            share of the mean, and its weight.

        optimizer: The optimizer of the parameters on this rank.

        clip_norm: As in Job.

        has_unused_parameters: On some rank, parameters got no gradient when the model was
            inspected.

        layout: Which part of the model this is.

        forward: Runs model and loss on the first micro-batch of this rank and leaves no changes.
            With rehearsed=True it runs without autocast.

        keeps_whole_model: The whole model is needed as it is on this rank.

        completed_steps: Steps made before this run.

        restored_tensors: Tensors from a checkpoint that an exchange of its strategy saved
            (`collect_saved_tensors`).

        scheduler: The scheduler of the job, or None.

        draw_alike: Runs a function that may draw (an update), so that all ranks draw the same
            numbers.

        full_batch: Number of samples of a full batch.

        changed_by_forward: Names of parameters that are not trained and that forward passes
            changed.

        seed: The seed of the job.
    """

    module: LossModule
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None
    has_unused_parameters: bool = False
    layout: Layout = field(default_factory=Layout)
    forward: Callable[..., Any] | None = None
    keeps_whole_model: bool = False
    completed_steps: int = 0
    restored_tensors: OptimizerState = field(default_factory=dict)
    scheduler: Any = None
    draw_alike: Callable[[str, int, Callable[[], Any]], None] = lambda name, step, function: (
        function()
    )
    full_batch: int = 1
    changed_by_forward: tuple[str, ...] = ()
    seed: int = 0


# Members that had another name until version 0.1, and the names that they have now. Those that a
# class of a user only reads are not here: Python says that they are missing.
RENAMED_EXCHANGE_MEMBERS = {
    "counted": "reduce_totals",
    "averaged": "gather_mean_gradients",
    "gradients": "gather_gradients",
    "state": "gather_optimizer_state",
    "ready": "mark_ready",
    "uncounted": "refuse_zero_weight",
    "cause": "find_cause",
    "dismiss": "dismiss_servers",
    "count": "count_bytes",
    "kept": "collect_saved_tensors",
    "keeps": "saved_names",
    "settle": "adopt_effective_weights",
    "standing": "use_effective_weights",
    "evaluating": "use_evaluation_weights",
    "sharing": "sharing_ranks",
    "shards": "shard_layout",
    "parts": "shard_tensors",
    "hollow": "empty_model",
    "stop": "stop_requested",
    "again": "already_applied",
    "apart": "steps_alone",
    "asked": "stop_requests",
    "largest": "peak_bytes",
}


class Exchange(ABC):
    """Base class of exchanges.

    Each rank holds all parameters of its part of the model. Before the update it holds their mean
    gradients, in the place where backward leaves gradients. Names are those of the part. A subclass
    replaces what differs, at least `finish` and `reduce_totals`. The constructor is collective: all
    ranks call it together.

    Args:
        replica: What this rank holds of the training.

    Attributes:
        sharing_ranks: Number of ranks that share one copy of all parameters in memory.

        saved_names: Names under which `collect_saved_tensors` saves tensors in a checkpoint, in
            addition to the optimizer state.

        shard_layout: Layout of the shards if replicas divide the parameters among them, otherwise
            None. Then gradients and state are also divided, and a rank can run the model alone only
            in `use_evaluation_weights`.

        shard_tensors: If the parameters are divided, the shards of this rank by name.

        empty_model: If the parameters are divided, the model without values.

        stop_requested: This rank got a request to stop; from `average` on, also if this rank knows
            of such a request on another rank. Set in every step after `begin`.

        local_samples: Samples in the share of this rank. Set in every step after `begin`.

        epoch: The present epoch. Set in every step after `begin`.

        already_applied: The share of this rank was applied before.

        steps_alone: This rank updates with the gradient of its own share only.

        stop_requests: Number of ranks with a request to stop, if an update shared it.

        doubtful_weight: The part of the weight that may stand for no sample
            (`LossModule.doubtful_total`). Set before `finish`.

        weight: Weight of the samples behind the gradients. Set before `average`.

        weight_share: Fraction of the whole weight that belongs to this replica, as shared by the
            rank that holds the loss. Set before `average`.

        loss_module: The model and the loss.

        optimizer: The optimizer.

        known_optimizer: The optimizer of the last step, or None.

        optimizer_has_modes: Whether it has a training mode and an evaluation mode.

        clip_norm: As in Job.

        layout: Which part of the model this rank holds.

        module: The module that runs forward and backward; a subclass may wrap it.

        parameters: All parameters of the model on this rank.

        trained_at_start: (name, parameter, requires_grad) at the first step.

        held_at_start: The parameters in the optimizer at the first step, by identity; or None.

        sent_bytes: Bytes sent in this step, by kind.

        peak_bytes: Bytes that the exchange keeps in memory.
    """

    sharing_ranks = 1
    saved_names: tuple[str, ...] = ()
    shard_layout: Layout | None = None
    shard_tensors: Mapping[str, Tensor]
    empty_model: nn.Module
    known_optimizer: torch.optim.Optimizer | None = None
    optimizer_has_modes = False
    stop_requested = False
    local_samples = 0
    epoch = 0
    already_applied = False
    steps_alone = False
    stop_requests = 0.0
    doubtful_weight = 0.0
    weight = 0.0
    weight_share = 0.0

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if problem := find_renamed_member(cls, RENAMED_EXCHANGE_MEMBERS):
            raise Refused(problem)

    def __init__(self, replica: Replica) -> None:
        self.loss_module = replica.module
        self.optimizer = replica.optimizer
        self.clip_norm = replica.clip_norm
        self.layout = replica.layout
        self.module: nn.Module = replica.module
        self.parameters = list(replica.module.model.parameters())
        # the set of trained parameters is fixed at the first step
        self.trained_at_start: list[tuple[str, Tensor, bool]] = []
        self.held_at_start: dict[int, Tensor] | None = None
        self.sent_bytes: dict[str, dict[str, Any]] = {}
        self.peak_bytes = 0

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        """Start a step: reset the count of bytes, and set the optimizer to training mode."""
        self.sent_bytes = {}
        if self.optimizer is not self.known_optimizer:
            self.known_optimizer = self.optimizer
            self.optimizer_has_modes = has_modes(self.optimizer)
        if self.optimizer_has_modes:
            set_optimizer_mode(self.optimizer, "train")

    def start_step(self, stop_requested: bool, samples: int, epoch: int) -> None:
        """Start a step by `begin`, and keep what is known of it.

        Args:
            stop_requested: Whether this rank got a request to stop.
            samples: Samples in the share of this rank.
            epoch: The present epoch.
        """
        self.begin()
        self.stop_requested = stop_requested
        self.local_samples = samples
        self.epoch = epoch

    def finish_passes(self, weight: float, loss: float, doubtful_weight: float) -> None:
        """Call `finish` after the last backward pass, and keep the doubtful weight.

        Args:
            weight: Weight of the samples of this rank, summed over its micro-batches.
            loss: What backward ran on, summed over the micro-batches of this rank.
            doubtful_weight: The part of the weight that may stand for no sample.
        """
        self.doubtful_weight = doubtful_weight
        self.finish(weight, loss)

    def keep_weight_share(self, weight_share: float) -> None:
        """Keep the fraction of the whole weight that belongs to this replica.

        Args:
            weight_share: The fraction, from 0 to 1.
        """
        self.weight_share = weight_share

    def average_step(self, weight: float, divisor: float, stop_requested: bool) -> None:
        """Call `average` with what is left of the division, or `refuse_zero_weight`.

        Args:
            weight: The weight summed over all replicas.
            divisor: By what the passes have divided already (`LossModule.divisor`).
            stop_requested: Whether this rank knows of a request to stop on any rank.
        """
        self.weight = weight
        self.request_stop(stop_requested)
        if weight:
            self.average(weight / divisor)
        else:
            self.refuse_zero_weight()

    def request_stop(self, stop_requested: bool) -> None:
        """Keep a request to stop, besides those of before.

        Args:
            stop_requested: Whether there is a request.
        """
        self.stop_requested = self.stop_requested or stop_requested

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Update with an optimizer from here on.

        Args:
            optimizer: The optimizer over the parameters of this rank.
        """
        self.optimizer = optimizer

    def refuse_refrozen(self) -> None:
        """Refuse parameters that were frozen, unfrozen or added after the first step.

        Exchanges that fix the set of trained parameters at construction call this in `begin`.

        Raises:
            StepFailed: A parameter was frozen, unfrozen or added since then.
        """
        held = {id(each): each for group in self.optimizer.param_groups for each in group["params"]}
        self.trained_at_start = self.trained_at_start or [
            (name.removeprefix("model."), each, each.requires_grad)
            for name, each in self.loss_module.named_parameters()
        ]
        if changed := [
            name for name, each, trained in self.trained_at_start if each.requires_grad != trained
        ]:
            raise StepFailed(
                "it was frozen or unfrozen after step 0, and ranks exchange what was trained "
                "then; train with that from the beginning, or parallelize the model again",
                tensor=", ".join(changed),
            )
        if self.held_at_start is None:
            self.held_at_start = held
        # one that was in the model from the beginning may join the optimizer later
        known = self.held_at_start.keys() | {id(each) for _, each, _ in self.trained_at_start}
        new = held.keys() - known
        # the names are looked for only then: this runs in every step
        if new and (
            added := [name for name, each in self.loss_module.named_parameters() if id(each) in new]
        ):
            raise StepFailed(
                "it was added after step 0, and ranks exchange what the model had then; train "
                "with it from the beginning, or parallelize the model again",
                tensor=", ".join(each.removeprefix("model.") for each in added[:3]),
            )

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context around the forward and backward passes of one micro-batch.

        Args:
            last: Whether this is the last micro-batch of the step.
        """
        return NO_CONTEXT

    # most exchanges wait for the end of backward
    def mark_ready(self, parameter: nn.Parameter) -> None:  # noqa: B027
        """Announce that the gradient of a parameter is final, with all micro-batches summed.

        Passes of a technique may call this, so that the gradient is sent while they continue.

        Args:
            parameter: The parameter; its gradient is final.
        """

    def note_outside_backward(self, parameters: Iterable[Tensor]) -> None:  # noqa: B027
        """Take note of a backward pass outside of steps, such as that of one worker's step.

        Args:
            parameters: The parameters that got a gradient in it.
        """

    @abstractmethod
    def finish(self, weight: float, loss: float) -> None:
        """Sum gradients over ranks, after the last backward pass.

        Args:
            weight: Weight of the samples of this rank, summed over its micro-batches.
            loss: What backward ran on, summed over the micro-batches of this rank.
        """

    @abstractmethod
    def reduce_totals(self) -> list[float]:
        """Return the totals over all replicas.

        Returns:
            (weight, loss, ranks with a request to stop, doubtful weight). All ranks get the number
            of requests to stop.
        """

    def average(self, weight: float) -> None:
        """Divide the summed gradients, so that they are those of the mean over the global batch.

        This completes the division that the passes began (`LossModule.divisor`). It is done here,
        in a subclass that replaces this method, or on a server.

        Args:
            weight: The weight summed over all replicas, divided by what the passes divided by. It
                is 1 if the passes divided by the whole weight.
        """
        if weight == 1.0:
            return
        # a part of a model may have no gradients
        if gradients := [
            parameter.grad for parameter in self.parameters if parameter.grad is not None
        ]:
            torch._foreach_div_(gradients, weight)

    def refuse_zero_weight(self) -> None:
        """Refuse a batch of weight 0; called in place of `average`.

        Raises:
            StepFailed: Always, in this class.
        """
        raise StepFailed("no sample of this batch counts: its weight is 0")

    def gather_mean_gradients(self) -> dict[str, Tensor | None]:
        """Return the mean gradient of every parameter, between `average` and `update`.

        Collective.
        """
        return self.gather_gradients()

    def update(self) -> None:
        """Clip the gradients and run the optimizer."""
        if self.clip_norm is not None:
            self.layout.clip_gradients(
                dict(self.loss_module.model.named_parameters()), self.clip_norm
            )
        step_optimizer(self.optimizer)

    def skip_update(self) -> None:
        """Leave the parameters as they are, in place of `update`: a gradient overflowed."""
        # schedulers check this flag to see that the optimizer stepped
        self.optimizer._opt_called = True

    def serve(self) -> None:  # noqa: B027         # most have no servers
        """Run a server rank until the workers dismiss it.

        A server has no steps and no batches.
        """

    def dismiss_servers(self) -> None:  # noqa: B027         # most have no servers
        """Let the servers end, when the run has ended on this worker.

        Collective over all workers. It is not called after a failure, because some workers may be
        gone.
        """

    def find_cause(self, error: Exception) -> Exception:
        """Return the error that caused another error in a step.

        Args:
            error: The error that was raised in the step.

        Returns:
            The original error, if a library in between raised a less specific one.
        """
        return error

    # ---- read by the trainer, tests and checkpoints ------------------------------------------
    def use_evaluation_weights(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the model has the weights to evaluate or save.

        Afterwards the model is as it was before. Collective.
        """
        return use_optimizer_eval_mode(self.optimizer, self.parameters)

    def adopt_effective_weights(self) -> None:  # noqa: B027         # most replicas are equal
        """Set the model to the effective weights of the run for good, if replicas differ.

        Collective.
        """

    def use_effective_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the effective weights of the run.

        Afterwards every replica is as it was before. Collective.
        """
        return contextlib.nullcontext()

    def collect_saved_tensors(self) -> OptimizerState:
        """Return tensors that a checkpoint saves in addition to the optimizer state.

        The form is that of `gather_optimizer_state`. It is called within `use_effective_weights`.
        Collective.
        """
        return {}

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of every parameter as the last update used it (mean, clipped).

        The result is valid until any rank begins the next step.
        """
        return {
            name: parameter.grad for name, parameter in self.loss_module.model.named_parameters()
        }

    def gather_optimizer_state(self) -> OptimizerState:
        """Return the optimizer state of this part of the model. Collective.

        The state is complete on rank 0 of the ranks that hold the same part.
        """
        names = {parameter: name for name, parameter in self.loss_module.model.named_parameters()}
        return {
            names[key]: values
            for key, values in self.optimizer.state.items()
            if isinstance(key, Tensor)
        }

    def iterate_optimizer_state(self) -> Iterator[tuple[list[str], OptimizerState]]:
        """Yield the result of `gather_optimizer_state`, some parameters at a time. Collective.

        An exchange that copies the state to rank 0 copies no more of it at once than it must.

        Yields:
            (names, state): the names of some parameters, the same on each rank, and their state.
        """
        names = [name for name, _ in self.loss_module.model.named_parameters()]
        yield names, self.gather_optimizer_state()

    def count_bytes(self, kind: str, number: int, *, computed: bool) -> None:
        """Add bytes that this rank sends in this step.

        Args:
            kind: Name of the kind of message.
            number: Bytes to add.
            computed: Whether the number comes from a formula, not from a measurement.
        """
        counted = self.sent_bytes.get(kind, {"bytes": 0})["bytes"]
        self.sent_bytes[kind] = {"bytes": counted + number, "computed": computed}

    def close(self) -> None:  # noqa: B027         # most hold nothing
        """Release what the exchange holds. The model is a plain module again."""


# The function that torch puts around the step of every optimizer class. A class may have another
# one that looks the same (functools.wraps), so they are compared by their code.
STEP_WRAPPER_CODE = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def find_step_hook(optimizer: torch.optim.Optimizer) -> str | None:
    """Find what runs in a step besides the step method of the class.

    The step counter of a learning rate scheduler does not count. An object may never have been
    initialized as an Optimizer (a wrapper with the groups of another one). Its step is unknown, so
    it counts as hooked.

    Args:
        optimizer: The optimizer.

    Returns:
        A description for a message, or None.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return "a step of its own around another optimizer's"
    for hooks in (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ):
        for hook in hooks.values():
            return f"the hook {getattr(hook, '__name__', type(hook).__name__)}"
    step = vars(optimizer).get("step")
    is_counter = (
        getattr(step, "_wrapped_by_lr_sched", False)
        and getattr(step, "__wrapped__", None) is type(optimizer).step
    )
    return "a step that was put on the object" if step is not None and not is_counter else None


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make an update, as `optimizer.step()` does.

    torch wraps the step of every optimizer class. The wrapper calls hooks, and notes the step for
    profilers (`Optimizer.profile_hook_step`). The note takes 20 us if no profiler runs: almost as
    long as the update of a small model. Without hooks and profiler, the step inside is called.

    An observer of execution traces, and a profiler that another thread started, do not see it.

    Args:
        optimizer: The optimizer.
    """
    step = type(optimizer).step
    if (
        getattr(step, "__code__", None) is not STEP_WRAPPER_CODE
        or torch.autograd._profiler_enabled()
        or type(optimizer)._optimizer_step_code is not torch.optim.Optimizer._optimizer_step_code
        or find_step_hook(optimizer) is not None
    ):
        optimizer.step()
        return
    if "step" in vars(optimizer):
        # the counter of a scheduler, which does this
        optimizer._opt_called = True
    step.__wrapped__(optimizer)
    if optimizer._optimizer_step_post_hooks:  # the step itself has registered them
        for hook in list(optimizer._optimizer_step_post_hooks.values()):
            hook(optimizer, (optimizer,), {})


class UnchangedParameters:
    """Refuses, at the end of this context, parameters that changed in it.

    The context surrounds the passes of every step, so it is a class: a generator takes longer.

    Args:
        parameters: The parameters by name.
        message: The message of the failure.
    """

    __slots__ = ("message", "parameters", "versions")

    def __init__(self, parameters: Mapping[str, Tensor], message: str) -> None:
        self.parameters = parameters
        self.message = message

    def __enter__(self) -> None:
        self.versions = [each._version for each in self.parameters.values()]

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        versions = [each._version for each in self.parameters.values()]
        if kind is None and versions != self.versions:
            changed = [
                name
                for name, before, now in zip(self.parameters, self.versions, versions, strict=True)
                if before != now
            ]
            raise StepFailed(self.message, tensor=", ".join(changed[:3]))


def refuse_moved_parameters(
    exchange: Exchange, parameters: Mapping[str, Tensor], copies: Mapping[str, Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Refuse a forward pass that changes a parameter which other ranks have too.

    The context surrounds the passes of a step. The other ranks share the parameter in memory, or
    they hold copies of it in a divided model. Such a change may come long after the first step (an
    embedding with max_norm).

    Args:
        exchange: The exchange of this rank.
        parameters: The parameters of this rank by name.
        copies: Those of which other ranks hold copies, in a divided model.

    Returns:
        The context.

    Raises:
        StepFailed: A forward pass has changed such a parameter; raised at the end of the context.
    """
    if exchange.sharing_ranks > 1:
        return UnchangedParameters(parameters, SHARED_PARAMETER_CHANGED)
    return UnchangedParameters(copies, UNCARRIED_PARAMETER_CHANGED)


class Totals(NamedTuple):
    """The totals of a step over all replicas.

    Attributes:
        weight: The weight of the samples.

        loss: The sum of what backward ran on.

        stop_requests: The number of ranks with a request to stop.

        doubtful_weight: The part of the weight that may stand for no sample.
    """

    weight: float
    loss: float
    stop_requests: float
    doubtful_weight: float


def check_totals(exchange: Exchange) -> Totals:
    """Return the totals of an exchange, after a check of their number.

    Args:
        exchange: Any exchange, also one of the user.

    Raises:
        StepFailed: The exchange returned another number of values.
    """
    totals = list(exchange.reduce_totals())
    if len(totals) != 4:
        raise StepFailed(
            f"reduce_totals() of {type(exchange).__name__} gives {len(totals)} numbers; give four: "
            "weight, loss, ranks asked to stop, doubtful weight"
        )
    return Totals(*totals)


class NoExchange(Exchange):
    """The exchange of a single replica (serial): gradients stay as backward leaves them.

    Attributes:
        totals: The numbers that `finish` received, as `reduce_totals` returns them.
    """

    def finish(self, weight: float, loss: float) -> None:
        """Store the totals of this rank.

        Args:
            weight: Weight of the samples of this rank.
            loss: What backward ran on, summed over the micro-batches of this rank.
        """
        self.totals = [weight, loss, float(self.stop_requested), self.doubtful_weight]

    def reduce_totals(self) -> list[float]:
        """Return the totals of this rank."""
        return self.totals
