"""What a server needs for a restart: a snapshot after a number of updates, and a journal.

    FOLDER/server-N-UPDATES.snapshot    its vectors and the optimizer state (torch.save); a rename
                                        makes the file appear complete or not at all
    FOLDER/server-N.journal             the number of updates in the snapshot, then (ticket,
                                        samples) of every update since, written before the update

A journal of an earlier snapshot is ignored: the process was killed before it could write a new one,
and the snapshot has its updates.

With a work queue, updates in the journal but not in the snapshot are lost to this server, and
counted. Their tickets are not applied again. Without one the journal is empty: all servers go back
to the last step of which all have a snapshot (`find_common_step`), and later steps are made again.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paragrad.engine.optimizer.optimizer_state import copy_optimizer_attributes, select_global_state

UPDATES_PER_SNAPSHOT = 100
KEPT_SNAPSHOTS = 2  # another server may not have saved the latest snapshot yet
SMALL_FILE_BYTES = 2**16  # a disk with less room counts as full
ENTRY_STRUCT = struct.Struct("<qq")


class SnapshotSource(Protocol):
    """The parts of a server that are saved.

    Attributes:
        values: The vectors of the server.

        local_parameters: The parameters as the optimizer holds them.

        optimizer: The optimizer.

        scheduler: The scheduler, or None.

        updates: Number of updates made.

        refusals: Counts of refused requests, by reason.
    """

    values: list[Tensor]
    local_parameters: list[Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    updates: int
    refusals: Counter[str]

    def export_counts(self) -> dict[str, Any]:
        """Return the counts of the server."""
        ...

    def restore_counts(self, counts: dict[str, Any]) -> None:
        """Set the counts of the server.

        Args:
            counts: The exported counts.
        """
        ...

    def lose_ticket(self, ticket: int, samples: int) -> None:
        """Count a ticket as applied, though its update is lost.

        Args:
            ticket: Number of the ticket.
            samples: Number of its samples.
        """
        ...


def list_snapshots(folder: Path, number: int) -> dict[int, Path]:
    """Return the snapshots of a server, by number of updates, in order.

    Args:
        folder: The folder.
        number: Number of the server.
    """
    snapshots = {
        int(path.stem.rsplit("-", 1)[1]): path
        for path in folder.glob(f"server-{number}-*.snapshot")
    }
    return dict(sorted(snapshots.items()))


def find_common_step(folder: Path, servers: int) -> int | None:
    """Return the last step of which all servers have a snapshot, or None.

    Args:
        folder: The folder.
        servers: Number of servers.
    """
    return max(
        set.intersection(*(set(list_snapshots(folder, number)) for number in range(servers))),
        default=None,
    )


class SnapshotStore:
    """The snapshots and the journal of one server.

    Args:
        folder: The folder.
        number: Number of the server.

    Attributes:
        folder: The folder.
        number: Number of the server.
        journal_path: Path of the journal.
        journal: File descriptor of the journal.
        entries: Number of entries in the journal, without the first.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.journal_path = folder / f"server-{number}.journal"
        self.journal = os.open(self.journal_path, os.O_RDWR | os.O_CREAT, 0o600)
        self.entries = 0

    def record_tickets(self, shard: SnapshotSource, tickets: list[tuple[int, int]]) -> None:
        """Write tickets to the journal before they are applied in one update.

        Args:
            shard: The server.
            tickets: (ticket, samples) of each.
        """
        if self.entries + len(tickets) > UPDATES_PER_SNAPSHOT:
            self.save_snapshot(shard)
        self._write_entries(tickets)
        self.entries += len(tickets)

    def save_snapshot(self, shard: SnapshotSource) -> None:
        """Save a snapshot, remove older ones, and clear the journal.

        Args:
            shard: The server.

        Raises:
            OSError: The file cannot be written.
        """
        path = self.folder / f"server-{self.number}-{shard.updates:08}.snapshot"
        partial = path.with_suffix(".partial")
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in shard.optimizer.param_groups
        ]
        contents = {
            "values": shard.values,
            "state": [
                dict(shard.optimizer.state.get(place, {})) for place in shard.local_parameters
            ],
            "groups": groups,
            "scheduler": shard.scheduler and shard.scheduler.state_dict(),
            "counts": shard.export_counts(),
            "beside": (
                select_global_state(shard.optimizer),
                copy_optimizer_attributes(shard.optimizer),
            ),
        }
        try:
            torch.save(contents, partial)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, RuntimeError):  # torch names neither the file nor the cause
                code, reason = errno.EIO, f"torch could not write it ({error})"
                with suppress(OSError):
                    if shutil.disk_usage(self.folder).free < SMALL_FILE_BYTES:
                        code, reason = errno.ENOSPC, os.strerror(errno.ENOSPC)
                raise OSError(code, reason, str(partial)) from error
            raise
        partial.rename(path)
        for old in [*list_snapshots(self.folder, self.number).values()][:-KEPT_SNAPSHOTS]:
            old.unlink()
        os.ftruncate(self.journal, 0)
        os.lseek(self.journal, 0, os.SEEK_SET)
        self._write_entries([(shard.updates, 0)])
        self.entries = 0

    def _write_entries(self, entries: list[tuple[int, int]]) -> None:
        text = b"".join(ENTRY_STRUCT.pack(*each) for each in entries)
        start = os.lseek(self.journal, 0, os.SEEK_CUR)
        try:
            written = os.write(self.journal, text)
        except OSError as error:  # it names no file
            raise OSError(error.errno, error.strerror, str(self.journal_path)) from error
        if written < len(text):  # the disk is full, or the file may not be longer
            os.ftruncate(self.journal, start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.journal_path))

    def try_save_snapshot(self, shard: SnapshotSource) -> None:
        """Save a snapshot, or count the failure.

        Nothing is lost without it; only more steps would be made again after a restart.

        Args:
            shard: The server.
        """
        try:
            self.save_snapshot(shard)
        except OSError:
            shard.refusals["a snapshot, for which there was no room"] += 1

    def restore_shard(self, shard: SnapshotSource, step: int | None = None) -> None:
        """Restore a server from its last snapshot, if there is one.

        Updates since then are lost.

        Args:
            shard: The server.
            step: Use no snapshot after this step; later ones are removed. None: use the last one.
        """
        for updates, later in list_snapshots(self.folder, self.number).items():
            if step is not None and updates > step:
                later.unlink()
        snapshots = list_snapshots(self.folder, self.number)
        restored = max(snapshots, default=0)
        for path in [*snapshots.values()][-1:]:
            # unpickling is safe here: the file is in the folder of this training
            contents = torch.load(path, weights_only=False)
            for value, saved in zip(shard.values, contents["values"], strict=True):
                value.copy_(saved)
            shard.optimizer.state.clear()
            for place, state in zip(shard.local_parameters, contents["state"], strict=True):
                if state:
                    shard.optimizer.state[place] = state
            for group, values in zip(shard.optimizer.param_groups, contents["groups"], strict=True):
                group.update(values)
            global_state, attributes = contents["beside"]
            shard.optimizer.state.update(global_state)
            vars(shard.optimizer).update(attributes)
            if shard.scheduler is not None:
                shard.scheduler.load_state_dict(contents["scheduler"])
            shard.restore_counts(contents["counts"])
        os.lseek(self.journal, 0, os.SEEK_SET)
        journal = os.read(self.journal, ENTRY_STRUCT.size * (UPDATES_PER_SNAPSHOT + 1024))
        entries = [
            ENTRY_STRUCT.unpack_from(journal, start)
            for start in range(0, len(journal) - ENTRY_STRUCT.size + 1, ENTRY_STRUCT.size)
        ]
        if entries and entries[0][0] >= restored:
            for entry in entries[1:]:
                shard.lose_ticket(*entry)
        self.save_snapshot(shard)

    def close(self) -> None:
        """Close the journal."""
        os.close(self.journal)
