"""A masked language model: a small BERT that learns to fill in hidden letters.

    paragrad train examples/masked_language_model.py --strategy "data(2)"
    python examples/masked_language_model.py

The collate function hides a seventh of the letters at random. paragrad gives it whole batches, with
the same random numbers under every strategy; each rank then takes its rows. So the training and the
test are those of one worker. The loss is a mean over the hidden letters: ranks have different
numbers of them, and the mean is taken over all.
"""

import random

import torch
from torch import nn
from torch.utils.data import Dataset

import paragrad as pg

WORDS = ("forward", "backward", "gradient", "exchange", "update", "tensor", "rank", "bucket")
LETTERS = sorted({*"".join(WORDS), " "})
MASK = len(LETTERS)  # the number of the hidden letter
LENGTH = 32


class Lines(Dataset):
    """Lines of random words, cut at both ends."""

    def __init__(self, first, last):
        self.first, self.last = first, last

    def __len__(self):
        return self.last - self.first

    def __getitem__(self, index):
        draw = random.Random(index + self.first)
        text = " ".join(draw.choice(WORDS) for _ in range(8))
        start = draw.randrange(8)
        return torch.tensor([LETTERS.index(each) for each in text[start : start + LENGTH]])


def hide(samples):
    """Hide characters; the loss counts the hidden ones alone."""
    letters = torch.stack(samples)
    hidden = torch.rand(letters.shape) < 0.15
    return {
        "letters": letters.masked_fill(hidden, MASK),
        "targets": letters.masked_fill(~hidden, -100),
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS) + 1, 64)
        self.places = nn.Parameter(torch.randn(LENGTH, 64) / 2)
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, len(LETTERS))

    def forward(self, letters, targets):
        return self.out(self.encoder(self.letters(letters) + self.places))


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def accuracy(output, batch):
    counts = batch["targets"] != -100
    return pg.accuracy(output[counts], batch["targets"][counts])


job = pg.Job(
    name="masked-letters",
    model=Net,
    loss=loss,
    metric=accuracy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
    train=Lines(0, 2000),
    test=Lines(2000, 2200),
    collate=hide,
    batch=20,
    epochs=4,
)

if __name__ == "__main__":  # each rank imports this file too
    for strategy in ("serial", "data(2)"):
        run = pg.train(job, strategy)
        print(f"{strategy}: {run.test:.1f} % of the hidden letters are right")
