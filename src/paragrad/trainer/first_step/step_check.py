"""The first step, compared with one worker's before anything is updated.

Before exchange or cut is wired, rank 0 runs the whole global batch as one worker would, on the
model itself, and rank 1 the *rounding twin* (the samples in reverse order) at the same time;
everything is put back. When the strategy's own first step has its gradients, and before its
update, every rank compares what it holds with the one worker's: loss, weight, gradients,
buffers. Where the model is cut, so is the loss of some samples in a test (eval mode), in which
modules may take other ways than in training.

What is rounding is measured, not assumed. With d the difference from serial and t the twin's,
over the tensors of a module:

    d at most 8 eps of their largest, or at most 1.5 t:         equal otherwise, against a
    reference one precision higher:        doubtful where the strategy's error is more than 4
    times the
                                                                larger of serial's and the
                                                                twin's
    doubtful:                                                   the strategy makes the step once
    more one precision higher, and
                                                                that is compared

(1.5 t never exceeds three times the larger of the two errors, so the first line implies the
second. The third one is there because one twin may have luck: in a deep model a rectifier that
flips is a hundred times all other rounding.) A twin is believed while it shows rounding, and
not a fault of its rank or samples that are mixed. Where there is no higher precision, or the
model cannot run in it, further twins stand in, pooled over all tensors of a kind: other orders
of the samples, and parameters moved by one unit in the last place; a miss is more than 4 times
the largest difference among them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import choose_dtype
from paragrad.engine.loss_additivity import BatchExcerpt
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.rng.draws import Draws, key_draws
from paragrad.engine.state.preserve_state import ModuleSnapshot, preserve_module_state
from paragrad.errors import describe_error
from paragrad.jobs.loss import Loss, LossModule
from paragrad.jobs.precision import convert_model
from paragrad.runtime.generators import keep_generators
from paragrad.runtime.world import World
from paragrad.trainer.evaluation import make_whole_model_outputs, score_batches
from paragrad.trainer.first_step.step_result import (
    Gap,
    GapKey,
    StepOutcome,
    compute_gaps,
    pool_gaps,
)

SampleOrdering = Callable[[list[int]], list[int]]
# of the samples of a group: the twin's, and others where there is no reference
SAMPLE_ORDERINGS: tuple[SampleOrdering, ...] = (
    lambda group: group[::-1],
    lambda group: group[len(group) // 2 :] + group[: len(group) // 2],
    lambda group: group[::2] + group[1::2],
)


def run_reference_step(
    module: LossModule,
    parts: list[BatchExcerpt],
    draws: Draws,
    seed: int,
    step: int,
    loss_only: bool = False,
    test: BatchExcerpt | str = "",
) -> StepOutcome:
    """What one worker makes of a batch: one part, or the micro-batches that batch norm sees.
    Gradients and buffers stay so.

    The positions of a part are its samples' places in the global batch, by which its draws are
    keyed.  test: what is tested before; or why nothing is.
    """
    tested = test if isinstance(test, str) else _compute_test_loss(module, test)
    buffers_before = {
        name: buffer.detach().clone() for name, buffer in module.model.named_buffers()
    }
    before = ModuleSnapshot(module, include_buffers=True)
    for parameter in module.model.parameters():
        parameter.grad = None
    loss, weight = _sum_part_losses(module, parts, draws, seed, step, backward=not loss_only)
    if loss_only:
        return StepOutcome(loss / (weight or 1.0), weight, {}, {})
    gradients = {name: parameter.grad for name, parameter in module.model.named_parameters()}
    if module.is_linear or len(parts) > 1:
        for gradient in gradients.values():
            if gradient is not None:
                gradient.div_(weight or 1.0)
    # not a cache that grew
    buffers = {
        name: buffer.detach().clone()
        for name, buffer in module.model.named_buffers()
        if name in buffers_before and buffer.shape == buffers_before[name].shape
    }
    changed = frozenset(
        name for name, buffer in buffers.items() if not torch.equal(buffer, buffers_before[name])
    )
    moved, state = before.collect_module_changes()
    for put_back in before.buffer_restorers if state else ():  # by which the loss would be another
        put_back()
    if state and _sum_part_losses(module, parts, draws, seed, step, backward=False) == (
        loss,
        weight,
    ):
        # written, and not read: the last attention, the size of a batch
        state = {}
    return StepOutcome(
        loss / (weight or 1.0), weight, gradients, buffers, changed, moved, state, tested
    )


def _compute_test_loss(module: LossModule, part: BatchExcerpt) -> float | str:
    """The mean loss in a test; or why there is none to compare with. What draws is another one
    when it is made again.
    """
    found = list[float]()
    try:
        with (
            keep_generators(),
            torch.random.fork_rng(enabled=torch.cuda.is_available()),
            use_model_eval_mode(module.model),
        ):
            for _ in range(2):
                with preserve_module_state(module):
                    total, weight = score_batches(
                        module,
                        make_whole_model_outputs(module),
                        None,
                        [part.copy_batch()],
                        [part.positions],
                        module.uses_graph_divisor,
                    )
                found.append(total / weight if weight else math.nan)
    except Exception as error:
        return f"one worker's raised {describe_error(error)}"
    if not math.isfinite(found[0]):
        return "no sample counts in it, or its loss is not finite"
    return found[0] if found[0] == found[1] else "it is another one each time it is made"


def _sum_part_losses(
    module: LossModule,
    parts: list[BatchExcerpt],
    draws: Draws,
    seed: int,
    step: int,
    backward: bool,
) -> tuple[float, float]:
    """(sum of losses, weight) of all parts."""
    loss = 0.0
    weight = 0.0
    for part in parts:
        with key_draws(draws, seed, step, part.positions):
            total, more = module(*part.copy_batch(), len(part.positions))
            if backward:
                # what is not linear in a gradient (a hook that clips) sees that of the mean, as
                # without this library
                total.backward(
                    None
                    if module.is_linear or len(parts) > 1 or not more
                    else total.new_tensor(1.0 / more)
                )
        loss = loss + float(total.detach())
        weight = weight + more
    return loss, weight


def run_precise_step(
    model: nn.Module,
    module: LossModule,
    parts: list[BatchExcerpt],
    draws: Draws,
    seed: int,
    step: int,
    loss: Loss,
    loss_only: bool = False,
    test: BatchExcerpt | str = "",
) -> StepOutcome:
    """The same in float64, by a copy of the model and the loss. Raises what they raise
    there.
    """
    twin = module.wrap_model(convert_model(model, torch.float64), loss)
    return run_reference_step(
        twin,
        [part.convert(torch.float64) for part in parts],
        draws,
        seed,
        step,
        loss_only,
        test if isinstance(test, str) else test.convert(torch.float64),
    )


# ---- the proof -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mismatch:
    """A kind that is not one worker's: the tensor, the difference, and the largest that
    rounding explains.
    """

    kind: str
    rank: int
    gap: Gap
    rounding: float


@dataclass
class StepCheck:
    """What one worker made, on every rank, and on rank 1 its twin; `missed` compares.
    Collective.

    alone: on rank 0, both of them; the others have its numbers, without tensors; again: on rank
    0, what one worker makes of the batch once more (-1), in one of several orders, or with its
    parameters moved; reference: there, in float64;  eps: of what a model in float64 computes in
    less;  precise: it is in float64;  double: the misses of the strategy's own step in float64,
    on every rank, or None where that cannot be;  test: on every rank, what was tested;  tested:
    its loss under the strategy.
    """

    world: World
    serial_outcome: StepOutcome
    baseline_outcome: StepOutcome | None
    make_variant: Callable[[int], StepOutcome] | None
    make_precise_outcome: Callable[[], StepOutcome] | None
    eps: float
    is_float64: bool
    first_rank_only: bool = False
    loss_only: bool = False
    rerun_in_float64: Callable[[], list[Mismatch] | None] | None = None
    test_part: BatchExcerpt | None = None
    test_loss: float | str = ""
    loss_eps: float = 0.0

    def find_mismatches(self, outcome: StepOutcome, loss_dtype: torch.dtype) -> list[Mismatch]:
        """The kinds that are not one worker's; on every rank. loss: the loss's type."""
        self.loss_eps = max(
            self.eps,
            torch.finfo(loss_dtype).eps,
            0.0 if self.is_float64 else torch.finfo(torch.float32).eps,
        )
        if self.first_rank_only:  # who has no loss does not know its type
            self.loss_eps = float(
                self.world.all_reduce(torch.tensor(self.loss_eps, dtype=torch.float64), "MAX")
            )
        mine = self._compare_outcomes(outcome)
        twin = (
            None if self.baseline_outcome is None else self._compare_outcomes(self.baseline_outcome)
        )
        keys = list(mine)
        rounding = {
            key: twin[key].value if twin and key in twin and twin[key].is_rounding else 0.0
            for key in keys
        }
        told = torch.tensor(
            [[mine[key].value, rounding[key], mine[key].equality_tolerance] for key in keys],
            dtype=torch.float64,
        )
        told = told.nan_to_num(nan=math.inf)
        worst = told if self.first_rank_only else self.world.all_reduce(told, "MAX")
        doubtful = [
            key
            for key, (value, twins, floor) in zip(keys, worst.tolist(), strict=True)
            if value > max(floor, 1.5 * twins)
        ]
        doubtful = self.world.broadcast_object(doubtful) if self.first_rank_only else doubtful
        return self._judge_doubtful(outcome, doubtful) if doubtful else []

    def _iterate_baselines(
        self, numbers: Iterable[int], reference: StepOutcome | None = None
    ) -> Iterator[dict[GapKey, Gap]]:
        """Further twins' differences, where they are believed; those of moved parameters mix no
        samples, and always are.
        """
        assert self.make_variant is not None
        for number in numbers:
            # samples that cannot be brought into another order
            with contextlib.suppress(ValueError):
                found = self._compare_outcomes(self.make_variant(number), reference)
                yield {
                    key: gap
                    for key, gap in found.items()
                    if gap.is_rounding or number == len(SAMPLE_ORDERINGS)
                }

    def _compare_outcomes(
        self, outcome: StepOutcome, reference: StepOutcome | None = None
    ) -> dict[GapKey, Gap]:
        found = compute_gaps(outcome, reference or self.serial_outcome, self.eps)
        return {
            key: replace(gap, eps=max(gap.eps, self.loss_eps))
            if key[0] in ("loss", "weight", "test")
            else gap
            for key, gap in found.items()
        }

    def _check_repetition(self) -> Mismatch | None:
        """One worker's step is another one when it is made once more: then all twins agree with
        everything.
        """
        assert self.make_variant is not None
        unlike = [
            gap
            for gap in self._compare_outcomes(self.make_variant(-1)).values()
            if not gap.is_rounding
        ]
        return (
            Mismatch(
                "repetition", 0, max(unlike, key=lambda gap: gap.value / (gap.largest or 1.0)), 0.0
            )
            if unlike
            else None
        )

    def _judge_doubtful(self, outcome: StepOutcome, doubtful_keys: list[GapKey]) -> list[Mismatch]:
        """Against a reference one precision higher, or more twins, all on rank 0; then by the
        strategy's own step there.
        """
        better: StepOutcome | None = None
        if self.make_precise_outcome and self.world.rank == 0 and not self.is_float64:
            try:
                better = self.make_precise_outcome()
            except Exception:  # it cannot run in float64
                better = None
            # a test cannot
            if better is not None and type(better.test_loss) is not type(
                self.serial_outcome.test_loss
            ):
                better = None
        if self.first_rank_only:
            better, _ = broadcast_numbers(self.world, better)
            told = [self._compare_outcomes(outcome, better)]
        else:
            better, _ = broadcast_outcome(self.world, better, self.serial_outcome, torch.float64)
            told = self.world.gather_objects(self._compare_outcomes(outcome, better))
        misses: list[Mismatch] = []
        if self.world.rank == 0:
            if unsteady := self._check_repetition():
                doubtful_keys = []
                rounding = []
                misses = [unsteady]
            elif better is not None:
                rounding = [
                    self._compare_outcomes(self.serial_outcome, better),
                    *self._iterate_baselines([0], better),
                ]
            else:
                rounding = [
                    pool_gaps(each)
                    for each in self._iterate_baselines(range(len(SAMPLE_ORDERINGS) + 1))
                ]
                doubtful_keys = list(dict.fromkeys((kind, "") for kind, _ in doubtful_keys))
                told = [pool_gaps(each) for each in told]
            for key in doubtful_keys:
                values = [each[key].value for each in rounding if key in each]
                bound = max(filter(math.isfinite, values), default=0.0)
                found = [(rank, each.get(key, Gap())) for rank, each in enumerate(told)]
                rank, gap = max(found, key=lambda pair: pair[1].value)
                if gap.value > max(4 * bound, gap.equality_tolerance):
                    misses.append(Mismatch(key[0], rank, gap, bound))
        misses = self.world.broadcast_object(misses)
        in_double = (
            self.rerun_in_float64()
            if misses and better is not None and self.rerun_in_float64
            else None
        )
        return misses if in_double is None else in_double


def broadcast_outcome(
    world: World,
    outcome: StepOutcome | None,
    template: StepOutcome,
    dtype: torch.dtype | None = None,
    reason: str | None = None,
) -> tuple[StepOutcome | None, str | None]:
    """What rank 0 made, on every rank, or None, and why: in one message, and another where a
    forward changes more than buffers.

    like: of its names and shapes;  dtype: of its real numbers.
    """
    if world.size == 1:
        return outcome, reason
    names = [*template.gradients, *template.buffers]
    shapes = [*template.gradients.values(), *template.buffers.values()]
    mine = outcome or StepOutcome(0.0, 0.0, {}, {})
    here = [(mine.gradients | mine.buffers).get(name) for name in names]
    told = torch.tensor(
        [
            outcome is not None,
            bool(mine.changed_parameters or mine.changed_state),
            mine.loss,
            mine.weight,
            *(each is not None for each in here),
            *(name in mine.changed_buffers for name in names),
        ],
        dtype=torch.float64,
    )
    places = [
        torch.zeros(0)
        if each is None
        else torch.zeros(each.shape, dtype=choose_dtype(each, dtype), device=each.device)
        for each in shapes
    ]
    flat = torch.cat(
        [
            _view_as_bytes(each, world.device)
            for each in (
                told,
                *(
                    place if each is None else each
                    for place, each in zip(places, here, strict=True)
                ),
            )
        ]
    )
    world.copy_from_first(flat)
    told, *found = (
        part.clone().view(each.dtype).view(each.shape)
        for part, each in zip(
            flat.split([each.numel() * each.element_size() for each in (told, *places)]),
            (told, *places),
            strict=True,
        )
    )
    there, more, loss, weight, *flags = told.tolist()
    if not there:
        return None, world.broadcast_object(reason)
    values = {
        name: value for name, value, present in zip(names, found, flags, strict=False) if present
    }
    changed = frozenset(
        name for name, moved in zip(names, flags[len(names) :], strict=True) if moved
    )
    moved, state = (
        world.broadcast_object((mine.changed_parameters, mine.changed_state)) if more else ({}, {})
    )
    return StepOutcome(
        loss,
        weight,
        {name: values.get(name) for name in template.gradients},
        {name: values[name] for name in template.buffers if name in values},
        changed,
        moved,
        state,
    ), None


def broadcast_numbers(
    world: World, outcome: StepOutcome | None, reason: str | None = None
) -> tuple[StepOutcome | None, str | None]:
    """What rank 0 made, there, and on the other ranks the same without gradients and buffers;
    or None, and why.
    """
    told = world.broadcast_object(
        (
            None
            if outcome is None
            else replace(outcome, gradients={}, buffers={}, changed_buffers=frozenset()),
            reason,
        )
    )
    return (told[0] if outcome is None else outcome), (told[1] if told[0] is None else None)


def _view_as_bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
