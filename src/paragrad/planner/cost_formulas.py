"""Closed forms: the cost of an exchange by formula.

This is the alpha-beta model.

The clock agrees with them up to 64 ranks (tests/planner/test_cost_formulas.py). A message of x
bytes takes alpha + beta x, an addition of x bytes takes gamma x. An addition overlaps with a
message if it does not take longer.

If gamma > 0, two forms are upper bounds: the tree's for p that is no power of two, and the blocking
ring's for odd p. If p is no power of two, halving takes up to a twentieth longer than its form.
Ranks that do not fold start early and delay others.

Sources: Chan et al. 2007 (tree, lower bounds), Thakur, Rabenseifner, Gropp 2005 (butterfly,
halving), Patarasuk & Yuan 2009 (ring).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, singledispatch
from typing import Any

from paragrad.executors.machine import Cluster, Link
from paragrad.notation.choices import Choice
from paragrad.schedules.butterfly import ButterflyReduce, ButterflyUnfold, count_inner_ranks
from paragrad.schedules.compose import ComposedAllReduce
from paragrad.schedules.direct import DirectAllGather, DirectReduceScatter
from paragrad.schedules.halving import DoublingAllGather, HalvingReduceScatter
from paragrad.schedules.ring import RingAllGather, RingReduceScatter
from paragrad.schedules.star import StarBroadcast, StarReduce
from paragrad.schedules.tree import TreeBroadcast, TreeReduce
from paragrad.schedules.two_level import TwoLevel


@dataclass(frozen=True)
class ExchangeCost:
    """Counts of one exchange.

    `rounds`, `carried` and `added` belong to the longest chain of the exchange.

    Attributes:
        rounds: messages one after the other, the factor of alpha.

        carried: elements in these messages, the factor of beta.

        added: elements added that no message overlaps, the factor of gamma.

        messages: messages in all.

        sent: elements sent by the rank that sends most.

        scratch: elements of scratch memory.
    """

    rounds: int = 0
    carried: int = 0
    added: int = 0
    messages: int = 0
    sent: int = 0
    scratch: int = 0

    def __add__(self, other: ExchangeCost) -> ExchangeCost:
        """The cost of one exchange after the other, if the same rank sends most in both."""
        return ExchangeCost(
            self.rounds + other.rounds,
            self.carried + other.carried,
            self.added + other.added,
            self.messages + other.messages,
            self.sent + other.sent,
            max(self.scratch, other.scratch),
        )

    def compute_seconds(self, link: Link, gamma: float, element: int = 4) -> float:
        """The time of the exchange on a link.

        Args:
            link: gives alpha and beta.
            gamma: seconds per byte added.
            element: bytes of an element.
        """
        return self.rounds * link.alpha + element * (self.carried * link.beta + self.added * gamma)


@singledispatch
def compute_exchange_cost(schedule: Any, size: int, length: int) -> ExchangeCost:
    """The closed form of an all-reduce, or of one half of it.

    Args:
        schedule: the all-reduce, reduce-scatter or all-gather.
        size: number of ranks.
        length: elements of the vector.

    Raises:
        LookupError: no closed form of this schedule is known.
    """
    if isinstance(schedule, ComposedAllReduce):
        first, second = schedule.build_halves()
        return compute_exchange_cost(first, size, length) + compute_exchange_cost(
            second, size, length
        )
    raise LookupError(f"there is no closed form of {schedule}")


def predict_exchange_seconds(
    schedule: Any, size: int, length: int, cluster: Cluster, element: int = 4
) -> float:
    """The time of an all-reduce by closed form, if every rank has links of its own.

    Args:
        schedule: the all-reduce.
        size: number of ranks.
        length: elements of the vector.
        cluster: gives the links and gamma.
        element: bytes of an element.

    Raises:
        LookupError: no closed form of this schedule is known.
    """
    if not isinstance(schedule, TwoLevel):
        return compute_exchange_cost(schedule, size, length).compute_seconds(
            cluster.link, cluster.gamma, element
        )
    group = schedule.require_group_size(size)
    first, second = schedule.inside.build_halves()
    # rank 0 owns a part in all groups
    share = len(first.owns(0, group)) / first.parts(group)
    host_cost = compute_exchange_cost(first, group, length) + compute_exchange_cost(
        second, group, length
    )
    network_cost = compute_exchange_cost(schedule.across, size // group, int(length * share))
    return host_cost.compute_seconds(
        cluster.inside or cluster.link, cluster.gamma, element
    ) + network_cost.compute_seconds(cluster.link, cluster.gamma, element)


def compute_lower_bounds(size: int, length: int) -> ExchangeCost:
    """Lower bounds of an all-reduce, each term by itself (Chan et al. 2007).

    They are ceil(lg p) alpha, 2(p-1)/p n beta and (p-1)/p n gamma.

    Args:
        size: p, the number of ranks.
        length: n, the elements of the vector.
    """
    if size == 1:
        return ExchangeCost()
    return ExchangeCost(
        (size - 1).bit_length(),
        2 * (size - 1) * length // size,
        (size - 1) * length // size,
        sent=2 * (size - 1) * length // size,
    )


def find_crossover(
    fewer_rounds: Choice,
    more_rounds: Choice,
    size: int,
    link: Link,
    gamma: float,
    *,
    length: int = 1 << 40,
) -> float | None:
    """Find the vector length above which one algorithm is faster than another.

    Solves the two closed forms, which are lines in the number of bytes.

    Args:
        fewer_rounds: the algorithm for short vectors.

        more_rounds: the algorithm with more rounds, for long vectors.

        size: number of ranks.

        link: gives alpha and beta.

        gamma: seconds per byte added.

        length: elements at which the forms are evaluated; so many that rounding to parts does not
            show.

    Returns:
        The crossover in bytes; None if `more_rounds` is never faster.
    """
    first_cost = compute_exchange_cost(fewer_rounds, size, length)
    second_cost = compute_exchange_cost(more_rounds, size, length)
    saved_per_element = (
        (first_cost.carried - second_cost.carried) * link.beta
        + (first_cost.added - second_cost.added) * gamma
    ) / length
    return (
        (second_cost.rounds - first_cost.rounds) * link.alpha / saved_per_element
        if saved_per_element > 0
        else None
    )


@lru_cache(maxsize=4096)  # a step asks for the same sizes each time
def count_collective_bytes(collective: str, payload: int, size: int) -> int:
    """Count the bytes that a rank sends in a backend's own collective.

    Gloo's collectives are rings.

    Args:
        collective: all_reduce, all_gather, reduce_scatter or broadcast.
        payload: bytes of the vector.
        size: number of ranks.
    """
    return {
        "all_reduce": 2 * payload * (size - 1) // size,
        "all_gather": payload * (size - 1),
        "reduce_scatter": payload * (size - 1) // size,
        # sent by the first rank, along a tree
        "broadcast": payload * (size - 1).bit_length(),
    }[collective]


# ---- the closed form of each half ------------------------------------------------------------
def count_largest_part(half: Any, size: int, length: int) -> int:
    """Elements of the longest part of a vector.

    Args:
        half: the reduce-scatter or all-gather.
        size: number of ranks.
        length: elements of the vector.
    """
    return int(-(-length // half.parts(size)))


@compute_exchange_cost.register
def _(half: StarReduce, size: int, length: int) -> ExchangeCost:
    # rank 0 sends most in the whole all-reduce, all of it in the broadcast
    others = size - 1
    return (
        ExchangeCost(others, others * length, length, others, 0, length)
        if others
        else ExchangeCost()
    )


@compute_exchange_cost.register
def _(half: StarBroadcast, size: int, length: int) -> ExchangeCost:
    others = size - 1
    return ExchangeCost(others, others * length, 0, others, others * length)


@compute_exchange_cost.register
def _(half: TreeReduce, size: int, length: int) -> ExchangeCost:
    # the root sends most in the whole all-reduce, all of it in the broadcast
    levels = (size - 1).bit_length()
    return (
        ExchangeCost(levels, levels * length, levels * length, size - 1, 0, length)
        if levels
        else ExchangeCost()
    )


@compute_exchange_cost.register
def _(half: TreeBroadcast, size: int, length: int) -> ExchangeCost:
    levels = (size - 1).bit_length()
    return ExchangeCost(levels, levels * length, 0, size - 1, levels * length)


@compute_exchange_cost.register
def _(half: ButterflyReduce, size: int, length: int) -> ExchangeCost:
    rounds = count_inner_ranks(size).bit_length() - 1
    folded = size - count_inner_ranks(size)
    all_rounds = rounds + (folded > 0)
    return ExchangeCost(
        all_rounds,
        all_rounds * length,
        all_rounds * length,
        count_inner_ranks(size) * rounds + folded,
        rounds * length,
        length if size > 1 else 0,
    )


@compute_exchange_cost.register
def _(half: ButterflyUnfold, size: int, length: int) -> ExchangeCost:
    folded = size - count_inner_ranks(size)
    return ExchangeCost(1, length, 0, folded, length) if folded else ExchangeCost()


@compute_exchange_cost.register
def _(half: HalvingReduceScatter, size: int, length: int) -> ExchangeCost:
    rounds = count_inner_ranks(size).bit_length() - 1
    folded = size - count_inner_ranks(size)
    part = count_largest_part(half, size, length)
    moved = (count_inner_ranks(size) - 1) * part  # parts of one segment, over all rounds
    fold_length = length if folded else 0
    return ExchangeCost(
        rounds * half.segments + (folded > 0),
        moved * half.segments + fold_length,
        moved + fold_length,
        count_inner_ranks(size) * rounds * half.segments + folded,
        moved * half.segments,
        fold_length or count_inner_ranks(size) // 2 * part,
    )


@compute_exchange_cost.register
def _(half: DoublingAllGather, size: int, length: int) -> ExchangeCost:
    rounds = count_inner_ranks(size).bit_length() - 1
    folded = size - count_inner_ranks(size)
    part = count_largest_part(half, size, length)
    moved = (count_inner_ranks(size) - 1) * part * half.segments
    fold_length = length if folded else 0
    return ExchangeCost(
        rounds * half.segments + (folded > 0),
        moved + fold_length,
        0,
        count_inner_ranks(size) * rounds * half.segments + folded,
        moved + fold_length,
    )


@compute_exchange_cost.register
def _(half: DirectReduceScatter, size: int, length: int) -> ExchangeCost:
    others = size - 1
    part = count_largest_part(half, size, length)
    return (
        ExchangeCost(others, others * part, others * part, size * others, others * part, part)
        if others
        else ExchangeCost()
    )


@compute_exchange_cost.register
def _(half: DirectAllGather, size: int, length: int) -> ExchangeCost:
    others = size - 1
    part = count_largest_part(half, size, length)
    return ExchangeCost(others, others * part, 0, size * others, others * part)


@compute_exchange_cost.register
def _(half: RingReduceScatter, size: int, length: int) -> ExchangeCost:
    hops = size - 1
    part = count_largest_part(half, size, length)
    times = 2 if half.blocking else 1
    messages = hops * half.segments
    return (
        ExchangeCost(
            times * messages,
            times * messages * part,
            times * hops * part,
            size * messages,
            messages * part,
            part,
        )
        if hops
        else ExchangeCost()
    )


@compute_exchange_cost.register
def _(half: RingAllGather, size: int, length: int) -> ExchangeCost:
    messages = (size - 1) * half.segments
    part = count_largest_part(half, size, length)
    rounds = 2 * messages if half.blocking else messages
    # in an odd ring two neighbours both send first and delay the others by two hops
    if half.blocking and size % 2 == 1 and size > 1:
        rounds += 4
    return ExchangeCost(rounds, rounds * part, 0, size * messages, messages * part)
