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
from paragrad.parallel.compression.codec import Codec, Payload, codec_of, seeded
from paragrad.parallel.compression.feedback import Feedback, Nothing
from paragrad.parallel.compression.packing import Kinds, length_of, packed, unpacked
from paragrad.planner.cost_formulas import computed_bytes
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Compressor

# bytes, by kind
COMPRESSED = "compressed"
DENSE = "dense"
ENTRIES = "entries"
# begins to sum a vector over ranks, as bytes of a kind; waits for it
Summed = Callable[[Tensor, str], Callable[[], Tensor]]


@dataclass
class Part:
    """A tensor in a step. vector: flat, with what was fed back;  agreed: what all ranks agreed
    on before.
    """

    name: str
    codec: Codec
    vector: Tensor
    agreed: Tensor | None = None
    payload: Payload = ()


@dataclass
class InFlight:
    """Tensors whose payloads are on their way. wait: until they came, which gives one vector,
    the sum of all ranks', or the messages of all;  kinds: what is in the message of each rank;
    dense: the vector is of what the payloads stand for.
    """

    parts: list[Part]
    wait: Callable[[], list[Tensor]]
    kinds: list[list[Kinds]] = field(default_factory=list)
    dense: bool = False


class Compression:
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
        summed: Summed,
        *,
        feedback: Nothing | None = None,
        seed: int = 0,
        log: Log | None = None,
        count: Callable[[str, int], None] = lambda kind, number: None,
        known: Callable[[str], str] = str,
    ) -> None:
        self.compressor = compressor
        self.world = world
        self.summed = summed
        self.count = count
        self.known = known
        self.feedback = feedback or (Feedback() if compressor.feedback else Nothing())
        self.seed = seed
        self.log = log or Log(None)
        self.codecs: dict[str, Codec] = {}
        self.memories: dict[str, Tensor] = {}  # of codecs that are made later
        # of tensors that begin a message: was it dense?
        self.told: dict[str, bool] = {}

    def become(self, compressor: Compressor) -> None:
        """Another one of its kind from here on, which goes on from what this one's codecs
        did.
        """
        if compressor != self.compressor:
            self.memories |= {
                name: each.memory for name, each in self.codecs.items() if each.memory is not None
            }
            self.compressor = compressor
            self.codecs = {}

    def begin(self, gradients: Mapping[str, Tensor], scale: float, step: int) -> InFlight:
        """scale: of a rank's part of the mean, by its gradient. Raises StepFailed with the
        tensor's name.
        """
        with self.log.span("compress", "compute"):
            parts = [
                Part(name, self._codec(name, each), self.feedback.compensated(name, each, scale))
                for name, each in gradients.items()
            ]
        self._agree(parts)
        with self.log.span("compress", "compute"):
            for part in parts:
                with naming(part.name):
                    part.payload = part.codec.compress(
                        part.vector, part.agreed, self._draw(step, self.world.rank, part.name)
                    )
                self.feedback.sent(part.name, part.codec, part.payload, part.agreed)
            return self._sent(parts)

    def finish(self, sending: InFlight) -> dict[str, Tensor]:
        """The sums over ranks of what was sent, flat."""
        with self.log.span("exchange", "wait"):
            came = sending.wait()
        with self.log.span("extract", "compute"):
            if sending.dense:
                return _split(came[0], sending.parts)
            if self.compressor.sums:
                return self._of_sum(came[0], sending.parts)
            return self._of_all(came, sending)

    # ---- before it is sent -------------------------------------------------------------------
    def _codec(self, name: str, gradient: Tensor) -> Codec:
        if name not in self.codecs:
            shape = torch.view_as_real(gradient).shape if gradient.is_complex() else gradient.shape
            self.codecs[name] = codec_of(self.compressor, shape, self._draw(0, 0, name))
            self.codecs[name].memory = self.memories.pop(name, None)
        return self.codecs[name]

    def _draw(self, step: int, rank: int, name: str) -> int:
        return seeded(self.seed, step, rank, self.known(name))

    def _agree(self, parts: list[Part]) -> None:
        """What codecs must know of all ranks before they compress, in one message."""
        asking = []
        for part in parts:
            with naming(part.name):
                asked = part.codec.asks(part.vector)
            if asked is not None:
                asking.append((part, asked))
        if asking:
            wait = self.summed(torch.cat([asked.reshape(-1) for _, asked in asking]), COMPRESSED)
            with self.log.span("exchange", "wait"):
                vector = wait()
            for (part, asked), found in zip(
                asking, vector.split([asked.numel() for _, asked in asking]), strict=True
            ):
                part.agreed = part.codec.settled(found.view_as(asked))

    def _sent(self, parts: list[Part]) -> InFlight:
        if not parts:
            return InFlight(parts, lambda: [torch.empty(0)], dense=True)
        if self.compressor.sums:
            wait = self.summed(
                torch.cat([part.payload[0].reshape(-1) for part in parts]), COMPRESSED
            )
            return InFlight(parts, lambda: [wait()])
        kinds: list[list[Kinds]] = [
            [part.codec.like(part.payload, each) for part, each in zip(parts, entries, strict=True)]
            for entries in self._entries(parts)
        ]
        lengths = [length_of(each) for each in kinds]
        size = self.world.size
        plain = sum(part.vector.nbytes for part in parts)
        dense = sum(lengths) * (size - 1) // size >= computed_bytes("all_reduce", plain, size) > 0
        self._tell(parts, dense, sum(lengths) // size, plain)
        if dense:
            found = torch.cat(
                [
                    part.codec.extract(part.payload, part.agreed).to(part.vector.dtype)
                    for part in parts
                ]
            )
            wait = self.summed(found, DENSE)
            return InFlight(parts, lambda: [wait()], dense=True)
        return InFlight(
            parts,
            self._passing(
                packed((part.payload for part in parts), parts[0].vector.device), lengths
            ),
            kinds,
        )

    def _entries(self, parts: list[Part]) -> Sequence[Sequence[int | None]]:
        """Of each rank, how many entries each tensor's payload has; where none varies, nobody
        asks.
        """
        if not any(part.codec.varies for part in parts):
            return [[None] * len(parts)] * self.world.size
        own = torch.tensor([len(part.payload[0]) for part in parts])
        self.count(ENTRIES, computed_bytes("all_gather", own.nbytes, self.world.size))
        with self.log.span("exchange", "wait"):
            return [each.tolist() for each in self.world.gathered(own)]

    def _passing(self, own: Tensor, lengths: list[int]) -> Callable[[], list[Tensor]]:
        """Every rank's message to all others, of any lengths."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        came = {
            rank: torch.empty(lengths[rank], dtype=torch.uint8, device=own.device)
            for rank in others
        }
        over = self.world.passing(dict.fromkeys(others, own), came)
        self.count(COMPRESSED, len(own) * len(others))

        def wait() -> list[Tensor]:
            over()
            return [came.get(rank, own) for rank in range(self.world.size)]

        return wait

    def _tell(self, parts: list[Part], dense: bool, message: int, plain: int) -> None:
        if self.told.get(parts[0].name) != dense:
            self.told[parts[0].name] = dense
            self.log.choice(
                "message",
                "dense" if dense else str(self.compressor),
                f"{message:,} bytes to each of "
                f"{self.world.size - 1} others, of {plain:,} that an all-reduce sums",
                message,
            )

    # ---- when it came ------------------------------------------------------------------------
    def _of_sum(self, vector: Tensor, parts: list[Part]) -> dict[str, Tensor]:
        found = {}
        for part, piece in zip(
            parts, vector.split([part.payload[0].numel() for part in parts]), strict=True
        ):
            payload = (piece.view_as(part.payload[0]),)
            part.codec.summed(payload)
            found[part.name] = part.codec.extract(payload, part.agreed)
        return found

    def _of_all(self, messages: list[Tensor], sending: InFlight) -> dict[str, Tensor]:
        """Added up in the order of ranks, on all of them."""
        found = {part.name: torch.zeros_like(part.vector) for part in sending.parts}
        for message, kinds in zip(messages, sending.kinds, strict=True):
            for part, payload in zip(sending.parts, unpacked(message, kinds), strict=True):
                part.codec.add(payload, found[part.name], part.agreed)
        return found


def _split(vector: Tensor, parts: list[Part]) -> dict[str, Tensor]:
    pieces = vector.split([part.codec.elements for part in parts])
    return {part.name: piece for part, piece in zip(parts, pieces, strict=True)}


@contextlib.contextmanager
def naming(tensor: str) -> Iterator[None]:
    try:
        yield
    except StepFailed as error:
        raise StepFailed(error.message, tensor=tensor) from error
