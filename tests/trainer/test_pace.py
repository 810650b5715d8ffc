"""Ranks that are slowed on purpose, and shares that follow the speed of ranks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equality_table import IMAGES, VECTORS, make_batch_norm_cnn, make_job, make_mlp

import paragrad as pg
from paragrad.record.record import Record
from paragrad.record.sample_count import count_range_samples
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.registry import strategy
from paragrad.strategies.shares import Division, apportion_samples
from paragrad.trainer.pace import Pace, SlowRanks, read_slow_ranks
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer
from paragrad.validation.validate import validate_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]


def make_vectors_job(**changes: Any) -> pg.Job:
    return make_job("vectors", make_mlp, VECTORS).replace(
        **{"epochs": 3, "dtype": torch.float64, **changes}
    )


# ---- slowed on purpose -----------------------------------------------------------------------
def test_slow_ranks_option_is_parsed() -> None:
    assert read_slow_ranks("1=3x", None) == SlowRanks(((1, 3.0),))
    assert read_slow_ranks("1=3, 2=1.5x,random:0.2=3x", 0.05) == SlowRanks(
        ((1, 3.0), (2, 1.5)), (0.2, 3.0), 0.05
    )
    assert read_slow_ranks(None, None) == SlowRanks()


@pytest.mark.parametrize(
    ("slow", "pace", "says"),
    [
        ("1", None, "write RANK=FACTOR"),
        ("one=3x", None, "write RANK=FACTOR"),
        ("1=0.5x", None, "give at least 1"),
        ("random:0.2", None, "write random:SHARE=FACTOR"),
        ("random:2=3x", None, "give a number above 0, at most 1"),
        ("random:0=3x", None, "give a number above 0, at most 1"),
        ("random:0.1=0x", None, "give at least 1"),
        (3, None, "slow must be a text"),
        (None, 0, "pace must be seconds above 0"),
        (None, "fast", "pace must be seconds above 0"),
        ("1=3x,1=4x", None, "rank 1 appears twice"),
        ("random:0.2=3x,random:0.5=5x", None, "random appears twice"),
        ("2=3x", None, "there are 2 worker(s); give one from 0 to 1"),
    ],
)
def test_invalid_slow_ranks_and_paces_are_refused(slow: Any, pace: Any, says: str) -> None:
    with pytest.raises(pg.Refused) as caught:
        pg.train(make_vectors_job(), "data(2)", slow=slow, pace=pace)
    assert says in str(caught.value)


def test_random_slow_steps_are_equal_in_every_process() -> None:
    slowed = read_slow_ranks("random:0.2=3x,0=2x", None)
    factors = [
        [slowed.compute_slowdown(5, rank, step) for step in range(1000)] for rank in range(2)
    ]
    assert set(factors[0]) == {2.0, 6.0}
    assert set(factors[1]) == {1.0, 3.0}
    assert all(150 < sum(each > 2.5 for each in row) < 250 for row in factors)
    assert factors[0] != [2 * each for each in factors[1]]


def measure_waits(
    monkeypatch: pytest.MonkeyPatch, slowed: SlowRanks, took: list[float], samples: int = 16
) -> tuple[Pace, list[float]]:
    """Return the pace of rank 1, and its waits in steps whose passes take these seconds.

    The seconds are CPU time. A share is 16 samples.
    """
    pace = Pace(slowed, 0, 1)
    waited = []
    clock = [0.0]
    passes = SimpleNamespace(forward_seconds=0.0, forward_cpu_seconds=0.0)
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", waited.append)
    for step, seconds in enumerate(took):
        with pace.pace_step(step, samples, 16.0, passes):  # type: ignore[arg-type]
            clock[0] += seconds
            # the core is shared: by the wall clock, everything takes twice as long
            passes.forward_cpu_seconds += seconds / 3
            passes.forward_seconds += 2 * seconds / 3
    return pace, waited


def test_slow_rank_waits_for_the_simulated_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measure_waits(monkeypatch, SlowRanks(), [0.5, 0.25])[1] == [0.0, 0.0]
    pace, waited = measure_waits(monkeypatch, SlowRanks(((1, 3.0),)), [0.5, 0.25])
    assert waited == [2.0, 1.0]  # the steps take one second, and half a second
    assert (pace.samples, pace.seconds) == (32, 4.5)
    assert measure_waits(monkeypatch, SlowRanks(((0, 3.0),)), [0.5])[1] == [0.0]
    # half a share: two seconds
    assert measure_waits(monkeypatch, SlowRanks((), None, 4.0), [0.5], samples=8)[1] == [1.0]
    assert measure_waits(monkeypatch, SlowRanks(((1, 3.0),), None, 4.0), [0.5])[1] == [11.0]


@pytest.mark.parametrize(
    "text", ["data(2)", "data(2, reduce=ring)", "local(2, every=2)", "pipeline(2)", "serial"]
)
def test_slowed_training_equals_serial(tmp_path: Path, text: str) -> None:
    slow, quick = (
        pg.train(make_vectors_job(epochs=1), text, runs=tmp_path, **more)
        for more in ({"slow": "0=2x,random:0.5=3x", "pace": 0.01}, {})
    )
    assert slow.losses == quick.losses
    assert slow.header["settings"]["slow"] == "0=2x,random:0.5=3x"


# ---- shares that follow ----------------------------------------------------------------------
def adapt_shares(
    told: list[tuple[float, float]], before: tuple[int, ...], full: int = 64
) -> tuple[int, ...]:
    """Return the shares that follow from the (samples, seconds) of the ranks."""
    world: Any = SimpleNamespace(
        all_gather=lambda own: [torch.tensor(each, dtype=torch.float64) for each in told]
    )
    return (
        Pace(SlowRanks(), 0, 0)
        .update_shares(world, full, Division(before), StepLog(None), 1)
        .shares
    )


def test_shares_are_proportional_to_speed() -> None:
    assert apportion_samples(64, adapt_shares([(160, 1.0), (160, 3.0)], (1, 1))) == [48, 16]
    assert apportion_samples(
        64, adapt_shares([(160, 1.0), (160, 1.0), (320, 1.0), (160, 1e9)], (1, 1, 1, 1))
    ) == [
        16,
        16,
        31,
        1,
    ]
    # each rank gets at least one sample
    assert adapt_shares([(160, 1.0), (20, 1.0), (20, 1.0), (10, 1.0)], (1, 1, 1, 1), 4) == (
        1,
        1,
        1,
        1,
    )
    assert min(adapt_shares([(160, 1.0), (1, 1.0), (1, 1.0)], (1, 1, 1), 7)) == 1
    assert apportion_samples(4000, adapt_shares([(1999, 1.0), (1, 1.0)], (1, 1), 4000)) == [3997, 3]


def test_shares_stay_without_a_clear_gain() -> None:
    assert adapt_shares([(160, 1.0), (160, 1.01)], (1, 1)) == (1, 1)
    assert adapt_shares([(160, 1.0), (0, 0.0)], (3, 1)) == (3, 1)


def test_shares_change_once_an_epoch() -> None:
    """Earlier, shares could change in the middle of an epoch.

    This happened in a user's loop that ran a test there, and then continued the epoch.
    """
    world: Any = SimpleNamespace(all_gather=lambda own: [own, own * torch.tensor([1.0, 3.0])])
    pace = Pace(SlowRanks(), 0, 0)
    shares = []
    for epoch in (1, 1, 2):
        pace.samples = pace.samples + 160
        pace.seconds = pace.seconds + 1.0
        shares.append(pace.update_shares(world, 64, Division((1, 1)), StepLog(None), epoch).shares)
    assert apportion_samples(64, shares[0]) == apportion_samples(64, shares[2]) == [48, 16]
    assert shares[1] == (1, 1)  # the shares before the call
    assert pace.samples == 0


def test_fixed_shares_are_reported_at_start() -> None:
    """Earlier, a training of one epoch used equal shares without a message."""
    with pytest.warns(
        UserWarning,
        match="job vectors has only one, so they stay equal; give more epochs, or give the",
    ):
        validate_run(make_vectors_job(epochs=1), "data(2, shares=auto)")
    with pytest.warns(UserWarning, match="they stay equal"):
        validate_run(make_vectors_job(), "data(2, shares=auto)", Settings(limit=3))
    validate_run(make_vectors_job(epochs=2), "data(2, shares=auto)")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "text", ["data(2, shares=auto)", "data(2, shares=auto, reduce=ring)", "data(3, shares=auto)"]
)
def test_slow_rank_gets_fewer_samples_and_equals_serial(tmp_path: Path, text: str) -> None:
    run = pg.train(make_vectors_job(), text, runs=tmp_path, slow="1=5x", pace=0.05)
    serial = pg.train(make_vectors_job(), "serial", runs=tmp_path)
    assert run.losses == pytest.approx(serial.losses, rel=1e-10)
    assert (run.sample_count.twice, run.sample_count.missed) == (0, 0)
    record = Record(run.folder)
    orders = [[line["order"] for line in record.select_lines("step", rank)] for rank in range(2)]
    first, second = (list(map(count_range_samples, each)) for each in orders)
    assert first[0] == second[0]
    assert first[3] > 2 * second[3] > 0
    assert [line["what"] for line in record.select_lines("choice", 0)].count("shares") >= 1


def test_shares_change_only_between_epochs(tmp_path: Path) -> None:
    run = pg.train(
        make_vectors_job(epochs=2), "data(2, shares=auto)", runs=tmp_path, slow="0=5x", pace=0.05
    )
    counts = [
        count_range_samples(line["order"]) for line in Record(run.folder).select_lines("step", 0)
    ]
    assert counts[:3] == [6, 6, 3]
    assert counts[3] == counts[4] < 6


def test_batch_norm_does_not_hide_the_slow_rank(tmp_path: Path) -> None:
    """Earlier, all ranks seemed to take equally long, so the shares did not change.

    The reason was that a forward waits for the batch norm statistics of the other ranks.
    """
    made = make_job("normed", make_batch_norm_cnn, IMAGES, dtype=torch.float64, epochs=2)
    run = pg.train(made, "data(2, shares=auto)", runs=tmp_path, slow="1=5x", pace=0.05)
    serial = pg.train(made, "serial", runs=tmp_path)
    assert run.losses == pytest.approx(serial.losses, rel=1e-8)
    assert any(line["what"] == "shares" for line in run.select_lines("choice"))


@pytest.mark.parametrize(
    "text", ["data(2, shares=auto) * pipeline(2)", "data(2, shares=auto, state=fully_sharded)"]
)
def test_pace_is_not_measured_if_forwards_wait_for_each_other(text: str) -> None:
    with pytest.raises(pg.Refused, match=r"give the shares, such as shares=\[3, 1\]"):
        strategy(text)


@pytest.mark.parametrize("more", ["micro=2", "batch_norm=share"])
def test_adaptive_shares_are_refused_if_batch_norm_may_see_one(more: str) -> None:
    made = make_job("normed", make_batch_norm_cnn, IMAGES)
    with pytest.raises(pg.Refused, match=f"leave out {more.partition('=')[0]}"):
        pg.train(made, f"data(2, shares=auto, {more})")


def test_verify_takes_uneven_shares(tmp_path: Path) -> None:
    """Verify uses uneven shares: a run begins with equal ones, and uneven ones follow."""
    assert strategy("data(3, shares=auto)").verifiable.division == Division((3, 2, 1))
    assert strategy("data(2)").verifiable == strategy("data(2)")
    assert pg.verify(make_vectors_job(), "data(3, shares=auto)", runs=tmp_path).same


def test_two_data_iterators_keep_their_first_shares(tmp_path: Path) -> None:
    """Earlier, another call of `batches` changed the rest of an iterator that was in use."""
    trainer = Trainer.build_for_job(World(), make_vectors_job(), strategy("data(1)"))
    first = trainer.batches(VECTORS, 12, 0)
    next(first)
    trainer.training.state.use_division(Division((1,), 3))
    next(first)
    assert trainer.training.feed.pending_batch is not None
    assert len(trainer.training.feed.pending_batch.micro_batches) == 1
    trainer.close()
