"""The command as typed: compare, train, lists, drawings, under torchrun, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from paragrad import errors
from paragrad.commands.cli import app
from paragrad.executors.proof import prove_schedule
from paragrad.jobs.find_job import find_job
from paragrad.report.comparison_table import Table
from paragrad.strategies.data import ALL_REDUCE_SCHEDULES, Data
from paragrad.strategies.registry import strategy

pytestmark = pytest.mark.processes

PACKAGE = str(Path(errors.__file__).parent)
JOB_FILES = Path(__file__).parents[1] / "helpers" / "job_files"
SEVEN = (
    "serial; data(2); data(2, reduce=native); data(2, reduce=ring); data(2, reduce=ring_async); "
    "data(2, reduce=tree); data(2, reduce=butterfly)"
)


def invoke_command(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.stdout


def run_module(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **settings},
    )


@pytest.mark.table
def test_compare_digits_as_json(tmp_path: Path) -> None:
    """Compare seven strategies on the main job, for one epoch.

    Every data row equals serial within 1e-10. All algorithms that send messages give the same
    bits.
    """
    table = json.loads(
        invoke_command("compare", "digits", "--epochs", "1", "--runs", str(tmp_path), "--json")
    )
    rows = {row["strategy"]: row for row in table["rows"]}
    assert list(rows) == SEVEN.split("; ")
    assert rows["serial"]["difference"] is None
    assert table["speed_up_over"] == "plain PyTorch loop"
    assert table["plain_pytorch"]["why"] is None
    assert table["plain_pytorch"]["seconds_per_step"] > 0
    assert table["serial"]["seconds_per_step"] == rows["serial"]["seconds_per_step"]
    digests = set()
    for name, row in rows.items():
        assert row["failure"] is None
        assert row["test"] > 50
        assert row["seconds_per_step"] > 0
        assert (
            row["seconds_per_step_between"][0]
            <= row["seconds_per_step"]
            <= row["seconds_per_step_between"][1]
        )
        # the speed-up is None if the times of these few, short steps vary too much
        for what in ("speed_up", "speed_up_one_thread"):
            low, high = row[f"{what}_between"]
            assert 0 < low <= (row[what] or high) <= high
        if name != "serial":
            assert row["difference"] <= 1e-10
            assert row["tensor"]
            assert row["sent"]["gradients"] == {
                "bytes": 9728 if name == "data(2)" else 19256,
                "computed": "native" in name,
            }
            # data(2) uses shared memory: another kernel updates, and it rounds differently
            if name != "data(2)":
                digests.add(*row["digests"])
    assert len(digests) == 1
    assert (Path(table["folder"]) / "01-serial" / "run.jsonl").exists()


@pytest.mark.table
def test_piped_compare_prints_rows_and_failed_rows(tmp_path: Path) -> None:
    """A strategy that fails while it runs does not stop the others.

    The exit code 1 says that one strategy failed.
    """
    text = invoke_command(
        "compare",
        str(JOB_FILES / "fails_on_two.py"),
        "--strategies",
        "serial; data(2, reduce=tree); data(3)",
        "--runs",
        str(tmp_path),
        code=1,
    )
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == ["strategy", "serial", "data(2, reduce=tree)", "data(3)"]
    assert len({len(line) for line in lines}) == 1
    assert lines[2][1].startswith("failed: rank 1, step 0: RuntimeError: two is one too many (")
    assert float(dict(zip(lines[0], lines[3], strict=True))["difference"]) <= 1e-10
    folder = next(tmp_path.iterdir())
    assert [row.failure is None for row in Table(folder).rows] == [True, False, True]
    assert {path.name for path in folder.iterdir()} == {
        "01-serial",
        "02-data-2-reduce-tree",
        "03-data-3",
        "baseline-plain-PyTorch-loop",
        "baseline-serial-threads-1",
        "compare.jsonl",
        "page.html",
    }


@pytest.mark.table
def test_rounding_reference_is_not_a_baseline(tmp_path: Path) -> None:
    """The rounding baseline does not replace the serial run that measures the speed.

    Earlier, no serial run with all threads was made, because the rounding baseline is serial too.
    But its time did not count as the time of serial, so the speed-up was empty.
    """
    rows = json.loads(
        invoke_command(
            "compare",
            "digits",
            "--strategies",
            "data(2)",
            "--epochs",
            "1",
            "--rounding-baseline",
            "--json",
            "--runs",
            str(tmp_path),
        )
    )["rows"]
    assert [row["strategy"] for row in rows] == ["data(2)", "rounding baseline"]
    assert all(row["speed_up_between"] and row["speed_up_one_thread_between"] for row in rows)


def test_planted_bug_is_a_failed_row_of_the_comparison(tmp_path: Path) -> None:
    text = invoke_command(
        "compare",
        "digits",
        "--strategies",
        "data(2, reduce=ring)",
        "--inject-fault",
        "skip_chunk",
        "--skip-schedule-check",
        "--skip-first-step-check",
        "--epochs",
        "1",
        "--rounding-baseline",
        "--runs",
        str(tmp_path),
        code=1,
    )
    row = text.splitlines()[1].split("\t")
    assert float(row[1]) > 0
    assert "not equal bit for bit" in row[7]


def test_train_a_job_file(tmp_path: Path) -> None:
    text = invoke_command(
        "train",
        str(JOB_FILES / "good.py"),
        "--strategy",
        "data(2, reduce=ring, shares=[3, 1])",
        "--verify",
        "--runs",
        str(tmp_path),
    )
    facts = dict(line.split(": ", 1) for line in text.splitlines())
    assert (
        facts["sample count"] == "150 of 150 samples seen in each of 2 epoch(s), 0 twice, 0 missed"
    )
    assert float(facts["difference from serial (relative, float64, 20 steps)"]) <= 1e-10
    assert facts["test accuracy"].endswith(" %")
    assert facts["first step"].startswith("loss, weight, ")
    assert facts["time per step (median of the slowest rank)"].endswith(" ms")
    assert facts["bytes sent per rank and step"].startswith("gradients ")
    assert float(facts["loss of the last step (mean over its samples)"]) > 0
    held = dict(
        kind.split(" ", 1)
        for kind in facts["memory of a rank (the most that any holds)"].split(", ")
    )
    # the SGD of this job has no optimizer state
    assert list(held) == ["parameters", "gradients", "activations", "exchange", "resident"]
    assert held["parameters"] == held["gradients"] != held["resident"]
    assert held["resident"].endswith(" MB")


def test_train_a_module_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOB_FILES))
    facts = json.loads(
        invoke_command(
            "train",
            "good:job",
            "--strategy",
            "data(2)",
            "--epochs",
            "1",
            "--json",
            "--verify",
            "--runs",
            str(tmp_path),
        )
    )
    assert facts["audit"]["missed"] == 0
    assert facts["memory"]["gradients"] > 0
    assert facts["difference"] <= 1e-10


@pytest.mark.parametrize(
    ("text", "batch"),
    [("mine:larger", 48), ("mine.py:larger", 48), ("mine.py:made", 24), ("sub.mine:job", 32)],
)
def test_job_of_the_working_directory(
    text: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is found in the working directory, and a file may contain several jobs.

    The installed command has its own folder in sys.path, and not the working directory. So
    earlier, `paragrad train mine:job` raised ModuleNotFoundError, and `python -m paragrad` found
    the job. Also, if a file had two jobs, the user could choose neither of them.
    """
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text((JOB_FILES / "good.py").read_text())
    (tmp_path / "mine.py").write_text(
        "from good import job\nlarger = job.replace(batch=48)\ndef made():\n    return "
        "job.replace(batch=24)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(JOB_FILES), *(path for path in sys.path if path)])
    for name in ("mine", "sub", "sub.mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert find_job(text).batch == batch


def test_dry_run_prints_the_plan_and_starts_no_rank(tmp_path: Path) -> None:
    text = invoke_command(
        "train",
        "digits",
        "--strategy",
        "data(3, shares=[5, 2, 1], micro=2)",
        "--dry-run",
        "--json",
        "--runs",
        str(tmp_path),
    )
    facts = json.loads(text)
    assert facts["resolved"] == "data(3, state=shared_memory, shares=[5, 2, 1], micro=2)"
    assert facts["shares"] == [[20, 20], [8, 8], [4, 4]]
    assert facts["last_shares"] == [[9, 9], [4, 3], [2, 2]]
    assert (facts["steps_per_epoch"], facts["steps"]) == (23, 460)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.table
def test_failing_run_shows_first_traceback_and_message_last(tmp_path: Path) -> None:
    done = run_module(
        "paragrad",
        "train",
        str(JOB_FILES / "fails_on_two.py"),
        "--strategy",
        "data(2)",
        "--runs",
        str(tmp_path),
    )
    assert done.returncode == 1
    # one traceback, of one rank, with lines of the user's code only
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert PACKAGE not in done.stderr
    end = json.loads((next(tmp_path.iterdir()) / "run.jsonl").read_text().splitlines()[-1])
    # the record has the whole traceback
    assert PACKAGE in end["error"]["traceback"]
    assert done.stderr.rstrip().splitlines()[-1] == (
        "paragrad: rank 1, step 0: RuntimeError: two is one too many "
        f"({JOB_FILES / 'fails_on_two.py'}:16)"
    )


@pytest.mark.story
def test_failure_of_paragrad_prints_no_traceback(tmp_path: Path) -> None:
    """If a step differs from one worker's step, only a message is printed.

    Earlier, a traceback with fifty lines of paragrad's own files was printed.
    """
    done = run_module(
        "paragrad",
        "train",
        str(JOB_FILES / "good.py"),
        "--strategy",
        "data(2, reduce=ring)",
        "--inject-fault",
        "skip_chunk",
        "--skip-schedule-check",
        "--runs",
        str(tmp_path),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "  File " not in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("paragrad: rank ")


HANGS = """
import os, signal
import good
from good import Net

class Hangs(Net):
    def forward(self, x):
        if self.training and len(x) == 22:  # the last batch of an epoch
            with open(os.environ["BEGUN"], "w") as fifo:
                fifo.write("here")
            signal.pause()
        return super().forward(x)

job = good.job.replace(name="hangs", model=Hangs)
"""


def start_train(*words: str, **settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paragrad", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
    )


def read_end(folder: Path) -> tuple[str, str]:
    end = json.loads((folder / "run.jsonl").read_text().splitlines()[-1])
    return end["kind"], end["status"]


@pytest.mark.story
def test_first_ctrl_c_saves_the_run(tmp_path: Path) -> None:
    """The first Ctrl-C saves a checkpoint. Earlier, without --save, the training was lost."""
    words = ["digits", "--epochs", "100000", "--strategy", "data(2)", "--runs", str(tmp_path)]
    with start_train(*words) as running:
        assert running.stderr is not None
        # the first line of progress: the ranks have started to train
        assert "step" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        _, rest = running.communicate(timeout=30)
    assert running.returncode == 130
    (folder,) = tmp_path.iterdir()
    (checkpoint,) = folder.glob("checkpoint-*")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    first, *_, hint, last = rest.splitlines()
    assert first.startswith("paragrad: the run ends after this step, and saves it")
    assert hint.endswith(f"--resume {folder}")
    assert last == (
        f"paragrad: stopped; step {step} is saved in {folder}; go on with resume='{folder}'"
    )
    assert read_end(folder) == ("end", "stopped")


@pytest.mark.story
def test_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    job = tmp_path / "hangs.py"
    job.write_text(HANGS)
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    words = [str(job), "--runs", str(tmp_path / "runs")]
    with start_train(*words, BEGUN=str(fifo), PYTHONPATH=f"{PACKAGE}/..:{JOB_FILES}") as running:
        assert running.stderr is not None
        fifo.read_text()
        running.send_signal(signal.SIGINT)
        while "Ctrl-C once more" not in running.stderr.readline():
            pass
        running.send_signal(signal.SIGINT)
        _, rest = running.communicate(timeout=30)
    assert running.returncode == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert rest.splitlines()[-1] == (f"paragrad: stopped; the results so far are in {folder}")
    assert read_end(folder) == ("end", "interrupted")
    assert list(folder.glob("checkpoint-*")) == []


@pytest.mark.story
def test_under_torchrun(tmp_path: Path) -> None:
    done = run_module(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "paragrad",
        "train",
        "digits",
        "--strategy",
        "data(auto, reduce=ring)",
        "--epochs",
        "1",
        "--runs",
        str(tmp_path),
        "--json",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    (answer,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    facts = json.loads(answer)
    assert facts["resolved"] == "data(2, reduce=ring, state=replicated)"
    assert facts["audit"] == {
        "epochs": 1,
        "samples": 1437,
        "seen": 1437,
        "twice": 0,
        "missed": 0,
        "in_rounds": False,
        "from_sampler": False,
    }
    assert {path.name for path in next(tmp_path.iterdir()).iterdir()} == {
        "run.jsonl",
        "rank-0.jsonl",
        "rank-1.jsonl",
        "model.safetensors",
    }


def test_lists() -> None:
    assert [row["job"] for row in json.loads(invoke_command("jobs", "--json"))] == [
        "digits",
        "inception-digits",
        "mnist-mlp",
        "mnist-cnn",
        "mnist-resnet",
        "shakespeare-lstm",
        "shakespeare-gpt",
    ]
    listed = {row["name"]: row for row in json.loads(invoke_command("strategies", "--json"))}
    assert {name: listed[name]["kind"] for name in ("ring", "pipeline", "top_k")} == {
        "ring": "reduce",
        "pipeline": "strategy",
        "top_k": "compress",
    }
    for row in listed.values():
        assert row["what"]
    assert "ring\tRing: reduce-scatter" in invoke_command("strategies")


def test_draw() -> None:
    assert invoke_command("draw", "data(2, reduce=butterfly)").splitlines()[1:] == [
        "0 | >1:0 <1:0+",
        "1 | >0:0 <0:0+",
    ]


def test_draw_the_stages_of_a_model(tmp_path: Path) -> None:
    """The table and the drawing show the stages of the model and the size of their messages.

    For each of the 8 samples of a micro-batch, the first stage sends 64 numbers. It receives
    their gradients.
    """
    words = (
        "draw",
        "pipeline(2, micro=4, cut=[1, 2])",
        "--job",
        "digits",
        "--batch",
        "32",
        "--svg",
        str(tmp_path / "drawn.svg"),
    )
    table, drawing = (each.splitlines() for each in invoke_command(*words).split("\n\n"))
    rows = [re.split("  +", line) for line in table[1:3]]
    assert [row[:5] for row in rows] == [
        ["0", "0", "0", "4,160", "65,536 (86%)"],
        ["1", "1", "1 to 2", "650", "10,240 (14%)"],
    ]
    assert [row[6:] for row in rows] == [["2.05 KB", "2.05 KB"], ["0 bytes", "0 bytes"]]
    assert drawing[1].startswith("0 | F0   >1:x1.0")
    texts = [
        element.text
        for element in ElementTree.fromstring((tmp_path / "drawn.svg").read_text()).iter()
        if element.text
    ]
    # both ranks have a box F0 and a box B3
    assert sum(text in ("F0", "B3") for text in texts) == 4
    assert "1 to 2 (650 parameters)" in texts


def test_draw_stages_beside_a_small_share() -> None:
    """The stages can be drawn if the first replica has no sample in the first micro-batch."""
    words = ("draw", "data(2, shares=[1, 30]) * pipeline(2, micro=4)", "--job", "digits")
    table, _ = invoke_command(*words, "--batch", "32").split("\n\n")
    assert len(table.splitlines()) == 4


def test_draw_several_schedules() -> None:
    """Two schedules are drawn one after the other: `place` and a pipeline.

    Under `place` only one rank works at a time. This is why pipelines exist.
    """
    one, other = invoke_command("draw", "place(2); pipeline(2, micro=2)").split("\n\n")
    assert one.splitlines()[1:] == invoke_command("draw", "place(2)").splitlines()[1:]
    assert other.splitlines()[0].startswith("one_f_one_b of 2 micro-batches")


@pytest.mark.parametrize(
    "algorithm",
    [
        each.name if each.name != "two_level" else "two_level(group=2)"
        for each in ALL_REDUCE_SCHEDULES
    ],
)
def test_draw_as_svg(algorithm: str, tmp_path: Path) -> None:
    """The SVG is well-formed and the same every time.

    It has one arrow for each message that the proof counts.
    """
    words = f"data(4, reduce={algorithm})"
    file = tmp_path / "drawn.svg"
    assert invoke_command("draw", words, "--svg", str(file)) == invoke_command("draw", words)
    text = file.read_text()
    arrows = [
        name
        for element in ElementTree.fromstring(text).iter()
        if "message-" in (name := element.get("id", ""))
    ]
    chosen = strategy(words)
    assert isinstance(chosen, Data)
    assert len(set(arrows)) == len(arrows) == prove_schedule(chosen.reduce, 4, 100).messages
    invoke_command("draw", words, "--svg", str(file))
    assert file.read_text() == text
    # a colour variable that no style defines is black; earlier the whole drawing was black
    assert (used := set(re.findall(r"var\((--\w+)\)", text)))
    themes = re.findall(r"svg \{ (.+?) \}", text)
    assert len(themes) == 2
    for theme in themes:
        assert used == set(re.findall(r"(--\w+): #", theme))


def test_help_names_every_command() -> None:
    text = invoke_command("--help")
    for verb in ("train", "compare", "verify", "draw", "jobs", "strategies"):
        assert verb in text
