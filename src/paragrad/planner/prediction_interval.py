"""How far a foretold time is to be trusted: between which seconds most exchanges will lie."""

from __future__ import annotations

from collections.abc import Callable

from paragrad.executors.machine import Cluster

# what the clock leaves out: `benchmarks/cluster.py` looks how many exchanges lie inside
MARGIN = 0.1


def predict_interval(
    seconds: float, cluster: Cluster, predict_seconds: Callable[[Cluster], float]
) -> tuple[float, float] | None:
    """(least, most) seconds of four exchanges in five; None where the links of a cluster were
    not measured.

    seconds: by the clock, on links as they can be;  timed: the clock's seconds of the same on
    another cluster: on links as they were when other work disturbed them.
    """
    disturbed = cluster.build_disturbed_cluster()
    if disturbed is None:
        return None
    return (1 - MARGIN) * seconds, (1 + MARGIN) * max(seconds, predict_seconds(disturbed))
