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

from paragrad.engine.layout import State
from paragrad.engine.state.values import wide
from paragrad.parallel.compression.codec import Codec, Payload
from paragrad.parallel.compression.sparse import Sparse

# by which names a checkpoint has them, of each rank. What waits of gradients the momentum is
# still to come to; what waits of velocities has it: neither goes on as the other
RESIDUAL = "residual"
UNSENT = "unsent"
VELOCITY = "velocity"


class Nothing:
    """Nothing is kept: a vector is the gradient itself."""

    names: tuple[str, ...] = ()

    def compensated(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        """The vector to be compressed, of this rank's part of the mean gradient: `scale` times
        its sum.
        """
        flat = real(gradient)
        return flat.to(wide(flat.dtype)) * scale

    def sent(self, name: str, codec: Codec, payload: Payload, agreed: Tensor | None) -> None:
        """Of the vector that was given last this was sent."""

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """By what it is, and of which parameter."""
        return {}

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for values in self.kept().values() for each in values.values())


class Feedback(Nothing):
    """What was not sent is added to the next gradient (Seide et al. 2014; Karimireddy et al.
    2019, arXiv 1901.09847).
    """

    names: tuple[str, ...] = (RESIDUAL,)

    def __init__(self) -> None:
        self.residual: dict[str, Tensor] = {}

    def compensated(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        flat = real(gradient)
        return zeros_at_first(self.residual, name, flat).add_(flat, alpha=scale)

    def sent(self, name: str, codec: Codec, payload: Payload, agreed: Tensor | None) -> None:
        codec.take(payload, self.residual[name], agreed)

    def kept(self) -> dict[str, dict[str, Tensor]]:
        return {RESIDUAL: self.residual}


class Corrected(Feedback):
    """Momentum correction and factor masking: u <- m u + g, v <- v + u (Nesterov's: v + m u +
    g); of v the largest are sent, and there v and u are 0. momentum: (m, is it Nesterov's?) of
    a parameter;  masking: without it u stays.
    """

    names: tuple[str, ...] = (UNSENT, VELOCITY)

    def __init__(self, momentum: Callable[[str], tuple[float, bool]], masking: bool = True) -> None:
        super().__init__()
        self.momentum = momentum
        self.masking = masking
        self.velocity = dict[str, Tensor]()

    def compensated(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        momentum, nesterov = self.momentum(name)
        flat = real(gradient)
        residual = self.residual
        if not momentum:  # SGD leaves its buffer as it is, too
            return super().compensated(name, gradient, scale)
        velocity = zeros_at_first(self.velocity, name, flat).mul_(momentum).add_(flat, alpha=scale)
        if not nesterov:
            return zeros_at_first(residual, name, flat).add_(velocity)
        return (
            zeros_at_first(residual, name, flat)
            .add_(velocity, alpha=momentum)
            .add_(flat, alpha=scale)
        )

    def sent(self, name: str, codec: Codec, payload: Payload, agreed: Tensor | None) -> None:
        super().sent(name, codec, payload, agreed)
        assert isinstance(codec, Sparse)
        if self.masking and name in self.velocity:
            codec.take(payload, self.velocity[name])

    def kept(self) -> dict[str, dict[str, Tensor]]:
        return {UNSENT: self.residual, VELOCITY: self.velocity}


def real(tensor: Tensor) -> Tensor:
    """In a row; complex numbers as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def in_place(flat: Tensor, like: Tensor) -> Tensor:
    """The inverse: a view of it in the shape of another tensor."""
    return (
        torch.view_as_complex(flat.view(*like.shape, 2))
        if like.is_complex()
        else flat.view(like.shape)
    )


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """The same in the type of another tensor, too."""
    return in_place(flat, like).to(like.dtype)


def zeros_at_first(kept: dict[str, Tensor], name: str, flat: Tensor) -> Tensor:
    """What is kept of a parameter; nothing, at first."""
    if name not in kept:
        kept[name] = torch.zeros(flat.numel(), dtype=wide(flat.dtype), device=flat.device)
    return kept[name]


def key_of(what: str, rank: int) -> str:
    """By which name a checkpoint holds it of a rank."""
    return f"{what} of {rank}"


def shared_out(restored: State, name: str, what: str, rank: int, ranks: int) -> Tensor | None:
    """What that rank goes on with, of what a checkpoint holds of a parameter of any number of
    ranks: its own where these are as many, otherwise an equal part of the sum. None where there
    is nothing.
    """
    found: list[Tensor] = []
    values: Mapping[str, Tensor] = restored.get(name, {})
    while (key := key_of(what, len(found))) in values:
        found.append(values[key])
    if not found:
        return None
    return found[rank].clone() if len(found) == ranks else sum(found[1:], found[0].clone()) / ranks
