"""The launcher: start the ranks of this host, watch them, and end them."""

from paragrad.launch.launcher import Launcher

__all__ = ["Launcher"]
