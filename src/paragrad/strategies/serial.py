"""serial: one worker, the reference of every other strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

from paragrad.errors import Refused
from paragrad.notation.choices import Integer, Word, option
from paragrad.runtime.mesh import Axis
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Here, Promise, Strategy


class Serial(Strategy):
    """One worker, the reference of every other strategy."""

    threads: int | str = option(Integer(), Word("auto"), default="auto")  # auto: all cores
    # micro-batches per step
    micro: int = option(Integer(), default=1)
    workers: ClassVar[int] = 1
    reference = True

    @property
    def promise(self) -> Promise:
        return Promise()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return ()

    @property
    def division(self) -> Division:
        return Division(micro=self.micro)

    def resolved(self, here: Here) -> Self:
        return replace(self, threads=here.cores) if self.threads == "auto" else self

    def refuse_beside(self, factors: tuple[Strategy, ...]) -> None:
        raise Refused("serial is one worker and cannot be multiplied; leave it out")
