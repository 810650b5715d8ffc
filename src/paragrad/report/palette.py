"""The colours of a page and of its charts: name -> (light theme, dark theme).

Charts are drawn in the light colours.
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
    # colours of strategies, which most colour-blind readers can distinguish: Okabe and Ito 2008
    # without their yellow, which is invisible on white; then Tol 2021. The dark theme uses brighter
    # ones
    "orange": ("#d55e00", "#ff8c42"),
    "green": ("#009e73", "#2fbf8f"),
    "pink": ("#cc79a7", "#e59fc7"),
    "sky": ("#56b4e9", "#8fd3ff"),
    "yellow": ("#e69f00", "#f2b632"),
    "wine": ("#882255", "#d9679a"),
    "olive": ("#8a8a2e", "#bdbd5e"),
    "brown": ("#7a4b2a", "#bd8560"),
    "grey": ("#6b7280", "#a3abb8"),
    # colours of kinds of bytes
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
    """Replace each light colour of a style by the page's CSS variable.

    Args:
        text: The style.

    Returns:
        The style with variables.
    """
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda match: f"var(--{_NAMES[match[0]]})" if match[0] in _NAMES else match[0],
        text,
    )
