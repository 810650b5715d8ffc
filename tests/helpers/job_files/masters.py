"""A job whose optimizer steps float32 copies of bfloat16 weights."""

from good import *


class Masters(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault(
                "master", parameter.detach().to(torch.float32, copy=True)
            )
            master.sub_(0.1 * parameter.grad if parameter.grad is not None else 0)
            parameter.data.copy_(master)


job = job.replace(optimizer=lambda parameters: Masters(parameters, lr=0.1))
