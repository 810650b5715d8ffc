"""Trials of a cut: all stages run one after another in this process, as ranks will run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from paragrad.datasets.loading import clone_batch
from paragrad.engine.probe import use_model_eval_mode
from paragrad.engine.state.preserve_state import undo_forward_effects
from paragrad.engine.state.values import is_differentiable
from paragrad.errors import StepFailed, describe_error
from paragrad.jobs.loss import call_model
from paragrad.parallel.tracing.crossing_plan import HIDDEN_TENSOR
from paragrad.parallel.tracing.stage_forward import StageForward, silence_fake_tensors
from paragrad.parallel.tracing.tracer import find_attribute_tensors, find_tensors
from paragrad.runtime.generators import keep_generators


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype or not is_differentiable(one):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    # values that a mask filled in do not count
    bound = min(1e-2, 1e4 * torch.finfo(one.dtype).eps)
    differs = one.isfinite() & (one != other)
    largest = float(one[differs].abs().max()) if differs.any() else 0.0
    return torch.allclose(one, other, rtol=bound, atol=bound * largest, equal_nan=True)


def try_all_stages(stage_forward: StageForward, inputs: Any) -> Any:
    """Run all stages one after another, as ranks will run them; all changes are undone.

    Args:
        stage_forward: The stages of the model.
        inputs: Inputs of some samples.

    Returns:
        The output of the last stage.

    Raises:
        StepFailed: A stage uses something of another stage that does not cross.
    """
    received = list[Tensor]()
    out = None
    for stage in range(stage_forward.last_stage + 1):
        try:
            with undo_forward_effects(stage_forward.model), silence_fake_tensors():
                received, out = stage_forward.run_alone(inputs, stage, received)
        except StepFailed:
            raise
        except Exception as error:
            raise StepFailed(
                f"part {stage} of the model, run by itself, raised {describe_error(error)}; "
                "train it without cutting it"
            ) from error
        if any(isinstance(each, FakeTensor) for each in find_attribute_tensors([received, out])):
            raise StepFailed(HIDDEN_TENSOR)
    return out


def try_in_eval_mode(stage_forward: StageForward, inputs: Any) -> None:
    """Run all stages in eval mode without gradients, in which modules may take other paths.

    Nothing is checked if the whole model fails in this mode, or is not deterministic.

    Args:
        stage_forward: The stages of the model.
        inputs: Inputs of some samples.

    Raises:
        StepFailed: A stage fails, or the output differs from that of the whole model.
    """
    with use_model_eval_mode(stage_forward.model), torch.no_grad():
        try:
            with undo_forward_effects(stage_forward.model), keep_generators():
                expected, repeated = (
                    find_tensors(call_model(stage_forward.model, clone_batch(inputs)))
                    for _ in range(2)
                )
        except Exception:
            return
        if not all(map(is_close, expected, repeated)):
            return
        outputs = find_tensors(try_all_stages(stage_forward, inputs))
    if len(outputs) != len(expected) or not all(map(is_close, expected, outputs)):
        raise StepFailed(
            "in eval mode the model gives another output in parts than whole; let modules do "
            "the same however they are called, or train it without cutting it"
        )
