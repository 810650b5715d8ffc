"""Which technique runs a strategy: found by its name, imported when it is used."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from paragrad.engine.exchange import Exchange, ExchangeOptions, NoExchange, Replica
from paragrad.engine.model_shard import ModelShard
from paragrad.engine.passes import Passes, PassesHost, SequentialPasses
from paragrad.errors import StepFailed
from paragrad.record.step_log import StepLog
from paragrad.runtime import stragglers
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy, list_factors

# modules with a function exchange(strategy, replica, world, log, how), or share(strategy,
# model, example, axis) (with another argument, what look(strategy, model, example) saw on the
# first rank, where there is one), and passes(strategy, within, exchange) where forward and
# backward go another way than one worker's
TECHNIQUE_MODULES = {
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


def is_builtin_technique(strategy: Strategy) -> bool:
    return strategy.technique in TECHNIQUE_MODULES


def select_factors(strategy: Strategy, function_name: str) -> list[Strategy]:
    """The factors of a strategy that bring an exchange, a share of the model, or passes."""
    return [factor for factor in list_factors(strategy) if _find_function(factor, function_name)]


def has_model_shards(strategy: Strategy) -> bool:
    """Does it divide the model?"""
    return bool(select_factors(strategy, "shard_model"))


def list_model_checks(strategy: Strategy) -> list[Callable[[nn.Module, Any, bool], None]]:
    """Of the factors that say at the door whether they can cut a model, how: check(model,
    example, tested) raises StepFailed.
    """
    return [
        check
        for factor in list_factors(strategy)
        if (
            check := _find_function(factor, "check_model") if is_builtin_technique(factor) else None
        )
    ]


def has_layer_descriptions(strategy: Strategy) -> bool:
    """Does a factor say what it does with the layers of a model?"""
    return any(
        is_builtin_technique(factor) and _find_function(factor, "describe_layers")
        for factor in list_factors(strategy)
    )


def describe_model_layers(
    strategy: Strategy, model: nn.Module, inputs: Any, samples: int
) -> list[str]:
    """What the factors that say so do with a model's layers, in lines. inputs: of so many
    samples. Raises StepFailed.
    """
    return [
        line
        for factor in list_factors(strategy)
        if (
            told := _find_function(factor, "describe_layers")
            if is_builtin_technique(factor)
            else None
        )
        for line in told(model, inputs, samples)
    ]


def build_model_shard(
    strategy: Strategy, model: nn.Module, example: Any, world: World, inspections: dict[str, Any]
) -> ModelShard:
    """This rank's share of a model, which is changed: cut by the innermost factor first, along
    its axes, and last by those that split layers, of what others leave. Collective. looks: by
    the names of factors what each saw of the whole model; kept there, and taken from there.

    One of a user's own has a method: share(model, example, axis).
    """
    share = ModelShard.build_undivided(model)
    factors = list_factors(strategy)[::-1]
    cutting = [
        *(each for each in factors if not each.splits_layers),
        *(each for each in factors if each.splits_layers),
    ]
    for factor in cutting:
        # once, and told to all: replicas are cut alike
        looked = _find_function(factor, "inspect_model")
        if looked and factor.name not in inspections:
            with stragglers.explain_timeout("rank 0 looks where to cut the model"):
                inspections[factor.name] = world.broadcast_object(
                    looked(model, example) if world.rank == 0 else None
                )
    for factor in cutting:
        if made := _find_function(factor, "shard_model"):
            axes = [axis.name for axis in factor.axes if axis.divides != "samples"]
            try:
                looked = factor.name in inspections
                found = made(
                    share.model,
                    example,
                    world.select_axes(axes),
                    *([inspections[factor.name]] if looked else []),
                )
            except Exception as error:
                if is_builtin_technique(factor) or isinstance(error, StepFailed):
                    raise
                raise StepFailed(
                    f"shard_model() of {factor} raised {type(error).__name__}: {error}"
                ) from error
            if not isinstance(found, ModelShard):
                raise StepFailed(
                    f"the share of {factor.name} is a {type(found).__name__}; return a "
                    f"paragrad.ModelShard"
                )
            share = found.compose_with(share)
    return share


def build_exchange(
    strategy: Strategy, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
) -> Exchange:
    """The exchange of a resolved strategy: of a product, that of the factor that has one, along
    its axes; one replica has none. Collective. One of a user's own has a method:
    exchange(replica, world, log, how).
    """
    found: Any = NoExchange(replica)
    if bring := select_factors(strategy, "make_exchange"):  # one at most (admission)
        along = (
            world if strategy in bring else world.select_axes([axis.name for axis in bring[0].axes])
        )
        found = _find_function(bring[0], "make_exchange")(replica, along, log, options)
    if not isinstance(found, Exchange):
        raise StepFailed(
            f"the exchange of {bring[0].name} is a {type(found).__name__}; return a "
            f"paragrad.Exchange"
        )
    lacks = "serve" if options.is_server(strategy, world.rank) else "dismiss_servers"
    if strategy.servers and getattr(type(found), lacks) is getattr(Exchange, lacks):
        raise StepFailed(
            f"{strategy} has servers, and its {type(found).__name__} no {lacks}; give it a method "
            f"{lacks}(self)"
        )
    if left := {what for values in replica.restored_tensors.values() for what in values} - set(
        found.saved_names
    ):
        log.write_choice(
            "checkpoint", f"without {', '.join(sorted(left))}", f"{strategy} has no use for it"
        )
    return found


def build_passes(strategy: Strategy, host: PassesHost, exchange: Exchange) -> Passes:
    """Its passes; one worker's where it brings none. One of a user's own may have a method:
    passes(within, exchange).
    """
    bring = select_factors(strategy, "make_passes")
    found = (
        _find_function(bring[0], "make_passes")(host, exchange)
        if bring
        else SequentialPasses(host, exchange)
    )
    if not isinstance(found, Passes):
        raise StepFailed(
            f"the passes of {strategy} are a {type(found).__name__}; return paragrad.Passes"
        )
    return found


def _find_function(strategy: Strategy, name: str) -> Any:
    """A function of the strategy's technique, given the strategy; a strategy of a user's own is
    its own technique.
    """
    if not is_builtin_technique(strategy):
        return getattr(strategy, name, None)
    made = getattr(importlib.import_module(TECHNIQUE_MODULES[strategy.technique]), name, None)
    return made and functools.partial(made, strategy)
