"""Where those come in who join a running training from other hosts: an address of this one, and
a folder of their keys.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paragrad.errors import Refused
from paragrad.parallel.server.curve_keys import Address, Keys

HIGHEST = 2**16 - 1
REFUSING = 0.2  # seconds for a host to say that nobody listens


@dataclass(frozen=True)
class Place:
    """host: a name or an address;  port: 0 for any that is free."""

    host: str
    port: int = 0

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def resolved(self) -> Place:
        """By its number. Raises OSError."""
        return Place(
            str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0]),
            self.port,
        )


@dataclass(frozen=True)
class Entrance:
    """Of one process. place: where it is;  allowed: folder of the public keys of those who are
    let in;  kept: the file in which it keeps its own pair and its port, once there are some:
    who is started again is where, and who, it was.
    """

    place: Place
    allowed: Path
    kept: Path

    def found(self) -> tuple[Keys, Place] | None:
        """As it was kept, if it was."""
        with suppress(FileNotFoundError):
            port, public, secret = json.loads(self.kept.read_text())
            return Keys(public.encode(), secret.encode()), Place(self.place.host, port)
        return None

    def keep(self, keys: Keys, port: int) -> None:
        """Whole or not at all."""
        partial = self.kept.with_suffix(".partial")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump([port, keys.public.decode(), keys.secret.decode()], file)
        partial.rename(self.kept)

    @property
    def address(self) -> Address | None:
        """By which others reach it, once it is there."""
        found = self.found()
        return found and Address(str(found[1]), found[0].public)


def read_place(option: str, text: str) -> Place:
    """HOST or HOST:PORT, with or without tcp://. option: by which it was given. Raises
    Refused.
    """
    with suppress(ValueError):
        parts = urlsplit(text if "://" in text else f"tcp://{text}")
        if (
            parts.hostname
            and parts.netloc == parts.geturl().removeprefix("tcp://")
            and parts.username is None
        ):
            return Place(parts.hostname, parts.port or 0)
    raise Refused(
        f"{option} {text}: write HOST or HOST:PORT, such as 10.0.0.1:4000, or [fd00::1]:4000"
    )


def refuse_place(place: Place, count: int) -> None:
    """Refuse one at which this host cannot listen, or others not reach it. count: ports that
    are wanted, one after another where one is given.
    """
    if place.host in ("0.0.0.0", "::", "*"):
        raise Refused(
            f"--listen {place.host} is where nobody can reach it by that name; give the address by "
            f"which the other "
            "hosts reach this one (`ip address` shows them)"
        )
    if place.port and place.port + count - 1 > HIGHEST:
        raise Refused(
            f"--listen wants {count} ports from {place.port} on, and {HIGHEST} is the last one; "
            f"give a lower one"
        )
    for port in range(place.port, place.port + count) if place.port else (0,):
        try:
            family, kind, _, _, at = socket.getaddrinfo(place.host, port, type=socket.SOCK_STREAM)[
                0
            ]
            with socket.socket(family, kind) as probe:
                # as ZeroMQ does
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(at)
                probe.listen()
        except socket.gaierror as error:
            raise Refused(
                f"--listen {place.host}: {error.strerror}; give an address of this host"
            ) from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Refused(
                    f"--listen: port {port} of {place.host} is in use; give another one, or none, "
                    f"for any that is "
                    "free"
                ) from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise Refused(
                    f"--listen {place.host} is no address of this host; give one by which the "
                    f"other hosts reach it "
                    "(`ip address` shows them)"
                ) from None
            raise Refused(
                f"--listen: port {port} of {place.host}: {error.strerror}; give another one"
            ) from None


def refuses(place: Place) -> bool:
    """Does its host say that nobody listens there? One that says nothing may only be out of
    reach.
    """
    try:
        socket.create_connection((place.host, place.port), REFUSING).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def refuse_unreachable(place: Place, seconds: float) -> None:
    """Refuse an address at which nobody listens."""
    if not place.port:
        raise Refused(f"{place}: the port is missing; give the address as the training printed it")
    try:
        socket.create_connection((place.host, place.port), seconds).close()
    except OSError as error:
        raise Refused(
            f"nobody is reached at {place} ({error.strerror or error}); give the address as the "
            f"training printed it, "
            "and see that it still runs"
        ) from None
