"""docs/same_training/models.md from what a run of the zoo saw.

A line has row, strategy, difference, twin and verdict.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

COMMAND = "`make zoo`"
SAMPLE = (
    "`pytest tests/zoo -m 'not table'`, every seventh row under one strategy in turn (`make zoo` "
    "runs all under all)"
)
HEAD = """# Models from elsewhere

Written by {command} (torch {torch}{libraries}).

Models and jobs that were not written for paragrad, each under ten strategies beside one worker, \
those on images under an
eleventh; optimizers under four. *difference*: the largest of
any gradient, parameter or buffer over the steps of [verify](verify.md), in float64; *twin*: the \
same of one worker whose
parameters are moved by one unit in the last place, which is what rounding alone does. A job \
that no split trains as one worker
does is refused by one message before the first update.

{count} rows, {results} results, {unexpected} of them not as expected.

| strategy | rows | the same training | refused |
|---|---|---|---|
{columns}
| row | strategy | difference | twin | verdict |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Line:
    """One result. verdict: "same", "refused: MESSAGE", or what was unexpected."""

    row: str
    strategy: str
    difference: float | None
    twin: float | None
    verdict: str
    expected: bool

    def __str__(self) -> str:
        def told(value: float | None) -> str:
            return "" if value is None else f"{value:.1e}"

        # files by their names alone
        named = re.sub(r"(?<!\S)(\(?)/\S+/(?=\S)", r"\1", self.verdict)
        verdict = " ".join(named.replace("|", "/").split())
        verdict = verdict if len(verdict) <= 160 else verdict[:157] + "..."
        return (
            f"| {self.row} | `{self.strategy}` | {told(self.difference)} | {told(self.twin)} | "
            f"{verdict if self.expected else '**unexpected** ' + verdict} |"
        )


@dataclass
class Page:
    """The results of a run. Written to the path in PARAGRAD_MODELS_PAGE, where that is set."""

    strategies: tuple[str, ...]
    lines: list[Line] = field(default_factory=list)

    def text(self) -> str:
        lines = sorted(
            self.lines, key=lambda line: (line.row.lower(), self.strategies.index(line.strategy))
        )
        rows = {line.row for line in lines}
        head = HEAD.format(
            command=COMMAND if len(lines) > len(rows) else SAMPLE,
            torch=torch.__version__.split("+")[0],
            libraries=_libraries(),
            count=len(rows),
            results=len(lines),
            unexpected=sum(not line.expected for line in lines),
            columns="".join(self._column(each) for each in self.strategies),
        )
        return head + "".join(f"{line}\n" for line in lines)

    def _column(self, strategy: str) -> str:
        verdicts = [line.verdict for line in self.lines if line.strategy == strategy]
        counts = [
            len(verdicts),
            *(sum(each.startswith(begins) for each in verdicts) for begins in ("same", "refused")),
        ]
        return f"| `{strategy}` | {' | '.join(map(str, counts))} |\n"

    def write(self) -> None:
        if (path := os.environ.get("PARAGRAD_MODELS_PAGE")) and self.lines:
            Path(path).write_text(self.text())


def _libraries() -> str:
    from importlib import metadata

    found = []
    for name in (
        "transformers",
        "timm",
        "torchvision",
        "schedulefree",
        "lion-pytorch",
        "pytorch_optimizer",
    ):
        try:
            found.append(f", {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return "".join(found)
