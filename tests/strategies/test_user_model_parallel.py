"""A user can write strategies that divide the model, and a strategy with a server.

They work like the built-in ones, and the library does not name any of them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import random
import time
import weakref
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import IMAGES, VECTORS, make_batch_norm_cnn, make_job
from torch import nn
from user_model_parallel import ColumnLinear, Columns, Gathered, Stages, make_replicated_specs
from user_parameter_server import Central, Served

import paragrad as pg
from paragrad.engine.layout import Layout, ShardSpec, assemble_tensors
from paragrad.launch import Launcher
from paragrad.record.record import Record
from paragrad.runtime.world import DEFAULT_TIMEOUT, World
from paragrad.trainer.trainer import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks"), pytest.mark.story]


def make_deep_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(16, 5),
    )


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


job = make_job(
    "deep",
    make_deep_mlp,
    VECTORS,
    test=VECTORS,
    metric=pg.accuracy,
    clip_norm=0.5,
    optimizer=make_adamw,
)
EVERY = (Columns(2), pg.Data(2, reduce=pg.Ring()) * Stages(2), Central(2))
TABLE = (
    Columns(2) * Stages(2),
    Columns(3),
    Stages(3, micro=2),
    pg.Data(2) * Columns(2),
    Stages(2) * Columns(2),
    Stages(2),
    pg.Data(2, reduce=pg.Tree()) * Columns(2) * Stages(2),
    pg.Data(2, shares=(2, 1)) * Stages(2, micro=2),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "chosen", [*EVERY, *(pytest.param(each, marks=pytest.mark.table) for each in TABLE)], ids=str
)
def test_user_model_parallel_equals_serial(chosen: pg.Strategy, tmp_path: Path) -> None:
    """The job has dropout in every part, clipping by the norm over all parts, and AdamW.

    Tests and the record see each sample once.
    """
    certificate = pg.verify(job, chosen, runs=tmp_path)
    assert certificate.same
    assert certificate.difference < 1e-12
    run, serial = (pg.train(job, strategy, runs=tmp_path) for strategy in (chosen, "serial"))
    assert (run.sample_count.twice, run.sample_count.missed) == (0, 0)
    assert run.losses == pytest.approx(serial.losses, rel=1e-5)
    assert run.test == pytest.approx(serial.test)
    assert {line["name"] for line in run.select_lines("event")} == {"checked"}


@pytest.mark.parametrize(
    "chosen", [pytest.param(Stages(2), marks=pytest.mark.table), pg.Data(2) * Stages(2)], ids=str
)
def test_buffers_and_batch_norm_of_stages(chosen: pg.Strategy, tmp_path: Path) -> None:
    normed = make_job("normed", make_batch_norm_cnn, IMAGES, test=IMAGES)
    assert pg.verify(normed, chosen, runs=tmp_path).same
    run, serial = (pg.train(normed, strategy, runs=tmp_path) for strategy in (chosen, "serial"))
    for name, tensor in serial.model().state_dict().items():
        assert torch.allclose(run.model().state_dict()[name], tensor, atol=1e-5), name


def make_tied_mlp() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10)
    )
    model[4].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    "chosen", [Stages(3), pytest.param(pg.Data(2) * Stages(2), marks=pytest.mark.table)], ids=str
)
def test_weight_of_two_stages_has_one_gradient(chosen: pg.Strategy, tmp_path: Path) -> None:
    both = make_job("tied", make_tied_mlp, VECTORS, clip_norm=0.1, optimizer=make_adamw)
    assert pg.verify(both, chosen, runs=tmp_path).same
    run = pg.train(both, chosen, runs=tmp_path, save=2)
    model = run.model()
    assert model[4].weight is model[0].weight  # type: ignore[index,union-attr]
    assert (
        len(pg.train(both.replace(epochs=3), "serial", runs=tmp_path, resume=run.folder).losses)
        == 3
    )


@pytest.mark.parametrize(
    "ways",
    [
        (Columns(2), Stages(2)),
        pytest.param(
            (pg.Data(2) * Columns(2), Stages(2), Columns(3), "data(2)", Central(2), "serial"),
            marks=pytest.mark.table,
        ),
    ],
)
def test_checkpoint_resumes_under_another_partition(ways: tuple[Any, ...], tmp_path: Path) -> None:
    """A checkpoint has the form of a serial training, so any partition can continue from it.

    It has the whole parameters and the whole state of Adam, gathered from all parts.
    """
    whole = pg.train(job, "serial", runs=tmp_path)
    for first, second in zip(ways, (*ways[1:], ways[0]), strict=True):
        half = pg.train(job.replace(epochs=1), first, runs=tmp_path, save=1)
        run = pg.train(job, second, runs=tmp_path, resume=half.folder)
        for name, tensor in whole.model().state_dict().items():
            assert torch.allclose(run.model().state_dict()[name], tensor, atol=2e-6), (
                first,
                second,
                name,
            )


def test_rank_holds_its_shard_only(tmp_path: Path) -> None:
    """A rank records and holds only the parameters of its part.

    The first step is compared with the whole model, which is freed afterwards.
    """
    run = pg.train(job, Stages(3), runs=tmp_path)
    held = [
        line["parameters"]
        for rank in range(3)
        for line in Record(run.folder).select_lines("memory", rank)
    ]
    assert sum(held) == 4 * sum(parameter.numel() for parameter in make_deep_mlp().parameters())
    assert max(held) < sum(held)
    # Later steps are compared with a copy of the whole model, gathered from the parts.
    assert run.to_json()["compared_steps"] > 1


def list_freed_parameters(world: World, chosen: pg.Strategy) -> list[bool]:
    """Make two steps; return for each parameter of the whole model whether it is freed."""
    trainer = Trainer.build_for_job(world, job, chosen)
    try:
        whole = [weakref.ref(parameter) for parameter in trainer.model.parameters()]
        for inputs, target in itertools.islice(trainer.batches(job.train, job.batch, 0), 2):
            trainer.step(inputs, target)
        gc.collect()
        return [reference() is None for reference in whole]
    finally:
        trainer.close()


def test_whole_model_is_freed_after_the_first_step_check(pool: Launcher) -> None:
    assert pool.run(list_freed_parameters, Stages(2), size=2) == [[True] * 6] * 2


def _fail(weight: float) -> None:
    raise ValueError("broken")


class Failing(Central):
    """A strategy in which the worker on rank 0 fails, and the others continue."""

    def make_exchange(self, replica: Any, world: World, log: Any, options: Any) -> pg.Exchange:
        made = Served(replica, world)
        if world.rank == 0:
            made.average = _fail  # type: ignore[method-assign]
        return made


def test_failed_worker_does_not_wait_for_its_server(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(pg.RankFailed, match="rank 0, step 0: ValueError: broken"):
        pg.train(job, Failing(2), runs=tmp_path)
    assert time.monotonic() - began < DEFAULT_TIMEOUT / 2


def request_stop_on_rank_0(world: World, chosen: pg.Strategy) -> list[bool]:
    trainer = Trainer.build_for_job(world, job, chosen)
    stops = []
    try:
        for inputs, target in trainer.batches(job.train, job.batch, 0):
            stops.append(trainer.step(inputs, target).stop)
            if world.rank == 0:  # rank 0 has no loss
                world.stop.set()
            if len(stops) == 2:
                return stops
    finally:
        world.stop.clear()
        trainer.close()
    raise AssertionError


@pytest.mark.parametrize("chosen", [Stages(2), Columns(2), pg.Data(2) * Stages(2)], ids=str)
def test_stop_request_of_any_stage_reaches_all(pool: Launcher, chosen: pg.Strategy) -> None:
    assert (
        pool.run(request_stop_on_rank_0, chosen, size=chosen.size) == [[False, True]] * chosen.size
    )


# ---- wrong partitions ------------------------------------------------------------------------
class Uncopied(Columns):
    """A wrong strategy: the gradient of a layer's input is not summed over the ranks."""

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        share = super().shard_model(model, example, axis)
        for module in share.model.modules():
            if isinstance(module, ColumnLinear):
                module.forward = _forward_without_sum.__get__(module)  # type: ignore[method-assign]
        return share


def _forward_without_sum(self: ColumnLinear, x: torch.Tensor) -> torch.Tensor:
    return Gathered.apply(nn.functional.linear(x, self.weight, self.bias), self.rows, self.axis)


def test_wrong_partition_ends_in_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        pg.RankFailed, match="before the first update the gradient is off"
    ) as caught:
        pg.train(job, Uncopied(2), runs=tmp_path)
    assert caught.value.step == 0
    certificate = pg.verify(job, Uncopied(2), runs=tmp_path)
    assert not certificate.same
    assert certificate.first is not None
    assert certificate.first[1] == 0


class Missing(Columns):
    """A wrong strategy: on no rank is the last bias marked as primary, so it is never counted."""

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        share = super().shard_model(model, example, axis)
        return replace(
            share, specs={**share.specs, "6.bias": replace(share.specs["6.bias"], is_primary=False)}
        )


class Twice(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        return pg.ModelShard(
            model,
            {
                name: replace(each, is_primary=True)
                for name, each in make_replicated_specs(model, axis).items()
            },
        )


class Nameless(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        return pg.ModelShard(model, {})


class Misshapen(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        share = super().shard_model(model, example, axis)
        return replace(share, specs={**share.specs, "0.weight": ShardSpec("0.weight", (16, 10))})


class Misplaced(Columns):
    """A wrong strategy: all specs name the first rows, but rank 1 holds other rows."""

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        share = super().shard_model(model, example, axis)
        return replace(
            share,
            specs={**share.specs, "0.weight": ShardSpec("0.weight", (16, 10), ((slice(0, 8),),))},
        )


class Overlapping(Columns):
    """A wrong strategy: all ranks hold the first rows, so no rank holds the others."""

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        whole = model.get_parameter("0.weight").detach().clone()
        share = super().shard_model(model, example, axis)
        share.model.get_parameter("0.weight").data = whole[:8].clone()
        return replace(
            share,
            specs={**share.specs, "0.weight": ShardSpec("0.weight", (16, 10), ((slice(0, 8),),))},
        )


class Giftless(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        return replace(super().shard_model(model, example, axis), has_output=False)


class Textual(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        return pg.ModelShard(model, {"0.weight": "all of it"})  # type: ignore[dict-item]


class Unhappy(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        raise KeyError("rows")


class Further(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        share = super().shard_model(model, example, axis)
        return replace(
            share, specs={**share.specs, "7.bias": replace(share.specs["6.bias"], is_primary=False)}
        )


class Numbered(Stages):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        return replace(super().shard_model(model, example, axis), draw_calls=(7,))


class Generous(Stages):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        return replace(super().shard_model(model, example, axis), has_output=True)


class Early(Stages):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        return replace(super().shard_model(model, example, axis), has_output=axis.rank == 0)


class Forgetful(Stages):
    """A wrong strategy: its passes compute the first micro-batch only."""

    def make_passes(self, within: Any, exchange: pg.Exchange) -> Any:
        made = super().make_passes(within, exchange)
        every = made.compute_gradients
        made.compute_gradients = lambda micros, count: every(itertools.islice(micros, 1), count)
        return made


class Mute(Stages):
    def make_passes(self, within: Any, exchange: pg.Exchange) -> Any:
        made = super().make_passes(within, exchange)
        spoken = made.compute_output
        made.compute_output = lambda inputs: _drop_output(spoken(inputs))
        return made


def _drop_output(value: Any) -> None:
    """Drop the output, and return None."""


class Deserter(Served):
    def serve(self) -> None:
        """Return at once, before the workers dismiss this server."""


class Deserting(Central):
    def make_exchange(self, replica: Any, world: World, log: Any, options: Any) -> pg.Exchange:
        return Deserter(replica, world)


class Keeper(Served):
    dismiss_servers = pg.Exchange.dismiss_servers


class Keeping(Central):
    def make_exchange(self, replica: Any, world: World, log: Any, options: Any) -> pg.Exchange:
        return Keeper(replica, world)


class Thawed(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        share = super().shard_model(model, example, axis)
        share.model.get_parameter("0.bias").requires_grad_(False)
        return share


class Elsewhere(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        share = super().shard_model(model, example, axis)
        return replace(share, specs={**share.specs, "0.bias": ShardSpec("0.bia", (16,))})


class Nothing(Columns):
    def shard_model(self, model: nn.Module, example: Any, axis: World) -> Any:
        return model


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (Missing(2), r"\(2\) divides the model wrongly: of the 5 elements of 6\.bias 0 count"),
        (Twice(2), r"of the 160 elements of 0\.weight 320 count"),
        (Nameless(2), r"0\.weight is held, and no spec says of which tensor it is a part"),
        (Misplaced(2), r"0\.weight has other values than the part of 0\.weight in its spec"),
        (Overlapping(2), r"of 0\.weight some elements count twice, and others not at all"),
        (Giftless(2), "no rank gives the output and the loss"),
        (
            Textual(2),
            r"a shard is ModelShard\(model, specs\): an nn.Module, and a paragrad.ShardSpec for",
        ),
        (Unhappy(2), r"shard_model\(\) of unhappy\(2\) raised KeyError: 'rows'"),
        (Further(2), r"7\.bias has a spec, and the part has no such parameter or buffer"),
        (
            Numbered(2),
            r"gives the random calls of a part the numbers \[7\], and the model's are 0 to 1",
        ),
        (
            Generous(2),
            r"of the ranks of one replica 2 say that they give the loss, but other ranks "
            r"have it",
        ),
        (Early(2), r"of the ranks of one replica 1 say that they give the loss"),
        (Forgetful(2, micro=2), "leaves out some of the 2 micro-batches of this step; take all"),
        (Mute(2), r"gives none in a test: output\(inputs\) of the passes is None there"),
        (Deserting(2), r"serve\(\) of Deserter returned before the workers dismissed it"),
        (
            Keeping(2),
            r"keeping\(2\) has servers, and its Keeper has no dismiss_servers; give it a method "
            r"dismiss_servers\(self\)",
        ),
        (Thawed(2), r"0\.bias is frozen, and 0\.bias of the model is not"),
        (Elsewhere(2), r"the spec of 0\.bias names 0\.bia, which the model does not have"),
        (
            Misshapen(2),
            r"0\.weight has the shape \(8, 10\), and the part of 0\.weight in its spec, whole "
            r"\(16, 10\), has another",
        ),
        (Nothing(2), r"the shard of nothing is a Sequential; return a paragrad\.ModelShard"),
    ],
)
def test_incomplete_partition_is_refused(chosen: pg.Strategy, says: str, tmp_path: Path) -> None:
    with pytest.raises(pg.RankFailed, match=says):
        pg.train(job, chosen, runs=tmp_path)


def make_adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


def test_whole_tensor_optimizer_is_supported_or_refused(tmp_path: Path) -> None:
    """Adafactor computes with whole tensors, so a strategy that divides tensors is refused.

    The first step is compared before its update, so that check would not see a wrong update.
    """
    whole = job.replace(optimizer=make_adafactor)
    with pytest.raises(
        pg.RankFailed, match=r"Adafactor needs whole tensors together .* columns\(2\) divides them"
    ):
        pg.train(whole, Columns(2), runs=tmp_path)
    assert pg.verify(whole, Stages(2), runs=tmp_path).same


class Dropping(Stages):
    """A wrong strategy: the dropout of the second stage makes other draws than in serial."""

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        return replace(super().shard_model(model, example, axis), draw_calls=(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_number_of_draws_ends_with_a_verdict(dtype: torch.dtype, tmp_path: Path) -> None:
    """A part whose random calls have wrong numbers is reported as a difference from serial.

    Earlier, one worker repeated the step with the draws of the part, and this failed instead.
    Also, ranks without the loss assumed float32, so the ranks disagreed about the result.
    """
    with pytest.raises(pg.RankFailed, match="not one worker's training: before the first update"):
        pg.train(job.replace(dtype=dtype), Dropping(2), runs=tmp_path)


class Drifting(Columns):
    """A wrong strategy: the copies of a norm on ranks 0 and 1 get different gradients."""

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        share = super().shard_model(model, example, axis)
        if axis.rank == 1:
            share.model.get_parameter("1.weight").register_hook(lambda gradient: gradient * 0.5)
        return share


def make_normed_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def test_diverging_copies_end_in_the_first_step(tmp_path: Path) -> None:
    """Earlier, only the primary copy of a parameter was compared with serial, not the others."""
    both = make_job("layer norm", make_normed_mlp, VECTORS)
    assert pg.verify(both, Columns(2), runs=tmp_path).same
    with pytest.raises(
        pg.RankFailed, match="ranks 0 and 1 hold copies of it with other gradients"
    ) as caught:
        pg.train(both, Drifting(2), runs=tmp_path)
    assert caught.value.tensor == "1.weight"


class Parted(Columns):
    """A strategy that divides the rows of a weight over two ranks, like experts.

    A rank whose rows are not used has no gradient.
    """

    def shard_model(self, model: nn.Module, example: Any, axis: World) -> pg.ModelShard:
        held = make_replicated_specs(model, axis)
        table = model.get_parameter("0.table")
        rows = slice(2 * axis.rank, 2 * axis.rank + 2)
        model.get_submodule("0").table = nn.Parameter(table.detach()[rows].clone())
        model.get_submodule("0").axis = axis  # type: ignore[assignment]
        held["0.table"] = ShardSpec("0.table", (4, 4), ((rows,),))
        return pg.ModelShard(model, held)


class Table(nn.Module):
    """A module that adds the first row of its table to all samples.

    If the table is divided, rank 0 has this row, and the ranks sum their contributions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.axis: World | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return x + self.table[0]
        return x + Summed.apply(
            self.table[0] if self.axis.rank == 0 else torch.zeros(4, dtype=x.dtype), self.axis
        )


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: World) -> torch.Tensor:
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def make_tabled_model() -> nn.Module:
    return nn.Sequential(
        OrderedDict([("first", nn.Linear(10, 4)), ("0", Table()), ("last", nn.Tanh())])
    )


def test_stage_without_a_gradient_is_updated_as_in_serial(tmp_path: Path) -> None:
    """In serial, the whole tensor has a gradient, so weight decay changes all of its rows.

    Earlier, a rank whose part had no gradient did not apply weight decay to it.
    """
    both = make_job("tabled", make_tabled_model, VECTORS, optimizer=make_adamw)
    assert pg.verify(both, Parted(2), runs=tmp_path).same


@pytest.mark.parametrize(
    "chosen",
    [
        Stages(2),
        *(
            pytest.param(each, marks=pytest.mark.table)
            for each in (Columns(2), pg.Data(2) * Stages(2))
        ),
    ],
    ids=str,
)
def test_autocast_and_more_stages_than_parameters(chosen: pg.Strategy, tmp_path: Path) -> None:
    run = pg.train(job.replace(dtype=torch.bfloat16), chosen, runs=tmp_path)
    assert {line["name"] for line in run.select_lines("event")} == {"checked"}
    # The third of these stages has no parameters.
    assert pg.verify(job, Stages(4), runs=tmp_path).same


class Uncast(Stages):
    def make_passes(self, within: Any, exchange: pg.Exchange) -> Any:
        made = super().make_passes(within, exchange)
        within.use_autocast = contextlib.nullcontext
        return made


def test_passes_without_autocast_are_reported(tmp_path: Path) -> None:
    with pytest.raises(pg.RankFailed, match=r"the passes of uncast\(2\) leave autocast out"):
        pg.train(job.replace(dtype=torch.bfloat16), Uncast(2), runs=tmp_path)


def hooked() -> nn.Module:
    model = make_deep_mlp()
    model.get_parameter("0.weight").register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


class Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (random.random() < 0.5)


def drawing() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), Drawing(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (hooked, "it has a hook, which its parts would not have"),
        (drawing, "the model draws from random, and in parts its calls are others"),
    ],
)
def test_module_that_depends_on_its_shard_is_refused(model: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(pg.RankFailed, match=says):
        pg.train(make_job("otherwise", model, VECTORS), Stages(2), runs=tmp_path)


class Counting(nn.Module):
    """A module whose forward counts its calls in Python, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


def make_counting_model() -> nn.Module:
    return nn.Sequential(Counting(), nn.Linear(10, 4), nn.Linear(4, 4))


def test_unsynchronized_python_state_is_reported(tmp_path: Path) -> None:
    with pytest.raises(pg.RankFailed, match="divided model does not carry that from part to"):
        pg.train(make_job("counting", make_counting_model, VECTORS), Stages(2), runs=tmp_path)


class Undivided(pg.Strategy):
    """A strategy that divides the model without `shard_model`, but has its own exchange."""

    workers: int = pg.option(pg.Integer())
    guarantees = Columns.guarantees
    axes = Columns.axes
    make_exchange = Central.make_exchange


class Unsaid(pg.Strategy):
    workers: int = pg.option(pg.Integer())
    guarantees = Columns.guarantees
    axes = Columns.axes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "data(2) * undivided(2)",
            r"and undivided\(2\) both have their own exchange; at most one factor",
        ),
        (
            "data(2) * unsaid(2)",
            r"Unsaid has no make_exchange; give it a method .* or `shard_model\(self, model, "
            r"example, axis\)`",
        ),
        ("stages(2) * stages(2)", "both have their own passes|two axes stages"),
        (
            "columns(2) * data(2)",
            "data holds replicas: at most one such part in a product, leftmost",
        ),
        ("columns(2) * columns(2)", "has two axes columns"),
        ("central(2) * columns(2)", r"central\(2\) has servers, which allow no other factors"),
        ("data(2, micro=2) * stages(2)", r"data\(micro=...\) does not fit with"),
        (
            "data(2, state=shared_memory) * columns(2)",
            "divides the model, and each rank holds its own part",
        ),
        ("data(2) * branch(2)", "the model has no branches"),
    ],
)
def test_impossible_products_are_refused(text: str, says: str) -> None:
    with pytest.raises(pg.Refused, match=says):
        pg.train(job, pg.strategy(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("central(1)", r"central\(1\): its servers do not run your own loop; make it a Job"),
    ],
)
def test_user_partitions_in_a_user_loop_are_refused(text: str, says: str) -> None:
    model = make_deep_mlp()
    with (
        pytest.raises(pg.Refused, match=says),
        pg.parallelize(model, nn.functional.cross_entropy, make_adamw(model.parameters()), text),
    ):
        pass


def test_planted_bugs_are_found_in_a_product(tmp_path: Path) -> None:
    for bug in ("mean_twice", "skip_chunk"):
        with pytest.raises(pg.RankFailed, match="off"):
            pg.train(
                job,
                "data(2, reduce=ring) * columns(2)",
                runs=tmp_path,
                inject_fault=bug,
                skip_schedule_check=True,
            )


def test_record_distinguishes_workers_and_servers(tmp_path: Path) -> None:
    run = pg.train(job, Central(2), runs=tmp_path)
    assert (run.header["workers"], run.header["servers"]) == (2, 1)
    assert not Record(run.folder).select_lines("step", 2)
    assert run.sent_per_step["gradients"]["bytes"] > 0
    assert (
        json.loads((run.folder / "rank-2.jsonl").read_text().splitlines()[-1])["kind"] == "memory"
    )


def test_run_without_remaining_steps_dismisses_its_server(tmp_path: Path) -> None:
    """Earlier, the server waited for a first step, which never came."""
    first = pg.train(job, Central(2), runs=tmp_path, save=6)
    with pytest.warns(
        UserWarning, match="all 6 steps of 2 epoch.* are finished; nothing is left to train"
    ):
        assert pg.train(job, Central(2), runs=tmp_path, resume=first.folder).losses == []


# ---- layouts ---------------------------------------------------------------------------------
def test_boxes_and_ranges_reconstruct_the_serial_tensor() -> None:
    """Parts are put together again to the serial tensor.

    In a fused qkv, each rank has one half of each third of the rows. A flat tensor is divided
    into two ranges. No rank has a value for the third tensor.
    """
    qkv = torch.arange(24.0).view(12, 2)
    flat = torch.arange(7.0)
    held = [
        ShardSpec(
            "qkv",
            (12, 2),
            tuple((slice(4 * third + 2 * rank, 4 * third + 2 * rank + 2),) for third in range(3)),
        )
        for rank in range(2)
    ]
    ranges = [ShardSpec("flat", (7,), each) for each in (range(3), range(3, 7))]
    parts = [
        (each, each.extract_shard(whole))
        for whole, both in ((qkv, held), (flat, ranges))
        for each in both
    ]
    assert parts[0][1].tolist() == torch.cat([qkv[0:2], qkv[4:6], qkv[8:10]]).tolist()
    found = assemble_tensors([*parts, (ShardSpec("none", (3,)), None)])
    assert torch.equal(found["qkv"], qkv)  # type: ignore[arg-type]
    assert torch.equal(found["flat"], flat)  # type: ignore[arg-type]
    assert found["none"] is None


def test_nested_partition_is_composed_or_refused() -> None:
    rows = ShardSpec("layer.weight", (8, 2), ((slice(0, 4),),))
    stage = ShardSpec("3.layer.weight", (8, 2), is_primary=False)
    assert rows.compose_with(stage) == ShardSpec(
        "3.layer.weight", (8, 2), ((slice(0, 4),),), is_primary=False
    )
    with pytest.raises(Exception, match="two cuts divide it"):
        rows.compose_with(rows)


def test_undivided_model_is_a_layout() -> None:
    tensors = {"a": torch.ones(2), "b": None}
    assert Layout().gather_serial_tensors(tensors) == tensors
    assert Layout().share_numbers([1.0, 2.0]) == [[1.0, 2.0]]
