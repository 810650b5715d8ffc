"""The exchange: from each rank's gradients to the update that all make. Most techniques replace
this part of the sentence.

In every step it is asked: begin(); per micro-batch `micro_batch`, with forward and backward of
`module` inside; finish(); counted(); average(); update(). Between `average` and `update`
somebody may look (`averaged`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.layout import Layout, OptimizerState
from paragrad.engine.optimizer.modes import set_optimizer_mode, use_optimizer_eval_mode
from paragrad.errors import StepFailed
from paragrad.executors.machine import Machine
from paragrad.jobs.loss import LossModule
from paragrad.strategies.strategy import Strategy

# by which names bytes count that are sent for a test, and to save
TEST_TRAFFIC = "tests"
CHECKPOINT_TRAFFIC = "checkpoints"
SHARED_PARAMETER_CHANGED = (
    "the forward changes a parameter, which every rank would do, and here they share it; train "
    "with state=replicated, or "
    "change it in the optimizer's step"
)
UNCARRIED_PARAMETER_CHANGED = (
    "a forward changes it, besides gradients and buffers, and a cut model does not carry that from "
    "part to part; train "
    "it with data(n)"
)


@dataclass(frozen=True)
class ExchangeOptions:
    """How exchanges go, whatever the technique.

    overlap: exchange while backward runs;  machine: known links, for `auto`;  sabotage: a
    planted bug, by its name; meeting: where servers are, of a training whose workers come and
    go.
    """

    overlap: bool = True
    machine: Machine | None = None
    inject_fault: str | None = None
    endpoints: Any = None

    def is_server(self, strategy: Strategy, rank: int) -> bool:
        """Is this rank a server?"""
        return (
            strategy.is_server(rank)
            if self.endpoints is None
            else self.endpoints.server is not None
        )


@dataclass(frozen=True)
class Replica:
    """What this rank holds of a training.

    module: the model, or its part, and the loss, whose forward gives the sum of losses;
    clip_norm: as in Job;  some_unused: some rank's parameters got no gradient when the model
    was looked at;  layout: which part of the model this is;  forward: one of model and loss on
    this rank's first micro-batch, which leaves nothing behind (rehearsed=True: without
    autocast); kept: the whole model is wanted as it is;  steps: that were made before;
    restored: what exchanges of the strategy of a checkpoint keep (`kept`);  scheduler: the
    job's, or None;  alike: around calls that draw (an update);  full: samples of a full batch;
    follows: parameters that are not trained, and that forwards were seen to change;  seed: the
    job's.
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


class Exchange(ABC):
    """Of a rank that holds all parameters of its part of the model and, before the update,
    their mean gradients where backward leaves them. Names are the part's own.

    What differs is replaced, at least `finish` and `counted`. Collective: all ranks make it
    together. Set in every step, after `begin`: `stop`, this rank was asked to stop, or, from
    `average` on, some other that it has heard of;  `own_samples`: of its share;  `epoch`;
    before `finish`, `doubt`: of its weight, what may be that of nothing (`Summed.doubts`);
    before `average`, `weight`: of what gradients are of, and `share`, what of all is this
    replica's, as who has the loss told it. To be read: `sent`, bytes by kind in this step;
    `largest`: bytes it keeps in memory;  `sharing`: ranks that hold parameters together, each
    all of them;  `again`: its share was applied before;  `apart`: this rank steps by the
    gradient of its own share, to which no other adds;  `asked`: ranks that were asked to stop,
    where all heard of it in an update.

    shards: where replicas hold the parameters together, each some: of what `parts`, this rank's
    by name, are parts; so are gradients and state then, no rank can run the model alone but in
    `evaluating`, and `hollow` is the model without values. keeps: by what names `kept` tells
    what a checkpoint is to hold beside the optimizer's state.
    """

    sharing_ranks = 1
    saved_names: tuple[str, ...] = ()
    shard_layout: Layout | None = None
    shard_tensors: Mapping[str, Tensor]
    empty_model: nn.Module
    stop_requested = False
    local_samples = 0
    epoch = 0
    already_applied = False
    steps_alone = False
    stop_requests = 0.0
    doubtful_weight = 0.0
    weight = 0.0
    weight_share = 0.0

    def __init__(self, replica: Replica) -> None:
        self.loss_module = replica.module
        self.optimizer = replica.optimizer
        self.clip_norm = replica.clip_norm
        self.layout = replica.layout
        # what forward and backward run: an exchange may wrap it
        self.module: nn.Module = replica.module
        self.parameters = list(replica.module.model.parameters())
        # what is trained, from the first step on
        self.trained_at_start: list[tuple[str, Tensor, bool]] = []
        self.sent_bytes: dict[str, dict[str, Any]] = {}
        self.peak_bytes = 0

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        """A step begins: nothing was sent in it yet."""
        self.sent_bytes = {}
        set_optimizer_mode(self.optimizer, "train")

    def refuse_refrozen(self) -> None:
        """For `begin` of those who exchange what was trained when they were made. Raises
        StepFailed.
        """
        self.trained_at_start = self.trained_at_start or [
            (name.removeprefix("model."), each, each.requires_grad)
            for name, each in self.loss_module.named_parameters()
        ]
        if changed := [
            name for name, each, trained in self.trained_at_start if each.requires_grad != trained
        ]:
            raise StepFailed(
                "it was frozen or unfrozen after step 0, and ranks exchange what was trained then; "
                "train with "
                "that from the beginning, or parallelize the model anew",
                tensor=", ".join(changed),
            )

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch."""
        return contextlib.nullcontext()

    # most wait for the end of backward
    def mark_ready(self, parameter: nn.Parameter) -> None:  # noqa: B027
        """Passes of their own may say that a gradient is final, micro-batches summed: it may
        travel while they go on.
        """

    @abstractmethod
    def finish(self, weight: float, loss: float) -> None:
        """After the last backward, with this rank's own sums over the micro-batches: gradients
        are summed over ranks.
        """

    @abstractmethod
    def reduce_totals(self) -> list[float]:
        """(weight, loss, ranks asked to stop, doubtful weight), summed over replicas; of the
        wish to stop all ranks hear.
        """

    def average(self, weight: float) -> None:
        """The one division by the global weight."""
        # of some parts, none
        if gradients := [
            parameter.grad for parameter in self.parameters if parameter.grad is not None
        ]:
            torch._foreach_div_(gradients, weight)

    def refuse_zero_weight(self) -> None:
        """In the place of `average`, where the weight is 0."""
        raise StepFailed("no sample of this batch counts: its weight is 0")

    def gather_mean_gradients(self) -> dict[str, Tensor | None]:
        """The mean gradient of every parameter, between `average` and `update`. Collective."""
        return self.gather_gradients()

    def update(self) -> None:
        """Clipping and the optimizer."""
        if self.clip_norm is not None:
            self.layout.clip_gradients(
                dict(self.loss_module.model.named_parameters()), self.clip_norm
            )
        self.optimizer.step()

    def serve(self) -> None:  # noqa: B027         # most have no servers
        """Of a rank that is a server: until the workers dismiss it. It has no steps, and no
        batches.
        """

    def dismiss_servers(self) -> None:  # noqa: B027         # most have no servers
        """Of a worker, when the run has come to its end: let the servers go. Collective of all
        workers; not after a failure, where some no longer come.
        """

    def find_cause(self, error: Exception) -> Exception:
        """What was raised in a step, or what it was raised for, where somebody in between says
        less.
        """
        return error

    # ---- what others look at -----------------------------------------------------------------
    def use_evaluation_weights(self) -> contextlib.AbstractContextManager[Any]:
        """The model as what the run stands for (before a test, or when it is saved); afterwards
        as it was. Collective.
        """
        return use_optimizer_eval_mode(self.optimizer, self.parameters)

    def adopt_effective_weights(self) -> None:  # noqa: B027         # most replicas are equal
        """From here on the model is what the run stands for, where replicas differ.
        Collective.
        """

    def use_effective_weights(self) -> contextlib.AbstractContextManager[None]:
        """The same for a while; afterwards every replica is as it was. Collective."""
        return contextlib.nullcontext()

    def collect_saved_tensors(self) -> OptimizerState:
        """What a checkpoint is to hold beside the optimizer's state; as `state`, within
        `standing`. Collective.
        """
        return {}

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter as the last update used it (mean, clipped); until any
        rank begins the next step.
        """
        return {
            name: parameter.grad for name, parameter in self.loss_module.model.named_parameters()
        }

    def gather_optimizer_state(self) -> OptimizerState:
        """The optimizer's state of this part of the model; whole on rank 0 of those that hold
        the same. Collective.
        """
        names = {parameter: name for name, parameter in self.loss_module.model.named_parameters()}
        return {
            names[key]: values
            for key, values in self.optimizer.state.items()
            if isinstance(key, Tensor)
        }

    def count_bytes(self, kind: str, number: int, *, computed: bool) -> None:
        """Bytes of a kind that this rank sends in this step; computed: by a closed form."""
        before = self.sent_bytes.get(kind, {"bytes": 0})["bytes"]
        self.sent_bytes[kind] = {"bytes": before + number, "computed": computed}

    def close(self) -> None:  # noqa: B027         # most hold nothing
        """Let go of what the exchange holds; the model is a plain one again."""


@contextlib.contextmanager
def refuse_moved_parameters(
    exchange: Exchange, parameters: Mapping[str, Tensor], layout: Layout, replicas: int
) -> Iterator[None]:
    """Around the passes of a step. Raises StepFailed where a forward changes a parameter that
    other ranks have too, in one place or, of a model that is cut, in copies: it may do so for
    the first time long after the first step (an embedding with max_norm).
    """
    watched = (
        parameters if exchange.sharing_ranks > 1 else layout.select_copies(parameters, replicas)
    )
    before = [(name, each, each._version) for name, each in watched.items()]
    yield
    if moved := [name for name, each, version in before if each._version != version]:
        raise StepFailed(
            SHARED_PARAMETER_CHANGED if exchange.sharing_ranks > 1 else UNCARRIED_PARAMETER_CHANGED,
            tensor=", ".join(moved[:3]),
        )


def check_totals(exchange: Exchange) -> list[float]:
    """What an exchange, anybody's, says that it counted."""
    told = list(exchange.reduce_totals())
    if len(told) != 4:
        raise StepFailed(
            f"reduce_totals() of {type(exchange).__name__} gives {len(told)} numbers; give four: "
            f"weight, "
            f"loss, ranks "
            "asked to stop, doubtful weight"
        )
    return told


class NoExchange(Exchange):
    """Of one replica, serial's: gradients stay where backward puts them."""

    def finish(self, weight: float, loss: float) -> None:
        self.totals = [weight, loss, float(self.stop_requested), self.doubtful_weight]

    def reduce_totals(self) -> list[float]:
        return self.totals
