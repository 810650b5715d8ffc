"""A row of the zoo: a job that was not written for paragrad, and what is to become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from equality import job as make_job
from equality import numbers, whole
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paragrad import Job

STRATEGIES = ("data(2)", "data(3, shares=[2, 1, 1])", "data(2, state=replicated, reduce=ring)", "data(2, micro=3)")
BOUND = 1e-10

# 29 samples in batches of 12: the last batch has 5, which leaves some shares empty; 30 where batch norm wants two samples in
# every micro-batch, as it does in serial
VECTORS = TensorDataset(numbers(29, 10, seed=1), whole(4, 29, seed=2))
POINTS = TensorDataset(numbers(30, 10, seed=1), whole(4, 30, seed=2))
IMAGES = TensorDataset(numbers(30, 3, 32, 32, seed=3), whole(4, 30, seed=4))
WHOLE_BATCHES = TensorDataset(numbers(36, 3, 32, 32, seed=3), whole(4, 36, seed=4))     # no short one: a net ends at 1 x 1
SMALL_IMAGES = TensorDataset(numbers(30, 2, 8, 8, seed=3), whole(4, 30, seed=4))
SEQUENCES = TensorDataset(numbers(29, 6, 8, seed=5), whole(4, 29, seed=6))


@dataclass(frozen=True)
class Equal:
    """The same training: to 1e-10 in float64; or, where `twin` says why rounding is more than that, to the twin's bound."""
    twin: str = ""


@dataclass(frozen=True)
class Refused:
    """One message, at the door or before the first update. match: a regular expression for what it says."""
    match: str


@dataclass(frozen=True)
class Row:
    """A model or job from elsewhere.

    name: also the job's;  job: builds it, in the launcher;  expected: what `verify` or `train` is to say;  story: why, or
    what went wrong before;  needs: libraries without which it is skipped.
    """
    name: str
    job: Callable[[], Job]
    expected: Equal | Refused
    story: str
    needs: tuple[str, ...] = ()
    under: tuple[str, ...] = STRATEGIES


def row(name: str, model: Callable[[], nn.Module], data: Dataset, expected: Equal | Refused, story: str,
        needs: tuple[str, ...] = (), under: tuple[str, ...] = STRATEGIES, **changes: object) -> Row:
    """A row whose job is that model on that dataset; the rest as in the equality table but for gentler steps."""
    settings = {"optimizer": sgd, **changes}
    return Row(name, lambda: make_job(name, model, data, **settings), expected, story, needs, under)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)           # type: ignore[arg-type]


def slow(parameters: object) -> torch.optim.Optimizer:
    """For nets with batch norm over few values, whose rounding grows with every large step."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)           # type: ignore[arg-type]


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)                        # type: ignore[arg-type]


class Sentences(Dataset):
    """29 sentences of 3 to 9 tokens; only every `labelled`-th has labels."""

    def __init__(self, labelled: int = 1, vocabulary: int = 50) -> None:
        self.labelled, self.vocabulary = labelled, vocabulary

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = 3 + whole(self.vocabulary - 3, 3 + index * 5 % 7, seed=100 + index)
        labels = tokens.clone() if index % self.labelled == 0 else torch.full_like(tokens, -100)
        return {"input_ids": tokens, "labels": labels, "kind": torch.tensor(index % 3)}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """input_ids and attention_mask filled up to the longest with 0, labels with -100."""
    def filled(values: list[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value)
    tokens = [sample["input_ids"] for sample in samples]
    return {"input_ids": filled(tokens, 0), "attention_mask": filled([torch.ones_like(each) for each in tokens], 0),
            "labels": filled([sample["labels"] for sample in samples], -100)}
