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

from paragrad.datasets.loading import (
    Samples,
    call_model,
    clone_batch,
    convert_batch,
    list_batch_tensors,
    separate_target,
    slice_batch,
)
from paragrad.engine.rng.draws import Draws, key_draws
from paragrad.engine.state.preserve_state import ModuleSnapshot, preserve_module_state
from paragrad.engine.state.values import GeneratorState
from paragrad.jobs.loss import LossModule

MAX_SAMPLES = 5  # samples of the whole: 2 and 3, since some models take no single sample
FLOAT64_TOLERANCE = 1e-9  # relative, in float64
REPEAT_TOLERANCE = 1e-6  # relative, in any type: of the same operations on the same numbers


@dataclass(frozen=True)
class BatchExcerpt:
    """Samples at some places of a batch, as the model and the loss take them."""

    inputs: Any
    target: Any
    positions: list[int]

    def convert(self, dtype: torch.dtype, device: torch.device | None = None) -> BatchExcerpt:
        """device: otherwise where it is."""
        inputs, target = convert_batch((self.inputs, self.target), device, dtype)
        return BatchExcerpt(inputs, target, self.positions)

    def select_places(self, places: list[int]) -> BatchExcerpt:
        """What stands at some places of it. Raises ValueError where it cannot be cut."""
        inputs, target = slice_batch((self.inputs, self.target), places, len(self.positions))
        return BatchExcerpt(inputs, target, [self.positions[place] for place in places])

    def split_unequally(self) -> list[BatchExcerpt]:
        """The whole, and cut out of it two parts of unequal size, where it has so many samples.
        Raises ValueError.
        """
        return [
            self.select_places(places)
            for places in list_unequal_places(min(len(self.positions), MAX_SAMPLES))
        ]

    def copy_batch(self) -> tuple[Any, Any]:
        """(inputs, target) for a model that may change them; what is in both stays one
        tensor.
        """
        inputs, target = clone_batch((self.inputs, self.target))
        return inputs, target


def collect_parts(samples: Samples, indices: Sequence[int]) -> list[BatchExcerpt]:
    """Some samples as a whole, and in two parts of unequal size; alone where it is one
    sample.
    """
    return [
        BatchExcerpt(*separate_target(samples[0, list(indices), positions]), positions)
        for positions in list_unequal_places(len(indices))
    ]


def list_unequal_places(samples: int) -> list[list[int]]:
    """All places, the first third of them and the rest; alone where it is one."""
    places = list(range(samples))
    middle = -(-samples // 3)
    return [places, places[:middle], places[middle:]] if samples > 1 else [places]


@dataclass(frozen=True)
class LossEvaluation:
    """What the loss returned for a part, the output that it saw, its (sum, weight), and whether
    the weight is known.
    """

    value: Any
    output: Any
    total: float
    weight: float
    doubtful_weight: float  # of the weight, what may be that of nothing
    weight_known: bool  # was the weight more than the number of samples?

    @property
    def value_dtype(self) -> torch.dtype:
        """Some models compute their loss in float32, whatever their type."""
        value = _get_loss_number(self.value)
        return value.dtype if isinstance(value, Tensor) else torch.float64


def _get_loss_number(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def find_additivity_error(
    module: LossModule, parts: list[BatchExcerpt], draws: Draws, in_float64: bool
) -> str | None:
    """What is wrong with a loss, seen on a whole batch and its parts, or None. Generators are
    the caller's to keep.

    tight: the module is in float64; where not, or where its loss is not, the samples in another
    order tell what is rounding.
    """
    whole, *halves = [_evaluate_loss(module, part, draws) for part in parts]
    if not halves:
        return None
    sums = sum(half.total for half in halves)
    weights = sum(half.weight for half in halves)
    without = weights - sum(half.doubtful_weight for half in halves)
    weights = without if _is_close(whole.weight, without, FLOAT64_TOLERANCE) else weights
    mean = whole.total / (whole.weight or 1.0)
    expected = sums / (weights or 1.0)
    if all(
        each.total == 0.0 == float(_get_loss_number(each.value).detach())
        for each in (whole, *halves)
    ):
        return None  # nothing counts, so nothing can be seen
    if not torch.isfinite(torch.tensor([mean, expected])).all():
        # not finite is a matter of the run, which names rank, step and tensor
        return None
    near = (
        FLOAT64_TOLERANCE
        if in_float64 and whole.value_dtype == torch.float64
        else _measure_rounding(module, parts[0], draws, mean)
    )
    if _is_close(mean, expected, near) and _is_close(whole.weight, weights, near):
        return None
    if unsteady := _explain_unrepeatable(module, parts[0], draws, mean, near):
        return unsteady
    why = _explain_cause(parts, whole, halves, near)
    if isinstance(whole.value, tuple):
        (total, summed), (weight, added) = (
            _format_numbers(whole.total, sums),
            _format_numbers(whole.weight, weights),
        )
        return (
            f"the pair (sum, weight) does not add up: ({total}, {weight}) over a batch, ({summed}, "
            f"{added}) over its two "
            f"parts; return plain sums{why}"
        )
    divided_alike = _is_close(whole.weight, weights, near)
    if divided_alike and _is_close(
        float(whole.value.detach()), sum(float(half.value.detach()) for half in halves), near
    ):
        return (
            "the loss is a bare sum over the batch; return the mean (reduction='mean'), "
            "or the pair (sum, number of samples)"
        )
    over, from_parts = _format_numbers(mean, expected)
    told = (
        f"{over} over a batch of {len(parts[0].positions)}, {from_parts} from its parts of "
        f"{len(parts[1].positions)} and {len(parts[2].positions)}"
    )
    if not divided_alike:
        of_whole, *of_halves = _format_numbers(
            whole.weight, *(half.weight for half in halves), differ_from=weights
        )
        told += f", which divide by {of_whole} and {' + '.join(of_halves)}"
    return (
        f"the loss is no mean over samples: {told}; return the pair (sum, weight) with the "
        f"weight it divides by{why}"
    )


def _evaluate_loss(module: LossModule, part: BatchExcerpt, draws: Draws) -> LossEvaluation:
    with (
        preserve_module_state(module),
        disable_batch_statistics(),
        key_draws(draws, 0, 0, part.positions),
    ):
        inputs, target = part.copy_batch()
        output = call_model(module.model, inputs)
        value = module.loss(output, target)
    total, weight = module.weigh_loss(value, part.target, len(part.positions))
    return LossEvaluation(
        value,
        output,
        float(total.detach()),
        weight,
        module.doubtful_weight,
        module.has_known_weight,
    )


def _measure_rounding(module: LossModule, whole: BatchExcerpt, draws: Draws, mean: float) -> float:
    """How far, relatively, another order of the samples is from this one: four times that, and
    some eps at least.
    """
    places = list(range(len(whole.positions)))[::-1]
    try:
        twin = _evaluate_loss(module, whole.select_places(places), draws)
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
def disable_batch_statistics() -> Iterator[None]:
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


def _explain_unrepeatable(
    module: LossModule, part: BatchExcerpt, draws: Draws, mean: float, tolerance: float
) -> str | None:
    """Does the same part give another number when it is asked again, or is a generator drawn
    from that belongs to nobody's samples? States that can be seen are put back, so those of
    modules and losses themselves are looked at.
    """
    with (
        preserve_module_state(module),
        disable_batch_statistics(),
        key_draws(draws, 0, 0, part.positions),
    ):
        before = ModuleSnapshot(module)
        inputs, target = part.copy_batch()
        module.loss(call_model(module.model, inputs), target)
        own = [
            name
            for name, value in before.collect_module_changes()[1].items()
            if isinstance(value, GeneratorState)
        ]
    if own:
        return (
            f"the random generator {own[0]}, of the model's or the loss's own, draws for a batch "
            f"and not for its samples; "
            "draw by torch's functions without generator="
        )
    return _compare_repeats(mean, _compute_mean(_evaluate_loss(module, part, draws)), tolerance)


def explain_changed_loss(module: LossModule, part: BatchExcerpt, draws: Draws) -> str | None:
    """Why the same samples have another loss when it is asked again, or None."""
    once, anew = (_compute_mean(_evaluate_loss(module, part, draws)) for _ in range(2))
    return (
        _compare_repeats(once, anew, REPEAT_TOLERANCE)
        if torch.isfinite(torch.tensor([once, anew])).all()
        else None
    )


def _compute_mean(answer: LossEvaluation) -> float:
    return answer.total / (answer.weight or 1.0)


def _compare_repeats(mean: float, repeated_mean: float, tolerance: float) -> str | None:
    if _is_close(repeated_mean, mean, tolerance):
        return None
    once, anew = _format_numbers(mean, repeated_mean)
    return (
        f"the loss of the same samples is another number each time it is asked: {once}, then "
        f"{anew}; model or loss keep a "
        "state or a random generator outside of themselves: draw by torch's functions without "
        "generator=, and count in "
        "attributes or buffers of the model"
    )


def _format_numbers(number: float, *others: float, differ_from: float | None = None) -> list[str]:
    """Numbers as texts, of so many digits that the first is seen to differ from `apart`
    (otherwise from the second).
    """
    other = others[0] if differ_from is None else differ_from
    digits = next(
        (digits for digits in range(6, 18) if f"{number:.{digits}g}" != f"{other:.{digits}g}"), 6
    )
    return [f"{each:.{digits}g}" for each in (number, *others)]


def _explain_cause(
    parts: list[BatchExcerpt], whole: LossEvaluation, halves: list[LossEvaluation], tolerance: float
) -> str:
    """Where it comes from, as far as it can be seen."""
    shapes = [
        {tuple(tensor.shape[1:]) for tensor in list_batch_tensors([part.inputs, part.target])}
        for part in parts
    ]
    if shapes[1] != shapes[0] or shapes[2] != shapes[0]:
        return " (the parts are padded otherwise than the whole, and the loss counts padding)"
    if (more := sum(half.weight for half in halves)) > whole.weight and not _is_close(
        more, whole.weight, tolerance
    ):
        return (
            " (the divisors do not add up, as where a constant is in each, or keeps it from 0: "
            "leave it out of the pair, "
            "in which a weight of 0 counts for nothing)"
        )
    outputs = [
        list_batch_tensors(answer.output)
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
        if whole.weight_known
        else " (no one divisor can be read off it: it is several means, or a function of a mean)"
    )


def _is_close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-6)
