"""The grammar of strategies: text into calls, not yet resolved.

strategies = strategy { ";" strategy }          strategy = call { "*" call }
call       = name [ "(" [ argument { "," argument } ] ")" ]
argument   = [ name "=" ] value
value      = integer | decimal | "true" | "false" | call | "[" value { "," value } "]"
name       = word { "." word }                  a name of a module may have dots: h.2
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paragrad.errors import Refused


@dataclass(frozen=True)
class Call:
    """A call as written, not yet resolved: name, positional values, named values."""

    name: str
    positional: tuple[object, ...] = ()
    named: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return self.name


TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*(?:\.\w+)*)"
    r"|(?P<sign>[()\[\],=;*])|(?P<wrong>\S))"
)
QUOTES = ("'", '"')


class Reader:
    """One pass over the tokens of a text; every method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.tokens = [match for match in TOKEN.finditer(text) if match.lastgroup]
        for match in self.tokens:
            if match.group("wrong") in QUOTES:
                bare = text.translate(dict.fromkeys(map(ord, QUOTES)))
                self.refuse(f"names stand without quotes: {bare}", match.start("wrong"))
            if match.lastgroup == "wrong":
                self.refuse(f"cannot read {match.group('wrong')!r}", match.start("wrong"))

    def refuse(self, why: str, column: int | None = None) -> None:
        if column is None:
            token = self.tokens[self.at] if self.at < len(self.tokens) else None
            column = token.start(token.lastgroup or 0) if token else len(self.text)
        raise Refused(f"{why}\n    {self.text}\n    {' ' * column}^")

    def peek(self) -> str:
        return self.tokens[self.at].group().strip() if self.at < len(self.tokens) else ""

    def taken(self, sign: str) -> bool:
        self.at += (found := self.peek() == sign)
        return found

    def expect(self, sign: str) -> None:
        if not self.taken(sign):
            self.refuse(f"expected {sign!r} here")

    def listed(self, rule: Any, until: str) -> tuple[Any, ...]:
        """rule { "," rule } [ "," ] until a closing sign; may be empty."""
        items: list[Any] = []
        while not self.taken(until):
            if items:
                if not self.taken(","):
                    self.refuse(f"expected ',' or {until!r} here")
                if self.taken(until):
                    break
            items.append(rule())
        return tuple(items)

    def call(self) -> Call:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if token is None or token.lastgroup != "name":
            self.refuse("expected a name here")
        name = self.peek()
        self.at += 1
        arguments = self.listed(self.argument, ")") if self.taken("(") else ()
        positional = tuple(value for key, value in arguments if key is None)
        if any(key is None for key, _ in arguments[len(positional) :]):
            raise Refused(f"{name}: positional arguments come first, named ones after them")
        return Call(
            name, positional, tuple((key, value) for key, value in arguments if key is not None)
        )

    def argument(self) -> tuple[str | None, object]:
        after = self.tokens[self.at + 1].group().strip() if self.at + 1 < len(self.tokens) else ""
        if after == "=":
            key = self.peek()
            self.at += 2
            return key, self.value()
        return None, self.value()

    def value(self) -> object:
        if self.taken("["):
            return self.listed(self.value, "]")
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if token is not None and token.lastgroup == "number":
            text = self.peek()
            self.at += 1
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        call = self.call()
        if call.name in ("true", "false") and call == Call(call.name):
            return call.name == "true"
        return call

    def finished(self) -> None:
        if self.at < len(self.tokens):
            self.refuse("nothing more was expected here")


def parse_call(text: str) -> Call:
    """One call, such as `ring_async(segments=4)`."""
    reader = Reader(text)
    call = reader.call()
    reader.finished()
    return call


def parse_products(text: str) -> tuple[tuple[Call, ...], ...]:
    """`a * b; c` as ((a, b), (c,)); a trailing `;` is allowed."""
    reader = Reader(text)
    products: list[tuple[Call, ...]] = []
    while reader.peek():
        factors = [reader.call()]
        while reader.taken("*"):
            factors.append(reader.call())
        products.append(tuple(factors))
        if not reader.taken(";"):
            break
    if reader.peek() == ",":
        reader.refuse("between strategies stands ; and not ,")
    reader.finished()
    if not products:
        raise Refused("no strategy was given; write for example data(2, reduce=ring)")
    return tuple(products)
