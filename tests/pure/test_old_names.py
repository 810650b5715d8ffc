"""Names that users typed before version 0.1: each is refused with the name of today."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import fields

import pytest
import torch

import paragrad as pg
from paragrad.commands.cli import run_command_line
from paragrad.commands.options import RENAMED_OPTIONS
from paragrad.strategies.strategy import RENAMED_MEMBERS, Environment, Strategy
from paragrad.trainer.settings import RENAMED, Settings
from paragrad.validation.validate import resolve_and_check_strategy

JOB = pg.job("digits")
SGD = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize(("old", "new"), [*pg._RENAMED.items()])
def test_old_public_name_is_refused(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=f"paragrad.{old} is now called paragrad.{new}"):
        getattr(pg, old)
    assert hasattr(pg, new)


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items()])
def test_old_argument_is_refused(old: str, new: str) -> None:
    """With the new name if the function has it: train was said to have rounding_baseline."""
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


@pytest.mark.parametrize(("old", "new"), [*RENAMED_MEMBERS.items()])
def test_old_member_of_a_strategy_is_refused(old: str, new: str) -> None:
    """It was ignored without a word: a user's passes never ran."""
    assert hasattr(Strategy, new) or new in (
        "make_exchange",
        "shard_model",
        "make_passes",
        "guarantees",
    )
    strategy = types.new_class(
        f"Old{old.title()}", (Strategy,), exec_body=lambda body: body.update({old: None})
    )
    with pytest.raises(pg.Refused, match=f"has {old}, which is now called {new}"):
        resolve_and_check_strategy(strategy(), Environment())


@pytest.mark.parametrize(("old", "new"), [*RENAMED_OPTIONS.items()])
def test_old_option_is_refused(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written with its value, too."""
    for word in (old, f"{old}=x"):
        monkeypatch.setattr(sys, "argv", ["paragrad", "compare", "digits", word])
        with pytest.raises(SystemExit) as ended:
            run_command_line()
        assert ended.value.code == 2
        assert capsys.readouterr() == ("", f"paragrad: {old} is now called {new}\n")
