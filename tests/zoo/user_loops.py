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
from equality_table import make_batch_norm_cnn, make_mlp
from random_draw_jobs import Denoising, compute_noise_loss
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import Dataset, TensorDataset
from unusual_models import HalfFirst
from zoo_rows import IMAGES, SMALL_IMAGES, VECTORS, Row, draw_numbers, make_sgd

import paragrad as pg

State = dict[str, Tensor]
EPOCHS = 3


def make_row_loop(rows: tuple[Row, ...], name: str) -> Callable[[], State]:
    """Return a user's loop that trains the job of a row."""

    def train_row() -> State:
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

    return train_row


def train_model(
    model: nn.Module,
    data: Dataset,
    loss: Any = functional.cross_entropy,
    between: Callable[[Any, Any], tuple[Any, Any]] = lambda inputs, target: (inputs, target),
    after: Callable[[], object] = lambda: None,
) -> State:
    """Train a model in a user's loop.

    `between` changes a batch before the step, and `after` is called after each step.
    """
    with pg.parallelize(model, loss, make_sgd(model.parameters()), seed=5) as trainer:
        for epoch in range(EPOCHS):
            for inputs, target in trainer.batches(data, batch=12, epoch=epoch):
                trainer.step(*between(inputs, target))
                after()
    return model.state_dict()


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build().double()


def train_with_dropped_samples() -> State:
    """Train in a loop that drops samples before the step.

    Earlier, a share was weighted by the samples it was given, and the result was 7 % off.
    """

    def drop_threes(inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return inputs[target != 3], target[target != 3]

    return train_model(
        build_seeded(make_mlp),
        VECTORS,
        lambda output, target: functional.cross_entropy(output, target),
        drop_threes,
    )


def train_and_average() -> State:
    """Train a diffusion U-Net, and return the moving average of its weights."""
    model = build_seeded(Denoising)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    train_model(model, IMAGES, compute_noise_loss, after=lambda: average.update_parameters(model))
    return average.module.state_dict()


def train_with_weight_penalty() -> State:
    """Train with a loss that holds the model, so it cannot be copied without the model."""
    model = build_seeded(make_mlp)
    return train_model(
        model,
        VECTORS,
        lambda output, target: (
            functional.cross_entropy(output, target)
            + 1e-2 * sum(weight.square().sum() for weight in model.parameters())
        ),
    )


def train_half_first() -> State:
    """Train a model with a first parameter in bfloat16 and the others in float64.

    The inputs keep the dtype that the dataset gives them.
    """
    torch.manual_seed(3)
    model = HalfFirst()
    model.out.double()
    model.scale.requires_grad_(False)
    return {
        name: value.double()
        for name, value in train_model(
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


def train_adversaries() -> State:
    """Train a GAN: two models, two optimizers and two trainers take turns."""
    generator = build_seeded(Generator)
    critic = build_seeded(lambda: Critic(generator))
    pairs = TensorDataset(draw_numbers(29, 4, seed=21), VECTORS.tensors[0])

    class Both(Dataset):
        def __len__(self) -> int:
            return 29

        def __getitem__(self, index: int) -> Any:
            return pairs[index], 0

    def compute_critic_loss(output: Any, target: Any) -> Tensor:
        real, made = output
        return functional.softplus(-real).mean() + functional.softplus(made).mean()

    def compute_generator_loss(made: Tensor, target: Any) -> Tensor:
        fixed = {name: weight.detach() for name, weight in critic.score.named_parameters()}
        return functional.softplus(-torch.func.functional_call(critic.score, fixed, (made,))).mean()

    with (
        pg.parallelize(critic, compute_critic_loss, make_sgd(critic.parameters()), seed=5) as first,
        pg.parallelize(
            generator, compute_generator_loss, make_sgd(generator.parameters()), seed=5
        ) as second,
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


def train_batch_norm() -> State:
    return train_model(build_seeded(make_batch_norm_cnn), SMALL_IMAGES)


LOOPS: dict[str, Callable[[], State]] = {
    "bert": make_row_loop(transformers_jobs.ROWS, "bert"),
    "bert, few labels": make_row_loop(transformers_jobs.ROWS, "bert, few labels"),
    "t5, few labels": make_row_loop(transformers_jobs.ROWS, "t5, few labels"),
    "timm vit, DropPath": make_row_loop(timm_jobs.ROWS, "timm vit, DropPath"),
    "TransformerEncoder, sequence first": make_row_loop(
        random_draw_jobs.ROWS, "TransformerEncoder, sequence first"
    ),
    "checkpoint, dropout by name": make_row_loop(
        random_draw_jobs.ROWS, "checkpoint, dropout by name"
    ),
    "vae": make_row_loop(random_draw_jobs.ROWS, "vae"),
    "mixture of experts": make_row_loop(unusual_jobs.ROWS, "mixture of experts"),
    "ignored targets that come late": make_row_loop(
        training_jobs.ROWS, "ignored targets that come late"
    ),
    "mixup": make_row_loop(training_jobs.ROWS, "mixup"),
    "accumulation by hand": make_row_loop(training_jobs.ROWS, "accumulation by hand"),
    "batch norm": train_batch_norm,
    "samples dropped in the loop": train_with_dropped_samples,
    "diffusion u-net, moving average": train_and_average,
    "a loss that holds the model": train_with_weight_penalty,
    "bfloat16 first parameter": train_half_first,
    "gan": train_adversaries,
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
