"""The page of a comparison: one HTML file that needs no network, for reading, printing and sending on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from paragrad.jobs.finding import JOBS
from paragrad.record.record import Line, Record
from paragrad.report import charts
from paragrad.report.results import TWIN, Results, Row
from paragrad.report.table import cells, columns_of, held, notes, sent
from paragrad.training.settings import Settings
from paragrad.version import __version__

Points = list[tuple[float, float]]


def write_page(table: Results) -> Path:
    """Write page.html into the comparison's folder; its path."""
    page = table.folder / "page.html"
    partial = page.with_name("page.html.partial")
    partial.write_text(rendered(table), encoding="utf-8")
    partial.rename(page)
    return page


def rendered(table: Results) -> str:
    """The page as text. What a record lacks is a sentence in the place of its chart."""
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
                            trim_blocks=True, lstrip_blocks=True)
    styles = [charts.style(place, row.strategy == TWIN) for place, row in enumerate(table.rows)]
    return templates.get_template("page.html.jinja").render(
        title=f"{table.job}: {_count(table)}", lead=lead_of(table), twin=TWIN, columns=columns_of(table),
        notes=notes(table), sections=Sections(table, styles).all(), breakable=breakable,
        rows=[TableRow(place, row, cells(table, row)) for place, row in enumerate(table.rows)],
        samples=[Markup(charts.sample(f"style-{place}", each)) for place, each in enumerate(styles)],
        definitions=definitions(table), ran=[ran(table, row) for row in table.rows if row.resolved], facts=facts(table),
        repeat=table.asked["command"] or call(table), typed=table.asked["command"] is not None)


@dataclass(frozen=True)
class TableRow:
    """A row of the page's table."""
    place: int
    row: Row
    cells: list[str]

    @property
    def told(self) -> list[tuple[int, str, int]]:
        """(column, text, columns it spans): what follows a failure and is empty makes room for its message."""
        if self.row.seconds_per_step is not None:
            return [(place, text, 1) for place, text in enumerate(self.cells)]
        return [(0, self.cells[0], 1), (1, self.cells[1], len(self.cells) - 1)]


@dataclass(frozen=True)
class Picture:
    """A chart, or where there is nothing to draw, why."""
    title: str
    says: str
    drawn: Markup | None = None


@dataclass(frozen=True)
class Section:
    """Charts that belong together, and the legend they share: (row or colour, hatched, text)."""
    name: str
    title: str
    pictures: list[Picture]
    legend: list[tuple[int | str, bool, str]]


@dataclass(frozen=True)
class Sections:
    """The charts of a comparison."""
    table: Results
    styles: list[charts.Style]

    def all(self) -> list[Section]:
        metric = self.table.metric
        test = "Test loss" if metric == "loss" else f"Test {metric}"
        return [self.pair("loss", "Training loss", "loss", losses, "this comparison has no finished step, so there is no loss",
                          self.of_loss),
                self.pair("test", test, metric, tests, "this job has no test set, or no epoch was finished", self.of_test),
                self.distance(), self.bytes()]

    # ---- loss and test -------------------------------------------------------------------------------------------------
    def pair(self, name: str, title: str, y_label: str, points: Callable[[Record], list[tuple[float, float, float]]],
             missing: str, says: Callable[[list[charts.Curve], str], str]) -> Section:
        """The same values over samples and over seconds. points(record) gives (samples, seconds, value)."""
        runs = [[points(self.table.records[run]) for run in row.runs if run in self.table.records] for row in self.table.rows]
        pictures, drawn = [], dict[int, charts.Curve]()
        for axis, over in enumerate(("samples", "seconds")):
            drawn = self.curves([[[(point[axis], point[2]) for point in seed] for seed in seeds] for seeds in runs],
                                charts.SMOOTH if name == "loss" else charts.POINTS)
            found = list(drawn.values())
            if not found:
                return Section(name, title, [Picture("", f"Nothing to draw: {missing}.")], [])
            goal = Settings(until=self.table.until).goal if name == "test" else None
            picture = charts.lines(f"{name}-{over}", found, x_label=f"{over} trained on" if axis == 0 else over,
                                   y_label=y_label, alt=described(f"{title} over {over}", found),
                                   goal=goal.value if goal else None)
            pictures.append(Picture(f"Over {over}", says(found, over), Markup(picture)))
        return Section(name, title, pictures, self.legend(drawn))

    def curves(self, runs: Sequence[Sequence[Points]], most: int = charts.POINTS) -> dict[int, charts.Curve]:
        """The lines of the rows that have one, by place."""
        made = {place: charts.curve(self.styles[place], row.strategy, [points for points in runs[place] if points], most)
                for place, row in enumerate(self.table.rows)}
        return {place: each for place, each in made.items() if each is not None}

    def legend(self, drawn: Iterable[int]) -> list[tuple[int | str, bool, str]]:
        rows = self.table.rows
        return [(place, False, rows[place].strategy + (" (failed)" if rows[place].seconds_per_step is None else ""))
                for place in drawn]

    def of_loss(self, found: list[charts.Curve], over: str) -> str:
        steps, seeds = max(each.steps for each in found), max(each.seeds for each in found)
        if over == "seconds":
            return ("The same losses by the clock, from the start of the first step, tests included: the line that comes down "
                    "first is the fastest. One that starts late spent its first step warming up.")
        says = ("Where lines lie on each other, samples taught the same, and the marks take turns; a line apart trains "
                "differently.")
        says += f" A point is the mean of up to {steps} steps." if steps > 1 else ""
        return says + (f" Lines are means over {seeds} seeds, as far as all of them went; the shade spans the seeds."
                       if seeds > 1 else "")

    def of_test(self, found: list[charts.Curve], over: str) -> str:
        if over == "seconds":
            return "What has been learnt by when: further left is sooner."
        return "Measured after every epoch, on samples that are not trained on." + (
            f" The dotted line is the goal, {self.table.until}." if self.table.until else "")

    # ---- distance and bytes --------------------------------------------------------------------------------------------
    def distance(self) -> Section:
        name, title = "distance", "Distance from serial"
        values = {run: line["values"] for run, line in self.table.lines("distance").items()}
        points = [[[(float(step), value) for step, value in enumerate(values.get(row.runs[0], []), start=1)]]
                  for row in self.table.rows]
        drawn = self.curves(points)
        if not drawn:
            return Section(name, title, [Picture("", "Nothing to draw: no strategy but serial was followed step by step.")], [])
        if not any(value > 0 for each in drawn.values() for value in each.y):
            steps = max(len(each.x) for each in drawn.values())
            return Section(name, title, [Picture("", "Nothing to draw: the parameters of every strategy equal serial's after "
                                                     f"each of {steps} steps.")], [])
        dtype = self.table.header["job"]["dtype"]
        says = (f"The largest difference of any parameter from serial's, relative to its tensor, after every step in {dtype}"
                + (", first seed. " if self.table.asked["seeds"] > 1 else ". "))
        if TWIN in (self.table.rows[place].strategy for place in drawn):
            says += ("Dashed: the rounding twin, serial with every batch back to front. It differs by rounding alone, and so "
                     "does a strategy that stays near it.")
        else:
            says += "Rounding alone sets two trainings apart, too; compare with --twin to see by how much."
        picture = charts.lines("distance", list(drawn.values()), x_label="steps", y_label="relative difference",
                               logarithmic=True, alt=described("Distance from serial over steps", list(drawn.values())))
        return Section(name, title, [Picture("Over steps", says, Markup(picture))], self.legend(drawn))

    def bytes(self) -> Section:
        name, title = "sent", "Bytes sent"
        rows = [row for row in self.table.rows if any(number["bytes"] for number in row.sent.values())]
        silent = [row.strategy for row in self.table.rows if row not in rows and row.seconds_per_step is not None]
        kinds = list(dict.fromkeys(kind for row in rows for kind in row.sent))
        if not kinds:
            return Section(name, title, [Picture("", "Nothing to draw: no strategy here sends anything.")], [])
        computed = any(number["computed"] for row in rows for number in row.sent.values())
        says = "What a rank hands to the wire in a step, by kind; of the rank and step that sent most." + (
            " Hatched, and marked *: computed from the closed form of the backend's own collective, not counted."
            if computed else "") + (f" Nothing is sent by {' and '.join(silent)}." if silent else "")
        told = [(row.strategy, sent(row.sent), row.sent) for row in rows]
        picture = charts.bars("sent", told, kinds, "Bytes sent per rank and step. " + "; ".join(
            f"{strategy}: {numbers}" for strategy, numbers, _ in told))
        legend: list[tuple[int | str, bool, str]] = [(charts.KINDS[place % len(charts.KINDS)], False, kind)
                                                     for place, kind in enumerate(kinds)]
        return Section(name, title, [Picture("Per rank and step", says, Markup(picture))],
                       [*legend, *([("#777777", True, "computed")] if computed else [])])


def losses(record: Record) -> list[tuple[float, float, float]]:
    """(samples, seconds, loss) at the end of every step: global samples, and the clock of rank 0."""
    steps = record.steps()
    samples = accumulate(sum(line["order"][1] - line["order"][0] for line in lines) for lines in steps)
    return [(float(count), lines[0]["start"] + lines[0]["seconds"] - steps[0][0]["start"], loss)
            for count, lines, loss in zip(samples, steps, record.losses, strict=True)]


def tests(record: Record) -> list[tuple[float, float, float]]:
    """(samples, seconds, metric) at the end of every epoch with a test."""
    first = next((line["start"] for line in record.of("step")), 0.0)
    return [((line["epoch"] + 1.0) * record.header["job"]["samples"], line["start"] + line["seconds"] - first,
             line["test"]["value"]) for line in record.of("epoch") if line["test"]]


def described(title: str, curves: list[charts.Curve]) -> str:
    """A chart in words, for those who cannot see it."""
    return f"{title}. " + "; ".join(f"{each.name}: from {each.y[0]:.3g} to {each.y[-1]:.3g}" for each in curves)


def breakable(text: str) -> Markup:
    """A column's name, which may be broken after / and =."""
    return Markup(re.sub("([/=])", r"\1<wbr>", str(escape(text))))


# ---- words -------------------------------------------------------------------------------------------------------------
def lead_of(table: Results) -> str:
    """What was compared, and how far from serial it came out, in a few sentences."""
    seeds = table.asked["seeds"]
    words = [f"{_count(table)}{' and the rounding twin' if _twin(table) else ''}, "
             f"{'one seed' if seeds == 1 else f'{seeds} seeds'}{' each' if len(table.rows) > 1 else ''}."]
    named = columns_of(table).index("difference")
    checked = [row for row in table.rows if row.difference is not None and not row.reference]
    if checked:
        worst = max(checked, key=lambda row: row.difference or 0.0)
        words.append(f"Largest difference from serial, over 20 steps in float64: {cells(table, worst)[named]}, "
                     f"by {worst.strategy}.")
    failed = [row.strategy for row in table.rows if row.failure]
    if failed:
        words.append(f"Failed: {', '.join(failed)}.")
    return " ".join(words)


def _twin(table: Results) -> bool:
    return any(row.strategy == TWIN for row in table.rows)


def _count(table: Results) -> str:
    """How many strategies, the twin not counted."""
    count = len(table.rows) - _twin(table)
    return "1 strategy" if count == 1 else f"{count} strategies"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def definitions(table: Results) -> list[tuple[str, str]]:
    """What the columns mean: (column, meaning)."""
    several = any(row.seeds > 1 for row in table.rows)
    told = {
        f"test {table.metric}": "the metric on the test set after the last epoch" + (
            f"; mean ± standard deviation over {table.asked['seeds']} seeds" if several else ""),
        "ms/step": "median milliseconds per step of the slowest rank, without the first step, which warms up" + (
            "; median over seeds" if several else ""),
        "speed-up": f"milliseconds per step of serial with all {table.machine['cores']} threads, divided by the strategy's",
        "over 1 thread": "the same, against serial with one thread",
        "sent/rank/step": "bytes of payload a rank hands to the wire in a step, by kind; of the rank and step that sent most",
        "difference": "from serial, in float64 over 20 steps: the largest difference of any tensor (gradients, parameters, "
                      "buffers), relative to the largest value in that tensor",
        "where largest": "the tensor with that difference",
        "parameters": "the first digits of a digest of the trained parameters: equal digests, equal bits"}
    if table.until:
        told = {f"seconds, epochs, samples to {table.until}":
                "to the end of the first epoch whose test reached the goal, counted from the first step, tests included" + (
                    "; means over seeds" if several else ""), **told}
    return list(told.items())


def ran(table: Results, row: Row) -> Line:
    """What a strategy was resolved to, on what it ran, and what was picked for it and why."""
    records = [table.records[run] for run in row.runs if run in table.records]
    header = records[0].header
    workers, threads = header["workers"], header["threads"]
    on = (f"{_many(workers, 'worker')}, {_many(threads, 'thread')}{' each' if workers > 1 else ''}"
          + f", on {header['device']}" + (f", over {header['backend']}" if header["backend"] else ""))
    picked = [*records[0].choices, *records[0].of("choice")]
    of_run = {kind: number for kind, number in row.memory.items() if kind != "resident"}        # that is of its process
    return {"strategy": row.strategy, "resolved": row.resolved, "on": on, "choices": picked, "failure": row.failure,
            "memory": held(of_run), "seeds": ", ".join(str(record.header["seed"]) for record in records)}


def facts(table: Results) -> list[tuple[str, str]]:
    """Job, machine and versions: (name, value)."""
    job, machine = table.header["job"], table.machine
    given = ", ".join(f"{name}={value!r}" for name, value in job["arguments"].items())
    seeds = sorted({record.header["seed"] for row in table.rows for run in row.runs
                    if (record := table.records.get(run)) is not None})
    return [("job", f"{job['name']}({given})" if given else job["name"]), ("global batch", f"{job['batch']:,}"),
            ("epochs", f"{job['epochs']:,}" + (f", or until {table.until}" if table.until else "")),
            ("training samples", f"{job['samples']:,}"), ("trained parameters", f"{job['parameters']:,}"),
            ("number type", job["dtype"]), ("seeds", ", ".join(map(str, seeds))),
            ("machine", f"{machine['cores']} cores, {machine['cpu']}"),
            ("versions", f"torch {machine['torch']}, Python {machine['python']}, "
                         f"paragrad {machine.get('paragrad', __version__)}")]


def call(table: Results) -> str:
    """The Python call that made the comparison, where no command did."""
    header, asked = table.header, table.asked
    job = header["job"]
    changes = {"batch": job["batch"], "epochs": job["epochs"], **({"seed": header["seed"]} if header["seed"] else {})}
    if job["name"] in JOBS and job["arguments"]:
        dtype = "" if job["dtype"] == "float32" else f", dtype=torch.{job['dtype']}"
        words = "".join(f", {name}={value!r}" for name, value in job["arguments"].items())
        made = (f"paragrad.job({job['name']!r}{words}).replace("
                + ", ".join(f"{name}={value!r}" for name, value in changes.items()) + dtype + ")")
    else:
        made = "job"
    rows = [row for row in table.rows if row.strategy != TWIN]
    chosen = "; ".join(row.strategy for row in rows)
    more = {"seeds": asked["seeds"]} if asked["seeds"] > 1 else {}
    settings: dict[str, Any] = {**more, **({"twin": True} if _twin(table) else {}),
                                **({"until": asked["until"]} if asked["until"] else {}),
                                **({"device": header["device"]} if header["device"] != "cpu" else {})}
    words = "".join(f", {name}={value!r}" for name, value in settings.items())
    return f"paragrad.compare({made}, {chosen!r}{words})"
