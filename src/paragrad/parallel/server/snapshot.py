"""What a server needs to be started again: a snapshot every so many updates, and a journal of
the tickets applied since.

    FOLDER/server-N-UPDATES.snapshot    its vectors and the optimizer's state (torch.save, whole
    or not at all by a rename) FOLDER/server-N.journal             (ticket, samples) of every
    update since, written before it is made

Where samples are handed out, what is in the journal and not in the snapshot is lost to this
server, and counted: its tickets are not applied again. Where all wait for all nothing is in the
journal: all servers go back to the last step of which all have a snapshot (`common`), and steps
are made again.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paragrad.engine.optimizer.optimizer_state import copy_optimizer_attributes, select_global_state

UPDATES_PER_SNAPSHOT = 100  # updates
KEPT_SNAPSHOTS = 2  # snapshots: another server may not have the newest yet
ENTRY_STRUCT = struct.Struct("<qq")


class SnapshotSource(Protocol):
    """What of a server is kept, by the names that it has there. own: what the optimizer holds;
    counts, recount: where it stands, told and taken over;  lose: a ticket that was applied is
    lost;  refused: why what was.
    """

    values: list[Tensor]
    local_parameters: list[Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    updates: int
    refusals: Counter[str]

    def export_counts(self) -> dict[str, Any]: ...

    def restore_counts(self, counts: dict[str, Any]) -> None: ...

    def lose_ticket(self, ticket: int, samples: int) -> None: ...


def list_snapshots(folder: Path, number: int) -> dict[int, Path]:
    """Those of a server, by updates, in their order."""
    found = {
        int(path.stem.rsplit("-", 1)[1]): path
        for path in folder.glob(f"server-{number}-*.snapshot")
    }
    return dict(sorted(found.items()))


def find_common_step(folder: Path, servers: int) -> int | None:
    """The last step of which all servers have a snapshot, if there is one."""
    return max(
        set.intersection(*(set(list_snapshots(folder, number)) for number in range(servers))),
        default=None,
    )


class SnapshotStore:
    """Of one server, in a folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.journal = os.open(folder / f"server-{number}.journal", os.O_RDWR | os.O_CREAT, 0o600)
        self.entries = 0

    def record_tickets(self, shard: SnapshotSource, tickets: list[tuple[int, int]]) -> None:
        """Tickets, with their samples, are about to be applied, in one update."""
        if self.entries + len(tickets) > UPDATES_PER_SNAPSHOT:
            self.save_snapshot(shard)
        os.write(self.journal, b"".join(ENTRY_STRUCT.pack(*each) for each in tickets))
        self.entries += len(tickets)

    def save_snapshot(self, shard: SnapshotSource) -> None:
        path = self.folder / f"server-{self.number}-{shard.updates:08}.snapshot"
        partial = path.with_suffix(".partial")
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in shard.optimizer.param_groups
        ]
        kept = {
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
            torch.save(kept, partial)
        except BaseException:  # a full disk, say
            partial.unlink(missing_ok=True)
            raise
        partial.rename(path)
        for old in [*list_snapshots(self.folder, self.number).values()][:-KEPT_SNAPSHOTS]:
            old.unlink()
        os.ftruncate(self.journal, 0)
        os.lseek(self.journal, 0, os.SEEK_SET)
        self.entries = 0

    def try_save_snapshot(self, shard: SnapshotSource) -> None:
        """Where nothing is lost without it: more steps would be made again."""
        try:
            self.save_snapshot(shard)
        except (OSError, RuntimeError):  # a full disk, as torch says it
            shard.refusals["a snapshot, for which there was no room"] += 1

    def restore_shard(self, shard: SnapshotSource, step: int | None = None) -> None:
        """As it was at the last snapshot, if there is one, or at that of a step; what was
        applied since is lost.
        """
        for updates, later in list_snapshots(self.folder, self.number).items():
            if step is not None and updates > step:
                later.unlink()
        for path in [*list_snapshots(self.folder, self.number).values()][-1:]:
            # of this training's own folder
            found = torch.load(path, weights_only=False)
            for value, kept in zip(shard.values, found["values"], strict=True):
                value.copy_(kept)
            shard.optimizer.state.clear()
            for place, state in zip(shard.local_parameters, found["state"], strict=True):
                if state:
                    shard.optimizer.state[place] = state
            for group, values in zip(shard.optimizer.param_groups, found["groups"], strict=True):
                group.update(values)
            beside, own = found["beside"]
            shard.optimizer.state.update(beside)
            vars(shard.optimizer).update(own)
            if shard.scheduler is not None:
                shard.scheduler.load_state_dict(found["scheduler"])
            shard.restore_counts(found["counts"])
        os.lseek(self.journal, 0, os.SEEK_SET)
        written = os.read(self.journal, ENTRY_STRUCT.size * (UPDATES_PER_SNAPSHOT + 1024))
        for start in range(0, len(written) - ENTRY_STRUCT.size + 1, ENTRY_STRUCT.size):
            shard.lose_ticket(*ENTRY_STRUCT.unpack_from(written, start))
        self.save_snapshot(shard)

    def close(self) -> None:
        os.close(self.journal)
