"""Every term of the glossary is in the docstring of the module that its row names.

So one `grep` for a term of the field finds the module in which to begin reading. Earlier, `1F1B`
and "tied weights" were in no module.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "glossary.md"


class GlossaryRow(NamedTuple):
    """A row of the glossary.

    Attributes:
        term: The term.
        meaning: Its meaning, in one sentence.
        module: The path of its module, relative to `src/`.
    """

    term: str
    meaning: str
    module: str


def read_glossary() -> list[GlossaryRow]:
    """Read the rows of all tables of the page."""
    cells = (
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    )
    return [
        GlossaryRow(term, meaning, module.strip("`"))
        for term, meaning, module in cells
        if module.startswith("`")
    ]


def contains_term(text: str, term: str) -> bool:
    """Tell whether a text has a term, in any case, with spaces, line breaks or hyphens.

    Args:
        text: The text.
        term: The term; its plural is accepted too.
    """
    words = r"[\s-]+".join(map(re.escape, re.split(r"[\s-]+", term)))
    return re.search(rf"(?<!\w){words}", text, re.IGNORECASE) is not None


ROWS = read_glossary()


def test_term_is_found_across_lines_and_hyphens() -> None:
    assert contains_term("Every micro-\nbatch counts.", "micro-batch")
    assert contains_term("Micro batches", "micro-batch")
    assert contains_term("the order 1F1B", "1F1B")
    assert not contains_term("restage", "stage")
    assert not contains_term("microbatch", "micro-batch")


def test_no_glossary_term_is_duplicated() -> None:
    assert len(ROWS) >= 80
    terms = [row.term.lower() for row in ROWS]
    assert len(set(terms)) == len(terms)
    assert all(row.meaning.endswith(".") for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row.term for row in ROWS])
def test_module_of_a_term_names_it(row: GlossaryRow) -> None:
    path = ROOT / "src" / row.module
    assert path.is_file(), f"docs/reference/glossary.md: {row.module} does not exist"
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert contains_term(docstring, row.term), (
        f"{row.module} does not name {row.term!r} in its docstring; add the term there, or change "
        "the row in docs/reference/glossary.md"
    )
