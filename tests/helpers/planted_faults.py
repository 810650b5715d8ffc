"""Faults that tests plant in ranks, by name: errors of the library, of a model or of a job.

Every rank builds the job's model, and this plants the fault. The fault changes the library in that
process, as long as the rank lives. The reference step (`run_reference_step`) stays correct, and so
does code that only inspects a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from equality_table import draw_integers, draw_numbers, make_job, make_momentum_sgd
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from paragrad import Job
from paragrad.engine import batch_norm
from paragrad.engine import exchange as exchanges
from paragrad.engine.optimizer import update_probe
from paragrad.jobs import loss
from paragrad.parallel.data import shared_memory
from paragrad.strategies.strategy import PER_ELEMENT
from paragrad.trainer import batch, trainer, training
from paragrad.trainer.checks import inspect_model, reference_step, step_check

IMAGES = TensorDataset(
    draw_numbers(30, 2, 8, 8, seed=3),
    draw_integers(4, 30, 2, seed=4).masked_fill(draw_integers(3, 30, 2, seed=8) == 0, -100),
)


class Working:
    """Counts, in `looking`, calls that only inspect the model and are no step of the strategy."""

    looking = 0

    @classmethod
    @contextlib.contextmanager
    def look(cls) -> Iterator[None]:
        cls.looking += 1
        try:
            yield
        finally:
            cls.looking -= 1


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    """A model with convolution, batch norm and dropout; images have two targets, some ignored."""

    forgetful = False  # if true, one activation is missing

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(36, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.counts = False  # if true, a buffer counts the samples of a share

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x))
        hidden = hidden if self.forgetful and not Working.looking else torch.relu(hidden)
        hidden = functional.dropout(functional.max_pool2d(hidden, 2).flatten(1), 0.2, self.training)
        if self.counts:
            self.seen += len(x)
        return self.out(hidden).view(-1, 4, 2)


def patch_result(of: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Replace a function of a class or module by one that changes its result.

    The replacement stays as long as this process lives.
    """
    original = getattr(of, name)

    def call_and_change(*arguments: Any, **more: Any) -> Any:
        found = original(*arguments, **more)
        return found if Working.looking else change(found)

    mock.patch.object(of, name, call_and_change).start()


def weight_off_by_one(net: Net) -> None:
    patch_result(loss.LossModule, "forward", lambda pair: (pair[0], pair[1] + 1))


def mean_of_means(net: Net) -> None:
    patch_result(loss.LossModule, "forward", lambda pair: (pair[0] / pair[1], 1.0))


def mask_by_rank(net: Net) -> None:
    original = training.key_draws
    mock.patch.object(
        training,
        "key_draws",
        lambda draws, seed, *more, **others: original(
            draws, seed + 1 + get_rank(), *more, **others
        ),
    ).start()


def lost_activation(net: Net) -> None:
    net.forgetful = True


def buffer_by_share(net: Net) -> None:
    net.counts = True


def stale_gradient(net: Net) -> None:
    """Set the gradient of the last layer's bias to zero, as if the bias kept its old gradient."""

    def forget(exchange: Any) -> None:
        # `gather_gradients` of this exchange returns copies
        if isinstance(exchange, shared_memory.SharedMemoryExchange):
            exchange.mean_gradients[exchange.trained_names.index("out.bias")].zero_()
        else:
            exchange.gather_gradients()["out.bias"].zero_()

    _patch_average(forget)


def noise_by_rank(net: Net) -> None:
    def disturb(exchange: Any) -> None:
        gradient = (
            exchange.mean_gradients[0]
            if isinstance(exchange, shared_memory.SharedMemoryExchange)
            else exchange.gather_gradients()["conv.weight"]
        )
        gradient.add_(1e-3 * (1 + get_rank()))

    _patch_average(disturb)


def _patch_average(change: Callable[[Any], None]) -> None:
    for kind in (exchanges.Exchange, shared_memory.SharedMemoryExchange):
        original = kind.average

        def average_and_change(self: Any, weight: float, original: Any = original) -> None:
            original(self, weight)
            change(self)

        mock.patch.object(kind, "average", average_and_change).start()


def sample_twice(net: Net) -> None:
    original = batch.make_rank_batch

    def make_batch_with_repeat(*arguments: Any, **more: Any) -> Any:
        batch = original(*arguments, **more)
        first = batch.micro_batches[0]
        return replace(
            batch,
            micro_batches=[
                replace(first, places=[*first.places[:-1], first.places[0]]),
                *batch.micro_batches[1:],
            ],
        )

    mock.patch.object(trainer, "make_rank_batch", make_batch_with_repeat).start()


def statistics_of_a_share(net: Net) -> None:
    original = batch_norm.BatchNorm.__init__

    def init_as_local(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        self.is_local = True

    mock.patch.object(batch_norm.BatchNorm, "__init__", init_as_local).start()


def running_statistics_of_a_share(net: Net) -> None:
    patch_result(batch_norm, "merge_moments", lambda found: (found[0], found[1], found[2]))
    original = batch_norm.BatchNorm._normalize_globally

    def normalize_and_shift(
        self: Any, x: Tensor, weight: Any, bias: Any, mean: Any, *more: Any
    ) -> Tensor:
        result = original(self, x, weight, bias, mean, *more)
        mean.add_(0.1 * x.mean((0, 2, 3)).detach())
        return result

    mock.patch.object(batch_norm.BatchNorm, "_normalize_globally", normalize_and_shift).start()


def flat_pieces(net: Net) -> None:
    """Give pieces to an optimizer that needs whole tensors: its probe says that any piece will do.

    In one rank alone, this fault has no effect, because all ranks use the most careful answer.
    Ranks with different cuts would wait for each other, or leave elements to no rank.
    """
    mock.patch.object(update_probe, "find_update_granularity", return_value=PER_ELEMENT).start()


class Centralised(torch.optim.SGD):
    """SGD that subtracts from each gradient its mean over the inputs, and divides by its norm.

    A flat piece of a tensor has neither.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    whole = (
                        parameter.grad
                        - parameter.grad.mean(tuple(range(1, parameter.dim())), keepdim=True)
                        if parameter.dim() > 1
                        else parameter.grad
                    )
                    parameter -= group["lr"] * whole / (whole.norm() + 1e-6)


def make_centralised_sgd(parameters: Any) -> torch.optim.Optimizer:
    return Centralised(parameters, lr=0.1)


@dataclass(frozen=True)
class FirstStepFault:
    """A fault that the first step shows, which ends the training.

    The message names one of these kinds.
    """

    kinds: tuple[str, ...]


@dataclass(frozen=True)
class UpdateFault:
    """A fault that only the first update shows; the check of the update names a parameter.

    It shows with this optimizer and this strategy.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer]
    strategy: str


# fault -> where it shows
WRONGS: dict[Callable[[Net], None], FirstStepFault | UpdateFault] = {
    weight_off_by_one: FirstStepFault(("weight", "loss", "gradient")),
    mean_of_means: FirstStepFault(("loss", "weight", "gradient")),
    mask_by_rank: FirstStepFault(("loss", "gradient")),
    lost_activation: FirstStepFault(("loss", "gradient")),
    buffer_by_share: FirstStepFault(("buffer",)),
    stale_gradient: FirstStepFault(("gradient",)),
    noise_by_rank: FirstStepFault(("gradient",)),
    sample_twice: FirstStepFault(("loss", "gradient", "buffer")),
    statistics_of_a_share: FirstStepFault(("loss", "gradient", "buffer")),
    running_statistics_of_a_share: FirstStepFault(("buffer",)),
    flat_pieces: UpdateFault(make_centralised_sgd, "data(2, state=shared_memory)"),
}


def make_planted_job(wrong: Callable[[Net], None], alone: int | None = None) -> Job:
    """Return a job with a fault in every rank, or in the rank `alone` only."""

    def build() -> Net:
        net = Net()
        # not during validation, and not in other ranks than `alone`
        if dist.is_initialized() and alone in (None, get_rank()):
            for of, name in (
                (reference_step, "run_reference_step"),
                (step_check, "run_reference_step"),
                (inspect_model, "probe_model"),
            ):
                original = getattr(of, name)
                mock.patch.object(of, name, _mark_as_inspection(original)).start()
            wrong(net)
        return net

    shown = WRONGS[wrong]
    return make_job(
        f"planted {wrong.__name__}",
        build,
        IMAGES,
        seed=7,
        optimizer=shown.optimizer if isinstance(shown, UpdateFault) else make_momentum_sgd,
    )


def _mark_as_inspection(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_as_inspection(*arguments: Any, **more: Any) -> Any:
        with Working.look():
            return original(*arguments, **more)

    return call_as_inspection
