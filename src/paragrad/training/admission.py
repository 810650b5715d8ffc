"""The door: a job, a strategy and settings are checked together before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.players.proof import PROVED, prove
from paragrad.schedules.actions import ScheduleError
from paragrad.schedules.sabotage import sabotaged
from paragrad.strategies.strategy import Data, Native, Serial, Strategy, refuse_unbuilt, resolve, share_weights, strategy
from paragrad.training import checkpoint
from paragrad.training.door import Facts, examined, uncut
from paragrad.training.first_step.causes import by_layout
from paragrad.training.settings import Settings
from paragrad.world.backends.shm.region import unavailable
from paragrad.world.joining import check_interfaces, launched_size, ranks_here
from paragrad.world.launched import cores
from paragrad.world.launching import files


@dataclass(frozen=True)
class Admitted:
    """A job, a strategy and settings that passed the door together."""
    job: Job
    asked: Strategy
    resolved: Strategy
    settings: Settings
    facts: Facts
    saved: checkpoint.Saved | None = None           # what to go on from
    tried: str | None = None                        # what a trial saw (`trial.py`)

    @property
    def size(self) -> int:
        assert isinstance(self.resolved.workers, int)
        return self.resolved.workers

    @property
    def threads(self) -> int:
        return threads_of(self.resolved)

    @property
    def backend(self) -> str:
        return backend_of(self.settings, self.size)

    @property
    def not_shm(self) -> str | None:
        return not_shm(self.size)

    def with_seed(self, seed: int) -> Admitted:
        """The same training under another seed."""
        job = self.job.replace(seed=seed)
        return replace(self, job=job, facts=replace(self.facts, order=job.order(self.facts.samples)))


def admitted(job: Job, asked: str | Strategy, settings: Settings | None = None, facts: Facts | None = None) -> Admitted:
    """Check job, strategy and settings at the door. Raises Refused with the repair."""
    if not isinstance(job, Job):
        raise Refused(f"a job is a paragrad.Job; got {type(job).__name__}")
    if files.running:
        raise Refused(f"{files.running[-1]} trains at its top level, which every rank runs too; put the call under "
                      'if __name__ == "__main__":')
    settings = settings or Settings()
    asked = strategy(asked)
    refuse_unbuilt(asked)
    settings.check(job)
    resolved = resolve(asked, cores=cores(), workers=launched_size(), sharing=not_sharing(settings) is None,
                       own=backend_of(settings, launched_size() or 2) != "gloo", group=ranks_here())
    if isinstance(resolved, Data) and resolved.state == "shared_memory" and (why := not_sharing(settings)):
        raise Refused(f"{asked}: {why}; leave out state=shared_memory")
    facts = facts or examined(job, settings.folder)
    job = facts.ready(job)
    full = min(job.batch, facts.samples)
    if isinstance(resolved.workers, int) and full < resolved.workers:
        raise Refused(f"{asked} has {resolved.workers} workers and the full batch {full} sample(s); "
                      f"give a batch of at least {resolved.workers}, or fewer workers")
    if share_weights(resolved)[1] > 1 and (why := uncut(job, settings.folder)):
        raise Refused(f"job {job.name}: {why}")
    check_schedule(asked, resolved, settings)
    if resolved.exact and not settings.unchecked and share_weights(resolved) != ([1], 1):
        if facts.whole_loss:
            raise Refused(f"job {job.name}: {facts.whole_loss}")
        if facts.probe.draws.by_layout:
            raise Refused(f"{asked}: {by_layout(facts.probe.draws.by_layout)}")
    saved = checkpoint.found(Path(settings.resume), job, facts) if settings.resume else None
    found = Admitted(job, asked, resolved, settings, facts, saved)
    backend_of(settings, found.size)
    return found


def threads_of(resolved: Strategy) -> int:
    """Threads of each rank: the host's cores divided, unless serial says otherwise."""
    if isinstance(resolved, Serial):
        assert isinstance(resolved.threads, int)
        return resolved.threads
    assert isinstance(resolved.workers, int)
    return max(1, cores() // (ranks_here() or resolved.workers))


def backend_of(settings: Settings, size: int) -> str:
    """What carries the ranks' messages: shm where all are on this host and on the CPU, NCCL where each has a GPU of its own,
    otherwise gloo. Raises Refused where what is asked for cannot be.
    """
    here, gpus = ranks_here() or size, torch.cuda.device_count()
    if settings.backend == "nccl" and here > gpus:
        raise Refused(f"backend nccl wants a GPU per rank; here are {gpus} for {here} ranks: leave out --backend, and they "
                      "exchange through the host")
    if settings.backend == "shm" and (why := not_shm(size)):
        raise Refused(f"{why}; leave out --backend")
    found = settings.backend
    if found == "auto" and settings.device == "cuda":
        found = "nccl" if here <= gpus else "gloo"
    elif found == "auto":
        found = "gloo" if not_shm(size) else "shm"
    if size > 1 and found != "shm":
        check_interfaces()
    return found


def not_shm(size: int) -> str | None:
    """Why ranks on the CPU cannot talk through shared memory, or None."""
    elsewhere = size - (ranks_here() or size)
    return f"{elsewhere} of {size} ranks are on other hosts" if elsewhere else unavailable()


def not_sharing(settings: Settings) -> str | None:
    """Why the ranks cannot keep parameters in one memory, or None."""
    if settings.device != "cpu":
        return f"parameters on {settings.device} are each rank's own"
    return not_shm(launched_size() or 1)


def check_schedule(asked: Strategy, resolved: Strategy, settings: Settings) -> None:
    """Prove the all-reduce at the size of this world, before any rank starts."""
    if not isinstance(resolved, Data) or isinstance(resolved.reduce, Native | str):
        if settings.sabotage:
            raise Refused(f"{asked} has no schedule to sabotage; name an algorithm, such as data(2, reduce=ring)")
        return
    assert isinstance(resolved.workers, int)
    schedule: Any = sabotaged(resolved.reduce, settings.sabotage)
    if settings.unproved or resolved.workers > PROVED:
        return
    try:
        prove(schedule, resolved.workers, resolved.workers * schedule.parts(resolved.workers))
    except ScheduleError as error:
        raise Refused(f"{schedule} is no all-reduce of {resolved.workers} ranks: {error}; mend the schedule "
                      "(--unproved runs it all the same)") from None
