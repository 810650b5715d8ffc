"""Keys of those who talk over TCP (CurveZMQ), and the files that hold them: certificates, as
`zmq.auth` has them.

    NAME.key_secret     a pair, for its owner's eyes alone NAME.key            its public half,
    which may travel any way on which nobody can put another in its place
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
    """A process's own pair, made anew for every training, or its host's."""

    public: bytes
    secret: bytes

    @classmethod
    def generate_pair(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class Address:
    """Where somebody listens; key: the public one, where messages are encrypted."""

    endpoint: str
    key: bytes | None = None

    @property
    def is_local(self) -> bool:
        """Is it for processes of this host alone?"""
        return self.endpoint.startswith("ipc://")


def make_key_files(path: Path) -> Path:
    """A pair into a file that is not there yet, and its public half beside it, of which this is
    the path. Raises Refused.
    """
    if path.suffix != SECRET_SUFFIX:
        raise Refused(
            f"--key {path}: it is to hold a secret key, by the name of such files; give "
            f"{path.with_suffix(SECRET_SUFFIX)}"
        )
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".keys-") as folder:
            public, secret = map(Path, zmq.auth.create_certificates(folder, "made"))
            secret.chmod(0o600)
            # never over one that another process made meanwhile
            os.link(secret, path)
            public.replace(path.with_suffix(PUBLIC_SUFFIX))
    except OSError as error:
        raise Refused(
            f"--key {path} cannot be made: {error.strerror or error}; give a place in a folder of "
            f"your own"
        ) from None
    return path.with_suffix(PUBLIC_SUFFIX)


def read_key_pair(path: Path) -> KeyPair:
    """The pair in a file. Raises Refused."""
    public, secret = _read_certificate("--key", path)
    if not secret:
        raise Refused(
            f"--key {path} holds a public key alone; give the file that holds the secret one too "
            f"(*{SECRET_SUFFIX})"
        )
    if path.stat().st_mode & 0o077:
        raise Refused(
            f"--key {path} may be read by others than its owner; chmod 600 {path}, or make another "
            f"pair, where "
            "somebody may have read it"
        )
    if zmq.curve_public(secret) != public:
        raise Refused(
            f"--key {path}: its public key is not that of its secret one; make another pair"
        )
    return KeyPair(public, secret)


def read_public_key(option: str, path: Path) -> bytes:
    """The public key in a file. option: by which it was given. Raises Refused."""
    return _read_certificate(option, path)[0]


def write_public_key(key: bytes, path: Path) -> None:
    """A certificate of a public key, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(f'metadata\ncurve\n    public-key = "{key.decode()}"\n')
    partial.replace(path)


def refuse_key_folder(folder: Path) -> None:
    """Refuse a folder that lets nobody in, or that holds what does not belong there."""
    if not folder.is_dir():
        raise Refused(
            f"--allow {folder}: there is no such folder; make it, and put the public keys "
            f"(*{PUBLIC_SUFFIX}) of those who "
            "may join into it"
        )
    files = sorted(folder.glob(f"*{PUBLIC_SUFFIX}"))
    if not files:
        raise Refused(
            f"--allow {folder} holds no public key (*{PUBLIC_SUFFIX}); put those of the hosts that "
            f"may "
            f"join into it: "
            "`paragrad join` makes a pair where its --key names none"
        )
    for path in files:
        if _read_certificate("--allow", path)[1]:
            raise Refused(
                f"--allow: {path} holds a secret key; put its public half there, and the secret "
                f"one back to its host"
            )


@dataclass(frozen=True)
class AllowedKeys:
    """Who may come in: whose public key is in a folder, as it is when somebody knocks. For
    `configure_curve_callback`.
    """

    folder: Path

    def callback(self, domain: str, key: bytes) -> bool:
        return self.find_key_name(key) is not None

    def find_key_name(self, key: bytes) -> str | None:
        """Of its file, without the ending."""
        return next((path.stem for path, found in self._list_keys() if found == key), None)

    def _list_keys(self) -> Iterator[tuple[Path, bytes]]:
        for path in sorted(self.folder.glob(f"*{PUBLIC_SUFFIX}")):
            # one that is being written is no key yet
            with contextlib.suppress(OSError, ValueError):
                yield path, zmq.auth.load_certificate(path)[0]


def _read_certificate(option: str, path: Path) -> tuple[bytes, bytes | None]:
    """(public key, secret one or None) of a certificate. Raises Refused."""
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
        f"makes it"
    )
