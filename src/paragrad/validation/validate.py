"""Validation: job, strategy and settings are checked together before any rank starts."""

from __future__ import annotations

import contextlib
import functools
import inspect
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
from paragrad.engine.loss_scale import explain_no_loss_scale
from paragrad.engine.optimizer.update_probe import find_update_granularity
from paragrad.engine.state.preserve_state import preserve_all_state
from paragrad.errors import Refused, StepFailed, warn_user
from paragrad.executors.proof import GOALS, check_schedule
from paragrad.jobs.job import CPU, Job, open_dataset
from paragrad.jobs.loss import LossModule
from paragrad.launch import Launcher, job_files
from paragrad.launch.debugger import refuse_breakpoints
from paragrad.notation.choices import Integer, IntegerList
from paragrad.parallel.registry import (
    has_model_shards,
    is_builtin_technique,
    list_model_checks,
    select_factors,
)
from paragrad.parallel.server.join_endpoint import parse_host_port, refuse_host_port
from paragrad.runtime.generators import keep_generators
from paragrad.runtime.launcher_env import choose_rank_threads, count_cores
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
    """A job, a strategy and settings that passed validation together.

    Attributes:
        job: The job, prepared for training.

        requested: The strategy as it was written.

        resolved: The strategy without open choices.

        settings: The settings.

        inspection: What validation found out about the job.

        environment: Where the training runs.

        backend: The backend that carries the messages of the ranks.

        resume_checkpoint: The checkpoint to resume, or None.

        trial_result: What a trial found out (`commands.trial`), or None.

        batch_reason: Why the batch has its size, if it was searched for (`commands.fit_batch`).

        labels: The class of every sample, if samples are assigned to clients by class.

        is_plain_pytorch: Whether a plain PyTorch loop trains the job, without strategy and tests,
            for the time of its steps.
    """

    job: Job
    requested: Strategy
    resolved: Strategy
    settings: Settings
    inspection: JobInspection
    environment: Environment
    backend: str
    resume_checkpoint: SavedCheckpoint | None = None
    trial_result: str | None = None
    batch_reason: str | None = None
    labels: Any = None
    is_plain_pytorch: bool = False

    @functools.cached_property
    def rounds(self) -> ClientRounds | None:
        """The rounds, if the training has rounds."""
        return plan_rounds(self.resolved, self.inspection.order, self.job.epochs, self.labels)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.resolved.size

    @property
    def threads(self) -> int:
        """The number of threads of each rank."""
        return choose_thread_count(self.resolved)

    @property
    def shm_obstacle(self) -> str | None:
        """Why ranks on the CPU cannot use shared memory, or None."""
        return explain_no_shm(self.size)

    def replace_seed(self, seed: int) -> ValidatedRun:
        """Return the same training with another seed."""
        job = self.job.replace(seed=seed)
        return replace(
            self,
            job=job,
            inspection=replace(self.inspection, order=self.inspection.order.replace_seed(seed)),
        )

    def run_on_ranks(
        self,
        launcher: Launcher,
        function: Callable[..., Any],
        *arguments: Any,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run function(world, *arguments) on all ranks of the strategy.

        Args:
            launcher: The launcher of the ranks.
            function: The function that each rank runs.
            *arguments: The arguments of the function.
            on_report: Receives (rank, report) for each report of a rank.

        Returns:
            The results of all ranks.

        Raises:
            RankFailed: If a rank fails.
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
    """Validate a job, a strategy and settings together, before any rank starts.

    The random generators of this process, which belong to the user, are preserved.

    Args:
        job: The job.

        requested: The strategy as it was written.

        settings: The settings, or None for the defaults.

        inspection: What an earlier validation found out about the job, or None.

    Raises:
        Refused: If they do not fit together; the message contains the repair.
    """
    if not isinstance(job, Job):
        raise Refused(f"a job is a paragrad.Job; got {type(job).__name__}")
    if job_files.running_files:
        raise Refused(
            f"{job_files.running_files[-1]} trains at its top level, which every rank runs too; "
            "put the call under "
            'if __name__ == "__main__":'
        )
    settings = settings or Settings()
    requested = strategy(requested)
    settings.check_settings(job)
    environment = detect_environment(settings)
    resolved = resolve_and_check_strategy(requested, environment)
    with refuse_breakpoints(resolved.size):
        inspection = inspection or inspect_job(job, settings.folder)
    job = inspection.prepare_job(job)
    inspected = InspectedJob(job, inspection, settings.folder, settings.limit)
    with convert_strategy_errors(requested):
        resolved.refuse_job(inspected, requested, settings.skip_first_step_check)
        resolved.refuse_optimizer(inspected, requested)
    check_partitioning(job, requested, resolved, settings.folder, inspection.probe.weight_known)
    refuse_insufficient_memory(
        job, requested, resolved, inspection, settings.folder, settings.device
    )
    prove_strategy_schedules(requested, resolved, settings)
    if resolved.uses_work_queue and settings.loaders:
        raise Refused(
            f"{requested} hands out samples one share at a time, so nothing can be loaded ahead; "
            "leave out --loaders"
        )
    if settings.listen is not None:
        if not resolved.uses_work_queue or environment.ranks is not None:
            raise Refused(
                "--listen: workers cannot join, because "
                + (
                    f"{requested} divides each batch among its own workers; give "
                    "server(n, sync=asp), ssp or bsp(backup=1)"
                    if environment.ranks is None
                    else "another launcher started these ranks; start paragrad without it"
                )
            )
        refuse_host_port(parse_host_port("--listen", settings.listen), 1 + resolved.servers)
    if resolved.trains_clients and job.sampler is not None:
        raise Refused(
            f"{requested}: each client has its own samples and order, so the job's sampler is not "
            "used; leave it out"
        )
    if resolved.trains_clients and inspection.order.is_in_order:
        raise Refused(
            f"{requested}: each client has samples of its own, and train is a stream, which gives "
            "samples one after the other only; give a dataset with __getitem__"
        )
    if job.autocast == torch.float16 and (reason := explain_no_loss_scale(resolved)):
        raise Refused(f"{requested}: {reason}")
    if settings.noise_scale and job.autocast == torch.float16:
        raise Refused(
            f"{requested}: the gradient noise scale cannot be measured with the loss scale of "
            "float16; measure it in bfloat16 or float32"
        )
    if settings.noise_scale and (reason := explain_no_measurement(resolved)):
        raise Refused(f"{requested}: the gradient noise scale {reason}")
    backend = choose_backend(settings, resolved.size)
    validated = ValidatedRun(
        job,
        requested,
        resolved,
        settings,
        inspection,
        environment,
        backend,
        labels=read_client_labels(job, requested, resolved, settings.folder),
    )
    _warn_of_many_ranks(requested, resolved, environment)
    _warn_of_micro_batches(requested, resolved, inspection)
    refuse_many_rounds(validated.rounds, requested)
    refuse_single_sample_clients(validated.rounds, inspected, requested)
    refuse_round_schedule(validated.rounds, inspection, requested, job.name)
    refuse_wrapped_tensors(validated.rounds, job, requested)
    with convert_strategy_errors(requested):
        for notice in resolved.list_warnings(inspected, requested):
            warn_user(notice)
    if not settings.resume:
        return validated
    return replace(
        validated,
        resume_checkpoint=resume_check.find_checkpoint(
            Path(settings.resume), job, inspection, validated.rounds
        ),
    )


def _warn_of_many_ranks(requested: Strategy, resolved: Strategy, environment: Environment) -> None:
    """Warn if ranks that paragrad starts on this host have to share cores."""
    if environment.ranks is None and resolved.size > environment.cores:
        warn_user(
            f"{requested} starts {resolved.size} ranks on {environment.cores} core(s): they take "
            "turns, so a step takes longer than with a core for each"
        )


def _warn_of_micro_batches(
    requested: Strategy, resolved: Strategy, inspection: JobInspection
) -> None:
    """Warn if batch norm makes a training that is serial's with micro-batches, and not serial's."""
    micro = resolved.division.micro
    if (
        inspection.probe.has_batch_norm
        and micro > 1
        and resolved.size > 1
        and resolved.batch_norm == "whole"
    ):
        warn_user(
            f"{requested}: batch norm takes its statistics over each of the {micro} micro-batches, "
            f"so this is the training of serial(micro={micro}), which may differ from serial's"
        )


def detect_environment(settings: Settings, has_own_loop: bool = False) -> Environment:
    """Detect where a training with these settings runs.

    Args:
        settings: The settings.
        has_own_loop: Whether the user's own loop drives the training.
    """
    ranks = get_launched_size()
    return Environment(
        count_cores(),
        ranks or 1 if has_own_loop else ranks,
        count_local_ranks(),
        explain_no_shared_parameters(settings),
        choose_backend(settings, ranks or (1 if has_own_loop else 2)),
        has_own_loop,
        choose_rank_threads(1),
        torch.cuda.device_count() if settings.device == "cuda" else 0,
    )


def resolve_and_check_strategy(requested: Strategy, environment: Environment) -> Strategy:
    """Resolve a strategy and check the result.

    A strategy of the user may lack members or contradict itself.

    Args:
        requested: The strategy as it was written.
        environment: Where the training runs.

    Raises:
        Refused: If the strategy is incomplete or inconsistent.
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
        resolved = resolve_strategy(requested, environment)
        _check_resolved_strategy(requested, resolved)
    return resolved


@contextlib.contextmanager
def convert_strategy_errors(requested: Strategy) -> Iterator[None]:
    """Convert errors of a user's strategy to Refused.

    Such a strategy may raise any exception when its members are called.

    Args:
        requested: The strategy as it was written.

    Raises:
        Refused: If a strategy of the user raises an exception.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused) or not _list_custom_factors(requested):
            raise
        names = " * ".join(map(_qualify_strategy_name, _list_custom_factors(requested)))
        raise Refused(f"{names} raised {type(error).__name__}: {error}; repair it") from error


def _list_custom_factors(requested: Strategy) -> list[Strategy]:
    """List the factors that are not built in."""
    return [factor for factor in list_factors(requested) if not is_builtin_technique(factor)]


def _qualify_strategy_name(factor: Strategy) -> str:
    return f"{type(factor).__module__}.{type(factor).__qualname__}"


def _check_resolved_strategy(requested: Strategy, resolved: Strategy) -> None:
    """Check that the properties of a resolved strategy are consistent. Raises Refused."""
    if not isinstance(resolved, type(requested)):
        raise Refused(
            f"{requested}: resolve() returned {resolved!r}; let it return a strategy of the same "
            "class, such as replace(self, ...)"
        )
    if not isinstance(resolved.guarantees, Guarantees):
        raise Refused(
            f"{requested} promises {resolved.guarantees!r}; let it be Guarantees, such as "
            "Guarantees(exact=False)"
        )
    if resolved.size - resolved.servers != resolved.workers:
        raise Refused(
            f"{requested} has {resolved.workers} workers, and axes of "
            f"{resolved.size - resolved.servers} ranks: "
            + " x ".join(f"{axis.name} {axis.size}" for axis in resolved.axes)
            + "; their product is the number of workers"
        )
    build_grid(resolved.axes, resolved.size - resolved.servers)
    replicas = (
        1
        if resolved.trains_clients
        else prod(axis.size for axis in resolved.axes if axis.divides == "samples")
    )
    if len(resolved.division.shares) != replicas:
        raise Refused(
            f"{requested} divides a batch into {len(resolved.division.shares)} shares, and its "
            f"axes have {replicas} replicas; give one share per replica"
        )
    for axis in resolved.axes:
        if axis.divides not in ("samples", "domain", "model"):
            raise Refused(
                f"{requested}: axis {axis.name} divides {axis.divides!r}; let it divide samples, "
                "domain or model"
            )
    for name, value in (
        ("shares", resolved.division.shares),
        ("micro", resolved.division.micro),
        ("threads", resolved.threads or 1),
    ):
        if value not in (IntegerList() if isinstance(value, tuple) else Integer()):
            raise Refused(f"{requested} has {name} {value!r}; give whole numbers from 1")
    if resolved.batch_norm not in ("whole", "share"):
        raise Refused(
            f"{requested} has batch_norm {resolved.batch_norm!r}; give 'whole' or 'share'"
        )
    _check_factor_conflicts(resolved)
    if unknown_goals := [plan.goal for plan in resolved.plan_schedules() if plan.goal not in GOALS]:
        raise Refused(
            f"{requested} plans {unknown_goals[0]!r}, which paragrad cannot prove; known: "
            f"{', '.join(GOALS)}"
        )


def _check_factor_conflicts(resolved: Strategy) -> None:
    """Check that at most one factor divides samples, has an exchange, or has passes."""
    factors = list_factors(resolved)
    if len(factors) > 1 and (server_factors := [factor for factor in factors if factor.servers]):
        raise Refused(
            f"{resolved}: {server_factors[0]} has servers, which allow no other factors; leave the "
            "other factors out"
        )
    dividing = [
        factor for factor in factors if any(axis.divides == "samples" for axis in factor.axes)
    ]
    if len(dividing) > 1:
        raise Refused(
            f"{resolved}: {' and '.join(map(str, dividing))} both divide the samples of a batch; "
            "at most one factor of a product can"
        )
    for what, function in (("exchange", "make_exchange"), ("passes", "make_passes")):
        if len(factors_with := select_factors(resolved, function)) > 1:
            raise Refused(
                f"{resolved}: {' and '.join(map(str, factors_with))} both have their own {what}; "
                "at most one factor of a product can"
            )


def choose_thread_count(resolved: Strategy) -> int:
    """Choose the number of threads of each rank.

    It is OMP_NUM_THREADS, or the host's cores divided by its ranks, unless the strategy sets it.

    Args:
        resolved: The resolved strategy.
    """
    if isinstance(resolved.threads, int):
        return resolved.threads
    return choose_rank_threads(count_local_ranks() or resolved.size)


def choose_backend(settings: Settings, size: int) -> str:
    """Choose the backend that carries the messages of the ranks.

    It is shm if all ranks are on the CPU of this host. It is NCCL if each rank has a GPU of its
    own, and gloo otherwise.

    Args:
        settings: The settings.
        size: The number of ranks.

    Raises:
        Refused: If the backend in the settings is impossible.
    """
    local_ranks = count_local_ranks() or size
    gpus = torch.cuda.device_count()
    if settings.backend == "nccl" and local_ranks > gpus:
        raise Refused(
            f"backend nccl needs a GPU per rank, and this host has {gpus} for {local_ranks} ranks; "
            "leave out --backend, and they exchange through the host's memory"
        )
    if settings.backend == "shm" and (reason := explain_no_shm(size)):
        raise Refused(f"{reason}; leave out --backend")
    backend = settings.backend
    if backend == "auto" and settings.device == "cuda":
        backend = "nccl" if local_ranks <= gpus else "gloo"
    elif backend == "auto":
        backend = "gloo" if explain_no_shm(size) else "shm"
    if size > 1 and backend != "shm":
        check_network_interfaces()
    return backend


def explain_no_shm(size: int) -> str | None:
    """Explain why ranks on the CPU cannot use shared memory, or return None.

    Args:
        size: The number of ranks.
    """
    remote_ranks = size - (count_local_ranks() or size)
    return (
        f"{remote_ranks} of {size} ranks are on other hosts"
        if remote_ranks
        else explain_unavailable_shm()
    )


def explain_no_shared_parameters(settings: Settings) -> str | None:
    """Explain why the ranks cannot keep parameters in one memory, or return None.

    Args:
        settings: The settings.
    """
    if settings.device != "cpu":
        return f"parameters on {settings.device} are each rank's own"
    return explain_no_shm(get_launched_size() or 1)


def check_partitioning(
    job: Job, requested: Strategy, resolved: Strategy, data: Path | None, loss_weight_known: bool
) -> None:
    """Check on two samples that the model can be partitioned as the strategy requires.

    This also refuses what would not follow partitions or shards of the model.

    Args:
        job: The job.

        requested: The strategy as it was written.

        resolved: The resolved strategy.

        data: The folder of data.

        loss_weight_known: Whether the weight of the loss is read off its graph.

    Raises:
        Refused: If the model or the optimizer cannot be partitioned.
    """
    if not has_model_shards(resolved) and not resolved.shards_parameters:
        return
    if resolved.shards_parameters and not hasattr(torch.distributed, "reduce_scatter_single"):
        raise Refused(
            f"{requested} needs torch 2.13 or later, and this is {torch.__version__}; leave out "
            "state=fully_sharded"
        )
    samples = job.make_samples(open_dataset(job.train, data))
    places = list(range(min(len(samples), job.batch, 2)))
    inputs, target = convert_batch(separate_target(samples[0, places]), CPU, job.parameter_dtype)
    try:
        module = LossModule(job.build_model(), job.build_loss())
        if granularities := [
            factor.update_granularity for factor in list_factors(resolved) if factor.splits_layers
        ]:
            optimizer = job.optimizer(module.model.parameters())
            refuse_unfit_optimizer(
                requested,
                optimizer,
                find_update_granularity(optimizer),
                min(granularities, key=UPDATE_GRANULARITIES.index),
            )
        refuse_parameter_views(module.model)
        build_empty_model(module.model)  # This raises StepFailed if the model cannot be copied.
        refuse_loss_reading_parameters(module, inputs, target)
        if (
            has_model_shards(resolved)
            and job.test is not None
            and job.metric is None
            and not loss_weight_known
        ):
            refuse_gradient_loss(module, inputs, target, len(places))
        for check_model in list_model_checks(resolved):
            module = LossModule(job.build_model(), job.build_loss())
            with preserve_all_state(module):
                check_model(module.model, inputs, job.test is not None)
    except StepFailed as error:
        raise Refused(f"job {job.name}, {requested}: {error}") from error


def prove_strategy_schedules(requested: Strategy, resolved: Strategy, settings: Settings) -> None:
    """Prove the schedules of a strategy at the size of this world, before any rank starts.

    Args:
        requested: The strategy as it was written.
        resolved: The resolved strategy.
        settings: The settings.

    Raises:
        Refused: If a schedule is wrong, or if a fault is to be injected and there is no schedule.
    """
    plans = resolved.plan_schedules()
    if settings.inject_fault and not plans:
        raise Refused(
            f"{requested} has no schedule that --inject-fault can change; name an algorithm, such "
            "as data(2, reduce=ring)"
        )
    for plan in () if settings.skip_schedule_check else plans:
        try:
            check_schedule(inject_fault(plan.schedule, settings.inject_fault), plan.size, plan.goal)
        except Refused as error:
            raise Refused(f"{error} (--skip-schedule-check runs it without this check)") from None
