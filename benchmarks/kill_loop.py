"""The training of kill_job.py in a loop of its own. torchrun starts it, and starts it again after a
failure: kill_loop.py FOLDER SAVE LOADERS BACKEND.

The folder contains the checkpoints, the file `losses`, and at the end the model. The file `losses`
has a line "STEP LOSS" for every step, also for repeated steps, and "resumed STEP" after a restart.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from kill_job import KILL, PLACE, Net, job, report_event
from safetensors.torch import save_file

import paragrad as pg


def main(folder, save, loaders, backend):
    if PLACE == "before" and int(os.environ["RANK"]) == KILL["rank"]:
        report_event("victim")
        signal.pause()
    torch.manual_seed(job.seed)
    model = Net().double()
    optimizer = job.optimizer(model.parameters())
    steps = len(job.train) // job.batch  # per epoch
    with (
        pg.parallelize(
            model,
            job.loss,
            optimizer,
            scheduler=job.scheduler(optimizer),
            seed=job.seed,
            backend=backend,
        ) as trainer,
        (folder / "losses" if trainer.world.rank == 0 else Path(os.devnull)).open("a") as losses,
    ):
        if any(folder.glob("checkpoint-????????")):
            trainer.load(folder)
            print("resumed", trainer.steps, file=losses, flush=True)
        for epoch in range(trainer.steps // steps, job.epochs):
            for batch in trainer.batches(
                job.train, job.batch, epoch, start=trainer.steps % steps, loaders=loaders
            ):
                result = trainer.step(*batch)
                print(trainer.steps - 1, repr(result.loss), file=losses, flush=True)
                if trainer.steps % save == 0:
                    trainer.save(folder)
        if trainer.world.rank == 0:
            save_file(model.state_dict(), folder / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
