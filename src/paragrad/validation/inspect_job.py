"""Inspect a job before any rank starts: check it, and collect facts about it."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import (
    Dataset,
    WholeBatch,
    clone_batch,
    convert_batch,
    explain_whole_batch,
    refuse_loader,
    separate_target,
)
from paragrad.datasets.sample_order import SampleOrder, refuse_endless_dataset
from paragrad.datasets.sampler import check_sampler
from paragrad.datasets.stream import Stream, refuse_sampled_stream
from paragrad.engine import batch_norm
from paragrad.engine.loss_additivity import (
    MAX_SAMPLES,
    BatchExcerpt,
    collect_parts,
    find_additivity_error,
)
from paragrad.engine.probe import Probe, probe_model
from paragrad.engine.rng.draws import Draws
from paragrad.engine.state.preserve_state import list_replaced_parameters, preserve_module_state
from paragrad.errors import Refused, StepFailed, describe_error, warn_user
from paragrad.jobs.callback import Callback, EarlyStopping
from paragrad.jobs.job import CPU, DTYPES, Job, open_dataset
from paragrad.jobs.loss import LossModule, call_model, describe_bad_loss
from paragrad.jobs.precision import convert_model
from paragrad.optim.rate_scaling import adapt_scheduler
from paragrad.runtime.generators import fingerprint_generators, keep_generators
from paragrad.runtime.world import World
from paragrad.trainer.evaluation import call_without_gradients
from paragrad.trainer.identity import compute_initial_loss, describe_initial_training
from paragrad.validation.lazy_modules import LazyModelBuilder, list_lazy_tensors
from paragrad.validation.repeatability import explain_unequal_samples
from paragrad.validation.scheduler_check import refuse_unclear_scheduler

METRIC_TOLERANCE = 0.02  # of the sizes: a metric of numbers of few digits is rounded
CLOSURE_MESSAGE = (
    "{} needs a closure, which runs the model again inside the update; use an "
    "optimizer that needs none"
)

FUNCTION_EXAMPLES = {
    "model": "lambda: Net()",
    "loss": "lambda output, target: ...",
    "optimizer": "lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
}


@dataclass(frozen=True)
class JobInspection:
    """What validation found out about a job.

    Attributes:
        samples: The number of training samples of an epoch.

        test_samples: The number of test samples.

        trained_elements: The number of elements of all trained parameters.

        order: The order of the samples.

        shapes: The shapes of the model's state, by serial name.

        initial_training: Optimizer, scheduler and clipping before the first step: "optimizer",
            "lr of group 0", ...

        probe: What one forward and backward of the model showed.

        whole_batch_reason: Why collate must be given whole batches, or None.

        additivity_refusal: Why the loss of a batch is not that of its parts, or None.

        first_loss: The loss of samples from all over the dataset, in eval mode, before training;
            None if there is no such loss.

        lazy_inputs: Inputs that give lazy modules their shapes, if the model has some.

        rate_scaling: The factor of the learning rate and its reason, or None.
    """

    samples: int
    test_samples: int
    trained_elements: int
    order: SampleOrder
    shapes: dict[str, list[int]]
    initial_training: dict[str, Any]
    probe: Probe
    whole_batch_reason: str | None = None
    additivity_refusal: str | None = None
    first_loss: float | None = None
    lazy_inputs: Any = None
    rate_scaling: str | None = None

    def prepare_job(self, job: Job) -> Job:
        """Return the job in a form that can be trained.

        The shapes of its model are set, its collate is given whole batches if it needs them, and
        its scheduler counts steps of its batch.

        Args:
            job: The job.
        """
        job, _ = adapt_scheduler(job, self.samples)
        job = (
            job
            if self.lazy_inputs is None
            else job.replace(model=LazyModelBuilder(job.model, self.lazy_inputs))
        )
        return (
            job.replace(collate=WholeBatch(job.collate))
            if self.whole_batch_reason and job.collate
            else job
        )


def inspect_job(job: Job, data: Path | None = None) -> JobInspection:
    """Check a job, build its model once, and run one small batch forward and backward.

    Args:
        job: The job.
        data: The folder of data.

    Raises:
        Refused: If the job cannot be trained.
    """
    _check_job_fields(job)
    train = _open_dataset(job, "train", data)
    test = _open_dataset(job, "test", data) if job.test is not None else None
    if job.sampler is not None:
        refuse_sampled_stream(train)
        _call_job_function(
            job, "sampler", lambda: check_sampler(job.sampler, job.seed, len(train), job.epochs)
        )
    order = job.make_order(train)
    if job.batch > order.samples:
        warn_user(
            f"job {job.name}: the batch of {job.batch} is larger than the {order.samples} samples "
            "of train, so each step takes all of them"
        )
    job, rate_scaling = adapt_scheduler(job, order.samples)
    model = _call_job_function(job, "model", job.build_model)
    lazy_inputs = None
    if list_lazy_tensors(model):
        first_samples = job.make_samples(train)[0, list(range(min(len(train), 2)))]
        lazy_inputs = convert_batch(
            separate_target(first_samples)[0], CPU, torch.get_default_dtype()
        )
        model = _call_job_function(
            job, "model", job.replace(model=LazyModelBuilder(job.model, lazy_inputs)).build_model
        )
    if isinstance(job.loss, nn.Module) and any(
        parameter.requires_grad for parameter in job.loss.parameters()
    ):
        raise Refused(
            f"job {job.name}: the loss holds parameters with requires_grad, which the optimizer "
            "does not get; put them into the model and let it return what the loss needs, such as "
            "(output, penalty), or freeze them (requires_grad_(False))"
        )
    _check_dense_values(job, model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, scheduler = _check_job_optimizer(job, model)
    probe, whole_batch_reason, additivity_refusal = _probe_model_and_loss(job, model, train)
    first_loss = compute_initial_loss(job, model, train)
    if test is not None:
        _check_test_batch(job, model.eval(), test)
    shapes = {
        name: list(value.shape)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    facts = JobInspection(
        order.samples,
        len(test) if test is not None else 0,
        sum(map(Tensor.numel, trainable)),
        order,
        shapes,
        describe_initial_training(job, model, optimizer, scheduler),
        probe,
        whole_batch_reason,
        additivity_refusal,
        first_loss,
        lazy_inputs,
        rate_scaling,
    )
    _check_optimizer_step(job, optimizer)
    return facts


def _check_dense_values(job: Job, model: nn.Module) -> None:
    """Check that the state is dense: files and other ranks take no other numbers."""
    for name, each in model.state_dict().items():
        if isinstance(each, Tensor) and (each.layout != torch.strided or each.is_quantized):
            kind = "quantized" if each.is_quantized else "sparse"
            raise Refused(
                f"job {job.name}: {name} is {kind}, and no file of a trained model holds that; "
                "make it dense, or keep it in an attribute that is no buffer"
            )


def _check_job_fields(job: Job) -> None:
    if job.batch == "fit":
        raise Refused(
            f"job {job.name}: batch='fit' works only in train, for one strategy on this host "
            "(train(job, strategy, memory='2GB'), --batch fit --memory 2GB); give a whole number "
            "here"
        )
    for name, least in (("batch", 1), ("epochs", 0)):
        value = getattr(job, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Refused(
                f"job {job.name}: {name} must be a whole number from {least}, got {value!r}"
            )
    if not isinstance(job.seed, int) or not -(2**63) <= job.seed < 2**64:
        raise Refused(
            f"job {job.name}: seed must be a whole number of 64 bits, from {-(2**63)} to "
            f"{2**64 - 1}, got {job.seed!r}"
        )
    if (
        not isinstance(job.name, str)
        or not job.name.isprintable()
        or not job.name
        or "/" in job.name
        or len(job.name) > 100
    ):
        raise Refused(
            f"job name {job.name!r}: give a text of at most 100 characters without /, which can "
            "be the name of a folder"
        )
    for name in FUNCTION_EXAMPLES:
        if not callable(getattr(job, name)):
            raise Refused(
                f"job {job.name}: {name} must be a function, because every rank builds its own; "
                f"write {name}={FUNCTION_EXAMPLES[name]}"
            )
    if isinstance(job.loss, type):
        raise Refused(
            f"job {job.name}: loss is the class {job.loss.__name__}; write "
            f"loss={job.loss.__name__}()"
        )
    if isinstance(job.model, nn.Module):
        raise Refused(
            f"job {job.name}: model must be a function that builds the model, because every rank "
            f"builds its own; write model=lambda: {type(job.model).__name__}(...)"
        )
    for name in ("scheduler", "metric", "collate"):
        if getattr(job, name) is not None and not callable(getattr(job, name)):
            raise Refused(f"job {job.name}: {name} must be a function or None")
    if not isinstance(job.lower_is_better, bool | None):
        raise Refused(
            f"job {job.name}: lower_is_better must be True, False or None, got "
            f"{job.lower_is_better!r}"
        )
    if not isinstance(job.callbacks, list | tuple) or not all(
        isinstance(each, Callback) for each in job.callbacks
    ):
        raise Refused(
            f"job {job.name}: callbacks must be a list of paragrad.Callback objects, got "
            f"{job.callbacks!r}"
        )
    if job.test is None and any(isinstance(each, EarlyStopping) for each in job.callbacks):
        raise Refused(
            f"job {job.name}: EarlyStopping compares tests, and the job has none; give test="
        )
    if job.clip_norm is not None and not (
        isinstance(job.clip_norm, int | float) and job.clip_norm > 0
    ):
        raise Refused(f"job {job.name}: clip_norm must be above 0 or None, got {job.clip_norm!r}")
    if job.dtype not in DTYPES:
        raise Refused(
            f"job {job.name}: dtype must be torch.float32, torch.float64, or torch.bfloat16 or "
            f"torch.float16 (by autocast), got {job.dtype}"
        )


def _open_dataset(job: Job, which: str, data: Path | None) -> Dataset:
    refuse_loader(getattr(job, which), f"job {job.name}: {which}")
    dataset = _call_job_function(job, which, lambda: open_dataset(getattr(job, which), data))
    refuse_loader(dataset, f"job {job.name}: {which}")
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise Refused(
            f"job {job.name}: {which} must be a map-style dataset (with __len__ and __getitem__) "
            f"or a function that returns one, got {type(dataset).__name__}"
        )
    if (samples := _call_job_function(job, f"len({which})", lambda: len(dataset))) == 0:
        raise Refused(f"job {job.name}: {which} has no samples")
    refuse_endless_dataset(samples, f"job {job.name}: {which}")
    if isinstance(dataset, Stream):
        _call_job_function(job, which, lambda: dataset.refuse_changing_samples(job.seed, job.batch))
    return dataset


def _call_job_function(job: Job, name: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Refused:
        raise
    except StepFailed as error:
        raise Refused(f"job {job.name}: {error}") from error
    except Exception as error:
        raise Refused(f"job {job.name}: {name} raised {describe_error(error)}") from error


def _check_job_optimizer(job: Job, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = _call_job_function(job, "optimizer", lambda: job.optimizer(model.parameters()))
    make_scheduler = job.scheduler
    scheduler = (
        None
        if make_scheduler is None or not isinstance(optimizer, torch.optim.Optimizer)
        else _call_job_function(job, "scheduler", lambda: make_scheduler(optimizer) or "nothing")
    )
    problem = explain_untrainable(model, optimizer, scheduler)
    if problem:
        raise Refused(f"job {job.name}: {problem}")
    refuse_unclear_scheduler(job, scheduler)
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    omitted = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in optimized
    ]
    if omitted:
        warn_user(
            f"job {job.name}: the optimizer leaves out {len(omitted)} trainable parameter(s), "
            f"which "
            f"stay as they are: "
            f"{', '.join(omitted[:3])}{', ...' if len(omitted) > 3 else ''}"
        )
    return optimizer, scheduler


def _check_optimizer_step(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Make one step without any gradient.

    The model is not used afterwards. Some optimizers report only in a step what they require.
    """
    try:
        with keep_generators():
            optimizer.step()
    except Exception as error:  # The first step reports any other error.
        if "closure" in str(error):
            raise Refused(
                f"job {job.name}: {CLOSURE_MESSAGE.format(type(optimizer).__name__)} (it says: "
                f"{error})"
            ) from error


def explain_untrainable(model: nn.Module, optimizer: Any, scheduler: Any = None) -> str | None:
    """Explain why a model, its optimizer and its scheduler cannot be trained here, or return None.

    Args:
        model: The model.
        optimizer: The optimizer.
        scheduler: The scheduler, or None.

    Returns:
        The reason with the repair, or None.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return "the model has no trainable parameters; give it at least one with requires_grad"
    embeddings = (
        module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    )
    if any(embedding.sparse for embedding in embeddings):
        return (
            "an embedding has sparse gradients, which are not exchanged; build it with sparse=False"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"the optimizer is a {type(optimizer).__name__}; make it a torch.optim.Optimizer"
    if not hasattr(optimizer, "param_groups"):
        return (
            f"the optimizer is a {type(optimizer).__name__} without param_groups; make it a "
            "torch.optim.Optimizer that has them"
        )
    if any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    ):
        return CLOSURE_MESSAGE.format(type(optimizer).__name__)
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "SparseAdam takes only sparse gradients, which are not exchanged; use Adam"
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := set(optimized) - set(model.parameters()):
        return (
            f"the optimizer holds {len(foreign)} parameter(s) that are not the model's; build it "
            "from model.parameters()"
        )
    if len(optimized) > len(set(optimized)):
        return (
            f"the optimizer holds {len(optimized) - len(set(optimized))} parameter(s) twice; give "
            "each once"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return (
            "the optimizer has differentiable=True, so parameters cannot be updated in place; "
            "leave it out"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return "ReduceLROnPlateau needs a metric, which no scheduler gets; use one that needs none"
    if scheduler is not None and not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return (
            f"the scheduler is a {type(scheduler).__name__}; make it a "
            "torch.optim.lr_scheduler.LRScheduler"
        )
    return None


def _use_job_autocast(job: Job) -> torch.autocast:
    return torch.autocast("cpu", job.autocast, enabled=job.autocast is not None)


def _check_test_batch(job: Job, model: nn.Module, test: Dataset) -> None:
    """Run one small batch of the test set through model and metric.

    Otherwise both would run for the first time at the end of an epoch.
    """
    indices = list(range(min(len(test), 8)))
    inputs, target = convert_batch(
        _call_job_function(
            job,
            "fetching a batch of test",
            lambda: separate_target(job.make_samples(test)[0, indices]),
        ),
        CPU,
        job.parameter_dtype,
    )
    with _use_job_autocast(job):
        output = _call_job_function(
            job,
            "one batch of test through the model",
            lambda: call_without_gradients(lambda: call_model(model, clone_batch(inputs))),
        )
        metric = job.metric
        # The loss takes what the model returns in eval mode, which may be less than in training.
        if metric is None:
            _check_test_loss(
                job, LossModule(model, job.build_loss()), BatchExcerpt(inputs, target, indices)
            )
            return
        result = _call_job_function(
            job,
            f"metric {job.metric_name}",
            lambda: metric(output.detach() if isinstance(output, Tensor) else output, target),
        )
    problem = ""
    try:
        _, _ = map(float, result if isinstance(result, tuple | list) else [])
    except (TypeError, ValueError, RuntimeError):
        kinds = ", ".join(
            (
                "a tensor with one number"
                if each.ndim == 0
                else f"tensor of shape {tuple(each.shape)}"
            )
            if isinstance(each, Tensor)
            else type(each).__name__
            for each in (result if isinstance(result, tuple | list) else [result])
        )
        raise Refused(
            f"job {job.name}: metric {job.metric_name} returned ({kinds}) for a batch of "
            f"{len(indices)}; return a pair of numbers (sum, weight) that add up over batches, "
            "such as the sum over the samples and their number"
        ) from None
    with contextlib.suppress(Exception):  # What cannot be cut into samples is not checked.
        parts = BatchExcerpt(output, target, indices).split_unequally()
        pairs = [tuple(map(float, metric(*part.copy_batch()))) for part in parts]
        if len(pairs) == 3 and not _adds_up(*pairs):
            problem = " and ".join(map(str, pairs[1:])) + f" for its two parts, {pairs[0]} for both"
    if problem:
        raise Refused(
            f"job {job.name}: metric {job.metric_name} does not add up: it returned {problem}; "
            "return sums, such as the sum over the samples and their number"
        )


def _adds_up(whole: tuple[float, ...], one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether two pairs (sum, weight) are together that of the whole, but for rounding."""
    return not any(
        abs(a + b - both) > METRIC_TOLERANCE * (abs(a) + abs(b) + abs(both))
        for both, a, b in zip(whole, one, other, strict=True)
    )


def _check_test_loss(job: Job, module: LossModule, part: BatchExcerpt) -> None:
    """Check that the loss is additive in eval mode, where it is the test if there is no metric."""
    with keep_generators(), preserve_module_state(module):
        generators_before = fingerprint_generators()
        _call_job_function(
            job,
            "loss of a batch of test (give a metric, if it cannot take what the model returns in "
            "eval mode)",
            lambda: call_without_gradients(lambda: module(*part.copy_batch(), len(part.positions))),
        )
        # If it draws, no two batches have the same loss.
        draws = fingerprint_generators() != generators_before
        problem = None
        with contextlib.suppress(ValueError):  # The batch cannot be sliced.
            parts = part.split_unequally()
            problem = (
                _check_additivity(job, module, parts, Draws())
                if len(parts) == 3 and not draws
                else None
            )
    if problem:
        raise Refused(
            f"job {job.name}: the test, which is the loss in eval mode: {problem}; or give a metric"
        )


def _probe_model_and_loss(
    job: Job, model: nn.Module, train: Dataset
) -> tuple[Probe, str | None, str | None]:
    """Probe the model, and check whether the loss is additive (`engine.loss_additivity`).

    Returns:
        (probe, whole_batch_reason, additivity_refusal). The reasons say why collate must be given
        whole batches, and why the loss of a batch is not that of its parts.
    """
    samples = job.make_samples(train)
    indices = list(range(min(job.batch, len(train), MAX_SAMPLES)))
    parts = _call_job_function(
        job, "fetching a batch of train", lambda: collect_parts(samples, indices)
    )
    part = parts[0].convert(job.parameter_dtype)
    module = LossModule(model, job.build_loss())

    def repeat_first_sample(count: int) -> tuple[Any, Any]:
        return separate_target(
            convert_batch(samples[0, indices[:1] * count], CPU, job.parameter_dtype)
        )

    with keep_generators():
        norm = batch_norm.BatchNorm(World(), model, lambda *_: None, samples=len(indices))
        parameters = dict(model.named_parameters())
        with _use_job_autocast(job), preserve_module_state(module) as snapshot, norm:
            try:
                probe = replace(
                    probe_model(
                        module, part.inputs, part.target, len(indices), norm, repeat_first_sample
                    ),
                    changed_by_forward=snapshot.list_changed_frozen(),
                    replaced_parameters=list_replaced_parameters(module.model, parameters),
                )
            except Exception as error:
                raise _diagnose_failed_batch(job, module, part, error) from error
        # The draws would make parts differ. A strategy that splits the batch is refused for that.
        if probe.draws.layout_dependence:
            return probe, None, None
        loss_problem = _call_job_function(
            job, "loss", lambda: _check_additivity(job, module, parts, probe.draws)
        )
        whole_batch_reason = explain_whole_batch(samples, job.batch)
        if (loss_problem or whole_batch_reason) and job.collate is not None:
            whole_samples = replace(samples, collate=WholeBatch(job.collate))
            with contextlib.suppress(ValueError):  # The collated batch cannot be sliced.
                remaining_problem = _check_additivity(
                    job, module, collect_parts(whole_samples, indices), probe.draws
                )
                whole_batch_reason = whole_batch_reason or (
                    None if remaining_problem else "a share collated alone gives another loss"
                )
                loss_problem = remaining_problem
    return (
        probe,
        whole_batch_reason,
        loss_problem and (explain_unequal_samples(samples, indices, parts[0]) or loss_problem),
    )


def _diagnose_failed_batch(
    job: Job, module: LossModule, part: BatchExcerpt, error: Exception
) -> Refused:
    """Find out whether model or loss fails, when a batch does not run forward and backward.

    Both are run once more, one after the other.
    """
    note = (
        f" in {str(job.autocast).removeprefix('torch.')} (not every processor has it for every "
        "layer; dtype=torch.float32 does)"
        if job.autocast
        else ""
    )
    inputs, target = part.copy_batch()
    output = _call_job_function(
        job, f"one batch through the model{note}", lambda: call_model(module.model, inputs)
    )
    problem = describe_bad_loss(
        _call_job_function(job, "loss", lambda: module.loss(output, target))
    )
    return Refused(
        f"job {job.name}: "
        + (problem or f"one batch forward and backward raised {type(error).__name__}: {error}")
    )


def _check_additivity(
    job: Job, module: LossModule, parts: list[BatchExcerpt], draws: Draws
) -> str | None:
    """Return what is wrong with the loss, or None.

    It is checked in float64, or in the job's own type if the model cannot run in float64.
    """
    try:
        precise_module = LossModule(
            convert_model(copy.deepcopy(module.model), torch.float64),
            job.replace(dtype=torch.float64).build_loss(),
        )
        return find_additivity_error(
            precise_module, [part.convert(torch.float64) for part in parts], draws, in_float64=True
        )
    # The model may contain float32 constants, or it cannot be copied.
    except Exception:
        return find_additivity_error(
            module, [part.convert(job.parameter_dtype) for part in parts], draws, in_float64=False
        )
