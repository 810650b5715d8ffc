"""A training into a checkpoint, and back: what of a trainer is saved, and put into one before
its first step.
"""

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
    """What of a trainer is saved and restored, by the names that it has there."""

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
    """A training as it stands, whole on rank 0. Collective. identity: of the Job, where it is
    one;  beside: as in Snapshot.
    """
    shapes = {
        name: list(tensor.shape)
        for name, tensor in trainer.empty_model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    exchange = trainer.exchange
    held = trainer.shard_layout
    return Snapshot(
        trainer.steps,
        str(trainer.strategy),
        trainer.gather_model(),
        trainer.optimizer,
        trainer.scheduler,
        held.gather_serial_state(exchange.gather_optimizer_state()) if exchange else {},
        held.gather_serial_state(exchange.collect_saved_tensors())
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
    """Write a checkpoint of this step below a folder, of what the run stands for, and keep the
    one before it. Collective. Raises StepFailed where there is no place for all that the
    optimizer keeps.
    """
    if own := list_unsaved_state(trainer.optimizer, trainer.initial_optimizer_attributes):
        raise StepFailed(
            f"{type(trainer.optimizer).__name__} keeps {', '.join(own)} beside the states of its "
            "parameters, and a checkpoint has no place for it; keep it in a parameter's state or "
            "in a group, or "
            "train without --save"
        )
    with trainer.use_effective_weights():
        found = take_snapshot(trainer, identity, extra_state)
        trainer.world.barrier()  # of a step that every rank's record holds
        if trainer.world.rank == 0:
            checkpoint.save_checkpoint(found, folder)
        trainer.world.barrier()


def restore_snapshot(trainer: SavableTrainer, saved: SavedCheckpoint) -> None:
    """Go on from a checkpoint, before the first step. Raises Refused."""
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
