"""What the ranks of a strategy hold in memory: foretold and drawn, and counted in one step."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from paragrad.errors import Refused
from paragrad.jobs.job import Job
from paragrad.launch import Ranks
from paragrad.loops.synchronous import train_rank
from paragrad.record.record import Record
from paragrad.report.memory_drawing import Lifetimes, as_text
from paragrad.runtime.rendezvous import launched_size
from paragrad.strategies.registry import strategies
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.settings import Settings
from paragrad.validation.activation_forecast import account
from paragrad.validation.validate import Admitted, admitted

# of which a step is made to count: more processes are not started for a drawing
RANKS = 16


def draw_memory(text: str, job: Job, svg: Path | None = None, data: Path | None = None) -> str:
    """Strategies, one below the other. svg: a file for the picture of one. Raises Refused."""
    if launched_size() is not None:
        raise Refused(
            "draw --memory starts its own ranks and cannot run under a launcher; call it with "
            "plain python"
        )
    asked = strategies(text)
    if svg and len(asked) > 1:
        raise Refused(f"--svg {svg} takes one picture; give one strategy")
    return "\n\n".join(_drawn(job, each, svg, data) for each in asked)


def _drawn(job: Job, asked: Strategy, svg: Path | None, data: Path | None) -> str:
    checked = admitted(job, asked, Settings(data=data))
    found = account(checked.job, checked.resolved, checked.facts, data)
    counted: list[dict[str, int]] = []
    if found.strategy.size <= RANKS:
        checked = admitted(job, found.strategy, Settings(data=data), checked.facts)
        with Ranks(checked.size) as ranks:
            counted = one_step(ranks, checked)
    ranks_of = [
        Lifetimes(
            found.first + rank,
            found.moments(rank),
            found.in_test(rank),
            counted[found.first + rank] if counted else None,
        )
        for rank in range(found.ranks)
    ]
    sizes = sorted(set(found.sizes), reverse=True)
    title = (
        f"{found.strategy}: bytes that a replica's ranks hold of activations and messages, task by "
        f"task; a step of "
        f"{len(found.sizes)} micro-batch{'es' if len(found.sizes) > 1 else ''} of "
        f"{' or '.join(map(str, sizes))} samples"
    )
    return as_text(title, ranks_of, svg)


def one_step(ranks: Ranks, checked: Admitted) -> list[dict[str, int]]:
    """What each rank held in a training of one step, by kind, as its record says. Raises
    RankFailed.
    """
    limited = replace(
        checked,
        settings=replace(
            checked.settings,
            limit=1,
            unchecked=True,
            save=None,
            resume=None,
            trace=None,
            until=None,
            tensorboard=False,
        ),
        saved=None,
        tried=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        limited.on(ranks, train_rank, limited, Path(folder), time.monotonic())
        record = Record(Path(folder))
        return [_of(record, rank) for rank in range(len(record.ranks))]


def _of(record: Record, rank: int) -> dict[str, int]:
    lines: list[dict[str, Any]] = record.of("memory", rank)
    return {kind: held for kind, held in lines[-1].items() if kind != "kind"} if lines else {}
