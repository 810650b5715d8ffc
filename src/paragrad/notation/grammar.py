"""The grammar of strategies: from text to calls that are not resolved yet.

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
class CallExpression:
    """A call as written, not resolved yet.

    Attributes:
        name: The name.
        positional: The positional values.
        named: The named values, as (name, value).
    """

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


class StrategyParser:
    """One pass over the tokens of a text; each parse method reads one rule of the grammar.

    Attributes:
        text: The text.
        position: The index of the next token.
        tokens: The tokens.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.tokens = [match for match in TOKEN.finditer(text) if match.lastgroup]
        for match in self.tokens:
            if match.group("wrong") in QUOTES:
                bare = text.translate(dict.fromkeys(map(ord, QUOTES)))
                self.refuse_syntax(f"write names without quotes: {bare}", match.start("wrong"))
            if match.lastgroup == "wrong":
                self.refuse_syntax(f"cannot read {match.group('wrong')!r}", match.start("wrong"))

    def refuse_syntax(self, why: str, column: int | None = None) -> None:
        """Raise Refused with the text and a mark at a column.

        Args:
            why: The message.
            column: The column, or None for the next token.

        Raises:
            Refused: Always.
        """
        if column is None:
            token = self.tokens[self.position] if self.position < len(self.tokens) else None
            column = token.start(token.lastgroup or 0) if token else len(self.text)
        raise Refused(f"{why}\n    {self.text}\n    {' ' * column}^")

    def peek_token(self) -> str:
        """Return the next token, or an empty text at the end."""
        return (
            self.tokens[self.position].group().strip() if self.position < len(self.tokens) else ""
        )

    def accept_token(self, sign: str) -> bool:
        """Go past the next token if it is this sign.

        Args:
            sign: The sign.

        Returns:
            Whether it was.
        """
        self.position += (is_sign := self.peek_token() == sign)
        return is_sign

    def expect_token(self, sign: str) -> None:
        """Go past this sign.

        Args:
            sign: The sign.

        Raises:
            Refused: The next token is another one.
        """
        if not self.accept_token(sign):
            self.refuse_syntax(f"expected {sign!r} here")

    def parse_list(self, rule: Any, until: str) -> tuple[Any, ...]:
        """Parse rule { "," rule } [ "," ] up to a closing sign; the list may be empty.

        Args:
            rule: The method that parses an item.
            until: The closing sign.

        Returns:
            The items.
        """
        items: list[Any] = []
        while not self.accept_token(until):
            if items:
                if not self.accept_token(","):
                    self.refuse_syntax(f"expected ',' or {until!r} here")
                if self.accept_token(until):
                    break
            items.append(rule())
        return tuple(items)

    def parse_call_rule(self) -> CallExpression:
        """Parse a call."""
        token = self.tokens[self.position] if self.position < len(self.tokens) else None
        if token is None or token.lastgroup != "name":
            self.refuse_syntax("expected a name here")
        name = self.peek_token()
        self.position += 1
        arguments = self.parse_list(self.parse_argument, ")") if self.accept_token("(") else ()
        positional = tuple(value for key, value in arguments if key is None)
        if any(key is None for key, _ in arguments[len(positional) :]):
            raise Refused(f"{name}: positional arguments come first, named ones after them")
        return CallExpression(
            name, positional, tuple((key, value) for key, value in arguments if key is not None)
        )

    def parse_argument(self) -> tuple[str | None, object]:
        """Parse an argument: (name or None, value)."""
        next_token = (
            self.tokens[self.position + 1].group().strip()
            if self.position + 1 < len(self.tokens)
            else ""
        )
        if next_token == "=":
            key = self.peek_token()
            self.position += 2
            return key, self.parse_value()
        return None, self.parse_value()

    def parse_value(self) -> object:
        """Parse a value."""
        if self.accept_token("["):
            return self.parse_list(self.parse_value, "]")
        token = self.tokens[self.position] if self.position < len(self.tokens) else None
        if token is not None and token.lastgroup == "number":
            text = self.peek_token()
            self.position += 1
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        call = self.parse_call_rule()
        if call.name in ("true", "false") and call == CallExpression(call.name):
            return call.name == "true"
        return call

    def expect_end(self) -> None:
        """Check that the text ends here.

        Raises:
            Refused: There is more text.
        """
        if self.position < len(self.tokens):
            self.refuse_syntax("nothing more was expected here")


def parse_call(text: str) -> CallExpression:
    """Parse one call, such as `ring_async(segments=4)`.

    Args:
        text: The text.

    Returns:
        The call.

    Raises:
        Refused: The text has another form.
    """
    reader = StrategyParser(text)
    call = reader.parse_call_rule()
    reader.expect_end()
    return call


def parse_products(text: str) -> tuple[tuple[CallExpression, ...], ...]:
    """Parse strategies: `a * b; c` becomes ((a, b), (c,)). A trailing `;` is allowed.

    Args:
        text: The text.

    Returns:
        For each strategy its factors.

    Raises:
        Refused: The text has another form.
    """
    reader = StrategyParser(text)
    products: list[tuple[CallExpression, ...]] = []
    while reader.peek_token():
        factors = [reader.parse_call_rule()]
        while reader.accept_token("*"):
            factors.append(reader.parse_call_rule())
        products.append(tuple(factors))
        if not reader.accept_token(";"):
            break
    if reader.peek_token() == ",":
        reader.refuse_syntax("write ; between strategies, not ,")
    reader.expect_end()
    if not products:
        raise Refused("no strategy was given; write for example data(2, reduce=ring)")
    return tuple(products)
