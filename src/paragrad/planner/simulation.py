"""`paragrad simulate`: what one exchange of a strategy will cost, by the clock, by formula, and
beside the lower bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from paragrad.errors import Refused
from paragrad.executors.clock import Timeline, timed
from paragrad.executors.machine import Cluster, Machine
from paragrad.executors.message_count import TooLong, refuse_long
from paragrad.executors.proof import check
from paragrad.executors.uniform_clock import Tell, simulated
from paragrad.executors.work_depth import WorkAndDepth, work_and_depth
from paragrad.planner.cost_formulas import Price, least, price, seconds
from paragrad.planner.prediction_interval import interval
from paragrad.schedules.actions import Collective, ScheduleError
from paragrad.strategies.registry import plan_of
from paragrad.strategies.strategy import Strategy

WALKED = 64  # ranks up to which work and depth are walked
KEPT = 100_000  # messages up to which a timeline is kept
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True)
class Simulation:
    """What was found. bytes: of the whole vector."""

    strategy: Strategy
    workers: int
    bytes: int
    cluster: Cluster
    machine: Machine
    timeline: Timeline
    # seconds of four exchanges in five, where links were measured
    interval: tuple[float, float] | None
    # seconds by closed form, where there is one; links shared or slow are not in it
    closed: float | None
    price: Price | None
    least: Price  # lower bounds
    work: WorkAndDepth | None
    element: int  # bytes of one


def simulate(
    strategy: Strategy,
    size: int,
    machine: Machine,
    *,
    link: str | None = None,
    inside: str | None = None,
    per_link: int = 1,
    per_core: int = 1,
    slow: tuple[tuple[int, float], ...] = (),
    element: int = 4,
    spans: bool = False,
    tell: Tell | None = None,
) -> Simulation:
    """Play a strategy's schedule over `size` bytes on a cluster of hosts like `machine`. Raises
    Refused.

    per_link: ranks of a host, which share its link to others;  inside: the link among them
    (otherwise the same as outside); per_core: ranks that share a core;  slow: (rank, how many
    times slower);  tell: see `players.uniform`.
    """
    resolved, plan = plan_of(strategy, "simulate", per_link)
    if plan.unpriced:
        raise Refused(f"{strategy}: {plan.unpriced}")
    workers = plan.size
    schedule = cast(Collective, plan.schedule)
    if plan.what != "all-reduce":
        raise Refused(
            f"{strategy}: how long its steps take depends on the model's parts, which are not "
            f"simulated yet; draw it "
            "(paragrad draw), or simulate an exchange, such as data(4, reduce=ring)"
        )
    if size < element:
        raise Refused(
            f"--bytes {size} is less than one number, which has {element} bytes; give more"
        )
    check(schedule, workers, plan.what)
    for rank, factor in slow:
        if not 0 <= rank < workers or factor < 1:
            raise Refused(
                f"--slow {rank}={factor:g}: give a rank from 0 to {workers - 1} and a factor of at "
                f"least 1"
            )
    for what, number in (("link", per_link), ("core", per_core)):
        if workers % number:
            raise Refused(
                f"{number} ranks per {what} do not make up {workers} ranks; give a number that "
                f"divides {workers}"
            )
    length = size // element
    cluster = Cluster(
        machine.link(link),
        machine.gamma,
        machine.link(inside) if inside else None,
        per_link,
        per_core,
        1,
        slow,
    )
    plays = 1 if cluster.disturbed() is None else 2

    def telling(play: int) -> Tell | None:
        return tell and (lambda done, of: tell(play * of + done, plays * of))

    try:
        if spans:
            refuse_long(schedule, workers, KEPT, "kept as a timeline")
        timeline = (
            timed(schedule, workers, length, cluster, element=element, spans=True)
            if spans
            else simulated(schedule, workers, length, cluster, element=element, tell=telling(0))
        )
        around = interval(
            timeline.seconds,
            cluster,
            lambda other: (
                simulated(
                    schedule, workers, length, other, element=element, tell=telling(1)
                ).seconds
            ),
        )
    except TooLong as error:
        raise Refused(str(error)) from None
    # of a user's own, for more ranks than are proved
    except ScheduleError as error:
        raise Refused(
            f"{schedule} is no {plan.what} of {workers} ranks: {error}; mend the schedule"
        ) from None
    closed, terms = _closed(schedule, workers, length, cluster, element)
    return Simulation(
        resolved,
        workers,
        size,
        cluster,
        machine,
        timeline,
        around,
        closed,
        terms,
        least(workers, length),
        work_and_depth(schedule, workers, length) if workers <= WALKED else None,
        element,
    )


def _closed(
    schedule: Any, workers: int, length: int, cluster: Cluster, element: int
) -> tuple[float | None, Price | None]:
    try:
        closed = seconds(schedule, workers, length, cluster, element)
        return closed, price(schedule, workers, length)
    except LookupError:
        return None, None


def read_bytes(text: str) -> int:
    """A number of bytes such as 100MB, 64KiB or 4096. Raises Refused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].upper() not in UNITS:
        raise Refused(f"{text!r} is no number of bytes; write 4096, 64KiB or 100MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def read_slow(text: str) -> tuple[int, float]:
    """A slow rank such as 7=3 or 7=3x: rank 7 is three times slower. Raises Refused."""
    match = re.fullmatch(r"(\d+)=(\d+(?:\.\d+)?)x?", text.strip())
    if not match:
        raise Refused(f"--slow {text}: write RANK=FACTOR, such as --slow 1=3x")
    return int(match[1]), float(match[2])
