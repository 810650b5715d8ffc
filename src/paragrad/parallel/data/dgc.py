"""Deep gradient compression (Lin et al. 2018, arXiv 1712.01887): velocities are accumulated,
and the largest of what came together are sent. The momentum, the decay and the clipping of a
training are here, and nowhere else.

* momentum correction and factor masking: `feedback.Corrected`; whose momentum it is:
`momentum.py`.
* clipping comes before accumulation, on each rank: the norm of its part of the mean gradient is
at most that of all, times the
  root of its share of the batch (of n equal ones, over the root of n), for parts of independent
  samples add up so.
* warm-up: what is sent of an epoch is more than of the next one (`Dgc.in_epoch`).
* small tensors are sent whole, and keep the momentum of SGD, unmasked. Weight decay is dense
and never sent: every rank has the
  weights. Inside of the accumulation it would wait there as a gradient does.
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

# by which name a checkpoint has what decay made, of tensors that are compressed
DECAYED = "decayed"


class DgcExchange(CompressedExchange):
    """`average` leaves what the optimizer steps by: of small tensors all of it, of others what
    was sent of it, and decay.
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
        told = ", ".join(
            f"{momentum:g}"
            for momentum in sorted({self.momentum.get_momentum(name)[0] for name in named})
        )
        log.write_choice(
            "momentum",
            told,
            "taken over from the optimizer, whose own is 0 within its steps, with its weight decay"
            if self.momentum.fixed_momentum is None
            else "as asked",
        )
        if self.clip is not None:
            log.write_choice(
                "clip",
                f"{self.clip:g}",
                "of each rank's part: times the root of its share of the batch",
            )
        self.is_settled = False

    # ---- in a step ---------------------------------------------------------------------------
    def average(self, weight: float) -> None:
        now = self.dgc.adapt_to_epoch(self.epoch)
        if now != self.compression.compressor and self.dgc.warmup:
            self.log.write_choice(
                "ratio",
                f"{now.ratio:.3g}",
                f"from epoch {self.epoch} on, of {self.dgc.warmup} that warm up",
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

    # ---- what is kept ------------------------------------------------------------------------
    def _restore_feedback(self, restored: OptimizerState) -> None:
        """What a checkpoint of another strategy has of momentum, is of all ranks."""
        super()._restore_feedback(restored)
        self.saved_names = (*self.saved_names, DECAYED)
        # which were not small there: of all
        found = {name: load_residual(restored, name, UNSENT, 0, 1) for name in self.small_names}
        self.unsent_values = {name: each for name, each in found.items() if each is not None}
        decayed = {name: values[DECAYED] for name, values in restored.items() if DECAYED in values}
        self.momentum.adopt_buffers(self.velocities, self.small_names, self.world.size, decayed)

    def gather_optimizer_state(self) -> OptimizerState:
        """The optimizer's, with the momentum that it would have."""
        if self.is_settled:
            return super().gather_optimizer_state()
        found = super().gather_optimizer_state()
        total = dict(self.momentum.dense_buffers)
        for name, velocity in self.velocities.velocity.items():
            summed = reshape_and_cast_like(self.world.all_reduce(velocity), self.trained[name])
            total[name] = summed + total[name] if name in total else summed
        return {
            **found,
            **{
                name: {**found.get(name, {}), **values}
                for name, values in make_momentum_state(total).items()
            },
        }

    def _collect_own_state(self) -> dict[str, dict[str, Tensor]]:
        found = super()._collect_own_state()
        # which is of all
        return (
            found if self.world.rank else {**found, UNSENT: {**found[UNSENT], **self.unsent_values}}
        )

    def collect_saved_tensors(self) -> OptimizerState:
        found = super().collect_saved_tensors()
        for name, each in self.momentum.dense_buffers.items():
            if name not in self.small_names and self.world.rank == 0:
                found.setdefault(name, {})[DECAYED] = each
        return found

    def adopt_effective_weights(self) -> None:
        for name, state in self.gather_optimizer_state().items():
            if name in self.trained:
                load_parameter_state(self.optimizer, self.trained[name], state)
        self.momentum.release_optimizer()
        self.is_settled = True

    def close(self) -> None:
        self.momentum.release_optimizer()
        super().close()
