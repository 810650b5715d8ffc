"""Reproducible sums: the same bits for every order and grouping, and errors within the bound.

The numbers are difficult cases for floats.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest
import torch

from paragrad.parallel.data.reproducible_sum import (
    INTEGER_BITS,
    NOT_FINITE_EXPONENT,
    SMALLEST_EXPONENT,
    compute_exponent,
    convert_to_floats,
    convert_to_integers,
)

pytestmark = pytest.mark.pure

TYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
ADVERSARIAL = {
    "cancels": [[1e16, 1.0], [1.0, -1e16], [-1e16, 1e16], [1.0, 1e-8]],
    "tiny beside huge": [
        [2.0**52 + 1, 2.0**-30],
        [0.5, 2.0**-31],
        [0.25, 2.0**-32],
        [-(2.0**52), 2.0**-33],
    ],
    "halves": [[0.1, 1 / 3], [0.2, 2 / 3], [0.3, -1.0], [-0.6, 1e-17]],
    "subnormal": [[5e-324, 2.2e-308], [5e-324, -2.2e-308], [1e-310, 3e-308], [-1e-310, 1e-300]],
    "the largest": [[1.7e308, -1.7e308], [-1.7e308, 1.7e308], [1e292, 1e300], [1e291, -1e299]],
    "zeros": [[0.0, -0.0], [0.0, 0.0], [-0.0, 0.0], [0.0, 1.0]],
}


def sum_in_order(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the vectors as ranks compute it, in the order of the list."""
    shift = INTEGER_BITS - max(map(compute_exponent, vectors)) - (len(vectors) - 1).bit_length()
    whole = convert_to_integers(vectors[0], shift)
    for vector in vectors[1:]:
        whole += convert_to_integers(vector, shift)
    out = torch.empty_like(vectors[0])
    convert_to_floats(whole, shift, out)
    return out


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_every_order_gives_the_same_bits_within_the_bound(case: str) -> None:
    vectors = [torch.tensor(row, dtype=torch.float64) for row in ADVERSARIAL[case]]
    results = [sum_in_order(list(order)) for order in permutations(vectors)]
    assert all(torch.equal(result, results[0]) for result in results)
    unit = Fraction(2) ** (max(map(compute_exponent, vectors)) + 2 - INTEGER_BITS)
    for place, column in enumerate(zip(*ADVERSARIAL[case], strict=True)):
        exact = sum(map(Fraction, column))
        rounding = abs(exact) * Fraction(2) ** -53 + Fraction(5e-324)
        assert abs(Fraction(results[0][place].item()) - exact) <= len(vectors) * unit / 2 + rounding


def test_plain_sums_depend_on_the_order() -> None:
    """Plain sums of these cases depend on the order; otherwise the cases would show nothing."""
    for case in ("cancels", "tiny beside huge", "halves"):
        vectors = [torch.tensor(row, dtype=torch.float64) for row in ADVERSARIAL[case]]
        results = {tuple(sum(order).tolist()) for order in permutations(vectors)}
        assert len(results) > 1, case


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_is_summed_reproducibly(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vectors = [
        (torch.randn(500) * 10.0 ** torch.randint(-3, 4, (500,))).to(dtype) for _ in range(5)
    ]
    forth = sum_in_order(vectors)
    back = sum_in_order(vectors[::-1])
    assert forth.dtype == dtype
    assert torch.equal(forth, back)
    exact = torch.stack([vector.double() for vector in vectors]).sum(0)
    assert torch.allclose(forth.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-12)


def test_float32_is_rounded_once() -> None:
    """The sum of float32 numbers is rounded once.

    With a step through float64, it would be rounded to a tie, and then to the even neighbour below.
    """
    vectors = [torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-55)]
    assert sum_in_order(vectors).item() == 1.0 + 2.0**-23


def test_exponent_extraction() -> None:
    assert compute_exponent(torch.tensor([0.75, -3.0])) == 2
    assert compute_exponent(torch.tensor([4.0])) == 3  # 4 < 2^3, and not < 2^2
    assert (
        compute_exponent(torch.tensor([], dtype=torch.float64))
        == compute_exponent(torch.zeros(3))
        == SMALLEST_EXPONENT
    )
    for bad in (float("inf"), float("nan"), -float("inf")):
        assert compute_exponent(torch.tensor([1.0, bad])) == NOT_FINITE_EXPONENT
