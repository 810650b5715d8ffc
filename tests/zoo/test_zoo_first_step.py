"""Correct jobs of other libraries pass the first-step check, with every seed and dtype.

Together with paragrad's own jobs (`tests/trainer/checks/test_first_step.py`), they are more than
40. `make zoo` runs all of them, CI a covering sample.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from all_rows import LIBRARY_WARNINGS, ROWS, STEPS, build_job
from equality_table import JOBS
from equality_table import ROWS as LAYOUTS
from first_step_assertions import DTYPES, SEEDS, assert_proved
from zoo_rows import IN_PARTS, STRATEGIES, TENSOR, Equal, Row

import paragrad as pg

pytestmark = [pytest.mark.zoo, *LIBRARY_WARNINGS]

# on one host, `data(2)` uses shared memory; the others have an all-reduce, uneven shares,
# micro-batches, or uneven micro-batches
UNDER = (*STRATEGIES, LAYOUTS["uneven shares and micro-batches"](3))

# rows of every file, with everything that can matter in a first step: draws, batch norm, padding,
# ignored labels, weights, recomputed parts, several means, numbers of another dtype than the
# job's; rows that only have an unusual update are left out
NAMES = (
    "gpt2",
    "bert, masking collator",
    "t5, few labels",
    "llama, few labels",
    "mixtral",
    "mixtral, grouped products",
    "vit of transformers, dropout",
    "resnet of transformers",
    "timm vit, every dropout",
    "timm vit, dropped patches",
    "timm BatchNormAct2d, SiLU",
    "timm efficientnet, DropPath",
    "timm convnext, DropPath",
    "vgg with batch norm",
    "densenet, recomputed",
    "swin",
    "small inception",
    "segmentation with its auxiliary head",
    "TransformerEncoder, sequence first",
    "LSTM with dropout",
    "dropout on padded sequences",
    "multinomial",
    "checkpoint, attention",
    "nanoGPT, a mask of -inf",
    "graph network",
    "mixture of experts",
    "dice over the batch",
    "forces",
    "complex first parameter",
    "constants in float32",
    "mean over padding",
    "rare ignored targets in a function",
    "-100 by hand",
    "own mean, dropped samples",
    "mixup",
    "ctc",
)
# dtypes in which a model runs under no strategy, with torch's message
CANNOT: dict[tuple[str, torch.dtype], str] = {
    (
        "mixtral, grouped products",
        torch.float64,
    ): "Expected mat_a to be Float32, BFloat16 or Float16 matrix",
    (
        "constants in float32",
        torch.float64,
    ): "expected m1 and m2 to have the same dtype, but got: double != float",
    (
        "mixture of experts",
        torch.bfloat16,
    ): r"index_add_\(\): self \(Float\) and source \(BFloat16\) must have the same",
}

RIGHT = [row for row in ROWS if row.name in NAMES]
CELLS = [(row, dtype) for row in RIGHT for dtype in DTYPES if (row.name, dtype) not in CANNOT]
SAMPLE = CELLS[::7]  # rows of every file, with each dtype in turn


def choose_strategy(row: Row, seed: int) -> str:
    """Return a strategy for a row and a seed; strategies take turns, and each row begins elsewhere.

    A row that equals serial under fewer strategies (the zoo gives the reason) uses only these.
    """
    known = UNDER if row.equal == STRATEGIES else row.equal
    return known[(RIGHT.index(row) + seed) % len(known)]


def name_cells(cells: list[tuple[Row, torch.dtype]]) -> list[object]:
    return [pytest.param(*cell, id=f"{cell[0].name}, {cell[1]}") for cell in cells]


@pytest.mark.table
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("row", "dtype"), name_cells(CELLS))
def test_first_step_check_passes(row: Row, dtype: torch.dtype, tmp_path: Path) -> None:
    for seed in SEEDS:
        assert_proved(
            build_job(row), choose_strategy(row, seed), seed, dtype, tmp_path, limit=STEPS
        )


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("row", "dtype"), name_cells(SAMPLE))
def test_first_step_check_passes_brief(row: Row, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each row is checked with one seed; the seeds take turns."""
    seed = (RIGHT.index(row) + 1) % len(SEEDS)
    assert_proved(build_job(row), choose_strategy(row, seed), seed, dtype, tmp_path, limit=STEPS)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("name", "dtype"), CANNOT)
def test_unsupported_dtype_has_a_reason(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A dtype that the table leaves out fails on one worker, too, not only under a strategy.

    So the table leaves out nothing for another reason.
    """
    (row,) = (row for row in RIGHT if row.name == name)
    for strategy in ("serial", choose_strategy(row, 0)):
        with pytest.raises((pg.Refused, pg.RankFailed), match=CANNOT[name, dtype]):
            pg.train(build_job(row).replace(dtype=dtype), strategy, runs=tmp_path, limit=1)


def test_enough_jobs_under_every_strategy() -> None:
    assert sorted(row.name for row in RIGHT) == sorted(NAMES)
    assert all(isinstance(row.expected, Equal) for row in RIGHT)
    assert len({*NAMES, *JOBS}) >= 40
    assert {choose_strategy(row, seed) for row in RIGHT for seed in SEEDS} == set(UNDER)
    assert {dtype for _, dtype in SAMPLE} == set(DTYPES)


def list_trained_cells() -> list[object]:
    """Return every row with one strategy in turn; in the table, with all that divide the model."""
    cells = []
    for place, row in enumerate(ROWS):
        turn = row.equal[place % len(row.equal)] if row.equal else None
        sample = turn if place % (3 if turn in (*IN_PARTS, TENSOR) else 8) == 0 else None
        cells += [
            pytest.param(
                row,
                each,
                id=f"{row.name}-{each}",
                marks=() if each == sample else pytest.mark.table,
            )
            for each in row.equal
            if each == turn or each in (*IN_PARTS, TENSOR)
        ]
    return cells


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("row", "strategy"), list_trained_cells())
def test_every_equal_row_is_trained(row: Row, strategy: str, tmp_path: Path) -> None:
    """Rows that `verify` finds equal also pass the first-step check, which `verify` does not run.

    The check inspects the model, restores it, and judges by rounding.
    """
    made = build_job(row)
    assert_proved(made, strategy, made.seed, made.dtype, tmp_path, limit=STEPS)
