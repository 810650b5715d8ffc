"""Draw a schedule as text: a line for each rank, a column for each round, as it is walked.

`>1:0` sends slot 0 to rank 1 (`!`: and waits until rank 1 has it), `<3:2+` receives slot 2 from rank 3 and adds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.players.walk import walk
from paragrad.schedules.actions import Collective, Compute, Recv, Send, Slot


def draw(schedule: Collective, size: int) -> str:
    """The drawing of a schedule over `size` ranks, at most as many columns as it has rounds."""
    diagram = Diagram.of(schedule, size)
    cells = [[" ".join(row[column]) if column < len(row) else "" for column in range(diagram.columns)] for row in diagram.cells]
    widths = [max(len(row[column]) for row in cells) for column in range(diagram.columns)]
    margin = len(str(size - 1))
    return "\n".join(f"{rank:>{margin}} | " + "   ".join(map(str.ljust, row, widths)).rstrip()
                     for rank, row in enumerate(cells)).replace("| \n", "|\n")


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
    """The actions of each rank by round, and the messages.

    A rank starts one send and ends one receive in a round (links carry both ways at once), keeps the order of its own actions,
    and a message cannot arrive before the round it was sent in.
    """

    def __init__(self, size: int) -> None:
        self.cells: list[list[list[str]]] = [[] for _ in range(size)]
        self.arrows: list[Arrow] = []
        self.free_to_send, self.free_to_recv = [0] * size, [0] * size

    @classmethod
    def of(cls, schedule: Collective, size: int) -> Diagram:
        """That of a schedule over `size` ranks."""
        diagram = cls(size)
        walk(schedule.program, size, diagram)
        return diagram

    @property
    def columns(self) -> int:
        return max((len(row) for row in self.cells), default=0)

    def _put(self, rank: int, column: int, text: str) -> None:
        row = self.cells[rank]
        row.extend([] for _ in range(column + 1 - len(row)))
        row[column].append(text)

    def read(self, rank: int, send: Send) -> int:
        column = max(self.free_to_send[rank], self.free_to_recv[rank])
        self._put(rank, column, str(send))
        self.free_to_send[rank] = column + 1
        if send.wait:
            self.free_to_recv[rank] = column + 1
        return column

    def write(self, rank: int, recv: Recv, payload: int) -> None:
        column = max(payload, self.free_to_recv[rank])
        self._put(rank, column, str(recv))
        self.arrows.append(Arrow(recv.frm, rank, payload, column, recv.slot, recv.add))
        self.free_to_recv[rank] = column + 1

    def compute(self, rank: int, action: Compute) -> None:
        column = max(self.free_to_send[rank], self.free_to_recv[rank])
        self._put(rank, column, str(action))
        self.free_to_send[rank] = self.free_to_recv[rank] = column + 1
