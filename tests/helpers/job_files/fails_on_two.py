"""A job that fails with exactly two workers, which have 16 of 32 samples in a share."""

import torch
from good import Net, job


class Picky(Net):
    def forward(self, x):
        if (
            self.training
            and len(x) == 16
            and not torch.equal(
                x[0], job.train[job.make_order(range(150)).get_indices(0, range(1))[0]][0]
            )
        ):
            raise RuntimeError("two is one too many")
        return super().forward(x)


job = job.replace(name="picky", model=Picky)
