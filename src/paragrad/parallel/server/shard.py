"""The part of a server in the training: a slice of parameters and optimizer state, and its updates.

This is the core of a parameter server. The staleness of a push is the number of updates since
the pull of its worker.

The optimizer is that of the job. Several servers hold flat ranges of the parameters, so the
optimizer must update element by element. A single server holds all parameters. The scheduler steps
after every full batch of samples.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.exchange import Replica
from paragrad.engine.layout import install_shards
from paragrad.engine.optimizer.modes import set_optimizer_mode
from paragrad.engine.optimizer.optimizer_state import copy_unsaved_values, list_unsaved_state
from paragrad.engine.optimizer.update_slices import step_with_fast_kernels
from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.errors import StepFailed
from paragrad.parallel.server.compressed_push import build_push_codec
from paragrad.parallel.server.parameter_partition import VectorSlot, build_shard_spec, fill_vector
from paragrad.parallel.server.shared_buffer import SharedBuffer
from paragrad.parallel.server.snapshot import SnapshotStore
from paragrad.parallel.server.state_message import write_state_message
from paragrad.strategies.server import Server

# for each slot of a share: the marks of ranges with a gradient, and the vector
ShareVectors = Mapping[int, tuple[bytes, Tensor]]


class AppliedTickets:
    """A set of applied tickets: all below a number, and some above it.

    Attributes:
        below: All tickets below this number were applied.
        above: Applied tickets above it.
    """

    def __init__(self) -> None:
        self.below = 0
        self.above = set[int]()

    def __contains__(self, ticket: int) -> bool:
        return ticket < self.below or ticket in self.above

    def add_ticket(self, ticket: int) -> None:
        """Add a ticket.

        Args:
            ticket: Number of the ticket.
        """
        self.above.add(ticket)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1


class ServerShard:
    """The slice of one server.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        slots: The vectors of the slice.

        names: Names of the trained parameters.

        tensors: The tensors to which the slots refer: trained parameters, then values that forward
            passes change.

        full_batch: Number of samples of a full batch.

        obstacle: The reason why workers must not read the values in shared memory, or "".

    Attributes:
        strategy: The resolved strategy.

        slots: The vectors of the slice.

        full_batch: Number of samples of a full batch.

        optimizer: The optimizer of the job.

        scheduler: The scheduler of the job, or None.

        draw_alike: As in Replica.

        initial_values: What the optimizer kept in itself at the start.

        changed_settings: For each group, the names of settings that a step has changed.

        clip_norm: As in Job.

        trained_slots: The slots of trained parameters. They come first.

        push_codecs: For each slot, the compression of pushes, or None.

        ranges: The ranges of trained parameters, over all slots.

        specs: The spec of each range.

        shared_buffer: The memory of the values.

        values: The values of each slot.

        gradients: The gradients of each trained slot.

        local_parameters: For each range, the tensor that the optimizer updates.

        local_gradients: For each range, its gradient.

        gradient_flags: For each range, whether it had a gradient in the last update.

        samples: Number of samples in all updates.

        is_complete: Whether all shares of a step were added, before its update.

        buffers: Buffers that forward passes changed until now, by name.

        changed_buffers: Buffers changed in this step. They become valid with its update.

        last_step: Divisor and factor of the last step, and the numbers of its shares.

        applied_tickets: The tickets that were applied.

        received_bytes: Bytes of received vectors.

        sent_bytes: Bytes of sent vectors.

        initial_updates: Number of updates at the start.

        updates: Number of updates.

        initial_samples: Number of samples at the start.

        lost_counts: Updates and samples that this server lost when it failed.

        snapshots: The snapshots of this server, or None.

        staleness: How many shares came with each staleness.

        refusals: Counts of refused requests, by reason.
    """

    def __init__(
        self,
        strategy: Server,
        replica: Replica,
        slots: list[VectorSlot],
        names: list[str],
        tensors: list[Tensor],
        full_batch: int,
        obstacle: str = "",
    ) -> None:
        self.strategy = strategy
        self.slots = slots
        self.full_batch = full_batch
        self.optimizer = replica.optimizer
        self.scheduler = replica.scheduler
        self.draw_alike = replica.draw_alike
        self.initial_values = copy_unsaved_values(self.optimizer)
        self.changed_settings = [set[str]() for _ in self.optimizer.param_groups]
        self.clip_norm = replica.clip_norm
        self.trained_slots = [slot for slot in slots if not slot.is_added]
        self.push_codecs = [build_push_codec(strategy, slot) for slot in slots]
        self.ranges = [each for slot in self.trained_slots for each in slot.ranges]
        self.specs = [build_shard_spec(each, names, tensors) for each in self.ranges]
        self.shared_buffer = SharedBuffer([(slot.dtype, slot.elements) for slot in slots], obstacle)
        self.values = self.shared_buffer.vectors
        for slot, each in zip(slots, self.values, strict=True):
            fill_vector(slot, tensors, each)
        self.gradients = [torch.zeros_like(each) for each in self.values[: len(self.trained_slots)]]
        self.local_parameters, self.local_gradients = (
            self._view_ranges(self.values),
            self._view_ranges(self.gradients),
        )
        # the optimizer keeps its state and its hooks, which may refer to the model
        if strategy.servers == 1:
            self._move_parameters(tensors)
        else:
            parts: dict[Tensor, list[Any]] = {}
            for element_range, spec, place in zip(
                self.ranges, self.specs, self.local_parameters, strict=True
            ):
                parts.setdefault(tensors[element_range.index], []).append((spec, place))
            install_shards(self.optimizer, parts)
        set_optimizer_mode(self.optimizer, "train")
        self.gradient_flags = [False] * len(self.local_parameters)
        self.samples = replica.completed_steps * full_batch
        self.is_complete = False
        self.buffers: dict[str, Tensor] = {}
        self.changed_buffers: dict[str, Tensor] = {}
        self.last_step: dict[str, Any] = {"made": [0.0, 0.0], "shares": []}
        self.applied_tickets = AppliedTickets()
        self.applied_tickets.below = replica.completed_steps * strategy.share_count
        self.received_bytes = 0
        self.sent_bytes = 0
        self.initial_updates = replica.completed_steps
        self.updates = self.initial_updates
        self.initial_samples = self.samples
        self.lost_counts = {"updates": 0, "samples": 0}
        self.snapshots: SnapshotStore | None = None
        self.staleness: Counter[int] = Counter()
        self.refusals: Counter[str] = Counter()

    def _view_ranges(self, vectors: list[Tensor]) -> list[Tensor]:
        """Return a view of each range in the vectors.

        If the range is a whole parameter, the view has its shape.
        """
        flat = [
            each
            for slot, vector in zip(self.trained_slots, vectors, strict=False)
            for each in slot.split_vector(vector)
        ]
        return [
            each if spec.where is not None else each.view(spec.shape)
            for each, spec in zip(flat, self.specs, strict=True)
        ]

    def _move_parameters(self, parameters: list[Tensor]) -> None:
        """Move the parameters of the model into the vectors."""
        for number, element_range in enumerate(self.ranges):
            parameters[element_range.index].data = self.local_parameters[number]
            self.local_parameters[number] = parameters[element_range.index]

    @property
    def nbytes(self) -> int:
        """Number of bytes of all vectors."""
        return sum(slot.nbytes for slot in self.slots)

    def add_shares(self, shares: Sequence[ShareVectors]) -> float:
        """Add the gradients of a step, in the order of the shares.

        Args:
            shares: For each share, its vectors and marks by slot.

        Returns:
            The squared norm of the sum, or 0 if there is no clipping.
        """
        square = 0.0
        gradient_flags = []
        for number, total in enumerate(self.gradients):
            first, *others = [each[number] for each in shares]
            partial_sum = first[1]
            for _, vector in others:
                partial_sum = torch.add(partial_sum, vector, out=total)
            if not others:
                total.copy_(partial_sum)
            if self.clip_norm is not None and total.numel():
                square += (
                    float(
                        torch.linalg.vector_norm(total, dtype=get_accumulation_dtype(total.dtype))
                    )
                    ** 2
                )
            gradient_flags += [
                any(flags) for flags in zip(*(marks for marks, _ in (first, *others)), strict=True)
            ]
        # the mean over the shares of the values that forward passes changed
        for number in range(len(self.trained_slots), len(self.slots)):
            vectors = [each[number][1] for each in shares]
            change: Any = sum(
                each if each.is_floating_point() else each.to(torch.int64) for each in vectors
            )
            if self.slots[number].is_boolean:
                self.values[number].add_(change).clamp_(0, 1)
            else:
                self.values[number].add_(
                    torch.div(change, len(shares)).to(self.values[number].dtype)
                )
        self.gradient_flags = gradient_flags
        self.is_complete = True
        return square

    def apply_share(
        self,
        vectors: ShareVectors,
        version: int,
        samples: int,
        workers: float = 0,
        has_weight: bool = True,
    ) -> None:
        """Make an update with one share.

        Args:
            vectors: Its vectors and marks by slot.

            version: Number of updates made when the worker pulled.

            samples: Number of samples in the share.

            workers: Number of workers at that time.

            has_weight: Whether any sample in it counts.
        """
        self.add_shares([vectors])
        self.is_complete, late = False, max(0, self.updates - version)
        self.staleness[late] += 1
        if not has_weight:
            self.samples += samples
            return
        self.make_update(self.strategy.scale_rate(late, workers), samples)

    # ---- updates -----------------------------------------------------------------------------
    def divide_gradients(self, divisor: float, factor: float) -> None:
        """Turn the sum of gradients into their clipped mean.

        Args:
            divisor: The weight of the samples.
            factor: The factor of clipping.
        """
        for gradient in self.gradients:
            gradient.div_(divisor)
            if factor != 1:
                gradient.mul_(factor)

    def make_update(self, rate: float, samples: int) -> None:
        """Make an update.

        Args:
            rate: Factor of the learning rate.
            samples: Number of samples in the update.

        Raises:
            StepFailed: The optimizer or the scheduler failed.
        """
        update_number = self.updates
        try:
            self._run_update(rate, samples)
        except Exception as error:
            # the rank of a server makes no steps, so the number of the update takes its place
            raise StepFailed.wrap_error(error, update_number) from error

    def _run_update(self, rate: float, samples: int) -> None:
        for place, gradient, has_gradient in zip(
            self.local_parameters, self.local_gradients, self.gradient_flags, strict=True
        ):
            place.grad = gradient if has_gradient else None
        with self._scale_rate(rate):
            self.draw_alike("update", self.updates, self._step_optimizer)
        self.buffers |= self.changed_buffers
        self.changed_buffers = {}
        before = self.samples // self.full_batch if self.strategy.uses_work_queue else self.updates
        self.updates = self.updates + 1
        self.samples = self.samples + samples
        after = self.samples // self.full_batch if self.strategy.uses_work_queue else self.updates
        for step in range(before, after) if self.scheduler is not None else ():
            self.draw_alike("schedule", step, self.scheduler.step)

    def _step_optimizer(self) -> None:
        """Run a step, and note which settings of the groups it changes."""
        groups = self.optimizer.param_groups
        before = [
            {name: (value, getattr(value, "_version", 0)) for name, value in group.items()}
            for group in groups
        ]
        step_with_fast_kernels(self.optimizer)
        for names, group, old_settings in zip(self.changed_settings, groups, before, strict=True):
            for name, value in group.items():
                old_value, old_version = old_settings.get(name, (self, 0))
                if name != "params" and (
                    value is not old_value
                    or getattr(value, "_version", 0) != old_version
                    # what is in it may have changed
                    or isinstance(value, list | dict | deque)
                ):
                    names.add(name)

    @contextmanager
    def _scale_rate(self, rate: float) -> Iterator[None]:
        """Multiply the learning rates during the context."""
        groups = self.optimizer.param_groups if rate != 1 else []
        if any(group.get("lr") is None for group in groups):
            raise StepFailed(
                f"the learning rate must be multiplied by {rate:g}, and a group of "
                f"{type(self.optimizer).__name__} has no lr; take an optimizer with one, or "
                "rate=constant without workers that join later"
            )
        original_rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * rate
        yield
        for group, lr in zip(groups, original_rates, strict=True):
            group["lr"] = lr

    def summarize_counts(self) -> dict[str, Any]:
        """Return the counts of this server for the record."""
        return {
            "parameters": self.nbytes,
            "received": self.received_bytes,
            "sent": self.sent_bytes,
            "updates": self.updates - self.initial_updates,
            "samples": self.samples - self.initial_samples,
            "lost": self.lost_counts,
            "staleness": {str(late): count for late, count in sorted(self.staleness.items())},
            "refused": dict(self.refusals),
        }

    def export_optimizer_state(self) -> tuple[str, Tensor]:
        """Return the state of the optimizer, and the settings of its groups that steps change.

        Returns:
            A description as JSON, and the bytes of the tensors, as of `write_state_message`.

        Raises:
            TypeError: The state has other values, or values that belong to no parameter.
        """
        if keys := list_unsaved_state(self.optimizer, self.initial_values):
            raise TypeError(
                f"{type(self.optimizer).__name__} keeps {', '.join(keys)} beside the states of its "
                "parameters"
            )
        return write_state_message(
            [dict(self.optimizer.state.get(place, {})) for place in self.local_parameters],
            [
                {name: group[name] for name in sorted(names)}
                for names, group in zip(
                    self.changed_settings, self.optimizer.param_groups, strict=True
                )
            ],
        )

    # ---- restart -----------------------------------------------------------------------------
    def export_counts(self) -> dict[str, Any]:
        """Return the counts of this server for a snapshot."""
        return {
            "updates": self.updates,
            "samples": self.samples,
            "received": self.received_bytes,
            "sent": self.sent_bytes,
            "beside": self.buffers,
            "last": self.last_step,
            "below": self.applied_tickets.below,
            "above": sorted(self.applied_tickets.above),
            "lost": self.lost_counts,
            "staleness": {str(late): count for late, count in self.staleness.items()},
            "refused": dict(self.refusals),
            "settings": [sorted(names) for names in self.changed_settings],
        }

    def restore_counts(self, counts: dict[str, Any]) -> None:
        """Set the counts from a snapshot.

        Args:
            counts: The exported counts.
        """
        self.updates = counts["updates"]
        self.samples = counts["samples"]
        self.received_bytes = counts["received"]
        self.sent_bytes = counts["sent"]
        self.lost_counts = counts["lost"]
        self.buffers = counts["beside"]
        self.last_step = counts["last"]
        self.applied_tickets.below = counts["below"]
        self.applied_tickets.above = set(counts["above"])
        self.staleness = Counter({int(late): count for late, count in counts["staleness"].items()})
        self.refusals = Counter(counts["refused"])
        self.changed_settings = [set(names) for names in counts["settings"]]

    def lose_ticket(self, ticket: int, samples: int) -> None:
        """Count a ticket as applied, though its update is lost.

        Args:
            ticket: Number of the ticket.
            samples: Number of its samples.
        """
        if ticket not in self.applied_tickets:
            self.applied_tickets.add_ticket(ticket)
            self.lost_counts = {
                "updates": self.lost_counts["updates"] + 1,
                "samples": self.lost_counts["samples"] + samples,
            }
