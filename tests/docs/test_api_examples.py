"""The examples in the docstrings of public names print what they show."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import paragrad

pytestmark = pytest.mark.processes


def find_examples() -> list[doctest.DocTest]:
    """Return the examples of public functions and classes."""
    finder = doctest.DocTestFinder()
    found = {}
    for name in paragrad.__all__:
        for test in finder.find(getattr(paragrad, name), f"paragrad.{name}"):
            if test.examples and test.lineno is not None:
                found[test.name] = test
    return list(found.values())


# each example starts its own ranks: shared ranks would stay in the folder in which they started
@pytest.mark.story
@pytest.mark.parametrize("example", find_examples(), ids=lambda test: test.name)
def test_example_in_docstring(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner()
    output: list[str] = []
    result = runner.run(example, out=output.append)
    assert result.failed == 0, "".join(output)


def test_functions_have_examples() -> None:
    names = {test.name for test in find_examples()}
    for name in (
        "train",
        "compare",
        "verify",
        "parallelize",
        "hook",
        "job",
        "strategy",
        "accuracy",
    ):
        assert f"paragrad.{name}" in names
