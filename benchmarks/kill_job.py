"""The job of kill.py: a small network that halts one rank at a chosen place, so that it can be killed there.

KILL_PLACE: before (the first collective: as the rank takes its task), inside (a collective: another rank is late for it),
between (two collectives: in a forward pass);  KILL_RANK: the one to kill;  KILL_FOLDER: where what has happened is told, as
files.
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from paragrad import Job

PLACE, RANK, FOLDER = os.environ["KILL_PLACE"], int(os.environ["KILL_RANK"]), os.environ["KILL_FOLDER"]
STEP = 5                # training forward in which ranks halt, counted from 1


def tell(what):
    """Say that it has happened, here."""
    partial = Path(FOLDER, f"{what}.{os.getpid()}")
    partial.write_text(f"{os.getpid()} {os.getppid()}")
    partial.rename(Path(FOLDER, what))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 5))
        self.calls = 0

    def forward(self, inputs):
        if self.training and dist.is_initialized():
            self.calls += 1
            if self.calls == STEP:
                inputs = self.halt(inputs)
        return self.layers(inputs)

    def halt(self, inputs):
        victim = dist.get_rank() == RANK
        if PLACE == "between" and victim:
            tell("victim")
            signal.pause()
        if PLACE == "inside" and not victim:            # late, while the victim waits for the sum
            signal.pause()
        if PLACE == "inside":
            inputs = inputs.clone().requires_grad_()
            inputs.register_hook(lambda gradient: tell("victim"))       # the last of backward: buckets are on their way
        return inputs


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


torch.manual_seed(0)
job = Job(name="kill", model=Made(), loss=nn.functional.cross_entropy, batch=32, epochs=1000,
          train=TensorDataset(torch.randn(640, 20), torch.randint(5, (640,))),
          optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
