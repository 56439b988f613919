"""What `pip install areal-q` gives: the wheel with the packages that it asks for, and nothing of the clone."""

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from helpers.commands import areal_q
from helpers.paths import ROOT
from packaging.requirements import Requirement

from areal_q.observability.metrics_log import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("hatchling", reason="hatchling is not installed: make setup")

PACKAGES = ["areal_q", "buffer", "learner", "rollout"]
MOVED = {"configs/": "areal_q/configs/", "tests/sglang_cpu/": "areal_q/sglang_cpu/"}
"""What else the wheel has, and where"""
SMALL = ["steps=2", "warmstart.steps=20", "learner.groups=8", "eval.problems=16"]


def output(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, by the build backend that is installed here."""
    place = tmp_path_factory.mktemp("dist")
    alone = ["--no-deps", "--no-build-isolation", "--no-index"]
    output(sys.executable, "-m", "pip", "wheel", "-q", *alone, "--wheel-dir", place, ".")
    [found] = place.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and, as links into ours, what pip would install with it:
    no extras, nothing for developers, not the clone."""
    root = tmp_path_factory.mktemp("environment")
    output(sys.executable, "-m", "venv", "--without-pip", root)
    python = root / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "-q", "--python", python]
    output(*pip, "install", "--no-deps", "--no-index", wheel)
    packages = Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    [ours] = Distribution.discover(name="areal-q", path=[str(packages)])
    for one in needed(ours.requires or []):
        for name in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            (packages / name).symlink_to(str(one.locate_file(name)))
    return python


def needed(requirements: Sequence[str]) -> list[Distribution]:
    """Returns the installed distributions that these requirements ask for, and those that they do."""
    asked, met = [(text, "") for text in requirements], set()
    found: dict[str, Distribution] = {}
    while asked:
        text, extra = asked.pop()
        one = Requirement(text)
        if (text, extra) in met or (one.marker and not one.marker.evaluate({"extra": extra})):
            continue
        met.add((text, extra))
        known = distribution(one.name)
        found[known.name] = known
        asked += [(text, extra) for extra in ("", *one.extras) for text in known.requires or []]
    return list(found.values())


def test_the_wheel_has_every_file_that_git_has(wheel: Path) -> None:
    """Templates, settings, the page of the report: what some suffix or setting leaves out is missed at once."""
    tracked = output("git", "ls-files", *PACKAGES, *MOVED).splitlines()
    for here, there in MOVED.items():
        tracked = [there + f.removeprefix(here) if f.startswith(here) else f for f in tracked]
    with zipfile.ZipFile(wheel) as archive:
        assert sorted(set(tracked) - set(archive.namelist())) == []


def test_an_installed_wheel_learns_without_the_clone(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a directory of its own: help, checks, a template, two steps of it and their report."""
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def command(*words: str) -> str:
        return areal_q(tmp_path, *words, command=[str(python.with_name("areal-q"))])

    where = output(python, "-P", "-c", f"import {', '.join(PACKAGES)}; print(areal_q.__file__)")
    assert Path(where).is_relative_to(python.parents[1])
    assert "plan" in command("--help")
    command("check")
    command("init", "sums", "--template", "text")
    command("check", "sums.toml")
    command("run", "sums.toml", *SMALL)
    steps = [r for r in read_metrics(tmp_path / "runs/sums/metrics.jsonl") if r["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2]
    command("report", "runs/sums")
