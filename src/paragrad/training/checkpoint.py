"""Checkpoints: a training under serial names and shapes, so that any strategy and any number of workers can go on.

    RUN/checkpoint-00000120/    model.safetensors       parameters and buffers
                                optimizer.safetensors   the optimizer's tensors, "PARAMETER/what"
                                state.json              step, job, optimizer's groups, scheduler
                                SHA256SUMS              of these; `sha256sum -c` reads it too

Nothing is pickled. A checkpoint is written beside its place and renamed into it, whole or not at all; the one before it is
kept. One that does not match its checksums is named and passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.errors import Refused, StepFailed
from paragrad.jobs.job import Job
from paragrad.record.record import lines_of
from paragrad.techniques.layout import State
from paragrad.training.door import Findings
from paragrad.training.tensor_files import load_tensors, load_weights, save_tensors, save_weights
from paragrad.world.world import World

SCHEMA = 1
KEPT = 2                # the newest, and the one before it
NAME = re.compile(r"checkpoint-\d{8,}")
MARK = "a Python"
MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict, "defaultdict": dict}
FILES, SUMS = ("model.safetensors", "optimizer.safetensors", "state.json"), "SHA256SUMS"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole."""
    folder: Path
    state: dict[str, Any]
    because: str = "the newest"

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def sums(self) -> str:
        """The checksums of its files, by which it is known."""
        return (self.folder / SUMS).read_text()

    def tested(self, epoch: int) -> dict[str, Any] | None:
        """What the record of the run that was saved says of an epoch's end and test; None if it did not come to it."""
        return next((line for line in lines_of(self.folder.parent / "rank-0.jsonl", "span")
                     if line["kind"] == "epoch" and line["epoch"] == epoch), None)


@dataclass(frozen=True)
class Snapshot:
    """A training as it stands after `step` steps, until the next one is made.

    state: the optimizer's, in serial shapes, whole on rank 0 (empty where a checkpoint is to be loaded into it);  identity:
    what must be equal where it is loaded again.
    """
    step: int
    strategy: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    state: State
    identity: dict[str, Any]

    @property
    def names(self) -> list[list[str]]:
        """The serial names of the parameters of the optimizer's groups."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [[names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]


def save(snapshot: Snapshot, parent: Path) -> Path:
    """Write a snapshot below parent; the checkpoint's folder. Call on rank 0; replicas are equal.

    Raises StepFailed where the optimizer or scheduler holds what neither tensors nor JSON can, or where parent holds a later
    step of another training.
    """
    folder = parent / f"checkpoint-{snapshot.step:08}"
    for later in (path for path in _folders(parent) if path > folder):
        if damage(later) is None:
            raise StepFailed(f"{later} is there, of a later step: another training was saved in {parent}; load it and go on "
                             "from it, or save elsewhere")
        shutil.rmtree(later)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors, scalars = _divided(snapshot.state)
    groups = [{name: value for name, value in group.items() if name != "params"} for group in snapshot.optimizer.param_groups]
    save_weights(snapshot.model, partial / "model.safetensors")
    save_tensors(tensors, partial / "optimizer.safetensors")
    state = {"schema": SCHEMA, "step": snapshot.step, "strategy": snapshot.strategy, "identity": snapshot.identity,
             "optimizer": {"class": type(snapshot.optimizer).__name__, "groups": groups, "scalars": scalars},
             "scheduler": snapshot.scheduler.state_dict() if snapshot.scheduler is not None else None}
    (partial / "state.json").write_text(json.dumps(plain(state), indent=1))
    (partial / SUMS).write_text("".join(f"{_digest(partial / name)}  {name}\n" for name in FILES))
    for path in [*partial.iterdir(), partial]:
        _to_disk(path)
    shutil.rmtree(folder, ignore_errors=True)           # of an earlier training, or damaged
    partial.rename(folder)
    _to_disk(parent)
    for old in _folders(parent)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def identity_of(job: Job, facts: Findings) -> dict[str, Any]:
    """What a job must have in common with the one that was saved."""
    return {"name": job.name, "seed": job.seed, "batch": job.batch, "samples": facts.samples,
            "dtype": str(job.parameter_dtype).removeprefix("torch."), **facts.training, **shapes_of(facts.shapes)}


def shapes_of(shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    """Of a model's state, as part of an identity."""
    return {f"shape of {name}": shape for name, shape in shapes.items()}


def found(parent: Path, job: Job, facts: Findings) -> Saved:
    """The newest whole checkpoint of a run, if it is this job's. Raises Refused; a damaged one is warned of by name."""
    saved = newest(parent)
    ours, theirs = identity_of(job, facts), saved.state["identity"]
    for name in {**theirs, **ours}:
        if ours.get(name) != theirs.get(name):
            raise Refused(f"{saved.folder} was saved with {name} {theirs.get(name)}, and job {job.name} has {ours.get(name)}; "
                          + (f"give --{name} {theirs[name]}" if name in ("seed", "batch") else "resume it as it was"))
    if saved.step > job.epochs * facts.order.steps:
        raise Refused(f"{saved.folder} has {saved.step} steps behind it, and job {job.name} wants "
                      f"{job.epochs * facts.order.steps}; give more --epochs")
    return saved


def newest(parent: Path) -> Saved:
    """The newest checkpoint below a folder that is whole, or the folder's own if it is one. Raises Refused where is none."""
    if parent.is_dir() and NAME.fullmatch(parent.resolve().name):
        if (wrong := damage(parent)) is not None:
            raise Refused(f"{parent} is damaged ({wrong}); give the folder of its run, to take the newest that is whole")
        return _saved(parent, "asked for")
    damaged: list[str] = []
    for folder in _folders(parent):
        wrong = damage(folder)
        if wrong is None:
            return _saved(folder, "; ".join(damaged) or "the newest")
        damaged.append(f"{folder.name} is damaged ({wrong})")
        warnings.warn(f"{folder} is damaged ({wrong}); taking the one before it", stacklevel=2)
    if damaged:
        raise Refused(f"{parent}: no checkpoint is whole: {'; '.join(damaged)}")
    raise Refused(f"{parent} holds no checkpoint; give the folder of a run that was saved (train --save STEPS), or stopped")


def _saved(folder: Path, because: str) -> Saved:
    return Saved(folder.resolve(), restored(json.loads((folder / "state.json").read_text())), because)


def newest_of_all(world: World, parent: Path) -> Saved:
    """The newest whole checkpoint below a folder, as rank 0 sees it. Collective. Raises Refused on every rank."""
    chosen: Saved | Refused | None = None
    if world.rank == 0:
        try:
            chosen = newest(parent)
        except Refused as error:
            chosen = error
    chosen = world.agreed(chosen)
    if isinstance(chosen, Refused):
        raise chosen
    assert chosen is not None
    return chosen


def load(saved: Saved, into: Snapshot, device: str = "cpu") -> None:
    """Put a checkpoint into a training before its first step, whatever its strategy. Raises Refused if it does not fit."""
    kept, names = saved.state["optimizer"], into.names
    _check_fit(saved, into)
    load_weights(into.model, saved.folder / "model.safetensors", device)
    values: dict[str, dict[str, Any]] = {name: dict(scalars) for name, scalars in kept["scalars"].items()}
    for key, tensor in load_tensors(saved.folder / "optimizer.safetensors").items():
        name, _, what = key.rpartition("/")
        values.setdefault(name, {})[what] = tensor
    order = [name for group in names for name in group]
    places = iter(range(len(order)))
    groups = [{**group, "params": [next(places) for _ in own]} for group, own in zip(kept["groups"], names, strict=True)]
    into.optimizer.load_state_dict({"state": {place: values[name] for place, name in enumerate(order) if name in values},
                                    "param_groups": groups})
    parameters = dict(into.model.named_parameters())
    for name, each in values.items():           # torch gives floating state its parameter's type; keep what it was
        own = into.optimizer.state[parameters[name]]
        own.update({key: own[key].to(value.dtype) for key, value in each.items() if isinstance(value, Tensor)})
    if into.scheduler is not None:
        into.scheduler.load_state_dict(saved.state["scheduler"])


def _check_fit(saved: Saved, into: Snapshot) -> None:
    kept, theirs = saved.state["optimizer"], saved.state["identity"]
    for name in sorted(into.identity.keys() & theirs.keys()):
        if into.identity[name] != theirs[name]:
            raise Refused(f"{saved.folder} was saved with {name} {theirs[name]}, and here it is {into.identity[name]}; resume "
                          "it as it was")
    if kept["class"] != type(into.optimizer).__name__ or len(kept["groups"]) != len(into.names):
        raise Refused(f"{saved.folder} was saved with a {kept['class']} of {len(kept['groups'])} group(s), and the optimizer "
                      f"here is a {type(into.optimizer).__name__} of {len(into.names)}; resume it as it was")
    if (saved.state["scheduler"] is None) != (into.scheduler is None):
        raise Refused(f"{saved.folder} was saved {'without' if saved.state['scheduler'] is None else 'with'} a scheduler; "
                      "resume it as it was")


def _divided(state: State) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """(tensors by "parameter/what", plain values by parameter)."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, values in state.items():
        for what, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{what}"] = value.detach().clone().contiguous()
            else:
                scalars.setdefault(name, {})[what] = value
    return tensors, scalars


def plain(value: Any) -> Any:
    """A value as JSON can hold it: what is no list and no mapping of texts is marked, to come back as it was."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Mapping):
        return {MARK: type(value).__name__, "items": [[plain(key), plain(each)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {MARK: "tuple", "items": [plain(each) for each in value]}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, Tensor):
        return {MARK: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "items": value.tolist()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise StepFailed(f"a checkpoint cannot hold a {type(value).__name__}, which the optimizer or scheduler keeps; "
                     "only tensors, numbers, texts, and lists and mappings of them are saved")


def restored(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, list):
        return [restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: restored(each) for key, each in value.items()}
    if value[MARK] == "tensor":
        return torch.tensor(value["items"], dtype=getattr(torch, value["dtype"]))
    items = restored(value["items"])
    return tuple(items) if value[MARK] == "tuple" else MAPPINGS[value[MARK]](dict(items))


def _folders(parent: Path) -> list[Path]:
    """The checkpoints below a folder, newest first."""
    return sorted((path for path in parent.glob("checkpoint-*") if path.is_dir() and not path.suffix), reverse=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        listed = [line.split("  ", 1) for line in (folder / SUMS).read_text().splitlines()]
        sums = {name: digest for digest, name in listed}
    except (OSError, ValueError) as error:
        return f"{SUMS}: {error}"
    for name in FILES:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _digest(folder / name) != sums.get(name):
            return f"{name} does not match its sha256"
    schema = json.loads((folder / "state.json").read_text())["schema"]
    return None if schema == SCHEMA else f"state.json has schema {schema}, this version reads {SCHEMA}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
