"""Find the namespaces of a cluster and the processes in them, to see what is left of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hosts import Cluster


def spaces(holders: Iterable[int]) -> set[str]:
    """Return the network and process namespaces of hosts, from the processes that hold them."""
    return {
        os.readlink(f"/proc/{holder}/ns/{kind}")
        for holder in holders
        for kind in ("net", "pid_for_children")
    }


def spaces_of(cluster: Cluster) -> set[str]:
    return spaces(host.holder for host in cluster.hosts)


def living_in(these: set[str]) -> list[int]:
    """Return the processes that are in one of these namespaces."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if these & {os.readlink(process / "ns" / kind) for kind in ("net", "pid")}:
                found.append(int(process.name))
        except OSError:  # the process has ended since
            pass
    return found
