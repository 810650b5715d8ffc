"""Collect the lines of docs/same_training/models.md from the tests of the zoo.

The tests run in several processes, and all of them give lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import models_page
import pytest
from zoo_rows import SERVERS, SPATIAL, STRATEGIES

PAGE = models_page.Page((*STRATEGIES, SERVERS, SPATIAL))


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[models_page.Line], None]:
    """Return a function that adds a result to the test's report.

    The report goes to the process that writes the page.
    """
    return lambda line: record_property("line", asdict(line))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        PAGE.lines.extend(
            models_page.Line(**value) for name, value in report.user_properties if name == "line"
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page, if `make zoo` runs, in the one process that receives all reports."""
    if not hasattr(session.config, "workerinput"):
        PAGE.write()
