"""Job files: Python files that launcher and ranks run alike, each as a module of a name of its
own.

The launcher reads a file once, and what it read goes to the ranks with every task that names
something of it: an edit in between mixes nothing. There it is run before the task is unpickled,
as an import does, so registrations and other effects of its top level are there too. What a top
level draws from torch, numpy and random is the same everywhere; what it prints is shown by the
launcher alone. Functions of such a module find its globals, whether it holds them by a name or
not (lambdas).
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

# globals that are sent again where they changed after the load
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class JobFile:
    """A module that jobs come from. source: what was read of its file; None where ranks import
    it by its name.
    """

    name: str
    path: str = ""
    source: bytes | None = None
    # plain globals that are no longer what the top level made them
    changed_globals: dict[str, Any] = field(default_factory=dict)


known_files: dict[str, JobFile] = {}
running_files: list[str] = []  # files whose top level runs at this moment
# the plain globals of each when its top level had run
_initial_globals: dict[str, dict[str, Any]] = {}


def load_job_file(path: Path) -> ModuleType:
    """Run a file in the launcher."""
    source = path.read_bytes()
    place = str(path.resolve())
    digest = hashlib.sha256(place.encode() + source).hexdigest()[:8]
    return _import_job_file(JobFile(f"paragrad_job_{path.stem}_{digest}", place, source))


def import_job_module(name: str) -> ModuleType:
    """Import a module by its name; ranks will do so too."""
    return _import_job_file(JobFile(name))


def pickle_task(task: Any) -> tuple[bytes, tuple[JobFile, ...]]:
    """A task pickled, and the files that a rank must have run to unpickle it. Raises Refused
    where it cannot be pickled.
    """
    try:
        call = _pickle_value(task)
    except Exception as error:
        raise Refused(
            f"{_find_unpicklable(task)} cannot be sent to the ranks ({type(error).__name__}: "
            f"{error}); put "
            f"the job into a file "
            "and a function around it there, such as loss=lambda output, target: own(output, "
            "target), for what "
            "functions of a job file name is not sent: every rank runs the file"
        ) from error
    return call, tuple(
        replace(file, changed_globals=_find_changed_globals(file.name))
        for file in known_files.values()
        if _mentions_module(call, file.name)
    )


def _mentions_module(call: bytes, module: str) -> bool:
    """Does a pickle name a module, or one inside of it? As a string that begins so, and ends
    there or goes on with a dot: another's name may have it within.
    """
    return (
        re.search(rb"(?:\x8c.|X.{4})" + re.escape(module.encode()) + rb"[\x94.]", call, re.DOTALL)
        is not None
    )


def _pickle_value(value: Any) -> bytes:
    with io.BytesIO() as out:
        JobPickler(out).dump(value)
        return out.getvalue()


def _find_unpicklable(value: Any, name: str = "what they are to do") -> str:
    """What of a value cannot be pickled: the innermost field by its name."""
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
    """In a rank: run the files of a task, unless they were run for an earlier one; silent, for
    the launcher was not.
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
    made = _initial_globals[name]
    return {
        name: value
        for name, value in _select_plain_globals(sys.modules[name]).items()
        if name not in made or made[name] is not value
    }


class _JobFileFinder(MetaPathFinder, Loader):
    """Finds job files by the names they have as modules, and runs what was read of them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file = known_files.get(name)
        return (
            spec_from_file_location(name, file.path, loader=self)
            if file and file.source is not None
            else None
        )

    def exec_module(self, module: ModuleType) -> None:
        # imports torch; the command starts its server before
        from paragrad.runtime.generators import use_seeded_generators

        file = known_files[module.__name__]
        assert file.source is not None
        folder = str(Path(file.path).parent)
        if folder not in sys.path:
            # as `python path/file.py` has it: its neighbours can be imported
            sys.path.insert(0, folder)
        running_files.append(file.path)
        try:
            with use_seeded_generators("job file"):
                exec(compile(file.source, file.path, "exec"), vars(module))
        finally:
            running_files.pop()


class JobPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """As cloudpickle, which sends functions without a name in a module by value; those of job
    files keep the file's globals.
    """

    def reducer_override(self, value: Any) -> Any:
        found = super().reducer_override(value)
        if (
            isinstance(value, FunctionType)
            and isinstance(found, tuple)
            and value.__module__ in known_files
            and (value.__globals__ is vars(sys.modules[value.__module__]))
        ):
            make, (code, _, *more), (attributes, slots), *rest = found
            return (
                make,
                (code, _ModuleGlobals(value.__module__), *more),
                (attributes, {**slots, "__globals__": {}}),
                *rest,
            )
        return found


@dataclass(frozen=True)
class _ModuleGlobals:
    """Stands for the globals of a module, wherever it is unpickled."""

    module: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_module_globals, (self.module,)


def _get_module_globals(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))
