"""Work and depth of a job's model, from one batch of its forward and backward.

It runs a copy of the model and counts every call of a torch function.

    profile = profile_job(job)
    profile.work, profile.depth, profile.parallelism, profile.layers, profile.not_counted
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, conv_backward_flop

from paragrad.datasets.loading import list_batch_tensors
from paragrad.jobs.loss import LossModule
from paragrad.planner.call_costs import ANALYZERS, UNCOUNTED_FUNCTIONS, needs_gradient
from paragrad.planner.layer_costs import (
    NO_COST,
    LayerCost,
    PassCost,
    combine_sequential,
    compute_parallel_bounds,
)


@dataclass(frozen=True)
class JobProfile:
    """One step of a model: forward and backward of one global batch, without loss and update.

    Attributes:
        job: the name of the job.

        batch: samples of the batch.

        calls: costs of the calls, in the order of the forward.

        torch_products: operations in matrix products of the same step, with the loss, as
            torch.utils.flop_counter counts them.

        not_counted: names of what the numbers leave out.
    """

    job: str
    batch: int
    calls: tuple[LayerCost, ...]
    torch_products: int
    not_counted: tuple[str, ...]

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """The calls, with all calls of one layer added up to one entry."""
        layers: dict[tuple[str, str, str], LayerCost] = {}
        for call in self.calls:
            key = call.name, call.kind, call.function
            if key in layers:
                output, input_gradient, weights = map(
                    combine_sequential, _list_passes(layers[key]), _list_passes(call)
                )
                call = LayerCost(*key, output, input_gradient, weights, layers[key].calls + 1)
            layers[key] = call
        return tuple(layers.values())

    @cached_property
    def work(self) -> int:
        """Operations of the step."""
        return sum(each.work for call in self.calls for each in _list_passes(call))

    @cached_property
    def products(self) -> int:
        """Operations of the step that are in matrix products."""
        return sum(each.products for call in self.calls for each in _list_passes(call))

    @cached_property
    def depth(self) -> int:
        """The longest chain if each call needs the one before it.

        This is exact in a sequence, and an upper bound if the model has branches. In backward, the
        gradients of a layer's weights are computed beside those of the layers below it.
        """
        chain = sum(call.output.depth for call in self.calls)
        longest = chain
        for call in reversed(self.calls):
            longest = max(longest, chain + call.weight_gradient.depth)
            chain += call.input_gradient.depth
        return max(longest, chain)

    @property
    def parallelism(self) -> float:
        """W/D: the average number of processors that the step can keep busy."""
        return self.work / max(self.depth, 1)

    def compute_step_bounds(self, processors: int) -> tuple[int, int]:
        """Steps at least and at most on this many processors, if exchanges cost nothing (Brent)."""
        return compute_parallel_bounds(self.work, self.depth, processors)


def _list_passes(layer: LayerCost) -> tuple[PassCost, PassCost, PassCost]:
    return layer.output, layer.input_gradient, layer.weight_gradient


def count_model_calls(
    module: LossModule, inputs: Any, target: Any, samples: int, autocast: torch.dtype | None = None
) -> tuple[list[LayerCost], int, list[str]]:
    """Run model and loss once, and count.

    Args:
        module: the model with its loss.

        inputs: a batch of inputs.

        target: the targets of the batch.

        samples: samples of the batch.

        autocast: the dtype of autocast; None without it.

    Returns:
        (costs of the model's calls, operations in matrix products as torch counts them, names of
        what is not counted).
    """
    module.model.train()
    recorder = CallRecorder(module.model)
    with disable_fused_kernels() as counter:
        with torch.autocast("cpu", autocast, enabled=autocast is not None), recorder:
            total, _ = module(inputs, target, samples)
        trained = [parameter for parameter in module.model.parameters() if parameter.requires_grad]
        torch.autograd.grad(total, trained, allow_unused=True)
    return (
        recorder.calls,
        counter.get_total_flops(),
        [*recorder.list_uncounted(), *_list_custom_backwards(total)],
    )


@contextlib.contextmanager
def disable_fused_kernels() -> Iterator[FlopCounterMode]:
    """Count with torch's counter, with fused kernels disabled.

    The counter does not see the products inside fused LSTMs and attention on a CPU.
    """
    with warnings.catch_warnings():
        # disabling oneDNN warns about missing GPUs
        warnings.simplefilter("ignore", UserWarning)
        with (
            torch.backends.mkldnn.flags(enabled=False),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(
                display=False,
                custom_mapping={torch.ops.aten.convolution_backward: _count_grouped_backward},
            ) as counter,
        ):
            yield counter


def _count_grouped_backward(*shapes: Any, out_shape: Any = None) -> int:
    """Count a convolution's backward; corrects torch's count for groups.

    torch counts the kernel gradient of g groups as that of one group, which has g times as many
    weights.
    """
    groups, (of_input, of_kernel, _) = shapes[9], shapes[10]
    count = sum(
        conv_backward_flop(*shapes[:10], mask, out_val=out_shape) // part
        for mask, part in (([of_input, False, False], 1), ([False, of_kernel, False], groups))
    )
    return int(count)


class CallRecorder(TorchFunctionMode):
    """Records every call of a torch function inside a model's forward, by module name.

    Attributes:
        calls: costs of the calls so far, in their order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[LayerCost] = []
        self._module_stack: list[str] = []
        self._unknown_calls: Counter[tuple[str, str]] = Counter()
        self._seen_tensors: set[int] = set()  # ids of tensors that a call received
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        for name, module in model.named_modules():
            label = f"{name or 'model'} ({type(module).__name__})"
            module.register_forward_pre_hook(
                lambda *_, label=label: self._module_stack.append(label)
            )
            module.register_forward_hook(lambda *_: (self._module_stack.pop(), None)[1])

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self._module_stack:
            self._record_call(getattr(function, "__name__", str(function)), args, kwargs, out)
        return out

    def _record_call(
        self, function: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> None:
        inputs = list_batch_tensors((*args, kwargs))
        results = list_batch_tensors([out])
        self._seen_tensors |= {id(tensor) for tensor in inputs}
        if not inputs or not any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in results
        ):
            return  # sizes, constants, masks and positions cost nothing
        name = function.strip("_")  # such as relu_ and __iadd__
        layer = (
            _build_layer_cost(self._module_stack[-1], name, (out, *args), kwargs, results)
            if name in ANALYZERS
            else None
        )
        if layer is not None:
            self.calls += [layer] if layer.output.work or layer.output.bytes else []
        elif name not in UNCOUNTED_FUNCTIONS and not _is_view(results, inputs):
            self._unknown_calls[self._module_stack[-1], name] += 1

    def list_uncounted(self) -> list[str]:
        """List functions that the table lacks, and parameters that no recorded call received."""
        unused = [
            name
            for name, parameter in self._parameters.items()
            if id(parameter) not in self._seen_tensors
        ]
        return [
            *(
                f"{module_name}: {function}" + (f", {times} times" if times > 1 else "")
                for (module_name, function), times in self._unknown_calls.items()
            ),
            *(f"{name}: no call with this parameter was seen" for name in unused),
        ]


def _is_view(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    addresses = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return all(tensor.untyped_storage().data_ptr() in addresses for tensor in results)


def _build_layer_cost(
    module_name: str,
    function: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: Sequence[Tensor],
) -> LayerCost | None:
    """Build the cost of a call, with its wanted passes only.

    The bytes of a pass are those of the tensors that it reads and writes, each counted once.
    Returns None if the table does not know this way to call the function.
    """
    try:
        call_cost = ANALYZERS[function](*args, **kwargs)
    except (TypeError, ValueError, IndexError, AttributeError):
        return None
    output, input_gradient, weights = call_cost.passes
    inputs_wanted, weights_wanted = (
        any(map(needs_gradient, tensors)) for tensors in (call_cost.inputs, call_cost.weights)
    )
    # recurrent layers and attention compute the input gradient on the way to that of the weights
    if not inputs_wanted and not (weights_wanted and call_cost.kind in ("recurrent", "attention")):
        input_gradient = NO_COST
    input_bytes, weight_bytes, output_bytes = (
        sum(tensor.nbytes for tensor in tensors)
        for tensors in (call_cost.inputs, call_cost.weights, results)
    )
    # a lookup reads only the rows that it returns
    rows = output_bytes if call_cost.kind == "embedding" else weight_bytes
    output = replace(output, bytes=input_bytes + rows + output_bytes)
    if input_gradient.work:
        input_gradient = replace(
            input_gradient,
            bytes=output_bytes + weight_bytes + input_bytes * (2 if call_cost.reads_inputs else 1),
        )
    weights = (
        replace(weights, bytes=input_bytes + output_bytes + weight_bytes)
        if weights_wanted
        else NO_COST
    )
    return LayerCost(module_name, call_cost.kind, function, output, input_gradient, weights)


def _list_custom_backwards(total: Tensor) -> list[str]:
    """List custom autograd functions.

    The recorder sees the calls of their forward, and not those of their backward.
    """
    names = set()
    reached = set()
    waiting = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        if isinstance(node, BackwardCFunction):
            names.add(f"{type(node).__name__}: the backward of a function of its own")
        waiting += [next_node for next_node, _ in node.next_functions]
    return sorted(names)
