from good import *

job = job.replace(
    loss=lambda output, target: nn.functional.cross_entropy(output, target, reduction="sum")
)
