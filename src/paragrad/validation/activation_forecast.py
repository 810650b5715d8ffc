"""The account of activations: what the ranks of a replica will hold, task by task, before any
of them starts.
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
from paragrad.trainer.evaluation import (
    EVALUATION_BATCH,
    choose_evaluation_batch,
    count_concurrent_batches,
)
from paragrad.validation.inspect_job import JobInspection


@dataclass(frozen=True)
class ActivationForecast:
    """What the ranks of one replica hold of activations and messages in a step of a full batch.

    strategy: the same, cut where the model was cut here;  sizes: samples of each micro-batch;
    weights: by samples, of each part;  tested: messages between parts in a test, None without a
    test set;  first: of the replica's ranks, among all.
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
        """Task by task."""
        return compute_task_memory(
            self.pipelined, rank, self.ranks, self._get_stage_memory, self.recompute
        )

    def _get_stage_memory(self, stage: int, micro: int) -> StageBytes:
        # the last stands in for those of none
        return self.memory_by_size[
            self.micro_batch_sizes[min(micro, len(self.micro_batch_sizes) - 1)]
        ][stage]

    def compute_peak(self, rank: int) -> int:
        return max(each.bytes for each in self.list_moments(rank))

    def compute_test_peak(self, rank: int) -> int | None:
        """At most, in a test."""
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
    """Of an admitted job, and of the replica with the largest share. Runs one micro-batch of
    each size here, part by part. Raises Refused.
    """
    if strange := next(
        (each for each in list_factors(resolved) if not is_builtin_technique(each)), None
    ):
        raise Refused(
            f"{resolved}: what {strange} does in a step is known to it alone; train with it, and "
            f"the record says "
            "what its ranks held"
        )
    whole = inspection.order.get_batch(0)
    parts = next(
        (each for each in list_factors(resolved) if isinstance(each, PartitionedStrategy)), None
    )
    if has_model_shards(resolved) and (
        parts is None or any(each.splits_layers for each in list_factors(resolved))
    ):
        raise Refused(
            f"{resolved} cuts the model otherwise than in consecutive parts; the record of a "
            f"training says what its "
            "ranks held"
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
        micros = {
            len(each[0].positions): each
            for each in batch.iterate_micro_batches(inputs, target)
            if each[0].positions
        }
        sizes = [len(each.positions) for each in batch.micro_batches if each.positions]
        module = LossModule(job.build_model(), job.build_loss())
        module.has_traced_divisor = inspection.probe.weight_known
        try:
            if parts is None:
                weights = {
                    size: [
                        micro_batch_memory.measure_whole_model(
                            module, inspection.probe.draws, job.autocast, each
                        )
                    ]
                    for size, each in micros.items()
                }
                # which weighs the loss, in a test too
                graph = job.metric is None and module.uses_graph_divisor
                tested = (
                    None
                    if job.test is None
                    else (
                        MicroBatchSchedule(OneFOneB(), 1, first_trained_stage=0 if graph else 1),
                        weights[max(sizes)] if graph else [StageBytes(0, 0, 0)],
                    )
                )
                return ActivationForecast(
                    resolved,
                    replica,
                    MicroBatchSchedule(OneFOneB(), len(sizes)),
                    1,
                    False,
                    sizes,
                    weights,
                    tested,
                )
            return _forecast_stages(
                job, resolved, replica, parts, inspection, module, micros, sizes, data
            )
        except StepFailed as error:
            raise Refused(f"job {job.name}, {resolved}: {error}") from error
        except RuntimeError as error:
            if not micro_batch_memory.is_saved_hooks_error(error):
                raise
            raise Refused(
                f"job {job.name}, {resolved}: what its backward keeps cannot be seen, for "
                f"torch.func takes no "
                "hooks; train it, and look at resident in the record"
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
    example = next(iter(micro_batches.values()))[1]
    with torch.autocast("cpu", job.autocast, enabled=job.autocast is not None):
        cut = balance.partition_into_stages(module.model, example, stages, parts.requested_cut)
    settled = replace(parts, cut=tuple(map(len, cut.stages)))  # type: ignore[call-arg]
    passes = micro_batch_memory.build_local_passes(
        settled, cut, module, inspection.probe.draws, job.autocast
    )
    weights = {
        size: list(micro_batch_memory.measure_stages(passes, each))
        for size, each in micro_batches.items()
    }
    pipelined = MicroBatchSchedule(
        schedule,
        schedule.pad_micro_count(len(sizes), parts.size),
        passes.stage_module.first_trained,
    )
    tested = None
    if job.test is not None:
        tests = job.make_samples(open_dataset(job.test, data))
        mine = -(-inspection.test_samples // len(resolved.division.shares))
        # which weighs the loss, in a test too
        graph = job.metric is None and module.uses_graph_divisor
        most = (
            choose_evaluation_batch(len(inspection.order.get_batch(0)), resolved.division, replica)
            if graph
            else EVALUATION_BATCH
        )
        count = min(most, mine)
        given, _ = separate_target(
            convert_batch(tests[0, list(range(count))], CPU, job.parameter_dtype)
        )
        with use_model_eval_mode(module.model), torch.no_grad():
            came = list(micro_batch_memory.count_boundary_bytes(passes, given))
        under_way = schedule.pad_micro_count(
            min(
                count_concurrent_batches(module, job.metric, parts.micro_batch_schedule.micro),
                -(-mine // most),
            ),
            parts.size,
        )
        kept = [0] * (stages - 1) + [weights[max(sizes)][-1].saved if graph else 0]
        tested = (
            MicroBatchSchedule(schedule, under_way, first_trained_stage=stages - graph),
            [StageBytes(came_in, 0, held) for came_in, held in zip(came, kept, strict=True)],
        )
    cut_here = functools.reduce(
        operator.mul, [settled if each is parts else each for each in list_factors(resolved)]
    )
    return ActivationForecast(
        cut_here,
        replica * parts.size,
        pipelined,
        parts.size,
        settled.recompute,
        sizes,
        weights,
        tested,
    )
