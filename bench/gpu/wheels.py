"""The wheels that a machine with a GPU and no package index lacks for bench/gpu.sh, and how large they are.

    python -m bench.gpu.wheels                  # for the packages of IMAGE; into .wheels, for gpu.sh
    python -m bench.gpu.wheels --list           # their names alone
    python -m bench.gpu.wheels --image FILE     # for those of FILE, a `pip list --format freeze`

Run where areal-q is installed: what needs what, and in which versions, is taken from there. Exit code 1 if a
package has no wheel for that Python, or all together are larger than --limit.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.common import ROOT

IMAGE = (
    "torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "aiohttp", "numba", "prometheus-client", "psutil",
    "pyarrow", "rich", "safetensors", "tensorboard", "typer", "uvloop",
)  # fmt: skip
"""Packages that the image has, with all that they need"""
PYTHON = "3.12"
GLIBC = (17, 24, 27, 28, 31, 34)
"""Of pip's tags manylinux_2_N, each of which matches itself alone"""


def needed(names: Iterable[str], python: str = PYTHON) -> dict[str, str]:
    """Returns the packages that `names`, written as requirements, need in turn, themselves included, with the
    versions that are installed here; "" for one that is not."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    ahead = [Requirement(name) for name in names]
    while ahead:
        one = ahead.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = version(name)
            ahead += _requirements(name, extras, python)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _requirements(name: str, extras: Iterable[str], python: str) -> Iterator[Requirement]:
    there = {"python_version": python, "python_full_version": f"{python}.0"}
    for text in requires(name) or []:
        one = Requirement(text)
        marker = one.marker
        if not marker or any(marker.evaluate(there | {"extra": e}) for e in ("", *extras)):
            yield one


def missing(image: Iterable[str]) -> dict[str, str]:
    """Returns what areal-q needs beyond the packages of `image` and their needs, by name, with versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = needed(image)
    own = {canonicalize_name(Requirement(x).name): x for x in project["dependencies"]}
    asked = [x for name, x in own.items() if name not in there]
    return {name: at for name, at in sorted(needed(asked).items()) if name not in there}


def fetch(packages: dict[str, str], to: Path, python: str = PYTHON) -> list[str]:
    """Downloads a wheel of each of `packages` to `to`; returns pip's last words on each that has none."""
    tags = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    tags += [f"--platform=manylinux{n}_x86_64" for n in ("1", "2010", "2014")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *tags, "-d", str(to)]
    wheels = [f"{name}=={at}" if at else name for name, at in packages.items()]

    def said(*some: str) -> str:
        done = subprocess.run([*command, *some], capture_output=True, text=True)
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        return lines[-1] if done.returncode else ""

    return [words for one in wheels if (words := said(one))] if said(*wheels) else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.wheels")
    parser.add_argument(
        "--image", type=Path, help="a file with a package of the image on each line"
    )
    parser.add_argument("--to", type=Path, default=ROOT / ".wheels", help="default: .wheels")
    parser.add_argument("--list", action="store_true", help="fetch nothing")
    parser.add_argument(
        "--limit", type=float, default=58.0, help="MiB; default: 58, beside the repository"
    )
    args = parser.parse_args()
    image = args.image.read_text().splitlines() if args.image else IMAGE
    packages = missing(image)
    if args.list:
        print(*(f"{name}=={at}" if at else name for name, at in packages.items()), sep="\n")
        return
    lacking = fetch(packages, args.to)
    files = sorted(args.to.glob("*.whl"), key=lambda file: -file.stat().st_size)
    for file in files:
        print(f"{file.stat().st_size / 2**20:7.2f} MiB  {file.name}")
    total = sum(file.stat().st_size for file in files) / 2**20
    print(f"{total:7.2f} MiB  {len(files)} wheels in {args.to}")
    for line in lacking:
        print(line, file=sys.stderr)
    if total > args.limit:
        print(f"more than the {args.limit:g} MiB that may travel", file=sys.stderr)
    sys.exit(bool(lacking) or total > args.limit)


if __name__ == "__main__":
    main()
