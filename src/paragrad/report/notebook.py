"""Progress in a notebook. Apart from `progress.py`, as a call from Python needs nothing of a
terminal's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

BAR_INTERVAL = 0.2  # seconds between two states of a bar


def make_notebook_progress() -> Callable[[str], Any] | None:
    """In a notebook, one bar below the cell for all runs of a call: of the name of a run, what
    to tell of it. None elsewhere: a call from Python prints nothing.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import HTML, display

    shown = display(HTML(""), display_id=True)
    last = 0.0

    def run(name: str) -> Any:
        def tell(told: dict[str, Any]) -> None:
            nonlocal last
            if told["step"] == told["steps"] or time.monotonic() - last > BAR_INTERVAL:
                last = time.monotonic()
                shown.update(
                    HTML(
                        f'<progress value="{told["step"]}" max="{told["steps"]}"></progress> '
                        f"{escape(name)}: step "
                        f"{told['step']} of {told['steps']}, {format_step_value(told)}"
                    )
                )

        return tell

    return run


def format_step_value(told: dict[str, Any]) -> str:
    """What is known of a step."""
    if "loss" in told:
        return f"loss {told['loss']:.4f}"
    return f"difference {told['difference']:.1e}" if "difference" in told else ""
