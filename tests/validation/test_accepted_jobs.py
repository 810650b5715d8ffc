"""Models and jobs that once were refused or crashed, though they are valid.

Now each of them trains as under serial, or is refused with one message.
"""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_table import VECTORS, draw_numbers, make_job
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

import paragrad as pg
from paragrad.launch import Launcher
from paragrad.runtime.world import World

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks"), pytest.mark.story]

CUT = ("data(2)", "data(2, reduce=ring)", "data(2, state=shared_memory)", "data(2, micro=2)")
WHOLE = CUT[:3]


def assert_same_training(tmp_path: Path, checked: pg.Job, *strategies: str) -> None:
    """Assert that the job trains as serial under each strategy, to 1e-10 in float64.

    It also trains in its own type.
    """
    for strategy in strategies:
        certificate = pg.verify(checked, strategy, runs=tmp_path)
        assert certificate.same, (
            strategy,
            certificate.difference,
            certificate.tensor,
            certificate.failure,
        )
    run = pg.train(checked.replace(epochs=1), strategies[-1], runs=tmp_path)
    assert len(run.losses) == 3
    assert all(loss == loss for loss in run.losses)


# ---- types -----------------------------------------------------------------------------------
class Waves(nn.Module):
    """A model with a complex layer, for real or complex inputs, and then a real layer."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.randn(10, 6, dtype=torch.complex64))
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.to(self.phases.dtype) @ self.phases).abs())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "strategy", [*CUT, "data(2, reduce=native)", "data(2, reduce=ring(reproducible=true))"]
)
def test_complex_first_parameter(strategy: str, tmp_path: Path) -> None:
    """The first parameter of a model may be complex.

    Earlier, inputs were cast to the type of the first parameter. So were the numbers that are
    sent with the gradients (weight, loss): "grad can be implicitly created only for real scalar
    outputs but got torch.complex64". Also, shared memory required a fused update, which does not
    support complex numbers.
    """
    assert_same_training(tmp_path, make_job("complex", Waves, VECTORS), strategy)


def test_complex_parameters_clipped_with_adam(tmp_path: Path) -> None:
    assert_same_training(
        tmp_path,
        make_job(
            "complex, clipped",
            Waves,
            VECTORS,
            clip_norm=0.1,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        ),
        *CUT,
    )


class ComplexInputs(Dataset):
    """A dataset of complex64 vectors.

    verify uses float64, so the layer is in complex128 and needs converted vectors.
    """

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> object:
        x, target = VECTORS[index]
        return torch.complex(x, -x.flip(0)), target


def test_complex_inputs_take_the_precision_of_the_job(tmp_path: Path) -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 4, dtype=torch.complex64), Modulus())

    assert_same_training(tmp_path, make_job("complex inputs", make_model, ComplexInputs()), *CUT)


class Modulus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class Halved(nn.Module):
    """A model whose first layer is in bfloat16, for inputs of any type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 6).bfloat16()
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.out(hidden.to(self.out.weight.dtype)) + x[:, :4].to(self.out.weight.dtype)


def train_in_own_loop(
    world: World, model: Any, strategy: str
) -> tuple[dict[str, Tensor], torch.dtype]:
    """Make three steps in a loop of the user.

    Returns the parameters, and the type of the model's inputs.
    """
    torch.manual_seed(3)
    built = model()
    seen = []
    built.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    with pg.parallelize(built, functional.cross_entropy, optimizer, strategy) as trainer:
        for batch in trainer.batches(VECTORS, batch=12, epoch=0):
            trainer.step(*batch)
    assert len(set(seen)) == 1
    return {name: value.detach().clone() for name, value in built.named_parameters()}, seen[0]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (Halved, torch.float32),
        (Waves, torch.float32),
        (lambda: nn.Linear(10, 4).bfloat16(), torch.bfloat16),
    ],
)
def test_input_types_in_a_user_loop(model: Any, dtype: torch.dtype, pool: Launcher) -> None:
    """Inputs get the type that all real parameters have in common.

    If they have no common type, inputs keep their own. Earlier, a first parameter in bfloat16
    turned all inputs into bfloat16, also for the part of the model in float32.
    """
    for strategy in ("data(2, reduce=ring)", "data(2, reduce=native)", "data(2, reduce=tree)"):
        (ours, seen), (theirs, _) = pool.run(train_in_own_loop, model, strategy, size=2)
        alone, _ = pool.run(train_in_own_loop, model, "data(1)", size=1)[0]
        assert seen == dtype
        for name, value in ours.items():
            assert torch.equal(value, theirs[name])
            # three steps whose sums are rounded to 8 bits
            coarse = torch.bfloat16 in {each.dtype for each in ours.values()}
            near = 0.02 if value.dtype == torch.bfloat16 else 1e-3 if coarse else 1e-5
            assert float((value - alone[name]).abs().max()) <= near * float(alone[name].abs().max())


def collate_sparse(samples: list[Any]) -> object:
    return torch.stack([x for x, _ in samples]).to_sparse(), torch.stack(
        [target for _, target in samples]
    )


class SparseInputModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight)


def test_sparse_inputs(tmp_path: Path) -> None:
    """A model may get sparse inputs.

    Earlier, the tensors that a forward keeps for its backward were measured by their storage:
    "Cannot access data pointer of Tensor that doesn't have storage".
    """
    checked = make_job("sparse inputs", SparseInputModel, VECTORS, collate=collate_sparse)
    assert_same_training(tmp_path, checked, *WHOLE)
    with pytest.raises(
        pg.Refused,
        match="a sparse tensor cannot be cut into micro-batches; let the model make it sparse",
    ):
        pg.train(checked, "data(2, micro=2)", runs=tmp_path)


# ---- gradients inside the forward ------------------------------------------------------------
class Forces(nn.Module):
    """A model of a potential; its output is a gradient, the forces."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, places: Tensor) -> Tensor:
        places = places.requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(places).sum(), places, create_graph=True)
        return -slope[:, :4]


def compute_force_error(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, functional.one_hot(target, 4).to(output.dtype))


def near(output: Tensor, target: Tensor) -> tuple[float, int]:
    return float((output.argmax(1) == target).sum()), len(target)


@pytest.mark.parametrize("metric", [None, near])
def test_autograd_inside_of_the_forward(metric: Any, tmp_path: Path) -> None:
    """A forward may call autograd.

    Earlier, validation and evaluation ran under no_grad: "element 0 of tensors does not require
    grad and does not have a grad_fn".
    """
    checked = make_job(
        "forces", Forces, VECTORS, loss=compute_force_error, test=VECTORS, metric=metric
    )
    assert_same_training(tmp_path, checked, *CUT)
    run = pg.train(checked, "data(2)", runs=tmp_path)
    model = run.model()
    assert run.test == pytest.approx(
        float(compute_force_error(model(VECTORS.tensors[0].clone()), VECTORS.tensors[1]).detach())
        if metric is None
        else near(model(VECTORS.tensors[0].clone()), VECTORS.tensors[1])[0] / 29,
        rel=1e-5,
    )


class FunctionalForces(nn.Module):
    """A model that computes the forces with torch.func, for each sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))
        self.out = nn.Linear(10, 4)

    def forward(self, places: Tensor) -> Tensor:
        return self.out(
            torch.func.vmap(torch.func.grad(lambda place: self.energy(place).squeeze()))(places)
        )


def test_gradients_by_torch_func(tmp_path: Path) -> None:
    """A forward may use torch.func.

    Earlier, hooks watched the tensors that a forward keeps for its backward. torch.func does not
    allow such hooks: "don't yet support saved tensor hooks".
    """
    assert_same_training(tmp_path, make_job("functional forces", FunctionalForces, VECTORS), *CUT)


class Points(Dataset):
    """A dataset whose samples are dicts {x}; x is a place on a line."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": draw_numbers(1, seed=100 + index)}


class Solution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.requires_grad_())


def compute_residual(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the residual of u' = -u; it differentiates the output by an entry of the batch."""
    (slope,) = torch.autograd.grad(output.sum(), batch["x"], create_graph=True)
    return (slope + output).pow(2).mean()


def test_loss_that_differentiates_by_its_batch(tmp_path: Path) -> None:
    """Model and loss get the same tensor of the batch.

    Earlier, validation gave each of them its own copy, and micro-batches sliced the tensor twice:
    "One of the differentiated Tensors appears to not have been used in the graph".
    """
    assert_same_training(
        tmp_path,
        make_job("residual", Solution, Points(), loss=compute_residual, test=Points()),
        *CUT,
    )


# ---- outputs ---------------------------------------------------------------------------------
class Heads(nn.Module):
    """A model with batch norm and dropout, and two heads.

    In training it returns both heads as a dict, in evaluation the output only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.out = nn.Linear(8, 4)
        self.auxiliary = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return (
            {"out": self.out(hidden), "auxiliary": self.auxiliary(hidden)}
            if self.training
            else self.out(hidden)
        )


def compute_loss_of_both(outputs: dict[str, Tensor], target: Tensor) -> tuple[Tensor, int]:
    losses = [
        functional.cross_entropy(outputs[name], target, reduction="sum")
        for name in ("out", "auxiliary")
    ]
    return losses[0] + 0.4 * losses[1], len(target)


def test_different_outputs_in_training(tmp_path: Path) -> None:
    """A model may return other outputs in training than in evaluation.

    Earlier, validation called the loss with the output of eval mode: "too many indices for
    tensor of dimension 2".
    """
    checked = make_job(
        "heads", Heads, VECTORS, loss=compute_loss_of_both, test=VECTORS, metric=pg.accuracy
    )
    assert_same_training(
        tmp_path, checked, "data(2)", "data(2, reduce=ring)", "data(2, state=shared_memory)"
    )
    with pytest.raises(pg.Refused, match=r"loss of a batch of test .give a metric.* raised"):
        pg.train(checked.replace(metric=None), runs=tmp_path)
    # validation does check this loss
    with pytest.raises(pg.Refused, match="bare sum over the batch"):
        pg.train(
            checked.replace(loss=lambda outputs, target: compute_loss_of_both(outputs, target)[0]),
            "data(2)",
            runs=tmp_path,
        )


class Centred(nn.Module):
    """A model that subtracts the mean over the batch, in eval mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x if self.training else x - x.mean(0))


def test_loss_of_the_test_set_must_be_additive(tmp_path: Path) -> None:
    """Without a metric, the test is the loss in eval mode, summed over ranks.

    So this loss must not mix samples.
    """
    centred = make_job("centred", Centred, VECTORS, test=VECTORS)
    with pytest.raises(
        pg.Refused,
        match=r"the test, which is the loss in eval mode: .* mixes samples.*; or give a metric",
    ):
        pg.train(centred, runs=tmp_path)
    assert pg.train(centred.replace(metric=pg.accuracy), "data(2)", runs=tmp_path).losses


# ---- inputs ----------------------------------------------------------------------------------
Sides = namedtuple("Sides", "left right")


class Sided(Dataset):
    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> object:
        x, target = VECTORS[index]
        return Sides(x, -2 * x.flip(0)), target


class TwoSidedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(10, 4)
        self.right = nn.Linear(10, 4)

    def forward(self, sides: Sides) -> Tensor:
        return self.left(sides.left) + self.right(sides.right)


def test_named_tuple_is_one_argument(tmp_path: Path) -> None:
    """A named tuple is one argument of the model.

    Earlier, its fields became separate arguments: "takes 2 positional arguments but 3 were
    given".
    """
    assert_same_training(tmp_path, make_job("sides", TwoSidedModel, Sided()), *CUT)


class Lines(Dataset):
    """A dataset of lines of 2 to 5 vectors, or all of the given length; each has a class."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> object:
        return draw_numbers(self.length or 2 + index % 4, 10, seed=50 + index), index % 4


def collate_packed(samples: list[Any]) -> object:
    return (
        nn.utils.rnn.pack_sequence([line for line, _ in samples], enforce_sorted=False),
        torch.tensor([target for _, target in samples]),
    )


class LastState(nn.Module):
    """A recurrent network whose input has time as its first dimension, or is a PackedSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(10, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, lines: Any) -> Tensor:
        return self.out(self.rnn(lines)[1][0])


def test_packed_sequences(tmp_path: Path) -> None:
    """A PackedSequence is a named tuple too, but it is one argument of the model.

    Earlier: "takes 2 positional arguments but 5 were given".
    """
    checked = make_job(
        "packed", LastState, Lines(), collate=collate_packed, test=Lines(), metric=pg.accuracy
    )
    assert_same_training(tmp_path, checked, *WHOLE)
    assert 0 <= pg.train(checked, "data(2)", runs=tmp_path).test <= 100  # type: ignore[operator]
    with pytest.raises(
        pg.Refused,
        match="a PackedSequence cannot be cut into micro-batches; let collate give padded",
    ):
        pg.train(checked, "data(2, micro=2)", runs=tmp_path)


def collate_nested(samples: list[Any]) -> object:
    return (
        torch.nested.nested_tensor([line for line, _ in samples], layout=torch.jagged),
        torch.tensor([target for _, target in samples]),
    )


class NestedInputModel(nn.Module):
    """A model that averages the outputs over each line."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(10, 4)

    def forward(self, lines: Tensor) -> Tensor:
        return torch.stack([self.out(line).mean(0) for line in lines.unbind()])


def test_nested_tensors(tmp_path: Path) -> None:
    """A model may get nested tensors; with micro-batches they are refused.

    Earlier, verify ended with "view(): cannot view shape", and micro-batches with "slice(): not
    supported for NestedTensor".
    """
    checked = make_job("nested", NestedInputModel, Lines(), collate=collate_nested)
    assert_same_training(tmp_path, checked, *WHOLE)
    for strategy in ("data(2, micro=2)", "serial(micro=3)"):
        with pytest.raises(
            pg.Refused,
            match="a NestedTensor cannot be cut into micro-batches; let collate give padded",
        ):
            pg.train(checked, strategy, runs=tmp_path)


def collate_time_first(samples: list[Any]) -> object:
    return torch.stack([line for line, _ in samples], dim=1), torch.tensor(
        [target for _, target in samples]
    )


@pytest.mark.parametrize(
    "length", [*(pytest.param(each, marks=pytest.mark.table) for each in (12, 6)), 3, 2]
)
def test_time_first_input(length: int, tmp_path: Path) -> None:
    """Inputs whose first dimension is time train in whole batches.

    With micro-batches they are refused before any rank starts; earlier, a rank failed at step 0.
    If the length of a line equalled the number of samples by chance, micro-batches even divided
    the time, without any message. This is refused too.
    """
    checked = make_job(
        "time first", LastState, Lines(length), collate=collate_time_first, test=Lines(length)
    )
    assert_same_training(tmp_path, checked, *WHOLE)
    for strategy in ("data(2, micro=2)", "serial(micro=3)"):
        with pytest.raises(
            pg.Refused,
            match="cannot be cut into micro-batches; let the samples be its first dimension, or",
        ):
            pg.train(checked, strategy, runs=tmp_path)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return (VECTORS[index] for index in range(29))


def test_iterable_dataset_is_refused_with_a_repair(tmp_path: Path) -> None:
    """Earlier, paragrad called an IterableDataset: "'Stream' object is not callable"."""
    plain = make_job("stream", lambda: nn.Linear(10, 4), VECTORS)
    for changed in (
        {"train": Stream()},
        {"train": lambda data: Stream()},
        {"test": Stream()},
        {"train": iter(VECTORS)},
    ):
        with pytest.raises(
            pg.Refused, match=r"one after the other only .*give paragrad.Stream.*or list\("
        ):
            pg.train(plain.replace(**changed), runs=tmp_path)
    model = nn.Linear(10, 4)
    with pg.parallelize(
        model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
    ) as trainer:
        with pytest.raises(pg.Refused, match="the dataset gives samples one after"):
            next(trainer.batches(Stream(), batch=12, epoch=0))
        with pytest.raises(pg.Refused, match="the dataset gives samples one after"):
            trainer.evaluate(Stream())
    # the repair in the message
    assert_same_training(tmp_path, plain.replace(train=list(Stream())), "data(2)")


# ---- lazy modules ----------------------------------------------------------------------------
def make_lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(4))


def test_lazy_modules(tmp_path: Path) -> None:
    """A model may have lazy modules.

    Earlier, optimizer and exchange were built with parameters that had no shape yet: "Attempted
    to use an uninitialized parameter".
    """
    checked = make_job("lazy", make_lazy_model, VECTORS, seed=8)
    assert_same_training(tmp_path, checked, *WHOLE)
    run = pg.train(checked.replace(epochs=0), "data(2)", runs=tmp_path)
    # every rank builds its model with this seed
    torch.manual_seed(8)
    expected = make_lazy_model().eval()
    expected(VECTORS.tensors[0][:2])
    for name, value in run.model().state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])
    assert run.header["job"]["parameters"] == 10 * 6 + 6 + 12 + 6 * 4 + 4


def test_lazy_modules_in_a_user_loop() -> None:
    model = make_lazy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(
            pg.Refused,
            match=r"0.weight, .*have no shapes yet .*run one batch through the model before",
        ),
        pg.parallelize(model, functional.cross_entropy, optimizer),
    ):
        pass


# ---- losses that use the model ---------------------------------------------------------------
class Penalised(nn.Module):
    """A model that returns its output and the sum of squares of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), sum(parameter.pow(2).sum() for parameter in self.parameters())


def compute_penalised_loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[0], target) + 0.01 * outputs[1]


def test_weight_penalty_returned_by_the_model(tmp_path: Path) -> None:
    assert_same_training(
        tmp_path, make_job("penalised", Penalised, VECTORS, loss=compute_penalised_loss), *CUT
    )


HELD: list[nn.Module] = []


def make_held_model() -> nn.Module:
    HELD[:] = [nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))]
    return HELD[0]


def compute_loss_of_held(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target) + 0.01 * sum(
        each.pow(2).sum() for each in HELD[0].parameters()
    )


def test_loss_that_refers_to_the_model_trains_unverified(tmp_path: Path) -> None:
    """verify builds two models in one process, and this loss always reads the last one.

    Earlier, verify therefore answered "NO" for an equal training. Now it refuses such a loss.
    """
    checked = make_job("held", make_held_model, VECTORS, loss=compute_loss_of_held)
    other = make_job("held", Penalised, VECTORS, loss=compute_penalised_loss)
    expected = pg.train(other, "serial", runs=tmp_path).losses
    for strategy in ("serial", *CUT):
        assert pg.train(checked, strategy, runs=tmp_path).losses == pytest.approx(
            expected, rel=1e-5
        )
    with pytest.raises(
        pg.RankFailed, match=r"the loss reads the model from outside.*such as \(output, penalty\)"
    ):
        pg.verify(checked, "data(2)", runs=tmp_path)


def test_model_that_is_built_once(tmp_path: Path) -> None:
    """model=lambda: net gives the trainer and the reference the same module.

    Earlier, both updated it, and verify answered "NO". Now verify refuses such a model.
    """
    net = nn.Linear(10, 4)
    checked = make_job("once", lambda: net, VECTORS)
    assert pg.train(checked, "data(2)", runs=tmp_path).losses == pytest.approx(
        pg.train(checked, "serial", runs=tmp_path).losses, rel=1e-5
    )
    with pytest.raises(
        pg.RankFailed, match=r"every training builds its own: write model=lambda: Net\(\)"
    ):
        pg.verify(checked, "data(2)", runs=tmp_path)


class LossWithNet(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) + 0.01 * sum(
            each.pow(2).sum() for each in self.net.parameters()
        )


def test_loss_with_parameters(tmp_path: Path) -> None:
    """A loss that is a module is copied with its parameters.

    Earlier, the penalty was that of a copy that was never trained. Now such a loss is refused,
    unless its parameters are frozen.
    """
    net = nn.Linear(10, 4)
    with pytest.raises(
        pg.Refused, match=r"the loss holds parameters.*such as \(output, penalty\), or freeze"
    ):
        pg.train(
            make_job("loss of a net", lambda: net, VECTORS, loss=LossWithNet(net)), runs=tmp_path
        )
    frozen = LossWithNet(nn.Linear(10, 4).requires_grad_(False))
    assert_same_training(
        tmp_path,
        make_job("loss of a frozen net", lambda: nn.Linear(10, 4), VECTORS, loss=frozen),
        "data(2, micro=2)",
    )
