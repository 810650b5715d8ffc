"""Your own loop: serial training under `python`, parallel training under a launcher.

    python examples/own_loop.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py
    mpirun -np 2 python examples/own_loop.py
    srun -n 2 python examples/own_loop.py

All end with the same parameters, within the rounding of float64. With a file name as argument, the
script saves them there.
"""

import sys

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paragrad as pg

images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images / 16), torch.tensor(labels))  # float64

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with pg.parallelize(
    model, nn.functional.cross_entropy, optimizer, strategy="data(auto)"
) as trainer:
    for epoch in range(3):
        # this rank's share of each global batch
        for inputs, target in trainer.batches(digits, batch=64, epoch=epoch):
            # forward, backward, exchange, update
            result = trainer.step(inputs, target)
        # every sample once, over all ranks
        accuracy = trainer.evaluate(digits, pg.accuracy)
        if trainer.world.rank == 0:
            print(
                f"epoch {epoch}: loss of the last batch {result.loss:.4f}, accuracy {accuracy:.2f} "
                f"%, {trainer.world.size} worker(s)"
            )
    if trainer.world.rank == 0 and len(sys.argv) > 1:
        save_file(model.state_dict(), sys.argv[1])
