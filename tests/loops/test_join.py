"""Workers join a running training by the command `paragrad join`.

The tests cover joining, admission, leaving, and the end of a training. Each training waits in the
loop of its work queue until the expected workers have joined. So no test depends on timing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_messages import Desk, count_server_samples, make_frames

import paragrad as pg
from paragrad.errors import Refused
from paragrad.jobs.find_job import find_job
from paragrad.loops import queue_coordinator
from paragrad.loops.join import build_join_identity, refuse_other_job
from paragrad.loops.join_coordinator import JoinCoordinator
from paragrad.parallel.server.client import ServerClient, try_handshake
from paragrad.parallel.server.curve_keys import (
    PUBLIC_SUFFIX,
    SECRET_SUFFIX,
    AllowedKeys,
    KeyPair,
    make_key_files,
    read_key_pair,
    read_public_key,
    write_public_key,
)
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.parallel.server.join_endpoint import (
    HostPort,
    JoinEndpoint,
    parse_host_port,
    refuse_host_port,
)
from paragrad.parallel.server.message_header import Header, InvalidMessage, MessageType
from paragrad.parallel.server.sockets import REMOTE_PREFIX, Listener
from paragrad.parallel.server.work_queue import END, KEEP, TEST, TRAIN, Ticket
from paragrad.record.record import Record, Recorder, read_lines
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes

JOB = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import paragrad as pg

    def numbers(*shape, seed):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    inputs = numbers(29, 10, seed=1)
    data = TensorDataset(inputs, (inputs @ numbers(10, 4, seed=2)).argmax(1))
    job = pg.Job(name="vectors", model=lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(),
            nn.Linear(16, 4)),
                 loss=nn.functional.cross_entropy,
                         optimizer=lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9),
                 train=data, test=data, metric=pg.accuracy, batch=12, epochs=6, dtype=torch.float64)
"""
SAMPLES = 6 * 29
TRAINING = queue_coordinator.QueueCoordinator


class Ground:
    """A folder with a job and the keys of a worker that may join.

    Its methods start the command that joins, and the training.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job.py"
        self.allow = folder / "allow"
        self.key = folder / f"me{SECRET_SUFFIX}"
        self.job.write_text(textwrap.dedent(JOB))
        self.allow.mkdir()
        make_key_files(self.key).replace(self.allow / f"me{PUBLIC_SUFFIX}")
        self.server_key = Path()
        self.address = ""
        self.complaints: Any = subprocess.PIPE

    def join(
        self, *more: str, key: Path | None = None, launched: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start the command that joins; the address of the training must be known."""
        words = [
            sys.executable,
            "-m",
            "paragrad",
            "join",
            self.address,
            str(self.job),
            "--server-key",
            str(self.server_key),
            "--key",
            str(key or self.key),
            "--threads",
            "1",
            *more,
        ]
        return subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            text=True,
            cwd=self.folder,
            env={**os.environ, **(launched or {})},
        )

    def train(self, text: str, batch: int = 12, **more: Any) -> pg.Run:
        return pg.train(
            find_job(str(self.job)).replace(batch=batch),
            text,
            listen="127.0.0.1",
            allow=self.allow,
            runs=self.folder / "runs",
            **more,
        )


@pytest.fixture
def place(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


class Open(queue_coordinator.QueueCoordinator):
    """A coordinator that starts joining workers as soon as its address is known.

    It trains when enough of them have joined, and calls `observe_ticket` after each of their
    tickets.
    """

    place: Ground
    joining: tuple[tuple[str, ...], ...] = ((),)  # the options of each joining worker
    wanted = 1
    joiners: list[subprocess.Popen[str]]
    # called after every training ticket of a joined worker
    observe_ticket: Any = None

    def announce_join_address(self, address: Any) -> None:
        super().announce_join_address(address)
        self.place.address = address.endpoint
        self.place.server_key = self.folder / "training.key"
        type(self).joiners = [self.place.join(*options) for options in self.joining]

    @property
    def guests(self) -> list[int]:
        return [number for number in self.queue.workers if number >= self.strategy.size]

    def train_epochs(self) -> str:
        while (
            len(self.guests) < self.wanted
            or len(self.queue.workers) < self.strategy.workers + self.wanted
        ):
            self.poll_events(None)
        return super().train_epochs()

    def handle_report(self, number: int, ticket: Ticket, report: dict[str, Any]) -> None:
        super().handle_report(number, ticket, report)
        if (
            number >= self.strategy.size
            and ticket.what == TRAIN
            and self.observe_ticket is not None
        ):
            self.observe_ticket(number)


@pytest.fixture
def open_training(
    place: Ground, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., type[Open]]]:
    """Return a function that makes trainings use `Open`, with the given changes.

    At the end of the test, all joined workers are killed.
    """
    found: list[type[Open]] = []

    def change(**changes: Any) -> type[Open]:
        made: type[Open] = type("Here", (Open,), {"place": place, "joiners": [], **changes})
        monkeypatch.setattr(queue_coordinator, "QueueCoordinator", made)
        found.append(made)
        return made

    yield change
    for joiner in (each for made in found for each in made.joiners):
        joiner.kill()
        joiner.communicate()


def wait_for_exit(joiner: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a command, and return its exit code, its output and its error output."""
    printed, complaint = joiner.communicate(timeout=60)
    return joiner.returncode, printed, complaint


def list_events(run: pg.Run) -> list[str]:
    return [line["name"] for line in Record(run.folder).run_lines if line["kind"] == "event"]


def is_complete(run: pg.Run) -> bool:
    """Return whether every server applied every sample once, and the record says so."""
    return set(count_server_samples(run)) == {SAMPLES} and (
        run.sample_count.epochs,
        run.sample_count.twice,
        run.sample_count.missed,
    ) == (6, 0, 0)


# ---- joining and leaving ---------------------------------------------------------------------
@pytest.mark.story
@pytest.mark.parametrize(
    "text",
    [
        "server(2, servers=2, sync=asp)",
        *(
            pytest.param(each, marks=pytest.mark.table)
            for each in ("server(2, sync=ssp(1))", "server(3, sync=bsp(backup=1))")
        ),
    ],
)
def test_joined_worker_trains_until_the_end(
    text: str, place: Ground, open_training: Callable[..., Any]
) -> None:
    here = open_training(joining=((), ()), wanted=2)
    run = place.train(text, save=1)
    assert run.finished
    assert is_complete(run)
    assert list_events(run) == ["open", "joined", "joined"]
    for joiner in here.joiners:
        code, printed, _ = wait_for_exit(joiner)
        assert code == 0
        assert "train" in printed
    record = Record(run.folder)
    size = pg.strategy(text).size
    own, theirs = (line for rank in (0, size) for line in record.select_lines("step", rank)[:1])
    assert own.keys() == theirs.keys()
    assert own["sent"].keys() == theirs["sent"].keys()
    assert len(record.ranks) == size + 2
    assert all(record.select_lines("step", size + guest) for guest in (0, 1))
    assert record.run_lines[-2]["refused"] == {}
    assert not any(path.name.startswith("entrance") for path in run.folder.rglob("*"))


@pytest.mark.story
def test_worker_started_by_a_launcher_can_join(
    place: Ground, open_training: Callable[..., Any]
) -> None:
    """Earlier, a worker that srun started with two tasks was admitted and then refused.

    The training wanted three ranks, and the launcher had started two.
    """

    def say_where(self: Any, address: Any) -> None:
        TRAINING.announce_join_address(self, address)
        place.address = address.endpoint
        place.server_key = self.folder / "training.key"
        type(self).joiners = [
            place.join(
                launched={
                    "SLURM_PROCID": "1",
                    "SLURM_LOCALID": "1",
                    "SLURM_STEP_NUM_TASKS": "2",
                    "SLURM_STEP_TASKS_PER_NODE": "2",
                }
            )
        ]

    here = open_training(announce_join_address=say_where)
    run = place.train("server(2, sync=ssp(1))")
    assert wait_for_exit(here.joiners[0])[0] == 0
    assert is_complete(run)
    assert list_events(run) == ["open", "joined"]


@pytest.mark.story
def test_leaving_worker_returns_its_samples(
    place: Ground, open_training: Callable[..., Any]
) -> None:
    """If a worker leaves after Ctrl-C, another worker gets its samples at once."""
    here = open_training(
        observe_ticket=lambda run, number: run.joiners[0].send_signal(signal.SIGINT)
    )
    run = place.train("server(2, sync=ssp(1))")
    code, _, complaint = wait_for_exit(here.joiners[0])
    assert (code, complaint) == (130, "paragrad: stopped\n")
    assert is_complete(run)
    assert list_events(run) == ["open", "joined", "left"]


@pytest.mark.story
def test_killed_joined_worker_does_not_stop_the_training(
    place: Ground, open_training: Callable[..., Any]
) -> None:
    here = open_training(observe_ticket=lambda run, number: run.joiners[0].kill())
    run = place.train("server(2, servers=2, sync=ssp(1))")
    assert wait_for_exit(here.joiners[0])[0] == -signal.SIGKILL
    assert is_complete(run)
    assert list_events(run) == ["open", "joined", "gone"]


@pytest.mark.story
def test_stopped_joined_worker_comes_back(place: Ground, open_training: Callable[..., Any]) -> None:
    def run_training(self: Any) -> str:
        self.queue.limit = 0.5
        self.was_late = False
        return TRAINING.run_training(self)

    def stop(self: Any, number: int) -> None:
        if not self.was_late:
            self.joiners[0].send_signal(signal.SIGSTOP)

    def record_event(self: Any, name: str, message: str, **numbers: float) -> None:
        TRAINING.record_event(self, name, message, **numbers)
        if name == "late" and numbers["rank"] >= self.strategy.size:
            self.was_late = True
            self.joiners[0].send_signal(signal.SIGCONT)

    def train(self: Any, epoch: int) -> int:
        # the last epoch begins only when the worker is back
        while epoch == 5 and not (self.was_late and self.guests):
            self.poll_events(None)
        return TRAINING.train_segment(self, epoch)

    here = open_training(
        run_training=run_training,
        observe_ticket=stop,
        record_event=record_event,
        train_segment=train,
    )
    run = place.train("server(2, servers=2, sync=asp)")
    assert wait_for_exit(here.joiners[0])[0] == 0
    assert is_complete(run)
    assert "late" in list_events(run)


@pytest.mark.story
def test_killed_server_is_found_again(place: Ground, open_training: Callable[..., Any]) -> None:
    """A restarted server has the same port and key, and knows the admitted workers.

    Under ssp, no worker continues without the one that joined.
    """

    def kill(run: Any, number: int) -> None:
        if "killed" not in vars(run):
            run.killed = run.pool.members[2].send_signal(signal.SIGKILL)

    here = open_training(observe_ticket=kill)
    run = place.train("server(2, servers=2, sync=ssp(1))")
    assert wait_for_exit(here.joiners[0])[0] == 0
    assert set(count_server_samples(run)) == {SAMPLES}
    assert list_events(run) == ["open", "joined", "again"]
    assert len(Record(run.folder).select_lines("step", 4)) > 3


@pytest.mark.story
def test_waiting_worker_is_kept_alive(place: Ground, open_training: Callable[..., Any]) -> None:
    """A worker gives up after 1.5 s without an answer, so the queue answers waiting workers.

    Here the worker must wait during three requests.
    """
    waited: list[bytes] = []

    def train_epochs(self: Any) -> str:
        answer = self.listener.send_answer

        def count_waits(whose: bytes, header: Header, *rest: Any) -> None:
            if header.kind == MessageType.WAIT and whose[:1] == REMOTE_PREFIX:
                waited.append(whose)
            answer(whose, header, *rest)

        self.listener.send_answer = count_waits
        while len(waited) < 3:
            self.poll_events(None)
        return TRAINING.train_epochs(self)

    here = open_training(joining=(("--timeout", "1.5"),), train_epochs=train_epochs)
    run = place.train("server(2, sync=ssp(4))")
    assert wait_for_exit(here.joiners[0])[0] == 0
    assert is_complete(run)


LAUNCHES = """
    import sys
    from pathlib import Path
    from test_join import Open, Ground
    from paragrad.loops import queue_coordinator

    class Told(Open):
        joining, place = (("--timeout", "5"),), Ground(Path(sys.argv[1]))

        def observe_ticket(self, number):
            if self.joiners:
                print(self.joiners.pop().pid, flush=True)
                sys.stdin.read()

    queue_coordinator.QueueCoordinator = Told
    Told.place.complaints = (Told.place.folder / "complaints").open("w")
    Told.place.train("server(2, sync=asp)")
"""


@pytest.mark.story
def test_joined_worker_ends_if_the_launching_process_dies(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHES), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert launcher.stdout is not None
    joiner = os.pidfd_open(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.communicate(timeout=60)
    assert select.select([joiner], [], [], 60)[0]  # it ends by itself
    os.close(joiner)
    complaint = (tmp_path / "complaints").read_text()
    assert re.search(
        r"^paragrad: .*no answer from (server 0|the training's work queue) within 5 s",
        complaint,
        re.MULTILINE,
    )


# ---- admission -------------------------------------------------------------------------------
@pytest.mark.story
def test_unknown_sender_gets_no_answer_and_changes_nothing(
    place: Ground, open_training: Callable[..., Any], tmp_path: Path
) -> None:
    """Noise over raw TCP, an unknown key or another server's key changes nothing.

    The same holds for ZeroMQ without a key. The training has one worker, and equals serial.
    """
    make_key_files(tmp_path / f"other{SECRET_SUFFIX}")
    said: list[str] = []

    def train_epochs(self: Any) -> str:
        office = self.office_at
        while not all(
            servers := [self.endpoints.build_join_endpoint(number).address for number in range(2)]
        ):
            self.poll_events(None)
        for address in (office, *servers):
            at = parse_host_port("", address.endpoint)
            for noise in (os.urandom(64), b"GET / HTTP/1.0\r\n\r\n", b"", os.urandom(100_000)):
                with socket.create_connection((at.host, at.port)) as raw:
                    raw.sendall(noise)
            said.append(
                try_handshake(address, read_key_pair(tmp_path / f"other{SECRET_SUFFIX}"), 20.0)
            )
            said.append(
                try_handshake(
                    type(address)(address.endpoint, KeyPair.generate_pair().public),
                    read_key_pair(place.key),
                    20.0,
                )
            )
            said.append(
                try_handshake(type(address)(address.endpoint), read_key_pair(place.key), 20.0)
            )
            # the queue accepts this key; servers do not, because the worker has not joined yet
            if address is not office:
                said.append(try_handshake(address, read_key_pair(place.key), 20.0))
        place.key = tmp_path / f"other{SECRET_SUFFIX}"
        type(self).joiners = [place.join()]
        code, _, complaint = wait_for_exit(type(self).joiners[0])
        assert code == 2
        assert "does not accept the key of" in complaint
        return TRAINING.train_epochs(self)

    def say_where(self: Any, address: Any) -> None:
        place.address = address.endpoint
        place.server_key = self.folder / "training.key"
        self.office_at = address
        write_public_key(address.key, place.server_key)

    open_training(train_epochs=train_epochs, announce_join_address=say_where)
    run = place.train("server(1, servers=2, sync=asp)", batch=29)
    assert said == [
        "unknown",
        "another key",
        "another key",
        *2 * ["unknown", "another key", "another key", "unknown"],
    ]
    serial = pg.train(find_job(str(place.job)).replace(batch=29), "serial", runs=tmp_path / "runs")
    assert run.losses == pytest.approx(serial.losses, rel=1e-9)
    assert is_complete(run)
    assert list_events(run) == []


@pytest.mark.story
def test_different_job_is_refused_by_name_on_both_sides(
    place: Ground, open_training: Callable[..., Any]
) -> None:
    """A worker with another job is refused, and the training continues with a worker that fits.

    A key may be added while the training runs.
    """
    later = place.folder / f"later{SECRET_SUFFIX}"

    def train_epochs(self: Any) -> str:
        while self.joiners[0].poll() is None:
            self.poll_events(None)
        code, _, complaint = wait_for_exit(self.joiners[0])
        assert code == 2
        assert "the training has seed 0, and here it is 7; give --seed 0" in complaint
        make_key_files(later).replace(place.allow / f"later{PUBLIC_SUFFIX}")
        self.joiners.append(place.join(key=later))
        return Open.train_epochs(self)

    here = open_training(joining=(("--seed", "7"),), train_epochs=train_epochs)
    run = place.train("server(2, sync=asp)")
    assert wait_for_exit(here.joiners[1])[0] == 0
    assert is_complete(run)
    handed_out = next(line for line in Record(run.folder).run_lines if line["kind"] == "handed_out")
    assert handed_out["refused"] == {"a job with another seed": 1}
    assert "with the key of later.key" in next(
        line["message"]
        for line in Record(run.folder).run_lines
        if line["kind"] == "event" and line["name"] == "joined"
    )


KNOWN = {"seed": 0, "model": "Linear(1, 1)", "loss before training": 0.5}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff", "cannot be read"),
        (b"[1]", "cannot be read"),
        (b"null", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (json.dumps(KNOWN | {"more": 1}).encode(), "1 thing(s) more"),
        (json.dumps(KNOWN | {"model": "\n\x1b[31m"}).encode(), "another model"),
        (
            json.dumps(KNOWN | {"loss before training": 0.6}).encode(),
            "another loss before training",
        ),
        (json.dumps(KNOWN | {"loss before training": "x"}).encode(), "cannot be read"),
        (b"{}", "another seed"),
    ],
)
def test_job_fingerprint_is_checked(text: bytes, why: str) -> None:
    """The recorded reason contains no text of the sender."""
    with pytest.raises(InvalidMessage, match=why.replace("(", r"\(").replace(")", r"\)")):
        refuse_other_job(KNOWN, text)
    refuse_other_job(KNOWN, json.dumps(KNOWN).encode())


STEP = {
    "loss": 0.5,
    "weight": 2.0,
    "seconds": 0.1,
    "lr": 0.1,
    "sent": 80.0,
    "became": 0.0,
    "more": 1.0,
}


class Hall(Desk):
    """A desk at which a joined worker has number 7."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = {7: b"k" * 40}
        self.told = list[Any]()
        self.refusals = list[str]()
        self.office.join_handler = self  # type: ignore[assignment]

    check_report = JoinCoordinator.check_report  # type: ignore[assignment]

    def record_ticket(self, number: int, ticket: Ticket, said: dict[str, float]) -> None:
        self.told.append((number, ticket.number))

    def record_departure(self, number: int) -> None:
        del self.keys[number]

    def send_answer(self, whose: bytes, header: Header, text: bytes = b"") -> None:
        if header.kind == MessageType.REFUSED:
            self.refusals.append(text.decode())
        elif header.kind == MessageType.GIVEN:
            super().send_answer(whose.removeprefix(REMOTE_PREFIX)[-1:], header, text)

    def send_and_read_refusal(
        self,
        key: bytes,
        *text: Any,
        kind: MessageType = MessageType.NEXT,
        call: int = 0,
        job: int = 77,
    ) -> str:
        """Send a request of a joined worker; return why it is refused, or an empty text."""
        before = len(self.refusals)
        header = Header(kind, job, call=call or next(self.calls))
        self.office.handle_message(
            self, make_frames(header, json.dumps(text).encode(), whose=REMOTE_PREFIX + key + b"7")
        )  # type: ignore[arg-type]
        self.office.hand_out_tickets(self)  # type: ignore[arg-type]
        return "".join(self.refusals[before:])


def test_number_and_ticket_belong_to_one_key() -> None:
    hall = Hall()
    key = b"k" * 40
    hall.add_tickets(3)
    assert "belongs to another worker" in hall.send_and_read_refusal(b"x" * 40, 7, None, {})
    # number 0 belongs to a worker that did not join
    assert "belongs to another worker" in hall.send_and_read_refusal(key, 0, None, {})
    assert hall.send_and_read_refusal(key, 7, None, {}) == ""
    given = hall.given[7].__dict__
    assert "was not given" in hall.send_and_read_refusal(key, 7, {**given, "number": 2}, {})
    assert "was not given" in hall.send_and_read_refusal(key, 7, {**given, "what": ["train"]}, {})
    assert "not finite" in hall.send_and_read_refusal(key, 7, given, {**STEP, "loss": float("nan")})
    assert "cannot be read" in hall.send_and_read_refusal(key, 7, given, {"loss": 10**400})
    assert "END is not for workers that joined" in hall.send_and_read_refusal(
        key, 7, None, {}, kind=MessageType.END
    )
    # earlier, such a report completed the ticket
    assert "without its loss" in hall.send_and_read_refusal(key, 7, given, {"became": 1.0})
    assert hall.office.open_tickets == {hall.given[7]: 7}
    assert hall.send_and_read_refusal(key, 7, given, STEP) == ""
    assert hall.told == [(7, 0)]
    assert hall.request_ticket(0) is not None  # other workers are not affected


@pytest.mark.parametrize("kind", [MessageType.NEXT, MessageType.LEAVE])
def test_ticket_of_a_departed_worker_is_reassigned(kind: MessageType) -> None:
    """Earlier, a worker that left while it was given a ticket kept this ticket.

    The ticket stayed open for ever, and the training did not end. Now it is given out again.
    """
    hall = Hall()
    key = b"k" * 40
    hall.add_tickets(1)
    hall.send_and_read_refusal(key, 7, None, {})
    taken = hall.given.pop(7)
    hall.send_and_read_refusal(key, 7, None, {}, kind=kind)
    assert (hall.request_ticket(0) or hall.given.get(7)) == taken
    assert hall.office.open_tickets == {taken: 7 if 7 in hall.given else 0}


def test_joined_worker_stores_nothing() -> None:
    """A joined worker gets no ticket to save, because it does not have the run's folder.

    It gets tickets of tests, as any worker does.
    """
    hall = Hall()
    hall.office.add_tickets([Ticket(KEEP, keep="model"), Ticket(TEST)])
    hall.send_and_read_refusal(b"k" * 40, 7, None, {})
    assert 7 not in hall.given
    assert hall.request_ticket(0) == Ticket(KEEP, keep="model")
    hall.send_and_read_refusal(b"k" * 40, 7, None, {})
    assert hall.given[7] == Ticket(TEST)


def test_model_is_saved_by_an_original_worker() -> None:
    """Earlier, no worker saved the model if all original workers had been replaced.

    Workers that had trained came first, so the new ones did not get the ticket that saves.
    """
    hall = Hall()
    hall.add_tickets(1)
    hall.send_and_read_refusal(b"k" * 40, 7, None, {})
    hall.send_and_read_refusal(b"k" * 40, 7, hall.given[7].__dict__, STEP)
    hall.office.add_tickets([Ticket(KEEP, keep="model")])
    assert hall.request_ticket(0) == Ticket(KEEP, keep="model")


def test_evaluation_of_an_earlier_epoch_is_ignored() -> None:
    """Earlier, a late result of an earlier test was accepted for the present test.

    The parts of all tests had the same names.
    """
    hall = Hall()
    hall.office.add_tickets([Ticket(TEST, epoch=0)])
    late = hall.request_ticket(0)
    hall.office.drop_worker(0)
    assert hall.request_ticket(1) == late
    hall.request_ticket(1, sum=1.0)
    hall.office.add_tickets([Ticket(TEST, epoch=1)])
    heard = len(hall.heard)
    hall.request_ticket(0, sum=5.0)
    assert len(hall.heard) == heard
    assert hall.given[1] == Ticket(TEST, epoch=1)


def test_joining_after_the_end_is_refused() -> None:
    """Earlier, the worker was admitted, and then waited for servers that had ended."""
    hall = Hall()
    assert hall.send_and_read_refusal(b"k" * 40, kind=MessageType.REMIND) == ""
    # a reminder of JOIN has job 0; earlier, it was refused as "of another training"
    assert hall.send_and_read_refusal(b"k" * 40, kind=MessageType.REMIND, job=0) == ""
    hall.office.is_ended = True
    assert hall.send_and_read_refusal(b"k" * 40, kind=MessageType.JOIN) == "the training is over"
    hall.send_and_read_refusal(b"k" * 40, 7, None, {})
    assert hall.given[7] == Ticket(END)  # a worker that comes back late


def test_repeated_join_request_waits() -> None:
    hall = Hall()
    kinds: list[MessageType] = []
    hall.send_answer = lambda whose, header, text=b"": kinds.append(header.kind)
    for _ in range(2):
        hall.send_and_read_refusal(b"k" * 40, 7, None, {}, call=5)
    assert kinds == [MessageType.WAIT]
    assert len(hall.office.workers) == 1


def test_step_record_has_a_ticket_or_a_worker_number(place: Ground, tmp_path: Path) -> None:
    """A worker that requests twice to join gets one number.

    Its admission waits until the servers have started. A step has one line in the record.
    """
    checked = validate_run(
        find_job(str(place.job)),
        "server(2, sync=asp)",
        Settings(listen="127.0.0.1", allow=place.allow),
    )
    meeting = ServerEndpoints(77, str(tmp_path), 1, host_port=HostPort("127.0.0.1"))
    happened = list[str]()
    with Recorder(tmp_path / "run.jsonl") as record:
        guests = JoinCoordinator(
            checked,
            tmp_path,
            record,
            meeting,
            place.allow,
            itertools.count(3).__next__,
            lambda name, message, **numbers: happened.append(message),
        )
        key = read_key_pair(place.key).public
        text = json.dumps(build_join_identity(checked.job, checked.inspection)).encode()
        assert guests.admit_worker(key, 1, text) is None
        entrance = meeting.build_join_endpoint(0)
        assert entrance is not None
        entrance.save_state(KeyPair.generate_pair(), 4000)
        first, again, another = (
            json.loads(guests.admit_worker(key, sender, text) or b"") for sender in (1, 1, 2)
        )
        assert first == again
        assert (first["number"], another["number"], first["strategy"]) == (
            3,
            4,
            "server(2, sync=asp)",
        )
        assert [at for at, _ in first["servers"]] == ["tcp://127.0.0.1:4000"]
        assert happened == [
            "worker 3 joined, with the key of me.key",
            "worker 4 joined, with the key of me.key",
        ]
        assert AllowedKeys(meeting.joined_folder).find_key_name(key) == "3"
        for bad in (
            {"sent": 1e300},
            {"seconds": -1.0},
            {"weight": -1.0},
            {"loss": 1e308, "weight": 1e308},
        ):
            with pytest.raises(InvalidMessage, match="impossible numbers"):
                guests.check_report(Ticket(TRAIN, 5, 0, 2, 1), STEP | bad)
        with pytest.raises(InvalidMessage, match="without its lr"):
            guests.check_report(
                Ticket(TRAIN, 5, 0, 2, 1),
                {name: value for name, value in STEP.items() if name != "lr"},
            )
        # the loss of a test may be infinite
        guests.check_report(Ticket(TEST), {"sum": math.inf, "weight": 2.0})
        # the result of another worker was applied
        guests.record_ticket(3, Ticket(TRAIN, 4, 0, 2, 0), STEP | {"became": 1.0})
        for _ in range(2):
            guests.record_ticket(3, Ticket(TRAIN, 5, 0, 2, 1), STEP)
        guests.record_departure(3)
        assert AllowedKeys(meeting.joined_folder).find_key_name(key) == "4"
    (line,) = read_lines(tmp_path / "rank-3.jsonl")
    assert (line["step"], line["order"], line["loss"], line["sent"]) == (
        2,
        [[27, 29]],
        [1.0, 2.0],
        {"gradients": {"bytes": 80, "computed": False}},
    )
    assert "more" not in line


# ---- key files and addresses -----------------------------------------------------------------
def test_private_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    key = tmp_path / f"me{SECRET_SUFFIX}"
    public = make_key_files(key)
    assert key.stat().st_mode & 0o777 == 0o600
    assert read_key_pair(key).public == read_public_key("--server-key", public)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"me{PUBLIC_SUFFIX}",
        f"me{SECRET_SUFFIX}",
    ]
    for break_it, repair in (
        (lambda: key.chmod(0o644), "chmod 600"),
        (
            lambda: key.write_text('public-key = "x"\nsecret-key = "y"\n'),
            "holds no key of CurveZMQ",
        ),
        (lambda: key.write_bytes(public.read_bytes()), "holds a public key alone"),
    ):
        break_it()
        with pytest.raises(Refused, match=repair):
            read_key_pair(key)
    with pytest.raises(Refused, match="cannot be made"):
        make_key_files(key)  # an existing file is not overwritten
    with pytest.raises(Refused, match=f"give .*me{SECRET_SUFFIX}"):
        make_key_files(tmp_path / "me")


def test_allowed_keys_are_a_folder_of_public_keys(tmp_path: Path) -> None:
    folder = tmp_path / "allow"
    job = pg.job("digits")
    for prepare, repair in (
        (lambda: None, "there is no such folder"),
        (folder.mkdir, "holds no public key"),
        (lambda: (folder / f"a{PUBLIC_SUFFIX}").write_text("nothing"), "holds no key of CurveZMQ"),
        (
            lambda: (
                make_key_files(tmp_path / f"a{SECRET_SUFFIX}")
                .with_suffix(SECRET_SUFFIX)
                .replace(folder / f"a{PUBLIC_SUFFIX}")
            ),
            "holds a secret key",
        ),
    ):
        prepare()
        with pytest.raises(Refused, match=repair):
            Settings(listen="127.0.0.1", allow=folder).check_settings(job)
    public = (tmp_path / f"a{PUBLIC_SUFFIX}").replace(folder / f"a{PUBLIC_SUFFIX}")
    Settings(listen="127.0.0.1", allow=folder).check_settings(job)
    key = read_public_key("", public)
    assert AllowedKeys(folder).find_key_name(key) == "a"
    (folder / f"a half{PUBLIC_SUFFIX}").write_text("curve\n")  # a file that is being copied
    assert AllowedKeys(folder).callback("*", key)
    public.unlink()
    assert not AllowedKeys(folder).callback("*", key)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.1", HostPort("10.0.0.1")),
        ("host:40", HostPort("host", 40)),
        ("[::1]:4", HostPort("::1", 4)),
        ("tcp://[fd00::1]:4", HostPort("fd00::1", 4)),
    ],
)
def test_addresses_parse_as_they_are_printed(text: str, place: HostPort) -> None:
    assert parse_host_port("--listen", text) == place
    assert parse_host_port("--listen", str(place)) == place


@pytest.mark.parametrize(
    "text", ["", ":40", "a:b", "http://a:40", "a:99999", "a/b", "[::1", "a:40?x", "u@a:40"]
)
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="write HOST or HOST:PORT"):
        parse_host_port("--listen", text)


def test_used_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            Refused, match=f"port {port} of 127.0.0.1 is in use; give another one, or none"
        ):
            refuse_host_port(HostPort("127.0.0.1", port), 1)
        with pytest.raises(Refused, match="is in use"):
            refuse_host_port(HostPort("127.0.0.1", port - 2), 3)  # the port of a server
    refuse_host_port(HostPort("127.0.0.1", port), 1)


def test_restarted_server_has_its_address_and_key(tmp_path: Path) -> None:
    """A restarted server has its address also while old connections are still closing.

    Only allowed keys are admitted, according to the present files of the folder.
    """
    allowed = tmp_path / "allowed"
    mine = KeyPair.generate_pair()
    allowed.mkdir()
    entrance = JoinEndpoint(HostPort("127.0.0.1"), allowed, tmp_path / "kept")
    first = Listener(1000, None, KeyPair.generate_pair(), None, entrance)
    address = entrance.address
    assert address is not None
    assert try_handshake(address, mine, 20.0) == "unknown"
    write_public_key(mine.public, allowed / f"1{PUBLIC_SUFFIX}")
    assert try_handshake(address, mine, 20.0) == ""
    calling = ServerClient([address], 1000, mine, 30.0, 0.1)
    first.close()
    again = Listener(1000, None, KeyPair.generate_pair(), None, entrance)
    try:
        assert entrance.address == address
        calling.sockets[0].send_multipart([Header(MessageType.PULL, 77).pack_header()])
        taken = again.receive_message(20.0)
        assert taken is not None
        assert taken[0].bytes[1:41] == mine.public
        calling.close()
        left: list[bytes] = []
        while not left:
            left = again.take_lost_connections()
        assert left == [taken[0].bytes]
    finally:
        again.close()
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


def test_connection_flood_does_not_block_others() -> None:
    """ZeroMQ accepts no messages while a thousand events of connections are unread.

    Earlier, the listener did not read these events, so ZeroMQ stopped.
    """
    mine = KeyPair.generate_pair()
    listening = Listener(1000, "127.0.0.1", KeyPair.generate_pair())
    calling = ServerClient([listening.address], 1000, mine, 30.0)
    try:
        listening.allow_keys([mine.public])
        at = parse_host_port("", listening.address.endpoint)
        for number in range(1500):
            with socket.create_connection((at.host, at.port), 20.0) as raw:
                raw.sendall(os.urandom(64))
            if number % 100 == 0:
                calling.sockets[0].send_multipart([Header(MessageType.PULL, 77).pack_header()])
                assert listening.receive_message(20.0) is not None
    finally:
        calling.close()
        listening.close()


def test_random_bytes_do_not_count_as_leaving_workers() -> None:
    """Earlier, a port scan between hosts made the count of connections negative.

    The server took this to mean that no worker was left, and ended.
    """
    mine = KeyPair.generate_pair()
    listening = Listener(1000, "127.0.0.1", KeyPair.generate_pair())
    try:
        listening.allow_keys([mine.public])
        at = parse_host_port("", listening.address.endpoint)
        calling = ServerClient([listening.address], 1000, mine, 30.0)
        calling.sockets[0].send_multipart([Header(MessageType.PULL, 77).pack_header()])
        assert listening.receive_message(20.0) is not None
        for _ in range(3):
            with socket.create_connection((at.host, at.port)) as raw:
                raw.sendall(os.urandom(64))
                with contextlib.suppress(ConnectionResetError):
                    while raw.recv(100):  # until the listener closes it
                        pass
        assert listening.connection_count >= 1
        calling.close()
        while listening.connection_count:
            pass
    finally:
        listening.close()
