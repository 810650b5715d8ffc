"""The job of kill.py: a small network in float64 that halts at the place where it is killed.
kill_loop.py trains it in a loop of its own.

The environment variable KILL gives the place as JSON: the `place` (see `Kill` in kill_ending.py),
the `rank` to kill, and `step`. `step` is the training forward in which ranks halt, counted from 1.
Without KILL no rank halts. The job reports its progress as files in the folder KILL_FOLDER.

The job has dropout, momentum, a scheduler and noise in the samples. So a resumed training that
differs from an undisturbed one has different losses.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from paragrad import Job

KILL = json.loads(os.environ.get("KILL", "{}"))
# after a restart by torchrun no rank halts
PLACE = KILL.get("place") if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else None
FOLDER = os.environ.get("KILL_FOLDER", "")
BATCH = 32
# for each part of the writing of a checkpoint: the event that Python reports to audit hooks, and
# the end of the path
WRITING = {
    name: ("open", f".partial/{name}")
    for name in ("optimizer.safetensors", "state.json", "SHA256SUMS")
} | {"renaming": ("os.rename", ".partial"), "removing": ("shutil.rmtree", "")}


def report_event(what):
    """Report an event of this process: write a file of this name that contains the pids of this
    process and of its parent.
    """
    partial = Path(FOLDER, f"{what}.{os.getpid()}")
    partial.write_text(f"{os.getpid()} {os.getppid()}")
    partial.rename(Path(FOLDER, what))


def halt_at_place(inputs):
    """Report that this rank has reached the step, and halt the rank if this is the place."""
    rank = dist.get_rank()
    victim = rank == KILL["rank"]
    if PLACE == "inside" and victim:
        inputs = inputs.clone().requires_grad_()
        # the end of backward: buckets are being exchanged
        inputs.register_hook(lambda gradient: report_event("victim"))
    elif victim:
        report_event("victim")
    if PLACE in WRITING and rank == 0:
        sys.addaudithook(halt_writing)
    # "between": the victim halts; "inside": the others halt, so the victim waits for their sum
    if (PLACE == "between" and victim) or (PLACE == "inside" and not victim):
        signal.pause()
    if PLACE == "disk" and victim:
        os.kill(os.getpid(), signal.SIGSTOP)  # until the disk is full
    return inputs


def halt_writing(event, arguments):
    """Halt while a checkpoint is half-written. The file that was written last is cut in half, as if
    its writing had been interrupted.
    """
    wanted, suffix = WRITING[PLACE]
    if (
        event != wanted
        or not isinstance(arguments[0], str | Path)
        or not str(arguments[0]).endswith(suffix)
    ):
        return
    path = Path(arguments[0])
    # this is not the removing of an older checkpoint
    if event == "shutil.rmtree" and (path.suffix or not path.exists()):
        return
    if event == "open":
        last = max(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        os.truncate(last, last.stat().st_size // 2)
    report_event("halted")
    signal.pause()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 100),
            nn.ReLU(),
            nn.Linear(100, 100),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(100, 5),
        )
        self.calls = 0

    def forward(self, inputs):
        # not in the reference step, which has the whole batch
        if PLACE and self.training and dist.is_initialized() and len(inputs) < BATCH:
            self.calls += 1
            if self.calls == KILL["step"]:
                inputs = halt_at_place(inputs)
        return self.layers(inputs)


class Noisy(Dataset):
    """Vectors with noise. The process that loads a sample draws its noise."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 20, generator=generator)
        self.targets = torch.randint(5, (count,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(20), self.targets[index]


class ModelFactory:
    """A factory of the model. Only ranks unpickle it, and the first rank that does so is the victim
    of the place "before".
    """

    def __call__(self):
        return Net()

    def __reduce__(self):
        return unpickle_factory, (os.getpid(),)


def unpickle_factory(launcher):
    if PLACE == "before" and os.getpid() != launcher:
        try:
            Path(FOLDER, "claimed").touch(exist_ok=False)
        except FileExistsError:
            return ModelFactory()
        report_event("victim")
        signal.pause()
    return ModelFactory()


job = Job(
    name="kill",
    model=ModelFactory(),
    loss=nn.functional.cross_entropy,
    batch=BATCH,
    epochs=4,
    train=Noisy(640),
    seed=1,
    dtype=torch.float64,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.8),
    scheduler_every="step",
)
