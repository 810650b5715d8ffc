"""The reference of the Python interface has every public name, its arguments and its types."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paragrad

pytestmark = pytest.mark.pure

PAGES = Path(__file__).parents[2] / "docs" / "reference" / "api"
DIRECTIVE = re.compile(r"^\.\. auto(function|class|exception|module):: paragrad\.([\w.]+)$", re.M)
ENTRIES = [
    (kind, name)
    for page in sorted(PAGES.glob("*.md"))
    for kind, name in DIRECTIVE.findall(page.read_text())
]


def find_object(name: str) -> Any:
    """Return the object `paragrad.NAME`."""
    home, _, last = name.rpartition(".")
    return getattr(importlib.import_module(".".join(filter(None, ["paragrad", home]))), last)


def list_documented(docstring: str) -> set[str]:
    """Return the names that have an entry under Args or Attributes, of all sections."""
    return {
        name
        for section in re.findall(r"(?:Args|Attributes):\n((?:[ ]{4,}.*\n?|\n)+)", docstring + "\n")
        for name in re.findall(r"^ {4}\*{0,2}(\w+)(?: \(.*\))?:", section, re.M)
    }


def list_callables(kind: str, name: str) -> Iterator[tuple[str, Any, str]]:
    """Yield the functions of an entry: its name, itself, and its docstring."""
    found = find_object(name)
    if kind == "function":
        yield name, found, inspect.getdoc(found) or ""
    elif kind in ("class", "exception"):
        initial = vars(found).get("__init__")
        if initial is not None:
            text = (inspect.getdoc(found) or "") + "\n\n" + (inspect.getdoc(initial) or "")
            yield name, initial, text
        for method, value in vars(found).items():
            function = getattr(value, "__func__", value)
            # the site shows only methods that have a docstring
            if (
                not method.startswith("_")
                and inspect.isfunction(function)
                and inspect.getdoc(getattr(found, method))
            ):
                # an overriding method may leave its arguments to the method of its base class
                texts = [
                    inspect.getdoc(vars(base)[method]) or ""
                    for base in found.__mro__
                    if method in vars(base)
                ]
                yield f"{name}.{method}", function, "\n\n".join(texts)


def test_every_public_name_has_one_entry() -> None:
    names = [name for _, name in ENTRIES if "." not in name]
    assert sorted(names) == sorted(paragrad.__all__)


@pytest.mark.parametrize(("kind", "name"), ENTRIES, ids=[name for _, name in ENTRIES])
def test_entry_has_arguments_and_types(kind: str, name: str) -> None:
    found = find_object(name)
    assert (inspect.getdoc(found) or "").strip()
    if kind == "class" and dataclasses.is_dataclass(found):
        own = [
            each.name for each in dataclasses.fields(found) if each.name in found.__annotations__
        ]
        documented = list_documented(inspect.getdoc(found) or "")
        assert [each for each in own if each not in documented] == []
    for label, function, docstring in list_callables(kind, name):
        if dataclasses.is_dataclass(found) and function.__name__ == "__init__":
            continue
        parameters = [
            each
            for each in inspect.signature(function).parameters.values()
            if each.name not in ("self", "cls")
        ]
        untyped = [each.name for each in parameters if each.annotation is inspect.Parameter.empty]
        assert untyped == [], label
        documented = list_documented(docstring)
        missing = [each.name for each in parameters if each.name not in documented]
        assert missing == [], label
