"""A user can write their own strategy and their own all-reduce. They work like the built-in ones,
and nothing in the library has to change.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from equality_table import IMAGES, JOBS
from typer.testing import CliRunner
from user_majority_vote import Vote, VoteExchange, job

import paragrad as pg
from paragrad.commands.cli import app
from paragrad.engine.passes import LossSums
from paragrad.launch import Launcher
from paragrad.record.record import Record
from paragrad.runtime.mesh import Axis
from paragrad.runtime.world import World
from paragrad.strategies.shares import Division
from paragrad.strategies.strategy import ScheduleUse
from paragrad.trainer.trainer import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own_all_reduce.py"


def run_command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paragrad", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
    )


# ---- a technique -----------------------------------------------------------------------------
def test_user_strategy_trains_and_is_recorded(tmp_path: Path) -> None:
    run = pg.train(job, Vote(2), runs=tmp_path)
    assert run.header["strategy"] == run.header["resolved"] == "vote(2)"
    assert run.losses[-1] < run.losses[0]
    assert run.sent_per_step["votes"]["bytes"] == 4 * (10 * 16 + 16 + 16 * 4 + 4)
    assert str(pg.strategy("vote(2)")) == "vote(2)"
    assert run.resolved == Vote(2)


def test_user_strategy_is_saved_and_resumed(tmp_path: Path) -> None:
    """A run that is resumed with as many ranks ends with the weights of an uninterrupted run.

    `data` can continue from its checkpoint, as from any other checkpoint.
    """
    whole = pg.train(job, Vote(2), runs=tmp_path, save=1)
    first = pg.train(job.replace(epochs=1), Vote(2), runs=tmp_path, save=1)
    resumed = pg.train(job, Vote(2), runs=tmp_path, resume=first.folder)
    for name, tensor in whole.model().state_dict().items():
        assert torch.equal(tensor, resumed.model().state_dict()[name])
    assert len(pg.train(job, "data(2)", runs=tmp_path, resume=first.folder).losses) == len(
        resumed.losses
    )


def test_verify_reports_an_inexact_strategy(tmp_path: Path) -> None:
    certificate = pg.verify(job, Vote(2), runs=tmp_path)
    assert not certificate.same
    assert certificate.first == ("gradient of 0.weight", 0)


def test_unsupported_product_is_refused() -> None:
    with pytest.raises(
        pg.Refused, match=r"vote holds replicas: at most one such part in a product, leftmost"
    ):
        pg.Data(2) * Vote(2)
    both = pg.Data(2)
    with pytest.raises(pg.Refused, match="data holds replicas"):
        both * both
    assert str(Vote(2) * pg.strategy("pipeline(2)")) == "vote(2) * pipeline(2)"


class Lying(Vote):
    """A strategy that is not exact, but claims in its guarantees to be exact."""

    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees()


def test_false_claim_of_exactness_ends_in_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        pg.RankFailed, match=r"before the first update the gradient is off.*the exchange of lying"
    ) as caught:
        pg.train(job, Lying(2), runs=tmp_path)
    assert caught.value.step == 0
    assert not pg.verify(job, Lying(2), runs=tmp_path).same


def test_page_shows_the_tested_files() -> None:
    page = (ROOT / "docs" / "how_to" / "own_all_reduce.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    helpers = ROOT / "tests" / "helpers"
    files = (OWN, helpers / "user_majority_vote.py", helpers / "user_model_parallel.py")
    for code, file in zip(shown, files, strict=True):
        assert code.strip() in file.read_text()


# ---- several axes ----------------------------------------------------------------------------
class Twofold(pg.Strategy):
    """A strategy whose replicas have two ranks each; both ranks compute the same.

    It asks of a trainer what a product of data parallelism and a divided model asks.
    """

    workers: int = pg.option(pg.Integer(2))

    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return Axis("data", self.workers // 2), Axis("fold", 2, "model")

    def make_exchange(self, replica: Any, world: World, log: Any, options: Any) -> pg.Exchange:
        return Summed(replica, world)


class Summed(VoteExchange):
    """An exchange that sums over one axis of the world; all ranks share a stop request."""

    def __init__(self, replica: Any, world: World) -> None:
        super().__init__(replica, world.select_axes("data"))
        self.all = world

    def finish(self, weight: float, loss: float) -> None:
        own = torch.tensor([weight, loss, self.doubtful_weight], dtype=torch.float64)
        weight, loss, doubt = self.world.all_reduce(own).tolist()
        self.totals = [
            weight,
            loss,
            float(self.all.all_reduce(torch.tensor(float(self.stop_requested)))),
            doubt,
        ]
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.grad = self.world.all_reduce(
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )

    average = pg.Exchange.average


class Reordered(Twofold):
    """A strategy with its own passes, in the order of a pipeline.

    All forwards of a step come first, then all backwards, the last micro-batch first.
    """

    @property
    def division(self) -> Division:
        return Division((2, 1), micro=2)

    def make_passes(self, within: Any, exchange: pg.Exchange) -> Any:
        return ForwardsFirst(within, exchange)


class ForwardsFirst(pg.Passes):
    factor = 1.0

    def compute_gradients(self, micros: Any, count: int) -> LossSums:
        loss = 0.0
        weight = 0.0
        made = []
        for micro, inputs, target in micros:
            with self.host.key_draws(micro):
                share, more = self.exchange.module(inputs, target, len(micro.positions))
            made.append(share)
            loss = loss + float(share.detach())
            weight = weight + more
        for share in reversed(made):
            share.backward(share.new_tensor(self.factor))
        return LossSums(loss, weight)


def test_user_passes_equal_serial(tmp_path: Path) -> None:
    assert pg.verify(job, Reordered(4), runs=tmp_path).same
    assert "first step" not in {
        line["what"] for line in pg.train(job, Reordered(4), runs=tmp_path).select_lines("choice")
    }


def request_stop_on_rank_1(world: World, chosen: pg.Strategy) -> tuple[bool, bool]:
    """Make two steps, and return for each whether this rank knows of a stop request.

    Rank 1 gets the request after the first step. The loop changes its inputs before each step.
    """
    trainer = Trainer.build_for_job(world, job, chosen)
    stops = []
    try:
        for inputs, target in trainer.batches(job.train, job.batch, 0):
            stops.append(trainer.step(inputs * 2.0, target).stop)
            if world.rank == 1:
                world.stop.set()
            if len(stops) == 2:
                return tuple(stops)
    finally:
        world.stop.clear()
        trainer.close()
    raise AssertionError


@pytest.mark.parametrize("chosen", [Twofold(4), Reordered(4), Twofold(2)])
def test_stop_request_reaches_all_ranks_under_user_passes(
    pool: Launcher, chosen: pg.Strategy
) -> None:
    """All ranks learn of a stop request in the same step.

    Earlier, the request was set in the passes of one worker only, so the others did not see it.
    Also, if the loop had changed its batch, the step of one worker counted the share of two
    ranks twice.
    """
    assert (
        pool.run(request_stop_on_rank_1, chosen, size=chosen.workers)
        == [(False, True)] * chosen.workers
    )


@pytest.mark.table
def test_strategy_of_two_axes_equals_serial(tmp_path: Path) -> None:
    """A share belongs to a replica, not to a rank, so every sample counts once.

    Batch norm and tests see each sample once, and only one rank of a replica records it.
    """
    for each in (job, JOBS["cnn with batch norm"].replace(test=IMAGES, metric=pg.accuracy)):
        assert pg.verify(each, Twofold(4), runs=tmp_path).same
        run, serial = (
            pg.train(each, strategy, runs=tmp_path) for strategy in (Twofold(4), "serial")
        )
        assert (run.sample_count.twice, run.sample_count.missed) == (0, 0)
        assert run.losses == pytest.approx(serial.losses, rel=1e-4)
        assert run.test == (None if serial.test is None else pytest.approx(serial.test))


# ---- answers left out, contradictions --------------------------------------------------------
class Silent(pg.Strategy):
    workers: int = pg.option(pg.Integer())


class Idle(pg.Strategy):
    workers: int = pg.option(pg.Integer())

    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees(exact=False)


class Crooked(Vote):
    @property
    def axes(self) -> tuple[object, ...]:
        return (*super().axes, *super().axes)


class Uneven(Vote):
    @property
    def division(self) -> object:
        return type(super().division)((1,))


class Sure(Vote):
    @property
    def guarantees(self) -> Any:
        return True


class Paired(Vote):
    @property
    def axes(self) -> Any:
        return (("data", self.workers),)


class Doubled(Vote):
    @property
    def axes(self) -> Any:
        return Axis("data", self.workers), Axis("data", 1)


class Slipping(Vote):
    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees(exact=self.exactly)  # type: ignore[attr-defined]


class Gathering(Vote):
    def plan_schedules(self) -> Any:
        return (ScheduleUse("all-gather", pg.Ring(), 2),)


class Nobody(pg.Strategy):
    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees(exact=False)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (Silent(2), "Silent has no guarantees; give it a property `guarantees`"),
        (
            Idle(2),
            r"Idle has no make_exchange; give it a method `make_exchange\(self, replica, world, "
            r"log, options\)`",
        ),
        (Nobody(), "Nobody has no workers; give it the field"),
        (Sure(2), r"sure\(2\) promises True; let it be Guarantees"),
        (
            Paired(2),
            "Paired raised AttributeError: 'tuple' object has no attribute 'size'",
        ),
        (Doubled(2), "has two axes data"),
        (
            Slipping(2),
            "Slipping raised AttributeError: 'Slipping' object has no attribute 'exactly'",
        ),
        (
            Gathering(2),
            r"gathering\(2\) plans 'all-gather', which paragrad cannot prove; known: all-reduce",
        ),
        (Crooked(2), "has 2 workers, and axes of 4 ranks: crooked 2 x crooked 2"),
        (Uneven(2), "divides a batch into 1 shares, and its axes have 2 replicas"),
    ],
)
def test_incomplete_or_contradictory_strategy_is_refused(chosen: pg.Strategy, says: str) -> None:
    with pytest.raises(pg.Refused, match=says):
        pg.train(job, chosen)


class Empty(Vote):
    """A strategy whose `make_exchange` returns None."""

    def make_exchange(self, replica: Any, world: Any, log: Any, options: Any) -> Any:
        return None


def test_invalid_exchange_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        pg.RankFailed, match=r"the exchange of empty is a NoneType; return a paragrad\.Exchange"
    ):
        pg.train(job, Empty(2), runs=tmp_path)


class Few(Vote):
    """A strategy whose exchange returns three totals instead of four."""

    def make_exchange(self, replica: Any, world: Any, log: Any, options: Any) -> pg.Exchange:
        made = VoteExchange(replica, world)
        made.reduce_totals = lambda: made.totals[:3]  # type: ignore[method-assign]
        return made


class Passless(Reordered):
    def make_passes(self, within: Any, exchange: pg.Exchange) -> Any:
        return None


class Pairing(Reordered):
    def make_passes(self, within: Any, exchange: pg.Exchange) -> Any:
        right = ForwardsFirst(within, exchange)
        right.compute_gradients = lambda micros, count: (1.0, 2.0)
        return right


class Raising(Vote):
    def refuse_job(
        self, facts: Any, requested: pg.Strategy, skip_first_step_check: bool = False
    ) -> None:
        raise KeyError("rows")


class Fickle(pg.AllReduce):
    """An all-reduce with another program in some processes: `Direct` instead of `Ring`."""

    def program(self, rank: int, size: int) -> Any:
        return (
            pg.Ring().program(rank, size)
            if os.environ.get("FICKLE") != "yes"
            else pg.Direct().program(rank, size)
        )


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (
            Few(2),
            "reduce_totals\\(\\) of VoteExchange gives 3 numbers; give four: weight, loss, ranks "
            "asked to stop, doubtful weight",
        ),
        (Passless(4), r"the passes of passless\(4\) are a NoneType; return paragrad\.Passes"),
        (
            Pairing(4),
            r"compute_gradients\(\) of ForwardsFirst gives a tuple; "
            r"give paragrad\.LossSums\(loss, weight\)",
        ),
    ],
)
def test_wrong_return_types_are_named(chosen: pg.Strategy, says: str, tmp_path: Path) -> None:
    with pytest.raises(pg.RankFailed, match=says):
        pg.train(job, chosen, runs=tmp_path)


def test_failing_strategy_method_is_refused_by_name() -> None:
    with pytest.raises(pg.Refused, match=r"Raising raised KeyError: 'rows'; repair it"):
        pg.train(job, Raising(2))
    with pytest.raises(
        pg.Refused, match=r"data\(reduce=\.\.\.\) got the class Fickle; write Fickle\(\)"
    ):
        pg.Data(2, reduce=Fickle)  # type: ignore[arg-type]


def run_fickle_step(world: World) -> None:
    """Make a step in which rank 1 has another environment variable than rank 0."""
    os.environ["FICKLE"] = "yes" if world.rank else "no"
    trainer = Trainer.build_for_job(
        world, job, pg.strategy("data(2, reduce=fickle, state=replicated)")
    )
    try:
        trainer.step(*next(trainer.batches(job.train, job.batch, 0)))
    finally:
        del os.environ["FICKLE"]
        trainer.close()


def test_different_programs_on_ranks_are_reported(pool: Launcher) -> None:
    """Earlier, ranks with different programs aborted over gloo, or waited for ever."""
    with pytest.raises(
        pg.RankFailed,
        match=r"fickle has another program on rank . than on rank .: it must be a function of",
    ):
        pool.run(run_fickle_step, size=2)


@pytest.mark.table
def test_file_run_and_imported_defines_one_class(tmp_path: Path) -> None:
    """A job file may be run and also be imported by another module.

    Earlier, this was refused, as if two classes had the same name.
    """
    (tmp_path / "rumour.py").write_text(
        OWN.read_text()
        .replace("Line", "Hearsay")
        .replace("import paragrad", "import beside\nimport paragrad", 1)
    )
    (tmp_path / "beside.py").write_text("import rumour\n")
    done = run_command("train", "rumour.py", "--strategy", "data(2, reduce=hearsay)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.story
def test_unknown_strategy_class_names_its_import(tmp_path: Path) -> None:
    folder = pg.train(job, Vote(2), runs=tmp_path).folder
    code = (
        "from pathlib import Path; import paragrad as pg; pg.Run(pg.job('digits'), "
        f"Path({str(folder)!r})).resolved"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.search(
        r"was trained under vote\(2\): .* import the file that defines it first",
        done.stderr,
    )


def test_strategies_command_lists_those_of_a_file() -> None:
    answer = CliRunner().invoke(app, ["strategies", "--job", str(OWN)])
    assert answer.exit_code == 0, answer.output
    assert re.search(r"reduce\s+line\s+\S", answer.stdout)


def test_unimportable_class_is_sent_or_refused(tmp_path: Path) -> None:
    """A class whose module has no file is sent to the ranks by value.

    If the class cannot be sent by value, it is refused before the ranks start.
    """
    ghost = ModuleType("ghost")
    code = "import threading\nimport paragrad as pg\nlock = threading.Lock()\n"
    code += OWN.read_text().split("\njob = ")[0].replace("Line", "Rumour")
    exec(code, vars(ghost))
    assert len(pg.train(job, pg.Data(2, reduce=ghost.Rumour()), runs=tmp_path).losses) == 6
    exec(
        "class Locked(Rumour):\n    def parts(self, size):\n        with lock:\n            "
        "return size",
        vars(ghost),
    )
    with pytest.raises(pg.Refused, match="cannot be sent to the ranks"):
        pg.train(job, pg.Data(2, reduce=ghost.Locked()), runs=tmp_path)


class Doubled(ForwardsFirst):
    factor = 2.0


class Scaled(Reordered):
    """A strategy that runs backward on twice the share of the loss."""

    def make_passes(self, within: Any, exchange: pg.Exchange) -> Any:
        return Doubled(within, exchange)


def test_wrong_gradient_scale_ends_in_the_first_step(tmp_path: Path) -> None:
    """Earlier, a difference in float32 was examined again in float64.

    That comparison ignored the scale of the gradient.
    """
    with pytest.raises(pg.RankFailed, match="the gradient is off") as caught:
        pg.train(job, Scaled(4), runs=tmp_path)
    assert caught.value.step == 0


def test_notation_words_are_reserved_and_fields_are_options() -> None:
    for name, base in (
        ("Auto", pg.AllReduce),
        ("true", pg.AllReduce),
        ("Native", pg.AllReduce),
        ("Data", pg.AllReduce),
        ("Ring", pg.Strategy),
    ):
        with pytest.raises(pg.Refused, match="give it another name"):
            type(name, (base,), {"__module__": "mine"})
    with pytest.raises(
        pg.Refused, match=r"hops is no option; write it .* as an option, such as hops: int"
    ):
        type(
            "Hopping",
            (pg.AllReduce,),
            {"__module__": __name__, "__annotations__": {"hops": "int"}, "hops": 1},
        )


def test_built_in_names_take_precedence() -> None:
    """A user's class cannot take the name of a built-in one, also in a fresh process.

    Earlier, the user's class was defined first there, and then the built-in one could not be
    imported.
    """
    for text in ("class Ring(pg.AllReduce): pass", "class Data(pg.Strategy): pass"):
        words = [sys.executable, "-c", f"import paragrad as pg\n{text}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert re.search(
            r"Refused: __main__\.\w+ would be called \w+, as paragrad\.", done.stderr
        ), done.stderr


def test_all_reduce_without_a_program_is_refused() -> None:
    bare = type("Bare", (pg.AllReduce,), {"__module__": __name__})
    with pytest.raises(
        pg.Refused, match=r"Bare has no program; give it a method program\(rank, size\)"
    ):
        pg.train(job, pg.Data(2, reduce=bare()))


def test_two_strategies_of_one_name_are_refused() -> None:
    with pytest.raises(
        pg.Refused,
        match=r"would be called ring, as paragrad\.schedules\.ring\.Ring is; give it another name",
    ):
        type("Ring", (pg.AllReduce,), {"__module__": "mine"})
    with pytest.raises(
        pg.Refused, match=r"mine\.Data would be called data, as paragrad\.strategies\.data\.Data is"
    ):
        type("Data", (pg.Strategy,), {"__module__": "mine"})


# ---- an all-reduce ---------------------------------------------------------------------------
@pytest.mark.table
def test_user_all_reduce_example_as_its_page_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(OWN)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "0 | >1:0" in done.stdout
    assert re.search(
        r"line: \d+ us for 100 KB over 3 ranks, simulated on this machine", done.stdout
    )
    (folder,) = (tmp_path / "runs").glob("*-digits-compare")
    row = next(row for row in pg.Table(folder).rows if "line" in row.resolved)
    assert row.strategy == "data(3, reduce=line)"
    assert row.failure is None
    assert row.difference is not None
    assert row.difference <= 1e-10
    assert "data(3, reduce=line)" in (folder / "page.html").read_text()


@pytest.mark.story
def test_command_finds_the_all_reduce_of_a_job_file(tmp_path: Path) -> None:
    done = run_command("train", str(OWN), "--strategy", "data(3, reduce=line)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert Record(folder).header["resolved"] == "data(3, reduce=line, state=replicated)"
    for words, shown in (
        (["draw"], "line, 3 ranks"),
        (["simulate", "--bytes", "1MB"], "by the clock"),
    ):
        answer = CliRunner().invoke(app, [*words, "data(3, reduce=line)", "--job", str(OWN)])
        assert answer.exit_code == 0, answer.output
        assert shown in answer.stdout


@pytest.mark.table
def test_a_skipped_chunk_is_refused_with_rank_and_slot(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    whole, part = OWN.read_text(), "for part in range(size):"
    assert part in whole
    broken.write_text(whole.replace(part, "for part in range(1, size):", 1))
    done = run_command("train", str(broken), "--strategy", "data(3, reduce=line)", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "line is no all-reduce of 3 ranks: rank 0 ends without the contribution of rank 0 in "
        "slot 0" in done.stderr
    )
