"""Launched: which rank of how many a launcher made this process, where its ranks meet, and on
which cores it may run.

The one reader of the variables that torchrun, mpirun (Open MPI, MPICH) and srun set; no process
group is made here.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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

# what else tells one launch from another under the same launching process: a step of srun, a
# job of a PMIx server
LAUNCH_ID_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """rank of size, local_rank of local_size on this host, as the launcher `by` numbered
    them.
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
                    f"below their number, "
                    f"so start all of them anew with {self.launcher}"
                )
        if self.local_size > self.size:
            raise Refused(
                f"{local_size} says {self.local_size} ranks on this host and {size} {self.size} in "
                f"all; "
                f"start all of them anew with {self.launcher}"
            )

    @property
    def is_on_one_host(self) -> bool:
        return self.local_size == self.size


def count_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_load_average() -> float | None:
    """How many threads of this host wanted a core at once, whoever's, as a mean over the last
    minute (the load average).
    """
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # a system without one
        return None


def read_available_memory() -> int | None:
    """Bytes that this process may still take, by the system and by the limits of its control
    group; None where nothing says.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(
            1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        )
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            group = Path("/sys/fs/cgroup")
            stats = dict(
                line.split()
                for line in (group / used).with_name("memory.stat").read_text().splitlines()
            )
            # what it would let go
            files = sum(int(stats.get(name, 0)) for name in ("active_file", "inactive_file"))
            found.append(int((group / most).read_text()) - int((group / used).read_text()) + files)
    return min(found, default=None)


def detect_launch(environment: Mapping[str, str] = os.environ) -> LaunchInfo | None:
    """What the launcher says of this process; None where none started it. Raises Refused where
    it contradicts itself.

    Launchers start one another, so the innermost is believed: torchrun, then mpirun, then srun.
    srun is known by the variables of a step: plain python in an sbatch script is rank 0 of
    SLURM_NTASKS by the allocation's variables, and yet alone. A step of one task is how people
    get a shell on a node, and launches nothing either.
    """
    if environment.get("RANK"):
        return _parse_launch_info(TORCHRUN, environment, _assume_local_variables(environment))
    if environment.get("OMPI_COMM_WORLD_RANK"):
        return _parse_launch_info(OPEN_MPI, environment)
    in_step = bool(environment.get("SLURM_STEP_NUM_TASKS"))
    # srun --mpi=pmi2 sets PMI_RANK
    if environment.get("MPI_LOCALRANKID") or (environment.get("PMI_RANK") and not in_step):
        return _parse_launch_info(MPICH, environment)
    if in_step:
        told = _parse_launch_info(
            SRUN, environment, {"SLURM_STEP_TASKS_PER_NODE": _read_local_task_count(environment)}
        )
        return told if told.size > 1 else None
    return None


def find_rendezvous_address(
    launch_info: LaunchInfo, environment: Mapping[str, str] = os.environ
) -> tuple[str, int] | None:
    """Host and port where rank 0 listens; None where all ranks are on this host and may meet in
    a file. Raises Refused.
    """
    host = environment.get("MASTER_ADDR", "")
    port = environment.get("MASTER_PORT", "")
    if host and port:
        if not 0 < _parse_whole_number("MASTER_PORT", port) < 2**16:
            raise Refused(
                f"MASTER_PORT must be from 1 to 65535, got {port}; give a free port of the host of "
                f"rank 0"
            )
        return host, int(port)
    if host or port or launch_info.launcher == TORCHRUN:
        missing = ", ".join(
            name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value
        )
        raise Refused(
            f"under {launch_info.launcher} {missing} must be set in the environment: the host of "
            f"rank 0 and a "
            f"free port there"
            + ("; torchrun sets both" if launch_info.launcher == TORCHRUN else "")
        )
    if launch_info.is_on_one_host:
        return None
    if launch_info.launcher == SRUN:
        nodes = environment.get("SLURM_STEP_NODELIST", "")
        if not nodes:
            raise Refused(
                "srun has not set SLURM_STEP_NODELIST; export MASTER_ADDR (the host of rank 0) and "
                "MASTER_PORT"
            )
        job, step = (
            _parse_whole_number(name, environment.get(name, "0"))
            for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
        )
        # below the ports a system hands out by itself
        return parse_first_host(nodes), 20_000 + (16 * job + step) % 10_000
    option = "-x {0}=..." if launch_info.launcher == OPEN_MPI else "-genv {0} ..."
    raise Refused(
        f"{launch_info.size} ranks of {launch_info.launcher} are on several hosts and do not know "
        f"where to meet; name "
        f"the host of rank 0 "
        f"and a free port there: mpirun {option.format('MASTER_ADDR')} "
        f"{option.format('MASTER_PORT')}"
    )


def read_launch_name(environment: Mapping[str, str] = os.environ) -> str:
    """What tells this launch from others at the same store: torchrun's name of the run."""
    return environment.get("TORCHELASTIC_RUN_ID", "")


def parse_first_host(nodes: str) -> str:
    """The first of a list of hosts as Slurm writes it: `rack[02-04,7]-ib,login` ->
    `rack02-ib`.
    """
    # at the first comma outside brackets
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first)


def find_rendezvous_file(
    launch_info: LaunchInfo, number: int, environment: Mapping[str, str] = os.environ
) -> Path:
    """The file for rendezvous `number` of this launch: one path for all its ranks, and for no
    other launch at any time.

    No launcher names a launch so that the name never comes again, and MPICH does not name it at
    all. The process that launched does, by its pid and the time it started; what a crashed
    launch left is therefore never met again, only removed.
    """
    folder = Path(tempfile.gettempdir()) / f"paragrad-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise Refused(
            f"{folder} must be a folder that you alone can open; remove it, or set TMPDIR to a "
            f"folder of your own"
        )
    namespace = _read_pid_namespace()
    pid = _find_launcher_pid(LAUNCHER_VARIABLES[launch_info.launcher][0])
    if pid == 0:
        raise Refused(
            f"the process of {launch_info.launcher} cannot be seen from here (are the ranks in "
            f"containers?), so "
            f"its ranks cannot "
            "agree on a file to meet in; set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port "
            "for all of them"
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
    """Read one launcher's variables; known: what stands in for some of them."""
    values = {
        name: (substitutes or {}).get(name) or environment.get(name, "")
        for name in LAUNCHER_VARIABLES[launcher]
    }
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise Refused(
            f"{launcher} sets {', '.join(values)} together, and here {', '.join(missing)} must be "
            f"set "
            f"too; start all ranks "
            f"with {launcher}, or unset {', '.join(name for name in values if name not in missing)}"
        )
    rank, size, local_rank, local_size = (
        _parse_whole_number(name, value) for name, value in values.items()
    )
    return LaunchInfo(rank, size, local_rank, local_size, launcher)


def _parse_whole_number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise Refused(
            f"{name} must be a whole number from 0, got {value!r}; set it as the launcher does, or "
            f"unset it"
        )
    return int(value)


def _assume_local_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Local variables for a RANK set by hand: everybody is here if they meet here; elsewhere it
    has to be said.
    """
    if environment.get("MASTER_ADDR", "localhost") not in ("localhost", "127.0.0.1", "::1"):
        return {}
    return {
        here: environment.get(here) or environment.get(all_, "")
        for here, all_ in (("LOCAL_RANK", "RANK"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    }


def _read_local_task_count(environment: Mapping[str, str]) -> str:
    """This node's entry of srun's tasks per node: `2(x3),1` is 2, 2, 2 and 1."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = _parse_whole_number("SLURM_NODEID", environment.get("SLURM_NODEID", "0"))
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        # missing, or no number: refused by name
        return text
    tasks: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [count] * int(times or 1)
    if node >= len(tasks):
        raise Refused(
            f"SLURM_NODEID says {node} and SLURM_STEP_TASKS_PER_NODE has {len(tasks)} node(s); "
            f"start anew with srun"
        )
    return tasks[node]


def _find_launcher_pid(variable: str) -> int:
    """The process that launched this rank: its nearest ancestor that is not itself inside the
    launch; 0 where out of sight.

    A rank may be wrapped in shells, so its parent will not do. Who is inside has the rank's
    variable in its environment.
    """
    pid = os.getppid()
    try:
        while pid and any(
            entry.startswith(f"{variable}=".encode())
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ):
            pid = int(_read_process_stat(pid)[1])
    # no /proc here, or another user's process: slurmstepd is root's
    except OSError:
        pass
    return pid


def _read_start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty where there is none (or no
    /proc).
    """
    try:
        return _read_process_stat(pid)[19]
    except OSError:
        return ""


def _read_process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: [1] the parent, [19] the start."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _read_pid_namespace() -> int:
    """Containers that share a temporary folder do not share the meaning of a pid."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _remove_stale_files(folder: Path, namespace: int) -> None:
    """Remove what launches left whose launching process is gone."""
    for left in folder.glob(f"{namespace}-*"):
        _, pid, started, *_ = left.name.split("-")
        if _read_start_time(int(pid)) != started:
            left.unlink(missing_ok=True)
