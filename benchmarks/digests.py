"""Digests of trained parameters. They show whether a change of the code changed any training.

Trains 20 small jobs under eight strategies, and the job of `make demo` under the strategies that it
compares. Each rank has one thread, and the all-reduce is named. Prints one SHA-256 digest per
training.

usage: python benchmarks/digests.py [--json FILE] [--compare FILE] [--jobs NAME ...]

--json FILE     write the digests to FILE
--compare FILE  exit with 1 if a digest differs from the one in FILE, which another commit wrote on
this machine
--jobs NAME     train these jobs only

Only public names of paragrad are used, so that the same script runs on older and newer commits:
`PYTHONPATH=OTHER_CHECKOUT/src python benchmarks/digests.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paragrad as pg

STRATEGIES = (
    "serial(threads=1)",
    "data(2, reduce=ring)",
    "data(2, state=shared_memory)",
    "data(2, state=fully_sharded)",
    "pipeline(2, micro=4)",
    "tensor(2)",
    "server(2)",
    "data(2, compress=top_k(0.1))",
)
DEMO = (
    "serial(threads=1)",
    "data(2, reduce=ring)",
    "data(2, reduce=tree)",
    "data(2, reduce=native)",
)


def random_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_classes(count: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


VECTORS = TensorDataset(random_numbers(96, 10, seed=1), random_classes(4, 96, seed=2))
IMAGES = TensorDataset(random_numbers(64, 3, 12, 12, seed=3), random_classes(4, 64, seed=4))
TOKENS = TensorDataset(random_classes(11, 64, 8, seed=5), random_classes(11, 64, 8, seed=6))


def build_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def build_deep() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(10, 12)]
    for _ in range(4):
        layers += [nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 12)]
    return nn.Sequential(*layers, nn.Linear(12, 4))


def build_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 16),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Dropout(0.1),
        nn.Linear(16, 4),
    )


def build_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 4),
    )


def build_normed_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 4),
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, 3, padding=1)
        self.outer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(functional.relu(self.inner(x)))


def build_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        Residual(6),
        nn.ReLU(),
        Residual(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


class TiedLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.out(hidden).transpose(1, 2)


class Gpt(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.positions = nn.Parameter(torch.zeros(8, 16))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.projection = nn.Linear(16, 16)
        self.second = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.dropout(
            self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        )
        return x + self.dropout(self.mlp(self.second(x)))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(10, 8), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(10, 8), nn.ReLU())
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.left(x), self.right(x)], 1))


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(10, 3)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.frozen(x)))


def use_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def use_plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def use_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def use_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


# older commits do not have this field; there a scheduler always counts steps
COUNTS_STEPS = (
    {"scheduler_every": "step"} if "scheduler_every" in pg.Job.__dataclass_fields__ else {}
)


def halve_rate(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


def sum_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(output, target, reduction="sum"), torch.tensor(target.numel())


def make_job(
    name: str, model: Callable[[], nn.Module], data: TensorDataset, **changes: Any
) -> pg.Job:
    settings = {
        "loss": functional.cross_entropy,
        "optimizer": use_plain_sgd,
        "batch": 12,
        "epochs": 2,
        "seed": 5,
    }
    return pg.Job(name=name, model=model, train=data, **{**settings, **changes})


JOBS = {
    job.name: job
    for job in (
        make_job("mlp", build_mlp, VECTORS),
        make_job("mlp-momentum-clipped", build_mlp, VECTORS, optimizer=use_momentum, clip_norm=0.1),
        make_job(
            "mlp-adam-scheduled",
            build_mlp,
            VECTORS,
            optimizer=use_adam,
            scheduler=halve_rate,
            **COUNTS_STEPS,
        ),
        make_job("mlp-float64", build_mlp, VECTORS, dtype=torch.float64),
        make_job("mlp-bfloat16", build_mlp, VECTORS, dtype=torch.bfloat16),
        make_job("mlp-short-batch", build_mlp, VECTORS, batch=36, optimizer=use_momentum),
        make_job(
            "mlp-weighted",
            build_mlp,
            VECTORS,
            loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5, 2.0])),
        ),
        make_job("deep-adamw", build_deep, VECTORS, optimizer=use_adamw),
        make_job("dropout", build_dropout, VECTORS),
        make_job("partly-used", PartlyUsed, VECTORS),
        make_job("branches", Branches, VECTORS, optimizer=use_momentum),
        make_job("cnn", build_cnn, IMAGES),
        make_job("cnn-momentum", build_cnn, IMAGES, optimizer=use_momentum),
        make_job("cnn-batch-norm", build_normed_cnn, IMAGES),
        make_job("cnn-batch-norm-adam", build_normed_cnn, IMAGES, optimizer=use_adam),
        make_job("resnet", build_resnet, IMAGES),
        make_job("lstm-tied", TiedLstm, TOKENS),
        make_job("lstm-tied-pair", TiedLstm, TOKENS, loss=sum_tokens, clip_norm=0.5),
        make_job("gpt", Gpt, TOKENS, optimizer=use_adam),
        make_job("gpt-dropout", lambda: Gpt(0.1), TOKENS, optimizer=use_adamw, clip_norm=1.0),
    )
}


def compute_digest(folder: Path) -> str:
    """Return the SHA-256 of names, types and bytes of the trained model, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_digest(job: pg.Job, strategy: str) -> str:
    """Train, and return the digest; or "refused", or "failed" and the type of the error."""
    with tempfile.TemporaryDirectory() as runs:
        try:
            return compute_digest(Path(pg.train(job, strategy, runs=runs).folder))
        except pg.Refused:
            return "refused"
        except pg.RankFailed as error:
            return f"failed: {type(error).__name__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--jobs", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    expected = json.loads(options.compare.read_text()) if options.compare else {}
    pairs = [(job, strategy) for job in JOBS.values() for strategy in STRATEGIES]
    pairs += [(pg.job("digits"), strategy) for strategy in DEMO]
    found: dict[str, str] = {}
    different = []
    for job, strategy in pairs:
        if options.jobs and job.name not in options.jobs:
            continue
        name = f"{job.name} {strategy}"
        found[name] = train_digest(job, strategy)
        mark = ""
        if options.compare:
            mark = (
                "  equal"
                if expected.get(name) == found[name]
                else f"  DIFFERS from {expected.get(name)}"
            )
            different += [name] if "DIFFERS" in mark else []
        print(f"{found[name][:16]}  {name}{mark}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{len(found)} trainings, {len(different)} differ"
        if options.compare
        else f"{len(found)} trainings"
    )
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
