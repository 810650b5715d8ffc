"""Models that read their own state."""

from __future__ import annotations

from torch import Tensor, nn


class ByState(nn.Sequential):
    """A model that reads a parameter through `state_dict`, which no check of paragrad watches."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            super().forward(x)
            + self.state_dict(keep_vars=True)["0.weight"].detach().square().mean()
        )  # type: ignore[no-any-return]
