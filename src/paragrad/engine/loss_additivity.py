"""Does a loss add up? What a job is asked at the door: a batch as a whole against its two
parts, unequal and collated anew.

The loss of the whole must be the sums of the parts over their weights; otherwise shares and
micro-batches would be another training. The model runs anew on each part, in training, with the
same random draws for a sample, so what mixes samples (a mean over the batch inside the model, a
contrastive loss) shows, and so does padding. In float64 where the model can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paragrad.datasets.loading import Samples, brought, called, copied, cut, parted, tensors_of
from paragrad.engine.rng.draws import Draws, keyed
from paragrad.engine.state.preserve_state import Before, restored
from paragrad.engine.state.values import Drawing
from paragrad.jobs.loss import Summed

ASKED = 5  # samples of the whole: 2 and 3, since some models take no single sample
TIGHT = 1e-9  # relative, in float64
SAME = 1e-6  # relative, in any type: of the same operations on the same numbers


@dataclass(frozen=True)
class Excerpt:
    """Samples at some places of a batch, as the model and the loss take them."""

    inputs: Any
    target: Any
    positions: list[int]

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Excerpt:
        """device: otherwise where it is."""
        inputs, target = brought((self.inputs, self.target), device, dtype)
        return Excerpt(inputs, target, self.positions)

    def cut(self, places: list[int]) -> Excerpt:
        """What stands at some places of it. Raises ValueError where it cannot be cut."""
        inputs, target = cut((self.inputs, self.target), places, len(self.positions))
        return Excerpt(inputs, target, [self.positions[place] for place in places])

    def in_parts(self) -> list[Excerpt]:
        """The whole, and cut out of it two parts of unequal size, where it has so many samples.
        Raises ValueError.
        """
        return [self.cut(places) for places in unequal(min(len(self.positions), ASKED))]

    def copied(self) -> tuple[Any, Any]:
        """(inputs, target) for a model that may change them; what is in both stays one
        tensor.
        """
        inputs, target = copied((self.inputs, self.target))
        return inputs, target


def parts_of(samples: Samples, indices: Sequence[int]) -> list[Excerpt]:
    """Some samples as a whole, and in two parts of unequal size; alone where it is one
    sample.
    """
    return [
        Excerpt(*parted(samples[0, list(indices), positions]), positions)
        for positions in unequal(len(indices))
    ]


def unequal(samples: int) -> list[list[int]]:
    """All places, the first third of them and the rest; alone where it is one."""
    places = list(range(samples))
    middle = -(-samples // 3)
    return [places, places[:middle], places[middle:]] if samples > 1 else [places]


@dataclass(frozen=True)
class Answer:
    """What the loss returned for a part, the output that it saw, its (sum, weight), and whether
    the weight is known.
    """

    value: Any
    output: Any
    total: float
    weight: float
    doubtful: float  # of the weight, what may be that of nothing
    known: bool  # was the weight more than the number of samples?

    @property
    def value_dtype(self) -> torch.dtype:
        """Some models compute their loss in float32, whatever their type."""
        value = _number(self.value)
        return value.dtype if isinstance(value, Tensor) else torch.float64


def _number(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def wrong_with(module: Summed, parts: list[Excerpt], draws: Draws, tight: bool) -> str | None:
    """What is wrong with a loss, seen on a whole batch and its parts, or None. Generators are
    the caller's to keep.

    tight: the module is in float64; where not, or where its loss is not, the samples in another
    order tell what is rounding.
    """
    whole, *halves = [_asked(module, part, draws) for part in parts]
    if not halves:
        return None
    sums = sum(half.total for half in halves)
    weights = sum(half.weight for half in halves)
    without = weights - sum(half.doubtful for half in halves)
    weights = without if _close(whole.weight, without, TIGHT) else weights
    mean = whole.total / (whole.weight or 1.0)
    expected = sums / (weights or 1.0)
    if all(each.total == 0.0 == float(_number(each.value).detach()) for each in (whole, *halves)):
        return None  # nothing counts, so nothing can be seen
    if not torch.isfinite(torch.tensor([mean, expected])).all():
        # not finite is a matter of the run, which names rank, step and tensor
        return None
    near = (
        TIGHT
        if tight and whole.value_dtype == torch.float64
        else _rounding(module, parts[0], draws, mean)
    )
    if _close(mean, expected, near) and _close(whole.weight, weights, near):
        return None
    if unsteady := _unsteady(module, parts[0], draws, mean, near):
        return unsteady
    why = _why(parts, whole, halves, near)
    if isinstance(whole.value, tuple):
        (total, summed), (weight, added) = _told(whole.total, sums), _told(whole.weight, weights)
        return (
            f"the pair (sum, weight) does not add up: ({total}, {weight}) over a batch, ({summed}, "
            f"{added}) over its two "
            f"parts; return plain sums{why}"
        )
    divided_alike = _close(whole.weight, weights, near)
    if divided_alike and _close(
        float(whole.value.detach()), sum(float(half.value.detach()) for half in halves), near
    ):
        return (
            "the loss is a bare sum over the batch; return the mean (reduction='mean'), "
            "or the pair (sum, number of samples)"
        )
    over, from_parts = _told(mean, expected)
    told = (
        f"{over} over a batch of {len(parts[0].positions)}, {from_parts} from its parts of "
        f"{len(parts[1].positions)} and {len(parts[2].positions)}"
    )
    if not divided_alike:
        of_whole, *of_halves = _told(whole.weight, *(half.weight for half in halves), apart=weights)
        told += f", which divide by {of_whole} and {' + '.join(of_halves)}"
    return (
        f"the loss is no mean over samples: {told}; return the pair (sum, weight) with the "
        f"weight it divides by{why}"
    )


def _asked(module: Summed, part: Excerpt, draws: Draws) -> Answer:
    with restored(module), statistics_apart(), keyed(draws, 0, 0, part.positions):
        inputs, target = part.copied()
        output = called(module.model, inputs)
        value = module.loss(output, target)
    total, weight = module.weighed(value, part.target, len(part.positions))
    return Answer(value, output, float(total.detach()), weight, module.doubtful, module.known)


def _rounding(module: Summed, whole: Excerpt, draws: Draws, mean: float) -> float:
    """How far, relatively, another order of the samples is from this one: four times that, and
    some eps at least.
    """
    places = list(range(len(whole.positions)))[::-1]
    try:
        twin = _asked(module, whole.cut(places), draws)
    except ValueError:
        return 1e-4
    apart = 4 * abs(twin.total / (twin.weight or 1.0) - mean) / max(abs(mean), 1e-6)
    coarsest = max(
        [
            torch.finfo(twin.value_dtype).eps,
            *(
                torch.finfo(parameter.dtype).eps
                for parameter in module.model.parameters()
                if parameter.is_floating_point()
            ),
        ]
    )
    return max(64 * torch.finfo(torch.float32).eps, 8 * coarsest, min(apart, 1e-3))


@contextlib.contextmanager
def statistics_apart() -> Iterator[None]:
    """Batch norm in training takes no statistics: those are the one thing that may mix samples,
    and strategies see to it.
    """
    original = torch.batch_norm  # type: ignore[attr-defined]
    verify = functional._verify_batch_size  # type: ignore[attr-defined]

    def apart(
        x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *more: Any
    ) -> Tensor:
        if training:
            mean = x.new_zeros(x.shape[1])
            variance = x.new_ones(x.shape[1])
        result: Tensor = original(x, weight, bias, mean, variance, False, *more)
        return result

    torch.batch_norm = apart  # type: ignore[attr-defined]
    functional._verify_batch_size = lambda size: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.batch_norm = original  # type: ignore[attr-defined]
        functional._verify_batch_size = verify  # type: ignore[attr-defined]


def _unsteady(module: Summed, part: Excerpt, draws: Draws, mean: float, near: float) -> str | None:
    """Does the same part give another number when it is asked again, or is a generator drawn
    from that belongs to nobody's samples? States that can be seen are put back, so those of
    modules and losses themselves are looked at.
    """
    with restored(module), statistics_apart(), keyed(draws, 0, 0, part.positions):
        before = Before(module)
        inputs, target = part.copied()
        module.loss(called(module.model, inputs), target)
        own = [name for name, value in before.changed()[1].items() if isinstance(value, Drawing)]
    if own:
        return (
            f"the random generator {own[0]}, of the model's or the loss's own, draws for a batch "
            f"and not for its samples; "
            "draw by torch's functions without generator="
        )
    return _another(mean, _mean(_asked(module, part, draws)), near)


def another_number(module: Summed, part: Excerpt, draws: Draws) -> str | None:
    """Why the same samples have another loss when it is asked again, or None."""
    once, anew = (_mean(_asked(module, part, draws)) for _ in range(2))
    return _another(once, anew, SAME) if torch.isfinite(torch.tensor([once, anew])).all() else None


def _mean(answer: Answer) -> float:
    return answer.total / (answer.weight or 1.0)


def _another(mean: float, again: float, near: float) -> str | None:
    if _close(again, mean, near):
        return None
    once, anew = _told(mean, again)
    return (
        f"the loss of the same samples is another number each time it is asked: {once}, then "
        f"{anew}; model or loss keep a "
        "state or a random generator outside of themselves: draw by torch's functions without "
        "generator=, and count in "
        "attributes or buffers of the model"
    )


def _told(number: float, *others: float, apart: float | None = None) -> list[str]:
    """Numbers as texts, of so many digits that the first is seen to differ from `apart`
    (otherwise from the second).
    """
    other = others[0] if apart is None else apart
    digits = next(
        (digits for digits in range(6, 18) if f"{number:.{digits}g}" != f"{other:.{digits}g}"), 6
    )
    return [f"{each:.{digits}g}" for each in (number, *others)]


def _why(parts: list[Excerpt], whole: Answer, halves: list[Answer], near: float) -> str:
    """Where it comes from, as far as it can be seen."""
    shapes = [
        {tuple(tensor.shape[1:]) for tensor in tensors_of([part.inputs, part.target])}
        for part in parts
    ]
    if shapes[1] != shapes[0] or shapes[2] != shapes[0]:
        return " (the parts are padded otherwise than the whole, and the loss counts padding)"
    if (more := sum(half.weight for half in halves)) > whole.weight and not _close(
        more, whole.weight, near
    ):
        return (
            " (the divisors do not add up, as where a constant is in each, or keeps it from 0: "
            "leave it out of the pair, "
            "in which a weight of 0 counts for nothing)"
        )
    outputs = [
        tensors_of(answer.output)
        if isinstance(answer.output, Tensor | tuple | list | Mapping)
        else []
        for answer in (whole, *halves)
    ]
    for tensor, *anew in zip(*outputs, strict=False):
        alike = (
            tensor.is_floating_point()
            and tensor.dim()
            and all(each.shape[1:] == tensor.shape[1:] for each in anew)
        )
        if (
            alike
            and len(tensor) == len(parts[0].positions) == sum(map(len, anew))
            and not torch.allclose(torch.cat(anew), tensor, rtol=1e-4, atol=1e-6)
        ):
            return (
                " (the model mixes samples: its output for a sample depends on the others in "
                "the batch)"
            )
    return (
        ""
        if whole.known
        else " (no one divisor can be read off it: it is several means, or a function of a mean)"
    )


def _close(a: float, b: float, near: float) -> bool:
    return abs(a - b) <= near * max(abs(a), abs(b), 1e-6)
