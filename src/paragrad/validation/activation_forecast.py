"""A forecast of activations: what the ranks of a replica will hold, task by task.

The forecast is made before any rank starts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paragrad.datasets.loading import convert_batch, separate_target
from paragrad.engine.probe import use_model_eval_mode
from paragrad.errors import Refused, StepFailed
from paragrad.executors.pipeline_memory import StageBytes, TaskMemory, compute_task_memory
from paragrad.jobs.job import CPU, Job, open_dataset
from paragrad.jobs.loss import LossModule
from paragrad.parallel.pipeline import balance, micro_batch_memory
from paragrad.parallel.registry import has_model_shards, is_builtin_technique
from paragrad.runtime.generators import keep_generators
from paragrad.schedules.pipeline import MicroBatchSchedule, OneFOneB
from paragrad.strategies.pipeline import PartitionedStrategy
from paragrad.strategies.strategy import Strategy, list_factors
from paragrad.trainer.batch import make_rank_batch
from paragrad.trainer.evaluation import choose_evaluation_batch, count_concurrent_batches
from paragrad.trainer.evaluation_batches import (
    MAX_EVALUATION_BATCH,
    EvaluationPlan,
    choose_test_batch,
)
from paragrad.validation.inspect_job import JobInspection


@dataclass(frozen=True)
class ActivationForecast:
    """The activations and messages that the ranks of one replica hold in a step of a full batch.

    Attributes:
        strategy: The strategy, with the cut at which the model was partitioned here.

        first_rank: The first rank of the replica, among all ranks.

        pipelined: The schedule of the micro-batches.

        ranks: The number of ranks of the replica.

        recompute: Whether stages are recomputed in backward.

        micro_batch_sizes: The number of samples of each micro-batch.

        memory_by_size: The bytes of each stage, by the number of samples of a micro-batch.

        test_memory: The schedule and the message bytes of a test; None without a test set.
    """

    strategy: Strategy
    first_rank: int
    pipelined: MicroBatchSchedule
    ranks: int
    recompute: bool
    micro_batch_sizes: list[int]
    memory_by_size: Mapping[int, list[StageBytes]]
    test_memory: tuple[MicroBatchSchedule, list[StageBytes]] | None

    def list_moments(self, rank: int) -> list[TaskMemory]:
        """List what a rank holds, task by task."""
        return compute_task_memory(
            self.pipelined, rank, self.ranks, self._get_stage_memory, self.recompute
        )

    def _get_stage_memory(self, stage: int, micro: int) -> StageBytes:
        # Micro-batches that do not exist are counted as the last one.
        return self.memory_by_size[
            self.micro_batch_sizes[min(micro, len(self.micro_batch_sizes) - 1)]
        ][stage]

    def compute_peak(self, rank: int) -> int:
        """Compute the most bytes that a rank holds in a step."""
        return max(each.bytes for each in self.list_moments(rank))

    def compute_test_peak(self, rank: int) -> int | None:
        """Compute the most bytes that a rank holds in a test; None without a test set."""
        if self.test_memory is None:
            return None
        schedule, each = self.test_memory
        return max(
            moment.bytes
            for moment in compute_task_memory(
                schedule, rank, self.ranks, lambda stage, _: each[stage]
            )
        )


def forecast_activations(
    job: Job, resolved: Strategy, inspection: JobInspection, data: Path | None = None
) -> ActivationForecast:
    """Forecast the activations of a validated job, for the replica with the largest share.

    One micro-batch of each size is run here, stage by stage.

    Args:
        job: The job.
        resolved: The resolved strategy.
        inspection: What validation found out about the job.
        data: The folder of data.

    Raises:
        Refused: If the memory of the strategy or of the model cannot be measured here.
    """
    if custom_factor := next(
        (each for each in list_factors(resolved) if not is_builtin_technique(each)), None
    ):
        raise Refused(
            f"{resolved}: the memory of {custom_factor} cannot be predicted; train with it, and "
            "read in the record what its ranks held"
        )
    whole = inspection.order.get_batch(0)
    parts = next(
        (each for each in list_factors(resolved) if isinstance(each, PartitionedStrategy)), None
    )
    if has_model_shards(resolved) and (
        parts is None or any(each.splits_layers for each in list_factors(resolved))
    ):
        raise Refused(
            f"{resolved} does not divide the model into consecutive parts; train with it, and read "
            "in the record what its ranks held"
        )
    with keep_generators():
        shares = [
            make_rank_batch(inspection.order, 0, whole, resolved.division, [each])
            for each in range(len(resolved.division.shares))
        ]
        replica = max(
            range(len(shares)),
            key=lambda each: sum(len(micro.positions) for micro in shares[each].micro_batches),
        )
        batch = shares[replica]
        samples = job.make_samples(open_dataset(job.train, data))
        inputs, target = separate_target(
            convert_batch(samples[0, batch.sample_indices, batch.places], CPU, job.parameter_dtype)
        )
        micro_batches = {
            len(each[0].positions): each
            for each in batch.iterate_micro_batches(inputs, target)
            if each[0].positions
        }
        sizes = [len(each.positions) for each in batch.micro_batches if each.positions]
        module = LossModule(job.build_model(), job.build_loss())
        module.adopt_findings(inspection.probe.weight_known, module.is_linear)
        try:
            if parts is None:
                memory_by_size = {
                    size: [
                        micro_batch_memory.measure_whole_model(
                            module, inspection.probe.draws, job.autocast, each
                        )
                    ]
                    for size, each in micro_batches.items()
                }
                # The graph of the loss also gives its weight in a test.
                uses_graph = job.metric is None and module.uses_graph_divisor
                test_memory = (
                    None
                    if job.test is None
                    else (
                        MicroBatchSchedule(
                            OneFOneB(), 1, first_trained_stage=0 if uses_graph else 1
                        ),
                        memory_by_size[max(sizes)] if uses_graph else [StageBytes(0, 0, 0)],
                    )
                )
                return ActivationForecast(
                    resolved,
                    replica,
                    MicroBatchSchedule(OneFOneB(), len(sizes)),
                    1,
                    False,
                    sizes,
                    memory_by_size,
                    test_memory,
                )
            return _forecast_stages(
                job, resolved, replica, parts, inspection, module, micro_batches, sizes, data
            )
        except StepFailed as error:
            raise Refused(f"job {job.name}, {resolved}: {error}") from error
        except RuntimeError as error:
            if not micro_batch_memory.is_saved_hooks_error(error):
                raise
            raise Refused(
                f"job {job.name}, {resolved}: what its backward keeps cannot be measured, because "
                "torch.func allows no hooks; train it, and look at resident in the record"
            ) from error


def _forecast_stages(
    job: Job,
    resolved: Strategy,
    replica: int,
    parts: PartitionedStrategy,
    inspection: JobInspection,
    module: LossModule,
    micro_batches: Mapping[int, micro_batch_memory.MicroBatchInputs],
    sizes: list[int],
    data: Path | None,
) -> ActivationForecast:
    stages = parts.micro_batch_schedule.count_stages(parts.size)
    schedule = parts.micro_batch_schedule.schedule
    example_inputs = next(iter(micro_batches.values()))[1]
    with torch.autocast("cpu", job.autocast, enabled=job.autocast is not None):
        cut = balance.partition_into_stages(
            module.model, example_inputs, stages, parts.requested_cut
        )
    settled = replace(parts, cut=tuple(map(len, cut.stages)))  # type: ignore[call-arg]
    passes = micro_batch_memory.build_local_passes(
        settled, cut, module, inspection.probe.draws, job.autocast
    )
    memory_by_size = {
        size: list(micro_batch_memory.measure_stages(passes, each))
        for size, each in micro_batches.items()
    }
    pipelined = MicroBatchSchedule(
        schedule,
        schedule.pad_micro_count(len(sizes), parts.size),
        passes.stage_module.first_trained,
    )
    test_memory = None
    if job.test is not None:
        tests = job.make_samples(open_dataset(job.test, data))
        full_batch = len(inspection.order.get_batch(0))
        # The graph of the loss also gives its weight in a test.
        uses_graph = job.metric is None and module.uses_graph_divisor
        plan = EvaluationPlan(
            inspection.test_samples,
            choose_test_batch(full_batch),
            choose_evaluation_batch(full_batch, resolved.division, replica)
            if uses_graph
            else MAX_EVALUATION_BATCH,
            parts=len(resolved.division.shares),
        )
        test_sizes = plan.list_part_sizes(is_collated=job.collate is not None)
        count = max(test_sizes)
        inputs, _ = separate_target(
            convert_batch(tests[0, list(range(count))], CPU, job.parameter_dtype)
        )
        with use_model_eval_mode(module.model), torch.no_grad():
            message_bytes = list(micro_batch_memory.count_boundary_bytes(passes, inputs))
        in_flight = schedule.pad_micro_count(
            min(
                count_concurrent_batches(module, job.metric, parts.micro_batch_schedule.micro),
                len(test_sizes),
            ),
            parts.size,
        )
        saved_bytes = [0] * (stages - 1) + [
            memory_by_size[max(sizes)][-1].saved if uses_graph else 0
        ]
        test_memory = (
            MicroBatchSchedule(schedule, in_flight, first_trained_stage=stages - uses_graph),
            [
                StageBytes(message, 0, saved)
                for message, saved in zip(message_bytes, saved_bytes, strict=True)
            ],
        )
    resolved_cut = functools.reduce(
        operator.mul, [settled if each is parts else each for each in list_factors(resolved)]
    )
    return ActivationForecast(
        resolved_cut,
        replica * parts.size,
        pipelined,
        parts.size,
        settled.recompute,
        sizes,
        memory_by_size,
        test_memory,
    )
