"""Which differences of a step count as rounding; the check makes up to three baselines."""

from __future__ import annotations

import pytest
import torch

from paragrad.runtime.world import World
from paragrad.trainer.checks.step_check import StepCheck
from paragrad.trainer.checks.step_result import StepOutcome

pytestmark = [pytest.mark.pure]
EPS = torch.finfo(torch.float32).eps


def make_outcome(difference: float) -> StepOutcome:
    """Return a step whose gradient is 1; one element is off by `difference` eps."""
    gradient = torch.tensor([1.0, 1.0 + difference * EPS])
    return StepOutcome(1.0, 1.0, {"layer.weight": gradient}, {})


def find_difference(ours: float, baselines: dict[int, float]) -> tuple[bool, list[int]]:
    """Return (whether a step differs from a reference of 0, the baselines that were made)."""
    made = list[int]()

    def make_variant(number: int) -> StepOutcome:
        made.append(number)
        return make_outcome(baselines.get(number, 0.0))

    check = StepCheck(World(), make_outcome(0.0), make_variant, None, None, 0.0, False)
    mismatches = check.find_mismatches(make_outcome(ours), torch.float32)
    assert [each.kind for each in mismatches] in ([], ["gradient"])
    return bool(mismatches), made


def test_a_small_difference_wants_no_baseline() -> None:
    assert find_difference(4, {}) == (False, [])


def test_no_more_baselines_are_made_than_explain_a_difference() -> None:
    assert find_difference(100, {0: 90}) == (False, [0])
    assert find_difference(100, {0: 20, 1: 30, 2: 80}) == (False, [0, 1, 2])


def test_a_step_that_equals_two_baselines_is_one_workers() -> None:
    """A rectifier flipped in the reference only, which is a hundred times all other rounding."""
    assert find_difference(4000, {0: 4000, 1: 4000}) == (False, [0, 1])


def test_a_step_that_equals_one_baseline_may_order_samples_as_that_does() -> None:
    differs, made = find_difference(4000, {0: 4000})
    assert differs
    assert made[:3] == [0, 1, 2]


def test_a_difference_that_no_baseline_has_is_named() -> None:
    differs, made = find_difference(4000, {})
    assert differs
    assert len(made) > 16
