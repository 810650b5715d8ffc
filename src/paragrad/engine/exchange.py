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

from paragrad.engine.layout import Layout, State
from paragrad.engine.optimizer.modes import in_eval_mode, set_mode
from paragrad.errors import StepFailed
from paragrad.executors.machine import Machine
from paragrad.jobs.loss import Summed
from paragrad.strategies.strategy import Strategy

# by which names bytes count that are sent for a test, and to save
TESTS = "tests"
CHECKPOINTS = "checkpoints"
SHARED = (
    "the forward changes a parameter, which every rank would do, and here they share it; train "
    "with state=replicated, or "
    "change it in the optimizer's step"
)
CARRIED = (
    "a forward changes it, besides gradients and buffers, and a cut model does not carry that from "
    "part to part; train "
    "it with data(n)"
)


@dataclass(frozen=True)
class How:
    """How exchanges go, whatever the technique.

    overlap: exchange while backward runs;  machine: known links, for `auto`;  sabotage: a
    planted bug, by its name; meeting: where servers are, of a training whose workers come and
    go.
    """

    overlap: bool = True
    machine: Machine | None = None
    sabotage: str | None = None
    meeting: Any = None

    def serves(self, strategy: Strategy, rank: int) -> bool:
        """Is this rank a server?"""
        return strategy.serves(rank) if self.meeting is None else self.meeting.server is not None


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

    module: Summed
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None
    some_unused: bool = False
    layout: Layout = field(default_factory=Layout)
    forward: Callable[..., Any] | None = None
    kept: bool = False
    steps: int = 0
    restored: State = field(default_factory=dict)
    scheduler: Any = None
    alike: Callable[[str, int, Callable[[], Any]], None] = lambda name, step, function: function()
    full: int = 1
    follows: tuple[str, ...] = ()
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

    sharing = 1
    keeps: tuple[str, ...] = ()
    shards: Layout | None = None
    parts: Mapping[str, Tensor]
    hollow: nn.Module
    stop = False
    own_samples = 0
    epoch = 0
    again = False
    apart = False
    asked = 0.0
    doubt = 0.0
    weight = 0.0
    share = 0.0

    def __init__(self, replica: Replica) -> None:
        self.summed = replica.module
        self.optimizer = replica.optimizer
        self.clip_norm = replica.clip_norm
        self.layout = replica.layout
        # what forward and backward run: an exchange may wrap it
        self.module: nn.Module = replica.module
        self.every = list(replica.module.model.parameters())
        # what is trained, from the first step on
        self.trains: list[tuple[str, Tensor, bool]] = []
        self.sent: dict[str, dict[str, Any]] = {}
        self.largest = 0

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        """A step begins: nothing was sent in it yet."""
        self.sent = {}
        set_mode(self.optimizer, "train")

    def refuse_refrozen(self) -> None:
        """For `begin` of those who exchange what was trained when they were made. Raises
        StepFailed.
        """
        self.trains = self.trains or [
            (name.removeprefix("model."), each, each.requires_grad)
            for name, each in self.summed.named_parameters()
        ]
        if changed := [
            name for name, each, trained in self.trains if each.requires_grad != trained
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
    def ready(self, parameter: nn.Parameter) -> None:  # noqa: B027
        """Passes of their own may say that a gradient is final, micro-batches summed: it may
        travel while they go on.
        """

    @abstractmethod
    def finish(self, weight: float, loss: float) -> None:
        """After the last backward, with this rank's own sums over the micro-batches: gradients
        are summed over ranks.
        """

    @abstractmethod
    def counted(self) -> list[float]:
        """(weight, loss, ranks asked to stop, doubtful weight), summed over replicas; of the
        wish to stop all ranks hear.
        """

    def average(self, weight: float) -> None:
        """The one division by the global weight."""
        # of some parts, none
        if gradients := [parameter.grad for parameter in self.every if parameter.grad is not None]:
            torch._foreach_div_(gradients, weight)

    def uncounted(self) -> None:
        """In the place of `average`, where the weight is 0."""
        raise StepFailed("no sample of this batch counts: its weight is 0")

    def averaged(self) -> dict[str, Tensor | None]:
        """The mean gradient of every parameter, between `average` and `update`. Collective."""
        return self.gradients()

    def update(self) -> None:
        """Clipping and the optimizer."""
        if self.clip_norm is not None:
            self.layout.clip(dict(self.summed.model.named_parameters()), self.clip_norm)
        self.optimizer.step()

    def serve(self) -> None:  # noqa: B027         # most have no servers
        """Of a rank that is a server: until the workers dismiss it. It has no steps, and no
        batches.
        """

    def dismiss(self) -> None:  # noqa: B027         # most have no servers
        """Of a worker, when the run has come to its end: let the servers go. Collective of all
        workers; not after a failure, where some no longer come.
        """

    def cause(self, error: Exception) -> Exception:
        """What was raised in a step, or what it was raised for, where somebody in between says
        less.
        """
        return error

    # ---- what others look at -----------------------------------------------------------------
    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """The model as what the run stands for (before a test, or when it is saved); afterwards
        as it was. Collective.
        """
        return in_eval_mode(self.optimizer, self.every)

    def settle(self) -> None:  # noqa: B027         # most replicas are equal
        """From here on the model is what the run stands for, where replicas differ.
        Collective.
        """

    def standing(self) -> contextlib.AbstractContextManager[None]:
        """The same for a while; afterwards every replica is as it was. Collective."""
        return contextlib.nullcontext()

    def kept(self) -> State:
        """What a checkpoint is to hold beside the optimizer's state; as `state`, within
        `standing`. Collective.
        """
        return {}

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter as the last update used it (mean, clipped); until any
        rank begins the next step.
        """
        return {name: parameter.grad for name, parameter in self.summed.model.named_parameters()}

    def state(self) -> State:
        """The optimizer's state of this part of the model; whole on rank 0 of those that hold
        the same. Collective.
        """
        names = {parameter: name for name, parameter in self.summed.model.named_parameters()}
        return {
            names[key]: values
            for key, values in self.optimizer.state.items()
            if isinstance(key, Tensor)
        }

    def count(self, kind: str, number: int, *, computed: bool) -> None:
        """Bytes of a kind that this rank sends in this step; computed: by a closed form."""
        before = self.sent.get(kind, {"bytes": 0})["bytes"]
        self.sent[kind] = {"bytes": before + number, "computed": computed}

    def close(self) -> None:  # noqa: B027         # most hold nothing
        """Let go of what the exchange holds; the model is a plain one again."""


@contextlib.contextmanager
def unmoved(
    exchange: Exchange, parameters: Mapping[str, Tensor], layout: Layout, replicas: int
) -> Iterator[None]:
    """Around the passes of a step. Raises StepFailed where a forward changes a parameter that
    other ranks have too, in one place or, of a model that is cut, in copies: it may do so for
    the first time long after the first step (an embedding with max_norm).
    """
    watched = parameters if exchange.sharing > 1 else layout.copied(parameters, replicas)
    before = [(name, each, each._version) for name, each in watched.items()]
    yield
    if moved := [name for name, each, version in before if each._version != version]:
        raise StepFailed(SHARED if exchange.sharing > 1 else CARRIED, tensor=", ".join(moved[:3]))


def counted(exchange: Exchange) -> list[float]:
    """What an exchange, anybody's, says that it counted."""
    told = list(exchange.counted())
    if len(told) != 4:
        raise StepFailed(
            f"counted() of {type(exchange).__name__} gives {len(told)} numbers; give four: weight, "
            f"loss, ranks "
            "asked to stop, doubtful weight"
        )
    return told


class Alone(Exchange):
    """Of one replica, serial's: gradients stay where backward puts them."""

    def finish(self, weight: float, loss: float) -> None:
        self.told = [weight, loss, float(self.stop), self.doubt]

    def counted(self) -> list[float]:
        return self.told
