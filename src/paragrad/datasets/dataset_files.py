"""Finds the files of a data set: in the given folder, in the cache, or on the network."""

from __future__ import annotations

import gzip
import http.client
import sys
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from paragrad.errors import Refused

SOCKET_TIMEOUT = 20.0  # seconds to wait for the next bytes of a server
MAX_DOWNLOAD_SECONDS = 600.0  # seconds for one file: enough for 11 MB at 20 kB/s


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file as its authors published it.

    A file in a given folder may differ from it, because relatives of MNIST use the same names.

    Attributes:
        url: The address.
        sha256: The digest of the file as published.
    """

    url: str
    sha256: str

    @property
    def packed_name(self) -> str:
        """The name of the file in the cache."""
        return self.url.rpartition("/")[2]

    @property
    def name(self) -> str:
        """The name of the unpacked file."""
        return self.packed_name.removesuffix(".gz")


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"

PUBLISHED_FILES: dict[str, tuple[PublishedFile, ...]] = {
    "mnist": (
        PublishedFile(
            f"{_MNIST}/train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        PublishedFile(
            f"{_MNIST}/train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        PublishedFile(
            f"{_MNIST}/t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        PublishedFile(
            f"{_MNIST}/t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "tinyshakespeare": (
        PublishedFile(
            f"{_SHAKESPEARE}/input.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
}


def locate_files(dataset: str, data: Path | None) -> dict[str, Path]:
    """Find all files of a data set.

    Args:
        dataset: A key of PUBLISHED_FILES.
        data: A folder that holds the files, itself or in a folder named after the data set. None
            means the cache, and the network for files that are not in the cache.

    Returns:
        The paths, by unpacked file name.

    Raises:
        Refused: A file cannot be found or downloaded. The message says which files to put where.
    """
    return (
        {
            original.name: _fetch_cached_file(dataset, original)
            for original in PUBLISHED_FILES[dataset]
        }
        if data is None
        else _find_given_files(dataset, data)
    )


def read_unpacked(path: Path) -> bytes:
    """Read a file and unpack it if it is gzip, whatever its name.

    Args:
        path: The file.

    Returns:
        The unpacked bytes.

    Raises:
        Refused: The file cannot be read, or is damaged.
    """
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    except EOFError as error:
        raise Refused(
            f"{path} is cut off in the middle of its gzip data; copy or download it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise Refused(
            f"{path} holds damaged gzip data ({error}); copy or download it again"
        ) from error
    except OSError as error:
        raise Refused(
            f"{path} cannot be read ({error.strerror}); make it a readable file"
        ) from error


def _find_given_files(dataset: str, data: Path) -> dict[str, Path]:
    """Find the files in a folder: all or none.

    Files from two places are never combined, because they could belong to two data sets.
    """
    if not data.is_dir():
        raise Refused(
            f"there is no data folder {data}; give an existing one with --data, or none for the "
            "cache"
        )
    for folder in (data / dataset, data):
        found = {}
        missing = []
        for original in PUBLISHED_FILES[dataset]:
            unpacked = folder / original.name
            packed = folder / (original.name + ".gz")
            if unpacked.is_file() or packed.is_file():
                found[original.name] = unpacked if unpacked.is_file() else packed
            else:
                missing.append(original.name)
        if found and missing:
            raise Refused(
                f"{folder} lacks {_join_names(missing)} of the data set {dataset}; put all its "
                "files there, each with or without .gz"
            )
        if found:
            return found
    source = PUBLISHED_FILES[dataset][0].url.rpartition("/")[0]
    raise Refused(
        f"{data} holds no file of the data set {dataset}; put "
        f"{_join_names(_list_file_names(dataset))} there, each with or without .gz, or give no "
        f"folder (--data, PARAGRAD_DATA): they are then downloaded once, from {source}"
    )


def _fetch_cached_file(dataset: str, original: PublishedFile) -> Path:
    """Return the file in the cache; download it first if it is missing or is not the original."""
    try:
        import pooch
    except ImportError as error:
        raise _make_unavailable_error(
            dataset, "the cache and the download need pooch: pip install pooch"
        ) from error
    cache = Path(pooch.os_cache("paragrad")) / dataset
    level = pooch.get_logger().level
    pooch.get_logger().setLevel("ERROR")  # `_download_file` prints a line of its own
    try:
        return Path(
            pooch.retrieve(
                original.url,
                original.sha256,
                original.packed_name,
                cache,
                downloader=_download_file,
            )
        )
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # the error keeps the connection open
        reason = shorten(f"{type(error).__name__}: {error}", 160)
        raise _make_unavailable_error(
            dataset,
            f"{original.packed_name} could not be downloaded from {original.url} ({reason})",
        ) from error
    except ValueError as error:  # the digest differed, and pooch deleted the file
        raise _make_unavailable_error(
            dataset,
            f"the file from {original.url} is not the original {original.packed_name}: its sha256 "
            f"is not {original.sha256}, and the file was deleted",
        ) from error
    finally:
        pooch.get_logger().setLevel(level)


def _download_file(url: str, target: str, _: Any) -> None:
    """Write what a URL sends to `target`, unchanged and within a limited time.

    Raises:
        OSError: The connection broke, or took too long.
        HTTPException: The server did not answer properly.
    """
    print(f"downloading {url}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + MAX_DOWNLOAD_SECONDS
    with (
        urllib.request.urlopen(url, timeout=SOCKET_TIMEOUT) as response,
        open(target, "wb") as file,
    ):
        while chunk := response.read1(1 << 16):
            file.write(chunk)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished after {MAX_DOWNLOAD_SECONDS:g} seconds")
        expected_length = response.headers["Content-Length"]
        if expected_length not in (None, str(file.tell())):
            raise ConnectionError(
                f"the connection broke off after {file.tell()} of {expected_length} bytes"
            )


def _make_unavailable_error(dataset: str, why: str) -> Refused:
    return Refused(
        f"data set {dataset}: {why}; or put {_join_names(_list_file_names(dataset))}, each with or "
        "without .gz, into a folder and give it with --data FOLDER"
    )


def _list_file_names(dataset: str) -> list[str]:
    return [original.name for original in PUBLISHED_FILES[dataset]]


def _join_names(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])
