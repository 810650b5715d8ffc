"""The job of endings.py: a small network that fails or stands still, as the variable ENDING says.

The environment variable ENDING is JSON. `step` is the global step after which the fault can happen.
`fault` says what fails (see FAULTS in endings.py). `stand` says where a rank stands still (see
STANDS in endings.py). Without `fault` and `stand` the job trains to its end.

KILL_FOLDER is the folder of this ending. The file `armed` there means that the step is done. The
file `standing` means that a rank stands still.
"""

import itertools
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from paragrad import Callback, Job

PLAN = json.loads(os.environ.get("ENDING", "{}"))
FAULT = PLAN.get("fault")
STAND = PLAN.get("stand")
FOLDER = Path(os.environ.get("KILL_FOLDER", "nowhere"))


def is_armed():
    """Return whether the step of the plan is done."""
    return (FOLDER / "armed").exists()


def fail(where):
    """Raise an exception if this is the place that the plan names."""
    if where == FAULT and is_armed():
        raise RuntimeError(f"planted fault in {where}")


def stand_still():
    """Stand still for ever. For "collective" only the first process does so, otherwise each one."""
    try:
        (FOLDER / "standing").touch(exist_ok=False)
    except FileExistsError:
        if STAND == "collective":  # the others wait for the first one
            return
    if STAND == "ignore":
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, signal.SIG_IGN)
    if STAND == "product":  # one long call in C, without the interpreter's lock
        torch.linalg.eigvals(torch.arange(9e6).sin().reshape(3000, 3000))
    if STAND == "count":  # one endless call in C, with the interpreter's lock
        sum(itertools.repeat(0))
    while True:
        time.sleep(1.0)


class Samples(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 20, generator=generator)
        self.targets = torch.randint(5, (count,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        fail("dataset")
        if STAND == "loader" and is_armed():
            stand_still()
        return self.inputs[index], self.targets[index]


class Fault(nn.Module):
    """The layer in which the model fails or stands still."""

    def forward(self, x):
        if not (self.training and is_armed()):
            return x
        fail("model")
        if FAULT == "nan":
            return x * float("nan")
        if FAULT == "shape":
            return x[:, 1:]
        if STAND and STAND != "loader":
            stand_still()
        return x


class Arm(Callback):
    """Arms the plan after its step."""

    def observe_step(self, report):
        fail("callback")
        if report.step >= PLAN.get("step", 0):
            (FOLDER / "armed").touch()


def combine(samples):
    fail("collate")
    return default_collate(samples)


def compute_loss(output, target):
    fail("loss")
    return nn.functional.cross_entropy(output, target)


def measure(output, target):
    fail("metric")
    return (output.argmax(1) == target).sum(), len(target)


def scale_rate(step):
    fail("scheduler")
    return 0.999**step


job = Job(
    name="ending",
    model=lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), Fault(), nn.Linear(32, 5)),
    loss=compute_loss,
    train=Samples(320),
    test=Samples(64),
    metric=measure,
    collate=combine,
    batch=32,
    epochs=PLAN.get("epochs", 100),
    seed=1,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, scale_rate),
    scheduler_every="step",
    callbacks=[Arm()],
)
