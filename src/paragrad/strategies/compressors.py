"""Compressors: what is sent in place of a gradient.

A compressor is known by its name, without torch; `parallel/compression/` implements it. Each tensor
is compressed on its own. So its residual (the part not sent yet) does not depend on which tensors
travel together. Small tensors are not compressed: they hardly load a link, and indices would be
most of the message.
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

MIN_COMPRESSED_ELEMENTS = 2048  # tensors of fewer elements are sent as they are
CHUNK_ELEMENTS = 1024  # elements that share a scale


class Compressor(Family, abstract=True):
    """What is sent in place of a gradient, as a value.

    A class of your own returns from `sends` how many bytes it sends, and provides a `codec`.

    Attributes:
        sums: Whether an all-reduce can add up the payloads of several ranks. Otherwise every rank
            receives all of them.

        feedback: Whether the part that is not sent is added to the next gradient.

        agrees: Whether ranks exchange something before the payload.

        lossless: Whether nothing is lost.
    """

    __slots__ = ()
    renamed_members: ClassVar[Mapping[str, str]] = {
        **Family.renamed_members,
        "in_epoch": "adapt_to_epoch",
        "unpriced": "pricing_refusal",
        "refuse_reduce": "refuse_all_reduce",
        "refuse_updates": "refuse_optimizer",
        "refuse_hooked": "refuse_hook",
    }
    sums: ClassVar[bool] = False
    feedback: ClassVar[bool] = True
    agrees: ClassVar[bool] = False
    lossless = False
    if TYPE_CHECKING:  # a user's own class defines it

        def codec(self, shape: Sequence[int], key: int) -> Any: ...

    def compresses(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape is compressed; otherwise it is sent as it is.

        Args:
            shape: The shape of the tensor.
        """
        return prod(shape) >= MIN_COMPRESSED_ELEMENTS

    def sends(self, shape: Sequence[int], item: int) -> float:
        """Return the number of bytes of the payload of a compressed tensor.

        For a threshold this number is unknown: the result is that of the uncompressed tensor.

        Args:
            shape: The shape of the tensor.
            item: The bytes of one element.
        """
        return float(prod(shape) * item)

    def adapt_to_epoch(self, epoch: int) -> Self:
        """Return the compressor of an epoch.

        Args:
            epoch: The epoch, counted from 0.
        """
        return self

    @property
    def pricing_refusal(self) -> str:
        """Why an all-reduce of the payload has no price, with the repair."""
        return f"only an all-reduce of whole vectors is simulated; leave out compress={self}"

    def refuse_all_reduce(self, strategy: str, reduce: object) -> None:
        """Refuse one of our all-reduces for a payload that does not add up.

        Args:
            strategy: The name of the strategy, for the message.
            reduce: The all-reduce.

        Raises:
            Refused: If payloads do not add up.
        """
        if not self.sums:
            raise Refused(
                f"{strategy}: an all-reduce cannot add what {self.name} sends: every rank receives "
                f"all of it; leave out reduce={reduce}, or compress by bf16, fp16 or power_sgd"
            )

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: object) -> None:
        """Refuse an optimizer, with the repair.

        Args:
            optimizer_facts: The optimizer.
            requested: The strategy as written, for the message.

        Raises:
            Refused: If the compressor does not fit the optimizer.
        """

    def refuse_hook(
        self, optimizer_facts: OptimizerFacts | None, steps_per_epoch: int | None
    ) -> None:
        """Refuse the arguments of a communication hook of DDP, with the repair.

        Args:
            optimizer_facts: The optimizer that the hook got, or None.
            steps_per_epoch: The steps per epoch that the hook got, or None.

        Raises:
            Refused: If the compressor does not fit these arguments.
        """
        if optimizer_facts is not None or steps_per_epoch is not None:
            raise Refused(
                f"hook('{self}') takes no optimizer and no steps_per_epoch, which only dgc uses; "
                "leave them out"
            )


def find_compressor(strategy: Strategy) -> Compressor | None:
    """Return the compressor of a strategy or of one of its factors, or None."""
    candidates = (getattr(each, "compress", None) for each in list_factors(strategy))
    return next((each for each in candidates if isinstance(each, Compressor)), None)


def count_top_entries(ratio: float, elements: int) -> int:
    """Return how many entries of a tensor a ratio stands for: at least one.

    Args:
        ratio: The ratio of the entries.
        elements: The number of elements of the tensor.
    """
    # In floating point 0.07 * 100 is a little more than 7.
    return min(elements, max(1, ceil(ratio * elements - 1e-9)))


def count_index_bytes(elements: int) -> int:
    """Return the bytes of a position in a tensor of so many elements, in a message."""
    return 4 if elements < 2**31 else 8


class Threshold(Compressor):
    """Entries above a threshold, with their values (Strom 2015 sends the threshold itself).

    Attributes:
        at: The magnitude from which on an entry is sent.
    """

    at: float = option(Decimal(above=-1e-300))

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.at == 0


class TopK(Compressor):
    """The entries of largest magnitude (Aji & Heafield 2017).

    Attributes:
        ratio: The part of the entries that is sent, above 0 and at most 1.
    """

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
    """Eight-bit integers with stochastic rounding, a scale per chunk (Alistarh et al. 2017, QSGD).

    The rounding is unbiased. There is no error feedback, as published.
    """

    feedback = False

    def sends(self, shape: Sequence[int], item: int) -> float:
        elements = prod(shape)
        return elements + 4 * ceil(elements / CHUNK_ELEMENTS)


class PowerSgd(Compressor):
    """A matrix as the product of two narrow ones (Vogels et al. 2019).

    Attributes:
        columns: The number of columns of the narrow matrices (the rank of the approximation).
    """

    columns: int = option(Integer(), default=1)
    sums = True
    agrees = True

    def compresses(self, shape: Sequence[int]) -> bool:
        """Return whether the product has at most half the bytes of the tensor."""
        rows, columns = compute_matrix_shape(shape)
        return super().compresses(shape) and 2 * (rows + columns) * self.columns < rows * columns

    def sends(self, shape: Sequence[int], item: int) -> float:
        return float(sum(compute_matrix_shape(shape)) * self.columns * item)


def compute_matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor viewed as a matrix: its first dimension by all others."""
    return (shape[0], prod(shape[1:])) if len(shape) else (1, 1)


class HalfPrecision(Compressor, abstract=True):
    """Every number in two bytes, without error feedback, as is usual."""

    sums = True
    feedback = False

    def compresses(self, shape: Sequence[int]) -> bool:
        return True

    def sends(self, shape: Sequence[int], item: int) -> float:
        return float(2 * prod(shape))


class Bf16(HalfPrecision):
    """bfloat16: 8 bits of precision, and the range of float32."""


class Fp16(HalfPrecision):
    """float16: 11 bits of precision, with a scale per tensor.

    All ranks agree on a power of two with which the sum of a tensor fits the range.
    """

    agrees = True


class Dgc(Compressor):
    """Deep gradient compression: the largest entries of accumulated velocities (Lin et al. 2018).

    Attributes:
        ratio: The ratio of the entries that are sent.

        momentum: The momentum; `auto` takes it over from the SGD of the job.

        warmup: The epochs in which the ratio comes down to `ratio`.

        clip: The norm of the gradient of all ranks to which each rank clips its own.

        masking: Whether the velocity of the sent entries is set to 0.
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
        """Return the compressor of an epoch: the ratio comes down from 1 in equal factors.

        The repository of the authors has the same: 0.001 by way of 0.25, 0.063, 0.016 and 0.004.
        """
        return replace(
            self, ratio=self.ratio ** (min(epoch + 1, self.warmup + 1) / (self.warmup + 1))
        )

    def refuse_optimizer(self, optimizer_facts: OptimizerFacts, requested: object) -> None:
        """Refuse an optimizer: momentum has one owner, and so has clipping.

        Args:
            optimizer_facts: The optimizer.
            requested: The strategy as written, for the message.

        Raises:
            Refused: If it is no SGD, or if momentum or clipping is set twice.
        """
        if optimizer_facts.sgd_groups is None:
            raise Refused(
                f"{requested}: dgc keeps the momentum of an SGD, and {optimizer_facts.optimizer} "
                "has a memory of its own, which sparse gradients update too rarely; use "
                f"torch.optim.SGD, or compress=top_k({self.ratio:g})"
            )
        for number, group in enumerate(optimizer_facts.sgd_groups):
            self.refuse_parameter_group(number, group, requested)
        if self.clip is not None and optimizer_facts.clip_norm is not None:
            raise Refused(
                f"{requested}: clipping is given twice, {self.clip:g} here and "
                f"clip_norm={optimizer_facts.clip_norm:g}; leave out one of them (dgc takes "
                "clip_norm over)"
            )

    def refuse_parameter_group(
        self, number: int, group: Mapping[str, Any], requested: object
    ) -> None:
        """Refuse the options of a parameter group of an SGD, before a training and in every step.

        Args:
            number: The number of the group.
            group: The group.
            requested: The strategy as written, for the message.

        Raises:
            Refused: If the group has an option that dgc does not take over, or a second momentum.
        """
        for what in ("dampening", "maximize"):
            if group.get(what):
                raise Refused(
                    f"{requested}: group {number} of the optimizer has {what}={group[what]}, which "
                    f"dgc does not take over; leave it out, or compress=top_k({self.ratio:g})"
                )
        if self.momentum != "auto" and group["momentum"]:
            raise Refused(
                f"{requested}: momentum is given twice, {self.momentum:g} here and "
                f"{group['momentum']:g} by group {number} of the optimizer; leave it out here "
                "(dgc takes over the optimizer's, also from a scheduler), or keep the optimizer's "
                "at 0"
            )

    def refuse_hook(
        self, optimizer_facts: OptimizerFacts | None, steps_per_epoch: int | None
    ) -> None:
        hook = f"hook('{self}')"
        if optimizer_facts is None:
            raise Refused(
                f"{hook} keeps the momentum of your SGD, which would count twice; give it "
                "optimizer="
            )
        if self.clip is not None:
            raise Refused(
                f"{hook}: a hook sees some of the gradients at a time, so it has no norm of all; "
                f"leave out clip, or train with data(n, compress={self})"
            )
        if steps_per_epoch is not None and steps_per_epoch not in Integer(most=float("inf")):
            raise Refused(
                f"{hook}: an epoch has a whole number of steps, from 1; got "
                f"steps_per_epoch={steps_per_epoch!r}"
            )
        if self.warmup and not steps_per_epoch:
            raise Refused(
                f"{hook} warms up over {self.warmup} epochs, and DDP does not tell it the epoch; "
                "give it steps_per_epoch=len(loader), or warmup=0"
            )
        self.refuse_optimizer(optimizer_facts, hook)
