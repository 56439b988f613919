"""The blocks of code on the pages: settings load, commands are ones that there are, Python runs.

A block without a language is commands, one with ```text a drawing or what a command prints. YAML is built by
tests/deploy. The commands of areal-q are run on a small model, but for those of NOT_RUN.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from helpers.paths import ROOT

from areal_q.cli.app import app
from areal_q.config import load
from areal_q.models import Decoder, DecoderConfig, init_weights, save_decoder
from areal_q.tasks import load_tokenizer

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "docker": "containers: tests/deploy",
    "dc": "docker compose with a file of its own",
    "kubectl": "a cluster: tests/deploy",
    "for": "a loop around kubectl",
    "~/.local/share/areal-q/verifiers/bin/python": "of verifiers: tests/environments",
    "do": "the same",
    "done": "the same",
    "make": "recipes of the Makefile",
    "pip": "fetches packages",
    ".venv/bin/pip": "the same",
    "hf": "fetches a model",
    "openssl": "keys of a cluster",
    "cp": "files of that",
    "chmod": "the same",
    "chown": "the same",
    "tar": "reads what areal-q fetch writes",
    ".": "the environment of the tests is another one",
    "python": "benchmarks, which take minutes, and our torchrun: tests/distributed",
    ".venv/bin/python": "the same",
    ".venv/bin/pytest": "tests",
    "bench/gpu.sh": "a GPU",
}
"""Programs of the pages that are not run here, each with the reason"""
NOT_RUN = {
    "setup": "fetches an environment",
    "launch": "a cluster: tests/launch",
    "track": "packages of trackers: tests/observability",
    "rollout": "a worker of a run that goes on",
    "learner": "the learner of one",
    "relay": "between the two: tests/weight_sync",
    "weights": "asks a learner that goes on: tests/weight_sync",
    "watch": "shows what goes on: tests/cli",
    "--follow": "the same",
    "--watch": "the same",
    "--serve": "serves until Ctrl-C",
    "configs/quickstart-vllm.toml": "an engine of another environment: tests/engines",
    "configs/quickstart-sglang.toml": "the same",
    "rollout.engine.type=sglang": "the same",
    "learner.device=cuda": "a GPU",
    "0.2..0.8": "problems that a model solves at times: tests/evaluation",
    "adder.toml": "agents: tests/openai_server/test_agents_page.py",
    "runs/adder": "the same",
    "asker.toml": "the same",
    "judged.toml": "a judge: tests/tasks/test_judging_page.py",
    "rollout.serve=8000": "a port that may be taken: tests/openai_server",
    "aime": "32 long answers to a problem: tests/evaluation",
}
"""Words of commands that are not run here, each with the reason"""
FRAGMENTS = {
    "agents.md": "tests/openai_server/test_agents_page.py runs the files",
    "api.md": "tests/api has the examples as they stand",
    "commands.md": "of libraries that are not installed",
    "endpoint.md": "tests/openai_server has whole episodes",
    "reference.md": "signatures: tests/api/test_reference_page.py",
    "verifiers.md": "of a library that is not installed",
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


FEWER = [
    *(
        "steps=2",
        "warmstart.steps=2",
        "learner.groups=2",
        "learner.group_size=2",
        "eval.problems=2",
    ),
    *("rollout.sampling.max_tokens=8", "learner.minibatches=1", "checkpoint.every=1"),
]
"""Settings of every run that a page begins"""
MEANT = {
    "runs/NAME": "runs/quickstart", "NAME": "runs/quickstart", "RUN": "runs/quickstart", "RUN2": "runs/other",
    "RUN3": "runs/demo", "SEED0": "runs/quickstart", "SEED1": "runs/other", "SEED2": "runs/demo",
    "MODEL": "runs/quickstart/hf", "CONFIG": "own.toml", "sums": "begun", "runs/capitals": "runs/quickstart",
    "reward.path=mine.py": "reward.path=terse.py",
    "40": "1", "80": "3", "50": "2", "709": "8", "840": "1", "845": "3",
}  # fmt: skip
"""What stands for the reader's own in a command, and for the numbers of a long run"""


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
    if block.page not in FRAGMENTS and "areal_q.train(" not in block.text:  # which tests/api runs
        exec(compile(block.text, str(block), "exec"), {"__name__": "page"})


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Path) -> Path:
    """A directory with what the reader of a page has there: runs, a model, data, and the files of the pages."""
    desk = tmp_path_factory.mktemp("desk")
    model = Decoder(DecoderConfig(family="llama", vocab_size=260, width=32, layers=1, heads=2, kv_heads=1,
                                  head_dim=16, mlp=64, max_positions=4096))  # fmt: skip
    init_weights(model, 0)
    for name in ("DIR", "qwen"):
        save_decoder(model, desk / name, load_tokenizer(byte_tokenizer))
    for block in blocks("python", "toml"):
        if named := re.match(r"# (\w+\.(py|toml))$", block.text.partition("\n")[0]):
            (desk / named[1]).write_text(block.text)
    task = 'type = "jsonl", path = "train.jsonl", answer = "sum", heldout = 0.25'
    (desk / "own.toml").write_text(f'name = "own"\ntask = {{ {task} }}\n')
    rows = [
        {"prompt": f"{n}+2=", "sum": f"{n + 2}", "question": f"{n}+2?", "level": n,
         "answer": f"<<{n}+2={n + 2}>> #### {n + 2}"}
        for n in range(40)
    ]  # fmt: skip
    for name in ("train", "medium"):
        (desk / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (chats,) = (block.text for block in blocks("json") if block.page == "sft.md")
    said = (chats.replace("2+2", f"{n}+2") for n in range(40))
    (desk / "chats.jsonl").write_text("".join(said))
    small = [
        "model.width=32",
        "model.layers=1",
        "model.mlp=64",
        "steps=4",
        "eval.sets.hard.samples=2",
    ]
    areal_q(
        desk,
        "run",
        "quickstart",
        *FEWER,
        *small,
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "eval.every=2",
    )
    for name in ("other", "demo"):
        shutil.copytree(desk / "runs" / "quickstart", desk / "runs" / name)
    return desk


def areal_q(cwd: Path, *words: str) -> None:
    """Runs a command, which may end with 1 if it is one that looks for faults."""
    command = [sys.executable, "-P", "-m", "areal_q", *words]
    done = subprocess.run(command, cwd=cwd, input=b"y\n", capture_output=True)
    well = (0, 1) if words[0] in ("check", "doctor", "status") else (0,)
    assert done.returncode in well, f"{words}: {done.stderr.decode()}"


def to_run(block: Block) -> list[list[str]]:
    """Returns the commands of a block that are run, as they would be typed at the desk."""
    found = [w[1:] for w in lines(block) if w[0] == "areal-q" and not NOT_RUN.keys() & {*w[1:]}]
    for words in found:
        words[:] = [MEANT.get(word, word) for word in words]
        words[:] = [word if word != "DIR" else f"out-{words[0]}" for word in words]
        if words[0] in ("run", "sft"):
            words += (
                ["steps=5"] if "--resume" in words else FEWER if words[0] == "run" else ["steps=2"]
            )
    return found


@pytest.mark.pages
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", [*filter(to_run, blocks(""))], ids=str)
def test_the_commands_of_the_pages_do_not_fail(desk: Path, tmp_path: Path, block: Block):
    here = shutil.copytree(desk, tmp_path / "desk")
    for words in to_run(block):
        areal_q(here, *words)
