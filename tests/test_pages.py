"""The blocks of code on the pages: settings load, commands are ones that there are, Python runs.

A block without a language is commands, one with ```text a drawing or what a command prints. YAML is built by
tests/deploy.
"""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from helpers.paths import ROOT

from areal_q.cli.app import app
from areal_q.config import load

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "docker": "containers: tests/deploy",
    "dc": "docker compose with a file of its own",
    "kubectl": "a cluster: tests/deploy",
    "for": "a loop around kubectl",
    "do": "the same",
    "done": "the same",
    "torchrun": "several processes: tests/distributed",
    "make": "recipes of the Makefile",
    "pip": "fetches packages",
    "hf": "fetches a model",
    "openssl": "keys of a cluster",
    "cp": "files of that",
    "chmod": "the same",
    "chown": "the same",
    "tar": "reads what areal-q fetch writes",
    ".": "the environment of the tests is another one",
    "python": "benchmarks, which take minutes",
    ".venv/bin/python": "the same",
    ".venv/bin/pytest": "tests",
    "bench/gpu.sh": "a GPU",
}
"""Programs of the pages that are not run here, each with the reason"""
FRAGMENTS = {
    "agents.md": "tests/openai_server/test_agents_page.py runs the files",
    "api.md": "tests/api has the examples as they stand",
    "commands.md": "of libraries that are not installed",
    "endpoint.md": "tests/openai_server has whole episodes",
    "reference.md": "signatures: tests/api/test_reference_page.py",
    "report.md": "of a library that is not installed",
}
"""Pages whose Python is not run here, each with the reason"""
WHOLE = ["model={type='pretrained', path='DIR'}", "task={type='jsonl', path='x.jsonl'}"]
"""Settings that those of a command are on top of, where its configuration is the reader's own"""
NEEDED = {
    "[reward]\ncorrect": [
        *(WHOLE[0], "rollout.sampling.max_tokens=20480", "learner.microbatch_tokens=32768")
    ],
    "[task.chat]": [*WHOLE, "task.template=chat"],
    "": ["model={type='pretrained', path='DIR'}"],
}
"""Settings that the tables of a page take for granted, by how its block begins"""


class Block(NamedTuple):
    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*kinds: str) -> list[Block]:
    """Returns the blocks in these languages, in the order of the pages."""
    return [
        Block(page.name, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for page in PAGES
        for text in [page.read_text("utf-8")]
        for found in BLOCK.finditer(text)
        if found[1] in kinds
    ]


def lines(block: Block) -> Iterator[list[str]]:
    """Yields the words of each command of a block, without the variables before it."""
    for line in re.sub(r"…|[\[\]]|\\\n", " ", block.text).splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|>")
        words.whitespace_split = True
        for ends, one in groupby(words, lambda word: word in (";", "&&", "|", ">")):
            command = [*dropwhile(lambda word: re.match(r"[A-Z_]+=", word), one)]
            if command and not ends:
                yield command


def of_areal_q(words: list[str]) -> list[str]:
    """Returns what follows `areal-q` in a command, also where a program that is not kubectl begins it."""
    ours = "areal-q" in words and words[0] != "kubectl"
    return words[words.index("areal-q") + 1 :] if ours else []


def test_every_block_has_a_language_that_is_read():
    texts = [page.read_text("utf-8") for page in PAGES]
    kinds = {kind for text in texts for kind, _ in BLOCK.findall(text)}
    assert kinds <= {"", "text", "toml", "python", "yaml", "json"}
    fences = sum(len(re.findall("^```", text, re.MULTILINE)) for text in texts)
    assert fences == 2 * len(blocks(*kinds))
    programs = {words[0] for block in blocks("") for words in lines(block)}
    assert programs == {"areal-q", *PROGRAMS}


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_the_settings_of_the_pages_are_settings(block: Block, tmp_path: Path):
    (tmp_path / "own.toml").write_text(block.text)
    needed = next(more for begins, more in NEEDED.items() if block.text.startswith(begins))
    own = re.search(r"^(\[model\]|model =)", block.text, re.MULTILINE)
    load(tmp_path / "own.toml", [] if own else needed)


@pytest.mark.parametrize("block", blocks(""), ids=str)
def test_the_commands_of_the_pages_are_commands(block: Block):
    root: Any = typer.main.get_command(app)
    for words in filter(None, map(of_areal_q, lines(block))):
        above = root.make_context("areal-q", words[:1])
        root.get_command(above, words[0]).make_context(words[0], words[1:], parent=above)
        given = [word for word in words if re.match(r"(?!a\.b)\w+\.[\w.]+=", word)]
        known = [word for word in words if word.startswith("configs/") or word == "quickstart"]
        load(known[0] if known else None, given if known else [*WHOLE, *given])


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_the_rows_of_the_pages_are_json(block: Block):
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_the_python_of_the_pages_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    if block.page not in FRAGMENTS:
        exec(compile(block.text, str(block), "exec"), {"__name__": "page"})
