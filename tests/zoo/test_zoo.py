"""Every row of the zoo is the same training as serial, or gets one message before any harm.

Each row runs under ten strategies, rows on images under an eleventh, rows of optimizers under four.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from all_rows import ALL_ROWS, LIBRARY_WARNINGS, ROWS
from equality_table import call_with_small_tensors_compressed
from models_page import Line
from tensor_outcomes import IN_WIDTH, OF_IMAGES
from zoo_libraries import find_missing
from zoo_rows import (
    BOUND,
    COMPRESSED,
    IN_PARTS,
    SERVER,
    SERVERS,
    SPATIAL,
    STRATEGIES,
    TENSOR,
    Equal,
    Refused,
    Row,
)

import paragrad as pg
from paragrad.launch import Launcher

pytestmark = [pytest.mark.zoo, *LIBRARY_WARNINGS]

WITH_IMAGES = [row for row in ROWS if row.name in OF_IMAGES]
CELLS = [(row, strategy) for row in ALL_ROWS for strategy in row.under] + [
    (row, SPATIAL) for row in WITH_IMAGES
]


def select_covering_cells() -> list[tuple[Row, str]]:
    """Return every row with one strategy, in turn, and some rows on images with `spatial`.

    Every strategy gets rows of every file.
    """
    return [
        *((row, row.under[place % len(row.under)]) for place, row in enumerate(ALL_ROWS)),
        *((row, SPATIAL) for row in WITH_IMAGES[::7]),
    ]


def select_part() -> list[tuple[Row, str]]:
    """Return every seventh row of each strategy in `covering`, for which CI has time."""
    return [
        cell
        for each in (*STRATEGIES, SERVERS, SPATIAL)
        for cell in [cell for cell in select_covering_cells() if cell[1] == each][::7]
    ]


def list_cells() -> list[object]:
    """Return all pairs of row and strategy; those outside of `part` belong to the table."""
    sample = select_part()
    return [
        pytest.param(
            row,
            strategy,
            id=f"{row.name}-{strategy}",
            marks=[] if (row, strategy) in sample else pytest.mark.table,
        )
        for row, strategy in CELLS
    ]


def make_line(
    row: Row, strategy: str, expected: bool, verdict: str, certificate: object = None
) -> Line:
    difference, twin = (getattr(certificate, name, None) for name in ("difference", "twin"))
    return Line(row.name, strategy, difference, twin, verdict, expected)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("row", "strategy"), list_cells())
def test_row_is_as_expected(
    row: Row,
    strategy: str,
    note: Callable[[Line], None],
    tmp_path: Path,
    pool: Launcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if absent := find_missing(*row.needs):
        pytest.skip(f"{', '.join(absent)} is not installed (make zoo)")
    if strategy == COMPRESSED:
        run = pool.run
        monkeypatch.setattr(
            pool,
            "run",
            lambda function, *arguments, **more: run(
                functools.partial(call_with_small_tensors_compressed, function), *arguments, **more
            ),
        )
    expected = row.find_outcome(strategy)
    found = (
        verify_row(row, strategy, expected, tmp_path)
        if isinstance(expected, Equal)
        else train_refused_row(row, strategy, expected, tmp_path)
    )
    note(found)
    assert found.expected, found.verdict


def verify_row(row: Row, strategy: str, expected: Equal, folder: Path) -> Line:
    """Run `verify` for a row, and return the line of the page."""
    try:
        certificate = pg.verify(row.job(), strategy, runs=folder)
    except (pg.Refused, pg.RankFailed) as error:
        return make_line(row, strategy, False, f"{type(error).__name__}: {error}")
    if not certificate.same:
        where = certificate.failure or f"{certificate.tensor}, first {certificate.first}"
        return make_line(row, strategy, False, f"not the same: {where}", certificate)
    assert certificate.difference is not None
    if certificate.difference > BOUND and not expected.twin:
        return make_line(
            row, strategy, False, "same by the twin's bound alone; 1e-10 was expected", certificate
        )
    return make_line(
        row,
        strategy,
        True,
        "same" if certificate.difference <= BOUND else f"same ({expected.twin})",
        certificate,
    )


def train_refused_row(row: Row, strategy: str, expected: Refused, folder: Path) -> Line:
    """Run `train` for a row, and return the line of the page.

    It must end with one message, and without a step in its record.
    """
    try:
        run = pg.train(row.job(), strategy, runs=folder)
    except (pg.Refused, pg.RankFailed) as error:
        said = str(error)
    else:
        if expected.by_cut and "are one worker's" in (run.first_step or ""):
            ours, serial = (
                each.model().state_dict() for each in (run, pg.train(row.job(), runs=folder))
            )
            counts = all(
                torch.equal(ours[name], each)
                for name, each in serial.items()
                if not each.is_floating_point()
            )
            return make_line(
                row,
                strategy,
                counts,
                "same; refused where the cut falls otherwise",
            )
        return make_line(row, strategy, False, "trained without a word")
    assert "Traceback" not in said
    lines = [
        json.loads(text)
        for record in folder.rglob("*.jsonl")
        for text in record.read_text().splitlines()
    ]
    trained = any(told["kind"] == "step" for told in lines)
    right = (
        re.search(expected.match, said.removeprefix(f"job {row.name}: ")) is not None
        and not trained
    )
    return make_line(
        row, strategy, right, ("trained, then " if trained else "") + f"refused: {said}"
    )


def test_zoo_is_large_with_unique_names() -> None:
    assert len(ROWS) >= 60
    assert len({row.name for row in ALL_ROWS}) == len(ALL_ROWS)
    assert all(row.story for row in ALL_ROWS)


def test_zoo_sample_covers_rows_and_strategies() -> None:
    assert {row.name for row, _ in select_covering_cells()} == {row.name for row in ALL_ROWS}
    every = {*STRATEGIES, SERVERS, SPATIAL}
    assert (
        {strategy for _, strategy in select_covering_cells()}
        == {strategy for _, strategy in select_part()}
        == every
    )


HAD = (
    "gpt2",
    "bert",
    "llama",
    "t5",
    "resnet of transformers",
    "resnet18",
    "timm resnet",
    "vit of transformers",
    "vit of torchvision",
    "timm vit",
    "vgg with batch norm",
    "small inception",
    "nanoGPT as it is written",
    "LSTM language model",
    "encoder with a mask in its batch",
)


def test_common_models_are_trained_in_stages() -> None:
    rows = {row.name: row for row in ROWS}
    assert all(row.under[-5:] == (*IN_PARTS, TENSOR, SERVER, COMPRESSED) for row in ROWS)
    assert [name for name in HAD if not {*IN_PARTS, TENSOR} <= {*rows[name].equal}] == []
    assert {*IN_WIDTH, *OF_IMAGES} <= {*rows}
    for strategy in (*IN_PARTS, TENSOR):
        assert sum(strategy in row.equal for row in ROWS) >= len(ROWS) / 2
