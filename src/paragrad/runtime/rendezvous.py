"""Joining a world: meeting the ranks that were started here, or by a launcher; and what is
known of them before.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paragrad.errors import RankFailed, Refused, StepFailed
from paragrad.runtime.launcher_env import (
    TORCHRUN,
    LaunchInfo,
    detect_launch,
    find_rendezvous_address,
    find_rendezvous_file,
    read_launch_name,
)
from paragrad.runtime.stop_signals import StopRequest
from paragrad.runtime.stragglers import describe_missing_ranks
from paragrad.runtime.world import CPU, DEFAULT_TIMEOUT, World
from paragrad.shm.process_group import SharedMemoryGroup, register_backend

register_backend()  # also for `hook`, in a process group that its user makes
RESTART_POLL_SECONDS = 0.02  # seconds after which a rank looks whether rank 0 has started anew

# a process may join one world after another; each meets anew
_rendezvous_count = itertools.count()


@contextmanager
def join_world(
    rank: int,
    size: int,
    store: Path,
    backend: str = "gloo",
    timeout: float = DEFAULT_TIMEOUT,
    device: str = "cpu",
    stop: StopRequest | None = None,
) -> Iterator[World]:
    """Join a world of ranks on this host that meet in the file `store`; leave it at the end.
    stop: set when asked to stop.
    """
    stop = stop or StopRequest()
    here = _select_device(device, rank)
    if size == 1:
        # of servers, which are in worlds of their own
        yield World(timeout=timeout, device=here, stop=stop)
        return
    # one host: listen on loopback only
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _initialize_group(rank, size, dist.FileStore(str(store), size), backend, timeout)
    with _use_default_group(backend, timeout, here, stop) as world:
        yield world


@contextmanager
def join_launched_world(
    backend: str = "gloo", timeout: float = DEFAULT_TIMEOUT, device: str = "cpu"
) -> Iterator[World]:
    """Join the world that torchrun, mpirun or srun made, and leave it at the end.

    A default process group that is there already is that world (its backend and timeout are its
    maker's), and it stays. Raises Refused where the environment does not say enough, RankFailed
    where the ranks do not meet in time.
    """
    told = detect_launch()
    place_here = _select_device(device, told.local_rank if told else 0)
    if (world := find_existing_world(place_here)) is not None:
        world.check_collectives()
        try:
            yield world
        finally:
            world.drop_groups()
        return
    if told is None:
        raise Refused("no launcher started this process; start it with torchrun, mpirun or srun")
    if told.size == 1:
        yield World(device=place_here)
        return
    if told.is_on_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    number = next(_rendezvous_count)
    place = find_rendezvous_address(told) or find_rendezvous_file(told, number)
    try:
        _connect_launched_ranks(told, number, place, backend, timeout)
        with _use_default_group(backend, timeout, place_here, StopRequest()) as world:
            yield world
    finally:
        # DDP and its hook hold one another, and the group with its store
        gc.collect()
        if isinstance(place, Path):
            # by each rank: stores that go at once leave the file, or make it anew
            place.unlink(missing_ok=True)


def find_existing_world(device: torch.device | None = None) -> World | None:
    """The world of the default process group that is there already, with its maker's time
    limit, or None. device: otherwise the current GPU with NCCL.
    """
    if not dist.is_initialized():
        return None
    carriers = str(dist.get_backend_config())  # such as cpu:gloo,cuda:nccl
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in carriers else CPU
    backend = (
        "nccl"
        if "nccl" in carriers and device.type == "cuda"
        else "shm"
        if "shm" in carriers
        else "gloo"
    )
    return World(
        dist.get_rank(),
        dist.get_world_size(),
        backend,
        _read_group_timeout(device),
        device,
        dist.group.WORLD,
    )


def _read_group_timeout(device: torch.device) -> float:
    """Seconds that the default group's maker gave it: torch has no public word for it."""
    group: Any = dist.group.WORLD
    if isinstance(group, SharedMemoryGroup):
        return group.seconds
    result: float = group._get_backend(device).options._timeout.total_seconds()
    return result


def _select_device(kind: str, local_rank: int) -> torch.device:
    """A rank's device, made the current one: the host's GPUs in turn."""
    if kind != "cuda":
        return CPU
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def get_launched_size() -> int | None:
    """The world's size where a launcher (or a process group of the user's) made this process a
    rank, else None.
    """
    if _has_process_group():
        return dist.get_world_size()
    told = detect_launch()
    return told.size if told else None


def count_local_ranks() -> int | None:
    """How many of the launched ranks share this host's cores, else None."""
    told = detect_launch()
    if _has_process_group() and (told is None or told.size != dist.get_world_size()):
        # nobody says where they are; as if all were here
        return dist.get_world_size()
    return told.local_size if told else None


def get_launched_rank() -> int:
    """This process's rank; 0 where it was not launched."""
    if _has_process_group():
        return dist.get_rank()
    told = detect_launch()
    return told.rank if told else 0


def check_network_interfaces() -> None:
    """Refuse a name in GLOO_SOCKET_IFNAME that no interface of this host has, and a loopback
    that is down where ranks of this host use it; gloo would say so on joining, rank by rank.
    """
    here = [name for _, name in socket.if_nameindex()]
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    # eth0:1 is an address of eth0
    if strange := [name for name in named if name.partition(":")[0] not in here]:
        raise Refused(
            f"GLOO_SOCKET_IFNAME names {', '.join(strange)}, and this host has {', '.join(here)}; "
            f"set it to the one "
            "by which the other hosts reach this one (`ip address` shows their addresses), or "
            "unset it where all "
            "ranks are on this host"
        )
    if not named and get_launched_size() is None:
        # connecting sends nothing
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("127.0.0.1", 9))
            except OSError as error:
                raise Refused(
                    f"the ranks of this host talk over its loopback, which is down "
                    f"({error.strerror}); bring it up "
                    "(ip link set lo up), or exchange over shared memory (--backend shm)"
                ) from None


def _has_process_group() -> bool:
    """Is there a process group of the user's? One that holds this process alone makes it no
    rank.
    """
    return dist.is_initialized() and dist.get_world_size() > 1


def _connect_launched_ranks(
    launch_info: LaunchInfo,
    number: int,
    endpoint: tuple[str, int] | Path,
    backend: str,
    timeout: float,
) -> None:
    """Make the default group of the launch: over a store that rank 0 listens at, or a file on
    this host.
    """
    where = str(endpoint) if isinstance(endpoint, Path) else ":".join(map(str, endpoint))
    repair = (
        "; torchrun says which of them it started, and why one ended"
        if launch_info.launcher == TORCHRUN
        else ", or set MASTER_ADDR and MASTER_PORT to the host of rank 0, as all can reach it, and "
        "a free port there"
    )
    by_name = (
        ""
        if launch_info.is_on_one_host
        else (
            ", and GLOO_SOCKET_IFNAME on each host to the interface that the others reach it by "
            f"(here it is {os.environ.get('GLOO_SOCKET_IFNAME') or 'not set'})"
        )
    )
    try:
        if isinstance(endpoint, Path):
            store = dist.FileStore(where, launch_info.size)
        else:
            listening = _open_tcp_store(*endpoint, launch_info.rank, launch_info.size, timeout)
            named = dist.PrefixStore(f"paragrad/{read_launch_name()}/{number}", listening)
            store = make_restart_store(named, launch_info.rank, launch_info.size, timeout)
        _initialize_group(launch_info.rank, launch_info.size, store, backend, timeout)
    except RuntimeError as error:
        raise RankFailed(
            f"the {launch_info.size} ranks of {launch_info.launcher} did not meet at {where} "
            f"(limit {timeout:g} s): "
            f"{error}; see that "
            f"all of them run{repair}{by_name}",
            rank=launch_info.rank,
        ) from error


def make_restart_store(store: Any, rank: int, size: int, timeout: float) -> Any:
    """The store with keys of this start of its ranks alone; an earlier start may have left its
    own there, whose addresses are of processes that are gone: torchrun restarts ranks beside a
    store that stays. Collective. Raises RuntimeError.

    Rank 0 names the start by a random number, the others answer with one of theirs. A rank that
    read the name of an earlier start does not find its answer among those that were received,
    and looks again. (torchrun's count of restarts would not do: each host counts its own, and
    only failures.)
    """
    mine = secrets.token_hex(8)
    if rank == 0:
        store.set("start", mine)
        others = [f"answers/{mine}/{other}" for other in range(1, size)]
        store.wait(others, timedelta(seconds=timeout))
        store.set(f"received/{mine}", b" ".join(store.get(other) for other in others))
        return dist.PrefixStore(mine, store)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if store.check(["start"]):
            start = store.get("start").decode()
            store.set(f"answers/{start}/{rank}", mine)
            if (
                store.check([f"received/{start}"])
                and mine in store.get(f"received/{start}").decode().split()
            ):
                return dist.PrefixStore(start, store)
        # a wait in the store would log every time that it is in vain
        time.sleep(RESTART_POLL_SECONDS)
    raise RuntimeError("rank 0 was not seen to start")


@functools.cache
def _open_tcp_store(host: str, port: int, rank: int, size: int, timeout: float) -> Any:
    """The store at rank 0, or in torchrun's agent where that listens (torch reads
    TORCHELASTIC_USE_AGENT_STORE).

    Kept while the process lives: the next meeting would otherwise reach the last one's listener
    as it closes.
    """
    host = f"[{host}]" if ":" in host else host
    store, _, _ = next(
        dist.rendezvous(f"tcp://{host}:{port}", rank, size, timeout=timedelta(seconds=timeout))
    )
    return store


def _initialize_group(rank: int, size: int, store: Any, backend: str, timeout: float) -> None:
    """Make the default group. Raises StepFailed where ranks have not come, with their
    numbers.
    """
    limit = timedelta(seconds=timeout)
    store.set_timeout(limit)
    here = [f"paragrad: here: {each}" for each in range(size)]
    store.set(here[rank], "")
    began = time.monotonic()
    try:
        dist.init_process_group(backend, timeout=limit, rank=rank, world_size=size, store=store)
    except RuntimeError as error:
        away: list[str] = []
        if time.monotonic() - began >= timeout:  # at once it is no lateness of theirs
            with suppress(RuntimeError):  # the store went with rank 0
                away = [str(each) for each in range(size) if not store.check([here[each]])]
        if not away:
            raise
        raise StepFailed(
            f"rank(s) {', '.join(away)} did not come to where the {size} ranks meet within "
            f"{timeout:g} s "
            f"({error})"
        ) from error


@contextmanager
def _use_default_group(
    backend: str, timeout: float, device: torch.device, stop: StopRequest
) -> Iterator[World]:
    world = World(
        dist.get_rank(), dist.get_world_size(), backend, timeout, device, dist.group.WORLD, stop
    )
    try:
        world.check_collectives()
        yield world
        world.barrier()  # who leaves early appears to a peer as a closed connection
    except Exception as error:
        if said := describe_missing_ranks(world, error):
            error.add_note(f"paragrad: {said}")
        raise
    finally:
        dist.destroy_process_group()
        world.drop_groups()
