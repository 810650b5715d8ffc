"""What a server needs to be started again: a snapshot every so many updates, and a journal of the tickets applied since.

    FOLDER/server-N.snapshot    its vectors and the optimizer's state (torch.save, whole or not at all by a rename)
    FOLDER/server-N.journal     (ticket, samples) of every update since, written before it is made

What is in the journal and not in the snapshot is lost to this server, and counted: its tickets are not applied again.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

EVERY = 100             # updates
ENTRY = struct.Struct("<qq")


class Shard(Protocol):
    """What of a server is kept, by the names that it has there. own: what the optimizer holds;  counts, recount: where it
    stands, told and taken over;  lose: a ticket that was applied is lost."""
    values: list[Tensor]
    own: list[Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def counts(self) -> dict[str, Any]: ...

    def recount(self, told: dict[str, Any]) -> None: ...

    def lose(self, ticket: int, samples: int) -> None: ...


class Snapshots:
    """Of one server, in a folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path = folder / f"server-{number}.snapshot"
        self.journal = os.open(folder / f"server-{number}.journal", os.O_RDWR | os.O_CREAT, 0o600)
        self.entries = 0

    def before(self, shard: Shard, tickets: list[tuple[int, int]]) -> None:
        """Tickets, with their samples, are about to be applied, in one update."""
        if self.entries + len(tickets) > EVERY:
            self.save(shard)
        os.write(self.journal, b"".join(ENTRY.pack(*each) for each in tickets))
        self.entries += len(tickets)

    def save(self, shard: Shard) -> None:
        partial = self.path.with_suffix(".partial")
        torch.save({"values": shard.values, "state": [dict(shard.optimizer.state.get(place, {})) for place in shard.own],
                    "groups": [{name: value for name, value in group.items() if name != "params"}
                               for group in shard.optimizer.param_groups],
                    "scheduler": shard.scheduler and shard.scheduler.state_dict(), "counts": shard.counts()}, partial)
        partial.rename(self.path)
        os.ftruncate(self.journal, 0)
        os.lseek(self.journal, 0, os.SEEK_SET)
        self.entries = 0

    def restore(self, shard: Shard) -> None:
        """As it was at the last snapshot, if there is one; what was applied since is lost."""
        if self.path.exists():
            found = torch.load(self.path, weights_only=False)           # of this training's own folder
            for value, kept in zip(shard.values, found["values"], strict=True):
                value.copy_(kept)
            shard.optimizer.state.clear()
            for place, state in zip(shard.own, found["state"], strict=True):
                if state:
                    shard.optimizer.state[place] = state
            for group, values in zip(shard.optimizer.param_groups, found["groups"], strict=True):
                group.update(values)
            if shard.scheduler is not None:
                shard.scheduler.load_state_dict(found["scheduler"])
            shard.recount(found["counts"])
        os.lseek(self.journal, 0, os.SEEK_SET)
        written = os.read(self.journal, ENTRY.size * (EVERY + 1024))
        for start in range(0, len(written) - ENTRY.size + 1, ENTRY.size):
            shard.lose(*ENTRY.unpack_from(written, start))
        self.save(shard)

    def close(self) -> None:
        os.close(self.journal)
