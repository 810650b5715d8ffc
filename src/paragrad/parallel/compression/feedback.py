"""What is kept of a gradient until it is sent: by the parameter's serial name, flat, in float32
or finer.

A rank's part of the mean gradient (its sum, over the global weight) is added to what it did not
send before; what a codec sends of that is taken out. So over all ranks and steps the sum of
what was sent and of what is kept is the sum of all mean gradients:

    sum over ranks of kept(T) = sum over steps up to T of the mean gradient - sum of what was
    applied

which is why another number of ranks goes on with that sum, divided among them alike. Deep
gradient compression accumulates velocities in the place of gradients (Lin et al. 2018, arXiv
1712.01887, section 3.1): were the momentum applied to the sparse updates, what waited would
have missed the momentum of the steps for which it waited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paragrad.engine.layout import OptimizerState
from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.parallel.compression.codec import Codec, Payload
from paragrad.parallel.compression.sparse import SparseCodec

# by which names a checkpoint has them, of each rank. What waits of gradients the momentum is
# still to come to; what waits of velocities has it: neither goes on as the other
RESIDUAL = "residual"
UNSENT = "unsent"
VELOCITY = "velocity"


class NoFeedback:
    """Nothing is kept: a vector is the gradient itself."""

    saved_names: tuple[str, ...] = ()

    def compensate_gradient(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        """The vector to be compressed, of this rank's part of the mean gradient: `scale` times
        its sum.
        """
        flat = flatten_real(gradient)
        return flat.to(get_accumulation_dtype(flat.dtype)) * scale

    def note_sent(
        self, name: str, codec: Codec, payload: Payload, agreement: Tensor | None
    ) -> None:
        """Of the vector that was given last this was sent."""

    def collect_residuals(self) -> dict[str, dict[str, Tensor]]:
        """By what it is, and of which parameter."""
        return {}

    @property
    def nbytes(self) -> int:
        return sum(
            each.nbytes for values in self.collect_residuals().values() for each in values.values()
        )


class ErrorFeedback(NoFeedback):
    """What was not sent is added to the next gradient (Seide et al. 2014; Karimireddy et al.
    2019, arXiv 1901.09847).
    """

    saved_names: tuple[str, ...] = (RESIDUAL,)

    def __init__(self) -> None:
        self.residual: dict[str, Tensor] = {}

    def compensate_gradient(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        flat = flatten_real(gradient)
        return ensure_buffer(self.residual, name, flat).add_(flat, alpha=scale)

    def note_sent(
        self, name: str, codec: Codec, payload: Payload, agreement: Tensor | None
    ) -> None:
        codec.remove_sent(payload, self.residual[name], agreement)

    def collect_residuals(self) -> dict[str, dict[str, Tensor]]:
        return {RESIDUAL: self.residual}


class MomentumCorrection(ErrorFeedback):
    """Momentum correction and factor masking: u <- m u + g, v <- v + u (Nesterov's: v + m u +
    g); of v the largest are sent, and there v and u are 0. momentum: (m, is it Nesterov's?) of
    a parameter;  masking: without it u stays.
    """

    saved_names: tuple[str, ...] = (UNSENT, VELOCITY)

    def __init__(
        self, get_momentum: Callable[[str], tuple[float, bool]], masking: bool = True
    ) -> None:
        super().__init__()
        self.get_momentum = get_momentum
        self.masking = masking
        self.velocity = dict[str, Tensor]()

    def compensate_gradient(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        momentum, nesterov = self.get_momentum(name)
        flat = flatten_real(gradient)
        residual = self.residual
        if not momentum:  # SGD leaves its buffer as it is, too
            return super().compensate_gradient(name, gradient, scale)
        velocity = ensure_buffer(self.velocity, name, flat).mul_(momentum).add_(flat, alpha=scale)
        if not nesterov:
            return ensure_buffer(residual, name, flat).add_(velocity)
        return (
            ensure_buffer(residual, name, flat)
            .add_(velocity, alpha=momentum)
            .add_(flat, alpha=scale)
        )

    def note_sent(
        self, name: str, codec: Codec, payload: Payload, agreement: Tensor | None
    ) -> None:
        super().note_sent(name, codec, payload, agreement)
        assert isinstance(codec, SparseCodec)
        if self.masking and name in self.velocity:
            codec.remove_sent(payload, self.velocity[name])

    def collect_residuals(self) -> dict[str, dict[str, Tensor]]:
        return {UNSENT: self.residual, VELOCITY: self.velocity}


def flatten_real(tensor: Tensor) -> Tensor:
    """In a row; complex numbers as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def reshape_like(flat: Tensor, like: Tensor) -> Tensor:
    """The inverse: a view of it in the shape of another tensor."""
    return (
        torch.view_as_complex(flat.view(*like.shape, 2))
        if like.is_complex()
        else flat.view(like.shape)
    )


def reshape_and_cast_like(flat: Tensor, like: Tensor) -> Tensor:
    """The same in the type of another tensor, too."""
    return reshape_like(flat, like).to(like.dtype)


def ensure_buffer(buffers: dict[str, Tensor], name: str, flat: Tensor) -> Tensor:
    """What is kept of a parameter; nothing, at first."""
    if name not in buffers:
        buffers[name] = torch.zeros(
            flat.numel(), dtype=get_accumulation_dtype(flat.dtype), device=flat.device
        )
    return buffers[name]


def make_residual_key(kind: str, rank: int) -> str:
    """By which name a checkpoint holds it of a rank."""
    return f"{kind} of {rank}"


def load_residual(
    restored: OptimizerState, name: str, kind: str, rank: int, ranks: int
) -> Tensor | None:
    """What that rank goes on with, of what a checkpoint holds of a parameter of any number of
    ranks: its own where these are as many, otherwise an equal part of the sum. None where there
    is nothing.
    """
    found: list[Tensor] = []
    values: Mapping[str, Tensor] = restored.get(name, {})
    while (key := make_residual_key(kind, len(found))) in values:
        found.append(values[key])
    if not found:
        return None
    return found[rank].clone() if len(found) == ranks else sum(found[1:], found[0].clone()) / ranks
