"""Draw a schedule as text: a line for each rank, a column for each round.

`>1:0` sends slot 0 to rank 1 (`!`: and waits until rank 1 has it). `<3:2+` receives slot 2 from
rank 3 and adds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.executors.interpreter import RoundCounter, interpret_schedule
from paragrad.schedules.actions import Compute, Recv, Schedule, Send, Slot


def draw_text(schedule: Schedule, size: int) -> str:
    """Return the drawing of a schedule: a line for each rank, a column for each round.

    Args:
        schedule: The schedule.
        size: The number of ranks.
    """
    diagram = Diagram.build(schedule, size)
    cells = [
        [" ".join(row[column]) if column < len(row) else "" for column in range(diagram.columns)]
        for row in diagram.cells
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(diagram.columns)]
    margin = len(str(size - 1))
    return "\n".join(
        (f"{rank:>{margin}} | " + "   ".join(map(str.ljust, row, widths))).rstrip()
        for rank, row in enumerate(cells)
    )


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message in a drawing.

    Attributes:
        source: The rank that sends it.

        target: The rank that receives it.

        sent: The column of the Send.

        received: The column of the Recv.

        slot: The slot.

        added: Whether it is added to the slot.
    """

    source: int
    target: int
    sent: int
    received: int
    slot: Slot
    added: bool


class Diagram:
    """The actions of each rank by round, and the messages.

    It is an `Interpretation` (interpreter.py): `read` is called for each Send, `write` for each
    Recv, and `compute` for each Compute.

    Attributes:
        cells: For each rank, the texts of its actions in each column.
        arrows: The messages.
        computed: The (rank, column, text) of each Compute.
        rounds: The counter of rounds.
    """

    def __init__(self, size: int) -> None:
        self.cells: list[list[list[str]]] = [[] for _ in range(size)]
        self.arrows: list[Arrow] = []
        self.computed: list[tuple[int, int, str]] = []
        self.rounds = RoundCounter(size)

    @classmethod
    def build(cls, schedule: Schedule, size: int) -> Diagram:
        """Return the diagram of a schedule over `size` ranks."""
        diagram = cls(size)
        interpret_schedule(schedule.program, size, diagram, rounds=diagram.rounds)
        return diagram

    @property
    def columns(self) -> int:
        """The number of columns."""
        return max((len(row) for row in self.cells), default=0)

    def _place_text(self, rank: int, text: str) -> int:
        """Add a text to the round of a rank's last action; return its column."""
        row = self.cells[rank]
        column = self.rounds.current[rank] - 1
        row.extend([] for _ in range(column + 1 - len(row)))
        row[column].append(text)
        return column

    def read(self, rank: int, send: Send) -> int:
        """Draw a Send; the payload of the message is its column."""
        return self._place_text(rank, str(send))

    def write(self, rank: int, recv: Recv, payload: int) -> None:
        """Draw a Recv and the arrow of its message."""
        self.arrows.append(
            Arrow(recv.frm, rank, payload, self._place_text(rank, str(recv)), recv.slot, recv.add)
        )

    def compute(self, rank: int, action: Compute) -> None:
        """Draw a Compute."""
        self.computed.append((rank, self._place_text(rank, str(action)), str(action)))
