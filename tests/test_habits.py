"""What CONTRIBUTING.md promises: commands, hooks, locked versions, subjects of commits, names of tests."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from helpers.paths import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LONGEST_TEST_NAME = 60
CHECKER = ROOT / ".ci" / "commit_subject.py"


def load_checker():
    spec = importlib.util.spec_from_file_location("commit_subject", CHECKER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements" / "dev.lock").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`make ([a-z-]+)`", text))
    assert {"setup", "check", "test", "run"} <= named <= targets


def test_names_of_tests_keep_to_their_length():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [name for file in files for name in re.findall(r"\bdef (test_\w+)", file.read_text())]
    assert len(names) > 1000
    assert [name for name in names if len(name) > LONGEST_TEST_NAME] == []


def test_no_wait_of_the_product_forgets_a_cancellation():
    """Before Python 3.12 asyncio.wait_for drops one that comes with the answer; asyncio.timeout does not."""
    files = [
        f for p in ("areal_q", "buffer", "learner", "rollout") for f in (ROOT / p).rglob("*.py")
    ]
    assert len(files) > 100
    assert [file for file in files if "asyncio.wait_for(" in file.read_text()] == []


def test_no_process_or_peer_of_a_test_has_its_own_limit():
    """A busy machine would break it; the test's own limit stretches."""
    limited = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        calls = (
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
        )
        limited += [
            f"{file.relative_to(ROOT)}:{call.lineno}"
            for call in calls
            if ast.unparse(call.func) in ("subprocess.run", "socket.create_connection")
            for given in call.keywords
            if given.arg == "timeout" and isinstance(given.value, ast.Constant)
        ]
    assert limited == []


def test_lock_file_holds_nothing_but_versions():
    text = (ROOT / "requirements" / "dev.lock").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


def test_lock_file_satisfies_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    versions = locked()
    wrong = [
        text
        for text in needed
        if not (found := Requirement(text)).specifier.contains(
            versions.get(canonicalize_name(found.name), "0")
        )
    ]
    assert wrong == []


def test_hooks_are_local_and_run_what_exists():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "whitespace", "commit-subject"}


@pytest.mark.parametrize(
    "message",
    [
        "learner: skip empty groups",
        "README, bench: give the new figures\n\nThe old ones were of another machine.",
        "live view: draw 40 columns\n# Please enter the commit message",
        "Merge branch 'x'",
    ],
)
def test_good_commit_message_is_accepted(message):
    assert load_checker().fault(message) == ""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", "the subject is not like"),
        ("skip empty groups", "the subject is not like"),
        ("learner: skip empty groups.", "the subject is not like"),
        ("learner: " + "x" * 64, "the subject has 73 characters"),
        ("learner: skip empty groups\nbecause", "no blank line"),
    ],
)
def test_bad_commit_message_is_refused(message, reason, tmp_path: Path):
    file = tmp_path / "message"
    file.write_text(message)
    done = subprocess.run([sys.executable, CHECKER, file], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"commit message: {reason}")
