"""What a strategy may ask about a job at the door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paragrad.errors import Refused


class OptimizerFacts(Protocol):
    """What a strategy may ask about an optimizer, a job's or that of a loop of the user's
    own.
    """

    @property
    def optimizer(self) -> str: ...  # its name

    @property
    def update_granularity(self) -> str: ...  # how it updates: one of KINDS

    @property
    # has it weights for training, and others for tests?
    def has_modes(self) -> bool: ...

    @property
    # does it go on from copies of the weights that it keeps?
    def keeps_copies(self) -> bool: ...

    @property
    # of one that steps as torch's SGD
    def sgd_groups(self) -> Sequence[Mapping[str, Any]] | None: ...

    @property
    def clip_norm(self) -> float | None: ...  # to which gradients are clipped


class JobFacts(OptimizerFacts, Protocol):
    """What a strategy may ask about a job at the door."""

    @property
    def job(self) -> str: ...  # its name

    @property
    def samples(self) -> int: ...  # of the training set

    @property
    def full_batch(self) -> int: ...  # samples of a full batch

    @property
    def steps(self) -> int: ...  # of the training

    @property
    def micro_batch_refusal(self) -> str | None: ...  # why a batch cannot be cut into micro-batches

    @property
    # why the loss of a batch is not that of its parts
    def additivity_refusal(self) -> str | None: ...

    @property
    # what is drawn otherwise where a batch is divided
    def layout_refusal(self) -> str | None: ...

    @property
    # why the same samples, or their loss, are not the same twice
    def repeatability_refusal(self) -> str | None: ...

    @property
    # why the optimizer cannot be made anew over the same parameters
    def optimizer_refusal(self) -> str | None: ...

    @property
    # parameters in whose place a forward puts others, or that it makes
    def replaced_parameters(self) -> tuple[str, ...]: ...

    @property
    # samples of a full batch, and of a short last one
    def batch_sizes(self) -> tuple[int, ...]: ...

    @property
    def single_sample_refusal(
        self,
    ) -> str | None: ...  # why the model cannot train on one sample alone

    @property
    # generators that draws in the model move, besides torch's kernels
    def other_generators(self) -> tuple[str, ...]: ...

    @property
    def uses_autocast(self) -> bool: ...  # are forwards run under autocast?

    @property
    def trained_elements(self) -> int: ...  # of all parameters that are trained


def refuse_replaced_parameters(facts: JobFacts, requested: object) -> None:
    """Of those who average weights, which are known by their names."""
    if facts.replaced_parameters:
        raise Refused(
            f"{requested} averages what is known by its name, and a forward of job {facts.job} "
            f"puts "
            f"another parameter in "
            f"the place of {facts.replaced_parameters[0]}, ties it or makes it; do that in "
            f"__init__, and "
            f"change values in place"
        )
