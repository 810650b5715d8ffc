"""A plain PyTorch loop of a job, as a user writes it without paragrad, and the time of its steps.

`compare` divides its speed-ups by this time. No part of the engine is in a step. Only the samples
are loaded as in every other training, so that loading does not decide the speed-up.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paragrad.datasets.loader_processes import load_batches
from paragrad.datasets.loading import Samples, convert_batch, separate_target
from paragrad.engine.optimizer.modes import set_optimizer_mode
from paragrad.jobs.job import Job, open_dataset
from paragrad.jobs.loss import call_model
from paragrad.record.cpu_load import CpuMeter
from paragrad.record.record import Recorder
from paragrad.runtime.world import World
from paragrad.validation.validate import ValidatedRun

PLAIN_PYTORCH = "plain PyTorch loop"  # the name of such a run in records and in tables
UNTIMED_STEPS = 2  # the first steps warm up, and their time does not count
REPORT_INTERVAL = 0.1  # seconds between two reports of progress


class PlainStep(NamedTuple):
    """A finished step of the loop.

    Attributes:
        start: The start of the step on the monotonic clock, before its batch was loaded.
        seconds: The time of the step.
        loss: The mean loss of the batch.
    """

    start: float
    seconds: float
    loss: float


def time_plain_pytorch(
    world: World,
    validated_run: ValidatedRun,
    folder: Path,
    origin: float,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> str:
    """Train a job in a plain PyTorch loop, and record the time of every step. There are no tests.

    Args:
        world: The world of this rank, which is alone.

        validated_run: The validated job and settings.

        folder: The folder of the run.

        origin: The start of the record's clock.

        report: Receives the progress, or None.

    Returns:
        "finished" or "stopped".
    """
    job, settings, order = validated_run.job, validated_run.settings, validated_run.inspection.order
    samples = Samples(
        open_dataset(job.train, settings.folder), job.seed, job.collate, world.timeout
    )
    steps = min(settings.limit or 2**62, job.epochs * order.steps)
    places = [
        (number // order.steps, order.get_batch(number % order.steps)) for number in range(steps)
    ]
    keys = ((epoch, order.select_indices(epoch, positions)) for epoch, positions in places)
    last_report = 0.0
    with Recorder(folder / "rank-0.jsonl", origin) as record, warnings.catch_warnings():
        # in float16 the scheduler may step before the first update
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step")
        cpu = CpuMeter()
        plain_steps = train_plain_pytorch(
            job, load_batches(samples, keys, settings.loaders), world.device
        )
        for number, (start, seconds, loss) in enumerate(plain_steps):
            epoch, positions = places[number]
            record.write_line(
                "step",
                epoch=epoch,
                step=number,
                start=round(start - origin, 6),
                seconds=round(seconds, 6),
                loss=[loss, 1.0],
                order=[[positions.start, positions.stop]],
                sent={},
            )
            world.stop.beat()
            if report and (time.monotonic() - last_report > REPORT_INTERVAL or number == steps - 1):
                last_report = time.monotonic()
                report({"epoch": epoch, "step": number + 1, "steps": steps, "loss": loss})
            if world.stop.is_requested and number < steps - 1:
                return "stopped"
        record.write_line("cpu", **cpu.measure_usage())
    return "finished"


def train_plain_pytorch(
    job: Job, batches: Iterator[Any], device: torch.device
) -> Iterator[PlainStep]:
    """Train a job in the loop that a user writes without paragrad.

    Random draws of the model are those of plain PyTorch, so a model with dropout trains otherwise
    than under `serial`.

    Args:
        job: The job, prepared for training: its scheduler counts steps.
        batches: The global batches.
        device: The device.

    Yields:
        Each finished step.
    """
    model = job.build_model_to_train().to(device)
    compute_loss = job.build_loss(device)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    # without float16 it changes nothing
    scaler = torch.amp.GradScaler(device.type, enabled=job.autocast == torch.float16)
    use_autocast = (
        functools.partial(torch.autocast, device.type, job.autocast)
        if job.autocast
        else contextlib.nullcontext
    )
    set_optimizer_mode(optimizer, "train")
    while True:
        start = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            return
        inputs, target = separate_target(convert_batch(batch, device, job.parameter_dtype))
        optimizer.zero_grad()
        with use_autocast():
            value = compute_loss(call_model(model, inputs), target)
            loss = value[0] / value[1] if isinstance(value, tuple) else value
        scaler.scale(loss).backward()
        if job.clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        loss_value = loss.item()
        yield PlainStep(start, time.monotonic() - start, loss_value)
