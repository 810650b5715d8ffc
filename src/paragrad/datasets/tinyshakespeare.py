"""The text of Tiny Shakespeare, 40,000 lines of plays, as numbers of characters.

A sample is one speech, or one window of a fixed length.
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

# all 65 characters of the text, in ascending order
CHARACTERS = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase
CHARACTER_NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}
IGNORE_INDEX = -100  # `ignore_index` of cross-entropy: such a target does not count
TRAINING_SHARE = 0.9  # share of the text to train on; the rest is for validation


class Speeches(Dataset):
    """A dataset of speeches: dataset[index] is a 1-D int64 tensor of at least 2 character numbers.

    Each speech is shortened to `length` + 1 characters.
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
    """A dataset of windows of a text that follow one another.

    dataset[index] is a pair of 1-D int64 tensors: `length` characters, and the next character of
    each.
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
    """Load windows of the first 90 % of the text, or of the rest.

    Args:
        data: The data folder, as in `dataset_files.locate_files`.
        train: True for the first 90 %, False for the rest.
        length: The number of characters of a window.

    Returns:
        The dataset.

    Raises:
        Refused: The text cannot be found or downloaded, or is shorter than a window.
    """
    text = _read_text(data)
    boundary = int(TRAINING_SHARE * len(text))
    excerpt = text[:boundary] if train else text[boundary:]
    if len(excerpt) <= length:
        raise Refused(
            f"tinyshakespeare has {len(excerpt)} characters "
            f"{'to train on' if train else 'to test with'}, and a window needs {length + 1}; "
            "give a shorter window"
        )
    return Windows(excerpt, length)


def load_speeches(data: Path | None, train: bool, length: int) -> Speeches:
    """Load the speeches that begin in the first 90 % of the text, or the others.

    Args:
        data: The data folder, as in `dataset_files.locate_files`.
        train: True for the first 90 %, False for the rest.
        length: The number of characters to predict, at most.

    Returns:
        The dataset.

    Raises:
        Refused: The text cannot be found or downloaded.
    """
    text = _read_text(data)
    # a speech is a block of lines without an empty line
    blocks = list(re.finditer(r".+(?:\n.+)*", text))
    return Speeches(
        [block[0] for block in blocks if (block.start() < TRAINING_SHARE * len(text)) == train],
        length,
    )


def pad_speeches(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine speeches of different lengths into one batch.

    After the end of a speech, characters are 0 and targets are -100, which cross-entropy ignores.

    Args:
        samples: Character numbers of each speech.

    Returns:
        Characters [n, t] and the next characters [n, t]; t is the length of the longest speech - 1.
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
    """Decode the text, with bare newlines, and refuse characters that have no number."""
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise Refused(
            f"{path} is no UTF-8 text (byte {error.start}); give the text of tinyshakespeare"
        ) from error
    unknown_places = [text.index(character) for character in set(text) - set(CHARACTERS)]
    if unknown_places:
        first = min(unknown_places)
        line = text.count("\n", 0, first) + 1
        column = first - text.rfind("\n", 0, first)
        raise Refused(
            f"{path}, line {line}, column {column}: {text[first]!r} is none of the "
            f"{len(CHARACTERS)} characters of tinyshakespeare; take it out, or give the original"
        )
    return text
