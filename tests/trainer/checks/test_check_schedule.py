"""Which steps are checked: first at doubling distances, then one drawn step in each interval."""

from __future__ import annotations

import itertools

import pytest

from paragrad.trainer.checks.check_schedule import FIXED_STEPS, CheckCosts, CheckPlan

pytestmark = pytest.mark.pure


def list_checks(
    steps: int, share: float, seed: int = 0, step_seconds: float = 1.0, check_seconds: float = 3.0
) -> list[int]:
    """List the checked steps of a run; all steps, and all checks, take equally long."""
    plan = CheckPlan()
    checked = []
    for step in range(1, steps + 1):
        if step == plan.step:
            checked.append(step)
            spent = check_seconds * len(checked)
            costs = CheckCosts(spent, check_seconds, step_seconds * step + spent)
            plan = plan.plan_next(step, seed, share, costs)
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
    costs = CheckCosts(15.0, 3.0, 31.0)
    plan = CheckPlan(16, 16)
    for _ in range(50):
        following = plan.plan_next(plan.step, 3, 0.1, costs)
        assert plan.interval_end < following.step <= following.interval_end
        plan = following


def test_a_check_before_the_planned_one_takes_its_place() -> None:
    """For example, the last step before a checkpoint is checked, instead of the planned step."""
    plan = CheckPlan(40, 60)
    following = plan.plan_next(30, 0, 0.01, CheckCosts(1.0, 1.0, 2.0))
    assert 60 < following.step <= following.interval_end


def test_a_check_between_the_fixed_ones_leaves_them() -> None:
    plan = CheckPlan(8, 8)
    assert plan.plan_next(5, 0, 0.01, CheckCosts(1.0, 1.0, 2.0)) == plan
