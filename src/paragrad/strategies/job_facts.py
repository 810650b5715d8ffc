"""The facts about a job and its optimizer that a strategy uses in validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paragrad.errors import Refused


class OptimizerFacts(Protocol):
    """Facts about an optimizer, of a job or of a user's own training loop.

    Attributes:
        optimizer: Its name.

        update_granularity: How it updates: one of UPDATE_GRANULARITIES.

        has_modes: Whether it has weights for training and others for evaluation.

        keeps_copies: Whether it continues from copies of the weights that it keeps.

        sgd_groups: The parameter groups, if it steps as torch's SGD; otherwise None.

        clip_norm: The norm to which gradients are clipped, or None.
    """

    @property
    def optimizer(self) -> str: ...

    @property
    def update_granularity(self) -> str: ...

    @property
    def has_modes(self) -> bool: ...

    @property
    def keeps_copies(self) -> bool: ...

    @property
    def sgd_groups(self) -> Sequence[Mapping[str, Any]] | None: ...

    @property
    def clip_norm(self) -> float | None: ...


class JobFacts(OptimizerFacts, Protocol):
    """Facts about a job, with those about its optimizer.

    An attribute `..._refusal` is a text that says why something is impossible, or None.

    Attributes:
        job: Its name.

        samples: The samples of the training set.

        full_batch: The samples of a full batch.

        steps: The steps of the training.

        micro_batch_refusal: Why a batch cannot be divided into micro-batches.

        additivity_refusal: Why the loss of a batch is not that of its parts.

        layout_refusal: Which random draws differ if a batch is divided.

        repeatability_refusal: Why the same samples, or their loss, differ from one time to the
            next.

        optimizer_refusal: Why the optimizer cannot be built again over the same parameters.

        replaced_parameters: The parameters that a forward replaces by others, or creates.

        batch_sizes: The samples of a full batch, and of a shorter last one.

        single_sample_refusal: Why the model cannot train on a single sample.

        other_generators: Generators that draws in the model advance, besides those of torch's
            kernels.

        uses_autocast: Whether forwards run under autocast.

        trained_elements: The number of elements of all trained parameters.
    """

    @property
    def job(self) -> str: ...

    @property
    def samples(self) -> int: ...

    @property
    def full_batch(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def micro_batch_refusal(self) -> str | None: ...

    @property
    def additivity_refusal(self) -> str | None: ...

    @property
    def layout_refusal(self) -> str | None: ...

    @property
    def repeatability_refusal(self) -> str | None: ...

    @property
    def optimizer_refusal(self) -> str | None: ...

    @property
    def replaced_parameters(self) -> tuple[str, ...]: ...

    @property
    def batch_sizes(self) -> tuple[int, ...]: ...

    @property
    def single_sample_refusal(self) -> str | None: ...

    @property
    def other_generators(self) -> tuple[str, ...]: ...

    @property
    def uses_autocast(self) -> bool: ...

    @property
    def trained_elements(self) -> int: ...


def refuse_replaced_parameters(facts: JobFacts, requested: object) -> None:
    """Refuse replaced parameters for strategies that average weights, which are known by name.

    Args:
        facts: The job.
        requested: The strategy as written, for the message.

    Raises:
        Refused: If a forward of the job replaces or creates a parameter.
    """
    if facts.replaced_parameters:
        raise Refused(
            f"{requested} averages what is known by its name, and a forward of job {facts.job} "
            f"puts another parameter in the place of {facts.replaced_parameters[0]}, ties it or "
            "makes it; do that in __init__, and change values in place"
        )
