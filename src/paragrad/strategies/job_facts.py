"""The facts about a job and its optimizer that a strategy uses in validation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from paragrad.errors import Refused


class OptimizerFacts(ABC):
    """Facts about an optimizer, of a job or of a user's own training loop.

    Validation finds them (`validation/inspected_job.py`). A property is found when it is first
    read, because it needs the optimizer, and perhaps a trial.

    Attributes:
        optimizer: Its name.

        update_granularity: How it updates: one of UPDATE_GRANULARITIES.

        has_modes: Whether it has weights for training and others for evaluation.

        keeps_copies: Whether it continues from copies of the weights that it keeps.

        sgd_groups: The parameter groups, if it steps as torch's SGD; otherwise None.

        clip_norm: The norm to which gradients are clipped, or None.
    """

    clip_norm: float | None

    @property
    @abstractmethod
    def optimizer(self) -> str: ...

    @property
    @abstractmethod
    def update_granularity(self) -> str: ...

    @property
    @abstractmethod
    def has_modes(self) -> bool: ...

    @property
    @abstractmethod
    def keeps_copies(self) -> bool: ...

    @property
    @abstractmethod
    def sgd_groups(self) -> Sequence[Mapping[str, Any]] | None: ...


class JobFacts(OptimizerFacts):
    """Facts about a job, with those about its optimizer.

    An attribute `..._refusal` is a text that says why something is impossible, or None. A property
    is found when it is first read, because it needs samples, a model or a run.

    Attributes:
        job: Its name.

        samples: The samples of the training set.

        full_batch: The samples of a full batch.

        batch_sizes: The samples of a full batch, and of a shorter last one.

        steps: The steps of the training.

        micro_batch_refusal: Why a batch cannot be divided into micro-batches.

        additivity_refusal: Why the loss of a batch is not that of its parts.

        layout_refusal: Which random draws differ if a batch is divided.

        repeatability_refusal: Why the same samples, or their loss, differ from one time to the
            next.

        optimizer_refusal: Why the optimizer cannot be built again over the same parameters.

        single_sample_refusal: Why the model cannot train on a single sample.

        replaced_parameters: The parameters that a forward replaces by others, or creates.

        other_generators: Generators that draws in the model advance, besides those of torch's
            kernels.

        uses_autocast: Whether forwards run under autocast.

        trained_elements: The number of elements of all trained parameters.
    """

    job: str
    samples: int
    full_batch: int
    batch_sizes: tuple[int, ...]
    steps: int
    additivity_refusal: str | None
    layout_refusal: str | None
    replaced_parameters: tuple[str, ...]
    other_generators: tuple[str, ...]
    uses_autocast: bool
    trained_elements: int

    @property
    @abstractmethod
    def micro_batch_refusal(self) -> str | None: ...

    @property
    @abstractmethod
    def repeatability_refusal(self) -> str | None: ...

    @property
    @abstractmethod
    def optimizer_refusal(self) -> str | None: ...

    @property
    @abstractmethod
    def single_sample_refusal(self) -> str | None: ...


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
            f"{requested} averages parameters by their names, and a forward of job {facts.job} "
            f"replaces, ties or makes {facts.replaced_parameters[0]}; do that in __init__, and "
            "change values in place"
        )
