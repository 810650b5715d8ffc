"""Code that all benchmarks share: options, facts about the machine, alternating measurements, and
figures with their bars (goals).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

KB = 1 << 10
MB = 1 << 20
# steps are timed in groups of so many, if there are more than so many groups
GROUP_STEPS, LEAST_GROUPS = 16, 9


def format_size(size: int) -> str:
    """Return a number of bytes as text, such as "4 MB"."""
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def describe_machine() -> dict[str, Any]:
    """Return the facts that are written with every figure: day, commit, processor, cores, load,
    and versions.
    """
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(
        (line.split(":", 1)[1].strip() for line in info if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "day": date.today().isoformat(),
        "commit": read_commit(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def read_commit() -> str:
    """Return the commit of the measured code, with a + if the code has uncommitted changes."""

    def run_git(*words: str) -> str:
        if shutil.which("git") is None:
            return ""
        return subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()

    return (run_git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if run_git("status", "--short", "src", "benchmarks") else ""
    )


def measure_in_turn(
    measures: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run every measure once in each round, so that a disturbance of the machine affects all alike.

    A measure may also affect the next one. Therefore each round has a random order of its own,
    which is the same in every run of the program.
    """
    found: dict[str, list[float]] = {name: [] for name in measures}
    shuffled = random.Random(0)
    for number in range(rounds):
        for name in shuffled.sample(list(measures), len(measures)):
            found[name].append(measures[name]())
            print(
                f"round {number + 1} of {rounds}: {name} {found[name][-1]:.4g}",
                file=sys.stderr,
                flush=True,
            )
    return found


def compute_step_milliseconds(starts: list[float]) -> float:
    """Return the median time from step to step, in milliseconds. The first three steps are
    warm-up and do not count.

    Of many steps, the median is over groups of steps that follow each other: some work, such as
    loading small batches, is done for several steps at once.
    """
    starts = starts[3:]
    group = GROUP_STEPS if len(starts) > LEAST_GROUPS * GROUP_STEPS else 1
    return (
        1e3
        / group
        * median(later - earlier for earlier, later in itertools.pairwise(starts[::group]))
    )


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    """Return ours minus theirs for each round."""
    return [our - their for our, their in zip(ours, theirs, strict=True)]


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Return ours divided by theirs for each round."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]


class Bench:
    """One run of a benchmark: its options, its measurements, and its figures with their bars.

    bench = Bench(__doc__)
    times = measure_in_turn({"ours": ..., "theirs": ...}, rounds=3 if bench.quick else 15)
    bench.figure("ours over theirs", ratios(times["ours"], times["theirs"]), at_most=0.9)
    bench.finish()
    """

    def __init__(
        self, about: str | None, options: Callable[[argparse.ArgumentParser], Any] | None = None
    ) -> None:
        """Parse the options.

        about: the docstring of the file, whose table gives the bars.
        options: a function that adds the benchmark's own options to the parser.
        """
        parser = argparse.ArgumentParser(
            description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "--check", action="store_true", help="exit with code 1 if a figure misses its goal"
        )
        parser.add_argument("--quick", action="store_true", help="measure a smaller sample")
        parser.add_argument(
            "--rounds",
            type=int,
            metavar="N",
            help="number of rounds; each round measures everything once",
        )
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="write all measurements to FILE"
        )
        if options:
            options(parser)
        self.options = parser.parse_args()
        self.quick: bool = self.options.quick
        self.machine = describe_machine()
        if self.machine["load"] > 0.5:
            print(
                f"warning: the load average is {self.machine['load']}: if other programs run, times "
                "vary",
                file=sys.stderr,
            )
        self.figures: dict[str, dict[str, Any]] = {}
        self.measured: dict[str, Any] = {}

    def rounds(self, usual: int, quick: int) -> int:
        """Return the number of rounds: --rounds, if given, otherwise `quick` or `usual`."""
        found: int = self.options.rounds or (quick if self.quick else usual)
        return found

    def figure(
        self,
        name: str,
        value: float | list[float],
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Store a figure and its bar. If the value is a list, the figure is its median, and the
        list is stored too.
        """
        sample = value if isinstance(value, list) else [value]
        self.figures[name] = {
            "value": median(sample),
            "lowest": min(sample),
            "highest": max(sample),
            "sample": sample,
            "at_most": at_most,
            "at_least": at_least,
        }

    def list_missed_bars(self) -> list[str]:
        """Return a sentence for each figure that misses its bar."""
        return [
            f"{name} is {found['value']:.4g}, the goal is {word} {bar:.4g}"
            for name, found in self.figures.items()
            for word, bar, wrong in (
                ("at most", found["at_most"], lambda value, bar: not value <= bar),
                ("at least", found["at_least"], lambda value, bar: not value >= bar),
            )
            if bar is not None and wrong(found["value"], bar)
        ]

    def keep(self, path: Path) -> None:
        """Write all measurements to a file. Absolute paths in the command are shortened to their
        last part, because they are valid on this machine only.
        """
        words = [
            word
            if not (place := Path(word)).is_absolute()
            else "DIR"
            if place.is_dir()
            else f"DIR/{place.name}"
            for word in sys.argv
        ]
        path.write_text(
            json.dumps(
                {
                    "command": " ".join(["python", *words]),
                    "quick": self.quick,
                    "machine": self.machine,
                    "figures": self.figures,
                    "measured": self.measured,
                },
                indent=1,
            )
            + "\n"
        )

    def finish(self) -> None:
        """Print machine and figures, write the file, and exit.

        The exit code is 1 if a figure misses its bar under --check, otherwise 0.
        """
        if self.options.json:
            self.keep(self.options.json)
        short = self.list_missed_bars()
        print("machine: " + ", ".join(f"{name} {value}" for name, value in self.machine.items()))
        for name, found in self.figures.items():
            if len(found["sample"]) > 1:
                print(
                    f"{name}: median {found['value']:.4g}, {found['lowest']:.4g} to "
                    f"{found['highest']:.4g}, of {len(found['sample'])}"
                )
        for line in short:
            print(f"falls short: {line}")
        for name, found in self.figures.items():
            print(f"figure: {name} = {found['value']:.4g}")
        sys.exit(1 if short and self.options.check else 0)
