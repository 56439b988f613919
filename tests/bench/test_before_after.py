"""The table of an earlier commit beside this one."""

import pytest

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
