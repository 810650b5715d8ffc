"""Work and depth of layers that read sequences: recurrent ones, whose chain grows with the
length, and attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.planner.layer_costs import (
    NOTHING,
    Pass,
    Passes,
    after,
    beside,
    each,
    product,
    rounds,
    softmax,
    sums,
)


@dataclass(frozen=True, slots=True)
class Cell:
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
CELLS = {"rnn": Cell(1, 2, 2, 2), "lstm": Cell(4, 13, 6, 6), "gru": Cell(3, 10, 8, 7)}


@dataclass(frozen=True, slots=True)
class Recurrent:
    """`layers` recurrent layers over sequences of at most `steps`, `tokens` steps in all of the
    `samples` sequences.

    inputs, hidden: numbers per step;  directions: 1 or 2;  projected: numbers of the state that
    is passed on, where an LSTM projects it, else 0;  inputs_wanted, state_wanted: the gradients
    of the inputs, and of the first state.
    """

    cell: Cell
    tokens: int
    samples: int
    steps: int
    inputs: int
    hidden: int
    layers: int = 1
    directions: int = 1
    bias: bool = True
    projected: int = 0
    dropout: bool = False
    inputs_wanted: bool = True
    state_wanted: bool = False

    def passes(self) -> Passes:
        """Layers of one direction follow each other step by step like a wave; those of two wait
        for the whole layer before.
        """
        back, chain = self._back()
        weights = after(*(self._weights(layer) for layer in range(self.layers)))
        return (
            self._output(),
            back,
            Pass(weights.work, chain + 1 + rounds(self.tokens), products=weights.products),
        )

    @property
    def _state(self) -> int:
        return self.projected or self.hidden

    def _read(self, layer: int) -> int:
        """How many numbers a layer reads per step."""
        return self._state * self.directions if layer else self.inputs

    def _output(self) -> Pass:
        gates = self.cell.gates * self.hidden
        of_state = product(self.tokens * gates, self._state, self.bias)
        tail = Pass(self.tokens * self.cell.operations * self.hidden, self.cell.forward)
        if self.projected:
            tail = after(tail, product(self.tokens * self.projected, self.hidden))
        reads = [
            product(self.tokens * gates, self._read(layer), self.bias)
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
        whole = after(
            *(after(read, of_state, tail) for _ in range(self.directions) for read in reads),
            self._dropped(),
        )
        return Pass(whole.work, depth + self._dropped().depth, products=whole.products)

    def _dropped(self) -> Pass:
        """Dropout between the layers."""
        one = each(self.tokens * self._state * self.directions if self.dropout else 0)
        return after(*[one] * (self.layers - 1))

    def _back(self) -> tuple[Pass, int]:
        """The gradients of gates, states and inputs; and the chain up to the last gate's, from
        which weights' gradients are made: they need it whether the inputs' gradient is wanted
        or not.
        """
        gates = self.cell.gates * self.hidden
        tail = Pass(self.tokens * self.cell.operations * self.hidden, self.cell.backward)
        if self.projected:
            tail = after(product(self.tokens * self.hidden, self.projected), tail)
        earlier = self.tokens if self.state_wanted else self.tokens - self.samples
        of_state = product(earlier * self._state, gates)
        reads = [product(self.tokens * self._read(layer), gates) for layer in range(self.layers)]
        if not self.inputs_wanted:
            reads[0] = NOTHING
        joined = [
            each(
                self.tokens * self._read(layer)
                if self.directions == 2 and (layer or self.inputs_wanted)
                else 0
            )
            for layer in range(self.layers)
        ]
        alone = [after(read, of_state, tail) for _ in range(self.directions) for read in reads]
        whole = after(*alone, *joined, self._dropped())
        # a product, whether to the step before or to the layer below
        move = 1 + rounds(gates)
        between = (
            (self.layers - 1) * (move + tail.depth)
            + sum(each.depth for each in joined[1:])
            + self._dropped().depth
        )
        along = (self.steps - 1) * (move + tail.depth)
        chain = tail.depth + between + along * (1 if self.directions == 1 else self.layers)
        last = max(reads[0].depth + joined[0].depth, move if self.state_wanted else 0)
        return Pass(whole.work, chain + last, products=whole.products), chain

    def _weights(self, layer: int) -> Pass:
        gates = self.cell.gates * self.hidden
        biases = sums(2 * gates if self.bias else 0, self.tokens)  # torch keeps two biases
        one = after(
            product(gates * self._read(layer), self.tokens),
            product(gates * self._state, self.tokens),
            biases,
            product(self.projected * self.hidden, self.tokens),
        )
        return after(*[one] * self.directions)


def dot_products(
    heads: int,
    queries: int,
    keys: int,
    width: int,
    value: int,
    mask: bool = False,
    dropout: bool = False,
) -> Passes:
    """Scaled dot-product attention: [heads, queries, width], [heads, keys, width], [heads,
    keys, value] -> [heads, queries, value], heads of all samples together. A mask saves
    nothing, as torch counts it.
    """
    scores = heads * queries * keys
    weights, weights_back, _ = softmax(heads * queries, keys)
    optional = after(each(scores, int(mask)), each(scores, int(dropout)))
    output = after(
        each(heads * queries * width),
        product(scores, width),
        optional,
        weights,
        product(heads * queries * value, keys),
    )
    to_both = beside(
        after(product(heads * queries * width, keys), each(heads * queries * width)),
        product(heads * keys * width, queries),
    )
    back = beside(
        after(product(scores, value), each(scores, int(dropout)), weights_back, to_both),
        product(heads * keys * value, queries),
    )
    return output, back, NOTHING


def attention(
    samples: int,
    queries: int,
    keys: int,
    heads: int,
    widths: Sequence[int],
    bias: bool = True,
    mask: bool = False,
    dropout: bool = False,
    wanted: Sequence[bool] = (True, True, True),
) -> Passes:
    """Multi-head attention, of which every head has its part of the model's width.

    widths: of query (the model's), key and value;  wanted: whether the gradient of each of the
    three is. The average of the weights over the heads is not counted.
    """
    model = widths[0]
    rows = [samples * queries, samples * keys, samples * keys]
    core, core_back, _ = dot_products(
        samples * heads, queries, keys, model // heads, model // heads, mask, dropout
    )
    sizes = list(zip(rows, widths, strict=True))
    output = after(
        beside(*(product(row * model, width, bias) for row, width in sizes)),
        core,
        product(rows[0] * model, model, bias),
    )
    # weights need it whether inputs do or not
    inner = after(product(rows[0] * model, model), core_back)
    asked = [size for size, want in zip(sizes, wanted, strict=True) if want]
    back = after(inner, beside(*(product(row * width, model) for row, width in asked)))
    made = [product(width * model, row) for row, width in sizes] + [
        sums(model if bias else 0, row) for row in rows
    ]
    outer = beside(product(model * model, rows[0]), sums(model if bias else 0, rows[0]))
    return output, back, beside(outer, after(Pass(0, inner.depth), beside(*made)))
