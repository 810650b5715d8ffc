"""The launcher's temporary folder: locked while in use, removed by the next start after a kill."""

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
# The file names the host: another host that shares the folder may not see the lock.
LOCK_FILE = ".paragrad-launcher"
# The path of a socket has at most 107 bytes on Linux and 103 elsewhere. Data loaders listen at
# "/listener-XXXXXXXX" below a rank's folder.
MAX_PATH_BYTES = (
    103 - len("/listener-XXXXXXXX") - len("/ranks-XXXXXXXX") - len("/paragrad-XXXXXXXX")
)
SHORT_PARENTS = ("/tmp", "/var/tmp", "/dev/shm")


def create_locked_folder() -> tuple[Path, int]:
    """Create a temporary folder and lock it, after a removal of stale folders.

    The folder stays in use as long as a process holds the lock's descriptor; child processes can
    inherit it.

    Returns:
        The folder, and the descriptor that holds its lock.
    """
    parent = choose_short_folder(Path(tempfile.gettempdir()))
    remove_stale_folders(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix="paragrad-", dir=parent))
        # the loop goes on if another start removed the folder before it was locked
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
            # on a file system without locks the folder is never removed by other starts
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, _read_host_id())
            if _is_same_file(folder / LOCK_FILE, lock):
                return folder, lock
            os.close(lock)


def use_clearable_tempdir() -> None:
    """Give multiprocessing a temporary folder that the next start removes after a kill.

    The sockets of data loaders are in this folder. A kill would leave Python's own folder
    (pymp-...) behind. A rank of the launcher has such a folder already.
    """
    process: Any = multiprocessing.current_process()
    if process._config.get("tempdir") is None:
        folder, lock = create_locked_folder()
        process._config["tempdir"] = str(folder)
        # with Python's own priority: after the children have ended
        Finalize(None, _remove_locked_folder, (folder, lock), exitpriority=-100)


def _remove_locked_folder(folder: Path, lock: int) -> None:
    """Release the lock and remove the folder."""
    os.close(lock)
    shutil.rmtree(folder, ignore_errors=True)
    # loaders of a killed rank may still have run when this process started
    remove_stale_folders(folder.parent)


def choose_short_folder(folder: Path) -> Path:
    """Choose a folder in which the path of a socket is not too long.

    Args:
        folder: The preferred folder.

    Returns:
        That folder, or another one if its path is too long.
    """
    if len(os.fsencode(folder)) <= MAX_PATH_BYTES:
        return folder
    return next(
        (Path(short) for short in SHORT_PARENTS if os.access(short, os.W_OK | os.X_OK)), folder
    )


def remove_stale_folders(parent: Path) -> None:
    """Remove this user's launcher folders that no process has locked.

    Process ids would not tell: containers that share the parent folder have ids of their own.

    Args:
        parent: The folder that contains them.
    """
    for folder in filter(
        lambda path: FOLDER_PATTERN.fullmatch(path.name), parent.glob("paragrad-*")
    ):
        with contextlib.suppress(OSError):  # of another user, locked, or gone
            status = folder.lstat()
            if (
                not stat.S_ISDIR(status.st_mode)
                or status.st_uid != os.getuid()
                or status.st_mode & 0o077
            ):
                continue
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(lock, 100) == _read_host_id():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _read_host_id() -> bytes:
    """Return a name of this host: the id of its boot where known, otherwise the host name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return socket.gethostname().encode()[:100]


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Tell whether a path and a descriptor are the same file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
