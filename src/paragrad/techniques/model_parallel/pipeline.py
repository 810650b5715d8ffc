"""place and pipeline: forwards and backwards of the parts of a model, in the order of a schedule, played on the wire."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.players.wire import Play
from paragrad.schedules.actions import Compute, Recv, Send, Slot, evenly
from paragrad.schedules.pipeline import Pipelined, stage_of
from paragrad.strategies.pipeline import InParts
from paragrad.strategies.shares import Micro
from paragrad.techniques.cut import Share
from paragrad.techniques.exchange import Exchange
from paragrad.techniques.model_parallel import split
from paragrad.techniques.model_parallel.flow import Crossing, Flow, Plan, entered, unchanged
from paragrad.techniques.model_parallel.halves import Deferring
from paragrad.techniques.model_parallel.part import Part, share_of
from paragrad.techniques.passes import Passes, Sums, Within
from paragrad.world.world import World

ALIGNED = 16            # bytes at which each tensor of a message begins


def check(strategy: InParts, model: nn.Module, example: Any) -> None:
    """Can the model be cut so? Raises StepFailed with the repair."""
    parts = strategy.pipelined.stages(strategy.size)
    units = list(split.units_of(model, example, parts, strategy.asked))
    found = split.divided(model, units, parts, strategy.asked) if strategy.asked else evenly(len(units), parts)
    Flow(model, [[units[at] for at in part] for part in found]).planned(example)


def look(strategy: InParts, model: nn.Module, example: Any) -> split.Cut:
    """Where the model is cut."""
    return split.cut(model, example, strategy.pipelined.stages(strategy.size), strategy.asked)


def share(strategy: InParts, model: nn.Module, example: Any, axis: World, cut: split.Cut) -> Share:
    """Some consecutive parts of a model. Collective over the axis."""
    mine = range(axis.rank, len(cut.parts), axis.size)
    found = share_of(model, cut, mine, axis)
    seconds = ", ".join(f"{1e3 * each:.3g}" for each in cut.seconds)
    return replace(found, chose=(("cut", str(cut), f"forward and backward in {seconds} ms, each measured alone"),))


def passes(strategy: InParts, within: Within, exchange: Exchange) -> Passes:
    return InStages(strategy, within, exchange)


class InStages(Passes):
    """Every micro-batch through all parts, and back."""

    def __init__(self, strategy: InParts, within: Within, exchange: Exchange) -> None:
        super().__init__(within, exchange)
        part = within.module.model
        assert isinstance(part, Part)
        self.part, self.strategy = part, strategy
        self.line = within.world.along(strategy.name)
        self.stages = part.flow.last + 1
        self.in_flight = strategy.pipelined.micro
        self.ending = False                         # the last backward of this rank is under way
        for parameter in part.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._final)

    def _final(self, parameter: Tensor) -> None:
        if self.ending:
            self.exchange.ready(parameter)          # type: ignore[arg-type]

    def gradients(self, micros: Iterable[tuple[Micro, Any, Any]], count: int) -> Sums:
        schedule = self.strategy.pipelined.schedule
        pipelined = Pipelined(schedule, schedule.filled(count, self.line.size), self.part.trained)
        given = list(micros)
        last, *rest = given[-1]
        given += [(replace(last, positions=[]), *rest)] * (pipelined.micro - count)     # of no samples
        step = Step(self, given, pipelined)
        step.play()
        for parameter in self.part.parameters():
            self.exchange.ready(parameter)
        return step.own

    def outputs(self, batches: list[Any]) -> list[Any]:
        schedule = self.strategy.pipelined.schedule
        count = schedule.filled(len(batches), self.line.size)
        given = [(Micro([0], [0]), inputs, None) for inputs in [*batches, *batches[-1:] * (count - len(batches))]]
        step = Step(self, given, Pipelined(schedule, count, trained=self.stages), training=False)
        step.play()
        return [step.outs.get(number) for number in range(len(batches))]

    def output(self, inputs: Any) -> Any:
        return self.outputs([inputs])[0]


@dataclass
class Made:
    """What a forward made, for its backward. ends: what goes on, where it has a gradient;  gradients: of what came in, once
    backward has come to it;  total: the loss, of the last part."""
    ends: list[Tensor]
    gradients: list[Tensor | None]
    total: Tensor | None = None


class Step:
    """One batch through the parts of this rank."""

    def __init__(self, passes: InStages, given: list[tuple[Micro, Any, Any]], pipelined: Pipelined,
                 training: bool = True) -> None:
        self.passes, self.given, self.pipelined, self.training = passes, given, pipelined, training
        self.within, self.flow, self.line = passes.within, passes.part.flow, passes.line
        with self.within.casting(), self.within.batch_norm.looking():
            self.plans = [self.flow.planned(inputs) for _, inputs, _ in given]
        self.messages = Messages(self.plans, self.line)
        self.own = Sums()
        self.outs: dict[int, Any] = {}                              # of micro-batches, in a test
        tasks = list(pipelined.tasks(self.line.rank, self.line.size))
        self.left = sum(what != "F" for what, *_ in tasks)
        self.in_halves = any(what == "W" for what, *_ in tasks)
        # a forward whose backward comes next is kept
        at_once = {two[1:] for one, two in pairwise(tasks) if one[0] == "F" and two[0] in "BI" and one[1:] == two[1:]}
        self.again = {task[1:] for task in tasks if task[0] in "BI"} - at_once if passes.strategy.recompute else set()
        self.made: dict[tuple[int, int], Made] = {}                 # by stage and micro-batch
        self.received: dict[tuple[int, int], list[Tensor]] = {}     # of those that are computed again
        self.halves: dict[tuple[int, int], Deferring] = {}

    def play(self) -> None:
        program = list(self.pipelined.program(self.line.rank, self.line.size))
        play = Play(program, self.messages, self.line, self.compute, self.tell if self.detailed else None)
        play.run()
        self.passes.ending = False
        self.passes.exchange.count("activations", play.sent, computed=False)

    @property
    def detailed(self) -> bool:
        return self.training and self.within.log.detailed

    def tell(self, action: Send | Recv, lane: str, start: float, seconds: float, size: int) -> None:
        self.within.log.add_span(str(action), lane, self.within.log.at(start), bytes=size, seconds=seconds)

    def compute(self, action: Compute) -> None:
        at = stage_of(self.line.rank, action.at)
        with self.within.log.span(str(action), "compute") if self.training else contextlib.nullcontext():
            if action.what == "F":
                self.forward(*at)
                return
            self.left -= 1
            self.passes.ending = self.left == 0
            if action.what == "W":
                self.halves.pop(at).weights()
            else:
                self.backward(*at)

    def forward(self, stage: int, number: int) -> None:
        received = self.messages.taken(f"x{stage}.{number}") if stage else []
        keep = self.training and stage >= self.pipelined.trained
        with torch.set_grad_enabled(torch.is_grad_enabled() and (stage, number) not in self.again):
            sends, made, weight = self.run(stage, number, received)
        if made.total is not None:
            self.own = Sums(self.own.loss + float(made.total.detach()), self.own.weight + weight)
        if stage < self.passes.stages - 1:
            self.messages.put(f"x{stage + 1}.{number}", sends)
        if (stage, number) in self.again:
            self.received[stage, number] = received
        elif keep:
            self.made[stage, number] = made

    def run(self, stage: int, number: int, received: list[Tensor]) -> tuple[list[Tensor], Made, float]:
        """(what goes on, what backward wants, the weight of the loss)."""
        (micro, inputs, target), within, last = self.given[number], self.within, stage == self.passes.stages - 1
        received, gradients = entered(received)
        total, weight, halves = None, 0.0, contextlib.nullcontext()
        if self.in_halves and torch.is_grad_enabled():
            halves = self.halves[stage, number] = Deferring()
        with self.around(stage, micro), within.casting():
            with halves:
                sends, out = self.flow.run(inputs, stage, self.plans[number], received)
            if last and self.training:
                total, weight = within.module.pair(out, target, len(micro.positions))
        if last and not self.training:
            self.outs[number] = out
        return sends, Made([each for each in sends if each.requires_grad], gradients, total), weight

    @contextlib.contextmanager
    def around(self, stage: int, micro: Micro) -> Iterator[None]:
        """A forward or backward in training: what is drawn, and batch norms, are those of these samples."""
        if not self.training:
            yield
            return
        self.within.batch_norm.samples = len(micro.positions)
        with self.within.keyed(micro, self.passes.part.first[stage]), self.within.batch_norm:
            yield

    def backward(self, stage: int, number: int) -> None:
        if (stage, number) in self.again:
            with unchanged(self.passes.part):
                _, self.made[stage, number], _ = self.run(stage, number, self.received.pop((stage, number)))
        made = self.made.pop((stage, number))
        with self.around(stage, self.given[number][0]):
            if made.total is not None:
                made.total.backward()
            elif made.ends:
                torch.autograd.backward(made.ends, self.messages.taken(f"g{stage + 1}.{number}"))
        if stage > self.pipelined.trained:
            crossing = self.plans[number].crossing[stage - 1]
            self.messages.put(f"g{stage}.{number}", [
                torch.zeros(each.shape, dtype=each.dtype) if gradient is None else gradient
                for each, gradient in zip(crossing, made.gradients or [None] * len(crossing), strict=True) if each.grad])


class Messages(Mapping[Slot, Tensor]):
    """What travels, as bytes: all tensors that cross between two parts in one message."""

    def __init__(self, plans: list[Plan], line: World) -> None:
        self.plans, self.line = plans, line
        self.made: dict[Slot, Tensor] = {}

    def crossing(self, slot: Slot) -> list[Crossing]:
        what, (stage, micro) = str(slot)[0], map(int, str(slot)[1:].split("."))
        return [each for each in self.plans[micro].crossing[stage - 1] if what == "x" or each.grad]

    def __getitem__(self, slot: Slot) -> Tensor:
        if slot not in self.made:
            self.made[slot] = torch.empty(sum(map(_room, self.crossing(slot))), dtype=torch.uint8, device=self.line.device)
        return self.made[slot]

    def put(self, slot: Slot, tensors: list[Tensor]) -> None:
        for place, tensor in zip(self._views(slot), tensors, strict=True):
            place.copy_(tensor.detach())

    def taken(self, slot: Slot) -> list[Tensor]:
        """The tensors of a message, which is forgotten here."""
        views = list(self._views(slot))
        self.made.pop(slot, None)
        return views

    def _views(self, slot: Slot) -> Iterator[Tensor]:
        message, start = self[slot], 0
        for each in self.crossing(slot):
            size = math.prod(each.shape) * each.dtype.itemsize
            yield message[start:start + size].view(each.dtype).view(each.shape)
            start += _room(each)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


def _room(crossing: Crossing) -> int:
    """Bytes in a message."""
    return -(-math.prod(crossing.shape) * crossing.dtype.itemsize // ALIGNED) * ALIGNED
