"""A dataset of your own: sentences of different lengths, padding, and a random transform.

    paragrad train examples/own_dataset.py --strategy "data(2)" --loaders 1

Each sample is a dict. Every sample counts once in an epoch. Its transform draws the same numbers on
whichever rank loads it. Padding (label -100) does not count.
"""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import paragrad as pg

WORDS = 40
NOISE = 0.1


class Sentences(Dataset):
    """Each word is twice the word before it, plus one, modulo the number of words."""

    def __len__(self):
        return 500

    def __getitem__(self, index):
        length = 5 + index % 7
        word = index % WORDS
        words = [word := (2 * word + 1) % WORDS for _ in range(length)]
        # a random transform: some words are replaced
        inputs = [
            random.randrange(WORDS) if random.random() < NOISE else each for each in words[:-1]
        ]
        return {"words": torch.tensor(inputs), "labels": torch.tensor(words[1:])}


def pad_samples(samples):
    """Pads the samples of a batch to the longest one."""
    return {
        name: pad_sequence(
            [sample[name] for sample in samples], batch_first=True, padding_value=filling
        )
        for name, filling in (("words", 0), ("labels", -100))
    }


class Reader(nn.Module):
    """Predicts each next word; the entries of a sample are its arguments, by name."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.out = nn.Linear(32, WORDS)

    def forward(self, words, labels):
        return self.out(self.embedding(words))


job = pg.Job(
    name="sentences",
    model=Reader,
    train=Sentences(),
    batch=50,
    epochs=5,
    collate=pad_samples,
    loss=lambda output, sample: nn.functional.cross_entropy(
        output.flatten(0, 1), sample["labels"].flatten()
    ),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
)
