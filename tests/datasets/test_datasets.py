"""Data files, the datasets that read them, and the jobs that train on these datasets.

A data file is found, downloaded or refused.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import http.server
import os
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cloudpickle
import numpy
import pooch
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from paragrad.datasets import dataset_files
from paragrad.datasets.dataset_files import (
    PUBLISHED_FILES,
    PublishedFile,
    locate_files,
    read_unpacked,
)
from paragrad.datasets.idx import read_idx, read_labelled_images
from paragrad.datasets.loading import Samples
from paragrad.datasets.mnist import MEAN, STANDARD_DEVIATION, load_mnist
from paragrad.datasets.tinyshakespeare import (
    CHARACTER_NUMBERS,
    CHARACTERS,
    Speeches,
    load_speeches,
    load_windows,
    pad_speeches,
)
from paragrad.errors import Refused
from paragrad.jobs import find_job
from paragrad.jobs.digits import inception_digits
from paragrad.jobs.job import Job, accuracy
from paragrad.jobs.loss import LossModule
from paragrad.jobs.mnist import mnist_cnn, mnist_mlp, mnist_resnet
from paragrad.jobs.shakespeare import shakespeare_gpt, shakespeare_lstm
from paragrad.validation.inspect_job import inspect_job

pytestmark = pytest.mark.processes

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
PLAY = (
    "\n\n".join(
        f"FIRST CITIZEN:\nWe are accounted poor, {word}."
        for word in ("good", "bad", "mad", "sad") * 5
    )
    + "\n"
)


def encode_idx(array: numpy.ndarray) -> bytes:
    """Return an array as the bytes of an IDX file."""
    header = bytes([0, 0, CODES[array.dtype.str[1:]], array.ndim]) + struct.pack(
        f">{array.ndim}I", *array.shape
    )
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def make_pixels(count: int, size: int = 28) -> numpy.ndarray:
    return (
        (numpy.arange(count * size * size) * 7 % 256).astype(numpy.uint8).reshape(count, size, size)
    )


def make_labels(count: int) -> numpy.ndarray:
    return (numpy.arange(count) % 10).astype(numpy.uint8)


SMALL = {
    "train-images-idx3-ubyte": encode_idx(make_pixels(20)),
    "train-labels-idx1-ubyte": encode_idx(make_labels(20)),
    "t10k-images-idx3-ubyte": encode_idx(make_pixels(7)),
    "t10k-labels-idx1-ubyte": encode_idx(make_labels(7)),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Fill a folder with a small MNIST and a small play, and return it."""
    for name, body in SMALL.items():
        (tmp_path / name).write_bytes(body)
    (tmp_path / "input.txt").write_text(PLAY)
    return tmp_path


@pytest.fixture
def data() -> Path:
    """Return the folder of the real data sets; skip the test if there is none."""
    if not os.environ.get("PARAGRAD_DATA"):
        pytest.skip("PARAGRAD_DATA does not name a folder with mnist and tinyshakespeare")
    return Path(os.environ["PARAGRAD_DATA"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache and no proxy; return the folder of the data set `small` in it."""
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "cache" / "paragrad" / "small"


# ---- a server on this host -------------------------------------------------------------------
class Server:
    """An HTTP server that sends `bodies` by name, after `answering` is set.

    Its header announces `extra` bytes more than it sends.
    """

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.extra = 0
        self.answering = threading.Event()
        self.answering.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path[1:])
                outer.answering.wait(30)
                body = outer.bodies.get(self.path[1:])
                if body is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body) + outer.extra))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

            def finish(self) -> None:
                with contextlib.suppress(OSError):  # the client has closed the connection
                    super().finish()

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answering.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Start a server of the data set `small`, which has two files."""
    with Server() as running:
        running.bodies = {"a.gz": gzip.compress(b"first"), "b.txt": b"second"}
        originals = tuple(
            PublishedFile(f"{running.url}/{name}", hashlib.sha256(body).hexdigest())
            for name, body in running.bodies.items()
        )
        monkeypatch.setitem(PUBLISHED_FILES, "small", originals)
        yield running


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# ---- finding files ---------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("below", [False, True], ids=["DIR", "DIR/mnist"])
def test_given_folder_with_the_files_is_used(tmp_path: Path, packed: bool, below: bool) -> None:
    folder = tmp_path / "mnist" if below else tmp_path
    folder.mkdir(exist_ok=True)
    for name, body in SMALL.items():
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(body) if packed else body)
    found = locate_files("mnist", tmp_path)
    assert found == {name: folder / (name + ".gz" * packed) for name in SMALL}
    assert len(load_mnist(tmp_path, train=True)) == 20
    assert len(load_mnist(tmp_path, train=False)) == 7


def test_file_type_is_detected_by_content(small: Path) -> None:
    """A file is read by its content, because browsers unpack .gz files and keep their name."""
    (small / "train-images-idx3-ubyte").rename(small / "train-images-idx3-ubyte.gz")
    (small / "train-labels-idx1-ubyte").write_bytes(gzip.compress(SMALL["train-labels-idx1-ubyte"]))
    assert len(load_mnist(small, train=True)) == 20


def test_folder_with_some_of_the_files_is_refused(small: Path) -> None:
    """A folder that lacks some of the files is refused.

    If the cache supplied the missing files, training and test images could be from different
    variants of MNIST.
    """
    (small / "t10k-images-idx3-ubyte").unlink()
    (small / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        Refused,
        match=r"lacks t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte of the data set mnist; put",
    ):
        locate_files("mnist", small)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"there is no data folder .*nowhere; give an existing one"):
        locate_files("mnist", tmp_path / "nowhere")


def test_checksums_are_those_of_the_originals(data: Path) -> None:
    checked = []
    for dataset, originals in PUBLISHED_FILES.items():
        for original in originals:
            for path in (data / dataset / original.packed_name, data / original.packed_name):
                if path.is_file():
                    assert hashlib.sha256(path.read_bytes()).hexdigest() == original.sha256, path
                    checked.append(original)
    assert checked, f"none of the files lies in {data} under its published name"


# ---- downloading -----------------------------------------------------------------------------
def test_files_are_downloaded_once_and_cached(
    server: Server, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = locate_files("small", None)
    assert {name: read_unpacked(path) for name, path in found.items()} == {
        "a": b"first",
        "b.txt": b"second",
    }
    assert (
        capfd.readouterr().err == f"downloading {server.url}/a.gz\ndownloading {server.url}/b.txt\n"
    )
    assert list_files(cache) == ["a.gz", "b.txt"]
    assert locate_files("small", None) == found
    assert server.asked == ["a.gz", "b.txt"]
    assert capfd.readouterr().err == ""


def test_given_folder_without_the_files_starts_no_download(
    server: Server, cache: Path, tmp_path: Path
) -> None:
    """A given folder without the files is refused, also if the cache has the files.

    Earlier, a wrong name of a folder started a download.
    """
    (tmp_path / "other").mkdir()
    with pytest.raises(
        Refused,
        match=rf"other holds no file of the data set small; put a and b\.txt there, .*, or give no "
        rf"folder .*: they are then downloaded once, from {server.url}$",
    ):
        locate_files("small", tmp_path / "other")
    assert server.asked == []
    locate_files("small", None)
    with pytest.raises(Refused, match="holds no file of the data set small"):
        locate_files("small", tmp_path / "other")


def test_given_folder_precedes_the_cache_without_checksums(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    (tmp_path / "b.txt").write_bytes(b"mine too")
    assert locate_files("small", tmp_path) == {"a": tmp_path / "a", "b.txt": tmp_path / "b.txt"}
    assert server.asked == []


def test_a_damaged_cache_is_filled_again(server: Server, cache: Path) -> None:
    locate_files("small", None)
    (cache / "b.txt").write_bytes(b"dirt")
    assert read_unpacked(locate_files("small", None)["b.txt"]) == b"second"
    assert server.asked == ["a.gz", "b.txt", "b.txt"]


def spoil(server: Server, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Make the download of the second file fail, in the way that `how` says."""
    if how == "another file":
        server.bodies["b.txt"] = b"not the second"
    elif how == "not found":
        del server.bodies["b.txt"]
    elif how == "cut":
        locate_files("small", None)  # then the first file is in the cache
        (Path(pooch.os_cache("paragrad")) / "small" / "b.txt").unlink()
        server.extra = 5
    elif how == "silent":
        monkeypatch.setitem(PUBLISHED_FILES, "small", PUBLISHED_FILES["small"][1:])
        monkeypatch.setattr(dataset_files, "SOCKET_TIMEOUT", 0.05)
        server.answering.clear()
    elif how == "slow":
        monkeypatch.setitem(PUBLISHED_FILES, "small", PUBLISHED_FILES["small"][1:])
        monkeypatch.setattr(dataset_files, "MAX_DOWNLOAD_SECONDS", -1.0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("another file", "is not the original b.txt: its sha256 is not"),
        ("not found", "HTTP Error 404"),
        ("cut", "the connection broke off after 6 of 11 bytes"),
        ("silent", "timed out"),
        ("slow", "not finished after -1 seconds"),
    ],
)
def test_no_partial_file_stays(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    spoil(server, monkeypatch, how)
    with pytest.raises(Refused) as refusal:
        locate_files("small", None)
    assert message in str(refusal.value)
    assert f"{server.url}/b.txt" in str(refusal.value)
    assert str(refusal.value).startswith("data set small: ")
    assert list_files(cache) == (["a.gz"] if len(PUBLISHED_FILES["small"]) == 2 else [])


def test_missing_network_names_the_files_to_place(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as deaf:
        # this port is bound and does not listen, so no other process can listen there
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setitem(
            PUBLISHED_FILES,
            "small",
            tuple(PublishedFile(f"{url}/{name}", "0" * 64) for name in ("a.gz", "b.txt", "c.gz")),
        )
        with pytest.raises(
            Refused,
            match=r"a\.gz could not be downloaded from http.*refused.*; or put a, b\.txt and c, "
            r"each with or without \.gz, into a folder and give it with --data FOLDER",
        ):
            locate_files("small", None)
    assert list_files(cache) == []


def test_a_cache_that_cannot_be_written_is_refused(server: Server, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where a folder belongs")
    with pytest.raises(Refused, match=r"a\.gz could not be downloaded"):
        locate_files("small", None)


def test_missing_pooch_names_the_package(
    cache: Path, monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(Refused, match=r"pip install pooch; or put train-images-idx3-ubyte, "):
        locate_files("mnist", None)
    assert len(locate_files("mnist", small)) == 4  # a given folder needs no pooch


# ---- IDX -------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("code", CODES)
def test_every_element_type(tmp_path: Path, code: str, packed: bool) -> None:
    array = (numpy.arange(-12, 12).reshape(2, 3, 4) * (1.25 if code[0] == "f" else 7)).astype(code)
    path = tmp_path / "some"
    path.write_bytes(gzip.compress(encode_idx(array)) if packed else encode_idx(array))
    tensor = read_idx(path)
    assert torch.equal(tensor, torch.from_numpy(array))
    assert tensor.dtype == torch.from_numpy(array).dtype


GOOD = encode_idx(make_pixels(3))


PACKED = gzip.compress(GOOD, mtime=0)
DAMAGED = {
    "empty": (b"", "is no IDX file: it is empty"),
    "three bytes": (b"\0\0\x08", "is no IDX file: it begins with 00 00 08"),
    "a web page": (
        b"<html>not found</html>",
        "is no IDX file: it begins with 3c 68 74 6d, and an IDX file begins with 00 00",
    ),
    "unknown type": (
        b"\0\0\x0a" + GOOD[3:],
        "there is no IDX element type 0a (08 ubyte, 09 byte, 0b short",
    ),
    "no dimensions": (b"\0\0\x08\0", "its header says 0 dimensions"),
    "255 dimensions": (b"\0\0\x08\xff" + GOOD[4:], "its header says 255 dimensions"),
    "half a header": (GOOD[:11], "is cut off within the lengths of its 3 dimension(s)"),
    "no images": (GOOD[:4] + bytes(4) + GOOD[8:], "holds nothing: its header says 0 x 28 x 28"),
    "one byte short": (
        GOOD[:-1],
        "is cut off: a header and 3 x 28 x 28 elements of type ubyte are 2368 bytes, and it",
    ),
    "a header alone": (GOOD[:16], "is cut off: "),
    "one byte long": (
        GOOD + b"\0",
        "is too long: a header and 3 x 28 x 28 elements of type ubyte are 2368 bytes, and",
    ),
    "another type": (
        b"\0\0\x0c" + GOOD[3:],
        "elements of type int are 9424 bytes, and it holds 2368",
    ),
    "huge lengths": (GOOD[:4] + b"\xff" * 12, "is cut off: "),
    "gzip cut in its end": (PACKED[:-5], "is cut off in the middle of its gzip data"),
    "gzip cut in the middle": (PACKED[:60], "is cut off in the middle of its gzip data"),
    "gzip cut in its header": (PACKED[:5], "is cut off in the middle of its gzip data"),
    "gzip of another checksum": (PACKED[:-8] + bytes(8), "holds damaged gzip data"),
    "gzip of dirt": (PACKED[:10] + b"\xff" * 40, "holds damaged gzip data"),
    "gzip and more": (PACKED + b"more", "holds damaged gzip data"),
    "gzip of a cut file": (gzip.compress(GOOD[:-1]), "is cut off: "),
}


@pytest.mark.parametrize(("body", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused_by_name(tmp_path: Path, body: bytes, message: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(body)
    with pytest.raises(Refused) as refusal:
        read_idx(path)
    assert str(refusal.value).startswith(str(path))
    assert message in str(refusal.value)
    assert str(refusal.value).endswith("copy or download it again")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.binary(max_size=40)
    | st.binary(max_size=40).map(lambda rest: b"\0\0\x08\x01\0\0\0" + rest)
    | st.binary(max_size=40).map(lambda rest: b"\x1f\x8b\x08\0" + rest)
)
@example(b"\0\0\x08\x08" + b"\0\0\0\x01" * 8 + b"\7")
def test_random_bytes_are_read_or_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "any").write_bytes(body)
    try:
        elements = read_idx(tmp_path / "any").numel()
    except Refused:
        return
    assert elements > 0


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        Refused, match=r"cannot be read \(Is a directory\); make it a readable file"
    ):
        read_idx(tmp_path)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            make_labels(5),
            make_pixels(5),
            "images has 1 dimension(s), 5, and images have 3; are images and labels swapped?",
        ),
        (
            make_labels(5),
            make_labels(5),
            "images has 1 dimension(s), 5, and images have 3; give the right file",
        ),
        (
            make_pixels(5),
            make_pixels(5),
            "labels has 3 dimension(s), 5 x 28 x 28, and labels have 1; give the right file",
        ),
        (
            make_pixels(5).astype("i4"),
            make_labels(5),
            "images holds elements of torch.int32, and images are of type ubyte",
        ),
        (
            make_pixels(5),
            make_labels(5).astype("f8"),
            "labels holds elements of torch.float64, and labels are of type ubyte",
        ),
        (
            make_pixels(5),
            make_labels(4),
            "images holds 5 images and {folder}/labels 4 labels; give two files of one set",
        ),
        (
            make_pixels(5),
            numpy.array([1, 9, 10, 47, 0], numpy.uint8),
            "labels: label 2 is 10, and the 10 classes are numbered",
        ),
    ],
)
def test_images_and_labels_are_checked_against_each_other(
    tmp_path: Path, images: numpy.ndarray, labels: numpy.ndarray, message: str
) -> None:
    (tmp_path / "images").write_bytes(encode_idx(images))
    (tmp_path / "labels").write_bytes(encode_idx(labels))
    with pytest.raises(Refused) as refusal:
        read_labelled_images(tmp_path / "images", tmp_path / "labels")
    assert message.format(folder=tmp_path) in str(refusal.value)


# ---- MNIST -----------------------------------------------------------------------------------
def test_a_batch_of_mnist(small: Path) -> None:
    dataset = load_mnist(small, train=True)
    images, labels = dataset[[3, 0, 13]]
    assert images.shape == (3, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.tolist() == [3, 0, 3]
    assert labels.dtype == torch.int64
    expected = (
        torch.from_numpy(make_pixels(20)[[3, 0, 13]]).double() / 255 - MEAN
    ) / STANDARD_DEVIATION
    assert torch.allclose(images[:, 0].double(), expected, atol=1e-6)
    assert dataset[3][0].shape == (1, 28, 28)
    assert torch.equal(dataset[3][0], images[0])
    assert dataset.tensors[0].dtype == torch.uint8  # kept as bytes


def test_whole_batch_is_fetched_in_one_call(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load_mnist(small, train=True)
    asked = []
    usual = type(dataset).__getitem__
    monkeypatch.setattr(
        type(dataset), "__getitem__", lambda self, index: asked.append(index) or usual(self, index)
    )
    assert torch.equal(Samples(dataset)[0, [4, 5]][0], usual(dataset, [4, 5])[0])
    assert asked == [[4, 5]]


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["copy", "pickle"],
)
def test_mnist_can_be_copied(small: Path, copied: Callable[[object], object]) -> None:
    dataset = load_mnist(small, train=False)
    assert all(
        torch.equal(*pair) for pair in zip(copied(dataset)[[1, 2]], dataset[[1, 2]], strict=True)
    )


def test_images_of_another_size_are_refused(small: Path) -> None:
    (small / "train-images-idx3-ubyte").write_bytes(encode_idx(make_pixels(20, size=32)))
    with pytest.raises(
        Refused, match=r"train-images-idx3-ubyte holds images of 32x32 pixels; give images of 28x28"
    ):
        load_mnist(small, train=True)


def test_the_real_mnist(data: Path) -> None:
    train, test = load_mnist(data, train=True), load_mnist(data, train=False)
    assert (len(train), len(test)) == (60_000, 10_000)
    assert torch.bincount(train.tensors[1]).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    images, labels = train[list(range(60_000))]
    assert labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert abs(float(images.mean())) < 1e-3
    assert abs(float(images.std()) - 1) < 1e-3


# ---- text ------------------------------------------------------------------------------------
def decode_text(sample: torch.Tensor) -> str:
    return "".join(CHARACTERS[number] for number in sample)


def test_characters_are_sorted_and_65() -> None:
    assert len(CHARACTERS) == 65
    assert list(CHARACTERS) == sorted(set(CHARACTERS))
    assert all(CHARACTERS[number] == character for character, number in CHARACTER_NUMBERS.items())


def test_sample_is_a_speech(tmp_path: Path) -> None:
    text = "A:\nOne line.\n\nB:\nTwo\nlines.\n\n\nX\n\nYou\n" + "\n" * 600 + "C:\nThe rest.\n"
    (tmp_path / "input.txt").write_text(text, newline="")
    assert [decode_text(sample) for sample in load_speeches(tmp_path, True, 100).samples] == [
        "A:\nOne line.",
        "B:\nTwo\nlines.",
        "You",
    ]
    assert [decode_text(sample) for sample in load_speeches(tmp_path, True, 5).samples] == [
        "A:\nOne",
        "B:\nTwo",
        "You",
    ]
    assert load_speeches(tmp_path, True, 5)[0].dtype == torch.int64


def test_split_is_by_the_start_of_a_speech(tmp_path: Path) -> None:
    # the text has 98 characters, and speeches begin at 0, 10, ... 90
    text = "\n\n".join([f"{character * 8}" for character in "abcdefghij"])
    (tmp_path / "input.txt").write_text(text)
    assert [decode_text(sample)[0] for sample in load_speeches(tmp_path, True, 8).samples] == list(
        "abcdefghi"
    )
    assert [decode_text(sample)[0] for sample in load_speeches(tmp_path, False, 8).samples] == ["j"]


@pytest.mark.parametrize(
    "change", [lambda text: text.replace(b"\n", b"\r\n"), gzip.compress], ids=["windows", "gz"]
)
def test_line_endings_and_compression_do_not_matter(
    tmp_path: Path, small: Path, change: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "input.txt").write_bytes(change(PLAY.encode()))
    pairs = zip(
        load_speeches(tmp_path / "other", True, 50).samples,
        load_speeches(small, True, 50).samples,
        strict=True,
    )
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"A:\nfine\nso 4ar", "input.txt, line 3, column 4: '4' is none of the 65 characters"),
        (
            "\ufeffA:\nfine".encode(),
            r"input.txt, line 1, column 1: '\ufeff' is none of the 65 characters",
        ),
        (b"A:\nna\xefve", "input.txt is no UTF-8 text (byte 5)"),
        (
            gzip.compress(b"A:\nfine", mtime=0)[:-3],
            "input.txt is cut off in the middle of its gzip data",
        ),
    ],
)
def test_unexpected_text_is_refused_by_name_and_place(
    tmp_path: Path, body: bytes, message: str
) -> None:
    (tmp_path / "input.txt").write_bytes(body)
    with pytest.raises(Refused) as refusal:
        load_speeches(tmp_path, True, 10)
    assert message in str(refusal.value)


def test_padding_is_never_a_target() -> None:
    characters, targets = pad_speeches(
        [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 3]), torch.tensor([1, 2, 4])]
    )
    assert characters.tolist() == [[5, 6, 7], [9, 3, 0], [1, 2, 4]]
    assert targets.tolist() == [[6, 7, 8], [3, -100, -100], [2, 4, -100]]
    assert characters.dtype == targets.dtype == torch.int64


def test_padded_batch_is_weighed_by_characters() -> None:
    """The loss of a padded batch is the sum of the losses of its samples, for any padding.

    So is the weight.
    """
    samples = Speeches(["What say you?", "No, my lord; not so.", "Ay."], 12).samples
    torch.manual_seed(0)
    model = shakespeare_lstm(hidden=8).model().double()
    module = LossModule(model, functional.cross_entropy)
    with torch.no_grad(), module.divide_by(26.0):
        total, weight = module(*pad_speeches(samples), 3)
        alone = [module(x, y, 1) for x, y in (pad_speeches([sample]) for sample in samples)]
    assert weight == sum(part[1] for part in alone) == 12 + 12 + 2
    assert float(total) == pytest.approx(float(sum(part[0] for part in alone)), rel=1e-12)


def test_the_real_text(data: Path) -> None:
    train = load_speeches(data, True, 128)
    rest = load_speeches(data, False, 128)
    assert (len(train), len(rest)) == (6283, 939)
    assert decode_text(train[0]) == "First Citizen:\nBefore we proceed any further, hear me speak."
    assert {len(sample) for sample in train.samples} == set(
        range(min(map(len, train.samples)), 130)
    )
    whole = load_speeches(data, True, 10**6).samples + load_speeches(data, False, 10**6).samples
    assert set(torch.cat(whole).tolist()) == set(range(65))


def test_windows_of_the_text(small: Path) -> None:
    """Each window begins where the last one ended; targets are shifted by one character."""
    train = load_windows(small, True, 20)
    rest = load_windows(small, False, 20)
    assert len(train) == (int(0.9 * len(PLAY)) - 1) // 20 > len(rest) > 0
    pairs = [
        (decode_text(x), decode_text(y)) for x, y in (train[index] for index in range(len(train)))
    ]
    assert "".join(x for x, _ in pairs) == PLAY[: 20 * len(train)]
    assert "".join(y for _, y in pairs) == PLAY[1 : 20 * len(train) + 1]
    assert decode_text(train[-1][0]) == pairs[-1][0]
    with pytest.raises(IndexError):
        train[len(train)]


def test_unsuitable_window_lengths_are_refused(small: Path) -> None:
    with pytest.raises(
        Refused,
        match="has 89 characters to test with, and a window needs 101; give a shorter window",
    ):
        load_windows(small, False, 100)


# ---- the jobs --------------------------------------------------------------------------------
JOBS: list[Callable[[], Job]] = [
    mnist_mlp,
    mnist_cnn,
    shakespeare_lstm,
    partial(shakespeare_gpt, context=40),
    mnist_resnet,
]


@pytest.mark.parametrize("make", JOBS)
def test_making_a_job_reads_no_data_and_it_can_be_pickled(
    make: Callable[[], Job], monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: pytest.fail("data was read"))
        job = pickle.loads(cloudpickle.dumps(make()))
    assert job.name in find_job.JOBS
    assert len(job.train(small)) > len(job.test(small)) > 0


@pytest.mark.parametrize(
    "make",
    [
        *JOBS[:3],
        pytest.param(JOBS[3], marks=pytest.mark.table),
        mnist_resnet,
        partial(mnist_cnn, "batch"),
        partial(mnist_cnn, "weight"),
        lambda: mnist_mlp(16, "sigmoid"),
        pytest.param(lambda: shakespeare_lstm(8, 5), marks=pytest.mark.story),
        lambda: shakespeare_gpt(1, 8, 2, 5, 0.0),
    ],
)
def test_built_in_jobs_pass_validation_and_learn(make: Callable[[], Job], small: Path) -> None:
    job = make()
    facts = inspect_job(job, small)
    read = job.train(small), job.test(small)
    assert (facts.samples, facts.test_samples) == tuple(map(len, read))
    assert job.name == "shakespeare-gpt" or tuple(map(len, read)) == (
        (18, 2) if job.collate else (20, 7)
    )
    model = job.build_model()
    optimizer = job.optimizer(model.parameters())
    inputs, target = job.make_samples(job.train(small))[0, list(range(facts.samples))]
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = job.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("width", [1, 100, 256])
def test_width_sets_the_message_size(width: int) -> None:
    model = mnist_mlp(width).build_model()
    assert sum(4 * parameter.numel() for parameter in model.parameters()) == 4 * (
        401_930 + 523 * width
    )
    assert [layer.out_features for layer in model if isinstance(layer, nn.Linear)] == [
        512,
        width,
        10,
    ]
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_message_size_of_the_default_width() -> None:
    assert "2,143,272" in (mnist_mlp.__doc__ or "")
    assert 4 * (401_930 + 523 * 256) == 2_143_272


def test_the_activation_is_used() -> None:
    assert [type(layer) for layer in mnist_mlp(8, "sigmoid").model()].count(nn.Sigmoid) == 2
    assert [type(layer) for layer in mnist_mlp(8).model()].count(nn.ReLU) == 2


def test_target_is_the_next_character_of_every_position() -> None:
    job = shakespeare_lstm(hidden=8)
    assert job.model()(torch.zeros(3, 11, dtype=torch.int64)).shape == (3, 65, 11)
    assert (job.metric, job.clip_norm, job.collate) == (None, 1.0, pad_speeches)
    assert mnist_cnn().metric is mnist_mlp().metric is accuracy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: mnist_mlp(activation="sigmod"),
            "job mnist-mlp: no activation 'sigmod'; did you mean sigmoid?",
        ),
        (lambda: mnist_cnn("layer"), "job mnist-cnn: no norm 'layer'; known: none, batch, weight"),
        (lambda: mnist_resnet(0), "job mnist-resnet: width must be a whole number from 1, got 0"),
        (
            lambda: inception_digits(0),
            "job inception-digits: width must be a whole number from 1, got 0",
        ),
        (lambda: mnist_mlp(width=0), "job mnist-mlp: width must be a whole number from 1, got 0"),
        (
            lambda: shakespeare_lstm(hidden=0),
            "job shakespeare-lstm: hidden must be a whole number from 1, got 0",
        ),
        (
            lambda: shakespeare_lstm(length=-3),
            "job shakespeare-lstm: length must be a whole number from 1, got -3",
        ),
        (
            lambda: shakespeare_gpt(layers=0),
            "job shakespeare-gpt: layers must be a whole number from 1, got 0",
        ),
        (
            lambda: shakespeare_gpt(width=10, heads=4),
            "job shakespeare-gpt: width 10 is no multiple of heads 4; give one that is",
        ),
        (
            lambda: shakespeare_gpt(dropout=1),
            "job shakespeare-gpt: dropout must be a number from 0 to below 1, got 1",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Job], message: str) -> None:
    with pytest.raises(Refused) as refusal:
        make()
    assert str(refusal.value) == message
