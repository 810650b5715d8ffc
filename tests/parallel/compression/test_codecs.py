"""Codecs on their own: rounding errors, residuals and refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paragrad as pg
from paragrad.errors import Refused, StepFailed
from paragrad.parallel.compression.codec import CODEC_MODULES, Codec, Payload, build_codec
from paragrad.parallel.compression.feedback import (
    ErrorFeedback,
    MomentumCorrection,
    load_residual,
    make_residual_key,
)
from paragrad.parallel.compression.packing import (
    count_message_bytes,
    pack_payloads,
    unpack_payloads,
)
from paragrad.parallel.compression.power_sgd import PowerSgdCodec
from paragrad.parallel.compression.sparse import EXACT_SEARCH_LIMIT, find_largest
from paragrad.strategies.compressors import (
    CHUNK_ELEMENTS,
    MIN_COMPRESSED_ELEMENTS,
    Compressor,
    compute_matrix_shape,
    count_top_entries,
)
from paragrad.strategies.registry import strategy

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")


def resolve_compressor(text: str) -> Compressor:
    found = strategy(f"data(2, compress={text})").compress  # type: ignore[attr-defined]
    assert isinstance(found, Compressor)
    return found


def compress_on_one_rank(
    codec: Codec, vector: Tensor, draw: int = 0
) -> tuple[Payload, Tensor | None]:
    """Return the payload and the agreement of a world of one rank."""
    asked = codec.propose_agreement(vector)
    agreed = None if asked is None else codec.conclude_agreement(asked)
    return codec.compress(vector, agreed, draw), agreed


def compress_and_extract(
    text: str, vector: Tensor, shape: Sequence[int] | None = None, draw: int = 0
) -> Tensor:
    """Return the vector after compression and extraction."""
    codec = build_codec(resolve_compressor(text), shape or vector.shape)
    payload, agreed = compress_on_one_rank(codec, vector, draw)
    return codec.extract(payload, agreed).to(vector.dtype)


@st.composite
def draw_vectors(draw: st.DrawFn) -> Tensor:
    """Draw vectors of odd lengths, over several chunks, with zeros and any magnitudes."""
    elements = draw(st.integers(1, 3 * CHUNK_ELEMENTS + 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    vector = torch.randn(
        elements, generator=generator, dtype=draw(st.sampled_from([torch.float32, torch.float64]))
    )
    vector *= 10.0 ** draw(st.integers(-6, 6))
    vector[torch.rand(elements, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0.0
    return vector


# ---- error of the extracted vector --------------------
@given(draw_vectors(), st.sampled_from([0.001, 0.01, 0.3, 1.0]))
def test_top_k_sends_the_k_largest_entries(vector: Tensor, ratio: float) -> None:
    found = find_largest(vector, count := count_top_entries(ratio, len(vector)))
    assert (
        len(found)
        == len(found.unique())
        == count
        == max(1, min(len(vector), math.ceil(ratio * len(vector) - 1e-9)))
    )
    left = torch.ones(len(vector), dtype=torch.bool)
    left[found] = False
    assert not left.any() or vector[left].abs().max() <= vector[found].abs().min()
    out = compress_and_extract(f"top_k({ratio})", vector)
    assert torch.equal(out[found], vector[found])
    # the sent part has at least this ratio of the squared norm (Stich et al. 2018, lemma A.1)
    assert float((vector - out).square().sum()) <= (1 - count / len(vector)) * float(
        vector.square().sum()
    ) * (1 + 1e-5)


@pytest.mark.parametrize("elements", [EXACT_SEARCH_LIMIT, EXACT_SEARCH_LIMIT + 1, 100_003])
@pytest.mark.parametrize("kind", ["normal", "rows", "zeros", "equal", "few large", "sorted"])
@pytest.mark.parametrize("ratio", [0.0005, 0.01, 0.5])
def test_largest_entries_are_found_with_a_bad_sample(
    elements: int, kind: str, ratio: float
) -> None:
    """The bound is estimated from every n-th entry.

    Rows of zeros, or of large entries, make the estimate wrong.
    """
    vector = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    if kind == "rows":
        vector[torch.arange(elements) % 64 < 60] = 0.0
    elif kind == "zeros":
        vector[7:] = 0.0
    elif kind == "equal":
        vector = torch.full((elements,), -0.5)
    elif kind == "few large":
        vector[:: elements // 8192 | 1] *= 1000.0
    elif kind == "sorted":
        vector = vector.sort().values
    found = find_largest(vector, count := count_top_entries(ratio, elements))
    assert len(found.unique()) == len(found) == count
    assert torch.equal(
        vector[found].abs().sort().values, vector.abs().topk(count, sorted=True).values.flip(0)
    )


@given(draw_vectors(), st.floats(0.0, 2.0))
def test_threshold_sends_exact_values_above_it(vector: Tensor, at: float) -> None:
    out = compress_and_extract(f"threshold({at!r})", vector)
    assert torch.equal(out, torch.where(vector.abs() > at, vector, 0.0))


@given(draw_vectors(), st.integers(0, 2**32 - 1))
def test_int8_is_within_a_step_of_its_chunk(vector: Tensor, draw: int) -> None:
    out = compress_and_extract("int8", vector, draw=draw)
    for start in range(0, len(vector), CHUNK_ELEMENTS):
        chunk = vector[start : start + CHUNK_ELEMENTS]
        step = float(chunk.abs().max()) / 127
        assert (
            float((out[start : start + CHUNK_ELEMENTS] - chunk).abs().max())
            <= step * (1 + 1e-5) + 1e-38
        )


def test_int8_is_unbiased() -> None:
    """The mean of 4,000 draws is within five standard errors of the vector.

    Rounding to the nearest would be off by up to half a step.
    """
    vector = torch.linspace(-1.0, 1.0, 257, dtype=torch.float64)
    codec = build_codec(resolve_compressor("int8"), vector.shape)
    every = torch.stack([codec.extract(codec.compress(vector, None, draw)) for draw in range(4000)])
    error = (every.mean(0) - vector).abs()
    assert bool((error <= 5 * every.std(0) / math.sqrt(4000) + 1e-9).all())
    assert len(every.unique(dim=0)) > 1000


@given(draw_vectors())
def test_one_bit_sends_the_means_of_a_chunk(vector: Tensor) -> None:
    out = compress_and_extract("one_bit", vector)
    for start in range(0, len(vector), CHUNK_ELEMENTS):
        chunk = vector[start : start + CHUNK_ELEMENTS]
        found = out[start : start + CHUNK_ELEMENTS]
        for side in (chunk >= 0, chunk < 0):
            if side.any():
                wanted = float(chunk[side].mean())
                assert (
                    float((found[side] - wanted).abs().max())
                    <= 1e-6 * float(chunk.abs().max()) + 1e-38
                )


@given(draw_vectors())
def test_half_precision_is_within_half_a_unit_in_last_place(vector: Tensor) -> None:
    assert bool(
        (
            (compress_and_extract("bf16", vector) - vector).abs() <= vector.abs() * 2.0**-8 + 1e-38
        ).all()
    )
    top = float(vector.abs().max())
    assert bool(
        (
            (compress_and_extract("fp16", vector) - vector).abs()
            <= vector.abs() * 2.0**-11 + top * 2.0**-38
        ).all()
    )


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 8), st.integers(0, 2**31))
def test_power_sgd_is_lossless_at_full_rank_else_a_projection(
    rows: int, others: int, columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    narrow = torch.randn(rows, min(columns, rows, others), generator=generator, dtype=torch.float64)
    low = (
        narrow @ torch.randn(narrow.shape[1], others, generator=generator, dtype=torch.float64)
    ).view(-1)
    out = compress_and_extract(f"power_sgd({columns})", low, (rows, others))
    assert float((out - low).norm()) <= 1e-6 * float(low.norm())
    full = torch.randn(rows * others, generator=generator, dtype=torch.float64)
    left = full - compress_and_extract(f"power_sgd({columns})", full, (rows, others))
    assert float(left.norm()) <= float(full.norm()) * (1 + 1e-9)
    # the rest is orthogonal to the sent part
    assert abs(float(left @ (full - left))) <= 1e-6 * float(full @ full)


def test_power_sgd_continues_from_the_last_step() -> None:
    """Each step is one step of the power method.

    Repeated on the same matrix, it gives the largest singular vectors.
    """
    matrix = torch.randn(30, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    codec = build_codec(resolve_compressor("power_sgd(2)"), matrix.shape)
    for _ in range(200):
        payload, agreed = compress_on_one_rank(codec, matrix.view(-1))
        codec.adopt_sum(payload)
    u, s, v = torch.linalg.svd(matrix)
    best = (u[:, :2] * s[:2]) @ v[:2]
    assert torch.allclose(codec.extract(payload, agreed).view(30, 20), best, atol=1e-6)


def test_power_sgd_restarts_after_a_zero_factor() -> None:
    """Earlier, after a gradient of zeros, nothing was sent any more if some rows were always 0.

    A gradient is zero below a head that begins as zeros. The next factor is then the first rows of
    the matrix. Those can always be 0, such as the padding rows of an embedding.
    """
    codec = build_codec(resolve_compressor("power_sgd(2)"), (100, 60))
    feedback = ErrorFeedback()
    generator = torch.Generator().manual_seed(5)
    for step in range(30):
        matrix = torch.randn(100, 60, generator=generator, dtype=torch.float64) * (step > 0)
        matrix[:2] = 0.0
        vector = feedback.compensate_gradient("w", matrix, 1.0)
        payload, agreed = compress_on_one_rank(codec, vector)
        feedback.note_sent("w", codec, payload, agreed)
        codec.adopt_sum(payload)
    assert float(codec.extract(payload, agreed).norm()) > 0
    assert float(feedback.residual["w"].norm()) < 30**0.5 * 60 * 10


def test_fp16_of_float64_handles_its_range() -> None:
    """Earlier, numbers outside of the range of float32 came back as inf.

    For numbers near zero, no power of two was found as their scale.
    """
    for most in (1e60, 1e-320, 1e300):
        vector = torch.tensor([most, -most / 2, 0.0], dtype=torch.float64)
        out = compress_and_extract("fp16", vector)
        assert float((out - vector).abs().max()) <= most * 2.0**-11 + 2.0**-149


# ---- sizes --------------------
@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (text, shape)
        for text in ("top_k(0.01)", "one_bit", "int8", "power_sgd(2)", "bf16", "fp16", "dgc(0.01)")
        for shape in ((64, 32), (2049,), (17, 5, 3, 11), (30, 4096))
        if resolve_compressor(text).compresses(shape)
    ],
)
def test_payload_size_is_what_the_compressor_says(text: str, shape: tuple[int, ...]) -> None:
    chosen = resolve_compressor(text)
    vector = torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(1))
    codec = build_codec(chosen, shape)
    payload, _ = compress_on_one_rank(codec, vector)
    wanted = chosen.sends(shape, 4)
    # the factor that all ranks agree on is sent before
    if isinstance(codec, PowerSgdCodec):
        wanted -= codec.rows * codec.columns * 4
    assert sum(each.nbytes for each in payload) == wanted


def test_small_tensors_are_not_compressed() -> None:
    for name in CODEC_MODULES:
        text = {"threshold": "threshold(0.1)", "top_k": "top_k(0.1)", "dgc": "dgc(0.1)"}.get(
            name, name
        )
        halves = name in ("bf16", "fp16")
        assert resolve_compressor(text).compresses((MIN_COMPRESSED_ELEMENTS - 1,)) is halves
        assert resolve_compressor(text).compresses(
            (2 * MIN_COMPRESSED_ELEMENTS, 2 * MIN_COMPRESSED_ELEMENTS)
        )
    # its factors would be twice as large as the matrix
    assert not resolve_compressor("power_sgd(64)").compresses((64, 64))
    assert compute_matrix_shape((8, 3, 5, 5)) == (8, 75)


def test_payloads_of_any_types_share_one_message() -> None:
    payloads = [
        (torch.arange(3, dtype=torch.int8), torch.randn(2, 1)),
        (torch.arange(5), torch.randn(5, dtype=torch.float64)),
        (torch.empty(0, dtype=torch.int32), torch.empty(0)),
    ]
    kinds = [[(each.dtype, tuple(each.shape)) for each in payload] for payload in payloads]
    message = pack_payloads(payloads, CPU)
    assert len(message) == count_message_bytes(kinds)
    for came, sent in zip(unpack_payloads(message, kinds), payloads, strict=True):
        assert all(map(torch.equal, came, sent))


# ---- non-finite values --------------------
@pytest.mark.parametrize(
    "text", ["top_k(0.01)", "threshold(0.1)", "one_bit", "int8", "power_sgd(2)", "bf16", "fp16"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused(text: str, value: float) -> None:
    vector = torch.randn(40_000)
    vector[12_345] = value
    with pytest.raises(StepFailed, match="not finite"):
        compress_and_extract(text, vector, (200, 200))


# ---- residuals --------------------
@settings(max_examples=30)
@given(
    st.sampled_from(["top_k(0.1)", "threshold(0.5)", "one_bit", "power_sgd(1)"]),
    st.integers(1, 12),
    st.integers(0, 2**31),
)
def test_sent_and_kept_values_sum_to_all_gradients(text: str, steps: int, seed: int) -> None:
    """In float64, over steps: nothing is lost, nothing counts twice."""
    generator = torch.Generator().manual_seed(seed)
    shape = (60, 70)
    feedback = ErrorFeedback()
    codec = build_codec(resolve_compressor(text), (60, 70))
    whole = torch.zeros(shape, dtype=torch.float64)
    sent = torch.zeros(60 * 70, dtype=torch.float64)
    for _ in range(steps):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        whole += 0.25 * gradient
        vector = feedback.compensate_gradient("w", gradient, 0.25)
        payload, agreed = compress_on_one_rank(codec, vector)
        codec.add(payload, sent, agreed)
        feedback.note_sent("w", codec, payload, agreed)
        codec.adopt_sum(payload)
    assert torch.allclose(sent + feedback.residual["w"], whole.view(-1), atol=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 20), st.sampled_from([0.0, 0.5, 0.9]), st.booleans(), st.integers(0, 2**31))
def test_momentum_correction_equals_the_closed_form(
    steps: int, momentum: float, nesterov: bool, seed: int
) -> None:
    """The kept value of an entry equals the updates of an SGD that begins after its last sending.

    Let the entry be sent last in step s. An SGD with momentum m begins anew after s, with the
    gradients g(s+1) ... g(T). After step T, the kept value is the sum of its updates:

        sum over t of g(t) (1 - m^(T - t + 1)) / (1 - m),        with Nesterov's momentum one
        power of m more
    """
    generator = torch.Generator().manual_seed(seed)
    elements = 3000
    feedback = MomentumCorrection(lambda name: (momentum, nesterov))
    codec = build_codec(resolve_compressor("dgc(0.05)"), (elements,))
    gradients = []
    last = torch.full((elements,), -1)
    for step in range(steps):
        gradients.append(torch.randn(elements, generator=generator, dtype=torch.float64))
        vector = feedback.compensate_gradient("w", gradients[-1], 1.0)
        payload = codec.compress(vector)
        wanted = torch.zeros(elements, dtype=torch.float64)
        for t, gradient in enumerate(gradients):
            wanted += torch.where(
                t > last, gradient * sum_update_factors(step - t, momentum, nesterov), 0.0
            )
        assert torch.allclose(vector, wanted, atol=1e-12)
        assert torch.equal(payload[1], vector[payload[0].long()])
        feedback.note_sent("w", codec, payload, None)
        last[payload[0].long()] = step
        assert not feedback.residual["w"][payload[0].long()].any()
        # without momentum there is no velocity
        assert not (momentum and feedback.velocity["w"][payload[0].long()].any())


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_masking_no_momentum_is_lost(nesterov: bool) -> None:
    """Sent and kept values add up to all updates that SGD with momentum makes of all gradients."""
    feedback = MomentumCorrection(lambda name: (0.9, nesterov), masking=False)
    codec = build_codec(resolve_compressor("dgc(0.05)"), (3000,))
    sent = torch.zeros(3000, dtype=torch.float64)
    gradients = []
    generator = torch.Generator().manual_seed(4)
    for step in range(20):
        gradients.append(torch.randn(3000, generator=generator, dtype=torch.float64))
        payload = codec.compress(feedback.compensate_gradient("w", gradients[-1], 1.0))
        feedback.note_sent("w", codec, payload, None)
        codec.add(payload, sent)
        whole = sum(
            each * sum_update_factors(step - t, 0.9, nesterov) for t, each in enumerate(gradients)
        )
        assert torch.allclose(sent + feedback.residual["w"], whole, atol=1e-11)


def sum_update_factors(after: int, momentum: float, nesterov: bool) -> float:
    """Return the factor of a gradient in the weights, so many steps after its own step."""
    powers = [momentum**each for each in range(after + 2)]
    return sum(powers) if nesterov else sum(powers[:-1])


def test_residuals_are_divided_over_another_number_of_ranks() -> None:
    kept = {
        "w": {
            make_residual_key("residual", rank): torch.arange(3.0) + 10 * rank for rank in range(4)
        }
    }
    assert torch.equal(load_residual(kept, "w", "residual", 2, 4), torch.arange(3.0) + 20)
    parts = [load_residual(kept, "w", "residual", rank, 3) for rank in range(3)]
    assert torch.allclose(sum(parts[1:], parts[0]), 4 * torch.arange(3.0) + 60)
    assert load_residual(kept, "v", "residual", 0, 3) is None


# ---- the notation --------------------
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("top_k(0)", "a number above 0, at most 1"),
        ("top_k(1.5)", "at most 1"),
        ("threshold(-1)", "a number from 0"),
        ("power_sgd(0)", "a whole number from 1"),
        ("dgc(0.01, momentum=1)", "never forgets"),
        ("dgc(0.01, warmup=-1)", "from 0"),
        ("dgc(2)", "at most 1"),
        ("topk(0.1)", "did you mean top_k?"),
    ],
)
def test_invalid_codec_input_has_a_repair(text: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        strategy(f"data(2, compress={text})")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data(2, reduce=ring, compress=int8)", "an all-reduce cannot add what int8 sends"),
        ("data(2, reduce=ring, compress=one_bit)", "leave out reduce=ring"),
        ("data(2, state=shared_memory, compress=top_k(0.1))", "an exchange of its own"),
        ("data(2, state=fully_sharded, compress=bf16)", "an exchange of its own"),
        ("data(2, dense=tensor, compress=bf16)", "leave out compress"),
    ],
)
def test_unsuitable_compressors_are_refused(text: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        strategy(text)


def test_only_lossless_compressors_are_exact() -> None:
    exact = [
        text
        for text in (
            "top_k(1.0)",
            "threshold(0)",
            "top_k(0.5)",
            "int8",
            "bf16",
            "dgc(1.0)",
            "power_sgd(64)",
        )
        if strategy(f"data(2, compress={text})").exact
    ]
    assert exact == ["top_k(1.0)", "threshold(0)"]


def test_dgc_ratio_falls_by_equal_factors() -> None:
    """Lin et al. 2018, section 3.3: 75, 93.75, 98.4375, 99.6 and 99.9 % are left out."""
    found = [pg.Dgc(0.001).adapt_to_epoch(epoch).ratio for epoch in range(6)]
    assert found == pytest.approx([0.251, 0.0631, 0.0158, 0.00398, 0.001, 0.001], rel=1e-2)
    assert pg.Dgc(0.01, warmup=0).adapt_to_epoch(0) == pg.Dgc(0.01, warmup=0)
