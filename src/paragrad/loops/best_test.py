"""Keeps the checkpoint of the best test of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paragrad.jobs.callback import EpochReport
from paragrad.trainer.checkpoint.checkpoint_files import (
    BestCheckpoint,
    SavedCheckpoint,
    name_checkpoint,
    read_best_checkpoint,
    write_best_checkpoint,
)


class BestTest:
    """The best test so far, also of the run from whose checkpoint this one goes on.

    Args:
        folder: The folder of the run.
        resumed: The checkpoint from which the run goes on, or None.

    Attributes:
        folder: As the argument.
        best: The checkpoint of the best test so far, or None.
    """

    def __init__(self, folder: Path, resumed: SavedCheckpoint | None) -> None:
        self.folder = folder
        # the run itself has one if its ranks were started again
        best = read_best_checkpoint(folder)
        if best is None and resumed is not None:
            best = read_best_checkpoint(resumed.folder.parent)
            best = best if best is not None and best.step <= resumed.step else None
        self.best: BestCheckpoint | None = best

    def is_beaten_by(self, report: EpochReport) -> bool:
        """Tell whether a test is better than the best one so far.

        Args:
            report: The epoch with its test.
        """
        return report.is_better_than(
            replace(report, value=self.best.value)
            if self.best and self.best.metric == report.metric
            else None
        )

    def keep(self, report: EpochReport, writes: bool) -> None:
        """Keep the checkpoint of this test, which was saved before.

        Args:
            report: The epoch with its test.
            writes: Whether this process writes the file.
        """
        self.best = BestCheckpoint(
            self.folder / name_checkpoint(report.step),
            report.step,
            report.epoch,
            report.metric,
            report.value,
        )
        self.write(writes)

    def write(self, writes: bool) -> None:
        """Write the name of the best checkpoint into the folder of the run, if there is one.

        Args:
            writes: Whether this process writes the file.
        """
        if writes and self.best is not None:
            write_best_checkpoint(self.best, self.folder)
