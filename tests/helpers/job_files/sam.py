from good import *


class SAM(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, (
            "sharpness-aware minimization requires closure, but it was not provided"
        )


job = job.replace(optimizer=lambda parameters: SAM(parameters, lr=0.1))
