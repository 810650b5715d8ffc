"""Lazy modules (nn.LazyLinear, ...): a model has its shapes before an optimizer or an exchange
is built over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from paragrad.datasets.loading import called, copied
from paragrad.engine.probe import evaluating
from paragrad.errors import Refused
from paragrad.trainer.evaluation import without_gradients


@dataclass(frozen=True)
class Initialised:
    """A function that builds a model and gives its lazy modules their shapes and values by one
    forward in eval mode.

    Every rank does it under the job's seed, on the same inputs. Raises Refused where some stay
    without shapes.
    """

    model: Callable[[], nn.Module]
    inputs: Any

    def __call__(self) -> nn.Module:
        model = self.model()
        with evaluating(model):
            without_gradients(lambda: called(model, copied(self.inputs)))
        if left := lazy_names(model):
            raise Refused(
                f"{', '.join(left)} of the model have no shapes after a forward in eval mode; give "
                f"what is used in "
                "training alone its sizes (nn.Linear instead of nn.LazyLinear)"
            )
        return model


def lazy_names(model: nn.Module) -> list[str]:
    """The parameters and buffers of a model that have no shapes yet."""
    return [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if is_lazy(tensor)
    ]
