"""Shared regions: memory that processes of one host map together.

A region is a memfd, which has no name. Nothing can leak into /dev/shm, and its size limit does not
apply. The kernel frees the memory with the last process that maps it, however that process ends.
Other processes open it as /proc/PID/fd/N, which the kernel allows only to the same user.

The pages are reserved when the region is made. A host without enough memory therefore fails there,
and not by a signal in the middle of a step.
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

# A region starts with a random token, by which another process recognizes it.
TOKEN_BYTES = 16
NO_ADDRESS_PREFIX = "none:"  # starts the text in the place of an address
CACHE_LINE_BYTES = 64  # two ranks never write to the same cache line


class SharedRegion:
    """A region that is mapped into this process.

    Attributes:
        size: The number of bytes.
        map: The mapping.
        bytes: All bytes as a uint8 tensor, with the token at the start.
        start: The address of the first byte.
    """

    def __init__(self, descriptor: int, size: int, private: bool = False) -> None:
        """Map a region.

        Args:
            descriptor: A descriptor of the memfd.
            size: The number of bytes.
            private: Hide this process's writes from other processes; they take memory of their own.
                Otherwise all processes see all writes.
        """
        self.size = size
        self.map = mmap.mmap(
            descriptor, size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        )
        self.bytes: Tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def make_storage(self, begin: int, size: int) -> UntypedStorage:
        """Make a tensor storage of some bytes. It keeps the region alive.

        Args:
            begin: The offset of the first byte.
            size: The number of bytes.

        Returns:
            The storage.
        """
        if not size:
            return UntypedStorage(0)
        return torch.frombuffer(
            self.map, dtype=torch.uint8, count=size, offset=begin
        ).untyped_storage()


class CreatedRegion(SharedRegion):
    """A region that this process made.

    Attributes:
        descriptor: The descriptor of the memfd; -1 once it is closed.
        address: Tells other processes where the region is, until the descriptor is closed.
    """

    def __init__(
        self, size: int, reserved: int | None = None, repair: str = "start fewer ranks, or use gloo"
    ) -> None:
        """Make a region and reserve its pages.

        Args:
            size: The number of bytes.
            reserved: The number of bytes to reserve; None reserves all.
            repair: The advice in the message if the memory is too small.

        Raises:
            RuntimeError: The host lacks the memory or the system calls.
        """
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
            message = (
                f"no {size / 2**20:.0f} MiB of shared memory on this host ({error.strerror}); "
                f"{repair}"
            )
            raise RuntimeError(message) from error
        token = secrets.token_bytes(TOKEN_BYTES)
        self.map[:TOKEN_BYTES] = token
        self.address = f"{read_boot_id()} {os.getpid()} {self.descriptor} {size} {token.hex()}"

    def reserve_pages(self, start: int, count: int) -> None:
        """Reserve the pages of some bytes before a process writes to them.

        Args:
            start: The offset of the first byte.
            count: The number of bytes.

        Raises:
            OSError: The host has not enough memory.
        """
        if count:
            os.posix_fallocate(self.descriptor, start, count)

    def close_descriptor(self) -> None:
        """Close the descriptor, once all processes have opened the region."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def format_no_address(error: RuntimeError) -> str:
    """Format the text that stands in the place of an address if there is no region.

    Other ranks raise the reason when they open it.

    Args:
        error: The reason.
    """
    return f"{NO_ADDRESS_PREFIX} {error}"


def open_region(address: str, private: bool = False) -> SharedRegion:
    """Open a region that another process of this host made.

    Args:
        address: The address of the region.
        private: Hide this process's writes, as in `SharedRegion`.

    Returns:
        The region.

    Raises:
        RuntimeError: The region cannot be reached from here.
    """
    if address.startswith(NO_ADDRESS_PREFIX):
        raise RuntimeError(
            "rank 0 could not make shared memory: "
            f"{address.removeprefix(NO_ADDRESS_PREFIX).strip()}"
        )
    host, pid, descriptor, size, token = address.split()
    try:
        if host != read_boot_id():
            raise OSError("that process is on another host")
        own_descriptor = os.open(f"/proc/{int(pid)}/fd/{int(descriptor)}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(own_descriptor).st_size != int(size) or int(size) < TOKEN_BYTES:
                raise OSError("another file is there")
            region = SharedRegion(own_descriptor, int(size), private)
        finally:
            os.close(own_descriptor)
        if region.map[:TOKEN_BYTES].hex() != token:
            raise OSError("another file is there")
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"the shared memory of process {pid} cannot be opened from here ({error}); the backend "
            "shm joins ranks of one host, one user and one container: use gloo elsewhere"
        ) from error
    return region


def explain_unavailable_shm() -> str | None:
    """Explain why the backend shm does not work on this host; None if it works."""
    reason = find_missing_features()
    return reason and f"the backend shm: {reason}; use gloo on this host"


def find_missing_features() -> str | None:
    """Describe what this host lacks for shared regions; None if it lacks nothing."""
    missing = [
        name for name in ("memfd_create", "posix_fallocate", "pidfd_open") if not hasattr(os, name)
    ]
    if sys.platform != "linux" or missing:
        return f"shared memory needs Linux with {', '.join(missing) or 'memfd_create'}"
    if not os.path.isdir("/proc/self/fd"):
        return "shared memory needs /proc to open another process's memory, and there is no /proc"
    return None


def align_to_cache_line(size: int) -> int:
    """Round a size up to a multiple of a cache line.

    Args:
        size: A number of bytes.
    """
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def compute_offsets(first: int, sizes: Sequence[int]) -> list[int]:
    """Compute the offsets of consecutive sections, each aligned to a cache line.

    Args:
        first: The offset before the first section.
        sizes: The sizes of the sections in bytes.

    Returns:
        The offset of each section, and the end of the last one.
    """
    return list(
        itertools.accumulate(
            sizes,
            lambda begin, size: align_to_cache_line(begin + size),
            initial=align_to_cache_line(first),
        )
    )


def read_boot_id() -> str:
    """Read an identifier of this host and its current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
