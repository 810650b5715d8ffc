"""Messages for a training that is not one worker's.

A message names the tensor, the difference, a cause, and the repair. A cause that was not tested is
called a possible one.
"""

from __future__ import annotations

import math

from paragrad.parallel.registry import has_model_shards, is_builtin_technique
from paragrad.strategies.strategy import list_factors
from paragrad.trainer.checks.step_check import DivisionTest, Mismatch
from paragrad.trainer.training import Training

KIND_NAMES = {
    "buffer": "a buffer",
    "parameter": "a parameter that the forward changes",
    "state": "what the forward keeps in Python",
    "test": "the loss of a test (eval mode)",
    "repetition": "one worker's own step, made once more,",
}
SKIP_HINT = "--skip-first-step-check (skip_first_step_check=True) trains it all the same"


def explain_layout_draws(draw: str) -> str:
    """Explain that random draws depend on the layout (`Draws.layout_dependence`).

    Args:
        draw: The draw.
    """
    return (
        f"the model's random draws depend on how the batch is split: {draw}; draw by torch's "
        f"functions with the samples as a dimension of their own, or in the dataset; {SKIP_HINT}"
    )


def describe_mismatch(
    training: Training, mismatches: list[Mismatch], division_test: DivisionTest | None = None
) -> str:
    """Describe the first step that differs from one worker's.

    Args:
        training: The training.
        mismatches: The kinds of values that differ.
        division_test: Whether the division of the batch alone explains them, if it was tested.
    """
    # A changed parameter or changed state explains the other mismatches.
    first = min(mismatches, key=lambda miss: miss.kind not in ("parameter", "state"))
    subject = KIND_NAMES.get(first.kind, f"the {first.kind}")
    scale = (
        f" (the largest {first.kind} is {first.gap.largest:.3g})"
        if first.kind in ("gradient", "buffer")
        else (f" (one worker's is {first.gap.largest:.6g})")
    )
    difference = (
        f"off by {first.gap.value:.3g}{scale}, where rounding explains {first.rounding:.1g}"
    )
    if math.isinf(first.gap.value):
        difference = (
            "different, and must be equal bit for bit"
            if first.kind in ("buffer", "parameter", "state")
            else ("missing, or not finite, on one side")
        )
    when, consequence = (
        ("the first update", "nothing was updated")
        if not training.state.own_steps
        else ("this update", f"it was not made ({training.state.own_steps} were)")
    )
    return (
        f"not one worker's training: before {when} {subject} is {difference}; {consequence}. "
        f"{diagnose_step(training, mismatches, division_test)}; {SKIP_HINT}"
    )


def diagnose_step(
    training: Training, mismatches: list[Mismatch], division_test: DivisionTest | None = None
) -> str:
    """Return the cause of a step that differs, or a possible one, with the repair.

    Args:
        training: The training.
        mismatches: The kinds of values that differ.
        division_test: Whether the division of the batch alone explains them, if it was tested.
    """
    kinds = {miss.kind for miss in mismatches}
    if training.options.exchange_options.inject_fault:
        return f"Cause: the planted bug {training.options.exchange_options.inject_fault}"
    if "repetition" in kinds:
        return OUTSIDE_STATE
    custom_names = [
        factor.name
        for factor in list_factors(training.setup.strategy)
        if not is_builtin_technique(factor)
    ]
    if custom_names and kinds != {"buffer"}:
        return CUSTOM_STRATEGY.format(
            "cut" if training.setup.layout.is_partitioned else "exchange",
            " and ".join(custom_names),
        )
    if kinds == {"test"}:
        return EVAL_MODE_PATH
    kinds -= {"test"}
    if kinds & {"parameter", "state"}:
        return CHANGED_PARAMETER if "parameter" in kinds else COUNTING_STATE
    moved_buffers = [
        miss.gap.tensor
        for miss in mismatches
        if miss.kind == "buffer" and miss.gap.tensor not in training.batch_norm.normalized_buffers
    ]
    if (
        moved_buffers
        and training.state.division.micro > 1
        and len(training.state.division.shares) == 1
        and not training.batch_norm.has_computed
    ):
        return FORWARD_COUNT.format(moved_buffers[0])
    if "weight" in kinds:
        return explain_division(LOSS_DIVISOR, division_test)
    if "loss" in kinds and training.module.has_traced_divisor is False:
        return explain_division(UNTRACED_MEAN, division_test)
    if hooked_names := [
        name for name, each in training.setup.parameters.items() if each._backward_hooks
    ]:
        return explain_division(GRADIENT_HOOK.format(", ".join(hooked_names[:3])), division_test)
    if kinds == {"gradient"} and not training.module.is_linear:
        return NONLINEAR_GRADIENT
    if "loss" in kinds or kinds == {"gradient"}:
        if training.setup.layout.is_partitioned and training.state.division.is_undivided:
            # No rank has a share of the batch, so the loss cannot mix samples of different shares.
            return (
                UNTRACED_CROSSING
                if any(
                    has_model_shards(each) and not each.splits_layers
                    for each in list_factors(training.setup.strategy)
                )
                else UNTRACED_FORWARD
            )
        drawn_names = ", ".join(dict.fromkeys(call.name for call in training.draws.calls))
        other_cause = f"; or what {drawn_names} draws is not each sample's own"
        if moved_buffers:
            other_cause = f"; or it reads {moved_buffers[0]}, a buffer that it makes of its share"
        elif not drawn_names:
            other_cause = ""
        return explain_division(MIXED_SAMPLES + other_cause, division_test)
    return (
        RECOMPUTED_BATCH_NORM
        if training.setup.layout.is_partitioned and training.batch_norm.has_computed
        else SHARE_BUFFER
    )


def explain_division(suspicion: str, test: DivisionTest | None = None) -> str:
    """Explain a step that a divided batch may have made another one.

    Args:
        suspicion: What in model or loss would do so, with the repair.
        test: Whether the division alone does so on one worker, if it was tested.
    """
    if test is None:
        return f"Cause not found; possible: {suspicion}"
    return (
        f"Cause: the division of the batch. On one worker too, the batch in the same parts gives "
        f"another {test.kind} than the whole one (off by {test.value:.3g}). Possible: {suspicion}"
        if test.is_cause
        else NOT_DIVISION
    )


def diagnose_difference(tensor: str, is_buffer: bool, fault: str | None) -> str:
    """Return a possible cause of a training that differs (`verify`), with the repair.

    Args:
        tensor: The tensor that differs first.
        is_buffer: Whether it is a buffer.
        fault: The fault that was injected, or None.
    """
    if fault:
        return f"the planted bug {fault}"
    if tensor == "loss of the whole batch":
        return explain_division(UNTRACED_MEAN)
    return (
        SHARE_BUFFER
        if is_buffer
        else explain_division(
            MIXED_SAMPLES
            + "; or the loss weighs targets in a way that cannot be seen: return (sum, weight)"
        )
    )


BY_DESIGN = "paragrad looks for none: this strategy's training is not serial's, by design"
CUSTOM_STRATEGY = (
    "Cause not found; possible: the {} of {}, which is not paragrad's own; let it promise "
    "exact=False, if the difference is intended"
)
# what a divided batch may show, for `explain_division`
LOSS_DIVISOR = (
    "the loss divides by something that does not add up over shares (padding that differs by "
    "share, a constant); return the pair (sum, weight) from it, or collate whole batches: "
    "collate=paragrad.WholeBatch(collate)"
)
UNTRACED_MEAN = (
    "the mean in the loss is not over samples, and its divisor is not "
    "known; return the pair (sum, weight)"
)
MIXED_SAMPLES = (
    "the model or the loss mixes samples (a mean over the batch, a comparison of samples), so "
    "that a share gives another result than its part of the batch"
)
GRADIENT_HOOK = (
    "a hook on the gradient of {} has another effect on a share's gradient than on the "
    "whole one (clips it, divides by its norm); do it in the optimizer"
)
NOT_DIVISION = (
    "Cause not found; possible: model, loss or data are not the same on every rank (the number of "
    "a rank, a generator or a file of its own), or a forward reads or changes a value in a way "
    "that paragrad does not see (copies of parameters, .data). It is not the division of the "
    "batch: one worker that takes the batch in the same parts gives the result of the whole batch"
)
COUNTING_STATE = (
    "Cause not found; possible: what it keeps (a counter, a running mean) counts its share or its "
    "micro-batches; make it a function of the step, or keep it in the loop"
)
OUTSIDE_STATE = (
    "Cause: model or loss keep a state or a random generator outside of themselves; draw "
    "by torch's functions without generator=, and count in attributes or buffers of the model"
)
CHANGED_PARAMETER = (
    "Cause not found; possible: every rank changes it by what its share has; change it in the"
    " optimizer's step"
)
RECOMPUTED_BATCH_NORM = (
    "Cause not found; possible: a batch norm that the model computes again in backward "
    "(torch.utils.checkpoint) counts twice on one worker, and once where the model is "
    "divided across it; leave its checkpoints out (recompute=true of pipeline does the "
    "same)"
)
NONLINEAR_GRADIENT = (
    "Cause: a hook or an autograd function of the model changes a gradient in a way that is "
    "not linear (it clips, or divides by a norm), and has another effect on a share's gradient; do "
    "it in the optimizer"
)
UNTRACED_CROSSING = (
    "Cause not found; possible: a tensor goes from part to part in a way that paragrad does not "
    "see, or the model keeps something from one call to the next; divide it elsewhere (cut=[...]), "
    "or train it with data(n) and nothing else"
)
UNTRACED_FORWARD = (
    "Cause not found; possible: a forward reads or changes a value in a way that paragrad does not "
    "see (copies of parameters, a view that is changed in place), or the model keeps something "
    "from one call to the next; train it with data(n)"
)
EVAL_MODE_PATH = (
    "Cause not found; possible: in eval mode it goes another way than in training, and reads "
    "or changes a value there in a way that paragrad does not see (copies of parameters, "
    "state_dict); let it go the same way in both, or train it with data(n) alone"
)
FORWARD_COUNT = (
    "Cause not found; possible: every forward changes the buffer {} (a count, the vectors of "
    "a spectral norm), and a batch of several micro-batches has as many; train it with "
    "micro=1"
)
SHARE_BUFFER = (
    "Cause not found; possible: the buffer counts what a share has, not what the batch has; "
    "make what it holds a function of the step, or leave the buffer out (register_buffer is for "
    "what is equal on all workers)"
)
