"""Looking at a model without touching it: forwards and backwards that leave nothing behind; the
search for a value that is not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import call_model, clone_batch
from paragrad.engine.activation_meter import check_tensor_version, find_storage
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.rng.draws import DrawRecorder, Draws, inspect_draws
from paragrad.engine.rng.random_kernels import use_draw_source
from paragrad.jobs.loss import LossModule
from paragrad.runtime.generators import fingerprint_generators


@dataclass(frozen=True)
class Probe:
    """What one forward and backward showed."""

    has_unused_parameters: bool  # a trainable parameter got no gradient
    # bytes for each sample that backward keeps besides parameters
    activation_bytes: int
    weight_known: bool  # the weight of the loss is more than the number of samples
    has_batch_norm: bool  # a batch norm took statistics
    coarsest_eps: float  # eps of the coarsest real numbers that backward keeps
    is_linear: bool  # gradients grow as the loss does
    draws: Draws
    changed_by_forward: tuple[
        str, ...
    ] = ()  # parameters that are not trained, and that forwards change
    # parameters in whose place a forward puts others, or that it makes
    replaced_parameters: tuple[str, ...] = ()

    def __or__(self, other: Probe) -> Probe:
        """What two ranks' looks show together."""
        return Probe(
            self.has_unused_parameters or other.has_unused_parameters,
            max(self.activation_bytes, other.activation_bytes),
            self.weight_known and other.weight_known,
            self.has_batch_norm or other.has_batch_norm,
            max(self.coarsest_eps, other.coarsest_eps),
            self.is_linear and other.is_linear,
            self.draws | other.draws,
            tuple(sorted({*self.changed_by_forward, *other.changed_by_forward})),
            tuple(sorted({*self.replaced_parameters, *other.replaced_parameters})),
        )


class SavedActivations:
    """What a forward keeps for its backward: bytes by address, and the eps of its coarsest real
    numbers.
    """

    def __init__(self) -> None:
        self.bytes_by_address: dict[int, int] = {}
        self.coarsest_eps = 0.0

    def record_saved_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward."""
        return torch.autograd.graph.saved_tensors_hooks(
            self._record_tensor, lambda kept: check_tensor_version(*kept)
        )

    def _record_tensor(self, tensor: Tensor) -> tuple[Tensor, int]:
        self.coarsest_eps = max(
            self.coarsest_eps, torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        )
        self.bytes_by_address |= dict(filter(None, [find_storage(tensor)]))
        return tensor, tensor._version

    def count_without_parameters(self, module: nn.Module) -> int:
        """Bytes that are not its parameters."""
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
) -> Probe:
    """One forward and backward of the module on copies of its inputs; what it leaves behind is
    the caller's (`untouched`).

    norm: entered by the caller;  repeated(n): (inputs, target) of a batch that is n times one
    sample.
    """
    kept = SavedActivations()

    def ran(hooks: contextlib.AbstractContextManager[Any]) -> tuple[DrawRecorder, bool]:
        with hooks, use_draw_source(DrawRecorder()) as recording, _record_tensor_hooks() as hooked:
            total, _ = module(*clone_batch((inputs, target)), samples)
            own = bool(hooked) or _has_hooks(module) or _has_python_functions(total)
            total.backward(retain_graph=own)
            return recording, not own or _is_linear(module, total)

    before = fingerprint_generators()
    try:
        recording, linear = ran(kept.record_saved_tensors())
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        # torch.func takes no such hooks: what backward keeps stays unknown
        kept = SavedActivations()
        before = fingerprint_generators()
        recording, linear = ran(contextlib.nullcontext())
    some_unused = any(
        parameter.requires_grad and parameter.grad is None for parameter in module.parameters()
    )
    draws = Draws()
    if recording.calls or recording.own_generators or fingerprint_generators() != before:
        # what loading draws is no matter of the model's
        batches = {count: make_repeated_batch(count) for count in (2, 3)}
        # what one sample weighs is no matter
        draws = inspect_draws(lambda count: module(*clone_batch(batches[count]), 0))
    return Probe(
        some_unused,
        kept.count_without_parameters(module) // max(samples, 1),
        module.has_known_weight,
        batch_norm.has_computed,
        kept.coarsest_eps,
        linear,
        draws,
    )


# ---- what is not linear in a gradient: hooks and autograd functions that clip it, or divide it by
# its norm
@contextlib.contextmanager
def _record_tensor_hooks() -> Iterator[list[Tensor]]:
    """The hidden tensors that get a hook."""
    noted: list[Tensor] = []
    original = Tensor.register_hook

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        noted.append(tensor)
        return original(tensor, hook)

    Tensor.register_hook = register_hook  # type: ignore[method-assign, assignment]
    try:
        yield noted
    finally:
        Tensor.register_hook = original  # type: ignore[method-assign]


def _has_hooks(module: nn.Module) -> bool:
    return any(parameter._backward_hooks for parameter in module.parameters()) or any(
        each._backward_hooks or each._backward_pre_hooks for each in module.modules()
    )


def _has_python_functions(total: Tensor) -> bool:
    """Is a function in Python in its graph?"""
    waiting = [total.grad_fn]
    met = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        met.add(node)
        waiting += [each for each, _ in node.next_functions]
    return False


def _is_linear(module: nn.Module, total: Tensor) -> bool:
    """Is the gradient of a sixteenth of the loss a sixteenth of its gradient?"""
    first = [None if each.grad is None else each.grad.clone() for each in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = None
    try:
        total.backward(total.new_tensor(2.0**-4))
    except RuntimeError:  # a graph that goes backward once
        return True
    return all(
        one is None
        or each.grad is None
        or torch.allclose(16 * each.grad, one, rtol=1e-3, atol=0.0, equal_nan=True)
        for one, each in zip(first, module.parameters(), strict=True)
    )


@contextlib.contextmanager
def use_model_eval_mode(model: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards every module is in the mode it was in (a frozen batch norm stays
    frozen).
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def find_nonfinite_tensor(model: nn.Module, inputs: Any, target: Any) -> str:
    """The first tensor with a value that is not finite: inputs, target, parameters, buffers,
    then outputs in forward order.
    """
    named = {
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
