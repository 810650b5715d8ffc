"""Models that once failed when they were cut into stages.

The causes are crossing tensors, Python state, writes in place, and hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from equality_table import (
    VECTORS,
    draw_integers,
    draw_numbers,
    make_job,
    make_mlp,
    measure_difference,
    resolve_text,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.engine.state.preserve_state import ModuleSnapshot, preserve_all_state
from paragrad.jobs.loss import LossModule
from paragrad.launch import Launcher
from paragrad.parallel.pipeline.stage import StageModule
from paragrad.parallel.tracing.stage_forward import StageForward
from paragrad.runtime.world import World
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks"), pytest.mark.story]


class Rotary(nn.Module):
    """A model in which a float tensor without a gradient goes to all layers.

    Llama models use the cosines and sines of positions in this way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            cosines = self.angles(x).cos()
        for layer in self.layers:
            assert not cosines.requires_grad
            x = torch.tanh(layer(x) * cosines)
        return self.out(x)


class Masked(nn.Module):
    """A model in which a slice of a bool buffer crosses; only the first rank holds the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 10, dtype=torch.bool).triu(1))
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask[: len(x)]
        for layer in self.layers:
            x = torch.tanh(layer(x)).masked_fill(mask, 0.0)
        return self.out(x)


class Turned(nn.Module):
    """A model in which a transposed tensor crosses, and the next stage takes a view of it."""

    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(10, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.weight(x.transpose(0, 1).view(-1).view(-1, 10))

    class On(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.On(10, 10), self.Back()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Writing(nn.Module):
    """A model that writes the first layer's output into tensors made from the inputs.

    It writes by methods, into views, and by `out=`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.third = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        into = x.new_zeros(len(x), 10)
        beside = x.new_ones(len(x), 10)
        hidden = self.first(x)
        into.index_add_(0, torch.arange(len(x)), hidden)
        beside[:, 2:5].copy_(hidden[:, :3])
        with torch.no_grad():
            sines = torch.sin(hidden, out=torch.empty_like(hidden))
        hidden = self.second(torch.tanh(into) + beside + sines)
        hidden += into
        into.mul_(2)
        return self.third(torch.relu(into) + hidden)


class Block(nn.Module):
    """A block that changes outputs of its modules in place.

    It adds to the output of its last module, as a ResNet does. For good, it changes the shape of
    its first module's output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.norm = nn.LayerNorm(10)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.unsqueeze_(1)
        hidden = self.norm(hidden.squeeze(1))
        hidden += x
        return self.act(nn.functional.leaky_relu(hidden, 0.1, inplace=True))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@pytest.mark.parametrize(
    ("model", "row"),
    [
        pytest.param(model, row, marks=pytest.mark.table if number else ())
        for model, rows in {
            Rotary: [
                "place(3)",
                "place(2)",
                "pipeline(2, micro=2, schedule=interleaved)",
                "pipeline(3, micro=2, schedule=zero_bubble)",
            ],
            Masked: ["place(2, cut=[out])", "place(2, cut=[layers.1])", "place(3)"],
            Turned: ["place(2, cut=[second])"],
            Writing: ["place(2, cut=[third])", "place(2, cut=[second])", "place(3)"],
            Residual: [
                "place(2, cut=[blocks.1.act])",
                "place(2, cut=[blocks.2.norm])",
                "place(3, cut=[blocks.1.norm, blocks.2.act])",
            ],
        }.items()
        for number, row in enumerate(rows)
    ],
)
def test_unusual_models_equal_serial_in_stages(
    pool: Launcher, model: type[nn.Module], row: str
) -> None:
    """Each of these models failed earlier, in one of these ways:

    - With three stages or more, ValueError of zip was raised.
    - A message had another length than expected.
    - A received tensor could not be viewed as the model needs it.
    - A tensor had zeros where the model had written values.
    - Stand-ins for tensors of other stages grew, because each forward changed their shape.
    """
    assert (
        measure_difference(pool, row, make_job(model.__name__.lower(), model, VECTORS)).value
        <= 1e-10
    )


def test_frozen_layers_receive_no_gradient(pool: Launcher) -> None:
    """Earlier, the stage after a frozen trunk ran backward through all of its frozen layers."""

    def make_frozen_trunk_model() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)), nn.Linear(10, 4))
        model[:4].requires_grad_(False)
        return model

    seen = pool.run(
        observe_input_gradients,
        make_job("frozen", make_frozen_trunk_model, VECTORS),
        resolve_text("place(2, cut=[2, 3])"),
        size=2,
    )[1]
    assert seen == [False] * 3


def observe_input_gradients(world: World, job: pg.Job, chosen: pg.Strategy) -> list[bool]:
    """Return for each forward whether the input of the second stage requires a gradient."""
    trainer = Trainer.build_for_job(world, job, chosen)
    seen = []
    for inputs, target in trainer.batches(VECTORS, job.batch, 0):
        if trainer.training.setup.exchange is not None and not seen:
            trainer.training.setup.passes.stage_module.stage_forward.model[
                2
            ].register_forward_pre_hook(lambda module, given: seen.append(given[0].requires_grad))
        trainer.step(inputs, target)
    trainer.close()
    return seen


# ---- Python state ----------------------------------------------------------------------------
class Pad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        return nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))


class Pool(nn.Module):
    def __init__(self, pad: Pad) -> None:
        super().__init__()
        self.pad = [pad]
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.sum(1) / self.pad[0].length)


class Padded(nn.Module):
    """A model that keeps a batch's shape in a module of one stage.

    A module of another stage divides by it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pad = Pad()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.pool = Pool(self.pad)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(torch.tanh(self.second(torch.tanh(self.first(self.pad(x))))))


@pytest.mark.parametrize(
    "strategy", ["place(2, cut=[second])", pytest.param("place(3)", marks=pytest.mark.table)]
)
def test_shape_kept_by_a_module_of_another_stage(strategy: str, tmp_path: Path) -> None:
    """A module reads the shape of the present batch from a module of another stage.

    Earlier, after the first test, every training step divided by the length of the test's samples,
    without an error.
    """
    train, test = (
        TensorDataset(draw_numbers(29, length, 10, seed=1), draw_integers(4, 29, seed=2))
        for length in (7, 13)
    )
    job = make_job("padded", Padded, train, test=test, epochs=3, dtype=torch.float64)
    reference = pg.train(job, runs=tmp_path)
    run = pg.train(job, strategy, runs=tmp_path)
    assert [run.test, *run.losses] == pytest.approx([reference.test, *reference.losses], rel=1e-10)


class Counts(nn.Module):
    """A module that changes its Python attributes in each call.

    It counts calls, keeps its largest mask so far, and has a list in common with other modules.
    """

    def __init__(self, notes: list[Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.calls = 0
        self.mask = None
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.mask is None or len(self.mask) < len(x):
            self.mask = x.new_ones(len(x), 10).tril(3)
        return torch.tanh(self.layer(x) * self.mask[: len(x)]) * (1 + self.calls % 4)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        notes: list[Tensor] = []
        self.first = Counts(notes)
        self.second = Counts(notes)
        self.out = nn.Linear(10, 4)
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x)))


def counted_in_turn() -> nn.Module:
    notes: list[Tensor] = []
    return nn.Sequential(Counts(notes), Counts(notes), nn.Linear(10, 4))


@pytest.mark.parametrize("model", [Counted, pytest.param(counted_in_turn, marks=pytest.mark.table)])
def test_trace_without_values_leaves_no_python_state(
    model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """A forward without values leaves no trace in Python attributes of modules.

    Earlier, each new input shape counted one more call. A mask without values stayed where a mask
    with values was needed.
    """
    job = make_job("counted", model, VECTORS, epochs=3, dtype=torch.float64)
    reference = pg.train(job, runs=tmp_path, skip_first_step_check=True)
    run = pg.train(job, "place(2)", runs=tmp_path, skip_first_step_check=True)
    assert run.losses == pytest.approx(reference.losses, rel=1e-10)


def test_list_shared_by_modules_stays_shared() -> None:
    """A list that several modules share is still one list after an inspection of the model.

    Earlier, the inspection put an empty list of its own into each module.
    """
    model = Noting()
    with preserve_all_state(LossModule(model, torch.nn.functional.mse_loss)):
        model(torch.randn(5, 10))
    assert model.notes is model.first.notes is model.second.notes
    assert model.notes == []


class Noting(nn.Module):
    """A model whose modules append to one list; the list's sum is a term of the output."""

    class Layer(nn.Linear):
        def __init__(self, notes: list[Tensor]) -> None:
            super().__init__(10, 10)
            self.notes = notes

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.notes.append(out.mean(1, keepdim=True))
            return out

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Tensor] = []
        self.first, self.second, self.out = (
            self.Layer(self.notes),
            self.Layer(self.notes),
            nn.Linear(10, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.notes.clear()
        out = self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out + sum(self.notes)


# ---- paths that a later batch takes ----------------------------------------------------------
class TwoHeads(nn.Module):
    """A model that chooses one of two heads by the size of the batch.

    One head is defined before the trunk, although it is called after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(10, 4)
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.often = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.rare(hidden) if len(x) == 5 else self.often(hidden)


@pytest.mark.parametrize("row", ["place(2, cut=[second])", "place(3)"])
def test_module_that_the_first_batch_does_not_call(pool: Launcher, row: str) -> None:
    """A module that only a later batch calls is assigned to the right stage.

    Earlier, it was assigned to the stage in which it is defined. An error then said that the loss
    reads it there.
    """
    assert measure_difference(pool, row, make_job("two heads", TwoHeads, VECTORS)).value <= 1e-10


# ---- hooks -----------------------------------------------------------------------------------
class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.block = nn.Sequential(nn.Linear(10, 10), nn.Tanh())
        self.out = nn.Linear(10, 4)
        self.block.register_full_backward_hook(
            lambda module, given, gone: tuple(each * 0.5 for each in given)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(torch.tanh(self.first(x))))


def test_backward_hook_of_a_divided_block(pool: Launcher, tmp_path: Path) -> None:
    """A backward hook on a block works if no cut goes through the block.

    Earlier, if a cut went through the block, torch called the hook on no rank, without an error.
    """
    job = make_job("hooked", Hooked, VECTORS)
    assert measure_difference(pool, "place(2)", job).value <= 1e-10
    assert measure_difference(pool, "place(2, cut=[out])", job).value <= 1e-10
    with pytest.raises(
        pg.Refused, match=r"cut=block\.1 goes through block, which has a backward hook"
    ):
        pg.train(job, "place(2, cut=[block.1])", runs=tmp_path)


def make_wholly_hooked_model() -> nn.Module:
    model = Hooked()
    model.register_full_backward_pre_hook(lambda *_: None)
    return model


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_backward_hook_of_the_whole_model(tmp_path: Path) -> None:
    with pytest.raises(pg.Refused, match="a backward hook is registered on the whole model"):
        pg.train(
            make_job("wholly hooked", make_wholly_hooked_model, VECTORS), "place(2)", runs=tmp_path
        )


# ---- losses ----------------------------------------------------------------------------------
def compute_guarded_mean(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over labelled samples; a batch may have none."""
    there = (target[:, 0] > 0).to(output.dtype)
    return ((output - target).pow(2).mean(1) * there).sum() / there.sum().clamp(min=1)


def test_batch_without_a_label(tmp_path: Path) -> None:
    """A batch without a label has the loss 0, and training continues.

    place(2) splits no samples. Earlier, the training ended even so where the loss was exactly 0.
    """
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(40, 10, generator=draw)
    target = torch.randn(40, 4, generator=draw)
    job = make_job(
        "guarded",
        make_mlp,
        TensorDataset(inputs, target),
        loss=compute_guarded_mean,
        batch=2,
        epochs=1,
        dtype=torch.float64,
    )
    reference = pg.train(job, runs=tmp_path)
    run = pg.train(job, "place(2)", runs=tmp_path)
    assert run.losses == pytest.approx(reference.losses, rel=1e-10)


# ---- stand-ins -------------------------------------------------------------------------------
class Handed(nn.Module):
    """A model with a module that returns its input, so one tensor is the output of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.nothing = nn.Identity()
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        again = self.nothing(hidden)
        return self.out(torch.tanh(self.second(hidden)) + again)


class Clamped(nn.Module):
    """A model with a hook that writes into the output of a module of another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.first.register_forward_hook(clamp_output)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


def clamp_output(module: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
    out.clamp_(-1, 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", [Handed, Clamped])
def test_stand_in_for_the_output_of_another_stage(pool: Launcher, model: type[nn.Module]) -> None:
    for row in ("place(2, cut=[second])", "place(2, cut=[out])"):
        assert (
            measure_difference(pool, row, make_job(model.__name__.lower(), model, VECTORS)).value
            <= 1e-10
        )


def test_read_only_array_is_left_unchanged() -> None:
    """Earlier, a read-only array was written to after each inspection, which ended the training."""
    model = nn.Linear(10, 4)
    model.known = numpy.frombuffer(b"read", dtype=numpy.uint8)
    with preserve_all_state(LossModule(model, torch.nn.functional.mse_loss)):
        model(torch.randn(5, 10))


class Measured(nn.Linear):
    """A layer that counts its calls in an object, and has a dict with modules as keys."""

    def __init__(self) -> None:
        super().__init__(10, 4)
        self.meter = SimpleNamespace(calls=0)
        self.scales = {self: 1.0}
        self.loss = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.meter.calls += 1
        return super().forward(x) * self.meter.calls


def test_forward_changes_are_seen_in_objects() -> None:
    """Changes that a forward makes in objects of a module are found.

    Earlier, such objects were not searched. A dict with modules as keys was treated as a plain one,
    and always seemed to change.
    """
    model = Measured()
    loss = nn.MSELoss()
    loss.calls = 0
    module = LossModule(model, loss)
    with preserve_all_state(module):
        before = ModuleSnapshot(module)
        model(torch.randn(5, 10))
        loss.calls += 1
        assert before.collect_module_changes() == ({}, {"meter.calls": 1, "the loss.calls": 1})
    assert model.meter.calls == loss.calls == 0


def test_stage_is_the_model_object_for_its_hooks() -> None:
    """A stage contains the model object itself, so that all functions over modules see it.

    Earlier, code that restores the changes of a forward skipped the outermost module.
    """
    model = Counted()
    part = StageModule(StageForward(model, [[("first", 0), ("second", 0)], [("out", 0)]]), 0, {})
    assert next(part.modules()) is model
    assert list(part.parameters()) == list(model.parameters())
    part.eval()
    assert not model.training


def make_per_sample_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 5)),
        nn.Linear(5, 5),
        nn.BatchNorm1d(2, momentum=None),
        nn.Tanh(),
        nn.Linear(5, 5),
        nn.BatchNorm1d(2, momentum=None),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(10, 4),
    )


def test_padding_micro_batches_leave_no_trace(tmp_path: Path) -> None:
    """Padding micro-batches do not change batch norm.

    A last batch of 3 micro-batches is filled up to 4. Earlier, its batch norms counted one
    micro-batch more, so their averages were different.
    """
    data = TensorDataset(draw_numbers(11, 10, seed=1), draw_integers(4, 11, seed=2))
    job = make_job(
        "short", make_per_sample_norm_net, data, test=data, epochs=2, batch=8, dtype=torch.float64
    )
    strategy = "pipeline(2, micro=4, schedule=interleaved(chunks=2))"
    reference, run = (
        pg.train(job, each, runs=tmp_path, skip_first_step_check=True)
        for each in ("serial(micro=4)", strategy)
    )
    assert [run.test, *run.losses] == pytest.approx([reference.test, *reference.losses], rel=1e-10)


class PastCall(nn.Module):
    """A model that calls forward() of its modules, and not the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out.forward(torch.tanh(self.first.forward(x)))


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), torch.jit.script(nn.Linear(10, 10)), nn.Linear(10, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "strategy", "told"),
    [
        (
            PastCall,
            "place(2)",
            r"calls none of its modules \(paragrad does not see direct calls of their "
            r"forward\(\)\), and 2",
        ),
        (
            scripted,
            "place(2)",
            "1 is a script of torch.jit, which hides its parameters; give the module that it was",
        ),
        (scripted, "data(2, state=fully_sharded)", "1 is a script of torch.jit"),
    ],
)
def test_indivisible_model_is_reported(
    model: Callable[[], nn.Module], strategy: str, told: str
) -> None:
    """A model that cannot be divided is refused with the reason.

    Earlier, the messages were empty parentheses; "cannot delete methods or parameters of a script
    module"; and "the model mixes samples".
    """
    with pytest.raises(pg.Refused, match=told):
        validate_run(make_job("past", model, VECTORS), strategy)


class Told(nn.Linear):
    """A layer that stores a value of its input in an object that another module reads."""

    def __init__(self, context: SimpleNamespace) -> None:
        super().__init__(10, 10)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        self.context.scale = x.detach().mean(1, keepdim=True)
        return super().forward(x)


class Told2(Told):
    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.linear(x, self.weight)
        return made if self.context.scale is None else made * self.context.scale


def make_model_with_shared_object() -> nn.Module:
    context = SimpleNamespace(scale=None)
    return nn.Sequential(Told(context), Told2(context), nn.Linear(10, 4))


def test_object_passed_between_stages_is_refused() -> None:
    """An object that carries a tensor between stages is refused.

    Earlier, objects were restored after a forward without values. That removed the trace by which
    the tensor is found.
    """
    with pytest.raises(
        pg.Refused, match="in an object that is no tuple, list or dict, or in an attribute"
    ):
        validate_run(
            make_job("object", make_model_with_shared_object, VECTORS), "place(2, cut=[1, 2])"
        )


class Odd(nn.Linear):
    """A layer with attributes whose content cannot be read or restored."""

    def __init__(self) -> None:
        super().__init__(10, 4)
        self.kind = list[int]
        self.words = Frozen(a=1)
        self.__dict__["proxy"] = weakref.proxy(lambda: None)


class Frozen(dict[str, int]):
    def update(self, *_: object, **__: object) -> None:
        raise TypeError("it is frozen")

    def __setitem__(self, *_: object) -> None:
        raise TypeError("it is frozen")


def test_opaque_object_is_left_unchanged() -> None:
    model = Odd()
    with preserve_all_state(LossModule(model, nn.functional.mse_loss)):
        model(torch.randn(5, 10))
    assert model.words == {"a": 1}


def make_spectral_norm_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 10), nn.utils.parametrizations.spectral_norm(nn.Linear(10, 4))
    )


def test_spectral_norm_in_micro_batches(tmp_path: Path) -> None:
    """Earlier, the message said that the model mixes samples."""
    with pytest.raises(
        pg.RankFailed,
        match=r"every forward changes the buffer 1\.parametrizations.weight.0._[uv] .* micro=1",
    ):
        pg.train(
            make_job("spectral", make_spectral_norm_model, VECTORS),
            "pipeline(2, micro=4)",
            runs=tmp_path,
        )


class Jagged(nn.Module):
    """A model that packs rows of unequal length into a jagged tensor.

    torch's operation counter cannot run it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = [row[: 7 if row[0] > 0 else 3, None] for row in x]
        packed = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        hidden = torch.relu(self.first(packed))
        means = torch.stack([row.mean(0) for row in hidden.unbind()])
        return self.last(means)  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["place(2)", "pipeline(2, micro=2)"])
def test_jagged_tensors_are_refused_in_one_sentence(strategy: str) -> None:
    """Earlier, the operation counter raised a TypeError: Multiple dispatch failed."""
    with pytest.raises(pg.Refused, match=r"train it without cutting it|train it with data"):
        validate_run(make_job("jagged", Jagged, VECTORS), strategy)
