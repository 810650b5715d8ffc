"""Work and depth of one call of a torch function, from its tensor shapes and its wanted gradients.

The table is keyed by function, not by module. Every module's forward calls these functions, so one
entry covers `nn.Linear`, `functional.linear` and a user's layer that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paragrad.datasets.loading import list_batch_tensors
from paragrad.planner import layer_costs, sequence_costs
from paragrad.planner.layer_costs import PassCosts


@dataclass(frozen=True)
class CallCost:
    """The cost of one call of a torch function.

    Attributes:
        kind: the row of the published table (docs/reference/work.md) that the call belongs to.

        passes: costs of the output, of the input gradient and of the weight gradient.

        inputs: tensors with gradients that the second pass computes.

        weights: tensors with gradients that the third pass computes.

        reads_inputs: whether the input gradient also reads the inputs. Otherwise it is computed
            from the output gradient and the weights alone.
    """

    kind: str
    passes: PassCosts
    inputs: Sequence[Tensor]
    weights: Sequence[Tensor] = ()
    reads_inputs: bool = False


def needs_gradient(tensor: Any) -> bool:
    """Tell whether autograd will compute a gradient of this value."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def _drop_missing(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _analyze_linear(
    out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> CallCost:
    outputs, inputs = weight.shape if weight.dim() == 2 else (1, len(weight))
    passes = layer_costs.count_linear(
        input.numel() // inputs, inputs, outputs, bias is not None, needs_gradient(weight)
    )
    return CallCost("fully connected", passes, [input], _drop_missing(weight, bias))


def _analyze_matmul(out: Tensor, input: Tensor, other: Tensor, **_: Any) -> CallCost:
    inputs, weights = _split_parameters((input, other))
    passes = layer_costs.count_matmul(
        out.numel(), input.shape[-1], _list_gradient_sizes(inputs), _list_gradient_sizes(weights)
    )
    return CallCost("matrix product", passes, inputs, weights, reads_inputs=True)


def _split_parameters(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split tensors into (computed values, parameters and views of parameters)."""
    weights = [
        each for each in tensors if isinstance(each, Parameter) or isinstance(each._base, Parameter)
    ]
    return [each for each in tensors if not any(each is weight for weight in weights)], weights


def _list_gradient_sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Element counts of the tensors with a wanted gradient."""
    return [each.numel() for each in tensors if needs_gradient(each)]


def _expand_to_dims(value: Any, dims: int) -> tuple[int, ...]:
    """Expand a scalar or one-element argument of a torch function to one number per dimension."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * dims if len(values) == 1 else values


def _analyze_conv(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> CallCost:
    dims = weight.dim() - 2
    samples = input.shape[0] if input.dim() == weight.dim() else 1
    convolution = layer_costs.Convolution(
        samples,
        weight.shape[1] * groups,
        weight.shape[0],
        input.shape[-dims:],
        out.shape[-dims:],
        weight.shape[2:],
        _expand_to_dims(stride, dims),
        _expand_to_dims(dilation, dims),
        groups,
    )
    return CallCost(
        "convolution",
        convolution.count_passes(bias is not None, needs_gradient(weight)),
        [input],
        _drop_missing(weight, bias),
    )


def _analyze_conv_transpose(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> CallCost:
    dims = weight.dim() - 2
    samples = input.shape[0] if input.dim() == weight.dim() else 1
    convolution = layer_costs.Convolution(
        samples,
        weight.shape[1] * groups,
        weight.shape[0],
        out.shape[-dims:],
        input.shape[-dims:],
        weight.shape[2:],
        _expand_to_dims(stride, dims),
        _expand_to_dims(dilation, dims),
        groups,
    )
    return CallCost(
        "convolution",
        convolution.count_transposed_passes(bias is not None, needs_gradient(weight)),
        [input],
        _drop_missing(weight, bias),
    )


def _analyze_activation(out: Tensor, input: Tensor, *_: Any, **__: Any) -> CallCost:
    return CallCost(
        "activation", layer_costs.count_activation(out.numel()), [input], reads_inputs=True
    )


def _analyze_dropout(
    out: Tensor, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> CallCost:
    return CallCost(
        "dropout", layer_costs.count_activation(out.numel() if training and p else 0), [input]
    )


def _analyze_softmax(
    out: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any
) -> CallCost:
    width = input.shape[-1 if dim is None else dim] if input.dim() else 1
    return CallCost(
        "softmax",
        layer_costs.count_softmax(out.numel() // max(width, 1), width),
        [input],
        reads_inputs=True,
    )


def _make_pool_analyzer(dims: int, average: bool) -> Callable[..., CallCost]:
    def analyze_pool(
        out: Any, input: Tensor, kernel_size: Any, stride: Any = None, *_: Any, **__: Any
    ) -> CallCost:
        kernel = _expand_to_dims(kernel_size, dims)
        steps = _expand_to_dims(kernel if stride is None or stride == [] else stride, dims)
        overlap = prod(-(-size // step) for size, step in zip(kernel, steps, strict=True))
        outputs = list_batch_tensors(out)[0].numel()
        return CallCost(
            "pooling",
            layer_costs.count_pooling(
                outputs, outputs * prod(kernel), prod(kernel), overlap, average
            ),
            [input],
            reads_inputs=not average,
        )

    return analyze_pool


def _make_adaptive_pool_analyzer(dims: int, average: bool) -> Callable[..., CallCost]:
    def analyze_pool(out: Any, input: Tensor, *_: Any, **__: Any) -> CallCost:
        result = list_batch_tensors(out)[0]
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
        return CallCost(
            "pooling",
            layer_costs.count_pooling(outputs, terms, window, overlap, average),
            [input],
            reads_inputs=not average,
        )

    return analyze_pool


def _analyze_norm(
    kind: str,
    input: Tensor,
    terms: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: bool = True,
    batch_statistics: bool = True,
) -> CallCost:
    weights = 0 if weight is None else weight.numel()
    passes = layer_costs.count_normalization(
        input.numel(), terms, weights, bias is not None, mean, batch_statistics
    )
    return CallCost(kind, passes, [input], _drop_missing(weight, bias), reads_inputs=True)


def _analyze_batch_norm(
    out: Tensor,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> CallCost:
    return _analyze_norm(
        "batch norm",
        input,
        input.numel() // input.shape[1],
        weight,
        bias,
        batch_statistics=training,
    )


def _analyze_instance_norm(
    out: Tensor,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    *_: Any,
    **__: Any,
) -> CallCost:
    return _analyze_norm(
        "normalization",
        input,
        prod(input.shape[2:]),
        weight,
        bias,
        batch_statistics=use_input_stats,
    )


def _analyze_group_norm(
    out: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> CallCost:
    return _analyze_norm("normalization", input, prod(input.shape[1:]) // num_groups, weight, bias)


def _analyze_layer_norm(
    out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> CallCost:
    return _analyze_norm("normalization", input, prod(normalized_shape), weight, bias)


def _analyze_rms_norm(
    out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> CallCost:
    return _analyze_norm("normalization", input, prod(normalized_shape), weight, None, mean=False)


def _analyze_embedding(out: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> CallCost:
    return CallCost(
        "embedding", layer_costs.count_embedding(input.numel(), weight.shape[1]), [input], [weight]
    )


def _make_recurrent_analyzer(kind: str) -> Callable[..., CallCost]:
    def analyze_recurrent(out: Any, input: Tensor, *rest: Any) -> CallCost:
        # a packed sequence: data [tokens, inputs], then the number of sequences in each step
        if not isinstance(rest[2], bool):
            sizes, states, weights, bias, layer_count, dropout, training, bidirectional = rest[:8]
            tokens = len(input)
            steps = len(sizes)
            samples = int(sizes[0])
        else:
            states, weights, bias, layer_count, dropout, training, bidirectional, batch_first = (
                rest[:8]
            )
            steps = input.shape[1 if batch_first and input.dim() == 3 else 0]
            tokens = input.numel() // input.shape[-1]
            samples = tokens // max(steps, 1)
        state = states[0] if isinstance(states, tuple | list) else states
        cell = sequence_costs.CELLS[kind]
        hidden = weights[0].shape[0] // cell.gates
        layers = sequence_costs.RecurrentLayers(
            cell,
            tokens,
            samples,
            steps,
            input.shape[-1],
            hidden,
            layer_count,
            2 if bidirectional else 1,
            bias,
            state.shape[-1] if state.shape[-1] != hidden else 0,
            bool(dropout and training),
            needs_gradient(input),
            needs_gradient(state),
        )
        return CallCost("recurrent", layers.count_passes(), [input], weights, reads_inputs=True)

    return analyze_recurrent


def _make_cell_analyzer(kind: str) -> Callable[..., CallCost]:
    def analyze_cell(out: Any, input: Tensor, state: Any, *weights: Tensor) -> CallCost:
        previous_state = state[0] if isinstance(state, tuple | list) else state
        samples = input.numel() // input.shape[-1]
        layers = sequence_costs.RecurrentLayers(
            sequence_costs.CELLS[kind],
            samples,
            samples,
            1,
            input.shape[-1],
            previous_state.shape[-1],
            bias=len(_drop_missing(*weights)) > 2,
            needs_input_gradient=needs_gradient(input),
            needs_state_gradient=needs_gradient(previous_state),
        )
        return CallCost(
            "recurrent",
            layers.count_passes(),
            [input, previous_state],
            _drop_missing(*weights),
            reads_inputs=True,
        )

    return analyze_cell


def _analyze_dot_products(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> CallCost:
    passes = sequence_costs.count_dot_products(
        prod(query.shape[:-2]),
        query.shape[-2],
        key.shape[-2],
        query.shape[-1],
        value.shape[-1],
        attn_mask is not None or is_causal,
        dropout_p > 0,
    )
    return CallCost("attention", passes, [query, key, value], reads_inputs=True)


def _analyze_multi_head(
    out: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    *rest: Any,
    **named: Any,
) -> CallCost:
    in_weight, in_bias, _, _, _, dropout, out_weight, out_bias = rest[:8]
    separate_weights = (
        [named.get(f"{name}_proj_weight") for name in "qkv"]
        if named.get("use_separate_proj_weight")
        else []
    )
    masked = (
        named.get("attn_mask") is not None
        or named.get("key_padding_mask") is not None
        or named.get("is_causal", False)
    )
    passes = sequence_costs.count_attention(
        query.shape[1] if query.dim() == 3 else 1,
        len(query),
        len(key),
        num_heads,
        [query.shape[-1], key.shape[-1], value.shape[-1]],
        out_bias is not None,
        masked,
        bool(dropout and named.get("training", True)),
        [needs_gradient(each) for each in (query, key, value)],
    )
    weights = _drop_missing(in_weight, *separate_weights, in_bias, out_weight, out_bias)
    return CallCost("attention", passes, [query, key, value], weights, reads_inputs=True)


def _make_pointwise_analyzer(additive: bool) -> Callable[..., CallCost]:
    def analyze_pointwise(out: Tensor, *given: Any, **named: Any) -> CallCost:
        inputs, weights = _split_parameters(list_batch_tensors((*given, *named.values())))
        passes = layer_costs.count_pointwise(
            out.numel(), _list_gradient_sizes(inputs), _list_gradient_sizes(weights), additive
        )
        return CallCost("element-wise", passes, inputs, weights, reads_inputs=not additive)

    return analyze_pointwise


def _make_reduction_analyzer(mean: bool) -> Callable[..., CallCost]:
    def analyze_reduction(out: Tensor, input: Tensor, *_: Any, **__: Any) -> CallCost:
        terms = input.numel() // max(out.numel(), 1)
        return CallCost("sum", layer_costs.count_reduction(out.numel(), terms, mean), [input])

    return analyze_reduction


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
# Functions that move numbers or make constants, which counts as no operation. Functions that return
# a view of their input are recognized by their storage.
UNCOUNTED_FUNCTIONS = (
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

ANALYZERS: dict[str, Callable[..., CallCost]] = {
    "linear": _analyze_linear,
    "matmul": _analyze_matmul,
    "mm": _analyze_matmul,
    "bmm": _analyze_matmul,
    "rmatmul": lambda out, a, b: _analyze_matmul(out, b, a),
    **{f"conv{dims}d": _analyze_conv for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _analyze_conv_transpose for dims in (1, 2, 3)},
    **dict.fromkeys(ACTIVATIONS, _analyze_activation),
    **dict.fromkeys(("softmax", "log_softmax"), _analyze_softmax),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _analyze_dropout),
    **{
        f"{kind}_pool{dims}d": _make_pool_analyzer(dims, kind == "avg")
        for kind in ("max", "avg")
        for dims in (1, 2, 3)
    },
    **{
        f"adaptive_{kind}_pool{dims}d": _make_adaptive_pool_analyzer(dims, kind == "avg")
        for kind in ("max", "avg")
        for dims in (1, 2, 3)
    },
    "batch_norm": _analyze_batch_norm,
    "instance_norm": _analyze_instance_norm,
    "group_norm": _analyze_group_norm,
    "layer_norm": _analyze_layer_norm,
    "rms_norm": _analyze_rms_norm,
    "embedding": _analyze_embedding,
    "lstm": _make_recurrent_analyzer("lstm"),
    "gru": _make_recurrent_analyzer("gru"),
    "rnn_tanh": _make_recurrent_analyzer("rnn"),
    "rnn_relu": _make_recurrent_analyzer("rnn"),
    "lstm_cell": _make_cell_analyzer("lstm"),
    "gru_cell": _make_cell_analyzer("gru"),
    "rnn_tanh_cell": _make_cell_analyzer("rnn"),
    "rnn_relu_cell": _make_cell_analyzer("rnn"),
    "scaled_dot_product_attention": _analyze_dot_products,
    "multi_head_attention_forward": _analyze_multi_head,
    **dict.fromkeys(ADDITIVE, _make_pointwise_analyzer(True)),
    **dict.fromkeys(ARITHMETIC, _make_pointwise_analyzer(False)),
    "sum": _make_reduction_analyzer(False),
    "mean": _make_reduction_analyzer(True),
}
