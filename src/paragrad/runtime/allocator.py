"""Freed memory of this process: kept for the next step, or returned to the system."""

from __future__ import annotations

import ctypes
import os
from typing import Any

# parameters of mallopt (glibc, malloc.h)
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# a freed block of at least this size goes back at once (the largest value that glibc takes)
MMAP_THRESHOLD_BYTES = 2**25
# this many free bytes can stay at the end of the heap
TRIM_THRESHOLD_BYTES = 2**28


def keep_freed_memory() -> None:
    """Keep freed memory in this process, up to the two thresholds.

    By default glibc returns the end of the heap to the system at once, and requests it again in the
    next step. The system then fills every page with zeros first. For a step of 250 ms that
    convolves images, this cost 40 ms (10,000 pages), and it hit only some of equal processes.

    The function does nothing if the user sets glibc's own variables.
    """
    has_user_settings = any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    )
    if not has_user_settings and (mallopt := _find_libc_function("mallopt")):
        mallopt(MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def return_freed_memory() -> None:
    """Return freed memory to the system."""
    if malloc_trim := _find_libc_function("malloc_trim"):
        malloc_trim(0)


def _find_libc_function(name: str) -> Any:
    """Find a function of the C library; None where it has no such function."""
    return getattr(ctypes.CDLL(None), name, None)
