"""How quick a rank is: slowed on purpose, where that is asked for, and measured, for shares
that follow it.

    slow="1=3x"             rank 1 takes three times as long for every step slow="random:0.2=3x"
    every rank does for a fifth of its steps, chosen by (seed, rank, step) pace=0.05
    a step of an equal share of a full batch takes at least 50 ms, one of another share in
    proportion

A rank is slowed by waiting after its backward: it computes what it would, so the training is
the same. What a rank takes for its samples is the time of its forwards on the clock, without
what batch norm waits for others, and for its backwards as much more as they cost of the core:
in a backward there may be an exchange, in which a quick rank waits for a slow one. On a GPU,
whose backward costs its own core nothing, it is twice that of the forward.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import torch

from paragrad.engine.passes import Passes
from paragrad.errors import Refused
from paragrad.planner.simulation import parse_slow_rank
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division, apportion_samples

# times a forward, on a GPU: a gradient of the input and one of the weights for each product
BACKWARD_FACTOR = 2.0
SHARE_RESOLUTION = 1000  # speeds are rounded to so many parts of a sample
# of the time of a step: shares that save less than a twentieth stay as they are
WORTHWHILE_RATIO = 0.95


@dataclass(frozen=True)
class SlowRanks:
    """Ranks with factors; (share of steps, factor) for all; and the least seconds of a step of
    an equal share.
    """

    ranks: tuple[tuple[int, float], ...] = ()
    random_slowdown: tuple[float, float] | None = None
    pace: float = 0.0

    def compute_slowdown(self, seed: int, rank: int, step: int) -> float:
        """How many times as long a rank takes for a step."""
        found = dict(self.ranks).get(rank, 1.0)
        if (
            self.random_slowdown
            and random.Random(f"paragrad slow {seed} {rank} {step}").random()
            < self.random_slowdown[0]
        ):
            found *= self.random_slowdown[1]
        return found


def read_slow_ranks(slow: str | None, pace: float | None) -> SlowRanks:
    """Settings `slow` and `pace`. Raises Refused."""
    if pace is not None and (
        isinstance(pace, bool) or not isinstance(pace, int | float) or not 0 < pace < inf
    ):
        raise Refused(f"pace must be seconds above 0, such as --pace 0.05, got {pace!r}")
    if slow is not None and not isinstance(slow, str):
        raise Refused(f"slow must be a text such as '1=3x' or 'random:0.2=3x', got {slow!r}")
    ranks = dict[int, float]()
    some = None
    for each in slow.split(",") if slow is not None else ():
        kind, _, rest = each.strip().partition(":")
        if kind != "random":
            rank, factor = parse_slow_rank(each)
            if rank in ranks:
                raise Refused(f"--slow {slow}: rank {rank} is there twice; give it one factor")
            ranks[rank] = factor
        elif some is not None:
            raise Refused(f"--slow {slow}: random is there twice; give it one share and factor")
        else:
            share, _, times = rest.partition("=")
            try:
                some = float(share), float(times.removesuffix("x"))
            except ValueError:
                raise Refused(
                    f"--slow {each}: write random:SHARE=FACTOR, such as random:0.2=3x"
                ) from None
            if not 0 < some[0] <= 1:
                raise Refused(
                    f"--slow {each}: {share} is the share of steps; give a number above 0, at most "
                    f"1"
                )
            factor = some[1]
        if not 1 <= factor < inf:
            raise Refused(f"--slow {each}: a rank is slowed by a factor; give at least 1")
    return SlowRanks(tuple(ranks.items()), some, float(pace or 0.0))


def refuse_unknown_ranks(slow_ranks: SlowRanks, workers: int) -> None:
    """Refuse to slow a worker that is not there."""
    if strange := [rank for rank, _ in slow_ranks.ranks if rank >= workers]:
        raise Refused(
            f"--slow {strange[0]}=...: there are {workers} worker(s); give one from 0 to "
            f"{workers - 1}"
        )


class Pace:
    """Of one rank: slows it, and adds up what it takes. rank: in the world;  seed: of the
    training;  on_gpu: is it on one?
    """

    def __init__(self, slow_ranks: SlowRanks, seed: int, rank: int, on_gpu: bool = False) -> None:
        self.slow_ranks = slow_ranks
        self.seed = seed
        self.rank = rank
        self.on_gpu = on_gpu
        # since shares were looked at last
        self.samples = 0
        self.seconds = 0.0
        self.epoch: int | None = None  # in which that was

    @contextlib.contextmanager
    def pace_step(self, step: int, samples: int, share: float, passes: Passes) -> Iterator[None]:
        """Around the passes of a step over so many samples. share: of a full batch, where all
        have equal ones.
        """
        forward = passes.forward_seconds
        on_core = passes.forward_cpu_seconds
        begun = time.thread_time()
        yield
        seconds = time.thread_time() - begun
        if self.on_gpu:
            seconds = (1 + BACKWARD_FACTOR) * (passes.forward_seconds - forward)
        elif (core := passes.forward_cpu_seconds - on_core) > 0:
            seconds *= (passes.forward_seconds - forward) / core
        wanted = max(
            seconds, self.slow_ranks.pace * samples / share
        ) * self.slow_ranks.compute_slowdown(self.seed, self.rank, step)
        # which is what is asked for: nobody is waited for
        time.sleep(wanted - seconds)
        if samples:  # not of one that stands in
            self.samples = self.samples + samples
            self.seconds = self.seconds + wanted

    def update_shares(
        self, world: World, full_batch: int, division: Division, log: StepLog, epoch: int
    ) -> Division:
        """A division of full batches in proportion to what all ranks measured, a sample at
        least for each; that of before where another is hardly worth it, nothing was measured,
        or they followed in this epoch before. Collective.
        """
        if epoch == self.epoch:
            return division
        told = [
            each.tolist()
            for each in world.all_gather(
                torch.tensor([self.samples, self.seconds], dtype=torch.float64)
            )
        ]
        self.samples = 0
        self.seconds = 0.0
        if not all(samples and seconds for samples, seconds in told):
            return division
        self.epoch = epoch
        speeds = [samples / seconds for samples, seconds in told]
        rest = apportion_samples(
            full_batch - len(speeds),
            [round(SHARE_RESOLUTION * full_batch * speed / sum(speeds)) for speed in speeds],
        )
        # who has none would never be measured again
        found = tuple(1 + more for more in rest)
        times = [
            max(
                samples / speed
                for samples, speed in zip(
                    apportion_samples(full_batch, shares), speeds, strict=True
                )
            )
            for shares in (division.shares, found)
        ]
        if times[1] >= WORTHWHILE_RATIO * times[0]:
            return division
        log.write_choice(
            "shares",
            str(list(found)),
            f"samples of a full batch from epoch {epoch} on; before it ranks took "
            + ", ".join(f"{speed:.0f}" for speed in speeds)
            + " samples a second",
        )
        return replace(division, shares=found)
