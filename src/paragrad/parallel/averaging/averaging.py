"""Weights are exchanged in place of gradients, and not in every step (`local`).

Every replica steps by the gradients of its own share, with an optimizer of its own, whose state
it keeps. Every so many steps the replicas meet: they tell each other where they are and what
they have seen, and the mean of their weights, each counted by its samples since they met last,
travels along an all-reduce; `outer.py` says what they go on from. What else forwards changed on
any of them (running statistics, frozen parameters that follow others) becomes its mean, where
it has one (`means.py`). Before a test, in a checkpoint and at the end the model is what the run
stands for; training goes on from what each has. Of a replica without a sample that counts in a
step nothing is updated in it.

With `compress` the mean of weights is where all were together last, and the sum of how far each
moved from there, compressed, for which this place is kept. Tests and checkpoints are of the
mean itself.

Nothing at all is sent between meetings: the loss of a step is this rank's, and that somebody
was asked to stop all hear when they meet, in that step, or when they test, in the one after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paragrad.engine.exchange import CHECKPOINTS, TESTS, Exchange, How, Replica
from paragrad.engine.layout import State, on_host
from paragrad.engine.optimizer.modes import has_modes
from paragrad.engine.optimizer.optimizer_state import taken
from paragrad.engine.replica_check import Copies
from paragrad.engine.state.preserve_state import Before, replaced
from paragrad.engine.state.values import same, wide
from paragrad.errors import StepFailed
from paragrad.parallel.averaging.averageable_state import (
    ONE_SHAPE,
    REPLACED,
    Said,
    mean_state,
    nearest,
    numbers_of,
    values_of,
)
from paragrad.parallel.averaging.outer_optimizer import Outer, outer_of
from paragrad.parallel.compression.compressed_reduce import Compression
from paragrad.parallel.compression.feedback import shaped
from paragrad.parallel.data.bucketing import OwnBuckets, buckets_of
from paragrad.planner.cost_formulas import computed_bytes
from paragrad.record.step_log import Log
from paragrad.runtime.stragglers import out_of_step
from paragrad.runtime.world import World
from paragrad.strategies.local import Local

MOMENTUM = "outer momentum"  # by which name a checkpoint holds it
WEIGHTS = "weights"  # bytes of meetings
# of what a rank tells: by so many numbers it must be where the others are; before rates
PLACE = 2
HEAD = 4
ENDED = (
    "rank {} {}, and rank {} {}: replicas make the same steps, tests and checkpoints. A loop ends "
    "on all ranks by what "
    "all know (trainer.evaluate, result.stop), not by the loss of a step, which is each rank's own"
)
UNLIKE = (
    "it has {} numbers on rank {} and {} on rank {}, and replicas average what forwards change; "
    + ONE_SHAPE
)
RATES = (
    "the rate of the optimizer's group {} is {} on rank {} and {} on rank {}, and replicas step by "
    "the same; set it by "
    "what all know (trainer.evaluate), not by the loss of a step, which is each rank's own"
)


def exchange(strategy: Local, replica: Replica, world: World, log: Log, how: How) -> Exchange:
    """The exchange of `local`. Collective."""
    return Averaging(strategy, replica, world, log, how)


class Averaging(OwnBuckets):
    """In the first `after` steps gradients are summed, as under `data`; from then on weights
    are averaged.
    """

    def __init__(self, strategy: Local, replica: Replica, world: World, log: Log, how: How) -> None:
        super().__init__(replica, world, log, how, strategy.reduce)
        self.strategy = strategy
        self.world = world
        self.step = replica.steps
        self.copies = Copies(self.layout, self.summed.model)
        self.twice = world.size if how.sabotage == "mean_twice" else 1  # planted
        self.there = dict(self.summed.model.named_parameters())
        self.names = [name for name, each in self.there.items() if each.requires_grad]
        self.outer: Outer = outer_of(strategy, self._weights(), self._restored(replica.restored))
        self.keeps = (MOMENTUM,) if self.outer.momentum else ()
        self.said = Said(log)
        # until it is told what forwards change in Python
        self.begun: Before | None = Before(self.summed)
        self.compression = (
            None
            if strategy.compress is None
            else Compression(
                strategy.compress,
                world,
                lambda vector, kind: self._send(vector),
                seed=replica.seed,
                log=log,
                count=lambda kind, sent: self.count(WEIGHTS, sent, computed=True),
            )
        )
        self._met()
        # all replicas are what it stands for, for good
        self.over = False

    def _restored(self, restored: State) -> list[Tensor]:
        """The outer momentum of a checkpoint, of all weights or of none."""
        found = [
            restored[name][MOMENTUM] for name in self.names if MOMENTUM in restored.get(name, {})
        ]
        if found and len(found) != len(self.names):
            raise StepFailed(
                f"the checkpoint has an outer momentum of {len(found)} of {len(self.names)} "
                f"parameters; train "
                "what was trained, or go on under another outer"
            )
        return found

    def _weights(self) -> list[Tensor]:
        """What is trained, as it is now: an optimizer may have put other tensors into the
        parameters.
        """
        named = dict(self.summed.model.named_parameters())
        return [named[name].detach() for name in self.names]

    def _others(self) -> dict[str, Tensor]:
        """Values that are not trained: buffers, which forwards may also make anew, and frozen
        parameters.
        """
        trained = set(self.names)
        return {name: each for name, each in values_of(self.summed).items() if name not in trained}

    def _met(self) -> None:
        """Replicas are together now."""
        self.before = {name: each.detach().clone() for name, each in self._others().items()}
        # steps alone since then; the weight of all steps since
        self.alone = 0
        self.samples = 0.0
        self.common: Sequence[Tensor] = ()  # where they are now
        if self.compression:
            self.common = self.outer.centre or [
                each.to(wide(each.dtype), copy=True) for each in self._weights()
            ]
        held = {
            id(each): each
            for each in (
                *self.before.values(),
                *self.outer.centre,
                *self.outer.momentum,
                *self.common,
            )
        }
        self.beside = sum(each.nbytes for each in held.values())

    # ---- in a step ---------------------------------------------------------------------------
    @property
    def synchronous(self) -> bool:
        """Are gradients summed in this step?"""
        return self.step < self.strategy.after

    @property
    def apart(self) -> bool:  # type: ignore[override]
        return not self.synchronous and not self.layout.cut

    def begin(self) -> None:
        super().begin()
        self.kind = "gradients"
        self.refuse_refrozen()

    def ready(self, parameter: torch.nn.Parameter) -> None:
        if self.synchronous:
            super().ready(parameter)

    def finish(self, weight: float, loss: float) -> None:
        if names := replaced(self.summed.model, self.there):
            raise StepFailed(REPLACED, tensor=", ".join(names))
        if self.synchronous:
            super().finish(weight, loss)
        else:
            # in this step all hear
            asked = self.stop if self.strategy.meets(self.step) else self.asked
            self.told = [weight, loss, float(asked), self.doubt]

    def uncounted(self) -> None:
        if self.synchronous:
            super().uncounted()  # on no rank

    def update(self) -> None:
        if self.weight or self.synchronous:
            super().update()
        else:
            # schedulers want to know
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.alone = self.alone + (not self.synchronous)
        self.samples = self.samples + self.weight
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
            now[name].detach().copy_(nearest(mean, now[name].dtype))
        self._alike(
            {
                **dict(zip(self.names, self._weights(), strict=True)),
                **{name: now[name] for name in others},
            }
        )
        self._met()

    def _alike(self, tensors: dict[str, Tensor]) -> None:
        """Copies of a replica's ranks, of a model that is cut. What a loss keeps is of the rank
        that has it.
        """
        self.copies.alike(
            {name: each for name, each in tensors.items() if name in self.layout.held}
        )

    def _means(
        self, kind: str, anyway: bool = False
    ) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        """The means over replicas, by their samples since they met, of all weights (None where
        these are still equal, unless anyway), and of other values that any of them changed.
        Collective.
        """
        self.kind = kind
        others = self._others()
        counts, changed = self._told(kind, others)
        samples = sum(counts)
        by_samples = samples > 0 and not self.outer.even
        share, total = (self.samples, samples) if by_samples else (1.0, float(self.world.size))
        averaged = anyway or bool(self.alone and samples)
        # a part may have none at all
        weights = dict(zip(self.names, self._weights(), strict=True)) if averaged else {}
        beside = {
            name: others[name].detach().to(self.world.device, wide(others[name].dtype))
            for name in changed
        }
        if self.compression and kind == WEIGHTS:
            means = self._compressed(weights, share / (total * self.twice))
            means |= self._summed(beside, share, total * self.twice)
        else:
            means = self._summed({**weights, **beside}, share, total * self.twice)
        return {name: means[name] for name in weights} if averaged else None, {
            name: means[name] for name in beside
        }

    def _compressed(self, weights: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """The means of weights, by what each replica sends of its way from where all were; of
        small ones, by themselves. Collective.
        """
        assert self.compression is not None
        common = dict(zip(self.names, self.common, strict=True))
        moved = {name: each - common[name] for name, each in weights.items()}
        large = {
            each: name
            for name, each in moved.items()
            if self.compression.compressor.compresses(each.shape)
        }
        self.sending = []
        begun = [
            self.compression.begin({large[each]: each for each in bucket}, scale, self.step)
            for bucket in buckets_of(large)
        ]
        found = {
            name: shaped(each, common[name])
            for bucket in begun
            for name, each in self.compression.finish(bucket).items()
        }
        found |= self._summed(
            {name: each for name, each in moved.items() if name not in found}, scale
        )
        return {name: common[name] + each for name, each in found.items()}

    def _told(self, kind: str, others: dict[str, Tensor]) -> tuple[list[float], list[str]]:
        """(samples of each replica since they met, names of what else any of them changed); of
        the wish to stop all hear. Collective. Raises StepFailed, on all of them, where they are
        not at one place.
        """
        moved = [
            name not in self.before or not same(each, self.before[name])
            for name, each in others.items()
        ]
        sizes = [
            (each.numel() + 1) * (1 if flag else -1)
            for each, flag in zip(others.values(), moved, strict=True)
        ]
        rates = [float(group.get("lr") or 0.0) for group in self.optimizer.param_groups]
        own = torch.tensor(
            [self.step, kind != WEIGHTS, self.samples, float(self.stop), *rates, *sizes],
            dtype=torch.float64,
        )
        self.count(kind, computed_bytes("all_gather", own.nbytes, self.world.size), computed=True)
        with out_of_step():
            told = [each.tolist() for each in self.world.gathered(own)]
        self._refuse_apart(told, len(rates), [*others])
        self.asked = sum(each[PLACE + 1] for each in told)
        there = [
            max(each) > 0
            for each in zip(*(each[HEAD + len(rates) :] for each in told), strict=True)
        ]
        changed = [name for name, any_ in zip(others, there, strict=True) if any_]
        self.said.means(changed)
        if self.samples and self.begun is not None:
            self.said.python(self.begun.state, "each worker's own", self.layout.serial)
            self.begun = None
        return [each[PLACE] for each in told], changed

    def _refuse_apart(self, told: list[list[float]], rates: int, others: list[str]) -> None:
        """Replicas that meet are at the same place, step by the same rates, and have values of
        the same sizes. Raises StepFailed, on all of them.
        """
        first = told[0]
        known = self.world.launched
        for rank, each in enumerate(told):
            if each[:PLACE] != first[:PLACE]:
                raise StepFailed(
                    ENDED.format(
                        *(
                            part
                            for number in (0, rank)
                            for part in (
                                known[number],
                                ("tests, saves or ends" if told[number][1] else "averages")
                                + f" in step {int(told[number][0])}",
                            )
                        )
                    )
                )
            for number, (mine, theirs) in enumerate(
                zip(each[HEAD : HEAD + rates], first[HEAD : HEAD + rates], strict=True)
            ):
                if mine != theirs:
                    raise StepFailed(RATES.format(number, theirs, known[0], mine, known[rank]))
            for name, mine, theirs in zip(
                others, each[HEAD + rates :], first[HEAD + rates :], strict=True
            ):
                if abs(mine) != abs(theirs):
                    raise StepFailed(
                        UNLIKE.format(
                            abs(int(theirs)) - 1, known[0], abs(int(mine)) - 1, known[rank]
                        ),
                        tensor=name,
                    )

    # ---- what others look at -----------------------------------------------------------------
    def _standing(self, kind: str, anyway: bool = False) -> dict[Tensor, Tensor]:
        """What the run stands for, of every tensor that this replica has otherwise.
        Collective.
        """
        self.sent = {}
        weights, others = self._means(kind, anyway)
        values = weights
        if weights is not None:
            values = dict(zip(weights, self.outer.stands([*weights.values()]), strict=True))
        elif self.outer.even and not self.synchronous:
            # which nobody became
            values = dict(zip(self.names, self.outer.centre, strict=True))
        self._alike(found := {**(values or {}), **others})
        now = {**dict(self.summed.model.named_parameters()), **self._others()}
        return {now[name]: value for name, value in found.items()}

    @contextlib.contextmanager
    def _stood(self, kind: str, anyway: bool = False) -> Iterator[None]:
        found = {} if self.over else self._standing(kind, anyway)
        before = {tensor: tensor.data for tensor in found}
        for tensor, value in found.items():
            # of a bucket, which nobody could save
            tensor.data = nearest(value, tensor.dtype).to(tensor.device, copy=True)
        try:
            yield
        finally:
            for tensor, own in before.items():
                tensor.data = own

    def standing(self) -> contextlib.AbstractContextManager[None]:
        return self._stood(CHECKPOINTS)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """An optimizer with modes makes of equal weights others on each replica, by its own
        state.
        """
        with super().evaluating(), self._stood(TESTS, anyway=has_modes(self.optimizer)):
            yield

    def settle(self) -> None:
        for tensor, value in self._standing(CHECKPOINTS).items():
            tensor.detach().copy_(nearest(value, tensor.dtype))
        named = dict(self.summed.model.named_parameters())
        for name, state in self.world.agreed(self.state()).items():
            taken(self.optimizer, named[name], state)
        self.over = True

    def state(self) -> State:
        """The mean over the replicas that have some."""
        if self.over:
            return super().state()
        own = {
            name: {what: on_host(value) for what, value in values.items()}
            for name, values in super().state().items()
        }
        if self.world.rank:
            self.count(
                CHECKPOINTS,
                sum(
                    value.nbytes
                    for values in own.values()
                    for value in values.values()
                    if isinstance(value, Tensor)
                ),
                computed=True,
            )
        told = self.world.collected((self.samples, own, numbers_of(self.optimizer)))
        self.said.groups([groups for *_, groups in told])
        return mean_state([each[:2] for each in told])

    def kept(self) -> State:
        momentum = self.outer.momentum
        return (
            {name: {MOMENTUM: each} for name, each in zip(self.names, momentum, strict=True)}
            if momentum
            else {}
        )
