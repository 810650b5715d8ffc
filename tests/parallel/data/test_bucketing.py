"""Buckets of an exchange: their number for a small model, and their times in the record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from equality_table import VECTORS, make_job
from torch import nn

import paragrad as pg
from paragrad.commands.train import train_on_ranks
from paragrad.launch import Launcher
from paragrad.record.record import Line, Record
from paragrad.trainer.settings import Settings
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes


def make_model_below_a_megabyte(dtype: torch.dtype) -> nn.Module:
    width = 600 if dtype == torch.float32 else 290
    model = nn.Sequential(
        nn.Linear(10, 400), nn.ReLU(), nn.Linear(400, width), nn.ReLU(), nn.Linear(width, 4)
    ).to(dtype)
    assert 950_000 < sum(parameter.nbytes for parameter in model.parameters()) < 1_000_000
    return model


def record_exchange_spans(
    pool: Launcher, folder: Path, text: str, dtype: torch.dtype = torch.float32
) -> list[Line]:
    """Train for some steps, and return the exchange's spans of rank 1."""
    job: pg.Job = make_job("small", lambda: make_model_below_a_megabyte(dtype), VECTORS).replace(
        dtype=dtype
    )
    train_on_ranks(pool, validate_run(job, text, Settings()), folder)
    record = Record(folder)
    assert len(record.select_lines("step", rank=1)) > 3
    return [
        span for span in record.select_lines("span", rank=1) if span["name"].startswith("reduce")
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduce", ["ring", "ring(reproducible=true)", "native"])
def test_gradients_below_a_megabyte_share_one_bucket(
    pool: Launcher, tmp_path: Path, reduce: str, dtype: torch.dtype
) -> None:
    """All gradients share one bucket in every step, also after DDP has rebuilt its buckets.

    Weight and loss have the gradients' type, and are sent with them.
    """
    found = record_exchange_spans(pool, tmp_path, f"data(2, reduce={reduce})", dtype)
    sends = [span for span in found if span["lane"] == "send"]
    assert {span["name"] for span in sends} == {"reduce 0"}
    assert set(Counter(span["step"] for span in sends).values()) == {1}


@pytest.mark.parametrize("reduce", ["ring", "star(reproducible=true)"])
def test_record_splits_the_time_of_an_exchange(pool: Launcher, tmp_path: Path, reduce: str) -> None:
    """The record splits the time of an exchange into three parts, one after the other.

    They are the wait for late ranks, the messages, and the rest.
    """
    found = record_exchange_spans(pool, tmp_path, f"data(3, reduce={reduce})")
    for step in {span["step"] for span in found}:
        whole, *parts = [span for span in found if span["step"] == step]
        assert [part["lane"] for part in parts] == ["wait", "receive", "compute"]
        assert {part["bytes"] for part in parts} == {None}
        start = whole["start"]
        for part in parts:
            # the precision of the record
            assert part["start"] == pytest.approx(start, abs=2e-6)
            start += part["seconds"]
        assert start <= whole["start"] + whole["seconds"] + 4e-6
    total = Counter[bool]()
    for span in found:
        total[span["lane"] == "send"] += span["seconds"]
    assert total[False] > 0.5 * total[True]


def test_backend_all_reduce_has_no_time_split(pool: Launcher, tmp_path: Path) -> None:
    assert {
        span["lane"] for span in record_exchange_spans(pool, tmp_path, "data(2, reduce=native)")
    } == {"send"}
