"""What a strategy may ask about a job at the door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paragrad.errors import Refused


class Updating(Protocol):
    """What a strategy may ask about an optimizer, a job's or that of a loop of the user's
    own.
    """

    @property
    def optimizer(self) -> str: ...  # its name

    @property
    def updates_by(self) -> str: ...  # how it updates: one of KINDS

    @property
    # has it weights for training, and others for tests?
    def has_modes(self) -> bool: ...

    @property
    # does it go on from copies of the weights that it keeps?
    def keeps_copies(self) -> bool: ...

    @property
    # of one that steps as torch's SGD
    def groups_of_sgd(self) -> Sequence[Mapping[str, Any]] | None: ...

    @property
    def clip_norm(self) -> float | None: ...  # to which gradients are clipped


class Facts(Updating, Protocol):
    """What a strategy may ask about a job at the door."""

    @property
    def job(self) -> str: ...  # its name

    @property
    def samples(self) -> int: ...  # of the training set

    @property
    def full(self) -> int: ...  # samples of a full batch

    @property
    def steps(self) -> int: ...  # of the training

    @property
    def uncut(self) -> str | None: ...  # why a batch cannot be cut into micro-batches

    @property
    # why the loss of a batch is not that of its parts
    def whole_loss(self) -> str | None: ...

    @property
    # what is drawn otherwise where a batch is divided
    def by_layout(self) -> str | None: ...

    @property
    # why the same samples, or their loss, are not the same twice
    def unsteady(self) -> str | None: ...

    @property
    # why the optimizer cannot be made anew over the same parameters
    def made_once(self) -> str | None: ...

    @property
    # parameters in whose place a forward puts others, or that it makes
    def replaced(self) -> tuple[str, ...]: ...

    @property
    # samples of a full batch, and of a short last one
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def alone(self) -> str | None: ...  # why the model cannot train on one sample alone

    @property
    # generators that draws in the model move, besides torch's kernels
    def drawn_outside(self) -> tuple[str, ...]: ...

    @property
    def casts(self) -> bool: ...  # are forwards run under autocast?

    @property
    def elements(self) -> int: ...  # of all parameters that are trained


def refuse_replaced(facts: Facts, asked: object) -> None:
    """Of those who average weights, which are known by their names."""
    if facts.replaced:
        raise Refused(
            f"{asked} averages what is known by its name, and a forward of job {facts.job} puts "
            f"another parameter in "
            f"the place of {facts.replaced[0]}, ties it or makes it; do that in __init__, and "
            f"change values in place"
        )
