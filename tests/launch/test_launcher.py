"""The launcher starts and watches ranks, and no rank is left at the end, whatever ended it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from equality_table import JOBS

from paragrad.errors import RankFailed, StepFailed
from paragrad.launch import Launcher, fork_server
from paragrad.report.equivalence.lockstep import compare_with_serial
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.world import World
from paragrad.strategies.registry import resolve_strategy, strategy
from paragrad.strategies.strategy import Environment

pytestmark = pytest.mark.processes


@pytest.fixture
def two_ranks() -> Iterator[Launcher]:
    with Launcher(2) as ranks:
        yield ranks


def has_ended(pids: list[int]) -> bool:
    """Return whether none of these processes exists any more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def describe_rank(world: World, name: str) -> tuple[int, int, str, int]:
    return world.rank, world.size, name, torch.get_num_threads()


def test_results_are_in_rank_order_and_cores_are_divided(pool: Launcher) -> None:
    for size in (1, 2, 3, 4):
        assert pool.run(describe_rank, "x", size=size) == [
            (rank, size, "x", max(1, count_cores() // size)) for rank in range(size)
        ]
    assert pool.run(describe_rank, "x", size=2, threads=3)[0][3] == 3


def print_lines(world: World) -> None:
    print("two lines,", end=" ")
    print(f"of {world.size}\nranks")
    print("a warning", file=sys.stderr)
    world.barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_printed_lines_carry_the_rank(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Earlier, lines of several ranks looked alike, and in a pipe the last lines were lost."""
    with Launcher(size) as ranks:
        ranks.run(print_lines)
    printed = capfd.readouterr().err.splitlines()
    for rank in range(size):
        prefix = f"rank {rank}: " if size > 1 else ""
        assert [line for line in printed if line.startswith(prefix)] == [
            f"{prefix}two lines, of {size}",
            f"{prefix}ranks",
            f"{prefix}a warning",
        ]


def test_functions_need_not_be_importable(pool: Launcher) -> None:
    offset = 5
    assert pool.run(lambda world: world.rank + offset, size=3) == [5, 6, 7]


def test_reports_arrive(pool: Launcher) -> None:
    told: list[tuple[int, str]] = []

    def tell(world: World, report) -> None:  # type: ignore[no-untyped-def]
        report(f"hello from {world.rank}")

    pool.run(tell, size=2, on_report=lambda rank, value: told.append((rank, value)))
    assert sorted(told) == [(0, "hello from 0"), (1, "hello from 1")]


def fail_on_one(world: World) -> None:
    if world.rank == 1:
        raise StepFailed("it broke", step=7, tensor="fc.weight")
    world.barrier()


def test_the_first_failure_is_raised_with_rank_step_and_tensor(two_ranks: Launcher) -> None:
    two_ranks._start_ranks(2)
    pids = [process.pid for process in two_ranks.processes]
    with pytest.raises(RankFailed) as caught:
        two_ranks.run(fail_on_one)
    error = caught.value
    assert (error.rank, error.step, error.tensor) == (1, 7, "fc.weight")
    assert str(error) == "rank 1, step 7, tensor fc.weight: it broke"
    assert "fail_on_one" in error.traceback
    assert has_ended(pids)
    assert two_ranks.run(describe_rank, "again")[1][0] == 1  # the next run starts fresh ranks


def differ_on_one(world: World, differs: bool) -> None:
    if world.rank == 1:
        raise StepFailed("the replicas are not equal bit for bit", differs=differs)
    world.barrier()


@pytest.mark.parametrize("differs", [True, False])
def test_replica_difference_is_reported_with_the_error(two_ranks: Launcher, differs: bool) -> None:
    """Errors that wrap or reword this error keep `differs`."""
    with pytest.raises(RankFailed) as caught:
        two_ranks.run(differ_on_one, differs)
    assert caught.value.differs == caught.value.with_message("so it was").differs == differs
    assert StepFailed.wrap_error(StepFailed("apart", differs=differs), step=3).differs == differs


def die(world: World, how: signal.Signals) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), how)
    world.barrier()


@pytest.mark.story
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT])
def test_killed_rank_is_named_and_not_its_peer(two_ranks: Launcher, how: signal.Signals) -> None:
    with pytest.raises(RankFailed) as caught:
        two_ranks.run(die, how)
    assert caught.value.rank == 1
    assert f"killed by {how.name}" in str(caught.value)


def hang(world: World) -> None:
    if world.rank == 1:
        signal.pause()


@pytest.mark.story
def test_hang_is_ended_by_the_deadline_and_named(two_ranks: Launcher) -> None:
    # the deadline shall not count the start of processes
    two_ranks.run(describe_rank, "awake")
    pids = [process.pid for process in two_ranks.processes]
    with pytest.raises(RankFailed) as caught:
        two_ranks.run(hang, deadline=5.0, timeout=60.0)
    # rank 0 waits for rank 1 at the end of the run
    assert "rank(s) 0, 1" in str(caught.value)
    assert "in hang" in caught.value.traceback
    assert has_ended(pids)


def exit_rank(world: World) -> None:
    sys.exit(3)


def test_sys_exit_in_a_task_is_a_failure(two_ranks: Launcher) -> None:
    with pytest.raises(RankFailed, match="SystemExit: 3"):
        two_ranks.run(exit_rank)


SCRIPT = textwrap.dedent("""
    import signal
    from paragrad.launch import Launcher, processes

    def wait(world, report):
        report(None)
        signal.pause()

    started = []

    def record_start(rank, value):
        started.append(rank)
        if len(started) == 2:
            server = processes.get_fork_server()
            print(server.popen.pid, *(process.pid for process in ranks.processes), flush=True)

    with Launcher(2) as ranks:
        ranks.run(wait, on_report=record_start)
""")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.story),
        *(pytest.param(each, marks=pytest.mark.table) for each in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_no_process_outlives_its_launcher(tmp_path: Path, how: signal.Signals) -> None:
    """The signal goes to the launcher's process group, as Ctrl-C at a terminal does."""
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        process_group=0,
    ) as launcher:
        assert launcher.stdout is not None
        watched = [os.pidfd_open(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(watched) == 3
        os.killpg(launcher.pid, how)
        launcher.wait(timeout=20)
    wait_for_ends(watched)
    # no temporary folder of them is left
    assert list((tmp_path / "temporary").glob("paragrad-*")) == []


def wait_for_ends(handles: list[int]) -> None:
    """Wait until the processes of all these pidfds are gone, and close them."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    left = set(handles)
    while left:
        events = poll.poll(10_000)
        assert events, f"{len(left)} process(es) are still there after 10 s"
        for handle, _ in events:
            left.remove(handle)
            poll.unregister(handle)
            os.close(handle)


def check_collectives(world: World) -> bool:
    world.check_collectives()
    return True


def test_world_verifies_its_collectives(pool: Launcher) -> None:
    assert all(pool.run(check_collectives, size=3))


def check_broken_sum(world: World) -> None:
    class Broken(World):
        def all_reduce(self, tensor: torch.Tensor, operation: str = "SUM") -> torch.Tensor:
            result = super().all_reduce(tensor, operation)
            return result / self.size if operation == "SUM" else result

    Broken(world.rank, world.size, world.backend, world.timeout, world.group).check_collectives()


def test_averaging_backend_is_detected(two_ranks: Launcher) -> None:
    with pytest.raises(RankFailed, match=r"gives a wrong all_reduce\(SUM\)"):
        two_ranks.run(check_broken_sum)


@pytest.mark.table
def test_reused_rank_keeps_no_threads_or_sockets(pool: Launcher) -> None:
    """Earlier, every run left 9 threads and 21 descriptors in each rank.

    DDP holds the state of its hook, and that state held DDP. So the process groups of a finished
    run stayed alive, and the equality table became slower with every run.
    """

    def train() -> int:
        chosen = resolve_strategy(strategy("data(3, reduce=ring)"), Environment())
        pool.run(compare_with_serial, JOBS["cnn with batch norm"], chosen, size=3)
        return len(list(Path(f"/proc/{pool.processes[1].pid}/fd").iterdir()))

    train()
    before = train()
    after = [train() for _ in range(4)][-1]
    assert after < before + 21


class Interrupted:
    """A poll during which another signal arrives; as in Python, a concurrent call raises."""

    signals = 3

    def __init__(self) -> None:
        self.real = PLAIN_POLL()
        self.running = False

    def register(self, *arguments: Any) -> None:
        self.real.register(*arguments)

    def poll(self, timeout: int) -> Any:
        if self.running:
            raise RuntimeError("concurrent poll() invocation")
        self.running = True
        if Interrupted.signals:
            Interrupted.signals -= 1
            signal.raise_signal(signal.SIGIO)
        self.running = False
        return self.real.poll(timeout)


PLAIN_POLL = select.poll


def test_process_of_an_ended_server_is_refused() -> None:
    """The shared folder is missing, as after the fork server was killed and replaced.

    Earlier, the error said only that a file was not found.
    """
    with Launcher(1) as ranks:
        shutil.rmtree(ranks.open_shared_folder())
        with pytest.raises(
            RankFailed, match="the server of the ranks ended, and its ranks ended with it"
        ):
            ranks.start_extra_process(0)


def test_two_signals_during_server_start() -> None:
    """Earlier, two signals that came at once ended the fork server, and no training could start.

    On a busy machine, this happened during the import of torch.
    """
    launcher, other = socket.socketpair()
    told: list[str] = []
    with launcher, mock.patch.object(select, "poll", Interrupted):
        with fork_server.watch_launcher(launcher, lambda: told.append("gone")):
            assert not told
        assert Interrupted.signals == 0
        with fork_server.watch_launcher(launcher, lambda: told.append("gone")):
            other.close()
        assert told
