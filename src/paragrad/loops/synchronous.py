"""The synchronous training loop of a rank: batches of all epochs, and a test after each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, tensor

from paragrad.datasets.loading import Dataset
from paragrad.engine.exchange import CHECKPOINT_TRAFFIC, TEST_TRAFFIC
from paragrad.engine.optimizer.modes import use_optimizer_eval_mode
from paragrad.errors import StepFailed
from paragrad.jobs.callback import EpochReport, RunStart, StepReport
from paragrad.jobs.job import open_dataset
from paragrad.loops.best_test import BestTest
from paragrad.loops.callback_runner import CallbackRunner
from paragrad.loops.loop import BatchLoop
from paragrad.loops.restart import resume_from_servers, use_temporary_exchange
from paragrad.parallel.server.endpoints import ServerEndpoints
from paragrad.record.cpu_load import CpuMeter
from paragrad.record.record import ENDED_EARLY, STEP_DELAY, Recorder
from paragrad.record.tensorboard import open_event_files
from paragrad.runtime.stragglers import explain_independent_steps
from paragrad.runtime.world import World
from paragrad.trainer.checkpoint import trainer_snapshot
from paragrad.trainer.checkpoint.checkpoint_files import (
    SavedCheckpoint,
    find_recorded_epoch,
    list_epoch_records,
    list_resumed_runs,
)
from paragrad.trainer.checkpoint.tensor_files import save_weights
from paragrad.trainer.exchange_setup import set_up_exchange
from paragrad.trainer.server_rank import dismiss_run_servers, run_parameter_server
from paragrad.trainer.step_observer import StepResult
from paragrad.trainer.trainer import Trainer
from paragrad.trainer.training import Training
from paragrad.validation import resume_check
from paragrad.validation.validate import ValidatedRun

# Receives {"epoch", "step", "steps", "loss"}, at most ten times a second. After a test it also
# receives {"metric", "test"}.
Progress = Callable[[dict[str, Any]], None]


def train_rank(
    world: World,
    validated_run: ValidatedRun,
    folder: Path,
    origin: float,
    endpoints: ServerEndpoints | None = None,
    report: Progress | None = None,
    loop_class: Callable[..., TrainingLoop] | None = None,
) -> str:
    """Run a training on one rank.

    Args:
        world: The ranks.

        validated_run: The validated job, strategy and settings.

        folder: The folder of the run.

        origin: The start of the record's clock.

        endpoints: The endpoints of the servers, for a training that survives failures of ranks.

        report: Receives the progress of the training, or None.

        loop_class: The class of the loop; TrainingLoop if None.

    Returns:
        "finished" or "stopped".
    """
    settings = validated_run.settings
    with (
        Recorder(
            folder / f"rank-{world.rank}.jsonl",
            origin,
            # Ranks that are replaced have their steps counted after their death.
            delay=STEP_DELAY if endpoints is None else 0.0,
        ) as record,
        open_event_files(
            folder if settings.tensorboard and world.rank == 0 else None
        ) as write_scalars,
    ):
        trainer = Trainer.build_for_job(
            world,
            validated_run.job,
            validated_run.resolved,
            settings,
            record=record,
            validation_probe=validated_run.inspection.probe,
            exchange_options=replace(settings.exchange_options, endpoints=endpoints),
        )
        if settings.trace is not None:
            trainer.training.log.write_all_details()
        try:
            loop = (loop_class or TrainingLoop)(
                trainer,
                validated_run,
                folder,
                record,
                report or (lambda progress: None),
                write_scalars,
            )
            cpu = CpuMeter()
            with loop.follow_run():
                status = loop.run_training()
                if loop.callbacks.end_reason is not None:
                    trainer.training.log.write_event(ENDED_EARLY, loop.callbacks.end_reason)
                record.write_line("cpu", **cpu.measure_usage())
                log_memory(trainer.training, loop.peak_optimizer_bytes)
                if not trainer.is_server and status == "finished":
                    with world.stop.note_saving():
                        save_trained_model(trainer, folder / "model.safetensors")
            if not trainer.is_server:
                dismiss_run_servers(trainer.training)
            status = world.broadcast_object(status)  # Servers have no status of their own.
        except StepFailed:  # it has its cause
            raise
        except Exception as error:
            exchange = trainer.training.setup.exchange
            cause = error if exchange is None else exchange.find_cause(error)
            if cause is error:
                raise
            raise cause from error
        finally:
            trainer.close()
    return status


def save_trained_model(trainer: Trainer, path: Path) -> None:
    """Save the trained model on rank 0, with evaluation weights if the optimizer has them.

    Collective.

    Args:
        trainer: The trainer.
        path: The file to write.
    """
    # Sharded parameters are gathered on rank 0 only. The evaluation weights of a test would be
    # gathered on every rank.
    setup = trainer.training.setup
    with (
        use_optimizer_eval_mode(trainer.optimizer, list(setup.trained_tensors))
        if setup.exchange is not None and setup.exchange.shard_layout is not None
        else trainer.use_evaluation_weights()
    ):
        model = trainer.gather_model()
        if trainer.world.rank == 0:
            partial = path.with_name(path.name + ".partial")
            try:
                save_weights(model, partial)
            except BaseException:  # for example if the disk is full
                partial.unlink(missing_ok=True)
                raise
            partial.rename(path)


class TrainingLoop(BatchLoop[int]):
    """The loop over a job's epochs on one rank, with a test after each epoch.

    Attributes:
        validated_run: The validated job, strategy and settings.

        folder: The folder of the run.

        record: The record of this rank.

        report_progress: Receives the progress of the training.

        write_scalars: Writes TensorBoard scalars.

        last_report_time: The time of the last progress report, in seconds.

        last_step: (epoch, loss) of the last step, or None.

        train_dataset: The training set.

        test_dataset: The test set, or None.

        steps_per_epoch: The number of steps of an epoch.

        steps: The number of steps of the training.

        epochs: The number of epochs.

        start: (epoch, step of it) at which the training starts.

        status: "finished" or "stopped".

        saved_progress: The progress of the last checkpoint, or None.

        peak_optimizer_bytes: The most bytes of state of optimizers that no longer exist.

        epoch_fields: Further fields of an epoch's line in the record.

        checkpoint_fields: Further fields of a checkpoint's state.json.

        callbacks: Calls the job's callbacks, on rank 0.

        best_test: The best test so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        validated_run: ValidatedRun,
        folder: Path,
        record: Recorder,
        report_progress: Progress,
        write_scalars: Callable[..., None],
    ) -> None:
        super().__init__(
            trainer, bool(validated_run.settings.tensorboard or validated_run.job.callbacks)
        )
        self.validated_run = validated_run
        self.folder = folder
        self.record = record
        self.report_progress = report_progress
        self.write_scalars = write_scalars
        self.last_report_time = -1.0
        self.last_step: tuple[int, float] | None = None
        job = validated_run.job
        settings = validated_run.settings
        self.train_dataset: Dataset = open_dataset(job.train, settings.folder)
        self.test_dataset: Dataset | None = (
            None if job.test is None else open_dataset(job.test, settings.folder)
        )
        self.steps_per_epoch = validated_run.inspection.order.steps
        # A resumed run may begin with a test, before any step sets the batch size.
        self.training.state.use_batch_size(min(job.batch, validated_run.inspection.samples))
        self.steps = min(settings.limit or 2**62, job.epochs * self.steps_per_epoch)
        trainer.checker.schedule.plan_end(self.steps)
        self.epochs = job.epochs
        self.start = (0, 0)
        self.status = "finished"
        self.saved_progress: int | None = None
        self.peak_optimizer_bytes = 0
        self.epoch_fields: dict[str, Any] = {}
        self.checkpoint_fields: dict[str, Any] = {}
        self.callbacks = CallbackRunner(job.callbacks if trainer.world.rank == 0 else ())
        self.best_test = BestTest(folder, validated_run.resume_checkpoint)

    def run_training(self) -> str:
        """Run the training to its end, and return its status."""
        if self.validated_run.resume_checkpoint is not None:
            self.resume_from_checkpoint(self.validated_run.resume_checkpoint)
        if self.trainer.is_server:
            run_parameter_server(self.training)
            return self.status
        self._train_epochs()
        return self.status

    def follow_run(self) -> AbstractContextManager[None]:
        """Call the callbacks at the beginning and at the end of the run, in this context."""
        if self.trainer.is_server:
            return nullcontext()
        if self.validated_run.settings.keep:
            self.best_test.write(self.trainer.world.rank == 0)
        endpoints = self.training.options.exchange_options.endpoints
        step = endpoints.step if endpoints is not None else None
        return self.callbacks.follow_run(
            describe_run_start(self.validated_run, self.folder, self.steps, step),
            lambda: self.status,
        )

    def _train_epochs(self) -> None:
        """Train all epochs that are left."""
        settings = self.validated_run.settings
        endpoints = self.training.options.exchange_options.endpoints
        if endpoints is not None and endpoints.step is not None:
            resume_from_servers(
                self.training, self.validated_run.inspection.order, self.folder, endpoints
            )
            self.save_due_checkpoint()
        self.start = self.find_start(self.validated_run.resume_checkpoint)
        is_over = self.has_reached_limit
        if self.start[0] and not self.start[1] and not is_over:
            with use_temporary_exchange(self.training):
                is_over = self.finish_resumed_epoch(self.start[0] - 1)
        if not is_over:
            self.train_segments()
        # If no step is left after a recovery, no step has set up the exchange.
        if endpoints is not None and self.training.setup.exchange is None:
            set_up_exchange(self.training)
        if settings.save and self.status == "finished":
            self.save_progress()
        # The goal was reached before the last step.
        if self.status == "finished" and self.last_step and self.trainer.steps < self.steps:
            self.steps = self.trainer.steps
            self.report_step(*self.last_step)

    def save_due_checkpoint(self) -> None:
        """Save the checkpoint that was due when the previous ranks failed."""
        steps = self.trainer.steps
        interval = self.validated_run.settings.save
        if (self.folder / f"checkpoint-{steps:08}").is_dir():
            self.saved_progress = steps
        elif interval and steps and steps % interval == 0:
            with use_temporary_exchange(self.training):
                self.save_progress()

    @property
    def progress(self) -> int:
        """The progress of the training; there is at most one checkpoint for each value."""
        return self.trainer.steps

    @property
    def serial_steps(self) -> int:
        """The completed steps, in steps of serial."""
        return self.trainer.steps

    @property
    def has_reached_limit(self) -> bool:
        """Whether the number of steps in the settings is completed."""
        return self.validated_run.settings.has_reached_limit(self.serial_steps)

    def find_start(self, saved: SavedCheckpoint | None) -> tuple[int, int]:
        """Return (epoch, step of it) at which the training starts."""
        return divmod(self.trainer.steps, self.steps_per_epoch)

    def iterate_segments(self) -> Iterator[int]:
        """Yield the epochs."""
        yield from range(self.start[0], self.epochs)

    def train_segment(self, segment: int) -> bool:
        """Train to the end of an epoch.

        Args:
            segment: The epoch.

        Returns:
            False if the run ends before the end of the epoch.
        """
        batches = self.trainer.batches(
            self.train_dataset,
            self.validated_run.job.batch,
            segment,
            start=self.start[1] if segment == self.start[0] else 0,
            loaders=self.validated_run.settings.loaders,
            sampler=self.validated_run.job.sampler,
        )
        try:
            return self.train_batches(segment, batches)
        except StepFailed as error:
            if not error.differs or self.saved_progress is None:
                raise
            checkpoint = self.folder / f"checkpoint-{self.saved_progress:08}"
            raise StepFailed(
                f"{error.message}. The checkpoint before it is {checkpoint}; continue from it with "
                f"resume={str(checkpoint)!r}",
                step=error.step,
                tensor=error.tensor,
                differs=True,
                when=error.when,
            ) from error

    @property
    def needs_check(self) -> bool:
        """Whether the next step is the last one, or the last before a checkpoint."""
        if not self.training.compares_steps:
            return False
        number = self.trainer.steps + 1
        interval = self.validated_run.settings.save
        return (
            number == self.steps
            or bool(interval and number % interval == 0)
            or bool(self.validated_run.settings.keep and number % self.steps_per_epoch == 0)
        )

    def end_step(self, segment: int, result: StepResult, rate: float) -> bool:
        """Report a step, and save if a checkpoint is due or a stop is requested.

        Args:
            segment: The epoch.
            result: The result of the step.
            rate: The learning rate before the step.

        Returns:
            False if the run ends.
        """
        settings, steps = self.validated_run.settings, self.training.state.steps
        if settings.tensorboard:
            self.write_scalars(steps, loss=result.loss, lr=rate)
        self.report_step(segment, result.loss)
        if self.callbacks.callbacks and self.callbacks.observe_step(
            StepReport(steps, segment, result.loss, rate)
        ):
            # all ranks see it in the next step
            self.trainer.world.stop.set()
        if result.stop:
            self.end_early()
            return False
        if settings.save and steps % settings.save == 0:
            self.save_progress()
        return settings.limit is None or not self.has_reached_limit

    def end_early(self) -> None:
        """End the run because a rank requested it. Collective.

        If a callback did, the training is finished; otherwise it is stopped, and saved.
        """
        if self.validated_run.job.callbacks and self.trainer.world.broadcast_object(
            self.callbacks.wants_end
        ):
            return
        self.status = "stopped"
        self.save_progress()

    def end_segment(self, segment: int, start_time: float) -> bool:
        """Run the test after an epoch, and record the epoch.

        Args:
            segment: The epoch.
            start_time: The time at which the epoch began, in seconds of the record's clock.

        Returns:
            True if the goal is reached or the run stops.
        """
        job = self.validated_run.job
        test = (
            self.trainer.evaluate_with_weight(
                self.test_dataset, job.metric, self.validated_run.settings.loaders
            )
            if self.test_dataset is not None
            else None
        )
        sent = self.get_sent_counts(TEST_TRAFFIC)
        self.record.write_line(
            "epoch",
            epoch=segment,
            test=test,
            start=round(start_time, 6),
            seconds=round(self.record.now() - start_time, 6),
            **({"sent": sent} if sent else {}),
            **self.epoch_fields,
        )
        is_over = test is not None and self.handle_test(segment, test)
        if not self.trainer.strategy.guarantees.replicas_equal and self.is_stop_requested():
            self.end_early()  # The replicas might not average before the end of the run.
            return True
        return is_over

    def handle_test(self, segment: int, test: dict[str, float]) -> bool:
        """Report a test, and save if it is the best one. Collective.

        Args:
            segment: The epoch.
            test: The result of the test.

        Returns:
            True if the goal is reached or a callback ends the run.
        """
        job = self.validated_run.job
        self.write_scalars(self.trainer.steps, **{f"test {job.metric_name}": test["value"]})
        report = EpochReport(
            self.serial_steps, segment, job.metric_name, test["value"], job.wants_lower_tests
        )
        if self.trainer.world.rank == 0 and self.last_step:
            self.report_progress(
                {
                    "epoch": segment,
                    "step": self.trainer.steps,
                    "steps": self.steps,
                    "loss": self.last_step[1],
                    "metric": job.metric_name,
                    "test": test["value"],
                }
            )
        # all ranks do as rank 0 says, which alone may see the files
        if self.validated_run.settings.keep == "best" and self.trainer.world.broadcast_object(
            self.best_test.is_beaten_by(report)
        ):
            self.save_progress()
            self.best_test.keep(report, writes=self.trainer.world.rank == 0)
        is_over = self.callbacks.observe_test(report)
        if job.callbacks:
            is_over = self.trainer.world.broadcast_object(is_over)
        return is_over or self.validated_run.settings.has_reached_goal(test, job)

    def get_sent_counts(self, what: str) -> dict[str, Any]:
        """Return what was sent outside of steps, for tests or checkpoints."""
        exchange = self.training.setup.exchange
        return {
            kind: number
            for kind, number in (exchange.sent_bytes if exchange else {}).items()
            if kind == what
        }

    def is_stop_requested(self) -> bool:
        """Return whether a stop of any rank was requested. Collective."""
        world = self.trainer.world
        with explain_independent_steps():
            return bool(world.all_reduce(tensor(float(world.stop.is_requested))) > 0)

    def finish_resumed_epoch(self, epoch: int) -> bool:
        """Finish an epoch of which the last step was already completed.

        Its test is made now, unless this run or the saved run made it.

        Args:
            epoch: The epoch.

        Returns:
            True if the goal is reached or the run stops.
        """
        saved = self.validated_run.resume_checkpoint
        trains_clients = self.validated_run.resolved.trains_clients
        line = self.trainer.world.broadcast_object(
            find_recorded_epoch(self.folder, epoch)
            or (saved and saved.find_epoch_record(epoch, trains_clients))
        )
        if line is None:
            return self.end_segment(epoch, self.record.now())
        return self.validated_run.settings.has_reached_goal(line["test"], self.validated_run.job)

    def report_step(self, epoch: int, loss: float) -> None:
        """Report the progress on rank 0, at most ten times a second."""
        self.last_step = epoch, loss
        if self.trainer.world.rank:
            return
        now, steps = self.record.now(), self.trainer.steps
        if now - self.last_report_time > 0.1 or steps == self.steps:
            self.last_report_time = now
            self.report_progress({"epoch": epoch, "step": steps, "steps": self.steps, "loss": loss})

    def resume_from_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Resume from a checkpoint, after a check that every rank has the same one.

        Hosts may have read different folders.

        Args:
            saved: The checkpoint.

        Raises:
            StepFailed: If this rank found another checkpoint than rank 0.
        """
        if self.trainer.world.broadcast_object(saved.checksums) != saved.checksums:
            raise StepFailed(
                f"this rank found another checkpoint in {saved.folder} than rank 0; put the run "
                "where all hosts see it"
            )
        trainer_snapshot.restore_snapshot(self.training, saved)
        self.saved_progress = self.progress

    def save_progress(self) -> None:
        """Save a checkpoint, unless there is one of the current progress."""
        if self.saved_progress == self.progress:
            return
        with self.trainer.world.stop.note_saving():
            self.trainer.save(
                self.folder,
                resume_check.build_job_identity(
                    self.validated_run.job, self.validated_run.inspection
                ),
                **self.checkpoint_fields,
            )
        if sent := self.get_sent_counts(CHECKPOINT_TRAFFIC):
            self.record.write_line("checkpoint", step=self.trainer.steps, sent=sent)
        self.saved_progress = self.progress


def describe_run_start(
    validated_run: ValidatedRun, folder: Path, steps: int, step: int | None = None
) -> RunStart:
    """Describe what is known of a run before its first step, for callbacks.

    Args:
        validated_run: The validated job, strategy and settings.

        folder: The folder of the run.

        steps: The steps of the whole training.

        step: The completed steps, if ranks were started again in this run.
    """
    job = validated_run.job
    saved = validated_run.resume_checkpoint
    completed = step if step is not None else saved.step if saved else 0
    tests = list_earlier_tests(validated_run, folder, completed) if job.callbacks else []
    return RunStart(
        folder,
        job.name,
        str(validated_run.requested),
        completed,
        steps,
        job.metric_name,
        tuple(tests),
    )


def list_earlier_tests(
    validated_run: ValidatedRun, folder: Path, completed: int
) -> list[EpochReport]:
    """List the tests that a run, and those from which it goes on, made up to a step.

    Args:
        validated_run: The validated job, strategy and settings.
        folder: The folder of the run.
        completed: The completed steps.

    Returns:
        The tests in order.
    """
    job, rounds = validated_run.job, validated_run.rounds
    epoch_steps = validated_run.inspection.order.steps
    tests: dict[int, EpochReport] = {}
    for run, limit in list_resumed_runs(folder, completed):
        for line in list_epoch_records(run, trains_clients=rounds is not None):
            epoch = line["epoch"]
            end = rounds.count_serial_steps(epoch + 1) if rounds else (epoch + 1) * epoch_steps
            if line["test"] and end <= limit:
                tests.setdefault(
                    epoch,
                    EpochReport(
                        end, epoch, job.metric_name, line["test"]["value"], job.wants_lower_tests
                    ),
                )
    return [tests[epoch] for epoch in sorted(tests)]


def log_memory(training: Training, other_optimizer_bytes: int = 0) -> None:
    """Write the bytes that a rank holds to the record.

    Args:
        training: The training of the rank.
        other_optimizer_bytes: The most bytes of state that earlier optimizers had.
    """
    setup, exchange = training.setup, training.setup.exchange
    activations = setup.passes.peak_bytes if setup.passes else 0
    # Passes of the user measure nothing; the probe's value is used.
    if not activations and not setup.layout.is_partitioned and setup.probe is not None:
        activations = setup.probe.activation_bytes * max(1, training.state.micro_batch_samples)
    training.log.write_memory(
        parameters=_count_tensor_bytes(setup.parameters.values())
        // (exchange.sharing_ranks if exchange else 1),
        optimizer=max(other_optimizer_bytes, count_state_bytes(training.state.optimizer)),
        gradients=_count_tensor_bytes(
            each for each in setup.parameters.values() if each.requires_grad
        ),
        # Without a measurement, the field is left out.
        **({"activations": activations} if activations or not setup.layout.is_partitioned else {}),
        exchange=exchange.peak_bytes if exchange else 0,
    )


def count_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of an optimizer's state."""
    # The state may contain entries that belong to no parameter and are no dictionaries.
    entries = (
        entry.values() if isinstance(entry, dict) else (entry,)
        for entry in optimizer.state.values()
    )
    return _count_tensor_bytes(
        value for values in entries for value in values if isinstance(value, Tensor)
    )


def _count_tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
