"""What crosses the cuts of a model: found by one forward without values, for inputs of some shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paragrad.techniques.model_parallel.straight import Straight
from paragrad.techniques.model_parallel.tape import Tape
from paragrad.techniques.model_parallel.watch import Place

HIDDEN = ("a tensor goes from one module to another in an object that is no tuple, list or dict, or in an attribute of a "
          "module, where a rank does not see that it comes from another one; let modules give and take tensors, tuples, lists "
          "and dicts (torch.export.register_dataclass makes your dataclass one), or train it with data(n)")

ANOTHER_WAY = ("the model went another way here than a forward without values did, by which every rank knows what the others' "
               "modules give: a number that is drawn decided (layer drop), or a value that was looked at otherwise than by if, "
               "item() or tolist(); multiply by it, or train it with data(n)")


@dataclass(frozen=True)
class Crossing:
    """A tensor that goes from one part to the next. grad: its gradient comes back."""
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


@dataclass
class Plan:
    """Of inputs of some shapes. crossing: at the end of each part;  stand_ins: of each call of a unit its name, its outputs
    without values, and their places;  tape: by which inputs of these shapes are known to go the same way;  changes: the model
    changes its inputs in place, which are to be copied for each forward;  straight: parts that are modules in turn need not be
    watched."""
    crossing: list[list[Crossing]]
    stand_ins: list[tuple[str, Any, list[tuple[Tensor, Place]]]]
    tape: Tape
    changes: bool = False
    straight: Straight | None = None
