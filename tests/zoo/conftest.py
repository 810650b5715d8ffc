"""What the zoo's tests share: the lines of docs/same_training/models.md.

They come from as many processes as the tests run in.
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
    """Notes a result: it goes with the test's report to the process that writes the page."""
    return lambda line: record_property("line", asdict(line))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        PAGE.lines.extend(
            models_page.Line(**value) for name, value in report.user_properties if name == "line"
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Written where `make zoo` asks for it, by the one process that sees all reports."""
    if not hasattr(session.config, "workerinput"):
        PAGE.write()
