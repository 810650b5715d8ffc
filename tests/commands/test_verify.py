"""`verify`: the certificates of trainings that equal serial, and of trainings that do not."""

from __future__ import annotations

import html
import io
import json
import re
import types
from pathlib import Path

import pytest
import torch
from equality_table import JOBS, ROWS, VECTORS, make_job, make_mlp
from rich.console import Console
from typer.testing import CliRunner

import paragrad as pg
from paragrad.commands.cli import app
from paragrad.jobs.find_job import find_job
from paragrad.record.record import read_lines
from paragrad.report import python_progress
from paragrad.report.progress import ProgressDisplay
from paragrad.schedules.fault_injection import FAULTS

pytestmark = pytest.mark.processes

FIELDS = [
    "schema",
    "job",
    "digest",
    "strategy",
    "resolved",
    "device",
    "backend",
    "steps",
    "failure",
    "cause",
    "sabotage",
    "machine",
    "folder",
    "tensor",
    "tensors",
    "first",
    "twin",
    "twins",
    "bound",
    "allowed",
    "chaotic",
    "dtype",
    "why",
    "reference",
    "difference",
    "same",
]
BUILT_IN = (
    "digits",
    "inception-digits",
    "mnist-mlp",
    "mnist-cnn",
    "mnist-resnet",
    "shakespeare-lstm",
    "shakespeare-gpt",
)


def run_verify(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["verify", *words])
    assert result.exit_code == code, result.output
    return result.stdout


def test_certificate_of_an_equal_training(tmp_path: Path) -> None:
    text = run_verify("digits", "--strategy", "data(2, reduce=ring)", "--runs", str(tmp_path))
    assert "same training as serial: yes (bound 1e-10, float64)" in text
    path = Path(text.split("certificate: ")[1].strip())
    told = json.loads(path.read_text())
    assert list(told) == FIELDS
    assert told["same"]
    assert told["strategy"] == "data(2, reduce=ring)"
    assert told["machine"]["torch"] == torch.__version__
    names = set(pg.job("digits").model().state_dict())
    assert set(told["tensors"]) == names | {f"gradient of {name}" for name in names}
    assert told["difference"] == max(told["tensors"].values()) <= 1e-10
    assert set(told["twins"]) == set(told["tensors"])  # differences by rounding alone
    assert 0 < told["twin"] == max(told["twins"].values()) <= 1e-10
    assert (told["dtype"], told["why"], told["cause"], told["chaotic"]) == (
        "float64",
        None,
        None,
        None,
    )
    again = json.loads(
        run_verify(
            "digits", "--strategy", "data(3, shares=[3, 1, 1])", "--runs", str(tmp_path), "--json"
        )
    )
    # the digest is of the job, so it is the same for every strategy
    assert again["digest"] == told["digest"]
    other = json.loads(
        run_verify(
            "digits", "--strategy", "serial", "--seed", "1", "--runs", str(tmp_path), "--json"
        )
    )
    assert other["digest"] != told["digest"]


@pytest.mark.parametrize("bug", FAULTS)
def test_planted_bug_is_named(bug: str, tmp_path: Path) -> None:
    words = (
        "digits",
        "--strategy",
        "data(3, reduce=tree)",
        "--runs",
        str(tmp_path),
        "--inject-fault",
        bug,
    )
    text = run_verify(*words, code=1)
    assert "same training as serial: NO" in text
    assert "step 0" in text
    assert "tensor " in text
    told = json.loads(run_verify(*words, "--json", code=1))
    assert not told["same"]
    assert told["sabotage"] == bug
    if bug == "skip_chunk":
        assert "not equal bit for bit" in told["failure"]
    else:
        assert told["first"] == ["gradient of 0.weight", 0]


@pytest.mark.story
def test_failed_run_has_no_verdict(tmp_path: Path) -> None:
    """If a run fails, verify gives no certificate.

    Earlier, if a job raised an error on one rank, its certificate said "same training as serial:
    NO".
    """
    job = Path(__file__).parents[1] / "helpers" / "job_files" / "fails_on_two.py"
    result = CliRunner().invoke(
        app, ["verify", str(job), "--strategy", "data(2)", "--runs", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" in result.stderr
    assert re.fullmatch(
        r"paragrad: rank 1, step 0: RuntimeError: two is one too many \(.*fails_on_two\.py:\d+\) "
        r"\(the run "
        r"failed, so whether it is the same training is not known\)",
        result.stderr.splitlines()[-1],
    )
    assert list(tmp_path.iterdir()) == []


def make_one_cycle_scheduler(
    optimizer: torch.optim.Optimizer,
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)


@pytest.mark.story
def test_scheduler_that_ends_with_the_job(tmp_path: Path) -> None:
    """If a scheduler ends with the job, the error says that a comparison makes more steps.

    Earlier, only torch's message about too many steps was printed, without the reason.
    """
    with pytest.raises(
        pg.RankFailed,
        match=r"step 3: .*; a comparison makes 20 steps and the job 3: if a part of it ends "
        r"with these \(a scheduler\), give it more epochs",
    ):
        pg.verify(
            make_job(
                "cycle", make_mlp, VECTORS, batch=12, epochs=1, scheduler=make_one_cycle_scheduler
            ),
            "data(2)",
            runs=tmp_path,
        )


@pytest.mark.story
def test_failure_kind_does_not_depend_on_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed run is not taken for a difference between replicas because of its message.

    Earlier, a part of the message decided which of the two it was. So the error of this job led
    to a certificate of another training.
    """
    files = Path(__file__).parents[1] / "helpers" / "job_files"
    monkeypatch.syspath_prepend(str(files))
    (tmp_path / "words.py").write_text(
        (files / "fails_on_two.py")
        .read_text()
        .replace("two is one too many", "they are not equal bit for bit")
    )
    message = (
        r"RuntimeError: they are not equal bit for bit \(.*words\.py:\d+\) \(the run failed, so"
    )
    with pytest.raises(pg.RankFailed, match=message) as caught:
        pg.verify(find_job(str(tmp_path / "words.py")), "data(2)", runs=tmp_path / "runs")
    assert (caught.value.rank, caught.value.step, caught.value.differs) == (1, 0, False)
    assert not (tmp_path / "runs").exists()


def test_progress_of_a_stepwise_comparison(tmp_path: Path) -> None:
    """verify reports its progress after each step. Earlier, it printed nothing."""
    told: list[dict[str, float]] = []
    pg.verify(pg.job("digits"), "serial", runs=tmp_path, progress=told.append)
    assert [(each["step"], each["steps"]) for each in told] == [(step, 20) for step in range(1, 21)]
    assert all(each["difference"] <= 1e-10 for each in told)
    console = Console(file=io.StringIO())
    tell = ProgressDisplay(console).track_run("verify serial")
    for each in told:
        tell(each)
    assert (
        console.file.getvalue()
        == f"verify serial: step 20 of 20, difference {told[-1]['difference']:.1e}\n"
    )  # type: ignore


def test_call_from_python_prints_a_line_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """compare prints a line from time to time.

    Earlier, if a script called it, it printed nothing for minutes.
    """
    now = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(python_progress, "time", clock)
    track_run = python_progress.make_progress()
    for name in ("serial", "data(2)"):
        report = track_run(name)
        for step in range(1, 5):
            now += 2.0
            report({"step": step, "steps": 4, "loss": 0.5})
    report({"step": 4, "steps": 4, "epoch": 0, "metric": "accuracy", "test": 98.0})
    now += 6.0
    report({"step": 4, "steps": 4, "epoch": 0, "metric": "accuracy", "test": 98.0})
    assert capsys.readouterr() == (
        "",
        "serial: step 3 of 4, loss 0.5000\ndata(2): step 2 of 4, loss 0.5000\n"
        "data(2): epoch 1, step 4 of 4: test accuracy 98\n",
    )


def test_train_and_verify_print_progress_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(python_progress, "LINE_INTERVAL", -1.0)
    job = pg.job("digits").replace(epochs=1)
    pg.train(job, "data(2, reduce=ring)", runs=tmp_path)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "data(2, reduce=ring): step 23 of 23, loss 0." in printed.err
    pg.verify(job, "serial", runs=tmp_path)
    assert "verify serial: step 20 of 20, difference " in capfd.readouterr().err
    pg.train(job, "serial", runs=tmp_path, progress=lambda state: None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.story
def test_comparison_names_a_baseline_other_than_serial(tmp_path: Path) -> None:
    """The table names the baseline of a row if it is not serial.

    Earlier, for pipeline(2) with batch norm, it said that the difference was from serial.
    """
    names: list[str] = []
    table = pg.compare(
        JOBS["cnn with batch norm"],
        "serial; serial(micro=2); data(2, micro=2)",
        runs=tmp_path,
        progress=names.append,
    )
    assert [row.baseline for row in table.rows] == [None, None, "serial(micro=2)"]
    assert {"data(2, micro=2), check", "data(2, micro=2), distance from serial(micro=2)"} <= set(
        names
    )
    assert {
        line["baseline"]
        for line in read_lines(table.folder / "compare.jsonl")
        if "baseline" in line
    } == {"serial(micro=2)"}
    note = (
        "data(2, micro=2): compared with serial(micro=2), because batch norm takes its statistics "
        "over micro-batches; that training may differ from serial's"
    )
    lines = str(table).splitlines()
    assert note in lines
    assert "reference" in lines[1]
    assert "reference" in lines[2]
    page = html.unescape((table.folder / "page.html").read_text())
    assert note in page
    assert "Largest difference from serial(micro=2) over 20 steps" in page


@pytest.mark.table
def test_certificate_names_its_reference(tmp_path: Path) -> None:
    """The reference is serial, with or without micro-batches, unless the model has batch norm.

    Batch norm depends on micro-batches, so there data(2, micro=2) is compared with
    serial(micro=2).
    """
    text = run_verify("digits", "--strategy", "data(2, micro=2)", "--runs", str(tmp_path))
    assert "same training as serial: yes" in text
    assert (
        pg.verify(JOBS["cnn with batch norm"], "data(2, micro=2)", runs=tmp_path).reference
        == "serial(micro=2)"
    )
    job = pg.job("digits")
    digests = {
        pg.verify(changed, "serial", runs=tmp_path).digest
        for changed in (
            job,
            job.replace(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.7)),
            job.replace(clip_norm=1.0),
            job.replace(loss=torch.nn.functional.multi_margin_loss),
            job.replace(dtype=torch.bfloat16),
        )
    }
    assert len(digests) == 5


def test_inexact_strategy_is_not_equal(tmp_path: Path) -> None:
    certificate = pg.verify(JOBS["cnn with batch norm"], "data(2, batch_norm=share)", runs=tmp_path)
    assert not certificate.same
    assert certificate.first is not None


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.table
def test_every_strategy_on_every_built_in_job(
    data: Path, name: str, row: str, tmp_path: Path
) -> None:
    certificate = pg.verify(pg.job(name), ROWS[row](2), runs=tmp_path, data=data)
    # only this job has batch norm: the statistics of a share differ from those of the batch
    assert certificate.same == ((row, name) != ("own batch norm", "mnist-resnet"))
