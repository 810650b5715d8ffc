"""Schedules of pipelines: drawings, bubbles and peaks of activations, and invalid schedules.

The simulated clock measures bubbles, which must equal the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent

import pytest

from paragrad.executors.clock import time_schedule
from paragrad.executors.machine import Cluster, Link
from paragrad.executors.proof import GOALS, prove_schedule
from paragrad.schedules.actions import Compute, ScheduleError
from paragrad.schedules.pipeline import (
    Gpipe,
    Interleaved,
    MicroBatchSchedule,
    OneFOneB,
    PipelineSchedule,
    Task,
    ZeroBubble,
)

pytestmark = pytest.mark.pure

SIZES = [(ranks, micro) for ranks in range(1, 9) for micro in range(1, 33)]
TIMES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def draw_tasks(pipelined: MicroBatchSchedule, size: int) -> str:
    """Draw what each rank computes, in order."""
    return "\n".join(
        f"{rank} | "
        + " ".join(
            str(action) for action in pipelined.program(rank, size) if isinstance(action, Compute)
        )
        for rank in range(size)
    )


@pytest.mark.parametrize(
    ("schedule", "micro", "text"),
    [
        (
            Gpipe(),
            3,
            """
        0 | F0 F1 F2 B0 B1 B2
        1 | F0 F1 F2 B0 B1 B2""",
        ),
        (
            OneFOneB(),
            3,
            """
        0 | F0 F1 B0 F2 B1 B2
        1 | F0 B0 F1 B1 F2 B2""",
        ),
        (
            ZeroBubble(),
            3,
            """
        0 | F0 F1 I0 W0 F2 I1 W1 I2 W2
        1 | F0 I0 F1 I1 W0 F2 I2 W1 W2""",
        ),
        (
            Interleaved(2),
            2,
            """
        0 | F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0
        1 | F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1""",
        ),
    ],
    ids=str,
)
def test_schedule_of_each_rank_is_drawn(schedule: PipelineSchedule, micro: int, text: str) -> None:
    assert draw_tasks(MicroBatchSchedule(schedule, micro), 2) == dedent(text).strip()


def test_messages_of_a_pipeline() -> None:
    actions = [
        " ".join(map(str, MicroBatchSchedule(OneFOneB(), 2).program(rank, 2))) for rank in range(2)
    ]
    assert actions == [
        "F0 >1:x1.0 F1 >1:x1.1 <1:g1.0 B0 <1:g1.1 B1",
        "<0:x1.0 F0 B0 >0:g1.0 <0:x1.1 F1 B1 >0:g1.1",
    ]


def test_no_gradient_is_sent_before_the_first_trained_stage() -> None:
    assert (
        draw_tasks(MicroBatchSchedule(OneFOneB(), 2, first_trained_stage=1), 3)
        == "0 | F0 F1\n1 | F0 F1 B0 B1\n2 | F0 B0 F1 B1"
    )
    assert "g1.0" not in MicroBatchSchedule(OneFOneB(), 2, first_trained_stage=1).slots(3)


# ---- bubbles and peaks -----------------------------------------------------------------------
def compute_seconds(
    pipelined: MicroBatchSchedule, size: int, times: dict[str, float] = TIMES
) -> float:
    """Return the time of a step, if messages cost nothing and every rank has its own core."""
    lengths = dict.fromkeys(pipelined.slots(size), 0)
    return time_schedule(pipelined, size, lengths, Cluster(Link(0.0, 0.0)), durations=times).seconds


@pytest.mark.parametrize(("schedule", "share"), [(Gpipe(), 1), (OneFOneB(), 1)], ids=str)
def test_the_bubble_of_whole_backwards(schedule: PipelineSchedule, share: int) -> None:
    """The bubble is (p - 1)(F + B + W)."""
    for size, micro in SIZES:
        assert compute_seconds(MicroBatchSchedule(schedule, micro), size) == 3 * micro + 3 * (
            size - 1
        ), (
            size,
            micro,
        )


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_the_bubble_of_interleaved_stages(chunks: int) -> None:
    """The bubble is (p - 1)(F + B + W) / v, if the number of micro-batches is a multiple of p."""
    times = {what: duration / chunks for what, duration in TIMES.items()}
    for size, micro in SIZES:
        if micro % size == 0:
            took = compute_seconds(MicroBatchSchedule(Interleaved(chunks), micro), size, times)
            assert took == pytest.approx(3 * micro + 3 * (size - 1) / chunks), (size, micro)


def test_bubble_of_zero_bubble_schedules() -> None:
    """The bubble is (p - 1)(F + B - W), here with F = B = W.

    If there are fewer micro-batches than stages, it is longer by (p - m) W.
    """
    for size, micro in SIZES:
        assert compute_seconds(
            MicroBatchSchedule(ZeroBubble(), micro), size
        ) == 3 * micro + size - 1 + max(0, size - micro), (size, micro)


def test_the_peak_of_activations() -> None:
    for size, micro in SIZES:
        for rank in range(size):
            assert MicroBatchSchedule(Gpipe(), micro).count_kept_micro_batches(rank, size) == micro
            assert MicroBatchSchedule(OneFOneB(), micro).count_kept_micro_batches(
                rank, size
            ) == min(size - rank, micro)
            assert MicroBatchSchedule(ZeroBubble(), micro).count_kept_micro_batches(
                rank, size
            ) == min(size, micro)


def test_the_peak_of_interleaved_stages() -> None:
    """The peak is p (1 + (p - 1) / (p v)) times the activations of a rank's whole part.

    Each of the v stages of a rank is 1/v of its part.
    """
    for chunks in (2, 3, 4):
        for size, micro in SIZES:
            if micro % size == 0 and micro > size:
                most = MicroBatchSchedule(Interleaved(chunks), micro).count_kept_micro_batches(
                    0, size
                )
                assert most / chunks == pytest.approx(size * (1 + (size - 1) / (size * chunks)))


# ---- proved ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "schedule", [Gpipe(), OneFOneB(), Interleaved(2), Interleaved(3), ZeroBubble()], ids=str
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_schedule_is_a_pipeline(schedule: PipelineSchedule, size: int) -> None:
    for micro in (1, 2, 3, 5, 8):
        for trained in {0, 1, size - 1}:
            pipelined = MicroBatchSchedule(schedule, schedule.pad_micro_count(micro, size), trained)
            prove_schedule(
                pipelined, size, dict.fromkeys(pipelined.slots(size), 1), GOALS["pipeline"]
            )


class Backward(PipelineSchedule, abstract=True):
    """A wrong schedule: all backwards come before the forwards."""

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        yield from (("B", 0, each) for each in range(micro))
        yield from (("F", 0, each) for each in range(micro))


class Lazy(PipelineSchedule, abstract=True):
    """A wrong schedule: the last micro-batch has no backward."""

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        yield from (("F", 0, each) for each in range(micro))
        yield from (("B", 0, each) for each in range(micro - 1))


class Twice(PipelineSchedule, abstract=True):
    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        for each in range(micro):
            yield from (("F", 0, each), ("B", 0, each), ("B", 0, each))


class Crossed(PipelineSchedule, abstract=True):
    """A valid schedule: rank 0 takes the last micro-batch first, rank 1 takes it last."""

    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        yield from (("F", 0, each) for each in (range(micro) if rank else reversed(range(micro))))
        yield from (("B", 0, each) for each in range(micro))


class Weightless(PipelineSchedule, abstract=True):
    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        for each in range(micro):
            yield from (("F", 0, each), ("I", 0, each))


class Strange(PipelineSchedule, abstract=True):
    def order(self, rank: int, size: int, micro: int) -> Iterator[Task]:
        yield "U", 0, 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (Backward, "rank 1 makes B0 and has not made F0"),
        (Lazy, "rank 0 ends without the pass of stage 0 in slot B0.2"),
        (Twice, "rank 1 makes B0 twice"),
        (Weightless, "rank 0 ends without the pass of stage 0 in slot W0.0"),
        (Strange, "rank 0 computes 'U', which is no part of a pipeline"),
    ],
)
def test_invalid_pipeline_is_refused(wrong: type[PipelineSchedule], told: str) -> None:
    pipelined = MicroBatchSchedule(wrong(), 3)
    with pytest.raises(ScheduleError) as caught:
        prove_schedule(pipelined, 2, dict.fromkeys(pipelined.slots(2), 1), GOALS["pipeline"])
    assert told in str(caught.value)


def test_micro_batches_may_be_sent_in_any_order() -> None:
    """If messages are sent in another order than they are needed, a rank receives them in the
    order in which they are sent.
    """
    pipelined = MicroBatchSchedule(Crossed(), 3)
    prove_schedule(pipelined, 2, dict.fromkeys(pipelined.slots(2), 1), GOALS["pipeline"])
