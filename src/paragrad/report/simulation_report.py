"""What `paragrad simulate` prints and writes."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isinf
from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.executors.machine import Link, Machine
from paragrad.planner.compression_cost import CompressionCost
from paragrad.planner.simulation import Simulation
from paragrad.report.printing import print_facts

BUSY_LOAD = 0.5  # a load average above this number of cores counts as busy


def print_simulation(found: Simulation, as_json: bool) -> None:
    """Print a simulation: a line for each fact, or JSON with plain numbers.

    Args:
        found: The simulation.
        as_json: Whether to print JSON.
    """
    if as_json:
        print(
            json.dumps(
                {
                    "strategy": str(found.strategy),
                    "workers": found.workers,
                    "bytes": found.bytes,
                    "seconds": found.timeline.seconds,
                    "interval": found.interval,
                    "closed_form": found.closed_form,
                    "messages": found.timeline.messages,
                    "price": found.cost and asdict(found.cost),
                    "least": asdict(found.lower_bounds),
                    "work": found.work and found.work.work,
                    "depth": found.work and found.work.depth,
                    "cluster": asdict(found.cluster),
                    "measured": found.machine.measured,
                },
                indent=1,
            )
        )
    else:
        print_facts(
            (name, value)
            for name, value in _describe_simulation(found).items()
            if value is not None
        )


def print_compression_cost(found: CompressionCost, as_json: bool) -> None:
    """Print the cost of an exchange with a compressor, compared with the exchange without.

    Args:
        found: The two costs.
        as_json: Whether to print JSON.
    """
    if as_json:
        print(
            json.dumps(
                {
                    "strategy": str(found.strategy),
                    "workers": found.workers,
                    "bytes": found.bytes,
                    "payload": found.payload,
                    "sent_whole": found.sends_whole_vectors,
                    "plain": found.plain,
                    "exchange": found.exchange,
                    "compute": found.compute,
                    "pays": found.is_faster,
                    "bandwidth": None if isinf(found.bandwidth) else found.bandwidth,
                    "lengths": [
                        [first, None if isinf(end) else end] for first, end in found.paying_lengths
                    ],
                    "measured": found.machine.measured,
                },
                indent=1,
            )
        )
        return
    total = found.exchange + found.compute
    below = (
        "none"
        if not found.bandwidth
        else "of any bandwidth"
        if isinf(found.bandwidth)
        else (f"below {found.bandwidth / 1e9:.3g} GB/s ({8 * found.bandwidth / 1e6:,.0f} Mbit/s)")
    )
    print_facts(
        {
            "strategy": str(found.strategy),
            "vector": f"{found.bytes:,} bytes on each of {found.workers:,} ranks",
            "machine": found.machine.measured,
            "without compressing": f"{_format_duration(found.plain)}, by {found.algorithm}, "
            f"from its formula",
            "with compressing": f"{_format_duration(total)}: {_format_duration(found.exchange)} of "
            f"the exchange, and {_format_duration(found.compute)} of compressing and extracting "
            "(measured here, on one thread)",
            "compressed vector": f"{found.payload:,.0f} bytes"
            + (
                "; all ranks would send more bytes of these than of whole vectors, so whole "
                "vectors are sent"
                if found.sends_whole_vectors
                else ""
            ),
            "is it faster?": f"yes, {found.plain / total:.3g} times as fast"
            if found.is_faster
            else f"no: {total / found.plain:.3g} times as long"
            if found.plain
            else "no: nothing is exchanged",
            "faster on links": below,
            "faster on this link": ", ".join(
                f"from {first:,.0f} bytes " + ("on" if isinf(end) else f"to {end:,.0f}")
                for first, end in found.paying_lengths
            )
            or "for no vector",
        }.items()
    )


def _describe_simulation(found: Simulation) -> dict[str, Any]:
    link = found.cluster.link
    gamma = found.cluster.gamma
    bounds = found.lower_bounds
    element = found.element
    terms = {
        "rounds": bounds.rounds * link.alpha,
        "bytes": element * bounds.carried * link.beta,
        "additions": element * bounds.added * gamma,
    }
    plain = (
        ""
        if found.cluster.group == 1 and not found.cluster.slow
        else ", if every rank has its own link and no rank is slow"
    )
    return {
        "strategy": str(found.strategy),
        "vector": f"{found.bytes:,} bytes on each of {found.workers:,} ranks",
        "machine": found.machine.measured,
        "time by the clock": _format_duration(found.timeline.seconds) + _format_interval(found),
        "time by formula": None
        if found.closed_form is None
        else _format_duration(found.closed_form) + plain,
        "lower bounds": ", ".join(
            f"{name} {_format_duration(value)}" for name, value in terms.items()
        ),
        "messages": f"{found.timeline.messages:,} in all",
        "rounds": None
        if found.cost is None
        else f"{found.cost.rounds:,} messages, one after the other",
        "sent by the busiest rank": None
        if found.cost is None
        else f"{element * found.cost.sent:,} bytes",
        "scratch": None if found.cost is None else f"{element * found.cost.scratch:,} bytes",
        "work W": None if found.work is None else f"{found.work.work:,} additions",
        "depth D": None
        if found.work is None
        else f"{found.work.depth:,} additions one after the other",
        "average parallelism W/D": None if found.work is None else f"{found.work.parallelism:,.1f}",
        "additions in time on these ranks": None
        if found.work is None
        else " to ".join(f"{bound:,.0f}" for bound in found.work.compute_time_bounds(found.workers))
        + " (Brent: max(W/P, D) to W/P + D)",
    }


def _format_interval(found: Simulation) -> str:
    """The interval that contains most exchanges, as text."""
    if found.interval is None:
        return ""
    return "; four of five exchanges take " + " to ".join(map(_format_duration, found.interval))


def write_machine_file(found: Machine, path: Path, as_json: bool) -> None:
    """Write a machine file and print what it contains.

    Args:
        found: The measured machine.
        path: The file.
        as_json: Whether to print JSON.

    Raises:
        Refused: The file cannot be written.
    """
    try:
        found.write_machine_file(path)
    except OSError as error:
        raise Refused(
            f"cannot write {path} ({error.strerror}); give --output a file in a folder that exists"
        ) from None
    if as_json:
        print(path.read_text(), end="")
        return
    errors = found.errors or {}
    facts: dict[str, Any] = {
        name: f"alpha {_format_duration(link.alpha)}, {1 / link.beta / 1e9:.3g} GB/s, latency "
        f"{_format_duration(link.latency)}, {_format_duration(link.overhead)} of a core per "
        f"message, {1e9 * link.work:.3g} ns per byte; the error of the straight line is at most "
        f"{errors.get(name, 0.0):.0%}, and the clock uses the {len(link.points)} "
        f"points{_describe_disturbance(link)}"
        for name, link in found.links.items()
    }
    facts |= {"gamma": f"{1 / found.gamma / 1e9:.3g} GB/s added", "cores": found.cores}
    if found.memory and found.matmul:
        facts |= {
            "memory": f"{found.memory / 1e9:.3g} GB/s",
            "matrix products": f"{found.matmul / 1e9:.3g} Gflop/s, one core",
        }
    if found.load is not None:
        facts["load average before"] = f"{found.load:.2f}" + (
            ": the host was busy in the minute before, so the measured times may vary; measure "
            "again when the host is idle"
            if found.load > BUSY_LOAD
            else ""
        )
    print_facts({**facts, "measured": found.measured, "machine file": path}.items())


def _describe_disturbance(link: Link) -> str:
    """How much slower a link was in the slowest rounds, as text."""
    if link.disturbed is None:
        return ""
    slower = [link.disturbed.compute_port_seconds(size) / seconds for size, seconds in link.points]
    return (
        f"; one of ten rounds took {min(slower):.2f} to {max(slower):.2f} times as long, or longer"
    )


def write_timeline(found: Simulation, path: Path) -> None:
    """Write the spans of a simulated step, in the format of the record.

    Args:
        found: The simulation.
        path: The file.

    Raises:
        Refused: The file cannot be written.
    """
    try:
        with path.open("w") as file:
            for span in found.timeline.spans:
                file.write(json.dumps({"kind": "span", "step": 0, **asdict(span)}) + "\n")
    except OSError as error:
        raise Refused(
            f"cannot write {path} ({error.strerror}); give a file in a folder that exists"
        ) from None


def _format_duration(value: float) -> str:
    return (
        f"{value:.3g} s"
        if value >= 1
        else f"{1e3 * value:.3g} ms"
        if value >= 1e-3
        else f"{1e6 * value:.3g} us"
    )
