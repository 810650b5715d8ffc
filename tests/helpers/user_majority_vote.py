"""A user's strategy, outside the library: every rank votes for the sign of each gradient.

It is signSGD with majority vote (Bernstein et al. 2018, arXiv 1802.04434). It does not promise
the training of serial.
"""

from __future__ import annotations

from typing import Any

import torch
from equality_table import VECTORS, make_job, make_mlp

import paragrad as pg
from paragrad.planner.cost_formulas import count_collective_bytes


class Vote(pg.Strategy):
    """Signs of gradients, by majority (Bernstein et al. 2018)."""

    workers: int = pg.option(pg.Integer())
    is_replicated = True

    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees(exact=False)

    def make_exchange(self, replica: Any, world: Any, log: Any, options: Any) -> pg.Exchange:
        return VoteExchange(replica, world)


class VoteExchange(pg.Exchange):
    """The sign of the sum of all ranks' signs."""

    def __init__(self, replica: Any, world: Any) -> None:
        super().__init__(replica)
        self.world = world

    def finish(self, weight: float, loss: float) -> None:
        totals = [weight, loss, float(self.stop_requested), self.doubtful_weight]
        self.totals = self.world.all_reduce(torch.tensor(totals, dtype=torch.float64)).tolist()
        for parameter in self.parameters:
            # all ranks make the same calls, also if only other ranks have a gradient
            if parameter.requires_grad:
                vote = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.sign()
                )
                parameter.grad = self.world.all_reduce(vote).sign()
                sent = count_collective_bytes("all_reduce", vote.nbytes, self.world.size)
                self.count_bytes("votes", sent, computed=True)

    def reduce_totals(self) -> list[float]:
        return self.totals

    def average(self, weight: float) -> None:
        """Signs have no mean."""


job = make_job(
    "voted",
    make_mlp,
    VECTORS,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
)
