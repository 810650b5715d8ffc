"""The IDX format of MNIST and its relatives: a header that says type and shape, then the
elements, big-endian.
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

# the header's third byte: name, as it lies in the file, as it lies in memory
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
    """The tensor in an IDX file, plain or gzip. Raises Refused where header and contents are
    not what they should be.
    """
    raw = read_unpacked(path)
    if len(raw) < 4 or raw[:2] != b"\0\0":
        begins = f"begins with {raw[:4].hex(' ')}" if raw else "is empty"
        raise Refused(
            f"{path} is no IDX file: it {begins}, and an IDX file with 00 00, type and dimensions; "
            f"{COPY_HINT}"
        )
    if raw[2] not in ELEMENT_TYPES:
        known = ", ".join(f"{code:02x} {element[0]}" for code, element in ELEMENT_TYPES.items())
        raise Refused(f"{path}: there is no IDX element type {raw[2]:02x} ({known}); {COPY_HINT}")
    name, stored, wanted = ELEMENT_TYPES[raw[2]]
    shape = _read_idx_shape(path, raw)
    begin = 4 + 4 * len(shape)
    expected = begin + math.prod(shape) * numpy.dtype(stored).itemsize
    if len(raw) != expected:
        wrong = "is cut off" if len(raw) < expected else "is too long"
        raise Refused(
            f"{path} {wrong}: a header and {_format_shape(shape)} elements of type {name} are "
            f"{expected} "
            f"bytes, "
            f"and it holds {len(raw)}; {COPY_HINT}"
        )
    return torch.from_numpy(
        numpy.frombuffer(raw, stored, offset=begin).astype(wanted).reshape(shape)
    )


def read_labelled_images(images: Path, labels: Path, classes: int = 10) -> tuple[Tensor, Tensor]:
    """(images [n, height, width] of uint8, labels [n] of int64), checked against each other.
    Raises Refused.
    """
    pixels = read_idx(images)
    numbers = read_idx(labels)
    for path, tensor, what, dims in ((images, pixels, "images", 3), (labels, numbers, "labels", 1)):
        if tensor.dim() != dims:
            hint = (
                "are images and labels swapped?"
                if {pixels.dim(), numbers.dim()} == {1, 3}
                else "give the right file"
            )
            raise Refused(
                f"{path} has {tensor.dim()} dimension(s), {_format_shape(tensor.shape)}, and "
                f"{what} have "
                f"{dims}; {hint}"
            )
        if tensor.dtype != torch.uint8:
            raise Refused(
                f"{path} holds elements of {tensor.dtype}, and {what} are of type ubyte; give the "
                f"right file"
            )
    if len(pixels) != len(numbers):
        raise Refused(
            f"{images} holds {len(pixels)} images and {labels} {len(numbers)} labels; give two "
            f"files of one set"
        )
    if (numbers >= classes).any():
        first = int((numbers >= classes).nonzero()[0])
        raise Refused(
            f"{labels}: label {first} is {int(numbers[first])}, and the {classes} classes are "
            f"numbered from 0 to "
            f"{classes - 1}; give labels of {classes} classes"
        )
    return pixels, numbers.long()


def _read_idx_shape(path: Path, raw: bytes) -> tuple[int, ...]:
    dims = raw[3]
    if not 1 <= dims <= 8:
        raise Refused(
            f"{path}: its header says {dims} dimensions, and 1 to 8 are understood; {COPY_HINT}"
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
    return " x ".join(map(str, shape))
