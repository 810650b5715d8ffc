"""All-reduces and compressors of paragrad under torch's DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py
    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py "halving(segments=2)"
    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py "top_k(0.01)"
    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py "dgc(0.01, warmup=0)"
    torchrun --standalone --nproc-per-node 2 examples/ddp_hook.py bf16 shm

The first argument is the all-reduce or the compressor, the second is the backend.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import paragrad as pg
import paragrad.backends  # registers shm, for ranks of one host

algorithm = sys.argv[1] if len(sys.argv) > 1 else "ring"
dist.init_process_group(sys.argv[2] if len(sys.argv) > 2 else "gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 5))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if algorithm.startswith("dgc"):
    # dgc takes over the momentum of the optimizer
    model.register_comm_hook(*pg.hook(algorithm, optimizer=optimizer))
else:
    # the schedule is proved first
    model.register_comm_hook(*pg.hook(algorithm))

torch.manual_seed(dist.get_rank())  # each rank has data of its own
for _ in range(20):
    inputs = torch.randn(16, 20)
    targets = torch.randint(5, (16,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
print(
    f"rank {dist.get_rank()}: "
    f"{sum(parameter.double().sum().item() for parameter in model.parameters()):.6f}"
)
dist.destroy_process_group()
