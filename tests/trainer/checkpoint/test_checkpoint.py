"""Stop and resume: a checkpoint of one strategy continues under another, as without a stop."""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from equality_table import JOBS, OF_IMAGES, VECTORS, make_job, make_mlp, make_step_lr, resolve_text
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.commands.train import train_on_ranks
from paragrad.datasets.loading import separate_target
from paragrad.errors import StepFailed
from paragrad.jobs.job import Job
from paragrad.launch import Launcher
from paragrad.record.record import Record
from paragrad.report import summaries
from paragrad.report.equivalence.lockstep import list_tensor_deviations
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint import json_values, tensor_files, trainer_snapshot
from paragrad.trainer.checkpoint.checkpoint_files import (
    CHECKPOINT_FILES,
    CHECKSUM_FILE,
    SavedCheckpoint,
    compute_sha256,
    find_newest_checkpoint,
    list_checkpoint_folders,
    read_folder_step,
)
from paragrad.trainer.identity import NEW_KEYS
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation import resume_check
from paragrad.validation.inspect_job import inspect_job
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes

# 29 samples in batches of 12: three steps an epoch; step 4 is in the middle of the second
SAVED = 4


def lengthen_in_float64(job: Job) -> Job:
    return job.replace(dtype=torch.float64, epochs=4)


# name -> job: plain momentum; Adam, clipping and a scheduler; batch norm; dropout; transforms;
# groups of their own
RESUMED = {
    **{
        name: lengthen_in_float64(JOBS[name])
        for name in (
            "mlp",
            "mlp, adam, clipped, scheduled",
            "cnn with batch norm",
            "dropout",
            "frozen and unused",
            "dicts, padded, transformed",
            "lstm, tied",
        )
    },
    "two groups": lengthen_in_float64(
        make_job(
            "two groups",
            make_mlp,
            VECTORS,
            scheduler=make_step_lr,
            scheduler_every="step",
            optimizer=lambda parameters: (
                lambda each: torch.optim.AdamW(
                    [{"params": each[:2], "lr": 0.01}, {"params": each[2:], "weight_decay": 0.1}]
                )
            )(list(parameters)),
        )
    ),
}
BRANCHED = {"residual, clipped": lengthen_in_float64(OF_IMAGES["residual, clipped"])}


def run_steps(
    world: World,
    job: Job,
    chosen: Strategy,
    saved: SavedCheckpoint | None,
    first: int,
    count: int,
    folder: Path | None = None,
) -> dict[str, Tensor]:
    """Run steps first..first+count, from a checkpoint or from the start; return the state.

    If there is a folder, save a checkpoint in it.
    """
    trainer = Trainer.build_for_job(world, job, chosen)
    try:
        if saved is not None:
            trainer_snapshot.restore_snapshot(trainer.training, saved)
        order = job.make_order(job.train)
        places = [
            (step // order.steps, list(order.list_batches())[step % order.steps])
            for step in range(first, first + count)
        ]
        for fetched in trainer.iterate_batches_at(job.train, order, places):
            trainer.step(*separate_target(fetched))
        if folder is not None:
            trainer.save(folder, resume_check.build_job_identity(job, inspect_job(job)))
        return {name: tensor.clone() for name, tensor in trainer.state().items()}
    finally:
        trainer.close()


PAIRS = [
    ("data(3, reduce=ring)", "serial"),
    ("data(3, shares=[3, 1, 2])", "data(2, reduce=tree)"),
    ("serial", "data(4, reduce=butterfly)"),
    ("data(2)", "data(2)"),
]
# every other job has one pair, and each pair a job; `make table` has all combinations
MOVES = [
    pytest.param(
        name,
        *pair,
        id=f"{name}: {' to '.join(pair)}",
        marks=[] if place % (2 * len(PAIRS)) == 2 * PAIRS.index(pair) else [pytest.mark.table],
    )
    for place, name in enumerate(RESUMED)
    for pair in PAIRS
]


# divided models: each strategy to serial and back, in the middle of an epoch, and ten random pairs
IN_PARTS = (
    "place(2)",
    "pipeline(2, micro=3)",
    "pipeline(3, micro=4, schedule=gpipe, recompute=true)",
    "pipeline(2, micro=4, schedule=zero_bubble)",
    "data(2) * pipeline(2, micro=2)",
    "data(2, reduce=ring) * place(2)",
)
CUT = ("mlp, adam, clipped, scheduled", "lstm, tied", "dropout")
AMONG = random.Random(0).sample(
    list(itertools.permutations([*IN_PARTS, "data(3, reduce=ring)"], 2)), 10
)
MOVES += [
    pytest.param(
        CUT[place % len(CUT)],
        *pair,
        id=f"{CUT[place % len(CUT)]}: {' to '.join(pair)}",
        marks=[pytest.mark.table] if place % 5 else [],
    )
    for place, pair in enumerate(
        [*((each, "serial") for each in IN_PARTS), *(("serial", each) for each in IN_PARTS), *AMONG]
    )
]


# divided layers: each strategy to serial and back, in the middle of an epoch, and ten random pairs
IN_WIDTH = ("tensor(2)", "tensor(3)", "data(2) * tensor(2)", "tensor(2) * pipeline(2, micro=2)")
WIDE = random.Random(1).sample(
    [
        pair
        for pair in itertools.permutations([*IN_WIDTH, *IN_PARTS, "data(3, reduce=ring)"], 2)
        if {*pair} & {*IN_WIDTH}
    ],
    10,
)
MOVES += [
    pytest.param(
        name,
        *pair,
        id=f"{name}: {' to '.join(pair)}",
        marks=[pytest.mark.table] if place % 5 else [],
    )
    for place, (name, pair) in enumerate(
        zip(
            itertools.cycle((*CUT, "two groups")),
            [
                *((each, "serial") for each in IN_WIDTH),
                *(("serial", each) for each in IN_WIDTH),
                *WIDE,
            ],
            strict=False,
        )
    )
]


# divided images, and divided layers beside divided samples: the same kinds of pairs
PIECES = (
    "spatial(2)",
    "spatial(2, columns=2)",
    "data(2) * spatial(2)",
    "spatial(2, dense=tensor)",
    "data(3, dense=tensor)",
)
AROUND = random.Random(2).sample(
    [
        pair
        for pair in itertools.permutations([*PIECES, "tensor(2)", "place(2)", "data(2)"], 2)
        if {*pair} & {*PIECES}
    ],
    10,
)
MOVES += [
    pytest.param(
        "cnn with batch norm",
        *pair,
        id=f"images: {' to '.join(pair)}",
        marks=[pytest.mark.table] if place % 8 else [],
    )
    for place, pair in enumerate(
        [*((each, "serial") for each in PIECES), *(("serial", each) for each in PIECES), *AROUND]
    )
]


# branches: the same kinds of pairs
FORKED = ("branch(2)", "data(2) * branch(2)", "spatial(2)")
MOVES += [
    pytest.param(
        *BRANCHED,
        *pair,
        id=f"branches: {' to '.join(pair)}",
        marks=[pytest.mark.table] if place % 6 else [],
    )
    for place, pair in enumerate(itertools.permutations((*FORKED, "serial"), 2))
    if "branch" in "".join(pair)
]


# state sharded over ranks: to serial and back, and to and from other strategies
SHARDED = "data(3, state=fully_sharded)"
MOVES += [
    pytest.param(
        name,
        *pair,
        id=f"{name}: {' to '.join(pair)}",
        marks=[pytest.mark.table] if place % 4 else [],
    )
    for place, (name, pair) in enumerate(
        itertools.product(
            (
                "mlp, adam, clipped, scheduled",
                "frozen and unused",
                "cnn with batch norm",
                "lstm, tied",
                "two groups",
            ),
            (
                (SHARDED, "serial"),
                ("serial", SHARDED),
                (SHARDED, "data(2, state=fully_sharded)"),
                ("data(3, state=shared_memory)", SHARDED),
                (SHARDED, "place(2)"),
                ("place(2)", SHARDED),
            ),
        )
    )
    if "place" not in "".join(pair) or name in CUT
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "before", "after"), MOVES)
def test_checkpoint_of_one_strategy_resumes_under_another(
    pool: Launcher, tmp_path: Path, name: str, before: str, after: str
) -> None:
    """A run is saved in the middle of an epoch; its next five steps equal uninterrupted serial.

    (The steps of Adam after 4 steps differ from the first steps of Adam.)
    """
    job = {**RESUMED, **BRANCHED}[name]
    early = resolve_text(before)
    late = resolve_text(after)
    expected = run_steps(World(), job, Serial(threads=1), None, 0, SAVED + 5)
    pool.run(run_steps, job, early, None, 0, SAVED, tmp_path, size=early.size)
    found = resume_check.find_checkpoint(tmp_path, job, inspect_job(job))
    assert found.step == SAVED
    for state in pool.run(run_steps, job, late, found, SAVED, 5, size=late.size):
        assert (
            max(list_tensor_deviations(state, {key: expected[key] for key in state}).values())
            <= 1e-10
        )


def train_job(pool: Launcher, folder: Path, job: Job, text: str, **settings: object) -> pg.Run:
    folder.mkdir()
    return train_on_ranks(pool, validate_run(job, text, Settings(**settings)), folder)


def test_resumed_run_continues_losses_and_audit(pool: Launcher, tmp_path: Path) -> None:
    """A run of 6 steps is saved every 4 steps, and resumed from step 4.

    It has the losses of steps 4 and 5, and its sample count covers both runs.
    """
    job = lengthen_in_float64(JOBS["mlp"]).replace(epochs=2)
    whole = train_job(pool, tmp_path / "whole", job, "data(3)", save=4)
    steps = sorted(path.name for path in whole.folder.glob("checkpoint-*"))
    assert steps == ["checkpoint-00000004", "checkpoint-00000006"]
    shutil.rmtree(whole.folder / "checkpoint-00000006")
    half = train_job(pool, tmp_path / "resumed", job, "data(2, reduce=ring)", resume=whole.folder)
    assert half.losses == pytest.approx(whole.losses[4:], rel=1e-10)
    assert half.header["resumed"] == {"run": str(whole.folder), "step": 4}
    assert (
        half.sample_count.epochs,
        half.sample_count.seen,
        half.sample_count.twice,
        half.sample_count.missed,
    ) == (
        1,
        29,
        0,
        0,
    )
    longer = train_job(
        pool, tmp_path / "longer", job.replace(epochs=3), "serial", resume=whole.folder
    )
    assert [line["step"] for line in longer.select_lines("step")] == list(range(4, 9))


class Waves(nn.Module):
    """A model with a complex weight under two names, a complex buffer, and real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.randn(10, 6, dtype=torch.complex64))
        self.same = self.phases
        self.out = nn.Linear(6, 4)
        self.register_buffer("turn", torch.tensor(0.6 + 0.8j))

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.to(self.phases.dtype) @ self.phases * self.turn).real)


def test_complex_weights_in_float64_are_saved(tmp_path: Path) -> None:
    """Earlier, a model in complex128 was lost after its training.

    safetensors has no complex128, so saving raised "KeyError: torch.complex128".
    """
    job = lengthen_in_float64(
        make_job(
            "waves",
            Waves,
            VECTORS,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        )
    )
    straight = pg.train(job, "data(2)", runs=tmp_path)
    half = pg.train(job.replace(epochs=2), "data(2, reduce=ring)", save=4, runs=tmp_path)
    on = pg.train(job, "serial", resume=half.folder, runs=tmp_path)
    expected = straight.model().state_dict()
    found = on.model().state_dict()
    for name, value in expected.items():
        assert value.dtype == (torch.float64 if name.startswith("out") else torch.complex128)
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14)


def test_newest_two_checkpoints_are_kept_and_none_partial(pool: Launcher, tmp_path: Path) -> None:
    finished = train_job(pool, tmp_path / "run", JOBS["mlp"], "data(2)", save=1)
    assert sorted(path.name for path in finished.folder.iterdir()) == [
        "checkpoint-00000005",
        "checkpoint-00000006",
        "model.safetensors",
        "rank-0.jsonl",
        "rank-1.jsonl",
        "run.jsonl",
    ]


def test_epoch_is_evaluated_and_counted_once(pool: Launcher, tmp_path: Path) -> None:
    """Earlier, a run that was resumed at the end of an epoch tested that epoch again.

    It also counted the epoch's samples again. Only if the saved run ended before its test, the
    resumed run must make the test.
    """
    job = lengthen_in_float64(JOBS["mlp"]).replace(epochs=1, test=VECTORS)
    first = train_job(pool, tmp_path / "first", job, "data(2)", save=3)
    assert first.sample_count.epochs == 1
    second = train_job(
        pool, tmp_path / "second", job.replace(epochs=2), "serial", resume=first.folder
    )
    assert [line["epoch"] for line in second.select_lines("epoch")] == [1]
    assert (second.sample_count.epochs, second.sample_count.seen, second.sample_count.twice) == (
        1,
        29,
        0,
    )
    reached = train_job(
        pool,
        tmp_path / "reached",
        job.replace(epochs=2),
        "serial",
        resume=first.folder,
        until="loss=1e9",
    )
    # the first run's test was good enough
    assert (reached.select_lines("step"), reached.select_lines("epoch")) == ([], [])
    lines = (first.folder / "rank-0.jsonl").read_text().splitlines(keepends=True)
    (first.folder / "rank-0.jsonl").write_text(
        "".join(line for line in lines if '"kind":"epoch"' not in line)
    )
    third = train_job(
        pool, tmp_path / "third", job.replace(epochs=2), "serial", resume=first.folder
    )
    assert [line["epoch"] for line in third.select_lines("epoch")] == [0, 1]
    assert third.select_lines("epoch")[0]["test"]["value"] == pytest.approx(first.test, rel=1e-10)
    assert (third.sample_count.epochs, third.sample_count.twice, third.sample_count.missed) == (
        2,
        0,
        0,
    )


def test_checkpoint_is_selected_by_its_folder(tmp_path: Path) -> None:
    """Earlier, --resume RUN/checkpoint-00000002 was refused: "that folder holds no checkpoint"."""
    job = JOBS["mlp"]
    run_steps(World(), job, Serial(threads=1), None, 0, 2, tmp_path)
    run_steps(World(), job, Serial(threads=1), find_newest_checkpoint(tmp_path), 2, 1, tmp_path)
    found = resume_check.find_checkpoint(tmp_path / "checkpoint-00000002", job, inspect_job(job))
    assert (found.step, found.choice_reason, found.folder.parent) == (
        2,
        "asked for",
        tmp_path.resolve(),
    )
    assert find_newest_checkpoint(tmp_path).step == 3
    harm(tmp_path / "checkpoint-00000002" / CHECKPOINT_FILES[0], "flipped")
    with pytest.raises(
        pg.Refused, match=r"checkpoint-00000002 is damaged .*; give the folder of its run"
    ):
        find_newest_checkpoint(tmp_path / "checkpoint-00000002")


L = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], L.LRScheduler]] = {
    "LambdaLR": lambda optimizer: L.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: L.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: L.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: L.MultiStepLR(optimizer, [2, 6]),
    "ConstantLR": lambda optimizer: L.ConstantLR(optimizer, total_iters=6),
    "LinearLR": lambda optimizer: L.LinearLR(optimizer, total_iters=7),
    "ExponentialLR": lambda optimizer: L.ExponentialLR(optimizer, 0.8),
    "PolynomialLR": lambda optimizer: L.PolynomialLR(optimizer, 12, 2.0),
    "CosineAnnealingLR": lambda optimizer: L.CosineAnnealingLR(optimizer, 12),
    "CosineAnnealingWarmRestarts": lambda optimizer: L.CosineAnnealingWarmRestarts(optimizer, 3),
    "CyclicLR": lambda optimizer: L.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3),
    "OneCycleLR": lambda optimizer: L.OneCycleLR(optimizer, 0.2, total_steps=12),
    "SequentialLR": lambda optimizer: L.SequentialLR(
        optimizer, [L.LinearLR(optimizer, total_iters=3), L.MultiStepLR(optimizer, [2, 4])], [3]
    ),
    "ChainedScheduler": lambda optimizer: L.ChainedScheduler(
        [L.ConstantLR(optimizer, total_iters=6), L.StepLR(optimizer, 5)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_torch_scheduler_resumes_exactly(tmp_path: Path, name: str) -> None:
    """Earlier, the milestones of MultiStepLR were restored as strings.

    So the learning rate never fell again.
    """
    job = lengthen_in_float64(JOBS["mlp"]).replace(
        scheduler=SCHEDULERS[name], scheduler_every="step"
    )
    expected = run_steps(World(), job, Serial(threads=1), None, 0, SAVED + 5)
    run_steps(World(), job, Serial(threads=1), None, 0, SAVED, tmp_path)
    found = resume_check.find_checkpoint(tmp_path, job, inspect_job(job))
    state = run_steps(World(), job, Serial(threads=1), found, SAVED, 5)
    assert max(list_tensor_deviations(state, expected).values()) <= 1e-12


OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_torch_optimizer_resumes_exactly(tmp_path: Path, name: str) -> None:
    """The resumed training is equal bit for bit.

    State in float32 (NAdam's product) stays in float32. A learning rate that is a tensor stays a
    tensor.
    """
    job = lengthen_in_float64(JOBS["mlp"]).replace(
        scheduler=SCHEDULERS["MultiStepLR"],
        scheduler_every="step",
        optimizer=lambda parameters: getattr(torch.optim, name)(
            parameters, lr=torch.tensor(0.01, dtype=torch.float64) if name == "Adam" else 0.01
        ),
    )
    expected = run_steps(World(), job, Serial(threads=1), None, 0, SAVED + 5)
    run_steps(World(), job, Serial(threads=1), None, 0, SAVED, tmp_path)
    state = run_steps(World(), job, Serial(threads=1), find_newest_checkpoint(tmp_path), SAVED, 5)
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_full_disk_is_reported_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors raises its own error; earlier, the message had no file and no repair."""

    def fail_with_full_disk(*_: object) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(tensor_files, "save_file", fail_with_full_disk)
    with pytest.raises(
        OSError, match=r"No space left on device: '.*partial/optimizer\.safetensors'"
    ):
        run_steps(World(), JOBS["mlp"], Serial(threads=1), None, 0, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_of_another_training_is_not_mixed(tmp_path: Path) -> None:
    """Earlier, a second training could save into the folder of a longer one.

    Its checkpoints were deleted at once, as the older ones.
    """
    job = JOBS["mlp"]
    run_steps(World(), job, Serial(threads=1), None, 0, 6, tmp_path)
    with pytest.raises(
        StepFailed,
        match="checkpoint-00000006 exists, and is of a later step: another training was saved in",
    ):
        run_steps(World(), job, Serial(threads=1), None, 0, 2, tmp_path)
    held = os.open(tmp_path, os.O_RDONLY)
    # as by another training that saves there at this moment
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(
        StepFailed, match=f"another training is saving in {tmp_path}; give each a folder of its own"
    ):
        run_steps(World(), job, Serial(threads=1), None, 0, 8, tmp_path)
    os.close(held)
    # a damaged checkpoint need not be kept
    harm(tmp_path / "checkpoint-00000006" / CHECKPOINT_FILES[0], "flipped")
    run_steps(World(), job, Serial(threads=1), None, 0, 2, tmp_path)
    assert find_newest_checkpoint(tmp_path).step == 2


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.parametrize(
    "damage",
    ["flipped", *(pytest.param(how, marks=pytest.mark.table) for how in ("cut", "removed"))],
)
def test_damaged_checkpoint_is_named_and_the_previous_used(
    pool: Launcher, tmp_path: Path, name: str, damage: str
) -> None:
    job = JOBS["mlp, adam, clipped, scheduled"]
    parent = train_job(pool, tmp_path / "run", job, "data(2)", save=2).folder
    harm(parent / "checkpoint-00000006" / name, damage)
    with pytest.warns(
        UserWarning, match=f"checkpoint-00000006 is damaged .{name} .*; taking the one before it"
    ):
        found = find_newest_checkpoint(parent)
    assert found.step == 4
    with pytest.warns(UserWarning, match="is damaged"):
        resumed = train_job(pool, tmp_path / "resumed", job, "serial", resume=parent)
    choice = next(line for line in resumed.choices if line["what"] == "checkpoint")
    assert choice["picked"] == "checkpoint-00000004"
    assert f"checkpoint-00000006 is damaged ({name}" in choice["because"]
    harm(parent / "checkpoint-00000004" / name, damage)
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(pg.Refused, match="no checkpoint is whole"),
    ):
        find_newest_checkpoint(parent)


def harm(path: Path, damage: str) -> None:
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(
            content[:-7] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1])
        )


class InForward(nn.Sequential):
    """A model with the same repr and class name as `make_mlp`, but with another forward."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)

    def _get_name(self) -> str:
        return "Sequential"


def make_wider_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 17), nn.Tanh(), nn.Linear(17, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": make_wider_mlp},
            r"saved with model \(0\): Linear\(in_features=10, out_features=16, .*, and job mlp has "
            r"\(0\): Linear\(",
        ),
        ({"batch": 13}, "saved with batch 12, and job mlp has 13; give --batch 12"),
        ({"seed": 6}, "saved with seed 5, and job mlp has 6; give --seed 5"),
        (
            {"optimizer": lambda parameters: torch.optim.Adam(parameters)},
            "saved with optimizer SGD, and job mlp has Adam",
        ),
        (
            {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9)},
            "saved with lr of group 0 0.1, and",
        ),
        (
            {"scheduler": make_step_lr, "scheduler_every": "step"},
            "saved with scheduler None, and job mlp has StepLR",
        ),
        ({"clip_norm": 1.0}, "saved with clip_norm None, and job mlp has 1.0"),
        ({"epochs": 0}, "has finished 3 steps, and job mlp has only 0; give more --epochs"),
        ({"dtype": torch.float64}, "saved with dtype float32"),
        ({"name": "other"}, "resume it as it was"),
        (
            {"model": lambda: nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))},
            r"saved with model \(1\): Tanh\(\), and job mlp has \(1\): ReLU\(\); resume it as it "
            r"was",
        ),
        (
            {"model": lambda: InForward()},
            r"whose loss before training was \d.*: other data, other transforms, or another "
            r"forward",
        ),
        (
            {"loss": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)},
            "saved with loss cross_entropy, and job mlp has cross_entropy, label_smoothing=0.1",
        ),
        (
            {"train": TensorDataset(VECTORS.tensors[0] + 0.1, VECTORS.tensors[1])},
            "whose loss before training was",
        ),
        (
            {
                "model": lambda: nn.Sequential(
                    nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4), nn.Dropout(0.1)
                )
            },
            r"saved with model nothing more, and job mlp has \(3\): Dropout",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_another_job_is_refused(
    pool: Launcher, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    parent = train_job(
        pool, tmp_path / "run", JOBS["mlp"].replace(epochs=1), "serial", save=3
    ).folder
    with pytest.raises(pg.Refused, match=message):
        validate_run(JOBS["mlp"].replace(**changes), "serial", Settings(resume=parent))
    with pytest.raises(
        pg.Refused, match="holds no checkpoint; give the folder of a run that was saved"
    ):
        validate_run(JOBS["mlp"], "serial", Settings(resume=tmp_path))


def edit_checkpoint(
    folder: Path,
    change: Callable[[dict[str, Any]], object] = lambda state: None,
    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    name: str = "model.safetensors",
) -> None:
    """Change a checkpoint, and compute its checksums again."""
    state = json.loads((folder / "state.json").read_text())
    if tensors is not None:
        save_file(tensors(load_file(folder / name)), folder / name)
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    (folder / CHECKSUM_FILE).write_text(
        "".join(f"{compute_sha256(folder / each)}  {each}\n" for each in CHECKPOINT_FILES)
    )


def convert_to_float32(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in tensors.items()}


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "step -5": (
        lambda folder: edit_checkpoint(folder, lambda state: state.update(step=-5)),
        "state.json is of step -5",
    ),
    "half a step": (
        lambda folder: edit_checkpoint(folder, lambda state: state.update(step=2.5)),
        "state.json has 2.5 as step",
    ),
    "another step": (
        lambda folder: edit_checkpoint(folder, lambda state: state.update(step=1)),
        "state.json is of step 1",
    ),
    "no step": (
        lambda folder: edit_checkpoint(folder, lambda state: state.pop("step")),
        "KeyError: 'step'",
    ),
    "a list": (
        lambda folder: (folder / "state.json").write_text("[]"),
        "state.json does not match",
    ),
    "groups": (
        lambda folder: edit_checkpoint(folder, lambda state: state["optimizer"].update(groups=3)),
        "has 3 as optimizer's groups",
    ),
    "no lr": (
        lambda folder: edit_checkpoint(
            folder, lambda state: state["optimizer"]["groups"][0].pop("lr")
        ),
        "has no lr of group 0 of the optimizer",
    ),
    "lr of letters": (
        lambda folder: edit_checkpoint(
            folder, lambda state: state["optimizer"]["groups"][0].update(lr="high")
        ),
        "has 'high' as lr of group 0 of the optimizer, which must be a number",
    ),
    "float32": (
        lambda folder: edit_checkpoint(folder, tensors=convert_to_float32),
        "model.safetensors holds other tensors than were saved",
    ),
    "state in part": (
        lambda folder: edit_checkpoint(
            folder, tensors=lambda own: dict(list(own.items())[1:]), name="optimizer.safetensors"
        ),
        "optimizer.safetensors holds other tensors",
    ),
    "no state": (
        lambda folder: edit_checkpoint(
            folder, tensors=lambda own: {}, name="optimizer.safetensors"
        ),
        "optimizer.safetensors holds other tensors",
    ),
    "strange": (
        lambda folder: edit_checkpoint(
            folder,
            lambda state: (
                state.pop("tensors"),
                state["optimizer"]["scalars"].update(nobody={"step": 3}),
            ),
        ),
        "KeyError: 'nobody'",
    ),
    "a fifo": (
        lambda folder: ((folder / CHECKSUM_FILE).unlink(), os.mkfifo(folder / CHECKSUM_FILE)),
        "SHA256SUMS is missing",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_checkpoint_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    """An edited checkpoint, whose checksums were computed again, is refused in one sentence.

    Earlier, twelve edits raised raw errors, five were accepted silently, and the reader waited for
    a FIFO.
    """
    job = JOBS["mlp, adam, clipped, scheduled"].replace(dtype=torch.float64)
    run_steps(World(), job, Serial(threads=1), None, 0, 3, tmp_path)
    edit, message = EDITS[name]
    edit(tmp_path / "checkpoint-00000003")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(pg.Refused, match=re.escape(message)):
            resume_check.find_checkpoint(tmp_path, job, inspect_job(job))


def test_steps_of_more_than_eight_digits(tmp_path: Path) -> None:
    """Earlier, folders were sorted as text, so saving failed at step 100,000,000.

    That step was taken for an earlier one than 99,999,999.
    """
    trainer = Trainer.build_for_job(World(), JOBS["mlp"], Serial(threads=1))
    for step in (99_999_999, 100_000_000, 100_000_001):
        trainer.training.state.move_to(step)
        trainer.save(tmp_path, {})
    trainer.close()
    assert find_newest_checkpoint(tmp_path).step == 100_000_001
    assert [read_folder_step(folder) for folder in list_checkpoint_folders(tmp_path)] == [
        100_000_001,
        100_000_000,
    ]


def test_checkpoints_of_earlier_versions_resume(tmp_path: Path) -> None:
    """Checkpoints of earlier versions do not describe model, loss and tensors."""
    job = JOBS["mlp"]
    run_steps(World(), job, Serial(threads=1), None, 0, 3, tmp_path)

    def remove_new_keys(state: dict[str, Any]) -> None:
        del state["tensors"]
        for name in NEW_KEYS:
            del state["identity"][name]

    edit_checkpoint(tmp_path / "checkpoint-00000003", remove_new_keys)
    assert resume_check.find_checkpoint(tmp_path, job, inspect_job(job)).step == 3


STOPPED = """
import os, signal, sys
import paragrad as pg, torch
from torch import nn
from torch.utils.data import Dataset

class Points(Dataset):
    '''At its 100th sample it asks the launcher to stop.'''
    seen = 0

    def __init__(self):
        # which makes it; ranks get what it made, though they run this file too
        self.launcher = os.getpid()

    def __len__(self):
        return 60

    def __getitem__(self, index):
        Points.seen += 1
        if Points.seen == 100 and os.environ.get("STOPS"):
            os.kill(self.launcher if os.environ["STOPS"] == "launcher" else os.getppid(),
                    signal.SIGTERM)
        return torch.full((10,), index / 60, dtype=torch.float64), index % 4

job = pg.Job(name="points", model=lambda: nn.Linear(10, 4), loss=nn.functional.cross_entropy,
        train=Points(), batch=12,
             optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
                     epochs=20, dtype=torch.float64)
"""


@pytest.mark.story
def test_sigterm_saves_exits_0_and_the_run_resumes(tmp_path: Path) -> None:
    """The launcher is asked to stop while its ranks train; both ranks stop after the same step.

    The resumed run ends as if it had never stopped.
    """
    job = tmp_path / "points.py"
    job.write_text(STOPPED)
    command = [
        sys.executable,
        "-m",
        "paragrad",
        "train",
        str(job),
        "--json",
        "--runs",
        str(tmp_path / "runs"),
    ]
    first = subprocess.run(
        [*command, "--strategy", "data(2, reduce=ring)"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "STOPS": "launcher"},
    )
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    record = Record(Path(told["folder"]))
    assert record.end["status"] == "stopped"  # type: ignore[index]
    steps = len(record.select_lines("step"))
    assert 0 < steps < 100
    assert len(record.select_lines("step", rank=1)) == steps
    assert told["stopped_at"] == steps
    assert "--strategy 'data(2, reduce=ring)'" in told["go_on_with"]
    assert told["go_on_with"].endswith(f"--resume {record.folder}")
    second = subprocess.run(
        told["go_on_with"],
        shell=True,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "STOPS"},
    )
    assert second.returncode == 0, second.stderr
    whole = subprocess.run([*command], capture_output=True, text=True, timeout=100, check=False)
    assert json.loads(second.stdout)["loss"] == pytest.approx(
        json.loads(whole.stdout)["loss"], rel=1e-10
    )
    assert json.loads(second.stdout)["audit"]["missed"] == 0


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            "paragrad train digits --strategy 'data(2)' --epochs 7 --runs 'my runs'",
            "paragrad train digits --strategy 'data(2)' --epochs 7 --runs 'my runs' --data there "
            "--resume runs/new",
        ),
        (
            "paragrad train --resume runs/old digits --data=here",
            "paragrad train digits --data=here --resume runs/new",
        ),
        (
            "paragrad train digits --resume=runs/old --data here",
            "paragrad train digits --data here --resume runs/new",
        ),
        ("./paragrad train digits", "./paragrad train digits --data there --resume runs/new"),
    ],
)
def test_resume_advice_repeats_the_typed_command(
    typed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, the advice `go on with --resume RUN` left out --strategy, --epochs and all else.

    So the advised command was another training.
    """
    monkeypatch.setattr("shutil.which", lambda name: None)
    # PARAGRAD_DATA=there
    assert (
        summaries.format_resume_command(shlex.split(typed), Path("runs/new"), "there") == expected
    )


def test_command_line_is_reconstructed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", {"paragrad": "/bin/paragrad", "python": sys.executable}.get)
    assert summaries.format_program_call("/bin/paragrad") == ["paragrad"]
    assert summaries.format_program_call("/opt/paragrad") == ["/opt/paragrad"]
    assert summaries.format_program_call("/lib/paragrad/__main__.py") == [
        "python",
        "-m",
        "paragrad",
    ]


@pytest.mark.table
def test_sigterm_under_torchrun(tmp_path: Path) -> None:
    """torchrun passes SIGTERM on to its ranks, which save and stop at the same step."""
    job = tmp_path / "points.py"
    job.write_text(STOPPED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "paragrad",
        "train",
        str(job),
        "--strategy",
        "data(2)",
        "--runs",
        str(tmp_path / "runs"),
    ]
    subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "STOPS": "parent"},
    )
    record = Record(next((tmp_path / "runs").iterdir()))
    assert record.end["status"] == "stopped"  # type: ignore[index]
    assert (
        find_newest_checkpoint(record.folder).step
        == len(record.select_lines("step", rank=1))
        == len(record.select_lines("step"))
    )


def test_user_loop_saves_and_loads(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for name, batches in (("whole", range(3)), ("before", range(2)), ("after", range(2, 3))):
        torch.manual_seed(0)
        model = make_mlp().double()
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
        with pg.parallelize(model, nn.functional.cross_entropy, optimizer) as trainer:
            if name == "after":
                trainer.load(tmp_path)
                assert trainer.steps == 2
            data = trainer.batches(VECTORS, batch=12, epoch=0, start=batches.start)
            losses[name] = [trainer.step(*next(data)).loss for _ in batches]
            if name == "before":
                trainer.save(tmp_path)
    assert losses["whole"] == pytest.approx(losses["before"] + losses["after"], rel=1e-12)


class Finer(torch.optim.SGD):
    """An optimizer that sums gradients in float64, whatever the type of its parameters is."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("sum", torch.zeros_like(parameter, dtype=torch.float64)).add_(
                parameter.grad.double()
            )
        return super().step(closure)


def test_state_finer_than_its_parameter_is_restored(tmp_path: Path) -> None:
    """Earlier, a state that is finer than its parameter lost digits.

    torch casts it to the type of the parameter, and it was cast back only after that.
    """
    sums = []
    for loads in (False, True):
        torch.manual_seed(0)
        model = make_mlp().float()
        optimizer = Finer(model.parameters(), lr=0.01)
        with pg.parallelize(model, nn.functional.cross_entropy, optimizer) as trainer:
            if loads:
                trainer.load(tmp_path)
            else:
                data = trainer.batches(VECTORS, batch=12, epoch=0)
                for _ in range(2):
                    inputs, target = next(data)
                    trainer.step(inputs.float(), target)
                trainer.save(tmp_path)
            sums.append([optimizer.state[each]["sum"].clone() for each in model.parameters()])
    assert all(torch.equal(before, after) for before, after in zip(*sums, strict=True))
    assert any((each != each.float().double()).any() for each in sums[0])


def test_saving_keeps_unrelated_files_of_the_folder(tmp_path: Path) -> None:
    """Earlier, every file that ended in .partial was removed.

    Such a file may be a download in progress, or the trace of another command.
    """
    for name in ("dataset.zip.partial", "trace.json.partial", "checkpoint-00000001.partial"):
        (tmp_path / name).write_text("half")
    model = make_mlp()
    with pg.parallelize(
        model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.01)
    ) as trainer:
        trainer.save(tmp_path)
    assert {path.name for path in tmp_path.glob("*.partial")} == {
        "dataset.zip.partial",
        "trace.json.partial",
    }


def test_mapping_that_cannot_be_restored_is_refused_on_save() -> None:
    assert json_values.decode_json_value(
        json.loads(json.dumps(json_values.encode_json_value({3: 0.1})))
    ) == {3: 0.1}
    with pytest.raises(StepFailed, match="a checkpoint cannot hold a mappingproxy"):
        json_values.encode_json_value(MappingProxyType({3: 0.1}))


def test_signal_handlers_are_unchanged_outside_of_training() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_shared_batch_norm_is_loaded(tmp_path: Path) -> None:
    """A batch norm that a model uses in two places is loaded.

    Earlier, torch filled in its count under the second name, which the file does not have.
    """

    def build() -> nn.Module:
        norm = nn.BatchNorm1d(10)
        return nn.Sequential(norm, nn.Linear(10, 10), norm, nn.Linear(10, 4))

    run = pg.train(make_job("shared", build, VECTORS), "serial", runs=tmp_path)
    assert int(run.model()[0].num_batches_tracked) > 0  # type: ignore[index, union-attr]
