"""local: every worker steps alone, and weights are averaged every so many steps."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import IMAGES, LOOSER, TEXT, VECTORS, TiedLstm, job, mlp, normed_cnn, resolved
from safetensors.torch import load_file
from torch import Tensor, nn

import paragrad as pg
from paragrad.datasets.loading import parted
from paragrad.record.record import Record
from paragrad.strategies.strategy import Strategy
from paragrad.strategies.table import strategy
from paragrad.training.settings import Settings
from paragrad.training.trainer import Trainer
from paragrad.verbs.lockstep import distances
from paragrad.world.launching import Ranks
from paragrad.world.world import World

pytestmark = pytest.mark.usefixtures("warm")

State = dict[str, Tensor]
plain = functools.partial(torch.optim.SGD, lr=0.1)
heavy = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 7                       # of the vectors 3 are an epoch; its last batch has 5 samples


def vectors(**changes: Any) -> pg.Job:
    return job("vectors", mlp, VECTORS).replace(**{"epochs": 4, "dtype": torch.float64, "optimizer": plain, **changes})


def steps_of(world: World, made: pg.Job, chosen: Strategy, steps: int) -> list[tuple[State, State]]:
    """(what the run stands for, what this rank has), before the first step of all and after each."""
    trainer, found = Trainer.of_job(world, made, chosen), []
    own = lambda: {name: each.detach().clone() for name, each in trainer.model.state_dict().items()}      # noqa: E731
    begun = own()
    try:
        for epoch in range(made.epochs):
            for fetched in trainer.batches(made.train, made.batch, epoch):
                trainer.step(*parted(fetched))
                found.append(({name: each.clone() for name, each in trainer.state().items()}, own()))
                if len(found) == steps:
                    return [(begun, begun), *found]
    finally:
        trainer.close()
    raise AssertionError


def steps_on(pool: Ranks, made: pg.Job, text: str, steps: int = STEPS) -> list[list[tuple[State, State]]]:
    chosen = resolved(text)
    return pool.run(steps_of, made, chosen, steps, size=chosen.size)


def close(one: State, other: State, within: float = 1e-10) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=within) for name in one)


# ---- it is serial's, where it can be -------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["local(3, every=1)", "local(3, every=1, reduce=ring)", "local(2, every=1, reduce=tree)",
                                  "local(4, every=1)", "local(2, every=1) * tensor(2)", "local(2, every=1) * pipeline(2)",
                                  "local(3, after=99)", "local(1)", "local(2, every=1, outer=nesterov(lr=1, momentum=0))",
                                  "local(2, every=1, outer=elastic(pull=0.5)) * place(2)"])
def test_averaged_after_every_step_plain_sgd_is_serials(pool: Ranks, text: str) -> None:
    """Weighted by samples: of the last batch of 5 four workers have 2, 1, 1 and 1. Elastic with a pull of 1/2 on two replicas
    has its centre in their mean, but replicas do not meet in it."""
    chosen = resolved(text)
    found = pool.run(distances, vectors(optimizer=functools.partial(plain, weight_decay=0.01)), chosen, Settings(), STEPS,
                     size=chosen.size)[0]
    assert max(found[:1] if "elastic" in text else found) < 1e-10


@pytest.mark.parametrize("text", LOOSER)
def test_with_momentum_it_is_another_training_and_says_how_far(pool: Ranks, tmp_path: Path, text: str) -> None:
    chosen = resolved(text)
    found = pool.run(distances, vectors(optimizer=heavy), chosen, Settings(), 6, size=chosen.size)[0]
    assert all(1e-6 < distance < 1.0 for distance in found[4:])
    assert not pg.verify(vectors(optimizer=heavy), text, runs=tmp_path).same


def test_replicas_are_apart_between_meetings_and_one_after_them(pool: Ranks) -> None:
    ranks = steps_on(pool, vectors(), "local(3, every=3)")
    for step in range(1, STEPS + 1):
        stands, owns = [rank[step][0] for rank in ranks], [rank[step][1] for rank in ranks]
        assert all(close(each, stands[0], 0.0) for each in stands)
        assert all(close(each, owns[0], 0.0) for each in owns) == (step % 3 == 0)
        mean = {name: sum(own[name] * weight for own, weight in zip(owns, (4, 4, 4), strict=True)) / 12 for name in owns[0]}
        if step < 3:                                    # until the short batch all have as many samples
            assert close(stands[0], mean)               # type: ignore[arg-type]


def test_synchronous_steps_first_are_those_of_data(pool: Ranks) -> None:
    """Post-local SGD: with momentum, whose state all replicas then share."""
    local, data = (steps_on(pool, vectors(optimizer=heavy), text) for text in ("local(2, every=2, after=3)", "data(2)"))
    assert all(close(local[0][step][1], data[0][step][1], 1e-12) for step in range(4))
    assert not close(local[0][4][1], local[1][4][1])
    assert close(local[0][5][1], local[1][5][1], 0.0)


# ---- beside others' ------------------------------------------------------------------------------------------------------
def torchs(world: World, made: pg.Job, steps: int, every: int, after: int) -> State:
    """torch's own post-local SGD, over the same shares: gradients are averaged in its hook's place in the first steps."""
    with warnings.catch_warnings(action="ignore"):          # torch's own, of torch.jit
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer
    model = made.model_to_train()
    averager = PeriodicModelAverager(period=every, warmup_steps=after + every - 1)
    optimizer = PostLocalSGDOptimizer(made.optimizer(model.parameters()), averager)
    trainer = Trainer.of_job(world, made, resolved("local(2, every=end)"))          # for its batches
    try:
        batches = (fetched for epoch in range(made.epochs) for fetched in trainer.batches(made.train, made.batch, epoch))
        for step, fetched in zip(range(steps), batches, strict=False):
            trainer.feed.taken(*parted(fetched))
            inputs, target = parted(fetched)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            if step < after:
                for parameter in model.parameters():
                    parameter.grad = world.all_reduced(parameter.grad) / world.size
            optimizer.step()
    finally:
        trainer.close()
    return {name: each.detach() for name, each in model.named_parameters()}


def test_it_is_torchs_own_post_local_sgd(pool: Ranks) -> None:
    """Whose averages count all replicas alike: batches are even here. It averages after the first step from `warmup_steps` on,
    ours after `every` steps alone."""
    made = vectors(optimizer=heavy, train=torch.utils.data.Subset(VECTORS, range(24)))
    for after, every in ((0, 3), (2, 2)):
        theirs = pool.run(torchs, made, 7, every, after, size=2, backend="gloo")
        ours = [rank[-1][1] for rank in steps_on(pool, made, f"local(2, every={every}, after={after})", 7)]
        assert all(close(other, mine, 1e-12) for mine, other in zip(ours, theirs, strict=True))
        assert not close(theirs[0], theirs[1])


def test_the_outer_step_is_torchs_sgd_with_nesterovs_momentum(pool: Ranks) -> None:
    """DiLoCo: the gradient of an outer step is how far the mean came from the centre."""
    ranks = steps_on(pool, vectors(), "local(2, every=2, outer=nesterov(lr=0.5, momentum=0.8))", 6)
    begun = ranks[0][0][1]
    centre = {name: nn.Parameter(each.clone()) for name, each in begun.items()}
    outer = torch.optim.SGD(centre.values(), lr=0.5, momentum=0.8, nesterov=True)
    for meeting in (2, 4, 6):
        # the mean just before the meeting: of replicas that begin at the centre and make two steps by themselves
        means = pool.run(alone_from, vectors(), {name: each.detach() for name, each in centre.items()}, meeting - 2, size=2)[0]
        for name, parameter in centre.items():
            parameter.grad = parameter.detach() - means[name]
        outer.step()
        assert close(ranks[1][meeting][1], {name: each.detach() for name, each in centre.items()})


def alone_from(world: World, made: pg.Job, begun: State, first: int) -> State:
    """The mean of two replicas, weighted by samples, after two steps on their own from some weights."""
    trainer = Trainer.of_job(world, made, resolved("local(2, every=end)"))
    trainer.model.load_state_dict(begun)
    try:
        order = made.order(len(made.train))
        places = [(step // order.steps, list(order.batches())[step % order.steps]) for step in (first, first + 1)]
        for fetched in trainer.batches_at(made.train, order, places):
            trainer.step(*parted(fetched))
        return trainer.state()
    finally:
        trainer.close()


def test_elastic_replicas_and_centre_are_pulled_as_published(pool: Ranks) -> None:
    ranks = steps_on(pool, vectors(train=torch.utils.data.Subset(VECTORS, range(24))), "local(2, every=1, outer=elastic)", 1)
    centre = ranks[0][0][1]
    free = [each[1][1] for each in steps_on(pool, vectors(train=torch.utils.data.Subset(VECTORS, range(24))),
                                            "local(2, every=end)", 1)]
    for own, stepped in zip((rank[1][1] for rank in ranks), free, strict=True):
        assert close(own, {name: each - 0.45 * (each - centre[name]) for name, each in stepped.items()}, 1e-12)


# ---- what else a model has -------------------------------------------------------------------------------------------------
def test_running_statistics_are_averaged_and_constants_left_alone(pool: Ranks) -> None:
    """A mean over three replicas is off in the last bit, which nobody wants in a table of constants."""
    made = job("normed", constant_cnn, IMAGES, dtype=torch.float64, optimizer=plain, epochs=3)
    ranks = steps_on(pool, made, "local(3, every=2)", 4)
    for step in (2, 4):
        assert all(close(rank[step][1], ranks[0][step][1], 0.0) for rank in ranks)
    apart = [rank[3][1]["1.running_mean"] for rank in ranks]
    assert not torch.equal(apart[0], apart[1])
    assert torch.equal(ranks[2][4][1]["constants"], ranks[2][0][1]["constants"])


def constant_cnn() -> nn.Module:
    model = normed_cnn()
    model.register_buffer("constants", torch.arange(1, 50, dtype=torch.float64).reciprocal())
    return model


def test_a_replica_without_a_sample_sits_a_step_out(pool: Ranks) -> None:
    """The last batch has one sample, for the first of three workers; a momentum that goes on alone would move the others."""
    made = vectors(train=torch.utils.data.Subset(VECTORS, range(25)), optimizer=heavy)
    ranks = steps_on(pool, made, "local(3, every=end)", 3)
    assert not close(ranks[0][3][1], ranks[0][2][1])
    for rank in ranks[1:]:
        assert close(rank[3][1], rank[2][1], 0.0)
    weights = (4 + 4 + 1, 8, 8)
    mean = {name: sum(weight * rank[3][1][name] for weight, rank in zip(weights, ranks, strict=True)) / 25
            for name in ranks[0][3][1]}
    assert close(ranks[1][3][0], mean)                  # type: ignore[arg-type]


def test_no_replica_updates_where_no_target_counts(pool: Ranks) -> None:
    """A batch whose targets are all ignored ends data(n); here no replica has anything to step by, and all go on."""
    data = torch.utils.data.TensorDataset(TEXT.tensors[0][:24], TEXT.tensors[1][:24].clone().fill_(-100))
    ranks = steps_on(pool, job("nothing", TiedLstm, data, dtype=torch.float64), "local(2, every=2)", 4)
    assert all(close(rank[step][1], rank[0][1], 0.0) for rank in ranks for step in range(5))


@pytest.mark.parametrize("text", ["local(2, every=2) * tensor(2)", "local(2, every=2, outer=nesterov) * pipeline(2)",
                                  "local(2, every=2, outer=elastic) * place(2)"])
def test_a_model_that_is_cut_is_averaged_part_by_part(pool: Ranks, text: str) -> None:
    """As the same replicas on one rank each."""
    cut, whole = steps_cut(pool, text), steps_cut(pool, text.partition(" *")[0])
    assert all(close(one, other) for one, other in zip(cut, whole, strict=True))


def steps_cut(pool: Ranks, text: str) -> list[State]:
    chosen = resolved(text)
    return pool.run(stands_for, vectors(optimizer=heavy), chosen, size=chosen.size)[0]      # type: ignore[no-any-return]


def stands_for(world: World, made: pg.Job, chosen: Strategy) -> list[State]:
    trainer, found = Trainer.of_job(world, made, chosen), []
    try:
        for epoch in range(2):
            for fetched in trainer.batches(made.train, made.batch, epoch):
                trainer.step(*parted(fetched))
                found.append({name: each.clone() for name, each in trainer.state().items()})
        return found
    finally:
        trainer.close()


# ---- a run -----------------------------------------------------------------------------------------------------------------
def images(**changes: Any) -> pg.Job:
    tested = {"epochs": 4, "test": VECTORS, "metric": pg.accuracy, "optimizer": plain}
    return job("images", mlp, VECTORS).replace(**{**tested, **changes})


def test_weights_travel_when_replicas_meet_and_what_a_test_sends_is_told_apart(tmp_path: Path) -> None:
    run = pg.train(images(), "local(4, every=4)", runs=tmp_path)
    record, parameters = Record(run.folder), 10 * 16 + 16 + 16 * 4 + 4
    sent = [line["sent"] for line in record.of("step", 0)]
    assert [bool(each) for each in sent] == [False, False, False, True] * 3
    epochs = record.of("epoch", 0)
    assert ["sent" in line for line in epochs] == [True, True, True, False]         # they have just met
    whole = sent[3]["weights"]["bytes"]
    assert whole == epochs[0]["sent"]["tests"]["bytes"]
    assert 1.5 * 4 * parameters <= whole <= 1.5 * 4 * parameters + 64
    assert run.sent_per_step["weights"]["bytes"] == round(whole / 4)


def test_a_test_does_not_feed_back(tmp_path: Path) -> None:
    """Tested after every epoch or not at all, it is the same training to the bit."""
    tested, not_tested = (pg.train(images(**changes), "local(3, every=5, outer=nesterov)", runs=tmp_path)
                          for changes in ({}, {"test": None, "metric": None}))
    assert tested.losses == not_tested.losses
    assert close(tested.model().state_dict(), not_tested.model().state_dict(), 0.0)


def test_the_saved_model_is_the_mean_at_the_end(tmp_path: Path, pool: Ranks) -> None:
    """ParallelSGD: replicas never meet before, so each is serial's training on its own shares."""
    made = vectors(epochs=2)
    run = pg.train(made, "local(2, every=end)", runs=tmp_path)
    assert not any(line["sent"] for line in Record(run.folder).of("step", 0))
    ranks = steps_on(pool, made, "local(2, every=end)", 6)
    weights = [sum(line["loss"][1] for line in Record(run.folder).of("step", rank)) for rank in range(2)]
    assert sum(weights) == 2 * len(VECTORS)
    mean = {name: sum(weight * rank[6][1][name] for weight, rank in zip(weights, ranks, strict=True)) / sum(weights)
            for name in ranks[0][6][1]}
    assert close(run.model().state_dict(), mean)        # type: ignore[arg-type]


@pytest.mark.parametrize("outer", ["mean", "nesterov", "elastic"])
def test_what_is_saved_goes_on_under_other_strategies(tmp_path: Path, outer: str) -> None:
    """Under serial names, with the mean of the optimizers' states; what the strategy alone keeps is named and left out."""
    made = images(optimizer=functools.partial(torch.optim.Adam, lr=0.01))
    text = f"local(2, every=2, outer={outer})"
    first = pg.train(made.replace(epochs=2), text, runs=tmp_path, save=3)
    folder = first.folder / "checkpoint-00000006"
    saved = load_file(folder / "optimizer.safetensors")
    assert set(saved) == {f"{name}/{what}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")
                          for what in ("step", "exp_avg", "exp_avg_sq")}
    assert (folder / "strategy.safetensors").exists() == (outer == "nesterov")
    for other in ("data(2)", "serial", text, "local(2, every=3, outer=nesterov(lr=0.5))"):
        run = pg.train(made, other, runs=tmp_path, resume=first.folder)
        assert len(run.losses) == 6
        left = [line for line in run.of("choice") if line["what"] == "checkpoint" and line["picked"].startswith("without")]
        assert bool(left) == (outer == "nesterov" and not other.startswith("local"))
        assert all(line["picked"] == "without outer momentum" for line in left)


def test_a_damaged_or_lost_file_of_the_strategy_is_found(tmp_path: Path) -> None:
    made = images(epochs=2)
    first = pg.train(made, "local(2, outer=nesterov)", runs=tmp_path, save=3)
    (first.folder / "checkpoint-00000006" / "strategy.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"strategy\.safetensors"):
        run = pg.train(made, "local(2, outer=nesterov)", runs=tmp_path, resume=first.folder)
    assert len(run.losses) == 3


def test_the_outer_momentum_is_kept(tmp_path: Path) -> None:
    """Saved when replicas have met, the outer step goes on as if nothing had been; plain SGD has no state that differs."""
    made = vectors(epochs=4)
    text = "local(2, every=3, outer=nesterov)"
    whole = pg.train(made, text, runs=tmp_path)
    first = pg.train(made.replace(epochs=2), text, runs=tmp_path, save=6)
    resumed = pg.train(made, text, runs=tmp_path, resume=first.folder)
    assert close(whole.model().state_dict(), resumed.model().state_dict())


# ---- a loop of one's own ---------------------------------------------------------------------------------------------------
def own_loop(world: World, stop: bool) -> tuple[list[bool], State, State]:
    model = mlp()
    optimizer, stops = plain(model.parameters()), []
    with pg.parallelize(model, nn.functional.cross_entropy, optimizer, "local(2, every=3)") as trainer:
        for epoch in range(3):
            for inputs, target in trainer.batches(VECTORS, 12, epoch):
                stops.append(trainer.step(inputs, target).stop)
                if stop and world.rank and len(stops) == 1:
                    trainer.world.stop.set()
        world.stop.clear()
        trainer.world.stop.clear()
        stood = {name: each.clone() for name, each in trainer.state().items()}
    return stops, stood, {name: each.detach() for name, each in model.named_parameters()}


def test_at_its_end_the_model_is_what_the_run_stands_for(pool: Ranks) -> None:
    found = pool.run(own_loop, True, size=2)
    assert [each[0] for each in found] == [[False] * 3 + [True] * 6] * 2        # heard when they meet, told in the next step
    for _, stood, model in found:
        assert close(stood, model, 0.0)
        assert close(model, found[0][2], 0.0)


# ---- refused ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "says"), [
    ("local(2, every=0)", "a whole number from 1"),
    ("local(2, every=never)", "end"),
    ("local(2, after=-1)", "a whole number from 0"),
    ("local(2, outer=nesterov(momentum=1))", "give it a momentum below 1"),
    ("local(2, outer=nesterov(lr=0))", "a number above 0"),
    ("local(2, outer=elastic(pull=2))", "at most 1"),
    ("local(2) * local(2)", "leftmost"),
    ("local(2, reduce=rong)", "did you mean ring?"),
    ("diloco(4)", "local(2, every=500, outer=nesterov)"),
])
def test_bad_input_is_refused_with_the_repair(text: str, says: str) -> None:
    with pytest.raises(pg.Refused) as caught:
        strategy(text)
    assert says in str(caught.value)


def test_more_workers_than_samples_are_refused() -> None:
    with pytest.raises(pg.Refused, match="give a batch of at least 13"):
        pg.train(vectors(), "local(13)")


