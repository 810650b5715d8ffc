"""The variables that launchers set for their ranks.

They are read, and refused if they contradict each other. With them, the ranks find each other.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from paragrad.errors import Refused
from paragrad.runtime.launcher_env import (
    LAUNCH_ID_VARIABLES,
    LAUNCHER_VARIABLES,
    MPICH,
    OPEN_MPI,
    SRUN,
    TORCHRUN,
    LaunchInfo,
    choose_rank_threads,
    count_cores,
    detect_launch,
    find_rendezvous_address,
    find_rendezvous_file,
    parse_first_host,
)

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("wanted", "threads"), [("3", 3), ("4,2", 4), ("", None), ("many", None), ("0", None)]
)
def test_omp_num_threads_is_respected(
    wanted: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, ranks used all cores of a host, whatever OMP_NUM_THREADS said.

    Other programs used the same host.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert choose_rank_threads(1) == (threads or count_cores())


Variables = Callable[[int, int], dict[str, str]]

OURS = {
    *LAUNCH_ID_VARIABLES,
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_NODEID",
    "SLURM_STEP_NODELIST",
    *(name for names in LAUNCHER_VARIABLES.values() for name in names),
}
# the environment without launcher variables: the test itself is no rank
SHELL = {name: value for name, value in os.environ.items() if name not in OURS}


def torchrun(rank: int, size: int) -> dict[str, str]:
    return {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{size}",
        "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": f"{size}",
    }


def open_mpi(rank: int, size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": f"{size}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{size}",
        "PMIX_NAMESPACE": "prterun-host-7@1",
    }


def mpich(rank: int, size: int) -> dict[str, str]:
    return {
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{size}",
        "MPI_LOCALRANKID": f"{rank}",
        "MPI_LOCALNRANKS": f"{size}",
    }


def srun(rank: int, size: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": f"{rank}",
        "SLURM_STEP_NUM_TASKS": f"{size}",
        "SLURM_LOCALID": f"{rank}",
        "SLURM_STEP_TASKS_PER_NODE": f"{size}",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "here",
        "SLURM_NTASKS": f"{size}",
        "SLURM_JOB_ID": "41",
        "SLURM_STEP_ID": "0",
    }


# a Slurm step with one task on each of two hosts
TWO_HOSTS = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
# A script of sbatch: the variables of the allocation say rank 0 of 4, but it is one process.
SBATCH = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_JOB_ID": "41",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "here",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (torchrun(1, 3), LaunchInfo(1, 3, 1, 3, TORCHRUN)),
        (
            {**torchrun(5, 8), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            LaunchInfo(5, 8, 1, 4, TORCHRUN),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, LaunchInfo(1, 2, 1, 2, TORCHRUN)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            LaunchInfo(1, 2, 1, 2, TORCHRUN),
        ),
        (torchrun(0, 1), LaunchInfo(0, 1, 0, 1, TORCHRUN)),
        (open_mpi(1, 3), LaunchInfo(1, 3, 1, 3, OPEN_MPI)),
        (
            {
                **open_mpi(2, 4),
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            LaunchInfo(2, 4, 0, 2, OPEN_MPI),
        ),
        (mpich(1, 3), LaunchInfo(1, 3, 1, 3, MPICH)),
        (srun(1, 3), LaunchInfo(1, 3, 1, 3, SRUN)),
        (
            {
                **srun(6, 7),
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "3",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
            },
            LaunchInfo(6, 7, 0, 1, SRUN),
        ),
        (
            {
                **srun(4, 7),
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
            },
            LaunchInfo(4, 7, 0, 2, SRUN),
        ),
        # torchrun under mpirun
        ({**mpich(1, 3), **torchrun(0, 2)}, LaunchInfo(0, 2, 0, 2, TORCHRUN)),
        # torchrun under srun
        ({**srun(1, 4), **torchrun(0, 2)}, LaunchInfo(0, 2, 0, 2, TORCHRUN)),
        # mpirun in an allocation
        ({**srun(1, 4), **open_mpi(0, 2)}, LaunchInfo(0, 2, 0, 2, OPEN_MPI)),
        # mpirun of MPICH in an allocation: its proxies are a step of srun
        ({**srun(0, 1), **mpich(1, 2)}, LaunchInfo(1, 2, 1, 2, MPICH)),
        # srun --mpi=pmi2
        ({**srun(1, 2), "PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchInfo(1, 2, 1, 2, SRUN)),
    ],
)
def test_launcher_variables_give_rank_and_size(
    environment: dict[str, str], expected: LaunchInfo
) -> None:
    assert detect_launch(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": ""},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"},
        SBATCH,
        # the shell of salloc
        {name: SBATCH[name] for name in ("SLURM_NTASKS", "SLURM_JOB_ID")},
        # the shell of srun --pty
        srun(0, 1),
        {**srun(0, 1), "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_environment_without_a_launcher(environment: dict[str, str]) -> None:
    assert detect_launch(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "1"},
            "here WORLD_SIZE, LOCAL_WORLD_SIZE must be set too; start all ranks with torchrun, or "
            "unset RANK",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"},
            "here LOCAL_RANK, LOCAL_WORLD_SIZE must be set too",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1"},
            "here OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE "
            "must",
        ),
        (
            {"PMI_RANK": "1"},
            "here PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS must be set too; start all ranks "
            "with mpirun",
        ),
        ({"MPI_LOCALRANKID": "1"}, "here PMI_RANK, PMI_SIZE, MPI_LOCALNRANKS must be set too"),
        (
            {"SLURM_STEP_NUM_TASKS": "2"},
            "here SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE must be set too",
        ),
        (
            torchrun(2, 2),
            "RANK says 2 and WORLD_SIZE 2; ranks count from 0 to one below their number",
        ),
        (open_mpi(3, 2), "OMPI_COMM_WORLD_RANK says 3 and OMPI_COMM_WORLD_SIZE 2"),
        (mpich(2, 2), "PMI_RANK says 2 and PMI_SIZE 2"),
        (srun(2, 2), "SLURM_PROCID says 2 and SLURM_STEP_NUM_TASKS 2"),
        (
            {**torchrun(1, 2), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK says 1 and LOCAL_WORLD_SIZE 1",
        ),
        (
            {**mpich(1, 2), "MPI_LOCALNRANKS": "3"},
            "MPI_LOCALNRANKS says 3 ranks on this host and PMI_SIZE 2 in all",
        ),
        ({**torchrun(0, 2), "RANK": "one"}, "RANK must be a whole number from 0, got 'one'"),
        ({**torchrun(0, 2), "RANK": "-1"}, "RANK must be a whole number from 0, got '-1'"),
        (
            {**open_mpi(0, 2), "OMPI_COMM_WORLD_SIZE": "2.0"},
            "OMPI_COMM_WORLD_SIZE must be a whole number from 0, got '2.0'",
        ),
        ({**mpich(0, 2), "PMI_SIZE": "two"}, "PMI_SIZE must be a whole number from 0, got 'two'"),
        (
            {**srun(0, 2), "SLURM_STEP_TASKS_PER_NODE": "2(y3)"},
            "SLURM_STEP_TASKS_PER_NODE must be a whole number",
        ),
        (
            {**srun(0, 2), "SLURM_NODEID": "1"},
            "SLURM_NODEID says 1 and SLURM_STEP_TASKS_PER_NODE has 1 node(s)",
        ),
        (torchrun(0, 0), "RANK says 0 and WORLD_SIZE 0"),
    ],
)
def test_contradicting_variables_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        detect_launch(environment)


def find_address(environment: dict[str, str]) -> tuple[str, int] | None:
    told = detect_launch(environment)
    assert told
    return find_rendezvous_address(told, environment)


@pytest.mark.parametrize("variables", [open_mpi, mpich, srun])
def test_ranks_of_one_host_need_no_address(variables: Variables) -> None:
    assert find_address(variables(0, 2)) is None
    assert find_address({**variables(0, 2), "MASTER_ADDR": "here", "MASTER_PORT": "29500"}) == (
        "here",
        29500,
    )
    with pytest.raises(Refused, match="MASTER_PORT must be set in the environment"):
        find_address({**variables(0, 2), "MASTER_ADDR": "here"})


def test_slurm_step_over_hosts_meets_at_the_first_host() -> None:
    step = {**srun(0, 2), **TWO_HOSTS, "SLURM_STEP_NODELIST": "rack[07-08,11]"}
    assert find_address(step) == ("rack07", 20_000 + 16 * 41)
    assert find_address({**step, "SLURM_STEP_ID": "1"}) == ("rack07", 20_000 + 16 * 41 + 1)
    assert find_address({**step, "SLURM_JOB_ID": "123456789"}) == (
        "rack07",
        20_000 + 16 * 123456789 % 10_000,
    )
    with pytest.raises(Refused, match="export MASTER_ADDR"):
        find_address({**step, "SLURM_STEP_NODELIST": ""})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("here", "here"),
        ("a,b", "a"),
        ("node[3-5]", "node3"),
        ("node[03,07-09]", "node03"),
        ("rack[02-04,7]-ib,login", "rack02-ib"),
        ("rack[1-2]node[08-12],x[1-2]", "rack1node08"),
        ("node-1.example.org,node-2.example.org", "node-1.example.org"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert parse_first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**torchrun(0, 2)}, "MASTER_ADDR, MASTER_PORT must be set in the environment"),
        (
            {**torchrun(0, 2), "MASTER_ADDR": "localhost", "MASTER_PORT": "many"},
            "MASTER_PORT must be a whole number",
        ),
        (
            {**torchrun(0, 2), "MASTER_ADDR": "localhost", "MASTER_PORT": "65536"},
            "MASTER_PORT must be from 1 to 65535, got 65536",
        ),
        (
            {**open_mpi(0, 4), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun -x MASTER_ADDR=... -x MASTER_PORT=...",
        ),
        (
            {**mpich(0, 4), "MPI_LOCALNRANKS": "2"},
            "mpirun -genv MASTER_ADDR ... -genv MASTER_PORT ...",
        ),
    ],
)
def test_missing_address_is_refused_with_the_repair(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        find_address(environment)


def test_rendezvous_file_is_private_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    zero, one = (
        find_rendezvous_file(LaunchInfo(rank, 2, rank, 2, OPEN_MPI), 0, open_mpi(rank, 2))
        for rank in (0, 1)
    )
    folder = zero.parent
    assert zero == one
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert find_rendezvous_file(LaunchInfo(0, 2, 0, 2, OPEN_MPI), 1, open_mpi(0, 2)) != zero
    assert find_rendezvous_file(
        LaunchInfo(0, 2, 0, 2, SRUN), 0, {**srun(0, 2), "SLURM_STEP_ID": "9"}
    ) != find_rendezvous_file(LaunchInfo(0, 2, 0, 2, SRUN), 0, srun(0, 2))
    folder.chmod(0o750)
    with pytest.raises(Refused, match="must be a folder that you alone can open; remove it"):
        find_rendezvous_file(LaunchInfo(0, 2, 0, 2, OPEN_MPI), 0, {})
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="must be a folder that you alone can open"):
        find_rendezvous_file(LaunchInfo(0, 2, 0, 2, OPEN_MPI), 0, {})


# --- real processes ---

SCRIPT = textwrap.dedent("""
    import json, os, signal, sys
    from pathlib import Path
    import torch
    from paragrad.runtime.rendezvous import join_launched_world, get_launched_rank
    from paragrad.runtime.rendezvous import get_launched_size, count_local_ranks

    answers, folder, meetings = [], Path(sys.argv[1]), int(sys.argv[2])
    for meeting in range(meetings):
        with join_launched_world(timeout=30.0) as world:
            world.check_collectives()
            mine = torch.arange(3.0) + 10 ** world.rank + 1000 * meeting
            answers.append([world.rank, world.size, world.all_reduce(mine).tolist(),
                    world.duplicate().broadcast_object(world.rank)])
            if "die" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
    said = [get_launched_rank(), get_launched_size(), count_local_ranks()]
    (folder / f"rank-{get_launched_rank()}.json").write_text(json.dumps([answers, said]))
""")


class Place:
    """A folder with the script, a folder for rendezvous files, and a folder for the answers."""

    def __init__(self, path: Path) -> None:
        self.script = path / "script.py"
        self.temporary = path / "temporary"
        self.answers = path / "answers"
        self.script.write_text(SCRIPT)
        self.temporary.mkdir()
        self.answers.mkdir()
        self.shell = {**SHELL, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}

    def build_command(self, meetings: int = 1, *more: str) -> list[str]:
        return [sys.executable, str(self.script), str(self.answers), str(meetings), *more]

    def check(self, size: int, meetings: int = 1, here: int | None = None) -> None:
        """Assert that every rank has the right numbers, and that no rendezvous file is left."""
        found = [
            json.loads((self.answers / f"rank-{rank}.json").read_text()) for rank in range(size)
        ]
        sums = [
            [
                sum(number + 10**rank + 1000 * meeting for rank in range(size))
                for number in (0.0, 1.0, 2.0)
            ]
            for meeting in range(meetings)
        ]
        assert found == [
            [
                [[rank, size, sums[meeting], 0] for meeting in range(meetings)],
                [rank, size, here or size],
            ]
            for rank in range(size)
        ]
        assert self.list_left_files() == []

    def list_left_files(self) -> list[Path]:
        return list(self.temporary.glob("paragrad-*/*"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def wait_for_end(*processes: subprocess.Popen[str]) -> None:
    """Wait for processes that need each other.

    All must end without an error; otherwise all are killed.
    """
    try:
        for process in processes:
            _, complaints = process.communicate(timeout=60)
            assert process.returncode == 0, complaints
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def start_process(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def find_free_port() -> str:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(open_mpi, marks=pytest.mark.story),
        *(pytest.param(each, marks=pytest.mark.table) for each in (mpich, srun)),
    ],
)
def test_two_ranks_of_one_host_meet_in_a_file(place: Place, variables: Variables) -> None:
    """Two ranks of one host find each other in a file, three times in a row.

    If a script calls `train` a second time, the ranks must not use the file of the first call.
    """
    wait_for_end(
        *(
            start_process(place.build_command(3), {**place.shell, **variables(rank, 2)})
            for rank in (0, 1)
        )
    )
    place.check(2, meetings=3)


@pytest.mark.story
def test_run_folder_not_shared_by_all_ranks_is_refused(place: Place, tmp_path: Path) -> None:
    """The hosts do not share a disk, so rank 1 does not see the folder of the run.

    Earlier, rank 1 said "No such file or directory", and the others that a connection was
    closed.
    """
    processes = []
    for rank in (0, 1):
        (host := tmp_path / f"host-{rank}").mkdir()
        processes.append(
            start_process(
                [
                    "env",
                    "-C",
                    str(host),
                    sys.executable,
                    "-m",
                    "paragrad",
                    "train",
                    "digits",
                    "--strategy",
                    "data(2)",
                    "--backend",
                    "gloo",
                ],
                {**place.shell, **mpich(rank, 2)},
            )
        )
    for process in processes:
        with process:
            _, complaints = process.communicate(timeout=60)
        assert process.returncode == 2
        assert complaints.endswith(
            "which rank 0 has made for the records of all, is not seen by rank(s) 1; give --runs "
            "a folder that all hosts share\n"
        )
    assert list((tmp_path / "host-0" / "runs").iterdir()) == []


@pytest.mark.story
def test_launched_ranks_write_a_trace_of_a_failed_run(place: Place, tmp_path: Path) -> None:
    (job := tmp_path / "breaks.py").write_text(BREAKS)
    (trace := tmp_path / "trace.json")
    processes = [
        start_process(
            [
                sys.executable,
                "-m",
                "paragrad",
                "train",
                str(job),
                "--strategy",
                "data(2)",
                "--trace",
                str(trace),
                "--runs",
                str(tmp_path / "runs"),
            ],
            {**place.shell, **mpich(rank, 2)},
        )
        for rank in (0, 1)
    ]
    for process in processes:
        with process:
            _, complaints = process.communicate(timeout=60)
        assert process.returncode == 1, complaints
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"].get("step") for event in events if event["ph"] == "X"} >= {0, 1}
    assert list(tmp_path.glob("trace.json.*")) == []


BREAKS = """
import paragrad as pg, torch
from torch import nn
from torch.utils.data import TensorDataset

class Breaks(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.calls > 4:
            raise RuntimeError("enough")
        return super().forward(x)

numbers = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(48, 6, generator=numbers), torch.randint(3, (48,),
        generator=numbers))
JOB = pg.Job(model=lambda: Breaks(6, 3), loss=nn.functional.cross_entropy, train=data, batch=4,
        epochs=1, name="breaks",
             optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


@pytest.mark.table
def test_repeated_rendezvous_leaves_no_files(place: Place) -> None:
    """No rendezvous leaves its file behind.

    The clean-up of torch's file store reads two counters, one after the other: finished ranks,
    and ranks that still use it. Earlier, if ranks left at the same moment, each took another one
    for the last. So one rendezvous in sixty left its file.
    """
    wait_for_end(
        *(
            start_process(place.build_command(60), {**place.shell, **mpich(rank, 3)})
            for rank in (0, 1, 2)
        )
    )
    place.check(3, meetings=60)


@pytest.mark.table
@pytest.mark.parametrize("variables", [torchrun, open_mpi, mpich, srun])
def test_two_ranks_meet_at_the_given_address(place: Place, variables: Variables) -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_port()}
    wait_for_end(
        *(
            start_process(place.build_command(3), {**place.shell, **variables(rank, 2), **given})
            for rank in (0, 1)
        )
    )
    place.check(2, meetings=3)


@pytest.mark.table
def test_slurm_step_over_two_hosts_meets_at_the_first(place: Place) -> None:
    # choose a job number whose port is free on this machine
    for job in range(1, 600):
        step = {
            **TWO_HOSTS,
            "SLURM_STEP_NODELIST": "localhost,elsewhere",
            "SLURM_JOB_ID": str(job),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        try:
            socket.create_server(find_address({**srun(0, 2), **step})).close()
        except OSError:
            continue
        break
    wait_for_end(
        *(
            start_process(
                place.build_command(),
                {**place.shell, **srun(rank, 2), **step, "SLURM_NODEID": str(rank)},
            )
            for rank in (0, 1)
        )
    )
    place.check(2, here=1)


def build_shell_command(place: Place, *more: str) -> list[str]:
    """Return the command of a shell that launches two ranks, each in its own shell.

    For the ranks, the outer shell is the launcher.
    """
    wrapped = shlex.quote(shlex.join(place.build_command(1, *more)) + "; exit $?")
    variables = [
        shlex.join(f"{name}={value}" for name, value in mpich(rank, 2).items()) for rank in (0, 1)
    ]
    return ["sh", "-c", " ".join(f"env {each} sh -c {wrapped} &" for each in variables) + " wait"]


@pytest.mark.table
def test_ranks_in_shells_meet_and_stale_files_are_removed(place: Place) -> None:
    """A killed rank cannot remove its rendezvous file.

    The next launch does not use this file, and removes it.
    """
    wait_for_end(start_process(build_shell_command(place, "die"), place.shell))
    (left,) = place.list_left_files()
    assert stat.S_IMODE(left.parent.stat().st_mode) == 0o700
    wait_for_end(start_process(build_shell_command(place), place.shell))
    place.check(2)


@pytest.mark.table
def test_missing_rank_is_named_after_the_time_limit(place: Place) -> None:
    place.script.write_text(
        textwrap.dedent("""
        from paragrad.errors import RankFailed
        from paragrad.runtime.rendezvous import join_launched_world
        try:
            with join_launched_world(timeout=1.0):
                pass
        except RankFailed as error:
            print(error)
    """)
    )
    port = find_free_port()
    at_an_address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    elsewhere = {
        **at_an_address,
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    cases: list[tuple[dict[str, str], str]] = [
        ({}, str(place.temporary)),
        (at_an_address, f"127.0.0.1:{port}"),
        (elsewhere, "GLOO_SOCKET_IFNAME on each host to the interface that the others reach it by"),
    ]
    processes = [
        start_process(place.build_command(), {**place.shell, **mpich(1, 2), **given})
        for given, _ in cases
    ]
    for process, (_, told) in zip(processes, cases, strict=True):
        with process:
            answer, complaints = process.communicate(timeout=60)
        assert answer.startswith("rank 1: the 2 ranks of mpirun (MPICH) did not meet at "), (
            complaints
        )
        assert told in answer
        assert "(limit 1 s): " in answer
        assert "; make sure that all of them run, or set MASTER_ADDR" in answer
    assert place.list_left_files() == []


def test_user_process_group_is_used_and_kept(place: Place, tmp_path: Path) -> None:
    place.script.write_text(
        textwrap.dedent("""
        import sys
        import torch, torch.distributed as dist
        from paragrad.runtime.rendezvous import join_launched_world, get_launched_rank
        from paragrad.runtime.rendezvous import get_launched_size, count_local_ranks
        rank = int(sys.argv[-1])
        assert (get_launched_rank(), get_launched_size(), count_local_ranks()) == (0, None, None)
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[-2]}", rank=rank,
                world_size=2)
        assert (get_launched_rank(), get_launched_size(), count_local_ranks()) == (rank, 2, 2)
        for _ in range(2):
            with join_launched_world(timeout=30.0) as world:
                assert (world.rank, world.size, world.backend, world.group) == (rank, 2, "gloo",
                        dist.group.WORLD)
                assert world.all_reduce(torch.tensor([1.0 + rank])).item() == 3
        assert dist.is_initialized()
        answer = torch.tensor([1.0 + rank])
        dist.all_reduce(answer)
        assert answer.item() == 3
        dist.destroy_process_group()
    """)
    )
    wait_for_end(
        *(
            start_process(
                place.build_command(1, str(tmp_path / "store"), str(rank)),
                {**place.shell, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in (0, 1)
        )
    )
    assert place.list_left_files() == []


@pytest.mark.table
def test_torchrun_itself(place: Place) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    wait_for_end(start_process([*torchrun, *place.build_command(3)[1:]], place.shell))
    place.check(2, meetings=3)


def find_open_mpi_mpirun() -> list[str] | None:
    found = shutil.which("mpirun")
    if (
        not found
        or "Open MPI"
        not in subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    ):
        return None
    return [found, "--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]


@pytest.mark.story
def test_mpirun_of_open_mpi_itself(place: Place) -> None:
    mpirun = find_open_mpi_mpirun()
    if not mpirun:
        pytest.skip("no mpirun of Open MPI on this machine (Debian: openmpi-bin)")
    wait_for_end(start_process([*mpirun, "-n", "3", *place.build_command(2)], place.shell))
    place.check(3, meetings=2)


def test_mpirun_of_mpich_itself(place: Place) -> None:
    mpirun = shutil.which("mpiexec.hydra")
    if not mpirun:
        pytest.skip("no mpiexec.hydra on this machine (Debian: hydra, of mpich)")
    wait_for_end(start_process([mpirun, "-n", "3", *place.build_command(2)], place.shell))
    place.check(3, meetings=2)
