"""If user code calls torch.distributed, training equals serial, or ends with a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality_table import VECTORS, make_job, make_mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset, default_collate

import paragrad as pg
from paragrad.launch import Launcher
from paragrad.runtime.single_group import act_alone
from paragrad.runtime.world import World

pytestmark = pytest.mark.processes


def see_group(world: World) -> list[Any]:
    def look() -> list[Any]:
        value = torch.ones(2) * (world.rank + 1)
        dist.all_reduce(value)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, world.rank)
        return [dist.get_rank(), dist.get_world_size(), value.tolist(), gathered]

    with act_alone():
        alone = look()
        with act_alone():  # one inside another
            assert dist.get_world_size() == 1
        # paragrad's own collectives name their group
        summed = world.all_reduce(torch.ones(1)).tolist()
    return [alone, look(), summed]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_default_group_has_one_rank_for_a_while(backend: str, pool: Launcher) -> None:
    for _ in range(2):  # in the next world too
        first, second = pool.run(see_group, size=2, backend=backend)
        assert first == [[0, 1, [1.0, 1.0], [0]], [0, 2, [3.0, 3.0], [0, 1]], [2.0]]
        assert second == [[0, 1, [2.0, 2.0], [1]], [1, 2, [3.0, 3.0], [0, 1]], [2.0]]


# ---- in a training ----------------------------------------------------------------------------
def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum over all ranks that user code sees; detection models sum box counts so."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def compute_averaged_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Divide by the mean count of a rank, and return a weight that gives the loss of serial."""
    mean_count = sum_over_ranks(torch.tensor(float(len(target)))) / count_ranks()
    total = functional.cross_entropy(output, target, reduction="sum")
    return total / mean_count * len(target), torch.tensor(float(len(target)))


def compute_shared_metric(output: Tensor, target: Tensor) -> tuple[float, int]:
    right = sum_over_ranks((output.argmax(1) == target).sum().float())
    return float(right), len(target)


class SharesInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_mlp()

    def forward(self, x: Tensor) -> Tensor:
        ratio = sum_over_ranks(torch.tensor(float(count_ranks()))) / count_ranks() ** 2
        return self.inner(x) * ratio.to(x.dtype)  # type: ignore[no-any-return]


def collate_with_collective(samples: list[Any]) -> Any:
    inputs, target = default_collate(samples)
    largest = torch.tensor(float(len(samples)))
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return inputs * (largest / largest).to(inputs.dtype), target


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("place", ["loss", "forward", "metric", "collate"])
def test_collectives_of_user_code_equal_serial(place: str, backend: str, tmp_path: Path) -> None:
    """Earlier, the reference step called the collective on rank 0 only.

    Over gloo, the run then waited for 300 s without any message.
    """
    changes: dict[str, dict[str, Any]] = {
        "loss": {"loss": compute_averaged_loss},
        "forward": {"model": SharesInForward},
        "metric": {"metric": compute_shared_metric},
        "collate": {"collate": collate_with_collective},
    }
    even = Subset(VECTORS, range(20))  # all shares are equal
    made = make_job("shares", make_mlp, even, test=VECTORS, metric=pg.accuracy, epochs=1, batch=10)
    made = made.replace(**changes[place])
    serial = pg.train(made, "serial", runs=tmp_path)
    run = pg.train(made, "data(2)", runs=tmp_path, backend=backend, timeout=20)
    assert run.losses == pytest.approx(serial.losses, rel=1e-5)
    assert run.test == pytest.approx(serial.test, rel=1e-5)


def compute_loss_on_one_rank_alone(output: Tensor, target: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1:
        sum_over_ranks(torch.ones(3))
    return functional.cross_entropy(output, target)


@pytest.mark.story
@pytest.mark.parametrize("strategy", ["data(2)", "data(2, reduce=native)", "data(2, reduce=ring)"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_collective_of_one_rank_ends_by_name(strategy: str, backend: str, tmp_path: Path) -> None:
    made = make_job(
        "alone", make_mlp, VECTORS, loss=compute_loss_on_one_rank_alone, epochs=1, batch=10
    )
    with pytest.raises(pg.RankFailed, match=r"gave up waiting for rank|Timed out waiting"):
        pg.train(made, strategy, runs=tmp_path, backend=backend, timeout=5)
