"""The exchange of a worker of `server(n, servers=m)`, which asks all servers.

In a step a worker pushes its share's gradients, each server its slice of them. Under bsp it is
told the sums of all shares, and by how much they are to be divided and clipped it tells the
servers, which update once and answer with the parameters. Otherwise it pushes its mean
gradient, as much of a full batch's as its share is of one, and pulls before it computes again.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.exchange import Exchange, Replica
from paragrad.engine.layout import State, state_together
from paragrad.engine.optimizer.modes import has_modes
from paragrad.engine.optimizer.update_probe import clip_factor
from paragrad.engine.state.values import same
from paragrad.errors import StepFailed
from paragrad.parallel.server.client import Calling
from paragrad.parallel.server.compressed_push import parcel_of
from paragrad.parallel.server.curve_keys import Keys
from paragrad.parallel.server.endpoints import Meeting, met, workers_of
from paragrad.parallel.server.message_header import Header, Kind, Unfit
from paragrad.parallel.server.model_buffers import loaded, put, room_for, saved, values_of
from paragrad.parallel.server.parameter_partition import (
    Slot,
    cut_of,
    fill,
    held,
    marks,
    places,
    spread,
    state_of,
)
from paragrad.parallel.server.request_handler import APPLIED
from paragrad.parallel.server.shared_buffer import Reader, Shelf
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.server import Server

# seconds after which a worker reminds of a question, where a server may have died
AGAIN = 1.0
# times its slice that a server's state is at most, as it travels: Adam keeps two of it
SHARE = 4


def dismissed(meeting: Meeting, seconds: float) -> None:
    """Servers are told to end, by whoever started them. Raises StepFailed where one does not
    answer.
    """
    with contextlib.closing(Calling(meeting.addresses, 0, Keys.made(), seconds, AGAIN)) as calling:
        list(
            calling.asked(
                (server, Header(Kind.END, meeting.job), ()) for server in range(meeting.servers)
            )
        )


class Asking(Exchange):
    def __init__(
        self, strategy: Server, replica: Replica, world: World, log: Log, meeting: Meeting | None
    ) -> None:
        super().__init__(replica)
        self.strategy = strategy
        self.log = log
        self.meeting = meeting
        keys = (meeting and meeting.keys) or Keys.made()
        self.cut = cut_of(strategy, replica.optimizer, replica.module.model, replica.follows)
        # as servers know it, where somebody may have to go on with it
        self.beside: dict[str, Tensor] | None = None
        if meeting and not strategy.hands_out and not world.rank:
            self.beside = {
                name: each.clone() for name, each in values_of(replica.module.model).items()
            }
        self.step = replica.steps
        self.full = replica.full
        self.number = world.rank
        self.sender = secrets.randbits(63)
        self.ticket = meeting.ticket if meeting else None
        self.workers: World | None = None  # where they are ranks of one
        if meeting:
            self.job = meeting.job
            servers = meeting.addresses
            self.workers = None if strategy.hands_out else world
        else:
            self.workers = workers_of(strategy, world)
            self.job, told = met(world, keys.public)
            servers = told[strategy.workers :]
            # who comes before it is allowed to is sent away for good
            world.barrier()
        longest = max(SHARE * self.cut.longest, room_for(replica.module.model) if meeting else 0)
        self.calling = Calling(
            servers,
            longest,
            keys,
            world.timeout,
            AGAIN if strategy.hands_out and meeting else math.inf,
            office=meeting.office if meeting and meeting.told else None,
        )
        against = (
            "the servers are on several hosts"
            if not all(each.on_host for each in servers)
            else (
                "who is late may be at the next ones when they are read" if strategy.backup else ""
            )
        )
        self.shelf = Shelf(
            [(slot.dtype, slot.elements) for _, _, slot in self.cut.every()], against
        )
        self.parcels = [parcel_of(strategy, slot) for _, _, slot in self.cut.every()]
        self.seed = replica.seed
        # all workers at once to the same server would fill its link while those of the others
        # rest
        self.order = sorted(
            enumerate(self.cut.every()),
            key=lambda each: (each[1][0] - self.number) % strategy.servers,
        )
        self.reader = Reader(strategy.servers)
        self.largest = sum(each.nbytes for each in self.shelf.vectors)
        self.versions = [0] * strategy.servers
        self.told = [0.0] * 4
        self.square = 0.0
        self.version = 0
        self.became = APPLIED
        # the servers have the sum of a step that is not made yet
        self.summing = False
        self.pulled: list[Tensor] = []  # what forwards change, as it was pulled

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.refuse_refrozen()
        self.became = APPLIED
        # it was made up to its update, to be looked at
        if self.summing:
            list(
                self.calling.asked(
                    (server, self._header(Kind.FORGET), ()) for server in self._servers()
                )
            )
            self.summing = False
        if self.strategy.hands_out:
            self._pull()

    def finish(self, weight: float, loss: float) -> None:
        self.told = [weight, loss, float(self.stop), self.doubt]
        if not self.strategy.hands_out:
            self.summing = True
            numbers = weight, loss, float(self.stop), self.doubt, float(self.own_samples)
            self._tell_beside()
            self._push(numbers, self.step, self.strategy.shares, self.number)

    @cached_property
    def lie(self) -> tuple[bool, bool]:
        """Do gradients, and parameters, lie where the other side can read them? That depends on
        the system: servers are asked, once.
        """
        against = [self.shelf.against, self.shelf.against]
        questions = (
            (server, self._header(Kind.LOOK, lies=True), (b"", self.shelf.place(0)))
            for server in self._servers()
        )
        for server, header, rest in self.calling.asked(questions if self.shelf.lies else ()):
            if not header.numbers[0]:
                against[0] = f"server {server} cannot read them"
            against[1] = against[1] or bytes(rest[0]).decode() or self.reader.against(rest[1])
        for what, why in zip(("gradients", "parameters"), against, strict=True):
            self.log.choice(
                what,
                "travel" if why else "lie in shared memory",
                why or "servers and workers are on one host",
            )
        return not against[0], not against[1]

    def _push(
        self, numbers: tuple[float, ...], ticket: int, shares: int = 1, share: int = 0
    ) -> None:
        """shares: that make a step. Where all wait for all, what comes back are the sums over
        all shares, the same from every server, and of each the square of its part of the
        norm.
        """
        own = [
            each.detach()
            for each in self.cut.tensors(self.summed.model)[len(self.cut.parameters) :]
        ]
        lies, _ = self.lie
        gradients = [
            *(each.grad for each in self.cut.parameters),
            *(self._change(new, old) for new, old in zip(own, self.pulled, strict=True)),
        ]

        def questions() -> Iterator[tuple[int, Header, Any]]:
            for place, (server, number, slot) in self.order:
                vector = self.shelf.vectors[place]
                parcel = self.parcels[place]
                fill(slot, gradients, vector)  # while what came before travels
                frame = (
                    parcel.sent(vector, self.seed, ticket, share, place)
                    if parcel
                    else self.shelf.sent(place, lies)
                )
                self.count("gradients", parcel.nbytes if parcel else vector.nbytes, computed=False)
                yield (
                    server,
                    self._header(
                        Kind.PUSH,
                        step=ticket,
                        share=share,
                        shares=shares,
                        slot=number,
                        dtype=slot.dtype,
                        elements=slot.elements,
                        version=self.versions[server],
                        lies=lies and not parcel,
                        numbers=numbers,
                    ),
                    (marks(slot, gradients), frame),
                )

        squares: dict[int, float] = {}
        with self.log.detail("push", "wait"):
            for server, header, _ in self.calling.asked(questions()):
                if self.strategy.hands_out:
                    if not server:  # what the first one says is recorded
                        self.became = int(header.numbers[0])
                        self.version = header.version
                else:
                    self.told = list(header.numbers[:4])
                    squares[server] = header.numbers[4]
        self.square = sum(squares.values())

    def _tell_beside(self) -> None:
        """What a forward changed beside the parameters, for whoever may have to go on. It is
        exact, and so the same on all workers: the first one tells.
        """
        if self.beside is None:
            return
        now = values_of(self.summed.model)
        if changed := {
            name: each for name, each in now.items() if not same(each, self.beside.get(name))
        }:
            text = saved(changed)
            self.count("beside", len(text), computed=False)
            list(self.calling.asked([(0, self._header(Kind.BESIDE), (text,))]))
            self.beside |= {name: each.detach().clone() for name, each in changed.items()}

    def _change(self, new: Tensor, old: Tensor) -> Tensor:
        """Of what a forward changed, as much as its share is of a full batch; under backup the
        server takes the mean.
        """
        # not of infinity from itself: a mask's
        change = torch.where(new == old, torch.zeros_like(new), new - old)
        return (
            change
            if self.strategy.waits or not change.is_floating_point()
            else change * (self.own_samples / self.full)
        )

    def _servers(self) -> range:
        return range(self.strategy.servers)

    def counted(self) -> list[float]:
        return self.told

    def average(self, weight: float) -> None:
        """The servers do, in the update."""
        self.weight = weight
        if not self.strategy.waits:
            super().average(weight)

    def uncounted(self) -> None:
        if not self.strategy.hands_out:
            super().uncounted()

    @property
    def again(self) -> bool:  # type: ignore[override]
        return self.became != APPLIED

    def update(self) -> None:
        # schedulers want to know
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        ticket = (
            self.ticket.number if self.ticket else self.step * self.strategy.workers + self.number
        )
        numbers = (
            self.told[0],
            float(self.ticket.workers if self.ticket else 0),
            0.0,
            float(self.own_samples),
        )
        if not self.strategy.hands_out:
            factor = clip_factor(math.sqrt(self.square) / self.weight, self.clip_norm)
            self._values(Kind.UPDATE, numbers=(self.weight, factor))
            self.summing = False
        elif self.strategy.waits:
            assert self.ticket is not None  # it is handed out, or another strategy
            # who pulled later has done it for nothing
            self.versions = [self.ticket.after]
            self._push(numbers, ticket, self.ticket.wanted)
        elif not self.weight:  # nothing counts, and that is done
            for each in self.cut.parameters:
                each.grad = None
            self._push(numbers, ticket)
        else:
            if self.clip_norm is not None:  # by its own: nobody knows the others'
                nn.utils.clip_grad_norm_(self.cut.parameters, self.clip_norm)
            mine = [each.grad for each in self.cut.parameters if each.grad is not None]
            torch._foreach_mul_(mine, self.own_samples / self.full)
            self._push(numbers, ticket)
        self.step += 1

    # ---- parameters come ---------------------------------------------------------------------
    def _header(self, kind: Kind, **more: Any) -> Header:
        return Header(
            kind,
            self.job,
            self.sender,
            **{"step": self.step, "shares": self.strategy.shares, **more},
        )

    def _pull(self, for_tests: bool = False, for_step: bool = True) -> None:
        self._values(Kind.PULL, numbers=(float(for_tests), float(not for_step)))

    def take_over(self) -> None:
        """What servers have of a training becomes the model's, where others trained before."""
        self._pull()
        for _, _, rest in self.calling.asked([(0, self._header(Kind.BESIDE), ())]):
            put(self.summed.model, loaded(bytes(rest[0])))

    def _values(self, kind: Kind, numbers: tuple[float, ...]) -> None:
        """Ask every server; what they have becomes the parameters."""
        with self.log.detail(kind.name.lower(), "wait"), torch.no_grad():
            tensors = self.cut.tensors(self.summed.model)
            for server, slot, header, _, vector in self._vectors(kind, numbers):
                spread(vector, slot, tensors)
                self.versions[server] = header.version
            if self.strategy.hands_out:
                self.pulled = [
                    each.detach().clone() for each in tensors[len(self.cut.parameters) :]
                ]

    def _vectors(
        self, kind: Kind, numbers: tuple[float, ...]
    ) -> Iterator[tuple[int, Slot, Header, bytes, Tensor]]:
        lies = self.lie[1] and kind == Kind.UPDATE
        questions = [
            (server, self._header(kind, slot=number, share=turn, lies=lies, numbers=numbers), ())
            for turn, (_, (server, number, slot)) in enumerate(self.order)
            if not (slot.added and kind in (Kind.GRADIENTS, Kind.UPDATE))
        ]
        for server, header, rest in self.calling.asked(questions):
            slot = self.cut.slots[server][header.slot]
            if (
                header.kind != Kind.VALUES
                or header.elements != slot.elements
                or header.dtype != slot.dtype
                or (header.lies and not lies)
            ):
                raise StepFailed(f"server {server} answered with another vector than was asked for")
            try:
                vector = self.reader.vector(header, rest[1])
            except Unfit as error:
                raise StepFailed(
                    f"server {server} answered with a vector, and {error.told}"
                ) from error
            yield server, slot, header, bytes(rest[0]), vector

    # ---- what others look at -----------------------------------------------------------------
    def gradients(self) -> dict[str, Tensor | None]:
        if self.strategy.hands_out:
            return super().gradients()
        found: dict[str, Tensor | None] = {
            name: None for name, _ in self.summed.model.named_parameters()
        }
        whole = [torch.zeros_like(each) for each in self.cut.parameters]
        for _, slot, header, marked, vector in self._vectors(Kind.GRADIENTS, ()):
            into = places(slot, whole)
            torch._foreach_copy_(into, slot.views(vector))
            if header.numbers[0]:  # not averaged yet
                torch._foreach_div_(into, self.weight)
            found.update(
                {
                    self.cut.names[each.index]: whole[each.index]
                    for each, there in zip(slot.stretches, marked, strict=True)
                    if there
                }
            )
        return found

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._apart(has_modes(self.optimizer)):
            yield

    def standing(self) -> contextlib.AbstractContextManager[None]:
        return self._apart(False) if self.strategy.hands_out else contextlib.nullcontext()

    @contextlib.contextmanager
    def _apart(self, for_tests: bool) -> Iterator[None]:
        """The servers' parameters, while no worker pushes. Collective of the workers."""
        if not self.strategy.hands_out and not for_tests:
            yield
            return
        before = [each.detach().clone() for each in self.cut.tensors(self.summed.model)]
        # who is ahead waits for this one, and must come
        if self.workers is not None and self.strategy.bound is not None:
            list(
                self.calling.asked(
                    (server, self._header(Kind.APART), ()) for server in self._servers()
                )
            )
        self._meet()
        self._pull(for_tests, for_step=False)
        self._meet()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(
                    [each.detach() for each in self.cut.tensors(self.summed.model)], before
                )

    def _meet(self) -> None:
        # otherwise nobody is given something to train now
        if self.workers is not None:
            self.workers.barrier()

    def state(self) -> State:
        parts = []
        for server, header, rest in self.calling.asked(
            (server, self._header(Kind.STATE), ()) for server in self._servers()
        ):
            stretches = [
                held(each, self.cut.names, self.cut.parameters)
                for slot in self.cut.slots[server]
                if not slot.added
                for each in slot.stretches
            ]
            found = state_of(bytes(rest[0]), self.reader.vector(header, rest[1]), len(stretches))
            parts += list(zip(stretches, found, strict=True))
        return state_together(parts)

    def dismiss(self) -> None:
        if self.meeting is None:
            list(
                self.calling.asked(
                    (server, self._header(Kind.END), ()) for server in self._servers()
                )
            )

    def close(self) -> None:
        self.calling.close()
        self.shelf.close()
