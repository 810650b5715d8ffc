"""Unusual models that `test_pipeline_training.py` divides into stages.

Their inputs are those of VECTORS in the equality table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Skipping(nn.Module):
    """A model with a parameter of its own and with skips over several layers.

    It writes into a new tensor in place, and adds a value of an early layer to its output.
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
    """A model that calls one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.layer(x))
        return self.out(x)


class Checkpointed(nn.Module):
    """A model that checkpoints activations across a possible cut, in one of torch's two ways."""

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
    """A model whose blocks recompute dropout in backward, which begins with the last block.

    Earlier, each recomputed draw was taken for the draw of the first block.
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
    """A model in which input values decide shapes at the cut and, by torch.equal, the path.

    Earlier, a plan was kept and used for other values.
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
    """A model that calls one head on large and on small inputs.

    Earlier, the head became one unit because of the small inputs, and then it was traced as one
    unit with all inputs.
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
    """A model with a module that requires the gradient of its input, as wav2vec 2.0's encoder.

    Earlier, when the module was timed alone, its input was not a leaf tensor.
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
    """A model whose units take and return dicts, tuples and None."""

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
    """A model that calls one more layer for some batches."""

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
    """A model with two counting buffers: it changes one in place, and replaces the other.

    Both parts of the divided model read them.
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
    """A model that changes its input in place, three times.

    It does so before its first module, between two modules, and with the output of a module.
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
    """A model whose modules pass tensors in a dataclass of the model."""

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
    """Reverses the gradient in backward (Ganin, Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Adversarial(nn.Module):
    """A model that applies an autograd function of its own to a tensor of an earlier part."""

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
    """A model that uses outputs which forward hooks of its modules record.

    transformers does the same with the logits of routers.
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
    """A model that makes tensors and calls modules inside a torch mode, `torch.device`."""

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
    """A model with mixtures of experts, in which values decide how many samples an expert gets."""

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
    """A model that registers hooks in its first forward, and multiplies by recorded outputs.

    Each hooked layer is inside a small block.
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
    """A model in which two tensors cross a cut, as with the skips of resnet18.

    One is saved for a backward before the other is changed in place.
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
    """A model in which complex numbers cross the cut.

    Their gradients are zero in the first step, so the first-step check proves nothing about them.
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
