"""Which steps are checked: first at doubling distances, then one drawn step in each interval."""

from __future__ import annotations

import itertools

import pytest

from paragrad.trainer.checks.check_schedule import (
    FIXED_STEPS,
    SHORT_RUN_SECONDS,
    CheckCosts,
    CheckPlan,
)

pytestmark = pytest.mark.pure


def list_checks(
    steps: int,
    share: float,
    seed: int = 0,
    step_seconds: float = 1.0,
    check_seconds: float = 3.0,
    is_end_known: bool = False,
) -> list[int]:
    """List the checked steps of a run; all steps, and all checks, take equally long."""
    plan = CheckPlan()
    checked = []
    for step in range(1, steps + 1):
        if step == plan.step or (is_end_known and step == steps):
            checked.append(step)
            spent = check_seconds * len(checked)
            costs = CheckCosts(spent, check_seconds, step_seconds * step + spent, step_seconds)
            plan = plan.plan_next(step, seed, share, costs, steps if is_end_known else None)
    return checked


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_checks_cost_their_share_of_the_time(share: float) -> None:
    steps = 40_000
    checked = list_checks(steps, share)
    assert tuple(checked[: len(FIXED_STEPS)]) == FIXED_STEPS
    seconds = 3.0 * len(checked)
    assert 0.9 * share < seconds / (steps + seconds) < 1.02 * share


def test_a_share_of_one_checks_every_step() -> None:
    checked = list_checks(100, 1.0)
    assert checked == list(range(1, 101))


def test_steps_are_drawn_from_the_seed_and_lie_irregularly() -> None:
    """Checks at a regular distance could miss a fault that occurs in every n-th step."""
    first, again, other = (list_checks(20_000, 0.05, seed) for seed in (1, 1, 2))
    assert first == again != other
    distances = {b - a for a, b in itertools.pairwise(first[5:])}
    assert len(distances) > 20


def test_each_interval_has_one_check() -> None:
    costs = CheckCosts(15.0, 3.0, 31.0, 1.0)
    plan = CheckPlan(16, 16)
    for _ in range(50):
        following = plan.plan_next(plan.step, 3, 0.1, costs)
        assert plan.interval_end < following.step <= following.interval_end
        plan = following


def test_a_check_before_the_planned_one_takes_its_place() -> None:
    """For example, the last step before a checkpoint is checked, instead of the planned step."""
    plan = CheckPlan(40, 60)
    following = plan.plan_next(30, 0, 0.01, CheckCosts(1.0, 1.0, 2.0, 0.03))
    assert 60 < following.step <= following.interval_end


def test_a_check_between_the_fixed_ones_leaves_them() -> None:
    plan = CheckPlan(8, 8)
    assert plan.plan_next(5, 0, 0.01, CheckCosts(1.0, 1.0, 2.0, 0.03)) == plan


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [100, 500, 2_000, 3_000, 10_000])
@pytest.mark.parametrize("share", [0.01, 0.05])
def test_checks_of_a_run_of_known_length_cost_their_share(
    steps: int, share: float, seed: int
) -> None:
    """If the fixed checks cost more than the share, the last step alone is checked after them.

    Earlier, an interval could be longer than the rest of the run. A step was drawn in it all the
    same, and by chance in its first part. So runs of 2,000 steps had one or two checks too many.
    """
    checked = list_checks(steps, share, seed, is_end_known=True)
    fixed = len(FIXED_STEPS) + 1  # with the last step
    assert tuple(checked[: len(FIXED_STEPS)]) == FIXED_STEPS
    assert checked[-1] == steps
    assert checked.count(steps) == 1
    allowed = share / (1 - share) * steps / 3.0
    assert abs(len(checked) - max(fixed, allowed)) <= 1
    if allowed <= fixed:
        assert len(checked) == fixed


def test_intervals_of_a_run_of_known_length_are_equal_in_its_course() -> None:
    """A run without a known length has no check for thousands of steps after the fixed ones."""
    checked = list_checks(40_000, 0.01, is_end_known=True)
    distances = [b - a for a, b in itertools.pairwise(checked[4:])]
    assert max(distances) < 3 * 40_000 / len(checked)


def test_short_run_has_drawn_checks_too() -> None:
    """In 500 steps of 3 ms, the fixed checks take more than 5 % of the run's time."""
    checked = list_checks(500, 0.05, step_seconds=0.003, check_seconds=0.016, is_end_known=True)
    drawn = checked[len(FIXED_STEPS) : -1]
    assert len(drawn) > 5
    assert len(checked) * 0.016 < 1.1 * 0.05 / 0.95 * SHORT_RUN_SECONDS
