"""Trainer: one rank's model, and the step that reads like the sentence

    batch -> loss -> gradients -> exchange -> update

`loop.py` drives it for Jobs, `commands/parallelize.py` gives it to people who own their loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.datasets.loading import Collate, Dataset, Samples, refuse_loader, whole_where_needed
from paragrad.datasets.sample_order import Order
from paragrad.engine.batch_norm import BatchNorm
from paragrad.engine.exchange import Exchange, How, counted, unmoved
from paragrad.engine.gradient_noise import GradientNorms
from paragrad.engine.layout import Layout, State, filled
from paragrad.engine.model_shard import Around, over
from paragrad.engine.optimizer.modes import in_eval_mode
from paragrad.engine.optimizer.optimizer_state import attributes
from paragrad.engine.optimizer.update_probe import Alike
from paragrad.engine.passes import COUNTED, Passes, Sums, counting, sums_of
from paragrad.engine.probe import Probe, evaluating
from paragrad.engine.rng.draws import Calls, Draws, as_seen, keyed
from paragrad.engine.state import shared_initialization
from paragrad.engine.state.preserve_state import Before
from paragrad.errors import StepFailed
from paragrad.jobs.fingerprint import described
from paragrad.jobs.job import Job
from paragrad.jobs.loss import Loss, Summed
from paragrad.jobs.precision import coarsest, shared_type
from paragrad.planner.cost_formulas import computed_bytes
from paragrad.record.record import Recorder
from paragrad.record.step_log import Log
from paragrad.runtime import allocator, generators
from paragrad.runtime.stragglers import Watch, failure
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division, Micro
from paragrad.strategies.strategy import Strategy
from paragrad.trainer.batch import Batch, batch_of
from paragrad.trainer.batch_feed import Feed
from paragrad.trainer.checkpoint import trainer_snapshot
from paragrad.trainer.checkpoint.checkpoint_files import newest_of_all
from paragrad.trainer.evaluation import Metric, at_once, evaluated
from paragrad.trainer.first_step.setup import before, certain, prove
from paragrad.trainer.first_step.step_check import Proof
from paragrad.trainer.model_partition import Holding, begun_of, check_given, placed
from paragrad.trainer.pace import Pace, Slowed
from paragrad.trainer.parameter_access import Given
from paragrad.trainer.settings import Settings


@dataclass(frozen=True)
class Result:
    """A step's outcome, the same on every rank: the mean loss of the global batch, and its
    weight (samples or tokens); of replicas that step alone, each one's own. stop: some rank was
    asked to stop.
    """

    loss: float
    weight: float
    stop: bool = False


class Trainer:
    """One rank of a resolved strategy, over a model on the world's device.

    scheduler, clip_norm, collate: as in Job;  autocast: the type that forward and loss are
    computed in, or None;  dtype: what inputs are brought to, otherwise what the model's real
    parameters share;  record: where steps and spans go, or None;  how: exchanges go;  like:
    compute what one worker must to be compared with that strategy (the union of all ranks'
    parts, micro-batch by micro-batch);  reverse: each micro-batch in reverse order (the
    rounding twin);  examined: the loss was looked at, at the door;  otherwise it is before the
    first step;  unchecked: do not compare the first step with one worker's, and go on where
    draws depend on the layout;  seen: what a look at the model showed at the door;  begun: how
    the model came here, where it is cut;  tests: before the first step of one that is cut a
    test is compared;  pace: whether this rank is slowed on purpose;  noise: as in
    GradientNorms.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        *,
        seed: int = 0,
        scheduler: Any = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        collate: Collate | None = None,
        dtype: torch.dtype | None = None,
        record: Recorder | None = None,
        how: How | None = None,
        like: Strategy | None = None,
        reverse: bool = False,
        examined: bool = False,
        unchecked: bool = False,
        seen: Probe | None = None,
        begun: shared_initialization.Start | None = None,
        tests: bool = True,
        pace: Pace | None = None,
        noise: int = 0,
    ) -> None:
        # without steps
        self.everyone = world
        self.world = placed(strategy, world)
        self.serves = strategy.serves(world.rank)
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.began = attributes(optimizer)
        self.seed = seed
        self.scheduler = scheduler
        self.clip_norm = clip_norm
        self.autocast = autocast
        self.collate = collate
        self.log = Log(record)
        self.how = how or How()
        self.reverse = reverse
        self.examined = examined
        self.unchecked = unchecked
        self.seen = seen
        self.tests = tests
        # where the ranks of one have the model in one place
        self.hosts = begun.told(self.log, world) if begun else None
        self.division, self.replicated = (like or strategy).division, self.world.dividing("samples")
        self.replicas = (
            list(range(len(self.division.shares)))
            if like
            else [self.replicated.rank % len(self.division.shares)]
        )
        # of the ranks with one share, the one that records it
        self.leads = self.world.leads("samples")
        self.splits = (
            strategy.exact
            and not like
            and not unchecked
            and (world.size > 1 or self.division.micro > 1)
        )
        self.parameters = dict(model.named_parameters())
        self.precision = coarsest(model)
        # own loops
        self.module = Summed(model, loss)
        self.known_by = {} if examined else {"model": described(model)}
        self.dtype, self.everything = dtype or shared_type(model), list(self.module.parameters())
        # what of the model this rank holds, from the cut on; held: or its shards
        self.layout = Layout()
        self.held = self.layout
        # then, serial names of the parameters in each group of the optimizer
        self.groups: list[list[str]] = []
        # without values once it is cut
        self.hollow = model
        self.given = None if examined else Given(model, optimizer)
        self.exchange: Exchange | None = None
        self.passes: Passes | None = None
        # where techniques cut; what they want around
        self.looks = dict[str, Any]()
        self.around = tuple[Around, ...]()
        self.pace = pace or Pace(Slowed(), seed, world.rank, world.device.type != "cpu")
        self.feed, self.watch = (
            Feed(self.log, world.device, self.dtype),
            Watch(self.world, strategy.promise.replicas_equal),
        )
        # taken: by this trainer;  batch_size: once known
        self.steps = 0
        self.taken = 0
        self.batch_size = 0
        # what exchanges of the strategy that was saved keep beside the optimizer's state
        self.restored: State = {}
        # that backward keeps of a micro-batch: bytes; eps of the coarsest numbers
        self.activations = 0
        self.coarsest = 0.0
        self.draws, self.alike, self.noise = (
            Draws(),
            Alike(seed, world.device),
            GradientNorms(self.everything, noise),
        )
        # of the step under way, that it is one worker's; kept: what it began with
        self.proof: Proof | None = None
        self.kept: Before | None = None
        # cast: the passes were under autocast
        self.rehearsing = False
        self.cast = False
        self.batch_norm = BatchNorm(
            self.replicated, model, self._count_batch_norm, own=strategy.batch_norm == "share"
        )
        # what is drawn from here on differs by rank
        generators.seed_everything(seed + 1 + world.rank)

    @classmethod
    def of_job(
        cls,
        world: World,
        job: Job,
        strategy: Strategy,
        settings: Settings | None = None,
        **more: Any,
    ) -> Trainer:
        """The trainer of a job, whose model every rank builds itself; one that is cut, one rank
        of every host.
        """
        return cls(
            strategy=strategy, **(begun_of(world, job, strategy, settings or Settings()) | more)
        )

    def hold(self, part: Holding) -> None:
        """From here on this rank holds a part of the model."""
        self.module = part.module
        self.hollow = part.hollow
        self.draws = part.draws
        self.groups = part.groups
        self.layout = part.layout
        self.around = part.around
        self.held = part.layout
        self.model = part.module.model
        self.batch_norm.model = self.model
        self.parameters, self.everything = (
            dict(self.model.named_parameters()),
            list(self.module.parameters()),
        )

    def _count_batch_norm(self, payload: int, ranks: int) -> None:
        if self.exchange is not None:
            self.exchange.count(
                "batch_norm", computed_bytes("all_gather", payload, ranks), computed=True
            )

    # ---- batches -----------------------------------------------------------------------------
    def batches(
        self, dataset: Dataset, batch: int, epoch: int, *, start: int = 0, loaders: int = 0
    ) -> Iterator[Any]:
        """This rank's part of every global batch of an epoch, in the exact order: a function of
        (seed, epoch, index).

        batch: the global size;  start: begin with that batch of the epoch;  loaders: processes
        that load ahead. Gives (inputs, target), or the dict where samples are dicts, for
        `step`, which must take it before the next one. Collective where shares follow what
        ranks take.
        """
        refuse_loader(dataset, "the dataset")
        order = Order(len(dataset), batch, self.seed)
        self.batch_size = min(batch, len(dataset))
        self.strategy.refuse_few(min(batch, order.samples), self.strategy)
        if self.strategy.follows:
            self.division = self.pace.followed(
                self.replicated, self.batch_size, self.division, self.log, epoch
            )
        return self.batches_at(
            dataset,
            order,
            ((epoch, whole) for whole in order.batches(start)),
            loaders,
            self.division,
        )

    def batches_at(
        self,
        dataset: Dataset,
        order: Order,
        places: Iterable[tuple[int, range]],
        loaders: int = 0,
        division: Division | None = None,
    ) -> Iterator[Any]:
        """The same for chosen (epoch, positions of a global batch); places of one epoch follow
        each other.
        """
        division = division or self.division
        samples = Samples(dataset, self.seed, self.collate, self.world.timeout)
        samples = (
            samples
            if self.examined or not self.splits
            else whole_where_needed(samples, order.batch)
        )
        for epoch, group in groupby(places, key=lambda place: place[0]):
            yield from self.feed.give(
                samples,
                (
                    batch_of(order, epoch, whole, division, self.replicas, self.reverse)
                    for _, whole in group
                ),
                loaders,
            )

    # ---- the step ----------------------------------------------------------------------------
    def step(self, inputs: Any, target: Any = None) -> Result:
        """Forward, backward, exchange, update on what `batches` gave last. Raises StepFailed
        with step and tensor.
        """
        try:
            batch = self.feed.taken(inputs, target)
            target = inputs if target is None else target
            with self.watch.over(self.steps):
                before(self, batch, inputs, target)
                own = self.gradients_of(batch, inputs, target)
                own, result, rate = self._update(batch, inputs, target, own)
        except Exception as error:
            cause = error if self.exchange is None else self.exchange.cause(error)
            raise self.failed(cause, own=self.strategy.in_rounds) from cause
        assert self.exchange is not None
        if self.layout.cut:
            self.exchange.count("parts", self.layout.sent, computed=True)
            if self.given is not None and self.passes is not None:
                self.given.reflects(self.passes.numbers())
        # what the step was compared with, and a whole model
        allocator.give_back(self.taken == 0)
        mine, order = (
            (own, batch.recorded) if self.leads and not self.exchange.again else (Sums(), [0, 0])
        )
        self.log.step(
            self.steps,
            self.feed.began,
            epoch=batch.epoch,
            loss=[mine.loss, mine.weight],
            order=order,
            lr=rate,
            sent=dict(self.exchange.sent),
            **self.noise.line,
        )
        self.steps = self.steps + 1
        self.taken = self.taken + 1
        return result

    def gradients_of(self, batch: Batch, inputs: Any, target: Any) -> Sums:
        """Summed over micro-batches, replicas and owners; this rank's own sums."""
        assert self.exchange is not None
        assert self.passes is not None
        # also those that the optimizer does not hold
        for parameter in self.everything:
            parameter.grad = None
        self.exchange.begin()
        self.noise.begin(self.steps, self.rehearsing)
        samples = sum(len(each.positions) for each in batch.micros)
        share = self.batch_size / len(self.division.shares) or 1.0
        self.layout.sent = 0
        self.module.doubts = 0.0
        self.cast = False
        self.exchange.stop = self.world.stop.is_set()
        self.exchange.own_samples = samples
        self.exchange.epoch = batch.epoch
        looked = (
            None
            if self.rehearsing or self.taken >= COUNTED or self.exchange.shards or not self.coarsest
            else self.model
        )
        still = unmoved(self.exchange, self.parameters, self.layout, self.replicated.size)
        late = as_seen(
            self.draws, self.layout.cut and self.splits and (self.taken + 1).bit_count() == 1
        )
        paced = (
            contextlib.nullcontext()
            if self.rehearsing
            else self.pace.over(self.steps, samples, share, self.passes)
        )
        with (
            counting(self.passes, looked),
            still,
            late,
            paced,
            over(self.around, self.exchange.count),
        ):
            own = sums_of(self.passes, batch.parts(inputs, target), len(batch.micros))
        if self.autocast is not None and not self.rehearsing and not self.cast:
            raise StepFailed(
                f"the passes of {self.strategy} leave autocast out; make every forward "
                f"within.casting()"
            )
        self.exchange.doubt = self.module.doubts
        self.exchange.finish(own.weight, own.loss)
        self.layout.sum_owned(self.parameters)
        return own

    def counted(self, own: Sums) -> tuple[Sums, list[float]]:
        """(own sums of this rank's share, [weight, loss, ranks asked to stop, doubtful weight]
        of all), as who has the loss tells; of the wish to stop all hear. Collective.
        """
        assert self.exchange is not None
        with self.log.detail("told", "wait") if self.layout.cut else contextlib.nullcontext():
            told = self.layout.told([own.loss, own.weight, *counted(self.exchange)])
        check_given([each[1] for each in told], self.layout.givers)
        loss, weight, *sums = told[0]
        sums[2], self.exchange.share = max(each[4] for each in told), weight / (sums[0] or 1.0)
        return own._replace(loss=loss, weight=weight), sums

    def _update(
        self, batch: Batch, inputs: Any, target: Any, own: Sums
    ) -> tuple[Sums, Result, float]:
        """The one division by the global weight, then clipping, the optimizer and the
        scheduler: as serial. Returns the share's own sums, the result and the learning rate of
        this update.
        """
        assert self.exchange is not None
        own, (weight, loss, stop, doubt) = self.counted(own)
        with self.log.span("update", "update"):
            weight = certain(self, batch, inputs, target, weight, doubt)
            rate = float(self.optimizer.param_groups[0]["lr"])
            self.exchange.weight = weight
            self.exchange.stop = self.exchange.stop or stop > 0
            if weight:
                self.exchange.average(weight * own.scale)
            else:
                self.exchange.uncounted()
            self.noise.mean(self.exchange.averaged)
            if self.proof is not None and not self.rehearsing:
                prove(self, loss / weight, weight)
            self.alike("update", self.steps, self.exchange.update)
            if self.scheduler is not None:
                self.alike("schedule", self.steps, self.scheduler.step)
        return own, Result(loss / (weight or 1.0), weight, stop + self.exchange.asked > 0), rate

    def keyed(
        self, micro: Micro, first: int = 0, calls: Calls | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward: what is drawn is keyed by each sample's place in the
        global batch; where that depends on the layout, a draw that the first step did not make
        ends the run. first, calls: as Keyed has them.
        """
        strict = self.splits and self.strategy.lays_out
        return keyed(
            self.draws,
            self.seed,
            self.steps,
            micro.places[: len(micro.positions)],
            True,
            strict,
            first,
            calls,
        )

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        self.cast = True
        off = self.autocast is None or self.rehearsing
        return (
            contextlib.nullcontext()
            if off
            else torch.autocast(self.world.device.type, self.autocast)
        )

    # ---- what others look at -----------------------------------------------------------------
    def evaluate(self, dataset: Dataset, metric: Metric | None = None, loaders: int = 0) -> float:
        """The metric over a dataset (or, without one, the loss): every sample once, over all
        ranks. Collective.
        """
        return self.evaluation(dataset, metric, loaders)["value"]

    def evaluation(
        self,
        dataset: Dataset,
        metric: Metric | None = None,
        loaders: int = 0,
        part: tuple[int, int] | None = None,
    ) -> dict[str, float]:
        """The same with the weight it stands on: {"value", "weight"}. part: (which, of how
        many), where it is told.
        """
        samples = Samples(dataset, self.seed, self.collate, self.world.timeout)
        if self.given is not None:
            self.given.followed(self.model, self.passes, modes=False)
        with self.for_evaluation(), evaluating(self.model), self.casting(), over(self.around):
            return evaluated(
                self.replicated,
                self.module,
                self.passes,
                self.layout,
                samples,
                metric,
                self.dtype,
                loaders,
                at_once(self.batch_size, self.strategy.division, self.replicas[0]),
                part,
            )

    def for_evaluation(self) -> contextlib.AbstractContextManager[Any]:
        """Parameters in the eval mode of an optimizer that has one (schedule-free); afterwards
        as they were. Collective.
        """
        return (
            self.exchange.evaluating()
            if self.exchange
            else in_eval_mode(self.optimizer, list(self.parameters.values()))
        )

    def standing(self) -> contextlib.AbstractContextManager[None]:
        """The model as what the run stands for, where replicas differ; afterwards as it was.
        Collective.
        """
        return self.exchange.standing() if self.exchange else contextlib.nullcontext()

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter as the last update used it (mean, clipped); until any
        rank begins the next step. Collective where this rank holds parts, as `state` is.
        """
        assert self.exchange is not None
        return self.held.whole(self.exchange.gradients())

    def whole(self) -> nn.Module:
        """The model, put together on rank 0 where ranks hold parts. Collective."""
        if not self.held.cut or (self.layout.cut and self.replicated.rank):
            return self.hollow
        tensors = self.held.whole(
            {**self.parameters, **dict(self.model.named_buffers())}, everywhere=False
        )
        return filled(self.hollow, tensors) if self.world.rank == 0 else self.hollow

    def local(self) -> dict[str, Tensor]:
        """What is on this rank: parameters, and buffers unless the strategy lets them differ by
        rank.
        """
        buffers = dict(self.model.named_buffers()) if self.strategy.promise.buffers_equal else {}
        return {
            **{name: parameter.detach() for name, parameter in self.parameters.items()},
            **buffers,
        }

    def state(self) -> dict[str, Tensor]:
        """The same of the whole model, as what the run stands for."""
        with self.standing():
            # the run's, in here
            buffers = (
                {} if self.strategy.promise.replicas_equal else dict(self.model.named_buffers())
            )
            found = self.held.whole(
                {**self.local(), **{name: each.detach() for name, each in buffers.items()}}
            )
            return {name: tensor for name, tensor in found.items() if tensor is not None}

    def save(
        self, folder: str | Path, identity: dict[str, Any] | None = None, **beside: Any
    ) -> None:
        """Write a checkpoint of this step below a folder, and keep the one before it. beside:
        as in Snapshot. Collective.
        """
        trainer_snapshot.save(self, Path(folder), identity, beside)

    def load(self, folder: str | Path) -> None:
        """Go on from the newest whole checkpoint below a folder, saved under any strategy:
        `trainer.steps` steps were made. Collective: rank 0 chooses, and every rank reads that
        one. Raises Refused.
        """
        trainer_snapshot.restore(self, newest_of_all(self.world, Path(folder)))

    # own: no other rank had a part in it
    def failed(self, error: Exception, own: bool = False) -> StepFailed:
        self.log.failed(self.steps)
        return (
            StepFailed.of(error, self.steps) if own else failure(self.everyone, error, self.steps)
        )

    def close(self) -> None:
        """Let go of the exchange; the model is a plain one again."""
        self.watch.close()
        self.log.failed(self.steps)  # spans that no step took
        for each in (self.passes, self.exchange, self.noise):
            if each is not None:
                each.close()
