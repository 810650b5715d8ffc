"""The clock, which times a schedule, and the uniform clock, which times all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from forward_pipeline import Forwards

from paragrad.executors import uniform_clock
from paragrad.executors.clock import Durations, time_schedule
from paragrad.executors.machine import Cluster, Link
from paragrad.executors.message_count import TooManyMessages
from paragrad.executors.uniform_clock import time_collective, time_uniform_collective
from paragrad.schedules.actions import Collective, Compute, Program, Recv, ScheduleError, Send
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.schedules.two_level import TwoLevel

pytestmark = pytest.mark.pure

LINK = Link(alpha=3.0, beta=0.5)
CLUSTERS = {
    "textbook": Cluster(LINK, 0.25),
    "a rank three times slower": Cluster(LINK, 0.25, slow=((1, 3.0),)),
    "flight and overhead": Cluster(Link(3.0, 0.5, latency=1.0, overhead=0.5), 0.25),
    "hosts of two": Cluster(LINK, 0.25, inside=Link(0.5, 0.125), group=2),
    "hosts of eight, one slow rank": Cluster(
        LINK, 0.25, inside=Link(0.5, 0.125), group=8, slow=((3, 2.0),)
    ),
}


@dataclass(frozen=True)
class Programs:
    """A schedule that is given as one program per rank, over two parts."""

    programs: tuple[tuple[Send | Recv | Compute, ...], ...]

    def parts(self, size: int) -> int:
        return 2

    def program(self, rank: int, size: int) -> Program:
        return iter(self.programs[rank])


def compute_ends(
    cluster: Cluster,
    *programs: tuple[Send | Recv | Compute, ...],
    length: int = 20,
    durations: Durations | None = None,
) -> tuple[float, ...]:
    return time_schedule(
        Programs(programs), len(programs), length, cluster, element_bytes=1, durations=durations
    ).ends


def test_message_takes_alpha_and_beta() -> None:
    assert compute_ends(Cluster(LINK), (Send(1, 0),), (Recv(0, 0),)) == (0.0, 3.0 + 5.0)
    assert compute_ends(Cluster(LINK), (Send(1, 0, wait=True),), (Recv(0, 0),)) == (8.0, 8.0)
    assert compute_ends(Cluster(LINK), (Send(1, range(2)),), (Recv(0, range(2)),)) == (
        0.0,
        3.0 + 10.0,
    )


def test_addition_occupies_the_core() -> None:
    assert compute_ends(Cluster(LINK, 0.25), (Send(1, 0),), (Recv(0, 0, add=True),)) == (
        0.0,
        8.0 + 2.5,
    )


def test_flight_and_overhead() -> None:
    link = Link(3.0, 0.5, latency=1.0, overhead=0.5)
    assert compute_ends(Cluster(link), (Send(1, 0),), (Recv(0, 0),)) == (0.5, 0.5 + 8.0 + 1.0 + 0.5)


def test_messages_of_one_rank_are_sequential() -> None:
    assert compute_ends(Cluster(LINK), (Send(1, 0), Send(2, 1)), (Recv(0, 0),), (Recv(0, 1),)) == (
        0.0,
        8.0,
        16.0,
    )
    assert compute_ends(Cluster(LINK), (Recv(1, 0), Recv(2, 1)), (Send(0, 0),), (Send(0, 1),)) == (
        16.0,
        0.0,
        0.0,
    )


def test_both_directions_of_a_link_work_at_once() -> None:
    both = (Send(1, 0), Recv(1, 1)), (Send(0, 1), Recv(0, 0))
    assert compute_ends(Cluster(LINK), *both) == (8.0, 8.0)


def test_expected_sender_goes_first() -> None:
    """Ranks 1 and 2 send to rank 0 at once; rank 0 expects rank 2's message first.

    So that message uses the link first.
    """
    programs = (Recv(2, 1), Send(1, 1), Recv(1, 0)), (Send(0, 0), Recv(0, 1)), (Send(0, 1),)
    assert compute_ends(Cluster(LINK), *programs) == (16.0, 16.0, 0.0)


def test_slot_is_not_written_while_it_is_sent_in_the_clock() -> None:
    """A message for a slot is added only after the slot was sent.

    Rank 0's send waits for rank 1, which is busy with rank 2. Meanwhile a message for the slot
    arrives.
    """
    found = compute_ends(
        Cluster(LINK, 0.25),
        (Send(1, 0), Recv(2, 0, add=True)),
        (Recv(2, 1), Recv(0, 0)),
        (Send(1, 1), Send(0, 0)),
    )
    assert found == (16.0 + 2.5, 16.0, 0.0)


def test_rendezvous_starts_when_both_are_ready() -> None:
    assert compute_ends(
        Cluster(LINK), (Send(1, 0, wait=True),), (Recv(2, 1), Recv(0, 0)), (Send(1, 1),)
    ) == (16.0, 16.0, 0.0)


def test_ranks_of_a_host_share_its_external_link() -> None:
    cluster = Cluster(LINK, inside=Link(1.0, 0.0), group=2)
    across = (Send(2, 0),), (Send(3, 0),), (Recv(0, 0),), (Recv(1, 0),)
    assert compute_ends(cluster, *across) == (0.0, 0.0, 8.0, 16.0)
    within = (Send(1, 0),), (Recv(0, 0),), (Send(3, 0),), (Recv(2, 0),)
    assert compute_ends(cluster, *within) == (0.0, 1.0, 0.0, 1.0)


def test_ranks_on_one_core_add_in_sequence() -> None:
    programs = (Send(1, 0), Recv(1, 0, add=True)), (Send(0, 0), Recv(0, 0, add=True))
    assert compute_ends(Cluster(LINK, 0.25), *programs) == (10.5, 10.5)
    assert sorted(compute_ends(Cluster(LINK, 0.25, sharing=2), *programs)) == [10.5, 13.0]
    assert compute_ends(Cluster(LINK, 0.25, sharing=2, cores=2), *programs) == (10.5, 10.5)


def test_work_on_shared_cores_delays_messages() -> None:
    """Four ranks share one core; a byte needs half a second of its sender and of its receiver."""
    link = Link(0.0, 0.5, work=0.5)
    programs = (Send(1, 0),), (Recv(0, 0),), (Send(3, 0),), (Recv(2, 0),)
    assert compute_ends(Cluster(link), *programs) == (0.0, 5.0, 0.0, 5.0)
    assert compute_ends(Cluster(link, sharing=4), *programs) == (0.0, 10.0, 0.0, 20.0)


def test_slow_rank_is_slow_at_everything() -> None:
    assert compute_ends(
        Cluster(LINK, 0.25, slow=((1, 2.0),)), (Send(1, 0),), (Recv(0, 0, add=True),)
    ) == (
        0.0,
        2 * (8.0 + 2.5),
    )


def test_deadlocked_ranks_are_named() -> None:
    with pytest.raises(ScheduleError, match="rank 0 waits for ever"):
        compute_ends(Cluster(LINK), (Recv(1, 0), Send(1, 0)), (Recv(0, 0), Send(0, 0)))
    with pytest.raises(
        ScheduleError, match="rank 1 expects slot 1 from rank 0, which sends slot 0"
    ):
        compute_ends(Cluster(LINK), (Send(1, 0),), (Recv(0, 1),))


def test_compute_occupies_the_core_for_its_duration() -> None:
    programs = (Compute("F", 0), Send(1, 0)), (Recv(0, 0), Compute("F", 0))
    assert compute_ends(Cluster(LINK), *programs, durations={"F": 2.0}) == (2.0, 2.0 + 8.0 + 2.0)
    assert compute_ends(Cluster(LINK, slow=((1, 2.0),)), *programs, durations={"F": 2.0}) == (
        2.0,
        2.0 + 2 * (8.0 + 2.0),
    )
    assert compute_ends(Cluster(LINK), *programs, durations=lambda rank, action: 1.0 + rank) == (
        1.0,
        1.0 + 8.0 + 2.0,
    )
    alone: tuple[Compute, ...] = (Compute("F", 0),)
    assert sorted(compute_ends(Cluster(LINK, sharing=2), alone, alone, durations={"F": 2.0})) == [
        2.0,
        4.0,
    ]


def test_compute_waits_for_the_sends_of_its_slot() -> None:
    assert compute_ends(
        Cluster(LINK), (Send(1, 0), Compute("F", 0)), (Recv(0, 0),), durations={"F": 2.0}
    ) == (10.0, 8.0)
    assert compute_ends(
        Cluster(LINK), (Send(1, 0), Compute("F", "else")), (Recv(0, 0),), durations={"F": 2.0}
    ) == (2.0, 8.0)


def test_missing_duration_is_reported() -> None:
    """If a missing duration counted as zero, the bubbles of a pipeline would vanish."""
    with pytest.raises(
        ScheduleError,
        match=r"rank 0 computes F0, and the clock was not told .* give durations={'F': seconds}",
    ):
        compute_ends(Cluster(LINK), (Compute("F", 0),))
    with pytest.raises(ScheduleError, match=r"\(durations of: B\); give"):
        compute_ends(Cluster(LINK), (Compute("F", 0),), durations={"B": 2.0})
    with pytest.raises(ScheduleError, match="the clock was not told how long slot x is"):
        compute_ends(Cluster(LINK), (Send(1, "x"),), (Recv(0, "x"),))


@pytest.mark.parametrize(("stages", "micros"), [(1, 4), (2, 3), (4, 8)])
def test_pipeline_time_is_its_slots_and_bubble(stages: int, micros: int) -> None:
    """The time is that of micros + stages - 1 forwards, and of the first micro-batch's messages.

    The messages of the other micro-batches overlap with forwards.
    """
    schedule = Forwards(micros)
    found = time_schedule(
        schedule,
        stages,
        schedule.slots(4),
        Cluster(LINK),
        element_bytes=1,
        durations={"F": 10.0},
        keep_spans=True,
    )
    assert found.seconds == 10.0 * (micros + stages - 1) + (3.0 + 0.5 * 4) * (stages - 1)
    forwards = [span for span in found.spans if span.lane == "compute"]
    assert len(forwards) == stages * micros
    assert {(span.name, span.seconds, span.bytes) for span in forwards} == {
        (f"Fx{micro}", 10.0, 4) for micro in range(micros)
    }


def test_spans_have_the_format_of_the_record() -> None:
    timeline = time_schedule(Ring(), 3, 12, CLUSTERS["textbook"], element_bytes=4, keep_spans=True)
    sends = [span for span in timeline.spans if span.lane == "send"]
    assert len(sends) == timeline.messages == 12
    assert all(span.bytes == 16 and span.seconds == 3.0 + 8.0 for span in sends)
    assert {(span.rank, span.peer) for span in sends} == {(0, 1), (1, 2), (2, 0)}
    assert max(span.start + span.seconds for span in timeline.spans) == timeline.seconds


@pytest.mark.table
@pytest.mark.parametrize("size", range(25, 65))
def test_uniform_clock_up_to_64_ranks(size: int) -> None:
    for schedule in (Ring(), RingAsync(2), Direct()):
        at_once = time_uniform_collective(
            schedule, size, 12 * size + 5, CLUSTERS["flight and overhead"]
        )
        # the parts have two lengths, so the ranks of Direct meet on a link
        assert at_once is not None or isinstance(schedule, Direct)
        if at_once:
            assert at_once.ends == pytest.approx(
                time_schedule(schedule, size, 12 * size + 5, CLUSTERS["flight and overhead"]).ends
            )


UNIFORM: list[Collective] = [Ring(), RingAsync(2), RingAsync(3), Direct()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("schedule", UNIFORM, ids=str)
def test_uniform_clock_equals_the_event_clock(schedule: Collective, cluster: Cluster) -> None:
    """The two clocks agree, also for lengths that do not divide.

    If ranks would meet on a link, the uniform clock returns None.
    """
    uniform = []
    sizes = {2, 3, 4, 5, 8, 9, 16, 24}
    for size in sizes:
        for length in (5, 12 * size):
            at_once = time_uniform_collective(schedule, size, length, cluster)
            one_by_one = time_schedule(schedule, size, length, cluster) if at_once else None
            if at_once and one_by_one:
                assert at_once.ends == pytest.approx(one_by_one.ends, rel=1e-12), (size, length)
                assert at_once.messages == one_by_one.messages
                uniform.append(size)
    alike = cluster in (CLUSTERS["textbook"], CLUSTERS["flight and overhead"])
    assert set(uniform) == sizes or (isinstance(schedule, Direct) and not alike)


@pytest.mark.parametrize(
    "schedule",
    [Ring(blocking=True), Tree(), Star(), Butterfly(), Halving(), DoubleTree(), TwoLevel(group=2)],
    ids=str,
)
def test_rank_dependent_schedules_use_the_event_clock(schedule: Collective) -> None:
    assert time_uniform_collective(schedule, 6, 100, CLUSTERS["textbook"]) is None
    assert time_collective(schedule, 6, 100, CLUSTERS["textbook"]) == time_schedule(
        schedule, 6, 100, CLUSTERS["textbook"]
    )


@dataclass(frozen=True)
class RightNeighbours:
    """Every rank sends a slot to its right neighbour, which receives it as another slot."""

    sent: Callable[[int, int], Any]
    received: Callable[[int, int], Any]

    def parts(self, size: int) -> int:
        return size

    def program(self, rank: int, size: int) -> Program:
        yield Send((rank + 1) % size, self.sent(rank, size))
        yield Recv((rank - 1) % size, self.received(rank, size))


def test_whole_vector_is_no_part_per_rank() -> None:
    """Earlier, the range of all parts was taken for part r on rank r, and timed as one part."""
    schedule = RightNeighbours(lambda rank, size: range(size), lambda rank, size: range(size))
    timeline = time_collective(schedule, 4, 8, CLUSTERS["textbook"])
    assert timeline.seconds == 3.0 + 0.5 * 32


def test_mismatched_slots_are_refused_in_a_uniform_schedule() -> None:
    """Earlier, the uniform clock timed all ranks at once, whatever part the receiver expected."""
    schedule = RightNeighbours(lambda rank, size: rank, lambda rank, size: rank)
    with pytest.raises(ScheduleError, match="expects slot 1 from rank 0, which sends slot 0"):
        time_collective(schedule, 4, 8, CLUSTERS["textbook"])


def test_equal_ranks_change_their_peers_by_thousands() -> None:
    """Direct has a distance for each message; earlier, arrays of all distances took gigabytes."""
    size = 4096
    timeline = time_collective(Direct(), size, size * 100, Cluster(LINK, 0.25))
    assert timeline.ends == (timeline.seconds,) * size
    assert timeline.seconds == 2 * (size - 1) * (3.0 + 0.5 * 400) + (size - 1) * 0.25 * 400


def test_thousands_of_ranks() -> None:
    """At 1,024 ranks, the time is that of the formula, and a straggler increases it."""
    size = 1024
    length = 1024 * 100
    plain = time_collective(Ring(), size, length, Cluster(LINK, 0.25))
    assert plain.messages == 2 * size * (size - 1)
    assert plain.seconds == 2 * (size - 1) * (3.0 + 0.5 * 400) + (size - 1) * 0.25 * 400
    assert (
        time_collective(Ring(), size, length, Cluster(LINK, 0.25, slow=((7, 3.0),))).seconds
        > 1.5 * plain.seconds
    )


@pytest.mark.parametrize(
    ("schedule", "size", "goes"),
    [
        pytest.param(Ring(), 1 << 20, "65,536", marks=pytest.mark.table),
        (Halving(2), 1 << 16, "64"),
        (Direct(), 10**6, "32"),
    ],
)
def test_too_many_messages_are_refused_with_a_possible_size(
    schedule: Any, size: int, goes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a million ranks took minutes without a message, or took all memory."""
    monkeypatch.setattr(uniform_clock, "MAX_EVENT_MESSAGES", 2000)
    with pytest.raises(
        TooManyMessages,
        match=rf"over {size:,} ranks has more than .* messages, .*; take at most {goes} "
        r"ranks$",
    ):
        time_collective(schedule, size, 250_000, Cluster(LINK))


@pytest.mark.parametrize(("schedule", "size"), [(Ring(), 128), (Halving(2), 128)])
def test_progress_of_the_clock_is_reported(schedule: Any, size: int) -> None:
    told: list[tuple[int, int]] = []
    timeline = time_collective(
        schedule,
        size,
        1000,
        Cluster(LINK),
        report_progress=lambda done, total: told.append((done, total)),
    )
    assert told == sorted(told)
    assert {total for _, total in told} == {timeline.messages}
    assert 0 < told[0][0] < timeline.messages
