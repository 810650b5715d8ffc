"""If a process of `server(n)` dies, the training continues.

Whenever it dies, parameters, record and checkpoints are the same as without the death.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equality_table import IMAGES, VECTORS, make_batch_norm_cnn, make_job, make_mlp
from server_messages import (
    JOB,
    AnswerRecorder,
    make_frames,
    make_push,
    make_server,
    send_and_read_refusal,
)
from torch import Tensor, nn
from torch.nn import functional
from unusual_optimizers import Averaging

import paragrad as pg
from paragrad.loops import failure_recovery
from paragrad.parallel.server.message_header import Header, MessageType
from paragrad.parallel.server.model_buffers import serialize_tensors
from paragrad.parallel.server.snapshot import SnapshotStore, find_common_step
from paragrad.record.record import Record, read_lines
from paragrad.trainer.checkpoint.checkpoint import list_checkpoint_folders

pytestmark = pytest.mark.processes


def make_halving_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)


def make_schedule_free_sgd(parameters: Any) -> torch.optim.Optimizer:
    return Averaging(parameters, lr=0.05)


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


MADE = {
    "dropout, AdamW, clipping, a scheduler": make_job(
        "vectors", make_mlp, VECTORS, test=VECTORS, metric=pg.accuracy
    ).replace(
        optimizer=make_adamw,
        clip_norm=0.5,
        scheduler=make_halving_scheduler,
        scheduler_every="step",
    ),
    "batch norm": make_job("normed", make_batch_norm_cnn, IMAGES, test=IMAGES),
}

# seconds of a step, so that a disturbance comes long before the end of the training
PACE = 0.03


class Disturbed(failure_recovery.RecoveryCoordinator):
    """A coordinator that disturbs one process after given steps, also after restarts.

    It calls `disturb` when the record of rank 0 reaches a step of `at`. It reads the record at
    least five times a second. A fast training could end between two reads, so tests set a pace.
    """

    at: tuple[int, ...] = ()
    disturb: Callable[[failure_recovery.RecoveryCoordinator, int], None]

    def poll_events(self) -> None:
        super().poll_events()
        while (
            self.at
            and max(
                (
                    line["step"]
                    for line in read_lines(self.folder / "rank-0.jsonl", spans=False)
                    if line["kind"] == "step"
                ),
                default=-1,
            )
            >= self.at[0]
        ):
            first = self.at[0]
            self.at = self.at[1:]
            self.disturb(first)


def make_signal_sender(
    number: int, sent: signal.Signals
) -> Callable[[failure_recovery.RecoveryCoordinator, int], None]:
    """Return a disturbance that sends a signal to one process of the training."""

    def send_signal(run: failure_recovery.RecoveryCoordinator, step: int) -> None:
        if number in run.pool.members:  # the process may have ended already
            run.pool.members[number].send_signal(sent)

    return send_signal


KILLED = {
    "a worker": ("server(3)", 1, "again"),
    "the first worker": ("server(2, servers=2)", 0, "again"),
    "the only server": ("server(2)", 2, "back"),
    "a server of two": ("server(2, servers=2)", 3, "back"),
    "the only worker": ("server(1, servers=2)", 0, "again"),
}
SAMPLE = [("dropout, AdamW, clipping, a scheduler", "a server of two")]


@pytest.mark.story
@pytest.mark.parametrize(
    ("made", "text", "number", "event"),
    [
        pytest.param(
            made,
            *killed,
            id=f"{who}-{name}",
            marks=[] if (name, who) in SAMPLE else pytest.mark.table,
        )
        for name, made in MADE.items()
        for who, killed in KILLED.items()
    ],
)
def test_killed_process_does_not_change_the_training(
    made: pg.Job,
    text: str,
    number: int,
    event: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = made.replace(dtype=torch.float64, epochs=50)
    serial = pg.train(made, runs=tmp_path)
    monkeypatch.setattr(
        failure_recovery,
        "RecoveryCoordinator",
        type(
            "Here",
            (Disturbed,),
            {"at": (3, 40, 110), "disturb": make_signal_sender(number, signal.SIGKILL)},
        ),
    )
    run = pg.train(made, text, runs=tmp_path, save=30, pace=PACE)
    assert run.finished
    for name, tensor in serial.model().state_dict().items():
        assert torch.allclose(run.model().state_dict()[name], tensor, rtol=1e-10, atol=1e-10), name
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)
    assert (run.sample_count.epochs, run.sample_count.twice, run.sample_count.missed) == (50, 0, 0)
    assert run.test == pytest.approx(serial.test)
    names = [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"]
    assert event in names
    assert len(run.event_messages) == len(names)
    for rank in range(len(Record(run.folder).ranks)):
        steps = [line["step"] for line in Record(run.folder).select_lines("step", rank)]
        assert steps == sorted(set(steps))
    on = pg.train(made.replace(epochs=51), "data(2)", runs=tmp_path, resume=run.folder)
    more = pg.train(made.replace(epochs=51), runs=tmp_path)
    assert on.losses == pytest.approx(more.losses[-3:], rel=1e-8)


# ---- other state than parameters, and deaths after the last step -----------------------------
class Remembering(nn.Module):
    """A model with state of unusual kinds.

    An integer buffer counts calls. A frozen layer follows a trained layer. Three buffers stay
    constant: a large mask, a transposed view, and minus infinity.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 8)
        self.slow = nn.Linear(10, 8).requires_grad_(False)
        self.out = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("mask", torch.ones(256, 256))
        self.register_buffer("table", torch.ones(8, 10).t())
        self.register_buffer("never", torch.tensor([-math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.slow.weight.mul_(0.9).add_(self.layer.weight, alpha=0.1)
        hidden = self.layer(x) + self.slow(x) + x @ self.table
        return self.out(hidden / (1.0 + 0.01 * self.calls))  # type: ignore[no-any-return]


def deadly(output: Tensor, target: Tensor) -> tuple[float, float]:
    """Compute a metric, and once let the calling worker die.

    Each call leaves a file. The worker dies when there are PARAGRAD_TEST_DIES_AT files.
    """
    if "PARAGRAD_TEST_CALLS" in os.environ and os.getpid() != int(
        os.environ["PARAGRAD_TEST_LAUNCHER"]
    ):
        calls = Path(os.environ["PARAGRAD_TEST_CALLS"])
        (calls / f"{len(list(calls.iterdir()))}-{os.getpid()}").touch()
        if len(list(calls.iterdir())) >= int(os.environ["PARAGRAD_TEST_DIES_AT"]):
            with contextlib.suppress(FileExistsError), (calls.parent / "dead").open("x"):
                os._exit(3)
    return float(functional.cross_entropy(output, target, reduction="sum")), len(target)


@pytest.mark.story
def test_buffers_changed_by_forwards_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, after a restart, an integer count and weights that follow others began anew.

    Now they survive. Buffers that do not change are not sent.
    """
    made = make_job("remembering", Remembering, VECTORS).replace(dtype=torch.float64, epochs=20)
    monkeypatch.setattr(
        failure_recovery,
        "RecoveryCoordinator",
        type(
            "Here", (Disturbed,), {"at": (5, 20), "disturb": make_signal_sender(1, signal.SIGKILL)}
        ),
    )
    run = pg.train(made, "server(2)", runs=tmp_path, pace=PACE)
    serial = pg.train(made, runs=tmp_path)
    assert run.event_messages
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)
    for name, tensor in serial.model().state_dict().items():
        assert torch.allclose(run.model().state_dict()[name], tensor, rtol=1e-9, atol=1e-10), name
    assert run.sent_per_step["beside"]["bytes"] < 8 * 256 * 256


@pytest.mark.story
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("optimizer", "changes", "at"),
    [
        (make_adamw, {}, 3),
        pytest.param(make_adamw, {"limit": 8}, 2, marks=pytest.mark.table),
        (make_schedule_free_sgd, {}, 2),
        pytest.param(make_adamw, {"until": "deadly=0.001"}, 1, marks=pytest.mark.table),
    ],
    ids=[
        "in the last test",
        "before a limit",
        "in a test of weights that are not those of training",
        "in the test of a goal",
    ],
)
def test_death_after_the_last_step_changes_nothing(
    optimizer: Any,
    changes: dict[str, Any],
    at: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a worker dies after the last step, the restarted workers make no further step.

    Earlier, the checkpoint lacked the optimizer state, the test used other weights, or the run
    exceeded its limit.
    """
    made = MADE["dropout, AdamW, clipping, a scheduler"].replace(
        dtype=torch.float64,
        optimizer=optimizer,
        scheduler=None,
        clip_norm=None,
        epochs=3,
        metric=deadly,
    )
    serial = pg.train(made, runs=tmp_path, save=100, **changes)
    (calls := tmp_path / "calls").mkdir()
    monkeypatch.setenv("PARAGRAD_TEST_LAUNCHER", str(os.getpid()))
    monkeypatch.setenv("PARAGRAD_TEST_CALLS", str(calls))
    monkeypatch.setenv("PARAGRAD_TEST_DIES_AT", "1000")
    tests = len(
        Record(pg.train(made, "server(2)", runs=tmp_path, **changes).folder).select_lines("epoch")
    )
    a_test = len(list(calls.iterdir())) // tests
    for call in calls.iterdir():
        call.unlink()
    monkeypatch.setenv("PARAGRAD_TEST_DIES_AT", str((at - 1) * a_test + 1))
    run = pg.train(made, "server(2)", runs=tmp_path, save=100, **changes)
    assert run.event_messages
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)
    assert run.test == pytest.approx(serial.test, rel=1e-9)
    epochs = [
        [line["epoch"] for line in Record(each.folder).select_lines("epoch")]
        for each in (run, serial)
    ]
    assert epochs[0] == epochs[1]
    for name, tensor in serial.model().state_dict().items():
        assert torch.allclose(run.model().state_dict()[name], tensor, rtol=1e-9, atol=1e-10), name
    more = [
        pg.train(made.replace(epochs=4), runs=tmp_path, resume=each.folder).losses
        for each in (run, serial)
    ]
    assert more[0] == pytest.approx(more[1], rel=1e-8)


@pytest.mark.table
def test_repeated_server_deaths_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MADE["batch norm"].replace(dtype=torch.float64, epochs=110)
    monkeypatch.setattr(failure_recovery, "MAX_RESTARTS", 1)
    monkeypatch.setattr(
        failure_recovery,
        "RecoveryCoordinator",
        type(
            "Here",
            (Disturbed,),
            {"at": (101, 203, 305), "disturb": make_signal_sender(1, signal.SIGKILL)},
        ),
    )
    run = pg.train(made, "server(1)", runs=tmp_path, pace=PACE)
    serial = pg.train(made, runs=tmp_path)
    assert [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"] == [
        "back"
    ] * 3
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)


@pytest.mark.story
def test_server_death_during_restart_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a second death during the restart was not handled.

    It ended the run with a traceback.
    """

    class Again(Disturbed):
        at = (5,)
        disturb = make_signal_sender(1, signal.SIGKILL)
        left = 2

        def restore_snapshots(self, failure: pg.RankFailed, reason: str) -> None:
            super().restore_snapshots(failure, reason)
            self.left -= 1
            if self.left:
                self.pool.members[1].send_signal(signal.SIGKILL)

    made = MADE["batch norm"].replace(dtype=torch.float64, epochs=20)
    monkeypatch.setattr(failure_recovery, "RecoveryCoordinator", Again)
    run = pg.train(made, "server(1)", runs=tmp_path, pace=PACE)
    serial = pg.train(made, runs=tmp_path)
    assert [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"] == [
        "back"
    ] * 2
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)


class Counting(torch.optim.SGD):
    """SGD with two counts that belong to no parameter: an attribute, and an entry of its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index, call-overload]
        for group in self.param_groups:
            group["lr"] = 0.1 / (self.count + self.state["count"])  # type: ignore[index]
        super().step(closure)


def make_counting_sgd(parameters: Any) -> torch.optim.Optimizer:
    return Counting(parameters, lr=0.1)


@pytest.mark.story
def test_optimizer_attributes_survive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, a restarted server began to count anew.

    The training then differed from serial, without a message.
    """
    made = MADE["batch norm"].replace(dtype=torch.float64, epochs=50, optimizer=make_counting_sgd)
    monkeypatch.setattr(
        failure_recovery,
        "RecoveryCoordinator",
        type(
            "Here", (Disturbed,), {"at": (105,), "disturb": make_signal_sender(1, signal.SIGKILL)}
        ),
    )
    run = pg.train(made, "server(1)", runs=tmp_path, pace=PACE)
    serial = pg.train(made, runs=tmp_path)
    assert [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"] == [
        "back"
    ]
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)


@pytest.mark.parametrize("text", ["serial", "data(2)", "server(2)", "server(2, sync=asp)"])
def test_checkpoint_without_optimizer_attributes_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        pg.RankFailed, match="Counting keeps count, count beside the states of its parameters"
    ):
        pg.train(
            MADE["batch norm"].replace(epochs=1, optimizer=make_counting_sgd),
            text,
            runs=tmp_path,
            save=2,
        )


@pytest.mark.story
def test_stalled_worker_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MADE["batch norm"].replace(dtype=torch.float64, epochs=20)
    monkeypatch.setattr(
        failure_recovery,
        "RecoveryCoordinator",
        type("Here", (Disturbed,), {"at": (5,), "disturb": make_signal_sender(1, signal.SIGSTOP)}),
    )
    run = pg.train(made, "server(2)", runs=tmp_path, timeout=2, pace=PACE)
    serial = pg.train(made, runs=tmp_path)
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)
    assert [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"] == [
        "again"
    ]


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of each world of workers that is started.

    The losses below fail only after the first start, so that they pass validation.
    """
    begin = failure_recovery.RecoveryCoordinator.start_workers
    found = list[int]()

    def start_workers(self: failure_recovery.RecoveryCoordinator) -> None:
        monkeypatch.setenv("PARAGRAD_TEST_RAISES", "yes")
        found.append(self.world_count)
        begin(self)

    monkeypatch.setattr(failure_recovery.RecoveryCoordinator, "start_workers", start_workers)
    return found


def raise_on_short_batch(output: Tensor, target: Tensor) -> Tensor:
    if torch.is_grad_enabled() and os.environ.get("PARAGRAD_TEST_RAISES") and len(target) < 5:
        raise ValueError("broken")
    return functional.cross_entropy(output, target)


@pytest.mark.usefixtures("worlds")
def test_worker_exception_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(pg.RankFailed, match="ValueError: broken"):
        pg.train(MADE["batch norm"].replace(loss=raise_on_short_batch), "server(4)", runs=tmp_path)


def raise_timeout(output: Tensor, target: Tensor) -> Tensor:
    if torch.is_grad_enabled() and os.environ.get("PARAGRAD_TEST_RAISES"):
        raise ValueError("price lookup timed out: connection refused")
    return functional.cross_entropy(output, target)


def test_user_timeout_error_is_not_retried(worlds: list[int], tmp_path: Path) -> None:
    """Earlier, a run whose user code raised this error was restarted fifteen times."""
    with pytest.raises(pg.RankFailed, match="price lookup timed out"):
        pg.train(MADE["batch norm"].replace(loss=raise_timeout), "server(2)", runs=tmp_path)
    assert worlds == [0]


def exit_process(output: Tensor, target: Tensor) -> Tensor:
    if torch.is_grad_enabled() and os.environ.get("PARAGRAD_TEST_RAISES"):
        os._exit(3)
    return functional.cross_entropy(output, target)


def test_repeated_death_at_one_step_ends_the_run(
    worlds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_recovery, "MAX_RESTARTS", 1)
    with pytest.raises(pg.RankFailed, match="exited with code 3"):
        pg.train(MADE["batch norm"].replace(loss=exit_process), "server(2)", runs=tmp_path)
    assert worlds == [0, 1]


def test_interrupted_run_resumes(tmp_path: Path) -> None:
    def stop(told: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    made = MADE["batch norm"].replace(epochs=200)
    run = pg.train(made, "server(2, servers=2)", runs=tmp_path, progress=stop)
    assert run.stopped
    steps = len(run.losses)
    on = pg.train(made, "server(2)", runs=tmp_path, resume=run.folder, limit=steps + 3)
    assert len(on.losses) == 3


# ---- what a server does ----------------------------------------------------------------------
def make_lasting_server(told: AnswerRecorder) -> Any:
    """Return a server that keeps running when workers die."""
    served = make_server("server(2)", told)
    served.shard.snapshots = SimpleNamespace()
    return served


def send_request(
    served: Any, told: AnswerRecorder, kind: MessageType, job: int = JOB, **more: Any
) -> None:
    """Send a request to a server."""
    served.handle_message(make_frames(Header(kind, job, **more)))


def read_last_answer(told: AnswerRecorder) -> tuple[MessageType, int]:
    """Return the kind and the version of the last answer."""
    return told.answers[-1][1].kind, told.answers[-1][1].version


@pytest.mark.parametrize("finish", [0.0, 1.0])
def test_complete_step_is_made_or_dropped_by_all_servers(finish: float) -> None:
    told = AnswerRecorder()
    served = make_lasting_server(told)
    for share in range(2):
        served.handle_message(make_push(share=share, sender=share + 1, whose=b"w%d" % share))
    send_request(served, told, MessageType.HALT, version=78)
    assert read_last_answer(told)[0] == MessageType.GIVEN
    send_request(served, told, MessageType.RESUME, 78, numbers=(finish, 12.0, 1.0))
    assert read_last_answer(told) == (MessageType.DONE, int(finish))
    assert float(served.shard.values[0][0]) == pytest.approx(1.0 - finish * 2.0 / 12.0)
    for share in range(2):  # pushes of the next step, or of the same step again
        served.handle_message(
            make_push(share=share, sender=share + 5, whose=b"n%d" % share, job=78, step=int(finish))
        )
    assert served.shard.is_complete


def test_messages_of_dead_workers_are_ignored() -> None:
    told = AnswerRecorder()
    served = make_lasting_server(told)
    served.handle_message(make_push(share=0))
    send_request(served, told, MessageType.HALT, version=78)
    assert (
        send_and_read_refusal(served, make_push(share=1, sender=2)) == "it is of another training"
    )
    send_request(served, told, MessageType.RESUME, 78)
    assert not served.pending_pushes
    assert not served.shard.is_complete


# ---- the record ------------------------------------------------------------------------------
def test_record_is_rolled_back(tmp_path: Path) -> None:
    lines = [
        {"kind": "choice"},
        *({"kind": "step", "step": step} for step in range(3)),
        {"kind": "epoch", "epoch": 0},
        {"kind": "spans", "step": 3},
        {"kind": "step", "step": 3},
        {"kind": "event"},
    ]
    for rank in range(2):
        (tmp_path / f"rank-{rank}.jsonl").write_text(
            "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        )
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"kind":"step","step":')  # a rank was killed while it wrote this
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step:08}").mkdir()
    failure_recovery.rewind_record(tmp_path, 2, 3)
    for rank in range(2):
        assert [
            json.loads(text) for text in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()
        ] == lines[:5]
    assert [each.name for each in list_checkpoint_folders(tmp_path)] == ["checkpoint-00000002"]


def test_servers_return_to_the_common_step(tmp_path: Path) -> None:
    for number, steps in enumerate(((100, 200), (0, 100))):
        for step in steps:
            (tmp_path / f"server-{number}-{step:08}.snapshot").touch()
    assert find_common_step(tmp_path, 2) == 100
    assert find_common_step(tmp_path, 3) is None


def test_forward_changes_belong_to_their_step() -> None:
    told = AnswerRecorder()
    served = make_lasting_server(told)
    served.handle_message(
        make_frames(Header(MessageType.BUFFERS, JOB), serialize_tensors({"calls": torch.ones(1)}))
    )
    assert not served.shard.buffers
    for share in range(2):
        served.handle_message(make_push(share=share, sender=share + 1))
    send_request(served, told, MessageType.UPDATE, numbers=(12.0, 1.0))
    assert served.shard.buffers == {"calls": torch.ones(1)}
    assert (
        send_and_read_refusal(
            served, make_frames(Header(MessageType.BUFFERS, JOB, step=1), b"no tensors")
        )
        == "what forwards change, and cannot be read"
    )
    assert (
        send_and_read_refusal(make_server("server(2)"), make_frames(Header(MessageType.HALT, JOB)))
        == "HALT is no question"
    )


def test_update_in_a_snapshot_is_not_lost(tmp_path: Path) -> None:
    """Earlier, a restarted server counted updates as lost, although its snapshot had them.

    This happened if it was killed after it saved a snapshot and before it cleared its journal.
    """
    served = make_lasting_server(AnswerRecorder())
    store = served.shard.snapshots = SnapshotStore(tmp_path, 0)
    store.save_snapshot(served.shard)
    store.record_tickets(served.shard, [(7, 3)])
    journal = (tmp_path / "server-0.journal").read_bytes()
    served.shard.updates += 1
    store.save_snapshot(served.shard)
    store.close()
    (tmp_path / "server-0.journal").write_bytes(journal)
    again = make_lasting_server(AnswerRecorder())
    restored = SnapshotStore(tmp_path, 0)
    restored.restore_shard(again.shard)
    assert 7 not in again.shard.applied_tickets
    restored.record_tickets(again.shard, [(8, 3)])
    restored.close()
    # the update of ticket 8 was lost with the process
    last = make_lasting_server(AnswerRecorder())
    restored = SnapshotStore(tmp_path, 0)
    restored.restore_shard(last.shard)
    assert 8 in last.shard.applied_tickets
    restored.close()


def test_failed_snapshot_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_save(kept: Any, path: Path) -> None:
        path.write_bytes(b"as much as there was room for")
        raise OSError(28, "No space left on device")

    served = make_lasting_server(AnswerRecorder())
    served.shard.snapshots = SnapshotStore(tmp_path, 0)
    monkeypatch.setattr(torch, "save", fail_to_save)
    served.is_snapshot_due = True
    for share in range(2):
        served.handle_message(make_push(share=share, sender=share + 1))
    send_request(served, AnswerRecorder(), MessageType.UPDATE, numbers=(12.0, 1.0))
    assert served.shard.updates == 1
    assert served.shard.refusals == {"a snapshot, for which there was no room": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["server-0.journal"]
    served.shard.snapshots.close()


KILLING_JOB = """
import os, signal
import paragrad as pg, torch
from torch.utils.data import TensorDataset

calls = []


def loss(output, target):
    calls.append(len(target))
    if len(calls) > 40:  # long after the first step; the parent of a rank is the fork server
        os.kill(os.getppid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(output, target)


job = pg.Job(
    name="killing",
    model=lambda: torch.nn.Linear(4, 2),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    train=TensorDataset(torch.randn(640, 4), torch.zeros(640, dtype=torch.long)),
    batch=8,
    epochs=9,
)
"""


@pytest.mark.story
@pytest.mark.parametrize("strategy", ["server(2)", "server(2, sync=asp)"])
def test_killed_fork_server_is_named(strategy: str, tmp_path: Path) -> None:
    """Earlier, the record reported a return to step 0 that never happened.

    The message did not name the signal. Now it does, and the record has no such event.
    """
    (tmp_path / "killing.py").write_text(KILLING_JOB)
    ran = subprocess.run(
        [sys.executable, "-m", "paragrad", "train", "killing.py", "--strategy", strategy],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 1
    message = "the server of the ranks was killed by SIGKILL, and its ranks ended with it"
    assert message in ran.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert not [line for line in read_lines(folder / "run.jsonl") if line["kind"] == "event"]
