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

from paragrad.errors import SPACE_REPAIRS

# bytes at the start of a region, by which who opens it knows that it is the right one
TOKEN_BYTES = 16
NO_ADDRESS_PREFIX = "none:"  # begins what stands in the place of an address
CACHE_LINE_BYTES = 64  # bytes of a cache line: what two ranks write lies on different ones


class SharedRegion:
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

    def make_storage(self, begin: int, size: int) -> UntypedStorage:
        """Some of its bytes, as a storage of tensors, which keeps the region."""
        if not size:
            return UntypedStorage(0)
        return torch.frombuffer(
            self.map, dtype=torch.uint8, count=size, offset=begin
        ).untyped_storage()


class CreatedRegion(SharedRegion):
    """A region that this process made; `address` tells others where it is, until it is
    `opened_by_all`.

    reserved: so many of its bytes; all, unless said otherwise;  repair: what to do where there
    is no room.
    """

    def __init__(
        self, size: int, reserved: int | None = None, repair: str = "start fewer ranks, or use gloo"
    ) -> None:
        reason = explain_unavailable_shm()
        if reason:
            raise RuntimeError(reason)
        self.descriptor = os.memfd_create("paragrad", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size)
            self.reserve_pages(0, size if reserved is None else reserved)
            super().__init__(self.descriptor, size)
        except OSError as error:
            os.close(self.descriptor)
            repair = SPACE_REPAIRS[errno.EFBIG] if error.errno == errno.EFBIG else repair
            told = (
                f"no {size / 2**20:.0f} MiB of shared memory on this host ({error.strerror}); "
                f"{repair}"
            )
            raise RuntimeError(told) from error
        token = secrets.token_bytes(TOKEN_BYTES)
        self.map[:TOKEN_BYTES] = token
        self.address = f"{read_boot_id()} {os.getpid()} {self.descriptor} {size} {token.hex()}"

    def reserve_pages(self, start: int, count: int) -> None:
        """Pages for some bytes, before anybody writes to them. Raises OSError."""
        if count:
            os.posix_fallocate(self.descriptor, start, count)

    def close_descriptor(self) -> None:
        """Everybody has opened it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def format_no_address(error: RuntimeError) -> str:
    """What stands in the place of an address where there is no region: the others raise the
    reason when they open it.
    """
    return f"{NO_ADDRESS_PREFIX} {error}"


def open_region(address: str, private: bool = False) -> SharedRegion:
    """The region that another process of this host made. private: as in Region. Raises
    RuntimeError where it cannot be reached from here.
    """
    if address.startswith(NO_ADDRESS_PREFIX):
        raise RuntimeError(
            f"rank 0 could not make shared memory: "
            f"{address.removeprefix(NO_ADDRESS_PREFIX).strip()}"
        )
    host, pid, descriptor, size, token = address.split()
    try:
        if host != read_boot_id():
            raise OSError("its maker is on another host")
        own = os.open(f"/proc/{int(pid)}/fd/{int(descriptor)}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(own).st_size != int(size) or int(size) < TOKEN_BYTES:
                raise OSError("another file is there")
            region = SharedRegion(own, int(size), private)
        finally:
            os.close(own)
        if region.map[:TOKEN_BYTES].hex() != token:
            raise OSError("another file is there")
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"the shared memory of process {pid} cannot be opened from here ({error}); the backend "
            f"shm joins "
            "ranks of one host, one user and one container: use gloo elsewhere"
        ) from error
    return region


def explain_unavailable_shm() -> str | None:
    """Why there are no regions on this host, or None."""
    reason = find_missing_features()
    return reason and f"the backend shm: {reason}; use gloo on this host"


def find_missing_features() -> str | None:
    """What this host has not, without which processes cannot share memory so."""
    missing = [
        name for name in ("memfd_create", "posix_fallocate", "pidfd_open") if not hasattr(os, name)
    ]
    if sys.platform != "linux" or missing:
        return f"shared memory wants Linux with {', '.join(missing) or 'memfd_create'}"
    if not os.path.isdir("/proc/self/fd"):
        return "shared memory wants /proc, by which processes open each other's, and here is none"
    return None


def align_to_cache_line(size: int) -> int:
    """The next multiple of a cache line."""
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def compute_offsets(first: int, sizes: Sequence[int]) -> list[int]:
    """Where things of some sizes begin, one after another from a place on, and where the last
    one ends.
    """
    return list(
        itertools.accumulate(
            sizes,
            lambda begin, size: align_to_cache_line(begin + size),
            initial=align_to_cache_line(first),
        )
    )


def read_boot_id() -> str:
    """One name per boot of a host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
