"""Deep gradient compression (DGC; Lin et al. 2018, arXiv 1712.01887).

Velocities are accumulated, and the largest accumulated values are sent. Momentum, weight decay and
clipping of a training are applied here only.

* Momentum correction and factor masking are in `parallel/compression/feedback.py`.
  `parallel/compression/momentum.py` takes the momentum over from the optimizer.
* Clipping comes before accumulation, on each rank. The norm of its part of the mean gradient is at
  most the maximum norm times the root of its share of the batch. Of n equal shares, that is the
  maximum norm divided by the root of n. The reason is that norms of parts of independent samples
  add up in this way.
* Warm-up: more is sent in an epoch than in the next one (`Dgc.adapt_to_epoch`).
* Small tensors are sent whole and keep the momentum of SGD, without masking.
* Weight decay is dense and never sent, because every rank has the weights. In the accumulation it
  would be delayed as gradients are.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from paragrad.engine.exchange import ExchangeOptions, Replica
from paragrad.engine.layout import OptimizerState
from paragrad.engine.optimizer.optimizer_state import load_parameter_state
from paragrad.errors import StepFailed
from paragrad.parallel.compression.feedback import UNSENT, load_residual, reshape_and_cast_like
from paragrad.parallel.compression.momentum import make_momentum_state, take_over_momentum
from paragrad.parallel.data.compressed_exchange import CompressedExchange
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Dgc
from paragrad.strategies.data import Data

# name of the momentum of weight decay in a checkpoint, for compressed tensors
DECAYED = "decayed"


class DgcExchange(CompressedExchange):
    """Deep gradient compression.

    After `average`, the gradients hold what the optimizer steps by. For small tensors that is
    everything; for others it is what was sent, plus weight decay.

    Args:
        strategy: The resolved strategy, with a Dgc compressor.

        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

        options: Options that do not depend on the technique.

    Attributes:
        dgc: The compressor.

        momentum: The momentum that was taken over from the optimizer.

        velocities: The feedback, which accumulates velocities.

        clip: Maximum norm of the mean gradient, or None. `clip_norm` is None.

        is_settled: Whether the optimizer has its momentum back.

        unsent_values: Restored unsent values of tensors that are small now.
    """

    def __init__(
        self, strategy: Data, replica: Replica, world: World, log: StepLog, options: ExchangeOptions
    ) -> None:
        assert isinstance(strategy.compress, Dgc)
        self.dgc = strategy.compress
        named = {
            name: each
            for name, each in replica.module.model.named_parameters()
            if each.requires_grad
        }
        momentum = take_over_momentum(self.dgc, replica.optimizer, named)
        assert momentum is not None
        self.momentum = momentum
        self.velocities = momentum.build_feedback()
        super().__init__(strategy, replica, world, log, options, self.velocities)
        self.clip, self.clip_norm = self.dgc.clip or self.clip_norm, None
        momenta = ", ".join(
            f"{momentum:g}"
            for momentum in sorted({self.momentum.get_momentum(name)[0] for name in named})
        )
        log.write_choice(
            "momentum",
            momenta,
            "taken from the optimizer with its weight decay; in its own steps the optimizer uses 0"
            if self.momentum.fixed_momentum is None
            else "as asked",
        )
        if self.clip is not None:
            log.write_choice(
                "clip",
                f"{self.clip:g}",
                "of each rank's part, times the square root of its share of the batch",
            )
        self.is_settled = False

    # ---- in a step ---------------------------------------------------------------------------
    def average(self, weight: float) -> None:
        adapted = self.dgc.adapt_to_epoch(self.epoch)
        if adapted != self.compression.compressor and self.dgc.warmup:
            self.log.write_choice(
                "ratio",
                f"{adapted.ratio:.3g}",
                f"from epoch {self.epoch} on, of {self.dgc.warmup} warm-up epochs",
            )
        super().average(weight)

    def _compute_scale(self, scale: float) -> float:
        if self.clip is None:
            return scale
        gradients = {name: each.grad for name, each in self.trained.items()}
        if self.layout.is_partitioned:
            norm = math.sqrt(sum(each**2 for each in self.layout.compute_norms(gradients).values()))
        else:
            norm = float(
                nn.utils.get_total_norm([each for each in gradients.values() if each is not None])
            )
        if not math.isfinite(norm):
            raise StepFailed(
                "the norm of this rank's gradient, by which it is clipped, is not finite; lower "
                "the rate"
            )
        return scale * min(1.0, self.clip * math.sqrt(self.weight_share) / (norm * scale + 1e-6))

    def _set_gradients(self, means: dict[str, Tensor]) -> None:
        super()._set_gradients(means)
        for name in means:
            parameter = self.trained[name]
            assert parameter.grad is not None
            self.momentum.last_given_steps[parameter] = self.momentum.started_steps
            parameter.grad = self.momentum.compute_update(
                name, parameter.grad, is_small=name in self.small_names
            )
            if name in self.unsent_values:
                parameter.grad += reshape_and_cast_like(self.unsent_values.pop(name), parameter).to(
                    parameter.device
                )

    # ---- checkpoints -------------------------------------------------------------------------
    def _restore_feedback(self, restored: OptimizerState) -> None:
        """Load residuals and momentum.

        Momentum in a checkpoint of another strategy is that of all ranks together.
        """
        super()._restore_feedback(restored)
        self.saved_names = (*self.saved_names, DECAYED)
        # tensors that were not small in the checkpoint: their unsent values of all ranks together
        unsent = {name: load_residual(restored, name, UNSENT, 0, 1) for name in self.small_names}
        self.unsent_values = {name: each for name, each in unsent.items() if each is not None}
        decayed = {name: values[DECAYED] for name, values in restored.items() if DECAYED in values}
        self.momentum.adopt_buffers(self.velocities, self.small_names, self.world.size, decayed)

    def gather_optimizer_state(self) -> OptimizerState:
        """Return the state of the optimizer, with the momentum that it would have by itself.
        Collective.
        """
        if self.is_settled:
            return super().gather_optimizer_state()
        state = super().gather_optimizer_state()
        total = dict(self.momentum.dense_buffers)
        for name, velocity in self.velocities.velocity.items():
            summed = reshape_and_cast_like(self.world.all_reduce(velocity), self.trained[name])
            total[name] = summed + total[name] if name in total else summed
        return {
            **state,
            **{
                name: {**state.get(name, {}), **values}
                for name, values in make_momentum_state(total).items()
            },
        }

    def _collect_own_state(self) -> dict[str, dict[str, Tensor]]:
        residuals = super()._collect_own_state()
        # unsent values are those of all ranks together, so only rank 0 saves them
        return (
            residuals
            if self.world.rank
            else {**residuals, UNSENT: {**residuals[UNSENT], **self.unsent_values}}
        )

    def collect_saved_tensors(self) -> OptimizerState:
        saved = super().collect_saved_tensors()
        for name, each in self.momentum.dense_buffers.items():
            if name not in self.small_names and self.world.rank == 0:
                saved.setdefault(name, {})[DECAYED] = each
        return saved

    def adopt_effective_weights(self) -> None:
        for name, state in self.gather_optimizer_state().items():
            if name in self.trained:
                load_parameter_state(self.optimizer, self.trained[name], state)
        self.momentum.release_optimizer()
        self.is_settled = True

    def close(self) -> None:
        self.momentum.release_optimizer()
        super().close()
