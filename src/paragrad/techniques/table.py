"""Which technique runs a strategy: found by the strategy's name, imported when it is used."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from paragrad.errors import StepFailed
from paragrad.record.log import Log
from paragrad.strategies.strategy import Strategy
from paragrad.techniques.exchange import Exchange, How, Replica
from paragrad.techniques.passes import OneByOne, Passes, Within
from paragrad.world.world import World

# modules with a function exchange(strategy, replica, world, log, how), and passes(strategy, within, exchange) where forward and
# backward go another way than one worker's
TECHNIQUES = {
    "serial": "paragrad.techniques.data_parallel",
    "data": "paragrad.techniques.data_parallel",
}


def ours(strategy: Strategy) -> bool:
    return strategy.name in TECHNIQUES


def exchange_of(strategy: Strategy, replica: Replica, world: World, log: Log, how: How) -> Exchange:
    """The exchange of a resolved strategy. Collective. One of a user's own has a method: exchange(replica, world, log, how)."""
    found = _part(strategy, "exchange")(replica, world, log, how)
    if not isinstance(found, Exchange):
        raise StepFailed(f"the exchange of {strategy.name} is a {type(found).__name__}; return a paragrad.Exchange")
    return found


def passes_of(strategy: Strategy, within: Within, exchange: Exchange) -> Passes:
    """Its passes; one worker's where it brings none. One of a user's own may have a method: passes(within, exchange)."""
    made = _part(strategy, "passes")
    found: Passes = made(within, exchange) if made else OneByOne(within, exchange)
    return found


def _part(strategy: Strategy, name: str) -> Any:
    """A function of the strategy's technique, given the strategy; a strategy of a user's own is its own technique."""
    if not ours(strategy):
        return getattr(strategy, name, None)
    made = getattr(importlib.import_module(TECHNIQUES[strategy.name]), name, None)
    return made and functools.partial(made, strategy)
