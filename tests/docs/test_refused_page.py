"""The commands of docs/reference/refused.md print their messages.

Every command of its table is run, and must exit with 2.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from refused_rows import JOB_FILES, read_rows, split_command
from typer.testing import CliRunner

from paragrad import launch
from paragrad.commands.cli import app

pytestmark = pytest.mark.processes

TABLE = read_rows()


# this warning may come before a job that reads the data folder is refused
@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:there is no data folder")
@pytest.mark.parametrize(("command", "message"), TABLE, ids=[command for command, _ in TABLE])
def test_command_is_refused_with_its_message(
    command: str,
    message: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Every command of the page is refused with its message.

    A job that is refused because of its samples must read some of them. Earlier, if the files
    were missing, they were downloaded, or the test failed without a network.
    """
    if "shakespeare-gpt" in command:
        request.getfixturevalue("data")
    monkeypatch.chdir(JOB_FILES)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setattr(
        launch.Launcher, "_start_ranks", lambda *_: pytest.fail("a rank was started")
    )
    environment, words = split_command(command, tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_refused_page_has_many_rows() -> None:
    assert len(TABLE) > 50
