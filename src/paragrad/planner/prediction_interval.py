"""The interval in which most measured times of a predicted exchange lie."""

from __future__ import annotations

from collections.abc import Callable

from paragrad.executors.machine import Cluster

# The relative error for what the clock leaves out. `benchmarks/cluster.py` measures how many
# exchanges lie inside.
MARGIN = 0.1


def predict_interval(
    seconds: float, cluster: Cluster, predict_seconds: Callable[[Cluster], float]
) -> tuple[float, float] | None:
    """Predict the seconds between which four exchanges in five lie.

    Args:
        seconds: the clock's prediction on undisturbed links.
        cluster: the cluster that the prediction is for.
        predict_seconds: returns the clock's seconds of the same exchange on another cluster. It is
            called with links as they were when other work disturbed them.

    Returns:
        (least, most) seconds, or None if the links of the cluster were not measured.
    """
    disturbed = cluster.build_disturbed_cluster()
    if disturbed is None:
        return None
    return (1 - MARGIN) * seconds, (1 + MARGIN) * max(seconds, predict_seconds(disturbed))
