"""`paragrad simulate`: the cost of one exchange of a strategy.

It is predicted by the clock and by formula, and compared with the lower bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from paragrad.errors import Refused
from paragrad.executors.clock import Timeline, time_schedule
from paragrad.executors.machine import Cluster, Machine
from paragrad.executors.message_count import TooManyMessages, refuse_many_messages
from paragrad.executors.proof import check_schedule
from paragrad.executors.uniform_clock import ReportProgress, time_collective
from paragrad.executors.work_depth import WorkAndDepth, compute_work_and_depth
from paragrad.planner.cost_formulas import (
    ExchangeCost,
    compute_exchange_cost,
    compute_lower_bounds,
    predict_exchange_seconds,
)
from paragrad.planner.prediction_interval import predict_interval
from paragrad.schedules.actions import Collective, ScheduleError
from paragrad.strategies.registry import find_schedule_use
from paragrad.strategies.strategy import Strategy

MAX_WALKED_RANKS = 64  # ranks up to which work and depth are computed
MAX_KEPT_MESSAGES = 100_000  # messages up to which a timeline is kept
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
    """The result of a simulation.

    Attributes:
        strategy: the resolved strategy.

        workers: ranks that exchange.

        bytes: bytes of the whole vector.

        cluster: the links between the ranks.

        machine: the measured machine.

        timeline: the clock's prediction.

        interval: seconds between which four exchanges in five lie; None if links were not measured.

        closed_form: seconds by closed form; None if there is none. It leaves out shared links and
            slow ranks.

        cost: counts by closed form; None if there is none.

        lower_bounds: lower bounds of the counts.

        work: work and depth of the exchange; None for too many ranks.

        element: bytes of one element.
    """

    strategy: Strategy
    workers: int
    bytes: int
    cluster: Cluster
    machine: Machine
    timeline: Timeline
    interval: tuple[float, float] | None
    closed_form: float | None
    cost: ExchangeCost | None
    lower_bounds: ExchangeCost
    work: WorkAndDepth | None
    element: int


def simulate_exchange(
    strategy: Strategy,
    size: int,
    machine: Machine,
    *,
    link: str | None = None,
    inside: str | None = None,
    ranks_per_link: int = 1,
    ranks_per_core: int = 1,
    slow: tuple[tuple[int, float], ...] = (),
    element: int = 4,
    spans: bool = False,
    progress: ReportProgress | None = None,
) -> Simulation:
    """Predict one exchange of a strategy on a cluster of hosts like `machine`.

    Args:
        strategy: the strategy.

        size: bytes of the vector.

        machine: the measured machine.

        link: name of the link in the machine file; None for the first.

        inside: name of the link among the ranks of a host; None: the same as between hosts.

        ranks_per_link: ranks of a host, which share its link to other hosts.

        ranks_per_core: ranks that share a core.

        slow: (rank, slowdown factor) of each slow rank.

        element: bytes of an element.

        spans: whether the timeline keeps every message.

        progress: called with the progress; see `executors.uniform_clock`.

    Raises:
        Refused: the strategy or an argument cannot be simulated.
    """
    resolved, plan = find_schedule_use(strategy, "simulate", ranks_per_link)
    if plan.pricing_refusal:
        raise Refused(f"{strategy}: {plan.pricing_refusal}")
    workers = plan.size
    schedule = cast(Collective, plan.schedule)
    if plan.goal != "all-reduce":
        raise Refused(
            f"{strategy}: how long its steps take depends on the model's parts, which are not "
            "simulated yet; draw it (paragrad draw), or simulate an exchange, such as data(4, "
            "reduce=ring)"
        )
    if size < element:
        raise Refused(
            f"--bytes {size} is less than one number, which has {element} bytes; give more"
        )
    check_schedule(schedule, workers, plan.goal)
    for rank, factor in slow:
        if not 0 <= rank < workers or factor < 1:
            raise Refused(
                f"--slow {rank}={factor:g}: give a rank from 0 to {workers - 1} and a factor of at "
                "least 1"
            )
    for what, number in (("link", ranks_per_link), ("core", ranks_per_core)):
        if workers % number:
            raise Refused(
                f"{number} ranks per {what} do not make up {workers} ranks; give a number that "
                f"divides {workers}"
            )
    length = size // element
    cluster = Cluster(
        machine.select_link(link),
        machine.gamma,
        machine.select_link(inside) if inside else None,
        ranks_per_link,
        ranks_per_core,
        1,
        slow,
    )
    plays = 1 if cluster.build_disturbed_cluster() is None else 2

    def report_play(play: int) -> ReportProgress | None:
        return progress and (lambda done, of: progress(play * of + done, plays * of))

    try:
        if spans:
            refuse_many_messages(schedule, workers, MAX_KEPT_MESSAGES, "kept as a timeline")
        timeline = (
            time_schedule(
                schedule, workers, length, cluster, element_bytes=element, keep_spans=True
            )
            if spans
            else time_collective(
                schedule,
                workers,
                length,
                cluster,
                element_bytes=element,
                report_progress=report_play(0),
            )
        )
        bounds = predict_interval(
            timeline.seconds,
            cluster,
            lambda other: (
                time_collective(
                    schedule,
                    workers,
                    length,
                    other,
                    element_bytes=element,
                    report_progress=report_play(1),
                ).seconds
            ),
        )
    except TooManyMessages as error:
        raise Refused(str(error)) from None
    # a user's schedule may fail with more ranks than are proved
    except ScheduleError as error:
        raise Refused(
            f"{schedule} is no {plan.goal} of {workers} ranks: {error}; correct the schedule"
        ) from None
    closed_form, cost = _compute_closed_form(schedule, workers, length, cluster, element)
    return Simulation(
        resolved,
        workers,
        size,
        cluster,
        machine,
        timeline,
        bounds,
        closed_form,
        cost,
        compute_lower_bounds(workers, length),
        compute_work_and_depth(schedule, workers, length) if workers <= MAX_WALKED_RANKS else None,
        element,
    )


def _compute_closed_form(
    schedule: Any, workers: int, length: int, cluster: Cluster, element: int
) -> tuple[float | None, ExchangeCost | None]:
    try:
        closed_form = predict_exchange_seconds(schedule, workers, length, cluster, element)
        return closed_form, compute_exchange_cost(schedule, workers, length)
    except LookupError:
        return None, None


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as 100MB, 64KiB or 4096. Raises Refused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].upper() not in UNITS:
        raise Refused(f"{text!r} is no number of bytes; write 4096, 64KiB or 100MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_slow_rank(text: str) -> tuple[int, float]:
    """Parse a slow rank such as 7=3 or 7=3x: rank 7 is three times slower. Raises Refused."""
    match = re.fullmatch(r"(\d+)=(\d+(?:\.\d+)?)x?", text.strip())
    if not match:
        raise Refused(f"--slow {text}: write RANK=FACTOR, such as --slow 1=3x")
    return int(match[1]), float(match[2])
