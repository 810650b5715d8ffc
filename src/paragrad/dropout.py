"""Dropout whose mask does not depend on the layout: a function of (seed, step, call, sample, element).

Every sample draws the same mask whichever rank, share or micro-batch it is in, so dropout under `data(4)` is the dropout of
serial. `torch.nn.functional.dropout` and its one- to three-dimensional forms are replaced while the model's forward runs,
hence nn.Dropout too, wherever it is. Other random draws inside a model (an LSTM's own dropout, rand, bernoulli, ...) come
from torch's generators, which differ by rank: `Watch` finds them, so that the record can say so.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paragrad.errors import StepFailed

# how many dimensions of the tensor a mask covers: all of them, or (sample, channel)
DROPOUTS: dict[Callable[..., Any], int | None] = {
    functional.dropout: None, functional.dropout1d: 2, functional.dropout2d: 2, functional.dropout3d: 2}
NAMED = {function.__name__: (function, dims) for function, dims in DROPOUTS.items()}
RANDOM = {torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like, torch.normal,
          torch.bernoulli, torch.multinomial, torch.randperm, torch.dropout, torch.alpha_dropout, torch.feature_dropout,
          torch.rrelu, Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.exponential_,
          functional.alpha_dropout, functional.feature_alpha_dropout}
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class Keyed(TorchFunctionMode):
    """While active, dropout is keyed: `positions` are the places in the global batch of the samples in this forward.

    Keep it active during backward: gradient checkpointing runs parts of the forward again there, and restores torch's
    generator for it. So every call draws a number, and a number that was drawn before is the same call again. No mode
    reaches into backward; there the functions' names in torch.nn.functional lead here.
    """

    def __init__(self, seed: int, step: int, positions: list[int]) -> None:
        super().__init__()
        self.seed, self.step, self.positions = seed, step, positions or [0]
        self.calls: dict[int, int] = {}         # number drawn -> which call it is

    def __enter__(self) -> Keyed:
        for name, (_, dims) in NAMED.items():
            setattr(functional, name, functools.partial(self.dropout, dims))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, (original, _) in NAMED.items():
            setattr(functional, name, original)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in DROPOUTS:
            return self.dropout(DROPOUTS[function], *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def dropout(self, dims: int | None, input: Tensor, p: float = 0.5, training: bool = True,
                inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        drawn = int(torch.randint(2**62, ()))
        call = self.calls.setdefault(drawn, len(self.calls) + 1)
        covered = input.dim() if dims is None else dims
        shape = torch.Size([*input.shape[:covered], *[1] * (input.dim() - covered)])
        elsewhere = shape[0] != len(self.positions) and input.dim() > 2 and input.shape[1] == len(self.positions)
        if shape[0] % len(self.positions) or elsewhere:
            raise StepFailed(f"dropout got a tensor of shape {tuple(input.shape)} in a batch of {len(self.positions)} "
                             "samples; the batch must be its first dimension, so that each sample has a mask of its own")
        key = random.Random(f"{self.seed} {self.step} {call}").getrandbits(31)
        kept = keep(key, self.positions, shape.numel() // len(self.positions), p, input.device).view(shape)
        scale = kept.to(input.dtype) / (1.0 - p) if p < 1.0 else kept.to(input.dtype)
        return input.mul_(scale) if inplace else input * scale


def keep(key: int, positions: list[int], elements: int, p: float, device: torch.device | None = None) -> Tensor:
    """(samples, elements) of bool: true with probability 1 - p, by a hash of (key, position, element).

    The hash is MurmurHash3's 32-bit finaliser (Appleby 2011, public domain), in wrapping int32 arithmetic.
    """
    rows = _mixed(torch.tensor(positions, dtype=torch.int32, device=device) * -1640531527 + key)       # 2^32 / golden ratio
    hashed = _mixed(rows.view(-1, 1) ^ (torch.arange(elements, dtype=torch.int32, device=device) * -2048144789))
    return hashed >= min(round(p * 2**32) - 2**31, 2**31 - 1)


def _mixed(h: Tensor) -> Tensor:
    h = h ^ (h >> 16 & 0xFFFF)
    h = h * -2048144789                 # 0x85ebca6b
    h = h ^ (h >> 13 & 0x7FFFF)
    h = h * -1028477387                 # 0xc2b2ae35
    return h ^ (h >> 16 & 0xFFFF)


class Watch(TorchFunctionMode):
    """Notes whether dropout is called, and the names of other random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = False
        self.others: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in DROPOUTS:
            self.dropout = True
            return args[0] if args else kwargs["input"]
        recurrent = function in RECURRENT and any(isinstance(value, float) and value > 0 for value in args)
        attention = function is functional.scaled_dot_product_attention and (
            kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0)
        if function in RANDOM or recurrent or attention:
            self.others.add(getattr(function, "__name__", str(function)))
        return function(*args, **kwargs)
