"""place and pipeline: forwards and backwards of the parts of a model, in the order of a
schedule, played on the wire.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paragrad.datasets.loading import clone_batch, list_batch_tensors
from paragrad.engine.exchange import Exchange
from paragrad.engine.model_shard import ModelShard
from paragrad.engine.passes import LossSums, Passes, PassesHost
from paragrad.engine.rng.draws import CallNumbers, key_test_draws
from paragrad.engine.state.preserve_state import PythonState, undo_forward_effects
from paragrad.errors import StepFailed
from paragrad.executors.pipeline_memory import POSTED_RECEIVES
from paragrad.executors.transport import ProgramRun
from paragrad.parallel.pipeline import balance
from paragrad.parallel.pipeline.python_state import (
    collect_outer_owners,
    read_owner_numbers,
    refuse_diverging_numbers,
)
from paragrad.parallel.pipeline.rank_program import RankProgram
from paragrad.parallel.pipeline.split_backward import DeferredWeightGradients
from paragrad.parallel.pipeline.stage import StageModule, shard_stages
from paragrad.parallel.pipeline.stage_messages import StageMessages
from paragrad.parallel.tracing.crossing_plan import CrossingPlan
from paragrad.parallel.tracing.cut_points import find_cut_points
from paragrad.parallel.tracing.receive_boundary import attach_received
from paragrad.parallel.tracing.stage_forward import StageForward
from paragrad.parallel.tracing.tracer import find_tensors, hook_module_calls
from paragrad.runtime.world import World
from paragrad.schedules.actions import Compute, Recv, Send, Slot, split_evenly
from paragrad.schedules.pipeline import MicroBatchSchedule, parse_task_slot
from paragrad.strategies.pipeline import PartitionedStrategy
from paragrad.strategies.shares import MicroBatch


def check_model(
    strategy: PartitionedStrategy, model: nn.Module, example: Any, tested: bool
) -> None:
    """Can the model be cut so? tested: in eval mode too. Raises StepFailed with the repair."""
    parts = strategy.micro_batch_schedule.count_stages(strategy.size)
    found = find_cut_points(model, example, parts, strategy.requested_cut)
    units = list(found.work)
    cuts = (
        balance.partition_as_requested(model, units, parts, strategy.requested_cut)
        if strategy.requested_cut
        else split_evenly(len(units), parts)
    )
    flow = StageForward(model, [[units[at] for at in part] for part in cuts], found.fixed_outputs)
    flow.try_all_stages(example)
    if tested:
        flow.try_in_eval_mode(example)


def inspect_model(
    strategy: PartitionedStrategy, model: nn.Module, example: Any
) -> balance.StagePartition:
    """Where the model is cut."""
    return balance.partition_into_stages(
        model,
        example,
        strategy.micro_batch_schedule.count_stages(strategy.size),
        strategy.requested_cut,
    )


def shard_model(
    strategy: PartitionedStrategy,
    model: nn.Module,
    example: Any,
    axis: World,
    partition: balance.StagePartition,
) -> ModelShard:
    """Some consecutive parts of a model. Collective over the axis."""
    mine = range(axis.rank, len(partition.stages), axis.size)
    found = shard_stages(model, partition, mine, axis)
    seconds = ", ".join(f"{1e3 * each:.3g}" for each in partition.seconds)
    return replace(
        found,
        choices=(
            ("cut", str(partition), f"forward and backward in {seconds} ms, each measured alone"),
        ),
    )


def make_passes(strategy: PartitionedStrategy, host: PassesHost, exchange: Exchange) -> Passes:
    return PipelinePasses(strategy, host, exchange)


class PipelinePasses(Passes):
    """Every micro-batch through all parts, and back."""

    def __init__(self, strategy: PartitionedStrategy, host: PassesHost, exchange: Exchange) -> None:
        super().__init__(host, exchange)
        part = host.module.model
        assert isinstance(part, StageModule)
        self.stage_module = part
        self.strategy = strategy
        self.axis = host.world.select_axes(strategy.name, through_host=True)
        self.stage_count = part.stage_forward.last_stage + 1
        self.batches_in_flight = strategy.micro_batch_schedule.micro
        # the last backward of this rank is under way
        self.is_last_backward = False
        # parameters whose gradients have waited for the second half of a backward
        self.deferred_ids: set[int] = set()
        self.has_reported_deferral = False  # what they are
        # begun; who keeps something in Python, between units
        self.step_count = 0
        self.outer_owners = collect_outer_owners(part.stage_forward)
        self.last_plan: CrossingPlan | None = None  # of the last micro-batch
        self.programs: dict[tuple[int, int], RankProgram] = {}
        self.gradient_hooks = [
            parameter.register_post_accumulate_grad_hook(self._mark_ready)
            for parameter in part.parameters()
            if parameter.requires_grad
        ]

    def find_program(self, micro_batch_schedule: MicroBatchSchedule) -> RankProgram:
        """What this rank does, found out once."""
        key = micro_batch_schedule.micro, micro_batch_schedule.first_trained_stage
        if key not in self.programs:
            self.programs[key] = RankProgram.build_for_rank(
                micro_batch_schedule, self.axis.rank, self.axis.size
            )
        return self.programs[key]

    def _mark_ready(self, parameter: Tensor) -> None:
        if self.is_last_backward:
            self.exchange.mark_ready(parameter)  # type: ignore[arg-type]

    def close(self) -> None:
        for hook in self.gradient_hooks:
            hook.remove()

    def invalidate_plans(self) -> None:
        self.stage_module.stage_forward.plans.clear()
        self.outer_owners = collect_outer_owners(self.stage_module.stage_forward)

    def collect_python_numbers(self) -> dict[tuple[str, str], Any]:
        return read_owner_numbers(self.outer_owners)

    def compute_gradients(
        self, micros: Iterable[tuple[MicroBatch, Any, Any]], count: int
    ) -> LossSums:
        schedule = self.strategy.micro_batch_schedule.schedule
        pipelined = MicroBatchSchedule(
            schedule,
            schedule.pad_micro_count(count, self.axis.size),
            self.stage_module.first_trained,
        )
        step = PipelineStep(self, list(micros), pipelined)
        self.step_count += not self.host.rehearsing
        # the first sets sizes
        before = (
            PythonState(self.outer_owners)
            if self.step_count > 1 and self.step_count.bit_count() == 1
            else None
        )
        step.run_step()
        if before is not None:
            often = self.stage_count > self.axis.size or self.strategy.recompute
            # a size is what it was
            refuse_diverging_numbers(
                before, self.axis, often and step.plans[count - 1] is self.last_plan
            )
        self.last_plan = step.plans[count - 1]
        if step.splits_backward and not self.has_reported_deferral:
            self.report_deferred_share()
        return step.loss_sums

    def report_deferred_share(self) -> None:
        """Which share of this rank's part a schedule of halves could move."""
        self.has_reported_deferral = True
        trained = [each for each in self.stage_module.parameters() if each.requires_grad]
        moved = sum(each.numel() for each in trained if id(each) in self.deferred_ids)
        share = moved / max(1, sum(each.numel() for each in trained))
        self.host.log.write_choice(
            "weights' part",
            f"{share:.0%} of the parameters",
            "of what linear, convolution and embedding "
            "multiply by; the others get their gradients with those of what came in",
        )

    def compute_outputs(self, batches: list[Any], places: list[list[int]]) -> list[Any]:
        schedule = self.strategy.micro_batch_schedule.schedule
        count = schedule.pad_micro_count(len(batches), self.axis.size)
        given = [
            (MicroBatch(own, own), inputs, None)
            for own, inputs in zip(places, batches, strict=True)
        ]
        step = PipelineStep(
            self,
            given,
            MicroBatchSchedule(schedule, count, first_trained_stage=self.stage_count),
            training=False,
        )
        step.run_step()
        return [step.outputs.get(number) for number in range(len(batches))]

    def compute_output(self, inputs: Any) -> Any:
        return self.compute_outputs([inputs], [[0]])[0]


@dataclass
class PendingBackward:
    """What a forward made, for its backward. ends: of what goes on and gets a gradient, where
    in the graph it was made: the values have gone;  gradients: of what came in, once backward
    has come to it;  total: the loss, of the last part.
    """

    ends: list[GradientEdge | None]
    gradients: list[Tensor | None]
    loss: Tensor | None = None


class PipelineStep:
    """One batch through the parts of this rank. Its micro-batches are filled up to those of the
    schedule by some of no samples, which leave nothing behind.
    """

    def __init__(
        self,
        passes: PipelinePasses,
        micro_batches: list[tuple[MicroBatch, Any, Any]],
        micro_batch_schedule: MicroBatchSchedule,
        training: bool = True,
    ) -> None:
        last, *rest = micro_batches[-1]
        self.micro_batches = [
            *micro_batches,
            *[(replace(last, positions=[]), *rest)]
            * (micro_batch_schedule.micro - len(micro_batches)),
        ]
        given = self.micro_batches
        self.passes = passes
        self.micro_batch_schedule = micro_batch_schedule
        self.real_count = len(micro_batches)
        self.training = training
        self.host = passes.host
        self.stage_forward = passes.stage_module.stage_forward
        self.axis = passes.axis
        with self.host.use_autocast(), self.host.batch_norm.use_probe_mode():
            self.plans = [self.stage_forward.find_plan(inputs) for _, inputs, _ in given]
        self.meter = passes.activation_meter
        if self.meter is not None:
            self.meter.exclude_tensors(list_batch_tensors([each[1:] for each in given]))
        self.messages = StageMessages(self.plans, self.axis, self.meter)
        self.loss_sums = LossSums()
        # of micro-batches, in a test
        self.outputs: dict[int, Any] = {}
        self.rank_program = passes.find_program(micro_batch_schedule)
        order = self.rank_program
        self.remaining_backwards = order.backward_count
        self.splits_backward = order.splits_backward
        self.recomputed_passes = order.recomputed_passes if passes.strategy.recompute else set()
        # by stage and micro-batch
        self.pending_backwards: dict[tuple[int, int], PendingBackward] = {}
        self.deferred_weights: dict[tuple[int, int], DeferredWeightGradients] = {}
        # in forwards, what is drawn again where a module recomputes
        self.drawn_calls: dict[tuple[int, int], CallNumbers] = {}
        self.program_run: ProgramRun | None = None

    def run_step(self) -> None:
        self.program_run = ProgramRun(
            self.rank_program.program,
            self.messages,
            self.axis,
            self.run_action,
            self.report_message if self.is_detailed else None,
            POSTED_RECEIVES,
        )
        walk = self.program_run
        with contextlib.ExitStack() as stack:
            if any(plan.sequential_stages is None for plan in self.plans):
                # once for all micro-batches
                stack.enter_context(hook_module_calls(None))
                stack.enter_context(self.stage_forward.fix_model_tensors())
            walk.play_program()
        self.program_run = None
        self.passes.is_last_backward = False
        self.passes.exchange.count_bytes("activations", walk.sent_bytes, computed=False)

    @property
    def is_detailed(self) -> bool:
        return self.training and self.host.log.is_detailed

    def report_message(
        self, action: Send | Recv, lane: str, start: float, seconds: float, size: int
    ) -> None:
        assert self.program_run is not None
        self.host.log.add_span(
            str(self.program_run.use_launched_ranks(action)),
            lane,
            self.host.log.convert_moment(start),
            bytes=size,
            seconds=seconds,
        )

    def run_action(self, action: Compute) -> None:
        at = stage, number = parse_task_slot(self.axis.rank, action.at)
        self.release_messages(
            f"x{stage}.{number}" if action.what == "F" else f"g{stage + 1}.{number}"
        )
        with (
            self.host.log.record_span(str(action), "compute")
            if self.training
            else contextlib.nullcontext()
        ):
            if action.what == "F":
                self.run_forward(*at)
                return
            self.remaining_backwards -= 1
            # of the weights' half, a weight that is used twice gets its gradient in two goes
            self.passes.is_last_backward = self.remaining_backwards == 0 and action.what != "W"
            if action.what == "W":
                with self.use_micro_batch_state(*at):  # what a module recomputes
                    self.deferred_weights.pop(at).compute_weight_gradients()
            else:
                self.run_backward(*at)

    def release_messages(self, slot: Slot) -> None:
        """Messages of which it is known, by one that has come since, that they are gone."""
        if self.program_run is not None:
            for sent in self.rank_program.confirmed_sends.get(slot, ()):
                self.program_run.finish_sends([sent])
                self.messages.forget_message(sent)

    def run_forward(self, stage: int, number: int) -> None:
        came = f"x{stage}.{number}"
        again = (stage, number) in self.recomputed_passes
        received = self.messages.read_message(came) if stage else []
        last = stage == self.passes.stage_count - 1
        keep = self.training and stage >= self.micro_batch_schedule.first_trained_stage
        # a loss may be in the model
        graph = torch.is_grad_enabled() and not again and (keep or last)
        with (
            torch.set_grad_enabled(graph),
            contextlib.nullcontext()
            if number < self.real_count
            else undo_forward_effects(self.stage_forward.model),
        ):
            sends, made, weight = self.run_stage(stage, number, received)
        self.add_loss(made, weight)
        if not last:
            self.messages.write_message(f"x{stage + 1}.{number}", sends)
        if keep and not again:
            self.pending_backwards[stage, number] = made
        if not again:
            self.messages.forget_message(came)

    def add_loss(self, pending: PendingBackward, weight: float) -> None:
        if pending.loss is not None:
            self.loss_sums = LossSums(
                self.loss_sums.loss + float(pending.loss.detach()), self.loss_sums.weight + weight
            )

    def run_stage(
        self, stage: int, number: int, received: list[Tensor]
    ) -> tuple[list[Tensor], PendingBackward, float]:
        """(what goes on, what backward wants, the weight of the loss)."""
        (micro, inputs, target), within, last = (
            self.micro_batches[number],
            self.host,
            stage == self.passes.stage_count - 1,
        )
        again = (stage, number) in self.recomputed_passes
        plan = self.plans[number]
        trained = self.micro_batch_schedule.first_trained_stage
        if again or plan.changes_inputs:
            inputs, target = clone_batch((inputs, target))
        # it is read once more, and a module may change what it is given
        if again and not torch.is_grad_enabled():
            received = [each.clone() for each in received]
        came = plan.crossing[stage - 1] if stage else []
        goes = [] if last else plan.crossing[stage]
        # in a test nothing goes back, and a loss may be weighed by its graph, which begins with
        # what came in
        received, gradients = attach_received(
            received,
            [each.has_gradient and (stage > trained or not self.training) for each in came],
        )
        total = None
        weight = 0.0
        halves = contextlib.nullcontext()
        if self.splits_backward and torch.is_grad_enabled():
            halves = DeferredWeightGradients(self.passes.deferred_ids, self.meter)
            self.deferred_weights[stage, number] = halves
        self.drawn_calls[stage, number] = {}
        with (
            self.use_micro_batch_state(stage, number),
            within.use_autocast(),
            self.meter_activations(),
        ):
            with halves:
                sends, out = self.stage_forward.run_stage(inputs, stage, plan, received)
            self.refuse_other_draws(stage, number)
            # by whose graph its mean is known
            if last and self.training and not (again and not torch.is_grad_enabled()):
                value = within.module.loss(out, target)
                if any(isinstance(each, FakeTensor) for each in find_tensors(value)):
                    raise StepFailed(
                        "the loss reads parameters of the model from outside, and they are on "
                        "another rank; let "
                        "the model return what its loss needs of it, such as (output, penalty)",
                        tensor="loss",
                    )
                total, weight = within.module.weigh_loss(value, target, len(micro.positions))
        if last and not self.training:
            self.outputs[number] = out
        ends = [
            get_gradient_edge(each) if each.requires_grad else None
            for crossing, each in zip(goes, sends, strict=True)
            if crossing.has_gradient
        ]
        return sends, PendingBackward(ends, gradients, total), weight

    def refuse_other_draws(self, stage: int, number: int) -> None:
        """Later draws of the model are known by how many come before them."""
        drawn = len(self.drawn_calls[stage, number])
        seen = len(self.passes.stage_module.draw_ranges[stage])
        if drawn != seen and self.training and self.host.draws:
            raise StepFailed(
                f"part {stage} of the model draws random numbers {drawn} time(s), and when it was "
                f"cut {seen}: "
                "which of the whole model's draws each is, is not known; draw as often in every "
                "forward, or train "
                "it with data(n)"
            )

    def meter_activations(self) -> contextlib.AbstractContextManager[Any]:
        return self.meter.count_saved_tensors() if self.meter else contextlib.nullcontext()

    @contextlib.contextmanager
    def use_micro_batch_state(self, stage: int, number: int) -> Iterator[None]:
        """A forward or backward: what is drawn, and in training batch norms, are those of these
        samples.
        """
        micro = self.micro_batches[number][0]
        first = self.passes.stage_module.draw_ranges[stage].start
        within = self.host
        if not self.training:
            with key_test_draws(within.draws, within.seed, micro.places, first):
                yield
        else:
            within.batch_norm.samples = len(micro.positions)
            with within.key_draws(micro, first, self.drawn_calls[stage, number]), within.batch_norm:
                yield

    def run_backward(self, stage: int, number: int) -> None:
        came = f"x{stage}.{number}"
        back = f"g{stage + 1}.{number}"
        if (stage, number) in self.recomputed_passes:
            with undo_forward_effects(self.stage_forward.model):
                _, self.pending_backwards[stage, number], weight = self.run_stage(
                    stage, number, self.messages.read_message(came) if stage else []
                )
            self.add_loss(self.pending_backwards[stage, number], weight)
            self.messages.forget_message(came)
        made = self.pending_backwards.pop((stage, number))
        with self.use_micro_batch_state(stage, number):
            if made.loss is not None:
                made.loss.backward()
            else:
                came_back = zip(
                    made.ends, self.messages.read_gradients(back) if made.ends else (), strict=True
                )
                if there := [
                    (end, gradient)
                    for end, gradient in came_back
                    if end is not None and gradient is not None
                ]:
                    torch.autograd.backward(*zip(*there, strict=True))
        self.messages.forget_message(back)
        if stage > self.micro_batch_schedule.first_trained_stage:
            crossing = self.plans[number].crossing[stage - 1]
            self.messages.write_message(
                f"g{stage}.{number}",
                [
                    gradient
                    for each, gradient in zip(
                        crossing, made.gradients or [None] * len(crossing), strict=True
                    )
                    if each.has_gradient
                ],
            )
