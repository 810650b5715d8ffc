"""A job whose optimizer updates by rows and columns of a whole tensor."""

import torch
from torch import nn

import paragrad as pg

job = pg.Job(
    model=lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)),
    loss=nn.functional.cross_entropy,
    optimizer=torch.optim.Adafactor,
    train=torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2),
    batch=4,
    epochs=1,
)
