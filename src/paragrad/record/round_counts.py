"""What a record of rounds says, in which clients train apart: what was sent, and were their
samples used?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paragrad.record.sample_count import SampleCount, count_covered_positions

Line = dict[str, Any]
# events: of a client, as its worker tells; of a round, as all do
CLIENT_LOST = "lost"
NO_CLIENT_RETURNED = "nobody"
IDLE_ROUND = "idle"


def summarize_round_bytes(epochs: Iterable[list[Line]], steps: int) -> dict[str, Line]:
    """Bytes by kind of the rank that sends most when workers meet, over all steps. epochs:
    every rank's.
    """
    most: dict[str, Line] = {}
    for lines in epochs:
        every = [line.get("sent", {}) for line in lines]
        for kind in {kind for each in every for kind in each} - {"tests"}:
            there = [each[kind] for each in every if kind in each]
            found = {
                "bytes": round(sum(each["bytes"] for each in there) / steps),
                "computed": there[0]["computed"],
            }
            most[kind] = max(most.get(kind, found), found, key=lambda each: each["bytes"])
    return dict(sorted(most.items()))


def count_client_samples(epochs: Iterable[Line], passes: int) -> int:
    """The samples of the clients of some rounds, as often as they pass over them."""
    return passes * sum(sum(line.get("samples", ())) for line in epochs)


def count_round_samples(
    epochs: Iterable[Line], used: Mapping[int, list[Line]], passes: int
) -> SampleCount:
    """Of all rounds that were ended. used: the lines of their steps."""
    rounds = [line for line in epochs if line.get("clients")]
    wanted = 0
    seen = 0
    twice = 0
    for line in rounds:
        once, more = count_covered_positions(each["order"] for each in used.get(line["epoch"], []))
        wanted = wanted + count_client_samples([line], passes)
        seen = seen + once
        twice = twice + more
    return SampleCount(len(rounds), wanted, seen, twice, wanted - seen, in_rounds=True)
