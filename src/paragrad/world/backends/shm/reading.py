"""Reading: one copy, straight from the memory of another process into that of this one.

process_vm_readv(2) of Linux copies without the other's doing, who only has to say where and to leave it as it is meanwhile. The
kernel allows it to whom it would allow to trace the other: of the same user, unless Yama (`ptrace_scope`), the filter of a
container or a security module is against it. No rule says so beforehand on every host, so ranks try it, once, when they meet.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

MOST = 2**26            # bytes of one call, which nothing interrupts
BYTE = torch.empty(1, dtype=torch.uint8)

_reads = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)       # gives up the interpreter lock


class _Stretch(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


if _reads is not None:
    _reads.restype = ctypes.c_ssize_t
    _reads.argtypes = [ctypes.c_int, ctypes.POINTER(_Stretch), ctypes.c_ulong, ctypes.POINTER(_Stretch), ctypes.c_ulong,
                       ctypes.c_ulong]


def read(process: int, address: int, into: Tensor) -> None:
    """What lies from `address` on in the memory of a process, as much as `into` (uint8, contiguous) holds. Raises OSError."""
    if _reads is None:
        raise OSError("no process_vm_readv")
    own, left = into.data_ptr(), into.numel()
    while left:
        here, there = _Stretch(own, min(left, MOST)), _Stretch(address, min(left, MOST))
        count = _reads(process, here, 1, there, 1, 0)
        if count <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        own, address, left = own + count, address + count, left - count


def able(process: int, address: int, wanted: bytes) -> bool:
    """May this process read the memory of another? wanted: what lies at the address there."""
    found = torch.empty(len(wanted), dtype=torch.uint8)
    try:
        read(process, address, found)
    except OSError:
        return False
    return bytes(found.tolist()) == wanted


def readable(address: int) -> bool:
    """Can others read what this process has there? Not what belongs to a device, such as pages that a GPU has pinned."""
    try:
        read(os.getpid(), address, BYTE)
    except OSError:
        return False
    return True
