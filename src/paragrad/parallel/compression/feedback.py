"""What is kept of a gradient until it is sent: by serial parameter name, flat, in float32 or finer.

Error feedback: what a codec does not send is added to the next gradient. This is momentum
correction: an entry that waits keeps its momentum. Factor masking sets the velocity of an entry
to zero when the entry is sent.

The part of a rank in the mean gradient is its sum over the global weight. It is added to what the
rank did not send before. What a codec sends is then removed. So over all ranks and steps, what was
sent and what is kept add up to all mean gradients:

    sum over ranks of kept(T) = sum over steps up to T of (mean gradient - what was applied)

This is why another number of ranks continues with that sum, divided equally among them.

Deep gradient compression accumulates velocities instead of gradients (Lin et al. 2018, arXiv
1712.01887, section 3.1). If momentum were applied to the sparse updates, a value that waits would
miss the momentum of the steps in which it waited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paragrad.engine.layout import OptimizerState
from paragrad.engine.state.values import get_accumulation_dtype
from paragrad.parallel.compression.codec import Codec, Payload
from paragrad.parallel.compression.sparse import SparseCodec

# Names in a checkpoint, for each rank. To a gradient that waits, momentum is not applied yet; a
# velocity that waits contains it. So neither can continue as the other.
RESIDUAL = "residual"
UNSENT = "unsent"
VELOCITY = "velocity"


class NoFeedback:
    """Keeps nothing: a vector is the gradient itself.

    Attributes:
        saved_names: Names under which a checkpoint saves what is kept.
    """

    saved_names: tuple[str, ...] = ()

    def compensate_gradient(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        """Return the vector to compress.

        Args:
            name: Name of the tensor.
            gradient: The summed gradient of this rank.
            scale: Factor from this gradient to the part of this rank in the mean gradient.

        Returns:
            A flat vector: the part of the mean, plus what waits.
        """
        flat = flatten_real(gradient)
        return flat.to(get_accumulation_dtype(flat.dtype)) * scale

    def note_sent(
        self, name: str, codec: Codec, payload: Payload, agreement: Tensor | None
    ) -> None:
        """Remove what was sent from the vector that `compensate_gradient` returned last.

        Args:
            name: Name of the tensor.
            codec: Its codec.
            payload: What was sent.
            agreement: What all ranks agreed on, or None.
        """

    def collect_residuals(self) -> dict[str, dict[str, Tensor]]:
        """Return what is kept, by kind and by parameter name."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(
            each.nbytes for values in self.collect_residuals().values() for each in values.values()
        )


class ErrorFeedback(NoFeedback):
    """Adds what was not sent to the next gradient.

    Sources: Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847.

    Attributes:
        residual: What was not sent, by tensor name.
    """

    saved_names: tuple[str, ...] = (RESIDUAL,)

    def __init__(self) -> None:
        self.residual: dict[str, Tensor] = {}

    def compensate_gradient(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        """Add the gradient to what was not sent, and return the sum.

        Args:
            name: Name of the tensor.
            gradient: The summed gradient of this rank.
            scale: Factor from this gradient to the part of this rank in the mean gradient.
        """
        flat = flatten_real(gradient)
        return ensure_buffer(self.residual, name, flat).add_(flat, alpha=scale)

    def note_sent(
        self, name: str, codec: Codec, payload: Payload, agreement: Tensor | None
    ) -> None:
        """Remove what was sent from what is kept.

        Args:
            name: Name of the tensor.
            codec: Its codec.
            payload: What was sent.
            agreement: What all ranks agreed on, or None.
        """
        codec.remove_sent(payload, self.residual[name], agreement)

    def collect_residuals(self) -> dict[str, dict[str, Tensor]]:
        """Return what was not sent."""
        return {RESIDUAL: self.residual}


class MomentumCorrection(ErrorFeedback):
    """Momentum correction and factor masking of deep gradient compression.

    u <- m u + g, v <- v + u (Nesterov's: v + m u + g). The largest entries of v are sent, and there
    v and u become 0.

    Args:
        get_momentum: Returns (m, whether it is Nesterov's momentum) for a parameter name.
        masking: Factor masking; without it u stays.

    Attributes:
        velocity: The velocities u, by tensor name.
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
        """Update velocity and accumulated velocity by the gradient, and return the latter.

        Args:
            name: Name of the tensor.
            gradient: The summed gradient of this rank.
            scale: Factor from this gradient to the part of this rank in the mean gradient.
        """
        momentum, nesterov = self.get_momentum(name)
        flat = flatten_real(gradient)
        residual = self.residual
        if not momentum:  # SGD also leaves its buffer unchanged then
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
        """Remove what was sent from the accumulated velocity, and with masking from the velocity.

        Args:
            name: Name of the tensor.
            codec: Its codec, which sends entries.
            payload: What was sent.
            agreement: What all ranks agreed on, or None.
        """
        super().note_sent(name, codec, payload, agreement)
        assert isinstance(codec, SparseCodec)
        if self.masking and name in self.velocity:
            codec.remove_sent(payload, self.velocity[name])

    def collect_residuals(self) -> dict[str, dict[str, Tensor]]:
        """Return the accumulated velocities and the velocities."""
        return {UNSENT: self.residual, VELOCITY: self.velocity}


def flatten_real(tensor: Tensor) -> Tensor:
    """Flatten a tensor; complex numbers become pairs of real numbers.

    Args:
        tensor: The tensor.
    """
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def reshape_like(flat: Tensor, like: Tensor) -> Tensor:
    """Invert `flatten_real`: view a flat tensor in the shape of another one.

    Args:
        flat: The flat tensor.
        like: The tensor with the shape; it may be complex.
    """
    return (
        torch.view_as_complex(flat.view(*like.shape, 2))
        if like.is_complex()
        else flat.view(like.shape)
    )


def reshape_and_cast_like(flat: Tensor, like: Tensor) -> Tensor:
    """Invert `flatten_real`, and convert to the type of the other tensor.

    Args:
        flat: The flat tensor.
        like: The tensor with the shape and the type.
    """
    return reshape_like(flat, like).to(like.dtype)


def ensure_buffer(buffers: dict[str, Tensor], name: str, flat: Tensor) -> Tensor:
    """Return what is kept of a parameter; the first time, create it with zeros.

    Args:
        buffers: What is kept, by name.
        name: Name of the parameter.
        flat: A flat tensor with the length, the device, and the type of the parameter.
    """
    if name not in buffers:
        buffers[name] = torch.zeros(
            flat.numel(), dtype=get_accumulation_dtype(flat.dtype), device=flat.device
        )
    return buffers[name]


def make_residual_key(kind: str, rank: int) -> str:
    """Return the name under which a checkpoint saves what a rank keeps.

    Args:
        kind: What is kept.
        rank: The rank.
    """
    return f"{kind} of {rank}"


def load_residual(
    restored: OptimizerState, name: str, kind: str, rank: int, ranks: int
) -> Tensor | None:
    """Return what a rank continues with, from a checkpoint of any number of ranks.

    Args:
        restored: What the checkpoint holds.
        name: Name of the parameter.
        kind: What is kept.
        rank: This rank.
        ranks: The present number of ranks.

    Returns:
        The rank's own tensor if the number of ranks is the same, otherwise an equal part of the
        sum. None if the checkpoint holds nothing.
    """
    saved: list[Tensor] = []
    values: Mapping[str, Tensor] = restored.get(name, {})
    while (key := make_residual_key(kind, len(saved))) in values:
        saved.append(values[key])
    if not saved:
        return None
    return saved[rank].clone() if len(saved) == ranks else sum(saved[1:], saved[0].clone()) / ranks
