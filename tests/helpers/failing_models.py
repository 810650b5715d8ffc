"""Models that fail during a training."""

from __future__ import annotations

from torch import Tensor, nn


class Breaks(nn.Module):
    """A model whose middle layer gets infinite input from the fourth call in training on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        scale = float("inf") if self.calls > 3 else 1.0
        return self.last(self.middle(self.first(x) * scale))
