"""Trainings that are killed: is everybody gone, is nothing left, and does one message say what died?

| figure                                                                                   | bar         |
|------------------------------------------------------------------------------------------|-------------|
| endings: 50 of a rank (before the first collective, inside one, between two; 2 and 4      | all         |
| ranks, every rank in turn), 10 of the server, 10 of the launcher, by SIGKILL              |             |
| seconds from the kill until every process is gone, the longest                           | at most 5   |
| endings that did not name what died, in one message                                      | at most 0   |
| processes left; entries of /dev/shm left; temporary folders left                         | at most 0   |

The trainings are `python -m paragrad train kill_job.py`, which halts a rank where it is to be killed. Nobody tells for a
killed launcher but its own exit by SIGKILL.
"""

from __future__ import annotations

import argparse
import itertools
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from common import Bench

LIMIT = 60.0            # seconds for a training to reach the place
GONE = 5.0              # seconds for everybody to be gone
HERE = Path(__file__).parent
PLACES = ("before", "inside", "between")


@dataclass(frozen=True)
class Kill:
    """Whom to kill and where: a rank of so many, or the server or the launcher while that rank is there."""
    who: str
    place: str
    ranks: int
    rank: int


@dataclass(frozen=True)
class Ending:
    """What became of a killed training."""
    kill: Kill
    seconds: float          # until every process was gone
    processes: int          # left after GONE
    shared: list[str]       # new entries of /dev/shm
    folders: list[str]      # temporary folders left
    message: str

    @property
    def named(self) -> bool:
        """Does the message name what died, and nothing else?"""
        if self.kill.who == "launcher":
            return self.message == f"exited with {-signal.SIGKILL}"
        if self.kill.who == "server":
            return self.message.startswith("paragrad: the server of the ranks was killed by SIGKILL")
        rank = "" if self.kill.place == "before" else f"rank {self.kill.rank}: the process of rank {self.kill.rank} "
        return self.message.startswith(f"paragrad: {rank or 'rank '}") and self.message.endswith("was killed by SIGKILL")


def kills(count: dict[str, int]) -> list[Kill]:
    """So many of each, through all places, sizes and ranks in turn."""
    layouts = [(place, ranks, rank) for ranks, rank in ((2, 1), (4, 2), (2, 0), (4, 3), (4, 0), (4, 1)) for place in PLACES]
    return [Kill(who, *layout) for who, number in count.items()
            for layout in itertools.islice(itertools.cycle(layouts), number)]


def waited(path: Path, running: subprocess.Popen[str]) -> list[int]:
    """The numbers in a file, once it is there."""
    until = time.monotonic() + LIMIT
    while not path.exists():
        if running.poll() is not None or time.monotonic() > until:
            running.kill()
            raise SystemExit(f"the training did not come to {path.name}: {running.communicate()[0]}")
        time.sleep(0.002)                               # of a process that is to be killed nothing is known but its files
    return [int(word) for word in path.read_text().split()]


def settled(pid: int) -> None:
    """Wait until no thread of a process computes: in a collective, it can only wait. (Some look around now and then.)"""
    quiet, until = 0, time.monotonic() + 2.0
    while quiet < 5 and time.monotonic() < until:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        quiet = 0 if "R" in states else quiet + 1
        time.sleep(0.01)                                # between two samples of /proc


def family(server: int) -> list[int]:
    """A server and all that came from it."""
    found, asked = [], [server]
    while asked:
        found.append(pid := asked.pop())
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            asked += map(int, path.read_text().split())
    return found


def gone(handles: list[int], seconds: float) -> int:
    """Wait until the processes of these pidfds are gone; how many are not."""
    poll, left, until = select.poll(), set(handles), time.monotonic() + seconds
    for handle in handles:
        poll.register(handle, select.POLLIN)
    while left and (events := poll.poll(1000 * max(0.0, until - time.monotonic()))):
        for handle, _ in events:
            poll.unregister(handle)
            left.remove(handle)
    return len(left)


def ended(kill: Kill, backend: str) -> Ending:
    """Train, kill, and look at what is left."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
        before = set(os.listdir("/dev/shm"))
        settings = {"KILL_PLACE": kill.place, "KILL_RANK": str(kill.rank), "KILL_FOLDER": folder, "TMPDIR": temporary}
        words = [sys.executable, "-m", "paragrad", "train", str(HERE / "kill_job.py"), "--strategy", f"data({kill.ranks})",
                 "--backend", backend, "--no-check", "--runs", folder]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env={**os.environ, **settings}) as running:
            victim, server = waited(Path(folder, "victim"), running)
            if kill.place == "inside":
                settled(victim)
            pids = [running.pid, *family(server)]
            handles = [os.pidfd_open(pid) for pid in pids]
            os.kill({"rank": victim, "server": server, "launcher": running.pid}[kill.who], signal.SIGKILL)
            begun = time.monotonic()
            left = gone(handles, GONE)
            seconds = time.monotonic() - begun
            for handle in handles:
                if left:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)
            printed = running.communicate(timeout=LIMIT)[0]
        said = [line for line in printed.splitlines() if line.startswith("paragrad: ")]
        message = said[0] if len(said) == 1 else f"{len(said)} messages" if said else f"exited with {running.returncode}"
        return Ending(kill, seconds, left, sorted(set(os.listdir("/dev/shm")) - before),
                      [path.name for path in Path(temporary).glob("paragrad-*")], message)


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--backend", default="auto", help="of the ranks")

    bench = Bench(__doc__, options)
    count = {"rank": 6, "server": 2, "launcher": 2} if bench.quick else {"rank": 50, "server": 10, "launcher": 10}
    endings = []
    for number, kill in enumerate(kills(count)):
        endings.append(ended(kill, bench.options.backend))
        print(f"{number + 1} of {sum(count.values())}: {endings[-1]}", file=sys.stderr, flush=True)
    bench.measured = {"endings": [{**asdict(ending), "named": ending.named} for ending in endings]}
    bench.figure("endings", len(endings), at_least=sum(count.values()))
    for who in count:
        bench.figure(f"seconds until all are gone, {who} killed",
                     [ending.seconds for ending in endings if ending.kill.who == who])
    bench.figure("seconds until all are gone, the longest", max(ending.seconds for ending in endings), at_most=GONE)
    bench.figure("endings that did not name what died", sum(not ending.named for ending in endings), at_most=0)
    bench.figure("processes left", sum(ending.processes for ending in endings), at_most=0)
    bench.figure("entries of /dev/shm left", sum(len(ending.shared) for ending in endings), at_most=0)
    bench.figure("temporary folders left", sum(len(ending.folders) for ending in endings), at_most=0)
    bench.finish()


if __name__ == "__main__":
    main()
