"""Start, watch and reap the ranks of this host."""

from paragrad.world.launching.ranks import Ranks

__all__ = ["Ranks"]
