"""Two-level all-reduce: one algorithm inside a host, another across hosts, where links differ.

Inside each group of neighbouring ranks, `inside` reduces; then those who own the same parts in
every group run `across` on what they own; then `inside` tells its group. With rings:
reduce_scatter in the host, all_reduce of a piece across, all_gather in the host, so each piece
crosses a host's link by a rank of its own.

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
    """One algorithm inside a host, another across hosts (Jia et al. 2018, arXiv 1807.11205)."""

    inside: ComposedAllReduce = option(OneOf(*LEVEL_ALGORITHMS), default=Ring())
    across: ComposedAllReduce = option(OneOf(*LEVEL_ALGORITHMS), default=Ring())
    # ranks of a group; auto: those of a host
    group: int | str = option(Integer(), Word("auto"), default="auto")
    reproducible: bool = option(Flag(), default=False)

    def check_options(self) -> None:
        for level in (self.inside, self.across):
            if getattr(level, "reproducible", False):
                raise Refused(
                    f"reproducible belongs to the whole exchange: write two_level(..., "
                    f"reproducible=true), "
                    f"and {level.name} without it"
                )

    def resolve(self, size: int, ranks_per_host: int) -> Self:
        found = replace(self, group=ranks_per_host if self.group == "auto" else self.group)
        each = found.require_group_size(size)
        return replace(
            found,
            inside=found.inside.resolve(each, each),
            across=found.across.resolve(size // each, 1),
        )

    def require_group_size(self, size: int) -> int:
        """Ranks of a group. Raises Refused where groups of that size do not make up `size`
        ranks.
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
        host, place = divmod(rank, group)
        hosts = size // group
        # parts that one part of `inside` is cut into
        finer = self.across.parts(hosts)
        first, second = self.inside.build_halves()
        owned = first.owns(place, group)

        def within(program: Program) -> Program:
            return translate_program(
                program,
                lambda peer: host * group + peer,
                lambda parts: (parts.start * finer, parts.stop * finer),
            )

        def between(program: Program) -> Program:
            start = owned.start * finer
            each = len(owned)
            return translate_program(
                program,
                lambda peer: peer * group + place,
                lambda parts: (start + parts.start * each, start + parts.stop * each),
            )

        yield from within(first.program(place, group))
        if owned:
            yield from between(self.across.program(host, hosts))
        yield from within(second.program(place, group))


def translate_program(
    program: Program, map_peer: Callable[[int], int], map_parts: Callable[[range], tuple[int, int]]
) -> Program:
    """A program among some ranks, over some of the parts, in the words of the whole."""

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
