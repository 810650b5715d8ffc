"""paragrad: train one plain PyTorch model on many workers, any way the field knows, and see that it was the same training."""

from paragrad.comparison import Table, compare
from paragrad.errors import RankFailed, Refused
from paragrad.job import Job, accuracy
from paragrad.jobs import job
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.tree import Tree
from paragrad.strategy import Data, Native, Serial, strategy
from paragrad.training import Run, train

__all__ = ["Butterfly", "Data", "Job", "Native", "RankFailed", "Refused", "Ring", "RingAsync", "Run", "Serial", "Table",
           "Tree", "accuracy", "compare", "job", "strategy", "train"]
