"""What a rank writes of its steps into the record: spans, steps, memory."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

from paragrad.record.record import DETAILED, Recorder, encoded


class Log:
    """The spans of the step under way, written together with its line, or when it fails.
    Without a recorder, nothing.

    What is as in the step before is not written again, and `record.lines_of` puts it back: the
    fields of a step, and the names, lanes and bytes of its spans. So a step costs some 250
    bytes on every rank. always: tell every step in detail, with what a message costs a span
    each, not some early ones (DETAILED) alone.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.always = False
        self.turn = 0  # steps that were written
        # name, lane, start, seconds, bytes
        self.spans: list[tuple[str, str, float, float, int | None]] = []
        self.before: dict[str, str] = {}  # the fields of the last step
        self.named: list[tuple[str, str, int | None]] = []  # the last step's spans

    def now(self) -> float:
        """Seconds since the run began."""
        return self.recorder.now() if self.recorder else 0.0

    def at(self, moment: float) -> float:
        """A moment of the monotonic clock, in the same."""
        return moment - self.recorder.origin if self.recorder else 0.0

    @property
    def detailed(self) -> bool:
        """Is the step under way told in detail?"""
        return self.recorder is not None and (self.always or self.turn in DETAILED)

    def detail(self, name: str, lane: str) -> contextlib.AbstractContextManager[None]:
        """A span of those steps alone."""
        return self.span(name, lane) if self.detailed else contextlib.nullcontext()

    @contextlib.contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
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

    def step(self, number: int, start: float, **fields: Any) -> None:
        """The line of a step that began at `start`, after its spans."""
        if self.recorder:
            # as text: a value may change in place
            told = {name: encoded(value) for name, value in fields.items()}
            new = "".join(
                f',"{name}":{text}' for name, text in told.items() if text != self.before.get(name)
            )
            self.before = told
            self.turn = self.turn + 1
            self.recorder.write_text(
                [
                    *self._spans_of(number),
                    f'{{"kind":"step","step":{number},"start":{start:.6f},'
                    f'"seconds":{self.now() - start:.6f}{new}}}',
                ]
            )

    def failed(self, number: int) -> None:
        """The spans of a step that will have no line."""
        if self.recorder and self.spans:
            self.recorder.write_text(self._spans_of(number))

    def _spans_of(self, number: int) -> list[str]:
        """They are in one line, in an order that does not depend on which thread was
        quicker.
        """
        if not self.spans:
            return []
        spans, self.spans = sorted(self.spans, key=lambda span: span[0]), []
        start = min(span[2] for span in spans)
        named = [(name, lane, sent) for name, lane, _, _, sent in spans]
        new = "" if named == self.named else f',"spans":{encoded(named)}'
        self.named = named
        micros = ",".join(
            [
                f"{int(1e6 * (each - start) + 0.5)},{int(1e6 * seconds + 0.5)}"
                for _, _, each, seconds, _ in spans
            ]
        )
        return [f'{{"kind":"spans","step":{number},"start":{start:.6f}{new},"micros":[{micros}]}}']

    def choice(self, what: str, picked: str, because: str, bytes: int | None = None) -> None:
        if self.recorder:
            self.recorder.write("choice", what=what, bytes=bytes, picked=picked, because=because)

    def event(self, name: str, message: str, **numbers: float) -> None:
        if self.recorder:
            self.recorder.write("event", name=name, numbers=numbers, message=message)

    def memory(self, **fields: int) -> None:
        """Bytes that this rank holds, by kind."""
        if self.recorder:
            self.recorder.write(
                "memory",
                **fields,
                resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            )
