"""Every form of batch norm uses the statistics of the whole micro-batch, and equals serial."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality_table import (
    IMAGES,
    VECTORS,
    make_activated_norm_cnn,
    make_batch_norm_cnn,
    make_job,
    make_sync_batch_norm_cnn,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import batch_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import paragrad as pg
from paragrad.engine.batch_norm import BatchNorm, replace_sync_forward
from paragrad.errors import RankFailed, StepFailed
from paragrad.jobs.job import Job
from paragrad.runtime.world import World
from paragrad.trainer.trainer import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks"), pytest.mark.story]

BOUND = 1e-10
# the last batch has 5 or 6 samples: with the shares of the third strategy, some parts are empty,
# and some have one sample
STRATEGIES = ("data(2)", "data(2, reduce=ring)", "data(3, shares=[6, 1, 1], micro=2)")


class Plain(nn.Module):
    """A model whose forward calls functional.batch_norm, imported by name.

    It has no batch norm module of torch, and no running statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.out = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(batch_norm(self.first(x), None, None, self.scale, training=True).tanh())


class Recomputed(nn.Module):
    """A model with a batch norm in gradient checkpointing, which computes it again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(10, 8)
        self.out = nn.Linear(8, 4)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.inner, self.first(x).tanh(), use_reentrant=self.reentrant))


class Frozen(nn.Module):
    """A model whose first batch norm stays in eval mode in training; its statistics are fixed.

    A second batch norm trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(10)
        self.frozen.running_mean = torch.linspace(-1, 1, 10)
        self.rest = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.frozen(x))


class Kept(Frozen):
    """A model whose frozen norm is in training mode until the trainer calls `train()`."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.train()


class Instances(nn.Module):
    """A model that computes instance norm with batch_norm, and standardizes a weight.

    Samples x channels are the channels of that batch norm, as in AdaIN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = batch_norm(
            self.weight.view(1, 4, -1), None, None, training=True, momentum=0.0
        ).view_as(self.weight)
        x = functional.conv2d(x, weight)
        x = batch_norm(x.reshape(1, -1, *x.shape[2:]), None, None, training=True).view_as(x)
        return self.out(x.relu().mean((2, 3)))


def make_normed_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 4)
    )


def make_pooled_cnn() -> nn.Module:
    """Return a model whose batch norm sees 2 x 2 values per channel and sample."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.MaxPool2d(3),
        nn.Flatten(2),
        nn.BatchNorm1d(4),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def build_recomputed() -> nn.Module:
    return Recomputed(reentrant=False)


def build_reentrant_recomputed() -> nn.Module:
    return Recomputed(reentrant=True)


def make_timm_activated_cnn() -> nn.Module:
    # a CPU build of torchvision may lack the operators that it registers for
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
    from timm.layers import BatchNormAct2d

    return nn.Sequential(
        nn.Conv2d(2, 4, 3), BatchNormAct2d(4, act_layer=nn.ELU), nn.Flatten(), nn.Linear(144, 4)
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], Dataset]] = {
    "a subclass with a forward of its own": (make_activated_norm_cnn, IMAGES),
    "SyncBatchNorm": (make_sync_batch_norm_cnn, IMAGES),
    "functional, by name": (Plain, VECTORS),
    "recomputed": (build_recomputed, VECTORS),
    "recomputed, reentrant": (build_reentrant_recomputed, VECTORS),
    "frozen": (Frozen, VECTORS),
    "cumulative mean": (make_normed_mlp, VECTORS),
    "instance norm and weights": (Instances, IMAGES),
}


def make_gentle_sgd(parameters: object) -> torch.optim.Optimizer:
    """Return SGD with small steps.

    With larger steps, rounding on one processor grew to 1.3e-10 in twenty steps.
    """
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)  # type: ignore[arg-type]


def verify_same(job: Job, strategy: str, folder: Path) -> pg.Certificate:
    certificate = pg.verify(job, strategy, runs=folder)
    assert certificate.same, certificate
    assert certificate.difference <= BOUND
    return certificate


# validation runs the model without gradients
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_batch_norm_equals_serial(kind: str, strategy: str, tmp_path: Path) -> None:
    """Every form of batch norm equals serial.

    Earlier, the forward of a subclass was replaced by the plain one, and its activation was lost
    (2.5 off at step 0). Functional calls used the statistics of each share. SyncBatchNorm refused
    the CPU. An instance norm would mix samples of two ranks.
    """
    model, data = KINDS[kind]
    verify_same(make_job(kind, model, data, optimizer=make_gentle_sgd), strategy, tmp_path)


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_timms_batch_norm_with_activation(strategy: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed (pip install timm)")
    verify_same(make_job("timm", make_timm_activated_cnn, IMAGES), strategy, tmp_path)


@pytest.mark.parametrize(
    ("strategy", "batch"), [("data(3)", 3), ("data(3, reduce=tree)", 3), ("data(2, micro=2)", 4)]
)
def test_one_sample_per_share(strategy: str, batch: int, tmp_path: Path) -> None:
    """torch refuses one value per channel in training; over all ranks there are more values."""
    data = TensorDataset(*(tensor[:24] for tensor in IMAGES.tensors))
    model = make_pooled_cnn if batch == 4 else make_batch_norm_cnn
    verify_same(make_job("one each", model, data, batch=batch), strategy, tmp_path)


class ByHand(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight.view(
            1, -1, 1, 1
        ) + self.bias.view(1, -1, 1, 1)


class Stem(nn.Module):
    """A model that begins like a vision transformer: its batch norm gets a transposed gradient."""

    def __init__(self, norm: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = norm(4)
        self.first = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.patch(x)).flatten(2).transpose(1, 2)
        return self.out(torch.tanh(tokens + self.first(tokens)).mean(1))


def build_stem_by_hand() -> nn.Module:
    return Stem(ByHand)


@pytest.mark.parametrize("strategy", ["serial", "data(2)", "pipeline(2, micro=4, cut=[out])"])
def test_one_image_with_a_transposed_gradient(strategy: str, tmp_path: Path) -> None:
    """torch's own backward is wrong for one image with a transposed gradient.

    The error is larger than the gradient. It occurs in one layout of the work, and not in another.
    """
    data = TensorDataset(*(tensor[:9] for tensor in IMAGES.tensors))
    # the reference sees the same micro-batches
    model, alone = (
        (Stem, "serial(micro=4)") if "micro" in strategy else (build_stem_by_hand, "serial")
    )
    expected = pg.train(
        make_job("by hand", model, data, batch=8, dtype=torch.float64), alone, runs=tmp_path
    ).model()
    trained = pg.train(
        make_job("stem", Stem, data, batch=8, dtype=torch.float64), strategy, runs=tmp_path
    ).model()
    for (name, value), other in zip(trained.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(value, other, rtol=1e-9, atol=1e-12), name


def build_in_eval() -> nn.Module:
    model = Kept()
    model.rest[1].eval()
    return model


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.BatchNorm2d(4).eval(),
    ],
)
def test_norm_backward_in_either_memory_layout(norm: nn.Module) -> None:
    norm = norm.double()
    shape = (1, 4, 3, 3, 3) if isinstance(norm, nn.BatchNorm3d) else (1, 4, 3, 3)
    x = torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    gradient = torch.randn(
        (1, *shape[2:], 4), dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    ).movedim(-1, 1)
    with BatchNorm(World(), norm, lambda payload: None, samples=1):
        (found,) = torch.autograd.grad(norm(x), x, gradient)
    over = [each for each in range(x.dim()) if each != 1]
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    if not norm.training:
        variance = torch.ones_like(variance)
        mean = torch.zeros_like(mean)
    (expected,) = torch.autograd.grad((x - mean) / (variance + norm.eps).sqrt(), x, gradient)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_norm_that_train_keeps_in_eval_mode() -> None:
    """A training loop begins with model.train(), and a model may override `train`.

    Earlier, this method of a job's model was not called.
    """
    model = make_job("kept", Kept, VECTORS).build_model()
    assert not model.frozen.training
    assert model.rest.training
    assert not make_job("kept by a caller", build_in_eval, VECTORS).build_model().rest[1].training
    assert (
        not make_job("eval", lambda: nn.Sequential(nn.Linear(10, 4), nn.Dropout().eval()), VECTORS)
        .build_model()[1]
        .training
    )


def test_changed_running_statistics_are_named() -> None:
    """The running statistics that batch norm computed are known by name.

    A comparison may excuse these, but neither other buffers nor those of a frozen norm.
    """
    found = make_job("frozen", Frozen, VECTORS)
    trainer = Trainer.build_for_job(World(), found, pg.strategy("serial"))
    assert not trainer.training.batch_norm.has_computed
    trainer.step(*next(trainer.batches(found.train, 12, 0)))
    assert trainer.training.batch_norm.has_computed
    assert trainer.training.batch_norm.normalized_buffers == {
        "rest.1.running_mean",
        "rest.1.running_var",
    }


def test_batch_norm_functions_are_restored() -> None:
    before = torch.batch_norm, functional._verify_batch_size
    found = make_job("norm", make_batch_norm_cnn, IMAGES)
    trainer = Trainer.build_for_job(World(), found, pg.strategy("serial"))
    trainer.step(*next(trainer.batches(found.train, 12, 0)))
    assert before == (torch.batch_norm, functional._verify_batch_size)


def test_sync_batch_norm_keeps_its_forward_outside_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a step it acts as any batch norm, also one that was put into the model after the start."""
    norm = BatchNorm(World(), nn.Linear(1, 1), lambda *_: None)
    replace_sync_forward.cache_clear()
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda self, x: "torch's own")
    layer, x = nn.SyncBatchNorm(2), torch.randn(4, 2)
    norm.start_micro_batch(4)
    with norm:
        inside = layer(x)
    assert torch.equal(inside, nn.BatchNorm1d(2)(x))
    assert layer(x) == "torch's own"
    replace_sync_forward.cache_clear()


def test_batch_of_one_sample_is_refused_as_by_torch() -> None:
    found = make_job("norm", make_normed_mlp, VECTORS, batch=1)
    trainer = Trainer.build_for_job(World(), found, pg.strategy("serial"))
    with pytest.raises(StepFailed, match="Expected more than 1 value per channel when training"):
        trainer.step(*next(trainer.batches(found.train, 1, 0)))


def compiled() -> nn.Module:
    return torch.compile(
        nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), backend="eager"
    )  # type: ignore


def run_before() -> nn.Module:
    model = compiled()
    model(VECTORS.tensors[0])
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", [compiled, run_before])
def test_a_compiled_batch_norm_is_refused(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    """A compiled graph contains torch's own kernel for batch norm.

    Earlier, each rank used the statistics of its share, or waited for ever in the compiler.
    """
    with pytest.raises(RankFailed, match="batch norm in a compiled model"):
        pg.train(make_job("compiled", model, VECTORS), "data(2)", runs=tmp_path)
