"""The table of an earlier commit beside this one."""

import subprocess

import pytest

from bench import before_after
from bench.before_after import Figure, Tree, rows_of


def test_more_steps_and_fewer_seconds_are_both_better():
    found = {
        "steps/s": {"old": Figure("steps/s", 2.0, True), "new": Figure("steps/s", 3.0, True)},
        "s": {"old": Figure("s", 2.0), "new": Figure("s", 4.0)},
        "only now": {"new": Figure("only now", 1.0)},
    }
    assert rows_of(found, ["old", "new"]) == [
        ["steps/s", "2", "3", "1.5"],
        ["s", "2", "4", "0.5"],
        ["only now", "–", "1", "–"],
    ]


@pytest.mark.parametrize(
    ("body", "fails"), [("print('done')", False), ("raise SystemExit(2)", True)]
)
def test_a_tree_runs_its_own_command(tmp_path, body, fails):
    (tmp_path / "pyproject.toml").write_text('[project.scripts]\nareal-q = "ours:main"\n')
    (tmp_path / "ours.py").write_text(f"def main():\n    {body}\n")
    assert (Tree(tmp_path, tmp_path).run("--help") is None) == fails


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such-commit"], "no-such-commit: no such commit here"),
        (["HEAD"], "HEAD is this tree: there is nothing to compare"),
        (["HEAD", "--steps", "21"], "--steps: at least 22"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(args, said, monkeypatch, capsys):
    head = ["git", "rev-parse", "--short", "HEAD"]
    here = subprocess.run(head, cwd=before_after.ROOT, capture_output=True, text=True, check=True)
    monkeypatch.setattr(before_after, "commit", here.stdout.strip)
    monkeypatch.setattr("sys.argv", ["before_after", *args])
    with pytest.raises(SystemExit) as stopped:
        before_after.main()
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
