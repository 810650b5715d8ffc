"""Save a trainer into a checkpoint, and restore it before its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from paragrad.engine.loss_scale import LossScale
from paragrad.engine.optimizer.optimizer_state import list_unsaved_state
from paragrad.engine.state import shared_initialization
from paragrad.errors import Refused, StepFailed
from paragrad.trainer.checkpoint import checkpoint
from paragrad.trainer.checkpoint.checkpoint import Snapshot
from paragrad.trainer.checkpoint.checkpoint_files import SavedCheckpoint
from paragrad.trainer.training import Training


def take_snapshot(
    training: Training,
    identity: dict[str, Any] | None = None,
    extra_state: dict[str, Any] | None = None,
) -> Snapshot:
    """Take a snapshot of a training, complete on rank 0. Collective.

    Args:
        training: The training.
        identity: The identity of the Job; None for the user's own loop.
        extra_state: Further entries of state.json, as in Snapshot.
    """
    setup, state, exchange = training.setup, training.state, training.setup.exchange
    shapes = {
        name: list(tensor.shape)
        for name, tensor in setup.empty_model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    layout = setup.shard_layout
    return Snapshot(
        state.steps,
        str(setup.strategy),
        setup.gather_model(),
        state.optimizer,
        state.scheduler,
        setup.gather_optimizer_state(),
        layout.gather_serial_state(exchange.collect_saved_tensors())
        if exchange
        else state.restored_tensors,
        identity or {**state.identity, **checkpoint.describe_shapes(shapes)},
        (extra_state or {}) | describe_loss_scale(state.loss_scale),
    )


def save_snapshot(
    training: Training,
    folder: Path,
    identity: dict[str, Any] | None = None,
    extra_state: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint of the effective weights of this step below a folder.

    Collective. The previous checkpoint is kept.

    Args:
        training: The training.

        folder: The folder below which the checkpoint is written.

        identity: The identity of the Job; None for the user's own loop.

        extra_state: Further entries of state.json, as in Snapshot.

        overwrite: Whether checkpoints of later steps, of another training, are removed.

    Raises:
        StepFailed: If the optimizer keeps values for which a checkpoint has no place.
    """
    state, world = training.state, training.world
    if extra := list_unsaved_state(state.optimizer, state.initial_optimizer_values):
        raise StepFailed(
            f"{type(state.optimizer).__name__} keeps {', '.join(extra)} beside the states of its "
            "parameters, and a checkpoint has no place for it; keep it in a parameter's state or "
            "in a group, or train without --save"
        )
    with training.setup.use_effective_weights():
        snapshot = take_snapshot(training, identity, extra_state)
        # Every rank's record must contain the step of the checkpoint.
        training.log.flush()
        world.barrier()
        if world.rank == 0:
            checkpoint.save_checkpoint(snapshot, folder, overwrite)
        world.barrier()


def restore_snapshot(training: Training, saved: SavedCheckpoint) -> None:
    """Resume from a checkpoint, before the first step.

    Args:
        training: The training.
        saved: The checkpoint.

    Raises:
        Refused: If a step was already made.
    """
    if training.setup.exchange is not None:
        raise Refused(
            f"{saved.folder} is loaded before the first step; this training has made "
            f"{training.state.own_steps}"
        )
    shared_initialization.load_shared_model(
        training.world,
        training.shared_hosts,
        training.setup.model,
        lambda weights: checkpoint.load_checkpoint(
            saved, take_snapshot(training), str(training.world.device), weights
        ),
    )
    training.state.restore(saved.step, checkpoint.read_strategy_state(saved))
    if training.state.loss_scale is not None and (numbers := saved.state.get("loss_scale")):
        training.state.loss_scale.restore(*numbers)


def describe_loss_scale(loss_scale: LossScale | None) -> dict[str, Any]:
    """Describe the loss scale for state.json.

    Args:
        loss_scale: The loss scale, or None.
    """
    return {} if loss_scale is None else {"loss_scale": [loss_scale.value, loss_scale.good_steps]}
