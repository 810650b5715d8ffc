"""The job of kill.py: a small network in float64 that halts where it is to be killed; its own
loop is kill_loop.py.

KILL, in the environment, says where, as JSON: the `place` (see `Kill` in kill_ending.py), the
`rank` to kill, and `step`, the training forward in which ranks halt, counted from 1. Without it
nobody halts.  KILL_FOLDER: where what has happened is told, as files. Dropout, momentum, a
scheduler and noise in the samples: a training that goes on as another one shows it.
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
# restarted: in peace
PLACE = KILL.get("place") if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else None
FOLDER = os.environ.get("KILL_FOLDER", "")
BATCH = 32
# what Python tells its audit hooks as a checkpoint comes to a part of its writing, and of which
# path
WRITING = {
    name: ("open", f".partial/{name}")
    for name in ("optimizer.safetensors", "state.json", "SHA256SUMS")
} | {"renaming": ("os.rename", ".partial"), "removing": ("shutil.rmtree", "")}


def tell(what):
    """Say that it has happened, here."""
    partial = Path(FOLDER, f"{what}.{os.getpid()}")
    partial.write_text(f"{os.getpid()} {os.getppid()}")
    partial.rename(Path(FOLDER, what))


def reached(inputs):
    """This rank is in the step: say so, and halt if it is the place."""
    rank = dist.get_rank()
    victim = rank == KILL["rank"]
    if PLACE == "inside" and victim:
        inputs = inputs.clone().requires_grad_()
        # the last of backward: buckets are on their way
        inputs.register_hook(lambda gradient: tell("victim"))
    elif victim:
        tell("victim")
    if PLACE in WRITING and rank == 0:
        sys.addaudithook(halt_writing)
    # late, while the victim waits for the sum
    if (PLACE == "between" and victim) or (PLACE == "inside" and not victim):
        signal.pause()
    if PLACE == "disk" and victim:
        os.kill(os.getpid(), signal.SIGSTOP)  # until the disk is full
    return inputs


def halt_writing(event, arguments):
    """Halt where a checkpoint is half-written, the file that was written last cut in half, as
    in the middle of its writing.
    """
    wanted, suffix = WRITING[PLACE]
    if (
        event != wanted
        or not isinstance(arguments[0], str | Path)
        or not str(arguments[0]).endswith(suffix)
    ):
        return
    path = Path(arguments[0])
    # not of an older checkpoint
    if event == "shutil.rmtree" and (path.suffix or not path.exists()):
        return
    if event == "open":
        last = max(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        os.truncate(last, last.stat().st_size // 2)
    tell("halted")
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
        # not one worker's step beside
        if PLACE and self.training and dist.is_initialized() and len(inputs) < BATCH:
            self.calls += 1
            if self.calls == KILL["step"]:
                inputs = reached(inputs)
        return self.layers(inputs)


class Noisy(Dataset):
    """Vectors with noise, drawn by whoever loads them."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 20, generator=generator)
        self.targets = torch.randint(5, (count,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(20), self.targets[index]


class Made:
    """Makes the model; where it is unpickled is a rank, and the first there is the victim."""

    def __call__(self):
        return Net()

    def __reduce__(self):
        return taken, (os.getpid(),)


def taken(launcher):
    if PLACE == "before" and os.getpid() != launcher:
        try:
            Path(FOLDER, "claimed").touch(exist_ok=False)
        except FileExistsError:
            return Made()
        tell("victim")
        signal.pause()
    return Made()


job = Job(
    name="kill",
    model=Made(),
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
