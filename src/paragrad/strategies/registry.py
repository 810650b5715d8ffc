"""The strategies by name: parsing them, and resolving them for an environment."""

from __future__ import annotations

from contextlib import suppress

from paragrad.errors import Refused, UnknownName
from paragrad.notation.choices import Choice, build_choice, list_option_names, list_options
from paragrad.notation.grammar import parse_products
from paragrad.schedules.all_reduce import AllReduce as AllReduce

# imported so that every built-in strategy is among Strategy.members
from paragrad.strategies import (  # noqa: F401
    branch,
    federated,
    local,
    serial,
    spatial,
    tensor,
)
from paragrad.strategies.data import Data, Native
from paragrad.strategies.pipeline import Pipeline
from paragrad.strategies.server import Server
from paragrad.strategies.strategy import Environment, Product, ScheduleUse
from paragrad.strategies.strategy import Strategy as Strategy

# Names in other libraries, in lower case -> what they are called here.
FOREIGN_NAMES = {
    **dict.fromkeys(
        (
            "ddp",
            "distributeddataparallel",
            "distributed_data_parallel",
            "dp",
            "dataparallel",
            "horovod",
        ),
        "here it is data(2), for 2 workers",
    ),
    **dict.fromkeys(
        (
            "fsdp",
            "fsdp2",
            "fullyshardeddataparallel",
            "fully_shard",
            "zero",
            "zero1",
            "zero2",
            "zero3",
            "zeroredundancyoptimizer",
        ),
        "here it is data(2, state=shared_memory), on one host; over several, data(2, "
        "state=fully_sharded)",
    ),
    **dict.fromkeys(("tp", "megatron", "tensor_parallel"), "here it is tensor(2)"),
    **dict.fromkeys(("pp", "gpipe", "pipe"), "here it is pipeline(2)"),
    **dict.fromkeys(("diloco",), "here it is local(2, every=500, outer=nesterov)"),
    **dict.fromkeys(("easgd",), "here it is local(2, outer=elastic)"),
    **dict.fromkeys(("local_sgd", "localsgd"), "here it is local(2, every=8), for 2 workers"),
    **dict.fromkeys(
        ("post_local_sgd", "postlocalsgd"),
        "here it is local(2, every=8, after=60), with 60 synchronous steps at the start",
    ),
    **dict.fromkeys(("parallel_sgd", "parallelsgd"), "here it is local(2, every=end)"),
    **dict.fromkeys(("fedavg",), "here it is federated(2, clients=100, fraction=0.1)"),
}


def collect_all_reduces() -> dict[str, type[Choice]]:
    """Return the all-reduces by name, built-in ones and the user's own."""
    return {Native.name: Native, **AllReduce.members}  # native comes first


def _suggest_strategies() -> dict[str, str]:
    """Return suggestions for names that are no strategies, but values of an option of one."""
    suggestions = {"auto": "did you mean data(auto)?"}
    for cls in (Data, Pipeline, Server):
        for spec in list_options(cls):
            for name in list_option_names(spec):
                suggestions.setdefault(name, f"did you mean {cls.name}(2, {spec.name}={name})?")
    return suggestions


def parse_strategies(text: str) -> tuple[Strategy, ...]:
    """Parse `strategy; strategy; ...`.

    Args:
        text: The strategies as text.

    Raises:
        Refused: If the text is no list of strategies.
    """
    elsewhere = {**FOREIGN_NAMES, **_suggest_strategies()}
    parsed: list[Strategy] = []
    for product in parse_products(text):
        factors = tuple(
            build_choice(call, Strategy.members, "strategy", elsewhere=elsewhere)
            for call in product
        )
        parsed.append(
            factors[0] if len(factors) == 1 else Product(factors)  # type: ignore[arg-type]
        )
    return tuple(parsed)


def refuse_unreadable_strategies(text: str) -> None:
    """Refuse strategies that cannot be read, before the file of a job is imported.

    A name that is not known is accepted here, because the file may define it.

    Args:
        text: The strategies as text.

    Raises:
        Refused: The text is no list of strategies.
    """
    with suppress(UnknownName):
        parse_strategies(text)


def strategy(text: str | Strategy) -> Strategy:
    """Parse one strategy.

    Args:
        text: The strategy as text, such as "data(2, reduce=ring)". A strategy is returned as it is.

    Raises:
        Refused: If the text is no strategy, or more than one.

    Examples:
        >>> import paragrad as pg
        >>> pg.strategy("data(4, reduce=ring)")
        Data(4, reduce=Ring())
        >>> print(pg.Data(4, reduce=pg.Ring()))
        data(4, reduce=ring)
    """
    if isinstance(text, Strategy):
        return text
    if not isinstance(text, str):
        raise Refused(
            "a strategy is a text such as 'data(2, reduce=ring)' or a value such as Data(2); got "
            f"{text!r}"
        )
    parsed = parse_strategies(text)
    if len(parsed) > 1:
        raise Refused(f"one strategy is needed here, got {len(parsed)}: {text}")
    return parsed[0]


def resolve_strategy(chosen: Strategy, environment: Environment) -> Strategy:
    """Return the same strategy with every `auto` replaced.

    Args:
        chosen: The strategy.
        environment: Where it runs.

    Raises:
        Refused: If the world has another size than the strategy, or if the options of the strategy
            do not fit together.
    """
    resolved = chosen.resolve(environment)
    if environment.ranks is not None and resolved.size != environment.ranks:
        wanted = (
            f"{resolved.size} ranks, {resolved.servers} of them for servers,"
            if resolved.servers
            else f"{resolved.size} worker(s)"
        )
        raise Refused(
            f"{chosen} needs {wanted} and the launcher started {environment.ranks}; start "
            f"{resolved.size}, or write data(auto)"
        )
    return resolved


def find_schedule_use(
    chosen: Strategy, activity: str, ranks_on_host: int | None = None
) -> tuple[Strategy, ScheduleUse]:
    """Return a resolved strategy and its first schedule.

    Args:
        chosen: The strategy, which must have a fixed number of workers and a schedule.

        activity: What the schedule is for, such as "draw" or "simulate", for the message.

        ranks_on_host: The ranks on one host, if known.

    Raises:
        Refused: If the strategy has no schedule.
    """
    if chosen.workers == "auto":
        raise Refused(
            f"{chosen}: say how many workers and which all-reduce, for example data(4, reduce=ring)"
        )
    resolved = resolve_strategy(chosen, Environment(ranks_on_host=ranks_on_host))
    if not (plans := resolved.plan_schedules()):
        raise Refused(f"{chosen} has no schedule to {activity}; {resolved.explain_no_schedule()}")
    return resolved, plans[0]
