"""Every file of examples/ is run by the commands that its first lines name."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_commands import COMMANDS, EXAMPLES

pytestmark = [pytest.mark.processes, pytest.mark.story]

PROGRAMS = {
    "paragrad": [sys.executable, "-m", "paragrad"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
# Long commands run only in `make table`. CI runs a shorter command of the same file, and
# test_checkpoint.py resumes as resume.py does.
LONG = {
    "python examples/callbacks.py",
    'torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py "halving(segments=2)"',
    'paragrad train examples/own_job.py --strategy "data(2)"',
    "python examples/resume.py",
    'paragrad compare examples/own_compressor.py --strategies "data(2, reduce=ring); data(2, '
    'compress=random_k(0.5))"',
    "python examples/own_loop.py",
    "python examples/own_all_reduce.py",
    'paragrad compare examples/own_job.py --strategies "serial; data(2); data(2, reduce=ring)"',
}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        pytest.param(name, line, marks=pytest.mark.table if line in LONG else (), id=line)
        for name, line in COMMANDS
    ],
)
def test_example_commands_as_typed(name: str, line: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    program, *words = shlex.split(re.sub(r"\s{2,}#.*", "", line))
    ran = subprocess.run(
        [*PROGRAMS[program], *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    if name == "resume.py":
        straight, halves = re.findall(r"\d+\.\d+", ran.stdout)
        assert abs(float(straight) - float(halves)) <= 2e-4
        assert "0 twice, 0 missed" in ran.stdout
    if name == "ddp_hook.py":
        first, second = re.findall(r"rank \d: (-?\d+\.\d{6})", ran.stdout)
        assert first == second  # replicas stay equal


def test_every_example_names_its_commands() -> None:
    assert {name for name, _ in COMMANDS} == {path.name for path in EXAMPLES.glob("*.py")}


def test_the_notebook(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(
        notebook,
        timeout=100,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    results = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type in ("execute_result", "display_data")
    ]
    (shown,) = [
        each.data["text/html"] for each in results if "<tr>" in each.data.get("text/html", "")
    ]
    assert shown.count("<tr>") == 4
    assert sum("image/png" in each.data for each in results) == 2  # the plots
    assert sum("image/svg+xml" in each.data for each in results) == 1  # the drawing
    assert any(each.data.get("text/plain", "").startswith("(True, ") for each in results)
    # one progress bar for each call that trains, for any number of runs in the call
    calls = {
        place: len(found)
        for place, cell in enumerate(notebook.cells)
        if (found := re.findall(r"\bpg\.(?:train|compare|verify)\(", cell.source))
        and cell.cell_type == "code"
    }
    assert sum(calls.values()) >= 3
    for place, count in calls.items():
        cell = notebook.cells[place]
        bars = [
            text
            for output in cell.outputs
            if "<progress" in (text := output.get("data", {}).get("text/html", ""))
        ]
        assert len(bars) == count
        for bar in bars:
            done, steps = re.findall(r'value="(\d+)" max="(\d+)"', bar)[0]
            assert done == steps
