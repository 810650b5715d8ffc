"""Jobs that no division trains as one worker does, or that cannot be trained here at all.

One message refuses each of them before any harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from equality_table import make_mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, IterableDataset
from zoo_libraries import foreign
from zoo_rows import (
    SMALL_IMAGES,
    VECTORS,
    WHOLE,
    Refused,
    Row,
    Sentences,
    collate_sentences,
    make_adam,
    make_row,
)

# the messages must say that a loss or a model mixes samples
MIXES = r"(?i)mix|no mean over samples|other samples|does not add up"
# if the output depends on the buffer, validation finds the buffer first
BUFFER = MIXES + r"|buffer"


class Contrasting(nn.Module):
    """A model that returns two views of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.encoder(x[:, :5])), functional.normalize(
            self.encoder(x[:, 5:])
        )


def compute_contrastive_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Return the InfoNCE loss, for which every other sample of the batch is a negative."""
    left, right = output
    return functional.cross_entropy(left @ right.t() / 0.1, torch.arange(len(left)))


def compute_loss_with_batch_term(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target) + 2e-3 * output.mean(0).square().sum()


def compute_covariance_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss with a covariance over the batch, as in VICReg and Barlow Twins."""
    apart = output - output.mean(0)
    return (
        functional.cross_entropy(output, target)
        + 0.1 * (apart.t() @ apart / len(output)).square().mean()
    )


def compute_root_mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - functional.one_hot(target, 4)).square().mean().sqrt()


class Centred(nn.Module):
    """A model that subtracts the mean over the batch.

    It may have a buffer of -inf; earlier, such a buffer switched the comparison off.
    """

    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.out = nn.Linear(16, 4)
        if buffer:
            self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden - hidden.mean(0))


class AcrossSamples(nn.Module):
    """A model with attention over the batch.

    Its nn.MultiheadAttention lacks batch_first=True, but the input has the batch first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]
        )


class Mixing(nn.Module):
    """A model with mixup in its forward, by randperm over the share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(0.7 * x + 0.3 * x[torch.randperm(len(x))] if self.training else x)


class CountsSamples(nn.Module):
    """A model that counts its samples in a buffer, although a rank sees only its share.

    Earlier, if a model had batch norm, wrong values of all its buffers were ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return self.layers(x) / (1 + 0.01 * self.seen)


class Codebook(nn.Module):
    """A model that computes a running mean in a buffer itself, as codebooks of VQ-VAEs do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.out = nn.Linear(8, 4)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.centre.lerp_(hidden.detach().mean(0), 0.1)  # type: ignore[operator]
        return self.out(hidden - self.centre)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(VECTORS)


class Captions(Dataset):
    """Pairs of an image and its caption, for CLIP."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            **Sentences()[index],
            "image": torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index)),
        }


def collate_captions(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    batch = collate_sentences(samples)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "return_loss": True,
        "pixel_values": torch.stack([sample["image"] for sample in samples]),
    }


def make_clip() -> nn.Module:
    library = foreign("transformers")
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return library.CLIPModel(
        library.CLIPConfig(
            text_config={
                **small,
                "vocab_size": 50,
                "max_position_embeddings": 16,
                "eos_token_id": 2,
                "projection_dim": 8,
            },
            vision_config={**small, "image_size": 16, "patch_size": 8, "projection_dim": 8},
            projection_dim=8,
        )
    )


def make_balanced_mixtral() -> nn.Module:
    """Return Mixtral with its loss for balanced experts, a product of means over the batch."""
    library = foreign("transformers")
    return library.MixtralForCausalLM(
        library.MixtralConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=50,
            num_local_experts=4,
            max_position_embeddings=16,
            experts_implementation="eager",
            output_router_logits=True,
        )
    )


def make_refused_row(
    name: str,
    match: str,
    story: str,
    model: Callable[[], nn.Module] = make_mlp,
    data: Any = VECTORS,
    needs: tuple[str, ...] = (),
    **changes: Any,
) -> Row:
    return make_row(name, model, data, Refused(match), story, needs, **changes)


ROWS: tuple[Row, ...] = (
    make_refused_row(
        "contrastive loss",
        MIXES,
        "a share has fewer negatives",
        Contrasting,
        loss=compute_contrastive_loss,
        but=WHOLE,
    ),
    make_refused_row(
        "clip",
        MIXES,
        "the same, inside the model",
        make_clip,
        Captions(),
        ("transformers",),
        collate=collate_captions,
        loss=lambda output, batch: output.loss,
        but=WHOLE,
    ),
    make_refused_row(
        "mixtral, balanced experts",
        MIXES,
        "a product of two means over the batch",
        make_balanced_mixtral,
        Sentences(),
        ("transformers",),
        collate=collate_sentences,
        loss=lambda output, batch: output.loss,
        but=WHOLE,
    ),
    make_refused_row(
        "batch term of 2e-3",
        MIXES,
        "below the door's bound of 1e-3 of the value",
        loss=compute_loss_with_batch_term,
        but=WHOLE,
    ),
    make_refused_row(
        "covariance over the batch",
        MIXES,
        "VICReg's, Barlow Twins'",
        loss=compute_covariance_loss,
        but=WHOLE,
    ),
    make_refused_row(
        "root of a mean",
        MIXES,
        "the mean of roots is not the root of the mean",
        loss=compute_root_mean_square,
        but=WHOLE,
    ),
    make_refused_row(
        "mean over the batch in the model",
        MIXES,
        "the door cut the output, and did not ask the model again",
        Centred,
        but=WHOLE,
    ),
    make_refused_row(
        "mean over the batch, a buffer of -inf",
        MIXES,
        "verify said yes: the infinite buffer switched it off",
        lambda: Centred(True),
        but=WHOLE,
    ),
    make_refused_row(
        "attention over the batch", MIXES, "batch_first forgotten", AcrossSamples, but=WHOLE
    ),
    make_refused_row("mixup in forward", MIXES, "a permutation of the share", Mixing),
    make_refused_row(
        "batch norm, a buffer that counts its share",
        BUFFER,
        "verify said yes, beside Adam",
        CountsSamples,
        SMALL_IMAGES,
        optimizer=make_adam,
        but=WHOLE,
    ),
    make_refused_row("a running mean of its share", BUFFER, "a codebook's", Codebook, but=WHOLE),
    make_refused_row(
        "LBFGS",
        "LBFGS needs a closure",
        "it runs the model inside the update",
        optimizer=lambda parameters: torch.optim.LBFGS(parameters),
    ),
    make_refused_row(
        "ReduceLROnPlateau",
        "ReduceLROnPlateau needs a metric",
        "it wants a number that the step does not have",
        scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    ),
    make_refused_row(
        "IterableDataset", r"paragrad.Stream", "an order that is not ours to cut", data=Stream()
    ),
    make_refused_row(
        "sparse embedding",
        "sparse gradients",
        "not exchanged",
        lambda: nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 4)),
    ),
    make_refused_row(
        "bare sum",
        "a bare sum over the batch",
        "sums of shares are right, but the step is not divided",
        loss=nn.CrossEntropyLoss(reduction="sum"),
        but=WHOLE,
    ),
)
