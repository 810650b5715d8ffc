"""Draw a schedule as text: a line for each rank, a column for each round, as it is walked.

`>1:0` sends slot 0 to rank 1 (`!`: and waits until rank 1 has it), `<3:2+` receives slot 2 from
rank 3 and adds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.executors.interpreter import RoundCounter, interpret_schedule
from paragrad.schedules.actions import Compute, Recv, Schedule, Send, Slot


def draw_text(schedule: Schedule, size: int) -> str:
    """The drawing of a schedule over `size` ranks, at most as many columns as it has rounds."""
    diagram = Diagram.build(schedule, size)
    cells = [
        [" ".join(row[column]) if column < len(row) else "" for column in range(diagram.columns)]
        for row in diagram.cells
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(diagram.columns)]
    margin = len(str(size - 1))
    return "\n".join(
        f"{rank:>{margin}} | " + "   ".join(map(str.ljust, row, widths)).rstrip()
        for rank, row in enumerate(cells)
    ).replace("| \n", "|\n")


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message: between which ranks, and in which rounds it was sent and received."""

    source: int
    target: int
    sent: int
    received: int
    slot: Slot
    added: bool


class Diagram:
    """The actions of each rank by round, and the messages."""

    def __init__(self, size: int) -> None:
        self.cells: list[list[list[str]]] = [[] for _ in range(size)]
        self.arrows: list[Arrow] = []
        self.computed: list[tuple[int, int, str]] = []  # (rank, round, what)
        self.rounds = RoundCounter(size)

    @classmethod
    def build(cls, schedule: Schedule, size: int) -> Diagram:
        """That of a schedule over `size` ranks."""
        diagram = cls(size)
        interpret_schedule(schedule.program, size, diagram, rounds=diagram.rounds)
        return diagram

    @property
    def columns(self) -> int:
        return max((len(row) for row in self.cells), default=0)

    def _place_text(self, rank: int, text: str) -> int:
        """Into the round of a rank's last action; its column."""
        row = self.cells[rank]
        column = self.rounds.current[rank] - 1
        row.extend([] for _ in range(column + 1 - len(row)))
        row[column].append(text)
        return column

    def read(self, rank: int, send: Send) -> int:
        return self._place_text(rank, str(send))

    def write(self, rank: int, recv: Recv, payload: int) -> None:
        self.arrows.append(
            Arrow(recv.frm, rank, payload, self._place_text(rank, str(recv)), recv.slot, recv.add)
        )

    def compute(self, rank: int, action: Compute) -> None:
        self.computed.append((rank, self._place_text(rank, str(action)), str(action)))
