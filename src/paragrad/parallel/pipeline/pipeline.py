"""place and pipeline: forwards and backwards of the parts of a model, in the order of a
schedule, played on the wire.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paragrad.datasets.loading import copied, tensors_of
from paragrad.engine.exchange import Exchange
from paragrad.engine.model_shard import Share
from paragrad.engine.passes import Passes, Sums, Within
from paragrad.engine.rng.draws import Calls, in_test
from paragrad.engine.state.preserve_state import State, unchanged
from paragrad.errors import StepFailed
from paragrad.executors.pipeline_memory import POSTS
from paragrad.executors.transport import Play
from paragrad.parallel.pipeline import balance
from paragrad.parallel.pipeline.python_state import numbers, outside, refuse_numbers
from paragrad.parallel.pipeline.rank_program import Order
from paragrad.parallel.pipeline.split_backward import Deferring
from paragrad.parallel.pipeline.stage import Part, share_of
from paragrad.parallel.pipeline.stage_messages import Messages
from paragrad.parallel.tracing.crossing_plan import Plan
from paragrad.parallel.tracing.cut_points import units_of
from paragrad.parallel.tracing.receive_boundary import entered
from paragrad.parallel.tracing.stage_forward import Flow
from paragrad.parallel.tracing.tracer import calls_watched, tensors_in
from paragrad.runtime.world import World
from paragrad.schedules.actions import Compute, Recv, Send, Slot, evenly
from paragrad.schedules.pipeline import Pipelined, stage_of
from paragrad.strategies.pipeline import InParts
from paragrad.strategies.shares import Micro


def check(strategy: InParts, model: nn.Module, example: Any, tested: bool) -> None:
    """Can the model be cut so? tested: in eval mode too. Raises StepFailed with the repair."""
    parts = strategy.pipelined.stages(strategy.size)
    found = units_of(model, example, parts, strategy.asked)
    units = list(found.work)
    cuts = (
        balance.divided(model, units, parts, strategy.asked)
        if strategy.asked
        else evenly(len(units), parts)
    )
    flow = Flow(model, [[units[at] for at in part] for part in cuts], found.standing)
    flow.tried(example)
    if tested:
        flow.tried_in_test(example)


def look(strategy: InParts, model: nn.Module, example: Any) -> balance.Cut:
    """Where the model is cut."""
    return balance.cut(model, example, strategy.pipelined.stages(strategy.size), strategy.asked)


def share(
    strategy: InParts, model: nn.Module, example: Any, axis: World, cut: balance.Cut
) -> Share:
    """Some consecutive parts of a model. Collective over the axis."""
    mine = range(axis.rank, len(cut.parts), axis.size)
    found = share_of(model, cut, mine, axis)
    seconds = ", ".join(f"{1e3 * each:.3g}" for each in cut.seconds)
    return replace(
        found,
        chose=(("cut", str(cut), f"forward and backward in {seconds} ms, each measured alone"),),
    )


def passes(strategy: InParts, within: Within, exchange: Exchange) -> Passes:
    return InStages(strategy, within, exchange)


class InStages(Passes):
    """Every micro-batch through all parts, and back."""

    def __init__(self, strategy: InParts, within: Within, exchange: Exchange) -> None:
        super().__init__(within, exchange)
        part = within.module.model
        assert isinstance(part, Part)
        self.part = part
        self.strategy = strategy
        self.line = within.world.along(strategy.name, through_host=True)
        self.stages = part.flow.last + 1
        self.in_flight = strategy.pipelined.micro
        # the last backward of this rank is under way
        self.ending = False
        # parameters whose gradients have waited for the second half of a backward
        self.moved: set[int] = set()
        self.told = False  # what they are
        # begun; who keeps something in Python, between units
        self.steps = 0
        self.outside = outside(part.flow)
        self.plan: Plan | None = None  # of the last micro-batch
        self.orders: dict[tuple[int, int], Order] = {}
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._final)
            for parameter in part.parameters()
            if parameter.requires_grad
        ]

    def order(self, pipelined: Pipelined) -> Order:
        """What this rank does, found out once."""
        key = pipelined.micro, pipelined.trained
        if key not in self.orders:
            self.orders[key] = Order.of(pipelined, self.line.rank, self.line.size)
        return self.orders[key]

    def _final(self, parameter: Tensor) -> None:
        if self.ending:
            self.exchange.ready(parameter)  # type: ignore[arg-type]

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def changed(self) -> None:
        self.part.flow.plans.clear()
        self.outside = outside(self.part.flow)

    def numbers(self) -> dict[tuple[str, str], Any]:
        return numbers(self.outside)

    def gradients(self, micros: Iterable[tuple[Micro, Any, Any]], count: int) -> Sums:
        schedule = self.strategy.pipelined.schedule
        pipelined = Pipelined(schedule, schedule.filled(count, self.line.size), self.part.trained)
        step = Step(self, list(micros), pipelined)
        self.steps += not self.within.rehearsing
        # the first sets sizes
        before = State(self.outside) if self.steps > 1 and self.steps.bit_count() == 1 else None
        step.play()
        if before is not None:
            often = self.stages > self.line.size or self.strategy.recompute
            # a size is what it was
            refuse_numbers(before, self.line, often and step.plans[count - 1] is self.plan)
        self.plan = step.plans[count - 1]
        if step.in_halves and not self.told:
            self.tell_moved()
        return step.own

    def tell_moved(self) -> None:
        """Which share of this rank's part a schedule of halves could move."""
        self.told = True
        trained = [each for each in self.part.parameters() if each.requires_grad]
        moved = sum(each.numel() for each in trained if id(each) in self.moved)
        share = moved / max(1, sum(each.numel() for each in trained))
        self.within.log.choice(
            "weights' part",
            f"{share:.0%} of the parameters",
            "of what linear, convolution and embedding "
            "multiply by; the others get their gradients with those of what came in",
        )

    def outputs(self, batches: list[Any], places: list[list[int]]) -> list[Any]:
        schedule = self.strategy.pipelined.schedule
        count = schedule.filled(len(batches), self.line.size)
        given = [
            (Micro(own, own), inputs, None) for own, inputs in zip(places, batches, strict=True)
        ]
        step = Step(self, given, Pipelined(schedule, count, trained=self.stages), training=False)
        step.play()
        return [step.outs.get(number) for number in range(len(batches))]

    def output(self, inputs: Any) -> Any:
        return self.outputs([inputs], [[0]])[0]


@dataclass
class Pending:
    """What a forward made, for its backward. ends: of what goes on and gets a gradient, where
    in the graph it was made: the values have gone;  gradients: of what came in, once backward
    has come to it;  total: the loss, of the last part.
    """

    ends: list[GradientEdge | None]
    gradients: list[Tensor | None]
    total: Tensor | None = None


class Step:
    """One batch through the parts of this rank. Its micro-batches are filled up to those of the
    schedule by some of no samples, which leave nothing behind.
    """

    def __init__(
        self,
        passes: InStages,
        real: list[tuple[Micro, Any, Any]],
        pipelined: Pipelined,
        training: bool = True,
    ) -> None:
        last, *rest = real[-1]
        self.given = [
            *real,
            *[(replace(last, positions=[]), *rest)] * (pipelined.micro - len(real)),
        ]
        given = self.given
        self.passes = passes
        self.pipelined = pipelined
        self.real = len(real)
        self.training = training
        self.within = passes.within
        self.flow = passes.part.flow
        self.line = passes.line
        with self.within.casting(), self.within.batch_norm.looking():
            self.plans = [self.flow.planned(inputs) for _, inputs, _ in given]
        self.alive = passes.alive
        if self.alive is not None:
            self.alive.beside(tensors_of([each[1:] for each in given]))
        self.messages = Messages(self.plans, self.line, self.alive)
        self.own = Sums()
        # of micro-batches, in a test
        self.outs: dict[int, Any] = {}
        self.order = passes.order(pipelined)
        order = self.order
        self.left = order.backwards
        self.in_halves = order.in_halves
        self.again = order.again if passes.strategy.recompute else set()
        # by stage and micro-batch
        self.made: dict[tuple[int, int], Pending] = {}
        self.halves: dict[tuple[int, int], Deferring] = {}
        # in forwards, what is drawn again where a module recomputes
        self.drawn: dict[tuple[int, int], Calls] = {}
        self.walk: Play | None = None

    def play(self) -> None:
        self.walk = Play(
            self.order.program,
            self.messages,
            self.line,
            self.compute,
            self.tell if self.detailed else None,
            POSTS,
        )
        walk = self.walk
        with contextlib.ExitStack() as stack:
            if any(plan.straight is None for plan in self.plans):
                # once for all micro-batches
                stack.enter_context(calls_watched(None))
                stack.enter_context(self.flow.keeping())
            walk.run()
        self.walk = None
        self.passes.ending = False
        self.passes.exchange.count("activations", walk.sent, computed=False)

    @property
    def detailed(self) -> bool:
        return self.training and self.within.log.detailed

    def tell(self, action: Send | Recv, lane: str, start: float, seconds: float, size: int) -> None:
        assert self.walk is not None
        self.within.log.add_span(
            str(self.walk.named(action)),
            lane,
            self.within.log.at(start),
            bytes=size,
            seconds=seconds,
        )

    def compute(self, action: Compute) -> None:
        at = stage, number = stage_of(self.line.rank, action.at)
        self.let_go(f"x{stage}.{number}" if action.what == "F" else f"g{stage + 1}.{number}")
        with (
            self.within.log.span(str(action), "compute")
            if self.training
            else contextlib.nullcontext()
        ):
            if action.what == "F":
                self.forward(*at)
                return
            self.left -= 1
            # of the weights' half, a weight that is used twice gets its gradient in two goes
            self.passes.ending = self.left == 0 and action.what != "W"
            if action.what == "W":
                with self.around(*at):  # what a module recomputes
                    self.halves.pop(at).weights()
            else:
                self.backward(*at)

    def let_go(self, came: Slot) -> None:
        """Messages of which it is known, by one that has come since, that they are gone."""
        if self.walk is not None:
            for sent in self.order.over.get(came, ()):
                self.walk.close([sent])
                self.messages.forget(sent)

    def forward(self, stage: int, number: int) -> None:
        came = f"x{stage}.{number}"
        again = (stage, number) in self.again
        received = self.messages.read(came) if stage else []
        last = stage == self.passes.stages - 1
        keep = self.training and stage >= self.pipelined.trained
        # a loss may be in the model
        graph = torch.is_grad_enabled() and not again and (keep or last)
        with (
            torch.set_grad_enabled(graph),
            contextlib.nullcontext() if number < self.real else unchanged(self.flow.model),
        ):
            sends, made, weight = self.run(stage, number, received)
        self.count(made, weight)
        if not last:
            self.messages.put(f"x{stage + 1}.{number}", sends)
        if keep and not again:
            self.made[stage, number] = made
        if not again:
            self.messages.forget(came)

    def count(self, made: Pending, weight: float) -> None:
        if made.total is not None:
            self.own = Sums(self.own.loss + float(made.total.detach()), self.own.weight + weight)

    def run(
        self, stage: int, number: int, received: list[Tensor]
    ) -> tuple[list[Tensor], Pending, float]:
        """(what goes on, what backward wants, the weight of the loss)."""
        (micro, inputs, target), within, last = (
            self.given[number],
            self.within,
            stage == self.passes.stages - 1,
        )
        again = (stage, number) in self.again
        plan = self.plans[number]
        trained = self.pipelined.trained
        if again or plan.changes:
            inputs, target = copied((inputs, target))
        # it is read once more, and a module may change what it is given
        if again and not torch.is_grad_enabled():
            received = [each.clone() for each in received]
        came = plan.crossing[stage - 1] if stage else []
        goes = [] if last else plan.crossing[stage]
        # in a test nothing goes back, and a loss may be weighed by its graph, which begins with
        # what came in
        received, gradients = entered(
            received, [each.grad and (stage > trained or not self.training) for each in came]
        )
        total = None
        weight = 0.0
        halves = contextlib.nullcontext()
        if self.in_halves and torch.is_grad_enabled():
            halves = Deferring(self.passes.moved, self.alive)
            self.halves[stage, number] = halves
        self.drawn[stage, number] = {}
        with self.around(stage, number), within.casting(), self.noted():
            with halves:
                sends, out = self.flow.run(inputs, stage, plan, received)
            self.refuse_other_draws(stage, number)
            # by whose graph its mean is known
            if last and self.training and not (again and not torch.is_grad_enabled()):
                value = within.module.loss(out, target)
                if any(isinstance(each, FakeTensor) for each in tensors_in(value)):
                    raise StepFailed(
                        "the loss reads parameters of the model from outside, and they are on "
                        "another rank; let "
                        "the model return what its loss needs of it, such as (output, penalty)",
                        tensor="loss",
                    )
                total, weight = within.module.weighed(value, target, len(micro.positions))
        if last and not self.training:
            self.outs[number] = out
        ends = [
            get_gradient_edge(each) if each.requires_grad else None
            for crossing, each in zip(goes, sends, strict=True)
            if crossing.grad
        ]
        return sends, Pending(ends, gradients, total), weight

    def refuse_other_draws(self, stage: int, number: int) -> None:
        """Later draws of the model are known by how many come before them."""
        drawn = len(self.drawn[stage, number])
        seen = len(self.passes.part.draws[stage])
        if drawn != seen and self.training and self.within.draws:
            raise StepFailed(
                f"part {stage} of the model draws random numbers {drawn} time(s), and when it was "
                f"cut {seen}: "
                "which of the whole model's draws each is, is not known; draw as often in every "
                "forward, or train "
                "it with data(n)"
            )

    def noted(self) -> contextlib.AbstractContextManager[Any]:
        return self.alive.noting() if self.alive else contextlib.nullcontext()

    @contextlib.contextmanager
    def around(self, stage: int, number: int) -> Iterator[None]:
        """A forward or backward: what is drawn, and in training batch norms, are those of these
        samples.
        """
        micro = self.given[number][0]
        first = self.passes.part.draws[stage].start
        within = self.within
        if not self.training:
            with in_test(within.draws, within.seed, micro.places, first):
                yield
        else:
            within.batch_norm.samples = len(micro.positions)
            with within.keyed(micro, first, self.drawn[stage, number]), within.batch_norm:
                yield

    def backward(self, stage: int, number: int) -> None:
        came = f"x{stage}.{number}"
        back = f"g{stage + 1}.{number}"
        if (stage, number) in self.again:
            with unchanged(self.flow.model):
                _, self.made[stage, number], weight = self.run(
                    stage, number, self.messages.read(came) if stage else []
                )
            self.count(self.made[stage, number], weight)
            self.messages.forget(came)
        made = self.made.pop((stage, number))
        with self.around(stage, number):
            if made.total is not None:
                made.total.backward()
            else:
                came_back = zip(
                    made.ends, self.messages.gradients(back) if made.ends else (), strict=True
                )
                if there := [
                    (end, gradient)
                    for end, gradient in came_back
                    if end is not None and gradient is not None
                ]:
                    torch.autograd.backward(*zip(*there, strict=True))
        self.messages.forget(back)
        if stage > self.pipelined.trained:
            crossing = self.plans[number].crossing[stage - 1]
            self.messages.put(
                f"g{stage}.{number}",
                [
                    gradient
                    for each, gradient in zip(
                        crossing, made.gradients or [None] * len(crossing), strict=True
                    )
                    if each.grad
                ],
            )
