"""Compressors: what is sent in the place of a gradient. Known by their names, without torch;
`parallel/compression/` makes what they say.

A tensor is compressed by itself, so what is kept of it (what was not sent yet) does not depend
on which tensors travel together. Small ones are not: they weigh nothing on a link, and indices
would be most of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from paragrad.errors import Refused
from paragrad.notation.choices import Decimal, Family, Flag, Integer, Word, option
from paragrad.strategies.job_facts import OptimizerFacts
from paragrad.strategies.strategy import Strategy, list_factors

MIN_COMPRESSED_ELEMENTS = 2048  # elements: of fewer, tensors are sent as they are
CHUNK_ELEMENTS = 1024  # elements that share a scale


class Compressor(Family, abstract=True):
    """What is sent in the place of a gradient, as a value.

    One of your own says how many bytes it `sends`, and brings a `codec`. sums: what stands for
    the gradients of several ranks is added up by an all-reduce; otherwise every rank is given
    all of them;  feedback: what was not sent is added to the next gradient;  agrees: ranks tell
    each other something first;  lossless: nothing is lost.
    """

    __slots__ = ()
    sums: ClassVar[bool] = False
    feedback: ClassVar[bool] = True
    agrees: ClassVar[bool] = False
    lossless = False
    if TYPE_CHECKING:  # of one of a user's own

        def codec(self, shape: Sequence[int], key: int) -> Any: ...

    def compresses(self, shape: Sequence[int]) -> bool:
        """Is a tensor of that shape compressed, or sent as it is?"""
        return prod(shape) >= MIN_COMPRESSED_ELEMENTS

    def sends(self, shape: Sequence[int], item: int) -> float:
        """Bytes that stand for a tensor of elements of `item` bytes, which is compressed; by a
        threshold, nobody knows.
        """
        return float(prod(shape) * item)

    def adapt_to_epoch(self, epoch: int) -> Self:
        """What it is in an epoch, counted from 0."""
        return self

    @property
    def pricing_refusal(self) -> str:
        """Why an all-reduce of what it sends is not priced, with the repair."""
        return f"what is simulated is an all-reduce of whole vectors; leave out compress={self}"

    def refuse_all_reduce(self, strategy: str, reduce: object) -> None:
        """Refuse an all-reduce of ours for what does not add up."""
        if not self.sums:
            raise Refused(
                f"{strategy}: what {self.name} sends does not add up along an all-reduce: every "
                f"rank is given all of "
                f"it; leave out reduce={reduce}, or compress by bf16, fp16 or power_sgd"
            )

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: object) -> None:
        """Refuse an optimizer, with the repair."""

    def refuse_hook(
        self, optimizer_facts: OptimizerFacts | None, steps_per_epoch: int | None
    ) -> None:
        """The same of a hook of DDP's, which is given the optimizer and steps per epoch, or
        not.
        """
        if optimizer_facts is not None or steps_per_epoch is not None:
            raise Refused(
                f"hook('{self}') wants no optimizer and no steps_per_epoch, which dgc has a use "
                f"for; leave them out"
            )


def find_compressor(strategy: Strategy) -> Compressor | None:
    """What a strategy, or a factor of it, compresses by, if one does."""
    asked = (getattr(each, "compress", None) for each in list_factors(strategy))
    return next((each for each in asked if isinstance(each, Compressor)), None)


def count_top_entries(ratio: float, elements: int) -> int:
    """So many entries of a tensor are a ratio of it: at least one."""
    # 0.07 * 100 is a little more than 7
    return min(elements, max(1, ceil(ratio * elements - 1e-9)))


def count_index_bytes(elements: int) -> int:
    """Of a position in a tensor, on the wire."""
    return 4 if elements < 2**31 else 8


class Threshold(Compressor):
    """The entries whose magnitude is above a threshold, with their values (Strom 2015, who
    sends the threshold itself).
    """

    at: float = option(Decimal(above=-1e-300))

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.at == 0


class TopK(Compressor):
    """The entries of largest magnitude (Aji & Heafield 2017)."""

    ratio: float = option(Decimal(most=1.0))

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.ratio == 1

    def sends(self, shape: Sequence[int], item: int) -> float:
        elements = prod(shape)
        return float(count_top_entries(self.ratio, elements) * (item + count_index_bytes(elements)))


class OneBit(Compressor):
    """Signs, and for each chunk two values that stand for them (Seide et al. 2014)."""

    def sends(self, shape: Sequence[int], item: int) -> float:
        elements = prod(shape)
        return ceil(elements / 8) + 2 * 4 * ceil(elements / CHUNK_ELEMENTS)


class Int8(Compressor):
    """Whole numbers of eight bits, rounded by chance so that they are right on average, and a
    scale for each chunk (Alistarh et al. 2017, QSGD). Nothing is fed back, as published.
    """

    feedback = False

    def sends(self, shape: Sequence[int], item: int) -> float:
        elements = prod(shape)
        return elements + 4 * ceil(elements / CHUNK_ELEMENTS)


class PowerSgd(Compressor):
    """A matrix as the product of two narrow ones (Vogels et al. 2019)."""

    columns: int = option(Integer(), default=1)
    sums = True
    agrees = True

    def compresses(self, shape: Sequence[int]) -> bool:
        """Where it halves the bytes at least."""
        rows, others = compute_matrix_shape(shape)
        return super().compresses(shape) and 2 * (rows + others) * self.columns < rows * others

    def sends(self, shape: Sequence[int], item: int) -> float:
        return float(sum(compute_matrix_shape(shape)) * self.columns * item)


def compute_matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor taken as a matrix: its first dimension by all others."""
    return (shape[0], prod(shape[1:])) if len(shape) else (1, 1)


class HalfPrecision(Compressor, abstract=True):
    """Every number in two bytes. Nothing is fed back, as is usual."""

    sums = True
    feedback = False

    def compresses(self, shape: Sequence[int]) -> bool:
        return True

    def sends(self, shape: Sequence[int], item: int) -> float:
        return float(2 * prod(shape))


class Bf16(HalfPrecision):
    """bfloat16: 8 bits of precision, and the range of float32."""


class Fp16(HalfPrecision):
    """float16: 11 bits of precision; all ranks agree on a power of two by which a tensor's sum
    fits its range.
    """

    agrees = True


class Dgc(Compressor):
    """Deep gradient compression: the entries of largest magnitude of accumulated velocities
    (Lin et al. 2018).

    momentum: `auto` is taken over from the job's SGD;  warmup: epochs in which the ratio comes
    down to its own;  clip: norm of the gradient of all ranks, to which each clips its own;
    masking: the velocity of what is sent is 0 from there on.
    """

    ratio: float = option(Decimal(most=1.0))
    momentum: float | str = option(Decimal(above=-1e-300, most=1.0), Word("auto"), default="auto")
    warmup: int = option(Integer(0), default=4)
    clip: float | None = option(Decimal(), Word("none"), default=None)
    masking: bool = option(Flag(), default=True)

    def check_options(self) -> None:
        if self.momentum == 1:
            raise Refused("dgc(momentum=1) never forgets a gradient; give it a momentum below 1")

    def sends(self, shape: Sequence[int], item: int) -> float:
        return TopK(self.ratio).sends(shape, item)

    def adapt_to_epoch(self, epoch: int) -> Self:
        """Its ratio comes down from 1 in equal factors (as the authors' repository has it:
        0.001 by way of 0.25, 0.063, 0.016 and 0.004).
        """
        return replace(
            self, ratio=self.ratio ** (min(epoch + 1, self.warmup + 1) / (self.warmup + 1))
        )

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: object) -> None:
        """Momentum has one owner, and so has clipping."""
        if optimizer_facts.sgd_groups is None:
            raise Refused(
                f"{requested}: dgc keeps the momentum of an SGD, and {optimizer_facts.optimizer} "
                f"has a memory "
                f"of its own, which "
                f"sparse gradients would starve; use torch.optim.SGD, or "
                f"compress=top_k({self.ratio:g})"
            )
        for number, group in enumerate(optimizer_facts.sgd_groups):
            self.refuse_parameter_group(number, group, requested)
        if self.clip is not None and optimizer_facts.clip_norm is not None:
            raise Refused(
                f"{requested}: clipping is given twice, {self.clip:g} here and "
                f"clip_norm={optimizer_facts.clip_norm:g}; leave "
                "out one of them (dgc takes clip_norm over)"
            )

    def refuse_parameter_group(
        self, number: int, group: Mapping[str, Any], requested: object
    ) -> None:
        """Refuse what a group of an SGD says, before a training and in every step."""
        for what in ("dampening", "maximize"):
            if group.get(what):
                raise Refused(
                    f"{requested}: group {number} of the optimizer has {what}={group[what]}, which "
                    f"dgc "
                    f"does not take "
                    f"over; leave it out, or compress=top_k({self.ratio:g})"
                )
        if self.momentum != "auto" and group["momentum"]:
            raise Refused(
                f"{requested}: momentum is given twice, {self.momentum:g} here and "
                f"{group['momentum']:g} by group "
                f"{number} of the optimizer; leave it out here (what a scheduler makes of it is "
                f"taken over too), or "
                "let both begin and stay at 0 there"
            )

    def refuse_hook(
        self, optimizer_facts: OptimizerFacts | None, steps_per_epoch: int | None
    ) -> None:
        asked = f"hook('{self}')"
        if optimizer_facts is None:
            raise Refused(
                f"{asked} keeps the momentum of your SGD, which would count twice; give it "
                f"optimizer="
            )
        if self.clip is not None:
            raise Refused(
                f"{asked}: a hook sees some of the gradients at a time, and no norm of all; leave "
                f"out clip, or train "
                f"with data(n, compress={self})"
            )
        if steps_per_epoch is not None and steps_per_epoch not in Integer(most=float("inf")):
            raise Refused(
                f"{asked}: an epoch has a whole number of steps, from 1; got "
                f"steps_per_epoch={steps_per_epoch!r}"
            )
        if self.warmup and not steps_per_epoch:
            raise Refused(
                f"{asked} warms up over {self.warmup} epochs, of which DDP does not tell; give it "
                "steps_per_epoch=len(loader), or warmup=0"
            )
        self.refuse_optimizer(optimizer_facts, asked)


# ours
COMPRESSORS: tuple[type[Compressor], ...] = (
    Threshold,
    TopK,
    OneBit,
    Int8,
    PowerSgd,
    Bf16,
    Fp16,
    Dgc,
)
