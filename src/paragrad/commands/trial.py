"""The trial: data(auto) against one worker with all threads, for a moment, before a training
begins.

On one host the ranks share the cores, so which is faster depends on the model and the batch;
both are the same training.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace

from paragrad.datasets.loading import parted
from paragrad.jobs.job import opened
from paragrad.launch import Ranks
from paragrad.runtime.launcher_env import cores
from paragrad.runtime.rendezvous import launched_size
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import Admitted, asking

WARM_UP = 3  # steps before the clock runs
MOMENT = 0.3  # seconds that are measured, about
STEPS = (3, 100)  # but at least and at most so many
ROUNDS = 3  # in turn, so that what else runs here hits both,
CLOSE = 1.15  # ... and as many again if the two are not further apart than this


def tried(ranks: Ranks, checked: Admitted) -> Admitted:
    """The same admission with data(auto) replaced by what was faster here, and why; as it is
    where its batch was fitted to what its ranks hold. Raises RankFailed.
    """
    with asking(checked.asked):
        others = checked.asked.alternatives(checked.here)
    if (
        not others
        or checked.fitted
        or launched_size() is not None
        or (checked.settings.device != "cpu" or checked.settings.sabotage or cores() == 1)
    ):
        return checked
    seen: dict[Strategy, list[float]] = {each: [] for each in (checked.resolved, *others)}
    for _ in range(2):
        for candidate in list(seen) * ROUNDS:
            row = replace(checked, resolved=candidate)
            seen[candidate].append(row.on(ranks, seconds_per_step, row)[0])
        least = {candidate: min(times) for candidate, times in seen.items()}
        if max(least.values()) > CLOSE * min(least.values()):
            break
    best = min(least, key=least.__getitem__)
    told = ", ".join(
        f"{candidate} {1e3 * seconds:.2f} ms per step" for candidate, seconds in least.items()
    )
    return replace(checked, resolved=best, tried=f"tried for a moment: {told}")


def seconds_per_step(world: World, checked: Admitted) -> float:
    """The median over some first steps of the training, which are then forgotten."""
    job = checked.job
    settings = checked.settings
    train = opened(job.train, settings.folder)
    trainer = Trainer.of_job(world, job, checked.resolved, settings, unchecked=True)
    taken: list[float] = []
    wanted = WARM_UP + 1
    try:
        epochs = (
            trainer.batches(train, job.batch, epoch, loaders=settings.loaders)
            for epoch in itertools.count()
        )
        begun = time.monotonic()
        for fetched in itertools.chain.from_iterable(epochs):
            trainer.step(*parted(fetched))
            taken.append(time.monotonic() - begun)
            if len(taken) == WARM_UP + 1:
                wanted += world.agreed(max(STEPS[0], min(STEPS[1], int(MOMENT / taken[-1]))))
            if len(taken) >= wanted:
                break
            begun = time.monotonic()
    finally:
        trainer.close()
    return statistics.median(taken[WARM_UP:])
