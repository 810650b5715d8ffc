from good import *


class Mixing(Net):
    def forward(self, x):
        return self.layers(0.9 * x + 0.1 * x[torch.randperm(len(x))] if self.training else x)


job = job.replace(model=Mixing)
