"""Federated averaging.

This is FedAvg (McMahan et al. 2017, arXiv 1602.05629).

Clients train in turn on each worker, each from the weights of the round, and their weights are
averaged. Nothing is sent in a client's steps. A client begins with the model as it was at the
beginning of the round: weights, buffers and Python state of modules. Its values, times its samples,
are added to a sum on its worker.

After the round the workers use an all-reduce for two messages. The first has reports on the
clients: the samples of each, or that it was lost, and which untrained values forward passes
changed. The second has the sums. So the mean covers all clients that finished, on whatever worker
they ran.

Other values that forward passes changed on any client become their mean too, if they have one
(`averageable_state.py`). The rest is as at the beginning of the round.
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

# kinds of the bytes that are sent after a round
SAMPLE_COUNTS = "counts"
WEIGHTS = "weights"
LOST = -1.0  # stands for the samples of a lost client
OTHER_SHAPE_MESSAGE = (
    "a forward changed its shape from {} to {}, and clients' values are averaged; " + ONE_SHAPE_HINT
)


def make_exchange(
    strategy: Federated, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
) -> Exchange:
    """Make the exchange of `federated`.

    Collective: all ranks call it together.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

    Returns:
        The exchange of this rank.
    """
    return FederatedExchange(strategy, replica, world, log, options)


class FederatedExchange(VectorSumExchange):
    """Trains the clients of a worker one after the other and averages them over workers.

    A round has these calls: `begin_round`; for each client `begin_client`, then `end_client` or
    `drop_client`; and `average_clients`.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

    Attributes:
        fault_factor: The number of ranks if the fault mean_twice is injected, otherwise 1.

        central_optimizer: The optimizer with the learning rates for all clients. It never steps.

        trained: Names of the trained parameters.

        notes: Notes on averaged values.

        totals: Weight, loss, 0 and doubtful weight of the last step.

        round_start: The model at the beginning of the round.

        untrained_values: The untrained values at the beginning of the round.

        changed_names: Untrained values that some client of this worker changed.

        client_samples: Samples of each client of the round; 0 for clients of other workers.

        value_sums: Sums of the values of this worker's clients, times their samples.
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
        # an injected fault
        self.fault_factor = world.size if options.inject_fault == "mean_twice" else 1
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
        """Accept a weight of 0: such a batch updates nothing."""

    def update(self) -> None:
        if self.weight:
            super().update()

    # ---- in a round --------------------------------------------------------------------------
    def begin_round(self, clients: int) -> None:
        """Begin a round. All workers have the same model now.

        Args:
            clients: Number of clients that take part, on all workers.
        """
        values = self._collect_values()
        self.round_start = ModuleSnapshot(
            self.loss_module,
            list(dict(self.loss_module.model.named_parameters())),
            include_buffers=True,
        )
        self.untrained_values = {
            name: each.detach().clone() for name, each in values.items() if name not in self.trained
        }
        self.changed_names = set[str]()
        self.client_samples = [0.0] * clients
        self.value_sums = {
            name: torch.zeros_like(each, dtype=get_accumulation_dtype(each.dtype))
            for name, each in values.items()
        }
        self.retained_bytes = 2 * sum(
            each.nbytes for each in (*self.value_sums.values(), *self.untrained_values.values())
        )

    def begin_client(self) -> None:
        """Restore the model for the next client.

        After this the caller makes the client's optimizer and passes it to `use_optimizer`.
        """
        self._restore_round_start()

    def end_client(self, place: int, samples: int) -> None:
        """Add the values of a client that finished its training.

        Args:
            place: Number of the client in the round.
            samples: Number of samples that it trained on.

        Raises:
            StepFailed: Its values are not finite, or their names or shapes differ from those of
                other clients. Then nothing is added.
        """
        set_optimizer_mode(self.optimizer, "eval")  # eval mode sets the effective weights
        if names := list_replaced_parameters(self.loss_module.model, self.round_start.parameters):
            raise StepFailed(REPLACED_MESSAGE, tensor=", ".join(names))
        values = self._collect_values()
        self._refuse_other_shapes(values)
        self.notes.note_python_state(
            self.round_start.python_state, "as at the beginning, for every client of every round"
        )
        changed = {
            name
            for name, each in self.untrained_values.items()
            if not is_same_value(values[name], each)
        }
        for name in (
            *self.trained,
            *(name for name in changed if self.untrained_values[name].isfinite().all()),
        ):
            if not values[name].isfinite().all():
                raise StepFailed("its weights are not finite any more", tensor=name)
        # First all conversions, which may run out of memory. After them nothing can fail.
        addends = [(total, values[name].to(total)) for name, total in self.value_sums.items()]
        for total, addend in addends:
            total.add_(addend, alpha=samples)
        self.changed_names |= changed
        self.client_samples[place] = float(samples)

    def _refuse_other_shapes(self, values: Mapping[str, Tensor]) -> None:
        for name, total in self.value_sums.items():
            if name not in values:
                raise StepFailed(
                    "a forward removed it, and clients' values are averaged; let the model keep it",
                    tensor=name,
                )
            if values[name].shape != total.shape:
                raise StepFailed(
                    OTHER_SHAPE_MESSAGE.format(tuple(total.shape), tuple(values[name].shape)),
                    tensor=name,
                )

    def drop_client(self, place: int) -> None:
        """Record that a client was lost in this round.

        Args:
            place: Number of the client in the round.
        """
        self.client_samples[place] = LOST

    def average_clients(self) -> list[float]:
        """End the round: the model becomes the mean of the clients that finished.

        Collective: all ranks call it together.

        Returns:
            The samples of each client of the round, or LOST.
        """
        self._restore_round_start()
        self.use_optimizer(self.central_optimizer)
        self.sent_bytes = {}
        self.kind = SAMPLE_COUNTS
        flags = [float(name in self.changed_names) for name in self.untrained_values]
        report = next(iter(self.value_sums.values())).real.new_tensor(
            [self.stop_requested, *self.client_samples, *flags], dtype=torch.float64
        )
        self.stop_requests, *sums = self._sum_tensors({SAMPLE_COUNTS: report})[
            SAMPLE_COUNTS
        ].tolist()
        counts = sums[: len(self.client_samples)]
        if total := sum(count for count in counts if count > 0):
            self.kind = WEIGHTS
            changed = [
                name
                for name, flag in zip(self.untrained_values, sums[len(counts) :], strict=True)
                if flag
            ]
            self.notes.note_averages(changed)
            means = self._sum_tensors(
                {name: self.value_sums[name] for name in (*self.trained, *changed)},
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
            # a client may have frozen some parameters
            parameter.requires_grad_(name in self.trained)

    def _collect_values(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in collect_averageable(self.loss_module).items()}
