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
class PassCost:
    """A pass through a layer: operations, the longest chain of them, bytes read and written,
    operations of matrix products.
    """

    work: int
    depth: int
    bytes: int = 0
    products: int = 0


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer does in a step. name: of its module;  kind: its row in the table;
    function: torch's, that it calls.
    """

    name: str
    kind: str
    function: str
    output: PassCost
    input_gradient: PassCost
    weight_gradient: PassCost
    calls: int = 1


NO_COST = PassCost(0, 0)
# output, gradient of the inputs, gradient of the weights
PassCosts = tuple[PassCost, PassCost, PassCost]


def combine_sequential(*passes: PassCost) -> PassCost:
    """One after the other: works and depths add up."""
    return PassCost(
        sum(each.work for each in passes),
        sum(each.depth for each in passes),
        sum(each.bytes for each in passes),
        sum(each.products for each in passes),
    )


def combine_parallel(*passes: PassCost) -> PassCost:
    """Side by side: works add up, the longest chain is the depth."""
    return PassCost(
        sum(each.work for each in passes),
        max((each.depth for each in passes), default=0),
        sum(each.bytes for each in passes),
        sum(each.products for each in passes),
    )


def compute_sum_depth(terms: int) -> int:
    """ceil(lg terms): the depth of a sum of so many numbers."""
    return max(terms - 1, 0).bit_length()


def count_elementwise(elements: int, operations: int = 1) -> PassCost:
    """So many operations, one after the other, on every element by itself."""
    return PassCost(elements * operations, operations if elements else 0)


def count_sums(count: int, terms: int) -> PassCost:
    """`count` sums (or maxima) of `terms` numbers each."""
    return PassCost(count * terms, compute_sum_depth(terms))


def count_products(count: int, terms: int, bias: bool = False) -> PassCost:
    """`count` sums of `terms` products of two numbers each; a bias is one more number in the
    sum.
    """
    work = 2 * count * terms
    return PassCost(work, 1 + compute_sum_depth(terms + bias), products=work) if work else NO_COST


def count_linear(
    samples: int, inputs: int, outputs: int, bias: bool = True, weight: bool = True
) -> PassCosts:
    """Fully connected: [samples, inputs] -> [samples, outputs]. bias: there is one; weight: its
    gradient is wanted too.
    """
    weights = count_products(outputs * inputs, samples) if weight else NO_COST
    return (
        count_products(samples * outputs, inputs, bias),
        count_products(samples * inputs, outputs),
        combine_parallel(weights, count_sums(outputs, samples) if bias else NO_COST),
    )


def count_matmul(
    outputs: int, terms: int, operands: Sequence[int], parameters: Sequence[int]
) -> PassCosts:
    """A product of two matrices, or of batches of them. operands, parameters: elements of those
    whose gradient is wanted.
    """
    # products of two numbers, as many forward as for either gradient
    used = outputs * terms
    inputs, weights = (
        [count_products(size, used // size) for size in sizes if size]
        for sizes in (operands, parameters)
    )
    return count_products(outputs, terms), combine_parallel(*inputs), combine_parallel(*weights)


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
    def max_uses(self) -> int:
        """The largest number of results, of one output channel, that one number of the image is
        used for.
        """
        places = zip(self.result, self.kernel, self.stride, self.dilation, strict=True)
        return prod(
            min(result, -(-kernel // (stride // gcd(stride, dilation))))
            for result, kernel, stride, dilation in places
        )

    def count_passes(self, bias: bool = True, weight: bool = True) -> PassCosts:
        """bias: there is one, and its gradient is wanted;  weight: the gradient of the kernel
        is wanted.
        """
        terms = self.inputs // self.groups * prod(self.kernel)
        places = self.samples * prod(self.result)
        output = count_products(places * self.outputs, terms, bias)
        back = PassCost(
            output.work,
            1 + compute_sum_depth(self.outputs // self.groups * self.max_uses),
            products=output.work,
        )
        weights = count_products(self.outputs * terms, places) if weight else NO_COST
        return (
            output,
            back,
            combine_parallel(weights, count_sums(self.outputs, places) if bias else NO_COST),
        )

    def count_transposed_passes(self, bias: bool = True, weight: bool = True) -> PassCosts:
        """The layer whose forward is this one's gradient of the inputs: from `result` to
        `image`, `outputs` to `inputs`.
        """
        back, output, weights = self.count_passes(False, weight)
        output = PassCost(
            output.work,
            1 + compute_sum_depth(self.outputs // self.groups * self.max_uses + bias),
            products=output.work,
        )
        biases = count_sums(self.inputs, self.samples * prod(self.image)) if bias else NO_COST
        return output, back, combine_parallel(weights, biases)


def count_activation(elements: int) -> PassCosts:
    """A function of each element; its derivative, with the gradient that it multiplies, counts
    one operation too.
    """
    return count_elementwise(elements), count_elementwise(elements), NO_COST


def count_softmax(rows: int, width: int) -> PassCosts:
    """Softmax, or its logarithm: largest, difference, exponential, sum, quotient; and
    backward.
    """
    elements = rows * width
    output = combine_sequential(
        count_sums(rows, width),
        count_elementwise(elements, 2),
        count_sums(rows, width),
        count_elementwise(elements),
    )
    return (
        output,
        combine_sequential(
            count_elementwise(elements), count_sums(rows, width), count_elementwise(elements, 2)
        ),
        NO_COST,
    )


def count_pooling(outputs: int, terms: int, window: int, overlap: int, average: bool) -> PassCosts:
    """Largest or mean of windows. terms: of all windows together;  window: of the largest one;
    overlap: the largest number of windows that one element is in.
    """
    output = PassCost(terms, compute_sum_depth(window))
    if average:
        return (
            combine_sequential(output, count_elementwise(outputs)),
            combine_sequential(
                count_elementwise(outputs), PassCost(terms, compute_sum_depth(overlap))
            ),
            NO_COST,
        )
    # a gradient goes to one place of its window
    return (
        output,
        combine_sequential(count_elementwise(outputs), PassCost(0, compute_sum_depth(overlap))),
        NO_COST,
    )


def count_normalization(
    elements: int,
    terms: int,
    weights: int,
    bias: bool = True,
    mean: bool = True,
    batch_statistics: bool = True,
) -> PassCosts:
    """Batch, layer, group or root-mean-square norm: every `terms` elements share their
    statistics.

    weights: how many factors there are, 0 for none;  bias: as many summands too;  mean: it is
    taken off (not in a root-mean-square norm);  measured: statistics of this batch, not the
    running ones.
    """
    rows = elements // terms if terms else 0
    scaled = count_elementwise(elements if weights else 0)
    centred = (
        combine_sequential(count_sums(rows, terms), count_elementwise(rows))
        if batch_statistics
        else NO_COST
    )  # the mean
    spread = (
        combine_sequential(
            count_elementwise(elements), count_sums(rows, terms), count_elementwise(rows)
        )
        if batch_statistics
        else NO_COST
    )
    # + eps, 1 / root
    output = combine_sequential(
        *((centred, count_elementwise(elements)) if mean else ()),
        spread,
        count_elementwise(rows, 2),
        count_elementwise(elements),
        scaled,
        count_elementwise(elements if weights and bias else 0),
    )
    # gradient x normalised, summed
    along = combine_sequential(count_elementwise(elements), count_sums(rows, terms))
    both = combine_parallel(along, count_sums(rows, terms)) if mean else along
    corrected = (
        combine_sequential(
            both, count_elementwise(rows * (1 + mean)), count_elementwise(elements, 2 + mean)
        )
        if batch_statistics
        else NO_COST
    )
    shared = elements // weights if weights else 0
    summed = count_sums(weights, shared) if bias else NO_COST
    return (
        output,
        combine_sequential(scaled, corrected, count_elementwise(elements)),
        combine_parallel(
            combine_sequential(count_elementwise(elements), count_sums(weights, shared)), summed
        )
        if weights
        else NO_COST,
    )


def count_embedding(lookups: int, width: int) -> PassCosts:
    """A lookup has no operations; backward adds every row's gradients, at worst all to one
    row.
    """
    return NO_COST, NO_COST, PassCost(lookups * width, compute_sum_depth(lookups))


def count_pointwise(
    elements: int, operands: Sequence[int], parameters: Sequence[int], additive: bool
) -> PassCosts:
    """Arithmetic on tensors element by element, with broadcasting. operands, parameters:
    elements of those whose gradient is wanted;  additive: the gradient of an operand is that of
    the output itself.
    """

    def back(operand: int) -> PassCost:
        summed = count_sums(operand, elements // operand) if 0 < operand < elements else NO_COST
        return combine_sequential(count_elementwise(0 if additive else elements), summed)

    return (
        count_elementwise(elements),
        combine_parallel(*map(back, operands)),
        combine_parallel(*map(back, parameters)),
    )


def count_reduction(outputs: int, terms: int, mean: bool) -> PassCosts:
    """Sums or means of `terms` elements each; the gradient of a sum is copied."""
    divided = count_elementwise(outputs if mean else 0)
    return combine_sequential(count_sums(outputs, terms), divided), divided, NO_COST


def compute_parallel_bounds(work: int, depth: int, processors: int) -> tuple[int, int]:
    """Steps that `processors` need at least and at most: max(W/P, D) <= T_P <= W/P + D (Brent
    1974, JACM 21(2)).
    """
    return max(-(-work // processors), depth), work // processors + depth
