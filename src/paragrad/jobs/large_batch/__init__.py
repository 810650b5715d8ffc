"""What a job needs whose batch is larger than the one it was written for: another learning
rate, reached gradually (`Scaled`, asked for by `job.replace(batch=..., scale_lr=...,
warm_up=...)`), or an optimizer with a rate for every layer (`Lars`, `Lamb`).
"""

from paragrad.jobs.large_batch.lamb import Lamb
from paragrad.jobs.large_batch.lars import Lars
from paragrad.jobs.large_batch.scaled import Scaled

__all__ = ["Lamb", "Lars", "Scaled"]
