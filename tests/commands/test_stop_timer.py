"""SIGTERM and Ctrl-C end a run within 10 s, for any line that its ranks execute."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paragrad.launch.launcher import find_user_line

pytestmark = pytest.mark.processes

JOB_FILES = Path(__file__).parents[1] / "helpers" / "job_files"
JOB = """
import os, signal
import good, torch.distributed as dist
from good import Net

class Hangs(Net):
    def forward(self, x):
        # in the last step of an epoch, on these ranks or on all
        here = not {ranks} or (dist.is_initialized() and dist.get_rank() in {ranks})
        if self.training and here and len(x) in (22, 11):
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_IGN)
            with open(os.environ["BEGUN"], "w") as fifo:
                fifo.write("here")
            while True:
                signal.pause()
        return super().forward(x)

job = good.job.replace(name="hangs", model=Hangs, epochs=50)
"""


def run_until_stopped(
    folder: Path, strategy: str, sent: signal.Signals, ranks: tuple[int, ...]
) -> tuple[int, str]:
    """Send a signal when a rank hangs; return the exit code and the last line."""
    job = folder / "hangs.py"
    job.write_text(JOB.format(ranks=ranks))
    fifo = folder / "begun"
    os.mkfifo(fifo)
    words = [sys.executable, "-m", "paragrad", "train", str(job), "--runs", str(folder / "runs")]
    environment = {
        **os.environ,
        "BEGUN": str(fifo),
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{JOB_FILES}",
    }
    with subprocess.Popen(
        [*words, "--strategy", strategy], stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        fifo.read_text()
        running.send_signal(sent)
        _, errors = running.communicate(timeout=60)
        return running.returncode, errors.splitlines()[-1]


@pytest.mark.story
@pytest.mark.parametrize(
    ("strategy", "sent", "ranks"),
    [
        ("serial", signal.SIGTERM, ()),
        ("data(2)", signal.SIGTERM, (1,)),  # the other one waits in a collective
        ("data(2)", signal.SIGINT, (1,)),
        pytest.param("pipeline(2, micro=2)", signal.SIGTERM, (1,), marks=pytest.mark.table),
        pytest.param("server(2)", signal.SIGTERM, (1,), marks=pytest.mark.table),
        pytest.param("server(2, sync=asp)", signal.SIGTERM, (), marks=pytest.mark.table),
    ],
)
def test_stop_ends_a_run_that_hangs(
    strategy: str, sent: signal.Signals, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """A stop ends a run whose user code hangs and ignores signals.

    Earlier, the run never ended. SIGKILL was the only way to end it.
    """
    code, last = run_until_stopped(tmp_path, strategy, sent, ranks)
    assert code == 1
    assert "the run was asked to stop, and made no progress for 7 s; its ranks were killed" in last
    assert f"is at {tmp_path / 'hangs.py'}:" in last


def test_innermost_line_of_user_code_is_found() -> None:
    own = Path(find_user_line.__code__.co_filename)
    stacks = f"""Thread 0x0 (most recent call first):
  File "{own}", line 3 in wait
Current thread 0x1 (most recent call first):
  File "{own}", line 7 in run
  File "/home/me/model.py", line 12 in forward
  File "/home/me/train.py", line 40 in main
"""
    assert find_user_line(stacks) == "/home/me/model.py:12"
    assert find_user_line(stacks.replace("/home/me", str(own.parent))) == ""
