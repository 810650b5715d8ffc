"""Keys of processes that communicate over TCP (CurveZMQ), and the files that hold them.

The files are certificates in the format of `zmq.auth`:

    NAME.key_secret     a pair of keys; only its owner may read it
    NAME.key            its public key

The public key may travel in any way in which it cannot be replaced by another one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from paragrad.errors import Refused

SECRET_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"


@dataclass(frozen=True)
class KeyPair:
    """A pair of keys: of a process, made for each training, or of a host.

    Attributes:
        public: The public key, in Z85.
        secret: The secret key, in Z85.
    """

    public: bytes
    secret: bytes

    @classmethod
    def generate_pair(cls) -> KeyPair:
        """Make a new pair."""
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class Address:
    """Where a process listens.

    Attributes:
        endpoint: The ZeroMQ endpoint.
        key: The public key of the process, or None if messages are not encrypted.
    """

    endpoint: str
    key: bytes | None = None

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host can connect."""
        return self.endpoint.startswith("ipc://")


def make_key_files(path: Path) -> Path:
    """Make a pair of keys in a new file, and its public key in a file next to it.

    Args:
        path: The file of the pair. It must not exist.

    Returns:
        The path of the public key.

    Raises:
        Refused: The name of the file has another suffix, or the file cannot be made.
    """
    if path.suffix != SECRET_SUFFIX:
        raise Refused(
            f"--key {path}: the name of a file with a secret key ends with {SECRET_SUFFIX}; give "
            f"{path.with_suffix(SECRET_SUFFIX)}"
        )
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".keys-") as folder:
            public, secret = map(Path, zmq.auth.create_certificates(folder, "made"))
            secret.chmod(0o600)
            # a link never replaces a file that another process made meanwhile
            os.link(secret, path)
            public.replace(path.with_suffix(PUBLIC_SUFFIX))
    except OSError as error:
        raise Refused(
            f"--key {path} cannot be made: {error.strerror or error}; give a place in a folder of "
            "your own"
        ) from None
    return path.with_suffix(PUBLIC_SUFFIX)


def read_key_pair(path: Path) -> KeyPair:
    """Read a pair of keys.

    Args:
        path: The file of the pair.

    Raises:
        Refused: The file holds no valid pair, or other users may read it.
    """
    public, secret = _read_certificate("--key", path)
    if not secret:
        raise Refused(
            f"--key {path} holds a public key alone; give the file that holds the secret one too "
            f"(*{SECRET_SUFFIX})"
        )
    if path.stat().st_mode & 0o077:
        raise Refused(
            f"--key {path} can be read by other users than its owner; chmod 600 {path}, or make "
            "another pair, if another user may have read it"
        )
    if zmq.curve_public(secret) != public:
        raise Refused(
            f"--key {path}: its public key does not belong to its secret key; make another pair"
        )
    return KeyPair(public, secret)


def read_public_key(option: str, path: Path) -> bytes:
    """Read the public key in a file.

    Args:
        option: The option that names the file, for messages.
        path: The file.

    Raises:
        Refused: The file holds no key.
    """
    return _read_certificate(option, path)[0]


def write_public_key(key: bytes, path: Path) -> None:
    """Write a certificate of a public key. The file appears complete or not at all.

    Args:
        key: The public key.
        path: The file.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(f'metadata\ncurve\n    public-key = "{key.decode()}"\n')
    partial.replace(path)


def refuse_key_folder(folder: Path) -> None:
    """Refuse a folder that allows no key, or that holds secret keys.

    Args:
        folder: The folder of `--allow`.

    Raises:
        Refused: The folder cannot be used.
    """
    if not folder.is_dir():
        raise Refused(
            f"--allow {folder}: there is no such folder; make it, and put the public keys "
            f"(*{PUBLIC_SUFFIX}) of the hosts that may join into it"
        )
    files = sorted(folder.glob(f"*{PUBLIC_SUFFIX}"))
    if not files:
        raise Refused(
            f"--allow {folder} holds no public key (*{PUBLIC_SUFFIX}); put those of the hosts that "
            "may join into it: `paragrad join` makes a pair if its --key names no file"
        )
    for path in files:
        if _read_certificate("--allow", path)[1]:
            raise Refused(
                f"--allow: {path} holds a secret key; put its public key there, and move the "
                "secret key back to its host"
            )


@dataclass(frozen=True)
class AllowedKeys:
    """Allows all public keys in a folder, as it is at the time of a connection.

    It is a credentials provider for `configure_curve_callback`.

    Attributes:
        folder: The folder.
    """

    folder: Path

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key is allowed.

        Args:
            domain: The ZAP domain, which is not used.
            key: The public key of the connection.
        """
        return self.find_key_name(key) is not None

    def find_key_name(self, key: bytes) -> str | None:
        """Return the name of the file of a key, without its suffix, or None.

        Args:
            key: The public key.
        """
        return next((path.stem for path, found in self._list_keys() if found == key), None)

    def _list_keys(self) -> Iterator[tuple[Path, bytes]]:
        for path in sorted(self.folder.glob(f"*{PUBLIC_SUFFIX}")):
            # a file that is still being written holds no key yet
            with contextlib.suppress(OSError, ValueError):
                yield path, zmq.auth.load_certificate(path)[0]


def _read_certificate(option: str, path: Path) -> tuple[bytes, bytes | None]:
    """Read a certificate: the public key, and the secret key or None. Raises Refused."""
    try:
        public, secret = zmq.auth.load_certificate(path)
        if all(
            len(key) == 40 and len(zmq.utils.z85.decode(key)) == 32
            for key in (public, *filter(None, [secret]))
        ):
            return public, secret
    except (OSError, ValueError, KeyError) as error:
        if not path.is_file():
            raise Refused(f"{option} {path}: there is no such file") from None
        if isinstance(error, OSError):
            raise Refused(f"{option} {path} cannot be read: {error.strerror or error}") from None
    raise Refused(
        f"{option} {path} holds no key of CurveZMQ; give a file as `paragrad join` or zmq.auth "
        "makes it"
    )
