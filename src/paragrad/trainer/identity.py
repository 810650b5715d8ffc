"""The identity of a training, by which it can be resumed.

A checkpoint of another training is refused, and the message names the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragrad.datasets.loading import Dataset, convert_batch, separate_target
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.state.preserve_state import preserve_module_state
from paragrad.errors import Refused
from paragrad.jobs.fingerprint import describe_callable, describe_loss
from paragrad.jobs.job import CPU, Job
from paragrad.jobs.loss import LossModule
from paragrad.runtime.generators import fingerprint_generators, keep_generators

PROBED_SAMPLES = 8  # samples over which the identifying loss is computed
INITIAL_LOSS_KEY = "loss before training"
# relative; sums in another order, or on another processor, differ by less
LOSS_TOLERANCE = 1e-4
NEW_KEYS = {"model", "loss", INITIAL_LOSS_KEY}  # entries that earlier versions did not save


def describe_initial_training(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> dict[str, Any]:
    """Describe model, loss, optimizer, scheduler and clipping before the first step, by name.

    Args:
        job: The job.
        model: The job's model.
        optimizer: The optimizer over the model.
        scheduler: The scheduler, or None.
    """
    identity: dict[str, Any] = {
        "model": describe_callable(model),
        "loss": describe_loss(job.loss),
        "optimizer": type(optimizer).__name__,
        "clip_norm": job.clip_norm,
        "scheduler": type(scheduler).__name__ if scheduler else None,
    }
    for number, group in enumerate(optimizer.param_groups):
        identity[f"parameters in group {number}"] = len(group["params"])
        identity.update(
            {
                f"{name} of group {number}": str(value)
                for name, value in group.items()
                if name != "params"
            }
        )
    if scheduler:
        identity.update(
            {
                f"{name} of the scheduler": str(value)
                for name, value in scheduler.state_dict().items()
                if not callable(value)
            }
        )
    return identity


def compute_initial_loss(job: Job, model: nn.Module, train_dataset: Dataset) -> float | None:
    """Compute the loss of samples from all over the dataset before training, in eval mode.

    The loss identifies the data, the transforms, and the code of model and loss.

    Args:
        job: The job.
        model: The job's model.
        train_dataset: The training set.

    Returns:
        The loss; None if eval mode has no loss, or if it is not repeatable.
    """
    samples = job.make_samples(train_dataset)
    count = min(len(train_dataset), job.batch, PROBED_SAMPLES)
    places = [len(train_dataset) * number // count for number in range(count)]
    module = LossModule(model, job.build_loss())

    def compute_loss() -> float:
        total, weight = module(
            *separate_target(convert_batch(samples[0, places], CPU, job.parameter_dtype)), count
        )
        return float(total) / float(weight)

    try:
        with (
            keep_generators(),
            preserve_module_state(module),
            use_model_eval_mode(model),
            torch.no_grad(),
        ):
            generators_before = fingerprint_generators()
            first = compute_loss()
            second = compute_loss()
            return (
                first
                if first == second
                and isfinite(first)
                and fingerprint_generators() == generators_before
                else None
            )
    except Exception:  # The model has no loss in eval mode.
        return None


def refuse_other_training(
    folder: Path | str,
    theirs: Mapping[str, Any],
    current: Mapping[str, Any],
    subject: str,
    relation: str = "was saved with",
    repair: str = "resume it as it was",
) -> None:
    """Refuse a saved training that is not the current one.

    Args:
        folder: The folder of the saved training, or a text that names it.

        theirs: The identity that was saved, by name.

        current: The identity of the current training, by name.

        subject: The start of the message's second part, such as "job mlp has".

        relation: The phrase that follows the folder in the message.

        repair: The repair that the message suggests.

    Raises:
        Refused: If an entry of the identities differs.
    """
    for name in {**theirs, **current}:
        old = theirs.get(name)
        new = current.get(name)
        if old == new or (name in NEW_KEYS and name not in theirs):
            continue
        if name == INITIAL_LOSS_KEY:
            if (
                old is not None
                and new is not None
                and abs(new - old) > LOSS_TOLERANCE * abs(old) + 1e-7
            ):
                raise Refused(
                    f"{folder} is of a job whose loss before training was {old:.6g}, over samples "
                    f"from all over the dataset, and here it is {new:.6g}: other data, other "
                    f"transforms, or another forward or loss; {repair}"
                )
            continue
        raise Refused(
            f"{folder} {relation} {name} {_find_different_line(old, new)}, and {subject} "
            f"{_find_different_line(new, old)}; "
            + (f"give --{name} {old}" if name in ("seed", "batch") else repair)
        )


def _find_different_line(text: Any, other: Any) -> Any:
    """Return the first line of a text that the other text does not have; other values unchanged."""
    if not isinstance(text, str) or not isinstance(other, str) or "\n" not in text + other:
        return text
    known = set(other.splitlines())
    return next((line.strip() for line in text.splitlines() if line not in known), "nothing more")
