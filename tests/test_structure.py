"""The shape of the house: who may import what, and that nothing is without its row, its page
and its name.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from equality import (
    BRANCHED,
    CELLS,
    COMPRESSED,
    IN_PARTS,
    IN_PIECES,
    IN_ROUNDS,
    IN_WIDTH,
    JOBS,
    LOOSER,
    ROWS,
    SERIAL,
    WORKERS,
    covering,
)

import paragrad
from paragrad.strategies.compressors import COMPRESSORS
from paragrad.strategies.data import ALGORITHMS
from paragrad.strategies.table import STRATEGIES, strategy

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paragrad"
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path
    for path in SOURCE.rglob("*.py")
}

# who speaks to torch.distributed itself, beside its backends; everybody else speaks to World,
# Exchange or the wire
DISTRIBUTED = {
    "paragrad.world.world",
    "paragrad.world.joining",
    "paragrad.players.wire",
    # an engine of torch's own
    "paragrad.techniques.data_parallel.fully_sharded",
}
# without torch: what a rank does is a value there, not an act
PURE = (
    "paragrad.errors",
    "paragrad.notation",
    "paragrad.strategies",
    "paragrad.schedules",
    "paragrad.players.reading",
    "paragrad.players.walk",
    "paragrad.players.proof",
    "paragrad.players.draw",
    "paragrad.players.clock",
    "paragrad.players.work",
    "paragrad.players.machine",
    "paragrad.planner.price",
    "paragrad.planner.layers",
    "paragrad.planner.sequences",
    "paragrad.record.record",
    "paragrad.record.audit",
    "paragrad.record.rounds",
    "paragrad.record.noise_scale",
    "paragrad.record.seconds",
    "paragrad.world.launched",
    "paragrad.world.axes",
)
# each imports only from itself and those above it; docs/architecture.md says what each holds
ROOMS = (
    "notation",
    "world",
    "datasets",
    "schedules",
    "jobs",
    "record",
    "strategies",
    "players",
    "planner",
    "techniques",
    "training",
    "report",
    "verbs",
)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_lowest_versions_that_are_tried_are_the_lower_bounds() -> None:
    """typer >= 0.15.4 was never tried, and was too low. torch is tried at one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    (torch, *lowest), taken = (
        [line for line in (ROOT / name).read_text().splitlines() if "==" in line]
        for name in ("constraints-lowest.txt", "constraints.txt")
    )
    assert {line.replace("==", ">=") for line in lowest} == {
        each for each in ranges if not each.startswith("torch>")
    }
    assert torch in taken


def test_the_version_is_said_once_more_in_the_citation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_rooms_are_those_of_the_architecture() -> None:
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ROOMS)
    assert len(ROOMS) <= 13
    assert len(list(SOURCE.glob("*.py"))) <= 6
    told = re.findall(
        r"^\| `(\w+)/` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE
    )
    assert tuple(told) == ROOMS


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[1] in ROOMS])
def test_a_room_imports_from_itself_and_those_above_it(name: str) -> None:
    """Also inside functions, and for type checkers alone."""
    above = ROOMS[: ROOMS.index(name.split(".")[1]) + 1]
    for found in imports(MODULES[name]):
        if found.startswith("paragrad.") and found in MODULES | dict.fromkeys(
            f"paragrad.{room}" for room in ROOMS
        ):
            assert found.split(".")[1] in (*above, "errors", "version"), found


def test_no_two_files_import_each_other() -> None:
    """Two circles that once were: checkpoint and trainer, results and table. The first step's
    proof is the trainer's own: it knows it for type checkers.
    """
    users = {name: imports(path) & MODULES.keys() for name, path in MODULES.items()}
    circles = {
        frozenset((name, other))
        for name, found in users.items()
        for other in found
        if name in users[other]
    }
    trainer = "paragrad.training.trainer"
    assert circles == {
        frozenset((trainer, f"paragrad.training.first_step.{name}")) for name in ("start",)
    }


# words for a strategy in the code, and what only a strategy is called
STRATEGY = {"strategy", "resolved", "asked", "chosen", "candidate"}
NAMED = {
    "replicated",
    "shared_memory",
    "fully_sharded",
    *(cls.name for cls in (*STRATEGIES.values(), *ALGORITHMS, *COMPRESSORS)),
}


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name.split(".")[1] not in ("strategies", "techniques")]
)
def test_nobody_asks_what_strategy_it_is(name: str) -> None:
    """A strategy answers for itself: no question for its class or its name, beside its own
    rooms and what it is made of.
    """
    if name.split(".")[1] in ("notation", "schedules"):
        return
    tree = ast.parse(MODULES[name].read_text())
    own = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("paragrad.strategies")
        for alias in node.names
        if alias.name
        in {"Product", "Native", *(cls.__name__ for cls in (*STRATEGIES.values(), *COMPRESSORS))}
    }
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Compare | ast.Call | ast.Match) else ""
        if isinstance(node, ast.Match):
            assert not {*re.findall(r"\w+", ast.unparse(node.subject))} & STRATEGY, text
        elif isinstance(node, ast.Call) and text.startswith(("isinstance(", "issubclass(")):
            assert not {*re.findall(r"\w+", ast.unparse(node.args[1]))} & own, text
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            (".startswith", ".endswith")
        ):
            assert not any(
                isinstance(each, ast.Constant) and each.value in NAMED for each in ast.walk(node)
            ), text
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            assert not any(
                isinstance(side, ast.Constant) and side.value in NAMED for side in sides
            ), text
            asked = [
                each
                for side in sides
                for each in ast.walk(side)
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "type"
            ]
            assert not any({*re.findall(r"\w+", ast.unparse(call))} & STRATEGY for call in asked), (
                text
            )


def test_who_imports_torch_distributed() -> None:
    users = {
        name
        for name, path in MODULES.items()
        if any(found.startswith("torch.distributed") for found in imports(path))
    }
    assert {
        name for name in users if not name.startswith("paragrad.world.backends.")
    } == DISTRIBUTED


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith(PURE)])
def test_pure_rooms_know_the_standard_library_only(name: str) -> None:
    for found in imports(MODULES[name]):
        top = found.split(".")[0]
        assert (
            top in sys.stdlib_module_names
            or found.startswith(PURE)
            or found in ("paragrad", "__future__")
        ), found


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name.startswith("paragrad.schedules")]
)
def test_schedules_know_nothing_of_time_files_or_players(name: str) -> None:
    used = {found.split(".")[0] for found in imports(MODULES[name])}
    assert not used & {"time", "os", "pathlib", "random", "threading"}
    assert not any(found.startswith("paragrad.players") for found in imports(MODULES[name]))


def test_rank_variables_are_read_in_launched_alone() -> None:
    variable = re.compile(
        r"[\"']((LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
        r"|(OMPI|PMIX?|MPI|SLURM)_\w+)[\"']"
    )
    assert {name for name, path in MODULES.items() if variable.search(path.read_text())} == {
        "paragrad.world.launched"
    }


def test_all_is_what_is_exported() -> None:
    found = {name: getattr(paragrad, name) for name in dir(paragrad) if not name.startswith("_")}
    exported = {
        name
        for name, value in found.items()
        if not isinstance(value, ModuleType) or name in paragrad._MODULES
    }
    assert set(paragrad.__all__) == exported
    assert paragrad.__all__ == sorted(paragrad.__all__, key=lambda name: (name[0].islower(), name))


def test_public_names_are_found_where_type_checkers_are_told_they_are() -> None:
    told = {
        alias.name: node.module
        for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == {name: f"paragrad.{home}" for name, home in paragrad._HOMES.items()}
    assert set(told) == {*paragrad.__all__, "__version__"}


def test_importing_paragrad_and_starting_ranks_imports_no_torch() -> None:
    code = (
        "import sys, paragrad, paragrad.world.launching.processes; print('torch' in "
        "sys.modules, 'train' in dir(paragrad))"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split() == ["False", "True"]


def test_every_strategy_algorithm_and_compressor_has_rows_in_the_equality_table() -> None:
    texts = [row(2) for row in ROWS.values()] + list(SERIAL.values())
    texts += [text for text in (*IN_PARTS, *IN_WIDTH, *IN_PIECES, *BRANCHED) if "*" not in text]
    named = {strategy(text).name for text in texts} | {
        name for text in texts for name in re.findall(r"reduce=(\w+)", text)
    }
    looser = {strategy(text).name for text in (*LOOSER, *IN_ROUNDS) if "*" not in text}
    assert not any(strategy(text).exact for text in (*LOOSER, *IN_ROUNDS, *COMPRESSED))
    compressed = {
        found for text in (*texts, *COMPRESSED) for found in re.findall(r"compress=(\w+)", text)
    }
    assert named | looser | compressed == {
        cls.name for cls in (*STRATEGIES.values(), *ALGORITHMS, *COMPRESSORS)
    }


def test_the_covering_sample_covers() -> None:
    sample = covering()
    assert set(sample) <= set(CELLS)
    assert Counter(row for row, _, _ in sample) == dict.fromkeys(ROWS, 2)
    assert {column for _, column, _ in sample} == set(JOBS)
    assert {workers for _, _, workers in sample} == set(WORKERS)


def test_the_architecture_names_the_modules_there_are() -> None:
    """Of the rooms that list theirs one by one; the page was two techniques behind."""
    page = (ROOT / "docs/architecture.md").read_text()
    rows = {found[1]: found[0] for found in re.finditer(r"^\| `(\w+)/` \|.*$", page, re.M)}
    assert set(rows) == set(ROOMS)
    for room, row in rows.items():
        there = {path.name for path in (SOURCE / room).rglob("*.py")} - {"__init__.py"}
        named = set(re.findall(r"\w+\.py", row))
        assert named <= there
        # a backend with a page, the built-in jobs, drawings
        if room not in ("world", "jobs", "report", "verbs"):
            assert there <= named


def test_every_technique_has_its_page() -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {cls.name for cls in (*STRATEGIES.values(), *ALGORITHMS)} - pages == set()
    together = (ROOT / "docs/compression.md").read_text()
    assert {cls.name for cls in COMPRESSORS} <= set(re.findall(r"`(\w+)", together))
