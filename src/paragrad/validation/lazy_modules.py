"""Lazy modules (nn.LazyLinear, ...).

Their shapes are set before an optimizer or an exchange is built over the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from paragrad.datasets.loading import clone_batch
from paragrad.engine.probe import use_model_eval_mode
from paragrad.errors import Refused
from paragrad.jobs.loss import call_model
from paragrad.trainer.evaluation import call_without_gradients


@dataclass(frozen=True)
class LazyModelBuilder:
    """A function that builds a model and sets the shapes of its lazy modules.

    One forward in eval mode gives them shapes and values. Every rank runs it under the job's seed,
    on the same inputs. A call raises Refused if some modules stay without shapes.

    Attributes:
        model_function: The function that builds the model.
        inputs: The inputs of the forward.
    """

    model_function: Callable[[], nn.Module]
    inputs: Any

    def __call__(self) -> nn.Module:
        model = self.model_function()
        with use_model_eval_mode(model):
            call_without_gradients(lambda: call_model(model, clone_batch(self.inputs)))
        if lazy_names := list_lazy_tensors(model):
            raise Refused(
                f"{', '.join(lazy_names)} of the model have no shapes after a forward in eval "
                "mode; give their sizes to the modules that only training uses (nn.Linear instead "
                "of nn.LazyLinear)"
            )
        return model


def list_lazy_tensors(model: nn.Module) -> list[str]:
    """List the parameters and buffers of a model that have no shapes yet."""
    return [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if is_lazy(tensor)
    ]
