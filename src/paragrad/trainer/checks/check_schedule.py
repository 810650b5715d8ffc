"""Which steps are compared with one worker's, so that all checks cost a part of the run's time.

The steps 1, 2, 4, 8 and 16 are checked. After them one step is drawn in each interval:

    step     1  2  4  8  16  |   interval 1   |       interval 2       | ...
    checked  *  *  *  *   *        *                             *

With a share of 1 every step is checked.

At each check rank 0 computes the length of the next interval from what checks and steps have cost,
and all ranks adopt the plan. If the number of steps is known, the checks that the share allows are
distributed over the rest of the run. The fixed checks may have cost more than that; then the last
step alone is checked. A run of less than 5 s is treated as one of 5 s. The step is drawn from the
seed, so a fault that lasts cannot lie between checks of a regular distance.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from paragrad.runtime.world import World

FIXED_STEPS = (1, 2, 4, 8, 16)
SHORT_RUN_SECONDS = 5.0  # a shorter run may take as much for its checks as one of this length


@dataclass(frozen=True)
class CheckCosts:
    """What checks and steps have cost on rank 0.

    Attributes:
        check_seconds: Seconds in all checks.
        expected_seconds: Seconds that the next check will probably take.
        run_seconds: Seconds since the first step began, checks included.
        step_seconds: Seconds of a step without its check.
    """

    check_seconds: float
    expected_seconds: float
    run_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class CheckPlan:
    """The next check, equal on all ranks. Steps are counted from 1, in this process.

    Attributes:
        step: The next step that is checked.
        interval_end: The last step of the interval in which it lies.
    """

    step: int = FIXED_STEPS[0]
    interval_end: int = FIXED_STEPS[0]

    def plan_next(
        self,
        done: int,
        seed: int,
        share: float,
        costs: CheckCosts,
        last_step: int | None = None,
    ) -> CheckPlan:
        """Plan the check after one that is done.

        Args:
            done: The step that was checked. If it was not the planned one but, for example, the
                last before a checkpoint, it takes the place of the planned one.

            seed: The seed of the training.

            share: The share of checks in the run's time, above 0 and at most 1. With 1 every step
                is checked.

            costs: What checks and steps have cost.

            last_step: The last step of the run, which is checked in any case; None if it is not
                known.
        """
        if share >= 1.0:
            return CheckPlan(done + 1, done + 1)
        if done < self.step <= FIXED_STEPS[-1]:
            return self
        if fixed := [step for step in FIXED_STEPS if step > done]:
            return CheckPlan(fixed[0], fixed[0])
        start = max(done, self.interval_end)
        step_seconds = max(costs.step_seconds, 1e-9)
        if last_step is not None and start < last_step:
            # with their own time, all checks take the share of the whole run
            steps_seconds = max(SHORT_RUN_SECONDS, step_seconds * last_step)
            allowed_seconds = share / (1.0 - share) * steps_seconds
            left_seconds = allowed_seconds - costs.check_seconds - costs.expected_seconds
            count = int(left_seconds / max(costs.expected_seconds, 1e-9))
            if count <= 0:
                return CheckPlan(last_step, last_step)
            length = max(1, (last_step - start) // count)
        else:
            # the checks so far, the next one and that of the run's last step cost the share of the
            # time until the interval's end
            wanted_seconds = (costs.check_seconds + 2 * costs.expected_seconds) / share
            missing_seconds = wanted_seconds - costs.run_seconds - costs.expected_seconds
            length = max(1, math.ceil(missing_seconds / step_seconds) - (start - done))
        drawn = random.Random(f"{seed} {start}").randrange(length)
        return CheckPlan(start + 1 + drawn, start + length)


class CheckSchedule:
    """Plans the checks of a training, and measures what checks and steps cost on this rank.

    Args:
        seed: The seed of the training.
        share: The share of checks in the run's time.

    Attributes:
        seed: As the argument.

        share: As the argument.

        plan: The next check.

        start: When the first check began, in seconds of the monotonic clock; None before it.

        check_seconds: Seconds in all checks.

        last_seconds: Seconds of the last check.

        count: The number of checks.

        last_equal: The last step that was compared and equal, as serial counts; None before it.

        planned_steps: The number of completed steps at the end of the run, as serial counts; None
            if only the user's own loop knows it.

        last_planned: (own step, seconds of all steps without checks) when the last plan was made.
    """

    def __init__(self, seed: int, share: float) -> None:
        self.seed = seed
        self.share = share
        self.plan = CheckPlan()
        self.start: float | None = None
        self.check_seconds = 0.0
        self.last_seconds = 0.0
        self.count = 0
        self.last_equal: int | None = None
        self.planned_steps: int | None = None
        self.last_planned = (0, 0.0)

    @contextlib.contextmanager
    def measure_part(self, begins: bool = False) -> Iterator[None]:
        """Measure a part of a check.

        Args:
            begins: Whether the check begins with this part.
        """
        before = time.monotonic()
        self.start = before if self.start is None else self.start
        if begins:
            self.last_seconds = 0.0
            self.count += 1
        try:
            yield
        finally:
            seconds = time.monotonic() - before
            self.last_seconds += seconds
            self.check_seconds += seconds

    def plan_end(self, steps: int) -> None:
        """Note how long the run is.

        Args:
            steps: The number of completed steps at its end, as serial counts.
        """
        self.planned_steps = steps

    def plan_next(self, own_step: int, step: int, world: World) -> int:
        """Plan the next check after one that found everything equal. Collective.

        Args:
            own_step: The number of the checked step in this process, from 1.
            step: The checked step, as serial counts.
            world: The ranks. Rank 0 plans for all.

        Returns:
            The number of the step of the next check.
        """
        self.last_equal = step
        run_seconds = 0.0 if self.start is None else time.monotonic() - self.start
        # one check takes longer than another if it needs a baseline
        expected_seconds = max(self.last_seconds, self.check_seconds / max(1, self.count))
        seconds_of_steps = run_seconds - self.check_seconds
        planned_step, planned_seconds = self.last_planned
        step_seconds = min(  # the first steps take longer than the later ones
            seconds_of_steps / own_step,
            (seconds_of_steps - planned_seconds) / max(1, own_step - planned_step),
        )
        self.last_planned = own_step, seconds_of_steps
        costs = CheckCosts(self.check_seconds, expected_seconds, run_seconds, step_seconds)
        last_own_step = (
            None if self.planned_steps is None else own_step + self.planned_steps - step - 1
        )
        self.plan = world.broadcast_object(
            self.plan.plan_next(own_step, self.seed, self.share, costs, last_own_step)
        )
        return self.plan.step
