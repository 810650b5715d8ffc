"""branch: independent sub-networks on ranks of their own."""

from __future__ import annotations

from paragrad.errors import Refused
from paragrad.notation.choices import Integer, option
from paragrad.runtime.mesh import Axis
from paragrad.strategies.job_facts import JobFacts
from paragrad.strategies.strategy import Guarantees, Strategy


class Branch(Strategy):
    """Independent sub-networks on ranks of their own (Krizhevsky et al. 2012)."""

    workers: int = option(Integer())
    splits_layers = True
    skips_calls = True
    # All ranks see every sample, and count the random numbers that others draw.
    changes_layout = False

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (Axis("branch", self.workers, "model"),)

    def explain_no_schedule(self) -> str:
        return (
            "its ranks exchange the results of their branches where the layers of a job need them"
        )

    def refuse_job(
        self, facts: JobFacts, requested: Strategy, skip_first_step_check: bool = False
    ) -> None:
        super().refuse_job(facts, requested, skip_first_step_check)
        if facts.uses_autocast:
            raise Refused(
                f"job {facts.job}: under autocast the ranks without a branch do not know the types "
                "of its values; train the model in float32 or float64, or with data(n)"
            )

    def refuse_factors(self, factors: tuple[Strategy, ...]) -> None:
        if others := [each.name for each in factors if each is not self and not each.is_replicated]:
            raise Refused(
                f"branch gives ranks branches of the whole model, and {others[0]} divides that "
                "model; multiply branch with data(n) only"
            )
