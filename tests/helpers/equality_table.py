"""The equality table: under each strategy, with 1 to 4 workers, each model trains as in serial.

A row is a function from the number of workers to a strategy, and a column is a job. `NOT_EXACT`
has the pairs that do not apply, with the reason. `make test` runs a covering sample, `make table`
runs everything.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, Subset, TensorDataset

from paragrad import Job
from paragrad.datasets.loading import separate_target
from paragrad.launch import Launcher
from paragrad.report.certificate import Difference
from paragrad.report.equivalence.lockstep import COMPARED_STEPS, compare_with_serial
from paragrad.runtime.world import World
from paragrad.strategies import compressors
from paragrad.strategies.registry import resolve_strategy, strategy
from paragrad.strategies.strategy import Environment, Strategy
from paragrad.trainer.trainer import Trainer


def resolve_text(text: str) -> Strategy:
    """Return a strategy as ranks of this host run it.

    It uses shared memory only if its text says so.
    """
    here = Environment(2, backend="shm")
    return resolve_strategy(
        strategy(text),
        replace(here, shared_memory_refusal=None) if "shared_memory" in text else here,
    )


def measure_difference(
    pool: Launcher, row: str, job: Job, steps: int = COMPARED_STEPS
) -> Difference:
    """Return a strategy's difference from serial, on which all ranks must agree."""
    chosen = resolve_text(row)
    asks = functools.partial(compare_with_serial, steps=steps)
    asks = (
        functools.partial(call_with_small_tensors_compressed, asks) if "compress=" in row else asks
    )
    answers = pool.run(asks, job, chosen, size=chosen.size)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]  # type: ignore[no-any-return]


def observe_steps(
    world: World, made: Job, chosen: Strategy, steps: int, look: Callable[[Trainer], Any]
) -> list[Any]:
    """Return what `look` gives for a trainer after each of `steps` steps."""
    trainer = Trainer.build_for_job(world, made, chosen)
    found = []
    try:
        for epoch in range(made.epochs):
            for fetched in trainer.batches(made.train, made.batch, epoch):
                trainer.step(*separate_target(fetched))
                found.append(look(trainer))
                if len(found) == steps:
                    return found
    finally:
        trainer.close()
    raise AssertionError


def call_with_small_tensors_compressed(
    function: Callable[..., Any], world: World, *args: Any, **more: Any
) -> Any:
    """Call a function on a rank while tensors of all sizes are compressed.

    The tensors of these jobs are small, and small tensors are not compressed otherwise.
    """
    before = compressors.MIN_COMPRESSED_ELEMENTS
    compressors.MIN_COMPRESSED_ELEMENTS = 1
    try:
        return function(world, *args, **more)
    finally:
        compressors.MIN_COMPRESSED_ELEMENTS = before


def draw_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_integers(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


# 29 samples in batches of 12: the last batch has 5, which leaves some shares empty. 30 images:
# no micro-batch of the last batch has one sample alone, which batch norm refuses (as in serial)
VECTORS = TensorDataset(draw_numbers(29, 10, seed=1), draw_integers(4, 29, seed=2))
IMAGES = TensorDataset(draw_numbers(30, 2, 8, 8, seed=3), draw_integers(4, 30, seed=4))
TEXT = TensorDataset(
    draw_integers(11, 29, 7, seed=5),
    draw_integers(11, 29, 7, seed=6).masked_fill(draw_integers(4, 29, 7, seed=7) == 0, -100),
)


def make_momentum_sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def make_job(name: str, model: Callable[[], nn.Module], data: Dataset, **changes: object) -> Job:
    settings = {
        "loss": functional.cross_entropy,
        "optimizer": make_momentum_sgd,
        "batch": 12,
        "epochs": 2,
        "seed": 5,
    }
    return Job(name=name, model=model, train=data, **{**settings, **changes})


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))


def make_deep_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 12),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(12, 12),
        nn.LayerNorm(12),
        nn.Tanh(),
        nn.Linear(12, 9),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(9, 4),
    )


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
    )


def make_batch_norm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.BatchNorm1d(6, affine=False, momentum=None),
        nn.ReLU(),
        nn.Linear(6, 4),
    )


class Clamped(nn.Module):
    """A model whose hooks clip gradients, element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(10, 8)
        self.out = nn.Linear(8, 4)
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))  # type: ignore[no-any-return]


class Activated(nn.BatchNorm2d):
    """A batch norm whose own forward includes dropout and activation, as timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        x = functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        return functional.dropout(x, 0.1, self.training).tanh()


def make_activated_norm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), Activated(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
    )


def make_sync_batch_norm_cnn() -> nn.Module:
    """Return a model with torch's own batch norm over ranks, which refuses the CPU."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(make_batch_norm_cnn())


class TiedLstm(nn.Module):
    """A language model whose output layer is its embedding; -100 in the targets is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.out(hidden).transpose(1, 2)


class Lines(Dataset):
    """Lines of text of unequal length; a transform draws the first token of each at random."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> Tensor:
        line = draw_integers(11, 3 + index % 5, seed=50 + index)
        line[0] = int(torch.randint(11, ()) + random.randrange(11) + numpy.random.randint(11)) % 11
        return line


def collate_lines(lines: list[Tensor]) -> dict[str, Tensor]:
    """Collate lines into a dict, with label -100 at padding."""
    tokens = nn.utils.rnn.pad_sequence(lines, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=-100)
    return {"tokens": tokens[:, :-1], "labels": labels[:, 1:]}


class Predicting(nn.Module):
    """A model that takes the entries of a batch by name, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = TiedLstm()

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.lstm(tokens)}


def compute_label_loss(
    output: dict[str, Tensor], batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    return compute_token_loss(output["logits"], batch["labels"])


class TwoInputs(nn.Module):
    """A model with two inputs, of which the second is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(10, 4)
        self.right = nn.Linear(10, 4)

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
        return self.left(x) * more["scale"].unsqueeze(1) + self.right(x + more["shift"])


class Nested(Dataset):
    """Samples of the form ((vector, {scale, shift}), class)."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> object:
        x, target = VECTORS[index]
        return (x, {"scale": x[0], "shift": -x}), target


class PartlyUsed(nn.Module):
    """A model with a frozen layer, an unused layer, and a layer that few samples use.

    Only samples with a large first input use the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(10, 3)
        self.sometimes = nn.Linear(10, 10)
        self.out = nn.Linear(10, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(x)) * self.scale
        large = x[:, :1] > 1.5
        # three of 29 samples are large; most shares have none of them
        if large.any():
            hidden = hidden + large * self.sometimes(x)
        return self.out(hidden)


def make_last_layer_sgd(parameters: object) -> torch.optim.Optimizer:
    """Return an optimizer that holds the last layer only.

    The gradients of the other layers count for clipping, and must not add up over steps.
    """
    return torch.optim.SGD(list(parameters)[2:], lr=0.1)  # type: ignore[call-overload]


class InPlace(nn.Module):
    """A model that changes its input in place, as x.sub_(mean) does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mul_(2.0))


class Recomputed(nn.Module):
    """A model with dropout inside gradient checkpointing, which repeats the forward in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.second = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        hidden = checkpoint(
            lambda h: functional.dropout(torch.tanh(self.second(h)), 0.5, self.training),
            hidden,
            use_reentrant=False,
        )
        return self.out(functional.dropout(hidden, 0.1, self.training))


def make_dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))


def make_adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)  # type: ignore[arg-type]


def make_step_lr(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def compute_token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss as (sum, weight); the weight counts tokens without padding."""
    return functional.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


class Untraced(torch.autograd.Function):
    """A mean over the targets that are not ignored; the autograd graph does not show it."""

    @staticmethod
    def forward(ctx: object, output: Tensor, target: Tensor) -> Tensor:
        kept = target != -100
        ctx.save_for_backward(output, target, kept)  # type: ignore[attr-defined]
        return functional.cross_entropy(output, target) if kept.any() else output.sum() * 0

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        output, target, kept = ctx.saved_tensors  # type: ignore[attr-defined]
        chances = output.softmax(1) - functional.one_hot(target.clamp(min=0), 4)
        return gradients[0] * chances * kept.unsqueeze(1) / max(int(kept.sum()), 1), None


def compute_untraced_loss(output: Tensor, target: Tensor) -> Tensor:
    return Untraced.apply(output, target)


JOBS: dict[str, Job] = {
    each.name: each
    for each in (
        make_job("mlp", make_mlp, VECTORS),
        make_job(
            "mlp, adam, clipped, scheduled",
            make_mlp,
            VECTORS,
            optimizer=make_adam,
            clip_norm=0.05,
            scheduler=make_step_lr,
            scheduler_every="step",
        ),
        make_job("cnn", make_cnn, IMAGES),
        make_job("cnn with batch norm", make_batch_norm_cnn, IMAGES),
        make_job("cnn with batch norm, adam", make_batch_norm_cnn, IMAGES, optimizer=make_adam),
        make_job("cnn with batch norm, activated, dropout", make_activated_norm_cnn, IMAGES),
        make_job("cnn with batch norm, synchronised", make_sync_batch_norm_cnn, IMAGES),
        make_job("lstm, tied", TiedLstm, TEXT),
        make_job(
            "lstm, tied, loss as a pair", TiedLstm, TEXT, loss=compute_token_loss, clip_norm=0.5
        ),
        make_job(
            "mlp, weighted classes",
            make_mlp,
            VECTORS,
            loss=nn.CrossEntropyLoss(
                weight=torch.tensor([1.0, 3.0, 0.5, 2.0]), label_smoothing=0.1
            ),
        ),
        make_job("frozen and unused", PartlyUsed, VECTORS),
        make_job("dropout", make_dropout_mlp, VECTORS),
        make_job(
            "dicts, padded, transformed",
            Predicting,
            Lines(),
            loss=compute_label_loss,
            collate=collate_lines,
        ),
        make_job("nested inputs", TwoInputs, Nested()),
        make_job(
            "optimizer of the last layer",
            make_mlp,
            VECTORS,
            optimizer=make_last_layer_sgd,
            clip_norm=0.05,
        ),
        make_job("in place", InPlace, VECTORS),
        make_job("dropout, recomputed", Recomputed, VECTORS),
        make_job(
            "deep, adam, dropout, clipped",
            make_deep_mlp,
            VECTORS,
            clip_norm=0.2,
            optimizer=make_adam,
        ),
    )
}

ROWS: dict[str, Callable[[int], str]] = {
    "native": lambda n: f"data({n}, reduce=native)",
    "ring": lambda n: f"data({n}, reduce=ring)",
    "ring, blocking": lambda n: f"data({n}, reduce=ring(blocking=true))",
    "ring_async": lambda n: f"data({n}, reduce=ring_async(segments=3))",
    "tree": lambda n: f"data({n}, reduce=tree)",
    "butterfly": lambda n: f"data({n}, reduce=butterfly)",
    "star": lambda n: f"data({n}, reduce=star)",
    "direct": lambda n: f"data({n}, reduce=direct)",
    "halving": lambda n: f"data({n}, reduce=halving)",
    "double_tree": lambda n: f"data({n}, reduce=double_tree(segments=2))",
    "two_level": lambda n: (
        f"data({n}, reduce=two_level(across=halving, group={2 if n % 2 == 0 else n}))"
    ),
    "reproducible": lambda n: f"data({n}, reduce=ring(reproducible=true))",
    "auto": lambda n: f"data({n})",
    "uneven shares": lambda n: f"data({n}, reduce=ring, shares={[5, 2, 1, 1][:n]})",
    "micro-batches": lambda n: f"data({n}, reduce=tree, micro=2)",
    "uneven shares and micro-batches": lambda n: (
        f"data({n}, reduce=butterfly, shares={[1, 6, 1, 2][:n]}, micro=2)"
    ),
    "shared memory": lambda n: f"data({n}, state=shared_memory)",
    "shared memory, uneven shares and micro-batches": lambda n: (
        f"data({n}, state=shared_memory, shares={[3, 1, 1, 2][:n]}, micro=2)"
    ),
    "fully sharded": lambda n: f"data({n}, state=fully_sharded)",
    "fully sharded, uneven shares and micro-batches": lambda n: (
        f"data({n}, state=fully_sharded, shares={[3, 1, 1, 2][:n]}, micro=2)"
    ),
    "the largest, all of them": lambda n: f"data({n}, compress=top_k(1.0))",
    "what is above nothing, in micro-batches": lambda n: (
        f"data({n}, compress=threshold(0), shares={[2, 1, 1, 3][:n]}, micro=2)"
    ),
    "own batch norm": lambda n: f"data({n}, batch_norm=share)",
    "server": lambda n: f"server({n})",
    "servers": lambda n: f"server({n}, servers=2)",
}
SERIAL = {
    "serial": "serial",
    "serial, micro-batches": "serial(micro=3)",
    "serial, threads": "serial(threads=2)",
}

WORKERS = (1, 2, 3, 4)
# steps of a covering sample, three epochs of most jobs; the whole tables take 20
BRIEF = 9

# strategies that do not promise the training of serial (test_local_sgd)
LOOSER = (
    "local(2, every=3)",
    "local(3, every=end)",
    "local(2, every=2, after=3)",
    "local(2, outer=nesterov)",
    "local(4, every=2, outer=elastic)",
    "local(2, every=2, reduce=ring) * place(2)",
    "local(2, every=2, compress=int8)",
    "server(3, sync=asp)",
    "server(2, servers=2, sync=ssp(1), rate=by_staleness)",
)
# strategies of this kind that compress gradients (test_compressed_training)
COMPRESSED = tuple(
    f"data(2, compress={text})"
    for text in (
        "top_k(0.05)",
        "threshold(0.001)",
        "one_bit",
        "int8",
        "power_sgd(2)",
        "bf16",
        "fp16",
        "dgc(0.05)",
    )
)
# strategies of this kind whose steps do not correspond to serial's (test_federated)
IN_ROUNDS = (
    "federated(2, clients=4, fraction=0.5)",
    "federated(3, clients=3, fraction=1.0, split=dirichlet, reduce=ring)",
)

NOT_EXACT: dict[tuple[str, str], str] = {
    ("own batch norm", column): "statistics of a share are not those of the batch"
    for column in JOBS
    if "batch norm" in column
}

CELLS = [
    (row, column, workers)
    for row in ROWS
    for column in JOBS
    for workers in WORKERS
    if (row, column) not in NOT_EXACT
]


def choose_workers(place: int) -> tuple[int, int]:
    """Return two numbers of workers, one of them even."""
    return (WORKERS[2 * (place // 2 % 2)], WORKERS[1 + 2 * (place % 2)])


def select_covering_cells() -> list[tuple[str, str, int]]:
    """Return a fixed sample that has each row with two numbers of workers, and each column."""
    cells = []
    columns = list(JOBS)
    for place, row in enumerate(ROWS):
        for workers in choose_workers(place):
            column = next(
                column
                for shift in range(len(columns))
                if (row, column := columns[(place + 2 * workers + shift) % len(columns)])
                not in NOT_EXACT
            )
            cells.append((row, column, workers))
    return cells


# ---- divided models --------------------------------------------------------------------------
IN_PARTS = (
    "place(2)",
    "place(3)",
    "pipeline(2, micro=2)",
    "pipeline(3, micro=3)",
    "pipeline(2, micro=3, schedule=gpipe)",
    "pipeline(2, micro=2, schedule=interleaved)",
    "pipeline(2, micro=3, schedule=zero_bubble)",
    "pipeline(2, micro=3, recompute=true)",
    "pipeline(2, micro=2, schedule=zero_bubble, recompute=true)",
    "data(2) * pipeline(2, micro=2)",
    "data(2, reduce=ring) * place(2)",
    "pipeline(3, micro=4, schedule=gpipe)",
    "pipeline(3, micro=3, schedule=interleaved)",
    "pipeline(3, micro=4, schedule=zero_bubble)",
    "pipeline(4, micro=4)",
    "pipeline(4, micro=3, schedule=gpipe)",
    "pipeline(4, micro=4, schedule=interleaved)",
    "pipeline(4, micro=5, schedule=zero_bubble)",
    "data(2) * pipeline(4, micro=4, schedule=interleaved)",
)
# modules that a forward calls one after another
MODULES = {
    "mlp": 3,
    "mlp, adam, clipped, scheduled": 3,
    "cnn": 5,
    "cnn with batch norm": 9,
    "cnn with batch norm, adam": 9,
    "cnn with batch norm, activated, dropout": 5,
    "cnn with batch norm, synchronised": 9,
    "lstm, tied": 3,
    "lstm, tied, loss as a pair": 3,
    "mlp, weighted classes": 3,
    "frozen and unused": 2,
    "dropout": 4,
    "dicts, padded, transformed": 3,
    "nested inputs": 2,
    "optimizer of the last layer": 3,
    "in place": 1,
    "dropout, recomputed": 3,
    "deep, adam, dropout, clipped": 10,
}


def count_model_parts(row: str) -> int:
    """Return into how many parts a strategy divides a model."""
    return int(row.split("place(")[-1].split("pipeline(")[-1][0]) * (
        2 if "interleaved" in row else 1
    )


# "frozen and unused" calls a third module for some batches
TOO_FEW = [
    (row, column) for row in IN_PARTS for column in JOBS if MODULES[column] < count_model_parts(row)
]
# a micro-batch of the short last batch would be one sample, which batch norm refuses (as in
# serial)
OF_ONE = [
    (row, column)
    for row in IN_PARTS
    for column in JOBS
    if "batch norm" in column and ("micro=4" in row or "micro=5" in row)
]


@functools.cache
def list_parts_cells() -> list[tuple[str, str]]:
    return [
        (row, column)
        for row in IN_PARTS
        for column in JOBS
        if (row, column) not in (*TOO_FEW, *OF_ONE)
    ]


@functools.cache
def select_covering_parts() -> set[tuple[str, str]]:
    """Return each row with some job, and each other job with a pipeline of two.

    Jobs with too few modules for the pipeline are left out.
    """
    met = {column for _, column in select_covering_rows()}
    return select_covering_rows() | {
        (row, column)
        for row, column in list_parts_cells()
        if row == IN_PARTS[2] and column not in met
    }


@functools.cache
def select_covering_rows() -> set[tuple[str, str]]:
    """Return each row with some job."""
    columns = {
        row: [column for other, column in list_parts_cells() if other == row] for row in IN_PARTS
    }
    return {(row, columns[row][place % len(columns[row])]) for place, row in enumerate(IN_PARTS)}


# ---- divided layers --------------------------------------------------------------------------
IN_WIDTH = (
    "tensor(2)",
    "tensor(3)",
    "tensor(4)",
    "tensor(2, pairs=false)",
    "data(2) * tensor(2)",
    "data(2, reduce=ring) * tensor(2)",
    "place(2) * tensor(2)",
    "tensor(2) * pipeline(2, micro=2)",
    "pipeline(2, micro=3, schedule=zero_bubble) * tensor(2)",
    "pipeline(2, micro=2, recompute=true) * tensor(2)",
    "data(2) * tensor(2) * pipeline(2, micro=2)",
)
# a cut before a batch norm: its input is whole, and its statistics are divided
BEFORE_A_NORM = ("place(2, cut=[1, 8]) * tensor(2)", "cnn with batch norm")
WIDE = [
    (row, column)
    for row in IN_WIDTH
    for column in JOBS
    if MODULES[column] >= (2 if "place" in row or "pipeline" in row else 1)
] + [BEFORE_A_NORM]


# ---- divided images --------------------------------------------------------------------------
class Residual(nn.Module):
    """A residual network with strides, groups and padding by reflection.

    Windows of its pool reach beyond the edge of the image.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect", bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(3, 2, 1, ceil_mode=True)
        self.first = nn.Conv2d(4, 6, 3, 2, 1)
        self.depth = nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=2)
        self.around = nn.Conv2d(4, 6, 1, 2)
        self.groups = nn.GroupNorm(3, 6)
        self.dropout = nn.Dropout2d(0.2)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(self.stem(x)).relu())
        x = self.around(x) + self.groups(self.depth(self.first(x).relu()))
        return self.out(self.dropout(x.relu()).mean((2, 3)))  # type: ignore[no-any-return]


class Pixels(nn.Module):
    """A network that classifies each pixel: it goes down, up in two ways, and has a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 3, 3, 2, 1, 1)
        self.out = nn.Conv2d(11, 4, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x).tanh()
        second = self.norm(self.deep(functional.avg_pool2d(first, 2))).tanh()
        wide = functional.interpolate(second, scale_factor=2, mode="bilinear")
        return self.out(self.dropout(torch.cat([first, self.up(second), wide], 1)))


LABELLED = TensorDataset(
    IMAGES.tensors[0],
    draw_integers(4, 30, 8, 8, seed=8).masked_fill(draw_integers(4, 30, 8, 8, seed=9) == 0, -100),
)
OF_IMAGES = {
    **{name: each for name, each in JOBS.items() if each.train is IMAGES},
    **{
        each.name: each
        for each in (
            make_job("residual, clipped", Residual, IMAGES, clip_norm=0.3),
            make_job("pixels", Pixels, LABELLED, optimizer=make_adam),
        )
    },
}
IN_PIECES = (
    "spatial(2)",
    "spatial(3)",
    "spatial(2, columns=2)",
    "spatial(1, columns=3)",
    "data(2) * spatial(2)",
    "data(2, reduce=ring) * spatial(2)",
)
INTEGRATED = ("data(2, dense=tensor)", "data(3, dense=tensor)")
# in the last batch, of 3 samples, one rank has one sample; earlier, its batch norm was taken
# for a norm within samples
ONE_LEFT = make_job("batch norm, one left", make_batch_norm_cnn, Subset(IMAGES, range(27)))
OF_IMAGES[ONE_LEFT.name] = ONE_LEFT
OF_PIECES = [
    *((row, column) for row in IN_PIECES for column in OF_IMAGES),
    *(
        (row, column)
        for row in INTEGRATED
        for column in {**JOBS, **OF_IMAGES}
        if column not in ("pixels",)
    ),
    *(
        (row, column)
        for row in ("spatial(2, dense=tensor)", "data(2) * spatial(2, dense=tensor)")
        # "pixels" has no fully connected layer
        for column in OF_IMAGES
        if column != "pixels"
    ),
]


# ---- branches --------------------------------------------------------------------------------
def make_branch(kernel: int, dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Conv2d(4, 3, kernel, padding=kernel // 2),
        nn.ReLU(),
    )


class Forking(nn.Module):
    """A model with three concatenated branches, one with a pool, and then two summed branches.

    The sum has three terms. Some branches have dropout, so a rank must count the draws of
    branches that it does not hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.first = nn.ModuleList(
            [
                make_branch(1),
                make_branch(3, 0.3),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(4, 3, 1)),
            ]
        )
        self.second = nn.ModuleList([nn.Conv2d(9, 4, 3, padding=1), nn.Conv2d(9, 4, 1)])
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([each(x) for each in self.first], 1)
        x = (
            self.second[0](x)
            + self.second[1](functional.dropout(x, 0.2, self.training))
            + self.norm(self.second[1](x))
        )
        return self.out(functional.max_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


class Towers(nn.Module):
    """A model of two networks whose outputs are multiplied; one of them returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(
            nn.Linear(10, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4)
        )
        self.right = nn.Sequential(nn.Linear(10, 6), nn.GELU())
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.scale = nn.Parameter(torch.ones(4))

    def encode_right(self, x: Tensor) -> dict[str, Tensor]:
        hidden, _ = self.lstm(self.right(x).unsqueeze(1))
        return {"hidden": hidden.squeeze(1)}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode_right(x)["hidden"]
        return self.left(x) * hidden * self.scale  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A model of three networks that meet only in the output, which is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(10, 5 + at), nn.Tanh(), nn.Linear(5 + at, 4))
                for at in range(3)
            ]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(expert(x) for expert in self.each)


def compute_loss_of_mean(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return functional.cross_entropy(torch.stack(output).mean(0), target)


class Halved(torch.autograd.Function):
    """An autograd function that halves a weight."""

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return weight / 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        return gradients[0] / 2


class OddTowers(nn.Module):
    """A model of two branches (towers) with unusual code.

    An autograd function uses a weight; earlier, it kept the weight of the first step. Attention
    has dropout; earlier, its draws were not counted. The forward compares the towers under
    no_grad, reads the dtype of a weight, and returns a penalty of all weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.ModuleDict(
                {
                    "into": nn.Linear(2, 8),
                    "attention": nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True),
                    "out": nn.Linear(8, 4),
                }
            )
            for _ in range(2)
        )
        self.halved = nn.Parameter(draw_numbers(4, 4, seed=70))
        self.near = 0.0
        self.last = nn.Linear(4, 4)

    def compute_tower(self, tower: nn.ModuleDict, x: Tensor) -> Tensor:
        x = tower["into"](x.view(-1, 5, 2)).to(next(tower.parameters()).dtype)
        x = x + tower["attention"](x, x, x, need_weights=False)[0]
        return tower["out"](functional.dropout(x, 0.1, self.training)).mean(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left = self.compute_tower(self.left, x)
        right = functional.linear(self.compute_tower(self.right, x), Halved.apply(self.halved))
        with torch.no_grad():
            self.near = float((left - right).square().mean())
        penalty = sum(each.square().sum() for each in self.parameters())
        return self.last(functional.dropout(left + right, 0.2, self.training)), penalty


def compute_penalised_loss(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.tensor(float(len(target)), dtype=output[1].dtype)
    return functional.cross_entropy(output[0], target, reduction="sum") + 1e-3 * weight * output[
        1
    ], weight


def return_output(output: Tensor, target: Tensor) -> Tensor:
    return output


class LossInside(nn.Module):
    """A model that computes its own loss: a sum of two means, each from one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(10, 3)
        self.right = nn.Sequential(nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.left(x) - x[:, :3]).square().mean() + (
            self.right(x) - x[:, 3:6]
        ).square().mean()


WITH_BRANCHES = {
    **{
        each.name: each
        for each in (
            make_job("forks, clipped", Forking, IMAGES, clip_norm=0.3),
            make_job("towers", Towers, VECTORS, optimizer=make_adam),
            make_job("experts", Experts, VECTORS, loss=compute_loss_of_mean),
            make_job("odd towers", OddTowers, VECTORS, loss=compute_penalised_loss),
            make_job("loss inside", LossInside, VECTORS, loss=return_output),
        )
    },
    "residual, clipped": OF_IMAGES["residual, clipped"],
    "nested inputs": JOBS["nested inputs"],
}
BRANCHED = ("branch(2)", "branch(3)", "data(2) * branch(2)", "data(2, reduce=ring) * branch(2)")
OF_BRANCHES = [
    (row, column)
    for row in BRANCHED
    for column in WITH_BRANCHES
    # the others have two branches
    if row != "branch(3)" or column in ("forks, clipped", "experts")
]
