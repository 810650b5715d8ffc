"""Techniques that are known by name and not built yet: the notation reads and prints them, the door refuses them.

Each moves to a room of its own when it is built.
"""

from __future__ import annotations

from typing import ClassVar

from paragrad.notation.choices import Choice, Decimal, Integer, Word, option


class Planned(Choice, abstract=True):
    """Known by name, not built."""
    __slots__ = ()
    built: ClassVar[bool] = False


# ---- gradient compression --------------------------------------------------------------------------------------------
class Threshold(Planned):
    """Send what exceeds a fixed threshold (Strom 2015)."""
    at: float = option(Decimal())


class TopK(Planned):
    """Send the largest entries (Aji & Heafield 2017)."""
    ratio: float = option(Decimal(most=1.0))


class OneBit(Planned):
    """Send signs, feed the error back (Seide et al. 2014)."""


class Int8(Planned):
    """Send eight-bit integers with a scale (Alistarh et al. 2017, QSGD)."""


class PowerSgd(Planned):
    """Send a low-rank factorisation (Vogels et al. 2019)."""
    columns: int = option(Integer(), default=1)


class Bf16(Planned):
    """Send bfloat16."""


class Fp16(Planned):
    """Send float16."""


class Dgc(Planned):
    """Deep gradient compression: top-k with momentum correction (Lin et al. 2018)."""
    ratio: float = option(Decimal(most=1.0))
    momentum: float | str = option(Decimal(above=-1e-300, most=1.0), Word("auto"), default="auto")
    warmup: int = option(Integer(0), default=4)              # epochs
    clip: float | None = option(Decimal(), Word("none"), default=None)


COMPRESSORS = (Threshold, TopK, OneBit, Int8, PowerSgd, Bf16, Fp16, Dgc)
