"""Unusual models, inputs and losses, such as users write."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from zoo_rows import VECTORS, collate_sentences, draw_numbers


class NanoGpt(nn.Module):
    """A model like nanoGPT.

    Attention is sdpa with is_causal, dropout is 0.1, the output layer is tied to the embedding.
    """

    def __init__(self, mask: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.places = nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.Linear(16, 48)
        self.project = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 32)
        self.narrow = nn.Linear(32, 16)
        self.last = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight
        self.drop = nn.Dropout(0.1)
        if mask:
            self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))
        heads = (
            each.view(*tokens.shape, 2, 8).transpose(1, 2)
            for each in self.attention(self.norm(x)).split(16, 2)
        )
        mask = getattr(self, "mask", None)
        mixed = functional.scaled_dot_product_attention(
            *heads,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=0.1 if self.training and mask is None else 0.0,
        )
        x = x + self.drop(self.project(mixed.transpose(1, 2).reshape(x.shape)))
        return self.head(self.last(x + self.drop(self.narrow(functional.gelu(self.wide(x))))))


def compute_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.view(-1, output.size(-1)), target.reshape(-1))


class Bags(nn.Module):
    """A model with nn.EmbeddingBag over rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 8, mode="mean")
        self.out = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.out(self.bags(tokens, offsets))


def collate_end_to_end(
    samples: list[tuple[Tensor, Tensor]],
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Collate bags of unequal length into one vector, and give the start of each bag."""
    bags = [tokens[: 1 + int(tokens[0]) % 8] for tokens, _ in samples]
    starts = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
    return (torch.cat(bags), starts), torch.stack([target for _, target in samples])


class Graphs(nn.Module):
    """A graph network by index_add over one large graph made of all graphs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.second = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            sent = layer(nodes)
            nodes = torch.tanh(sent + torch.zeros_like(sent).index_add(0, edges[1], sent[edges[0]]))
        count = int(graph.max()) + 1
        return self.out(nodes.new_zeros(count, 16).index_add(0, graph, nodes))


class Molecules(Dataset):
    """Rings of 3 to 7 nodes."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return draw_numbers(3 + index % 5, 5, seed=index), index % 4


def collate_one_graph(samples: list[tuple[Tensor, int]]) -> tuple[tuple[Tensor, ...], Tensor]:
    sizes = [len(nodes) for nodes, _ in samples]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    edges = [
        start + torch.stack([torch.arange(size), (torch.arange(size) + 1) % size])
        for start, size in zip(starts, sizes, strict=True)
    ]
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return (torch.cat([nodes for nodes, _ in samples]), torch.cat(edges, 1), graph), torch.tensor(
        [kind for _, kind in samples]
    )


class Experts(nn.Module):
    """A mixture of experts in which each sample goes to its best expert.

    If an expert gets no sample of a share, it has no gradient on that rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(10, 6)
        self.out = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(10, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        hidden = x.new_zeros(len(x), 16)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero()[:, 0]
            if len(places):
                hidden = hidden.index_add(
                    0, places, weight[places, None] * torch.tanh(expert(x[places]))
                )
        return self.out(hidden)


class Tied(nn.Module):
    """A model that uses a function of a layer's weight again, and has parametrized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.middle = nn.utils.parametrizations.weight_norm(nn.Linear(10, 16))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        back = functional.linear(torch.tanh(self.first(x)), 0.5 * self.first.weight.t())
        return self.last(torch.tanh(self.middle(back)))


class Forces(nn.Module):
    """A model of an energy and its gradient by the positions, as for potentials of molecules.

    Its forward calls autograd.
    """

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        energy = self.energy(positions)[:, 0]
        (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -forces


def compute_force_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    energy, forces = output
    return functional.mse_loss(energy, target) + 0.1 * forces.square().mean()


class Residual(nn.Module):
    """A physics-informed network (PINN) that returns the difference of u''(x) and u(x).

    Autograd computes the second derivatives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.u(x)[:, 0]
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return curve.sum(1) - u


class Penalised(nn.Module):
    """A critic that returns its score, the norm of its gradient, and the norm of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        score = self.critic(x)[:, 0]
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score, slope.norm(dim=1), sum(weight.square().sum() for weight in self.parameters())


def compute_penalised_loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    score, slope, weights = output
    return functional.mse_loss(score, target) + 0.5 * (slope - 1).square().mean() + 1e-3 * weights


class Packed(nn.Module):
    """A model that takes a PackedSequence, which is a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, series: nn.utils.rnn.PackedSequence) -> Tensor:
        return self.out(self.cells(series)[1][0][-1])


def collate_packed(samples: list[tuple[Tensor, Tensor]]) -> tuple[Any, Tensor]:
    series = [x[: 2 + int(target)] for x, target in samples]
    return nn.utils.rnn.pack_sequence(series, enforce_sorted=False), torch.stack(
        [target for _, target in samples]
    )


class Reading(NamedTuple):
    left: Tensor
    right: Tensor


class Readings(Dataset):
    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[Reading, Tensor]:
        x, target = VECTORS[index]
        return Reading(x[:5], x[5:]), target


class OfReading(nn.Module):
    """A model that takes a named tuple as one argument, as in the model(inputs) of a plain loop."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 4)
        self.right = nn.Linear(5, 4)

    def forward(self, reading: Reading) -> Tensor:
        return self.left(reading.left) * torch.tanh(self.right(reading.right))


class ComplexFirst(nn.Module):
    """A model whose first parameter is complex; earlier, its inputs were cast to complex, too."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, 10))


class HalfFirst(nn.Module):
    """A model whose first parameter stays in bfloat16; earlier, its inputs were cast to it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.scale.to(x.dtype))


class WithConstants(nn.Module):
    """A model that multiplies by constants in float32, whatever the model's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x @ (torch.eye(10) + 0.1 * torch.ones(10, 10)))


class Counting(nn.Module):
    """A model that counts its steps in a buffer, which is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.out(x) * (1 + 0.01 * self.steps)


class MeanOverPadding(nn.Module):
    """A model whose mean over time includes padding, which is longer in a batch than in a share."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        return self.out(torch.tanh(self.tokens(input_ids).mean(1)))


def collate_with_kind(samples: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    return collate_sentences(samples), torch.stack([sample["kind"] for sample in samples])


class Squeezed(nn.Module):
    """A model that calls squeeze() without a dimension, so one sample gives a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze()


class ByPython(nn.Module):
    """A model that draws a factor from Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(10, 4)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * (1 + self.gain * random.random())


def compute_dice_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the Dice loss over the whole batch, a quotient of sums."""
    chances = output.softmax(1)
    truth = functional.one_hot(target, 4)
    return 1 - 2 * (chances * truth).sum() / (chances.sum() + truth.sum())
