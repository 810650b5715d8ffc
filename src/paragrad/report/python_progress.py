"""Progress of a call from Python: a bar in a notebook, elsewhere a line from time to time.

It is separate from `progress.py`, because a call from Python needs no terminal library.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from html import escape
from typing import Any

BAR_INTERVAL = 0.2  # seconds between two states of a bar
LINE_INTERVAL = 5.0  # seconds between plain lines

Report = Callable[[dict[str, Any]], None]  # takes the state of a run
TrackRun = Callable[[str], Report]  # takes the name of a run


def make_progress() -> TrackRun:
    """Show the runs of one call from Python: in a notebook as a bar, elsewhere as lines.

    A line is printed to stderr once in LINE_INTERVAL, so shorter calls print nothing.

    Returns:
        A function from the name of a run to a function that takes its state.
    """
    return make_notebook_progress() or make_line_progress()


def make_line_progress() -> TrackRun:
    """Print the state of the runs of one call to stderr, once in LINE_INTERVAL.

    Returns:
        A function from the name of a run to a function that takes its state.
    """
    last = time.monotonic()

    def track_run(name: str) -> Report:
        def report(state: dict[str, Any]) -> None:
            nonlocal last
            if "debugging" not in state and time.monotonic() - last > LINE_INTERVAL:
                last = time.monotonic()
                # a stderr without a reader, or closed, or none at all, does not end the run
                with suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"{format_state(name, state)}\n")
                    sys.stderr.flush()

        return report

    return track_run


def make_notebook_progress() -> TrackRun | None:
    """Show one bar below the cell of a notebook, for all runs of a call.

    Returns:
        A function from the name of a run to a function that takes its state. None outside of a
        notebook.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import HTML, display

    bar = display(HTML(""), display_id=True)
    last = 0.0

    def track_run(name: str) -> Report:
        def update(state: dict[str, Any]) -> None:
            nonlocal last
            if "debugging" in state:
                return
            if state["step"] == state["steps"] or time.monotonic() - last > BAR_INTERVAL:
                last = time.monotonic()
                bar.update(
                    HTML(
                        f'<progress value="{state["step"]}" max="{state["steps"]}"></progress> '
                        f"{escape(format_state(name, state))}"
                    )
                )

        return update

    return track_run


def format_state(name: str, state: dict[str, Any], what: str = "step") -> str:
    """Format the state of a run as a line.

    Args:
        name: The name of the run.
        state: The state: {"step", "steps"}, and what is known of a test or of the step's value.
        what: What is counted.

    Returns:
        The line.
    """
    position = f"{what} {state['step']} of {state['steps']}"
    if "test" in state:
        test = f"test {state['metric']} {state['test']:.4g}"
        return f"{name}: epoch {state['epoch'] + 1}, {position}: {test}"
    return ", ".join(filter(None, (f"{name}: {position}", format_step_value(state))))


def format_step_value(state: dict[str, Any]) -> str:
    """Format the loss or the difference of a step, if it is known.

    Args:
        state: The state: {"step", "steps", and "loss" or "difference"}.

    Returns:
        The text.
    """
    if "loss" in state:
        return f"loss {state['loss']:.4f}"
    return f"difference {state['difference']:.1e}" if "difference" in state else ""
