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

from paragrad.datasets.loading import Dataset, brought, parted
from paragrad.engine.probe import evaluating
from paragrad.engine.state.preserve_state import restored
from paragrad.errors import Refused
from paragrad.jobs.fingerprint import described, with_settings
from paragrad.jobs.job import CPU, Job
from paragrad.jobs.loss import Summed
from paragrad.runtime.generators import generator_states, generators_kept

LOOKED_AT = 8  # samples by whose loss a training is known
LOSS_BEFORE = "loss before training"
# relative: sums in another order, by another processor, are closer
SAME_LOSS = 1e-4
SINCE = {"model", "loss", LOSS_BEFORE}  # what earlier versions did not save


def beginning(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> dict[str, Any]:
    """Model, loss, optimizer, scheduler and clipping as they begin, by name."""
    found: dict[str, Any] = {
        "model": described(model),
        "loss": with_settings(job.loss),
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


def loss_before(job: Job, model: nn.Module, train: Dataset) -> float | None:
    """The loss of samples from all over the dataset, in eval mode, before training: by it data,
    transforms and the code of model and loss are known. None where eval mode has no loss, or
    another one each time.
    """
    samples = job.samples(train)
    count = min(len(train), job.batch, LOOKED_AT)
    places = [len(train) * number // count for number in range(count)]
    module = Summed(model, job.built_loss())

    def loss() -> float:
        total, weight = module(
            *parted(brought(samples[0, places], CPU, job.parameter_dtype)), count
        )
        return float(total) / weight

    try:
        with generators_kept(), restored(module), evaluating(model), torch.no_grad():
            before = generator_states()
            first = loss()
            again = loss()
            return (
                first
                if first == again and isfinite(first) and generator_states() == before
                else None
            )
    except Exception:  # of a model that has no loss outside of training
        return None


def refuse_another(
    folder: Path | str,
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    here: str,
    with_: str = "was saved with",
    repair: str = "resume it as it was",
) -> None:
    """Refuse what was saved in a folder as another training than this. here: who asks, such as
    "job mlp has";  with_, repair: what is said of one that was not saved.
    """
    for name in {**theirs, **ours}:
        saved = theirs.get(name)
        found = ours.get(name)
        if saved == found or (name in SINCE and name not in theirs):
            continue
        if name == LOSS_BEFORE:
            if (
                saved is not None
                and found is not None
                and abs(found - saved) > SAME_LOSS * abs(saved) + 1e-7
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
            f"{folder} {with_} {name} {_line(saved, found)}, and {here} {_line(found, saved)}; "
            + (f"give --{name} {saved}" if name in ("seed", "batch") else repair)
        )


def _line(text: Any, other: Any) -> Any:
    """Of a text of many lines the first that the other has not; of anything else the whole."""
    if not isinstance(text, str) or not isinstance(other, str) or "\n" not in text + other:
        return text
    known = set(other.splitlines())
    return next((line.strip() for line in text.splitlines() if line not in known), "nothing more")
