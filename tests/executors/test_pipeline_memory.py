"""The bytes that a rank holds while it runs a pipeline: by hand, and by the formulas."""

from __future__ import annotations

import pytest

from paragrad.executors.pipeline_memory import StageBytes, TaskMemory, compute_task_memory
from paragrad.schedules.pipeline import (
    Gpipe,
    Interleaved,
    MicroBatchSchedule,
    OneFOneB,
    PipelineSchedule,
    ZeroBubble,
)

pytestmark = pytest.mark.pure

FREE = StageBytes(0, 0, 10)  # activations only: messages have no bytes


def find_peak(found: list[TaskMemory]) -> int:
    return max(each.bytes for each in found)


@pytest.mark.parametrize("schedule", [Gpipe(), OneFOneB(), Interleaved(2), Interleaved(3)], ids=str)
def test_memory_with_free_messages_equals_the_formulas(
    schedule: PipelineSchedule,
) -> None:
    for size in (1, 2, 3, 4, 8):
        for micro in (
            each for each in (1, 2, 5, 8, 16) if schedule.pad_micro_count(each, size) == each
        ):
            pipelined = MicroBatchSchedule(schedule, micro)
            for rank in range(size):
                found = compute_task_memory(pipelined, rank, size, lambda *_: FREE)
                assert find_peak(found) == 10 * pipelined.count_kept_micro_batches(rank, size), (
                    size,
                    micro,
                    rank,
                )
                assert [each.task for each in found] == [
                    str(action)
                    for action in pipelined.program(rank, size)
                    if hasattr(action, "what")
                ]


def test_zero_bubble_keeps_input_and_output_gradient() -> None:
    """zero_bubble keeps the forwards whose backward is not complete.

    Rank r has min(p - r, m) forwards without their first half, and r first halves without their
    second.
    """
    weight = StageBytes(0, 0, saved=10, saved_between_halves=16, first_half_peak=18)
    for size in (2, 3, 4):
        for rank in range(size):
            found = compute_task_memory(
                MicroBatchSchedule(ZeroBubble(), 8), rank, size, lambda *_: weight
            )
            assert find_peak(found) == 10 * (size - rank - 1) + 16 * rank + 18, (size, rank)


def test_recompute_keeps_messages_and_one_forward() -> None:
    """gpipe with recompute keeps m received messages, m sent messages, and one forward.

    The sent messages are kept because they are not known to have arrived. No message confirms the
    gradients that the last rank sends. Each of these is 1 more than the activations that are
    released meanwhile.
    """
    weight = StageBytes(input_message=2, gradient_message=3, saved=50, shared_with_message=2)
    first, middle, last = (
        compute_task_memory(MicroBatchSchedule(Gpipe(), 8), rank, 3, lambda *_: weight, True)
        for rank in range(3)
    )
    assert find_peak(last) == 2 * 8 + 48 + 7
    assert [each.bytes for each in middle[:6]] == [
        2 * (each + 3) + 2 * (each + 1) for each in range(6)
    ], "three are awaited"
    assert first[7].bytes == 2 * 8 + 3 * 3


def test_one_f_one_b_memory_by_hand() -> None:
    weight = StageBytes(input_message=1, gradient_message=2, saved=10, shared_with_message=1)
    first, last = (
        compute_task_memory(MicroBatchSchedule(OneFOneB(), 3), rank, 2, lambda *_: weight)
        for rank in range(2)
    )
    # rank 0: F0 >x1.0 F1 >x1.1 <g1.0 B0 F2 >x1.2 <g1.1 B1 <g1.2 B2; a message is kept from its
    # forward to the answer
    assert [(each.task, each.bytes) for each in first] == [
        ("F0", 11),
        ("F1", 28),
        ("B0", 28),
        ("F2", 26),
        ("B1", 26),
        ("B2", 13),
    ]
    assert [each.task for each in last] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    # three messages are awaited from the beginning on; x1.2 confirms that the gradient of
    # micro-batch 0 has arrived
    assert [each.bytes for each in last] == [12, 12, 13, 13, 12, 12]


def test_acknowledged_messages_are_freed() -> None:
    pipelined = MicroBatchSchedule(OneFOneB(), 3)
    assert pipelined.map_confirmed_sends(0, 2) == {
        "g1.0": ["x1.0"],
        "g1.1": ["x1.1"],
        "g1.2": ["x1.2"],
    }
    assert pipelined.map_confirmed_sends(1, 2) == {"x1.0": [], "x1.1": [], "x1.2": ["g1.0"]}


def test_frozen_stage_keeps_nothing() -> None:
    weight = StageBytes(input_message=4, gradient_message=4, saved=100)
    found = compute_task_memory(
        MicroBatchSchedule(OneFOneB(), 6, first_trained_stage=3), 1, 3, lambda *_: weight
    )
    assert find_peak(found) <= 4 * 9
