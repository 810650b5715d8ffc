"""Detection of the forks of a model, and the assignment of branches to ranks."""

from __future__ import annotations

import pytest
import torch
from equality_table import Experts, Forking, Residual, Towers, make_deep_mlp
from torch import Tensor, nn

import paragrad as pg
from paragrad.parallel.branch.branch_detection import assign_branches, find_forks, record_functions

pytestmark = pytest.mark.pure


def find_branches(model: nn.Module, *inputs: Tensor, ranks: int = 2) -> list[set[str]]:
    """Return the modules of each branch, for each fork. Each function counts as one second."""
    with torch.no_grad():
        nodes, ends = record_functions(model, inputs)
    for node in nodes:
        node.seconds = 1.0
    return [
        {" ".join(branch.modules) for branch in fork} for fork in find_forks(nodes, ends, ranks)
    ]


def test_two_forks_of_four_branches() -> None:
    one, two = find_branches(pg.job("inception-digits").model(), torch.randn(2, 1, 8, 8))
    assert one == {"2.one", "2.three.0 2.three.2", "2.five.0 2.five.2", "2.pool.1"}
    assert two == {each.replace("2.", "4.", 1).replace(" 2.", " 4.") for each in one}


def test_concatenated_and_summed_branches_are_found() -> None:
    """A module that two branches call makes them one branch."""
    one, two = find_branches(Forking(), torch.randn(2, 2, 8, 8))
    assert {each[:7] for each in one} == {"first.0", "first.1", "first.2"}
    assert len(two) == 2
    assert {"second.0"} < two


def test_skip_connections_towers_and_tuples() -> None:
    assert find_branches(Residual(), torch.randn(2, 2, 8, 8)) == [{"first depth groups", "around"}]
    assert find_branches(Towers(), torch.randn(2, 10)) == [{"left.0 left.1 left.4", "right.0 lstm"}]
    assert find_branches(Experts(), torch.randn(2, 10)) == [
        {"each.0.0 each.0.2", "each.1.0 each.1.2", "each.2.0 each.2.2"}
    ]


def test_chain_has_no_branches() -> None:
    assert find_branches(make_deep_mlp(), torch.randn(2, 10)) == []


class Nested(nn.Module):
    """A model with a short and a long branch. The long one contains two forks."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(4, 4)
        self.into = nn.Linear(4, 4)
        self.arms = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x)
        y = self.arms[0](y) + self.arms[1](y)
        y = self.arms[2](y) + self.arms[3](y)
        return self.short(x) + y  # type: ignore[no-any-return]


def test_long_branch_is_searched_for_inner_forks() -> None:
    pairs = [{"arms.0.0 arms.0.2", "arms.1.0 arms.1.2"}, {"arms.2.0 arms.2.2", "arms.3.0 arms.3.2"}]
    assert [each for each in find_branches(Nested(), torch.randn(2, 4)) if len(each) > 1] == pairs


def test_longest_branch_goes_to_the_least_loaded_rank() -> None:
    with torch.no_grad():
        nodes, ends = record_functions(Experts(), (torch.randn(2, 10),))
    for node in nodes:
        node.seconds = 5.0 if "0" in node.module[:6] else 1.0
    owners = assign_branches(find_forks(nodes, ends, 2), 2)
    assert {owners[f"each.{at}.0.weight"] for at in (1, 2)} == {1}
    assert owners["each.0.2.bias"] == 0
