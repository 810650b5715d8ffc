"""A stream: samples that a file gives one after the other, and no sample by its number.

    python examples/stream.py
    paragrad train examples/stream.py --strategy "data(2)" --loaders 1

The digits of scikit-learn lie in a compressed text file, one image a line. The stream gives lines,
which are cheap to read, through a buffer that shuffles them. `transform` turns a line into tensors;
a rank does so for its own samples only. Every strategy trains on the same samples in this order.
"""

import gzip
import importlib.resources
import itertools
import random

import torch
from torch import nn

import paragrad as pg

FILE = importlib.resources.files("sklearn.datasets") / "data" / "digits.csv.gz"
TRAIN = 1400  # of 1,797 lines


def read_lines():
    with FILE.open("rb") as compressed, gzip.open(compressed, "rt") as lines:
        yield from lines


def shuffle_lines(epoch):
    """Give the lines of the training set in another order in each epoch.

    The generators of torch, numpy and random are seeded by the seed of the job and the epoch.
    """
    buffer = []
    for line in itertools.islice(read_lines(), TRAIN):
        buffer.append(line)
        if len(buffer) == 256:
            yield buffer.pop(random.randrange(len(buffer)))
    random.shuffle(buffer)
    yield from buffer


def read_test_lines(epoch):
    return itertools.islice(read_lines(), TRAIN, None)


def parse_line(line):
    *pixels, label = map(float, line.split(","))
    return torch.tensor(pixels) / 16, int(label)


job = pg.Job(
    name="streamed-digits",
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    train=pg.Stream(shuffle_lines, length=TRAIN, transform=parse_line),
    test=pg.Stream(read_test_lines, length=397, transform=parse_line),
    metric=pg.accuracy,
    batch=50,
    epochs=5,
)

if __name__ == "__main__":  # each rank imports this file too
    for strategy in ("serial", "data(2)"):
        run = pg.train(job, strategy)
        print(f"{strategy}: {run.test:.1f} %, last loss {run.losses[-1]:.4f}")
