"""branch: independent sub-networks on ranks of their own."""

from __future__ import annotations

from paragrad.errors import Refused
from paragrad.notation.choices import Integer, option
from paragrad.runtime.mesh import Axis
from paragrad.strategies.job_facts import Facts
from paragrad.strategies.strategy import Promise, Strategy


class Branch(Strategy):
    """Independent sub-networks on ranks of their own (Krizhevsky et al. 2012)."""

    workers: int = option(Integer())
    inside = True
    skips = True
    # all ranks see every sample, and count what others draw
    lays_out = False

    @property
    def promise(self) -> Promise:
        return Promise()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (Axis("branch", self.workers, "model"),)

    def unplanned(self) -> str:
        return (
            "its ranks show each other what their branches give, where the layers of a job want it"
        )

    def refuse(self, facts: Facts, asked: Strategy, unchecked: bool = False) -> None:
        super().refuse(facts, asked, unchecked)
        if facts.casts:
            raise Refused(
                f"job {facts.job}: under autocast the ranks without a branch do not know the types "
                f"of its values; "
                "train the model in float32 or float64, or with data(n)"
            )

    def refuse_beside(self, factors: tuple[Strategy, ...]) -> None:
        if others := [each.name for each in factors if each is not self and not each.replica]:
            raise Refused(
                f"branch gives ranks branches of the whole model, and beside it {others[0]} cuts "
                f"that; multiply it "
                "with data(n) alone"
            )
