"""Errors that earlier crashed, or ended a command without a clear message.

Now one message says what happened, where, and how to repair it.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from equality_table import JOBS, VECTORS, make_job, make_mlp
from torch import nn

import paragrad as pg
from paragrad.commands.cli import use_exit_codes
from paragrad.engine.probe import find_nonfinite_tensor
from paragrad.errors import RankFailed, StepFailed, iterate_causes
from paragrad.launch import Launcher
from paragrad.parallel.server.worker_exchange import WorkerExchange
from paragrad.record.record import Record
from paragrad.runtime.stragglers import explain_timeout
from paragrad.validation import memory_check
from paragrad.validation.inspect_job import inspect_job
from paragrad.validation.validate import validate_run

pytestmark = pytest.mark.processes

JOB_FILES = Path(__file__).parents[1] / "helpers" / "job_files"
SHORT = ("train", "digits", "--epochs", "1")


def run_command(
    *words: str, stdout: int | None = subprocess.PIPE, folder: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paragrad", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
        env={**os.environ, **settings},
    )


# ---- ranks, batches and models that do not fit -----------------------------------------------
MANY = make_job("many", make_mlp, VECTORS, batch=29)


def read_memory_refusal(left: int, strategy: str, job: pg.Job = MANY) -> str:
    with (
        mock.patch.object(memory_check, "read_available_memory", return_value=left),
        pytest.raises(pg.Refused) as caught,
    ):
        validate_run(job, strategy)
    return str(caught.value)


def test_more_ranks_than_memory_allows() -> None:
    """More ranks than the memory allows are refused.

    Earlier, data(1000) forked a thousand ranks and used all memory. The command ended with exit
    code 137 and without a message.
    """
    told = read_memory_refusal(10 * memory_check.PROCESS_BYTES, "data(20)")
    assert "data(20) needs at least " in told
    assert "20 processes of " in told
    assert told.endswith("at most 9 ranks fit")
    with mock.patch.object(
        memory_check, "read_available_memory", return_value=10 * memory_check.PROCESS_BYTES
    ):
        assert validate_run(MANY, "data(9)").size == 9


class Keeps(nn.Module):
    """A model that keeps 1 MB for backward for each sample, and 3 MB for any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10, 4))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        always = (self.scale * torch.ones(3 << 18)).exp().mean()
        wide = (x @ self.weight).repeat(1, 1 << 16)
        return wide.exp().unflatten(1, (1 << 16, 4)).mean(1) * always


def test_batch_that_does_not_fit() -> None:
    """Memory that does not depend on the number of samples is counted once, not per sample."""
    job = make_job("keeps", Keeps, VECTORS, batch=29)
    told = read_memory_refusal(memory_check.PROCESS_BYTES + (20 << 20), "serial", job)
    assert "that backward keeps of 29 samples" in told
    assert told.endswith(
        "the batch does not fit; make it smaller, or divide it into micro-batches (micro=2)"
    )
    with mock.patch.object(
        memory_check, "read_available_memory", return_value=memory_check.PROCESS_BYTES + (40 << 20)
    ):
        validate_run(job, "serial")
        validate_run(job, "data(1, micro=2)")


def test_pipeline_memory_is_counted_by_stage() -> None:
    """The memory check counts the activations of each stage of a pipeline.

    Earlier, it counted the activations of the whole model for each rank, and ignored recompute.
    """
    job = make_job(
        "wide",
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(10, 10), Wide(), nn.Linear(10, 10)) for _ in range(3)),
            nn.Linear(10, 4),
        ),
        VECTORS,
        batch=28,
    )
    sizes = []
    for row in ("gpipe", "one_f_one_b", "one_f_one_b, recompute=true"):
        told = read_memory_refusal(
            memory_check.PROCESS_BYTES, f"pipeline(2, micro=4, schedule={row}, cut=[4, 6])", job
        )
        sizes.append(
            int(
                re.search(
                    r"that backward keeps of (\d+) "
                    r"sample",
                    told,
                )[1]
            )
        )  # type: ignore[index]
    assert sizes == [28, 7, 7]


class Wide(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 1 << 12).tanh().unflatten(1, (1 << 12, 10)).mean(1)


def test_model_that_does_not_fit() -> None:
    assert read_memory_refusal(100, "serial").endswith(
        "the model does not fit; train a smaller one, or on a host with more memory"
    )


# ---- notices ---------------------------------------------------------------------------------
def test_batch_larger_than_the_dataset_is_noticed() -> None:
    """If the batch is larger than the dataset, a warning says so.

    Earlier, every step used all samples, but another batch size was printed.
    """
    with pytest.warns(UserWarning, match="the batch of 5000 is larger than the .* samples"):
        inspect_job(make_job("large", make_mlp, VECTORS, batch=5000))


def test_more_ranks_than_cores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning about too few cores points to the user's line.

    Earlier, it pointed to a line of Python's contextlib.
    """
    monkeypatch.setattr("paragrad.validation.validate.count_cores", lambda: 2)
    message = r"data\(3\) starts 3 ranks on 2 core\(s\): they take"
    with pytest.warns(UserWarning, match=message) as noticed:
        validate_run(make_job("many", make_mlp, VECTORS), "data(3)")
    assert [each.filename for each in noticed] == [__file__]


# ---- the parameters in the optimizer ---------------------------------------------------------
def test_parameters_missing_in_the_optimizer_are_named() -> None:
    job = make_job(
        "some",
        make_mlp,
        VECTORS,
        optimizer=lambda parameters: torch.optim.SGD(list(parameters)[2:], lr=0.1),
    )
    with pytest.warns(
        UserWarning,
        match=r"leaves out 2 trainable parameter\(s\), which stay as they are: 0\.weight, 0\.bias",
    ):
        inspect_job(job)
    twice = make_job(
        "twice",
        make_mlp,
        VECTORS,
        optimizer=lambda parameters: torch.optim.SGD(list(parameters) * 2, lr=0.1),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(pg.Refused, match=r"holds 4 parameter\(s\) twice; give each once"):
            inspect_job(twice)


# ---- messages --------------------------------------------------------------------------------
@pytest.mark.story
def test_dataset_error_is_named_with_its_line(tmp_path: Path) -> None:
    """An error of the dataset is reported with the sample and the user's line.

    Earlier, it came after 25 lines of paragrad's own code, and did not name the sample.
    """
    ran = run_command(
        "train",
        str(JOB_FILES / "own_dataset_raises.py"),
        "--strategy",
        "data(2)",
        "--runs",
        str(tmp_path),
    )
    assert ran.returncode == 1
    message = ran.stderr.strip().splitlines()[-1]
    assert " of the dataset raised IndexError: list index out of range (" in message
    assert "own_dataset_raises.py:19)" in message
    frames = [line for line in ran.stderr.splitlines() if line.startswith('  File "')]
    assert frames
    assert all("own_dataset_raises.py" in frame for frame in frames)


@pytest.mark.story
def test_job_file_error_keeps_its_line() -> None:
    ran = run_command("train", str(JOB_FILES / "raises.py"))
    assert ran.returncode == 2
    assert "raised RuntimeError: no such luck (" in ran.stderr
    assert "raises.py:" in ran.stderr.rpartition("no such luck")[2]


def test_unknown_settings_of_train_are_named() -> None:
    with pytest.raises(pg.Refused, match=r"no setting 'loader'; did you mean loaders\?"):
        pg.train(JOBS["mlp"], "serial", loader=1)


@pytest.mark.parametrize("name", ["a\0b", "x" * 101, "two\nlines"])
def test_invalid_folder_names_are_refused(name: str) -> None:
    with pytest.raises(pg.Refused, match="which can be the name of a folder"):
        inspect_job(JOBS["mlp"].replace(name=name))


def test_job_arguments_that_are_not_json(tmp_path: Path) -> None:
    run = pg.train(
        JOBS["mlp"].replace(arguments=(("path", tmp_path),), epochs=1), "serial", runs=tmp_path
    )
    assert run.header["job"]["arguments"] == {"path": str(tmp_path)}


@pytest.mark.table
def test_ascii_terminal(tmp_path: Path) -> None:
    """A terminal that can print only ASCII gets "+-" in a table with seeds.

    Earlier, the character ± raised an error after the whole training.
    """
    ran = run_command(
        "compare",
        "digits",
        "--strategies",
        "serial",
        "--seeds",
        "2",
        "--epochs",
        "1",
        "--runs",
        str(tmp_path),
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert ran.returncode == 0, ran.stderr
    assert "+-" in ran.stdout


@pytest.mark.story
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_full_disk_as_standard_output(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        ran = run_command(*SHORT, "--runs", str(tmp_path), stdout=full.fileno())
    assert ran.returncode == 1
    assert (
        ran.stderr.strip().splitlines()[-1]
        == "paragrad: what it prints: No space left on device; make room there"
    )


@pytest.mark.sample(3)
@pytest.mark.story
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    """A training succeeds if its standard streams are closed.

    Earlier, a traceback of flush was printed after the training, and the exit code was 1.
    """
    words = shlex.join(
        [sys.executable, "-m", "paragrad", *SHORT, "--strategy", "data(2)", "--runs", str(tmp_path)]
    )
    ran = subprocess.run(
        ["sh", "-c", f"exec {words} {closed}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ran.returncode, "Traceback" in ran.stderr) == (0, False)
    assert Record(next(tmp_path.iterdir())).finished


def test_failing_read_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input or output error without the name of a file is reported.

    Earlier, paragrad took it for a closed terminal. No message was printed, and the exit code was
    0.
    """
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(typer.Exit) as caught, use_exit_codes():
        raise OSError(errno.EIO, "Input/output error")
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == "paragrad: what it prints: Input/output error\n"


def run_in_namespaces(
    kinds: str, shell: str, *words: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a line of shell and then the command, in new Linux namespaces."""
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", kinds, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("namespaces of its own want root and the command unshare")
    ran = [sys.executable, "-m", "paragrad", *words, "--runs", str(folder)]
    return subprocess.run(
        ["unshare", kinds, "sh", "-c", f"{shell} && exec {shlex.join(ran)}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.table
def test_full_dev_shm_with_loaders(tmp_path: Path) -> None:
    """If /dev/shm is full, the message of a training with loaders names /dev/shm.

    Earlier, it said only that no space was left on a device. Ranks and batches do not use
    /dev/shm. Only the semaphores of the loaders need room there.
    """
    full = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    ran = run_in_namespaces(
        "-m", full, *SHORT, "--strategy", "data(2)", "--loaders", "1", folder=tmp_path
    )
    assert ran.returncode == 1
    message = ran.stderr.strip().splitlines()[-1]
    assert (
        ": /dev/shm is full, and loaders need room there for semaphores; make room there, or "
        "load without loaders" in message
    )
    ran = run_in_namespaces("-m", full, *SHORT, "--strategy", "data(2)", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    # batches of 4 MB; /dev/shm has room for a quarter of one
    large = tmp_path / "large.py"
    large.write_text(
        "import paragrad as pg, torch\nsamples = torch.utils.data.TensorDataset(torch.ones(64, "
        "65536), torch.zeros(64, 4))\njob = pg.Job(name='large', model=lambda: "
        "torch.nn.Linear(65536, 4), loss=torch.nn.functional.mse_loss,\n             "
        "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6), batch=16, epochs=1,\n "
        "            train=lambda folder: samples, collate=torch.utils.data.default_collate)\n"
    )
    ran = run_in_namespaces(
        "-m",
        "mount -t tmpfs -o size=1m tmpfs /dev/shm",
        "train",
        str(large),
        "--strategy",
        "data(2)",
        "--loaders",
        "1",
        folder=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.table
def test_disabled_loopback(tmp_path: Path) -> None:
    """If the loopback is down, gloo is refused with a clear message, and shared memory works.

    Earlier, the message of gloo named one of its own files and ended in "Unable to find address
    for: lo". Ranks that use shared memory need no address.
    """
    ran = run_in_namespaces(
        "-n", "true", *SHORT, "--strategy", "data(2)", "--backend", "gloo", folder=tmp_path
    )
    assert ran.returncode == 2
    assert (
        "the ranks of this host talk over its loopback, which is down (Network is unreachable); "
        "bring it up" in ran.stderr
    )
    ran = run_in_namespaces(
        "-n", "true", *SHORT, "--strategy", "data(2, reduce=ring)", folder=tmp_path
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.sample(2)
@pytest.mark.story
@pytest.mark.parametrize(
    ("strategy", "limit", "where"), [("serial", 1, "run.jsonl"), ("data(2)", 200, "shared memory")]
)
def test_file_size_limit(tmp_path: Path, strategy: str, limit: int, where: str) -> None:
    """The message names the limit of file sizes (`ulimit -f`).

    Earlier, it advised the user to start fewer ranks.
    """
    words = [
        sys.executable,
        "-m",
        "paragrad",
        *SHORT,
        "--strategy",
        strategy,
        "--runs",
        str(tmp_path),
    ]
    ran = subprocess.run(
        ["sh", "-c", f"ulimit -f {limit}; exec {shlex.join(words)}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 1
    message = ran.stderr.strip().splitlines()[-1]
    assert where in message
    assert message.endswith(
        "a process cannot write longer files here: raise the limit (ulimit -f unlimited)"
    )


@pytest.mark.story
def test_deleted_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    ran = subprocess.run(
        ["sh", "-c", f"cd {gone} && rmdir {gone} && exec {sys.executable} -m paragrad jobs"],
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 2
    assert (
        ran.stderr.strip()
        == "paragrad: the working directory was removed; change to one that is there"
    )


def test_dataset_that_holds_a_lock(tmp_path: Path) -> None:
    import threading

    class Locked(type(VECTORS)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(*VECTORS.tensors)
            self.lock = threading.Lock()

    job = JOBS["mlp"].replace(train=Locked())
    with pytest.raises(pg.Refused, match=r"train cannot be sent to the ranks .*lock"):
        pg.train(job, "data(2)", runs=tmp_path)


def test_too_many_ranks_are_refused_before_the_proof(tmp_path: Path) -> None:
    with (
        Launcher(1),
        mock.patch.object(memory_check, "read_available_memory", return_value=1 << 20),
        mock.patch(
            "paragrad.validation.validate.check_schedule",
            side_effect=AssertionError("it was proved"),
        ),
        pytest.raises(pg.Refused),
    ):
        validate_run(MANY, "data(29, reduce=ring)")


# ---- conveniences ----------------------------------------------------------------------------
@pytest.mark.story
def test_version_option() -> None:
    ran = run_command("--version")
    assert (ran.returncode, ran.stdout.strip()) == (0, f"paragrad {pg.__version__}")
    assert "Usage" in run_command("-h").stdout


def test_saved_model_has_default_file_permissions(tmp_path: Path) -> None:
    """Saved files have the permissions that the umask gives.

    Earlier, only the owner could read them, for every umask.
    """
    run = pg.train(JOBS["mlp"].replace(epochs=1), "serial", runs=tmp_path, save=3)
    (tmp_path / "new").touch()
    mode = (tmp_path / "new").stat().st_mode
    assert (run.folder / "model.safetensors").stat().st_mode == mode
    assert (run.folder / "checkpoint-00000003" / "optimizer.safetensors").stat().st_mode == mode


def test_notebook_shows_a_table(tmp_path: Path) -> None:
    table = pg.compare(JOBS["mlp"].replace(epochs=1), "serial; data(2)", runs=tmp_path)
    shown = table._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<td>data(2)</td>" in shown
    assert f"record: {table.folder}" in shown


@pytest.mark.story
def test_read_only_home_directory(tmp_path: Path) -> None:
    """A read-only home directory causes no warning.

    Earlier, matplotlib printed three lines about its cache before the table.
    """
    script = (
        "import paragrad.report.charts as charts\nwith charts.open_figure('x', 100, 100): "
        "print('drawn')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("XDG", "MPL"))
            },
            "HOME": "/dev/null",
        },
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "drawn\n", "")


TYPED = """
import paragrad as pg
from paragrad import Data, Ring
row: pg.Strategy = Data(3, reduce=Ring(), shares=[2, 1, 1])
"""


@pytest.mark.table
def test_user_file_is_typed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TYPED)
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "own.py")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout


def fail_to_import(*_: object) -> nn.Module:
    try:
        raise ImportError("operator torchvision::nms does not exist")
    except ImportError as error:
        raise RuntimeError(
            "Failed to import some.models.gpt2 (look up to see its traceback)"
        ) from error


def test_cause_of_a_chained_error_is_reported() -> None:
    """The message contains the first cause of a chained error.

    Earlier, an error of a model of transformers said "look up to see its traceback", but no
    traceback was printed.
    """
    with pytest.raises(
        pg.Refused,
        match=r"model raised RuntimeError: Failed to import some.models.gpt2 .* \(first cause: "
        r"ImportError: operator torchvision::nms does not exist\) \(.*test_error_messages.py:",
    ):
        validate_run(MANY.replace(model=fail_to_import), "serial")


def test_error_that_is_its_own_cause_ends_the_search() -> None:
    """The search for the first cause was endless: a worker hung when a server had been killed."""

    def raise_from_itself() -> None:
        error = ValueError("a circle")
        other = KeyError("x")
        other.__cause__ = error
        raise error from other

    with pytest.raises(ValueError, match="a circle") as caught:
        raise_from_itself()
    failure = RankFailed.wrap_error(caught.value, rank=1)
    assert "a circle" in str(failure)
    assert "Traceback" in failure.user_traceback
    alone = ValueError("alone")
    alone.__cause__ = alone
    assert list(iterate_causes(alone)) == [alone]
    assert "alone" in str(StepFailed.wrap_error(alone))


def test_worker_that_waits_for_a_dead_one_raises_no_circle() -> None:
    exchange: Any = mock.Mock()
    exchange.worker_world.barrier.side_effect = RuntimeError("closed")
    exchange.find_cause.side_effect = lambda error: error
    with pytest.raises(RuntimeError, match="closed") as caught:
        WorkerExchange._wait_for_workers(exchange)
    assert caught.value.__cause__ is None
    exchange.find_cause.side_effect = lambda error: StepFailed("server 0 ended")
    with pytest.raises(StepFailed, match="server 0 ended") as named:
        WorkerExchange._wait_for_workers(exchange)
    assert isinstance(named.value.__cause__, RuntimeError)


def test_timeout_is_reported_with_its_purpose() -> None:
    """A timeout is explained by what the other rank does. Other errors get no such advice.

    Earlier, if rank 0 was killed during the reference step, the other ranks advised a longer
    timeout.
    """
    with pytest.raises(
        StepFailed,
        match=r"Timed out waiting 20000ms.*; meanwhile rank 0 sleeps: if that takes longer than "
        r"ranks wait for each other, give a longer --timeout, or none",
    ):
        raise_while_waiting("Timed out waiting 20000ms for recv operation to complete")
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
        raise_while_waiting("Connection closed by peer")


def test_failing_step_names_step_and_tensor() -> None:
    """The message of a failing step names the step and the tensor.

    Earlier, in the user's own loop, "it has a hook" did not say which tensor has the hook.
    """
    assert (
        str(pg.StepFailed("it has a hook", step=3, tensor="0.weight"))
        == "step 3, tensor 0.weight: it has a hook"
    )
    assert str(StepFailed.wrap_error(StepFailed("no", tensor="w"), 5)) == "step 5, tensor w: no"
    assert str(StepFailed("no")) == "no"


def test_search_for_non_finite_values_keeps_modes() -> None:
    """The search for non-finite values does not change the mode of any module.

    Earlier, a batch norm that was frozen by eval() was in training mode afterwards.
    """
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4).eval(), nn.Dropout())
    nn.init.constant_(model[0].weight, 1e38)  # type: ignore[arg-type]
    assert find_nonfinite_tensor(model, torch.full((2, 10), 10.0), None) == "output of 0"
    assert [each.training for each in model] == [True, False, True]


def raise_while_waiting(told: str) -> None:
    with explain_timeout("rank 0 sleeps", ", or none"):
        raise RuntimeError(told)
