"""An optimizer over the parameters of another model."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paragrad as pg

other = nn.Linear(10, 4)
job = pg.Job(
    name="others",
    model=lambda: nn.Linear(10, 4),
    loss=nn.functional.cross_entropy,
    batch=12,
    epochs=1,
    train=TensorDataset(torch.zeros(60, 10), torch.zeros(60, dtype=torch.long)),
    optimizer=lambda parameters: torch.optim.SGD(other.parameters(), lr=0.1),
)
