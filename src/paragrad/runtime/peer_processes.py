"""The processes of other ranks on this host: notice at once that one of them has ended.

A pidfd of Linux becomes readable when its process ends, so a wait for messages can wait for it too.
Processes of other hosts, and all processes on other systems, are not watched.

A launcher such as torchrun sends SIGTERM to all ranks as soon as one has ended. A rank then reports
which one ended, in place of being killed without a message.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paragrad.errors import StepFailed

BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
REPORT_SECONDS = 5.0  # time to print the error of this rank
NAMESPACE_FILE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class ProcessAddress:
    """A process and where its number is valid.

    Attributes:
        place: A name of the host, and of the container in it.
        number: The number of the process there.
    """

    place: str
    number: int

    @classmethod
    def read_own(cls) -> ProcessAddress:
        """Return the address of this process."""
        place = socket.gethostname()
        with suppress(OSError):
            place = f"{BOOT_FILE.read_text().strip()} {NAMESPACE_FILE.stat().st_ino}"
        return cls(place, os.getpid())


class PeerProcesses:
    """The processes of other ranks that are on this host.

    Args:
        processes: The processes, by the names of their ranks for messages.

    Attributes:
        names: The names of the watched ranks, by descriptor.
        ended: The names of processes that had ended before they could be watched.
    """

    def __init__(self, processes: Mapping[str, ProcessAddress]) -> None:
        own = ProcessAddress.read_own()
        self.names: dict[int, str] = {}
        self.ended: list[str] = []
        self._previous_handler: Any = None
        self._failed_at: float | None = None
        self._pid = os.getpid()
        if not hasattr(os, "pidfd_open"):
            return
        for name, process in processes.items():
            if process.place == own.place and process != own:
                try:
                    self.names[os.pidfd_open(process.number)] = name
                except ProcessLookupError:
                    self.ended.append(name)
                except OSError:  # forbidden in some containers, or too many open files
                    continue
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self.names and is_main_thread and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            self._previous_handler = signal.signal(signal.SIGTERM, self._handle_termination)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a process ends."""
        return list(self.names)

    def refuse_ended(self) -> None:
        """Raise an error if a process has ended.

        Raises:
            StepFailed: With the names of the ranks that ended.
        """
        ended = list(self.ended)
        if self.names:
            poller = select.poll()  # select takes no descriptors above 1023
            for each in self.descriptors:
                poller.register(each, select.POLLIN)
            ended += [self.names[each] for each, _ in poller.poll(0)]
        if ended:
            self._failed_at = time.monotonic()
            raise StepFailed(f"{', '.join(ended)} ended before the training did")

    def _handle_termination(self, kind: int, frame: FrameType | None) -> None:
        """Raise an error that names the process that ended, or do what the signal did before."""
        if os.getpid() != self._pid:  # a process that the rank forked has its handlers
            signal.signal(kind, signal.SIG_DFL)
            os.kill(os.getpid(), kind)
        elif self._failed_at is None:
            self.refuse_ended()
        elif time.monotonic() - self._failed_at < REPORT_SECONDS:
            return  # this rank is about to print its error, and ends by itself
        if callable(self._previous_handler):
            self._previous_handler(kind, frame)
        else:
            signal.signal(kind, signal.SIG_DFL)
            os.kill(os.getpid(), kind)

    def close(self) -> None:
        """Watch no process any more."""
        if self._previous_handler is not None and self._failed_at is None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None
        for each in self.descriptors:
            os.close(each)
        self.names = {}
