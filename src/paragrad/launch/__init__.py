"""Start, watch and reap the ranks of this host."""

from paragrad.launch.launcher import Ranks

__all__ = ["Ranks"]
