"""Progress of runs: a bar at a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from paragrad.report.notebook import format_step_value

LINE_INTERVAL = 5.0  # seconds between plain lines


class ProgressDisplay:
    """Shows the runs of one command, one after another; a context manager. transient: a bar
    goes when it is full.
    """

    def __init__(self, console: Console, transient: bool = False) -> None:
        self.console = console
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[value]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=transient,
        )

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def track_run(self, name: str, what: str = "step") -> Any:
        """What to tell of the run of that name: a function of {"step", "steps", and "loss" or
        "difference" if there is one}; what: else is counted.
        """
        return (
            self._track_with_bar(name)
            if self.console.is_terminal
            else self._track_with_lines(name, what)
        )

    def _track_with_bar(self, name: str) -> Any:
        task = self.bars.add_task(name, total=None, value="")
        return lambda told: self.bars.update(
            task, completed=told["step"], total=told["steps"], value=format_step_value(told)
        )

    def _track_with_lines(self, name: str, what: str) -> Any:
        last = time.monotonic()

        def tell(told: dict[str, Any]) -> None:
            nonlocal last
            if told["step"] == told["steps"] or time.monotonic() - last > LINE_INTERVAL:
                last = time.monotonic()
                self.console.print(
                    ", ".join(
                        filter(
                            None,
                            (
                                f"{name}: {what} {told['step']} of {told['steps']}",
                                format_step_value(told),
                            ),
                        )
                    ),
                    highlight=False,
                    soft_wrap=True,
                    markup=False,
                )

        return tell
