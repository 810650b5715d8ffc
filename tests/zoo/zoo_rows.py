"""A row of the zoo: a job that was not written for paragrad, and its expected outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from equality_table import draw_integers, draw_numbers, make_job
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paragrad import Job

DATA = (
    "data(2)",
    "data(3, shares=[2, 1, 1])",
    "data(2, state=replicated, reduce=ring)",
    "data(2, micro=3)",
)
SHARDED = "data(2, state=fully_sharded)"
PLACE, PIPELINE = IN_PARTS = ("place(2)", "pipeline(2, micro=4)")
# SPATIAL is for rows with images
TENSOR = "tensor(2)"
SPATIAL = "spatial(2)"
SERVER = "server(2)"
SERVERS = "server(2, servers=2)"
COMPRESSED = "data(2, compress=top_k(1.0))"  # all entries of every tensor, however small
STRATEGIES = (*DATA, SHARDED, *IN_PARTS, TENSOR, SERVER, COMPRESSED)
# for jobs whose batches cannot be divided into micro-batches
WITHOUT_MICRO = (*DATA[:3], SHARDED, *IN_PARTS, TENSOR, SERVER, COMPRESSED)
# for rows of optimizers: under all of these, the optimizer decides what a rank holds
OPTIMIZER_STRATEGIES = ("data(2)", SHARDED, PLACE, SERVERS)
BOUND = 1e-10

# 29 samples in batches of 12: the last batch has 5, so some shares are empty; 30 samples if batch
# norm needs two samples in every micro-batch, as it does in serial
VECTORS = TensorDataset(draw_numbers(29, 10, seed=1), draw_integers(4, 29, seed=2))
POINTS = TensorDataset(draw_numbers(30, 10, seed=1), draw_integers(4, 30, seed=2))
IMAGES = TensorDataset(draw_numbers(30, 3, 32, 32, seed=3), draw_integers(4, 30, seed=4))
# no short last batch, for networks whose features end at 1 x 1
WHOLE_BATCHES = TensorDataset(draw_numbers(36, 3, 32, 32, seed=3), draw_integers(4, 36, seed=4))
SMALL_IMAGES = TensorDataset(draw_numbers(30, 2, 8, 8, seed=3), draw_integers(4, 30, seed=4))
SEQUENCES = TensorDataset(draw_numbers(29, 6, 8, seed=5), draw_integers(4, 29, seed=6))


@dataclass(frozen=True)
class Equal:
    """The same training as serial, to 1e-10 in float64.

    `twin` says why rounding is larger; then the bound comes from the rounding baseline.
    """

    twin: str = ""


@dataclass(frozen=True)
class Refused:
    """Refused with one message, in validation or before the first update.

    `match` is a regular expression for the message. The place of a cut depends on measured times:
    with `by_cut`, the job may also train if the cut lies elsewhere. Then its first step must be
    one worker's, and its counts must equal those of one worker at the end.
    """

    match: str
    by_cut: bool = False


Outcomes = Mapping[str, Equal | Refused]  # by strategy


@dataclass(frozen=True)
class Row:
    """A model or job from elsewhere.

    `name` is also the job's name, and `job` builds the job, in the launcher. `expected` is the
    outcome of `verify` or `train`. `story` says why, or what went wrong before. Without the
    libraries in `needs`, the row is skipped. `under` has its strategies, and `but` has those of
    them with another outcome.
    """

    name: str
    job: Callable[[], Job]
    expected: Equal | Refused
    story: str
    needs: tuple[str, ...] = ()
    under: tuple[str, ...] = STRATEGIES
    but: Outcomes = field(default_factory=dict)

    def find_outcome(self, strategy: str) -> Equal | Refused:
        if strategy in (TENSOR, SPATIAL):
            from tensor_outcomes import IN_WIDTH, OF_IMAGES

            return (IN_WIDTH if strategy == TENSOR else OF_IMAGES).get(self.name, self.expected)
        return self.but.get(strategy, self.expected)

    @property
    def equal(self) -> tuple[str, ...]:
        """The strategies under which it is the same training."""
        return tuple(each for each in self.under if isinstance(self.find_outcome(each), Equal))


def make_row(
    name: str,
    model: Callable[[], nn.Module],
    data: Dataset,
    expected: Equal | Refused,
    story: str,
    needs: tuple[str, ...] = (),
    under: tuple[str, ...] = STRATEGIES,
    but: Outcomes | None = None,
    **changes: object,
) -> Row:
    """Return a row whose job trains a model on a dataset.

    Other settings are those of the equality table, except for a smaller learning rate.
    """
    settings = {"optimizer": make_sgd, **changes}
    return Row(
        name,
        lambda: make_job(name, model, data, **settings),
        expected,
        story,
        needs,
        under,
        but or {},
    )


def expect_refusal_in_parts(match: str) -> Outcomes:
    """Return the outcomes of a model or job that cannot be divided into parts."""
    return dict.fromkeys(IN_PARTS, Refused(match))


# ---- why a row has another outcome in parts --------------------------------------------------
ONE_MODULE = expect_refusal_in_parts(
    r"the model calls 1 module\(s\) one after another .* give fewer workers or chunks, or a model "
    r"that calls"
)
GRADIENTS = expect_refusal_in_parts(
    "a model that takes gradients itself is not cut, .* train it with data"
)
LOOKS = expect_refusal_in_parts(
    "let Python look only at values of the inputs, and modules at no value that decides a shape"
)
UNCUT: Outcomes = {
    PIPELINE: Refused("cannot be cut into micro-batches|let the samples be its first dimension")
}
# an optimizer that needs whole tensors
IN_SHARDS: Outcomes = {SHARDED: Refused("does not update element by element|hook")}
WHOLE: Outcomes = {PLACE: Equal()}  # the whole batch goes through all parts


def make_sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)  # type: ignore[arg-type]


def make_slow_sgd(parameters: object) -> torch.optim.Optimizer:
    """Return SGD with a small rate, for models with batch norm over few values.

    The rounding of such models grows with every large step.
    """
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)  # type: ignore[arg-type]


def make_adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)  # type: ignore[arg-type]


class Sentences(Dataset):
    """29 sentences of 3 to 9 tokens; only every `labelled`-th has labels."""

    def __init__(self, labelled: int = 1, vocabulary: int = 50) -> None:
        self.labelled = labelled
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = 3 + draw_integers(self.vocabulary - 3, 3 + index * 5 % 7, seed=100 + index)
        labels = tokens.clone() if index % self.labelled == 0 else torch.full_like(tokens, -100)
        return {"input_ids": tokens, "labels": labels, "kind": torch.tensor(index % 3)}


def collate_sentences(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate sentences: pad input_ids and attention_mask with 0, and labels with -100."""

    def pad(values: list[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value)

    tokens = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad(tokens, 0),
        "attention_mask": pad([torch.ones_like(each) for each in tokens], 0),
        "labels": pad([sample["labels"] for sample in samples], -100),
    }
