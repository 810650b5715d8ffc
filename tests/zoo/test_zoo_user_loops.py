"""The loops of user_loops.py give the same parameters under torchrun as on one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from user_loops import LOOPS, NEEDS
from zoo_libraries import find_missing
from zoo_rows import BOUND

pytestmark = pytest.mark.zoo

SCRIPT = Path(__file__).parent / "user_loops.py"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
# its norms compute in float32 also if the model is float64, and gradients of shares round
# differently
IN_FLOAT32 = ("t5, few labels",)
FLOAT32_BOUND = 1e-6
SAMPLE = ("samples dropped in the loop", "gan")


def run_python(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.table) for name in LOOPS],
)
def test_user_loop_on_two_workers_equals_one(name: str, tmp_path: Path) -> None:
    if absent := find_missing(*NEEDS.get(name, ())):
        pytest.skip(f"{', '.join(absent)} is not installed (make zoo)")
    run_python(str(SCRIPT), name, str(tmp_path / "one"))
    run_python(*TORCHRUN, str(SCRIPT), name, str(tmp_path / "two"))
    alone = torch.load(tmp_path / "one-0")
    for rank in range(2):
        state = torch.load(tmp_path / f"two-{rank}")
        assert state.keys() == alone.keys()
        worst = max(
            float((state[each] - value).abs().max()) / max(float(value.abs().max()), 1e-6)
            for each, value in alone.items()
            if value.numel()
        )
        bound = FLOAT32_BOUND if name in IN_FLOAT32 else BOUND
        assert worst <= bound, f"rank {rank}: {worst:.1e}"
