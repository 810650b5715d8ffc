"""The job on tiny Shakespeare: which character comes next."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from paragrad.datasets.text import CHARACTERS, pad, speeches
from paragrad.errors import Refused
from paragrad.jobs.job import Job


class NextCharacter(nn.Module):
    """Numbers of characters [n, t] -> a score for every character that may come next [n, 65, t]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 64)
        self.lstm = nn.LSTM(64, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, len(CHARACTERS))

    def forward(self, characters: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(characters))
        return self.linear(outputs).transpose(1, 2)


def shakespeare_lstm(hidden: int = 256, length: int = 128) -> Job:
    """A one-layer LSTM that reads a speech of Shakespeare's, at most `length` characters of it, and guesses the next.

    The loss is in nats per character; a batch's weight is its characters, so padding counts for nothing. Raises Refused.
    """
    for name, value in (("hidden", hidden), ("length", length)):
        if value < 1:
            raise Refused(f"job shakespeare-lstm: {name} must be a whole number from 1, got {value}")
    return Job(
        name="shakespeare-lstm", arguments=(("hidden", hidden), ("length", length)),
        model=partial(NextCharacter, hidden), loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        train=partial(speeches, train=True, length=length), test=partial(speeches, train=False, length=length),
        collate=pad, batch=32, epochs=4, clip_norm=1.0)
