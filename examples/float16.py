"""float16 by autocast, with a loss scale as torch.amp.GradScaler has.

    paragrad train examples/float16.py --strategy "data(2)"
    python examples/float16.py

Forward and loss run in float16; parameters, gradients and the optimizer stay in float32. Backward
runs on the loss times the loss scale, so that small gradients do not become 0. If a gradient of any
rank overflows, all ranks skip the update and halve the scale. On GPUs of 2020 and later, bfloat16
needs no loss scale: dtype=torch.bfloat16.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paragrad as pg

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

job = pg.Job(
    name="digits-in-float16",
    model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    train=TensorDataset(images[:1400], labels[:1400]),
    test=TensorDataset(images[1400:], labels[1400:]),
    metric=pg.accuracy,
    dtype=torch.float16,
    clip_norm=1.0,
    batch=50,
    epochs=5,
)

if __name__ == "__main__":  # each rank imports this file too
    for dtype in (torch.float32, torch.float16):
        run = pg.train(job.replace(dtype=dtype), "data(2)")
        print(f"{dtype}: {run.test:.1f} %, {run.skipped_steps} steps were skipped")
