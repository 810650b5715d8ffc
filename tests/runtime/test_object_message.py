"""An object is unchanged by a message; a view is sent without the rest of its storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paragrad.runtime.object_message import (
    HEAD_BYTES,
    SHORT_BYTES,
    decode_object,
    encode_object,
    make_head,
    read_head,
)

pytestmark = pytest.mark.pure

TENSORS = {
    "float": torch.randn(3, 4),
    "no dimension": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "bfloat16": torch.randn(5).bfloat16(),
    "bool": torch.tensor([True, False]),
    "integers": torch.arange(6).view(2, 3),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "transposed": torch.randn(3, 4).t(),
    "sparse": torch.eye(3).to_sparse(),
    "wants a gradient": torch.randn(2, requires_grad=True),
    "on no device": torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_the_same_after_a_message(name: str) -> None:
    sent = TENSORS[name]
    received = decode_object(encode_object({"inner": [sent]}))["inner"][0]
    assert received.shape == sent.shape
    assert received.dtype == sent.dtype
    assert received.layout == sent.layout
    assert received.requires_grad == sent.requires_grad
    assert received.is_meta or torch.equal(received.to_dense(), sent.to_dense())


def test_a_received_tensor_can_be_written_to() -> None:
    received: Tensor = decode_object(encode_object(torch.zeros(3)))
    received.add_(1.0)
    assert received.tolist() == [1.0, 1.0, 1.0]


def test_a_view_comes_without_the_rest_of_its_storage() -> None:
    data = encode_object(torch.zeros(1_000_000)[:3])
    assert data.numel() < 1000


def test_parameters_and_modules_keep_their_class() -> None:
    received = decode_object(encode_object((nn.Parameter(torch.ones(2)), nn.Linear(2, 1), "text")))
    assert isinstance(received[0], nn.Parameter)
    assert isinstance(received[1], nn.Linear)
    assert received[2] == "text"


@pytest.mark.parametrize("length", [0, 1, SHORT_BYTES - 1, SHORT_BYTES, SHORT_BYTES + 1, 10_000])
def test_a_short_object_travels_in_the_first_message(length: int) -> None:
    """Earlier, every flag and every reason took two messages: its length, then its bytes."""
    data = torch.arange(length).to(torch.uint8)
    head = make_head(data)
    found_length, found = read_head(head)
    assert (head.numel(), found_length) == (HEAD_BYTES, length)
    if length <= SHORT_BYTES:
        assert found is not None
        assert torch.equal(found, data)
    else:
        assert found is None
