"""TensorBoard event files of a run, beside its record (the extra `tensorboard`)."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from paragrad.errors import Refused


def check_tensorboard() -> None:
    """Refused where the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise Refused(
            "event files want the package tensorboard; pip install 'paragrad[tensorboard]'"
        )


@contextlib.contextmanager
def open_event_files(folder: Path | None) -> Iterator[Callable[..., None]]:
    """show(step, **values): append scalars to event files in folder/tensorboard; without a
    folder, to nothing.
    """
    if folder is None:
        yield lambda step, **values: None
        return
    # here: it is an extra, and takes a second to import
    from torch.utils.tensorboard import SummaryWriter

    def show(step: int, **values: float) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        yield show
