"""The number of messages of a schedule, known before an executor plays them one by one.

A schedule with more messages than an executor can play is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from paragrad.errors import Refused
from paragrad.executors.program_reader import read_program
from paragrad.schedules.actions import Schedule, ScheduleError, Send


def count_rank_sends(schedule: Schedule, rank: int, size: int, limit: int) -> int | None:
    """Return the number of messages that a rank sends, or None if it is above a limit.

    Args:
        schedule: The schedule.
        rank: The rank.
        size: The number of ranks.
        limit: The limit.

    Raises:
        ScheduleError: If the program is invalid.
    """
    try:
        sent = sum(
            islice(
                (1 for action in schedule.program(rank, size) if type(action) is Send), limit + 1
            )
        )
    except Exception:
        sent = sum(1 for _ in read_program(schedule.program, rank, size))  # it names the error
    return sent if sent <= limit else None


def count_messages(schedule: Schedule, size: int, limit: int) -> int | None:
    """Return the number of messages of all ranks, or None if it is above a limit.

    Args:
        schedule: The schedule.
        size: The number of ranks.
        limit: The limit.
    """
    if size > limit:  # reading so many programs would take as long
        return None
    remaining = limit
    for rank in range(size):
        sent = count_rank_sends(schedule, rank, size, remaining)
        if sent is None:
            return None
        remaining -= sent
    return limit - remaining


class TooManyMessages(ScheduleError):
    """A schedule has more messages than an executor can play.

    The message names the largest power of two of ranks that is possible.

    Args:
        schedule: The schedule.

        size: The number of ranks.

        limit: The largest number of messages.

        activity: What the messages were to be, such as "drawn".

        fits: Whether a smaller number of ranks is possible.
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
            with suppress(ScheduleError, Refused):  # the schedule does not allow this size
                if not fits(fewer):
                    break
                largest = fewer
            fewer *= 2
        super().__init__(
            f"{schedule} over {size:,} ranks has more than {limit:,} messages, too many to be "
            f"{activity} one by one; take at most {largest:,} ranks"
        )


def refuse_many_messages(schedule: Schedule, size: int, limit: int, activity: str) -> int:
    """Return the number of messages of a schedule that an executor plays one by one.

    Args:
        schedule: The schedule.
        size: The number of ranks.
        limit: The largest number of messages.
        activity: What is done with the messages, such as "drawn".

    Raises:
        TooManyMessages: If there are more messages than the limit.
    """
    message_count = count_messages(schedule, size, limit)
    if message_count is None:
        raise TooManyMessages(
            schedule,
            size,
            limit,
            activity,
            lambda fewer: count_messages(schedule, fewer, limit) is not None,
        )
    return message_count
