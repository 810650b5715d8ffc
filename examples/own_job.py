"""A job of your own, from the command line or from Python.

    paragrad train examples/own_job.py --strategy "data(2)"
    paragrad compare examples/own_job.py --strategies "serial; data(2); data(2, reduce=ring)"
    python examples/own_job.py

The last command trains it from Python.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paragrad as pg

points = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())

job = pg.Job(
    name="quadrants",
    model=lambda: nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    train=data,
    test=data,
    batch=64,
    epochs=5,
    metric=pg.accuracy,
)

if __name__ == "__main__":  # every rank imports this file too
    run = pg.train(job, "data(2)")
    print(run)
    print(run.model()(torch.tensor([[0.5, 0.5], [-0.5, 0.5]])).argmax(1))
