"""train: one job under one strategy, on ranks of this host or in the world that torchrun made."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from paragrad.errors import RankFailed, Refused, StepFailed
from paragrad.job import Facts, Job, examined
from paragrad.launching import Ranks, cores
from paragrad.record import SCHEMA, Record, Recorder, new_folder
from paragrad.strategy import Data, Serial, Strategy, refuse_unbuilt, resolve, strategy
from paragrad.trainer import Trainer
from paragrad.verification import difference
from paragrad.world import World, joined_from_environment, launched_rank, launched_size, ranks_here

Progress = Callable[[dict[str, Any]], None]         # told {"epoch", "step", "steps", "loss"} some times a second


class Run(Record):
    """A finished training: its record, and the trained model."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(folder)
        self.job = job

    @property
    def resolved(self) -> Strategy:
        """The strategy with every `auto` replaced."""
        return strategy(self.header["resolved"])

    def model(self) -> nn.Module:
        """The trained model, a plain module with its serial names."""
        model = self.job.built_model()
        load_model(model, str(self.folder / "model.safetensors"))
        return model


def train(job: Job, strategy: str | Strategy = "serial", *, runs: str | Path = "runs", data: str | Path | None = None,
          overlap: bool = True, check: bool = False, progress: Progress | None = None) -> Run:
    """Train a job under a strategy; returns when it is done.

    runs: the folder in which the run's own folder is made; data: handed to the job's dataset functions; overlap: exchange
    gradients while backward still runs; check: afterwards compare 20 steps with serial in float64 (`run.difference`; not
    under torchrun). Raises Refused (at the door) or RankFailed.
    """
    data = Path(data) if data else None
    checked = admitted(job, strategy, data)
    if launched_size() is not None:
        return _under_launcher(checked, Path(runs), data, overlap, progress)
    folder = new_folder(Path(runs), f"{job.name}-{folder_name(checked.asked)}")
    with Ranks(checked.size) as ranks:
        finished = run(ranks, checked, folder, data=data, overlap=overlap, progress=progress)
        if not check or isinstance(checked.resolved, Serial):
            return finished
        with Recorder(folder / "run.jsonl") as record:
            try:
                check_same(ranks, checked, finished.header["id"], data, record)
            except RankFailed as error:
                raise RankFailed(f"the training is done ({folder}); its check against serial failed: {error.message}",
                                 rank=error.rank, step=error.step, tensor=error.tensor, traceback=error.traceback) from error
    return Run(job, folder)


class Admitted:
    """A job and a strategy that passed the door together."""

    def __init__(self, job: Job, asked: Strategy, resolved: Strategy, facts: Facts) -> None:
        self.job, self.asked, self.resolved, self.facts = job, asked, resolved, facts

    @property
    def size(self) -> int:
        assert isinstance(self.resolved.workers, int)
        return self.resolved.workers

    @property
    def threads(self) -> int:
        """Threads of each rank: the host's cores divided, unless serial says otherwise."""
        if isinstance(self.resolved, Serial):
            assert isinstance(self.resolved.threads, int)
            return self.resolved.threads
        return max(1, cores() // (ranks_here() or self.size))


def admitted(job: Job, asked: str | Strategy, data: Path | None = None, facts: Facts | None = None) -> Admitted:
    """Check job and strategy at the door. Raises Refused with the repair."""
    if not isinstance(job, Job):
        raise Refused(f"a job is a paragrad.Job; got {type(job).__name__}")
    asked = strategy(asked)
    refuse_unbuilt(asked)
    resolved = resolve(asked, cores=cores(), workers=launched_size())
    facts = facts or examined(job, data)
    full = min(job.batch, facts.samples)
    if isinstance(resolved.workers, int) and full < resolved.workers:
        raise Refused(f"{asked} has {resolved.workers} workers and the full batch {full} sample(s); "
                      f"give a batch of at least {resolved.workers}, or fewer workers")
    return Admitted(job, asked, resolved, facts)


def run(ranks: Ranks, checked: Admitted, folder: Path, *, data: Path | None = None, overlap: bool = True,
        progress: Progress | None = None, limit: int | None = None) -> Run:
    """Train on ranks that are there already, recording into a folder; limit: stop after so many steps."""
    with Recorder(folder / "run.jsonl") as record:
        _write_header(record, checked, folder, overlap)
        try:
            ranks.run(train_rank, checked, folder, data, record.origin, overlap, limit, size=checked.size,
                      threads=checked.threads, on_report=lambda rank, value: progress(value) if progress else None)
        except RankFailed as error:
            _write_end(record, "failed", error)
            raise
        except BaseException:
            _write_end(record, "stopped")
            raise
        _write_end(record, "finished")
    return Run(checked.job, folder)


def check_same(ranks: Ranks, checked: Admitted, run: str, data: Path | None, record: Recorder) -> None:
    """Compare a strategy with serial (`verification.difference`) and record the answer."""
    found = ranks.run(difference, checked.job, checked.resolved, data, size=checked.size, threads=checked.threads)[0]
    record.write("difference", baseline="serial", run=run, value=found.value, tensor=found.tensor)


def _under_launcher(checked: Admitted, runs: Path, data: Path | None, overlap: bool, progress: Progress | None) -> Run:
    """This process is a rank that torchrun started: join, let rank 0 make the folder and the run's own lines."""
    leads = launched_rank() == 0
    torch.set_num_threads(checked.threads)
    with joined_from_environment() as world:
        folder = world.agreed(new_folder(runs, f"{checked.job.name}-{folder_name(checked.asked)}") if leads else None)
        with Recorder(folder / "run.jsonl") if leads else Recorder(Path("/dev/null")) as record:
            _write_header(record, checked, folder, overlap)
            try:
                train_rank(world, checked, folder, data, record.origin, overlap, None, report=progress)
            except StepFailed as error:
                failed = RankFailed(str(error), rank=world.rank, step=error.step, tensor=error.tensor)
                _write_end(record, "failed", failed)
                raise failed from error
            _write_end(record, "finished")
    return Run(checked.job, folder)


def train_rank(world: World, checked: Admitted, folder: Path, data: Path | None, origin: float, overlap: bool,
               limit: int | None, report: Progress | None = None) -> None:
    """What every rank does: all epochs over the job's order, a test after each, the model at the end (rank 0)."""
    job = checked.job
    with Recorder(folder / f"rank-{world.rank}.jsonl", origin) as record:
        trainer = Trainer(world, job, checked.resolved, data, record=record, overlap=overlap)
        steps = min(limit or 2**62, job.epochs * trainer.order.steps)
        told = 0.0
        try:
            for epoch in range(job.epochs):
                start = record.now()
                for batch in trainer.order.batches():
                    if trainer.steps == steps:
                        break
                    result = trainer.step(epoch, batch)
                    if report and world.rank == 0 and (record.now() - told > 0.1 or trainer.steps == steps):
                        told = record.now()
                        loss = result.loss / result.weight if result.weight else 0.0
                        report({"epoch": epoch, "step": trainer.steps, "steps": steps, "loss": loss})
                if trainer.steps < (epoch + 1) * trainer.order.steps:
                    break                                               # the limit cut this epoch short
                record.write("epoch", epoch=epoch, test=trainer.evaluate(), seconds=round(record.now() - start, 6))
            trainer.record_memory()
        finally:
            trainer.close()
        if world.rank == 0:
            partial = folder / "model.safetensors.partial"
            save_model(trainer.model, str(partial))
            partial.rename(folder / "model.safetensors")


def _write_header(record: Recorder, checked: Admitted, folder: Path, overlap: bool) -> None:
    job, facts = checked.job, checked.facts
    record.write(
        "run", schema=SCHEMA, id=folder.name, strategy=str(checked.asked), resolved=str(checked.resolved), seed=job.seed,
        job={"name": job.name, "arguments": dict(job.arguments), "batch": job.batch, "epochs": job.epochs,
             "metric": getattr(job.metric, "__name__", "metric") if job.metric else "loss",
             "samples": facts.samples, "parameters": facts.parameters, "dtype": str(job.dtype).removeprefix("torch.")},
        workers=checked.size, servers=0, backend="gloo" if checked.size > 1 else None, device="cpu",
        threads=checked.threads, prediction=None,
        machine={"cpu": _cpu(), "cores": cores(), "torch": torch.__version__, "python": platform.python_version()})
    if isinstance(checked.asked, Data):
        if checked.asked.reduce == "auto":
            record.write("choice", what="reduce", bytes=None, picked="native",
                         because="auto is the backend's own all-reduce until this machine's prices are measured")
        record.write("choice", what="overlap", bytes=None, picked="on" if overlap else "off", because=(
            "gradients are exchanged while backward runs" if overlap else "asked for: exchange after backward"))


def _write_end(record: Recorder, status: str, error: RankFailed | None = None) -> None:
    told = error and {"rank": error.rank, "step": error.step, "tensor": error.tensor, "message": error.message}
    record.write("end", status=status, seconds=round(record.now(), 6), error=told)


def folder_name(chosen: Strategy) -> str:
    """A strategy as part of a folder's name."""
    kept = "".join(sign if sign.isalnum() or sign in "_." else "-" for sign in str(chosen))
    return "-".join(part for part in kept.split("-") if part)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


