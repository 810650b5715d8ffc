"""Language models in plain torch, as users write them.

They are a GPT after nanoGPT, an LSTM, and an encoder with a mask in its batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from zoo_rows import collate_sentences, draw_integers

WORDS = 20
LENGTH = 8
WIDTH = 16


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(0.1)
        self.resid_dropout = nn.Dropout(0.1)
        self.register_buffer(
            "bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        k = k.view(b, t, 2, c // 2).transpose(1, 2)
        q = q.view(b, t, 2, c // 2).transpose(1, 2)
        v = v.view(b, t, 2, c // 2).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))  # type: ignore[index]
        y = self.attn_dropout(functional.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """The GPT of nanoGPT's model.py.

    It has tied weights and targets=None. Its forward makes the positions and returns the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(Block() for _ in range(3)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        device = idx.device
        _, t = idx.size()
        assert t <= LENGTH, f"cannot forward a sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:  # type: ignore[union-attr]
            x = block(x)
        x = self.transformer.ln_f(x)  # type: ignore[operator]
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
        )


class Lines(Dataset):
    """Sequences whose targets are the next tokens; some targets are -1, which is ignored."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        line = draw_integers(WORDS, LENGTH + 1, seed=200 + index)
        targets = torch.where(torch.arange(LENGTH) < 3 + index % 6, line[1:], -1)
        return {"idx": line[:-1], "targets": targets}


def return_second_output(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return output[1]


class LstmLanguageModel(nn.Module):
    """A model as in torch's word_language_model example.

    It has two layers with dropout, and its decoder is tied to its encoder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.drop(self.encoder(tokens)))
        return functional.log_softmax(self.decoder(self.drop(hidden)).view(-1, WORDS), dim=1)


def compute_word_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.nll_loss(output, target.reshape(-1))


class MaskedEncoder(nn.Module):
    """An encoder that takes the entries of a batch by name: tokens, and a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 3)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, **others: Tensor
    ) -> dict[str, Tensor]:
        positions = attention_mask.cumsum(1) * attention_mask
        hidden = self.encoder(
            self.tokens(input_ids) + self.places(positions),
            src_key_padding_mask=attention_mask == 0,
        )
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return {"logits": self.out((hidden * weight).sum(1) / weight.sum(1)), "hidden": hidden}


def collate_with_kinds(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {
        **collate_sentences(samples),
        "kind": torch.stack([sample["kind"] for sample in samples]),
    }


def compute_kind_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output["logits"], batch["kind"])
