"""Endpoints at which processes from other hosts join a running training.

An endpoint has an address of this host and a folder of allowed keys.
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
from paragrad.parallel.server.curve_keys import Address, KeyPair

HIGHEST_PORT = 2**16 - 1
REFUSAL_SECONDS = 0.2  # seconds in which a host must report a closed port


@dataclass(frozen=True)
class HostPort:
    """A host and a port of it.

    Attributes:
        host: A name or an address.
        port: The port; 0 for any free one.
    """

    host: str
    port: int = 0

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def resolved(self) -> HostPort:
        """The same with the numeric address of the host. Raises OSError."""
        return HostPort(
            str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0]),
            self.port,
        )


@dataclass(frozen=True)
class JoinEndpoint:
    """The endpoint of one process.

    A process that is restarted has the same keys and the same port again.

    Attributes:
        host_port: Where it listens.
        allowed_folder: Folder of the public keys that may connect.
        state_file: The file in which the process saves its keys and its port.
    """

    host_port: HostPort
    allowed_folder: Path
    state_file: Path

    def read_state(self) -> tuple[KeyPair, HostPort] | None:
        """Return the saved keys and place, or None if nothing was saved."""
        with suppress(FileNotFoundError):
            port, public, secret = json.loads(self.state_file.read_text())
            return KeyPair(public.encode(), secret.encode()), HostPort(self.host_port.host, port)
        return None

    def save_state(self, keys: KeyPair, port: int) -> None:
        """Save keys and port. The file appears complete or not at all.

        Args:
            keys: The keys of the process.
            port: Its port.
        """
        partial = self.state_file.with_suffix(".partial")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump([port, keys.public.decode(), keys.secret.decode()], file)
        partial.rename(self.state_file)

    @property
    def address(self) -> Address | None:
        """The address at which other hosts reach the process, or None before it listens."""
        state = self.read_state()
        return state and Address(str(state[1]), state[0].public)


def parse_host_port(option: str, text: str) -> HostPort:
    """Parse HOST or HOST:PORT, with or without tcp://.

    Args:
        option: The option with this value, for messages.
        text: The value.

    Raises:
        Refused: The value has another form.
    """
    with suppress(ValueError):
        parts = urlsplit(text if "://" in text else f"tcp://{text}")
        if (
            parts.hostname
            and parts.netloc == parts.geturl().removeprefix("tcp://")
            and parts.username is None
        ):
            return HostPort(parts.hostname, parts.port or 0)
    raise Refused(
        f"{option} {text}: write HOST or HOST:PORT, such as 10.0.0.1:4000, or [fd00::1]:4000"
    )


def refuse_host_port(host_port: HostPort, count: int) -> None:
    """Refuse an address at which this host cannot listen, or that other hosts cannot reach.

    Args:
        host_port: The address.
        count: Number of ports that are needed; consecutive ones if a port is given.

    Raises:
        Refused: The address cannot be used.
    """
    if host_port.host in ("0.0.0.0", "::", "*"):
        raise Refused(
            f"--listen {host_port.host}: other hosts cannot reach this one by that name; give the "
            "address by which the other hosts reach this one (`ip address` shows them)"
        )
    if host_port.port and host_port.port + count - 1 > HIGHEST_PORT:
        raise Refused(
            f"--listen needs {count} ports from {host_port.port} on, and {HIGHEST_PORT} is the "
            "last one; give a lower one"
        )
    for port in range(host_port.port, host_port.port + count) if host_port.port else (0,):
        try:
            family, kind, _, _, at = socket.getaddrinfo(
                host_port.host, port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind) as probe:
                # ZeroMQ sets this option too
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(at)
                probe.listen()
        except socket.gaierror as error:
            raise Refused(
                f"--listen {host_port.host}: {error.strerror}; give an address of this host"
            ) from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Refused(
                    f"--listen: port {port} of {host_port.host} is in use; give another one, or "
                    "none, for any that is free"
                ) from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise Refused(
                    f"--listen {host_port.host} is no address of this host; give one by which the "
                    "other hosts reach it (`ip address` shows them)"
                ) from None
            raise Refused(
                f"--listen: port {port} of {host_port.host}: {error.strerror}; give another one"
            ) from None


def is_port_closed(host_port: HostPort) -> bool:
    """Return whether a host reports that no process listens at a port.

    A host that reports nothing may only be out of reach.

    Args:
        host_port: The host and the port.
    """
    try:
        socket.create_connection((host_port.host, host_port.port), REFUSAL_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def refuse_unreachable_port(host_port: HostPort, seconds: float) -> None:
    """Refuse an address at which no process listens.

    Args:
        host_port: The address.
        seconds: Maximum time to wait.

    Raises:
        Refused: The port is missing, or no process is reached.
    """
    if not host_port.port:
        raise Refused(
            f"{host_port}: the port is missing; give the address as the training printed it"
        )
    try:
        socket.create_connection((host_port.host, host_port.port), seconds).close()
    except OSError as error:
        raise Refused(
            f"no training answers at {host_port} ({error.strerror or error}); give the address as "
            "the training printed it, and check that it still runs"
        ) from None
