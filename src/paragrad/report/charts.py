"""The charts of a comparison's page, as SVG for HTML.

matplotlib draws them without pyplot's global state.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from paragrad.errors import Refused
from paragrad.record.record import Line
from paragrad.report.palette import (
    BASELINE_COLOUR,
    COLOURS,
    FAINT,
    INK,
    KINDS,
    MUTED,
    PALETTE,
    PAPER,
    replace_colours,
)

# matplotlib takes a second to import, and only a page needs it
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# units of a chart; the page scales it, to about 330 pixels on a phone
WIDTH = 420
HEIGHT = 270
TEXT_SIZE = 12  # height of text, in units
MAX_POINTS = 200  # the largest number of points of a line: one for every two units
MAX_SMOOTH_POINTS = 60  # the same for a line of noisy values
MAX_LABEL_LETTERS = 58  # letters across a chart
MARKER_COUNT = 6  # markers along a line
HUNDREDFOLD = 100.0  # how many times as long as another line
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")


@dataclass(frozen=True)
class Style:
    """How a strategy is drawn in all charts of a page.

    Strategies differ in colour and marker; from the eleventh on, also in dashes.

    Attributes:
        colour: The colour of line and marker.
        marker: The shape of the marker.
        dashes: The line style.
        inside: The colour inside of the marker.
    """

    colour: str
    marker: str
    dashes: str = "-"
    inside: str = PAPER


def choose_style(place: int, is_baseline: bool = False) -> Style:
    """Choose the style of a row.

    Args:
        place: The number of the row.
        is_baseline: Whether it is the rounding baseline.

    Returns:
        The style.
    """
    if is_baseline:
        return Style(BASELINE_COLOUR, "x", "--", inside=BASELINE_COLOUR)
    return Style(
        COLOURS[place % len(COLOURS)],
        MARKERS[place % len(MARKERS)],
        "-" if place < len(COLOURS) else "-.",
    )


@dataclass(frozen=True)
class Curve:
    """The line of a strategy: the mean over its seeds, and their range.

    Attributes:
        style: The style.

        name: The strategy.

        x: The x of each point.

        y: The mean of each point.

        low: The smallest value of a seed at each point.

        high: The largest value of a seed at each point.

        seeds: The number of seeds.

        steps: The largest number of steps in a point.
    """

    style: Style
    name: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    seeds: int = 1
    steps: int = 1


def build_curve(
    style: Style, name: str, runs: Sequence[Sequence[tuple[float, float]]], most: int = MAX_POINTS
) -> Curve | None:
    """Combine the points of all seeds into a line.

    Each point is the mean over seeds, as far as all seeds have values. Neighbouring points are
    averaged until there are at most `most`.

    Args:
        style: The style.
        name: The strategy.
        runs: The points (x, y) of each seed.
        most: The largest number of points.

    Returns:
        The line, or None if there is nothing to draw.
    """
    length = min((len(points) for points in runs), default=0)
    if length == 0:
        return None
    point_count = min(length, most)
    # seeds x points x 2
    values = numpy.array([points[:length] for points in runs], dtype=float)
    edges = numpy.linspace(0, length, point_count + 1).round().astype(int)
    with numpy.errstate(all="ignore"):  # a diverging loss is infinite here and there
        means = numpy.add.reduceat(values, edges[:-1], axis=1) / numpy.diff(edges)[None, :, None]
        x, y = means.mean(axis=0).T
    if not numpy.isfinite(y).any():
        return None
    return Curve(
        style,
        name,
        x.tolist(),
        y.tolist(),
        means[:, :, 1].min(axis=0).tolist(),
        means[:, :, 1].max(axis=0).tolist(),
        len(runs),
        int(numpy.diff(edges).max()),
    )


def draw_lines(
    name: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    alt: str,
    logarithmic: bool | None = None,
    goal: float | None = None,
    unit: str = "",
) -> str:
    """Draw a chart of lines.

    On a logarithmic y axis, zeros lie on the floor. x is logarithmic if one line is a hundred times
    as long as another.

    Args:
        name: An id that is unique in the page.

        curves: The lines.

        x_label: The label of x.

        y_label: The label of y.

        alt: The description for readers without the picture.

        logarithmic: Whether y is logarithmic; None means if values span more than a factor of 30.

        goal: The y of a dotted line, or None.

        unit: The unit of y.

    Returns:
        The SVG.
    """
    with open_figure(name, WIDTH, HEIGHT) as figure:
        axes = add_chart_axes(figure, y_label, x_label)
        finite_values = [value for curve in curves for value in curve.y if math.isfinite(value)]
        if logarithmic is None:
            logarithmic = min(finite_values) > 0 and max(finite_values) > 30 * min(finite_values)
        floor = _set_logarithmic_axis(axes, "y", finite_values) if logarithmic else 0.0
        if unit and not logarithmic:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} {unit}")
        for place, curve in enumerate(curves):
            _draw_line(axes, curve, place, len(curves), floor)
        if has_hundredfold_range(curves):
            _set_logarithmic_axis(axes, "x", [value for curve in curves for value in curve.x])
        else:
            axes.set_xlim(left=0)
        if goal is not None:
            axes.axhline(goal, color=MUTED, linewidth=1, linestyle=":", zorder=1)
        return convert_to_svg(figure, name, alt)


def has_hundredfold_range(curves: Sequence[Curve]) -> bool:
    """Tell whether one line is a hundred times as long as another.

    A shorter line would be a mere stroke at the edge.

    Args:
        curves: The lines.

    Returns:
        Whether it is.
    """
    ends = [max(curve.x) for curve in curves]
    return min(ends) > 0 and max(ends) >= HUNDREDFOLD * min(ends)


def _draw_line(axes: Axes, each: Curve, place: int, of: int, floor: float) -> None:
    """Draw a line so that lines which lie on each other can all be seen.

    Later lines are thinner and have their markers at other points.
    """
    # 1 for the first line, 0 for the last
    left = 1 - place / max(1, of - 1)
    marks = max(1, len(each.x) // MARKER_COUNT)
    y, low, high = (
        numpy.maximum(values, floor) if floor else values
        for values in (each.y, each.low, each.high)
    )
    if each.seeds > 1:
        axes.fill_between(
            each.x,
            low,
            high,
            color=each.style.colour,
            alpha=max(0.06, 0.3 / of),
            linewidth=0,
            zorder=2,
        )
    axes.plot(
        each.x,
        y,
        color=each.style.colour,
        linestyle=each.style.dashes,
        linewidth=1.3 + 2.2 * left,
        marker=each.style.marker,
        markersize=4.5 + 3.5 * left,
        markevery=(place * marks // of, marks),
        markerfacecolor=each.style.inside,
        markeredgewidth=1.2,
        zorder=3 + place,
    )


def _set_logarithmic_axis(axes: Axes, which: str, values: list[float]) -> float:
    """Make x or y logarithmic.

    Zeros, which have no logarithm, get a floor below the other values.

    Returns:
        The value of the floor, or 0.
    """
    positive = [value for value in values if value > 0] or [1.0]
    low = min(positive) / 1.4
    high = max(positive) * 1.4
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    # the x axis is too short for three labels per decade
    factors = (1, 2, 5) if last - first < 4 and which == "y" else (1,)
    ticks = [
        (factor * 10.0**exponent, _format_scientific(factor, exponent))
        for exponent in range(first, last, max(1, (last - first) // 6))
        for factor in factors
    ]
    ticks = [(value, text) for value, text in ticks if low <= value <= high]
    floor = low / (high / low) ** 0.15 if any(value <= 0 for value in values) else 0.0
    if floor:
        ticks.append((floor, "0"))
    axes.set(**{f"{which}scale": "log", f"{which}lim": (0.8 * floor if floor else low, high)})
    axis = getattr(axes, f"{which}axis")
    axis.set_ticks([value for value, _ in ticks], labels=[text for _, text in ticks])
    axis.set_ticks([], minor=True)
    return floor


def draw_bars(
    name: str,
    rows: Sequence[tuple[str, str, dict[str, Line]]],
    kinds: Sequence[str],
    alt: str,
    x_label: str = "bytes per rank and step",
) -> str:
    """Draw a bar for each strategy; computed parts are hatched.

    Args:
        name: An id that is unique in the page.

        rows: (strategy, its bytes in words, {kind: {bytes, computed}}).

        kinds: The kinds, in the order of their colours.

        alt: The description for readers without the picture.

        x_label: The label of x.

    Returns:
        The SVG.
    """
    short = all(len(strategy) + len(words) <= MAX_LABEL_LETTERS - 4 for strategy, words, _ in rows)
    with open_figure(name, WIDTH, (38 if short else 54) * len(rows) + 44) as figure:
        axes = add_chart_axes(figure, "", x_label)
        axes.grid(axis="y", visible=False)
        for place, (strategy, words, sent) in enumerate(rows):
            start = 0
            for kind, number in sent.items():
                axes.barh(
                    place,
                    number["bytes"],
                    left=start,
                    height=0.3 if short else 0.22,
                    color=KINDS[kinds.index(kind) % len(KINDS)],
                    edgecolor=PAPER,
                    linewidth=0.6,
                    hatch="////" if number["computed"] else None,
                    zorder=3,
                )
                start += number["bytes"]
            axes.annotate(
                _shorten_label(strategy),
                (0, place),
                (0, 9.5),
                textcoords="offset points",
                color=INK,
                fontsize=TEXT_SIZE,
            )
            if short:
                axes.annotate(
                    words,
                    (1, place),
                    (0, 9.5),
                    ("axes fraction", "data"),
                    "offset points",
                    ha="right",
                    color=MUTED,
                    fontsize=TEXT_SIZE - 1,
                )
            else:
                axes.annotate(
                    _shorten_label(words),
                    (0, place),
                    (0, -18),
                    textcoords="offset points",
                    color=MUTED,
                    fontsize=TEXT_SIZE - 1,
                )
        largest = max(sum(number["bytes"] for number in sent.values()) for _, _, sent in rows)
        axes.set_xlim(0, max(1, largest))
        axes.set_ylim(len(rows) - (0.7 if short else 0.45), -0.65)
        axes.set_yticks([])
        axes.spines["bottom"].set_visible(False)
        return convert_to_svg(figure, name, alt)


def draw_legend_sample(name: str, style: Style) -> str:
    """Draw the line and the marker of a strategy, small, for a legend.

    Args:
        name: An id that is unique in the page.
        style: The style.

    Returns:
        The SVG.
    """
    with open_figure(name, 30, 12) as figure:
        axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set(xlim=(0, 30), ylim=(0, 12))
        axes.plot(
            [0, 15, 30],
            [6, 6, 6],
            color=style.colour,
            linestyle=style.dashes,
            linewidth=2,
            marker=style.marker,
            markersize=7,
            markevery=[1],
            markerfacecolor=style.inside,
            markeredgewidth=1.4,
        )
        return convert_to_svg(figure, name, "")


@contextmanager
def open_figure(name: str, width: float, height: float) -> Iterator[Figure]:
    """Create an empty figure under matplotlib's own defaults, whatever the user's settings are.

    Args:
        name: The text from which ids are made, so that they are always the same.
        width: The width, in units.
        height: The height, in units.

    Yields:
        The figure.
    """
    logger = logging.getLogger("matplotlib")
    level = logger.level
    # importing matplotlib logs a warning if the home folder cannot be written to
    logger.setLevel(logging.ERROR)
    import matplotlib
    from matplotlib.figure import Figure

    logger.setLevel(level)
    with matplotlib.rc_context(), warnings.catch_warnings():
        # glyphs may be missing in matplotlib's font; the browser uses its own
        warnings.filterwarnings("ignore", message="Glyph")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": name,
                "text.parse_math": False,
                "font.size": TEXT_SIZE,
                "hatch.color": PAPER,
                "hatch.linewidth": 1.2,
            }
        )
        yield Figure(
            figsize=(width / 72, height / 72), layout="constrained" if width == WIDTH else None
        )


def add_chart_axes(figure: Figure, y_label: str, x_label: str) -> Axes:
    """Add axes in the style of the page.

    Args:
        figure: The figure.
        y_label: The label of y.
        x_label: The label of x.

    Returns:
        The axes.
    """
    from matplotlib.ticker import MaxNLocator

    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=MUTED, labelsize=TEXT_SIZE)
    axes.set_title(y_label, loc="left", fontsize=TEXT_SIZE, color=MUTED)
    axes.set_xlabel(x_label, loc="right", fontsize=TEXT_SIZE, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(lambda value, _: _format_short(value))
    return axes


def _format_short(value: float) -> str:
    """A large number with a letter, such as 1500000 as 1.5M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.6g}{letter}"
    return f"{value:.6g}"


def _format_scientific(factor: int, exponent: int) -> str:
    """factor * 10 ** exponent in the usual notation."""
    if -3 <= exponent <= 3:
        return f"{factor * 10.0**exponent:g}"
    power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if factor == 1 else f"{factor}·{power}"


def _shorten_label(text: str) -> str:
    return text if len(text) <= MAX_LABEL_LETTERS else text[: MAX_LABEL_LETTERS - 3] + "..."


def convert_to_svg(figure: Figure, name: str, alt: str) -> str:
    """Convert a figure to an <svg> element that fits its box.

    Its ids are unique in the page, and numbers have no more digits than are visible.

    Args:
        figure: The figure.
        name: The prefix of ids.
        alt: The description for readers without the picture; an empty one hides the chart from
            them.

    Returns:
        The element.
    """
    file = io.StringIO()
    figure.savefig(
        file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = file.getvalue()
    # a <style> element would apply to the whole page
    text = re.sub(r"<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' (id="|xlink:href="#)', rf" \1{name}-", text).replace("url(#", f"url(#{name}-")
    text = re.sub(
        r' (?:d|x|y|transform|style)="[^"]*"',
        lambda match: re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", match[0]),
        text,
    )
    # attributes do not support var()
    text = re.sub(r' fill="(#[0-9a-f]{6})"', r' style="fill: \1"', text)
    text = re.sub(r' style="[^"]*"', lambda match: replace_colours(match[0]), text)
    accessibility = f'role="img" aria-label="{escape(alt)}"' if alt else 'aria-hidden="true"'
    width, height = figure.get_size_inches() * 72
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f"{accessibility} "
        f'viewBox="0 0 {width:g} {height:g}">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)


def _add_theme_style(svg: str) -> str:
    """Define the variables of the colours in an SVG that is a file of its own.

    A page defines them for all its charts. Without a definition every colour is black.

    Args:
        svg: The `<svg>` element, with variables.

    Returns:
        The element with a style of both themes; the reader's system chooses one.
    """
    used = [name for name in PALETTE if f"var(--{name})" in svg]
    light, dark = (
        " ".join(f"--{name}: {PALETTE[name][theme]};" for name in used) for theme in (0, 1)
    )
    style = (
        f"<style>svg {{ {light} }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    )
    end = svg.index(">") + 1
    return f"{svg[:end]}\n {style}{svg[end:]}"


def write_svg_file(svg: str, file: Path) -> None:
    """Write a drawing as a file of its own, with the colours of both themes.

    Args:
        svg: The `<svg>` element.
        file: The file.

    Raises:
        Refused: The file cannot be written.
    """
    try:
        file.write_text(_add_theme_style(svg), encoding="utf-8")
    except OSError as error:
        raise Refused(
            f"--svg {file}: {error.strerror}; give a file in a folder that exists and can be "
            "written"
        ) from None
