"""Checkpoints as they lie on disk: which there are, which is whole, and what one says of
itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.record.record import lines_of
from paragrad.runtime.world import World
from paragrad.trainer.checkpoint.json_values import restored
from paragrad.trainer.checkpoint.tensor_files import contents

SCHEMA = 1
NAME = re.compile(r"checkpoint-(\d{8,})")
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
SUMS = "SHA256SUMS"
BESIDE = "strategy.safetensors"  # there where the strategy keeps something


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

    def tested(self, epoch: int, in_rounds: bool = False) -> dict[str, Any] | None:
        """What the record of the run that was saved says of an epoch's end and test; None if it
        did not come to it. in_rounds: an epoch is a round.
        """
        return tested(self.folder.parent, epoch) if in_rounds == ("rounds" in self.state) else None


def tested(run: Path, epoch: int) -> dict[str, Any] | None:
    """What a run's record says of an epoch's end and test: its first rank, or who handed out
    its samples.
    """
    return next(
        (
            line
            for name in ("rank-0.jsonl", "run.jsonl")
            for line in lines_of(run / name, spans=False)
            if line["kind"] == "epoch" and line["epoch"] == epoch
        ),
        None,
    )


def newest(parent: Path) -> Saved:
    """The newest checkpoint below a folder that is whole, or the folder's own if it is one.
    Raises Refused where is none.
    """
    if parent.is_dir() and NAME.fullmatch(parent.resolve().name):
        if (wrong := damage(parent)) is not None:
            raise Refused(
                f"{parent} is damaged ({wrong}); give the folder of its run, to take the newest "
                f"that is whole"
            )
        return _saved(parent, "asked for")
    damaged: list[str] = []
    for folder in folders(parent):
        wrong = damage(folder)
        if wrong is None:
            return _saved(folder, "; ".join(damaged) or "the newest")
        damaged.append(f"{folder.name} is damaged ({wrong})")
        warnings.warn(f"{folder} is damaged ({wrong}); taking the one before it", stacklevel=2)
    if damaged:
        raise Refused(f"{parent}: no checkpoint is whole: {'; '.join(damaged)}")
    raise Refused(
        f"{parent} holds no checkpoint; give the folder of a run that was saved (train --save "
        f"STEPS), or stopped"
    )


def _saved(folder: Path, because: str) -> Saved:
    return Saved(folder.resolve(), _state(folder), because)


def newest_of_all(world: World, parent: Path) -> Saved:
    """The newest whole checkpoint below a folder, as rank 0 sees it. Collective. Raises Refused
    on every rank.
    """
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


def folders(parent: Path) -> list[Path]:
    """The checkpoints below a folder, newest first."""
    return sorted(
        (
            path
            for path in parent.glob("checkpoint-*")
            if path.is_dir() and NAME.fullmatch(path.name)
        ),
        key=step_of,
        reverse=True,
    )


def remove_partial(parent: Path) -> None:
    """Remove checkpoints below a folder, or a trained model, that nobody writes any more."""
    for left in (*parent.glob("checkpoint-*.partial"), *parent.glob("model.safetensors.partial")):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    found = NAME.fullmatch(folder.name)
    assert found is not None
    return int(found[1])


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    for name in (SUMS, *FILES):
        if not (folder / name).is_file():  # a FIFO would be waited for
            return f"{name} is missing"
    try:
        listed = [line.split("  ", 1) for line in (folder / SUMS).read_text().splitlines()]
        sums = {name: digest for digest, name in listed}
    except (OSError, ValueError) as error:
        return f"{SUMS}: {error}"
    for name in (*FILES, BESIDE) if BESIDE in sums else FILES:
        if not (folder / name).is_file() or digest_of(folder / name) != sums.get(name):
            return f"{name} does not match its sha256"
    try:
        state = _state(folder)
        for name, tensors in state.get("tensors", {}).items():
            if contents(folder / name) != tensors:
                return f"{name} holds other tensors than were saved in it"
    # whoever edits a checkpoint can make its sums too
    except Exception as error:
        return f"{type(error).__name__}: {error}" if not isinstance(error, Refused) else str(error)
    return None


def _state(folder: Path) -> dict[str, Any]:
    """What state.json says. Raises Refused, or anything else, where it says no state."""
    state = json.loads((folder / "state.json").read_text())
    if state["schema"] != SCHEMA:
        raise Refused(f"state.json has schema {state['schema']}, this version reads {SCHEMA}")
    state = restored(state)
    optimizer = state["optimizer"]
    for name, value, kind in (
        ("step", state["step"], int),
        ("rounds", state.get("rounds", 0), int),
        ("strategy", state["strategy"], str),
        ("identity", state["identity"], dict),
        ("scheduler", state["scheduler"], dict | None),
        ("optimizer's class", optimizer["class"], str),
        ("optimizer's groups", optimizer["groups"], list),
        ("optimizer's scalars", optimizer["scalars"], dict),
    ):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise Refused(f"state.json has {value!r} as {name}")
    if not all(
        isinstance(each, dict) for each in [*optimizer["groups"], *optimizer["scalars"].values()]
    ):
        raise Refused("state.json: groups and scalars of the optimizer are not mappings")
    if NAME.fullmatch(folder.name) and state["step"] != step_of(folder):
        raise Refused(f"state.json is of step {state['step']}")
    return state  # type: ignore[no-any-return]


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
