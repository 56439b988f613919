"""Docstrings are sentences that stand without the name they belong to, those below fields and constants too."""

import ast
import re
from collections.abc import Iterator

import pytest
from helpers.paths import ROOT

FRAGMENT = re.compile(r"\W*(Of|That|To|As|With|Where|And|Who|Whose|Which|Whether|From|By)\b")
"""A text that begins so goes on from a name, or from the line above."""


def fragments(source: str) -> Iterator[str]:
    """Yields "LINE: TEXT" for each docstring that begins in the middle of a sentence."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if FRAGMENT.match(text):
                    yield f"{statement.lineno}: {' '.join(text.split())}"


@pytest.mark.parametrize("package", ["areal_q", "buffer", "learner", "rollout"])
def test_docstrings_begin_a_sentence(package: str):
    found = [
        f"{path.relative_to(ROOT)}:{fragment}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for fragment in fragments(path.read_text("utf-8"))
    ]
    assert found == []


FILES_OF_USERS = {"buffer.py", "random.py", "mine.py"}
"""Names that areal_q/system/processes.py tells ours from, and that of a user's own code in examples"""


@pytest.mark.parametrize("package", ["areal_q", "buffer", "learner", "rollout"])
def test_a_file_that_is_named_without_its_folder_is_near(package: str):
    """It is a module of the same subpackage; one of another is named by its path."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        within = ROOT / package / path.relative_to(ROOT / package).parts[0]
        near = {p.name for p in (within if within.is_dir() else ROOT / package).rglob("*.py")}
        for name in re.findall(r"(?<![\w/.])[a-z_0-9]+\.py\b", path.read_text("utf-8")):
            if name not in near | FILES_OF_USERS:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    assert found == []


def test_planted_fragment_is_found():
    source = '"""Sizes."""\nTOTAL = 1\n"""Of all ranks."""\ndef f():\n    """Offers a seat."""\n'
    assert list(fragments(source)) == ["3: Of all ranks."]
