"""The structure of the package: which module may import which, and the size of its parts.

Also, every strategy has rows in the equality table and a page.
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
from equality_table import (
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
    select_covering_cells,
)

import paragrad
from paragrad.strategies.compressors import Compressor
from paragrad.strategies.registry import AllReduce, Strategy, strategy

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paragrad"
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path
    for path in SOURCE.rglob("*.py")
}

# only the built-in members, because other tests in this process may have defined more
STRATEGIES, ALL_REDUCES, COMPRESSORS = (
    [cls for cls in family.members.values() if cls.__module__ in MODULES]
    for family in (Strategy, AllReduce, Compressor)
)

# The modules that may import torch.distributed, besides the backends in shm. All other modules
# use World, Exchange or the transport.
DISTRIBUTED = {
    "paragrad.runtime.world",
    "paragrad.runtime.rendezvous",
    # the default group that user code sees
    "paragrad.runtime.single_group",
    "paragrad.executors.transport",
    # torch's own engine (FSDP2)
    "paragrad.parallel.data.fully_sharded",
}
# modules without torch: they describe what a rank does, as values
PURE = (
    "paragrad.errors",
    "paragrad.notation",
    "paragrad.strategies",
    "paragrad.schedules",
    "paragrad.executors.program_reader",
    "paragrad.executors.interpreter",
    "paragrad.executors.proof",
    "paragrad.executors.text_drawing",
    "paragrad.executors.clock",
    "paragrad.executors.work_depth",
    "paragrad.executors.machine",
    "paragrad.planner.cost_formulas",
    "paragrad.planner.layer_costs",
    "paragrad.planner.sequence_costs",
    "paragrad.record.record",
    "paragrad.record.sample_count",
    "paragrad.record.round_counts",
    "paragrad.record.noise_scale",
    "paragrad.record.step_times",
    "paragrad.runtime.launcher_env",
    "paragrad.runtime.mesh",
)
# Each package imports only from itself and from those above it in this list.
# docs/developers/architecture.md says what each contains.
PACKAGES = (
    "notation",
    "record",
    "shm",
    "runtime",
    "launch",
    "schedules",
    "strategies",
    "datasets",
    "jobs",
    "optim",
    "executors",
    "planner",
    "engine",
    "parallel",
    "trainer",
    "validation",
    "loops",
    "report",
    "commands",
)
# the folders of parallel/, in the same order
FAMILIES = (
    "registry",
    "sharding",
    "tracing",
    "compression",
    "data",
    "averaging",
    "server",
    "tensor",
    "spatial",
    "branch",
    "pipeline",
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


def test_tested_lowest_versions_are_the_lower_bounds() -> None:
    """The lower bounds of all requirements are the lowest versions that are tested.

    Earlier, the bound typer >= 0.15.4 was never tested, and it was too low. torch is tested at
    one version.
    """
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


def test_citation_has_the_package_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_packages_are_the_listed_ones() -> None:
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(PACKAGES)
    assert {path.stem for path in (SOURCE / "parallel").iterdir()} - {
        "__init__",
        "__pycache__",
    } == {*FAMILIES}


def level(name: str) -> tuple[int, int]:
    """Return the level of a module; it may not import from a higher level."""
    _, package, *rest = name.split(".")
    return PACKAGES.index(package), FAMILIES.index(rest[0]) if package == "parallel" and rest else 0


def test_imports_go_in_one_direction() -> None:
    """A module imports from no higher level, also in functions and for type checkers."""
    for name in MODULES:
        if name.split(".")[1] in PACKAGES:
            for found in imports(MODULES[name]) & MODULES.keys():
                if found.split(".")[1] in PACKAGES:
                    assert level(found) <= level(name), f"{name} imports {found}"


def test_imports_form_no_circle() -> None:
    """Imports form no circle of any length.

    Earlier there were two circles: checkpoint and trainer, results and table.
    """
    users = {name: imports(path) & MODULES.keys() for name, path in MODULES.items()}
    while free := [name for name, found in users.items() if not found & users.keys()]:
        users = {name: found for name, found in users.items() if name not in free}
    circle = {name for name in users if any(name in users[other] for other in users)}
    assert not circle


# ---- the trainer -----------------------------------------------------------------------------
TRAINER_CLASSES = {
    (name, node.name): node
    for name, path in MODULES.items()
    if name.startswith("paragrad.trainer")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
}
# The classes of which a trainer consists. The fields of the values that they hold count too.
PARTS = {
    "TrainerOptions",
    "Setup",
    "TrainingState",
    "StepObserver",
    "StepChecker",
    "PaceObserver",
    "NoiseObserver",
    "RecordObserver",
    "LifeObserver",
}


def list_attributes(node: ast.ClassDef) -> dict[str, str]:
    """List the attributes of a class that are set on an object, with their annotations."""
    found = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            found[ast.unparse(each.target)] = ast.unparse(each.annotation)
        for part in ast.walk(each) if isinstance(each, ast.FunctionDef) else ():
            targets = part.targets if isinstance(part, ast.Assign) else []
            annotation = ""
            if isinstance(part, ast.AnnAssign):
                targets, annotation = [part.target], ast.unparse(part.annotation)
            for target in targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                        found.setdefault(one.attr, annotation)
    return found


def is_frozen_value(node: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(each) for each in node.decorator_list)


@pytest.mark.parametrize("key", TRAINER_CLASSES, ids=lambda key: ".".join(key))
def test_trainer_classes_have_at_most_fifteen_attributes(key: tuple[str, str]) -> None:
    values = {name: node for (_, name), node in TRAINER_CLASSES.items() if is_frozen_value(node)}
    attributes = list_attributes(TRAINER_CLASSES[key])
    nested = (
        []
        if key[1] not in PARTS
        else [
            field
            for annotation in attributes.values()
            for name in values.keys() & {*re.findall(r"\w+", annotation)}
            for field in list_attributes(values[name])
        ]
    )
    if key != ("paragrad.trainer.settings", "Settings"):  # the settings that a user types
        assert len(attributes) + len(nested) <= 15, (attributes, nested)


def test_trainer_functions_have_at_most_eight_parameters() -> None:
    for name, path in MODULES.items():
        if name.startswith("paragrad.trainer"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                    counted = [each.arg for each in arguments if each.arg not in ("self", "cls")]
                    assert len(counted) <= 8, f"{name}.{node.name}: {counted}"


# attributes that torch's objects have too
OF_TORCH = {"grad", "data", "state", "training", "batch_norm", "instance_norm", "forward"}


def test_attributes_are_assigned_inside_their_class() -> None:
    """Attributes are assigned only in their class, in `engine` and in packages after `parallel`.

    Attributes of torch's objects do not count: a torch optimizer has no method to set its flag.
    """
    own = {
        attribute
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for attribute in list_attributes(node)
    } - OF_TORCH
    folders = {"engine", *PACKAGES[PACKAGES.index("parallel") + 1 :]}
    for name, path in MODULES.items():
        if name.split(".")[1] not in folders:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            for target in targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Attribute) and one.attr in own:
                        assert ast.unparse(one.value) in ("self", "cls", "ctx"), (
                            f"{name}:{node.lineno} {ast.unparse(one)}"
                        )


# variables that hold a strategy in the code, and names that only strategies have
STRATEGY = {"strategy", "resolved", "asked", "chosen", "candidate"}
NAMED = {
    "replicated",
    "shared_memory",
    "fully_sharded",
    *(cls.name for cls in (*STRATEGIES, *ALL_REDUCES, *COMPRESSORS)),
}


def test_no_module_queries_the_strategy_class() -> None:
    """No module asks for the class or the name of a strategy.

    Exceptions are the packages of strategies, and of the parts of which strategies consist.
    """
    for name in MODULES:
        package = name.split(".")[1]
        if package not in ("strategies", "engine", "parallel", "notation", "schedules"):
            check_strategy_queries(name)


def check_strategy_queries(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text())
    own = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("paragrad.strategies")
        for alias in node.names
        if alias.name
        in {"Product", "Native", *(cls.__name__ for cls in (*STRATEGIES, *COMPRESSORS))}
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


def test_only_listed_modules_import_torch_distributed() -> None:
    users = {
        name
        for name, path in MODULES.items()
        if any(found.startswith("torch.distributed") for found in imports(path))
    }
    assert {name for name in users if not name.startswith("paragrad.shm.")} == DISTRIBUTED


def test_pure_packages_import_the_standard_library_only() -> None:
    for name in MODULES:
        for found in imports(MODULES[name]) if name.startswith(PURE) else ():
            top = found.split(".")[0]
            assert (
                top in sys.stdlib_module_names
                or found.startswith(PURE)
                or found in ("paragrad", "__future__")
            ), f"{name} imports {found}"


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name.startswith("paragrad.schedules")]
)
def test_schedules_import_no_time_files_or_executors(name: str) -> None:
    used = {found.split(".")[0] for found in imports(MODULES[name])}
    assert not used & {"time", "os", "pathlib", "random", "threading"}
    assert not any(found.startswith("paragrad.executors") for found in imports(MODULES[name]))


def test_rank_variables_are_read_in_launcher_env_only() -> None:
    variable = re.compile(
        r"[\"']((LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
        r"|(OMPI|PMIX?|MPI|SLURM)_\w+)[\"']"
    )
    assert {name for name, path in MODULES.items() if variable.search(path.read_text())} == {
        "paragrad.runtime.launcher_env"
    }


def test_all_lists_the_exported_names() -> None:
    found = {name: getattr(paragrad, name) for name in dir(paragrad) if not name.startswith("_")}
    exported = {
        name
        for name, value in found.items()
        if not isinstance(value, ModuleType) or name in paragrad._MODULES
    }
    assert set(paragrad.__all__) == exported
    assert paragrad.__all__ == sorted(paragrad.__all__, key=lambda name: (name[0].islower(), name))


def test_public_names_match_the_type_checking_imports() -> None:
    told = {
        alias.name: node.module
        for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"paragrad.{home}" for name, home in paragrad._HOMES.items()}
    assert told == homes | dict.fromkeys(paragrad._MODULES, "paragrad")
    assert set(told) == {*paragrad.__all__, "__version__"}


def test_importing_paragrad_imports_no_torch() -> None:
    code = (
        "import sys, paragrad, paragrad.launch.processes; print('torch' in sys.modules, 'train' "
        "in dir(paragrad))"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split() == ["False", "True"]


def test_every_choice_has_rows_in_the_equality_table() -> None:
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
        cls.name for cls in (*STRATEGIES, *ALL_REDUCES, *COMPRESSORS)
    }


def test_covering_sample_covers_the_table() -> None:
    sample = select_covering_cells()
    assert set(sample) <= set(CELLS)
    assert Counter(row for row, _, _ in sample) == dict.fromkeys(ROWS, 2)
    assert {column for _, column, _ in sample} == set(JOBS)
    assert {workers for _, _, workers in sample} == set(WORKERS)


def test_every_strategy_and_algorithm_has_a_page() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "techniques").glob("*.md")}
    assert {cls.name for cls in (*STRATEGIES, *ALL_REDUCES)} - pages == set()
    together = (ROOT / "docs/techniques/compression.md").read_text()
    assert {cls.name for cls in COMPRESSORS} <= set(re.findall(r"`(\w+)", together))


def test_every_test_file_states_its_cost() -> None:
    """`make` selects tests by these marks, so a test without a mark would never run."""
    costs = r"pytest\.mark\.(pure|processes|network|zoo|gpu)\b"
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        stated = re.findall(rf"^pytestmark = (?:\[\s*)?{costs}", text, re.MULTILINE)
        assert len(stated) == 1, f"{path}: its pytestmark begins with a cost, such as mark.pure"
        # `make zoo` finds its tests by their folder
        assert (stated == ["zoo"]) == (path.parent.name == "zoo"), path
        assert stated == re.findall(costs, text), f"{path}: one cost for all tests of a file"
