"""What the zoo's tests share: the lines of docs/models.md."""

from __future__ import annotations

from collections.abc import Iterator

import models_page
import pytest
from rows import STRATEGIES


@pytest.fixture(scope="session")
def page() -> Iterator[models_page.Page]:
    """Where results are noted; written where `make zoo` asks for it."""
    noted = models_page.Page(STRATEGIES)
    yield noted
    noted.write()
