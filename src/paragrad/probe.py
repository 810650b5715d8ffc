"""Looking at a model without touching it: forwards and backwards that leave nothing behind; the search for a value that is not
finite."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from paragrad.data_parallel.batch_norm import BatchNorm
from paragrad.datasets.loading import called, copied, generator_states, generators_kept
from paragrad.draws import Draws, Recording, seen
from paragrad.kernels import drawing
from paragrad.loss import Summed


@dataclass(frozen=True)
class Probe:
    """What one forward and backward showed."""
    some_unused: bool               # a trainable parameter got no gradient
    activations: int                # bytes for each sample that backward keeps besides parameters
    known: bool                     # the weight of the loss is more than the number of samples
    normed: bool                    # a batch norm took statistics
    draws: Draws

    def __or__(self, other: Probe) -> Probe:
        """What two ranks' looks show together."""
        return Probe(self.some_unused or other.some_unused, max(self.activations, other.activations),
                     self.known and other.known, self.normed or other.normed, self.draws | other.draws)


def probed(module: Summed, inputs: Any, target: Any, samples: int, norm: BatchNorm,
           repeated: Callable[[int], tuple[Any, Any]]) -> Probe:
    """One forward and backward of the module on copies of its inputs; what it leaves behind is the caller's (`untouched`).

    norm: entered by the caller;  repeated(n): (inputs, target) of a batch that is n times one sample.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.update(_storage(tensor))
        return tensor

    def ran(hooks: contextlib.AbstractContextManager[Any]) -> Recording:
        with hooks, drawing(Recording()) as recording:
            total, _ = module(*copied((inputs, target)), samples)
            total.backward()
        return recording

    before = generator_states()
    try:
        recording = ran(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        kept.clear()                    # torch.func takes no such hooks: what backward keeps stays unknown
        before = generator_states()
        recording = ran(contextlib.nullcontext())
    some_unused = any(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    draws = Draws()
    if recording.calls or recording.owners or generator_states() != before:
        batches = {count: repeated(count) for count in (2, 3)}         # what loading draws is no matter of the model's
        draws = seen(lambda count: module(*copied(batches[count]), 0))       # what one sample weighs is no matter
    for parameter in module.parameters():
        kept.update(dict.fromkeys(_storage(parameter), 0))
    return Probe(some_unused, sum(kept.values()) // max(samples, 1), module.known, norm.computed, draws)


def _storage(tensor: Tensor) -> dict[int, int]:
    """Its bytes, by its address; nothing where it has no storage, as a sparse tensor."""
    try:
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()}
    except RuntimeError:
        return {}


# ---- what a forward leaves behind --------------------------------------------------------------------------------------------
@dataclass
class Left:
    """What forwards changed, by name: parameters, and Python state of modules (a counter, a list)."""
    changed: list[str] = field(default_factory=list)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[Left]:
    """Afterwards gradients, buffers, plain Python state and all generators are as they were; `Left` says what else changed."""
    with generators_kept(), torch.random.fork_rng(enabled=torch.cuda.is_available()), restored(model) as left:
        yield left


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[Left]:
    """The same, but for the generators."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    versions = {name: (parameter, parameter._version) for name, parameter in model.named_parameters()}
    buffers = [(module, name, buffer, None if buffer is None else buffer.detach().clone())
               for module in model.modules() for name, buffer in module._buffers.items()]
    plain = {name: _plain_state(module) for name, module in model.named_modules()}
    left = Left()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield left
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, name, buffer, value in buffers:
            if buffer is not None and not torch.equal(buffer, value):
                buffer.data.copy_(value)
            module._buffers[name] = buffer
        left.changed = [name for name, (parameter, version) in versions.items() if parameter._version != version]
        for name, module in model.named_modules():
            left.changed += [f"{name}.{what}".lstrip(".") for what in _put_back(module, plain.get(name, {}))]


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """Copies of a module's own attributes that are plain values."""
    return {name: copy.deepcopy(value) for name, value in vars(module).items() if name[0] != "_" and _plain(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | complex | numpy.ndarray) or (
        isinstance(value, Tensor) and not value.requires_grad)


def _put_back(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """The names of what changed."""
    changed = []
    for name, value in before.items():
        if not _equal(getattr(module, name, None), value):
            changed.append(name)
            setattr(module, name, value)
    return changed


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray) or isinstance(b, numpy.ndarray):
        return bool(numpy.array_equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) or (a != a and b != b)


def first_not_finite(model: nn.Module, inputs: Any, target: Any) -> str:
    """The first tensor with a value that is not finite: inputs, target, parameters, buffers, then outputs in forward order."""
    named = {"inputs": inputs, "target": target, **dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in named.items():
        if not _finite(value):
            return name
    bad: list[str] = []
    hooks = [module.register_forward_hook(lambda _module, _inputs, output, name=name: (
        None if _finite(output) else bad.append(f"output of {name or type(model).__name__}")))
        for name, module in model.named_modules()]
    try:
        called(model.eval(), inputs)        # eval: batch norm in training would wait for the other ranks
    finally:
        for hook in hooks:
            hook.remove()
        model.train()
    return bad[0] if bad else "loss"


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return all(map(_finite, value))
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())
