"""The commands in README and docs work as they are written, in a fresh clone.

test_examples.py runs the commands of the examples.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import example_commands
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.story]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(
    r"^```(sh|console|python)\n(.*?)^```$|`(python -c \".+?\")`", re.MULTILINE | re.DOTALL
)


def can_import(code: str) -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
        ).returncode
        == 0
    )


# commands that this file does not run, by their first words, with the reason
ELSEWHERE = {
    "make test": "it is what CI runs beside this",
    "python3 -m venv": "installing is where CI begins",
    ".venv/bin/python -m pip install torch": "installing is where CI begins; the version is the "
    "pinned one (test_docs.py)",
    "GLOO_SOCKET_IFNAME=eth0 ": "two hosts; test_training_over_hosts.py types it on two",
    "torchrun --nnodes 2 ": "two hosts; test_training_over_hosts.py has them",
    "srun ": "it wants Slurm; test_launcher_env.py has its variables",
    "python benchmarks/ring_vs_tree.py": "it takes an hour and a half",
    ".venv/bin/paragrad compare mnist-mlp ": "nine trainings, minutes; test_comparison_page.py and "
    "test_cli.py have the options",
    ".venv/bin/paragrad train mnist-cnn ": "minutes; test_datasets.py trains the job, "
    "test_checkpoint.py has the options",
    ".venv/bin/paragrad compare shakespeare-gpt ": "ten minutes; test_pipeline_training.py and "
    "test_comparison_page.py have the strategies",
    "paragrad compare mnist-mlp ": "minutes for each training; test_equality_with_serial.py and "
    "test_verify.py have the strategies",
    "paragrad compare mnist-cnn ": "minutes; test_datasets.py trains the job",
    "paragrad compare shakespeare-lstm": "many minutes; test_datasets.py trains the job",
    'paragrad train digits --strategy "data(2, reduce=ring)" '
    "--inject-fault": "refused, as the page shows; a row of refused.md",
}
# what some commands need and not every machine has: a pattern that finds these commands, a
# function that tells whether this machine has it, and the reason for a skip
WANTS = {
    r"mnist|shakespeare": (
        lambda: "PARAGRAD_DATA" in os.environ,
        "PARAGRAD_DATA names no folder with the files of MNIST",
    ),
    r"mpirun": (
        lambda: shutil.which("mpirun") is not None,
        "mpirun is not installed (make system)",
    ),
    r"causal\.py": (
        lambda: can_import("from transformers import GPT2LMHeadModel"),
        "transformers is not installed (make zoo), or torchvision's build is not torch's",
    ),
}


LONG = {
    "work.md",
    "simulate.md",
    "own_all_reduce.md",
    "from_ddp.md",
    "resume.md",
    "timeline.md",
    "memory_budget.md",
    "halving.md",
    "butterfly.md",
    "two_level.md",
    "direct.md",
    "ring.md",
    "ring_async.md",
    "place.md",
    "double_tree.md",
    "tensor.md",
    "exact.md",
    "your_data.md",
    "spatial.md",
    "integrated.md",
    "branch.md",
}  # in `make table`


def list_steps(page: Path) -> list[tuple[str, str]]:
    """Return the files that a page shows, and its commands, in the order of the page.

    A file is a pair (name, text), and a command is a pair ("", command).
    """
    steps = []
    for kind, block, inline in FENCED.findall(page.read_text()):
        if kind == "python":
            named = re.match(r"# (\w+\.py)\n", block)
            steps += [(named.group(1), block)] if named else []
        elif kind == "console":
            steps += [("", line) for line in re.findall(r"^\$ (.+)$", block, re.MULTILINE)]
        else:
            steps += [("", line) for line in (inline or block).splitlines()]
    return steps


def remove_comment(command: str) -> str:
    return re.sub(r"\s{2,}#.*", "", command)


# test_examples.py runs them
IN_EXAMPLES = {remove_comment(line) for _, line in example_commands.COMMANDS}
COMMANDS = {page: [line for name, line in list_steps(page) if not name] for page in PAGES}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make a fresh clone that includes the changes that are not committed yet.

    Its .venv contains what `make` would install.
    """
    clone = tmp_path / "paragrad"
    if (ROOT / ".git").exists() and shutil.which("git"):
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        changed = subprocess.run(
            ["git", "diff", "--binary", "HEAD"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["git", "apply", "--allow-empty"], cwd=clone, input=changed, check=True)
    else:  # an unpacked sdist
        shutil.copytree(
            ROOT, clone, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info")
        )
    (clone / ".venv").mkdir()
    for each in Path(sys.prefix).iterdir():
        if each.name not in ("ready", "zoo"):
            (clone / ".venv" / each.name).symlink_to(each)
    # this file is newer than its sources, so make does not install again
    (clone / ".venv" / "ready").touch()
    return clone


@pytest.mark.timeout(900)  # a page is up to a dozen trainings
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.table if page.name in LONG else (), id=page.name)
        for page in PAGES
        if COMMANDS[page]
    ],
)
def test_page_commands_as_typed(page: Path, clone: Path) -> None:
    """Every command of a page ends with exit code 0, in the order of the page.

    The files that the page shows are saved in the same folder.
    """
    environment = {
        **os.environ,
        "PATH": f"{clone}/.venv/bin{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(clone / "src"),
        # in a container, the user is root
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    missed = set()
    for name, text in list_steps(page):
        if name:
            (clone / name).write_text(text)
            continue
        missing = {
            said for words, (here, said) in WANTS.items() if re.search(words, text) and not here()
        }
        missed |= missing
        if (
            missing
            or remove_comment(text) in IN_EXAMPLES
            or any(text.startswith(words) for words in ELSEWHERE)
        ):
            continue
        # timeout also ends the processes that the command has started
        words = ["timeout", "--kill-after=20", "300", "bash", "-c", text]
        typed = subprocess.run(
            words,
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert typed.returncode == 0, f"{text}\n{typed.stdout}\n{typed.stderr}"
    if missed:
        pytest.skip(f"some commands were not typed: {'; '.join(sorted(missed))}")


def test_every_exception_matches_a_command() -> None:
    """A row of the tables above that matches no command must be removed."""
    commands = [line for lines in COMMANDS.values() for line in lines]
    assert [
        words for words in ELSEWHERE if not any(line.startswith(words) for line in commands)
    ] == []
    assert [words for words in WANTS if not any(re.search(words, line) for line in commands)] == []


def test_commands_are_in_named_unindented_blocks() -> None:
    """Commands in an indented or unnamed block are refused, because no test would run them."""
    for page in PAGES:
        text = page.read_text()
        stray = re.findall(
            r"^(?:```\n| {4})(?:\$ "
            r")?(?:paragrad|python3?|torchrun|mpirun|pytest|make|\.venv/bin/\w+) .*",
            text,
            re.MULTILINE,
        )
        assert stray == [], page.name
