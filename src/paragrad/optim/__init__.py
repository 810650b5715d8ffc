"""What a job needs whose batch is larger than the one it was written for: another learning
rate, reached gradually (`Scaled`, asked for by `job.replace(batch=..., scale_lr=...,
warm_up=...)`), or an optimizer with a rate for every layer (`Lars`, `Lamb`).
"""

from paragrad.optim.lamb import Lamb
from paragrad.optim.lars import Lars
from paragrad.optim.rate_scaling import Scaled

__all__ = ["Lamb", "Lars", "Scaled"]
