"""What travels between workers and servers: a header of fixed size, every field of which is
checked, then raw bytes.

Nothing is unpickled. A message is [header, marks, vector], the last two may be empty: a byte
for every tensor of a slice, and the elements of all of them, one after another, or where they
lie (`shelf.py`). A message that is not as the header says, or not what its receiver waits for,
is refused by a word that says what is wrong with it; nothing of it is used.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MAGIC = b"pgr3"  # the version of this format is its last letter
NUMBER_COUNT = 5
HEADER_STRUCT = struct.Struct(f"<4s2B?xQQqqIIIIQ{NUMBER_COUNT}d")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int64,
    torch.int8,
    torch.int16,
    torch.int32,
)


class MessageType(enum.IntEnum):
    """What a message is: what workers ask, and what they are answered."""

    # of a step: gradients of a slice, summed over a share;  numbers: weight, loss, stop, doubt,
    # samples;
    PUSH = 1
    # where samples are handed out, weight, workers that are there, 0,
    # samples
    # by the mean gradient, and a vector of parameters;  numbers: its divisor, what it is
    # multiplied by then
    UPDATE = 2
    # a vector of parameters;  numbers: 1 where they are wanted as for a test, 1 where it is for
    # no step
    PULL = 3
    GRADIENTS = 4  # the same of gradients: as the last update used them, or will
    STATE = 5  # the optimizer's
    END = 6  # who asks leaves
    FORGET = 7  # the sum of gradients of a step that is not to be made
    # of the office: what is to be done;  text: [who, the ticket that is done or null, what to
    # say of it]
    NEXT = 8
    # of the office: may it take part, from elsewhere?  text: what it would train (JSON)
    JOIN = 9
    LEAVE = 10  # of the office: it does no more;  text: as of NEXT
    # answer: it is;  numbers: under bsp, the sums of all shares, and the square of the
    # gradient's norm
    DONE = 11
    VALUES = 12  # answer: a vector
    REFUSED = 13  # answer: why, as text
    GIVEN = 14  # answer: a ticket, or where a server stands, as text
    JOINED = 15  # answer: as whom, in what training, and where its servers are (JSON)
    WAIT = 16  # answer to a reminder: it is there, and not yet answered
    # under bsp, what forwards changed beside the parameters in a step, tensors by name as torch
    # saves them;
    BUFFERS = 19
    # without it, what they did until now
    # of the launching process, where workers are gone: nothing of theirs counts any more;
    # version: the
    HALT = 17
    # training's number from here on;  answered by where the server stands,
    # as text
    # may vectors lie?  vector: where one of the asker's does;  answered by numbers: 1 where it
    # can be read,
    PROBE = 20
    # and where one of the server's lies, or (marks) why none does
    # whether a question that has no answer yet (call) is there;  step: how often that was asked
    REMIND = 21
    # answer to that: it is not, and is to be asked again, whole, if it was not since
    MISSED = 22
    # nobody is to wait for the asker until it pulls again: it is to meet the others
    EXCLUDE = 23
    # workers begin again;  numbers: 1 where a step that is there is to be made, and as UPDATE
    # has them
    RESUME = 18


class InvalidMessage(ValueError):
    """A message that is refused; the text says why, in words of ours alone. told: to who sent
    it, where that is more.
    """

    def __init__(self, reason: str, sender_text: str | None = None) -> None:
        super().__init__(reason)
        self.sender_text = reason if sender_text is None else sender_text


@dataclass(frozen=True)
class Header:
    """kind, and of what: the training's own number (job), who sent it (sender: a number that
    every process draws for itself), step: of a synchronous training, otherwise the number of
    the samples' ticket;  version: updates that had been made when the sender pulled;  share of
    shares;  slot: which of a slice's vectors, of how many elements of that type;  call: the
    number of the question, which its answer has too;  lies: what follows is where they are, not
    themselves (of UPDATE: so may the answer's);  numbers: by kind.
    """

    kind: MessageType
    job: int
    sender: int = 0
    step: int = 0
    version: int = 0
    share: int = 0
    shares: int = 1
    slot: int = 0
    call: int = 0
    dtype: torch.dtype = torch.float32
    elements: int = 0
    is_shared: bool = False
    numbers: tuple[float, ...] = ()

    def pack_header(self) -> bytes:
        numbers = *self.numbers, *[0.0] * (NUMBER_COUNT - len(self.numbers))
        return HEADER_STRUCT.pack(
            MAGIC,
            self.kind,
            DTYPES.index(self.dtype),
            self.is_shared,
            self.job,
            self.sender,
            self.step,
            self.version,
            self.share,
            self.shares,
            self.slot,
            self.call,
            self.elements,
            *numbers,
        )

    def make_answer(self, kind: MessageType, **fields: Any) -> Header:
        """To be sent back to whom this came from."""
        return replace(self, kind=kind, **{"elements": 0, "lies": False, **fields})


def unpack_header(frame: bytes) -> Header:
    """Raises Unfit."""
    if len(frame) != HEADER_STRUCT.size:
        raise InvalidMessage(f"a header of {len(frame)} bytes, which has {HEADER_STRUCT.size}")
    (
        magic,
        kind,
        dtype,
        lies,
        job,
        sender,
        step,
        version,
        share,
        shares,
        slot,
        call,
        elements,
        *numbers,
    ) = HEADER_STRUCT.unpack(frame)
    if magic != MAGIC:
        raise InvalidMessage("no message of paragrad's, or one of another version")
    if kind not in MessageType.__members__.values():
        raise InvalidMessage(f"a message of no known kind ({kind})")
    if dtype >= len(DTYPES):
        raise InvalidMessage(f"numbers of no known type ({dtype})")
    return Header(
        MessageType(kind),
        job,
        sender,
        step,
        version,
        share,
        shares,
        slot,
        call,
        DTYPES[dtype],
        elements,
        lies,
        tuple(numbers),
    )


def view_vector(header: Header, frame: Any) -> Tensor:
    """The elements that follow a header, where the frame's bytes lie; a copy where numbers of
    that type must not lie there (torch ends the process that adds up complex numbers at an odd
    address). Raises Unfit.
    """
    wanted = header.elements * header.dtype.itemsize
    if len(frame) != wanted:
        raise InvalidMessage(f"{len(frame)} bytes, where its header says {wanted}")
    if not wanted:
        return torch.empty(0, dtype=header.dtype)
    if torch.frombuffer(frame, dtype=torch.uint8).data_ptr() % header.dtype.itemsize:
        frame = bytearray(frame)
    return torch.frombuffer(frame, dtype=header.dtype)


def view_bytes(vector: Tensor) -> memoryview:
    """Of a contiguous vector, where it lies."""
    return memoryview(vector.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
