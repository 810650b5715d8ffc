"""A record is read back as it was written, also if its process died.

The sample count (`audit`) counts the samples that the record names.
"""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paragrad.datasets.sample_order import SampleOrder
from paragrad.errors import Refused
from paragrad.record import cpu_load
from paragrad.record.record import (
    RECORD_SCHEMA,
    Record,
    Recorder,
    create_run_folder,
    encode_json,
    read_lines,
)
from paragrad.record.step_log import StepLog, encode_field
from paragrad.record.step_times import list_joint_seconds

pytestmark = pytest.mark.pure


def write_run(folder: Path, shares: list[list[range]], samples: int = 10) -> Record:
    """Write a run of one epoch in which each rank recorded these ranges of positions."""
    with Recorder(folder / "run.jsonl") as record:
        record.write_line("run", job={"samples": samples}, seed=3)
    for rank, ranges in enumerate(shares):
        with Recorder(folder / f"rank-{rank}.jsonl") as record:
            for step, positions in enumerate(ranges):
                record.write_line(
                    "step",
                    epoch=0,
                    step=step,
                    seconds=0.1 * (rank + 1),
                    loss=[2.0 * len(positions), len(positions)],
                    order=[[positions.start, positions.stop]] if positions else [],
                    sent={"gradients": {"bytes": 100 * rank, "computed": False}},
                )
            record.write_line("epoch", epoch=0, test={"value": 50.0, "weight": 4}, seconds=1.0)
    return Record(folder)


def test_record_round_trip(tmp_path: Path) -> None:
    record = write_run(tmp_path, [[range(3), range(6, 8)], [range(3, 6), range(8, 10)]])
    assert record.losses == [2.0, 2.0]
    assert record.seconds_per_step == 0.2  # the slowest rank counts
    assert record.sent_per_step == {"gradients": {"bytes": 100, "computed": False}}
    assert record.test == 50.0
    assert (
        str(record.sample_count) == "10 of 10 samples seen in each of 1 epoch(s), 0 twice, 0 missed"
    )


def test_memory_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    """The memory of a run is that of the rank with the most.

    Earlier, every rank recorded its memory, but no code read it. Records without it are still
    readable.
    """
    assert write_run(tmp_path, [[range(5)], [range(5, 10)]]).memory == {}
    for rank in range(2):
        with Recorder(tmp_path / f"rank-{rank}.jsonl") as record:
            record.write_line(
                "memory", parameters=100, exchange=[8, 16][rank], resident=[3000, 2000][rank]
            )
    assert Record(tmp_path).memory == {"parameters": 100, "exchange": 16, "resident": 3000}
    assert Record(tmp_path).fullest == {"parameters": 100, "exchange": 16}, (
        "the process is not the training"
    )


def test_audit_finds_duplicate_and_missing_samples(tmp_path: Path) -> None:
    audit = write_run(tmp_path, [[range(3), range(6, 8)], [range(2, 6), range(8, 9)]]).sample_count
    assert (audit.seen, audit.twice, audit.missed) == (9, 1, 1)


def test_order_of_earlier_versions_is_read_as_ranges(tmp_path: Path) -> None:
    """Until version 3, a step had one range, which was [0, 0] if it was empty.

    A step left the range out if it equalled that of the step before.
    """
    write_run(tmp_path, [[], []], samples=8)
    for rank, orders in enumerate((["[0,4]", "[4,6]"], ["[0,0]", "[6,8]"])):
        with (tmp_path / f"rank-{rank}.jsonl").open("w") as file:
            for step, order in enumerate(orders):
                file.write(f'{{"kind":"step","epoch":0,"step":{step},"order":{order}}}\n')
            file.write(f'{{"kind":"step","epoch":1,"step":{step + 1}}}\n')
            file.write('{"kind":"epoch","epoch":0,"test":null}\n')
    record = Record(tmp_path)
    assert [line["order"] for line in record.select_lines("step", 0)] == [
        [[0, 4]],
        [[4, 6]],
        [[4, 6]],
    ]
    assert [line["order"] for line in record.select_lines("step", 1)] == [[], [[6, 8]], [[6, 8]]]
    audit = record.sample_count
    assert (audit.epochs, audit.seen, audit.twice, audit.missed) == (1, 8, 0, 0)


def test_audit_counts_every_range_of_a_step(tmp_path: Path) -> None:
    """A step has a range for each micro-batch; the first sample may be on any rank, or on none."""
    write_run(tmp_path, [[]], samples=12)
    for rank, order in enumerate(([[3, 5], [7, 9]], [[0, 3], [5, 7], [8, 11]])):
        with Recorder(tmp_path / f"rank-{rank}.jsonl") as record:
            record.write_line("step", epoch=0, step=0, order=order)
    audit = Record(tmp_path).sample_count
    assert (audit.epochs, audit.seen, audit.twice, audit.missed) == (1, 11, 1, 1)


def test_truncated_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    with Recorder(path) as record:
        record.write_line("event", name="one", numbers={})
    with path.open("a") as file:
        file.write('{"kind":"event","na')
    assert [line["name"] for line in read_lines(path)] == ["one"]


STEPS = [
    (
        {
            "epoch": 0,
            "loss": [2.0, 1.0],
            "sent": {"gradients": {"bytes": 8, "computed": False}},
            "lr": 0.1,
        },
        [8],
    ),
    (
        {
            "epoch": 0,
            "loss": [1.0, 1.0],
            "sent": {"gradients": {"bytes": 8, "computed": False}},
            "lr": 0.1,
        },
        [8],
    ),
    (
        {
            "epoch": 1,
            "loss": [1.0, 1.0],
            "sent": {"gradients": {"bytes": 9, "computed": False}},
            "lr": 0.1,
        },
        [9, 9],
    ),
    ({"epoch": 1, "loss": [0.5, 1.0], "sent": {}, "lr": 0.05}, []),
]


def test_omitted_fields_are_restored(tmp_path: Path) -> None:
    """Fields and names of spans are written only if they differ from the step before.

    A reader sees all of them in every step.
    """
    with Recorder(tmp_path / "rank-0.jsonl") as record:
        log = StepLog(record)
        for number, (fields, sizes) in enumerate(STEPS):
            for place, size in enumerate(sizes):
                log.add_span(
                    "reduce 0", "send", 0.001 * number + 0.0001 * place, bytes=size, seconds=0.0005
                )
                log.add_span(
                    "B0", "compute", 0.001 * number - 0.0002 + 0.0001 * place, seconds=0.25
                )
            log.write_step(number, 0.001 * number, **fields)
    found = list(read_lines(tmp_path / "rank-0.jsonl"))
    steps = [line for line in found if line["kind"] == "step"]
    assert [
        {name: line[name] for name in fields}
        for line, (fields, _) in zip(steps, STEPS, strict=True)
    ] == [fields for fields, _ in STEPS]
    assert [line["start"] for line in steps] == [0.0, 0.001, 0.002, 0.003]
    assert [
        (line["step"], line["name"], line["lane"], line["start"], line["seconds"], line["bytes"])
        for line in found
        if line["kind"] == "span"
    ] == [
        (0, "B0", "compute", -0.0002, 0.25, None),
        (0, "reduce 0", "send", 0.0, 0.0005, 8),
        (1, "B0", "compute", 0.0008, 0.25, None),
        (1, "reduce 0", "send", 0.001, 0.0005, 8),
        (2, "B0", "compute", 0.0018, 0.25, None),
        (2, "B0", "compute", 0.0019, 0.25, None),
        (2, "reduce 0", "send", 0.002, 0.0005, 9),
        (2, "reduce 0", "send", 0.0021, 0.0005, 9),
    ]
    text = (tmp_path / "rank-0.jsonl").read_text()
    assert (text.count('"lr"'), text.count('"epoch"'), text.count('"spans":')) == (2, 2, 2)
    assert [line["kind"] for line in read_lines(tmp_path / "rank-0.jsonl", spans=False)] == [
        "step"
    ] * 4


def test_first_version_is_read_and_later_ones_refused(
    tmp_path: Path,
) -> None:
    """Records of the first version have every field in every step, and a line for every span.

    A record of a later version than this one is refused, because its meaning is unknown.
    """
    record = write_run(tmp_path, [[range(3), range(3, 10)]])
    with Recorder(tmp_path / "rank-0.jsonl") as rank:
        rank.write_line(
            "span",
            step=0,
            name="F0",
            lane="compute",
            start=0.5,
            seconds=0.25,
            bytes=None,
            peer=None,
        )
    assert Record(tmp_path).losses == record.losses
    assert Record(tmp_path).select_lines("span")[0]["start"] == 0.5
    (tmp_path / "run.jsonl").write_text(
        f'{{"kind":"run","schema":{RECORD_SCHEMA + 1},"machine":{{"paragrad":"9.9"}}}}\n'
    )
    with pytest.raises(
        Refused,
        match=f"a record of version {RECORD_SCHEMA + 1}, but this paragrad reads versions up to "
        f"{RECORD_SCHEMA}; read it with paragrad 9.9",
    ):
        Record(tmp_path)
    (tmp_path / "run.jsonl").write_text(f'{{"kind":"run","schema":{RECORD_SCHEMA + 1}}}\n')
    with pytest.raises(Refused, match="read it with paragrad of its time"):
        Record(tmp_path)


def test_cpu_time_of_other_processes_is_computed() -> None:
    """The CPU time of other processes is that of all processes, minus that of the ranks.

    The possible difference of the two clocks is subtracted too. The result is never negative.
    """
    rank = {"host": "one", "seconds": 10.0, "own": 4.0, "all": 15.0, "switched": 30}
    load = cpu_load.find_cpu_load([rank, {**rank, "switched": 300}], 2)
    assert load == cpu_load.CpuLoad(2, 0.8, pytest.approx(0.7, abs=0.01), 30.0)
    elsewhere = {**rank, "host": "two", "all": 17.0}
    assert cpu_load.find_cpu_load([rank, rank, elsewhere, elsewhere], 2) == cpu_load.CpuLoad(
        2, 0.8, pytest.approx(0.9, abs=0.01), 3.0
    )
    quiet = cpu_load.find_cpu_load([rank, {**rank, "own": 20.0}], 2)
    assert quiet is not None
    assert quiet.others == 0.0
    assert cpu_load.find_cpu_load([{**rank, "all": None}], 2) is None
    assert cpu_load.find_cpu_load([], 2) is None


@pytest.mark.parametrize(
    ("own", "others", "crowded"),
    [(1.0, 0.7, False), (1.2, 0.7, True), (2.0, 0.1, False), (2.0, 0.3, True)],
)
def test_other_processes_matter_only_on_full_cores(
    own: float, others: float, crowded: bool
) -> None:
    """Other processes disturb a run only if the cores are full.

    Earlier, one rank on two cores was called disturbed if another process used the other core.
    """
    assert cpu_load.CpuLoad(2, own, others, 0.0).crowded == crowded


def test_rank_reads_its_own_cpu_time() -> None:
    """A tenth of a second of work counts as the CPU time of this process.

    It is also in the time of all processes, if the system provides that.
    """
    clock = cpu_load.CpuMeter()
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    told = clock.measure_usage()
    assert 0.1 <= told["own"] <= 10.0
    assert told["seconds"] > 0
    assert told["switched"] >= 0
    assert told["all"] is None or told["all"] > 0


def test_run_folders_of_one_second_differ(tmp_path: Path) -> None:
    assert len({create_run_folder(tmp_path, "run") for _ in range(5)}) == 5


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for parent in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Refused, match="--runs"):
            create_run_folder(parent, "run")


def test_recorded_order_is_the_trained_order() -> None:
    order = SampleOrder(10, 4, 3)
    assert [len(batch) for batch in order.list_batches()] == [4, 4, 2]


def test_refused_resume_leaves_the_record_unchanged(tmp_path: Path) -> None:
    """A refused resume does not change the record.

    Earlier, the resume of a comparison that was still running cut off its unfinished line.
    Only then was the resume refused.
    """
    path = tmp_path / "compare.jsonl"
    with Recorder(path, exclusive=True) as first:
        first.file.write('{"kind":"dist')
        first.file.flush()
        with pytest.raises(
            Refused,
            match=r"compare\.jsonl is still being written to; wait until the command that writes "
            "it ends",
        ):
            Recorder(path, exclusive=True)
        assert path.read_text() == '{"kind":"dist'
    # The first recorder released its lock, so now the unfinished line is cut off.
    with Recorder(path, exclusive=True) as second:
        second.write_line("event")
    assert path.read_text() == '{"kind":"event"}\n'


def test_audit_of_overlapping_ranges_is_fast(tmp_path: Path) -> None:
    """The count works with ranges; earlier, it counted 10^8 samples of an epoch one by one."""
    audit = write_run(tmp_path, [[range(3), range(2, 6)], [range(2, 4), range(0)]]).sample_count
    assert (audit.seen, audit.twice, audit.missed) == (6, 2, 4)


def test_asynchronous_step_ends_with_its_last_share() -> None:
    """The duration of an asynchronous step counts the shares of all workers.

    Earlier, under asp with a straggler, it was the share of the slow worker, though no worker
    waits for that. Under clients it was the step of one client, as if the clients ran one after
    the other. So a comparison and its charts showed no gain.
    """

    def make_share(
        step: int, first: int, start: float, seconds: float, epoch: int = 0
    ) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "step": step,
            "order": [[first, first + 4]],
            "start": start,
            "seconds": seconds,
        }

    # the fast worker: a share ends every second
    fast = [make_share(step, 0, step * 1.0, 1.0) for step in range(4)]
    # the slow worker: a share ends every three seconds
    slow = [make_share(0, 4, 0.0, 3.0), make_share(1, 4, 3.0, 3.0)]
    # two more shares, which the fast worker takes over
    rest = [make_share(2, 4, 4.0, 1.0), make_share(3, 4, 5.0, 1.0)]
    steps = [list(each) for each in zip(fast, [*slow, *rest], strict=True)]
    assert list_joint_seconds(steps, 2) == [(5.0 - 0.0) / 2, (6.0 - 5.0) / 2]
    # a share that is computed again had ended before
    late = [make_share(0, 4, 7.0, 1.0)]
    assert list_joint_seconds([steps[0] + late, *steps[1:]], 2) == [2.5, 0.5]
    apart = [
        [make_share(step, 4 * step, start, 1.0, epoch)]
        for step, start, epoch in
        # two rounds of clients on two workers
        ((0, 0.0, 0), (1, 0.0, 0), (2, 1.0, 0), (3, 9.0, 1))
    ]
    assert list_joint_seconds(apart, None) == [2.0 / 3, 1.0]


def test_fields_of_a_step_are_encoded_as_json_encodes_them() -> None:
    for value in (0, -3, 1.5, -0.0, 1e-300, 1e22, [], [[0, 64], [3, 4]], [0.1, 2.0], {}):
        assert encode_field(value) == encode_json(value)
    for value in (True, None, float("nan"), float("inf"), "text", (1, 2), {"a": {"bytes": 3}}):
        assert encode_field(value) == encode_json(value)
    assert encode_field([float("nan"), None]) == encode_json([float("nan"), None])


def test_span_of_a_failing_block_ends_at_the_failure(tmp_path: Path) -> None:
    with Recorder(tmp_path / "rank-0.jsonl") as recorder:
        log = StepLog(recorder)
        with pytest.raises(KeyError), log.record_span("F0", "compute"):
            raise KeyError
        assert [(name, lane) for name, lane, *_ in log.spans] == [("F0", "compute")]


def read_steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path) if line["kind"] == "step"]


def test_steps_wait_until_another_line_or_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    with Recorder(path, delay=1000.0) as recorder:
        log = StepLog(recorder)
        for step in range(3):
            log.write_step(step, 0.0, epoch=0, lr=0.1 * step)
        assert read_steps(path) == []
        log.write_event("overflow", "a line of another kind keeps its place")
        log.write_step(3, 0.0, epoch=0, lr=0.3)
        kinds = [line["kind"] for line in read_lines(path)]
        assert kinds == ["step", "step", "step", "event"]
        log.flush()
        assert read_steps(path) == [0, 1, 2, 3]
        log.write_step(4, 0.0, epoch=1, lr=0.3)
    lines = [line for line in read_lines(path) if line["kind"] == "step"]
    assert [(line["step"], line["epoch"], line["lr"]) for line in lines] == [
        (0, 0, 0.0),
        (1, 0, 0.1),
        (2, 0, 0.2),
        (3, 0, 0.3),
        (4, 1, 0.3),
    ]


def test_a_step_is_written_without_a_later_line(tmp_path: Path) -> None:
    """A rank may wait long in its next step: for the others, or for a debugger."""
    path = tmp_path / "rank-0.jsonl"
    with Recorder(path, delay=0.02) as recorder:
        StepLog(recorder).write_step(0, 0.0)
        # the recorder is not called again
        end = time.monotonic() + 30
        while not read_steps(path) and time.monotonic() < end:
            pass
        assert read_steps(path) == [0]


def test_an_error_of_the_writing_thread_is_raised_by_the_next_line(tmp_path: Path) -> None:
    with Recorder(tmp_path / "rank-0.jsonl", delay=0.02) as recorder:
        log = StepLog(recorder)
        with mock.patch.object(recorder, "file", FullFile(recorder.file)):
            log.write_step(0, 0.0)
            end = time.monotonic() + 30
            while recorder.error is None and time.monotonic() < end:
                pass
            with pytest.raises(OSError, match=r"rank-0\.jsonl"):
                log.write_step(1, 0.0)


class FullFile:
    """A file on a disk that is full.

    Args:
        file: The file.
    """

    def __init__(self, file: Any) -> None:
        self.name = file.name

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_killed_process_lacks_the_last_steps_alone(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from paragrad.record.record import STEP_DELAY, Recorder\n"
        "from paragrad.record.step_log import StepLog\n"
        "path = Path(sys.argv[1])\n"
        "log = StepLog(Recorder(path, delay=STEP_DELAY))\n"
        "step = 0\n"
        "while not path.stat().st_size:\n"
        "    log.write_step(step, log.now())\n"
        "    step += 1\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "rank-0.jsonl"
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    steps = read_steps(path)
    assert steps == list(range(len(steps)))
    assert steps
