"""Work and depth of layers that read sequences: recurrent ones, whose chain grows with the
length, and attention.
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
    """gates: matrices of a cell;  operations: element-wise ones per hidden number and step,
    backward as many;  forward, backward: how many of them follow one another between two
    products.
    """

    gates: int
    operations: int
    forward: int
    backward: int


# rnn: add, tanh. lstm: four gates (add, squash), f c, i g, their sum, tanh c, o tanh c.
# gru: two gates (add, squash), r h, add, tanh, n + z (h - n)
CELLS = {
    "rnn": RecurrentCell(1, 2, 2, 2),
    "lstm": RecurrentCell(4, 13, 6, 6),
    "gru": RecurrentCell(3, 10, 8, 7),
}


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """`layers` recurrent layers over sequences of at most `steps`, `tokens` steps in all of the
    `samples` sequences.

    inputs, hidden: numbers per step;  directions: 1 or 2;  projected: numbers of the state that
    is passed on, where an LSTM projects it, else 0;  inputs_wanted, state_wanted: the gradients
    of the inputs, and of the first state.
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
        """Layers of one direction follow each other step by step like a wave; those of two wait
        for the whole layer before.
        """
        back, chain = self._count_input_gradient()
        weights = combine_sequential(
            *(self._count_weight_gradient(layer) for layer in range(self.layers))
        )
        return (
            self._count_output(),
            back,
            PassCost(
                weights.work, chain + 1 + compute_sum_depth(self.tokens), products=weights.products
            ),
        )

    @property
    def _state_size(self) -> int:
        return self.projection_size or self.hidden

    def _count_layer_inputs(self, layer: int) -> int:
        """How many numbers a layer reads per step."""
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
        firsts = [max(read.depth, of_state.depth) + tail.depth for read in reads]
        if self.directions == 1:
            depth = (
                firsts[0]
                + (self.steps - 1) * step
                + sum(read.depth + tail.depth for read in reads[1:])
            )
        else:
            depth = sum(first + (self.steps - 1) * step for first in firsts)
        whole = combine_sequential(
            *(
                combine_sequential(read, of_state, tail)
                for _ in range(self.directions)
                for read in reads
            ),
            self._count_dropout(),
        )
        return PassCost(whole.work, depth + self._count_dropout().depth, products=whole.products)

    def _count_dropout(self) -> PassCost:
        """Dropout between the layers."""
        one = count_elementwise(
            self.tokens * self._state_size * self.directions if self.dropout else 0
        )
        return combine_sequential(*[one] * (self.layers - 1))

    def _count_input_gradient(self) -> tuple[PassCost, int]:
        """The gradients of gates, states and inputs; and the chain up to the last gate's, from
        which weights' gradients are made: they need it whether the inputs' gradient is wanted
        or not.
        """
        gates = self.cell.gates * self.hidden
        tail = PassCost(self.tokens * self.cell.operations * self.hidden, self.cell.backward)
        if self.projection_size:
            tail = combine_sequential(
                count_products(self.tokens * self.hidden, self.projection_size), tail
            )
        earlier = self.tokens if self.needs_state_gradient else self.tokens - self.samples
        of_state = count_products(earlier * self._state_size, gates)
        reads = [
            count_products(self.tokens * self._count_layer_inputs(layer), gates)
            for layer in range(self.layers)
        ]
        if not self.needs_input_gradient:
            reads[0] = NO_COST
        joined = [
            count_elementwise(
                self.tokens * self._count_layer_inputs(layer)
                if self.directions == 2 and (layer or self.needs_input_gradient)
                else 0
            )
            for layer in range(self.layers)
        ]
        alone = [
            combine_sequential(read, of_state, tail)
            for _ in range(self.directions)
            for read in reads
        ]
        whole = combine_sequential(*alone, *joined, self._count_dropout())
        # a product, whether to the step before or to the layer below
        move = 1 + compute_sum_depth(gates)
        between = (
            (self.layers - 1) * (move + tail.depth)
            + sum(each.depth for each in joined[1:])
            + self._count_dropout().depth
        )
        along = (self.steps - 1) * (move + tail.depth)
        chain = tail.depth + between + along * (1 if self.directions == 1 else self.layers)
        last = max(reads[0].depth + joined[0].depth, move if self.needs_state_gradient else 0)
        return PassCost(whole.work, chain + last, products=whole.products), chain

    def _count_weight_gradient(self, layer: int) -> PassCost:
        gates = self.cell.gates * self.hidden
        biases = count_sums(2 * gates if self.bias else 0, self.tokens)  # torch keeps two biases
        one = combine_sequential(
            count_products(gates * self._count_layer_inputs(layer), self.tokens),
            count_products(gates * self._state_size, self.tokens),
            biases,
            count_products(self.projection_size * self.hidden, self.tokens),
        )
        return combine_sequential(*[one] * self.directions)


def count_dot_products(
    heads: int,
    queries: int,
    keys: int,
    width: int,
    value: int,
    mask: bool = False,
    dropout: bool = False,
) -> PassCosts:
    """Scaled dot-product attention: [heads, queries, width], [heads, keys, width], [heads,
    keys, value] -> [heads, queries, value], heads of all samples together. A mask saves
    nothing, as torch counts it.
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
    back = combine_parallel(
        combine_sequential(
            count_products(scores, value),
            count_elementwise(scores, int(dropout)),
            weights_back,
            to_both,
        ),
        count_products(heads * keys * value, queries),
    )
    return output, back, NO_COST


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
    """Multi-head attention, of which every head has its part of the model's width.

    widths: of query (the model's), key and value;  wanted: whether the gradient of each of the
    three is. The average of the weights over the heads is not counted.
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
    # weights need it whether inputs do or not
    inner = combine_sequential(count_products(rows[0] * model, model), core_back)
    asked = [size for size, want in zip(sizes, needs_gradients, strict=True) if want]
    back = combine_sequential(
        inner, combine_parallel(*(count_products(row * width, model) for row, width in asked))
    )
    made = [count_products(width * model, row) for row, width in sizes] + [
        count_sums(model if bias else 0, row) for row in rows
    ]
    outer = combine_parallel(
        count_products(model * model, rows[0]), count_sums(model if bias else 0, rows[0])
    )
    return (
        output,
        back,
        combine_parallel(
            outer, combine_sequential(PassCost(0, inner.depth), combine_parallel(*made))
        ),
    )
