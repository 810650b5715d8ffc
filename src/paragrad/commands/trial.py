"""The trial: data(auto) against one worker with all threads, before a training begins.

On one host the ranks share the cores, so model and batch decide which is faster. Both are the same
training.
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

WARM_UP_STEPS = 3  # steps that are not timed
MEASURED_SECONDS = 0.3  # approximate seconds that are timed
STEP_LIMITS = (3, 100)  # timed steps at least and at most
# Both are timed in turn, so that other work on the host affects both. If their times are within
# CLOSE_RATIO, the rounds are repeated.
TRIAL_ROUNDS = 3
CLOSE_RATIO = 1.15


def choose_by_trial(launcher: Launcher, validated_run: ValidatedRun) -> ValidatedRun:
    """Replace data(auto) by the alternative that is faster here, with the reason.

    The run is unchanged if its batch was fitted to what its ranks hold.

    Args:
        launcher: starts the ranks.
        validated_run: the run.

    Raises:
        RankFailed: a rank failed.
    """
    with convert_strategy_errors(validated_run.requested):
        alternatives = validated_run.requested.list_alternatives(validated_run.environment)
    if (
        not alternatives
        or validated_run.batch_reason
        or get_launched_size() is not None
        or (
            validated_run.settings.device != "cpu"
            or validated_run.settings.inject_fault
            or count_cores() == 1
        )
    ):
        return validated_run
    step_times: dict[Strategy, list[float]] = {
        each: [] for each in (validated_run.resolved, *alternatives)
    }
    for _ in range(2):
        for candidate in list(step_times) * TRIAL_ROUNDS:
            row = replace(validated_run, resolved=candidate)
            step_times[candidate].append(
                row.run_on_ranks(launcher, measure_seconds_per_step, row)[0]
            )
        least_times = {candidate: min(times) for candidate, times in step_times.items()}
        if max(least_times.values()) > CLOSE_RATIO * min(least_times.values()):
            break
    best = min(least_times, key=least_times.__getitem__)
    descriptions = ", ".join(
        f"{candidate} {1e3 * seconds:.2f} ms per step" for candidate, seconds in least_times.items()
    )
    return replace(validated_run, resolved=best, trial_result=f"tried for a moment: {descriptions}")


def measure_seconds_per_step(world: World, validated_run: ValidatedRun) -> float:
    """The median time of some first steps of the training, which are then discarded.

    Args:
        world: the ranks.
        validated_run: the run.
    """
    job = validated_run.job
    settings = validated_run.settings
    train = open_dataset(job.train, settings.folder)
    trainer = Trainer.build_for_job(
        world, job, validated_run.resolved, settings, skip_first_step_check=True
    )
    durations: list[float] = []
    wanted_steps = WARM_UP_STEPS + 1
    try:
        epochs = (
            trainer.batches(train, job.batch, epoch, loaders=settings.loaders, sampler=job.sampler)
            for epoch in itertools.count()
        )
        step_start = time.monotonic()
        for fetched in itertools.chain.from_iterable(epochs):
            trainer.step(*separate_target(fetched))
            durations.append(time.monotonic() - step_start)
            if len(durations) == WARM_UP_STEPS + 1:
                wanted_steps += world.broadcast_object(
                    max(STEP_LIMITS[0], min(STEP_LIMITS[1], int(MEASURED_SECONDS / durations[-1])))
                )
            if len(durations) >= wanted_steps:
                break
            step_start = time.monotonic()
    finally:
        trainer.close()
    return statistics.median(durations[WARM_UP_STEPS:])
