"""What a rank writes of its steps into the record: spans, steps, memory."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

from paragrad.record.record import DETAILED_STEPS, Recorder, encode_json


class StepLog:
    """The spans of the step under way, written together with its line, or when it fails.
    Without a recorder, nothing.

    What is as in the step before is not written again, and `record.lines_of` puts it back: the
    fields of a step, and the names, lanes and bytes of its spans. So a step costs some 250
    bytes on every rank. always: tell every step in detail, with what a message costs a span
    each, not some early ones (DETAILED) alone.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.always_detailed = False
        self.steps_written = 0  # steps that were written
        # name, lane, start, seconds, bytes
        self.spans: list[tuple[str, str, float, float, int | None]] = []
        self.last_fields: dict[str, str] = {}  # the fields of the last step
        self.last_span_names: list[tuple[str, str, int | None]] = []  # the last step's spans

    def now(self) -> float:
        """Seconds since the run began."""
        return self.recorder.now() if self.recorder else 0.0

    def convert_moment(self, moment: float) -> float:
        """A moment of the monotonic clock, in the same."""
        return moment - self.recorder.origin if self.recorder else 0.0

    @property
    def is_detailed(self) -> bool:
        """Is the step under way told in detail?"""
        return self.recorder is not None and (
            self.always_detailed or self.steps_written in DETAILED_STEPS
        )

    def record_detail(self, name: str, lane: str) -> contextlib.AbstractContextManager[None]:
        """A span of those steps alone."""
        return self.record_span(name, lane) if self.is_detailed else contextlib.nullcontext()

    @contextlib.contextmanager
    def record_span(self, name: str, lane: str) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:  # also of what fails: until then
            self.add_span(name, lane, start)

    def add_span(
        self,
        name: str,
        lane: str,
        start: float,
        bytes: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """seconds: otherwise it ends now."""
        if self.recorder:
            self.spans.append(
                (name, lane, start, self.now() - start if seconds is None else seconds, bytes)
            )

    def write_step(self, number: int, start: float, **fields: Any) -> None:
        """The line of a step that began at `start`, after its spans."""
        if self.recorder:
            # as text: a value may change in place
            told = {name: encode_json(value) for name, value in fields.items()}
            new = "".join(
                f',"{name}":{text}'
                for name, text in told.items()
                if text != self.last_fields.get(name)
            )
            self.last_fields = told
            self.steps_written = self.steps_written + 1
            self.recorder.write_encoded(
                [
                    *self._encode_spans(number),
                    f'{{"kind":"step","step":{number},"start":{start:.6f},'
                    f'"seconds":{self.now() - start:.6f}{new}}}',
                ]
            )

    def write_failed_step(self, number: int) -> None:
        """The spans of a step that will have no line."""
        if self.recorder and self.spans:
            self.recorder.write_encoded(self._encode_spans(number))

    def _encode_spans(self, number: int) -> list[str]:
        """They are in one line, in an order that does not depend on which thread was
        quicker.
        """
        if not self.spans:
            return []
        spans, self.spans = sorted(self.spans, key=lambda span: span[0]), []
        start = min(span[2] for span in spans)
        named = [(name, lane, sent) for name, lane, _, _, sent in spans]
        new = "" if named == self.last_span_names else f',"spans":{encode_json(named)}'
        self.last_span_names = named
        micros = ",".join(
            [
                f"{int(1e6 * (each - start) + 0.5)},{int(1e6 * seconds + 0.5)}"
                for _, _, each, seconds, _ in spans
            ]
        )
        return [f'{{"kind":"spans","step":{number},"start":{start:.6f}{new},"micros":[{micros}]}}']

    def write_choice(self, what: str, picked: str, because: str, bytes: int | None = None) -> None:
        if self.recorder:
            self.recorder.write_line(
                "choice", what=what, bytes=bytes, picked=picked, because=because
            )

    def write_event(self, name: str, message: str, **numbers: float) -> None:
        if self.recorder:
            self.recorder.write_line("event", name=name, numbers=numbers, message=message)

    def write_memory(self, **fields: int) -> None:
        """Bytes that this rank holds, by kind."""
        if self.recorder:
            self.recorder.write_line(
                "memory",
                **fields,
                resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            )
