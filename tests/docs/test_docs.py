"""README and docs show what the commands print, their examples work, and their links exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

import paragrad
from paragrad.commands.cli import app
from paragrad.executors.proof import prove_schedule
from paragrad.jobs.job import Job
from paragrad.strategies.data import ALL_REDUCE_SCHEDULES

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```console\n\$ paragrad ((?:draw|work|train .* --dry-run).*)\n((?:.*\n)*?)```$", re.MULTILINE
)
SHOWN = [
    (page.name, command, text)
    for page in PAGES
    for command, text in BLOCK.findall(page.read_text())
]


@pytest.mark.parametrize(
    ("page", "command", "text"), SHOWN, ids=[f"{page}: {command}" for page, command, _ in SHOWN]
)
def test_shown_output_is_the_printed_output(
    page: str, command: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the output in the pages was printed on a machine with two cores
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert CliRunner().invoke(app, shlex.split(command)).stdout == text


def test_every_algorithm_is_drawn() -> None:
    drawn = " ".join(command for _, command, _ in SHOWN)
    assert all(f"reduce={name}" in drawn for name in (each.name for each in ALL_REDUCE_SCHEDULES))


@pytest.mark.parametrize("name", [each.name for each in ALL_REDUCE_SCHEDULES])
def test_counts_in_pages_are_those_of_the_proof(name: str) -> None:
    text = (ROOT / "docs" / "techniques" / f"{name}.md").read_text()
    (schedule,) = re.findall(r"print\(prove_schedule\((pg\..+), \d+, 960\)\)", text)
    rows = [
        tuple(map(int, row))
        for row in re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    ]
    assert len(rows) == 4
    for size, *counts in rows:
        proof = prove_schedule(eval(schedule, {"pg": paragrad}), size, 960)
        assert counts == [proof.messages, proof.sent, proof.scratch]


@pytest.mark.parametrize("name", ["counts", "crossover"])
def test_all_reduce_costs_in_pages_are_the_printed_ones(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "techniques" / "all_reduce.md").read_text()
    ((code, printed),) = re.findall(
        rf"```python\n# {name}.py\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL
    )
    exec(code, {})
    assert capsys.readouterr().out == printed


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("command", "figure"),
    re.findall(
        r"\(`paragrad (draw .* --svg (docs/figures/.*\.svg))`\)",
        "".join(page.read_text() for page in PAGES),
    ),
)
def test_drawings_in_pages_are_those_of_the_command(
    command: str, figure: str, tmp_path: Path
) -> None:
    """A drawing in a page has the same arrows and labels as the one that the command draws.

    The files are not compared, because another version of matplotlib may write other lines.
    """

    def read_labels(file: Path) -> list[str]:
        texts = [
            text
            for element in ElementTree.fromstring(file.read_text()).iter()
            for text in (
                element.get("id", "").removeprefix("schedule-"),
                (element.text or "").strip(),
            )
        ]
        return [text for text in texts if re.fullmatch(r"message-\d+|[\d+-]+", text)]

    assert (
        CliRunner()
        .invoke(app, shlex.split(command.replace(figure, str(tmp_path / "drawn.svg"))))
        .exit_code
        == 0
    )
    assert read_labels(ROOT / figure) == read_labels(tmp_path / "drawn.svg") != []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_external_links_are_well_formed(page: Path) -> None:
    """Only the form of external links is checked, because the tests have no network."""
    for target in re.findall(r"\]\((https?:[^)\s]*)\)", page.read_text()):
        parts = urlsplit(target)
        assert parts.scheme == "https", target
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), target


def test_cpu_build_in_readme_is_the_pinned_one() -> None:
    """The README installs the version of torch that is pinned.

    Earlier, the README advised to install torch's CPU build first. Then make replaced it by
    another version, which was pinned.
    """
    (told,) = re.findall(r"pip install (torch==\S+) ", (ROOT / "README.md").read_text())
    assert told in (ROOT / "constraints.txt").read_text().splitlines()


def test_job_file_of_the_readme_trains(tmp_path: Path) -> None:
    code = re.search(r"```python\n# mine.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    assert len(code.group(1).strip().splitlines()) <= 12
    job = tmp_path / "mine.py"
    job.write_text(code.group(1))
    words = [
        "train",
        str(job),
        "--strategy",
        "data(2, reduce=ring)",
        "--runs",
        str(tmp_path / "runs"),
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "0 missed" in result.stdout
    model = next((tmp_path / "runs").iterdir()) / "model.safetensors"
    assert (
        run_readme_block("plain.py", tmp_path, sys.executable, "plain.py", str(model))
        == "tensor([1, 0])\n"
    )


def test_dataset_of_your_data_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the page is saved and run as typed, and it learns.

    Earlier, the page had no example.
    """
    text = (ROOT / "docs" / "how_to" / "your_data.md").read_text()
    code = re.search(
        r"```python\n# readings.py\n(.*?)```\n\n```sh\n.venv/bin/paragrad ([^\n]*)\n```",
        text,
        re.DOTALL,
    )
    assert code is not None
    (tmp_path / "readings.py").write_text(code.group(1))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*shlex.split(code.group(2)), "--check", "0", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["test"] > 90
    assert facts["audit"]["missed"] == 0


def test_every_field_of_a_job_has_a_table_row() -> None:
    """The page lists every field of a Job with its default. Earlier, no page did."""
    text = (
        (ROOT / "docs" / "reference" / "jobs.md")
        .read_text()
        .split("## The fields of a Job")[1]
        .split("\n## ")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (?:`(.+?)`.*|needed) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in fields(Job)]
    for (_, default), field in zip(rows, fields(Job), strict=True):
        assert eval(default or "MISSING", {"torch": torch, "MISSING": MISSING}) == field.default


def run_readme_block(name: str, folder: Path, *words: str) -> str:
    """Save a Python block of the README in a folder, run a command there, and return its output.

    The first line of the block is the name of the file.
    """
    code = re.search(rf"```python\n# {name}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    (folder / name).write_text(code.group(1))
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.story
def test_user_loop_of_the_readme_equals_serial_under_torchrun(tmp_path: Path) -> None:
    mine = re.search(r"```python\n# mine.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert mine is not None
    (tmp_path / "mine.py").write_text(mine.group(1))
    alone = run_readme_block("own.py", tmp_path, sys.executable, "own.py").split()
    assert alone[:2] == ["0", "80"]
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        # one file per process: with unbuffered output, two processes may print into one line
        "--redirects",
        "1",
        "--log-dir",
        "logs",
        "own.py",
    ]
    run_readme_block("own.py", tmp_path, *words)
    printed = sorted(
        file.read_text().split() for file in (tmp_path / "logs").glob("*/*/*/stdout.log")
    )
    assert [line[:2] for line in printed] == [["0", "80"], ["1", "80"]]
    # float32
    assert [float(line[2]) for line in printed] == [pytest.approx(float(alone[2]), rel=1e-4)] * 2


JOB_FILE = re.compile(r"```python\n# (\w+\.py)\n(.*?\njob = pg\.Job\(.*?)```", re.DOTALL)
EXAMPLES = [
    (page.name, name, code) for page in PAGES for name, code in JOB_FILE.findall(page.read_text())
]


@pytest.mark.story
@pytest.mark.parametrize(
    ("page", "name", "code"), EXAMPLES, ids=[f"{page}: {name}" for page, name, _ in EXAMPLES]
)
def test_every_job_in_the_pages_equals_serial(
    page: str, name: str, code: str, tmp_path: Path
) -> None:
    """Every job in the pages trains as serial does.

    Earlier, a job of the page about the user's own data had an error of 7.5e-2. It took a mean
    over padding, and the padding differs between shares.
    """
    if "transformers" in code:
        if importlib.util.find_spec("transformers") is None:
            pytest.skip("transformers is not installed (make zoo)")
        zoo = str(ROOT / "tests" / "zoo")
        code = (
            f"import sys\nsys.path.insert(0, {zoo!r})\nimport "
            f"zoo_libraries\nzoo_libraries.declare_operators()\n{code}"
        )
    (tmp_path / name).write_text(code)
    for strategy in ("data(2)", "data(3, reduce=ring, shares=[2, 1, 1])"):
        words = [
            "verify",
            str(tmp_path / name),
            "--strategy",
            strategy,
            "--runs",
            str(tmp_path),
            "--json",
        ]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["same"]


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("start/your_loop.md", "own_loop.py"),
        ("how_to/ddp_hook.md", "ddp_hook.py"),
        ("how_to/early_stopping.md", "callbacks.py"),
        ("how_to/logging.md", "callbacks.py"),
    ],
)
def test_pages_show_the_tested_examples(page: str, example: str) -> None:
    """Code and commands of the pages are those of the examples, which test_examples.py runs."""
    text = (ROOT / "docs" / page).read_text()
    shown = (ROOT / "examples" / example).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    assert all(block in shown for block in blocks)
    assert [
        line for line in text.splitlines() if line.startswith("torchrun") and line not in shown
    ] == []
