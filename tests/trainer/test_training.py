"""Trainings from beginning to end: what they record, what they return, how they fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from equality_table import JOBS, VECTORS, draw_integers, make_job, resolve_text
from failing_models import Breaks
from first_step_assertions import LSTM_IN_BFLOAT16, NO_LSTM
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.commands import train
from paragrad.commands.train import train_on_ranks
from paragrad.datasets.loading import separate_target
from paragrad.engine.exchange import ExchangeOptions
from paragrad.errors import Refused
from paragrad.launch import Launcher
from paragrad.parallel.data.bucket_queue import BucketQueue
from paragrad.record.record import Record, read_lines
from paragrad.report.equivalence.lockstep import list_tensor_deviations
from paragrad.runtime.world import World
from paragrad.strategies.registry import resolve_strategy, strategy
from paragrad.strategies.strategy import Environment
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

DIGITS = pg.job("digits").replace(epochs=2)


def train_job(pool: Launcher, folder: Path, job: pg.Job, text: str, **settings: object) -> pg.Run:
    folder.mkdir(exist_ok=True)
    return train_on_ranks(pool, validate_run(job, text, Settings(**settings)), folder)


@pytest.mark.story
def test_digits_is_equal_under_every_strategy(pool: Launcher, tmp_path: Path) -> None:
    """Every strategy uses all samples, none twice, and reaches serial's accuracy.

    With two workers, the four algorithms are identical bit for bit.
    """
    runs = {}
    for text in (
        "serial",
        "data(2, reduce=ring)",
        "data(2, reduce=ring_async)",
        "data(2, reduce=tree)",
        "data(2, reduce=butterfly)",
        "data(3, shares=[5, 2, 1])",
        "data(4)",
    ):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs[text] = train_job(pool, folder, DIGITS, text)
    for finished in runs.values():
        audit = finished.sample_count
        assert (audit.epochs, audit.samples, audit.seen, audit.twice, audit.missed) == (
            2,
            1437,
            1437,
            0,
            0,
        )
        assert finished.end["status"] == "finished"  # type: ignore[index]
        # the difference of two digits of 360
        assert finished.test == pytest.approx(runs["serial"].test, abs=0.6)
        assert finished.losses == pytest.approx(runs["serial"].losses, rel=1e-3)
    two = [
        (finished.folder / "model.safetensors").read_bytes()
        for text, finished in runs.items()
        if "data(2" in text
    ]
    assert len(two) == 4
    assert len(set(two)) == 1


def test_model_is_returned_with_serial_names(pool: Launcher, tmp_path: Path) -> None:
    finished = train_job(pool, tmp_path, DIGITS, "data(2)")
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(DIGITS.model().state_dict())
    model = finished.model()
    inputs, target = DIGITS.test[:]
    assert finished.test == pytest.approx(
        100 * float((model(inputs).argmax(1) == target).double().mean())
    )
    assert finished.test > 85


def test_every_kind_of_record_line_has_its_fields(pool: Launcher, tmp_path: Path) -> None:
    train_job(pool, tmp_path, DIGITS, "data(2, reduce=ring)")
    fields = {
        "run": {
            "schema",
            "id",
            "date",
            "job",
            "strategy",
            "resolved",
            "exact",
            "hands_out",
            "seed",
            "workers",
            "servers",
            "backend",
            "device",
            "threads",
            "machine",
            "prediction",
            "reverse",
            "resumed",
            "settings",
            "rounds",
        },
        "step": {"epoch", "step", "start", "seconds", "loss", "order", "sent", "lr"},
        "epoch": {"epoch", "test", "start", "seconds"},
        "span": {"step", "name", "lane", "start", "seconds", "bytes", "peer"},
        "choice": {"what", "bytes", "picked", "because"},
        "event": {"name", "numbers", "message"},
        "cpu": {"host", "seconds", "own", "all", "switched"},
        "memory": {"parameters", "gradients", "optimizer", "activations", "exchange", "resident"},
        "end": {"status", "seconds", "error"},
    }
    seen = set()
    for path in tmp_path.glob("*.jsonl"):
        for line in read_lines(path):
            kind = line.pop("kind")
            assert set(line) == fields[kind]
            seen.add(kind)
    assert seen == set(fields)
    memory = Record(tmp_path).select_lines("memory", rank=1)[0]
    parameters = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert memory["parameters"] == memory["gradients"] == memory["optimizer"] == parameters
    # weight, loss, stop and doubt are exchanged as one more gradient
    assert memory["exchange"] == parameters + 16


@pytest.mark.parametrize("text", ["data(2)", "data(2, reduce=ring)"])
def test_step_record_is_below_256_bytes_per_rank(pool: Launcher, tmp_path: Path, text: str) -> None:
    """Earlier, the record grew by 2.3 KB per step: each span was a line that repeated its names."""
    finished = train_job(pool, tmp_path, DIGITS, text)
    for rank in range(2):
        steps = [
            line
            for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines(keepends=True)
            if line.startswith(('{"kind":"step"', '{"kind":"spans"'))
        ]
        assert sum(map(len, steps)) < 300 * len(finished.select_lines("step"))


def make_wide_mlp() -> nn.Module:
    """Return a model larger than DDP's first bucket (1 MB), so that there are several buckets."""
    return nn.Sequential(
        nn.Linear(10, 700),
        nn.ReLU(),
        nn.Linear(700, 700),
        nn.ReLU(),
        nn.Linear(700, 700),
        nn.ReLU(),
        nn.Linear(700, 4),
    )


class Listened(TensorDataset):
    """A dataset that writes the addresses at which its process listens, for each sample."""

    folder: Path

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        own = {
            path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        }
        rows = [
            line.split()
            for kind in ("tcp", "tcp6")
            for line in Path("/proc/self/net", kind).read_text().splitlines()[1:]
        ]
        listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
        (self.folder / f"process-{os.getpid()}").write_text(" ".join(listening))
        return super().__getitem__(index)


@pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="/proc is not there to say who listens"
)
@pytest.mark.parametrize(("backend", "ports"), [("shm", 0), ("gloo", 1)])
def test_no_rank_opens_a_port_over_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, ports: int
) -> None:
    """Earlier, schedules used gloo, which listened on the loopback, while the record said shm."""
    # the launcher of the session may still listen for an earlier test
    monkeypatch.setattr(train, "Launcher", Launcher)
    samples = Listened(torch.arange(24.0).reshape(12, 2), torch.arange(12) % 3)
    samples.folder = tmp_path
    job = pg.Job(
        name="ports",
        model=lambda: nn.Linear(2, 3),
        loss=nn.functional.cross_entropy,
        train=samples,
        batch=6,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=2,
    )
    run = pg.train(job, "data(3, reduce=ring)", runs=tmp_path / "runs", backend=backend)
    assert run.header["backend"] == backend
    told = {path.name: path.read_text().split() for path in tmp_path.glob("process-*")}
    told.pop(f"process-{os.getpid()}", None)  # validation loads a batch in this process
    assert len(told) >= 3
    assert not {
        name: addresses
        for name, addresses in told.items()
        if len(addresses) < ports or (addresses and not ports)
    }


def test_overlap_can_be_disabled_and_is_recorded(pool: Launcher, tmp_path: Path) -> None:
    """The backward of the first layer runs last.

    With overlap, the first bucket is exchanged before that backward ends. Without overlap, no
    bucket is.
    """
    for overlap in (True, False):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        finished = train_job(
            pool,
            folder,
            make_job("wide", make_wide_mlp, VECTORS, epochs=1),
            "data(2, reduce=tree)",
            overlap=overlap,
        )
        choices = {choice["what"]: choice["picked"] for choice in finished.select_lines("choice")}
        assert choices["overlap"] == ("on" if overlap else "off")
        names = {span["name"] for span in finished.select_lines("span")}
        assert {"load", "F0", "B0", "reduce 0", "reduce 1", "update"} <= names
    assert pool.run(has_exchange_during_backward, True, size=2) == [True, True]
    assert pool.run(has_exchange_during_backward, False, size=2) == [False, False]


def has_exchange_during_backward(world: World, overlap: bool) -> bool:
    """Return whether a bucket's exchange begins while backward waits in the first layer."""
    left = threading.Event()
    seen = []

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            if world_ready:
                seen.append(left.wait(10.0 if overlap else 0.2))
            return gradient

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(10, 700)
            self.rest = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(Gate.apply(self.first(x)))

    def note_exchange(queue: BucketQueue, vector: Tensor) -> int:
        left.set()
        return play(queue, vector)

    world_ready = False
    play = BucketQueue._reduce_vector  # type: ignore[method-assign]
    BucketQueue._reduce_vector = note_exchange
    try:
        trainer = Trainer.build_for_job(
            world,
            make_job("gated", Gated, VECTORS),
            resolve_strategy(strategy("data(2, reduce=tree)"), Environment()),
            exchange_options=ExchangeOptions(overlap),
        )
        batches = trainer.batches(VECTORS, batch=12, epoch=0)
        for _ in range(2):  # DDP settles its buckets in the first step; both are checked
            trainer.step(*next(batches))
        left.clear()
        world_ready = True
        trainer.step(*next(batches))
        trainer.close()
    finally:
        BucketQueue._reduce_vector = play  # type: ignore[method-assign]
    return seen == [True]


def test_non_finite_loss_names_rank_step_and_tensor(pool: Launcher, tmp_path: Path) -> None:
    with pytest.raises(pg.RankFailed) as caught:
        train_job(pool, tmp_path, make_job("breaks", Breaks, VECTORS), "data(2, reduce=ring)")
    error = caught.value
    assert error.step == 3
    assert error.tensor == "output of middle"
    assert "the loss is not finite" in str(error)
    record = Record(tmp_path)
    assert len(record.group_step_lines()) == 3  # readable up to there
    assert record.end["status"] == "failed"  # type: ignore[index]
    assert record.end["error"] == {
        "rank": error.rank,
        "step": 3,
        "tensor": "output of middle",  # type: ignore[index]
        "message": error.message,
        "traceback": error.traceback,
    }


def test_spans_of_a_failed_step_are_recorded(pool: Launcher, tmp_path: Path) -> None:
    """Earlier, the spans of a failed step were lost.

    They were written together with the line of the step, and a failed step has no line.
    """
    with pytest.raises(pg.RankFailed) as caught:
        train_job(pool, tmp_path, make_job("breaks", Breaks, VECTORS), "data(2, reduce=ring)")
    spans = Record(tmp_path).select_lines("span", caught.value.rank)  # type: ignore[arg-type]
    assert {span["name"] for span in spans if span["step"] == 2} >= {
        "load",
        "F0",
        "B0",
        "reduce 0",
        "update",
    }
    # the step failed there
    assert [span["name"] for span in spans if span["step"] == caught.value.step == 3] == [
        "load",
        "F0",
    ]


def test_non_finite_sample_is_reported_as_input(pool: Launcher, tmp_path: Path) -> None:
    inputs = VECTORS.tensors[0].clone()
    inputs[7, 3] = float("nan")
    job = JOBS["mlp"].replace(train=TensorDataset(inputs, VECTORS.tensors[1]))
    with pytest.raises(pg.RankFailed) as caught:
        train_job(pool, tmp_path, job, "data(3, reduce=tree)")
    assert caught.value.tensor == "inputs"


class WeightRunsOut:
    """A loss that returns a pair; its weight is not finite from the 60th call on.

    Validation calls it less often.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        self.calls += 1
        loss = nn.functional.cross_entropy(output, target, reduction="sum")
        return loss, len(target) if self.calls < 60 else float("inf")


@pytest.mark.parametrize("strategy", ["serial", "data(2, reduce=ring)"])
def test_non_finite_weight_is_refused(strategy: str, pool: Launcher, tmp_path: Path) -> None:
    """Earlier, under serial, gradients divided by an infinite weight were 0, without a message."""
    made = JOBS["mlp"].replace(loss=WeightRunsOut(), epochs=30)
    with pytest.raises(pg.RankFailed, match=r"the (weight of the )?loss is not finite"):
        train_job(pool, tmp_path, made, strategy, skip_first_step_check=True)


class Forgets(nn.Module):
    """A model that uses its side layer in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(10, 4)
        self.out = nn.Linear(10, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.out(x) + (self.side(x) if self.calls < 2 else 0)


def test_parameter_that_becomes_unused_is_named(pool: Launcher, tmp_path: Path) -> None:
    with pytest.raises(pg.RankFailed) as caught:
        train_job(
            pool, tmp_path, make_job("forgets", Forgets, VECTORS), "data(2, reduce=butterfly)"
        )
    assert caught.value.step == 1
    assert caught.value.tensor == "side.weight, side.bias"


def test_batch_without_counted_targets_is_refused_in_training(
    pool: Launcher, tmp_path: Path
) -> None:
    nothing = TensorDataset(VECTORS.tensors[0], torch.full((29,), -100))
    with pytest.raises(pg.RankFailed, match="its weight is 0"):
        train_job(pool, tmp_path, JOBS["mlp"].replace(train=nothing), "data(2)")


def test_ignored_targets_have_no_weight_on_any_rank(pool: Launcher, tmp_path: Path) -> None:
    """Half of the targets of the first share are ignored.

    So a mean of the ranks' means would be another training.
    """
    targets = draw_integers(4, 29, seed=9)
    targets[::3] = -100
    losses = {}
    for text in ("serial", "data(4, reduce=ring)"):
        folder = tmp_path / text[:4]
        folder.mkdir()
        job = make_job(
            "ignoring", lambda: nn.Linear(10, 4), TensorDataset(VECTORS.tensors[0], targets)
        )
        losses[text] = train_job(pool, folder, job.replace(dtype=torch.float64), text).losses
    assert losses["serial"] == pytest.approx(losses["data(4, reduce=ring)"], rel=1e-12)


def test_draws_that_depend_on_the_layout_are_refused(pool: Launcher, tmp_path: Path) -> None:
    """Earlier, such draws were recorded, and the training continued."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(10, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + torch.poisson(torch.ones_like(x)) * 0.01)

    noisy = make_job("noisy", Noisy, VECTORS)
    with pytest.raises(Refused, match="draws from torch, which differ with the number of samples"):
        validate_run(noisy, "data(2)")
    assert validate_run(noisy, "serial").inspection.probe.draws.layout_dependence
    checked = validate_run(noisy, "data(2)", Settings(skip_first_step_check=True))
    train_on_ranks(pool, checked, tmp_path)
    random = [line for line in Record(tmp_path).select_lines("choice") if line["what"] == "random"]
    assert len(random) == 1
    assert "draws from torch" in random[0]["because"]


def test_train_from_python_checks_and_compares(tmp_path: Path) -> None:
    finished = pg.train(
        DIGITS.replace(epochs=1), "data(2, reduce=tree)", runs=tmp_path, verify=True
    )
    assert str(finished.resolved) == "data(2, reduce=tree, state=replicated)"
    assert finished.difference["value"] <= 1e-10  # type: ignore[index]
    assert finished.sent_per_step == {
        "gradients": {"bytes": 4 * (64 * 64 + 64 + 64 * 10 + 10 + 4), "computed": False}
    }
    assert json.loads((finished.folder / "run.jsonl").read_text().splitlines()[0])["kind"] == "run"


def test_data_without_torchrun_is_refused() -> None:
    with pytest.raises(pg.Refused, match="at least 13"):
        pg.train(JOBS["mlp"], "data(13)")


def test_recorded_learning_rate_is_the_used_one(pool: Launcher, tmp_path: Path) -> None:
    """Earlier, the rate was read after the scheduler's step.

    So the record was one step ahead of the training.
    """
    finished = train_job(pool, tmp_path, JOBS["mlp, adam, clipped, scheduled"], "data(2)")
    assert [line["lr"] for line in finished.select_lines("step")] == pytest.approx(
        [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3]
    )


def test_messages_of_every_micro_batch_are_counted(pool: Launcher, tmp_path: Path) -> None:
    """Earlier, the count was reset at the last micro-batch.

    So the batch norm messages of the earlier micro-batches were lost.
    """
    once, twice = (
        train_job(
            pool, tmp_path / str(micro), JOBS["cnn with batch norm"], f"data(2, micro={micro})"
        ).select_lines("step")[0]["sent"]
        for micro in (1, 2)
    )
    assert twice["gradients"] == once["gradients"]
    assert twice["batch_norm"]["bytes"] == 2 * once["batch_norm"]["bytes"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "cnn with batch norm",
        pytest.param("lstm, tied", marks=pytest.mark.skipif(not LSTM_IN_BFLOAT16, reason=NO_LSTM)),
    ],
)
def test_bfloat16_computes_in_bfloat16_and_keeps_float32(pool: Launcher, name: str) -> None:
    """Autocast computes in bfloat16.

    After one step, the error against float64 is at most four times that of serial in bfloat16, or 8
    eps of bfloat16.
    """
    job = JOBS[name].replace(dtype=torch.bfloat16)
    (exact,) = pool.run(run_one_step, JOBS[name].replace(dtype=torch.float64), "serial", size=1)
    (serial,) = pool.run(run_one_step, job, "serial", size=1)
    for ours in pool.run(run_one_step, job, "data(3, reduce=ring)", size=3):
        assert {value.dtype for value in ours.values() if value.is_floating_point()} == {
            torch.float32
        }
        floor = 8 * torch.finfo(torch.bfloat16).eps
        worst = {
            who: max(
                list_tensor_deviations(
                    {key: value.double() for key, value in state.items()}, exact
                ).values()
            )
            for who, state in (("ours", ours), ("serial", serial))
        }
        assert 1e-6 < worst["ours"] <= max(floor, 4 * worst["serial"])


@pytest.mark.skipif(LSTM_IN_BFLOAT16, reason="this processor computes an LSTM in bfloat16")
def test_layer_without_bfloat16_is_refused_at_start(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        pg.Refused,
        match=r"through the model in bfloat16 \(not every processor.*dtype=torch.float32 does\)",
    ):
        pg.train(JOBS["lstm, tied"].replace(dtype=torch.bfloat16), "data(2)", runs=tmp_path)


def test_complete_training_in_bfloat16(pool: Launcher, tmp_path: Path) -> None:
    finished = train_job(pool, tmp_path, DIGITS.replace(dtype=torch.bfloat16), "data(2)")
    assert finished.header["job"]["dtype"] == "bfloat16"
    assert finished.test > 85  # type: ignore[operator]


def run_one_step(world: World, job: pg.Job, text: str) -> dict[str, Tensor]:
    trainer = Trainer.build_for_job(world, job, resolve_text(text))
    trainer.step(*separate_target(next(trainer.batches(job.train, job.batch, epoch=0))))
    trainer.close()
    return {name: value.clone() for name, value in trainer.state().items()}


def test_until_stops_every_rank_after_the_epoch_that_meets_it(
    pool: Launcher, tmp_path: Path
) -> None:
    job = pg.job("digits")
    whole = train_job(pool, tmp_path / "whole", job.replace(epochs=6), "data(2)")
    tests = [line["test"]["value"] for line in whole.select_lines("epoch")]
    goal = next(place for place, value in enumerate(tests) if value >= 90)
    told: list[dict[str, float]] = []
    (tmp_path / "short").mkdir()
    short = train_on_ranks(
        pool,
        validate_run(job.replace(epochs=6), "data(2)", Settings(until="accuracy=90")),
        tmp_path / "short",
        progress=told.append,
    )
    steps = len(short.select_lines("step"))
    # the progress bar reaches its end
    assert (told[0]["steps"], told[-1]["step"], told[-1]["steps"]) == (6 * 23, steps, steps)
    assert [line["test"]["value"] for line in short.select_lines("epoch")] == tests[: goal + 1]
    assert short.end["status"] == "finished"  # type: ignore[index]
    falling = job.replace(epochs=6, metric=None)
    losses = [
        line["test"]["value"]
        for line in train_job(
            pool, tmp_path / "falling", falling, "serial", until="loss=0.5"
        ).select_lines("epoch")
    ]
    assert losses[-1] <= 0.5 < min(losses[:-1])


def test_run_prints_its_summary(pool: Launcher, tmp_path: Path) -> None:
    """Earlier, print(run) printed <paragrad.trainer.Run object at 0x...>."""
    finished = train_job(pool, tmp_path / "run", DIGITS.replace(epochs=1), "data(2)")
    assert str(finished) == repr(finished)
    assert re.fullmatch(
        rf"Run of digits under data\(2\): finished, 23 steps, last loss \d\.\d{{4}}, test accuracy "
        rf"\d+\.\d\d, "
        rf"\d+\.\d\d ms per step, in {tmp_path / 'run'}",
        str(finished),
    )
    lines = (tmp_path / "run" / "run.jsonl").read_text()
    (tmp_path / "run" / "run.jsonl").write_text(
        lines.replace('"status":"finished"', '"status":"stopped"')
    )
    (tmp_path / "run" / "checkpoint-00000023").mkdir()
    assert f"stopped at step 23, continue with resume='{tmp_path / 'run'}'" in str(
        pg.Run(DIGITS, tmp_path / "run")
    )


def test_event_files_equal_the_record(pool: Launcher, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished = train_job(pool, tmp_path, DIGITS, "data(2)", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.value for each in events.Scalars("loss")] == pytest.approx(
        finished.losses, rel=1e-5
    )
    assert [each.step for each in events.Scalars("loss")] == list(range(1, 47))
    assert events.Scalars("test accuracy")[-1].value == pytest.approx(finished.test)
    assert [each.value for each in events.Scalars("lr")] == pytest.approx([0.1] * 46)


def test_saved_model_loads_without_paragrad(pool: Launcher, tmp_path: Path) -> None:
    """As the README shows it: a plain module of the same shape, and safetensors."""
    finished = train_job(pool, tmp_path, DIGITS, "data(2)")
    code = (
        "import sys, torch; from safetensors.torch import load_file; from torch import nn\nmodel "
        "= nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, "
        f"10))\nmodel.load_state_dict(load_file({str(tmp_path / 'model.safetensors')!r}))\nassert "
        "not any(name.startswith('paragrad') for name in "
        "sys.modules)\nprint(float(model(torch.ones(1, 64)).detach().sum()))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert float(told) == pytest.approx(
        float(finished.model()(torch.ones(1, 64)).detach().sum()), rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_on_model_and_loss_run(kind: str) -> None:
    """An exchange may hook the module of model and loss, as FSDP2 does.

    Passes called its forward directly, and the hooks did not run.
    """
    job = make_job("hooked", lambda: nn.Linear(10, 4), VECTORS)
    trainer = Trainer.build_for_job(World(), job, resolve_text("serial"))
    calls: list[str] = []
    with contextlib.closing(trainer):
        batches = trainer.batches(job.train, 12, 0)
        trainer.step(*separate_target(next(batches)))
        register = getattr(trainer.training.module, f"register_{kind}_hook")
        register(lambda *_: calls.append(kind))
        trainer.step(*separate_target(next(batches)))
    assert calls == [kind]
