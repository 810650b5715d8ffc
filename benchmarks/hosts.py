"""A simulated cluster on one machine: separate hosts that share only a network, whose links have a
given rate.

    with hosts(4, megabits=200) as cluster:
        # on every host: torchrun --nnodes 4 --nproc-per-node 2 own.py
        print(cluster.run(["own.py"], ranks=2))

A host is a set of Linux namespaces: its own network, processes, name, /etc/hosts and /dev/shm. All
hosts use the files of the machine. Each host has a part of the cores of the machine. If there are
more hosts than cores, hosts share a core.

The interface eth0 of a host is one end of a veth pair. The other end is a port of a bridge. Both
ends limit the rate to `megabits` (token buckets, `tc ... tbf`). One limits what the host sends, the
other limits what it receives. This needs root and iproute2.

No namespace has a name, and the bridge has a namespace of its own. So the cluster cannot conflict
with routes, interfaces, ports or other clusters of the machine. One process keeps each namespace
alive while its standard input is open. The standard input closes at the end, also if this program
is killed. Then the system kills the processes in the namespace and removes everything else.

If this file runs as a command, it checks whether the links reach their rate. The figures are the
payload over the limit:

| figure                                                                                        | bar                        |
|-----------------------------------------------------------------------------------------------|----------------------------|
| one host to one; one to two; two to one; two to one another, each way; gloo's all_reduce      | at least 0.9, at most 1.01 |
| packets dropped; packets out of order                                                         | at most 0                  |
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from common import Bench

from paragrad.errors import Refused

INTERFACE = "eth0"  # every host's link to the others
# the port of the rendezvous on the first host; a host has its own ports, so every port is free
PORT = 29500
MOST = 250  # hosts in the network 10.0.0.0/24
# seconds; a step of building or removing the cluster usually takes some hundredths of a second
LIMIT = 30.0
PROGRAMS = {
    "ip": "iproute2",
    "nstat": "iproute2",
    "tc": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "taskset": "util-linux",
    "unshare": "util-linux",
}

# bytes of the largest piece that TCP gives to a link; the default is 65536
SEGMENT = "16384"
# size of the token bucket: two pieces; a smaller bucket overflows while the system is late
BURST = "32kb"
# what may wait at a link before it drops packets: more than the windows of all connections
QUEUE = "64mb"
SETTINGS = {  # of the TCP of each host
    # otherwise a connection sends slowly again after its rank has computed for a while
    "ipv4/tcp_slow_start_after_idle": "0",
    # a connection must not depend on the connections before it
    "ipv4/tcp_no_metrics_save": "1",
    # independent of the default of this machine: every kernel has reno and lets us choose it
    "ipv4/tcp_congestion_control": "reno",
    # All windows have the same size. By default, a window grows with its history. Then, of two
    # ranks that exchange, the one with the smaller window sends more slowly, because its
    # acknowledgements wait behind the data of the other. With seven windows of this size, data
    # waits for less than 200 ms. After 200 ms, TCP assumes that a message is lost, and sends
    # slowly again. Small messages need more memory than their bytes, so a buffer may grow beyond
    # its window. Otherwise a rank that computes and does not read would lose messages
    "ipv4/tcp_moderate_rcvbuf": "0",
    "ipv4/tcp_rmem": "4096 262144 6291456",
    "ipv4/tcp_wmem": "4096 262144 262144",
    "ipv6/conf/all/disable_ipv6": "1",
}
DEVICES = "mount -t sysfs sysfs /sys\n"  # the devices of the host's own network
# the kernel's counter of packets that arrived before a packet that was sent earlier
OVERTAKEN = "TcpExtTCPOFOQueue"
# the kernel's counter of packets that a host dropped because its buffer was full
NO_ROOM = "TcpExtTCPRcvQDrop"


class HostFailed(RuntimeError):
    """Programs on hosts failed or did not end.

    hosts: the names of the hosts whose programs failed, in the order of the failures.
    """

    def __init__(self, message: str, hosts: Sequence[str]) -> None:
        super().__init__(message)
        self.hosts = list(hosts)


@dataclass(frozen=True)
class Host:
    """One host: its name, address and cores, and the pid of the process that keeps its namespaces
    alive.
    """

    name: str
    address: str
    cores: tuple[int, ...]
    holder: int

    def build_command(self, words: Sequence[str], folder: str | Path = ".") -> list[str]:
        """Return the command that runs `words` on this host, in a folder of the machine.

        The command enters the folder inside the host's namespaces. A folder that was opened outside
        belongs to another mount. Then a file cannot be renamed from a relative path in the folder
        to an absolute path.
        """
        kinds = {"net": "net", "uts": "uts", "mount": "mnt", "pid": "pid_for_children"}
        return [
            "nsenter",
            *(f"--{kind}=/proc/{self.holder}/ns/{file}" for kind, file in kinds.items()),
            "taskset",
            "--cpu-list",
            ",".join(map(str, self.cores)),
            "env",
            f"--chdir={Path(folder).resolve()}",
            *map(str, words),
        ]


@dataclass
class Program:
    """A program that was started on a host.

    Its output goes to unnamed files, because a pipe could become full and stop the program.
    """

    host: Host
    process: subprocess.Popen[bytes]
    output: IO[bytes] = field(repr=False)
    complaints: IO[bytes] = field(repr=False)

    def read_output(self) -> tuple[str, str]:
        """Return standard output and standard error so far."""
        texts = []
        for file in (self.output, self.complaints):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return texts[0], texts[1]


class Cluster:
    """Hosts that a switch connects. `hosts` makes it, and at the end stops all programs that were
    started on it.
    """

    def __init__(self, members: Sequence[Host], switch: int, programs: list[Program]) -> None:
        self.hosts = list(members)
        self._switch = switch
        self._programs = programs

    def start(
        self,
        host: int,
        words: Sequence[str],
        *,
        folder: str | Path = ".",
        environment: Mapping[str, str | None] | None = None,
    ) -> Program:
        """Start a command on one host and do not wait for it.

        environment: changes to this program's environment; None removes a variable.
        """
        ours = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": "/dev/shm",
            **(environment or {}),
        }
        # closed by _reap
        output = tempfile.TemporaryFile()  # noqa: SIM115
        complaints = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            self.hosts[host].build_command(words, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=complaints,
            env={name: value for name, value in ours.items() if value is not None},
            start_new_session=True,
        )
        self._programs.append(Program(self.hosts[host], process, output, complaints))
        return self._programs[-1]

    def torchrun(
        self,
        words: Sequence[str],
        ranks: int = 1,
        *,
        folder: str | Path = ".",
        environment: Mapping[str, str | None] | None = None,
    ) -> list[Program]:
        """Start `torchrun --nnodes N --nproc-per-node RANKS ... WORDS` on every host."""
        return [
            self.start(
                number,
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    str(len(self.hosts)),
                    "--node-rank",
                    str(number),
                    "--nproc-per-node",
                    str(ranks),
                    "--master-addr",
                    self.hosts[0].name,
                    "--master-port",
                    str(PORT),
                    *words,
                ],
                folder=folder,
                environment=environment,
            )
            for number in range(len(self.hosts))
        ]

    def wait_for(self, programs: Sequence[Program], timeout: float = 60.0) -> list[str]:
        """Wait for programs, and return the output of each.

        Raises HostFailed if a program fails, or is not done after `timeout` seconds.
        """
        ended = _wait_for_programs(programs, time.monotonic() + timeout)
        failed = [program for program in ended if program.process.returncode]
        late = [program for program in programs if program not in ended]
        if failed or late:
            told = [
                f"{program.host.name} ended with {program.process.returncode}:\n"
                f"{program.read_output()[1]}"
                for program in failed
            ]
            told += [
                f"{program.host.name} was not done after {timeout:g} s:\n{program.read_output()[1]}"
                for program in late
            ]
            raise HostFailed("\n".join(told), [program.host.name for program in failed])
        return [program.read_output()[0] for program in programs]

    def run(
        self,
        words: Sequence[str],
        ranks: int = 1,
        *,
        folder: str | Path = ".",
        environment: Mapping[str, str | None] | None = None,
        timeout: float = 60.0,
    ) -> list[str]:
        """Run `torchrun` on every host, wait for the end, and return the output of each host.

        Raises HostFailed.
        """
        return self.wait_for(
            self.torchrun(words, ranks, folder=folder, environment=environment), timeout
        )

    def faults(self) -> dict[str, int]:
        """Return the faults of the network so far: how many packets a limited link or a host
        dropped, and how many arrived out of order. A good cable has none.
        """
        ends = [
            host.build_command(["tc", "-s", "qdisc", "show", "dev", INTERFACE])
            for host in self.hosts
        ]
        ends.append(["nsenter", f"--net=/proc/{self._switch}/ns/net", "tc", "-s", "qdisc", "show"])
        dropped = sum(
            int(count)
            for words in ends
            for count in re.findall(r"dropped (\d+)", _run_command(words))
        )
        counters = [
            host.build_command(["nstat", "--json", "-asz", OVERTAKEN, NO_ROOM])
            for host in self.hosts
        ]
        counted = [json.loads(_run_command(words))["kernel"] for words in counters]
        return {
            "packets dropped": dropped + sum(each[NO_ROOM] for each in counted),
            "packets out of order": sum(each[OVERTAKEN] for each in counted),
        }


@contextmanager
def hosts(count: int, megabits: float | None = None) -> Iterator[Cluster]:
    """Make `count` hosts: host0 (10.0.0.1) and so on. Their links carry `megabits` per second in
    each direction (None: no limit).

    At the end, also after an error, no process, interface, namespace or file remains.
    Raises Refused if the machine cannot have such hosts; the message says what is missing.
    """
    check(count, megabits)
    programs: list[Program] = []
    with ExitStack() as stack:
        # this runs last: by then the system has killed all processes of the hosts
        stack.callback(_reap, programs)
        switch = stack.enter_context(_hold_namespaces(["--net", "--mount"], DEVICES))
        on_switch = ["nsenter", f"--net=/proc/{switch}/ns/net", f"--mount=/proc/{switch}/ns/mnt"]
        _run_or_refuse(
            "a bridge",
            "CONFIG_BRIDGE",
            [*on_switch, "ip", "link", "add", "switch", "type", "bridge"],
        )
        _run_command([*on_switch, "ip", "link", "set", "switch", "up"])
        addresses = {f"host{number}": f"10.0.0.{number + 1}" for number in range(count)}
        members = []
        cores = sorted(os.sched_getaffinity(0))
        for number, (name, address) in enumerate(addresses.items()):
            kinds = ["--net", "--uts", "--mount", "--pid", "--mount-proc"]
            # if there are more hosts than cores, each has one core and shares it
            mine = tuple(cores[number % len(cores) :: count])
            members.append(
                Host(
                    name,
                    address,
                    mine,
                    stack.enter_context(
                        _hold_namespaces(kinds, _build_setup_script(name, addresses))
                    ),
                )
            )
            _connect_host(members[-1], on_switch, f"port{number}", megabits)
        yield Cluster(members, switch, programs)


def check(count: int = 1, megabits: float | None = None) -> None:
    """Check whether this machine can have such hosts. Raises Refused, with the repair, if not.

    Missing features of the kernel are found only while the hosts are made.
    """
    if not 1 <= count <= MOST:
        raise Refused(f"hosts({count}): give from 1 to {MOST} hosts")
    if megabits is not None and not megabits >= 1:
        raise Refused(
            f"hosts(megabits={megabits:g}): give at least 1, or None for links without a limit"
        )
    if os.geteuid() != 0:
        raise Refused(
            "a cluster on one machine needs root, who alone may make its namespaces; run it as "
            "root (sudo)"
        )
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        packages = " ".join(sorted({PROGRAMS[program] for program in missing}))
        raise Refused(
            f"a cluster on one machine needs the command(s) {', '.join(missing)}; on Debian: "
            f"apt-get install {packages} (make system installs iproute2)"
        )


def _build_setup_script(name: str, addresses: Mapping[str, str]) -> str:
    """Return the shell script that sets up a host: its name, the names of the other hosts, shared
    memory, loopback and TCP.
    """
    names = "".join(f"{address} {other}\n" for other, address in addresses.items())
    settings = "".join(
        f"if [ -e /proc/sys/net/{key} ]; then echo {value} > /proc/sys/net/{key}; fi\n"
        for key, value in SETTINGS.items()
    )
    return (
        f"echo {name} > /proc/sys/kernel/hostname\n{DEVICES}mount -t tmpfs tmpfs /dev/shm\ncat > "
        f"/dev/shm/hosts <<END\n127.0.0.1 localhost\n{names}END\nmount --bind /dev/shm/hosts "
        f"/etc/hosts\nrm /dev/shm/hosts\n{settings}ip link set lo up\n"
    )


def _connect_host(host: Host, on_switch: list[str], port: str, megabits: float | None) -> None:
    """Connect a host to the switch by a cable that is limited at both ends and keeps the order of
    packets.

    By default, the kernel puts each packet into a queue of the core that sent it. If two cores send
    packets of one device, packets of one core can overtake those of the other. TCP assumes that
    packets were lost, and sends half as fast for a while. An exchange of 4 MB at 100 Mbit/s then
    took up to 1.07 s instead of 0.62. Therefore one core receives all packets of one end.
    """
    _run_or_refuse(
        "a veth pair",
        "CONFIG_VETH",
        [
            *on_switch,
            "ip",
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            str(host.holder),
        ],
    )
    _run_command([*on_switch, "ip", "link", "set", port, "master", "switch", "up"])
    _run_command(
        host.build_command(["ip", "address", "add", f"{host.address}/24", "dev", INTERFACE])
    )
    _run_command(
        host.build_command(["ip", "link", "set", INTERFACE, "gso_max_size", SEGMENT, "up"])
    )
    for words, device in ((on_switch, port), (host.build_command([]), INTERFACE)):
        core = f"{1 << host.cores[0] % 32:x}" + ",00000000" * (host.cores[0] // 32)
        file = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
        # the file does not exist if there is only one core
        _run_command([*words, "sh", "-ec", f"if [ -e {file} ]; then echo {core} > {file}; fi"])
    if megabits is not None:
        for words in (
            [*on_switch, "tc", "qdisc", "add", "dev", port],
            host.build_command(["tc", "qdisc", "add", "dev", INTERFACE]),
        ):
            _run_or_refuse(
                "a token bucket (tbf)",
                "CONFIG_NET_SCH_TBF",
                [
                    *words,
                    "root",
                    "tbf",
                    "rate",
                    f"{round(megabits * 1000)}kbit",
                    "burst",
                    BURST,
                    "limit",
                    QUEUE,
                ],
            )


@contextmanager
def _hold_namespaces(kinds: Sequence[str], script: str) -> Iterator[int]:
    """Make new namespaces, and set them up by a shell script.

    Yields the pid of the process that keeps them alive until its standard input is closed.
    """
    process = subprocess.Popen(
        ["unshare", *kinds, "--fork", "--kill-child", "sh", "-ec", f"{script}echo ready\nexec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            if not waiting.select(LIMIT) or process.stdout.readline() != b"ready\n":
                process.stdin.close()
                process.kill()
                raise _explain_failure(
                    "namespaces",
                    "CONFIG_NET_NS, CONFIG_UTS_NS and CONFIG_PID_NS",
                    process.stderr.read().decode(),
                )
        yield process.pid
    finally:
        process.stdin.close()
        try:
            # this process is the first one of its host: it ends after all others have ended
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT)
        process.stdout.close()
        process.stderr.close()


def _reap(programs: Sequence[Program]) -> None:
    for program in programs:
        program.process.wait(LIMIT)
        program.output.close()
        program.complaints.close()


def _wait_for_programs(programs: Sequence[Program], deadline: float) -> list[Program]:
    """Return the programs that ended before the deadline, in the order in which they ended."""
    ended: list[Program] = []
    with ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        for program in programs:
            if program.process.poll() is not None:
                ended.append(program)
                continue
            descriptor = os.pidfd_open(program.process.pid)
            stack.callback(os.close, descriptor)
            waiting.register(descriptor, selectors.EVENT_READ, program)
        while waiting.get_map():
            for key, _ in (found := waiting.select(max(0.0, deadline - time.monotonic()))):
                waiting.unregister(key.fd)
                key.data.process.wait()
                ended.append(key.data)
            if not found:
                break
    return ended


def _run_command(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _run_or_refuse(what: str, option: str, words: Sequence[str]) -> None:
    """Run a command that makes something that some kernels do not have."""
    try:
        _run_command(words)
    except RuntimeError as error:
        raise _explain_failure(what, option, str(error)) from None


def _explain_failure(what: str, option: str, told: str) -> Exception:
    """Return the exception to raise if the kernel did not make it: Refused if the kernel cannot or
    may not, otherwise a RuntimeError.
    """
    if re.search(
        "not permitted|not supported|denied|unknown|invalid argument", told, re.IGNORECASE
    ):
        return Refused(
            f"this machine makes no {what.removeprefix('a ')}: {told.strip()}; use a kernel with "
            f"{option}; a container also needs the permission to make it (docker run "
            "--privileged)"
        )
    return RuntimeError(f"{what}: {told.strip()}")


# --- do the links reach their rate? ---

PATTERNS = {
    "one to one": [(0, 1)],
    "one to two": [(0, 1), (0, 2)],
    "two to one": [(1, 0), (2, 0)],
    "two to one another": [(0, 1), (1, 0)],
}


def measure(size: int, rounds: int) -> None:
    """Measure the seconds of an all_reduce, and of each pattern of messages of `size` bytes.

    This runs on every host, and rank 0 prints the results.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = torch.zeros(size // 4)
    taken = [torch.zeros(size // 4) for _ in range(2)]

    def send_messages(pairs: Sequence[tuple[int, int]]) -> None:
        sources = [source for source, goal in pairs if goal == rank]
        works = [dist.irecv(tensor, source) for tensor, source in zip(taken, sources, strict=False)]
        works += [dist.isend(mine, goal) for source, goal in pairs if source == rank]
        for work in works:
            work.wait()

    def time_exchange(exchange: Callable[[], object]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        exchange()
        dist.barrier()
        return time.perf_counter() - begun

    exchanges = {name: partial(send_messages, pairs) for name, pairs in PATTERNS.items()}
    exchanges["all_reduce"] = lambda: dist.all_reduce(mine)
    for exchange in exchanges.values():
        # not timed: this makes connections and opens their windows
        exchange()
    found = {
        name: [time_exchange(exchange) for _ in range(rounds)]
        for name, exchange in exchanges.items()
    }
    found["barrier"] = [time_exchange(lambda: None) for _ in range(20)]
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if "--worker" in sys.argv:
        measure(*map(int, sys.argv[-2:]))
        return

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--hosts",
            type=int,
            default=8,
            metavar="N",
            help="number of hosts, at least 3 (default: 8)",
        )
        parser.add_argument(
            "--megabits",
            type=float,
            default=100.0,
            metavar="RATE",
            help="megabits per second of each link (default: 100)",
        )
        parser.add_argument(
            "--megabytes",
            type=int,
            default=16,
            metavar="SIZE",
            help="megabytes of a message (default: 16)",
        )

    bench = Bench(__doc__, add_options)
    count = bench.options.hosts
    megabits = bench.options.megabits
    size = bench.options.megabytes * 2**20
    with hosts(count, megabits) as cluster:
        words = [__file__, "--worker", str(size), str(bench.rounds(5, 2))]
        found = json.loads(cluster.run(words, timeout=600.0)[0])
        for name, fault in cluster.faults().items():
            bench.figure(name, fault, at_most=0)
    # bytes that the busiest link carries
    carried = {name: size * (2 if name in ("one to two", "two to one") else 1) for name in PATTERNS}
    carried["all_reduce"] = 2 * size * (count - 1) // count
    for name, amount in carried.items():
        bench.figure(
            f"{name}, over the limit",
            [8e-6 * amount / seconds / megabits for seconds in found[name]],
            at_least=0.9,
            at_most=1.01,
        )
    bench.measured |= {"hosts": count, "megabits": megabits, "bytes": size, "seconds": found}
    bench.finish()


if __name__ == "__main__":
    main()
