"""Tools of the benchmarks: the sign test, the size of groups, and workers that do not start."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import workers
from cluster import is_slower_by_sign_test
from ring_vs_tree_times import choose_group_size

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("above", "rounds", "found"),
    [
        (5, 5, True),
        (4, 5, False),
        (7, 8, True),
        (6, 8, False),
        (12, 15, True),
        (11, 15, False),
        (4, 4, False),
    ],
)
def test_slower_by_a_sign_test(above: int, rounds: int, found: bool) -> None:
    """The test is one-sided, at 5 %: the sum of C(n, k) / 2^n for k from `above` to n."""
    assert is_slower_by_sign_test([1.2] * above + [0.9] * (rounds - above)) is found


def test_group_size_is_near_the_square_root() -> None:
    assert [choose_group_size(ranks) for ranks in (2, 4, 8, 16, 32, 64, 1024)] == [
        1,
        2,
        2,
        4,
        4,
        8,
        32,
    ]


BENCHMARKS = sorted(
    file.stem
    for file in Path(workers.__file__).parent.glob("*.py")
    if '__name__ == "__main__"' in file.read_text()
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_imports(name: str) -> None:
    """Every benchmark can be imported.

    Earlier, a function was moved, and one benchmark stopped working. No test noticed it.
    """
    importlib.import_module(name)


def test_missing_workers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LIMIT", 0.2)
    with pytest.raises(RuntimeError, match="0 of 2 workers have come"):
        workers.Workers("nobody", "kind", 2, [sys.executable, "-c", "pass"])
