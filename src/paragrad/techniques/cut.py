"""The cut: from the serial model to what each rank holds of it. One for every axis that divides the model, or its domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from paragrad.techniques.layout import Held
from paragrad.world.world import World


@dataclass(frozen=True)
class Share:
    """What a rank holds of a model.

    held: which part of which tensor its parameters and buffers are, by their names in `model`;  gives: the output, and the
    loss, are on this rank (where not, passes are the technique's own);  draws: of every random call in its forward, which call
    of the model before the cut it is; None: the same ones.
    """
    model: nn.Module
    held: Mapping[str, Held]
    gives: bool = True
    draws: tuple[int, ...] | None = None

    @classmethod
    def all_of(cls, model: nn.Module) -> Share:
        """An uncut model."""
        return cls(model, {name: Held(name, tuple(tensor.shape))
                           for name, tensor in [*model.named_parameters(), *model.named_buffers()]})

    def within(self, outer: Share) -> Share:
        """Of a part that an outer cut left, as a part of the serial model."""
        draws = self.draws if outer.draws is None else outer.draws if self.draws is None else tuple(
            outer.draws[call] for call in self.draws)
        held = {name: each.within(outer.held[each.name]) for name, each in self.held.items()}
        return Share(self.model, held, self.gives and outer.gives, draws)


class Cut(Protocol):
    """How a technique divides a model: `share` of its module, or of a strategy of a user's own (`techniques/table.py`)."""

    def __call__(self, model: nn.Module, example: Any, axis: World) -> Share:
        """This rank's share of a model, which may be changed. example: inputs of some samples. Collective over the axis.

        Raises StepFailed with the module where it cannot be divided.
        """
