"""Trainings that end early, fail or hang: checkpoints, messages and files that remain.

Each test tells the story of one bug that a user could meet.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equality_table import JOBS, VECTORS, make_job
from torch import Tensor, nn
from torch.utils.data import Dataset

import paragrad as pg
from paragrad.commands import compare as comparing
from paragrad.commands import train as training
from paragrad.datasets.loader_processes import load_batches
from paragrad.datasets.loading import Samples
from paragrad.errors import Interrupted, RankFailed, StepFailed
from paragrad.launch import Launcher
from paragrad.launch.launcher_folder import (
    MAX_PATH_BYTES,
    choose_short_folder,
    create_locked_folder,
    remove_stale_folders,
)
from paragrad.loops import synchronous
from paragrad.loops.synchronous import train_rank
from paragrad.record.record import Record, Recorder
from paragrad.record.step_log import StepLog
from paragrad.runtime.rendezvous import join_world, make_restart_store
from paragrad.runtime.stragglers import StragglerMonitor
from paragrad.runtime.world import World
from paragrad.trainer.checkpoint import checkpoint
from paragrad.trainer.checkpoint.checkpoint_files import list_checkpoint_folders, read_folder_step
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import ValidatedRun, validate_run

pytestmark = pytest.mark.processes

JOB = JOBS["mlp"].replace(epochs=2, dtype=torch.float64)


# ---- a checkpoint is saved only of a step that all records contain ---------------------------
def train_with_kill_before_record(world: World, checked: ValidatedRun, folder: Path) -> None:
    """Train; rank 1 dies after step 3, before it writes this step into its record."""
    write = StepLog.write_step

    def write_or_die(self: StepLog, number: int, *words: Any, **fields: Any) -> None:
        if world.rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, number, *words, **fields)

    with mock.patch.object(StepLog, "write_step", write_or_die):
        train_rank(world, checked, folder, time.monotonic())


def test_checkpoint_step_is_in_all_records(tmp_path: Path) -> None:
    """A step is saved only after all ranks have written it into their records.

    Earlier, rank 0 could save a step that rank 1 had not recorded. Then the sample count of the
    resumed run said that samples were missed.
    """
    checked = validate_run(JOB, "data(2, reduce=ring)", Settings(save=1))
    with Launcher(2) as ranks, pytest.raises(RankFailed, match="SIGKILL"):
        checked.run_on_ranks(ranks, train_with_kill_before_record, checked, tmp_path)
    assert [read_folder_step(folder) for folder in list_checkpoint_folders(tmp_path)] == [3, 2]


class Raises(nn.Linear):
    """A layer whose forward raises an error if it runs in a rank."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized():
            raise ValueError("enough of it")
        return super().forward(x)


@pytest.mark.parametrize(
    ("writer", "name"), [(checkpoint, "save_tensors"), (synchronous, "save_weights")]
)
def test_full_disk_leaves_no_partial_file(tmp_path: Path, writer: Any, name: str) -> None:
    """If a save fails because the disk is full, the partial file is removed.

    Earlier, a half-written checkpoint stayed and kept the disk full, so the end of the run could
    not be recorded.
    """

    def fail_on_full_disk(written: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device", str(path))

    with (
        mock.patch.object(writer, name, fail_on_full_disk),
        pytest.raises(OSError, match="No space left"),
    ):
        train_rank(
            World(), validate_run(JOB, "serial", Settings(save=5)), tmp_path, time.monotonic()
        )
    assert not list(tmp_path.glob("*.partial"))


def test_record_on_a_full_disk_is_named() -> None:
    """If a record cannot be written, the error names its file.

    Earlier it did not, and the launcher said that its own standard output could not be written.
    """
    with (
        Recorder(Path("/dev/full")) as record,
        pytest.raises(OSError, match="No space left on device: '/dev/full'"),
    ):
        record.write_line("step", epoch=0)


def test_failure_is_printed_if_it_cannot_be_recorded(pool: Launcher, tmp_path: Path) -> None:
    """If the disk is full, the error of the rank is still raised.

    Earlier, the error from writing the record replaced it.
    """

    def fail_on_full_disk(record: Recorder, *_: Any) -> None:
        raise OSError(28, "No space left on device", record.file.name)

    job = make_job("raises", lambda: Raises(10, 4), VECTORS)
    with (
        mock.patch.object(training, "_write_end_line", fail_on_full_disk),
        pytest.raises(RankFailed, match="enough of it"),
    ):
        training.train_on_ranks(pool, validate_run(job, "data(2)", Settings()), tmp_path)


def test_partial_save_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    """The next training in the folder removes the partial checkpoint of a killed run.

    Earlier it stayed for ever, unless the restarted training saved a checkpoint of the same step.
    """
    (tmp_path / "checkpoint-00000003.partial").mkdir()
    train_rank(World(), validate_run(JOB, "serial", Settings(save=5)), tmp_path, time.monotonic())
    assert [read_folder_step(folder) for folder in list_checkpoint_folders(tmp_path)] == [6, 5]
    assert not list(tmp_path.glob("*.partial"))


# ---- torchrun restarts ranks, and its store keeps the old keys -------------------------------
DIES = """
import os, signal, torch, paragrad as pg
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Linear):
    calls = 0

    def forward(self, x):
        Net.calls += 1
        if (Net.calls == 30 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
                and os.environ["RANK"] == "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

torch.manual_seed(0)
job = pg.Job(name="dies", model=lambda: Net(10, 4), loss=nn.functional.cross_entropy, batch=12,
        epochs=20,
             train=TensorDataset(torch.randn(60, 10), torch.randint(4, (60,))),
             optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


@pytest.mark.story
@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.table)])
def test_torchrun_restarts_ranks(tmp_path: Path, backend: str) -> None:
    """Ranks that torchrun restarts can meet again.

    Earlier, they read an old key from torchrun's store: the address of a process that had ended.
    """
    job = tmp_path / "dies.py"
    job.write_text(DIES)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "-m",
        "paragrad",
        "train",
        str(job),
        "--strategy",
        "data(2)",
        "--backend",
        backend,
        "--runs",
        str(tmp_path / "runs"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    ends = [Record(folder).end for folder in sorted((tmp_path / "runs").iterdir())]
    assert len(ends) == 2
    assert [end and end["status"] for end in ends][1] == "finished"


def start_twice(world: World) -> list[str]:
    """Start twice with the same store, as restarted ranks do.

    The first start is complete: its name and all answers are still in the store. Return the
    values that the second start reads.
    """
    store = torch.distributed.PrefixStore("test", world.store)
    first = make_restart_store(store, world.rank, world.size, 10.0)
    first.set(f"{world.rank}", f"old {world.rank}")
    begun = store.get("start").decode()
    answers = [f"answers/{begun}/{rank}" for rank in range(1, world.size)]
    before = [store.get(answer) for answer in answers]
    world.barrier()
    # rank 0 is late: the others have already answered to the earlier start
    if world.rank == 0:
        while any(store.get(answer) == old for answer, old in zip(answers, before, strict=True)):
            threading.Event().wait(0.01)
    second = make_restart_store(store, world.rank, world.size, 10.0)
    second.set(f"{world.rank}", f"new {world.rank}")
    return [second.get(f"{rank}").decode() for rank in range(world.size)]


def test_restarted_ranks_use_new_store_keys(pool: Launcher) -> None:
    for found in pool.run(start_twice, size=3):
        assert found == ["new 0", "new 1", "new 2"]


# ---- waits -----------------------------------------------------------------------------------
class WaitingStderr(io.StringIO):
    """The standard error of a waiting rank.

    When a message about missing ranks is written to it, the key "said" is set in the store.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def write(self, text: str) -> int:
        written = super().write(text)
        if "have not reached it" in text:
            self.world.store.set("said", "")
        return written


def wait_for_missing_rank(world: World) -> str:
    """Let ranks 0 and 1 wait in step 7 for rank 2, and return what each rank prints.

    Rank 2 arrives after another rank has printed that rank 2 is missing.
    """
    watch = StragglerMonitor(world, slow_after=0.1)
    said = WaitingStderr(world)
    with contextlib.redirect_stderr(said):
        if world.rank == 2:
            world.store.get("said")
        with watch.track_step(7) if world.rank < 2 else contextlib.nullcontext():
            world.barrier()
    watch.close()
    return said.getvalue()


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_missing_rank_is_named_while_waiting(pool: Launcher, backend: str) -> None:
    """Waiting ranks print which rank has not reached their step.

    Earlier, if the loop of one rank ended early, the other ranks printed nothing until their
    timeout of 300 s.
    """
    first, second, _ = pool.run(wait_for_missing_rank, size=3, backend=backend)
    # only one of the two waiting ranks prints it: the first that has noticed the other
    told = f"{first}{second}"
    assert " is in step 7 for " in told
    assert "and rank(s) 2 have not reached it" in told


class Hangs(nn.Linear):
    """A layer that hangs on rank 1, in its tenth forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Hangs.calls += 1
        if Hangs.calls == 10 and dist.is_initialized() and dist.get_rank() == 1:
            threading.Event().wait()
        return super().forward(x)


@pytest.mark.table
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_rank_timeout_is_a_setting(tmp_path: Path, backend: str) -> None:
    job = make_job("hangs", lambda: Hangs(10, 4), VECTORS, epochs=9)
    with pytest.raises(
        RankFailed, match=r"^rank 0, step \d+: rank 0 waits for slot 1 from rank 1"
    ) as caught:
        pg.train(job, "data(2, reduce=ring)", runs=tmp_path, backend=backend, timeout=1.5)
    # DDP puts this text around an error of its hook
    assert "Unable to cast" not in f"{caught.value} {caught.value.user_traceback}"


class Stopped(nn.Linear):
    """A layer that stops rank 1 by SIGSTOP, in its tenth forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Stopped.calls += 1
        if Stopped.calls == 10 and dist.is_initialized() and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x)


@pytest.mark.sample(2)
@pytest.mark.story
@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("data(4)", r"rank [023] gave up waiting for rank 1 in "),
        ("data(4, reduce=ring)", r"rank [023] waits for .* from rank 1, which says nothing:"),
    ],
)
def test_stopped_rank_is_named(tmp_path: Path, strategy: str, message: str) -> None:
    """If a rank is stopped, the message of the other ranks names it.

    Earlier, the others gave up "waiting in updating parameters", without the name of the rank.
    Three ranks wait for it, some of them through another rank. With a ring the rank was named,
    but inside "Unable to cast ... to Tensor".
    """
    job = make_job("stopped", lambda: Stopped(10, 4), VECTORS, epochs=9)
    with pytest.raises(RankFailed, match=rf"^rank \d, step \d+: {message}"):
        pg.train(job, strategy, runs=tmp_path, timeout=4.0)


def join_without_others(world: World, rank: int, backend: str, store: Path) -> None:
    """Join a world of three ranks in which the two other ranks never arrive."""
    with join_world(rank, 3, store, backend, timeout=0.5):
        pass


@pytest.mark.parametrize(
    ("backend", "rank", "others"), [("shm", 1, "0, 2"), ("shm", 0, "1, 2"), ("gloo", 2, "0, 1")]
)
def test_absent_rank_is_named(
    pool: Launcher, tmp_path: Path, backend: str, rank: int, others: str
) -> None:
    """The message names the ranks that did not join the world.

    Earlier, it said only "Wait timeout".
    """
    with pytest.raises(
        RankFailed,
        match=rf"rank\(s\) {others} did not come to where the 3 ranks meet within 0.5 s ",
    ):
        pool.run(join_without_others, rank, backend, tmp_path / "store", size=1)


def join_and_fail_at_once(world: World, store: Path) -> None:
    with (
        mock.patch.object(
            torch.distributed, "init_process_group", side_effect=RuntimeError("no such interface")
        ),
        join_world(0, 3, store, "gloo", timeout=60),
    ):
        pass


def test_immediate_failure_blames_no_other_rank(pool: Launcher, tmp_path: Path) -> None:
    """If a rank fails at once while it joins, the message blames no other rank.

    Earlier, it named the ranks that had not joined yet, before their 60 s were over.
    """
    with pytest.raises(RankFailed, match="no such interface") as caught:
        pool.run(join_and_fail_at_once, tmp_path / "store", size=1)
    assert "did not come" not in str(caught.value)


class Stuck(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            threading.Event().wait()
        return torch.zeros(3), 0


def load_stuck_dataset(world: World, loaders: int) -> str:
    try:
        list(load_batches(Samples(Stuck(), sample_timeout=0.5), [(0, [4]), (0, [5])], loaders))
    except StepFailed as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("loaders", [0, 1])
def test_hanging_dataset_is_named(pool: Launcher, loaders: int) -> None:
    """If a dataset hangs, the message names the sample and the line of code that hangs.

    Earlier, the run hung for ever.
    """
    (told,) = pool.run(load_stuck_dataset, loaders, size=1)
    assert told.startswith(
        "sample 5 of the dataset was not loaded within 0.5 s; the process is at "
    )
    assert "threading.py" in told


@pytest.mark.story
def test_loaders_under_a_long_temporary_folder(tmp_path: Path) -> None:
    """Loaders work if the path of the temporary folder is long.

    Earlier, the path of their socket was too long (AF_UNIX allows 107 bytes). The run hung and
    ignored SIGTERM.
    """
    long = tmp_path / ("long" * 30)
    long.mkdir()
    script = (
        "import paragrad as pg\nif __name__ == '__main__':\n    "
        "pg.train(pg.job('digits').replace(epochs=1), 'data(2)', loaders=1, limit=3)"
    )
    (tmp_path / "own.py").write_text(script)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "own.py")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(long)},
    )
    assert ran.returncode == 0, ran.stderr
    assert choose_short_folder(Path("/" + MAX_PATH_BYTES * "x")) != Path("/" + MAX_PATH_BYTES * "x")
    assert choose_short_folder(tmp_path) == tmp_path or len(str(tmp_path)) > MAX_PATH_BYTES


# ---- files and folders that remain after a run -----------------------------------------------
def test_folders_of_killed_runs_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """A folder is stale if no process holds its lock.

    Process ids cannot tell this: in another container they belong to other processes.
    """
    with mock.patch("paragrad.launch.launcher_folder.choose_short_folder", return_value=tmp_path):
        # a folder for the rendezvous of launched ranks: it has no lock
        (tmp_path / "paragrad-0").mkdir()
        dead, held = create_locked_folder()
        alive, other = create_locked_folder()
        assert dead.exists()
        os.close(held)  # this happens too when its processes end
        remove_stale_folders(tmp_path)
        assert not dead.exists()
        assert alive.exists()
        assert (tmp_path / "paragrad-0").exists()
        os.close(other)


KILLED = """
import os, signal, sys, torch, paragrad as pg
from torch import nn
from torch.utils.data import TensorDataset

model = nn.Linear(10, 4)
data = TensorDataset(torch.randn(60, 10), torch.randint(4, (60,)))
with pg.parallelize(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(),
        lr=0.1), "serial") as trainer:
    for batch in trainer.batches(data, 12, 0, loaders=1):
        trainer.step(*batch)
        if sys.argv[1:]:
            {"all": os.killpg, "rank": os.kill}[sys.argv[1]](os.getpid(), signal.SIGKILL)
"""


@pytest.mark.table
@pytest.mark.parametrize("who", [pytest.param("all", marks=pytest.mark.table), "rank"])
def test_loader_folders_of_killed_runs_are_removed(who: str, tmp_path: Path) -> None:
    """The next start removes the folders of the loaders of a killed run.

    Earlier, under torchrun or in a single process, this was Python's own folder, pymp-...,
    which is never removed. Also, if only a rank was killed, its loaders lived for up to five
    more seconds. They held the lock of their folder until torchrun's next start had ended.
    """
    (tmp_path / "own.py").write_text(KILLED)
    # a short path: if the path is long, these folders are created elsewhere
    with tempfile.TemporaryDirectory() as temporary:
        for more, code in ([who], -signal.SIGKILL), ([], 0):
            ran = subprocess.run(
                [sys.executable, str(tmp_path / "own.py"), *more],
                timeout=100,
                check=False,
                process_group=0,
                env={**os.environ, "TMPDIR": temporary},
            )
            assert ran.returncode == code
            left = [
                path.name
                for path in Path(temporary).iterdir()
                if path.name.startswith(("pymp-", "paragrad-"))
            ]
            assert len(left) == len(more)


def test_ctrl_c_removes_partial_checkpoints(tmp_path: Path) -> None:
    """Ctrl-C kills the ranks, and partial checkpoints are removed.

    Earlier, if a rank was killed while it saved, its partial checkpoint stayed. The resumed run
    did not remove it, because --resume saves in a new folder.
    """

    def interrupt(told: dict[str, Any]) -> None:
        (run,) = tmp_path.iterdir()
        (run / "checkpoint-00000009.partial").mkdir()
        (run / "checkpoint-00000009.partial" / "model.safetensors").touch()
        (run / "model.safetensors.partial").touch()
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        pg.train(JOB, "data(2)", runs=tmp_path, progress=interrupt)
    assert list(tmp_path.rglob("*.partial")) == []


@pytest.mark.story
def test_repeated_ctrl_c_prints_no_traceback(tmp_path: Path) -> None:
    """Ctrl-C several times prints no traceback.

    Earlier, the third one printed a traceback, because the launcher was waiting for the fork
    server.
    """
    (tmp_path / "talks.py").write_text(TALKS)
    os.mkfifo(tmp_path / "begun")
    words = [
        sys.executable,
        "-m",
        "paragrad",
        "train",
        "talks.py",
        "--strategy",
        "data(2)",
        "--save",
        "5",
        "--runs",
        "runs",
    ]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "BEGUN": str(tmp_path / "begun")},
    ) as launcher:
        (tmp_path / "begun").read_text()
        while launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(0.03)  # about as fast as a user can press the keys
        assert launcher.stdout is not None
        printed = launcher.stdout.read()
    assert launcher.returncode == 130
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("paragrad: stopped")


# ---- a terminal that is closed ---------------------------------------------------------------
TALKS = """
import contextlib, os, paragrad as pg, torch
from torch import nn
from torch.utils.data import Dataset

class Points(Dataset):
    seen = 0

    def __len__(self):
        return 60

    def __getitem__(self, index):
        Points.seen += 1
        if Points.seen == 200:
            # one rank tells: whoever reads is gone by the second
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.environ["BEGUN"] + "-told")
                open(os.environ["BEGUN"], "w").close()      # waits for who reads it
        return torch.full((10,), index / 60), index % 4

job = pg.Job(name="talks", model=lambda: nn.Linear(10, 4), loss=nn.functional.cross_entropy,
        train=Points(), batch=12,
             optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), epochs=100_000)
"""
AT_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)     # tests under nohup ignore it
# of a session's first process: its controlling terminal
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, "-m", "paragrad", *sys.argv[2:]])
"""


@pytest.mark.table
def test_closed_terminal_ends_a_training_like_sigterm(tmp_path: Path) -> None:
    """If the terminal is closed (SIGHUP), the training is saved, as after SIGTERM.

    Earlier, SIGHUP ended the launcher without a message. Nothing was saved, and temporary
    folders stayed.
    """
    (tmp_path / "talks.py").write_text(TALKS)
    (tmp_path / "temporary").mkdir()
    os.mkfifo(tmp_path / "begun")
    ours, theirs = os.openpty()
    command = [
        "train",
        str(tmp_path / "talks.py"),
        "--strategy",
        "data(2)",
        "--runs",
        str(tmp_path / "runs"),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL, os.ttyname(theirs), *command],
        start_new_session=True,
        env={**os.environ, "BEGUN": str(tmp_path / "begun"), "TMPDIR": str(tmp_path / "temporary")},
    ) as launcher:
        os.close(theirs)
        (tmp_path / "begun").read_text()
        os.close(ours)  # this closes the terminal: the kernel sends SIGHUP
        assert launcher.wait(60) == 0
    record = Record(next((tmp_path / "runs").iterdir()))
    assert record.end is not None
    assert record.end["status"] == "stopped"
    assert (
        read_folder_step(list_checkpoint_folders(record.folder)[0])
        == len(record.select_lines("step"))
        == len(record.select_lines("step", rank=1))
    )
    assert list((tmp_path / "temporary").glob("paragrad-*")) == []


# ---- a comparison that ends early ------------------------------------------------------------
ROWS = "serial; data(2); data(2, reduce=ring)"


def call_in_second_row(
    act: Callable[[], None],
) -> Callable[[str], Callable[[dict[str, Any]], None]]:
    """Return progress callbacks that call `act` once, while the second row trains."""
    acted: list[str] = []

    def make_callback(name: str) -> Callable[[dict[str, Any]], None]:
        def tell(told: dict[str, Any]) -> None:
            if name == "data(2)" and not acted:
                acted.append(name)
                act()

        return tell

    return make_callback


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def compare_and_stop(tmp_path: Path, status: str, **settings: Any) -> pg.Table:
    job = JOB.replace(epochs=4)
    if status == "interrupted":
        with pytest.raises(Interrupted) as caught:
            pg.compare(
                job, ROWS, runs=tmp_path, progress=call_in_second_row(raise_interrupt), **settings
            )
        return pg.Table(caught.value.folder)
    return pg.compare(
        job,
        ROWS,
        runs=tmp_path,
        progress=call_in_second_row(lambda: os.kill(os.getpid(), signal.SIGTERM)),
        **settings,
    )


@pytest.mark.sample(2)
@pytest.mark.story
@pytest.mark.parametrize("status", ["stopped", "interrupted"])
def test_interrupted_comparison_keeps_finished_rows(tmp_path: Path, status: str) -> None:
    """A comparison that is stopped keeps its finished rows.

    Earlier, SIGTERM and Ctrl-C lost them. Now the table contains them and names the missing rows,
    and --resume completes the table.
    """
    table = compare_and_stop(tmp_path, status)
    assert table.ending["status"] == status
    assert table.missing == [
        "data(2)",
        "data(2, reduce=ring)",
        "baseline-plain-PyTorch-loop",
        "baseline-serial-threads-1",
    ]
    assert table.speed_baseline == "serial"
    assert table.rows[0].test is None
    assert table.rows[0].seconds_per_step
    assert f"the comparison was {status}; not done: data(2); data(2, reduce=ring)" in str(table)
    assert (table.folder / "page.html").exists()
    begun = (table.folder / table.rows[0].runs[0] / "run.jsonl").stat().st_mtime_ns
    whole = pg.compare(JOB.replace(epochs=4), ROWS, runs=tmp_path, resume=table.folder)
    assert whole.folder == table.folder
    assert whole.missing == []
    assert whole.speed_baseline == "plain PyTorch loop"
    assert "not done" not in str(whole)
    assert max(row.difference or 0.0 for row in whole.rows) <= 1e-10
    # the finished row was not trained again
    assert (table.folder / table.rows[0].runs[0] / "run.jsonl").stat().st_mtime_ns == begun
    with pytest.raises(pg.Refused, match="resume it with the same"):
        pg.compare(JOB.replace(epochs=4), "serial; data(2)", runs=tmp_path, resume=table.folder)
    with (
        Recorder(whole.folder / "compare.jsonl", exclusive=True),
        pytest.raises(pg.Refused, match="is still being written to"),
    ):
        pg.compare(JOB.replace(epochs=4), ROWS, runs=tmp_path, resume=table.folder)
    with pytest.raises(pg.Refused, match="holds no comparison"):
        pg.compare(JOB, ROWS, runs=tmp_path, resume=tmp_path)


def test_comparison_on_a_full_disk(tmp_path: Path) -> None:
    run = comparing.train_on_ranks

    def fail_on_full_disk(ranks: Launcher, row: ValidatedRun, folder: Path, **more: Any) -> pg.Run:
        if "data" in folder.name:
            raise OSError(28, "No space left on device", str(folder / "run.jsonl"))
        return run(ranks, row, folder, **more)

    with mock.patch.object(comparing, "train_on_ranks", fail_on_full_disk):
        table = pg.compare(JOB, ROWS, runs=tmp_path)
    assert table.ending["status"] == "failed"
    assert "not done: data(2); data(2, reduce=ring)" in str(table)
    assert "run.jsonl: No space left on device" in str(table)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_while_the_command_starts(kind: signal.Signals, tmp_path: Path) -> None:
    """A signal while the command imports torch prints "stopped" and gives the exit code 130.

    Earlier, SIGTERM and SIGHUP ended the command without a message and with other exit codes.
    """
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\ninput()\n")
    with subprocess.Popen(
        [sys.executable, "-m", "paragrad", "work", "digits"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell may start commands that ignore Ctrl-C, and nohup ignores SIGHUP
        preexec_fn=lambda: signal.signal(kind, signal.SIG_DFL),
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "importing\n"
        command.send_signal(kind)
        _, printed = command.communicate(timeout=60)
    assert command.returncode == 130
    assert printed == "paragrad: stopped\n"
