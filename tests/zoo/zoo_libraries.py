"""Import other libraries, only where a model is built: in the launcher and in every rank."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

GROUP = ("transformers", "timm", "torchvision", "schedulefree", "lion_pytorch", "pytorch_optimizer")
# an operator exists as long as the Library that declared it
_declared: list[torch.library.Library] = []


def find_missing(*names: str) -> list[str]:
    """Return those of these libraries that are not installed here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def foreign(name: str) -> Any:
    """Return a module of a library, such as "timm.models.vision_transformer".

    If torchvision is installed, all of these libraries import it.
    """
    declare_operators()
    module = importlib.import_module(name)
    if name.split(".")[0] == "transformers":
        _silence(importlib.import_module("transformers.utils.logging"))
    return module


def declare_operators() -> None:
    """Declare the operators to which torchvision adds a fake kernel when it is imported.

    They are in the compiled part of torchvision, which does not load with another build of torch,
    such as that for the CPU. The import then fails with "operator torchvision::nms does not
    exist". No model here calls these operators.
    """
    spec = importlib.util.find_spec("torchvision")
    if (
        _declared
        or spec is None
        or spec.origin is None
        or _load_compiled_half(Path(spec.origin).parent)
        or hasattr(torch.ops.torchvision, "nms")
    ):  # this process has declared it elsewhere
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def _load_compiled_half(folder: Path) -> bool:
    try:
        for path in folder.glob("_C*.so"):
            torch.ops.load_library(path)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")


def _silence(logging: ModuleType) -> None:
    """Silence the notes of transformers about token ids beyond the small vocabularies here.

    The library writes them to standard error, not as warnings.
    """
    logging.set_verbosity_error()
