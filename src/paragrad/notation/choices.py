"""The notation of strategies: choices are frozen values that print as a call and parse back.

A choice is a class with fields that are made by `option(...)`. An option has a default and the
kinds of value that it accepts. A bare word (`auto`, `replicated`) is a string, and `none` is None.
A technique (`ring`, `top_k(0.01)`) is itself a choice. `grammar.py` turns text into calls; this
module turns calls into choices.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, dataclass_transform

from paragrad.errors import Refused, UnknownName
from paragrad.notation.grammar import CallExpression, parse_call

RESERVED_FIELDS = ("name", "members")  # attributes of a choice that are not options
# words of other libraries, too far from the word here to be recognized as a typing error
SYNONYMS = {
    "gpu": "cuda",
    "ddp": "replicated",
    "no_shard": "replicated",
    **dict.fromkeys(("fsdp", "fsdp2", "zero", "zero3", "full_shard"), "fully_sharded"),
    **dict.fromkeys(("zero1", "zero2", "shard_grad_op", "sharded"), "shared_memory"),
}


# ---- kinds of value ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Integer:
    """A whole number in a range.

    Attributes:
        least: The smallest number.
        most: The largest number. The default is above any number of ranks, segments or
            micro-batches.
    """

    least: int = 1
    most: float = 1 << 20

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int)
            and not isinstance(value, bool)
            and self.least <= value <= self.most
        )

    def __str__(self) -> str:
        return f"a whole number from {self.least}" + (
            f" to {self.most:,}" if self.most < float("inf") else ""
        )


@dataclass(frozen=True)
class Decimal:
    """A number in a range.

    Attributes:
        above: The number must be larger than this.
        most: The largest number.
    """

    above: float = 0.0
    most: float = float("inf")

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and (isfinite(value) and self.above < value <= self.most)
        )

    def __str__(self) -> str:
        least = f"above {self.above:g}" if self.above >= 0 else "from 0"
        return f"a number {least}" + (
            f", at most {self.most:g}" if self.most < float("inf") else ""
        )


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class IntegerList:
    """A list of whole numbers, such as [3, 1].

    Attributes:
        least: The smallest number.
    """

    least: int = 1

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, tuple)
            and bool(value)
            and all(number in Integer(self.least, float("inf")) for number in value)
        )

    def __str__(self) -> str:
        return f"a list of whole numbers from {self.least}, such as [3, 1]"


@dataclass(frozen=True)
class NameList:
    """A list of names of modules, such as [h.2, h.4]."""

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, tuple)
            and bool(value)
            and all(isinstance(name, str) for name in value)
        )

    def __str__(self) -> str:
        return "a list of names, such as [h.2, h.4]"


class Word:
    """One of several bare words; `none` stands for None.

    Args:
        *names: The words.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def __contains__(self, value: object) -> bool:
        return (value is None and "none" in self.names) or value in self.names

    def __str__(self) -> str:
        return " or ".join(self.names)


class OneOf:
    """One of several choices: `OneOf(Ring, Tree)` accepts Ring(), "ring" and ring(...).

    A family stands for its members.
    """

    def __init__(self, *given: type[Choice]) -> None:
        self.given = given

    @property
    def classes(self) -> list[type[Choice]]:
        """The classes that are accepted, with families replaced by their members."""
        return list(
            dict.fromkeys(
                cls
                for each in self.given
                for cls in (
                    each.members.values()
                    if issubclass(each, Family) and each in families
                    else (each,)
                )
            )
        )

    def __contains__(self, value: object) -> bool:
        return isinstance(value, self.given)

    def __str__(self) -> str:
        return "one of " + ", ".join(cls.name for cls in self.classes)


class ManyOf:
    """One or more choices of a class: the factors of a product."""

    def __init__(self, cls: type[Choice]) -> None:
        self.cls = cls

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, tuple)
            and bool(value)
            and all(isinstance(each, self.cls) for each in value)
        )

    def __str__(self) -> str:
        return "choices"


OptionKind = Integer | Decimal | Flag | IntegerList | NameList | Word | OneOf | ManyOf


def option(*kinds: OptionKind, default: Any = MISSING) -> Any:
    """Declare a field of a choice.

    Args:
        *kinds: The kinds of value that the field accepts.
        default: The default; without one, the option is required.

    Returns:
        The field of a dataclass.
    """
    return field(default=default, metadata={"kinds": kinds})


# ---- choices ---------------------------------------------------------------------------------
@dataclass_transform(frozen_default=True, field_specifiers=(option,))
class Choice:
    """A frozen value that checks its fields, prints as the call that makes it and parses back.

    Subclasses become frozen dataclasses. A subclass with `abstract=True` only serves as a base.

    Attributes:
        name: The name in the notation: the name of the class in snake case.
    """

    __slots__ = ()
    name: ClassVar[str]

    def __init_subclass__(cls, abstract: bool = False, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.name = re.sub(
            r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__
        ).lower()
        if not abstract:
            dataclass(frozen=True, repr=False)(cls)
            for spec in list_options(cls):
                if "kinds" not in spec.metadata or spec.name in RESERVED_FIELDS:
                    raise Refused(
                        f"{cls.__name__}.{spec.name} is no option; write it with an unused name "
                        f"and as an option, such as {spec.name}: int = option(Integer(), default=1)"
                    )

    def __post_init__(self) -> None:
        for spec in list_options(type(self)):
            given_value = getattr(self, spec.name)
            value = _convert_option_value(given_value, spec, self.name)
            if value is not given_value:
                object.__setattr__(self, spec.name, value)
        self.check_options()

    def check_options(self) -> None:
        """Refuse options that do not fit together.

        Raises:
            Refused: They do not.
        """

    def __str__(self) -> str:
        shown = self._format_arguments(_format_option_value)
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._format_arguments(repr))})"

    def _format_arguments(self, text: Callable[[object], str]) -> list[str]:
        """The arguments that the call needs.

        Options without a default are positional. Of the others, those that differ from the default
        are given by name.
        """
        return [
            text(value) if spec.default is MISSING else f"{spec.name}={text(value)}"
            for spec in list_options(type(self))
            if (value := getattr(self, spec.name)) != spec.default or spec.default is MISSING
        ]


class Family(Choice, abstract=True):
    """Choices of one kind that are known by their names; a user's class joins when it is defined.

    Two classes with one name are refused. A class that is defined again replaces the old one, as in
    a notebook, or in a file that is both run and imported.

    Attributes:
        members: The classes, by name.

        renamed_members: What a class may not define, because it had this name until version 0.1,
            and the name that it has now.
    """

    __slots__ = ()
    members: ClassVar[dict[str, type[Choice]]]
    renamed_members: ClassVar[Mapping[str, str]] = {"check": "check_options"}

    def __init_subclass__(cls, abstract: bool = False, **keywords: Any) -> None:
        super().__init_subclass__(abstract=abstract, **keywords)
        if Family in cls.__bases__:
            cls.members = {}
            families.append(cls)
            return
        if problem := find_renamed_member(cls, cls.renamed_members):
            raise Refused(problem)
        if not abstract:
            if cls.name in RESERVED_NAMES:
                raise Refused(
                    f"{cls.__name__} would be called {cls.name}, a word of the notation; give it "
                    "another name"
                )
            same_named = next(
                (each.members[cls.name] for each in families if cls.name in each.members), None
            )
            if same_named is not None and not _is_same_definition(same_named, cls):
                raise Refused(
                    f"{cls.__module__}.{cls.__qualname__} would be called {cls.name}, as "
                    f"{same_named.__module__}.{same_named.__qualname__} is; give it another name"
                )
            cls.members[cls.name] = cls


def find_renamed_member(cls: type, renamed_members: Mapping[str, str]) -> str | None:
    """Return which member of a class now has another name, as a sentence, or None.

    The library would ignore such a member. Where a class also has the new name, the old one is a
    member of its own.

    Args:
        cls: The class, perhaps a user's.
        renamed_members: The old names of members, and their names now.
    """
    defined = {
        name
        for each in cls.__mro__
        if each.__module__.split(".")[0] != "paragrad"
        for name in vars(each)
    }
    for name, new_name in renamed_members.items():
        if name in defined and new_name not in defined:
            return f"{cls.__module__}.{cls.__qualname__} has {name}, which is now called {new_name}"
    return None


def _is_same_definition(one: type, other: type) -> bool:
    """Whether two classes come from the same definition, executed twice."""
    if one.__qualname__ != other.__qualname__:
        return False
    files = [getattr(sys.modules.get(each.__module__), "__file__", None) for each in (one, other)]
    return one.__module__ == other.__module__ or (files[0] is not None and files[0] == files[1])


families: list[type[Family]] = []
RESERVED_NAMES = ("auto", "true", "false", "none")


def list_options(cls: type[Choice]) -> tuple[Field[Any], ...]:
    """List the options of a choice.

    Args:
        cls: The class of the choice.

    Returns:
        The fields, in order.
    """
    return fields(cls)  # type: ignore[arg-type]


def list_option_names(spec: Field[Any]) -> list[str]:
    """List the words and the names of choices that an option accepts.

    Args:
        spec: The field of the option.
    """
    return [
        name
        for kind in spec.metadata["kinds"]
        for name in (
            kind.names
            if isinstance(kind, Word)
            else [cls.name for cls in kind.classes]
            if isinstance(kind, OneOf)
            else []
        )
    ]


def _format_option_value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_format_option_value, value)) + "]"
    return str(value)


def _convert_option_value(value: object, spec: Field[Any], owner: str) -> object:
    """Convert a value to the form that the field stores, or raise Refused.

    A list becomes a tuple; texts and calls are resolved.
    """
    kinds: tuple[OptionKind, ...] = spec.metadata["kinds"]
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, tuple) and any(isinstance(kind, NameList) for kind in kinds):
        value = tuple(
            each.name
            if isinstance(each, CallExpression) and each == CallExpression(each.name)
            else each
            for each in value
        )
    if isinstance(value, str) and not any(value in kind for kind in kinds):
        value = parse_call(value)
    if isinstance(value, CallExpression):
        value = _resolve_call(value, kinds, f"{owner}({spec.name}=...)")
    if value == "none" and any(None in kind for kind in kinds):
        value = None
    if not any(value in kind for kind in kinds):
        accepted = " or ".join(map(str, kinds))
        if isinstance(value, type) and issubclass(value, Choice):
            raise Refused(
                f"{owner}({spec.name}=...) got the class {value.__name__}; write {value.__name__}()"
            )
        text = _format_option_value(value)
        words = [name for kind in kinds if isinstance(kind, Word) for name in kind.names]
        offer = "".join(f"; did you mean {name}?" for name in find_close_names(text, words))
        raise Refused(f"{owner}({spec.name}=...) takes {accepted}; got {text}{offer}")
    return value


def _resolve_call(call: CallExpression, kinds: Iterable[OptionKind], where: str) -> object:
    """Resolve a call in the place of a value: a bare word of the field, or one of its choices."""
    words = [name for kind in kinds if isinstance(kind, Word) for name in kind.names]
    classes = [cls for kind in kinds if isinstance(kind, OneOf) for cls in kind.classes]
    if call.name in words and not call.positional and not call.named:
        return call.name
    if not classes:
        # not a word of the field: the caller's message about the kinds of value is clearest
        return call
    return build_choice(call, {cls.name: cls for cls in classes}, where, words)


def build_choice(
    call: CallExpression,
    classes: dict[str, type[Choice]],
    where: str,
    words: Iterable[str] = (),
    elsewhere: Mapping[str, str] | None = None,
) -> Choice:
    """Build the choice that a call names.

    Args:
        call: The call.

        classes: The classes that may be named, by name.

        where: The place of the call, for messages.

        words: Bare words that are also known there, for messages.

        elsewhere: Messages for names that belong in other places or to other libraries, by name.

    Returns:
        The choice.

    Raises:
        Refused: The name or an argument is wrong; the message gives the nearest name.
    """
    if elsewhere and call.name not in classes and call.name.lower() in elsewhere:
        raise Refused(f"{where}: no name {call.name!r}; {elsewhere[call.name.lower()]}")
    if call.name not in classes:
        raise UnknownName(
            f"{where}: " + describe_unknown_name("name", call.name, [*classes, *words])
        )
    cls = classes[call.name]
    names = [spec.name for spec in list_options(cls)]
    if len(call.positional) > len(names):
        takes = f"at most {len(names)}: {', '.join(names)}" if names else "no arguments"
        raise Refused(f"{call.name} takes {takes}; got {len(call.positional)}")
    arguments = dict(zip(names, call.positional, strict=False))
    for name, value in call.named:
        if name not in names:
            raise Refused(f"{call.name}: " + describe_unknown_name("option", name, names))
        if name in arguments:
            raise Refused(f"{call.name}: option {name} is given twice; give it once")
        arguments[name] = value
    missing = [
        spec.name
        for spec in list_options(cls)
        if spec.default is MISSING and spec.name not in arguments
    ]
    if missing:
        raise Refused(
            f"{call.name} needs {', '.join(missing)}: write {call.name}({', '.join(missing)})"
        )
    return cls(**arguments)


def describe_unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Describe an unknown name, and offer the nearest known one.

    Args:
        what: What the name should name.
        name: The unknown name.
        known: The known names.

    Returns:
        The message.
    """
    known = list(known)
    close_names = find_close_names(name, known)
    offer = (
        f"did you mean {close_names[0]}?"
        if close_names
        else "known: " + (", ".join(known) or "none")
    )
    return f"no {what} {name!r}; {offer}"


def find_close_names(name: str, known: Sequence[str]) -> list[str]:
    """Find the known name that an unknown one may stand for.

    Args:
        name: The unknown name.
        known: The known names.

    Returns:
        That name, or an empty list.
    """
    if SYNONYMS.get(name.lower()) in known:
        return [SYNONYMS[name.lower()]]
    return difflib.get_close_matches(name, known, n=1, cutoff=0.51)


def iterate_options(value: object) -> Iterator[tuple[Choice, Field[Any], object]]:
    """Iterate over all options of a choice and of the choices inside it.

    Args:
        value: A choice, a tuple of choices, or any other value.

    Yields:
        (owner, field, value).
    """
    if isinstance(value, Choice):
        for spec in list_options(type(value)):
            inner = getattr(value, spec.name)
            yield value, spec, inner
            yield from iterate_options(inner)
    elif isinstance(value, tuple):
        for item in value:
            yield from iterate_options(item)
