"""What crosses from stage to stage, found by a forward without values for given input shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.parallel.tracing.input_guards import InputGuards
from paragrad.parallel.tracing.tracer import ValueId

StageModules = list[list[nn.Module]]  # the modules of each stage

HIDDEN_TENSOR = (
    "a tensor goes from one module to another in an object that is no tuple, list or dict, or in "
    "an attribute of a module, so a rank does not see that it comes from another rank; let "
    "modules give and take tensors, tuples, lists and dicts (torch.export.register_dataclass "
    "makes your dataclass one), or train it with data(n)"
)

NESTED_TENSORS = (
    "in a test torch's TransformerEncoder computes padding in another way (nested tensors), which "
    "cannot be divided, and gives zeros in padded places; build it with "
    "enable_nested_tensor=False, or train it with data(n)"
)

DIFFERENT_PATH = (
    "the model took another path here than in the forward without values, from which every rank "
    "knows what the others' modules give: the path depends on a random number (layer drop), or on "
    "a value that is read otherwise than by if, item() or tolist(); multiply by it, or train it "
    "with data(n)"
)


@dataclass(frozen=True)
class Crossing:
    """A tensor that goes from one stage to the next.

    Attributes:
        value_id: The operation that makes it, and the number of the output.

        shape: Its shape.

        strides: Its strides if it is dense; a module may ask for a view.

        dtype: Its type.

        has_gradient: Whether its gradient comes back.
    """

    value_id: ValueId
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def build_from_tensor(cls, value_id: ValueId, tensor: Tensor) -> Crossing:
        """Describe a tensor that crosses."""
        return cls(
            value_id,
            tuple(tensor.shape),
            tuple(torch.empty_like(tensor).stride()),
            tensor.dtype,
            tensor.requires_grad,
        )


@dataclass(frozen=True)
class StandIn:
    """What a call of a unit returned without values, for ranks that do not run it.

    Attributes:
        name: Name of the unit.
        output: What it returned.
        output_tensors: The tensors of the output, with their value ids.
        attributes: Python attributes of its modules after the call.
    """

    name: str
    output: Any
    output_tensors: list[tuple[Tensor, ValueId]]
    attributes: Mapping[tuple[nn.Module, str], Any]


@dataclass
class CrossingPlan:
    """What crosses for inputs of some shapes.

    Attributes:
        crossing: The tensors at the end of each stage.

        stand_ins: The stand-in of each call of a unit.

        guards: Decide whether other inputs of these shapes take the same path.

        writes_in_place: Whether an operation between units changes something in place, which may be
            a stand-in.

        changes_inputs: Whether the model changes its inputs in place, so that each forward needs a
            copy.

        sequential_stages: The modules of each stage, if stages call modules in turn and need no
            tracing.

        layouts: A cache that `pipeline.stage_messages` fills: the layout of each message.

        reading_stages: Stages that were seen to leave the tensors that they receive unchanged. The
            passes of a pipeline fill it.
    """

    crossing: list[list[Crossing]]
    stand_ins: list[StandIn]
    guards: InputGuards
    writes_in_place: bool
    changes_inputs: bool = False
    sequential_stages: StageModules | None = None
    layouts: dict[tuple[int, bool], Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    reading_stages: set[int] = field(default_factory=set, init=False, compare=False, repr=False)
