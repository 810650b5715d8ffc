"""docs/refused.md is the test: every command of its table is run, and must print its message
and exit with 2.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paragrad import launch
from paragrad.commands.cli import app

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TABLE = re.findall(
    r"^\| `(.+)` \| (.+) \|$", (ROOT / "docs" / "refused.md").read_text(), re.MULTILINE
)


# said before a job that reads it refuses
@pytest.mark.filterwarnings("ignore:there is no data folder")
@pytest.mark.parametrize(("command", "message"), TABLE, ids=[command for command, _ in TABLE])
def test_command_is_refused_with_its_message(
    command: str,
    message: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What is refused for its samples reads some: without the files it was downloaded, or
    failed where there is no network.
    """
    if "shakespeare-gpt" in command:
        request.getfixturevalue("data")
    monkeypatch.chdir(ROOT / "tests" / "helpers" / "job_files")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setattr(
        launch.Launcher, "_start_ranks", lambda *_: pytest.fail("a rank was started")
    )
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words.pop(0) == "paragrad"
    if words[0] in ("train", "compare") and "--runs" not in words:
        words += ["--runs", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_refused_page_has_many_rows() -> None:
    assert len(TABLE) > 50
