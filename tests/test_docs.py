"""The pages: README lists each of them, links and paths lead somewhere, and lists are those of the code."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from helpers.paths import ROOT

from areal_q.config import LearnerConfig
from areal_q.system.run_dir import MAY_CHANGE_ON_RESUME

PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL_PAGES = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]
PACKAGES = ("areal_q", "buffer", "rollout", "learner")
TOP = "|".join([*PACKAGES, "bench", "configs", "docker", "docs", "requirements", "tests"])
PATH = re.compile(
    rf"`([\w.-]+/[\w./-]*\w\.(?:py|toml|md|ya?ml|csv|sh|js)|(?:{TOP})/(?:\w+/)*)(?:::\w+)?`"
)
"""A path in backticks: a file in a folder, or a folder of ours with a slash at its end"""
GLOSSARY = (
    "staleness", "version lag", "admission", "ticket", "group", "trajectory", "version", "epoch", "fork",
    "quarantine", "fidelity gap", "mismatch",
)  # fmt: skip


SOCKETS = re.compile(r"\bzmq\.(X?PUB|X?SUB|ROUTER|DEALER|PAIR|REQ|REP|PUSH|PULL)\b")
READ_BY = {
    "max_lag": "versions_kept",
    "versions_kept": "versions_kept",
    "max_outstanding": "max_outstanding",
}
"""Numbers of LearnerConfig, each with the property whose docstring names the files that read it"""


def product_files() -> dict[str, str]:
    """Returns path and text of every module of the packages."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_every_zeromq_socket_has_an_owner_on_the_page():
    rows = re.split(r"\n\n|\n(?=\|)", (ROOT / "docs" / "architecture.md").read_text())
    for path, text in product_files().items():
        told = " ".join(row for row in rows if f"`{path}`" in row)
        assert [kind for kind in SOCKETS.findall(text) if kind not in told] == [], path


def test_derived_numbers_name_all_their_readers():
    config = "areal_q/config/learner.py"
    read: dict[str, set[str]] = {name: set() for name in READ_BY.values()}
    for path, text in product_files().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in READ_BY and path != config:
                owner = ast.unparse(node.value).rpartition(".")[2]
                if owner in ("learner", "cfg", "_cfg"):
                    read[READ_BY[node.attr]].add(path)
    for name, paths in read.items():
        doc = getattr(LearnerConfig, name).__doc__
        assert set(re.findall(r"[\w/]+\.py", doc)) == paths, name


def test_readme_lists_every_page():
    listed = set(re.findall(r"\]\(docs/([a-z-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert listed == {page.name for page in PAGES}


def test_every_link_between_pages_leads_somewhere():
    broken = [
        f"{page.name}: {link}"
        for page in ALL_PAGES
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []


def lost_paths(text: str, beside: Path) -> list[str]:
    """Returns the paths in backticks that lead nowhere, from the root or from the folder `beside`."""
    named = {path for path in PATH.findall(text) if not path.endswith("/NAME.py")}
    return sorted(
        path for path in named if not ((ROOT / path).exists() or (beside / path).exists())
    )


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_every_path_in_backticks_exists(page):
    assert lost_paths(page.read_text(), page.parent) == []


def test_every_test_that_is_named_exists():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    there = {name for file in files for name in re.findall(r"\bdef (test_\w+)", file.read_text())}
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = {
        (place.name, name)
        for place in [*ALL_PAGES, *modules]
        for name in re.findall(r"\b(?<!/)test_\w+\b(?!\.py)", place.read_text())
    }
    assert len(named) > 50
    assert {(place, name) for place, name in named if name not in there} == set()


def test_path_that_leads_nowhere_is_found():
    text = "`learner/lineage.py`, `learner/loop.py`, `learner/loop.py::Learner`, `learner/quant/`, `train/lr`"
    assert lost_paths(text, ROOT / "docs") == ["learner/lineage.py", "learner/quant/"]


@pytest.mark.parametrize("word", GLOSSARY)
def test_glossary_defines_each_word_once(word):
    text = (ROOT / "docs" / "glossary.md").read_text()
    assert len(re.findall(rf"^\| {word} \|", text, re.MULTILINE)) == 1


def test_no_word_stands_twice_in_the_glossary():
    text = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    assert len(words) == len(set(words))


def drawn_folders(tree: str) -> set[str]:
    """Returns the folders of a drawn tree in which each is indented by two more than the one that holds it."""
    above: list[str] = []
    found = set()
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)/ ", line).groups()  # pyright: ignore
        above = [*above[: len(indent) // 2], name]
        found.add("/".join(above))
    return found


def test_architecture_draws_every_folder_of_the_packages():
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = text.partition("## The tree")[2].split("```")[1].removeprefix("text\n")
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    folders = {str(path.parent.relative_to(ROOT)) for path in modules}
    drawn = drawn_folders(tree)
    assert {folder for folder in drawn if folder.split("/")[0] in PACKAGES} == folders
    assert [folder for folder in drawn if not (ROOT / folder).is_dir()] == []


def test_architecture_keeps_the_three_ways_short():
    text = (ROOT / "docs" / "architecture.md").read_text()
    ways = {"token's log-prob": 12, "version": 10, "ticket": 12}
    for way, most in ways.items():
        section = text.partition(f"## The life of a {way}\n")[2].partition("\n## ")[0]
        assert 0 < len(re.findall(r"^\d+\. ", section, re.MULTILINE)) <= most


def test_troubleshooting_names_what_may_change_on_resume():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = text.partition("## What may change on `--resume`")[2].partition("All others")[0]
    named = re.findall(r"`([a-z_.*]+)`", section)
    assert [name.removesuffix("*") for name in named] == list(MAY_CHANGE_ON_RESUME)


def test_no_text_has_the_package_from_an_index():
    """But the one question of the FAQ that is about it."""
    texts = product_files() | {
        str(path.relative_to(ROOT)): path.read_text("utf-8")
        for path in (*ALL_PAGES, *(ROOT / "configs").rglob("*.toml"))
    }
    asks = re.compile(r"pip install\s+'?areal[-_]q")
    assert [name for name, text in texts.items() if asks.search(text)] == ["docs/faq.md"]


def test_the_image_s_wheel_has_what_it_is_made_of() -> None:
    """What pyproject.toml puts into the wheel is copied into the image, and not ignored there."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    copied = (ROOT / "docker" / "Dockerfile").read_text()
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    for source in (*wheel["packages"], *wheel["force-include"]):
        assert f"COPY {source} {source}\n" in copied and f"!{source}" in ignored, source
