"""paragrad: train one plain PyTorch model on many workers, any way the field knows, and see that it was the same training."""

from paragrad.certificate import Certificate, verify
from paragrad.comparison import compare
from paragrad.data_parallel.hook import hook
from paragrad.errors import RankFailed, Refused
from paragrad.job import Job, accuracy
from paragrad.jobs import job
from paragrad.own_loop import parallelize
from paragrad.results import Table
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.tree import Tree
from paragrad.strategy import Data, Native, Serial, strategy
from paragrad.training import Run, train
from paragrad.version import __version__ as __version__

__all__ = ["Butterfly", "Certificate", "Data", "Job", "Native", "RankFailed", "Refused", "Ring", "RingAsync", "Run", "Serial",
           "Table", "Tree", "accuracy", "compare", "hook", "job", "parallelize", "strategy", "train", "verify"]
