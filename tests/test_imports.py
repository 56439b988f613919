"""The shape of the house: areal_q ← buffer ← {rollout, learner}, and light modules stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "areal_q": {"areal_q"},
    "buffer": {"areal_q", "buffer"},
    "rollout": {"areal_q", "buffer", "rollout"},
    "learner": {"areal_q", "buffer", "learner"},
}
"""A package and those of ours that it may import"""
HEAVY = ("torch", "zmq", "vllm", "transformers", "matplotlib", "redis")


def imports_of(source: str) -> set[str]:
    """Top-level names of everything imported anywhere in a module, inside functions included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A relative import is refused below by its own name.
            names.add("." if node.level else (node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package):
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    forbidden = set(MAY_IMPORT) - MAY_IMPORT[package] | {"."}
    found = {
        str(module.relative_to(ROOT)): sorted(imports_of(module.read_text()) & forbidden)
        for module in modules
    }
    assert {module: names for module, names in found.items() if names} == {}


def test_the_check_itself_sees_an_import_inside_a_function():
    assert imports_of("def f():\n    from learner.loop import Learner") == {"learner"}
    assert imports_of("from . import x") == {"."}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_module_can_run_what_it_receives(package):
    found = {
        str(module.relative_to(ROOT))
        for module in (ROOT / package).rglob("*.py")
        if imports_of(module.read_text()) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    }
    assert found == set()


@pytest.mark.parametrize(
    "module",
    ["areal_q.config", "areal_q.messages", "areal_q.errors", "areal_q.tasks", "areal_q.cli.app"],
)
def test_light_modules_import_nothing_heavy(module):
    code = f"import sys, {module}; print(*(m for m in {HEAVY} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


@pytest.mark.parametrize(
    "module", ["areal_q.cli.launcher", "areal_q.cli.live_view", "areal_q.observability.metrics_log"]
)
def test_the_launcher_needs_no_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"
