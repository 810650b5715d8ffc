"""Models of odd ways, to be cut in parts (`test_pipeline_training.py`): they take their inputs
as the equality table's VECTORS are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Skipping(nn.Module):
    """A parameter of its own, skips over several layers, a buffer written in place, a value of
    an early layer in the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x) * self.scale
        hidden = first
        for layer in self.layers[1:]:
            hidden = hidden + torch.tanh(layer(hidden))
        marked = torch.zeros_like(x)
        marked[:, 1:] = first[:, 1:]
        hidden += marked * self.scale
        return self.out(hidden) + first.mean(1, keepdim=True)


class Shared(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.layer(x))
        return self.out(x)


class Checkpointed(nn.Module):
    """Checkpoints by itself, across what may be a cut, in both ways that torch has."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.reentrant = reentrant
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(
            lambda h: self.layers[2](torch.tanh(self.layers[1](h))), x, use_reentrant=self.reentrant
        )
        return self.out(self.layers[3](x))


class DrawsAgain(nn.Module):
    """Blocks recompute what they drop, and backward begins with the last: each was taken for
    the first one's draw.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(10, 10)
            self.second = nn.Linear(10, 10)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(
                lambda h: self.second(
                    functional.dropout(torch.tanh(self.first(h)), 0.3, self.training)
                ),
                x,
                use_reentrant=False,
            )

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(6)))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(x))


class Unpadded(nn.Module):
    """Values of the inputs decide the shape of what crosses, and by torch.equal the way: a plan
    was kept for other values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        kept = (x[:, 0] > 0).nonzero()[:, 0]
        few = torch.tanh(self.second(hidden[kept]))
        hidden = hidden.index_copy(0, kept, few)
        return self.out(hidden.clone() if torch.equal(x[:, 1] > 0, x[:, 2] > 0) else hidden)


class Pyramid(nn.Module):
    """One head on large and on small inputs: with the small ones it was taken as a whole, and
    watched so with all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.head = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        levels = hidden[:, None] * torch.linspace(0.5, 1.5, 32, dtype=x.dtype)[:, None]
        return self.out(self.head(levels).mean(1) + self.head(hidden))


class InputWithGradient(nn.Module):
    """A module wants the gradient of what it is given (wav2vec 2.0's encoder): as it was timed
    alone its input was no leaf.
    """

    class Encoder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x[:, None]
            if self.training:
                hidden.requires_grad = True
            return super().forward(hidden)[:, 0]

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.Encoder(10, 10)
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.encoder(x)))))


class Nested(nn.Module):
    """Units that take and give dicts, tuples and None."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 10)

        def forward(
            self, state: dict[str, Any], bias: Tensor | None = None
        ) -> tuple[dict[str, Any], None]:
            hidden = torch.tanh(self.layer(state["hidden"]))
            return {
                "hidden": hidden if bias is None else hidden + bias,
                "seen": (*state["seen"], hidden),
            }, None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inner() for _ in range(3))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": x, "seen": ()}
        for number, layer in enumerate(self.layers):
            state, _ = layer(state, bias=x if number == 2 else None)
        return self.out(sum(state["seen"]))


class Sometimes(nn.Module):
    """Another way through the model for other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.second = (nn.Linear(10, 10) for _ in range(3))
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        large = x[:, :1] > 1.5
        if large.any():
            hidden = hidden + large * self.rare(hidden)
        return self.out(torch.tanh(self.second(hidden)))


class SeenSamples(nn.Module):
    """Counts its samples in a buffer, of which it puts another one in the place; both parts
    read it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.steps = self.steps + 1
        return self.out(torch.tanh(self.first(x)) * (1 + 0.01 * self.steps)) / (
            1 + 0.01 * self.seen
        )


class InPlace(nn.Module):
    """Changes its inputs in place: before its first module, between two, and by what comes from
    the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        hidden = torch.tanh(self.first(x.clone()))
        x.add_(1.0)
        hidden = self.second(hidden + x)
        x += hidden
        return self.out(torch.tanh(x))


@dataclass
class State:
    hidden: Tensor
    again: Tensor


torch.export.register_dataclass(State)


class Registered(nn.Module):
    """Tensors go from one module to another in a dataclass of its own."""

    class Begins(nn.Linear):
        def forward(self, x: Tensor) -> State:  # type: ignore[override]
            return State(super().forward(x), x)

    class Ends(nn.Linear):
        def forward(self, state: State) -> Tensor:  # type: ignore[override]
            return super().forward(torch.tanh(state.hidden) + state.again)

    def __init__(self) -> None:
        super().__init__()
        self.begins, self.ends = self.Begins(10, 10), self.Ends(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.ends(self.begins(x)))


class Reverse(torch.autograd.Function):
    """Ganin, Lempitsky 2015: the gradient goes back turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Adversarial(nn.Module):
    """An autograd function of its own on what an earlier part made."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(10, 10)
        self.kinds = nn.Linear(10, 4)
        self.domain = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.features(x))
        kinds = self.kinds(features)
        return kinds + 0.1 * self.domain(Reverse.apply(features, 0.5))


class Noting(nn.Module):
    """Takes what forward hooks note of its modules, as transformers takes the logits of its
    routers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.out = nn.Linear(10, 4)
        self.noted: list[Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(self.note)

    def note(self, _: nn.Module, inputs: Any, out: Tensor) -> None:
        self.noted.append(out)

    def forward(self, x: Tensor) -> Tensor:
        self.noted.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        assert len(self.noted) == 3
        return self.out(x) + sum(each.square().mean(1, keepdim=True) for each in self.noted)


class OnDevice(nn.Module):
    """Makes its tensors, and calls its modules, in a mode of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.device(x.device):
            scale = torch.arange(10, dtype=x.dtype) / 10
            hidden = self.second(torch.tanh(self.first(x)) * scale)
        return self.out(torch.relu(hidden))


class Routed(nn.Module):
    """Experts of which each takes the samples that come to it: how many, values decide."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(10, 3)
            self.experts = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            weight, chosen = self.gate(x).softmax(1).max(1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                places = (chosen == number).nonzero()[:, 0]
                if len(places):
                    out = out.index_add(
                        0, places, weight[places, None] * torch.tanh(expert(x[places]))
                    )
            return out, {"balance": out * 2}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixtures = (
            nn.Linear(10, 10),
            nn.ModuleList(self.Mixture() for _ in range(2)),
        )
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for mixture in self.mixtures:
            hidden, told = mixture(x)
            x = x + hidden + 0.1 * told["balance"]
        return self.out(x)


class Gathering(nn.Module):
    """Registers hooks in its first forward, and multiplies by what layers gave, each inside of
    a small block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3))
        self.large = nn.Linear(10, 400)
        self.out = nn.Linear(400, 4)
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            for block in self.blocks:
                block[1].register_forward_hook(lambda module, inputs, out: self.given.append(out))
            self.hooked = True
        self.given: list[Tensor] = []
        for block in self.blocks:
            x = block(x)
        return self.out(torch.tanh(self.large(x))) * torch.stack(self.given).mean(2).sum(0)[:, None]


class SkipIsRead(nn.Module):
    """Of two tensors that cross a cut one is saved for a backward before the other is changed
    in place: resnet18's skips.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.skip = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        hidden = x * x.mean(1, keepdim=True)
        hidden += self.skip(x)
        return self.out(hidden)


class Spectral(nn.Module):
    """Complex numbers cross the cut, whose gradients are zero in the first step, which proves
    nothing of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.filter, self.mixing = (nn.Linear(6, 6, dtype=torch.complex128) for _ in range(2))
        self.gate = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        spectrum = self.mixing(self.filter(torch.fft.rfft(hidden).to(self.filter.weight.dtype)))
        return self.out(hidden + self.gate * torch.fft.irfft(spectrum, 10))


ODD = {
    "skipping": Skipping,
    "shared": Shared,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "draws again": DrawsAgain,
    "nested": Nested,
    "sometimes": Sometimes,
    "in place": InPlace,
    "dataclass": Registered,
    "autograd function": Adversarial,
    "experts": Routed,
    "on a device": OnDevice,
    "noting": Noting,
    "gathering": Gathering,
    "skip is read": SkipIsRead,
    "spectral": Spectral,
    "input with gradient": InputWithGradient,
    "unpadded": Unpadded,
    "pyramid": Pyramid,
}
