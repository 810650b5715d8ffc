"""Work and depth of layers that read sequences.

These are attention and recurrent layers. The longest chain of a recurrent layer grows with the
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.planner.layer_costs import (
    NO_COST,
    PassCost,
    PassCosts,
    combine_parallel,
    combine_sequential,
    compute_sum_depth,
    count_elementwise,
    count_products,
    count_softmax,
    count_sums,
)


@dataclass(frozen=True, slots=True)
class RecurrentCell:
    """The operations of one recurrent cell.

    Attributes:
        gates: matrices of a cell.

        operations: element-wise operations per hidden number and step; backward has as many.

        forward: how many of them follow one another between two products, in forward.

        backward: the same in backward.
    """

    gates: int
    operations: int
    forward: int
    backward: int


# Element-wise operations of each cell:
# rnn: add, tanh
# lstm: four gates (add, squash), f c, i g, their sum, tanh c, o tanh c
# gru: two gates (add, squash), r h, add, tanh, n + z (h - n)
CELLS = {
    "rnn": RecurrentCell(1, 2, 2, 2),
    "lstm": RecurrentCell(4, 13, 6, 6),
    "gru": RecurrentCell(3, 10, 8, 7),
}


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """Recurrent layers over a batch of sequences.

    Attributes:
        cell: the kind of cell.

        tokens: steps of all sequences together.

        samples: number of sequences.

        steps: steps of the longest sequence.

        inputs: numbers per step of the input.

        hidden: numbers per step of the hidden state.

        layers: number of layers.

        directions: 1 or 2.

        bias: whether there are biases.

        projection_size: numbers of the projected state that an LSTM passes on; 0 without
            projection.

        dropout: whether there is dropout between layers.

        needs_input_gradient: whether the gradient of the inputs is wanted.

        needs_state_gradient: whether the gradient of the initial state is wanted.
    """

    cell: RecurrentCell
    tokens: int
    samples: int
    steps: int
    inputs: int
    hidden: int
    layers: int = 1
    directions: int = 1
    bias: bool = True
    projection_size: int = 0
    dropout: bool = False
    needs_input_gradient: bool = True
    needs_state_gradient: bool = False

    def count_passes(self) -> PassCosts:
        """The cost of the three passes.

        Layers of one direction follow each other step by step, like a wave. A layer of two
        directions waits for the whole layer before it.
        """
        input_gradient, chain = self._count_input_gradient()
        weights = combine_sequential(
            *(self._count_weight_gradient(layer) for layer in range(self.layers))
        )
        return (
            self._count_output(),
            input_gradient,
            PassCost(
                weights.work, chain + 1 + compute_sum_depth(self.tokens), products=weights.products
            ),
        )

    @property
    def _state_size(self) -> int:
        return self.projection_size or self.hidden

    def _count_layer_inputs(self, layer: int) -> int:
        """Numbers that a layer reads per step."""
        return self._state_size * self.directions if layer else self.inputs

    def _count_output(self) -> PassCost:
        gates = self.cell.gates * self.hidden
        of_state = count_products(self.tokens * gates, self._state_size, self.bias)
        tail = PassCost(self.tokens * self.cell.operations * self.hidden, self.cell.forward)
        if self.projection_size:
            tail = combine_sequential(
                tail, count_products(self.tokens * self.projection_size, self.hidden)
            )
        reads = [
            count_products(self.tokens * gates, self._count_layer_inputs(layer), self.bias)
            for layer in range(self.layers)
        ]
        step = of_state.depth + tail.depth
        first_depths = [max(read.depth, of_state.depth) + tail.depth for read in reads]
        if self.directions == 1:
            depth = (
                first_depths[0]
                + (self.steps - 1) * step
                + sum(read.depth + tail.depth for read in reads[1:])
            )
        else:
            depth = sum(first + (self.steps - 1) * step for first in first_depths)
        total = combine_sequential(
            *(
                combine_sequential(read, of_state, tail)
                for _ in range(self.directions)
                for read in reads
            ),
            self._count_dropout(),
        )
        return PassCost(total.work, depth + self._count_dropout().depth, products=total.products)

    def _count_dropout(self) -> PassCost:
        """The cost of dropout between the layers."""
        layer_cost = count_elementwise(
            self.tokens * self._state_size * self.directions if self.dropout else 0
        )
        return combine_sequential(*[layer_cost] * (self.layers - 1))

    def _count_input_gradient(self) -> tuple[PassCost, int]:
        """The cost of the gradients of gates, states and inputs, and a chain length.

        The chain ends at the last gate's gradient. The weight gradients start there, so they need
        this chain even if no input gradient is wanted.
        """
        gates = self.cell.gates * self.hidden
        tail = PassCost(self.tokens * self.cell.operations * self.hidden, self.cell.backward)
        if self.projection_size:
            tail = combine_sequential(
                count_products(self.tokens * self.hidden, self.projection_size), tail
            )
        earlier_tokens = self.tokens if self.needs_state_gradient else self.tokens - self.samples
        of_state = count_products(earlier_tokens * self._state_size, gates)
        reads = [
            count_products(self.tokens * self._count_layer_inputs(layer), gates)
            for layer in range(self.layers)
        ]
        if not self.needs_input_gradient:
            reads[0] = NO_COST
        direction_sums = [
            count_elementwise(
                self.tokens * self._count_layer_inputs(layer)
                if self.directions == 2 and (layer or self.needs_input_gradient)
                else 0
            )
            for layer in range(self.layers)
        ]
        layer_gradients = [
            combine_sequential(read, of_state, tail)
            for _ in range(self.directions)
            for read in reads
        ]
        total = combine_sequential(*layer_gradients, *direction_sums, self._count_dropout())
        # the depth of one product, to the step before or to the layer below
        move = 1 + compute_sum_depth(gates)
        between_layers = (
            (self.layers - 1) * (move + tail.depth)
            + sum(each.depth for each in direction_sums[1:])
            + self._count_dropout().depth
        )
        along_steps = (self.steps - 1) * (move + tail.depth)
        chain = (
            tail.depth + between_layers + along_steps * (1 if self.directions == 1 else self.layers)
        )
        last = max(
            reads[0].depth + direction_sums[0].depth, move if self.needs_state_gradient else 0
        )
        return PassCost(total.work, chain + last, products=total.products), chain

    def _count_weight_gradient(self, layer: int) -> PassCost:
        gates = self.cell.gates * self.hidden
        biases = count_sums(2 * gates if self.bias else 0, self.tokens)  # torch has two biases
        direction_cost = combine_sequential(
            count_products(gates * self._count_layer_inputs(layer), self.tokens),
            count_products(gates * self._state_size, self.tokens),
            biases,
            count_products(self.projection_size * self.hidden, self.tokens),
        )
        return combine_sequential(*[direction_cost] * self.directions)


def count_dot_products(
    heads: int,
    queries: int,
    keys: int,
    width: int,
    value: int,
    mask: bool = False,
    dropout: bool = False,
) -> PassCosts:
    """The cost of scaled dot-product attention.

    [heads, queries, width], [heads, keys, width], [heads, keys, value] -> [heads, queries, value],
    with the heads of all samples together. A mask saves no operations, as torch counts it.

    Args:
        heads: heads of all samples together.

        queries: length of the query sequence.

        keys: length of the key sequence.

        width: numbers of a query and of a key.

        value: numbers of a value.

        mask: whether a mask is added.

        dropout: whether there is dropout of the weights.
    """
    scores = heads * queries * keys
    weights, weights_back, _ = count_softmax(heads * queries, keys)
    optional = combine_sequential(
        count_elementwise(scores, int(mask)), count_elementwise(scores, int(dropout))
    )
    output = combine_sequential(
        count_elementwise(heads * queries * width),
        count_products(scores, width),
        optional,
        weights,
        count_products(heads * queries * value, keys),
    )
    to_both = combine_parallel(
        combine_sequential(
            count_products(heads * queries * width, keys),
            count_elementwise(heads * queries * width),
        ),
        count_products(heads * keys * width, queries),
    )
    input_gradient = combine_parallel(
        combine_sequential(
            count_products(scores, value),
            count_elementwise(scores, int(dropout)),
            weights_back,
            to_both,
        ),
        count_products(heads * keys * value, queries),
    )
    return output, input_gradient, NO_COST


def count_attention(
    samples: int,
    queries: int,
    keys: int,
    heads: int,
    widths: Sequence[int],
    bias: bool = True,
    mask: bool = False,
    dropout: bool = False,
    needs_gradients: Sequence[bool] = (True, True, True),
) -> PassCosts:
    """The cost of multi-head attention. Each head has its part of the model's width.

    The average of the weights over the heads is not counted.

    Args:
        samples: number of samples.

        queries: length of the query sequence.

        keys: length of the key sequence.

        heads: heads of one sample.

        widths: widths of query (the model's), key and value.

        bias: whether there are biases.

        mask: whether a mask is added.

        dropout: whether there is dropout of the weights.

        needs_gradients: whether the gradients of query, key and value are wanted.
    """
    model = widths[0]
    rows = [samples * queries, samples * keys, samples * keys]
    core, core_back, _ = count_dot_products(
        samples * heads, queries, keys, model // heads, model // heads, mask, dropout
    )
    sizes = list(zip(rows, widths, strict=True))
    output = combine_sequential(
        combine_parallel(*(count_products(row * model, width, bias) for row, width in sizes)),
        core,
        count_products(rows[0] * model, model, bias),
    )
    # the weight gradients need this pass even if no input gradient is wanted
    inner = combine_sequential(count_products(rows[0] * model, model), core_back)
    gradient_sizes = [
        size for size, is_wanted in zip(sizes, needs_gradients, strict=True) if is_wanted
    ]
    input_gradient = combine_sequential(
        inner,
        combine_parallel(*(count_products(row * width, model) for row, width in gradient_sizes)),
    )
    projection_gradients = [count_products(width * model, row) for row, width in sizes] + [
        count_sums(model if bias else 0, row) for row in rows
    ]
    output_gradients = combine_parallel(
        count_products(model * model, rows[0]), count_sums(model if bias else 0, rows[0])
    )
    return (
        output,
        input_gradient,
        combine_parallel(
            output_gradients,
            combine_sequential(PassCost(0, inner.depth), combine_parallel(*projection_gradients)),
        ),
    )
