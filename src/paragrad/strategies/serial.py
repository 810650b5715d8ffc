"""serial: one worker, the reference of every other strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

from paragrad.errors import Refused
from paragrad.notation.choices import Integer, Word, option
from paragrad.runtime.mesh import Axis
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Environment, Guarantees, Strategy


class Serial(Strategy):
    """One worker, the reference of every other strategy.

    Attributes:
        threads: The threads; auto: OMP_NUM_THREADS, or all cores.
        micro: The micro-batches per step.
    """

    threads: int | str = option(Integer(), Word("auto"), default="auto")
    micro: int = option(Integer(), default=1)
    workers: ClassVar[int] = 1
    is_reference = True

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return ()

    @property
    def division(self) -> Division:
        return Division(micro=self.micro)

    def resolve(self, environment: Environment) -> Self:
        if self.threads != "auto":
            return self
        return replace(self, threads=environment.threads or environment.cores)

    def refuse_factors(self, factors: tuple[Strategy, ...]) -> None:
        raise Refused("serial is one worker and cannot be multiplied; leave it out")
