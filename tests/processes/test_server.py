"""The server that ranks are forked from: what they have of it and what they do not, and its end and everybody's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_launching import wait_for_ends

from paragrad.__main__ import starts_ranks
from paragrad.errors import RankFailed
from paragrad.world.launching import Ranks, processes
from paragrad.world.launching.processes import ServerProcess
from paragrad.world.world import World


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This test's own servers, which it may kill; those of the other tests stay."""
    monkeypatch.setattr(processes, "_servers", {})
    yield
    processes.close()


@pytest.fixture(scope="module", params=["fork", pytest.param("spawn", marks=pytest.mark.table)])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks of each kind of server."""
    server = ServerProcess(request.param)
    with Ranks(2, server=server) as ranks:
        yield ranks
    server.close()


def parents(world: World) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def wait(world: World, report: Any) -> None:
    report(None)
    signal.pause()


def tasks(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.story
def test_ranks_are_children_of_the_server_which_has_one_thread_and_serves_all_ranks(own: None) -> None:
    with Ranks(2) as first, Ranks(1) as second:
        pids = first.run(parents) + second.run(parents)
        server = processes.server().popen.pid
        assert {parent for _, parent in pids} == {server} != {os.getpid()}
        assert tasks(server) == 1
    with Ranks(2) as third:
        assert {parent for _, parent in third.run(parents)} == {server}
        assert not {pid for pid, _ in pids} & {pid for pid, _ in third.run(parents)}


def test_a_failure_leaves_the_server_and_starts_ranks_anew(two: Ranks) -> None:
    before = two.run(parents)
    with pytest.raises(RankFailed) as caught:
        two.run(lambda world: os.kill(os.getpid(), signal.SIGKILL) if world.rank == 1 else world.barrier())
    assert str(caught.value) == "rank 1: the process of rank 1 was killed by SIGKILL"
    assert not any(Path(f"/proc/{pid}").exists() for pid, _ in before)
    after = two.run(parents)
    assert after[0][1] == before[0][1]
    assert two.server is not None
    assert [path.name for path in two.server.folder.glob("ranks-*")] == [Path(two.folder.name).name]      # type: ignore[union-attr]


@pytest.mark.story
def test_a_killed_server_is_named_once_and_its_ranks_are_gone(own: None) -> None:
    told = []

    def on_report(rank: int, value: None) -> None:
        told.append(os.pidfd_open(ranks.processes[rank].pid))
        if len(told) == 2:
            processes.server().popen.kill()

    with Ranks(2) as ranks:
        with pytest.raises(RankFailed) as caught:
            ranks.run(wait, on_report=on_report)
        assert caught.value.rank is None
        assert str(caught.value) == "the server of the ranks was killed by SIGKILL, and its ranks ended with it"
        wait_for_ends(told)
        assert len(ranks.run(parents)) == 2                 # from a new server


def test_a_server_that_is_dead_before_it_is_asked_is_named(own: None) -> None:
    server = processes.server()
    server.popen.kill()
    with pytest.raises(RankFailed, match="the server of the ranks was killed by SIGKILL"):
        server.start([server.folder / "stacks"])


def parallel(world: World) -> tuple[int, int, int]:
    before = len(os.listdir("/proc/self/task"))
    torch.nn.functional.gelu(torch.ones(2_000_000))
    return torch.get_num_threads(), before, len(os.listdir("/proc/self/task"))


def test_a_rank_computes_with_the_threads_it_was_given(two: Ranks) -> None:
    """A fork of a process that had computed with two threads waits for ever for the second."""
    for threads in (1, 2):
        with Ranks(2, server=two.server) as fresh:
            for had, before, after in fresh.run(parallel, threads=threads, deadline=60.0):
                assert (had, after - before) == (threads, threads - 1)


def surroundings(world: World) -> tuple[Any, ...]:
    os.write(1, f"hello from {world.rank}\n".encode())
    return (os.getcwd(), os.environ.get("OF_THE_LAUNCHER"), "TO_BE_GONE" in os.environ, sys.path, sys.argv, os.getpgid(0),
            os.getpid(), signal.getsignal(signal.SIGCHLD), os.read(0, 1), sys.modules["__main__"].__name__,
            channels(os.getpid()))


def channels(pid: int) -> set[str]:
    """The sockets and pipes that a process has open."""
    links = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):                        # the one that looks
            links.add(os.readlink(descriptor))
    return {link for link in links if link.startswith(("socket:", "pipe:"))}


def test_a_rank_has_the_surroundings_of_its_launcher(two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capfd: pytest.CaptureFixture[str]) -> None:
    """As they are now, not as they were when the server was started; and nothing of the server's or of another rank's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_LAUNCHER", "yes")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Ranks(2, server=two.server) as fresh:
        told = fresh.run(surroundings)
    for folder, variable, left, path, words, group, pid, handler, read, main, open_ in told:
        assert (folder, variable, left, path) == (str(tmp_path), "yes", False, sys.path)
        assert (words, group, handler, read, main) == ([""], pid, signal.SIG_DFL, b"", "__main__")
        assert not open_ & channels(two.server.popen.pid)           # type: ignore[union-attr]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert sorted(printed.err.splitlines()) == ["hello from 0", "hello from 1"]


@pytest.mark.story
def test_random_numbers_of_numpy_are_not_the_same_in_all_ranks(own: None) -> None:
    """A fork copies the state of the generator."""
    with Ranks(2) as ranks:
        one, other = ranks.run(lambda world: numpy.random.random())
    assert one != other


def with_child(world: World, report: Any) -> None:
    if world.rank == 1:
        report(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)
    signal.pause()


def test_what_a_killed_rank_had_started_ends_with_it(two: Ranks) -> None:
    """Processes that load samples hold the rank's sockets open and would look for their parent every five seconds."""
    children = []

    def on_report(rank: int, child: int) -> None:
        children.append(os.pidfd_open(child))
        os.kill(two.processes[rank].pid, signal.SIGKILL)

    with pytest.raises(RankFailed, match="the process of rank 1 was killed by SIGKILL"):
        two.run(with_child, on_report=on_report, deadline=60.0)
    assert len(children) == 1
    wait_for_ends(children)


@pytest.mark.story
def test_what_ranks_had_started_ends_with_a_killed_server(own: None) -> None:
    children = []

    def on_report(rank: int, child: int) -> None:
        children.append(os.pidfd_open(child))
        processes.server().popen.kill()

    with Ranks(2) as ranks, pytest.raises(RankFailed, match="the server of the ranks was killed by SIGKILL"):
        ranks.run(with_child, on_report=on_report, deadline=60.0)
    wait_for_ends(children)


@pytest.mark.story
def test_ranks_outlive_the_thread_that_started_them(own: None) -> None:
    found = []
    with Ranks(2) as ranks:
        thread = threading.Thread(target=lambda: found.append(ranks.run(parents)))
        thread.start()
        thread.join(60)
        assert ranks.run(parents) == found[0]


@pytest.mark.story
def test_threads_share_a_server_and_keep_their_ranks_apart(own: None) -> None:
    found: dict[int, list[tuple[int, int]]] = {}

    def serve(number: int) -> None:
        with Ranks(2) as ranks:
            found[number] = [pid for _ in range(3) for pid in ranks.run(parents)]

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {parent for pids in found.values() for _, parent in pids} == {processes.server().popen.pid}
    assert len({pid for pids in found.values() for pid, _ in pids}) == 6


def test_variables_that_libraries_read_when_loaded_have_a_server_of_their_own(
        own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = processes.server()
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert processes.server() is not server
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert processes.server() is server


def script(text: str, *words: str, **settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text), *words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, **settings})


def test_a_server_that_still_imports_ends_with_its_launcher(tmp_path: Path) -> None:
    with script("""
            import signal
            from paragrad.world.launching import processes
            print(processes.server().popen.pid, flush=True)
            signal.pause()""", TMPDIR=str(tmp_path)) as launcher:
        assert launcher.stdout is not None
        server = os.pidfd_open(int(launcher.stdout.readline()))
        launcher.kill()
    wait_for_ends([server])
    assert list(tmp_path.glob("paragrad-*")) == []


@pytest.mark.story
def test_a_child_that_the_user_forks_has_a_server_of_its_own_and_leaves_the_other(tmp_path: Path) -> None:
    with script("""
            import os, sys
            from paragrad.world.launching import Ranks, processes
            first = processes.server().popen.pid
            if child := os.fork():
                assert os.waitpid(child, 0)[1] == 0
                print(processes.server().popen.pid == first, Ranks(1).run(lambda world: world.size))
            else:
                assert processes.server().popen.pid != first
                sys.exit()""", TMPDIR=str(tmp_path)) as launcher:
        printed, complaints = launcher.communicate(timeout=60)
    assert (printed, complaints) == ("True [1]\n", "")
    assert list(tmp_path.glob("paragrad-*")) == []


def test_which_commands_start_a_server_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert starts_ranks(["train", "digits"])
    assert starts_ranks(["compare", "digits"])
    assert not starts_ranks(["train", "digits", "--dry-run"])
    assert not starts_ranks(["draw", "data(2)"])
    assert not starts_ranks([])
    monkeypatch.setenv("RANK", "0")
    assert not starts_ranks(["train", "digits"])                            # and WORLD_SIZE is missing: refused later
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not starts_ranks(["train", "digits"])
