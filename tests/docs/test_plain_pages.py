"""Pages are short and plain: few words, short sentences, and no words for people.

Tables, code and generated pages do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PEOPLE = re.compile(
    r"\b(who|whose|whom|whoever|nobody|somebody|everybody|anybody)\b", re.IGNORECASE
)
MOST_WORDS = 1_500
MOST_WORDS_TO_LOOK_UP = 3_000  # in reference and results
MOST_WORDS_IN_README = 900
MOST_WORDS_IN_ALL = 32_000
LONG_SENTENCE = 30  # words


def is_generated(page: Path) -> bool:
    return any("<!-- generated" in line for line in page.read_text().splitlines()[:5])


PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted(DOCS.rglob("*.md"))
        if "_build" not in page.parts and not is_generated(page)
    ),
]


def get_prose(page: Path) -> str:
    """Return the text of a page without code, tables, targets of links and generated blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"<!-- (?!end)[^>]+ -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( {4}|\t|\s*\|).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))


def list_sentences(prose: str) -> list[str]:
    return [
        sentence
        for paragraph in re.split(r"\n\s*\n|\n\s*[*\-#]\s*|\n\s*\d+\.\s", prose)
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", " ".join(paragraph.split()))
    ]


def get_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=get_name)
def test_page_is_short_and_plain(page: Path) -> None:
    prose = get_prose(page)
    to_look_up = page.parent.name in ("reference", "results")
    most = MOST_WORDS_TO_LOOK_UP if to_look_up else MOST_WORDS
    if page.parent == ROOT:
        most = MOST_WORDS_IN_README
    assert len(prose.split()) <= most
    assert PEOPLE.findall(prose) == []
    assert [each for each in list_sentences(prose) if len(each.split()) > LONG_SENTENCE] == []


def test_all_pages_together_can_be_read() -> None:
    assert sum(len(get_prose(page).split()) for page in PAGES) <= MOST_WORDS_IN_ALL
