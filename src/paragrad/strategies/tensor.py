"""tensor: the neurons of each layer over ranks, which all see every sample."""

from __future__ import annotations

from paragrad.notation.choices import Flag, Integer, Word, option
from paragrad.runtime.mesh import Axis
from paragrad.strategies.strategy import PER_ELEMENT, Guarantees, Strategy


class Tensor(Strategy):
    """Neurons, channels, heads and vocabulary split (Shoeybi et al. 2019).

    Attributes:
        workers: The number of workers.
        pairs: Whether a layer after a divided one is divided by its inputs, not by its outputs
            again.
    """

    workers: int | str = option(Integer(), Word("auto"))
    pairs: bool = option(Flag(), default=True)
    splits_layers = True
    update_granularity = PER_ELEMENT
    # All ranks see the batch as it is, and run the calls of one worker.
    changes_layout = False

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees()

    @property
    def axes(self) -> tuple[Axis, ...]:
        assert isinstance(self.workers, int)
        return (Axis("tensor", self.workers, "model"),)

    def explain_no_schedule(self) -> str:
        return (
            "its ranks gather and sum by the backend's own collectives, where the layers of a job "
            "need it"
        )
