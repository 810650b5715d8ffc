"""Inspect a model with forward and backward passes, and search for values that are not finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import clone_batch
from paragrad.engine.activation_meter import check_tensor_version, find_storage
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.rng.draws import DrawRecorder, Draws, inspect_draws, use_draw_source
from paragrad.jobs.loss import LossModule, call_model
from paragrad.runtime.generators import fingerprint_generators


@dataclass(frozen=True)
class Probe:
    """What one forward and backward pass showed.

    Attributes:
        has_unused_parameters: A trainable parameter got no gradient.

        activation_bytes: Bytes per sample that backward keeps, without the parameters.

        weight_known: The weight of the loss is known; it is not only the number of samples.

        has_batch_norm: A batch norm ran in training mode.

        coarsest_eps: The largest eps of the floating-point types that backward keeps.

        is_linear: Gradients grow in proportion to the loss.

        sample_weight: The power of two that is nearest to the weight of a sample in the loss; 0 if
            no sample counted.

        draws: The random calls of a forward pass.

        changed_by_forward: Names of parameters that are not trained and that forward passes change.

        replaced_parameters: Names of parameters that a forward pass replaces or creates.
    """

    has_unused_parameters: bool
    activation_bytes: int
    weight_known: bool
    has_batch_norm: bool
    coarsest_eps: float
    is_linear: bool
    sample_weight: float
    draws: Draws
    changed_by_forward: tuple[str, ...] = ()
    replaced_parameters: tuple[str, ...] = ()

    def __or__(self, other: Probe) -> Probe:
        """Combine what two ranks found."""
        return Probe(
            self.has_unused_parameters or other.has_unused_parameters,
            max(self.activation_bytes, other.activation_bytes),
            self.weight_known and other.weight_known,
            self.has_batch_norm or other.has_batch_norm,
            max(self.coarsest_eps, other.coarsest_eps),
            self.is_linear and other.is_linear,
            max(self.sample_weight, other.sample_weight),
            self.draws | other.draws,
            tuple(sorted({*self.changed_by_forward, *other.changed_by_forward})),
            tuple(sorted({*self.replaced_parameters, *other.replaced_parameters})),
        )


class SavedActivations:
    """Records what a forward pass keeps for its backward pass.

    Attributes:
        bytes_by_address: Bytes of each storage that is kept, by its address.
        coarsest_eps: The largest eps of the floating-point types that are kept.
    """

    def __init__(self) -> None:
        self.bytes_by_address: dict[int, int] = {}
        self.coarsest_eps = 0.0

    def record_saved_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context around a forward pass that records its saved tensors."""
        context: contextlib.AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            self._record_tensor, lambda kept: check_tensor_version(*kept)
        )
        return context

    def _record_tensor(self, tensor: Tensor) -> tuple[Tensor, int]:
        self.coarsest_eps = max(
            self.coarsest_eps, torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        )
        self.bytes_by_address |= dict(filter(None, [find_storage(tensor)]))
        return tensor, tensor._version

    def count_without_parameters(self, module: nn.Module) -> int:
        """Return the bytes that are kept, without those of parameters.

        Args:
            module: The module that owns the parameters.
        """
        parameters = {
            address for address, _ in filter(None, map(find_storage, module.parameters()))
        }
        return sum(
            size for address, size in self.bytes_by_address.items() if address not in parameters
        )


def probe_model(
    module: LossModule,
    inputs: Any,
    target: Any,
    samples: int,
    batch_norm: BatchNorm,
    make_repeated_batch: Callable[[int], tuple[Any, Any]],
    runs_backward: bool = True,
) -> Probe:
    """Run one forward and backward pass of a module on copies of its inputs.

    The caller must undo the changes that the passes make (`preserve_all_state`).

    Args:
        module: The model and the loss.

        inputs: The inputs of a batch.

        target: The target of the batch.

        samples: Number of samples in the batch.

        batch_norm: The batch norm, entered by the caller.

        make_repeated_batch: make_repeated_batch(n) returns (inputs, target) of a batch that repeats
            one sample n times.

        runs_backward: Whether the backward pass runs. Without it nothing is known of unused
            parameters, and hooks on gradients are not called.

    Returns:
        What the passes showed.
    """
    saved = SavedActivations()
    sample_weight = 0.0

    def run_once(hooks: contextlib.AbstractContextManager[Any]) -> tuple[DrawRecorder, bool]:
        nonlocal sample_weight
        with (
            hooks,
            use_draw_source(DrawRecorder()) as recording,
            _record_tensor_hooks() as hooked_tensors,
        ):
            loss, weight = module(*clone_batch((inputs, target)), samples)
            sample_weight = _round_to_power_of_two(weight / max(samples, 1))
            if not runs_backward:
                return recording, True
            has_custom_backward = (
                bool(hooked_tensors) or _has_hooks(module) or _has_python_functions(loss)
            )
            loss.backward(retain_graph=has_custom_backward)
            return recording, not has_custom_backward or _is_linear(module, loss)

    states_before = fingerprint_generators()
    try:
        recording, linear = run_once(saved.record_saved_tensors())
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        # torch.func does not allow saved-tensor hooks: what backward keeps stays unknown
        saved = SavedActivations()
        states_before = fingerprint_generators()
        recording, linear = run_once(contextlib.nullcontext())
    has_unused = runs_backward and any(
        parameter.requires_grad and parameter.grad is None for parameter in module.parameters()
    )
    draws = Draws()
    if recording.calls or recording.own_generators or fingerprint_generators() != states_before:
        # load the batches first: what loading draws is not drawn by the model
        batches = {count: make_repeated_batch(count) for count in (2, 3)}
        # the weight of a sample does not matter here
        draws = inspect_draws(lambda count: module(*clone_batch(batches[count]), 0))
    return Probe(
        has_unused,
        saved.count_without_parameters(module) // max(samples, 1),
        module.has_known_weight,
        batch_norm.has_computed,
        saved.coarsest_eps,
        linear,
        sample_weight,
        draws,
    )


def _round_to_power_of_two(value: float) -> float:
    return 2.0 ** round(math.log2(value)) if 0 < value < math.inf else 0.0


# ---- is backward linear in the gradient? Hooks and autograd functions may clip a gradient, or
# divide it by its norm
@contextlib.contextmanager
def _record_tensor_hooks() -> Iterator[list[Tensor]]:
    """Record the intermediate tensors that get a hook."""
    hooked: list[Tensor] = []
    original = Tensor.register_hook

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        hooked.append(tensor)
        return original(tensor, hook)

    Tensor.register_hook = register_hook
    try:
        yield hooked
    finally:
        Tensor.register_hook = original


def has_parameter_hooks(module: nn.Module) -> bool:
    """Return whether a user has put a hook on a parameter; a copy of the module has none.

    Args:
        module: The module.
    """
    return any(
        not (getattr(hook, "__module__", None) or "").startswith("paragrad.")
        for parameter in module.parameters()
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        for hook in (hooks or {}).values()
    )


def _has_hooks(module: nn.Module) -> bool:
    return has_parameter_hooks(module) or any(
        each._backward_hooks or each._backward_pre_hooks for each in module.modules()
    )


def _has_python_functions(total: Tensor) -> bool:
    """Return whether the graph of a loss contains an autograd function written in Python."""
    pending = [total.grad_fn]
    visited = set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        visited.add(node)
        pending += [each for each, _ in node.next_functions]
    return False


def _is_linear(module: nn.Module, total: Tensor) -> bool:
    """Return whether the gradient of a sixteenth of the loss is a sixteenth of the gradient."""
    full_gradients = [
        None if each.grad is None else each.grad.clone() for each in module.parameters()
    ]
    for parameter in module.parameters():
        parameter.grad = None
    try:
        total.backward(total.new_tensor(2.0**-4))
    except RuntimeError:  # a graph that allows backward only once
        return True
    return all(
        full is None
        or each.grad is None
        or torch.allclose(16 * each.grad, full, rtol=1e-3, atol=0.0, equal_nan=True)
        for full, each in zip(full_gradients, module.parameters(), strict=True)
    )


@contextlib.contextmanager
def use_model_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode; afterwards restore the mode of each module.

    A frozen batch norm stays frozen.

    Args:
        model: The model.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def find_nonfinite_tensor(model: nn.Module, inputs: Any, target: Any) -> str:
    """Find the first tensor with a value that is not finite.

    The order is: inputs, target, parameters, buffers, then outputs in forward order.

    Args:
        model: The model; it runs in eval mode.
        inputs: The inputs of a batch.
        target: The target of the batch.

    Returns:
        The name of the tensor, or "loss" if all of them are finite.
    """
    named: dict[str, Any] = {
        "inputs": inputs,
        "target": target,
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }
    for name, value in named.items():
        if not _is_finite(value):
            return name
    bad: list[str] = []
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: (
                None
                if _is_finite(output)
                else bad.append(f"output of {name or type(model).__name__}")
            )
        )
        for name, module in model.named_modules()
    ]
    try:
        # batch norm in training would wait for the other ranks
        with use_model_eval_mode(model):
            call_model(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return bad[0] if bad else "loss"


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return all(map(_is_finite, value))
    return (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or bool(torch.isfinite(value).all())
    )
