"""Jobs whose models draw random numbers: all kinds of dropout, noise, attention, recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout as dropout_by_name
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from zoo_rows import (
    IMAGES,
    SEQUENCES,
    SMALL_IMAGES,
    UNCUT,
    VECTORS,
    WITHOUT_MICRO,
    Equal,
    Row,
    make_row,
)


class Changed(nn.Module):
    """A model with two layers, between which `change` changes the hidden values."""

    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.second = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.change(self, torch.tanh(self.first(x)))))


class Encoder(nn.Module):
    """nn.TransformerEncoder with its default dropout of 0.1.

    The first dimension is the sequence, as by default, or the batch.
    """

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.batch_first = batch_first
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x if self.batch_first else x.transpose(0, 1))
        return self.out(x.mean(1 if self.batch_first else 0))


class SequenceFirst(Encoder):
    """An encoder whose inputs are sequence first, too: the collate function makes them so."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x).mean(0))


class Attention(nn.Module):
    """nn.MultiheadAttention with dropout.

    It uses the fused path, which returns no weights, or the path that returns weights.
    """

    def __init__(self, batch_first: bool, weights: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.weights = weights
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=batch_first)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        hidden, _ = self.attention(x, x, x, need_weights=self.weights)
        return self.out(hidden.mean(1 if self.batch_first else 0))


class Recurrent(nn.Module):
    """A recurrent network with its own dropout between its layers, batch or sequence first."""

    def __init__(self, kind: str, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.cells = getattr(nn, kind)(8, 8, 2, dropout=0.3, batch_first=batch_first)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.cells(x if self.batch_first else x.transpose(0, 1))
        return self.out(hidden.mean(1 if self.batch_first else 0))


class Encoding(nn.Module):
    """A variational auto-encoder that draws noise for every sample; its loss has two terms."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(10, 8)
        self.decoder = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(code), x, mean, log_variance


def compute_evidence_loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    made, x, mean, log_variance = output
    apart = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return functional.mse_loss(made, x, reduction="none").sum(1).mean() + 0.1 * apart


class Denoising(nn.Module):
    """A small U-Net that learns to find the noise added to an image.

    Its forward draws the noise and the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.SiLU(), nn.Dropout2d(0.1))
        self.up = nn.ConvTranspose2d(16, 3, 2, 2)
        self.time = nn.Embedding(10, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        time = torch.randint(0, 10, (len(x),))
        noise = torch.randn_like(x)
        kept = (1 - time / 10).to(x.dtype).view(-1, 1, 1, 1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        down = (
            self.down(torch.cat([noisy, kept.expand(-1, 1, *x.shape[2:])], 1))
            + self.time(time)[..., None, None]
        )
        return self.up(torch.cat([down, self.middle(down)], 1)), noise


def compute_noise_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.mse_loss(*output)


class Time(Dataset):
    """Sequences of unequal length."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, target = SEQUENCES[index]
        return x[: 2 + index % 5], target


def collate_sequence_first(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples], 1), torch.stack([target for _, target in samples])


def pad_sequences(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return x, torch.stack([target for _, target in samples])


def apply_dropped_weight(model: Any, h: Tensor) -> Tensor:
    return functional.linear(
        h, functional.dropout(model.second.weight, 0.3, model.training), model.second.bias
    )


def apply_noisy_weight(model: Any, h: Tensor) -> Tensor:
    return functional.linear(
        h, model.second.weight + 0.1 * torch.randn_like(model.second.weight), model.second.bias
    )


def checkpoint_named_dropout(model: Any, h: Tensor) -> Tensor:
    return checkpoint(
        lambda each: dropout_by_name(torch.tanh(model.second(each)), 0.5, model.training),
        h,
        use_reentrant=False,
    )


def checkpoint_reentrant(model: Any, h: Tensor) -> Tensor:
    return checkpoint(
        lambda each: functional.dropout(torch.tanh(model.second(each)), 0.5, model.training),
        h,
        use_reentrant=True,
    )


def checkpoint_nested(model: Any, h: Tensor) -> Tensor:
    def apply_inner_dropout(each: Tensor) -> Tensor:
        return functional.dropout(torch.tanh(model.second(each)), 0.3, model.training)

    def apply_outer_dropout(each: Tensor) -> Tensor:
        return functional.dropout(
            checkpoint(apply_inner_dropout, each, use_reentrant=False), 0.2, model.training
        )

    return checkpoint(apply_outer_dropout, h, use_reentrant=False)


def checkpoint_attention(model: Any, h: Tensor) -> Tensor:
    def attend(each: Tensor) -> Tensor:
        heads = each.view(-1, 2, 4, 2).transpose(1, 2)
        return (
            functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
            .transpose(1, 2)
            .reshape(each.shape)
        )

    return checkpoint(attend, model.second(h), use_reentrant=False)


def drop_layer(model: Any, h: Tensor) -> Tensor:
    return h + (torch.rand([]) < 0.5) * model.second(h)


def make_masked_builder(draw: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Changed(lambda model, h: model.second(h) * draw(h))


def make_vectors_row(name: str, change: Callable[[Any, Tensor], Tensor], story: str) -> Row:
    return make_row(name, lambda: Changed(change), VECTORS, Equal(), story)


def make_sequences_row(
    name: str, model: Callable[[], nn.Module], story: str, **changes: Any
) -> Row:
    return make_row(name, model, SEQUENCES, Equal(), story, **changes)


OWN = "every rank drew from its own generator"
AGAIN = "the mask drawn again in backward was another one: wrong gradients, under serial too"
ROWS = (
    make_sequences_row(
        "TransformerEncoder, batch first",
        lambda: Encoder(True),
        "dropout in scaled_dot_product_attention: " + OWN,
    ),
    make_sequences_row(
        "TransformerEncoder, sequence first",
        lambda: Encoder(False),
        "a draw's second dimension is the sample",
    ),
    make_sequences_row(
        "TransformerEncoder, its batches sequence first",
        lambda: SequenceFirst(False),
        "was refused for its dropout",
        collate=collate_sequence_first,
        under=WITHOUT_MICRO,
        but=UNCUT,
    ),
    make_sequences_row("MultiheadAttention, batch first", lambda: Attention(True, False), OWN),
    make_sequences_row("MultiheadAttention, sequence first", lambda: Attention(False, False), OWN),
    make_sequences_row(
        "MultiheadAttention, with weights",
        lambda: Attention(True, True),
        "dropout of samples x heads",
    ),
    make_sequences_row("LSTM with dropout", lambda: Recurrent("LSTM", True), OWN),
    make_sequences_row("GRU with dropout, sequence first", lambda: Recurrent("GRU", False), OWN),
    make_row(
        "dropout on padded sequences",
        lambda: nn.Sequential(nn.Dropout(0.3), Recurrent("LSTM", True)),
        Time(),
        Equal(),
        "keys are coordinates: padding must not move them",
        collate=pad_sequences,
    ),
    make_vectors_row(
        "DropConnect",
        apply_dropped_weight,
        "dropout of a weight: one mask for all ranks, not one each",
    ),
    make_vectors_row("noise on a weight", apply_noisy_weight, "the same, by randn_like"),
    make_vectors_row(
        "alpha dropout",
        lambda model, h: functional.alpha_dropout(model.second(h), 0.3, model.training),
        OWN,
    ),
    make_vectors_row(
        "feature alpha dropout",
        lambda model, h: functional.feature_alpha_dropout(
            model.second(h).view(-1, 4, 4), 0.3, model.training
        ).flatten(1),
        OWN,
    ),
    make_vectors_row(
        "dropout1d",
        lambda model, h: functional.dropout1d(
            model.second(h).view(-1, 4, 4), 0.3, model.training
        ).flatten(1),
        "one draw per channel",
    ),
    make_row(
        "rand_like", make_masked_builder(lambda h: 0.5 + torch.rand_like(h)), VECTORS, Equal(), OWN
    ),
    make_row(
        "randn of a shape",
        make_masked_builder(lambda h: 1 + 0.1 * torch.randn(h.shape, dtype=h.dtype)),
        VECTORS,
        Equal(),
        OWN,
    ),
    make_row(
        "bernoulli of probabilities",
        make_masked_builder(lambda h: torch.bernoulli(torch.sigmoid(h.detach()))),
        VECTORS,
        Equal(),
        OWN,
    ),
    make_row(
        "bernoulli_ per sample",
        make_masked_builder(lambda h: h.new_empty(len(h), 1).bernoulli_(0.7)),
        VECTORS,
        Equal(),
        "DropPath",
    ),
    make_row(
        "gumbel softmax",
        make_masked_builder(lambda h: functional.gumbel_softmax(h, dim=1)),
        VECTORS,
        Equal(),
        "by exponential_",
    ),
    make_row(
        "multinomial",
        make_masked_builder(
            lambda h: functional.one_hot(torch.multinomial(h.detach().softmax(1), 1)[:, 0], 16)
        ),
        VECTORS,
        Equal(),
        "samples an index for every sample",
    ),
    make_row(
        "rrelu",
        lambda: nn.Sequential(nn.Linear(10, 16), nn.RReLU(), nn.Linear(16, 4)),
        VECTORS,
        Equal(),
        OWN,
    ),
    make_row(
        "fractional max pool",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.FractionalMaxPool2d(2, 4), nn.Flatten(), nn.Linear(64, 4)
        ),
        SMALL_IMAGES,
        Equal(),
        "draws where it pools",
    ),
    make_vectors_row(
        "layer drop", drop_layer, "one number for the whole batch: every rank drew its own"
    ),
    make_vectors_row("checkpoint, dropout by name", checkpoint_named_dropout, AGAIN),
    make_vectors_row("checkpoint, reentrant", checkpoint_reentrant, AGAIN),
    make_vectors_row("checkpoint, nested", checkpoint_nested, AGAIN),
    make_vectors_row("checkpoint, attention", checkpoint_attention, AGAIN),
    make_row(
        "vae", Encoding, VECTORS, Equal(), "reparametrisation noise", loss=compute_evidence_loss
    ),
    make_row(
        "diffusion u-net",
        Denoising,
        IMAGES,
        Equal(),
        "noise and time of every sample",
        loss=compute_noise_loss,
    ),
)
