"""Links, machine files, and simulations from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paragrad.errors import Refused
from paragrad.executors.machine import (
    ASSUMED_MACHINE,
    MACHINE_SCHEMA,
    Cluster,
    Link,
    Machine,
    load_machine,
    read_machine_file,
)
from paragrad.executors.work_depth import compute_work_and_depth
from paragrad.planner.algorithm_choice import is_measurably_slower
from paragrad.planner.link_measurement import find_outlier_sizes, fit_link
from paragrad.planner.prediction_interval import MARGIN
from paragrad.planner.simulation import parse_bytes, parse_slow_rank, simulate_exchange
from paragrad.schedules.butterfly import Butterfly
from paragrad.schedules.direct import Direct
from paragrad.schedules.ring import Ring
from paragrad.schedules.star import Star
from paragrad.schedules.tree import Tree
from paragrad.strategies.registry import strategy

pytestmark = pytest.mark.pure

MEASURED = Machine(
    {
        "gloo": Link(1e-4, 1e-9, 2e-6, 3e-5, 1e-10, ((64, 1e-4), (1000, 2e-4), (100_000, 3e-4))),
        "shm": Link(1e-5, 1e-10),
    },
    gamma=1e-10,
    cores=2,
    measured="2026, here",
    errors={"gloo": 0.5, "shm": 0.0},
    memory=1e10,
    matmul=1e11,
    load=0.25,
)
MEASURED.links["shm"] = replace(
    MEASURED.links["shm"], disturbed=Link(2e-5, 2e-10, points=((64, 3e-5), (1000, 4e-5)))
)


def test_link_time_is_interpolated_and_extrapolated() -> None:
    link = MEASURED.links["gloo"]
    assert link.compute_port_seconds(64) == 1e-4
    assert link.compute_port_seconds(532) == pytest.approx(1.5e-4)
    assert link.compute_port_seconds(100_000) == pytest.approx(3e-4)
    assert link.compute_port_seconds(199_000) == pytest.approx(4e-4)
    assert link.compute_port_seconds(0) == pytest.approx(1e-4 - 64 * 1e-4 / 936)
    assert Link(1.0, 2.0).compute_port_seconds(10) == 21.0


def test_machine_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    MEASURED.write_machine_file(path)
    assert read_machine_file(path, cores=2) == (MEASURED, None)
    machine, warning = read_machine_file(path, cores=16)
    assert machine == MEASURED
    assert "of 2 cores, this one has 16; write a new one: paragrad measure --output" in str(warning)
    with pytest.warns(UserWarning, match="this one has 16"):
        load_machine(path, 16)
    assert load_machine(None, 2) is ASSUMED_MACHINE
    with pytest.raises(
        Refused, match="no link 'nccl', only gloo, shm; measure it: paragrad measure --backend nccl"
    ):
        machine.select_link("nccl")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda found: found.update(schema=MACHINE_SCHEMA + 1),
            "of version 3, this paragrad reads version 2",
        ),
        (lambda found: found.pop("schema"), "is no machine file"),
        (lambda found: found.pop("gamma"), "has a missing or wrong entry"),
        (lambda found: found["links"]["gloo"].pop("alpha"), "has a missing or wrong entry"),
        (lambda found: found["links"]["gloo"].update(speed=3), "has a missing or wrong entry"),
    ],
)
def test_invalid_machine_file_is_refused(tmp_path: Path, change: object, says: str) -> None:
    path = tmp_path / "machine.json"
    MEASURED.write_machine_file(path)
    found = json.loads(path.read_text())
    change(found)  # type: ignore[operator]
    path.write_text(json.dumps(found))
    with pytest.raises(Refused, match=says) as caught:
        read_machine_file(path, 2)
    assert f"paragrad measure --output {path}" in str(caught.value)


def test_missing_machine_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there is no machine file"):
        read_machine_file(tmp_path / "machine.json", 2)
    for text in ("", "[1, 2]", "{", '"a"'):
        (tmp_path / "machine.json").write_text(text)
        with pytest.raises(Refused, match="is no machine file"):
            read_machine_file(tmp_path / "machine.json", 2)


def test_linear_link_is_fitted_exactly() -> None:
    """The fit gets the times that a ping-pong and a stream show for a link with known numbers."""
    alpha = 5e-5
    beta = 2e-9
    latency = 3e-5
    overhead = 1e-5
    work = 1e-10
    sizes = (64, 1 << 10, 1 << 14, 1 << 18, 1 << 22)
    found, error = fit_link(
        [
            (
                size,
                2 * overhead + alpha + beta * size + latency,
                alpha + beta * size,
                overhead + work * size,
            )
            for size in sizes
        ]
    )
    assert found.alpha == pytest.approx(alpha, rel=1e-3)
    assert found.beta == pytest.approx(beta, rel=1e-3)
    assert found.latency == pytest.approx(latency, rel=1e-3)
    assert found.overhead == pytest.approx(overhead, rel=1e-2)
    assert found.work == pytest.approx(work, rel=0.1)
    assert error < 1e-3
    steps = [1e-3 + (2e-3 if size > 10_000 else 0) + 1e-9 * size for size in sizes]
    bent, error = fit_link(
        [(size, step, step, 1e-5) for size, step in zip(sizes, steps, strict=True)]
    )
    # a straight line does not fit, and says so
    assert error > 0.1
    assert len(bent.points) == len(sizes)


def test_outlier_point_contradicts_its_neighbours() -> None:
    points = [(size, 1e-4 + 1e-9 * size) for size in (64, 1 << 12, 1 << 16, 1 << 20, 1 << 22)]
    assert find_outlier_sizes(points) == []
    for place in range(1, len(points)):
        wrong = [
            (size, seconds * (1.6 if number == place else 1))
            for number, (size, seconds) in enumerate(points)
        ]
        assert points[place][0] in find_outlier_sizes(wrong)
    assert find_outlier_sizes(points[:2]) == []  # nothing to compare with


def test_predicted_time_has_an_interval_for_measured_links() -> None:
    """The interval reaches from the usual speed of links to the speed in their slowest rounds.

    On both sides, a margin is added for what the clock leaves out.
    """
    quick = Link(1e-4, 1e-9)
    slow = Link(2e-4, 3e-9)
    chosen = strategy("data(4, reduce=ring)")
    known, alone, slowest = (
        simulate_exchange(chosen, 4_000_000, Machine({"gloo": link}, 1e-10, 2, "by hand"))
        for link in (replace(quick, disturbed=slow), quick, slow)
    )
    assert alone.interval is None
    assert known.timeline == alone.timeline
    assert known.interval == pytest.approx(
        ((1 - MARGIN) * alone.timeline.seconds, (1 + MARGIN) * slowest.timeline.seconds)
    )
    inside = Cluster(replace(quick, disturbed=slow), inside=replace(quick, disturbed=slow), group=2)
    assert inside.build_disturbed_cluster() == Cluster(slow, inside=slow, group=2)


def test_times_are_compared_by_paired_rounds() -> None:
    """Two algorithms are not equal if they differ in the same direction in every turn.

    This is so even if the turns differ more than the algorithms.
    """
    turns = [1.0, 3.0, 0.5, 7.0, 2.0, 1.5]
    assert is_measurably_slower([1.02 * each for each in turns], turns)
    assert not is_measurably_slower(
        [1.02 * each if place % 2 else 0.98 * each for place, each in enumerate(turns)], turns
    )
    assert is_measurably_slower([1.2], [1.0])  # in few turns, the size of the difference counts
    assert not is_measurably_slower([1.02], [1.0])
    # other work on the machine slows one or the other of a pair: the median is half as slow again,
    # but the ratios lie around 1
    assert is_measurably_slower(
        [2.9, 2.9, 1.0, 2.9, 1.0, 2.9, 1.0], [1.0, 1.9, 2.9, 1.9, 1.9, 2.9, 2.9]
    )


def test_bytes_and_slow_ranks_are_parsed() -> None:
    assert [parse_bytes(text) for text in ("4096", "64KiB", "100MB", "1.5 gb", "2B")] == [
        4096,
        65536,
        10**8,
        15 * 10**8,
        2,
    ]
    assert parse_slow_rank("7=3") == (7, 3.0)
    for text in ("", "MB", "-3", "3 apples"):
        with pytest.raises(Refused, match="write 4096, 64KiB or 100MB"):
            parse_bytes(text)
    with pytest.raises(Refused, match="write RANK=FACTOR"):
        parse_slow_rank("7")


def test_simulation_equals_the_formula() -> None:
    found = simulate_exchange(strategy("data(256, reduce=ring)"), 256 * 4000, ASSUMED_MACHINE)
    assert found.closed_form == pytest.approx(found.timeline.seconds)
    assert found.timeline.seconds == pytest.approx(
        2 * 255 * (20e-6 + 4000 / 2e9) + 255 * 4000 / 8e9
    )
    slower = simulate_exchange(
        strategy("data(256, reduce=ring)"), 256 * 4000, ASSUMED_MACHINE, slow=((3, 3.0),)
    )
    assert slower.timeline.seconds > 2 * found.timeline.seconds
    shared = simulate_exchange(
        strategy("data(64, reduce=butterfly)"), 64000, ASSUMED_MACHINE, ranks_per_link=8
    )
    assert (
        shared.timeline.seconds
        > 4
        * simulate_exchange(
            strategy("data(64, reduce=butterfly)"), 64000, ASSUMED_MACHINE
        ).timeline.seconds
        / 2
    )
    spans = simulate_exchange(
        strategy("data(4, reduce=tree)"), 4000, ASSUMED_MACHINE, spans=True
    ).timeline.spans
    assert sum(span.lane == "send" for span in spans) == 6


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("data(4)", {}, "say which all-reduce, for example data"),
        ("data(4, reduce=native)", {}, "has no schedule"),
        ("serial", {}, "has no schedule to simulate"),
        ("data(4, reduce=ring)", {"slow": ((4, 2.0),)}, "give a rank from 0 to 3"),
        ("data(4, reduce=ring)", {"slow": ((1, 0.5),)}, "a factor of at least 1"),
        ("data(4, reduce=ring)", {"ranks_per_link": 3}, "3 ranks per link do not make up 4 ranks"),
        ("data(4, reduce=ring)", {"ranks_per_core": 3}, "3 ranks per core do not make up 4 ranks"),
        ("data(4, reduce=ring)", {"link": "gloo"}, "no link 'gloo'"),
        ("data(4, reduce=two_level(group=3))", {}, "groups of 3 do not make up 4 ranks"),
        (
            "data(4096, reduce=ring)",
            {"spans": True},
            "more than 100,000 messages, too many to be kept as a timeline one by one; take at "
            "most 128 ranks",
        ),
    ],
)
def test_invalid_simulation_is_refused(text: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(Refused, match=says):
        simulate_exchange(strategy(text), 4000, ASSUMED_MACHINE, **options)


def test_work_and_depth_of_schedules() -> None:
    """The work W is p - 1 additions of every element; the depth D is the longest chain.

    In the butterfly, W is larger, because all ranks make the same additions.
    """
    for size in (2, 4, 8, 16):
        rounds = size.bit_length() - 1
        n = 16 * size
        found = {
            each: compute_work_and_depth(each, size, n)
            for each in (Ring(), Tree(), Star(), Direct(), Butterfly())
        }
        assert {schedule: (each.work, each.depth) for schedule, each in found.items()} == {
            Ring(): ((size - 1) * n, (size - 1) * 16),
            Tree(): ((size - 1) * n, rounds * n),
            Star(): ((size - 1) * n, (size - 1) * n),
            Direct(): ((size - 1) * n, (size - 1) * 16),
            Butterfly(): (size * rounds * n, rounds * n),
        }
        assert found[Ring()].parallelism == size
        least, most = found[Ring()].compute_time_bounds(size)
        assert least <= most <= 2 * least
