"""`pg.train` takes every option of the command as a keyword, which type checkers know."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
from equality_table import VECTORS, make_job, make_mlp

import paragrad as pg
from paragrad.commands.cli import run_train
from paragrad.commands.train import SettingArguments
from paragrad.trainer.settings import Settings

pytestmark = pytest.mark.processes

# only the command has these: options for what is printed, and arguments of built-in jobs
COMMAND_ALONE = {"job", "strategy", "dry_run", "set_", "as_json"}


def test_keywords_are_the_settings_with_their_types() -> None:
    assert SettingArguments.__annotations__.keys() == {each.name for each in fields(Settings)}
    typed = {name: each.__forward_arg__ for name, each in SettingArguments.__annotations__.items()}
    assert typed == {each.name: each.type for each in fields(Settings)}


def test_train_takes_every_option_of_the_command() -> None:
    """Earlier, `pg.train(job, epochs=3)` was refused: no setting 'epochs'."""
    options = set(inspect.signature(run_train).parameters) - COMMAND_ALONE
    keywords = {*inspect.signature(pg.train).parameters, *SettingArguments.__annotations__}
    assert options - keywords == set()


def test_keywords_change_the_job(tmp_path: Path) -> None:
    made = make_job("vectors", make_mlp, VECTORS)
    run = pg.train(made, epochs=1, batch=20, seed=7, runs=tmp_path)
    assert (run.header["seed"], run.header["job"]["batch"], run.header["job"]["epochs"]) == (
        7,
        20,
        1,
    )
    same = pg.train(made.replace(epochs=1, batch=20, seed=7), runs=tmp_path)
    assert run.losses == same.losses


def test_unknown_keyword_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(pg.Refused, match=r"no setting 'tensorbord'; did you mean tensorboard?"):
        pg.train(make_job("vectors", make_mlp, VECTORS), tensorbord=True)  # type: ignore[call-arg]
