"""Which technique runs a strategy: found by its name, imported when it is used."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from paragrad.engine.exchange import Alone, Exchange, How, Replica
from paragrad.engine.model_shard import Share
from paragrad.engine.passes import OneByOne, Passes, Within
from paragrad.errors import StepFailed
from paragrad.record.step_log import Log
from paragrad.runtime import stragglers
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy, factors_of

# modules with a function exchange(strategy, replica, world, log, how), or share(strategy,
# model, example, axis) (with another argument, what look(strategy, model, example) saw on the
# first rank, where there is one), and passes(strategy, within, exchange) where forward and
# backward go another way than one worker's
TECHNIQUES = {
    "serial": "paragrad.parallel.data",
    "data": "paragrad.parallel.data",
    "local": "paragrad.parallel.averaging.averaging",
    "federated": "paragrad.parallel.averaging.federated",
    "server": "paragrad.parallel.server",
    "place": "paragrad.parallel.pipeline.pipeline",
    "pipeline": "paragrad.parallel.pipeline.pipeline",
    "tensor": "paragrad.parallel.tensor.tensor",
    "branch": "paragrad.parallel.branch.branch",
    "spatial": "paragrad.parallel.spatial.spatial",
    "integrated": "paragrad.parallel.spatial.spatial",
}


def ours(strategy: Strategy) -> bool:
    return strategy.technique in TECHNIQUES


def bringing(strategy: Strategy, what: str) -> list[Strategy]:
    """The factors of a strategy that bring an exchange, a share of the model, or passes."""
    return [factor for factor in factors_of(strategy) if _part(factor, what)]


def cuts(strategy: Strategy) -> bool:
    """Does it divide the model?"""
    return bool(bringing(strategy, "share"))


def checks_of(strategy: Strategy) -> list[Callable[[nn.Module, Any, bool], None]]:
    """Of the factors that say at the door whether they can cut a model, how: check(model,
    example, tested) raises StepFailed.
    """
    return [
        check
        for factor in factors_of(strategy)
        if (check := _part(factor, "check") if ours(factor) else None)
    ]


def telling(strategy: Strategy) -> bool:
    """Does a factor say what it does with the layers of a model?"""
    return any(ours(factor) and _part(factor, "told") for factor in factors_of(strategy))


def told_of(strategy: Strategy, model: nn.Module, inputs: Any, samples: int) -> list[str]:
    """What the factors that say so do with a model's layers, in lines. inputs: of so many
    samples. Raises StepFailed.
    """
    return [
        line
        for factor in factors_of(strategy)
        if (told := _part(factor, "told") if ours(factor) else None)
        for line in told(model, inputs, samples)
    ]


def share_of(
    strategy: Strategy, model: nn.Module, example: Any, world: World, looks: dict[str, Any]
) -> Share:
    """This rank's share of a model, which is changed: cut by the innermost factor first, along
    its axes, and last by those that split layers, of what others leave. Collective. looks: by
    the names of factors what each saw of the whole model; kept there, and taken from there.

    One of a user's own has a method: share(model, example, axis).
    """
    share = Share.all_of(model)
    factors = factors_of(strategy)[::-1]
    cutting = [
        *(each for each in factors if not each.inside),
        *(each for each in factors if each.inside),
    ]
    for factor in cutting:
        # once, and told to all: replicas are cut alike
        looked = _part(factor, "look")
        if looked and factor.name not in looks:
            with stragglers.meanwhile("rank 0 looks where to cut the model"):
                looks[factor.name] = world.agreed(
                    looked(model, example) if world.rank == 0 else None
                )
    for factor in cutting:
        if made := _part(factor, "share"):
            axes = [axis.name for axis in factor.axes if axis.divides != "samples"]
            try:
                looked = factor.name in looks
                found = made(
                    share.model,
                    example,
                    world.along(axes),
                    *([looks[factor.name]] if looked else []),
                )
            except Exception as error:
                if ours(factor) or isinstance(error, StepFailed):
                    raise
                raise StepFailed(
                    f"share() of {factor} raised {type(error).__name__}: {error}"
                ) from error
            if not isinstance(found, Share):
                raise StepFailed(
                    f"the share of {factor.name} is a {type(found).__name__}; return a "
                    f"paragrad.Share"
                )
            share = found.after(share)
    return share


def exchange_of(strategy: Strategy, replica: Replica, world: World, log: Log, how: How) -> Exchange:
    """The exchange of a resolved strategy: of a product, that of the factor that has one, along
    its axes; one replica has none. Collective. One of a user's own has a method:
    exchange(replica, world, log, how).
    """
    found: Any = Alone(replica)
    if bring := bringing(strategy, "exchange"):  # one at most (admission)
        along = world if strategy in bring else world.along([axis.name for axis in bring[0].axes])
        found = _part(bring[0], "exchange")(replica, along, log, how)
    if not isinstance(found, Exchange):
        raise StepFailed(
            f"the exchange of {bring[0].name} is a {type(found).__name__}; return a "
            f"paragrad.Exchange"
        )
    lacks = "serve" if how.serves(strategy, world.rank) else "dismiss"
    if strategy.servers and getattr(type(found), lacks) is getattr(Exchange, lacks):
        raise StepFailed(
            f"{strategy} has servers, and its {type(found).__name__} no {lacks}; give it a method "
            f"{lacks}(self)"
        )
    if left := {what for values in replica.restored.values() for what in values} - set(found.keeps):
        log.choice(
            "checkpoint", f"without {', '.join(sorted(left))}", f"{strategy} has no use for it"
        )
    return found


def passes_of(strategy: Strategy, within: Within, exchange: Exchange) -> Passes:
    """Its passes; one worker's where it brings none. One of a user's own may have a method:
    passes(within, exchange).
    """
    bring = bringing(strategy, "passes")
    found = _part(bring[0], "passes")(within, exchange) if bring else OneByOne(within, exchange)
    if not isinstance(found, Passes):
        raise StepFailed(
            f"the passes of {strategy} are a {type(found).__name__}; return paragrad.Passes"
        )
    return found


def _part(strategy: Strategy, name: str) -> Any:
    """A function of the strategy's technique, given the strategy; a strategy of a user's own is
    its own technique.
    """
    if not ours(strategy):
        return getattr(strategy, name, None)
    made = getattr(importlib.import_module(TECHNIQUES[strategy.technique]), name, None)
    return made and functools.partial(made, strategy)
