"""A dataset that raises at a sample, in a method that `__getitem__` calls."""

import torch
from torch import nn

import paragrad as pg


class Shrinks:
    """A dataset that reports 60 samples and has 40."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return [(torch.zeros(10), 0)] * 40 and self.read(index)

    def read(self, index):
        return ([(torch.zeros(10), 0)] * 40)[index]


job = pg.Job(
    name="shrinks",
    model=lambda: nn.Linear(10, 4),
    loss=nn.functional.cross_entropy,
    train=Shrinks(),
    batch=12,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    epochs=1,
)
