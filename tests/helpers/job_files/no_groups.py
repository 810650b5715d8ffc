import torch
from good import *


class Around(torch.optim.Optimizer):
    """A wrapper that does not call Optimizer.__init__, and hides its inner optimizer's groups."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure=None):
        self.inner.step()


job = job.replace(optimizer=Around)
