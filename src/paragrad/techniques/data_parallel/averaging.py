"""Weights are exchanged in place of gradients, and not in every step (`local`).

Every replica steps by the gradients of its own share, with an optimizer of its own, whose state it keeps. Every so many steps
the replicas meet: the mean of their weights, each counted by its samples since they met last, travels along an all-reduce, and
`outer.py` says what they go on from. Real buffers that forwards changed (running statistics) become their mean. Before a test,
in a checkpoint and at the end the model is what the run stands for, as if the replicas met then; training goes on from what
each has. Of a replica without a sample that counts in a step nothing is updated in it.

Nothing at all is sent between meetings: the loss of a step is this rank's, and that somebody was asked to stop all hear when
they meet, or test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paragrad.record.log import Log
from paragrad.strategies.local import Local
from paragrad.techniques.data_parallel.outer import MOMENTUM, outer_of
from paragrad.techniques.data_parallel.own_buckets import OwnBuckets, buckets_of
from paragrad.techniques.exchange import TESTS, Exchange, How, Replica
from paragrad.techniques.layout import State
from paragrad.world.world import World


def exchange(strategy: Local, replica: Replica, world: World, log: Log, how: How) -> Exchange:
    """The exchange of `local`. Collective."""
    return Averaging(strategy, replica, world, log, how)


class Averaging(OwnBuckets):
    """In the first `after` steps gradients are summed, as under `data`; from then on weights are averaged."""
    keeps = (MOMENTUM,)

    def __init__(self, strategy: Local, replica: Replica, world: World, log: Log, how: How) -> None:
        super().__init__(replica, world, log, how, strategy.reduce)
        self.strategy, self.world, self.step = strategy, world, replica.steps
        names = [name for name, each in self.summed.model.named_parameters() if each.requires_grad]
        self.names, self.weights = names, [each.detach() for each in self.every if each.requires_grad]
        momentum = [replica.restored[name][MOMENTUM] for name in names if MOMENTUM in replica.restored.get(name, {})]
        self.outer = outer_of(strategy, self.weights, momentum if len(momentum) == len(names) else ())
        self.buffers = [each for each in self.summed.model.buffers() if each.is_floating_point() or each.is_complex()]
        self.before = [each.clone() for each in self.buffers]           # as they were when the replicas met
        self.alone, self.since, self.samples = 0, 0, 0.0        # steps alone, steps since replicas met; the weight of these
        self.asked = 0.0                            # ranks that were asked to stop, as far as this one has heard
        self.settled: Sequence[Tensor] = ()         # the outer momentum that goes with what the run stands for
        log.choice("weights", str(strategy.outer), f"averaged {self._when()}; tests and checkpoints hold what replicas would "
                   "go on from if they met then")

    def _when(self) -> str:
        after = f", after {self.strategy.after} synchronous steps" if self.strategy.after else ""
        return ("at the end" if self.strategy.every == "end" else f"every {self.strategy.every} steps") + after

    # ---- in a step -----------------------------------------------------------------------------------------------------
    @property
    def synchronous(self) -> bool:
        """Are gradients summed in this step?"""
        return self.step < self.strategy.after

    def begin(self) -> None:
        super().begin()
        self.kind = "gradients"

    def ready(self, parameter: torch.nn.Parameter) -> None:
        if self.synchronous:
            super().ready(parameter)

    def finish(self, weight: float, loss: float) -> None:
        if self.synchronous:
            super().finish(weight, loss)
        else:
            self.told = [weight, loss, self.asked, self.doubt]

    def uncounted(self) -> None:
        if self.synchronous:
            super().uncounted()             # on no rank

    def update(self) -> None:
        if self.weight or self.synchronous:
            super().update()
        else:
            self.optimizer._opt_called = True               # type: ignore[attr-defined]    # schedulers want to know
        self.alone, self.since = self.alone + (not self.synchronous), self.since + 1
        self.samples += self.weight
        if self.strategy.meets(self.step):
            self._meet()
        self.step += 1

    def _meet(self) -> None:
        with self.log.detail("meeting", "wait"):
            means, buffers = self._means("weights")
        if self.alone:
            self.outer.met(self.weights, means)
        else:
            self.outer.begun(self.weights)
        for number, mean in buffers.items():
            self.buffers[number].copy_(mean)
        self.before, self.alone, self.since, self.samples = [each.clone() for each in self.buffers], 0, 0, 0.0

    def _means(self, kind: str) -> tuple[list[Tensor], dict[int, Tensor]]:
        """The means over replicas, by their samples since they met, of all weights, where these may differ, and of the buffers
        that a replica changed, by number. Collective."""
        self.kind, self.sending = kind, []
        weights = self.weights if self.alone else []
        tensors = [*weights, *(each.detach() for each in self.buffers if self.since)]
        if not tensors:
            return [], {}
        cut = buckets_of(tensors)
        for bucket in cut:
            wide = torch.promote_types(bucket[0].dtype, torch.float32)          # in less, a mean would be a coarser number
            self._send(torch.cat([each.reshape(-1).to(wide) for each in bucket]).mul_(self.samples))
        moved = [float(not torch.equal(*pair)) for pair in zip(self.buffers, self.before, strict=True)]
        self._send(torch.tensor([self.samples, float(self.stop), *moved], dtype=torch.float64, device=self.device))
        *vectors, told = [bucket.future.wait() for bucket in self.sending]
        total, self.asked, *changed = told.tolist()
        if not total:                                       # nobody has had a sample that counts
            return [each.clone() for each in weights], {}
        means = [place.view_as(each) for bucket, vector in zip(cut, vectors, strict=True)
                 for each, place in zip(bucket, vector.div_(total).split([each.numel() for each in bucket]), strict=True)]
        return means[:len(weights)], {number: mean for number, mean in enumerate(means[len(weights):]) if changed[number]}

    # ---- what others look at -------------------------------------------------------------------------------------------
    def _standing(self) -> dict[Tensor, Tensor]:
        """What the run stands for, of every tensor that replicas may have otherwise. Collective."""
        self.sent = {}
        means, buffers = self._means(TESTS)
        self.settled = self.outer.kept(means) if self.alone else self.outer.momentum
        found = self.outer.stands(means) if self.alone else () if self.synchronous else self.outer.stood()
        trained = [each for each in self.every if each.requires_grad]
        return {**dict(zip(trained, found, strict=False)),              # none, where they are what they have
                **{self.buffers[number]: mean for number, mean in buffers.items()}}

    def settle(self) -> None:
        for tensor, value in self._standing().items():
            tensor.detach().copy_(value)

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        found = self._standing()
        before = {tensor: tensor.data for tensor in found}
        for tensor, value in found.items():
            tensor.data = value.to(tensor.dtype, copy=True)             # of a bucket, which nobody could save
        try:
            yield
        finally:
            for tensor, own in before.items():
                tensor.data = own

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with super().evaluating(), self.standing():
            yield

    def state(self) -> State:
        """The mean over the replicas that have some."""
        told: list[tuple[float, State]] = self.world.collected((self.samples if self.since else 1.0, super().state()))
        return _mean_state(told)

    def kept(self) -> State:
        return {name: {MOMENTUM: each} for name, each in zip(self.names, self.settled, strict=False)}       # there may be none


def _mean_state(told: list[tuple[float, State]]) -> State:
    """Optimizers' states, by parameter and by what: the mean of what is real, weighted; otherwise the first one's."""
    found: State = {}
    for name, what in dict.fromkeys((name, what) for _, state in told for name, values in state.items() for what in values):
        there = [(weight, state[name][what]) for weight, state in told if what in state.get(name, {})]
        values: list[Any] = [value for _, value in there]
        total = sum(weight for weight, _ in there)
        if total and all(isinstance(each, Tensor) and each.is_floating_point() and each.dim() for each in values):
            wide = torch.promote_types(values[0].dtype, torch.float32)
            mean = sum(value.to(wide) * (weight / total) for weight, value in there)
            values = [mean.to(values[0].dtype)]             # type: ignore[union-attr]
        found.setdefault(name, {})[what] = values[0]
    return found
