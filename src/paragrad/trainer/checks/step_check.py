"""The step check: compare a step with one worker's before anything is updated.

Rank 0 runs the whole global batch as one worker would, on the model itself. In the first step this
happens before the exchange is set up or the model is partitioned. The *rounding baseline* is the
same step with the samples in reverse order. Rank 0 runs it on a copy, and only if a difference is
not small enough without it. All state is restored afterwards.

The strategy then makes its own step. Between its gradients and its update, the loss, the weight,
the gradients and the buffers are compared with the reference. Rank 0 alone holds its tensors, and
compares. In the first step the other ranks compare too, if what they have is not rank 0's bit for
bit: they get the reference then. If the model is partitioned, the loss of some samples in a test
(eval mode) is compared too in the first step. Modules may take other paths there than in training.

Rounding is measured, not assumed. Let d be the difference from serial and t that of the baseline,
over the tensors of a module:

    equal       d is at most 8 eps of their largest value, or at most 1.5 t. Up to three baselines
                are made, and t is the largest of their differences. It is also equal if it is
                equal to two baselines: the reference is then the exception. In the first step
                that may also be a forward that changes by itself, and it is doubtful
    doubtful    any other d; the step is then compared with a reference of higher precision
    differs     the strategy's error against that reference is more than 4 times the larger of
                serial's and the baseline's
    repeated    if the first step differs, the strategy makes it once more in the higher precision,
                and that result is compared; later steps are compared with more baselines

(1.5 t never exceeds three times the larger of the two errors, so the first line implies the test
of the third. The repetition exists because one baseline may be lucky: in a deep model, a
rectifier that flips is a hundred times all other rounding.)

A baseline is trusted while it shows rounding, and not mixed samples. If there is no higher
precision, or the model cannot run in it, further baselines take its place. They are other orderings
of the samples, and parameters moved by one unit in the last place. Their differences are pooled
over all tensors of a kind. The step then differs if its difference is more than 4 times their
largest.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch

from paragrad.engine.loss_additivity import BatchExcerpt
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.rng.draws import Draws, key_draws
from paragrad.engine.state.preserve_state import ModuleSnapshot, preserve_module_state
from paragrad.errors import describe_error
from paragrad.jobs.loss import LossModule
from paragrad.runtime.generators import keep_generators
from paragrad.runtime.world import World
from paragrad.trainer.checks.step_result import (
    Gap,
    GapKey,
    StepOutcome,
    compute_gaps,
    pool_gaps,
)
from paragrad.trainer.evaluation import make_whole_model_outputs, score_batches

SampleOrdering = Callable[[list[int]], list[int]]
# Orderings of the samples of a group: the baseline's, and others if there is no precise reference.
SAMPLE_ORDERINGS: tuple[SampleOrdering, ...] = (
    lambda group: group[::-1],
    lambda group: group[len(group) // 2 :] + group[: len(group) // 2],
    lambda group: group[::2] + group[1::2],
)


# Kinds of one rank's tensors, which may flip in the reference alone. Loss and weight are shared.
TENSOR_KINDS = ("gradient", "buffer")
# A kind that is equal to that of so many baselines is one worker's: a rectifier flipped in the
# reference alone. One is not enough, because the strategy may order samples as that baseline does.
ENOUGH_AGREEMENTS = 2
# so many more moves of the parameters, where a step cannot be made once more in float64
MOVED_VARIANTS = 16


def run_reference_step(
    module: LossModule,
    parts: list[BatchExcerpt],
    draws: Draws,
    seed: int,
    step: int,
    loss_only: bool = False,
    test: BatchExcerpt | str = "",
) -> StepOutcome:
    """Run one worker's step on a batch. Gradients and buffers stay as the step leaves them.

    Args:
        module: Model and loss.

        parts: One part, or the micro-batches that batch norm sees. The positions of a part are the
            places of its samples in the global batch, by which its draws are keyed.

        draws: The random draws of the model.

        seed: The seed of the training.

        step: The step.

        loss_only: Whether only the loss is computed.

        test: The samples of the test, which is made first; or why there is no test.

    Returns:
        The outcome of the step before its update.
    """
    test_loss = test if isinstance(test, str) else _compute_test_loss(module, test)
    buffers_before = {
        name: buffer.detach().clone() for name, buffer in module.model.named_buffers()
    }
    snapshot = ModuleSnapshot(module, include_buffers=True)
    for parameter in module.model.parameters():
        parameter.grad = None
    loss, weight, remainder = _run_parts(module, parts, draws, seed, step, backward=not loss_only)
    if loss_only:
        return StepOutcome(loss, weight, {}, {})
    gradients = {name: parameter.grad for name, parameter in module.model.named_parameters()}
    if remainder != 1.0:
        for gradient in gradients.values():
            if gradient is not None:
                gradient.div_(remainder)
    # A buffer of a new shape is a cache that grew; it is left out.
    buffers = {
        name: buffer.detach().clone()
        for name, buffer in module.model.named_buffers()
        if name in buffers_before and buffer.shape == buffers_before[name].shape
    }
    changed = frozenset(
        name for name, buffer in buffers.items() if not torch.equal(buffer, buffers_before[name])
    )
    changed_parameters, changed_state = snapshot.collect_module_changes()
    # changed buffers would change the loss
    for put_back in snapshot.buffer_restorers if changed_state else ():
        put_back()
    if changed_state and _run_parts(module, parts, draws, seed, step, backward=False) == (
        loss,
        weight,
        remainder,
    ):
        # The state is written and never read: the last attention, the size of a batch.
        changed_state = {}
    return StepOutcome(
        loss,
        weight,
        gradients,
        buffers,
        changed,
        changed_parameters,
        changed_state,
        test_loss,
    )


def _compute_test_loss(module: LossModule, part: BatchExcerpt) -> float | str:
    """Compute the mean loss in a test, or return why there is none to compare with.

    The loss is computed twice, because random draws make it differ.
    """
    losses = list[float]()
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
                losses.append(total / weight if weight else math.nan)
    except Exception as error:
        return f"one worker's raised {describe_error(error)}"
    if not math.isfinite(losses[0]):
        return "no sample counts in it, or its loss is not finite"
    return losses[0] if losses[0] == losses[1] else "it differs each time it is computed"


def _run_parts(
    module: LossModule,
    parts: list[BatchExcerpt],
    draws: Draws,
    seed: int,
    step: int,
    backward: bool,
) -> tuple[float, float, float]:
    """Run all parts forward, and backward on their shares of the mean.

    Returns:
        (mean loss, weight, what the gradients must still be divided by).
    """
    loss = 0.0
    weight = 0.0
    divisor = float(sum(len(part.positions) for part in parts)) if len(parts) > 1 else None
    with module.divide_by(divisor):
        for part in parts:
            with key_draws(draws, seed, step, part.positions):
                share, part_weight = module(*part.copy_batch(), len(part.positions))
                if backward:
                    share.backward()
            loss = loss + float(share.detach())
            weight = weight + part_weight
    remainder = weight / divisor if divisor and weight else 1.0
    return loss / remainder, weight, remainder


# ---- the comparison --------------------------------------------------------------------------
@dataclass(frozen=True)
class Mismatch:
    """A kind of values that differs from one worker's.

    Attributes:
        kind: The kind: loss, weight, test, gradient, buffer, parameter, state, or repetition.

        rank: The rank on which the difference is largest.

        gap: The difference.

        rounding: The largest difference that rounding explains.
    """

    kind: str
    rank: int
    gap: Gap
    rounding: float


@dataclass(frozen=True)
class DivisionTest:
    """Whether the division of the batch alone makes one worker's step another one.

    Attributes:
        kind: The compared kind: loss, weight or gradient.
        value: The difference between one worker's step in parts and its step on the whole batch.
        is_cause: Whether this difference explains the mismatch.
    """

    kind: str
    value: float
    is_cause: bool


# The division explains a mismatch if it makes half of it. It does not explain one that is ten times
# all rounding, if what it makes is rounding.
LEAST_PART_OF_MISMATCH, ROUNDING_PART = 0.5, 0.1
# what the division may change; buffers and Python state of a share are no part of the whole's
DIVIDED_KINDS = ("loss", "weight", "gradient")


@dataclass
class StepCheck:
    """One worker's outcome, and the baseline's, to compare a step with.

    Attributes:
        world: The ranks that compare.

        serial_outcome: The outcome of one worker's step; on other ranks than the first without
            gradients and buffers.

        make_variant: On rank 0, repeats one worker's step: unchanged (-1), in another ordering of
            the samples, or with moved parameters.

        make_precise_outcome: On rank 0, makes one worker's step in float64.

        make_divided_outcome: On rank 0, makes one worker's step with the batch in the strategy's
            parts; None if there is one part, or batch norm sees all.

        eps: The eps of the coarsest type in which a float64 model computes some values.

        is_float64: Whether the model is in float64.

        loss_only: Whether only the loss is compared.

        rerun_in_float64: On every rank, the mismatches of the strategy's own step in float64, or
            None if that is impossible.

        test_part: On every rank, the samples of the test.

        test_loss: The loss of the test under the strategy.

        loss_eps: The eps of the loss's type.

        baseline_outcome: The outcome of the rounding baseline on rank 0, once it was needed.

        shared_kinds: The kinds of the reference's tensors that every rank has.

        is_first_step: Whether this is the first step.
    """

    world: World
    serial_outcome: StepOutcome
    make_variant: Callable[[int], StepOutcome] | None
    make_precise_outcome: Callable[[], StepOutcome] | None
    make_divided_outcome: Callable[[], StepOutcome] | None
    eps: float
    is_float64: bool
    loss_only: bool = False
    rerun_in_float64: Callable[[], list[Mismatch] | None] | None = None
    test_part: BatchExcerpt | None = None
    test_loss: float | str = ""
    loss_eps: float = 0.0
    baseline_outcome: StepOutcome | None = None
    shared_kinds: Collection[str] = ()
    is_first_step: bool = False

    def share_reference(self, kinds: Collection[str] = TENSOR_KINDS) -> None:
        """Give every rank tensors of one worker's step, so that all compare. Collective.

        Args:
            kinds: The kinds that other ranks get, of TENSOR_KINDS.
        """
        self.shared_kinds = kinds
        outcome, _ = broadcast_outcome(self.world, self.serial_outcome, kinds)
        self.serial_outcome = outcome or self.serial_outcome

    def find_mismatches(
        self, outcome: StepOutcome | None, loss_dtype: torch.dtype
    ) -> list[Mismatch]:
        """Find the kinds of values that differ from one worker's; the same list on every rank.

        Collective.

        Args:
            outcome: The outcome of the strategy's step on this rank; None if this rank has nothing
                to compare.
            loss_dtype: The type of the loss.
        """
        self.loss_eps = max(
            self.eps,
            torch.finfo(loss_dtype).eps,
            0.0 if self.is_float64 else torch.finfo(torch.float32).eps,
        )
        # A rank without a loss does not know its type.
        self.loss_eps = float(
            self.world.all_reduce(torch.tensor(self.loss_eps, dtype=torch.float64), "MAX")
        )
        doubtful_keys = self._find_doubtful(outcome)
        return self._judge_doubtful(outcome, doubtful_keys) if doubtful_keys else []

    def test_division(self, mismatches: list[Mismatch]) -> DivisionTest | None:
        """Test whether the division of the batch alone explains a step that differs. Collective.

        One worker makes the step once more, with the batch in the strategy's parts.

        Args:
            mismatches: The kinds of values that differ.

        Returns:
            The result, or None if there is none: the step cannot be made so, or shows neither.
        """
        if not any(miss.kind in DIVIDED_KINDS for miss in mismatches):
            return None
        result = None
        if self.world.rank == 0 and self.make_divided_outcome and self.make_variant:
            with contextlib.suppress(Exception):  # a part may be no batch for the model
                divided = self._compare_outcomes(self.make_divided_outcome())
                baseline = self._compare_outcomes(self.baseline_outcome or self.make_variant(0))
                result = _judge_division(divided, baseline, mismatches)
        received: DivisionTest | None = self.world.broadcast_object(result)
        return received

    def _find_doubtful(self, outcome: StepOutcome | None) -> list[GapKey]:
        """Find the kinds whose difference on some rank is not explained. Collective.

        Other ranks compare what they have of the reference. Baselines are made only while some kind
        is not equal without them.
        """
        rank_gaps = self.world.gather_objects(
            {} if outcome is None else self._compare_outcomes(outcome)
        )
        lists = self._iterate_doubtful(outcome, rank_gaps) if self.world.rank == 0 else iter(())
        doubtful_keys: list[GapKey] = []
        is_last = False
        while not is_last:  # a message before each baseline: ranks wait for no more than one
            doubtful_keys, is_last = self.world.broadcast_object(next(lists, None))
        return doubtful_keys

    def _iterate_doubtful(
        self, outcome: StepOutcome | None, rank_gaps: list[dict[GapKey, Gap]]
    ) -> Iterator[tuple[list[GapKey], bool]]:
        """Yield what no baseline explains so far, and whether it is the last list, on rank 0.

        If a baseline cannot be made, the rest stays doubtful, and is judged by other means.
        """
        doubtful_keys = _list_unexplained(rank_gaps, [])
        baselines = list[dict[GapKey, Gap]]()
        agreements = Counter[GapKey]()
        for number in range(len(SAMPLE_ORDERINGS)):
            if not doubtful_keys or self.make_variant is None or outcome is None:
                break
            yield doubtful_keys, False
            try:
                baseline = self.make_variant(number)
                self.baseline_outcome = self.baseline_outcome or baseline
                baselines.append(self._compare_outcomes(baseline))
                agreements.update(_list_equal(self._compare_outcomes(outcome, baseline)))
                del baseline  # before the next one is made
            except Exception:
                break
            own_gaps = {
                key: gap
                for key, gap in rank_gaps[0].items()
                if self.is_first_step
                or key[0] not in TENSOR_KINDS
                or agreements[key] < ENOUGH_AGREEMENTS
            }
            doubtful_keys = _list_unexplained([own_gaps, *rank_gaps[1:]], baselines)
        yield doubtful_keys, True

    def _measure_baseline(self, number: int, reference: StepOutcome | None) -> dict[GapKey, Gap]:
        """Measure the differences of one more baseline, without kinds that are not trusted.

        Moved parameters mix no samples, so their differences are always trusted.
        """
        assert self.make_variant is not None
        outcome = self.baseline_outcome if number == 0 else None
        try:
            outcome = outcome or self.make_variant(number)
        except ValueError:  # The samples cannot be reordered.
            return {}
        return {
            key: gap
            for key, gap in self._compare_outcomes(outcome, reference).items()
            if gap.is_rounding or number >= len(SAMPLE_ORDERINGS)
        }

    def _compare_outcomes(
        self, outcome: StepOutcome, reference: StepOutcome | None = None
    ) -> dict[GapKey, Gap]:
        gaps = compute_gaps(outcome, reference or self.serial_outcome, self.eps)
        return {
            key: replace(gap, eps=max(gap.eps, self.loss_eps))
            if key[0] in ("loss", "weight", "test")
            else gap
            for key, gap in gaps.items()
        }

    def _check_repetition(self) -> Mismatch | None:
        """Return a mismatch if one worker's step differs when it is repeated.

        All baselines would then agree with everything.
        """
        assert self.make_variant is not None
        differing = [
            gap
            for gap in self._compare_outcomes(self.make_variant(-1)).values()
            if not gap.is_rounding
        ]
        return (
            Mismatch(
                "repetition",
                0,
                max(differing, key=lambda gap: gap.value / (gap.largest or 1.0)),
                0.0,
            )
            if differing
            else None
        )

    def _judge_doubtful(
        self, outcome: StepOutcome | None, doubtful_keys: list[GapKey]
    ) -> list[Mismatch]:
        """Compare the doubtful kinds with a reference of higher precision, or with more baselines.

        Both exist on rank 0. If a kind still differs, the strategy repeats its own step in the
        higher precision.
        """
        precise: StepOutcome | None = None
        if self.make_precise_outcome and self.world.rank == 0 and not self.is_float64:
            try:
                precise = self.make_precise_outcome()
            except Exception:  # The model cannot run in float64.
                precise = None
            # The test cannot run in float64.
            if precise is not None and type(precise.test_loss) is not type(
                self.serial_outcome.test_loss
            ):
                precise = None
        precise, _ = broadcast_outcome(self.world, precise, self.shared_kinds)
        rank_gaps = self.world.gather_objects(
            {} if outcome is None else self._compare_outcomes(outcome, precise)
        )
        mismatches: list[Mismatch] = []
        judgements = (
            self._iterate_judgements(doubtful_keys, rank_gaps, precise)
            if self.world.rank == 0
            else iter(())
        )
        # a message after each step of one worker: ranks wait for no more than one
        while (judgement := self.world.broadcast_object(next(judgements, None))) is not None:
            mismatches = judgement
        float64_mismatches = (
            self.rerun_in_float64()
            if mismatches and precise is not None and self.rerun_in_float64
            else None
        )
        return mismatches if float64_mismatches is None else float64_mismatches

    def _iterate_judgements(
        self,
        doubtful_keys: list[GapKey],
        rank_gaps: list[dict[GapKey, Gap]],
        precise: StepOutcome | None,
    ) -> Iterator[list[Mismatch]]:
        """Yield the mismatches after each step of one worker, on rank 0; the last ones count.

        More baselines can only explain more, so no more are made than explain all.
        """
        is_pooled = precise is None
        if is_pooled:
            doubtful_keys = list(dict.fromkeys((kind, "") for kind, _ in doubtful_keys))
            rank_gaps = [pool_gaps(each) for each in rank_gaps]
        rounding_gaps = (
            [] if precise is None else [self._compare_outcomes(self.serial_outcome, precise)]
        )
        mismatches = _list_mismatches(doubtful_keys, rank_gaps, rounding_gaps)
        yield mismatches
        is_rounding = all(
            each.get(key, Gap()).is_rounding for each in rounding_gaps for key in doubtful_keys
        )
        if (mismatches or not is_rounding) and (repetition := self._check_repetition()):
            yield [repetition]
            return
        # Several, where the strategy does not make its step once more in higher precision. A
        # rectifier near 0 flips under half of all moves of the parameters, and its flip is a
        # hundred times all other rounding.
        count = 1 if self.rerun_in_float64 and precise else len(SAMPLE_ORDERINGS) + 1
        count += 0 if self.rerun_in_float64 else MOVED_VARIANTS
        for number in range(count):
            if not mismatches:
                break
            gaps = self._measure_baseline(number, precise)
            rounding_gaps.append(pool_gaps(gaps) if is_pooled else gaps)
            mismatches = _list_mismatches(doubtful_keys, rank_gaps, rounding_gaps)
            yield mismatches


def _judge_division(
    divided: dict[GapKey, Gap], baseline: dict[GapKey, Gap], mismatches: list[Mismatch]
) -> DivisionTest | None:
    """Judge whether the division of the batch explains the mismatches.

    Args:
        divided: The differences of one worker's step in parts.
        baseline: The differences that rounding makes in the same type.
        mismatches: The kinds of values that differ.

    Returns:
        The result; None if the differences show neither.
    """
    results = []
    for miss in mismatches:
        module = (miss.gap.tensor or "").rpartition(".")[0] if miss.kind == "gradient" else ""
        if miss.kind not in DIVIDED_KINDS or (miss.kind, module) not in divided:
            continue
        gap = divided[miss.kind, module]
        if not math.isfinite(gap.value) or not math.isfinite(miss.gap.value):
            return None
        rounding = max(
            gap.equality_tolerance,
            4 * miss.rounding,
            4 * _get_rounding([baseline], (miss.kind, module)),
        )
        if gap.value > max(rounding, LEAST_PART_OF_MISMATCH * miss.gap.value):
            return DivisionTest(miss.kind, gap.value, True)
        is_other = gap.value <= rounding <= ROUNDING_PART * miss.gap.value
        results.append(DivisionTest(miss.kind, gap.value, False) if is_other else None)
    return results[0] if results and all(results) else None


def _get_rounding(baselines: list[dict[GapKey, Gap]], key: GapKey) -> float:
    """Return the largest difference that rounding makes in trusted baselines; without one 0."""
    gaps = [each[key] for each in baselines if key in each]
    return max((gap.value for gap in gaps if gap.is_rounding), default=0.0)


def _list_equal(gaps: dict[GapKey, Gap]) -> list[GapKey]:
    """List the kinds without a difference."""
    return [key for key, gap in gaps.items() if gap.value <= gap.equality_tolerance]


def _list_unexplained(
    rank_gaps: list[dict[GapKey, Gap]], baselines: list[dict[GapKey, Gap]]
) -> list[GapKey]:
    """List the kinds whose difference on some rank is more than equality and baselines explain."""
    return [
        key
        for key in dict.fromkeys(key for each in rank_gaps for key in each)
        if any(
            not gap.value <= max(gap.equality_tolerance, 1.5 * _get_rounding(baselines, key))
            for gap in (each.get(key, Gap()) for each in rank_gaps)
        )
    ]


def _list_mismatches(
    keys: list[GapKey],
    rank_gaps: list[dict[GapKey, Gap]],
    rounding_gaps: list[dict[GapKey, Gap]],
) -> list[Mismatch]:
    """List the kinds whose difference on some rank is more than rounding explains.

    Args:
        keys: The kinds.
        rank_gaps: The differences on each rank.
        rounding_gaps: The differences that rounding makes.
    """
    mismatches = []
    for key in keys:
        values = [each[key].value for each in rounding_gaps if key in each]
        bound = max(filter(math.isfinite, values), default=0.0)
        candidates = [(rank, each.get(key, Gap())) for rank, each in enumerate(rank_gaps)]
        rank, gap = max(candidates, key=lambda pair: pair[1].value)
        if gap.value > max(4 * bound, gap.equality_tolerance):
            mismatches.append(Mismatch(key[0], rank, gap, bound))
    return mismatches


def broadcast_outcome(
    world: World,
    outcome: StepOutcome | None,
    kinds: Collection[str] = (),
    reason: str | None = None,
) -> tuple[StepOutcome | None, str | None]:
    """Send rank 0's outcome to every rank. Collective.

    Args:
        world: The ranks.
        outcome: The outcome; used on rank 0 only.
        kinds: The kinds of tensors that are sent, of TENSOR_KINDS.
        reason: Why there is no outcome; used on rank 0 only.

    Returns:
        (outcome, reason): on rank 0 the complete outcome, on other ranks what was sent; or None and
        the reason.
    """
    sent = None
    if outcome is not None:
        sent = replace(
            outcome,
            gradients=outcome.gradients if "gradient" in kinds else {},
            buffers=outcome.buffers if "buffer" in kinds else {},
            changed_buffers=outcome.changed_buffers if "buffer" in kinds else frozenset(),
        ).move_to(torch.device("cpu"))
    received, why_not = world.broadcast_object((sent, reason))
    if world.rank == 0:
        return outcome, None if outcome else reason
    return received and received.move_to(world.device), None if received else why_not
