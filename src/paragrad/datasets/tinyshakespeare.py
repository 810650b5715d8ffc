"""Tiny Shakespeare as numbers of characters, 40,000 lines of plays: one speech a sample, or
windows of one length.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paragrad.datasets.dataset_files import locate_files, read_unpacked
from paragrad.errors import Refused

# all 65 of the text, in order
CHARACTERS = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase
CHARACTER_NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}
IGNORE_INDEX = -100  # cross-entropy's ignore_index: a target that does not count
TRAINING_SHARE = 0.9  # of the text; the rest is for validation


class Speeches(Dataset):
    """dataset[index] -> a speech cut at `length` + 1 characters: a 1-D int64 tensor of at least
    2 numbers of characters.
    """

    def __init__(self, speeches: Sequence[str], length: int) -> None:
        self.samples = [
            torch.tensor([CHARACTER_NUMBERS[character] for character in speech[: length + 1]])
            for speech in speeches
            if len(speech) >= 2
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


class Windows(Dataset):
    """dataset[index] -> (`length` characters of a text, the next ones): two 1-D int64 tensors.
    Windows follow one another.
    """

    def __init__(self, text: str, length: int) -> None:
        self.characters = torch.tensor([CHARACTER_NUMBERS[character] for character in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.characters) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = range(len(self))[index] * self.length
        return self.characters[start : start + self.length], self.characters[
            start + 1 : start + 1 + self.length
        ]


def load_windows(data: Path | None, train: bool, length: int) -> Windows:
    """Those of the first 90 % of the text, or of the rest. data: see files.located. Raises
    Refused.
    """
    text = _read_text(data)
    cut = int(TRAINING_SHARE * len(text))
    part = text[:cut] if train else text[cut:]
    if len(part) <= length:
        raise Refused(
            f"tinyshakespeare has {len(part)} characters "
            f"{'to train on' if train else 'to test with'}, and a window "
            f"is {length} and the next; give a shorter one"
        )
    return Windows(part, length)


def load_speeches(data: Path | None, train: bool, length: int) -> Speeches:
    """The speeches that begin in the first 90 % of the text, or the others. data: see
    files.located. Raises Refused.
    """
    text = _read_text(data)
    # lines with no empty one between them
    blocks = list(re.finditer(r".+(?:\n.+)*", text))
    return Speeches(
        [block[0] for block in blocks if (block.start() < TRAINING_SHARE * len(text)) == train],
        length,
    )


def pad_speeches(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Samples of different lengths as one batch: (characters [n, t], the next ones [n, t]), t
    the longest's length - 1.

    Where a sample has ended, its characters are 0 and its targets -100, which no cross-entropy
    counts.
    """
    longest = max(map(len, samples))
    characters = torch.zeros(len(samples), longest, dtype=torch.int64)
    targets = torch.full((len(samples), longest - 1), IGNORE_INDEX)
    for row, sample in enumerate(samples):
        characters[row, : len(sample)] = sample
        targets[row, : len(sample) - 1] = sample[1:]
    return characters[:, :-1], targets


def _read_text(data: Path | None) -> str:
    path = locate_files("tinyshakespeare", data)["input.txt"]
    return _decode_text(path, read_unpacked(path))


def _decode_text(path: Path, raw: bytes) -> str:
    """The text, lines ending in a bare newline, without any character that has no number."""
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise Refused(
            f"{path} is no UTF-8 text (byte {error.start}); give the text of tinyshakespeare"
        ) from error
    strange = [text.index(character) for character in set(text) - set(CHARACTERS)]
    if strange:
        first = min(strange)
        line = text.count("\n", 0, first) + 1
        column = first - text.rfind("\n", 0, first)
        raise Refused(
            f"{path}, line {line}, column {column}: {text[first]!r} is none of the "
            f"{len(CHARACTERS)} characters of "
            "tinyshakespeare; take it out, or give the original"
        )
    return text
