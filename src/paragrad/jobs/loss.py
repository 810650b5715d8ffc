"""The loss as (sum, weight), the form that adds up over micro-batches and ranks.

Backward runs on the *share* of a micro-batch in the mean over the global batch: its sum, divided
by the *divisor* of the step (`LossModule.divisor`). If the micro-batch is the whole batch, this is
the very tensor that the loss returned.

A user's loss is a mean over a batch, or a pair f(output, target) -> (sum, weight). The weight of a
mean is what it divided by. Cross-entropy and nll leave out targets equal to ignore_index and weigh
by class, so their weight is counted from the targets. The weight of any other mean is read from its
graph (`loss_divisor.py`). If the graph does not show it, the weight is the number of samples.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.nn import functional

from paragrad.datasets.loading import convert_batch
from paragrad.errors import StepFailed
from paragrad.jobs.loss_divisor import find_loss_divisor, has_zero_weight, make_zero_loss

WIDE_DTYPES = (torch.float32, torch.float64)
# up to so many targets of a batch are counted in a list
LISTED_TARGETS = 512
Loss = Callable[[Any, Any], Any]


def convert_loss(loss: Loss, device: torch.device, dtype: torch.dtype) -> Loss:
    """Move the tensors of a loss, such as class weights, to a device and a type.

    Only a module or a partial shows its tensors; any other loss is returned unchanged.

    Args:
        loss: The loss.
        device: The device.
        dtype: The type of floating point numbers.

    Returns:
        The converted loss.
    """
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).to(device, dtype)
    if isinstance(loss, functools.partial):
        keywords = {
            name: convert_batch(value, device, dtype) for name, value in loss.keywords.items()
        }
        return functools.partial(loss.func, *loss.args, **keywords)
    return loss


def count_target_weight(loss: Loss, target: Any) -> float | None:
    """Count what the mean of torch's own cross-entropy divides by.

    Args:
        loss: The loss.
        target: The targets.

    Returns:
        The weight, or None for any other loss.
    """
    options = _get_cross_entropy_options(loss)
    if options is None or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    ignore_index, class_weight = options
    is_plain = type(target) is Tensor and target.is_cpu and type(ignore_index) is int
    if class_weight is None and is_plain:
        if target.ndim != 1 or len(target) > LISTED_TARGETS:
            return float(numpy.count_nonzero(target.numpy() != ignore_index))
        # After a forward pass, the code of numpy is no longer in the caches of the processor. For a
        # small batch, a list then takes a fifth of the time.
        targets = target.tolist()
        return float(len(targets) - targets.count(ignore_index))
    counted_targets = target != ignore_index
    return float(
        counted_targets.sum()
        if class_weight is None
        else class_weight[target[counted_targets]].sum()
    )


def _get_cross_entropy_options(loss: Loss) -> tuple[int, Tensor | None] | None:
    """(ignore_index, class weights) of a torch cross-entropy, or None for any other loss."""
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return loss.ignore_index, loss.weight
    keywords: dict[str, Any] = {}
    if isinstance(loss, functools.partial):
        keywords = loss.keywords
        loss = loss.func
    if loss in (functional.cross_entropy, functional.nll_loss):
        return keywords.get("ignore_index", -100), keywords.get("weight")
    return None


def describe_bad_loss(value: Any) -> str | None:
    """Describe what is wrong with the kind of value that a loss returned.

    Args:
        value: The returned value.

    Returns:
        The message, or None if nothing is wrong.
    """
    if isinstance(value, tuple):
        if len(value) != 2:
            return (
                f"the loss returned {len(value)} values; return the mean over samples, or a pair "
                "(sum, weight)"
            )
        value = value[0]
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else repr(type(value).__name__)
        )
        return (
            f"the loss returned {shape}; return one number: the mean over samples, or a pair (sum, "
            "weight)"
        )
    return None


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with the inputs of a batch.

    Args:
        model: The model.
        inputs: A dict is passed by name, a tuple or list in order; a named tuple is one argument.

    Returns:
        The output of the model.
    """
    if type(inputs) is Tensor:  # asked first, because the other questions take longer
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return (
        model(*inputs)
        if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields")
        else model(inputs)
    )


class WeighedLoss(NamedTuple):
    """What a loss returned, with its weight.

    Attributes:
        value: The mean, or the sum.

        is_sum: Whether the value is a sum.

        weight: What a mean divided by, or the second of a pair; 0 if no sample counts.
    """

    value: Tensor
    is_sum: bool
    weight: float

    @property
    def sum(self) -> Tensor:
        """The sum of the losses, in float32 or float64."""
        return self.value if self.is_sum else _widen(self.value) * self.weight

    def split_share(self, divisor: float | None, scale: float = 1.0) -> tuple[Tensor, float]:
        """Split the share in a value that the graph has already, and a factor, if possible.

        A backward that begins with the factor does the same arithmetic as one through a
        multiplication, and takes less time.

        Args:
            divisor: As in `compute_share`.
            scale: As in `compute_share`.

        Returns:
            (value, factor).
        """
        if divisor and not self.is_sum and scale == 1.0 and self.value.dtype in WIDE_DTYPES:
            return self.value, self.weight / divisor
        return self.compute_share(divisor, scale), 1.0

    def compute_share(self, divisor: float | None, scale: float = 1.0) -> Tensor:
        """Compute the share of the loss in the mean over the global batch.

        Args:
            divisor: The divisor of the step. None: this loss is that of the whole batch.
            scale: The loss scale of float16.
        """
        share = self._divide(divisor)
        # a loss in float16 would overflow
        return share if scale == 1.0 else _widen(share) * scale

    def _divide(self, divisor: float | None) -> Tensor:
        if not self.is_sum:
            factor = self.weight / divisor if divisor else 1.0
            return self.value if factor == 1.0 else _widen(self.value) * factor
        divisor = divisor or self.weight or 1.0
        return self.value if divisor == 1.0 else self.value / divisor


def read_share(value: Tensor, factor: float) -> float:
    """Return the number of a share, from a value and the factor of its share.

    Args:
        value: The value.
        factor: The factor (`LossModule.share_factor`).
    """
    number: float = value.item()
    if factor == 1.0 or value.dtype == torch.float64:
        return number * factor
    # In double precision the product is exact, so this rounds as torch does in float32.
    return ctypes.c_float(number * ctypes.c_float(factor).value).value


def backpropagate_share(value: Tensor, factor: float) -> None:
    """Run the backward of a share, from a value and the factor of its share.

    Args:
        value: The value.
        factor: The factor (`LossModule.share_factor`).
    """
    # a subclass or a mode may replace Tensor.backward
    is_plain = type(value) is Tensor and not torch._C._is_torch_function_mode_enabled()
    if factor == 1.0 and not is_plain:
        value.backward()
        return
    gradient = torch.full((), factor, dtype=value.dtype, device=value.device)
    if is_plain:
        run_backward((value,), (gradient,))
    else:
        value.backward(gradient)


def run_backward(ends: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of leaves, as `torch.autograd.backward` does.

    `torch.autograd.backward` checks first what does not apply here. The checks take as long as a
    small layer.

    Args:
        ends: Plain tensors, or their edges in the graph.
        gradients: The gradient of each, of its shape and type.
    """
    _engine_run_backward(
        tuple(ends),
        tuple(gradients),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _widen(value: Tensor) -> Tensor:
    """Convert a loss of a narrow type, such as bfloat16, to float32."""
    return (
        value
        if value.dtype in WIDE_DTYPES
        else value.to(torch.promote_types(value.dtype, torch.float32))
    )


class LossModule(nn.Module):
    """Model and loss as one module: from inputs and target to a share of the mean, and its weight.

    Attributes:
        model: The model.

        divisor: By what the sums of this step's micro-batches are divided before backward; equal on
            all ranks that share a mean. None, also outside of steps: by the own weight, so that
            backward runs on what the loss returned.

        scale: By what the shares of this step are multiplied: the loss scale of float16.

        runs_passes: Whether the passes of a step run.

        leaves_factor: Whether these passes get the value of a share, and begin its backward with
            the factor.

        share_factor: The factor of the last share, if `leaves_factor`; otherwise 1.

        has_traced_divisor: Whether the divisor of the mean is read from its graph. If False, the
            weight is the number of samples. None is the state before the first step.

        has_known_weight: Whether the last weight was found, and is not merely the number of
            samples.

        doubtful_weight: The part of the last weight that may come from no label, as with
            `clamp(min=1)` of the number of labels.

        doubtful_total: The sum of doubtful weights since it was last reset.

        is_linear: Whether gradients grow in proportion to the loss, as far as observed.

        loss_dtype: The type of the last loss.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        # in a tuple, so that a loss that is a module is not registered as a part of the model
        self._loss = (loss,)
        self.divisor: float | None = None
        self.scale = 1.0
        self.runs_passes = False
        self.leaves_factor = False
        self.share_factor = 1.0
        self.has_traced_divisor: bool | None = None
        self.has_known_weight = True
        self.doubtful_weight = 0.0
        self.doubtful_total = 0.0
        self.is_linear = True
        self.loss_dtype = torch.float32

    @property
    def loss(self) -> Loss:
        """The loss function."""
        return self._loss[0]

    @property
    def state_owner(self) -> Any:
        """The object with the state of the loss: the loss itself, or the object of its method."""
        return self.loss.__self__ if isinstance(self.loss, types.MethodType) else self.loss

    def wrap_model(self, model: nn.Module, loss: Loss | None = None) -> LossModule:
        """Combine the loss with another model, such as a part of this one.

        Observations of the loss are kept.

        Args:
            model: The other model.
            loss: Another loss, or None for the same.

        Returns:
            The new module.
        """
        other = LossModule(model, loss or self.loss)
        other.adopt_findings(self.has_traced_divisor, self.is_linear)
        return other

    def adopt_findings(self, has_traced_divisor: bool | None, is_linear: bool) -> None:
        """Keep what a probe of the model found.

        Args:
            has_traced_divisor: Whether the divisor of the mean is read from its graph.
            is_linear: Whether gradients grow in proportion to the loss.
        """
        self.has_traced_divisor = has_traced_divisor
        self.is_linear = is_linear

    @contextlib.contextmanager
    def divide_by(self, divisor: float | None, scale: float = 1.0) -> Iterator[None]:
        """Use a divisor while this context is active, and sum the doubtful weights from 0 again.

        Args:
            divisor: As the attribute.
            scale: As the attribute.
        """
        self.start_passes(divisor, scale)
        try:
            yield
        finally:
            self.end_passes()

    def start_passes(
        self, divisor: float | None, scale: float = 1.0, leaves_factor: bool = False
    ) -> None:
        """Use a divisor from here on, and sum the doubtful weights from 0 again.

        Args:
            divisor: As the attribute.
            scale: As the attribute.
            leaves_factor: As the attribute.
        """
        # setting attributes by nn.Module takes microseconds
        self.__dict__.update(
            divisor=divisor,
            scale=scale,
            doubtful_total=0.0,
            runs_passes=True,
            leaves_factor=leaves_factor,
            share_factor=1.0,
        )

    def end_passes(self) -> None:
        """End what `start_passes` began."""
        self.__dict__.update(
            divisor=None, scale=1.0, runs_passes=False, leaves_factor=False, share_factor=1.0
        )

    @property
    def uses_graph_divisor(self) -> bool:
        """Whether the weight of a mean is read from its graph."""
        return (
            self.has_traced_divisor is not False and _get_cross_entropy_options(self.loss) is None
        )

    def forward(self, inputs: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        """Compute the share of some samples in the mean over the global batch, and their weight.

        Args:
            inputs: The inputs of the model.
            target: The targets.
            samples: How many samples count, from the first on; 0 gives everything the weight 0.

        Returns:
            (share, weight); backward runs on the share.
        """
        return self.compute_share(call_model(self.model, inputs), target, samples)

    def compute_loss_sum(self, output: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        """Compute the loss of an output as (sum, weight), for a test.

        Args:
            output: The output of the model.
            target: The targets.
            samples: How many samples count.

        Returns:
            (sum, weight). The weight counts what the loss is a mean of: samples, tokens or
            elements.

        Raises:
            StepFailed: Passes of a step call this; backward runs on shares.
        """
        if self.runs_passes:
            raise StepFailed(
                "the passes compute a sum of losses, and backward runs on shares of the mean; call "
                "compute_share(output, target, samples)",
                tensor="loss",
            )
        weighed = self.weigh_loss(self.loss(output, target), target, samples)
        return weighed.sum, weighed.weight

    def compute_share(self, output: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        """Compute the loss of an output as a share of the mean over the global batch.

        Passes run backward on it. Passes that leave the factor to the backward (`leaves_factor`)
        call `backpropagate_share`.

        Args:
            output: The output of the model.
            target: The targets.
            samples: How many samples count.

        Returns:
            (share, weight).
        """
        return self.share_loss(self.loss(output, target), target, samples)

    def share_loss(self, value: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        """Convert what a loss returned to (share of the mean, weight).

        Args:
            value: The value that the loss returned.
            target: The targets.
            samples: How many samples count.

        Returns:
            (share, weight).
        """
        weighed = self.weigh_loss(value, target, samples)
        if not self.leaves_factor:
            return weighed.compute_share(self.divisor, self.scale), weighed.weight
        share, factor = weighed.split_share(self.divisor, self.scale)
        if factor != self.share_factor:
            self.__dict__["share_factor"] = factor
        return share, weighed.weight

    def weigh_loss(self, value: Any, target: Any, samples: int) -> WeighedLoss:
        """Find the weight of what a loss returned.

        Args:
            value: The value that the loss returned.
            target: The targets.
            samples: How many samples count.

        Raises:
            StepFailed: The value is neither a number nor such a pair.
        """
        is_number = type(value) is Tensor and not value.ndim
        if not is_number and (message := describe_bad_loss(value)):
            raise StepFailed(message, tensor="loss")
        # setting attributes by nn.Module takes microseconds
        self.__dict__.update(
            has_known_weight=True,
            doubtful_weight=0.0,
            loss_dtype=value[0].dtype if isinstance(value, tuple) else value.dtype,
        )
        if isinstance(value, tuple):
            weighed = WeighedLoss(value[0], True, float(value[1]))
        else:
            weighed = WeighedLoss(value, False, self._find_weight(value, target, max(samples, 1)))
        if weighed.weight and samples:
            if self.doubtful_weight:
                self.doubtful_total += self.doubtful_weight
            return weighed
        total = weighed.sum
        if weighed.is_sum and samples and total != 0 and total.isfinite():
            # a sum that counts without weight of its own
            return WeighedLoss(total, True, 0.0)
        if samples and has_zero_weight(total):
            raise StepFailed(
                "the targets of a share all weigh 0, and its loss has a smoothed part, which the "
                "mean divides by that 0; return the pair (sum, weight)",
                tensor="loss",
            )
        # a mean of nothing is 0/0, its sum is 0
        return WeighedLoss(make_zero_loss(total), True, 0.0)

    def _find_weight(self, value: Tensor, target: Any, samples: int) -> float:
        """What a mean divided by."""
        weight = count_target_weight(self.loss, target)
        if weight is None and self.has_traced_divisor is not False and value.requires_grad:
            weight = find_loss_divisor(value)
            if (weight is None or weight <= 1.0) and value.item() == 0.0:
                # a guarded division, or output.sum() * 0: there may be no label
                weight = weight or 1.0
                self.doubtful_weight = weight
            if weight is None and self.has_traced_divisor:
                raise StepFailed(
                    "the divisor of the loss's mean was found in the first step and cannot be "
                    "found in this step; return the pair (sum, weight)",
                    tensor="loss",
                )
        if weight is None:
            self.has_known_weight = False
        return float(samples) if weight is None else weight
