"""Jobs with losses, collates, optimizers and schedulers of users, on very simple models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from equality_table import make_mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset, default_collate
from unusual_models import NanoGpt
from zoo_libraries import foreign
from zoo_rows import (
    IMAGES,
    IN_SHARDS,
    ONE_MODULE,
    SEQUENCES,
    UNCUT,
    VECTORS,
    WITHOUT_MICRO,
    Equal,
    Row,
    Sentences,
    collate_sentences,
    draw_integers,
    draw_numbers,
    expect_refusal_in_parts,
    make_row,
)

from paragrad.datasets.sample_order import SampleOrder

# two of 29 targets are ignored; most batches have none of them
RARE = TensorDataset(
    VECTORS.tensors[0], torch.where(torch.arange(29) % 17 == 5, -100, VECTORS.tensors[1])
)
# of 300 targets, some in the batches 20 to 22 of the first epoch are ignored; validation and the
# first twenty steps do not see these batches
LATE = set(SampleOrder(300, 12, 5).get_indices(0, range(240, 276))[::3])
IGNORED_LATE = TensorDataset(
    draw_numbers(300, 10, seed=1),
    torch.tensor([-100 if index in LATE else index % 4 for index in range(300)]),
)
MOSTLY_IGNORED = TensorDataset(
    VECTORS.tensors[0], torch.where(torch.arange(29) % 4 == 0, VECTORS.tensors[1], -100)
)
WEIGHED = TensorDataset(
    draw_numbers(29, 10, seed=1),
    torch.stack([draw_integers(4, 29, seed=2).float(), draw_numbers(29, seed=3).exp()], 1),
)
LEVELS = TensorDataset(draw_numbers(29, 10, seed=1), draw_numbers(29, seed=9))
SPELLED = TensorDataset(
    draw_numbers(29, 12, 10, seed=1),
    torch.cat([1 + draw_integers(5, 29, 4, seed=2), 1 + draw_integers(4, 29, 1, seed=3)], 1),
)


def compute_own_mean(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean that the user computes without a loss of torch."""
    return (output - functional.one_hot(target, 4)).square().sum(1).mean()


def compute_weighted_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over samples, in which every sample has its own weight."""
    return (
        functional.cross_entropy(output, target[:, 0].long(), reduction="none") * target[:, 1]
    ).mean()


def compute_weighted_mean(output: Tensor, target: Tensor) -> Tensor:
    """Return a weighted sum divided by the sum of the weights.

    So the weight of this mean is neither a number of samples nor of tokens.
    """
    return (
        functional.cross_entropy(output, target[:, 0].long(), reduction="none") * target[:, 1]
    ).sum() / target[:, 1].sum()


def compute_masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean that leaves out targets of -100 by the user's own code."""
    kept = target != -100
    return (functional.cross_entropy(output, target, reduction="none") * kept).sum() / kept.sum()


def compute_ctc_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of connectionist temporal classification (CTC).

    Its inputs are sequence first, and its mean divides twice: by lengths, then by samples.
    """
    steps = torch.full((len(output),), 12)
    symbols = torch.full((len(target),), 5)
    return functional.ctc_loss(output.log_softmax(2).transpose(0, 1), target, steps, symbols)


class Per(nn.Module):
    """A model with one linear layer, which is applied at every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def compute_divergence(output: Tensor, target: Tensor) -> Tensor:
    return functional.kl_div(output.log_softmax(1), target, reduction="batchmean")


def collate_without_some(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate a batch without some samples, as users leave out samples with broken files."""
    kept = [sample for sample in samples if sample[0][0] < 0.7]
    if not kept:
        return samples[0][0].new_zeros(0, 10), torch.zeros(0, dtype=torch.long)
    return default_collate(kept)  # type: ignore[return-value]


def collate_with_mixup(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate with mixup: each sample is mixed with another one of its batch."""
    x, target = default_collate(samples)
    labels = functional.one_hot(target, 4).to(x.dtype)
    order = torch.randperm(len(x))
    part = float(torch.rand(()))
    return part * x + (1 - part) * x[order], part * labels + (1 - part) * labels[order]


def collate_with_cutmix(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate with CutMix: a square of each image comes from another one of its batch."""
    x, target = default_collate(samples)
    labels = functional.one_hot(target, 4).to(x.dtype)
    order = torch.randperm(len(x))
    top, left = torch.randint(0, 16, (2,)).tolist()
    x[:, :, top : top + 16, left : left + 16] = x[order][:, :, top : top + 16, left : left + 16]
    return x, 0.75 * labels + 0.25 * labels[order]


def collate_with_masking(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate with a user's own masking, padded to the number of positions of the model."""
    tokens = functional.pad(collate_sentences(samples)["input_ids"], (0, 9))[:, :8] % 20
    hidden = (torch.rand(tokens.shape) < 0.3) & (tokens > 0)
    return tokens.masked_fill(hidden, 1), tokens.masked_fill(~hidden, -100)


def make_centred_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with a hook that needs whole gradients (gradient centralisation)."""
    optimizer = torch.optim.SGD(parameters, lr=0.05)

    def centre(_: Any, *__: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.grad.dim() > 1:
                parameter.grad -= parameter.grad.mean(1, keepdim=True)

    optimizer.register_step_pre_hook(centre)
    return optimizer


class EveryOther(torch.optim.SGD):
    """SGD that accumulates gradients itself: every second call of `step` updates."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state["sum"] = (
                    state["sum"] + parameter.grad if "sum" in state else parameter.grad.clone()
                )
                if state["calls"] % 2 == 0:
                    with torch.no_grad():
                        parameter -= group["lr"] * state.pop("sum")


class Lars(torch.optim.Optimizer):
    """An optimizer that uses the norm of a whole tensor, which a piece of it does not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= (
                    0.05 * parameter.norm() / (parameter.grad.norm() + 1e-6) * parameter.grad
                )


def make_optimizer_builder(name: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that builds an optimizer of torch or of another library.

    An example of the latter is "schedulefree.AdamWScheduleFree".
    """

    def build(parameters: Any) -> torch.optim.Optimizer:
        library, _, kind = name.rpartition(".")
        return getattr(foreign(library) if library else torch.optim, kind)(parameters, **settings)

    return build


def make_mlp_without_biases() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


def make_training_row(
    name: str, story: str, twin: str = "", needs: tuple[str, ...] = (), **changes: Any
) -> Row:
    return make_row(
        name,
        changes.pop("model", make_mlp),
        changes.pop("data", VECTORS),
        Equal(twin),
        story,
        needs,
        **changes,
    )


def make_schedule_free_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return schedule-free AdamW in train mode, which it needs before the first step."""
    optimizer = make_optimizer_builder("schedulefree.AdamWScheduleFree", lr=0.01, warmup_steps=2)(
        parameters
    )
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


PIECES = "an optimizer that wants whole tensors was given pieces"
ROWS: tuple[Row, ...] = (
    make_training_row(
        "rare ignored targets in a function",
        "verify said yes, and the parameters were 22 % off",
        data=RARE,
        loss=lambda output, target: functional.cross_entropy(output, target),
    ),
    make_training_row(
        "ignored targets that come late",
        "nothing that was looked at had any",
        data=IGNORED_LATE,
        loss=lambda output, target: functional.cross_entropy(output, target),
    ),
    make_training_row(
        "most targets ignored in a function",
        "shares without a label",
        data=MOSTLY_IGNORED,
        seed=1,
        loss=lambda output, target: functional.cross_entropy(output, target),
    ),
    make_training_row(
        "-100 by hand",
        "a sum divided by a tensor of this batch",
        data=MOSTLY_IGNORED,
        seed=1,
        loss=compute_masked_mean,
    ),
    make_training_row(
        "weights of samples",
        "a mean over samples all the same",
        data=WEIGHED,
        loss=compute_weighted_loss,
    ),
    make_training_row(
        "weighted mean",
        "a sum divided by a tensor of this batch",
        data=WEIGHED,
        loss=compute_weighted_mean,
    ),
    make_training_row("own mean", "no loss of torch", loss=compute_own_mean),
    make_training_row(
        "own mean, dropped samples",
        "a share weighed as what it was given: 7.8",
        loss=compute_own_mean,
        collate=collate_without_some,
        under=WITHOUT_MICRO,
        but=UNCUT,
    ),
    make_training_row(
        "cross-entropy, dropped samples",
        "the same; its batches cannot be cut",
        collate=collate_without_some,
        under=WITHOUT_MICRO,
        but=UNCUT,
    ),
    make_training_row(
        "batchmean of a divergence",
        "divides by the batch, not by elements",
        collate=collate_with_mixup,
        loss=compute_divergence,
    ),
    make_training_row(
        "mixup", "every share mixed by itself, with a number of its own", collate=collate_with_mixup
    ),
    make_training_row(
        "cutmix",
        "the same with squares",
        data=IMAGES,
        collate=collate_with_cutmix,
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 4, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(196, 4)
        ),
    ),
    make_training_row(
        "masking collator",
        "every share masked by its first sample",
        data=Sentences(),
        collate=collate_with_masking,
        model=NanoGpt,
        loss=lambda output, target: functional.cross_entropy(output.transpose(1, 2), target),
    ),
    make_training_row(
        "ctc",
        "a mean that divides by lengths, then by samples",
        data=SPELLED,
        model=Per,
        loss=compute_ctc_loss,
        but=ONE_MODULE,
    ),
    make_training_row(
        "bfloat16 by autocast",
        "compared in float64, where there is no autocast",
        dtype=torch.bfloat16,
    ),
    make_training_row(
        "warm restarts",
        "counts steps",
        scheduler=lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    ),
    make_training_row(
        "schedulers in turn",
        "counts steps",
        scheduler_every="step",
        scheduler=lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
                lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            [4],
        ),
    ),
    make_training_row(
        "one cycle",
        "moves momentum, too",
        scheduler=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 40),
    ),
    make_training_row(
        "a hook on the optimizer",
        "got flat pieces of tensors: 1.4",
        optimizer=make_centred_sgd,
        but={
            **IN_SHARDS,
            **expect_refusal_in_parts(
                r"SGD has the hook centre, .* do what it does in the step\(\) of an optimizer of "
                r"your own"
            ),
        },
    ),
    make_training_row(
        "accumulation by hand",
        "updates every second step",
        optimizer=lambda parameters: EveryOther(parameters, lr=0.05),
    ),
    make_training_row("LARS", PIECES, optimizer=Lars, but=IN_SHARDS),
    make_training_row(
        "Muon",
        PIECES,
        twin="five iterations in bfloat16 inside the update",
        model=make_mlp_without_biases,
        optimizer=make_optimizer_builder("Muon", lr=0.01),
        but=IN_SHARDS,
    ),
    make_training_row(
        "Adafactor", PIECES, optimizer=make_optimizer_builder("Adafactor", lr=0.01), but=IN_SHARDS
    ),
    make_training_row(
        "lr as a tensor",
        "was taken for another kind of optimizer",
        optimizer=make_optimizer_builder("Adam", lr=torch.tensor(0.001)),
    ),
    make_training_row(
        "fused",
        "one kernel for all tensors",
        optimizer=make_optimizer_builder("AdamW", lr=0.001, fused=True),
    ),
    make_training_row(
        "foreach",
        "lists of tensors at once",
        optimizer=make_optimizer_builder("AdamW", lr=0.001, foreach=True),
    ),
    make_training_row(
        "lion",
        "the sign of a step: rounding near zero turns it",
        "a sign turns where rounding does",
        ("lion_pytorch",),
        optimizer=make_optimizer_builder("lion_pytorch.Lion", lr=0.001),
    ),
    make_training_row(
        "schedule-free AdamW",
        "has a train mode and an eval mode",
        needs=("schedulefree",),
        optimizer=make_schedule_free_adamw,
    ),
    make_training_row(
        "schedule-free SGD",
        "nobody called its train()",
        needs=("schedulefree",),
        optimizer=make_optimizer_builder("schedulefree.SGDScheduleFree", lr=0.05),
    ),
    make_training_row(
        "sequences by a convolution",
        "channels first",
        data=SEQUENCES,
        model=lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4)),
    ),
)
