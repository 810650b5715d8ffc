"""Region: memory that processes of one host share.

A memfd has no name: nothing can leak into /dev/shm, no size limit of /dev/shm holds, and the
kernel frees it with the last process that maps it, however that ends. The others open it as
/proc/PID/fd/N, which the kernel allows to the same user only. Its pages are reserved when it is
made: a host without enough memory says so then, and not by a signal in mid-step.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from paragrad.errors import ROOM

# bytes at the start of a region, by which who opens it knows that it is the right one
TOKEN = 16
NONE = "none:"  # begins what stands in the place of an address
LINE = 64  # bytes of a cache line: what two ranks write lies on different ones


class Region:
    """`size` bytes, mapped into this process; `bytes` is all of them as a uint8 tensor (the
    token included).

    private: what this process writes nobody else sees, and takes memory of its own; otherwise
    all share all.
    """

    def __init__(self, descriptor: int, size: int, private: bool = False) -> None:
        self.size = size
        self.map = mmap.mmap(
            descriptor, size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        )
        self.bytes: Tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def storage(self, begin: int, size: int) -> UntypedStorage:
        """Some of its bytes, as a storage of tensors, which keeps the region."""
        if not size:
            return UntypedStorage(0)
        return torch.frombuffer(
            self.map, dtype=torch.uint8, count=size, offset=begin
        ).untyped_storage()


class OwnRegion(Region):
    """A region that this process made; `address` tells others where it is, until it is
    `opened_by_all`.

    reserved: so many of its bytes; all, unless said otherwise;  repair: what to do where there
    is no room.
    """

    def __init__(
        self, size: int, reserved: int | None = None, repair: str = "start fewer ranks, or use gloo"
    ) -> None:
        reason = unavailable()
        if reason:
            raise RuntimeError(reason)
        self.descriptor = os.memfd_create("paragrad", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size)
            self.reserve(0, size if reserved is None else reserved)
            super().__init__(self.descriptor, size)
        except OSError as error:
            os.close(self.descriptor)
            repair = ROOM[errno.EFBIG] if error.errno == errno.EFBIG else repair
            told = (
                f"no {size / 2**20:.0f} MiB of shared memory on this host ({error.strerror}); "
                f"{repair}"
            )
            raise RuntimeError(told) from error
        token = secrets.token_bytes(TOKEN)
        self.map[:TOKEN] = token
        self.address = f"{host_name()} {os.getpid()} {self.descriptor} {size} {token.hex()}"

    def reserve(self, start: int, count: int) -> None:
        """Pages for some bytes, before anybody writes to them. Raises OSError."""
        if count:
            os.posix_fallocate(self.descriptor, start, count)

    def opened_by_all(self) -> None:
        """Everybody has opened it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def no_address(error: RuntimeError) -> str:
    """What stands in the place of an address where there is no region: the others raise the
    reason when they open it.
    """
    return f"{NONE} {error}"


def opened(address: str, private: bool = False) -> Region:
    """The region that another process of this host made. private: as in Region. Raises
    RuntimeError where it cannot be reached from here.
    """
    if address.startswith(NONE):
        raise RuntimeError(
            f"rank 0 could not make shared memory: {address.removeprefix(NONE).strip()}"
        )
    host, pid, descriptor, size, token = address.split()
    try:
        if host != host_name():
            raise OSError("its maker is on another host")
        own = os.open(f"/proc/{int(pid)}/fd/{int(descriptor)}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(own).st_size != int(size) or int(size) < TOKEN:
                raise OSError("another file is there")
            region = Region(own, int(size), private)
        finally:
            os.close(own)
        if region.map[:TOKEN].hex() != token:
            raise OSError("another file is there")
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"the shared memory of process {pid} cannot be opened from here ({error}); the backend "
            f"shm joins "
            "ranks of one host, one user and one container: use gloo elsewhere"
        ) from error
    return region


def unavailable() -> str | None:
    """Why there are no regions on this host, or None."""
    reason = lacking()
    return reason and f"the backend shm: {reason}; use gloo on this host"


def lacking() -> str | None:
    """What this host has not, without which processes cannot share memory so."""
    missing = [
        name for name in ("memfd_create", "posix_fallocate", "pidfd_open") if not hasattr(os, name)
    ]
    if sys.platform != "linux" or missing:
        return f"shared memory wants Linux with {', '.join(missing) or 'memfd_create'}"
    if not os.path.isdir("/proc/self/fd"):
        return "shared memory wants /proc, by which processes open each other's, and here is none"
    return None


def aligned(size: int) -> int:
    """The next multiple of a cache line."""
    return -(-size // LINE) * LINE


def begins(first: int, sizes: Sequence[int]) -> list[int]:
    """Where things of some sizes begin, one after another from a place on, and where the last
    one ends.
    """
    return list(
        itertools.accumulate(
            sizes, lambda begin, size: aligned(begin + size), initial=aligned(first)
        )
    )


def host_name() -> str:
    """One name per boot of a host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
