"""The table of docs/reference/refused.md.

Each row is a command and the sentence that it must print.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB_FILES = ROOT / "tests" / "helpers" / "job_files"  # the commands run in this folder


def read_rows() -> list[tuple[str, str]]:
    """Return the command and the message of each row."""
    page = (ROOT / "docs" / "reference" / "refused.md").read_text()
    return re.findall(r"^\| `(.+)` \| (.+) \|$", page, re.MULTILINE)


def split_command(command: str, runs: Path) -> tuple[dict[str, str], list[str]]:
    """Return the environment variables of a command, and the words after `paragrad`.

    Args:
        command: The left column of a row.
        runs: The folder of runs, for commands that train and name none.
    """
    words = shlex.split(command)
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words.pop(0) == "paragrad"
    if words[0] in ("train", "compare") and "--runs" not in words:
        words += ["--runs", str(runs)]
    return environment, words
