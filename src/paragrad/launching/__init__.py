"""Start, watch and reap the ranks of this host."""

from paragrad.launching.ranks import Ranks

__all__ = ["Ranks"]
