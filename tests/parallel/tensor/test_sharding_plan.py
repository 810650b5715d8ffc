"""Sharding plans: how layers are split, found by running the model, without its author's help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality_table import TiedLstm, draw_integers, draw_numbers, make_batch_norm_cnn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paragrad.errors import StepFailed
from paragrad.parallel.tensor import summary, tensor
from paragrad.parallel.tensor.sharding_plan import ShardingPlan, plan_sharding
from paragrad.strategies.tensor import Tensor as Strategy

pytestmark = pytest.mark.processes


def describe_divisions(plan: ShardingPlan) -> dict[str, str]:
    """Return for each tensor how it is divided."""
    return {name: summary.describe_division(plan, name) for name in plan.shapes}


def list_transfers(plan: ShardingPlan) -> list[str]:
    return [f"{note.module}: {note.kind}" for note in plan.transfers]


def test_linear_pairs_are_split_by_columns_and_rows() -> None:
    """Each pair of linear layers needs one sum in forward and one in backward, as in Megatron."""
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.GELU(),
        nn.Linear(8, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    plan = plan_sharding(model, draw_numbers(2, 6, seed=1), 2)
    assert describe_divisions(plan) == {
        "0.weight": "outputs 4 + 4",
        "0.bias": "elements 4 + 4",
        "2.weight": "inputs 4 + 4",
        "2.bias": "whole",
        "3.weight": "whole (layer_norm)",
        "3.bias": "whole (layer_norm)",
        "4.weight": "outputs 3 + 2",
        "4.bias": "elements 3 + 2",
        "6.weight": "inputs 3 + 2",
        "6.bias": "whole",
    }
    assert list_transfers(plan) == ["2: summed", "4: copied", "6: summed"]


def make_deep_classifier(classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes)
    )


class Scaled(nn.Module):
    """Multiplies each class by a large table, which is divided like the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_deep_classifier(8)
        self.table = nn.Parameter(torch.ones(8, 8000))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).unsqueeze(-1) * self.table  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM, which is whole on every rank, and a small last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(6, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])  # type: ignore[no-any-return]


class TiedVocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 256)
        self.body = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.body(self.embedding(x))
        return values @ self.embedding.weight.t()


def test_a_small_last_layer_stays_whole() -> None:
    """If it is divided, ranks sum the gradient of its input and exchange losses."""
    plan = plan_sharding(make_deep_classifier(3), draw_numbers(2, 16, seed=1), 2)
    assert describe_divisions(plan)["4.weight"] == "whole(3, 512) (a small last layer)"
    assert list_transfers(plan) == ["2: summed"]


@pytest.mark.parametrize(
    ("model", "example", "name", "how"),
    [
        (make_deep_classifier(65), (2, 16), "4.weight", "outputs 33 + 32"),
        (
            nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 4)),
            (2, 6),
            "2.weight",
            "outputs 2 + 2",
        ),
        (Scaled(), (2, 16), "table", "inputs 4 + 4"),
        (Recurrent(), (2, 3, 6), "head.weight", "outputs 2 + 2"),
    ],
    ids=["many outputs", "a large share", "what is divided like it", "nothing else divided"],
)
def test_other_last_layers_are_divided(
    model: nn.Module, example: tuple[int, ...], name: str, how: str
) -> None:
    plan = plan_sharding(model, draw_numbers(*example, seed=1), 2)
    assert describe_divisions(plan)[name] == how


def test_a_small_tied_vocabulary_is_divided() -> None:
    plan = plan_sharding(TiedVocabulary(), draw_integers(16, 2, 5, seed=1), 2)
    assert describe_divisions(plan)["embedding.weight"] == "vocabulary 8 + 8"


def test_every_layer_is_split_by_outputs_without_pairs() -> None:
    """Each layer's input is gathered: one kind of split for all layers (Gholami et al. 2018)."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    plan = plan_sharding(model, draw_numbers(2, 6, seed=1), 2, pairs=False)
    assert [describe_divisions(plan)[f"{number}.weight"] for number in (0, 2, 4)] == [
        "outputs 4 + 4",
        "outputs 3 + 3",
        "outputs 2 + 2",
    ]
    assert list_transfers(plan) == ["2: gathered", "2: copied", "4: gathered", "4: copied"]
    plan = plan_sharding(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
        draw_numbers(2, 6, seed=1),
        2,
        pairs=False,
    )
    # the last layer has too few outputs
    assert (describe_divisions(plan)["2.weight"], list_transfers(plan)) == (
        "whole(1, 8)",
        ["2: gathered"],
    )


def test_channels_are_split_with_their_norm_statistics() -> None:
    plan = plan_sharding(make_batch_norm_cnn(), draw_numbers(2, 2, 8, 8, seed=1), 2)
    assert {name for name in plan.sharded_tensors if name.startswith("1.")} == {
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
    }
    # the flattened elements of a channel stay together
    assert describe_divisions(plan)["5.weight"] == "inputs 18 + 18"


def test_heads_are_whole_and_qkv_is_three() -> None:
    plan = plan_sharding(
        nn.TransformerEncoderLayer(12, 3, 16, batch_first=True), draw_numbers(2, 5, 12, seed=1), 2
    )
    assert (
        describe_divisions(plan)["self_attn.in_proj_weight"] == "outputs 8 + 4 of each of 3 blocks"
    )
    assert describe_divisions(plan)["self_attn.out_proj.weight"] == "inputs 8 + 4"
    assert list_transfers(plan) == ["self_attn: summed", "linear1: copied", "linear2: summed"]


class Grouped(nn.Module):
    """Attention with more query heads than key heads; `heads` has both numbers."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        self.heads = queries, keys
        self.query, self.key, self.value = (
            nn.Linear(8, 4 * count) for count in (queries, keys, keys)
        )
        self.out = nn.Linear(4 * queries, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        q, k, v = (
            layer(x).view(*x.shape[:2], count, 4).transpose(1, 2)
            for layer, count in zip(
                (self.query, self.key, self.value),
                (self.heads[0], self.heads[1], self.heads[1]),
                strict=True,
            )
        )
        k, v = (
            each[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).reshape(q.shape)
            for each in (k, v)
        )
        return self.out(
            functional.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .reshape(*x.shape[:2], -1)
        )


def test_queries_are_on_the_rank_of_their_keys() -> None:
    """Query heads are divided like their key heads.

    Alone, eight query heads over three ranks would be 3, 3 and 2. Their four key heads are 2, 1 and
    1.
    """
    plan = plan_sharding(Grouped(8, 4), draw_numbers(2, 5, 8, seed=1).requires_grad_(), 3)
    assert describe_divisions(plan)["query.weight"] == "outputs 16 + 8 + 8"
    assert describe_divisions(plan)["key.weight"] == "outputs 8 + 4 + 4"
    assert not [each for each in list_transfers(plan) if "gathered" in each or "sliced" in each]


def test_fewer_key_heads_than_ranks_are_replicated() -> None:
    plan = plan_sharding(Grouped(4, 2), draw_numbers(2, 5, 8, seed=1), 3)
    assert describe_divisions(plan)["query.weight"] == "outputs 8 + 4 + 4"
    assert describe_divisions(plan)["key.weight"].startswith("whole")


def test_tied_weight_is_split_once() -> None:
    plan = plan_sharding(TiedLstm(), draw_integers(11, 2, 7, seed=1), 2)
    assert describe_divisions(plan)["embedding.weight"] == "vocabulary 6 + 5"
    assert describe_divisions(plan)["out.bias"] == "elements 6 + 5"
    assert all(
        describe_divisions(plan)[name].startswith("whole")
        for name in plan.shapes
        if name.startswith("lstm")
    )


def test_weight_normalization_sums_norms_over_ranks() -> None:
    """If the elements of a row are on several ranks, its norm is summed over them."""
    normed = nn.utils.parametrizations.weight_norm
    plan = plan_sharding(
        nn.Sequential(normed(nn.Linear(6, 8)), nn.Tanh(), normed(nn.Linear(8, 4))),
        draw_numbers(2, 6, seed=1),
        2,
    )
    assert describe_divisions(plan)["0.parametrizations.weight.original1"] == "outputs 4 + 4"
    assert describe_divisions(plan)["2.parametrizations.weight.original1"] == "inputs 4 + 4"
    assert "2: gathered" not in list_transfers(plan)


class Experts(nn.Module):
    """A stack of weights with one for each expert; the outputs of all experts are added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(draw_numbers(3, *shape, seed=1)) for shape in ((16, 6), (6, 8))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(3):
            gate, up = functional.linear(x, self.up[expert]).chunk(2, -1)
            out = out + functional.linear(gate.sigmoid() * up, self.down[expert])
        return out


def test_stacked_experts_are_split_inside() -> None:
    plan = plan_sharding(Experts(), draw_numbers(2, 6, seed=1), 2)
    assert describe_divisions(plan) == {
        "up": "outputs 4 + 4 of each of 2 blocks",
        "down": "inputs 4 + 4",
    }
    assert {each.split(": ")[1] for each in list_transfers(plan)} == {"summed"}


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda each: self.second(self.first(each).tanh()), x, use_reentrant=True)


def test_recomputed_layers_are_traced() -> None:
    assert (
        len(
            plan_sharding(
                Recomputed(), draw_numbers(2, 6, seed=1).requires_grad_(), 2
            ).sharded_tensors
        )
        == 3
    )


def test_plan_with_fewer_bytes_is_chosen_around_a_layer() -> None:
    """The stem's outputs are divided and gathered once.

    The values that go around the blocks are whole.
    """

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
                for _ in range(3)
            )

        def forward(self, x: Tensor) -> Any:
            x = self.stem(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    plan = plan_sharding(Residual(), draw_numbers(2, 6, seed=1), 2)
    assert plan.options.gathers_mixed
    assert list_transfers(plan).count("blocks.1.0: gathered") == 0


def test_model_is_unchanged_by_planning() -> None:
    model = make_batch_norm_cnn()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    plan_sharding(model, draw_numbers(2, 2, 8, 8, seed=1), 2)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(
        type(getattr(module, name)) is nn.Parameter
        for module in model.modules()
        for name in module._parameters
        if module._parameters[name] is not None
    )


# torch itself warns where a compiler is used
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("made", "ranks", "says"),
    [
        (
            lambda: nn.LSTM(4, 4),
            2,
            "no layer of the model can be split over 2 ranks: .* train it with data",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)),
            9,
            r"over 9 ranks: .* give at most tensor\(5\)",
        ),
        (
            lambda: torch.compile(nn.Linear(4, 4)),
            2,
            "the model is compiled, .* train it without torch.compile",
        ),
    ],
    ids=["nothing to split", "too many ranks", "compiled"],
)
def test_unsplittable_layer_is_reported(made: Callable[[], Any], ranks: int, says: str) -> None:
    with pytest.raises(StepFailed, match=says):
        tensor.check_model(Strategy(ranks), made(), draw_numbers(2, 4, seed=1), False)
