"""The door: a job, a strategy and settings are checked together before any rank starts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from paragrad.datasets.clients import Rounds
from paragrad.datasets.loading import brought, parted
from paragrad.engine.gradient_noise import unmeasured
from paragrad.engine.layout import hollow
from paragrad.engine.optimizer.update_probe import updates_by
from paragrad.engine.optimizer.update_slices import FOREACH
from paragrad.engine.state.preserve_state import untouched
from paragrad.errors import Refused, StepFailed
from paragrad.executors.proof import GOALS, check
from paragrad.jobs.job import CPU, Job, opened
from paragrad.jobs.loss import Summed
from paragrad.launch import Ranks, job_files
from paragrad.notation.choices import Integer, Integers
from paragrad.parallel.registry import bringing, checks_of, cuts, ours
from paragrad.parallel.server.join_endpoint import read_place, refuse_place
from paragrad.runtime.generators import generators_kept
from paragrad.runtime.launcher_env import cores
from paragrad.runtime.mesh import grid
from paragrad.runtime.rendezvous import check_interfaces, launched_size, ranks_here
from paragrad.schedules.fault_injection import sabotaged
from paragrad.shm.region import unavailable
from paragrad.strategies.registry import resolve, strategy
from paragrad.strategies.strategy import KINDS, Here, Promise, Strategy, factors_of
from paragrad.trainer.checkpoint.checkpoint_files import Saved
from paragrad.trainer.evaluation import refuse_gradients
from paragrad.trainer.model_partition import refuse_optimizer
from paragrad.trainer.parameter_access import refuse_reading, refuse_views
from paragrad.trainer.settings import Settings
from paragrad.validation import resume_check
from paragrad.validation.inspect_job import Findings, examined
from paragrad.validation.inspected_job import Asked
from paragrad.validation.memory_check import refuse_crowded
from paragrad.validation.round_planning import (
    labels_wanted,
    refuse_lone,
    refuse_many,
    refuse_schedule,
    refuse_wrapped,
    rounds_of,
)


@dataclass(frozen=True)
class Admitted:
    """A job, a strategy and settings that passed the door together."""

    job: Job
    asked: Strategy
    resolved: Strategy
    settings: Settings
    facts: Findings
    here: Here
    backend: str  # what carries the ranks' messages
    saved: Saved | None = None  # what to go on from
    tried: str | None = None  # what a trial saw (`trial.py`)
    # why the batch is as large as it is, where it was found (`fit.py`)
    fitted: str | None = None
    # of every sample its class, where clients are divided by it
    labels: Any = None

    @functools.cached_property
    def rounds(self) -> Rounds | None:
        """Of a training in rounds."""
        return rounds_of(self.resolved, self.facts.order, self.job.epochs, self.labels)

    @property
    def size(self) -> int:
        return self.resolved.size

    @property
    def threads(self) -> int:
        return threads_of(self.resolved)

    @property
    def not_shm(self) -> str | None:
        return not_shm(self.size)

    def with_seed(self, seed: int) -> Admitted:
        """The same training under another seed."""
        job = self.job.replace(seed=seed)
        return replace(
            self, job=job, facts=replace(self.facts, order=job.order(self.facts.samples))
        )

    def on(
        self,
        ranks: Ranks,
        function: Callable[..., Any],
        *arguments: Any,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """function(world, *arguments) on as many ranks as the strategy wants: the answers of
        all. Raises RankFailed.
        """
        return ranks.run(
            function,
            *arguments,
            size=self.size,
            threads=self.threads,
            backend=self.backend,
            device=self.settings.device,
            timeout=self.settings.timeout,
            on_report=on_report,
        )


@generators_kept()
def admitted(
    job: Job, asked: str | Strategy, settings: Settings | None = None, facts: Findings | None = None
) -> Admitted:
    """Check job, strategy and settings at the door, which leaves the generators of this
    process, a user's, as they are. Raises Refused with the repair.
    """
    if not isinstance(job, Job):
        raise Refused(f"a job is a paragrad.Job; got {type(job).__name__}")
    if job_files.running:
        raise Refused(
            f"{job_files.running[-1]} trains at its top level, which every rank runs too; "
            f"put the call under "
            'if __name__ == "__main__":'
        )
    settings = settings or Settings()
    asked = strategy(asked)
    settings.check(job)
    here = here_for(settings)
    resolved = ready(asked, here)
    facts = facts or examined(job, settings.folder)
    job = facts.ready(job)
    about = Asked(job, facts, settings.folder, settings.limit)
    with asking(asked):
        resolved.refuse(about, asked, settings.unchecked)
        resolved.refuse_updates(about, asked)
    check_cut(job, asked, resolved, settings.folder, facts.probe.known)
    refuse_crowded(job, asked, resolved, facts, settings.folder, settings.device)
    check_plans(asked, resolved, settings)
    if resolved.hands_out and settings.loaders:
        raise Refused(
            f"{asked} hands out samples one share at a time, so nothing can be loaded ahead; leave "
            f"out --loaders"
        )
    if settings.listen is not None:
        if not resolved.hands_out or here.ranks is not None:
            raise Refused(
                "--listen: workers join where samples are handed out, under paragrad's own "
                "launcher, and "
                + (
                    f"{asked} divides each batch among its own; give server(n, sync=asp), ssp or "
                    f"bsp(backup=1)"
                    if here.ranks is None
                    else "another one started this; start it without"
                )
            )
        refuse_place(read_place("--listen", settings.listen), 1 + resolved.servers)
    if settings.noise_scale and (why := unmeasured(resolved)):
        raise Refused(f"{asked}: the gradient noise scale {why}")
    backend = backend_of(settings, resolved.size)
    checked = Admitted(
        job,
        asked,
        resolved,
        settings,
        facts,
        here,
        backend,
        labels=labels_wanted(job, asked, resolved, settings.folder),
    )
    refuse_many(checked.rounds, asked)
    refuse_lone(checked.rounds, about, asked)
    refuse_schedule(checked.rounds, facts, asked, job.name)
    refuse_wrapped(checked.rounds, job, asked)
    with asking(asked):
        for notice in resolved.noticed(about, asked):
            warnings.warn(notice, stacklevel=2)
    if not settings.resume:
        return checked
    return replace(
        checked, saved=resume_check.found(Path(settings.resume), job, facts, checked.rounds)
    )


def here_for(settings: Settings, own_loop: bool = False) -> Here:
    """Where a training with these settings is to run. own_loop: the user's."""
    ranks = launched_size()
    return Here(
        cores(),
        ranks or 1 if own_loop else ranks,
        ranks_here(),
        not_sharing(settings),
        backend_of(settings, ranks or (1 if own_loop else 2)),
        own_loop,
    )


def ready(asked: Strategy, here: Here) -> Strategy:
    """A strategy resolved, its answers looked at: a user's own may leave some out, or
    contradict itself. Raises Refused.
    """
    for factor in _own(asked):
        for name, repair in (
            ("workers", "give it the field `workers: int = option(Integer())`"),
            ("promise", "give it a property `promise`, such as Promise(exact=False)"),
            (
                "exchange",
                "give it a method `exchange(self, replica, world, log, how)` that returns one, or "
                "`share(self, model, example, axis)` where its axes divide the model",
            ),
        ):
            if inspect.getattr_static(factor, name, None) is None and not (
                name == "exchange" and cuts(factor)
            ):
                raise Refused(f"{_called(factor)} has no {name}; {repair}")
    with asking(asked):
        found = resolve(asked, here)
        _check_answers(asked, found)
    return found


@contextlib.contextmanager
def asking(asked: Strategy) -> Iterator[None]:
    """Around questions to a strategy: a user's own may raise anything. Raises Refused."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused) or not _own(asked):
            raise
        who = " * ".join(map(_called, _own(asked)))
        raise Refused(
            f"{who}, asked about itself, raised {type(error).__name__}: {error}; mend it"
        ) from error


def _own(asked: Strategy) -> list[Strategy]:
    """The factors that are a user's own."""
    return [factor for factor in factors_of(asked) if not ours(factor)]


def _called(own: Strategy) -> str:
    return f"{type(own).__module__}.{type(own).__qualname__}"


def _check_answers(asked: Strategy, found: Strategy) -> None:
    """What a strategy says of itself fits together. Raises Refused."""
    if not isinstance(found, type(asked)):
        raise Refused(
            f"{asked}, resolved, is {found!r}; let resolved return one of its own kind, such as "
            f"replace(self, ...)"
        )
    if not isinstance(found.promise, Promise):
        raise Refused(
            f"{asked} promises {found.promise!r}; let it be a Promise, such as Promise(exact=False)"
        )
    if found.size - found.servers != found.workers:
        raise Refused(
            f"{asked} has {found.workers} workers, and axes of {found.size - found.servers} ranks: "
            + " x ".join(f"{axis.name} {axis.size}" for axis in found.axes)
            + "; their product is the number of workers"
        )
    grid(found.axes, found.size - found.servers)
    along = (
        1
        if found.in_rounds
        else prod(axis.size for axis in found.axes if axis.divides == "samples")
    )
    if len(found.division.shares) != along:
        raise Refused(
            f"{asked} divides a batch into {len(found.division.shares)} shares, and its axes have "
            f"{along} replicas; "
            "give one share per replica"
        )
    for axis in found.axes:
        if axis.divides not in ("samples", "domain", "model"):
            raise Refused(
                f"{asked}: axis {axis.name} divides {axis.divides!r}; let it divide samples, "
                f"domain or model"
            )
    for what, value in (
        ("shares", found.division.shares),
        ("micro", found.division.micro),
        ("threads", found.threads or 1),
    ):
        if value not in (Integers() if isinstance(value, tuple) else Integer()):
            raise Refused(f"{asked} says {what} {value!r}; let it be of whole numbers from 1")
    if found.batch_norm not in ("whole", "share"):
        raise Refused(f"{asked} says batch_norm {found.batch_norm!r}; let it be whole or share")
    _check_factors(found)
    if strange := [plan.what for plan in found.plans() if plan.what not in GOALS]:
        raise Refused(
            f"{asked} plans {strange[0]!r}, which nobody can prove; known: {', '.join(GOALS)}"
        )


def _check_factors(found: Strategy) -> None:
    """Of a product one factor at most divides samples, has an exchange, has passes. Raises
    Refused.
    """
    factors = factors_of(found)
    if len(factors) > 1 and (serving := [factor for factor in factors if factor.servers]):
        raise Refused(
            f"{found}: {serving[0]} has servers, which know no other axes; leave the other factors "
            f"out"
        )
    dividing = [
        factor for factor in factors if any(axis.divides == "samples" for axis in factor.axes)
    ]
    if len(dividing) > 1:
        raise Refused(
            f"{found}: {' and '.join(map(str, dividing))} both divide the samples of a batch; at "
            f"most one factor of "
            "a product can"
        )
    for what in ("exchange", "passes"):
        if len(both := bringing(found, what)) > 1:
            raise Refused(
                f"{found}: {' and '.join(map(str, both))} both bring {what} of their own; at most "
                f"one factor of a "
                "product can"
            )


def threads_of(resolved: Strategy) -> int:
    """Threads of each rank: the host's cores divided, unless the strategy says otherwise."""
    if isinstance(resolved.threads, int):
        return resolved.threads
    return max(1, cores() // (ranks_here() or resolved.size))


def backend_of(settings: Settings, size: int) -> str:
    """What carries the ranks' messages: shm where all are on this host and on the CPU, NCCL
    where each has a GPU of its own, otherwise gloo. Raises Refused where what is asked for
    cannot be.
    """
    here = ranks_here() or size
    gpus = torch.cuda.device_count()
    if settings.backend == "nccl" and here > gpus:
        raise Refused(
            f"backend nccl wants a GPU per rank; here are {gpus} for {here} ranks: leave out "
            f"--backend, and they "
            "exchange through the host"
        )
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


def check_cut(
    job: Job, asked: Strategy, resolved: Strategy, data: Path | None, known: bool
) -> None:
    """Refuse a model that cannot be cut as asked for, tried on two samples; and what would not
    follow parts or shards of it. known: the weight of its loss is read off the graph.
    """
    if not cuts(resolved) and not resolved.sharded:
        return
    if resolved.sharded and not hasattr(torch.distributed, "reduce_scatter_single"):
        raise Refused(
            f"{asked} wants torch 2.13 or later, and this is {torch.__version__}; leave out "
            f"state=fully_sharded"
        )
    samples = job.samples(opened(job.train, data))
    places = list(range(min(len(samples), job.batch, 2)))
    inputs, target = brought(parted(samples[0, places]), CPU, job.parameter_dtype)
    try:
        module = Summed(job.built_model(), job.built_loss())
        if togethers := [factor.together for factor in factors_of(resolved) if factor.inside]:
            optimizer = job.optimizer(module.model.parameters())
            refuse_optimizer(
                asked,
                optimizer,
                updates_by(optimizer, known=type(optimizer) in FOREACH),
                min(togethers, key=KINDS.index),
            )
        refuse_views(module.model)
        hollow(module.model)  # can it be copied?
        refuse_reading(module, inputs, target)
        if cuts(resolved) and job.test is not None and job.metric is None and not known:
            refuse_gradients(module, inputs, target, len(places))
        for cuttable in checks_of(resolved):
            module = Summed(job.built_model(), job.built_loss())
            with untouched(module):
                cuttable(module.model, inputs, job.test is not None)
    except StepFailed as error:
        raise Refused(f"job {job.name}, {asked}: {error}") from error


def check_plans(asked: Strategy, resolved: Strategy, settings: Settings) -> None:
    """Prove the schedules of a strategy at the size of this world, before any rank starts."""
    plans = resolved.plans()
    if settings.sabotage and not plans:
        raise Refused(
            f"{asked} has no schedule to sabotage; name an algorithm, such as data(2, reduce=ring)"
        )
    for plan in () if settings.unproved else plans:
        try:
            check(sabotaged(plan.schedule, settings.sabotage), plan.size, plan.what)
        except Refused as error:
            raise Refused(f"{error} (--unproved runs it all the same)") from None
