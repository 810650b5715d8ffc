"""The divisor of the mean in a loss, which is read from the graph of the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paragrad.errors import StepFailed
from paragrad.jobs.loss import LossModule, count_target_weight
from paragrad.jobs.loss_divisor import find_loss_divisor

pytestmark = pytest.mark.pure

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 4, generator=GENERATOR).requires_grad_()
Y = torch.randn(6, 4, generator=GENERATOR)
T = torch.tensor([0, 1, -100, 3, 2, 1])
HALF = (torch.arange(4) % 2).float().expand(6, 4)
CLASSES = torch.tensor([1.0, 3.0, 0.5, 2.0])


def compute_own_mean(x: Tensor) -> Tensor:
    return ((x - Y) ** 2).sum() / len(x)


def compute_masked_mean(x: Tensor) -> Tensor:
    kept = T != -100
    return (functional.cross_entropy(x, T, reduction="none") * kept).sum() / kept.sum()


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "cross-entropy": (lambda x: functional.cross_entropy(x, T), 5),
    "smoothed, of weighted classes": (
        lambda x: functional.cross_entropy(x, T, CLASSES, label_smoothing=0.1),
        9.5,
    ),
    "of probabilities": (lambda x: functional.cross_entropy(x, Y.softmax(1)), 6),
    "mse": (lambda x: functional.mse_loss(x, Y), 24),
    "l1": (lambda x: functional.l1_loss(x, Y), 24),
    "huber": (lambda x: functional.huber_loss(x, Y), 24),
    "smooth l1": (lambda x: functional.smooth_l1_loss(x, Y), 24),
    "bce": (lambda x: functional.binary_cross_entropy_with_logits(x, Y.sigmoid()), 24),
    "kl": (lambda x: functional.kl_div(x, Y.softmax(1), reduction="batchmean"), 6),
    "gaussian": (lambda x: functional.gaussian_nll_loss(x, Y, torch.ones(6, 4)), 24),
    "margins": (lambda x: functional.multi_margin_loss(x, T.clamp(min=0)), 6),
    "several labels": (lambda x: functional.multilabel_soft_margin_loss(x, (Y > 0).float()), 6),
    "cosine": (lambda x: functional.cosine_embedding_loss(x, Y, torch.ones(6)), 6),
    "own mean": (compute_own_mean, 6),
    "masked": (compute_masked_mean, 5),
    "mean": (lambda x: ((x - Y) ** 2).mean(), 24),
    "means of means": (lambda x: ((x - Y) ** 2).mean(1).mean(), 6),
    "of what counts": (lambda x: x[T > 0].mean(), 16),
    "times constants": (lambda x: -2 * functional.cross_entropy(x, T) / 3 + 1, 5),
    "in another type": (lambda x: functional.cross_entropy(x, T).double(), 5),
    "with a penalty": (
        lambda x: (
            functional.cross_entropy(x, T) + 1e-3 * CLASSES.clone().requires_grad_().pow(2).sum()
        ),
        5,
    ),
    "two terms over the same": (lambda x: compute_own_mean(x) + x.abs().sum() / len(x), 6),
    "over the mean of a mask": (lambda x: (x * HALF).mean() / HALF.mean(), 12),
    "times a tensor": (lambda x: ((x - Y) ** 2).mean() * torch.tensor(0.5), 48),
    "of a dot product": (lambda x: torch.dot(x[:, 0], Y[:, 0]) / 6, 6),
    "several means": (lambda x: functional.cross_entropy(x, T) + ((x - Y) ** 2).mean(), None),
    "a norm": (lambda x: (x - Y).norm(), None),
    "a bare sum": (lambda x: x.sum(), None),
    "by what was learned": (lambda x: x.sum() / x.exp().sum(), None),
    "of a root": (lambda x: (x**2).mean().sqrt(), None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_divisor_of_a_mean_is_found(name: str) -> None:
    loss, expected = LOSSES[name]
    assert find_loss_divisor(loss(X)) == expected


def test_custom_autograd_function_is_untraced() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.mean()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            return gradients[0].expand(6, 4) / 24

    assert find_loss_divisor(Own.apply(X)) is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: functional.cross_entropy(output, target),
        lambda output, target: (
            (functional.cross_entropy(output, target, reduction="none") * (target != -100)).sum()
            / (target != -100).sum()
        ),
        lambda output, target: output[target != -100].mean(),
        lambda output, target: (
            functional.cross_entropy(output, target) * (target != -100).sum(),
            (target != -100).sum(),
        ),
    ],
)
def test_share_without_a_label_counts_for_nothing(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """A share without a label counts for nothing.

    The mean over no label is 0/0. Earlier, the recipe of the documentation, (output.loss * n, n),
    made 0 * NaN of it, and the run ended.
    """
    model = nn.Linear(3, 4)
    total, weight = LossModule(model, loss)(torch.randn(2, 3), torch.full((2,), -100), 2)
    assert (float(total.detach()), weight) == (0.0, 0.0)
    total.backward()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()
    )


SMOOTHED = {"weight": torch.tensor([1.0, 0.0, 2.0, 0.5]), "label_smoothing": 0.1}


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(**SMOOTHED),
        functools.partial(functional.cross_entropy, **SMOOTHED),
        lambda output, target: functional.cross_entropy(output, target, **SMOOTHED),
        lambda output, target: (functional.cross_entropy(output, target, **SMOOTHED) * 0.0, 0),
    ],
)
def test_label_smoothing_without_weight_is_not_dropped(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """If all targets of a share weigh 0, its smoothed part still counts in the whole batch.

    Earlier, this part was 0, without a message, and the parameters of data(3) were off by 6e-3.
    """
    module = LossModule(nn.Linear(3, 4), loss)
    alike = torch.full((2,), 1)
    with pytest.raises(StepFailed, match="all weigh 0, and its loss has a smoothed part"):
        module(torch.randn(2, 3), alike, 2)
    # a sample that stands in for an empty share; targets without a label
    for target, samples in ((alike, 0), (torch.full((2,), -100), 2)):
        total, weight = module(torch.randn(2, 3), target, samples)
        assert (float(total.detach()), weight) == (0.0, 0.0)


def test_sum_and_weight_pair_of_label_smoothing() -> None:
    """The repair: shares of (sum, weight), one of them of weight 0, sum up to the whole."""

    def compute_sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(output, target, reduction="sum", **SMOOTHED), SMOOTHED[
            "weight"
        ][target].sum()

    model = nn.Linear(3, 4)
    x = torch.randn(5, 3)
    target = torch.tensor([1, 1, 0, 2, 3])
    module = LossModule(model, compute_sum_and_weight)
    with module.divide_by(5.0):
        shares, weights = zip(
            *(
                module(x[part], target[part], len(target[part]))
                for part in (slice(0, 2), slice(2, 5))
            ),
            strict=True,
        )
    assert weights[0] == 0
    ours = torch.autograd.grad(sum(shares) / (sum(weights) / 5.0), model.weight)[0]
    theirs = torch.autograd.grad(
        functional.cross_entropy(model(x), target, **SMOOTHED), model.weight
    )[0]
    assert torch.allclose(ours, theirs, atol=1e-7)


def test_other_term_without_samples_is_not_label_smoothing() -> None:
    """The loss has classes that weigh 0, and a mean over some samples.

    This share has no sample of that mean.
    """

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (
            functional.cross_entropy(output, target, SMOOTHED["weight"])
            + (output * (target > 1)[:, None]).sum() / (target > 1).sum()
        )

    total, weight = LossModule(nn.Linear(3, 4), loss)(torch.randn(2, 3), torch.full((2,), 1), 2)
    assert (float(total.detach()), weight) == (0.0, 0.0)


def test_unreadable_weight_is_reported() -> None:
    module = LossModule(nn.Identity(), lambda output, target: (output - Y).norm())
    module.has_traced_divisor = True
    with pytest.raises(StepFailed, match="was found in the first step"):
        module(X, Y, 6)
    module.has_traced_divisor = False
    assert module(X, Y, 6)[1] == 6


def test_weight_of_ignored_targets_is_counted_for_every_kind_of_index() -> None:
    """numpy counts the targets of a small batch; it cannot compare them with a tensor."""
    target = torch.tensor([0, 3, 0, 5, 2])
    for index in (0, torch.tensor(0), True):
        expected = float((target != index).sum())
        assert count_target_weight(nn.CrossEntropyLoss(ignore_index=index), target) == expected
    weights = torch.arange(6.0)
    assert count_target_weight(nn.NLLLoss(weights, ignore_index=5), target) == 5.0
    assert count_target_weight(nn.CrossEntropyLoss(), target.view(5, 1)) == 5.0
    assert count_target_weight(nn.CrossEntropyLoss(), torch.rand(5, 6)) is None
