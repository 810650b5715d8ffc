"""Weights are exchanged in place of gradients, and not in every step (`local`).

Every replica steps by the gradients of its own share, with an optimizer of its own, whose state it keeps. Every so many steps
the replicas meet: they tell each other where they are and what they have seen, and the mean of their weights, each counted by
its samples since they met last, travels along an all-reduce; `outer.py` says what they go on from. What else forwards changed
on any of them (running statistics, frozen parameters that follow others) becomes its mean. Before a test, in a checkpoint and
at the end the model is what the run stands for, as if the replicas met then; training goes on from what each has. Of a replica
without a sample that counts in a step nothing is updated in it.

Nothing at all is sent between meetings: the loss of a step is this rank's, and that somebody was asked to stop all hear when
they meet, or test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.planner.price import computed_bytes
from paragrad.record.log import Log
from paragrad.strategies.local import Local
from paragrad.techniques.copies import Copies
from paragrad.techniques.data_parallel.outer import Outer, outer_of
from paragrad.techniques.data_parallel.own_buckets import OwnBuckets
from paragrad.techniques.exchange import TESTS, Exchange, How, Replica
from paragrad.techniques.layout import State
from paragrad.techniques.updating import has_modes
from paragrad.world.waiting import out_of_step
from paragrad.world.world import World

MOMENTUM = "outer momentum"             # by which name a checkpoint holds it
WEIGHTS = "weights"                     # bytes of meetings; those for tests and checkpoints are TESTS
PLACE = 2                               # numbers of what a rank tells by which it must be where the others are
ENDED = ("rank {} {}, and rank {} {}: replicas make the same steps, tests and checkpoints. A loop ends on all ranks by what "
         "all know (trainer.evaluate, result.stop), not by the loss of a step, which is each rank's own")
UNLIKE = ("it has {} numbers on rank {} and {} on rank {}, and replicas average what forwards change; give it one shape, "
          "whatever the share of a batch, or keep it in an attribute that is no buffer")


def exchange(strategy: Local, replica: Replica, world: World, log: Log, how: How) -> Exchange:
    """The exchange of `local`. Collective."""
    return Averaging(strategy, replica, world, log, how)


class Averaging(OwnBuckets):
    """In the first `after` steps gradients are summed, as under `data`; from then on weights are averaged."""

    def __init__(self, strategy: Local, replica: Replica, world: World, log: Log, how: How) -> None:
        super().__init__(replica, world, log, how, strategy.reduce)
        self.strategy, self.world, self.step = strategy, world, replica.steps
        self.copies = Copies(self.layout, self.summed.model)
        self.twice = world.size if how.sabotage == "mean_twice" else 1          # planted
        self.names = [name for name, each in self.summed.model.named_parameters() if each.requires_grad]
        self.outer: Outer = outer_of(strategy, self._weights(), self._restored(replica.restored))
        self.keeps = (MOMENTUM,) if self.outer.momentum else ()
        self._met()
        self.asked = 0.0                            # ranks that were asked to stop, as far as this one has heard
        self.then: Any = ()                         # the outer momentum that goes with what the run stands for
        self.over = False                           # all replicas are what it stands for, for good

    def _restored(self, restored: State) -> list[Tensor]:
        """The outer momentum of a checkpoint, of all weights or of none."""
        found = [restored[name][MOMENTUM] for name in self.names if MOMENTUM in restored.get(name, {})]
        if found and len(found) != len(self.names):
            raise StepFailed(f"the checkpoint has an outer momentum of {len(found)} of {len(self.names)} parameters; train "
                             "what was trained, or go on under another outer")
        return found

    def _weights(self) -> list[Tensor]:
        """What is trained, as it is now: an optimizer may have put other tensors into the parameters."""
        named = dict(self.summed.model.named_parameters())
        return [named[name].detach() for name in self.names]

    def _others(self) -> dict[str, Tensor]:
        """Real values that are not trained: buffers, which forwards may also make anew, and frozen parameters."""
        model, trained = self.summed.model, set(self.names)
        frozen = {name: each for name, each in model.named_parameters() if name not in trained}
        every = {**frozen, **dict(model.named_buffers())}
        return {name: each for name, each in every.items() if each.is_floating_point() or each.is_complex()}

    def _met(self) -> None:
        """Replicas are together now."""
        self.before = {name: each.detach().clone() for name, each in self._others().items()}
        self.alone, self.samples = 0, 0.0           # steps alone since then; the weight of all steps since
        self.beside = sum(each.nbytes for each in (*self.before.values(), *self.outer.centre, *self.outer.momentum))

    # ---- in a step -----------------------------------------------------------------------------------------------------
    @property
    def synchronous(self) -> bool:
        """Are gradients summed in this step?"""
        return self.step < self.strategy.after

    @property
    def apart(self) -> bool:                            # type: ignore[override]
        return not self.synchronous and not self.layout.cut

    def begin(self) -> None:
        super().begin()
        self.kind = "gradients"
        self.refuse_refrozen()

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
        self.alone, self.samples = self.alone + (not self.synchronous), self.samples + self.weight
        if self.strategy.meets(self.step):
            self._meet()
        self.step += 1

    def _meet(self) -> None:
        with self.log.detail("meeting", "wait"):
            weights, others = self._means(WEIGHTS)
        if weights is not None:
            self.outer.met(self._weights(), [*weights.values()])
        elif not self.alone:
            self.outer.begun(self._weights())
        now = self._others()
        for name, mean in others.items():
            now[name].detach().copy_(mean)
        self.copies.alike({**dict(zip(self.names, self._weights(), strict=True)), **{name: now[name] for name in others}})
        self._met()

    def _means(self, kind: str, anyway: bool = False) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        """The means over replicas, by their samples since they met, of all weights (None where these are still equal, unless
        anyway), and of other values that any of them changed. Collective."""
        self.kind = kind
        others = self._others()
        moved = [name not in self.before or not torch.equal(each, self.before[name]) for name, each in others.items()]
        sizes = [(each.numel() + 1) * (1 if flag else -1) for each, flag in zip(others.values(), moved, strict=True)]
        own = torch.tensor([self.step, kind == TESTS, self.samples, float(self.stop), *sizes], dtype=torch.float64)
        self.count(kind, computed_bytes("all_gather", own.nbytes, self.world.size), computed=True)
        with out_of_step():
            told = [each.tolist() for each in self.world.gathered(own)]
        self._refuse_apart(told, [*others])
        self.asked = sum(each[PLACE + 1] for each in told)
        samples = sum(each[PLACE] for each in told)
        by_samples = samples > 0 and not self.outer.even
        share, total = (self.samples, samples) if by_samples else (1.0, float(self.world.size))
        there = [max(each) > 0 for each in zip(*(each[PLACE + 2:] for each in told), strict=True)]
        averaged = anyway or bool(self.alone and samples)
        weights = dict(zip(self.names, self._weights(), strict=True)) if averaged else {}       # a part may have none at all
        changed = {name: each.detach() for (name, each), any_ in zip(others.items(), there, strict=True) if any_}
        means = self._summed({**weights, **changed}, share, total * self.twice)
        return {name: means[name] for name in weights} if averaged else None, {name: means[name] for name in changed}

    def _refuse_apart(self, told: list[list[float]], others: list[str]) -> None:
        """Replicas that meet are at the same place, and have values of the same sizes. Raises StepFailed, on all of them."""
        for rank, each in enumerate(told):
            if each[:PLACE] != told[0][:PLACE]:
                raise StepFailed(ENDED.format(*(part for number in (0, rank) for part in (self.world.launched[number], (
                    "tests, saves or ends" if told[number][1] else "averages") + f" in step {int(told[number][0])}"))))
            for name, mine, first in zip(others, each[PLACE + 2:], told[0][PLACE + 2:], strict=True):
                if abs(mine) != abs(first):
                    raise StepFailed(UNLIKE.format(abs(int(first)) - 1, self.world.launched[0], abs(int(mine)) - 1,
                                                   self.world.launched[rank]), tensor=name)

    # ---- what others look at -------------------------------------------------------------------------------------------
    def _standing(self, anyway: bool = False) -> dict[Tensor, Tensor]:
        """What the run stands for, of every tensor that this replica has otherwise. Collective."""
        self.sent = {}
        weights, others = self._means(TESTS, anyway)
        values, self.then = weights, self.outer.momentum
        if weights is not None:
            stands, self.then = self.outer.stands([*weights.values()])
            values = dict(zip(weights, stands, strict=True))
        elif self.outer.even and not self.synchronous:
            values = dict(zip(self.names, self.outer.centre, strict=True))      # which nobody became
        self.copies.alike(found := {**(values or {}), **others})
        model = self.summed.model
        now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {now[name]: value for name, value in found.items()}

    @contextlib.contextmanager
    def standing(self, anyway: bool = False) -> Iterator[None]:
        found = {} if self.over else self._standing(anyway)
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
        """An optimizer with modes makes of equal weights others on each replica, by its own state."""
        with super().evaluating(), self.standing(anyway=has_modes(self.optimizer)):
            yield

    def settle(self) -> None:
        for tensor, value in self._standing().items():
            tensor.detach().copy_(value)
        named = dict(self.summed.model.named_parameters())
        for name, values in self.world.agreed(self.state()).items():
            self.optimizer.state[named[name]].update({
                what: value.to(named[name].device) if isinstance(value, Tensor) and value.dim() else value
                for what, value in values.items()})
        self.over = True

    def state(self) -> State:
        """The mean over the replicas that have some."""
        if self.over:
            return super().state()
        return _mean_state(self.world.collected((self.samples, super().state())))

    def kept(self) -> State:
        return {name: {MOMENTUM: each} for name, each in zip(self.names, self.then, strict=True)} if self.then else {}


def _mean_state(told: list[tuple[float, State]]) -> State:
    """Optimizers' states, by parameter and by what: the weighted mean of tensors of real or complex numbers; of anything else
    the first one."""
    found: State = {}
    for name, what in dict.fromkeys((name, what) for _, state in told for name, values in state.items() for what in values):
        there = [(weight, state[name][what]) for weight, state in told if what in state.get(name, {})]
        values: list[Any] = [value for _, value in there]
        there = there if any(weight for weight, _ in there) else [(1.0, value) for _, value in there]      # they have just met
        total = sum(weight for weight, _ in there)
        if all(isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()) and each.dim() for each in values):
            wide = torch.promote_types(values[0].dtype, torch.float32)
            values = [sum(value.to(wide) * (weight / total) for weight, value in there).to(values[0].dtype)]  # type: ignore[union-attr]
        found.setdefault(name, {})[what] = values[0]
    return found
