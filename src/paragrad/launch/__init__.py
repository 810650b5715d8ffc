"""Start, watch and reap the ranks of this host."""

from paragrad.launch.launcher import Launcher

__all__ = ["Launcher"]
