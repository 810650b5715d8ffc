"""paragrad: train one plain PyTorch model on many workers in any known way, and verify the result.

The training is checked to be the same as serial training. Importing paragrad is cheap: the module
of a public name is imported when the name is first used. The command can therefore start the server
of its ranks before it imports torch.
"""

import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    from paragrad import optim
    from paragrad.commands.compare import compare
    from paragrad.commands.hook import hook
    from paragrad.commands.parallelize import parallelize
    from paragrad.commands.train import train
    from paragrad.commands.verify import verify
    from paragrad.datasets.loading import WholeBatch
    from paragrad.datasets.stream import Stream
    from paragrad.engine.exchange import Exchange
    from paragrad.engine.layout import ShardSpec
    from paragrad.engine.model_shard import ModelShard
    from paragrad.engine.passes import LossSums, Passes
    from paragrad.errors import RankFailed, Refused, StepFailed
    from paragrad.jobs.callback import Callback, EarlyStopping, EpochReport, RunStart, StepReport
    from paragrad.jobs.find_job import job
    from paragrad.jobs.job import Job, accuracy
    from paragrad.notation.choices import Decimal, Flag, Integer, Word, option
    from paragrad.parallel.compression.codec import Codec
    from paragrad.report.certificate import Certificate
    from paragrad.report.comparison_table import Table
    from paragrad.report.run import Run
    from paragrad.runtime.mesh import Axis
    from paragrad.schedules.actions import Recv, Send
    from paragrad.schedules.butterfly import Butterfly
    from paragrad.schedules.direct import Direct
    from paragrad.schedules.double_tree import DoubleTree
    from paragrad.schedules.halving import Halving
    from paragrad.schedules.pipeline import (
        Gpipe,
        Interleaved,
        OneFOneB,
        PipelineSchedule,
        ZeroBubble,
    )
    from paragrad.schedules.ring import Ring, RingAsync
    from paragrad.schedules.star import Star
    from paragrad.schedules.tree import Tree
    from paragrad.schedules.two_level import TwoLevel
    from paragrad.strategies.compressors import (
        Bf16,
        Compressor,
        Dgc,
        Fp16,
        Int8,
        OneBit,
        PowerSgd,
        Threshold,
        TopK,
    )
    from paragrad.strategies.data import Data, Native
    from paragrad.strategies.federated import Dirichlet, Even, Federated
    from paragrad.strategies.local import Elastic, Local, Mean, Nesterov
    from paragrad.strategies.pipeline import Pipeline, Place
    from paragrad.strategies.registry import AllReduce, Strategy, strategy
    from paragrad.strategies.serial import Serial
    from paragrad.strategies.server import Asp, Bsp, Server, Ssp
    from paragrad.strategies.strategy import Guarantees
    from paragrad.strategies.tensor import Tensor
    from paragrad.version import __version__ as __version__

__all__ = [
    "AllReduce",
    "Asp",
    "Axis",
    "Bf16",
    "Bsp",
    "Butterfly",
    "Callback",
    "Certificate",
    "Codec",
    "Compressor",
    "Data",
    "Decimal",
    "Dgc",
    "Direct",
    "Dirichlet",
    "DoubleTree",
    "EarlyStopping",
    "Elastic",
    "EpochReport",
    "Even",
    "Exchange",
    "Federated",
    "Flag",
    "Fp16",
    "Gpipe",
    "Guarantees",
    "Halving",
    "Int8",
    "Integer",
    "Interleaved",
    "Job",
    "Local",
    "LossSums",
    "Mean",
    "ModelShard",
    "Native",
    "Nesterov",
    "OneBit",
    "OneFOneB",
    "Passes",
    "Pipeline",
    "PipelineSchedule",
    "Place",
    "PowerSgd",
    "RankFailed",
    "Recv",
    "Refused",
    "Ring",
    "RingAsync",
    "Run",
    "RunStart",
    "Send",
    "Serial",
    "Server",
    "ShardSpec",
    "Ssp",
    "Star",
    "StepFailed",
    "StepReport",
    "Strategy",
    "Stream",
    "Table",
    "Tensor",
    "Threshold",
    "TopK",
    "Tree",
    "TwoLevel",
    "WholeBatch",
    "Word",
    "ZeroBubble",
    "accuracy",
    "compare",
    "hook",
    "job",
    "optim",
    "option",
    "parallelize",
    "strategy",
    "train",
    "verify",
]

# the module of each public name; tests/test_structure.py compares the table with the imports above.
# AllReduce and Strategy come from the module that imports all built-in ones: no user's class can
# take a name first
_HOMES = {
    name: home
    for home, names in {
        "datasets.loading": "WholeBatch",
        "datasets.stream": "Stream",
        "errors": "RankFailed Refused StepFailed",
        "jobs.callback": "Callback EarlyStopping EpochReport RunStart StepReport",
        "jobs.find_job": "job",
        "jobs.job": "Job accuracy",
        "notation.choices": "Decimal Flag Integer Word option",
        "report.certificate": "Certificate",
        "report.run": "Run",
        "report.comparison_table": "Table",
        "schedules.actions": "Recv Send",
        "schedules.butterfly": "Butterfly",
        "schedules.direct": "Direct",
        "schedules.double_tree": "DoubleTree",
        "schedules.halving": "Halving",
        "schedules.pipeline": "Gpipe Interleaved OneFOneB PipelineSchedule ZeroBubble",
        "schedules.ring": "Ring RingAsync",
        "schedules.star": "Star",
        "schedules.tree": "Tree",
        "schedules.two_level": "TwoLevel",
        "strategies.compressors": "Bf16 Compressor Dgc Fp16 Int8 OneBit PowerSgd Threshold TopK",
        "strategies.data": "Data Native",
        "strategies.federated": "Dirichlet Even Federated",
        "strategies.local": "Elastic Local Mean Nesterov",
        "strategies.pipeline": "Pipeline Place",
        "strategies.serial": "Serial",
        "strategies.server": "Asp Bsp Server Ssp",
        "strategies.strategy": "Guarantees",
        "strategies.registry": "AllReduce Strategy strategy",
        "strategies.tensor": "Tensor",
        "parallel.compression.codec": "Codec",
        "engine.model_shard": "ModelShard",
        "engine.exchange": "Exchange",
        "engine.layout": "ShardSpec",
        "engine.passes": "Passes LossSums",
        "commands.compare": "compare",
        "commands.hook": "hook",
        "commands.parallelize": "parallelize",
        "commands.train": "train",
        "commands.verify": "verify",
        "version": "__version__",
        "runtime.mesh": "Axis",
    }.items()
    for name in names.split()
}

_MODULES = {"optim"}  # public modules: what they hold has names of its own
_RENAMED = {
    "Held": "ShardSpec",
    "Promise": "Guarantees",
    "Share": "ModelShard",
    "Sums": "LossSums",
    "large_batch": "optim",
}  # old public names, and what they are called now


def __getattr__(name: str) -> typing.Any:
    if name in _RENAMED:
        message = f"paragrad.{name} is now called paragrad.{_RENAMED[name]}"
        # `from paragrad import NAME` asks from this module of Python's import. It drops the message
        # of an AttributeError, and passes on that of an ImportError.
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(message, name=__name__)
        raise AttributeError(message)
    if name in _MODULES:
        return importlib.import_module(f"paragrad.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'paragrad' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"paragrad.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
