"""One exchange with a compressor and without: the times by closed form, and when compressing pays.

The cost of compressing itself is measured. There are p ranks with vectors of n bytes. Payloads of m
bytes stand for a vector. A link takes alpha seconds a message and beta seconds a byte:

    uncompressed       The all-reduce of n bytes. Along a ring it takes
                       2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.
    payloads add up    The all-reduce of m bytes.
    payloads do not    Every rank sends its payload to all: (p-1) (alpha + m beta). If this is no
                       less than the uncompressed exchange sends, the ranks send whole vectors of
                       what the payloads stand for.

Every form is a line in beta, so compressing pays below one bandwidth. It may pay in several ranges
of vector lengths. Sending payloads to all saves (p-1) alpha whatever n is, so a costly compressor
may pay for short vectors and not for long ones. The fixed cost of a call is left out.

Most published set-ups are on the side where it does not pay (Agarwal et al. 2022, arXiv
2103.00543). Under `data(n)` an uncompressed exchange may also overlap with backward, while a
compressed one begins after it. On a link fast enough for this, the comparison favours the
uncompressed exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from paragrad.errors import Refused
from paragrad.executors.machine import Cluster, Machine
from paragrad.planner.cost_formulas import compute_exchange_cost
from paragrad.schedules.all_reduce import AllReduce
from paragrad.schedules.ring import Ring
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.strategy import Strategy

ELEMENT_BYTES = 4
LONGEST_VECTOR = 1 << 40  # bytes


@dataclass(frozen=True)
class CompressionCost:
    """Seconds of one exchange of a vector, with a compressor and without.

    Attributes:
        strategy: the resolved strategy.

        workers: ranks that exchange.

        bytes: length of the vector on each rank, in bytes.

        machine: the measured machine.

        cluster: the links between the ranks.

        algorithm: the all-reduce algorithm, in words.

        payload: bytes that stand for one vector.

        sends_whole_vectors: whether whole vectors are sent instead of payloads.

        plain: seconds of the exchange without compressing.

        exchange: seconds of the exchange of what is sent.

        compute: seconds of compressing and extracting, on every rank.

        bandwidth: bandwidth of links below which compressing pays, in bytes a second (inf: on all
            links, 0: on none).

        paying_lengths: ranges of vector lengths for which it pays on this link, in bytes. Each has
            its first length and an exclusive end (inf: no end).
    """

    strategy: Strategy
    workers: int
    bytes: int
    machine: Machine
    cluster: Cluster
    algorithm: str
    payload: float
    sends_whole_vectors: bool
    plain: float
    exchange: float
    compute: float
    bandwidth: float
    paying_lengths: tuple[tuple[float, float], ...]

    @property
    def is_faster(self) -> bool:
        """Whether compressing is faster on this link."""
        return self.exchange + self.compute < self.plain


def predict_compression_cost(
    strategy: Strategy,
    compressor: Compressor,
    workers: int,
    size: int,
    machine: Machine,
    costs: tuple[float, float],
    link: str | None = None,
) -> CompressionCost:
    """Predict the times of one exchange with a compressor and without.

    Args:
        strategy: the resolved strategy.

        compressor: the compressor of the strategy.

        workers: ranks that exchange.

        size: bytes of the vector.

        machine: the measured machine.

        costs: seconds a byte of compressing a vector, and of adding up what one payload stands for.

        link: name of the link in the machine file; None for the first.

    Raises:
        Refused: the vector is too short, the payload size is unknown, or the algorithm has no
            closed form.
    """
    requested_reduce = getattr(strategy, "reduce", None)
    schedule: Any = requested_reduce if isinstance(requested_reduce, AllReduce) else Ring()
    if size < ELEMENT_BYTES:
        raise Refused(
            f"--bytes {size} is less than one number, which has {ELEMENT_BYTES} bytes; give more"
        )
    if type(compressor).sends is Compressor.sends:
        raise Refused(
            f"{strategy}: how much {compressor} sends depends on the gradients; simulate "
            "top_k(0.01) instead"
        )
    if not compressor.compresses(choose_vector_shape(compressor, size)):
        raise Refused(
            f"{strategy}: {compressor} sends a vector of {size // ELEMENT_BYTES} numbers as it is; "
            "give more"
        )
    try:
        compute_exchange_cost(schedule, workers, 1)
    except LookupError as error:
        raise Refused(f"{strategy}: {error}, and its price needs one; leave reduce out") from None
    cluster = Cluster(machine.select_link(link), machine.gamma)

    def predict_parts(length: float, beta: float) -> tuple[float, bool, float, float, float]:
        """Compute the times for one vector length and one bandwidth.

        Returns (payload bytes, whether whole vectors are sent, seconds of the uncompressed
        exchange, seconds of the compressed exchange, seconds of computing).
        """
        link_at = (
            cluster.link
            if beta == cluster.link.beta
            else replace(cluster.link, beta=beta, points=())
        )
        elements = int(length) // ELEMENT_BYTES
        payload = compressor.sends(choose_vector_shape(compressor, length), ELEMENT_BYTES)
        plain_cost = compute_exchange_cost(schedule, workers, elements)
        plain_seconds = plain_cost.compute_seconds(link_at, cluster.gamma, ELEMENT_BYTES)
        if compressor.sums:
            # ranks that agree on something exchange it first
            rounds = 2 if compressor.agrees else 1
            exchange_seconds = (
                compute_exchange_cost(
                    schedule, workers, int(payload / ELEMENT_BYTES / rounds)
                ).compute_seconds(link_at, cluster.gamma, ELEMENT_BYTES)
                * rounds
            )
            return payload, False, plain_seconds, exchange_seconds, length * sum(costs)
        sends_whole = (workers - 1) * payload >= ELEMENT_BYTES * plain_cost.sent
        exchange_seconds = (
            plain_seconds
            if sends_whole
            else (workers - 1) * link_at.compute_port_seconds(int(payload))
        )
        return (
            payload,
            sends_whole,
            plain_seconds,
            exchange_seconds,
            length * (costs[0] + costs[1] * (1 if sends_whole else workers)),
        )

    def predict_gain(length: float, beta: float) -> float:
        *_, plain_seconds, exchange_seconds, compute_seconds = predict_parts(length, beta)
        return plain_seconds - exchange_seconds - compute_seconds

    payload, sends_whole, plain_seconds, exchange_seconds, compute_seconds = predict_parts(
        size, cluster.link.beta
    )
    slowest = find_break_even(lambda beta: predict_gain(size, beta), 1.0)
    return CompressionCost(
        strategy,
        workers,
        size,
        machine,
        cluster,
        str(schedule),
        payload,
        sends_whole,
        plain_seconds,
        exchange_seconds,
        compute_seconds,
        1 / slowest if slowest else float("inf"),
        find_paying_lengths(
            lambda length: (
                compressor.compresses(choose_vector_shape(compressor, length))
                and predict_gain(length, cluster.link.beta) > 0
            )
        ),
    )


def find_break_even(line: Callable[[float], float], far: float) -> float:
    """Find where a line becomes positive.

    Args:
        line: a linear function of a number from 0.
        far: where the line is evaluated besides 0.

    Returns:
        The root of the line; 0 if it is positive everywhere, inf if it never is.
    """
    at_zero = line(0.0)
    at_far = line(far)
    if at_far <= 0:
        return float("inf")
    return 0.0 if at_zero >= 0 else far * at_zero / (at_zero - at_far)


def find_paying_lengths(is_paying: Callable[[float], bool]) -> tuple[tuple[float, float], ...]:
    """Find the ranges of vector lengths in which compressing pays, up to LONGEST_VECTOR.

    Lengths are sampled at powers of two. The ends of a range are exact to one element.

    Args:
        is_paying: tells whether compressing pays for a length in bytes.

    Returns:
        (first length, exclusive end) of each range, in bytes.
    """
    ends = list[float]()
    paid_before = False
    last_length = 0
    for power in range((LONGEST_VECTOR // ELEMENT_BYTES).bit_length()):
        low = last_length
        high = 1 << power
        last_length = high
        pays_now = is_paying(ELEMENT_BYTES * high)
        while pays_now != paid_before and high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if is_paying(ELEMENT_BYTES * middle) == pays_now else (middle, high)
            )
        ends += [float(ELEMENT_BYTES * high)] if pays_now != paid_before else []
        paid_before = pays_now
    return tuple(zip(ends[::2], [*ends[1::2], float("inf")], strict=False))


def choose_vector_shape(compressor: Compressor, length: float) -> tuple[int, ...]:
    """The shape in which a vector is compressed.

    Args:
        compressor: the compressor.
        length: bytes of the vector.
    """
    elements = int(length) // ELEMENT_BYTES
    return choose_square_shape(elements) if compressor.sums else (elements,)


def choose_square_shape(elements: int) -> tuple[int, int]:
    """The shape of a nearly square matrix of about `elements` elements."""
    side = max(1, isqrt(elements))
    return side, max(1, elements // side)
