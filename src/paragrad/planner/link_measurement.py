"""`paragrad measure`: alpha, beta and gamma of this machine's links.

Two small programs run on the transport itself:

    ping-pong    Rank 0 sends, its peer sends back. One way is half of this time.
    stream       Rank 0 sends one message after another until its peer has the last. This gives
                 the time per message.
    CPU          The user and kernel time that both use meanwhile, per message.

The result is what an exchange pays: torch.distributed, gloo or shm, and the Python code of the
transport. The numbers are fitted so that the clock predicts the same times for the same programs.

Other work on the machine only adds time, and it comes and goes. Every size is therefore measured in
many short rounds, in turn with all other sizes. A low quantile of the rounds is what the link can
do. A high quantile, fitted separately, is what it does when it is disturbed.
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
ROUND_SECONDS = 0.03  # approximate seconds of one measurement
STREAM_PARTS = 4  # messages of a stream that may be in flight at once
ROUNDS = 9  # measurements of each size, in turn
# quantiles of the rounds: what the link can do, and what it does when it is disturbed
UNDISTURBED_QUANTILE = 0.25
DISTURBED_QUANTILE = 0.9
# a point so far above the line through its neighbours is measured again
OUTLIER_RATIO = 1.25
# how often points are measured again at most: the times of a link may really have steps
MAX_REPEATS = 3
# program(rank, peer, times) returns the actions of a rank
LinkProgram = Callable[[int, int, int], list[Action]]


def measure_link(
    world: World, sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS, peer: int = 1
) -> tuple[Link, float]:
    """Measure the link between rank 0 and a peer. Collective.

    Args:
        world: the ranks.
        sizes: message sizes in bytes.
        rounds: measurements of each size, in turn.
        peer: the rank at the other end.

    Returns:
        (link, largest relative error of a straight line through its points).
    """
    measurements = {size: SizeMeasurement(world, size, peer) for size in sizes}
    sizes_left = list(sizes)
    for _ in range(1 + MAX_REPEATS):
        for _ in range(rounds):
            for size in sizes_left:
                measurements[size].measure_round()
        sizes_left = world.broadcast_object(
            find_outlier_sizes(
                [
                    (size, measurements[size].compute_quantiles(UNDISTURBED_QUANTILE)[1])
                    for size in sizes
                ]
            )
        )
        if not sizes_left:
            break
    link, error = fit_link(
        [(size, *measurements[size].compute_quantiles(UNDISTURBED_QUANTILE)) for size in sizes]
    )
    disturbed, _ = fit_link(
        [(size, *measurements[size].compute_quantiles(DISTURBED_QUANTILE)) for size in sizes]
    )
    result: tuple[Link, float] = world.broadcast_object((replace(link, disturbed=disturbed), error))
    return result


@dataclass
class SizeMeasurement:
    """Measurements of messages of one size.

    Attributes:
        world: the ranks.

        size: bytes of a message.

        peer: the rank at the other end.

        rounds: for each round: seconds one way, seconds between messages of a stream, CPU seconds
            of one side per message.
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
        """Measure another round. Collective."""
        round_trip, _ = self._time_program(_make_ping_pong)
        self.rounds.append((round_trip / 2, *self._time_program(_make_stream)))

    def compute_quantiles(self, fraction: float) -> tuple[float, float, float]:
        """Quantiles of the three measured times. `fraction` of the rounds was quicker."""
        one_way, gap, busy = np.quantile(np.array(self.rounds), fraction, axis=0).tolist()
        return one_way, gap, busy

    def _choose_repetitions(self, program: LinkProgram) -> int:
        """Choose how often a program is played in a round. Collective."""
        first_seconds = (
            _time_play(self.world, self.vector, program, self.peer, STREAM_PARTS)[0] / STREAM_PARTS
        )
        return int(
            self.world.broadcast_object(
                max(
                    STREAM_PARTS if program is _make_stream else 2,
                    min(300, int(ROUND_SECONDS / max(first_seconds, 1e-6))),
                )
            )
        )

    def _time_program(self, program: LinkProgram) -> tuple[float, float]:
        """Time one turn of a program. Collective.

        Returns:
            (seconds until both sides are done, mean CPU seconds of both sides).
        """
        times = self.repetitions[program]
        own_times = torch.tensor(
            _time_play(self.world, self.vector, program, self.peer, times), dtype=torch.float64
        )
        end_times = torch.stack(
            [
                each
                for rank, each in enumerate(self.world.all_gather(own_times))
                if rank in (0, self.peer)
            ]
        )
        return float(end_times[:, 0].max()) / times, float(end_times[:, 1].mean()) / times


def find_outlier_sizes(points: list[tuple[int, float]]) -> list[int]:
    """Find sizes that took longer than the line through their neighbours predicts.

    Other work may have caused the delay.

    Args:
        points: (bytes, seconds) of each size, in ascending order.
    """
    outliers = []
    for index in range(1, len(points)):
        one, other = (index - 1, index + 1) if index + 1 < len(points) else (index - 2, index - 1)
        if one >= 0 and points[index][1] > OUTLIER_RATIO * Link(
            0.0, 0.0, points=(points[one], points[other])
        ).compute_port_seconds(points[index][0]):
            outliers.append(points[index][0])
    return outliers


def fit_link(measurements: list[tuple[int, float, float, float]]) -> tuple[Link, float]:
    """Fit a link to measurements.

    A message occupies its ports for as long as a stream shows: a link may let only the first
    message through at once. The rest of the one-way time, apart from both sides' own work, is
    latency.

    Args:
        measurements: (bytes, seconds one way, seconds between messages of a stream, CPU seconds of
            one side per message) of each size.

    Returns:
        (link, largest relative error of its straight line).
    """
    sizes, ways, gaps, busy = (
        np.array(column, dtype=float) for column in zip(*measurements, strict=True)
    )
    overhead = float(min(busy.min(), ways.min() / 3))
    work = max(0.0, float(((busy - overhead) / sizes)[len(measurements) // 2 :].mean()))
    occupied = np.maximum.accumulate(gaps)  # more bytes never take less time
    latency = max(0.0, float((ways - 2 * overhead - occupied).min()))
    one_way_times = occupied + 2 * overhead + latency
    # the fit minimizes relative errors
    lines = np.stack([np.ones_like(sizes), sizes], axis=1) / one_way_times[:, None]
    alpha, beta = np.linalg.lstsq(lines, occupied / one_way_times, rcond=None)[0]
    alpha = max(float(alpha), 0.0)
    beta = max(float(beta), 1e-15)
    error = float((np.abs(alpha + beta * sizes - occupied) / one_way_times).max())
    return Link(
        alpha,
        beta,
        latency,
        overhead,
        work,
        tuple(zip(map(int, sizes), occupied.tolist(), strict=True)),
    ), error


def _make_ping_pong(rank: int, peer: int, times: int) -> list[Action]:
    turn: list[Action] = [Send(peer, 0), Recv(peer, 0)] if rank == 0 else [Recv(0, 0), Send(0, 0)]
    return list(chain.from_iterable(repeat(turn, times)))


def _make_stream(rank: int, peer: int, times: int) -> list[Action]:
    """A program that sends messages into changing parts of the vector.

    With a single part, a receive could be posted only after the previous message has arrived.
    """
    slots = [number % STREAM_PARTS for number in range(times)]
    return [Send(peer, slot) if rank == 0 else Recv(0, slot) for slot in slots]


def _time_play(
    world: World, vector: torch.Tensor, program: LinkProgram, peer: int, times: int
) -> tuple[float, float]:
    """Return (seconds, CPU seconds) of a program on this rank."""
    world.barrier()
    start = time.perf_counter()
    cpu_start = time.process_time()
    if world.rank in (0, peer):
        ProgramRun(
            program(world.rank, peer, times), VectorParts(vector, STREAM_PARTS), world
        ).play_program()
    return time.perf_counter() - start, time.process_time() - cpu_start


def measure_addition(bytes_: int = 1 << 20) -> float:
    """Measure gamma: seconds per byte added.

    Args:
        bytes_: length of the vector in bytes.
    """
    one = torch.zeros(bytes_ // 4)
    other = torch.ones(bytes_ // 4)
    return _time_lower_quartile(lambda: one.add_(other)) / bytes_


def measure_memory_rate() -> float:
    """Measure the bytes read and written per second by a copy of 64 MiB."""
    one = torch.zeros(1 << 24)
    other = torch.ones(1 << 24)
    number = int(one.numel())
    return 2 * 4 * number / _time_lower_quartile(lambda: one.copy_(other))


def measure_matmul_rate(width: int = 512) -> float:
    """Measure the operations per second of a product of two square matrices, on one thread.

    Args:
        width: rows and columns of the matrices.
    """
    one = torch.rand(width, width)
    other = torch.rand(width, width)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 2 * width**3 / _time_lower_quartile(lambda: one @ other)
    finally:
        torch.set_num_threads(threads)


def _time_lower_quartile(work: Callable[[], object], times: int = 15) -> float:
    """The lower quartile of `times` runs, in seconds, after two runs that are not counted."""
    durations = []
    for _ in range(times + 2):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return float(np.quantile(durations[2:], UNDISTURBED_QUANTILE))


def measure_backend_link(world: World, peer: int = 1) -> tuple[str, Link, float]:
    """Measure the link of this world's backend. Collective.

    Args:
        world: the ranks.
        peer: the rank at the other end from rank 0.

    Returns:
        (name of the backend, link, error of its line).
    """
    link, error = measure_link(world, peer=peer)
    return str(world.backend), link, error


def count_ranks_on_hosts(world: World) -> list[int]:
    """For every rank, count the ranks on its host. Collective."""
    return [
        int(each) for each in world.all_gather(torch.tensor([count_local_ranks() or world.size]))
    ]


def find_first_remote_rank(host_ranks: list[int]) -> int:
    """Find the first rank of the next host, or rank 1 if there is only one host.

    Args:
        host_ranks: the result of `count_ranks_on_hosts`.
    """
    return host_ranks[0] if host_ranks[0] < len(host_ranks) else 1


def build_machine(links: list[tuple[str, Link, float]], hosts: int = 1) -> Machine:
    """Build a machine from measured links, and measure this process's core and memory.

    Args:
        links: (name, link, error of its line) of each backend.
        hosts: number of hosts that the links join.
    """
    interface_note = (
        f", gloo over {os.environ['GLOO_SOCKET_IFNAME']}"
        if "GLOO_SOCKET_IFNAME" in os.environ
        else ""
    )
    return Machine(
        links={name: link for name, link, _ in links},
        gamma=measure_addition(),
        cores=count_cores(),
        measured=f"{date.today()}, {platform.node()}, {platform.machine()}, torch "
        f"{torch.__version__}{interface_note}",
        errors={name: error for name, _, error in links},
        memory=measure_memory_rate(),
        matmul=measure_matmul_rate(),
        hosts=hosts,
    )


@contextmanager
def _use_interface(interface: str | None) -> Iterator[None]:
    """Let gloo use a network interface inside this context."""
    previous = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        if interface and previous is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        elif interface and previous is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = previous


def measure_machine(backend: str = "both", interface: str | None = None) -> Machine | None:
    """Measure this host's links, or the link to the next host under a launcher.

    Under a launcher, the link between rank 0 and the first rank of the next host is measured, if
    there is one.

    Args:
        backend: shm, gloo or both.
        interface: the network interface that gloo uses.

    Returns:
        The machine; None on ranks other than 0.

    Raises:
        Refused: the backend is unknown or not available, or a launcher started only one rank.
    """
    if backend not in ("shm", "gloo", "both"):
        raise Refused(describe_unknown_name("backend", backend, ("shm", "gloo", "both")))
    with _use_interface(interface):
        check_network_interfaces()
        load_before = read_load_average()
        machine = (
            _measure_between_hosts()
            if get_launched_size() is not None
            else _measure_this_host(backend)
        )
        return machine and replace(machine, load=load_before)


def _measure_between_hosts() -> Machine | None:
    if get_launched_size() == 1:
        raise Refused("a link has two ends; start 2 ranks")
    with join_launched_world("gloo") as world:
        host_ranks = count_ranks_on_hosts(world)
        link = measure_backend_link(world, peer=find_first_remote_rank(host_ranks))
        return (
            build_machine([link], hosts=1 if host_ranks[0] == world.size else 2)
            if world.rank == 0
            else None
        )


def _measure_this_host(backend: str) -> Machine:
    obstacle = explain_unavailable_shm()  # shm needs Linux
    if backend == "shm" and obstacle:
        raise Refused(f"{obstacle}; measure gloo: --backend gloo")
    names = [
        name
        for name in ("gloo", "shm")
        if backend in (name, "both") and not (name == "shm" and obstacle)
    ]
    with Launcher(2) as launcher:
        links = [
            launcher.run(measure_backend_link, size=2, backend=name, threads=1)[0] for name in names
        ]
    return build_machine(links)
