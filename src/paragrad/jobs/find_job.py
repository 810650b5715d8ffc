"""Finds a job by what the user typed.

That is a built-in name, path/file.py, path/file.py:name, or module:attribute.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from paragrad.errors import Refused, describe_error
from paragrad.jobs.digits import digits, inception_digits
from paragrad.jobs.job import Job
from paragrad.jobs.mnist import mnist_cnn, mnist_mlp, mnist_resnet
from paragrad.jobs.shakespeare import shakespeare_gpt, shakespeare_lstm
from paragrad.launch import job_files
from paragrad.notation.choices import describe_unknown_name

JOBS: dict[str, Callable[..., Job]] = {
    "digits": digits,
    "inception-digits": inception_digits,
    "mnist-mlp": mnist_mlp,
    "mnist-cnn": mnist_cnn,
    "mnist-resnet": mnist_resnet,
    "shakespeare-lstm": shakespeare_lstm,
    "shakespeare-gpt": shakespeare_gpt,
}


def job(name: str, **arguments: Any) -> Job:
    """Create a built-in job.

    Args:
        name: The name of the job.
        **arguments: The arguments of its function.

    Returns:
        The job.

    Raises:
        Refused: The name or an argument is unknown; the message gives the nearest name.

    Examples:
        >>> import paragrad as pg
        >>> pg.job("digits", width=32).batch
        64
    """
    if name not in JOBS:
        raise Refused(describe_unknown_name("job", name, JOBS))
    known = inspect.signature(JOBS[name]).parameters
    for argument, value in arguments.items():
        if argument not in known:
            raise Refused(f"job {name}: " + describe_unknown_name("argument", argument, known))
        default = known[argument].default
        if type(value) is not type(default):
            raise Refused(f"job {name}: {argument} must be like {default!r}, got {value!r}")
    return JOBS[name](**arguments)


def find_job(text: str, settings: Mapping[str, str] | None = None) -> Job:
    """Find the job that a text names.

    Args:
        text: A built-in name, path/file.py, path/file.py:name, or module:attribute.
        settings: The values of `--set name=value` for a built-in job.

    Returns:
        The job.

    Raises:
        Refused: There is no such job.
    """
    settings = settings or {}
    if text in JOBS:
        return job(text, **{name: _parse_literal(value) for name, value in settings.items()})
    if settings:
        raise Refused(
            f"--set is for the arguments of built-in jobs ({', '.join(JOBS)}); {text} is none of "
            "them"
        )
    if text.endswith(".py"):
        return _get_only_job(_load_job_file(Path(text)), text)
    if ":" in text:
        place, _, name = text.rpartition(":")
        return _resolve_job(
            _get_job_attribute(
                _load_job_file(Path(place))
                if place.endswith(".py")
                else _import_job_module(place, text),
                name,
                text,
            ),
            text,
        )
    raise Refused(
        describe_unknown_name("job", text, JOBS)
        + "; or give path/file.py, path/file.py:name or module:attribute"
    )


def _load_job_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Refused(
            f"there is no job file {path}; give the path of a Python file that holds a paragrad.Job"
        )
    module: ModuleType = _call_user_code(str(path), lambda: job_files.load_job_file(path))
    return module


def _import_job_module(name: str, where: str) -> ModuleType:
    working_directory = str(Path.cwd())
    if working_directory not in sys.path and "" not in sys.path:
        # as with `python -m`, modules of the working directory can be imported
        sys.path.insert(0, working_directory)
    importlib.invalidate_caches()
    module: ModuleType = _call_user_code(where, lambda: job_files.import_job_module(name))
    return module


def _get_job_attribute(module: ModuleType, name: str, where: str) -> Any:
    if not hasattr(module, name):
        raise Refused(f"{where}: " + describe_unknown_name("job", name, _list_module_jobs(module)))
    return getattr(module, name)


def _list_module_jobs(module: ModuleType) -> dict[str, Job]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Job)}


def _get_only_job(module: ModuleType, where: str) -> Job:
    if "job" in vars(module):
        return _resolve_job(vars(module)["job"], f"{where}: job")
    jobs = _list_module_jobs(module)
    if not jobs:
        raise Refused(f"{where} holds no Job; write `job = paragrad.Job(...)` at its top level")
    if len(jobs) > 1:
        raise Refused(
            f"{where} holds {len(jobs)} jobs ({', '.join(jobs)}); name one of them: "
            f"{where}:{next(iter(jobs))}"
        )
    return next(iter(jobs.values()))


def _resolve_job(found: Any, where: str) -> Job:
    job = _call_user_code(where, found) if callable(found) and not isinstance(found, Job) else found
    if not isinstance(job, Job):
        raise Refused(f"{where} is a {type(job).__name__}, not a Job; make it a paragrad.Job(...)")
    return job


def _call_user_code(where: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{where} raised {describe_error(error)}") from error


def _parse_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def build_requested_job(name: str, settings: list[str], **changes: Any) -> Job:
    """Build the job of a command.

    Args:
        name: The job as typed.
        settings: The texts NAME=VALUE of --set, for a built-in job.
        **changes: Fields of the job that options change; None leaves a field as it is.

    Returns:
        The job.

    Raises:
        Refused: There is no such job, or a value is wrong.
    """
    pairs = [setting.partition("=") for setting in settings]
    for setting_name, sign, _ in pairs:
        if not sign:
            raise Refused(f"--set {setting_name}: write --set name=value")
    batch = changes.get("batch")
    if isinstance(batch, str) and batch != "fit":
        try:
            changes["batch"] = int(batch)
        except ValueError:
            raise Refused(
                f"--batch {batch}: give a whole number, or fit with --memory 2GB"
            ) from None
    given_changes: dict[str, Any] = {
        what: value for what, value in changes.items() if value is not None
    }
    return find_job(name, {setting_name: value for setting_name, _, value in pairs}).replace(
        **given_changes
    )
