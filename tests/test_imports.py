"""The shape of the tree: which way imports point, how folders are filled, and that light modules stay light."""

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from helpers.paths import ROOT

PACKAGES = {
    "areal_q": {"areal_q"},
    "buffer": {"areal_q", "buffer"},
    "rollout": {"areal_q", "buffer", "rollout"},
    "learner": {"areal_q", "buffer", "learner"},
}
"""Each package and the packages that it may import"""
LAYERS = {
    "areal_q": (
        {"errors", "decode_errors"},
        {"plugins"},
        {"config", "kernels"},
        {"messages"},
        {"algorithms", "evaluation", "quant"},
        {"linear", "weights"},
        # Everything above this line computes; from here on there are files, processes and sockets.
        {"system"},
        {"sandbox"},
        {"tasks"},
        {"models", "observability"},
        {"checks"},
        {"plan", "runner"},
        {"api", "cli", "launch"},
        {"__main__"},
    ),
    "buffer": (
        {"interface", "logs", "weight_sync"},
        {"redis_store", "report", "sampling"},
        {"admin"},
        {"__main__"},
    ),
    "rollout": (
        {"engines", "loop_lag"},
        {"reply_formats"},
        {"environments"},
        {"openai_server", "worker"},
        {"build"},
        {"commands", "evaluation"},
        {"api"},
        {"__main__"},
    ),
    "learner": (
        {"arithmetic", "data", "optim", "publishing"},
        {"backends", "heldout_eval", "policy_advantages"},
        {"measure"},
        {"policy_update", "teacher"},
        {"checkpoint", "supervised", "train_step"},
        {"build_policy", "loop", "multi_process", "replay"},
        {"api", "build", "doctor", "final_export"},
        {"sft"},
        {"__main__"},
    ),
}
"""The subpackages and modules of each package, lowest first; each may import those of the rows before its own.
docs/architecture.md draws it."""
HEAVY = ("torch", "zmq", "vllm", "transformers", "matplotlib", "redis")
RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}

MOST_MODULES = 12
"""In one folder, not counting __init__.py"""
FULLER: dict[str, str] = {}
"""Folders that may hold more, each with its reason"""
STAND_INS = "tests/sglang_cpu"
"""Modules there replace those of libraries, so they have their names"""
NAMES_THAT_OCCUR_TWICE = {
    "areal_q/cli": "the command of its subpackage: plan, launch",
    "areal_q/registry": "the dict of what its subpackage offers: FORMATS, TASKS",
    "rollout/base": "the Protocol of its subpackage: Engine, Environment",
    "learner/build": "builds the learner, its optimizer, or a supervised run",
    "learner/cli": "the command of its subpackage: replay, doctor, sft",
    "learner/tables": "what the command of its subpackage prints",
    "learner/critic": "the critic of torch's backends, and Megatron's",
    "bench/report": "the command that writes its bench's table",
    "bench/run": "one run of its bench",
}
"""Package and name of the modules that occur in several folders of it, each with its reason"""


def module_name(path: str) -> str:
    """Returns "a.b" for "a/b.py" and "a" for "a/__init__.py"."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_by(source: str, modules: Iterable[str] = ()) -> set[str]:
    """Full names of everything imported anywhere in a module, inside functions included.

    `from a import b` is "a.b" if that is one of `modules`, else "a". A relative import gives ".".
    """
    known, names = set(modules), set()
    for module, imported in statements(source):
        full = {f"{module}.{name}" for name in imported}
        names |= full & known or {module}
        names |= {module} if full - known else set()
    return names


@cache
def statements(source: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the module and the names of each import; a relative one is of "."."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append((".", ()) if node.level else (str(node.module), names))
    return tuple(found)


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns the modules of `sources` (path: text), each with those of them that it imports."""
    modules = {module_name(path): source for path, source in sources.items()}
    return {name: imported_by(source, modules) & {*modules} for name, source in modules.items()}


def upward_imports(sources: Mapping[str, str], layers: tuple[set[str], ...]) -> list[str]:
    """Returns the imports of one package that do not lead to a lower layer, and the parts that have none."""
    level = {part: number for number, parts in enumerate(layers) for part in parts}
    wrong = {part_of(path) for path in sources} - {*level} - {""}
    found = [f"{part} is in no layer" for part in sorted(wrong)]
    for module, imported in import_graph(sources).items():
        for target in sorted(imported):
            here, there = part_of(module), part_of(target)
            known = here in level and there in level and here != there
            if known and level[there] >= level[here]:
                found.append(f"{module} imports {target}")
    return found


def part_of(path: str) -> str:
    """Returns the subpackage or module that a path or a module belongs to in its package; "" for the package
    itself."""
    return [*module_name(path).split("."), ""][1]


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Returns the sets of modules that import each other in a circle."""
    reached = {module: reachable(graph, module) for module in graph}
    found = {frozenset(m for m in reached[module] if module in reached[m]) for module in graph}
    return [set(circle) for circle in found if circle]


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Returns every module that `start` imports, directly or through others."""
    seen: set[str] = set()
    to_do = [*graph[start]]
    while to_do:
        module = to_do.pop()
        if module not in seen:
            seen.add(module)
            to_do += graph[module]
    return seen


def crowded(paths: Iterable[str], most: int = MOST_MODULES) -> dict[str, int]:
    """Returns the folders of more than `most` modules."""
    counts: dict[str, int] = defaultdict(int)
    for path in paths:
        counts[str(Path(path).parent)] += not path.endswith("__init__.py")
    return {folder: count for folder, count in counts.items() if count > most}


def occurring_twice(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns "package/name" of the modules whose name occurs in several folders of their package."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths):
        if not path.endswith(("__init__.py", "__main__.py")):
            folders[f"{path.split('/')[0]}/{Path(path).stem}"].append(path)
    return {name: found for name, found in folders.items() if len(found) > 1}


def named_after(paths: Iterable[str], libraries: set[str]) -> list[str]:
    """Returns the modules that have the name of one of `libraries`."""
    return sorted(path for path in paths if Path(path).stem in libraries)


def libraries() -> set[str]:
    """Names of the standard library's modules, of our dependencies and of what we import from elsewhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [
        *project["project"]["dependencies"],
        *[name for extra in project["project"]["optional-dependencies"].values() for name in extra],
        *project["dependency-groups"]["dev"],
    ]
    names = {requirement.split(">")[0].split("=")[0].split("[")[0] for requirement in needed}
    names = {name.strip().replace("-", "_") for name in names}
    imported = {name.split(".")[0] for source in SOURCES.values() for name in imported_by(source)}
    # Scripts of bench/peers import each other by their bare names.
    ours = {*PACKAGES, "bench", "helpers", "tests"}
    ours |= {Path(path).stem for path in SOURCES if path.startswith("bench/peers/")}
    return {*sys.stdlib_module_names} | names | imported - ours


def sources_of(*folders: str) -> dict[str, str]:
    """Returns path and text of every module below `folders`."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


SOURCES = sources_of(*PACKAGES, "bench", "tests")
"""Every module of the repository: path: text"""


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_those_below_them(package):
    forbidden = {*PACKAGES} - PACKAGES[package] | {"."}
    found = {
        path: sorted({name.split(".")[0] or "." for name in imported_by(source)} & forbidden)
        for path, source in sources_of(package).items()
    }
    assert found
    assert {path: names for path, names in found.items() if names} == {}


def test_import_inside_a_function_is_seen():
    assert imported_by("def f():\n    from learner.loop import Learner") == {"learner.loop"}
    assert imported_by("from a import b, c", {"a", "a.b"}) == {"a", "a.b"}
    assert imported_by("from . import x") == {"."}


@pytest.mark.parametrize("package", PACKAGES)
def test_subpackages_import_only_lower_layers(package):
    assert upward_imports(sources_of(package), LAYERS[package]) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_layers_name_only_what_exists(package):
    parts = {part_of(path) for path in sources_of(package)} - {""}
    assert sorted(part for layer in LAYERS[package] for part in layer) == sorted(parts)


@pytest.mark.parametrize("package", PACKAGES)
def test_architecture_draws_the_layers(package):
    text = (ROOT / "docs" / "architecture.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"{package}: ")]
    drawn = line.removeprefix(f"{package}: ").split(" ← ")
    assert tuple(set(layer.strip("{}").split(", ")) for layer in drawn) == tuple(
        layer for layer in LAYERS[package] if layer != {"__main__"}
    )


def test_planted_upward_import_is_found():
    layers = ({"low"}, {"middle", "beside"}, {"high"})
    sources = {
        "p/__init__.py": "",
        "p/low/a.py": "def f():\n    from p.high import b",
        "p/middle/c.py": "from p.beside.d import x\nfrom p.low import a",
        "p/beside/d.py": "from p.beside.e import y",
        "p/beside/e.py": "",
        "p/high/b.py": "import p.low.a",
        "p/new.py": "",
    }
    sources["p/high/__init__.py"] = sources["p/low/__init__.py"] = ""
    assert upward_imports(sources, layers) == [
        "new is in no layer",
        "p.low.a imports p.high.b",
        "p.middle.c imports p.beside.d",
    ]


def test_no_modules_import_each_other_in_a_circle():
    assert circles(import_graph(SOURCES)) == []


def test_planted_circle_is_found():
    sources = {
        "p/a.py": "from p import b",
        "p/b.py": "def f():\n    import p.c",
        "p/c.py": "from p.a import x",
        "p/d.py": "import p.a",
    }
    assert circles(import_graph(sources)) == [{"p.a", "p.b", "p.c"}]


def test_no_import_is_relative():
    assert [path for path, source in SOURCES.items() if "." in imported_by(source)] == []


def test_no_folder_holds_more_than_twelve_modules():
    assert {folder: n for folder, n in crowded(SOURCES).items() if folder not in FULLER} == {}
    assert crowded(["p/__init__.py", "p/a.py", "p/b.py", "p/q/a.py"], most=1) == {"p": 2}


def test_no_module_is_named_after_a_library():
    ours = [path for path in SOURCES if not path.startswith(STAND_INS)]
    assert named_after(ours, libraries()) == []


def test_planted_library_name_is_found():
    paths = ["learner/torch.py", "learner/optim/build.py", "rollout/types.py"]
    assert named_after(paths, libraries()) == ["learner/torch.py", "rollout/types.py"]


def test_module_names_occur_once_or_have_a_reason():
    found = occurring_twice(path for path in SOURCES if not path.startswith("tests/"))
    assert sorted(found) == sorted(NAMES_THAT_OCCUR_TWICE)
    assert [*occurring_twice(["p/a/x.py", "p/b/x.py", "q/x.py", "p/y.py"])] == ["p/x"]


def test_compiled_loops_are_in_one_folder():
    compilers = {"numba", "llvmlite", "triton"}
    found = [
        path
        for path, source in sources_of(*PACKAGES).items()
        if {name.split(".")[0] for name in imported_by(source)} & compilers
    ]
    assert [path for path in found if not path.startswith("areal_q/kernels/")] == []
    assert len(found) >= 9


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_can_run_what_it_receives(package):
    found = [
        path
        for path, source in sources_of(package).items()
        if {name.split(".")[0] for name in imported_by(source)} & RUNS_WHAT_IT_READS
    ]
    assert found == []


def printed(code: str) -> str:
    """Returns what a fresh Python prints for `code`."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "module",
    ["areal_q.config", "areal_q.messages", "areal_q.errors", "areal_q.tasks", "areal_q.cli.app"],
)
def test_light_modules_import_nothing_heavy(module):
    code = f"import sys, {module}; print(*(m for m in {HEAVY} if m in sys.modules))"
    assert printed(code).split() == []


@pytest.mark.parametrize(
    "module",
    ["areal_q.runner.launcher", "areal_q.runner.live_view", "areal_q.observability.metrics_log"],
)
def test_the_launcher_needs_no_torch(module):
    assert printed(f"import sys, {module}; print('torch' in sys.modules)") == "False\n"


def test_areal_q_check_loads_nothing_that_it_does_not_need():
    code = (
        "import sys\nfrom rollout.commands.check import main\nfrom areal_q.system.command import run_command\n"
        "sys.argv = ['check', '--json']\n"
        "try:\n    run_command('check', main)\n"
        "except SystemExit as end:\n    unused = ('torch', 'numba', 'redis')\n"
        "    print(end.code, *(m for m in unused if m in sys.modules))"
    )
    assert printed(code).splitlines()[-1] == "0"
