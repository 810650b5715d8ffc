"""Run: a finished training, read from its folder."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from functools import cached_property
from math import inf
from pathlib import Path

from torch import nn

from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.loops.plain_pytorch import PLAIN_PYTORCH
from paragrad.record.noise_scale import NoiseScale, track_noise_scale
from paragrad.record.record import ENDED_EARLY, Line, Record
from paragrad.record.round_counts import CLIENT_LOST, IDLE_ROUND, NO_CLIENT_RETURNED
from paragrad.report.timing import measure_step_time
from paragrad.strategies.registry import strategy
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint.checkpoint_files import (
    BestCheckpoint,
    list_checkpoint_folders,
    read_best_checkpoint,
    read_folder_step,
)
from paragrad.trainer.checkpoint.tensor_files import load_weights


def format_test_value(value: float, unit: str, spread: float | None = None) -> str:
    """Format the value of a test: two decimals of per cent and from 10 on, otherwise four.

    Args:
        value: The value, or its mean over seeds.
        unit: The unit of the metric.
        spread: The standard deviation over seeds, or None.

    Returns:
        The text, without the unit.
    """
    decimals = 2 if unit == "%" or abs(value) >= 10 else 4
    return f"{value:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")


class Run(Record):
    """A finished training: its record, and the trained model.

    Attributes:
        job: The job.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        """Read the record of a run.

        Args:
            job: The job that was trained.
            folder: The folder of the run.
        """
        super().__init__(folder)
        self.job = job

    def __repr__(self) -> str:
        """The job, the strategy and the result in one line."""
        facts = [
            f"Run of {self.job.name} under {self.header['strategy']}: "
            f"{self.end['status'] if self.end else 'died'}"
        ]
        if losses := self.losses:
            facts.append(f"{len(losses)} steps, last loss {losses[-1]:.4f}")
        if self.test is not None:
            value = format_test_value(self.test, self.header["job"].get("unit", ""))
            facts.append(f"test {self.job.metric_name} {value}")
        if self.seconds_per_step is not None:
            facts.append(f"{1e3 * self.seconds_per_step:.2f} ms per step")
        if self.stopped:
            facts.append(
                f"stopped at step {self.checkpoint_step}, continue with resume={str(self.folder)!r}"
            )
        return ", ".join([*facts, f"in {self.folder}"])

    def to_json(self) -> Line:
        """Convert the results to plain JSON (keys: docs/reference/json.md).

        Returns:
            The values, by name.
        """
        difference = self.difference or {}
        step_time = measure_step_time([self])
        header = self.header
        return {
            "schema": 1,
            "job": self.job.name,
            "strategy": header["strategy"],
            "resolved": header["resolved"],
            "workers": header["workers"],
            "machine": header["machine"],
            "metric": header["job"]["metric"],
            "test": self.test,
            "loss": self.losses[-1] if self.losses else None,
            "steps": len(self.group_step_lines()),
            "seconds_per_step": self.seconds_per_step,
            "seconds_per_step_between": step_time and step_time.finite_bounds,
            "others": step_time and step_time.load and step_time.load.others,
            "sent": self.sent_per_step,
            "memory": self.memory,
            "audit": asdict(self.sample_count),
            "first_step": self.first_step,
            "compared_steps": self.compared_steps,
            "compared_updates": self.compared_updates,
            "skipped_steps": self.skipped_steps,
            "events": self.event_messages,
            "noise": self.noise and {**asdict(self.noise), "scale": self.noise.scale},
            "difference": difference.get("value"),
            "baseline": difference.get("baseline"),
            "tensor": difference.get("tensor"),
            "stopped_at": self.checkpoint_step if self.stopped else None,
            "folder": str(self.folder),
            "trace": header.get("settings", {}).get("trace"),
        }

    @cached_property
    def noise(self) -> NoiseScale | None:
        """The gradient noise scale after the last step in which it was measured."""
        lines_by_step: dict[int, list[Line]] = {}
        for line in self.collect_step_lines():
            lines_by_step.setdefault(line["step"], []).append(line)
        return next(
            iter(
                deque(
                    track_noise_scale(lines for _, lines in sorted(lines_by_step.items())), maxlen=1
                )
            ),
            None,
        )

    @property
    def compared_steps(self) -> int:
        """The number of steps that were compared with one worker's and were equal."""
        return len(
            {
                line["numbers"]["step"]
                for line in self.select_lines("event")
                if line["name"] == "checked" and "step" in line["numbers"]
            }
        )

    @property
    def compared_updates(self) -> int:
        """The number of compared steps of which the update was compared too."""
        return sum(
            line["numbers"].get("update") == 1.0
            for line in self.select_lines("event")
            if line["name"] == "checked"
        )

    @property
    def skipped_steps(self) -> int:
        """The number of steps without an update, because a gradient overflowed in float16."""
        return len(self.overflowed_steps)

    @property
    def first_step(self) -> str | None:
        """The result of checking the first step against one worker, or why it was not checked."""
        messages = [
            line["message"] for line in self.select_lines("event") if line["name"] == "checked"
        ]
        messages += [
            f"{line['picked']}: {line['because']}"
            for line in self.select_lines("choice")
            if line["what"] == "first step"
        ]
        return str(messages[0]) if messages else None

    @property
    def event_messages(self) -> list[str]:
        """Messages about what happened to processes and clients.

        Of processes: which died, were late or joined. Of clients, round by round: which were lost,
        as reported by their worker. That no client came back, or that a round trained for nothing,
        is reported by the first worker.
        """
        # the event `open` only says that workers may join
        process_events = [
            line for line in self.run_lines if line["kind"] == "event" and line["name"] != "open"
        ]
        client_events = [
            line
            for rank in range(len(self.ranks))
            for line in self.select_lines("event", rank)
            if line["name"] == CLIENT_LOST
            or (line["name"] in (NO_CLIENT_RETURNED, IDLE_ROUND) and rank == 0)
        ]
        early_ends = [line for line in self.select_lines("event") if line["name"] == ENDED_EARLY]
        client_events.sort(
            key=lambda line: (line["numbers"]["round"], line["numbers"].get("client", inf))
        )
        return [line["message"] for line in process_events + client_events + early_ends]

    @property
    def resolved(self) -> Strategy:
        """The strategy with every `auto` replaced.

        Raises:
            Refused: It is a user's strategy, and its file was not imported.
        """
        text = self.header["resolved"]
        if text == PLAIN_PYTORCH:
            raise Refused(
                f"{self.folder} is the time of a {PLAIN_PYTORCH}, which has no strategy; give the "
                "folder of a row of the comparison"
            )
        try:
            return strategy(text)
        except Refused as error:
            raise Refused(
                f"{self.folder} was trained under {text}: {error} (if the strategy is your own, "
                "import the file that defines it first)"
            ) from None

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped on request and saved a checkpoint to continue from."""
        return bool(self.end and self.end["status"] == "stopped")

    @property
    def best(self) -> BestCheckpoint | None:
        """The checkpoint of the best test, if the run keeps it (`keep="best"`)."""
        return read_best_checkpoint(self.folder)

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        checkpoints = list_checkpoint_folders(self.folder)
        return read_folder_step(checkpoints[0]) if checkpoints else None

    def model(self, best: bool = False) -> nn.Module:
        """Load the trained model as a plain module with the names of serial training.

        Args:
            best: Whether to load the model of the best test, in place of the last one.

        Returns:
            The model.

        Raises:
            Refused: The weights do not fit the model that the job builds, or the run kept no best
                test.
        """
        folder = self.folder
        if best:
            if self.best is None:
                raise Refused(
                    f'{folder} kept no checkpoint of its best test; train with keep="best" '
                    "(--keep best)"
                )
            folder = self.best.folder
        model = self.job.build_model()
        path = folder / "model.safetensors"
        try:
            load_weights(model, path)
        except RuntimeError as error:
            raise Refused(
                f"{path} does not fit the model as job {self.job.name} builds it: a forward "
                "created, tied or reshaped its parameters; load the file by safetensors into a "
                f"model that has made a forward ({error})"
            ) from error
        return model
