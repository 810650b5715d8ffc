"""Job: what to train, in serial words. Nothing in it speaks of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import Collate, Dataset, Samples
from paragrad.datasets.sample_order import SampleOrder
from paragrad.errors import Refused, StepFailed
from paragrad.jobs.loss import Loss, convert_loss
from paragrad.jobs.precision import convert_model
from paragrad.runtime.generators import seed_everything

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# the models that trainings of this process have changed
TRAINED_MODELS: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One serial training. Callables, because every rank builds its own model and optimizer,
    under `seed`.

    model: () -> nn.Module;  loss: the mean over samples (torch's ignore_index understood), or
    f(output, target) -> (sum, weight);  optimizer: parameters -> torch.optim.Optimizer;  train,
    test: map-style datasets of (input, target) or of dicts, or f(data folder) -> dataset;
    batch: the global one, the only one, or "fit": as large as the ranks' memory allows
    (train(..., memory="2GB"));  collate: samples -> batch, where torch's own does not do;
    scheduler: optimizer -> LRScheduler, which counts steps of the global batch;  clip_norm: the
    largest norm of all gradients together;  metric: f(output, target) -> (sum, weight), such as
    paragrad.accuracy;  dtype: float32, float64, or bfloat16 (by autocast: parameters, gradients
    and optimizer stay in float32).

    scale_lr: "linear" or "sqrt" with the batch, from own_batch on, for which optimizer and
    scheduler were chosen (`replace` remembers it);  warm_up: epochs in which the rate gets
    there (`paragrad.optim.Scaled`).

    model(inputs) is called with a sample's input: a tuple in its order, a dict by name. The
    target of a dict is the dict.
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
    clip_norm: float | None = None
    metric: Callable[[Any, Any], tuple[Any, Any]] | None = None
    dtype: torch.dtype = torch.float32
    collate: Collate | None = None
    scale_lr: str | None = None
    warm_up: float = 0.0
    own_batch: int | None = None
    name: str = "job"
    arguments: tuple[tuple[str, Any], ...] = ()  # of a built-in job, for the record

    def replace(self, **changes: Any) -> Job:
        """The same job with some fields changed. Of a batch that is changed it is remembered
        for which one the optimizer is; another optimizer is for the batch that the job has
        then.
        """
        if "optimizer" in changes:
            changes = {"own_batch": None, **changes}
        elif "batch" in changes and self.own_batch is None and self.batch != "fit":
            changes = {"own_batch": self.batch, **changes}
        return replace(self, **changes)

    def build_model(self) -> nn.Module:
        """The model as every rank builds it: under `seed`, in the parameters' type."""
        seed_everything(self.seed)
        model = self.model()
        if not isinstance(model, nn.Module):
            raise Refused(
                f"job {self.name}: model() returned {type(model).__name__}; return a "
                f"torch.nn.Module"
            )
        _apply_train_method(model)
        return convert_model(model, self.parameter_dtype)

    def build_model_to_train(self) -> nn.Module:
        """The same for a training in this process, which is to change it. Raises StepFailed
        where one did already.
        """
        model = self.build_model()
        if model in TRAINED_MODELS:
            raise StepFailed(
                "model() returned a module that was trained before; every training builds its own: "
                "write "
                "model=lambda: Net()"
            )
        TRAINED_MODELS.add(model)
        return model

    def build_loss(self, device: torch.device = CPU) -> Loss:
        """The loss, its own tensors on a device and in the parameters' type."""
        return convert_loss(self.loss, device, self.parameter_dtype)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """What parameters, gradients and optimizer state are kept in."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """What forward and loss are computed in, where it is another type."""
        return self.dtype if self.dtype == torch.bfloat16 else None

    @property
    def metric_name(self) -> str:
        """What the test measures: the metric's name, or the loss."""
        return getattr(self.metric, "__name__", "metric") if self.metric else "loss"

    def make_samples(self, dataset: Dataset) -> Samples:
        """A dataset, drawn from and collated as this job says."""
        return Samples(dataset, self.seed, self.collate)

    def make_order(self, samples: int) -> SampleOrder:
        return SampleOrder(samples, self.batch, self.seed)


def accuracy(output: Tensor, target: Tensor) -> tuple[float, int]:
    """Per cent of targets that have the largest output (class dimension 1 or last of one):
    (sum, weight).
    """
    right = output.argmax(1 if output.dim() > 1 else 0) == target
    return 100.0 * float(right.sum()), right.numel()


def open_dataset(dataset: Dataset | Callable[[Path | None], Dataset], data: Path | None) -> Dataset:
    """The dataset itself, or what its function makes of the data folder."""
    is_dataset = (
        hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__len__")
        and not isinstance(dataset, type)
    )
    return dataset if is_dataset else dataset(data)


def _apply_train_method(model: nn.Module) -> None:
    """As a loop does that begins with model.train(), of which a module may have a way of its
    own (a norm that stays in eval); what was built in eval mode stays in it.
    """
    before = [(module, module.training) for module in model.modules()]
    for module, training in before:
        if type(module).train is not nn.Module.train:
            module.train(training)
    for module, training in before:
        module.training = module.training and training
