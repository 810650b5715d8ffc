"""The page of a comparison, in a real browser.

It opens without the network, shows the numbers of the record, and fits a phone and paper.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from html import unescape
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import pytest
from rich.console import Console

import paragrad
from paragrad.jobs.find_job import find_job
from paragrad.record.record import Line, Record
from paragrad.record.sample_count import count_range_samples
from paragrad.report import charts, comparison_page, comparison_table, palette, sections
from paragrad.report.comparison_table import Table, format_bytes, list_columns
from paragrad.report.results import list_row_names
from paragrad.report.timing import measure_step_time

pytestmark = [pytest.mark.processes, pytest.mark.story]

CHROMIUM = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")
JOB_FILES = Path(__file__).parents[1] / "helpers" / "job_files"
QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
PHONE = (360, 740)

in_browser = pytest.mark.skipif(
    not (CHROMIUM.exists() and DRIVER.exists()),
    reason="needs a browser: install chromium and chromium-driver",
)


# ---- a browser -------------------------------------------------------------------------------
@contextmanager
def browser(width: int = 1100, height: int = 800) -> Iterator[Any]:
    """Start a headless Chromium with its own profile; it logs its console and its requests."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        pytest.MonkeyPatch.context() as shell,
    ):
        shell.setenv("no_proxy", "localhost,127.0.0.1")  # the driver is on this machine
        options = ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for argument in (*QUIET, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = Chrome(options=options, service=Service(executable_path=str(DRIVER)))
        try:
            resize_screen(driver, width, height)
            yield driver
        finally:
            driver.quit()


def resize_screen(driver: Any, width: int, height: int, scale: float = 1.0) -> None:
    """Set the size of the screen in CSS pixels; below a width of 600 it is a phone's screen."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600},
    )


def save_screenshot(
    file: Path, picture: Path, width: int = 1100, height: int | None = None, scale: float = 1.0
) -> None:
    """Save the page as a PNG: its first `height` CSS pixels, or the whole page."""
    with browser(width) as driver:
        driver.get(file.resolve().as_uri())
        resize_screen(
            driver,
            width,
            height or driver.execute_script("return document.documentElement.scrollHeight"),
            scale,
        )
        picture.write_bytes(
            base64.b64decode(
                driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
            )
        )


def open_page(driver: Any, file: Path) -> None:
    """Open a page; assert that the console is empty, and that only the page is requested."""
    driver.get(file.resolve().as_uri())
    assert driver.get_log("browser") == []
    told = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [each["params"] for each in told if each["method"] == "Network.requestWillBeSent"]
    assert [
        each["request"]["url"] for each in asked if each["documentURL"].startswith("file:")
    ] == [file.resolve().as_uri()]


def read_table(driver: Any) -> list[dict[str, str]]:
    """Return the rows that the browser shows, each as column -> text."""
    found = driver.execute_script(
        "return [...document.querySelectorAll('[data-row]')].map(cell => [cell.dataset.row, "
        "cell.dataset.column, cell.textContent])"
    )
    rows: dict[str, dict[str, str]] = {}
    for row, column, text in found:
        rows.setdefault(row, {})[column] = text
    return [rows[str(place)] for place in range(len(rows))]


# ---- a real comparison -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def comparison_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compare digits under two strategies and the rounding baseline, with two seeds and a goal.

    Returns the folder of the comparison, with its page.
    """
    table = paragrad.compare(
        paragrad.job("digits").replace(epochs=2),
        "serial; data(2, reduce=ring)",
        seeds=2,
        rounding_baseline=True,
        until="accuracy=80",
        runs=tmp_path_factory.mktemp("compared"),
    )
    comparison_page.write_page(table)
    return table.folder


@in_browser
def test_page_opens_without_errors_and_shows_every_chart(comparison_folder: Path) -> None:
    with browser() as driver:
        open_page(driver, comparison_folder / "page.html")
        drawn = driver.execute_script(
            "return [...document.querySelectorAll('figure svg[role=img]')].map(chart => "
            "[chart.getBoundingClientRect().width > 300, chart.querySelectorAll('path').length > "
            "5, chart.getAttribute('aria-label')])"
        )
    assert [(wide, full) for wide, full, _ in drawn] == [(True, True)] * 9
    assert [told.split(".")[0].split(":")[0] for _, _, told in drawn] == [
        "Training loss over samples",
        "Training loss over seconds",
        "Test accuracy over samples",
        "Test accuracy over seconds",
        "Distance from serial over steps",
        "Bytes sent per rank and step",
        "Memory of the fullest rank",
        "One step of serial",
        "One step of data(2, reduce=ring)",
    ]


@in_browser
def test_page_numbers_equal_the_record(comparison_folder: Path) -> None:
    """The test computes every cell again, from the lines that the ranks wrote."""
    with browser() as driver:
        open_page(driver, comparison_folder / "page.html")
        rows = read_table(driver)
    assert [row["strategy"] for row in rows] == [
        "serial",
        "data(2, reduce=ring)",
        "rounding baseline",
    ]
    plain, baseline = (
        measure_step_time([Record(comparison_folder / name)], first)
        for name, first in (("baseline-plain-PyTorch-loop", 2), ("baseline-serial-threads-1", 1))
    )
    assert plain
    assert baseline
    comparison = [
        json.loads(line) for line in (comparison_folder / "compare.jsonl").read_text().splitlines()
    ]
    (difference,) = [line for line in comparison if line["kind"] == "difference"]
    for row, names in zip(rows, comparison[0]["rows"], strict=True):
        records = [Record(comparison_folder / name) for name in names]
        tests = numpy.array(
            [
                [line["test"]["value"] for line in record.ranks[0] if line["kind"] == "epoch"][-1]
                for record in records
            ]
        )
        assert row["test accuracy"] == f"{tests.mean():.2f} ± {tests.std(ddof=1):.2f}"
        step = median(compute_step_milliseconds(record) for record in records)
        reached = [find_goal(record, 80.0, step) for record in records]
        for column, place, digits in (
            ("seconds", 0, ".1f"),
            ("epochs", 1, ".1f"),
            ("samples", 2, ",.0f"),
        ):
            wanted = numpy.mean([each[place] for each in reached])
            assert row[f"{column} to accuracy=80"].rstrip("!") == f"{wanted:{digits}}"
        times = measure_step_time(records)
        assert times
        assert float(row["ms/step"].rstrip("!")) == pytest.approx(step, abs=0.0051)
        assert row["speed-up"].rstrip("!") == str(plain.divide_by(times))
        assert row["over 1 thread"].rstrip("!") == str(baseline.divide_by(times))
        assert row["parameters"].split() == [
            hashlib.sha256(
                (comparison_folder / name / "model.safetensors").read_bytes()
            ).hexdigest()[:8]
            for name in names
        ]
    ring = Record(comparison_folder / "02-data-2-reduce-ring-seed-0")
    most = max(
        line["sent"]["gradients"]["bytes"]
        for lines in ring.ranks
        for line in lines
        if line["kind"] == "step"
    )
    assert rows[1]["sent/rank/step"] == f"gradients {most:,}"
    assert float(rows[1]["difference"]) == pytest.approx(difference["value"], rel=0.05)
    assert rows[1]["where largest"] == difference["tensor"]
    assert rows[1]["memory"] == format_bytes(
        sum(Record(comparison_folder / "02-data-2-reduce-ring-seed-0").fullest.values())
    )


def compute_step_milliseconds(record: Record) -> float:
    """Return the median step time of the slowest rank, without the first step."""
    return max(
        1e3 * median([line["seconds"] for line in lines if line["kind"] == "step"][1:])
        for lines in record.ranks
    )


def find_goal(record: Record, value: float, milliseconds: float) -> tuple[float, int, int]:
    """Return (seconds, epochs, samples) up to the first test that reaches the value.

    The ranks recorded which samples they used.
    """
    steps = [line for lines in record.ranks for line in lines if line["kind"] == "step"]
    for line in record.ranks[0]:
        if line["kind"] == "epoch" and line["test"]["value"] >= value:
            used = sum(
                count_range_samples(step["order"])
                for step in steps
                if step["epoch"] <= line["epoch"]
            )
            made = {step["step"] for step in steps if step["epoch"] <= line["epoch"]}
            return 1e-3 * milliseconds * len(made), line["epoch"] + 1, used
    raise AssertionError(f"{record.folder.name} never reaches {value}")


@in_browser
def test_page_fits_a_phone_and_prints(comparison_folder: Path, tmp_path: Path) -> None:
    with browser(*PHONE) as driver:
        open_page(driver, comparison_folder / "page.html")
        width, inner = driver.execute_script(
            "return [document.documentElement.scrollWidth, window.innerWidth]"
        )
        assert inner == PHONE[0]
        assert width <= inner
        # in CSS pixels; the charts shrink with the screen
        smallest = driver.execute_script(
            "return Math.min(...[...document.querySelectorAll('figure svg')].flatMap(chart => "
            "[...chart.querySelectorAll('text')].map(text => "
            "parseFloat(getComputedStyle(text).fontSize) * chart.getBoundingClientRect().width / "
            "chart.viewBox.baseVal.width)))"
        )
        assert smallest >= 8
        printed = base64.b64decode(driver.print_page())
    assert printed.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 6
    save_screenshot(comparison_folder / "page.html", tmp_path / "page.png", height=700)
    assert struct.unpack(">II", (tmp_path / "page.png").read_bytes()[16:24]) == (1100, 700)


def test_page_needs_no_network_and_names_its_command(comparison_folder: Path) -> None:
    text = (comparison_folder / "page.html").read_text(encoding="utf-8")
    assert not re.search(
        r"""(src|href)\s*=(?!\s*["']?\#)|url\((?!\#)|@import|<script|<link""", text
    )
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', text)) <= set(ids)
    shown = unescape(re.sub(r"<[^>]*>", "", text))
    header = Record(comparison_folder / "01-serial-seed-0").header
    machine = header["machine"]
    for words in (
        "paragrad.compare(paragrad.job('digits', width=64).replace(batch=64, epochs=2), 'serial; "
        "data(2, reduce=ring)', seeds=2, rounding_baseline=True, until='accuracy=80')",
        machine["cpu"],
        f"torch {machine['torch']}",
        f"paragrad {paragrad.__version__}",
        "digits(width=64)",
        "float32",
        f"{datetime.fromisoformat(header['date']):%-d %B %Y, %H:%M} UTC, paragrad ",
        "data(2, reduce=ring, state=replicated)",
        "gradients are exchanged while backward runs",
        "memory of a rank: parameters 19.2 KB, optimizer 19.2 KB, gradients 19.2 KB, activations "
        "9.49 KB, exchange 19.3 KB",
    ):
        assert words in shown
    assert (
        Table(comparison_folder).rows[1].memory
        == Record(comparison_folder / "02-data-2-reduce-ring-seed-0").memory
    )


@in_browser
def test_page_in_dark_mode_and_on_paper(comparison_folder: Path) -> None:
    """In dark mode, no element keeps a colour of light mode, also not in charts.

    Printed paper stays white, and no page break divides a chart, a row or an entry.
    """
    seen = "getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    with browser() as driver:

        def look(theme: str, media: str = "") -> list[str]:
            driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia",
                {"media": media, "features": [{"name": "prefers-color-scheme", "value": theme}]},
            )
            return [
                driver.execute_script(f"return {seen}", *each)
                for each in (
                    ("body", "backgroundColor"),
                    ("h1", "color"),
                    ("section", "backgroundColor"),
                    ("figure svg text", "fill"),
                    ("#loss path[style*='--accent']", "stroke"),
                    ("#sent path[style*='--steel']", "fill"),
                )
            ]

        open_page(driver, comparison_folder / "page.html")
        day = look("light")
        night = look("dark")
        paper = look("dark", "print")
        avoiding = driver.execute_script(
            "return [...document.querySelectorAll('figure, tr, .whole')].map(each => "
            "getComputedStyle(each).breakInside)"
        )
    assert all(one != other for one, other in zip(day, night, strict=True))
    assert [day[1], night[1], day[2], night[2]] == [
        format_rgb(palette.PALETTE[name][theme]) for name in ("ink", "paper") for theme in (0, 1)
    ]
    assert paper[1:] == day[1:]
    assert set(avoiding) == {"avoid"}
    assert not set(
        re.findall(
            r"#[0-9a-f]{6}",
            "".join(
                re.findall(
                    r"<figure.*?</figure>",
                    (comparison_folder / "page.html").read_text(encoding="utf-8"),
                    re.DOTALL,
                )
            ),
        )
    ) & {light for light, _ in palette.PALETTE.values()}


def format_rgb(colour: str) -> str:
    return "rgb(" + ", ".join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5)) + ")"


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_have_enough_contrast(theme: int) -> None:
    """The contrast by the formula of WCAG is 4.5 to 1 for text, and 2 to 1 for lines.

    Lines also have markers and a legend.
    """

    def compute_luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    paper = compute_luminance(palette.PALETTE["paper"][theme])
    for name, colours in palette.PALETTE.items():
        dark, light = sorted((paper, compute_luminance(colours[theme])))
        contrast = (light + 0.05) / (dark + 0.05)
        assert name in ("paper", "ground", "line") or contrast >= (
            4.5 if name in ("ink", "muted", "bad") else 2
        ), name


@pytest.mark.table
@in_browser
def test_failed_row_and_hostile_names_are_escaped(tmp_path: Path) -> None:
    """The name of a job and the message of an error come from the user.

    Their text must not run as code in the reader's browser.
    """
    job = find_job(str(JOB_FILES / "fails_on_two.py"), {})
    table = paragrad.compare(job, "serial; data(2, reduce=tree); data(3)", runs=tmp_path)
    for header in table.folder.glob("*/run.jsonl"):
        header.write_text(
            header.read_text()
            .replace('"name":"picky"', '"name":"<script>document.title=1</script>&"')
            .replace("two is one too many", "<img src=x onerror=document.title=1>")
        )
    with browser() as driver:
        open_page(driver, comparison_page.write_page(Table(table.folder)))
        rows = read_table(driver)
        assert driver.execute_script("return document.querySelectorAll('script, img').length") == 0
        assert driver.title.startswith("<script>document.title=1</script>&: 3 strategies")
        failed = driver.execute_script("return document.querySelector('td.failed').colSpan")
    assert failed == len(list_columns(table)) - 1
    assert rows[1].keys() == {"strategy", "test accuracy"}
    assert rows[1]["test accuracy"].startswith(
        "failed: rank 1, step 0: RuntimeError: <img src=x onerror=document.title=1> (/"
    )
    assert float(rows[2]["difference"]) <= 1e-10


# ---- written records: rare, missing or large values ------------------------------------------
def write_comparison(
    folder: Path,
    strategies: list[str],
    *,
    steps: int = 4,
    test: bool = True,
    sent: Line | None = None,
    seeds: int = 1,
    losses: list[float] | None = None,
    distance: float | None = None,
) -> Table:
    """Write the records of a comparison, with one rank and a test after every second step."""

    def write_lines(path: Path, lines: list[Line]) -> None:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    names = [[f"{place:02}-{seed}" for seed in range(seeds)] for place in range(len(strategies))]
    asked: list[Line] = [
        {
            "kind": "comparison",
            "rows": names,
            "until": None,
            "seeds": seeds,
            "command": "paragrad compare x",
        }
    ]
    for strategy, runs in zip(strategies, names, strict=True):
        for seed, name in enumerate(runs):
            (folder / name).mkdir()
            write_lines(
                folder / name / "run.jsonl",
                [
                    {
                        "kind": "run",
                        "strategy": strategy,
                        "resolved": strategy,
                        "seed": seed,
                        "reverse": False,
                        "workers": 1,
                        "threads": 1,
                        "device": "cpu",
                        "backend": None,
                        "machine": {"cpu": "a", "cores": 1, "torch": "2", "python": "3"},
                        "job": {
                            "name": "x",
                            "arguments": {},
                            "batch": 8,
                            "epochs": steps // 2,
                            "metric": "accuracy",
                            "samples": 16,
                            "parameters": 3,
                            "dtype": "float64",
                        },
                    },
                    {"kind": "end", "status": "finished", "error": None},
                ],
            )
            (folder / name / "model.safetensors").write_bytes(b"weights")
            lines: list[Line] = []
            for step in range(steps):
                loss = losses[step] if losses else 1.0 + seed + 1.0 / (step + 1)
                lines.append(
                    {
                        "kind": "step",
                        "epoch": step // 2,
                        "step": step,
                        "start": 5.0 + step,
                        "seconds": 0.5,
                        "loss": [8.0 * loss, 8.0],
                        "order": [[8 * (step % 2), 8 * (step % 2) + 8]],
                        "sent": sent or {},
                    }
                )
                if step % 2:
                    lines.append(
                        {
                            "kind": "epoch",
                            "epoch": step // 2,
                            "start": 4.0 + step,
                            "seconds": 1.5,
                            "test": {"value": 10.0 * step, "weight": 4.0} if test else None,
                        }
                    )
            write_lines(folder / name / "rank-0.jsonl", lines)
        if distance is not None and not strategy.startswith("serial"):
            asked.append(
                {
                    "kind": "distance",
                    "baseline": "serial",
                    "run": runs[0],
                    "values": [distance] * steps,
                }
            )
    write_lines(folder / "compare.jsonl", asked)
    return Table(folder)


def render_page(table: Table) -> str:
    return comparison_page.write_page(table).read_text(encoding="utf-8")


def test_missing_chart_is_replaced_by_a_sentence(tmp_path: Path) -> None:
    text = render_page(write_comparison(tmp_path, ["serial"], test=False))
    assert re.findall(r'<figure id="([^"]*)"', text) == ["chart-loss-1", "chart-loss-2"]
    for sentence in (
        "this job has no test set",
        "no strategy was compared with serial step by step",
        "no strategy here sends anything",
    ):
        assert sentence in text
    assert "paragrad compare x" in text
    assert "shade spans" not in text
    assert "memory of a rank" not in text  # records of earlier versions have none


def test_rounding_baseline_of_an_earlier_record_has_its_present_name() -> None:
    line = {"rows": [["01-serial"], ["02-serial-twin"]], "strategies": ["serial", "rounding twin"]}
    assert list_row_names(line) == ["serial", "rounding baseline"]


def test_run_without_steps_has_no_chart(tmp_path: Path) -> None:
    text = render_page(write_comparison(tmp_path, ["serial", "data(2)"], steps=0))
    assert "<figure" not in text
    assert "no finished step" in text


def test_zero_deviation_is_text_and_small_ones_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert "equal serial&#39;s after each of 4 steps" in render_page(
        write_comparison(tmp_path / "a", ["serial", "data(2)"], distance=0.0)
    )
    mixed = write_comparison(tmp_path / "b", ["serial", "data(2)", "data(3)"], distance=0.0)
    lines = (
        (mixed.folder / "compare.jsonl")
        .read_text()
        .replace("[0.0, 0.0, 0.0, 0.0]", "[0.0, 1e-12, 3e-7, NaN]", 1)
    )
    (mixed.folder / "compare.jsonl").write_text(lines)
    found = list_ticks(render_page(mixed), "chart-distance-1")
    assert found[-1] == "0"
    assert "10⁻¹²" in found


def list_ticks(text: str, figure: str, axis: str = "matplotlib.axis_2") -> list[str]:
    """Return the labels of an axis, by default the y axis."""
    chart = text.split(f'<figure id="{figure}">')[1].split("</figure>")[0]
    return re.findall(
        r"<text[^>]*>([^<]*)</text>",
        re.split("-matplotlib.axis_2|-patch_", chart.split(f'-{axis}">')[1])[0],
    )


def test_percentages_and_goal_share_a_unit(comparison_folder: Path) -> None:
    found = list_ticks(
        (comparison_folder / "page.html").read_text(encoding="utf-8"), "chart-test-1"
    )
    assert len(found) > 2
    assert all(re.fullmatch(r"[0-9.]+ %", each) for each in found)


@pytest.mark.parametrize(("slower", "logarithmic"), [(99.0, False), (100.0, True)])
def test_time_axis_is_logarithmic_if_rows_differ_a_hundredfold(
    tmp_path: Path, slower: float, logarithmic: bool
) -> None:
    """Earlier, if one row took a hundred times as long, all others were one line at the left
    edge.
    """
    compared = write_comparison(tmp_path, ["serial", "data(2)"])
    path = tmp_path / "01-0" / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"seconds": 0.5', f'"seconds": {0.5 * slower}'))
    text = render_page(Table(compared.folder))
    assert (
        "The time axis is logarithmic, because rows differ by a factor of 100 or more." in text
    ) == logarithmic
    assert (
        list_ticks(text, "chart-loss-2", "matplotlib.axis_1")[:3] == ["1", "10", "100"]
    ) == logarithmic
    assert "1" not in list_ticks(text, "chart-loss-1", "matplotlib.axis_1")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("end", "why"),
    [
        ({"status": "stopped", "error": None}, "asked to stop (SIGTERM)"),
        ({"status": "interrupted", "error": None}, "interrupted (Ctrl-C)"),
        (
            {
                "status": "failed",
                "error": {"rank": 1, "step": 4, "tensor": None, "message": "out of luck"},
            },
            "failed: out of luck",
        ),
        ({"status": "finished", "error": None}, "the test reached accuracy=20"),
        (None, "killed (its record has no end)"),
    ],
)
def test_reason_for_the_end_of_a_line_is_shown(tmp_path: Path, end: Line | None, why: str) -> None:
    """If the line of a run ends early, the page gives the reason.

    Earlier, a line ended at step 100 of 5,000, and the page did not say why. The run could have
    been stopped, have reached its goal, or have been killed.
    """
    write_comparison(tmp_path, ["serial", "data(2)"])
    for path in (
        tmp_path / "01-0" / "rank-0.jsonl",
        tmp_path / "01-0" / "run.jsonl",
        tmp_path / "compare.jsonl",
    ):
        path.write_text(path.read_text().replace('"until": null', '"until": "accuracy=20"'))
    rank = tmp_path / "01-0" / "rank-0.jsonl"
    run = tmp_path / "01-0" / "run.jsonl"
    rank.write_text("".join(rank.read_text().splitlines(keepends=True)[:3]))
    run.write_text(
        run.read_text().splitlines()[0]
        + "\n"
        + (json.dumps({"kind": "end", **end}) + "\n" if end else "")
    )
    text = unescape(render_page(Table(tmp_path)))
    loss = text.split('<section id="loss"')[1].split("</section>")[0]
    assert re.findall("<li>([^<]*)</li>", loss.split('class="ends"')[1]) == [
        f"data(2) ends at step 2 of 4: {why}."
    ]
    assert "ends at step 2" not in text.split('<section id="sent"')[1]


def test_equal_reasons_share_one_sentence(tmp_path: Path) -> None:
    write_comparison(tmp_path, ["serial", "data(2)", "data(3)"])
    for run in tmp_path.glob("*/run.jsonl"):
        run.write_text(
            run.read_text()
            .replace('"epochs": 2', '"epochs": 1000')
            .replace('"finished"', '"stopped"')
        )
    assert comparison_page.page_text.describe_early_ends(Table(tmp_path)) == [
        "All lines end at step 4 of 2,000: asked to stop (SIGTERM)."
    ]


def test_diverging_losses_are_drawn(tmp_path: Path) -> None:
    """Losses that are infinite or NaN cause no warning, and the page is still written."""
    nan = float("nan")
    inf = float("inf")
    text = render_page(
        write_comparison(
            tmp_path,
            ["serial", "data(2)"],
            steps=6,
            losses=[1.0, 1e30, inf, nan, -inf, 2.0],
            seeds=2,
        )
    )
    assert '<figure id="chart-loss-2"' in text


def test_kinds_of_bytes_and_computed_work(tmp_path: Path) -> None:
    text = render_page(
        write_comparison(
            tmp_path,
            ["serial", "data(2)"],
            sent={
                "gradients": {"bytes": 1234567, "computed": True},
                "batch_norm": {"bytes": 512, "computed": False},
            },
        )
    )
    assert "gradients 1,234,567*, batch_norm 512" in text
    assert "Hatched" in text
    assert 'fill="url(#sent-' in text.replace("fill: url(#sent-", 'fill="url(#sent-')


def test_every_column_is_explained(tmp_path: Path) -> None:
    table = write_comparison(tmp_path, ["serial"])
    text = render_page(table)
    for column in list_columns(table)[1:]:
        assert f"<dt>{column}</dt>" in text


@pytest.mark.table
def test_long_comparison_page_is_small_and_reproducible(tmp_path: Path) -> None:
    """The page of ten strategies with 10,000 steps each is below 1 MB."""
    table = write_comparison(
        tmp_path,
        ["serial", *(f"data({workers}, reduce=ring)" for workers in range(2, 11))],
        steps=10_000,
        distance=1e-9,
    )
    text = render_page(table)
    assert len(text.encode()) < 1_000_000
    assert render_page(table) == text
    assert not (tmp_path / "page.html.partial").exists()


def test_chart_points_equal_the_record(tmp_path: Path) -> None:
    """The points are (samples, steps, value), at the end of every step and of every epoch."""
    record = write_comparison(tmp_path, ["serial"]).records["00-0"]
    assert sections.list_step_losses(record) == [
        (8.0, 1.0, 2.0),
        (16.0, 2.0, 1.5),
        (24.0, 3.0, 1.0 + 1 / 3),
        (32.0, 4.0, 1.25),
    ]
    assert sections.list_test_values(record) == [(16.0, 2.0, 10.0), (32.0, 4.0, 30.0)]


def test_bytes_are_in_readable_units() -> None:
    assert comparison_table.format_memory_kinds(
        {
            "a": 0,
            "b": 1,
            "c": 999,
            "d": 19_256,
            "e": 999_400,
            "f": 999_600,
            "g": 286_000_000,
            "h": 10**13,
        }
    ) == ("b 1 bytes, c 999 bytes, d 19.3 KB, e 999 KB, f 1 MB, g 286 MB, h 10,000.0 GB")


def test_curve_is_averaged_over_neighbours_and_seeds() -> None:
    seen = charts.choose_style(0)
    seeds = [[(float(step), float(10 * seed + step)) for step in range(8)] for seed in range(2)]
    # this seed has one more step, and the other seed has no value to average there
    seeds[1].append((8.0, 1000.0))
    found = charts.build_curve(seen, "serial", seeds, most=4)
    assert found == charts.Curve(
        seen,
        "serial",
        x=[0.5, 2.5, 4.5, 6.5],
        y=[5.5, 7.5, 9.5, 11.5],
        low=[0.5, 2.5, 4.5, 6.5],
        high=[10.5, 12.5, 14.5, 16.5],
        seeds=2,
        steps=2,
    )
    assert charts.build_curve(seen, "serial", []) is None
    assert charts.build_curve(seen, "serial", [[(1.0, float("nan"))]]) is None


def test_ten_strategies_are_distinguishable() -> None:
    assert len({charts.choose_style(place).colour for place in range(10)}) == 10
    assert len({charts.choose_style(place).marker for place in range(10)}) == 10
    assert len({charts.choose_style(place) for place in range(20)}) == 20


# ---- the table at a terminal -----------------------------------------------------------------
SIX = [
    "serial",
    *(f"data(2, reduce={name})" for name in ("native", "ring", "ring_async", "tree", "butterfly")),
]


def print_at_terminal(compared: Table, width: int) -> list[str]:
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    comparison_table.print_table(compared, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seeds", [1, 3])
def test_table_is_readable_at_80_columns(tmp_path: Path, seeds: int) -> None:
    """Earlier, the nine columns were only a few characters wide, and a number took three lines."""
    compared = write_comparison(
        tmp_path, SIX, sent={"gradients": {"bytes": 19252, "computed": True}}, seeds=seeds
    )
    lines = print_at_terminal(compared, 80)
    drawn = lines[: lines.index(next(line for line in lines if line.startswith("in page.html")))]
    assert max(map(len, drawn)) <= 80
    for strategy in SIX:
        # each row is one line
        (line,) = [line for line in drawn if line.startswith(f"{strategy} ")]
        assert line.split("  ")[1:] != []
        assert "500.00" in line
        assert ("9a129038" in line) == (seeds == 1)
    assert "accuracy" in drawn[2]
    shown = [column for column in list_columns(compared) if column.split()[-1] in drawn[2]]
    assert lines[len(drawn)].split(": ")[1].split(", ") == [
        column for column in list_columns(compared) if column not in shown
    ]
    wide = print_at_terminal(compared, 170)
    assert all(column in wide[2] for column in list_columns(compared))


def test_long_names_and_failures_leave_the_table_readable(tmp_path: Path) -> None:
    """The message of a failure is below the table.

    Earlier, it was in the column of the test, and left no space for the other columns.
    """
    long = "data(3, reduce=ring_async(segments=4), shares=[3, 1, 2], micro=2)"
    compared = write_comparison(tmp_path, ["serial", long, "data(2)"])
    end = tmp_path / "02-0" / "run.jsonl"
    end.write_text(
        end.read_text().replace(
            '"finished", "error": null',
            '"failed", "error": '
            + json.dumps({"rank": 1, "step": 3, "tensor": None, "message": "out of luck, " * 20}),
        )
    )
    lines = print_at_terminal(Table(compared.folder), 80)
    row = next(line for line in lines if line.startswith("data(2)"))
    assert row.split()[1] == "failed"
    assert any(line.startswith("data(2) failed: rank 1, step 3: out of luck") for line in lines)
    assert max(len(line) for line in lines[: lines.index(row)]) <= 80


def test_table_prints_in_columns(tmp_path: Path) -> None:
    """Earlier, print(table) printed Table(folder=...)."""
    lines = str(write_comparison(tmp_path, SIX)).splitlines()
    assert lines[0].split("  ")[0] == "strategy"
    assert [line.split("  ")[0] for line in lines[1:7]] == SIX
    assert len({line.index("500.00") for line in lines[1:7]}) == 1
    assert lines[-1] == f"page: {tmp_path / 'page.html'}"


@pytest.mark.parametrize(("everybody", "busy"), [(4.1, False), (4.8, True), (None, False)])
def test_busy_machine_is_reported(tmp_path: Path, everybody: float | None, busy: bool) -> None:
    """Earlier, other programs on the machine doubled the times, and the table did not show it.

    The recorded machine has one core. Other programs are reported if they use more than a tenth.
    """
    compared = write_comparison(tmp_path, ["serial(threads=1)", "data(2)"], steps=8)
    with (tmp_path / "01-0" / "rank-0.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {
                    "kind": "cpu",
                    "host": "here",
                    "seconds": 4.0,
                    "own": 4.0,
                    "all": everybody,
                    "switched": 400,
                }
            )
        )
    told = (
        "!: other programs kept up to 0.2 of 1 cores busy during the run, and the system gave a "
        "rank's core to another thread up to 100 times per second"
    )
    lines = print_at_terminal(compared, 130)
    assert (told in "\n".join(lines)) == busy
    assert not busy or told in unescape(render_page(Table(tmp_path)))
    assert [
        [word for word in line.split() if word.endswith("!")]
        for line in str(compared).splitlines()[1:3]
    ] == [[], ["500.00!", "1.00x!", "1.00x!"] if busy else []]


def test_noisy_speed_up_is_not_reported(tmp_path: Path) -> None:
    """Earlier, other programs disturbed some steps of serial.

    The table then said that two workers were 47 times faster.
    """
    write_comparison(tmp_path, ["serial(threads=1)", "data(2)", "data(3)"], steps=60)
    lines = [
        json.loads(line) for line in (tmp_path / "00-0" / "rank-0.jsonl").read_text().splitlines()
    ]
    for line in lines:
        if line["kind"] == "step":
            line["seconds"] = 23.5 if line["step"] // 10 % 2 == 0 else 0.6
    (tmp_path / "00-0" / "rank-0.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    table = Table(tmp_path)
    assert [row.speed_up for row in table.rows] == [1.0, None, None]
    assert "unknown" in str(table)
    assert "unknown: the times of steps vary so much" in str(table)
    assert table.to_json()["rows"][1]["speed_up_between"] == pytest.approx([1.2, 47.0])


# ---- what the speed-up is over ---------------------------------------------------------------
def write_plain_run(folder: Path, seconds: float, end: Line | None = None) -> Table:
    """Write the record of a plain PyTorch loop, like the first row's, and return the table."""
    header = json.loads((folder / "00-0" / "run.jsonl").read_text().splitlines()[0])
    header |= {"strategy": "plain PyTorch loop", "resolved": "plain PyTorch loop"}
    finished = {"kind": "end", "status": "finished", "error": None}
    lines = [
        {
            "kind": "step",
            "epoch": 0,
            "step": step,
            "start": 5.0 + step,
            "seconds": 9.0 if step < 2 else seconds,  # the first two do not count
            "loss": [1.0, 1.0],
            "order": [[0, 8]],
            "sent": {},
        }
        for step in range(60)
    ]
    plain = folder / "baseline-plain-PyTorch-loop"
    plain.mkdir()
    for name, each in (("run.jsonl", [header, end or finished]), ("rank-0.jsonl", lines)):
        (plain / name).write_text("".join(json.dumps(line) + "\n" for line in each))
    return Table(folder)


def test_speed_up_is_over_the_plain_loop(tmp_path: Path) -> None:
    """Earlier, it was over paragrad's own serial, and the cost of serial flattered other rows."""
    write_comparison(tmp_path, ["serial(threads=1)", "data(2)"], steps=60)
    table = write_plain_run(tmp_path, 0.4)
    assert [row.speed_up for row in table.rows] == pytest.approx([0.8, 0.8])
    assert [row.speed_up_one_thread for row in table.rows] == [1.0, 1.0]
    sentence = (
        "speed-up: over a plain PyTorch loop with all 1 threads (400.00 ms/step); paragrad's "
        "serial with all 1 threads takes 500.00 ms/step"
    )
    assert sentence in str(table).splitlines()
    page = unescape(render_page(table))
    assert sentence in page
    assert "milliseconds per step of a plain PyTorch loop with all 1 threads, divided by" in page
    found = table.to_json()
    assert found["speed_up_over"] == "plain PyTorch loop"
    assert found["plain_pytorch"] == {
        "seconds_per_step": 0.4,
        "seconds_per_step_between": [0.4, 0.4],
        "why": None,
    }
    assert found["serial"] == {"seconds_per_step": 0.5, "seconds_per_step_between": [0.5, 0.5]}
    assert found["rows"][1]["speed_up"] == pytest.approx(0.8)


def test_speed_up_of_an_earlier_comparison_is_over_serial(tmp_path: Path) -> None:
    table = write_comparison(tmp_path, ["serial(threads=1)", "data(2)"], steps=60)
    assert [row.speed_up for row in table.rows] == [1.0, 1.0]
    sentence = (
        "speed-up: over serial with all 1 threads (500.00 ms/step), because this comparison has no "
        "plain PyTorch loop"
    )
    assert sentence in str(table).splitlines()
    assert "milliseconds per step of serial with all 1 threads" in render_page(table)
    found = table.to_json()
    assert found["speed_up_over"] == "serial"
    assert found["plain_pytorch"] == {
        "seconds_per_step": None,
        "seconds_per_step_between": None,
        "why": "this comparison has no plain PyTorch loop",
    }


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (
            {
                "kind": "end",
                "status": "failed",
                "error": {"rank": 0, "step": None, "tensor": None, "message": "out of luck"},
            },
            "the plain PyTorch loop failed: rank 0: out of luck",
        ),
        (
            {"kind": "end", "status": "stopped", "error": None},
            "the plain PyTorch loop did not finish",
        ),
    ],
)
def test_failed_plain_loop_gives_no_speed_up(tmp_path: Path, end: Line, why: str) -> None:
    write_comparison(tmp_path, ["serial(threads=1)", "data(2)"], steps=60)
    table = write_plain_run(tmp_path, 0.4, end)
    assert table.rows[0].speed_up == 1.0
    assert f"speed-up: over serial with all 1 threads (500.00 ms/step), because {why}" in str(table)


def test_serial_without_steps_has_no_time_in_the_notes(tmp_path: Path) -> None:
    write_comparison(tmp_path, ["data(2)"], steps=60)
    assert "over serial with all 1 threads, because" in str(Table(tmp_path))
    table = write_plain_run(tmp_path, 0.4)
    assert table.rows[0].speed_up == pytest.approx(0.8)
    assert "(400.00 ms/step)" in str(table).splitlines()[3]
    assert "paragrad's serial" not in str(table)
