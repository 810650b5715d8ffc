"""Elements that ranks fetch from each other, compared with the elements that a window reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from paragrad.parallel.sharding.halo_regions import (
    PADDING,
    TransposedWindow,
    Window,
    compute_taps,
    count_fetched,
    find_runs,
    locate_padded_input,
)
from paragrad.parallel.sharding.halo_regions import count_sent as passed_on
from paragrad.parallel.sharding.partition import partition_evenly
from paragrad.parallel.tensor.halo_exchange import split_edges

pytestmark = pytest.mark.pure

WINDOWS = st.builds(
    Window,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 3),
)


@given(WINDOWS, st.integers(1, 40), st.integers(1, 5))
def test_shard_outputs_see_the_inputs_of_one_rank(window: Window, size: int, ranks: int) -> None:
    """Each output reads the inputs of its definition.

    A rank needs the inputs from its first to its last output.
    """
    count = window.count_outputs(size)
    if count < ranks:
        return
    pieces = partition_evenly(count, ranks)
    for rank in range(ranks):
        outputs = pieces.list_ranges(rank)[0]
        want = window.find_inputs(outputs, size)
        for output in outputs:
            for tap in range(window.kernel):
                place = output * window.stride - window.before + tap * window.dilation
                at = (output - outputs.start) * window.stride + tap * window.dilation
                assert want[at] == (place if 0 <= place < size else PADDING)
        assert len(want) == (len(outputs) - 1) * window.stride + window.reach


@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_runs_are_the_wanted_elements(size: int, ranks: int, data: st.DataObject) -> None:
    have = partition_evenly(size, ranks)
    want = tuple(data.draw(st.lists(st.integers(-1, size - 1), max_size=30)))
    found = []
    for run in find_runs(have, want):
        if run.owner == PADDING:
            found += [PADDING] * run.length
        else:
            own = have.list_ranges(run.owner)[0]
            assert run.start + run.length <= len(own)
            found += list(own[run.start : run.start + run.length])
    assert tuple(found) == want


@given(WINDOWS, st.integers(8, 60), st.integers(2, 5))
def test_fetched_elements_are_those_sent(window: Window, size: int, ranks: int) -> None:
    if window.count_outputs(size) < ranks:
        return
    have = partition_evenly(size, ranks)
    after = partition_evenly(window.count_outputs(size), ranks)
    wants = tuple(window.find_inputs(after.list_ranges(rank)[0], size) for rank in range(ranks))
    ranks_ = range(ranks)
    assert sum(count_fetched(have, wants, rank) for rank in ranks_) == sum(
        passed_on(have, wants, rank) for rank in ranks_
    )


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_halo_is_half_a_kernel(kernel: int, ranks: int) -> None:
    """The closed form for stride 1, an odd kernel and padding "same": this much per neighbour."""
    window = Window(kernel, before=kernel // 2, after=kernel // 2)
    have = partition_evenly(28, ranks)
    wants = tuple(window.find_inputs(have.list_ranges(rank)[0], 28) for rank in range(ranks))
    neighbours = [(rank > 0) + (rank < ranks - 1) for rank in range(ranks)]
    assert [count_fetched(have, wants, rank) for rank in range(ranks)] == [
        kernel // 2 * each for each in neighbours
    ]


@pytest.mark.parametrize(("kernel", "rows"), [(2, [0, 1, 0]), (1, [0, 0, 0])])
def test_even_splits_of_uneven_sizes_move_rows(kernel: int, rows: list[int]) -> None:
    """28 rows over 3 ranks are 10, 9, 9. The 14 rows of a pool of two are 5, 5, 4.

    They read 10, 10, 8 rows. A 1x1 kernel of stride 1 moves no row.
    """
    window = Window(kernel, kernel)
    have = partition_evenly(28, 3)
    after = partition_evenly(window.count_outputs(28), 3)
    wants = tuple(window.find_inputs(after.list_ranges(rank)[0], 28) for rank in range(3))
    assert [count_fetched(have, wants, rank) for rank in range(3)] == rows


@given(
    st.builds(
        TransposedWindow,
        st.integers(1, 5),
        st.integers(1, 4),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 2),
        st.integers(0, 1),
    ),
    st.integers(3, 30),
    st.integers(1, 4),
)
def test_transposed_convolution_inputs_are_fetched(
    spread: TransposedWindow, size: int, ranks: int
) -> None:
    """Every input that adds to an output of a rank is among the inputs that the rank needs."""
    if spread.count_outputs(size) < ranks:
        return
    after = partition_evenly(spread.count_outputs(size), ranks)
    for rank in range(ranks):
        outputs = after.list_ranges(rank)[0]
        want = spread.find_inputs(outputs, size)
        for each in range(size):
            gives = {
                each * spread.stride - spread.before + tap * spread.dilation
                for tap in range(spread.kernel)
            }
            assert not gives & set(outputs) or each in want
        before, behind = spread.compute_padding(outputs, want)
        assert before + behind + (len(want) - 1) * spread.stride + spread.reach == len(outputs)


@settings(max_examples=200)
@given(WINDOWS, st.integers(12, 80), st.integers(2, 4))
def test_edges_and_interior_equal_the_convolution(window: Window, size: int, ranks: int) -> None:
    """A convolution of a rank's own rows with zeros around, plus the halo's part, is exact.

    This is checked wherever `split_edges` finds such a division.
    """
    if window.count_outputs(size) < ranks or window.before != window.after:
        return
    x = torch.randn(1, 1, size).double()
    kernel = torch.randn(1, 1, window.kernel).double()
    options = {"stride": window.stride, "dilation": window.dilation}
    whole = functional.conv1d(x, kernel, padding=window.before, **options)  # type: ignore[arg-type]
    have = partition_evenly(size, ranks)
    after = partition_evenly(window.count_outputs(size), ranks)
    for rank in range(ranks):
        own = have.list_ranges(rank)[0]
        outputs = after.list_ranges(rank)[0]
        if (found := split_edges(window, size, own, outputs)) is None:
            continue
        how, want = found
        out = functional.conv1d(
            x[..., own.start : own.stop], kernel, padding=how.padding, **options
        )  # type: ignore[arg-type]
        halo = x[..., list(want)]
        for edge in how.edges:
            rows = functional.pad(
                halo[..., edge.halo_rows.start : edge.halo_rows.stop], (edge.before, edge.after)
            )
            part = functional.conv1d(rows, kernel, **options)  # type: ignore[arg-type]
            out[..., edge.first_output : edge.first_output + part.shape[-1]] += part
        assert torch.allclose(out, whole[..., outputs.start : outputs.stop], atol=1e-12)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_equals_torch(mode: str) -> None:
    x = torch.arange(7.0).view(1, 1, 7)
    there = functional.pad(x, (3, 4), mode=mode).flatten().tolist()
    assert [locate_padded_input(at - 3, 7, mode) for at in range(14)] == there


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize(
    ("kind", "mode"), [("nearest", "nearest"), ("linear", "bilinear"), ("cubic", "bicubic")]
)
@pytest.mark.parametrize("aligned", [False, True])
def test_interpolation_taps_equal_torch(kind: str, mode: str, times: int, aligned: bool) -> None:
    if kind == "nearest" and aligned:
        return
    x = torch.randn(5).double()
    there = functional.interpolate(
        x.view(1, 1, 5, 1),
        size=(5 * times, 1),
        mode=mode,
        **({} if kind == "nearest" else {"align_corners": aligned}),
    ).flatten()
    here = torch.stack(
        [
            sum((weight * x[place] for place, weight in each), x.new_zeros(()))
            for each in compute_taps(kind, 5, times, aligned)
        ]
    )
    assert torch.allclose(here, there, atol=1e-12)
