"""What a machine is to a clock: links, cores, who shares them; and the file that `paragrad
measure` writes of it.
"""

from __future__ import annotations

import json
import warnings
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from paragrad.errors import Refused

MACHINE_SCHEMA = 2


@dataclass(frozen=True)
class Link:
    """One kind of link; seconds per message and per byte (LogGP, Alexandrov et al. 1995, with
    the names of the field).

    A message of n bytes holds its sender's way out and its receiver's way in for alpha + beta n
    (single-port, full-duplex), and is in flight for `latency` more. Each of the two holds a
    core for `overhead` when it posts the message or takes it; where ranks share cores, also for
    `work` a byte while it travels. The textbook's model is alpha and beta alone. points:
    (bytes, seconds) that were measured, where a straight line does not fit: the clock goes from
    point to point. disturbed: the same link as it was in the slowest tenth of the measured
    rounds; None where nothing was measured.
    """

    alpha: float
    beta: float
    latency: float = 0.0
    overhead: float = 0.0
    work: float = 0.0
    points: tuple[tuple[int, float], ...] = ()
    disturbed: Link | None = None

    def compute_port_seconds(self, size: int) -> float:
        """How long a message of `size` bytes holds its ways."""
        if not self.points:
            return self.alpha + self.beta * size
        place = min(max(bisect_right(self.points, (size, float("inf"))), 1), len(self.points) - 1)
        (low, first), (high, second) = self.points[place - 1 : place + 1]
        return max(0.0, first + (second - first) * (size - low) / (high - low))


@dataclass(frozen=True)
class Cluster:
    """Ranks, link by link and core by core; neighbouring ranks share.

    gamma: seconds of a core per byte added. `group` neighbouring ranks are on a host: they
    share its link to other hosts, and talk over `inside` among themselves. `sharing`
    neighbouring ranks share `cores` cores. slow: ranks that are k times slower than the others,
    at everything, as (rank, k).
    """

    link: Link
    gamma: float = 0.0
    inside: Link | None = None
    group: int = 1
    sharing: int = 1
    cores: int = 1
    slow: tuple[tuple[int, float], ...] = ()

    def find_link(self, one: int, other: int) -> Link:
        """The link of a message between two ranks."""
        return (
            self.inside if self.inside and one // self.group == other // self.group else self.link
        )

    def find_slowdown(self, rank: int) -> float:
        """How many times slower a rank is."""
        return dict(self.slow).get(rank, 1.0)

    def build_disturbed_cluster(self) -> Cluster | None:
        """The same with its links as they are when other work disturbs them; None where that
        was not measured.
        """
        if self.link.disturbed is None:
            return None
        return replace(
            self,
            link=self.link.disturbed,
            inside=self.inside and (self.inside.disturbed or self.inside),
        )


@dataclass(frozen=True)
class Machine:
    """What was measured of a machine, or assumed of one. links: by name, `gloo` or `shm`; rates
    per second.
    """

    links: dict[str, Link]
    gamma: float  # seconds per byte added
    cores: int
    measured: str  # when, on what, over which interface; or "assumed"
    # of the straight line through a link's points: largest relative error
    errors: dict[str, float] | None = None
    memory: float | None = None  # bytes read and written
    matmul: float | None = None  # operations, one core
    hosts: int | None = None  # that the links join: one, or two
    # average of the minute before: threads that wanted a core
    load: float | None = None

    def select_link(self, name: str | None = None) -> Link:
        """A link by name, or the first. Raises Refused."""
        if name is None:
            return next(iter(self.links.values()))
        if name not in self.links:
            raise Refused(
                f"this machine file has no link {name!r}, only {', '.join(self.links)}; measure "
                f"it: "
                f"paragrad measure --backend {name}"
            )
        return self.links[name]

    def write_machine_file(self, path: Path) -> None:
        path.write_text(json.dumps({"schema": MACHINE_SCHEMA, **asdict(self)}, indent=1) + "\n")


# what a simulation takes where no machine was measured: the reference example of
# docs/all_reduce.md
ASSUMED_MACHINE = Machine(
    {"network": Link(alpha=20e-6, beta=1 / 2e9)},
    gamma=1 / 8e9,
    cores=1,
    measured="assumed: 20 us a message, 2 GB/s, 8 GB/s added",
)


def _check_machine(machine: Machine) -> None:
    """Raises ValueError where something is no measured quantity."""
    if not machine.links:
        raise ValueError("no link")
    named = [
        ("gamma", machine.gamma),
        ("cores", machine.cores),
        ("memory", machine.memory or 0.0),
        ("matmul", machine.matmul or 0.0),
        ("hosts", machine.hosts or 1),
        ("load", machine.load or 0.0),
    ]
    named += [(f"error of {name}", error) for name, error in (machine.errors or {}).items()]
    links = dict(machine.links)
    links |= {
        f"{of}, disturbed": link.disturbed for of, link in machine.links.items() if link.disturbed
    }
    for of, link in links.items():
        named += [
            (f"{name} of {of}", getattr(link, name))
            for name in ("alpha", "beta", "latency", "overhead", "work")
        ]
        named += [(f"a point of {of}", number) for point in link.points for number in point]
        if len(link.points) == 1 or sorted({size for size, _ in link.points}) != [
            size for size, _ in link.points
        ]:
            raise ValueError(f"the points of {of} are not at two or more sizes, in order")
    for name, value in named:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            raise ValueError(f"{name} is {value!r}")
    if (
        machine.cores < 1
        or not isinstance(machine.cores, int)
        or not isinstance(machine.measured, str)
    ):
        raise ValueError(f"measured {machine.measured!r} on {machine.cores!r} cores")


def _parse_link(found: dict[str, Any]) -> Link:
    """A link as the file has it."""
    disturbed = found["disturbed"]
    return Link(
        **{
            **found,
            "points": tuple((int(size), float(seconds)) for size, seconds in found["points"]),
            "disturbed": disturbed and _parse_link(disturbed),
        }
    )


def load_machine(path: Path | None, cores: int) -> Machine:
    """The machine of a file, or the assumed one; a warning where the file is of another number
    of cores.
    """
    if path is None:
        return ASSUMED_MACHINE
    machine, warning = read_machine_file(path, cores)
    if warning:
        warnings.warn(warning, stacklevel=2)
    return machine


def read_machine_file(path: Path, cores: int) -> tuple[Machine, str | None]:
    """(machine, warning or None) of a machine file; cores: those of this host. Raises Refused
    with the repair.
    """
    again = f"write it anew: paragrad measure --output {path}"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        schema = found.pop("schema")
    except FileNotFoundError:
        raise Refused(f"there is no machine file {path}; {again}") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise Refused(f"{path} is no machine file ({error}); {again}") from None
    if schema != MACHINE_SCHEMA:
        raise Refused(
            f"{path} is a machine file of version {schema}, this paragrad reads version "
            f"{MACHINE_SCHEMA}; "
            f"{again}"
        )
    try:
        links = {name: _parse_link(link) for name, link in found.pop("links").items()}
        machine = Machine(links=links, **found)
        _check_machine(machine)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise Refused(f"{path} lacks or misnames something ({error}); {again}") from None
    warning = None
    if machine.cores != cores:
        warning = (
            f"{path} was measured on a machine of {machine.cores} cores, this one has "
            f"{cores}; {again}"
        )
    return machine, warning
