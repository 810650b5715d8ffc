"""Work, depth and bytes of the layers of a network, forward and backward, as whole numbers.

docs/reference/work.md has the table. Work W counts operations. An addition, a multiplication, a
comparison or an elementary function of one number is one operation. Each term of a matrix product
has two, a multiplication and an addition, as torch.utils.flop_counter counts it. A bias costs
nothing: it takes the place of the zero to which the first term is added.

Depth D counts the operations on the longest chain with unlimited processors. A sum of k numbers
takes ceil(lg k). Orders of growth: Ben-Nun & Hoefler 2018, arXiv 1802.09941.

Every formula gives three passes: the output, the gradient of the inputs, the gradient of the
weights. The latter two start from the gradient of the output. The caller adds the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of one pass through a layer.

    Attributes:
        work: operations.
        depth: operations on the longest chain.
        bytes: bytes read and written.
        products: operations that are in matrix products.
    """

    work: int
    depth: int
    bytes: int = 0
    products: int = 0


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer in a step.

    Attributes:
        name: the name of its module.

        kind: its row in the table of docs/reference/work.md.

        function: the torch function that it calls.

        output: cost of the forward pass.

        input_gradient: cost of the gradient of the inputs.

        weight_gradient: cost of the gradient of the weights.

        calls: number of calls that are added up here.
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
    """Combine passes that run one after the other: works and depths add up."""
    return PassCost(
        sum(each.work for each in passes),
        sum(each.depth for each in passes),
        sum(each.bytes for each in passes),
        sum(each.products for each in passes),
    )


def combine_parallel(*passes: PassCost) -> PassCost:
    """Combine passes that run side by side: works add up, the longest chain is the depth."""
    return PassCost(
        sum(each.work for each in passes),
        max((each.depth for each in passes), default=0),
        sum(each.bytes for each in passes),
        sum(each.products for each in passes),
    )


def compute_sum_depth(terms: int) -> int:
    """The depth of a sum of `terms` numbers: ceil(lg terms)."""
    return max(terms - 1, 0).bit_length()


def count_elementwise(elements: int, operations: int = 1) -> PassCost:
    """The cost of operations on each element by itself.

    Args:
        elements: number of elements.
        operations: operations on each element, one after the other.
    """
    return PassCost(elements * operations, operations if elements else 0)


def count_sums(count: int, terms: int) -> PassCost:
    """The cost of sums, or of maxima.

    Args:
        count: number of sums.
        terms: numbers in each sum.
    """
    return PassCost(count * terms, compute_sum_depth(terms))


def count_products(count: int, terms: int, bias: bool = False) -> PassCost:
    """The cost of `count` sums of `terms` products of two numbers each.

    Args:
        count: number of sums.
        terms: products in each sum.
        bias: whether each sum has one more number.
    """
    work = 2 * count * terms
    return PassCost(work, 1 + compute_sum_depth(terms + bias), products=work) if work else NO_COST


def count_linear(
    samples: int, inputs: int, outputs: int, bias: bool = True, weight: bool = True
) -> PassCosts:
    """The cost of a fully connected layer: [samples, inputs] -> [samples, outputs].

    Args:
        samples: rows of the input.

        inputs: numbers per row of the input.

        outputs: numbers per row of the output.

        bias: whether there is a bias.

        weight: whether the gradient of the weight is wanted.
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
    """The cost of a product of two matrices, or of batches of them.

    Args:
        outputs: elements of the result.

        terms: products in the sum of each element.

        operands: elements of each computed operand with a wanted gradient.

        parameters: elements of each parameter with a wanted gradient.
    """
    # products of two numbers; the forward has as many as either gradient
    term_count = outputs * terms
    inputs, weights = (
        [count_products(size, term_count // size) for size in sizes if size]
        for sizes in (operands, parameters)
    )
    return count_products(outputs, terms), combine_parallel(*inputs), combine_parallel(*weights)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A direct convolution: [samples, inputs, *image] -> [samples, outputs, *result].

    It has one kernel for each input and output. Padding counts as image, as torch counts it.

    Attributes:
        samples: number of samples.

        inputs: input channels.

        outputs: output channels.

        image: size of the image in each dimension.

        result: size of the result in each dimension.

        kernel: size of the kernel in each dimension.

        stride: stride in each dimension.

        dilation: dilation in each dimension.

        groups: number of groups of channels.
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
        """How many results of one output channel use one number of the image, at most."""
        places = zip(self.result, self.kernel, self.stride, self.dilation, strict=True)
        return prod(
            min(result, -(-kernel // (stride // gcd(stride, dilation))))
            for result, kernel, stride, dilation in places
        )

    def count_passes(self, bias: bool = True, weight: bool = True) -> PassCosts:
        """The cost of the three passes.

        Args:
            bias: whether there is a bias with a wanted gradient.
            weight: whether the gradient of the kernel is wanted.
        """
        terms = self.inputs // self.groups * prod(self.kernel)
        places = self.samples * prod(self.result)
        output = count_products(places * self.outputs, terms, bias)
        input_gradient = PassCost(
            output.work,
            1 + compute_sum_depth(self.outputs // self.groups * self.max_uses),
            products=output.work,
        )
        weights = count_products(self.outputs * terms, places) if weight else NO_COST
        return (
            output,
            input_gradient,
            combine_parallel(weights, count_sums(self.outputs, places) if bias else NO_COST),
        )

    def count_transposed_passes(self, bias: bool = True, weight: bool = True) -> PassCosts:
        """The cost of the transposed convolution.

        It maps `result` to `image`, and `outputs` to `inputs`. Its forward is the input gradient of
        this convolution.

        Args:
            bias: whether there is a bias with a wanted gradient.
            weight: whether the gradient of the kernel is wanted.
        """
        input_gradient, output, weights = self.count_passes(False, weight)
        output = PassCost(
            output.work,
            1 + compute_sum_depth(self.outputs // self.groups * self.max_uses + bias),
            products=output.work,
        )
        biases = count_sums(self.inputs, self.samples * prod(self.image)) if bias else NO_COST
        return output, input_gradient, combine_parallel(weights, biases)


def count_activation(elements: int) -> PassCosts:
    """The cost of a function of each element.

    The derivative times the incoming gradient counts as one operation, too.
    """
    return count_elementwise(elements), count_elementwise(elements), NO_COST


def count_softmax(rows: int, width: int) -> PassCosts:
    """The cost of softmax or its logarithm, and of its backward.

    The forward is largest, difference, exponential, sum and quotient.

    Args:
        rows: number of distributions.
        width: elements of each.
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
    """The cost of the largest or the mean of windows.

    Args:
        outputs: number of windows.

        terms: elements of all windows together.

        window: elements of the largest window.

        overlap: the largest number of windows that contain one element.

        average: the mean, not the largest.
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
    # each gradient goes to one element of its window
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
    """The cost of a batch, layer, group or root-mean-square norm.

    Args:
        elements: elements of the input.

        terms: elements that share their statistics.

        weights: number of factors; 0 for none.

        bias: whether there are as many summands, too.

        mean: whether the mean is subtracted; not in a root-mean-square norm.

        batch_statistics: whether the statistics are of this batch, not the running ones.
    """
    rows = elements // terms if terms else 0
    scaling = count_elementwise(elements if weights else 0)
    mean_cost = (
        combine_sequential(count_sums(rows, terms), count_elementwise(rows))
        if batch_statistics
        else NO_COST
    )
    variance_cost = (
        combine_sequential(
            count_elementwise(elements), count_sums(rows, terms), count_elementwise(rows)
        )
        if batch_statistics
        else NO_COST
    )
    output = combine_sequential(
        *((mean_cost, count_elementwise(elements)) if mean else ()),
        variance_cost,
        count_elementwise(rows, 2),  # add eps, reciprocal square root
        count_elementwise(elements),
        scaling,
        count_elementwise(elements if weights and bias else 0),
    )
    # the sum of the gradient times the normalized input
    projection = combine_sequential(count_elementwise(elements), count_sums(rows, terms))
    gradient_sums = combine_parallel(projection, count_sums(rows, terms)) if mean else projection
    correction = (
        combine_sequential(
            gradient_sums,
            count_elementwise(rows * (1 + mean)),
            count_elementwise(elements, 2 + mean),
        )
        if batch_statistics
        else NO_COST
    )
    terms_per_weight = elements // weights if weights else 0
    weight_sums = count_sums(weights, terms_per_weight) if bias else NO_COST
    return (
        output,
        combine_sequential(scaling, correction, count_elementwise(elements)),
        combine_parallel(
            combine_sequential(count_elementwise(elements), count_sums(weights, terms_per_weight)),
            weight_sums,
        )
        if weights
        else NO_COST,
    )


def count_embedding(lookups: int, width: int) -> PassCosts:
    """The cost of an embedding. A lookup has no operations.

    Backward adds the gradients of all rows, in the worst case to a single row.

    Args:
        lookups: number of rows that are looked up.
        width: elements of a row.
    """
    return NO_COST, NO_COST, PassCost(lookups * width, compute_sum_depth(lookups))


def count_pointwise(
    elements: int, operands: Sequence[int], parameters: Sequence[int], additive: bool
) -> PassCosts:
    """The cost of element-wise arithmetic on tensors, with broadcasting.

    Args:
        elements: elements of the result.

        operands: elements of each computed operand with a wanted gradient.

        parameters: elements of each parameter with a wanted gradient.

        additive: whether the gradient of an operand is the gradient of the output itself.
    """

    def count_operand_gradient(operand: int) -> PassCost:
        broadcast_sums = (
            count_sums(operand, elements // operand) if 0 < operand < elements else NO_COST
        )
        return combine_sequential(count_elementwise(0 if additive else elements), broadcast_sums)

    return (
        count_elementwise(elements),
        combine_parallel(*map(count_operand_gradient, operands)),
        combine_parallel(*map(count_operand_gradient, parameters)),
    )


def count_reduction(outputs: int, terms: int, mean: bool) -> PassCosts:
    """The cost of sums or means. The gradient of a sum is copied.

    Args:
        outputs: number of sums.
        terms: elements of each sum.
        mean: means instead of sums.
    """
    division = count_elementwise(outputs if mean else 0)
    return combine_sequential(count_sums(outputs, terms), division), division, NO_COST


def compute_parallel_bounds(work: int, depth: int, processors: int) -> tuple[int, int]:
    """The least and the most steps that a number of processors needs.

    max(W/P, D) <= T_P <= W/P + D (Brent 1974, JACM 21(2)).

    Args:
        work: W, operations.
        depth: D, operations on the longest chain.
        processors: P.
    """
    return max(-(-work // processors), depth), work // processors + depth
