"""Vectors of many tensors over all ranks: compensated, compressed, exchanged, extracted.

sending = compression.begin({"0.weight": gradient, ...}, scale, step)       # and something
else meanwhile sums = compression.finish(sending)                                          #
by name, the same bits on all ranks
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

# bytes, by kind
COMPRESSED_BYTES = "compressed"
DENSE_BYTES = "dense"
ENTRY_BYTES = "entries"
# begins to sum a vector over ranks, as bytes of a kind; waits for it
ReduceFunction = Callable[[Tensor, str], Callable[[], Tensor]]


@dataclass
class CompressedTensor:
    """A tensor in a step. vector: flat, with what was fed back;  agreed: what all ranks agreed
    on before.
    """

    name: str
    codec: Codec
    vector: Tensor
    agreement: Tensor | None = None
    payload: Payload = ()


@dataclass
class PendingReduce:
    """Tensors whose payloads are on their way. wait: until they came, which gives one vector,
    the sum of all ranks', or the messages of all;  kinds: what is in the message of each rank;
    dense: the vector is of what the payloads stand for.
    """

    tensors: list[CompressedTensor]
    wait: Callable[[], list[Tensor]]
    layouts: list[list[PayloadLayout]] = field(default_factory=list)
    is_dense: bool = False


class CompressedReduce:
    """Of a resolved compressor, over the ranks of a world. Collective: all begin and finish the
    same tensors in the same order.

    summed: how vectors are summed;  count: told (kind, bytes) that are sent otherwise;  known:
    the serial name of a tensor, by which draws are seeded;  log: told of the time it takes, and
    of what is sent as dense vectors.
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
        self.memories: dict[str, Tensor] = {}  # of codecs that are made later
        # of tensors that begin a message: was it dense?
        self.logged_dense: dict[str, bool] = {}

    def replace_compressor(self, compressor: Compressor) -> None:
        """Another one of its kind from here on, which goes on from what this one's codecs
        did.
        """
        if compressor != self.compressor:
            self.memories |= {
                name: each.memory for name, each in self.codecs.items() if each.memory is not None
            }
            self.compressor = compressor
            self.codecs = {}

    def begin(self, gradients: Mapping[str, Tensor], scale: float, step: int) -> PendingReduce:
        """scale: of a rank's part of the mean, by its gradient. Raises StepFailed with the
        tensor's name.
        """
        with self.log.record_span("compress", "compute"):
            parts = [
                CompressedTensor(
                    name,
                    self._get_codec(name, each),
                    self.feedback.compensate_gradient(name, each, scale),
                )
                for name, each in gradients.items()
            ]
        self._reach_agreement(parts)
        with self.log.record_span("compress", "compute"):
            for part in parts:
                with name_failing_tensor(part.name):
                    part.payload = part.codec.compress(
                        part.vector,
                        part.agreement,
                        self._derive_draw_seed(step, self.world.rank, part.name),
                    )
                self.feedback.note_sent(part.name, part.codec, part.payload, part.agreement)
            return self._send_payloads(parts)

    def finish(self, pending: PendingReduce) -> dict[str, Tensor]:
        """The sums over ranks of what was sent, flat."""
        with self.log.record_span("exchange", "wait"):
            came = pending.wait()
        with self.log.record_span("extract", "compute"):
            if pending.is_dense:
                return _split_vector(came[0], pending.tensors)
            if self.compressor.sums:
                return self._extract_sum(came[0], pending.tensors)
            return self._add_messages(came, pending)

    # ---- before it is sent -------------------------------------------------------------------
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
        """What codecs must know of all ranks before they compress, in one message."""
        asking = []
        for part in tensors:
            with name_failing_tensor(part.name):
                asked = part.codec.propose_agreement(part.vector)
            if asked is not None:
                asking.append((part, asked))
        if asking:
            wait = self.reduce_vector(
                torch.cat([asked.reshape(-1) for _, asked in asking]), COMPRESSED_BYTES
            )
            with self.log.record_span("exchange", "wait"):
                vector = wait()
            for (part, asked), found in zip(
                asking, vector.split([asked.numel() for _, asked in asking]), strict=True
            ):
                part.agreement = part.codec.conclude_agreement(found.view_as(asked))

    def _send_payloads(self, tensors: list[CompressedTensor]) -> PendingReduce:
        if not tensors:
            return PendingReduce(tensors, lambda: [torch.empty(0)], is_dense=True)
        if self.compressor.sums:
            wait = self.reduce_vector(
                torch.cat([part.payload[0].reshape(-1) for part in tensors]), COMPRESSED_BYTES
            )
            return PendingReduce(tensors, lambda: [wait()])
        kinds: list[list[PayloadLayout]] = [
            [
                part.codec.describe_payload(part.payload, each)
                for part, each in zip(tensors, entries, strict=True)
            ]
            for entries in self._gather_entry_counts(tensors)
        ]
        lengths = [count_message_bytes(each) for each in kinds]
        size = self.world.size
        plain = sum(part.vector.nbytes for part in tensors)
        dense = (
            sum(lengths) * (size - 1) // size
            >= count_collective_bytes("all_reduce", plain, size)
            > 0
        )
        self._log_choice(tensors, dense, sum(lengths) // size, plain)
        if dense:
            found = torch.cat(
                [
                    part.codec.extract(part.payload, part.agreement).to(part.vector.dtype)
                    for part in tensors
                ]
            )
            wait = self.reduce_vector(found, DENSE_BYTES)
            return PendingReduce(tensors, lambda: [wait()], is_dense=True)
        return PendingReduce(
            tensors,
            self._pass_messages(
                pack_payloads((part.payload for part in tensors), tensors[0].vector.device), lengths
            ),
            kinds,
        )

    def _gather_entry_counts(
        self, tensors: list[CompressedTensor]
    ) -> Sequence[Sequence[int | None]]:
        """Of each rank, how many entries each tensor's payload has; where none varies, nobody
        asks.
        """
        if not any(part.codec.has_variable_length for part in tensors):
            return [[None] * len(tensors)] * self.world.size
        own = torch.tensor([len(part.payload[0]) for part in tensors])
        self.count_bytes(
            ENTRY_BYTES, count_collective_bytes("all_gather", own.nbytes, self.world.size)
        )
        with self.log.record_span("exchange", "wait"):
            return [each.tolist() for each in self.world.all_gather(own)]

    def _pass_messages(self, message: Tensor, lengths: list[int]) -> Callable[[], list[Tensor]]:
        """Every rank's message to all others, of any lengths."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        came = {
            rank: torch.empty(lengths[rank], dtype=torch.uint8, device=message.device)
            for rank in others
        }
        over = self.world.start_transfers(dict.fromkeys(others, message), came)
        self.count_bytes(COMPRESSED_BYTES, len(message) * len(others))

        def wait() -> list[Tensor]:
            over()
            return [came.get(rank, message) for rank in range(self.world.size)]

        return wait

    def _log_choice(
        self, tensors: list[CompressedTensor], is_dense: bool, message_bytes: int, plain_bytes: int
    ) -> None:
        if self.logged_dense.get(tensors[0].name) != is_dense:
            self.logged_dense[tensors[0].name] = is_dense
            self.log.write_choice(
                "message",
                "dense" if is_dense else str(self.compressor),
                f"{message_bytes:,} bytes to each of "
                f"{self.world.size - 1} others, of {plain_bytes:,} that an all-reduce sums",
                message_bytes,
            )

    # ---- when it came ------------------------------------------------------------------------
    def _extract_sum(self, vector: Tensor, tensors: list[CompressedTensor]) -> dict[str, Tensor]:
        found = {}
        for part, piece in zip(
            tensors, vector.split([part.payload[0].numel() for part in tensors]), strict=True
        ):
            payload = (piece.view_as(part.payload[0]),)
            part.codec.adopt_sum(payload)
            found[part.name] = part.codec.extract(payload, part.agreement)
        return found

    def _add_messages(self, messages: list[Tensor], pending: PendingReduce) -> dict[str, Tensor]:
        """Added up in the order of ranks, on all of them."""
        found = {part.name: torch.zeros_like(part.vector) for part in pending.tensors}
        for message, kinds in zip(messages, pending.layouts, strict=True):
            for part, payload in zip(pending.tensors, unpack_payloads(message, kinds), strict=True):
                part.codec.add(payload, found[part.name], part.agreement)
        return found


def _split_vector(vector: Tensor, tensors: list[CompressedTensor]) -> dict[str, Tensor]:
    pieces = vector.split([part.codec.elements for part in tensors])
    return {part.name: piece for part, piece in zip(tensors, pieces, strict=True)}


@contextlib.contextmanager
def name_failing_tensor(tensor: str) -> Iterator[None]:
    try:
        yield
    except StepFailed as error:
        raise StepFailed(error.message, tensor=tensor) from error
