"""A rank's program, read action by action, for the players of one process: what is none is
refused by name.

A schedule may be anybody's: a program that raises or is no iterator, an action that is none, a
rank that does not exist. The wire reads none of this: it plays what was proved.
"""

from __future__ import annotations

from collections.abc import Callable

from paragrad.errors import Refused
from paragrad.schedules.actions import Action, Compute, Program, Recv, ScheduleError, Send


def read_program(program: Callable[[int, int], Program], rank: int, size: int) -> Program:
    """The actions of `program(rank, size)`. Raises ScheduleError that names the rank and the
    number of its action, from 1.
    """
    done = 0
    try:
        actions = program(rank, size)
        if not hasattr(actions, "__next__"):
            raise ScheduleError(
                f"rank {rank}'s program is of type {type(actions).__name__}, no iterator: yield "
                f"its actions"
            )
        for done, action in enumerate(actions, 1):
            if wrong := _find_action_error(action, rank, size):
                raise ScheduleError(f"rank {rank}, action {done} of its program: {wrong}")
            yield action
    except (ScheduleError, Refused):
        raise
    except Exception as error:
        raise ScheduleError(
            f"rank {rank}'s program among {size} ranks raised {type(error).__name__}: {error} "
            f"(after {done} "
            f"action{'s' * (done != 1)})"
        ) from error


def _find_action_error(action: Action, rank: int, size: int) -> str | None:
    """What is wrong with an action, whatever the schedule is for."""
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
            f"{action!r} is of type {type(action).__name__}, no action: yield Send, Recv or Compute"
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
