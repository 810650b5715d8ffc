"""data(n, state=shared_memory): every optimizer as in serial, its state on the host once, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality import VECTORS, job, mlp
from torch import nn

from paragrad import Job, Refused, parallelize, train
from paragrad.admission import admitted, backend_of
from paragrad.backends.shm.region import aligned
from paragrad.checkpoint import newest
from paragrad.data_parallel.shared_memory import SharedMemory
from paragrad.data_parallel.slices import ELEMENTWISE, FUSED, PER_TENSOR, slices
from paragrad.datasets.loading import parted
from paragrad.launched import cores
from paragrad.launching import Ranks
from paragrad.record import lines_of
from paragrad.settings import Settings
from paragrad.strategy import strategy
from paragrad.trainer import Trainer
from paragrad.verification import difference
from paragrad.world import World


class Lion(torch.optim.Optimizer):
    """An optimizer that this library has never heard of."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})                        # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:                                             # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(group["lr"] * torch.tanh(0.9 * momentum + 0.1 * parameter.grad))
                    momentum.lerp_(parameter.grad, 0.01)


class NormedSgd(torch.optim.SGD):
    """A subclass of an elementwise optimizer that looks at whole tensors: it must not be cut."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:                     # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-3)
        super().step()


def grouped(parameters: object) -> torch.optim.Optimizer:
    first, *others = parameters                                         # type: ignore[misc]
    return torch.optim.AdamW([{"params": others, "lr": 3e-3, "weight_decay": 0.1}, {"params": [first], "betas": (0.8, 0.9)}],
                             lr=1e-2, amsgrad=True)


OPTIMIZERS: dict[str, Callable[[object], torch.optim.Optimizer]] = {
    **{cls.__name__: lambda parameters, cls=cls: cls(parameters, lr=1e-2) for cls in ELEMENTWISE},          # type: ignore[misc]
    "SGD, Nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "RMSprop, centered": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5, centered=True),
    "groups": grouped,
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "Lion": lambda parameters: Lion(parameters, lr=1e-2),
    "normed SGD": lambda parameters: NormedSgd(parameters, lr=1e-2),
    "loop asked for": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=False),
}


def differences(world: World, jobs: list[Job]) -> dict[str, float]:
    resolved = strategy(f"data({world.size}, state=shared_memory)")
    return {each.name: difference(world, each, resolved, steps=8).value for each in jobs}


@pytest.mark.parametrize("size", [2, 3])
def test_every_optimizer_trains_as_in_serial(pool: Ranks, size: int) -> None:
    jobs = [job(name, mlp, VECTORS, optimizer=optimizer, clip_norm=0.5 if place % 2 else None)
            for place, (name, optimizer) in enumerate(OPTIMIZERS.items())]
    for name, value in pool.run(differences, jobs, size=size, backend="shm")[0].items():
        assert value < 1e-10, name


def test_slices_share_the_work() -> None:
    for ranks in (1, 2, 3, 7):
        lengths = [1000, 3, 0, 64 * 50, 77]
        pieces, because = slices(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), lengths, ranks)
        found = [place for rank in pieces for piece in rank for place in
                 ((piece.index, element) for element in range(piece.start, piece.stop))]
        assert found == [(index, element) for index, length in enumerate(lengths) for element in range(length)]
        counts = [sum(piece.stop - piece.start for piece in rank) for rank in pieces]
        assert max(counts) - min(counts) <= 2 * 64
        assert "element by element" in because
    pieces, because = slices(torch.optim.Adafactor([nn.Parameter(torch.ones(1))]), [5, 100, 60, 30], 2)
    assert [[piece.index for piece in rank] for rank in pieces] == [[1], [0, 2, 3]]
    assert "whole tensors" in because
    pieces, because = slices(Lion([nn.Parameter(torch.ones(1))], 1.0), [5, 100], 2)
    assert [[piece.index for piece in rank] for rank in pieces] == [[0, 1], []]
    assert "rank 0 updates everything" in because


def held(world: World, each: Job) -> tuple[int, int, int, set[int]]:
    """(bytes of the rows in use, elements of this rank's Adam state, of all parameters, storages of the parameters)."""
    trainer = Trainer.of_job(world, each, strategy(f"data({world.size}, state=shared_memory)"))
    for fetched in trainer.batches(each.train, each.batch, 0):          # type: ignore[arg-type]
        trainer.step(*parted(fetched))
    assert isinstance(trainer.exchange, SharedMemory)
    state = sum(value.numel() for values in trainer.optimizer.state.values() for value in values.values() if value.dim())
    found = (trainer.exchange.largest, state, sum(parameter.numel() for parameter in trainer.model.parameters()),
             {parameter.untyped_storage().nbytes() for parameter in trainer.model.parameters()})
    trainer.close()
    return found


def test_state_is_on_the_host_once(pool: Ranks) -> None:
    each = job("wide", lambda: nn.Sequential(nn.Linear(10, 300), nn.Linear(300, 4)), VECTORS,
               optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    found = pool.run(held, each, size=3, backend="shm")
    row, _, parameters, storages = found[0]
    assert sum(state for _, state, _, _ in found) == 2 * parameters         # two moments of everything, over all ranks
    assert row == sum(aligned(4 * length) for length in (3000, 300, 1200, 4))
    assert storages == {4 * length for length in (3000, 300, 1200, 4)}      # a storage each, as files of checkpoints want


@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "Adagrad", "groups", "Adafactor", "Lion"])
def test_resume_from_serial_and_back(tmp_path: Path, optimizer: str) -> None:
    """Saved in serial, gone on with in shared memory, saved there, gone on with in serial: as serial throughout."""
    each = job("there and back", mlp, VECTORS, optimizer=OPTIMIZERS[optimizer], dtype=torch.float64, epochs=3)
    whole = train(each, "serial", runs=tmp_path)
    first = train(each.replace(epochs=1), "serial", runs=tmp_path, save=1)
    second = train(each.replace(epochs=2), "data(2, state=shared_memory)", runs=tmp_path, resume=first.folder, save=1)
    third = train(each, "serial", runs=tmp_path, resume=second.folder)
    for name, wanted in whole.model().state_dict().items():
        torch.testing.assert_close(third.model().state_dict()[name], wanted, rtol=1e-10, atol=1e-13)
    for group in newest(second.folder).state["optimizer"]["groups"]:     # the kernels of a run are no part of the training
        assert group.get("fused") is None
        assert group.get("foreach") is None


def test_the_record_says_who_updates_what(tmp_path: Path) -> None:
    run = train(job("lion", mlp, VECTORS, optimizer=OPTIMIZERS["Lion"], epochs=1), "data(2)", runs=tmp_path)
    assert run.resolved == strategy("data(2, state=shared_memory)")
    choices = {line["what"]: line for path in ("run.jsonl", "rank-0.jsonl") for line in lines_of(run.folder / path, "span")
               if line["kind"] == "choice"}
    assert choices["state"]["picked"] == "shared_memory"
    assert "rank 0 updates everything" in choices["slices"]["because"]


def test_auto_tries_one_worker_too(tmp_path: Path) -> None:
    run = train(job("tried", mlp, VECTORS, epochs=1), "data(auto)", runs=tmp_path)
    choice = next(line for line in lines_of(run.folder / "run.jsonl") if line.get("what") == "strategy")
    candidates = [f"data({cores()}, state=shared_memory)", f"serial(threads={cores()})"]
    assert choice["picked"] == str(run.resolved)
    assert choice["picked"] in candidates
    assert all(f"{each} " in choice["because"] for each in candidates)


def test_on_several_hosts_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    each = job("far", mlp, VECTORS)
    assert backend_of(Settings(), 4) == "gloo"
    assert admitted(each, "data(4)").resolved == strategy("data(4, state=replicated)")
    with pytest.raises(Refused, match="2 of 4 ranks are on other hosts; leave out --backend"):
        backend_of(Settings(backend="shm"), 4)
    with pytest.raises(Refused, match="2 of 4 ranks are on other hosts; leave out state=shared_memory"):
        admitted(each, "data(4, state=shared_memory)")


def test_refused_in_a_loop_of_ones_own() -> None:
    model = mlp()
    with pytest.raises(Refused, match="in a loop of your own"), parallelize(
            model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), "data(1, state=shared_memory)"):
        pass


def test_refused_with_an_exchange() -> None:
    with pytest.raises(Refused, match="does not fit state=shared_memory"):
        strategy("data(2, reduce=ring, state=shared_memory)")


def test_lists_hold_what_torch_has() -> None:
    assert set(FUSED) <= set(ELEMENTWISE)
    assert torch.optim.Adafactor in PER_TENSOR
