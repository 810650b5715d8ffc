"""`reproducible=true`: the same bits from every algorithm, order and grouping of the same
contributions.

Floats do not add associatively; whole numbers do. So the vectors are rounded to multiples of
one unit that all ranks agree on, added as 64-bit integers along any schedule, and turned back
once (the idea of Demmel & Nguyen 2013, doi 10.1109/ARITH.2013.9, and of Kulisch's accumulator,
with one word):

    E: all |x| < 2^E, on all ranks (one all-reduce of a maximum)      u = 2^(E + ceil(lg p) -
    62)      error at most p u / 2

p numbers below 2^(62 - ceil(lg p)) in size add up to less than 2^62: nothing overflows. In
float32, whose own last place at 2^E is 2^(E-24), u is finer than that by a factor of 2^38 / p.
It costs that one small all-reduce, and eight bytes a number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.executors.transport import Traffic, run_all_reduce
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.runtime.world import World
from paragrad.schedules.actions import Collective, Compute

INTEGER_BITS = 62
BLOCK_ELEMENTS = 1 << 15  # numbers converted at a time: they stay in the cache
# exponent below which numbers count as 0: u and 1/u stay normal float64
SMALLEST_EXPONENT = -900
NOT_FINITE_EXPONENT = 1 << 20  # an exponent no number has


def reproducible_all_reduce(
    schedule: Collective,
    vector: Tensor,
    world: World,
    compute: Callable[[Compute, Tensor], None] | None = None,
) -> Traffic:
    """Sum a contiguous vector of floats over all ranks, in place. Collective; the small
    all-reduce counts as waiting.

    compute: as `all_reduce` takes it, of whole numbers here.
    Raises StepFailed, on every rank, where a number is not finite.
    """
    start = time.monotonic()
    mine = compute_exponent(vector)
    asked = time.monotonic()
    largest = int(world.all_reduce(torch.tensor([mine]), "MAX"))
    waiting = time.monotonic() - asked
    if largest == NOT_FINITE_EXPONENT:
        where = "here" if mine == NOT_FINITE_EXPONENT else "on another rank"
        raise StepFailed(
            f"a gradient is not finite {where}: a reproducible sum needs finite numbers"
        )
    shift = INTEGER_BITS - largest - (world.size - 1).bit_length()
    whole = convert_to_integers(vector, shift)
    traffic = run_all_reduce(schedule, whole, world, compute)
    convert_to_floats(whole, shift, vector)
    waiting += traffic.waiting
    return Traffic(
        traffic.bytes + count_collective_bytes("all_reduce", 8, world.size),
        waiting,
        traffic.transfer,
        time.monotonic() - start - waiting - traffic.transfer,
    )


def compute_exponent(vector: Tensor) -> int:
    """The least E (from SMALLEST on) with all |x| < 2^E; NOT_FINITE where there is a number
    that is not.
    """
    lowest, highest = map(float, vector.aminmax()) if vector.numel() else (0.0, 0.0)
    largest = max(-lowest, highest)  # not a number, both are
    if not math.isfinite(largest):
        return NOT_FINITE_EXPONENT
    return max(math.frexp(largest)[1], SMALLEST_EXPONENT) if largest else SMALLEST_EXPONENT


def convert_to_integers(vector: Tensor, shift: int) -> Tensor:
    """round(x 2^shift) as int64. Exact but for the rounding, because the factor is normal
    float64 (|shift| < 1000).
    """
    whole = torch.empty_like(vector, dtype=torch.int64)
    for piece, out in zip(vector.split(BLOCK_ELEMENTS), whole.split(BLOCK_ELEMENTS), strict=True):
        out.copy_(piece.to(torch.float64, copy=True).mul_(2.0**shift).round_())
    return whole


def convert_to_floats(integers: Tensor, shift: int, out: Tensor) -> None:
    """The integers times 2^-shift, rounded to out's type: once, before the factor, which
    changes the exponent alone (types of 16 bits: by way of float64).
    """
    for piece, into in zip(integers.split(BLOCK_ELEMENTS), out.split(BLOCK_ELEMENTS), strict=True):
        rounded = piece.to(torch.float32).double() if out.dtype == torch.float32 else piece.double()
        into.copy_(rounded.mul_(2.0**-shift))
