"""The first step, compared with one worker's before anything is updated.

Before exchange or cut is wired, rank 0 runs the whole global batch as one worker would, on the
model itself, and rank 1 the *rounding twin* (the samples in reverse order) at the same time;
everything is put back. When the strategy's own first step has its gradients, and before its
update, every rank compares what it holds with the one worker's: loss, weight, gradients,
buffers. Where the model is cut, so is the loss of some samples in a test (eval mode), in which
modules may take other ways than in training.

What is rounding is measured, not assumed. With d the difference from serial and t the twin's,
over the tensors of a module:

    d at most 8 eps of their largest, or at most 1.5 t:         equal otherwise, against a
    reference one precision higher:        doubtful where the strategy's error is more than 4
    times the
                                                                larger of serial's and the
                                                                twin's
    doubtful:                                                   the strategy makes the step once
    more one precision higher, and
                                                                that is compared

(1.5 t never exceeds three times the larger of the two errors, so the first line implies the
second. The third one is there because one twin may have luck: in a deep model a rectifier that
flips is a hundred times all other rounding.) A twin is believed while it shows rounding, and
not a fault of its rank or samples that are mixed. Where there is no higher precision, or the
model cannot run in it, further twins stand in, pooled over all tensors of a kind: other orders
of the samples, and parameters moved by one unit in the last place; a miss is more than 4 times
the largest difference among them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import in_type
from paragrad.engine.loss_additivity import Excerpt
from paragrad.engine.probe import evaluating
from paragrad.engine.rng.draws import Draws, keyed
from paragrad.engine.state.preserve_state import Before, restored
from paragrad.errors import told
from paragrad.jobs.loss import Loss, Summed
from paragrad.jobs.precision import in_precision
from paragrad.runtime.generators import generators_kept
from paragrad.runtime.world import World
from paragrad.trainer.evaluation import alone, scored
from paragrad.trainer.first_step.step_result import Gap, Key, Made, gaps, pooled

Order = Callable[[list[int]], list[int]]
# of the samples of a group: the twin's, and others where there is no reference
ORDERS: tuple[Order, ...] = (
    lambda group: group[::-1],
    lambda group: group[len(group) // 2 :] + group[: len(group) // 2],
    lambda group: group[::2] + group[1::2],
)


def made_alone(
    module: Summed,
    parts: list[Excerpt],
    draws: Draws,
    seed: int,
    step: int,
    loss_alone: bool = False,
    test: Excerpt | str = "",
) -> Made:
    """What one worker makes of a batch: one part, or the micro-batches that batch norm sees.
    Gradients and buffers stay so.

    The positions of a part are its samples' places in the global batch, by which its draws are
    keyed.  test: what is tested before; or why nothing is.
    """
    tested = test if isinstance(test, str) else _tested(module, test)
    buffers_before = {
        name: buffer.detach().clone() for name, buffer in module.model.named_buffers()
    }
    before = Before(module, buffers=True)
    for parameter in module.model.parameters():
        parameter.grad = None
    loss, weight = _summed(module, parts, draws, seed, step, backward=not loss_alone)
    if loss_alone:
        return Made(loss / (weight or 1.0), weight, {}, {})
    gradients = {name: parameter.grad for name, parameter in module.model.named_parameters()}
    if module.linear or len(parts) > 1:
        for gradient in gradients.values():
            if gradient is not None:
                gradient.div_(weight or 1.0)
    # not a cache that grew
    buffers = {
        name: buffer.detach().clone()
        for name, buffer in module.model.named_buffers()
        if name in buffers_before and buffer.shape == buffers_before[name].shape
    }
    changed = frozenset(
        name for name, buffer in buffers.items() if not torch.equal(buffer, buffers_before[name])
    )
    moved, state = before.changed()
    for put_back in before.buffers if state else ():  # by which the loss would be another
        put_back()
    if state and _summed(module, parts, draws, seed, step, backward=False) == (loss, weight):
        # written, and not read: the last attention, the size of a batch
        state = {}
    return Made(loss / (weight or 1.0), weight, gradients, buffers, changed, moved, state, tested)


def _tested(module: Summed, part: Excerpt) -> float | str:
    """The mean loss in a test; or why there is none to compare with. What draws is another one
    when it is made again.
    """
    found = list[float]()
    try:
        with (
            generators_kept(),
            torch.random.fork_rng(enabled=torch.cuda.is_available()),
            evaluating(module.model),
        ):
            for _ in range(2):
                with restored(module):
                    total, weight = scored(
                        module,
                        alone(module),
                        None,
                        [part.copied()],
                        [part.positions],
                        module.by_graph,
                    )
                found.append(total / weight if weight else math.nan)
    except Exception as error:
        return f"one worker's raised {told(error)}"
    if not math.isfinite(found[0]):
        return "no sample counts in it, or its loss is not finite"
    return found[0] if found[0] == found[1] else "it is another one each time it is made"


def _summed(
    module: Summed, parts: list[Excerpt], draws: Draws, seed: int, step: int, backward: bool
) -> tuple[float, float]:
    """(sum of losses, weight) of all parts."""
    loss = 0.0
    weight = 0.0
    for part in parts:
        with keyed(draws, seed, step, part.positions):
            total, more = module(*part.copied(), len(part.positions))
            if backward:
                # what is not linear in a gradient (a hook that clips) sees that of the mean, as
                # without this library
                total.backward(
                    None
                    if module.linear or len(parts) > 1 or not more
                    else total.new_tensor(1.0 / more)
                )
        loss = loss + float(total.detach())
        weight = weight + more
    return loss, weight


def precise(
    model: nn.Module,
    module: Summed,
    parts: list[Excerpt],
    draws: Draws,
    seed: int,
    step: int,
    loss: Loss,
    loss_alone: bool = False,
    test: Excerpt | str = "",
) -> Made:
    """The same in float64, by a copy of the model and the loss. Raises what they raise
    there.
    """
    twin = module.around(in_precision(model, torch.float64), loss)
    return made_alone(
        twin,
        [part.to(torch.float64) for part in parts],
        draws,
        seed,
        step,
        loss_alone,
        test if isinstance(test, str) else test.to(torch.float64),
    )


# ---- the proof -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Miss:
    """A kind that is not one worker's: the tensor, the difference, and the largest that
    rounding explains.
    """

    kind: str
    rank: int
    gap: Gap
    rounding: float


@dataclass
class Proof:
    """What one worker made, on every rank, and on rank 1 its twin; `missed` compares.
    Collective.

    alone: on rank 0, both of them; the others have its numbers, without tensors; again: on rank
    0, what one worker makes of the batch once more (-1), in one of several orders, or with its
    parameters moved; reference: there, in float64;  eps: of what a model in float64 computes in
    less;  precise: it is in float64;  double: the misses of the strategy's own step in float64,
    on every rank, or None where that cannot be;  test: on every rank, what was tested;  tested:
    its loss under the strategy.
    """

    world: World
    serial: Made
    twin: Made | None
    again: Callable[[int], Made] | None
    reference: Callable[[], Made] | None
    eps: float
    precise: bool
    alone: bool = False
    loss_alone: bool = False
    double: Callable[[], list[Miss] | None] | None = None
    test: Excerpt | None = None
    tested: float | str = ""
    eps_of_loss: float = 0.0

    def missed(self, ours: Made, loss: torch.dtype) -> list[Miss]:
        """The kinds that are not one worker's; on every rank. loss: the loss's type."""
        self.eps_of_loss = max(
            self.eps, torch.finfo(loss).eps, 0.0 if self.precise else torch.finfo(torch.float32).eps
        )
        if self.alone:  # who has no loss does not know its type
            self.eps_of_loss = float(
                self.world.all_reduced(torch.tensor(self.eps_of_loss, dtype=torch.float64), "MAX")
            )
        mine = self._gaps(ours)
        twin = None if self.twin is None else self._gaps(self.twin)
        keys = list(mine)
        rounding = {
            key: twin[key].value if twin and key in twin and twin[key].believed else 0.0
            for key in keys
        }
        told = torch.tensor(
            [[mine[key].value, rounding[key], mine[key].floor] for key in keys], dtype=torch.float64
        )
        told = told.nan_to_num(nan=math.inf)
        worst = told if self.alone else self.world.all_reduced(told, "MAX")
        doubtful = [
            key
            for key, (value, twins, floor) in zip(keys, worst.tolist(), strict=True)
            if value > max(floor, 1.5 * twins)
        ]
        doubtful = self.world.agreed(doubtful) if self.alone else doubtful
        return self._judged(ours, doubtful) if doubtful else []

    def _twins(
        self, numbers: Iterable[int], better: Made | None = None
    ) -> Iterator[dict[Key, Gap]]:
        """Further twins' differences, where they are believed; those of moved parameters mix no
        samples, and always are.
        """
        assert self.again is not None
        for number in numbers:
            # samples that cannot be brought into another order
            with contextlib.suppress(ValueError):
                found = self._gaps(self.again(number), better)
                yield {
                    key: gap for key, gap in found.items() if gap.believed or number == len(ORDERS)
                }

    def _gaps(self, ours: Made, theirs: Made | None = None) -> dict[Key, Gap]:
        found = gaps(ours, theirs or self.serial, self.eps)
        return {
            key: replace(gap, eps=max(gap.eps, self.eps_of_loss))
            if key[0] in ("loss", "weight", "test")
            else gap
            for key, gap in found.items()
        }

    def _unsteady(self) -> Miss | None:
        """One worker's step is another one when it is made once more: then all twins agree with
        everything.
        """
        assert self.again is not None
        unlike = [gap for gap in self._gaps(self.again(-1)).values() if not gap.believed]
        return (
            Miss(
                "repetition", 0, max(unlike, key=lambda gap: gap.value / (gap.largest or 1.0)), 0.0
            )
            if unlike
            else None
        )

    def _judged(self, ours: Made, doubtful: list[Key]) -> list[Miss]:
        """Against a reference one precision higher, or more twins, all on rank 0; then by the
        strategy's own step there.
        """
        better: Made | None = None
        if self.reference and self.world.rank == 0 and not self.precise:
            try:
                better = self.reference()
            except Exception:  # it cannot run in float64
                better = None
            # a test cannot
            if better is not None and type(better.tested) is not type(self.serial.tested):
                better = None
        if self.alone:
            better, _ = in_numbers(self.world, better)
            told = [self._gaps(ours, better)]
        else:
            better, _ = spread(self.world, better, self.serial, torch.float64)
            told = self.world.collected(self._gaps(ours, better))
        misses: list[Miss] = []
        if self.world.rank == 0:
            if unsteady := self._unsteady():
                doubtful = []
                rounding = []
                misses = [unsteady]
            elif better is not None:
                rounding = [self._gaps(self.serial, better), *self._twins([0], better)]
            else:
                rounding = [pooled(each) for each in self._twins(range(len(ORDERS) + 1))]
                doubtful = list(dict.fromkeys((kind, "") for kind, _ in doubtful))
                told = [pooled(each) for each in told]
            for key in doubtful:
                values = [each[key].value for each in rounding if key in each]
                bound = max(filter(math.isfinite, values), default=0.0)
                found = [(rank, each.get(key, Gap())) for rank, each in enumerate(told)]
                rank, gap = max(found, key=lambda pair: pair[1].value)
                if gap.value > max(4 * bound, gap.floor):
                    misses.append(Miss(key[0], rank, gap, bound))
        misses = self.world.agreed(misses)
        in_double = self.double() if misses and better is not None and self.double else None
        return misses if in_double is None else in_double


def spread(
    world: World,
    made: Made | None,
    like: Made,
    dtype: torch.dtype | None = None,
    because: str | None = None,
) -> tuple[Made | None, str | None]:
    """What rank 0 made, on every rank, or None, and why: in one message, and another where a
    forward changes more than buffers.

    like: of its names and shapes;  dtype: of its real numbers.
    """
    if world.size == 1:
        return made, because
    names = [*like.gradients, *like.buffers]
    shapes = [*like.gradients.values(), *like.buffers.values()]
    mine = made or Made(0.0, 0.0, {}, {})
    here = [(mine.gradients | mine.buffers).get(name) for name in names]
    told = torch.tensor(
        [
            made is not None,
            bool(mine.moved or mine.state),
            mine.loss,
            mine.weight,
            *(each is not None for each in here),
            *(name in mine.changed for name in names),
        ],
        dtype=torch.float64,
    )
    places = [
        torch.zeros(0)
        if each is None
        else torch.zeros(each.shape, dtype=in_type(each, dtype), device=each.device)
        for each in shapes
    ]
    flat = torch.cat(
        [
            _bytes(each, world.device)
            for each in (
                told,
                *(
                    place if each is None else each
                    for place, each in zip(places, here, strict=True)
                ),
            )
        ]
    )
    world.copy_from_first(flat)
    told, *found = (
        part.clone().view(each.dtype).view(each.shape)
        for part, each in zip(
            flat.split([each.numel() * each.element_size() for each in (told, *places)]),
            (told, *places),
            strict=True,
        )
    )
    there, more, loss, weight, *flags = told.tolist()
    if not there:
        return None, world.agreed(because)
    values = {
        name: value for name, value, present in zip(names, found, flags, strict=False) if present
    }
    changed = frozenset(
        name for name, moved in zip(names, flags[len(names) :], strict=True) if moved
    )
    moved, state = world.agreed((mine.moved, mine.state)) if more else ({}, {})
    return Made(
        loss,
        weight,
        {name: values.get(name) for name in like.gradients},
        {name: values[name] for name in like.buffers if name in values},
        changed,
        moved,
        state,
    ), None


def in_numbers(
    world: World, made: Made | None, because: str | None = None
) -> tuple[Made | None, str | None]:
    """What rank 0 made, there, and on the other ranks the same without gradients and buffers;
    or None, and why.
    """
    told = world.agreed(
        (
            None if made is None else replace(made, gradients={}, buffers={}, changed=frozenset()),
            because,
        )
    )
    return (told[0] if made is None else made), (told[1] if told[0] is None else None)


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
