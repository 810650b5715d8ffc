"""All rows of the zoo, and values that its test files share."""

from __future__ import annotations

import optimizer_jobs
import pytest
import random_draw_jobs
import refused_jobs
import timm_jobs
import torchvision_jobs
import training_jobs
import transformers_jobs
import unusual_jobs
from zoo_libraries import find_missing
from zoo_rows import Row

import paragrad as pg

ROWS: tuple[Row, ...] = (
    *transformers_jobs.ROWS,
    *timm_jobs.ROWS,
    *torchvision_jobs.ROWS,
    *random_draw_jobs.ROWS,
    *unusual_jobs.ROWS,
    *training_jobs.ROWS,
    *refused_jobs.ROWS,
)
# rows of optimizers have their own strategies
ALL_ROWS: tuple[Row, ...] = (*ROWS, *optimizer_jobs.ROWS)
# warnings of these libraries are not tested
LIBRARY_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:::{library}.*")
    for library in (
        "transformers",
        "timm",
        "torchvision",
        "huggingface_hub",
        "pytorch_optimizer",
        "torch",
    )
]
# the first step is checked completely; of the second, the loss is checked if its divisor is not
# known
STEPS = 2


def build_job(row: Row) -> pg.Job:
    if absent := find_missing(*row.needs):
        pytest.skip(f"{', '.join(absent)} is not installed (make zoo)")
    return row.job()
