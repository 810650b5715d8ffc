"""Checkpoints: a training under serial names and shapes, so that any strategy and any number of
workers can go on.

    RUN/checkpoint-00000120/    model.safetensors       parameters and buffers
                                optimizer.safetensors   the optimizer's tensors,
                                "PARAMETER/what" strategy.safetensors    what the strategy keeps
                                beside, alike, where it keeps something state.json
                                step, job, optimizer's groups, scheduler SHA256SUMS
                                of these; `sha256sum -c` reads it too

Nothing is pickled. A checkpoint is written beside its place and renamed into it, whole or not
at all; the one before it is kept. One that does not match its checksums is named and passed
over.
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

KEPT_CHECKPOINTS = 2  # the newest, and the one before it


@dataclass(frozen=True)
class Snapshot:
    """A training as it stands after `step` steps, until the next one is made.

    state: the optimizer's, in serial shapes, whole on rank 0 (empty where a checkpoint is to be
    loaded into it);  kept: alike, what the strategy keeps beside;  identity: what must be equal
    where it is loaded again;  beside: what else state.json says: "rounds" that were made, where
    it is trained in rounds.
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
        """The serial names of the parameters of the optimizer's groups."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [
            [names[parameter] for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]


def save_checkpoint(snapshot: Snapshot, parent: Path) -> Path:
    """Write a snapshot below parent; the checkpoint's folder. Call on rank 0; replicas are
    equal.

    Raises StepFailed where the optimizer or scheduler holds what neither tensors nor JSON can,
    or where parent holds a later step of another training, or another training is saving there.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with _lock_folder(parent):
        return _write_checkpoint_folder(snapshot, parent)


@contextlib.contextmanager
def _lock_folder(parent: Path) -> Iterator[None]:
    """Hold the lock of those who save below a folder: one would remove what another writes, as
    if left by a killed one.
    """
    held = os.open(parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StepFailed(
                f"another training is saving in {parent}; give each a folder of its own"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(held)


def _write_checkpoint_folder(snapshot: Snapshot, parent: Path) -> Path:
    folder = parent / f"checkpoint-{snapshot.step:08}"
    for later in (
        path for path in list_checkpoint_folders(parent) if read_folder_step(path) > snapshot.step
    ):
        if find_damage(later) is None:
            raise StepFailed(
                f"{later} is there, of a later step: another training was saved in {parent}; load "
                f"it and go on "
                "from it, or save elsewhere"
            )
        shutil.rmtree(later)
    # by a training that was killed as it wrote it
    remove_partial_files(parent)
    partial = folder.with_suffix(".partial")
    partial.mkdir()
    try:
        _write_checkpoint_files(snapshot, partial)
    # a full disk, say: what is half-written would keep it full
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier training, or damaged
    partial.rename(folder)
    _sync_to_disk(parent)
    for old in list_checkpoint_folders(parent)[KEPT_CHECKPOINTS:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _write_checkpoint_files(snapshot: Snapshot, folder: Path) -> None:
    """A checkpoint's files, forced to disk."""
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
    """Of a model's state, as part of an identity."""
    return {f"shape of {name}": shape for name, shape in shapes.items()}


def load_checkpoint(
    saved: SavedCheckpoint, snapshot: Snapshot, device: str = "cpu", load_model: bool = True
) -> None:
    """Put a checkpoint into a training before its first step, whatever its strategy. weights:
    the model's too. Raises Refused if it does not fit.
    """
    _check_checkpoint_fit(saved, snapshot)
    try:
        _load_into_snapshot(saved, snapshot, device, load_model)
    except Exception as error:
        raise Refused(
            f"{saved.folder} does not fit what is trained here: {type(error).__name__}: {error}; "
            f"resume it as it "
            "was, or from another checkpoint"
        ) from error


def _load_into_snapshot(
    saved: SavedCheckpoint, snapshot: Snapshot, device: str, load_model: bool
) -> None:
    kept = saved.state["optimizer"]
    names = snapshot.group_names
    if load_model:
        load_weights(snapshot.model, saved.folder / "model.safetensors", device)
    values: dict[str, dict[str, Any]] = {
        name: dict(scalars) for name, scalars in kept["scalars"].items()
    }
    for name, tensors in _read_by_parameter(saved.folder / "optimizer.safetensors").items():
        values.setdefault(name, {}).update(tensors)
    order = [name for group in names for name in group]
    places = iter(range(len(order)))
    groups = [
        {**group, "params": [next(places) for _ in own]}
        for group, own in zip(kept["groups"], names, strict=True)
    ]
    snapshot.optimizer.load_state_dict(
        {
            "state": {place: values[name] for place, name in enumerate(order) if name in values},
            "param_groups": groups,
        }
    )
    parameters = dict(snapshot.model.named_parameters())
    # torch gives floating state its parameter's type; keep what it was
    for name, each in values.items():
        own = snapshot.optimizer.state[parameters[name]]
        own.update(
            {
                key: value.to(own[key].device)
                for key, value in each.items()
                if isinstance(value, Tensor)
            }
        )
    if snapshot.scheduler is not None:
        # some take it apart
        snapshot.scheduler.load_state_dict(copy.deepcopy(saved.state["scheduler"]))


def _read_by_parameter(path: Path) -> OptimizerState:
    """Tensors saved as "parameter/what", by parameter and by what."""
    found: OptimizerState = {}
    for key, tensor in load_tensors(path).items():
        name, _, what = key.rpartition("/")
        found.setdefault(name, {})[what] = tensor
    return found


def read_strategy_state(saved: SavedCheckpoint) -> OptimizerState:
    """What the strategy that was saved keeps beside the optimizer's state."""
    path = saved.folder / STRATEGY_FILE
    return _read_by_parameter(path) if path.exists() else {}


def _check_checkpoint_fit(saved: SavedCheckpoint, snapshot: Snapshot) -> None:
    kept = saved.state["optimizer"]
    theirs = saved.state["identity"]
    both = theirs.keys() & snapshot.identity.keys()
    refuse_other_training(
        saved.folder,
        {name: theirs[name] for name in both},
        {name: snapshot.identity[name] for name in both},
        "here it is",
    )
    if kept["class"] != type(snapshot.optimizer).__name__ or len(kept["groups"]) != len(
        snapshot.group_names
    ):
        raise Refused(
            f"{saved.folder} was saved with a {kept['class']} of {len(kept['groups'])} group(s), "
            f"and the optimizer "
            f"here is a {type(snapshot.optimizer).__name__} of {len(snapshot.group_names)}; resume "
            f"it as it was"
        )
    if (saved.state["scheduler"] is None) != (snapshot.scheduler is None):
        raise Refused(
            f"{saved.folder} was saved {'without' if saved.state['scheduler'] is None else 'with'} "
            f"a scheduler; "
            "resume it as it was"
        )
    for number, (group, own) in enumerate(
        zip(kept["groups"], snapshot.optimizer.param_groups, strict=True)
    ):
        _check_number_types(saved.folder, f"group {number} of the optimizer", group, own)
    if snapshot.scheduler is not None:
        _check_number_types(
            saved.folder, "the scheduler", saved.state["scheduler"], snapshot.scheduler.state_dict()
        )


def _check_number_types(
    folder: Path, owner: str, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """What is a number here is one in the checkpoint too. What is only here, a newer torch may
    have added.
    """
    if "lr" in current and "lr" not in saved:
        raise Refused(f"{folder} has no lr of {owner}; resume from another checkpoint")
    for name in current.keys() & saved.keys():
        if isinstance(current[name], int | float) and not isinstance(
            saved[name], int | float | Tensor
        ):
            raise Refused(
                f"{folder} has {saved[name]!r} as {name} of {owner}, which is a number; resume "
                f"from "
                f"another checkpoint"
            )


def _split_state(state: OptimizerState) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """(tensors by "parameter/what", plain values by parameter)."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    places: set[int] = set()  # safetensors takes no two of one memory
    for name, values in state.items():
        for what, value in values.items():
            if isinstance(value, Tensor):
                tensor = value.detach().contiguous()
                tensors[f"{name}/{what}"] = (
                    tensor.clone() if tensor.untyped_storage()._cdata in places else tensor
                )
                places.add(tensor.untyped_storage()._cdata)
            else:
                scalars.setdefault(name, {})[what] = value
    return tensors, scalars


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
