"""Progress of runs: a bar at a terminal, a plain line from time to time elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
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

from paragrad.report.python_progress import LINE_INTERVAL, format_state, format_step_value


class ProgressDisplay:
    """Shows the runs of one command, one after another; a context manager.

    Attributes:
        console: The console.
        bars: The bars.
    """

    def __init__(self, console: Console, transient: bool = False) -> None:
        """Create the display.

        Args:
            console: The console to print to.
            transient: Whether a bar disappears when it is full.
        """
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
        if self.console.is_terminal:  # elsewhere rich would print an empty line
            self.bars.stop()

    def track_run(self, name: str, what: str = "step") -> Any:
        """Start to show a run.

        Args:
            name: The name of the run.
            what: What is counted, where there is no bar.

        Returns:
            A function that takes {"step", "steps", and "loss" or "difference" if known}; after a
            test also {"epoch", "metric", "test"}.
        """
        show = (
            self._track_with_bar(name)
            if self.console.is_terminal
            else self._track_with_lines(name, what)
        )

        def report(state: dict[str, Any]) -> None:
            # A reader of the pipe that is gone (`| tee`, at Ctrl-C) is no reason to end the run.
            # rich leaves Python then.
            with suppress(BrokenPipeError, SystemExit):
                show(state)

        return report

    def _track_with_bar(self, name: str) -> Any:
        task = self.bars.add_task(name, total=None, value="")

        def report(state: dict[str, Any]) -> None:
            if "debugging" in state:
                self.bars.stop()
                return
            self._print_test(name, state)
            self.bars.update(
                task, completed=state["step"], total=state["steps"], value=format_step_value(state)
            )

        return report

    def _print_test(self, name: str, state: dict[str, Any]) -> None:
        """Print a line for an epoch that was tested."""
        if "test" in state:
            self.console.print(
                format_state(name, state),
                highlight=False,
                soft_wrap=True,
                markup=False,
            )

    def _track_with_lines(self, name: str, what: str) -> Any:
        last = time.monotonic()

        def report(state: dict[str, Any]) -> None:
            nonlocal last
            self._print_test(name, state)
            if "test" in state or "debugging" in state:
                return
            if state["step"] == state["steps"] or time.monotonic() - last > LINE_INTERVAL:
                last = time.monotonic()
                self.console.print(
                    format_state(name, state, what),
                    highlight=False,
                    soft_wrap=True,
                    markup=False,
                )

        return report
