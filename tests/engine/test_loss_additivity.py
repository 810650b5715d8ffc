"""What validation says about a loss that does not add up: its cause, with the repair."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from equality_table import VECTORS, draw_integers, make_job, make_mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset
from unusual_pipeline_models import Gathering

from paragrad.errors import Refused
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.pure

COUNTED = torch.arange(29) % 3 != 0
MASKED = TensorDataset(
    VECTORS.tensors[0], torch.stack([draw_integers(4, 29, seed=2), COUNTED.long()], 1)
)


def make_masked_loss(
    divisor: Callable[[Tensor], Tensor | int],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss: the sum over samples that count, divided by a function of their number."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        each = functional.cross_entropy(output, target[:, 0], reduction="none")
        return (each * target[:, 1]).sum() / divisor(target[:, 1].sum())

    return loss


def read_refusal(**changes: object) -> str:
    with pytest.raises(Refused) as caught:
        validate_run(
            make_job("asked", **{"model": make_mlp, "data": VECTORS, **changes}), "data(2)"
        )
    return str(caught.value)


def test_clamped_divisor_is_not_a_plain_sum() -> None:
    """A clamped divisor is not reported as a bare sum.

    If few samples of the tested batch count, the values of the parts sum up to the value of the
    whole. Earlier, the loss was called a bare sum. The repair, the number of samples as the weight,
    is another training.
    """
    message = read_refusal(data=MASKED, loss=make_masked_loss(lambda count: count.clamp(min=4)))
    assert "which divide by 4 and 4 + 4; return the pair" in message
    assert "a constant is in each, or keeps it above 0" in message
    assert "bare sum" not in message


@pytest.mark.parametrize(
    ("divisor", "numbers"),
    [
        (
            lambda count: count.double() + 1e-8,
            "which divide by 3.00000001 and 1.00000001 + 2.00000001",
        ),
        (lambda count: 8, "which divide by 8 and 8 + 8"),
    ],
)
def test_constant_in_the_divisor_is_shown_in_numbers(
    divisor: Callable[[Tensor], Tensor], numbers: str
) -> None:
    """The message shows enough digits to see the constant in the divisor.

    Earlier, it was not visible: "1.24176 over a batch, 1.24176 from its parts, which divide by 3
    and 1 + 2".
    """
    message = read_refusal(data=MASKED, loss=make_masked_loss(divisor))
    assert numbers in message
    assert "a constant is in each" in message
    over, from_parts = message.split("samples: ")[1].split(" over a batch of 5, ")
    assert over != from_parts.split(" ")[0]


def test_function_of_a_mean_is_reported() -> None:
    def compute_focal_loss(output: Tensor, target: Tensor) -> Tensor:
        mean = functional.cross_entropy(output, target)
        return (1 - torch.exp(-mean)) ** 2 * mean

    assert "it is several means, or a function of a mean" in read_refusal(loss=compute_focal_loss)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        lambda output, target: functional.cross_entropy(output, target, reduction="none").sum(),
    ],
)
def test_plain_sum_is_reported(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert "a bare sum over the batch; return the mean" in read_refusal(loss=loss)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_mlp()
        self.own = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + torch.from_numpy(self.own.normal(size=x.shape)).to(x.dtype))


class Drawn:
    """A loss with random noise."""

    def __init__(self) -> None:
        self.own = numpy.random.default_rng(0)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) * (
            1 + 0.1 * self.own.normal(size=len(target)).mean()
        )


@pytest.mark.parametrize(
    ("changes", "name"), [({"model": Noisy}, "own"), ({"loss": Drawn()}, "loss.own")]
)
def test_private_generator_is_not_sample_mixing(changes: dict[str, object], name: str) -> None:
    """Earlier, the message was: the model mixes samples."""
    message = read_refusal(**changes)
    assert (
        f"the random generator {name}, of the model's or the loss's own, draws for a batch"
        in message
    )
    assert "mixes" not in message


def test_hidden_state_is_not_sample_mixing() -> None:
    calls = []

    def compute_counting_loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return functional.cross_entropy(output, target) * (1 + 0.1 * len(calls))

    assert "the loss of the same samples is another number each time it is asked" in read_refusal(
        loss=compute_counting_loss
    )


class Augmented(Dataset):
    def __init__(self) -> None:
        self.own = numpy.random.default_rng(0)

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> object:
        x, target = VECTORS[index]
        return x + torch.from_numpy(self.own.normal(size=10)).float(), target


def test_dataset_with_a_private_generator() -> None:
    message = read_refusal(data=Augmented())
    assert (
        "train gives other values each time it is asked for the same samples: dataset or collate "
        "keeps a state" in message
    )


def test_hooks_of_a_first_forward_are_registered_once() -> None:
    """Earlier, each inspection reset the model's flag for its hooks, but left the hooks in place.

    So the model registered its hooks again. The loss was another number each time, and in training
    the hooks collected every output twice.
    """
    validate_run(make_job("gathering", Gathering, VECTORS), "data(2)")


def test_zero_loss_gives_no_warning() -> None:
    """Earlier, torch warned that a tensor which requires gradients became a number.

    The warning pointed at paragrad.
    """
    validate_run(
        make_job(
            "asked", model=make_mlp, data=VECTORS, loss=lambda output, target: 0.0 * output.mean()
        ),
        "data(2)",
    )
