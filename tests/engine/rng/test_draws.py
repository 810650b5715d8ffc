"""Random draws that do not depend on the layout."""

from __future__ import annotations

import random
from collections.abc import Callable

import equality_table
import numpy
import pytest
import torch
from equality_table import JOBS
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paragrad.engine.rng.draws import DrawRecorder, KeyedDraws, inspect_draws, use_draw_source
from paragrad.engine.rng.hashing import hash_elements, hash_rows, map_to_uniform, mix_hash
from paragrad.engine.rng.random_kernels import DRAW_SOURCES, RANDOM_KERNELS
from paragrad.errors import StepFailed
from paragrad.runtime.world import World
from paragrad.strategies.serial import Serial
from paragrad.trainer.trainer import Trainer

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
LSTM = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)


def take_first(value: object) -> Tensor:
    return value[0] if isinstance(value, tuple) else value  # type: ignore[return-value]


# functions that draw a separate number for every sample; samples are the first dimension of the
# result
OWN: dict[str, Callable[[Tensor], object]] = {
    "attention": lambda x: ATTENTION(x, x, x, need_weights=False),
    "attention with weights": lambda x: ATTENTION(x, x, x),
    "scaled dot product": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "encoder": lambda x: ENCODER(x),
    "lstm": lambda x: LSTM(x),
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout in place": lambda x: functional.dropout(x.clone(), 0.4, inplace=True),
    "channels": lambda x: functional.dropout2d(x.unsqueeze(-1), 0.5),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, True),
    "feature alpha dropout": lambda x: functional.feature_alpha_dropout(x, 0.3, True),
    "flattened tokens": lambda x: functional.dropout(x.flatten(0, 1)),
    "time first": lambda x: functional.dropout(x.transpose(0, 1)).transpose(0, 1),
    "path": lambda x: x * torch.empty(len(x), 1, 1).bernoulli_(0.8),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 7),
    "rand": lambda x: torch.rand(len(x), 3),
    "randn": lambda x: torch.randn(len(x), 3),
    "randint": lambda x: torch.randint(2**40, (len(x),)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal, both": lambda x: torch.normal(x, x.abs()),
    "normal, deviation": lambda x: torch.normal(0.0, x.abs()),
    "multinomial": lambda x: torch.multinomial(x[:, 0].exp(), 2),
    "multinomial, replaced": lambda x: torch.multinomial(x[:, 0].exp(), 20, replacement=True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "exponential": lambda x: torch.empty(len(x)).exponential_(),
    "geometric": lambda x: torch.empty(len(x)).geometric_(0.3),
    "cauchy": lambda x: torch.empty(len(x)).cauchy_(),
    "log normal": lambda x: torch.empty(len(x)).log_normal_(),
    "fused dropout": lambda x: torch.native_dropout(x, 0.3, True),
}


@pytest.mark.parametrize("name", OWN)
def test_share_of_the_batch_draws_its_part(name: str) -> None:
    draws = inspect_draws(lambda samples: OWN[name](X[:samples]))
    assert draws.layout_dependence is None
    assert draws.calls
    assert all(call.dim is not None for call in draws.calls)

    def draw(places: list[int], seed: int = 0, step: int = 3) -> Tensor:
        with use_draw_source(KeyedDraws(draws, seed, step, places)):
            return take_first(OWN[name](X[places])).detach()

    whole = draw(list(range(6)))
    part = draw([4, 1])
    blocks = len(part) // 2
    expected = torch.cat([whole[place * blocks : (place + 1) * blocks] for place in (4, 1)])
    assert torch.allclose(part, expected, atol=1e-6)
    assert not torch.equal(whole, draw(list(range(6)), step=4))
    assert not torch.equal(whole, draw(list(range(6)), seed=1))


def test_draw_without_a_sample_dimension_is_equal_on_all_ranks() -> None:
    """Earlier, a dropped weight (DropConnect) was different on every rank."""
    weight = torch.ones(16, 8)
    draws = inspect_draws(
        lambda samples: functional.linear(X[:samples], functional.dropout(weight))
    )
    assert [call.dim for call in draws.calls] == [None]
    with use_draw_source(KeyedDraws(draws, 0, 0, [0, 1, 2])):
        one = functional.dropout(weight)
    with use_draw_source(KeyedDraws(draws, 0, 0, [5])):
        other = functional.dropout(weight)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (
            lambda n: torch.randperm(n),
            "randperm of shape (2,) for two samples and (3,) for three, which mixes samples",
        ),
        (lambda n: functional.dropout(X[:n, 0] @ X[:n, 0].T), "give each sample its own number"),
        (
            lambda n: torch.poisson(X[:n].exp()),
            "draws from torch, which differ with the number of samples",
        ),
        (lambda n: numpy.random.rand(n), "draws from numpy"),
        (lambda n: [random.random() for _ in range(n)], "draws from random"),
        (
            lambda n: torch.rand(n, generator=torch.Generator()),
            "uniform_ by a generator of its own",
        ),
        (
            lambda n: [torch.rand(3) for _ in range(n)],
            "other random calls where there are more samples",
        ),
    ],
)
def test_draws_that_depend_on_the_layout_are_reported(
    forward: Callable[[int], object], reason: str
) -> None:
    draws = inspect_draws(forward)
    assert reason in (draws.layout_dependence or "")


@pytest.mark.parametrize(
    "forward",
    [
        lambda n: random.random(),
        lambda n: numpy.random.rand(3),
        lambda n: torch.poisson(torch.ones(3)),
        lambda n: torch.randperm(5),
        lambda n: torch.rand(()),
    ],
)
def test_draws_independent_of_the_layout_are_accepted(forward: Callable[[int], object]) -> None:
    draws = inspect_draws(forward)
    assert draws
    assert draws.layout_dependence is None


def test_padding_does_not_change_draws() -> None:
    """Earlier, a share with less padding drew other masks than the whole batch."""

    def forward(samples: int, length: int = 7) -> Tensor:
        return functional.dropout(torch.ones(samples, length, 5))

    draws = inspect_draws(forward)
    with use_draw_source(KeyedDraws(draws, 0, 0, [0, 1, 2])):
        long = forward(3, 7)
    with use_draw_source(KeyedDraws(draws, 0, 0, [2])):
        short = forward(1, 4)
    assert torch.equal(long[2:, :4], short)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_mask_has_the_right_rate(p: float) -> None:
    row = hash_rows(12345, tuple(range(200)), 1, CPU)
    element = hash_elements((5000,), CPU)
    kept = (map_to_uniform(mix_hash(row.view(-1, 1) ^ element), torch.float64) >= p).double()
    noise = (p * (1 - p)) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) < 5 * noise / 1000  # 10^6 draws
    centred = (kept - (1 - p)) / noise
    # samples do not correlate
    between = (centred @ centred.T / 5000).fill_diagonal_(0)
    assert float(between.abs().max()) < 6 / 5000**0.5
    # neighbours do not correlate either
    assert float((centred[:, 1:] * centred[:, :-1]).mean().abs()) < 5 / 1000


MOMENTS = {
    "uniform": (lambda x: x.uniform_(-1, 3), 1.0, 4 / 12**0.5),
    "normal": (lambda x: x.normal_(2, 3), 2.0, 3.0),
    "exponential": (lambda x: x.exponential_(4), 0.25, 0.25),
    "geometric": (lambda x: x.geometric_(0.25), 4.0, 12**0.5),
    "log normal": (lambda x: x.log_normal_(0, 0.5), 1.1331, 0.6039),
    "bernoulli": (lambda x: x.bernoulli_(0.3), 0.3, 0.21**0.5),
    "whole": (lambda x: x.random_(10, 20), 14.5, (99 / 12) ** 0.5),
    "by weights": (
        lambda x: torch.multinomial(torch.tensor([1.0, 3.0]).expand(len(x), 2), 1).double(),
        0.75,
        0.75**0.5 / 2,
    ),
    "by weights, replaced": (
        lambda x: torch.multinomial(torch.tensor([1.0, 3.0]).expand(len(x), 2), 5, True).double(),
        0.75,
        0.75**0.5 / 2,
    ),
}


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_and_deviation(name: str, dtype: torch.dtype) -> None:
    draw, mean, deviation = MOMENTS[name]
    with use_draw_source(DrawRecorder()):
        numbers = draw(torch.empty(200_000, 1, dtype=dtype)).double()
    assert abs(float(numbers.mean()) - mean) < 5 * deviation / len(numbers) ** 0.5
    assert float(numbers.std()) == pytest.approx(deviation, rel=0.05)


def test_float32_and_float64_draw_the_same_numbers() -> None:
    """A step that is compared with a step in float64 must draw the same numbers there."""
    for draw in (
        lambda x: x.uniform_(),
        lambda x: x.normal_(),
        lambda x: x.exponential_(),
        lambda x: x.bernoulli_(0.3),
    ):
        with use_draw_source(DrawRecorder()):
            single = draw(torch.empty(1000))
        with use_draw_source(DrawRecorder()):
            double = draw(torch.empty(1000, dtype=torch.float64))
        assert torch.allclose(single.double(), double, rtol=1e-6)


def test_draws_outside_of_a_step_are_those_of_torch() -> None:
    with use_draw_source(DrawRecorder()):
        torch.rand(3)
    torch.manual_seed(1)
    one = torch.rand(5), torch.randn(5), torch.randperm(5), functional.dropout(torch.ones(9))
    fresh = torch.Generator().manual_seed(1)
    assert torch.equal(one[0], torch.rand(5, generator=fresh))
    assert torch.equal(one[1], torch.randn(5, generator=fresh))
    assert torch.equal(one[2], torch.randperm(5, generator=fresh))
    assert torch.equal(one[3], torch.empty(9).bernoulli_(0.5, generator=fresh) * 2)


def test_every_replaced_kernel_exists() -> None:
    for name in RANDOM_KERNELS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"), name


def test_draw_calls_keep_their_order_when_ranks_are_merged() -> None:
    """Earlier, one of two equal dropouts was lost when the inspections of ranks were merged.

    The third call drops a weight whose rows are a multiple of a rank's samples. It was no longer
    found at its place, so every first step ended with "not as in the first step".
    """
    weight = torch.ones(64, 8)

    def forward(samples: int) -> None:
        functional.dropout(functional.dropout(X[:samples, 0]))
        functional.dropout(weight)

    one = inspect_draws(forward)
    both = one | inspect_draws(forward)
    assert both.calls == one.calls
    with use_draw_source(KeyedDraws(both, 0, 0, [0, 1, 2, 3])) as draw:
        functional.dropout(functional.dropout(X[:4, 0]))
        dropped = functional.dropout(weight)
    assert [dim for dim, _ in draw.draws.sample_dims.values()] == [0, 0, None]
    with use_draw_source(KeyedDraws(both, 0, 0, [4, 5])):
        functional.dropout(functional.dropout(X[:2, 0]))
        assert torch.equal(functional.dropout(weight), dropped)
    of_another = inspect_draws(lambda samples: torch.rand(samples, 3))
    assert (one | of_another).calls == one.calls + of_another.calls


def test_unexpected_draw_ends_the_step() -> None:
    draws = inspect_draws(lambda samples: functional.dropout(X[:samples]))
    with (
        use_draw_source(KeyedDraws(draws, 0, 0, [0, 1, 2, 3])),
        pytest.raises(StepFailed, match="not as in the first step"),
    ):
        functional.dropout(torch.ones(7, 5, 8))
    with use_draw_source(KeyedDraws(draws, 0, 0, [0, 1, 2, 3], strict=False)):
        functional.dropout(torch.ones(7, 5, 8))


# torch warns so for the inner one of two reentrant checkpoints
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_activation_checkpointing_draws_the_same_mask(reentrant: bool, by_name: bool) -> None:
    """Earlier, recomputation ran outside the keyed forward and drew another mask.

    The gradient was wrong, also in serial. If dropout was imported by name, the error remained for
    longer, without a message.
    """
    from torch.nn.functional import dropout

    layers = nn.ModuleList(nn.Linear(10, 10, dtype=torch.float64) for _ in range(3))

    def drop(h: Tensor) -> Tensor:
        return (dropout if by_name else functional.dropout)(h, 0.5)

    def block(h: Tensor) -> Tensor:
        # a checkpoint inside a checkpoint
        inner = checkpoint(
            lambda g: drop(torch.tanh(layers[1](g))), drop(h), use_reentrant=reentrant
        )
        return drop(inner)

    def forward(samples: int, use: bool = True) -> Tensor:
        hidden = torch.tanh(layers[0](X.double().view(24, 10)[:samples]))
        hidden = (
            checkpoint(block, hidden, use_reentrant=reentrant)
            if use
            else drop(torch.tanh(layers[1](drop(hidden))))
        )
        if not use:
            hidden = drop(hidden)
        return drop(layers[2](hidden)).sum()

    draws = inspect_draws(forward)
    gradients = []
    for use in (True, False):
        for layer in layers:
            layer.zero_grad()
        with use_draw_source(KeyedDraws(draws, 0, 0, list(range(8)))):
            forward(8, use).backward()
        gradients.append([layer.weight.grad for layer in layers])
    assert all(map(torch.equal, *gradients))


def test_job_with_checkpointing_equals_the_job_without() -> None:
    job = JOBS["dropout, recomputed"].replace(dtype=torch.float64)

    def compute_gradient(use: bool) -> torch.Tensor:
        trainer = Trainer.build_for_job(World(), job, Serial(threads=1))
        original = torch.utils.checkpoint.checkpoint
        if not use:
            equality_table.checkpoint = lambda function, *arguments, **_: function(*arguments)
        try:
            trainer.step(*next(trainer.batches(job.train, batch=12, epoch=0)))
        finally:
            equality_table.checkpoint = original
        return trainer.gradients()["first.weight"]  # type: ignore[return-value]

    assert torch.equal(compute_gradient(True), compute_gradient(False))


def test_draw_sources_may_end_in_any_order() -> None:
    """Earlier, a suspended generator kept its draw source in use for the whole process."""
    outer, inner = use_draw_source(DrawRecorder()), use_draw_source(DrawRecorder())
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert not DRAW_SOURCES
    inner.__exit__(None, None, None)
    assert not DRAW_SOURCES
