"""The colours of a page and of its charts, by day and by night: name -> (light, dark). Charts
are drawn in the light ones.
"""

from __future__ import annotations

import re

PALETTE = {
    "ink": ("#1f2933", "#e6edf3"),
    "muted": ("#5f6c7b", "#9aa7b5"),
    "line": ("#dde3ea", "#323a44"),
    "paper": ("#ffffff", "#161b22"),
    "ground": ("#f4f6f8", "#0d1117"),
    "accent": ("#0072b2", "#4ea8de"),
    "bad": ("#a4260a", "#ff8f7d"),
    # of strategies: told apart by most colour-blind eyes (Okabe and Ito 2008, without their
    # yellow, which paper swallows; then Tol 2021); at night as bright as is read on black
    "orange": ("#d55e00", "#ff8c42"),
    "green": ("#009e73", "#2fbf8f"),
    "pink": ("#cc79a7", "#e59fc7"),
    "sky": ("#56b4e9", "#8fd3ff"),
    "yellow": ("#e69f00", "#f2b632"),
    "wine": ("#882255", "#d9679a"),
    "olive": ("#8a8a2e", "#bdbd5e"),
    "brown": ("#7a4b2a", "#bd8560"),
    "grey": ("#6b7280", "#a3abb8"),
    # of kinds of bytes
    "steel": ("#3d6b8e", "#6fa3cc"),
    "ochre": ("#c58a2b", "#d9a348"),
    "moss": ("#6b9a5b", "#8fc07c"),
    "plum": ("#8a5a83", "#b98ab1"),
    "ash": ("#777777", "#a0a0a0"),
}

COLOURS = tuple(
    PALETTE[name][0]
    for name in (
        "ink",
        "accent",
        "orange",
        "green",
        "pink",
        "sky",
        "yellow",
        "wine",
        "olive",
        "brown",
    )
)
KINDS = tuple(PALETTE[name][0] for name in ("steel", "ochre", "moss", "plum", "ash"))
INK, MUTED, FAINT, PAPER, BASELINE_COLOUR, COMPUTED_COLOUR = (
    PALETTE[name][0] for name in ("ink", "muted", "line", "paper", "grey", "ash")
)

_NAMES = {light: name for name, (light, _) in PALETTE.items()}


def replace_colours(text: str) -> str:
    """Every light colour of a style as the name of what the page makes of it."""
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda found: f"var(--{_NAMES[found[0]]})" if found[0] in _NAMES else found[0],
        text,
    )
