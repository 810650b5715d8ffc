"""`paragrad measure`: alpha, beta, gamma of this machine's links, by playing small programs on
the wire itself.

    ping-pong    rank 0 sends, its peer sends back: one way is half of it stream       rank 0
    sends one after the other, until its peer has the last: the time per message CPU
    what both use meanwhile, in user and kernel, per message

What is measured is what an exchange pays: torch.distributed, gloo or shm, and the Python of the
wire. The numbers are fitted so that the clock, playing the same programs, takes the same time.

Other work on the machine only ever adds time, and comes and goes: every size is measured in
many short rounds, in turn with all others. A low quantile of the rounds is what the link can
do; a high one, fitted apart, what it does when it is disturbed.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain, repeat

import numpy as np
import torch

from paragrad.errors import Refused
from paragrad.executors.machine import Link, Machine
from paragrad.executors.transport import Parts, Play
from paragrad.launch import Ranks
from paragrad.notation.choices import unknown
from paragrad.runtime.launcher_env import cores, load
from paragrad.runtime.rendezvous import (
    check_interfaces,
    joined_from_environment,
    launched_size,
    ranks_here,
)
from paragrad.runtime.world import World
from paragrad.schedules.actions import Action, Recv, Send
from paragrad.shm.region import unavailable

SIZES = (64, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes
BRIEF = (64, 1 << 14, 1 << 18)
MOMENT = 0.03  # seconds of one measurement, about
PARTS = 4  # messages of a stream that may be under way at once
ROUNDS = 9  # of each size, in turn
# quantiles of the rounds
CAN = 0.25
DISTURBED = 0.9
ABOVE = 1.25  # of the line through the other points: measured anew
AGAIN = 3  # times at most: a link may really have steps
# of a rank, with its peer, so many times
Program = Callable[[int, int, int], list[Action]]


def measured_link(
    world: World, sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS, peer: int = 1
) -> tuple[Link, float]:
    """(the link between ranks 0 and `peer`, largest relative error of a straight line through
    its points). Collective.
    """
    seen = {size: Seen(world, size, peer) for size in sizes}
    wanted = list(sizes)
    for _ in range(1 + AGAIN):
        for _ in range(rounds):
            for size in wanted:
                seen[size].measure()
        wanted = world.agreed(
            above_the_others([(size, seen[size].quantile(CAN)[1]) for size in sizes])
        )
        if not wanted:
            break
    link, error = fitted([(size, *seen[size].quantile(CAN)) for size in sizes])
    disturbed, _ = fitted([(size, *seen[size].quantile(DISTURBED)) for size in sizes])
    return world.agreed((replace(link, disturbed=disturbed), error))  # type: ignore[no-any-return]


@dataclass
class Seen:
    """What was seen of messages of one size, round by round: seconds one way, seconds from one
    of a stream to the next, CPU seconds of one side per message.
    """

    world: World
    size: int
    peer: int
    rounds: list[tuple[float, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vector = torch.zeros(PARTS * self.size // 4)
        self.times: dict[Program, int] = {
            program: self._times(program) for program in (_ping_pong, _stream)
        }

    def measure(self) -> None:
        """Another round. Collective."""
        way, _ = self._each(_ping_pong)
        self.rounds.append((way / 2, *self._each(_stream)))

    def quantile(self, which: float) -> tuple[float, float, float]:
        """So large a part of the rounds was quicker."""
        one_way, gap, busy = np.quantile(np.array(self.rounds), which, axis=0).tolist()
        return one_way, gap, busy

    def _times(self, program: Program) -> int:
        """How often it is played in a round."""
        first = _played(self.world, self.vector, program, self.peer, PARTS)[0] / PARTS
        return int(
            self.world.agreed(
                max(PARTS if program is _stream else 2, min(300, int(MOMENT / max(first, 1e-6))))
            )
        )

    def _each(self, program: Program) -> tuple[float, float]:
        """(seconds until both sides are done, their mean CPU seconds) of one turn of a
        program.
        """
        times = self.times[program]
        taken = torch.tensor(
            _played(self.world, self.vector, program, self.peer, times), dtype=torch.float64
        )
        both = torch.stack(
            [each for rank, each in enumerate(self.world.gathered(taken)) if rank in (0, self.peer)]
        )
        return float(both[:, 0].max()) / times, float(both[:, 1].mean()) / times


def above_the_others(points: list[tuple[int, float]]) -> list[int]:
    """Sizes that took longer than the line through their neighbours says: other work may have
    been what took so long.
    """
    found = []
    for place in range(1, len(points)):
        one, other = (place - 1, place + 1) if place + 1 < len(points) else (place - 2, place - 1)
        if one >= 0 and points[place][1] > ABOVE * Link(
            0.0, 0.0, points=(points[one], points[other])
        ).held(points[place][0]):
            found.append(points[place][0])
    return found


def fitted(found: list[tuple[int, float, float, float]]) -> tuple[Link, float]:
    """The link of (bytes, seconds one way, seconds between messages of a stream, CPU seconds of
    one side per message).

    A message holds its ways for as long as a stream shows: a link may let a first message
    through at once, and no more. What is missing to the time of one way, beside both sides' own
    work, is flight.
    """
    sizes, ways, gaps, busy = (np.array(column, dtype=float) for column in zip(*found, strict=True))
    overhead = float(min(busy.min(), ways.min() / 3))
    work = max(0.0, float(((busy - overhead) / sizes)[len(found) // 2 :].mean()))
    held = np.maximum.accumulate(gaps)  # more bytes never take less
    latency = max(0.0, float((ways - 2 * overhead - held).min()))
    whole = held + 2 * overhead + latency
    # relative errors count
    lines = np.stack([np.ones_like(sizes), sizes], axis=1) / whole[:, None]
    alpha, beta = np.linalg.lstsq(lines, held / whole, rcond=None)[0]
    alpha = max(float(alpha), 0.0)
    beta = max(float(beta), 1e-15)
    error = float((np.abs(alpha + beta * sizes - held) / whole).max())
    return Link(
        alpha,
        beta,
        latency,
        overhead,
        work,
        tuple(zip(map(int, sizes), held.tolist(), strict=True)),
    ), error


def _ping_pong(rank: int, peer: int, times: int) -> list[Action]:
    turn: list[Action] = [Send(peer, 0), Recv(peer, 0)] if rank == 0 else [Recv(0, 0), Send(0, 0)]
    return list(chain.from_iterable(repeat(turn, times)))


def _stream(rank: int, peer: int, times: int) -> list[Action]:
    """From part to part, as into one alone the next could be asked for only when the last is
    there.
    """
    slots = [number % PARTS for number in range(times)]
    return [Send(peer, slot) if rank == 0 else Recv(0, slot) for slot in slots]


def _played(
    world: World, vector: torch.Tensor, program: Program, peer: int, times: int
) -> tuple[float, float]:
    """(seconds, CPU seconds) of a program on this rank."""
    world.barrier()
    start = time.perf_counter()
    used = time.process_time()
    if world.rank in (0, peer):
        Play(program(world.rank, peer, times), Parts(vector, PARTS), world).run()
    return time.perf_counter() - start, time.process_time() - used


def added(bytes_: int = 1 << 20) -> float:
    """gamma: seconds per byte added, in a vector of that many bytes."""
    one = torch.zeros(bytes_ // 4)
    other = torch.ones(bytes_ // 4)
    return _quickest(lambda: one.add_(other)) / bytes_


def memory_rate() -> float:
    """Bytes read and written per second by a copy of 64 MiB."""
    one = torch.zeros(1 << 24)
    other = torch.ones(1 << 24)
    return 2 * 4 * one.numel() / _quickest(lambda: one.copy_(other))


def matmul_rate(width: int = 512) -> float:
    """Operations per second of a product of two square matrices, one thread."""
    one = torch.rand(width, width)
    other = torch.rand(width, width)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 2 * width**3 / _quickest(lambda: one @ other)
    finally:
        torch.set_num_threads(threads)


def _quickest(work: Callable[[], object], times: int = 15) -> float:
    """The lower quartile of some runs after two more."""
    taken = []
    for _ in range(times + 2):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return float(np.quantile(taken[2:], CAN))


def links_of(world: World, peer: int = 1) -> tuple[str, Link, float]:
    """(name, link, error of its line) of the backend of this world, between ranks 0 and `peer`.
    Collective.
    """
    link, error = measured_link(world, peer=peer)
    return str(world.backend), link, error


def ranks_on_hosts(world: World) -> list[int]:
    """Of every rank, how many ranks are on its host. Collective."""
    return [int(each) for each in world.gathered(torch.tensor([ranks_here() or world.size]))]


def first_elsewhere(here: list[int]) -> int:
    """The first rank of the next host, or rank 1 where there is none. here: as `ranks_on_hosts`
    says.
    """
    return here[0] if here[0] < len(here) else 1


def machine_with(found: list[tuple[str, Link, float]], hosts: int = 1) -> Machine:
    """What was measured of the links, which join so many hosts, and of this process's core and
    memory now.
    """
    over = (
        f", gloo over {os.environ['GLOO_SOCKET_IFNAME']}"
        if "GLOO_SOCKET_IFNAME" in os.environ
        else ""
    )
    return Machine(
        links={name: link for name, link, _ in found},
        gamma=added(),
        cores=cores(),
        measured=f"{date.today()}, {platform.node()}, {platform.machine()}, torch "
        f"{torch.__version__}{over}",
        errors={name: error for name, _, error in found},
        memory=memory_rate(),
        matmul=matmul_rate(),
        hosts=hosts,
    )


@contextmanager
def _over(interface: str | None) -> Iterator[None]:
    """Let gloo talk over an interface meanwhile."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        if interface and before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        elif interface and before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def measure(backend: str = "both", interface: str | None = None) -> Machine | None:
    """Measure this host's links, or, under a launcher, that between rank 0 and the first of the
    next host, where there is one; None on other ranks. Raises Refused.

    backend: shm, gloo or both;  interface: what gloo talks over.
    """
    if backend not in ("shm", "gloo", "both"):
        raise Refused(unknown("backend", backend, ("shm", "gloo", "both")))
    with _over(interface):
        check_interfaces()
        before = load()
        found = _between_hosts() if launched_size() is not None else _on_this_host(backend)
        return found and replace(found, load=before)


def _between_hosts() -> Machine | None:
    if launched_size() == 1:
        raise Refused("a link has two ends; start 2 ranks")
    with joined_from_environment("gloo") as world:
        here = ranks_on_hosts(world)
        link = links_of(world, peer=first_elsewhere(here))
        return (
            machine_with([link], hosts=1 if here[0] == world.size else 2)
            if world.rank == 0
            else None
        )


def _on_this_host(backend: str) -> Machine:
    why = unavailable()  # shm is for hosts of Linux
    if backend == "shm" and why:
        raise Refused(f"{why}; measure gloo: --backend gloo")
    names = [
        name
        for name in ("gloo", "shm")
        if backend in (name, "both") and not (name == "shm" and why)
    ]
    with Ranks(2) as ranks:
        found = [ranks.run(links_of, size=2, backend=name, threads=1)[0] for name in names]
    return machine_with(found)
