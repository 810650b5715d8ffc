"""Fuzz tests of validation: jobs, options, strategies, checkpoints and files with random errors.

Each is wrong in one or two places. It is accepted, or refused with one message, within a time
limit; nothing else may happen.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import JOBS, TEXT, VECTORS, make_job, make_mlp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from torch import nn
from typer.testing import CliRunner

import paragrad as pg
from paragrad.commands.cli import app
from paragrad.executors.machine import Link, Machine, read_machine_file
from paragrad.planner.simulation import simulate_exchange
from paragrad.runtime.world import World
from paragrad.strategies.registry import strategy
from paragrad.strategies.serial import Serial
from paragrad.trainer.checkpoint.checkpoint_files import (
    CHECKPOINT_FILES,
    CHECKSUM_FILE,
    compute_sha256,
)
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation import resume_check
from paragrad.validation.inspect_job import inspect_job
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.story]
BOUND = 20  # seconds for one case
HERE = Path(__file__).parents[1] / "helpers" / "job_files"


@contextlib.contextmanager
def limit_time() -> Iterator[None]:
    """Raise TimeoutError in a case that takes longer than BOUND seconds."""

    def raise_timeout(*_: object) -> None:
        raise TimeoutError(f"not done within {BOUND} s")

    begun = time.monotonic()
    before = signal.signal(signal.SIGALRM, raise_timeout)
    left = signal.setitimer(signal.ITIMER_REAL, BOUND)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if left[0]:  # restart the timer that was set before, for the whole test
            signal.setitimer(
                signal.ITIMER_REAL, max(0.01, left[0] - (time.monotonic() - begun)), left[1]
            )
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def configure_cases(count: int) -> Any:
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


# ---- strategies and commands -----------------------------------------------------------------
TEXTS = [
    "serial",
    "data(2)",
    "data(3, reduce=ring)",
    "data(2, reduce=ring_async(segments=4), micro=2)",
    "data(auto)",
    "data(4, reduce=two_level(group=2, inside=ring, across=tree))",
    "data(3, shares=[2, 1, 1])",
    "serial(threads=1)",
    "data(2, state=shared_memory)",
    "data(2) * tensor(2)",
    "pipeline(4, micro=8)",
    "server(4, servers=2, sync=ssp(3))",
    "data(2, compress=top_k(0.01))",
    "data(2, batch_norm=share)",
    "data(2, reduce=double_tree(reproducible=true))",
]
ODD = [
    "",
    " ",
    "0",
    "-1",
    "1e400",
    "nan",
    "auto",
    "none",
    "true",
    "[",
    "]",
    "(",
    ")",
    ",",
    ";",
    "*",
    "=",
    "data",
    "x" * 300,
    "é",
    "\u202e",
    "99999999999999999999",
    "1.5",
    "'",
    '"',
    "\\",
    "../..",
    "/dev/null",
    "data(2)",
    "--",
    "-h",
    "%s",
    "{}",
    "null",
    "\n",
    "ring",
]


@some.composite
def mutate_text(draw: Any, text: str) -> str:
    """Draw a text in which parts are removed, inserted or doubled, in one or two places."""
    for _ in range(draw(some.integers(1, 2))):
        first = draw(some.integers(0, len(text)))
        last = draw(some.integers(first, min(len(text), first + 6)))
        text = text[:first] + draw(some.sampled_from([*ODD, text[first:last] * 2])) + text[last:]
    return text


COMMANDS = [
    "train digits --dry-run",
    "train digits --dry-run --strategy {}",
    "train mnist-mlp --dry-run --data nowhere",
    "train digits --dry-run --strategy {} --inject-fault skip --skip-schedule-check",
    "train digits --dry-run --batch 64 --seed 1",
    "train digits --dry-run --set width=8 --until accuracy=90",
    "train digits --dry-run --epochs 2",
    "train digits --dry-run --save 5 --loaders 1 --backend gloo",
    "train digits --dry-run --resume nowhere",
    f"train {HERE}/good.py --dry-run --strategy {{}}",
    "draw {}",
    f"train {HERE}/two.py:small --dry-run",
    "work digits --batch 8",
    "simulate {} --bytes 1MB",
    "jobs",
    "strategies",
    "simulate {} --bytes 64KiB --slow 1=3 --ranks-per-link 2",
    "train digits --dry-run --machine nowhere.json",
    "draw {} --svg {folder}/drawn.svg",
]


@some.composite
def draw_command(draw: Any) -> list[str]:
    """Draw a command with a strategy that is wrong in one or two places."""
    text = draw(some.sampled_from(TEXTS))
    words = [word.replace("{}", text) for word in draw(some.sampled_from(COMMANDS)).split()]
    for _ in range(draw(some.integers(1, 2))):
        place = draw(some.integers(0, len(words) - 1))
        how = draw(some.sampled_from(("mutate", "odd", "drop", "double")))
        words[place : place + 1] = {
            "mutate": lambda place=place: [draw(mutate_text(words[place]))],
            "odd": lambda: [draw(some.sampled_from(ODD))],
            "drop": list,
            "double": lambda place=place: [words[place]] * 2,
        }[how]()
        if not words:
            return ["jobs"]
    return words


def assert_clear_answer(words: list[str], code: int, output: str) -> None:
    """Assert that a command succeeded, or was refused or failed with a message."""
    assert code in (0, 1, 2), (words, code, output)
    assert "Traceback" not in output, (words, output)
    if code and "─ Error ─" not in output:  # that box is typer's, about the options themselves
        assert sum(line.startswith("paragrad: ") for line in output.splitlines()) >= 1, (
            words,
            output,
        )


@pytest.mark.table
def test_random_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    @configure_cases(800)
    @given(draw_command())
    def run_command(words: list[str]) -> None:
        words = [word.replace("{folder}", str(tmp_path)) for word in words]
        if words[0] == "train" and "--dry-run" not in words:  # otherwise it would train
            words.append("--dry-run")
        with limit_time():
            result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(
                f"{shlex.join(words)} raised {result.exception!r}"
            ) from result.exception
        assert_clear_answer(words, result.exit_code, result.output)

    run_command()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.table) for seed in range(1, 10))]
)
def test_random_commands_as_typed(seed: int, tmp_path: Path) -> None:
    """Run 100 commands, 10 for each seed, each in its own process."""
    draw = random.Random(seed)
    for _ in range(10):
        words = [
            word.replace("{}", draw.choice(TEXTS)).replace("{folder}", str(tmp_path))
            for word in draw.choice(COMMANDS).split()
        ]
        place = draw.randrange(len(words))
        words[place] = draw.choice(
            [*(odd for odd in ODD if "\0" not in odd), words[place][:-1], words[place] * 2]
        )
        if words[0] == "train" and "--dry-run" not in words:
            words.append("--dry-run")
        ran = subprocess.run(
            [sys.executable, "-m", "paragrad", *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
        )
        assert_clear_answer(words, ran.returncode, ran.stdout + ran.stderr)


# ---- jobs ------------------------------------------------------------------------------------
class Raises:
    """An object that raises an error when it is called or indexed."""

    def __call__(self, *_: Any) -> Any:
        raise ValueError("no such luck")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        raise KeyError(index)


VALUES: list[Any] = [
    None,
    0,
    -1,
    1,
    3,
    1.5,
    math.nan,
    math.inf,
    True,
    "",
    "text",
    [],
    {},
    (),
    b"x",
    torch.zeros(2),
    nn.Linear(2, 2),
    make_mlp,
    Raises(),
    Raises,
    VECTORS,
    TEXT,
    torch.float16,
    torch.float64,
    torch.bfloat16,
    lambda *_: None,
    lambda *_: 1.0,
    lambda *_: torch.tensor(math.nan),
    lambda *_: torch.zeros(3),
    lambda *_: (torch.tensor(1.0), 0),
    len,
    print,
    object(),
    10**30,
    functools.partial(nn.functional.cross_entropy, reduction="sum"),
    nn.MSELoss(),
    nn.Identity,
    lambda parameters: torch.optim.LBFGS(parameters),
    lambda parameters: torch.optim.SGD([], lr=1.0),
    lambda parameters: torch.optim.Adam([{"params": list(parameters), "lr": "x"}]),
]
FIELDS = (
    "model",
    "loss",
    "optimizer",
    "train",
    "batch",
    "epochs",
    "test",
    "seed",
    "scheduler",
    "clip_norm",
    "metric",
    "dtype",
    "collate",
    "name",
    "arguments",
)


def test_random_jobs() -> None:
    base = make_job("fuzzed", make_mlp, VECTORS, test=VECTORS, metric=pg.accuracy)

    @configure_cases(600)
    @given(
        some.lists(
            some.tuples(some.sampled_from(FIELDS), some.integers(0, len(VALUES) - 1)),
            min_size=1,
            max_size=2,
        ),
        some.sampled_from(["serial", "data(2)", "data(3, reduce=ring)", "data(2, micro=2)"]),
    )
    def validate_changed_job(changes: list[tuple[str, int]], chosen: str) -> None:
        with limit_time(), contextlib.suppress(pg.Refused):
            validate_run(base.replace(**{name: VALUES[place] for name, place in changes}), chosen)

    validate_changed_job()


def test_random_settings() -> None:
    names = [*vars(Settings()), "loader", "Save"]

    @configure_cases(300)
    @given(
        some.lists(
            some.tuples(
                some.sampled_from(names),
                some.sampled_from([value for value in VALUES if not callable(value)] + ODD),
            ),
            min_size=1,
            max_size=2,
        )
    )
    def validate_with_settings(changes: list[tuple[str, Any]]) -> None:
        from paragrad.trainer.settings import build_settings

        with limit_time(), contextlib.suppress(pg.Refused):
            validate_run(JOBS["mlp"], "data(2)", build_settings(dict(changes)))

    validate_with_settings()


@pytest.mark.parametrize("name", ["data", "resume", "machine", "trace", "allow"])
def test_names_that_no_file_system_takes_are_refused(name: str) -> None:
    """Earlier, a name that was too long caused an OSError, wherever the path was read.

    The fuzz test above found this with a long text.
    """
    settings = Settings(**{name: "x" * 256})
    with pytest.raises(pg.Refused, match=f"{name} has a name of more than 255 bytes"):
        validate_run(JOBS["mlp"], "data(2)", settings)


# ---- checkpoints and machine files -----------------------------------------------------------
def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value in a JSON document."""
    for key, each in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield (*path, key)
        yield from list_paths(each, (*path, key))


def change_value(value: Any, path: tuple[Any, ...], other: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    if other is DROPPED:
        del value[path[-1]]
    else:
        value[path[-1]] = other


DROPPED = object()
OTHERS = [
    DROPPED,
    None,
    -5,
    2.5,
    10**20,
    "text",
    [],
    {},
    True,
    [1, 2],
    {"a": 1},
    math.inf,
    "",
    {"a Python": "Counter", "items": []},
    {"a Python": "nothing", "items": 3},
    {"a Python": "tensor", "dtype": "float99", "items": [1]},
]


def test_random_checkpoint_edits(tmp_path: Path) -> None:
    job = JOBS["mlp, adam, clipped, scheduled"]
    facts = inspect_job(job)
    trainer = Trainer.build_for_job(World(), job, Serial(threads=1))
    for inputs, target in trainer.batches(job.train, job.batch, 0):
        trainer.step(inputs, target)
    trainer.save(tmp_path / "whole", resume_check.build_job_identity(job, facts))
    trainer.close()
    (folder,) = (tmp_path / "whole").iterdir()
    state = json.loads((folder / "state.json").read_text())
    where = list(list_paths(state))

    @configure_cases(300)
    @given(
        some.lists(
            some.tuples(some.sampled_from(where), some.integers(0, len(OTHERS) - 1)),
            min_size=1,
            max_size=2,
        ),
        some.sampled_from(
            ["sums anew", "sums anew", "sums anew", "sums as they were", "cut", "another file"]
        ),
        some.sampled_from(CHECKPOINT_FILES),
    )
    def load_edited_checkpoint(
        changes: list[tuple[tuple[Any, ...], int]], how: str, name: str
    ) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as parent, limit_time():
            copy = Path(parent) / folder.name
            shutil.copytree(folder, copy)
            edited = json.loads((copy / "state.json").read_text())
            for path, other in changes:
                # the first change may have removed the place of the second
                with contextlib.suppress(LookupError, TypeError):
                    change_value(edited, path, OTHERS[other])
            (copy / "state.json").write_text(json.dumps(edited))
            if how == "cut":
                (copy / name).write_bytes((copy / name).read_bytes()[:-9])
            if how == "another file":
                (copy / name).write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
            if how != "sums as they were":
                (copy / CHECKSUM_FILE).write_text(
                    "".join(f"{compute_sha256(copy / each)}  {each}\n" for each in CHECKPOINT_FILES)
                )
            with contextlib.suppress(pg.Refused):
                resume_check.find_checkpoint(Path(parent), job, facts)

    load_edited_checkpoint()


LINK = Link(alpha=1e-4, beta=1e-8, points=((1024, 1e-4), (1 << 20, 1e-2)))


def test_random_machine_files(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    Machine(
        {"gloo": LINK},
        gamma=1e-9,
        cores=2,
        measured="here",
        errors={"gloo": 0.1},
        memory=1e10,
        matmul=1e10,
        hosts=1,
    ).write_machine_file(path)
    whole = json.loads(path.read_text())
    where = list(list_paths(whole))

    @configure_cases(200)
    @given(
        some.lists(
            some.tuples(some.sampled_from(where), some.integers(0, len(OTHERS) - 1)),
            min_size=1,
            max_size=2,
        )
    )
    def simulate_with_edited_file(changes: list[tuple[tuple[Any, ...], int]]) -> None:
        edited = json.loads(json.dumps(whole))
        for place, other in changes:
            with contextlib.suppress(LookupError, TypeError):
                value = OTHERS[other]
                # a copy, because a later change may modify it
                change_value(
                    edited, place, copy.copy(value) if isinstance(value, list | dict) else value
                )
        path.write_text(json.dumps(edited))
        with limit_time(), contextlib.suppress(pg.Refused):
            simulate_exchange(
                strategy("data(4, reduce=ring)"), 1 << 20, read_machine_file(path, 2)[0]
            )

    simulate_with_edited_file()
