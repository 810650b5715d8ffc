"""Messages between workers and servers: a header of fixed size, then raw bytes.

Every field of the header is checked, and nothing is unpickled. A message is [header, marks,
vector]; the last two may be empty. The marks have one byte for each tensor of a slice. The vector
has the elements of all tensors, one after another, or their location in shared memory
(`shared_buffer.py`).

A message is refused if it does not match its header, or if its receiver does not expect it. The
answer says what is wrong with it, and nothing of the message is used.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MAGIC = b"pgr3"  # the last character is the version of the format
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
    """The types of messages: requests of workers, and answers.

    Attributes:
        PUSH: Gradients of a slice in a step, summed over a share. Numbers: weight, loss, stop
            request, doubtful weight, samples. With a work queue the numbers are weight, workers
            present, 0, samples.
        UPDATE: Update by the mean gradient and answer with a vector of parameters. Numbers: the
            divisor, and the factor by which the result is multiplied.
        PULL: Answer with a vector of parameters. Numbers: 1 if they are for a test, 1 if they are
            for no step.
        GRADIENTS: Answer with a vector of gradients, as the last update used them or the next one
            will.
        STATE: Answer with the optimizer state.
        END: The sender leaves.
        FORGET: Forget the sum of gradients of a step that will not be made.
        NEXT: Ask the work queue for a ticket. Text: [worker number, finished ticket or null, its
            report].
        JOIN: Ask the work queue to take part, from another host. Text: what the sender would train
            (JSON).
        LEAVE: Tell the work queue that the sender leaves. Text: as in NEXT.
        DONE: Answer: it is done. Numbers in bsp: the sums of all shares, and the squared norm of
            the gradient.
        VALUES: Answer: a vector.
        REFUSED: Answer: the reason of a refusal, as text.
        GIVEN: Answer: a ticket, or the counts of a server, as text.
        JOINED: Answer: worker number, training, and addresses of its servers (JSON).
        WAIT: Answer to REMIND: the request has arrived and is not answered yet.
        BUFFERS: In bsp, buffers that forward passes changed in a step (tensors by name, as torch
            saves them). Without a payload: answer with all that changed until now.
        HALT: From the launching process, when workers are gone. Their requests count no more.
            Version: the new number of the training. The answer has the counts of the server as
            text.
        PROBE: Ask whether vectors can be in shared memory. Vector: location of a vector of the
            sender. Answer: the number 1 if it can be read; the location of a vector of the server,
            or (marks) the reason why there is none.
        REMIND: Ask whether a request without an answer (call) has arrived. Step: number of the
            reminder.
        MISSED: Answer to REMIND: it has not arrived. The sender sends it again, if it has not done
            so since.
        EXCLUDE: No worker shall wait for the sender until its next pull, because it waits for the
            others.
        RESUME: Workers begin again. Numbers: 1 if a complete step is to be made, and those of
            UPDATE.
    """

    PUSH = 1
    UPDATE = 2
    PULL = 3
    GRADIENTS = 4
    STATE = 5
    END = 6
    FORGET = 7
    NEXT = 8
    JOIN = 9
    LEAVE = 10
    DONE = 11
    VALUES = 12
    REFUSED = 13
    GIVEN = 14
    JOINED = 15
    WAIT = 16
    BUFFERS = 19
    HALT = 17
    PROBE = 20
    REMIND = 21
    MISSED = 22
    EXCLUDE = 23
    RESUME = 18


class InvalidMessage(ValueError):
    """A message that is refused.

    Args:
        reason: The reason, which contains no text of the sender.
        sender_text: The text for the sender, if it is more than the reason.

    Attributes:
        sender_text: The text for the sender.
    """

    def __init__(self, reason: str, sender_text: str | None = None) -> None:
        super().__init__(reason)
        self.sender_text = reason if sender_text is None else sender_text


@dataclass(frozen=True)
class Header:
    """The header of a message.

    Attributes:
        kind: The type of the message.

        job: The number of the training.

        sender: A random number that each process draws for itself.

        step: Number of the step; with a work queue, number of the ticket.

        version: Number of updates made when the sender pulled.

        share: Number of the share in the step.

        shares: Number of shares of the step.

        slot: Number of the vector in the slice.

        call: Number of the request. Its answer has the same number.

        dtype: Dtype of the vector.

        elements: Number of elements of the vector.

        is_shared: Whether the message has the location of the vector in shared memory, instead of
            the vector. In UPDATE it allows this for the answer.

        numbers: Numbers that depend on the type.
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
        """Return the header as bytes."""
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
        """Return the header of an answer to this message.

        Args:
            kind: The type of the answer.
            fields: Other fields of the answer.
        """
        return replace(self, kind=kind, **{"elements": 0, "is_shared": False, **fields})


def unpack_header(frame: bytes) -> Header:
    """Read a header.

    Args:
        frame: The bytes.

    Raises:
        InvalidMessage: The bytes are no header.
    """
    if len(frame) != HEADER_STRUCT.size:
        raise InvalidMessage(f"a header of {len(frame)} bytes, which has {HEADER_STRUCT.size}")
    (
        magic,
        kind,
        dtype,
        is_shared,
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
        is_shared,
        tuple(numbers),
    )


def view_vector(header: Header, frame: Any) -> Tensor:
    """Return the vector after a header, as a view of the bytes of its frame.

    It is a copy if the address is not aligned to the dtype. (torch ends a process that adds complex
    numbers at an odd address.)

    Args:
        header: The header, with dtype and number of elements.
        frame: The bytes of the vector.

    Raises:
        InvalidMessage: The length differs from the header.
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
    """Return the bytes of a contiguous vector, without a copy.

    Args:
        vector: The vector.
    """
    return memoryview(vector.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
