"""Early stopping, the checkpoint of the best test, and logging, by callbacks.

    paragrad train examples/callbacks.py --strategy "data(2)" --keep best
    python examples/callbacks.py

The log goes to TensorBoard if it is installed. For Weights & Biases or MLflow put their callback
into the list; both classes below follow their documents and need their service.
"""

import importlib.util

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import paragrad as pg


class TensorBoardLog(pg.Callback):
    """Writes the loss and the test values into the folder of the run."""

    def start_run(self, run: pg.RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "log"))

    def observe_step(self, report: pg.StepReport) -> None:
        self.writer.add_scalar("loss", report.loss, report.step)
        self.writer.add_scalar("learning rate", report.learning_rate, report.step)

    def observe_test(self, report: pg.EpochReport) -> None:
        self.writer.add_scalar(f"test {report.metric}", report.value, report.step)

    def end_run(self, status: str) -> None:
        self.writer.close()


class WandbLog(pg.Callback):
    """Logs to Weights & Biases."""

    def __init__(self, project: str) -> None:
        self.project = project

    def start_run(self, run: pg.RunStart) -> None:
        import wandb

        config = {"strategy": run.strategy, "steps": run.steps}
        self.run = wandb.init(project=self.project, name=run.folder.name, config=config)

    def observe_step(self, report: pg.StepReport) -> None:
        self.run.log({"loss": report.loss, "learning rate": report.learning_rate}, step=report.step)

    def observe_test(self, report: pg.EpochReport) -> None:
        self.run.log({f"test {report.metric}": report.value}, step=report.step)

    def end_run(self, status: str) -> None:
        self.run.finish(exit_code=0 if status != "failed" else 1)


class MlflowLog(pg.Callback):
    """Logs to MLflow."""

    def start_run(self, run: pg.RunStart) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name=run.folder.name)
        mlflow.log_params({"strategy": run.strategy, "steps": run.steps})

    def observe_step(self, report: pg.StepReport) -> None:
        self.mlflow.log_metric("loss", report.loss, step=report.step)

    def observe_test(self, report: pg.EpochReport) -> None:
        self.mlflow.log_metric(f"test_{report.metric}", report.value, step=report.step)

    def end_run(self, status: str) -> None:
        self.mlflow.end_run("FINISHED" if status != "failed" else "FAILED")


images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = random_split(digits, [1500, 297], torch.Generator().manual_seed(0))

callbacks: list[pg.Callback] = [pg.EarlyStopping(patience=3)]
if importlib.util.find_spec("tensorboard"):
    callbacks.append(TensorBoardLog())

job = pg.Job(
    name="stopped-early",
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    train=train,
    test=test,
    metric=pg.accuracy,
    batch=64,
    epochs=100,
    callbacks=callbacks,
)

if __name__ == "__main__":  # each rank imports this file too
    run = pg.train(job, "data(2)", keep="best")
    print(run)
    print(run.best)
    best_model = run.model(best=True)
