"""TensorBoard event files of a run, in addition to its record (the extra `tensorboard`)."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from paragrad.errors import Refused


def check_tensorboard() -> None:
    """Refuse event files if the package tensorboard is missing.

    Raises:
        Refused: It is missing.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise Refused(
            "event files need the package tensorboard; pip install 'paragrad[tensorboard]'"
        )


@contextlib.contextmanager
def open_event_files(folder: Path | None) -> Iterator[Callable[..., None]]:
    """Open event files, and return a function show(step, **values) that appends scalars.

    Args:
        folder: The folder of the run; files are in folder/tensorboard. Without a folder, nothing is
            written.

    Yields:
        The function.
    """
    if folder is None:
        yield lambda step, **values: None
        return
    # imported here, because it is an extra and takes a second to import
    from torch.utils.tensorboard import SummaryWriter

    def show(step: int, **values: float) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        yield show
