"""A user's parameter server, outside the library; the rank of the server is no worker.

Workers push gradients to one server. It sums them in the order of ranks, and updates with the
job's optimizer. Workers then pull the parameters (Li et al. 2014). This is bulk synchronous, so it
is the training of serial.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import paragrad as pg
from paragrad.engine.layout import OptimizerState
from paragrad.runtime.world import World


class Central(pg.Strategy):
    """One parameter server, bulk synchronous."""

    workers: int = pg.option(pg.Integer())
    servers = 1
    is_replicated = True

    @property
    def guarantees(self) -> pg.Guarantees:
        return pg.Guarantees()

    def make_exchange(self, replica: Any, world: World, log: Any, options: Any) -> pg.Exchange:
        return Served(replica, world)


class Served(pg.Exchange):
    """The exchange of workers and of the server: all workers send a request, the server answers."""

    def __init__(self, replica: Any, world: World) -> None:
        super().__init__(replica)
        # the server is rank 0 of this world
        room = world.split_ranks([[world.size - 1, *range(world.size - 1)]])
        assert room is not None
        self.room = room
        self.weight = 1.0
        self.trained = {
            name: each
            for name, each in self.loss_module.model.named_parameters()
            if each.requires_grad
        }

    # ---- a worker's side ---------------------------------------------------------------------
    def ask(self, what: str, value: Any = None) -> Any:
        self.room.gather_objects((what, value))
        return self.room.broadcast_object(None)

    def finish(self, weight: float, loss: float) -> None:
        own = [weight, loss, float(self.stop_requested), self.doubtful_weight]
        gradients = {name: each.grad for name, each in self.trained.items()}
        self.count_bytes(
            "gradients",
            sum(each.nbytes for each in gradients.values() if each is not None),
            computed=False,
        )
        self.told, sums = self.ask("push", (own, gradients))
        for name, parameter in self.trained.items():
            parameter.grad = sums[name]

    def reduce_totals(self) -> list[float]:
        return self.told

    def average(self, weight: float) -> None:
        super().average(weight)
        self.weight = weight

    def update(self) -> None:
        settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        pulled, used = self.ask("update", (self.weight, settings))
        # schedulers check this attribute
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter, value in zip(self.parameters, pulled, strict=True):
                parameter.copy_(value)
        for name, parameter in self.trained.items():
            parameter.grad = used[name]

    def gather_optimizer_state(self) -> OptimizerState:
        return self.ask("state")  # type: ignore[no-any-return]

    def dismiss_servers(self) -> None:
        self.ask("end")

    # ---- the server's side -------------------------------------------------------------------
    def serve(self) -> None:
        what = ""
        while what != "end":
            told: list[Any] = self.room.gather_objects(None)[1:]
            what = told[0][0]
            self.room.broadcast_object(getattr(self, f"on_{what}")([value for _, value in told]))

    def on_push(self, told: list[Any]) -> tuple[list[float], dict[str, Tensor | None]]:
        for name, parameter in self.trained.items():
            pushed = [gradients[name] for _, gradients in told if gradients[name] is not None]
            parameter.grad = sum(pushed[1:], pushed[0]) if pushed else None
        return (
            [sum(numbers) for numbers in zip(*(own for own, _ in told), strict=True)],
            {name: parameter.grad for name, parameter in self.trained.items()},
        )

    def on_update(self, told: list[Any]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        weight, settings = told[0]
        for group, new in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(new)
        super().average(weight)
        super().update()
        return [parameter.detach() for parameter in self.parameters], self.gather_gradients()

    def on_state(self, told: list[Any]) -> OptimizerState:
        return super().gather_optimizer_state()

    def on_end(self, told: list[Any]) -> None:
        """Nothing to do."""
