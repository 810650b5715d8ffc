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

from paragrad.datasets.loading import tensors_of
from paragrad.jobs.loss import Summed
from paragrad.planner.call_costs import COUNTED, MOVES, wanted
from paragrad.planner.layer_costs import NOTHING, Layer, Pass, after, brent


@dataclass(frozen=True)
class Profile:
    """One step of a model: forward and backward of one global batch, without loss and update.

    calls: in the order of the forward;  torch_products: operations in matrix products of the
    same step, loss included, as torch.utils.flop_counter counts them;  not_counted: what was
    seen and is not in the numbers, by name.
    """

    job: str
    batch: int
    calls: tuple[Layer, ...]
    torch_products: int
    not_counted: tuple[str, ...]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The calls, those of one layer in one line: its works and depths added up."""
        found: dict[tuple[str, str, str], Layer] = {}
        for call in self.calls:
            key = call.name, call.kind, call.function
            if key in found:
                output, back, weights = map(after, _passes(found[key]), _passes(call))
                call = Layer(*key, output, back, weights, found[key].calls + 1)
            found[key] = call
        return tuple(found.values())

    @cached_property
    def work(self) -> int:
        """Operations of the step."""
        return sum(each.work for call in self.calls for each in _passes(call))

    @cached_property
    def products(self) -> int:
        """Those of them that are in matrix products."""
        return sum(each.products for call in self.calls for each in _passes(call))

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

    def bounds(self, processors: int) -> tuple[int, int]:
        """Steps at least and at most on so many processors that exchange for nothing
        (Brent).
        """
        return brent(self.work, self.depth, processors)


def _passes(layer: Layer) -> tuple[Pass, Pass, Pass]:
    return layer.output, layer.input_gradient, layer.weight_gradient


def counted(
    module: Summed, inputs: Any, target: Any, samples: int, autocast: torch.dtype | None = None
) -> tuple[list[Layer], int, list[str]]:
    """Run model and loss once: the calls of the model, torch's count of products, and what is
    not counted.
    """
    module.model.train()
    watch = Watch(module.model)
    with unfused() as counter:
        with torch.autocast("cpu", autocast, enabled=autocast is not None), watch:
            total, _ = module(inputs, target, samples)
        trained = [parameter for parameter in module.model.parameters() if parameter.requires_grad]
        torch.autograd.grad(total, trained, allow_unused=True)
    return watch.calls, counter.get_total_flops(), [*watch.missed(), *_own_backwards(total)]


@contextlib.contextmanager
def unfused() -> Iterator[FlopCounterMode]:
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
                display=False, custom_mapping={torch.ops.aten.convolution_backward: _grouped}
            ) as counter,
        ):
            yield counter


def _grouped(*shapes: Any, out_shape: Any = None) -> int:
    """torch counts the gradient of a kernel of g groups as that of one, which has g times as
    many weights.
    """
    groups, (of_input, of_kernel, _) = shapes[9], shapes[10]
    count = sum(
        conv_backward_flop(*shapes[:10], mask, out_val=out_shape) // part
        for mask, part in (([of_input, False, False], 1), ([False, of_kernel, False], groups))
    )
    return int(count)


class Watch(TorchFunctionMode):
    """Notes every call of a torch function inside a model's forward, under the name of the
    module that made it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Layer] = []
        self._inside: list[str] = []
        self._unknown: Counter[tuple[str, str]] = Counter()
        self._seen: set[int] = set()  # parameters that a call was given
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        for name, module in model.named_modules():
            told = f"{name or 'model'} ({type(module).__name__})"
            module.register_forward_pre_hook(lambda *_, told=told: self._inside.append(told))
            module.register_forward_hook(lambda *_: (self._inside.pop(), None)[1])

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self._inside:
            self._note(getattr(function, "__name__", str(function)), args, kwargs, out)
        return out

    def _note(self, function: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        given = tensors_of((*args, kwargs))
        made = tensors_of([out])
        self._seen |= {id(tensor) for tensor in given}
        if not given or not any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in made
        ):
            return  # sizes, constants, masks, positions
        name = function.strip("_")  # relu_, __iadd__
        layer = (
            _layer(self._inside[-1], name, (out, *args), kwargs, made) if name in COUNTED else None
        )
        if layer is not None:
            self.calls += [layer] if layer.output.work or layer.output.bytes else []
        elif name not in MOVES and not _is_view(made, given):
            self._unknown[self._inside[-1], name] += 1

    def missed(self) -> list[str]:
        """Functions that are not in the table, and parameters that no call was given."""
        unseen = [
            name for name, parameter in self._parameters.items() if id(parameter) not in self._seen
        ]
        return [
            *(
                f"{where}: {function}" + (f", {times} times" if times > 1 else "")
                for (where, function), times in self._unknown.items()
            ),
            *(f"{name}: no call with this parameter was seen" for name in unseen),
        ]


def _is_view(made: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    places = {tensor.untyped_storage().data_ptr() for tensor in given}
    return all(tensor.untyped_storage().data_ptr() in places for tensor in made)


def _layer(
    where: str, function: str, args: Sequence[Any], kwargs: dict[str, Any], made: Sequence[Tensor]
) -> Layer | None:
    """The call as a layer, its passes those that are wanted, with the bytes of the tensors that
    each reads and writes once; None for a way of calling the function that is not known.
    """
    try:
        found = COUNTED[function](*args, **kwargs)
    except (TypeError, ValueError, IndexError, AttributeError):
        return None
    output, back, weights = found.passes
    inputs_wanted, weights_wanted = (
        any(map(wanted, tensors)) for tensors in (found.inputs, found.weights)
    )
    # theirs is on the way
    if not inputs_wanted and not (weights_wanted and found.kind in ("recurrent", "attention")):
        back = NOTHING
    inputs, held, outputs = (
        sum(tensor.nbytes for tensor in tensors) for tensors in (found.inputs, found.weights, made)
    )
    # a lookup reads the rows that it finds
    rows = outputs if found.kind == "embedding" else held
    output = replace(output, bytes=inputs + rows + outputs)
    if back.work:
        back = replace(back, bytes=outputs + held + inputs * (2 if found.again else 1))
    weights = replace(weights, bytes=inputs + outputs + held) if weights_wanted else NOTHING
    return Layer(where, found.kind, function, output, back, weights)


def _own_backwards(total: Tensor) -> list[str]:
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
