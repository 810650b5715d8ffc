"""The notation of strategies: text is parsed, printed, and parsed back to an equal value."""

from __future__ import annotations

from dataclasses import MISSING, replace
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from paragrad.errors import Refused
from paragrad.notation.choices import (
    Choice,
    Decimal,
    Flag,
    Integer,
    IntegerList,
    NameList,
    OneOf,
    Word,
    list_options,
)
from paragrad.schedules.pipeline import PipelineSchedule
from paragrad.schedules.ring import Ring, RingAsync
from paragrad.schedules.two_level import TwoLevel
from paragrad.strategies import compressors, federated, local, server
from paragrad.strategies.data import Data, Native
from paragrad.strategies.pipeline import Pipeline
from paragrad.strategies.registry import (
    collect_all_reduces,
    parse_strategies,
    resolve_strategy,
    strategy,
)
from paragrad.strategies.serial import Serial
from paragrad.strategies.spatial import Spatial
from paragrad.strategies.strategy import Environment, Product, Strategy
from paragrad.strategies.tensor import Tensor

pytestmark = pytest.mark.pure

# the built-in strategies only; other tests of this process may have defined more
STRATEGIES = [
    cls for cls in Strategy.members.values() if cls.__module__.startswith("paragrad.strategies.")
]


def make_value_strategy(kind: object) -> st.SearchStrategy[Any]:
    """Return a hypothesis strategy for the values of one kind of option."""
    if isinstance(kind, Integer):
        return st.integers(kind.least, 5000)
    if isinstance(kind, Decimal):
        return st.floats(max(kind.above, 0.0), min(kind.most, 1e6), exclude_min=True)
    if isinstance(kind, Flag):
        return st.booleans()
    if isinstance(kind, Word):
        return st.sampled_from([None if name == "none" else name for name in kind.names])
    if isinstance(kind, IntegerList):
        return st.lists(st.integers(max(kind.least, 1), 9), min_size=1, max_size=5).map(tuple)
    if isinstance(kind, NameList):
        return st.lists(
            st.sampled_from(("h.2", "encoder.layers.0", "head")), min_size=1, max_size=3
        ).map(tuple)
    assert isinstance(kind, OneOf)
    return st.sampled_from(kind.classes).flatmap(draw_choice)


@st.composite
def draw_choice(draw: st.DrawFn, cls: type[Choice]) -> Choice:
    """Draw a valid choice of a class; each option has its default or another value."""
    arguments = {
        spec.name: draw(st.one_of(*map(make_value_strategy, spec.metadata["kinds"])))
        for spec in list_options(cls)
        if spec.default is MISSING or draw(st.booleans())
    }
    if cls is Data:  # options that must fit together
        if isinstance(arguments.get("shares"), tuple):
            arguments["workers"] = len(arguments["shares"])
        if "reduce" in arguments or (arguments.get("shares"), arguments.get("state")) == (
            "auto",
            "fully_sharded",
        ):
            arguments.pop("state", None)
        if arguments.get("dense") == "tensor":
            arguments = {
                name: value
                for name, value in arguments.items()
                if name in ("workers", "batch_norm", "dense")
            }
    if cls is Spatial and arguments.get("dense") == "tensor":
        arguments.pop("columns", None)
    if cls is server.Server and not isinstance(arguments.get("sync"), server.Ssp | server.Asp):
        arguments.pop("rate", None)
    if cls is TwoLevel:  # reproducible belongs to the whole exchange, not to one level
        arguments |= {
            name: replace(arguments[name], reproducible=False)
            for name in ("inside", "across")
            if name in arguments
        }
    try:
        return cls(**arguments)
    # values that do not fit together, or one value that is refused for another reason
    except Refused:
        reject()


@given(st.sampled_from(STRATEGIES).flatmap(draw_choice))
def test_round_trip(chosen: Strategy) -> None:
    assert strategy(str(chosen)) == chosen
    assert str(strategy(str(chosen))) == str(chosen)
    assert hash(strategy(str(chosen))) == hash(chosen)


@given(st.sampled_from(STRATEGIES).flatmap(draw_choice))
def test_python_form_makes_the_same_value(chosen: Strategy) -> None:
    names: dict[str, Any] = {
        cls.__name__: cls
        for cls in (
            *Strategy.members.values(),
            *collect_all_reduces().values(),
            *PipelineSchedule.members.values(),
            # also compressors that other tests of this process defined
            *compressors.Compressor.members.values(),
        )
    }
    names |= {
        cls.__name__: cls
        for module in (compressors, local, server, federated)
        for cls in vars(module).values()
        if isinstance(cls, type)
    }
    assert eval(repr(chosen), names) == chosen


@given(
    st.lists(st.sampled_from([Tensor(2), Pipeline(4), Tensor("auto")]), min_size=1, max_size=3),
    st.booleans(),
)
def test_products_round_trip(inner: list[Strategy], replicas: bool) -> None:
    product = Product((Data(2, reduce=Ring()), *inner) if replicas else (Tensor(3), *inner))
    assert strategy(str(product)) == product


def test_printed_forms() -> None:
    assert strategy("data(2, reduce=ring)") == Data(2, reduce=Ring())
    assert strategy(" data ( workers = 2,reduce=ring( ) ) ") == Data(2, reduce=Ring())
    assert str(Data(2, reduce=Ring(blocking=True), shares=[3, 1])) == (
        "data(2, reduce=ring(blocking=true), shares=[3, 1])"
    )
    assert repr(Data(2, reduce="ring")) == "Data(2, reduce=Ring())"
    assert str(Serial()) == "serial"
    assert parse_strategies("serial; data(auto);") == (Serial(), Data("auto"))
    assert strategy("data(2) * tensor(2)") == Data(2) * Tensor(2)
    assert (Data(2) * Tensor(2) * Pipeline(4)).workers == 16
    assert strategy("data(2, compress=dgc(0.001, clip=none))").exact is False
    assert [
        str(each)
        for each in parse_strategies(
            "local(4, every=end); server(8, 2, sync=ssp(3)); spatial(2, columns=2)"
        )
    ] == ["local(4, every=end)", "server(8, servers=2, sync=ssp(3))", "spatial(2, columns=2)"]


REFUSED = {
    "dat(2)": "did you mean data?",
    "data(2, reduse=ring)": "no option 'reduse'; did you mean reduce?",
    "data(2, reduce=rong)": "did you mean ring?",
    "data(0)": "a whole number from 1",
    "data(-1)": "a whole number from 1",
    "data(2.5)": "a whole number from 1",
    "data(true)": "a whole number from 1",
    "data()": "data needs workers",
    "data": "data needs workers",
    "data(2, workers=2)": "given twice",
    "data(2, reduce=ring(2))": "ring(blocking=...) takes true or false; got 2",
    "data(2, reduce=native(reproducible=true))": "no option 'reproducible'",
    "data(2, reduce=native(true))": "native takes no arguments",
    "data(reduce=ring, 2)": "positional arguments come first",
    "data(2, shares=[3])": "2 workers and 1 shares",
    "data(2, shares=[3, 0])": "a share of at least 1",
    "data(2, reduce=ring, state=shared_memory)": "leave out one of them",
    "data(2, reduce=ring": "expected ','",
    "data(2, reduce=ring, dense=tensor)": "leave out reduce",
    "spatial(2, columns=2, dense=tensor)": "give spatial(4, dense=tensor)",
    "data(2, dense=tensor) * tensor(2)": "divides its layers itself; use it alone",
    "data(2, batch_norm=share) * spatial(2)": "give both the same",
    "branch(2) * pipeline(2)": "multiply branch with data(n) only",
    "spatial(2) * tensor(2)": "multiply spatial with data(n) only",
    "data(2)) ": "nothing more was expected",
    "data(2) $": "cannot read '$'",
    "data(2, reduce='ring')": "write names without quotes: data(2, reduce=ring)",
    '"data(2)"': "write names without quotes: data(2)",
    "serial, data(2)": "write ; between strategies, not ,",
    "ring": "did you mean data(2, reduce=ring)?",
    "ring_async(4)": "did you mean data(2, reduce=ring_async)?",
    "ddp(2)": "here it is data(2)",
    "DDP": "here it is data(2)",
    "post_local_sgd(2)": "here it is local(2, every=8, after=60)",
    "fsdp(4)": "here it is data(2, state=shared_memory), on one host",
    "data(2, state=fsdp)": "got fsdp; did you mean fully_sharded?",
    "data(2, state=full_shard)": "did you mean fully_sharded?",
    "fully_sharded(2)": "did you mean data(2, state=fully_sharded)?",
    "asp(2)": "did you mean server(2, sync=asp)?",
    "zero_bubble": "did you mean pipeline(2, schedule=zero_bubble)?",
    "auto": "did you mean data(auto)?",
    "zero": "here it is data(2, state=shared_memory), on one host",
    "": "no strategy was given",
    "3": "expected a name",
    "serial * data(2)": "serial is one worker",
    "tensor(2) * data(2)": "leftmost",
    "data(2, micro=2) * pipeline(2)": "pipeline(micro=...)",
    "data(2, state=fully_sharded) * place(2)": "leave out the state",
    "data(2, compress=top_k(2))": "at most 1",
    "federated(2) * tensor(2)": "a worker trains one whole client at a time",
    "federated(2, split=dirichlet(0))": "a number above 0",
}


@pytest.mark.parametrize("text", REFUSED)
def test_invalid_notation_is_refused_with_the_repair(text: str) -> None:
    with pytest.raises(Refused) as caught:
        strategy(text)
    assert REFUSED[text] in str(caught.value)


def test_candidates_of_data_auto_are_the_same_training() -> None:
    """`data(auto)` may become one worker with all threads, if that is the same training.

    Earlier, this was a candidate whatever the user requested. But with batch norm of each share,
    or of micro-batches, batch norm sees other samples. And under `fully_sharded`, no rank holds
    the whole state.
    """
    assert strategy("data(auto)").list_alternatives(Environment(2)) == (Serial(threads=2),)
    for asked in (
        "data(2)",
        "data(auto, batch_norm=share)",
        "data(auto, micro=2)",
        "data(auto, state=fully_sharded)",
    ):
        assert strategy(asked).list_alternatives(Environment(2)) == ()


def test_auto_is_resolved() -> None:
    assert resolve_strategy(Serial(), Environment(8)) == Serial(threads=8)
    # the all-reduce is chosen at the first exchange
    assert resolve_strategy(Data("auto"), Environment(8)) == Data(
        8, reduce="auto", state="replicated"
    )
    assert resolve_strategy(Data("auto"), Environment(8, backend="shm")) == Data(
        8, reduce=Native(), state="replicated"
    )
    assert resolve_strategy(Data("auto"), Environment(8, ranks=3)).workers == 3
    # Earlier, data(auto) with --device cuda used one rank per core, so many ranks shared a GPU.
    assert resolve_strategy(Data("auto"), Environment(8, gpus=2)).workers == 2
    assert resolve_strategy(Data("auto"), Environment(8, ranks=3, gpus=2)).workers == 3
    assert resolve_strategy(strategy("local(auto)"), Environment(8, gpus=2)).workers == 2
    assert resolve_strategy(strategy("data(auto) * tensor(2)"), Environment(16, gpus=4)).size == 4
    assert resolve_strategy(Data(2, reduce=RingAsync()), Environment(8)) == Data(
        2, reduce=RingAsync(2), state="replicated"
    )
    assert resolve_strategy(
        strategy("data(8, reduce=two_level(across=halving))"), Environment(8, ranks_on_host=4)
    ) == strategy("data(8, reduce=two_level(across=halving(2), group=4), state=replicated)")
    with pytest.raises(Refused, match="groups of 3 do not make up 8 ranks"):
        resolve_strategy(
            strategy("data(8, reduce=two_level(group=3))"), Environment(8, backend="shm")
        )
    with pytest.raises(Refused, match="needs 2 worker"):
        resolve_strategy(Data(2), Environment(8, ranks=3))


def test_strategies_are_values() -> None:
    assert len({Data(2), strategy("data(2)"), Data(3)}) == 2
    with pytest.raises(AttributeError):
        Data(2).workers = 3  # type: ignore[misc]
