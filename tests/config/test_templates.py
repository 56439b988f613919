"""`areal-q init`: two files that begin a run, and that learn."""

from pathlib import Path

import pytest
from helpers.commands import areal_q, refused, run_here

from areal_q.cli.init import MEANINGS, main
from areal_q.config import Python, load
from areal_q.config.load import TEMPLATES, shipped, shipped_names
from areal_q.observability.metrics_log import read_metrics
from areal_q.tasks import build_task


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("template", MEANINGS)
def test_a_template_is_two_files_that_belong_together(tmp_path: Path, template: str):
    done = run_here("init", main, "in/my.run", "--template", template)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == ["my.run.py", "my.run.toml"]
    commands = ["areal-q check in/my.run.toml", "areal-q run in/my.run.toml"]
    assert done.stdout.splitlines()[-2:] == commands
    assert "NAME" not in (tmp_path / "in" / "my.run.toml").read_text()
    run = load(Path("in/my.run.toml"))
    assert run.name == "my.run"
    task = build_task(run.task)
    assert not {p.prompt for p in task.train} & {p.prompt for p in task.heldout}
    assert len(task.heldout) >= run.eval.problems / 2


@pytest.mark.parametrize("name", ["RENAME", "NAME.py", "NAME/NAME", 'a "NAME.toml" \\ é/x'])
def test_a_name_stays_whatever_the_templates_call_theirs(name: str):
    done = run_here("init", main, name)
    assert (done.returncode, done.stderr) == (0, "")
    run = load(Path(f"{name}.toml"))
    assert run.name == Path(name).name and Path(f"{name}.py").exists()
    assert isinstance(run.task, Python) and run.task.path == f"{name}.py"


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "a.py").write_text("mine")
    refused(run_here("init", main, "a"), "a.py: is there already")
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]
    assert (tmp_path / "a.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a", "--template", "image"], "--template image: none of text, math, agent"),
        (["a b", "--template", "text"], "name = 'a b'"),
        (["."], "name = ''"),
        (["/"], "name = ''"),
        (["file/a"], "file"),
    ],
)
def test_a_name_or_template_that_cannot_be_is_one_line(
    tmp_path: Path, arguments: list[str], complaint: str
):
    (tmp_path / "file").write_text("")
    refused(run_here("init", main, *arguments), complaint)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_templates_are_not_offered_as_configurations():
    assert sorted(p.stem for p in (shipped() / TEMPLATES).glob("*.toml")) == sorted(MEANINGS)
    assert not [name for name in shipped_names() if TEMPLATES in name]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("template", MEANINGS)
def test_a_template_runs(tmp_path: Path, template: str):
    """Its first steps: all of them, in which it learns, take too long for every suite."""
    run_here("init", main, "mine", "--template", template)
    short = ["steps=3", "warmstart.steps=20", "eval.problems=32"]
    areal_q(tmp_path, "run", "mine.toml", *short)
    records = read_metrics(tmp_path / "runs" / "mine" / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3]
