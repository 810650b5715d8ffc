"""The cost of the first-step check and of keyed random draws; and whether later steps are as fast
as in another commit.

| figure | bar |
|---|---|
| time added before the first update under data(2), in serial steps of one thread: every job | at most 1.5 |
| step with keyed draws / with torch's own, three layers with dropout: 256 features | at most 1.10 |
| ... 1,024 features | at most 1.03 |
| with --against: a step's time / that of the other checkout: every job and strategy | at most 1.03, or its spread |

The time of a training from its call to its first update consists of the validation before the ranks
start, and of the ranks' first step. "Time added" is this time minus the same time with
skip_first_step_check=True. With --against DIR, a checkout of another commit, it is this time minus
the time of that checkout. Then it includes the validation.

Everything is measured in processes that take turns. In each process, the first training is warm-up.
The spread is the largest ratio of a round of the other checkout to the median of its rounds, or the
reverse. GPT-2 has dropout, whose random draws differ, so its steps are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Bench, ratios
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.commands.train import train_on_ranks
from paragrad.launch import Launcher
from paragrad.record.record import Record
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import validate_run

JOBS = ("digits", "mnist-mlp", "mnist-cnn", "gpt2 of 4 layers")
REPEATS = 5  # first steps in one process; their median counts
STEPS = 60  # steps of a training whose steps are timed
# GPT-2 comes from the package transformers, in the dependency group `zoo`
ZOO = Path(__file__).parent.parent / "tests" / "zoo"
STRATEGIES = ("serial(threads=1)", "data(2)")


def build_gpt2() -> nn.Module:
    from zoo_libraries import foreign

    library = foreign("transformers")
    return library.GPT2LMHeadModel(
        library.GPT2Config(vocab_size=1000, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    )


def make_job(name: str, data: str | None = None) -> pg.Job:
    """Return a job by its name. Jobs of MNIST have 1,024 samples in memory, because reading the
    files would take ten times as long as the measured time.
    """
    if name.startswith("mnist"):
        made = pg.job(name)
        images, labels = made.train(Path(data) if data else None)[list(range(1024))]
        return made.replace(train=TensorDataset(images, labels), test=None)
    if not name.startswith("gpt2"):
        return pg.job(name)
    tokens = torch.randint(1000, (512, 64), generator=torch.Generator().manual_seed(0))

    class Lines(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(tokens)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": tokens[index], "labels": tokens[index]}

    # a plain mean over all labels, which is the same in both checkouts
    def loss(output: Any, batch: Any) -> Any:
        return functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )

    return pg.Job(
        name="gpt2",
        model=build_gpt2,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train=Lines(),
        batch=16,
        epochs=1,
    )


def measure_jobs(data: str | None, quick: bool) -> dict[str, Any]:
    """Measure each job, and return its seconds: from the call to the first update, with and without
    the check, and of later steps under each strategy.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Launcher(2) as ranks:
        for name in JOBS[:2] if quick else JOBS:
            made = make_job(name, data)
            numbers: dict[str, Any] = {"first": []}
            if hasattr(Settings, "skip_first_step_check"):
                numbers["unchecked"] = []
            for number in range(REPEATS + 1):
                for kind in [key for key in numbers if key != "steps"]:
                    more = {"skip_first_step_check": True} if kind == "unchecked" else {}
                    place = Path(folder, f"{name}-{kind}-{number}".replace(" ", "-"))
                    place.mkdir()
                    begun = time.monotonic()
                    train_on_ranks(
                        ranks,
                        validate_run(made, "data(2)", Settings(data=data, limit=1, **more)),
                        place,
                    )
                    numbers[kind].append(time.monotonic() - begun)
            found[name] = {kind: statistics.median(each[1:]) for kind, each in numbers.items()}
            for strategy in STRATEGIES:
                place = Path(folder, f"{name}-{strategy}".replace(" ", "-"))
                place.mkdir()
                train_on_ranks(
                    ranks,
                    validate_run(
                        made.replace(epochs=10), strategy, Settings(data=data, limit=STEPS)
                    ),
                    place,
                )
                found[name][strategy] = Record(place).seconds_per_step
    return found


def measure_checkout(source: Path, data: str | None, quick: bool) -> dict[str, Any]:
    """Run `measure_jobs` in a separate process, with the code of a checkout."""
    words = [
        sys.executable,
        __file__,
        "--one",
        *(["--data", data] if data else []),
        *(["--quick"] if quick else []),
    ]
    result = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": f"{source / 'src'}:{ZOO}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def make_draw_measures(features: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return two functions that measure a serial step in milliseconds: with keyed draws, and with
    torch's own.
    """
    layers = [
        nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)
    ]
    data = TensorDataset(torch.randn(64, features), torch.randint(features, (64,)))
    made = pg.Job(
        name="draws",
        model=lambda: nn.Sequential(*layers),
        loss=functional.cross_entropy,
        train=data,
        batch=64,
        epochs=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    trainer = Trainer.build_for_job(World(), made, Serial(threads=1))
    steps = 400 * 256 // features

    def measure(keyed: bool) -> float:
        taken = []
        for epoch in range(steps):
            for fetched in trainer.batches(data, 64, epoch):
                begun = time.perf_counter()
                trainer.step(*fetched)
                taken.append(time.perf_counter() - begun)
                if epoch == 0:
                    seen.setdefault("draws", trainer.training.setup.draws)
                    draws = seen["draws"] if keyed else type(seen["draws"])()
                    trainer.training.setup = replace(trainer.training.setup, draws=draws)
        return 1e3 * statistics.median(taken[1:])

    seen: dict[str, Any] = {}
    measure(True)
    return lambda: measure(True), lambda: measure(False)


def main() -> None:
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", metavar="DIR", help="folder with MNIST")
        parser.add_argument(
            "--against",
            type=Path,
            metavar="DIR",
            help="compare with this checkout of another commit",
        )
        parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)

    bench = Bench(__doc__, add_options)
    data = bench.options.data
    quick = bench.quick
    against = bench.options.against
    if bench.options.one:
        print(json.dumps(measure_jobs(data, quick)))
        return
    torch.set_num_threads(1)
    here = Path(__file__).parent.parent
    ours = []
    theirs = []
    for number in range(bench.rounds(5, quick=2)):
        ours.append(measure_checkout(here, data, quick))
        if against:
            theirs.append(measure_checkout(against.resolve(), data, quick))
        print(f"round {number + 1}: {ours[-1]}", file=sys.stderr, flush=True)
    bench.measured = {"here": ours, "against": theirs}
    for name in ours[0]:
        before = [each[name]["first"] for each in theirs] or [
            each[name]["unchecked"] for each in ours
        ]
        added = [
            (mine[name]["first"] - other) / mine[name]["serial(threads=1)"]
            for mine, other in zip(ours, before, strict=True)
        ]
        bench.figure(f"added before the first update, in serial steps: {name}", added, at_most=1.5)
        proof = [
            (each[name]["first"] - each[name]["unchecked"]) / each[name]["serial(threads=1)"]
            for each in ours
        ]
        bench.figure(f"... of it the proof: {name}", proof)
        for strategy in STRATEGIES if theirs and not name.startswith("gpt2") else ():
            old = [each[name][strategy] for each in theirs]
            spread = max(max(old) / statistics.median(old), statistics.median(old) / min(old))
            bench.figure(
                f"step / the other checkout's: {name}, {strategy}",
                ratios([each[name][strategy] for each in ours], old),
                at_most=max(1.03, spread),
            )
    for features, bar in ((256, 1.10), (1024, 1.03)):
        keyed, own = make_draw_measures(features)
        pairs = [(keyed(), own()) for _ in range(bench.rounds(15, quick=5))]
        bench.measured[f"draws, {features} features [ms]"] = pairs
        bench.figure(
            f"keyed draws / torch's own: {features} features",
            [one / other for one, other in pairs],
            at_most=bar,
        )
    bench.finish()


if __name__ == "__main__":
    main()
