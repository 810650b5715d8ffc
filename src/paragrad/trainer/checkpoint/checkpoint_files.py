"""Checkpoints on disk: which ones exist, which are undamaged, and what they contain."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paragrad.errors import Refused, add_file_name, warn_user
from paragrad.record.record import read_lines
from paragrad.runtime.world import World
from paragrad.trainer.checkpoint.json_values import decode_json_value
from paragrad.trainer.checkpoint.tensor_files import read_tensor_types

CHECKPOINT_SCHEMA = 1
FOLDER_PATTERN = re.compile(r"checkpoint-(\d{8,})")
CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
CHECKSUM_FILE = "SHA256SUMS"
BEST_FILE = "best.json"  # names the checkpoint of the best test of a run
STRATEGY_FILE = "strategy.safetensors"  # exists only if the strategy keeps state of its own


@dataclass(frozen=True)
class SavedCheckpoint:
    """An undamaged checkpoint on disk.

    Attributes:
        folder: The checkpoint's folder.
        state: The content of state.json.
        choice_reason: Why this checkpoint was chosen.
    """

    folder: Path
    state: dict[str, Any]
    choice_reason: str = "the newest"

    @property
    def step(self) -> int:
        """The number of steps that were completed when the checkpoint was saved."""
        return int(self.state["step"])

    @property
    def checksums(self) -> str:
        """The checksums of the files, which identify the checkpoint."""
        return (self.folder / CHECKSUM_FILE).read_text()

    def find_epoch_record(self, epoch: int, trains_clients: bool = False) -> dict[str, Any] | None:
        """Find the record line of an epoch's end and test in the run that was saved.

        Args:
            epoch: The epoch.
            trains_clients: Whether an epoch is a round.

        Returns:
            The line; None if the run did not reach the end of the epoch.
        """
        return (
            find_recorded_epoch(self.folder.parent, epoch)
            if trains_clients == ("rounds" in self.state)
            else None
        )


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint of the best test of a run.

    Attributes:
        folder: The checkpoint's folder.
        step: The completed steps.
        epoch: The epoch after which the test was.
        metric: The name of the test value.
        value: The test value.
    """

    folder: Path
    step: int
    epoch: int
    metric: str
    value: float


def read_best_checkpoint(run: Path) -> BestCheckpoint | None:
    """Read which checkpoint of a run had the best test.

    Args:
        run: The folder of the run.

    Returns:
        The checkpoint; None if the run kept none, or if it was removed.
    """
    try:
        values = json.loads((run / BEST_FILE).read_text())
        best = BestCheckpoint(**{**values, "folder": (run / values["folder"]).resolve()})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return best if best.folder.is_dir() else None


def write_best_checkpoint(best: BestCheckpoint, run: Path) -> None:
    """Write which checkpoint had the best test.

    Args:
        best: The checkpoint.
        run: The folder of the run.
    """
    partial = run / f"{BEST_FILE}.partial"
    text = json.dumps({**asdict(best), "folder": os.path.relpath(best.folder, run)})
    with add_file_name(partial):
        partial.write_text(text)
    partial.rename(run / BEST_FILE)


def list_epoch_records(run: Path, trains_clients: bool) -> list[dict[str, Any]]:
    """List the record lines of the epochs that a run completed, in order.

    Args:
        run: The folder of the run.
        trains_clients: Whether an epoch is a round; a run with the other kind has none.
    """
    lines = [
        line
        for name in ("rank-0.jsonl", "run.jsonl")
        for line in read_lines(run / name, spans=False)
        if line["kind"] == "epoch" and ("clients" in line) == trains_clients
    ]
    return sorted(lines, key=lambda line: int(line["epoch"]))


def list_resumed_runs(run: Path, completed: int) -> Iterator[tuple[Path, int]]:
    """List a run and the runs from which it goes on, the newest first.

    Args:
        run: The folder of the run.
        completed: Its completed steps.

    Yields:
        (folder of a run, completed steps that belong to the training).
    """
    seen: set[Path] = set()
    while run not in seen:
        seen.add(run)
        yield run, completed
        lines = read_lines(run / "run.jsonl", spans=False)
        resumed = next((line["resumed"] for line in lines if line["kind"] == "run"), None)
        if not resumed:
            return
        run, completed = Path(resumed["run"]), min(completed, int(resumed["step"]))


def find_recorded_epoch(run: Path, epoch: int) -> dict[str, Any] | None:
    """Find the record line of an epoch's end and test in a run's record.

    The line is in the record of rank 0, or in that of the process with the work queue.

    Args:
        run: The folder of the run.
        epoch: The epoch.
    """
    return next(
        (
            line
            for name in ("rank-0.jsonl", "run.jsonl")
            for line in read_lines(run / name, spans=False)
            if line["kind"] == "epoch" and line["epoch"] == epoch
        ),
        None,
    )


def find_newest_checkpoint(parent: Path) -> SavedCheckpoint:
    """Find the newest undamaged checkpoint below a folder; the folder itself if it is a checkpoint.

    Damaged checkpoints are named in warnings.

    Args:
        parent: The folder of a run, or of one checkpoint.

    Raises:
        Refused: If there is no undamaged checkpoint.
    """
    if parent.is_dir() and FOLDER_PATTERN.fullmatch(parent.resolve().name):
        if (wrong := find_damage(parent)) is not None:
            raise Refused(
                f"{parent} is damaged ({wrong}); give the folder of its run, to take the newest "
                "that is whole"
            )
        return _make_saved_checkpoint(parent, "asked for")
    damaged: list[str] = []
    for folder in list_checkpoint_folders(parent):
        wrong = find_damage(folder)
        if wrong is None:
            return _make_saved_checkpoint(folder, "; ".join(damaged) or "the newest")
        damaged.append(f"{folder.name} is damaged ({wrong})")
        warn_user(f"{folder} is damaged ({wrong}); taking the one before it")
    if damaged:
        raise Refused(f"{parent}: no checkpoint is whole: {'; '.join(damaged)}")
    raise Refused(
        f"{parent} holds no checkpoint; give the folder of a run that was saved (train --save "
        "STEPS), or stopped"
    )


def _make_saved_checkpoint(folder: Path, reason: str) -> SavedCheckpoint:
    return SavedCheckpoint(folder.resolve(), _read_checkpoint_state(folder), reason)


def agree_on_newest_checkpoint(world: World, parent: Path) -> SavedCheckpoint:
    """Find the newest undamaged checkpoint below a folder as rank 0 sees it. Collective.

    Args:
        world: The ranks.
        parent: The folder of a run, or of one checkpoint.

    Raises:
        Refused: On every rank, if rank 0 finds no undamaged checkpoint.
    """
    chosen: SavedCheckpoint | Refused | None = None
    if world.rank == 0:
        try:
            chosen = find_newest_checkpoint(parent)
        except Refused as error:
            chosen = error
    chosen = world.broadcast_object(chosen)
    if isinstance(chosen, Refused):
        raise chosen
    assert chosen is not None
    return chosen


def name_checkpoint(step: int) -> str:
    """Return the name of the folder of a checkpoint.

    Args:
        step: The completed steps.
    """
    return f"checkpoint-{step:08}"


def list_checkpoint_folders(parent: Path) -> list[Path]:
    """List the checkpoint folders below a folder, newest first."""
    return sorted(
        (
            path
            for path in parent.glob("checkpoint-*")
            if path.is_dir() and FOLDER_PATTERN.fullmatch(path.name)
        ),
        key=read_folder_step,
        reverse=True,
    )


def remove_partial_files(parent: Path) -> None:
    """Remove unfinished checkpoints and models below a folder that no process writes any more."""
    for left in (
        *parent.glob("checkpoint-*.partial"),
        *parent.glob("model.safetensors.partial"),
        parent / f"{BEST_FILE}.partial",
    ):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def read_folder_step(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    found = FOLDER_PATTERN.fullmatch(folder.name)
    assert found is not None
    return int(found[1])


def find_damage(folder: Path) -> str | None:
    """Describe what is wrong with a checkpoint, or return None."""
    for name in (CHECKSUM_FILE, *CHECKPOINT_FILES):
        if not (folder / name).is_file():  # reading a FIFO would block
            return f"{name} is missing"
    try:
        listed = [line.split("  ", 1) for line in (folder / CHECKSUM_FILE).read_text().splitlines()]
        sums = {name: digest for digest, name in listed}
    except (OSError, ValueError) as error:
        return f"{CHECKSUM_FILE}: {error}"
    for name in (*CHECKPOINT_FILES, STRATEGY_FILE) if STRATEGY_FILE in sums else CHECKPOINT_FILES:
        if not (folder / name).is_file() or compute_sha256(folder / name) != sums.get(name):
            return f"{name} does not match its sha256"
    try:
        state = _read_checkpoint_state(folder)
        for name, tensors in state.get("tensors", {}).items():
            if read_tensor_types(folder / name) != tensors:
                return f"{name} holds other tensors than were saved in it"
    # An edited checkpoint can have correct checksums and still have a wrong content.
    except Exception as error:
        return f"{type(error).__name__}: {error}" if not isinstance(error, Refused) else str(error)
    return None


def _read_checkpoint_state(folder: Path) -> dict[str, Any]:
    """Read state.json.

    Raises:
        Refused: If a field has a wrong type; any other exception if the file cannot be parsed.
    """
    state = json.loads((folder / "state.json").read_text())
    if state["schema"] != CHECKPOINT_SCHEMA:
        raise Refused(
            f"state.json has schema {state['schema']}, this version reads {CHECKPOINT_SCHEMA}"
        )
    state = decode_json_value(state)
    optimizer = state["optimizer"]
    for name, value, kind in (
        ("step", state["step"], int),
        ("rounds", state.get("rounds", 0), int),
        ("loss_scale", state.get("loss_scale", []), list),
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
    if FOLDER_PATTERN.fullmatch(folder.name) and state["step"] != read_folder_step(folder):
        raise Refused(f"state.json is of step {state['step']}")
    return state  # type: ignore[no-any-return]


def compute_sha256(path: Path) -> str:
    """Compute the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
