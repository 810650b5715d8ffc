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

from paragrad.engine.layout import State
from paragrad.errors import Refused, StepFailed, naming
from paragrad.trainer.checkpoint.checkpoint_files import (
    BESIDE,
    FILES,
    SCHEMA,
    SUMS,
    Saved,
    damage,
    digest_of,
    folders,
    remove_partial,
    step_of,
)
from paragrad.trainer.checkpoint.json_values import plain
from paragrad.trainer.checkpoint.tensor_files import (
    contents,
    load_tensors,
    load_weights,
    save_tensors,
    save_weights,
)
from paragrad.trainer.identity import refuse_another

KEPT = 2  # the newest, and the one before it


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
    state: State
    kept: State
    identity: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[list[str]]:
        """The serial names of the parameters of the optimizer's groups."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [
            [names[parameter] for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]


def save(snapshot: Snapshot, parent: Path) -> Path:
    """Write a snapshot below parent; the checkpoint's folder. Call on rank 0; replicas are
    equal.

    Raises StepFailed where the optimizer or scheduler holds what neither tensors nor JSON can,
    or where parent holds a later step of another training, or another training is saving there.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with _alone(parent):
        return _saved(snapshot, parent)


@contextlib.contextmanager
def _alone(parent: Path) -> Iterator[None]:
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


def _saved(snapshot: Snapshot, parent: Path) -> Path:
    folder = parent / f"checkpoint-{snapshot.step:08}"
    for later in (path for path in folders(parent) if step_of(path) > snapshot.step):
        if damage(later) is None:
            raise StepFailed(
                f"{later} is there, of a later step: another training was saved in {parent}; load "
                f"it and go on "
                "from it, or save elsewhere"
            )
        shutil.rmtree(later)
    # by a training that was killed as it wrote it
    remove_partial(parent)
    partial = folder.with_suffix(".partial")
    partial.mkdir()
    try:
        _write(snapshot, partial)
    # a full disk, say: what is half-written would keep it full
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier training, or damaged
    partial.rename(folder)
    _to_disk(parent)
    for old in folders(parent)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _write(snapshot: Snapshot, folder: Path) -> None:
    """A checkpoint's files, forced to disk."""
    tensors, scalars = _divided(snapshot.state)
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in snapshot.optimizer.param_groups
    ]
    save_weights(snapshot.model, folder / "model.safetensors")
    save_tensors(tensors, folder / "optimizer.safetensors")
    if snapshot.kept:
        save_tensors(_divided(snapshot.kept)[0], folder / BESIDE)
    files = [name for name in (*FILES, BESIDE) if name != "state.json" and (folder / name).exists()]
    state = {
        **snapshot.beside,
        "schema": SCHEMA,
        "step": snapshot.step,
        "strategy": snapshot.strategy,
        "identity": snapshot.identity,
        "tensors": {name: contents(folder / name) for name in files},
        "optimizer": {
            "class": type(snapshot.optimizer).__name__,
            "groups": groups,
            "scalars": scalars,
        },
        "scheduler": snapshot.scheduler.state_dict() if snapshot.scheduler is not None else None,
    }
    with naming(folder / "state.json"):
        (folder / "state.json").write_text(json.dumps(plain(state), indent=1))
    with naming(folder / SUMS):
        (folder / SUMS).write_text(
            "".join(f"{digest_of(folder / name)}  {name}\n" for name in (*files, "state.json"))
        )
    for path in [*folder.iterdir(), folder]:
        _to_disk(path)


def shapes_of(shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    """Of a model's state, as part of an identity."""
    return {f"shape of {name}": shape for name, shape in shapes.items()}


def load(saved: Saved, into: Snapshot, device: str = "cpu", weights: bool = True) -> None:
    """Put a checkpoint into a training before its first step, whatever its strategy. weights:
    the model's too. Raises Refused if it does not fit.
    """
    _check_fit(saved, into)
    try:
        _load(saved, into, device, weights)
    except Exception as error:
        raise Refused(
            f"{saved.folder} does not fit what is trained here: {type(error).__name__}: {error}; "
            f"resume it as it "
            "was, or from another checkpoint"
        ) from error


def _load(saved: Saved, into: Snapshot, device: str, weights: bool) -> None:
    kept = saved.state["optimizer"]
    names = into.names
    if weights:
        load_weights(into.model, saved.folder / "model.safetensors", device)
    values: dict[str, dict[str, Any]] = {
        name: dict(scalars) for name, scalars in kept["scalars"].items()
    }
    for name, tensors in _by_parameter(saved.folder / "optimizer.safetensors").items():
        values.setdefault(name, {}).update(tensors)
    order = [name for group in names for name in group]
    places = iter(range(len(order)))
    groups = [
        {**group, "params": [next(places) for _ in own]}
        for group, own in zip(kept["groups"], names, strict=True)
    ]
    into.optimizer.load_state_dict(
        {
            "state": {place: values[name] for place, name in enumerate(order) if name in values},
            "param_groups": groups,
        }
    )
    parameters = dict(into.model.named_parameters())
    # torch gives floating state its parameter's type; keep what it was
    for name, each in values.items():
        own = into.optimizer.state[parameters[name]]
        own.update(
            {
                key: value.to(own[key].device)
                for key, value in each.items()
                if isinstance(value, Tensor)
            }
        )
    if into.scheduler is not None:
        # some take it apart
        into.scheduler.load_state_dict(copy.deepcopy(saved.state["scheduler"]))


def _by_parameter(path: Path) -> State:
    """Tensors saved as "parameter/what", by parameter and by what."""
    found: State = {}
    for key, tensor in load_tensors(path).items():
        name, _, what = key.rpartition("/")
        found.setdefault(name, {})[what] = tensor
    return found


def kept_in(saved: Saved) -> State:
    """What the strategy that was saved keeps beside the optimizer's state."""
    path = saved.folder / BESIDE
    return _by_parameter(path) if path.exists() else {}


def _check_fit(saved: Saved, into: Snapshot) -> None:
    kept = saved.state["optimizer"]
    theirs = saved.state["identity"]
    both = theirs.keys() & into.identity.keys()
    refuse_another(
        saved.folder,
        {name: theirs[name] for name in both},
        {name: into.identity[name] for name in both},
        "here it is",
    )
    if kept["class"] != type(into.optimizer).__name__ or len(kept["groups"]) != len(into.names):
        raise Refused(
            f"{saved.folder} was saved with a {kept['class']} of {len(kept['groups'])} group(s), "
            f"and the optimizer "
            f"here is a {type(into.optimizer).__name__} of {len(into.names)}; resume it as it was"
        )
    if (saved.state["scheduler"] is None) != (into.scheduler is None):
        raise Refused(
            f"{saved.folder} was saved {'without' if saved.state['scheduler'] is None else 'with'} "
            f"a scheduler; "
            "resume it as it was"
        )
    for number, (group, own) in enumerate(
        zip(kept["groups"], into.optimizer.param_groups, strict=True)
    ):
        _check_kinds(saved.folder, f"group {number} of the optimizer", group, own)
    if into.scheduler is not None:
        _check_kinds(
            saved.folder, "the scheduler", saved.state["scheduler"], into.scheduler.state_dict()
        )


def _check_kinds(folder: Path, of: str, kept: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """What is a number here is one in the checkpoint too. What is only here, a newer torch may
    have added.
    """
    if "lr" in own and "lr" not in kept:
        raise Refused(f"{folder} has no lr of {of}; resume from another checkpoint")
    for name in own.keys() & kept.keys():
        if isinstance(own[name], int | float) and not isinstance(kept[name], int | float | Tensor):
            raise Refused(
                f"{folder} has {kept[name]!r} as {name} of {of}, which is a number; resume from "
                f"another checkpoint"
            )


def _divided(state: State) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
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


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
