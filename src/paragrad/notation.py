"""The notation of strategies: choices are frozen values that print as the call that makes them, and parse back.

    strategies = strategy { ";" strategy }          strategy = call { "*" call }
    call       = name [ "(" [ argument { "," argument } ] ")" ]
    argument   = [ name "=" ] value
    value      = integer | decimal | "true" | "false" | call | "[" value { "," value } "]"

A choice is a frozen dataclass whose fields are made by `option(...)`: which kinds of value it takes, and its default.
A bare word (`auto`, `replicated`) is a string; `none` is None; a technique (`ring`, `top_k(0.01)`) is a choice itself.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

from paragrad.errors import Refused

T = TypeVar("T")


# ---- what a field takes ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Integer:
    """A whole number from `least`."""
    least: int = 1

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= self.least

    def __str__(self) -> str:
        return f"a whole number from {self.least}"


@dataclass(frozen=True)
class Decimal:
    """A number above `above`, at most `most`."""
    above: float = 0.0
    most: float = float("inf")

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and self.above < value <= self.most

    def __str__(self) -> str:
        return f"a number above {self.above:g}" + (f", at most {self.most:g}" if self.most < float("inf") else "")


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Integers:
    """A list of whole numbers from `least`, such as [3, 1]."""
    least: int = 1

    def __contains__(self, value: object) -> bool:
        return isinstance(value, tuple) and bool(value) and all(number in Integer(self.least) for number in value)

    def __str__(self) -> str:
        return f"a list of whole numbers from {self.least}, such as [3, 1]"


class Word:
    """One of some bare words; `none` stands for None."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __contains__(self, value: object) -> bool:
        return (value is None and "none" in self.names) or value in self.names

    def __str__(self) -> str:
        return " or ".join(self.names)


class One:
    """One of some choices: `One(Ring, Tree)` takes Ring(), "ring" and ring(...)."""

    def __init__(self, *classes: type[Choice]) -> None:
        self.classes = classes

    def __contains__(self, value: object) -> bool:
        return isinstance(value, self.classes)

    def __str__(self) -> str:
        return "one of " + ", ".join(cls.name for cls in self.classes)


Kind = Integer | Decimal | Flag | Integers | Word | One


def option(*kinds: Kind, default: Any = MISSING, later: tuple[object, ...] = ()) -> Any:
    """A field of a choice: the kinds of value it takes; `later`: values known by name and not built yet."""
    return field(default=default, metadata={"kinds": kinds, "later": later})


# ---- choices -------------------------------------------------------------------------------------------------------
class Choice:
    """A frozen value that checks its fields, prints as the call that makes it and parses back to an equal value."""
    __slots__ = ()
    name: ClassVar[str]
    built: ClassVar[bool] = True                    # False: known by name, refused at the door

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    def __post_init__(self) -> None:
        for spec in options_of(type(self)):
            given = getattr(self, spec.name)
            value = _fitted(given, spec, self.name)
            if value is not given:
                object.__setattr__(self, spec.name, value)
        self.check()

    def check(self) -> None:
        """Refuse options that do not fit together."""

    def __str__(self) -> str:
        arguments = [(spec, getattr(self, spec.name)) for spec in options_of(type(self))]
        shown = [_text(value) if spec.default is MISSING else f"{spec.name}={_text(value)}"
                 for spec, value in arguments if spec.default is MISSING or value != spec.default]
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def __repr__(self) -> str:
        arguments = [(spec, getattr(self, spec.name)) for spec in options_of(type(self))]
        shown = [repr(value) if spec.default is MISSING else f"{spec.name}={value!r}"
                 for spec, value in arguments if spec.default is MISSING or value != spec.default]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
def choice(cls: type[T]) -> type[T]:
    """Make a Choice a frozen dataclass that keeps the Choice's own printing."""
    return dataclass(frozen=True, repr=False)(cls)


def options_of(cls: type[Choice]) -> tuple[Field[Any], ...]:
    return fields(cls)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)


def _fitted(value: object, spec: Field[Any], owner: str) -> object:
    """The value as the field keeps it (a list as a tuple, text and calls resolved), or Refused."""
    kinds: tuple[Kind, ...] = spec.metadata["kinds"]
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, str) and not any(value in kind for kind in kinds):
        value = parse_call(value)
    if isinstance(value, Call):
        value = _resolved(value, kinds, f"{owner}({spec.name}=...)")
    if value == "none" and any(None in kind for kind in kinds):
        value = None
    if not any(value in kind for kind in kinds):
        takes = " or ".join(map(str, kinds))
        raise Refused(f"{owner}({spec.name}=...) takes {takes}; got {_text(value)}")
    return value


def _resolved(call: Call, kinds: Iterable[Kind], where: str) -> object:
    """A call in the place of a value: a bare word of the field, or one of its choices."""
    words = [name for kind in kinds if isinstance(kind, Word) for name in kind.names]
    classes = [cls for kind in kinds if isinstance(kind, One) for cls in kind.classes]
    if call.name in words and not call.positional and not call.named:
        return call.name
    return build(call, {cls.name: cls for cls in classes}, where, words)


def build(call: Call, classes: dict[str, type[Choice]], where: str, words: Iterable[str] = ()) -> Choice:
    """The choice that a call names, or Refused with the nearest name."""
    if call.name not in classes:
        raise Refused(f"{where}: " + unknown("name", call.name, [*classes, *words]))
    cls = classes[call.name]
    names = [spec.name for spec in options_of(cls)]
    if len(call.positional) > len(names):
        takes = f"at most {len(names)}: {', '.join(names)}" if names else "no arguments"
        raise Refused(f"{call.name} takes {takes}; got {len(call.positional)}")
    arguments = dict(zip(names, call.positional, strict=False))
    for name, value in call.named:
        if name not in names:
            raise Refused(f"{call.name}: " + unknown("option", name, names))
        if name in arguments:
            raise Refused(f"{call.name}: option {name} is given twice; give it once")
        arguments[name] = value
    missing = [spec.name for spec in options_of(cls) if spec.default is MISSING and spec.name not in arguments]
    if missing:
        raise Refused(f"{call.name} needs {', '.join(missing)}: write {call.name}({', '.join(missing)})")
    return cls(**arguments)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message about a name nobody knows, with the nearest one offered."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    offer = f"did you mean {near[0]}?" if near else "known: " + (", ".join(known) or "none")
    return f"no {what} {name!r}; {offer}"


def parts_of(value: object) -> Iterator[tuple[Choice, Field[Any], object]]:
    """Every field of a choice and of the choices inside it: (owner, field, value)."""
    if isinstance(value, Choice):
        for spec in options_of(type(value)):
            inner = getattr(value, spec.name)
            yield value, spec, inner
            yield from parts_of(inner)
    elif isinstance(value, tuple):
        for item in value:
            yield from parts_of(item)


# ---- parsing ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """A call as written, not yet resolved: name, positional values, named values."""
    name: str
    positional: tuple[object, ...] = ()
    named: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return self.name


TOKEN = re.compile(r"\s*(?:(?P<number>[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)"
                   r"|(?P<sign>[()\[\],=;*])|(?P<wrong>\S))")


class Reader:
    """One pass over the tokens of a text; every method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.tokens = [match for match in TOKEN.finditer(text) if match.lastgroup]
        for match in self.tokens:
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
        """rule { "," rule } until a closing sign; may be empty."""
        items: list[Any] = []
        while not self.taken(until):
            if items:
                self.expect(",")
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
        if any(key is None for key, _ in arguments[len(positional):]):
            raise Refused(f"{name}: positional arguments come first, named ones after them")
        return Call(name, positional, tuple((key, value) for key, value in arguments if key is not None))

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
    reader.finished()
    if not products:
        raise Refused("no strategy was given; write for example data(2, reduce=ring)")
    return tuple(products)
