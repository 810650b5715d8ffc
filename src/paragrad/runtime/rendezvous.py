"""Join a world: connect the ranks that paragrad or a launcher started.

This is the rendezvous.

The functions that describe the launch work before the ranks are connected.
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
from paragrad.runtime.stragglers import note_missing_ranks
from paragrad.runtime.world import CPU, DEFAULT_TIMEOUT, World
from paragrad.shm.process_group import SharedMemoryGroup, register_backend

register_backend()  # `hook` needs it too, in a process group that the user makes
RESTART_POLL_SECONDS = 0.02  # how often a rank looks whether rank 0 has started again

# A process can join several worlds one after another; each has a rendezvous of its own.
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
    """Join a world of ranks on this host, and leave it at the end of the context.

    Args:
        rank: This rank.

        size: The number of ranks.

        store: The file in which the ranks meet.

        backend: The torch.distributed backend.

        timeout: Seconds to wait for another rank.

        device: The kind of device, cpu or cuda.

        stop: Is set when the rank must stop.

    Yields:
        The world.

    Raises:
        StepFailed: Ranks did not come in time.
    """
    stop = stop or StopRequest()
    local_device = _select_device(device, rank)
    if size == 1:
        # such as parameter servers, which are each in a world of their own
        yield World(timeout=timeout, device=local_device, stop=stop)
        return
    # one host: listen on loopback only
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _initialize_group(rank, size, dist.FileStore(str(store), size), backend, timeout)
    with _use_default_group(backend, timeout, local_device, stop) as world:
        yield world


@contextmanager
def join_launched_world(
    backend: str = "gloo", timeout: float = DEFAULT_TIMEOUT, device: str = "cpu"
) -> Iterator[World]:
    """Join the world that torchrun, mpirun or srun made, and leave it at the end of the context.

    If a default process group exists already, it is used with its own backend and timeout, and it
    stays open afterwards.

    Args:
        backend: The torch.distributed backend.
        timeout: Seconds to wait for another rank.
        device: The kind of device, cpu or cuda.

    Yields:
        The world.

    Raises:
        Refused: The environment does not describe a launch completely.
        RankFailed: The ranks did not meet in time.
    """
    launch_info = detect_launch()
    local_device = _select_device(device, launch_info.local_rank if launch_info else 0)
    if (world := find_existing_world(local_device)) is not None:
        world.check_collectives()
        try:
            yield world
        finally:
            world.drop_groups()
        return
    if launch_info is None:
        raise Refused("no launcher started this process; start it with torchrun, mpirun or srun")
    if launch_info.size == 1:
        yield World(device=local_device)
        return
    if launch_info.is_on_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    number = next(_rendezvous_count)
    endpoint = find_rendezvous_address(launch_info) or find_rendezvous_file(launch_info, number)
    try:
        _connect_launched_ranks(launch_info, number, endpoint, backend, timeout)
        with _use_default_group(backend, timeout, local_device, StopRequest()) as world:
            yield world
    finally:
        # DDP and its hook reference each other, and with them the group and its store
        gc.collect()
        if isinstance(endpoint, Path):
            # On every rank: stores that are destroyed at the same time can leave the file behind
            # or create it again.
            endpoint.unlink(missing_ok=True)


def find_existing_world(device: torch.device | None = None) -> World | None:
    """Wrap the existing default process group, with its own time limit.

    Args:
        device: The device of this rank; None takes the current GPU with NCCL, otherwise the CPU.

    Returns:
        The world; None where no group exists.
    """
    if not dist.is_initialized():
        return None
    backends = str(dist.get_backend_config())  # such as cpu:gloo,cuda:nccl
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backends else CPU
    backend = (
        "nccl"
        if "nccl" in backends and device.type == "cuda"
        else "shm"
        if "shm" in backends
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
    """Read the time limit of the default group in seconds; torch has no public function for it."""
    group: Any = dist.group.WORLD
    if isinstance(group, SharedMemoryGroup):
        return group.seconds
    result: float = group._get_backend(device).options._timeout.total_seconds()
    return result


def _select_device(kind: str, local_rank: int) -> torch.device:
    """Select a rank's device and make it the current one. Ranks take the host's GPUs in turn."""
    if kind != "cuda":
        return CPU
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def get_launched_size() -> int | None:
    """Return the world's size if this process was launched as a rank.

    A process group of the user's also counts as a launch.

    Returns:
        The number of ranks; None where the process was not launched.
    """
    if _has_process_group():
        return dist.get_world_size()
    launch_info = detect_launch()
    return launch_info.size if launch_info else None


def count_local_ranks() -> int | None:
    """Count the launched ranks that share this host's cores.

    Returns:
        The number of ranks on this host; None where the process was not launched.
    """
    launch_info = detect_launch()
    if _has_process_group() and (launch_info is None or launch_info.size != dist.get_world_size()):
        # the hosts of the ranks are unknown: assume that all are here
        return dist.get_world_size()
    return launch_info.local_size if launch_info else None


def get_launched_rank() -> int:
    """Return this process's rank; 0 where it was not launched."""
    if _has_process_group():
        return dist.get_rank()
    launch_info = detect_launch()
    return launch_info.rank if launch_info else 0


def check_network_interfaces() -> None:
    """Check the network interfaces that gloo will use.

    Without this check gloo would report the same faults later, once on every rank.

    Raises:
        Refused: GLOO_SOCKET_IFNAME names an interface that this host lacks, or the loopback is down
            and local ranks need it.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    requested = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    # eth0:1 is a second address of eth0
    if unknown := [name for name in requested if name.partition(":")[0] not in interfaces]:
        raise Refused(
            f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, and this host has "
            f"{', '.join(interfaces)}; set it to the one by which the other hosts reach this one "
            "(`ip address` shows their addresses), or unset it where all ranks are on this host"
        )
    if not requested and get_launched_size() is None:
        # connecting a datagram socket sends nothing
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("127.0.0.1", 9))
            except OSError as error:
                raise Refused(
                    "the ranks of this host talk over its loopback, which is down "
                    f"({error.strerror}); bring it up (ip link set lo up), or exchange over shared "
                    "memory (--backend shm)"
                ) from None


def _has_process_group() -> bool:
    """Tell whether the user made a process group; one of a single process does not count."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _connect_launched_ranks(
    launch_info: LaunchInfo,
    number: int,
    endpoint: tuple[str, int] | Path,
    backend: str,
    timeout: float,
) -> None:
    """Create the default group of the launch, over rank 0's TCP store or a file of this host."""
    where = str(endpoint) if isinstance(endpoint, Path) else ":".join(map(str, endpoint))
    repair = (
        "; torchrun says which of them it started, and why one ended"
        if launch_info.launcher == TORCHRUN
        else ", or set MASTER_ADDR to an address of rank 0's host that all can reach, and "
        "MASTER_PORT to a free port there"
    )
    interface_hint = (
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
            tcp_store = _open_tcp_store(*endpoint, launch_info.rank, launch_info.size, timeout)
            launch_store = dist.PrefixStore(f"paragrad/{read_launch_name()}/{number}", tcp_store)
            store = make_restart_store(launch_store, launch_info.rank, launch_info.size, timeout)
        _initialize_group(launch_info.rank, launch_info.size, store, backend, timeout)
    except RuntimeError as error:
        raise RankFailed(
            f"the {launch_info.size} ranks of {launch_info.launcher} did not meet at {where} "
            f"(limit {timeout:g} s): {error}; make sure that all of them run{repair}"
            f"{interface_hint}",
            rank=launch_info.rank,
        ) from error


def make_restart_store(store: Any, rank: int, size: int, timeout: float) -> Any:
    """Make a store with keys that belong to this start of the ranks alone. Collective.

    torchrun can restart the ranks beside a store that stays. An earlier start may have left its
    keys there, with addresses of processes that are gone.

    Rank 0 names the start by a random number, and every other rank answers with one of its own. A
    rank that read the name of an earlier start does not find its answer among the received ones,
    and reads again. The restart count of torchrun does not serve: each host counts only its own
    failures.

    Args:
        store: The store of the launch.
        rank: This rank.
        size: The number of ranks.
        timeout: Seconds to wait for the other ranks.

    Returns:
        The store, with a prefix of this start.

    Raises:
        RuntimeError: Ranks did not answer in time.
    """
    own_name = secrets.token_hex(8)
    if rank == 0:
        store.set("start", own_name)
        answer_keys = [f"answers/{own_name}/{other}" for other in range(1, size)]
        store.wait(answer_keys, timedelta(seconds=timeout))
        store.set(f"received/{own_name}", b" ".join(store.get(other) for other in answer_keys))
        return dist.PrefixStore(own_name, store)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.check(["start"]):
            start = store.get("start").decode()
            store.set(f"answers/{start}/{rank}", own_name)
            if (
                store.check([f"received/{start}"])
                and own_name in store.get(f"received/{start}").decode().split()
            ):
                return dist.PrefixStore(start, store)
        # a wait in the store would write a log line for each wait that times out
        time.sleep(RESTART_POLL_SECONDS)
    raise RuntimeError("rank 0 did not report its start")


@functools.cache
def _open_tcp_store(host: str, port: int, rank: int, size: int, timeout: float) -> Any:
    """Open the store of rank 0, or of torchrun's agent (torch reads TORCHELASTIC_USE_AGENT_STORE).

    The store stays open while the process lives. Otherwise the next rendezvous could reach the
    previous listener while it closes.
    """
    host = f"[{host}]" if ":" in host else host
    store, _, _ = next(
        dist.rendezvous(f"tcp://{host}:{port}", rank, size, timeout=timedelta(seconds=timeout))
    )
    return store


def _initialize_group(rank: int, size: int, store: Any, backend: str, timeout: float) -> None:
    """Create the default process group.

    Raises:
        StepFailed: Some ranks did not come; the message names them.
    """
    limit = timedelta(seconds=timeout)
    store.set_timeout(limit)
    keys = [f"paragrad: here: {each}" for each in range(size)]
    store.set(keys[rank], "")
    started_at = time.monotonic()
    try:
        dist.init_process_group(backend, timeout=limit, rank=rank, world_size=size, store=store)
    except RuntimeError as error:
        missing: list[str] = []
        if time.monotonic() - started_at >= timeout:  # an earlier error is not about late ranks
            with suppress(RuntimeError):  # the store is gone if rank 0 is
                missing = [str(each) for each in range(size) if not store.check([keys[each]])]
        if not missing:
            raise
        raise StepFailed(
            f"rank(s) {', '.join(missing)} did not come to where the {size} ranks meet within "
            f"{timeout:g} s ({error})"
        ) from error


@contextmanager
def _use_default_group(
    backend: str, timeout: float, device: torch.device, stop: StopRequest
) -> Iterator[World]:
    """Yield the world of the default group; check the group first and destroy it at the end."""
    world = World(
        dist.get_rank(), dist.get_world_size(), backend, timeout, device, dist.group.WORLD, stop
    )
    try:
        world.check_collectives()
        yield world
        world.barrier()  # to a peer, a rank that leaves early looks like a closed connection
    except Exception as error:
        note_missing_ranks(world, error)
        raise
    finally:
        dist.destroy_process_group()
        world.drop_groups()
