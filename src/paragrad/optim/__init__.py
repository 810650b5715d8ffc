"""Learning rates and optimizers for batches larger than the one a job was written for.

`Scaled` scales the learning rate and reaches it gradually. It is requested by
`job.replace(batch=..., scale_lr=..., warm_up=...)`. `Lars` and `Lamb` have a learning rate for each
layer.
"""

from paragrad.optim.lamb import Lamb
from paragrad.optim.lars import Lars
from paragrad.optim.rate_scaling import Scaled

__all__ = ["Lamb", "Lars", "Scaled"]
