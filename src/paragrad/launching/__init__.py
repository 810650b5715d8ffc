"""Start, watch and reap the ranks of this host."""

from paragrad.launching.ranks import Ranks, cores

__all__ = ["Ranks", "cores"]
