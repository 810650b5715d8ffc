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
from paragrad.executors.transport import ProgramRun, VectorParts
from paragrad.launch import Launcher
from paragrad.notation.choices import describe_unknown_name
from paragrad.runtime.launcher_env import count_cores, read_load_average
from paragrad.runtime.rendezvous import (
    check_network_interfaces,
    count_local_ranks,
    get_launched_size,
    join_launched_world,
)
from paragrad.runtime.world import World
from paragrad.schedules.actions import Action, Recv, Send
from paragrad.shm.region import explain_unavailable_shm

SIZES = (64, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes
FEW_SIZES = (64, 1 << 14, 1 << 18)
ROUND_SECONDS = 0.03  # seconds of one measurement, about
STREAM_PARTS = 4  # messages of a stream that may be under way at once
ROUNDS = 9  # of each size, in turn
# quantiles of the rounds
UNDISTURBED_QUANTILE = 0.25
DISTURBED_QUANTILE = 0.9
OUTLIER_RATIO = 1.25  # of the line through the other points: measured anew
MAX_REPEATS = 3  # times at most: a link may really have steps
# of a rank, with its peer, so many times
LinkProgram = Callable[[int, int, int], list[Action]]


def measure_link(
    world: World, sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS, peer: int = 1
) -> tuple[Link, float]:
    """(the link between ranks 0 and `peer`, largest relative error of a straight line through
    its points). Collective.
    """
    seen = {size: SizeMeasurement(world, size, peer) for size in sizes}
    wanted = list(sizes)
    for _ in range(1 + MAX_REPEATS):
        for _ in range(rounds):
            for size in wanted:
                seen[size].measure_round()
        wanted = world.broadcast_object(
            find_outlier_sizes(
                [(size, seen[size].compute_quantiles(UNDISTURBED_QUANTILE)[1]) for size in sizes]
            )
        )
        if not wanted:
            break
    link, error = fit_link(
        [(size, *seen[size].compute_quantiles(UNDISTURBED_QUANTILE)) for size in sizes]
    )
    disturbed, _ = fit_link(
        [(size, *seen[size].compute_quantiles(DISTURBED_QUANTILE)) for size in sizes]
    )
    return world.broadcast_object((replace(link, disturbed=disturbed), error))  # type: ignore[no-any-return]


@dataclass
class SizeMeasurement:
    """What was seen of messages of one size, round by round: seconds one way, seconds from one
    of a stream to the next, CPU seconds of one side per message.
    """

    world: World
    size: int
    peer: int
    rounds: list[tuple[float, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vector = torch.zeros(STREAM_PARTS * self.size // 4)
        self.repetitions: dict[LinkProgram, int] = {
            program: self._choose_repetitions(program)
            for program in (_make_ping_pong, _make_stream)
        }

    def measure_round(self) -> None:
        """Another round. Collective."""
        way, _ = self._time_program(_make_ping_pong)
        self.rounds.append((way / 2, *self._time_program(_make_stream)))

    def compute_quantiles(self, fraction: float) -> tuple[float, float, float]:
        """So large a part of the rounds was quicker."""
        one_way, gap, busy = np.quantile(np.array(self.rounds), fraction, axis=0).tolist()
        return one_way, gap, busy

    def _choose_repetitions(self, program: LinkProgram) -> int:
        """How often it is played in a round."""
        first = (
            _time_play(self.world, self.vector, program, self.peer, STREAM_PARTS)[0] / STREAM_PARTS
        )
        return int(
            self.world.broadcast_object(
                max(
                    STREAM_PARTS if program is _make_stream else 2,
                    min(300, int(ROUND_SECONDS / max(first, 1e-6))),
                )
            )
        )

    def _time_program(self, program: LinkProgram) -> tuple[float, float]:
        """(seconds until both sides are done, their mean CPU seconds) of one turn of a
        program.
        """
        times = self.repetitions[program]
        taken = torch.tensor(
            _time_play(self.world, self.vector, program, self.peer, times), dtype=torch.float64
        )
        both = torch.stack(
            [
                each
                for rank, each in enumerate(self.world.all_gather(taken))
                if rank in (0, self.peer)
            ]
        )
        return float(both[:, 0].max()) / times, float(both[:, 1].mean()) / times


def find_outlier_sizes(points: list[tuple[int, float]]) -> list[int]:
    """Sizes that took longer than the line through their neighbours says: other work may have
    been what took so long.
    """
    found = []
    for place in range(1, len(points)):
        one, other = (place - 1, place + 1) if place + 1 < len(points) else (place - 2, place - 1)
        if one >= 0 and points[place][1] > OUTLIER_RATIO * Link(
            0.0, 0.0, points=(points[one], points[other])
        ).compute_port_seconds(points[place][0]):
            found.append(points[place][0])
    return found


def fit_link(measurements: list[tuple[int, float, float, float]]) -> tuple[Link, float]:
    """The link of (bytes, seconds one way, seconds between messages of a stream, CPU seconds of
    one side per message).

    A message holds its ways for as long as a stream shows: a link may let a first message
    through at once, and no more. What is missing to the time of one way, beside both sides' own
    work, is flight.
    """
    sizes, ways, gaps, busy = (
        np.array(column, dtype=float) for column in zip(*measurements, strict=True)
    )
    overhead = float(min(busy.min(), ways.min() / 3))
    work = max(0.0, float(((busy - overhead) / sizes)[len(measurements) // 2 :].mean()))
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


def _make_ping_pong(rank: int, peer: int, times: int) -> list[Action]:
    turn: list[Action] = [Send(peer, 0), Recv(peer, 0)] if rank == 0 else [Recv(0, 0), Send(0, 0)]
    return list(chain.from_iterable(repeat(turn, times)))


def _make_stream(rank: int, peer: int, times: int) -> list[Action]:
    """From part to part, as into one alone the next could be asked for only when the last is
    there.
    """
    slots = [number % STREAM_PARTS for number in range(times)]
    return [Send(peer, slot) if rank == 0 else Recv(0, slot) for slot in slots]


def _time_play(
    world: World, vector: torch.Tensor, program: LinkProgram, peer: int, times: int
) -> tuple[float, float]:
    """(seconds, CPU seconds) of a program on this rank."""
    world.barrier()
    start = time.perf_counter()
    used = time.process_time()
    if world.rank in (0, peer):
        ProgramRun(
            program(world.rank, peer, times), VectorParts(vector, STREAM_PARTS), world
        ).play_program()
    return time.perf_counter() - start, time.process_time() - used


def measure_addition(bytes_: int = 1 << 20) -> float:
    """gamma: seconds per byte added, in a vector of that many bytes."""
    one = torch.zeros(bytes_ // 4)
    other = torch.ones(bytes_ // 4)
    return _time_lower_quartile(lambda: one.add_(other)) / bytes_


def measure_memory_rate() -> float:
    """Bytes read and written per second by a copy of 64 MiB."""
    one = torch.zeros(1 << 24)
    other = torch.ones(1 << 24)
    return 2 * 4 * one.numel() / _time_lower_quartile(lambda: one.copy_(other))


def measure_matmul_rate(width: int = 512) -> float:
    """Operations per second of a product of two square matrices, one thread."""
    one = torch.rand(width, width)
    other = torch.rand(width, width)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 2 * width**3 / _time_lower_quartile(lambda: one @ other)
    finally:
        torch.set_num_threads(threads)


def _time_lower_quartile(work: Callable[[], object], times: int = 15) -> float:
    """The lower quartile of some runs after two more."""
    taken = []
    for _ in range(times + 2):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return float(np.quantile(taken[2:], UNDISTURBED_QUANTILE))


def measure_backend_link(world: World, peer: int = 1) -> tuple[str, Link, float]:
    """(name, link, error of its line) of the backend of this world, between ranks 0 and `peer`.
    Collective.
    """
    link, error = measure_link(world, peer=peer)
    return str(world.backend), link, error


def count_ranks_on_hosts(world: World) -> list[int]:
    """Of every rank, how many ranks are on its host. Collective."""
    return [
        int(each) for each in world.all_gather(torch.tensor([count_local_ranks() or world.size]))
    ]


def find_first_remote_rank(host_ranks: list[int]) -> int:
    """The first rank of the next host, or rank 1 where there is none. here: as `ranks_on_hosts`
    says.
    """
    return host_ranks[0] if host_ranks[0] < len(host_ranks) else 1


def build_machine(links: list[tuple[str, Link, float]], hosts: int = 1) -> Machine:
    """What was measured of the links, which join so many hosts, and of this process's core and
    memory now.
    """
    over = (
        f", gloo over {os.environ['GLOO_SOCKET_IFNAME']}"
        if "GLOO_SOCKET_IFNAME" in os.environ
        else ""
    )
    return Machine(
        links={name: link for name, link, _ in links},
        gamma=measure_addition(),
        cores=count_cores(),
        measured=f"{date.today()}, {platform.node()}, {platform.machine()}, torch "
        f"{torch.__version__}{over}",
        errors={name: error for name, _, error in links},
        memory=measure_memory_rate(),
        matmul=measure_matmul_rate(),
        hosts=hosts,
    )


@contextmanager
def _use_interface(interface: str | None) -> Iterator[None]:
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


def measure_machine(backend: str = "both", interface: str | None = None) -> Machine | None:
    """Measure this host's links, or, under a launcher, that between rank 0 and the first of the
    next host, where there is one; None on other ranks. Raises Refused.

    backend: shm, gloo or both;  interface: what gloo talks over.
    """
    if backend not in ("shm", "gloo", "both"):
        raise Refused(describe_unknown_name("backend", backend, ("shm", "gloo", "both")))
    with _use_interface(interface):
        check_network_interfaces()
        before = read_load_average()
        found = (
            _measure_between_hosts()
            if get_launched_size() is not None
            else _measure_this_host(backend)
        )
        return found and replace(found, load=before)


def _measure_between_hosts() -> Machine | None:
    if get_launched_size() == 1:
        raise Refused("a link has two ends; start 2 ranks")
    with join_launched_world("gloo") as world:
        here = count_ranks_on_hosts(world)
        link = measure_backend_link(world, peer=find_first_remote_rank(here))
        return (
            build_machine([link], hosts=1 if here[0] == world.size else 2)
            if world.rank == 0
            else None
        )


def _measure_this_host(backend: str) -> Machine:
    why = explain_unavailable_shm()  # shm is for hosts of Linux
    if backend == "shm" and why:
        raise Refused(f"{why}; measure gloo: --backend gloo")
    names = [
        name
        for name in ("gloo", "shm")
        if backend in (name, "both") and not (name == "shm" and why)
    ]
    with Launcher(2) as ranks:
        found = [
            ranks.run(measure_backend_link, size=2, backend=name, threads=1)[0] for name in names
        ]
    return build_machine(found)
