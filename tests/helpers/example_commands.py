"""The commands that the files of `examples/` name in their first lines."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ELSEWHERE = {"mpirun", "srun"}  # tests of joining a world run these


def read_commands(path: Path) -> list[str]:
    """Return the commands that the docstring of a file names."""
    told = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    return [line.strip() for line in re.findall(r"^    (\w+ .*)$", told, re.MULTILINE)]


COMMANDS = [
    (path.name, line)
    for path in sorted(EXAMPLES.glob("*.py"))
    for line in read_commands(path)
    if line.split()[0] not in ELSEWHERE
]
