"""The exchange of `server(n, servers=m)`: a worker's, which asks all servers, and a server's, which answers.

In a step a worker pushes its share's gradients, each server its slice of them. Under bsp it is told the sums of all shares, and
by how much they are to be divided and clipped it tells the servers, which update once and answer with the parameters. Otherwise
it pushes its mean gradient, as much of a full batch's as its share is of one, and pulls before it computes again.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.errors import StepFailed
from paragrad.record.log import Log
from paragrad.strategies.server import Server
from paragrad.strategies.strategy import ELEMENT
from paragrad.techniques.exchange import Exchange, Replica
from paragrad.techniques.layout import State, state_together
from paragrad.techniques.served.header import Header, Kind, bytes_of, vector_of
from paragrad.techniques.served.shard import Shard
from paragrad.techniques.served.slicing import Slot, fill, held, marks, places, slots_of, trained_of
from paragrad.techniques.served.sockets import Address, Calling, Keys, Listening
from paragrad.techniques.slices import Stretch, slices
from paragrad.techniques.updating import has_modes
from paragrad.world.launched import address, launched
from paragrad.world.world import World

SHARE = 4               # times its slice that a server's state is at most, as it travels: Adam keeps two of it


class _Side(Exchange):
    """What both have: slices, keys, and who is where. Collective."""

    def __init__(self, strategy: Server, replica: Replica, world: World, log: Log) -> None:
        super().__init__(replica)
        self.strategy, self.log, self.everyone = strategy, log, world
        self.names, self.parameters = trained_of(dict(replica.module.model.named_parameters()))
        lengths = [each.numel() for each in self.parameters]
        kind = ELEMENT if strategy.servers > 1 else "whole"
        cut = slices(replica.optimizer, kind, lengths, strategy.servers, grain=1)[0] if kind == ELEMENT else [
            [Stretch(index, 0, length) for index, length in enumerate(lengths)]]
        self.slots = [slots_of(each, self.parameters) for each in cut]
        self.longest = max((slot.nbytes for slots in self.slots for slot in slots), default=0)
        self.keys = Keys.made()
        self.workers = world.among([range(strategy.workers), range(strategy.workers, world.size)])

    def _met(self, own: Any) -> tuple[int, list[Any]]:
        """The training's number, and what every rank says of itself. Collective: by what made the world, which is trusted."""
        told = self.everyone.collected((secrets.randbits(64), own))
        every = self.everyone.agreed(told)
        return every[0][0], [each for _, each in every]

    def finish(self, weight: float, loss: float) -> None:
        raise NotImplementedError

    def counted(self) -> list[float]:
        raise NotImplementedError


class Serving(_Side):
    """A server's."""

    def __init__(self, strategy: Server, replica: Replica, world: World, log: Log) -> None:
        super().__init__(strategy, replica, world, log)
        self.number = world.rank - strategy.workers
        self.listening = Listening(self.longest, own_host(world), self.keys)
        job, told = self._met(self.listening.address)
        self.listening.allow(each for each in told[:strategy.workers] if each)
        self.shard = Shard(strategy, replica, self.slots[self.number], self.names, self.parameters, log, job, replica.full)
        self.largest = 2 * self.shard.nbytes

    def serve(self) -> None:
        self.shard.serve(self.listening, self.strategy.workers, self.everyone.timeout)
        if self.log.recorder:
            self.log.recorder.write("server", number=self.number, **self.shard.told())

    def close(self) -> None:
        self.listening.close()


class Asking(_Side):
    """A worker's."""

    def __init__(self, strategy: Server, replica: Replica, world: World, log: Log) -> None:
        super().__init__(strategy, replica, world, log)
        self.step, self.full = replica.steps, replica.full
        self.number, self.sender = world.rank, secrets.randbits(63)
        self.job, told = self._met(self.keys.public)
        servers: Sequence[Address] = told[strategy.workers:]
        self.calling = Calling(servers, SHARE * self.longest, self.keys, world.timeout)
        self.vectors = [[torch.empty(slot.elements, dtype=slot.dtype) for slot in slots] for slots in self.slots]
        self.largest = sum(each.nbytes for vectors in self.vectors for each in vectors)
        self.versions = [0] * strategy.servers
        self.told = [0.0] * 4
        self.square = 0.0

    # ---- in a step -----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.refuse_refrozen()
        if not self.strategy.waits:
            self._pull()

    def finish(self, weight: float, loss: float) -> None:
        self.told = [weight, loss, float(self.stop), self.doubt]
        if self.strategy.waits:
            self._push((weight, loss, float(self.stop), self.doubt), self.step, self.number)

    def _push(self, numbers: tuple[float, ...], ticket: int, share: int) -> None:
        gradients = [each.grad for each in self.parameters]
        count = 0
        for server, slots in enumerate(self.slots):
            for number, slot in enumerate(slots):
                vector = self.vectors[server][number]
                fill(slot, gradients, vector)
                self.calling.ask(server, self._header(Kind.PUSH, step=ticket, share=share, slot=number, dtype=slot.dtype,
                                                      elements=slot.elements, numbers=numbers, version=self.versions[server]),
                                 marks(slot, gradients), bytes_of(vector))
                self.count("gradients", vector.nbytes, computed=False)
                count += 1
        with self.log.detail("push", "wait"):
            if self.strategy.waits:
                self._heard()
            else:
                for server, header, _ in self.calling.answers(count):
                    self.versions[server] = header.version

    def _heard(self) -> None:
        """The sums over all shares, the same from every server, and the norm over all."""
        self.square = 0.0
        for _, header, _ in self.calling.answers(len(self.slots)):
            self.told, self.square = list(header.numbers[:4]), self.square + header.numbers[4]

    def counted(self) -> list[float]:
        return self.told

    def average(self, weight: float) -> None:
        """The servers do, in the update."""
        if not self.strategy.waits:
            super().average(weight)

    def uncounted(self) -> None:
        if self.strategy.waits:
            super().uncounted()

    def update(self) -> None:
        self.optimizer._opt_called = True               # type: ignore[attr-defined]    # schedulers want to know
        if self.strategy.waits:
            factor = 1.0
            if self.clip_norm is not None:              # as torch.nn.utils.clip_grad_norm_
                factor = min(1.0, self.clip_norm / (math.sqrt(self.square) / self.weight + 1e-6))
            self._values(Kind.UPDATE, numbers=(self.weight, factor))
        elif self.weight:
            if self.clip_norm is not None:              # by its own: nobody knows the others'
                nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
            mine = [each.grad for each in self.parameters if each.grad is not None]
            torch._foreach_mul_(mine, self.own_samples / self.full)
            self._push((self.weight, 0.0, 0.0, float(self.own_samples)), self.step * self.strategy.workers + self.number, 0)
        self.step += 1

    # ---- parameters come ---------------------------------------------------------------------------------------------------
    def _header(self, kind: Kind, **more: Any) -> Header:
        return Header(kind, self.job, self.sender, **{"step": self.step, "shares": self.strategy.shares, **more})

    def _pull(self, for_tests: bool = False) -> None:
        self._values(Kind.PULL, numbers=(float(for_tests),))

    def _values(self, kind: Kind, numbers: tuple[float, ...]) -> None:
        """Ask every server; what they have becomes the parameters."""
        with self.log.detail(kind.name.lower(), "wait"), torch.no_grad():
            for server, slot, header, vector in self._vectors(kind, numbers):
                torch._foreach_copy_(places(slot, self.parameters), slot.views(vector))
                self.versions[server] = header.version

    def _vectors(self, kind: Kind, numbers: tuple[float, ...]) -> Iterator[tuple[int, Slot, Header, Tensor]]:
        for server in range(len(self.slots)):
            self.calling.ask(server, self._header(kind, numbers=numbers))
        for server, header, rest in self.calling.answers(sum(map(len, self.slots))):
            slot = self.slots[server][header.slot]
            if header.kind != Kind.VALUES or header.elements != slot.elements or header.dtype != slot.dtype:
                raise StepFailed(f"server {server} answered with another vector than was asked for")
            yield server, slot, header, vector_of(header, rest[1])

    # ---- what others look at -------------------------------------------------------------------------------------------
    def gradients(self) -> dict[str, Tensor | None]:
        if not self.strategy.waits:
            return super().gradients()
        found: dict[str, Tensor | None] = {name: None for name, _ in self.summed.model.named_parameters()}
        whole = [torch.zeros_like(each) for each in self.parameters]
        for _, slot, header, vector in self._vectors(Kind.GRADIENTS, ()):
            into = places(slot, whole)
            torch._foreach_copy_(into, slot.views(vector))
            if header.numbers[0]:                       # not averaged yet
                torch._foreach_div_(into, self.weight)
            found.update({self.names[each.index]: whole[each.index] for each in slot.stretches})
        return found

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._apart(has_modes(self.optimizer)):
            yield

    def standing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.strategy.waits else self._apart(False)

    @contextlib.contextmanager
    def _apart(self, for_tests: bool) -> Iterator[None]:
        """The servers' parameters, while no worker pushes. Collective of the workers."""
        if self.strategy.waits and not for_tests:
            yield
            return
        assert self.workers is not None
        before = [each.detach().clone() for each in self.parameters]
        self.workers.barrier()
        self._pull(for_tests)
        self.workers.barrier()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([each.detach() for each in self.parameters], before)

    def state(self) -> State:
        parts = []
        for server, slots in enumerate(self.slots):
            self.calling.ask(server, self._header(Kind.STATE))
            for _, header, rest in self.calling.answers(1):
                stretches = [held(each, self.names, self.parameters) for slot in slots for each in slot.stretches]
                parts += list(zip(stretches, read_state(bytes(rest[0]), vector_of(header, rest[1]), len(stretches)),
                                  strict=True))
        return state_together(parts)

    def dismiss(self) -> None:
        for server in range(self.strategy.servers):
            self.calling.ask(server, self._header(Kind.END))
        list(self.calling.answers(self.strategy.servers))

    def close(self) -> None:
        self.calling.close()


def read_state(text: bytes, vector: Tensor, stretches: int) -> list[dict[str, Any]]:
    """What `Shard` tells of its optimizer's state, by stretch."""
    found: list[dict[str, Any]] = [{} for _ in range(stretches)]
    start = 0
    for number, what, *said in json.loads(text):
        if len(said) == 1:
            found[number][what] = said[0]
            continue
        dtype, shape = getattr(torch, said[0]), said[1]
        stop = start + math.prod(shape) * dtype.itemsize
        found[number][what] = vector[start:stop].clone().view(dtype).reshape(shape)
        start = stop
    return found


def own_host(world: World) -> str | None:
    """By which address the others reach this process; None where all are on this host."""
    told = launched()
    if world.backend == "shm" or told is None or told.on_one_host:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:        # connecting sends nothing
        probe.connect((place[0] if isinstance(place := address(told), tuple) else socket.gethostname(), 9))
        return str(probe.getsockname()[0])
