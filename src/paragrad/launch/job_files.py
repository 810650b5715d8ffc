"""Job files: Python files that the launcher and the ranks run, each as a module of its own name.

The launcher reads a file once. A task that refers to the file carries the text that was read, so an
edit in between causes no mixture. A rank runs the file before it unpickles the task, as an import
would. Registrations and other effects of the top level are therefore there too.

The top level draws the same values from torch, numpy and random on all ranks, and only the launcher
shows what it prints. Functions of such a module find its globals, also functions without a name in
the module (lambdas).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from paragrad.errors import Refused

# globals of these types are sent again if they changed after the load
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class JobFile:
    """A module that jobs come from.

    Attributes:
        name: The name of the module.

        path: The path of the file.

        source: The text of the file; None where ranks import the module by its name.

        changed_globals: Plain globals that changed after the top level ran.
    """

    name: str
    path: str = ""
    source: bytes | None = None
    changed_globals: dict[str, Any] = field(default_factory=dict)


known_files: dict[str, JobFile] = {}
running_files: list[str] = []  # files with a top level that is running now
# the plain globals of each module after its top level ran
_initial_globals: dict[str, dict[str, Any]] = {}


def load_job_file(path: Path) -> ModuleType:
    """Run a job file in the launcher.

    Args:
        path: The path of the file.

    Returns:
        The module.
    """
    source = path.read_bytes()
    full_path = str(path.resolve())
    digest = hashlib.sha256(full_path.encode() + source).hexdigest()[:8]
    return _import_job_file(JobFile(f"paragrad_job_{path.stem}_{digest}", full_path, source))


def import_job_module(name: str) -> ModuleType:
    """Import a module by its name, in the launcher now and in the ranks later.

    Args:
        name: The name of the module.

    Returns:
        The module.
    """
    return _import_job_file(JobFile(name))


def pickle_task(task: Any) -> tuple[bytes, tuple[JobFile, ...]]:
    """Pickle a task for the ranks.

    Args:
        task: The task.

    Returns:
        The pickled task, and the job files that a rank must run before it unpickles the task.

    Raises:
        Refused: The task cannot be pickled.
    """
    try:
        pickled_task = _pickle_value(task)
    except Exception as error:
        raise Refused(
            f"{_find_unpicklable(task)} cannot be sent to the ranks ({type(error).__name__}: "
            f"{error}); put the job into a file and a function around it there, such as "
            "loss=lambda output, target: own(output, target); every rank runs the file, so nothing "
            "that its functions name is sent"
        ) from error
    return pickled_task, tuple(
        replace(file, changed_globals=_find_changed_globals(file.name))
        for file in known_files.values()
        if _mentions_module(pickled_task, file.name)
    )


def _mentions_module(call: bytes, module: str) -> bool:
    """Tell whether a pickle names a module or a part of it.

    The name must begin a string, and the string must end there or continue with a dot. The name of
    another module could contain it.
    """
    return (
        re.search(rb"(?:\x8c.|X.{4})" + re.escape(module.encode()) + rb"[\x94.]", call, re.DOTALL)
        is not None
    )


def _pickle_value(value: Any) -> bytes:
    with io.BytesIO() as out:
        JobPickler(out).dump(value)
        return out.getvalue()


def _find_unpicklable(value: Any, name: str = "the task") -> str:
    """Find what in a value cannot be pickled: the name of the innermost field."""
    parts = (
        [(name, each) for each in value]
        if isinstance(value, tuple)
        else [(each.name, getattr(value, each.name)) for each in fields(value)]
        if is_dataclass(value)
        else []
    )
    for part, each in parts:
        try:
            _pickle_value(each)
        except Exception:
            return _find_unpicklable(each, part)
    return name


def run_job_files(files: Sequence[JobFile]) -> None:
    """Run the job files of a task in a rank, unless an earlier task ran them.

    The output is suppressed, because the launcher has shown it already.

    Args:
        files: The job files.
    """
    for file in files:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            module = _import_job_file(file)
        vars(module).update(file.changed_globals)


def _import_job_file(file: JobFile) -> ModuleType:
    known_files[file.name] = file
    if not any(isinstance(finder, _JobFileFinder) for finder in sys.meta_path):
        sys.meta_path.append(_JobFileFinder())
    module = importlib.import_module(file.name)
    _initial_globals.setdefault(file.name, _select_plain_globals(module))
    return module


def _select_plain_globals(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, PLAIN_TYPES) and not name.startswith("__")
    }


def _find_changed_globals(name: str) -> dict[str, Any]:
    initial = _initial_globals[name]
    return {
        name: value
        for name, value in _select_plain_globals(sys.modules[name]).items()
        if name not in initial or initial[name] is not value
    }


class _JobFileFinder(MetaPathFinder, Loader):
    """Finds job files by their module names, and runs the text that the launcher read."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file = known_files.get(name)
        return (
            spec_from_file_location(name, file.path, loader=self)
            if file and file.source is not None
            else None
        )

    def exec_module(self, module: ModuleType) -> None:
        # not at the top: it imports torch, and the command starts its server before torch
        from paragrad.runtime.generators import use_seeded_generators

        file = known_files[module.__name__]
        assert file.source is not None
        folder = str(Path(file.path).parent)
        if folder not in sys.path:
            # as with `python path/file.py`: the file can import modules beside it
            sys.path.insert(0, folder)
        running_files.append(file.path)
        try:
            with use_seeded_generators("job file"):
                exec(compile(file.source, file.path, "exec"), vars(module))
        finally:
            running_files.pop()


class JobPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as cloudpickle does, but functions of job files keep the globals of their file.

    cloudpickle sends functions without a name in a module by value.
    """

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        if (
            isinstance(value, FunctionType)
            and isinstance(reduced, tuple)
            and value.__module__ in known_files
            and (value.__globals__ is vars(sys.modules[value.__module__]))
        ):
            make, (code, _, *arguments), (attributes, slots), *remaining = reduced
            return (
                make,
                (code, _ModuleGlobals(value.__module__), *arguments),
                (attributes, {**slots, "__globals__": {}}),
                *remaining,
            )
        return reduced


@dataclass(frozen=True)
class _ModuleGlobals:
    """Stands for the globals of a module in a pickle."""

    module: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_module_globals, (self.module,)


def _get_module_globals(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))
