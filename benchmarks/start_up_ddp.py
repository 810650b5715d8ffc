"""The peer of start_up.py: the digits job as plain PyTorch with DistributedDataParallel, for
torchrun.

    torchrun --standalone --nproc-per-node 2 start_up_ddp.py FOLDER

Rank 0 writes FOLDER/run/rank-0.jsonl after its first step.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
size = dist.get_world_size()
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32)
labels = torch.tensor(labels)
training = torch.arange(len(labels)) % 5 != 4
dataset = TensorDataset(images[training], labels[training])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
told = Path(sys.argv[1], "run", "rank-0.jsonl")
for inputs, target in DataLoader(
    dataset, batch_size=64 // size, sampler=DistributedSampler(dataset, size, rank)
):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), target).backward()
    optimizer.step()
    if rank == 0 and not told.exists():
        told.parent.mkdir(parents=True)
        told.write_text('{"kind": "step"}\n')
dist.barrier()  # if a rank ends early, the other rank fails with a closed connection
del model
dist.destroy_process_group()
