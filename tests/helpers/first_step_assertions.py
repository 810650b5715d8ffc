"""Assert that the first-step check runs and never ends a correct job.

The tests of paragrad's own jobs and those of the zoo use this.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad import Job

LSTM_IN_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
NO_LSTM = "this processor has no AVX-512, without which torch has no LSTM in bfloat16"
SEEDS = range(5)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def assert_proved(
    job: Job, strategy: str, seed: int, dtype: torch.dtype, runs: Path, limit: int | None = None
) -> None:
    """Train an epoch, or `limit` steps of it, and assert that the first step is one worker's.

    A check that fails ends the run with an exception. A run that continues without the check
    ("not checked", for any reason) fails here.
    """
    has_lstm = any(isinstance(each, nn.LSTM) for each in job.build_model().modules())
    if has_lstm and dtype == torch.bfloat16 and not LSTM_IN_BFLOAT16:
        pytest.skip(NO_LSTM)
    run = pg.train(job.replace(dtype=dtype, seed=seed, epochs=1), strategy, runs=runs, limit=limit)
    unproved = [
        f"{line['picked']}: {line['because']}"
        for line in run.select_lines("choice")
        if line["what"] == "first step"
    ]
    assert not unproved, f"{strategy}, seed {seed}: {unproved}"
    told = run.select_lines("event")
    assert {event["name"] for event in told} == {"checked"}, told
    assert told[0]["numbers"]["step"] == 0
