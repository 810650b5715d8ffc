"""The time from a command, or from a call in a script, to the end of the first training step of the
job `digits`.

| figure (seconds; medians, differences and ratios round by round)                      | bar          |
|---------------------------------------------------------------------------------------|--------------|
| command, 2 ranks after serial                                                         | at most 0.5  |
| command, 4 ranks after serial                                                         | at most 1.0  |
| script, first step of the second call, 2 ranks                                        | at most 0.3  |
| command, serial; 2 and 4 ranks over torchrun with plain DDP; script, first call       | (no bar)     |

The commands are `python -m paragrad train digits`, and `torchrun` with `start_up_ddp.py`, which has
the same data, model, batch and optimizer. In a round each command runs once. This program measures
all times from outside, by the files that the commands write.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common import Bench, differences, measure_in_turn, ratios

LIMIT = 120.0  # seconds for a command
LOOK = 0.002  # seconds between two checks of a file
HERE = Path(__file__).parent

# a script with two calls; it prints the time before each call
SCRIPT = textwrap.dedent("""
    import sys, time
    import paragrad as pg
    if __name__ == "__main__":
        for folder in sys.argv[3:]:
            print(time.monotonic(), flush=True)
            pg.train(pg.job("digits").replace(epochs=1), sys.argv[1], backend=sys.argv[2], runs=folder)
""")


def has_first_step(folder: Path) -> bool:
    """Return whether a run below the folder has recorded its first step. The peer writes a file of
    the same name.
    """
    return any(b'"step"' in path.read_bytes() for path in folder.glob("*/rank-0.jsonl"))


def watch_command(words: Sequence[str], folders: Sequence[Path]) -> tuple[float, list[float], str]:
    """Run a command to its end, and return when it was started, when the first step in each folder
    was done, and the output.
    """
    begun = time.monotonic()
    seen = []
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=HERE
        ) as running,
    ):
        while running.poll() is None:
            if len(seen) < len(folders) and has_first_step(folders[len(seen)]):
                seen.append(time.monotonic())
            if time.monotonic() - begun > LIMIT:
                running.kill()
            # polling treats torchrun and paragrad alike: both are seen only by their files
            time.sleep(LOOK)
        output.seek(0)
        printed = output.read()
    if running.returncode or len(seen) < len(folders):
        raise SystemExit(f"{' '.join(words)} ended with {running.returncode}\n{printed}")
    return begun, seen, printed


def make_command_measure(*words: str) -> Callable[[], float]:
    """Return a function that measures the seconds from a command to its first step. The last word
    of the command is a folder.
    """

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            begun, (first,), _ = watch_command(
                [sys.executable, "-m", *words, folder], [Path(folder)]
            )
            return first - begun

    return measure


def make_training_measure(strategy: str, backend: str) -> Callable[[], float]:
    return make_command_measure(
        "paragrad",
        "train",
        "digits",
        "--strategy",
        strategy,
        "--backend",
        backend,
        "--epochs",
        "1",
        "--runs",
    )


def make_torchrun_measure(workers: int) -> Callable[[], float]:
    return make_command_measure(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
        str(HERE / "start_up_ddp.py"),
    )


def measure_calls(strategy: str, backend: str) -> tuple[float, float]:
    """Run a script with two calls, and return the seconds from each call to its first step."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name) for name in ("first", "second")]
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        _, seen, printed = watch_command(
            [sys.executable, str(script), strategy, backend, *map(str, folders)], folders
        )
        called = [float(line) for line in printed.splitlines() if line.replace(".", "").isdigit()]
    first, second = (step - call for step, call in zip(seen, called, strict=True))
    return first, second


def main() -> None:
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--backend", default="auto", help="backend of the ranks of paragrad")

    bench = Bench(__doc__, add_options)
    rounds = bench.rounds(7, quick=2)
    # torchrun sets this variable itself, and paragrad divides the cores over its ranks
    os.environ.pop("OMP_NUM_THREADS", None)
    second: dict[int, list[float]] = {2: [], 4: []}

    def make_script_measure(workers: int) -> Callable[[], float]:
        def measure() -> float:
            first, again = measure_calls(f"data({workers})", bench.options.backend)
            second[workers].append(again)
            return first

        return measure

    times = measure_in_turn(
        {
            "serial": make_training_measure("serial", bench.options.backend),
            **{
                f"data({workers})": make_training_measure(f"data({workers})", bench.options.backend)
                for workers in (2, 4)
            },
            **{f"torchrun {workers}": make_torchrun_measure(workers) for workers in (2, 4)},
            **{f"script {workers}": make_script_measure(workers) for workers in (2, 4)},
        },
        rounds,
    )
    bench.measured = {
        **times,
        "script, second call": {str(workers): found for workers, found in second.items()},
    }
    bench.figure("command, serial", times["serial"])
    for workers, bar in ((2, 0.5), (4, 1.0)):
        found = times[f"data({workers})"]
        bench.figure(f"command, {workers} ranks", found)
        bench.figure(
            f"command, {workers} ranks after serial",
            differences(found, times["serial"]),
            at_most=bar,
        )
        bench.figure(
            f"command, {workers} ranks over torchrun", ratios(found, times[f"torchrun {workers}"])
        )
    for workers, bar in ((2, 0.3), (4, None)):
        bench.figure(f"script, first call, {workers} ranks", times[f"script {workers}"])
        bench.figure(f"script, second call, {workers} ranks", second[workers], at_most=bar)
    bench.finish()


if __name__ == "__main__":
    main()
