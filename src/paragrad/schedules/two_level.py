"""Two-level all-reduce: one algorithm inside a host, another across hosts, where links differ.

Inside each group of neighbouring ranks, `inside` reduces. Then the ranks that own the same parts in
every group run `across` on these parts. Then `inside` distributes the sums in its group. With
rings: a reduce_scatter in the host, an all_reduce of a piece across, an all_gather in the host. So
each piece crosses the link of a host from a rank of its own.

    4 ranks, groups of 2    inside        across        inside
    0 | >1:0 <1:1+    >2:1 <2:1+    >1:1 <1:0           (across=butterfly)
    1 | >0:1 <0:0+    >3:0 <3:0+    >0:0 <0:1
    2 | >3:0 <3:1+    >0:1 <0:1+    >3:1 <3:0
    3 | >2:1 <2:0+    >1:0 <1:0+    >2:0 <2:1

Time of two rings, g ranks in each of N groups: 2(g-1) a + 2(g-1)/g n b inside, 2(N-1) alpha +
2(N-1)/N n/g beta across.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Self

from paragrad.errors import Refused
from paragrad.notation.choices import Choice, Flag, Integer, OneOf, Word, option
from paragrad.schedules.actions import Compute, Program, Recv, Send, Slot, make_slot
from paragrad.schedules.all_reduce import AllReduce
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.compose import ComposedAllReduce
from paragrad.schedules.direct import Direct
from paragrad.schedules.double_tree import DoubleTree
from paragrad.schedules.halving import Halving
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree

LEVEL_ALGORITHMS: tuple[type[Choice], ...] = (
    Star,
    Tree,
    DoubleTree,
    Butterfly,
    Halving,
    Direct,
    Ring,
    RingAsync,
)


class TwoLevel(AllReduce):
    """One algorithm inside a host, another across hosts (Jia et al. 2018, arXiv 1807.11205).

    Attributes:
        inside: The algorithm inside a group.

        across: The algorithm across groups.

        group: The ranks of a group; auto: those of a host.

        reproducible: Whether the result has the same bits for every order of arrival.
    """

    inside: ComposedAllReduce = option(OneOf(*LEVEL_ALGORITHMS), default=Ring())
    across: ComposedAllReduce = option(OneOf(*LEVEL_ALGORITHMS), default=Ring())
    group: int | str = option(Integer(), Word("auto"), default="auto")
    reproducible: bool = option(Flag(), default=False)

    def check_options(self) -> None:
        for level in (self.inside, self.across):
            if getattr(level, "reproducible", False):
                raise Refused(
                    "reproducible belongs to the whole exchange: write two_level(..., "
                    f"reproducible=true), and {level.name} without it"
                )

    def resolve(self, size: int, ranks_per_host: int) -> Self:
        resolved = replace(self, group=ranks_per_host if self.group == "auto" else self.group)
        group_size = resolved.require_group_size(size)
        return replace(
            resolved,
            inside=resolved.inside.resolve(group_size, group_size),
            across=resolved.across.resolve(size // group_size, 1),
        )

    def require_group_size(self, size: int) -> int:
        """Return the number of ranks of a group.

        Args:
            size: The number of all ranks.

        Raises:
            Refused: If the size of a group is not known, or does not divide `size`.
        """
        if isinstance(self.group, str):
            raise Refused(f"{self}: say how many ranks a group has, such as two_level(group=2)")
        if size % self.group:
            raise Refused(
                f"{self}: groups of {self.group} do not make up {size} ranks; give a group that "
                f"divides {size}"
            )
        return self.group

    def parts(self, size: int) -> int:
        group = self.require_group_size(size)
        return self.inside.parts(group) * self.across.parts(size // group)

    def program(self, rank: int, size: int) -> Program:
        group = self.require_group_size(size)
        host, rank_in_group = divmod(rank, group)
        hosts = size // group
        # `across` divides one part of `inside` into this many parts.
        parts_per_part = self.across.parts(hosts)
        first, second = self.inside.build_halves()
        owned = first.owns(rank_in_group, group)

        def run_inside(program: Program) -> Program:
            return translate_program(
                program,
                lambda peer: host * group + peer,
                lambda parts: (parts.start * parts_per_part, parts.stop * parts_per_part),
            )

        def run_across(program: Program) -> Program:
            start = owned.start * parts_per_part
            each = len(owned)
            return translate_program(
                program,
                lambda peer: peer * group + rank_in_group,
                lambda parts: (start + parts.start * each, start + parts.stop * each),
            )

        yield from run_inside(first.program(rank_in_group, group))
        if owned:
            yield from run_across(self.across.program(host, hosts))
        yield from run_inside(second.program(rank_in_group, group))


def translate_program(
    program: Program, map_peer: Callable[[int], int], map_parts: Callable[[range], tuple[int, int]]
) -> Program:
    """Translate a program among some ranks and some parts to the ranks and parts of the whole.

    Args:
        program: The program.

        map_peer: The rank of a peer in the whole.

        map_parts: The first part in the whole of a range of parts, and the one after the last.
    """

    def slot(old: Slot) -> Slot:
        assert not isinstance(old, str)
        return make_slot(*map_parts(old if isinstance(old, range) else range(old, old + 1)))

    for action in program:
        if isinstance(action, Send):
            yield replace(action, to=map_peer(action.to), slot=slot(action.slot))
        elif isinstance(action, Recv):
            yield replace(action, frm=map_peer(action.frm), slot=slot(action.slot))
        else:
            yield Compute(action.what, slot(action.at))
