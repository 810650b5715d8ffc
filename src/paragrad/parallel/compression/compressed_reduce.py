"""Sum many tensors over all ranks: compensate, compress, exchange, extract.

Usage:

    pending = reduce.begin({"0.weight": gradient, ...}, scale, step)
    ...                                         # other work
    sums = reduce.finish(pending)               # by name, the same bits on all ranks
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paragrad.errors import StepFailed
from paragrad.parallel.compression.codec import Codec, Payload, build_codec, derive_seed
from paragrad.parallel.compression.feedback import ErrorFeedback, NoFeedback
from paragrad.parallel.compression.packing import (
    PayloadLayout,
    count_message_bytes,
    pack_payloads,
    unpack_payloads,
)
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Compressor

# names under which the bytes of each kind of message are counted
COMPRESSED_BYTES = "compressed"
DENSE_BYTES = "dense"
ENTRY_BYTES = "entries"
# starts to sum a vector over ranks (vector, kind of bytes) -> waits for the sum and returns it
ReduceFunction = Callable[[Tensor, str], Callable[[], Tensor]]


@dataclass
class CompressedTensor:
    """A tensor in a step.

    Attributes:
        name: Name of the tensor.

        codec: Its codec.

        vector: The flat vector, with the feedback of earlier steps.

        agreement: What all ranks agreed on before they compress, or None.

        payload: The compressed vector.
    """

    name: str
    codec: Codec
    vector: Tensor
    agreement: Tensor | None = None
    payload: Payload = ()


@dataclass
class PendingReduce:
    """Tensors that are being sent as payloads.

    Attributes:
        tensors: The tensors.

        wait: Waits for the messages. Returns one vector (the sum over ranks), or the messages of
            all ranks.

        layouts: For each rank, the layouts of the payloads in its message.

        is_dense: The vector contains the tensors themselves, not payloads.
    """

    tensors: list[CompressedTensor]
    wait: Callable[[], list[Tensor]]
    layouts: list[list[PayloadLayout]] = field(default_factory=list)
    is_dense: bool = False


class CompressedReduce:
    """Sums tensors over the ranks of a world, compressed by a resolved compressor.

    Collective: all ranks begin and finish the same tensors in the same order.

    Args:
        compressor: The compressor.

        world: The ranks.

        reduce_vector: Starts to sum a vector over ranks.

        feedback: What is kept of a gradient until it is sent; None: as the compressor says.

        seed: Seed of the draws.

        log: The record, which gets the time of each phase, and a choice if a message is sent dense.

        count_bytes: Called as count_bytes(kind, bytes) for what is sent without `reduce_vector`.

        get_serial_name: Returns the serial name of a tensor, from which draws are seeded.

    Attributes:
        codecs: The codecs by tensor name.

        memories: Memories for codecs that are built later, by tensor name.

        logged_dense: By the first tensor of a message, whether it was last recorded as dense.
    """

    def __init__(
        self,
        compressor: Compressor,
        world: World,
        reduce_vector: ReduceFunction,
        *,
        feedback: NoFeedback | None = None,
        seed: int = 0,
        log: StepLog | None = None,
        count_bytes: Callable[[str, int], None] = lambda kind, number: None,
        get_serial_name: Callable[[str], str] = str,
    ) -> None:
        self.compressor = compressor
        self.world = world
        self.reduce_vector = reduce_vector
        self.count_bytes = count_bytes
        self.get_serial_name = get_serial_name
        self.feedback = feedback or (ErrorFeedback() if compressor.feedback else NoFeedback())
        self.seed = seed
        self.log = log or StepLog(None)
        self.codecs: dict[str, Codec] = {}
        self.memories: dict[str, Tensor] = {}
        self.logged_dense: dict[str, bool] = {}

    def replace_compressor(self, compressor: Compressor) -> None:
        """Use another compressor of the same kind from now on.

        Its codecs continue from the memory of the present codecs.

        Args:
            compressor: The new compressor.
        """
        if compressor != self.compressor:
            self.memories |= {
                name: each.memory for name, each in self.codecs.items() if each.memory is not None
            }
            self.compressor = compressor
            self.codecs = {}

    def begin(self, gradients: Mapping[str, Tensor], scale: float, step: int) -> PendingReduce:
        """Compress tensors and start to send them.

        Args:
            gradients: The gradients of this rank by name.

            scale: Factor from the gradient of this rank to its part of the mean.

            step: Number of the step, from which draws are seeded.

        Returns:
            What `finish` needs.

        Raises:
            StepFailed: A gradient is not finite; the error names the tensor.
        """
        with self.log.record_span("compress", "compute"):
            tensors = [
                CompressedTensor(
                    name,
                    self._get_codec(name, each),
                    self.feedback.compensate_gradient(name, each, scale),
                )
                for name, each in gradients.items()
            ]
        self._reach_agreement(tensors)
        with self.log.record_span("compress", "compute"):
            for tensor in tensors:
                with name_failing_tensor(tensor.name):
                    tensor.payload = tensor.codec.compress(
                        tensor.vector,
                        tensor.agreement,
                        self._derive_draw_seed(step, self.world.rank, tensor.name),
                    )
                self.feedback.note_sent(tensor.name, tensor.codec, tensor.payload, tensor.agreement)
            return self._send_payloads(tensors)

    def finish(self, pending: PendingReduce) -> dict[str, Tensor]:
        """Wait for the messages and return the sums over ranks, flat.

        Args:
            pending: The result of `begin`.
        """
        with self.log.record_span("exchange", "wait"):
            received = pending.wait()
        with self.log.record_span("extract", "compute"):
            if pending.is_dense:
                return _split_vector(received[0], pending.tensors)
            if self.compressor.sums:
                return self._extract_sum(received[0], pending.tensors)
            return self._add_messages(received, pending)

    # ---- before messages are sent ------------------------------------------------------------
    def _get_codec(self, name: str, gradient: Tensor) -> Codec:
        if name not in self.codecs:
            shape = torch.view_as_real(gradient).shape if gradient.is_complex() else gradient.shape
            self.codecs[name] = build_codec(
                self.compressor, shape, self._derive_draw_seed(0, 0, name)
            )
            self.codecs[name].memory = self.memories.pop(name, None)
        return self.codecs[name]

    def _derive_draw_seed(self, step: int, rank: int, name: str) -> int:
        return derive_seed(self.seed, step, rank, self.get_serial_name(name))

    def _reach_agreement(self, tensors: list[CompressedTensor]) -> None:
        """Sum in one message what codecs must know from all ranks before they compress."""
        proposals = []
        for tensor in tensors:
            with name_failing_tensor(tensor.name):
                proposal = tensor.codec.propose_agreement(tensor.vector)
            if proposal is not None:
                proposals.append((tensor, proposal))
        if proposals:
            wait = self.reduce_vector(
                torch.cat([proposal.reshape(-1) for _, proposal in proposals]), COMPRESSED_BYTES
            )
            with self.log.record_span("exchange", "wait"):
                vector = wait()
            for (tensor, proposal), summed in zip(
                proposals,
                vector.split([proposal.numel() for _, proposal in proposals]),
                strict=True,
            ):
                tensor.agreement = tensor.codec.conclude_agreement(summed.view_as(proposal))

    def _send_payloads(self, tensors: list[CompressedTensor]) -> PendingReduce:
        if not tensors:
            return PendingReduce(tensors, lambda: [torch.empty(0)], is_dense=True)
        if self.compressor.sums:
            wait = self.reduce_vector(
                torch.cat([tensor.payload[0].reshape(-1) for tensor in tensors]), COMPRESSED_BYTES
            )
            return PendingReduce(tensors, lambda: [wait()])
        layouts: list[list[PayloadLayout]] = [
            [
                tensor.codec.describe_payload(tensor.payload, each)
                for tensor, each in zip(tensors, entries, strict=True)
            ]
            for entries in self._gather_entry_counts(tensors)
        ]
        lengths = [count_message_bytes(each) for each in layouts]
        size = self.world.size
        plain_bytes = sum(tensor.vector.nbytes for tensor in tensors)
        is_dense = (
            sum(lengths) * (size - 1) // size
            >= count_collective_bytes("all_reduce", plain_bytes, size)
            > 0
        )
        self._log_choice(tensors, is_dense, sum(lengths) // size, plain_bytes)
        if is_dense:
            extracted = torch.cat(
                [
                    tensor.codec.extract(tensor.payload, tensor.agreement).to(tensor.vector.dtype)
                    for tensor in tensors
                ]
            )
            wait = self.reduce_vector(extracted, DENSE_BYTES)
            return PendingReduce(tensors, lambda: [wait()], is_dense=True)
        return PendingReduce(
            tensors,
            self._pass_messages(
                pack_payloads((tensor.payload for tensor in tensors), tensors[0].vector.device),
                lengths,
            ),
            layouts,
        )

    def _gather_entry_counts(
        self, tensors: list[CompressedTensor]
    ) -> Sequence[Sequence[int | None]]:
        """Return for each rank how many entries the payload of each tensor has.

        If no payload varies in length, nothing is sent.
        """
        if not any(tensor.codec.has_variable_length for tensor in tensors):
            return [[None] * len(tensors)] * self.world.size
        counts = torch.tensor([len(tensor.payload[0]) for tensor in tensors])
        self.count_bytes(
            ENTRY_BYTES, count_collective_bytes("all_gather", counts.nbytes, self.world.size)
        )
        with self.log.record_span("exchange", "wait"):
            return [each.tolist() for each in self.world.all_gather(counts)]

    def _pass_messages(self, message: Tensor, lengths: list[int]) -> Callable[[], list[Tensor]]:
        """Start to send the message of every rank to all others; messages may have any length."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        received = {
            rank: torch.empty(lengths[rank], dtype=torch.uint8, device=message.device)
            for rank in others
        }
        wait_for_messages = self.world.start_transfers(dict.fromkeys(others, message), received)
        self.count_bytes(COMPRESSED_BYTES, len(message) * len(others))

        def wait() -> list[Tensor]:
            wait_for_messages()
            return [received.get(rank, message) for rank in range(self.world.size)]

        return wait

    def _log_choice(
        self, tensors: list[CompressedTensor], is_dense: bool, message_bytes: int, plain_bytes: int
    ) -> None:
        if self.logged_dense.get(tensors[0].name) != is_dense:
            self.logged_dense[tensors[0].name] = is_dense
            self.log.write_choice(
                "message",
                "dense" if is_dense else str(self.compressor),
                f"{message_bytes:,} bytes to each of {self.world.size - 1} others, of "
                f"{plain_bytes:,} that an all-reduce sums",
                message_bytes,
            )

    # ---- after messages have arrived ---------------------------------------------------------
    def _extract_sum(self, vector: Tensor, tensors: list[CompressedTensor]) -> dict[str, Tensor]:
        sums = {}
        for tensor, piece in zip(
            tensors, vector.split([tensor.payload[0].numel() for tensor in tensors]), strict=True
        ):
            payload = (piece.view_as(tensor.payload[0]),)
            tensor.codec.adopt_sum(payload)
            sums[tensor.name] = tensor.codec.extract(payload, tensor.agreement)
        return sums

    def _add_messages(self, messages: list[Tensor], pending: PendingReduce) -> dict[str, Tensor]:
        """Add the payloads of all ranks, in rank order on every rank."""
        sums = {tensor.name: torch.zeros_like(tensor.vector) for tensor in pending.tensors}
        for message, layouts in zip(messages, pending.layouts, strict=True):
            for tensor, payload in zip(
                pending.tensors, unpack_payloads(message, layouts), strict=True
            ):
                tensor.codec.add(payload, sums[tensor.name], tensor.agreement)
        return sums


def _split_vector(vector: Tensor, tensors: list[CompressedTensor]) -> dict[str, Tensor]:
    pieces = vector.split([tensor.codec.elements for tensor in tensors])
    return {tensor.name: piece for tensor, piece in zip(tensors, pieces, strict=True)}


@contextlib.contextmanager
def name_failing_tensor(tensor: str) -> Iterator[None]:
    """Add the name of a tensor to a StepFailed that is raised inside.

    Args:
        tensor: The name.
    """
    try:
        yield
    except StepFailed as error:
        raise StepFailed(error.message, tensor=tensor) from error
