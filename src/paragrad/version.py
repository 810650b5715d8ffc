"""Which paragrad this is."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("paragrad")
except PackageNotFoundError:  # from a source tree that is not installed
    __version__ = "0+source"
