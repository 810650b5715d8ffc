"""What a server is asked, checked field by field, and what it answers.

Synchronous (`bsp`): the gradients of all shares of a step are kept until all are there, added
up in the order of shares, and applied once a worker says by what they are to be divided: it
knows the norm over all servers. With backup workers the first shares make a step. Otherwise
what a worker pushes is applied at once. Each ticket is applied once.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from paragrad.engine.optimizer.modes import in_eval_mode
from paragrad.engine.optimizer.update_probe import clip_factor
from paragrad.errors import StepFailed
from paragrad.parallel.server.message_header import Header, Kind, Unfit, bytes_of
from paragrad.parallel.server.model_buffers import loaded, saved
from paragrad.parallel.server.pending_pushes import Push, Question, checked
from paragrad.parallel.server.shard import Shard
from paragrad.parallel.server.shared_buffer import Reader, Shelf
from paragrad.parallel.server.snapshot import EVERY
from paragrad.parallel.server.sockets import Listening, heard
from paragrad.parallel.server.staleness_bound import Bounded
from paragrad.parallel.server.work_queue import LATE

# what became of a push, or LATE
APPLIED = 0
AGAIN = 1
LOOK = 0.5  # seconds after which a server looks whether somebody is there


class Reception:
    """Of one shard. job: the training's number. To be read: pushes, those that wait for others,
    by share or ticket.
    """

    def __init__(self, shard: Shard, listening: Listening, job: int) -> None:
        self.shard = shard
        self.listening = listening
        self.job = job
        self.reader = Reader(shard.strategy.workers)
        self.bounded = Bounded(shard.strategy.bound, shard.strategy.workers)
        self.pushes: dict[int, Push] = {}
        # (sender, slot) that did not ask for the parameters of this step yet
        self.expected = set[tuple[int, int]]()
        self.pulling: list[tuple[bytes, Header]] = []  # who did
        # who wants the sum of this step gone
        self.forgetting: dict[int, tuple[bytes, Header]] = {}
        # a snapshot of this step is to be made before the next one
        self.due = False
        # senders that left, once each;  was somebody there?
        self.left = set[int]()
        self.met = False

    # ---- its loop ----------------------------------------------------------------------------
    def serve(self, wanted: int, seconds: float | None) -> None:
        """Until so many workers have left. Raises StepFailed where nobody is there any more, or
        comes within so many seconds; None: whoever started this process ends it, for others
        come for those that go.
        """
        since = time.monotonic()
        while len(self.left) < wanted:
            if (frames := self.listening.take(0 if self.due else LOOK)) is not None:
                since = time.monotonic()
                self.met = True
                self.taken(frames)
            elif self.due:  # while workers compute
                self._save()
            elif seconds is None or self.listening.connections:
                since = time.monotonic()
            elif self.met or time.monotonic() - since > seconds:
                raise StepFailed(
                    "no worker is there any more"
                    if self.met
                    else f"no worker came within {seconds:g} s"
                )

    def taken(self, frames: Sequence[Any]) -> None:
        """Do what a message asks for."""
        heard(self.listening, frames, self.job, self._does, self.shard.refused)

    def _does(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        handlers: dict[Kind, Callable[[bytes, Header, Sequence[Any]], None]] = {
            Kind.PUSH: self._push,
            Kind.UPDATE: self._update,
            Kind.PULL: self._pull,
            Kind.GRADIENTS: self._tell_gradients,
            Kind.STATE: self._state,
            Kind.FORGET: self._forget,
            Kind.LOOK: self._look,
            Kind.END: self._end,
            Kind.REMIND: self._remind,
            Kind.APART: self._apart,
        }
        if self.shard.snapshots is not None:  # workers may be replaced
            handlers |= {
                Kind.BESIDE: self._beside,
                Kind.HALT: self._halt,
                Kind.RESUME: self._resume,
            }
        if header.kind not in handlers:
            raise Unfit(f"{header.kind.name} is no question")
        handlers[header.kind](whose, header, rest)

    def _end(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        # from here on connections end as they should
        if not self.left:
            self.shard.refused.update(self.listening.refused)
        self.left.add(header.sender)
        self.listening.answer(whose, header.answer(Kind.DONE))

    # ---- gradients come ----------------------------------------------------------------------
    def _push(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        vector, marked = checked(self.shard, self.reader, header, rest)
        if not self.shard.strategy.hands_out:
            self._collect(whose, header, marked, vector)
        # who brings it again is told that it is done
        elif header.step in self.shard.applied:
            self.shard.refused["samples that were applied before"] += 1
            self._say([(whose, header)], AGAIN)
        elif self.shard.strategy.waits:
            self._first(whose, header, marked, vector)
        else:
            self._apply(whose, header, marked, vector)

    def _say(self, waiting: Iterable[Question], how: int) -> None:
        for whose, header in waiting:
            self.listening.answer(
                whose, header.answer(Kind.DONE, version=self.shard.updates, numbers=(float(how),))
            )

    def _collect(self, whose: bytes, header: Header, marked: bytes, vector: Tensor) -> None:
        """Of a synchronous step: once all is there, tell all."""
        if header.step != self.shard.updates or self.shard.complete:
            raise Unfit(
                f"a gradient of {'an earlier' if header.step <= self.shard.updates else 'a later'} "
                f"step"
            )
        if header.shares != self.shard.strategy.shares or header.share >= header.shares:
            raise Unfit(f"a share that there is not ({header.share} of {header.shares})")
        push = self.pushes.setdefault(header.share, Push(header.sender, header.numbers))
        if push.sender != header.sender or header.slot in push.vectors:
            raise Unfit("a gradient that came before")
        push.add(whose, header, marked, vector)
        there = [each for each in self.pushes.values() if self._is_whole(each)]
        if len(there) < header.shares:
            return
        told = self._sums()
        square = self.shard.add_up([self.pushes[share].vectors for share in sorted(self.pushes)])
        for each in self.pushes.values():
            each.vectors.clear()  # what came is let go of
            for asking, asked in each.asking():
                self.listening.answer(
                    asking,
                    asked.answer(
                        Kind.DONE, numbers=(*told[:4], square), version=self.shard.updates
                    ),
                )

    def _apply(self, whose: bytes, header: Header, marked: bytes, vector: Tensor) -> None:
        """At once, when all vectors of a ticket are there."""
        push = self._gathered(whose, header, marked, vector)
        if self._is_whole(push):
            del self.pushes[header.step]
            self._done({header.step: push})
            counted, workers, _, samples, *_ = header.numbers
            self.shard.at_once(
                push.vectors, header.version, int(samples), workers, counts=counted > 0
            )
            self._say(push.asking(), APPLIED)

    def _sums(self) -> list[float]:
        """Of what was said of the shares of a step."""
        return [
            sum(numbers)
            for numbers in zip(
                *(self.pushes[share].numbers for share in sorted(self.pushes)), strict=True
            )
        ]

    def _gathered(self, whose: bytes, header: Header, marked: bytes, vector: Tensor) -> Push:
        """What came of a ticket until now. It is the last one's who brought it; who brought all
        of it before, and was late or is gone, waits with it.
        """
        push = self.pushes.get(header.step)
        if push is None or push.sender != header.sender:
            waiting = push.waiting if push is not None and self._is_whole(push) else {}
            push = Push(header.sender, header.numbers, waiting=waiting)
            self.pushes[header.step] = push
        push.add(whose, header, marked, vector)
        return push

    def _is_whole(self, push: Push) -> bool:
        return len(push.vectors) == len(self.shard.slots)

    def _done(self, pushes: dict[int, Push]) -> None:
        """These tickets are about to be applied, in one update."""
        if self.shard.snapshots is not None:
            self.shard.snapshots.before(
                self.shard, [(ticket, int(each.numbers[3])) for ticket, each in pushes.items()]
            )
        for ticket in pushes:
            self.shard.applied.add(ticket)

    def _first(self, whose: bytes, header: Header, marked: bytes, vector: Tensor) -> None:
        """With backup workers: the first shares of those parameters make a step; who is late is
        told so.
        """
        if header.version != self.shard.updates:
            self._say([(whose, header)], LATE)
            return
        self._gathered(whose, header, marked, vector)
        whole = [each for each in self.pushes.values() if self._is_whole(each)]
        first = whole[: max(1, header.shares)]
        if len(first) < header.shares:
            return
        others = [
            asking for each in self.pushes.values() if each not in first for asking in each.asking()
        ]
        tickets = [ticket for ticket, each in self.pushes.items() if each in first]
        self.pushes = dict(zip(tickets, first, strict=True))
        self._done(self.pushes)
        told = self._sums()
        square = self.shard.add_up([each.vectors for each in first])
        if told[0]:  # something in it counts
            self.shard.divided(
                told[0], clip_factor(math.sqrt(square) / told[0], self.shard.clip_norm)
            )
            self.shard.make(1.0, int(told[3]))
        self.pushes = {}
        self.shard.complete = False
        for each in first:
            self._say(each.asking(own=True), APPLIED)
            self._say(each.asking(own=False), AGAIN)
        self._say(others, LATE)

    def _update(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Of a synchronous step, by the first who says so; all are told the parameters: where
        they travel together, by each server to another one first (share), so that no worker's
        link rests while all fill that of one.
        """
        if header.step == self.shard.updates and self.shard.complete:
            self._make(*header.numbers[:2])
        elif header.step != self.shard.updates - 1:
            raise Unfit(
                f"an update of {'an earlier' if header.step < self.shard.updates else 'a later'} "
                f"step"
            )
        # or somebody brings a question again
        if header.lies or (header.sender, header.slot) not in self.expected:
            self._tell(whose, header, self.shard.values, self.shard.shelf)
        else:
            self.pulling.append((whose, header))
        self.expected.discard((header.sender, header.slot))
        if not self.expected:
            ready = sorted(self.pulling, key=lambda each: each[1].share)
            self.pulling = []
            for each in ready:
                self._tell(*each, self.shard.values, self.shard.shelf)

    def _make(self, divisor: float, factor: float) -> None:
        """The synchronous step of which all is there. Raises Unfit."""
        if not 0 < divisor < math.inf or not 0 < factor <= 1:
            raise Unfit("a divisor or a factor that cannot be")
        if self.due:
            self._save()
        shares = [list(self.pushes[share].numbers[:2]) for share in sorted(self.pushes)]
        self.shard.last = {"made": [divisor, factor], "shares": shares}
        self.shard.divided(divisor, factor)
        self.shard.make(1.0, int(self._sums()[4]))
        self.expected = {
            (each.sender, slot)
            for each in self.pushes.values()
            for slot in range(len(self.shard.trained))
        }
        self.shard.complete = False
        self.pushes = {}
        self.pulling = []
        self.due = self.shard.snapshots is not None and self.shard.updates % EVERY == 0

    def _save(self) -> None:
        self.due = False
        if self.shard.snapshots is not None:
            self.shard.snapshots.save_if_there_is_room(self.shard)

    def _beside(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Before the gradients of the first share, or when a worker begins."""
        if not rest:
            self.listening.answer(whose, header.answer(Kind.VALUES), saved(self.shard.beside))
            return
        if header.step != self.shard.updates or self.shard.complete:
            raise Unfit("what forwards change, of another step")
        try:
            # in a step that was forgotten they may have, too
            self.shard.changed |= loaded(rest[0].bytes)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise Unfit("what forwards change, and cannot be read") from error
        self.listening.answer(whose, header.answer(Kind.DONE))

    def _forget(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Once all have said so: until then somebody may look at it."""
        if header.step != self.shard.updates or not self.shard.complete:
            raise Unfit("no step that is there is to be forgotten")
        self.forgetting[header.sender] = whose, header
        if len(self.forgetting) == self.shard.strategy.shares:
            self.shard.complete = False
            self.pushes = {}
            for asking, asked in self.forgetting.values():
                self.listening.answer(asking, asked.answer(Kind.DONE))
            self.forgetting.clear()

    # ---- workers are gone, and begin again ---------------------------------------------------
    def _halt(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        """What they sent and nobody has looked at yet is of another training from here on."""
        self.job = header.version
        self.reader.forget()
        said = {"updates": self.shard.updates, "complete": self.shard.complete, **self.shard.last}
        self.listening.answer(whose, header.answer(Kind.GIVEN), json.dumps(said).encode())

    def _resume(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        finish, divisor, factor = header.numbers[:3]
        if finish and self.shard.complete:  # another server has made it
            self._make(divisor, factor)
        self.shard.complete = False
        self.shard.changed = {}
        self.pushes = {}
        self.forgetting.clear()
        self.listening.answer(whose, header.answer(Kind.DONE, version=self.shard.updates))

    def _remind(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Over one connection all comes in its order: what does not wait here has its answer,
        or was lost with another one.
        """
        waiting = [
            *self.pulling,
            *self.forgetting.values(),
            *(each for push in self.pushes.values() for each in push.asking()),
        ]
        there = (whose, header.call) in ((asking, asked.call) for asking, asked in waiting)
        self.listening.answer(whose, header.answer(Kind.WAIT if there else Kind.MISSED))

    # ---- answers -----------------------------------------------------------------------------
    def _tell(
        self,
        whose: bytes,
        header: Header,
        vectors: list[Tensor],
        shelf: Shelf | None = None,
        marked: bytes = b"",
        **more: Any,
    ) -> None:
        """One of the vectors; a copy, where the next update may come while it is read. shelf:
        otherwise, on which they are.
        """
        if header.slot >= len(self.shard.slots):
            raise Unfit("it is for a vector that is not here")
        if header.slot >= len(vectors):  # of what has no gradients
            raise Unfit("it is for a vector that has none")
        slot, vector = self.shard.slots[header.slot], vectors[header.slot]
        self.shard.sent += vector.nbytes
        said = header.answer(
            Kind.VALUES,
            dtype=slot.dtype,
            elements=slot.elements,
            version=self.shard.updates,
            lies=header.lies and shelf is not None and shelf.lies,
            **more,
        )
        self.listening.answer(
            whose,
            said,
            marked,
            bytes_of(vector.clone()) if shelf is None else shelf.sent(header.slot, said.lies),
        )

    def _look(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        """Whether this process can read where the asker's vectors lie, and where one of its own
        does.
        """
        reads = bool(rest) and not self.reader.against(rest[-1].buffer)
        shelf = self.shard.shelf
        self.listening.answer(
            whose,
            header.answer(Kind.DONE, numbers=(float(reads),)),
            shelf.against.encode(),
            shelf.place(0),
        )

    def _pull(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        own = self.shard.snapshots is None  # otherwise the office keeps the bound
        self._tell_values(
            self.bounded.asks(whose, header, not header.numbers[1]) if own else [(whose, header)]
        )

    def _tell_values(self, ready: Iterable[Question]) -> None:
        for whose, header in ready:
            with (
                in_eval_mode(self.shard.optimizer, self.shard.own)
                if header.numbers[0]
                else nullcontext()
            ):
                self._tell(whose, header, self.shard.values)

    def _apart(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        self._tell_values(self.bounded.is_apart(header.sender))
        self.listening.answer(whose, header.answer(Kind.DONE))

    def _tell_gradients(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        marked = iter(self.shard.anyone)
        every = [bytes(next(marked) for _ in slot.stretches) for slot in self.shard.trained]
        own = every[header.slot] if header.slot < len(every) else b""
        self._tell(
            whose, header, self.shard.gradients, marked=own, numbers=(float(self.shard.complete),)
        )

    def _state(self, whose: bytes, header: Header, rest: Sequence[Any]) -> None:
        try:
            text, vector = self.shard.state()
        except TypeError as error:
            raise Unfit(f"the optimizer's state cannot travel: {error}") from None
        self.listening.answer(
            whose,
            header.answer(Kind.VALUES, dtype=vector.dtype, elements=vector.numel()),
            text.encode(),
            bytes_of(vector),
        )
