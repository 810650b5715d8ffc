"""Work and depth of a job's model: one batch of its forward and backward, on a copy, every call
of torch's functions counted.

    found = profile(job)
    found.work, found.depth, found.parallelism, found.layers, found.not_counted
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

    calls: in the order of the forward;  torch_products: operations in matrix products of the
    same step, loss included, as torch.utils.flop_counter counts them;  not_counted: what was
    seen and is not in the numbers, by name.
    """

    job: str
    batch: int
    calls: tuple[LayerCost, ...]
    torch_products: int
    not_counted: tuple[str, ...]

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """The calls, those of one layer in one line: its works and depths added up."""
        found: dict[tuple[str, str, str], LayerCost] = {}
        for call in self.calls:
            key = call.name, call.kind, call.function
            if key in found:
                output, back, weights = map(
                    combine_sequential, _list_passes(found[key]), _list_passes(call)
                )
                call = LayerCost(*key, output, back, weights, found[key].calls + 1)
            found[key] = call
        return tuple(found.values())

    @cached_property
    def work(self) -> int:
        """Operations of the step."""
        return sum(each.work for call in self.calls for each in _list_passes(call))

    @cached_property
    def products(self) -> int:
        """Those of them that are in matrix products."""
        return sum(each.products for call in self.calls for each in _list_passes(call))

    @cached_property
    def depth(self) -> int:
        """The longest chain if each call needs the one before it: exact in a sequence, an upper
        bound where there are branches.

        Backward, the gradients of a layer's weights are beside those of the layers below it.
        """
        chain = sum(call.output.depth for call in self.calls)
        longest = chain
        for call in reversed(self.calls):
            longest = max(longest, chain + call.weight_gradient.depth)
            chain += call.input_gradient.depth
        return max(longest, chain)

    @property
    def parallelism(self) -> float:
        """W/D: how many processors could be kept busy on average."""
        return self.work / max(self.depth, 1)

    def compute_step_bounds(self, processors: int) -> tuple[int, int]:
        """Steps at least and at most on so many processors that exchange for nothing
        (Brent).
        """
        return compute_parallel_bounds(self.work, self.depth, processors)


def _list_passes(layer: LayerCost) -> tuple[PassCost, PassCost, PassCost]:
    return layer.output, layer.input_gradient, layer.weight_gradient


def count_model_calls(
    module: LossModule, inputs: Any, target: Any, samples: int, autocast: torch.dtype | None = None
) -> tuple[list[LayerCost], int, list[str]]:
    """Run model and loss once: the calls of the model, torch's count of products, and what is
    not counted.
    """
    module.model.train()
    watch = CallRecorder(module.model)
    with disable_fused_kernels() as counter:
        with torch.autocast("cpu", autocast, enabled=autocast is not None), watch:
            total, _ = module(inputs, target, samples)
        trained = [parameter for parameter in module.model.parameters() if parameter.requires_grad]
        torch.autograd.grad(total, trained, allow_unused=True)
    return (
        watch.calls,
        counter.get_total_flops(),
        [*watch.list_uncounted(), *_list_custom_backwards(total)],
    )


@contextlib.contextmanager
def disable_fused_kernels() -> Iterator[FlopCounterMode]:
    """torch's counter, where it sees every product: it does not look into fused LSTMs and
    attention on a CPU.
    """
    with warnings.catch_warnings():
        # the switch of oneDNN speaks of GPUs that are not there
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
    """torch counts the gradient of a kernel of g groups as that of one, which has g times as
    many weights.
    """
    groups, (of_input, of_kernel, _) = shapes[9], shapes[10]
    count = sum(
        conv_backward_flop(*shapes[:10], mask, out_val=out_shape) // part
        for mask, part in (([of_input, False, False], 1), ([False, of_kernel, False], groups))
    )
    return int(count)


class CallRecorder(TorchFunctionMode):
    """Notes every call of a torch function inside a model's forward, under the name of the
    module that made it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[LayerCost] = []
        self._module_stack: list[str] = []
        self._unknown_calls: Counter[tuple[str, str]] = Counter()
        self._seen_tensors: set[int] = set()  # parameters that a call was given
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        for name, module in model.named_modules():
            told = f"{name or 'model'} ({type(module).__name__})"
            module.register_forward_pre_hook(lambda *_, told=told: self._module_stack.append(told))
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
        given = list_batch_tensors((*args, kwargs))
        made = list_batch_tensors([out])
        self._seen_tensors |= {id(tensor) for tensor in given}
        if not given or not any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in made
        ):
            return  # sizes, constants, masks, positions
        name = function.strip("_")  # relu_, __iadd__
        layer = (
            _build_layer_cost(self._module_stack[-1], name, (out, *args), kwargs, made)
            if name in ANALYZERS
            else None
        )
        if layer is not None:
            self.calls += [layer] if layer.output.work or layer.output.bytes else []
        elif name not in UNCOUNTED_FUNCTIONS and not _is_view(made, given):
            self._unknown_calls[self._module_stack[-1], name] += 1

    def list_uncounted(self) -> list[str]:
        """Functions that are not in the table, and parameters that no call was given."""
        unseen = [
            name
            for name, parameter in self._parameters.items()
            if id(parameter) not in self._seen_tensors
        ]
        return [
            *(
                f"{where}: {function}" + (f", {times} times" if times > 1 else "")
                for (where, function), times in self._unknown_calls.items()
            ),
            *(f"{name}: no call with this parameter was seen" for name in unseen),
        ]


def _is_view(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    places = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return all(tensor.untyped_storage().data_ptr() in places for tensor in results)


def _build_layer_cost(
    module_name: str,
    function: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: Sequence[Tensor],
) -> LayerCost | None:
    """The call as a layer, its passes those that are wanted, with the bytes of the tensors that
    each reads and writes once; None for a way of calling the function that is not known.
    """
    try:
        found = ANALYZERS[function](*args, **kwargs)
    except (TypeError, ValueError, IndexError, AttributeError):
        return None
    output, back, weights = found.passes
    inputs_wanted, weights_wanted = (
        any(map(needs_gradient, tensors)) for tensors in (found.inputs, found.weights)
    )
    # theirs is on the way
    if not inputs_wanted and not (weights_wanted and found.kind in ("recurrent", "attention")):
        back = NO_COST
    inputs, held, outputs = (
        sum(tensor.nbytes for tensor in tensors)
        for tensors in (found.inputs, found.weights, results)
    )
    # a lookup reads the rows that it finds
    rows = outputs if found.kind == "embedding" else held
    output = replace(output, bytes=inputs + rows + outputs)
    if back.work:
        back = replace(back, bytes=outputs + held + inputs * (2 if found.reads_inputs else 1))
    weights = replace(weights, bytes=inputs + outputs + held) if weights_wanted else NO_COST
    return LayerCost(module_name, found.kind, function, output, back, weights)


def _list_custom_backwards(total: Tensor) -> list[str]:
    """Functions with a backward of the user's own, of which the forward's calls are seen and
    the backward's are not.
    """
    found = set()
    reached = set()
    waiting = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        if isinstance(node, BackwardCFunction):
            found.add(f"{type(node).__name__}: the backward of a function of its own")
        waiting += [below for below, _ in node.next_functions]
    return sorted(found)
