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

from paragrad.datasets.loading import brought, parted
from paragrad.engine.probe import evaluating
from paragrad.errors import Refused, StepFailed
from paragrad.executors.pipeline_memory import Moment, Weight, moments
from paragrad.jobs.job import CPU, Job, opened
from paragrad.jobs.loss import Summed
from paragrad.parallel.pipeline import balance, micro_batch_memory
from paragrad.parallel.registry import cuts, ours
from paragrad.runtime.generators import generators_kept
from paragrad.schedules.pipeline import OneFOneB, Pipelined
from paragrad.strategies.pipeline import InParts
from paragrad.strategies.strategy import Strategy, factors_of
from paragrad.trainer.batch import batch_of
from paragrad.trainer.evaluation import BATCH, at_a_time, at_once
from paragrad.validation.inspect_job import Findings


@dataclass(frozen=True)
class Account:
    """What the ranks of one replica hold of activations and messages in a step of a full batch.

    strategy: the same, cut where the model was cut here;  sizes: samples of each micro-batch;
    weights: by samples, of each part;  tested: messages between parts in a test, None without a
    test set;  first: of the replica's ranks, among all.
    """

    strategy: Strategy
    first: int
    pipelined: Pipelined
    ranks: int
    recompute: bool
    sizes: list[int]
    weights: Mapping[int, list[Weight]]
    tested: tuple[Pipelined, list[Weight]] | None

    def moments(self, rank: int) -> list[Moment]:
        """Task by task."""
        return moments(self.pipelined, rank, self.ranks, self._weigh, self.recompute)

    def _weigh(self, stage: int, micro: int) -> Weight:
        # the last stands in for those of none
        return self.weights[self.sizes[min(micro, len(self.sizes) - 1)]][stage]

    def peak(self, rank: int) -> int:
        return max(each.bytes for each in self.moments(rank))

    def in_test(self, rank: int) -> int | None:
        """At most, in a test."""
        if self.tested is None:
            return None
        schedule, each = self.tested
        return max(
            moment.bytes
            for moment in moments(schedule, rank, self.ranks, lambda stage, _: each[stage])
        )


def account(job: Job, resolved: Strategy, facts: Findings, data: Path | None = None) -> Account:
    """Of an admitted job, and of the replica with the largest share. Runs one micro-batch of
    each size here, part by part. Raises Refused.
    """
    if strange := next((each for each in factors_of(resolved) if not ours(each)), None):
        raise Refused(
            f"{resolved}: what {strange} does in a step is known to it alone; train with it, and "
            f"the record says "
            "what its ranks held"
        )
    whole = facts.order.at(0)
    parts = next((each for each in factors_of(resolved) if isinstance(each, InParts)), None)
    if cuts(resolved) and (parts is None or any(each.inside for each in factors_of(resolved))):
        raise Refused(
            f"{resolved} cuts the model otherwise than in consecutive parts; the record of a "
            f"training says what its "
            "ranks held"
        )
    with generators_kept():
        shares = [
            batch_of(facts.order, 0, whole, resolved.division, [each])
            for each in range(len(resolved.division.shares))
        ]
        replica = max(
            range(len(shares)),
            key=lambda each: sum(len(micro.positions) for micro in shares[each].micros),
        )
        batch = shares[replica]
        samples = job.samples(opened(job.train, data))
        inputs, target = parted(
            brought(samples[0, batch.indices, batch.places], CPU, job.parameter_dtype)
        )
        micros = {
            len(each[0].positions): each
            for each in batch.parts(inputs, target)
            if each[0].positions
        }
        sizes = [len(each.positions) for each in batch.micros if each.positions]
        module = Summed(job.built_model(), job.built_loss())
        module.traced = facts.probe.known
        try:
            if parts is None:
                weights = {
                    size: [micro_batch_memory.whole(module, facts.probe.draws, job.autocast, each)]
                    for size, each in micros.items()
                }
                # which weighs the loss, in a test too
                graph = job.metric is None and module.by_graph
                tested = (
                    None
                    if job.test is None
                    else (
                        Pipelined(OneFOneB(), 1, trained=0 if graph else 1),
                        weights[max(sizes)] if graph else [Weight(0, 0, 0)],
                    )
                )
                return Account(
                    resolved,
                    replica,
                    Pipelined(OneFOneB(), len(sizes)),
                    1,
                    False,
                    sizes,
                    weights,
                    tested,
                )
            return _in_parts(job, resolved, replica, parts, facts, module, micros, sizes, data)
        except StepFailed as error:
            raise Refused(f"job {job.name}, {resolved}: {error}") from error
        except RuntimeError as error:
            if not micro_batch_memory.unseen(error):
                raise
            raise Refused(
                f"job {job.name}, {resolved}: what its backward keeps cannot be seen, for "
                f"torch.func takes no "
                "hooks; train it, and look at resident in the record"
            ) from error


def _in_parts(
    job: Job,
    resolved: Strategy,
    replica: int,
    parts: InParts,
    facts: Findings,
    module: Summed,
    micros: Mapping[int, micro_batch_memory.Given],
    sizes: list[int],
    data: Path | None,
) -> Account:
    stages = parts.pipelined.stages(parts.size)
    schedule = parts.pipelined.schedule
    example = next(iter(micros.values()))[1]
    with torch.autocast("cpu", job.autocast, enabled=job.autocast is not None):
        cut = balance.cut(module.model, example, stages, parts.asked)
    settled = replace(parts, cut=tuple(map(len, cut.parts)))  # type: ignore[call-arg]
    passes = micro_batch_memory.passes_here(settled, cut, module, facts.probe.draws, job.autocast)
    weights = {
        size: list(micro_batch_memory.weighed(passes, each)) for size, each in micros.items()
    }
    pipelined = Pipelined(schedule, schedule.filled(len(sizes), parts.size), passes.part.trained)
    tested = None
    if job.test is not None:
        tests = job.samples(opened(job.test, data))
        mine = -(-facts.test_samples // len(resolved.division.shares))
        # which weighs the loss, in a test too
        graph = job.metric is None and module.by_graph
        most = at_once(len(facts.order.at(0)), resolved.division, replica) if graph else BATCH
        count = min(most, mine)
        given, _ = parted(brought(tests[0, list(range(count))], CPU, job.parameter_dtype))
        with evaluating(module.model), torch.no_grad():
            came = list(micro_batch_memory.messages(passes, given))
        under_way = schedule.filled(
            min(at_a_time(module, job.metric, parts.pipelined.micro), -(-mine // most)), parts.size
        )
        kept = [0] * (stages - 1) + [weights[max(sizes)][-1].kept if graph else 0]
        tested = (
            Pipelined(schedule, under_way, trained=stages - graph),
            [Weight(came_in, 0, held) for came_in, held in zip(came, kept, strict=True)],
        )
    cut_here = functools.reduce(
        operator.mul, [settled if each is parts else each for each in factors_of(resolved)]
    )
    return Account(
        cut_here,
        replica * parts.size,
        pipelined,
        parts.size,
        settled.recompute,
        sizes,
        weights,
        tested,
    )
