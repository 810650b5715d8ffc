"""How many messages a schedule has, before somebody plays them one by one: more than a player
can are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from paragrad.errors import Refused
from paragrad.executors.program_reader import read_program
from paragrad.schedules.actions import Schedule, ScheduleError, Send


def count_rank_sends(schedule: Schedule, rank: int, size: int, limit: int) -> int | None:
    """Messages that a rank sends; None where there are more than `most`. Raises ScheduleError
    where the program does.
    """
    try:
        found = sum(
            islice(
                (1 for action in schedule.program(rank, size) if type(action) is Send), limit + 1
            )
        )
    except Exception:
        found = sum(1 for _ in read_program(schedule.program, rank, size))  # it is named there
    return found if found <= limit else None


def count_messages(schedule: Schedule, size: int, limit: int) -> int | None:
    """Messages of all ranks; None where there are more than `most`."""
    if size > limit:  # asking as many ranks would take as long
        return None
    left = limit
    for rank in range(size):
        sent = count_rank_sends(schedule, rank, size, left)
        if sent is None:
            return None
        left -= sent
    return limit - left


class TooManyMessages(ScheduleError):
    """A schedule of more messages than a player can play. Its message names the largest power
    of two of ranks that goes.
    """

    def __init__(
        self,
        schedule: Schedule,
        size: int,
        limit: int,
        activity: str,
        fits: Callable[[int], object],
    ) -> None:
        largest = 1
        fewer = 2
        while fewer < size:
            with suppress(ScheduleError, Refused):  # a size that it is not for
                if not fits(fewer):
                    break
                largest = fewer
            fewer *= 2
        super().__init__(
            f"{schedule} over {size:,} ranks has more than {limit:,} messages, too many to be "
            f"{activity} one by one; "
            f"take fewer ranks: {largest:,} go"
        )


def refuse_many_messages(schedule: Schedule, size: int, limit: int, activity: str) -> int:
    """The messages of a schedule that is to be played one by one (`doing`: drawn). Raises
    TooLong.
    """
    found = count_messages(schedule, size, limit)
    if found is None:
        raise TooManyMessages(
            schedule,
            size,
            limit,
            activity,
            lambda fewer: count_messages(schedule, fewer, limit) is not None,
        )
    return found
