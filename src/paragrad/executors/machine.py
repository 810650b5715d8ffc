"""The machine model of the clock: links, cores, and which ranks share them.

Also the file that `paragrad measure` writes.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from paragrad.errors import Refused, warn_user

MACHINE_SCHEMA = 2


@dataclass(frozen=True)
class Link:
    """One kind of link, with seconds per message and per byte.

    The model is LogGP (Alexandrov et al. 1995), with the names of the field. A message of n bytes
    occupies its sender's out port and its receiver's in port for alpha + beta n (single-port,
    full-duplex). The textbook model has alpha and beta only.

    Attributes:
        alpha: Seconds per message.

        beta: Seconds per byte.

        latency: Seconds for which the message is in flight after it has left the ports.

        overhead: Seconds of a core, at each of both ranks, to post or to receive the message.

        work: Seconds of a core per byte while the message travels, at each of both ranks, if ranks
            share cores.

        points: Measured (bytes, seconds), if a straight line does not fit. The clock interpolates
            between them.

        disturbed: The same link in the slowest tenth of the measured rounds; None if not measured.
    """

    alpha: float
    beta: float
    latency: float = 0.0
    overhead: float = 0.0
    work: float = 0.0
    points: tuple[tuple[int, float], ...] = ()
    disturbed: Link | None = None

    def compute_port_seconds(self, size: int) -> float:
        """Return how long a message of `size` bytes occupies its ports, in seconds."""
        if not self.points:
            return self.alpha + self.beta * size
        index = min(max(bisect_right(self.points, (size, float("inf"))), 1), len(self.points) - 1)
        (low, first), (high, second) = self.points[index - 1 : index + 1]
        return max(0.0, first + (second - first) * (size - low) / (high - low))


@dataclass(frozen=True)
class Cluster:
    """Ranks with their links and cores; neighbouring ranks share them.

    Attributes:
        link: The link between ranks, or between hosts.

        gamma: Seconds of a core per byte added.

        inside: The link between ranks of one host.

        group: The number of neighbouring ranks on a host. They share its link to other hosts.

        sharing: The number of neighbouring ranks that share `cores` cores.

        cores: The number of cores that they share.

        slow: Ranks that are k times slower than the others at everything, as (rank, k).
    """

    link: Link
    gamma: float = 0.0
    inside: Link | None = None
    group: int = 1
    sharing: int = 1
    cores: int = 1
    slow: tuple[tuple[int, float], ...] = ()

    def find_link(self, one: int, other: int) -> Link:
        """Return the link of a message between two ranks."""
        return (
            self.inside if self.inside and one // self.group == other // self.group else self.link
        )

    def find_slowdown(self, rank: int) -> float:
        """Return how many times slower than the others a rank is."""
        return dict(self.slow).get(rank, 1.0)

    def build_disturbed_cluster(self) -> Cluster | None:
        """Return the cluster with links disturbed by other work; None if that was not measured."""
        if self.link.disturbed is None:
            return None
        return replace(
            self,
            link=self.link.disturbed,
            inside=self.inside and (self.inside.disturbed or self.inside),
        )


@dataclass(frozen=True)
class Machine:
    """The measurements of a machine, or assumptions about one. Rates are per second.

    Attributes:
        links: The links by name, `gloo` or `shm`.

        gamma: Seconds per byte added.

        cores: The number of cores.

        measured: When, on what and over which interface it was measured; or "assumed".

        errors: The largest relative error of the straight line through the points of each link.

        memory: Bytes read and written.

        matmul: Operations of one core in a matrix product.

        hosts: The number of hosts that the links join, one or two.

        load: The average number of threads that wanted a core in the minute before.
    """

    links: dict[str, Link]
    gamma: float
    cores: int
    measured: str
    errors: dict[str, float] | None = None
    memory: float | None = None
    matmul: float | None = None
    hosts: int | None = None
    load: float | None = None

    def select_link(self, name: str | None = None) -> Link:
        """Return a link by name, or the first link.

        Args:
            name: The name, or None.

        Raises:
            Refused: If the machine has no link of this name.
        """
        if name is None:
            return next(iter(self.links.values()))
        if name not in self.links:
            raise Refused(
                f"this machine file has no link {name!r}, only {', '.join(self.links)}; measure "
                f"it: paragrad measure --backend {name}"
            )
        return self.links[name]

    def write_machine_file(self, path: Path) -> None:
        """Write the machine to a JSON file."""
        path.write_text(json.dumps({"schema": MACHINE_SCHEMA, **asdict(self)}, indent=1) + "\n")


# The machine of a simulation if none was measured: the reference example of
# docs/techniques/all_reduce.md.
ASSUMED_MACHINE = Machine(
    {"network": Link(alpha=20e-6, beta=1 / 2e9)},
    gamma=1 / 8e9,
    cores=1,
    measured="assumed: 20 us a message, 2 GB/s, 8 GB/s added",
)


def _check_machine(machine: Machine) -> None:
    """Raise ValueError if a value is no measured quantity."""
    if not machine.links:
        raise ValueError("no link")
    named_values = [
        ("gamma", machine.gamma),
        ("cores", machine.cores),
        ("memory", machine.memory or 0.0),
        ("matmul", machine.matmul or 0.0),
        ("hosts", machine.hosts or 1),
        ("load", machine.load or 0.0),
    ]
    named_values += [(f"error of {name}", error) for name, error in (machine.errors or {}).items()]
    links = dict(machine.links)
    links |= {
        f"{of}, disturbed": link.disturbed for of, link in machine.links.items() if link.disturbed
    }
    for of, link in links.items():
        named_values += [
            (f"{name} of {of}", getattr(link, name))
            for name in ("alpha", "beta", "latency", "overhead", "work")
        ]
        named_values += [(f"a point of {of}", number) for point in link.points for number in point]
        if len(link.points) == 1 or sorted({size for size, _ in link.points}) != [
            size for size, _ in link.points
        ]:
            raise ValueError(f"the points of {of} need two or more sizes, in ascending order")
    for name, value in named_values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise ValueError(f"{name} is {value!r}")
    if (
        machine.cores < 1
        or not isinstance(machine.cores, int)
        or not isinstance(machine.measured, str)
    ):
        raise ValueError(f"measured {machine.measured!r} on {machine.cores!r} cores")


def _parse_link(found: dict[str, Any]) -> Link:
    """Return the link of an entry of the file."""
    disturbed = found["disturbed"]
    return Link(
        **{
            **found,
            "points": tuple((int(size), float(seconds)) for size, seconds in found["points"]),
            "disturbed": None if disturbed is None else _parse_link(disturbed),
        }
    )


def load_machine(path: Path | None, cores: int) -> Machine:
    """Return the machine of a file, or the assumed one.

    It warns if the file is from a machine with another number of cores.

    Args:
        path: The machine file, or None for the assumed machine.
        cores: The number of cores of this host.

    Raises:
        Refused: If the file cannot be read, with the repair.
    """
    if path is None:
        return ASSUMED_MACHINE
    machine, warning = read_machine_file(path, cores)
    if warning:
        warn_user(warning)
    return machine


def read_machine_file(path: Path, cores: int) -> tuple[Machine, str | None]:
    """Read a machine file.

    Args:
        path: The machine file.
        cores: The number of cores of this host.

    Returns:
        (machine, warning or None).

    Raises:
        Refused: If it is no machine file of this version, with the repair.
    """
    repair = f"write a new one: paragrad measure --output {path}"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        schema = content.pop("schema")
    except FileNotFoundError:
        raise Refused(f"there is no machine file {path}; {repair}") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise Refused(f"{path} is no machine file ({error}); {repair}") from None
    if schema != MACHINE_SCHEMA:
        raise Refused(
            f"{path} is a machine file of version {schema}, this paragrad reads version "
            f"{MACHINE_SCHEMA}; {repair}"
        )
    try:
        links = {name: _parse_link(link) for name, link in content.pop("links").items()}
        machine = Machine(links=links, **content)
        _check_machine(machine)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise Refused(f"{path} has a missing or wrong entry ({error}); {repair}") from None
    warning = None
    if machine.cores != cores:
        warning = (
            f"{path} was measured on a machine of {machine.cores} cores, this one has {cores}; "
            f"{repair}"
        )
    return machine, warning
