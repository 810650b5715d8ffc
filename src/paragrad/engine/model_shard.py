"""From the serial model to the shard that each rank holds of it.

The same interface serves every axis that divides the model, or the domain of its inputs. The module
of a technique has a function `shard_model(strategy, model, example, axis) -> ModelShard`. A
strategy of the user has a method `shard_model(model, example, axis)`.

Both return the shard of this rank. They may change the model. `example` holds the inputs of some
samples. The call is collective over the axis. It raises StepFailed with the module if the model
cannot be divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from paragrad.engine.layout import ShardSpec
from paragrad.errors import StepFailed


class PassContext(Protocol):
    """A context that a technique needs during the forward and backward passes of a step or a test.

    Attributes:
        name: Name of its messages in the record.
        sent_bytes: Bytes that it sent in the last step.
    """

    name: str
    sent_bytes: int

    def enter_passes(self) -> AbstractContextManager[None]:
        """Return the context that surrounds the passes."""
        ...


@dataclass(frozen=True)
class ModelShard:
    """The shard of a model that a rank holds.

    Attributes:
        model: The module of this rank.

        specs: For each parameter and buffer of `model`, by name, which part of which serial tensor
            it is.

        has_output: The output and the loss are on this rank. If they are not, the technique brings
            its own passes.

        draw_calls: For each random call in the forward pass, its index among the calls of the model
            before the division. None: the calls are the same.

        choices: Choices made by measurement, for the record: (what, choice, reason).

        contexts: Contexts that surround the passes.
    """

    model: nn.Module
    specs: Mapping[str, ShardSpec]
    has_output: bool = True
    draw_calls: tuple[int, ...] | None = None
    choices: tuple[tuple[str, str, str], ...] = ()
    contexts: tuple[PassContext, ...] = ()

    @classmethod
    def build_undivided(cls, model: nn.Module) -> ModelShard:
        """Return the shard that is the whole model.

        Args:
            model: A model that no technique has divided.
        """
        return cls(
            model,
            {
                name: ShardSpec(name, tuple(tensor.shape))
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            },
        )

    def compose_with(self, earlier: ModelShard) -> ModelShard:
        """Express this shard of an already divided model as a shard of the serial model.

        Args:
            earlier: The shard from which this one was made.

        Returns:
            The shard in terms of the serial model.

        Raises:
            StepFailed: The shard is malformed, names an unknown tensor, or divides a tensor a
                second time.
        """
        if not isinstance(self.model, nn.Module) or not all(
            isinstance(each, ShardSpec) for each in self.specs.values()
        ):
            raise StepFailed(
                "a shard is ModelShard(model, specs): an nn.Module, and a paragrad.ShardSpec for "
                "each of its parameters and buffers, by name"
            )
        draws = (
            self.draw_calls
            if earlier.draw_calls is None
            else earlier.draw_calls
            if self.draw_calls is None
            else tuple(earlier.draw_calls[call] for call in self.draw_calls)
        )
        if unknown := [name for name, each in self.specs.items() if each.name not in earlier.specs]:
            raise StepFailed(
                f"the spec of {unknown[0]} names {self.specs[unknown[0]].name}, which the "
                "model does not have"
            )
        specs = {
            name: each.compose_with(earlier.specs[each.name]) for name, each in self.specs.items()
        }
        return ModelShard(
            self.model,
            specs,
            self.has_output and earlier.has_output,
            draws,
            earlier.choices + self.choices,
            earlier.contexts + self.contexts,
        )
