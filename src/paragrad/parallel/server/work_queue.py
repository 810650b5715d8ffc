"""The office of a training whose workers wait for nobody: it hands out the samples, and knows
who is there.

A ticket is a share of a global batch in the exact order, or a part of a test, or what one
worker does for all at the end of an epoch. Every ticket is done once: of a worker that died, or
is silent for longer than the limit, another gets it. What a worker does late is refused by the
servers, who know which tickets they applied. An epoch ends when all its tickets are done, so a
test is of one model.

Under ssp(s) nobody gets a ticket who has done more than s more than the one who has done
fewest.

Who joins from elsewhere (`Guests`) is a member as any, under a number that is its key's alone;
but it has not the run's folder, so it keeps nothing there.
"""

from __future__ import annotations

import functools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from paragrad.parallel.server.message_header import Header, Kind, Unfit
from paragrad.parallel.server.sockets import Listening, heard, key_of

TRAIN = "train"
TEST = "test"
KEEP = "keep"
END = "end"
LATE = 2  # of a ticket: its gradient was of older parameters, and was not used


@dataclass(frozen=True)
class Ticket:
    """What one worker is to do. number: of all that are trained;  step, share: which part of
    which batch;  part of parts: of a test;  wanted: of how many shares the step after `after`
    updates is made (-1: nobody knows);  keep: a checkpoint ("checkpoint") or the model
    ("model") is to be kept, of `step` steps;  workers: that were there when it was given, by
    which tickets do not differ.
    """

    what: str
    number: int = 0
    epoch: int = 0
    step: int = 0
    share: int = 0
    part: int = 0
    parts: int = 1
    keep: str = ""
    wanted: int = 1
    after: int = -1
    workers: int = field(default=0, compare=False)


@dataclass
class Member:
    """A worker. done: tickets, counted from the fewest that anybody had done when it came;
    holds: what it is at;  since: when it got that, or asked;  trained: it has done so once;
    whose: the connection it asked over;  asking: whom to answer, while it waits;  answered: the
    number of its last question that was, and the answer.
    """

    number: int
    done: int
    since: float
    holds: Ticket | None = None
    trained: bool = False
    whose: bytes = b""
    asking: tuple[bytes, Header] | None = None
    answered: tuple[int, bytes] | None = None


class Guests(Protocol):
    """Those who join from elsewhere. keys: whose each number is;  admit: what one is told that
    asks to take part, of what it would train as text, or None while nothing can be said (it is
    reminded of it, and asked again); raises Unfit;  check: may this be said of a ticket? Raises
    Unfit;  did: it has done a ticket that it was given, and says this of it;  left: it has said
    so.
    """

    keys: dict[int, bytes]

    def admit(self, key: bytes, sender: int, text: bytes) -> bytes | None: ...

    def check(self, ticket: Ticket, said: dict[str, float]) -> None: ...

    def did(self, number: int, ticket: Ticket, said: dict[str, float]) -> None: ...

    def left(self, number: int) -> None: ...


@dataclass
class Office:
    """bound: of ssp, or None;  wanted: shares that a step waits for, or None;  limit: seconds
    for a ticket;  told_of(member, ticket, said): called when one was done for the first
    time.
    """

    job: int
    bound: int | None
    wanted: int | None
    limit: float
    told_of: Callable[[int, Ticket, dict[str, Any]], None]
    members: dict[int, Member] = field(default_factory=dict)
    left: deque[Ticket] = field(default_factory=deque)
    open: dict[Ticket, int] = field(default_factory=dict)  # who is at it
    # by number of a share: who was at it beside the last
    begun_again: dict[int, list[int]] = field(default_factory=dict)
    # updates of which all shares have been told of; of later ones somebody has
    made: int | None = None
    # of how many, by the number of the update
    told: dict[int, int] = field(default_factory=dict)
    gave: dict[int, Ticket] = field(default_factory=dict)  # to whom last
    ended: bool = False
    refused: Counter[str] = field(default_factory=Counter)
    guests: Guests | None = None

    def give(self, tickets: Iterable[Ticket]) -> None:
        """More to do."""
        self.left.extend(tickets)

    @property
    def idle(self) -> bool:
        """Is everything done that was given?"""
        return not self.left and not self.open

    # ---- messages ----------------------------------------------------------------------------
    def taken(self, listening: Listening, frames: list[Any]) -> None:
        """A worker says what it has done, and asks for more."""
        heard(
            listening, frames, self.job, functools.partial(self._question, listening), self.refused
        )

    def _question(
        self, listening: Listening, whose: bytes, header: Header, rest: Sequence[Any]
    ) -> None:
        if header.kind == Kind.REMIND:
            there = (whose, header.call) in (
                (each.whose, each.asking[1].call) for each in self.members.values() if each.asking
            )
            listening.answer(whose, header.answer(Kind.WAIT if there else Kind.MISSED))
            return
        if header.kind not in (Kind.NEXT, Kind.JOIN, Kind.LEAVE) or len(rest) != 1:
            raise Unfit(f"{header.kind.name} is no question of a worker's")
        key = key_of(whose)
        if header.kind == Kind.JOIN:
            if self.guests is None or key is None:
                raise Unfit("nobody joins this training here")
            if self.ended:
                raise Unfit("the training is over")
            if (told := self.guests.admit(key, header.sender, rest[0].bytes)) is not None:
                listening.answer(whose, header.answer(Kind.JOINED), told)
            return
        number, ticket, said = self._read(rest[0].bytes)
        guests = self.guests.keys if self.guests else {}
        if guests.get(number) != key:
            raise Unfit("a number that is somebody else's")
        if key is not None and self.guests is not None:
            if ticket not in (None, self.gave.get(number)):
                raise Unfit("a ticket that it was not given")
            if ticket is not None:
                self.guests.check(ticket, said)
        member = self.members.get(number)
        if member is not None and member.answered is not None and member.answered[0] == header.call:
            # it asked twice
            listening.answer(whose, header.answer(Kind.GIVEN), member.answered[1])
        elif (
            member is not None
            and member.asking is not None
            and member.asking[1].call == header.call
        ):
            member.whose = whose
            member.asking = (whose, header)
            listening.answer(whose, header.answer(Kind.WAIT))
        else:
            self._asked(number, ticket, said, (whose, header))
            if self.guests is not None and key is not None and ticket is not None:
                self.guests.did(number, ticket, said)
        if header.kind == Kind.LEAVE and self.guests is not None and key is not None:
            self.lost(number)
            self.guests.left(number)
            listening.answer(whose, header.answer(Kind.DONE))

    @staticmethod
    def _read(text: bytes) -> tuple[int, Ticket | None, dict[str, float]]:
        try:
            number, done, said = json.loads(text)
            ticket = Ticket(**done) if done else None
            return (
                int(number),
                ticket,
                {str(name): float(value) for name, value in dict(said).items()},
            )
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise Unfit("a question that cannot be read") from error

    def _asked(
        self, number: int, ticket: Ticket | None, said: dict[str, Any], asking: tuple[bytes, Header]
    ) -> None:
        now = time.monotonic()
        member = self.members.get(number)
        # it does not say what became of that
        if member is not None and member.holds not in (None, ticket):
            self.lost(number)
            member = None
        if member is None:
            fewest = min((each.done for each in self.members.values()), default=0)
            member = Member(number, fewest, now)
            self.members[number] = member
        holder = self.open.pop(ticket, None) if ticket is not None else None
        if ticket is not None and holder is not None:
            # it may have brought it, and not said so yet
            if holder != number:
                self.begun_again.setdefault(ticket.number, []).append(holder)
            self._done(member, ticket, said)
        # it was late, and nobody else has begun
        elif ticket is not None and ticket in self.left:
            self.left.remove(ticket)
            self._done(member, ticket, said)
        member.whose = asking[0]
        member.asking = asking
        member.since = now
        member.holds = None

    def _done(self, member: Member, ticket: Ticket, said: dict[str, Any]) -> None:
        if ticket.what == TRAIN:
            member.trained = True
            late = said.get("became") == LATE  # it is to be done again
            if self.wanted is not None:
                self._made(int(said.get("version", -1)), 0 if late else 1, ticket)
            if late:
                self.left.appendleft(ticket)
                return
            member.done += 1
        self.told_of(member.number, ticket, said)

    def _made(self, version: int, shares: int, ticket: Ticket) -> None:
        """Somebody says that so many updates were made; of the last one a share was, or was
        not, its own.
        """
        if self.made is None:
            # who came first was late: nothing was made since
            self.made = version
        # the server is behind: it was started again
        if not shares and ticket.after == self.made and version < self.made:
            self.made = version
            self.told.clear()
        if version == self.made + 1:
            self.told[version] = self.told.get(version, 0) + shares
        while self.told.get(self.made + 1, 0) >= ticket.wanted:
            self.made += 1
            del self.told[self.made]

    def anew(self) -> None:
        """The server was started again, and counts from its snapshot."""
        self.made = None
        self.told.clear()

    def lost(self, number: int) -> None:
        """A worker is gone: what it was at is somebody else's."""
        member = self.members.pop(number, None)
        if (
            member is not None
            and member.holds is not None
            and self.open.get(member.holds) == number
        ):
            del self.open[member.holds]
            self.left.appendleft(member.holds)
            if member.holds.what == TRAIN:
                self.begun_again.setdefault(member.holds.number, []).append(number)

    def gone(self, whose: bytes) -> int | None:
        """Whose connection this was is lost, if it had no other since; its number."""
        number = next((each.number for each in self.members.values() if each.whose == whose), None)
        if number is not None:
            self.lost(number)
        return number

    def late(self) -> list[int]:
        """Who has been at a ticket for longer than the limit; they are lost until they ask
        again.
        """
        now = time.monotonic()
        found = [
            each.number
            for each in self.members.values()
            if each.holds is not None and now - each.since > self.limit
        ]
        for number in found:
            self.lost(number)
        return found

    def _may(self, member: Member, ticket: Ticket, fewest: int) -> bool:
        """A worker that has not trained yet knows less of the model; it tests where nobody
        has.
        """
        if ticket.what == TRAIN and self.told and ticket.number not in self.begun_again:
            # until all of a step have said so: then it is known how many are left
            return False
        if ticket.what == TRAIN:
            return self.bound is None or member.done - fewest <= self.bound
        joined = self.guests.keys if self.guests is not None and ticket.what == KEEP else {}
        able = [each for each in self.members.values() if each.number not in joined]
        return member.number not in joined and (
            member.trained or not any(each.trained for each in able)
        )

    def hand_out(self, listening: Listening) -> None:
        """Answer those who wait, as far as there is something for them."""
        fewest = min((each.done for each in self.members.values()), default=0)
        for member in sorted(self.members.values(), key=lambda each: each.since):
            if member.asking is None:
                continue
            if self.ended:
                ticket = Ticket(END)
            elif not self.left or not self._may(member, self.left[0], fewest):
                continue
            else:
                ticket = self.left.popleft()
                if self.wanted is not None and ticket.what == TRAIN:
                    remaining = 1 + sum(each.what == TRAIN for each in (*self.left, *self.open))
                    ticket = replace(
                        ticket,
                        wanted=min(self.wanted, remaining),
                        after=-1 if self.made is None else self.made,
                    )
                member.holds = replace(ticket, workers=len(self.members))
                ticket = member.holds
                self.open[ticket] = member.number
            self.gave[member.number] = ticket
            whose, header = member.asking
            member.asking = None
            member.since = time.monotonic()
            member.answered = header.call, json.dumps(asdict(ticket)).encode()
            listening.answer(whose, header.answer(Kind.GIVEN), member.answered[1])
