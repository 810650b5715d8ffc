"""Our all-reduce under torch's DistributedDataParallel, and nothing else of this library.

    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py
    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py "halving(segments=2)"
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import paragrad as pg

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))
model.register_comm_hook(*pg.hook(sys.argv[1] if len(sys.argv) > 1 else "ring"))        # proved before it is used
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(dist.get_rank())              # each rank has data of its own
for _ in range(20):
    inputs, targets = torch.randn(16, 20), torch.randint(5, (16,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
print(f"rank {dist.get_rank()}: {sum(parameter.double().sum().item() for parameter in model.parameters()):.6f}")
dist.destroy_process_group()
