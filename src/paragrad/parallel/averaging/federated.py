"""Clients train in turn on each worker, each from the round's weights, and the weights that
they come to are averaged.

In a client's steps nothing is sent. A client begins with the model as it was at the beginning
of the round: weights, buffers, what modules keep in Python. What it comes to is added up on its
worker, times its samples; when the round is over the workers sum, along an all-reduce, what
clients say (the samples of each, or that it was lost, and which values besides the weights
forwards changed), and then these sums. So the mean is over the clients that came back, whatever
worker had them. What else forwards changed on any client becomes its mean too, where it has one
(`means.py`); the rest is as at the beginning of the round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paragrad.engine.exchange import Exchange, ExchangeOptions, Replica
from paragrad.engine.optimizer.modes import set_optimizer_mode
from paragrad.engine.state.preserve_state import ModuleSnapshot, list_replaced_parameters
from paragrad.engine.state.values import get_accumulation_dtype, is_same_value
from paragrad.errors import StepFailed
from paragrad.parallel.averaging.averageable_state import (
    ONE_SHAPE_HINT,
    REPLACED_MESSAGE,
    AveragingNotes,
    collect_averageable,
    round_to_type,
)
from paragrad.parallel.data.bucketing import VectorSumExchange
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.federated import Federated

# of what is sent when a round is over
SAMPLE_COUNTS = "counts"
WEIGHTS = "weights"
LOST = -1.0  # in place of a client's samples
OTHER_SHAPE_MESSAGE = (
    "a forward changed its shape from {} to {}, and clients' values are averaged; " + ONE_SHAPE_HINT
)


def make_exchange(
    strategy: Federated, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
) -> Exchange:
    """The exchange of `federated`. Collective."""
    return FederatedExchange(strategy, replica, world, log, options)


class FederatedExchange(VectorSumExchange):
    """Between `begin_round` and `meet` this worker's clients are `begun` and `ended`, or
    `lost`, one after the other.
    """

    steps_alone = True

    def __init__(
        self,
        strategy: Federated,
        replica: Replica,
        world: World,
        log: StepLog,
        options: ExchangeOptions,
    ) -> None:
        super().__init__(replica, world, log, options, strategy.reduce)
        self.fault_factor = world.size if options.inject_fault == "mean_twice" else 1  # planted
        # whose rates hold for all clients, and which never steps
        self.central_optimizer = self.optimizer
        self.trained = [
            name for name, each in self.loss_module.model.named_parameters() if each.requires_grad
        ]
        self.notes = AveragingNotes(log)

    # ---- in a client's step ------------------------------------------------------------------
    def finish(self, weight: float, loss: float) -> None:
        self.totals = [weight, loss, 0.0, self.doubtful_weight]

    def reduce_totals(self) -> list[float]:
        return self.totals

    def refuse_zero_weight(self) -> None:
        """Of a batch of which nothing counts nothing is updated."""

    def update(self) -> None:
        if self.weight:
            super().update()

    # ---- in a round --------------------------------------------------------------------------
    def begin_round(self, clients: int) -> None:
        """All workers have the same model; so many clients take part."""
        values = self._collect_values()
        self.round_start = ModuleSnapshot(
            self.loss_module,
            list(dict(self.loss_module.model.named_parameters())),
            include_buffers=True,
        )
        self.untrained_values = {
            name: each.detach().clone() for name, each in values.items() if name not in self.trained
        }
        # which of these some client of this worker changed
        self.changed_names = set[str]()
        # of the samples of this worker's clients that came back, by place among all
        self.client_samples = [0.0] * clients
        self.value_sums = {
            name: torch.zeros_like(each, dtype=get_accumulation_dtype(each.dtype))
            for name, each in values.items()
        }
        self.retained_bytes = 2 * sum(
            each.nbytes for each in (*self.value_sums.values(), *self.untrained_values.values())
        )

    def begin_client(self) -> None:
        """A client begins; its optimizer is made, and given to `optimizer`, after this."""
        self._restore_round_start()

    def end_client(self, place: int, samples: int) -> None:
        """A client has trained over so many samples. Raises StepFailed, and then nothing of it
        is added, where its weights are not finite, or not those that others have.
        """
        set_optimizer_mode(self.optimizer, "eval")  # which has the weights that it stands for
        if names := list_replaced_parameters(self.loss_module.model, self.round_start.parameters):
            raise StepFailed(REPLACED_MESSAGE, tensor=", ".join(names))
        values = self._collect_values()
        self._refuse_other_shapes(values)
        self.notes.note_python_state(
            self.round_start.python_state, "as at the beginning, for every client of every round"
        )
        moved = {
            name
            for name, each in self.untrained_values.items()
            if not is_same_value(values[name], each)
        }
        for name in (
            *self.trained,
            *(name for name in moved if self.untrained_values[name].isfinite().all()),
        ):
            if not values[name].isfinite().all():
                raise StepFailed("its weights are not finite any more", tensor=name)
        # for which there may be no room
        addends = [(total, values[name].to(total)) for name, total in self.value_sums.items()]
        for total, addend in addends:
            total.add_(addend, alpha=samples)
        self.changed_names |= moved
        self.client_samples[place] = float(samples)

    def _refuse_other_shapes(self, values: Mapping[str, Tensor]) -> None:
        for name, total in self.value_sums.items():
            if name not in values:
                raise StepFailed(
                    "a forward took it away, and clients' values are averaged; let the model keep "
                    "it",
                    tensor=name,
                )
            if values[name].shape != total.shape:
                raise StepFailed(
                    OTHER_SHAPE_MESSAGE.format(tuple(total.shape), tuple(values[name].shape)),
                    tensor=name,
                )

    def drop_client(self, place: int) -> None:
        """A client will not come back in this round."""
        self.client_samples[place] = LOST

    def average_clients(self) -> list[float]:
        """The round is over: the model becomes the mean of those that came back. Of each client
        its samples, or LOST. Collective.
        """
        self._restore_round_start()
        self.optimizer = self.central_optimizer
        self.sent_bytes = {}
        self.kind = SAMPLE_COUNTS
        flags = [float(name in self.changed_names) for name in self.untrained_values]
        own = next(iter(self.value_sums.values())).real.new_tensor(
            [self.stop_requested, *self.client_samples, *flags], dtype=torch.float64
        )
        self.stop_requests, *told = self._sum_tensors({SAMPLE_COUNTS: own})[SAMPLE_COUNTS].tolist()
        counts = told[: len(self.client_samples)]
        if total := sum(count for count in counts if count > 0):
            self.kind = WEIGHTS
            moved = [
                name
                for name, flag in zip(self.untrained_values, told[len(counts) :], strict=True)
                if flag
            ]
            self.notes.note_averages(moved)
            means = self._sum_tensors(
                {name: self.value_sums[name] for name in (*self.trained, *moved)},
                total=total * self.fault_factor,
            )
            self._set_values(means)
        del self.value_sums, self.round_start
        return counts  # type: ignore[no-any-return]

    def _set_values(self, means: Mapping[str, Tensor]) -> None:
        values = self._collect_values()
        for name, mean in means.items():
            values[name].copy_(round_to_type(mean, values[name].dtype))

    def _restore_round_start(self) -> None:
        self.round_start.restore_module()
        for name, parameter in self.loss_module.model.named_parameters():
            # a client may have frozen some
            parameter.requires_grad_(name in self.trained)

    def _collect_values(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in collect_averageable(self.loss_module).items()}
