"""When compression saves time: closed forms, compared with results computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paragrad.errors import Refused
from paragrad.executors.machine import Link, Machine
from paragrad.planner.compression_cost import (
    choose_square_shape,
    find_break_even,
    find_paying_lengths,
    predict_compression_cost,
)
from paragrad.strategies.compressors import find_compressor
from paragrad.strategies.registry import strategy

pytestmark = pytest.mark.pure

MACHINE = Machine({"gloo": Link(alpha=1e-4, beta=1e-8)}, gamma=1e-10, cores=1, measured="by hand")
MB = 1_000_000


def price_compression(
    text: str, size: int = 4 * MB, costs: tuple[float, float] = (1e-10, 1e-11), beta: float = 1e-8
):  # type: ignore[no-untyped-def]
    chosen = strategy(text)
    compressor = find_compressor(chosen)
    assert compressor is not None
    machine = replace(MACHINE, links={"gloo": Link(alpha=1e-4, beta=beta)})
    return predict_compression_cost(chosen, compressor, int(chosen.workers), size, machine, costs)


def test_sparse_message_goes_to_all_ranks() -> None:
    """4 ranks with 4 MB send a hundredth of the entries, each with its index.

    So each rank sends 80,000 bytes to each of the three others.
    """
    found = price_compression("data(4, compress=top_k(0.01))")
    assert found.payload == 80_000
    assert not found.sends_whole_vectors
    assert found.plain == pytest.approx(6 * 1e-4 + 1.5 * 4e6 * 1e-8 + 0.75 * 4e6 * 1e-10)
    assert found.exchange == pytest.approx(3 * (1e-4 + 80_000 * 1e-8))
    assert found.compute == pytest.approx(4e6 * (1e-10 + 4 * 1e-11))
    assert found.is_faster


def test_additive_compressor_uses_the_all_reduce() -> None:
    found = price_compression("data(4, reduce=ring, compress=bf16)")
    assert found.payload == 2 * MB
    assert found.exchange == pytest.approx(6 * 1e-4 + 1.5 * 2e6 * 1e-8 + 0.75 * 2e6 * 1e-10)
    assert found.compute == pytest.approx(4e6 * 1.1e-10)
    matrix = price_compression("data(4, compress=power_sgd(1))", size=4 * MB)
    assert matrix.payload == 4 * 2 * 1000  # a square matrix of a million entries
    assert matrix.exchange == pytest.approx(
        2 * (6 * 1e-4 + 1.5 * 4000 * 1e-8 + 0.75 * 4000 * 1e-10)
    )


def test_larger_sparse_messages_are_sent_dense() -> None:
    """With p ranks and a fraction r of entries, the ratio of bytes sent is r p.

    If r is a hundredth, 100 ranks send as much as without compression.
    """
    assert not price_compression("data(90, compress=top_k(0.01))").sends_whole_vectors
    found = price_compression("data(110, compress=top_k(0.01))")
    assert found.sends_whole_vectors
    assert found.exchange == found.plain
    assert not found.is_faster


@pytest.mark.parametrize(
    "text",
    [
        "data(4, compress=top_k(0.01))",
        "data(4, compress=int8)",
        "data(16, compress=bf16)",
        "data(64, compress=dgc(0.001))",
        "data(8, compress=power_sgd(4))",
    ],
)
def test_compression_pays_below_a_bandwidth_only(text: str) -> None:
    found = price_compression(text, costs=(2e-9, 5e-10))
    assert 0 < found.bandwidth < float("inf")
    assert price_compression(text, costs=(2e-9, 5e-10), beta=1.02 / found.bandwidth).is_faster
    assert not price_compression(text, costs=(2e-9, 5e-10), beta=0.98 / found.bandwidth).is_faster


def test_compression_pays_from_some_length_on() -> None:
    """PowerSGD sends in two rounds instead of one, so it must save the time of one round."""
    ((first, end),) = price_compression(
        "data(4, compress=power_sgd(1))", costs=(1e-10, 1e-10)
    ).paying_lengths
    assert 4 * 2048 < first < 4 * MB
    assert end == float("inf")
    assert price_compression(
        "data(4, compress=power_sgd(1))", int(1.01 * first), (1e-10, 1e-10)
    ).is_faster
    assert not price_compression(
        "data(4, compress=power_sgd(1))", int(0.99 * first), (1e-10, 1e-10)
    ).is_faster
    # shorter vectors are sent without compression
    assert price_compression("data(4, compress=top_k(0.01))").paying_lengths[0][0] >= 4 * 2048
    assert not price_compression("data(4, compress=top_k(0.01))", costs=(1e-6, 1e-6)).paying_lengths


def test_costly_compressor_may_pay_for_short_vectors_only() -> None:
    """Sending to all ranks needs fewer messages than a ring, which saves time for short vectors.

    Earlier, the report said that compression pays for no length, next to a vector for which it
    does pay.
    """
    ((first, end),) = price_compression("data(4, compress=int8)", costs=(5e-9, 1e-9)).paying_lengths
    assert first == 4 * 2048
    assert end < float("inf")
    assert price_compression("data(4, compress=int8)", int(end) - 4, (5e-9, 1e-9)).is_faster
    assert not price_compression("data(4, compress=int8)", int(end), (5e-9, 1e-9)).is_faster


@pytest.mark.parametrize(
    ("text", "size", "said"),
    [
        (
            "data(4, compress=threshold(0.1))",
            MB,
            "how much threshold(0.1) sends depends on the gradients",
        ),
        ("data(4, compress=int8)", 3, "less than one number"),
        ("data(4, compress=int8)", 4096, "sends a vector of 1024 numbers as it is"),
    ],
)
def test_unpriceable_compression_is_refused(text: str, size: int, said: str) -> None:
    with pytest.raises(Refused, match=said.replace("(", "\\(").replace(")", "\\)")):
        price_compression(text, size)


def test_square_roots_and_squares() -> None:
    assert find_break_even(lambda x: x - 3, 10.0) == 3
    assert find_break_even(lambda x: x + 1, 10.0) == 0
    assert find_break_even(lambda x: -1.0, 10.0) == float("inf")
    assert find_paying_lengths(lambda length: length >= 12_340) == ((12_340, float("inf")),)
    assert find_paying_lengths(lambda length: 64 <= length < 400 or length >= 12_340) == (
        (64, 400),
        (12_340, float("inf")),
    )
    assert find_paying_lengths(lambda length: False) == ()
    assert choose_square_shape(1_000_000) == (1000, 1000)
    assert choose_square_shape(10) == (3, 3)
