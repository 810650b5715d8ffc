"""Settings: how a training is run.

What is trained is the Job; how it is split is the Strategy.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from math import isfinite, nan
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from paragrad.engine.exchange import ExchangeOptions
from paragrad.errors import Refused, warn_user
from paragrad.executors.machine import Machine, load_machine, read_machine_file
from paragrad.jobs.job import Job
from paragrad.notation.choices import describe_unknown_name
from paragrad.parallel.server.curve_keys import refuse_key_folder
from paragrad.parallel.server.join_endpoint import parse_host_port
from paragrad.planner.simulation import parse_bytes
from paragrad.record import chrome_trace, tensorboard
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.world import DEFAULT_TIMEOUT
from paragrad.schedules.fault_injection import FAULTS
from paragrad.trainer.pace import SlowRanks, read_slow_ranks

DEVICES = ("cpu", "cuda")
BACKENDS = ("auto", "shm", "gloo", "nccl")
MAX_NAME_BYTES = 255  # of a file or folder, in all usual file systems
MAX_TIMEOUT = 2_000_000  # seconds; sockets take no larger number of milliseconds

P = ParamSpec("P")
R = TypeVar("R")

# settings that had another name until version 0.1, and the names that they have now
RENAMED = {
    "sabotage": "inject_fault",
    "unproved": "skip_schedule_check",
    "unchecked": "skip_first_step_check",
    "twin": "rounding_baseline",
}


@dataclass(frozen=True)
class Until:
    """A goal: a run stops after the epoch in which the test reaches `value`.

    Attributes:
        metric: The name of the metric, or "loss".
        value: The value to reach: from above if a lower value is better, otherwise from below.
    """

    metric: str
    value: float

    def is_reached(self, test: float, lower_is_better: bool) -> bool:
        """Return whether a test value reaches the goal.

        Args:
            test: The test value.
            lower_is_better: Whether a lower value is better.
        """
        return test <= self.value if lower_is_better else test >= self.value

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"


@dataclass(frozen=True)
class Settings:
    """How a training is run.

    Attributes:
        data: The folder given to the job's dataset functions.

        device: "cpu" or "cuda".

        backend: One of BACKENDS.

        overlap: Whether gradients are exchanged while backward still runs.

        loaders: The number of processes per rank that load samples ahead.

        save: A checkpoint is written every `save` steps and at the end. None: only when a stop is
            requested.

        keep: "best": the checkpoint of the best test is written, and kept to the end.

        resume: The folder of a run, of which the last checkpoint is resumed, or of one checkpoint.

        until: The goal at which the run stops, such as "accuracy=97.5".

        tensorboard: Whether TensorBoard event files are written too.

        trace: The file for a trace of what every rank did and when, in Perfetto's format.

        memory: What a rank may hold, with batch="fit": "2GB", or a number of bytes.

        machine: A machine file, by which `auto` chooses an all-reduce.

        inject_fault: A fault that is planted in the exchange.

        check: The share of the run's time that comparisons of steps with one worker's take: "1%",
            or 0.01. The steps 1, 2, 4, 8 and 16 and the last one are compared besides. 1: every
            step is compared. 0: none is, not even the first.

        skip_schedule_check: Do not prove the schedules before any rank starts.

        skip_first_step_check: Compare no step with one worker's, and train even if the training is
            known to differ.

        timeout: The seconds that a rank waits for another one.

        slow: Ranks that wait on purpose: "1=3x" or "random:0.2=3x".

        pace: The least seconds of a step over an equal share (`trainer.pace`).

        listen: The address of this host, HOST or HOST:PORT, at which workers may join from other
            hosts.

        allow: The folder of the public keys of workers that may join.

        noise_scale: The gradient noise scale is measured every `noise_scale` steps.

        reverse: Whether every batch is reversed (the rounding baseline of serial).

        limit: The number of steps after which the run stops.
    """

    data: str | Path | None = None
    device: str = "cpu"
    backend: str = "auto"
    overlap: bool = True
    loaders: int = 0
    save: int | None = None
    keep: str | None = None
    resume: str | Path | None = None
    until: str | Until | None = None
    tensorboard: bool = False
    trace: str | Path | None = None
    memory: str | int | None = None
    machine: str | Path | None = None
    inject_fault: str | None = None
    check: str | float = "1%"
    skip_schedule_check: bool = False
    skip_first_step_check: bool = False
    timeout: float = DEFAULT_TIMEOUT
    slow: str | None = None
    pace: float | None = None
    listen: str | None = None
    allow: str | Path | None = None
    noise_scale: int | None = None
    reverse: bool = False
    limit: int | None = None

    @property
    def folder(self) -> Path | None:
        """The data folder as a path."""
        return Path(self.data) if self.data else None

    @property
    def check_share(self) -> float:
        """The share that `check` describes, from 0 to 1. Raises Refused."""
        share = nan
        if isinstance(self.check, bool):
            raise Refused(
                f"check={self.check}: check is the share of the run's time in which steps are "
                "compared with one worker's, such as '1%'; to compare 20 steps with serial after "
                "the training, give verify=True (--verify)"
            )
        with suppress(ValueError, TypeError):
            text = str(self.check).strip()
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if not 0 <= share <= 1:
            raise Refused(
                f"check {self.check}: give a share of the run's time from 0 to 100%, such as 1%"
            )
        return share

    @property
    def goal(self) -> Until | None:
        """The goal that `until` describes. Raises Refused."""
        if not isinstance(self.until, str):
            return self.until
        metric, sign, value = self.until.partition("=")
        try:
            wanted = float(value if sign else "")
        except ValueError:
            wanted = nan
        if not isfinite(wanted):
            raise Refused(f"--until {self.until}: write metric=value, for example accuracy=97.5")
        return Until(metric.strip(), wanted)

    @property
    def memory_budget(self) -> int | None:
        """The bytes that a rank may hold. Raises Refused."""
        allowed = parse_bytes(self.memory) if isinstance(self.memory, str) else self.memory
        if allowed is not None and (
            isinstance(allowed, bool) or not isinstance(allowed, int) or allowed < 1
        ):
            raise Refused(f"memory must be bytes above 0, such as '2GB', got {self.memory!r}")
        return allowed

    @property
    def known_machine(self) -> Machine | None:
        """The machine that the machine file describes. Raises Refused."""
        return read_machine_file(Path(self.machine), count_cores())[0] if self.machine else None

    def has_reached_limit(self, steps: int) -> bool:
        """Return whether `limit` steps are completed.

        Args:
            steps: The number of completed steps.
        """
        return self.limit is not None and steps >= self.limit

    def has_reached_goal(self, test: Mapping[str, float] | None, job: Job) -> bool:
        """Return whether a test reaches the goal.

        Args:
            test: The test's result {"value", ...}, or None if there was no test.
            job: The job.
        """
        return bool(
            self.goal and test and self.goal.is_reached(test["value"], job.wants_lower_tests)
        )

    @property
    def slow_ranks(self) -> SlowRanks:
        """The ranks that `slow` and `pace` describe. Raises Refused."""
        return read_slow_ranks(self.slow, self.pace)

    @property
    def exchange_options(self) -> ExchangeOptions:
        """The settings that an exchange needs."""
        return ExchangeOptions(self.overlap, self.known_machine, self.inject_fault)

    def check_settings(self, job: Job | None = None) -> None:
        """Check the settings before any rank starts, and whether they fit the job.

        Args:
            job: The job, or None if only the settings are checked.

        Raises:
            Refused: If a setting is wrong or does not fit the job.
        """
        self._check_types()
        for name, known in (
            ("device", DEVICES),
            ("backend", BACKENDS),
            ("inject_fault", FAULTS),
            ("keep", ("best",)),
        ):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise Refused(describe_unknown_name(name, str(value), known))
        for name, least in (("loaders", 0), ("save", 1), ("limit", 1), ("noise_scale", 1)):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise Refused(f"{name} must be a whole number from {least}, got {value!r}")
        if (
            isinstance(self.timeout, bool)
            or not isinstance(self.timeout, int | float)
            or not 0 < self.timeout <= MAX_TIMEOUT
        ):
            raise Refused(
                f"timeout must be seconds above 0, and at most {MAX_TIMEOUT:,} (some weeks), got "
                f"{self.timeout!r}"
            )
        if self.folder is not None and not os.path.isdir(self.folder):
            # only a warning: a job may create the folder
            warn_user(f"there is no data folder {self.folder} (--data, PARAGRAD_DATA)")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise Refused(
                "device cuda: torch sees no CUDA device here; leave out --device, or run where a "
                "GPU is"
            )
        if self.backend == "nccl" and self.device != "cuda":
            raise Refused(
                "backend nccl moves tensors between GPUs; add --device cuda, or leave out --backend"
            )
        read_slow_ranks(self.slow, self.pace)
        if self.listen is not None or self.allow is not None:
            self._check_join_settings()
        if self.tensorboard:
            tensorboard.check_tensorboard()
        if self.trace is not None:
            chrome_trace.check_trace_path(Path(self.trace))
        if self.machine:
            # This refuses a file that is no machine file, and warns about another machine's file.
            load_machine(Path(self.machine), count_cores())
        if self.memory_budget is not None and job is not None and job.batch != "fit":
            raise Refused(
                f"memory {self.memory} says what a rank may hold when paragrad finds the batch; "
                f"give batch='fit' (--batch fit) instead of {job.batch!r}, or leave it out"
            )
        if job is not None:
            self._check_goal(job)

    def _check_types(self) -> None:
        for name in ("data", "resume", "machine", "trace", "allow"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, str | Path) and str(value).isprintable()
            ):
                raise Refused(f"{name} must be a path, got {value!r}")
            if value is not None and any(
                len(os.fsencode(part)) > MAX_NAME_BYTES for part in Path(value).parts
            ):
                raise Refused(f"{name} has a name of more than {MAX_NAME_BYTES} bytes; shorten it")
        for name in (
            "overlap",
            "tensorboard",
            "skip_schedule_check",
            "skip_first_step_check",
            "reverse",
        ):
            if not isinstance(getattr(self, name), bool):
                raise Refused(f"{name} must be True or False, got {getattr(self, name)!r}")
        _ = self.check_share
        if not isinstance(self.until, str | Until | None):
            raise Refused(f"until must be a text such as 'accuracy=97.5', got {self.until!r}")

    def _check_join_settings(self) -> None:
        if self.listen is None or self.allow is None:
            raise Refused(
                "--listen says where workers may join from other hosts, and --allow is the folder "
                "of their public keys; give both, or neither"
            )
        if not isinstance(self.listen, str):
            raise Refused(f"listen must be a text such as '10.0.0.1:4000', got {self.listen!r}")
        parse_host_port("--listen", self.listen)
        refuse_key_folder(Path(self.allow))

    def _check_goal(self, job: Job) -> None:
        if self.keep and job.test is None:
            raise Refused(f"keep={self.keep}: job {job.name} has no test set; give it test=...")
        goal = self.goal
        if goal is None:
            return
        if job.test is None:
            raise Refused(f"--until {goal}: job {job.name} has no test set; give it test=...")
        if goal.metric != job.metric_name:
            raise Refused(
                f"--until {goal}: job {job.name} measures {job.metric_name}; write "
                f"{job.metric_name}={goal.value:g}"
            )


def refuse_old_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: an argument under its old name is refused with the new one.

    Args:
        function: A function whose keyword arguments are settings.
    """

    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def check_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
        _refuse_old_names(kwargs, known)
        return function(*args, **kwargs)

    return check_and_call


def _refuse_old_names(names: Iterable[str], known: Container[str]) -> None:
    """Refuse a name that is now called otherwise, if the new name is known there."""
    if old := next((name for name in names if RENAMED.get(name) in known), None):
        raise Refused(f"{old} is now called {RENAMED[old]}")


def name_in_records(name: str) -> str:
    """Return the JSON key of a setting: records keep the keys that they always had."""
    return next((old for old, new in RENAMED.items() if new == name), name)


def build_settings(values: dict[str, Any]) -> Settings:
    """Build settings from values by name.

    Args:
        values: The values by the names of the fields.

    Raises:
        Refused: If a name is unknown; the message suggests the nearest one.
    """
    known = [each.name for each in fields(Settings)]
    _refuse_old_names(values, known)
    for name in values:
        if name not in known:
            raise Refused(describe_unknown_name("setting", name, known))
    return Settings(**values)
