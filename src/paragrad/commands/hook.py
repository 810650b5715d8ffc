"""hook: our all-reduces, and compressors, for people who use DistributedDataParallel without
the rest of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paragrad.errors import Refused, StepFailed, told
from paragrad.executors.transport import Traffic
from paragrad.notation.choices import Choice, build
from paragrad.notation.grammar import parse_call
from paragrad.parallel.compression.compressed_reduce import DENSE, Compression
from paragrad.parallel.compression.feedback import real, shaped
from paragrad.parallel.compression.momentum import Momentum, momentum_of
from paragrad.parallel.data.bucket_queue import Bucket, BucketQueue, waiting_bucket
from paragrad.runtime.rendezvous import ranks_here, standing
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.data import Data
from paragrad.strategies.registry import algorithms
from paragrad.strategies.strategy import Here
from paragrad.trainer.settings import Settings
from paragrad.validation.inspected_job import Updates
from paragrad.validation.validate import check_plans


def hook(
    algorithm: str | Choice,
    optimizer: torch.optim.Optimizer | None = None,
    steps_per_epoch: int | None = None,
) -> tuple[Any, Any]:
    """(state, hook) of an all-reduce such as "ring", or of a compressor such as "top_k(0.01)":
    `ddp.register_comm_hook(*hook("ring"))`.

    Gradients become the mean over ranks, as DDP's own, or what was sent of it. Call it on every
    rank, after init_process_group: it makes a process group of its own. A schedule is proved
    first. optimizer, steps_per_epoch: for dgc alone, which takes over the optimizer's momentum,
    and warms up by epochs. state.close() ends its thread, and gives the momentum back, which
    begins anew. Raises Refused.
    """
    world = standing()
    if world is None:
        raise Refused("hook wants a process group; call torch.distributed.init_process_group first")
    found = _read(algorithm)
    size = world.size
    compressor = found if isinstance(found, Compressor) else None
    if compressor is not None:
        compressor.refuse_hooked(None if optimizer is None else Updates(optimizer), steps_per_epoch)
    elif optimizer is not None or steps_per_epoch is not None:
        raise Refused(
            f"hook('{found}') wants no optimizer and no steps_per_epoch, which dgc has a use for; "
            f"leave them out"
        )
    chosen = Data(size, reduce=found) if compressor is None else Data(size, compress=compressor)
    resolved = chosen.resolved(
        Here(ranks=size, group=ranks_here(), backend=world.backend or "gloo", own_loop=True)
    )
    check_plans(chosen, resolved, Settings())
    queue = (
        BucketQueue(resolved.reduce, world)
        if compressor is None
        else CompressedBuckets(compressor, resolved.reduce, world, optimizer, steps_per_epoch)
    )
    return queue, _mean if compressor is None else _sent


def _read(algorithm: str | Choice) -> Any:
    if algorithm == "auto":
        return algorithm
    known: dict[str, type[Choice]] = {**algorithms(), **Compressor.members}
    try:
        found = (
            build(parse_call(algorithm), known, "hook") if isinstance(algorithm, str) else algorithm
        )
        if not isinstance(found, tuple(known.values())):
            raise Refused(f"got {found!r}")
    except Refused as error:
        raise Refused(
            "hook takes the name of an all-reduce, such as 'ring' or 'ring_async(segments=4)', or "
            "one of your own; "
            f"or that of a compressor, such as 'top_k(0.01)'; {error}"
        ) from None
    return found


class CompressedBuckets(BucketQueue):
    """Compresses buckets, in DDP's order, over its group. A bucket's vector becomes what was
    sent of the mean of all ranks.
    """

    def __init__(
        self,
        compressor: Compressor,
        algorithm: Any,
        world: World,
        optimizer: torch.optim.Optimizer | None,
        steps_per_epoch: int | None,
    ) -> None:
        self.asked = compressor
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        every = (
            []
            if optimizer is None
            else [each for group in optimizer.param_groups for each in group["params"]]
        )
        self.names = dict[Tensor, str]()
        self.named = dict[str, Any]()
        for each in every:
            self._know(each)
        self.momentum = momentum_of(compressor, optimizer, self.named)
        super().__init__(algorithm, world)
        feedback = None if self.momentum is None else self.momentum.corrected()
        if feedback is not None and self.momentum is not None:
            small = {
                name for each, name in self.names.items() if not compressor.compresses(each.shape)
            }
            self.momentum.goes_on(feedback, small, self.world.size, {})
        self.compression = Compression(compressor, self.world, self._now, feedback=feedback)

    def close(self) -> None:
        super().close()
        if self.momentum is not None:
            self.momentum.give_back()

    def _now(self, vector: Tensor, kind: str) -> Callable[[], Tensor]:
        """A sum over ranks, in the queue's own thread."""
        self._play(vector)
        return lambda: vector

    def _know(self, parameter: Tensor) -> str:
        """Its name, by the order in which they were seen: DDP tells none."""
        if parameter not in self.names:
            name = f"parameter {len(self.names)} of shape {tuple(parameter.shape)}"
            self.names[parameter] = name
            self.named[name] = parameter
        return self.names[parameter]

    def _exchange(self, bucket: Bucket) -> Traffic:
        try:
            self._compressed(bucket)
        except StepFailed as error:
            raise StepFailed.of(error, bucket.step) from error
        # of the backend mostly, which does not say so
        except RuntimeError as error:
            raise StepFailed(
                f"gradients could not be compressed and exchanged ({told(error)}); where a "
                f"connection was lost, "
                "another rank has failed or is gone",
                step=bucket.step,
            ) from error
        return Traffic(0)

    def _once(self, momentum: Momentum, parameters: Iterable[Tensor]) -> None:
        """What dgc sent last is a velocity with decay: added to the next gradient it would get
        momentum once more.
        """
        for parameter in parameters:
            if (
                momentum.holds(name := self._know(parameter))
                and momentum.given.get(parameter) == momentum.steps
            ):
                raise StepFailed(
                    "dgc exchanged it twice, and the optimizer made no step in between; let "
                    "several backwards add "
                    "up under no_sync(), and step after each that exchanges; a rank without "
                    "further batches under "
                    "join() makes none, so give all equally many",
                    tensor=name,
                )
            momentum.given[parameter] = momentum.steps

    def _compressed(self, bucket: Bucket) -> None:
        if self.steps_per_epoch is not None:
            self.compression.become(self.asked.in_epoch(bucket.step // self.steps_per_epoch))
        gradients = {self._know(parameter): each for parameter, each in bucket.pairs}
        if self.momentum is not None:
            self._once(self.momentum, (parameter for parameter, _ in bucket.pairs))
        large = {
            name: each for name, each in gradients.items() if self.asked.compresses(each.shape)
        }
        means = self.compression.finish(
            self.compression.begin(large, 1.0 / self.world.size, bucket.step)
        )
        if small := {name: real(each) for name, each in gradients.items() if name not in large}:
            vector = self._now(torch.cat([*small.values()]).div_(self.world.size), DENSE)()
            means |= dict(
                zip(small, vector.split([each.numel() for each in small.values()]), strict=True)
            )
        for name, flat in means.items():
            mean = shaped(flat, gradients[name])
            gradients[name].copy_(
                mean
                if self.momentum is None
                else self.momentum.moved(name, mean, small=name in small)
            )


def _pairs(parameters: Sequence[Tensor], vector: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Parameters with their gradients, views of DDP's vector: in real numbers where it is of
    complex ones, and each in its parameter's own strides where these leave no gaps. DDP's own
    list of them has half of complex ones, and other strides.
    """
    widths = [2 if each.is_complex() and not vector.is_complex() else 1 for each in parameters]
    pieces = vector.view(-1).split(
        [width * each.numel() for width, each in zip(widths, parameters, strict=True)]
    )
    found = []
    for width, parameter, piece in zip(widths, parameters, pieces, strict=True):
        flat = torch.view_as_complex(piece.view(-1, 2)) if width == 2 else piece
        # has the same strides where they leave no gaps
        like = torch.empty_like(parameter, device="meta")
        found.append(
            (
                parameter,
                flat.as_strided(like.shape, like.stride())
                if like.stride() == parameter.stride()
                else flat.view(parameter.shape),
            )
        )
    return found


# DDP looks at annotations, and wants none or its own
def _sent(compressing, bucket):  # type: ignore[no-untyped-def]
    waiting = waiting_bucket(bucket.index(), bucket.buffer())
    waiting.step, waiting.pairs = compressing.step, _pairs(bucket.parameters(), waiting.vector)
    compressing.put(waiting)
    compressing.step += bucket.is_last()
    # raises what was set, which DDP would take for a tensor
    return waiting.future.then(lambda future: future.value())


# DDP looks at annotations, and wants none or its own
def _mean(queue, bucket):  # type: ignore[no-untyped-def]
    waiting = waiting_bucket(bucket.index(), bucket.buffer())
    queue.put(waiting)
    return waiting.future.then(lambda future: future.value().div_(queue.world.size))
