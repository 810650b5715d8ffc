"""The commands print the JSON keys that docs/reference/json.md documents.

The command line and Python have the same default settings.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paragrad
from paragrad.commands import cli
from paragrad.executors.machine import ASSUMED_MACHINE, Machine
from paragrad.report import simulation_report
from paragrad.trainer.settings import Settings

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
VERBS = {
    "train": [
        "train",
        "digits",
        "--epochs",
        "1",
        "--strategy",
        "data(2, reduce=ring)",
        "--verify",
        "--noise-scale",
        "9",
    ],
    "dry run": ["train", "digits", "--strategy", "federated(2)", "--dry-run"],
    "compare": [
        "compare",
        "digits",
        "--epochs",
        "1",
        "--strategies",
        "serial; data(2)",
        "--until",
        "accuracy=1",
    ],
    "verify": ["verify", "digits", "--strategy", "data(2)"],
    "simulate": ["simulate", "data(4, reduce=ring)", "--bytes", "1MB"],
    "simulate compressed": ["simulate", "data(4, compress=int8)", "--bytes", "1MB"],
    "work": ["work", "digits"],
    "jobs": ["jobs"],
    "strategies": ["strategies"],
}


def read_documented_keys(verb: str) -> set[str]:
    text = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8").split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| .+ \|$", text, re.MULTILINE)
    assert len({key for key, _ in rows}) == len(rows) > 80
    assert {each for _, verbs in rows for each in verbs.split(", ")} == {*VERBS, "measure"}
    return {key for key, verbs in rows if verb in verbs.split(", ")}


def list_paths(value: Any, at: str = "") -> Iterator[str]:
    """Yield the path of every value in an answer.

    The paths of values in rows begin with the key in the row.
    """
    if isinstance(value, dict):
        for name, each in value.items():
            yield from list_paths(each, f"{at}.{name}" if at else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for each in value:
            yield from list_paths(each, "" if at in ("", "rows") else f"{at}[]")
    else:
        yield at


def compare_keys(verb: str, answer: str) -> None:
    rows = read_documented_keys(verb)
    found = set(list_paths(json.loads(answer)))
    patterns = {row: re.compile(re.escape(row).replace(r"\*", ".+")) for row in rows}
    assert {
        row for row, pattern in patterns.items() if not any(map(pattern.fullmatch, found))
    } == set(), "not printed"
    # the path of an object is allowed, because the object may be null
    inside = {row.split(".")[0].removesuffix("[]") for row in rows}
    assert {
        path
        for path in found
        if path not in inside and not any(pattern.fullmatch(path) for pattern in patterns.values())
    } == set(), "not documented"


@pytest.mark.parametrize("verb", VERBS)
def test_page_has_every_key_that_a_command_prints(verb: str, tmp_path: Path) -> None:
    """A command prints exactly the keys that the page documents.

    Earlier, one command wrote `seconds per step`, and another one `seconds_per_step`. One command
    had the key `record`, and the others `folder`. No key was documented.
    """
    words = VERBS[verb]
    runs = ["--runs", str(tmp_path)] if words[0] in ("train", "compare", "verify") else []
    compare_keys(verb, CliRunner().invoke(cli.app, [*words, *runs, "--json"]).stdout)


def test_page_has_every_key_of_a_machine_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(
        {"shm": ASSUMED_MACHINE.select_link()},
        ASSUMED_MACHINE.gamma,
        2,
        "by hand",
        {"shm": 0.1},
        1e9,
        1e9,
        1,
    )
    simulation_report.write_machine_file(machine, tmp_path / "machine.json", True)
    compare_keys("measure", capsys.readouterr().out)


def test_missing_or_new_key_is_found() -> None:
    """The comparison of this file finds an answer with a missing key, and one with a new key."""
    whole = [{"kind": "reduce", "name": "ring", "what": "x"}]
    compare_keys("strategies", json.dumps(whole))
    with pytest.raises(AssertionError, match="not printed"):
        compare_keys(
            "strategies", json.dumps([{name: whole[0][name] for name in ("kind", "name")}])
        )
    with pytest.raises(AssertionError, match="not documented"):
        compare_keys("strategies", json.dumps([{**whole[0], "source": "y"}]))


@pytest.mark.parametrize("verb", ["train", "compare", "verify"])
def test_command_and_python_have_equal_defaults(verb: str) -> None:
    """The command and the Python function have the same defaults.

    Earlier, `paragrad train` compared 20 steps with serial by default, and `paragrad.train` did
    not.
    """
    typed = {
        name: each.default
        for name, each in inspect.signature(getattr(cli, f"run_{verb}")).parameters.items()
    }
    called = {each.name: each.default for each in fields(Settings)} | {
        name: each.default
        for name, each in inspect.signature(getattr(paragrad, verb)).parameters.items()
    }
    both = [
        name
        for name in typed
        if name in called and typed[name] is not inspect.Parameter.empty and name != "timeout"
    ]
    assert {"runs", "device", "backend", "loaders" if verb != "verify" else "data"} <= set(both)
    for name in both:
        if called[name] is not inspect.Parameter.empty:
            wanted = str(called[name]) if isinstance(called[name], str | Path) else called[name]
            assert (str(typed[name]) if isinstance(typed[name], Path) else typed[name]) == wanted, (
                name
            )
