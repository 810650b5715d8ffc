"""Reads the IDX format of MNIST and related data sets.

A header gives the element type and the shape. The elements follow in big-endian order.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy
import torch
from torch import Tensor

from paragrad.datasets.dataset_files import read_unpacked
from paragrad.errors import Refused

# the third byte of the header: (name, type in the file, type in memory)
ELEMENT_TYPES = {
    0x08: ("ubyte", ">u1", numpy.uint8),
    0x09: ("byte", ">i1", numpy.int8),
    0x0B: ("short", ">i2", numpy.int16),
    0x0C: ("int", ">i4", numpy.int32),
    0x0D: ("float", ">f4", numpy.float32),
    0x0E: ("double", ">f8", numpy.float64),
}

COPY_HINT = "copy or download it again"


def read_idx(path: Path) -> Tensor:
    """Read the tensor in an IDX file, plain or gzip.

    Args:
        path: The file.

    Returns:
        The tensor, with the element type and the shape of the header.

    Raises:
        Refused: The file cannot be read, or header and contents do not agree.
    """
    raw = read_unpacked(path)
    if len(raw) < 4 or raw[:2] != b"\0\0":
        start = f"begins with {raw[:4].hex(' ')}" if raw else "is empty"
        raise Refused(
            f"{path} is no IDX file: it {start}, and an IDX file begins with 00 00, type and "
            f"dimensions; {COPY_HINT}"
        )
    if raw[2] not in ELEMENT_TYPES:
        known = ", ".join(f"{code:02x} {element[0]}" for code, element in ELEMENT_TYPES.items())
        raise Refused(f"{path}: there is no IDX element type {raw[2]:02x} ({known}); {COPY_HINT}")
    name, file_type, memory_type = ELEMENT_TYPES[raw[2]]
    shape = _read_idx_shape(path, raw)
    offset = 4 + 4 * len(shape)
    expected = offset + math.prod(shape) * numpy.dtype(file_type).itemsize
    if len(raw) != expected:
        problem = "is cut off" if len(raw) < expected else "is too long"
        raise Refused(
            f"{path} {problem}: a header and {_format_shape(shape)} elements of type {name} are "
            f"{expected} bytes, and it holds {len(raw)}; {COPY_HINT}"
        )
    return torch.from_numpy(
        numpy.frombuffer(raw, file_type, offset=offset).astype(memory_type).reshape(shape)
    )


def read_labelled_images(images: Path, labels: Path, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Read images and their labels, and check that they belong together.

    Args:
        images: The IDX file of the images.
        labels: The IDX file of the labels.
        classes: The number of classes; labels are numbered from 0.

    Returns:
        Images [n, height, width] of uint8, and labels [n] of int64.

    Raises:
        Refused: A file has the wrong shape or type, or the two do not agree.
    """
    pixels = read_idx(images)
    numbers = read_idx(labels)
    for path, tensor, kind, dims in (
        (images, pixels, "images", 3),
        (labels, numbers, "labels", 1),
    ):
        if tensor.dim() != dims:
            hint = (
                "are images and labels swapped?"
                if {pixels.dim(), numbers.dim()} == {1, 3}
                else "give the right file"
            )
            raise Refused(
                f"{path} has {tensor.dim()} dimension(s), {_format_shape(tensor.shape)}, and "
                f"{kind} have {dims}; {hint}"
            )
        if tensor.dtype != torch.uint8:
            raise Refused(
                f"{path} holds elements of {tensor.dtype}, and {kind} are of type ubyte; give the "
                "right file"
            )
    if len(pixels) != len(numbers):
        raise Refused(
            f"{images} holds {len(pixels)} images and {labels} {len(numbers)} labels; give two "
            "files of one set"
        )
    if (numbers >= classes).any():
        first = int((numbers >= classes).nonzero()[0])
        raise Refused(
            f"{labels}: label {first} is {int(numbers[first])}, and the {classes} classes are "
            f"numbered from 0 to {classes - 1}; give labels of {classes} classes"
        )
    return pixels, numbers.long()


def _read_idx_shape(path: Path, raw: bytes) -> tuple[int, ...]:
    """The shape that the header of an IDX file gives."""
    dims = raw[3]
    if not 1 <= dims <= 8:
        raise Refused(
            f"{path}: its header says {dims} dimensions, and 1 to 8 are allowed; {COPY_HINT}"
        )
    if len(raw) < 4 + 4 * dims:
        raise Refused(
            f"{path} is cut off within the lengths of its {dims} dimension(s); {COPY_HINT}"
        )
    shape: tuple[int, ...] = struct.unpack_from(f">{dims}I", raw, 4)
    if 0 in shape:
        raise Refused(f"{path} holds nothing: its header says {_format_shape(shape)}; {COPY_HINT}")
    return shape


def _format_shape(shape: tuple[int, ...]) -> str:
    """A shape as text, such as `28 x 28`."""
    return " x ".join(map(str, shape))
