"""Partition the model, then build the exchange and the passes of a training.

Collective of all ranks, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paragrad.engine.exchange import Exchange, Replica
from paragrad.errors import StepFailed
from paragrad.parallel.registry import (
    build_exchange,
    build_passes,
    check_equal_schedules,
    has_model_shards,
)
from paragrad.strategies.strategy import list_factors
from paragrad.trainer.model_partition import build_model_partition
from paragrad.trainer.training import Training


def set_up_exchange(
    training: Training,
    has_unused_parameters: bool = False,
    example_inputs: Any = None,
    forward: Callable[..., Any] | None = None,
    inspections: dict[str, Any] | None = None,
    keeps_whole_model: bool = False,
) -> Exchange:
    """Partition the model if the strategy does so, and build its exchange and its passes.

    Collective.

    Args:
        training: The training.

        has_unused_parameters: Whether a forward leaves parameters unused.

        example_inputs: The inputs of some samples, or None.

        forward: Runs model and loss once, or None.

        inspections: The places where techniques partition the model; entries are added and reused.

        keeps_whole_model: Whether the whole model is needed unchanged for a comparison.

    Returns:
        The exchange.
    """
    strategy, state, options = training.setup.strategy, training.state, training.options
    check_equal_schedules(training.world, strategy)
    if has_model_shards(strategy):
        inspections = {} if inspections is None else inspections
        _partition_model(training, example_inputs, inspections, keeps_whole_model)
    setup = training.setup
    probe = options.validation_probe
    replica = Replica(
        setup.module,
        state.optimizer,
        options.clip_norm,
        has_unused_parameters,
        setup.layout,
        forward,
        keeps_whole_model,
        state.steps,
        setup.layout.select_local_state(state.restored_tensors),
        state.stepped_scheduler,
        training.draw_alike,
        state.batch_size or 1,
        probe.changed_by_forward if probe else (),
        options.seed,
    )
    exchange = build_exchange(
        strategy,
        replica,
        setup.full_world if strategy.servers else setup.world,
        training.log,
        options.exchange_options,
    )
    setup = replace(setup, exchange=exchange)
    if exchange.shard_layout is not None:
        setup = replace(
            setup,
            module=exchange.loss_module,
            empty_model=exchange.empty_model,
            pass_contexts=(),
        )
    training.adopt_setup(setup)
    passes = build_passes(strategy, training, exchange)
    training.adopt_setup(replace(setup, passes=passes))
    return exchange


def close_exchange(training: Training) -> None:
    """Close an exchange that was only for what comes before the first step.

    Args:
        training: The training.
    """
    training.exchange.close()
    training.adopt_setup(replace(training.setup, exchange=None, passes=None))


def _partition_model(
    training: Training, example_inputs: Any, inspections: dict[str, Any], keeps_whole_model: bool
) -> None:
    """Let this rank hold a part of the model from here on. Collective."""
    setup, batch_norm = training.setup, training.batch_norm
    with batch_norm.use_probe_mode():
        partition = build_model_partition(
            setup.strategy,
            setup.module,
            training.state.optimizer,
            setup.draws,
            setup.world,
            example_inputs,
            inspections,
            keep_whole=keeps_whole_model or training.user_model is not None,
        )
    training.adopt_setup(
        replace(
            setup,
            module=partition.module,
            layout=partition.layout,
            empty_model=partition.empty_model,
            draws=partition.draws,
            pass_contexts=partition.contexts,
            group_names=partition.groups,
        )
    )
    skips_calls = partition.draws.serial_calls is not None or any(
        each.skips_calls for each in list_factors(setup.strategy)
    )
    if batch_norm.per_sample_calls and skips_calls:
        raise StepFailed(
            "the model has batch norms inside of samples or weights, which paragrad knows by the "
            "number of their call, and calls in parts have other numbers; write them as "
            "instance_norm, or train it with data(n)"
        )
    for choice in partition.choices if setup.world.rank == 0 else ():
        training.log.write_choice(*choice)
