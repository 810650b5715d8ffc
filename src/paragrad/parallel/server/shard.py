"""A server's part of the training: a slice of the parameters and of the optimizer's state, and
the updates of it.

The optimizer is the job's own. Several servers have flat stretches of the parameters, so it has
to update element by element; one alone has all. The scheduler steps with every full batch of
samples that came.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paragrad.engine.exchange import Replica
from paragrad.engine.layout import install_shards
from paragrad.engine.optimizer.modes import set_optimizer_mode
from paragrad.engine.optimizer.optimizer_state import copy_optimizer_attributes, list_unsaved_state
from paragrad.engine.optimizer.update_slices import step_with_fast_kernels
from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.errors import StepFailed
from paragrad.parallel.server.compressed_push import build_push_codec
from paragrad.parallel.server.parameter_partition import VectorSlot, build_shard_spec, fill_vector
from paragrad.parallel.server.shared_buffer import SharedBuffer
from paragrad.parallel.server.snapshot import SnapshotStore
from paragrad.strategies.server import Server

# of a share, by slot: which stretches have a gradient, and all of them
ShareVectors = Mapping[int, tuple[bytes, Tensor]]


class AppliedTickets:
    """Tickets that were applied: all below a number, and some above it."""

    def __init__(self) -> None:
        self.below = 0
        self.above = set[int]()

    def __contains__(self, ticket: int) -> bool:
        return ticket < self.below or ticket in self.above

    def add_ticket(self, ticket: int) -> None:
        self.above.add(ticket)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1


class ServerShard:
    """One server's. slots: what it has of `tensors`, the parameters that are trained, which
    have names, and what forwards change;  full: samples of a full batch;  against: why workers
    are not to read the values where they lie, or "".
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
        self.initial_attributes = copy_optimizer_attributes(self.optimizer)
        self.clip_norm = replica.clip_norm
        self.trained_slots = [slot for slot in slots if not slot.is_added]  # they come first
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
        # the optimizer keeps what it has, also hooks that know the model
        if strategy.servers == 1:
            self._move_parameters(tensors)
        else:
            parts: dict[Tensor, list[Any]] = {}
            for stretch, which, place in zip(
                self.ranges, self.specs, self.local_parameters, strict=True
            ):
                parts.setdefault(tensors[stretch.index], []).append((which, place))
            install_shards(self.optimizer, parts)
        set_optimizer_mode(self.optimizer, "train")
        self.gradient_flags = [False] * len(
            self.local_parameters
        )  # had a gradient in the last update
        self.samples = replica.completed_steps * full_batch
        self.is_complete = False  # all of them were added up
        # what forwards changed until now, by name, beside the parameters
        self.buffers: dict[str, Tensor] = {}
        # and in this step, which is so once its update is made
        self.changed_buffers: dict[str, Tensor] = {}
        # how the last step was made, and of what
        self.last_step: dict[str, Any] = {"made": [0.0, 0.0], "shares": []}
        self.applied_tickets = AppliedTickets()
        self.applied_tickets.below = replica.completed_steps * strategy.share_count
        self.received_bytes = 0
        self.sent_bytes = 0
        self.initial_updates = replica.completed_steps
        self.updates = self.initial_updates
        self.initial_samples = self.samples
        self.lost_counts = {"updates": 0, "samples": 0}  # by this server, when it died
        self.snapshots: SnapshotStore | None = None
        self.staleness: Counter[int] = Counter()
        self.refusals: Counter[str] = Counter()

    def _view_ranges(self, vectors: list[Tensor]) -> list[Tensor]:
        """Of every stretch that in the vectors, in the parameter's shape where it is all of
        one.
        """
        flat = [
            each
            for slot, vector in zip(self.trained_slots, vectors, strict=False)
            for each in slot.split_vector(vector)
        ]
        return [
            each if which.where is not None else each.view(which.shape)
            for each, which in zip(flat, self.specs, strict=True)
        ]

    def _move_parameters(self, parameters: list[Tensor]) -> None:
        """The model's own parameters are the places in the vectors."""
        for number, stretch in enumerate(self.ranges):
            parameters[stretch.index].data = self.local_parameters[number]
            self.local_parameters[number] = parameters[stretch.index]

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def add_shares(self, shares: Sequence[ShareVectors]) -> float:
        """The gradients of a step, in this order; the square of the norm of their sum, where
        something is clipped by it.
        """
        square = 0.0
        anyone = []
        for number, total in enumerate(self.gradients):
            first, *others = [each[number] for each in shares]
            so_far = first[1]
            for _, vector in others:
                so_far = torch.add(so_far, vector, out=total)
            if not others:
                total.copy_(so_far)
            if self.clip_norm is not None and total.numel():
                square += (
                    float(
                        torch.linalg.vector_norm(total, dtype=get_accumulation_dtype(total.dtype))
                    )
                    ** 2
                )
            anyone += [
                any(found)
                for found in zip(*(marked for marked, _ in (first, *others)), strict=True)
            ]
        # what forwards changed: the mean over the shares
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
        self.gradient_flags = anyone
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
        """An update by one share, of parameters of that version. workers: that were there;
        counts: something in it does.
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
        """The sum of gradients becomes their mean, clipped."""
        for gradient in self.gradients:
            gradient.div_(divisor)
            if factor != 1:
                gradient.mul_(factor)

    def make_update(self, rate: float, samples: int) -> None:
        """An update. rate: what the learning rate is multiplied by;  samples: that are in it.
        Raises StepFailed.
        """
        under_way = self.updates
        try:
            self._run_update(rate, samples)
        except Exception as error:
            # a server's rank makes no steps of its own
            raise StepFailed.wrap_error(error, under_way) from error

    def _run_update(self, rate: float, samples: int) -> None:
        for place, gradient, there in zip(
            self.local_parameters, self.local_gradients, self.gradient_flags, strict=True
        ):
            place.grad = gradient if there else None
        with self._scale_rate(rate):
            self.draw_alike("update", self.updates, lambda: step_with_fast_kernels(self.optimizer))
        self.buffers |= self.changed_buffers
        self.changed_buffers = {}
        before = self.samples // self.full_batch if self.strategy.uses_work_queue else self.updates
        self.updates = self.updates + 1
        self.samples = self.samples + samples
        after = self.samples // self.full_batch if self.strategy.uses_work_queue else self.updates
        for step in range(before, after) if self.scheduler is not None else ():
            self.draw_alike("schedule", step, self.scheduler.step)

    @contextmanager
    def _scale_rate(self, rate: float) -> Iterator[None]:
        before = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups if rate != 1 else ():
            group["lr"] = group["lr"] * rate
        yield
        for group, lr in zip(self.optimizer.param_groups, before, strict=True):
            group["lr"] = lr

    def summarize_counts(self) -> dict[str, Any]:
        """What the record is to say of it."""
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
        """The optimizer's: as JSON [stretch, what, number] or [stretch, what, type, shape], and
        the bytes in their order. Raises TypeError for what is neither, or is no parameter's.
        """
        if own := list_unsaved_state(self.optimizer, self.initial_attributes):
            raise TypeError(
                f"{type(self.optimizer).__name__} keeps {', '.join(own)} beside the states of its "
                f"parameters"
            )
        said: list[list[Any]] = []
        parts: list[Tensor] = []
        for number, place in enumerate(self.local_parameters):
            for what, value in self.optimizer.state.get(place, {}).items():
                if isinstance(value, Tensor):
                    said.append(
                        [number, what, str(value.dtype).removeprefix("torch."), list(value.shape)]
                    )
                    parts.append(value.detach().reshape(-1).contiguous().view(torch.uint8))
                else:
                    said.append([number, what, value])
        return json.dumps(said), torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    # ---- started again -----------------------------------------------------------------------
    def export_counts(self) -> dict[str, Any]:
        """Where it stands, for a snapshot."""
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
        }

    def restore_counts(self, counts: dict[str, Any]) -> None:
        """Stand where a snapshot says."""
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

    def lose_ticket(self, ticket: int, samples: int) -> None:
        """A ticket that was applied, and whose update is gone."""
        if ticket not in self.applied_tickets:
            self.applied_tickets.add_ticket(ticket)
            self.lost_counts = {
                "updates": self.lost_counts["updates"] + 1,
                "samples": self.lost_counts["samples"] + samples,
            }
