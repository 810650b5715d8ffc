"""When does compressing pay? One exchange with a compressor and without, by closed form, with
what compressing costs measured.

With p ranks, vectors of n bytes, m bytes that stand for one, and links of alpha seconds a
message and beta a byte:

    plain        the all-reduce of n bytes: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma,
    along a ring adds up      the all-reduce of m bytes to all       (p-1) (alpha + m beta);
    where that is no less than plain sends, whole vectors of what they stand for

All are lines in beta, so there is one bandwidth below which it pays. Of lengths there may be
stretches: what goes to all saves (p-1) alpha whatever n is, so a costly compressor may pay for
short vectors, not for long ones. What a call costs at any length is left out. Most published
set-ups are on the other side (Agarwal et al. 2022, arXiv 2103.00543). Under `data(n)` a plain
exchange may hide behind backward, too, and a compressed one begins after it: on a link that is
fast enough for that this counts for the plain one.
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

ELEMENT_BYTES = 4  # bytes
LONGEST_VECTOR = 1 << 40  # bytes


@dataclass(frozen=True)
class CompressionCost:
    """Seconds of one exchange of a vector of `bytes` on each of `workers` ranks. payload: bytes
    that stand for one;  whole: but they are sent as whole vectors;  plain: without compressing;
    exchange: of what is sent;  compute: before and after it, on every rank;  bandwidth: of
    links, in bytes a second, below which it pays (inf: on all, 0: on none);  lengths: of
    vectors for which it pays on this link, in bytes: from, and up to but not with (inf: all
    from there on).
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
    """costs: seconds a byte of compressing a vector, and of adding up what one payload stands
    for. Raises Refused.
    """
    named = getattr(strategy, "reduce", None)
    schedule: Any = named if isinstance(named, AllReduce) else Ring()
    if size < ELEMENT_BYTES:
        raise Refused(
            f"--bytes {size} is less than one number, which has {ELEMENT_BYTES} bytes; give more"
        )
    if type(compressor).sends is Compressor.sends:
        raise Refused(
            f"{strategy}: how much {compressor} sends depends on the gradients; simulate "
            f"top_k(0.01) in its place"
        )
    if not compressor.compresses(choose_vector_shape(compressor, size)):
        raise Refused(
            f"{strategy}: {compressor} sends a vector of {size // ELEMENT_BYTES} numbers as it is; "
            f"give "
            f"more"
        )
    try:
        compute_exchange_cost(schedule, workers, 1)
    except LookupError as error:
        raise Refused(f"{strategy}: {error}, by which it is priced; leave reduce out") from None
    cluster = Cluster(machine.select_link(link), machine.gamma)

    def parts(length: float, beta: float) -> tuple[float, bool, float, float, float]:
        """(bytes that stand for a vector, are whole ones sent, seconds of the plain exchange,
        of the other, of computing).
        """
        at = (
            cluster.link
            if beta == cluster.link.beta
            else replace(cluster.link, beta=beta, points=())
        )
        elements = int(length) // ELEMENT_BYTES
        payload = compressor.sends(choose_vector_shape(compressor, length), ELEMENT_BYTES)
        plain = compute_exchange_cost(schedule, workers, elements)
        dense = plain.compute_seconds(at, cluster.gamma, ELEMENT_BYTES)
        if compressor.sums:
            rounds = 2 if compressor.agrees else 1  # what ranks agree on travels first
            other = (
                compute_exchange_cost(
                    schedule, workers, int(payload / ELEMENT_BYTES / rounds)
                ).compute_seconds(at, cluster.gamma, ELEMENT_BYTES)
                * rounds
            )
            return payload, False, dense, other, length * sum(costs)
        whole = (workers - 1) * payload >= ELEMENT_BYTES * plain.sent
        other = dense if whole else (workers - 1) * at.compute_port_seconds(int(payload))
        return (
            payload,
            whole,
            dense,
            other,
            length * (costs[0] + costs[1] * (1 if whole else workers)),
        )

    def gained(length: float, beta: float) -> float:
        *_, dense, other, computed = parts(length, beta)
        return dense - other - computed

    payload, whole, dense, other, computed = parts(size, cluster.link.beta)
    slowest = find_break_even(lambda beta: gained(size, beta), 1.0)
    return CompressionCost(
        strategy,
        workers,
        size,
        machine,
        cluster,
        str(schedule),
        payload,
        whole,
        dense,
        other,
        computed,
        1 / slowest if slowest else float("inf"),
        find_paying_lengths(
            lambda length: (
                compressor.compresses(choose_vector_shape(compressor, length))
                and gained(length, cluster.link.beta) > 0
            )
        ),
    )


def find_break_even(line: Callable[[float], float], far: float) -> float:
    """From where on a line is above 0: 0 where it is everywhere, inf where it never is."""
    first = line(0.0)
    last = line(far)
    if last <= 0:
        return float("inf")
    return 0.0 if first >= 0 else far * first / (first - last)


def find_paying_lengths(is_paying: Callable[[float], bool]) -> tuple[tuple[float, float], ...]:
    """The stretches of lengths in bytes, up to LONGEST, in which it pays, as powers of two see
    them; their ends to an element.
    """
    ends = list[float]()
    before = False
    last = 0
    for power in range((LONGEST_VECTOR // ELEMENT_BYTES).bit_length()):
        low = last
        high = 1 << power
        last = high
        now = is_paying(ELEMENT_BYTES * high)
        while now != before and high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if is_paying(ELEMENT_BYTES * middle) == now else (middle, high)
            )
        ends += [float(ELEMENT_BYTES * high)] if now != before else []
        before = now
    return tuple(zip(ends[::2], [*ends[1::2], float("inf")], strict=False))


def choose_vector_shape(compressor: Compressor, length: float) -> tuple[int, ...]:
    """Of a vector of so many bytes, as it is compressed."""
    elements = int(length) // ELEMENT_BYTES
    return choose_square_shape(elements) if compressor.sums else (elements,)


def choose_square_shape(elements: int) -> tuple[int, int]:
    """A matrix of so many elements, about."""
    side = max(1, isqrt(elements))
    return side, max(1, elements // side)
