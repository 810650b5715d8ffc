"""Job: what to train, described as serial training. It does not mention ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import Collate, Dataset, Samples
from paragrad.datasets.sample_order import SampleOrder
from paragrad.datasets.sampler import SamplerOrFunction
from paragrad.errors import Refused, StepFailed
from paragrad.jobs.callback import Callback
from paragrad.jobs.loss import Loss, convert_loss
from paragrad.jobs.precision import convert_model
from paragrad.runtime.generators import seed_everything

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)
# models that trainings in this process have changed
TRAINED_MODELS: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One serial training.

    Model, optimizer and scheduler are functions, because each rank builds its own under `seed`. The
    model is called as model(inputs) with the input of a sample: a tuple in order, a dict by name.
    If a sample is a dict, the target is the dict.

    Attributes:
        model: () -> nn.Module.

        loss: The mean over samples (torch's ignore_index is understood), or f(output, target) ->
            (sum, weight).

        optimizer: parameters -> torch.optim.Optimizer.

        train: A map-style dataset of (input, target) or of dicts, a `paragrad.Stream` of these, or
            f(data folder) -> dataset.

        batch: The global batch size. "fit" means as large as the memory of the ranks allows
            (train(..., memory="2GB")).

        epochs: The number of epochs.

        test: The dataset to test with, in the form of `train`, or None.

        seed: The seed of initial parameters, sample order and all random numbers.

        scheduler: optimizer -> LRScheduler.

        scheduler_every: What the scheduler counts: "epoch" or "step" (of the global batch). None is
            refused if the meaning of the scheduler depends on it.

        clip_norm: The largest norm of all gradients together, or None.

        metric: f(output, target) -> (sum, weight), such as paragrad.accuracy.

        lower_is_better: Whether a lower value of the metric is better, as of an error; None: the
            loss is to fall, and a metric to rise.

        dtype: float32, float64, bfloat16, or float16. The last two use autocast: parameters,
            gradients and optimizer state stay in float32. float16 has a loss scale, as
            torch.amp.GradScaler has.

        collate: A function from samples to a batch, where torch's own does not suffice.

        sampler: Which samples an epoch has: f(epoch, generator) -> indices, or a torch Sampler.
            None: each sample once, in random order.

        callbacks: What the run calls at its beginning, after steps and tests, and at its end
            (`paragrad.Callback`).

        scale_lr: "linear" or "sqrt": how the learning rate grows with the batch, starting at
            own_batch.

        warm_up: The number of epochs in which the rate reaches the scaled rate
            (`paragrad.optim.Scaled`).

        own_batch: The batch size that optimizer and scheduler were chosen for; `replace` remembers
            it.

        name: The name of the job.

        arguments: The arguments of a built-in job, for the record.
    """

    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: Callable[[Any], torch.optim.Optimizer]
    train: Dataset | Callable[[Path | None], Dataset]
    batch: int | Any
    epochs: int
    test: Dataset | Callable[[Path | None], Dataset] | None = None
    seed: int = 0
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    scheduler_every: str | None = None
    clip_norm: float | None = None
    metric: Callable[[Any, Any], tuple[Any, Any]] | None = None
    lower_is_better: bool | None = None
    dtype: torch.dtype = torch.float32
    collate: Collate | None = None
    sampler: SamplerOrFunction | None = None
    callbacks: Sequence[Callback] = ()
    scale_lr: str | None = None
    warm_up: float = 0.0
    own_batch: int | None = None
    name: str = "job"
    arguments: tuple[tuple[str, Any], ...] = ()

    def replace(self, **changes: Any) -> Job:
        """Return the same job with some fields changed.

        If the batch changes, own_batch keeps the batch that the optimizer was chosen for. A new
        optimizer belongs to the batch that the job then has.

        Args:
            **changes: The new values of fields.

        Returns:
            The new job.
        """
        if "optimizer" in changes:
            changes = {"own_batch": None, **changes}
        elif "batch" in changes and self.own_batch is None and self.batch != "fit":
            changes = {"own_batch": self.batch, **changes}
        return replace(self, **changes)

    def build_model(self) -> nn.Module:
        """Build the model as each rank does: under `seed`, in the type of the parameters.

        Returns:
            The model.

        Raises:
            Refused: model() did not return a module.
        """
        seed_everything(self.seed)
        model = self.model()
        if not isinstance(model, nn.Module):
            raise Refused(
                f"job {self.name}: model() returned {type(model).__name__}; return a "
                "torch.nn.Module"
            )
        _apply_train_method(model)
        return convert_model(model, self.parameter_dtype)

    def build_model_to_train(self) -> nn.Module:
        """Build the model for a training in this process, which will change it.

        Returns:
            The model.

        Raises:
            StepFailed: A training has already changed this model.
        """
        model = self.build_model()
        if model in TRAINED_MODELS:
            raise StepFailed(
                "model() returned a module that was trained before; every training builds its "
                "own: write model=lambda: Net()"
            )
        TRAINED_MODELS.add(model)
        return model

    def build_loss(self, device: torch.device = CPU) -> Loss:
        """Build the loss with its own tensors on a device and in the type of the parameters.

        Args:
            device: The device.

        Returns:
            The loss.
        """
        return convert_loss(self.loss, device, self.parameter_dtype)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The type of parameters, gradients and optimizer state."""
        return torch.float32 if self.dtype in AUTOCAST_DTYPES else self.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """The type in which forward and loss are computed, if it differs from `parameter_dtype`."""
        return self.dtype if self.dtype in AUTOCAST_DTYPES else None

    @property
    def metric_name(self) -> str:
        """The name of the test value: the metric's name, or loss."""
        return getattr(self.metric, "__name__", "metric") if self.metric else "loss"

    @property
    def wants_lower_tests(self) -> bool:
        """Whether a lower test value is better."""
        return self.metric is None if self.lower_is_better is None else self.lower_is_better

    def make_samples(self, dataset: Dataset) -> Samples:
        """Combine a dataset with the seed and the collate of this job.

        Args:
            dataset: A map-style dataset.

        Returns:
            The samples.
        """
        return Samples(dataset, self.seed, self.collate)

    def make_order(self, dataset: Dataset) -> SampleOrder:
        """Make the order of samples for a dataset.

        Args:
            dataset: The dataset; its length matters, and whether it is a Stream.

        Returns:
            The order.
        """
        return SampleOrder.build(dataset, self.batch, self.seed, self.sampler)


def accuracy(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Count the targets with the largest output, in per cent.

    Args:
        output: The scores; classes are dimension 1, or the last of a single dimension.
        target: The class numbers.

    Returns:
        (sum, weight): 100 times the number of right targets, and the number of targets.

    Examples:
        >>> import torch
        >>> import paragrad as pg
        >>> scores = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
        >>> pg.accuracy(scores, torch.tensor([1, 1]))
        (100.0, 2)
    """
    right = output.argmax(1 if output.dim() > 1 else 0) == target
    return 100.0 * float(right.sum()), right.numel()


def open_dataset(dataset: Dataset | Callable[[Path | None], Dataset], data: Path | None) -> Dataset:
    """Return a dataset, or what its function makes of the data folder.

    Args:
        dataset: A dataset, or f(data folder) -> dataset.
        data: The data folder.

    Returns:
        The dataset.
    """
    is_dataset = (
        hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__len__")
        and not isinstance(dataset, type)
    )
    return dataset if is_dataset else dataset(data)


def _apply_train_method(model: nn.Module) -> None:
    """Apply model.train() as a training loop does.

    A module may have a train method of its own, such as a norm that stays in eval mode. A module
    that was built in eval mode stays in it.
    """
    modes = [(module, module.training) for module in model.modules()]
    for module, training in modes:
        if type(module).train is not nn.Module.train:
            module.train(training)
    for module, training in modes:
        module.training = module.training and training
