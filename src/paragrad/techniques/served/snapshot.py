"""What a server needs to be started again: a snapshot every so many updates, and a journal of the tickets applied since.

    FOLDER/server-N.snapshot    its vectors and the optimizer's state (safetensors, whole or not at all by a rename)
    FOLDER/server-N.journal     (ticket, samples) of every update since, written before it is made

What is in the journal and not in the snapshot is lost to this server, and counted: its tickets are not applied again.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
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

    def before(self, shard: Shard, ticket: int, samples: int) -> None:
        """A ticket is about to be applied."""
        if self.entries == EVERY:
            self.save(shard)
        os.write(self.journal, ENTRY.pack(ticket, samples))
        self.entries += 1

    def save(self, shard: Shard) -> None:
        tensors: dict[str, Tensor] = {f"value/{number}": each for number, each in enumerate(shard.values)}
        scalars: list[list[Any]] = []
        for number, place in enumerate(shard.own):
            for what, value in shard.optimizer.state.get(place, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"state/{number}/{what}"] = value.detach().clone()          # an optimizer may keep one twice
                else:
                    scalars.append([number, what, value])
        told = {"scalars": scalars, "groups": [{name: value for name, value in group.items() if name != "params"}
                                               for group in shard.optimizer.param_groups],
                "scheduler": shard.scheduler.state_dict() if shard.scheduler is not None else None, **shard.counts()}
        partial = self.path.with_suffix(".partial")
        save_file({name: each.contiguous() for name, each in tensors.items()}, partial,
                  {"told": json.dumps(told, default=_plain)})
        partial.rename(self.path)
        os.ftruncate(self.journal, 0)
        os.lseek(self.journal, 0, os.SEEK_SET)
        self.entries = 0

    def restore(self, shard: Shard) -> None:
        """As it was at the last snapshot, if there is one; what was applied since is lost."""
        if self.path.exists():
            with safe_open(self.path, "pt") as found:
                told = json.loads(found.metadata()["told"])
                for number, value in enumerate(shard.values):
                    value.copy_(found.get_tensor(f"value/{number}"))
                shard.optimizer.state.clear()
                for name in found.keys():  # noqa: SIM118         # it is no dict
                    if name.startswith("state/"):
                        _, number, what = name.split("/", 2)
                        shard.optimizer.state[shard.own[int(number)]][what] = found.get_tensor(name)
            for number, what, value in told["scalars"]:
                shard.optimizer.state[shard.own[number]][what] = value
            for group, values in zip(shard.optimizer.param_groups, told["groups"], strict=True):
                group.update({name: value for name, value in values.items() if not isinstance(group[name], tuple)})
            if shard.scheduler is not None:
                shard.scheduler.load_state_dict(told["scheduler"])
            shard.recount(told)
        os.lseek(self.journal, 0, os.SEEK_SET)
        written = os.read(self.journal, ENTRY.size * (EVERY + 1))
        for start in range(0, len(written) - ENTRY.size + 1, ENTRY.size):
            shard.lose(*ENTRY.unpack_from(written, start))
        self.save(shard)

    def close(self) -> None:
        os.close(self.journal)


def _plain(value: Any) -> Any:
    """Of what JSON does not know: numbers in tensors."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else str(value)
