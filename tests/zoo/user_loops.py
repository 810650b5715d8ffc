"""Training loops as users write them.

`python user_loops.py NAME FILE` runs one, alone or under torchrun, and saves its parameters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import random_draw_jobs
import timm_jobs
import torch
import training_jobs
import transformers_jobs
import unusual_jobs
from equality_table import mlp, normed_cnn
from random_draw_jobs import Denoising, noise_found
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import Dataset, TensorDataset
from unusual_models import HalfFirst
from zoo_rows import IMAGES, SMALL_IMAGES, VECTORS, Row, numbers, sgd

import paragrad as pg

State = dict[str, Tensor]
EPOCHS = 3


def of_row(rows: tuple[Row, ...], name: str) -> Callable[[], State]:
    """Return a user's loop that trains the job of a row."""

    def loop() -> State:
        job = next(row for row in rows if row.name == name).job().replace(dtype=torch.float64)
        model = job.build_model()
        optimizer = job.optimizer(model.parameters())
        with pg.parallelize(
            model, job.build_loss(), optimizer, seed=job.seed, collate=job.collate
        ) as trainer:
            for epoch in range(EPOCHS):
                for batch in trainer.batches(job.train, batch=job.batch, epoch=epoch):
                    trainer.step(*(batch if isinstance(batch, tuple | list) else (batch,)))
        return model.state_dict()

    return loop


def trained(
    model: nn.Module,
    data: Dataset,
    loss: Any = functional.cross_entropy,
    between: Callable[[Any, Any], tuple[Any, Any]] = lambda inputs, target: (inputs, target),
    after: Callable[[], object] = lambda: None,
) -> State:
    """Train a model in a user's loop.

    `between` changes a batch before the step, and `after` is called after each step.
    """
    with pg.parallelize(model, loss, sgd(model.parameters()), seed=5) as trainer:
        for epoch in range(EPOCHS):
            for inputs, target in trainer.batches(data, batch=12, epoch=epoch):
                trainer.step(*between(inputs, target))
                after()
    return model.state_dict()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build().double()


def dropped_in_the_loop() -> State:
    """Train in a loop that drops samples before the step.

    Earlier, a share was weighted by the samples it was given, and the result was 7 % off.
    """

    def without_threes(inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return inputs[target != 3], target[target != 3]

    return trained(
        seeded(mlp),
        VECTORS,
        lambda output, target: functional.cross_entropy(output, target),
        without_threes,
    )


def averaged() -> State:
    """Train a diffusion U-Net, and return the moving average of its weights."""
    model = seeded(Denoising)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    trained(model, IMAGES, noise_found, after=lambda: average.update_parameters(model))
    return average.module.state_dict()


def weight_penalty() -> State:
    """Train with a loss that holds the model, so it cannot be copied without the model."""
    model = seeded(mlp)
    return trained(
        model,
        VECTORS,
        lambda output, target: (
            functional.cross_entropy(output, target)
            + 1e-2 * sum(weight.square().sum() for weight in model.parameters())
        ),
    )


def half_first() -> State:
    """Train a model with a first parameter in bfloat16 and the others in float64.

    The inputs keep the dtype that the dataset gives them.
    """
    torch.manual_seed(3)
    model = HalfFirst()
    model.out.double()
    model.scale.requires_grad_(False)
    return {
        name: value.double()
        for name, value in trained(
            model, TensorDataset(VECTORS.tensors[0].double(), VECTORS.tensors[1])
        ).items()
    }


class Critic(nn.Module):
    """A critic that scores a real sample and a sample of the generator.

    The generator is not a submodule of it.
    """

    def __init__(self, generator: nn.Module) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        self.generator = (generator,)

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            made = self.generator[0](noise)
        return self.score(real), self.score(made)


class Generator(nn.Module):
    """A generator that makes samples from noise, and ignores the real sample of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10))

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        return self.layers(noise)


def adversaries() -> State:
    """Train a GAN: two models, two optimizers and two trainers take turns."""
    generator = seeded(Generator)
    critic = seeded(lambda: Critic(generator))
    pairs = TensorDataset(numbers(29, 4, seed=21), VECTORS.tensors[0])

    class Both(Dataset):
        def __len__(self) -> int:
            return 29

        def __getitem__(self, index: int) -> Any:
            return pairs[index], 0

    def told_apart(output: Any, target: Any) -> Tensor:
        real, made = output
        return functional.softplus(-real).mean() + functional.softplus(made).mean()

    def taken_for_real(made: Tensor, target: Any) -> Tensor:
        fixed = {name: weight.detach() for name, weight in critic.score.named_parameters()}
        return functional.softplus(-torch.func.functional_call(critic.score, fixed, (made,))).mean()

    with (
        pg.parallelize(critic, told_apart, sgd(critic.parameters()), seed=5) as first,
        pg.parallelize(generator, taken_for_real, sgd(generator.parameters()), seed=5) as second,
    ):
        for epoch in range(EPOCHS):
            batches = (
                trainer.batches(Both(), batch=12, epoch=epoch) for trainer in (first, second)
            )
            for one, other in zip(*batches, strict=True):
                first.step(*one)
                second.step(*other)
    return {
        **{f"critic {name}": value for name, value in critic.state_dict().items()},
        **generator.state_dict(),
    }


def by_batch_norm() -> State:
    return trained(seeded(normed_cnn), SMALL_IMAGES)


LOOPS: dict[str, Callable[[], State]] = {
    "bert": of_row(transformers_jobs.ROWS, "bert"),
    "bert, few labels": of_row(transformers_jobs.ROWS, "bert, few labels"),
    "t5, few labels": of_row(transformers_jobs.ROWS, "t5, few labels"),
    "timm vit, DropPath": of_row(timm_jobs.ROWS, "timm vit, DropPath"),
    "TransformerEncoder, sequence first": of_row(
        random_draw_jobs.ROWS, "TransformerEncoder, sequence first"
    ),
    "checkpoint, dropout by name": of_row(random_draw_jobs.ROWS, "checkpoint, dropout by name"),
    "vae": of_row(random_draw_jobs.ROWS, "vae"),
    "mixture of experts": of_row(unusual_jobs.ROWS, "mixture of experts"),
    "ignored targets that come late": of_row(training_jobs.ROWS, "ignored targets that come late"),
    "mixup": of_row(training_jobs.ROWS, "mixup"),
    "accumulation by hand": of_row(training_jobs.ROWS, "accumulation by hand"),
    "batch norm": by_batch_norm,
    "samples dropped in the loop": dropped_in_the_loop,
    "diffusion u-net, moving average": averaged,
    "a loss that holds the model": weight_penalty,
    "bfloat16 first parameter": half_first,
    "gan": adversaries,
}
NEEDS = {
    "bert": ("transformers",),
    "bert, few labels": ("transformers",),
    "t5, few labels": ("transformers",),
    "timm vit, DropPath": ("timm", "torchvision"),
}

if __name__ == "__main__":
    name, path = sys.argv[1:]
    torch.set_num_threads(1)
    torch.save(LOOPS[name](), f"{path}-{os.environ.get('RANK', 0)}")
