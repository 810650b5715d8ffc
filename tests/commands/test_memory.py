"""The memory of ranks: the bytes that are counted in a step.

They are compared with the prediction from the schedule, with the allocator, and with a limit.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from equality_table import draw_integers, draw_numbers, make_job, resolve_text
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import paragrad as pg
from paragrad.commands import fit_batch
from paragrad.commands.cli import app
from paragrad.commands.memory import measure_step_memory
from paragrad.commands.trial import choose_by_trial
from paragrad.datasets.loading import separate_target
from paragrad.engine.activation_meter import ActivationMeter
from paragrad.launch import Launcher
from paragrad.record.record import Record
from paragrad.runtime.world import World
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.setup import TrainerOptions
from paragrad.trainer.trainer import Trainer
from paragrad.validation.activation_forecast import forecast_activations
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

DATA = TensorDataset(draw_numbers(96, 40, seed=1), draw_integers(4, 96, seed=2))


class Blocks(nn.Module):
    """A model of eight equal blocks with dropout, and a skip connection over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(40, 40), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)
        )
        self.out = nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.out(hidden + x.tanh())


def make_adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)  # type: ignore[arg-type]


BLOCKS = make_job("blocks", Blocks, DATA, batch=48, epochs=1, optimizer=make_adam, test=DATA)
ROWS = [
    "serial",
    "serial(micro=3)",
    "data(2, shares=[3, 1], reduce=ring)",
    "place(3)",
    *(
        f"pipeline(3, micro=6, schedule={schedule}{again})"
        for schedule in ("gpipe", "one_f_one_b")
        for again in ("", ", recompute=true")
    ),
    # earlier, the prediction left out the first stage's copy of the batch
    "pipeline(3, micro=6, recompute=true, cut=[3, 11, 11])",
    "pipeline(2, micro=5)",
    "pipeline(2, micro=4, schedule=zero_bubble)",
    "pipeline(2, micro=4, schedule=interleaved)",
    "data(2) * pipeline(2, micro=4)",
]
QUICK = "serial(micro=3)", "pipeline(3, micro=6, recompute=true, cut=[3, 11, 11])"


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in QUICK else pytest.mark.table) for row in ROWS]
)
def test_peak_memory_is_predicted(pool: Launcher, row: str) -> None:
    """On every rank, the prediction is within 5 % of the counted saved tensors and messages."""
    checked = validate_run(BLOCKS, row)
    found = forecast_activations(checked.job, checked.resolved, checked.inspection)
    counted = measure_step_memory(
        pool, validate_run(BLOCKS, found.strategy, inspection=checked.inspection)
    )
    for rank in range(found.ranks):
        assert found.compute_peak(rank) == pytest.approx(
            counted[found.first_rank + rank]["activations"], rel=0.05
        ), rank


class BatchSizeRecorder(nn.Module):
    """A model that records the number of samples of each test batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(40, 4)
        self.tested = set[int]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.tested.add(len(x))
        return self.out(x)


def compute_mean_square(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def record_test_batch_sizes(world: World, chosen: Strategy, graph: bool = True) -> set[int]:
    """Train one step, run a test, and return the sizes of the test batches of this rank."""
    model = BatchSizeRecorder()
    options = TrainerOptions(is_validated=True)
    trainer = Trainer(
        world, model, compute_mean_square, make_adam(model.parameters()), chosen, options
    )
    try:
        for fetched in itertools.islice(trainer.batches(DATA, 24, epoch=0), 1):
            trainer.step(*separate_target(fetched))
        trainer.evaluate(DATA, None if graph else pg.accuracy)
        return model.tested
    finally:
        trainer.close()


def test_evaluation_with_a_graph_uses_the_step_batch(pool: Launcher) -> None:
    """If the weight of a loss is read from its graph, test batches are as large as in a step.

    Earlier, a test batch had 256 samples for every batch size. So the graph of 256 samples was in
    memory at once.
    """
    assert record_test_batch_sizes(World(), resolve_text("serial"), graph=False) == {96}
    assert record_test_batch_sizes(World(), resolve_text("serial")) == {24}
    assert record_test_batch_sizes(World(), resolve_text("serial(micro=4)")) == {6}
    assert pool.run(
        record_test_batch_sizes, resolve_text("data(2, shares=[3, 1], reduce=ring)"), size=2
    ) == [
        {18, 12},
        {6},
    ]


def test_evaluation_memory_is_predicted() -> None:
    """The prediction for a test counts the graph of the loss, if the job has no metric.

    The weight of the loss is read from this graph.
    """
    judged = validate_run(BLOCKS.replace(metric=None, loss=compute_mean_square), "serial(micro=3)")
    found = forecast_activations(judged.job, judged.resolved, judged.inspection)
    assert found.compute_test_peak(0) == found.compute_peak(0) > 0
    parts = validate_run(judged.job, "place(2)", inspection=judged.inspection)
    found = forecast_activations(parts.job, parts.resolved, parts.inspection)
    assert found.compute_test_peak(1) > found.compute_test_peak(0) > 0  # type: ignore[operator]
    scored = validate_run(BLOCKS, "serial")
    assert (
        forecast_activations(scored.job, scored.resolved, scored.inspection).compute_test_peak(0)
        == 0
    )


def test_counted_bytes_equal_the_allocator() -> None:
    """The meter counts as many bytes as the allocator, in a forward that keeps nothing else."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4))
    )
    inputs = torch.ones(32, 64)
    alive = ActivationMeter([*model.parameters(), inputs])
    gc.collect()
    cpu = torch.profiler.ProfilerActivity.CPU
    with (
        torch.profiler.profile(activities=[cpu], profile_memory=True) as profile,
        alive.count_saved_tensors(),
    ):
        total = model(inputs).sum()
    given = sum(event.self_cpu_memory_usage for event in profile.events())
    assert alive.current_bytes == given - total.element_size()
    most = alive.peak_bytes
    total.backward()
    assert (alive.current_bytes, alive.peak_bytes) == (0, most), "let go by its backward"


@pytest.mark.parametrize(
    "strategy",
    ["place(4, cut=[2, 2, 2, 2])", "pipeline(4, micro=4, cut=[2, 2, 2, 2])", "tensor(4)"],
)
def test_one_of_four_stages_holds_a_quarter_at_rest(pool: Launcher, strategy: str) -> None:
    """With eight equal layers, the fullest of four ranks holds at most 0.30 of serial's bytes.

    This is so for parameters, gradients and optimizer state.
    """
    job = make_job(
        "equal",
        lambda: nn.Sequential(*(nn.Linear(40, 40) for _ in range(8))),
        DATA,
        optimizer=make_adam,
    )
    (alone,), parts = (
        measure_step_memory(pool, validate_run(job, each)) for each in ("serial", strategy)
    )
    assert len(parts) == 4
    for kind in ("parameters", "optimizer", "gradients"):
        assert 0.25 <= max(each[kind] for each in parts) / alone[kind] <= 0.30, kind


WORDS = TensorDataset(draw_integers(8192, 8, 16, seed=1), draw_integers(8192, 8, 16, seed=2))


class Words(nn.Module):
    """A language model with tied weights; its scores have the shape that the loss takes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8192, 12)
        self.scores = nn.Linear(12, 8192)
        self.scores.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.words(tokens).tanh()).transpose(1, 2)  # type: ignore[no-any-return]


def test_no_rank_holds_the_scores_of_all_words(pool: Launcher) -> None:
    """Each of four ranks keeps about a quarter of the scores for backward, and nothing more.

    One worker keeps the scores of all words.
    """
    job = make_job("words", Words, WORDS, batch=8, epochs=1)
    (alone,), split = (
        measure_step_memory(pool, validate_run(job, each)) for each in ("serial", "tensor(4)")
    )
    scores = 8 * 16 * 8192 * 4
    assert alone["activations"] >= scores
    assert max(each["activations"] for each in split) <= 0.3 * scores


@pytest.mark.parametrize(
    "strategy",
    [
        "serial",
        pytest.param("pipeline(2, micro=2, cut=[12, 13])", marks=pytest.mark.table),
        pytest.param("data(2, shares=[2, 1])", marks=pytest.mark.table),
    ],
)
def test_largest_batch_that_fits_is_found(pool: Launcher, strategy: str, tmp_path: Path) -> None:
    """The batch that is found fits into the memory limit, and a larger batch does not."""
    chosen = pg.strategy(strategy)
    budget = max(
        sum(size for kind, size in each.items() if kind != "resident")
        for each in measure_step_memory(pool, validate_run(BLOCKS.replace(batch=61), chosen))
    )
    run = pg.train(BLOCKS.replace(batch="fit"), chosen, memory=budget, runs=tmp_path, limit=2)
    grain = {"serial": 1, "data(2, shares=[2, 1])": 3}.get(strategy, 2)
    assert run.header["job"]["batch"] == 61 // grain * grain
    assert sum(run.fullest.values()) <= budget
    (told,) = [line for line in run.choices if line["what"] == "batch"]
    assert told["picked"] == str(61 // grain * grain)
    assert "in a step of it the fullest rank held" in told["because"]


def test_impossible_memory_limit_is_reported(tmp_path: Path) -> None:
    job = BLOCKS.replace(batch="fit")
    with pytest.raises(
        pg.Refused, match=r"memory 20 KB does not hold a step of 1 sample.*fullest rank holds about"
    ):
        pg.train(job, "serial", memory="20KB", runs=tmp_path)
    with pytest.raises(
        pg.Refused, match="batch='fit' needs to know how much a rank may hold; add memory='2GB'"
    ):
        pg.train(job, "serial", runs=tmp_path)
    with pytest.raises(pg.Refused, match="batch='fit' works only in train, for one strategy"):
        pg.compare(job, "serial; data(2)", runs=tmp_path)
    with pytest.raises(
        pg.Refused, match="memory 2GB says what a rank may hold when paragrad finds the batch"
    ):
        pg.train(BLOCKS, "serial", memory="2GB", runs=tmp_path)
    with (
        mock.patch.object(fit_batch, "read_available_memory", return_value=1 << 30),
        pytest.raises(
            pg.Refused,
            match=r"memory 600 MB for each of 2 rank\(s\) is more than the .* free; give at most "
            r"512MiB",
        ),
    ):
        pg.train(job, "data(2)", memory="600MB", runs=tmp_path)
    assert not list(tmp_path.iterdir())


def test_reason_for_the_found_batch_is_given() -> None:
    """The reason for the chosen batch is reported.

    Earlier, the reason that larger batches did not fit was overwritten, except for the largest
    batch of all.
    """
    found = fit_batch.BatchSearch(
        None, BLOCKS, pg.strategy("serial"), None, mock.Mock(samples=96), 2, 1 << 20
    )  # type: ignore[arg-type]
    assert found.explain_batch(
        16, {"parameters": 100}, "the largest that was seen to fit"
    ).startswith("the largest that was seen to")
    assert found.explain_batch(16, {"parameters": 100}).startswith("the largest multiple of 2,")
    assert found.explain_batch(96, {"parameters": 100}).startswith("all samples of the dataset;")
    found.batch_multiple = 5
    assert found.explain_batch(95, {"parameters": 100}).startswith(
        "the largest multiple of 5, which makes micro-batches equal, that the dataset has;"
    )


def test_batch_of_all_samples(tmp_path: Path) -> None:
    run = pg.train(BLOCKS.replace(batch="fit"), "serial", memory="1GB", runs=tmp_path)
    assert run.header["job"]["batch"] == 96
    assert next(line["because"] for line in run.choices if line["what"] == "batch").startswith(
        "all samples of the dataset"
    )


def test_batch_search_avoids_batches_of_one_for_batch_norm(tmp_path: Path) -> None:
    """The search finds a batch for a model with batch norm.

    Earlier, it was refused, because the small batches that it tries leave a last batch of one
    sample. The batch that it finds must not leave one.
    """
    norm = make_job(
        "norm",
        lambda: nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
        TensorDataset(draw_numbers(97, 40, seed=1), draw_integers(4, 97, seed=2)),
        batch="fit",
        epochs=1,
    )
    run = pg.train(norm, "serial", memory="1GB", runs=tmp_path / "all", limit=2)
    assert run.header["job"]["batch"] == 97
    run = pg.train(norm, "data(2)", memory="1GB", runs=tmp_path / "even", limit=2)
    assert run.header["job"]["batch"] == 94, "96 leaves one sample"
    assert "whose epochs end with an allowed batch, of which" in next(
        line["because"] for line in run.choices if line["what"] == "batch"
    )


def test_run_with_a_found_batch_resumes_with_it(tmp_path: Path) -> None:
    job = BLOCKS.replace(batch="fit", epochs=2)
    before = pg.train(job, "serial", memory="300KB", runs=tmp_path, save=1, limit=2)
    after = pg.train(job, "serial", memory="300KB", runs=tmp_path, resume=before.folder, limit=3)
    assert after.header["job"]["batch"] == before.header["job"]["batch"] < 96
    assert next(line["because"] for line in after.choices if line["what"] == "batch").startswith(
        "that of "
    )


def test_memory_drawing_names_the_ranks_of_the_larger_replica() -> None:
    result = CliRunner().invoke(
        app,
        ["draw", "--memory", "--job", "digits", "data(2, shares=[1, 3]) * pipeline(2, micro=2)"],
    )
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[-2:]] == ["2", "3"]
    assert "\n2 | F0" in result.stdout


def test_draw_memory(tmp_path: Path) -> None:
    words = ["draw", "--memory", "--job", "digits", "pipeline(2, micro=2, cut=[2, 1])"]
    result = CliRunner().invoke(app, [*words, "--svg", str(tmp_path / "memory.svg")])
    assert result.exit_code == 0, result.output
    assert "0 | F0 F1 B0 B1\n  | " in result.stdout
    assert any("█" in line for line in result.stdout.splitlines() if line.startswith("  | "))
    assert "activations, predicted" in result.stdout
    assert (tmp_path / "memory.svg").read_text().startswith("<svg")


def test_record_of_a_divided_model_has_the_activations(tmp_path: Path) -> None:
    """The record of a divided model contains its activations. Earlier they were missing."""
    run = pg.train(BLOCKS, "pipeline(2, micro=2, cut=[12, 13])", runs=tmp_path)
    record = Record(run.folder)
    held = [record.select_lines("memory", rank)[0]["activations"] for rank in range(2)]
    assert min(held) > 0
    assert record.fullest["activations"] in held


def test_found_batch_is_trained_as_it_was_measured() -> None:
    """The strategy stays the one for which the batch was found.

    Earlier, a batch was found for data(auto). Then data(auto) was replaced by one worker with all
    threads, which holds twice as much.
    """
    checked = replace(validate_run(BLOCKS, "data(auto)"), batch_reason="as large as that")
    with Launcher(1) as ranks:
        assert choose_by_trial(ranks, checked) is checked
