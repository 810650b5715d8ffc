"""What every rank of a training does: all batches of all epochs in the exact order, a test
after each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, tensor

from paragrad.datasets.loading import Dataset, parted
from paragrad.engine.exchange import CHECKPOINTS, TESTS
from paragrad.engine.optimizer.modes import in_eval_mode
from paragrad.errors import StepFailed
from paragrad.jobs.job import opened
from paragrad.loops.restart import taken_up, wired_meanwhile
from paragrad.parallel.server.endpoints import Meeting
from paragrad.record.cpu_load import Cpu
from paragrad.record.record import Recorder
from paragrad.record.tensorboard import events
from paragrad.runtime.stragglers import out_of_step
from paragrad.runtime.world import World
from paragrad.trainer.checkpoint import trainer_snapshot
from paragrad.trainer.checkpoint.checkpoint_files import Saved, tested
from paragrad.trainer.checkpoint.tensor_files import save_weights
from paragrad.trainer.first_step.setup import dismiss, serve, wire
from paragrad.trainer.trainer import Trainer
from paragrad.validation import resume_check
from paragrad.validation.validate import Admitted

# told {"epoch", "step", "steps", "loss"} some times a second
Progress = Callable[[dict[str, Any]], None]


def train_rank(
    world: World,
    checked: Admitted,
    folder: Path,
    origin: float,
    meeting: Meeting | None = None,
    report: Progress | None = None,
    loop: Callable[..., Training] | None = None,
) -> str:
    """What every rank does; how it ended: "finished" or "stopped". meeting: where servers are,
    of a training that goes on when ranks die;  loop: in place of Training.
    """
    settings = checked.settings
    with (
        Recorder(folder / f"rank-{world.rank}.jsonl", origin) as record,
        events(folder if settings.tensorboard and world.rank == 0 else None) as show,
    ):
        trainer = Trainer.of_job(
            world,
            checked.job,
            checked.resolved,
            settings,
            record=record,
            seen=checked.facts.probe,
            how=replace(settings.how, meeting=meeting),
        )
        trainer.log.always = settings.trace is not None
        try:
            training = (loop or Training)(
                trainer, checked, folder, record, report or (lambda told: None), show
            )
            cpu = Cpu()
            status = training.run()
            record.write("cpu", **cpu.told())
            log_memory(trainer, training.held)
            if not trainer.serves:
                if status == "finished":
                    save_trained(trainer, folder / "model.safetensors")
                dismiss(trainer)
            status = world.agreed(status)  # a server hears how it ended
        finally:
            trainer.close()
    return status


def save_trained(trainer: Trainer, path: Path) -> None:
    """The model as it is to be used: by rank 0, in the eval mode of an optimizer that has one.
    Collective.
    """
    # what is sharded is put together on rank 0 alone, and not on every rank, as for a test
    sharded = trainer.exchange is not None and trainer.exchange.shards is not None
    with (
        in_eval_mode(trainer.optimizer, trainer.everything) if sharded else trainer.for_evaluation()
    ):
        model = trainer.whole()
        if trainer.world.rank == 0:
            partial = path.with_name(path.name + ".partial")
            try:
                save_weights(model, partial)
            except BaseException:  # a full disk, say
                partial.unlink(missing_ok=True)
                raise
            partial.rename(path)


class Training:
    """The loop over a job's epochs, on one rank: every batch in the exact order, a test after
    each epoch.
    """

    def __init__(
        self,
        trainer: Trainer,
        checked: Admitted,
        folder: Path,
        record: Recorder,
        report: Progress,
        show: Callable[..., None],
    ) -> None:
        self.trainer = trainer
        self.checked = checked
        self.folder = folder
        self.record = record
        self.report = report
        self.show = show
        self.told = -1.0
        self.last: tuple[int, float] | None = None  # (epoch, loss) of the last step
        job = checked.job
        settings = checked.settings
        self.train: Dataset = opened(job.train, settings.folder)
        self.test: Dataset | None = None if job.test is None else opened(job.test, settings.folder)
        self.per_epoch = checked.facts.order.steps
        # a run may go on with a test
        trainer.batch_size = min(job.batch, checked.facts.samples)
        self.steps = min(settings.limit or 2**62, job.epochs * self.per_epoch)
        self.epochs = job.epochs
        self.status = "finished"
        self.saved_at: int | None = None
        # bytes of state that optimizers had which are gone
        self.held = 0
        # what else the record says of an epoch, and a checkpoint of itself
        self.line: dict[str, Any] = {}
        self.beside: dict[str, Any] = {}

    def run(self) -> str:
        settings = self.checked.settings
        if self.checked.saved is not None:
            self.load(self.checked.saved)
        if self.trainer.serves:
            serve(self.trainer)
            return self.status
        if (meeting := self.trainer.how.meeting) is not None and meeting.step is not None:
            taken_up(self.trainer, self.checked.facts.order, self.folder, meeting)
            self.save_what_was_due()
        first, start = self.begin(self.checked.saved)
        over = self.enough
        if first and not start and not over:
            with wired_meanwhile(self.trainer):
                over = self.ended(first - 1)
        for epoch in range(first, self.epochs) if not over else ():
            begun = self.record.now()
            if not self.epoch(epoch, start if epoch == first else 0) or self.end_epoch(
                epoch, begun
            ):
                break
        # no step is left to those who begin again here
        if meeting is not None and self.trainer.exchange is None:
            wire(self.trainer, False, None)
        if settings.save and self.status == "finished":
            self.save()
        # the goal was reached before
        if self.status == "finished" and self.last and self.trainer.steps < self.steps:
            self.steps = self.trainer.steps
            self.tell(*self.last)
        return self.status

    def save_what_was_due(self) -> None:
        """By those who died over it."""
        steps = self.trainer.steps
        every = self.checked.settings.save
        if (self.folder / f"checkpoint-{steps:08}").is_dir():
            self.saved_at = steps
        elif every and steps and steps % every == 0:
            with wired_meanwhile(self.trainer):
                self.save()

    @property
    def place(self) -> int:
        """How far it is: a checkpoint is of one place."""
        return self.trainer.steps

    @property
    def passed(self) -> int:
        """Steps of serial that are behind it."""
        return self.trainer.steps

    @property
    def enough(self) -> bool:
        """Are as many steps made as were asked for?"""
        return self.checked.settings.enough(self.passed)

    def begin(self, saved: Saved | None) -> tuple[int, int]:
        """(epoch, step of it) with which the training goes on."""
        return divmod(self.trainer.steps, self.per_epoch)

    def epoch(self, epoch: int, start: int) -> bool:
        """Train to the end of an epoch; False where the run ends before."""
        settings = self.checked.settings
        job = self.checked.job
        for fetched in self.trainer.batches(
            self.train, job.batch, epoch, start=start, loaders=settings.loaders
        ):
            rate = self.trainer.optimizer.param_groups[0]["lr"]
            result = self.trainer.step(*parted(fetched))
            self.show(self.trainer.steps, loss=result.loss, lr=rate)
            self.tell(epoch, result.loss)
            if result.stop:
                self.status = "stopped"
                self.save()
                return False
            if settings.save and self.trainer.steps % settings.save == 0:
                self.save()
            if self.enough:
                return False
        return True

    def end_epoch(self, epoch: int, begun: float) -> bool:
        """The test after an epoch; True where the goal is reached."""
        job = self.checked.job
        test = (
            self.trainer.evaluation(self.test, job.metric, self.checked.settings.loaders)
            if self.test is not None
            else None
        )
        sent = self.sent(TESTS)
        self.record.write(
            "epoch",
            epoch=epoch,
            test=test,
            start=round(begun, 6),
            seconds=round(self.record.now() - begun, 6),
            **({"sent": sent} if sent else {}),
            **self.line,
        )
        if not self.trainer.strategy.promise.replicas_equal and self.asked():
            self.status = "stopped"  # they might not meet before the end
            self.save()
            return True
        if test is not None:
            self.show(self.trainer.steps, **{f"test {job.metric_name}": test["value"]})
        return self.checked.settings.reached(test)

    def sent(self, what: str) -> dict[str, Any]:
        """What was sent beside the steps, for tests or checkpoints."""
        exchange = self.trainer.exchange
        return {
            kind: number
            for kind, number in (exchange.sent if exchange else {}).items()
            if kind == what
        }

    def asked(self) -> bool:
        """Was any rank asked to stop? Collective."""
        world = self.trainer.world
        with out_of_step():
            return bool(world.all_reduced(tensor(float(world.stop.is_set()))) > 0)

    def ended(self, epoch: int) -> bool:
        """Going on from the last step of an epoch: its test, unless it was made before, here or
        by the run that was saved; True where the goal is reached.
        """
        saved = self.checked.saved
        in_rounds = self.checked.resolved.in_rounds
        line = self.trainer.world.agreed(
            tested(self.folder, epoch) or (saved and saved.tested(epoch, in_rounds))
        )
        if line is None:
            return self.end_epoch(epoch, self.record.now())
        return self.checked.settings.reached(line["test"])

    def tell(self, epoch: int, loss: float) -> None:
        self.last = epoch, loss
        if self.trainer.world.rank == 0 and (
            self.record.now() - self.told > 0.1 or self.trainer.steps == self.steps
        ):
            self.told = self.record.now()
            self.report(
                {"epoch": epoch, "step": self.trainer.steps, "steps": self.steps, "loss": loss}
            )

    def load(self, saved: Saved) -> None:
        """Go on from a checkpoint, the same on every rank (hosts may have looked at folders of
        their own).
        """
        if self.trainer.world.agreed(saved.sums) != saved.sums:
            raise StepFailed(
                f"this rank found another checkpoint in {saved.folder} than rank 0; put the run "
                f"where all hosts "
                "see it"
            )
        trainer_snapshot.restore(self.trainer, saved)
        self.saved_at = self.place

    def save(self) -> None:
        """A checkpoint of this place, unless it is there already."""
        if self.saved_at == self.place:
            return
        self.trainer.save(
            self.folder,
            resume_check.identity_of(self.checked.job, self.checked.facts),
            **self.beside,
        )
        if sent := self.sent(CHECKPOINTS):
            self.record.write("checkpoint", step=self.trainer.steps, sent=sent)
        self.saved_at = self.place


def log_memory(trainer: Trainer, held: int = 0) -> None:
    """Write the bytes that a rank holds into the record. held: by other optimizers than the
    trainer's, before.
    """
    exchange = trainer.exchange
    activations = trainer.passes.most if trainer.passes else 0
    # passes of a user's own: what a look at the model showed
    if not activations and not trainer.layout.cut:
        activations = trainer.activations
    trainer.log.memory(
        parameters=_bytes(trainer.parameters.values()) // (exchange.sharing if exchange else 1),
        optimizer=max(held, state_bytes(trainer.optimizer)),
        gradients=_bytes(each for each in trainer.parameters.values() if each.requires_grad),
        # nobody looked
        **({"activations": activations} if activations or not trainer.layout.cut else {}),
        exchange=exchange.largest if exchange else 0,
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of what it keeps."""
    # or no parameter's
    every = (
        each.values() if isinstance(each, dict) else (each,) for each in optimizer.state.values()
    )
    return _bytes(value for values in every for value in values if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
