"""The charts of a comparison's page, in sections, each with its legend and its explanation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from markupsafe import Markup

from paragrad.planner.step_timeline import PREDICTED_STEPS
from paragrad.record.noise_scale import track_noise_scale
from paragrad.record.record import Record
from paragrad.record.sample_count import count_range_samples
from paragrad.report import charts
from paragrad.report.comparison_table import (
    format_memory_kinds,
    format_row_memory,
    format_sent_bytes,
    list_timing_doubts,
)
from paragrad.report.page_text import describe_early_ends
from paragrad.report.palette import COMPUTED_COLOUR, KINDS, replace_colours
from paragrad.report.results import ROUNDING_BASELINE, ComparisonResults
from paragrad.report.timeline_chart import KIND_COLOURS, draw_measured_step
from paragrad.report.timing import measure_step_time
from paragrad.trainer.settings import Settings

Points = list[tuple[float, float]]
# kinds of memory, in the order in which they are stacked
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "exchange")


@dataclass(frozen=True)
class Picture:
    """A chart, or the reason why there is nothing to draw.

    Attributes:
        title: The heading.
        caption: The explanation.
        svg: The chart, or None.
    """

    title: str
    caption: str
    svg: Markup | None = None


@dataclass(frozen=True)
class Section:
    """Charts that share a legend.

    Attributes:
        name: The id of the section.
        title: The heading.
        pictures: The charts.
        legend: (row or colour, whether hatched, text).
        ends: Sentences that say why some lines end early.
    """

    name: str
    title: str
    pictures: list[Picture]
    legend: list[tuple[int | str, bool, str]]
    ends: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sections:
    """The charts of a comparison.

    Attributes:
        table: The comparison.
        styles: The style of each row.
    """

    table: ComparisonResults
    styles: list[charts.Style]

    def build_sections(self) -> list[Section]:
        """Build all sections of the page, in order."""
        metric = self.table.metric
        test = "Test loss" if metric == "loss" else f"Test {metric}"
        return [
            self.build_value_section(
                "loss",
                "Training loss",
                "loss",
                list_step_losses,
                "this comparison has no finished step, so there is no loss",
                self.describe_loss_chart,
            ),
            self.build_value_section(
                "test",
                test,
                metric,
                list_test_values,
                "this job has no test set, or no epoch was finished",
                self.describe_test_chart,
            ),
            self.build_distance_section(),
            *self.build_noise_section(),
            self.build_bytes_section(),
            self.build_memory_section(),
            self.build_timeline_section(),
        ]

    # ---- loss and test -----------------------------------------------------------------------
    def build_value_section(
        self,
        name: str,
        title: str,
        y_label: str,
        points: Callable[[Record], list[tuple[float, float, float]]],
        missing: str,
        says: Callable[[list[charts.Curve], str], str],
    ) -> Section:
        """Draw the same values over samples and over seconds.

        Args:
            name: The id of the section.

            title: The heading.

            y_label: The label of the values.

            points: Returns (samples, steps, value) of a record.

            missing: The reason if there are no values.

            says: Returns the explanation of a chart.

        Returns:
            The section.
        """
        pictures = []
        curves = dict[int, charts.Curve]()
        for over in ("samples", "seconds"):
            curves = self.build_curves(
                [self.collect_points(place, points, over) for place in range(len(self.table.rows))],
                charts.MAX_SMOOTH_POINTS if name == "loss" else charts.MAX_POINTS,
            )
            curve_list = list(curves.values())
            if not curve_list:
                return Section(name, title, [Picture("", f"Nothing to draw: {missing}.")], [])
            goal = Settings(until=self.table.until).goal if name == "test" else None
            unit = self.table.header["job"].get("unit", "") if name == "test" else ""
            picture = charts.draw_lines(
                f"{name}-{over}",
                curve_list,
                x_label="samples trained on" if over == "samples" else over,
                y_label=y_label,
                alt=describe_curves(f"{title} over {over}", curve_list, unit),
                unit=unit,
                goal=goal.value if goal else None,
            )
            pictures.append(Picture(f"Over {over}", says(curve_list, over), Markup(picture)))
        return Section(
            name, title, pictures, self.build_legend(curves), describe_early_ends(self.table)
        )

    def collect_points(
        self,
        place: int,
        list_values: Callable[[Record], list[tuple[float, float, float]]],
        over: str,
    ) -> list[Points]:
        """Collect the points of each seed of a row.

        Args:
            place: The row.
            list_values: Returns (samples, steps, value) of a record.
            over: `samples`, or `seconds`: then each step takes the time that the table gives.

        Returns:
            The points of each seed.
        """
        records = [
            self.table.records[run]
            for run in self.table.rows[place].runs
            if run in self.table.records
        ]
        step_time = measure_step_time(records)
        seconds = step_time.seconds if step_time else 0.0
        return [
            [
                (samples if over == "samples" else steps * seconds, value)
                for samples, steps, value in list_values(record)
            ]
            for record in records
        ]

    def build_curves(
        self, runs: Sequence[Sequence[Points]], most: int = charts.MAX_POINTS
    ) -> dict[int, charts.Curve]:
        """Build the lines of the rows that have one.

        Args:
            runs: For each row the points of its seeds.
            most: The largest number of points of a line.

        Returns:
            The lines, by row.
        """
        curves = {
            place: charts.build_curve(
                self.styles[place], row.strategy, [points for points in runs[place] if points], most
            )
            for place, row in enumerate(self.table.rows)
        }
        return {place: each for place, each in curves.items() if each is not None}

    def build_legend(self, drawn: Iterable[int]) -> list[tuple[int | str, bool, str]]:
        """Build the legend of some rows.

        Args:
            drawn: The rows.

        Returns:
            The entries.
        """
        rows = self.table.rows
        return [
            (
                place,
                False,
                rows[place].strategy
                + (" (failed)" if rows[place].seconds_per_step is None else ""),
            )
            for place in drawn
        ]

    def describe_loss_chart(self, found: list[charts.Curve], over: str) -> str:
        """Describe the chart of the training loss.

        Args:
            found: The lines.
            over: `samples` or `seconds`.

        Returns:
            The text.
        """
        steps = max(each.steps for each in found)
        seeds = max(each.seeds for each in found)
        if over == "seconds":
            return (
                "The same losses over time; each step takes the ms/step of the table. The line "
                "that falls first is the fastest." + self.describe_seconds_axis(found)
            )
        text = (
            "Lines on top of each other mean the same training; their marks alternate. A separate "
            "line means another training."
        )
        text += f" A point is the mean of up to {steps} steps." if steps > 1 else ""
        return text + (
            f" A line is the mean over {seeds} seeds, up to the last step that all of them made. "
            "The shade spans the seeds."
            if seeds > 1
            else ""
        )

    def describe_test_chart(self, found: list[charts.Curve], over: str) -> str:
        """Describe the chart of the test metric.

        Args:
            found: The lines.
            over: `samples` or `seconds`.

        Returns:
            The text.
        """
        if over == "seconds":
            return (
                "The same values over time; each step takes the ms/step of the table, and tests "
                "take no time. A line further left is faster." + self.describe_seconds_axis(found)
            )
        return "Measured after every epoch, on samples that are not trained on." + (
            f" The dotted line is the goal, {self.table.until}." if self.table.until else ""
        )

    def describe_seconds_axis(self, found: list[charts.Curve]) -> str:
        """Describe what is special about the axis of seconds.

        Args:
            found: The lines.

        Returns:
            The text; it may be empty.
        """
        return (
            " The time axis is logarithmic, because rows differ by a factor of 100 or more."
            if charts.has_hundredfold_range(found)
            else ""
        ) + (
            " The notes below the table about uncertain times also apply here."
            if list_timing_doubts(self.table)
            else ""
        )

    # ---- distance and bytes ------------------------------------------------------------------
    def build_distance_section(self) -> Section:
        """Draw the distance of each strategy's parameters from serial's, after each step."""
        name = "distance"
        title = "Distance from serial"
        values = {run: line["values"] for run, line in self.table.index_lines("distance").items()}
        points = [
            [
                [
                    (float(step), value)
                    for step, value in enumerate(values.get(row.runs[0], []), start=1)
                ]
            ]
            for row in self.table.rows
        ]
        curves = self.build_curves(points)
        if not curves:
            return Section(
                name,
                title,
                [
                    Picture(
                        "", "Nothing to draw: no strategy was compared with serial step by step."
                    )
                ],
                [],
            )
        if not any(value > 0 for each in curves.values() for value in each.y):
            steps = max(len(each.x) for each in curves.values())
            return Section(
                name,
                title,
                [
                    Picture(
                        "",
                        "Nothing to draw: the parameters of every strategy equal serial's after "
                        f"each of {steps} steps.",
                    )
                ],
                [],
            )
        dtype = self.table.header["job"]["dtype"]
        caption = (
            "The largest difference of any parameter from serial's, relative to its tensor, after "
            f"every step in {dtype}"
            + (", first seed. " if self.table.comparison_line["seeds"] > 1 else ". ")
        )
        if ROUNDING_BASELINE in (self.table.rows[place].strategy for place in curves):
            caption += (
                "The dashed line is the rounding baseline: serial with every batch in "
                "reverse order. It differs from serial only by rounding. So does a strategy that "
                "stays near this line."
            )
        else:
            caption += (
                "Rounding alone also makes two trainings differ; add --rounding-baseline to see by "
                "how much."
            )
        caption += (
            f" Lines end at step {max(len(each.x) for each in curves.values())}, the last step "
            "that is compared."
        )
        picture = charts.draw_lines(
            "distance",
            list(curves.values()),
            x_label="steps",
            y_label="relative difference",
            logarithmic=True,
            alt=describe_curves("Distance from serial over steps", list(curves.values())),
        )
        return Section(
            name,
            title,
            [Picture("Over steps", caption, Markup(picture))],
            self.build_legend(curves),
        )

    def build_noise_section(self) -> list[Section]:
        """Draw the gradient noise scale, if it was measured; otherwise there is no section."""
        measurements = [
            [
                list(track_noise_scale(self.table.records[run].group_step_lines()))
                for run in row.runs
                if run in self.table.records
            ]
            for row in self.table.rows
        ]
        runs = [
            [[(float(each.step + 1), each.scale) for each in run if each.scale] for run in row]
            for row in measurements
        ]
        curves = self.build_curves(runs)
        if not curves:
            return []
        batch = next(run[-1].batch for row in measurements for run in row if run)
        last_scale = max(each.y[-1] for each in curves.values())
        caption = (
            "The noise in the gradient of one sample, compared with the gradient of all samples "
            "(McCandlish et al. 2018). A batch of this size is the largest that is useful: it "
            "needs twice the smallest possible number of steps, and twice that of samples. The "
            f"batch here is {batch:.4g}, in what the loss counts (samples, tokens). This is "
            f"{'below' if batch < last_scale else 'above'} the last value, {last_scale:.3g}. The "
            "value grows while the loss falls."
        )
        picture = charts.draw_lines(
            "noise",
            list(curves.values()),
            x_label="steps",
            y_label="gradient noise scale",
            alt=describe_curves("Gradient noise scale over steps", list(curves.values())),
        )
        return [
            Section(
                "noise",
                "Gradient noise scale",
                [Picture("Over steps", caption, Markup(picture))],
                self.build_legend(curves),
            )
        ]

    def build_bytes_section(self) -> Section:
        """Draw the bytes that each strategy sends per rank and step."""
        name = "sent"
        title = "Bytes sent"
        rows = [
            row for row in self.table.rows if any(number["bytes"] for number in row.sent.values())
        ]
        without_messages = [
            row.strategy
            for row in self.table.rows
            if row not in rows and row.seconds_per_step is not None
        ]
        kinds = list(dict.fromkeys(kind for row in rows for kind in row.sent))
        if not kinds:
            return Section(
                name, title, [Picture("", "Nothing to draw: no strategy here sends anything.")], []
            )
        computed = any(number["computed"] for row in rows for number in row.sent.values())
        caption = (
            "What a rank sends in a step, by kind; of the rank and step that sent most."
            + (
                " Hatched, and marked *: computed from the formula of the backend's own "
                "collective, not counted."
                if computed
                else ""
            )
            + (f" Nothing is sent by {' and '.join(without_messages)}." if without_messages else "")
        )
        bars = [(row.strategy, format_sent_bytes(row.sent), row.sent) for row in rows]
        picture = charts.draw_bars(
            "sent",
            bars,
            kinds,
            "Bytes sent per rank and step. "
            + "; ".join(f"{strategy}: {numbers}" for strategy, numbers, _ in bars),
        )
        legend: list[tuple[int | str, bool, str]] = [
            (replace_colours(KINDS[place % len(KINDS)]), False, kind)
            for place, kind in enumerate(kinds)
        ]
        return Section(
            name,
            title,
            [Picture("Per rank and step", caption, Markup(picture))],
            [
                *legend,
                *([(replace_colours(COMPUTED_COLOUR), True, "computed")] if computed else []),
            ],
        )

    def build_memory_section(self) -> Section:
        """Draw the memory of the fullest rank of each strategy."""
        name = "memory"
        title = "Memory"
        rows = [row for row in self.table.rows if row.fullest]
        kinds = [kind for kind in MEMORY_KINDS if any(row.fullest.get(kind) for row in rows)]
        if not kinds:
            caption = "Nothing to draw: no run finished and recorded the memory of its ranks."
            return Section(name, title, [Picture("", caption)], [])
        bars = [
            (
                row.strategy,
                format_row_memory(row),
                {kind: {"bytes": row.fullest.get(kind, 0), "computed": False} for kind in kinds},
            )
            for row in rows
        ]
        caption = (
            "What the fullest rank of each strategy held, by kind. Activations are what forward "
            "keeps for backward, and messages between parts of a model. The number is the most at "
            "one time, counted in the first steps. Memory that operations need while they run, "
            "and the process itself, are not included."
        )
        not_counted = [row.strategy for row in rows if "activations" not in row.fullest]
        caption += (
            f" Activations of {' and '.join(not_counted)} were not counted." if not_counted else ""
        )
        picture = charts.draw_bars(
            "memory",
            bars,
            kinds,
            "Memory of the fullest rank. "
            + "; ".join(f"{row.strategy}: {format_memory_kinds(row.fullest)}" for row in rows),
            "bytes on the fullest rank",
        )
        return Section(
            name,
            title,
            [Picture("Of the fullest rank", caption, Markup(picture))],
            [
                (replace_colours(KINDS[place % len(KINDS)]), False, kind)
                for place, kind in enumerate(kinds)
            ],
        )

    def build_timeline_section(self) -> Section:
        """Draw one step of each row that has one, of the first seed."""
        drawn_steps = [
            (row.strategy, draw_measured_step(f"step-{place}", self.table.records[row.runs[0]]))
            for place, row in enumerate(self.table.rows)
            if row.strategy != ROUNDING_BASELINE and row.seconds_per_step is not None
        ]
        pictures = [
            Picture(strategy, drawn_step[0], Markup(drawn_step[1]))
            for strategy, drawn_step in drawn_steps
            if drawn_step
        ]
        if not pictures:
            return Section(
                "step",
                "One step",
                [
                    Picture(
                        "",
                        f"Nothing to draw: no run made {PREDICTED_STEPS.start + 1} steps of all "
                        "workers together.",
                    )
                ],
                [],
            )
        return Section(
            "step",
            "One step",
            pictures,
            [(replace_colours(colour), False, kind) for kind, colour in KIND_COLOURS.items()],
        )


def list_step_losses(record: Record) -> list[tuple[float, float, float]]:
    """List the losses of a run.

    Args:
        record: The record of the run.

    Returns:
        (global samples, steps, loss) at the end of each step.
    """
    steps = record.group_step_lines()
    samples = accumulate(
        sum(count_range_samples(line["order"]) for line in lines) for lines in steps
    )
    return [
        (float(count), float(step), loss)
        for step, (count, loss) in enumerate(zip(samples, record.losses, strict=True), 1)
    ]


def list_test_values(record: Record) -> list[tuple[float, float, float]]:
    """List the test values of a run.

    Args:
        record: The record of the run.

    Returns:
        (global samples, steps, metric) at the end of each epoch with a test.
    """
    epochs = [lines[0]["epoch"] for lines in record.group_step_lines()]
    return [
        (
            float(record.count_passed_samples(line["epoch"])),
            float(bisect_right(epochs, line["epoch"])),
            line["test"]["value"],
        )
        for line in record.select_lines("epoch")
        if line["test"]
    ]


def describe_curves(title: str, curves: list[charts.Curve], unit: str = "") -> str:
    """Describe a chart in words, for readers without the picture.

    Args:
        title: What is drawn.
        curves: The lines.
        unit: The unit of the values.

    Returns:
        The text.
    """
    unit_text = f" {unit}" if unit else ""
    return f"{title}. " + "; ".join(
        f"{curve.name}: from {curve.y[0]:.3g}{unit_text} to {curve.y[-1]:.3g}{unit_text}"
        for curve in curves
    )
