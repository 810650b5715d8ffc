"""A job file: real digits, two epochs."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from paragrad import Job, accuracy

images, labels = load_digits(return_X_y=True)
digits = TensorDataset(
    torch.tensor(images / 16, dtype=torch.float32)[:150], torch.tensor(labels)[:150]
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.layers(x)


job = Job(
    name="good",
    model=Net,
    loss=nn.functional.cross_entropy,
    train=digits,
    test=digits,
    metric=accuracy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch=32,
    epochs=2,
)
