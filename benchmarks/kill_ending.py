"""One ending of kill.py: start a training, end it in the middle, look for remains, resume it, and
compare the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kill_result import TrainingResult, read_loop, read_run

from paragrad.trainer.checkpoint.checkpoint_files import list_checkpoint_folders, read_folder_step

# seconds within which a training must reach the place, be restarted, or be resumed and finish
LIMIT = 120.0
GONE = 5.0  # seconds within which all processes must end
BOUND = 5.0  # seconds that ranks wait for a stopped rank: --timeout
SAME = 1e-10  # allowed difference, which rounding in float64 may cause
# printed before the training, where ranks are more than cores
CROWDED_NOTE = "they take turns, so a step takes longer"
DISK = 16  # MB of the disk that becomes full
HERE = Path(__file__).parent
TORCHS_OWN = ("torchinductor_", "torchelastic_")  # temporary folders that torch itself leaves


@dataclass(frozen=True)
class Kill:
    """A training, and how it ends.

    kind: one of the kinds of kill.py.
    who: the process that gets the signal: rank, server, launcher, all; nobody if the disk becomes
    full.
    place: "before" the first collective, "inside" one, or "between" two; "disk" (between two, and
    then the disk is full); the next part of a half-written checkpoint; or "moment" (`delay` seconds
    after the beginning of the step).
    rank: the rank to kill.
    again: the number of ranks of the resumed training.
    save: steps from one checkpoint to the next.
    spare: bytes that stay free on the disk.
    """

    kind: str
    who: str
    place: str
    ranks: int
    rank: int
    again: int
    step: int
    loaders: int = 0
    save: int = 4
    delay: float = 0.0
    spare: int = 0

    @property
    def bound(self) -> float:
        """Return the seconds within which all processes must end."""
        return {"stop": BOUND + GONE, "restart": LIMIT}.get(self.kind, GONE)


@dataclass(frozen=True)
class Ending:
    """The result of an ending.

    seconds: until all processes had ended.
    message: the message that names the process that died.
    processes, shared, temporary: what was left behind.
    saved: the step of the newest whole checkpoint at the ending; 0 if there was none.
    resumed: the step from which the training continued.
    difference: of losses and parameters from an undisturbed training; None if the training was not
    resumed.
    wrong: any other error, or "".
    """

    kill: Kill
    seconds: float
    message: str
    processes: list[int]
    shared: list[str]
    temporary: list[str]
    saved: int = 0
    resumed: int | None = None
    difference: float | None = None
    audited: bool | None = None
    wrong: str = ""

    @property
    def has_right_message(self) -> bool:
        """Return whether the message names what died, and nothing else."""
        kill = self.kill
        if kill.who in ("launcher", "all"):
            return self.message == f"exited with {-signal.SIGKILL}"
        if kill.kind == "restart":
            return self.message == "exited with 0"
        if kill.who == "server":
            return self.message.startswith(
                "paragrad: the server of the ranks was killed by SIGKILL"
            )
        if kill.kind == "disk":
            return (
                self.message.startswith("paragrad: rank ")
                and "No space left on device" in self.message
            )
        if kill.kind == "stop":
            # the message may come from any rank
            who = (
                r"rank\(s\) \d did not come"
                if kill.place == "before"
                else rf"for rank {kill.rank} in"
            )
            return (
                self.message.startswith("paragrad: rank ")
                and re.search(who, self.message) is not None
            )
        rank = (
            "" if kill.place == "before" else f"rank {kill.rank}: the process of rank {kill.rank} "
        )
        return self.message.startswith(f"paragrad: {rank or 'rank '}") and self.message.endswith(
            "was killed by SIGKILL"
        )

    @property
    def lost_steps(self) -> int:
        """Return how many steps were lost, beyond the steps since the last whole checkpoint.

        At least the checkpoint before the last one that was due must be whole.
        """
        kill = self.kill
        due = 0 if kill.place == "before" else (kill.step - 1) // kill.save * kill.save - kill.save
        return max(0, max(due, self.saved) - (self.resumed or 0))

    @property
    def is_good(self) -> bool:
        """Return whether everything about this ending is right."""
        left = self.processes or self.shared or self.temporary
        return (
            self.seconds < self.kill.bound
            and self.has_right_message
            and not (self.wrong or left or self.lost_steps)
            and (self.difference or 0.0) <= SAME
            and self.audited is not False
        )


class TrainingFailed(Exception):
    """A training did not reach the place, or did not finish."""


@dataclass(frozen=True)
class Workspace:
    """The folders of one ending. Its processes are found by the folder in their environment."""

    folder: Path
    backend: str

    def build_command(self, kill: Kill, runs: str, resume: Path | None = None) -> list[str]:
        """Return the command of a training."""
        if kill.kind == "restart":
            return [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(kill.ranks),
                "--max-restarts",
                "1",
                str(HERE / "kill_loop.py"),
                str(self.folder / runs),
                str(kill.save),
                str(kill.loaders),
                self.backend,
            ]
        return [
            sys.executable,
            "-m",
            "paragrad",
            "train",
            str(HERE / "kill_job.py"),
            "--strategy",
            f"data({kill.ranks})",
            "--backend",
            self.backend,
            "--runs",
            str(self.folder / runs),
            "--save",
            str(kill.save),
            "--loaders",
            str(kill.loaders),
            *(["--timeout", f"{BOUND:g}"] if kill.kind == "stop" and not resume else []),
            *(["--resume", str(resume)] if resume else []),
        ]

    @contextlib.contextmanager
    def start_training(
        self, kill: Kill, words: list[str], halts: bool
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a training, whose output goes to the file `printed`. At the end all its processes
        are killed.
        """
        told = {"KILL": json.dumps(asdict(kill))} if halts else {}
        with self.start(words, told) as running:
            yield running

    @contextlib.contextmanager
    def start(
        self,
        words: list[str],
        environment: Mapping[str, str],
        output: str = "printed",
        cwd: Path | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a process that writes to the file `output`. At the end all processes of this folder
        are killed.
        """
        environment = {
            **os.environ,
            **environment,
            "KILL_FOLDER": str(self.folder),
            "TMPDIR": str(self.folder / "temporary"),
        }
        with (
            (self.folder / output).open("wb") as printed,
            subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env=environment,
                cwd=cwd,
            ) as running,
        ):
            try:
                yield running
            finally:
                for pid in self.list_processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def read_output(self, output: str = "printed") -> str:
        return (self.folder / output).read_text(errors="replace")

    def find_saved_step(self) -> int:
        """Return the step of the newest whole checkpoint; 0 if there is none.

        A checkpoint may be removed during the search, because a newer one exists.
        """
        runs = self.folder / "runs"
        return max(
            (
                read_folder_step(path)
                for run in (runs, *runs.glob("*-kill-*"))
                for path in list_checkpoint_folders(run)
            ),
            default=0,
        )

    def list_processes(self) -> list[int]:
        """Return the pids of all processes of this ending. They are found by their environment,
        because their parents may have ended.
        """
        mark = f"KILL_FOLDER={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # the process of another user, or one that has ended
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def wait_until_gone(self, seconds: float) -> list[int]:
        """Wait until all processes of this ending have ended, and return those that have not."""
        until = time.monotonic() + seconds
        while (left := self.list_processes()) and (rest := until - time.monotonic()) > 0:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(left[0])
                select.select([handle], [], [], rest)
                os.close(handle)
        return left

    def wait_for_file(self, what: str, running: subprocess.Popen[bytes]) -> list[int]:
        """Wait until a file exists, and return the numbers in it."""
        until = time.monotonic() + LIMIT
        while not (path := self.folder / what).exists():
            if running.poll() is not None or time.monotonic() > until:
                raise TrainingFailed(
                    f'the training did not reach "{what}": {self.read_output()[-2000:]}'
                )
            # a process that will be killed reports by files only, so this loop must poll
            time.sleep(0.002)
        return [int(word) for word in path.read_text().split()]

    def list_temporary(self, kill: Kill) -> list[str]:
        """Return the temporary folders that are left.

        Also return half-written files, if a process survived that had to remove them.
        """
        partial = self.folder.glob("runs/**/*.partial") if kill.kind in ("disk", "restart") else ()
        return [
            path.name
            for path in [*(self.folder / "temporary").iterdir(), *partial]
            if not path.name.startswith(TORCHS_OWN)
        ]


def read_thread_states(pid: int) -> list[str]:
    """Return the state of each thread of a process: R if it computes, T if it is stopped."""
    return [
        path.read_text().rpartition(")")[2].split()[0]
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]


def wait_until_idle(pid: int) -> None:
    """Wait until no thread of a process computes: then the process waits in a collective.

    Some threads wake up for short times, so several samples in a row must show no computing thread.
    """
    quiet = 0
    until = time.monotonic() + 2.0
    while quiet < 5 and time.monotonic() < until:
        quiet = 0 if "R" in read_thread_states(pid) else quiet + 1
        time.sleep(0.01)  # from one sample of /proc to the next


@contextlib.contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a separate disk at a folder. Raises CalledProcessError if this user may not mount."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", folder],
        check=True,
        capture_output=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


def can_mount() -> bool:
    """Return whether this user can mount a disk here."""
    try:
        with tempfile.TemporaryDirectory() as folder, disk(Path(folder), 1):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def end_at_place(
    kill: Kill, here: Workspace, running: subprocess.Popen[bytes]
) -> tuple[float, int]:
    """Wait until the training has reached the place, and end it.

    Returns the time of the ending, and the step of the newest whole checkpoint at that time.
    """
    victim, server = here.wait_for_file("victim", running)
    if kill.place not in ("before", "inside", "between", "moment", "disk"):
        here.wait_for_file("halted", running)
    if kill.place == "inside":
        wait_until_idle(victim)
    time.sleep(kill.delay)  # a random moment
    if kill.kind == "disk":
        until = time.monotonic() + LIMIT
        while set(read_thread_states(victim)) != {"T"}:
            if time.monotonic() > until:
                raise TrainingFailed("the rank did not stop before its disk was filled")
            # no event reports that a process has stopped, so this loop must poll
            time.sleep(0.002)
        runs = here.folder / "runs"
        (runs / "ballast").write_bytes(bytes(max(0, shutil.disk_usage(runs).free - kill.spare)))
        begun = time.monotonic()
        os.kill(victim, signal.SIGCONT)
        return begun, here.find_saved_step()
    saved = here.find_saved_step()
    pids = {
        "rank": [victim],
        "server": [server],
        "launcher": [running.pid],
        "all": here.list_processes(),
    }[kill.who]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended because another one ended
            os.kill(pid, signal.SIGSTOP if kill.kind == "stop" else signal.SIGKILL)
    return time.monotonic(), saved


def run_ending(kill: Kill, backend: str, expected: Callable[[Kill], TrainingResult]) -> Ending:
    """Train, end the training, look for remains, resume it, and compare.

    expected: returns the result of an undisturbed training.
    """
    shared = set(os.listdir("/dev/shm"))
    with make_workspace(backend) as here:
        runs = here.folder / "runs"
        runs.mkdir()
        with disk(runs, DISK) if kill.kind == "disk" else contextlib.nullcontext():
            found = Ending(kill, kill.bound, "", [], [], [])
            try:
                found = _train_and_end(kill, here)
                run = next(runs.glob("*-kill-*"), None)
                saved = here.find_saved_step()
                if kill.kind == "restart":
                    found = replace(found, **compare_results(read_loop(runs), expected(kill)))
                # if all processes were killed, the next start must remove their remains
                elif saved or kill.who == "all":
                    trained = train_to_end(
                        replace(kill, ranks=kill.again), here, "again", run if saved else None
                    )
                    found = replace(found, **compare_results(trained, expected(kill)))
            except (TrainingFailed, OSError) as error:
                found = replace(found, wrong=f"{type(error).__name__}: {error}")
        return replace(
            found,
            shared=sorted(set(os.listdir("/dev/shm")) - shared),
            temporary=sorted({*found.temporary, *here.list_temporary(kill)}),
            processes=[*found.processes, *here.wait_until_gone(GONE)],
        )


def _train_and_end(kill: Kill, here: Workspace) -> Ending:
    with here.start_training(kill, here.build_command(kill, "runs"), halts=True) as running:
        begun, saved = end_at_place(kill, here, running)
        left = here.wait_until_gone(kill.bound)
        seconds = time.monotonic() - begun
    printed = here.read_output()
    said = [
        line
        for line in printed.splitlines()
        if line.startswith("paragrad: ") and CROWDED_NOTE not in line
    ]
    message = (
        said[0]
        if len(said) == 1
        else f"{len(said)} messages: {printed}"
        if said
        else f"exited with {running.returncode}"
    )
    if kill.kind == "restart" and running.returncode == 0:
        message = "exited with 0"
    return Ending(
        kill,
        seconds,
        message,
        left,
        [],
        [] if kill.who == "all" else here.list_temporary(kill),
        saved,
    )


def train_to_end(
    kill: Kill, here: Workspace, runs: str, resume: Path | None = None
) -> TrainingResult:
    """Run a training to its end, from the checkpoint of a run or from the start."""
    (here.folder / runs).mkdir()
    with here.start_training(kill, here.build_command(kill, runs, resume), halts=False) as running:
        try:
            code = running.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise TrainingFailed(
                f"a training did not end within {LIMIT:g} s: {here.read_output()[-2000:]}"
            ) from None
    if code:
        raise TrainingFailed(f"a training exited with {code}: {here.read_output()[-2000:]}")
    return (
        read_loop(here.folder / runs)
        if kill.kind == "restart"
        else read_run(next((here.folder / runs).glob("*-kill-*")))
    )


@contextlib.contextmanager
def make_workspace(backend: str) -> Iterator[Workspace]:
    """Make the folders of one ending, and remove them at the end."""
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        (Path(folder) / "temporary").mkdir()
        yield Workspace(Path(folder), backend)


def compare_results(found: TrainingResult, expected: TrainingResult) -> dict[str, Any]:
    """Compare a resumed training with an undisturbed one, and return the fields of `Ending`."""
    return {
        "resumed": found.resumed,
        "difference": found.difference(expected),
        "audited": found.audited,
    }
