"""The passes of a pipeline: micro-batches go through the stages of this rank, and back.

A schedule gives the order. Messages to users call a stage a part.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paragrad.datasets.loading import clone_batch, list_batch_tensors
from paragrad.engine.activation_meter import ActivationMeter
from paragrad.engine.exchange import NO_CONTEXT, Exchange
from paragrad.engine.passes import (
    LossSums,
    Passes,
    PassesHost,
    refuse_changed_in_backward,
)
from paragrad.engine.rng.draws import CallNumbers, KeyedDraws, key_test_draws
from paragrad.engine.state.preserve_state import (
    INTERNAL_ATTRIBUTES,
    PythonState,
    undo_forward_effects,
)
from paragrad.errors import StepFailed
from paragrad.executors.pipeline_memory import POSTED_RECEIVES
from paragrad.executors.transport import ProgramRun
from paragrad.jobs.loss import backpropagate_share, read_share, run_backward
from paragrad.parallel.pipeline.python_state import collect_outer_owners, refuse_diverging_numbers
from paragrad.parallel.pipeline.rank_program import RankProgram
from paragrad.parallel.pipeline.split_backward import DeferredWeightGradients
from paragrad.parallel.pipeline.stage import StageModule
from paragrad.parallel.pipeline.stage_messages import MessageBuffers, StageMessages
from paragrad.parallel.tracing.crossing_plan import Crossing, CrossingPlan
from paragrad.parallel.tracing.stage_forward import attach_received
from paragrad.parallel.tracing.tracer import find_tensors, hook_module_calls
from paragrad.schedules.actions import Compute, Recv, Send, Slot
from paragrad.schedules.pipeline import MicroBatchSchedule
from paragrad.strategies.pipeline import PartitionedStrategy
from paragrad.strategies.shares import MicroBatch

LEAF_WRITTEN = "leaf Variable that requires grad"  # in what torch says of it
LATE_WRITE = (
    "a part of the model changes in place what it receives from the part before, which it did not "
    "do in its first forward, or a parameter; let it change a copy, or do so in every forward"
)


class PipelinePasses(Passes):
    """Passes of every micro-batch through all stages, and back.

    Attributes:
        stage_module: The stages of this rank.

        strategy: The strategy.

        schedule: The order of forwards and backwards.

        axis: The ranks of the pipeline.

        stage_count: Number of stages of the model.

        batches_in_flight: Number of batches that `compute_outputs` may be given at once.

        is_last_backward: Whether this rank's last backward of a step is running.

        deferred_ids: Ids of parameters with gradients that waited for the second half of a
            backward.

        has_reported_deferral: Whether the share of these parameters is in the record.

        step_count: Number of steps so far.

        outer_owners: Objects outside of units that keep something in Python.

        last_plan: The crossing plan of the last micro-batch.

        programs: The programs of this rank, by number of micro-batches with samples and first
            trained stage.

        message_buffers: The memory of messages.

        message_names: The names of messages in the record.

        gradient_hooks: The hooks that report final gradients, if the exchange wants to know.
    """

    leaves_factor = True

    def __init__(self, strategy: PartitionedStrategy, host: PassesHost, exchange: Exchange) -> None:
        super().__init__(host, exchange)
        stage_module = host.module.model
        assert isinstance(stage_module, StageModule)
        self.stage_module = stage_module
        self.strategy = strategy
        self.axis = host.world.select_axes(strategy.name, through_host=True)
        self.stage_count = stage_module.stage_forward.last_stage + 1
        self.batches_in_flight = strategy.micro_batch_schedule.micro
        self.schedule = strategy.micro_batch_schedule.schedule
        self.is_last_backward = False
        self.deferred_ids: set[int] = set()
        self.has_reported_deferral = False
        self.step_count = 0
        self.outer_owners = collect_outer_owners(stage_module.stage_forward)
        self.last_plan: CrossingPlan | None = None
        self.programs: dict[tuple[int, int], RankProgram] = {}
        self.message_buffers = MessageBuffers(self.axis.transport_device)
        self.message_names: dict[Send | Recv, str] = {}
        self.gradient_hooks = [
            parameter.register_post_accumulate_grad_hook(self._mark_ready)
            for parameter in stage_module.parameters()
            if parameter.requires_grad and type(exchange).mark_ready is not Exchange.mark_ready
        ]

    def find_program(self, count: int, first_trained_stage: int) -> RankProgram:
        """Return what this rank does with some micro-batches; compute it once.

        Args:
            count: Number of micro-batches that have samples.
            first_trained_stage: The first stage that runs backwards.

        Returns:
            The program of this rank.
        """
        key = count, first_trained_stage
        if key not in self.programs:
            self.programs[key] = RankProgram.build_for_rank(
                MicroBatchSchedule(
                    self.schedule,
                    self.schedule.pad_micro_count(count, self.axis.size),
                    first_trained_stage,
                ),
                self.axis.rank,
                self.axis.size,
            )
        return self.programs[key]

    def set_last_backward(self, is_last: bool) -> None:
        """Set whether this rank's last backward of a step is running."""
        self.is_last_backward = is_last

    def _mark_ready(self, parameter: Tensor) -> None:
        if self.is_last_backward:
            self.exchange.mark_ready(parameter)  # type: ignore[arg-type]

    def close(self) -> None:
        for hook in self.gradient_hooks:
            hook.remove()

    def invalidate_plans(self) -> None:
        self.stage_module.stage_forward.forget_plans()
        self.outer_owners = collect_outer_owners(self.stage_module.stage_forward)

    def collect_python_numbers(self) -> dict[tuple[str, str], Any]:
        # not isinstance: the object behind a proxy may be gone
        return {
            (name, what): value
            for name, owner in self.outer_owners.items()
            for what, value in vars(owner).items()
            if issubclass(type(value), int | float)
            and what != "training"
            and not (what in INTERNAL_ATTRIBUTES and isinstance(owner, nn.Module))
        }

    def compute_gradients(
        self, micros: Iterable[tuple[MicroBatch, Any, Any]], count: int
    ) -> LossSums:
        step = PipelineStep(
            self, list(micros), self.find_program(count, self.stage_module.first_trained)
        )
        self.step_count += not self.host.rehearsing
        # the first step sets sizes; later checks come after 2, 4, 8, ... steps
        before = (
            PythonState(self.outer_owners)
            if self.step_count > 1 and self.step_count.bit_count() == 1
            else None
        )
        step.run_step()
        if before is not None:
            runs_repeatedly = self.stage_count > self.axis.size or self.strategy.recompute
            # with the same plan, sizes have not changed
            refuse_diverging_numbers(
                before, self.axis, runs_repeatedly and step.plans[count - 1] is self.last_plan
            )
        self.last_plan = step.plans[count - 1]
        if step.rank_program.splits_backward and not self.has_reported_deferral:
            self.report_deferred_share()
        return LossSums(step.loss, step.weight)

    def report_deferred_share(self) -> None:
        """Report which share of this rank's parameters the split backward could defer."""
        self.has_reported_deferral = True
        trained = [each for each in self.stage_module.parameters() if each.requires_grad]
        deferred = sum(each.numel() for each in trained if id(each) in self.deferred_ids)
        share = deferred / max(1, sum(each.numel() for each in trained))
        self.host.log.write_choice(
            "weights' part",
            f"{share:.0%} of the parameters",
            "the weights of linear, convolution and embedding; the other parameters get their "
            "gradients together with those of the inputs",
        )

    def compute_outputs(self, batches: list[Any], places: list[list[int]]) -> list[Any]:
        micro_batches = [
            (MicroBatch(positions, positions), inputs, None)
            for positions, inputs in zip(places, batches, strict=True)
        ]
        # no stage runs backwards
        program = self.find_program(len(batches), self.stage_count)
        step = PipelineStep(self, micro_batches, program, training=False)
        step.run_step()
        return [step.outputs.get(number) for number in range(len(batches))]

    def compute_output(self, inputs: Any) -> Any:
        return self.compute_outputs([inputs], [[0]])[0]


@dataclass
class PendingBackward:
    """What a forward leaves for its backward.

    Attributes:
        ends: For each tensor that crosses and gets a gradient, its edge in the graph; its values
            are gone.

        leaves: The received tensors, if they are leaves of the graph.

        gradients: Otherwise the gradients of received tensors, once the backward has computed them.

        loss: The loss without its factor, on the last stage.

        factor: As `LossModule.share_factor`.
    """

    ends: list[GradientEdge | None]
    leaves: list[Tensor]
    gradients: list[Tensor | None]
    loss: Tensor | None = None
    factor: float = 1.0

    def list_gradients(self, crossing: Sequence[Crossing]) -> list[Tensor | None]:
        """List the gradients to send, of those tensors that have gradients.

        Args:
            crossing: The received tensors.
        """
        gradients = [each.grad for each in self.leaves] or self.gradients or [None] * len(crossing)
        return [
            gradient
            for each, gradient in zip(crossing, gradients, strict=True)
            if each.has_gradient
        ]


def find_gradient_edge(tensor: Tensor) -> GradientEdge | None:
    """Return the edge of a tensor in the graph; None if it needs no gradient.

    Args:
        tensor: The tensor.
    """
    node = tensor.grad_fn
    # A node of Python does not keep its graph alive; torch's function sees to that.
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(tensor) if tensor.requires_grad else None
    return GradientEdge(node, tensor.output_nr)


class PipelineStep:
    """One batch through the stages of this rank.

    Its micro-batches are filled up to those of the schedule by some without samples, which leave no
    trace.

    Attributes:
        passes: The passes of this rank.

        micro_batches: (micro-batch, inputs, target) of each.

        rank_program: What this rank does.

        first_trained_stage: The first stage that runs backwards.

        real_count: Number of micro-batches with samples.

        training: Whether it is a step of training, not a test.

        host: What passes need of the trainer.

        stage_forward: Runs the forward of a stage.

        axis: The ranks of the pipeline.

        plans: The crossing plan of each micro-batch.

        meter: Counts the bytes of activations, if given.

        messages: The messages between stages.

        loss: The sum of losses so far.

        weight: The sum of their weights so far.

        outputs: In a test, the output of each micro-batch.

        remaining_backwards: Number of backwards, or halves, that are left.

        recomputed_passes: (stage, micro-batch) of forwards that are recomputed in the backward.

        pending_backwards: By (stage, micro-batch), what its backward needs.

        deferred_weights: By (stage, micro-batch), its second half of the backward.

        drawn_calls: By (stage, micro-batch), the random calls of its forward, which a module that
            recomputes draws again.

        keyed_draws: The source of the draws of all passes of the step; None: each has its own. It
            is in use between passes too.

        program_run: The run of the program, while it runs.
    """

    def __init__(
        self,
        passes: PipelinePasses,
        micro_batches: list[tuple[MicroBatch, Any, Any]],
        rank_program: RankProgram,
        training: bool = True,
    ) -> None:
        last, *inputs_and_target = micro_batches[-1]
        self.micro_batches = [
            *micro_batches,
            *[(replace(last, positions=[]), *inputs_and_target)]
            * (rank_program.micro_batch_schedule.micro - len(micro_batches)),
        ]
        filled = self.micro_batches
        self.passes = passes
        self.rank_program = rank_program
        self.real_count = len(micro_batches)
        self.training = training
        self.host = passes.host
        self.stage_forward = passes.stage_module.stage_forward
        self.axis = passes.axis
        with self.host.use_autocast():
            self.plans = self.stage_forward.find_plans(
                [inputs for _, inputs, _ in filled], self.host.batch_norm.use_probe_mode
            )
        self.meter = passes.activation_meter
        if self.meter is not None:
            self.meter.exclude_tensors(list_batch_tensors([each[1:] for each in filled]))
        self.messages = StageMessages(self.plans, self.axis, passes.message_buffers, self.meter)
        self.loss = 0.0
        self.weight = 0.0
        self.outputs: dict[int, Any] = {}
        self.first_trained_stage = rank_program.micro_batch_schedule.first_trained_stage
        self.remaining_backwards = rank_program.backward_count
        self.recomputed_passes = (
            rank_program.recomputed_passes if passes.strategy.recompute else frozenset()
        )
        self.pending_backwards: dict[tuple[int, int], PendingBackward] = {}
        self.deferred_weights: dict[tuple[int, int], DeferredWeightGradients] = {}
        self.drawn_calls: dict[tuple[int, int], CallNumbers] = {}
        self.keyed_draws: KeyedDraws | None = None
        self.program_run: ProgramRun | None = None

    def run_step(self) -> None:
        """Run all actions of this rank."""
        self.program_run = ProgramRun(
            self.rank_program.program,
            self.messages,
            self.axis,
            self.run_action,
            self.report_message if self.is_detailed else None,
            POSTED_RECEIVES,
            self.rank_program.touched_parts,
            self.rank_program.postings,
        )
        program_run = self.program_run
        training, host = self.training, self.host
        has_one_source = training and not host.draws.other_generators
        # hooks are entered once for all micro-batches: after each change of nn.Module, Python looks
        # up methods again
        is_observed = any(plan.sequential_stages is None for plan in self.plans)
        with (
            host.batch_norm if training else NO_CONTEXT,
            host.key_draws(self.micro_batches[0][0]) if has_one_source else NO_CONTEXT as source,
            hook_module_calls(None) if is_observed else NO_CONTEXT,
            self.stage_forward.fix_model_tensors() if is_observed else NO_CONTEXT,
        ):
            self.keyed_draws = source if isinstance(source, KeyedDraws) else None
            program_run.play_program()
        self.program_run = None
        self.messages.close()
        if self.training:
            self.passes.message_buffers.drop_unused()
        self.passes.set_last_backward(is_last=False)
        self.passes.exchange.count_bytes("activations", program_run.sent_bytes, computed=False)

    @property
    def is_detailed(self) -> bool:
        """Whether the record of this step lists every message."""
        return self.training and self.host.log.is_detailed

    def report_message(
        self, action: Send | Recv, lane: str, start: float, seconds: float, size: int
    ) -> None:
        """Add a message to the record.

        Args:
            action: The action.
            lane: The lane of the record.
            start: Beginning of the message, in seconds.
            seconds: Its duration.
            size: Its bytes.
        """
        names = self.passes.message_names
        if action not in names:
            assert self.program_run is not None
            names[action] = str(self.program_run.use_launched_ranks(action))
        self.host.log.add_span(
            names[action],
            lane,
            self.host.log.convert_moment(start),
            bytes=size,
            seconds=seconds,
        )

    def run_action(self, action: Compute) -> None:
        """Run a forward, a backward, or a half of one."""
        task = self.rank_program.tasks[action]
        self.release_messages(task.arrived_messages)
        started = time.monotonic()
        try:
            if task.what == "F":
                self.run_forward(task.stage, task.micro)
                return
            self.remaining_backwards -= 1
            # in the half of the weights, a weight that is used twice gets its gradient in two steps
            self.passes.set_last_backward(self.remaining_backwards == 0 and task.what != "W")
            if task.what == "W":
                # a module may recompute
                with self.key_draws(task.stage, task.micro):
                    self.deferred_weights.pop((task.stage, task.micro)).compute_weight_gradients()
                self.messages.free_graph(f"x{task.stage}.{task.micro}")
            else:
                self.run_backward(task.stage, task.micro)
        finally:
            if self.training:
                self.host.log.end_span(task.label, "compute", started)

    def release_messages(self, slots: Sequence[Slot]) -> None:
        """Release sent messages that have certainly arrived."""
        assert self.program_run is not None
        for slot in slots:
            self.program_run.finish_sends([slot])
            self.messages.forget_message(slot)

    def use_meter(self, meter: ActivationMeter) -> None:
        """Count the activations of the next forwards with a meter."""
        self.meter = meter

    def run_forward(self, stage: int, number: int) -> None:
        """Run the forward of a stage for a micro-batch."""
        slot = f"x{stage}.{number}"
        recomputes = (stage, number) in self.recomputed_passes
        received = self.messages.read_message(slot) if stage else []
        is_last = stage == self.passes.stage_count - 1
        keeps_backward = self.training and stage >= self.first_trained_stage
        # the model may compute the loss itself
        has_graph = torch.is_grad_enabled() and not recomputes and (keeps_backward or is_last)
        with (
            NO_CONTEXT
            if torch.is_grad_enabled() == has_graph
            else torch.set_grad_enabled(has_graph),
            NO_CONTEXT
            if number < self.real_count
            else undo_forward_effects(self.stage_forward.model),
        ):
            outgoing, pending, weight = self.run_stage(stage, number, received)
        self.add_loss(pending, weight)
        if not is_last:
            self.messages.write_message(f"x{stage + 1}.{number}", outgoing)
        if keeps_backward and not recomputes:
            self.pending_backwards[stage, number] = pending
        del pending, received  # otherwise they use the message
        if not recomputes:
            self.messages.forget_message(slot, is_in_graph=keeps_backward)

    def add_loss(self, pending: PendingBackward, weight: float) -> None:
        """Add the loss of a micro-batch, if the stage has it."""
        if pending.loss is not None:
            self.loss += read_share(pending.loss, pending.factor)
            self.weight += weight

    def run_stage(
        self, stage: int, number: int, received: list[Tensor]
    ) -> tuple[list[Tensor], PendingBackward, float]:
        """Run a stage, and compute the loss if it is the last.

        Args:
            stage: Number of the stage.
            number: Number of the micro-batch.
            received: The tensors of the stage before.

        Returns:
            (tensors that cross to the next stage, what the backward needs, weight of the loss).

        Raises:
            StepFailed: The stage draws more or less than when the model was cut, or changes what it
                receives as it did not before; or the loss reads parameters of another rank.
        """
        (micro, inputs, target), host, is_last = (
            self.micro_batches[number],
            self.host,
            stage == self.passes.stage_count - 1,
        )
        recomputes = (stage, number) in self.recomputed_passes
        plan = self.plans[number]
        trained = self.first_trained_stage
        if recomputes or plan.changes_inputs:
            inputs, target = clone_batch((inputs, target))
        # the message is read again in the backward, and a module may change its input
        if recomputes and not torch.is_grad_enabled():
            received = [each.clone() for each in received]
        incoming = plan.crossing[stage - 1] if stage else []
        outgoing = [] if is_last else plan.crossing[stage]
        # In a test no gradient is sent. But a loss may be weighted by its graph, which begins with
        # the received tensors.
        wants_gradients = [
            each.has_gradient and (stage > trained or not self.training) for each in incoming
        ]
        leaves: list[Tensor] = []
        gradients: list[Tensor | None] = []
        versions: list[int] | None = None
        autocast = host.use_autocast()
        # autocast casts a leaf once for all its uses, and sums their gradients in the narrow type
        if stage in plan.reading_stages and autocast is NO_CONTEXT:
            leaves = received
            for each, wanted in zip(received, wants_gradients, strict=True):
                each.requires_grad_(wanted)
        else:
            received, gradients = attach_received(received, wants_gradients)
            versions = [each._version for each in received]
        loss = None
        weight = 0.0
        deferred: AbstractContextManager[Any] = NO_CONTEXT
        if self.rank_program.splits_backward and torch.is_grad_enabled():
            deferred = self.deferred_weights[stage, number] = DeferredWeightGradients(
                self.passes.deferred_ids, self.meter
            )
        self.drawn_calls[stage, number] = {}
        with (
            self.key_draws(stage, number),
            autocast,
            NO_CONTEXT if self.meter is None else self.meter.count_saved_tensors(),
        ):
            with deferred:
                try:
                    sent, out = self.stage_forward.run_stage(inputs, stage, plan, received)
                except RuntimeError as error:
                    if leaves and LEAF_WRITTEN in str(error):
                        raise StepFailed(LATE_WRITE) from error
                    raise
            self.refuse_other_draws(stage, number)
            # the graph of the loss shows over what it takes the mean
            if is_last and self.training and not (recomputes and not torch.is_grad_enabled()):
                value = host.module.loss(out, target)
                if type(value) is not Tensor and any(
                    isinstance(each, FakeTensor) for each in find_tensors(value)
                ):
                    raise StepFailed(
                        "the loss reads parameters of the model from outside, and they are on "
                        "another rank; let the model return what its loss needs of it, such as "
                        "(output, penalty)",
                        tensor="loss",
                    )
                loss, weight = host.module.share_loss(value, target, len(micro.positions))
        if versions == [each._version for each in received] and torch.is_grad_enabled():
            plan.reading_stages.add(stage)
        if is_last and not self.training:
            self.outputs[number] = out
        ends = [
            find_gradient_edge(each)
            for crossing, each in zip(outgoing, sent, strict=True)
            if crossing.has_gradient
        ]
        pending = PendingBackward(ends, leaves, gradients, loss, host.module.share_factor)
        return sent, pending, weight

    def refuse_other_draws(self, stage: int, number: int) -> None:
        """Refuse a forward that draws more or less often than when the model was cut.

        Later draws of the model are identified by the number of draws before them.

        Raises:
            StepFailed: It draws more or less often.
        """
        drawn = len(self.drawn_calls[stage, number])
        expected = len(self.passes.stage_module.draw_ranges[stage])
        if drawn != expected and self.training and self.host.draws:
            raise StepFailed(
                f"part {stage} of the model draws random numbers {drawn} time(s), and when it was "
                f"cut {expected}, so its draws cannot be matched with those of the whole model; "
                "draw equally often in every forward, or train it with data(n)"
            )

    def key_draws(self, stage: int, number: int) -> AbstractContextManager[Any]:
        """Return the context for the draws of a micro-batch during a forward or a backward.

        In training, the batch norms are told of the micro-batch too.
        """
        micro = self.micro_batches[number][0]
        first_call = self.passes.stage_module.draw_ranges[stage].start
        host = self.host
        if not self.training:
            return key_test_draws(host.draws, host.seed, micro.places, first_call)
        samples = len(micro.positions)
        host.batch_norm.start_micro_batch(samples)
        if self.keyed_draws is None:
            return host.key_draws(micro, first_call, self.drawn_calls[stage, number])
        self.keyed_draws.move_to(
            micro.places[:samples], first_call, self.drawn_calls[stage, number]
        )
        return NO_CONTEXT

    @staticmethod
    def backpropagate(
        ends: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """Run the backward from the tensors that crossed and have a gradient.

        Args:
            ends: The edges of the tensors in the graph.
            gradients: Their gradients.
        """
        existing = [
            (end, gradient)
            for end, gradient in zip(ends, gradients, strict=True)
            if end is not None and gradient is not None
        ]
        if existing:
            run_backward(*zip(*existing, strict=True))

    def run_backward(self, stage: int, number: int) -> None:
        """Run the backward of a stage for a micro-batch, after its forward if it is recomputed."""
        slot = f"x{stage}.{number}"
        gradient_slot = f"g{stage + 1}.{number}"
        if (stage, number) in self.recomputed_passes:
            with undo_forward_effects(self.stage_forward.model):
                _, self.pending_backwards[stage, number], weight = self.run_stage(
                    stage, number, self.messages.read_message(slot) if stage else []
                )
            self.add_loss(self.pending_backwards[stage, number], weight)
            self.messages.forget_message(slot, is_in_graph=True)
        pending = self.pending_backwards.pop((stage, number))
        with (
            self.key_draws(stage, number),
            refuse_changed_in_backward(self.host.watched_parameters),
        ):
            if pending.loss is not None:
                backpropagate_share(pending.loss, pending.factor)
            elif pending.ends:
                self.backpropagate(pending.ends, self.messages.read_gradients(gradient_slot))
        self.messages.forget_message(gradient_slot)
        gradients = None
        if stage > self.first_trained_stage:
            gradients = pending.list_gradients(self.plans[number].crossing[stage - 1])
        del pending  # the graph
        if not self.rank_program.splits_backward:
            self.messages.free_graph(slot)
        if gradients is not None:
            self.messages.write_message(f"g{stage}.{number}", gradients)
