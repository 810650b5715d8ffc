"""breakpoint() in user code: a debugger under serial, one sentence under other strategies."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.story]

JOB = """
import good
from good import Net

class Stops(Net):
    def forward(self, x):
        answer = 6 * 7
        if self.training and len(x) in {sizes}:
            {call}
        return super().forward(x)

job = good.job.replace(name="stops", model=Stops, epochs=1)
"""
JOB_FILES = Path(__file__).parents[1] / "helpers" / "job_files"


# sizes of the last batch of an epoch, and of its half
LAST = (22, 11)


def start_train(
    folder: Path, call: str, *words: str, sizes: tuple[int, ...] = LAST, **streams: int
) -> subprocess.Popen[bytes]:
    job = folder / "stops.py"
    job.write_text(JOB.format(call=call, sizes=sizes))
    return subprocess.Popen(
        [sys.executable, "-m", "paragrad", "train", str(job), "--runs", str(folder), *words],
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{JOB_FILES}"},
        **streams,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("call", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_debugger_under_serial_reads_standard_input(call: str, tmp_path: Path) -> None:
    """Earlier, two debuggers read from one terminal, and then one batch raised BdbQuit."""
    pipe = subprocess.PIPE
    with start_train(tmp_path, call, stdin=pipe, stdout=pipe, stderr=pipe) as running:
        out, errors = running.communicate(b"p 'it is', answer\nc\n", timeout=60)
    assert running.returncode == 0, errors
    assert b"('it is', 42)" in errors
    assert b"test accuracy" in out


def test_debugger_under_serial_takes_the_terminal(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        try:
            os._exit(start_train(tmp_path, "breakpoint()").wait())
        finally:
            os._exit(9)
    shown = b""
    while b"(Pdb)" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"p 'it is', answer\n")
    while b"('it is', 42)" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"c\n")
    try:
        while True:
            shown += os.read(terminal, 4096)
    except OSError:  # the last process has closed the terminal
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    assert b"test accuracy" in shown
    os.close(terminal)


@pytest.mark.parametrize("strategy", ["data(2)", "pipeline(2, micro=2)"])
@pytest.mark.parametrize(("sizes", "code"), [(LAST, 1), (tuple(range(1, 33)), 2)])
def test_breakpoint_is_refused_under_several_ranks(
    sizes: tuple[int, ...], code: int, strategy: str, tmp_path: Path
) -> None:
    """If the first batch reaches the breakpoint, the refusal comes before any rank starts."""
    pipe = subprocess.PIPE
    words = ["--strategy", strategy]
    with start_train(
        tmp_path, "breakpoint()", *words, sizes=sizes, stdin=pipe, stdout=pipe, stderr=pipe
    ) as running:
        _, errors = running.communicate(timeout=60)
    last = errors.decode().splitlines()[-1]
    assert running.returncode == code
    assert "breakpoint() stops one of 2 ranks, and others wait for it; debug under serial" in last
