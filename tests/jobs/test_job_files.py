"""A job file's top level runs in every rank, as an import does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paragrad as pg
from paragrad.jobs.find_job import find_job
from paragrad.launch import job_files

pytestmark = pytest.mark.processes

DATA = """
import torch, paragrad as pg
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(24, 5, generator=generator), torch.randint(3, (24,),
        generator=generator))

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

settings = dict(name="filed", loss=nn.functional.cross_entropy, optimizer=sgd, train=data,
        batch=8, epochs=1, seed=3)
"""


def write_job_file(folder: Path, text: str, name: str = "filed.py") -> str:
    path = folder / name
    path.write_text(DATA + text)
    return str(path)


def test_registrations_of_a_job_file_reach_the_ranks(tmp_path: Path) -> None:
    """Earlier, ranks got the functions of a job file by value and never ran the file.

    So two things were missing in ranks. One is an operator that the file registers with torch. The
    other is an entry that it makes in the table of another module.
    """
    (tmp_path / "table_of_models.py").write_text("MODELS = {}\n")
    job = find_job(
        write_job_file(
            tmp_path,
            f"""
import table_of_models

class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * torch.ops.filed_{tmp_path.name.replace("-", "_")}.same(super().forward(x))

table_of_models.MODELS["doubled"] = Doubled

@torch.library.custom_op("filed_{tmp_path.name.replace("-", "_")}::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

same.register_autograd(lambda context, gradient: gradient)
built_by_lambda = pg.Job(model=lambda: __import__("table_of_models").MODELS["doubled"](5, 3),
        **settings)
""",
        )
        + ":built_by_lambda"
    )
    assert pg.verify(job, "data(2)", runs=tmp_path).same
    assert len(pg.train(job, "data(2, reduce=ring)", runs=tmp_path).losses) == 3


def test_unpicklable_object_is_named_with_a_repair(
    tmp_path: Path,
) -> None:
    """Earlier, a loss that cannot be pickled gave a traceback and no more.

    Such a loss may be scripted ("PickleError: ScriptFunction cannot be pickled"), or hold a lock.
    """
    path = write_job_file(
        tmp_path,
        """
import threading

class Locked:
    def __init__(self):
        self.held = threading.Lock()

    def __call__(self, output, target):
        with self.held:
            return nn.functional.cross_entropy(output, target)

settings["model"] = lambda: nn.Linear(5, 3)
own = Locked()
sent = pg.Job(**{**settings, "loss": own})
around = pg.Job(**{**settings, "loss": lambda output, target: own(output, target)})
""",
    )
    with pytest.raises(
        pg.Refused,
        match=r"^loss cannot be sent to the ranks \(TypeError: cannot pickle .* object\); "
        "put the job into a file and a function around it there",
    ):
        pg.train(find_job(f"{path}:sent"), "data(2)", runs=tmp_path)
    assert len(pg.train(find_job(f"{path}:around"), "data(2)", runs=tmp_path).losses) == 3


def test_registered_classes_are_equal_in_ranks(tmp_path: Path) -> None:
    """Earlier, a class that was sent by value was another class in each rank.

    For example, the Auto classes of transformers look up the class of a configuration.
    """
    (tmp_path / "table_of_configs.py").write_text("BUILDERS = {}\n")
    job = find_job(
        write_job_file(
            tmp_path,
            """
import table_of_configs

class Config:
    classes = 3

table_of_configs.BUILDERS[Config] = lambda config: nn.Linear(5, config.classes)

def job():
    config = Config()
    return pg.Job(model=lambda: table_of_configs.BUILDERS[type(config)](config), **settings)
""",
        )
        + ":job"
    )
    assert len(pg.train(job, "data(2)", runs=tmp_path).losses) == 3


def test_default_dtype_reaches_the_ranks(tmp_path: Path) -> None:
    """Earlier, torch.set_default_dtype at the top level had an effect in the launcher only.

    Now the default type is sent with every task.
    """
    before = torch.get_default_dtype()
    try:
        job = find_job(
            write_job_file(
                tmp_path,
                """
torch.set_default_dtype(torch.float64)

class Net(nn.Linear):
    def forward(self, x):
        assert torch.zeros(()).dtype == torch.float64
        return super().forward(x)

job = pg.Job(model=lambda: Net(5, 3), dtype=torch.float64, **settings)
""",
            )
        )
        assert len(pg.train(job, "data(2)", runs=tmp_path).losses) == 3
    finally:
        torch.set_default_dtype(before)


def test_functions_of_a_job_file_share_their_globals(tmp_path: Path) -> None:
    """A named function and a lambda of the same file share its globals.

    Numbers that the file draws at its top level are the same on all ranks. If a function changed a
    global after the file was run, the new value is sent.
    """
    job = find_job(
        write_job_file(
            tmp_path,
            """
width, held = 3, []
scale = torch.rand(5)

class Net(nn.Linear):
    def __init__(self):
        super().__init__(5, width)

    def forward(self, x):
        return super().forward(x * scale)

def model():
    held[:] = [Net()]
    return held[0]

def job():
    global width
    width = 4
    penalty = lambda output, target: (
        nn.functional.cross_entropy(output, target) + 0.1 * held[0].weight.pow(2).sum())
    return pg.Job(model=model, **{**settings, "loss": penalty})
""",
        )
        + ":job"
    )
    (serial, split) = (pg.train(job, strategy, runs=tmp_path) for strategy in ("serial", "data(2)"))
    assert serial.losses == pytest.approx(split.losses, rel=1e-5)
    weights = [run.model().state_dict()["weight"] for run in (serial, split)]
    assert weights[0].shape == (4, 5)
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-6)


def test_edited_job_file_is_not_mixed_with_the_old(tmp_path: Path) -> None:
    place = write_job_file(tmp_path, "job = pg.Job(model=lambda: nn.Linear(5, 3), **settings)\n")
    first = find_job(place)
    second = find_job(
        write_job_file(tmp_path, "job = pg.Job(model=lambda: nn.Linear(5, 7), **settings)\n")
    )
    Path(place).write_text("raise RuntimeError('half written')\n")
    shapes = [
        pg.train(each, "data(2)", runs=tmp_path).model().state_dict()["weight"].shape
        for each in (first, second)
    ]
    assert shapes == [(3, 5), (7, 5)]


def test_module_attribute_job_imports_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, for a job `module:attribute` with lambdas only, ranks did not import the module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "table_of_layers.py").write_text("LAYERS = {}\n")
    write_job_file(
        tmp_path,
        """
import table_of_layers
table_of_layers.LAYERS["plain"] = nn.Linear
job = pg.Job(model=lambda: __import__("table_of_layers").LAYERS["plain"](5, 3),
             **{**settings, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)})
""",
        "filed_module.py",
    )
    assert len(pg.train(find_job("filed_module:job"), "data(2)", runs=tmp_path).losses) == 3


UNGUARDED = """
job = pg.Job(model=lambda: nn.Linear(5, 3), **settings)
print("at the top")
pg.train(job, "data(2)")
"""


@pytest.mark.table
def test_training_at_top_level_is_refused_by_the_command(
    tmp_path: Path,
) -> None:
    """Earlier, `paragrad train script.py` trained by the script's own call, and then again."""
    path = write_job_file(tmp_path, UNGUARDED)
    for words, code, told in (
        (["-m", "paragrad", "train", path], 2, "filed.py trains at its top level"),
        ([path], 0, ""),
    ):
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stderr
        assert told in done.stderr
        assert done.stdout.count("at the top") == 1
        assert "at the top" not in done.stderr


@pytest.mark.story
def test_guarded_script_is_a_job_file_that_prints_once(tmp_path: Path) -> None:
    text = UNGUARDED.replace("pg.train(", 'if __name__ == "__main__":\n    pg.train(')
    words = ["-m", "paragrad", "train", write_job_file(tmp_path, text), "--strategy", "data(2)"]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("at the top") == 1


def test_short_module_name_does_not_match_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, after a job `level:job`, every task with "level" in it was sent with that module.

    An example is two_level. Ranks import the module by its name, and may no longer find it.
    """
    write_job_file(tmp_path, "job = pg.Job(model=lambda: nn.Linear(5, 3), **settings)", "level.py")
    monkeypatch.syspath_prepend(tmp_path)
    found = find_job("level:job")
    assert [file.name for file in job_files.pickle_task(found)[1]] == ["level"]
    assert job_files.pickle_task(("a level", "two_level", pg.TwoLevel))[1] == ()
