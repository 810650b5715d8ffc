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
from paragrad.engine.layout import hand_over
from paragrad.engine.optimizer.modes import set_mode
from paragrad.engine.optimizer.optimizer_state import attributes, without_place
from paragrad.engine.optimizer.update_slices import updated
from paragrad.engine.state.values import wide
from paragrad.errors import StepFailed
from paragrad.parallel.server.compressed_push import parcel_of
from paragrad.parallel.server.parameter_partition import Slot, fill, held
from paragrad.parallel.server.shared_buffer import Shelf
from paragrad.parallel.server.snapshot import Snapshots
from paragrad.strategies.server import Server

# of a share, by slot: which stretches have a gradient, and all of them
Vectors = Mapping[int, tuple[bytes, Tensor]]


class Applied:
    """Tickets that were applied: all below a number, and some above it."""

    def __init__(self) -> None:
        self.below = 0
        self.above = set[int]()

    def __contains__(self, ticket: int) -> bool:
        return ticket < self.below or ticket in self.above

    def add(self, ticket: int) -> None:
        self.above.add(ticket)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1


class Shard:
    """One server's. slots: what it has of `tensors`, the parameters that are trained, which
    have names, and what forwards change;  full: samples of a full batch;  against: why workers
    are not to read the values where they lie, or "".
    """

    def __init__(
        self,
        strategy: Server,
        replica: Replica,
        slots: list[Slot],
        names: list[str],
        tensors: list[Tensor],
        full: int,
        against: str = "",
    ) -> None:
        self.strategy = strategy
        self.slots = slots
        self.full = full
        self.optimizer = replica.optimizer
        self.scheduler = replica.scheduler
        self.alike = replica.alike
        self.began = attributes(self.optimizer)
        self.clip_norm = replica.clip_norm
        self.trained = [slot for slot in slots if not slot.added]  # they come first
        self.parcels = [parcel_of(strategy, slot) for slot in slots]
        self.stretches = [each for slot in self.trained for each in slot.stretches]
        self.held = [held(each, names, tensors) for each in self.stretches]
        self.shelf = Shelf([(slot.dtype, slot.elements) for slot in slots], against)
        self.values = self.shelf.vectors
        for slot, each in zip(slots, self.values, strict=True):
            fill(slot, tensors, each)
        self.gradients = [torch.zeros_like(each) for each in self.values[: len(self.trained)]]
        self.own, self.grads = self._places(self.values), self._places(self.gradients)
        # the optimizer keeps what it has, also hooks that know the model
        if strategy.servers == 1:
            self._take_in(tensors)
        else:
            parts: dict[Tensor, list[Any]] = {}
            for stretch, which, place in zip(self.stretches, self.held, self.own, strict=True):
                parts.setdefault(tensors[stretch.index], []).append((which, place))
            hand_over(self.optimizer, parts)
        set_mode(self.optimizer, "train")
        self.anyone = [False] * len(self.own)  # had a gradient in the last update
        self.samples = replica.steps * full
        self.complete = False  # all of them were added up
        # what forwards changed until now, by name, beside the parameters
        self.beside: dict[str, Tensor] = {}
        # and in this step, which is so once its update is made
        self.changed: dict[str, Tensor] = {}
        # how the last step was made, and of what
        self.last: dict[str, Any] = {"made": [0.0, 0.0], "shares": []}
        self.applied = Applied()
        self.applied.below = replica.steps * strategy.shares
        self.received = 0
        self.sent = 0
        self.begun = replica.steps
        self.updates = self.begun
        self.begun_samples = self.samples
        self.lost = {"updates": 0, "samples": 0}  # by this server, when it died
        self.snapshots: Snapshots | None = None
        self.staleness: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()

    def _places(self, vectors: list[Tensor]) -> list[Tensor]:
        """Of every stretch that in the vectors, in the parameter's shape where it is all of
        one.
        """
        flat = [
            each
            for slot, vector in zip(self.trained, vectors, strict=False)
            for each in slot.views(vector)
        ]
        return [
            each if which.where is not None else each.view(which.shape)
            for each, which in zip(flat, self.held, strict=True)
        ]

    def _take_in(self, parameters: list[Tensor]) -> None:
        """The model's own parameters are the places in the vectors."""
        for number, stretch in enumerate(self.stretches):
            parameters[stretch.index].data = self.own[number]
            self.own[number] = parameters[stretch.index]

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def add_up(self, shares: Sequence[Vectors]) -> float:
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
                square += float(torch.linalg.vector_norm(total, dtype=wide(total.dtype))) ** 2
            anyone += [
                any(found)
                for found in zip(*(marked for marked, _ in (first, *others)), strict=True)
            ]
        # what forwards changed: the mean over the shares
        for number in range(len(self.trained), len(self.slots)):
            vectors = [each[number][1] for each in shares]
            change: Any = sum(
                each if each.is_floating_point() else each.to(torch.int64) for each in vectors
            )
            if self.slots[number].flags:
                self.values[number].add_(change).clamp_(0, 1)
            else:
                self.values[number].add_(
                    torch.div(change, len(shares)).to(self.values[number].dtype)
                )
        self.anyone = anyone
        self.complete = True
        return square

    def at_once(
        self, vectors: Vectors, version: int, samples: int, workers: float = 0, counts: bool = True
    ) -> None:
        """An update by one share, of parameters of that version. workers: that were there;
        counts: something in it does.
        """
        self.add_up([vectors])
        self.complete, late = False, max(0, self.updates - version)
        self.staleness[late] += 1
        if not counts:
            self.samples += samples
            return
        self.make(self.strategy.rate_of(late, workers), samples)

    # ---- updates -----------------------------------------------------------------------------
    def divided(self, divisor: float, factor: float) -> None:
        """The sum of gradients becomes their mean, clipped."""
        for gradient in self.gradients:
            gradient.div_(divisor)
            if factor != 1:
                gradient.mul_(factor)

    def make(self, rate: float, samples: int) -> None:
        """An update. rate: what the learning rate is multiplied by;  samples: that are in it.
        Raises StepFailed.
        """
        under_way = self.updates
        try:
            self._make(rate, samples)
        except Exception as error:
            # a server's rank makes no steps of its own
            raise StepFailed.of(error, under_way) from error

    def _make(self, rate: float, samples: int) -> None:
        for place, gradient, there in zip(self.own, self.grads, self.anyone, strict=True):
            place.grad = gradient if there else None
        with self._slower(rate):
            self.alike("update", self.updates, lambda: updated(self.optimizer))
        self.beside |= self.changed
        self.changed = {}
        before = self.samples // self.full if self.strategy.hands_out else self.updates
        self.updates = self.updates + 1
        self.samples = self.samples + samples
        after = self.samples // self.full if self.strategy.hands_out else self.updates
        for step in range(before, after) if self.scheduler is not None else ():
            self.alike("schedule", step, self.scheduler.step)

    @contextmanager
    def _slower(self, rate: float) -> Iterator[None]:
        before = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups if rate != 1 else ():
            group["lr"] = group["lr"] * rate
        yield
        for group, lr in zip(self.optimizer.param_groups, before, strict=True):
            group["lr"] = lr

    def told(self) -> dict[str, Any]:
        """What the record is to say of it."""
        return {
            "parameters": self.nbytes,
            "received": self.received,
            "sent": self.sent,
            "updates": self.updates - self.begun,
            "samples": self.samples - self.begun_samples,
            "lost": self.lost,
            "staleness": {str(late): count for late, count in sorted(self.staleness.items())},
            "refused": dict(self.refused),
        }

    def state(self) -> tuple[str, Tensor]:
        """The optimizer's: as JSON [stretch, what, number] or [stretch, what, type, shape], and
        the bytes in their order. Raises TypeError for what is neither, or is no parameter's.
        """
        if own := without_place(self.optimizer, self.began):
            raise TypeError(
                f"{type(self.optimizer).__name__} keeps {', '.join(own)} beside the states of its "
                f"parameters"
            )
        said: list[list[Any]] = []
        parts: list[Tensor] = []
        for number, place in enumerate(self.own):
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
    def counts(self) -> dict[str, Any]:
        """Where it stands, for a snapshot."""
        return {
            "updates": self.updates,
            "samples": self.samples,
            "received": self.received,
            "sent": self.sent,
            "beside": self.beside,
            "last": self.last,
            "below": self.applied.below,
            "above": sorted(self.applied.above),
            "lost": self.lost,
            "staleness": {str(late): count for late, count in self.staleness.items()},
            "refused": dict(self.refused),
        }

    def recount(self, told: dict[str, Any]) -> None:
        """Stand where a snapshot says."""
        self.updates = told["updates"]
        self.samples = told["samples"]
        self.received = told["received"]
        self.sent = told["sent"]
        self.lost = told["lost"]
        self.beside = told["beside"]
        self.last = told["last"]
        self.applied.below = told["below"]
        self.applied.above = set(told["above"])
        self.staleness = Counter({int(late): count for late, count in told["staleness"].items()})
        self.refused = Counter(told["refused"])

    def lose(self, ticket: int, samples: int) -> None:
        """A ticket that was applied, and whose update is gone."""
        if ticket not in self.applied:
            self.applied.add(ticket)
            self.lost = {
                "updates": self.lost["updates"] + 1,
                "samples": self.lost["samples"] + samples,
            }
