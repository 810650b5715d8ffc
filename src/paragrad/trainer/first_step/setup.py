"""Before the first step: the model is looked at, one worker's first step is made beside, then
the exchange is wired.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paragrad.datasets.loading import brought, copied
from paragrad.engine.exchange import CARRIED, SHARED, Exchange, Replica
from paragrad.engine.layout import Layout
from paragrad.engine.state.preserve_state import Before, untouched
from paragrad.errors import StepFailed
from paragrad.jobs.loss import Summed, loss_in
from paragrad.jobs.precision import in_precision
from paragrad.parallel.registry import cuts, exchange_of, passes_of
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import Strategy, factors_of
from paragrad.trainer.batch import Batch
from paragrad.trainer.first_step.diagnosis import by_layout, not_the_same
from paragrad.trainer.first_step.inspect_model import (
    all_given_as_loaded,
    given_as_loaded,
    looked_at,
    run_once,
    seen_at_the_door,
)
from paragrad.trainer.first_step.reference_step import fetched, fewer, proof, refuse_copies, tested
from paragrad.trainer.first_step.step_check import Miss, Proof
from paragrad.trainer.first_step.step_result import Made
from paragrad.trainer.model_partition import Holding, divided
from paragrad.trainer.parameter_access import IN_ANY_ORDER, refuse_unlike_copies

if TYPE_CHECKING:
    from paragrad.trainer.trainer import Trainer

# in the store of a world with servers: how often the workers let that rank go
DISMISSED = "paragrad: dismissed {}"
WHERE_CUT = "the model is cut: no rank holds all of it any more"
WHERE_SHARDED = "the parameters are sharded: no rank can run the model alone any more"


def before(trainer: Trainer, batch: Batch, inputs: Any, target: Any) -> None:
    """Look at the model and wire up; make one worker's step beside, where this one has to show
    that it is the same.

    That is the first one, and of steps 2, 4, 8, ... the loss: rare targets that do not count,
    longer padding, a term that grows come late. Collective.
    """
    if trainer.exchange is not None:
        if trainer.given is not None:
            trainer.given.followed(trainer.model, trainer.passes)
        if trainer.layout.cut and not trainer.unchecked and (trainer.taken + 1).bit_count() == 1:
            refuse_unlike_copies(trainer.layout, trainer.parameters, trainer.model)
        if trainer.splits and trainer.taken == 1 and apart(trainer):
            trainer.log.choice("loss again", "not checked", apart(trainer))
        # the 2nd, 4th, 8th, ...
        elif trainer.splits and not apart(trainer) and (trainer.taken + 1).bit_count() == 1:
            _prepare(
                trainer,
                batch,
                inputs,
                target,
                all_given_as_loaded(trainer, inputs, target),
                loss_alone=True,
            )
        return
    seen = seen_at_the_door(trainer)
    found, as_loaded = (seen, True) if seen else looked_at(trainer, batch, inputs, target)
    trainer.draws = found.draws
    trainer.module.traced = found.known
    trainer.coarsest = found.coarsest
    trainer.module.linear = found.linear
    trainer.activations = found.activations * max(1, len(batch.micros[0].positions))
    if found.draws.by_layout and (trainer.splits or trainer.unchecked):
        trainer.log.choice("random", "by layout", found.draws.by_layout)
        if trainer.splits and trainer.strategy.lays_out:
            raise StepFailed(by_layout(found.draws.by_layout))
    forward = functools.partial(run_once, trainer, batch, inputs, target)
    wiring = functools.partial(
        wire, trainer, found.some_unused, next(batch.parts(inputs, target))[1], forward
    )
    if trainer.splits:
        _prepare(trainer, batch, inputs, target, as_loaded, wiring=wiring)
        return
    if trainer.unchecked:
        trainer.log.choice("first step", "not checked", "asked for")
    wiring()
    vacate_given(trainer)


def apart(trainer: Trainer) -> str:
    """Why no rank can run the whole model, from here on; or nothing."""
    sharded = trainer.exchange is not None and trainer.exchange.shards is not None
    return WHERE_CUT if trainer.layout.cut else WHERE_SHARDED if sharded else ""


def _prepare(
    trainer: Trainer,
    batch: Batch,
    inputs: Any,
    target: Any,
    as_loaded: bool,
    loss_alone: bool = False,
    wiring: Callable[[], Any] | None = None,
) -> None:
    """One worker's step beside, then the exchange; where that is to be compared at once and not
    in the step itself, compare.
    """
    proved = (batch, inputs, target)
    of = "this step"
    module = trainer.module
    trainer.proof, because = proof(trainer, *proved, as_loaded, loss_alone)
    if trainer.proof is None and as_loaded and (few := fewer(trainer, batch)):
        proved = few, *fetched(trainer, few, few.places)
        trainer.proof, because = proof(trainer, *proved, as_loaded, loss_alone)
        of = f"its first {len(few.indices)} samples, for which there is room on one rank,"
    if wiring:
        wiring()
    trainer.kept = Before(
        trainer.module,
        trainer.proof.serial.moved if trainer.proof and not trainer.layout.cut else (),
    )
    if trainer.proof is None:
        vacate_given(trainer)
        trainer.log.choice("loss again" if loss_alone else "first step", "not checked", because)
        if trainer.log.recorder is None:  # a loop of one's own
            warnings.warn(
                f"step {trainer.steps} is not compared with one worker's: {because}", stacklevel=2
            )
        return
    of_one = trainer.proof.serial.tested
    if isinstance(of_one, float) and trainer.proof.test:
        trainer.proof.tested = tested(trainer, trainer.proof.test, of_one)
    elif of_one:
        trainer.log.choice("test", "not compared", str(of_one))
    # which have no step to make again
    if trainer.precision != torch.float64 and not trainer.strategy.servers:
        loaded = given_as_loaded(trainer, *proved[1:])
        trainer.proof.double = functools.partial(
            _in_double, trainer, module, trainer.kept, proved[0], copied(proved[1:]), loaded
        )
    if trainer.autocast is not None or proved[0] is not batch:
        rehearse(trainer, *proved, of)


def _in_double(
    trainer: Trainer, module: Summed, kept: Before, batch: Batch, given: Any, loaded: bool
) -> list[Miss] | None:
    """The misses of the same step in float64, by the strategy's own code on a copy of the whole
    module; None where that cannot be. given: (inputs, target) as they were before the step;
    loaded: they are what `batches` gave. Collective.
    """
    twin: Trainer | None = None
    if cuts(trainer.strategy):
        refuse_copies(trainer.world, module)
    try:
        with untouched(module):
            # parameters that ranks share are as they are, on all of them
            trainer.world.barrier()
            if not trainer.layout.cut:  # a part is not what is run again
                kept.put_back()
            model = in_precision(copy.deepcopy(module.model), torch.float64)
            model.zero_grad()
            twin = type(trainer)(
                trainer.world,
                model,
                loss_in(module.loss, trainer.world.device, torch.float64),
                torch.optim.SGD(model.parameters(), lr=0.0),
                trainer.strategy,
                seed=trainer.seed,
                collate=trainer.collate,
                dtype=torch.float64,
                how=trainer.how,
                examined=True,
                tests=trainer.tests,
            )
            # cut alike
            twin.steps = trainer.steps
            twin.looks = trainer.looks
            twin.division = trainer.division
            pair = brought(given, trainer.world.device, torch.float64)
            twin.feed.samples = trainer.feed.samples
            twin.feed.fetched = pair if loaded else None
            before(twin, batch, *pair)
            return compared(twin, *_averaged(twin, batch, *pair)) if twin.proof else None
    except Exception:
        return None
    finally:
        if twin is not None:
            twin.close()


def wire(
    trainer: Trainer, some_unused: bool, example: Any, forward: Callable[[], Any] | None = None
) -> Exchange:
    """Cut the model, where the trainer's strategy does; make its exchange, and its passes.
    Collective.
    """
    check_alike(trainer.world, trainer.strategy)
    if cuts(trainer.strategy):
        with trainer.batch_norm.looking():
            part = divided(
                trainer.strategy,
                trainer.module,
                trainer.optimizer,
                trainer.draws,
                trainer.world,
                example,
                # and whoever may ask one worker again has the whole model too
                trainer.looks,
                whole_too=trainer.proof is not None or trainer.given is not None,
            )
        trainer.hold(part)
        skips = part.draws.serial is not None or any(
            each.skips for each in factors_of(trainer.strategy)
        )
        if trainer.batch_norm.inside and skips:
            raise StepFailed(
                "the model has batch norms inside of samples or weights, which are known by the "
                "number of their "
                "call, and in parts calls have others; write them as instance_norm, or train it "
                "with data(n)"
            )
        for choice in part.chose if trainer.world.rank == 0 else ():
            trainer.log.choice(*choice)
    replica = Replica(
        trainer.module,
        trainer.optimizer,
        trainer.clip_norm,
        some_unused,
        trainer.layout,
        forward,
        trainer.proof is not None,
        trainer.steps,
        trainer.layout.parted(trainer.restored),
        trainer.scheduler,
        trainer.alike,
        trainer.batch_size or 1,
        trainer.seen.follows if trainer.seen else (),
        trainer.seed,
    )
    among = trainer.everyone if trainer.strategy.servers else trainer.world
    made = exchange_of(trainer.strategy, replica, among, trainer.log, trainer.how)
    trainer.exchange = made
    if (shards := made.shards) is not None:
        trainer.hold(
            Holding(made.summed, trainer.layout, made.hollow, trainer.draws, (), trainer.groups)
        )
        trainer.held = shards
        trainer.parameters = dict(made.parts)
        trainer.everything = made.every
    trainer.passes = passes_of(trainer.strategy, trainer, made)
    return made


def vacate_given(trainer: Trainer) -> None:
    """The user's own model, which is cut, has no values from here on."""
    if trainer.layout.cut and trainer.given is not None:
        trainer.given.vacate()


def serve(trainer: Trainer) -> None:
    """Of a server: until the workers dismiss it. Collective with their first step."""
    try:
        exchange = wire(trainer, False, None)
        exchange.serve()
        if trainer.everyone.store.add(DISMISSED.format(trainer.everyone.rank), -1) < 0:
            raise StepFailed(
                f"serve() of {type(exchange).__name__} returned before the workers dismissed it; "
                f"let it serve "
                "until dismiss() tells it to end"
            )
    except Exception as error:
        raise trainer.failed(error) from error


def dismiss(trainer: Trainer) -> None:
    """Of a worker, at the end of a run: let the servers go, which wait for a first step where
    there was none. Collective.
    """
    if trainer.strategy.servers:
        if trainer.world.rank == 0:
            for rank in range(trainer.world.size, trainer.everyone.size):
                trainer.everyone.store.add(DISMISSED.format(rank), 1)
        trainer.world.barrier()
        (trainer.exchange or wire(trainer, False, None)).dismiss()


def check_alike(world: World, strategy: Strategy) -> None:
    """All ranks have the same schedules: a program is a function of (rank, size) alone, and is
    asked for in every process. Collective. Raises StepFailed.
    """
    for plan in strategy.plans():
        # programs, where there are many
        some = range(0, plan.size, max(1, plan.size // 32))
        text = repr([list(plan.schedule.program(rank, plan.size)) for rank in some])
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8
        ).long()
        for rank, theirs in enumerate(world.gathered(digest)):
            if not torch.equal(theirs, digest):
                raise StepFailed(
                    f"{plan.schedule} has another program on rank {rank} than on rank "
                    f"{world.rank}: it is to be a "
                    "function of (rank, size) alone, not of the process, its environment or chance"
                )


def rehearse(trainer: Trainer, batch: Batch, inputs: Any, target: Any, of: str) -> None:
    """The first step, or one of fewer samples, without an update, and without autocast, in
    which a reversed batch hardly differs and a right split does.
    """
    trainer.rehearsing, spans = True, list(trainer.log.spans)
    try:
        with untouched(trainer.module):
            loss, weight = _averaged(trainer, batch, inputs, target)
            if weight:  # otherwise the step itself says so
                prove(trainer, loss, weight, of)
    finally:
        trainer.rehearsing, trainer.log.spans[:] = False, spans


def _averaged(trainer: Trainer, batch: Batch, inputs: Any, target: Any) -> tuple[float, float]:
    """(mean loss, weight) of a step that is made up to its update."""
    assert trainer.exchange is not None
    # which a model may change in place
    own = trainer.gradients_of(batch, *copied((inputs, target)))
    own, (weight, loss, _, doubt) = trainer.counted(own)
    weight = certain(trainer, batch, inputs, target, weight, doubt)
    if not weight:
        return 0.0, 0.0
    trainer.exchange.average(weight * own.scale)
    return loss / weight, weight


def certain(
    trainer: Trainer, batch: Batch, inputs: Any, target: Any, weight: float, doubt: float
) -> float:
    """The global weight, where some shares' may be that of nothing: their loss is exactly 0,
    and one worker's weight says whether they count. Collective.
    """
    # of one share nothing else is known apart
    if not doubt or not trainer.splits or trainer.division == Division():
        return weight
    found = trainer.proof
    because = apart(trainer)
    if found is None and not because:
        as_loaded = all_given_as_loaded(trainer, inputs, target)
        found, because = proof(trainer, batch, inputs, target, as_loaded, loss_alone=True)
    if found is not None:
        if weight == doubt:  # nothing counts on any rank
            return found.serial.weight
        for counted in (weight, weight - doubt):
            if abs(counted - found.serial.weight) <= 1e-6 * max(1.0, weight):
                return counted
    raise StepFailed(
        "a share's loss is exactly 0, and whether it counts cannot be seen"
        + (f" ({because})" if because else "")
        + "; return the pair (sum, weight)",
        tensor="loss",
    )


def prove(trainer: Trainer, loss: float, weight: float, of: str = "this step") -> None:
    """Compare; raises StepFailed before the update where the step is not one worker's.
    Collective.
    """
    assert trainer.proof is not None
    proof = trainer.proof
    misses = compared(trainer, loss, weight)
    vacate_given(trainer)
    if misses:
        raise StepFailed(not_the_same(trainer, misses), tensor=misses[0].gap.tensor, differs=True)
    if proof.alone and trainer.world.rank:  # rank 0 has seen it
        return
    made = proof.serial
    what = (
        "the loss"
        if proof.loss_alone
        else f"loss, weight, {len(made.gradients)} gradients, {len(made.buffers)} buffers"
    )
    what += f" of {of} " + ("is" if proof.loss_alone else "are")
    zero = [
        name
        for name, each in made.gradients.items()
        if each is not None and not each.count_nonzero()
    ]
    what += " one worker's" + (
        f", and so is the loss of {len(proof.test.positions)} samples in a test"
        if proof.test
        else ""
    )
    what += (
        f"; {len(zero)} gradient(s) were zero, which shows little of them: "
        f"{', '.join(zero[:3])}{', ...' if len(zero) > 3 else ''}"
        if zero
        else ""
    )
    trainer.log.event("checked", what, step=trainer.steps)


def compared(trainer: Trainer, loss: float, weight: float) -> list[Miss]:
    """What of the step, before its update, is not one worker's. Collective."""
    proof, trainer.proof = trainer.proof, None
    kept, trainer.kept = trainer.kept, None
    assert proof is not None
    assert kept is not None
    assert trainer.exchange is not None
    if proof.loss_alone:
        return proof.missed(Made(loss, weight, {}, {}), trainer.module.dtype)
    if proof.serial.moved and (trainer.exchange.sharing > 1 or trainer.exchange.shards is not None):
        raise StepFailed(SHARED, tensor=", ".join(list(proof.serial.moved)[:3]))
    moved, state = kept.changed()
    gradients = trainer.exchange.averaged()
    buffers = {name: buffer.detach() for name, buffer in trainer.model.named_buffers()}
    if trainer.layout.cut:  # names of a part are not those of the whole
        return _compared_in_parts(trainer, proof, loss, weight, gradients, buffers)
    if trainer.held.cut:  # parameters alone are divided
        _refuse_unequal(trainer.held, gradients, trainer.held.world)
        gradients = trainer.held.whole(gradients)
    return proof.missed(
        Made(loss, weight, gradients, buffers, frozenset(), moved, state), trainer.module.dtype
    )


def _compared_in_parts(
    trainer: Trainer,
    proof: Proof,
    loss: float,
    weight: float,
    gradients: dict[str, Tensor | None],
    buffers: dict[str, Tensor],
) -> list[Miss]:
    """The first replica is put together on rank 0, where one worker's step is; the other ones
    are its copies. Collective.
    """
    if carried := [*proof.serial.moved, *proof.serial.state]:
        raise StepFailed(CARRIED, tensor=", ".join(carried[:3]))
    layout = trainer.layout
    parts = {**gradients, **buffers}
    first = not trainer.replicated.rank
    _refuse_unequal(layout, parts, layout.world)
    whole: Any = [
        layout.whole(each, everywhere=False) if first else {} for each in (gradients, buffers)
    ]
    made = Made(loss, weight, whole[0], whole[1], tested=proof.tested)
    misses = proof.missed(made, trainer.module.dtype)
    if not misses and trainer.replicated.size > 1:
        _refuse_unequal(layout, parts, trainer.world)
    return misses


def _refuse_unequal(layout: Layout, parts: dict[str, Tensor | None], world: World) -> None:
    """Copies of one tensor are the same to the bit. Collective."""
    if unequal := layout.unequal(parts, world):
        raise StepFailed(
            "before the first update ranks {} and {} hold copies of it with other gradients, or "
            "another buffer; "
            "nothing was updated. A forward changes it on one of them alone, or reads it by a way "
            "that is not "
            "seen: train it with data(n) and nothing else, or cut parts elsewhere. {}".format(
                *unequal[:2], IN_ANY_ORDER
            ),
            tensor=unequal[2],
            differs=True,
        )
