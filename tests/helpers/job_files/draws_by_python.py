import random

from good import *


class Noisy(Net):
    def forward(self, x):
        return self.layers(x * (1 + 0.1 * random.random()))


job = job.replace(model=Noisy)
