"""Double tree all-reduce (Sanders, Speck, Traff 2009, doi 10.1016/j.parco.2009.09.001; NCCL
since 2.4): two binary trees at once, half of the vector along each. Whoever has children in one
tree is a leaf in the other (but for rank 0 of an odd number, which has one in each), so no rank
sends or receives more than the vector while it is added up, and once more while it is told;
segments follow one another.

    first tree over 8 ranks        second: the first mirrored (an odd number of ranks: shifted
    by one)
          0                              7
          4                              3
       2     6                        5     1
      1 3   5 7                      6 4   2 0

Time about 2 n beta + 4 lg p alpha for long vectors in many segments: bytes near the ring's,
rounds near the tree's. Scratch n/2s, for s segments of each half.
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
    """Two binary trees at once, half of the vector each (Sanders, Speck, Traff 2009)."""

    # on eight ranks the trees are about as deep: filling them costs as much again
    AUTO_SEGMENTS: ClassVar[int] = 8
    segments: int | str = option(Integer(), Word("auto"), default="auto")  # of each half
    reproducible: bool = option(Flag(), default=False)

    def build_halves(self) -> tuple[AllReduceHalf, AllReduceHalf]:
        return DoubleTreeReduce(self.count_segments()), DoubleTreeBroadcast(self.count_segments())


@dataclass(frozen=True)
class TwoTrees:
    """The first segments belong to the first tree, the others to the second; each tree's root
    owns its own.
    """

    segments: int

    def parts(self, size: int) -> int:
        return 2 * self.segments

    def owns(self, rank: int, size: int) -> range:
        first, second = (map_node_to_rank(0, size, tree) == rank for tree in (0, 1))
        return range(0 if first else self.segments, 2 * self.segments if second else self.segments)

    def list_broadcast_messages(self, rank: int, size: int) -> list[tuple[int, int, bool]]:
        """(peer, slot, whether it is the parent) of all messages of a broadcast, in the order
        of their turns. Any other order would hold up one tree for the other. What a message
        waits for has an earlier turn, so a rank may well give in one turn only when it has
        given in the turns before.
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
        # in a turn, first what is given
        return [(peer, slot, is_parent) for _, is_parent, peer, slot in sorted(messages)]


@dataclass(frozen=True)
class DoubleTreeReduce(TwoTrees):
    """The broadcast backwards: take and add what children have, give it to the parent."""

    def program(self, rank: int, size: int) -> Program:
        for peer, slot, is_parent in reversed(self.list_broadcast_messages(rank, size)):
            yield Send(peer, slot, after=True) if is_parent else Recv(peer, slot, add=True)


@dataclass(frozen=True)
class DoubleTreeBroadcast(TwoTrees):
    """Segment after segment: take it from the parent, give it to the children."""

    def program(self, rank: int, size: int) -> Program:
        for peer, slot, is_parent in self.list_broadcast_messages(rank, size):
            yield Recv(peer, slot) if is_parent else Send(peer, slot, after=True)


@cache
def compute_turn(rank: int, size: int, tree: int) -> int:
    """When the first segment comes to a rank; the others follow in every second turn. In a turn
    no rank takes two, or gives two.
    """
    parent, _ = find_double_tree_relatives(rank, size, tree)
    if parent is None:
        return 0
    after = compute_turn(parent, size, tree) + 1
    return after + (after + colour_messages(size)[tree, rank]) % 2


@cache
def colour_messages(size: int) -> dict[tuple[int, int], int]:
    """0 or 1 for the message that comes to a rank in a tree (tree, rank): turns of one parity.
    What a rank gets along its two trees differs, and so does what it gives to its two children.
    That is a graph of paths and even cycles, coloured in turn.
    """
    found: dict[tuple[int, int], int] = {}
    for tree, rank in product((0, 1), range(size)):
        # from one message both ways along its path
        ends = [((tree, rank), 0, True), ((tree, rank), 0, False)]
        while ends:
            (tree, rank), colour, by_receiver = ends.pop()
            if (
                found.setdefault((tree, rank), colour) != colour
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
            if other not in found:
                ends.append((other, 1 - colour, not by_receiver))
    return found


def find_double_tree_relatives(rank: int, size: int, tree: int) -> tuple[int | None, list[int]]:
    """(parent, children) of a rank in the first (0) or second (1) tree; the root has no
    parent.
    """
    node = map_node_to_rank(rank, size, tree, inverse=True)
    near = [node + sign * (1 << k) for k in range(size.bit_length()) for sign in (-1, 1)]
    children = [
        other for other in near if 0 < other < size and _find_parent_node(other, size) == node
    ]
    parent = None if node == 0 else map_node_to_rank(_find_parent_node(node, size), size, tree)
    return parent, [map_node_to_rank(child, size, tree) for child in children]


def map_node_to_rank(node: int, size: int, tree: int, inverse: bool = False) -> int:
    """The rank at a node of a tree; with back, the node of a rank. Even nodes have children,
    odd ones are leaves: the second tree swaps even and odd.
    """
    if tree == 0:
        return node
    if size % 2 == 0:
        return size - 1 - node
    return (node - 1 if inverse else node + 1) % size


def _find_parent_node(node: int, size: int) -> int:
    """In the tree whose order is 1, 2, 3, ...: a node's level is the number of its last zero
    bits, its parent the nearest node one level up that is there. Node 0 is above them all.
    """
    step = node & -node
    above = node - step if node & (step << 1) else node + step
    return above if above < size else node - step
