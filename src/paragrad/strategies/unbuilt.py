"""Strategies that are known by name and not built yet: the notation reads and prints them, the door refuses them.

Each moves to a file of its own when it is built.
"""

from __future__ import annotations

from paragrad.notation.choices import Choice, Decimal, Integer, Word, option
from paragrad.strategies.planned import SPLIT, Even, Planned
from paragrad.strategies.strategy import Promise, Strategy


class Unbuilt(Strategy, Planned, abstract=True):
    """A strategy that is known by name."""
    __slots__ = ()

    @property
    def promise(self) -> Promise:
        return Promise()


class Federated(Unbuilt):
    """Federated averaging: clients with data of their own, some of them each round (McMahan et al. 2017)."""
    workers: int = option(Integer())
    clients: int = option(Integer(), default=100)
    fraction: float = option(Decimal(most=1.0), default=0.1)
    local_epochs: int = option(Integer(), default=1)
    rounds: int | str = option(Integer(), Word("auto"), default="auto")
    split: Choice = option(SPLIT, default=Even())
    replica = True

    @property
    def promise(self) -> Promise:
        return Promise(exact=False)
