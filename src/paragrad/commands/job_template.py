"""A job: what to train, described as training on one worker. Change each part to yours.

paragrad train FILE.py                           # on one worker
paragrad train FILE.py --strategy "data(2)"      # on two workers: the same training
paragrad compare FILE.py                         # seven strategies in one table
paragrad verify FILE.py --strategy "tensor(2)"   # is it the same training as on one worker?
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import paragrad as pg

EPOCHS = 10

# The data: datasets of torch with __len__ and __getitem__. A sample is (input, target) or a dict.
images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = random_split(digits, [1500, 297], torch.Generator().manual_seed(0))


class Net(nn.Module):
    """The model is plain PyTorch. It does not mention ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores


job = pg.Job(
    name="template",
    # Functions, because each rank builds its own model and optimizer.
    model=Net,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS),
    # "epoch" or "step": when a plain loop would call scheduler.step().
    scheduler_every="epoch",
    # The mean over the samples of a batch; or a function that returns (sum, weight).
    loss=nn.functional.cross_entropy,
    train=train,
    # The size of the global batch, whatever the number of workers.
    batch=64,
    epochs=EPOCHS,
    # After each epoch the test set is evaluated: (sum, weight) of each batch are added up.
    test=test,
    metric=pg.accuracy,
    # What the run calls after steps and tests; this one ends it if 3 epochs brought nothing better.
    callbacks=[pg.EarlyStopping(patience=3)],
    # The seed of the first weights, the order of samples and all draws.
    seed=0,
)

if __name__ == "__main__":  # Each rank imports this file too.
    run = pg.train(job, "data(2)")
    print(run)
    # run.model() is a plain model with the trained weights.
    print(run.model()(test[0][0][None]).argmax(1))
