"""Rare classes as often as frequent ones, by torch's WeightedRandomSampler.

    paragrad compare examples/weighted_sampler.py --strategies "serial; data(2)"
    python examples/weighted_sampler.py

The digits 0 to 4 are ten times as frequent in the training set as the others. An epoch draws 1,000
samples, each class equally often. The draws are a function of seed and epoch, so every strategy
trains on the same samples.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, WeightedRandomSampler

import paragrad as pg

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
# the first 1,200 samples train, of the rare classes every tenth
kept = (labels < 5) | (torch.arange(len(labels)) % 10 == 0)
kept[1200:] = False
train = TensorDataset(images[kept], labels[kept])
test = TensorDataset(images[1200:], labels[1200:])
weights = 1 / labels[kept].bincount()[labels[kept]]

job = pg.Job(
    name="balanced-digits",
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    train=train,
    sampler=WeightedRandomSampler(weights.tolist(), num_samples=1000),
    test=test,
    metric=pg.accuracy,
    batch=50,
    epochs=10,
)

if __name__ == "__main__":  # each rank imports this file too
    for sampler in (None, job.sampler):
        run = pg.train(job.replace(sampler=sampler, name="digits"), "data(2)", epochs=10)
        print(f"{'each sample once' if sampler is None else 'weighted'}: {run.test:.1f} %")
