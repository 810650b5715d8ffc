"""Names that users typed before version 0.1: each is refused with its present name."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import fields
from typing import Any

import pytest
import torch

import paragrad as pg
from paragrad.commands.cli import _explain_positional_strategy, run_command_line
from paragrad.commands.options import RENAMED_OPTIONS
from paragrad.engine.exchange import RENAMED_EXCHANGE_MEMBERS, Exchange
from paragrad.engine.passes import RENAMED_PASSES_MEMBERS, Passes
from paragrad.parallel.compression.codec import RENAMED_CODEC_MEMBERS
from paragrad.trainer.settings import RENAMED, Settings

pytestmark = pytest.mark.pure

JOB = pg.job("digits")
FAMILIES = (pg.Strategy, pg.AllReduce, pg.PipelineSchedule, pg.Compressor)
SGD = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize(("old", "new"), [*pg._RENAMED.items()])
def test_old_public_name_is_refused(old: str, new: str) -> None:
    message = f"paragrad.{old} is now called paragrad.{new}"
    with pytest.raises(AttributeError, match=message):
        getattr(pg, old)
    assert not hasattr(pg, old)
    assert hasattr(pg, new)
    # earlier, Python said "cannot import name", without the new name
    with pytest.raises(ImportError, match=message):
        exec(f"from paragrad import {old}")


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items()])
def test_old_argument_is_refused(old: str, new: str) -> None:
    """The message gives the new name only if the function has it.

    Earlier, the message said that train has rounding_baseline.
    """
    calls = {
        pg.train: lambda: pg.train(JOB, **{old: None}),
        pg.compare: lambda: pg.compare(JOB, "serial", **{old: None}),
        pg.verify: lambda: pg.verify(JOB, "serial", **{old: None}),
        pg.parallelize: lambda: pg.parallelize(
            torch.nn.Linear(2, 2), torch.nn.L1Loss(), SGD, **{old: None}
        ),
    }
    settings = {field.name for field in fields(Settings)}
    named = 0
    for function, call in calls.items():
        known = settings if function is pg.train else inspect.signature(function).parameters
        with pytest.raises((pg.Refused, TypeError), match=old) as refused:
            call()
        assert (str(refused.value) == f"{old} is now called {new}") == (new in known)
        named += new in known
    assert named


def build_old_class(base: type, old: str, **members: Any) -> type:
    return types.new_class(
        f"Old{old.title()}", (base,), exec_body=lambda body: body.update({old: None}, **members)
    )


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        (base, *names)
        for base, renamed in (
            *((family, family.renamed_members) for family in FAMILIES),
            (pg.Codec, RENAMED_CODEC_MEMBERS),
        )
        for names in renamed.items()
    ],
)
def test_old_member_of_a_class_is_refused(base: type, old: str, new: str) -> None:
    """An old member of a user's class is refused.

    Earlier, it was ignored without a message, so the user's passes never ran.
    """
    assert hasattr(base, new) or new in (
        "make_exchange",
        "shard_model",
        "make_passes",
        "guarantees",
        "clients_per_round",
    )
    with pytest.raises(pg.Refused, match=f"has {old}, which is now called {new}$"):
        build_old_class(base, old)


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        (base, *names)
        for base, renamed in (
            (Exchange, RENAMED_EXCHANGE_MEMBERS),
            (Passes, RENAMED_PASSES_MEMBERS),
        )
        for names in renamed.items()
    ],
)
def test_old_member_of_exchange_or_passes_is_refused(base: type, old: str, new: str) -> None:
    assert new in inspect.getsource(base)
    with pytest.raises(pg.Refused, match=f"has {old}, which is now called {new}$"):
        build_old_class(base, old)


@pytest.mark.parametrize(("old", "new"), [*RENAMED_OPTIONS.items()])
def test_old_option_is_refused(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old option is refused, also if it is written with its value."""
    for word in (old, f"{old}=x"):
        monkeypatch.setattr(sys, "argv", ["paragrad", "compare", "digits", word])
        with pytest.raises(SystemExit) as ended:
            run_command_line()
        assert ended.value.code == 2
        assert capsys.readouterr() == ("", f"paragrad: {old} is now called {new}\n")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["train", "mine.py", "data(2)"], "--strategy 'data(2)'"),
        (
            ["verify", "digits", "--json", "digits", "data(2) * pipeline(2)"],
            "--strategy 'data(2) *",
        ),
        (["compare", "digits", "serial; data(2)"], "--strategies 'serial; data(2)'"),
    ],
)
def test_strategy_behind_the_job_is_refused_with_its_option(
    words: list[str],
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A strategy after the job is refused, and the message names its option.

    Earlier, the message was about an unexpected extra argument.
    """
    monkeypatch.setattr(sys, "argv", ["paragrad", *words])
    with pytest.raises(SystemExit) as ended:
        run_command_line()
    assert ended.value.code == 2
    assert f"such as {option}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--strategy", "serial", "data(2).py:job"],
        ["train", "data(2).py:job", "--strategy", "serial"],
        ["simulate", "ring", "data(2)"],
    ],
)
def test_job_file_with_parentheses_is_no_strategy(words: list[str]) -> None:
    assert _explain_positional_strategy(words) is None
