"""What a rank writes of its steps into the record: spans, steps, memory."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

from paragrad.record.record import Recorder, encoded

# a step has four or more of these: put together by hand one takes a fifth of the time
_SPAN = '{"kind":"span","step":%d,"name":"%s","lane":"%s","start":%.6f,"seconds":%.6f,"bytes":%s,"peer":null}'


class Log:
    """The spans of the step under way, written together with its line, or when it fails. Without a recorder, nothing."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.spans: list[tuple[str, str, float, float, int | str]] = []     # name, lane, start, seconds, bytes

    def now(self) -> float:
        """Seconds since the run began."""
        return self.recorder.now() if self.recorder else 0.0

    @contextlib.contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:                        # also of what fails: until then
            self.add_span(name, lane, start)

    def add_span(self, name: str, lane: str, start: float, bytes: int | None = None, seconds: float | None = None) -> None:
        """seconds: otherwise it ends now."""
        if self.recorder:
            self.spans.append((name, lane, start, self.now() - start if seconds is None else seconds,
                               "null" if bytes is None else bytes))

    def step(self, number: int, start: float, **fields: Any) -> None:
        """The line of a step that began at `start`, after its spans."""
        if self.recorder:
            line = {"kind": "step", "step": number, "start": round(start, 6), "seconds": round(self.now() - start, 6), **fields}
            self.recorder.write_text([*self._spans_of(number), encoded(line)])

    def failed(self, number: int) -> None:
        """The spans of a step that will have no line."""
        if self.recorder and self.spans:
            self.recorder.write_text(self._spans_of(number))

    def _spans_of(self, number: int) -> list[str]:
        spans, self.spans = self.spans, []
        return [_SPAN % (number, *span) for span in spans]

    def choice(self, what: str, picked: str, because: str, bytes: int | None = None) -> None:
        if self.recorder:
            self.recorder.write("choice", what=what, bytes=bytes, picked=picked, because=because)

    def event(self, name: str, message: str, **numbers: float) -> None:
        if self.recorder:
            self.recorder.write("event", name=name, numbers=numbers, message=message)

    def memory(self, **fields: int) -> None:
        """Bytes that this rank holds, by kind."""
        if self.recorder:
            self.recorder.write("memory", **fields, resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
