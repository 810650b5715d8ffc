"""The first step, compared with one worker's before anything is updated.

Before exchange or cut is wired, rank 0 runs the whole global batch as one worker would, on the model itself, and rank 1 the
*rounding twin* (the samples in reverse order) at the same time; everything is put back. When the strategy's own first step has
its gradients, and before its update, every rank compares what it holds with the one worker's: loss, weight, gradients, buffers.

What is rounding is measured, not assumed. With d the difference from serial and t the twin's, pooled over a kind's tensors:

    d at most 8 eps of the kind's largest, or at most 1.5 t:    equal
    otherwise, against a reference one precision higher:        a miss where the strategy's error is more than 4 times the
                                                                larger of serial's and the twin's

(1.5 t never exceeds three times the larger of the two errors, so the first line implies the second.) A twin of another rank is
believed while it shows rounding and not a fault of that rank; otherwise, and for the second line, rank 0 runs one of its own.
Where there is no higher precision, or the model cannot run in it, further twins stand in: a miss is more than 4 times the
largest difference among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paragrad.additive import Part
from paragrad.datasets.loading import in_type
from paragrad.draws import Draws, keyed
from paragrad.loss import Loss, Summed
from paragrad.precision import in_precision
from paragrad.world import World

FLOOR = 8               # eps of the kind's largest: equal
BELIEVED = 1000         # eps up to which another rank's twin is believed
TWINS = 3               # orders of the samples, where there is no reference


@dataclass
class Made:
    """What a step made before its update: the mean loss, its weight, mean gradients, buffers. changed: which buffers it did."""
    loss: float
    weight: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    changed: frozenset[str] = frozenset()


def made_alone(module: Summed, parts: list[Part], draws: Draws, seed: int, step: int, loss_alone: bool = False) -> Made:
    """What one worker makes of a batch: one part, or the micro-batches that batch norm sees. Gradients and buffers stay so.

    The positions of a part are its samples' places in the global batch, by which its draws are keyed.
    """
    before = {name: buffer.detach().clone() for name, buffer in module.model.named_buffers()}
    for parameter in module.model.parameters():
        parameter.grad = None
    loss, weight = 0.0, 0.0
    for part in parts:
        with keyed(draws, seed, step, part.positions):
            total, more = module(*part.copied(), len(part.positions))
            if not loss_alone:
                total.backward()
        loss, weight = loss + float(total.detach()), weight + more
    if loss_alone:
        return Made(loss / (weight or 1.0), weight, {}, {})
    gradients = {name: parameter.grad for name, parameter in module.model.named_parameters()}
    for gradient in gradients.values():
        if gradient is not None:
            gradient.div_(weight or 1.0)
    buffers = {name: buffer.detach().clone() for name, buffer in module.model.named_buffers()}
    changed = frozenset(name for name, buffer in buffers.items()
                        if name not in before or buffer.shape != before[name].shape or not torch.equal(buffer, before[name]))
    return Made(loss / (weight or 1.0), weight, gradients, buffers, changed)


def precise(model: nn.Module, module: Summed, parts: list[Part], draws: Draws, seed: int, step: int, loss: Loss,
            loss_alone: bool = False) -> Made:
    """The same in float64, by a copy of the model and the loss. Raises what they raise there."""
    twin = Summed(in_precision(model, torch.float64), loss)
    twin.traced = module.traced
    return made_alone(twin, [part.to(torch.float64) for part in parts], draws, seed, step, loss_alone)


# ---- differences -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gap:
    """How far a kind of values is from others: the largest difference, where, and the largest value of the kind."""
    value: float = 0.0
    tensor: str | None = None
    largest: float = 0.0


KINDS = ("loss", "weight", "gradient", "buffer")


def gaps(ours: Made, theirs: Made) -> dict[str, Gap]:
    """By kind, the largest difference from what another made. A buffer that nobody changed must be the same to the bit."""
    still = _still(ours, theirs)
    moved = {name: theirs.buffers[name] for name in theirs.changed if _real(theirs.buffers[name])}
    return {"loss": Gap(abs(ours.loss - theirs.loss), "loss", abs(theirs.loss)),
            "weight": Gap(abs(ours.weight - theirs.weight), "weight", abs(theirs.weight)),
            "gradient": _largest(ours.gradients, theirs.gradients),
            "buffer": Gap(math.inf, still, 0.0) if still else _largest({name: ours.buffers.get(name) for name in moved}, moved)}


def _still(ours: Made, theirs: Made) -> str | None:
    for name, buffer in theirs.buffers.items():
        exact = name not in theirs.changed or not _real(buffer)
        mine = ours.buffers.get(name)
        if exact and (mine is None or mine.shape != buffer.shape or not _same(mine, buffer)):
            return name
    return None


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.is_floating_point():
        return torch.equal(ours.nan_to_num(nan=0.5), theirs.to(ours.dtype).nan_to_num(nan=0.5))
    return torch.equal(ours, theirs)


def _largest(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> Gap:
    worst = Gap(largest=max((_most(tensor) for tensor in theirs.values() if tensor is not None), default=0.0))
    for name, reference in theirs.items():
        value = _apart(ours.get(name), reference)
        if value > worst.value:
            worst = Gap(value, name, worst.largest)
    return worst


def _apart(ours: Tensor | None, reference: Tensor | None) -> float:
    if ours is None or reference is None:
        return 0.0 if ours is reference else math.inf
    if ours.shape != reference.shape:
        return math.inf
    wide = torch.promote_types(ours.dtype, reference.dtype)
    ours, reference = ours.detach().to(wide), reference.detach().to(wide)
    same = torch.equal(torch.isfinite(reference), torch.isfinite(ours))
    return _most(ours - reference) if same else math.inf


def _most(tensor: Tensor) -> float:
    """The largest of the finite values."""
    sizes = tensor.detach().abs()
    value = float(sizes.max()) if tensor.numel() else 0.0
    return value if math.isfinite(value) else float(torch.where(torch.isfinite(sizes), sizes, 0).max())


# ---- the proof ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Miss:
    """A kind that is not one worker's: the tensor, the difference, and the largest that rounding explains."""
    kind: str
    rank: int
    gap: Gap
    rounding: float


@dataclass
class Proof:
    """What one worker made, on every rank, and on rank 1 its twin; `missed` compares. Collective.

    again: on rank 0, what one worker makes of the batch in one of several orders;  reference: there, in float64.
    """
    world: World
    serial: Made
    twin: Made | None
    again: Callable[[int], Made] | None
    reference: Callable[[], Made] | None
    eps: float
    loss_alone: bool = False

    def missed(self, ours: Made) -> list[Miss]:
        """The kinds that are not one worker's; on every rank."""
        mine, twin = gaps(ours, self.serial), None if self.twin is None else gaps(self.twin, self.serial)
        rounding = {kind: twin[kind].value if twin and self.believed(twin[kind]) else 0.0 for kind in KINDS}
        told = torch.tensor([[mine[kind].value, rounding[kind]] for kind in KINDS], dtype=torch.float64)
        worst = self.world.all_reduced(told.nan_to_num(nan=math.inf), "MAX").tolist()
        doubtful = [kind for kind, (value, twins) in zip(KINDS, worst, strict=True)
                    if value > max(self.floor(mine[kind]), 1.5 * twins)]
        return self._judged(ours, doubtful) if doubtful else []

    def floor(self, gap: Gap) -> float:
        return FLOOR * self.eps * gap.largest

    def believed(self, twin: Gap) -> bool:
        return twin.value <= BELIEVED * self.eps * twin.largest

    def _judged(self, ours: Made, doubtful: list[str]) -> list[Miss]:
        """Against a reference one precision higher, or more twins, all on rank 0."""
        better: Made | None = None
        if self.reference and self.world.rank == 0 and self.eps > torch.finfo(torch.float64).eps:
            try:
                better = self.reference()
            except Exception:               # it cannot run in float64
                better = None
        better, _ = spread(self.world, better, self.serial, torch.float64)
        told = self.world.collected(gaps(ours, better or self.serial))
        misses = []
        if self.world.rank == 0:
            assert self.again is not None
            if better is not None:
                rounding = [gaps(self.serial, better), gaps(self.again(0), better)]
            else:
                rounding = [gaps(self.again(number), self.serial) for number in range(TWINS)]
            for kind in doubtful:
                bound = max(each[kind].value for each in rounding)
                rank, gap = max(((rank, each[kind]) for rank, each in enumerate(told)), key=lambda pair: pair[1].value)
                if gap.value > max(4 * bound, self.floor(gap)):
                    misses.append(Miss(kind, rank, gap, bound))
        return self.world.agreed(misses)        # type: ignore[no-any-return]


def spread(world: World, made: Made | None, like: Made, dtype: torch.dtype | None = None,
           because: str | None = None) -> tuple[Made | None, str | None]:
    """What rank 0 made, on every rank, in one message; or None, and why. like: of its names and shapes;  dtype: of its real
    numbers."""
    if world.size == 1:
        return made, because
    names, shapes = [*like.gradients, *like.buffers], [*like.gradients.values(), *like.buffers.values()]
    here = [*made.gradients.values(), *made.buffers.values()] if made else [None] * len(names)
    changed = made.changed if made else ()
    told = torch.tensor([made is not None, made.loss if made else 0.0, made.weight if made else 0.0,
                         *(each is not None for each in here), *(name in changed for name in names)], dtype=torch.float64)
    places = [torch.zeros(0) if each is None else torch.zeros(each.shape, dtype=in_type(each, dtype), device=each.device)
              for each in shapes]
    flat = torch.cat([_bytes(each, world.device) for each in (
        told, *(place if each is None else each for place, each in zip(places, here, strict=True)))])
    world.copy_from_first(flat)
    told, *found = (part.clone().view(each.dtype).view(each.shape) for part, each in zip(
        flat.split([each.numel() * each.element_size() for each in (told, *places)]), (told, *places), strict=True))
    there, loss, weight, *flags = told.tolist()
    if not there:
        return None, world.agreed(because)
    values = {name: value if present else None for name, value, present in zip(names, found, flags, strict=False)}
    changed = frozenset(name for name, moved in zip(names, flags[len(names):], strict=True) if moved)
    return Made(loss, weight, {name: values[name] for name in like.gradients},
                {name: values[name] for name in like.buffers}, changed), None           # type: ignore[misc]


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
