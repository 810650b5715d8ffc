"""The timeline of a step: what each rank does at which time.

It is in the record, in a trace for Perfetto, and next to the prediction of the clock.
"""

from __future__ import annotations

import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from equality_table import VECTORS, make_job, make_mlp
from failing_models import Breaks

import paragrad as pg
from paragrad.commands.train import train_on_ranks
from paragrad.executors.clock import Timeline
from paragrad.launch import Launcher
from paragrad.planner.step_timeline import (
    LEARNING_STEPS,
    PREDICTED_STEPS,
    WholeStep,
    find_recorded_schedule,
    predict_step,
    read_step_timelines,
    select_median_step,
)
from paragrad.record.chrome_trace import BUCKETS, STEPS, TASKS
from paragrad.record.record import DETAILED_STEPS, Record
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.story]

# 29 samples: 4 steps an epoch, the last of 5
JOB = make_job("mlp", make_mlp, VECTORS, batch=8, epochs=5)
PIPELINES = [
    "pipeline(2, micro=4)",
    "pipeline(3, micro=2, schedule=gpipe)",
    "pipeline(2, micro=3, schedule=zero_bubble)",
    "place(3)",
]


def train_and_record(
    pool: Launcher, folder: Path, text: str, job: pg.Job = JOB, **settings: Any
) -> Record:
    train_on_ranks(pool, validate_run(job, text, Settings(**settings)), folder)
    return Record(folder)


def has_no_overlap(spans: list[tuple[float, float]]) -> bool:
    """Return whether the spans do not overlap, except by rounded microseconds."""
    return all(one[1] <= other[0] + 2e-6 for one, other in pairwise(sorted(spans)))


# ---- the record ------------------------------------------------------------------------------
@pytest.mark.parametrize("text", PIPELINES)
def test_detailed_step_follows_its_schedule(pool: Launcher, tmp_path: Path, text: str) -> None:
    """Each rank records every action of its program once, and in order.

    The actions of a rank do not overlap. No message arrives before it is posted.
    """
    record = train_and_record(pool, tmp_path, text)
    schedule = find_recorded_schedule(record)
    size = record.header["workers"]
    assert schedule is not None
    steps = [
        step
        for step in read_step_timelines(record, DETAILED_STEPS).values()
        if len(step.spans)
        == max(
            # of full batches
            len(each.spans)
            for each in read_step_timelines(record, DETAILED_STEPS).values()
        )
    ]
    assert len(steps) >= 5
    for step in steps:
        posted = {
            (span.rank, span.name[1:]): span.start
            for span in step.spans
            if span.name.startswith(">") and span.lane == "send"
        }
        for rank in range(size):
            own = [span for span in step.spans if span.rank == rank]
            told = [span.name for span in own if span.lane in ("compute", "receive", "send")]
            assert told == [str(action) for action in schedule.program(rank, size)]
            assert [span.name for span in own if span.lane in ("data", "update")] == [
                "load",
                "update",
            ]
            assert "wait for loss" in [span.name for span in own]
            assert has_no_overlap([(span.start, span.start + span.seconds) for span in own])
            for span in own:
                if span.lane == "receive":
                    source, _, slot = span.name[1:].partition(":")
                    assert posted[int(source), f"{rank}:{slot}"] <= span.start + span.seconds + 1e-6


def test_only_some_steps_are_recorded_in_detail(pool: Launcher, tmp_path: Path) -> None:
    """A message needs a span in the record, so only some steps have spans of messages.

    With a trace, all steps have them.
    """
    for folder, settings, steps in (
        (tmp_path / "run", {}, set(DETAILED_STEPS)),
        (tmp_path / "traced", {"trace": tmp_path / "trace.json"}, set(range(20))),
    ):
        folder.mkdir()
        record = train_and_record(pool, folder, "pipeline(2, micro=2)", **settings)
        for rank in range(2):
            assert {
                span["step"]
                for span in record.select_lines("span", rank)
                if span["lane"] == "receive"
            } == steps


def test_evaluation_between_epochs_is_not_in_a_step(pool: Launcher, tmp_path: Path) -> None:
    """Earlier, the forwards of a test were recorded in the step after it.

    So were the gathers that fully_sharded makes for a test.
    """
    record = train_and_record(pool, tmp_path, "pipeline(2, micro=2)", JOB.replace(test=VECTORS))
    for rank in range(2):
        computed = [
            (span["step"], span["name"])
            for span in record.select_lines("span", rank)
            if span["lane"] == "compute"
        ]
        assert len(computed) == len(set(computed)) == 20 * 4
    (folder := tmp_path / "sharded").mkdir()
    record = train_and_record(
        pool,
        folder,
        "data(2, state=fully_sharded)",
        JOB.replace(test=VECTORS),
        trace=folder / "trace.json",
    )
    for rank in range(2):
        begun = {step["step"]: step["start"] for step in record.select_lines("step", rank)}
        assert [
            span
            for span in record.select_lines("span", rank)
            if span["start"] < begun[span["step"]]
        ] == []


def test_short_batches_are_not_shown_or_fitted(pool: Launcher, tmp_path: Path) -> None:
    """29 samples in batches of 15 make every second step shorter, with as many micro-batches."""
    record = train_and_record(pool, tmp_path, "pipeline(2, micro=2)", JOB.replace(batch=15))
    assert all(number % 2 == 0 for number in read_step_timelines(record, DETAILED_STEPS))
    assert len(read_step_timelines(record, DETAILED_STEPS)) >= 4


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("data(2)", {"adding up gradients", "updating parameters"}),
        ("data(2, reduce=ring)", set()),
        ("serial", set()),
        ("data(2, reduce=ring) * pipeline(2, micro=2)", {"buckets", "wait for loss"}),
    ],
)
def test_every_strategy_has_a_step_timeline(
    pool: Launcher, tmp_path: Path, text: str, waits: set[str]
) -> None:
    record = train_and_record(pool, tmp_path, text)
    _, step = select_median_step(read_step_timelines(record)) or (0, None)
    assert step is not None
    for rank in range(record.header["workers"]):
        own = [span for span in step.spans if span.rank == rank]
        names = {span.name for span in own}
        assert {"load", "F0", "B0", "update"} | waits <= names
        assert ("reduce 0" in names) == ("ring" in text)
        assert min(span.start for span in own) >= 0
        assert max(span.start + span.seconds for span in own) <= step.seconds + 2e-6


# ---- the trace -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "pipeline(2, micro=2)",
        "data(2, reduce=ring)",
        "data(2)",
        "serial",
        "data(2, state=fully_sharded)",
        pytest.param("data(2, reduce=ring) * pipeline(2, micro=2)", marks=pytest.mark.table),
    ],
)
def test_trace_is_valid_for_perfetto(pool: Launcher, tmp_path: Path, text: str) -> None:
    """Every process and thread in the trace has a name.

    Slices of a thread follow each other, or one is inside another. Every arrow begins in a slice
    of one process, and ends in a slice of another.
    """
    path = tmp_path / "trace.json"
    record = train_and_record(pool, tmp_path, text, trace=path)
    found = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in found if event["ph"] == "X"]
    assert all(
        event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
        for event in slices
    )
    named = {(event["pid"], event["tid"]) for event in found if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} == named
    assert {event["pid"] for event in found if event["name"] == "process_name"} == set(
        range(record.header["workers"])
    )
    assert ("fully_sharded" in text) == any(
        event["name"].startswith("reduce-scatter ") for event in slices
    )
    assert (BUCKETS in {thread for _, thread in named}) == ("ring" in text)
    steps = [event["name"] for event in slices if event["pid"] == 0 and event["tid"] == STEPS]
    assert {f"step {number}" for number in range(20)} <= set(steps)
    for process, thread in named:
        open_: list[float] = []
        for event in sorted(
            (each for each in slices if (each["pid"], each["tid"]) == (process, thread)),
            key=lambda each: (each["ts"], -each["dur"]),
        ):
            while open_ and open_[-1] <= event["ts"] + 1e-2:
                open_.pop()
            assert not open_ or event["ts"] + event["dur"] <= open_[-1] + 1e-2
            open_.append(event["ts"] + event["dur"])
    ends = {kind: {event["id"]: event for event in found if event["ph"] == kind} for kind in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    # 20 steps with 2 arrows for each rank, in every replica
    assert len(ends["s"]) == (20 * 2 * record.header["workers"] if "pipeline" in text else 0)
    for number, begin in ends["s"].items():
        assert begin["pid"] != ends["f"][number]["pid"]
        assert begin["ts"] <= ends["f"][number]["ts"] + 1
    assert sorted(path.parent.glob("trace*")) == [path]


def test_failed_run_keeps_its_trace(pool: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(pg.RankFailed):
        train_and_record(
            pool, tmp_path, "data(2, reduce=ring)", make_job("breaks", Breaks, VECTORS), trace=path
        )
    steps = {
        event["args"].get("step")
        for event in json.loads(path.read_text())["traceEvents"]
        if event["ph"] == "X" and event["tid"] == TASKS
    }
    assert steps == {0, 1, 2, 3}


@pytest.mark.parametrize("path", ["nowhere/trace.json", "", "."])
def test_unwritable_trace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        pg.Refused, match=r"--trace .*; give a file in a folder that exists and can be written"
    ):
        validate_run(JOB, "serial", Settings(trace=path))
    assert list(tmp_path.iterdir()) == []


# ---- predictions of the clock ----------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "text", [*PIPELINES, "pipeline(2, micro=4, schedule=interleaved, cut=[1, 1, 1, 1])"]
)
def test_clock_predicts_steps_after_the_fitted_ones(
    pool: Launcher, tmp_path: Path, text: str
) -> None:
    """The clock predicts a whole step along its schedule, with every task once.

    It uses the measured times of each kind of task.
    """
    job = (
        make_job("mlp", make_mlp, VECTORS, batch=8, epochs=5)
        if "interleaved" not in text
        else make_job("deep", make_deep_mlp, VECTORS, batch=8, epochs=5)
    )
    record = train_and_record(pool, tmp_path, text, job)
    found = predict_step(record)
    schedule = find_recorded_schedule(record)
    size = record.header["workers"]
    assert found is not None
    assert schedule is not None
    assert set(LEARNING_STEPS).isdisjoint(PREDICTED_STEPS)
    assert 1 <= found.steps <= len(LEARNING_STEPS)
    assert found.low <= found.timeline.seconds <= found.high
    for rank in range(size):
        computed = [
            span.name
            for span in found.timeline.spans
            if span.rank == rank and span.lane == "compute"
        ]
        told = [
            str(action)
            for action in WholeStep(schedule).program(rank, size)
            if type(action).__name__ == "Compute"
        ]
        assert computed == told


def make_deep_mlp() -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)), nn.Linear(10, 4))


def test_step_without_a_schedule_has_no_prediction(pool: Launcher, tmp_path: Path) -> None:
    assert predict_step(train_and_record(pool, tmp_path, "data(2, reduce=ring)")) is None


def test_median_of_some_steps() -> None:
    steps = {
        number: Timeline(seconds, (seconds,), 0) for number, seconds in enumerate((3.0, 1.0, 2.0))
    }
    assert select_median_step(steps) == (2, steps[2])
    assert select_median_step({}) is None


# ---- the page --------------------------------------------------------------------------------
@pytest.mark.table
def test_page_has_rank_rows_and_the_prediction(tmp_path: Path) -> None:
    """The timeline is also described in words.

    Boxes use the colours of the page, which has a light and a dark version of each.
    """
    table = pg.compare(JOB, "data(2, reduce=ring); pipeline(2, micro=2)", runs=tmp_path)
    text = unescape((table.folder / "page.html").read_text(encoding="utf-8"))
    section = text.split('<section id="step"')[1].split("</section>")[0]
    data, pipeline = section.split("<figure ")[1:]
    assert "There is no prediction: the clock" in data
    assert "predicted: " not in data
    assert pipeline.index("predicted: ") < pipeline.index("measured: ")
    assert "Measured: " in pipeline
    assert all("Rank 0: " in each and "Rank 1: " in each for each in (data, pipeline))
    names = re.findall(r"<text[^>]*>([^<]*)</text>", pipeline)
    assert names.count("0") >= 2  # rank 0, above and below
    assert not re.findall(r"#[0-9a-f]{6}", pipeline)


def test_too_few_steps_have_no_step_chart(tmp_path: Path) -> None:
    table = pg.compare(JOB.replace(epochs=1), "pipeline(2, micro=2)", runs=tmp_path)
    section = (
        (table.folder / "page.html").read_text(encoding="utf-8").split('<section id="step"')[1]
    )
    assert (
        f"Nothing to draw: no run made {PREDICTED_STEPS.start + 1} steps of all workers together."
        in section.split("</section>")[0]
    )
