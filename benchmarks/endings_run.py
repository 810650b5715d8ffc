"""One ending of endings.py: run a command, end it, and list everything that is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kill_ending import HERE, LIMIT, TORCHS_OWN, TrainingFailed, Workspace, make_workspace

sys.path.append(str(HERE.parent / "tests" / "helpers"))
from refused_rows import JOB_FILES, split_command

SOURCE = HERE.parent / "src" / "paragrad"
END = 10.0  # seconds within which a signal or a death must have ended every process
SETTLE = 5.0  # seconds within which the processes of a command that has ended must be gone
COMMAND = (sys.executable, "-m", "paragrad")
# printed lines that are notices for the user, not the message of an ending
NOTICES = re.compile(
    r"paragrad: (.* starts \d+ ranks on \d+ core|there is no data folder .* \(--data|"
    r"the run ends after this step, and saves it|the comparison ends)"
)
NOISE = re.compile(
    r"Exception ignored|resource_tracker|^\[[WE]\d{4} |Fatal Python error|Segmentation|"
    r"^\[rank\d+\]:|terminate called",
    re.MULTILINE,
)
# words by which a message can say that another process was killed
DEATH = r"(killed|died|dead|ended|gone|lost|exited|closed|SIGKILL)"


@dataclass(frozen=True)
class Plan:
    """A random ending.

    Attributes:
        number: Its number; with the seed it gives the same plan again.

        kind: refusal, fault, kill, signal or servers.

        what: The command of a refusal; the part that fails; the process to kill; or the signal.

        strategy: The strategy, or an empty text.

        expected: A text that must be printed, or an empty text.

        step: The step after which the ending happens; 0 for the start of the command.

        delay: The seconds from this step, or from the start, to the signal.

        signals: The signals, sent one after another.

        gap: The seconds between two signals.

        target: The rank to kill; modulo the number of ranks.

        stand: Where a rank stands still, or an empty text.

        loaders: The processes that load samples, for each rank.

        by_hand: Whether the processes are started by hand, not by torchrun.
    """

    number: int
    kind: str
    what: str
    strategy: str = ""
    expected: str = ""
    step: int = 0
    delay: float = 0.0
    signals: tuple[str, ...] = ()
    gap: float = 0.0
    target: int = 0
    stand: str = ""
    loaders: int = 0
    by_hand: bool = False

    @property
    def fault(self) -> str:
        """The part of the job that fails, or an empty text."""
        return self.what if self.kind == "fault" else ""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that give the plan to the job."""
        plan = {"step": self.step, "fault": self.fault, "stand": self.stand}
        return {"ENDING": json.dumps(plan), "OMP_NUM_THREADS": "1"}

    def list_words(self, runs: Path) -> list[str]:
        """Return the words after `paragrad` that train the job."""
        return [
            *("train", str(HERE / "endings_job.py"), "--strategy", self.strategy),
            *("--runs", str(runs), "--save", "20", "--loaders", str(self.loaders)),
        ]


@dataclass
class Ending:
    """How a plan ended.

    Attributes:
        plan: The plan.

        code: The exit code; minus the number of the signal that killed the command.

        seconds: From the signal to the end of the last process; 0.0 without a signal.

        wrong: A sentence for each thing that is wrong.

        printed: The end of what was printed, if something is wrong.
    """

    plan: Plan
    code: int | None = None
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    printed: str = ""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{'; '.join(self.wrong) or 'good'} (code {self.code}, {self.seconds:.1f} s)"


def run_plan(plan: Plan) -> Ending:
    """Run a plan and judge its ending."""
    ending = Ending(plan)
    shared = set(os.listdir("/dev/shm"))
    with make_workspace("auto") as here:
        runs = here.folder / "runs"
        runs.mkdir()
        try:
            if plan.kind == "servers":
                run_servers(plan, here, runs, ending)
            else:
                run_command(plan, here, runs, ending)
        except (TrainingFailed, subprocess.TimeoutExpired) as error:
            ending.wrong.append(f"{type(error).__name__}: {error}"[:300])
        if left := here.wait_until_gone(SETTLE):
            ending.wrong.append(f"processes left: {[describe_process(pid) for pid in left]}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            here.wait_until_gone(SETTLE)
        partial = [path.name for path in runs.rglob("*.partial")] if plan.what != "launcher" else []
        temporary = [
            path.name
            for path in (here.folder / "temporary").iterdir()
            if not path.name.startswith(TORCHS_OWN)
        ]
        for what, names in (
            ("half-written in the runs folder", partial),
            ("left in TMPDIR", temporary),
            ("left in /dev/shm", list_unused(set(os.listdir("/dev/shm")) - shared)),
        ):
            if names:
                ending.wrong.append(f"{what}: {sorted(names)}")
        if ending.wrong:
            outputs = sorted(here.folder.glob("printed*"))
            ending.printed = "\n".join(here.read_output(path.name)[-3000:] for path in outputs)
    return ending


def list_unused(names: set[str]) -> list[str]:
    """Return the entries of /dev/shm that no process has open. Open ones belong to other runs."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            used += maps.read_text(errors="replace")
    return [name for name in names if f"/dev/shm/{name}" not in used]


def describe_process(pid: int) -> str:
    """Return the command line of a process."""
    with contextlib.suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[-80:]!r}"
    return f"{pid}, which has ended since"


# ---- one command -----------------------------------------------------------------------------
def run_command(plan: Plan, here: Workspace, runs: Path, ending: Ending) -> None:
    """Run one command, send the signals of the plan, and judge what it prints."""
    environment, words, folder = plan.environment, plan.list_words(runs), here.folder
    if plan.kind == "refusal":
        environment, words = split_command(plan.what, runs)
        folder = JOB_FILES
    sent = finished = False
    with here.start([*COMMAND, *words], environment, cwd=folder) as running:
        if plan.signals:
            sent, began = send_signals(plan, here, running)
            if plan.kind == "signal" and (left := here.wait_until_gone(END)):
                ending.wrong.append(f"{len(left)} process(es) still run {END:g} s after the signal")
                ending.seconds = time.monotonic() - began
        ending.code = running.wait(LIMIT)
        left = here.wait_until_gone(SETTLE)
        if plan.signals and not ending.wrong:
            ending.seconds = time.monotonic() - began
            if ending.seconds > END and plan.what != "rank":  # some runs continue without a rank
                ending.wrong.append(f"the run ended only after {ending.seconds:.1f} s")
        if left:
            ending.wrong.append(f"{len(left)} process(es) still run {SETTLE:g} s after the end")
    printed = here.read_output()
    finished = "\nrecord: " in printed
    judge_code(plan, ending, sent, finished)
    judge_output(plan, ending, printed, sent)
    if plan.kind == "refusal" and list(runs.iterdir()):
        ending.wrong.append("the refused command left the folder of a run")


def send_signals(
    plan: Plan, here: Workspace, running: subprocess.Popen[bytes]
) -> tuple[bool, float]:
    """Wait for the moment of the plan and send its signals.

    Returns:
        Whether the first signal reached a process, and when it was sent.
    """
    if plan.step:
        wait_for(here, "standing" if plan.stand else "armed", running)
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(plan.delay)
    target = find_rank(plan, running) if plan.what == "rank" else running.pid
    began = time.monotonic()
    sent = running.poll() is None and target is not None
    for number, name in enumerate(plan.signals):
        if number:
            time.sleep(plan.gap)
        if target is not None and (target != running.pid or running.poll() is None):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.Signals[name])
    return sent, began


def wait_for(here: Workspace, name: str, running: subprocess.Popen[bytes]) -> None:
    """Wait for a file of the job, or for the end of the command."""
    until = time.monotonic() + LIMIT
    while not (here.folder / name).exists() and running.poll() is None:
        if time.monotonic() > until:
            raise TrainingFailed(f"the job did not write the file {name}")
        time.sleep(0.01)


def find_rank(plan: Plan, running: subprocess.Popen[bytes]) -> int | None:
    """Wait for ranks and return the process of one; None if the command ended before."""
    until = time.monotonic() + LIMIT
    while running.poll() is None and time.monotonic() < until:
        children = read_children()
        below = [
            pid for server in children.get(running.pid, []) for pid in children.get(server, [])
        ]
        if ranks := sorted(filter(is_group_leader, below)):
            return ranks[plan.target % len(ranks)]
        time.sleep(0.01)
    return None


def is_group_leader(pid: int) -> bool:
    """Return whether a process leads a process group. Ranks do; processes in which the fork server
    tries something do not.
    """
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


def read_children() -> dict[int, list[int]]:
    """Return the children of every process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    return children


# ---- judgement -------------------------------------------------------------------------------
def list_codes(plan: Plan, sent: bool, finished: bool) -> tuple[int, ...]:
    """Return the right exit codes according to docs/reference/launching.md and exit_codes.py."""
    if plan.kind == "refusal":
        return (2,)
    if plan.kind == "fault":
        return (1,)
    if not sent:  # the run ended before the signal
        return (0,)
    if plan.signals == ("SIGKILL",):
        if plan.what == "launcher":
            return (-signal.SIGKILL,)
        # dead workers and servers are replaced
        return (0,) if plan.strategy.startswith("server") else (1,)
    stopped = (130,) if plan.what == "SIGINT" else (0, 130)  # 130: before the first step
    return (*stopped, *((1,) if plan.stand else ()), *((0,) if finished else ()))


def judge_code(plan: Plan, ending: Ending, sent: bool, finished: bool) -> None:
    """Compare the exit code with those that are right."""
    right = list_codes(plan, sent, finished)
    if ending.code not in right:
        ending.wrong.append(
            f"exit code {ending.code}, not {' or '.join(map(str, sorted(set(right))))}"
        )


def judge_output(plan: Plan, ending: Ending, printed: str, sent: bool) -> None:
    """Check that the output ends with one message, that it has the expected text, and that there is
    nothing else.
    """
    lines = printed.splitlines()
    messages = [
        number
        for number, line in enumerate(lines)
        if line.startswith("paragrad: ") and not NOTICES.match(line)
    ]
    wanted = 0 if ending.code in (0, -signal.SIGKILL) else 1
    if len(messages) != wanted:
        said = [lines[number][:150] for number in messages]
        ending.wrong.append(f"{len(messages)} messages instead of {wanted}: {said}")
    elif messages and messages[0] != len(lines) - 1 and plan.kind != "refusal":
        after = lines[messages[0] + 1 :]
        ending.wrong.append(f"{len(after)} line(s) after the message: {after[:2]}")
    expected = plan.expected
    if plan.what == "rank" and ending.code == 1:
        expected = "was killed by SIGKILL"
    if expected and expected not in printed:
        ending.wrong.append(f"not printed: {expected}")
    if ending.code == 0 and "\nrecord: " not in printed:
        ending.wrong.append("exit code 0 without the report of the run")
    if f'File "{SOURCE}{os.sep}' in printed:
        ending.wrong.append("a traceback with frames of src/paragrad")
    if printed.count("Traceback (most recent call last)") > (plan.kind == "fault"):
        ending.wrong.append("a traceback")
    if noise := NOISE.search(printed):
        ending.wrong.append(f"unexpected output: {noise[0]!r}")


# ---- ranks that were started by torchrun, or by hand -----------------------------------------
def run_servers(plan: Plan, here: Workspace, runs: Path, ending: Ending) -> None:
    """Kill a worker or a server. All other processes must end soon, and name the one that died."""
    workers, servers = int(plan.strategy[7]), 2 if "servers=2" in plan.strategy else 1
    size = workers + servers
    victim = plan.target % size
    role = f"worker {victim}" if victim < workers else f"server {victim - workers}"
    with contextlib.ExitStack() as stack:
        if plan.by_hand:
            ranks = [
                stack.enter_context(
                    here.start(
                        [*COMMAND, *plan.list_words(runs)],
                        {**plan.environment, **environment},
                        f"printed{rank}",
                        here.folder,
                    )
                )
                for rank, environment in enumerate(list_environments(size))
            ]
            first = ranks[0]
        else:
            torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
            words = [sys.executable, *torchrun, str(size), *COMMAND[1:], *plan.list_words(runs)]
            first = stack.enter_context(here.start(words, plan.environment, cwd=here.folder))
        wait_for(here, "armed", first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(plan.delay)
        pid = ranks[victim].pid if plan.by_hand else find_launched(victim, first.pid)
        if pid is None or first.poll() is not None:
            raise TrainingFailed(f"the run ended before the kill: {first.poll()}")
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        if left := here.wait_until_gone(END):
            names = ", ".join(map(describe_process, left))
            ending.wrong.append(
                f"{len(left)} process(es) still run {END:g} s after the kill: {names}"
            )
        ending.seconds = time.monotonic() - began
        ending.code = first.poll()
    named = re.compile(rf"(\brank {victim}\b|\b{role}\b).*{DEATH}|{DEATH}.*\brank {victim}\b")
    outputs = [f"printed{rank}" for rank in range(size) if rank != victim]
    for output in outputs if plan.by_hand else ["printed"]:
        text = here.read_output(output)
        said = [line for line in text.splitlines() if line.startswith("paragrad: ")]
        said = [line for line in said if not NOTICES.match(line)]
        if not any(map(named.search, said)):
            ending.wrong.append(
                f"{output} does not name {role} (rank {victim}): {[s[:150] for s in said]}"
            )
        if f'File "{SOURCE}{os.sep}' in text:
            ending.wrong.append(f"{output}: a traceback with frames of src/paragrad")


def list_environments(size: int) -> list[dict[str, str]]:
    """Return the environment variables of ranks that are started by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def find_launched(rank: int, agent: int) -> int | None:
    """Return the process of a rank that torchrun started."""
    for pid in read_children().get(agent, []):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None
