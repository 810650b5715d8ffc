"""ModelIdentity tells that a model is certainly unchanged, without a comparison of values."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paragrad.trainer.parameter_access import ModelIdentity

pytestmark = pytest.mark.pure


class Net(nn.Module):
    """A model with attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2))
        self.memory = nn.LSTM(2, 3)
        self.sizes = [1, 2]
        self.names = {"a": 1}
        self.shape = (1, ([2], 3))
        self.options = SimpleNamespace(rate=0.5, words=["a"])
        self.scale = 1.0


def make_model() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "number": lambda model, optimizer: setattr(model, "scale", 2.0),
    "new attribute": lambda model, optimizer: setattr(model, "other", None),
    "removed attribute": lambda model, optimizer: delattr(model, "scale"),
    "mode": lambda model, optimizer: model.layers[1].eval(),
    "list": lambda model, optimizer: model.sizes.append(3),
    "list element": lambda model, optimizer: model.sizes.__setitem__(0, 3),
    "list in a tuple": lambda model, optimizer: model.shape[1][0].append(3),
    "dict element": lambda model, optimizer: model.names.update(a=2),
    "attribute of an object": lambda model, optimizer: setattr(model.options, "rate", 0.1),
    "frozen": lambda model, optimizer: model.layers[0].weight.requires_grad_(False),
    "parameter": lambda model, optimizer: setattr(
        model.layers[0], "weight", nn.Parameter(torch.zeros(2, 1, 3, 3))
    ),
    "buffer": lambda model, optimizer: setattr(model.layers[1], "running_mean", torch.zeros(2)),
    "module": lambda model, optimizer: model.layers.append(nn.ReLU()),
    "hook": lambda model, optimizer: model.layers.register_forward_hook(lambda *_: None),
    "group": lambda model, optimizer: optimizer.add_param_group(
        {"params": [torch.zeros(1, requires_grad=True)]}
    ),
    "parameter of a group": lambda model, optimizer: optimizer.param_groups[0]["params"].pop(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    model, optimizer = make_model()
    identity = ModelIdentity(model, optimizer)
    assert identity.is_unchanged()
    CHANGES[name](model, optimizer)
    assert not identity.is_unchanged()


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1), torch.Generator(), {1}, [{1}], (torch.ones(1),)],
    ids=lambda each: str(type(each)),
)
def test_a_value_that_may_change_in_place_is_never_certain(value: object) -> None:
    model, optimizer = make_model()
    model.register_module("other", nn.Identity())
    model.other.value = value
    assert not ModelIdentity(model, optimizer).is_unchanged()


def test_values_of_buffers_and_parameters_do_not_count() -> None:
    model, optimizer = make_model()
    identity = ModelIdentity(model, optimizer)
    model.layers(torch.ones(1, 1, 3, 3))
    with torch.no_grad():
        model.layers[0].weight.add_(1)
    assert identity.is_unchanged()
