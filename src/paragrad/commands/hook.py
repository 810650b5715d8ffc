"""hook: all-reduces and compressors of this library for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
    """Build a communication hook for DDP: `ddp.register_comm_hook(*hook("ring"))`.

    Gradients become their mean over ranks, as with DDP's own hook, or what was sent of it. Call it
    on every rank after init_process_group: it makes a process group of its own. A schedule is
    proved first. `state.close()` ends the hook's thread. It also returns the momentum to the
    optimizer, where it starts anew.

    Args:
        algorithm: an all-reduce such as "ring", or a compressor such as "top_k(0.01)".

        optimizer: for dgc only, which takes over the optimizer's momentum.

        steps_per_epoch: for dgc only, which warms up by epochs.

    Returns:
        (state, hook).

    Raises:
        Refused: there is no process group, or an argument does not fit.

    Examples:
        >>> import paragrad as pg
        >>> pg.hook("ring")
        Traceback (most recent call last):
        paragrad.errors.Refused: hook needs a process group; call \
torch.distributed.init_process_group first
    """
    world = find_existing_world()
    if world is None:
        raise Refused("hook needs a process group; call torch.distributed.init_process_group first")
    chosen_algorithm = _parse_hook_argument(algorithm)
    size = world.size
    compressor = chosen_algorithm if isinstance(chosen_algorithm, Compressor) else None
    if compressor is not None:
        compressor.refuse_hook(
            None if optimizer is None else InspectedOptimizer(lambda: optimizer), steps_per_epoch
        )
    elif optimizer is not None or steps_per_epoch is not None:
        raise Refused(
            f"hook('{chosen_algorithm}') takes no optimizer and no steps_per_epoch, which only dgc "
            "uses; leave them out"
        )
    chosen = (
        Data(size, reduce=chosen_algorithm)
        if compressor is None
        else Data(size, compress=compressor)
    )
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
        parsed = (
            build_choice(parse_call(algorithm), known, "hook")
            if isinstance(algorithm, str)
            else algorithm
        )
        if not isinstance(parsed, tuple(known.values())):
            raise Refused(f"got {parsed!r}")
    except Refused as error:
        raise Refused(
            "hook takes the name of an all-reduce, such as 'ring' or 'ring_async(segments=4)', or "
            f"one of your own; or the name of a compressor, such as 'top_k(0.01)'; {error}"
        ) from None
    return parsed


class CompressedBuckets(BucketQueue):
    """Compresses buckets in DDP's order over its process group.

    A bucket's vector becomes what was sent of the mean over all ranks.

    Attributes:
        requested: the compressor as it was requested; dgc's ratio changes during its warm-up.

        steps_per_epoch: steps of an epoch; None without a warm-up.

        step: number of exchanged steps.

        parameter_names: name of each parameter.

        parameters_by_name: parameter of each name.

        momentum: the momentum that dgc took over; None without it.

        compression: compresses and exchanges the gradients.
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
        parameters = (
            []
            if optimizer is None
            else [each for group in optimizer.param_groups for each in group["params"]]
        )
        self.parameter_names = dict[Tensor, str]()
        self.parameters_by_name = dict[str, Any]()
        for each in parameters:
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

    def count_step(self) -> None:
        """Count a step, after its last bucket."""
        self.step += 1

    def close(self) -> None:
        """End the queue's thread and return the momentum to the optimizer."""
        super().close()
        if self.momentum is not None:
            self.momentum.release_optimizer()

    def _sum_vector(self, vector: Tensor, kind: str) -> Callable[[], Tensor]:
        """Sum a vector over ranks, in the queue's own thread."""
        self._reduce_vector(vector)
        return lambda: vector

    def _name_parameter(self, parameter: Tensor) -> str:
        """Name a parameter by the order of its first use. DDP gives no names."""
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
        # most of these are errors of the backend, and their messages do not say so
        except RuntimeError as error:
            raise StepFailed(
                f"gradients could not be compressed and exchanged ({describe_error(error)}); if "
                "a connection was lost, another rank has failed or is gone",
                step=bucket.step,
            ) from error
        return Traffic(0)

    def _refuse_second_exchange(self, momentum: DgcMomentum, parameters: Iterable[Tensor]) -> None:
        """Refuse a second exchange before the optimizer's step.

        dgc last sent a velocity with decay. If it were added to the next gradient, momentum would
        apply twice.
        """
        for parameter in parameters:
            if (
                momentum.has_parameter(name := self._name_parameter(parameter))
                and momentum.last_given_steps.get(parameter) == momentum.started_steps
            ):
                raise StepFailed(
                    "dgc exchanged it twice, and the optimizer made no step in between; let "
                    "several backwards add up under no_sync(), and step after each that "
                    "exchanges; under join() a rank without more batches makes no step, so give "
                    "all ranks equally many",
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
    """Pair parameters with their gradients, which are views of DDP's vector.

    A gradient of complex numbers is viewed as complex if the vector is real. It has its parameter's
    own strides if these leave no gaps. DDP's own list of gradients has half of a complex gradient,
    and other strides.
    """
    widths = [2 if each.is_complex() and not vector.is_complex() else 1 for each in parameters]
    pieces = vector.view(-1).split(
        [width * each.numel() for width, each in zip(widths, parameters, strict=True)]
    )
    pairs = []
    for width, parameter, piece in zip(widths, parameters, pieces, strict=True):
        flat = torch.view_as_complex(piece.view(-1, 2)) if width == 2 else piece
        # empty_like has the same strides if these leave no gaps
        layout = torch.empty_like(parameter, device="meta")
        pairs.append(
            (
                parameter,
                flat.as_strided(layout.shape, layout.stride())
                if layout.stride() == parameter.stride()
                else flat.view(parameter.shape),
            )
        )
    return pairs


# DDP checks annotations, and accepts none or its own
def _compress_in_hook(queue, bucket):  # type: ignore[no-untyped-def]
    pending = make_pending_bucket(bucket.index(), bucket.buffer())
    pairs = _pair_gradients(bucket.parameters(), pending.vector)
    pending = replace(pending, step=queue.step, pairs=pairs)
    queue.put_bucket(pending)
    if bucket.is_last():
        queue.count_step()
    # value() raises an exception that was set; DDP would take it for a tensor
    return pending.future.then(lambda future: future.value())


# DDP checks annotations, and accepts none or its own
def _average_in_hook(queue, bucket):  # type: ignore[no-untyped-def]
    pending = make_pending_bucket(bucket.index(), bucket.buffer())
    queue.put_bucket(pending)
    return pending.future.then(lambda future: future.value().div_(queue.world.size))
