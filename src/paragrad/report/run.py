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
from paragrad.record.noise_scale import NoiseScale, track_noise_scale
from paragrad.record.record import Line, Record
from paragrad.record.round_counts import CLIENT_LOST, IDLE_ROUND, NO_CLIENT_RETURNED
from paragrad.report.timing import measure_step_time
from paragrad.strategies.registry import strategy
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.checkpoint.checkpoint_files import list_checkpoint_folders, read_folder_step
from paragrad.trainer.checkpoint.tensor_files import load_weights


class Run(Record):
    """A finished training: its record, and the trained model."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(folder)
        self.job = job

    def __repr__(self) -> str:
        """What it was and how it ended, in one line."""
        told = [
            f"Run of {self.job.name} under {self.header['strategy']}: "
            f"{self.end['status'] if self.end else 'died'}"
        ]
        if losses := self.losses:
            told.append(f"{len(losses)} steps, last loss {losses[-1]:.4f}")
        if self.test is not None:
            told.append(f"test {self.job.metric_name} {self.test:.2f}")
        if self.seconds_per_step is not None:
            told.append(f"{1e3 * self.seconds_per_step:.2f} ms per step")
        if self.stopped:
            told.append(
                f"stopped at step {self.checkpoint_step}, to go on with resume={str(self.folder)!r}"
            )
        return ", ".join([*told, f"in {self.folder}"])

    def to_json(self) -> Line:
        """What it was and found, in plain JSON ([keys](docs/json.md))."""
        difference = self.difference or {}
        taken = measure_step_time([self])
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
            "seconds_per_step_between": taken and taken.finite_bounds,
            "others": taken and taken.load and taken.load.others,
            "sent": self.sent_per_step,
            "memory": self.memory,
            "audit": asdict(self.sample_count),
            "first_step": self.first_step,
            "events": self.event_messages,
            "noise": self.noise and {**asdict(self.noise), "scale": self.noise.scale},
            "difference": difference.get("value"),
            "tensor": difference.get("tensor"),
            "stopped_at": self.checkpoint_step if self.stopped else None,
            "folder": str(self.folder),
            "trace": header.get("settings", {}).get("trace"),
        }

    @cached_property
    def noise(self) -> NoiseScale | None:
        """Its gradient noise scale after the last step in which it was measured."""
        found: dict[int, list[Line]] = {}
        for line in self.collect_step_lines():
            found.setdefault(line["step"], []).append(line)
        return next(
            iter(deque(track_noise_scale(lines for _, lines in sorted(found.items())), maxlen=1)),
            None,
        )

    @property
    def first_step(self) -> str | None:
        """What its comparison with one worker's said, or why there was none."""
        told = [line["message"] for line in self.select_lines("event") if line["name"] == "checked"]
        told += [
            f"{line['picked']}: {line['because']}"
            for line in self.select_lines("choice")
            if line["what"] == "first step"
        ]
        return str(told[0]) if told else None

    @property
    def event_messages(self) -> list[str]:
        """To its processes: who died, was late, or came; and round by round to clients: who was
        lost, as its worker tells, and that nobody came back, or trained for nothing, as the
        first worker does.
        """
        # an invitation
        own = [
            line for line in self.run_lines if line["kind"] == "event" and line["name"] != "open"
        ]
        told = [
            line
            for rank in range(len(self.ranks))
            for line in self.select_lines("event", rank)
            if line["name"] == CLIENT_LOST
            or (line["name"] in (NO_CLIENT_RETURNED, IDLE_ROUND) and rank == 0)
        ]
        told.sort(key=lambda line: (line["numbers"]["round"], line["numbers"].get("client", inf)))
        return [line["message"] for line in own + told]

    @property
    def resolved(self) -> Strategy:
        """The strategy with every `auto` replaced. Raises Refused where it is somebody's own
        and its file was not imported.
        """
        text = self.header["resolved"]
        try:
            return strategy(text)
        except Refused as error:
            raise Refused(
                f"{self.folder} was trained under {text}: {error} (one of your own is known once "
                f"the file that "
                "defines it is imported)"
            ) from None

    @property
    def stopped(self) -> bool:
        """It was asked to stop, and saved a checkpoint to go on from."""
        return bool(self.end and self.end["status"] == "stopped")

    @property
    def checkpoint_step(self) -> int | None:
        """The step of its newest checkpoint."""
        found = list_checkpoint_folders(self.folder)
        return read_folder_step(found[0]) if found else None

    def model(self) -> nn.Module:
        """The trained model, a plain module with its serial names. Raises Refused where it is
        not as the job builds it.
        """
        model = self.job.build_model()
        path = self.folder / "model.safetensors"
        try:
            load_weights(model, path)
        except RuntimeError as error:
            raise Refused(
                f"{path} does not fit the model as job {self.job.name} builds it: a forward made, "
                f"tied or reshaped "
                f"what it holds; load it by safetensors into one that has made a forward ({error})"
            ) from error
        return model
