"""data(n, compress=...): compressed gradients over ranks, compared with plain torch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import (
    COMPRESSED,
    JOBS,
    VECTORS,
    call_with_small_tensors_compressed,
    draw_numbers,
    make_job,
    measure_difference,
    observe_steps,
    resolve_text,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paragrad as pg
from paragrad.errors import StepFailed
from paragrad.launch import Launcher
from paragrad.parallel.compression.momentum import DgcMomentum, take_over_momentum
from paragrad.parallel.data import bucketing
from paragrad.report import summaries
from paragrad.report.equivalence.lockstep import measure_distances
from paragrad.runtime.world import World
from paragrad.strategies.compressors import count_top_entries
from paragrad.strategies.shares import apportion_samples
from paragrad.trainer.settings import Settings
from paragrad.trainer.trainer import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

State = dict[str, Tensor]
plain = functools.partial(torch.optim.SGD, lr=0.1)
heavy = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# parameters of the model below: LARGE is compressed, SMALL is not
LARGE = "0.weight"
SMALL = "2.weight"
# 29 samples in batches of 12: the last batch has 5, so three ranks have 2, 2 and 1
STEPS = 7


def make_wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 220), nn.Tanh(), nn.Linear(220, 4))


def make_vectors_job(**changes: Any) -> pg.Job:
    return make_job("vectors", make_wide_mlp, VECTORS).replace(
        **{"epochs": 4, "dtype": torch.float64, "optimizer": plain, **changes}
    )


def copy_weights(trainer: Trainer) -> State:
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


def observe_steps_on_ranks(
    pool: Launcher,
    made: pg.Job,
    text: str,
    steps: int = STEPS,
    look: Callable[[Trainer], Any] = copy_weights,
) -> list[list[Any]]:
    chosen = resolve_text(text)
    return pool.run(observe_steps, made, chosen, steps, look, size=chosen.size)


def is_equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def is_close(one: State, other: State, within: float = 1e-11) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=within) for name in one)


def compute_gradient_parts(made: pg.Job, model: nn.Module, shares: list[int], steps: int) -> Any:
    """Yield for each step each rank's part of the mean gradient, and its fraction of the batch.

    Plain torch computes the gradients by the current weights of the model.
    """
    order = made.make_order(made.train)
    for step in range(steps):
        indices = order.get_indices(step // order.steps, order.get_batch(step % order.steps))
        sizes = apportion_samples(len(indices), shares)
        starts = [0, *itertools.accumulate(sizes)]
        parts = []
        for first, stop in itertools.pairwise(starts):
            model.zero_grad()
            if stop > first:
                inputs, targets = (
                    torch.stack([made.train[index][place] for index in indices[first:stop]])
                    for place in (0, 1)
                )
                functional.cross_entropy(
                    model(inputs.double()), targets, reduction="sum"
                ).backward()
            parts.append(
                {
                    name: torch.zeros_like(each) if each.grad is None else each.grad / len(indices)
                    for name, each in model.named_parameters()
                }
            )
        yield step, parts, [size / len(indices) for size in sizes]


# ---- lossless compression equals serial --------------------
LOSSLESS = (
    "data({n}, compress=top_k(1.0))",
    "data({n}, compress=threshold(0))",
    "data({n}, compress=threshold(0), micro=2)",
    "data({n}, compress=top_k(1.0), shares={shares})",
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("row", LOSSLESS)
@pytest.mark.parametrize(
    "column",
    [
        "mlp, adam, clipped, scheduled",
        "lstm, tied",
        "cnn with batch norm",
        "frozen and unused",
        "dropout",
    ],
)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_lossless_compression_equals_serial(
    pool: Launcher, row: str, column: str, workers: int
) -> None:
    text = row.format(n=workers, shares=[3, 1, 2][:workers])
    difference = measure_difference(pool, text, JOBS[column], steps=9)
    assert difference.value <= max(1e-10, difference.allowed), difference


@pytest.mark.parametrize(
    "text",
    [
        "data(2, compress=top_k(1.0)) * pipeline(2, micro=2)",
        "data(2, compress=threshold(0)) * tensor(2)",
        "data(2, compress=top_k(1.0)) * place(2)",
    ],
)
def test_lossless_compression_of_a_pipeline_equals_serial(pool: Launcher, text: str) -> None:
    task = functools.partial(call_with_small_tensors_compressed, measure_distances)
    assert (
        max(
            pool.run(
                task,
                make_vectors_job(optimizer=heavy),
                resolve_text(text),
                Settings(),
                STEPS,
                size=4,
            )[0]
        )
        < 1e-10
    )


# ---- compressed steps equal plain torch --------------------
def test_top_k_with_feedback_equals_the_published_formula(pool: Launcher) -> None:
    """Each rank adds what it has not sent to its part of the mean gradient, and sends the largest.

    The optimizer steps by the sum. This holds for the short batch too. If the residuals were sums,
    divided by the weight of that batch, they would count more than twice.
    """
    made = make_vectors_job(optimizer=heavy)
    ranks = 3
    ratio = 0.1
    ours = observe_steps_on_ranks(pool, made, f"data({ranks}, compress=top_k({ratio}))")
    model = made.build_model_to_train().double()
    optimizer = heavy(model.parameters())
    waits = [torch.zeros(220 * 10, dtype=torch.float64) for _ in range(ranks)]
    for step, parts, _ in compute_gradient_parts(made, model, [1] * ranks, STEPS):
        for name, parameter in model.named_parameters():
            parameter.grad = sum(each[name] for each in parts)  # type: ignore[assignment]
        total = torch.zeros(2200, dtype=torch.float64)
        for wait, part in zip(waits, parts, strict=True):
            wait += part[LARGE].view(-1)
            where = wait.abs().topk(count_top_entries(ratio, 2200)).indices
            total[where] += wait[where]
            wait[where] = 0.0
        model.get_parameter(LARGE).grad = total.view(220, 10)
        optimizer.step()
        assert is_close(ours[0][step], dict(model.named_parameters()))


def train_by_dgc_plainly(
    made: pg.Job,
    ranks: int,
    ratio: float,
    momentum: float,
    *,
    nesterov: bool = False,
    decay: float = 0.0,
    clip: float | None = None,
    steps: int = STEPS,
    later: tuple[int, int] = (1000, 1),
    shares: list[int] | None = None,
) -> list[State]:
    """Return the weights after each step of deep gradient compression in plain torch.

    It follows algorithms 1 and 2 of Lin et al. 2018; weight decay is separate. `later` is (step,
    ranks): from that step on, this number of ranks continues with equal parts of the sums.
    """
    model = made.build_model_to_train().double()
    rate = 0.1
    named = dict(model.named_parameters())
    u = [torch.zeros(2200, dtype=torch.float64) for _ in range(ranks)]
    v = [torch.zeros(2200, dtype=torch.float64) for _ in range(ranks)]
    dense = {name: torch.zeros_like(each) for name, each in named.items()}
    seen = []
    for (step, parts, sizes), (_, then, _) in zip(
        compute_gradient_parts(made, model, shares or [1] * ranks, steps),
        compute_gradient_parts(made, model, [1] * later[1], steps),
        strict=True,
    ):
        if step == later[0]:
            u, v = (
                [sum(each[1:], each[0].clone()) / later[1] for _ in range(later[1])]
                for each in (u, v)
            )
        if step >= later[0]:
            parts = then
        if clip is not None:
            for part, size in zip(parts, sizes, strict=True):
                norm = math.sqrt(sum(float(each.square().sum()) for each in part.values()))
                for each in part.values():
                    each *= min(1.0, clip * math.sqrt(size) / (norm + 1e-6))
        total = torch.zeros(2200, dtype=torch.float64)
        for rank, part in enumerate(parts):
            gradient = part[LARGE].view(-1)
            u[rank] = momentum * u[rank] + gradient
            v[rank] = v[rank] + (gradient + momentum * u[rank] if nesterov else u[rank])
            where = v[rank].abs().topk(count_top_entries(ratio, 2200)).indices
            total[where] += v[rank][where]
            v[rank][where] = u[rank][where] = 0.0
        with torch.no_grad():
            for name, each in named.items():
                mean = decay * each + (0.0 if name == LARGE else sum(part[name] for part in parts))
                dense[name] = momentum * dense[name] + mean
                each -= rate * (mean + momentum * dense[name] if nesterov else dense[name])
                if name == LARGE:
                    each -= rate * total.view(220, 10)
        seen.append({name: each.detach().clone() for name, each in named.items()})
    return seen


@pytest.mark.parametrize(
    "ways",
    [{}, {"nesterov": True}, {"decay": 0.01}, {"nesterov": True, "decay": 0.01}, {"clip": 0.3}],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_dgc_equals_the_published_formula(pool: Launcher, ways: dict[str, Any], ranks: int) -> None:
    """Momentum correction and factor masking are as published, also with Nesterov momentum.

    Weight decay is not in the kept velocities; it has its own momentum. Each rank clips its
    gradients before it adds them. Small tensors are sent dense, with SGD's momentum and without
    masking.
    """
    sgd = functools.partial(
        torch.optim.SGD,
        lr=0.1,
        momentum=0.9,
        nesterov=ways.get("nesterov", False),
        weight_decay=ways.get("decay", 0.0),
    )
    made = make_vectors_job(optimizer=sgd, clip_norm=ways.get("clip"))
    ours = observe_steps_on_ranks(pool, made, f"data({ranks}, compress=dgc(0.05, warmup=0))")[0]
    for one, other in zip(ours, train_by_dgc_plainly(made, ranks, 0.05, 0.9, **ways), strict=True):
        assert is_close(one, other)


def test_dgc_has_its_own_momentum_and_clipping(pool: Launcher) -> None:
    ours = observe_steps_on_ranks(
        pool, make_vectors_job(), "data(2, compress=dgc(0.05, momentum=0.9, warmup=0, clip=0.3))"
    )[0]
    for one, other in zip(
        ours, train_by_dgc_plainly(make_vectors_job(), 2, 0.05, 0.9, clip=0.3), strict=True
    ):
        assert is_close(one, other)


def test_clipping_norm_follows_the_share_of_the_batch(pool: Launcher) -> None:
    """Earlier, all ranks clipped to one norm, so larger parts were clipped more than their sum."""
    ours = observe_steps_on_ranks(
        pool,
        make_vectors_job(optimizer=heavy, clip_norm=0.3),
        "data(3, shares=[4, 1, 1], compress=dgc(0.05, warmup=0))",
    )[0]
    for one, other in zip(
        ours,
        train_by_dgc_plainly(make_vectors_job(), 3, 0.05, 0.9, clip=0.3, shares=[4, 1, 1]),
        strict=True,
    ):
        assert is_close(one, other)


def test_pipeline_stage_is_clipped_by_its_replica_share(tmp_path: Path) -> None:
    """Earlier, ranks without the loss had a share of 0.

    So their part of the model did not change.
    """
    made = make_vectors_job(optimizer=heavy, clip_norm=0.3)
    dgc = "compress=dgc(0.05, warmup=0)"
    plainly, parts = (
        pg.train(made, text, runs=tmp_path).model()
        for text in (f"data(2, micro=2, {dgc})", f"data(2, {dgc}) * pipeline(2, micro=2)")
    )
    assert is_close(plainly.state_dict(), parts.state_dict())


def take_momentum(text: str, momentum: float) -> tuple[DgcMomentum, torch.optim.SGD, nn.Parameter]:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    chosen: Any = pg.strategy(f"data(2, compress={text})")
    kept = take_over_momentum(chosen.compress, optimizer, {"w": weight})
    assert kept is not None
    return kept, optimizer, weight


def test_momentum_set_later_by_a_scheduler_is_refused() -> None:
    """In a user's own loop, a later momentum is not known at the start.

    Earlier, its effect was left out silently.
    """
    kept, optimizer, weight = take_momentum("dgc(0.01, momentum=0.9)", 0.0)
    weight.grad, kept.last_given_steps[weight] = torch.ones(3), 0
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.95
    with pytest.raises(StepFailed, match=r"given twice, 0\.9 here and 0\.95 by group 0"):
        optimizer.step()


def test_optimizer_state_loaded_later_is_read_again() -> None:
    """Earlier, the momentum of the old groups stayed in use, and loaded buffers were not used."""
    kept, optimizer, weight = take_momentum("dgc(0.01)", 0.9)
    assert kept.get_momentum("w") == (0.9, False)
    other = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    optimizer.load_state_dict(other.state_dict())
    assert kept.get_momentum("w") == (0.5, False)
    weight.grad = torch.ones(3)
    other.step()
    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(StepFailed, match="load it before the hook is made"):
        optimizer.step()


def test_full_dgc_is_sgd_without_momentum(pool: Launcher) -> None:
    """All entries are sent, and masking sets all velocities to zero."""
    ours = observe_steps_on_ranks(
        pool, make_vectors_job(optimizer=heavy), "data(2, compress=dgc(1.0, warmup=0))"
    )[0]
    for one, other in zip(ours, train_by_dgc_plainly(make_vectors_job(), 2, 1.0, 0.9), strict=True):
        assert is_close(one, other)


def test_full_dgc_without_masking_is_sgd(pool: Launcher) -> None:
    """DGC keeps the momentum of gradients and of weight decay separately.

    Their sum is the momentum buffer of SGD.
    """
    made = make_vectors_job(optimizer=functools.partial(heavy, weight_decay=0.01))
    ours, serial = (
        observe_steps_on_ranks(pool, made, text)[0]
        for text in ("data(2, compress=dgc(1.0, warmup=0, masking=false))", "serial")
    )
    for one, other in zip(ours, serial, strict=True):
        assert is_close(one, other)


def make_three_layer_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 220), nn.Tanh(), nn.Linear(220, 60), nn.Tanh(), nn.Linear(60, 4)
    )


def observe_with_small_buckets(world: World, *args: Any) -> list[Any]:
    before = bucketing.BUCKET_BYTES
    bucketing.BUCKET_BYTES = 1000
    try:
        return observe_steps(world, *args)
    finally:
        bucketing.BUCKET_BYTES = before


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "text", ["threshold(0.02)", "threshold(1000)", "top_k(0.01)", "dgc(0.01, warmup=0)", "one_bit"]
)
def test_bucketing_does_not_change_the_result(pool: Launcher, tmp_path: Path, text: str) -> None:
    """Buckets have sparse messages of different lengths on each rank, and empty ones."""
    made = make_vectors_job(model=make_three_layer_mlp, optimizer=heavy)
    strategy = f"data(3, compress={text})"
    apart = pool.run(
        observe_with_small_buckets, made, resolve_text(strategy), STEPS, copy_weights, size=3
    )
    for one, other in zip(apart[0], observe_steps_on_ranks(pool, made, strategy)[0], strict=True):
        # small tensors are added up in another order
        assert is_close(one, other)
    run = pg.train(made, strategy, runs=tmp_path, limit=2)
    assert next(
        line["picked"] for line in run.select_lines("choice") if line["what"] == "message"
    ).startswith(text[:-1].split(",")[0])
    large = ("0.weight", "2.weight")
    still = is_equal(
        {name: run.model().get_parameter(name) for name in large},
        {name: made.build_model().get_parameter(name) for name in large},
    )
    assert still == (text == "threshold(1000)")


def make_one_cycle_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=99)


def test_cycled_momentum_is_taken_over_in_every_step(pool: Launcher) -> None:
    """Only dgc applies the momentum of the scheduler, and SGD keeps no buffer.

    Otherwise SGD would also apply it, from the second step on.
    """
    made = make_vectors_job(optimizer=heavy, scheduler=make_one_cycle_lr)
    seen = observe_steps_on_ranks(
        pool, made, "data(2, compress=dgc(0.05, warmup=0))", look=_get_momenta
    )[0]
    assert all(own == taken and not kept for own, taken, kept in seen)
    assert len({taken for _, taken, _ in seen}) > 3


def _get_momenta(trainer: Trainer) -> tuple[float, float, bool]:
    momentum = trainer.training.setup.exchange.momentum  # type: ignore[union-attr]
    kept = any(each.get("momentum_buffer") is not None for each in trainer.optimizer.state.values())
    return trainer.optimizer.param_groups[0]["momentum"], momentum.get_momentum(LARGE)[0], kept


# ---- replicas --------------------
LOSSY = [text.removeprefix("data(2, compress=")[:-1] for text in COMPRESSED]


@pytest.mark.parametrize("text", LOSSY)
def test_compressed_replicas_stay_bit_equal(pool: Launcher, text: str) -> None:
    ranks = observe_steps_on_ranks(
        pool, make_vectors_job(dtype=torch.float32, optimizer=heavy), f"data(3, compress={text})"
    )
    for other in ranks[1:]:
        assert all(map(is_equal, ranks[0], other))


class Tied(nn.Module):
    """A model whose first and last layer share one weight.

    Each stage has a copy of it, and one stage has more other tensors than the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(10, 220)
        self.middle = nn.Linear(220, 10)
        self.last = nn.Linear(10, 220)
        self.last.weight = self.embedding.weight
        self.out = nn.Linear(220, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.last(torch.tanh(self.middle(torch.tanh(self.embedding(inputs))))))


def copy_by_serial_name(trainer: Trainer) -> State:
    return {
        trainer.training.setup.layout.specs[name].name: each.detach().clone()
        for name, each in trainer.training.setup.parameters.items()
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "text",
    ["bf16, reduce=ring", "power_sgd(1), reduce=tree", "threshold(0.001)", "dgc(0.3, warmup=0)"],
)
def test_copies_inside_a_replica_stay_bit_equal(pool: Launcher, text: str) -> None:
    """Each stage sums its copy of the weight together with other tensors.

    So a ring of three begins at another place of the copy, or one stage sends it as a dense vector.
    Earlier, copies became different. No check found it, because the training is not exact.
    """
    made = make_vectors_job(model=Tied, dtype=torch.float32, optimizer=heavy)
    parts = observe_steps_on_ranks(
        pool, made, f"data(3, compress={text}) * place(2)", look=copy_by_serial_name
    )
    tied = [each[-1]["embedding.weight"] for each in parts if "embedding.weight" in each[-1]]
    assert len(tied) == 6
    assert all(torch.equal(tied[0], each) for each in tied[1:])


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", ["bf16", "fp16", "power_sgd(1)"])
@pytest.mark.parametrize(
    "reduce", ["ring", "tree", "butterfly", "halving", "double_tree", "direct"]
)
def test_additive_compressors_use_any_all_reduce(pool: Launcher, text: str, reduce: str) -> None:
    made = make_vectors_job(dtype=torch.float32)
    native, ours = (
        observe_steps_on_ranks(pool, made, f"data(3, compress={text}{more})", 3)
        for more in ("", f", reduce={reduce}")
    )
    assert all(map(is_equal, ours[0], ours[2]))
    assert is_close(native[0][-1], ours[0][-1], 1e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", LOSSY)
def test_verify_reports_the_deviation(tmp_path: Path, text: str) -> None:
    certificate = pg.verify(
        make_vectors_job(optimizer=heavy), f"data(2, compress={text})", runs=tmp_path
    )
    assert not certificate.same
    assert certificate.difference > 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(
    "text", ["top_k(0.1)", "one_bit", "dgc(0.1, warmup=0)", "bf16", "power_sgd(1)"]
)
def test_parameters_of_any_real_or_complex_type(
    pool: Launcher, dtype: torch.dtype, text: str
) -> None:
    if dtype.is_complex:
        data = TensorDataset(
            draw_numbers(29, 60, seed=1).to(dtype), draw_numbers(29, 60, seed=2).to(dtype)
        )
        made = make_vectors_job(
            model=lambda: nn.Linear(60, 60, dtype=dtype),
            loss=compute_squared_error,
            train=data,
            dtype=torch.float32,
        )
    else:
        made = make_vectors_job(dtype=dtype)
    ranks = observe_steps_on_ranks(pool, made, f"data(2, compress={text})", 3)
    assert all(map(is_equal, *ranks))
    assert all(
        torch.view_as_real(each).isfinite().all() if each.is_complex() else each.isfinite().all()
        for each in ranks[0][-1].values()
    )


def compute_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


# ---- messages --------------------
def count_sent_bytes(trainer: Trainer) -> dict[str, int]:
    assert trainer.training.setup.exchange is not None
    return {
        kind: each["bytes"] for kind, each in trainer.training.setup.exchange.sent_bytes.items()
    }


def test_bytes_sent_are_the_formula(pool: Launcher) -> None:
    """A rank sends 22 entries of 8 bytes to each of two others.

    Small tensors (220 + 880 + 4 numbers) are sent along a ring.
    """
    found = observe_steps_on_ranks(
        pool,
        make_vectors_job(dtype=torch.float32),
        "data(3, compress=top_k(0.01))",
        2,
        count_sent_bytes,
    )[0][1]
    assert found == {
        "totals": 2 * 8 * (4 + 4) * 2 // 3,
        "compressed": 2 * 22 * 8,
        "dense": 2 * 4 * (220 + 880 + 4) * 2 // 3,
    }


def test_payload_longer_than_dense_is_sent_dense(pool: Launcher, tmp_path: Path) -> None:
    """If r p >= 1 (formulas: wire ratio), the message is dense.

    It contains the same entries, so the training is the same.
    """
    run = pg.train(
        make_vectors_job(dtype=torch.float32), "data(4, compress=top_k(0.3))", runs=tmp_path
    )
    told = [line for line in run.select_lines("choice") if line["what"] == "message"]
    assert {line["picked"] for line in told} == {"dense"}
    sparse = pg.train(
        make_vectors_job(dtype=torch.float32), "data(2, compress=top_k(0.3))", runs=tmp_path
    )
    assert {
        line["picked"] for line in sparse.select_lines("choice") if line["what"] == "message"
    } == {"top_k(0.3)"}


def test_compression_time_is_in_the_record(tmp_path: Path) -> None:
    run = pg.train(make_vectors_job(), "data(2, compress=top_k(0.1))", runs=tmp_path)
    names = {line["name"] for line in run.select_lines("span")}
    assert {"compress", "exchange", "extract"} <= names


# ---- failures --------------------
class Bad(nn.Module):
    """A model with a gradient that is nan from its seventh backward on. Its loss stays finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_wide_mlp()
        self.calls = 0
        self.inner[0].weight.register_hook(self.make_late_nan)  # type: ignore[operator, union-attr]

    def make_late_nan(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * (math.nan if self.calls > 6 else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", LOSSY)
def test_non_finite_gradient_is_named(pool: Launcher, text: str) -> None:
    with pytest.raises(pg.RankFailed, match="is not finite") as caught:
        observe_steps_on_ranks(
            pool, make_vectors_job(model=Bad, dtype=torch.float32), f"data(2, compress={text})"
        )
    assert caught.value.tensor == "inner.0.weight"
    assert caught.value.step is not None


def make_momentum_cycle_lr(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler that also sets the momentum.

    Earlier, it gave momentum to an SGD without any, in addition to that of dgc. This second
    momentum was left out silently.
    """
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)


REFUSED = {
    "data(2, compress=dgc(0.1))": (
        {"optimizer": functools.partial(torch.optim.Adam, lr=0.01)},
        "Adam has a memory of its own",
    ),
    "data(2, compress=dgc(0.2))": (
        {"optimizer": functools.partial(heavy, dampening=0.1)},
        "dampening=0.1",
    ),
    "data(2, compress=dgc(0.3))": (
        {"optimizer": functools.partial(plain, maximize=True)},
        "maximize=True",
    ),
    "data(2, compress=dgc(0.4, momentum=0.9))": (
        {"optimizer": heavy},
        "momentum is given twice, 0.9 here and 0.9 by group 0",
    ),
    "data(2, compress=dgc(0.4, momentum=0.8))": (
        {"optimizer": plain, "scheduler": make_momentum_cycle_lr},
        "0.8 here and 0.95 by group 0",
    ),
    "data(2, compress=dgc(0.5, clip=1.0))": (
        {"clip_norm": 2.0},
        "clipping is given twice, 1 here and clip_norm=2",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_invalid_compressions_are_refused_at_start(text: str, tmp_path: Path) -> None:
    changes, said = REFUSED[text]
    with pytest.raises(pg.Refused, match=said):
        pg.train(make_vectors_job(**changes), text, runs=tmp_path)


# ---- saved and resumed --------------------
@pytest.mark.parametrize(
    "text",
    [
        "top_k(0.05)",
        "dgc(0.05, warmup=0)",
        "one_bit",
        "int8",
        "power_sgd(1)",
        "dgc(0.05, warmup=3)",
    ],
)
def test_resumed_compressed_run_is_bit_equal(tmp_path: Path, text: str) -> None:
    """The run is saved in the middle of an epoch, with weight decay.

    The checkpoint has residuals, velocities, the buffer of weight decay, and the last factor.
    """
    made = make_vectors_job(
        optimizer=functools.partial(heavy, weight_decay=0.01), dtype=torch.float32
    )
    strategy = f"data(3, compress={text})"
    whole = pg.train(made, strategy, runs=tmp_path / "whole", save=4)
    folder = whole.folder / "checkpoint-00000008"
    resumed = pg.train(made, strategy, runs=tmp_path / "on", resume=folder)
    assert len(resumed.losses) == 4
    assert is_equal(whole.model().state_dict(), resumed.model().state_dict())


@pytest.mark.story
def test_resume_at_step_300_of_mnist(data: Path, tmp_path: Path) -> None:
    """The run also continues under two workers and under serial, from the same weights."""
    made = pg.job("mnist-mlp", width=1024).replace(test=None, metric=None)
    whole = pg.train(
        made, "data(4, compress=dgc(0.01))", runs=tmp_path, data=data, save=300, limit=320
    )
    folder = whole.folder / "checkpoint-00000300"
    runs = {
        text: pg.train(made, text, runs=tmp_path, data=data, resume=folder, limit=320)
        for text in ("data(4, compress=dgc(0.01))", "data(2, compress=dgc(0.01))", "serial")
    }
    assert all(len(run.losses) == 20 for run in runs.values())
    same = runs["data(4, compress=dgc(0.01))"]
    assert same.losses == whole.losses[300:]
    assert is_equal(whole.model().state_dict(), same.model().state_dict())
    assert all(run.losses[0] == pytest.approx(whole.losses[300], rel=1e-4) for run in runs.values())


def test_resume_with_another_number_of_ranks_keeps_the_sum(tmp_path: Path) -> None:
    made = make_vectors_job(optimizer=heavy)
    first = pg.train(
        made.replace(epochs=2), "data(4, compress=dgc(0.05, warmup=0))", runs=tmp_path, save=3
    )
    before = load_file(first.folder / "checkpoint-00000006" / "strategy.safetensors")
    assert {name for name in before if name.startswith(LARGE)} == {
        f"{LARGE}/{what} of {rank}" for what in ("unsent", "velocity") for rank in range(4)
    }
    second = pg.train(
        made.replace(epochs=3),
        "data(2, compress=dgc(0.05, warmup=0))",
        runs=tmp_path,
        resume=first.folder,
    )
    assert len(second.losses) == 3
    assert is_close(
        second.model().state_dict(),
        train_by_dgc_plainly(made, 4, 0.05, 0.9, steps=9, later=(6, 2))[-1],
    )
    assert not [
        line
        for line in second.select_lines("choice")
        if line["what"] == "checkpoint" and "without" in line["picked"]
    ]


def test_serial_resumes_momentum_and_names_what_it_drops(tmp_path: Path) -> None:
    """SGD has its momentum again.

    Its buffer is the sum of all velocities, also that of weight decay.
    """
    made = make_vectors_job(optimizer=functools.partial(heavy, weight_decay=0.01))
    first = pg.train(
        made.replace(epochs=2), "data(2, compress=dgc(0.05, warmup=0))", runs=tmp_path, save=3
    )
    folder = first.folder / "checkpoint-00000006"
    state = load_file(folder / "optimizer.safetensors")
    assert set(state) == {
        f"{name}/momentum_buffer" for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    kept = load_file(folder / "strategy.safetensors")
    total = kept[f"{LARGE}/decayed"] + sum(kept[f"{LARGE}/velocity of {rank}"] for rank in range(2))
    assert torch.allclose(state[f"{LARGE}/momentum_buffer"], total, atol=1e-14)
    run = pg.train(made, "serial", runs=tmp_path, resume=first.folder)
    left = [
        line["picked"]
        for line in run.select_lines("choice")
        if line["what"] == "checkpoint" and "without" in line["picked"]
    ]
    assert left == ["without decayed, unsent of 0, unsent of 1, velocity of 0, velocity of 1"]
    assert len(run.losses) == 6


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        (
            "dgc(0.05, warmup=0)",
            "top_k(1.0)",
            "without unsent of 0, unsent of 1, velocity of 0, velocity of 1",
        ),
        ("top_k(0.05)", "dgc(0.5, warmup=0)", "without residual of 0, residual of 1"),
        ("top_k(0.05)", "one_bit", None),
    ],
)
def test_pending_velocities_are_not_residuals(
    tmp_path: Path, first: str, second: str, left: str | None
) -> None:
    """Earlier, top_k took the unsent velocities of dgc for gradients.

    SGD then applied its momentum to them once more, so they moved the weights 4.8 times as far.
    """
    run = pg.train(
        make_vectors_job(optimizer=heavy, epochs=2),
        f"data(2, compress={first})",
        runs=tmp_path,
        save=3,
    )
    on = pg.train(
        make_vectors_job(optimizer=heavy, epochs=3),
        f"data(2, compress={second})",
        runs=tmp_path,
        resume=run.folder,
    )
    told = [line["picked"] for line in on.select_lines("choice") if line["what"] == "checkpoint"]
    assert [each for each in told if each.startswith("without")] == ([left] if left else [])
    # top_k(1.0) is lossless, so it equals serial from the same checkpoint
    if second == "top_k(1.0)":
        serial = pg.train(
            make_vectors_job(optimizer=heavy, epochs=3), "serial", runs=tmp_path, resume=run.folder
        )
        assert is_close(on.model().state_dict(), serial.model().state_dict())


def test_pending_residual_of_a_now_small_tensor_is_applied(tmp_path: Path) -> None:
    """Divided over two ranks, the tensor is so small that it is sent as it is.

    Its unsent part is not a gradient and gets no momentum. The result equals that of a run that
    sends all of it at once.
    """
    made = make_vectors_job(optimizer=heavy, epochs=2)
    first = pg.train(
        made, "data(2, compress=dgc(0.05, warmup=0, masking=false))", runs=tmp_path, save=3
    )
    whole = "data(2, compress=dgc(1.0, warmup=0, masking=false))"
    one, other = (
        pg.train(made.replace(epochs=3), text, runs=tmp_path, resume=first.folder)
        .model()
        .state_dict()
        for text in (whole, f"{whole} * tensor(2)")
    )
    assert is_close(one, other)


class Rare(nn.Module):
    """A model with a branch that is not used any more after three steps."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_wide_mlp()
        self.branch = nn.Linear(10, 220)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        inside = self.trunk[0](inputs)
        if self.steps < 3:
            inside = inside + self.branch(inputs)
        if self.training:
            self.steps += 1
        return self.trunk[2](torch.tanh(inside))  # type: ignore[no-any-return]


def test_state_without_recent_gradients_is_saved_too(tmp_path: Path) -> None:
    """After a resume, a codec is made when its tensor has a gradient again.

    Earlier, checkpoints before that did not contain its state.
    """
    made = make_vectors_job(model=Rare)
    first = pg.train(
        made.replace(epochs=1), "data(2, compress=power_sgd(1))", runs=tmp_path, save=3
    )
    on = pg.train(
        made.replace(epochs=2),
        "data(2, compress=power_sgd(1))",
        runs=tmp_path,
        resume=first.folder,
        save=3,
    )
    one, other = (
        load_file(sorted(run.folder.glob("checkpoint-*"))[-1] / "strategy.safetensors")
        for run in (first, on)
    )
    of_branch = {name for name in one if "branch.weight" in name}
    assert len(of_branch) == 3  # memory, and the residuals of two ranks
    assert all(torch.equal(one[name], other[name]) for name in of_branch)


def test_dropped_state_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_vectors_job(optimizer=heavy, epochs=1)
    first = pg.train(made, "data(2, compress=top_k(0.1))", runs=tmp_path, save=2)
    summaries.print_run(
        pg.train(made.replace(epochs=2), "serial", runs=tmp_path, resume=first.folder),
        as_json=False,
    )
    assert (
        "of the checkpoint: without residual of 0, residual of 1: serial(threads="
        in capsys.readouterr().out
    )


def test_dgc_takes_over_the_momentum_of_a_checkpoint(tmp_path: Path) -> None:
    made = make_vectors_job(optimizer=heavy)
    first = pg.train(made.replace(epochs=2), "serial", runs=tmp_path, save=3)
    serial, run = (
        pg.train(made, text, runs=tmp_path, resume=first.folder)
        for text in ("serial", "data(2, compress=dgc(1.0, warmup=0, masking=false))")
    )
    assert len(run.losses) == 6
    assert [
        line["picked"] for line in run.select_lines("choice") if line["what"] == "momentum"
    ] == ["0.9"]
    assert is_close(run.model().state_dict(), serial.model().state_dict())


# ---- a user's own loop --------------------
def train_in_user_loop(world: World, strategy: str) -> tuple[State, float, bool]:
    torch.manual_seed(0)
    model = make_wide_mlp().double()
    optimizer = heavy(model.parameters())
    with pg.parallelize(
        model, functional.cross_entropy, optimizer, strategy=strategy, seed=5
    ) as trainer:
        for epoch in range(2):
            for inputs, targets in trainer.batches(VECTORS, batch=12, epoch=epoch):
                trainer.step(inputs, targets)
    buffer = optimizer.state[model.get_parameter(LARGE)].get("momentum_buffer")
    return (
        dict(model.state_dict()),
        optimizer.param_groups[0]["momentum"],
        buffer is not None and bool(buffer.any()),
    )


def test_compression_in_a_user_loop(pool: Launcher) -> None:
    """After the loop, the optimizer has the user's momentum and a momentum buffer again."""
    found = pool.run(train_in_user_loop, "data(2, compress=dgc(0.05, warmup=0))", size=2)
    assert is_equal(found[0][0], found[1][0])
    assert [each[1:] for each in found] == [(0.9, True)] * 2


# ---- under plain DDP -------------------------------------------------------------------------
def train_with_hook(world: World, text: str, own: bool, steps: int = 4) -> list[State]:
    """Return the weights after each step of plain DDP with a hook of paragrad.

    All ranks have equal numbers of different samples. own: the hook gets the optimizer. A bucket
    has two parameters, so DDP builds its buckets again after the first step.
    """
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = make_wide_mlp().double()
    optimizer = heavy(model.parameters(), weight_decay=0.01)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    ddp.register_comm_hook(*pg.hook(text, optimizer=optimizer) if own else pg.hook(text))
    seen = []
    for step in range(steps):
        inputs, targets = (each[12 * (step % 2) + 4 * world.rank :][:4] for each in VECTORS.tensors)
        optimizer.zero_grad()
        functional.cross_entropy(ddp(inputs.double()), targets).backward()
        optimizer.step()
        seen.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return seen


def train_with_hook_plainly(text: str, steps: int = 4) -> list[State]:
    """Return the same weights, computed in plain torch without DDP."""
    torch.manual_seed(0)
    model = make_wide_mlp().double()
    ranks = 3
    deep = text.startswith("dgc")
    momentum = 0.9
    decay = 0.01
    named = dict(model.named_parameters())
    u, v = ([torch.zeros(2200, dtype=torch.float64) for _ in range(ranks)] for _ in range(2))
    buffers = {name: torch.zeros_like(each) for name, each in named.items()}
    seen = []
    for step in range(steps):
        total = torch.zeros(2200, dtype=torch.float64)
        means = {name: torch.zeros_like(each) for name, each in named.items()}
        for rank in range(ranks):
            model.zero_grad()
            inputs, targets = (each[12 * (step % 2) + 4 * rank :][:4] for each in VECTORS.tensors)
            functional.cross_entropy(model(inputs.double()), targets).backward()
            for name, each in named.items():
                means[name] += each.grad / ranks  # type: ignore[operator]
            u[rank] = (momentum * u[rank] if deep else 0.0) + named[LARGE].grad.view(-1) / ranks
            v[rank] = v[rank] + u[rank]
            where = v[rank].abs().topk(count_top_entries(0.05, 2200)).indices
            total[where] += v[rank][where]
            v[rank][where] = u[rank][where] = 0.0
        with torch.no_grad():
            for name, each in named.items():
                sent = total.view(220, 10) if name == LARGE else means[name]
                into = decay * each if deep and name == LARGE else sent + decay * each
                buffers[name] = momentum * buffers[name] + into
                each -= 0.1 * (buffers[name] + sent if deep and name == LARGE else buffers[name])
        seen.append({name: each.detach().clone() for name, each in named.items()})
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", ["top_k(0.05)", "dgc(0.05, warmup=0)"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_compression_hook_under_plain_ddp(pool: Launcher, text: str, backend: str) -> None:
    """Residuals belong to parameters, because DDP builds its buckets again after the first step."""
    ranks = pool.run(train_with_hook, text, text.startswith("dgc"), size=3, backend=backend)
    for one, other in zip(ranks[0], train_with_hook_plainly(text), strict=True):
        assert is_close(one, other)
    assert all(map(is_equal, ranks[0], ranks[2]))


@pytest.mark.parametrize(
    "text", ["bf16", "fp16", "int8", "one_bit", "threshold(0.01)", "power_sgd(1)"]
)
def test_every_compressor_is_a_hook(pool: Launcher, text: str) -> None:
    ranks, plain = (
        pool.run(train_with_hook, each, False, size=2, backend="shm") for each in (text, "ring")
    )
    assert all(map(is_equal, *ranks))
    assert all(each.isfinite().all() for each in ranks[0][-1].values())
    # it really compresses
    assert not torch.equal(ranks[0][0][LARGE], plain[0][0][LARGE])
    found = pool.run(compare_with_torch_hooks, text, 20, size=2, backend="shm")[0]
    # over many steps, error feedback or random rounding gives the mean
    mean = found[0][2]
    sent = sum(ours for ours, *_ in found) / len(found)
    # a sum instead of a mean would differ from it by 1 norm of the mean
    assert float((sent - mean).norm()) < 0.5 * float(mean.norm())  # type: ignore[union-attr]


def compare_with_torch_hooks(
    world: World, text: str, steps: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the gradients of the large weight in each step, at fixed weights.

    For each step: by paragrad's hook, by torch's hook, and the mean.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    # without NCCL, DDP refuses torch's bf16 hook by its name
    def compress_to_bf16(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(state, bucket)

    theirs: dict[str, tuple[Any, Any]] = {
        "bf16": (None, compress_to_bf16),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "power_sgd(1)": (
            powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
            ),
            powerSGD_hook.powerSGD_hook,
        ),
    }
    models = []
    for hook in (
        pg.hook(text),
        theirs.get(text if world.backend == "gloo" else "fp16", theirs["fp16"]),
        pg.hook("ring"),
    ):
        torch.manual_seed(0)
        models.append(DistributedDataParallel(make_wide_mlp()))
        models[-1].register_comm_hook(*hook)
    inputs, targets = (each[8 * world.rank :][:8] for each in VECTORS.tensors)
    found = []
    for _ in range(steps):
        for model in models:
            model.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
        found.append(tuple(model.module.get_parameter(LARGE).grad.clone() for model in models))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "eps"),
    [("bf16", 2**-8), pytest.param("fp16", 2**-11, marks=pytest.mark.story)],
)
def test_half_precision_equals_the_torch_hooks(pool: Launcher, text: str, eps: float) -> None:
    """Both hooks round before and after the sum.

    paragrad scales fp16, so that small numbers keep their bits.
    """
    ((ours, theirs, mean),) = pool.run(compare_with_torch_hooks, text, 1, size=2, backend="gloo")[0]
    most = float(mean.abs().max())
    assert 0 < float((ours - mean).abs().max()) <= 2 * eps * most
    assert float((ours - theirs).abs().max()) <= 3 * eps * most
    assert float((ours - mean).norm()) <= 1.1 * float((theirs - mean).norm())


@pytest.mark.story
def test_power_sgd_feedback_equals_the_torch_hook(pool: Launcher) -> None:
    """If the gradient is the same in each step, what is sent adds up to the gradients' sum."""
    # torch's hook begins to compress in the third step
    found = pool.run(compare_with_torch_hooks, "power_sgd(1)", 40, size=2, backend="gloo")[0][2:]
    mean = found[0][2]
    ours, theirs = (sum(each[which] for each in found) / len(found) for which in (0, 1))
    away, peers = (float((each - mean).norm() / mean.norm()) for each in (ours, theirs))
    assert away < 0.15
    assert away < 1.5 * peers


def try_hook(world: World, text: str, momentum: float, more: dict[str, Any]) -> str:
    model = make_wide_mlp()
    given = (
        {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)}
        if momentum >= 0
        else {}
    )
    try:
        pg.hook(text, **given, **more)
    except pg.Refused as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("text", "momentum", "more", "said"),
    [
        (
            "dgc(0.01)",
            -1,
            {},
            "keeps the momentum of your SGD, which would count twice; give it optimizer=",
        ),
        ("dgc(0.01)", 0.9, {}, "give it steps_per_epoch=len(loader), or warmup=0"),
        ("dgc(0.01, warmup=0, clip=1.0)", 0.9, {}, "leave out clip"),
        ("dgc(0.01, warmup=0, momentum=0.5)", 0.9, {}, "momentum is given twice"),
        ("top_k(0.01)", 0.9, {}, "takes no optimizer"),
        ("ring", -1, {"steps_per_epoch": 3}, "takes no optimizer and no steps_per_epoch"),
        ("topk(0.01)", -1, {}, "did you mean top_k?"),
    ],
)
def test_incomplete_hook_is_refused(
    pool: Launcher, text: str, momentum: float, more: dict[str, Any], said: str
) -> None:
    assert said in pool.run(try_hook, text, momentum, more, size=2)[0]


def fail_in_hook(world: World) -> str:
    """Return the error of DDP's backward for a nan gradient in the third step, on the last rank."""
    from torch.nn.parallel import DistributedDataParallel

    model = make_wide_mlp()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(*pg.hook("top_k(0.01)"))
    for step in range(4):
        scale = math.nan if step == 2 and world.rank == world.size - 1 else 1.0
        try:
            (
                scale
                * functional.cross_entropy(ddp(VECTORS.tensors[0][:4]), VECTORS.tensors[1][:4])
            ).backward()
        except Exception as error:
            return str(error)
    return "went on"


@pytest.mark.story
def test_failing_hook_names_step_and_parameter(pool: Launcher) -> None:
    said = pool.run(fail_in_hook, size=2)
    assert "step 2, tensor parameter" in said[1]
    assert "of shape (" in said[1]
    assert "is not finite" in said[1]
    assert "step 2: gradients could not be compressed and exchanged" in said[0]
    assert "another rank has failed or is gone" in said[0]


class Turned(nn.Module):
    """A model with two complex parameters, one of which is compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(60, 40, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.zeros(60, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.view_as_real(inputs[:, :40].to(torch.complex128) @ self.turn.T + self.shift)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "complex": Turned,
    "strides": lambda: (
        nn.Sequential(nn.Unflatten(1, (16, 5, 5)), nn.Conv2d(16, 20, 3))
        .double()
        .to(memory_format=torch.channels_last)
    ),
}  # type: ignore[call-overload]


CASES = (
    "complex",
    "strides",
    "used before",
    "added",
    "momentum from the third step on",
    "closure",
    "adding up",
)


def compare_with_plain_ddp(world: World, text: str) -> dict[str, tuple[State, State]]:
    """Return for each case the weights under a hook of paragrad, and under plain DDP."""
    return {
        case: (train_under_ddp(world, case, text), train_under_ddp(world, case, ""))
        for case in CASES
        if text.startswith("dgc") or case in MODELS
    }


def train_under_ddp(world: World, case: str, text: str) -> State:
    """Return the weights after some steps of DDP, with a lossless hook or without a hook."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = (
        MODELS[case]()
        if case in MODELS
        else nn.Sequential(nn.Linear(400, 10), nn.Linear(10, 220)).double()
    )
    held = [*model.parameters()]
    later = list[nn.Parameter]()
    if case == "added":
        held, later = held[:2], held[2:]
    optimizer = heavy(held, weight_decay=0.05)
    for _ in range(2 if case == "used before" else 0):  # the same on all ranks
        model(torch.ones(4, 400, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    ddp = DistributedDataParallel(model)
    if text:
        ddp.register_comm_hook(
            *pg.hook(text, optimizer=optimizer) if text.startswith("dgc") else pg.hook(text)
        )
    inputs = torch.randn(
        6, 8, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank)
    )

    def run_backward(step: int) -> Tensor:
        model.zero_grad()
        loss = ddp(inputs[step]).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for step in range(6):
        if case == "added" and step == 2:
            optimizer.add_param_group({"params": later})
        if case == "momentum from the third step on":
            optimizer.param_groups[0]["momentum"] = 0.0 if step < 2 else 0.9
        if case == "closure":
            # a batch with an error, which the user skips
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
            optimizer.step(functools.partial(run_backward, step))
            continue
        if case == "adding up":
            with ddp.no_sync():
                run_backward(step)
            ddp(inputs[step - 1]).square().mean().backward()
        else:
            run_backward(step)
        optimizer.step()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("text", ["dgc(1.0, warmup=0, masking=false)", "top_k(1.0)"])
def test_lossless_hook_equals_ddp(pool: Launcher, text: str) -> None:
    """A lossless hook trains as plain DDP does. Earlier, each of these cases was wrong.

    Only half of a complex parameter was exchanged. If a parameter had its own strides, it got the
    weight decay of other elements. A group that was added later had neither momentum nor decay. If
    the momentum was 0 at first, the last gradient took the place of the momentum buffer. In a
    closure, the momentum was 0, and it stayed 0 if the closure failed.
    """
    ranks = pool.run(compare_with_plain_ddp, text, size=2, backend="shm")
    assert [case for case, (ours, plainly) in ranks[0].items() if not is_close(ours, plainly)] == []
    assert [case for case in ranks[0] if not is_equal(ranks[0][case][0], ranks[1][case][0])] == []


def misuse_hook(world: World, case: str) -> str:
    from torch.nn.parallel import DistributedDataParallel

    model = make_wide_mlp()
    other = nn.Linear(4, 4)
    optimizer = heavy(
        [*model.parameters(), *(other.parameters() if "from the first" in case else ())]
    )
    ddp = DistributedDataParallel(model)
    state, hook = pg.hook("dgc(0.1, warmup=0)", optimizer=optimizer)
    ddp.register_comm_hook(state, hook)
    try:
        if case == "two models":
            pg.hook("dgc(0.1, warmup=0)", optimizer=optimizer)
        if case == "parameters of another model":
            optimizer.add_param_group({"params": [*other.parameters()]})
        if "maximizes" in case:
            optimizer.add_param_group({"params": [*other.parameters()], "maximize": True})
        if "another model" in case:
            other(torch.ones(4)).sum().backward()
        for step in range(2):
            with ddp.no_sync() if step and "no_sync" in case else contextlib.nullcontext():
                through = model if step and case == "without DDP" else ddp
                functional.cross_entropy(
                    through(VECTORS.tensors[0][:4]), VECTORS.tensors[1][:4]
                ).backward()
            if case == "closed":
                state.close()
            if case != "two backwards":
                optimizer.step()
    except Exception as error:
        return str(error)
    return "taken"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "two models",
            "another dgc keeps the momentum of this optimizer already; give each model an "
            "optimizer of its own",
        ),
        (
            "parameters of another model",
            "group 1 of the optimizer has gradients that dgc was not given",
        ),
        (
            "parameters of another model from the first",
            "group 0 of the optimizer has gradients that dgc was not given",
        ),
        (
            "without DDP",
            "group 0 of the optimizer has gradients that dgc was not given, so this step was "
            "without momentum",
        ),
        ("no_sync", "group 0 of the optimizer has gradients that dgc was not given"),
        (
            "a group that maximizes",
            "group 1 of the optimizer has maximize=True, which dgc does not take over; leave it "
            "out",
        ),
        (
            "closed",
            "its thread was ended by close(), so this gradient cannot be summed; make a new hook",
        ),
        (
            "two backwards",
            "dgc exchanged it twice, and the optimizer made no step in between; let several "
            "backwards add up under no_sync()",
        ),
    ],
)
def test_invalid_uses_of_a_dgc_hook_are_refused(pool: Launcher, case: str, said: str) -> None:
    """Earlier, each of two hooks restored what the other had set aside, so SGD lost its momentum.

    Steps on gradients that dgc was not given had the same result. In a group that maximizes, weight
    decay had the wrong sign.
    """
    assert said in pool.run(misuse_hook, case, size=2)[0]


def train_after_closed_hook(world: World) -> tuple[State, State, bool]:
    """Return the weights after one step with a hook and three without, and those of a new SGD.

    The new SGD begins with the second step. The last value says whether all unused hooks are freed.
    """
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = make_wide_mlp()
    optimizer = heavy(model.parameters(), weight_decay=0.05)
    ddp = DistributedDataParallel(model)
    state, hook = pg.hook("dgc(0.1, warmup=0)", optimizer=optimizer)
    ddp.register_comm_hook(state, hook)
    functional.cross_entropy(ddp(VECTORS.tensors[0][:4]), VECTORS.tensors[1][:4]).backward()
    optimizer.step()
    state.close()
    alone = copy.deepcopy(model)
    for each, by in ((model, optimizer), (alone, heavy(alone.parameters(), weight_decay=0.05))):
        for step in range(3):
            by.zero_grad()
            functional.cross_entropy(
                each(VECTORS.tensors[0][step:][:4]), VECTORS.tensors[1][step:][:4]
            ).backward()
            by.step()
    weak = [
        weakref.ref(each)
        for each in (
            state,
            pg.hook("ring")[0],
            pg.hook("dgc(0.1, warmup=0)", optimizer=optimizer)[0],
        )
    ]
    del state, ddp
    gc.collect()
    return (
        dict(model.state_dict()),
        dict(alone.state_dict()),
        [each() for each in weak] == [None] * 3,
    )


def test_closed_hook_returns_the_optimizer(pool: Launcher) -> None:
    """Earlier, the thread and the state of a closed hook stayed until the process ended."""
    for one, other, gone in pool.run(train_after_closed_hook, size=2):
        assert is_equal(one, other)
        assert gone


# ---- compressors of users --------------------------------------------------------------------
class Louder(pg.Compressor):
    """A compressor that multiplies each number by a factor.

    The factor grows with the epoch, and with each step that its codec remembers.
    """

    times: int = pg.option(pg.Integer(), default=1)
    sums = True
    feedback = False

    def adapt_to_epoch(self, epoch: int) -> Louder:
        return dataclasses.replace(self, times=self.times + epoch)

    def codec(self, shape: Sequence[int], key: int) -> pg.Codec:
        return Loud(shape, self.times)


class Loud(pg.Codec):
    def __init__(self, shape: Sequence[int], times: int) -> None:
        super().__init__(shape)
        self.times = times

    def compress(
        self, vector: Tensor, agreement: Tensor | None = None, seed: int = 0
    ) -> tuple[Tensor, ...]:
        return (vector * (self.times * (1 if self.memory is None else 1 + int(self.memory))),)

    def extract(self, payload: tuple[Tensor, ...], agreement: Tensor | None = None) -> Tensor:
        return payload[0]

    def adopt_sum(self, payload: tuple[Tensor, ...]) -> None:
        self.memory = torch.tensor(1) if self.memory is None else self.memory + 1


def test_user_compressor_may_change_in_each_epoch(pool: Launcher) -> None:
    """Earlier, the compressor was not adapted to the epoch.

    If it changed, the memory of its codecs was lost.
    """
    made = make_vectors_job(optimizer=functools.partial(torch.optim.SGD, lr=0.005))
    ours = observe_steps_on_ranks(pool, made, "data(2, compress=louder)")
    model = made.build_model_to_train().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for step, parts, _ in compute_gradient_parts(made, model, [1, 1], STEPS):
        for name, parameter in model.named_parameters():
            parameter.grad = sum(each[name] for each in parts)  # type: ignore[assignment]
        model.get_parameter(LARGE).grad *= (1 + step // made.make_order(made.train).steps) * (
            1 + step
        )  # type: ignore[operator]
        optimizer.step()
        assert is_close(ours[0][step], dict(model.named_parameters()))


def test_user_compressor_under_a_hook(pool: Launcher) -> None:
    """DDP does not report epochs. Earlier, the step was taken for the epoch."""
    found = pool.run(compare_with_torch_hooks, "louder", 4, size=2, backend="shm")[0]
    for step, (ours, _, mean) in enumerate(found):
        assert float((ours - (1 + step) * mean).norm()) <= 1e-6 * float(ours.norm())
