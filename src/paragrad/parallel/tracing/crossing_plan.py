"""What crosses the cuts of a model: found by one forward without values, for inputs of some
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.parallel.tracing.input_guards import InputGuards
from paragrad.parallel.tracing.sequential_stage import StageModules
from paragrad.parallel.tracing.tracer import ValueId

HIDDEN_TENSOR = (
    "a tensor goes from one module to another in an object that is no tuple, list or dict, or in "
    "an attribute of a "
    "module, where a rank does not see that it comes from another one; let modules give and take "
    "tensors, tuples, lists "
    "and dicts (torch.export.register_dataclass makes your dataclass one), or train it with data(n)"
)

NESTED_TENSORS = (
    "in a test torch's TransformerEncoder takes another way for padding (nested tensors), which "
    "cannot be cut, and gives "
    "zeros in padded places; build it with enable_nested_tensor=False, or train it with data(n)"
)

DIFFERENT_PATH = (
    "the model went another way here than a forward without values did, by which every rank knows "
    "what the others' "
    "modules give: a number that is drawn decided (layer drop), or a value that was looked at "
    "otherwise than by if, "
    "item() or tolist(); multiply by it, or train it with data(n)"
)


@dataclass(frozen=True)
class Crossing:
    """A tensor that goes from one part to the next. strides: of it where it is dense, for a
    module may ask for a view; grad: its gradient comes back.
    """

    value_id: ValueId
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def build_from_tensor(cls, value_id: ValueId, tensor: Tensor) -> Crossing:
        return cls(
            value_id,
            tuple(tensor.shape),
            tuple(torch.empty_like(tensor).stride()),
            tensor.dtype,
            tensor.requires_grad,
        )


@dataclass(frozen=True)
class StandIn:
    """What a call of a unit gave without values, for ranks that do not run it. found: its
    tensors and their places; kept: what its modules have in Python attributes after it.
    """

    name: str
    output: Any
    output_tensors: list[tuple[Tensor, ValueId]]
    attributes: Mapping[tuple[nn.Module, str], Any]


@dataclass
class CrossingPlan:
    """Of inputs of some shapes. crossing: at the end of each part;  stand_ins: of each call of
    a unit;  tape: by which inputs of these shapes are known to go the same way;  writes:
    something is changed in place between units, which may be a stand-in; changes: the model
    changes its inputs in place, which are to be copied for each forward;  straight: parts that
    are modules in turn need not be watched.
    """

    crossing: list[list[Crossing]]
    stand_ins: list[StandIn]
    guards: InputGuards
    writes_in_place: bool
    changes_inputs: bool = False
    sequential_stages: StageModules | None = None
