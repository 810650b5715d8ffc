"""A job whose optimizer has weights for training and others for tests."""

from good import *


class Moded(torch.optim.SGD):
    def train(self): ...

    def eval(self): ...


job = job.replace(optimizer=lambda parameters: Moded(parameters, lr=0.1))
