"""The registry of techniques: which module runs a strategy, and what that module provides.

A module provides a model shard, an exchange or passes. It is imported when it is used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paragrad.engine.exchange import (
    Exchange,
    ExchangeOptions,
    NoExchange,
    Replica,
)
from paragrad.engine.model_shard import ModelShard
from paragrad.engine.passes import Passes, PassesHost, SequentialPasses
from paragrad.errors import StepFailed
from paragrad.record.step_log import StepLog
from paragrad.runtime import stragglers
from paragrad.runtime.single_group import act_alone
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy, list_factors

# Each module has some of these functions:
#   make_exchange(strategy, replica, world, log, options)
#   shard_model(strategy, model, example, axis): with inspect_model, it gets the result of the first
#       rank as another argument
#   inspect_model(strategy, model, example): called before the model is divided
#   check_model(strategy, model, example, tested): called by validation (`list_model_checks`)
#   describe_layers(strategy, model, inputs, samples): lines of text (`describe_model_layers`)
#   make_passes(strategy, host, exchange): if the technique has its own order of passes
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
    """Return whether a strategy belongs to this library.

    Args:
        strategy: The strategy.
    """
    return strategy.technique in TECHNIQUE_MODULES


def select_factors(strategy: Strategy, function_name: str) -> list[Strategy]:
    """Return the factors of a strategy that bring an exchange, a model shard, or passes.

    Args:
        strategy: The strategy.
        function_name: `make_exchange`, `shard_model` or `make_passes`.
    """
    return [factor for factor in list_factors(strategy) if _find_function(factor, function_name)]


def has_model_shards(strategy: Strategy) -> bool:
    """Return whether a strategy divides the model.

    Args:
        strategy: The strategy.
    """
    return bool(select_factors(strategy, "shard_model"))


def list_model_checks(strategy: Strategy) -> list[Callable[[nn.Module, Any, bool], None]]:
    """Return, for each factor that has one, the check whether it can divide a model.

    Validation runs these checks.

    Args:
        strategy: The strategy.

    Returns:
        Functions check(model, example, tested), which raise StepFailed. With `tested`, the model
        must run in eval mode too, because the job has a test.
    """
    return [
        check
        for factor in list_factors(strategy)
        if (
            check := _find_function(factor, "check_model") if is_builtin_technique(factor) else None
        )
    ]


def has_layer_descriptions(strategy: Strategy) -> bool:
    """Return whether a factor describes what it does with the layers of a model.

    Args:
        strategy: The strategy.
    """
    return any(
        is_builtin_technique(factor) and _find_function(factor, "describe_layers")
        for factor in list_factors(strategy)
    )


def describe_model_layers(
    strategy: Strategy, model: nn.Module, inputs: Any, samples: int
) -> list[str]:
    """Describe what the factors of a strategy do with the layers of a model.

    Args:
        strategy: The strategy.
        model: The model.
        inputs: Inputs of some samples.
        samples: Number of these samples.

    Returns:
        Lines of text.

    Raises:
        StepFailed: A factor cannot divide the model.
    """
    return [
        line
        for factor in list_factors(strategy)
        if (
            describe := _find_function(factor, "describe_layers")
            if is_builtin_technique(factor)
            else None
        )
        for line in describe(model, inputs, samples)
    ]


def build_model_shard(
    strategy: Strategy, model: nn.Module, example: Any, world: World, inspections: dict[str, Any]
) -> ModelShard:
    """Build the shard of a model for this rank. The model is changed. Collective.

    The innermost factor divides first, along its axes. Factors that split layers divide last, and
    divide what the others leave. A strategy of the user has a method `shard_model(model, example,
    axis)`.

    Args:
        strategy: The strategy.
        model: The whole model.
        example: Inputs of some samples.
        world: All ranks.
        inspections: For each factor by name, what its inspection of the whole model found. Entries
            are added and reused.

    Returns:
        The shard in terms of the serial model.

    Raises:
        StepFailed: A factor cannot divide the model, or returned something else than a shard.
    """
    shard = ModelShard.build_undivided(model)
    factors = list_factors(strategy)[::-1]
    dividing = [
        *(each for each in factors if not each.splits_layers),
        *(each for each in factors if each.splits_layers),
    ]
    for factor in dividing:
        # rank 0 inspects once and shares the result, so that all replicas are divided equally
        inspect_model = _find_function(factor, "inspect_model")
        if inspect_model and factor.name not in inspections:
            with (
                stragglers.explain_timeout("rank 0 decides where to divide the model"),
                act_alone(),
            ):
                inspections[factor.name] = world.broadcast_object(
                    inspect_model(model, example) if world.rank == 0 else None
                )
    for factor in dividing:
        if shard_function := _find_function(factor, "shard_model"):
            axes = [axis.name for axis in factor.axes if axis.divides != "samples"]
            try:
                is_inspected = factor.name in inspections
                factor_shard = shard_function(
                    shard.model,
                    example,
                    world.select_axes(axes),
                    *([inspections[factor.name]] if is_inspected else []),
                )
            except Exception as error:
                if is_builtin_technique(factor) or isinstance(error, StepFailed):
                    raise
                raise StepFailed(
                    f"shard_model() of {factor} raised {type(error).__name__}: {error}"
                ) from error
            if not isinstance(factor_shard, ModelShard):
                raise StepFailed(
                    f"the shard of {factor.name} is a {type(factor_shard).__name__}; return a "
                    "paragrad.ModelShard"
                )
            shard = factor_shard.compose_with(shard)
    return shard


def check_equal_schedules(world: World, strategy: Strategy) -> None:
    """Check that all ranks have the same schedules.

    Collective. A program is a function of (rank, size) alone, and every process generates it.

    Args:
        world: The ranks.
        strategy: The resolved strategy.

    Raises:
        StepFailed: If a rank has another program.
    """
    for plan in strategy.plan_schedules():
        # If there are many ranks, only some of their programs are compared.
        ranks = range(0, plan.size, max(1, plan.size // 32))
        text = repr([list(plan.schedule.program(rank, plan.size)) for rank in ranks])
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8
        ).long()
        for rank, other_digest in enumerate(world.all_gather(digest)):
            if not torch.equal(other_digest, digest):
                raise StepFailed(
                    f"{plan.schedule} has another program on rank {rank} than on rank "
                    f"{world.rank}: it must be a function of (rank, size) only, not of the "
                    "process, its environment or random numbers"
                )


def build_exchange(
    strategy: Strategy, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
) -> Exchange:
    """Build the exchange of a resolved strategy. Collective.

    In a product, at most one factor has an exchange; its ranks are those along its own axes. A
    single replica needs no exchange. A strategy of the user has a method `make_exchange(replica,
    world, log, options)`.

    Args:
        strategy: The resolved strategy.
        replica: What this rank holds of the training.
        world: All ranks.
        log: The record of this rank.
        options: Options of the exchange.

    Returns:
        The exchange.

    Raises:
        StepFailed: The strategy returned something else than an exchange, or it has servers and its
            exchange lacks a method for them.
    """
    result: Any = NoExchange(replica)
    if factors := select_factors(strategy, "make_exchange"):  # at most one (see validation)
        axis_world = (
            world
            if strategy in factors  # not a product
            else world.select_axes([axis.name for axis in factors[0].axes])
        )
        result = _find_function(factors[0], "make_exchange")(replica, axis_world, log, options)
    if not isinstance(result, Exchange):
        raise StepFailed(
            f"the exchange of {factors[0].name} is a {type(result).__name__}; return a "
            "paragrad.Exchange"
        )
    required_method = "serve" if options.is_server(strategy, world.rank) else "dismiss_servers"
    if strategy.servers and getattr(type(result), required_method) is getattr(
        Exchange, required_method
    ):
        raise StepFailed(
            f"{strategy} has servers, and its {type(result).__name__} has no {required_method}; "
            f"give it a method {required_method}(self)"
        )
    if unused := {what for values in replica.restored_tensors.values() for what in values} - set(
        result.saved_names
    ):
        log.write_choice(
            "checkpoint", f"without {', '.join(sorted(unused))}", f"{strategy} has no use for it"
        )
    return result


def build_passes(strategy: Strategy, host: PassesHost, exchange: Exchange) -> Passes:
    """Build the passes of a strategy.

    By default they run one micro-batch after another (`SequentialPasses`). A strategy of the user
    may have a method `make_passes(host, exchange)`.

    Args:
        strategy: The strategy.
        host: The `Training`, seen as `PassesHost`.
        exchange: The exchange of this rank.

    Returns:
        The passes.

    Raises:
        StepFailed: The strategy returned something else than passes.
    """
    factors = select_factors(strategy, "make_passes")
    passes = (
        _find_function(factors[0], "make_passes")(host, exchange)
        if factors
        else SequentialPasses(host, exchange)
    )
    if not isinstance(passes, Passes):
        raise StepFailed(
            f"the passes of {strategy} are a {type(passes).__name__}; return paragrad.Passes"
        )
    return passes


def _find_function(strategy: Strategy, name: str) -> Any:
    """Return a function of a strategy's technique with the strategy as its first argument.

    A strategy of the user is its own technique. Returns None if there is no such function.
    """
    if not is_builtin_technique(strategy):
        return getattr(strategy, name, None)
    function = getattr(importlib.import_module(TECHNIQUE_MODULES[strategy.technique]), name, None)
    return function and functools.partial(function, strategy)
