"""Reading a rank's program action by action, for the executors that run in one process.

A schedule may be a user's own. An invalid program is refused by name: a program that raises or is
no iterator, an invalid action, a rank that does not exist. The transport checks none of this: it
runs schedules that were proved.
"""

from __future__ import annotations

from collections.abc import Callable

from paragrad.errors import Refused
from paragrad.schedules.actions import Action, Compute, Program, Recv, ScheduleError, Send


def read_program(program: Callable[[int, int], Program], rank: int, size: int) -> Program:
    """Generate the actions of `program(rank, size)`.

    Args:
        program: The program of a rank.
        rank: The rank.
        size: The number of ranks.

    Raises:
        ScheduleError: If the program or an action is invalid. It names the rank and the number of
            the action, from 1.
    """
    done = 0
    try:
        actions = program(rank, size)
        if not hasattr(actions, "__next__"):
            raise ScheduleError(
                f"rank {rank}'s program is of type {type(actions).__name__}, not an iterator: "
                "yield its actions"
            )
        for done, action in enumerate(actions, 1):
            if problem := _find_action_error(action, rank, size):
                raise ScheduleError(f"rank {rank}, action {done} of its program: {problem}")
            yield action
    except (ScheduleError, Refused):
        raise
    except Exception as error:
        raise ScheduleError(
            f"rank {rank}'s program among {size} ranks raised {type(error).__name__}: {error} "
            f"(after {done} action{'s' * (done != 1)})"
        ) from error


def _find_action_error(action: Action, rank: int, size: int) -> str | None:
    """Return what is wrong with an action, whatever the schedule is for, or None."""
    if isinstance(action, Send):
        peer = action.to
        slot = action.slot
    elif isinstance(action, Recv):
        peer = action.frm
        slot = action.slot
    elif isinstance(action, Compute):
        return _find_slot_error(action.at)
    else:
        return (
            f"{action!r} is of type {type(action).__name__}, not an action: yield Send, Recv or "
            "Compute"
        )
    if isinstance(peer, int) and 0 <= peer < size and peer != rank:
        return _find_slot_error(slot)
    what = f"{type(action).__name__}({peer!r}, {slot!r})"
    if peer == rank:
        return f"{what} is a message to itself; leave it out"
    return f"{what} is for a rank that does not exist: there are 0 to {size - 1}, as whole numbers"


def _find_slot_error(slot: object) -> str | None:
    if isinstance(slot, int | str) or (isinstance(slot, range) and slot and slot.step == 1):
        return None
    return (
        f"{slot!r} is no slot: give the number of a part, a range of neighbouring parts, or a name"
    )
