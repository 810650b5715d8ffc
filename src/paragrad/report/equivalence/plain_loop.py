"""A plain PyTorch loop over chosen global batches of a job: what a strategy must equal.

The whole global batch goes through model and loss in one call, backward runs on what the loss
returns, and the optimizer steps. The loop shares with the product the order of samples, their
collation and their random draws, and nothing else.

If batch norm takes statistics of micro-batches, the model runs on the same micro-batches, one after
the other. Their outputs are joined, and the loss is still one call. If outputs cannot be joined (a
model that returns its own loss), the losses are weighed as the product does.
"""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from paragrad.datasets.loading import (
    Dataset,
    clone_batch,
    convert_batch,
    separate_target,
    slice_batch,
)
from paragrad.engine.layout import OptimizerState
from paragrad.engine.loss_additivity import disable_batch_statistics
from paragrad.engine.optimizer.modes import has_modes, set_optimizer_mode
from paragrad.engine.optimizer.optimizer_state import (
    copy_unsaved_values,
    list_unsaved_state,
    load_parameter_state,
)
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.rng.draws import Draws, ReplicatedDraws, key_draws
from paragrad.jobs.job import Job
from paragrad.jobs.loss import LossModule, call_model
from paragrad.runtime.generators import keep_generators
from paragrad.strategies.shares import Division, split_micro_batches


@dataclass(frozen=True)
class MicroBatchPart:
    """The part of a global batch that goes through the model in one call.

    Attributes:
        inputs: the inputs of the model.
        target: the target of the loss.
        places: the places of the samples in the global batch.
    """

    inputs: Any
    target: Any
    places: list[int]


class GatheredState(NamedTuple):
    """What another training of the job needs to go on from a step.

    Attributes:
        tensors: parameters and buffers by name.
        optimizer_state: the optimizer's state by parameter.
        groups: the optimizer's groups, without parameters.
        steps: the completed steps.
    """

    tensors: Mapping[str, Tensor]
    optimizer_state: OptimizerState
    groups: list[dict[str, Any]]
    steps: int


class PlainLoop:
    """A plain training loop of a job on one worker.

    Args:
        job: the job.

        train: the dataset.

        places: (epoch, positions of a global batch) of each step.

        device: the device of the model.

        draws: the random draws of a forward pass.

        division: how the model's micro-batches are taken from a global batch; their samples are
            those of all shares.

    Attributes:
        job: the job.

        model: the model.

        loss: the loss.

        optimizer: the optimizer.

        scheduler: the scheduler, or None.

        steps: the number of completed steps.

        joins_outputs: whether the loss is one call; False if outputs of micro-batches could not be
            joined, or if the model draws or recomputes.

        loss_deviation: without that, the deviation of the weighed loss from one call in eval mode,
            in the last step; None if unknown.
    """

    def __init__(
        self,
        job: Job,
        train: Dataset,
        places: Iterable[tuple[int, range]],
        device: torch.device,
        draws: Draws | None = None,
        division: Division | None = None,
    ) -> None:
        self.job = job
        self.model = job.build_model_to_train().to(device)
        for module in self.model.modules():
            # on one worker it is a batch norm, and its own forward refuses the CPU
            if isinstance(module, nn.SyncBatchNorm):
                module.forward = types.MethodType(_BatchNorm.forward, module)
        self.optimizer = job.optimizer(self.model.parameters())
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        self.loss = job.build_loss(device)
        self.steps = 0
        self.joins_outputs = True
        self.loss_deviation: float | None = None
        self._device = device
        self._draws = draws or Draws()
        self._division = division or Division()
        self._draw_alike = ReplicatedDraws(job.seed, device)
        self._initial_values = copy_unsaved_values(self.optimizer)
        self._has_modes = has_modes(self.optimizer)
        self._places = iter(places)
        self._batches = self._load_batches(train)

    def step(self) -> float:
        """Train the next global batch; return its mean loss."""
        inputs, target, samples = next(self._batches)
        parts = self.split_batch(inputs, target, samples)
        # a model may change its inputs in place
        whole = clone_batch((inputs, target)) if len(parts) > 1 else None
        if self._has_modes:
            set_optimizer_mode(self.optimizer, "train")
        self.model.zero_grad()
        loss = self._run_passes(parts, whole, samples)
        if not self.joins_outputs:
            self.loss_deviation = self._measure_loss_deviation(whole, samples)
        if self.job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
        self._draw_alike("update", self.steps, self.optimizer.step)
        if self.scheduler is not None:
            self._draw_alike("schedule", self.steps, self.scheduler.step)
        self.steps += 1
        return loss

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients as the last update used them."""
        return {name: each.grad for name, each in self.model.named_parameters()}

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {name: each.detach() for name, each in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Return the parameters and the buffers by name."""
        return {**self.parameters(), **dict(self.model.named_buffers())}

    @property
    def can_adopt(self) -> bool:
        """Whether all that the optimizer keeps is in its state and its groups."""
        return not list_unsaved_state(self.optimizer, self._initial_values)

    def adopt_training(self, other: GatheredState) -> None:
        """Go on from the state of another training of the job.

        The batches of the steps in between are left out. A scheduler steps as often as they are.

        Args:
            other: The state of the other training.
        """
        parameters = dict(self.model.named_parameters())
        own = {**parameters, **dict(self.model.named_buffers())}
        with torch.no_grad():
            for name, value in other.tensors.items():
                own[name].copy_(value)
        for parameter in parameters.values():
            # the other training may have dropped an entry
            self.optimizer.state.pop(parameter, None)
        for name, values in other.optimizer_state.items():
            # an entry may be a list of tensors, which the other training would change
            load_parameter_state(self.optimizer, parameters[name], copy.deepcopy(values))
        for _ in range(self.steps, other.steps):
            next(self._places)
            if self.scheduler is not None:
                self.scheduler.step()
        for group, values in zip(self.optimizer.param_groups, other.groups, strict=True):
            group.update(copy.deepcopy(values))
        self.steps = other.steps

    def split_batch(self, inputs: Any, target: Any, samples: int) -> list[MicroBatchPart]:
        """Split a global batch into the micro-batches of the model.

        Args:
            inputs: the inputs.
            target: the target.
            samples: number of samples.
        """
        if self._division.micro == 1:
            return [MicroBatchPart(inputs, target, list(range(samples)))]
        groups = [
            list(chain.from_iterable(shares))
            for shares in split_micro_batches(range(samples), self._division)
        ]
        parts = []
        for places in groups:
            part_inputs, part_target = slice_batch((inputs, target), places, samples)
            parts.append(MicroBatchPart(part_inputs, part_target, places))
        return parts

    def _load_batches(self, train: Dataset) -> Iterator[tuple[Any, Any, int]]:
        """Yield (inputs, target, samples) of each global batch."""
        samples = self.job.make_samples(train)
        order = self.job.make_order(train)
        for epoch, positions in self._places:
            indices = order.get_indices(epoch, positions)
            fetched = convert_batch(
                samples[epoch, indices, list(range(len(indices)))],
                self._device,
                self.job.parameter_dtype,
            )
            yield *separate_target(fetched), len(indices)

    def _run_passes(self, parts: list[MicroBatchPart], whole: Any, samples: int) -> float:
        """Run forward and backward of a global batch; return its mean loss."""
        if len(parts) == 1:
            # a module that recomputes draws in backward too
            with self._key_draws(parts[0]):
                with self._use_autocast():
                    output = call_model(self.model, parts[0].inputs)
                    loss = _take_mean(self.loss(output, parts[0].target))
                loss.backward()
            return float(loss.detach())
        if self.joins_outputs and not self._draws:
            loss = self._run_joined_passes(parts)
            if loss is not None:
                return loss
            inputs, target = clone_batch(whole)
            parts = self.split_batch(inputs, target, samples)
        self.joins_outputs = False
        return self._run_weighed_passes(parts)

    def _run_joined_passes(self, parts: list[MicroBatchPart]) -> float | None:
        """Run the loss once over the joined outputs of all parts; return it.

        Returns None, with the model as before, if outputs cannot be joined, or if backward changes
        buffers: what a module recomputes there belongs between the forwards of two parts.
        """
        buffers = list(self.model.buffers())
        initial = [each.clone() for each in buffers]
        loss = None
        with self._use_autocast():
            outputs = [call_model(self.model, part.inputs) for part in parts]
            joined = [_join(each, parts) for each in (outputs, [part.target for part in parts])]
            if all(each is not None for each in joined):
                loss = _take_mean(self.loss(*joined))
        if loss is not None:
            after_forward = [each.clone() for each in buffers]
            loss.backward()
            if all(map(torch.equal, buffers, after_forward)):
                return float(loss.detach())
        for buffer, value in zip(buffers, initial, strict=True):
            buffer.copy_(value)
        self.model.zero_grad()
        return None

    def _run_weighed_passes(self, parts: list[MicroBatchPart]) -> float:
        """Run backward on the sum of each part's losses, and divide by the weight of all."""
        module = LossModule(self.model, self.loss)
        total = 0.0
        weight = 0.0
        for part in parts:
            with self._key_draws(part):
                with self._use_autocast():
                    output = call_model(self.model, part.inputs)
                    value = self.loss(output, part.target)
                    weighed = module.weigh_loss(value, part.target, len(part.places))
                weighed.sum.backward()
            total += float(weighed.sum.detach())
            weight += weighed.weight
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        return total / weight

    def _measure_loss_deviation(self, whole: Any, samples: int) -> float | None:
        """Measure how far the weighed mean over micro-batches is from the loss of the whole batch.

        The model is in eval mode, which mixes no samples. Returns None if the loss cannot be
        computed in eval mode.
        """
        module = LossModule(self.model, self.loss)
        inputs, target = clone_batch(whole)
        parts = self.split_batch(inputs, target, samples)
        inputs, target = whole
        try:
            with (
                use_model_eval_mode(self.model),
                self._use_autocast(),
                keep_generators(),
                disable_batch_statistics(),
            ):
                sums = [
                    module.compute_loss_sum(
                        call_model(self.model, part.inputs), part.target, len(part.places)
                    )
                    for part in (MicroBatchPart(inputs, target, list(range(samples))), *parts)
                ]
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError):
            return None
        (whole_sum, whole_weight), *of_parts = [(float(each.detach()), w) for each, w in sums]
        weight = sum(each[1] for each in of_parts)
        if not weight or not whole_weight:
            return 0.0 if weight == whole_weight else math.inf
        mean = sum(each[0] for each in of_parts) / weight
        expected = whole_sum / whole_weight
        scale = max(abs(expected), sum(abs(each[0]) for each in of_parts) / weight)
        deviation = abs(mean - expected) / scale if scale else 0.0
        return math.inf if math.isnan(deviation) else deviation

    def _use_autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.job.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self.job.autocast)

    def _key_draws(self, part: MicroBatchPart) -> contextlib.AbstractContextManager[Any]:
        return key_draws(
            self._draws, self.job.seed, self.steps, part.places, always=True, strict=False
        )


def _take_mean(value: Any) -> Tensor:
    """Return the mean that a loss stands for."""
    mean: Tensor = value[0] / float(value[1]) if isinstance(value, tuple) else value
    return mean


def _join(values: list[Any], parts: list[MicroBatchPart]) -> Any:
    """Join values of micro-batches along the samples, or return None if they have none."""
    flat = [tree_flatten(value) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        return None
    joined = []
    for leaves in zip(*(each for each, _ in flat), strict=True):
        if all(
            isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(part.places)
            for leaf, part in zip(leaves, parts, strict=True)
        ):
            if len({leaf.shape[1:] for leaf in leaves}) > 1:
                return None
            joined.append(torch.cat(leaves))
        elif any(isinstance(leaf, Tensor) for leaf in leaves) or any(
            leaf != leaves[0] for leaf in leaves
        ):
            return None
        else:
            joined.append(leaves[0])
    return tree_unflatten(joined, flat[0][1])
