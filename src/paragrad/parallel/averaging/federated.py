"""Clients train in turn on each worker, each from the round's weights, and the weights that
they come to are averaged.

In a client's steps nothing is sent. A client begins with the model as it was at the beginning
of the round: weights, buffers, what modules keep in Python. What it comes to is added up on its
worker, times its samples; when the round is over the workers sum, along an all-reduce, what
clients say (the samples of each, or that it was lost, and which values besides the weights
forwards changed), and then these sums. So the mean is over the clients that came back, whatever
worker had them. What else forwards changed on any client becomes its mean too, where it has one
(`means.py`); the rest is as at the beginning of the round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paragrad.engine.exchange import Exchange, How, Replica
from paragrad.engine.optimizer.modes import set_mode
from paragrad.engine.state.preserve_state import Before, replaced
from paragrad.engine.state.values import same, wide
from paragrad.errors import StepFailed
from paragrad.parallel.averaging.averageable_state import (
    ONE_SHAPE,
    REPLACED,
    Said,
    nearest,
    values_of,
)
from paragrad.parallel.data.bucketing import Sending
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.federated import Federated

# of what is sent when a round is over
COUNTS = "counts"
WEIGHTS = "weights"
LOST = -1.0  # in place of a client's samples
UNLIKE = "a forward changed its shape from {} to {}, and clients' values are averaged; " + ONE_SHAPE


def exchange(strategy: Federated, replica: Replica, world: World, log: Log, how: How) -> Exchange:
    """The exchange of `federated`. Collective."""
    return Federating(strategy, replica, world, log, how)


class Federating(Sending):
    """Between `begin_round` and `meet` this worker's clients are `begun` and `ended`, or
    `lost`, one after the other.
    """

    apart = True

    def __init__(
        self, strategy: Federated, replica: Replica, world: World, log: Log, how: How
    ) -> None:
        super().__init__(replica, world, log, how, strategy.reduce)
        self.twice = world.size if how.sabotage == "mean_twice" else 1  # planted
        # whose rates hold for all clients, and which never steps
        self.central = self.optimizer
        self.trained = [
            name for name, each in self.summed.model.named_parameters() if each.requires_grad
        ]
        self.said = Said(log)

    # ---- in a client's step ------------------------------------------------------------------
    def finish(self, weight: float, loss: float) -> None:
        self.told = [weight, loss, 0.0, self.doubt]

    def counted(self) -> list[float]:
        return self.told

    def uncounted(self) -> None:
        """Of a batch of which nothing counts nothing is updated."""

    def update(self) -> None:
        if self.weight:
            super().update()

    # ---- in a round --------------------------------------------------------------------------
    def begin_round(self, clients: int) -> None:
        """All workers have the same model; so many clients take part."""
        values = self._values()
        self.before = Before(
            self.summed, list(dict(self.summed.model.named_parameters())), buffers=True
        )
        self.others = {
            name: each.detach().clone() for name, each in values.items() if name not in self.trained
        }
        # which of these some client of this worker changed
        self.moved = set[str]()
        # of the samples of this worker's clients that came back, by place among all
        self.counts = [0.0] * clients
        self.sums = {
            name: torch.zeros_like(each, dtype=wide(each.dtype)) for name, each in values.items()
        }
        self.beside = 2 * sum(each.nbytes for each in (*self.sums.values(), *self.others.values()))

    def begun(self) -> None:
        """A client begins; its optimizer is made, and given to `optimizer`, after this."""
        self._put_back()

    def ended(self, place: int, samples: int) -> None:
        """A client has trained over so many samples. Raises StepFailed, and then nothing of it
        is added, where its weights are not finite, or not those that others have.
        """
        set_mode(self.optimizer, "eval")  # which has the weights that it stands for
        if names := replaced(self.summed.model, self.before.parameters):
            raise StepFailed(REPLACED, tensor=", ".join(names))
        values = self._values()
        self._refuse_unlike(values)
        self.said.python(self.before.state, "as at the beginning, for every client of every round")
        moved = {name for name, each in self.others.items() if not same(values[name], each)}
        for name in (
            *self.trained,
            *(name for name in moved if self.others[name].isfinite().all()),
        ):
            if not values[name].isfinite().all():
                raise StepFailed("its weights are not finite any more", tensor=name)
        # for which there may be no room
        addends = [(total, values[name].to(total)) for name, total in self.sums.items()]
        for total, addend in addends:
            total.add_(addend, alpha=samples)
        self.moved |= moved
        self.counts[place] = float(samples)

    def _refuse_unlike(self, values: Mapping[str, Tensor]) -> None:
        for name, total in self.sums.items():
            if name not in values:
                raise StepFailed(
                    "a forward took it away, and clients' values are averaged; let the model keep "
                    "it",
                    tensor=name,
                )
            if values[name].shape != total.shape:
                raise StepFailed(
                    UNLIKE.format(tuple(total.shape), tuple(values[name].shape)), tensor=name
                )

    def lost(self, place: int) -> None:
        """A client will not come back in this round."""
        self.counts[place] = LOST

    def meet(self) -> list[float]:
        """The round is over: the model becomes the mean of those that came back. Of each client
        its samples, or LOST. Collective.
        """
        self._put_back()
        self.optimizer = self.central
        self.sent = {}
        self.kind = COUNTS
        flags = [float(name in self.moved) for name in self.others]
        own = next(iter(self.sums.values())).real.new_tensor(
            [self.stop, *self.counts, *flags], dtype=torch.float64
        )
        self.asked, *told = self._summed({COUNTS: own})[COUNTS].tolist()
        counts = told[: len(self.counts)]
        if total := sum(count for count in counts if count > 0):
            self.kind = WEIGHTS
            moved = [
                name for name, flag in zip(self.others, told[len(counts) :], strict=True) if flag
            ]
            self.said.means(moved)
            means = self._summed(
                {name: self.sums[name] for name in (*self.trained, *moved)},
                total=total * self.twice,
            )
            self._become(means)
        del self.sums, self.before
        return counts  # type: ignore[no-any-return]

    def _become(self, means: Mapping[str, Tensor]) -> None:
        values = self._values()
        for name, mean in means.items():
            values[name].copy_(nearest(mean, values[name].dtype))

    def _put_back(self) -> None:
        self.before.put_back()
        for name, parameter in self.summed.model.named_parameters():
            # a client may have frozen some
            parameter.requires_grad_(name in self.trained)

    def _values(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in values_of(self.summed).items()}
