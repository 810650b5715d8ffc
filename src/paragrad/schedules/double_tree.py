"""Double tree all-reduce: two binary trees at once, with half of the vector along each.

Source: Sanders, Speck, Traff 2009, doi 10.1016/j.parco.2009.09.001; in NCCL since 2.4.

A rank with children in one tree is a leaf in the other. Only rank 0 of an odd number of ranks has
one child in each. So no rank sends or receives more than the vector while it is added up, and once
more while the result is sent. Segments follow one another.

    first tree over 8 ranks        second: the first mirrored
          0                              7
          4                              3
       2     6                        5     1
      1 3   5 7                      6 4   2 0

For an odd number of ranks the second tree is the first one, shifted by one.

Time about 2 n beta + 4 lg p alpha for long vectors in many segments: bytes near those of the ring,
rounds near those of the tree. Scratch n/2s, for s segments of each half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar

from paragrad.notation.choices import Flag, Integer, Word, option
from paragrad.schedules.actions import AllReduceHalf, Program, Recv, Send
from paragrad.schedules.compose import SegmentedAllReduce


class DoubleTree(SegmentedAllReduce):
    """Two binary trees at once, half of the vector each (Sanders, Speck, Traff 2009).

    Attributes:
        segments: The number of segments of each half of the vector; auto: 8.

        reproducible: Whether the result has the same bits for every order of arrival.
    """

    # On eight ranks the trees are nearly as deep as this: filling them doubles the time.
    AUTO_SEGMENTS: ClassVar[int] = 8
    segments: int | str = option(Integer(), Word("auto"), default="auto")  # of each half
    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return DoubleTreeReduce(self.count_segments()), DoubleTreeBroadcast(self.count_segments())


@dataclass(frozen=True)
class TwoTrees:
    """The parts of both trees: the first half belongs to the first tree, the rest to the second.

    The root of each tree owns the parts of that tree.
    """

    segments: int

    def parts(self, size: int) -> int:
        return 2 * self.segments

    def owns(self, rank: int, size: int) -> range:
        first, second = (map_node_to_rank(0, size, tree) == rank for tree in (0, 1))
        return range(0 if first else self.segments, 2 * self.segments if second else self.segments)

    def list_broadcast_messages(self, rank: int, size: int) -> list[tuple[int, int, bool]]:
        """List the messages of one rank in a broadcast, in the order of their turns.

        Any other order would delay one tree because of the other. Everything that a message waits
        for has an earlier turn. So a rank may send in one turn only after it has sent in the turns
        before.

        Args:
            rank: The rank.
            size: The number of ranks.

        Returns:
            (peer, slot, whether the peer is the parent) of each message.
        """
        messages = []
        for tree, segment in product((0, 1), range(self.segments)):
            parent, children = find_double_tree_relatives(rank, size, tree)
            slot = tree * self.segments + segment
            later = 2 * segment
            if parent is not None:
                messages.append((compute_turn(rank, size, tree) + later, True, parent, slot))
            messages += [
                (compute_turn(child, size, tree) + later, False, child, slot) for child in children
            ]
        # In a turn, the send comes first.
        return [(peer, slot, is_parent) for _, is_parent, peer, slot in sorted(messages)]


@dataclass(frozen=True)
class DoubleTreeReduce(TwoTrees):
    """The broadcast backwards: receive and add the parts of the children, send to the parent."""

    def program(self, rank: int, size: int) -> Program:
        for peer, slot, is_parent in reversed(self.list_broadcast_messages(rank, size)):
            yield Send(peer, slot, after=True) if is_parent else Recv(peer, slot, add=True)


@dataclass(frozen=True)
class DoubleTreeBroadcast(TwoTrees):
    """Segment after segment: receive it from the parent, send it to the children."""

    def program(self, rank: int, size: int) -> Program:
        for peer, slot, is_parent in self.list_broadcast_messages(rank, size):
            yield Recv(peer, slot) if is_parent else Send(peer, slot, after=True)


@cache
def compute_turn(rank: int, size: int, tree: int) -> int:
    """Return the turn in which the first segment reaches a rank.

    The other segments follow in every second turn. In one turn no rank receives two messages, or
    sends two.

    Args:
        rank: The rank.
        size: The number of ranks.
        tree: The first (0) or second (1) tree.
    """
    parent, _ = find_double_tree_relatives(rank, size, tree)
    if parent is None:
        return 0
    after = compute_turn(parent, size, tree) + 1
    return after + (after + colour_messages(size)[tree, rank]) % 2


@cache
def colour_messages(size: int) -> dict[tuple[int, int], int]:
    """Colour the message that reaches a rank in a tree 0 or 1: the parity of its turns.

    The two messages that a rank receives along its two trees have different colours. So have the
    two that it sends to its children. The constraints form a graph of paths and even cycles, which
    is coloured alternately.

    Args:
        size: The number of ranks.

    Returns:
        The colour of each (tree, rank).
    """
    colours: dict[tuple[int, int], int] = {}
    for tree, rank in product((0, 1), range(size)):
        # From one message, in both directions along its path.
        ends = [((tree, rank), 0, True), ((tree, rank), 0, False)]
        while ends:
            (tree, rank), colour, by_receiver = ends.pop()
            if (
                colours.setdefault((tree, rank), colour) != colour
                or find_double_tree_relatives(rank, size, tree)[0] is None
            ):
                continue
            if by_receiver:
                other = 1 - tree, rank
            else:
                parent = find_double_tree_relatives(rank, size, tree)[0]
                assert parent is not None
                siblings = [
                    child
                    for child in find_double_tree_relatives(parent, size, tree)[1]
                    if child != rank
                ]
                if not siblings:
                    continue
                other = tree, siblings[0]
            if other not in colours:
                ends.append((other, 1 - colour, not by_receiver))
    return colours


def find_double_tree_relatives(rank: int, size: int, tree: int) -> tuple[int | None, list[int]]:
    """Return (parent, children) of a rank in a tree; the root has no parent.

    Args:
        rank: The rank.
        size: The number of ranks.
        tree: The first (0) or second (1) tree.
    """
    node = map_node_to_rank(rank, size, tree, inverse=True)
    near = [node + sign * (1 << k) for k in range(size.bit_length()) for sign in (-1, 1)]
    children = [
        other for other in near if 0 < other < size and _find_parent_node(other, size) == node
    ]
    parent = None if node == 0 else map_node_to_rank(_find_parent_node(node, size), size, tree)
    return parent, [map_node_to_rank(child, size, tree) for child in children]


def map_node_to_rank(node: int, size: int, tree: int, inverse: bool = False) -> int:
    """Return the rank at a node of a tree.

    Even nodes have children, odd nodes are leaves. The second tree swaps even and odd.

    Args:
        node: The node, or the rank if `inverse`.

        size: The number of ranks.

        tree: The first (0) or second (1) tree.

        inverse: Whether to return the node of a rank instead.
    """
    if tree == 0:
        return node
    if size % 2 == 0:
        return size - 1 - node
    return (node - 1 if inverse else node + 1) % size


def _find_parent_node(node: int, size: int) -> int:
    """Return the parent of a node in the tree with the in-order sequence 1, 2, 3, and so on.

    The level of a node is the number of its trailing zero bits. Its parent is the nearest existing
    node one level up. Node 0 is above all others.
    """
    step = node & -node
    above = node - step if node & (step << 1) else node + step
    return above if above < size else node - step
