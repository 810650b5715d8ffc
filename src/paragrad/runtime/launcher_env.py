"""The launcher's environment variables: rank, size, rendezvous, and what the host offers.

Only this module reads the variables that torchrun, mpirun (Open MPI, MPICH) and srun set. It
creates no process group.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from paragrad.errors import Refused

TORCHRUN = "torchrun"
OPEN_MPI = "mpirun (Open MPI)"
MPICH = "mpirun (MPICH)"
SRUN = "srun"

# launcher -> its variables for rank, size, rank on this host, ranks on this host
LAUNCHER_VARIABLES = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    OPEN_MPI: (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    MPICH: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SRUN: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}

# These variables separate launches under the same launching process: a step of srun, or a job of
# a PMIx server.
LAUNCH_ID_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """The place of this process in a launch, as the launcher numbered its ranks.

    Attributes:
        rank: The number of this rank.

        size: The number of ranks.

        local_rank: The number of this rank among those of this host.

        local_size: The number of ranks on this host.

        launcher: The launcher, a key of `LAUNCHER_VARIABLES`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str

    def __post_init__(self) -> None:
        rank, size, local_rank, local_size = LAUNCHER_VARIABLES[self.launcher]
        for index, name, count, name_of_count in (
            (self.rank, rank, self.size, size),
            (self.local_rank, local_rank, self.local_size, local_size),
        ):
            if not 0 <= index < count:
                raise Refused(
                    f"{name} says {index} and {name_of_count} {count}; ranks count from 0 to one "
                    f"below their number, so start all of them again with {self.launcher}"
                )
        if self.local_size > self.size:
            raise Refused(
                f"{local_size} says {self.local_size} ranks on this host and {size} {self.size} in "
                f"all; start all of them again with {self.launcher}"
            )

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks of the launch are on this host."""
        return self.local_size == self.size


def count_cores() -> int:
    """Count the cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_rank_threads(ranks: int) -> int:
    """Choose the number of torch's threads of each rank on this host.

    Args:
        ranks: The number of ranks on this host.

    Returns:
        OMP_NUM_THREADS, if it is set to a number; otherwise an equal part of the cores.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else max(1, count_cores() // ranks)


def read_load_average() -> float | None:
    """Read the load average of this host over the last minute.

    Returns:
        The mean number of threads that wanted a core at the same time, of all users; None where the
        system does not report it.
    """
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # a system without one
        return None


def read_available_memory() -> int | None:
    """Read how much more memory this process may use.

    Returns:
        Bytes, by the system and by the limits of the control group; None where nothing is known.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(
            1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        )
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            group = Path("/sys/fs/cgroup")
            stats = dict(
                line.split()
                for line in (group / usage_file).with_name("memory.stat").read_text().splitlines()
            )
            # the file cache, which the system can free
            cached = sum(int(stats.get(name, 0)) for name in ("active_file", "inactive_file"))
            limits.append(
                int((group / limit_file).read_text())
                - int((group / usage_file).read_text())
                + cached
            )
    return min(limits, default=None)


def detect_launch(environment: Mapping[str, str] = os.environ) -> LaunchInfo | None:
    """Read the launch of this process from the environment.

    Launchers can start one another, so the innermost counts: torchrun, then mpirun, then srun. srun
    is recognized by the variables of a step. Plain python in an sbatch script is rank 0 of
    SLURM_NTASKS by the allocation's variables, but it runs alone. A step of one task is a shell on
    a node, and no launch either.

    Args:
        environment: The environment variables.

    Returns:
        The launch; None where no launcher started this process.

    Raises:
        Refused: The variables contradict each other.
    """
    if environment.get("RANK"):
        return _parse_launch_info(TORCHRUN, environment, _assume_local_variables(environment))
    if environment.get("OMPI_COMM_WORLD_RANK"):
        return _parse_launch_info(OPEN_MPI, environment)
    in_step = bool(environment.get("SLURM_STEP_NUM_TASKS"))
    # srun --mpi=pmi2 also sets PMI_RANK
    if environment.get("MPI_LOCALRANKID") or (environment.get("PMI_RANK") and not in_step):
        return _parse_launch_info(MPICH, environment)
    if in_step:
        launch_info = _parse_launch_info(
            SRUN, environment, {"SLURM_STEP_TASKS_PER_NODE": _read_local_task_count(environment)}
        )
        return launch_info if launch_info.size > 1 else None
    return None


def find_rendezvous_address(
    launch_info: LaunchInfo, environment: Mapping[str, str] = os.environ
) -> tuple[str, int] | None:
    """Find the address at which rank 0 listens.

    Args:
        launch_info: The launch.
        environment: The environment variables.

    Returns:
        Host and port; None where all ranks are on this host and can meet in a file.

    Raises:
        Refused: The ranks have no address to meet at, or a bad one.
    """
    host = environment.get("MASTER_ADDR", "")
    port = environment.get("MASTER_PORT", "")
    if host and port:
        if not 0 < _parse_whole_number("MASTER_PORT", port) < 2**16:
            raise Refused(
                f"MASTER_PORT must be from 1 to 65535, got {port}; give a free port of the host of "
                "rank 0"
            )
        return host, int(port)
    if host or port or launch_info.launcher == TORCHRUN:
        missing = ", ".join(
            name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value
        )
        raise Refused(
            f"under {launch_info.launcher} {missing} must be set in the environment: the host of "
            "rank 0 and a free port there"
            + ("; torchrun sets both" if launch_info.launcher == TORCHRUN else "")
        )
    if launch_info.is_on_one_host:
        return None
    if launch_info.launcher == SRUN:
        nodes = environment.get("SLURM_STEP_NODELIST", "")
        if not nodes:
            raise Refused(
                "srun has not set SLURM_STEP_NODELIST; export MASTER_ADDR (the host of rank 0) "
                "and MASTER_PORT"
            )
        job, step = (
            _parse_whole_number(name, environment.get(name, "0"))
            for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
        )
        # below the ports that a system assigns by itself
        return parse_first_host(nodes), 20_000 + (16 * job + step) % 10_000
    option = "-x {0}=..." if launch_info.launcher == OPEN_MPI else "-genv {0} ..."
    raise Refused(
        f"{launch_info.size} ranks of {launch_info.launcher} are on several hosts and do not know "
        "where to meet; name the host of rank 0 and a free port there: mpirun "
        f"{option.format('MASTER_ADDR')} {option.format('MASTER_PORT')}"
    )


def read_launch_name(environment: Mapping[str, str] = os.environ) -> str:
    """Read the name that separates this launch from others in the same store (torchrun's run id).

    Args:
        environment: The environment variables.
    """
    return environment.get("TORCHELASTIC_RUN_ID", "")


def parse_first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `rack[02-04,7]-ib,login` -> `rack02-ib`.

    Args:
        nodes: The node list.
    """
    # split at the first comma outside brackets
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first)


def find_rendezvous_file(
    launch_info: LaunchInfo, number: int, environment: Mapping[str, str] = os.environ
) -> Path:
    """Return the path of the file in which the ranks of this launch meet.

    All ranks of a launch get the same path, and no other launch ever gets it. Launchers reuse their
    names for launches, and MPICH gives none. The path therefore contains the process id of the
    launching process and the time when it started. A file that a crashed launch left behind is
    never used again, only removed.

    Args:
        launch_info: The launch.
        number: The number of the rendezvous in this launch.
        environment: The environment variables.

    Raises:
        Refused: The folder is not private, or the launching process cannot be seen from here.
    """
    folder = Path(tempfile.gettempdir()) / f"paragrad-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise Refused(
            f"{folder} must be a folder that you alone can open; remove it, or set TMPDIR to a "
            "folder of your own"
        )
    namespace = _read_pid_namespace()
    pid = _find_launcher_pid(LAUNCHER_VARIABLES[launch_info.launcher][0])
    if pid == 0:
        raise Refused(
            f"the process of {launch_info.launcher} cannot be seen from here (are the ranks in "
            "containers?), so its ranks cannot agree on a file to meet in; set "
            "MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port for all of them"
        )
    if launch_info.rank == 0:
        _remove_stale_files(folder, namespace)
    names = "-".join(environment.get(name, "") for name in LAUNCH_ID_VARIABLES)
    return folder / re.sub(
        r"[^\w-]", "_", f"{namespace}-{pid}-{_read_start_time(pid)}-{names}-{number}"
    )


def _parse_launch_info(
    launcher: str, environment: Mapping[str, str], substitutes: Mapping[str, str] | None = None
) -> LaunchInfo:
    """Read the variables of one launcher; `substitutes` replace some of them."""
    values = {
        name: (substitutes or {}).get(name) or environment.get(name, "")
        for name in LAUNCHER_VARIABLES[launcher]
    }
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise Refused(
            f"{launcher} sets {', '.join(values)} together, and here {', '.join(missing)} must be "
            f"set too; start all ranks with {launcher}, or unset "
            f"{', '.join(name for name in values if name not in missing)}"
        )
    rank, size, local_rank, local_size = (
        _parse_whole_number(name, value) for name, value in values.items()
    )
    return LaunchInfo(rank, size, local_rank, local_size, launcher)


def _parse_whole_number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise Refused(
            f"{name} must be a whole number from 0, got {value!r}; set it as the launcher does, or "
            "unset it"
        )
    return int(value)


def _assume_local_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Guess the local variables for a RANK that was set by hand.

    If the ranks meet on this host, all of them are here. Otherwise the variables must be set.
    """
    if environment.get("MASTER_ADDR", "localhost") not in ("localhost", "127.0.0.1", "::1"):
        return {}
    return {
        local_name: environment.get(local_name) or environment.get(global_name, "")
        for local_name, global_name in (("LOCAL_RANK", "RANK"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    }


def _read_local_task_count(environment: Mapping[str, str]) -> str:
    """Return this node's entry of srun's tasks per node: `2(x3),1` is 2, 2, 2 and 1."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = _parse_whole_number("SLURM_NODEID", environment.get("SLURM_NODEID", "0"))
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        # missing or not a number: the caller refuses it by its name
        return text
    tasks: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [count] * int(times or 1)
    if node >= len(tasks):
        raise Refused(
            f"SLURM_NODEID says {node} and SLURM_STEP_TASKS_PER_NODE has {len(tasks)} node(s); "
            "start again with srun"
        )
    return tasks[node]


def _find_launcher_pid(variable: str) -> int:
    """Find the process that launched this rank: its nearest ancestor outside the launch.

    Shells can wrap a rank, so its parent is not always the launcher. Processes inside the launch
    have the rank's variable in their environment. The result is 0 where the ancestor is out of
    sight.
    """
    pid = os.getppid()
    try:
        while pid and any(
            entry.startswith(f"{variable}=".encode())
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ):
            pid = int(_read_process_stat(pid)[1])
    # no /proc here, or a process of another user (slurmstepd belongs to root)
    except OSError:
        pass
    return pid


def _read_start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty without process or /proc."""
    try:
        return _read_process_stat(pid)[19]
    except OSError:
        return ""


def _read_process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: [1] is the parent, [19] the start."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _read_pid_namespace() -> int:
    """Return the pid namespace: containers can share a temporary folder, but not process ids."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _remove_stale_files(folder: Path, namespace: int) -> None:
    """Remove the files of launches, once the process that launched them has ended."""
    for file in folder.glob(f"{namespace}-*"):
        _, pid, started, *_ = file.name.split("-")
        if _read_start_time(int(pid)) != started:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def hide_rank_variables() -> Iterator[None]:
    """Let code that reads the rank variables find none, as on one worker.

    A stream that divides itself by them would give each rank other samples. Only Python code is
    affected: a change of the environment of the process could disturb other threads.
    """
    variables: Any = os.environ
    hidden = {}
    for name in chain.from_iterable(LAUNCHER_VARIABLES.values()):
        key = variables.encodekey(name)
        if key in variables._data:
            hidden[key] = variables._data.pop(key)
    try:
        yield
    finally:
        variables._data.update(hidden)
