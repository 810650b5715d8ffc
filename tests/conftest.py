"""Settings and fixtures of all tests: ranks that are started once per session, and clusters."""

from __future__ import annotations

import os
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hosts import Cluster, hosts
from hypothesis import settings

from paragrad.commands import memory, train, verify
from paragrad.errors import Refused
from paragrad.launch import Launcher

# A test does not take its world from the shell that runs it. It takes its data from the shell
# only through the fixture `data`.
for name in list(os.environ):
    if name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ) or name.startswith(("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_")):
        os.environ.pop(name)
# the result of a test depends neither on the speed of the machine nor on values drawn at random
settings.register_profile("untimed", deadline=None, derandomize=True)
settings.load_profile("untimed")
# with this variable, lines that two ranks print at the same time are mixed
os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get("PARAGRAD_TESTS_UNTIL", "inf")):
        pytest.skip(
            "no time is left: PARAGRAD_TESTS_UNTIL is over (.ci/run ends within half an hour)"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the commit as the seed of `PARAGRAD_PART`, so that each commit runs another part.

    The processes of xdist inherit the seed.
    """
    if "PARAGRAD_PART" in os.environ and "PARAGRAD_SEED" not in os.environ:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=config.rootpath,
            capture_output=True,
            text=True,
            check=False,
        )
        os.environ["PARAGRAD_SEED"] = commit.stdout.strip() or "0"


def pytest_report_header() -> list[str]:
    if "PARAGRAD_PART" not in os.environ:
        return []
    part, seed = os.environ["PARAGRAD_PART"], os.environ["PARAGRAD_SEED"]
    return [
        f"one of {part} tests by chance: PARAGRAD_PART={part} PARAGRAD_SEED={seed} repeats them"
    ]


def take_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one of `PARAGRAD_PART` tests, chosen by the seed and the name of the test."""
    if "PARAGRAD_PART" in os.environ:
        part, seed = int(os.environ["PARAGRAD_PART"]), os.environ["PARAGRAD_SEED"]
        parts = [zlib.crc32(f"{seed} {each.nodeid}".encode()) % part for each in items]
        config.hook.pytest_deselected(
            items=[each for each, number in zip(items, parts, strict=True) if number]
        )
        items[:] = [each for each, number in zip(items, parts, strict=True) if not number]


# Files with tests of many seconds. They run first, so that no worker begins one at the end.
LONG = (
    "join",
    "server_floods",
    "failure_recovery",
    "server",
    "federated",
    "memory",
    "compressed_training",
    "verify",
)


@pytest.hookimpl(tryfirst=True)  # before the option -m selects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all rows of a `sample(n)` test as `table`, except every n-th row."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)
    rows: Counter[str] = Counter()
    for item in items:
        if sample := item.get_closest_marker("sample"):
            (every,), test = sample.args, item.nodeid.partition("[")[0]
            place = rows[test]
            rows[test] = rows[test] + 1
            # with several parametrizations, this selects a diagonal
            if (place + place // every) % every:
                item.add_marker(pytest.mark.table)
    take_part(config, items)


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder of real data; skip the test if there is none."""
    if "PARAGRAD_DATA" not in os.environ:
        pytest.skip("PARAGRAD_DATA names no folder with the files of MNIST and tinyshakespeare")
    return Path(os.environ["PARAGRAD_DATA"])


class PersistentLauncher(Launcher):
    """A launcher whose ranks stay alive after a `with`, with the libraries they imported."""

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def pool() -> Iterator[Launcher]:
    """Start four ranks that serve every test of the session.

    A test calls `pool.run(function, *arguments, size=3)`. If a rank waits 20 s for another one,
    or a run takes 60 s, the test fails and names the rank.
    """
    ranks = PersistentLauncher(4)
    run = ranks.run
    ranks.run = lambda *args, timeout=20.0, **kwargs: run(
        *args, timeout=min(timeout, 20.0), **{"deadline": 60.0, **kwargs}
    )
    yield ranks
    ranks.close()


@pytest.fixture
def warm_ranks(pool: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let train, verify and memory use the ranks of `pool`, one test after another."""
    for module in (train, verify, memory):
        monkeypatch.setattr(module, "Launcher", lambda size: pool)


@pytest.fixture(scope="session")
def clusters() -> Callable[..., AbstractContextManager[Cluster]]:
    """Return `benchmarks/hosts.py:hosts`; skip the test if this machine cannot simulate hosts."""
    try:
        with hosts(1, megabits=100):
            return hosts
    except Refused as error:
        pytest.skip(str(error))
