"""`paragrad new`, `--help`, and errors that are found before a job's file is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import paragrad as pg
from paragrad.commands.cli import app
from paragrad.commands.new_job import write_job_file
from paragrad.jobs.find_job import find_job

pytestmark = pytest.mark.processes

FIRST = ["new", "train", "compare", "verify", "draw"]


def test_new_job_trains_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    result = CliRunner().invoke(app, ["new", str(path)])
    assert result.exit_code == 0, result.output
    assert f"paragrad train {path} --strategy 'data(2)'" in result.stdout
    job = find_job(str(path))
    assert job.name == "mine"
    run = pg.train(job.replace(epochs=2), "data(2)", runs=tmp_path / "runs")
    assert run.losses[-1] < run.losses[0] / 2


@pytest.mark.parametrize(
    ("name", "repair"),
    [
        ("there.py", "there.py exists; give another name, or remove it first"),
        ("no.txt", "give letters, digits and underscores with .py at the end"),
        ("two words.py", "give letters, digits and underscores with .py at the end"),
        ("nowhere/mine.py", "there is no folder .*nowhere; make it first"),
    ],
)
def test_new_job_refuses_to_write_with_the_repair(name: str, repair: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("job = 1")
    with pytest.raises(pg.Refused, match=repair):
        write_job_file(tmp_path / name)
    assert (tmp_path / "there.py").read_text() == "job = 1"
    assert [each.name for each in tmp_path.iterdir()] == ["there.py"]


def test_help_shows_the_first_commands_first() -> None:
    lines = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout.splitlines()
    place = next(place for place, line in enumerate(lines) if "Start with these" in line)
    assert [line.split()[1] for line in lines[place + 1 : place + 6]] == FIRST


def test_every_option_has_a_sentence() -> None:
    """The help of every option is a whole sentence.

    Earlier, some options had half a sentence: "that a rank waits for another".
    """
    group = typer.main.get_command(app)
    unclear = [
        f"{name} {parameter.name}: {parameter.help}"
        for name, command in group.commands.items()  # type: ignore[attr-defined]
        for parameter in command.params
        if not (parameter.help and parameter.help[0].isupper() and parameter.help[-1] in ".;")
    ]
    assert not unclear


@pytest.mark.parametrize("command", ["train", "verify"])
def test_strategy_is_read_before_the_job_file(command: str, tmp_path: Path) -> None:
    """An error in the strategy is reported before the job's file is imported.

    Earlier, a file that took a minute to import was imported before a missing bracket was
    reported.
    """
    path = tmp_path / "slow.py"
    path.write_text("raise RuntimeError('the file was imported')")
    result = CliRunner().invoke(app, [command, str(path), "--strategy", "data(2, state=fsdp)"])
    assert result.exit_code == 2
    assert "did you mean fully_sharded?" in result.stderr
    # the file is imported, because it may define this name
    result = CliRunner().invoke(app, [command, str(path), "--strategy", "mine(2)"])
    assert "the file was imported" in result.stderr
