"""Jobs of other libraries in a federated training: the result is the same with any worker count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from all_rows import LIBRARY_WARNINGS, ROWS
from zoo_libraries import find_missing

import paragrad as pg
from paragrad.engine.state.values import is_same_value
from paragrad.record.record import Record

pytestmark = [pytest.mark.zoo, *LIBRARY_WARNINGS]

# rows with state that should be a client's own; earlier, it was that of another client or of a
# worker: draws of every kind, also in a collate, statistics, counters, modes of an optimizer,
# dtypes, and values that are no numbers
NAMES = (
    "mobilenet",
    "bert, masking collator",
    "mixtral",
    "layer drop",
    "schedule-free AdamW",
    "compiled",
    "SyncBatchNorm",
    "python's random in forward",
    "nanoGPT, a mask of -inf",
    "accumulation by hand",
    "weights of samples",
    "ignored targets that come late",
    "bfloat16 first parameter",
    "timm resnet, DropBlock",
    "lr as a tensor",
)
CLIENTS = [row for row in ROWS if row.name in NAMES]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[] if place % 5 == 0 else pytest.mark.table)
        for place, row in enumerate(CLIENTS)
    ],
)
def test_federated_on_one_worker_equals_two(row: object, tmp_path: Path) -> None:
    if absent := find_missing(*row.needs):  # type: ignore[attr-defined]
        pytest.skip(f"{', '.join(absent)} is not installed (make zoo)")
    made = row.job().replace(epochs=1, test=None, metric=None, dtype=torch.float64)
    found = []
    for workers in (1, 2):
        run = pg.train(
            made, f"federated({workers}, clients=3, fraction=1.0, rounds=2)", runs=tmp_path
        )
        assert all(line["lost"] == [] for line in Record(run.folder).select_lines("epoch"))
        found.append(run.model().state_dict())
    for name, one in found[0].items():
        other = found[1][name]
        assert is_same_value(one, other) or torch.allclose(
            one.double(), other.double(), rtol=1e-9, atol=1e-10
        ), name


def test_listed_federated_rows_exist() -> None:
    assert len(CLIENTS) == len(NAMES)
