"""What the zoo's tests share: ranks that keep the libraries they imported, and the lines of docs/models.md."""

from __future__ import annotations

from collections.abc import Iterator

import models_page
import pytest
from rows import STRATEGIES

from paragrad.verbs import train as training
from paragrad.verbs import verify as certificate
from paragrad.world.launching import Ranks


class Kept(Ranks):
    """Ranks that outlive a `with`: importing transformers or torchvision takes them a second, most rows take less."""

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def kept() -> Iterator[Kept]:
    ranks = Kept(3)
    yield ranks
    ranks.close()


@pytest.fixture
def warm(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify and train use the same ranks, one after another."""
    for module in (certificate, training):
        monkeypatch.setattr(module, "Ranks", lambda size: kept)


@pytest.fixture(scope="session")
def page() -> Iterator[models_page.Page]:
    """Where results are noted; written where `make zoo` asks for it."""
    noted = models_page.Page(STRATEGIES)
    yield noted
    noted.write()
