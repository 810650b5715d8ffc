"""What a strategy may ask about a job at the door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paragrad.errors import Refused


class Updating(Protocol):
    """What a strategy may ask about an optimizer, a job's or that of a loop of the user's own."""

    @property
    def optimizer(self) -> str: ...             # its name

    @property
    def updates_by(self) -> str: ...            # how it updates: one of KINDS

    @property
    def has_modes(self) -> bool: ...            # has it weights for training, and others for tests?

    @property
    def keeps_copies(self) -> bool: ...         # does it go on from copies of the weights that it keeps?

    @property
    def groups_of_sgd(self) -> Sequence[Mapping[str, Any]] | None: ...      # of one that steps as torch's SGD

    @property
    def clip_norm(self) -> float | None: ...    # to which gradients are clipped


class Facts(Updating, Protocol):
    """What a strategy may ask about a job at the door."""

    @property
    def job(self) -> str: ...                   # its name

    @property
    def samples(self) -> int: ...               # of the training set

    @property
    def full(self) -> int: ...                  # samples of a full batch

    @property
    def steps(self) -> int: ...                 # of the training

    @property
    def uncut(self) -> str | None: ...          # why a batch cannot be cut into micro-batches

    @property
    def whole_loss(self) -> str | None: ...     # why the loss of a batch is not that of its parts

    @property
    def by_layout(self) -> str | None: ...      # what is drawn otherwise where a batch is divided

    @property
    def unsteady(self) -> str | None: ...       # why the same samples, or their loss, are not the same twice

    @property
    def made_once(self) -> str | None: ...      # why the optimizer cannot be made anew over the same parameters

    @property
    def replaced(self) -> tuple[str, ...]: ...  # parameters in whose place a forward puts others, or that it makes

    @property
    def sizes(self) -> tuple[int, ...]: ...     # samples of a full batch, and of a short last one

    @property
    def alone(self) -> str | None: ...          # why the model cannot train on one sample alone

    @property
    def drawn_outside(self) -> tuple[str, ...]: ...     # generators that draws in the model move, besides torch's kernels

    @property
    def casts(self) -> bool: ...                # are forwards run under autocast?

    @property
    def elements(self) -> int: ...              # of all parameters that are trained


def refuse_replaced(facts: Facts, asked: object) -> None:
    """Of those who average weights, which are known by their names."""
    if facts.replaced:
        raise Refused(f"{asked} averages what is known by its name, and a forward of job {facts.job} puts another parameter in "
                      f"the place of {facts.replaced[0]}, ties it or makes it; do that in __init__, and change values in place")
