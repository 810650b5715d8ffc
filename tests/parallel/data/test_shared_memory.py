"""data(n, state=shared_memory): training equals serial with every optimizer.

The optimizer's state exists once on a host. Some tests check what is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from equality_table import VECTORS, make_job, make_mlp
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import TensorDataset
from unusual_optimizers import Averaging, DistanceSgd, Harmonic, Langevin, NormedSgd, Unrated

from paragrad import Job, RankFailed, Refused, parallelize, train, verify
from paragrad.datasets.loading import convert_batch, separate_target
from paragrad.engine.optimizer.modes import set_optimizer_mode
from paragrad.engine.optimizer.update_probe import find_update_granularity
from paragrad.engine.optimizer.update_slices import (
    FOREACH_OPTIMIZERS,
    FUSED_OPTIMIZERS,
    assign_slices,
)
from paragrad.engine.rng.draws import ReplicatedDraws
from paragrad.jobs.job import CPU
from paragrad.launch import Launcher
from paragrad.parallel.data.shared_memory import SharedMemoryExchange
from paragrad.record.record import read_lines
from paragrad.report.equivalence.lockstep import compare_with_serial
from paragrad.runtime.generators import fingerprint_generators
from paragrad.runtime.launcher_env import count_cores
from paragrad.runtime.world import World
from paragrad.shm.region import align_to_cache_line
from paragrad.strategies.registry import strategy
from paragrad.trainer.checkpoint.checkpoint_files import find_newest_checkpoint
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import choose_backend, validate_run

pytestmark = pytest.mark.processes


class Lion(torch.optim.Optimizer):
    """An optimizer that paragrad does not know."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault(
                        "momentum", torch.zeros_like(parameter)
                    )
                    parameter.sub_(group["lr"] * torch.tanh(0.9 * momentum + 0.1 * parameter.grad))
                    momentum.lerp_(parameter.grad, 0.01)


class Together(torch.optim.SGD):
    """An optimizer that clips by the norm of all gradients; no rank with a part can compute it."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(
            [parameter for group in self.param_groups for parameter in group["params"]], 0.1
        )
        super().step()


class Lookahead(torch.optim.Optimizer):
    """A wrapper that does not call Optimizer.__init__ and uses the groups of another optimizer.

    Earlier, shared memory read its hooks and failed: "'Lookahead' object has no attribute
    '_optimizer_step_pre_hooks'".
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.steps = 0
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state
        self.slow = [
            parameter.detach().clone()
            for group in self.param_groups
            for parameter in group["params"]
        ]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))


def make_hooked_sgd(parameters: object) -> torch.optim.Optimizer:
    """Return an SGD with a step hook that gives every row the length one."""
    kept = list(parameters)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(kept, lr=0.1, momentum=0.9)

    def normalize_rows(*_: object) -> None:
        for parameter in kept:
            with torch.no_grad():
                parameter.div_(parameter.norm(dim=-1, keepdim=True))

    optimizer.register_step_post_hook(normalize_rows)
    return optimizer


def schedule_free(parameters: object) -> torch.optim.Optimizer:
    import schedulefree

    return schedulefree.AdamWScheduleFree(parameters, lr=1e-2, warmup_steps=3)


def lion(parameters: object) -> torch.optim.Optimizer:
    import lion_pytorch

    return lion_pytorch.Lion(parameters, lr=1e-3)


def make_grouped_adamw(parameters: object) -> torch.optim.Optimizer:
    first, *others = parameters  # type: ignore[misc]
    return torch.optim.AdamW(
        [
            {"params": others, "lr": 3e-3, "weight_decay": 0.1},
            {"params": [first], "betas": (0.8, 0.9)},
        ],
        lr=1e-2,
        amsgrad=True,
    )


OPTIMIZERS: dict[str, Callable[[object], torch.optim.Optimizer]] = {
    **{
        cls.__name__: lambda parameters, cls=cls: cls(parameters, lr=1e-2)
        for cls in FOREACH_OPTIMIZERS
    },
    "SGD, Nesterov": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "RMSprop, centered": lambda parameters: torch.optim.RMSprop(
        parameters, lr=1e-2, momentum=0.5, centered=True
    ),
    "groups": make_grouped_adamw,
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "Lion": lambda parameters: Lion(parameters, lr=1e-2),
    "normed SGD": lambda parameters: NormedSgd(parameters, lr=1e-2),
    "clipped together": lambda parameters: Together(parameters, lr=1e-2),
    "step hook": make_hooked_sgd,
    "schedule-free, our own": lambda parameters: Averaging(parameters, lr=1e-2),
    "lr a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-2)),
    "lr a tensor, SGD": lambda parameters: torch.optim.SGD(
        parameters, lr=torch.tensor(1e-2), momentum=0.9
    ),
    "fused asked for": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "foreach asked for": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "lr 0 at first": lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    "loop asked for": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=False),
    "Lookahead": lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.1)),
    "distance as a rate": DistanceSgd,
    "momenta in a dictionary": Harmonic,
    "no lr": Unrated,
    "Langevin": lambda parameters: Langevin(parameters, lr=1e-2),
}


def measure_differences(world: World, jobs: list[Job]) -> dict[str, float]:
    resolved = strategy(f"data({world.size}, state=shared_memory)")
    return {each.name: compare_with_serial(world, each, resolved, steps=8).value for each in jobs}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.table)])
def test_every_optimizer_trains_as_in_serial(pool: Launcher, size: int) -> None:
    jobs = [
        make_job(name, make_mlp, VECTORS, optimizer=optimizer, clip_norm=0.5 if place % 2 else None)
        for place, (name, optimizer) in enumerate(OPTIMIZERS.items())
    ]
    for name, value in pool.run(measure_differences, jobs, size=size, backend="shm")[0].items():
        assert value < 1e-10, name


@pytest.mark.sample(3)
@pytest.mark.parametrize("chosen", ["data(2)", "data(2, reduce=ring)", "serial(micro=2)"])
@pytest.mark.parametrize(
    ("optimizer", "library"), [(lion, "lion_pytorch"), (schedule_free, "schedulefree")]
)
def test_optimizers_of_other_libraries(
    optimizer: Callable[[object], torch.optim.Optimizer], library: str, chosen: str, tmp_path: Path
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    assert (
        verify(
            make_job(library, make_mlp, VECTORS, optimizer=optimizer), chosen, runs=tmp_path
        ).difference
        < 1e-10
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("chosen", ["data(2, reduce=ring)", "serial(micro=2)"])
@pytest.mark.parametrize(
    "name",
    [
        "lr a tensor",
        "fused asked for",
        "foreach asked for",
        "step hook",
        "normed SGD",
        "schedule-free, our own",
        "Langevin",
        "Lookahead",
    ],
)
def test_optimizers_without_shared_memory(name: str, chosen: str, tmp_path: Path) -> None:
    assert (
        verify(
            make_job(name, make_mlp, VECTORS, optimizer=OPTIMIZERS[name]), chosen, runs=tmp_path
        ).difference
        < 1e-10
    )


def train_plainly(each: Job) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in a plain PyTorch loop, and test in eval mode after each epoch.

    Return the parameters in eval mode, and the loss of the test set after each epoch.
    """
    model = each.build_model()
    order = each.make_order(range(29))
    optimizer = each.optimizer(model.parameters())
    tested = []
    for epoch in range(each.epochs):
        set_optimizer_mode(optimizer, "train")
        for positions in order.list_batches():
            inputs, target = separate_target(
                convert_batch(
                    each.make_samples(each.train)[epoch, order.get_indices(epoch, positions)],
                    CPU,
                    torch.float64,
                )
            )
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        set_optimizer_mode(optimizer, "eval")
        inputs, target = VECTORS.tensors
        tested.append(float(nn.functional.cross_entropy(model(inputs.double()), target).detach()))
    return model.state_dict(), tested


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("our own", marks=pytest.mark.story),
        pytest.param("schedulefree", marks=pytest.mark.table),
    ],
)
def test_modes_of_an_optimizer_in_training_test_model_and_resume(kind: str, tmp_path: Path) -> None:
    """Tests and saved models use the optimizer's eval mode; training uses its train mode.

    schedule-free optimizers change the parameters for evaluation. Earlier, the other parameters
    were tested and saved.
    """
    if kind == "schedulefree":
        pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    optimizer = schedule_free if kind == "schedulefree" else OPTIMIZERS["schedule-free, our own"]
    each = make_job(
        "modes", make_mlp, VECTORS, optimizer=optimizer, dtype=torch.float64, epochs=3, test=VECTORS
    )
    wanted, tested = train_plainly(each)
    for strategy_ in ("serial", "data(2)", "data(2, reduce=ring)"):
        run = train(each, strategy_, runs=tmp_path, save=4)
        assert [
            line["test"]["value"]
            for line in read_lines(run.folder / "rank-0.jsonl", spans=False)
            if line["kind"] == "epoch"
        ] == pytest.approx(tested, rel=1e-10)
        cut = train(each.replace(epochs=2), strategy_, runs=tmp_path, save=4)
        again = train(each, strategy_, runs=tmp_path, resume=cut.folder)
        for name, values in run.model().state_dict().items():
            torch.testing.assert_close(values, wanted[name], rtol=1e-10, atol=1e-13)
            assert torch.equal(values, again.model().state_dict()[name])


def test_slices_divide_the_work() -> None:
    for ranks in (1, 2, 3, 7):
        lengths = [1000, 3, 0, 64 * 50, 77]
        pieces, because = assign_slices(
            torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "element", lengths, ranks
        )
        found = [
            place
            for rank in pieces
            for piece in rank
            for place in ((piece.index, element) for element in range(piece.start, piece.stop))
        ]
        assert found == [
            (index, element) for index, length in enumerate(lengths) for element in range(length)
        ]
        counts = [sum(piece.stop - piece.start for piece in rank) for rank in pieces]
        assert max(counts) - min(counts) <= 2 * 64
        assert "element by element" in because
    pieces, because = assign_slices(
        torch.optim.Adafactor([nn.Parameter(torch.ones(1))]), "tensor", [5, 100, 60, 30], 2
    )
    assert [[piece.index for piece in rank] for rank in pieces] == [[1], [0, 2, 3]]
    assert "whole tensors" in because
    pieces, because = assign_slices(Lion([nn.Parameter(torch.ones(1))], 1.0), "all", [5, 100], 2)
    assert [[piece.index for piece in rank] for rank in pieces] == [[0, 1], []]
    assert "rank 0 updates everything" in because


def measure_memory(world: World, each: Job) -> tuple[int, int, int, set[int]]:
    """Train one epoch and return the memory of this rank.

    The result is (bytes of the rows in use, elements of this rank's Adam state, elements of all
    parameters, sizes of the parameters' storages).
    """
    trainer = Trainer.build_for_job(
        world, each, strategy(f"data({world.size}, state=shared_memory)")
    )
    for fetched in trainer.batches(each.train, each.batch, 0):  # type: ignore[arg-type]
        trainer.step(*separate_target(fetched))
    assert isinstance(trainer.training.setup.exchange, SharedMemoryExchange)
    state = sum(
        value.numel()
        for values in trainer.optimizer.state.values()
        for value in values.values()
        if value.dim()
    )
    assert trainer.training.setup.exchange.peak_bytes == 0, (
        "they were counted as gradients, and once more as what the exchange keeps"
    )
    found = (
        trainer.training.setup.exchange.host_memory.row_bytes,
        state,
        sum(parameter.numel() for parameter in trainer.model.parameters()),
        {parameter.untyped_storage().nbytes() for parameter in trainer.model.parameters()},
    )
    trainer.close()
    return found


def test_state_is_on_the_host_once(pool: Launcher) -> None:
    each = make_job(
        "wide",
        lambda: nn.Sequential(nn.Linear(10, 300), nn.Linear(300, 4)),
        VECTORS,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    )
    found = pool.run(measure_memory, each, size=3, backend="shm")
    row, _, parameters, storages = found[0]
    # two moments of all parameters, over all ranks
    assert sum(state for _, state, _, _ in found) == 2 * parameters
    assert row == sum(align_to_cache_line(4 * length) for length in (3000, 300, 1200, 4))
    # each parameter has a storage of its own, as checkpoint files need
    assert storages == {4 * length for length in (3000, 300, 1200, 4)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "Adagrad", "groups", "Adafactor", "Lion"])
def test_resume_from_serial_and_back(tmp_path: Path, optimizer: str) -> None:
    """A training that moves from serial to shared memory and back equals serial.

    It is saved in serial, continued and saved in shared memory, and continued in serial.
    """
    each = make_job(
        "there and back",
        make_mlp,
        VECTORS,
        optimizer=OPTIMIZERS[optimizer],
        dtype=torch.float64,
        epochs=3,
    )
    whole = train(each, "serial", runs=tmp_path)
    first = train(each.replace(epochs=1), "serial", runs=tmp_path, save=1)
    second = train(
        each.replace(epochs=2),
        "data(2, state=shared_memory)",
        runs=tmp_path,
        resume=first.folder,
        save=1,
    )
    third = train(each, "serial", runs=tmp_path, resume=second.folder)
    for name, wanted in whole.model().state_dict().items():
        torch.testing.assert_close(third.model().state_dict()[name], wanted, rtol=1e-10, atol=1e-13)
    # the kernels that a run chooses are not saved
    for group in find_newest_checkpoint(second.folder).state["optimizer"]["groups"]:
        assert group.get("fused") is None
        assert group.get("foreach") is None


def test_record_names_the_update_slices(tmp_path: Path) -> None:
    run = train(
        make_job("clipped", make_mlp, VECTORS, optimizer=OPTIMIZERS["clipped together"], epochs=1),
        "data(2)",
        runs=tmp_path,
    )
    assert run.resolved == strategy("data(2, state=shared_memory)")
    choices = {
        line["what"]: line
        for path in ("run.jsonl", "rank-0.jsonl")
        for line in read_lines(run.folder / path, spans=False)
        if line["kind"] == "choice"
    }
    assert choices["state"]["picked"] == "shared_memory"
    assert "rank 0 updates everything" in choices["slices"]["because"]


@pytest.mark.story
def test_auto_tries_one_worker_too(tmp_path: Path) -> None:
    run = train(make_job("tried", make_mlp, VECTORS, epochs=1), "data(auto)", runs=tmp_path)
    choice = next(
        line for line in read_lines(run.folder / "run.jsonl") if line.get("what") == "strategy"
    )
    candidates = [f"data({count_cores()}, state=shared_memory)", f"serial(threads={count_cores()})"]
    assert choice["picked"] == str(run.resolved)
    assert choice["picked"] in candidates
    assert all(f"{each} " in choice["because"] for each in candidates)


def test_several_hosts_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    each = make_job("far", make_mlp, VECTORS)
    assert choose_backend(Settings(), 4) == "gloo"
    assert validate_run(each, "data(4)").resolved == strategy("data(4, state=replicated)")
    with pytest.raises(Refused, match="2 of 4 ranks are on other hosts; leave out --backend"):
        choose_backend(Settings(backend="shm"), 4)
    with pytest.raises(
        Refused, match="2 of 4 ranks are on other hosts; leave out state=shared_memory"
    ):
        validate_run(each, "data(4, state=shared_memory)")


def test_shared_memory_in_a_user_loop_is_refused() -> None:
    model = make_mlp()
    with (
        pytest.raises(Refused, match="in a loop of your own"),
        parallelize(
            model,
            nn.functional.cross_entropy,
            torch.optim.SGD(model.parameters(), lr=0.1),
            "data(1, state=shared_memory)",
        ),
    ):
        pass


def test_shared_memory_with_an_exchange_is_refused() -> None:
    with pytest.raises(Refused, match="does not fit state=shared_memory"):
        strategy("data(2, reduce=ring, state=shared_memory)")


def test_fused_optimizers_have_a_list_update() -> None:
    assert set(FUSED_OPTIMIZERS) <= set(FOREACH_OPTIMIZERS)


ELEMENT = {
    *(cls.__name__ for cls in FOREACH_OPTIMIZERS),
    "SGD, Nesterov",
    "RMSprop, centered",
    "groups",
    "Lion",
    "loop asked for",
    "schedule-free, our own",
    "lr a tensor",
    "lr a tensor, SGD",
    "fused asked for",
    "foreach asked for",
    "lr 0 at first",
    "no lr",
}


TENSOR = {"Adafactor", "normed SGD", "momenta in a dictionary"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_method_is_probed(name: str) -> None:
    """A trial on a small copy shows how an optimizer updates: by element, by tensor or all at once.

    Earlier, the answer came from a list of types. The list did not cover subclasses, optimizers of
    other libraries, and hooks.
    """
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(10, 200), nn.Linear(200, 4))
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    states = fingerprint_generators()
    wanted = "element" if name in ELEMENT else "tensor" if name in TENSOR else "all"
    assert find_update_granularity(optimizer) == wanted
    assert fingerprint_generators() == states
    assert all(
        torch.equal(parameter, kept)
        for parameter, kept in zip(model.parameters(), before, strict=True)
    )
    if name == "no lr":  # schedulers refuse it
        return
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # wraps the step, and counts
    assert find_update_granularity(optimizer) == wanted


def test_step_hooks_are_not_probed() -> None:
    """A hook may hold the real parameters, which a trial would change."""

    def refuse_call(*_: object) -> None:
        raise AssertionError("run in a trial")

    first = torch.optim.SGD([nn.Parameter(torch.ones(3, 3))], lr=0.1)
    first.step = refuse_call  # type: ignore[method-assign, assignment]
    assert find_update_granularity(first) == "all"
    second = torch.optim.SGD([nn.Parameter(torch.ones(3, 3))], lr=0.1)
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(refuse_call)
        assert find_update_granularity(second) == "all"
        handle.remove()
    assert find_update_granularity(second) == "element"


def test_optimizer_with_parameter_copies_is_not_sliced() -> None:
    """A wrapper (lookahead, SAM) updates the parameters that it keeps, not those of a trial."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3, 3))], lr=0.1)
    optimizer.inner = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
    assert find_update_granularity(optimizer) == "all"


@pytest.mark.story
def test_random_optimizer_trains_as_in_serial(tmp_path: Path) -> None:
    """An optimizer with noise in its step, and a scheduler that draws, train as in serial.

    Earlier, every rank drew from its own generator. Replicas under an all-reduce diverged.
    Parameters in shared memory differed by 0.58 from serial's, without an error. A resumed run
    continues the draws.
    """
    noisy = make_job(
        "noisy",
        make_mlp,
        VECTORS,
        optimizer=OPTIMIZERS["Langevin"],
        dtype=torch.float64,
        epochs=3,
        scheduler_every="step",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: random.random()
        ),
    )
    wanted = train(noisy, "serial", runs=tmp_path).model().state_dict()
    for chosen in ("data(2)", "data(2, reduce=ring)"):
        run = train(noisy, chosen, runs=tmp_path)
        cut = train(noisy.replace(epochs=1), chosen, runs=tmp_path, save=3)
        for found in (run, train(noisy, chosen, runs=tmp_path, resume=cut.folder)):
            for name, values in found.model().state_dict().items():
                torch.testing.assert_close(values, wanted[name], rtol=1e-10, atol=1e-13)


def test_deterministic_optimizer_is_not_watched_again() -> None:
    alike = ReplicatedDraws(3, CPU)
    drawn = []
    before = fingerprint_generators()
    for step in (0, 1, 1):
        alike(
            "update",
            step,
            lambda: drawn.append((float(torch.rand(1)), random.random(), numpy.random.rand())),
        )
    assert drawn[0] != drawn[1] == drawn[2]
    assert fingerprint_generators() == before
    for step in (0, 1):
        alike("quiet", step, lambda: drawn.append(fingerprint_generators()))
    assert drawn[3] != before
    assert drawn[4] == before


def test_capturable_fails_alike(tmp_path: Path) -> None:
    """An optimizer with capturable=True fails with the same error under every strategy.

    torch refuses it on the CPU. But the fused kernel, which is chosen in shared memory, does not
    check it.
    """
    capturable = make_job(
        "capturable",
        make_mlp,
        VECTORS,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, capturable=True),
    )
    for chosen in ("serial", "data(2)", "data(2, reduce=ring)"):
        with pytest.raises(
            RankFailed,
            match=r"step 0: AssertionError: If capturable=True, .* must be on supported devices",
        ):
            train(capturable, chosen, runs=tmp_path)


class Late(nn.Module):
    """A model that uses its second layer only if a batch has a value above 5.

    The first batch has no such value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 4)
        self.second = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = (x[:, :1] > 5).to(x.dtype)
        return self.first(x) + (large * self.second(x) if large.any() else 0)


def test_parameter_first_used_in_a_later_step(tmp_path: Path) -> None:
    """A parameter may get its first gradient in a later step.

    Earlier, a mixture of experts failed in step 1 if one expert had no sample in step 0. torch's
    fused SGD refuses momentum that some parameters have and others do not have yet.
    """
    late = make_job("late", Late, VECTORS)
    order = late.make_order(VECTORS).get_indices(0, range(len(VECTORS)))
    x = VECTORS.tensors[0].clone()
    targets = VECTORS.tensors[1]
    x[order[14]] = 6.0
    for chosen in ("data(2)", "data(3, shares=[1, 2, 1])"):
        certificate = verify(late.replace(train=TensorDataset(x, targets)), chosen, runs=tmp_path)
        assert certificate.same
        assert certificate.difference is not None
        assert certificate.difference <= 1e-10


def test_resumed_state_is_probed() -> None:
    parameters = [nn.Parameter(torch.randn(300, 7)), nn.Parameter(torch.randn(5))]
    for name, wanted in (
        ("Adafactor", "tensor"),
        ("Adagrad", "element"),
        ("schedule-free, our own", "element"),
    ):
        optimizer = OPTIMIZERS[name](parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert find_update_granularity(optimizer) == wanted
