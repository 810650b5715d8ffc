"""The simulated cluster on one machine: its hosts, its refusals and its removal."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hosts import Cluster, HostFailed, check, hosts
from namespaces import living_in, spaces, spaces_of

from paragrad.errors import Refused

pytestmark = pytest.mark.network

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Clusters = Callable[..., AbstractContextManager[Cluster]]


def read_machine_state() -> tuple[object, ...]:
    """Return what a cluster could leave behind on this machine.

    These are interfaces, named namespaces, mounts and child processes of this process.
    """
    ours = [stat for stat in Path("/proc").glob("[0-9]*/stat") if read_parent(stat) == os.getpid()]
    named = Path("/run/netns")
    return (
        socket.if_nameindex(),
        sorted(named.iterdir()) if named.is_dir() else [],
        [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
        sorted(ours),
    )


def read_parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # the process has ended in the meantime
        return 0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = read_machine_state()
    yield
    assert read_machine_state() == before


CONNECTED = """
import socket

def connect(name, port):
    while True:
        try:
            return socket.create_connection((name, port), timeout=30)
        except ConnectionRefusedError:
            pass                            # not listening yet
"""
SERVE = (
    "import socket, sys; socket.create_server(('', "
    "29500)).accept()[0].sendall(sys.argv[1].encode())"
)
ASK = (
    CONNECTED
    + """
print(connect("host0", 29500).makefile().read())
"""
)


def test_two_clusters_at_once_are_isolated(clusters: Clusters) -> None:
    """Two clusters with the same names, addresses and ports do not disturb each other.

    Each has its own network, and the network of the machine does not contain them.
    """
    with clusters(3, megabits=100) as one, clusters(2) as other:
        programs = [
            one.start(0, [sys.executable, "-c", SERVE, "one"]),
            other.start(0, [sys.executable, "-c", SERVE, "other"]),
        ]
        asked = [
            one.start(2, [sys.executable, "-c", ASK]),
            other.start(1, [sys.executable, "-c", ASK]),
        ]
        assert one.wait_for([*asked, *programs]) == ["one\n", "other\n", "", ""]
        assert not spaces_of(one) & spaces_of(other)
        assert [host.address for host in one.hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_host_has_own_name_network_processes_and_shm(clusters: Clusters, tmp_path: Path) -> None:
    """Each host has its own name, interfaces, processes and /dev/shm.

    All hosts use the files of the machine.
    """
    look = (
        "hostname; pwd; ls /proc | grep -c '^[0-9]'; echo $GLOO_SOCKET_IFNAME; touch "
        "/dev/shm/mine; ls /dev/shm; tc qdisc show dev eth0; ls /sys/class/net"
    )
    with clusters(2, megabits=12.5) as cluster:
        programs = [cluster.start(number, ["sh", "-c", look], folder=tmp_path) for number in (0, 1)]
        for number, text in enumerate(cluster.wait_for(programs)):
            name, folder, processes, interface, memory, limit, *devices = text.splitlines()
            assert (name, folder, interface, memory) == (
                f"host{number}",
                str(tmp_path),
                "eth0",
                "mine",
            )
            assert int(processes) < 8
            assert "tbf" in limit
            assert "rate 12500Kbit" in limit
            assert devices == ["eth0", "lo"]
        assert not any(cluster.faults().values())
    assert not Path("/dev/shm/mine").exists()


STREAMS = (
    CONNECTED
    + """
import threading
others = [name for name in ("host0", "host1", "host2", "host3") if name != socket.gethostname()]
size = 2 << 20

def send_bytes(name):
    with connect(name, 7000) as connection:
        connection.sendall(bytes(size))

def receive_bytes(connection):
    with connection, connection.makefile("rb") as stream:
        assert len(stream.read(size)) == size

with socket.create_server(("", 7000), backlog=len(others)) as listener:
    listener.settimeout(30)
    threads = [threading.Thread(target=send_bytes, args=(name,)) for name in others]
    for thread in threads:
        thread.start()
    for _ in others:
        threads.append(threading.Thread(target=receive_bytes, args=(listener.accept()[0],)))
        threads[-1].start()
    for thread in threads:
        thread.join()
"""
)


def test_packets_arrive_in_order(clusters: Clusters) -> None:
    """No packet overtakes another one, as on a real cable.

    Earlier, both cores forwarded the packets of one device, so packets overtook each other. TCP
    took this for a loss, and the times of exchanges varied by half.
    """
    with clusters(4, megabits=200) as cluster:
        cluster.wait_for(
            [cluster.start(number, [sys.executable, "-c", STREAMS]) for number in range(4)]
        )
        assert cluster.faults() == {"packets dropped": 0, "packets out of order": 0}


BUSY = """
import socket
with socket.create_server(("", 7000)) as listener:
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        assert len(stream.read(4 << 20)) == 4 << 20
        connection.sendall(b"read")
        listener.accept()                   # and computes, until the other can send no more
        print(len(stream.read()))
"""
HASTY = (
    CONNECTED
    + """
connection = connect("host0", 7000)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
connection.sendall(bytes(4 << 20))
connection.recv(4)
connection.settimeout(1)
sent = 0
try:
    while True:
        sent += connection.send(bytes(300))
except TimeoutError:
    connection.shutdown(socket.SHUT_WR)
    connect("host0", 7000)
    print(sent)
"""
)


def test_busy_host_loses_no_packet(clusters: Clusters) -> None:
    """A host that computes, and does not read its messages, loses no packet.

    Large messages open the TCP window of a host. Earlier, the window then admitted small messages
    that needed more memory than the buffer had. So trainings on crowded cores lost packets, and
    the packets behind them were counted as out of order. The cable was blamed for it.
    """
    with clusters(2) as cluster:
        taken, sent = cluster.wait_for(
            [
                cluster.start(number, [sys.executable, "-c", text])
                for number, text in enumerate((BUSY, HASTY))
            ]
        )
        assert taken == sent
        assert cluster.faults() == {"packets dropped": 0, "packets out of order": 0}


def test_failing_program_is_reported_with_its_host(clusters: Clusters) -> None:
    with clusters(2) as cluster:
        programs = [
            cluster.start(0, ["sh", "-c", "seq 100000"]),
            cluster.start(1, ["sh", "-c", "echo no luck >&2; exit 3"]),
        ]
        with pytest.raises(HostFailed, match="host1 ended with 3:\nno luck") as caught:
            cluster.wait_for(programs)
        assert caught.value.hosts == ["host1"]
        assert programs[0].read_output()[0].endswith("\n100000\n")
        with pytest.raises(HostFailed, match=r"host0 was not done after 0\.1 s"):
            cluster.wait_for([cluster.start(0, ["sleep", "1000"])], timeout=0.1)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception(clusters: Clusters, kind: type[BaseException]) -> None:
    # the body of the `with` raises the exception
    with pytest.raises(kind), clusters(3, megabits=100) as cluster:  # noqa: PT012
        programs = [
            cluster.start(number, ["sh", "-c", "trap '' TERM; sleep 1000 & sleep 1000"])
            for number in range(3)
        ]
        found = spaces_of(cluster)
        assert len(living_in(found)) >= 6  # per host: its holder, and its first process
        raise kind
    assert living_in(found) == []
    assert all(program.process.returncode is not None for program in programs)


KILLED = """
import os, signal, sys
from hosts import hosts
# a shell's job in the background is started with it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
with hosts(2, megabits=100) as cluster:
    for number, path in enumerate(sys.argv[1:]):
        os.mkfifo(path)
        cluster.start(number, ["sh", "-c",
                f"(trap '' TERM INT HUP; sleep 1000) & echo > {path}; wait"])
        open(path).read()                               # until it runs
    print(*(host.holder for host in cluster.hosts), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name
)
def test_nothing_is_left_of_a_killed_process(
    clusters: Clusters, tmp_path: Path, how: signal.Signals
) -> None:
    """If the process of a cluster is killed, nothing of the cluster remains.

    The holder of each host ends when its pipe closes. Then the system removes the rest.
    """
    with (
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "0"), str(tmp_path / "1")],
            cwd=BENCHMARKS,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process,
        selectors.DefaultSelector() as waiting,
    ):
        assert process.stdout is not None
        found = spaces(map(int, process.stdout.readline().split()))
        living = living_in(found)
        # on each of two hosts: its holder, its first process, the shell and the shell's child
        assert len(living) >= 8
        for pid in living:
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ)
        process.send_signal(how)
        while waiting.get_map():
            ended = waiting.select(30.0)
            assert ended, living_in(found)
            for key, _ in ended:
                waiting.unregister(key.fd)
                os.close(key.fd)
        process.communicate(timeout=30)
        assert process.returncode == -how
    assert living_in(found) == []


UNPRIVILEGED = """
import os
from hosts import hosts
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    with hosts(2):
        print("it was made")
except ValueError as error:
    print(type(error).__name__, error)
"""


def test_cluster_without_root_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == (
        "Refused a cluster on one machine needs root, who alone may make its namespaces; run it "
        "as root (sudo)\n"
    ), done.stderr


@pytest.mark.parametrize(
    ("count", "megabits", "message"),
    [
        (0, None, r"hosts\(0\): give from 1 to 250 hosts"),
        (251, None, r"hosts\(251\): give from 1 to 250"),
        (2, 0.0, r"hosts\(megabits=0\): give at least 1, or None"),
    ],
)
def test_invalid_cluster_sizes_are_refused(
    count: int, megabits: float | None, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        check(count, megabits)


def test_missing_commands_are_refused_with_their_packages(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("mount", "nsenter", "taskset", "unshare"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(
            Refused,
            match=r"needs the command\(s\) ip, nstat, tc; on Debian: apt-get install iproute2 ",
        ),
        hosts(2),
    ):
        pytest.fail("it was made")


@pytest.mark.parametrize(
    ("program", "pattern", "told", "message"),
    [
        (
            "unshare",
            "--pid",
            "unshare: unshare failed: Operation not permitted",
            "makes no namespaces: .* with CONFIG_NET_NS",
        ),
        (
            "ip",
            "type bridge",
            "Error: Unknown device type.",
            "makes no bridge: .* use a kernel with CONFIG_BRIDGE",
        ),
        (
            "ip",
            "type veth",
            "RTNETLINK answers: Operation not supported",
            "makes no veth pair: .* use a kernel with CONFIG_VETH",
        ),
        (
            "tc",
            "eth0",
            "Error: Specified qdisc kind is unknown.",
            r"makes no token bucket \(tbf\): .* CONFIG_NET_SCH_TBF",
        ),
    ],
)
def test_missing_kernel_feature_is_refused_and_cleaned_up(
    clusters: Clusters,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: str,
    pattern: str,
    told: str,
    message: str,
) -> None:
    """If the kernel lacks a feature, the cluster is refused, and its finished parts are removed.

    Every kernel of the tests has these features, so a script answers in the place of a kernel
    that lacks one. For the first host, the bridge exists by then. For the token bucket, the pair
    of interfaces and the bucket of the other end exist too.
    """
    (tmp_path / program).write_text(
        f'#!/bin/sh\ncase "$*" in *"{pattern}"*) echo "{told}" >&2; exit 2;; esac\n'
        f'exec {shutil.which(program)} "$@"\n'
    )
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(Refused, match=message) as caught, hosts(2, megabits=100):
        pytest.fail("it was made")
    assert re.search(re.escape(told), str(caught.value))
