"""A scheduler that counts epochs, where it is stepped once for every global batch: the learning rate is gone after a few steps,
and nothing else shows it."""

from __future__ import annotations

import math
import warnings
from typing import Any

from paragrad.jobs.job import Job
from paragrad.world.generators import generators_kept

FEW = 1000              # steps that are looked at
GONE = 1e-6             # of the largest rate


def warn_of_epochs(job: Job, scheduler: Any, samples: int) -> None:
    """Warn of a rate that is gone before half of the steps are made. Steps a scheduler that nobody needs any more."""
    each = math.ceil(samples / job.batch)
    total = job.epochs * each
    with generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")                         # its optimizer makes no steps
        try:
            rates = [max(scheduler.get_last_lr())]
            for _ in range(min(total // 2, FEW)):
                scheduler.step()
                rates.append(max(scheduler.get_last_lr()))
        except Exception:                                       # it may end before: the training will tell
            return
    gone = next((step for step, rate in enumerate(rates) if rate <= GONE * max(rates[:step + 1])), None)
    if gone and max(rates[gone:]) <= GONE * max(rates):
        warnings.warn(f"job {job.name}: from step {gone:,} of {total:,} on the learning rate is below a millionth of its "
                      f"largest: {type(scheduler).__name__} is stepped once for every global batch; if it counts epochs, give "
                      f"it {each:,} times as many", stacklevel=2)
