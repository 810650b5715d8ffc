"""Rows with the models and inputs of `unusual_models.py`, which are such as users write."""

from __future__ import annotations

from collections.abc import Callable

import language_models as language
import torch
import unusual_models as odd
from equality_table import make_batch_norm_cnn, make_mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from zoo_rows import (
    DATA,
    GRADIENTS,
    LOOKS,
    ONE_MODULE,
    PIPELINE,
    POINTS,
    SEQUENCES,
    SMALL_IMAGES,
    UNCUT,
    VECTORS,
    WITHOUT_MICRO,
    Equal,
    Refused,
    Row,
    Sentences,
    draw_integers,
    draw_numbers,
    expect_refusal_in_parts,
    make_adam,
    make_row,
)

TOKENS = TensorDataset(draw_integers(20, 29, 8, seed=11), draw_integers(20, 29, 8, seed=12))
BAGS = TensorDataset(draw_integers(20, 29, 8, seed=11), draw_integers(4, 29, seed=2))
LEVELS = TensorDataset(draw_numbers(29, 10, seed=1), draw_numbers(29, seed=9))
MANY = TensorDataset(draw_numbers(29, 10, seed=1), (draw_numbers(29, 4, seed=10) > 0).float())


class NormRelu(nn.BatchNorm2d):
    """A batch norm whose own forward includes an activation.

    Earlier, this forward was replaced, and the activation was lost.
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(super().forward(x))


class FunctionalNorm(nn.Module):
    """A model that calls F.batch_norm itself, with buffers of other names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.variance, training=self.training)


def make_builder_with_norm(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(2, 4, 3), norm(), nn.Flatten(), nn.Linear(144, 4))


def make_lazy_mlp() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))


def make_compiled_mlp() -> nn.Module:
    """Return a compiled model; its backend needs no C++ compiler."""
    return torch.compile(
        nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)), backend="eager"
    )


OF_ONE = {
    PIPELINE: Refused(
        "batch norm cannot train on one sample .* out of a batch of 6; give micro of at most 3"
    )
}
ROUNDED = "its constants are in float32"
ROWS: tuple[Row, ...] = (
    make_row(
        "nanoGPT",
        odd.NanoGpt,
        TOKENS,
        Equal(),
        "tied weights, dropout in attention",
        loss=odd.compute_token_loss,
    ),
    make_row(
        "nanoGPT, a mask of -inf",
        lambda: odd.NanoGpt(True),
        TOKENS,
        Equal(),
        "an infinite buffer switched the comparison off",
        loss=odd.compute_token_loss,
    ),
    make_row("EmbeddingBag", odd.Bags, BAGS, Equal(), "rows of tokens"),
    make_row(
        "EmbeddingBag, bags end to end",
        odd.Bags,
        BAGS,
        Equal(),
        "no dimension of the inputs is the samples",
        collate=odd.collate_end_to_end,
        under=WITHOUT_MICRO,
        but=UNCUT,
    ),
    make_row(
        "graph network",
        odd.Graphs,
        odd.Molecules(),
        Equal(),
        "one graph of all samples",
        collate=odd.collate_one_graph,
        under=WITHOUT_MICRO,
        but=UNCUT,
    ),
    make_row(
        "mixture of experts", odd.Experts, VECTORS, Equal(), "experts without a sample", but=LOOKS
    ),
    make_row(
        "weights tied by a function",
        odd.Tied,
        VECTORS,
        Equal(),
        "one weight used twice; weight and spectral norm, where every forward makes a step of a "
        "power iteration",
        but=dict.fromkeys((DATA[3], PIPELINE), Refused("not one worker's training")),
    ),
    make_row(
        "python's random in forward",
        odd.ByPython,
        VECTORS,
        Equal(),
        "every rank drew its own, and nothing saw it",
        but=expect_refusal_in_parts(
            "the model draws from random, and in parts its calls are others; draw by torch, or in "
            "the dataset"
        ),
    ),
    make_row(
        "dice over the batch",
        make_mlp,
        VECTORS,
        Equal(),
        "of one class a sample it is a mean",
        loss=odd.compute_dice_loss,
    ),
    make_row(
        "forces",
        odd.Forces,
        LEVELS,
        Equal(),
        "autograd inside forward: crashed at the door, under no_grad",
        loss=odd.compute_force_loss,
        but=GRADIENTS,
    ),
    make_row(
        "pinn",
        odd.Residual,
        LEVELS,
        Equal(),
        "second derivatives",
        loss=lambda output, target: output.square().mean(),
        but=GRADIENTS,
    ),
    make_row(
        "gradient penalty",
        odd.Penalised,
        LEVELS,
        Equal(),
        "and a penalty of the weights",
        loss=odd.compute_penalised_loss,
        but=GRADIENTS,
    ),
    make_row(
        "PackedSequence",
        odd.Packed,
        SEQUENCES,
        Equal(),
        "was taken apart, as a tuple of inputs is",
        collate=odd.collate_packed,
        under=WITHOUT_MICRO,
        but=UNCUT,
    ),
    make_row(
        "named tuple",
        odd.OfReading,
        odd.Readings(),
        Equal(),
        "was taken apart, as a tuple of inputs is",
    ),
    make_row(
        "complex first parameter",
        odd.ComplexFirst,
        VECTORS,
        Equal(),
        "inputs were cast to it",
        but=ONE_MODULE,
    ),
    make_row(
        "bfloat16 first parameter",
        odd.HalfFirst,
        VECTORS,
        Equal(),
        "inputs were cast to it",
        but=ONE_MODULE,
    ),
    make_row(
        "constants in float32",
        odd.WithConstants,
        VECTORS,
        Equal(ROUNDED),
        "a traceback in float64",
        but=ONE_MODULE,
    ),
    make_row(
        "batch norm with its activation",
        make_builder_with_norm(lambda: NormRelu(4)),
        SMALL_IMAGES,
        Equal(),
        "lost its activation",
    ),
    make_row(
        "batch norm by its function",
        make_builder_with_norm(FunctionalNorm),
        SMALL_IMAGES,
        Equal(),
        "statistics of a share, no word",
    ),
    make_row(
        "SyncBatchNorm",
        make_builder_with_norm(lambda: nn.SyncBatchNorm(4)),
        SMALL_IMAGES,
        Equal(),
        "has no kernel on the CPU",
    ),
    make_row(
        "batch norm, adam",
        make_batch_norm_cnn,
        SMALL_IMAGES,
        Equal(),
        "its running statistics alone are excused",
        optimizer=make_adam,
        but=OF_ONE,
    ),
    make_row(
        "instance and group norm",
        make_builder_with_norm(
            lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4))
        ),
        SMALL_IMAGES,
        Equal("a bias before instance norm has a gradient of exactly zero"),
        "statistics of a sample",
    ),
    make_row(
        "counting its steps",
        odd.Counting,
        VECTORS,
        Equal(),
        "a buffer that is the same on all ranks",
        under=WITHOUT_MICRO,
        but=ONE_MODULE,
    ),
    make_row(
        "mean over padding",
        odd.MeanOverPadding,
        Sentences(),
        Equal(),
        "7.5e-2 in our page's example",
        collate=odd.collate_with_kind,
    ),
    make_row("lazy modules", make_lazy_mlp, VECTORS, Equal(), "no shapes before the first batch"),
    make_row("squeezed", odd.Squeezed, LEVELS, Equal(), "a share of one sample", loss=nn.MSELoss()),
    make_row(
        "compiled",
        make_compiled_mlp,
        VECTORS,
        Equal(),
        "torch.compile'd by the user",
        but=expect_refusal_in_parts(
            "torch.compile made the model one graph, which cannot be divided; give the model "
            "without torch.compile"
        ),
    ),
    make_row(
        "several labels",
        lambda: nn.Linear(10, 4),
        MANY,
        Equal(),
        "a mean over samples and labels",
        loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        but=ONE_MODULE,
    ),
    make_row(
        "batch norm of vectors",
        lambda: nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)),
        POINTS,
        Equal(),
        "one-dimensional batch norm",
        but=OF_ONE,
    ),
    make_row(
        "nanoGPT as it is written",
        language.Gpt,
        language.Lines(),
        Equal(),
        "targets=None, the loss in the output",
        loss=language.return_second_output,
    ),
    make_row(
        "LSTM language model",
        language.LstmLanguageModel,
        TOKENS,
        Equal(),
        "tied to its embedding; samples x time as one",
        loss=language.compute_word_loss,
    ),
    make_row(
        "encoder with a mask in its batch",
        language.MaskedEncoder,
        Sentences(),
        Equal(),
        "positions are sums over the mask",
        loss=language.compute_kind_loss,
        collate=language.collate_with_kinds,
    ),
)
