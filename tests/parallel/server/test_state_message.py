"""The optimizer state of a server is sent as a message, whatever types it contains."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from paragrad.engine.state.values import is_same_value
from paragrad.parallel.server.state_message import read_state_message, write_state_message

pytestmark = pytest.mark.pure


def test_state_message_keeps_values_and_types() -> None:
    """Earlier, only numbers and tensors at the top level of a state were sent.

    AggMo has a dictionary, and AdaShift has a queue.
    """
    states = [
        {
            "step": torch.tensor(3.0),
            "momenta": {0.0: torch.randn(3, 2), 0.9: torch.randn(3, 2, dtype=torch.float64)},
            "flags": torch.tensor([True, False, True]),
            "queue": deque([torch.arange(5), 1.5], maxlen=4),
        },
        {},
        {"pair": (1, None, "text"), "list": [[torch.tensor(2.0, dtype=torch.bfloat16)], True]},
    ]
    settings = [{"count": 7, "estimate": torch.tensor([1e-6])}, {}]
    text, vector = write_state_message(states, settings)
    read_states, read_settings = read_state_message(text.encode(), vector)
    assert is_same_value(read_states, states)
    assert is_same_value(read_settings, settings)
    assert read_states[0]["queue"].maxlen == 4


def test_state_message_refuses_objects() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_state_message([{"object": object()}], [])
