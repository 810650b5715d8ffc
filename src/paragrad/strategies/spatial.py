"""spatial: every image over ranks, by rows and columns."""

from __future__ import annotations

from paragrad.errors import Refused
from paragrad.notation.choices import Integer, Word, option
from paragrad.runtime.mesh import Axis
from paragrad.strategies.strategy import PER_ELEMENT, PER_TENSOR, Guarantees, Strategy


class Spatial(Strategy):
    """The image split, with halo exchange (Dryden et al. 2019).

    Attributes:
        rows: The number of ranks along the height.

        columns: The number of ranks along the width.

        dense: Whether ranks divide the neurons of fully connected layers (`tensor`).

        batch_norm: Whether statistics are of the whole batch, or of each rank's share.
    """

    rows: int = option(Integer())
    columns: int = option(Integer(), default=1)
    dense: str = option(Word("same", "tensor"), default="same")
    batch_norm: str = option(Word("whole", "share"), default="whole")
    splits_layers = True
    # All ranks see every sample, and run the calls of one worker.
    changes_layout = False

    def check_options(self) -> None:
        if self.dense == "tensor" and self.columns > 1:
            raise Refused(
                "spatial(dense=tensor) divides the neurons of fully connected layers over rows, "
                "not over columns; give "
                f"spatial({self.rows * self.columns}, dense=tensor)"
            )

    @property
    def update_granularity(self) -> str:  # type: ignore[override]
        return PER_ELEMENT if self.dense == "tensor" else PER_TENSOR

    @property
    def workers(self) -> int:
        return self.rows * self.columns

    @property
    def guarantees(self) -> Guarantees:
        whole = self.batch_norm == "whole"
        return Guarantees(exact=whole, buffers_equal=whole)

    @property
    def axes(self) -> tuple[Axis, ...]:
        columns = (Axis("columns", self.columns, "domain"),) if self.columns > 1 else ()
        return (Axis("rows", self.rows, "domain"), *columns)

    def explain_no_schedule(self) -> str:
        return "its ranks fetch from their neighbours what the layers of a job need"

    def refuse_factors(self, factors: tuple[Strategy, ...]) -> None:
        if others := [each.name for each in factors if each is not self and not each.is_replicated]:
            raise Refused(
                f"spatial gives a model pieces of images, and {others[0]} divides that model; "
                "multiply spatial with data(n) only"
            )
        if other := [
            each for each in factors if each is not self and each.batch_norm != self.batch_norm
        ]:
            raise Refused(
                f"batch norm takes its statistics one way: {other[0].name} says "
                f"batch_norm={other[0].batch_norm}, and spatial {self.batch_norm}; give both the "
                "same"
            )
