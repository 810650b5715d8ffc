"""The cut: from the serial model to what each rank holds of it. One for every axis that divides
the model, or its domain.

A technique's module has a function `share(strategy, model, example, axis) -> Share`, a strategy
of a user's own a method `share(model, example, axis)`: this rank's share of a model, which may
be changed; example: inputs of some samples. It is collective over the axis, and raises
StepFailed with the module where it cannot be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from paragrad.engine.layout import Held
from paragrad.errors import StepFailed


class Around(Protocol):
    """What a technique that splits layers wants around the forwards and backwards of a step, or
    of a test. name: of its messages in the record;  sent: bytes of them in the last step.
    """

    name: str
    sent: int

    def over(self) -> AbstractContextManager[None]: ...


@contextmanager
def over(around: Iterable[Around], count: Callable[..., None] | None = None) -> Iterator[None]:
    """Around passes. count(name, bytes, computed): told what was sent for them."""
    with ExitStack() as stack:
        for each in around:
            stack.enter_context(each.over())
        yield
    for each in around if count else ():
        count(each.name, each.sent, computed=True)  # type: ignore[misc]


@dataclass(frozen=True)
class Share:
    """What a rank holds of a model.

    held: which part of which tensor its parameters and buffers are, by their names in `model`;
    gives: the output, and the loss, are on this rank (where not, passes are the technique's
    own);  draws: of every random call in its forward, which call of the model before the cut it
    is; None: the same ones;  chose: what was picked by measure, for the record (what, picked,
    because);  around: what is wanted around passes.
    """

    model: nn.Module
    held: Mapping[str, Held]
    gives: bool = True
    draws: tuple[int, ...] | None = None
    chose: tuple[tuple[str, str, str], ...] = ()
    around: tuple[Around, ...] = ()

    @classmethod
    def all_of(cls, model: nn.Module) -> Share:
        """An uncut model."""
        return cls(
            model,
            {
                name: Held(name, tuple(tensor.shape))
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            },
        )

    def after(self, before: Share) -> Share:
        """Of what an earlier cut left, as a share of the serial model."""
        if not isinstance(self.model, nn.Module) or not all(
            isinstance(each, Held) for each in self.held.values()
        ):
            raise StepFailed(
                "a share is Share(model, held): an nn.Module, and a paragrad.Held for each of its "
                "parameters and "
                "buffers, by name"
            )
        draws = (
            self.draws
            if before.draws is None
            else before.draws
            if self.draws is None
            else tuple(before.draws[call] for call in self.draws)
        )
        if strange := [name for name, each in self.held.items() if each.name not in before.held]:
            raise StepFailed(
                f"a cut says that {strange[0]} holds of {self.held[strange[0]].name}, which the "
                f"model does not "
                "have"
            )
        held = {name: each.after(before.held[each.name]) for name, each in self.held.items()}
        return Share(
            self.model,
            held,
            self.gives and before.gives,
            draws,
            before.chose + self.chose,
            before.around + self.around,
        )
