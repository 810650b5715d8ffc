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

from paragrad.datasets.clients import ClientRounds
from paragrad.datasets.loading import convert_batch, separate_target
from paragrad.engine.gradient_noise import explain_no_measurement
from paragrad.engine.layout import build_empty_model
from paragrad.engine.optimizer.update_probe import find_update_granularity
from paragrad.engine.optimizer.update_slices import FOREACH_OPTIMIZERS
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.errors import Refused, StepFailed
from paragrad.executors.proof import GOALS, check_schedule
from paragrad.jobs.job import CPU, Job, open_dataset
from paragrad.jobs.loss import LossModule
from paragrad.launch import Launcher, job_files
from paragrad.notation.choices import Integer, IntegerList
from paragrad.parallel.registry import (
    has_model_shards,
    is_builtin_technique,
    list_model_checks,
    select_factors,
)
from paragrad.parallel.server.join_endpoint import parse_host_port, refuse_host_port
from paragrad.runtime.generators import keep_generators
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.mesh import build_grid
from paragrad.runtime.rendezvous import (
    check_network_interfaces,
    count_local_ranks,
    get_launched_size,
)
from paragrad.schedules.fault_injection import inject_fault
from paragrad.shm.region import explain_unavailable_shm
from paragrad.strategies.registry import resolve_strategy, strategy
from paragrad.strategies.strategy import (
    UPDATE_GRANULARITIES,
    Environment,
    Guarantees,
    Strategy,
    list_factors,
)
from paragrad.trainer.checkpoint.checkpoint_files import SavedCheckpoint
from paragrad.trainer.evaluation import refuse_gradient_loss
from paragrad.trainer.model_partition import refuse_unfit_optimizer
from paragrad.trainer.parameter_access import refuse_loss_reading_parameters, refuse_parameter_views
from paragrad.trainer.settings import Settings
from paragrad.validation import resume_check
from paragrad.validation.inspect_job import JobInspection, inspect_job
from paragrad.validation.inspected_job import InspectedJob
from paragrad.validation.memory_check import refuse_insufficient_memory
from paragrad.validation.round_planning import (
    plan_rounds,
    read_client_labels,
    refuse_many_rounds,
    refuse_round_schedule,
    refuse_single_sample_clients,
    refuse_wrapped_tensors,
)


@dataclass(frozen=True)
class ValidatedRun:
    """A job, a strategy and settings that passed the door together."""

    job: Job
    requested: Strategy
    resolved: Strategy
    settings: Settings
    inspection: JobInspection
    environment: Environment
    backend: str  # what carries the ranks' messages
    resume_checkpoint: SavedCheckpoint | None = None  # what to go on from
    trial_result: str | None = None  # what a trial saw (`trial.py`)
    # why the batch is as large as it is, where it was found (`fit.py`)
    batch_reason: str | None = None
    # of every sample its class, where clients are divided by it
    labels: Any = None

    @functools.cached_property
    def rounds(self) -> ClientRounds | None:
        """Of a training in rounds."""
        return plan_rounds(self.resolved, self.inspection.order, self.job.epochs, self.labels)

    @property
    def size(self) -> int:
        return self.resolved.size

    @property
    def threads(self) -> int:
        return choose_thread_count(self.resolved)

    @property
    def shm_obstacle(self) -> str | None:
        return explain_no_shm(self.size)

    def replace_seed(self, seed: int) -> ValidatedRun:
        """The same training under another seed."""
        job = self.job.replace(seed=seed)
        return replace(
            self,
            job=job,
            inspection=replace(self.inspection, order=job.make_order(self.inspection.samples)),
        )

    def run_on_ranks(
        self,
        launcher: Launcher,
        function: Callable[..., Any],
        *arguments: Any,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """function(world, *arguments) on as many ranks as the strategy wants: the answers of
        all. Raises RankFailed.
        """
        return launcher.run(
            function,
            *arguments,
            size=self.size,
            threads=self.threads,
            backend=self.backend,
            device=self.settings.device,
            timeout=self.settings.timeout,
            on_report=on_report,
        )


@keep_generators()
def validate_run(
    job: Job,
    requested: str | Strategy,
    settings: Settings | None = None,
    inspection: JobInspection | None = None,
) -> ValidatedRun:
    """Check job, strategy and settings at the door, which leaves the generators of this
    process, a user's, as they are. Raises Refused with the repair.
    """
    if not isinstance(job, Job):
        raise Refused(f"a job is a paragrad.Job; got {type(job).__name__}")
    if job_files.running_files:
        raise Refused(
            f"{job_files.running_files[-1]} trains at its top level, which every rank runs too; "
            f"put the call under "
            'if __name__ == "__main__":'
        )
    settings = settings or Settings()
    requested = strategy(requested)
    settings.check_settings(job)
    here = detect_environment(settings)
    resolved = resolve_and_check_strategy(requested, here)
    inspection = inspection or inspect_job(job, settings.folder)
    job = inspection.prepare_job(job)
    about = InspectedJob(job, inspection, settings.folder, settings.limit)
    with convert_strategy_errors(requested):
        resolved.refuse_job(about, requested, settings.skip_first_step_check)
        resolved.refuse_optimizer(about, requested)
    check_partitioning(job, requested, resolved, settings.folder, inspection.probe.weight_known)
    refuse_insufficient_memory(
        job, requested, resolved, inspection, settings.folder, settings.device
    )
    prove_strategy_schedules(requested, resolved, settings)
    if resolved.uses_work_queue and settings.loaders:
        raise Refused(
            f"{requested} hands out samples one share at a time, so nothing can be loaded ahead; "
            f"leave "
            f"out --loaders"
        )
    if settings.listen is not None:
        if not resolved.uses_work_queue or here.ranks is not None:
            raise Refused(
                "--listen: workers join where samples are handed out, under paragrad's own "
                "launcher, and "
                + (
                    f"{requested} divides each batch among its own; give server(n, sync=asp), ssp "
                    f"or "
                    f"bsp(backup=1)"
                    if here.ranks is None
                    else "another one started this; start it without"
                )
            )
        refuse_host_port(parse_host_port("--listen", settings.listen), 1 + resolved.servers)
    if settings.noise_scale and (why := explain_no_measurement(resolved)):
        raise Refused(f"{requested}: the gradient noise scale {why}")
    backend = choose_backend(settings, resolved.size)
    checked = ValidatedRun(
        job,
        requested,
        resolved,
        settings,
        inspection,
        here,
        backend,
        labels=read_client_labels(job, requested, resolved, settings.folder),
    )
    refuse_many_rounds(checked.rounds, requested)
    refuse_single_sample_clients(checked.rounds, about, requested)
    refuse_round_schedule(checked.rounds, inspection, requested, job.name)
    refuse_wrapped_tensors(checked.rounds, job, requested)
    with convert_strategy_errors(requested):
        for notice in resolved.list_warnings(about, requested):
            warnings.warn(notice, stacklevel=2)
    if not settings.resume:
        return checked
    return replace(
        checked,
        resume_checkpoint=resume_check.find_checkpoint(
            Path(settings.resume), job, inspection, checked.rounds
        ),
    )


def detect_environment(settings: Settings, has_own_loop: bool = False) -> Environment:
    """Where a training with these settings is to run. own_loop: the user's."""
    ranks = get_launched_size()
    return Environment(
        count_cores(),
        ranks or 1 if has_own_loop else ranks,
        count_local_ranks(),
        explain_no_shared_parameters(settings),
        choose_backend(settings, ranks or (1 if has_own_loop else 2)),
        has_own_loop,
    )


def resolve_and_check_strategy(requested: Strategy, environment: Environment) -> Strategy:
    """A strategy resolved, its answers looked at: a user's own may leave some out, or
    contradict itself. Raises Refused.
    """
    for factor in _list_custom_factors(requested):
        for name, repair in (
            ("workers", "give it the field `workers: int = option(Integer())`"),
            ("guarantees", "give it a property `guarantees`, such as Guarantees(exact=False)"),
            (
                "make_exchange",
                "give it a method `make_exchange(self, replica, world, log, options)` that returns "
                "one, or `shard_model(self, model, example, axis)` where its axes divide the model",
            ),
        ):
            if inspect.getattr_static(factor, name, None) is None and not (
                name == "make_exchange" and has_model_shards(factor)
            ):
                raise Refused(f"{_qualify_strategy_name(factor)} has no {name}; {repair}")
    with convert_strategy_errors(requested):
        found = resolve_strategy(requested, environment)
        _check_resolved_strategy(requested, found)
    return found


@contextlib.contextmanager
def convert_strategy_errors(requested: Strategy) -> Iterator[None]:
    """Around questions to a strategy: a user's own may raise anything. Raises Refused."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused) or not _list_custom_factors(requested):
            raise
        who = " * ".join(map(_qualify_strategy_name, _list_custom_factors(requested)))
        raise Refused(
            f"{who}, asked about itself, raised {type(error).__name__}: {error}; mend it"
        ) from error


def _list_custom_factors(requested: Strategy) -> list[Strategy]:
    """The factors that are a user's own."""
    return [factor for factor in list_factors(requested) if not is_builtin_technique(factor)]


def _qualify_strategy_name(factor: Strategy) -> str:
    return f"{type(factor).__module__}.{type(factor).__qualname__}"


def _check_resolved_strategy(requested: Strategy, resolved: Strategy) -> None:
    """What a strategy says of itself fits together. Raises Refused."""
    if not isinstance(resolved, type(requested)):
        raise Refused(
            f"{requested}, resolved, is {resolved!r}; let resolve() return one of its own kind, "
            f"such as "
            f"replace(self, ...)"
        )
    if not isinstance(resolved.guarantees, Guarantees):
        raise Refused(
            f"{requested} promises {resolved.guarantees!r}; let it be Guarantees, such as "
            f"Guarantees(exact=False)"
        )
    if resolved.size - resolved.servers != resolved.workers:
        raise Refused(
            f"{requested} has {resolved.workers} workers, and axes of "
            f"{resolved.size - resolved.servers} ranks: "
            + " x ".join(f"{axis.name} {axis.size}" for axis in resolved.axes)
            + "; their product is the number of workers"
        )
    build_grid(resolved.axes, resolved.size - resolved.servers)
    along = (
        1
        if resolved.trains_clients
        else prod(axis.size for axis in resolved.axes if axis.divides == "samples")
    )
    if len(resolved.division.shares) != along:
        raise Refused(
            f"{requested} divides a batch into {len(resolved.division.shares)} shares, and its "
            f"axes have "
            f"{along} replicas; "
            "give one share per replica"
        )
    for axis in resolved.axes:
        if axis.divides not in ("samples", "domain", "model"):
            raise Refused(
                f"{requested}: axis {axis.name} divides {axis.divides!r}; let it divide samples, "
                f"domain or model"
            )
    for what, value in (
        ("shares", resolved.division.shares),
        ("micro", resolved.division.micro),
        ("threads", resolved.threads or 1),
    ):
        if value not in (IntegerList() if isinstance(value, tuple) else Integer()):
            raise Refused(f"{requested} says {what} {value!r}; let it be of whole numbers from 1")
    if resolved.batch_norm not in ("whole", "share"):
        raise Refused(
            f"{requested} says batch_norm {resolved.batch_norm!r}; let it be whole or share"
        )
    _check_factor_conflicts(resolved)
    if strange := [plan.goal for plan in resolved.plan_schedules() if plan.goal not in GOALS]:
        raise Refused(
            f"{requested} plans {strange[0]!r}, which nobody can prove; known: {', '.join(GOALS)}"
        )


def _check_factor_conflicts(resolved: Strategy) -> None:
    """Of a product one factor at most divides samples, has an exchange, has passes. Raises
    Refused.
    """
    factors = list_factors(resolved)
    if len(factors) > 1 and (serving := [factor for factor in factors if factor.servers]):
        raise Refused(
            f"{resolved}: {serving[0]} has servers, which know no other axes; leave the other "
            f"factors "
            f"out"
        )
    dividing = [
        factor for factor in factors if any(axis.divides == "samples" for axis in factor.axes)
    ]
    if len(dividing) > 1:
        raise Refused(
            f"{resolved}: {' and '.join(map(str, dividing))} both divide the samples of a batch; "
            f"at "
            f"most one factor of "
            "a product can"
        )
    for what, function in (("exchange", "make_exchange"), ("passes", "make_passes")):
        if len(both := select_factors(resolved, function)) > 1:
            raise Refused(
                f"{resolved}: {' and '.join(map(str, both))} both bring {what} of their own; at "
                f"most "
                f"one factor of a "
                "product can"
            )


def choose_thread_count(resolved: Strategy) -> int:
    """Threads of each rank: the host's cores divided, unless the strategy says otherwise."""
    if isinstance(resolved.threads, int):
        return resolved.threads
    return max(1, count_cores() // (count_local_ranks() or resolved.size))


def choose_backend(settings: Settings, size: int) -> str:
    """What carries the ranks' messages: shm where all are on this host and on the CPU, NCCL
    where each has a GPU of its own, otherwise gloo. Raises Refused where what is asked for
    cannot be.
    """
    here = count_local_ranks() or size
    gpus = torch.cuda.device_count()
    if settings.backend == "nccl" and here > gpus:
        raise Refused(
            f"backend nccl wants a GPU per rank; here are {gpus} for {here} ranks: leave out "
            f"--backend, and they "
            "exchange through the host"
        )
    if settings.backend == "shm" and (why := explain_no_shm(size)):
        raise Refused(f"{why}; leave out --backend")
    found = settings.backend
    if found == "auto" and settings.device == "cuda":
        found = "nccl" if here <= gpus else "gloo"
    elif found == "auto":
        found = "gloo" if explain_no_shm(size) else "shm"
    if size > 1 and found != "shm":
        check_network_interfaces()
    return found


def explain_no_shm(size: int) -> str | None:
    """Why ranks on the CPU cannot talk through shared memory, or None."""
    elsewhere = size - (count_local_ranks() or size)
    return (
        f"{elsewhere} of {size} ranks are on other hosts"
        if elsewhere
        else explain_unavailable_shm()
    )


def explain_no_shared_parameters(settings: Settings) -> str | None:
    """Why the ranks cannot keep parameters in one memory, or None."""
    if settings.device != "cpu":
        return f"parameters on {settings.device} are each rank's own"
    return explain_no_shm(get_launched_size() or 1)


def check_partitioning(
    job: Job, requested: Strategy, resolved: Strategy, data: Path | None, loss_weight_known: bool
) -> None:
    """Refuse a model that cannot be cut as asked for, tried on two samples; and what would not
    follow parts or shards of it. known: the weight of its loss is read off the graph.
    """
    if not has_model_shards(resolved) and not resolved.shards_parameters:
        return
    if resolved.shards_parameters and not hasattr(torch.distributed, "reduce_scatter_single"):
        raise Refused(
            f"{requested} wants torch 2.13 or later, and this is {torch.__version__}; leave out "
            f"state=fully_sharded"
        )
    samples = job.make_samples(open_dataset(job.train, data))
    places = list(range(min(len(samples), job.batch, 2)))
    inputs, target = convert_batch(separate_target(samples[0, places]), CPU, job.parameter_dtype)
    try:
        module = LossModule(job.build_model(), job.build_loss())
        if togethers := [
            factor.update_granularity for factor in list_factors(resolved) if factor.splits_layers
        ]:
            optimizer = job.optimizer(module.model.parameters())
            refuse_unfit_optimizer(
                requested,
                optimizer,
                find_update_granularity(
                    optimizer, known_elementwise=type(optimizer) in FOREACH_OPTIMIZERS
                ),
                min(togethers, key=UPDATE_GRANULARITIES.index),
            )
        refuse_parameter_views(module.model)
        build_empty_model(module.model)  # can it be copied?
        refuse_loss_reading_parameters(module, inputs, target)
        if (
            has_model_shards(resolved)
            and job.test is not None
            and job.metric is None
            and not loss_weight_known
        ):
            refuse_gradient_loss(module, inputs, target, len(places))
        for cuttable in list_model_checks(resolved):
            module = LossModule(job.build_model(), job.build_loss())
            with preserve_all_state(module):
                cuttable(module.model, inputs, job.test is not None)
    except StepFailed as error:
        raise Refused(f"job {job.name}, {requested}: {error}") from error


def prove_strategy_schedules(requested: Strategy, resolved: Strategy, settings: Settings) -> None:
    """Prove the schedules of a strategy at the size of this world, before any rank starts."""
    plans = resolved.plan_schedules()
    if settings.inject_fault and not plans:
        raise Refused(
            f"{requested} has no schedule to plant a fault in; name an algorithm, such as data(2, "
            f"reduce=ring)"
        )
    for plan in () if settings.skip_schedule_check else plans:
        try:
            check_schedule(inject_fault(plan.schedule, settings.inject_fault), plan.size, plan.goal)
        except Refused as error:
            raise Refused(f"{error} (--skip-schedule-check runs it all the same)") from None
