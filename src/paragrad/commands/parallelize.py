"""parallelize: a Trainer for a user's own training loop.

It runs under plain python (a world of one), torchrun, mpirun or srun.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragrad.datasets.loading import Collate
from paragrad.engine.layout import set_model_values
from paragrad.engine.loss_scale import explain_no_loss_scale
from paragrad.engine.optimizer.optimizer_state import load_parameter_state, select_global_state
from paragrad.engine.state import shared_initialization
from paragrad.errors import Refused
from paragrad.jobs.job import AUTOCAST_DTYPES
from paragrad.jobs.loss import Loss
from paragrad.runtime.rendezvous import get_launched_size, join_launched_world
from paragrad.runtime.world import DEFAULT_TIMEOUT, World
from paragrad.strategies.registry import strategy as read_strategy
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.model_partition import is_shared_per_host
from paragrad.trainer.settings import Settings, refuse_old_arguments
from paragrad.trainer.setup import TrainerOptions
from paragrad.trainer.trainer import Trainer
from paragrad.trainer.training import Training
from paragrad.validation.inspect_job import explain_untrainable
from paragrad.validation.inspected_job import InspectedOptimizer
from paragrad.validation.lazy_modules import list_lazy_tensors
from paragrad.validation.validate import (
    choose_thread_count,
    convert_strategy_errors,
    detect_environment,
    prove_strategy_schedules,
    resolve_and_check_strategy,
)


@refuse_old_arguments
@contextmanager
def parallelize(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    strategy: str | Strategy = "data(auto)",
    *,
    seed: int = 0,
    scheduler: Any = None,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    collate: Collate | None = None,
    device: str = "cpu",
    backend: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
    check: str | float = "1%",
    skip_first_step_check: bool = False,
    folder: str | Path | None = None,
    overwrite: bool = False,
) -> Iterator[Trainer]:
    """One rank of a strategy over the user's own model, loss and optimizer; a context manager.

    Under plain python the world has one worker. torchrun, mpirun and srun make it larger; an
    existing process group is used as it is. All ranks begin with rank 0's parameters and buffers.

    The loop takes its batches from `trainer.batches(dataset, batch, epoch)` (the global batch size)
    and hands them to `trainer.step`. After `trainer.world.stop.set()` on any rank (in a signal
    handler, for example) `result.stop` is true on all ranks at the same step. Replicas that step
    alone see it after they have met. At the end of the context the model has the run's effective
    weights.

    A strategy that partitions the model takes it over. From the first step to the end of the
    context the user's own model has no values; `trainer.state()` has them. Afterwards the model is
    whole again on every rank. Its parameters are then new objects, and the optimizer holds these.

    Args:
        model: the model.

        loss: the mean over samples, or f(output, target) -> (sum, weight).

        optimizer: the optimizer of the model's parameters.

        strategy: the strategy.

        seed: the seed of the samples' order and of random numbers.

        scheduler: a learning rate scheduler that counts steps. The trainer steps it.

        clip_norm: the largest norm of the gradient. The trainer clips it.

        autocast: torch.bfloat16, torch.float16 (with a loss scale), or None.

        collate: makes a batch of samples; None for torch's own.

        device: cpu or cuda.

        backend: auto, shm, gloo or nccl.

        timeout: seconds to wait for another rank.

        check: the share of the time that comparisons of steps with one worker's take, such as "1%".
            The steps 1, 2, 4, 8 and 16 are compared besides. 1: every step; 0: none.

        skip_first_step_check: compare no step with one worker's, and train on all the same.

        folder: where `trainer.save()` writes. If it has checkpoints that `trainer.load` did not
            load, the first step refuses it.

        overwrite: remove such checkpoints when the training saves.

    Yields:
        The trainer.

    Raises:
        Refused: before the first step.

    Examples:
        >>> import paragrad as pg, torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss = torch.nn.functional.mse_loss
        >>> with pg.parallelize(model, loss, optimizer, strategy="data(auto)") as trainer:
        ...     for inputs, targets in trainer.batches(data, batch=16, epoch=0):
        ...         result = trainer.step(inputs, targets)
        >>> trainer.steps
        4
    """
    settings = Settings(device=device, backend=backend, check=check)
    _check_loop_arguments(model, loss, optimizer, scheduler, clip_norm, autocast, settings)
    chosen = read_strategy(strategy)
    size = get_launched_size()
    environment = detect_environment(settings, has_own_loop=True)
    if because := chosen.guarantees.jobs_only or (
        chosen.servers and "its servers do not run your own loop; make it a Job"
    ):
        raise Refused(f"{chosen}: {because}")  # whatever the number of ranks
    resolved = resolve_and_check_strategy(chosen, environment)
    with convert_strategy_errors(chosen):
        resolved.refuse_optimizer(InspectedOptimizer(lambda: optimizer, clip_norm), chosen)
    if autocast == torch.float16 and (reason := explain_no_loss_scale(resolved)):
        raise Refused(f"{chosen}: {reason}")
    prove_strategy_schedules(chosen, resolved, settings)
    if size is not None or isinstance(chosen.threads, int):
        torch.set_num_threads(choose_thread_count(resolved))
    with _join_loop_world(environment.backend, device, timeout, alone=size is None) as world:
        model.to(world.device)
        for tensor in [*model.parameters(), *model.buffers()]:
            world.copy_from_first(tensor.data)
        initial_model = (
            shared_initialization.share_model_values(world, model)
            if is_shared_per_host(resolved, world)
            else None
        )
        options = TrainerOptions(
            seed=seed,
            clip_norm=clip_norm,
            autocast=autocast,
            collate=collate,
            skip_first_step_check=skip_first_step_check,
            check_share=settings.check_share,
        )
        trainer = Trainer(
            world, model, loss, optimizer, resolved, options, scheduler, initial_model
        )
        if overwrite and folder is None:
            raise Refused("overwrite=True says what to do with checkpoints; give folder=... too")
        if folder is not None:
            trainer.use_folder(folder, overwrite)
        training = trainer.training
        try:
            yield trainer
            if training.setup.exchange is not None:
                with training.monitor.track_step(training.state.steps):
                    training.exchange.adopt_effective_weights()
            if training.setup.layout.is_partitioned:
                _restore_whole_model(training, model, optimizer)
        finally:
            if training.user_model is not None:
                training.user_model.remove_hooks()
            trainer.close()


def _restore_whole_model(
    training: Training, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Restore the user's model from its parts, and the optimizer with the state that serial has.

    Collective.
    """
    setup, layout = training.setup, training.setup.layout
    parameters = set_model_values(
        model,
        layout.gather_serial_tensors({**setup.parameters, **dict(setup.model.named_buffers())}),
    )
    state = layout.world.broadcast_object(setup.gather_optimizer_state())
    # the optimizer has more groups if the user added one
    for group, names in zip(optimizer.param_groups, setup.group_names, strict=False):
        group["params"] = [parameters[name] for name in names if name in parameters]
    optimizer.state = type(optimizer.state)(dict, select_global_state(optimizer))
    for name, values in state.items():
        if name in parameters:
            load_parameter_state(optimizer, parameters[name], values)


@contextmanager
def _join_loop_world(backend: str, device: str, timeout: float, alone: bool) -> Iterator[World]:
    if alone:
        yield World(device=torch.device(device))
        return
    with join_launched_world(backend, timeout, device) as world:
        yield world


def _check_loop_arguments(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    clip_norm: float | None,
    autocast: torch.dtype | None,
    settings: Settings,
) -> None:
    if not isinstance(model, nn.Module):
        raise Refused(f"parallelize needs a torch.nn.Module, got {type(model).__name__}")
    if not callable(loss):
        raise Refused(
            "parallelize needs a loss: f(output, target) -> the mean over samples, or (sum, weight)"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise Refused(f"clip_norm must be above 0 or None, got {clip_norm!r}")
    if autocast not in (None, *AUTOCAST_DTYPES):
        raise Refused(f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast}")
    if lazy := list_lazy_tensors(model):
        raise Refused(
            f"parallelize: {', '.join(lazy)} of the model have no shapes yet (lazy modules); run "
            "one batch through the model before, and build the optimizer then"
        )
    if refusal := explain_untrainable(model, optimizer, scheduler):
        raise Refused(f"parallelize: {refusal}")
    settings.check_settings()
