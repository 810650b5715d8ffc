"""paragrad: train one plain PyTorch model on many workers, any way the field knows, and see that it was the same training.

Importing it is cheap: what a public name needs is imported when the name is first used, so that the command can start the
server of its ranks before it imports torch itself.
"""

import importlib
import sys
import types
import typing

if typing.TYPE_CHECKING:
    from paragrad.certificate import Certificate, verify
    from paragrad.comparison import compare
    from paragrad.data_parallel.hook import hook
    from paragrad.datasets.loading import WholeBatch
    from paragrad.errors import RankFailed, Refused
    from paragrad.job import Job, accuracy
    from paragrad.jobs import job
    from paragrad.own_loop import parallelize
    from paragrad.results import Table
    from paragrad.schedules.butterfly import Butterfly
    from paragrad.schedules.direct import Direct
    from paragrad.schedules.double_tree import DoubleTree
    from paragrad.schedules.halving import Halving
    from paragrad.schedules.ring import Ring, RingAsync
    from paragrad.schedules.star import Star
    from paragrad.schedules.tree import Tree
    from paragrad.schedules.two_level import TwoLevel
    from paragrad.strategy import Data, Native, Serial, strategy
    from paragrad.training import Run, train
    from paragrad.version import __version__ as __version__

__all__ = ["Butterfly", "Certificate", "Data", "Direct", "DoubleTree", "Halving", "Job", "Native", "RankFailed", "Refused",
           "Ring", "RingAsync", "Run", "Serial", "Star", "Table", "Tree", "TwoLevel", "WholeBatch", "accuracy", "compare",
           "hook", "job", "parallelize", "strategy", "train", "verify"]

# where each public name is; tests/test_structure.py compares it with what type checkers are told above
_HOMES = {name: home for home, names in {
    "certificate": "Certificate verify", "comparison": "compare", "data_parallel.hook": "hook",
    "datasets.loading": "WholeBatch", "errors": "RankFailed Refused",
    "job": "Job accuracy", "jobs": "job", "own_loop": "parallelize", "results": "Table", "schedules.butterfly": "Butterfly",
    "schedules.direct": "Direct", "schedules.double_tree": "DoubleTree", "schedules.halving": "Halving",
    "schedules.ring": "Ring RingAsync", "schedules.star": "Star", "schedules.tree": "Tree", "schedules.two_level": "TwoLevel",
    "strategy": "Data Native Serial strategy", "training": "Run train",
    "version": "__version__"}.items() for name in names.split()}


class _Package(types.ModuleType):
    """This module. `job` and `strategy` are functions here and modules inside: the functions win, whatever comes first."""

    def __getattr__(self, name: str) -> typing.Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'paragrad' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"paragrad.{_HOMES[name]}"), name)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: typing.Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):      # as an import sets a module in its package
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return importlib.import_module, (__name__,)     # a job file's functions go to the ranks with the `pg` they use

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *__all__})


sys.modules[__name__].__class__ = _Package
