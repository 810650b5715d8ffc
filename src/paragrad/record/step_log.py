"""What a rank writes about its steps into the record: spans, steps, memory."""

from __future__ import annotations

import contextlib
import math
import resource
import time
from functools import partial
from typing import Any, TypeAlias

from paragrad.record.record import DETAILED_STEPS, Recorder, encode_json

NO_SPAN = contextlib.nullcontext()
# name, lane, start, seconds, bytes
SpanFields: TypeAlias = tuple[str, str, float, float, int | None]


class Span:
    """Records the time of a block as a span. A class, since a generator takes four times as long.

    Args:
        log: The log.
        name: The name of the span.
        lane: Its lane.
    """

    __slots__ = ("lane", "log", "name", "start")

    def __init__(self, log: StepLog, name: str, lane: str) -> None:
        self.log = log
        self.name = name
        self.lane = lane

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *error: object) -> None:
        # a span of a block that fails ends at the failure
        self.log.end_span(self.name, self.lane, self.start)


class StepLog:
    """Collects the spans of a step and writes them with the step's line, or when it fails.

    Without a recorder it does nothing. Values that equal those of the previous step are not
    written; `record.read_lines` restores them. These are the fields of a step, and the names, lanes
    and bytes of its spans. A step costs about 250 bytes on each rank.

    Attributes:
        recorder: The recorder, or None.

        is_recorded: Whether steps are recorded.

        origin: The start of the run on the monotonic clock, in seconds; 0.0 without a recorder.

        always_detailed: Write all steps in detail, with a span for each message, and not only those
            of DETAILED_STEPS.

        steps_written: The number of steps written so far.

        spans: The spans of the current step: (name, lane, start, seconds, bytes).

        last_fields: The fields of the last step, as text.

        last_span_names: The name, lane and bytes of each span of the last step.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.is_recorded = recorder is not None
        self.origin = recorder.origin if recorder else 0.0
        self.always_detailed = False
        self.steps_written = 0
        self.spans: list[SpanFields] = []
        self.last_fields: dict[str, str] = {}
        self.last_span_names: list[tuple[str, str, int | None]] = []

    def write_all_details(self) -> None:
        """Write all steps in detail from here on."""
        self.always_detailed = True

    def forget_spans(self, count: int) -> None:
        """Forget the spans of the current step, except the first ones.

        Args:
            count: The number of spans that stay.
        """
        del self.spans[count:]

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self.origin if self.recorder else 0.0

    def convert_moment(self, moment: float) -> float:
        """Convert a time of the monotonic clock to seconds since the start of the run.

        Args:
            moment: The time, in seconds.

        Returns:
            The seconds.
        """
        return moment - self.origin if self.recorder else 0.0

    @property
    def is_detailed(self) -> bool:
        """Whether the current step is written in detail."""
        return self.recorder is not None and (
            self.always_detailed or self.steps_written in DETAILED_STEPS
        )

    def record_detail(self, name: str, lane: str) -> contextlib.AbstractContextManager[None]:
        """Record a span, in steps that are written in detail only.

        Args:
            name: The name of the span.
            lane: Its lane.

        Returns:
            A context manager.
        """
        return self.record_span(name, lane) if self.is_detailed else NO_SPAN

    def record_span(self, name: str, lane: str) -> contextlib.AbstractContextManager[None]:
        """Record the time of a block as a span.

        Args:
            name: The name of the span.
            lane: Its lane.

        Returns:
            A context manager.
        """
        return Span(self, name, lane) if self.recorder else NO_SPAN

    def end_span(self, name: str, lane: str, started: float) -> None:
        """End a span that every step has.

        Args:
            name: The name of the span.
            lane: Its lane.
            started: Its start on the monotonic clock, in seconds.
        """
        if self.is_recorded:
            seconds = time.monotonic() - started
            self.spans.append((name, lane, started - self.origin, seconds, None))

    def add_span(
        self,
        name: str,
        lane: str,
        start: float,
        bytes: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Add a span to the current step.

        Args:
            name: The name of the span.

            lane: Its lane.

            start: Its start, in seconds since the start of the run.

            bytes: The bytes it moved, or None.

            seconds: Its duration; None means that it ends now.
        """
        if self.recorder:
            self.spans.append(
                (name, lane, start, self.now() - start if seconds is None else seconds, bytes)
            )

    def write_step(self, number: int, start: float, **fields: Any) -> None:
        """Write the line of a step, after its spans.

        Args:
            number: The number of the step.

            start: Its start, in seconds since the start of the run.

            **fields: The other fields of the line. They are encoded later, so nothing may change
                them.
        """
        if self.recorder:
            self.steps_written = self.steps_written + 1
            spans, self.spans = self.spans, []
            seconds = time.monotonic() - self.origin - start
            self.recorder.write_later(
                partial(self._encode_step, number, start, seconds, spans, fields)
            )

    def write_failed_step(self, number: int) -> None:
        """Write the spans of a step that failed and gets no line.

        Args:
            number: The number of the step.
        """
        if self.recorder and self.spans:
            self.recorder.write_later(partial(self._encode_spans, number, self._take_spans()))
            self.recorder.flush()

    def flush(self) -> None:
        """Write the steps that wait to be written."""
        if self.recorder:
            self.recorder.flush()

    def _take_spans(self) -> list[SpanFields]:
        spans, self.spans = self.spans, []
        return spans

    def _encode_step(
        self,
        number: int,
        start: float,
        seconds: float,
        spans: list[SpanFields],
        fields: dict[str, Any],
    ) -> list[str]:
        """The lines of a step."""
        texts = {name: encode_field(value) for name, value in fields.items()}
        changed = "".join(
            f',"{name}":{text}'
            for name, text in texts.items()
            if text != self.last_fields.get(name)
        )
        self.last_fields = texts
        return [
            *self._encode_spans(number, spans),
            f'{{"kind":"step","step":{number},"start":{start:.6f},'
            f'"seconds":{seconds:.6f}{changed}}}',
        ]

    def _encode_spans(self, number: int, spans: list[SpanFields]) -> list[str]:
        """The spans of a step as one line.

        They are sorted by name, so the order does not depend on which thread was faster.
        """
        if not spans:
            return []
        spans = sorted(spans, key=lambda span: span[0])
        start = min(span[2] for span in spans)
        span_names = [(name, lane, sent) for name, lane, _, _, sent in spans]
        changed = (
            "" if span_names == self.last_span_names else f',"spans":{encode_json(span_names)}'
        )
        self.last_span_names = span_names
        micros = ",".join(
            [
                f"{int(1e6 * (each - start) + 0.5)},{int(1e6 * seconds + 0.5)}"
                for _, _, each, seconds, _ in spans
            ]
        )
        return [
            f'{{"kind":"spans","step":{number},"start":{start:.6f}{changed},"micros":[{micros}]}}'
        ]

    def write_choice(self, what: str, picked: str, because: str, bytes: int | None = None) -> None:
        """Write a choice that was made automatically.

        Args:
            what: What was chosen.
            picked: The choice.
            because: The reason.
            bytes: The bytes that it concerns, or None.
        """
        if self.recorder:
            self.recorder.write_line(
                "choice", what=what, bytes=bytes, picked=picked, because=because
            )

    def write_event(self, name: str, message: str, **numbers: float) -> None:
        """Write an event.

        Args:
            name: The name of the event.
            message: The message for people.
            **numbers: Its numbers.
        """
        if self.recorder:
            self.recorder.write_line("event", name=name, numbers=numbers, message=message)

    def write_memory(self, **fields: int) -> None:
        """Write the bytes that this rank holds, with the peak memory of its process.

        Args:
            **fields: Bytes by kind.
        """
        if self.recorder:
            self.recorder.write_line(
                "memory",
                **fields,
                resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            )


def encode_field(value: Any) -> str:
    """Encode a value as JSON. Numbers and lists of numbers take a fifth of the usual time.

    Args:
        value: The value of a field.
    """
    kind = type(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is list:
        return f"[{','.join(map(encode_field, value))}]"
    if kind is dict and not value:
        return "{}"
    return encode_json(value)
