"""Checkpoints: a training under serial names and shapes.

Any strategy and any number of workers can resume it.

    RUN/checkpoint-00000120/    model.safetensors       parameters and buffers
                                optimizer.safetensors   the optimizer's tensors, "PARAMETER/what"
                                strategy.safetensors    tensors that the strategy keeps beside,
                                                        in the same form, if it keeps any
                                state.json              step, job, optimizer's groups, scheduler
                                SHA256SUMS              of these files; `sha256sum -c` reads it

Nothing is pickled. A checkpoint is written under a temporary name and then renamed, so it is
complete or absent. The previous one is kept. A checkpoint that does not match its checksums is
named in a warning and skipped.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.layout import OptimizerState
from paragrad.errors import Refused, StepFailed, add_file_name
from paragrad.trainer.checkpoint.checkpoint_files import (
    CHECKPOINT_FILES,
    CHECKPOINT_SCHEMA,
    CHECKSUM_FILE,
    STRATEGY_FILE,
    SavedCheckpoint,
    compute_sha256,
    find_damage,
    list_checkpoint_folders,
    name_checkpoint,
    read_best_checkpoint,
    read_folder_step,
    remove_partial_files,
)
from paragrad.trainer.checkpoint.json_values import encode_json_value
from paragrad.trainer.checkpoint.tensor_files import (
    load_tensors,
    load_weights,
    read_tensor_types,
    save_tensors,
    save_weights,
)
from paragrad.trainer.identity import refuse_other_training

KEPT_CHECKPOINTS = 2  # the newest checkpoint and the one before it


@dataclass(frozen=True)
class Snapshot:
    """A training after `step` steps, valid until the next step.

    Attributes:
        step: The number of completed steps.

        strategy: The strategy's name.

        model: The model with serial names; complete on rank 0.

        optimizer: The optimizer.

        scheduler: The scheduler, or None.

        optimizer_state: The optimizer's state in serial shapes, complete on rank 0. Empty if a
            checkpoint is to be loaded into this snapshot.

        strategy_state: The state that the strategy keeps beside, in the same form.

        identity: The entries that must be equal when the checkpoint is loaded.

        extra_state: Further entries of state.json: "rounds", the number of completed rounds;
            "loss_scale", the scale of float16 and the steps since its last change.
    """

    step: int
    strategy: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    optimizer_state: OptimizerState
    strategy_state: OptimizerState
    identity: dict[str, Any]
    extra_state: dict[str, Any] = field(default_factory=dict)

    @property
    def group_names(self) -> list[list[str]]:
        """The serial names of the parameters in each group of the optimizer."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [
            [names[parameter] for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]


def save_checkpoint(snapshot: Snapshot, parent: Path, overwrite: bool = False) -> Path:
    """Write a snapshot below a folder. Called on rank 0; replicas are equal.

    Args:
        snapshot: The snapshot.
        parent: The folder below which the checkpoint is written.
        overwrite: Whether checkpoints of later steps are removed.

    Returns:
        The checkpoint's folder.

    Raises:
        StepFailed: If the optimizer or scheduler holds a value that fits neither tensors nor JSON.
            Also if the folder contains a later step of another training, or another training is
            saving there.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with _lock_folder(parent):
        return _write_checkpoint_folder(snapshot, parent, overwrite)


@contextlib.contextmanager
def _lock_folder(parent: Path) -> Iterator[None]:
    """Lock a folder against other trainings that save there.

    One training would remove what another one writes, as if a killed process had left it.
    """
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StepFailed(
                f"another training is saving in {parent}; give each a folder of its own"
            ) from None
        except OSError:  # The file system has no locks.
            pass
        yield
    finally:
        os.close(descriptor)


def _write_checkpoint_folder(snapshot: Snapshot, parent: Path, overwrite: bool) -> Path:
    folder = parent / name_checkpoint(snapshot.step)
    for later in (
        path for path in list_checkpoint_folders(parent) if read_folder_step(path) > snapshot.step
    ):
        if not overwrite and find_damage(later) is None:
            raise StepFailed(
                f"{later} exists, and is of a later step: another training was saved in {parent}; "
                "load it and continue from it, save elsewhere, or remove it (trainer.save(folder, "
                "overwrite=True))"
            )
        shutil.rmtree(later)
    # A killed training may have left unfinished files.
    remove_partial_files(parent)
    partial = folder.with_suffix(".partial")
    partial.mkdir()
    try:
        _write_checkpoint_files(snapshot, partial)
    # If the disk is full, an unfinished file would keep it full.
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)  # an earlier training's checkpoint, or a damaged one
    partial.rename(folder)
    _sync_to_disk(parent)
    best = read_best_checkpoint(parent)
    for old in list_checkpoint_folders(parent)[KEPT_CHECKPOINTS:]:
        if best is None or old.resolve() != best.folder:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def _write_checkpoint_files(snapshot: Snapshot, folder: Path) -> None:
    """Write a checkpoint's files and force them to disk."""
    tensors, scalars = _split_state(snapshot.optimizer_state)
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in snapshot.optimizer.param_groups
    ]
    save_weights(snapshot.model, folder / "model.safetensors")
    save_tensors(tensors, folder / "optimizer.safetensors")
    if snapshot.strategy_state:
        save_tensors(_split_state(snapshot.strategy_state)[0], folder / STRATEGY_FILE)
    files = [
        name
        for name in (*CHECKPOINT_FILES, STRATEGY_FILE)
        if name != "state.json" and (folder / name).exists()
    ]
    state = {
        **snapshot.extra_state,
        "schema": CHECKPOINT_SCHEMA,
        "step": snapshot.step,
        "strategy": snapshot.strategy,
        "identity": snapshot.identity,
        "tensors": {name: read_tensor_types(folder / name) for name in files},
        "optimizer": {
            "class": type(snapshot.optimizer).__name__,
            "groups": groups,
            "scalars": scalars,
        },
        "scheduler": snapshot.scheduler.state_dict() if snapshot.scheduler is not None else None,
    }
    with add_file_name(folder / "state.json"):
        (folder / "state.json").write_text(json.dumps(encode_json_value(state), indent=1))
    with add_file_name(folder / CHECKSUM_FILE):
        (folder / CHECKSUM_FILE).write_text(
            "".join(f"{compute_sha256(folder / name)}  {name}\n" for name in (*files, "state.json"))
        )
    for path in [*folder.iterdir(), folder]:
        _sync_to_disk(path)


def describe_shapes(shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    """Describe the shapes of a model's state as part of an identity."""
    return {f"shape of {name}": shape for name, shape in shapes.items()}


def load_checkpoint(
    saved: SavedCheckpoint, snapshot: Snapshot, device: str = "cpu", load_model: bool = True
) -> None:
    """Load a checkpoint of any strategy into a training before its first step.

    Args:
        saved: The checkpoint.

        snapshot: The training into which it is loaded.

        device: The device on which the weights are loaded.

        load_model: Whether the weights of the model are loaded too.

    Raises:
        Refused: If the checkpoint does not fit.
    """
    _check_checkpoint_fit(saved, snapshot)
    try:
        _load_into_snapshot(saved, snapshot, device, load_model)
    except Exception as error:
        raise Refused(
            f"{saved.folder} does not fit what is trained here: {type(error).__name__}: {error}; "
            "resume it as it was, or from another checkpoint"
        ) from error


def _load_into_snapshot(
    saved: SavedCheckpoint, snapshot: Snapshot, device: str, load_model: bool
) -> None:
    saved_optimizer = saved.state["optimizer"]
    names = snapshot.group_names
    if load_model:
        load_weights(snapshot.model, saved.folder / "model.safetensors", device)
    values: dict[str, dict[str, Any]] = {
        name: dict(scalars) for name, scalars in saved_optimizer["scalars"].items()
    }
    for name, tensors in _read_by_parameter(saved.folder / "optimizer.safetensors").items():
        values.setdefault(name, {}).update(tensors)
    order = [name for group in names for name in group]
    places = iter(range(len(order)))
    groups = [
        {**group, "params": [next(places) for _ in entry]}
        for group, entry in zip(saved_optimizer["groups"], names, strict=True)
    ]
    snapshot.optimizer.load_state_dict(
        {
            "state": {place: values[name] for place, name in enumerate(order) if name in values},
            "param_groups": groups,
        }
    )
    parameters = dict(snapshot.model.named_parameters())
    # load_state_dict casts floating state to its parameter's type; restore the saved type.
    for name, each in values.items():
        entry = snapshot.optimizer.state[parameters[name]]
        entry.update(
            {
                key: value.to(entry[key].device)
                for key, value in each.items()
                if isinstance(value, Tensor)
            }
        )
    if snapshot.scheduler is not None:
        # Some schedulers change the dictionary they load.
        snapshot.scheduler.load_state_dict(copy.deepcopy(saved.state["scheduler"]))


def _read_by_parameter(path: Path) -> OptimizerState:
    """Read tensors that were saved as "parameter/what": by parameter, then by what."""
    state: OptimizerState = {}
    for key, tensor in load_tensors(path).items():
        name, _, what = key.rpartition("/")
        state.setdefault(name, {})[what] = tensor
    return state


def read_strategy_state(saved: SavedCheckpoint) -> OptimizerState:
    """Read the state that the saved strategy keeps beside the optimizer's state."""
    path = saved.folder / STRATEGY_FILE
    return _read_by_parameter(path) if path.exists() else {}


def _check_checkpoint_fit(saved: SavedCheckpoint, snapshot: Snapshot) -> None:
    saved_optimizer = saved.state["optimizer"]
    saved_identity = saved.state["identity"]
    common = saved_identity.keys() & snapshot.identity.keys()
    refuse_other_training(
        saved.folder,
        {name: saved_identity[name] for name in common},
        {name: snapshot.identity[name] for name in common},
        "here it is",
    )
    if saved_optimizer["class"] != type(snapshot.optimizer).__name__ or len(
        saved_optimizer["groups"]
    ) != len(snapshot.group_names):
        raise Refused(
            f"{saved.folder} was saved with a {saved_optimizer['class']} of "
            f"{len(saved_optimizer['groups'])} group(s), and the optimizer here is a "
            f"{type(snapshot.optimizer).__name__} of {len(snapshot.group_names)}; resume it as it "
            "was"
        )
    if (saved.state["scheduler"] is None) != (snapshot.scheduler is None):
        raise Refused(
            f"{saved.folder} was saved {'without' if saved.state['scheduler'] is None else 'with'} "
            "a scheduler; resume it as it was"
        )
    for number, (group, current_group) in enumerate(
        zip(saved_optimizer["groups"], snapshot.optimizer.param_groups, strict=True)
    ):
        _check_number_types(saved.folder, f"group {number} of the optimizer", group, current_group)
    if snapshot.scheduler is not None:
        _check_number_types(
            saved.folder, "the scheduler", saved.state["scheduler"], snapshot.scheduler.state_dict()
        )


def _check_number_types(
    folder: Path, owner: str, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Check that each number of the current optimizer or scheduler is a number in the checkpoint.

    Entries that exist only here may be new in this version of torch.
    """
    if "lr" in current and "lr" not in saved:
        raise Refused(f"{folder} has no lr of {owner}; resume from another checkpoint")
    for name in current.keys() & saved.keys():
        if isinstance(current[name], int | float) and not isinstance(
            saved[name], int | float | Tensor
        ):
            raise Refused(
                f"{folder} has {saved[name]!r} as {name} of {owner}, which must be a number; "
                "resume from another checkpoint"
            )


def _split_state(state: OptimizerState) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return (tensors by "parameter/what", other values by parameter)."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    storages: set[int] = set()  # safetensors refuses two tensors of one storage
    for name, values in state.items():
        for what, value in values.items():
            if isinstance(value, Tensor):
                tensor = value.detach().contiguous()
                tensors[f"{name}/{what}"] = (
                    tensor.clone() if tensor.untyped_storage()._cdata in storages else tensor
                )
                storages.add(tensor.untyped_storage()._cdata)
            else:
                scalars.setdefault(name, {})[what] = value
    return tensors, scalars


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
