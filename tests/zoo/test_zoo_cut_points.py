"""Models of other libraries train as on one worker when cut in two at any possible place.

The place of a cut depends on measured times, so it differs from run to run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from all_rows import LIBRARY_WARNINGS, ROWS, STEPS, build_job
from first_step_assertions import assert_proved
from zoo_rows import IN_PARTS, Row

from paragrad.datasets.loading import clone_batch, convert_batch, separate_target
from paragrad.jobs.job import CPU, open_dataset
from paragrad.jobs.loss import call_model
from paragrad.parallel.tracing.cut_points import find_cut_points

pytestmark = [pytest.mark.zoo, *LIBRARY_WARNINGS]


@pytest.mark.table
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in ROWS if set(IN_PARTS) & set(row.equal)]
)
def test_model_is_equal_at_every_cut_point(row: Row, tmp_path: Path) -> None:
    made = build_job(row)
    model = made.build_model()
    inputs, _ = separate_target(
        convert_batch(
            made.make_samples(open_dataset(made.train, None))[0, list(range(12))],
            CPU,
            made.parameter_dtype,
        )
    )
    with torch.autocast("cpu", made.autocast, enabled=made.autocast is not None):
        call_model(model, clone_batch(inputs))  # lazy modules get their parameters
        units = find_cut_points(model, inputs, stage_count=2).work
    wrong = {}
    for first, (unit, _) in enumerate(list(units)[1:], start=1):
        strategy = f"place(2, cut=[{first}, {len(units) - first}])"
        try:
            assert_proved(made, strategy, made.seed, made.dtype, tmp_path / str(first), limit=STEPS)
        except Exception as error:
            wrong[unit] = str(error)
    assert not wrong, "\n".join(f"before {unit}: {told}" for unit, told in wrong.items())
