"""Every optimizer of the library has a row, or a reason why it fails on one worker, too."""

from __future__ import annotations

import optimizer_jobs
import pytest
import torch
from all_rows import LIBRARY_WARNINGS
from optimizer_jobs import FAILING, KINDS, LIBRARY, OF_TORCH
from zoo_libraries import find_missing, foreign

pytestmark = [pytest.mark.zoo, *LIBRARY_WARNINGS]


@pytest.fixture(autouse=True)
def require_library() -> None:
    if find_missing(LIBRARY):
        pytest.skip(f"{LIBRARY} is not installed (make zoo)")


def test_every_optimizer_has_a_row_or_a_reason() -> None:
    """If a new version of the library adds a class, this test fails until the class is listed."""
    found = {
        name
        for name, value in vars(foreign(LIBRARY)).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    listed = [*OF_TORCH, *FAILING, *(name for names, *_ in KINDS for name in names)]
    assert len(listed) == len(set(listed))
    assert set(listed) == found
    assert all(getattr(foreign(LIBRARY), name) is getattr(torch.optim, name) for name in OF_TORCH)


@pytest.mark.parametrize("name", FAILING)
def test_optimizer_without_a_row_fails_on_one_worker(name: str) -> None:
    with pytest.raises(Exception, match=r"(?s).+"):  # whatever the library says
        optimizer_jobs.step_once(name)
