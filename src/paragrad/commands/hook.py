"""hook: our all-reduces, and compressors, for people who use DistributedDataParallel without
the rest of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paragrad.errors import Refused, StepFailed, describe_error
from paragrad.executors.transport import Traffic
from paragrad.notation.choices import Choice, build_choice
from paragrad.notation.grammar import parse_call
from paragrad.parallel.compression.compressed_reduce import DENSE_BYTES, CompressedReduce
from paragrad.parallel.compression.feedback import flatten_real, reshape_and_cast_like
from paragrad.parallel.compression.momentum import DgcMomentum, take_over_momentum
from paragrad.parallel.data.bucket_queue import Bucket, BucketQueue, make_pending_bucket
from paragrad.runtime.rendezvous import count_local_ranks, find_existing_world
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.data import Data
from paragrad.strategies.registry import collect_all_reduces
from paragrad.strategies.strategy import Environment
from paragrad.trainer.settings import Settings
from paragrad.validation.inspected_job import InspectedOptimizer
from paragrad.validation.validate import prove_strategy_schedules


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
    world = find_existing_world()
    if world is None:
        raise Refused("hook wants a process group; call torch.distributed.init_process_group first")
    found = _parse_hook_argument(algorithm)
    size = world.size
    compressor = found if isinstance(found, Compressor) else None
    if compressor is not None:
        compressor.refuse_hook(
            None if optimizer is None else InspectedOptimizer(optimizer), steps_per_epoch
        )
    elif optimizer is not None or steps_per_epoch is not None:
        raise Refused(
            f"hook('{found}') wants no optimizer and no steps_per_epoch, which dgc has a use for; "
            f"leave them out"
        )
    chosen = Data(size, reduce=found) if compressor is None else Data(size, compress=compressor)
    resolved = chosen.resolve(
        Environment(
            ranks=size,
            ranks_on_host=count_local_ranks(),
            backend=world.backend or "gloo",
            user_loop=True,
        )
    )
    prove_strategy_schedules(chosen, resolved, Settings())
    queue = (
        BucketQueue(resolved.reduce, world)
        if compressor is None
        else CompressedBuckets(compressor, resolved.reduce, world, optimizer, steps_per_epoch)
    )
    return queue, _average_in_hook if compressor is None else _compress_in_hook


def _parse_hook_argument(algorithm: str | Choice) -> Any:
    if algorithm == "auto":
        return algorithm
    known: dict[str, type[Choice]] = {**collect_all_reduces(), **Compressor.members}
    try:
        found = (
            build_choice(parse_call(algorithm), known, "hook")
            if isinstance(algorithm, str)
            else algorithm
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
        self.requested = compressor
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        every = (
            []
            if optimizer is None
            else [each for group in optimizer.param_groups for each in group["params"]]
        )
        self.parameter_names = dict[Tensor, str]()
        self.parameters_by_name = dict[str, Any]()
        for each in every:
            self._name_parameter(each)
        self.momentum = take_over_momentum(compressor, optimizer, self.parameters_by_name)
        super().__init__(algorithm, world)
        feedback = None if self.momentum is None else self.momentum.build_feedback()
        if feedback is not None and self.momentum is not None:
            small = {
                name
                for each, name in self.parameter_names.items()
                if not compressor.compresses(each.shape)
            }
            self.momentum.adopt_buffers(feedback, small, self.world.size, {})
        self.compression = CompressedReduce(
            compressor, self.world, self._sum_vector, feedback=feedback
        )

    def close(self) -> None:
        super().close()
        if self.momentum is not None:
            self.momentum.release_optimizer()

    def _sum_vector(self, vector: Tensor, kind: str) -> Callable[[], Tensor]:
        """A sum over ranks, in the queue's own thread."""
        self._reduce_vector(vector)
        return lambda: vector

    def _name_parameter(self, parameter: Tensor) -> str:
        """Its name, by the order in which they were seen: DDP tells none."""
        if parameter not in self.parameter_names:
            name = f"parameter {len(self.parameter_names)} of shape {tuple(parameter.shape)}"
            self.parameter_names[parameter] = name
            self.parameters_by_name[name] = parameter
        return self.parameter_names[parameter]

    def _exchange_bucket(self, bucket: Bucket) -> Traffic:
        try:
            self._compress_bucket(bucket)
        except StepFailed as error:
            raise StepFailed.wrap_error(error, bucket.step) from error
        # of the backend mostly, which does not say so
        except RuntimeError as error:
            raise StepFailed(
                f"gradients could not be compressed and exchanged ({describe_error(error)}); where "
                f"a "
                f"connection was lost, "
                "another rank has failed or is gone",
                step=bucket.step,
            ) from error
        return Traffic(0)

    def _refuse_second_exchange(self, momentum: DgcMomentum, parameters: Iterable[Tensor]) -> None:
        """What dgc sent last is a velocity with decay: added to the next gradient it would get
        momentum once more.
        """
        for parameter in parameters:
            if (
                momentum.has_parameter(name := self._name_parameter(parameter))
                and momentum.last_given_steps.get(parameter) == momentum.started_steps
            ):
                raise StepFailed(
                    "dgc exchanged it twice, and the optimizer made no step in between; let "
                    "several backwards add "
                    "up under no_sync(), and step after each that exchanges; a rank without "
                    "further batches under "
                    "join() makes none, so give all equally many",
                    tensor=name,
                )
            momentum.last_given_steps[parameter] = momentum.started_steps

    def _compress_bucket(self, bucket: Bucket) -> None:
        if self.steps_per_epoch is not None:
            self.compression.replace_compressor(
                self.requested.adapt_to_epoch(bucket.step // self.steps_per_epoch)
            )
        gradients = {self._name_parameter(parameter): each for parameter, each in bucket.pairs}
        if self.momentum is not None:
            self._refuse_second_exchange(
                self.momentum, (parameter for parameter, _ in bucket.pairs)
            )
        large = {
            name: each for name, each in gradients.items() if self.requested.compresses(each.shape)
        }
        means = self.compression.finish(
            self.compression.begin(large, 1.0 / self.world.size, bucket.step)
        )
        if small := {
            name: flatten_real(each) for name, each in gradients.items() if name not in large
        }:
            vector = self._sum_vector(
                torch.cat([*small.values()]).div_(self.world.size), DENSE_BYTES
            )()
            means |= dict(
                zip(small, vector.split([each.numel() for each in small.values()]), strict=True)
            )
        for name, flat in means.items():
            mean = reshape_and_cast_like(flat, gradients[name])
            gradients[name].copy_(
                mean
                if self.momentum is None
                else self.momentum.compute_update(name, mean, is_small=name in small)
            )


def _pair_gradients(parameters: Sequence[Tensor], vector: Tensor) -> list[tuple[Tensor, Tensor]]:
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
def _compress_in_hook(queue, bucket):  # type: ignore[no-untyped-def]
    waiting = make_pending_bucket(bucket.index(), bucket.buffer())
    waiting.step, waiting.pairs = queue.step, _pair_gradients(bucket.parameters(), waiting.vector)
    queue.put_bucket(waiting)
    queue.step += bucket.is_last()
    # raises what was set, which DDP would take for a tensor
    return waiting.future.then(lambda future: future.value())


# DDP looks at annotations, and wants none or its own
def _average_in_hook(queue, bucket):  # type: ignore[no-untyped-def]
    waiting = make_pending_bucket(bucket.index(), bucket.buffer())
    queue.put_bucket(waiting)
    return waiting.future.then(lambda future: future.value().div_(queue.world.size))
