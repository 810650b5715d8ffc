"""A server: a slice of the parameters and of the optimizer's state, the updates of it, and the answers to workers.

Synchronous (`bsp`): the gradients of all shares of a step are kept until all are there, added up in the order of shares, and
applied once a worker says by what they are to be divided: it knows the norm over all servers. Otherwise what a worker pushes is
applied at once, each ticket once, by the learning rate divided by its staleness where that is asked for.

The optimizer is the job's own. Several servers have flat stretches of the parameters, so it has to update element by element;
one alone has all. The scheduler steps with every full batch of samples that came.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.record.log import Log
from paragrad.strategies.server import Server
from paragrad.techniques.exchange import Replica
from paragrad.techniques.layout import hand_over
from paragrad.techniques.served.header import Header, Kind, Unfit, bytes_of, vector_of
from paragrad.techniques.served.office import LATE
from paragrad.techniques.served.slicing import Slot, held, places
from paragrad.techniques.served.snapshot import Snapshots
from paragrad.techniques.served.sockets import Listening, header_of
from paragrad.techniques.slices import updated
from paragrad.techniques.updating import in_eval_mode, set_mode

APPLIED, AGAIN = 0, 1    # what became of a push, or LATE
LOOK = 0.5              # seconds after which a server looks whether somebody is there


class Applied:
    """Tickets that were applied: all below a number, and some above it."""

    def __init__(self) -> None:
        self.below, self.above = 0, set[int]()

    def __contains__(self, ticket: int) -> bool:
        return ticket < self.below or ticket in self.above

    def add(self, ticket: int) -> None:
        self.above.add(ticket)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1


@dataclass
class Push:
    """What came of one share: by slot its marks and its vector, and who waits for an answer. sender: whose."""
    sender: int
    numbers: tuple[float, ...]
    vectors: dict[int, tuple[bytes, Tensor]]
    waiting: list[tuple[bytes, Header]]


class Shard:
    """One server's. slots: what it has of `tensors`, the parameters that are trained, which have names, and what forwards
    change;  full: samples of a full batch."""

    def __init__(self, strategy: Server, replica: Replica, slots: list[Slot], names: list[str], tensors: list[Tensor],
                 log: Log, job: int, full: int) -> None:
        self.strategy, self.slots, self.log, self.job, self.full = strategy, slots, log, job, full
        self.optimizer, self.scheduler, self.alike = replica.optimizer, replica.scheduler, replica.alike
        self.clip_norm = replica.clip_norm
        self.trained = [slot for slot in slots if not slot.added]       # they come first
        self.stretches = [each for slot in self.trained for each in slot.stretches]
        self.held = [held(each, names, tensors) for each in self.stretches]
        self.values = [torch.cat(places(slot, tensors)) for slot in slots]
        self.gradients = [torch.zeros_like(each) for each in self.values[:len(self.trained)]]
        self.own, self.grads = self._places(self.values), self._places(self.gradients)
        if strategy.servers == 1:                       # the optimizer keeps what it has, also hooks that know the model
            self._take_in(tensors)
        else:
            parts: dict[Tensor, list[Any]] = {}
            for stretch, which, place in zip(self.stretches, self.held, self.own, strict=True):
                parts.setdefault(tensors[stretch.index], []).append((which, place))
            hand_over(self.optimizer, parts)
        set_mode(self.optimizer, "train")
        self.anyone = [False] * len(self.own)           # had a gradient in the last update
        self.step, self.samples = replica.steps, replica.steps * full
        self.pushes: dict[int, Push] = {}               # of this step, by share
        self.complete = False                           # all of them were added up
        self.applied = Applied()
        self.applied.below = replica.steps * strategy.shares
        self.workers: set[bytes] = set()                # that have not left
        self.met = False                                # somebody was there
        self.received = self.sent = 0
        self.begun = self.updates = replica.steps
        self.begun_samples = self.samples
        self.lost = {"updates": 0, "samples": 0}        # by this server, when it died
        self.snapshots: Snapshots | None = None
        self.staleness: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()

    def _places(self, vectors: list[Tensor]) -> list[Tensor]:
        """Of every stretch that in the vectors, in the parameter's shape where it is all of one."""
        flat = [each for slot, vector in zip(self.trained, vectors, strict=False) for each in slot.views(vector)]
        return [each if which.where is not None else each.view(which.shape)
                for each, which in zip(flat, self.held, strict=True)]

    def _take_in(self, parameters: list[Tensor]) -> None:
        """The model's own parameters are the places in the vectors."""
        for number, stretch in enumerate(self.stretches):
            parameters[stretch.index].data = self.own[number]
            self.own[number] = parameters[stretch.index]

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    # ---- its loop ----------------------------------------------------------------------------------------------------------
    def serve(self, listening: Listening, wanted: int, seconds: float) -> None:
        """Until so many workers have left. Raises StepFailed where nobody is there any more, or comes in time."""
        left, since = 0, time.monotonic()
        while left < wanted:
            frames = listening.take(LOOK)
            if frames is None:
                alone = not listening.connections
                since = since if alone else time.monotonic()
                if alone and (self.met or time.monotonic() - since > seconds):
                    raise StepFailed("no worker is there any more" if self.met else f"no worker came within {seconds:g} s")
                continue
            since, self.met = time.monotonic(), True
            left += self.taken(listening, frames)

    def taken(self, listening: Listening, frames: list[Any]) -> bool:
        """Do what a message asks for; True where somebody left."""
        whose, header = frames[0].bytes, Header(Kind.REFUSED, self.job)
        try:
            header = header_of(frames)
            if header.job != self.job:
                raise Unfit("it is of another training")
            if header.kind == Kind.END:
                listening.answer(whose, header.answer(Kind.DONE))
                return True
            self._does(header, listening, whose, frames[2:])
        except Unfit as error:
            self.refused[str(error)] += 1
            listening.refuse(whose, header, str(error))
        return False

    def _does(self, header: Header, listening: Listening, whose: bytes, rest: list[Any]) -> None:
        handlers: dict[Kind, Callable[[Header, Listening, bytes, list[Any]], None]] = {
            Kind.PUSH: self._push, Kind.UPDATE: self._update, Kind.PULL: self._pull, Kind.GRADIENTS: self._tell_gradients,
            Kind.STATE: self._state}
        if header.kind not in handlers:
            raise Unfit(f"{header.kind.name} is no question")
        handlers[header.kind](header, listening, whose, rest)

    # ---- gradients come ------------------------------------------------------------------------------------------------------
    def _push(self, header: Header, listening: Listening, whose: bytes, rest: list[Any]) -> None:
        vector, marked = self._checked(header, rest)
        if not self.strategy.hands_out:
            self._collect(header, listening, whose, marked, vector)
        elif header.step in self.applied:               # who brings it again is told that it is done
            self.refused["samples that were applied before"] += 1
            self._say(listening, [(whose, header)], AGAIN)
        elif self.strategy.waits:
            self._first(header, listening, whose, marked, vector)
        else:
            self._apply(header, listening, whose, marked, vector)

    def _say(self, listening: Listening, waiting: list[tuple[bytes, Header]], how: int) -> None:
        for whose, header in waiting:
            listening.answer(whose, header.answer(Kind.DONE, version=self.updates, numbers=(float(how),)))

    def _checked(self, header: Header, rest: list[Any]) -> tuple[Tensor, bytes]:
        """(the vector, its marks). Raises Unfit where this is not what belongs into a slot, or came before."""
        if header.slot >= len(self.slots):
            raise Unfit("it is for a vector that is not here")
        slot = self.slots[header.slot]
        if len(rest) != 2:
            raise Unfit("a push without its marks and its vector")
        if header.dtype != slot.dtype:
            raise Unfit(f"gradients of type {str(header.dtype).removeprefix('torch.')}, and here are parameters of "
                        f"{str(slot.dtype).removeprefix('torch.')}")
        if header.elements != slot.elements:
            raise Unfit(f"a gradient of {header.elements} elements for {slot.elements} parameters")
        marked = rest[0].bytes
        if len(marked) != len(slot.stretches) or not set(marked) <= {0, 1}:
            raise Unfit("marks that do not fit the slice")
        vector = vector_of(header, rest[1].buffer)
        if not all(number == number and abs(number) != float("inf") for number in header.numbers):
            raise Unfit("numbers that are not finite")
        if not bool(vector.isfinite().all()):
            raise Unfit("a gradient that is not finite")
        self.received += vector.nbytes
        return vector, marked

    def _collect(self, header: Header, listening: Listening, whose: bytes, marked: bytes, vector: Tensor) -> None:
        """Of a synchronous step: once all is there, tell all."""
        if header.step != self.step or self.complete:
            raise Unfit(f"a gradient of {'an earlier' if header.step <= self.step else 'a later'} step")
        if header.shares != self.strategy.shares or header.share >= header.shares:
            raise Unfit(f"a share that there is not ({header.share} of {header.shares})")
        push = self.pushes.setdefault(header.share, Push(header.sender, header.numbers, {}, []))
        if push.sender != header.sender or header.slot in push.vectors:
            raise Unfit("a gradient that came before")
        push.vectors[header.slot] = marked, vector
        push.waiting.append((whose, header))
        if len(self.pushes) < header.shares or any(len(each.vectors) < len(self.slots) for each in self.pushes.values()):
            return
        told, square = self._add_up()
        for each in self.pushes.values():
            for asking, asked in each.waiting:
                listening.answer(asking, asked.answer(Kind.DONE, numbers=(*told[:4], square), version=self.updates))

    def _add_up(self) -> tuple[list[float], float]:
        """The sums of weight, loss, wishes to stop, doubts, and the square of the norm of the sum of gradients."""
        shares = [self.pushes[share] for share in sorted(self.pushes)]
        square, anyone = 0.0, []
        for number, total in enumerate(self.gradients):
            first, *others = [each.vectors[number] for each in shares]
            total.copy_(first[1])
            for _, vector in others:
                total.add_(vector)
            wide = torch.promote_types(total.dtype, torch.float32)
            square += float(torch.linalg.vector_norm(total, dtype=wide)) ** 2 if total.numel() else 0.0
            anyone += [any(found) for found in zip(*(marked for marked, _ in (first, *others)), strict=True)]
        self.anyone, self.complete = anyone, True
        told = [sum(numbers) for numbers in zip(*(each.numbers for each in shares), strict=True)]
        for each in shares:
            each.vectors.clear()                        # what came is let go of
        return told, square

    def _apply(self, header: Header, listening: Listening, whose: bytes, marked: bytes, vector: Tensor) -> None:
        """At once, when all vectors of a ticket are there."""
        push = self._gathered(header, whose, marked, vector)
        if len(push.vectors) == len(self.slots):
            del self.pushes[header.step]
            self._done(header.step, header.numbers)
            self._at_once(push, header)
        self._say(listening, [(whose, header)], APPLIED)

    def _gathered(self, header: Header, whose: bytes, marked: bytes, vector: Tensor) -> Push:
        """What came of a ticket until now."""
        push = self.pushes.get(header.step)
        if push is None or push.sender != header.sender:            # nobody began with it, or who did is gone
            push = self.pushes[header.step] = Push(header.sender, header.numbers, {}, [])
        push.vectors[header.slot] = marked, vector
        push.waiting.append((whose, header))
        return push

    def _done(self, ticket: int, numbers: tuple[float, ...]) -> None:
        """A ticket is applied now."""
        if self.snapshots is not None:
            self.snapshots.before(self, ticket, int(numbers[3]))
        self.applied.add(ticket)

    def _first(self, header: Header, listening: Listening, whose: bytes, marked: bytes, vector: Tensor) -> None:
        """With backup workers: the first shares of those parameters make a step; who is late is told so."""
        if header.version != self.updates:
            self._say(listening, [(whose, header)], LATE)
            return
        self._gathered(header, whose, marked, vector)
        first = [each for each in self.pushes.values() if len(each.vectors) == len(self.slots)][:max(1, header.shares)]
        if len(first) < header.shares:
            return
        others = [waiting for each in self.pushes.values() if each not in first for waiting in each.waiting]
        tickets = [ticket for ticket, each in self.pushes.items() if each in first]
        self.pushes = dict(zip(tickets, first, strict=True))
        told, square = self._add_up()
        for ticket, push in self.pushes.items():
            self._done(ticket, push.numbers)
        if told[0]:                                     # something in it counts
            self._divided(told[0], 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (
                math.sqrt(square) / told[0] + 1e-6)))
            self._step(1.0, int(told[3]))
        self.pushes, self.complete = {}, False
        self._say(listening, [waiting for each in first for waiting in each.waiting], APPLIED)
        self._say(listening, others, LATE)

    def _at_once(self, push: Push, header: Header) -> None:
        self.anyone = [bool(mark) for number in range(len(self.trained)) for mark in push.vectors[number][0]]
        for number, gradient in enumerate(self.gradients):
            gradient.copy_(push.vectors[number][1])
        for number in range(len(self.trained), len(self.slots)):
            self.values[number].add_(push.vectors[number][1])
        late = max(0, self.updates - header.version)
        self.staleness[late] += 1
        self._step(1.0 / max(1, late) if self.strategy.rate == "by_staleness" else 1.0, int(header.numbers[3]))

    # ---- updates -----------------------------------------------------------------------------------------------------------
    def _update(self, header: Header, listening: Listening, whose: bytes, rest: list[Any]) -> None:
        """Of a synchronous step, by the first who says so; all are told the parameters."""
        divisor, factor = header.numbers[:2]
        if header.step == self.step and self.complete:
            if not divisor > 0 or not 0 < factor <= 1:
                raise Unfit("a divisor or a factor that cannot be")
            self._divided(divisor, factor)
            self._step(1.0, self.full)
            self.step, self.complete, self.pushes = self.step + 1, False, {}
        elif header.step != self.step - 1:
            raise Unfit(f"an update of {'an earlier' if header.step < self.step else 'a later'} step")
        self._tell(header, listening, whose, self.values, False)

    def _divided(self, divisor: float, factor: float) -> None:
        for gradient in self.gradients:
            gradient.div_(divisor)
            if factor != 1:
                gradient.mul_(factor)

    def _step(self, rate: float, samples: int) -> None:
        for place, gradient, there in zip(self.own, self.grads, self.anyone, strict=True):
            place.grad = gradient if there else None
        with self._slower(rate):
            self.alike("update", self.updates, lambda: updated(self.optimizer))
        self.updates, before = self.updates + 1, self.samples // self.full
        self.samples += samples
        for step in range(before, self.samples // self.full) if self.scheduler is not None else ():
            self.alike("schedule", step, self.scheduler.step)

    @contextmanager
    def _slower(self, rate: float) -> Iterator[None]:
        before = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups if rate != 1 else ():
            group["lr"] = group["lr"] * rate
        yield
        for group, lr in zip(self.optimizer.param_groups, before, strict=True):
            group["lr"] = lr

    # ---- answers -----------------------------------------------------------------------------------------------------------
    def _tell(self, header: Header, listening: Listening, whose: bytes, vectors: list[Tensor], copied: bool,
              marked: bytes = b"", **more: Any) -> None:
        """One of the vectors; a copy where the next update may come while it travels."""
        if header.slot >= len(self.slots):
            raise Unfit("it is for a vector that is not here")
        if header.slot >= len(vectors):                 # of what has no gradients
            raise Unfit("it is for a vector that has none")
        slot, vector = self.slots[header.slot], vectors[header.slot]
        self.sent += vector.nbytes
        said = header.answer(Kind.VALUES, dtype=slot.dtype, elements=slot.elements, version=self.updates, **more)
        listening.answer(whose, said, marked, bytes_of(vector.clone() if copied else vector))

    def _pull(self, header: Header, listening: Listening, whose: bytes, rest: list[Any]) -> None:
        with in_eval_mode(self.optimizer, self.own) if header.numbers[0] else nullcontext():
            self._tell(header, listening, whose, self.values, True)

    def _tell_gradients(self, header: Header, listening: Listening, whose: bytes, rest: list[Any]) -> None:
        marked = iter(self.anyone)
        every = [bytes(next(marked) for _ in slot.stretches) for slot in self.trained]
        self._tell(header, listening, whose, self.gradients, True, every[header.slot] if header.slot < len(every) else b"",
                   numbers=(float(self.complete),))

    def _state(self, header: Header, listening: Listening, whose: bytes, rest: list[Any]) -> None:
        """The optimizer's: [stretch, what, number] or [stretch, what, type, shape] in the order of the bytes."""
        said: list[list[Any]] = []
        parts: list[Tensor] = []
        for number, place in enumerate(self.own):
            for what, value in self.optimizer.state.get(place, {}).items():
                if isinstance(value, Tensor):
                    said.append([number, what, str(value.dtype).removeprefix("torch."), list(value.shape)])
                    parts.append(value.detach().reshape(-1).contiguous().view(torch.uint8))
                else:
                    said.append([number, what, value])
        try:
            text = json.dumps(said)
        except TypeError as error:
            raise Unfit(f"the optimizer's state cannot travel: {error}") from None
        vector = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        listening.answer(whose, header.answer(Kind.VALUES, dtype=torch.uint8, elements=vector.numel()), text.encode(),
                         bytes_of(vector))

    def told(self) -> dict[str, Any]:
        """What the record is to say of it."""
        return {"parameters": self.nbytes, "received": self.received, "sent": self.sent, "updates": self.updates - self.begun,
                "samples": self.samples - self.begun_samples, "lost": self.lost,
                "staleness": {str(late): count for late, count in sorted(self.staleness.items())},
                "refused": dict(self.refused)}

    # ---- started again -------------------------------------------------------------------------------------------------------
    def counts(self) -> dict[str, Any]:
        """Where it stands, for a snapshot."""
        return {"updates": self.updates, "samples": self.samples, "received": self.received, "sent": self.sent,
                "below": self.applied.below, "above": sorted(self.applied.above), "lost": self.lost,
                "staleness": {str(late): count for late, count in self.staleness.items()}, "refused": dict(self.refused)}

    def recount(self, told: dict[str, Any]) -> None:
        """Stand where a snapshot says."""
        self.updates, self.samples = told["updates"], told["samples"]
        self.received, self.sent, self.lost = told["received"], told["sent"], told["lost"]
        self.applied.below, self.applied.above = told["below"], set(told["above"])
        self.staleness = Counter({int(late): count for late, count in told["staleness"].items()})
        self.refused = Counter(told["refused"])

    def lose(self, ticket: int, samples: int) -> None:
        """A ticket that was applied, and whose update is gone."""
        if ticket not in self.applied:
            self.applied.add(ticket)
            self.lost = {"updates": self.lost["updates"] + 1, "samples": self.lost["samples"] + samples}
