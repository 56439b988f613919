"""Code of the user's own: how it is found, hashed, and named where it fails."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_q.errors import TaskError
from areal_q.plugins import digest_of, load_function, user_code

FILES = {
    "mine.py": "import json\nimport beside\nfrom pack import inner\n\n\n"
    "def reward(x):\n    return beside.double(x) + inner.ONE\n\n\ndef other():\n    return 'other'\n",
    "beside.py": "def double(x):\n    from deep import TWO\n    return TWO * x\n",
    "deep.py": "TWO = 2\n",
    "pack/__init__.py": "",
    "pack/inner.py": "from .more import ONE\n",
    "pack/more.py": "ONE = 1\n",
    "pack/unused.py": "",
    "unused.py": "",
}
"""A file that imports its neighbours: at once, in a function, from a package, and relatively."""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    # Other tests have loaded files of these names from their own directories.
    others = tmp_path.parents[1]
    ours = [place for place in sys.path if not Path(place).is_relative_to(others)]
    monkeypatch.setattr(sys, "path", ours)
    for name in FILES:
        monkeypatch.delitem(sys.modules, Path(name).parts[0].removesuffix(".py"), raising=False)
    before = {*sys.modules}
    yield tmp_path / "mine.py"
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("{dir}/mine.py", "reward"),
        ("mine.py", "reward"),
        ("mine.py:other", "other"),
        ("mine:other", "other"),
        ("pack.mine", "reward"),
        ("pack.mine:other", "other"),
    ],
)
def test_a_path_names_a_file_or_a_module_and_a_function(mine: Path, path: str, found: str):
    (mine.parent / "pack" / "mine.py").write_text(FILES["mine.py"])
    assert load_function(path.format(dir=mine.parent), "reward").__name__ == found


@pytest.mark.parametrize(
    ("changed", "other"),
    [
        *((name, True) for name in ("mine.py", "beside.py", "deep.py")),
        *((name, True) for name in ("pack/__init__.py", "pack/inner.py", "pack/more.py")),
        *((name, False) for name in ("unused.py", "pack/unused.py", "new.py")),
    ],
)
def test_a_digest_is_of_all_that_a_file_imports(mine: Path, changed: str, other: bool):
    before = digest_of(str(mine))
    file = mine.parent / changed
    file.write_text("# changed\n" + FILES.get(changed, ""))
    assert (digest_of(str(mine)) != before) == other


def test_a_digest_is_the_same_in_another_place(
    mine: Path, tmp_path_factory: pytest.TempPathFactory
):
    before = digest_of("mine.py")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "there"
    mine.parent.rename(elsewhere)
    assert digest_of(str(elsewhere / "mine.py")) == before
    (elsewhere / "mine.py").rename(elsewhere / "renamed.py")
    assert digest_of(str(elsewhere / "renamed.py")) != before


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("gone.py", "", "gone.py: no such Python file"),
        ("no.such", "", "no.such: no such Python file, and no module that can be imported"),
        ("mine.py", "def reward(:", "mine.py:1: SyntaxError"),
        ("mine.py", "import deep\n\n1 / 0", "mine.py:3: ZeroDivisionError: division by zero"),
        ("mine.py", "import beside\n\nbeside.double(None)", "beside.py:3: TypeError: unsupported"),
        ("mine.py", "import json\njson.loads('{')", "mine.py:2: JSONDecodeError: Expecting"),
        ("pack.inner", "", "inner: no function 'reward'"),
        (
            "mine",
            "import missing_library",
            "mine.py:1: ModuleNotFoundError: No module named 'missing",
        ),
        ("mine.py", "reward = 3", "mine.py: no function 'reward'"),
        ("mine.py:loss", "def reward(): pass", "mine.py: no function 'loss'"),
    ],
)
def test_what_cannot_be_loaded_is_named_by_the_user_s_line(
    mine: Path, path: str, source: str, said: str
):
    mine.write_text(source)
    with pytest.raises(TaskError) as raised:
        load_function(path, "reward")
    assert said in str(raised.value)


def test_an_error_in_a_call_names_the_user_s_last_line(mine: Path):
    reward = load_function("mine.py", "reward")
    with pytest.raises(TaskError, match=r"beside\.py:3: TypeError"), user_code("mine.py"):
        reward(None)
