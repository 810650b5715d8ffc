"""The benchmark of one GPU makes a dry run on the CPU, through all of its parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu
import pytest
from common import Bench

pytestmark = pytest.mark.processes


def test_dry_run_judges_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part has a figure, none has a bar, and the output says that it is a dry run."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--check", "--quick"])
    monkeypatch.setattr(gpu, "WARM_UP", 1)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "measures nothing" in gpu.__doc__
    assert output.count(gpu.DRY_RUN) == 2
    figures = [line for line in output.splitlines() if line.startswith("figure: ")]
    assert all("dry run, " in line for line in figures)
    for part in ("GPT: own loop", "GPT, compiled: Job", "dropout 0.1, compiled: Job", "in steps"):
        assert any(part in line for line in figures), part
    assert "memory account, dry run, GPT, compiled" in output
    assert "falls short" not in output


@pytest.mark.parametrize("option", [["--page"], ["--json", "gpu.json"]])
def test_dry_run_writes_no_figures(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", *option])
    with pytest.raises(SystemExit, match="a dry run has none"):
        gpu.main()


def test_page_names_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the file of the figures are written with the name of the GPU."""
    page = tmp_path / "gpus.md"
    page.write_text(gpu.PAGE.read_text())
    monkeypatch.setattr(gpu, "PAGE", page)
    monkeypatch.setattr(gpu, "FIGURES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--page"])
    bench = Bench(gpu.__doc__, gpu.add_options)
    bench.machine["gpu"] = "Card 1"
    bench.figure("step over the plain loop's", [1.01, 1.02, 1.03], at_most=1.03)
    gpu.write_page(bench)
    assert "Card 1, torch" in page.read_text()
    assert "| step over the plain loop's | 1.02 | 1.01 to 1.03 |" in page.read_text()
    assert json.loads((tmp_path / "gpu.json").read_text())["machine"]["gpu"] == "Card 1"
