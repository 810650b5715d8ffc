"""A launcher's folder below the temporary one: locked while anybody of it lives, cleared by the
next start where all were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import re
import shutil
import socket
import stat
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

FOLDER_PATTERN = re.compile(r"paragrad-\w{8}")
# it says on which host: a lock may be unknown on another that shares the folder
LOCK_FILE = ".paragrad-launcher"
# a socket's path has at most 107 bytes on Linux, 103 elsewhere; below a rank's folder loaders
# listen at "/listener-XXXXXXXX"
MAX_PATH_BYTES = (
    103 - len("/listener-XXXXXXXX") - len("/ranks-XXXXXXXX") - len("/paragrad-XXXXXXXX")
)
SHORT_PARENTS = ("/tmp", "/var/tmp", "/dev/shm")


def create_locked_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock: whoever inherits it keeps the
    folder. Clears what nobody keeps.
    """
    parent = choose_short_folder(Path(tempfile.gettempdir()))
    remove_stale_folders(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix="paragrad-", dir=parent))
        # another start cleared it before it was locked
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            held = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
            # a file system without locks: then nobody clears it
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX)
            os.write(held, _read_host_id())
            if _is_same_file(folder / LOCK_FILE, held):
                return folder, held
            os.close(held)


def use_clearable_tempdir() -> None:
    """Have what multiprocessing keeps in a temporary folder (the sockets of loaders) where the
    next start clears it: Python's own folder (pymp-...) is left behind by a kill. A rank of the
    launcher has one already.
    """
    own: Any = multiprocessing.current_process()
    if own._config.get("tempdir") is None:
        folder, held = create_locked_folder()
        own._config["tempdir"] = str(folder)
        # as Python does: after the children have ended
        Finalize(None, _remove_locked_folder, (folder, held), exitpriority=-100)


def _remove_locked_folder(folder: Path, lock: int) -> None:
    os.close(lock)
    shutil.rmtree(folder, ignore_errors=True)
    # loaders of a killed rank may have lived when this process started
    remove_stale_folders(folder.parent)


def choose_short_folder(folder: Path) -> Path:
    """The folder, or another in which the path of a socket is not too long."""
    if len(os.fsencode(folder)) <= MAX_PATH_BYTES:
        return folder
    return next(
        (Path(short) for short in SHORT_PARENTS if os.access(short, os.W_OK | os.X_OK)), folder
    )


def remove_stale_folders(parent: Path) -> None:
    """Remove this user's folders whose lock nobody holds. Not by process ids: containers that
    share the parent have their own.
    """
    for folder in filter(
        lambda path: FOLDER_PATTERN.fullmatch(path.name), parent.glob("paragrad-*")
    ):
        with contextlib.suppress(OSError):  # another user's, locked, or gone
            status = folder.lstat()
            if (
                not stat.S_ISDIR(status.st_mode)
                or status.st_uid != os.getuid()
                or status.st_mode & 0o077
            ):
                continue
            held = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(held, 100) == _read_host_id():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def _read_host_id() -> bytes:
    """One name for this host: its name, and where the system says it, that of its boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return socket.gethostname().encode()[:100]


def _is_same_file(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
