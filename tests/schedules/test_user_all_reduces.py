"""All-reduces that a user writes: a valid one of ten lines, and many invalid ones.

Each invalid one is refused with a message that says what is wrong.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from paragrad.errors import Refused
from paragrad.executors.clock import time_schedule
from paragrad.executors.machine import Cluster, Link
from paragrad.executors.proof import MAX_SENDS_PER_PEER, prove_schedule
from paragrad.executors.text_drawing import draw_text
from paragrad.executors.uniform_clock import time_collective
from paragrad.executors.work_depth import compute_work_and_depth
from paragrad.schedules.actions import Collective, Compute, Program, Recv, ScheduleError, Send
from paragrad.schedules.two_level import TwoLevel

pytestmark = pytest.mark.pure


@dataclass(frozen=True)
class Line:
    """A ring, as a user writes it: every rank sends chunk after chunk to its right neighbour.

    In the first round the ranks add the chunks, in the second round they copy the sums.
    """

    def program(self, rank: int, size: int) -> Any:
        right = (rank + 1) % size
        left = (rank - 1) % size
        for hop in range(2 * (size - 1)):
            yield Send(right, (rank - hop) % size)
            yield Recv(left, (rank - hop - 1) % size, add=hop < size - 1)


def test_ten_line_all_reduce_is_proved_and_timed() -> None:
    """A class without a base class needs only a `program`.

    It is proved, drawn, counted and timed, and its vector has one part for each rank.
    """
    for size in (1, 2, 3, 4, 7):
        proof = prove_schedule(Line(), size)
        assert (proof.messages, proof.length, proof.grouped) == (2 * size * (size - 1), size, True)
    assert draw_text(Line(), 2).splitlines() == [
        "0 | >1:0 <1:1+   >1:1 <1:0",
        "1 | >0:1 <0:0+   >0:0 <0:1",
    ]
    assert compute_work_and_depth(Line(), 4, 100).work == 3 * 100
    cluster = Cluster(Link(3.0, 0.5), 0.25)
    assert (
        time_collective(Line(), 4, 100, cluster).seconds
        == time_schedule(Line(), 4, 100, cluster).seconds
        > 0
    )  # type: ignore[arg-type]


def test_all_reduce_with_a_base_class_has_one_part_per_rank() -> None:
    class Named(Collective):
        def program(self, rank: int, size: int) -> Program:
            yield from Line().program(rank, size)

    assert Named().parts(5) == 5
    assert prove_schedule(Named(), 5, 100).sent == prove_schedule(Line(), 5, 100).sent == 160


class Broken(Line):
    """Line with another program, and perhaps another number of parts."""

    def __init__(
        self, program: Callable[[int, int], Any], parts: Callable[[int], Any] | None = None
    ) -> None:
        object.__setattr__(self, "program", program)
        if parts:
            object.__setattr__(self, "parts", parts)


def change_program(change: Callable[[int, int, list[Any]], Any]) -> Callable[[int, int], Any]:
    """Return the program of Line, changed by change(rank, size, actions)."""
    return lambda rank, size: iter(change(rank, size, list(Line().program(rank, size))))


def leave_out_action(victim: int, number: int) -> Callable[[int, int], Any]:
    """Return the program of Line, in which one rank leaves out an action."""
    return change_program(
        lambda rank, size, actions: [
            each for at, each in enumerate(actions) if (rank, at) != (victim, number)
        ]
    )


def replace_action(victim: int, number: int, action: Any) -> Callable[[int, int], Any]:
    """Return the program of Line, in which one rank makes another action instead."""
    return change_program(
        lambda rank, size, actions: [
            action if (rank, at) == (victim, number) else each for at, each in enumerate(actions)
        ]
    )


def skip_chunk(rank: int, size: int) -> Program:
    return (each for each in Line().program(rank, size) if each.slot != 1)


def exchange_whole_vectors(rank: int, size: int) -> Program:
    """Exchange whole vectors with the rank at distance 1, 2, 4, ...

    This works for 2 and 4 ranks, where every rank has a partner; with 3 ranks, one has none.
    """
    distance = 1
    while distance < size:
        yield Send(rank ^ distance, range(size))
        yield Recv(rank ^ distance, range(size), add=True)
        distance *= 2


def raise_in_program(rank: int, size: int) -> Iterator[Any]:
    yield from itertools.islice(Line().program(rank, size), 3)
    yield Send({0: 1, 1: 2}[rank], 0)


def exchange_without_end(rank: int, size: int) -> Iterator[Any]:
    while True:
        yield Send((rank + 1) % size, rank)
        yield Recv((rank - 1) % size, (rank - 1) % size)


def send_without_end(rank: int, size: int) -> Iterator[Any]:
    while True:
        yield Send((rank + 1) % size, rank)


def receive_first(rank: int, size: int) -> Iterator[Any]:
    actions = list(Line().program(rank, size))
    for send, recv in zip(actions[::2], actions[1::2], strict=True):
        yield recv
        yield send


def return_list(rank: int, size: int) -> Any:
    return list(Line().program(rank, size))


def forget_to_yield(rank: int, size: int) -> Any:
    Line().program(rank, size)


def take_one_argument(rank: int) -> Any:
    yield Send(rank + 1, 0)


@dataclass(frozen=True)
class ByCall:
    """A program that sends to the right at the first call, and to the left at the second.

    Each direction is valid alone, so the proof must compare two calls.
    """

    calls: Iterator[int]

    def __call__(self, rank: int, size: int) -> Any:
        mirrored = next(self.calls) // size % 2
        for action in Line().program(-rank % size if mirrored else rank, size):
            peer = action.to if isinstance(action, Send) else action.frm
            peer = -peer % size if mirrored else peer
            yield (
                Send(peer, action.slot)
                if isinstance(action, Send)
                else Recv(peer, action.slot, action.add)
            )


calls = itertools.count()
dice = random.Random(0)


def shuffle_actions(rank: int, size: int) -> Any:
    actions = list(Line().program(rank, size))
    dice.shuffle(actions)
    yield from actions


SHARED = {(rank, size): Line().program(rank, size) for size in (3,) for rank in range(size)}
NOBODY = "is for a rank that does not exist: there are 0 to 2, as whole numbers"

# Each row: what is wrong; the program; the message of the refusal with 3 ranks.
STORIES: dict[str, tuple[Callable[..., Any], str]] = {
    "a chunk skipped on both ends": (
        skip_chunk,
        "rank 0 ends without the contribution of rank 1 in slot 1: it never takes that slot",
    ),
    "a chunk skipped by its sender alone": (
        leave_out_action(1, 0),
        "rank 2 expects slot 1 from rank 1, which sends slot 0: first sent is first received "
        "(round 2)",
    ),
    "a chunk skipped by its receiver alone": (
        leave_out_action(1, 1),
        "rank 1 expects slot 2 from rank 0, which sends slot 0: first sent is first received "
        "(round 1)",
    ),
    "the last chunk skipped by its receiver": (
        leave_out_action(1, 7),
        "rank 1 never receives slot 0 that rank 0 sends to it, in round 4",
    ),
    "a slot overwritten where it was to be added": (
        replace_action(1, 1, Recv(0, 0)),
        "rank 0 ends without the contribution of rank 1 in slot 0: it takes that slot for the "
        "last time in round 3 (<2:0); rank 1 wrote over it in round 1 (<0:0), where add=True would "
        "have added",
    ),
    "a slot added where it was to be overwritten": (
        replace_action(1, 5, Recv(0, 1, add=True)),
        "rank 1 adds the contribution of rank 1 to slot 1 twice, in round 3 (<0:1+)",
    ),
    "everybody waits first": (
        receive_first,
        "deadlock among 3 ranks under asynchronous sends: rank 0 waits for slot 2 from rank 2 "
        "(round 1)",
    ),
    "everybody writes what it is sending": (
        lambda rank, size: iter([Send((rank + 1) % size, 0), Recv((rank - 1) % size, 0)] * 2),
        "deadlock among 3 ranks under asynchronous sends: rank 0 waits for rank 1 to take slot 0 "
        "(round 1)",
    ),
    "a message past the last rank": (
        replace_action(2, 0, Send(3, 2)),
        f"rank 2, action 1 of its program: Send(3, 2) {NOBODY}",
    ),
    "a message to a rank below none": (
        replace_action(0, 1, Recv(-1, 2, add=True)),
        f"rank 0, action 2 of its program: Recv(-1, 2) {NOBODY}",
    ),
    "a message to half a rank": (
        replace_action(1, 2, Send(1.5, 0)),
        f"rank 1, action 3 of its program: Send(1.5, 0) {NOBODY}",
    ),  # type: ignore[arg-type]
    "a message to itself": (
        replace_action(1, 0, Send(1, 1)),
        "rank 1, action 1 of its program: Send(1, 1) is a message to itself; leave it out",
    ),
    "a slot that is not there": (
        replace_action(0, 0, Send(1, 3)),
        "rank 0 uses slot 3; the vector has slots 0 to 2 (round 1)",
    ),
    "a slot by a name": (
        replace_action(0, 0, Send(1, "mine")),
        "rank 0 uses slot mine; the vector has slots 0 to 2 (round 1)",
    ),
    "every other slot in one message, of which the wire would send what is between them too": (
        replace_action(0, 0, Send(1, range(0, 3, 2))),
        "rank 0, action 1 of its program: range(0, 3, 2) is no slot: give the number",
    ),
    "a message of no slot": (
        replace_action(0, 0, Send(1, range(0))),
        "rank 0, action 1 of its program: range(0, 0) is no slot: give the number of a part",
    ),
    "a list of slots": (
        replace_action(0, 0, Send(1, [0, 1])),
        "rank 0, action 1 of its program: [0, 1] is no slot: give the number of a part, a ",
    ),  # type: ignore[arg-type]
    "a mean inside the exchange": (
        change_program(lambda rank, size, actions: [*actions, Compute("mean", 0)]),
        "rank 1 computes 'mean' on slot 0: an exchange only adds; the mean is taken once, after "
        "it (round 5)",
    ),
    "a bare pair": (
        replace_action(2, 1, (1, 0)),
        "rank 2, action 2 of its program: (1, 0) is of type tuple, not an action: yield Send",
    ),
    "nothing yielded": (
        replace_action(2, 0, None),
        "rank 2, action 1 of its program: None is of type NoneType, not an action: yield Send",
    ),
    "a list where a generator was meant": (
        return_list,
        "rank 0's program is of type list, not an iterator: yield its actions",
    ),
    "yield forgotten": (
        forget_to_yield,
        "rank 0's program is of type NoneType, not an iterator: yield its actions",
    ),
    "a program that raises": (
        raise_in_program,
        "rank 2's program among 3 ranks raised KeyError: 2 (after 3 actions)",
    ),
    "a program of the rank alone": (
        take_one_argument,
        "rank 0's program among 3 ranks raised TypeError: take_one_argument() takes 1 positional "
        "argument but 2 were given (after 0 actions)",
    ),
    "a program without end": (
        exchange_without_end,
        f"rank 0's program does not end: it has sent {MAX_SENDS_PER_PEER * 3 + 2 * 3 * 3 + 1} "
        "messages, and continues (round ",
    ),
    "messages without end, which nobody takes": (
        send_without_end,
        f"rank 0's program does not end: it has sent {MAX_SENDS_PER_PEER * 3 + 2 * 3 * 3 + 1} "
        "messages, and continues (round ",
    ),
    "right at 2 and 4, and not at 3": (
        exchange_whole_vectors,
        f"rank 2, action 1 of its program: Send(3, range(0, 3)) {NOBODY}",
    ),
    "a program that depends on how often it was asked for": (
        ByCall(itertools.count()),
        "rank 0, action 1 of its program: >1:0, and at the second call >2:0; let it depend on rank "
        "and size alone",
    ),
    "programs made beforehand, which are spent when they are played": (
        lambda rank, size: SHARED[rank, size],
        "rank 0, action 1 of its program: >1:0, and at the second call its end; let it depend on "
        "rank and size alone",
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_invalid_all_reduce_is_refused_by_name(story: str) -> None:
    program, message = STORIES[story]
    with pytest.raises(ScheduleError) as caught:
        prove_schedule(Broken(program), 3)
    assert str(caught.value).splitlines()[0].startswith(message)


def test_all_reduce_of_some_sizes_is_proved_there() -> None:
    for size in (1, 2, 4, 8):
        prove_schedule(Broken(exchange_whole_vectors), size)


def test_random_schedules_are_refused() -> None:
    """A program in random order is refused, whatever order it gets.

    Its messages do not match, or it deadlocks, or the second call gives another program.
    """
    for _ in range(20):
        with pytest.raises(
            ScheduleError, match=r"expects slot|deadlock|asked again|twice|ends without"
        ):
            prove_schedule(Broken(shuffle_actions), 4)


def test_schedule_without_a_program_is_refused() -> None:
    class Nothing:
        pass

    with pytest.raises(
        ScheduleError,
        match=r"^Nothing has no program; give it a method program\(rank, size\) of actions$",
    ):
        prove_schedule(Nothing(), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda size: 0, "parts(3) is 0: give a whole number from 1 to 4,194,304"),
        (lambda size: -3, "parts(3) is -3: give a whole number from 1 to 4,194,304"),
        (lambda size: 1.5, "parts(3) is 1.5: give a whole number from 1 to 4,194,304"),
        (lambda size: True, "parts(3) is True: give a whole number from 1 to 4,194,304"),
        (lambda size: None, "parts(3) is None: give a whole number from 1 to 4,194,304"),
        (lambda size: [3][size], "parts(3) raised IndexError: list index out of range"),
        (
            lambda: 3,
            "parts(3) raised TypeError: <lambda>() takes 0 positional arguments but 1 was given",
        ),
        (
            lambda size: next(calls) + 3,
            "parts(3) is 3, and 4 at the second call; let it depend on the size alone",
        ),
        (lambda size: 2, "rank 2 uses slot 2; the vector has slots 0 to 1 (round 1)"),
        (
            lambda size: 4,
            "rank 0 ends without the contribution of rank 1 in slot 3: it never takes that slot",
        ),
    ],
)
def test_invalid_parts_are_refused(parts: Callable[..., Any], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        prove_schedule(Broken(Line().program, parts), 3)
    assert str(caught.value) == message


def test_refusal_of_a_schedule_is_passed_on() -> None:
    """two_level itself refuses wrong groups, and its message is passed on unchanged."""
    with pytest.raises(
        Refused, match="groups of 2 do not make up 3 ranks; give a group that divides 3"
    ):
        prove_schedule(TwoLevel(group=2), 3)
    with pytest.raises(
        Refused, match="groups of 2 do not make up 3 ranks; give a group that divides 3"
    ):
        prove_schedule(Broken(TwoLevel(group=2).program, lambda size: size), 3)


def test_clock_reads_each_program_once() -> None:
    """Earlier, if the program was a list, the clock restarted it whenever a rank had to wait.

    So it never ended. Now the clock reads each program once.
    """
    cluster = Cluster(Link(3.0, 0.5))
    for story in (
        "a list where a generator was meant",
        "a message past the last rank",
        "a bare pair",
        "a program that raises",
    ):
        program, message = STORIES[story]
        with pytest.raises(ScheduleError) as caught:
            time_schedule(Broken(program), 3, 30, cluster)
        assert str(caught.value).startswith(message)
