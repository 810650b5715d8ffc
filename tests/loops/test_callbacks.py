"""Callbacks, early stopping, and the checkpoint of the best test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from equality_table import VECTORS, make_job, make_mlp
from torch import nn

import paragrad as pg

pytestmark = pytest.mark.processes

EPOCHS, STEPS = 4, 3  # steps of an epoch
BATCH = -(-len(VECTORS) // STEPS)
STRATEGIES = [
    "serial",
    "data(2)",
    "server(2)",
    *(
        pytest.param(each, marks=pytest.mark.table)
        for each in (
            "data(2, state=replicated, reduce=ring)",
            "data(2, state=fully_sharded)",
            "pipeline(2, micro=2)",
            "tensor(2)",
            "server(2, servers=2)",
            "server(2, sync=asp)",
            "local(2, every=2)",
        )
    ),
]


class Diary(pg.Callback):
    """A callback that writes its arguments into a file and ends the run at a given step or test."""

    def __init__(self, path: Path, last_step: int = 99, last_test: int = 99) -> None:
        self.path = path
        self.last_step = last_step
        self.last_test = last_test

    def write(self, *words: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def read(self, kind: str) -> list[list[object]]:
        lines = map(json.loads, self.path.read_text().splitlines())
        return [line[1:] for line in lines if line[0] == kind]

    def start_run(self, run: pg.RunStart) -> None:
        self.write("start", run.job, run.strategy, run.step, run.steps, run.metric)

    def observe_step(self, report: pg.StepReport) -> bool:
        self.write("step", report.step, report.epoch, report.loss, report.learning_rate)
        return report.step >= self.last_step

    def observe_test(self, report: pg.EpochReport) -> bool:
        self.write("test", report.step, report.epoch, report.metric, report.value)
        return report.epoch >= self.last_test

    def end_run(self, status: str) -> None:
        self.write("end", status)


def make_vectors_job(**changes: object) -> pg.Job:
    settings = {"batch": BATCH, "epochs": EPOCHS, "test": VECTORS, "metric": pg.accuracy}
    return make_job("vectors", make_mlp, VECTORS).replace(**settings, **changes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_callbacks_are_called_in_one_process(strategy: str, tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")
    run = pg.train(make_vectors_job(callbacks=[diary]), strategy, runs=tmp_path / "runs")
    assert diary.read("start") == [
        ["vectors", run.header["strategy"], 0, EPOCHS * STEPS, "accuracy"]
    ]
    # asynchronous workers end their steps in any order
    steps = sorted(diary.read("step"))
    assert [step[0] for step in steps] == list(range(1, EPOCHS * STEPS + 1))
    if strategy.startswith(("serial", "data", "pipeline", "tensor")):
        assert [step[2] for step in steps] == pytest.approx(run.losses, rel=1e-6)
    tests = diary.read("test")
    assert [test[:3] for test in tests] == [
        [(epoch + 1) * STEPS, epoch, "accuracy"] for epoch in range(EPOCHS)
    ]
    assert tests[-1][3] == run.test
    assert diary.read("end") == [["finished"]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_callback_ends_the_run_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary", last_step=4)
    run = pg.train(make_vectors_job(), strategy, callbacks=[diary], runs=tmp_path / "runs")
    assert not run.stopped
    assert (run.folder / "model.safetensors").exists()
    assert diary.read("end") == [["finished"]]
    count = len({line["step"] for line in run.collect_step_lines()})
    if strategy.startswith(("serial", "data", "pipeline", "tensor", "server(2)")):
        assert count == 5  # all ranks see the request in the next step
    assert count < EPOCHS * STEPS
    at_test = Diary(tmp_path / "at test", last_test=1)
    run = pg.train(make_vectors_job(), strategy, callbacks=[at_test], runs=tmp_path / "runs")
    assert len(at_test.read("test")) == 2
    assert at_test.read("step")[-1][0] == 2 * STEPS
    assert at_test.read("end") == [["finished"]]


class Raises(pg.Callback):
    def observe_step(self, report: pg.StepReport) -> None:
        if report.step == 2:
            raise ValueError("no room for this number")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_failing_callback_is_named(strategy: str, tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")
    with pytest.raises(
        pg.RankFailed, match="callback Raises raised ValueError: no room for this number"
    ) as caught:
        pg.train(make_vectors_job(callbacks=[diary, Raises()]), strategy, runs=tmp_path / "runs")
    assert "observe_step" in caught.value.user_traceback
    assert diary.read("end") == [["failed"]]


def test_wrong_callback_is_refused() -> None:
    with pytest.raises(pg.Refused, match=r"callbacks must be a list of paragrad\.Callback objects"):
        pg.train(make_vectors_job(), callbacks=[print])  # type: ignore[list-item]


# ---- early stopping and the best test ---------------------------------------------------------
class Fading(nn.Module):
    """A model whose test is best after the second epoch, when its weight passes 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(len(inputs))


def compute_growth_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -output.mean()


def measure_closeness(output: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    return float((10 - (output - 1.0).abs()).sum()), len(output)


def make_fading_job(**changes: object) -> pg.Job:
    """Return a job whose weight is 0.5, 1, 1.5, ... after the epochs."""
    return make_vectors_job(
        model=Fading,
        loss=compute_growth_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5 / STEPS),
    ).replace(metric=measure_closeness, epochs=9, **changes)


@pytest.mark.parametrize("strategy", ["serial", "data(2)", "server(2, sync=asp)"])
def test_early_stopping_and_best_checkpoint(strategy: str, tmp_path: Path) -> None:
    made = make_fading_job(callbacks=[pg.EarlyStopping(patience=3)])
    run = pg.train(made, strategy, runs=tmp_path, keep="best", save=STEPS)
    assert [
        line["epoch"] for line in run.select_lines("epoch") or run.run_lines if "epoch" in line
    ][-1] == 4
    assert "the callback EarlyStopping ended the run" in run.event_messages
    assert run.best is not None
    assert (run.best.epoch, run.best.step, run.best.folder.name) == (
        1,
        2 * STEPS,
        f"checkpoint-{2 * STEPS:08}",
    )
    # asynchronous workers push means of uneven shares
    bound = 0.1 if "asp" in strategy else 1e-5
    assert float(run.model(best=True).weight) == pytest.approx(1.0, abs=bound)
    assert float(run.model().weight) == pytest.approx(2.5, abs=bound)
    kept = sorted(int(each.name[-8:]) for each in run.folder.glob("checkpoint-*"))
    assert kept == [2 * STEPS, 4 * STEPS, 5 * STEPS]


def test_early_stopping_goes_on_after_a_resume(tmp_path: Path) -> None:
    """A resumed run keeps the count of epochs without a better test, and the best test."""
    made = make_fading_job(callbacks=[pg.EarlyStopping(patience=3)])
    first = pg.train(made, "data(2)", runs=tmp_path, keep="best", limit=4 * STEPS + 1, save=99)
    rest = pg.train(made, "serial", runs=tmp_path, keep="best", resume=first.folder)
    assert [line["epoch"] for line in rest.select_lines("epoch")] == [4]
    assert rest.best == first.best
    assert float(rest.model(best=True).weight) == pytest.approx(1.0, abs=1e-5)


def test_best_checkpoint_is_refused_where_there_is_no_test(tmp_path: Path) -> None:
    made = make_vectors_job().replace(test=None, metric=None)
    with pytest.raises(pg.Refused, match="job vectors has no test set; give it test="):
        pg.train(made, keep="best", runs=tmp_path)
    run = pg.train(made, epochs=1, runs=tmp_path)
    with pytest.raises(pg.Refused, match="kept no checkpoint of its best test"):
        run.model(best=True)


@pytest.mark.parametrize(("arguments", "message"), [((0,), "patience"), ((2, -1.0), "margin")])
def test_wrong_patience_is_refused(arguments: tuple[int, float], message: str) -> None:
    with pytest.raises(pg.Refused, match=f"{message} must be"):
        pg.EarlyStopping(*arguments)
