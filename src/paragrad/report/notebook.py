"""Progress in a notebook.

It is separate from `progress.py`, because a call from Python needs no terminal library.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

BAR_INTERVAL = 0.2  # seconds between two states of a bar


def make_notebook_progress() -> Callable[[str], Any] | None:
    """Show one bar below the cell of a notebook, for all runs of a call.

    Returns:
        A function from the name of a run to a function that takes its state. None outside of a
        notebook: a call from Python prints nothing.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import HTML, display

    bar = display(HTML(""), display_id=True)
    last = 0.0

    def track_run(name: str) -> Any:
        def update(state: dict[str, Any]) -> None:
            nonlocal last
            if state["step"] == state["steps"] or time.monotonic() - last > BAR_INTERVAL:
                last = time.monotonic()
                bar.update(
                    HTML(
                        f'<progress value="{state["step"]}" max="{state["steps"]}"></progress> '
                        f"{escape(name)}: step {state['step']} of {state['steps']}, "
                        f"{format_step_value(state)}"
                    )
                )

        return update

    return track_run


def format_step_value(told: dict[str, Any]) -> str:
    """Format the loss or the difference of a step, if it is known.

    Args:
        told: The state: {"step", "steps", and "loss" or "difference"}.

    Returns:
        The text.
    """
    if "loss" in told:
        return f"loss {told['loss']:.4f}"
    return f"difference {told['difference']:.1e}" if "difference" in told else ""
