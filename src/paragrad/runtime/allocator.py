"""Memory of this process that was freed: kept for the next step, or given back to the
system.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

# of mallopt (glibc, malloc.h)
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# bytes: from which on a block goes back when it is freed (as many as glibc takes), and
MMAP_THRESHOLD_BYTES = 2**25
TRIM_THRESHOLD_BYTES = 2**28
# of the heap's end, how many may stay


def keep_freed_memory() -> None:
    """From here on what is freed stays here, within these bounds. Left to itself glibc gives
    the end of the heap back at once and asks for it again in the next step: the system fills
    every page with zeros first (10,000 pages, 40 ms of a step of 250 that convolves images, and
    of two like processes now one and now the other). Not where the user tells glibc
    otherwise.
    """
    told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if not told and (option := _find_libc_function("mallopt")):
        option(MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        option(TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def return_freed_memory(now: bool = True) -> None:
    """What was freed goes back to the system."""
    if now and (trim := _find_libc_function("malloc_trim")):
        trim(0)


def _find_libc_function(name: str) -> Any:
    """None where the C library has no such function."""
    return getattr(ctypes.CDLL(None), name, None)
