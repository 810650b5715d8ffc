"""The speed of a rank: slowed on purpose, or measured so that shares can follow it.

    slow="1=3x"              rank 1 takes three times as long for every step
    slow="random:0.2=3x"     every rank does so for a fifth of its steps, which are chosen by
                             (seed, rank, step)
    pace=0.05                a step over an equal share of a full batch takes at least 50 ms;
                             other shares take time in proportion

A rank is slowed by a wait after its backward. It computes what it would compute anyway, so the
training is the same.

The time that a rank needs for its samples is that of its forwards and backwards. The forwards
are measured by the wall clock, without the time that batch norm waits for other ranks. The
backwards are estimated from CPU time, in proportion to the forwards. The reason is that a
backward may contain an exchange in which a fast rank waits for a slow one. On a GPU, a backward
costs the CPU nothing; it counts as twice the forward.
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

# the time of a backward on a GPU, in forwards: two gradients (input, weights) for each product
BACKWARD_FACTOR = 2.0
SHARE_RESOLUTION = 1000  # resolution: speeds are rounded to thousandths of a batch
# ratio of step times: shares change only if they save at least 5 %
WORTHWHILE_RATIO = 0.95


@dataclass(frozen=True)
class SlowRanks:
    """The ranks that are slowed on purpose.

    Attributes:
        ranks: (rank, factor) of single ranks.
        random_slowdown: (fraction of steps, factor) for all ranks, or None.
        pace: The least seconds of a step over an equal share.
    """

    ranks: tuple[tuple[int, float], ...] = ()
    random_slowdown: tuple[float, float] | None = None
    pace: float = 0.0

    def compute_slowdown(self, seed: int, rank: int, step: int) -> float:
        """Return the factor by which a step of a rank takes longer.

        Args:
            seed: The seed of the training.
            rank: The rank.
            step: The step.
        """
        slowdown = dict(self.ranks).get(rank, 1.0)
        if (
            self.random_slowdown
            and random.Random(f"paragrad slow {seed} {rank} {step}").random()
            < self.random_slowdown[0]
        ):
            slowdown *= self.random_slowdown[1]
        return slowdown


def read_slow_ranks(slow: str | None, pace: float | None) -> SlowRanks:
    """Read the settings `slow` and `pace`.

    Args:
        slow: A text such as "1=3x" or "random:0.2=3x", or None.
        pace: The least seconds of a step over an equal share, or None.

    Raises:
        Refused: If a value cannot be read or is out of range.
    """
    if pace is not None and (
        isinstance(pace, bool) or not isinstance(pace, int | float) or not 0 < pace < inf
    ):
        raise Refused(f"pace must be seconds above 0, such as --pace 0.05, got {pace!r}")
    if slow is not None and not isinstance(slow, str):
        raise Refused(f"slow must be a text such as '1=3x' or 'random:0.2=3x', got {slow!r}")
    ranks = dict[int, float]()
    random_slowdown = None
    for each in slow.split(",") if slow is not None else ():
        kind, _, rest = each.strip().partition(":")
        if kind != "random":
            rank, factor = parse_slow_rank(each)
            if rank in ranks:
                raise Refused(f"--slow {slow}: rank {rank} appears twice; give it one factor")
            ranks[rank] = factor
        elif random_slowdown is not None:
            raise Refused(f"--slow {slow}: random appears twice; give it one share and factor")
        else:
            share, _, times_text = rest.partition("=")
            try:
                random_slowdown = float(share), float(times_text.removesuffix("x"))
            except ValueError:
                raise Refused(
                    f"--slow {each}: write random:SHARE=FACTOR, such as random:0.2=3x"
                ) from None
            if not 0 < random_slowdown[0] <= 1:
                raise Refused(
                    f"--slow {each}: {share} is the share of steps; give a number above 0, at most "
                    "1"
                )
            factor = random_slowdown[1]
        if not 1 <= factor < inf:
            raise Refused(f"--slow {each}: a rank is slowed by a factor; give at least 1")
    return SlowRanks(tuple(ranks.items()), random_slowdown, float(pace or 0.0))


def refuse_unknown_ranks(slow_ranks: SlowRanks, workers: int) -> None:
    """Refuse to slow a worker that does not exist.

    Args:
        slow_ranks: The ranks that are slowed.
        workers: The number of workers.

    Raises:
        Refused: If a slowed rank is not below `workers`.
    """
    if strange := [rank for rank, _ in slow_ranks.ranks if rank >= workers]:
        raise Refused(
            f"--slow {strange[0]}=...: there are {workers} worker(s); give one from 0 to "
            f"{workers - 1}"
        )


class Pace:
    """Slows one rank, and sums up the time that its samples take.

    Args:
        slow_ranks: The ranks that are slowed.
        seed: The seed of the training.
        rank: This rank's number in the world.
        on_gpu: Whether the rank runs on a GPU.
    """

    def __init__(self, slow_ranks: SlowRanks, seed: int, rank: int, on_gpu: bool = False) -> None:
        self.slow_ranks = slow_ranks
        self.seed = seed
        self.rank = rank
        self.on_gpu = on_gpu
        # sums since the last update of the shares
        self.samples = 0
        self.seconds = 0.0
        self.epoch: int | None = None  # the epoch of the last update

    @contextlib.contextmanager
    def pace_step(self, step: int, samples: int, share: float, passes: Passes) -> Iterator[None]:
        """Measure the passes of a step, and wait after them if this rank is slowed.

        Args:
            step: The step.

            samples: The number of samples in this rank's share.

            share: The number of samples in an equal share of a full batch.

            passes: The passes of the strategy, which measure their time.
        """
        forward = passes.forward_seconds
        on_core = passes.forward_cpu_seconds
        start = time.thread_time()
        yield
        seconds = time.thread_time() - start
        if self.on_gpu:
            seconds = (1 + BACKWARD_FACTOR) * (passes.forward_seconds - forward)
        elif (core_seconds := passes.forward_cpu_seconds - on_core) > 0:
            seconds *= (passes.forward_seconds - forward) / core_seconds
        target_seconds = max(
            seconds, self.slow_ranks.pace * samples / share
        ) * self.slow_ranks.compute_slowdown(self.seed, self.rank, step)
        # The sleep is intended: it slows this rank, and no other rank is waited for.
        time.sleep(target_seconds - seconds)
        if samples:  # A rank without samples runs a placeholder sample, which does not count.
            self.samples = self.samples + samples
            self.seconds = self.seconds + target_seconds

    def update_shares(
        self, world: World, full_batch: int, division: Division, log: StepLog, epoch: int
    ) -> Division:
        """Divide full batches in proportion to the speeds that all ranks measured.

        Collective. Each rank gets at least one sample. The division stays as it is in three cases.
        The new one saves less than 5 % of a step, nothing was measured, or the shares were updated
        in this epoch already.

        Args:
            world: The replicas among which a batch is divided.

            full_batch: The number of samples of a full batch.

            division: The current division.

            log: The log in which a new division is recorded.

            epoch: The epoch that begins.

        Returns:
            The division to use from here on.
        """
        if epoch == self.epoch:
            return division
        measurements = [
            each.tolist()
            for each in world.all_gather(
                torch.tensor([self.samples, self.seconds], dtype=torch.float64)
            )
        ]
        self.samples = 0
        self.seconds = 0.0
        if not all(samples and seconds for samples, seconds in measurements):
            return division
        self.epoch = epoch
        speeds = [samples / seconds for samples, seconds in measurements]
        rest = apportion_samples(
            full_batch - len(speeds),
            [round(SHARE_RESOLUTION * full_batch * speed / sum(speeds)) for speed in speeds],
        )
        # A rank without samples would never be measured again.
        new_shares = tuple(1 + extra for extra in rest)
        times = [
            max(
                samples / speed
                for samples, speed in zip(
                    apportion_samples(full_batch, shares), speeds, strict=True
                )
            )
            for shares in (division.shares, new_shares)
        ]
        if times[1] >= WORTHWHILE_RATIO * times[0]:
            return division
        log.write_choice(
            "shares",
            str(list(new_shares)),
            f"samples of a full batch from epoch {epoch} on; before it ranks took "
            + ", ".join(f"{speed:.0f}" for speed in speeds)
            + " samples a second",
        )
        return replace(division, shares=new_shares)
