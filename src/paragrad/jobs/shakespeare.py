"""Jobs on Tiny Shakespeare: predict the next character."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from paragrad.datasets.tinyshakespeare import CHARACTERS, load_speeches, load_windows, pad_speeches
from paragrad.errors import Refused
from paragrad.jobs.job import Job


class NextCharacter(nn.Module):
    """An LSTM from character numbers [n, t] to a score for each next character [n, 65, t]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 64)
        self.lstm = nn.LSTM(64, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, len(CHARACTERS))

    def forward(self, characters: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(characters))
        return self.linear(outputs).transpose(1, 2)


def shakespeare_lstm(hidden: int = 256, length: int = 128) -> Job:
    """Train a one-layer LSTM that predicts the next character of a speech of Shakespeare's plays.

    The loss is in nats per character. The weight of a batch is its number of characters, so padding
    does not count.

    Args:
        hidden: The size of the hidden state.
        length: The number of characters of a speech, at most.

    Returns:
        The job.

    Raises:
        Refused: An argument is below 1.
    """
    _refuse_below_one("shakespeare-lstm", hidden=hidden, length=length)
    return Job(
        name="shakespeare-lstm",
        arguments=(("hidden", hidden), ("length", length)),
        model=partial(NextCharacter, hidden),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        train=partial(load_speeches, train=True, length=length),
        test=partial(load_speeches, train=False, length=length),
        collate=pad_speeches,
        batch=32,
        epochs=4,
        clip_norm=1.0,
    )


class Block(nn.Module):
    """Causal attention, then two linear layers, each with a skip connection; norms come first."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.before_mlp = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        n, t, width = hidden.shape
        parts = (
            self.attention(self.before_attention(hidden))
            .view(n, t, 3 * self.heads, -1)
            .transpose(1, 2)
            .chunk(3, 1)
        )
        attended = nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, dropout_p=self.dropout.p if self.training else 0.0
        )
        hidden = hidden + self.dropout(
            self.projection(attended.transpose(1, 2).reshape(n, t, width))
        )
        return hidden + self.dropout(self.mlp(self.before_mlp(hidden)))


class SmallGPT(nn.Module):
    """A small GPT-2 (Radford et al. 2019): characters [n, t] to scores of the next ones [n, 65, t].

    Scores are products with the embeddings: one weight is used at both ends.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(CHARACTERS), bias=False)
        self.scores.weight = self.characters.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.dropout(self.characters(characters) + self.places(places))
        return self.scores(self.norm(self.blocks(hidden))).transpose(1, 2)


def shakespeare_gpt(
    layers: int = 4, width: int = 128, heads: int = 4, context: int = 64, dropout: float = 0.1
) -> Job:
    """Train a small GPT with tied weights and dropout on windows of Shakespeare's plays.

    The loss is in nats per character.

    Args:
        layers: The number of blocks.

        width: The size of the embeddings.

        heads: The number of attention heads; it must divide the width.

        context: The number of characters of a window.

        dropout: The dropout probability.

    Returns:
        The job.

    Raises:
        Refused: An argument is out of range.
    """
    _refuse_below_one("shakespeare-gpt", layers=layers, width=width, heads=heads, context=context)
    if width % heads:
        raise Refused(
            f"job shakespeare-gpt: width {width} is no multiple of heads {heads}; give one that is"
        )
    if not 0 <= dropout < 1:
        raise Refused(
            f"job shakespeare-gpt: dropout must be a number from 0 to below 1, got {dropout}"
        )
    return Job(
        name="shakespeare-gpt",
        arguments=(
            ("layers", layers),
            ("width", width),
            ("heads", heads),
            ("context", context),
            ("dropout", dropout),
        ),
        model=partial(SmallGPT, layers, width, heads, context, dropout),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(
            parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1
        ),
        train=partial(load_windows, train=True, length=context),
        test=partial(load_windows, train=False, length=context),
        batch=32,
        epochs=2,
        clip_norm=1.0,
    )


def _refuse_below_one(job: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise Refused(f"job {job}: {name} must be a whole number from 1, got {value}")
