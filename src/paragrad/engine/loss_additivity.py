"""Check before training that a loss adds up over the parts of a batch.

A batch as a whole is compared with two parts of unequal size, which are collated separately. The
loss of the whole must equal the sums of the parts over their weights. Otherwise shares and
micro-batches would train differently.

The model runs again on each part, in training mode, with the same random draws for a sample. So the
check finds a model that mixes samples (a mean over the batch inside the model, a contrastive loss),
and padding. It runs in float64 if the model can.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paragrad.datasets.loading import (
    Samples,
    clone_batch,
    convert_batch,
    list_batch_tensors,
    separate_target,
    slice_batch,
)
from paragrad.engine.rng.draws import ConstantDraws, Draws, key_draws, use_draw_source
from paragrad.engine.state.preserve_state import ModuleSnapshot, preserve_module_state
from paragrad.engine.state.values import GeneratorState, is_same_value
from paragrad.jobs.loss import LossModule, call_model

MAX_SAMPLES = 5  # samples of the whole: parts of 2 and 3, because some models refuse one sample
FLOAT64_TOLERANCE = 1e-9  # relative, in float64
REPEAT_TOLERANCE = 1e-6  # relative, in any type: the same operations on the same numbers

MIXES_SAMPLES = (
    "the model mixes samples: its output for a sample depends on the others in the batch. Take "
    "means over what one sample has, or train it where every rank has the whole batch (serial, "
    "place, tensor)"
)
COMPARES_SAMPLES = (
    "its divisor adds up over parts, but its sum does not: perhaps it compares samples of "
    "a batch with each other. Train it where every rank has the whole batch (serial, place, "
    "tensor)"
)
BATCH_DRAWS = (
    "what {} draws is not each sample's own: if every draw gives the same number, the parts give "
    "what the whole gives. Let dropout act before sequences are packed, draw by torch's functions "
    "with the samples as a dimension of their own, or train it where every rank has the whole "
    "batch (serial, place, tensor)"
)
FILLS_VALUES = (
    "the forward fills {} from the first batch that it sees, and a part of the batch gives other "
    "values: fill it before the training, by a forward over some samples in the function that "
    "makes the model"
)


@dataclass(frozen=True)
class BatchExcerpt:
    """Some samples of a batch, in the form that the model and the loss receive.

    Attributes:
        inputs: The inputs.
        target: The target.
        positions: Places of the samples in the batch.
    """

    inputs: Any
    target: Any
    positions: list[int]

    def convert(self, dtype: torch.dtype, device: torch.device | None = None) -> BatchExcerpt:
        """Convert the tensors to a type.

        Args:
            dtype: Type of floating-point tensors.
            device: Device of the tensors; None: they stay where they are.
        """
        inputs, target = convert_batch((self.inputs, self.target), device, dtype)
        return BatchExcerpt(inputs, target, self.positions)

    def select_places(self, places: list[int]) -> BatchExcerpt:
        """Select some samples.

        Args:
            places: Places of the samples in this excerpt.

        Raises:
            ValueError: The batch cannot be divided into samples.
        """
        inputs, target = slice_batch((self.inputs, self.target), places, len(self.positions))
        return BatchExcerpt(inputs, target, [self.positions[place] for place in places])

    def split_unequally(self) -> list[BatchExcerpt]:
        """Return the whole and two parts of unequal size; with one sample, only the whole.

        At most `MAX_SAMPLES` samples are used.

        Raises:
            ValueError: The batch cannot be divided into samples.
        """
        return [
            self.select_places(places)
            for places in list_unequal_places(min(len(self.positions), MAX_SAMPLES))
        ]

    def copy_batch(self) -> tuple[Any, Any]:
        """Copy (inputs, target) for a model that may change them.

        A tensor that is in both stays one tensor.
        """
        inputs, target = clone_batch((self.inputs, self.target))
        return inputs, target


def collect_parts(samples: Samples, indices: Sequence[int]) -> list[BatchExcerpt]:
    """Collate some samples as a whole and in two parts of unequal size.

    Args:
        samples: The samples of a dataset.
        indices: Indices of the samples.

    Returns:
        The whole and the parts; with one sample, only the whole.
    """
    return [
        BatchExcerpt(*separate_target(samples[0, list(indices), positions]), positions)
        for positions in list_unequal_places(len(indices))
    ]


def list_unequal_places(samples: int) -> list[list[int]]:
    """Return the places of all samples, of the first third, and of the rest.

    Args:
        samples: Number of samples. With one sample, only the whole is returned.
    """
    places = list(range(samples))
    middle = -(-samples // 3)
    return [places, places[:middle], places[middle:]] if samples > 1 else [places]


@dataclass(frozen=True)
class LossEvaluation:
    """The result of a loss for one part.

    Attributes:
        value: What the loss returned.

        output: The output of the model.

        total: The sum of the loss.

        weight: The weight.

        doubtful_weight: The part of the weight that may stand for no sample.

        weight_known: The weight comes from the loss; it is not only the number of samples.
    """

    value: Any
    output: Any
    total: float
    weight: float
    doubtful_weight: float
    weight_known: bool

    @property
    def value_dtype(self) -> torch.dtype:
        """Type of the loss. Some models compute it in float32, whatever their own type is."""
        value = _get_loss_number(self.value)
        return value.dtype if isinstance(value, Tensor) else torch.float64


def _get_loss_number(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def find_additivity_error(
    module: LossModule, parts: list[BatchExcerpt], draws: Draws, in_float64: bool
) -> str | None:
    """Check that a loss on a whole batch equals the loss from its parts.

    The caller must restore the random generators.

    Args:
        module: The model and the loss.
        parts: The whole, then its parts.
        draws: The random calls of a forward pass.
        in_float64: The module is in float64. If it is not, or its loss is not, the samples in
            another order show how large rounding is.

    Returns:
        What is wrong, for a message; or None.
    """
    whole, *halves = [_evaluate_loss(module, part, draws) for part in parts]
    if not halves:
        return None
    sums = sum(half.total for half in halves)
    weights = sum(half.weight for half in halves)
    certain_weights = weights - sum(half.doubtful_weight for half in halves)
    weights = (
        certain_weights if _is_close(whole.weight, certain_weights, FLOAT64_TOLERANCE) else weights
    )
    mean = whole.total / (whole.weight or 1.0)
    expected = sums / (weights or 1.0)
    if all(
        each.total == 0.0 == float(_get_loss_number(each.value).detach())
        for each in (whole, *halves)
    ):
        return None  # no sample counts, so nothing can be checked
    if not torch.isfinite(torch.tensor([mean, expected])).all():
        # the run reports a value that is not finite, with rank, step and tensor
        return None
    tolerance = (
        FLOAT64_TOLERANCE
        if in_float64 and whole.value_dtype == torch.float64
        else _measure_rounding(module, parts[0], draws, mean)
    )
    if _is_close(mean, expected, tolerance) and _is_close(whole.weight, weights, tolerance):
        return None
    if unrepeatable := _explain_unrepeatable(module, parts[0], draws, mean, tolerance):
        return unrepeatable
    cause = _explain_cause(parts, whole, halves, tolerance)
    mixing = "" if cause else _explain_mixing(module, parts, whole, halves, draws, tolerance)
    if isinstance(whole.value, tuple):
        (total, summed), (weight, parts_weight) = (
            _format_numbers(whole.total, sums),
            _format_numbers(whole.weight, weights),
        )
        return (
            f"the pair (sum, weight) does not add up: ({total}, {weight}) over a batch, ({summed}, "
            f"{parts_weight}) over its two parts; {mixing or 'return plain sums'}{cause}"
        )
    same_divisor = _is_close(whole.weight, weights, tolerance)
    if same_divisor and _is_close(
        float(whole.value.detach()), sum(float(half.value.detach()) for half in halves), tolerance
    ):
        return (
            "the loss is a bare sum over the batch; return the mean (reduction='mean'), or the "
            "pair (sum, number of samples)"
        )
    from_whole, from_parts = _format_numbers(mean, expected)
    evidence = (
        f"{from_whole} over a batch of {len(parts[0].positions)}, {from_parts} from its parts of "
        f"{len(parts[1].positions)} and {len(parts[2].positions)}"
    )
    if not same_divisor:
        of_whole, *of_halves = _format_numbers(
            whole.weight, *(half.weight for half in halves), differ_from=weights
        )
        evidence += f", which divide by {of_whole} and {' + '.join(of_halves)}"
    if not cause and not whole.weight_known:
        cause = " (it has no single divisor: it is several means, or a function of a mean)"
    repair = f"return the pair (sum, weight) with the weight it divides by{cause}"
    if same_divisor and whole.weight_known and not cause:
        repair = COMPARES_SAMPLES
    return f"the loss is no mean over samples: {evidence}; {mixing or repair}"


def _evaluate_loss(
    module: LossModule, part: BatchExcerpt, draws: Draws | ConstantDraws
) -> LossEvaluation:
    """Compute the loss of a part."""
    with (
        preserve_module_state(module),
        disable_batch_statistics(),
        use_draw_source(draws)
        if isinstance(draws, ConstantDraws)
        else key_draws(draws, 0, 0, part.positions),
    ):
        inputs, target = part.copy_batch()
        output = call_model(module.model, inputs)
        value = module.loss(output, target)
    weighed = module.weigh_loss(value, part.target, len(part.positions))
    return LossEvaluation(
        value,
        output,
        float(weighed.sum.detach()),
        weighed.weight,
        module.doubtful_weight,
        module.has_known_weight,
    )


def _measure_rounding(module: LossModule, whole: BatchExcerpt, draws: Draws, mean: float) -> float:
    """Return the tolerance for rounding.

    It is four times the relative deviation of another order of the samples, and at least some eps.
    """
    places = list(range(len(whole.positions)))[::-1]
    try:
        reversed_evaluation = _evaluate_loss(module, whole.select_places(places), draws)
    except ValueError:
        return 1e-4
    deviation = (
        4
        * abs(reversed_evaluation.total / (reversed_evaluation.weight or 1.0) - mean)
        / max(abs(mean), 1e-6)
    )
    coarsest = max(
        [
            torch.finfo(reversed_evaluation.value_dtype).eps,
            *(
                torch.finfo(parameter.dtype).eps
                for parameter in module.model.parameters()
                if parameter.is_floating_point()
            ),
        ]
    )
    bound = max(64 * torch.finfo(torch.float32).eps, 8 * coarsest, min(deviation, 1e-3))
    return float(bound)


@contextlib.contextmanager
def disable_batch_statistics() -> Iterator[None]:
    """Run batch norm in training mode without statistics of the batch.

    Statistics are the only thing that may mix samples, because strategies handle them.
    """
    original = torch.batch_norm
    verify = functional._verify_batch_size  # type: ignore[attr-defined]

    def batch_norm_without_statistics(
        x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
    ) -> Tensor:
        if training:
            mean = x.new_zeros(x.shape[1])
            variance = x.new_ones(x.shape[1])
        result: Tensor = original(x, weight, bias, mean, variance, False, *rest)
        return result

    torch.batch_norm = batch_norm_without_statistics
    functional._verify_batch_size = lambda size: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.batch_norm = original
        functional._verify_batch_size = verify  # type: ignore[attr-defined]


def _explain_unrepeatable(
    module: LossModule, part: BatchExcerpt, draws: Draws, mean: float, tolerance: float
) -> str | None:
    """Explain why the same part has another loss in a second run, or return None.

    A random generator that draws for the batch and not for samples is also reported. States that
    can be seen are restored, so the states of model and loss are inspected themselves.
    """
    with (
        preserve_module_state(module),
        disable_batch_statistics(),
        key_draws(draws, 0, 0, part.positions),
    ):
        snapshot = ModuleSnapshot(module)
        inputs, target = part.copy_batch()
        module.loss(call_model(module.model, inputs), target)
        owned = [
            name
            for name, value in snapshot.collect_module_changes()[1].items()
            if isinstance(value, GeneratorState)
        ]
    if owned:
        return (
            f"the random generator {owned[0]}, of the model's or the loss's own, draws for a batch "
            "and not for its samples; draw by torch's functions without generator="
        )
    return _compare_repeats(mean, _compute_mean(_evaluate_loss(module, part, draws)), tolerance)


def explain_changed_loss(module: LossModule, part: BatchExcerpt, draws: Draws) -> str | None:
    """Explain why the same samples have another loss in a second run.

    Args:
        module: The model and the loss.
        part: The samples.
        draws: The random calls of a forward pass.

    Returns:
        The explanation for a message, or None if the loss is the same.
    """
    first, second = (_compute_mean(_evaluate_loss(module, part, draws)) for _ in range(2))
    return (
        _compare_repeats(first, second, REPEAT_TOLERANCE)
        if torch.isfinite(torch.tensor([first, second])).all()
        else None
    )


def _compute_mean(answer: LossEvaluation) -> float:
    return answer.total / (answer.weight or 1.0)


def _compare_repeats(mean: float, repeated_mean: float, tolerance: float) -> str | None:
    if _is_close(repeated_mean, mean, tolerance):
        return None
    first, second = _format_numbers(mean, repeated_mean)
    return (
        f"the loss of the same samples is another number each time it is asked: {first}, then "
        f"{second}; model or loss keep a state or a random generator outside of themselves: draw "
        "by torch's functions without generator=, and count in attributes or buffers of the model"
    )


def _format_numbers(number: float, *others: float, differ_from: float | None = None) -> list[str]:
    """Format numbers with enough digits to show a difference.

    The first number must differ from `differ_from`, or by default from the second number.
    """
    other = others[0] if differ_from is None else differ_from
    digits = next(
        (digits for digits in range(6, 18) if f"{number:.{digits}g}" != f"{other:.{digits}g}"), 6
    )
    return [f"{each:.{digits}g}" for each in (number, *others)]


def _explain_cause(
    parts: list[BatchExcerpt], whole: LossEvaluation, halves: list[LossEvaluation], tolerance: float
) -> str:
    """Return the cause of a deviation for a message, if it can be seen."""
    shapes = [
        {tuple(tensor.shape[1:]) for tensor in list_batch_tensors([part.inputs, part.target])}
        for part in parts
    ]
    if shapes[1] != shapes[0] or shapes[2] != shapes[0]:
        return (
            " (the parts are padded differently from the whole; whether that is the cause was not "
            "tested)"
        )
    if (parts_weight := sum(half.weight for half in halves)) > whole.weight and not _is_close(
        parts_weight, whole.weight, tolerance
    ):
        return (
            " (the divisors do not add up, perhaps because a constant is in each, or keeps it "
            "above 0: leave it out of the pair, in which a weight of 0 is allowed)"
        )
    return ""


def _explain_mixing(
    module: LossModule,
    parts: list[BatchExcerpt],
    whole: LossEvaluation,
    halves: list[LossEvaluation],
    draws: Draws,
    tolerance: float,
) -> str:
    """Explain, with the repair, why an output depends on the other samples; empty: it does not."""
    if not _has_mixed_outputs(parts, whole, halves):
        return ""
    for explain in (_explain_filled_values, _explain_batch_draws):
        # a part that is run in another way may fail where the batch itself does not
        with contextlib.suppress(Exception):
            if explanation := explain(module, parts, draws, tolerance):
                return explanation
    return MIXES_SAMPLES


def _has_mixed_outputs(
    parts: list[BatchExcerpt], whole: LossEvaluation, halves: list[LossEvaluation]
) -> bool:
    """Return whether the output for a sample depends on the other samples of the batch."""
    outputs = [
        list_batch_tensors(evaluation.output)
        if isinstance(evaluation.output, Tensor | tuple | list | Mapping)
        else []
        for evaluation in (whole, *halves)
    ]
    for tensor, *part_tensors in zip(*outputs, strict=False):
        is_comparable = (
            tensor.is_floating_point()
            and tensor.dim()
            and all(each.shape[1:] == tensor.shape[1:] for each in part_tensors)
        )
        if (
            is_comparable
            and len(tensor) == len(parts[0].positions) == sum(map(len, part_tensors))
            and not torch.allclose(torch.cat(part_tensors), tensor, rtol=1e-4, atol=1e-6)
        ):
            return True
    return False


def _list_values(model: torch.nn.Module) -> dict[str, Tensor]:
    """List the values of the parameters and buffers by name."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: each.detach() for name, each in named}


def _explain_filled_values(
    module: LossModule, parts: list[BatchExcerpt], draws: Draws, tolerance: float
) -> str | None:
    """Explain a loss that adds up as soon as the model has seen a batch, or return None.

    A forward may fill buffers or parameters from the first batch (vector quantization, ActNorm).
    """
    with preserve_module_state(module):
        before = {name: value.clone() for name, value in _list_values(module.model).items()}
        filled: dict[str, Tensor] = {}
        for part in parts[:2]:
            with disable_batch_statistics(), key_draws(draws, 0, 0, part.positions):
                call_model(module.model, part.copy_batch()[0])
            filled = filled or {
                name: value.clone()
                for name, value in _list_values(module.model).items()
                if name in before and not is_same_value(value, before[name])
            }
        # the second forward changes a count, and leaves what the first one filled
        after = _list_values(module.model)
        names = [name for name, value in filled.items() if is_same_value(value, after.get(name))]
        if not names:
            return None
        is_additive = _is_additive(module, parts, draws, tolerance)
    return FILLS_VALUES.format(", ".join(names[:3])) if is_additive else None


def _explain_batch_draws(
    module: LossModule, parts: list[BatchExcerpt], draws: Draws, tolerance: float
) -> str | None:
    """Explain a loss that adds up if every draw gives the same number, or return None."""
    names = ", ".join(dict.fromkeys(call.name for call in draws.calls))
    # two numbers: with weights of 1, a mixture of two samples is the first of them
    is_additive = bool(names) and all(
        _is_additive(module, parts, ConstantDraws(number), tolerance) for number in (1.0, 0.5)
    )
    return BATCH_DRAWS.format(names) if is_additive else None


def _is_additive(
    module: LossModule,
    parts: list[BatchExcerpt],
    draws: Draws | ConstantDraws,
    tolerance: float,
) -> bool:
    """Return whether the mean loss of the whole equals that of its parts."""
    whole, *halves = [_evaluate_loss(module, part, draws) for part in parts]
    expected = sum(half.total for half in halves) / (sum(half.weight for half in halves) or 1.0)
    return _is_close(_compute_mean(whole), expected, tolerance)


def _is_close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-6)
