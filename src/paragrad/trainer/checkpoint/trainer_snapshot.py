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
from paragrad.engine.layout import Layout, State
from paragrad.engine.optimizer.optimizer_state import without_place
from paragrad.engine.state import shared_initialization
from paragrad.errors import Refused, StepFailed
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint import checkpoint
from paragrad.trainer.checkpoint.checkpoint import Snapshot
from paragrad.trainer.checkpoint.checkpoint_files import Saved


class Trained(Protocol):
    """What of a trainer is saved and restored, by the names that it has there."""

    world: World
    strategy: Strategy
    model: nn.Module
    hollow: nn.Module
    optimizer: torch.optim.Optimizer
    began: dict[str, Any]
    scheduler: Any
    exchange: Exchange | None
    held: Layout
    hosts: shared_initialization.Hosts | None
    seed: int
    known_by: dict[str, Any]
    restored: State
    steps: int
    taken: int

    def whole(self) -> nn.Module: ...

    def standing(self) -> AbstractContextManager[None]: ...


def snapshot(
    trainer: Trained, identity: dict[str, Any] | None = None, beside: dict[str, Any] | None = None
) -> Snapshot:
    """A training as it stands, whole on rank 0. Collective. identity: of the Job, where it is
    one;  beside: as in Snapshot.
    """
    shapes = {
        name: list(tensor.shape)
        for name, tensor in trainer.hollow.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    exchange = trainer.exchange
    held = trainer.held
    return Snapshot(
        trainer.steps,
        str(trainer.strategy),
        trainer.whole(),
        trainer.optimizer,
        trainer.scheduler,
        held.state(exchange.state()) if exchange else {},
        held.state(exchange.kept()) if exchange else trainer.restored,
        identity or {"seed": trainer.seed, **trainer.known_by, **checkpoint.shapes_of(shapes)},
        beside or {},
    )


def save(
    trainer: Trained,
    folder: Path,
    identity: dict[str, Any] | None = None,
    beside: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint of this step below a folder, of what the run stands for, and keep the
    one before it. Collective. Raises StepFailed where there is no place for all that the
    optimizer keeps.
    """
    if own := without_place(trainer.optimizer, trainer.began):
        raise StepFailed(
            f"{type(trainer.optimizer).__name__} keeps {', '.join(own)} beside the states of its "
            "parameters, and a checkpoint has no place for it; keep it in a parameter's state or "
            "in a group, or "
            "train without --save"
        )
    with trainer.standing():
        found = snapshot(trainer, identity, beside)
        trainer.world.barrier()  # of a step that every rank's record holds
        if trainer.world.rank == 0:
            checkpoint.save(found, folder)
        trainer.world.barrier()


def restore(trainer: Trained, saved: Saved) -> None:
    """Go on from a checkpoint, before the first step. Raises Refused."""
    if trainer.exchange is not None:
        raise Refused(
            f"{saved.folder} is loaded before the first step; this training has made "
            f"{trainer.taken}"
        )
    shared_initialization.loaded(
        trainer.world,
        trainer.hosts,
        trainer.model,
        lambda weights: checkpoint.load(
            saved, snapshot(trainer), str(trainer.world.device), weights
        ),
    )
    trainer.steps = saved.step
    trainer.restored = checkpoint.kept_in(saved)
