"""Memory: how many bytes a rank holds while it plays its part of a pipeline, from what one
micro-batch weighs on each stage.

Activations live from a forward to its backward; what a forward made for the next stage from
there until it is known to be gone; what is awaited from when it is asked for (POSTS ahead)
until the task that wants it is done. The program is the one that is played, proved and timed;
times are no part of it, so the bytes are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paragrad.schedules.actions import Compute, Recv, Slot
from paragrad.schedules.pipeline import Pipelined, stage_of

# receives under way at a time: the one that is waited for, and two more, which come while a
# task is done
POSTS = 3


@dataclass(frozen=True)
class Weight:
    """Bytes of one micro-batch on one stage.

    came: the message of activations into it;  back: that of gradients out of it, to the stage
    before;  kept: what a forward keeps for its backward;  shared: of that, what is the message
    itself;  halved: what is kept between the two halves of a backward;  halving: at most, in
    the first half;  batch: what of the batch is kept, where a forward is made on a copy of it.
    """

    came: int
    back: int
    kept: int
    shared: int = 0
    halved: int = 0
    halving: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Moment:
    """A task, and the most that was held since the task before it."""

    task: str
    bytes: int


Weigh = Callable[[int, int], Weight]  # of a stage and a micro-batch


def moments(
    pipelined: Pipelined, rank: int, size: int, weigh: Weigh, recompute: bool = False
) -> list[Moment]:
    """What a rank holds, task by task."""
    return list(Holding(pipelined, rank, size, weigh, recompute).play())


class Holding:
    """What one rank holds while it plays its program."""

    def __init__(
        self, pipelined: Pipelined, rank: int, size: int, weigh: Weigh, recompute: bool
    ) -> None:
        self.pipelined = pipelined
        self.rank = rank
        self.last = pipelined.stages(size) - 1
        self.weigh = weigh
        self.program = list(pipelined.program(rank, size))
        self.over = pipelined.over(rank, size)
        self.again = pipelined.again(rank, size) if recompute else set()
        self.awaited = [action.slot for action in self.program if isinstance(action, Recv)]
        self.under_way = 0
        self.held: dict[Slot, int] = {}
        self.most = 0

    def play(self) -> Iterator[Moment]:
        for action in self.program:
            if isinstance(action, Compute):
                stage, micro = stage_of(self.rank, action.at)
                {"F": self.forward, "W": self.weights}.get(action.what, self.backward)(
                    action.what, stage, micro
                )
                self.most, told = sum(self.held.values()), self.most
                yield Moment(str(action), told)
                continue
            while self.awaited and self.under_way < POSTS:
                self.put(self.awaited[0], self.message(self.awaited.pop(0)))
                self.under_way += 1
            self.under_way -= isinstance(action, Recv)

    def put(self, slot: Slot, size: int) -> None:
        self.held[slot] = size
        self.most = max(self.most, sum(self.held.values()))

    def forget(self, *slots: Slot) -> None:
        for slot in slots:
            self.held.pop(slot, None)

    def message(self, slot: Slot) -> int:
        """Bytes of x{stage}.{micro} or g{stage}.{micro}."""
        stage, _, micro = str(slot)[1:].partition(".")
        weight = self.weigh(int(stage), int(micro))
        return weight.came if str(slot)[0] == "x" else weight.back

    def forward(self, _: str, stage: int, micro: int) -> None:
        came = f"x{stage}.{micro}"
        kept = f"kept {stage}.{micro}"
        weight = self.weigh(stage, micro)
        self.forget(*self.over.get(came, ()))
        keeps = stage >= self.pipelined.trained
        again = (stage, micro) in self.again
        if keeps and not again:
            self.put(kept, weight.kept - weight.shared)
        if stage < self.last:
            self.put(f"x{stage + 1}.{micro}", self.message(f"x{stage + 1}.{micro}"))
        if not again:
            self.forget(came)
            if keeps:
                self.put(kept, weight.kept)

    def backward(self, what: str, stage: int, micro: int) -> None:
        came = f"x{stage}.{micro}"
        back = f"g{stage + 1}.{micro}"
        kept = f"kept {stage}.{micro}"
        weight = self.weigh(stage, micro)
        self.forget(*self.over.get(back, ()))
        more = weight.batch if (stage, micro) in self.again else 0
        if (stage, micro) in self.again:
            self.put(kept, weight.kept - weight.shared + more)
            self.forget(came)
            self.put(kept, weight.kept + more)
        if what == "I":
            self.put(kept, weight.halving + more)
            self.put(kept, weight.halved + more)
        else:
            self.forget(kept)
        self.forget(back)
        if stage > self.pipelined.trained:
            self.put(f"g{stage}.{micro}", weight.back)

    def weights(self, _: str, stage: int, micro: int) -> None:
        self.forget(f"kept {stage}.{micro}")
