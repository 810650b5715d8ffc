"""`pg.parallelize` in the user's own loop: under python, torchrun and mpirun.

Also training from `python -c` and from a notebook.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equality_table import IMAGES, VECTORS, make_batch_norm_cnn, make_mlp, make_momentum_sgd
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import paragrad as pg
from paragrad.errors import StepFailed
from paragrad.launch import Launcher
from paragrad.runtime.rendezvous import find_existing_world
from paragrad.runtime.world import World
from paragrad.trainer.trainer import Trainer

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"


def run_program(*words: str, cwd: Path | None = None, **settings: str) -> str:
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plain_parameters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Run the example under plain python, and return the parameters that it saves."""
    path = tmp_path_factory.mktemp("alone") / "model.safetensors"
    assert "1 worker(s)" in run_program(sys.executable, str(EXAMPLE), str(path))
    return load_file(path)


@pytest.mark.table  # the README's loop runs under torchrun in test_docs.py
def test_user_loop_example_under_torchrun(
    plain_parameters: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    text = run_program(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLE),
        str(path),
    )
    assert "2 worker(s)" in text
    assert_same_parameters(plain_parameters, load_file(path))


@pytest.mark.table
def test_user_loop_example_under_mpirun(
    plain_parameters: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian package openmpi-bin; make system)")
    path = tmp_path / "model.safetensors"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    assert "3 worker(s)" in run_program(
        "mpirun", *root, "--oversubscribe", "-np", "3", sys.executable, str(EXAMPLE), str(path)
    )
    assert_same_parameters(plain_parameters, load_file(path))


def assert_same_parameters(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float64
        assert float((tensor - theirs[name]).abs().max()) <= 1e-10 * float(tensor.abs().max())


def test_world_of_one_is_plain_pytorch() -> None:
    """With one worker, the training equals a plain PyTorch loop with the same order of samples.

    Both use the user's own objects and train for three epochs.
    """
    models = []
    for ours in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with pg.parallelize(model, functional.cross_entropy, optimizer, clip_norm=0.1) as trainer:
            for epoch in range(3):
                for inputs, target in trainer.batches(VECTORS, batch=8, epoch=epoch):
                    if ours:
                        result = trainer.step(inputs, target)
                    else:
                        optimizer.zero_grad()
                        loss = functional.cross_entropy(model(inputs), target)
                        loss.backward()
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                        optimizer.step()
        models.append((model.state_dict(), result.loss if ours else float(loss.detach())))
    assert models[0][1] == pytest.approx(models[1][1], rel=1e-12)
    for name, tensor in models[0][0].items():
        assert torch.allclose(tensor, models[1][0][name], rtol=1e-12, atol=0)


def test_prefetching_wrapper_is_reported() -> None:
    """A wrapper around `trainer.batches` that fetches one batch ahead is refused.

    `trainer.step` uses the share of the batch that `batches` gave last. So with such a wrapper,
    shares would be mixed up without a message. A loop may skip a batch, or change it.
    """

    def prefetch_one(batches: Iterator[object]) -> Iterator[object]:
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held

    model = nn.Linear(10, 4)
    with pg.parallelize(
        model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
    ) as trainer:
        for number, (inputs, target) in enumerate(trainer.batches(VECTORS, batch=8, epoch=0)):
            if number != 1:
                trainer.step(inputs * 2, target)
        (inputs, target) = next(prefetch_one(trainer.batches(VECTORS, batch=8, epoch=1)))
        with pytest.raises(StepFailed, match="reads ahead"):
            trainer.step(inputs, target)


def train_in_own_loop(
    world: World, strategy: str
) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """Train a model with batch norm in a user's loop; each rank begins with other weights."""
    torch.manual_seed(3 + world.rank)
    model = make_batch_norm_cnn().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(model, functional.cross_entropy, optimizer, strategy) as trainer:
        losses = [
            trainer.step(*batch).loss
            for epoch in range(2)
            for batch in trainer.batches(IMAGES, batch=12, epoch=epoch)
        ]
        score = trainer.evaluate(IMAGES, pg.accuracy)
    # the model is a plain model again
    assert all("forward" not in vars(module) for module in model.modules())
    return model.state_dict(), losses, score


@pytest.mark.parametrize(
    "strategy", ["data(3, reduce=ring, shares=[3, 1, 2])", "spatial(3)", "data(3, dense=tensor)"]
)
def test_ranks_begin_with_rank_0_and_see_the_global_mean(pool: Launcher, strategy: str) -> None:
    """Three ranks in an existing process group train as one worker does."""
    expected = train_in_own_loop(World(), "serial")
    for state, losses, score in pool.run(train_in_own_loop, strategy, size=3):
        assert losses == pytest.approx(expected[1], rel=1e-10)
        assert score == pytest.approx(expected[2])
        for name, tensor in expected[0].items():
            assert torch.allclose(state[name], tensor, rtol=1e-9, atol=1e-9), name


class Tied(nn.Module):
    """A model with a tied weight, a buffer that is not saved, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 10)
        self.end = nn.Linear(10, 6, bias=False)
        self.out = nn.Linear(6, 4)
        self.act = nn.ReLU()
        self.end.weight = self.first.weight
        self.end_by = torch.relu
        self.times = 1
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(torch.tanh(self.first(x)), 0.2, self.training)
        return self.out(self.end(self.last(self.act(self.middle(hidden))))) * self.scale


def train_divided_model(
    world: World, strategy: str
) -> tuple[dict[str, torch.Tensor], list[float], float, bool]:
    """Train a divided model in a user's loop.

    Within the loop, the user's model has no values, so the user cannot read outdated ones.
    """
    torch.manual_seed(3 + world.rank)
    model = Tied().double()
    optimizer = torch.optim.Adam(
        [
            {"params": [model.out.bias]},
            {
                "params": [each for each in model.parameters() if each is not model.out.bias],
                "lr": 0.02,
            },
        ],
        lr=0.01,
    )
    with pg.parallelize(
        model, functional.cross_entropy, optimizer, strategy, clip_norm=0.5
    ) as trainer:
        before = trainer.evaluate(VECTORS)
        losses = [
            trainer.step(*batch).loss
            for epoch in range(2)
            for batch in trainer.batches(VECTORS, batch=12, epoch=epoch)
        ]
        losses += [before, trainer.evaluate(VECTORS)]
        state = {name: tensor.clone() for name, tensor in trainer.state().items()}
        hollow = all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    model.eval()
    assert model.end.weight is model.first.weight
    assert all(
        torch.equal(state[name], each)
        for name, each in (*model.named_parameters(), *model.named_buffers())
    )
    assert not any(
        each._post_accumulate_grad_hooks
        for each in (*model.parameters(), *trainer.training.setup.parameters.values())
    )
    continue_plainly(model, optimizer)
    with torch.no_grad():
        return state, losses, float(model(VECTORS.tensors[0].double()).sum()), hollow


class Recurrent(nn.Module):
    """A model whose first layer is a frozen LSTM, which keeps its weights also in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(10, 6, batch_first=True)
        self.second = nn.LSTM(6, 6, batch_first=True)
        self.out = nn.Linear(6, 4)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.second(self.first(x[:, None])[0])[0][:, 0])


def train_recurrent_model(world: World, strategy: str) -> list[float]:
    torch.manual_seed(3)
    model = Recurrent().double()
    optimizer = torch.optim.Adam(
        [each for each in model.parameters() if each.requires_grad], lr=0.01
    )
    with pg.parallelize(model, functional.cross_entropy, optimizer, strategy) as trainer:
        losses = [trainer.step(*batch).loss for batch in trainer.batches(VECTORS, batch=8, epoch=0)]
        losses.append(trainer.evaluate(VECTORS))
    continue_plainly(model, optimizer)
    with torch.no_grad():
        return [*losses, float(model(VECTORS.tensors[0].double()).sum())]


@pytest.mark.parametrize(
    "strategy",
    ["place(2)", "tensor(2)", pytest.param("pipeline(2, micro=2)", marks=pytest.mark.story)],
)
def test_frozen_lstm_in_a_user_loop(pool: Launcher, strategy: str) -> None:
    expected = train_recurrent_model(World(), "serial")
    for losses in pool.run(train_recurrent_model, strategy, size=2):
        assert losses == pytest.approx(expected, rel=1e-9)


def continue_plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make three steps of plain PyTorch after the loop.

    Earlier, the optimizer still held the parameters and the state of its rank's part.
    """
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(model(VECTORS.tensors[0].double()), VECTORS.tensors[1]).backward()
        optimizer.step()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("place(2)", 2),
        ("pipeline(3, micro=4, schedule=zero_bubble)", 3),
        ("data(2) * pipeline(2, micro=2)", 4),
        ("tensor(2)", 2),
        ("data(2) * tensor(2)", 4),
        ("pipeline(2, micro=2) * tensor(2)", 4),
    ],
)
def test_divided_model_is_whole_after_the_loop(pool: Launcher, strategy: str, size: int) -> None:
    expected = train_divided_model(World(), "serial")
    assert not expected[3]
    for state, losses, score, hollow in pool.run(train_divided_model, strategy, size=size):
        assert hollow
        assert losses == pytest.approx(expected[1], rel=1e-10)
        assert score == pytest.approx(expected[2], rel=1e-10)
        for name, tensor in expected[0].items():
            assert torch.allclose(state[name], tensor, rtol=1e-9, atol=1e-12), name


CHANGES = {
    "frozen": (
        lambda model, optimizer: model.middle.requires_grad_(False),
        "middle.weight.requires_grad is False, other than when the model was divided",
    ),
    "eval": (lambda model, optimizer: model.eval(), "the model is in eval mode, other than when"),
    "group": (
        lambda model, optimizer: optimizer.add_param_group(
            {"params": [nn.Parameter(torch.zeros(2))]}
        ),
        "group 1 of the optimizer has other parameters",
    ),
    "replaced": (
        lambda model, optimizer: setattr(model, "out", nn.Linear(6, 4)),
        "what is called out is another module",
    ),
    "loaded": (
        lambda model, optimizer: model.load_state_dict(Tied().state_dict(), assign=True),
        "this object has no values",
    ),
    "written": (
        lambda model, optimizer: torch.no_grad()(model.middle.weight.mul_)(0.5),
        "middle.weight has no values",
    ),
    "written by data": (
        lambda model, optimizer: model.middle.weight.data.mul_(0.5),
        "middle.weight has no values",
    ),
    "read": (
        lambda model, optimizer: sum(each.norm() for each in model.parameters()),
        "first.weight has no values",
    ),
    "averaged": (
        lambda model, optimizer: torch.zeros(6, 6).lerp_(model.middle.weight, 0.1),
        "middle.weight has no values",
    ),
    "chosen from": (
        lambda model, optimizer: model.middle.weight.where(torch.ones(6, 6) > 0, 0),
        "middle.weight has no values",
    ),
    "copied": (lambda model, optimizer: copy.deepcopy(model), "scale has no values"),
    "clipped": (
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "the gradient of first.weight has",
    ),
    "function": (
        lambda model, optimizer: setattr(model, "end_by", torch.tanh),
        "the attribute end_by is another object",
    ),
    "gone": (lambda model, optimizer: delattr(model, "times"), "the attribute times is gone"),
    "hooked": (
        lambda model, optimizer: model.middle.register_forward_hook(lambda *_: None),
        "middle's list of hooks has others",
    ),
    "removed": (
        lambda model, optimizer: setattr(model, "out", nn.Identity()),
        "what is called out is another module",
    ),
    "quiet": (
        lambda model, optimizer: setattr(model, "act", nn.ReLU()),
        "what is called act is another module, other than",
    ),
}


def change_and_step(
    change: str, model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Trainer, batch: Any
) -> None:
    CHANGES[change][0](model, optimizer)
    trainer.step(*batch)


def train_and_change(world: World, change: str) -> str:
    """Train a divided model, apply a change of the user to it, and return the error.

    Before that change, other actions of the user are tried: some work, and some raise an error.
    """
    torch.manual_seed(3)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(model, functional.cross_entropy, optimizer, "place(2)") as trainer:
        batches = trainer.batches(VECTORS, batch=8, epoch=0)
        trainer.step(*next(batches))
        optimizer.param_groups[0]["lr"] = 0.05  # this change is allowed
        model.eval()
        trainer.evaluate(VECTORS)
        model.train()
        # user code moves its inputs to this device
        assert {each.device.type for each in (model.out.weight, model.out.weight.grad)} == {"cpu"}
        # loops that are written for one worker call these
        model.zero_grad()
        model.zero_grad(set_to_none=False)
        trainer.step(*next(batches))
        for use in (model.state_dict, model.out.state_dict, lambda: model(VECTORS.tensors[0])):
            with pytest.raises(
                StepFailed,
                match=r"the model is divided, and this object has no .* read trainer.state\(\)",
            ):
                use()
        with pytest.raises(StepFailed) as failed:
            change_and_step(change, model, optimizer, trainer, next(batches))
        trained = trainer.state()
    # the model has its trained values again, in spite of the error
    assert len(optimizer.param_groups) == 1 + (change == "group")
    assert torch.equal(model.middle.weight, trained["middle.weight"])
    assert not any(each.is_meta for each in model.parameters())
    return str(failed.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_to_a_divided_model_reach_its_shards(pool: Launcher, change: str) -> None:
    """A change of the user to a divided model raises an error.

    Earlier, freezing, eval() and new groups changed only the user's own object. The parts on the
    ranks were trained without the change.
    """
    for told in pool.run(train_and_change, change, size=2):
        assert CHANGES[change][1] in told
        assert "or train it with data(n)" in told or "has no values" in told


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 6)
        self.drop = nn.Dropout(0.5)
        self.middle = nn.Linear(6, 6)
        self.out = nn.Linear(6, 4)
        self.heat = 1.0
        self.config = SimpleNamespace(gain=1.0)
        self.wide = 6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.first(x)))[:, : self.wide] / self.heat
        deep = self.middle(functional.pad(hidden, (0, 6 - self.wide)) * self.config.gain)
        return self.out(torch.tanh(deep) + functional.pad(hidden, (0, 6 - self.wide)))


def train_annealed_model(world: World, strategy: str) -> list[float]:
    torch.manual_seed(3)
    model = Annealed().double()
    found = []
    with pg.parallelize(
        model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), strategy
    ) as trainer:
        for epoch in range(3):
            model.drop.p = 0.5 / (1 + epoch)
            model.heat = 1.0 + epoch
            model.config.gain = 1.0 - epoch / 4
            model.wide = 6 - epoch
            found += [
                trainer.step(*batch).loss
                for batch in trainer.batches(VECTORS, batch=12, epoch=epoch)
            ]
            model.eval()
            model.heat = 0.5  # only for the test
            found.append(trainer.evaluate(VECTORS))
            model.train()
    return found


@pytest.mark.parametrize(
    "strategy",
    [
        "place(2)",
        "tensor(2)",
        pytest.param(
            "pipeline(2, micro=2, schedule=interleaved(chunks=2))", marks=pytest.mark.story
        ),
    ],
)
def test_module_attributes_set_while_divided_reach_shards(pool: Launcher, strategy: str) -> None:
    """Attributes that a user's loop sets reach all parts of a divided model.

    The loop changes a dropout, a temperature and a width that crosses a cut, for steps or for a
    test. Earlier, the parts kept the values of the first step, without a message.
    """
    expected = train_annealed_model(World(), "serial")
    for losses in pool.run(train_annealed_model, strategy, size=2):
        assert losses == pytest.approx(expected, rel=1e-10)


def make_trainer(**changes: object):  # type: ignore[no-untyped-def]
    model = nn.Linear(10, 4)
    given = {
        "model": model,
        "loss": functional.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        **changes,
    }
    return pg.parallelize(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategy": "data(2)"},
            "data.2. needs 2 worker.s. and the launcher started 1; start 2, or write data.auto.",
        ),
        ({"strategy": "dta(2)"}, "did you mean data"),
        ({"model": nn.Linear}, "needs a torch.nn.Module, got type"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
            "2 parameter.s. that are not the model's",
        ),
        ({"optimizer": 0.1}, "the optimizer is a float; make it a torch.optim.Optimizer"),
        ({"clip_norm": -1}, "clip_norm must be above 0 or None, got -1"),
        (
            {"autocast": torch.float64},
            "autocast must be torch.bfloat16, torch.float16 or None, got torch.float64",
        ),
        (
            {"scheduler": 3},
            "the scheduler is a int; make it a torch.optim.lr_scheduler.LRScheduler",
        ),
        ({"loss": None}, "needs a loss"),
        ({"device": "cdua"}, "no device 'cdua'; did you mean cuda"),
        ({"backend": "nccl"}, "add --device cuda"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_before_the_first_step(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(pg.Refused, match=message), make_trainer(**changes):
        pytest.fail("it was let in")


def test_step_takes_a_batch_once() -> None:
    with make_trainer() as trainer:
        for inputs, target in trainer.batches(VECTORS, batch=29, epoch=0):
            trainer.step(inputs, target)
            with pytest.raises(StepFailed, match=r"loop over trainer\.batches"):
                trainer.step(inputs, target)


def test_non_additive_loss_is_named_before_the_first_step() -> None:
    with make_trainer(loss=nn.CrossEntropyLoss(reduction="sum")) as trainer:
        batch = next(trainer.batches(VECTORS, batch=29, epoch=0))
        with pytest.raises(
            StepFailed, match="the loss is a bare sum over the batch; return the mean"
        ):
            trainer.step(*batch)


def train_and_unfreeze(world: World) -> str:
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    with pg.parallelize(
        model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), "data(2)"
    ) as trainer:
        batches = trainer.batches(VECTORS, batch=12, epoch=0)
        trainer.step(*next(batches))
        model[0].requires_grad_(True)
        try:
            trainer.step(*next(batches))
        except StepFailed as error:
            return str(error)
    return "it trained on"


def test_unfreezing_is_reported(pool: Launcher) -> None:
    """A parameter that is unfrozen after the first step is reported.

    DDP exchanges only the parameters that were trainable when DDP was created. So this parameter
    would differ between ranks, without a message.
    """
    for told in pool.run(train_and_unfreeze, size=2):
        assert told.startswith(
            "step 1, tensor 0.weight, 0.bias: it was frozen or unfrozen after step 0"
        )


def grow_model(world: World, strategy: str, joins: bool) -> str:
    """Add a layer after the first step, or give a parameter of the model to the optimizer."""
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 4))
    start = model.parameters() if not joins else model[0].parameters()
    optimizer = torch.optim.SGD(start, lr=0.1)
    with pg.parallelize(model, functional.cross_entropy, optimizer, strategy) as trainer:
        batches = trainer.batches(VECTORS, batch=12, epoch=0)
        trainer.step(*next(batches))
        if not joins:
            model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": list(model[-1].parameters())})
        try:
            trainer.step(*next(batches))
        except StepFailed as error:
            return str(error)
    return "it trained on"


@pytest.mark.parametrize(
    "strategy", ["data(2)", "data(2, reduce=ring)", "data(2, state=replicated)"]
)
def test_an_added_layer_is_reported(pool: Launcher, strategy: str) -> None:
    """A layer that is added after the first step is reported.

    Earlier, its gradients were not exchanged, and the replicas became different without a
    message. The check repeated the step in float64 with a new exchange, which knew the layer.
    """
    for told in pool.run(functools.partial(grow_model, strategy=strategy, joins=False), size=2):
        assert told.startswith("step 1, tensor 2.weight, 2.bias: it was added after step 0")


def test_a_parameter_of_the_model_may_join_the_optimizer_later(pool: Launcher) -> None:
    for told in pool.run(functools.partial(grow_model, strategy="data(2)", joins=True), size=2):
        assert told == "it trained on"


def test_modules_in_eval_mode_stay_in_it() -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4))
    model[1].eval()
    with make_trainer(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    ) as trainer:
        trainer.evaluate(VECTORS)
    assert model.training
    assert not model[1].training


class Noisy(nn.Module):
    """A model with a switch and a counter.

    The user sets the switch for a test, and resets the counter after each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(10, 10)
        self.two = nn.Linear(10, 4)
        self.noisy = False
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.one(x)) * (1.1 if self.noisy else 1.0)
        return self.two(hidden * (0.5 if self.calls <= 2 else 1.0))


def change_and_restore(world: World, strategy: str) -> tuple[list[float], list[int]]:
    torch.manual_seed(3)
    model = Noisy().double()
    losses, calls = [], []
    with pg.parallelize(
        model,
        functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy,
        skip_first_step_check=strategy == "serial",
    ) as trainer:
        for batch in trainer.batches(VECTORS, batch=8, epoch=0):
            losses.append(trainer.step(*batch).loss)
            calls.append(model.calls)
            model.noisy = True
            losses.append(trainer.evaluate(VECTORS))
            model.noisy = False
            model.calls = 0
    return losses, calls


def test_attributes_that_return_to_the_same_object_are_seen(pool: Launcher) -> None:
    """An attribute that is changed, and then set to its earlier value, reaches all parts.

    A switch is True for a test and then False again. A counter is set back to 0. Earlier, the
    parts kept the value from between.
    """
    losses, calls = change_and_restore(World(), "serial")
    for ours, counts in pool.run(change_and_restore, "place(2)", size=2):
        assert ours == pytest.approx(losses, rel=1e-10)
        assert counts == calls == [1, 1, 1, 1]


class FailsOnce(nn.Module):
    """A model that fails in training while `is_broken` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)
        self.is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_broken and torch.is_grad_enabled() and len(x) < 12:
            raise RuntimeError("it breaks")
        return self.out(x)


def test_check_of_a_failed_step_does_not_outlive_it() -> None:
    """If a step fails, its check is dropped.

    Earlier, the next step was compared with one worker's step on the batch of the failed step.
    """
    model = FailsOnce().double()
    with make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy="data(1, micro=2)",
    ) as trainer:
        batches = trainer.batches(VECTORS, batch=12, epoch=0)
        trainer.step(*next(batches))
        model.is_broken = True
        with pytest.raises(StepFailed, match="it breaks"):
            trainer.step(*next(batches))
        assert trainer.checker.step_check is not None
        model.is_broken = False
        trainer.step(*next(batches))
        assert trainer.checker.step_check is None


class ClipsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.norm() + 1e-12)


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(10, 10)
        self.two = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(ClipsGradients.apply(self.one(x)))


def train_despite_errors(world: World, strategy: str) -> list[str]:
    torch.manual_seed(3)
    model = Clipped().double()
    said = []
    with pg.parallelize(
        model,
        functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy,
    ) as trainer:
        for batch in trainer.batches(VECTORS, batch=8, epoch=0):
            try:
                trainer.step(*batch)
                said.append("trained")
            except StepFailed as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("strategy", ["data(2)", "pipeline(2, micro=2)"])
def test_refused_first_step_refuses_later_steps(pool: Launcher, strategy: str) -> None:
    """If the first step is refused, later steps are refused too.

    Earlier, a loop that caught the error trained with gradients that were known to be wrong.
    """
    for said in pool.run(train_despite_errors, strategy, size=2):
        assert len(said) == 4
        assert all("not one worker's training" in each for each in said)


def train_with_hook(world: World, algorithm: str) -> list[torch.Tensor]:
    """Train plain DDP with paragrad's hook on different inputs per rank; return the gradients."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(10, 4).double())
    ddp.register_comm_hook(*pg.hook(algorithm))
    x = VECTORS.tensors[0][world.rank :: world.size].double()
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    return [parameter.grad for parameter in ddp.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize(
    "algorithm", ["ring", "ring_async(segments=2)", "tree", "butterfly", "native"]
)
def test_all_reduce_hooks_under_plain_ddp(pool: Launcher, algorithm: str) -> None:
    """The hook gives the mean over the ranks of each rank's own mean, as DDP does."""
    torch.manual_seed(0)
    model = nn.Linear(10, 4).double()
    sum(model(VECTORS.tensors[0][rank::3].double()).square().mean() for rank in range(3)).backward()
    for gradients in pool.run(train_with_hook, algorithm, size=3):
        for ours, parameter in zip(gradients, model.parameters(), strict=True):
            assert torch.allclose(ours, parameter.grad / 3, rtol=1e-12)  # type: ignore[operator]


def read_group_timeout(world: World) -> float:
    found = find_existing_world()
    assert found is not None
    return found.timeout


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_user_process_group_keeps_its_time_limit(pool: Launcher, backend: str) -> None:
    """A hook uses the timeout of the user's process group.

    Earlier, it gave up after 300 s, for every timeout that init_process_group was given.
    """
    assert pool.run(read_group_timeout, size=2, backend=backend, timeout=7.0) == [7.0, 7.0]


def try_hook(world: World, text: str) -> str:
    try:
        pg.hook(text)
    except pg.Refused as error:
        return str(error)
    return "taken"


def test_hook_accepts_all_reduces_only(pool: Launcher) -> None:
    assert "did you mean ring" in pool.run(try_hook, "rang", size=2)[0]
    assert "takes the name of an all-reduce" in pool.run(try_hook, "ring, micro=2", size=2)[0]


def test_a_hook_without_a_world_is_refused() -> None:
    with pytest.raises(pg.Refused, match=r"call torch\.distributed.init_process_group first"):
        pg.hook("ring")


TRAIN = """
import paragrad as pg, torch
from torch import nn
{data}
job = pg.Job(model=lambda: nn.Linear(10, 4), loss=lambda output,
        target: nn.functional.cross_entropy(output, target),
             optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), train=data,
                     batch=12, epochs=1)
run = pg.train(job, "data(2, reduce=ring)", runs={runs!r})
table = pg.compare(job, ["serial", pg.Data(2, reduce=pg.Tree())], runs={runs!r})
print(run.sample_count, [row.difference for row in table.rows], table.failed)
"""
DATA = """
class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.full((10,), float(index)) + torch.rand(10), index % 4

data = Points()"""


@pytest.mark.table
def test_train_and_compare_from_python_c(tmp_path: Path) -> None:
    text = run_program(sys.executable, "-c", TRAIN.format(runs=str(tmp_path), data=DATA))
    assert text.startswith("30 of 30 samples seen in each of 1 epoch(s), 0 twice, 0 missed [None, ")
    assert text.endswith("False\n")


@pytest.mark.table
def test_train_and_compare_from_a_notebook(tmp_path: Path) -> None:
    """Classes, functions and lambdas of notebook cells reach the ranks."""
    import nbformat
    from nbclient import NotebookClient

    cells = [
        nbformat.v4.new_code_cell("import torch" + DATA),
        nbformat.v4.new_code_cell(TRAIN.format(runs=str(tmp_path), data="")),
    ]
    notebook = nbformat.v4.new_notebook(
        cells=cells,
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        },
    )
    NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    text = "".join(
        output.get("text", "")
        for output in notebook.cells[1].outputs
        if output.get("name") == "stdout"
    )
    assert text.startswith("30 of 30 samples seen")


def list_compared_steps(world: World, strategy: str) -> list[int]:
    """Train in a user's loop, and return the steps that were compared with one worker's."""
    model = make_mlp()
    optimizer = make_momentum_sgd(model.parameters())
    compared = []
    with pg.parallelize(model, functional.cross_entropy, optimizer, strategy, seed=5) as trainer:
        for inputs, target in trainer.batches(VECTORS, 4, 0):
            if trainer.steps == 5:
                trainer.check_next_step()
            trainer.step(inputs, target)
            if trainer.checker.schedule.last_equal == trainer.steps - 1:
                compared.append(trainer.steps - 1)
    return compared


@pytest.mark.parametrize("strategy", ["data(2, reduce=ring)", "tensor(2)"])
def test_a_loop_of_ones_own_compares_later_steps(pool: Launcher, strategy: str) -> None:
    """Later steps of a user's loop are compared with one worker's step.

    Earlier, only the loss was compared after the first step. For a divided model, nothing was.
    """
    assert pool.run(list_compared_steps, strategy, size=2) == [[0, 1, 3, 5, 7]] * 2


# ---- the folder of checkpoints -----------------------------------------------------------------
def run_loop(folder: Path, steps: int, load: bool = False, overwrite: bool = False) -> int:
    """Train some steps in a user's loop, save at the end, and return the number of steps."""
    torch.manual_seed(0)
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(
        model,
        nn.functional.cross_entropy,
        optimizer,
        strategy="serial",
        folder=folder,
        overwrite=overwrite,
    ) as trainer:
        if load:
            trainer.load(folder)
        for inputs, target in itertools.islice(trainer.batches(VECTORS, 4, epoch=0), steps):
            trainer.step(inputs, target)
        trainer.save()
        return trainer.steps


def test_full_folder_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A folder with the checkpoints of another training is refused before the first step.

    Earlier, only the first save reported it, possibly after hours.
    """
    assert run_loop(tmp_path, 5) == 5
    with pytest.raises(pg.Refused, match="00000005 is of another training; continue from"):
        run_loop(tmp_path, 2)
    assert run_loop(tmp_path, 2, load=True) == 7
    assert run_loop(tmp_path, 2, overwrite=True) == 2
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000002"]


def test_save_wants_a_folder_and_can_overwrite(tmp_path: Path) -> None:
    run_loop(tmp_path, 5)
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(
        model, nn.functional.cross_entropy, optimizer, strategy="serial"
    ) as trainer:
        trainer.step(*next(iter(trainer.batches(VECTORS, 4, epoch=0))))
        with pytest.raises(pg.Refused, match=r"trainer\.save\(\) needs a folder"):
            trainer.save()
        with pytest.raises(pg.StepFailed, match=r"or remove it \(trainer\.save\(folder, overwrite"):
            trainer.save(tmp_path)
        trainer.save(tmp_path, overwrite=True)
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000001"]
