"""Models that failed late when they were cut into stages.

They failed in a test, after the first step, or at the end of a forward.
"""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import pytest
import torch
from equality_table import VECTORS, draw_integers, make_job, measure_difference
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.launch import Launcher
from paragrad.parallel.tracing.stage_forward import StageForward
from paragrad.runtime.world import World
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks"), pytest.mark.story]

TOKENS = torch.cat([draw_integers(20, 29, 8, seed=6) + 1, torch.zeros(29, 1, dtype=torch.long)], 1)
# each row has 4 to 8 tokens, then padding
TOKENS[torch.arange(9) >= draw_integers(5, 29, 1, seed=7) + 4] = 0
SENTENCES = TensorDataset(TOKENS, draw_integers(4, 29, seed=2))


# ---- in a test -------------------------------------------------------------------------------
class Encoder(nn.Module):
    def __init__(self, nested: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 8)
        self.out = nn.Linear(8, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(
            self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0).mean(1)
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_with_another_path_in_eval_is_refused(tmp_path: Path) -> None:
    """An encoder whose output in eval mode differs when its layers are traced is refused.

    torch gives zeros at padded positions in eval mode. When its layers are traced, torch computes
    these positions. Earlier, the score of a test was different, without an error.
    """
    with pytest.raises(
        pg.Refused,
        match=r"computes padding in another way .* build it with enable_nested_tensor=False",
    ):
        validate_run(make_job("encoder", Encoder, SENTENCES, test=SENTENCES), "place(2)")
    plain = make_job(
        "plain",
        lambda: Encoder(nested=False),
        SENTENCES,
        test=SENTENCES,
        epochs=1,
        dtype=torch.float64,
    )
    score = [
        pg.train(plain, each, runs=tmp_path).select_lines("epoch")[0]["test"]
        for each in ("serial", "place(2)")
    ]
    assert score[0] == pytest.approx(score[1], rel=1e-12)


class TwoWays(nn.Module):
    """A model with another output in eval mode if a torch function mode is active.

    Such a mode is active while paragrad traces the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        watched = torch.overrides._get_current_function_mode() is not None
        return self.out(hidden * 2 if watched and not self.training else hidden)


def test_other_output_in_eval_mode_is_refused() -> None:
    with pytest.raises(
        pg.Refused, match="in eval mode the model gives another output in parts than whole"
    ):
        validate_run(make_job("ways", TwoWays, VECTORS, test=VECTORS), "place(2)")
    validate_run(make_job("ways", TwoWays, VECTORS), "place(2)")


def compute_masked_mean(output: Tensor, target: Tensor) -> Tensor:
    keep = (target > 0).to(output.dtype)
    return (functional.cross_entropy(output, target, reduction="none") * keep).sum() / keep.sum()


def make_frozen_head_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))
    model[2].requires_grad_(False)
    return model


def test_evaluation_weighs_the_loss_of_a_frozen_last_stage(tmp_path: Path) -> None:
    """A test weighs the loss as serial does, also if the last stage is frozen.

    Earlier, the loss was weighed by the number of samples, without a message. The weight is read
    from the graph of the loss. That graph began in the last stage, where no tensor required a
    gradient.
    """
    job = make_job(
        "frozen head",
        make_frozen_head_model,
        VECTORS,
        test=VECTORS,
        metric=None,
        loss=compute_masked_mean,
        epochs=1,
        dtype=torch.float64,
    )
    tested = [
        pg.train(job, each, runs=tmp_path).select_lines("epoch")[0]["test"]
        for each in ("serial", "place(2, cut=[2, 1])")
    ]
    assert tested[0]["weight"] == tested[1]["weight"] == float((VECTORS.tensors[1] > 0).sum())
    assert tested[0]["value"] == pytest.approx(tested[1]["value"], rel=1e-12)


# ---- outputs of a unit -----------------------------------------------------------------------
class Pyramid(nn.Module):
    """An encoder returns a list and a dict; the model changes both.

    The decoder removes the last element of the list in each step.
    """

    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
            found = []
            for level in self.levels:
                found.append(x := torch.tanh(level(x)))
            return found, {"x": x}

    def __init__(self) -> None:
        super().__init__()
        self.down = self.Down()
        self.ups = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        levels, named = self.down(x)
        hidden = levels.pop()
        named["x"] = named["x"] + hidden
        for up in self.ups:
            hidden = up(hidden) + levels.pop()
        return self.out(hidden + named.pop("x"))


@pytest.mark.parametrize("row", ["place(2, cut=[ups.0])", "pipeline(2, micro=3, cut=[ups.1])"])
def test_list_returned_by_a_module_is_copied(pool: Launcher, row: str) -> None:
    """A list that a unit returns is copied for each forward.

    Earlier, the model emptied the plan's own list. The second forward raised ValueError of zip.
    """
    assert measure_difference(pool, row, make_job("pyramid", Pyramid, VECTORS)).value <= 1e-10


class Cropped(nn.Module):
    """A model that uses a tensor with one number as the end of a slice and as a size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 8)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        longest = (tokens > 0).sum(1).max()
        tokens = tokens[:, :longest]
        hidden = self.embedding(tokens) * torch.arange(longest).cos()[:, None]
        hidden = torch.tanh(self.middle(hidden)) * (tokens > 0)[:, :, None]
        return self.out(hidden[:, :longest].sum(1) / 9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("row", ["place(2, cut=[middle])", "pipeline(2, micro=4, cut=[out])"])
def test_size_that_is_a_tensor_is_read(pool: Launcher, row: str) -> None:
    """A slice end or a size that is a tensor is read as a value.

    torch's function mode does not see Python's own functions. So the read of the value was missed.
    Earlier, a plan for another length was used, and an error blamed a module for its shapes.
    """
    assert measure_difference(pool, row, make_job("cropped", Cropped, SENTENCES)).value <= 1e-10


class Dropped(nn.Module):
    """A model that applies dropout to a weight; the last stage uses the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 8)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, 21)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        weight = functional.dropout(self.embedding.weight, 0.25, self.training)
        return self.out(torch.tanh(self.middle(functional.embedding(tokens, weight).mean(1))))


def test_draw_for_a_weight_of_two_stages_is_made_once(pool: Launcher) -> None:
    """Dropout of a weight that two stages use draws random numbers once.

    Earlier, the later stage drew them again. An error then said that the model draws another number
    of times than when it was cut.
    """
    job = make_job("dropped", Dropped, TensorDataset(TOKENS, draw_integers(21, 29, seed=2)))
    assert measure_difference(pool, "place(2, cut=[out])", job).value <= 1e-10


class Averaging(nn.Module):
    """A model that subtracts a running mean at its beginning, and adds it at its end.

    The first stage writes the mean, and a later stage reads it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(10, 10)
        self.two = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
        return self.out(self.two(torch.tanh(self.one(x - self.mean))) + self.mean)


@pytest.mark.sample(3)
@pytest.mark.parametrize("row", ["place(2)", "place(2, cut=[out])", "place(3)"])
def test_buffer_of_two_stages_is_written(pool: Launcher, row: str) -> None:
    assert measure_difference(pool, row, make_job("averaging", Averaging, VECTORS)).value <= 1e-10


class Replaced(nn.Module):
    """A model with a unit that replaces its own buffer by a new tensor.

    Afterwards the model computes masks of the inputs.
    """

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 10)
            self.register_buffer("mean", torch.zeros(10))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Mean()
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(4):
            keep = (x > 0).to(hidden.dtype)
            hidden = hidden * keep + x
        return self.out(torch.tanh(self.second(hidden)))


def test_id_of_a_freed_buffer_is_not_reused() -> None:
    """A buffer that is replaced in a forward stays alive until the end of that forward.

    Earlier, it was freed, and a new tensor got its id. Operations on inputs alone then took the
    numbers of operations whose results cross.
    """
    flow = StageForward(Replaced(), [[("first", 0)], [("second", 0), ("out", 0)]])
    held = flow.collect_model_tensors()
    before = weakref.ref(flow.model.first.mean)
    flow.model.first.mean = torch.ones(10)
    assert before() is not None
    assert id(before()) in held


@pytest.mark.parametrize("row", ["place(2, cut=[second])", "place(2, cut=[out])"])
def test_replaced_buffer_of_a_stage(pool: Launcher, row: str) -> None:
    assert measure_difference(pool, row, make_job("replaced", Replaced, VECTORS)).value <= 1e-10


# ---- writes that not every rank sees ---------------------------------------------------------
class Following(nn.Module):
    """A model with a second net that is a moving average of the first (MoCo, BYOL).

    The model writes the average through `.data`, or it begins only after some calls.
    """

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh())
        self.second = copy.deepcopy(self.net).requires_grad_(False)
        self.out = nn.Linear(16, 4)
        self.late = late
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        with torch.no_grad():
            for ours, theirs in zip(self.net.parameters(), self.second.parameters(), strict=False):
                _ = theirs - ours  # this use shows that the stage uses both
                if not self.late:
                    theirs.data.mul_(0.9).add_(ours.data, alpha=0.1)
                elif self.calls > 2:
                    theirs.mul_(0.9).add_(ours, alpha=0.1)
        return self.out(torch.cat([self.net(x), self.second(x)], 1))


@pytest.mark.parametrize(
    ("late", "told"),
    [
        (
            False,
            "step 0, tensor second.0.weight: after this step ranks 0 and 1 hold copies of it that "
            "are not equal bit for bit",
        ),
        (
            True,
            "step 2.*: the model took another path here than|step 2.*: a forward changes it, "
            "besides gradients and buffers",
        ),
    ],
)
def test_hidden_write_to_a_weight_ends_the_run(tmp_path: Path, late: bool, told: str) -> None:
    """A write to a weight that not every rank sees ends the run with an error.

    Earlier, the rank that runs the second net had a copy that did not change. The saved model
    differed from both.
    """
    with pytest.raises(pg.RankFailed, match=told):
        pg.train(
            make_job("following", lambda: Following(late), VECTORS, batch=4),
            "place(2, cut=[second])",
            runs=tmp_path,
        )


class Counting(nn.Module):
    """A model that counts its calls at the beginning or at the end of a forward."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.one = nn.Linear(10, 10)
        self.two = nn.Linear(10, 4)
        self.first = first
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.first
        if self.calls > 3:
            x = x * 2
        out = self.two(torch.tanh(self.one(x)))
        self.calls += not self.first
        return out


def test_counter_after_a_forward_is_refused(tmp_path: Path) -> None:
    """A counter that changes at the end of a forward is refused.

    Only the last rank reaches the end of the forward, so only its counter changed. But the first
    rank is the one that reads it.
    """
    job = make_job("counting", lambda: Counting(first=False), VECTORS, batch=4)
    with pytest.raises(
        pg.RankFailed,
        match=r"step 1, tensor calls: forwards change this number, and not alike on all ranks .* "
        "change it where forward begins",
    ):
        pg.train(job, "place(2)", runs=tmp_path)


def test_counter_before_a_forward_equals_serial(pool: Launcher) -> None:
    assert (
        measure_difference(
            pool, "place(2)", make_job("counting", lambda: Counting(first=True), VECTORS, batch=4)
        ).value
        <= 1e-10
    )


class Deep(Counting):
    def __init__(self) -> None:
        super().__init__(first=True)
        self.one, self.two = (
            nn.Sequential(nn.Linear(10, wide), nn.Linear(wide, out))
            for wide, out in ((10, 10), (8, 4))
        )


@pytest.mark.parametrize(
    "row", ["pipeline(2, micro=2, schedule=interleaved)", "pipeline(2, micro=2, recompute=true)"]
)
def test_counter_is_refused_if_forwards_are_repeated(tmp_path: Path, row: str) -> None:
    """A counter is refused if a rank runs the model's Python several times for a micro-batch.

    Each stage of a rank changed the counter. A recomputed forward read other numbers than the
    first.
    """
    with pytest.raises(
        pg.RankFailed,
        match=r"step \d, tensor calls: .* interleaved parts, or recompute, .* leave these out",
    ):
        pg.train(make_job("counting", Deep, VECTORS, batch=4), row, runs=tmp_path)


# ---- a user's own loop -----------------------------------------------------------------------
class Restarting(nn.Module):
    """A model whose output changes after some calls; the user's loop sets the count back to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(10, 10)
        self.two = nn.Linear(10, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.two(torch.tanh(self.one(x)) * (0.5 if self.calls <= 2 else 1.0))


def train_restarting_model(world: World, strategy: str) -> tuple[list[float], list[int]]:
    torch.manual_seed(3)
    model = Restarting().double()
    losses = []
    calls = []
    with pg.parallelize(
        model,
        functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy,
        skip_first_step_check=strategy == "serial",
    ) as trainer:
        for epoch in range(3):
            model.calls = 0
            losses += [
                trainer.step(*batch).loss
                for batch in trainer.batches(VECTORS, batch=8, epoch=epoch)
            ]
            calls.append(model.calls)
    return losses, [*calls, model.calls]


def test_counter_that_is_reset(pool: Launcher) -> None:
    """A user's loop can reset a counter of the model.

    Earlier, the model object that the user passed was never run. Its count stayed 0, so setting it
    to 0 was not seen as a change.
    """
    losses, calls = train_restarting_model(World(), "serial")
    for ours, counts in pool.run(train_restarting_model, "place(2)", size=2):
        assert ours == pytest.approx(losses, rel=1e-10)
        assert counts == calls == [4, 4, 4, 4]


# ---- the first step --------------------------------------------------------------------------
class Normed(nn.Module):
    """A model with a buffer that changes the loss, and an attribute that is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.seen = torch.zeros(())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        hidden = torch.tanh(self.first(x)) / self.count
        self.seen = hidden.detach().mean()
        return self.out(hidden)


def test_unread_attribute_is_distinguished_from_a_buffer(tmp_path: Path) -> None:
    """An attribute that is never read does not fail the first-step check.

    Earlier, the forward that found the attribute used the buffers of the forward before it. So the
    attribute was blamed for the difference.
    """
    run = pg.train(make_job("normed", Normed, VECTORS, epochs=1), "place(2)", runs=tmp_path)
    assert "are one worker's" in (run.first_step or "")
