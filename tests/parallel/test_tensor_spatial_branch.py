"""Training with tensor, spatial, integrated and branch parallelism equals serial training.

These strategies divide the neurons of each layer, the pixels, or the branches over ranks.
"""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from equality_table import (
    BRIEF,
    IMAGES,
    JOBS,
    OF_BRANCHES,
    OF_IMAGES,
    OF_PIECES,
    VECTORS,
    WIDE,
    WITH_BRANCHES,
    draw_integers,
    draw_numbers,
    make_job,
    measure_difference,
)
from state_models import ByState
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import paragrad as pg
from paragrad.commands.train import train_on_ranks
from paragrad.launch import Launcher
from paragrad.parallel.tensor.sharding_plan import plan_sharding
from paragrad.report.equivalence.lockstep import COMPARED_STEPS
from paragrad.trainer.parameter_access import refuse_parameter_views
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """Return the number of steps: BRIEF in the sample, and COMPARED_STEPS in the whole table."""
    return COMPARED_STEPS if request.node.get_closest_marker("table") else BRIEF


@pytest.mark.sample(14)
@pytest.mark.parametrize(("row", "column"), WIDE)
def test_tensor_parallel_equals_serial(pool: Launcher, row: str, column: str, steps: int) -> None:
    assert measure_difference(pool, row, JOBS[column], steps).value <= 1e-10


@pytest.mark.sample(12)
@pytest.mark.parametrize(("row", "column"), OF_PIECES)
def test_spatial_parallel_equals_serial(pool: Launcher, row: str, column: str, steps: int) -> None:
    assert measure_difference(pool, row, {**JOBS, **OF_IMAGES}[column], steps).value <= 1e-10


@pytest.mark.sample(6)
@pytest.mark.parametrize(("row", "column"), OF_BRANCHES)
def test_branch_parallel_equals_serial(pool: Launcher, row: str, column: str, steps: int) -> None:
    assert measure_difference(pool, row, WITH_BRANCHES[column], steps).value <= 1e-10


# ---- unusual models --------------------------------------------------------------------------
class Centred(nn.Module):
    """A running mean as users write it: each forward replaces the buffer by another tensor."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def make_centred_net() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), Centred(16), nn.Tanh(), nn.Linear(16, 4), Centred(4))


@pytest.mark.parametrize(
    "row",
    [
        "tensor(2)",
        "tensor(3, pairs=false)",
        "place(2) * tensor(2)",
        "pipeline(2, micro=1, recompute=true) * tensor(2)",
    ],
)
def test_buffer_recreated_by_a_forward(pool: Launcher, row: str) -> None:
    """A buffer that a forward replaces is whole on every rank.

    If ranks held pieces of the first tensor, every step would read these pieces.
    """
    assert (
        measure_difference(pool, row, make_job("centred", make_centred_net, VECTORS), BRIEF).value
        <= 1e-10
    )


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([make_centred_net(), make_centred_net()])
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([tower(x) for tower in self.towers], 1))


def test_branch_buffer_recreated_by_a_forward(pool: Launcher) -> None:
    with pytest.raises(
        pg.RankFailed,
        match=r"replaces the buffer towers\..*, which is in a branch; change it in place",
    ):
        measure_difference(pool, "branch(2)", make_job("centred towers", Towers, VECTORS), BRIEF)


class Counting(nn.Module):
    """A running mean in place: an augmented assignment sets a module's buffer to itself."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean *= 0.9
            self.mean += 0.1 * x.detach().mean(0)
            self.count += 1
        return x - self.mean


class CountingTowers(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            [nn.Sequential(nn.Linear(10, 4), Counting(4), nn.Tanh()) for _ in range(2)]
        )


@pytest.mark.parametrize(
    ("row", "model"),
    [
        (
            "tensor(2)",
            lambda: nn.Sequential(nn.Linear(10, 16), Counting(16), nn.Tanh(), nn.Linear(16, 4)),
        ),
        ("branch(2)", CountingTowers),
    ],
    ids=["tensor", "branch"],
)
def test_buffer_changed_in_place_by_a_forward(
    pool: Launcher, row: str, model: Callable[[], nn.Module]
) -> None:
    assert measure_difference(pool, row, make_job("counting", model, VECTORS), BRIEF).value <= 1e-10


class Dreaming(nn.Module):
    """A layer that draws random numbers in a test too.

    Its dropout stays on. In a test, it adds noise to hidden values, which it does not do in
    training.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.3)
        if not self.training:
            x = x + 0.1 * torch.randn(len(x), *x.shape[1:], dtype=x.dtype)
        return x


class Elsewhere(nn.Module):
    """A layer that draws in a test, from generators that are not torch's.

    One draw decides which function is called.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        x = x + 0.1 * torch.from_numpy(numpy.random.randn(*x.shape)).to(x)
        return x.tanh() if random.random() < 0.5 else x * 2


class Lasting(nn.Module):
    """A dropout that stays on in a test, to show how certain a model is."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3)


def make_evaluation_draws_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16),
        nn.Tanh(),
        Dreaming(),
        nn.Linear(16, 9),
        nn.Dropout(0.2),
        Dreaming(),
        nn.Linear(9, 4),
    )


def make_lasting_dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16), Lasting(), nn.Tanh(), nn.Linear(16, 9), Lasting(), nn.Linear(9, 4)
    )


def make_numpy_draws_net() -> nn.Module:
    return nn.Sequential(
        Elsewhere(),
        nn.Linear(10, 16),
        nn.Tanh(),
        Elsewhere(),
        nn.Linear(16, 9),
        Elsewhere(),
        nn.Linear(9, 4),
    )


def make_evaluation_draws_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        Dreaming(),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        Dreaming(),
        nn.Flatten(),
        nn.Linear(144, 4),
    )


class DreamingTowers(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(10, 4), Dreaming(), nn.Tanh(), nn.Linear(4, 4))
                for _ in range(2)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.1)


def sum_cross_entropy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return functional.cross_entropy(output, target, reduction="sum"), len(target)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "data", "rows"),
    [
        (
            make_evaluation_draws_net,
            VECTORS,
            [
                "data(2)",
                "data(3, micro=2)",
                "tensor(2)",
                "tensor(3, pairs=false)",
                "data(2) * tensor(2)",
                "data(2, state=fully_sharded)",
                "data(2, dense=tensor)",
            ],
        ),
        (
            make_lasting_dropout_net,
            VECTORS,
            [
                "place(2)",
                "pipeline(2, micro=2, schedule=interleaved(2))",
                "pipeline(2, micro=2) * tensor(2)",
                "data(2) * place(3)",
            ],
        ),
        (make_numpy_draws_net, VECTORS, ["tensor(2)", "tensor(3)"]),
        (
            make_evaluation_draws_cnn,
            IMAGES,
            ["spatial(2)", "spatial(2, columns=2)", "spatial(2, dense=tensor)"],
        ),
        (DreamingTowers, VECTORS, ["branch(2)", "data(2) * branch(2)"]),
    ],
    ids=["vectors", "parts", "numpy", "images", "branches"],
)
def test_draws_in_an_evaluation_equal_serial(
    pool: Launcher,
    tmp_path: Path,
    model: Callable[[], nn.Module],
    data: TensorDataset,
    rows: list[str],
) -> None:
    """Random draws in a test give the same result as in serial.

    Earlier, every rank of a layer drew its own numbers. The pieces of one value did not fit
    together, and the test reported no error.
    """
    assert_tests_alike(
        pool,
        tmp_path,
        make_job("dreaming", model, data, test=data, metric=sum_cross_entropy, dtype=torch.float64),
        rows,
    )


def assert_tests_alike(pool: Launcher, folder: Path, made: pg.Job, rows: list[str]) -> None:
    """Assert that the test after a training gives the same result as serial under each strategy."""
    for at in range(len(rows) + 1):
        (folder / str(at)).mkdir()
    serial, *others = [
        train_on_ranks(pool, validate_run(made, text, Settings()), folder / str(at)).test
        for at, text in enumerate(["serial", *rows])
    ]
    assert others == pytest.approx([serial] * len(rows), rel=1e-12)


class Plain(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(10, 4), nn.Tanh()) for _ in range(2)])


class Late(Plain):
    """A model in which a branch begins to draw in the third step.

    The function `draw` draws random numbers inside of its computation.
    """

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        hidden = [self.towers[0](x), functional.dropout(self.towers[1](x), 0.1)]
        if self.steps > 2:
            hidden[0] = hidden[0] + self.draw(hidden[0])
        return self.out(torch.cat(hidden, 1))  # type: ignore[no-any-return]


def multinomial(x: Tensor) -> Tensor:
    return torch.multinomial(x.softmax(1), 4, True).to(x) * 0.1


def from_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(numpy.random.randn(*x.shape)).to(x)


@pytest.mark.parametrize(
    ("row", "draw", "told"),
    [
        (
            "branch(2)",
            multinomial,
            "multinomial draws random numbers in a branch, and did not when the model was "
            "looked at",
        ),
        (
            "tensor(2)",
            from_numpy,
            "the model or its loss draws from numpy, and did not when it was looked at",
        ),
    ],
)
def test_late_draws_outside_of_keyed_generators_are_reported(
    pool: Launcher, tmp_path: Path, row: str, draw: Callable[[Tensor], Tensor], told: str
) -> None:
    """Late draws that ranks cannot repeat are reported.

    If other ranks do not know that a branch draws, its rank is one draw ahead of them from then on.
    Numbers from numpy differ on every rank. Earlier, neither was reported.
    """
    with pytest.raises(pg.RankFailed, match=told):
        train_on_ranks(
            pool,
            validate_run(make_job("late", functools.partial(Late, draw), VECTORS), row, Settings()),
            tmp_path,
        )


@pytest.mark.parametrize("row", ["tensor(2)", "tensor(3)"])
def test_late_draws_equal_serial(pool: Launcher, row: str) -> None:
    assert (
        measure_difference(
            pool, row, make_job("late", functools.partial(Late, multinomial), VECTORS), BRIEF
        ).value
        <= 1e-10
    )


class Sloping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            [nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = torch.stack([tower(x) for tower in self.towers]).sum(0)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=self.training)
        return out + slope.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tensor(2)", r"the model, in a test \(eval mode, without gradients\), raised Run"),
        ("branch(2)", "the model, without gradients, raised RuntimeError: element 0"),
    ],
)
def test_model_that_cannot_be_evaluated_is_refused_at_start(text: str, told: str) -> None:
    """Earlier, the model was trained for an epoch, and then a rank failed in the test."""
    with pytest.raises(pg.Refused, match=told):
        validate_run(
            make_job("sloping", Sloping, VECTORS, test=VECTORS, metric=sum_cross_entropy),
            text,
            Settings(),
        )


class Sensitive(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        return super().forward(x), x


def compute_slope_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output[0].sum(), output[1], create_graph=True)
    return functional.cross_entropy(output[0], target) + 0.1 * slope.square().mean()


def test_loss_that_takes_gradients_is_refused_at_start() -> None:
    """Earlier, the training failed in the first test."""
    with pytest.raises(
        pg.Refused,
        match=r"the loss, in a test \(eval mode, without gradients\), raised Run.*; give",
    ):
        validate_run(
            make_job(
                "sensitive",
                lambda: Sensitive(10, 4),
                VECTORS,
                test=VECTORS,
                loss=compute_slope_loss,
            ),
            "tensor(2)",
            Settings(),
        )


def test_images_of_one_row_are_refused_at_start() -> None:
    """Earlier, the message gave spatial(1) as the repair."""
    lines = TensorDataset(draw_numbers(30, 2, 1, 8, seed=3), IMAGES.tensors[1])
    model = functools.partial(
        nn.Sequential, nn.Conv2d(2, 4, (1, 3)), nn.Flatten(), nn.Linear(24, 4)
    )
    with pytest.raises(
        pg.Refused, match="images of 1 rows cannot be divided over 2 ranks; train it with data"
    ):
        validate_run(make_job("lines", model, lines), "spatial(2)", Settings())


def test_branches_under_autocast_are_refused_at_start() -> None:
    with pytest.raises(
        pg.Refused,
        match="under autocast the ranks without a branch do not know the types of its values",
    ):
        validate_run(
            make_job("plain", Plain, VECTORS, dtype=torch.bfloat16), "branch(2)", Settings()
        )


class Remembering(nn.Module):
    """The downward path of a U-Net, recomputed in backward.

    It ends with a strided convolution for which the first rank needs no halo.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(2, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.down, self.into(x).relu(), use_reentrant=False)
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [2, 3])
def test_halo_exchange_at_the_end_of_a_checkpoint(pool: Launcher, rows: int) -> None:
    """A rank sends its halo before a recomputation ends.

    Earlier, one rank stopped the recomputation before it had answered its neighbour, which then
    waited for ever. The ranks of this test communicate over gloo.
    """
    tall = TensorDataset(draw_numbers(12, 2, 48, 4, seed=3), draw_integers(4, 12, seed=4))
    made = make_job("remembering", Remembering, tall, batch=4, epochs=1)
    assert measure_difference(pool, f"spatial({rows})", made, 3).value <= 1e-10


class Viewed(Plain):
    """A model that uses a branch's value on all ranks, and then changes it through a view."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = (tower(x) * 1 for tower in self.towers)
        before = first + second
        first.view(-1).mul_(0.5)
        return self.out(torch.cat([before, first + second], 1))  # type: ignore[no-any-return]


def test_gathered_value_changed_through_a_view(pool: Launcher) -> None:
    assert (
        measure_difference(pool, "branch(2)", make_job("viewed", Viewed, VECTORS), BRIEF).value
        <= 1e-10
    )


def test_small_last_layer_that_every_rank_holds(pool: Launcher) -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(10, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
        )

    plan = plan_sharding(make_model(), draw_numbers(2, 10, seed=1), 2)
    assert "4.weight" in plan.whole_names
    job = make_job("small last layer", make_model, VECTORS)
    assert measure_difference(pool, "tensor(2)", job, BRIEF).value <= 1e-10


class Meshed(nn.Module):
    """A model that calls torch.meshgrid, which dispatches a second time from its own helper."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(10, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x).tanh()
        first, _ = torch.meshgrid(hidden[0], hidden[0], indexing="ij")
        return self.out(hidden) + 0 * first.sum()  # type: ignore[no-any-return]


def test_function_that_dispatches_twice(pool: Launcher) -> None:
    assert (
        measure_difference(
            pool, "tensor(2)", make_job("meshed", Meshed, VECTORS, batch=29), BRIEF
        ).value
        <= 1e-10
    )


class NormedTwice(Plain):
    """Branches of two forks that share a batch norm with statistics and without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.again = nn.ModuleList([nn.Linear(8, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.norm(self.towers[0](x)), self.towers[1](x)], 1)
        return self.out(torch.cat([self.again[0](both), self.norm(self.again[1](both))], 1))


@pytest.mark.parametrize("row", ["branch(2)", "data(2) * branch(2)"])
def test_statistics_shared_by_branches(pool: Launcher, row: str) -> None:
    """Earlier, only the rank whose branch called the norm changed the statistics."""
    assert (
        measure_difference(pool, row, make_job("normed twice", NormedTwice, VECTORS), BRIEF).value
        <= 1e-10
    )


class Kept(Plain):
    """A model that uses parameters from a list that its constructor made."""

    def __init__(self) -> None:
        super().__init__()
        self.limited = {
            "weights": [each.weight for each in self.modules() if isinstance(each, nn.Linear)]
        }

    def forward(self, x: Tensor) -> Tensor:
        for each in self.limited["weights"]:
            each.data.copy_(each.data.renorm(2, 0, 0.3))
        return super().forward(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "row",
    [
        "tensor(2)",
        "branch(2)",
        "data(2) * tensor(2)",
        "pipeline(2, micro=2)",
        "data(2, state=fully_sharded)",
    ],
)
def test_parameters_outside_of_modules_are_refused_at_start(row: str) -> None:
    """A model that keeps parameters outside of its modules is refused.

    Earlier, the kept parameters differed from the rank's own from the first update on. The training
    was different, without an error.
    """
    with pytest.raises(
        pg.Refused,
        match=r"the attribute limited of the model keeps the parameter towers\.0\.0\.weight, and",
    ):
        validate_run(make_job("kept", Kept, VECTORS), row, Settings())


def test_dead_weak_proxy_keeps_no_parameter() -> None:
    """To read the type of a dead weak proxy raises ReferenceError.

    Earlier, the check of a model's attributes failed with this error.
    """
    gone = weakref.proxy(nn.Linear(1, 1))
    model = nn.Sequential(nn.Linear(2, 2))
    model.parents = {"all": [gone]}  # type: ignore[assignment]
    refuse_parameter_views(model)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_module_that_torch_cannot_copy_is_refused_at_start() -> None:
    """Earlier, a rank reported that the module cannot be copied, and gave no repair."""
    made = make_job(
        "old norm",
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(10, 8)), nn.Tanh(), nn.Linear(8, 4)),
        VECTORS,
    )
    with pytest.raises(
        pg.Refused,
        match=r"cannot be copied, which its division needs: .*parametrizations\.weight_norm, not",
    ):
        validate_run(made, "tensor(2)", Settings())


def test_unsupported_control_flow_is_reported_with_its_cause(
    pool: Launcher, tmp_path: Path
) -> None:
    """Earlier, the message said to cut the model elsewhere, but tensor cuts no model."""
    made = make_job(
        "by state",
        lambda: ByState(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)),
        VECTORS,
        loss=lambda output, target: (output[:, 0] * target).mean(),
    )
    with pytest.raises(
        pg.RankFailed,
        match=r"way that paragrad does not see \(copies of parameters.*train it with data\(n\)",
    ):
        train_on_ranks(pool, validate_run(made, "tensor(2)", Settings()), tmp_path)


class Averaged(Plain):
    """A model that uses an average of its parameters in a test, and torch.func in all forwards."""

    def __init__(self) -> None:
        super().__init__()
        for name, each in self.towers.named_parameters():
            self.register_buffer(name.replace(".", "_"), each.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        now = dict(self.towers.named_parameters())
        average = {name: self.get_buffer(name.replace(".", "_")) for name in now}
        if self.training:
            with torch.no_grad():
                for name, each in now.items():
                    average[name].lerp_(each, 0.3)
        used = now if self.training else average
        return self.out(
            torch.cat(
                [
                    torch.func.functional_call(  # type: ignore[no-any-return]
                        tower,
                        {
                            name.removeprefix(f"{at}."): each
                            for name, each in used.items()
                            if name.startswith(f"{at}.")
                        },
                        (x,),
                    )
                    for at, tower in enumerate(self.towers)
                ],
                1,
            )
        )


@pytest.mark.parametrize("row", ["tensor(2)", "tensor(3, pairs=false)", "branch(2)"])
def test_functional_call_uses_the_given_parameters(
    pool: Launcher, tmp_path: Path, row: str
) -> None:
    """Modules use the parameters that torch.func sets.

    Earlier, modules found their own shards first.
    """
    made = make_job("averaged", Averaged, VECTORS, test=VECTORS, dtype=torch.float64)
    assert measure_difference(pool, row, made, BRIEF).value <= 1e-10
    assert_tests_alike(pool, tmp_path, made, [row])


class Masking(nn.Module):
    """A model that changes a part of a value in place in a test."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(10, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x).tanh()
        if not self.training:
            hidden[:, 0].view(-1).zero_()
        return self.out(hidden)  # type: ignore[no-any-return]


class Bordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(2, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        if not self.training:
            hidden[:, :, 0].fill_(3.0)
        return self.out(hidden).mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("row", "model", "data", "told"),
    [("tensor(2)", Masking, VECTORS, "zero_"), ("spatial(2)", Bordered, IMAGES, "fill_")],
)
def test_gathered_view_is_not_changed_in_place(
    pool: Launcher,
    tmp_path: Path,
    row: str,
    model: Callable[[], nn.Module],
    data: TensorDataset,
    told: str,
) -> None:
    """Earlier, a copy was changed, and the test's result was different, without an error."""
    with pytest.raises(
        pg.RankFailed, match=f"{told} changes in place a view of a value that is divided over ranks"
    ):
        train_on_ranks(
            pool,
            validate_run(make_job("masking", model, data, test=data), row, Settings()),
            tmp_path,
        )


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(2, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x).tanh()
        border = hidden[:, :, 0]
        if border.requires_grad:
            border.register_hook(lambda gradient: 2 * gradient)
        return self.out(hidden).mean((2, 3)) * border.mean((1, 2))[:, None]


def test_hook_on_a_gathered_view(pool: Launcher) -> None:
    """Earlier, the hook was registered on another tensor, which no operation used."""
    assert (
        measure_difference(pool, "spatial(2)", make_job("hooked", Hooked, IMAGES), BRIEF).value
        <= 1e-10
    )


class OfAnySize(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return torch.randn(
            2, 4 + at, 5 + at % 3, generator=torch.Generator().manual_seed(at)
        ), at % 4


@pytest.mark.parametrize("row", ["tensor(2)", "spatial(2)"])
def test_samples_that_cannot_share_a_batch(pool: Launcher, row: str) -> None:
    """Earlier, the check before the start put two samples into one batch. The job never does."""
    made = make_job(
        "of any size",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)
        ),
        OfAnySize(),
        batch=1,
    )
    validate_run(made, row, Settings())
    assert measure_difference(pool, row, made, BRIEF).value <= 1e-10


LOOKED_UP = """
import torch, paragrad as pg
from torch import nn
from torch.utils.data import TensorDataset

torch.use_deterministic_algorithms(True)

class LookedUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(50, 64)), nn.Linear(64, 4)
        self.register_buffer("places", torch.randint(50, (400,)))

    def forward(self, x):
        torch.set_num_threads(2)
        return self.out((self.table[self.places.expand(len(x), -1)] * x[:, :1, None]).mean(1))

x = torch.randn(64, 10)
job = pg.Job(name="looked-up", model=LookedUp, loss=nn.functional.cross_entropy,
        train=TensorDataset(x, x[:, :4].argmax(1)),
             optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), epochs=1, batch=64)
"""


@pytest.mark.table
def test_gradients_summed_by_threads_in_any_order(tmp_path: Path) -> None:
    """torch sums gradients in one order if it is told to.

    Threads sum the backward of x[index] in any order. Copies of a table then differed between
    ranks, and an error blamed a forward that writes to it.
    """
    (tmp_path / "looked_up.py").write_text(LOOKED_UP)
    done = subprocess.run(
        [sys.executable, "-m", "paragrad", "train", "looked_up.py", "--strategy", "tensor(2)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "of this step are one worker's" in done.stdout, done.stderr


class PreActivation(nn.Module):
    """A block as in a ResNet v2 or MaxViT: a projection, and a branch that begins with a norm.

    Both have the same input.
    """

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3)
        self.short = nn.Conv2d(6, 8, 1)
        self.norm = norm(6)
        self.conv = nn.Conv2d(6, 8, 1)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.out((self.short(x) + self.conv(self.norm(x).relu())).mean((2, 3)))


@pytest.mark.parametrize(
    ("row", "norm"),
    [
        ("branch(2)", nn.BatchNorm2d),
        ("data(2) * branch(2)", nn.BatchNorm2d),
        ("branch(2)", functools.partial(nn.BatchNorm2d, affine=False)),
        ("branch(2)", functools.partial(nn.InstanceNorm2d, track_running_stats=True)),
    ],
    ids=["batch", "data", "plain", "instance"],
)
def test_branch_that_begins_with_a_norm(
    pool: Launcher, row: str, norm: Callable[[int], nn.Module]
) -> None:
    """A norm at the beginning of a branch belongs to the branch.

    Earlier, it was counted as part of the trunk, because its input is on all ranks. Each rank wrote
    the statistics to a copy of its own.
    """
    assert (
        measure_difference(
            pool,
            row,
            make_job("pre-activation", functools.partial(PreActivation, norm), IMAGES),
            BRIEF,
        ).value
        <= 1e-10
    )


class Shared(nn.Module):
    """A model with two forks; each has a norm with its own statistics.

    Both norms share one weight and one bias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PreActivation(nn.BatchNorm2d), PreActivation(nn.BatchNorm2d)])
        self.blocks[1].norm.weight = self.blocks[0].norm.weight
        self.blocks[1].norm.bias = self.blocks[0].norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + self.blocks[1](x.tanh())  # type: ignore[no-any-return]


def test_branch_statistics_with_a_trunk_weight_are_refused() -> None:
    """Earlier, the statistics of the norms in branches were written to copies."""
    with pytest.raises(
        pg.Refused,
        match="batch_norm changes a value of a branch that one rank has by values of other ranks",
    ):
        validate_run(make_job("shared", Shared, IMAGES), "branch(2)", Settings())


def make_spectral_norm_towers(of: Callable[[nn.Module], nn.Module]) -> nn.Module:
    made = Plain()
    of(made.towers[0][0])  # type: ignore[index]
    return made


@pytest.mark.parametrize(
    "of", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"]
)
def test_branch_with_a_spectral_norm(pool: Launcher, of: Callable[[nn.Module], nn.Module]) -> None:
    """A branch with a spectral norm equals serial.

    torch's spectral norm writes its vectors by `out=`, and assigns the result. Earlier, the result
    was another tensor.
    """
    assert (
        measure_difference(
            pool,
            "branch(2)",
            make_job("spectral", functools.partial(make_spectral_norm_towers, of), VECTORS),
            BRIEF,
        ).value
        <= 1e-10
    )


@dataclass(slots=True)
class Heads:
    main: Tensor
    other: Tensor


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(10, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Heads:
        x = self.into(x).tanh()
        return Heads(*(head(x) for head in self.heads))


def compute_heads_loss(output: Heads, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.main, target) + 0.3 * functional.cross_entropy(
        output.other, target
    )


@pytest.mark.parametrize("row", ["branch(2)", "tensor(2)"])
def test_output_heads_in_a_dataclass(pool: Launcher, row: str) -> None:
    """Earlier, the message said that the model has no branches."""
    assert (
        measure_difference(
            pool, row, make_job("heads", TwoHeads, VECTORS, loss=compute_heads_loss), BRIEF
        ).value
        <= 1e-10
    )


class ByNorms(torch.optim.SGD):
    """An SGD that divides all gradients by their common norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [
            each.grad
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        torch._foreach_div_(gradients, 1e-3 + torch.stack(torch._foreach_norm(gradients)).norm())
        return super().step(closure)


def make_hooked_sgd(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.05)
    made.register_step_post_hook(
        lambda optimizer, *_: [
            each.detach().clamp_(-0.5, 0.5) for each in optimizer.param_groups[0]["params"]
        ]
    )
    return made


class Listing(torch.optim.SGD):
    """An SGD with a list of parameters of its own, as SAM and Lookahead have.

    On a rank, this list does not hold the parameters that are trained.
    """

    def __init__(self, parameters: Any) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch._foreach_mul_(self.mine, 0.99)
        return super().step(closure)


OF_WHOLE = {
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "all": functools.partial(ByNorms, lr=0.05),
    "own list": Listing,
    "hook": make_hooked_sgd,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "row", ["spatial(2)", "data(2) * spatial(2)", "branch(2)", "data(2) * branch(2)"]
)
def test_whole_tensor_optimizer_gets_whole_tensors(pool: Launcher, row: str) -> None:
    """An optimizer that needs whole tensors is accepted if every parameter is whole.

    Every rank has all parameters, or each parameter is on one rank. Earlier, the optimizer was
    refused, with the message that the parameters are cut.
    """
    model = functools.partial(PreActivation, nn.BatchNorm2d)
    made = make_job("of whole tensors", model, IMAGES, optimizer=OF_WHOLE["Adafactor"])
    validate_run(made, row, Settings())
    assert measure_difference(pool, row, made, BRIEF).value <= 1e-10


@pytest.mark.parametrize(
    ("row", "optimizer", "told"),
    [
        (
            "branch(2)",
            "all",
            r"ByNorms needs all parameters together .*, and branch\(2\) has them on several ranks",
        ),
        (
            "branch(2)",
            "hook",
            "SGD has the hook <lambda>, which may look at parameters that are on another rank",
        ),
        (
            "spatial(2)",
            "hook",
            "SGD has the hook <lambda>, which may look at parameters that are on another rank",
        ),
        (
            "spatial(2)",
            "own list",
            r"Listing needs all parameters together .*, and spatial\(2\) has them on several ranks",
        ),
        (
            "spatial(2, dense=tensor)",
            "Adafactor",
            r"Adafactor needs whole tensors together .*, and spatial\(2, .* divides them",
        ),
    ],
)
def test_optimizer_of_tensors_no_rank_holds_is_refused(row: str, optimizer: str, told: str) -> None:
    model = functools.partial(PreActivation, nn.BatchNorm2d)
    with pytest.raises(pg.Refused, match=told):
        validate_run(
            make_job("of whole tensors", model, IMAGES, optimizer=OF_WHOLE[optimizer]),
            row,
            Settings(),
        )


class InnerGradient(torch.autograd.Function):
    """An autograd function that computes gradients in its backward.

    The gradient of an output that is not used is None.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in (x, weight, bias)]
            hidden = torch.tanh(functional.linear(*inputs))
            unused = inputs[0].sum(-1)
        ctx.inner = inputs, (hidden, unused)
        return hidden.detach(), unused.detach()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        inputs, outputs = ctx.inner
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None
        ]
        assert len(pairs) == 1
        return torch.autograd.grad(
            [output for output, _ in pairs],
            inputs,
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )


class WithInnerGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.second = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(InnerGradient.apply(hidden, self.second.weight, self.second.bias)[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("row", ["tensor(2)", "data(2) * tensor(2)"])
def test_gradient_of_none_inside_of_an_autograd_function(pool: Launcher, row: str) -> None:
    assert (
        measure_difference(pool, row, make_job("inner", WithInnerGradient, VECTORS)).value <= 1e-10
    )
