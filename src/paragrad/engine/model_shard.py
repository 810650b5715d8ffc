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

from paragrad.engine.layout import ShardSpec
from paragrad.errors import StepFailed


class PassContext(Protocol):
    """What a technique that splits layers wants around the forwards and backwards of a step, or
    of a test. name: of its messages in the record;  sent: bytes of them in the last step.
    """

    name: str
    sent_bytes: int

    def enter_passes(self) -> AbstractContextManager[None]: ...


@contextmanager
def enter_pass_contexts(
    contexts: Iterable[PassContext], count_bytes: Callable[..., None] | None = None
) -> Iterator[None]:
    """Around passes. count(name, bytes, computed): told what was sent for them."""
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each.enter_passes())
        yield
    for each in contexts if count_bytes else ():
        count_bytes(each.name, each.sent_bytes, computed=True)  # type: ignore[misc]


@dataclass(frozen=True)
class ModelShard:
    """What a rank holds of a model.

    held: which part of which tensor its parameters and buffers are, by their names in `model`;
    gives: the output, and the loss, are on this rank (where not, passes are the technique's
    own);  draws: of every random call in its forward, which call of the model before the cut it
    is; None: the same ones;  chose: what was picked by measure, for the record (what, picked,
    because);  around: what is wanted around passes.
    """

    model: nn.Module
    specs: Mapping[str, ShardSpec]
    has_output: bool = True
    draw_calls: tuple[int, ...] | None = None
    choices: tuple[tuple[str, str, str], ...] = ()
    contexts: tuple[PassContext, ...] = ()

    @classmethod
    def build_undivided(cls, model: nn.Module) -> ModelShard:
        """An uncut model."""
        return cls(
            model,
            {
                name: ShardSpec(name, tuple(tensor.shape))
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            },
        )

    def compose_with(self, earlier: ModelShard) -> ModelShard:
        """Of what an earlier cut left, as a share of the serial model."""
        if not isinstance(self.model, nn.Module) or not all(
            isinstance(each, ShardSpec) for each in self.specs.values()
        ):
            raise StepFailed(
                "a share is Share(model, held): an nn.Module, and a paragrad.Held for each of its "
                "parameters and "
                "buffers, by name"
            )
        draws = (
            self.draw_calls
            if earlier.draw_calls is None
            else earlier.draw_calls
            if self.draw_calls is None
            else tuple(earlier.draw_calls[call] for call in self.draw_calls)
        )
        if strange := [name for name, each in self.specs.items() if each.name not in earlier.specs]:
            raise StepFailed(
                f"a cut says that {strange[0]} holds of {self.specs[strange[0]].name}, which the "
                f"model does not "
                "have"
            )
        held = {
            name: each.compose_with(earlier.specs[each.name]) for name, each in self.specs.items()
        }
        return ModelShard(
            self.model,
            held,
            self.has_output and earlier.has_output,
            draws,
            earlier.choices + self.choices,
            earlier.contexts + self.contexts,
        )
