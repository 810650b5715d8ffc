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

from paragrad.datasets.loading import separate_target
from paragrad.jobs.job import open_dataset
from paragrad.launch import Launcher
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.rendezvous import get_launched_size
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import ValidatedRun, convert_strategy_errors

WARM_UP_STEPS = 3  # steps before the clock runs
MEASURED_SECONDS = 0.3  # seconds that are measured, about
STEP_LIMITS = (3, 100)  # but at least and at most so many
TRIAL_ROUNDS = 3  # in turn, so that what else runs here hits both,
CLOSE_RATIO = 1.15  # ... and as many again if the two are not further apart than this


def choose_by_trial(launcher: Launcher, validated_run: ValidatedRun) -> ValidatedRun:
    """The same admission with data(auto) replaced by what was faster here, and why; as it is
    where its batch was fitted to what its ranks hold. Raises RankFailed.
    """
    with convert_strategy_errors(validated_run.requested):
        others = validated_run.requested.list_alternatives(validated_run.environment)
    if (
        not others
        or validated_run.batch_reason
        or get_launched_size() is not None
        or (
            validated_run.settings.device != "cpu"
            or validated_run.settings.inject_fault
            or count_cores() == 1
        )
    ):
        return validated_run
    seen: dict[Strategy, list[float]] = {each: [] for each in (validated_run.resolved, *others)}
    for _ in range(2):
        for candidate in list(seen) * TRIAL_ROUNDS:
            row = replace(validated_run, resolved=candidate)
            seen[candidate].append(row.run_on_ranks(launcher, measure_seconds_per_step, row)[0])
        least = {candidate: min(times) for candidate, times in seen.items()}
        if max(least.values()) > CLOSE_RATIO * min(least.values()):
            break
    best = min(least, key=least.__getitem__)
    told = ", ".join(
        f"{candidate} {1e3 * seconds:.2f} ms per step" for candidate, seconds in least.items()
    )
    return replace(validated_run, resolved=best, trial_result=f"tried for a moment: {told}")


def measure_seconds_per_step(world: World, validated_run: ValidatedRun) -> float:
    """The median over some first steps of the training, which are then forgotten."""
    job = validated_run.job
    settings = validated_run.settings
    train = open_dataset(job.train, settings.folder)
    trainer = Trainer.build_for_job(
        world, job, validated_run.resolved, settings, skip_first_step_check=True
    )
    taken: list[float] = []
    wanted = WARM_UP_STEPS + 1
    try:
        epochs = (
            trainer.batches(train, job.batch, epoch, loaders=settings.loaders)
            for epoch in itertools.count()
        )
        begun = time.monotonic()
        for fetched in itertools.chain.from_iterable(epochs):
            trainer.step(*separate_target(fetched))
            taken.append(time.monotonic() - begun)
            if len(taken) == WARM_UP_STEPS + 1:
                wanted += world.broadcast_object(
                    max(STEP_LIMITS[0], min(STEP_LIMITS[1], int(MEASURED_SECONDS / taken[-1])))
                )
            if len(taken) >= wanted:
                break
            begun = time.monotonic()
    finally:
        trainer.close()
    return statistics.median(taken[WARM_UP_STEPS:])
