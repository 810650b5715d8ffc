"""From a call of one of torch's functions to its work and depth: the shapes it was given, and
which gradients are wanted.

The table is by function, not by module: every module's forward calls these functions, so
`nn.Linear`, `functional.linear` and a layer of the user's own that calls it are counted by the
same line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paragrad.datasets.loading import tensors_of
from paragrad.planner import layer_costs, sequence_costs
from paragrad.planner.layer_costs import Passes


@dataclass(frozen=True)
class Counted:
    """What one call does. kind: its row of the published table;  weights: the tensors whose
    gradient is the third pass; again: the gradient of the inputs is made from the inputs as
    well, not from that of the output and the weights alone.
    """

    kind: str
    passes: Passes
    inputs: Sequence[Tensor]
    weights: Sequence[Tensor] = ()
    again: bool = False


def wanted(tensor: Any) -> bool:
    """A gradient will be made of it."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def _there(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _linear(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Counted:
    outputs, inputs = weight.shape if weight.dim() == 2 else (1, len(weight))
    passes = layer_costs.linear(
        input.numel() // inputs, inputs, outputs, bias is not None, wanted(weight)
    )
    return Counted("fully connected", passes, [input], _there(weight, bias))


def _matmul(out: Tensor, input: Tensor, other: Tensor, **_: Any) -> Counted:
    inputs, weights = _sides((input, other))
    passes = layer_costs.matmul(out.numel(), input.shape[-1], _sizes(inputs), _sizes(weights))
    return Counted("matrix product", passes, inputs, weights, again=True)


def _sides(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What was computed, and what is a parameter or a view of one."""
    weights = [
        each for each in tensors if isinstance(each, Parameter) or isinstance(each._base, Parameter)
    ]
    return [each for each in tensors if not any(each is weight for weight in weights)], weights


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [each.numel() for each in tensors if wanted(each)]


def _each_dim(value: Any, dims: int) -> tuple[int, ...]:
    given = tuple(value) if isinstance(value, tuple | list) else (value,)
    return given * dims if len(given) == 1 else given


def _conv(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Counted:
    dims = weight.dim() - 2
    samples = input.shape[0] if input.dim() == weight.dim() else 1
    found = layer_costs.Convolution(
        samples,
        weight.shape[1] * groups,
        weight.shape[0],
        input.shape[-dims:],
        out.shape[-dims:],
        weight.shape[2:],
        _each_dim(stride, dims),
        _each_dim(dilation, dims),
        groups,
    )
    return Counted(
        "convolution", found.passes(bias is not None, wanted(weight)), [input], _there(weight, bias)
    )


def _conv_transpose(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Counted:
    dims = weight.dim() - 2
    samples = input.shape[0] if input.dim() == weight.dim() else 1
    found = layer_costs.Convolution(
        samples,
        weight.shape[1] * groups,
        weight.shape[0],
        out.shape[-dims:],
        input.shape[-dims:],
        weight.shape[2:],
        _each_dim(stride, dims),
        _each_dim(dilation, dims),
        groups,
    )
    return Counted(
        "convolution",
        found.transposed(bias is not None, wanted(weight)),
        [input],
        _there(weight, bias),
    )


def _activation(out: Tensor, input: Tensor, *_: Any, **__: Any) -> Counted:
    return Counted("activation", layer_costs.activation(out.numel()), [input], again=True)


def _dropout(
    out: Tensor, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Counted:
    return Counted("dropout", layer_costs.activation(out.numel() if training and p else 0), [input])


def _softmax(out: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Counted:
    width = input.shape[-1 if dim is None else dim] if input.dim() else 1
    return Counted(
        "softmax", layer_costs.softmax(out.numel() // max(width, 1), width), [input], again=True
    )


def _pool(dims: int, average: bool) -> Callable[..., Counted]:
    def pool(
        out: Any, input: Tensor, kernel_size: Any, stride: Any = None, *_: Any, **__: Any
    ) -> Counted:
        kernel = _each_dim(kernel_size, dims)
        steps = _each_dim(kernel if stride is None or stride == [] else stride, dims)
        overlap = prod(-(-size // step) for size, step in zip(kernel, steps, strict=True))
        outputs = tensors_of(out)[0].numel()
        return Counted(
            "pooling",
            layer_costs.pooling(outputs, outputs * prod(kernel), prod(kernel), overlap, average),
            [input],
            again=not average,
        )

    return pool


def _adaptive_pool(dims: int, average: bool) -> Callable[..., Counted]:
    def pool(out: Any, input: Tensor, *_: Any, **__: Any) -> Counted:
        result = tensors_of(out)[0]
        terms = prod(result.shape[:-dims])
        channels = terms
        window = 1
        overlap = 1
        for size, places in zip(input.shape[-dims:], result.shape[-dims:], strict=True):
            windows = [
                (place * size // places, -(-(place + 1) * size // places))
                for place in range(places)
            ]
            terms *= sum(stop - start for start, stop in windows)
            window *= max(stop - start for start, stop in windows)
            overlap *= max(
                sum(start <= place < stop for start, stop in windows) for place in range(size)
            )
        outputs = channels * prod(result.shape[-dims:])
        return Counted(
            "pooling",
            layer_costs.pooling(outputs, terms, window, overlap, average),
            [input],
            again=not average,
        )

    return pool


def _norm(
    kind: str,
    input: Tensor,
    terms: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: bool = True,
    measured: bool = True,
) -> Counted:
    weights = 0 if weight is None else weight.numel()
    passes = layer_costs.normalization(
        input.numel(), terms, weights, bias is not None, mean, measured
    )
    return Counted(kind, passes, [input], _there(weight, bias), again=True)


def _batch_norm(
    out: Tensor,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> Counted:
    return _norm(
        "batch norm", input, input.numel() // input.shape[1], weight, bias, measured=training
    )


def _instance_norm(
    out: Tensor,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    *_: Any,
    **__: Any,
) -> Counted:
    return _norm(
        "normalization", input, prod(input.shape[2:]), weight, bias, measured=use_input_stats
    )


def _group_norm(
    out: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Counted:
    return _norm("normalization", input, prod(input.shape[1:]) // num_groups, weight, bias)


def _layer_norm(
    out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Counted:
    return _norm("normalization", input, prod(normalized_shape), weight, bias)


def _rms_norm(
    out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Counted:
    return _norm("normalization", input, prod(normalized_shape), weight, None, mean=False)


def _embedding(out: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Counted:
    return Counted(
        "embedding", layer_costs.embedding(input.numel(), weight.shape[1]), [input], [weight]
    )


def _recurrent(kind: str) -> Callable[..., Counted]:
    def recurrent(out: Any, input: Tensor, *rest: Any) -> Counted:
        # packed: data [tokens, inputs], how many sequences each step has, ...
        if not isinstance(rest[2], bool):
            sizes, states, weights, bias, count, dropout, training, both = rest[:8]
            tokens = len(input)
            steps = len(sizes)
            samples = int(sizes[0])
        else:
            states, weights, bias, count, dropout, training, both, first = rest[:8]
            steps = input.shape[1 if first and input.dim() == 3 else 0]
            tokens = input.numel() // input.shape[-1]
            samples = tokens // max(steps, 1)
        state = states[0] if isinstance(states, tuple | list) else states
        cell = sequence_costs.CELLS[kind]
        hidden = weights[0].shape[0] // cell.gates
        found = sequence_costs.Recurrent(
            cell,
            tokens,
            samples,
            steps,
            input.shape[-1],
            hidden,
            count,
            2 if both else 1,
            bias,
            state.shape[-1] if state.shape[-1] != hidden else 0,
            bool(dropout and training),
            wanted(input),
            wanted(state),
        )
        return Counted("recurrent", found.passes(), [input], weights, again=True)

    return recurrent


def _cell(kind: str) -> Callable[..., Counted]:
    def cell(out: Any, input: Tensor, state: Any, *weights: Tensor) -> Counted:
        before = state[0] if isinstance(state, tuple | list) else state
        samples = input.numel() // input.shape[-1]
        found = sequence_costs.Recurrent(
            sequence_costs.CELLS[kind],
            samples,
            samples,
            1,
            input.shape[-1],
            before.shape[-1],
            bias=len(_there(*weights)) > 2,
            inputs_wanted=wanted(input),
            state_wanted=wanted(before),
        )
        return Counted("recurrent", found.passes(), [input, before], _there(*weights), again=True)

    return cell


def _dot_products(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Counted:
    passes = sequence_costs.dot_products(
        prod(query.shape[:-2]),
        query.shape[-2],
        key.shape[-2],
        query.shape[-1],
        value.shape[-1],
        attn_mask is not None or is_causal,
        dropout_p > 0,
    )
    return Counted("attention", passes, [query, key, value], again=True)


def _multi_head(
    out: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    *rest: Any,
    **named: Any,
) -> Counted:
    in_weight, in_bias, _, _, _, dropout, out_weight, out_bias = rest[:8]
    apart = (
        [named.get(f"{name}_proj_weight") for name in "qkv"]
        if named.get("use_separate_proj_weight")
        else []
    )
    masked = (
        named.get("attn_mask") is not None
        or named.get("key_padding_mask") is not None
        or named.get("is_causal", False)
    )
    passes = sequence_costs.attention(
        query.shape[1] if query.dim() == 3 else 1,
        len(query),
        len(key),
        num_heads,
        [query.shape[-1], key.shape[-1], value.shape[-1]],
        out_bias is not None,
        masked,
        bool(dropout and named.get("training", True)),
        [wanted(each) for each in (query, key, value)],
    )
    weights = _there(in_weight, *apart, in_bias, out_weight, out_bias)
    return Counted("attention", passes, [query, key, value], weights, again=True)


def _pointwise(additive: bool) -> Callable[..., Counted]:
    def pointwise(out: Tensor, *given: Any, **named: Any) -> Counted:
        inputs, weights = _sides(tensors_of((*given, *named.values())))
        passes = layer_costs.pointwise(out.numel(), _sizes(inputs), _sizes(weights), additive)
        return Counted("element-wise", passes, inputs, weights, again=not additive)

    return pointwise


def _reduction(mean: bool) -> Callable[..., Counted]:
    def reduction(out: Tensor, input: Tensor, *_: Any, **__: Any) -> Counted:
        terms = input.numel() // max(out.numel(), 1)
        return Counted("sum", layer_costs.reduction(out.numel(), terms, mean), [input])

    return reduction


ACTIVATIONS = (
    "relu",
    "sigmoid",
    "tanh",
    "gelu",
    "silu",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "softplus",
    "mish",
    "logsigmoid",
    "log_sigmoid",
    "softsign",
    "tanhshrink",
    "hardshrink",
    "softshrink",
    "threshold",
    "relu6",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "abs",
    "neg",
    "square",
    "sin",
    "cos",
    "erf",
    "clamp",
    "reciprocal",
    "pow",
    "rpow",
    "masked_fill",
)
ADDITIVE = ("add", "radd", "iadd", "sub", "rsub", "isub")
ARITHMETIC = (
    "mul",
    "rmul",
    "imul",
    "div",
    "rdiv",
    "idiv",
    "truediv",
    "rtruediv",
    "itruediv",
    "true_divide",
    "where",
    "maximum",
    "minimum",
    "prelu",
)
# what moves numbers, or makes constants: no operation (what gives a view of its input is told
# from its storage)
MOVES = (
    "cat",
    "concat",
    "stack",
    "pad",
    "clone",
    "contiguous",
    "reshape",
    "flatten",
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "long",
    "int",
    "bool",
    "repeat",
    "repeat_interleave",
    "getitem",
    "gather",
    "index_select",
    "take_along_dim",
    "roll",
    "flip",
    "tril",
    "triu",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "new_tensor",
    "copy",
    "fill",
    "zero",
    "cpu",
    "detach",
    "one_hot",
    "expand",
    "pack_padded_sequence",
    "pad_packed_sequence",
    "zeros",
    "ones",
    "full",
    "empty",
    "arange",
)

COUNTED: dict[str, Callable[..., Counted]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "rmatmul": lambda out, a, b: _matmul(out, b, a),
    **{f"conv{dims}d": _conv for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _conv_transpose for dims in (1, 2, 3)},
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
    **{
        f"{kind}_pool{dims}d": _pool(dims, kind == "avg")
        for kind in ("max", "avg")
        for dims in (1, 2, 3)
    },
    **{
        f"adaptive_{kind}_pool{dims}d": _adaptive_pool(dims, kind == "avg")
        for kind in ("max", "avg")
        for dims in (1, 2, 3)
    },
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "embedding": _embedding,
    "lstm": _recurrent("lstm"),
    "gru": _recurrent("gru"),
    "rnn_tanh": _recurrent("rnn"),
    "rnn_relu": _recurrent("rnn"),
    "lstm_cell": _cell("lstm"),
    "gru_cell": _cell("gru"),
    "rnn_tanh_cell": _cell("rnn"),
    "rnn_relu_cell": _cell("rnn"),
    "scaled_dot_product_attention": _dot_products,
    "multi_head_attention_forward": _multi_head,
    **dict.fromkeys(ADDITIVE, _pointwise(True)),
    **dict.fromkeys(ARITHMETIC, _pointwise(False)),
    "sum": _reduction(False),
    "mean": _reduction(True),
}
