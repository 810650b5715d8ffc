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

from paragrad.engine.exchange import How, Replica
from paragrad.engine.layout import State
from paragrad.engine.optimizer.optimizer_state import taken
from paragrad.errors import StepFailed
from paragrad.parallel.compression.feedback import UNSENT, shaped, shared_out
from paragrad.parallel.compression.momentum import buffers, momentum_of
from paragrad.parallel.data.compressed_exchange import Compressed
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.compressors import Dgc
from paragrad.strategies.data import Data

# by which name a checkpoint has what decay made, of tensors that are compressed
DECAYED = "decayed"


class Deep(Compressed):
    """`average` leaves what the optimizer steps by: of small tensors all of it, of others what
    was sent of it, and decay.
    """

    def __init__(self, strategy: Data, replica: Replica, world: World, log: Log, how: How) -> None:
        assert isinstance(strategy.compress, Dgc)
        self.dgc = strategy.compress
        named = {
            name: each
            for name, each in replica.module.model.named_parameters()
            if each.requires_grad
        }
        momentum = momentum_of(self.dgc, replica.optimizer, named)
        assert momentum is not None
        self.momentum = momentum
        self.velocities = momentum.corrected()
        super().__init__(strategy, replica, world, log, how, self.velocities)
        self.clip, self.clip_norm = self.dgc.clip or self.clip_norm, None
        told = ", ".join(
            f"{momentum:g}" for momentum in sorted({self.momentum.of(name)[0] for name in named})
        )
        log.choice(
            "momentum",
            told,
            "taken over from the optimizer, whose own is 0 within its steps, with its weight decay"
            if self.momentum.own is None
            else "as asked",
        )
        if self.clip is not None:
            log.choice(
                "clip",
                f"{self.clip:g}",
                "of each rank's part: times the root of its share of the batch",
            )
        self.over = False

    # ---- in a step ---------------------------------------------------------------------------
    def average(self, weight: float) -> None:
        now = self.dgc.in_epoch(self.epoch)
        if now != self.compression.compressor and self.dgc.warmup:
            self.log.choice(
                "ratio",
                f"{now.ratio:.3g}",
                f"from epoch {self.epoch} on, of {self.dgc.warmup} that warm up",
            )
        super().average(weight)

    def _scaled(self, scale: float) -> float:
        if self.clip is None:
            return scale
        gradients = {name: each.grad for name, each in self.trained.items()}
        if self.layout.cut:
            norm = math.sqrt(sum(each**2 for each in self.layout.norms(gradients).values()))
        else:
            norm = float(
                nn.utils.get_total_norm([each for each in gradients.values() if each is not None])
            )
        if not math.isfinite(norm):
            raise StepFailed(
                "the norm of this rank's gradient, by which it is clipped, is not finite; lower "
                "the rate"
            )
        return scale * min(1.0, self.clip * math.sqrt(self.share) / (norm * scale + 1e-6))

    def _take(self, means: dict[str, Tensor]) -> None:
        super()._take(means)
        for name in means:
            parameter = self.trained[name]
            assert parameter.grad is not None
            self.momentum.given[parameter] = self.momentum.steps
            parameter.grad = self.momentum.moved(name, parameter.grad, small=name in self.small)
            if name in self.unsent:
                parameter.grad += shaped(self.unsent.pop(name), parameter).to(parameter.device)

    # ---- what is kept ------------------------------------------------------------------------
    def _restore(self, restored: State) -> None:
        """What a checkpoint of another strategy has of momentum, is of all ranks."""
        super()._restore(restored)
        self.keeps = (*self.keeps, DECAYED)
        # which were not small there: of all
        found = {name: shared_out(restored, name, UNSENT, 0, 1) for name in self.small}
        self.unsent = {name: each for name, each in found.items() if each is not None}
        decayed = {name: values[DECAYED] for name, values in restored.items() if DECAYED in values}
        self.momentum.goes_on(self.velocities, self.small, self.world.size, decayed)

    def state(self) -> State:
        """The optimizer's, with the momentum that it would have."""
        if self.over:
            return super().state()
        found = super().state()
        total = dict(self.momentum.dense)
        for name, velocity in self.velocities.velocity.items():
            summed = shaped(self.world.all_reduced(velocity), self.trained[name])
            total[name] = summed + total[name] if name in total else summed
        return {
            **found,
            **{name: {**found.get(name, {}), **values} for name, values in buffers(total).items()},
        }

    def _own(self) -> dict[str, dict[str, Tensor]]:
        found = super()._own()
        # which is of all
        return found if self.world.rank else {**found, UNSENT: {**found[UNSENT], **self.unsent}}

    def kept(self) -> State:
        found = super().kept()
        for name, each in self.momentum.dense.items():
            if name not in self.small and self.world.rank == 0:
                found.setdefault(name, {})[DECAYED] = each
        return found

    def settle(self) -> None:
        for name, state in self.state().items():
            if name in self.trained:
                taken(self.optimizer, self.trained[name], state)
        self.momentum.give_back()
        self.over = True

    def close(self) -> None:
        self.momentum.give_back()
        super().close()
