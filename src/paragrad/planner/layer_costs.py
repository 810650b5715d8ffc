"""Work, depth and bytes of the layers of a network, forward and backward, as whole numbers
(docs/work.md has the table).

Work W: operations. An addition, a multiplication, a comparison or an elementary function of one
number is one; a product of matrices is 2 for each of its terms, multiply and add, as
torch.utils.flop_counter counts it (a bias takes the place of the zero to which the first term
is added). Depth D: operations on the longest chain where processors are unlimited; a sum of k
numbers takes ceil(lg k). Orders of growth: Ben-Nun & Hoefler 2018, arXiv 1802.09941.

Every formula gives three passes: the output, the gradient of the inputs, the gradient of the
weights, the latter two counted from the gradient of the output on. Their bytes are the caller's
to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass through a layer: operations, the longest chain of them, bytes read and written,
    operations of matrix products.
    """

    work: int
    depth: int
    bytes: int = 0
    products: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer does in a step. name: of its module;  kind: its row in the table;
    function: torch's, that it calls.
    """

    name: str
    kind: str
    function: str
    output: Pass
    input_gradient: Pass
    weight_gradient: Pass
    calls: int = 1


NOTHING = Pass(0, 0)
# output, gradient of the inputs, gradient of the weights
Passes = tuple[Pass, Pass, Pass]


def after(*passes: Pass) -> Pass:
    """One after the other: works and depths add up."""
    return Pass(
        sum(each.work for each in passes),
        sum(each.depth for each in passes),
        sum(each.bytes for each in passes),
        sum(each.products for each in passes),
    )


def beside(*passes: Pass) -> Pass:
    """Side by side: works add up, the longest chain is the depth."""
    return Pass(
        sum(each.work for each in passes),
        max((each.depth for each in passes), default=0),
        sum(each.bytes for each in passes),
        sum(each.products for each in passes),
    )


def rounds(terms: int) -> int:
    """ceil(lg terms): the depth of a sum of so many numbers."""
    return max(terms - 1, 0).bit_length()


def each(elements: int, operations: int = 1) -> Pass:
    """So many operations, one after the other, on every element by itself."""
    return Pass(elements * operations, operations if elements else 0)


def sums(count: int, terms: int) -> Pass:
    """`count` sums (or maxima) of `terms` numbers each."""
    return Pass(count * terms, rounds(terms))


def product(count: int, terms: int, bias: bool = False) -> Pass:
    """`count` sums of `terms` products of two numbers each; a bias is one more number in the
    sum.
    """
    work = 2 * count * terms
    return Pass(work, 1 + rounds(terms + bias), products=work) if work else NOTHING


def linear(
    samples: int, inputs: int, outputs: int, bias: bool = True, weight: bool = True
) -> Passes:
    """Fully connected: [samples, inputs] -> [samples, outputs]. bias: there is one; weight: its
    gradient is wanted too.
    """
    weights = product(outputs * inputs, samples) if weight else NOTHING
    return (
        product(samples * outputs, inputs, bias),
        product(samples * inputs, outputs),
        beside(weights, sums(outputs, samples) if bias else NOTHING),
    )


def matmul(outputs: int, terms: int, operands: Sequence[int], parameters: Sequence[int]) -> Passes:
    """A product of two matrices, or of batches of them. operands, parameters: elements of those
    whose gradient is wanted.
    """
    # products of two numbers, as many forward as for either gradient
    used = outputs * terms
    inputs, weights = (
        [product(size, used // size) for size in sizes if size] for sizes in (operands, parameters)
    )
    return product(outputs, terms), beside(*inputs), beside(*weights)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A direct convolution: [samples, inputs, *image] -> [samples, outputs, *result], with a
    kernel per input and output.

    inputs, outputs: channels;  image, result, kernel, stride, dilation: a number for each
    dimension of the image. Padding counts as image, as torch counts it.
    """

    samples: int
    inputs: int
    outputs: int
    image: Sequence[int]
    result: Sequence[int]
    kernel: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1

    @property
    def taps(self) -> int:
        """The largest number of results, of one output channel, that one number of the image is
        used for.
        """
        places = zip(self.result, self.kernel, self.stride, self.dilation, strict=True)
        return prod(
            min(result, -(-kernel // (stride // gcd(stride, dilation))))
            for result, kernel, stride, dilation in places
        )

    def passes(self, bias: bool = True, weight: bool = True) -> Passes:
        """bias: there is one, and its gradient is wanted;  weight: the gradient of the kernel
        is wanted.
        """
        terms = self.inputs // self.groups * prod(self.kernel)
        places = self.samples * prod(self.result)
        output = product(places * self.outputs, terms, bias)
        back = Pass(
            output.work, 1 + rounds(self.outputs // self.groups * self.taps), products=output.work
        )
        weights = product(self.outputs * terms, places) if weight else NOTHING
        return output, back, beside(weights, sums(self.outputs, places) if bias else NOTHING)

    def transposed(self, bias: bool = True, weight: bool = True) -> Passes:
        """The layer whose forward is this one's gradient of the inputs: from `result` to
        `image`, `outputs` to `inputs`.
        """
        back, output, weights = self.passes(False, weight)
        output = Pass(
            output.work,
            1 + rounds(self.outputs // self.groups * self.taps + bias),
            products=output.work,
        )
        biases = sums(self.inputs, self.samples * prod(self.image)) if bias else NOTHING
        return output, back, beside(weights, biases)


def activation(elements: int) -> Passes:
    """A function of each element; its derivative, with the gradient that it multiplies, counts
    one operation too.
    """
    return each(elements), each(elements), NOTHING


def softmax(rows: int, width: int) -> Passes:
    """Softmax, or its logarithm: largest, difference, exponential, sum, quotient; and
    backward.
    """
    elements = rows * width
    output = after(sums(rows, width), each(elements, 2), sums(rows, width), each(elements))
    return output, after(each(elements), sums(rows, width), each(elements, 2)), NOTHING


def pooling(outputs: int, terms: int, window: int, overlap: int, average: bool) -> Passes:
    """Largest or mean of windows. terms: of all windows together;  window: of the largest one;
    overlap: the largest number of windows that one element is in.
    """
    output = Pass(terms, rounds(window))
    if average:
        return (
            after(output, each(outputs)),
            after(each(outputs), Pass(terms, rounds(overlap))),
            NOTHING,
        )
    # a gradient goes to one place of its window
    return output, after(each(outputs), Pass(0, rounds(overlap))), NOTHING


def normalization(
    elements: int,
    terms: int,
    weights: int,
    bias: bool = True,
    mean: bool = True,
    measured: bool = True,
) -> Passes:
    """Batch, layer, group or root-mean-square norm: every `terms` elements share their
    statistics.

    weights: how many factors there are, 0 for none;  bias: as many summands too;  mean: it is
    taken off (not in a root-mean-square norm);  measured: statistics of this batch, not the
    running ones.
    """
    rows = elements // terms if terms else 0
    scaled = each(elements if weights else 0)
    centred = after(sums(rows, terms), each(rows)) if measured else NOTHING  # the mean
    spread = after(each(elements), sums(rows, terms), each(rows)) if measured else NOTHING
    # + eps, 1 / root
    output = after(
        *((centred, each(elements)) if mean else ()),
        spread,
        each(rows, 2),
        each(elements),
        scaled,
        each(elements if weights and bias else 0),
    )
    # gradient x normalised, summed
    along = after(each(elements), sums(rows, terms))
    both = beside(along, sums(rows, terms)) if mean else along
    corrected = (
        after(both, each(rows * (1 + mean)), each(elements, 2 + mean)) if measured else NOTHING
    )
    shared = elements // weights if weights else 0
    summed = sums(weights, shared) if bias else NOTHING
    return (
        output,
        after(scaled, corrected, each(elements)),
        beside(after(each(elements), sums(weights, shared)), summed) if weights else NOTHING,
    )


def embedding(lookups: int, width: int) -> Passes:
    """A lookup has no operations; backward adds every row's gradients, at worst all to one
    row.
    """
    return NOTHING, NOTHING, Pass(lookups * width, rounds(lookups))


def pointwise(
    elements: int, operands: Sequence[int], parameters: Sequence[int], additive: bool
) -> Passes:
    """Arithmetic on tensors element by element, with broadcasting. operands, parameters:
    elements of those whose gradient is wanted;  additive: the gradient of an operand is that of
    the output itself.
    """

    def back(operand: int) -> Pass:
        summed = sums(operand, elements // operand) if 0 < operand < elements else NOTHING
        return after(each(0 if additive else elements), summed)

    return each(elements), beside(*map(back, operands)), beside(*map(back, parameters))


def reduction(outputs: int, terms: int, mean: bool) -> Passes:
    """Sums or means of `terms` elements each; the gradient of a sum is copied."""
    divided = each(outputs if mean else 0)
    return after(sums(outputs, terms), divided), divided, NOTHING


def brent(work: int, depth: int, processors: int) -> tuple[int, int]:
    """Steps that `processors` need at least and at most: max(W/P, D) <= T_P <= W/P + D (Brent
    1974, JACM 21(2)).
    """
    return max(-(-work // processors), depth), work // processors + depth
