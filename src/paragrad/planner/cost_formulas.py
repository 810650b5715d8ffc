"""Closed forms: what an exchange costs, by formula. The clock agrees with them, up to 64 ranks
(tests/pure/test_price.py).

A message of x bytes takes alpha + beta x, an addition of x bytes gamma x; an addition hides
behind a message where it does not take longer. Where gamma > 0, two forms are upper bounds: the
tree's if p is no power of two, the blocking ring's if p is odd; and halving takes up to a
twentieth longer than its form if p is no power of two, because ranks that do not fold are early
and in the way. Sources: Chan et al. 2007 (tree, lower bounds), Thakur, Rabenseifner, Gropp 2005
(butterfly, halving), Patarasuk & Yuan 2009 (ring).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
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
    """Counts of one exchange. rounds, carried and added are those of its longest chain:
    messages one after the other, elements in them, and elements added where no message hides
    it.
    """

    rounds: int = 0  # factor of alpha
    carried: int = 0  # elements, factor of beta
    added: int = 0  # elements, factor of gamma
    messages: int = 0  # in all
    sent: int = 0  # elements, by the rank that sends most
    scratch: int = 0  # elements

    def __add__(self, other: ExchangeCost) -> ExchangeCost:
        """One after the other, the same rank sending most."""
        return ExchangeCost(
            self.rounds + other.rounds,
            self.carried + other.carried,
            self.added + other.added,
            self.messages + other.messages,
            self.sent + other.sent,
            max(self.scratch, other.scratch),
        )

    def compute_seconds(self, link: Link, gamma: float, element: int = 4) -> float:
        return self.rounds * link.alpha + element * (self.carried * link.beta + self.added * gamma)


@singledispatch
def compute_exchange_cost(schedule: Any, size: int, length: int) -> ExchangeCost:
    """The closed form of an all-reduce, or of a half of one, over `length` elements.
    LookupError where none is known.
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
    """The time of an all-reduce by closed form, with links of each rank's own. LookupError
    where none is known.
    """
    if not isinstance(schedule, TwoLevel):
        return compute_exchange_cost(schedule, size, length).compute_seconds(
            cluster.link, cluster.gamma, element
        )
    group = schedule.require_group_size(size)
    first, second = schedule.inside.build_halves()
    # rank 0 owns something in all of them
    share = len(first.owns(0, group)) / first.parts(group)
    within = compute_exchange_cost(first, group, length) + compute_exchange_cost(
        second, group, length
    )
    across = compute_exchange_cost(schedule.across, size // group, int(length * share))
    return within.compute_seconds(
        cluster.inside or cluster.link, cluster.gamma, element
    ) + across.compute_seconds(cluster.link, cluster.gamma, element)


def compute_lower_bounds(size: int, length: int) -> ExchangeCost:
    """Lower bounds, each term apart: ceil(lg p) alpha, 2(p-1)/p n beta, (p-1)/p n gamma (Chan
    et al. 2007).
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
    """Bytes from which `long`, of more rounds, is faster than `few`; None where it never is.
    Solves the two closed forms, which are lines in the number of bytes; length: elements so
    many that rounding to parts does not show.
    """
    one = compute_exchange_cost(fewer_rounds, size, length)
    other = compute_exchange_cost(more_rounds, size, length)
    saved = ((one.carried - other.carried) * link.beta + (one.added - other.added) * gamma) / length
    return (other.rounds - one.rounds) * link.alpha / saved if saved > 0 else None


def count_collective_bytes(collective: str, payload: int, size: int) -> int:
    """Bytes a rank sends in a backend's own collective over `payload` bytes: gloo's are
    rings.
    """
    return {
        "all_reduce": 2 * payload * (size - 1) // size,
        "all_gather": payload * (size - 1),
        "reduce_scatter": payload * (size - 1) // size,
        # the first rank, along a tree
        "broadcast": payload * (size - 1).bit_length(),
    }[collective]


# ---- one form for each half ------------------------------------------------------------------
def count_largest_part(half: Any, size: int, length: int) -> int:
    """Elements of the longest part."""
    return int(-(-length // half.parts(size)))


@compute_exchange_cost.register
def _(half: StarReduce, size: int, length: int) -> ExchangeCost:
    # rank 0, which sends most, sends in the broadcast only
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
    # the root, which sends most, sends in the broadcast only
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
    whole = rounds + (folded > 0)
    return ExchangeCost(
        whole,
        whole * length,
        whole * length,
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
    whole = length if folded else 0
    return ExchangeCost(
        rounds * half.segments + (folded > 0),
        moved * half.segments + whole,
        moved + whole,
        count_inner_ranks(size) * rounds * half.segments + folded,
        moved * half.segments,
        whole or count_inner_ranks(size) // 2 * part,
    )


@compute_exchange_cost.register
def _(half: DoublingAllGather, size: int, length: int) -> ExchangeCost:
    rounds = count_inner_ranks(size).bit_length() - 1
    folded = size - count_inner_ranks(size)
    part = count_largest_part(half, size, length)
    moved = (count_inner_ranks(size) - 1) * part * half.segments
    whole = length if folded else 0
    return ExchangeCost(
        rounds * half.segments + (folded > 0),
        moved + whole,
        0,
        count_inner_ranks(size) * rounds * half.segments + folded,
        moved + whole,
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
    # two neighbours that both send first hold up the others: two rounds
    if half.blocking and size % 2 == 1 and size > 1:
        rounds += 4
    return ExchangeCost(rounds, rounds * part, 0, size * messages, messages * part)
