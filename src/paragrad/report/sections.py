"""The charts of a comparison's page, in sections, each with its legend and what it says."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from markupsafe import Markup

from paragrad.planner.step_timeline import PREDICTED_STEPS
from paragrad.record.noise_scale import track_noise_scale
from paragrad.record.record import Record
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
# kinds of memory, as they are stacked
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "exchange")


@dataclass(frozen=True)
class Picture:
    """A chart, or where there is nothing to draw, why."""

    title: str
    caption: str
    svg: Markup | None = None


@dataclass(frozen=True)
class Section:
    """Charts that belong together, and the legend they share: (row or colour, hatched,
    text).
    """

    name: str
    title: str
    pictures: list[Picture]
    legend: list[tuple[int | str, bool, str]]
    # why lines end before the others
    ends: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sections:
    """The charts of a comparison."""

    table: ComparisonResults
    styles: list[charts.Style]

    def build_sections(self) -> list[Section]:
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
        """The same values over samples and over seconds. points(record) gives (samples, steps,
        value).
        """
        pictures = []
        drawn = dict[int, charts.Curve]()
        for over in ("samples", "seconds"):
            drawn = self.build_curves(
                [self.collect_points(place, points, over) for place in range(len(self.table.rows))],
                charts.MAX_SMOOTH_POINTS if name == "loss" else charts.MAX_POINTS,
            )
            found = list(drawn.values())
            if not found:
                return Section(name, title, [Picture("", f"Nothing to draw: {missing}.")], [])
            goal = Settings(until=self.table.until).goal if name == "test" else None
            unit = self.table.header["job"].get("unit", "") if name == "test" else ""
            picture = charts.draw_lines(
                f"{name}-{over}",
                found,
                x_label="samples trained on" if over == "samples" else over,
                y_label=y_label,
                alt=describe_curves(f"{title} over {over}", found, unit),
                unit=unit,
                goal=goal.value if goal else None,
            )
            pictures.append(Picture(f"Over {over}", says(found, over), Markup(picture)))
        return Section(
            name, title, pictures, self.build_legend(drawn), describe_early_ends(self.table)
        )

    def collect_points(
        self,
        place: int,
        list_values: Callable[[Record], list[tuple[float, float, float]]],
        over: str,
    ) -> list[Points]:
        """Of every seed of a row; a step takes what the table says that it does."""
        records = [
            self.table.records[run]
            for run in self.table.rows[place].runs
            if run in self.table.records
        ]
        taken = measure_step_time(records)
        seconds = taken.seconds if taken else 0.0
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
        """The lines of the rows that have one, by place."""
        made = {
            place: charts.build_curve(
                self.styles[place], row.strategy, [points for points in runs[place] if points], most
            )
            for place, row in enumerate(self.table.rows)
        }
        return {place: each for place, each in made.items() if each is not None}

    def build_legend(self, drawn: Iterable[int]) -> list[tuple[int | str, bool, str]]:
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
        steps = max(each.steps for each in found)
        seeds = max(each.seeds for each in found)
        if over == "seconds":
            return (
                "The same losses over the time of the steps, each as long as the table's ms/step: "
                "the line that comes down "
                "first is the fastest." + self.describe_seconds_axis(found)
            )
        says = (
            "Where lines lie on each other, samples taught the same, and the marks take turns; a "
            "line apart trains "
            "differently."
        )
        says += f" A point is the mean of up to {steps} steps." if steps > 1 else ""
        return says + (
            f" Lines are means over {seeds} seeds, as far as all of them went; the shade spans the "
            f"seeds."
            if seeds > 1
            else ""
        )

    def describe_test_chart(self, found: list[charts.Curve], over: str) -> str:
        if over == "seconds":
            return (
                "What has been learnt by when, by the table's ms/step, without the time of tests: "
                "further left is sooner." + self.describe_seconds_axis(found)
            )
        return "Measured after every epoch, on samples that are not trained on." + (
            f" The dotted line is the goal, {self.table.until}." if self.table.until else ""
        )

    def describe_seconds_axis(self, found: list[charts.Curve]) -> str:
        return (
            " Seconds are logarithmic: rows differ a hundredfold."
            if charts.has_hundredfold_range(found)
            else ""
        ) + (
            " What the table says of doubtful times holds here, too."
            if list_timing_doubts(self.table)
            else ""
        )

    # ---- distance and bytes ------------------------------------------------------------------
    def build_distance_section(self) -> Section:
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
        drawn = self.build_curves(points)
        if not drawn:
            return Section(
                name,
                title,
                [Picture("", "Nothing to draw: no strategy but serial was followed step by step.")],
                [],
            )
        if not any(value > 0 for each in drawn.values() for value in each.y):
            steps = max(len(each.x) for each in drawn.values())
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
        says = (
            f"The largest difference of any parameter from serial's, relative to its tensor, after "
            f"every step in {dtype}"
            + (", first seed. " if self.table.comparison_line["seeds"] > 1 else ". ")
        )
        if ROUNDING_BASELINE in (self.table.rows[place].strategy for place in drawn):
            says += (
                "Dashed: the rounding twin, serial with every batch back to front. It differs by "
                "rounding alone, and so "
                "does a strategy that stays near it."
            )
        else:
            says += (
                "Rounding alone sets two trainings apart, too; compare with --rounding-baseline to "
                "see by "
                "how much."
            )
        says += (
            f" Lines end at step {max(len(each.x) for each in drawn.values())}: so far every "
            f"strategy is followed."
        )
        picture = charts.draw_lines(
            "distance",
            list(drawn.values()),
            x_label="steps",
            y_label="relative difference",
            logarithmic=True,
            alt=describe_curves("Distance from serial over steps", list(drawn.values())),
        )
        return Section(
            name, title, [Picture("Over steps", says, Markup(picture))], self.build_legend(drawn)
        )

    def build_noise_section(self) -> list[Section]:
        """Where it was measured."""
        found = [
            [
                list(track_noise_scale(self.table.records[run].group_step_lines()))
                for run in row.runs
                if run in self.table.records
            ]
            for row in self.table.rows
        ]
        runs = [
            [[(float(each.step + 1), each.scale) for each in run if each.scale] for run in row]
            for row in found
        ]
        drawn = self.build_curves(runs)
        if not drawn:
            return []
        batch = next(run[-1].batch for row in found for run in row if run)
        most = max(each.y[-1] for each in drawn.values())
        says = (
            f"How noisy the gradient of one sample is, beside that of all (McCandlish et al. "
            f"2018): a batch that weighs as "
            f"much is the largest that is useful, twice the steps and twice the samples of the "
            f"least. This one weighs "
            f"{batch:.4g} in what the loss counts (samples, tokens), "
            f"{'below' if batch < most else 'above'} the last "
            f"value, {most:.3g}; it grows while the loss falls."
        )
        picture = charts.draw_lines(
            "noise",
            list(drawn.values()),
            x_label="steps",
            y_label="gradient noise scale",
            alt=describe_curves("Gradient noise scale over steps", list(drawn.values())),
        )
        return [
            Section(
                "noise",
                "Gradient noise scale",
                [Picture("Over steps", says, Markup(picture))],
                self.build_legend(drawn),
            )
        ]

    def build_bytes_section(self) -> Section:
        name = "sent"
        title = "Bytes sent"
        rows = [
            row for row in self.table.rows if any(number["bytes"] for number in row.sent.values())
        ]
        silent = [
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
        says = (
            "What a rank hands to the wire in a step, by kind; of the rank and step that sent most."
            + (
                " Hatched, and marked *: computed from the closed form of the backend's own "
                "collective, not counted."
                if computed
                else ""
            )
            + (f" Nothing is sent by {' and '.join(silent)}." if silent else "")
        )
        told = [(row.strategy, format_sent_bytes(row.sent), row.sent) for row in rows]
        picture = charts.draw_bars(
            "sent",
            told,
            kinds,
            "Bytes sent per rank and step. "
            + "; ".join(f"{strategy}: {numbers}" for strategy, numbers, _ in told),
        )
        legend: list[tuple[int | str, bool, str]] = [
            (replace_colours(KINDS[place % len(KINDS)]), False, kind)
            for place, kind in enumerate(kinds)
        ]
        return Section(
            name,
            title,
            [Picture("Per rank and step", says, Markup(picture))],
            [
                *legend,
                *([(replace_colours(COMPUTED_COLOUR), True, "computed")] if computed else []),
            ],
        )

    def build_memory_section(self) -> Section:
        name = "memory"
        title = "Memory"
        rows = [row for row in self.table.rows if row.fullest]
        kinds = [kind for kind in MEMORY_KINDS if any(row.fullest.get(kind) for row in rows)]
        if not kinds:
            says = "Nothing to draw: no run came to its end and told what its ranks held."
            return Section(name, title, [Picture("", says)], [])
        told = [
            (
                row.strategy,
                format_row_memory(row),
                {kind: {"bytes": row.fullest.get(kind, 0), "computed": False} for kind in kinds},
            )
            for row in rows
        ]
        says = (
            "What the fullest rank of each strategy held, by kind. Activations are what forwards "
            "kept for backwards and, "
            "between parts of a model, messages, at most at once, counted in the first steps. What "
            "operations take for "
            "themselves while they run, and the process itself, are not in it."
        )
        unlooked = [row.strategy for row in rows if "activations" not in row.fullest]
        says += f" Activations of {' and '.join(unlooked)} were not counted." if unlooked else ""
        picture = charts.draw_bars(
            "memory",
            told,
            kinds,
            "Memory of the fullest rank. "
            + "; ".join(f"{row.strategy}: {format_memory_kinds(row.fullest)}" for row in rows),
            "bytes on the fullest rank",
        )
        return Section(
            name,
            title,
            [Picture("Of the fullest rank", says, Markup(picture))],
            [
                (replace_colours(KINDS[place % len(KINDS)]), False, kind)
                for place, kind in enumerate(kinds)
            ],
        )

    def build_timeline_section(self) -> Section:
        """One step of every row that has one, the first seed's."""
        found = [
            (row.strategy, draw_measured_step(f"step-{place}", self.table.records[row.runs[0]]))
            for place, row in enumerate(self.table.rows)
            if row.strategy != ROUNDING_BASELINE and row.seconds_per_step is not None
        ]
        pictures = [Picture(strategy, seen[0], Markup(seen[1])) for strategy, seen in found if seen]
        if not pictures:
            return Section(
                "step",
                "One step",
                [
                    Picture(
                        "",
                        f"Nothing to draw: no run made {PREDICTED_STEPS.start + 1} steps of "
                        "all workers together.",
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
    """(global samples, steps, loss) at the end of every step."""
    steps = record.group_step_lines()
    samples = accumulate(
        sum(line["order"][1] - line["order"][0] for line in lines) for lines in steps
    )
    return [
        (float(count), float(made), loss)
        for made, (count, loss) in enumerate(zip(samples, record.losses, strict=True), 1)
    ]


def list_test_values(record: Record) -> list[tuple[float, float, float]]:
    """(global samples, steps, metric) at the end of every epoch with a test."""
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
    """A chart in words, for those who cannot see it."""
    of = f" {unit}" if unit else ""
    return f"{title}. " + "; ".join(
        f"{each.name}: from {each.y[0]:.3g}{of} to {each.y[-1]:.3g}{of}" for each in curves
    )
