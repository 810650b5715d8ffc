"""Messages between stages: their memory stays from step to step, unless something still uses it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality_table import VECTORS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import paragrad as pg
from paragrad.errors import RankFailed
from paragrad.jobs.loss import run_backward
from paragrad.launch import Launcher
from paragrad.parallel.pipeline.pipeline_passes import find_gradient_edge
from paragrad.parallel.pipeline.stage_messages import MessageBuffers, MessageLayout
from paragrad.parallel.tracing.crossing_plan import Crossing
from paragrad.runtime.world import World

pytestmark = pytest.mark.processes

KEPT: list[Tensor] = []


def make_layout(*shapes: tuple[int, ...]) -> MessageLayout:
    return MessageLayout.build(
        [
            Crossing.build_from_tensor((number, 0), torch.empty(shape))
            for number, shape in enumerate(shapes)
        ],
        has_flags=False,
    )


def test_buffers_are_used_again_unless_a_tensor_uses_their_memory() -> None:
    memory, layout = MessageBuffers(torch.device("cpu")), make_layout((3, 4), (5,))
    first = memory.take_buffer(layout)
    assert [tuple(each.shape) for each in first.tensors] == [(3, 4), (5,)]
    assert memory.take_buffer(layout) is not first
    memory.return_buffer(first)
    assert memory.take_buffer(layout) is first
    kept = first.tensors[0].data
    memory.return_buffer(first)
    second = memory.take_buffer(layout)
    assert second is not first
    del kept
    graph = first.tensors[1].data.requires_grad_().square()
    memory.return_buffer(first)
    assert memory.take_buffer(layout) not in (first, second)
    del graph
    memory.return_buffer(first)
    memory.return_buffer(second)
    assert {memory.take_buffer(layout), memory.take_buffer(layout)} == {first, second}


def test_buffers_of_other_lengths_are_dropped_after_a_step_without_them() -> None:
    memory, short, long = MessageBuffers(torch.device("cpu")), make_layout((3,)), make_layout((9,))
    for layout in (short, long):
        memory.return_buffer(memory.take_buffer(layout))
    memory.drop_unused()
    assert len(memory.free) == 2
    memory.return_buffer(memory.take_buffer(long))
    memory.drop_unused()
    assert list(memory.free) == [id(long)]


class Keeper(nn.Module):
    """Keeps what it receives, as code that draws activations does."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            KEPT.append(x)
        return x * 2


class LateWriter(nn.Module):
    """Changes what it receives in place, from its third call with values on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not isinstance(x, FakeTensor)
        return x.mul_(2) if self.calls > 2 else x * 2


def train_steps(world: World, strategy: str, second: type[nn.Module]) -> list[Tensor]:
    """Train three steps, and return what the second part received in them."""
    KEPT.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 6), second(), nn.Linear(6, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pg.parallelize(
        model, nn.functional.cross_entropy, optimizer, strategy, skip_first_step_check=True
    ) as trainer:
        for batch in trainer.batches(VECTORS, 12, 0):
            trainer.step(*batch)
    return [each.detach().clone() for each in KEPT[-6:]]


def test_what_a_model_keeps_of_its_messages_does_not_change(pool: Launcher) -> None:
    """The memory of a message is used again in the next step, but not where the model keeps it."""
    (serial,) = pool.run(train_steps, "serial(micro=2)", Keeper, size=1)
    _, last = pool.run(train_steps, "pipeline(2, micro=2, cut=[1, 2])", Keeper, size=2)
    assert len(serial) == len(last) == 6
    for expected, received in zip(serial, last, strict=True):
        torch.testing.assert_close(received, expected, rtol=1e-12, atol=1e-12)


def test_a_late_change_in_place_of_a_message_is_refused(pool: Launcher) -> None:
    with pytest.raises(
        RankFailed, match="rank 1, step 1: a part of the model changes in place what it receives"
    ):
        pool.run(train_steps, "pipeline(2, micro=2, cut=[1, 2])", LateWriter, size=2)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


@pytest.mark.parametrize("last", [Double.apply, torch.tanh, torch.clone])
def test_edge_keeps_the_graph_of_a_tensor_that_is_gone(last: Callable[[Tensor], Tensor]) -> None:
    """A node of Python does not keep what is below it in the graph; its edge must."""
    leaves = [torch.randn(3, requires_grad=True) for _ in range(2)]
    leaves[1].data.copy_(leaves[0])
    gradient = torch.randn(3)
    out = last(3 * leaves[0])
    edge = find_gradient_edge(out)
    assert edge is not None
    del out
    gc.collect()
    run_backward([edge], [gradient])
    torch.autograd.backward(last(3 * leaves[1]), gradient)
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert find_gradient_edge(torch.randn(3)) is None
    assert find_gradient_edge(leaves[0]) is not None
