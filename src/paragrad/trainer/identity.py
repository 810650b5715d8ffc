"""What a training is known by when it is to go on: a checkpoint of another one is refused by
name.
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

PROBED_SAMPLES = 8  # samples by whose loss a training is known
INITIAL_LOSS_KEY = "loss before training"
# relative: sums in another order, by another processor, are closer
LOSS_TOLERANCE = 1e-4
NEW_KEYS = {"model", "loss", INITIAL_LOSS_KEY}  # what earlier versions did not save


def describe_initial_training(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> dict[str, Any]:
    """Model, loss, optimizer, scheduler and clipping as they begin, by name."""
    found: dict[str, Any] = {
        "model": describe_callable(model),
        "loss": describe_loss(job.loss),
        "optimizer": type(optimizer).__name__,
        "clip_norm": job.clip_norm,
        "scheduler": type(scheduler).__name__ if scheduler else None,
    }
    for number, group in enumerate(optimizer.param_groups):
        found[f"parameters in group {number}"] = len(group["params"])
        found.update(
            {
                f"{name} of group {number}": str(value)
                for name, value in group.items()
                if name != "params"
            }
        )
    if scheduler:
        found.update(
            {
                f"{name} of the scheduler": str(value)
                for name, value in scheduler.state_dict().items()
                if not callable(value)
            }
        )
    return found


def compute_initial_loss(job: Job, model: nn.Module, train_dataset: Dataset) -> float | None:
    """The loss of samples from all over the dataset, in eval mode, before training: by it data,
    transforms and the code of model and loss are known. None where eval mode has no loss, or
    another one each time.
    """
    samples = job.make_samples(train_dataset)
    count = min(len(train_dataset), job.batch, PROBED_SAMPLES)
    places = [len(train_dataset) * number // count for number in range(count)]
    module = LossModule(model, job.build_loss())

    def loss() -> float:
        total, weight = module(
            *separate_target(convert_batch(samples[0, places], CPU, job.parameter_dtype)), count
        )
        return float(total) / weight

    try:
        with (
            keep_generators(),
            preserve_module_state(module),
            use_model_eval_mode(model),
            torch.no_grad(),
        ):
            before = fingerprint_generators()
            first = loss()
            again = loss()
            return (
                first
                if first == again and isfinite(first) and fingerprint_generators() == before
                else None
            )
    except Exception:  # of a model that has no loss outside of training
        return None


def refuse_other_training(
    folder: Path | str,
    theirs: Mapping[str, Any],
    current: Mapping[str, Any],
    subject: str,
    relation: str = "was saved with",
    repair: str = "resume it as it was",
) -> None:
    """Refuse what was saved in a folder as another training than this. here: who asks, such as
    "job mlp has";  with_, repair: what is said of one that was not saved.
    """
    for name in {**theirs, **current}:
        saved = theirs.get(name)
        found = current.get(name)
        if saved == found or (name in NEW_KEYS and name not in theirs):
            continue
        if name == INITIAL_LOSS_KEY:
            if (
                saved is not None
                and found is not None
                and abs(found - saved) > LOSS_TOLERANCE * abs(saved) + 1e-7
            ):
                raise Refused(
                    f"{folder} is of a job whose loss before training was {saved:.6g}, over "
                    f"samples from all over "
                    f"the dataset, and here it is {found:.6g}: other data, other transforms, or "
                    f"another forward or "
                    f"loss; {repair}"
                )
            continue
        raise Refused(
            f"{folder} {relation} {name} {_find_different_line(saved, found)}, and {subject} "
            f"{_find_different_line(found, saved)}; "
            + (f"give --{name} {saved}" if name in ("seed", "batch") else repair)
        )


def _find_different_line(text: Any, other: Any) -> Any:
    """Of a text of many lines the first that the other has not; of anything else the whole."""
    if not isinstance(text, str) or not isinstance(other, str) or "\n" not in text + other:
        return text
    known = set(other.splitlines())
    return next((line.strip() for line in text.splitlines() if line not in known), "nothing more")
