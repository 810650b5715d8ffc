"""Counts of rounds, in which clients train independently: bytes sent and samples used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from paragrad.record.sample_count import SampleCount, count_covered_positions

Line = dict[str, Any]
# names of events: CLIENT_LOST is of a client and written by its worker; the others are of a round
# and written by all workers
CLIENT_LOST = "lost"
NO_CLIENT_RETURNED = "nobody"
IDLE_ROUND = "idle"


def summarize_round_bytes(epochs: Iterable[list[Line]], steps: int) -> dict[str, Line]:
    """Summarize the bytes of the rank that sends most between workers, averaged over all steps.

    Args:
        epochs: For each rank its epoch lines.
        steps: The number of steps.

    Returns:
        {kind: {bytes, computed}}.
    """
    most: dict[str, Line] = {}
    for lines in epochs:
        sent_lines = [line.get("sent", {}) for line in lines]
        for kind in {kind for each in sent_lines for kind in each} - {"tests"}:
            entries = [each[kind] for each in sent_lines if kind in each]
            mean = {
                "bytes": round(sum(each["bytes"] for each in entries) / steps),
                "computed": entries[0]["computed"],
            }
            most[kind] = max(most.get(kind, mean), mean, key=lambda each: each["bytes"])
    return dict(sorted(most.items()))


def count_client_samples(epochs: Iterable[Line], passes: int) -> int:
    """Count the samples of the clients of some rounds, as often as the clients pass over them.

    Args:
        epochs: The epoch lines of the rounds.
        passes: How often a client passes over its samples in a round.

    Returns:
        The number of samples.
    """
    return passes * sum(sum(line.get("samples", ())) for line in epochs)


def count_round_samples(
    epochs: Iterable[Line], used: Mapping[int, list[Line]], passes: int
) -> SampleCount:
    """Count how often each sample of the finished rounds was used.

    Args:
        epochs: The epoch lines.
        used: The step lines of each round.
        passes: How often a client passes over its samples in a round.

    Returns:
        The counts.
    """
    rounds = [line for line in epochs if line.get("clients")]
    wanted = 0
    used_once = 0
    twice = 0
    for line in rounds:
        once, repeated = count_covered_positions(
            chain.from_iterable(each["order"] for each in used.get(line["epoch"], []))
        )
        wanted = wanted + count_client_samples([line], passes)
        used_once = used_once + once
        twice = twice + repeated
    return SampleCount(len(rounds), wanted, used_once, twice, wanted - used_once, in_rounds=True)
