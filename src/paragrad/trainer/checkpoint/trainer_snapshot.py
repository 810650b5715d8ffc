"""Save a trainer into a checkpoint, and restore it before its first step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paragrad.engine.exchange import Exchange
from paragrad.engine.layout import Layout, OptimizerState
from paragrad.engine.optimizer.optimizer_state import list_unsaved_state
from paragrad.engine.state import shared_initialization
from paragrad.errors import Refused, StepFailed
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint import checkpoint
from paragrad.trainer.checkpoint.checkpoint import Snapshot
from paragrad.trainer.checkpoint.checkpoint_files import SavedCheckpoint


class SavableTrainer(Protocol):
    """The members of a trainer that saving and restoring need."""

    world: World
    strategy: Strategy
    model: nn.Module
    empty_model: nn.Module
    optimizer: torch.optim.Optimizer
    initial_optimizer_attributes: dict[str, Any]
    scheduler: Any
    exchange: Exchange | None
    shard_layout: Layout
    shared_hosts: shared_initialization.Hosts | None
    seed: int
    model_identity: dict[str, Any]
    restored_strategy_state: OptimizerState
    steps: int
    own_steps: int

    def gather_model(self) -> nn.Module: ...

    def use_effective_weights(self) -> AbstractContextManager[None]: ...


def take_snapshot(
    trainer: SavableTrainer,
    identity: dict[str, Any] | None = None,
    extra_state: dict[str, Any] | None = None,
) -> Snapshot:
    """Take a snapshot of a training, complete on rank 0. Collective.

    Args:
        trainer: The trainer.
        identity: The identity of the Job; None for the user's own loop.
        extra_state: Further entries of state.json, as in Snapshot.
    """
    shapes = {
        name: list(tensor.shape)
        for name, tensor in trainer.empty_model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    exchange = trainer.exchange
    layout = trainer.shard_layout
    return Snapshot(
        trainer.steps,
        str(trainer.strategy),
        trainer.gather_model(),
        trainer.optimizer,
        trainer.scheduler,
        layout.gather_serial_state(exchange.gather_optimizer_state()) if exchange else {},
        layout.gather_serial_state(exchange.collect_saved_tensors())
        if exchange
        else trainer.restored_strategy_state,
        identity
        or {"seed": trainer.seed, **trainer.model_identity, **checkpoint.describe_shapes(shapes)},
        extra_state or {},
    )


def save_snapshot(
    trainer: SavableTrainer,
    folder: Path,
    identity: dict[str, Any] | None = None,
    extra_state: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint of the effective weights of this step below a folder.

    Collective. The previous checkpoint is kept.

    Args:
        trainer: The trainer.

        folder: The folder below which the checkpoint is written.

        identity: The identity of the Job; None for the user's own loop.

        extra_state: Further entries of state.json, as in Snapshot.

    Raises:
        StepFailed: If the optimizer keeps values for which a checkpoint has no place.
    """
    if extra := list_unsaved_state(trainer.optimizer, trainer.initial_optimizer_attributes):
        raise StepFailed(
            f"{type(trainer.optimizer).__name__} keeps {', '.join(extra)} beside the states of its "
            "parameters, and a checkpoint has no place for it; keep it in a parameter's state or "
            "in a group, or train without --save"
        )
    with trainer.use_effective_weights():
        snapshot = take_snapshot(trainer, identity, extra_state)
        trainer.world.barrier()  # Every rank's record must contain the step of the checkpoint.
        if trainer.world.rank == 0:
            checkpoint.save_checkpoint(snapshot, folder)
        trainer.world.barrier()


def restore_snapshot(trainer: SavableTrainer, saved: SavedCheckpoint) -> None:
    """Resume from a checkpoint, before the first step.

    Args:
        trainer: The trainer.
        saved: The checkpoint.

    Raises:
        Refused: If a step was already made.
    """
    if trainer.exchange is not None:
        raise Refused(
            f"{saved.folder} is loaded before the first step; this training has made "
            f"{trainer.own_steps}"
        )
    shared_initialization.load_shared_model(
        trainer.world,
        trainer.shared_hosts,
        trainer.model,
        lambda weights: checkpoint.load_checkpoint(
            saved, take_snapshot(trainer), str(trainer.world.device), weights
        ),
    )
    trainer.steps = saved.step
    trainer.restored_strategy_state = checkpoint.read_strategy_state(saved)
